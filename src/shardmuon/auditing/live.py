"""One audit of a live step: what it reads before, gathers after, and how all ranks come to the same report.

[Note: order of collectives]
    Groups of ranks are taken small ones first, as everywhere (stepping/binding.py). In each: before the step one
    exchange of descriptions and one of what could be read; after it one gather for each sampled matrix and one exchange
    of verdicts. Then news are passed on until every rank that is connected through groups has heard them. What may go
    wrong on one rank alone is caught and becomes a finding, so that this rank still takes part in everything that the
    others wait for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shardmuon.auditing.dense import MatrixPieces, collect, fits, pieces_of, settle
from shardmuon.auditing.evidence import Evidence
from shardmuon.auditing.judge import Judged, judge
from shardmuon.auditing.naming import name_fault
from shardmuon.auditing.replicas import compare_prints, local_prints, sharers
from shardmuon.auditing.report import Finding, MatrixRow, Report, Route
from shardmuon.auditing.routing import idle_params, routes_of
from shardmuon.auditing.same import Arithmetic
from shardmuon.auditing.schedule import PATIENCE, Kept, Schedule, Watched
from shardmuon.engines import Description, engine_for, engine_of
from shardmuon.momentum.keeper import BUFFER
from shardmuon.momentum.rounding import Stream
from shardmuon.momentum.update import lr_scale
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.choice import Choice
from shardmuon.planning.layout import ParamLayout, Shape
from shardmuon.ranks.council import num_largest_of
from shardmuon.ranks.exchange import my_rank, share_objects
from shardmuon.stepping.binding import Binding
from shardmuon.stepping.replicas import fingerprint
from shardmuon.stepping.settings import Settings, replicas_of, settings_of, takes_part, view_of
from shardmuon.stepping.work import ParamWork

if TYPE_CHECKING:
    from shardmuon.core import Core

T = TypeVar("T")
Ranks = tuple[int, ...]


def stored_momentum(optimizer: Core, param: Tensor) -> Tensor:  # as the parameter's storage
    """What is stored of a parameter's momentum on this rank; zeros before its first step."""
    engine = engine_of(param)
    buffer = optimizer.state.get(param, {}).get(BUFFER)
    return torch.zeros_like(engine.storage(param)) if buffer is None else engine.storage(buffer)


def read_momentum(optimizer: Core, param: Tensor, layout: ParamLayout) -> Tensor:  # as the parameter's storage
    """A parameter's momentum on this rank, decoded; zeros before its first step."""
    engine = engine_of(param)
    values = optimizer.keeper.values(engine, layout, optimizer.state.get(param, {}))
    return torch.zeros_like(engine.storage(param)) if values is None else values


def read_gradient(param: Tensor, work: ParamWork | None) -> Tensor | None:
    """A parameter's gradient on this rank. One that is placed otherwise was redistributed for the step: that one."""
    engine = engine_of(param)
    if param.grad is None:
        return None
    if engine.is_aligned(param.grad, param):
        return engine.storage(param.grad)
    return None if work is None else work.grad


