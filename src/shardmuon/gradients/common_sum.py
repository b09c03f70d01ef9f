"""What all ranks sum together: one norm, the same bits on each of them, or one error.

[Note: who sums with whom]
    Of the ranks that keep the same data one counts it. Each rank's groups are the sets of ranks that share one of its
    parameters. One of them must contain the others: all of its ranks sum the same numbers. A group that is largest for
    one of its ranks is so for all of them. A `process_group` goes beyond that. It contains the groups of each of its
    ranks, and then it is what sums; or it takes one rank of each (pipeline stages), and then what each group summed is
    summed over it.

[Note: who votes]
    All ranks that groups and process groups connect, the component, vote before they sum. A rank that knows no table of
    its parameters does not know the component either. It says so in a vote of its largest groups instead, mostly that
    very component, where those that have a table hear it; then all make a new one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shardmuon.comm.component import Ranks, in_order, largest_of
from shardmuon.comm.faults import Fault
from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.comm.vote import Ballot, Flag, Phase, Verdict, gather, vote
from shardmuon.engines.base import MISPLACED
from shardmuon.errors import Refused, ranks_text
from shardmuon.gradients.norms import NOTHING, Counted, combine, count
from shardmuon.gradients.shares import Bound, Given, Reach, Share, keep, known
from shardmuon.layout.bind import Listed, bind, ties_of

_ALIGN, _OTHERS = 1, 2  # presence bits: gradients to redistribute first; this rank is in sets beyond those that vote
_NUM_BITS = 2


class Norm(NamedTuple):
    """The norm of all gradients.

    Attributes:
        total: The norm.
        held: What this rank keeps of the gradients that it was made of.
        wide: Some gradient of any rank is fp64.
    """

    total: float
    held: list[tuple[Share, Tensor]]
    wide: bool


@dataclass
class _Mine:
    """What this rank has to say in one vote, and to sum after it."""

    bound: Bound | None = None
    states: list[int] = field(default_factory=list)
    held: list[tuple[Share, Tensor]] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)
    digests: dict[Ranks, bytes] = field(default_factory=dict)

    def read(self, bound: Bound, given: Given, norm_type: float, text: str, fault: Fault) -> None:
        """Read gradients and count what this rank counts."""
        self.states, self.held = bound.read(given, fault)
        if fault.text is None and MISPLACED not in self.states:
            self.counted = count(self.held, norm_type, len(bound.component) > 1)
        head = bound.token + text.encode()
        reach = bound.reaches[my_rank()].text
        for ranks, numbers in bound.sets.items():
            said = bytes([self.states[n] for n in numbers if bound.shares[n].compared])
            self.digests[ranks] = _digest(head + reach.encode() + said)
        if bound.beyond is not None:
            self.digests.setdefault(bound.beyond, _digest(head))

    def lines(self, ranks: Ranks, text: str) -> list[str] | None:
        """What it says to a set, in words; None: it does not know the set."""
        if self.bound is None or ranks not in self.digests:
            return None
        reach = [self.bound.reaches[my_rank()].text] if ranks in self.bound.sets else []
        return [text, *reach, *self.bound.lines(ranks, self.states)]


def norm_of_all(given: Given, norm_type: float, text: str, fault: Fault) -> Norm:
    """The norm over all ranks. Collective over the component.

    Args:
        given: This rank's parameters.
        norm_type: p of the p-norm.
        text: Arguments, which must be equal on all ranks.
        fault: What is wrong on this rank already.

    Raises:
        Refused: On every rank; nothing has been scaled.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fresh: Bound | None = None
    aligned = False
    while True:
        mine, current = _Mine(), fresh is not None
        with fault:
            mine.bound = fresh or known(given)
            current = current or (mine.bound is not None and mine.bound.is_current(given))
        bound = mine.bound
        if bound is None:
            fresh = _bind(given, _open(given, fault), fault)
            continue
        if current:
            with fault:
                mine.read(bound, given, norm_type, text, fault)
        flags = (Flag.NONE if current else Flag.STALE) | (Flag.NONE if fault.text is None else Flag.FAULT)
        presence = _ALIGN if MISPLACED in mine.states else 0
        verdict = vote(Ballot(Phase.CLIP, flags, mine.digests, presence, _NUM_BITS), bound.component)
        if verdict.flags & Flag.STALE:
            fresh = _bind(given, None if verdict.presence & _OTHERS else bound.component, fault)
            continue
        if verdict.flags or not verdict.alike or verdict.phase != Phase.CLIP:
            _refuse_unless_stale(mine, bound, text, fault, verdict)
            fresh = _bind(given, bound.component, fault)
            continue
        if not verdict.presence & _ALIGN:
            everyone = dict(zip(bound.component, gather(mine.counted, bound.component), strict=True))
            total = _total(bound, norm_type, everyone, mine.held)
            return Norm(total, mine.held, True in [theirs.wide for theirs in everyone.values()])
        assert not aligned, "a redistributed gradient is still placed unlike its parameter"
        aligned, fresh = True, bound
        bound.align_(given, mine.states)


