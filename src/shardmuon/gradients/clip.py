"""Clip all gradients by one norm for the whole job, however the parameters are sharded: the same bits on each rank, or
one error.

[Note: who sums with whom]
    Of the ranks that keep the same data one counts it. Each rank's groups are the sets of ranks that share one of its
    parameters. One of them must contain the others: all of its ranks sum the same numbers. A group that is largest for
    one of its ranks is so for all of them. A `process_group` goes beyond that. It contains the groups of each of its
    ranks, and then it is the group that sums; or it takes one rank of each (pipeline stages), and then the groups'
    sums are summed over it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon._torch import foreach_mul_, local_if_any
from shardmuon.comm.groups import Ranks, group_ranks, my_rank, num_ranks
from shardmuon.comm.vote import Ballot, Fault, Flag, Phase, gather, largest_of
from shardmuon.errors import OUT_OF_MEMORY, ExchangeError, Refused, fault_text, made_public, raised_at
from shardmuon.gradients.norms import by_kind, combine, norm_of
from shardmuon.host import Hosts, clipped_by_host
from shardmuon.layout.bind import Call, KeptTable, Listed, Table, agree
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import MISPLACED, NONE, READY, STATES, Group, named_params
from shardmuon.layout.table import ParamLayout, digest_of
from shardmuon.options import SETS, refuse_sets
from shardmuon.step.validate import check_can_align, gradient_storage


@torch.no_grad()
def clip_grad_norm_(
    parameters: Source,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    process_group: Any = None,
) -> Tensor:  # 0-dim, plain
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)); the norm is that of all of them as one vector.

    Call it after the last backward pass of a step and before `step()`, on every rank that shares a parameter, also if
    none of its gradients is there. Muon's and AdamW's parameters, DTensors on any meshes and plain tensors count
    alike, each element once. The norm is summed in fp64 and rounded to fp32 (not if a gradient is fp64), and has the
    same bits on every rank. docs/clipping.md says what clipping does to Muon, and which ranks sum.

    Args:
        parameters: An optimizer, a module, parameters or named parameters. Only an optimizer's groups can say
            ``clip_grad`` (True; False: neither counted nor scaled), ``rank_local``, and over which `process_group` its
            plain tensors are replicas; prefer it.
        max_norm: What the norm may be at most.
        norm_type: p > 0 of the p-norm; inf for the largest absolute value.
        error_if_nonfinite: Raise if the norm is inf or nan. Otherwise gradients are multiplied with 0 or nan, as torch
            does.
        process_group: Also sum over these ranks, which hold other parameters: pipeline stages, experts per rank. It
            must contain every rank that shares a parameter with one of its ranks, or one rank of each such set.

    Returns:
        The norm before clipping, on the device of the first parameter.

    Raises:
        ValueError: Gradients or arguments are wrong here or on another rank, or the ranks have no common sum. Raised
            on every rank; no gradient has been scaled.
        TypeError: Parameters come in a set, whose order differs from rank to rank.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set. Raised on every rank.
        ExchangeError: A rank died or hung, or something was raised here after the ranks had agreed on the norm. This
            rank's gradients are dropped (None), so that no rank steps with them.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if isinstance(parameters, SETS):  # asked here: a function could raise on one rank, while the others wait for it
        refuse_sets("clip_grad_norm_: parameters", parameters, "the optimizer, or a list")
    if not isinstance(parameters, (Optimizer, nn.Module, Tensor)):
        parameters = list(parameters)  # read more than once
    ranks = () if process_group is None else tuple(sorted(group_ranks(process_group)))
    fault, listed = Fault(), list[Listed]()
    refused: str | None = None
    for _ in range(2):  # who shares them waits for this rank: what interrupted it once may be gone
        with fault:
            listed = listed_of(parameters, fault)
            break
    with fault:
        hosts = getattr(parameters, "hosts", None)
        host = hosts.active if isinstance(hosts, Hosts) else None
        refused = clipped_by_host(one.param for one in listed) if host is None else host.clipping
    if refused is not None:  # on every rank alike: the gradients are a framework's, which clips them
        raise ValueError(refused)
    if not norm_type > 0.0:
        fault.add(f"norm_type={norm_type} must be above 0")
    if not max_norm >= 0.0:
        fault.add(f"max_norm={max_norm} must be at least 0")
    text = f"norm_type={norm_type} max_norm={max_norm} error_if_nonfinite={error_if_nonfinite}"
    call = Clipping(listed, norm_type, text, fault, ranks if len(ranks) > 1 else None)
    with made_public(), _or_dropped(listed):
        total, wide = call.norm()
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the gradients' total norm of order {norm_type} is {total}, so it cannot be clipped. Skip this step, or "
            "write error_if_nonfinite=False"
        )
    with _or_dropped(listed):
        norm = torch.tensor(total, dtype=torch.float64 if wide else torch.float32, device="cpu")
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch's formula, in its dtypes
        if float(factor) != 1.0:
            for (device, _), alike in by_kind(local for _, local in call.held).items():
                foreach_mul_(alike, factor.to(device))
        return norm.to(local_if_any(listed[0].param).device) if listed else norm


@contextmanager
def _or_dropped(listed: Sequence[Listed]) -> Iterator[None]:
    """Drop this rank's gradients and raise if something fails here after the last talk, which other ranks cannot hear
    of: they go on with gradients that they have scaled. The next step is then refused on every rank that shares
    them."""
    try:
        yield
    except Refused:
        raise
    except BaseException as wrong:
        for one in listed:
            one.param.grad = None if one.group["clip_grad"] else one.param.grad
        if isinstance(wrong, (ExchangeError, *OUT_OF_MEMORY)) or not isinstance(wrong, Exception):
            raise
        raise ExchangeError(
            f"clipping ended on rank {my_rank()} alone: {fault_text(wrong)}. Its gradients are dropped, those of other "
            "ranks are clipped. Compute the gradients of this step anew on all ranks"
        ) from wrong


Source = Optimizer | nn.Module | Tensor | Iterable[Any]

_ALIGN = 1  # presence bit: gradients to redistribute first


def listed_of(source: Source, fault: Fault) -> list[Listed]:
    """The parameters of a source, in the user's order."""
    groups: list[tuple[Sequence[tuple[str, Any]], Mapping[str, Any]]] = []
    if isinstance(source, Optimizer):
        groups = [(named_params(group, index), group) for index, group in enumerate(source.param_groups)]
    else:
        entries = source.named_parameters() if isinstance(source, nn.Module) else source
        listed = enumerate([entries] if isinstance(entries, Tensor) else entries)
        pairs = [e if isinstance(e, tuple) and len(e) == 2 else (f"parameter {at}", e) for at, e in listed]
        groups = [(pairs, {})]
    found = []
    for named, group in groups:
        options = {key: group.get(key) for key in ("rank_local", "process_group", "tp_group", "partition_dim")}
        stride, clipped = group.get("partition_stride"), bool(group.get("clip_grad", True))
        options.update(partition_stride=stride, clip_grad=clipped, use_muon=False)  # no matrices are read
        for name, param in named:
            identity = "" if str(name).startswith("parameter ") else str(name)  # else the user gave it
            if isinstance(param, Tensor):
                found.append(Listed(str(name), identity, param, options, None, f"clip_grad={clipped}"))
            else:
                fault.add(f"{name}: a parameter is a tensor, found {type(param).__name__}")
    return found


