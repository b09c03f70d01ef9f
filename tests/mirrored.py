"""Votes and talks of ranks that do not exist: each says what this one does, of itself."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

from shardmuon.comm import vote
from shardmuon.comm.groups import Ranks, my_rank
from shardmuon.comm.vote import Entry
from shardmuon.layout.grid import Ties


class _Lane:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.me = ranks, ranks.index(my_rank())

    def merge(self, message: vote._Message, merged: Any, what: str) -> vote._Message:
        """Return the sum of all digests, which are equal and cancel."""
        *said, _, presence = message
        return *said, 0, presence

    def share(self, value: bytes, what: str) -> list[Any]:
        return [_said_by(rank, pickle.loads(value)) for rank in self.ranks]


def _said_by(rank: int, said: Any) -> Any:
    if isinstance(said, dict) and all(isinstance(entry, Entry) for entry in said.values()):
        return {rank: _said_by(rank, said[my_rank()])}
    if isinstance(said, Entry):
        ties = tuple(Ties((rank,), tie.mates) for tie in said.facts.ties)
        return said._replace(facts=said.facts._replace(ties=ties))
    return said


@contextlib.contextmanager
def mirrored_lanes() -> Iterator[None]:
    """Let whoever talks over a lane hear its own words from all others. For tensors that are not tensor-parallel."""
    with mock.patch.object(vote, "lane_of", _Lane):
        yield
