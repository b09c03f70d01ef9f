"""Optimizers that groups with use_muon=False ask for: `adamw=` a function (params, group) -> torch.optim.Optimizer.

[Note: whose state]
    The made optimizer's state of a parameter *is* the outer one's, the same dict. So state dicts hold it, and what is
    loaded reaches it. A made optimizer itself is never saved: the function makes it again.

[Note: state that has not begun]
    torch's checkpoints load into what they find, key by key, so all state dicts must have the same keys, whichever
    parameters had a gradient so far. Only the made optimizer knows where its state starts, and often only its first
    step does (SGD's momentum, Rprop's sizes). So a state dict has stand-ins for what is not there: what an optimizer
    made for it alone keeps after a step on zeros. An entry's `BEGUN` says whether it is state (1) or a stand-in (0),
    which nobody takes over.

[Note: which options follow]
    A scheduler writes into our group. What the function made equal to the group's `lr`, `weight_decay`, `betas` or
    `eps` follows it. An `lr` or `weight_decay` that it made unlike the group's keeps its ratio to it, and other `betas`
    and `eps` stay. The function is shown `initial_lr` where a scheduler has written one, so that a run that resumes in
    the middle of a schedule finds the same ratio.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardmuon.engines import engine_for, engine_of, is_plain_dtensor
from shardmuon.engines.local import LocalEngine
from shardmuon.engines.tensor_parallel import TensorParallelEngine
from shardmuon.errors import OUT_OF_MEMORY, level_of_the_caller
from shardmuon.momentum.keeper import BUFFER, SCALE, STEP
from shardmuon.options import factory_name, has_factory
from shardmuon.stepping.settings import name_of
from shardmuon.variants import KEPT_KEYS

State = MutableMapping[Tensor, dict[str, Any]]
BEGUN = "has_begun"  # in state dicts alone, see [Note: state that has not begun]
_SCALED, _EQUAL = ("lr", "weight_decay"), ("betas", "eps")


class _Follower:
    """How one of a made optimizer's groups follows ours, see [Note: which options follow].

    Args:
        group: The made optimizer's.
        seen: What our group said when the function was called.
    """

    def __init__(self, group: dict[str, Any], seen: Mapping[str, Any]) -> None:
        self._group = group
        self._own = {key: group[key] for key in (*_SCALED, *_EQUAL) if key in group and key in seen}
        self._seen = {key: _number(seen[key]) for key in self._own}
        self._equal = {key for key, own in self._own.items() if _same(own, seen[key])}
        self._begun = {key: value for key, value in group.items() if key not in ("params", *self._own)}

    def follow(self, ours: Mapping[str, Any]) -> None:
        """Write what our group says now. Waits for no accelerator, unless the function made a number of a tensor."""
        for key, own in self._own.items():
            if key not in self._equal and key in _EQUAL:
                continue
            now = ours.get(key, self._seen[key])
            if key not in self._equal:
                now = _scaled(_number(own), self._seen[key], now)
            if isinstance(now, Tensor) and not isinstance(own, Tensor):
                now = float(now)
            self._group[key] = now

    def changed(self) -> list[str]:
        """What the made optimizer itself has written into its group."""
        return [key for key, value in self._begun.items() if not _same(value, self._group.get(key))]


def _number(value: Any) -> Any:
    """A tensor's value as it is now; anything else as it is."""
    return float(value) if isinstance(value, Tensor) else value


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    a, b = _number(a), _number(b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return list(a) == list(b)
    return bool(a == b)


def _scaled(own: float, seen: float, now: Any) -> Any:
    """`now` by as much larger as `own` is than `seen`; `own` itself where nothing has changed, or has no ratio."""
    if not seen or (not isinstance(now, Tensor) and now == seen):
        return own
    return now * (own / seen)


@dataclass(slots=True)
class _Made:
    """The optimizer of one group."""

    factory: Callable[..., Any]
    params: list[Tensor]
    optimizer: Optimizer
    followers: list[_Follower]
    asked_lr: float
    linked: dict[Tensor, dict[str, Any]] = field(default_factory=dict)  # the dicts that both optimizers have
    told: bool = False

    def is_for(self, group: Mapping[str, Any]) -> bool:
        params = group["params"]
        if not has_factory(group) or self.factory is not group["adamw"] or len(params) != len(self.params):
            return False
        return all(p is q for p, q in zip(params, self.params, strict=True))

    def link(self, state: State) -> None:
        """See [Note: whose state]. Moves what was loaded to its parameter's device."""
        mine = self.optimizer.state
        for p in self.params:
            there = state.get(p)
            if there is None or (not there and p in mine):
                if p in mine:  # made by the constructor, or by the last step
                    state[p] = mine[p]
            elif there is not mine.get(p):
                self._place(p, there)
                mine[p] = there
            if p in mine:
                self.linked[p] = mine[p]

    def has_lost(self, state: State) -> bool:
        """Whether somebody dropped state since the last step: the optimizer begins anew."""
        return any(found and not state.get(p) for p, found in self.linked.items())

    def _place(self, p: Tensor, found: MutableMapping[str, Any]) -> None:
        group = self.optimizer.param_groups[0]
        for key, value in found.items():
            if not isinstance(value, Tensor) or value.device == p.device:
                continue
            if key != STEP or group.get("capturable") or group.get("fused"):
                found[key] = value.to(p.device)


class MadeOptimizers:
    """Those of one optimizer's groups."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}  # by the group's position
        self._next: dict[int, _Made] | None = None  # what a step is to work with, once all ranks have agreed
        self._filled: dict[Tensor, dict[str, Any]] = {}  # state that stands for what is to be loaded

    def prepare(self, groups: Sequence[Mapping[str, Any]], state: State) -> None:
        """Make what is missing. Changes no state.

        Raises:
            ValueError: A function raised, or what it returned is not the optimizer of its group; names the group.
        """
        self._next = None
        found: dict[int, _Made] = {}
        for index, group in enumerate(groups):
            if not has_factory(group) or not group["params"]:
                continue
            known = self._made.get(index)
            stale = known is None or not known.is_for(group) or known.has_lost(state) or self._is_filled(group, state)
            if known is None or stale or _was_zero(known, group):
                known = _make(index, group)
            found[index] = known
        self._next = found

    def _is_filled(self, group: Mapping[str, Any], state: State) -> bool:
        return any(p in self._filled and state.get(p) is self._filled[p] for p in group["params"])

    def step(self, groups: Sequence[Mapping[str, Any]], state: State) -> None:
        """Step the groups, when `begin` has let go what is stale."""
        for index, made in self._made.items():
            for follower in made.followers:
                follower.follow(groups[index])
            made.link(state)
            with _aligned_gradients(made.params):
                made.optimizer.step()
            made.link(state)
            self._tell_kept(index, made)

    def begin(self, state: State, muons: Iterable[Tensor]) -> None:
        """All ranks have agreed: what `prepare` has made is in force, and state goes that stood for something else.

        Args:
            state: The optimizer's.
            muons: Parameters that Muon has stepped up to now, if some may be others' from this step on.
        """
        for p, filled in self._filled.items():
            if state.get(p) is filled:
                del state[p]
        self._filled = {}
        assert self._next is not None, "prepared"
        mine = (BUFFER, SCALE, STEP, *KEPT_KEYS)
        for index in self._made.keys() - self._next.keys():  # Muon's or AdamW's now, to which this means nothing
            for p in self._made[index].params:
                kept = state.get(p, {})
                for key in [key for key in kept if BUFFER not in kept or key not in mine]:
                    del kept[key]
        left = {id(p) for p in muons}
        for made in self._next.values() if left else ():
            for p in made.params:
                kept = state.get(p, {})
                for key in kept.keys() & {BUFFER, SCALE, *KEPT_KEYS} if id(p) in left else ():
                    del kept[key]
        self._made, self._next = self._next, None

    def fill(self, groups: Sequence[Mapping[str, Any]], state: State) -> None:
        """Put stand-ins where there is no state, as something to load into. At the next step they are gone."""
        for index, group in enumerate(groups):
            lacking = [p for p in group["params"] if not state.get(p)] if has_factory(group) else []
            if lacking:
                for p, found in _stand_ins(index, group, lacking).items():
                    marked = {**found, BEGUN: torch.zeros(())} if found else {}  # for what torch unflattens, too
                    state[p] = self._filled[p] = marked

    def complete(self, groups: Sequence[Mapping[str, Any]], state: State, saved: MutableMapping[Any, Any]) -> None:
        """See [Note: state that has not begun].

        Args:
            groups: The optimizer's.
            state: The optimizer's.
            saved: That of a state dict, by the positions of all parameters.
        """
        start = 0
        for index, group in enumerate(groups):
            params = group["params"]
            first, start = start, start + len(params)
            if not has_factory(group):
                continue
            filled = {p: state[p] for p in params if p in self._filled and state.get(p) is self._filled[p]}
            lacking = [p for p in params if not state.get(p)]
            stand_ins = filled | (_stand_ins(index, group, lacking) if lacking else {})
            for position, p in enumerate(params, first):
                found = stand_ins.get(p, state.get(p))
                if found is not None:
                    saved[position] = {**found, BEGUN: torch.tensor(float(p not in stand_ins))}

    def _tell_kept(self, index: int, made: _Made) -> None:
        if made.told:
            return
        made.told = True
        keys = sorted({key for follower in made.followers for key in follower.changed()})
        if keys:
            warnings.warn(
                f"group {index}: {type(made.optimizer).__name__}, made by adamw={factory_name(made.factory)}, keeps "
                f"{', '.join(keys)} in its param_groups, which no state dict of this optimizer holds: a run that "
                "resumes is not what it was. Keep it in state[p] instead",
                stacklevel=level_of_the_caller(),
            )


def _was_zero(made: _Made, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer was made at lr 0, of which no ratio can be told, and lr is another now."""
    return made.asked_lr == 0 and bool(group["lr"] != 0)


def _make(index: int, group: Mapping[str, Any]) -> _Made:
    factory, params = group["adamw"], list(group["params"])
    where = f"group {index} ({name_of(group, index, 0)}{', ..' if len(params) > 1 else ''})"
    name = f"adamw={factory_name(factory)}"
    for position, p in enumerate(params):
        check_made(name_of(group, index, position), p, group)
    shown = {key: value for key, value in group.items() if key not in ("params", "adamw")}
    if shown.get("initial_lr"):
        shown["lr"] = shown["initial_lr"]
    try:
        optimizer = factory(list(params), dict(shown))
    except OUT_OF_MEMORY:
        raise
    except Exception as wrong:
        raise ValueError(f"{where}: {name} raised {type(wrong).__name__}: {wrong}. {_WRITE}") from wrong
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{where}: {name} returned {_kind(optimizer)}, not a torch.optim.Optimizer. {_WRITE}")
    held = [p for made in optimizer.param_groups for p in made["params"]]
    given, have = {id(p) for p in params}, {id(p) for p in held}
    if given != have or len(held) != len(params):
        raise ValueError(
            f"{where}: the {type(optimizer).__name__} that {name} returned holds {len(held)} parameters, "
            f"{len(have - given)} of them of others, and lacks {len(given - have)} of the {len(params)} it was given. "
            f"Make one for each call, over just its params. {_WRITE}"
        )
    if not isinstance(optimizer.state, defaultdict):
        optimizer.state = defaultdict(dict, optimizer.state)
    followers = [_Follower(made, shown) for made in optimizer.param_groups]
    return _Made(factory, params, optimizer, followers, float(shown["lr"]))


def begun(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The state that a state dict's entry holds: none if it is a stand-in."""
    return {key: value for key, value in entry.items() if key != BEGUN} if float(entry.get(BEGUN, 1)) else {}


def _stand_ins(index: int, group: Mapping[str, Any], params: Sequence[Tensor]) -> dict[Tensor, dict[str, Any]]:
    """What an optimizer made for it alone keeps of these of a group's parameters after a step on zeros. Weights and
    gradients are as before."""
    optimizer = _make(index, {**group, "lr": group["lr"] or 1.0}).optimizer  # a function may refuse 0
    for made in optimizer.param_groups:
        if "lr" in made:
            made["lr"] = torch.zeros_like(made["lr"]) if isinstance(made["lr"], Tensor) else 0.0
    asked = set(params)
    grads = [(p, p.grad) for p in group["params"]]
    weights = [(p, p.detach().clone()) for p in params if p.requires_grad]
    try:
        for p, _ in grads:
            p.grad = _zeros(p) if p in asked and p.requires_grad else None
        optimizer.step()
    finally:
        for p, grad in grads:
            p.grad = grad
        for p, weight in weights:
            p.copy_(weight)
    kept = {p: optimizer.state[p] for p in params if p in optimizer.state or p.requires_grad}
    for found in kept.values():
        if isinstance(found.get(STEP), Tensor):
            found[STEP].zero_()
        elif STEP in found:
            found[STEP] = 0
    return kept


def _zeros(p: Tensor) -> Tensor:
    """A gradient."""
    return torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None) or p.dtype)


