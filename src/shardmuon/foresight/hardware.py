"""Data of machines: peaks, memory, links, latencies, and how much of the peaks real shapes reach.

`Rates` says how many seconds products, exchanges and passes over memory take, with everything uncertain at its best, in
the middle or at its worst. Where the numbers come from stands in a machine's file (`data/hardware/`), each with a
source and whether it was checked; what was not, every answer that used it names. So it does with sizes beyond its
tables.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardmuon.foresight.types import Time
from shardmuon.orthogonalize import batch_size, default_dtype
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.machines import SIDES, Machine

# facts that a `Machine` has in nanoseconds, in its order
_NANOSECONDS = ("latency_inside", "latency_across", "latency_peer", "host_bucket", "host_matrix", "launch")
# Bytes that a pass reads and writes of one fp32 element beside the wire's: kernels one after the other, as lists of
# tensors run.
#   pack: lerp (read G, read B, write B), lerp (read G, read B, write U), copy (read U, write the wire).
#   momentum: the first of them alone, where another replica sends it.
#   apply: scale (read W, write W), widen (read the wire, write U), add (read U, read W, write W).
#   adamw: the fused kernel reads p, g, m, v and writes p, m, v.
_BYTES_MOVED = {"pack": 28, "momentum": 12, "apply": 20, "adamw": 28}
PASSES = ("pack", "apply", "adamw")  # those that a file may have a table for
_BATCHED = ("standard", "gram")
# Operations of five steps that are no views, counted under a TorchDispatchMode: of a batch, or of a matrix where there
# are none. Where matrices are small they bound the time from below.
_LAUNCHES, _OTHER_LAUNCHES = {"standard": 22, "torch": 19}, 40


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

_TIMES = ("latency", "agreement", "host", "launch")  # names of those that begin so: less is better

_Row = tuple[float, float, float, float]  # size; the least, the middle and the largest value that was measured there


@dataclass(frozen=True)
class Known:
    """A number, or measured values over sizes, and how it is known.

    Attributes:
        source: An address, a datasheet, a command.
        verified: True if it was read in the source itself; else it was derived, or is second-hand.
        rows: Aspect (long side over short; 1 where there is none) -> values over sizes, between neighbours straight in
            logarithms of both. A number has one row.
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
        along = [self._along(self.rows[one], size) for one in aspects]
        value = Time(*(_between(aspect, aspects, [one[i] for one, _ in along]) for i in range(3)))
        beyond = len(aspects) > 1 and aspect > aspects[-1]
        return value, beyond or any(outside for _, outside in along)

    def _along(self, rows: Sequence[_Row], size: float) -> tuple[Time, bool]:
        sizes = [row[0] for row in rows]
        beyond = max(1.0, size / sizes[-1]) ** self.slope  # below the first a time keeps its value: it is all latency
        value = Time(*(beyond * _between(size, sizes, [row[i] for row in rows]) for i in (1, 2, 3)))
        return value, size > sizes[-1] or (size < sizes[0] and not self.slope)

    @property
    def first(self) -> Time:
        """The number, or the value at the smallest size of a table without aspects."""
        return Time(*self.rows[1.0][0][1:])


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate straight in logarithms. A place that was measured, and all beyond the ends, have a measured value."""
    above = bisect_left(places, at)
    if above == len(places) or above == 0 or places[above] == at:
        return values[min(above, len(places) - 1)]
    share = math.log(at / places[above - 1]) / math.log(places[above] / places[above - 1])
    return values[above - 1] * math.pow(values[above] / values[above - 1], share)


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
        together: Ranks that compute on a node at once -> factor on their time, more than were measured share what
            there is; None: no factor.
        notes: Remarks that are printed with prices.
    """

    name: str
    title: str
    device: str
    flops: Mapping[str, Known]
    facts: Mapping[str, Known]
    products: Mapping[str, Known] = field(default_factory=dict)
    exchanges: Mapping[int, Known] = field(default_factory=dict)
    passes: Mapping[str, Known] = field(default_factory=dict)
    together: Known | None = None
    notes: str = ""

    @property
    def gpus_per_node(self) -> int:
        """Ranks that the fast links join."""
        return int(self.facts["gpus_per_node"].first.hi)

    @property
    def machine(self) -> Machine:
        """The numbers by which the optimizer itself chooses between plans on this machine: middle values, as whole
        numbers."""
        facts = {name: known.first.mid for name, known in self.facts.items()}
        network = facts["nic"] * min(1.0, facts["nics_per_node"] / facts["gpus_per_node"]) * facts["nic_efficiency"]
        rates = (
            *(self.peak(dtype).first.mid / 1e9 for dtype in ("bfloat16", "float32", "float64")),
            facts["memory_bandwidth"] * facts["memory_efficiency"] / 1e6,
            facts["link"] * facts["link_efficiency"] / 1e6,
            network / 1e6,
            self.gpus_per_node,
            *(1e9 * facts[name] for name in _NANOSECONDS),
        )
        _, table = self.table("standard bfloat16", "bfloat16")
        shares = tuple(round(1000 * table.at(side)[0].mid) for side in SIDES)
        return Machine(self.name, shares, *map(round, rates))

    def peak(self, dtype: str) -> Known:
        """FLOP/s of dense products in a dtype.

        Raises:
            ValueError: The file says nothing of it.
        """
        if dtype not in self.flops:
            raise ValueError(
                f"{self.name}: no peak for products in {dtype}, only {', '.join(self.flops)}. Add it under flops:"
            )
        return self.flops[dtype]

    def table(self, how: str, dtype: str) -> tuple[str, Known]:
        """Name and values of the table that is nearest to a choice with products in a dtype.

        Raises:
            ValueError: The file has none.
        """
        exact = (how, f"{Choice.of(how).method} {dtype}", dtype, "any")
        others = (key for key in sorted(self.products) if dtype in key.split())
        found = next((key for key in (*exact, *others) if key in self.products), None)
        if found is None:
            raise ValueError(
                f"{self.name}: no table says how fast {how!r} is, only {', '.join(self.products)}. Add one under "
                "products:"
            )
        return found, self.products[found]


