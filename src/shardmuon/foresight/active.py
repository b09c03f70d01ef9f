"""The parameters that work on one token, 6 FLOPs of forward and backward each: a token takes a few of many experts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from shardmuon.routing.roles import Place, find_places, is_table

Source = Mapping[str, Any] | object  # a configuration: config.json, or an object with such attributes

# What configurations and modules call the experts of one token: transformers', Megatron's, torchtitan's, DeepSeek's.
# `top_k` alone is a sampler's, too, so it counts only in modules and in what a configuration says of experts.
_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "num_activated_experts"),
    *("n_activated_experts", "experts_per_token", "experts_per_tok", "moe_top_k", "moe_topk", "moe_k"),
    *("top_k_experts", "moe_router_topk", "router_topk", "moe_num_active_experts"),
)
_PER_TOKEN_NEAR = (*_PER_TOKEN, "top_k", "topk")
_NUM = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts", "n_experts")
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")  # configurations inside of one
_OF_EXPERTS = ("ffn_config", "moe_config", "moe_args", "moe")
_BY_TYPE = {"switch_transformers": 1, "nllb-moe": 2}  # model_type -> what its configuration does not say
_EXPERTS = re.compile(r"(routed_|local_|moe_)?experts")
_NUMBERED = re.compile(r"(|expert_?|weight|bias)(\d+)")


@dataclass(frozen=True, slots=True)
class Active:
    """The parameters that work on one token.

    Attributes:
        elements: Number of elements of weights; embeddings that are only looked up are left out.
        source: Where that number is from, for people; "" without experts, where it is all of them.
    """

    elements: int
    source: str = ""


def given(elements: float) -> Active:
    """The number that a user gives.

    Raises:
        ValueError: The value is no number of elements.
    """
    if isinstance(elements, (bool, str)) or not 1 <= elements < math.inf:
        raise ValueError(f"active_params={elements!r} must be a number of parameters of at least 1, such as 3e9")
    return Active(round(elements), "as given")


def active_of(module: nn.Module, configs: Sequence[Source] = ()) -> Active:
    """Count what works on one token: all weights, of stacks and lists of E experts k / E, shared experts whole.

    Args:
        module: The model.
        configs: What may say how many experts a token takes, beside the model's own `config` and the modules around
            the experts. The first that says it counts.
    """
    sources = [source for config in (*configs, getattr(module, "config", None)) for source in _with_inner(config)]
    said = _Said(
        [one for source in sources for one in _per_token_of(*source)], [n for s, _ in sources for n in _nums(s)]
    )
    places = find_places(module)
    numbers = _numbers(held[0].name for _, held in places)
    total, unknown = Fraction(0), list[int]()
    found: dict[str, None] = {}
    for param, held in places:
        if all(is_table(place.module) for place in held):
            continue
        num = _num_experts(held[0], param, numbers, said)
        share, text = (Fraction(1), "") if num is None else _share(held[0], num, said)
        total += param.numel() * share
        if text:
            found[text] = None
        elif num is not None:
            unknown.append(num)
    total += _tied_apart(places, [source for source, _ in sources])
    if unknown:
        many = f"all {max(unknown)} experts" if max(unknown) else "all experts"
        why = "nothing says how many of them a token takes. Give --active-params (active_params=)"
        return Active(round(total), f"{many} are counted as active, as {why}")
    return Active(round(total), "; ".join(found))


@dataclass(frozen=True, slots=True)
class _Said:
    """Numbers that configurations give.

    Attributes:
        per_token: Numbers of experts of a token, and the words for them.
        nums: Numbers of experts.
    """

    per_token: list[tuple[float, str]]
    nums: list[int]


def _with_inner(config: Source | None, level: int = 0) -> Iterator[tuple[Source, bool]]:
    """A configuration and those inside of it, each with whether it speaks of experts only."""
    if config is None:
        return
    yield config, False
    for keys, of_experts in ((_OF_EXPERTS, True), (_INNER, False)):
        for inner in (_value(config, key) for key in keys):
            if inner is None or isinstance(inner, (int, float, str, list, tuple)):
                continue
            if of_experts:
                yield inner, True
            elif level < 2:
                yield from _with_inner(inner, level + 1)


def _value(source: Source, key: str) -> Any:
    return source.get(key) if isinstance(source, Mapping) else getattr(source, key, None)


def _count(value: Any) -> float:
    """A number of experts; of a list, with one entry for each layer, the mean; 0: it is none."""
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
        return 0.0
    return sum(values) / len(values)


def _numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """A name without the number of its expert -> the numbers that there are."""
    found: dict[str, set[int]] = {}
    for name in names:
        pattern, at = _without_number(name)
        if at is not None:
            found.setdefault(pattern, set()).add(at)
    return found


def _without_number(name: str) -> tuple[str, int | None]:
    parts = name.split(".")
    inside = next((i for i, part in enumerate(parts) if _EXPERTS.fullmatch(part)), len(parts))
    for i in range(inside + 1, len(parts)):
        found = _NUMBERED.fullmatch(parts[i])
        if found is not None:
            return ".".join([*parts[:i], f"{found[1]}*", *parts[i + 1 :]]), int(found[2])
    return name, None


def _num_experts(place: Place, param: Tensor, numbers: Mapping[str, set[int]], said: _Said) -> int | None:
    """The number of experts of which a parameter is one or holds all; 0: unknown; None: it is none, or is shared."""
    parts = place.name.split(".")
    if any("shared" in part for part in parts):
        return None
    nums = [*said.nums, *(n for _, module in place.owners[:3] for n in _nums(vars(module)))]
    if not any(_EXPERTS.fullmatch(part) for part in parts):
        stacked = param.ndim == 3 and param.shape[0] > 1 and (param.shape[0] in nums or _is_chosen_from(place, param))
        return int(param.shape[0]) if stacked else None
    alike = numbers.get(_without_number(place.name)[0], set())
    if alike and alike == set(range(len(alike))):
        return len(alike)
    if param.ndim > 2 or (param.ndim == 2 and param.shape[0] in nums):
        return int(param.shape[0])
    return next(iter(nums), 0)


def _is_chosen_from(place: Place, stack: Tensor) -> bool:
    """True if a router stands beside a stack: as many rows, as long as one side of its matrices."""
    near = (child for _, module in place.owners[:3] for child in (module, *module.children()))
    weights = (p for module in near for p in module._parameters.values() if p is not None and p.ndim == 2)
    return any(p.shape[0] == stack.shape[0] and p.shape[1] in stack.shape[1:] for p in weights)


def _nums(source: Source) -> list[int]:
    return [round(n) for n in (_count(_value(source, key)) for key in _NUM) if n]


def _per_token_of(source: Source, of_experts: bool) -> list[tuple[float, str]]:
    """The experts of a token that a configuration gives, each with the words for it."""
    kind = str(_value(source, "model_type"))
    found = [(_count(_value(source, key)), key) for key in (_PER_TOKEN_NEAR if of_experts else _PER_TOKEN)]
    return [one for one in (*found, (float(_BY_TYPE.get(kind, 0)), f"model_type {kind}")) if one[0]]


def _share(place: Place, num: int, said: _Said) -> tuple[Fraction, str]:
    """The share of experts that works on one token, and who says so; 1 and "": nobody does."""
    around = [module for _, module in place.owners[:3] if not isinstance(module, nn.ModuleList)]  # of equal experts
    near = (child for module in around for child in (module, *module.children()))
    beside = ((_count(vars(m).get(key)), f"{key} of {type(m).__name__}") for m in near for key in _PER_TOKEN_NEAR)
    for count, who in itertools.chain(said.per_token, beside):
        if 0 < count <= num:
            return Fraction(count) / num, f"{count:.3g} of {num} experts ({who})"
    return Fraction(1), ""


def _tied_apart(places: Sequence[tuple[Tensor, tuple[Place, ...]]], configs: Sequence[Source]) -> int:
    """Elements of the table that is the head too, where a configuration says so and no module has it as a matrix, as in
    modules made of a checkpoint's names."""
    if not any(_value(source, "tie_word_embeddings") is True for source in configs):
        return 0
    tables = [p for p, held in places if any(is_table(place.module) for place in held)]
    heads = {tuple(p.shape) for p, held in places if not all(is_table(place.module) for place in held)}
    largest = max(tables, key=Tensor.numel, default=None)
    return 0 if largest is None or tuple(largest.shape) in heads else largest.numel()
