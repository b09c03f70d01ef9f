"""Performance data of machines: peak FLOP/s, memory, links, latencies, and the fraction of the peak FLOP/s that matrix
products of realistic sizes reach.

Each machine has a file in `data/hardware/`. The file gives the source of each number and states whether the number was
checked. `Rates` estimates how many seconds matrix products, all-to-all exchanges and passes over memory take on the
machine. Each estimate has a best, a middle and a worst value, computed from the best, middle and worst values of the
numbers in the file. `Rates` records which unchecked numbers it used, and which tables it extrapolated.

[Note: how an exchange is timed]
    NCCL's cost model does not cover an all-to-all, which NCCL implements as sends and receives. For an all-to-all
    within a node, `Rates` uses the measured times in the machine's file, if there are any. Otherwise, the estimate is
    the sum of a fixed latency, a latency for each peer, and the transfer time. The links within a node and the network
    transfer data at the same time, so the slower of the two determines the transfer time. Each rank has only its own
    share of the network bandwidth, because an all-to-all cannot use the NICs of other ranks (see nccl-tests#267).

[Note: batches]
    Matrices of the same shape are processed in batches. The batch size depends on the shape and the device. The last
    batch is padded with zeros. The padding takes time, but the plan does not count it as work. With a good library, a
    batch of small products can run as efficiently as one large product. The estimate ranges between two extremes: a
    batch that is only as efficient as one of its matrices alone, and a batch that is as efficient as a single matrix
    with the same number of operations.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardmuon.orthogonalize import batch_size

# Bytes that each pass over memory reads and writes per fp32 element, without send and receive buffers, which
# `Rates.passed` adds. G is the gradient, B the momentum buffer, U the update, W the weight.
#   pack: lerp (read G, read B, write B), lerp (read G, read B, write U), copy (read U).
#   momentum: the first lerp of "pack", for elements that another replica sends.
#   apply: scale (read W, write W), add (read U, read W, write W). A 2-byte receive buffer is first converted to U;
#     `Rates.passed` also adds the bytes of this write.
#   adamw: fused kernel (read W, G and both moments, write W and both moments).
_BYTES_MOVED = {"pack": 28, "momentum": 12, "apply": 20, "adamw": 28}
# Number of kernel launches in five Newton-Schulz steps on one batch, by orthogonalization method, as counted with a
# TorchDispatchMode that ignores views. Steps on small matrices take at least as long as these launches.
_LAUNCHES, _OTHER_LAUNCHES = {"standard": 22, "torch": 19}, 40

# Meaning and unit of each number in a hardware file. A key is the name of a number, or the common beginning of several
# names. Parentheses after the unit give the size by which a table is indexed.
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
# Optional numbers in a hardware file. All of them are times or factors by which times are multiplied, so lower is
# better.
_OPTIONAL = {
    "all-to-all": "seconds (bytes that a rank sends), by ranks of one node",
    "pass pack": "seconds an element (elements of a fragment)",
    "pass apply": "the same",
    "pass adamw": "the same",
    "ranks at once": "factor on the time of products and passes (ranks that compute on a node)",
}

_FOLDER = Path(__file__).parent / "data" / "hardware"
_OWN = f"For a machine of your own, copy {_FOLDER / 'h100.yaml'} and write its numbers (docs/foresight.md says which)"

# a row of a table in a hardware file: (size, smallest value, middle value, largest value)
_Row = tuple[float, float, float, float]
# Array of shape (3,). For an entry of a hardware file, it contains the smallest, middle and largest value; for an
# estimate, the best, middle and worst value.
_Ends = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Known:
    """A number that describes a machine, or a table of such numbers indexed by size.

    Attributes:
        source: Where the data comes from: a URL, a datasheet or a command.
        verified: True if the data was taken directly from the source; False if it is derived or second-hand.
        rows: Dict from the aspect ratio of a matrix (long side / short side) to the rows of a table, sorted by size. If
            the table does not depend on the aspect ratio, the only key is 1. A single number is stored as one row of
            size 1.
        slope: Growth of values beyond the last size: 0 if they stay constant (as rates do), 1 if they are proportional
            to the size (as the time of an exchange is).
    """

    source: str
    verified: bool
    rows: Mapping[float, Sequence[_Row]]
    slope: float = 0.0

    @lru_cache(maxsize=1 << 14)  # noqa: B019 (bounded, and hardware is loaded a few times)
    def at(self, size: float = 1.0, aspect: float = 1.0) -> tuple[_Ends, bool]:
        """Look up the value for a size (above 0) and, for matrices, an aspect ratio.

        Values between two sizes or two aspect ratios are interpolated. Return the value as (smallest, middle, largest),
        and whether it was extrapolated.
        """
        aspects = sorted(self.rows)
        along, outside = zip(*(self._along(self.rows[one], size) for one in aspects), strict=True)
        value = np.array([_between(aspect, aspects, values) for values in zip(*along, strict=True)])
        value.flags.writeable = False  # read-only, because `lru_cache` gives all callers the same array
        return value, any(outside) or (len(aspects) > 1 and aspect > aspects[-1])

    def _along(self, rows: Sequence[_Row], size: float) -> tuple[_Ends, bool]:
        # Sizes below the table get its first value. In tables with slope 1 (mostly times), this does not count as
        # extrapolation, because latency dominates short operations.
        sizes, *ends = zip(*rows, strict=True)
        beyond = max(1.0, size / sizes[-1]) ** self.slope
        value = beyond * np.array([_between(size, sizes, values) for values in ends])
        return value, size > sizes[-1] or (size < sizes[0] and not self.slope)


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate linearly in the logarithms of position and value. `values` were measured at the positions `places`,
    which are in ascending order. At a measured position, the result is exactly the measured value. Outside the measured
    range, the result is the value at the nearest end of the range."""
    above = bisect_left(places, at)
    if above == len(places) or above == 0 or places[above] == at:
        return values[min(above, len(places) - 1)]
    share = math.log(at / places[above - 1]) / math.log(places[above] / places[above - 1])
    return values[above - 1] * math.pow(values[above] / values[above - 1], share)