def _digest(said: bytes) -> bytes:
    return hashlib.blake2b(said, digest_size=16).digest()


# ----------------------------------------------------------------------------------------------------- finding a table


def _open(given: Given, fault: Fault) -> Ranks | None:
    """Tell those who may have a table that this rank has none, see [Note: who votes]. Collective over each of its
    largest sets; returns the component, if all of it has heard."""
    sets: list[Ranks] = []
    for _ in range(2):  # the other ranks wait in these sets: what interrupted this rank once may be gone
        with fault:
            sets = _largest_sets(given, fault)
        if fault.text is None:
            break
    presence, before = _OTHERS if len(sets) > 1 else 0, None
    for ranks in sets:
        verdict = vote(Ballot(Phase.DISCOVER, Flag.STALE, None, presence, _NUM_BITS), ranks)
        before = None if verdict.presence & _OTHERS else ranks
    return before


def _largest_sets(given: Given, fault: Fault) -> list[Ranks]:
    ties = ties_of(list(zip(given.params, given.options, strict=True)), fault)
    beyond = () if given.beyond is None else (given.beyond,)
    return largest_of(in_order([*(ranks for tie in ties for ranks in tie.sets), *beyond]))


def _bind(given: Given, before: Ranks | None, fault: Fault) -> Bound:
    """Make a table, and tell each other who sums with whom. Collective over the component."""
    listed: list[Listed] = []
    bound: Bound | None = None
    reach: Any = None
    with fault:
        listed = given.listed()
    waiting = list(zip(given.params, given.options, strict=True))
    beyond = () if given.beyond is None else (given.beyond,)
    table = bind(my_rank(), listed, waiting, beyond=beyond, before=before, fault=fault)
    with fault:
        bound = Bound(table, given)
        reach = _reach(bound)
    everyone = gather(reach, table.component, fault.text, fault.cause)
    assert bound is not None, "all ranks have settled"
    with fault:
        bound.hear(everyone)
        keep(bound, given)
    return bound


def _reach(bound: Bound) -> Reach:
    """Whom this rank sums with.

    Raises:
        ValueError: There is no common sum.
    """
    beyond, groups = bound.beyond, list(bound.sets)
    largest = largest_of(groups)
    mine = [s.name for s in bound.shares if s.rank_local and len(s.ranks) == 1 and s.clipped]
    if mine and beyond is None and num_ranks() > 1:
        raise ValueError(
            f"{mine[0]}: rank_local=True says that each rank has its own, so the norm must be summed over ranks. Pass "
            "clip_grad_norm_(..., process_group=) the group of all ranks that have some"
        )
    own = largest[0] if largest else (my_rank(),)
    if beyond is not None and set().union(*groups) <= set(beyond):
        return Reach(own, beyond, True)
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
    return Reach(own, beyond, False)


# ----------------------------------------------------------------------------------------------------------- the sum


def _total(
    bound: Bound, norm_type: float, everyone: Mapping[int, Counted], held: Sequence[tuple[Share, Tensor]]
) -> float:
    """The norm, from what every rank of the component counts; nothing here is another rank's to decide.

    Raises:
        Refused: The numbers fit no norm. On every rank.
    """
    stages: dict[Ranks, float] = {}
    totals: dict[Reach, float] = {}
    for largest, _, contained in bound.alike:
        if not contained and largest not in stages:
            if len({everyone[rank].loose_print for rank in largest}) > 1:
                raise Refused(_loose_differ(largest, held))
            parts = [everyone[rank].own for rank in largest]
            stages[largest] = combine([*parts, everyone[largest[0]].loose], norm_type)
    for reach in bound.alike:
        if reach.beyond is None:
            totals[reach] = stages[reach.largest]
        else:
            totals[reach] = _over(reach.beyond, bound, norm_type, everyone, stages, held)
    for ranks in stages:
        found = {repr(totals[bound.reaches[rank]]): rank for rank in ranks}
        if len(found) > 1:
            each = ", ".join(f"that of rank {rank} {total}" for total, rank in found.items())
            raise Refused(
                f"ranks {ranks} clip together but differ: the norm over all of process_group is {each}. Pass groups "
                "that take one rank of each set that shares parameters"
            )
    return totals[bound.reaches[my_rank()]]


