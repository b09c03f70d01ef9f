"""What the structure of a model leaves open, as texts that name it and the line that settles it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from shardmuon.routing.heads import Weight
from shardmuon.routing.presets import numbers_out
from shardmuon.routing.roles import by, unwrapped_type

__all__ = ["bare_doubts", "broadcast_doubts"]


def broadcast_doubts(weights: Sequence[Weight]) -> list[str]:
    names = [w.name for w in weights if w.role.kind == "broadcast" and w.is_open and not _is_positions(w, weights)]
    if not names:
        return []
    return [
        f"{', '.join(names)}: a (1, M, N) parameter is a table for all of a batch (positions) or a stack of one "
        f'expert. It went to AdamW as a table. If right, write overrides={{"{names[0]}": "adamw"}}; '
        '{"use_muon": True, "view": "stack"} for a stack'
    ]


def _is_positions(weight: Weight, weights: Sequence[Weight]) -> bool:
    """Whether a (1, M, N) parameter is surely a table, as positions are: its rows are as wide as a norm, and no other
    in its module takes what it gives, or gives what it takes, as the two matrices of a stack of one expert do."""
    _, rows, cols = weight.shape
    held = (p for place in weight.places for p in place.module._parameters.values() if p is not weight.param)
    others = [tuple(p.shape) for p in held if p is not None and p.ndim == 3 and p.shape[0] == 1]
    widths = {w.shape[-1] for w in weights if w.role.kind == "norm"}
    return cols in widths and not any(rows == other[2] or cols == other[1] for other in others)


def bare_doubts(weights: Iterable[Weight], known: Set[str]) -> list[str]:
    """A text for each kind of 2-D parameter that only its shape speaks for. `known`: names of those settled."""
    kinds: dict[tuple[type, str], list[Weight]] = {}
    for w in weights:
        if w.role.kind == "bare" and len(w.shape) == 2 and w.is_open and w.name not in known:
            kinds.setdefault((unwrapped_type(w.places[0].module), w.places[0].leaf), []).append(w)
    return [
        f"{found[0].name} ({by(found[0].shape)}{f'; {len(found) - 1} more like it' if len(found) > 1 else ''}) is a "
        f"parameter of {kind.__name__}, of which no rule knows what it is. It went to Muon as one matrix of (outputs, "
        f"inputs). If right, write {_all_of(found)}; "
        '{"transposed": True} if its inputs come first (x @ W), "adamw" if it is a table, a set of biases or scales'
        for (kind, _), found in kinds.items()
    ]


def _all_of(found: Sequence[Weight]) -> str:
    """The overrides that match them."""
    names = [found[0].name] if len(found) == 1 else dict.fromkeys(numbers_out(w.name) for w in found)
    return "overrides={" + ", ".join(f'"{name}": "muon"' for name in names) + "}"
