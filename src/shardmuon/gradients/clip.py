"""Gradient clipping by the global norm of all gradients, for any sharding of the parameters. Either all ranks get the
same norm, bit for bit, or all ranks raise an error.

[Note: who sums with whom]
    Two ranks are connected if a parameter is sharded or replicated over them, or if both are in the `process_group`
    that is passed to `clip_grad_norm_`. All ranks that are connected directly or through other ranks compute one norm
    together. Data that is stored on several ranks is counted only once.

    For some tensors, this module cannot know whether other ranks store replicas. A plain tensor can be a replica, as
    under DDP, or exist on one rank only. A DTensor whose mesh covers only some of the ranks, such as those of one
    data-parallel axis, can have replicas on other ranks (in layers that tensor parallelism does not shard) or none (in
    experts and pipeline stages). The gradients of such tensors are called loose in this file.

    To find replicas, each rank groups its loose gradients by shape and by the set of ranks that store the tensor, and
    computes one norm per group. Groups on two ranks are treated as replicas and counted once if their shapes and norms
    are equal, and if each rank has the same index in its own set. Norms of few elements can be equal by chance. So
    small gradients are treated as replicas only if the norms of all loose gradients on these sets of ranks are equal,
    too.

    If any parameter is sharded or known to be replicated over a set of ranks, the loose gradients of plain tensors must
    be equal on these ranks, because unequal gradients are probably replicas that were not averaged. This rule does not
    apply if all of these ranks are in the `process_group` that is passed to `clip_grad_norm_`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon import texts
from shardmuon._torch import flattened, foreach, foreach_norm, local_if_any, without_autocast
from shardmuon.comm.groups import GroupRef, Ranks, group_ranks, my_rank, num_ranks
from shardmuon.comm.vote import Agreed, Ballot, Fault, Flag, Phase, digest_of, gather
from shardmuon.errors import ExchangeError, Refused, about, fault_text, stays_itself
from shardmuon.host import Hosts
from shardmuon.layout.bind import Listed, Table, TableCall, union
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import GradientState, Group, names_of
from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import Ints
from shardmuon.options import PLACE_OPTIONS, SETS, refuse_sets
from shardmuon.step.validate import gradient_storage


@torch._disable_dynamo  # as for `Muon.step`
@torch.no_grad()
def clip_grad_norm_(
    parameters: Optimizer | nn.Module | Tensor | Iterable[Any],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    process_group: Any = None,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), where `norm` is the norm of all gradients taken as one
    vector.

    Call this function after the last backward pass of a step and before `step()`, on every rank that stores a part or a
    replica of the parameters, even if the rank has no gradients. One norm covers Muon's and AdamW's parameters,
    DTensors on any mesh and plain tensors. Each element counts once. The norm is summed in fp64, rounded to fp32, and
    has the same bits on every rank. docs/clipping.md explains how clipping affects Muon, and which ranks compute a norm
    together.

    Args:
        parameters: An optimizer, some of its `param_groups`, a module, parameters or named parameters. Prefer the
            optimizer or its groups, because only groups have the options `process_group` (ranks that store replicas of
            a plain tensor) and `tp_group` (ranks that store its shards). For both options, () means that there are no
            such ranks.
        max_norm: Largest allowed norm.
        norm_type: Order p of the p-norm, above 0; inf selects the largest absolute value.
        error_if_nonfinite: If True, raise an error if the norm is inf or nan. If False, the gradients are
            multiplied by 0 or nan in this case, as in torch.
        process_group: Group whose ranks compute one norm, together with all ranks that store other parts or replicas of
            their parameters. Needed with pipeline stages, and for experts that exist on only one rank.

    Returns:
        The norm before clipping, as a 0-dim plain tensor on the device of the first parameter.

    Raises:
        ValueError: Gradients or arguments are wrong on some rank. Raised on every rank, before any gradient is scaled.
        TypeError: `parameters` is a set, whose order can differ between ranks.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is True. Raised on every rank.
        ExchangeError: A rank died or hung, or this rank failed after the ranks had agreed to clip. This rank's
            gradients are set to None, so that they cannot be used in a step.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    # A Python set is rejected without communication, because all ranks run the same code and raise the same error.
    if isinstance(parameters, SETS):
        refuse_sets("clip_grad_norm_: parameters", parameters, "the optimizer, or a list")
    if not isinstance(parameters, (Optimizer, nn.Module, Tensor)):
        # The loop below may read `parameters` twice, which is not possible with an iterator.
        parameters = list(parameters)
    ranks = () if process_group is None else tuple(sorted(group_ranks(process_group)))
    fault, listed = Fault(), list[Listed]()
    refused: str | None = None
    # If an interrupt ends the first try, list the parameters again. This rank needs the list to report the interrupt to
    # the ranks that wait for it.
    for _ in range(2):
        with fault:
            listed = _listed_of(parameters, fault)
            break
    with fault:
        hosts = getattr(parameters, "hosts", None)
        host = hosts.active if isinstance(hosts, Hosts) else None
        refused = Hosts.clipped(one.param for one in listed) if host is None else host.clipping
    # If a framework such as Megatron clips the gradients itself, every rank raises this error without communication,
    # because all ranks use the framework.
    if refused is not None:
        raise ValueError(refused)
    fault.add(None if norm_type > 0.0 else f"norm_type={norm_type} must be above 0")
    fault.add(None if max_norm >= 0.0 else f"max_norm={max_norm} must be at least 0")
    text = f"norm_type={norm_type} max_norm={max_norm} error_if_nonfinite={error_if_nonfinite}"
    call = _Clipping(listed, norm_type, text, fault, ranks if len(ranks) > 1 else None)
    with Refused.made_public(), _or_dropped(listed), without_autocast():
        total = call.norm()
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the gradients' total norm of order {norm_type} is {total}, so it cannot be clipped. Skip this step, or "
            "write error_if_nonfinite=False"
        )
    with _or_dropped(listed):
        norm = torch.tensor(total, dtype=torch.float32, device="cpu")
        # `factor` is computed with the formula and dtypes of torch.nn.utils.clip_grad_norm_
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if float(factor) != 1.0:
            for (device, _), alike in by_kind(call.held.values()).items():
                foreach("mul_", alike, other=factor.to(device))
        return norm.to(local_if_any(listed[0].param).device) if listed else norm


@contextmanager
def _or_dropped(listed: Sequence[Listed]) -> Iterator[None]:
    """Set this rank's gradients to None if the code in the `with` block fails, and raise an error, usually an
    ExchangeError. Keep the gradients if the error is Refused, which all ranks raise together.

    If a rank fails after the last communication, the other ranks do not notice the failure and continue with scaled
    gradients. The next step then raises an error on all ranks that store parts or replicas of the failed rank's
    parameters, because the failed rank has no gradients.
    """
    try:
        yield
    except Refused:
        raise
    except BaseException as wrong:
        for one in listed:
            one.param.grad = None
        if isinstance(wrong, ExchangeError) or stays_itself(wrong):
            raise
        raise ExchangeError(
            f"clipping ended on rank {my_rank()} alone: {fault_text(wrong)}. Its gradients are dropped, those of other "
            "ranks are clipped. Compute the gradients of this step anew on all ranks"
        ) from wrong


_ALIGN = 1  # bit that a rank sets in its vote if it must redistribute gradients before it computes their norm


def _listed_of(source: Any, fault: Fault) -> list[Listed]:
    """List the parameters whose gradients are to be clipped, from an optimizer, a module, a tensor or a list, in the
    user's order. If a parameter is not a tensor, record an error in `fault`."""
    if isinstance(source, (nn.Module, Tensor)):
        source = source.named_parameters() if isinstance(source, nn.Module) else [source]
    found = []
    for at, entry in enumerate(source.param_groups if isinstance(source, Optimizer) else source):
        group: Mapping[str, Any] = entry if isinstance(entry, dict) else {"params": [entry]}
        # Parameters are listed with use_muon=False, so that layouts can be computed for parameters of any shape.
        # Clipping needs no matrices.
        options = {"use_muon": False, **{key: group.get(key) for key in PLACE_OPTIONS}}
        names, of_group = names_of(group), f" of group {at}" if group is entry else ""
        for position, given in enumerate(group["params"]):
            named = isinstance(given, tuple) and len(given) == 2
            identity, param = given if named else (names[position] if names else "", given)
            name = str(identity) or f"parameter {position if of_group else at}{of_group}"
            if isinstance(param, Tensor):
                found.append(Listed(name, str(identity), param, options, None))
            else:
                fault.add(f"{name}: a parameter is a tensor, found {type(param).__name__}")
    return found


