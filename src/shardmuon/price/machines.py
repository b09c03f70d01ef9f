"""Throughput and latency data of machines, from which the planner estimates times. All numbers are integers, so all
ranks compute equal estimates and choose the same plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Machine(NamedTuple):
    """Throughput of one rank, and latencies of exchanges, buckets and kernels.

    Attributes:
        name: Name of the machine in printed plans.
        shares: Fractions of the peak FLOP rate, in thousandths, that matrix products reach. Each fraction is for a
            range of matrix sizes (see `_SIDES`).
        half, single, double: Peak GFLOP/s of dense matrix products in 16-bit, 32-bit and 64-bit dtypes.
        memory: Memory bandwidth in MB/s, counting both reads and writes.
        link, network: Rate in MB/s at which a rank sends in an all-to-all, inside a node (`link`) and between nodes
            (`network`).
        per_node: Number of ranks on one node.
        inside, across: Latency of an exchange in nanoseconds, inside a node and between nodes.
        peer: Additional latency of an exchange in nanoseconds for each rank with which data is exchanged.
        bucket, matrix: CPU time in nanoseconds for each bucket, and for each matrix in a bucket.
        launch: Duration of an empty kernel in nanoseconds; 0 on a CPU.
    """

    name: str
    shares: tuple[int, ...]
    half: int
    single: int
    double: int
    memory: int
    link: int
    network: int
    per_node: int
    inside: int
    across: int
    peer: int
    bucket: int
    matrix: int
    launch: int

    def share(self, volume: int) -> int:
        """Return the fraction of the peak FLOP rate, in thousandths, that a product of square matrices reaches.
        `volume` is the cube of the matrices' side length."""
        found = (share for side, share in zip(_SIDES, self.shares, strict=True) if volume <= side**3)
        return next(found, self.shares[-1])

    @staticmethod
    def slowest(stamps: Iterable[str]) -> Machine:
        """Return the `Machine` for the slowest machine in a job. The slowest machine determines the speed of the job,
        because all other machines wait for it in exchanges.

        An unknown accelerator is treated as an H100, and printed plans say so.

        Args:
            stamps: Descriptions of the ranks' machines, made by `orthogonalize.stamp`. If empty, return the `Machine`
                for a CPU.
        """
        found = dict.fromkeys(map(_of_stamp, stamps))
        return min(found, key=lambda one: (one.half, one.network, one.name), default=MACHINES["cpu-gloo"])


# Upper limits on a matrix's shorter side, one for each fraction in `Machine.shares`. A fraction applies to matrices up
# to its own limit and above the previous limit. The last fraction also applies to all larger matrices.
_SIDES = (64, 128, 256, 512, 1024, 2048, 4096)

# Dict from the name of a machine to the remaining attributes of `Machine`, from `half` to `launch`. The numbers are
# derived from the hardware files of `shardmuon.foresight` (middle values, if a file gives ranges). A test checks that
# the numbers match the files.
_RATES = {
    "a100": (312000, 19500, 19500, 1645158, 211418, 20706, 8, 15811, 34641, 1000, 141421, 8944, 3464),
    "b200": (2250000, 80000, 37000, 6454766, 615649, 41413, 8, 15811, 34641, 1000, 141421, 8944, 3464),
    "cpu-gloo": (174, 103, 47, 24954, 951, 238, 4, 1136265, 1136265, 0, 0, 15699, 0),
    "gb300": (2500000, 75000, 1250, 6454766, 615649, 82825, 72, 15811, 34641, 1000, 141421, 8944, 3464),
    "h100": (989400, 66900, 66900, 2702933, 336694, 41413, 8, 15811, 34641, 1000, 141421, 8944, 3464),
    "h200": (989400, 66900, 66900, 3872859, 336694, 41413, 8, 15811, 34641, 1000, 141421, 8944, 3464),
    "mi300x": (1307000, 163400, 163400, 4276282, 253674, 41413, 8, 15811, 34641, 1000, 141421, 8944, 3464),
}
_SHARES = {
    "a100": (63, 63, 63, 165, 431, 594, 736),
    "b200": (22, 22, 22, 67, 200, 424, 581),
    "cpu-gloo": (70, 354, 701, 949, 949, 949, 949),
    "gb300": (22, 22, 22, 67, 200, 424, 581),
    "h100": (39, 39, 39, 112, 323, 561, 603),
    "h200": (39, 39, 39, 112, 323, 561, 603),
    "mi300x": (32, 32, 32, 77, 187, 354, 439),
}
MACHINES = {name: Machine(name, _SHARES[name], *rates) for name, rates in _RATES.items()}


def _of_stamp(stamp: str) -> Machine:
    device, _, rest = stamp.partition(",")
    if "sm_" not in rest:
        return MACHINES["cpu-gloo"]
    known = (name for name in sorted(MACHINES, key=len, reverse=True) if name.upper() in device.upper())
    name = next(known, None)
    return MACHINES["h100"]._replace(name=f"{device}, unknown: as h100") if name is None else MACHINES[name]