def _over(
    beyond: Ranks,
    bound: Bound,
    norm_type: float,
    everyone: Mapping[int, Counted],
    stages: Mapping[Ranks, float],
    held: Sequence[tuple[Share, Tensor]],
) -> float:
    """The norm over a `process_group`."""
    parts: list[float] = []
    prints: list[bytes] = []
    for rank in beyond:
        reach, counted = bound.reaches[rank], everyone[rank]
        if reach.contained:
            parts += [counted.own, counted.loose]
            prints += [counted.loose_print] if counted.loose_print != NOTHING else []
        else:
            parts.append(stages[reach.largest])
    if len(set(prints)) < len(prints) and not math.isinf(norm_type):
        raise Refused(_loose_equal(beyond, held))
    return combine(parts, norm_type)


def _loose_names(held: Sequence[tuple[Share, Tensor]]) -> str:
    names = [share.name for share, _ in held if share.loose]
    return f"{names[0]} and {len(names) - 1} others" if len(names) > 1 else names[0] if names else "none here"


def _loose_differ(ranks: Ranks, held: Sequence[tuple[Share, Tensor]]) -> str:
    return (
        f"the gradients of plain tensors ({_loose_names(held)}) differ between ranks {ranks}. If they are replicas, "
        "average the gradients first; if each rank has its own (experts), say rank_local=True in their group and pass "
        "clip_grad_norm_(..., process_group=)"
    )


def _loose_equal(ranks: Ranks, held: Sequence[tuple[Share, Tensor]]) -> str:
    return (
        f"the gradients of plain tensors ({_loose_names(held)}) are equal on some of the ranks {ranks}, so they are "
        "replicas and would count several times. Give the optimizer the process_group of the replicas, or pass "
        "clip_grad_norm_ a group in which each rank has other parameters"
    )


# ------------------------------------------------------------------------------------------------------------- refusal


def _refuse_unless_stale(mine: _Mine, bound: Bound, text: str, fault: Fault, verdict: Verdict) -> None:
    """Find out together what is wrong, and raise it on every rank; or return on every rank, if no more is wrong than
    that they have different tables: one of them made its own when the others made theirs with what it listed then."""
    component = bound.component
    everyone = gather({(): bound.token, **mine.digests}, component, fault.text, fault.cause)
    if verdict.phase == Phase.CLIP and len({theirs[()] for theirs in everyone}) > 1:
        return
    unlike = None
    with fault:
        unlike = _unlike(dict(zip(component, everyone, strict=True)))
    if unlike is None and fault.text is None:
        raise Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}")
    lines = None
    with fault:
        lines = None if unlike is None else mine.lines(unlike, text)
    said = gather(lines, component, fault.text, fault.cause)
    assert unlike is not None, "who fails to find the set has a fault"
    raise Refused(_difference(unlike, [said[component.index(rank)] for rank in unlike if rank in component]))


def _unlike(everyone: Mapping[int, Mapping[Ranks, bytes]]) -> Ranks | None:
    """The first set, small ones first, of which ranks have unlike digests, or only some have any."""
    for ranks in in_order(ranks for theirs in everyone.values() for ranks in theirs):
        if len({everyone[rank].get(ranks) for rank in ranks if rank in everyone}) > 1:
            return ranks
    return None


def _difference(ranks: Ranks, everyone: Sequence[Sequence[str] | None]) -> str:
    for rank, theirs in zip(ranks, everyone, strict=True):
        first, theirs = everyone[0] or ["nothing to say"], theirs or ["nothing to say"]
        for one, other in zip(first, theirs, strict=False):
            if one != other:
                return (
                    f"ranks {ranks} clip together but differ: rank {ranks[0]} has {one.strip()!r}, rank {rank} has "
                    f"{other.strip()!r}. Every rank that shares a parameter must have its gradient, or none, and pass "
                    "the same arguments"
                )
    raise AssertionError("digests differ, lines do not")
