"""What all ranks sum together: one norm, the same bits on each of them, or one error.

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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from shardmuon.comm.groups import group_ranks, my_rank, num_ranks
from shardmuon.engines.base import MISPLACED, STATES
from shardmuon.gradients.norms import NOTHING, Counted, combine
from shardmuon.gradients.shares import Share
from shardmuon.planning.views import Ranks
from shardmuon.ranks.council import Faults, largest_of, share_with_faults
from shardmuon.ranks.exchange import gather_bytes

_REPORT = struct.Struct("<???8sdd8s")


class _Report(NamedTuple):
    """What one rank tells a group."""

    troubled: bool
    misplaced: bool
    wide: bool
    digest: bytes  # of what the ranks must agree on
    own: float
    loose: float
    loose_print: bytes


class CommonSum:
    """The collectives of one call, in one order on every rank: this rank's groups, small ones first, then
    `process_group`, then, if that takes one rank of each group, the largest group again.

    Attributes:
        faults: What is wrong on this rank.
        misplaced: After `total`: some rank has a gradient to redistribute first, so there is no norm yet.
        wide: After `total`: some gradient is fp64.
        device: Where the first parameter is.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        waiting: Mapping[Ranks, Any],  # groups that expect to hear from this rank, whatever it could list
        process_group: Any,
        text: str,  # arguments, which must be equal on all ranks
        faults: Faults,
    ) -> None:
        self.shares, self.text, self.faults = shares, text, faults
        self.misplaced = self.wide = False
        self.device = torch.device("cpu")
        self._apart = False  # ranks of a group would go on to different groups, so none of them does
        self._heard: str | None = None  # what is wrong on any rank of a group
        beyond = () if process_group is None else tuple(sorted(group_ranks(process_group)))
        self._beyond = beyond if len(beyond) > 1 else None
        self._devices: dict[Ranks, torch.device] = {}
        self._members: dict[Ranks, list[int]] = {}
        self._hints = dict(waiting)
        for index, share in enumerate(shares):
            self._members.setdefault(share.ranks, []).append(index)
            if len(share.ranks) > 1:
                self._hints[share.ranks] = share.description.group
        self._groups = sorted(sorted(self._hints), key=len)
        self._largest = self._groups[-1:]
        if self._beyond is not None:
            self._hints[self._beyond] = process_group
        self._contains = self._beyond is not None and set().union(*self._groups) <= set(self._beyond)
        with faults.guard():
            self._largest = largest_of(self._groups)
            for ranks, members in self._members.items():
                first = shares[members[0]]
                self._devices[ranks] = first.engine.storage(first.param).device
            self.device = self._devices[shares[0].ranks] if shares else self.device
            faults.add(self._without_common_sum())

    @property
    def compares_loose(self) -> bool:
        """Whether any other rank is told of plain tensors that may be replicas."""
        return bool(self._groups) or self._beyond is not None

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

    def total(self, states: Sequence[int], counted: Counted, norm_type: float) -> float:
        """The norm over all ranks. Raises Refused on every rank if something is wrong on one."""
        self.misplaced, self.wide = MISPLACED in states, counted.wide
        own, loose, code = counted.own, counted.loose, counted.loose_print
        reach = f"process_group={self._beyond}" if self._contains else f"one rank each={self._beyond is not None}"
        for ranks in self._groups:
            listed: list[str] = []
            with self.faults.guard():
                listed = self._lines(ranks, states)
            reports = self._round(ranks, [self.text, reach, *listed], own, loose, code)
            if not self._contains and ranks == self._largest[-1]:
                with nullcontext() if self._beyond is None else self.faults.guard():
                    if len({theirs.loose_print for theirs in reports}) > 1:
                        self._hear(self._loose_differ(ranks))
                    own, loose, code = combine([*(theirs.own for theirs in reports), loose], norm_type), 0.0, NOTHING
        total = combine([own, loose], norm_type) if self._beyond is None else 0.0
        if self._beyond is not None and not self._apart:
            reports = self._round(self._beyond, [self.text, ""], own, loose, code)
            with nullcontext() if self._contains else self.faults.guard():  # the others wait for this rank's next word
                prints = [theirs.loose_print for theirs in reports if theirs.loose_print != NOTHING]
                if len(set(prints)) < len(prints) and not math.isinf(norm_type):
                    self._hear(self._loose_equal(self._beyond))
                total = combine([x for theirs in reports for x in (theirs.own, theirs.loose)], norm_type)
            if not self._contains:
                said = ["", f"the norm over all of process_group is {total!r}"]
                self._round(self._largest[0], said, 0.0, 0.0, NOTHING)
        if self._news is not None:
            raise self.faults.refusal(self._news)
        return total

    def _lines(self, ranks: Ranks, states: Sequence[int]) -> list[str]:
        """What the ranks of a group must agree on, a line for each parameter."""
        found = []
        for index in self._members.get(ranks, ()):
            share = self.shares[index]
            found.append(share.line if share.description.empty_lacks_gradient else share.line + STATES[states[index]])
        return found

    def _round(self, ranks: Ranks, lines: Sequence[str], own: float, loose: float, code: bytes) -> list[_Report]:
        """Report to a group; what its ranks must agree on is in `lines`."""
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
        mine = _Report(self._news is not None, self.misplaced, self.wide, digest, own, loose, code)
        device = self._devices.get(ranks, self.device)
        everyones = gather_bytes(_REPORT.pack(*mine), ranks, device, self._hints[ranks])
        reports = list(itertools.starmap(_Report, map(_REPORT.unpack, everyones)))
        self.misplaced = self.wide = troubled = False
        for theirs in reports:
            self.misplaced, self.wide = self.misplaced or theirs.misplaced, self.wide or theirs.wide
            troubled = troubled or theirs.troubled or theirs.digest != digest  # if any differs, one does on each rank
        if troubled:
            heard, everyone = share_with_faults(self._news, lines, ranks)
            self._apart = self._apart or len({lines[1] for lines in everyone}) > 1
            self._hear(heard or _difference(ranks, everyone))
        return reports

    @property
    def _news(self) -> str | None:
        return self._heard or self.faults.signed

    def _hear(self, news: str) -> None:
        self._heard = self._heard or news

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
