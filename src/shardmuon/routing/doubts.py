"""What the structure of a model leaves open, as texts that name it and the line that settles it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from torch import nn

from shardmuon.routing.heads import Weight
from shardmuon.routing.presets import numbers_out
from shardmuon.routing.roles import by, unwrapped_type

__all__ = ["bare_doubts", "broadcast_doubts", "find_experts", "pair_doubts", "turned_doubts"]


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


def pair_doubts(weights: Iterable[Weight], known: Set[str]) -> list[str]:
    """A text for each kind of parameter that is taken for complex numbers by its last dim. `known`: those settled."""
    return [
        f"{_example(found)} is a parameter of {kind.__name__} with a last dim of 2, as torch.view_as_real leaves "
        f"complex numbers. It went to AdamW. If right, write {_all_of(found, 'adamw')}; "
        '"muon" if it holds matrices of two inputs'
        for kind, found in _kinds(weights, "pairs", known)
    ]


def find_experts(weights: Sequence[Weight]) -> dict[str, Router]:
    """name -> router, of each stack of matrices from which a router chooses.

    One has as many rows as the stack has matrices, stands beside it, and reads as many features as one side of a matrix
    has, of this stack or of another in the same module.
    """
    routers = [w for w in weights if w.role.kind == "router" and len(w.shape) == 2]
    stacks: dict[int, list[Weight]] = {}
    for w in weights:
        if w.role.kind == "bare" and len(w.shape) == 3:
            stacks.setdefault(id(w.places[0].module), []).append(w)
    found: dict[str, Router] = {}
    for router in routers:
        num, width = router.shape
        for module in _beside(router):
            experts = [w for w in stacks.get(id(module), ()) if w.shape[0] == num]
            first = next((w for w in experts if width in w.shape[1:]), None)
            if first is not None:
                found |= {w.name: Router(router.name, width, first) for w in experts}
    return found


class Router(NamedTuple):
    """What chooses among the matrices of a stack.

    Attributes:
        name: Of its weight.
        width: How many features it reads.
        first: The first stack of its module that has so many features on one side.
    """

    name: str
    width: int
    first: Weight

    @property
    def is_inputs_first(self) -> bool:
        """Whether the experts seem to be stored (E, inputs, outputs): their first stack should read what the router
        reads, and has that many rows instead."""
        _, rows, cols = self.first.shape
        return rows == self.width != cols


def _beside(weight: Weight) -> list[nn.Module]:
    """The modules around a weight up to the third, and their children."""
    around = [module for place in weight.places for _, module in place.owners[1:4]]
    return [near for module in around for near in (module, *module.children())]


def bare_doubts(weights: Sequence[Weight], experts: Mapping[str, Router], known: Set[str]) -> list[str]:
    """A text for each kind of parameter that only its shape speaks for. `known`: names of those settled."""
    texts = []
    for kind, found in _kinds((w for w in weights if w.name not in experts), "bare", known):
        stacked = len(found[0].shape) == 3
        went = f"a stack of {found[0].shape[0]} matrices, each" if stacked else "one matrix"
        table = "a table (positions, codes, biases)" if stacked else "a table, a set of biases or scales"
        texts.append(
            f"{_example(found)} is a parameter of {kind.__name__}, of which no rule knows what it is. It went to Muon "
            f"as {went} of (outputs, inputs). If right, write {_all_of(found, 'muon')}; "
            f'{{"transposed": True}} if its inputs come first (x @ W), "adamw" if it is {table}'
        )
    return texts


def turned_doubts(weights: Sequence[Weight], experts: Mapping[str, Router], known: Set[str]) -> list[str]:
    """A text for each kind of experts that seem to be stored inputs first. `known`: names of those settled."""
    kinds: dict[type, list[Weight]] = {}
    for w in weights:
        if w.name in experts and experts[w.name].is_inputs_first and w.is_open and w.name not in known:
            kinds.setdefault(unwrapped_type(w.places[0].module), []).append(w)
    return [_turned(kind, found, experts[found[0].name]) for kind, found in kinds.items()]


def _turned(kind: type, found: Sequence[Weight], router: Router) -> str:
    return (
        f"{_example(found)} is a stack of experts of {kind.__name__}, read as (outputs, inputs). But {router.name} "
        f"reads {router.width} features, and {router.first.name} ({by(router.first.shape)}) has as many rows, so its "
        f"inputs seem to come first (x @ W). If so, write {_all_of(found, {'transposed': True})}; "
        '"muon" if it is right as it is'
    )


def _kinds(weights: Iterable[Weight], role: str, known: Set[str]) -> Iterator[tuple[type, list[Weight]]]:
    """The type of the module, and the parameters that are alike in it, in number of dims, and in what it calls them."""
    kinds: dict[tuple[type, str, int], list[Weight]] = {}
    for w in weights:
        if w.role.kind == role and len(w.shape) in (2, 3) and w.is_open and w.name not in known:
            place = w.places[0]
            kinds.setdefault((unwrapped_type(place.module), place.leaf, len(w.shape)), []).append(w)
    return ((kind, found) for (kind, _, _), found in kinds.items())


def _example(found: Sequence[Weight]) -> str:
    more = f"; {len(found) - 1} more like it" if len(found) > 1 else ""
    return f"{found[0].name} ({by(found[0].shape)}{more})"


def _all_of(found: Sequence[Weight], choice: object) -> str:
    """The overrides that match them."""
    names = [found[0].name] if len(found) == 1 else dict.fromkeys(numbers_out(w.name) for w in found)
    text = json.dumps(choice) if isinstance(choice, str) else repr(choice).replace("'", '"')
    return "overrides={" + ", ".join(f'"{name}": {text}' for name in names) + "}"