class _BoundGradients(Agreed):
    """Cached layouts of the parameters whose gradients are to be clipped. All connected ranks build the layouts
    together. The cache holds no reference to a tensor.

    Attributes:
        beyond: The ranks of `process_group`, ascending; None if there is no group or it has one rank.
        engines: For each parameter, the engine (storage adapter) that accesses the parameter's local storage.
        key: Key that identifies the parameters, layouts and options. A later call with an equal key can use the cache.
        counted: Indices of the parameters whose local gradients this rank counts in the norm. Ranks that store replicas
            of these gradients do not count them.
        loose: Dict from (ranks that store the parameter, shape) to the indices of parameters with loose gradients.
            These are gradients that may have replicas on other ranks ([Note: who sums with whom]). For a plain tensor
            without a process group, the only known rank is this rank.
        lines: Description of each parameter in error messages, equal on all ranks that store the parameter.
        compared: For each parameter, True if its gradient must exist either on all ranks that store the parameter or on
            none of them.
        in_order: Indices of the parameters in the order of communication. Parameters on small sets of ranks come first.
            Parameters on the same set of ranks stay in the user's order.
        together: All ranks that store parts or replicas of this rank's parameters, ascending. Empty if there are no
            other such ranks, or if `beyond` contains all of them.
        replicas: The distinct values of `together` on all ranks. Within each of these sets of ranks, loose gradients of
            plain tensors must be equal.
    """

    replicas: set[Ranks]

    def __init__(self, table: Table, beyond: Ranks | None) -> None:
        super().__init__(table.component, table.token, table.sets)
        params, self.beyond = table.params, beyond
        self.key = _key_of(params)
        self.engines = [engine for *_, engine, _ in self.key]
        self.in_order = [number for numbers in table.sets.values() for number in numbers]
        self.counted = {number for number, layout in enumerate(table.layouts) if _counts(layout)}
        self.compared = [not claim.empty_lacks_gradient for claim in table.claims]
        self.lines = [f"{one.identity} {layout.view.shape}" for one, layout in zip(params, table.layouts, strict=True)]
        self.loose: dict[tuple[Ranks, Ints], list[int]] = {}
        for number, (one, claim, layout) in enumerate(zip(params, table.claims, table.layouts, strict=True)):
            if claim.uncounted is not None:
                raise ValueError(f"{one.name}: {claim.uncounted}")
            given = GroupRef.of(one.group.get("process_group"))
            # Unless the parameter group's option `process_group` is (), other ranks may have replicas of this
            # parameter.
            if given is None or given.ranks:
                if len(layout.ranks) < len(table.component):
                    self.loose.setdefault((layout.ranks, layout.view.shape), []).append(number)
            elif len(layout.ranks) == 1 and beyond is None and len(table.component) < num_ranks():
                raise ValueError(
                    f"{one.name}: process_group=() says that each rank has its own, so the norm must be summed over "
                    "ranks. Pass clip_grad_norm_(..., process_group=) the group of all ranks that have some"
                )
        sharers = union(self.sets)
        self.together = () if set(sharers) <= set(beyond or ()) else sharers


