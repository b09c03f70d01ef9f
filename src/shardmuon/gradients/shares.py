"""The gradients of an optimizer as this rank sees them: whose they are, and what this rank keeps of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon._torch import default_group
from shardmuon.comm.groups import my_rank
from shardmuon.engines import Description, Engine, engine_for, is_plain_dtensor
from shardmuon.engines.base import MISPLACED, NONE, READY, named_params
from shardmuon.engines.tensor_parallel import TensorParallelEngine
from shardmuon.host import Hosts, clipped_by_host
from shardmuon.planning.layout import ParamLayout, same_storage
from shardmuon.planning.views import MatrixView, Ranks
from shardmuon.ranks.council import Faults
from shardmuon.stepping.candidates import sharers
from shardmuon.stepping.checks import check_can_align, gradient_storage
from shardmuon.stepping.settings import replicas_of

Source = Optimizer | nn.Module | Tensor | Iterable[Any]


class Share(NamedTuple):
    """One parameter's gradient on this rank: what does not change from call to call.

    Attributes:
        name: For messages.
        description: Who shares the parameter.
        ranks: These ranks, ascending.
        counted: Of the ranks that keep this data, this one counts it.
        rank_local: The user said that this plain tensor is this rank's own.
        loose: Nobody has said whether other ranks hold the same tensor, as under DDP, or tensors of their own.
        clipped: Whether the parameter's group takes part in clipping.
        line: What every rank that shares it must say of it, but for its gradient.
        fault: Why it cannot be told who counts it.
    """

    name: str
    param: Tensor
    engine: Engine
    description: Description
    ranks: Ranks
    counted: bool
    rank_local: bool
    loose: bool
    clipped: bool
    line: str
    fault: str | None = None

    def read(self) -> tuple[int, Tensor | None]:
        """NONE, READY or MISPLACED, and the gradient's local storage if it is ready.

        Raises:
            ValueError: The gradient is unusable; the message lacks the name.
        """
        grad = self.param.grad
        if grad is None:
            return NONE, None
        local = gradient_storage(self.param, grad, self.engine, self.engine.storage(self.param))
        if local is None:
            check_can_align(self.description)
            return MISPLACED, None
        return READY, local

    def of(self, name: str, param: Tensor) -> Share:
        """That of another parameter, which differs in its name alone."""
        line = _said(name) + self.line[len(_said(self.name)) :]
        return self._replace(name=name, param=param, line=line)

    def align_(self) -> None:
        """Redistribute the gradient to the parameter's placement. Collective among `ranks`."""
        assert self.param.grad is not None
        self.param.grad = self.engine.align(self.param.grad, self.param)


class _Known(NamedTuple):
    """A share, and what it hung on."""

    signature: object
    options: tuple[object, ...]
    share: Share

    def holds_for(self, param: Tensor, engine: Engine, signature: object, options: tuple[object, ...]) -> bool:
        """Whether it would be the same now."""
        same = self.share.param is param and self.share.engine == engine
        return same and self.signature == signature and self.options == options


# optimizer -> each parameter's share. Describing hundreds of parameters at every step takes longer than reading their
# gradients. Weak, so that process groups end with the optimizer.
_KNOWN: WeakKeyDictionary[Optimizer, dict[int, _Known]] = WeakKeyDictionary()


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


def shares_of(source: Source, faults: Faults) -> tuple[list[Share], dict[Ranks, Any]]:
    """Every parameter's share, with or without a gradient, and the groups of ranks that may wait for this one because
    of those that could not be read (-> process group, if known). `faults` hears what is wrong with any of them."""
    shares: list[Share] = []
    waiting: dict[Ranks, Any] = {}
    known = _KNOWN.setdefault(source, {}) if isinstance(source, Optimizer) else {}
    alike: dict[object, Share] = {}  # DTensors of one placement and shape differ in nothing but their names
    here = default_group()
    world = None if here is None else weakref.ref(here)  # in another one this rank may have another number
    for index, (name, param, group) in enumerate(_listed(source)):
        try:
            if not isinstance(param, Tensor):
                raise ValueError(f"a parameter is a tensor, found {type(param).__name__}")
            engine = engine_for(param, group)
            signature = engine.signature(param)
            options = (name, *map(group.get, ("rank_local", "clip_grad", "process_group")), world)
            kept = known.get(index)
            if kept is None or not kept.holds_for(param, engine, signature, options):
                plain = not group and is_plain_dtensor(param, engine)
                like = alike.get(signature) if plain else None
                share = _share(name, param, engine, group) if like is None else like.of(name, param)
                if plain and share.fault is None:
                    alike[signature] = share
                kept = known[index] = _Known(signature, options, share)
            shares.append(kept.share)
            if kept.share.fault is not None:
                faults.add(kept.share.fault)
        except Exception as wrong:  # whatever it is, the other ranks must hear of it
            faults.catch(wrong, f"{name}: ")
            if isinstance(param, Tensor):
                waiting |= sharers(param, group)
    return shares, waiting


def _listed(source: Source) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """(name, parameter, group) in the user's order."""
    return list(_entries(source))


def _entries(source: Source) -> Iterable[tuple[str, Any, Mapping[str, Any]]]:
    if isinstance(source, Optimizer):
        for index, group in enumerate(source.param_groups):
            for name, param in named_params(group, index):
                yield name, param, group
        return
    if isinstance(source, nn.Module):
        source = source.named_parameters()
    for index, entry in enumerate([source] if isinstance(source, Tensor) else source):
        named = isinstance(entry, tuple) and len(entry) == 2
        name, param = entry if named else (f"parameter {index}", entry)
        yield str(name), param, {}


def _share(name: str, param: Tensor, engine: Engine, group: Mapping[str, Any]) -> Share:
    rank_local, clipped = bool(group.get("rank_local", False)), bool(group.get("clip_grad", True))
    about = engine.describe(param, MatrixView(engine.shape(param), 1, ()), replicas_of(group))
    counted, fault = False, None
    layout = _layout(about) if about.counted is None else None
    if about.counted is not None:
        counted = about.counted is True
        fault = f"{name}: {about.counted}" if clipped and isinstance(about.counted, str) else None
    elif layout is not None:
        counted = len(about.ranks) == 1 or layout.replica_index.get(my_rank(), 0) == 0
    else:
        fault = (
            f"{name}: it stores shape {about.storage_shape} here and not what its placements imply ({about.text}), so "
            "which ranks keep the same data cannot be told. Redistribute it"
        )
    loose = len(about.ranks) == 1 and not rank_local
    # the global shape; without the dim that is cut, if only the sizes of all shards would tell it
    shape = str(tuple(engine.shape(param)))
    if isinstance(engine, TensorParallelEngine):
        shape = engine.common_shape(param)
    line = f"{_said(name)} {shape} {clipped} "
    return Share(name, param, engine, about, about.ranks, counted, rank_local, loose, clipped, line, fault)


def _said(name: str) -> str:
    """The name that ranks compare: one that the user gave."""
    return "" if name.startswith("parameter ") else name


def _layout(about: Description) -> ParamLayout | None:
    """Who counts what is read off the layout, so it must be the true one wherever there are replicas."""
    for claim in about.claims:
        if same_storage(claim.storage_shape, about.storage_shape):
            return claim.layout
    likeliest = about.claims[0].layout
    return None if likeliest.has_replicas else likeliest
