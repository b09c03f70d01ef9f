"""The report of a planned job: `plan` makes it; tables, remarks, what would help, the lanes of the page's picture."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardmuon.foresight.hardware import Hardware, Time, load, scaled, seconds
from shardmuon.foresight.job import Exact, count
from shardmuon.foresight.layouts import Mesh, parse_mesh
from shardmuon.foresight.pricing import Price, adamw_step, price
from shardmuon.plan.pipeline import Event


def plan(
    model: str | nn.Module,
    mesh: str | Mesh,
    *,
    gpu: str | Path | Hardware = "h100",
    engine: str | None = None,
    gpus_per_node: int | None = None,
    tokens_per_step: float | None = None,
    active_params: float | None = None,
    weights: torch.dtype = torch.float32,
    advice: bool = True,
    **options: Any,
) -> Report:
    """Say what Muon will take of a job on any mesh, without its ranks and without a GPU.

    Args:
        model: A preset's name, a config.json, MODULE:FUNCTION, or a module on the meta device.
        mesh: Sizes of axes, such as "dp=8 shard=64 tp=8 ep=8 pp=4".
        gpu: Name of a hardware file that comes with the package, a file, or `Hardware`.
        engine: What cuts parameters up: "fsdp2", "ddp", "zero1" to "zero3", "megatron".
        gpus_per_node: Ranks that the fast links join. Default: the hardware's.
        tokens_per_step: Tokens of a training step on all ranks, to tell the optimizer's share of it.
        active_params: How many parameters work on one token, if neither the model nor its configuration says how many
            experts a token takes.
        weights: dtype of the model's parameters and gradients.
        advice: Plan and price changes that might help.
        **options: Of `Muon`, such as ``method``, ``momentum_dtype`` or ``ns_steps``.

    Returns:
        A report: `print` it, `report.write_html(path)`, `report.price.step`, `report.exact`.

    Raises:
        ValueError: No such model or GPU, or a mesh that does not fit; says what to write.

    Examples:
        >>> report = plan("llama3-8b", "shard=64", gpu="h100", tokens_per_step=4e6, advice=False)
        >>> report.exact.world, report.price.step.lo < report.price.step.hi
        (64, True)
    """
    hardware = gpu if isinstance(gpu, Hardware) else load(gpu)
    per_node = hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
    given: dict[str, Any] = {
        "mesh": parse_mesh(mesh, engine, per_node),
        "active_params": active_params,
        "device": hardware.device,
        "weights": weights,
        "machine": hardware.machine,
        **options,
    }
    exact = count(model, **given)
    found = price(exact, hardware, tokens=tokens_per_step)
    report = Report(exact, hardware, found, (), adamw_step(exact, hardware))
    if not advice:
        return report
    return replace(report, advice=_advise(report, options, lambda changed: count(model, **{**given, **changed})))


@dataclass(frozen=True)
class Report:
    """The cost of Muon in a training job: `print` it, or write its page.

    Attributes:
        exact: Counts; nothing of it is estimated.
        hardware: The machine that it was priced on.
        price: Seconds and shares.
        advice: Changes that were planned and priced; empty if none were asked for.
        adamw: Seconds of AdamW's step on the same mesh.
    """

    exact: Exact
    hardware: Hardware
    price: Price
    advice: tuple[_Advice, ...]
    adamw: Time

    @property
    def overhead(self) -> tuple[float, float, float]:
        """Extra time of a training step over one with AdamW: least, middle, most; fractions. Zeros without tokens.

        Both optimizers' passes over memory are uncertain by the same factors, so ends are paired.
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
        """One HTML page that needs nothing from elsewhere; light or dark as the reader's system is."""
        from jinja2 import Environment  # which torch requires

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
        """Write the page of `html` to a file."""
        path.write_text(self.html(), encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 150) -> str:
        """The tables, in lines of so many characters."""
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


# ------------------------------------------------------------------------------------------------------------- advice

_WORTH = 0.97  # of the step as it is: smaller gains are within what a plan can tell
_Change = tuple[str, str, Mapping[str, Any]]  # in words, what the user writes for it, arguments of `count`


@dataclass(frozen=True, slots=True)
class _Advice:
    """One change that only the user can make, and what it would do: planned in earnest, and priced.

    Attributes:
        change: The change in words.
        write: What to write for it.
        step: Seconds with it.
        gain: Seconds of the middle case that it saves; below 0 it costs.
        memory: Bytes that the peak of the rank that needs most grows by (below 0: shrinks by).
        refused: Why it could not be planned, or "".
    """

    change: str
    write: str
    step: Time | None = None
    gain: float = 0.0
    memory: int = 0
    refused: str = ""