def _key_of(params: Sequence[Listed]) -> list[tuple[str, int, Group, Engine, object]]:
    """Make a key for the cached layouts of a list of parameters. For each parameter, the key contains the name, id,
    options, engine (storage adapter), and the engine's summary of the layout. A new tensor can have the same id as a
    deleted tensor, but cached layouts with an equal key are still valid, because the key determines the layouts."""
    known = [(one, engine_for(one.param, one.group)) for one in params]
    return [(one.name, id(one.param), one.group, engine, engine.signature(one.param)) for one, engine in known]


def _counts(layout: ParamLayout) -> bool:
    """Decide whether this rank counts its part of a gradient in the global norm. If several ranks store the same part,
    only the first of these ranks counts it.

    Raises:
        ValueError: This rank stores several pieces of the tensor, and would have to count some of them but not others.
    """
    rank = my_rank()
    first = {layout.keepers[piece][0] == rank for piece in layout.pieces[rank]}
    if len(first) > 1:
        raise ValueError(
            f"a tensor of shape {layout.view.shape} has replicas of some of the parts that rank {rank} keeps of it, so "
            "a norm would count them several times. Redistribute it"
        )
    return True in first


# Cache of layouts for gradient clipping. The key is the first parameter of the list of parameters to clip, so another
# list that begins with this parameter replaces the cached layouts.
_BOUND: Any = WeakTensorKeyDictionary()