_WRITE = 'Write adamw=lambda params, group: torch.optim.RMSprop(params, lr=group["lr"]), or a function like it'


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


@contextmanager
def _aligned_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """Gradients that are placed unlike their parameters are aligned inside. Collective for those, as AdamW's are."""
    before: list[tuple[Tensor, Tensor]] = []
    for p in params:
        grad = p.grad
        if grad is None:
            continue
        engine = engine_of(p)
        if engine.stored_alike(grad, p) is None and not engine.is_aligned(grad, p):
            before.append((p, grad))
            p.grad = engine.align(grad, p)
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


def check_made(name: str, p: Tensor, group: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter that is stored in a way in which a user's own optimizer is not known to work."""
    engine = engine_for(p, group)
    if type(engine) in (LocalEngine, TensorParallelEngine) or is_plain_dtensor(p, engine):
        return
    raise ValueError(
        f"{name}: adamw={factory_name(group['adamw'])} makes an optimizer of its own, which works on plain tensors and "
        f"DTensors (DDP, FSDP2, HSDP, tensor parallelism), and this is a {type(p).__name__} kept by "
        f'{type(engine).__name__.removesuffix("Engine")}. Write adamw="adamw" or "cautious"'
    )


def made_fault(groups: Sequence[Mapping[str, Any]], host: str) -> str | None:
    """Why a host that steps its own tensors cannot step these groups, if any of them has a function."""
    for index, group in enumerate(groups):
        if has_factory(group):
            return (
                f"group {index}: adamw={factory_name(group['adamw'])} makes an optimizer of its own, and {host} puts "
                "tensors of its own in the place of parameters, on which no other than AdamW is known to work. Write "
                'adamw="adamw" or "cautious"'
            )
    return None


def refuse_made(groups: Sequence[Mapping[str, Any]], host: str) -> None:
    """Raise ValueError for `made_fault`."""
    fault = made_fault(groups, host)
    if fault is not None:
        raise ValueError(fault)
