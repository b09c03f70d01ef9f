"""The price of a step on H100s by the cost model of 2026-11-26 (commit 83fe15c), most likely values only.

A second pricer that nobody may loosen: it reads the counts of `shardmuon.foresight.plan` as plain data and has its own
rates, its own clock and no import from the package. One thing was corrected when it was frozen: whoever votes takes
log2(ranks) hops one after the other (until then an all-reduce over a ring of 2 (ranks - 1) hops had this price). Rates
of the relay and of copies between wires and batches are those of other exchanges and of other passes over memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GIGA = 1e9


def _between(low: float, high: float) -> float:
    return math.sqrt(low * high) if low else high / 2


PEAK = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12, "float64": 66.9e12}
SHARES = {  # of the peak, by short side: products of an H100
    "float32": ((256, 0.03, 0.3), (1024, 0.3, 0.75), (4096, 0.6, 0.92)),
    "float64": ((256, 0.02, 0.25), (1024, 0.15, 0.6), (4096, 0.4, 0.9)),
    "any": ((256, 0.01, 0.15), (1024, 0.19, 0.55), (2048, 0.45, 0.7), (4096, 0.47, 0.774), (8192, 0.49, 0.774)),
}
MEMORY = 3.35e12 * _between(0.7, 0.93)  # bytes/s
LINK, NIC = 370.8 * GIGA * _between(0.85, 0.97), 50 * GIGA * _between(0.7, 0.98)
LATENCY_INSIDE, LATENCY_ACROSS, LATENCY_PEER = _between(1e-5, 2.5e-5), _between(2e-5, 6e-5), 1e-6
HOP = _between(6e-5, 1e-3)
HOST_STEP, HOST_MATRIX, HOST_BUCKET = _between(2e-4, 2e-3), _between(4e-6, 2e-5), _between(5e-5, 4e-4)
LAUNCH, MFU, OVERLAP = _between(2e-6, 6e-6), _between(0.25, 0.5), 0.5
LAUNCHES = {"standard": 22, "gram": 40}
WIRE = {"bfloat16": 2, "float32": 4, "float64": 8}
Turns = Callable[[Sequence[bool]], Iterable[tuple[str, int]]]
Key = tuple[object, ...]


@dataclass
class Frozen:
    """Seconds: of the slowest rank's step, of AdamW's step on the same mesh, of forward and backward."""

    step: float
    adamw: float
    training: float

    @property
    def share(self) -> float:
        """Fraction by which a training step is longer than with AdamW."""
        return (self.step - self.adamw) / (self.training + self.adamw)


def frozen_price(exact: Mapping[str, Any], tokens: float, turns: Turns) -> Frozen:
    """Price the counts of a plan.

    Args:
        exact: `Report.exact` as plain data.
        tokens: Of a training step.
        turns: The order of a step: of each of a rank's buckets, True if it has a relay -> pairs of an operation and a
            bucket.
    """
    classes = exact["classes"]
    world = sum(len(c["ranks"]) for c in classes)
    hops = math.log2(world) if world > 1 and any(c["votes"] for c in classes) else 0.0
    fragments = _fragments(classes)
    works = [[_work(c, bucket, fragments[_key(c, bucket)]) for bucket in c["buckets"]] for c in classes]
    _slowest_of_each_exchange(works)
    first = HOST_STEP + HOP * hops
    last = [28 * c["adamw_elements"] / MEMORY for c in classes]
    ends = _run(works, first, turns)
    most = max(c["muon_elements"] + c["adamw_elements"] for c in classes)
    training = exact["tokens_flops"] * tokens / world / (PEAK["bfloat16"] * MFU)
    return Frozen(max(map(sum, zip(ends, last, strict=True))), HOST_STEP + 28 * most / MEMORY, training)


@dataclass
class _Work:
    """One bucket of one rank: seconds of its own, and of its exchanges (latency, wire)."""

    key: Key | None
    own: dict[str, float]
    exchanges: dict[str, tuple[float, float]] = field(default_factory=dict)


def _key(rank: Mapping[str, Any], bucket: Mapping[str, Any]) -> Key:
    return (rank["stage"], *(bucket[name] for name in ("route", "num_ranks", "num_nodes", "number", "wire")))


def _fragments(classes: Sequence[Mapping[str, Any]]) -> dict[Key, int]:
    """Matrices of each bucket's group: a rank holds a fragment of each."""
    owned, members, ranks = dict[Key, float](), dict[Key, int](), dict[Key, int]()
    for c in classes:
        for bucket in c["buckets"]:
            key, count = _key(c, bucket), len(c["ranks"])
            owned[key] = owned.get(key, 0) + count * sum(num for *_, num, _, _ in bucket["matrices"])
            members[key] = members.get(key, 0) + count
            ranks[key] = bucket["num_ranks"]
    return {key: max(1, round(owned[key] / max(1.0, members[key] / ranks[key]))) for key in owned}


