"""What is wrong on one rank is heard on all of them, and all raise it. Every such talk of the package goes this way.

[Note: how ranks tell each other]
    `Faults` keeps the first thing that is wrong on this rank until the ranks talk: whatever is raised under its guard,
    of any class, so that this rank still takes part in what the others wait for. A talk is one of two. Where nothing is
    mostly wrong, one small all-reduce asks whether a rank has a fault, and the texts follow only then (`spread_fault`).
    Where ranks exchange values anyway, each one's fault travels with its value (`share_with_faults`).
    In a family of groups the news goes from group to group (`relay`). At the end every rank raises the same: `Refused`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardmuon.comm.exchange import Traffic
from shardmuon.comm.groups import group_for, my_rank
from shardmuon.errors import Refused, fault_text
from shardmuon.planning.views import Ranks
from shardmuon.ranks.exchange import agree_max, share_objects

T = TypeVar("T")


@dataclass(slots=True)
class Faults:
    """The first thing that is wrong on this rank, and the first exception that was caught, to be told in a talk."""

    text: str | None = None
    cause: BaseException | None = None

    def add(self, text: str | None, cause: BaseException | None = None) -> None:
        """Take note of what is wrong, if anything is."""
        self.text = self.text or text
        self.cause = self.cause or cause

    def catch(self, wrong: BaseException, where: str = "") -> None:
        """Take note of an exception, which was raised at `where`."""
        self.add(f"{where}{fault_text(wrong)}", wrong.cause if isinstance(wrong, Refused) else wrong)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Whatever is raised inside, of whatever class, is taken note of: the other ranks must hear of it."""
        try:
            yield
        except BaseException as wrong:
            self.catch(wrong)

    @property
    def signed(self) -> str | None:
        """The text for the other ranks: with this rank's number."""
        return None if self.text is None else f"rank {my_rank()}: {self.text}"

    def refusal(self, heard: str | None) -> Refused:
        """What every rank raises that has heard of a fault: in its own words, if it has one."""
        return Refused(self.text or str(heard), self.cause)


class GroupFault(Exception):
    """What is wrong on some rank of a group, in the same words on each of them."""


@dataclass(slots=True)
class Council:
    """The ranks of one group while a plan is built: each says before every talk whether it can go on.

    A rank on which something was raised answers the others' next question, wherever in the code they are, and then none
    of them goes on. So between a question and its talk there must be nothing that may fail.

    Attributes:
        num_largest: Of this rank's groups how many lie in no other.
        hint: The process group to talk in, if one is known.
        rounds: After the first question: how often the group must pass news on, see [Note: who may raise when].
    """

    ranks: Ranks
    device: torch.device
    num_largest: int
    hint: Any = None
    rounds: int = 0

    def raise_any(self, fault: str | None = None) -> None:
        """Collective. Raises GroupFault on every rank if one of them has a fault."""
        fault, flags = spread_fault(fault, self.ranks, self.device, self.hint, [self.num_largest])
        self.rounds = flags[0] if len(self.ranks) > 1 else 0
        if fault is not None:
            raise GroupFault(fault)

    def report(self, wrong: BaseException) -> str:
        """Answer the others' next question with what was raised here; returns what all of them have heard."""
        try:
            self.raise_any(exception_text(wrong))
        except GroupFault as heard:
            return str(heard)
        raise AssertionError("a question that was answered with a fault must be heard")


def spread_fault(
    fault: str | None,  # what is wrong here
    ranks: Ranks,
    device: torch.device,
    hint: Any = None,
    flags: Sequence[int] = (),  # below 256
) -> tuple[str | None, list[int]]:
    """What is wrong on any of these ranks, the same on each of them, and the largest of each flag. Collective: an
    all-reduce of a byte and a byte for each flag, and an exchange of texts if there are any."""
    if len(ranks) == 1:
        return fault, list(flags)
    mine = torch.tensor([fault is not None, *flags], dtype=torch.uint8, device="cpu")
    group_for(ranks, hint)  # so that the group that is known is the one that is used
    troubled, *most = agree_max(mine, ranks, device, Traffic()).tolist()
    return merge_faults(share_objects(fault, ranks)) if troubled else None, most


def share_with_faults(fault: str | None, value: T, ranks: Ranks, hint: Any = None) -> tuple[str | None, list[T]]:
    """What is wrong on any of these ranks, the same on each of them, and everyone's value in rank order. One talk."""
    everyone: list[tuple[str | None, T]] = [(fault, value)]
    if len(ranks) > 1:
        everyone = share_objects((fault, value), ranks, hint)
    return merge_faults(theirs for theirs, _ in everyone), [theirs for _, theirs in everyone]


def relay(rounds: Mapping[Ranks, int], first: int = 0) -> Iterator[tuple[int, Ranks]]:
    """The talks in which news passes through all groups, in one order on every rank: (number of the round, group).

    `rounds`: group, small ones first -> how often it talks, see [Note: who may raise when].
    """
    for number in range(first, max(rounds.values(), default=0)):
        for ranks in rounds:
            if number < rounds[ranks]:
                yield number, ranks


def exception_text(wrong: BaseException) -> str:
    """An exception as other ranks hear of it. A ValueError is found by all of them alike, or names its rank."""
    return str(wrong) if isinstance(wrong, ValueError) and str(wrong) else f"rank {my_rank()}: {fault_text(wrong)}"


def merge_faults(everyone: Iterable[str | None]) -> str | None:
    """What any rank says, each text once."""
    return "; ".join(dict.fromkeys(filter(None, everyone))) or None
