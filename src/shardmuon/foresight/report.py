"""Report on the cost of Muon in a planned job, made by `plan`, as text tables or as an HTML page with a timeline."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardmuon.foresight.hardware import Hardware, Time, load, scaled, seconds
from shardmuon.foresight.job import Exact, count
from shardmuon.foresight.pricing import Price, adamw_step, price
from shardmuon.price.clock import Event
from shardmuon.price.machines import MACHINES


def plan(
    model: str | nn.Module,
    mesh: str,
    *,
    gpu: str | Path | Hardware = "h100",
    engine: str = "torch",
    gpus_per_node: int | None = None,
    tokens_per_step: float | None = None,
    active_params: float | None = None,
    weights: torch.dtype = torch.float32,
    **options: Any,
) -> Report:
    """Estimate the time, memory and communication of Muon in a job on any mesh, without the job's ranks or a GPU.

    Args:
        model: Name of a preset, path of a config.json, MODULE:FUNCTION, or a module on the meta device.
        mesh: Sizes of the mesh axes, such as "dp=8 shard=64 tp=8 ep=8 pp=4".
        gpu: Name of a hardware file in the package ("h100"), path of a hardware file, or a `Hardware`.
        engine: Framework that shards parameters: "torch" (DDP, FSDP2, HSDP, TP, EP) or "zero" (ZeRO 1 and 2).
        gpus_per_node: Number of ranks that are connected by fast links. Default: as given in the hardware file.
        tokens_per_step: Number of tokens in a training step, over all ranks. If given, the report also compares the
            time of a whole training step with the time that it takes with AdamW.
        active_params: Number of parameters used per token. Needed for models with experts that are not presets.
        weights: dtype of the model's parameters and gradients.
        **options: Options of `Muon`, such as ``method``, ``momentum_dtype`` or ``ns_steps``.

    Returns:
        The report, which can be printed or written with `report.write_html(path)`. `report.price.step` is the time of
        a step, and `report.exact` has all counts.

    Raises:
        ValueError: The model or GPU does not exist, or the mesh does not fit the model. The message says what to write.

    Examples:
        >>> report = plan("llama3-8b", "shard=64", gpu="h100", tokens_per_step=4e6)
        >>> report.exact.world, report.price.step.lo < report.price.step.hi
        (64, True)
    """
    hardware = gpu if isinstance(gpu, Hardware) else load(gpu)
    per_node = hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
    exact = count(
        model,
        mesh,
        engine=engine,
        gpus_per_node=per_node,
        active_params=active_params,
        device=hardware.device,
        weights=weights,
        machine=MACHINES.get(hardware.name),
        **options,
    )
    return Report(exact, hardware, price(exact, hardware, tokens=tokens_per_step), adamw_step(exact, hardware))


@dataclass(frozen=True)
class Report:
    """Cost of Muon in a training job: `print` the report, or write it as an HTML page.

    Attributes:
        exact: Counts of what each rank stores, sends and computes. All are exact except the memory needed during a
            step, which is an upper bound.
        hardware: Machine for which the time was estimated.
        price: Estimated time of an optimizer step, and of the forward and backward pass before it.
        adamw: Estimated time in seconds of an AdamW step on the same mesh.
    """

    exact: Exact
    hardware: Hardware
    price: Price
    adamw: Time

    @property
    def overhead(self) -> tuple[float, float, float]:
        """Extra time of a training step with Muon relative to one with AdamW, as fractions: (least, middle, most). All
        are zero if the number of tokens is unknown.

        The memory traffic of both optimizers depends on the same uncertain factors, so the lower ends of the two
        intervals are compared with each other, and the upper ends likewise.
        """
        if self.price.training is None:
            return 0.0, 0.0, 0.0
        whole, ours, theirs = self.price.training, self.price.step, self.adamw
        return (
            (ours.lo - theirs.lo) / (whole.hi + theirs.lo),
            (ours.mid - theirs.mid) / (whole.mid + theirs.mid),
            (ours.hi - theirs.hi) / (whole.lo + theirs.hi),
        )

    def html(self) -> str:
        """Render the report as a self-contained HTML page, which follows the reader's light or dark mode."""
        from jinja2 import Environment  # a dependency of torch

        page = Path(__file__).parent / "data" / "report.html"
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        events = self.price.timeline
        return environment.from_string(page.read_text(encoding="utf-8")).render(
            report=self,
            price=self.price,
            sections=_sections(self),
            events=list(zip(events, _lanes(events), strict=True)),
            phases=_PHASES,
        )

    def write_html(self, path: Path) -> None:
        """Write the HTML page to a file."""
        path.write_text(self.html(), encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 150) -> str:
        """Render the report as text tables with lines of at most `width` characters."""
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError as error:
            raise ImportError(f"tables need rich ({error}): pip install 'shardmuon[plan]'") from None
        file = io.StringIO()
        out = Console(file=file, width=width, color_system=None, highlight=False, markup=False, emoji=False)
        for section in _sections(self):
            table = Table(*section.header or ("", ""), box=None, pad_edge=False, padding=(0, 2, 0, 0))
            table.show_header = bool(section.header)
            for row in section.rows:
                table.add_row(*row)
            out.print(section.title, table, *section.notes, "", sep="\n")
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


