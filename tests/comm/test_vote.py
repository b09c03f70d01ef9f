"""Tests of the vote in which ranks agree on a step before it starts, with simulated and with real ranks. Ranks that
share parameters, directly or through other ranks, form a connected component, and all ranks of a component must get the
same result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import reduce
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardmuon import Muon
from shardmuon.comm import groups
from shardmuon.comm import vote as voting
from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import (
    MOST_BITS,
    Ballot,
    Fault,
    Flag,
    Phase,
    _told_by,
    digest_of,
    discover,
    gather,
    run_together,
    vote,
)
from shardmuon.errors import ExchangeError, Refused
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.step import binding
from shardmuon.testing import RankPool

Family = Sequence[Ranks]


FAMILIES: dict[str, Family] = {
    "chain": [(i, i + 1) for i in range(7)],
    "ring": [*((i, i + 1) for i in range(7)), (0, 7)],
    "rows and columns": [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7)],
    "nested": [tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), (0, 1)],
    # This case models two replicas with four pipeline stages each. The first and the last stage of the first replica
    # share an embedding weight.
    "tied stages": [(0, 1), (2, 3), (4, 5), (6, 7), (0, 6)],
    "apart": [(0, 1, 2), (3, 4), (5, 6, 7)],
}


def component(family: Family, rank: int) -> Ranks:
    """Return `rank` and all ranks that are connected to it, directly or through other ranks. Two ranks are connected if
    one of the rank sets in `family` contains both."""
    found = {rank}
    while True:
        more = found.union(*(set(ranks) for ranks in family if found & set(ranks)))
        if more == found:
            return tuple(sorted(found))
        found = more


def sets_of(family: Family, rank: int) -> tuple[Ranks, ...]:
    return tuple(ranks for ranks in family if rank in ranks)


def drawn_family(chance: random.Random) -> Family:
    """Return one to seven random sets of ranks. Each set contains two to four of eight ranks. The ranks of a set share
    parameters."""
    return sorted({tuple(sorted(chance.sample(range(8), chance.randint(2, 4)))) for _ in range(chance.randint(1, 7))})


# ------------------------------------------------------------------------------------------------------------ simulated


def doubled(num: int) -> list[int]:
    """Run the message exchange of a vote with one thread per simulated rank. Each rank contributes a number, and the
    exchange adds up these numbers. Return the sum that each rank obtains."""
    # All queues exist before the threads start. If threads created them, two threads could create the same queue.
    boxes = {(me, other): SimpleQueue[int]() for me in range(num) for _, other in groups._hops_of(me, num)}

    def member(me: int) -> int:
        total = me * me + 1
        for kind, other in groups._hops_of(me, num):
            if kind in ("send", "swap"):
                boxes[me, other].put(total)
            if kind != "send":
                total = boxes[other, me].get(timeout=20) + (0 if kind == "take" else total)
        return total

    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(member, range(num)))


def test_every_message_is_counted_once_on_every_rank() -> None:
    for num in (*range(1, 34), 100, 129, 1024):
        assert doubled(num) == [sum(me * me + 1 for me in range(num))] * num


def sent(ballot: Ballot, rank: int, own: Ranks) -> voting._Message:
    """Return the message that the rank `rank` sends in a vote among the ranks `own`."""
    found = list[voting._Message]()
    lane = SimpleNamespace(me=own.index(rank), merge=lambda message, *_: found.append(message) or message)
    with mock.patch.object(groups.Lane, "over", return_value=lane):
        vote(ballot, own)
    return found[0]


def voted(ballots: dict[int, Ballot]) -> Ballot:
    """Return the result of a vote among simulated ranks, given each rank's ballot. Also check that merging the messages
    in rank order and in reverse order gives the same message."""
    own = tuple(sorted(ballots))
    messages = [sent(ballots[rank], rank, own) for rank in own]
    one, other = (reduce(voting._merged, order) for order in (messages, messages[::-1]))
    assert one == other
    lane = SimpleNamespace(me=0, merge=lambda *_: one)
    with mock.patch.object(groups.Lane, "over", return_value=lane):
        return vote(ballots[own[0]], own)


def test_equal_digests_cancel_and_no_difference_does() -> None:
    chance = random.Random(2)
    for _ in range(150):
        family = drawn_family(chance)
        own = component(family, chance.choice([ranks[0] for ranks in family]))
        values = {ranks: digest_of(f"{ranks} {chance.random()}") for ranks in family}
        ballots = {
            rank: Ballot(Phase.STEP, digests={ranks: values[ranks] for ranks in sets_of(family, rank)}) for rank in own
        }
        assert voted(ballots) == Ballot(Phase.STEP)
        culprit = chance.choice(own)
        ranks = chance.choice(sets_of(family, culprit))
        changed = {**(ballots[culprit].digests or {}), ranks: digest_of("another")}
        assert voted({**ballots, culprit: Ballot(Phase.STEP, digests=changed)}) == Ballot(Phase.STEP, Flag.UNLIKE)


def test_flags_phases_and_presence_are_those_of_any_rank() -> None:
    ballots = {rank: Ballot(Phase.STEP, presence=1 << (rank * 5)) for rank in range(7)}
    ballots[3] = Ballot(Phase.DISCOVER, Flag.STALE | Flag.AUDIT, presence=0)
    assert voted(ballots) == Ballot(
        Phase.STEP | Phase.DISCOVER,
        Flag.STALE | Flag.AUDIT,
        presence=sum(1 << (r * 5) for r in range(7) if r != 3),
    )


def test_messages_of_unlike_versions_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    ballot, ours = Ballot(Phase.STEP, digests={(0, 1): b"plan"}), list[voting._Message]()
    for version in (1, 2):
        monkeypatch.setattr(voting, "_VERSION", version)
        ours.append(sent(ballot, 0, (0, 1)))
    theirs = sent(ballot, 1, (0, 1))
    assert [voting._merged(mine, theirs)[2] == 0 for mine in ours] == [False, True]


def test_the_store_takes_the_name_of_a_lane_of_any_ranks() -> None:
    """A lane is a channel between the ranks that vote, and the keys of its TCPStore entries begin with its name. The
    store closes the connection if a key is longer than 8 KiB, so the name must be short even for many ranks."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=10))
    strided = tuple(range(0, 1 << 17, 8))
    lanes_of = [(strided, 1), (strided, 2), (strided[1:], 1), ((0, 1, 2), 1), ((0, 12), 1)]
    for value, lane in enumerate(lanes_of):
        dist.PrefixStore(groups._name_of(*lane), store).set("key", str(value))
    found = [dist.PrefixStore(groups._name_of(*lane), store).get("key") for lane in lanes_of]
    assert found == [str(value).encode() for value in range(len(lanes_of))]