class _GradientShare(NamedTuple):
    """One parameter's gradient on this rank, as far as it is the same in every call.

    Attributes:
        name: Name for messages.
        engine: The engine that reaches its storage.
        counted: True if, of the ranks that keep this data, this one counts it.
        rank_local: True if the user said that this plain tensor is this rank's own.
        loose: True if nobody has said whether other ranks hold the same tensor, as under DDP, or tensors of their own.
        clipped: True if the parameter's group takes part in clipping.
        compared: True if either all ranks that share it must have a gradient, or none.
        line: Text that every rank that shares it has alike, without its gradient.
        fault: Reason why it would be counted several times.
    """

    name: str
    engine: Engine
    counted: bool
    rank_local: bool
    loose: bool
    clipped: bool
    compared: bool
    line: str
    fault: str | None

    def read(self, param: Tensor) -> tuple[int, Tensor | None]:
        """NONE, READY or MISPLACED, and the gradient's local storage if it is ready.

        Raises:
            ValueError: The gradient is unusable.
        """
        try:
            if self.fault is not None:
                raise ValueError(self.fault)
            if param.grad is None:
                return NONE, None
            weight = self.engine.storage(param)
            local = gradient_storage(param, param.grad, self.engine, weight)
            if local is None:
                check_can_align(param, weight)
        except OUT_OF_MEMORY as wrong:
            raised_at(wrong, self.name)
            raise
        except Exception as wrong:
            raise ValueError(f"{self.name}: {fault_text(wrong)}") from wrong
        return (MISPLACED if local is None else READY), local