@dataclass(frozen=True)
class Hardware:
    """Performance data of one kind of machine, as read from a hardware file.

    Attributes:
        name: Name that selects the machine in commands, such as "h100".
        title: Description shown in reports.
        device: Type of torch device, such as "cuda" or "cpu". It determines the defaults for planning a job.
        numbers: Dict from a name, such as "link", "peak bfloat16" or "all-to-all 4", to a number or table. `_NUMBERS`
            and `_OPTIONAL` explain the names.
        notes: Remarks that reports print next to time estimates.
    """

    name: str
    title: str
    device: str
    numbers: Mapping[str, _Known]
    notes: str = ""

    @staticmethod
    def names() -> tuple[str, ...]:
        """List the names of the machines whose hardware files are part of the package."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))

    @classmethod
    def load(cls, name: str | Path) -> Hardware:
        """Load the performance data of a machine.

        Args:
            name: Name of a machine, such as "h100", or path to a hardware file (.yaml or .yml).

        Raises:
            ImportError: PyYAML is not installed.
            ValueError: The machine or file does not exist, or the file is invalid. The message says how to fix the
                problem.
        """
        text = str(name)
        path = Path(text) if text.endswith((".yaml", ".yml")) else _FOLDER / f"{text.lower()}.yaml"
        if not path.is_file():
            known = f"it is none of {', '.join(cls.names())}, and no .yaml file"
            raise ValueError(f"--gpu {text!r}: {known if path.parent == _FOLDER else 'there is no such file'}. {_OWN}")
        try:
            import yaml
        except ImportError as error:
            raise ImportError(f"hardware files need PyYAML ({error}): pip install 'shardmuon[plan]'") from None
        try:
            return _parse(yaml.safe_load(path.read_text()), text)
        except (yaml.YAMLError, UnicodeDecodeError) as wrong:
            line = " ".join(str(wrong).split())
            raise ValueError(f"{text}: it is no YAML ({line}). {_OWN}") from None

    def __getitem__(self, name: str) -> _Known:
        """Look up a number or table by its name.

        Raises:
            ValueError: The hardware file has no number with this name.
        """
        if name not in self.numbers:
            alike = (other for other in self.numbers if other.split()[0] == name.split()[0])
            raise ValueError(f"{self.name}: no {name}, only {', '.join(alike) or 'others'}. Add it under numbers:")
        return self.numbers[name]

    def middle(self, name: str) -> float:
        """Look up a number, which is stored as (smallest, middle, largest), and return the middle value."""
        return float(self[name].at()[0][1])

    @property
    def gpus_per_node(self) -> int:
        """Number of ranks on one node."""
        return int(self.middle("gpus_per_node"))

    def efficiency(self, how: str, dtype: str) -> str:
        """Return the name of the efficiency table to use for an orthogonalization method and dtype.

        Candidates, from best to worst: the table of this method and dtype, the table of this dtype, the table
        "efficiency of any", and the table of a different method with this dtype. If none of them exists, return
        "efficiency of any".

        Args:
            how: Method and dtype, formatted as in "standard bfloat16".
            dtype: Name of the dtype alone, such as "bfloat16".
        """
        exact = (how, dtype, "any")
        others = (key for key in sorted(self.numbers) if key.startswith("efficiency") and dtype in key.split())
        names = (*(f"efficiency of {key}" for key in exact), *others)
        return next((name for name in names if name in self.numbers), names[2])


# ------------------------------------------------------------------------------------------------------------- seconds


@dataclass
class Rates:
    """Estimator of the time that work takes on a machine. It records the unreliable numbers that its estimates used.

    Attributes:
        hardware: Machine on which every rank runs.
        unverified: Dict from name to source, for each unchecked number that an estimate used.
        extrapolated: Lookups beyond the ends of a table, in the order in which they were made. The dict serves as an
            ordered set: its keys are strings "table: size", and its values are None.
    """

    hardware: Hardware
    unverified: dict[str, str] = field(default_factory=dict)
    extrapolated: dict[str, None] = field(default_factory=dict)

    def of(self, name: str, size: float = 1.0, where: str = "") -> _Ends:
        """Look up a number, or a table's value at a size, and return it as (best, middle, worst). If `where` is given
        and the size is beyond the table's ends, record `where` in `extrapolated`."""
        known = self.hardware[name]
        found, outside = known.at(size)
        self._note(name, known, where if outside else "")
        # For a time, the smallest value is the best. For a rate, the largest value is the best.
        is_time = name.startswith(("latency", "agreement", "host", "launch", *_OPTIONAL))
        return found if is_time else found[::-1]

    def product(self, rows: int, cols: int, how: str, count: int, flops: int) -> _Ends:
        """Estimate the seconds to orthogonalize `count` matrices of one shape on one rank (see [Note: batches]).

        Args:
            rows, cols: Shape of each matrix.
            how: Orthogonalization method and dtype, formatted as in "standard bfloat16".
            count: Number of matrices.
            flops: FLOPs needed to orthogonalize one matrix.
        """
        if not flops or not count:
            return np.zeros(3)
        (method, dtype), short, device = how.split(), min(rows, cols), torch.device(self.hardware.device)
        peak, aspect = self.of(f"peak {dtype}"), max(rows, cols) / short
        name = self.hardware.efficiency(how, dtype)
        table = self.hardware[name]
        size = batch_size(rows, cols, device) if method in ("standard", "gram") else 1
        alone, outside = table.at(short, aspect)
        # A batch with more work than any matrix in the table gets the efficiency of the largest one. Only a single
        # matrix beyond the table counts as extrapolation.
        filled, _ = table.at(short * size ** (1 / 3), aspect)
        self._note(name, table, f"{rows}x{cols}" if outside else "")
        share = np.array([max(alone[2], filled[2]), math.sqrt(alone[1] * filled[1]), min(alone[0], filled[0])])
        num_batches = -(-count // size)
        launches = _LAUNCHES.get(method, _OTHER_LAUNCHES) * num_batches
        return np.maximum(num_batches * size * flops / (share * peak), launches * self.of("launch"))

    def exchange(
        self,
        num_ranks: int,
        # bytes that a rank exchanges with ranks on the same node: the number sent or the number received, whichever is
        # larger
        inside: int,
        # bytes that a rank exchanges with ranks on other nodes: the number sent or the number received, whichever is
        # larger
        across: int,
        num_peers: int,
        spans_nodes: bool,
    ) -> dict[str, _Ends]:
        """Estimate the time of one all-to-all. Return a dict with the seconds of its "latency" and of its transfer
        ("wire"). See [Note: how an exchange is timed]."""
        if num_ranks <= 1:
            return {"latency": np.zeros(3), "wire": np.zeros(3)}
        tables = [int(name.split()[1]) for name in self.hardware.numbers if name.startswith("all-to-all")]
        if tables and not spans_nodes:
            nearest = min(tables, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
            name, size = f"all-to-all {nearest}", inside + across
            where = f"{size} bytes on {num_ranks} ranks"
            if nearest != num_ranks:
                self._note(name, self.hardware[name], where)
            latency = self.of(name)
            return {"latency": latency, "wire": np.maximum(0.0, self.of(name, max(size, 1), where) - latency)}
        latency = self.of("latency_across" if spans_nodes else "latency_inside")
        wire = inside / (self.of("link") * self.of("link_efficiency")) if inside else np.zeros(3)
        if across:
            share = np.minimum(1.0, self.of("nics_per_node") / self.hardware.gpus_per_node)
            wire = np.maximum(wire, across / (self.of("nic") * share * self.of("nic_efficiency")))
        return {"latency": latency + self.of("latency_peer") * num_peers, "wire": wire}

    def passed(self, what: str, elements: int, fragment: float, wire_bytes: int) -> _Ends:
        """Estimate the seconds that a pass over memory takes, such as applying updates to weights.

        Args:
            what: Name of the pass, a key of `_BYTES_MOVED`, such as "apply".
            elements: Number of elements that the pass processes.
            fragment: Mean number of elements of one matrix that a rank holds.
            wire_bytes: Number of bytes per element in the exchange's send and receive buffers.
        """
        if not elements:
            return np.zeros(3)
        if f"pass {what}" in self.hardware.numbers:
            return self.of(f"pass {what}", max(fragment, 1.0)) * elements
        of_wire = {"pack": wire_bytes, "apply": wire_bytes + 4 if wire_bytes < 4 else 0}
        return self.memory(elements * (_BYTES_MOVED[what] + of_wire.get(what, 0)))

    def memory(self, size: int) -> _Ends:
        """Estimate the seconds that a device takes to read and write a total of `size` bytes of memory."""
        return size / (self.of("memory_bandwidth") * self.of("memory_efficiency"))

    def slowdown(self, num_ranks: int) -> _Ends:
        """Look up the factor by which computation slows down when `num_ranks` ranks on a node compute at once."""
        name = "ranks at once"
        return self.of(name, num_ranks, str(num_ranks)) if name in self.hardware.numbers else np.ones(3)

    def _note(self, name: str, known: _Known, beyond: str = "") -> None:
        """Record that an estimate used a number. Add it to `unverified` if nobody has checked it, and to `extrapolated`
        if `beyond` describes a size beyond the ends of its table."""
        if not known.verified:
            self.unverified.setdefault(name, known.source)
        if beyond:
            self.extrapolated.setdefault(f"{name}: {beyond}")


# --------------------------------------------------------------------------------------------------------------- files


def _parse(data: Any, where: str) -> Hardware:
    """Validate the contents of a hardware file, and convert them to a `Hardware`. `where` is the file's name, for error
    messages.

    Raises:
        ValueError: The contents are incomplete or wrong. The message lists the faults.
    """
    given = data.get("numbers") if isinstance(data, Mapping) else None
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: a hardware file is a mapping with numbers:, found {data!r:.80}")
    words = {**_NUMBERS, **_OPTIONAL}
    kinds = {str(name): next((w for w in words if f"{name} ".startswith(f"{w} ")), None) for name in given}
    missing = [key for key in ("name", "title", "device") if key not in data]
    missing += [f"{word} ({text})" for word, text in _NUMBERS.items() if word not in kinds.values()]
    faults = {"lacks": missing, "has the unknown": [name for name, kind in kinds.items() if kind is None]}
    if any(faults.values()):
        raise ValueError(f"{where}: " + "; ".join(f"{what} {', '.join(keys)}" for what, keys in faults.items() if keys))
    numbers = {}
    for (name, kind), found in zip(kinds.items(), given.values(), strict=True):
        try:
            # Beyond the last size in a hardware file's table, values in "all-to-all" and "ranks at once" tables grow in
            # proportion to the size, and values in all other tables stay constant.
            numbers[name] = _known(found, 1.0 if kind in ("all-to-all", "ranks at once") else 0.0)
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"{where}: {name}: {'lacks ' * isinstance(wrong, KeyError)}{wrong}") from wrong
    return Hardware(str(data["name"]), str(data["title"]), str(data["device"]), numbers, str(data.get("notes", "")))


def _known(data: Any, slope: float) -> _Known:
    """Parse one entry of a hardware file, which is a single value, the two ends of an interval, the rows of a table, or
    a dict from aspect ratio to the rows of a table. `slope` becomes the result's attribute of the same name."""
    if not isinstance(data, Mapping):
        raise ValueError(f"it must be {{value: .., source: .., verified: true|false}}, found {data!r}")
    ends = (data["value" if "value" in data else end] for end in ("low", "high"))
    if "rows" not in data:
        data = {**data, "rows": [[1.0, *ends]]}
    tables = data["rows"] if data["rows"] and isinstance(data["rows"], Mapping) else {1.0: data["rows"]}
    found = {float(aspect): _measured(of) for aspect, of in tables.items()}
    return _Known(str(data["source"]), data["verified"] is True, found, slope)


def _measured(rows: Sequence[Sequence[float]]) -> tuple[_Row, ...]:
    """Parse the rows of a table, each as (size, lo, mid, hi) or (size, lo, hi), and sort them by size.

    Raises:
        ValueError: There are no rows, a size occurs twice, the values in a row are not in ascending order, or a table
            with several rows contains a number that is not positive.
    """
    found = tuple(map(_row, sorted(rows, key=lambda row: row[0])))
    if len({at for at, *_ in found}) < max(1, len(found)) or (len(found) > 1 and min(map(min, found)) <= 0.0):
        raise ValueError(f"a table needs ascending sizes and positive values, found {found}")
    return found


def _row(numbers: Sequence[float]) -> _Row:
    """Parse a row of a table into (size, least, middle, largest value). If the row has no middle value, use the
    geometric mean of the least and the largest value, or half of the largest value if the least value is 0."""
    if len(numbers) not in (3, 4):
        raise ValueError(f"a row is [size, low, middle, high] or [size, low, high], found {list(numbers)}")
    at, low, *middle, high = map(float, numbers)
    between = middle[0] if middle else math.sqrt(low * high) if min(low, high) > 0.0 else high / 2
    if not (0.0 <= low <= between <= high < math.inf):
        raise ValueError(f"values must lie at or above 0, low before high: found {list(numbers)}")
    return at, low, between, high
