"""The gradients of an optimizer as this rank sees them: whose they are, and what this rank keeps of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon.engines import Description, Engine, engine_for
from shardmuon.engines.base import MISPLACED, NONE, READY
from shardmuon.engines.tensor_parallel import TensorParallelEngine
from shardmuon.errors import told
from shardmuon.host import Hosts, clipped_by_host
from shardmuon.planning.layout import MatrixView, ParamLayout, same_storage
from shardmuon.ranks.exchange import my_rank
from shardmuon.stepping.candidates import sharers
from shardmuon.stepping.checks import check_can_align, check_gradient
from shardmuon.stepping.settings import replicas_of

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
        fault: Why it cannot be told who counts it.
    """

    name: str
    param: Tensor
    engine: Engine
    description: Description
    counted: bool
    rank_local: bool
    clipped: bool
    fault: str | None = None

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the parameter, ascending."""
        return self.description.ranks

    @property
    def loose(self) -> bool:
        """Nobody has said whether other ranks hold the same tensor, as under DDP, or tensors of their own."""
        return len(self.ranks) == 1 and not self.rank_local

    @property
    def shape_text(self) -> str:
        """The global shape, which every rank that shares the parameter must see; without the dim that is cut, if only
        the sizes of all shards would tell it."""
        if isinstance(self.engine, TensorParallelEngine):
            return self.engine.common_shape(self.param)
        return str(tuple(self.engine.shape(self.param)))

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
        """The gradient's local storage, if it takes part in clipping and this rank keeps anything of it."""
        if self.param.grad is None or not self.clipped:
            return None
        local = self.engine.storage(self.param.grad)
        return local if local.numel() else None

    def align_(self) -> None:
        """Redistribute the gradient to the parameter's placement. Collective among `ranks`."""
        assert self.param.grad is not None
        self.param.grad = self.engine.align(self.param.grad, self.param)


# optimizer -> position -> (what the share hung on, share). Describing hundreds of parameters at every step takes longer
# than reading their gradients. Weak, so that process groups end with the optimizer.
_KNOWN: WeakKeyDictionary[Optimizer, dict[int, tuple[object, Share]]] = WeakKeyDictionary()


def clipped_by_framework(source: Source) -> str | None:
    """Why these gradients cannot be clipped here, on every rank alike: they are a framework's, which clips them."""
    hosts = getattr(source, "hosts", None)
    active = hosts.active if isinstance(hosts, Hosts) else None
    if active is not None:
        return active.clipping
    return clipped_by_host(p for _, p, _ in _listed(source))


def waiting_for(source: Source) -> dict[Ranks, Any]:
    """The groups of ranks that may wait for this one, when its shares cannot be listed -> process group, if known."""
    waiting: dict[Ranks, Any] = {}
    for _, param, group in _listed(source):
        waiting |= sharers(param, group) if isinstance(param, Tensor) else {}
    return waiting


def shares_of(source: Source) -> tuple[list[Share], str | None, dict[Ranks, Any]]:
    """Every parameter's share, with or without a gradient, the first thing that is wrong with any of them, and the
    groups of ranks that may wait for this one because of those left out (-> process group, if known)."""
    shares: list[Share] = []
    waiting: dict[Ranks, Any] = {}
    fault = None
    known = _KNOWN.setdefault(source, {}) if isinstance(source, Optimizer) else {}
    for index, (name, param, group) in enumerate(_listed(source)):
        try:
            if not isinstance(param, Tensor):
                raise TypeError(f"a parameter is a tensor, found {type(param).__name__}")
            options = (bool(group.get("rank_local", False)), bool(group.get("clip_grad", True)))
            seen = (name, id(param), engine_for(param, group).signature(param), group.get("process_group"), options)
            if index not in known or known[index][0] != seen or known[index][1].param is not param:
                known[index] = (seen, _share(name, param, *options, group))
            shares.append(known[index][1])
            fault = fault or shares[-1].fault
        except Exception as wrong:  # whatever it is, the other ranks must hear of it
            own = f"{name}: {wrong}" if isinstance(wrong, (TypeError, ValueError)) else told(wrong, f"{name}: ")
            fault = fault or own
            if isinstance(param, Tensor):
                waiting |= sharers(param, group)
    return shares, fault, waiting


def _listed(source: Source) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """(name, parameter, group) in the user's order."""
    return list(_entries(source))


def _entries(source: Source) -> Iterable[tuple[str, Any, Mapping[str, Any]]]:
    if isinstance(source, Optimizer):
        for index, group in enumerate(source.param_groups):
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                name = str(names[position]) if names else f"parameter {position} of group {index}"
                yield name, param, group
        return
    if isinstance(source, nn.Module):
        source = source.named_parameters()
    for index, entry in enumerate([source] if isinstance(source, Tensor) else source):
        named = isinstance(entry, tuple) and len(entry) == 2
        name, param = entry if named else (f"parameter {index}", entry)
        yield str(name), param, {}


def _share(name: str, param: Tensor, rank_local: bool, clipped: bool, group: Mapping[str, Any]) -> Share:
    engine = engine_for(param, group)
    about = engine.describe(param, MatrixView(engine.shape(param), 1, ()), replicas_of(group))
    if about.counted is not None:
        fault = f"{name}: {about.counted}" if clipped and isinstance(about.counted, str) else None
        return Share(name, param, engine, about, about.counted is True, rank_local, clipped, fault)
    layout = _layout(about)
    if layout is not None:
        counted = len(about.ranks) == 1 or layout.replica_index.get(my_rank(), 0) == 0
        return Share(name, param, engine, about, counted, rank_local, clipped)
    fault = (
        f"{name}: it stores shape {about.storage_shape} here and not what its placements imply ({about.text}), so "
        "which ranks keep the same data cannot be told. Redistribute it"
    )
    return Share(name, param, engine, about, False, rank_local, clipped, fault)


def _layout(about: Description) -> ParamLayout | None:
    """Who counts what is read off the layout, so it must be the true one wherever there are replicas."""
    for claim in about.claims:
        if same_storage(claim.storage_shape, about.storage_shape):
            return claim.layout
    likeliest = about.claims[0].layout
    return None if likeliest.has_replicas else likeliest