def arithmetic_of(optimizer: Core, param: Tensor, how: str, route: str, grad: Tensor | None) -> Arithmetic:
    """How a matrix of a parameter is orthogonalized: `how` and `route` are the plan's."""
    kernel, choice = optimizer.kernel(), Choice.of(how)
    device = kernel.device or param.device
    stored = stored_momentum(optimizer, param).dtype
    computed = torch.float32 if optimizer.keeper.widens else stored
    products = choice.dtype or default_dtype(choice.method, device)
    return Arithmetic(
        choice.method,
        products,
        kernel.wire_of(how),
        param.dtype,
        computed,
        stored,
        param.dtype if grad is None else grad.dtype,
        choice.kernel,
        kernel.device,
        route == "gram",
        optimizer.keeper.rounds_weights,
    )


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank says of a sampled parameter before the step."""

    trouble: str | None
    shape: Shape = ()
    fits: tuple[bool, ...] = ()
    has_grad: bool = False
    wide: bool = False  # whether anything of it is fp64
    extent: tuple[int, ...] | None = None


@dataclass
class _Sample:
    """A sampled matrix, read before the step."""

    name: str
    order: tuple[int, int]
    param: Tensor
    settings: Settings
    arithmetic: Arithmetic
    pieces: MatrixPieces
    shapes: tuple[Shape, ...]
    owners: Ranks
    route: str
    dtype: torch.dtype  # in which it is gathered
    before: list[Tensor] = field(default_factory=list)
    target: int = 0


@dataclass
class _News:
    """What is passed on between ranks."""

    findings: list[Finding] = field(default_factory=list)
    rows: list[MatrixRow] = field(default_factory=list)
    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    def merge(self, others: Sequence[_News]) -> None:
        for other in others:
            self.findings += [f for f in other.findings if f not in self.findings]
            self.rows += [r for r in other.rows if (r.name, r.order) not in {(o.name, o.order) for o in self.rows}]
            self.runs |= other.runs
            self.compared |= other.compared


def _share(value: T, ranks: Ranks) -> list[T]:
    return share_objects(value, ranks) if len(ranks) > 1 else [value]


class StepAudit:
    """Made before a step, finished after it. Collective."""

    def __init__(
        self, optimizer: Core, binding: Binding, work: Mapping[int, ParamWork], schedule: Schedule, samples: int
    ) -> None:
        self._optimizer, self._binding, self._work, self._schedule = optimizer, binding, work, schedule
        self._samples = samples
        self._rank = my_rank()
        self._news = _News()
        self._routes: list[Route] = []
        self._skipped: list[MatrixRow] = []
        self._ran = optimizer.traffic.orthogonalized
        self._groups = _groups_of(binding)
        self._current = self._caught("its parameters", self._current_params) or []
        self._news.findings += self._caught("the momentum kept from the last audit", self._changed_momentum) or []
        self._news.findings += self._caught("the model's own weights", self._unlike_model) or []
        self._taken: dict[Ranks, list[_Sample]] = {}
        if samples:
            self._news.findings += self._caught("the routing", self._check_routing) or []
            for ranks, members in self._groups.items():
                self._taken[ranks] = self._take(ranks, members)

    # ------------------------------------------------------------------------------------------- before the step

    def _caught(self, what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Exception as error:  # the other ranks wait for this one
            self._news.findings.append(_failed(f"rank {self._rank}", what, error))
            return None

    def _current_params(self) -> list[tuple[Tensor, Mapping[str, Any]]]:
        """The Muon parameters that take part, as the groups hold them now; says which are not the plan's."""
        groups = [g for g in self._optimizer.param_groups if g["use_muon"]]
        found: list[tuple[Tensor, Mapping[str, Any]]] = [(p, g) for g in groups for p in g["params"] if takes_part(p)]
        candidates = self._binding.candidates
        if len(found) != len(candidates):
            text = f"the groups hold {len(found)} parameters with a gradient, the plan {len(candidates)}"
            self._news.findings.append(_stale(f"rank {self._rank}", text))
            return [(c.param, {}) for c in candidates]
        for (p, group), c, signature in zip(found, candidates, self._binding.signatures, strict=True):
            if p is not c.param:
                text = "the group holds another tensor than the one that was planned for"
                self._news.findings.append(_stale(c.name, text))
            elif engine_for(p, group).signature(p) != signature:
                text = "its shape, mesh, placements or storage are no longer those that were planned for"
                self._news.findings.append(_stale(c.name, text))
        return found

    def _changed_momentum(self) -> list[Finding]:
        kept = self._schedule.kept
        if kept.step != self._schedule.num_steps - 1 or kept.state is not self._optimizer.state:
            return []
        return [
            Finding(
                "momentum_changed_outside",
                name,
                f"on rank {self._rank} the momentum is not what step {kept.step} left",
                "no change between steps",
                "Nothing but step() may write to optimizer.state; look for code that loads, casts or averages it",
            )
            for name, param, print_ in kept.watched
            if fingerprint(stored_momentum(self._optimizer, param)) != print_
        ]

    def _unlike_model(self) -> list[Finding]:
        """Where the step is on copies of the model's weights: which are not what the model has."""
        return [
            Finding(
                "weights_elsewhere",
                name,
                f"on rank {self._rank} what is stepped in its place are not its weights",
                "the model's own, rounded to its dtype",
                "The copy was written to, or the framework keeps its partitions in another order than it says",
            )
            for name in self._optimizer.unlike_model()
        ]

    def _check_routing(self) -> list[Finding]:
        asked = self._schedule.asked
        rows = self._optimizer.routing if asked is None or asked.rows is None else asked.rows
        groups = self._optimizer.param_groups
        self._routes, findings = routes_of(groups, rows)
        patience = PATIENCE if asked is None else asked.patience
        return findings + idle_params(groups, self._schedule.kept.idle, patience)

    def _take(self, ranks: Ranks, members: Sequence[int]) -> list[_Sample]:
        """Choose this group's matrices, exchange descriptions, and copy what the step is about to change."""
        items = [
            (index, matrix)
            for index in members
            for matrix in range(len(self._binding.candidates[index].description.claims[0].layout.view.matrices))
        ]
        chosen = choose(len(items), self._samples, self._schedule.num_audits)
        picked = [items[i] for i in chosen]
        described: dict[int, Description] = {}
        told = []
        for index, _ in picked:
            try:
                told.append(self._tell(index, described))
            except Exception as error:  # reported by every rank of the group
                told.append(_Told(f"{type(error).__name__}: {error}"))
        everyone = _share(told, ranks)
        read: list[_Sample | None] = []
        for at, (index, matrix) in enumerate(picked):
            heard = [theirs[at] for theirs in everyone]
            sample = self._caught(
                self._binding.candidates[index].name,
                lambda i=index, m=matrix, h=heard: self._read(i, m, h, described),  # type: ignore[misc]
            )
            read.append(sample)
        there = _share([sample is not None for sample in read], ranks)  # what one could not read, none gathers
        taken = [s for s, *on in zip(read, *there, strict=True) if s is not None and all(on)]
        shapes = sorted({(s.pieces.rows, s.pieces.cols) for s in taken})
        for sample in taken:  # matrices of one shape meet on one rank, which can tell if they were swapped
            where = shapes.index((sample.pieces.rows, sample.pieces.cols)) + self._schedule.num_audits
            sample.target = ranks[where % len(ranks)]
        return taken

    def _tell(self, index: int, described: dict[int, Description]) -> _Told:
        candidate = self._binding.candidates[index]
        param, group = self._current[index]
        engine = engine_for(param, group)
        about = engine.describe(param, view_of(candidate.name, param, group), replicas_of(group))
        described[index] = about
        view = candidate.description.claims[0].layout.view
        if about.ranks != candidate.description.ranks or about.claims[0].layout.view != view:
            return _Told(f"it now is {about.text} over ranks {about.ranks}, planned was {candidate.description.text}")
        grad = read_gradient(param, self._work.get(index))
        wide = torch.float64 in (
            param.dtype,
            stored_momentum(self._optimizer, param).dtype,
            grad.dtype if grad is not None else None,
        )
        return _Told(None, tuple(engine.storage(param).shape), fits(about), grad is not None, wide, about.extent)

    def _read(
        self, index: int, matrix: int, heard: Sequence[_Told], described: Mapping[int, Description]
    ) -> _Sample | None:
        """A sample with what this rank holds of it before the step. The same on all ranks but for the content."""
        plan, candidate = self._binding.plan, self._binding.candidates[index]
        trouble = next((theirs.trouble for theirs in heard if theirs.trouble is not None), None)
        if trouble is not None:
            self._news.findings.append(_stale(candidate.name, trouble))
            return None
        layout = settle(described[index], [t.shape for t in heard], [t.fits for t in heard], [t.extent for t in heard])
        if layout.digest != plan.specs[index].layout.digest:
            self._news.findings.append(_stale(candidate.name, "its pieces lie on other ranks than the plan says"))
        pieces = pieces_of(layout, matrix)
        param, group = self._current[index]
        item = next(i for i in plan.items if (i.param, i.matrix) == (index, matrix))
        count = len(layout.view.matrices)
        name = candidate.name if count == 1 else f"{candidate.name}[{matrix}]"
        if len(layout.ranks) == 1 and len(self._groups) > 1:
            name += f" (rank {self._rank})"  # other ranks have one of that name, too
        grad = read_gradient(param, self._work.get(index))
        arithmetic = arithmetic_of(self._optimizer, param, item.how, item.route, grad)
        have = [t.has_grad for t, rank in zip(heard, layout.ranks, strict=True) if rank in pieces.spots]
        if not all(have):
            self._without_gradient(name, (index, matrix), pieces, str(arithmetic), have)
            return None
        sample = _Sample(
            name,
            (index, matrix),
            param,
            settings_of(group),
            arithmetic,
            pieces,
            tuple(t.shape for t in heard),
            item.owners,
            item.route,
            torch.float64 if any(t.wide for t in heard) else torch.float32,
        )
        sample.before = self._caught(name, lambda: self._read_before(sample)) or self._unknown(sample, 3)
        return sample

    def _read_before(self, sample: _Sample) -> list[Tensor]:
        weight = engine_of(sample.param).storage(sample.param)
        grad = read_gradient(sample.param, self._work.get(sample.order[0]))
        return [self._part(sample, value) for value in (weight, self._momentum_of(sample), grad)]

    def _momentum_of(self, sample: _Sample) -> Tensor:
        return read_momentum(self._optimizer, sample.param, self._binding.plan.specs[sample.order[0]].layout)

    def _unknown(self, sample: _Sample, count: int) -> list[Tensor]:
        """What a rank sends that could not read its part: the others wait for as many elements."""
        size = sample.pieces.numel(self._rank)
        return [torch.full((size,), math.nan, dtype=sample.dtype, device=sample.param.device) for _ in range(count)]

    def _part(self, sample: _Sample, value: Tensor | None) -> Tensor:
        """What this rank sends of one quantity; a copy."""
        if value is None:  # a rank that sends nothing of it
            return torch.empty(0, dtype=sample.dtype, device=sample.param.device)
        return sample.pieces.select(value.to(sample.param.device), self._rank).to(sample.dtype)

    def _without_gradient(
        self, name: str, order: tuple[int, int], pieces: MatrixPieces, arithmetic: str, have: Sequence[bool]
    ) -> None:
        if not any(have):
            row = MatrixRow(name, order, pieces.rows, pieces.cols, (), "", arithmetic, "no gradient")
            if self._rank == min(pieces.ranks):
                self._skipped.append(row)
            return
        self._news.findings.append(
            Finding(
                "gradient_missing",
                name,
                f"only {sum(have)} of the {len(have)} ranks that hold pieces of it have a gradient",
                "all or none",
                "Set the missing gradients to zeros",
            )
        )

    # -------------------------------------------------------------------------------------------- after the step

    def finish(self) -> Report:
        """Gather, judge and share. The same report on every rank that is connected with this one."""
        self._news.rows += self._skipped
        self._count_runs()
        rounds: dict[Ranks, int] = {}
        for ranks, members in self._groups.items():
            judged = self._judge_group(ranks)
            self._news.rows += [j.row for j in judged]
            self._news.findings += [f for j in judged for f in j.findings]
            prints = self._caught("replicas", lambda r=ranks, m=members: self._prints(r, m)) or {}  # type: ignore[misc]
            payload = (self._news, prints, num_largest_of([r for r in self._groups if len(r) > 1]))
            everyone = _share(payload, ranks)
            self._news.merge([theirs[0] for theirs in everyone])
            rounds[ranks] = max(theirs[2] for theirs in everyone)
            found, compared = compare_prints([theirs[1] for theirs in everyone], ranks)
            self._news.merge([_News(found, [], {}, compared)])
        for number in range(1, max(rounds.values(), default=0)):
            for ranks in self._groups:
                if len(ranks) > 1 and number < rounds[ranks]:
                    self._news.merge(_share(self._news, ranks))
        self._remember()
        return self._report()

    def _judge_group(self, ranks: Ranks) -> list[Judged]:
        judged: list[Judged] = []
        for sample in self._taken.get(ranks, ()):
            after = self._caught(sample.name, lambda s=sample: self._read_after(s))  # type: ignore[misc]
            parts = [*sample.before, *(after or self._unknown(sample, 2))]
            tensors = collect(sample.pieces, parts, sample.target)
            if tensors:
                verdict = self._caught(sample.name, lambda s=sample, t=tensors: judge(self._evidence(s, t)))  # type: ignore[misc]
                judged += [] if verdict is None else [verdict]
        for j in judged:
            if j.differs:
                others = [o for o in judged if (o.row.rows, o.row.cols) == (j.row.rows, j.row.cols)]
                finding = self._caught(j.row.name, lambda j=j, o=others: name_fault(j, o))  # type: ignore[misc]
                j.findings += [] if finding is None else [finding]
        return judged

    def _evidence(self, sample: _Sample, tensors: Sequence[Tensor]) -> Evidence:
        index, matrix = sample.order
        stream = self._work[index].rounding if index in self._work else None
        return _evidence(sample, tensors, None if stream is None else (stream, matrix))

    def _read_after(self, sample: _Sample) -> list[Tensor]:
        momentum = self._momentum_of(sample)
        after = [self._part(sample, engine_of(sample.param).storage(sample.param)), self._part(sample, momentum)]
        grad = read_gradient(sample.param, self._work.get(sample.order[0]))
        if grad is not None and fingerprint(self._part(sample, grad)) != fingerprint(sample.before[2]):
            self._news.findings.append(
                Finding(
                    "gradient_written",
                    sample.name,
                    f"on rank {self._rank} the step changed the gradient",
                    "no change",
                    "Neither the step nor the orthogonalizer may write to its input",
                )
            )
        return after

    def _count_runs(self) -> None:
        found = self._optimizer.traffic.orthogonalized - self._ran
        planned = sum(i.param in self._work and self._rank in i.owners for i in self._binding.plan.items)
        self._news.runs[self._rank] = (found, planned)
        if found != planned:
            self._news.findings.append(
                Finding(
                    "orthogonalized_count",
                    f"rank {self._rank}",
                    f"{found} matrices went through the orthogonalizer in the step",
                    f"{planned}, each matrix of the plan once",
                    "A step must run once: after gradient accumulation, not in it",
                )
            )

    def _prints(self, ranks: Ranks, members: Sequence[int]) -> Any:
        """Fingerprints of everything in this group that has replicas."""
        if not self._samples or len(ranks) == 1:
            return {}
        tensors: dict[str, tuple[ParamLayout, dict[str, Tensor | None]]] = {}
        for index in members:
            candidate, (param, _) = self._binding.candidates[index], self._current[index]
            layout = candidate.description.claims[0].layout
            if candidate.description.extent is not None:  # its claims name no pieces
                layout = self._binding.plan.specs[index].layout
            tensors[candidate.name] = (
                layout,
                {
                    "weights": engine_of(param).storage(param),
                    "momentum": stored_momentum(self._optimizer, param),
                    "gradient": read_gradient(param, self._work.get(index)),
                },
            )
        tensors |= sharers(self._optimizer, ranks)
        return local_prints(tensors, self._rank)

    def _remember(self) -> None:
        idle = self._schedule.kept.idle
        watched: dict[int, Watched] = {}
        for sample in (s for samples in self._taken.values() for s in samples):
            print_ = fingerprint(stored_momentum(self._optimizer, sample.param))
            name = self._binding.candidates[sample.order[0]].name
            watched.setdefault(sample.order[0], Watched(name, sample.param, print_))
        step = self._schedule.num_steps if watched else -1
        self._schedule.kept = Kept(tuple(watched.values()), self._optimizer.state, step, idle)

    def _report(self) -> Report:
        news = self._news
        return Report(
            self._schedule.num_steps,
            tuple(sorted(news.findings, key=lambda f: (f.severity, f.where, f.name, f.found))),
            tuple(sorted(news.rows, key=lambda r: (r.order, r.name))),
            dict(sorted(news.runs.items())),
            len(news.compared),
            tuple(self._routes),
            str(self._binding.plan) if self._samples else "",
        )


