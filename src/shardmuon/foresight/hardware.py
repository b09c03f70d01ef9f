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
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardmuon.foresight.types import NOTHING, Time
from shardmuon.orthogonalize import batch_size
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.machines import SIDES, Machine

# facts that a `Machine` has in nanoseconds, in its order
_NANOSECONDS = ("latency_inside", "latency_across", "latency_peer", "host_bucket", "host_matrix", "launch")
PASSES = ("pack", "apply", "adamw")
_BATCHED = ("standard", "gram")
# Operations of five steps that are no views, counted under a TorchDispatchMode: of a batch, or of a matrix where there
# are none. Where matrices are small they bound the time from below.
_LAUNCHES, _OTHER_LAUNCHES = {"standard": 22, "torch": 19}, 40


class Fact(NamedTuple):
    """A number, and how it is known.

    Attributes:
        value: An interval of width 0 where it is one number.
        source: An address, a datasheet, a command.
        verified: Whether it was read in the source itself; else it was derived, or is second-hand.
    """

    value: Time
    source: str
    verified: bool


def fact(low: float, high: float, source: str, verified: bool) -> Fact:
    """A fact whose middle is the geometric mean, or half of a range that begins at 0.

    Raises:
        ValueError: A value is below 0 or no number, or low is above high.
    """
    if not (0.0 <= low <= high) or not math.isfinite(high):
        raise ValueError(f"a value must lie at or above 0, low before high: found {low} and {high}")
    return Fact(Time(low, math.sqrt(low * high) if low else high / 2, high), source, verified)


_Row = tuple[float, float, float, float]  # size; the least, the middle and the largest value that was measured there


