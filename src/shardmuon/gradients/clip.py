"""One gradient norm for the whole job, however the parameters are sharded, and clipping by it.

[Note: who sums with whom]
    Of the ranks that keep the same data one counts it. Each rank's groups are the sets of ranks that share one of its
    parameters. One of them must contain the others: its ranks tell each other what they counted, and all of them sum
    the same numbers. A group that is largest for one of its ranks is so for all of them, so every rank knows without
    asking which groups report, and a rank with two largest groups can tell both that there is no common sum.
    A `process_group` goes beyond that. It contains the groups of each of its ranks, and then it is what sums; or it
    takes one rank of each (pipeline stages), and then what each group summed is summed over it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon._torch import foreach_mul_, foreach_norm
from shardmuon.engines.base import MISPLACED, NONE
from shardmuon.engines.tensor_parallel import meet_replicas
from shardmuon.errors import OUT_OF_MEMORY, Refused, told
from shardmuon.gradients.shares import Ranks, Share, Source, clipped_by_framework, shares_of, waiting_for
from shardmuon.ranks.exchange import gather_bytes, group_ranks, my_rank, num_ranks, share_objects

_CHUNK = 1 << 22  # elements: CPUs convert to fp64 before they sum, so this bounds the copy
_STATES = ("no gradient", "a gradient", "a gradient that is placed unlike the parameter")
_REPORT = struct.Struct("<???8sdd8s")
_NOTHING = b"\0" * 8


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
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set. Raised on every rank.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not isinstance(parameters, (Optimizer, nn.Module, Tensor)):
        parameters = list(parameters)  # read more than once
    shares: list[Share] = []
    refused: str | None = None
    fault: str | None = None
    cause: BaseException | None = None
    waiting: dict[Ranks, Any] = {}
    try:
        refused = clipped_by_framework(parameters)
    except BaseException as error:  # whatever it is, the other ranks must hear of it
        fault, cause = told(error), error
    if refused is not None:
        raise ValueError(refused)
    if isinstance(parameters, Optimizer):
        met = meet_replicas(parameters.param_groups)
        fault, cause = fault or met.fault, cause or met.cause
    try:
        shares, wrong, waiting = shares_of(parameters)
        fault = fault or wrong
    except BaseException as error:
        fault, cause, waiting = fault or told(error), cause or error, waiting_for(parameters)
    if not norm_type > 0.0:
        fault = fault or f"norm_type={norm_type} must be above 0"
    if not max_norm >= 0.0:
        fault = fault or f"max_norm={max_norm} must be at least 0"
    text = f"norm_type={norm_type} max_norm={max_norm} error_if_nonfinite={error_if_nonfinite}"
    talk = _Talk(shares, waiting, process_group, text)
    fault = fault or talk.fault
    aligned = False
    while True:
        states, wrong, counted = [NONE] * len(shares), None, _Counted()
        held: list[tuple[Share, Tensor]] = []
        try:
            states, wrong = _states(shares)
            if (fault or wrong) is None:
                held = [(s, local) for s in shares if (local := s.storage()) is not None]
                counted = _count(held, norm_type)
        except BaseException as error:
            wrong, cause = told(error), cause or error
        try:
            total = talk.settle(states, counted, norm_type, fault or wrong)
        except Refused as wrong_somewhere:
            wrong_somewhere.cause = cause or talk.cause
            public = wrong_somewhere.public()
            raise public from public.__cause__
        if not talk.misplaced:
            break
        assert not aligned, "a redistributed gradient is still placed unlike its parameter"
        aligned = True
        # in one order on all ranks that share any of them: small groups first, then as listed
        for share, state in sorted(zip(shares, states, strict=True), key=lambda s: (len(s[0].ranks), s[0].ranks)):
            if share.clipped and state == MISPLACED:
                share.align_()
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the gradients' total norm of order {norm_type} is {total}, so it cannot be clipped. Skip this step, or "
            "write error_if_nonfinite=False"
        )
    dtype = torch.float64 if talk.wide else torch.float32
    norm = torch.tensor(total, dtype=dtype, device="cpu")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch's formula, in its dtypes
    if float(factor) != 1.0:
        for like_tensors in _by_kind(local for _, local in held).values():
            foreach_mul_(like_tensors, factor.to(like_tensors[0].device))
    return norm.to(shares[0].engine.storage(shares[0].param).device) if shares else norm


# ------------------------------------------------------------------------------------------------- on this rank


class _Counted(NamedTuple):
    """Norms of what this rank counts."""

    own: float = 0.0  # each element is counted on no other rank
    loose: float = 0.0  # see `Share.loose`
    loose_print: bytes = _NOTHING  # equal on two ranks whose loose tensors are replicas; zero if there are none
    wide: bool = False  # whether any is fp64


def _states(shares: Sequence[Share]) -> tuple[list[int], str | None]:
    states, wrong = [], None
    for share in shares:
        try:
            states.append(share.state() if share.clipped else NONE)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            states.append(NONE)
            wrong = wrong or told(error, f"{share.name}: ")
    return states, wrong


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    table: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        table.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return table


def _count(held: Sequence[tuple[Share, Tensor]], norm_type: float) -> _Counted:
    counted = [(share.loose, local) for share, local in held if share.counted]
    norms = _norms([local for _, local in counted], norm_type)
    own = [norm for (loose, _), norm in zip(counted, norms, strict=True) if not loose]
    loose = [norm for (loose, _), norm in zip(counted, norms, strict=True) if loose]
    code = hashlib.blake2b(struct.pack(f"<{len(loose)}d", *loose), digest_size=8).digest()
    wide = any(local.dtype == torch.float64 for _, local in held)
    return _Counted(
        combine(own, norm_type), combine(loose, norm_type), code if any(n != 0.0 for n in loose) else _NOTHING, wide
    )


def _norms(storages: Sequence[Tensor], norm_type: float) -> list[float]:
    """The p-norm of each tensor, summed in fp64. Waits once for each device and dtype."""
    parts: list[list[float]] = [[] for _ in storages]
    position = {id(storage): i for i, storage in enumerate(storages)}
    for like_tensors in _by_kind(storages).values():
        chunks = [(position[id(t)], chunk) for t in like_tensors for chunk in _chunks(t)]
        norms = torch.stack(foreach_norm([chunk for _, chunk in chunks], norm_type)).tolist()
        for (i, _), norm in zip(chunks, norms, strict=True):
            parts[i].append(norm)
    return [combine(part, norm_type) for part in parts]


def _chunks(storage: Tensor) -> list[Tensor]:
    if storage.numel() <= _CHUNK:
        return [storage]
    if storage.is_contiguous():
        return list(storage.view(-1).split(_CHUNK))
    return list(storage.split(max(1, _CHUNK * len(storage) // storage.numel())))


def combine(norms: Iterable[float], norm_type: float) -> float:
    """The p-norm of a vector from those of its parts, whatever their order."""
    values = [norm for norm in norms if norm != 0.0]
    if any(math.isnan(value) for value in values):
        return math.nan
    largest = max(values, default=0.0)
    if len(values) < 2 or math.isinf(norm_type) or math.isinf(largest):
        return largest
    exponent = math.frexp(largest)[1]  # powers of two scale exactly, so that no power overflows
    power = math.fsum(math.ldexp(value, -exponent) ** norm_type for value in values)
    root = math.sqrt(power) if norm_type == 2.0 else power ** (1.0 / norm_type)
    try:
        return math.ldexp(root, exponent)
    except OverflowError:
        return math.inf


# ---------------------------------------------------------------------------------------------- with other ranks


class _Report(NamedTuple):
    """What one rank tells a group."""

    troubled: bool
    misplaced: bool
    wide: bool
    digest: bytes  # of what the ranks must agree on
    own: float
    loose: float
    loose_print: bytes


@dataclass
class _Talk:
    """The collectives of one call, in one order on every rank: this rank's groups, small ones first, then
    `process_group`, then, if that takes one rank of each group, the largest group again.

    Attributes:
        fault: Why there is no common sum, as far as this rank knows.
        misplaced: After `settle`: some rank has a gradient to redistribute first, so there is no norm yet.
        wide: After `settle`: some gradient is fp64.
    """

    shares: Sequence[Share]
    waiting: dict[Ranks, Any]  # groups that expect to hear from this rank, whatever it could list
    process_group: Any
    text: str
    fault: str | None = None
    cause: BaseException | None = None  # the exception behind it
    misplaced: bool = False
    wide: bool = False
    _apart: bool = False  # ranks of a group would go on to different groups, so none of them does
    _news: str | None = None
    _hints: dict[Ranks, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hints = dict(self.waiting)
        for s in self.shares:
            if len(s.description.ranks) > 1:
                hints[s.description.ranks] = s.description.group
        self._groups = sorted(sorted(hints), key=len)
        self._largest = list(self._groups)
        for ranks in self._groups:
            for other in self._groups:
                if set(ranks) < set(other) and ranks in self._largest:
                    self._largest.remove(ranks)
        self._beyond = None if self.process_group is None else tuple(sorted(group_ranks(self.process_group)))
        if self._beyond is not None and len(self._beyond) < 2:
            self._beyond = None
        self._hints = {**hints, **({} if self._beyond is None else {self._beyond: self.process_group})}
        self._devices: dict[Ranks, torch.device] = {}
        self._contains = self._beyond is not None and set().union(*self._groups) <= set(self._beyond)
        try:
            for s in reversed(self.shares):
                self._devices[s.ranks] = self._devices[()] = s.engine.storage(s.param).device
            self.fault = self._without_common_sum()
        except BaseException as error:  # whatever it is, the other ranks must hear of it
            self.fault, self.cause = told(error), error

    def _without_common_sum(self) -> str | None:
        mine = [s.name for s in self.shares if s.rank_local and len(s.ranks) == 1 and s.clipped]
        if mine and self._beyond is None and num_ranks() > 1:
            return (
                f"{mine[0]}: rank_local=True says that each rank has its own, so the norm must be summed over ranks. "
                "Pass clip_grad_norm_(..., process_group=) the group of all ranks that have some"
            )
        if self._contains:
            return None
        if len(self._largest) > 1:
            return (
                f"this rank shares parameters with ranks {self._largest[0]} and others with ranks {self._largest[1]}; "
                "neither contains the other, so there is no norm that all of them would find. Pass "
                "clip_grad_norm_(..., process_group=) a group that contains both, e.g. torch.distributed.group.WORLD"
            )
        if self._beyond is not None and set(self._beyond) & set(self._largest[0]) != {my_rank()}:
            return (
                f"process_group has ranks {self._beyond}, but this rank shares parameters with ranks "
                f"{self._largest[0]}: pass a group that contains all of these, or one that has no other of them"
            )
        return None

    def settle(self, states: Sequence[int], counted: _Counted, norm_type: float, error: str | None) -> float:
        """The norm over all ranks. Raises ValueError on every rank if something is wrong on one."""
        self._news = None if error is None else f"rank {my_rank()}: {error}"
        self.misplaced, self.wide = MISPLACED in states, counted.wide
        own, loose, code = counted.own, counted.loose, counted.loose_print
        reach = f"process_group={self._beyond}" if self._contains else f"one rank each={self._beyond is not None}"
        for ranks in self._groups:
            listed: list[str] = []
            try:
                listed = self._lines(ranks, states)
            except BaseException as wrong:  # the other ranks wait for this one's word
                error, self.cause = error or told(wrong), wrong
                self._tell(f"rank {my_rank()}: {told(wrong)}")
            heard = self._round(ranks, [self.text, reach, *listed], own, loose, code)
            if not self._contains and ranks == self._largest[-1]:
                try:
                    if len({theirs.loose_print for theirs in heard}) > 1:
                        self._tell(self._loose_differ(ranks))
                    own, loose, code = combine([*(theirs.own for theirs in heard), loose], norm_type), 0.0, _NOTHING
                except BaseException as wrong:  # `process_group` waits
                    error, self.cause = error or told(wrong), wrong
                    self._tell(f"rank {my_rank()}: {told(wrong)}")
        total = combine([own, loose], norm_type) if self._beyond is None else 0.0
        if self._beyond is not None and not self._apart:
            heard = self._round(self._beyond, [self.text, ""], own, loose, code)
            try:
                prints = [theirs.loose_print for theirs in heard if theirs.loose_print != _NOTHING]
                if len(set(prints)) < len(prints) and not math.isinf(norm_type):
                    self._tell(self._loose_equal(self._beyond))
                total = combine([x for theirs in heard for x in (theirs.own, theirs.loose)], norm_type)
            except BaseException as wrong:  # the rank's own group waits
                error, self.cause = error or told(wrong), wrong
                self._tell(f"rank {my_rank()}: {told(wrong)}")
            if not self._contains:
                self._round(
                    self._largest[0], ["", f"the norm over all of process_group is {total!r}"], 0.0, 0.0, _NOTHING
                )
        if self._news is not None:
            raise Refused(error or self._news)
        return total

    def _lines(self, ranks: Ranks, states: Sequence[int]) -> list[str]:
        """What the ranks of a group must agree on, a line for each parameter."""
        return [
            f"{s.name if s.name[:10] != 'parameter ' else ''} {s.shape_text} {s.clipped} "
            f"{'' if s.description.empty_lacks_gradient else _STATES[state]}"
            for s, state in zip(self.shares, states, strict=True)
            if s.ranks == ranks
        ]

    def _round(self, ranks: Ranks, lines: Sequence[str], own: float, loose: float, code: bytes) -> list[_Report]:
        """Report to a group; what its ranks must agree on is in `lines`."""
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
        mine = _Report(self._news is not None, self.misplaced, self.wide, digest, own, loose, code)
        device = self._devices.get(ranks, self._devices.get((), torch.device("cpu")))
        everyones = gather_bytes(_REPORT.pack(*mine), ranks, device, self._hints[ranks])
        heard = list(itertools.starmap(_Report, map(_REPORT.unpack, everyones)))
        self.misplaced = self.wide = False
        for theirs in heard:
            self.misplaced, self.wide = self.misplaced or theirs.misplaced, self.wide or theirs.wide
        if any(theirs.troubled for theirs in heard) or len({theirs.digest for theirs in heard}) > 1:
            everyone: list[tuple[str | None, Sequence[str]]] = share_objects((self._news, lines), ranks)
            self._apart = self._apart or len({lines[1] for _, lines in everyone}) > 1
            told = dict.fromkeys(news for news, _ in everyone if news is not None)
            self._tell("; ".join(told) or _difference(ranks, [lines for _, lines in everyone]))
        return heard

    def _tell(self, news: str) -> None:
        self._news = self._news or news

    def _loose_names(self) -> str:
        names = [s.name for s in self.shares if s.loose and s.clipped and s.param.grad is not None]
        return f"{names[0]} and {len(names) - 1} others" if len(names) > 1 else names[0] if names else "none here"

    def _loose_differ(self, ranks: Ranks) -> str:
        return (
            f"the gradients of plain tensors ({self._loose_names()}) differ between ranks {ranks}. If they are "
            "replicas, average the gradients first; if each rank has its own (experts), say rank_local=True in their "
            "group and pass clip_grad_norm_(..., process_group=)"
        )

    def _loose_equal(self, ranks: Ranks) -> str:
        return (
            f"the gradients of plain tensors ({self._loose_names()}) are equal on some of the ranks {ranks}, so they "
            "are replicas and would count several times. Give the optimizer the process_group of the replicas, or pass "
            "clip_grad_norm_ a group in which each rank has other parameters"
        )


def _difference(ranks: Ranks, everyone: Sequence[Sequence[str]]) -> str:
    for rank, theirs in zip(ranks, everyone, strict=True):
        for first, other in zip(everyone[0], theirs, strict=False):
            if first != other:
                return (
                    f"ranks {ranks} clip together but differ: rank {ranks[0]} has {first.strip()!r}, rank {rank} has "
                    f"{other.strip()!r}. Every rank that shares a parameter must have its gradient, or none, and pass "
                    "the same arguments"
                )
        if len(theirs) != len(everyone[0]):
            return (
                f"ranks {ranks} share parameters, but rank {ranks[0]} passes {len(everyone[0]) - 2} of them and rank "
                f"{rank} {len(theirs) - 2}. Pass the same ones on all"
            )
    raise AssertionError("digests differ, lines do not")