# ------------------------------------------------------------------------------------------- ---------- tables and text

_TIGHT = 0.9  # fraction of a rank's memory, activations not counted, above which a job is called tight
_KEY = (
    "NS runs: matrices orthogonalized. calls + votes: exchanges (all-to-all) and votes (messages between hosts), as in "
    "14 + 1. kept: weights, gradients, state. in a step: at most, beside what is kept."
)
_OPERATIONS = ("MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
_MANY = 12  # maximum number of rows in a table; for further rows only their number is shown


class _Section(NamedTuple):
    """A table with a title, and with remarks below it.

    Attributes:
        title: Line above the table.
        rows: Texts of the cells, row by row.
        header: Names of the columns; empty for a table of (name, text) pairs.
        notes: Lines below the table.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _size(value: float) -> str:
    """Format a number of bytes with three digits and a binary unit."""
    return scaled((value,), 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _number(value: float) -> str:
    """Format a count, such as "70.6 B" for 70.6 billion."""
    return f"{value:,.0f}" if value < 1e6 else scaled((value / 1e6,), 1000, ("M", "B", "T", "P"))


def _sections(report: Report) -> list[_Section]:
    """Return all tables of a report, in reading order."""
    parts = [(name, str(time)) for name, time in report.price.parts.items() if time.hi > 0.0]
    of_time = _Section(f"Where rank {report.price.rank}'s time goes", parts, ("part", "seconds"))
    return [_summary(report), _answers(report), _ranks(report.exact), of_time, _grounds(report)]


def _summary(report: Report) -> _Section:
    exact, mesh = report.exact, report.exact.mesh
    params, in_matrices = _number(exact.muon_params + exact.adamw_params), _number(exact.muon_params)
    num_nodes = -(-exact.world // mesh.gpus_per_node)  # the last node may be partly filled
    rows = {
        "model": f"{exact.model}: {params} parameters, {in_matrices} of them in matrices",
        "active": f"{_number(exact.tokens_flops / 6)} parameters work on a token" if exact.tokens_flops else "",
        "source": exact.source,
        "mesh": f"{mesh} ({mesh.engine}), {exact.world:,} ranks on {num_nodes:,} nodes of {mesh.gpus_per_node}",
        "hardware": report.hardware.title,
        "options": ", ".join(f"{key} {value}" for key, value in exact.options.items()),
    }
    return _Section("Plan", [row for row in rows.items() if row[1]])


def _answers(report: Report) -> _Section:
    price = report.price
    rows = {
        "optimizer step": f"{price.step}, most likely {seconds(price.step.mid)}",
        "why so wide": price.reason,
        "memory of a rank": _memory(report),
        "over AdamW": f"AdamW's step: {report.adamw}",
        "straggler": _straggler(report),
    }
    if price.training is not None:
        low, middle, high = (f"{100 * share:.3g} %" for share in report.overhead)
        rows["over AdamW"] = (
            f"a training step is {middle} longer than with AdamW ({low} .. {high}); forward and backward of "
            f"{_number(price.tokens or 0)} tokens take {price.training}; {rows['over AdamW']}"
        )
    return _Section("Answers", [*rows.items()])


def _memory(report: Report) -> str:
    largest, have = report.exact.largest, report.hardware.middle("memory_bytes")
    need = largest.stored.total + largest.peak  # an upper bound, because `peak` is an upper bound
    never = "does not fit" if largest.stored.total > have else "may not fit"
    fits = never if need > have else "tight" if need > _TIGHT * have else "fits"
    kept, more = _size(largest.stored.total), _size(largest.peak)
    without = "activations" + (" and ZeRO 1's whole gradients" if report.exact.mesh.engine == "zero" else "")
    return (
        f"{fits}: {_size(need)} of {_size(have)}; {kept} between steps, at most {more} more in one, without {without}"
    )


def _straggler(report: Report) -> str:
    exact, price = report.exact, report.price
    late = sorted(price.ends.items(), key=lambda pair: (-pair[1], pair[0]))
    busiest, mean = (
        max(exact.classes, key=lambda c: c.flops),
        sum(c.count * c.flops for c in exact.classes) / exact.world,
    )
    idle = sum(c.count for c in exact.classes if not c.flops)
    return (
        f"rank {price.rank}; the last rank is done after {seconds(late[0][1])}, the first after "
        f"{seconds(late[-1][1])}. Most matmul FLOPs: rank {busiest.ranks[0]}, "
        f"{busiest.flops / mean if mean else 1:.2f} of the mean"
        + (f"; {idle:,} of {exact.world:,} ranks orthogonalize nothing" if idle else "")
    )


def _ranks(exact: Exact) -> _Section:
    classes = sorted(exact.classes, key=lambda c: (-c.flops, c.ranks[0]))
    rows = [
        (
            f"{c.ranks[0]:,}" + (f" and {c.count - 1:,} like it" if c.count > 1 else ""),
            str(c.stage),
            str(c.orthogonalized),
            scaled((c.flops / 1e6,), 1000, _OPERATIONS) if c.flops else "none",
            _size(c.stored.total),
            _size(c.peak),
            _size(c.sent.inside),
            _size(c.sent.across),
            f"{c.exchanges} + {c.votes}",
        )
        for c in classes[:_MANY]
    ]
    rest = sum(c.count for c in classes[_MANY:])
    notes = (f"{rest:,} ranks of {len(classes) - _MANY:,} other kinds are left out.", _KEY) if rest else (_KEY,)
    first = ("rank", "stage", "NS runs", "matmul FLOPs", "kept", "in a step")
    return _Section("Ranks", rows, (*first, "sent in node", "sent between", "calls + votes"), notes)


def _grounds(report: Report) -> _Section:
    rows = [("computed", "by the planner that the job itself uses: bytes, collectives, matrices, operations, memory")]
    rows += [("a bound", "what a step takes of memory beside what is kept, less as a rule")]
    rows += [("extrapolated", text) for text in report.price.extrapolated[:_MANY]]
    rows += [("unverified", f"{name}: {source}") for name, source in report.price.unverified.items()]
    rows += [("note", report.hardware.notes)] if report.hardware.notes else []
    return _Section("Assumptions", rows)


# -------------------------------------------------------------------------------------------------- -- page's timeline

_PHASES = {
    "begin": "vote and host",
    "pack": "pack: momentum, and copies to the wire",
    "gather": "gather to owners",
    "fill": "fill: momentum of what stays here",
    "orthogonalize": "orthogonalize",
    "scatter": "scatter results",
    "apply": "apply to the weights",
    "relay": "relay results to other replicas",
    "finish": "apply what was relayed",
    "adamw": "AdamW",
}


def _lanes(events: Sequence[Event]) -> list[int]:
    """Assign each event to a lane (a horizontal row) of the timeline: lane 0 for computation, 1 and up for exchanges.
    Exchanges that overlap in time get different lanes."""
    free: list[float] = []  # time at which each lane for exchanges becomes free
    found = []
    for event in events:
        lane = 0
        if event.phase in ("gather", "scatter", "relay"):
            at = next((i for i, end in enumerate(free) if end <= event.start), len(free))
            free[at : at + 1] = [event.end]
            lane = at + 1
        found.append(lane)
    return found