@dataclass(frozen=True)
class MeasuredTable:
    """Measured values and how they are known; between neighbours straight in logarithms of both.

    Attributes:
        source: An address, a command.
        verified: See `Fact`.
        rows: Aspect (long side over short; 1 where there is none) -> values over sizes, see `measured`.
        slope: Beyond the last size: 0 keeps the value (a rate), 1 grows in proportion (a time).
    """

    source: str
    verified: bool
    rows: Mapping[float, Sequence[_Row]]
    slope: float = 0.0

    def at(self, size: float, aspect: float = 1.0) -> tuple[Time, bool]:
        """The value at a size > 0 and an aspect: along both neighbouring aspects, then between them; and whether that
        lies beyond the table."""
        aspects = sorted(self.rows)
        above = min(bisect_left(aspects, aspect), len(aspects) - 1)
        below = above if aspect <= aspects[0] or aspect >= aspects[above] else above - 1
        near = aspects[below : above + 1]
        found = [self._along(self.rows[one], size) for one in near]
        value = Time(*(_between(aspect, near, [one[i] for one, _ in found]) for i in range(3)))
        beyond = len(aspects) > 1 and aspect > aspects[-1]
        return value, beyond or any(outside for _, outside in found)

    def _along(self, rows: Sequence[_Row], size: float) -> tuple[Time, bool]:
        sizes = [row[0] for row in rows]
        beyond = max(1.0, size / sizes[-1]) ** self.slope  # below the first a time keeps its value: it is all latency
        value = Time(*(beyond * _between(size, sizes, [row[i] for row in rows]) for i in (1, 2, 3)))
        return value, size > sizes[-1] or (size < sizes[0] and not self.slope)

    @property
    def last(self) -> float:
        """The largest size of a table without aspects."""
        return self.rows[1.0][-1][0]


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate straight in logarithms. A place that was measured, and all beyond the ends, have a measured value."""
    above = bisect_left(places, at)
    if above == len(places) or above == 0 or places[above] == at:
        return values[min(above, len(places) - 1)]
    share = math.log(at / places[above - 1]) / math.log(places[above] / places[above - 1])
    return values[above - 1] * math.pow(values[above] / values[above - 1], share)


def measured(rows: Sequence[Sequence[float]]) -> tuple[_Row, ...]:
    """Rows of a table from (size, lo, mid, hi), or (size, lo, hi) with the geometric mean as the middle.

    Raises:
        ValueError: There is none, a size stands there twice, or a number is not positive.
    """
    found = list[_Row]()
    for row in sorted(rows, key=lambda row: row[0]):
        if len(row) not in (3, 4) or min(row) <= 0.0:
            raise ValueError(f"a row is [size, lo, mid, hi] or [size, lo, hi], of positive values, found {list(row)}")
        at, lo, hi = float(row[0]), float(row[1]), float(row[-1])
        found.append((at, lo, float(row[2]) if len(row) == 4 else math.sqrt(lo * hi), hi))
    if not found or len({row[0] for row in found}) < len(found):
        raise ValueError(f"a table needs ascending sizes and positive values, found {found}")
    return tuple(found)


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
        return int(self.facts["gpus_per_node"].value.hi)

    @property
    def memory_bytes(self) -> float:
        """Memory of one device, in bytes."""
        return self.facts["memory_bytes"].value.hi

    @property
    def machine(self) -> Machine:
        """The numbers by which the optimizer itself chooses between plans on this machine: middle values, as whole
        numbers."""
        facts = {name: known.value.mid for name, known in self.facts.items()}
        network = facts["nic"] * min(1.0, facts["nics_per_node"] / facts["gpus_per_node"]) * facts["nic_efficiency"]
        rates = (
            *(self.peak(dtype).value.mid / 1e9 for dtype in ("bfloat16", "float32", "float64")),
            facts["memory_bandwidth"] * facts["memory_efficiency"] / 1e6,
            facts["link"] * facts["link_efficiency"] / 1e6,
            network / 1e6,
            self.gpus_per_node,
            *(1e9 * facts[name] for name in _NANOSECONDS),
        )
        _, table = _table_of(self, "standard bfloat16", "bfloat16")
        shares = tuple(round(1000 * table.at(side)[0].mid) for side in SIDES)
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

    def fact(self, name: str, known: Fact) -> Time:
        """Note that a fact is used; return its value."""
        if not known.verified:
            self.unverified.setdefault(name, known.source)
        return known.value

    def table(self, name: str, table: MeasuredTable, outside: bool = False, where: str = "") -> None:
        """Note that a table is used, perhaps beyond its end."""
        if not table.verified:
            self.unverified.setdefault(name, table.source)
        if outside:
            self.extrapolated.setdefault(f"{name}: {where}" if where else name)


def products_dtype(how: str, device: str) -> str:
    """The dtype in which a choice multiplies, as its backend takes it where the text is silent."""
    choice = Choice.of(how)
    if choice.dtype is not None:
        return str(choice.dtype).removeprefix("torch.")
    gram = {"cpu": "float32"}.get(device, "float16")
    return {"reference": "float64", "gram": gram}.get(choice.method, "bfloat16")


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
    alone, outside = table.at(short, long / short)
    choice = Choice.of(how)
    in_batches = choice.method in _BATCHED and not choice.alone
    size = batch_size(rows, cols, torch.device(hardware.device)) if in_batches else 1
    num_batches = -(-count // size)
    # A batch that fills more than the largest matrix of the table does is as good as that one: no extrapolation.
    filled = table.at(short * size ** (1 / 3), long / short)[0] if size > 1 else alone
    uses.table(f"efficiency of {name}", table, outside, f"{rows}x{cols}")
    share = Time(min(alone.lo, filled.lo), math.sqrt(alone.mid * filled.mid), max(alone.hi, filled.hi))
    work = num_batches * size * flops
    found = _at_rate(work, share, peak)
    launch = hardware.facts["launch"]
    if not launch.value.hi:
        return found
    launches = _LAUNCHES.get(choice.method, _OTHER_LAUNCHES) * num_batches
    return found.at_least(uses.fact("launch", launch).times(launches))


def _table_of(hardware: Hardware, how: str, dtype: str) -> tuple[str, MeasuredTable]:
    for key in (how.removesuffix(" alone"), f"{Choice.of(how).method} {dtype}", dtype, "any"):
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
    latency = uses.fact(name, facts[name]).plus(uses.fact("latency_peer", facts["latency_peer"]).times(num_peers))
    wire = _over(uses, facts, inside, "link", 1.0) if inside else NOTHING
    if across:
        nics = uses.fact("nics_per_node", facts["nics_per_node"])
        wire = wire.at_least(_over(uses, facts, across, "nic", min(1.0, nics.hi / hardware.gpus_per_node)))
    return latency, wire


def _over(uses: Uses, facts: Mapping[str, Fact], size: int, way: str, share: float) -> Time:
    rate, efficiency = (uses.fact(name, facts[name]) for name in (way, f"{way}_efficiency"))
    return _at_rate(size, rate, efficiency, share)


def _at_rate(amount: float, rate: Time, reached: Time, share: float = 1.0) -> Time:
    """Seconds of an amount at a share of a rate, of which a part is reached."""
    return Time(
        amount / (rate.hi * share * reached.hi),
        amount / (rate.mid * share * reached.mid),
        amount / (rate.lo * share * reached.lo),
    )


def _measured_exchange(hardware: Hardware, num_ranks: int, size: int, uses: Uses) -> tuple[Time, Time]:
    nearest = min(hardware.exchanges, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
    table = hardware.exchanges[nearest]
    uses.table("all-to-all", table, nearest != num_ranks or size > table.last, f"{size} bytes on {num_ranks} ranks")
    latency = Time(*table.rows[1.0][0][1:])
    found, _ = table.at(max(size, 1))
    return latency, Time(*(max(0.0, a - b) for a, b in zip(found, latency, strict=True)))


def pass_seconds(hardware: Hardware, what: str, elements: int, fragment: float, wire_bytes: int, uses: Uses) -> Time:
    """Seconds of a pass ("pack", "apply", "adamw") over so many elements in fragments of so many."""
    if not elements:
        return NOTHING
    table = hardware.passes.get(what)
    if table is not None:
        uses.table(f"pass {what}", table)
        return table.at(max(fragment, 1.0))[0].times(elements)
    return memory_seconds(hardware, elements * _bytes_moved(what, wire_bytes), uses)


def _bytes_moved(what: str, wire_bytes: int) -> int:
    """Bytes that a pass reads and writes of one fp32 element: kernels one after the other, as lists of tensors run.

    pack: lerp (read G, read B, write B), lerp (read G, read B, write U), copy (read U, write the wire).
    momentum: the first of them alone, where another replica sends it.
    apply: scale (read W, write W), widen (read the wire, write U), add (read U, read W, write W).
    adamw: the fused kernel reads p, g, m, v and writes p, m, v.
    """
    widened = wire_bytes + 4 if wire_bytes < 4 else 0
    return {"pack": 12 + 12 + 4 + wire_bytes, "momentum": 12, "apply": 8 + widened + 12, "adamw": 28}[what]


def memory_seconds(hardware: Hardware, size: int, uses: Uses) -> Time:
    """Seconds of reading and writing so many bytes."""
    rate = uses.fact("memory_bandwidth", hardware.facts["memory_bandwidth"])
    share = uses.fact("memory_efficiency", hardware.facts["memory_efficiency"])
    return _at_rate(size, rate, share)


def slowdown(hardware: Hardware, ranks_on_node: int, uses: Uses) -> Time:
    """Factor by which computing takes longer if this many ranks of a node compute at once."""
    if hardware.together is None:
        return Time(1.0, 1.0, 1.0)
    last = hardware.together.last
    found, _ = hardware.together.at(ranks_on_node)
    uses.table("ranks at once", hardware.together, ranks_on_node > last, str(ranks_on_node))
    # more ranks than were measured share what there is
    return found.times(ranks_on_node / last) if ranks_on_node > last else found


# ------------------------------------------------------------------------------------------------------------- files

FOLDER = Path(__file__).parent / "data" / "hardware"
_OWN = f"For a machine of your own, copy {FOLDER / 'h100.yaml'} and write its numbers (docs/foresight.md says which)"


def names() -> tuple[str, ...]:
    """Names of the hardware files that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load(name: str | Path) -> Hardware:
    """The hardware of this name, or of this file.

    Raises:
        ImportError: PyYAML is missing.
        ValueError: There is none, or the file lacks something; the message says what to write.
    """
    text = str(name)
    path = Path(text) if text.endswith((".yaml", ".yml")) else FOLDER / f"{text.lower()}.yaml"
    if not path.is_file():
        if path.parent != FOLDER:
            raise ValueError(f"{text}: there is no such file. {_OWN}")
        raise ValueError(f"--gpu {text!r} is none of {', '.join(names())}, and no .yaml file. {_OWN}")
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"hardware files need PyYAML ({error}): pip install 'shardmuon[plan]'") from None
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        line = " ".join(str(wrong).split())
        raise ValueError(f"{text}: it is no YAML ({line}). {_OWN}") from None
    return parse(found, str(name))


