"""The vote: who belongs together, and that all ranks of a component hear the same, simulated and on real ranks."""

from __future__ import annotations

import hashlib
import operator
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardmuon.comm import vote as voting
from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import (
    Ballot,
    Entry,
    Flag,
    Known,
    Phase,
    Verdict,
    discover,
    gather,
    in_order,
    run_together,
    vote,
)
from shardmuon.errors import ExchangeError, Refused, told_by
from shardmuon.testing import RankPool

Family = Sequence[Ranks]


def chain(num: int) -> Family:
    return [(i, i + 1) for i in range(num - 1)]


def ring(num: int) -> Family:
    return [*chain(num), (0, num - 1)]


def grid(rows: int, columns: int) -> Family:
    lines = [tuple(row * columns + column for column in range(columns)) for row in range(rows)]
    return [*lines, *(tuple(row * columns + column for row in range(rows)) for column in range(columns))]


def tied_stages(stages: int, replicas: int) -> Family:
    """Pipeline stages with replicas, and embeddings tied from the first to the last stage by the first replica."""
    inside = [tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]
    return [*inside, (0, (stages - 1) * replicas)]


FAMILIES = {
    "chain": chain(8),
    "ring": ring(8),
    "rows and columns": grid(2, 4),
    "nested": [tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), (0, 1)],
    "tied stages": tied_stages(4, 2),
    "apart": [(0, 1, 2), (3, 4), (5, 6, 7)],
}


def component(family: Family, rank: int) -> Ranks:
    """The component by definition: all that sets connect."""
    found = {rank}
    while True:
        more = found.union(*(set(ranks) for ranks in family if found & set(ranks)))
        if more == found:
            return tuple(sorted(found))
        found = more


def sets_of(family: Family, rank: int) -> tuple[Ranks, ...]:
    return tuple(ranks for ranks in family if rank in ranks)


def random_family(chance: random.Random) -> tuple[int, Family]:
    num = chance.randint(2, 10)
    drawn = (chance.sample(range(num), chance.randint(2, min(4, num))) for _ in range(chance.randint(1, 7)))
    return num, sorted({tuple(sorted(ranks)) for ranks in drawn})


# ------------------------------------------------------------------------------------------------------------ simulated


def flooded(num: int, entries: dict[int, Entry]) -> tuple[dict[int, Known], dict[int, int]]:
    """Knowledge of each rank at the end, and the number of talks that it took part in. A talk waits for all of its
    ranks."""
    known: dict[int, Known] = {rank: {rank: entries[rank]} for rank in range(num)}
    talks = dict.fromkeys(range(num), 0)
    runs = {rank: voting._talks(entries[rank].sets, known[rank]) for rank in range(num)}
    wishes = {rank: next(run, None) for rank, run in runs.items()}
    while any(wishes.values()):
        ready = next((w for w in wishes.values() if w and all(wishes[rank] == w for rank in w)), None)
        assert ready, f"ranks wait for each other: {wishes}"
        said = [dict(known[rank]) for rank in ready]
        for rank in ready:
            talks[rank] += 1
            for heard in said:
                known[rank].update(heard)
            wishes[rank] = next(runs[rank], None)
    return known, talks


