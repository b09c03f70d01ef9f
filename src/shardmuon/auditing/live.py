"""One audit of a live step: what it reads before, gathers after, and how all ranks come to the same report.

[Note: order of collectives]
    Before the step all ranks of the component make a table of their parameters anew, by the readers that the plan's
    table was made by: one of Muon's parameters, one of AdamW's. Sets of ranks are taken small ones first, as
    everywhere: in each one gather of what could be read, and after the step an exchange for each quantity of each
    sampled matrix and one gather of fingerprints. Then all ranks of the component tell each other what they have found.
    What may go wrong on one rank alone is caught and becomes a finding, so that this rank still takes part in
    everything that the others wait for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardmuon.auditing.dense import Block, collect, sent_by
from shardmuon.auditing.judge import Evidence, judge
from shardmuon.auditing.naming import name_fault
from shardmuon.auditing.reference import FORMULAS, Arithmetic, norm_of, weight_stages
from shardmuon.auditing.report import AuditReport, Finding, MatrixRow
from shardmuon.auditing.schedule import AuditNotes, AuditSchedule
from shardmuon.comm.groups import Ranks, my_rank
from shardmuon.comm.vote import Fault, gather
from shardmuon.errors import Refused, ranks_text
from shardmuon.host import Stepped
from shardmuon.layout.bind import Listed, Table, bind, describe
from shardmuon.layout.engines import engine_of
from shardmuon.layout.engines.base import NONE, named_params, names_of
from shardmuon.layout.pieces import Piece
from shardmuon.layout.table import ParamLayout
from shardmuon.momentum.keeper import BUFFER
from shardmuon.options import view_options
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.items import Item
from shardmuon.step.binding import Binding, fingerprint, takes_part
from shardmuon.step.options import settings_of
from shardmuon.step.validate import Proposal
from shardmuon.variants import keeping

_T = TypeVar("_T")
# "weights", "momentum", "gradient", or the key of a stage that keeps something -> its layout, and elements (n,) in fp64
_Elements = dict[str, tuple[ParamLayout, Tensor]]
_NO_GRADIENT = "no gradient"  # a row's status, until it is judged
_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def choose(count: int, samples: int, number: int) -> list[int]:
    """Choose matrices of `count` for audit `number`: others each time, all of them in turn."""
    return [(number * samples + i) % count for i in range(min(samples, count))]


@dataclass
class _Sample:
    """A sampled matrix, read before the step.

    Attributes:
        row: Its line in the report, as far as it is known.
        before: For each quantity its layout, and the elements that this rank sends.
        has_grad: True if it has a gradient here.
        target: The rank that judges it.
    """

    row: MatrixRow
    arithmetic: Arithmetic
    before: _Elements
    has_grad: bool
    target: int = 0


class StepAudit:
    """An audit of one step: made before it, finished after it. Collective among the ranks of the component."""

    def __init__(
        self, optimizer: Stepped, binding: Binding, proposal: Proposal, schedule: AuditSchedule, samples: int
    ) -> None:
        self._optimizer, self._binding, self._proposal, self._schedule = optimizer, binding, proposal, schedule
        self._samples, self._rank = samples, my_rank()
        self._findings: list[Finding] = []
        self._rows: list[MatrixRow] = []
        self._compared: set[str] = set()
        self._tables: list[Table] = []
        self._taken: dict[Ranks, list[_Sample]] = {}
        self._watched: dict[int, tuple[str, Tensor, int | None]] = {}  # number -> `AuditNotes.watched`
        self._ran = optimizer.traffic.orthogonalized
        self._tried("the momentum kept from the last audit", self._look_at_momentum)
        self._tried("the model's own weights", self._look_at_model)
        if samples:
            self._tried("the routing", self._look_at_routing)
        sampling = any(gather(samples, binding.component))  # ranks that share nothing need not sample alike
        for use_muon in (True, False) if sampling else ():
            table = self._described(use_muon)
            if table is None:
                break
            self._tables.append(table)
            for ranks, numbers in table.sets.items() if use_muon else ():
                self._taken[ranks] = self._take(table, ranks, numbers)

    def _say(self, name: str, where: str, found: str, allowed: str) -> None:
        self._findings.append(Finding.of(name, where, found, allowed))

    def _tried(self, what: str, run: Callable[..., _T], *given: Any) -> _T | None:
        """The result of a call. An exception becomes a finding, since the other ranks wait for this one; then None."""
        try:
            return run(*given)
        except Exception as error:
            found = f"{what} could not be checked: {type(error).__name__}: {error}"
            self._say("audit_failed", f"rank {self._rank}", found, "a check")
            return None

    # --------------------------------------------------------------------------- before the step: without arithmetic

    def _look_at_momentum(self) -> None:
        """Find momentum that is not as the last step left it, if that was audited."""
        kept = self._schedule.kept
        if kept.step != self._schedule.num_steps - 1 or kept.state is not self._optimizer.state:
            return
        for name, param, left in kept.watched:
            if self._print_of_momentum(param) != left:
                found = f"on rank {self._rank} the momentum is not what step {kept.step} left"
                self._say("momentum_changed_outside", name, found, "no change between steps")

    def _look_at_model(self) -> None:
        """Find parameters in whose place something else is stepped."""
        for name in self._optimizer.unlike_model():
            found = f"on rank {self._rank} what is stepped in its place are not its weights"
            self._say("weights_elsewhere", name, found, "the model's own, rounded to its dtype")

    def _look_at_routing(self) -> None:
        """Find parameters whose place contradicts the routing table, if there is one."""
        table = {row.name: row for row in self._optimizer.routing if row.optimizer != "frozen"}
        decided = {name: f"{row.optimizer}, as param_groups decided ({row.reason})" for name, row in table.items()}
        for index, group in enumerate(self._optimizer.param_groups):
            goes = "Muon" if group["use_muon"] else "AdamW"
            for name, _ in named_params(group, index):
                row = table.pop(name, None)
                if row is not None and row.optimizer != goes:
                    self._say("wrong_group", name, f"it is in group {index}, which goes to {goes}", decided[name])
        for name in table:
            self._say("not_in_optimizer", name, "no group holds it, so it never changes", decided[name])

    # ---------------------------------------------------------------------------------- before the step: the layouts

    def _described(self, use_muon: bool) -> Table | None:
        """A table of all parameters of one kind, made anew; of Muon's beside the plan's. Collective; None if the ranks
        do not agree on one, which is a fault of Muon's."""
        component, fault, listed = self._binding.component, Fault(), list[Listed]()
        with fault:
            listed = self._listed(use_muon)
        try:
            table = bind(self._rank, listed, beyond=(component,), before=component, fault=fault)
        except Refused as wrong:
            if wrong.cause is not None and not isinstance(wrong.cause, Exception):
                raise
            if use_muon:
                self._stale(f"ranks {ranks_text(component)}", str(wrong))
            return None
        planned = zip(self._binding.members, self._binding.plan.specs, strict=True)
        for one, layout, (member, spec) in zip(table.params, table.layouts, planned, strict=False) if use_muon else ():
            if one.param is not member.param:
                self._stale(one.name, "the group holds another tensor than the one that was planned for")
            elif layout.digest != spec.layout.digest:
                self._stale(one.name, "its matrices are others, or lie on other ranks, than the plan says")
        return table

    def _listed(self, use_muon: bool) -> list[Listed]:
        """The parameters of one kind as the groups hold them now, without those that cannot be described, or that ranks
        outside of the component share.

        Raises:
            ValueError: There are more or fewer of Muon's than were planned for.
        """
        component, found = self._binding.component, list[Listed]()
        for index, group in enumerate(self._optimizer.param_groups):
            for name, p in named_params(group, index) if group["use_muon"] == use_muon else ():
                one = Listed(name, name if names_of(group) else "", p, group, view_options(group) if use_muon else None)
                if use_muon and not takes_part(p):
                    continue
                with contextlib.suppress(ValueError):  # it cannot be described
                    (said,) = describe([one])
                    if {*said.ties.parts, *said.ties.mates} <= {*component}:
                        found.append(one)
        if use_muon and len(found) != len(self._binding.members):
            text = f"the groups hold {len(found)} parameters that take part in steps of ranks"
            raise ValueError(f"{text} {ranks_text(component)}, the plan {len(self._binding.members)}")
        return found

    def _stale(self, where: str, text: str) -> None:
        """Note that the step was run by a plan for other parameters."""
        self._say("stale_plan", where, text, "the parameters that were planned for, as they were then")

    # ---------------------------------------------------------------------------------------- what this rank stores

    def _stored(self, table: Table, number: int) -> Iterator[tuple[str, ParamLayout, Tensor | None]]:
        """All quantities of a parameter: name, layout, and what this rank stores of it, if there is any."""
        one, layout = table.params[number], table.layouts[number]
        engine, state = engine_of(one.param), self._optimizer.state.get(one.param, {})
        storage = engine.storage
        yield "weights", layout, storage(one.param)
        if not one.group["use_muon"]:
            yield "momentum", layout, storage(state["exp_avg"]) if "exp_avg" in state else None
            return
        yield "momentum", layout, self._optimizer.keeper.values(engine, state)  # decoded
        yield "gradient", layout, self._gradient(one.param, number)
        stages, specs = keeping(settings_of(one.group).stages), self._binding.plan.specs
        for stage, kept in zip(stages, specs[number].kept, strict=True):
            yield stage.key, kept.layout, storage(state[stage.key]) if stage.key in state else None

    def _print_of_momentum(self, param: Tensor) -> int | None:
        """Fingerprint of a parameter's momentum on this rank."""
        values = self._optimizer.keeper.values(engine_of(param), self._optimizer.state.get(param, {}))
        return None if values is None else fingerprint(values)

    def _gradient(self, param: Tensor, number: int) -> Tensor | None:
        """A parameter's gradient on this rank. One that is placed otherwise was redistributed for the step."""
        if param.grad is None:
            return None
        engine = engine_of(param)
        aligned = engine.is_aligned(param.grad, param)
        return engine.storage(param.grad) if aligned else self._proposal.grads[number]

    def _elements(self, table: Table, number: int, matrix: int) -> _Elements:
        """The elements that this rank sends of each quantity of a matrix, as they are now."""
        found = {}
        for what, layout, stored in self._stored(table, number):
            part = sent_by(layout, matrix, self._rank)
            values = torch.zeros(len(part.places)) if stored is None else part.select(stored.detach())
            found[what] = layout, values.to(table.params[number].param.device, torch.float64)
        return found

    # ---------------------------------------------------------------------------------- before the step: the samples

    def _take(self, table: Table, ranks: Ranks, numbers: Sequence[int]) -> list[_Sample]:
        """Choose this set's matrices, and copy what the step is about to change."""
        items = [(number, matrix) for number in numbers for matrix in range(len(table.layouts[number].view.matrices))]
        chosen = [items[at] for at in choose(len(items), self._samples, self._schedule.num_audits)]
        read = [self._tried(table.params[number].name, self._read, table, number, matrix) for number, matrix in chosen]
        told = gather([None if s is None else (len(s.before["weights"][1]), s.has_grad) for s in read], ranks)
        taken = []
        for sample, *of_ranks in zip(read, *told, strict=True):
            if sample is None or None in of_ranks:
                continue
            have = [has_grad for size, has_grad in of_ranks if size]
            if sample.row.status != _NO_GRADIENT or not any(have):
                self._rows.append(sample.row)
            elif all(have):
                taken.append(sample)
            else:
                text = f"only {sum(have)} of the {len(have)} ranks that hold pieces of it have a gradient"
                self._say("gradient_missing", sample.row.name, text, "all or none")
        shapes = sorted({(sample.row.rows, sample.row.cols) for sample in taken})
        for sample in taken:  # matrices of one shape meet on one rank, which can tell if they were swapped
            place = shapes.index((sample.row.rows, sample.row.cols)) + self._schedule.num_audits
            sample.target = ranks[place % len(ranks)]
        return taken

    def _read(self, table: Table, number: int, matrix: int) -> _Sample | None:
        """A sample with what this rank holds of it before the step; None if the plan takes it for something else."""
        one, layout, plan = table.params[number], table.layouts[number], self._binding.plan
        if layout.view != plan.specs[number].layout.view:
            return None
        item = next(i for i in plan.items if (i.param, i.matrix) == (number, matrix))
        name = one.name if len(layout.view.matrices) == 1 else f"{one.name}[{matrix}]"
        if len(layout.ranks) == 1 and len(table.sets) > 1:
            name += f" (rank {self._rank})"  # other ranks have one of that name, too
        arithmetic, shape = self._arithmetic(one, item), layout.view.matrices[matrix]
        unknown = (type(one).__name__ for one in arithmetic.settings.stages if type(one) not in FORMULAS)
        status = next((f"not checked: {stage}" for stage in unknown), _NO_GRADIENT)
        row = MatrixRow(name, (number, matrix), shape.rows, shape.cols, item.owners, str(arithmetic), status)
        return _Sample(row, arithmetic, self._elements(table, number, matrix), one.param.grad is not None)

    def _arithmetic(self, one: Listed, item: Item) -> Arithmetic:
        """The arithmetic of a matrix by the plan, and by its group as it is now."""
        param, choice, device = one.param, Choice.of(item.how), self._binding.ns_device
        products = choice.dtype or default_dtype(choice.method, device or param.device)
        wire = _WIRES[self._binding.plan.specs[item.param].itemsizes[item.matrix]]
        gradient = self._gradient(param, item.param)
        stored = self._optimizer.state.get(param, {}).get(BUFFER, param).dtype
        computed = torch.float32 if self._optimizer.keeper.widens else stored
        how = self._proposal.rounding.get(item.param)
        return Arithmetic(
            settings_of(one.group),
            choice,
            products,
            wire,
            param.dtype,
            param.dtype if gradient is None else gradient.dtype,
            computed,
            stored,
            device,
            None if how is None or how.weights is None else (how.weights, item.matrix),
        )

    # -------------------------------------------------------------------------------------------- after the step

    def finish(self) -> AuditReport:
        """Gather, judge and share. The same report on every rank of the component."""
        run = self._count_runs()
        for table in self._tables:
            for ranks, numbers in table.sets.items():
                self._judge_set(table, ranks)
                if len(ranks) > 1:
                    self._compare_replicas(table, ranks, numbers)
        said = self._findings, self._rows, {self._rank: run}, self._compared
        findings, rows, runs, compared = zip(*gather(said, self._binding.component), strict=True)
        step = self._schedule.num_steps if self._samples else -1  # the same on all ranks, whatever they have
        self._schedule.kept = AuditNotes(tuple(self._watched.values()), self._optimizer.state, step)
        matrices = {(row.order, row.name): row for row in itertools.chain(*rows)}
        return AuditReport(
            self._schedule.num_steps,
            tuple(sorted({*itertools.chain(*findings)}, key=lambda f: (f.severity, f.where, f.name, f.found))),
            tuple(matrices[key] for key in sorted(matrices)),
            {rank: of_rank[rank] for of_rank in runs for rank in of_rank},
            len(set().union(*compared)),
            self._binding.plan.text() if self._samples else "",
        )

    def _count_runs(self) -> tuple[int, int]:
        found = self._optimizer.traffic.orthogonalized - self._ran
        states = self._proposal.states
        planned = sum(states[i.param] != NONE and self._rank in i.owners for i in self._binding.plan.items)
        if found != planned:
            text = f"{found} matrices went through the orthogonalizer in the step"
            self._say("orthogonalized_count", f"rank {self._rank}", text, f"{planned}, each matrix of the plan once")
        return found, planned

    def _judge_set(self, table: Table, ranks: Ranks) -> None:
        """Put the sampled matrices of a set together, and judge those whose target is this rank."""
        judged: list[Evidence] = []
        for sample in self._taken.pop(ranks, ()):
            name, (number, matrix) = sample.row.name, sample.row.order
            one = table.params[number]
            now = self._tried(name, self._elements, table, number, matrix)
            self._watched[number] = one.name, one.param, self._tried(name, self._print_of_momentum, one.param)
            whole = {}
            for what, (layout, before) in sample.before.items():
                after = now[what][1] if now else torch.full_like(before, torch.nan)
                whole[what] = collect(layout, matrix, torch.stack([before, after]), sample.target)
            evidence = self._tried(name, self._judged, sample, whole) if sample.target == self._rank else None
            if evidence is not None:
                judged.append(evidence)
        for e in judged:
            if e.differs:
                alike = [other for other in judged if other.shape == e.shape]
                self._tried(e.row.name, name_fault, e, alike)
            self._rows.append(e.row)
            self._findings += e.findings

    def _judged(self, sample: _Sample, whole: dict[str, tuple[Tensor, list[Block]]]) -> Evidence:
        kept = {stage.key for stage in sample.arithmetic.settings.stages}
        before, after = (
            {what: values[at].view(-1) if what in kept else values[at] for what, (values, _) in whole.items()}
            for at in (0, 1)
        )
        fresh = self._proposal.fresh.get(sample.row.order[0], ())
        for stage in weight_stages(sample.arithmetic.settings.stages):
            if stage.key in fresh and not before[stage.key]:  # not known yet: the step takes that of the weights
                before[stage.key] = norm_of(before["weights"])
        evidence = Evidence(sample.row, sample.arithmetic, whole["weights"][1], before, after)
        judge(evidence)
        return evidence

    def _compare_replicas(self, table: Table, ranks: Ranks, numbers: Sequence[int]) -> None:
        """Find differences between ranks that hold the same pieces. Collective among them."""
        everyone = gather(self._tried("replicas", self._prints, table, numbers) or {}, ranks)
        for key in dict.fromkeys(itertools.chain(*everyone)):
            name, what, _ = key
            found = {rank: theirs[key] for rank, theirs in zip(ranks, everyone, strict=True) if key in theirs}
            first = min(found)
            odd = [str(rank) for rank in found if found[rank] != found[first]]
            self._compared.add(name)
            if odd:
                fault = "gradient_replicas_differ" if what == "gradient" else "replica_drift"
                text = f"the {what} on rank(s) {', '.join(odd)} differ from those on rank {first}"
                self._say(fault, name, text, "equal bits on all ranks that hold the same piece")

    def _prints(self, table: Table, numbers: Sequence[int]) -> dict[tuple[str, str, tuple[Piece, ...]], int]:
        """Fingerprints of all that has replicas and of which this rank has any: by name, quantity and pieces."""
        prints = {}
        for number in numbers:
            for what, layout, stored in self._stored(table, number):
                pieces = tuple(held.piece for held in layout.of_rank(self._rank) if held.piece.numel)
                if layout.has_replicas and pieces and stored is not None:
                    prints[table.params[number].name, what, pieces] = fingerprint(stored)
        return prints