def _changes(exact: Exact, options: Mapping[str, Any]) -> list[_Change]:
    """Changes to try, the smallest first. `options`: of the plan as it is."""
    found: list[_Change] = []
    exchanged = any(c.exchanges for c in exact.classes)
    if exchanged:
        bound = {"bucket_bytes": 512 * 2**20}
        found.append(("memory for speed: buckets of 512 MiB", "bucket_bytes=512 * 2**20", bound))
        for num in (2, 4):
            split = f"matrices above the mean load split among {num} owners each, within rounding"
            found.append((split, f"split_k={num}", {"split_k": num}))
    mesh = exact.mesh
    inner, ranks = mesh.gpus_per_node // mesh.tp, mesh.dp * mesh.shard
    if mesh.engine == "fsdp2" and mesh.shard > inner >= 2 and mesh.shard % inner == 0:
        hsdp = replace(mesh, dp=ranks // inner, shard=inner)
        found.append(("HSDP: shards inside a node, replicas across", f'--mesh "{hsdp}"', {"mesh": hsdp}))
    if mesh.engine == "fsdp2" and min(mesh.dp, mesh.shard) > 1:
        flat = replace(mesh, dp=1, shard=ranks)
        found.append(("FSDP over all ranks, no replicas", f'--mesh "{flat}"', {"mesh": flat}))
    return found


def _advise(
    report: Report, options: Mapping[str, Any], replan: Callable[[Mapping[str, Any]], Exact]
) -> tuple[_Advice, ...]:
    """Plan and price changes that might help, each by itself.

    Args:
        report: The plan as it is.
        options: Its options of `Muon`.
        replan: Makes a plan with changed arguments.

    Returns:
        The effect of each, those that help most first.
    """
    before, found = report.price.step, []
    for what, write, changed in _changes(report.exact, options):
        try:
            other = replan(changed)
        except ValueError as wrong:
            found.append(_Advice(what, write, refused=str(wrong)))
            continue
        step = price(other, report.hardware).step
        gain = before.mid - step.mid if step.mid < _WORTH * before.mid else min(0.0, before.mid - step.mid)
        found.append(_Advice(what, write, step, gain, _peak(other) - _peak(report.exact)))
    return tuple(sorted(found, key=lambda a: (bool(a.refused), -a.gain)))


def _peak(exact: Exact) -> int:
    return exact.largest.stored.total + exact.largest.peak


# ------------------------------------------------------------------------------------------- tables, on paper or screen

_TIGHT = 0.9  # of a rank's memory, without activations
_KEY = (
    "collectives of a step: exchanges (all-to-all) + votes (messages between hosts), as in 14 + 1. kept: weights, "
    "gradients, state."
)
_MANY = 12  # rows of a table; the rest is counted


class _Section(NamedTuple):
    """A table with a title and remarks.

    Attributes:
        title: Title of the table.
        rows: Text.
        header: Names of columns; empty: a list of pairs.
        notes: Lines below the table.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _size(value: float) -> str:
    """Text of a number of bytes, in binary units and three digits."""
    return scaled((value,), 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _number(value: float) -> str:
    """A count in words that people read: 70.6 B."""
    return f"{value:,.0f}" if value < 1e6 else scaled((value / 1e6,), 1000, ("M", "B", "T", "P"))


def _operations(value: float) -> str:
    """Text of a number of floating point operations."""
    return scaled((value / 1e6,), 1000, ("MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _percent(value: float) -> str:
    """Text of a fraction in percent, with as many digits as it needs."""
    return f"{100 * value:.3g} %"


def _sections(report: Report) -> list[_Section]:
    """All tables of a report, in the order in which they are read."""
    found = [_summary(report), _answers(report), _ranks(report.exact), _parts(report)]
    return [*found, *([_advice(report)] if report.advice else []), _grounds(report)]


def _summary(report: Report) -> _Section:
    exact, mesh = report.exact, report.exact.mesh
    digests = [f"{digest} (ranks {ranks})" for ranks, digest in list(exact.digests.items())[:3]]
    more = len(exact.digests) - len(digests)
    params, in_matrices = _number(exact.muon_params + exact.adamw_params), _number(exact.muon_params)
    rows = {
        "model": f"{exact.model}: {params} parameters, {in_matrices} of them in matrices",
        "active": f"{_number(exact.tokens_flops / 6)} parameters: {exact.active}" if exact.active else "",
        "source": exact.source,
        "mesh": f"{mesh} ({mesh.engine}), {exact.world:,} ranks on {mesh.num_nodes:,} nodes of {mesh.gpus_per_node}",
        "hardware": report.hardware.title,
        "options": ", ".join(f"{key} {value}" for key, value in exact.options.items()),
        "digest": "; ".join([*digests, f"{more:,} more"] if more > 0 else digests),
    }
    return _Section("Plan", [row for row in rows.items() if row[1]])


def _answers(report: Report) -> _Section:
    price = report.price
    rows = {
        "optimizer step": f"{price.step}, most likely {seconds(price.step.mid)}",
        "why so wide": price.reason,
        "memory of a rank": _memory(report),
        "share of a training step": "",
        "over AdamW": f"AdamW's step: {report.adamw}",
        "straggler": _straggler(report),
    }
    if price.training is not None:
        low, middle, high = map(_percent, price.share)
        rows["share of a training step"] = (
            f"{low} .. {high}, most likely {middle}; forward and backward of {_number(price.tokens or 0)} tokens "
            f"take {price.training}"
        )
        low, middle, high = map(_percent, report.overhead)
        longer = f"a training step is {middle} longer than with AdamW ({low} .. {high})"
        rows["over AdamW"] = f"{longer}; {rows['over AdamW']}"
    return _Section("Answers", [row for row in rows.items() if row[1]])


def _memory(report: Report) -> str:
    largest, need, have = report.exact.largest, _peak(report.exact), report.hardware.middle("memory_bytes")
    fits = "does not fit" if need > have else "tight" if need > _TIGHT * have else "fits"
    peak = f"{_size(largest.peak)} more at the peak of a step" if largest.peak else "the peak of a step is not counted"
    kept = f"{_size(largest.stored.total)} between steps"
    return f"{fits}: {_size(need)} of {_size(have)}; {kept}, {peak}. Activations are not in it"


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
        f"{seconds(late[-1][1])}. Most matmul FLOPs: rank {busiest.example}, {busiest.flops / mean if mean else 1:.2f} "
        "of the mean" + (f"; {idle:,} of {exact.world:,} ranks orthogonalize nothing" if idle else "")
    )


def _ranks(exact: Exact) -> _Section:
    classes = sorted(exact.classes, key=lambda c: (-c.flops, c.example))
    rows = [
        (
            f"{c.example:,}" + (f" and {c.count - 1:,} like it" if c.count > 1 else ""),
            str(c.stage),
            str(c.orthogonalized),
            _operations(c.flops) if c.flops else "none",
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
    first = ("rank", "stage", "matrices", "matmul FLOPs", "kept", "peak")
    return _Section("Ranks", rows, (*first, "sent in node", "sent between", "collectives"), notes)


def _parts(report: Report) -> _Section:
    rows = [(name, str(time)) for name, time in report.price.parts.items() if time.hi > 0.0]
    return _Section(f"Where rank {report.price.rank}'s time goes", rows, ("part", "seconds"))


def _advice(report: Report) -> _Section:
    rows = [(a.change, a.write, _effect(a)) for a in report.advice]
    best = next((a for a in report.advice if a.gain > 0.0), None)
    note = "None of these makes the step shorter." if best is None else f"Smallest change that helps: {best.write}"
    return _Section("What would help", rows, ("change", "write", "step"), (note,))


def _effect(advice: _Advice) -> str:
    if advice.step is None:
        return f"cannot be: {advice.refused}"
    gain = f"{seconds(abs(advice.gain))} {'shorter' if advice.gain > 0 else 'longer'}"
    gain = gain if advice.gain else "no difference that a plan can tell"
    return f"{advice.step}: {gain}, memory {'+' if advice.memory >= 0 else ''}{_size(advice.memory)}"


def _grounds(report: Report) -> _Section:
    rows = [("computed", "by the planner that the job itself uses: bytes, collectives, matrices, operations, memory")]
    rows += [("extrapolated", text) for text in report.price.extrapolated[:_MANY]]
    rows += [("unverified", f"{name}: {source}") for name, source in report.price.unverified.items()]
    rows += [("note", report.hardware.notes)] if report.hardware.notes else []
    return _Section("Assumptions", rows)


# -------------------------------------------------------------------------------------------------- the page's picture

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
    """The lane of each event in the picture: 0 is what the rank computes, those below are what its links carry,
    side by side where several exchanges are in flight."""
    free: list[float] = []  # when each lane of the links is
    found = []
    for event in events:
        lane = 0
        if event.phase in ("gather", "scatter", "relay"):
            at = next((i for i, end in enumerate(free) if end <= event.start), len(free))
            free[at : at + 1] = [event.end]
            lane = at + 1
        found.append(lane)
    return found
