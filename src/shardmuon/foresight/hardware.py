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

from shardmuon.orthogonalize import batch_size, default_dtype
from shardmuon.orthogonalize.choice import Choice

# Bytes that a pass reads and writes of one fp32 element beside the wire's: kernels one after the other, as lists of
# tensors run.
#   pack: lerp (read G, read B, write B), lerp (read G, read B, write U), copy (read U, write the wire).
#   momentum: the first of them alone, where another replica sends it.
#   apply: scale (read W, write W), widen (read the wire, write U), add (read U, read W, write W).
#   adamw: the fused kernel reads p, g, m, v and writes p, m, v.
_BYTES_MOVED = {"pack": 28, "momentum": 12, "apply": 20, "adamw": 28}
_BATCHED = ("standard", "gram")
# Operations of five steps that are no views, counted under a TorchDispatchMode: of a batch, or of a matrix where there
# are none. Where matrices are small they bound the time from below.
_LAUNCHES, _OTHER_LAUNCHES = {"standard": 22, "torch": 19}, 40

# Name of a number in a file, or its first words if there are several -> what it is, in SI units. Sizes of tables in
# brackets.
_NUMBERS = {
    "peak": "FLOP/s of dense matrix products of one rank, by dtype",
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
    "efficiency of": 'share of the peak (short side), by what is multiplied: "METHOD DTYPE", a dtype, or "any"',
}
# Those that a file may have; all are times.
_OPTIONAL = {
    "all-to-all": "seconds (bytes that a rank sends), by ranks of one node",
    "pass pack": "seconds an element (elements of a fragment)",
    "pass apply": "the same",
    "pass adamw": "the same",
    "ranks at once": "factor on the time of products and passes (ranks that compute on a node)",
}
_TIMES = ("latency", "agreement", "host", "launch", *_OPTIONAL)  # less is better
_GROWING = ("all-to-all", "ranks at once")  # in proportion beyond the last size; others keep their value

_Row = tuple[float, float, float, float]  # size; the least, the middle and the largest value that was measured there


class Time(NamedTuple):
    """Seconds that something takes, or another number that is uncertain.

    Attributes:
        lo: If all that is uncertain turns out well.
        mid: What to expect; of measured times the median.
        hi: If it turns out badly.
    """

    lo: float
    mid: float
    hi: float

    def __str__(self) -> str:
        """Text like "1.2 .. 3.4 ms"."""
        return scaled((1e6 * self.lo, 1e6 * self.hi), 1000, _SECONDS)


_SECONDS = ("us", "ms", "s")


def seconds(value: float) -> str:
    """Text like "3.4 ms"."""
    return scaled((1e6 * value,), 1000, _SECONDS)


def scaled(values: Sequence[float], step: int, units: Sequence[str]) -> str:
    """Text of numbers in three digits, or whole, in the largest of these units in which the last one is 1 or more.

    Args:
        values: Numbers in the first unit.
        step: Number of units that make one of the next.
        units: Names, ascending.
    """
    at = 0
    while abs(values[-1]) >= step ** (at + 1) and at + 1 < len(units):
        at += 1
    parts = (value / step**at for value in values)
    texts = (f"{part:,.0f}" if abs(part) >= 100 or part == 0 else f"{part:.3g}" for part in parts)
    return f"{' .. '.join(texts)} {units[at]}"


