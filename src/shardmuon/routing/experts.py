"""Routers and the experts from which they choose, told by where they stand and how many rows they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from shardmuon.layout.views import Ints
from shardmuon.routing.heads import RoutedParam
from shardmuon.routing.presets import Role

__all__ = ["Router", "find_experts"]


class Router(NamedTuple):
    """The weight whose rows choose among the matrices of a stack.

    Attributes:
        name: Its name.
        width: How many features it reads.
        first: The first stack of the experts' module that has so many features on one side.
    """

    name: str
    width: int
    first: RoutedParam

    @property
    def is_inputs_first(self) -> bool:
        """True if the experts seem to be stored (E, inputs, outputs): their first stack should read what the router
        reads, and has that many rows instead."""
        _, rows, cols = self.first.shape
        return rows == self.width != cols


def find_experts(weights: Sequence[RoutedParam]) -> dict[str, Router]:
    """Make routers of the matrices that choose among experts, and biases of the rows that lie beside them.

    A router has as many rows as there are experts, stands beside them or in the module around, and reads what they
    read. Experts are a stack (E, M, N), or a list of E modules of linear layers alone: a list of a model's blocks has
    norms, too.

    Returns:
        name -> router, of each stack that only its shape speaks for.
    """
    stacks: dict[int, list[RoutedParam]] = {}
    for w in weights:
        if w.role.kind in ("bare", "matrices") and w.role.view.get("view") == "stack":
            for place in w.places:
                stacks.setdefault(id(place.module), []).append(w)
    found: dict[str, Router] = {}
    for w in weights:
        if len(w.shape) != 2 or w.shape[0] < 2 or w.role.kind not in ("linear", "bare", "router"):
            continue
        num, width = w.shape
        for module in _beside(w):
            experts = [stack for stack in stacks.get(id(module), ()) if stack.shape[0] == num]
            first = next((stack for stack in experts if width in stack.shape[1:]), None)
            if w.role.kind != "router" and (first is not None or _is_list_of(module, w.shape)):
                w.role = Role("router", f"router: its rows choose among {num} experts", reads=w.shape[1:])
            if first is not None:
                found |= {stack.name: Router(w.name, width, first) for stack in experts if stack.role.kind == "bare"}
        own = [stack.shape for place in w.places for stack in stacks.get(id(place.module), ())]
        if w.role.kind != "router" and any(shape[0] == num and width in shape[1:] for shape in own):
            reason = f"a row for each of {num} experts: biases, or a router"
            w.role = Role("entries", reason, reads=w.shape, decays=False)
    return found


def _beside(weight: RoutedParam) -> Iterator[nn.Module]:
    """The modules around the one that holds a weight, up to the third, and their children on other branches."""
    for place in weight.places:
        for below, module in place.owners[1:4]:
            yield module
            yield from (child for name, child in module.named_children() if name != below.split(".")[0])


def _is_list_of(module: nn.Module, shape: Ints) -> bool:
    """True if a module lists as many experts as a weight has rows, each made of linear layers that take its inputs."""
    if not isinstance(module, nn.ModuleList) or len(module) != shape[0]:
        return False
    holders = [[m for m in expert.modules() if m._parameters] for expert in module]
    linear = all(isinstance(m, nn.Linear) for of_expert in holders for m in of_expert)
    return linear and all(len(h) > 1 and shape[1] in [m.in_features for m in h] for h in holders)
