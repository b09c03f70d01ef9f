"""Data of machines: peaks, memory, links, latencies, and how much of the peaks real shapes reach.

A `Hardware` answers how long products, exchanges and passes over memory take, as `Time`s. Where the numbers come from
stands in its file (`data/hardware/`), each with a source and whether it was checked; what was not, every answer that
used it names. So it does with sizes beyond its tables.

[Note: how an exchange is timed]
    NCCL has no model of an all-to-all: it is sends and receives. Measured tables are read where there are any.
    Elsewhere it takes a latency, a little for each peer, and as long as the slower of two ways is busy: the links
    inside a node, and the network, of which a rank has its share (an all-to-all cannot use other ranks' NICs:
    nccl-tests#267).

[Note: batches]
    Matrices of one shape run in batches of a size that shape and kind of device fix, the last one filled up with
    zeros, which take time and are no work of the plan. Many small products fill a device as one large one does, if the
    library is good at it. So the efficiency of a batch lies between that of one matrix and that of one as large as all
    of them; the interval has both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardmuon.foresight.tables import Curve, Surface, TableValue
from shardmuon.foresight.times import NOTHING, Time
from shardmuon.orthogonalize import batch_size
from shardmuon.plan.machines import SIDES, Machine

# facts that a `Machine` has in nanoseconds, in its order
_NANOSECONDS = ("latency_inside", "latency_across", "latency_peer", "host_bucket", "host_matrix", "launch")
PASSES = ("pack", "apply", "adamw")
_BATCHED = ("standard", "gram")
# Operations of five steps that are no views, counted under a TorchDispatchMode: of a batch, or of a matrix where there
# are none. Where matrices are small they bound the time from below.
_LAUNCHES, _OTHER_LAUNCHES = {"standard": 22, "torch": 19}, 40


@dataclass(frozen=True, slots=True)
class Fact:
    """A number, or where it lies, and how it is known.

    Attributes:
        lo, hi: Equal where it is one number.
        source: An address, a datasheet, a command.
        verified: Whether it was read in the source itself; else it was derived, or is second-hand.
    """

    lo: float
    hi: float
    source: str
    verified: bool

    def __post_init__(self) -> None:
        if not (0.0 <= self.lo <= self.hi) or not math.isfinite(self.hi):
            raise ValueError(f"a value must lie at or above 0, low before high: found {self.lo} and {self.hi}")

    @property
    def mid(self) -> float:
        """The geometric mean, or half of a range that begins at 0."""
        return math.sqrt(self.lo * self.hi) if self.lo else self.hi / 2

    @property
    def time(self) -> Time:
        """The number as an interval of seconds."""
        return Time(self.lo, self.mid, self.hi)


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """Measured values and how they are known; `surface` over short side and aspect, or `curve` over one size."""

    source: str
    verified: bool
    surface: Surface | None = None
    curve: Curve | None = None


@dataclass(frozen=True)
class Hardware:
    """One kind of machine.

    Attributes:
        name: Name in commands.
        title: Name for people.
        device: "cuda", "cpu", ..: the kind of torch device whose defaults the plan takes.
        flops: dtype -> peak of dense matrix products, FLOP/s of one rank.
        facts: Scalars by name, see `SCALARS`.
        products: What is multiplied (a `Choice`, "METHOD DTYPE", a dtype, or "any") -> share of the peak, over the
            short side of the matrix and its aspect. FLOPs are the planner's count.
        exchanges: Ranks of one node -> seconds of an all-to-all over the bytes that a rank sends.
        passes: A name of `PASSES` -> seconds an element, over the elements of one fragment.
        together: Ranks that compute on a node at once -> factor on their time; None: no factor.
        notes: Remarks that are printed with prices.
    """

    name: str
    title: str
    device: str
    flops: Mapping[str, Fact]
    facts: Mapping[str, Fact]
    products: Mapping[str, MeasuredTable] = field(default_factory=dict)
    exchanges: Mapping[int, MeasuredTable] = field(default_factory=dict)
    passes: Mapping[str, MeasuredTable] = field(default_factory=dict)
    together: MeasuredTable | None = None
    notes: str = ""

    @property
    def gpus_per_node(self) -> int:
        """Ranks that the fast links join."""
        return int(self.facts["gpus_per_node"].hi)

    @property
    def memory_bytes(self) -> float:
        """Memory of one device, in bytes."""
        return self.facts["memory_bytes"].hi

    @property
    def machine(self) -> Machine:
        """The numbers by which the optimizer itself chooses between plans on this machine: middle values, as whole
        numbers."""
        facts = {name: fact.mid for name, fact in self.facts.items()}
        network = facts["nic"] * min(1.0, facts["nics_per_node"] / facts["gpus_per_node"]) * facts["nic_efficiency"]
        rates = (
            *(self.peak(dtype).mid / 1e9 for dtype in ("bfloat16", "float32", "float64")),
            facts["memory_bandwidth"] * facts["memory_efficiency"] / 1e6,
            facts["link"] * facts["link_efficiency"] / 1e6,
            network / 1e6,
            self.gpus_per_node,
            *(1e9 * facts[name] for name in _NANOSECONDS),
        )
        surface = _table_of(self, "standard bfloat16", "bfloat16")[1].surface
        assert surface is not None, "products are tables over shapes"
        shares = tuple(round(1000 * surface.at(side, 1.0).mid) for side in SIDES)
        return Machine(self.name, shares, *map(round, rates))

    def peak(self, dtype: str) -> Fact:
        """FLOP/s of dense products in a dtype.

        Raises:
            ValueError: The file says nothing of it.
        """
        found = self.flops.get(dtype)
        if found is None:
            raise ValueError(
                f"{self.name}: no peak for products in {dtype}, only {', '.join(self.flops)}. Add it under flops:"
            )
        return found


# name -> what it is, in SI units. Files must have all of them.
SCALARS = {
    "memory_bytes": "memory of one device",
    "memory_bandwidth": "its bytes/s",
    "memory_efficiency": "share of that which passes over memory reach",
    "gpus_per_node": "ranks joined by the fast links",
    "link": "bytes/s one way of a rank's fast links, as NCCL counts them",
    "link_efficiency": "share of that which an all-to-all reaches",
    "nic": "bytes/s one way of a NIC",
    "nics_per_node": "NICs that the ranks of a node share",
    "nic_efficiency": "share of that which an all-to-all reaches",
    "latency_inside": "seconds of an all-to-all of nothing in a node",
    "latency_across": "the same between nodes",
    "latency_peer": "seconds more for each peer",
    "agreement": "seconds of the small all-reduce on the CPU, for each doubling of ranks",
    "host_step": "seconds a step takes beside everything else",
    "host_matrix": "seconds for each fragment that a rank holds",
    "host_bucket": "seconds for each bucket",
    "launch": "seconds of a kernel that has nothing to do; 0 on a CPU",
    "overlap": "share of an exchange that goes on while products run",
    "mfu": "share of the peak that forward and backward reach in training",
}


@dataclass
class Uses:
    """Facts and tables that an answer rests on and that are uncertain, collected while prices are made.

    Attributes:
        unverified: Name -> source of each number that was not checked.
        extrapolated: Names of tables that were read beyond their end, and where.
    """

    unverified: dict[str, str] = field(default_factory=dict)
    extrapolated: dict[str, None] = field(default_factory=dict)

    def fact(self, name: str, fact: Fact) -> Fact:
        """Note that a fact is used; return it."""
        if not fact.verified:
            self.unverified.setdefault(name, fact.source)
        return fact

    def table(self, name: str, table: MeasuredTable, outside: bool = False, where: str = "") -> None:
        """Note that a table is used, perhaps beyond its end."""
        if not table.verified:
            self.unverified.setdefault(name, table.source)
        if outside:
            self.extrapolated.setdefault(f"{name}: {where}" if where else name)


def _split(how: str) -> tuple[str, str, bool]:
    """Method, dtype ("" where it does not say) and whether never in batches, of the text of a `Choice`."""
    method, *rest = how.split()
    dtypes = [word for word in rest if word not in ("triton", "alone")]
    return method, dtypes[0] if dtypes else "", "alone" in rest


def products_dtype(how: str, device: str) -> str:
    """The dtype in which a choice multiplies, as its backend takes it where the text is silent."""
    method, dtype, _ = _split(how)
    if dtype:
        return dtype
    if method == "reference":
        return "float64"
    if method == "gram" and device != "cpu":
        return "float16"
    return "float32" if method == "gram" else "bfloat16"


def product_seconds(
    hardware: Hardware, rows: int, cols: int, how: str, count: int, flops: int, uses: Uses, dtype: str = ""
) -> Time:
    """Seconds of orthogonalizing `count` matrices alike on one rank, see [Note: batches].

    Args:
        hardware: The rank's machine.
        rows, cols: Shape of each matrix.
        how: Text of a `Choice`, or what else stands in the table ("float64": bare products in it).
        count: Number of matrices.
        flops: Floating point operations of one.
        uses: Collects what this rests on.
        dtype: Dtype of the products; default: that of `how`.
    """
    if not flops or not count:
        return NOTHING
    dtype = dtype or products_dtype(how, hardware.device)
    short, long = min(rows, cols), max(rows, cols)
    peak = uses.fact(f"peak {dtype}", hardware.peak(dtype))
    name, table = _table_of(hardware, how, dtype)
    assert table.surface is not None, "products are tables over shapes"
    alone = table.surface.at(short, long / short)
    method, _, one_by_one = _split(how)
    one_by_one = one_by_one or method not in _BATCHED
    size = 1 if one_by_one else batch_size(rows, cols, torch.device(hardware.device))
    num_batches = -(-count // size)
    filled = alone
    if size > 1:
        filled = table.surface.at(short * size ** (1 / 3), long / short)
        # A batch that fills more than the largest matrix of the table does is as good as that one: no extrapolation.
        filled = filled._replace(outside=alone.outside)
    uses.table(f"efficiency of {name}", table, alone.outside, f"{rows}x{cols}")
    # Where the size is 1, `filled` is `alone`, and this is the table's own interval.
    share = TableValue(min(alone.lo, filled.lo), math.sqrt(alone.mid * filled.mid), max(alone.hi, filled.hi))
    work = num_batches * size * flops
    found = Time(work / (share.hi * peak.hi), work / (share.mid * peak.mid), work / (share.lo * peak.lo))
    launch = hardware.facts["launch"]
    if launch.hi:
        launches = _LAUNCHES.get(method, _OTHER_LAUNCHES) * num_batches
        found = found.at_least(uses.fact("launch", launch).time.times(launches))
    return found


def _table_of(hardware: Hardware, how: str, dtype: str) -> tuple[str, MeasuredTable]:
    method, _, _ = _split(how)
    for key in (how.removesuffix(" alone"), f"{method} {dtype}", dtype, "any"):
        if key in hardware.products:
            return key, hardware.products[key]
    near = next((key for key in sorted(hardware.products) if dtype in key.split()), None)
    if near is None:
        raise ValueError(
            f"{hardware.name}: no table says how fast {how!r} is, only {', '.join(hardware.products)}. Add one under "
            "products:"
        )
    return near, hardware.products[near]


def exchange_seconds(
    hardware: Hardware,
    num_ranks: int,
    inside: int,  # bytes that a rank sends, or receives, whatever is more, inside its node
    across: int,  # and to other nodes
    num_peers: int,
    spans_nodes: bool,
    uses: Uses,
) -> tuple[Time, Time]:
    """(latency, time on the wire) of one all-to-all, see [Note: how an exchange is timed]."""
    if num_ranks <= 1:
        return NOTHING, NOTHING
    if hardware.exchanges and not spans_nodes:
        return _measured_exchange(hardware, num_ranks, inside + across, uses)
    facts = hardware.facts
    name = "latency_across" if spans_nodes else "latency_inside"
    latency = uses.fact(name, facts[name]).time
    latency = latency.plus(uses.fact("latency_peer", facts["latency_peer"]).time.times(num_peers))
    wire = _over(uses, facts, inside, "link", 1.0) if inside else NOTHING
    if across:
        nics = uses.fact("nics_per_node", facts["nics_per_node"])
        wire = wire.at_least(_over(uses, facts, across, "nic", min(1.0, nics.hi / hardware.gpus_per_node)))
    return latency, wire


def _over(uses: Uses, facts: Mapping[str, Fact], size: int, way: str, share: float) -> Time:
    rate = uses.fact(way, facts[way])
    efficiency = uses.fact(f"{way}_efficiency", facts[f"{way}_efficiency"])
    return Time(
        size / (rate.hi * share * efficiency.hi),
        size / (rate.mid * share * efficiency.mid),
        size / (rate.lo * share * efficiency.lo),
    )


def _measured_exchange(hardware: Hardware, num_ranks: int, size: int, uses: Uses) -> tuple[Time, Time]:
    nearest = min(hardware.exchanges, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
    table = hardware.exchanges[nearest]
    assert table.curve is not None, "exchanges are tables over bytes"
    least = table.curve.points[0]
    found = table.curve.at(max(size, 1))
    outside = nearest != num_ranks or (size > table.curve.points[-1].at)
    uses.table("all-to-all", table, outside, f"{size} bytes on {num_ranks} ranks")
    latency = Time(least.lo, least.mid, least.hi)
    wire = Time(*(max(0.0, a - b) for a, b in zip(found[:3], latency, strict=True)))
    return latency, wire


def pass_seconds(hardware: Hardware, what: str, elements: int, fragment: float, wire_bytes: int, uses: Uses) -> Time:
    """Seconds of a pass ("pack", "apply", "adamw") over so many elements in fragments of so many."""
    if not elements:
        return NOTHING
    table = hardware.passes.get(what)
    if table is not None:
        assert table.curve is not None, "passes are tables over elements"
        found = table.curve.at(max(fragment, 1.0))
        uses.table(f"pass {what}", table)
        return Time(found.lo, found.mid, found.hi).times(elements)
    return memory_seconds(hardware, elements * _bytes_moved(what, wire_bytes), uses)


def _bytes_moved(what: str, wire_bytes: int) -> int:
    """Bytes that a pass reads and writes of one fp32 element: kernels one after the other, as lists of tensors run.

    pack: lerp (read G, read B, write B), lerp (read G, read B, write U), copy (read U, write the wire).
    momentum: the first of them alone, where another replica sends it.
    apply: scale (read W, write W), widen (read the wire, write U), add (read U, read W, write W).
    adamw: the fused kernel reads p, g, m, v and writes p, m, v.
    """
    if what == "pack":
        return 12 + 12 + 4 + wire_bytes
    if what == "momentum":
        return 12
    if what == "apply":
        return 8 + (wire_bytes + 4 if wire_bytes < 4 else 0) + 12
    return 28


def memory_seconds(hardware: Hardware, size: int, uses: Uses) -> Time:
    """Seconds of reading and writing so many bytes."""
    rate = uses.fact("memory_bandwidth", hardware.facts["memory_bandwidth"])
    share = uses.fact("memory_efficiency", hardware.facts["memory_efficiency"])
    return Time(size / (rate.hi * share.hi), size / (rate.mid * share.mid), size / (rate.lo * share.lo))


def slowdown(hardware: Hardware, ranks_on_node: int, uses: Uses) -> Time:
    """Factor by which computing takes longer if this many ranks of a node compute at once."""
    if hardware.together is None:
        return Time(1.0, 1.0, 1.0)
    assert hardware.together.curve is not None, "a factor over ranks"
    curve = hardware.together.curve
    found = curve.at(ranks_on_node)
    beyond = ranks_on_node > curve.points[-1].at
    uses.table("ranks at once", hardware.together, beyond, str(ranks_on_node))
    if beyond:  # more ranks than were measured share what there is
        more = ranks_on_node / curve.points[-1].at
        return Time(found.lo * more, found.mid * more, found.hi * more)
    return Time(*found[:3])