class _Reach(NamedTuple):
    """The ranks that one rank sums with.

    Attributes:
        largest: The ranks that share its parameters.
        beyond: The ranks of its `process_group`, if it has one.
        contained: True if `beyond` contains all ranks that share parameters with this one; else each of its ranks
            stands for those that it shares parameters with.
    """

    largest: Ranks
    beyond: Ranks | None
    contained: bool

    @property
    def text(self) -> str:
        """Text of what ranks that share a parameter must have alike."""
        return f"process_group={self.beyond}" if self.contained else f"one rank each={self.beyond is not None}"


class _BoundGradients(KeptTable):
    """The layout table of some parameters, as far as their gradients need it, made by all ranks of a component.

    Attributes:
        key: Value that changes with parameters, layouts and options.
        beyond: See `Clipping`.
        shares: Share of each parameter.
        in_order: The parameters' numbers in the order in which ranks talk: small sets first, then as listed.
        reaches: _Reach of each rank of the component.
        alike: The distinct reaches.
    """

    def __init__(self, table: Table, beyond: Ranks | None) -> None:
        super().__init__(table)
        self.key, self.beyond, self.shares = _key_of(table.params), beyond, list[_GradientShare]()
        self.in_order = [number for numbers in table.sets.values() for number in numbers]
        counts = {layout: _counts(layout) for layout in dict.fromkeys(table.layouts)}
        for one, claim, layout in zip(table.params, table.claims, table.layouts, strict=True):
            clipped, alone = one.group["clip_grad"], len(layout.ranks) == 1
            rank_local, loose = (alone and bool(one.group["rank_local"]) is said for said in (True, False))
            line = f"{one.identity} {layout.view.shape} {clipped}"
            fault = claim.uncounted if clipped else None
            engine, compared = engine_for(one.param, one.group), not claim.empty_lacks_gradient
            share = _GradientShare(one.name, engine, counts[layout], rank_local, loose, clipped, compared, line, fault)
            self.shares.append(share)

    def hear(self, reaches: Sequence[_Reach]) -> None:
        """Take note of whom each rank of the component sums with."""
        self.reaches = dict(zip(self.component, reaches, strict=True))
        self.alike = list(dict.fromkeys(reaches))


def _key_of(listed: Sequence[Listed]) -> list[object]:
    """Key under which a table for these parameters is kept, by ids: if an id is used again by a tensor that lies in the
    same way, the table fits that one as well."""
    found: list[object] = []
    for one in listed:
        engine = engine_for(one.param, one.group)
        found.append((one.name, id(one.param), one.group, engine, engine.signature(one.param)))
    return found


def _counts(layout: ParamLayout) -> bool:
    """True if this rank counts what it keeps of a tensor: it is the first of those that keep it.

    Raises:
        ValueError: The rank is the first to keep some of its parts, but not all of them.
    """
    rank = my_rank()
    first = {layout.keepers[held.piece][0] == rank for held in layout.of_rank(rank) if held.piece.numel}
    if len(first) > 1:
        raise ValueError(
            f"a tensor of shape {layout.view.shape} has replicas of some of the parts that rank {rank} keeps of it, so "
            "a norm would count them several times. Redistribute it"
        )
    return True in first


class Counted(NamedTuple):
    """Norms of what a rank counts.

    Attributes:
        own: Norm of elements that no other rank counts.
        loose: Norm of tensors that are `_GradientShare.loose`.
        loose_print: Equal on two ranks whose loose tensors are replicas; empty if there are none.
        wide: True if some gradient is fp64.
    """

    own: float = 0.0
    loose: float = 0.0
    loose_print: bytes = b""
    wide: bool = False


# first parameter -> the table of the last parameters that began with it
_BOUND: Any = WeakTensorKeyDictionary()


