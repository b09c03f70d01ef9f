"""What all ranks sum together: one norm, the same bits on each of them, or one error.

[Note: who sums with whom]
    Of the ranks that keep the same data one counts it. Each rank's groups are the sets of ranks that share one of its
    parameters. One of them must contain the others: all of its ranks sum the same numbers. A group that is largest for
    one of its ranks is so for all of them. A `process_group` goes beyond that. It contains the groups of each of its
    ranks, and then it is what sums; or it takes one rank of each (pipeline stages), and then what each group summed is
    summed over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from shardmuon.comm.component import Ranks, largest_of
from shardmuon.comm.faults import Fault
from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.comm.vote import Phase, gather
from shardmuon.errors import Refused
from shardmuon.gradients.norms import NOTHING, Counted, combine, count
from shardmuon.gradients.shares import Bound, Given, Reach, Share, keep, known
from shardmuon.layout.bind import Listed, Table
from shardmuon.layout.calls import Call, Said, agree, digest_of
from shardmuon.layout.engines.base import MISPLACED, Group

_ALIGN = 1  # presence bit: gradients to redistribute first


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
class _Clipping(Call[Bound]):
    """This rank's side of the sum.

    Attributes:
        given, norm_type, text, fault: See `norm_of_all`.
        beyond: That of `given`.
        states, held: See `Bound.read`.
        counted: What this rank counts.
    """

    given: Given
    norm_type: float
    text: str
    fault: Fault
    beyond: Ranks | None
    states: list[int] = field(default_factory=list)
    held: list[tuple[Share, Tensor]] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)

    phase = Phase.CLIP
    num_bits = 1
    doing = "clip"
    rule = "Every rank that shares a parameter must have its gradient, or none, and pass the same arguments"

    def known(self) -> Bound | None:
        return known(self.given)

    def is_current(self, kept: Bound) -> bool:
        return kept.is_current(self.given)

    def listed(self) -> list[Listed]:
        return self.given.listed()

    def waiting(self) -> list[tuple[Tensor, Group]]:
        return list(zip(self.given.params, self.given.options, strict=True))

    def made(self, table: Table) -> tuple[Bound, Reach]:
        bound = Bound(table, self.given)
        return bound, _reach(bound)

    def heard(self, kept: Bound, everyone: Sequence[Reach]) -> None:
        kept.hear(everyone)
        keep(kept, self.given)

    def read(self, kept: Bound) -> Said:
        """Read gradients and count what this rank counts."""
        self.states, self.held = kept.read(self.given, self.fault)
        misplaced = MISPLACED in self.states
        if self.fault.text is None and not misplaced:
            self.counted = count(self.held, self.norm_type, len(kept.component) > 1)
        head = kept.token + self.text.encode()
        reach = kept.reaches[my_rank()].text
        digests = {} if kept.beyond is None else {kept.beyond: digest_of(head)}
        for ranks, numbers in kept.sets.items():
            said = bytes([self.states[n] for n in numbers if kept.shares[n].compared])
            digests[ranks] = digest_of(head + reach.encode() + said)
        return Said(digests, _ALIGN if misplaced else 0)

    def lines(self, kept: Bound, ranks: Ranks) -> list[str]:
        reach = [kept.reaches[my_rank()].text] if ranks in kept.sets else []
        return [self.text, *reach, *kept.lines(ranks, self.states)]


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
    call = _Clipping(given, norm_type, text, fault, given.beyond)
    bound, verdict = agree(call, fault)
    if verdict.presence & _ALIGN:
        bound.align_(given, call.states)
        bound, verdict = agree(call, fault, bound)
        assert not verdict.presence & _ALIGN, "a redistributed gradient is still placed unlike its parameter"
    everyone = dict(zip(bound.component, gather(call.counted, bound.component), strict=True))
    total = _total(bound, norm_type, everyone, call.held)
    return Norm(total, call.held, True in [theirs.wide for theirs in everyone.values()])


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
