"""What is wrong on one rank is heard on all of them, and all raise it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardmuon.errors import told
from shardmuon.ranks.exchange import (
    Traffic,
    agree_max,
    group_for,
    my_rank,
    share_objects,
)

Ranks = tuple[int, ...]


class Told(Exception):
    """What a group has heard from its ranks, the same on each of them."""


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

    def ask(self, news: str | None = None) -> None:
        """Collective. Raises Told on every rank if one of them has news."""
        if len(self.ranks) > 1:
            flags = torch.tensor([news is not None, self.num_largest], dtype=torch.uint8, device="cpu")
            group_for(self.ranks, self.hint)
            troubled, self.rounds = agree_max(flags, self.ranks, self.device, Traffic()).tolist()
            if troubled:
                news = merged(share_objects(news, self.ranks))
        if news is not None:
            raise Told(news)

    def tell(self, wrong: BaseException) -> str:
        """Answer the others' next question with what was raised here; returns what all of them have heard."""
        try:
            self.ask(news_of(wrong))
        except Told as heard:
            return str(heard)
        raise AssertionError("a question that was answered with news must be heard")


def news_of(wrong: BaseException) -> str:
    """An exception as other ranks hear of it. A ValueError is found by all of them alike, or names its rank."""
    return str(wrong) if isinstance(wrong, ValueError) and str(wrong) else f"rank {my_rank()}: {told(wrong)}"


def num_largest_of(groups: Sequence[Ranks]) -> int:
    """How many of these groups lie in no other."""
    return sum(not any(set(ranks) < set(other) for other in groups) for ranks in groups)


def merged(everyone: Sequence[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(text for text in everyone if text is not None)) or None
