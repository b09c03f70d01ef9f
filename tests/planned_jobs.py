"""Configs of small models, and a function that compares measurements of real steps with the predictions of
`foresight`."""

from __future__ import annotations

from typing import Any

from published import decoder

from shardmuon.foresight.job import Exact

DENSE = decoder(96, 48, 3, 4, 2, 12, 80)
SPARSE = decoder(96, 48, 2, 4, 2, 12, 80, qk_norm=True, num_experts=4, moe_intermediate_size=24)


def same_as_live(exact: Exact, found: list[dict[str, Any]]) -> None:
    """Assert that the plan digests, the traffic and the stored bytes measured on every rank equal those that
    `foresight` predicts."""
    by_rank = {rank: c for c in exact.classes for rank in c.ranks}
    assert sorted(by_rank) == list(range(exact.world))
    assert list(exact.digests.values()) == found[0]["digests"]
    for rank, live in enumerate(found):
        one, traffic = by_rank[rank], live["traffic"]
        assert (one.exchanges, sum(one.sent)) == (traffic.exchanges, traffic.bytes_sent)
        assert (one.orthogonalized, one.votes) == (traffic.orthogonalized, live.get("votes", int(exact.world > 1)))
        state = {"state": one.stored.momentum + one.stored.moments}
        for kind, number in live["bytes"].items():
            assert state.get(kind, getattr(one.stored, kind, None)) == number, kind