# ------------------------------------------------------------------------------------------------------- on real ranks

ALL = (0, 1, 2)


def _most_bits() -> bool:
    """Vote with the largest allowed number of presence bits and with a different digest on each rank. Then check that
    an optimizer raises an error if no bits are allowed, and takes a step once the limit is restored. Return whether
    the optimizer's plan contains matrices."""
    rank, most = dist.get_rank(), (1 << MOST_BITS) - 1
    ballot = Ballot(Phase.STEP, Flag.AUDIT, {ALL: b"%d" % rank}, most >> rank)
    assert vote(ballot, ALL) == Ballot(Phase.STEP, Flag.AUDIT | Flag.UNLIKE, presence=most)
    shard = FlatShard((4, 6), 12 * rank, dist.group.WORLD, "flat buffers")
    param = shard.mark(nn.Parameter(torch.ones(12 if rank < 2 else 0)))
    optimizer, param.grad = Muon([("w", param)], lr=0.1), torch.ones_like(param)
    for call in (optimizer.prepare, optimizer.step):
        with mock.patch.object(binding, "MOST_BITS", 0), pytest.raises(ValueError, match=r"1 parameters may .* for 0"):
            call()
    optimizer.step()
    return bool(optimizer.plan.items)


def test_a_vote_has_room_for_half_a_million_gradients_and_more_are_refused_on_every_rank(world3: RankPool) -> None:
    """A message that does not fit into gloo's buffer would abort the process. A vote on more gradients than a message
    can describe must therefore raise an error on every rank."""
    assert MOST_BITS > 500_000
    assert world3.run(_most_bits) == [True] * 3


def _refusal(call: Callable[[], object]) -> tuple[str, type[BaseException] | None]:
    try:
        call()
    except Refused as refused:
        return str(refused), type(refused.cause) if refused.cause is not None else None
    return "", None


def _fault_on_one(family: Family, culprit: int) -> tuple[Ranks, Ballot, set[str]]:
    """Plant a fault on the rank `culprit`. Return the connected component of the calling rank, the result of a vote,
    and the set of error texts from the collectives `discover` and `gather`. A collective that raises no error has the
    error text ""."""
    rank = dist.get_rank()
    known = discover(sets_of(family, rank), rank, Fault())
    own = tuple(known)
    assert list(known.values()) == list(own)
    noted = Fault()
    noted.add("planted" if rank == culprit else None)
    fault = noted.text
    told = {_refusal(lambda: discover(sets_of(family, rank), None, noted, own))[0]}
    said = vote(Ballot(Phase.STEP, Flag.FAULT if fault else Flag.NONE, {own: digest_of("plan")}), own)
    told.add(_refusal(lambda: gather(rank, own, noted))[0])
    assert gather(f"value {rank}", own) == [f"value {other}" for other in own]
    return own, said, told