@dataclass
class Clipping(Call[_BoundGradients]):
    """Call of one rank for the norm of all gradients, by which it then clips its own.

    Attributes:
        params: This rank's parameters.
        norm_type: p of the p-norm.
        text: The caller's arguments, which must be equal on all ranks.
        fault: Faults found on this rank so far.
        beyond: The ranks of `process_group`, ascending; None if it has no other than this one.
        held: This rank's storage of the gradients that are clipped.
        states, counted: NONE, READY or MISPLACED for each gradient; norms that this rank counts.
    """

    params: Sequence[Listed]
    norm_type: float
    text: str
    fault: Fault
    beyond: Ranks | None
    held: list[tuple[_GradientShare, Tensor]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)

    phase = Phase.CLIP
    doing = "clip"
    rule = "Every rank that shares a parameter must have its gradient, or none, and pass the same arguments"

    def known(self) -> _BoundGradients | None:
        found: _BoundGradients | None = _BOUND.get(self.params[0].param) if self.params else None
        return found if found is not None and found.beyond == self.beyond else None  # the same ranks vote

    def is_current(self, kept: _BoundGradients) -> bool:
        return kept.key == _key_of(self.params)

    def listed(self) -> list[Listed]:
        return list(self.params)

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        return [(one.name, one.param, one.group) for one in self.params]

    def made(self, table: Table) -> tuple[_BoundGradients, _Reach]:
        bound = _BoundGradients(table, self.beyond)
        return bound, _reach(bound)

    def heard(self, kept: _BoundGradients, everyone: Sequence[_Reach]) -> None:
        kept.hear(everyone)
        if self.params:
            _BOUND[self.params[0].param] = kept

    def read(self, kept: _BoundGradients) -> Ballot:
        """Read gradients and count what this rank counts."""
        self.states, self.held = [], []
        for share, one in zip(kept.shares, self.params, strict=True):
            state, local = NONE, None
            if share.clipped:
                state, local = share.read(one.param)
            self.states.append(state)
            if local is not None and local.numel():
                self.held.append((share, local))
        if self.fault.text is None and MISPLACED not in self.states:
            self.counted = self._count(len(kept.component) > 1)
        sets = kept.sets if kept.beyond is None else {kept.beyond: (), **kept.sets}
        said = {ranks: digest_of((kept.token, self._said(kept, ranks))) for ranks in sets}
        return Ballot(self.phase, Flag.NONE, said, _ALIGN if MISPLACED in self.states else 0, num_bits=1)

    def _count(self, compared: bool) -> Counted:
        """Norms of the gradients that this rank counts. `compared`: other ranks compare loose gradients with theirs."""
        own = [local for share, local in self.held if share.counted and not (share.loose and compared)]
        loose = [local for share, local in self.held if share.counted and share.loose and compared]
        code, norms = b"", [norm_of([local], self.norm_type) for local in loose]
        if any(norm != 0.0 for norm in norms):
            code = hashlib.blake2b(struct.pack(f"<{len(norms)}d", *norms), digest_size=8).digest()
        wide = any(local.dtype == torch.float64 for _, local in self.held)
        return Counted(norm_of(own, self.norm_type), combine(norms, self.norm_type), code, wide)

    def _said(self, kept: _BoundGradients, ranks: Ranks) -> list[Any]:
        """Values that the ranks of a set must have alike: arguments; if they share parameters, also the ranks that they
        sum with, and which of these parameters have gradients."""
        numbers = kept.sets.get(ranks)
        states = None if numbers is None else bytes(self.states[n] for n in numbers if kept.shares[n].compared)
        return [self.text, *(() if states is None else (kept.reaches[my_rank()].text, states))]

    def lines(self, kept: _BoundGradients, ranks: Ranks) -> list[str]:
        shares = [(kept.shares[number], self.states[number]) for number in kept.sets.get(ranks, ())]
        lines = [f"{share.line} {STATES[state]}" if share.compared else share.line for share, state in shares]
        return [self.text, *([kept.reaches[my_rank()].text] if shares else []), *lines]

    def align_(self, bound: _BoundGradients) -> None:
        """Redistribute gradients to their parameters' placements, in one order on all ranks that share any of them.
        Collective."""
        for number in bound.in_order:
            param = self.params[number].param
            if self.states[number] == MISPLACED:
                assert param.grad is not None
                param.grad = bound.shares[number].engine.align(param.grad, param)

    def norm(self) -> tuple[float, bool]:
        """The norm over all ranks, and if some gradient of any rank is fp64. Collective over the component.

        Raises:
            Refused: On every rank; nothing has been scaled.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        bound, verdict = agree(self, self.fault)
        if verdict.presence & _ALIGN:
            self.align_(bound)
            bound, verdict = agree(self, self.fault, bound)
            assert not verdict.presence & _ALIGN, "a redistributed gradient is still placed unlike its parameter"
        everyone = dict(zip(bound.component, gather(self.counted, bound.component), strict=True))
        loose = [share.name for share, _ in self.held if share.loose]
        named = f"{loose[0]} and {len(loose) - 1} others" if len(loose) > 1 else "".join(loose) or "none here"
        return _total(bound, self.norm_type, everyone, named), any(theirs.wide for theirs in everyone.values())


def _reach(bound: _BoundGradients) -> _Reach:
    """The ranks that this rank sums with.

    Raises:
        ValueError: There is no common sum.
    """
    beyond, largest = bound.beyond, largest_of(list(bound.sets))
    mine = [share.name for share in bound.shares if share.rank_local and share.clipped]
    if mine and beyond is None and num_ranks() > 1:
        raise ValueError(
            f"{mine[0]}: rank_local=True says that each rank has its own, so the norm must be summed over ranks. Pass "
            "clip_grad_norm_(..., process_group=) the group of all ranks that have some"
        )
    own = largest[0] if largest else (my_rank(),)
    if beyond is not None and set().union(*bound.sets) <= set(beyond):
        return _Reach(own, beyond, True)
    if len(largest) > 1:
        raise ValueError(
            f"this rank shares parameters with ranks {largest[0]} and others with ranks {largest[1]}; neither contains "
            "the other, so there is no norm that all of them would find. Pass clip_grad_norm_(..., process_group=) a "
            "group that contains both, e.g. torch.distributed.group.WORLD"
        )
    if beyond is not None and set(beyond) & set(own) != {my_rank()}:
        raise ValueError(
            f"process_group has ranks {beyond}, but this rank shares parameters with ranks {own}: pass a group that "
            "contains all of these, or one that has no other of them"
        )
    return _Reach(own, beyond, False)


def _total(bound: _BoundGradients, norm_type: float, everyone: Mapping[int, Counted], loose: str) -> float:
    """The norm, from what every rank of the component counts; nothing here is another rank's to decide. `loose`: what
    this rank has of such gradients.

    Raises:
        Refused: The numbers fit no norm. On every rank.
    """

    def of_sharers(ranks: Ranks) -> float:
        if len({everyone[rank].loose_print for rank in ranks}) > 1:
            raise Refused(
                f"the gradients of plain tensors ({loose}) differ between ranks {ranks}. If they are replicas, average "
                "the gradients first; if each rank has its own (experts), say rank_local=True in their group and pass "
                "clip_grad_norm_(..., process_group=)"
            )
        return combine([*(everyone[rank].own for rank in ranks), everyone[ranks[0]].loose], norm_type)

    stages = {reach.largest: of_sharers(reach.largest) for reach in bound.alike if not reach.contained}

    def of_reach(reach: _Reach) -> float:
        if reach.beyond is None:
            return stages[reach.largest]
        parts: list[float] = []
        prints: list[bytes] = []
        for rank in reach.beyond:
            if bound.reaches[rank].contained:
                parts += [everyone[rank].own, everyone[rank].loose]
                prints += [everyone[rank].loose_print] * bool(everyone[rank].loose_print)
            else:
                parts.append(stages[bound.reaches[rank].largest])
        if len(set(prints)) < len(prints) and not math.isinf(norm_type):
            raise Refused(
                f"the gradients of plain tensors ({loose}) are equal on some of the ranks {reach.beyond}, so they are "
                "replicas and would count several times. Give the optimizer the process_group of the replicas, or pass "
                "clip_grad_norm_ a group in which each rank has other parameters"
            )
        return combine(parts, norm_type)

    totals = {reach: of_reach(reach) for reach in bound.alike}
    for ranks in stages:
        found = {repr(totals[bound.reaches[rank]]): rank for rank in ranks}
        if len(found) > 1:
            each = ", ".join(f"that of rank {rank} {total}" for total, rank in found.items())
            raise Refused(
                f"ranks {ranks} clip together but differ: the norm over all of process_group is {each}. Pass groups "
                "that take one rank of each set that shares parameters"
            )
    return totals[bound.reaches[my_rank()]]