def test_a_flood_ends_on_every_rank_with_the_whole_component() -> None:
    chance = random.Random(1)
    families = [random_family(chance) for _ in range(3_000)]
    families += [(8, family) for family in FAMILIES.values()] + [
        (12, chain(12)),
        (16, grid(4, 4)),
        (16, tied_stages(4, 4)),
    ]
    for num, family in families:
        entries = {rank: Entry(sets_of(family, rank), facts=f"of {rank}") for rank in range(num)}
        known, talks = flooded(num, entries)
        for rank in range(num):
            own = component(family, rank)
            assert known[rank] == {other: entries[other] for other in own}
            rounds = {talks[other] // max(1, len(in_order(sets_of(family, other)))) for other in own}
            assert len(rounds) == 1


def doubled(messages: Sequence[Any], merging: Callable[[Any, Any], Any]) -> list[Any]:
    """The result of each member; messages between two members arrive in order."""
    num, results = len(messages), list(messages)
    boxes: dict[tuple[int, int], list[Any]] = {}

    def member(me: int) -> Iterator[int]:
        for hop in voting._hops_of(me, num):
            if hop.to is not None:
                boxes.setdefault((me, hop.to), []).append(results[me])
            if hop.source is not None:
                assert hop.source in hop.behind and me not in hop.behind
                yield hop.source
                heard = boxes[hop.source, me].pop(0)
                results[me] = heard if hop.is_result else merging(results[me], heard)

    runs = [member(me) for me in range(num)]
    waiting = {me: source for me, run in enumerate(runs) if (source := next(run, None)) is not None}
    while waiting:
        me = next((m for m, source in waiting.items() if boxes.get((source, m))), None)
        assert me is not None, f"members {sorted(waiting)} wait for each other"
        del waiting[me]
        if (source := next(runs[me], None)) is not None:
            waiting[me] = source
    assert not any(boxes.values())
    return results


@pytest.mark.parametrize("num", [*range(1, 34), 100, 1024, 1025])
def test_every_message_is_counted_once_on_every_rank(num: int) -> None:
    assert doubled([me * me + 1 for me in range(num)], operator.add) == [sum(me * me + 1 for me in range(num))] * num


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def sent(ballot: Ballot, rank: int) -> voting._Message:
    return voting._unpacked(voting._packed(voting._message(ballot, rank)))


def received(mine: voting._Message, theirs: voting._Message) -> voting._Message:
    return voting._merged(mine, voting._unpacked(voting._packed(theirs)))


def voted(ballots: dict[int, Ballot]) -> Verdict:
    """The verdict of a component, which is the same on each of its ranks."""
    messages = [sent(ballots[rank], rank) for rank in sorted(ballots)]
    found = {
        Verdict(Phase(m.phase), Flag(m.flags), m.total % (1 << 128) == 0, m.presence)
        for m in doubled(messages, received)
    }
    assert len(found) == 1
    return found.pop()


def test_equal_digests_cancel_and_no_difference_does() -> None:
    chance = random.Random(2)
    for _ in range(2_000):
        _, family = random_family(chance)
        own = component(family, chance.choice([ranks[0] for ranks in family]))
        values = {ranks: digest(f"{ranks} {chance.random()}") for ranks in family}
        ballots = {
            rank: Ballot(Phase.STEP, digests={ranks: values[ranks] for ranks in sets_of(family, rank)}) for rank in own
        }
        assert voted(ballots) == Verdict(Phase.STEP, Flag.NONE, True, 0)
        culprit = chance.choice(own)
        ranks = chance.choice(sets_of(family, culprit))
        changed = {**(ballots[culprit].digests or {}), ranks: digest("another")}
        assert not voted({**ballots, culprit: Ballot(Phase.STEP, digests=changed)}).alike


def test_flags_phases_and_presence_are_those_of_any_rank() -> None:
    ballots = {rank: Ballot(Phase.STEP, presence=1 << (rank * 5), num_bits=40) for rank in range(7)}
    ballots[3] = Ballot(Phase.DISCOVER, Flag.STALE | Flag.AUDIT, presence=0, num_bits=40)
    assert voted(ballots) == Verdict(
        Phase.STEP | Phase.DISCOVER, Flag.STALE | Flag.AUDIT, True, sum(1 << (r * 5) for r in range(7) if r != 3)
    )


def test_messages_of_unlike_lengths_and_versions_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    ballots = {rank: Ballot(Phase.STEP, presence=1, num_bits=9 if rank == 2 else 700) for rank in range(5)}
    assert voted(ballots) == Verdict(Phase.STEP, Flag.UNLIKE, True, 1)
    ours = sent(Ballot(Phase.STEP), 0)
    monkeypatch.setattr(voting, "_VERSION", 2)
    theirs = sent(Ballot(Phase.STEP), 1)
    for mine, other, flag in ((ours, theirs, Flag.UNLIKE), (theirs, ours, Flag.UNLIKE), (theirs, theirs, Flag.NONE)):
        assert received(mine, other).flags == flag


# ------------------------------------------------------------------------------------------------------- on real ranks


def _fault_on_one(family: Family, culprit: int) -> tuple[Ranks, str | None, Verdict, str | None, list[str]]:
    """The component; what a discovery, a vote and a gathering say where the culprit, and it alone, has a fault."""
    rank = dist.get_rank()
    known = discover(rank, Entry(sets_of(family, rank), facts=rank))
    own = tuple(known)
    assert [entry.facts for entry in known.values()] == list(own)
    fault = f"rank {rank}: planted" if rank == culprit else None
    refused = _refusal(lambda: discover(rank, Entry(sets_of(family, rank), fault), before=own))
    said = vote(Ballot(Phase.STEP, Flag.FAULT if fault else Flag.NONE, {own: digest("plan")}), own)
    heard = _refusal(lambda: gather(rank, own, fault))
    return own, refused, said, heard, gather(f"value {rank}", own)


def _refusal(call: Any) -> str | None:
    try:
        call()
    except Refused as refused:
        return str(refused)
    return None


def _all_culprits(families: dict[str, Family]) -> list[Any]:
    return [_fault_on_one(family, culprit) for family in families.values() for culprit in range(dist.get_world_size())]


def test_a_fault_on_one_rank_is_heard_by_its_whole_component_and_by_no_other(world8: RankPool) -> None:
    found = world8.run(_all_culprits, FAMILIES)
    cases = [(family, culprit) for family in FAMILIES.values() for culprit in range(8)]
    for index, (family, culprit) in enumerate(cases):
        for rank in range(8):
            own, refused, said, heard, values = found[rank][index]
            assert own == component(family, rank) and values == [f"value {other}" for other in own]
            planted = f"rank {culprit}: planted" if culprit in own else None
            assert refused == heard == planted
            assert said == Verdict(Phase.STEP, Flag.FAULT if planted else Flag.NONE, True, 0)


def test_ranks_that_say_the_same_of_themselves_are_named_together() -> None:
    own = [f"rank {rank}: no room" for rank in (0, 1, 12, 2)]
    assert told_by([*own, None, "all differ", "all differ"]) == ["ranks 0,1,2,12: no room", "all differ"]
    assert told_by(["rank 7: no\nroom", "rank 7: no\nroom", "rank 8: no"]) == ["rank 7: no\nroom", "rank 8: no"]


def _run_with(faulty: Sequence[int]) -> tuple[str, bool]:
    def run() -> str:
        if dist.get_rank() in faulty:
            raise KeyboardInterrupt("planted")
        return "done"

    try:
        return run_together(run), False
    except Refused as refused:
        return str(refused), isinstance(refused.cause, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("faulty", "said"), [((), "done"), ((1,), "rank 1: KeyboardInterrupt: planted"), ((0, 2), "ranks 0,2: Keyb")]
)
def test_what_is_raised_on_some_ranks_is_raised_on_all_in_the_same_words(
    faulty: Sequence[int], said: str, world3: RankPool
) -> None:
    found = world3.run(_run_with, faulty)
    assert len({text for text, _ in found}) == 1 and found[0][0].startswith(said)
    assert [own for _, own in found] == [rank in faulty for rank in range(3)]


def _odd_numbers() -> list[Verdict]:
    """Votes of the first 3, 5, 6 and 7 ranks, with a digest that one of them has otherwise, or none."""
    found = []
    for num in (3, 5, 6, 7):
        ranks = tuple(range(num))
        for odd in (None, *ranks):
            if dist.get_rank() < num:
                value = digest("other" if dist.get_rank() == odd else "same")
                found.append(
                    vote(Ballot(Phase.CLIP, digests={ranks: value}, presence=1 << odd if odd else 0, num_bits=7), ranks)
                )
    return found


def test_votes_of_any_number_of_ranks_agree(world8: RankPool) -> None:
    wanted = [
        Verdict(Phase.CLIP, Flag.NONE, odd is None, 1 << odd if odd else 0)
        for num in (3, 5, 6, 7)
        for odd in (None, *range(num))
    ]
    for rank, found in enumerate(world8.run(_odd_numbers)):
        assert found == wanted[sum(num + 1 for num in (3, 5, 6, 7) if rank >= num) :]


def _a_set_that_one_does_not_know() -> str | None:
    rank, everyone = dist.get_rank(), tuple(range(3))
    sets = ((0, 1, 2),) if rank == 2 else ((0, 1, 2), (1, 2)) if rank == 1 else ((0, 1, 2),)
    return _refusal(lambda: discover(rank, Entry(sets), before=everyone))


def test_a_set_that_only_some_of_its_ranks_know_is_named(world3: RankPool) -> None:
    (text,) = set(world3.run(_a_set_that_one_does_not_know))
    assert text is not None and "rank 1 shares parameters or a process group with ranks (1, 2), of which rank 2" in text


def _a_value_that_cannot_be_told() -> str | None:
    return _refusal(lambda: gather((lambda: 0) if dist.get_rank() == 1 else 0, tuple(range(3))))


def test_a_value_that_cannot_be_told_is_raised_on_all_ranks(world3: RankPool) -> None:
    (text,) = set(world3.run(_a_value_that_cannot_be_told))
    assert text is not None and text.startswith("rank 1: ")


def _late(closes: bool) -> tuple[str, float]:
    """Rank 3 of four does not vote; the others' time-out is two seconds, or it closes its lane."""
    ranks = tuple(range(4))
    vote(Ballot(Phase.STEP), ranks)  # all connections are there
    lane = voting._lane_of(ranks)
    lane._limit = timedelta(seconds=20 if closes else 2)
    began, text = time.monotonic(), ""
    if dist.get_rank() == 3:
        if closes:
            for _ in range(2):  # an exception is told by the core of a group, and again by the optimizer's
                voting.close_lane(ranks)
        else:
            dist.barrier()
            lane.close()
    else:
        with pytest.raises(ExchangeError) as caught:
            vote(Ballot(Phase.STEP), ranks)
        text = str(caught.value)
    took = time.monotonic() - began
    if not closes and dist.get_rank() != 3:
        dist.barrier()
    dist.barrier()
    assert vote(Ballot(Phase.STEP), ranks) == Verdict(Phase.STEP, Flag.NONE, True, 0)  # over a new lane
    return text, took


@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_does_not_vote_is_named_or_its_block(closes: bool, world4: RankPool) -> None:
    found = world4.run(_late, closes)
    assert "rank 3 does not answer" in found[2][0] and "a vote (STEP)" in found[2][0]
    assert all("nothing on this rank" in text for text, _ in found[:3])
    if closes:  # whoever waits for it fails at once, and with these those that wait for them
        assert all(took < 10 for _, took in found[:3])
    else:
        assert all(1.5 < took < 15 for _, took in found[:3])
