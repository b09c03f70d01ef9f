"""Choices that the structure of a model leaves open, as texts that name them and the line that settles them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from shardmuon.routing.experts import Router
from shardmuon.routing.heads import RoutedParam
from shardmuon.routing.overrides import override_text
from shardmuon.routing.presets import numbers_out
from shardmuon.routing.roles import by

__all__ = ["doubts_of"]


def doubts_of(weights: Sequence[RoutedParam], experts: Mapping[str, Router], known: Collection[str]) -> list[str]:
    """A text for each kind of parameters that only their shape speaks for.

    Args:
        weights: All parameters of the model.
        experts: Of `find_experts`.
        known: Names of those that are settled.
    """
    rest = [w for w in weights if w.is_open and w.name not in known]
    flat = [w for w in rest if len(w.shape) in (2, 3)]
    pairs = _alike((w for w in flat if w.role.kind == "pairs"), _kind)
    bare = _alike((w for w in flat if w.role.kind == "bare" and w.name not in experts), _kind)
    turned = _alike((w for w in rest if w.name in experts and experts[w.name].is_inputs_first), _type)
    names = [w.name for w in weights if w.role.kind == "broadcast" and w.is_open and not _is_positions(w, weights)]
    return [
        *([_broadcast(names)] if names else []),
        *map(_pairs, pairs),
        *map(_bare, bare),
        *(_turned(found, experts[found[0].name]) for found in turned),
    ]


def _alike(weights: Iterable[RoutedParam], key: Callable[[RoutedParam], Hashable]) -> Iterable[list[RoutedParam]]:
    found: dict[Hashable, list[RoutedParam]] = {}
    for w in weights:
        found.setdefault(key(w), []).append(w)
    return found.values()


def _type(weight: RoutedParam) -> type:
    return type(weight.places[0].module)


def _kind(weight: RoutedParam) -> Hashable:
    """The type of its module, what that calls it, and how many dims it has."""
    return _type(weight), weight.places[0].leaf, len(weight.shape)


def _broadcast(names: Sequence[str]) -> str:
    return (
        f"{', '.join(names)}: a (1, M, N) parameter is a table for all of a batch (positions) or a stack of one "
        f'expert. It went to AdamW as a table. If right, write overrides={{"{names[0]}": "adamw"}}; '
        '{"use_muon": True, "view": "stack"} for a stack'
    )


def _pairs(found: Sequence[RoutedParam]) -> str:
    return (
        f"{_example(found)} is a parameter of {_type(found[0]).__name__} with a last dim of 2, as torch.view_as_real "
        f"leaves complex numbers. It went to AdamW. If right, write {_all_of(found, 'adamw')}; "
        '"muon" if it holds matrices of two inputs'
    )


def _bare(found: Sequence[RoutedParam]) -> str:
    stacked = len(found[0].shape) == 3
    went = f"a stack of {found[0].shape[0]} matrices, each" if stacked else "one matrix"
    table = "a table (positions, codes, biases)" if stacked else "a table, a set of biases or scales"
    return (
        f"{_example(found)} is a parameter of {_type(found[0]).__name__}, of which no rule knows what it is. It went "
        f"to Muon as {went} of (outputs, inputs). If right, write {_all_of(found, 'muon')}; "
        f'{{"transposed": True}} if its inputs come first (x @ W), "adamw" if it is {table}'
    )


def _turned(found: Sequence[RoutedParam], router: Router) -> str:
    return (
        f"{_example(found)} is a stack of experts of {_type(found[0]).__name__}, read as (outputs, inputs). But "
        f"{router.name} reads {router.width} features, and {router.first.name} ({by(router.first.shape)}) has as many "
        f"rows, so its inputs seem to come first (x @ W). If so, write {_all_of(found, {'transposed': True})}; "
        '"muon" if it is right as it is'
    )


def _is_positions(weight: RoutedParam, weights: Sequence[RoutedParam]) -> bool:
    """True if a (1, M, N) parameter is surely a table, as positions are: its rows are as wide as a norm, and no other
    in its module takes what it gives, or gives what it takes, as the two matrices of a stack of one expert do."""
    _, rows, cols = weight.shape
    held = (p for place in weight.places for p in place.module._parameters.values() if p is not weight.param)
    others = [tuple(p.shape) for p in held if p is not None and p.ndim == 3 and p.shape[0] == 1]
    widths = {w.shape[-1] for w in weights if w.role.kind == "norm"}
    return cols in widths and not any(rows == other[2] or cols == other[1] for other in others)


def _example(found: Sequence[RoutedParam]) -> str:
    more = f"; {len(found) - 1} more like it" if len(found) > 1 else ""
    return f"{found[0].name} ({by(found[0].shape)}{more})"


def _all_of(found: Sequence[RoutedParam], choice: object) -> str:
    """Text of an override that matches these parameters."""
    names = [found[0].name] if len(found) == 1 else dict.fromkeys(numbers_out(w.name) for w in found)
    return override_text(names, choice)
