"""One audit of a live step: what it reads before, gathers after, and how all ranks come to the same report.

[Note: order of collectives]
    Sets of ranks are taken small ones first, as everywhere. In each: before the step one gather of descriptions and one
    of what could be read; after it one exchange for each sampled matrix and one gather of fingerprints. Then all ranks
    of the component tell each other what they have found. What may go wrong on one rank alone is caught and becomes a
    finding, so that this rank still takes part in everything that the others wait for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.auditing.anew import Describer, Description
from shardmuon.auditing.dense import collect, sent_by
from shardmuon.auditing.evidence import Evidence
from shardmuon.auditing.judge import Judged, judge
from shardmuon.auditing.naming import name_fault
from shardmuon.auditing.news import News
from shardmuon.auditing.replicas import Prints, Replicated, local_prints, said_of_adamws, sharers
from shardmuon.auditing.report import AuditReport, Finding, MatrixRow
from shardmuon.auditing.routing import idle_params, misrouted
from shardmuon.auditing.samples import (
    Sample,
    SampledParam,
    arithmetic_of,
    choose,
    keepers_of,
    read_gradient,
    read_kept,
    read_momentum,
    stored_momentum,
)
from shardmuon.auditing.schedule import PATIENCE, AuditNotes, AuditSchedule, Watched
from shardmuon.auditing.stages import unchecked
from shardmuon.comm.groups import Ranks, my_rank
from shardmuon.comm.vote import gather
from shardmuon.host import Core
from shardmuon.layout.engines import engine_for, engine_of
from shardmuon.layout.engines.base import NONE
from shardmuon.layout.table import ParamLayout
from shardmuon.options import view_options
from shardmuon.step.binding import Binding, fingerprint, takes_part
from shardmuon.step.options import settings_of
from shardmuon.step.validate import Proposal
from shardmuon.variants import keeping


class StepAudit:
    """An audit of one step: made before it, finished after it. Collective among the ranks of the component."""

    def __init__(
        self, optimizer: Core, binding: Binding, proposal: Proposal, schedule: AuditSchedule, samples: int
    ) -> None:
        self._optimizer, self._binding, self._proposal, self._schedule = optimizer, binding, proposal, schedule
        self._samples = samples
        self._rank = my_rank()
        self._news = News()
        self._describer = Describer()
        self._skipped: list[MatrixRow] = []
        self._ran = optimizer.traffic.orthogonalized
        self._current = self._news.caught("its parameters", self._current_params) or []
        self._news.findings += self._news.caught("the momentum kept from the last audit", self._changed_momentum) or []
        self._news.findings += self._news.caught("the model's own weights", self._unlike_model) or []
        self._taken: dict[Ranks, list[Sample]] = {}
        self._adamws: dict[Ranks, list[dict[str, Description]]] = {}  # of each set, what each of its ranks says of them
        if samples:
            self._news.findings += self._news.caught("the routing", self._check_routing) or []
            for ranks, members in binding.table.sets.items():
                self._taken[ranks] = self._take(ranks, members)

    # ------------------------------------------------------------------------------------------- before the step

    def _current_params(self) -> list[tuple[Tensor, Mapping[str, Any]]]:
        """The Muon parameters that take part, as the groups hold them now; says which are not the plan's."""
        groups = [g for g in self._optimizer.param_groups if g["use_muon"]]
        found: list[tuple[Tensor, Mapping[str, Any]]] = [(p, g) for g in groups for p in g["params"] if takes_part(p)]
        members = self._binding.members
        if len(found) != len(members):
            text = f"the groups hold {len(found)} parameters with a gradient, the plan {len(members)}"
            self._news.stale(f"rank {self._rank}", text)
            return [(member.param, {}) for member in members]
        for (p, group), member in zip(found, members, strict=True):
            if p is not member.param:
                text = "the group holds another tensor than the one that was planned for"
                self._news.stale(member.name, text)
            elif engine_for(p, group).signature(p) != member.signature:
                text = "its shape, mesh, placements or storage are no longer those that were planned for"
                self._news.stale(member.name, text)
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
        """Find copies that are stepped in place of the model's weights and do not equal them."""
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
        patience = PATIENCE if asked is None else asked.patience
        return misrouted(groups, rows) + idle_params(groups, self._schedule.kept.idle, patience)

    def _take(self, ranks: Ranks, members: Sequence[int]) -> list[Sample]:
        """Choose this set's matrices, exchange descriptions, and copy what the step is about to change."""
        plan, layouts = self._binding.plan, self._binding.table.layouts
        items = [(index, matrix) for index in members for matrix in range(len(layouts[index].view.matrices))]
        chosen = choose(len(items), self._samples, self._schedule.num_audits)
        picked = [items[i] for i in chosen]
        mine = [self._find(index, ranks) for index, _ in picked]
        others: dict[str, Description] | None = {}
        if len(ranks) > 1:
            others = self._news.caught("AdamW's parameters", lambda: self._said_of_adamws(ranks))
        everyone = gather((mine, others or {}), ranks)
        self._adamws[ranks] = [theirs for _, theirs in everyone]
        read: list[Sample | None] = []
        for at, (index, matrix) in enumerate(picked):
            heard = {rank: theirs[at] for rank, (theirs, _) in zip(ranks, everyone, strict=True)}
            sample = self._news.caught(
                self._binding.members[index].name,
                lambda i=index, m=matrix, h=heard: self._read(i, m, h),  # type: ignore[misc]
            )
            read.append(sample)
        sizes = gather([None if sample is None else len(sample.part.places) for sample in read], ranks)
        taken = []
        for at, sample in enumerate(read):
            of_ranks, has_grad = [theirs[at] for theirs in sizes], [theirs[at].has_grad for theirs, _ in everyone]
            if sample is not None and self._is_whole(sample, of_ranks, has_grad):
                taken.append(sample)
        shapes = sorted({sample.shape for sample in taken})
        for sample in taken:  # matrices of one shape meet on one rank, which can tell if they were swapped
            sample.target = ranks[(shapes.index(sample.shape) + self._schedule.num_audits) % len(ranks)]
            index, matrix = sample.order
            for kept in plan.specs[index].kept:  # it must be there to judge by
                keepers = keepers_of(kept, matrix)
                if sample.target not in keepers:
                    sample.target = keepers[0]
        return taken

    def _said_of_adamws(self, ranks: Ranks) -> dict[str, Description]:
        return said_of_adamws(self._optimizer, ranks, self._describer)

    def _find(self, index: int, ranks: Ranks) -> SampledParam:
        """Describe a parameter here; an exception is reported by every rank of the set."""
        try:
            return self._describe(index, ranks)
        except Exception as error:
            return SampledParam(f"{type(error).__name__}: {error}")

    def _describe(self, index: int, ranks: Ranks) -> SampledParam:
        param, group = self._current[index]
        said, planned = self._describer.describe(param, group), self._binding.table.claims[index]
        sharing = {*said.ties.parts, *said.ties.mates}
        if not sharing <= {*ranks} or said.claim.form != planned.form:
            return SampledParam(
                f"it now is {said.claim.text} over ranks {tuple(sorted(sharing))}, planned was {planned.text}"
            )
        grad = read_gradient(param, self._proposal.grads[index])
        wide = torch.float64 in (
            param.dtype,
            stored_momentum(self._optimizer, param).dtype,
            grad.dtype if grad is not None else None,
        )
        return SampledParam(None, said, grad is not None, wide)

    def _read(self, index: int, matrix: int, heard: Mapping[int, SampledParam]) -> Sample | None:
        """A sample with what this rank holds of it before the step. The same on all ranks but for the content."""
        plan, member = self._binding.plan, self._binding.members[index]
        trouble = next((theirs.trouble for theirs in heard.values() if theirs.trouble is not None), None)
        if trouble is not None:
            self._news.stale(member.name, trouble)
            return None
        param, group = self._current[index]
        said = {rank: theirs.said for rank, theirs in heard.items() if theirs.said is not None}
        try:
            layout = self._describer.layout(param, group, said, view_options(group))
        except ValueError as wrong:
            self._news.stale(member.name, str(wrong))
            return None
        planned = plan.specs[index].layout
        if layout.view != planned.view:
            self._news.stale(member.name, f"its matrices now are {_shapes(layout)}, planned were {_shapes(planned)}")
            return None
        if layout.digest != planned.digest:
            self._news.stale(member.name, "its pieces lie on other ranks than the plan says")
        item = next(i for i in plan.items if (i.param, i.matrix) == (index, matrix))
        name = member.name if len(layout.view.matrices) == 1 else f"{member.name}[{matrix}]"
        if len(layout.ranks) == 1 and len(self._binding.table.sets) > 1:
            name += f" (rank {self._rank})"  # other ranks have one of that name, too
        grad = read_gradient(param, self._proposal.grads[index])
        sample = Sample(
            name,
            (index, matrix),
            param,
            settings_of(group),
            arithmetic_of(self._optimizer, self._binding, item, grad),
            layout,
            sent_by(layout, matrix, self._rank),
            tuple(theirs.claim.stored for theirs in said.values()),
            item.owners,
            item.route,
            torch.float64 if any(theirs.wide for theirs in heard.values()) else torch.float32,
        )
        sample.before = self._news.caught(name, lambda: self._read_before(sample)) or self._unknown(sample, 3)
        sample.kept = self._news.caught(name, lambda: self._kept_of(sample)) or {}
        return sample

    def _is_whole(self, sample: Sample, sizes: list[Any], has_grad: Sequence[bool]) -> bool:
        """True if each rank could read its part, there are gradients, and the audit knows its stages."""
        if None in sizes:
            return False
        sample.sizes, without = sizes, unchecked(sample.settings.stages)
        have = [has for has, size in zip(has_grad, sizes, strict=True) if size]
        if without or not any(have):
            if self._rank == sample.layout.ranks[0]:
                self._skipped.append(sample.row(f"not checked: {without}" if without else "no gradient"))
            return False
        if not all(have):
            text = f"only {sum(have)} of the {len(have)} ranks that hold pieces of it have a gradient"
            remedy = "Set the missing gradients to zeros"
            self._news.findings.append(Finding("gradient_missing", sample.name, text, "all or none", remedy))
        return all(have)

    def _read_before(self, sample: Sample) -> list[Tensor]:
        weight = engine_of(sample.param).storage(sample.param)
        return [self._part(sample, value) for value in (weight, self._momentum_of(sample), self._gradient_of(sample))]

    def _gradient_of(self, sample: Sample) -> Tensor | None:
        return read_gradient(sample.param, self._proposal.grads[sample.order[0]])

    def _momentum_of(self, sample: Sample) -> Tensor:
        return read_momentum(self._optimizer, sample.param)

    def _kept_of(self, sample: Sample) -> dict[str, Tensor]:
        return read_kept(self._optimizer, sample, self._binding.plan.specs[sample.order[0]].kept)

    def _unknown(self, sample: Sample, count: int) -> list[Tensor]:
        """NaNs in place of a part that could not be read: the others wait for as many elements."""
        size = len(sample.part.places)
        return [torch.full((size,), math.nan, dtype=sample.dtype, device=sample.param.device) for _ in range(count)]

    def _part(self, sample: Sample, value: Tensor | None) -> Tensor:
        """A copy of this rank's elements of one quantity."""
        if value is None:  # a rank that sends nothing of it
            return torch.empty(0, dtype=sample.dtype, device=sample.param.device)
        return sample.part.select(value.to(sample.param.device)).to(sample.dtype)

    # -------------------------------------------------------------------------------------------- after the step

    def finish(self) -> AuditReport:
        """Gather, judge and share. The same report on every rank of the component."""
        self._news.rows += self._skipped
        self._count_runs()
        component, prints = self._binding.table.component, Prints()
        for ranks, members in self._binding.table.sets.items():
            judged = self._judge_group(ranks)
            self._news.rows += [j.row for j in judged]
            self._news.findings += [f for j in judged for f in j.findings]
            if self._samples and len(ranks) > 1:
                of_set = self._news.caught("replicas", lambda r=ranks, m=members: self._prints(r, m)) or {}  # type: ignore[misc]
                if ranks == component:  # told with the news
                    prints = of_set
                else:
                    self._news.compare(gather(of_set, ranks), ranks)
        self._news.spread(prints, component)
        self._news.caught("what the next audit compares", self._remember)
        plan = self._binding.plan.unpriced if self._samples else ""
        return self._news.report(self._schedule.num_steps, plan)

    def _judge_group(self, ranks: Ranks) -> list[Judged]:
        judged: list[Judged] = []
        for sample in self._taken.get(ranks, ()):
            after = self._news.caught(sample.name, lambda s=sample: self._read_after(s))  # type: ignore[misc]
            parts = [*sample.before, *(after or self._unknown(sample, 2))]
            who = sample.shape, sample.layout.ranks, sample.sizes
            tensors, places = collect(*who, sample.part.places, parts, sample.target)
            if tensors:
                verdict = self._news.caught(
                    sample.name,
                    lambda s=sample, t=tensors, p=places: judge(self._evidence(s, t, p)),  # type: ignore[misc]
                )
                judged += [] if verdict is None else [verdict]
        for j in judged:
            if j.differs:
                others = [o for o in judged if (o.row.rows, o.row.cols) == (j.row.rows, j.row.cols)]
                finding = self._news.caught(j.row.name, lambda j=j, o=others: name_fault(j, o))  # type: ignore[misc]
                j.findings += [] if finding is None else [finding]
        return judged

    def _evidence(self, sample: Sample, tensors: Sequence[Tensor], places: list[Tensor]) -> Evidence:
        index, matrix = sample.order
        how = self._proposal.rounding.get(index)
        rounding = None if how is None or how.weights is None else (how.weights, matrix)
        before, buffer, grad, after, buffer_after = (t.to(torch.float64) for t in tensors)
        kept, fresh = (sample.kept, self._kept_of(sample)), self._proposal.fresh.get(index, ())
        return Evidence(sample, places, before, buffer, grad, after, buffer_after, rounding, *kept, fresh)

    def _read_after(self, sample: Sample) -> list[Tensor]:
        momentum = self._momentum_of(sample)
        after = [self._part(sample, engine_of(sample.param).storage(sample.param)), self._part(sample, momentum)]
        grad = self._gradient_of(sample)
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
        states = self._proposal.states
        planned = sum(states[i.param] != NONE and self._rank in i.owners for i in self._binding.plan.items)
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

    def _prints(self, ranks: Ranks, members: Sequence[int]) -> Prints:
        """Fingerprints of everything in this set that has replicas."""
        tensors: Replicated = {}
        for index in members:
            member, spec, (param, _) = (
                self._binding.members[index],
                self._binding.plan.specs[index],
                self._current[index],
            )
            engine, state = engine_of(param), self._optimizer.state.get(param, {})
            tensors[member.name] = (
                spec.layout,
                {
                    "weights": engine.storage(param),
                    "momentum": stored_momentum(self._optimizer, param),
                    "gradient": read_gradient(param, self._proposal.grads[index]),
                },
            )
            for stage, kept in zip(keeping(self._proposal.settings[index].stages), spec.kept, strict=True):
                value = state.get(stage.key)
                stored = None if value is None else engine.storage(value)
                tensors[f"{member.name}, {stage.key}"] = (kept.layout, {"state": stored})
        tensors |= sharers(self._optimizer, ranks, self._adamws[ranks], self._describer)
        return local_prints(tensors, self._rank)

    def _remember(self) -> None:
        idle = self._schedule.kept.idle
        watched: dict[int, Watched] = {}
        for sample in (s for samples in self._taken.values() for s in samples):
            print_ = fingerprint(stored_momentum(self._optimizer, sample.param))
            name = self._binding.members[sample.order[0]].name
            watched.setdefault(sample.order[0], Watched(name, sample.param, print_))
        step = self._schedule.num_steps if self._samples else -1  # the same on all ranks, whatever they have
        self._schedule.kept = AuditNotes(tuple(watched.values()), self._optimizer.state, step, idle)


def _shapes(layout: ParamLayout) -> list[tuple[int, int]]:
    return [(matrix.rows, matrix.cols) for matrix in layout.view.matrices]