def parse(data: Any, where: str) -> Hardware:
    """A hardware file's content, checked.

    Raises:
        ValueError: See `load`.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: a hardware file is a mapping, found {type(data).__name__}")
    missing = [key for key in ("name", "title", "device", "flops", "facts", "products") if key not in data]
    lacking = [f"facts.{key} ({SCALARS[key]})" for key in SCALARS if key not in data.get("facts", {})]
    unknown = [f"facts.{key}" for key in data.get("facts", {}) if key not in SCALARS]
    if missing or lacking or unknown:
        raise ValueError(
            f"{where}: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("lacks", [*missing, *lacking]), ("has the unknown", unknown))
                if names
            )
        )
    try:
        together = data.get("together")
        return Hardware(
            name=str(data["name"]),
            title=str(data["title"]),
            device=str(data["device"]),
            flops={dtype: _fact(found, f"flops.{dtype}") for dtype, found in data["flops"].items()},
            facts={key: _fact(found, f"facts.{key}") for key, found in data["facts"].items()},
            products=_products(data["products"]),
            exchanges={int(row["ranks"]): _table(row, 1.0) for row in data.get("exchanges", ())},
            passes={_pass(row): _table(row) for row in data.get("passes", ())},
            together=None if together is None else _table(together),
            notes=str(data.get("notes", "")),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as wrong:
        detail = f"a table lacks {wrong}" if isinstance(wrong, KeyError) else str(wrong)
        raise ValueError(f"{where}: {detail}") from wrong


def _fact(data: Any, name: str) -> Fact:
    if not isinstance(data, Mapping) or "source" not in data or "verified" not in data:
        raise ValueError(f"{name} must be {{value: .., source: .., verified: true|false}}, found {data!r}")
    low, high = (data["value"], data["value"]) if "value" in data else (data["low"], data["high"])
    return fact(float(low), float(high), str(data["source"]), data["verified"] is True)


def _products(rows: Sequence[Mapping[str, Any]]) -> dict[str, MeasuredTable]:
    """One table for each thing multiplied; several aspects of one stand in several rows."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    keys = [(str(row["of"]), float(row.get("aspect", 1.0))) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        if keys.count(key) > 1:
            raise ValueError(f"products: of: {key[0]} with aspect: {key[1]} stands there twice. Write one of them")
        found.setdefault(key[0], []).append(row)
    return {
        of: MeasuredTable(
            "; ".join(dict.fromkeys(str(row["source"]) for row in group)),
            all(row["verified"] is True for row in group),
            {float(row.get("aspect", 1.0)): measured(row["rows"]) for row in group},
        )
        for of, group in found.items()
    }


def _table(row: Mapping[str, Any], slope: float = 0.0) -> MeasuredTable:
    return MeasuredTable(str(row["source"]), row["verified"] is True, {1.0: measured(row["rows"])}, slope)


def _pass(row: Mapping[str, Any]) -> str:
    if row["of"] not in PASSES:
        raise ValueError(f"passes: of: {row['of']!r} is none of {', '.join(PASSES)}")
    return str(row["of"])