# ------------------------------------------------------------------------------------------------------------- seconds


@dataclass
class Uses:
    """Numbers and tables that an answer rests on and that are uncertain, collected while prices are made.

    Attributes:
        unverified: Name -> source of each that was not checked.
        extrapolated: Names of tables that were read beyond their end, and where.
    """

    unverified: dict[str, str] = field(default_factory=dict)
    extrapolated: dict[str, None] = field(default_factory=dict)


class Rates(NamedTuple):
    """Seconds on a machine.

    Attributes:
        hardware: The machine of every rank.
        which: Everything uncertain at its best (0), in the middle (1) or at its worst (2).
        uses: Collects what answers rest on.
    """

    hardware: Hardware
    which: int
    uses: Uses

    def fact(self, name: str) -> float:
        """A number of `SCALARS`."""
        return self._read(name, self.hardware.facts[name], not name.startswith(_TIMES))

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense products in a dtype."""
        return self._read(f"peak {dtype}", self.hardware.peak(dtype), is_rate=True)

    def product(self, rows: int, cols: int, how: str, count: int, flops: int) -> float:
        """Seconds of orthogonalizing `count` matrices alike on one rank, see [Note: batches].

        Args:
            rows, cols: Shape of each matrix.
            how: Text of a `Choice`.
            count: Number of matrices.
            flops: Floating point operations of one.
        """
        if not flops or not count:
            return 0.0
        hardware, choice, short = self.hardware, Choice.of(how), min(rows, cols)
        device = torch.device(hardware.device)
        dtype = str(choice.dtype or default_dtype(choice.method, device)).removeprefix("torch.")
        peak, aspect = self.peak(dtype), max(rows, cols) / short
        name, table = hardware.table(how, dtype)
        in_batches = choice.method in _BATCHED
        size = batch_size(rows, cols, device) if in_batches else 1
        alone, outside = table.at(short, aspect)
        # A batch that fills more than the largest matrix of the table does is as good as that one: no extrapolation.
        filled, _ = table.at(short * size ** (1 / 3), aspect)
        self._note(f"efficiency of {name}", table, f"{rows}x{cols}" if outside else "")
        best, worst = max(alone.hi, filled.hi), min(alone.lo, filled.lo)
        share = (best, math.sqrt(alone.mid * filled.mid), worst)[self.which]
        num_batches = -(-count // size)
        launches = _LAUNCHES.get(choice.method, _OTHER_LAUNCHES) * num_batches
        return max(num_batches * size * flops / (share * peak), launches * self.fact("launch"))

    def exchange(
        self,
        num_ranks: int,
        inside: int,  # bytes that a rank sends, or receives, whatever is more, inside its node
        across: int,  # and to other nodes
        num_peers: int,
        spans_nodes: bool,
    ) -> dict[str, float]:
        """Latency, and time on the wire, of one all-to-all, see [Note: how an exchange is timed]."""
        exchanges = self.hardware.exchanges
        if num_ranks <= 1:
            return {"latency": 0.0, "wire": 0.0}
        if exchanges and not spans_nodes:
            nearest = min(exchanges, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
            table, size = exchanges[nearest], inside + across
            where = f"{size} bytes on {num_ranks} ranks"
            if nearest != num_ranks:
                self._note("all-to-all", table, where)
            latency = table.first[self.which]
            return {"latency": latency, "wire": max(0.0, self._at("all-to-all", table, max(size, 1), where) - latency)}
        latency = self.fact("latency_across" if spans_nodes else "latency_inside")
        wire = inside / (self.fact("link") * self.fact("link_efficiency")) if inside else 0.0
        if across:
            share = min(1.0, self.fact("nics_per_node") / self.hardware.gpus_per_node)
            wire = max(wire, across / (self.fact("nic") * share * self.fact("nic_efficiency")))
        return {"latency": latency + self.fact("latency_peer") * num_peers, "wire": wire}

    def passed(self, what: str, elements: int, fragment: float, wire_bytes: int) -> float:
        """Seconds of a pass (a key of `_BYTES_MOVED`) over so many elements in fragments of so many."""
        table = self.hardware.passes.get(what)
        if not elements:
            return 0.0
        if table is not None:
            return self._at(f"pass {what}", table, max(fragment, 1.0)) * elements
        of_wire = {"pack": wire_bytes, "apply": wire_bytes + 4 if wire_bytes < 4 else 0}
        return self.memory(elements * (_BYTES_MOVED[what] + of_wire.get(what, 0)))

    def memory(self, size: int) -> float:
        """Seconds of reading and writing so many bytes."""
        return size / (self.fact("memory_bandwidth") * self.fact("memory_efficiency"))

    def slowdown(self, ranks_on_node: int) -> float:
        """Factor by which computing takes longer if this many ranks of a node compute at once."""
        table = self.hardware.together
        return 1.0 if table is None else self._at("ranks at once", table, ranks_on_node, str(ranks_on_node))

    def _at(self, name: str, table: Known, size: float, where: str = "") -> float:
        """The value of a table of times at a size; `where`: what to say if that is beyond its end."""
        found, outside = table.at(size)
        self._note(name, table, where if outside else "")
        return found[self.which]

    def _read(self, name: str, known: Known, is_rate: bool) -> float:
        self._note(name, known)
        return known.first[2 - self.which if is_rate else self.which]

    def _note(self, name: str, known: Known, beyond: str = "") -> None:
        """Note that something is used, and where it was read beyond its end."""
        if not known.verified:
            self.uses.unverified.setdefault(name, known.source)
        if beyond:
            self.uses.extrapolated.setdefault(f"{name}: {beyond}")


def interval(hardware: Hardware, uses: Uses, seconds: Callable[[Rates], float]) -> Time:
    """The least, the middle and the largest of what takes so many seconds."""
    return Time(*(seconds(Rates(hardware, which, uses)) for which in range(3)))


# --------------------------------------------------------------------------------------------------------------- files

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
    return parse(found, text)


def parse(data: Any, where: str) -> Hardware:
    """A hardware file's content, checked.

    Raises:
        ValueError: See `load`.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: a hardware file is a mapping, found {type(data).__name__}")
    given, together = data.get("facts", {}), [data["together"]] if "together" in data else []
    missing = [key for key in ("name", "title", "device", "flops", "facts", "products") if key not in data]
    missing += [f"facts.{key} ({text})" for key, text in SCALARS.items() if key not in given]
    unknown = [f"facts.{key}" for key in given if key not in SCALARS]
    unknown += [f"pass {row.get('of')}" for row in data.get("passes", ()) if row.get("of") not in PASSES]
    if missing or unknown:
        faults = {"lacks": missing, "has the unknown": unknown}
        raise ValueError(f"{where}: " + "; ".join(f"{what} {', '.join(keys)}" for what, keys in faults.items() if keys))
    try:
        return Hardware(
            name=str(data["name"]),
            title=str(data["title"]),
            device=str(data["device"]),
            flops={dtype: _number(found, f"flops.{dtype}") for dtype, found in data["flops"].items()},
            facts={key: _number(found, f"facts.{key}") for key, found in given.items()},
            products=_tables(data["products"], "of"),
            exchanges=_tables(data.get("exchanges", ()), "ranks", slope=1.0),
            passes=_tables(data.get("passes", ()), "of"),
            together=_tables([{**row, "of": "together"} for row in together], "of", slope=1.0).get("together"),
            notes=str(data.get("notes", "")),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as wrong:
        detail = f"a table lacks {wrong}" if isinstance(wrong, KeyError) else str(wrong)
        raise ValueError(f"{where}: {detail}") from wrong


def _number(data: Any, name: str) -> Known:
    """A number."""
    if not isinstance(data, Mapping) or "source" not in data or "verified" not in data:
        raise ValueError(f"{name} must be {{value: .., source: .., verified: true|false}}, found {data!r}")
    row = _row([1.0, *(data["value" if "value" in data else end] for end in ("low", "high"))])
    return Known(str(data["source"]), data["verified"] is True, {1.0: [row]})


def _tables(rows: Sequence[Mapping[str, Any]], key: str, slope: float = 0.0) -> dict[Any, Known]:
    """One table for each value of a key; several aspects of one stand in several rows."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    found = {}
    for of, group in groups.items():
        by_aspect = {float(row.get("aspect", 1.0)): measured(row["rows"]) for row in group}
        if len(by_aspect) < len(group):
            raise ValueError(f"{key}: {of} with one aspect stands there twice. Write one of them")
        source = "; ".join(dict.fromkeys(str(row["source"]) for row in group))
        found[of] = Known(source, all(row["verified"] is True for row in group), by_aspect, slope)
    return found


def measured(rows: Sequence[Sequence[float]]) -> tuple[_Row, ...]:
    """Rows of a table, ascending, of (size, lo, mid, hi) or (size, lo, hi).

    Raises:
        ValueError: There is none, a size stands there twice, or numbers are not positive or not in order.
    """
    found = tuple(map(_row, sorted(rows, key=lambda row: row[0])))
    if len({at for at, *_ in found}) < max(1, len(found)) or min(map(min, found)) <= 0.0:
        raise ValueError(f"a table needs ascending sizes and positive values, found {found}")
    return found


def _row(numbers: Sequence[float]) -> _Row:
    """Size, least, middle and largest value. Without a middle it is the geometric mean, or half of a range that begins
    at 0."""
    if len(numbers) not in (3, 4):
        raise ValueError(f"a row is [size, low, middle, high] or [size, low, high], found {list(numbers)}")
    at, low, *middle, high = map(float, numbers)
    between = middle[0] if middle else math.sqrt(low * high) if min(low, high) > 0.0 else high / 2
    if not (0.0 <= low <= between <= high < math.inf):
        raise ValueError(f"values must lie at or above 0, low before high: found {list(numbers)}")
    return at, low, between, high
