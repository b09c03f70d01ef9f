"""The price of a step on H100s by the cost model of 2026-11-26 (commit 83fe15c), most likely values only.

A second pricer that nobody may loosen: it reads the counts of `shardmuon.foresight.plan` as plain data and has its own
rates, its own clock and no import from the package. One thing was corrected when it was frozen: whoever votes takes
log2(ranks) hops one after the other (until then an all-reduce over a ring of 2 (ranks - 1) hops had this price). Rates
of the relay and of copies between wires and batches are those of other exchanges and of other passes over memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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
EXCHANGES = ("gather", "scatter", "relay")
Turns = Callable[[Sequence[bool]], Iterable[tuple[str, int]]]
Key = tuple[object, ...]


def frozen_step(exact: Mapping[str, Any], turns: Turns) -> float:
    """Seconds of the slowest rank's step.

    Args:
        exact: `Report.exact` as plain data.
        turns: The order of a step: of each of a rank's buckets, True if it has a relay -> pairs of an operation and a
            bucket.
    """
    classes = exact["classes"]
    world = sum(len(c["ranks"]) for c in classes)
    hops = math.log2(world) if world > 1 and any(c["votes"] for c in classes) else 0.0
    fragments = _fragments(classes)
    works = [[_work(c, bucket, fragments[_key(c, bucket)]) for bucket in c["buckets"]] for c in classes]
    _slowest_of_each_exchange(works)
    ends = _run(works, HOST_STEP + HOP * hops, turns)
    return max(end + 28 * c["adamw_elements"] / MEMORY for end, c in zip(ends, classes, strict=True))


def frozen_share(exact: Mapping[str, Any], tokens: float, turns: Turns) -> float:
    """Fraction by which a training step of so many tokens is longer than with AdamW on the same mesh."""
    world = sum(len(c["ranks"]) for c in exact["classes"])
    adamw = HOST_STEP + 28 * max(c["muon_elements"] + c["adamw_elements"] for c in exact["classes"]) / MEMORY
    training = exact["tokens_flops"] * tokens / world / (PEAK["bfloat16"] * MFU)
    return (frozen_step(exact, turns) - adamw) / (training + adamw)


class _Work(NamedTuple):
    """One bucket of one rank: seconds of its own, and of its exchanges (latency, wire)."""

    key: Key
    own: dict[str, float]
    exchanges: dict[str, tuple[float, float]]


def _key(rank: Mapping[str, Any], bucket: Mapping[str, Any]) -> Key:
    return (rank["stage"], *(bucket[name] for name in ("route", "num_ranks", "num_nodes", "number", "wire")))


def _fragments(classes: Sequence[Mapping[str, Any]]) -> dict[Key, int]:
    """Matrices of each bucket's group: a rank holds a fragment of each."""
    owned, members = Counter[Key](), Counter[Key]()
    for c in classes:
        for bucket in c["buckets"]:
            key, count = _key(c, bucket), len(c["ranks"])
            owned[key] += count * sum(num for *_, num, _ in bucket["matrices"])
            members[key] += count
    return {key: max(1, round(owned[key] / max(1.0, members[key] / int(str(key[2]))))) for key in owned}


def _work(rank: Mapping[str, Any], bucket: Mapping[str, Any], fragments: int) -> _Work:
    held, foreign, idle, wire = bucket["held"], bucket["foreign"], bucket["idle"], WIRE[bucket["wire"]]

    def passed(each: int, elements: int, calls: float = 0.0, copied: int = 0) -> float:
        host = HOST_MATRIX * fragments / 2 * elements / max(1, held) + HOST_BUCKET * calls
        return (elements * each + 2 * copied) / MEMORY + host

    copied = sum(bucket["received"][0][:2]) + sum(bucket["sent"][1][:2])
    packs, applies = 28 + wire, 20 + (wire + 4 if wire < 4 else 0)
    own = {
        "pack": passed(packs, foreign, 0.5),
        "fill": passed(packs, held - foreign),
        "compute": sum(_products(*matrices) for matrices in bucket["matrices"]) + 2 * copied / MEMORY,
        "apply": passed(applies, held - idle, 0.5, sum(bucket["sent"][2][:2])),
        "finish": passed(applies, idle, 0.5 * bucket["relays"]),
    }
    there_are = EXCHANGES[: 2 * (bucket["route"] != "local") + bucket["relays"]]
    sides = zip(there_are, bucket["sent"], bucket["received"], strict=False)
    return _Work(_key(rank, bucket), own, {name: _exchange(bucket["num_nodes"], *both) for name, *both in sides})


