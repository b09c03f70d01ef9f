"""The gradients of an optimizer as this rank sees them: whose they are, and what this rank keeps of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon.binding import MISPLACED, NONE, READY
from shardmuon.checks import check_can_align, check_gradient
from shardmuon.engines import Description, Engine, engine_of
from shardmuon.exchange import my_rank
from shardmuon.layout import MatrixView, ParamLayout, same_storage

Ranks = tuple[int, ...]
Source = Optimizer | nn.Module | Tensor | Iterable[Any]


@dataclass(frozen=True, slots=True)
class Share:
    """One parameter's gradient on this rank.

    Attributes:
        name: For messages.
        description: Who shares the parameter.
        counted: Of the ranks that keep this data, this one counts it.
        rank_local: The user said that this plain tensor is this rank's own.
        clipped: Whether the parameter's group takes part in clipping.
    """

    name: str
    param: Tensor
    engine: Engine
    description: Description
    counted: bool
    rank_local: bool
    clipped: bool

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the parameter, ascending."""
        return self.description.ranks

    @property
    def loose(self) -> bool:
        """Nobody has said whether other ranks hold the same tensor, as under DDP, or tensors of their own."""
        return len(self.ranks) == 1 and not self.rank_local

    def state(self) -> int:
        """NONE, READY or MISPLACED. Raises ValueError with the name if the gradient is unusable."""
        if self.param.grad is None:
            return NONE
        try:
            if check_gradient(self.param, self.param.grad):
                return READY
            check_can_align(self.description)
        except ValueError as wrong:
            raise ValueError(f"{self.name}: {wrong}") from None
        return MISPLACED

    def storage(self) -> Tensor | None:
        """The gradient's local storage."""
        grad = self.param.grad
        return None if grad is None else self.engine.storage(grad)

    def align_(self) -> None:
        """Redistribute the gradient to the parameter's placement. Collective among `ranks`."""
        assert self.param.grad is not None
        self.param.grad = self.engine.align(self.param.grad, self.param)


def shares_of(source: Source) -> tuple[list[Share], str | None]:
    """Every parameter's share, with or without a gradient, and the first thing that is wrong with any of them."""
    shares: list[Share] = []
    fault = None
    for name, param, group, process_group in _listed(source):
        try:
            shares.append(_share(name, param, group, process_group))
        except (TypeError, ValueError) as wrong:
            fault = fault or f"{name}: {wrong}"
    return shares, fault


def _listed(source: Source) -> Iterable[tuple[str, Any, Mapping[str, Any], Any]]:
    """(name, parameter, group, process group of its plain replicas) in the user's order."""
    if isinstance(source, Optimizer):
        replicas = getattr(source, "_process_group", None)  # shardmuon.Muon(process_group=...)
        for index, group in enumerate(source.param_groups):
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                name = str(names[position]) if names else f"parameter {position} of group {index}"
                yield name, param, group, replicas
        return
    if isinstance(source, nn.Module):
        source = source.named_parameters()
    for index, entry in enumerate([source] if isinstance(source, Tensor) else source):
        named = isinstance(entry, tuple) and len(entry) == 2
        name, param = entry if named else (f"parameter {index}", entry)
        yield str(name), param, {}, None


def _share(name: str, param: Any, group: Mapping[str, Any], process_group: Any) -> Share:
    if not isinstance(param, Tensor):
        raise TypeError(f"a parameter is a tensor, found {type(param).__name__}")
    rank_local = bool(group.get("rank_local", False))
    engine = engine_of(param)
    view = MatrixView(engine.shape(param), 1, ())
    about = engine.describe(param, view, None if rank_local else process_group)
    counted = len(about.ranks) == 1 or _layout(about).replica_index.get(my_rank(), 0) == 0
    return Share(name, param, engine, about, counted, rank_local, bool(group.get("clip_grad", True)))


def _layout(about: Description) -> ParamLayout:
    """Who counts what is read off the layout, so it must be the true one wherever there are replicas."""
    for claim in about.claims:
        if same_storage(claim.storage_shape, about.storage_shape):
            return claim.layout
    likeliest = about.claims[0].layout
    if likeliest.has_replicas:
        raise ValueError(
            f"it stores shape {about.storage_shape} here and not what its placements imply ({about.text}), so which "
            "ranks keep the same data cannot be told. Redistribute it"
        )
    return likeliest