CULPRITS = [
    *((family, culprit) for family in FAMILIES.values() for culprit in (0, 3, 6)),
    *((drawn_family(random.Random(seed)), seed % 8) for seed in range(12)),
]


def _all_culprits() -> list[tuple[Ranks, Ballot, set[str]]]:
    return [_fault_on_one(family, culprit) for family, culprit in CULPRITS]


def test_a_fault_on_one_rank_is_heard_by_its_whole_component_and_by_no_other(world8: RankPool) -> None:
    for rank, found in enumerate(world8.run(_all_culprits)):
        for (family, culprit), (own, said, told) in zip(CULPRITS, found, strict=True):
            text, flag = (f"rank {culprit}: planted", Flag.FAULT) if culprit in own else ("", Flag.NONE)
            assert (own, said[:2], told) == (component(family, rank), (Phase.STEP, flag), {text})


def test_ranks_that_say_the_same_of_themselves_are_named_together() -> None:
    own = [f"rank {rank}: no room" for rank in (0, 1, 12, 2)]
    assert _told_by([*own, None, "all differ", "all differ"]) == ["ranks 0,1,2,12: no room", "all differ"]
    assert _told_by(["rank 7: no\nroom", "rank 7: no\nroom", "rank 8: no"]) == ["rank 7: no\nroom", "rank 8: no"]


def _raising(error: BaseException) -> None:
    raise error


SETS = {0: (ALL,), 1: (ALL, (1, 2)), 2: (ALL,)}
# Each case gives a collective call on three ranks, the expected error text, and the ranks whose own exception caused
# the error.
TALKS: dict[str, tuple[Callable[[int], object], str, tuple[int, ...]]] = {
    "nothing": (lambda rank: run_together(lambda: rank), "", ()),
    "one interrupt": (
        lambda rank: run_together(lambda: _raising(KeyboardInterrupt("planted")) if rank == 1 else rank),
        "rank 1: KeyboardInterrupt: planted",
        (1,),
    ),
    "two interrupts": (
        lambda rank: run_together(lambda: _raising(KeyboardInterrupt("planted")) if rank != 1 else rank),
        "ranks 0,2: KeyboardInterrupt: planted",
        (0, 2),
    ),
    "a set that one does not know": (
        lambda rank: discover(SETS[rank], None, Fault(), ALL),
        "rank 1 shares parameters or a process group with ranks (1, 2), of which rank 2 does not know. ",
        (),
    ),
    "a value that cannot be told": (lambda rank: gather((lambda: 0) if rank == 1 else 0, ALL), "rank 1: ", (1,)),
}


def _talk(name: str) -> tuple[str, type[BaseException] | None]:
    return _refusal(lambda: TALKS[name][0](dist.get_rank()))


@pytest.mark.parametrize("name", TALKS)
def test_what_is_raised_on_some_ranks_is_raised_on_all_in_the_same_words(name: str, world3: RankPool) -> None:
    _, says, faulty = TALKS[name]
    found = world3.run(_talk, name)
    ((text, *more),) = [list({text for text, _ in found})]
    assert text.startswith(says) and bool(text) == bool(says) and not more
    assert [own is not None for _, own in found] == [rank in faulty for rank in ALL]


def _late(closes: bool) -> tuple[str, float]:
    """Run a vote among four ranks in which rank 3 does not take part. Rank 3 either closes its lane (its communication
    channel to the other ranks) or stays silent until the others time out after one second. Return this rank's error
    text and the elapsed seconds."""
    ranks = tuple(range(4))
    vote(Ballot(Phase.STEP), ranks)  # The first vote opens all connections between the ranks.
    lane = groups.Lane.over(ranks)
    lane._limit = timedelta(seconds=20 if closes else 1)
    began, text = time.monotonic(), ""
    if dist.get_rank() < 3:
        with pytest.raises(ExchangeError) as caught:
            vote(Ballot(Phase.STEP), ranks)
        text = str(caught.value)
    elif closes:
        # After an exception, `Muon` and QK-clip may both close the same lane (communication channel between ranks), so
        # closing a lane twice must be harmless.
        for _ in range(2):
            groups.Lane.close_over(ranks)
    took = time.monotonic() - began
    dist.barrier()
    lane.close()
    assert vote(Ballot(Phase.STEP), ranks) == Ballot(Phase.STEP)
    return text, took


@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_does_not_vote_is_named_or_its_block(closes: bool, world4: RankPool) -> None:
    found = world4.run(_late, closes)[:3]
    assert "rank 3, or one that it waits for, does not answer" in found[2][0] and "a vote (STEP)" in found[2][0]
    assert all("nothing on this rank" in text for text, _ in found)
    # If rank 3 closes its lane (communication channel), all ranks that wait for rank 3, directly or through other
    # ranks, fail at once. If rank 3 stays silent, they time out.
    assert all(took < 10 if closes else 0.7 < took < 15 for _, took in found)