@dataclass
class _Clipping(TableCall[_BoundGradients]):
    """One rank's part in computing the norm of all gradients.

    Attributes:
        params: This rank's parameters.
        norm_type: Order p of the p-norm.
        text: The arguments of `clip_grad_norm_` as a string, which must be equal on all ranks.
        fault: Record of the error on this rank, if one occurred.
        beyond: The ranks of `process_group`, ascending; None if there is no group or it has one rank.
        held: Dict from a parameter's index to the local storage of its gradient. Gradients that have no elements on
            this rank are left out.
        states: `GradientState` of each parameter's gradient.
        counted: Norm of the gradient elements that this rank counts, excluding loose gradients.
        loose: A tuple (fingerprint, norm, alone) for each group of loose gradients with the same shape and the same set
            of ranks ([Note: who sums with whom]). Replicas have equal fingerprints. `alone` is True if the set contains
            only this rank, as for plain tensors without a process group.
    """

    params: Sequence[Listed]
    norm_type: float
    text: str
    fault: Fault
    beyond: Ranks | None
    held: dict[int, Tensor] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    counted: float = 0.0
    loose: list[tuple[bytes, float, bool]] = field(default_factory=list)

    phase = Phase.CLIP
    doing = "clip"
    rule = "Every rank that shares a parameter must have its gradient, or none, and pass the same arguments"

    def known(self) -> _BoundGradients | None:
        found: _BoundGradients | None = _BOUND.get(self.params[0].param) if self.params else None
        # Layouts cached by a call with a different `process_group` are invalid, because different ranks took part in
        # that call.
        return found if found is not None and found.beyond == self.beyond else None

    def is_current(self, kept: _BoundGradients) -> bool:
        return kept.key == _key_of(self.params)

    def listed(self) -> list[Listed]:
        return list(self.params)

    def made(self, table: Table) -> tuple[_BoundGradients, tuple[Ranks, bool]]:
        bound = _BoundGradients(table, self.beyond)
        return bound, (bound.together, bool(self.params))

    def heard(self, kept: _BoundGradients, everyone: Sequence[tuple[Ranks, bool]]) -> None:
        kept.replicas = {together for together, _ in everyone}
        # If any rank has no parameters, no rank caches the layouts. A rank finds cached layouts by its first parameter,
        # and all ranks or none must use cached layouts.
        if all(has_params for _, has_params in everyone):
            _BOUND[self.params[0].param] = kept

    def read(self, kept: _BoundGradients) -> Ballot:
        """Read this rank's gradients, compute its contribution to the norm, and return its ballot for the vote on
        clipping."""
        self.states, self.held = [GradientState.NONE] * len(self.params), {}
        for number, one in enumerate(self.params):
            if one.param.grad is None:
                continue
            with about(one.name):
                weight = kept.engines[number].storage(one.param)
                local = gradient_storage(one.param, one.param.grad, kept.engines[number], weight)
            self.states[number] = GradientState.MISPLACED if local is None else GradientState.READY
            if local is not None and local.numel():
                self.held[number] = local
        if self.fault.text is None and GradientState.MISPLACED not in self.states:
            self._count(kept)
        sets = kept.sets if kept.beyond is None else {kept.beyond: (), **kept.sets}
        alike = {ranks: [self.states[n] for n in numbers if kept.compared[n]] for ranks, numbers in sets.items()}
        align = _ALIGN if GradientState.MISPLACED in self.states else 0
        said = {ranks: digest_of((kept.token, self.text, states)) for ranks, states in alike.items()}
        return Ballot(self.phase, Flag.NONE, said, align)

    def _count(self, kept: _BoundGradients) -> None:
        """Compute this rank's contribution to the norm of all gradients: the norm of the gradients that this rank
        counts, and the norms and fingerprints of loose gradients (gradients that may have replicas on other ranks)."""
        own = {n: local for n, local in self.held.items() if n in kept.counted}
        norms, self.loose = dict[tuple[Ranks, Ints], float](), []
        for key, numbers in kept.loose.items():
            norms[key] = _norm_of([own.pop(n) for n in numbers if n in own], self.norm_type)
        for (ranks, shape), norm in norms.items():
            facts: tuple[Any, ...] = ranks.index(my_rank()), shape, norm
            # Loose gradients, which may have replicas on other ranks, are treated as replicas if their norms are equal.
            # Norms of fewer than 64 bf16 elements per rank are often equal by chance (for single elements, in 1 of 500
            # pairs). For such small gradients, the norms of all loose gradients on these ranks must be equal, too.
            if math.prod(shape) * len(kept.loose[ranks, shape]) < 64 * len(ranks):
                facts += (_combine([other for (on, _), other in norms.items() if on == ranks], self.norm_type),)
            if norm:
                self.loose.append((digest_of(facts), norm, len(ranks) == 1))
        self.counted = _norm_of(list(own.values()), self.norm_type)

    def lines(self, kept: _BoundGradients, ranks: Ranks) -> list[str]:
        """Return the strings that must be equal on all of `ranks`: one string with the arguments of `clip_grad_norm_`,
        and for each parameter that is sharded or replicated over exactly these ranks, one string with the state of its
        gradient."""
        words = {n: self.states[n] if kept.compared[n] else "" for n in kept.sets.get(ranks, ())}
        return [self.text, *(f"{kept.lines[number]} {word}" for number, word in words.items())]

    def _align(self, bound: _BoundGradients) -> None:
        """Redistribute each gradient whose placement differs from its parameter's, in the same order on all ranks.
        Collective over the ranks that share these parameters."""
        for number in bound.in_order:
            param = self.params[number].param
            if self.states[number] == GradientState.MISPLACED:
                assert param.grad is not None
                param.grad = bound.engines[number].align(param.grad, param)

    def norm(self) -> float:
        """Compute the norm of the gradients on all connected ranks ([Note: who sums with whom]). Collective.

        Raises:
            Refused: Gradients or arguments are wrong on some rank. Raised on every rank, before any gradient is scaled.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        bound, verdict = self.agree(self.fault)
        if verdict.presence & _ALIGN:
            self._align(bound)
            bound, verdict = self.agree(self.fault, bound)
            assert not verdict.presence & _ALIGN, "a redistributed gradient is still placed unlike its parameter"
        everyone = dict(zip(bound.component, gather((self.counted, self.loose), bound.component), strict=True))
        plain = {rank: sorted(code for code, _, alone in parts if alone) for rank, (_, parts) in everyone.items()}
        loose = [self.params[n].name for (on, _), numbers in bound.loose.items() if len(on) == 1 for n in numbers]
        for ranks in sorted(bound.replicas):
            if any(plain[rank] != plain[ranks[0]] for rank in ranks):
                raise Refused(
                    f"the gradients of plain tensors ({texts.listed(loose) or 'none here'}) differ between ranks "
                    f"{ranks}. If they are replicas, average the gradients first; if each rank has its own (experts), "
                    "write process_group=() in their group, or pass clip_grad_norm_(..., process_group=) a group that "
                    "contains all of these ranks"
                )
        replicas = {code: norm for _, parts in everyone.values() for code, norm, _ in parts}
        return _combine([*(own for own, _ in everyone.values()), *replicas.values()], self.norm_type)


# ------------------------------------------------------------------------------------- norms of local tensors


# Gradients with fewer than `_SMALL` elements are concatenated before their norm is computed, because copying them takes
# less time than computing a separate norm for each of them.
_SMALL = 1 << 12
# Gradients with more than `_CHUNK` elements are split into chunks to save memory, because on CPUs, torch makes an fp64
# copy of each tensor whose norm it computes.
_CHUNK = 1 << 22


def _norm_of(tensors: Sequence[Tensor], norm_type: float) -> float:
    """Compute the p-norm of all elements of several tensors, taken as one vector. The CPU synchronizes with each device
    once per dtype."""
    found: list[float] = []
    for alike in by_kind(tensors).values():
        small = [part for part in alike if part.numel() < _SMALL]
        whole = [part for part in alike if part.numel() >= _SMALL] + ([flattened(small)] if small else [])
        flat = [part.view(-1) if part.is_contiguous() else part for part in whole]
        parts = [chunk for part in flat for chunk in part.split(max(1, _CHUNK * len(part) // part.numel()))]
        found += torch.stack(foreach_norm(parts, norm_type)).tolist()
    return _combine(found, norm_type)


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors by device and dtype."""
    table: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        table.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return table


def _combine(norms: Iterable[float], norm_type: float) -> float:
    """Compute the p-norm of a vector from the p-norms of its parts. The result does not depend on the order of the
    parts."""
    values = [norm for norm in norms if norm != 0.0]
    if any(map(math.isnan, values)):
        return math.nan
    largest = max(values, default=0.0)
    if len(values) < 2 or math.isinf(norm_type) or math.isinf(largest):
        return largest
    # before powers are summed, norms are scaled by a power of two, which is exact and avoids overflow
    exponent = math.frexp(largest)[1]
    power = math.fsum([math.ldexp(value, -exponent) ** norm_type for value in values])
    root = math.sqrt(power) if norm_type == 2.0 else power ** (1.0 / norm_type)
    return math.ldexp(root, exponent) if math.frexp(root)[1] + exponent <= 1024 else math.inf