def choose(count: int, samples: int, number: int) -> list[int]:
    """Which of `count` matrices audit `number` takes: spread over the layers, others each time, all of them in turn."""
    if not count:
        return []
    stride = max(1, round(0.618 * count))
    while math.gcd(stride, count) > 1:
        stride += 1
    return [(number * samples + i) * stride % count for i in range(min(samples, count))]


def _groups_of(binding: Binding) -> dict[Ranks, list[int]]:
    """Group of ranks -> this rank's Muon parameters that it shares, small groups first."""
    groups: dict[Ranks, list[int]] = {}
    for index, candidate in enumerate(binding.candidates):
        groups.setdefault(candidate.description.ranks, []).append(index)
    return {ranks: groups[ranks] for ranks in sorted(groups, key=lambda r: (len(r), r))}


def _evidence(sample: _Sample, tensors: Sequence[Tensor], rounding: tuple[Stream, int] | None) -> Evidence:
    before, buffer, grad, after, buffer_after = (t.to(torch.float64) for t in tensors)
    settings, pieces = sample.settings, sample.pieces
    shards = [(b[0].stop - b[0].start, b[1].stop - b[1].start) for b in pieces.blocks()]
    shards += [(s[0], torch.Size(s[1:]).numel()) for s in sample.shapes if len(s) > 1 and 0 not in s]
    scales = {}
    for shape in dict.fromkeys(shards):
        if shape != (pieces.rows, pieces.cols):
            try:
                scales[shape] = lr_scale(settings.adjust_lr_fn, *shape, settings.extra_scale_factor)
            except Exception:  # the caller's own scale need not know shapes of shards
                continue
    return Evidence(
        sample.name,
        sample.order,
        sample.owners,
        sample.route,
        sample.arithmetic,
        settings,
        lr_scale(settings.adjust_lr_fn, pieces.rows, pieces.cols, settings.extra_scale_factor),
        scales,
        pieces,
        before,
        buffer,
        grad,
        after,
        buffer_after,
        rounding,
    )


def _stale(where: str, text: str) -> Finding:
    return Finding(
        "stale_plan",
        where,
        text,
        "the parameters that were planned for, as they were then",
        "Call optimizer.prepare() on every rank after replacing or resharding parameters",
    )


def _failed(where: str, what: str, error: Exception) -> Finding:
    return Finding(
        "audit_failed",
        where,
        f"{what} could not be checked: {type(error).__name__}: {error}",
        "a check",
        "Please report it with this text",
    )
