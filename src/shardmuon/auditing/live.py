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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.auditing.dense import MatrixPieces, collect, fits, layout_of_storage, pieces_of
from shardmuon.auditing.evidence import Evidence
from shardmuon.auditing.judge import Judged, judge
from shardmuon.auditing.naming import name_fault
from shardmuon.auditing.news import News, shared
from shardmuon.auditing.replicas import local_prints, sharers
from shardmuon.auditing.report import AuditReport, Finding, MatrixRow, RoutedParam
from shardmuon.auditing.routing import idle_params, routes_of
from shardmuon.auditing.samples import (
    Held,
    Sample,
    arithmetic_of,
    choose,
    evidence_of,
    read_gradient,
    read_kept,
    read_momentum,
    stored_momentum,
)
from shardmuon.auditing.schedule import PATIENCE, AuditSchedule, Kept, Watched
from shardmuon.auditing.variants import unchecked
from shardmuon.comm.groups import my_rank
from shardmuon.engines import Description, engine_for, engine_of
from shardmuon.planning.layout import ParamLayout
from shardmuon.planning.views import Ranks
from shardmuon.stepping.binding import Binding
from shardmuon.stepping.replicas import fingerprint
from shardmuon.stepping.settings import replicas_of, settings_of, takes_part, view_of
from shardmuon.stepping.work import ParamWork
from shardmuon.variants import keeping

if TYPE_CHECKING:
    from shardmuon.core import Core