@dataclass(frozen=True)
class _Known:
    """A number, or measured values over sizes, and how it is known.

    Attributes:
        source: An address, a datasheet, a command.
        verified: True if it was read in the source itself; else it was derived, or is second-hand.
        rows: Aspect (long side over short; 1 where there is none) -> values over sizes, between neighbours straight in
            logarithms of both. A number has one row, of size 1.
        slope: Beyond the last size: 0 keeps the value (a rate), 1 grows in proportion (a time).
    """

    source: str
    verified: bool
    rows: Mapping[float, Sequence[_Row]]
    slope: float = 0.0

    def at(self, size: float = 1.0, aspect: float = 1.0) -> tuple[Time, bool]:
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
        title: Title for people.
        device: "cuda", "cpu", ..: the kind of torch device whose defaults the plan takes.
        numbers: By name, see `_NUMBERS` and `_OPTIONAL`: "link", "peak bfloat16", "all-to-all 4".
        notes: Remarks that are printed with prices.
    """

    name: str
    title: str
    device: str
    numbers: Mapping[str, _Known]
    notes: str = ""

    def __getitem__(self, name: str) -> _Known:
        """A number by its name.

        Raises:
            ValueError: The file has none.
        """
        if name not in self.numbers:
            alike = (other for other in self.numbers if other.split()[0] == name.split()[0])
            raise ValueError(f"{self.name}: no {name}, only {', '.join(alike) or 'others'}. Add it under numbers:")
        return self.numbers[name]

    def middle(self, name: str) -> float:
        """The middle value of a number."""
        return self[name].at()[0].mid

    @property
    def gpus_per_node(self) -> int:
        """Ranks that the fast links join."""
        return int(self.middle("gpus_per_node"))

    def efficiency(self, how: str, dtype: str) -> str:
        """Name of the table that is nearest to a choice with products in a dtype; "efficiency of any" if none is."""
        exact = (how, f"{Choice.of(how).method} {dtype}", dtype, "any")
        others = (key for key in sorted(self.numbers) if key.startswith("efficiency") and dtype in key.split())
        names = (*(f"efficiency of {key}" for key in exact), *others)
        return next((name for name in names if name in self.numbers), names[3])


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

    def of(self, name: str, size: float = 1.0, where: str = "") -> float:
        """A number, or a table's value at a size; `where`: what to say if that is beyond its end."""
        known = self.hardware[name]
        found, outside = known.at(size)
        self._note(name, known, where if outside else "")
        return found[self.which if name.startswith(_TIMES) else 2 - self.which]

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
        choice, short, device = Choice.of(how), min(rows, cols), torch.device(self.hardware.device)
        dtype = str(choice.dtype or default_dtype(choice.method, device)).removeprefix("torch.")
        peak, aspect = self.of(f"peak {dtype}"), max(rows, cols) / short
        name = self.hardware.efficiency(how, dtype)
        table = self.hardware[name]
        in_batches = choice.method in _BATCHED
        size = batch_size(rows, cols, device) if in_batches else 1
        alone, outside = table.at(short, aspect)
        # A batch that fills more than the largest matrix of the table does is as good as that one: no extrapolation.
        filled, _ = table.at(short * size ** (1 / 3), aspect)
        self._note(name, table, f"{rows}x{cols}" if outside else "")
        best, worst = max(alone.hi, filled.hi), min(alone.lo, filled.lo)
        share = (best, math.sqrt(alone.mid * filled.mid), worst)[self.which]
        num_batches = -(-count // size)
        launches = _LAUNCHES.get(choice.method, _OTHER_LAUNCHES) * num_batches
        return max(num_batches * size * flops / (share * peak), launches * self.of("launch"))

    def exchange(
        self,
        num_ranks: int,
        inside: int,  # bytes that a rank sends, or receives, whatever is more, inside its node
        across: int,  # and to other nodes
        num_peers: int,
        spans_nodes: bool,
    ) -> dict[str, float]:
        """Latency, and time on the wire, of one all-to-all, see [Note: how an exchange is timed]."""
        if num_ranks <= 1:
            return {"latency": 0.0, "wire": 0.0}
        tables = [int(name.split()[1]) for name in self.hardware.numbers if name.startswith("all-to-all")]
        if tables and not spans_nodes:
            nearest = min(tables, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
            name, size = f"all-to-all {nearest}", inside + across
            where = f"{size} bytes on {num_ranks} ranks"
            if nearest != num_ranks:
                self._note(name, self.hardware[name], where)
            latency = self.of(name)
            return {"latency": latency, "wire": max(0.0, self.of(name, max(size, 1), where) - latency)}
        latency = self.of("latency_across" if spans_nodes else "latency_inside")
        wire = inside / (self.of("link") * self.of("link_efficiency")) if inside else 0.0
        if across:
            share = min(1.0, self.of("nics_per_node") / self.hardware.gpus_per_node)
            wire = max(wire, across / (self.of("nic") * share * self.of("nic_efficiency")))
        return {"latency": latency + self.of("latency_peer") * num_peers, "wire": wire}

    def passed(self, what: str, elements: int, fragment: float, wire_bytes: int) -> float:
        """Seconds of a pass (a key of `_BYTES_MOVED`) over so many elements in fragments of so many."""
        if not elements:
            return 0.0
        if f"pass {what}" in self.hardware.numbers:
            return self.of(f"pass {what}", max(fragment, 1.0)) * elements
        of_wire = {"pack": wire_bytes, "apply": wire_bytes + 4 if wire_bytes < 4 else 0}
        return self.memory(elements * (_BYTES_MOVED[what] + of_wire.get(what, 0)))

    def memory(self, size: int) -> float:
        """Seconds of reading and writing so many bytes."""
        return size / (self.of("memory_bandwidth") * self.of("memory_efficiency"))

    def slowdown(self, num_ranks: int) -> float:
        """Factor by which computing takes longer if this many ranks of a node compute at once."""
        name = "ranks at once"
        return self.of(name, num_ranks, str(num_ranks)) if name in self.hardware.numbers else 1.0

    def _note(self, name: str, known: _Known, beyond: str = "") -> None:
        """Note that something is used, and where it was read beyond its end."""
        if not known.verified:
            self.uses.unverified.setdefault(name, known.source)
        if beyond:
            self.uses.extrapolated.setdefault(f"{name}: {beyond}")


def interval(hardware: Hardware, uses: Uses, seconds: Callable[[Rates], float]) -> Time:
    """The least, the middle and the largest of what takes so many seconds."""
    return Time(*(seconds(Rates(hardware, which, uses)) for which in range(3)))


# --------------------------------------------------------------------------------------------------------------- files

_FOLDER = Path(__file__).parent / "data" / "hardware"
_OWN = f"For a machine of your own, copy {_FOLDER / 'h100.yaml'} and write its numbers (docs/foresight.md says which)"


def names() -> tuple[str, ...]:
    """Names of the hardware files that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load(name: str | Path) -> Hardware:
    """The hardware of this name, or of this file.

    Raises:
        ImportError: PyYAML is missing.
        ValueError: There is none, or the file lacks something; the message says what to write.
    """
    text = str(name)
    path = Path(text) if text.endswith((".yaml", ".yml")) else _FOLDER / f"{text.lower()}.yaml"
    if not path.is_file():
        known = f"it is none of {', '.join(names())}, and no .yaml file"
        raise ValueError(f"--gpu {text!r}: {known if path.parent == _FOLDER else 'there is no such file'}. {_OWN}")
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"hardware files need PyYAML ({error}): pip install 'shardmuon[plan]'") from None
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        line = " ".join(str(wrong).split())
        raise ValueError(f"{text}: it is no YAML ({line}). {_OWN}") from None
    return _parse(found, text)


def _parse(data: Any, where: str) -> Hardware:
    """A hardware file's content, checked.

    Raises:
        ValueError: See `load`.
    """
    given = data.get("numbers") if isinstance(data, Mapping) else None
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: a hardware file is a mapping with numbers:, found {data!r:.80}")
    words = {**_NUMBERS, **_OPTIONAL}
    kinds = {str(name): next((w for w in words if f"{name} ".startswith(f"{w} ")), None) for name in given}
    missing = [key for key in ("name", "title", "device") if key not in data]
    missing += [f"{word} ({text})" for word, text in _NUMBERS.items() if word not in kinds.values()]
    unknown = [name for name, kind in kinds.items() if kind is None]
    if missing or unknown:
        faults = {"lacks": missing, "has the unknown": unknown}
        raise ValueError(f"{where}: " + "; ".join(f"{what} {', '.join(keys)}" for what, keys in faults.items() if keys))
    numbers = {}
    for (name, kind), found in zip(kinds.items(), given.values(), strict=True):
        try:
            numbers[name] = _known(found, 1.0 if kind in _GROWING else 0.0)
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"{where}: {name}: {'lacks ' * isinstance(wrong, KeyError)}{wrong}") from wrong
    return Hardware(str(data["name"]), str(data["title"]), str(data["device"]), numbers, str(data.get("notes", "")))


def _known(data: Any, slope: float) -> _Known:
    """An entry: a value, its ends, or the rows of a table, by aspect if there are several."""
    if not isinstance(data, Mapping):
        raise ValueError(f"it must be {{value: .., source: .., verified: true|false}}, found {data!r}")
    source, verified = str(data["source"]), data["verified"] is True
    if "rows" not in data:
        ends = (data["value" if "value" in data else end] for end in ("low", "high"))
        return _Known(source, verified, {1.0: [_row([1.0, *ends])]}, slope)
    rows = data["rows"]
    tables = rows if rows and isinstance(rows, Mapping) else {1.0: rows}
    return _Known(source, verified, {float(aspect): _measured(of) for aspect, of in tables.items()}, slope)


def _measured(rows: Sequence[Sequence[float]]) -> tuple[_Row, ...]:
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
