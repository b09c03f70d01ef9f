"""Price two ways to exchange three matrices on 2 replicas of 4 shards: the plan's way, in which a rank sends up to 1.6
times the mean, and a way that evens out the bytes.

    python benchmarks/even_bytes.py    # prints the figures of ADR 39

Ranks 0 to 3 are one replica and one node, and ranks 4 to 7 the other. Ranks 0, 1 and 6 orthogonalize one matrix each.
To even out the bytes, rank 4 stands in for rank 0 in the exchange of rank 1's matrix, and rank 5 stands in for rank 1
in that of rank 0's: they send their copies of the shard, receive its result, and pass it on to rank 0 or 1. An exchange
takes a latency plus the time of the rank that sends or receives most, at the planner's rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardmuon.price.machines import MACHINES, Machine

SHARD = 4096 * 4096 * 2 // 4  # bytes of a shard of a 4096 x 4096 matrix in bf16
Sends = list[tuple[int, int]]  # (sender, receiver) of one shard each


def node(rank: int) -> int:
    return rank // 4


def routes(*, even: bool) -> list[Sends]:
    """List the sends of the gather, the scatter and the relay."""
    gather = [(r, 0) for r in (1, 2, 3)] + [(r, 1) for r in (0, 2, 3)] + [(r, 6) for r in (4, 5, 7)]
    relay = [(r, r + 4) for r in range(4)] * 2 + [(r + 4, r) for r in range(4)]
    stands_in = {(0, 1): (4, 1), (1, 0): (5, 0)} if even else {}
    gather = [stands_in.get(send, send) for send in gather]
    for near in (0, 1) if even else ():
        relay[relay.index((near, near + 4))] = (near + 4, near)
    return [gather, [(owner, rank) for rank, owner in gather], relay]


def nanoseconds(sends: Sends, machine: Machine) -> float:
    """Estimate the duration of one exchange."""
    busiest = [Counter[int](), Counter[int]()]  # bytes of the busiest rank, inside its node and between nodes
    for ends in zip(*sends, strict=True):
        for far in (False, True):
            here = Counter(
                rank for rank, send in zip(ends, sends, strict=True) if (node(send[0]) != node(send[1])) == far
            )
            busiest[far] |= Counter({0: SHARD * max(here.values(), default=0)})
    latency = (machine.across if busiest[True][0] else machine.inside) + 7 * machine.peer
    return latency + max(busiest[False][0] * 1000 / machine.link, busiest[True][0] * 1000 / machine.network)


def described(plan: Sequence[Sends]) -> str:
    sends = [send for exchange in plan for send in exchange]
    largest = max(Counter(sender for sender, _ in sends).values())
    between = sum(node(sender) != node(receiver) for sender, receiver in sends)
    return (
        f"largest / mean {largest / (len(sends) / 8):.2f}, total {len(sends) / 4} N, between replicas {between / 4} N"
    )


def main() -> None:
    planned, even = routes(even=False), routes(even=True)
    print(f"as planned: {described(planned)}\neven: {described(even)}")
    for name, machine in MACHINES.items():
        times = [sum(nanoseconds(sends, machine) for sends in plan) for plan in (planned, even)]
        print(f"{name}: {times[1] / times[0]:.2f} times as long")


if __name__ == "__main__":
    main()