class StepAudit:
    """Made before a step, finished after it. Collective."""

    def __init__(
        self, optimizer: Core, binding: Binding, work: Mapping[int, ParamWork], schedule: AuditSchedule, samples: int
    ) -> None:
        self._optimizer, self._binding, self._work, self._schedule = optimizer, binding, work, schedule
        self._samples = samples
        self._rank = my_rank()
        self._news = News()
        self._routes: list[RoutedParam] = []
        self._skipped: list[MatrixRow] = []
        self._ran = optimizer.traffic.orthogonalized
        self._groups = _groups_of(binding)
        self._current = self._news.caught("its parameters", self._current_params) or []
        self._news.findings += self._news.caught("the momentum kept from the last audit", self._changed_momentum) or []
        self._news.findings += self._news.caught("the model's own weights", self._unlike_model) or []
        self._taken: dict[Ranks, list[Sample]] = {}
        if samples:
            self._news.findings += self._news.caught("the routing", self._check_routing) or []
            for ranks, members in self._groups.items():
                self._taken[ranks] = self._take(ranks, members)

    # ------------------------------------------------------------------------------------------- before the step

    def _current_params(self) -> list[tuple[Tensor, Mapping[str, Any]]]:
        """The Muon parameters that take part, as the groups hold them now; says which are not the plan's."""
        groups = [g for g in self._optimizer.param_groups if g["use_muon"]]
        found: list[tuple[Tensor, Mapping[str, Any]]] = [(p, g) for g in groups for p in g["params"] if takes_part(p)]
        candidates = self._binding.candidates
        if len(found) != len(candidates):
            text = f"the groups hold {len(found)} parameters with a gradient, the plan {len(candidates)}"
            self._news.stale(f"rank {self._rank}", text)
            return [(c.param, {}) for c in candidates]
        for (p, group), c, signature in zip(found, candidates, self._binding.signatures, strict=True):
            if p is not c.param:
                text = "the group holds another tensor than the one that was planned for"
                self._news.stale(c.name, text)
            elif engine_for(p, group).signature(p) != signature:
                text = "its shape, mesh, placements or storage are no longer those that were planned for"
                self._news.stale(c.name, text)
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

    def _take(self, ranks: Ranks, members: Sequence[int]) -> list[Sample]:
        """Choose this group's matrices, exchange descriptions, and copy what the step is about to change."""
        items = [
            (index, matrix)
            for index in members
            for matrix in range(len(self._binding.candidates[index].description.claims[0].layout.view.matrices))
        ]
        chosen = choose(len(items), self._samples, self._schedule.num_audits)
        picked = [items[i] for i in chosen]
        described: dict[int, Description] = {}
        mine = []
        for index, _ in picked:
            try:
                mine.append(self._describe(index, described))
            except Exception as error:  # reported by every rank of the group
                mine.append(Held(f"{type(error).__name__}: {error}"))
        everyone = shared(mine, ranks)
        read: list[Sample | None] = []
        for at, (index, matrix) in enumerate(picked):
            heard = [theirs[at] for theirs in everyone]
            sample = self._news.caught(
                self._binding.candidates[index].name,
                lambda i=index, m=matrix, h=heard: self._read(i, m, h, described),  # type: ignore[misc]
            )
            read.append(sample)
        there = shared([sample is not None for sample in read], ranks)  # what one could not read, none gathers
        taken = [s for s, *on in zip(read, *there, strict=True) if s is not None and all(on)]
        shapes = sorted({(s.pieces.rows, s.pieces.cols) for s in taken})
        for sample in taken:  # matrices of one shape meet on one rank, which can tell if they were swapped
            where = shapes.index((sample.pieces.rows, sample.pieces.cols)) + self._schedule.num_audits
            sample.target = ranks[where % len(ranks)]
            index, matrix = sample.order
            for kept in self._binding.plan.specs[index].kept:  # it must be there to judge by
                if sample.target not in kept.keepers(matrix):
                    sample.target = kept.keepers(matrix)[0]
        return taken

    def _describe(self, index: int, described: dict[int, Description]) -> Held:
        candidate = self._binding.candidates[index]
        param, group = self._current[index]
        engine = engine_for(param, group)
        about = engine.describe(param, view_of(candidate.name, param, group), replicas_of(group))
        described[index] = about
        view = candidate.description.claims[0].layout.view
        if about.ranks != candidate.description.ranks or about.claims[0].layout.view != view:
            return Held(f"it now is {about.text} over ranks {about.ranks}, planned was {candidate.description.text}")
        grad = read_gradient(param, self._work.get(index))
        wide = torch.float64 in (
            param.dtype,
            stored_momentum(self._optimizer, param).dtype,
            grad.dtype if grad is not None else None,
        )
        return Held(None, tuple(engine.storage(param).shape), fits(about), grad is not None, wide, about.extent)

    def _read(
        self, index: int, matrix: int, heard: Sequence[Held], described: Mapping[int, Description]
    ) -> Sample | None:
        """A sample with what this rank holds of it before the step. The same on all ranks but for the content."""
        plan, candidate = self._binding.plan, self._binding.candidates[index]
        trouble = next((theirs.trouble for theirs in heard if theirs.trouble is not None), None)
        if trouble is not None:
            self._news.stale(candidate.name, trouble)
            return None
        layout = layout_of_storage(
            described[index], [t.shape for t in heard], [t.fits for t in heard], [t.extent for t in heard]
        )
        if layout.digest != plan.specs[index].layout.digest:
            self._news.stale(candidate.name, "its pieces lie on other ranks than the plan says")
        pieces = pieces_of(layout, matrix)
        param, group = self._current[index]
        item = next(i for i in plan.items if (i.param, i.matrix) == (index, matrix))
        count = len(layout.view.matrices)
        name = candidate.name if count == 1 else f"{candidate.name}[{matrix}]"
        if len(layout.ranks) == 1 and len(self._groups) > 1:
            name += f" (rank {self._rank})"  # other ranks have one of that name, too
        grad = read_gradient(param, self._work.get(index))
        arithmetic = arithmetic_of(self._optimizer, param, item.how, item.route, grad)
        without = unchecked(settings_of(group).stages)
        if without:
            self._not_checked(name, (index, matrix), pieces, str(arithmetic), without)
            return None
        have = [t.has_grad for t, rank in zip(heard, layout.ranks, strict=True) if rank in pieces.spots]
        if not all(have):
            self._without_gradient(name, (index, matrix), pieces, str(arithmetic), have)
            return None
        sample = Sample(
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
        sample.before = self._news.caught(name, lambda: self._read_before(sample)) or self._unknown(sample, 3)
        sample.kept = self._news.caught(name, lambda: self._kept_of(sample)) or {}
        return sample

    def _read_before(self, sample: Sample) -> list[Tensor]:
        weight = engine_of(sample.param).storage(sample.param)
        grad = read_gradient(sample.param, self._work.get(sample.order[0]))
        return [self._part(sample, value) for value in (weight, self._momentum_of(sample), grad)]

    def _momentum_of(self, sample: Sample) -> Tensor:
        return read_momentum(self._optimizer, sample.param)

    def _kept_of(self, sample: Sample) -> dict[str, Tensor]:
        index, matrix = sample.order
        of_plan = self._binding.plan.specs[index].kept
        return read_kept(self._optimizer, sample.param, of_plan, sample.settings.stages, matrix)

    def _unknown(self, sample: Sample, count: int) -> list[Tensor]:
        """What a rank sends that could not read its part: the others wait for as many elements."""
        size = sample.pieces.numel(self._rank)
        return [torch.full((size,), math.nan, dtype=sample.dtype, device=sample.param.device) for _ in range(count)]

    def _part(self, sample: Sample, value: Tensor | None) -> Tensor:
        """What this rank sends of one quantity; a copy."""
        if value is None:  # a rank that sends nothing of it
            return torch.empty(0, dtype=sample.dtype, device=sample.param.device)
        return sample.pieces.select(value.to(sample.param.device), self._rank).to(sample.dtype)

    def _not_checked(
        self, name: str, order: tuple[int, int], pieces: MatrixPieces, arithmetic: str, stage: str
    ) -> None:
        row = MatrixRow(name, order, pieces.rows, pieces.cols, (), "", arithmetic, f"not checked: {stage}")
        if self._rank == min(pieces.ranks):
            self._skipped.append(row)

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

    def finish(self) -> AuditReport:
        """Gather, judge and share. The same report on every rank that is connected with this one."""
        self._news.rows += self._skipped
        self._count_runs()
        rounds: dict[Ranks, int] = {}
        for ranks, members in self._groups.items():
            judged = self._judge_group(ranks)
            self._news.rows += [j.row for j in judged]
            self._news.findings += [f for j in judged for f in j.findings]
            prints = self._news.caught("replicas", lambda r=ranks, m=members: self._prints(r, m)) or {}  # type: ignore[misc]
            rounds[ranks] = self._news.compare(prints, ranks, list(self._groups))
        self._news.pass_on(rounds)
        self._remember()
        plan = str(self._binding.plan) if self._samples else ""
        logits = () if self._schedule.logits is None else self._schedule.logits()
        return self._news.report(self._schedule.num_steps, self._routes, plan, logits)

    def _judge_group(self, ranks: Ranks) -> list[Judged]:
        judged: list[Judged] = []
        for sample in self._taken.get(ranks, ()):
            after = self._news.caught(sample.name, lambda s=sample: self._read_after(s))  # type: ignore[misc]
            parts = [*sample.before, *(after or self._unknown(sample, 2))]
            tensors = collect(sample.pieces, parts, sample.target)
            if tensors:
                verdict = self._news.caught(sample.name, lambda s=sample, t=tensors: judge(self._evidence(s, t)))  # type: ignore[misc]
                judged += [] if verdict is None else [verdict]
        for j in judged:
            if j.differs:
                others = [o for o in judged if (o.row.rows, o.row.cols) == (j.row.rows, j.row.cols)]
                finding = self._news.caught(j.row.name, lambda j=j, o=others: name_fault(j, o))  # type: ignore[misc]
                j.findings += [] if finding is None else [finding]
        return judged

    def _evidence(self, sample: Sample, tensors: Sequence[Tensor]) -> Evidence:
        index, matrix = sample.order
        work = self._work.get(index)
        stream, fresh = (None, ()) if work is None else (work.rounding, work.fresh)
        rounding = None if stream is None else (stream, matrix)
        return evidence_of(sample, tensors, rounding, self._kept_of(sample), fresh)

    def _read_after(self, sample: Sample) -> list[Tensor]:
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
            stages = keeping(self._binding.candidates[index].stages)
            for stage, kept in zip(stages, self._binding.plan.specs[index].kept, strict=True):
                value = self._optimizer.state.get(param, {}).get(stage.key)
                stored = None if value is None else engine_of(param).storage(value)
                tensors[f"{candidate.name}, {stage.key}"] = (kept.layout, {"state": stored})
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


def _groups_of(binding: Binding) -> dict[Ranks, list[int]]:
    """Group of ranks -> this rank's Muon parameters that it shares, small groups first."""
    groups: dict[Ranks, list[int]] = {}
    for index, candidate in enumerate(binding.candidates):
        groups.setdefault(candidate.description.ranks, []).append(index)
    return {ranks: groups[ranks] for ranks in sorted(groups, key=lambda r: (len(r), r))}