def _work(rank: Mapping[str, Any], bucket: Mapping[str, Any], fragments: int) -> _Work:
    held, foreign, idle, wire = bucket["held"], bucket["foreign"], bucket["idle"], WIRE[bucket["wire"]]
    moves = bucket["route"] != "local"

    def passed(each: int, elements: int, calls: float = 0.0, copied: int = 0) -> float:
        host = HOST_MATRIX * fragments / 2 * elements / max(1, held) + HOST_BUCKET * calls
        return (elements * each + 2 * copied) / MEMORY + host

    copied = sum(bucket["received"][0][:2]) + sum(bucket["sent"][1][:2])
    packs, applies = 28 + wire, 20 + (wire + 4 if wire < 4 else 0)
    own = {
        "pack": passed(packs, foreign, 0.5),
        "fill": passed(packs, held - foreign),
        "compute": sum(_products(*matrices[:5]) for matrices in bucket["matrices"]) + 2 * copied / MEMORY,
        "apply": passed(applies, held - idle, 0.5, sum(bucket["sent"][2][:2])),
        "finish": passed(applies, idle, 0.5 * bucket["relays"]),
    }
    found = _Work(_key(rank, bucket) if moves else None, own)
    for at, name in enumerate(("gather", "scatter", "relay")[: 2 * moves + bucket["relays"]]):
        found.exchanges[name] = _exchange(bucket, bucket["sent"][at], bucket["received"][at])
    return found


def _products(rows: int, cols: int, how: str, num: int, flops: int) -> float:
    method, dtype, *rest = how.split()
    table = SHARES.get(dtype, SHARES["any"])
    short = min(rows, cols)
    size = 1 if "alone" in rest or method not in LAUNCHES else _batch_size(short)
    share = math.sqrt(_share(table, short) * _share(table, short * size ** (1 / 3)))
    batches = -(-num // size)
    return max(batches * size * flops / (share * PEAK[dtype]), batches * LAUNCHES.get(method, 40) * LAUNCH)


def _batch_size(short: int) -> int:
    """Matrices that fill an accelerator once; a power of two."""
    return 1 << max(0, min((3 << 20) // (short * short), 64).bit_length() - 1)


def _share(table: Sequence[tuple[float, float, float]], size: float) -> float:
    """Straight between neighbours in logarithms; beyond the ends the last one."""
    points = [(math.log(at), math.log(_between(low, high))) for at, low, high in table]
    where = min(max(math.log(size), points[0][0]), points[-1][0])
    for (a, low), (b, high) in itertools.pairwise(points):
        if where <= b:
            return math.exp(low + (where - a) / (b - a) * (high - low))
    raise AssertionError("clamped")


def _exchange(bucket: Mapping[str, Any], sent: Sequence[int], received: Sequence[int]) -> tuple[float, float]:
    inside, across = (max(sent[side], received[side]) for side in (0, 1))
    peers = max(sum(sent[2:]), sum(received[2:]))
    latency = LATENCY_ACROSS if bucket["num_nodes"] > 1 else LATENCY_INSIDE
    return latency + LATENCY_PEER * peers, max(inside / LINK, across / NIC)


def _slowest_of_each_exchange(works: Sequence[Sequence[_Work]]) -> None:
    """An exchange is over for all of its ranks when it is for the one that sends or receives most."""
    most: dict[tuple[Key, str], tuple[float, float]] = {}
    moving = [work for of_class in works for work in of_class if work.key is not None]
    for work in moving:
        for name, (latency, wire) in work.exchanges.items():
            known = most.get((work.key, name), (0.0, 0.0))
            most[work.key, name] = max(known[0], latency), max(known[1], wire)
    for work in moving:
        work.exchanges = {name: most[work.key, name] for name in work.exchanges}


@dataclass
class _OnWire:
    missing: int
    start: float = 0.0
    end: float = 0.0


@dataclass
class _Rank:
    todo: list[tuple[str, int]]
    clock: float
    links: float = 0.0


AWAITED = {"compute": "gather", "apply": "scatter", "finish": "relay"}
GIVEN = {"begin": "gather", "compute": "scatter", "apply": "relay"}


def _run(works: Sequence[Sequence[_Work]], first: float, turns: Turns) -> list[float]:
    """Times at which each class of ranks is through its buckets: it computes one thing after the other, and its
    exchanges follow each other. Half of an exchange passes beside products, half only when somebody waits for it."""
    members: dict[Key | None, int] = {}
    for work in (work for of_class in works for work in of_class):
        members[work.key] = members.get(work.key, 0) + 1
    wires: dict[tuple[Key | None, str], _OnWire] = {}
    ranks = [_Rank(list(turns(["relay" in w.exchanges for w in of_class]))[::-1], first) for of_class in works]

    def turn(rank: _Rank, of_class: Sequence[_Work]) -> bool:
        what, at = rank.todo[-1]
        work = of_class[at]
        if AWAITED.get(what) in work.exchanges:
            came = wires[work.key, AWAITED[what]]
            if came.missing:
                return False
            rank.links = max(rank.links, came.end)
            late = max(came.start, rank.clock) + came.end - came.start
            rank.clock = max(rank.clock, OVERLAP * came.end + (1.0 - OVERLAP) * late)
        for own in ("pack",) if what == "begin" else (what,):
            rank.clock += work.own[own]
        if GIVEN.get(what) in work.exchanges:
            sent = wires.setdefault((work.key, GIVEN[what]), _OnWire(members[work.key]))
            seconds = sum(work.exchanges[GIVEN[what]])
            sent.missing -= 1
            sent.start = max(sent.start, rank.clock, rank.links)
            sent.end = max(sent.end, sent.start + seconds)
            rank.links = sent.start + seconds
        rank.clock += work.own["fill"] if what == "begin" else 0.0
        rank.todo.pop()
        return True

    while any(rank.todo for rank in ranks):
        moved = False
        for rank, of_class in zip(ranks, works, strict=True):
            while rank.todo and turn(rank, of_class):
                moved = True
        assert moved, "some rank waits for a rank that waits for it"
    return [rank.clock for rank in ranks]