def _products(rows: int, cols: int, how: str, num: int, flops: int) -> float:
    method, dtype, *rest = how.split()
    short = min(rows, cols)
    size = 1 if "alone" in rest or method not in LAUNCHES else _batch_size(short)
    rows = SHARES.get(dtype, SHARES["any"])  # straight between neighbours in logarithms; beyond the ends the last one
    at, values = [math.log(row[0]) for row in rows], [math.log(_between(*row[1:])) for row in rows]
    share = math.exp(sum(np.interp([math.log(short), math.log(short * size ** (1 / 3))], at, values)) / 2)
    batches = -(-num // size)
    return max(batches * size * flops / (share * PEAK[dtype]), batches * LAUNCHES.get(method, 40) * LAUNCH)


def _batch_size(short: int) -> int:
    """Matrices that fill an accelerator once; a power of two."""
    return 1 << max(0, min((3 << 20) // (short * short), 64).bit_length() - 1)


def _exchange(num_nodes: int, sent: Sequence[int], received: Sequence[int]) -> tuple[float, float]:
    inside, across = (max(sent[side], received[side]) for side in (0, 1))
    peers = max(sum(sent[2:]), sum(received[2:]))
    latency = LATENCY_ACROSS if num_nodes > 1 else LATENCY_INSIDE
    return latency + LATENCY_PEER * peers, max(inside / LINK, across / NIC)


def _slowest_of_each_exchange(works: Sequence[Sequence[_Work]]) -> None:
    """An exchange is over for all of its ranks when it is for the one that sends or receives most."""
    most: dict[tuple[Key, str], tuple[float, float]] = {}
    moving = [(work, name) for of_class in works for work in of_class for name in work.exchanges]
    for work, name in moving:
        latency, wire = most.get((work.key, name), (0.0, 0.0))
        most[work.key, name] = max(latency, work.exchanges[name][0]), max(wire, work.exchanges[name][1])
    for work, name in moving:
        work.exchanges[name] = most[work.key, name]


AWAITED = {"compute": "gather", "apply": "scatter", "finish": "relay"}
GIVEN = {"begin": "gather", "compute": "scatter", "apply": "relay"}
Wires = dict[tuple[Key, str], list[float]]  # an exchange: ranks that have not given it, its start and end


def _run(works: Sequence[Sequence[_Work]], first: float, turns: Turns) -> list[float]:
    """Times at which each class of ranks is through its buckets."""
    members = Counter((work.key, name) for of_class in works for work in of_class for name in work.exchanges)
    wires: Wires = {key: [num, 0.0, 0.0] for key, num in members.items()}
    ends = [first] * len(works)
    ranks = {i: _rank(of_class, wires, first, turns) for i, of_class in enumerate(works)}
    while ranks:
        before = dict(ends=list(ends), left=len(ranks))
        for i, rank in list(ranks.items()):
            for clock in rank:
                if clock is None:  # it waits
                    break
                ends[i] = clock
            else:
                del ranks[i]
        assert before != dict(ends=ends, left=len(ranks)), "some rank waits for a rank that waits for it"
    return ends


def _rank(works: Sequence[_Work], wires: Wires, clock: float, turns: Turns) -> Iterator[float | None]:
    """One rank's clock after each operation, None while it waits: it computes one thing after the other, and its
    exchanges follow each other. Half of an exchange passes beside products, half only when somebody waits for it."""
    links = 0.0
    for what, at in turns(["relay" in work.exchanges for work in works]):
        work = works[at]
        if AWAITED.get(what) in work.exchanges:
            came = wires[work.key, AWAITED[what]]
            while came[0]:
                yield None
            _, start, end = came
            links = max(links, end)
            clock = max(clock, OVERLAP * end + (1.0 - OVERLAP) * (max(start, clock) + end - start))
        clock += work.own["pack" if what == "begin" else what]
        if GIVEN.get(what) in work.exchanges:
            sent, seconds = wires[work.key, GIVEN[what]], sum(work.exchanges[GIVEN[what]])
            start = max(sent[1], clock, links)
            sent[:] = sent[0] - 1, start, max(sent[2], start + seconds)
            links = start + seconds
        clock += work.own["fill"] if what == "begin" else 0.0
        yield clock
