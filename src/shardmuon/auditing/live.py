"""One audit of a live step: what it reads before, gathers after, and how all ranks come to the same report.

[Note: order of collectives]
    Before the step all ranks of the component make a table of their parameters anew, by the readers that the plan's
    table was made by: one of Muon's parameters, one of AdamW's. Sets of ranks are taken small ones first, as
    everywhere: in each one gather of what could be read, and after the step one exchange for each sampled matrix and
    one gather of fingerprints. Then all ranks of the component tell each other what they have found. What may go wrong
    on one rank alone is caught and becomes a finding, so that this rank still takes part in everything that the others
    wait for.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardmuon.auditing.dense import Part, collect, part_of, sent_by
from shardmuon.auditing.judge import Evidence, judge
from shardmuon.auditing.naming import name_fault
from shardmuon.auditing.reference import FORMULAS, Arithmetic
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
from shardmuon.plan.plan import Item
from shardmuon.step.binding import Binding, fingerprint, takes_part
from shardmuon.step.options import Settings, settings_of
from shardmuon.step.validate import Proposal
from shardmuon.variants import keeping

_Prints = dict[tuple[str, str], tuple[tuple[Piece, ...], int]]  # (name, quantity) -> pieces kept here, fingerprint
_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def choose(count: int, samples: int, number: int) -> list[int]:
    """Choose matrices of `count` for audit `number`: spread over the layers, others each time, all of them in turn."""
    if not count:
        return []
    stride = max(1, round(0.618 * count))
    while math.gcd(stride, count) > 1:
        stride += 1
    return [(number * samples + i) * stride % count for i in range(min(samples, count))]


@dataclass
class _Sample:
    """A sampled matrix, read before the step.

    Attributes:
        row: Its line in the report, as far as it is known.
        part: The elements that this rank sends.
        before: Copies of these of weights, momentum and gradient before the step.
        has_grad: True if it has a gradient here.
        kept: Numbers that stages keep, before the step, if this rank keeps them.
        wide: True if anything of it is fp64 on some rank: it is gathered in fp64, else in fp32.
        target: The rank that judges it.
    """

    row: MatrixRow
    param: Tensor
    settings: Settings
    arithmetic: Arithmetic
    layout: ParamLayout
    part: Part
    before: list[Tensor]
    has_grad: bool
    kept: dict[str, Tensor]
    wide: bool
    target: int = 0

    def sent(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values in the dtype in which they are gathered."""
        return [value.to(self.param.device, torch.float64 if self.wide else torch.float32) for value in values]


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
        self._ran = optimizer.traffic.orthogonalized
        with self._guarded("the momentum kept from the last audit"):
            self._look_at_momentum()
        with self._guarded("the model's own weights"):
            for name in optimizer.unlike_model():
                self._say(
                    "weights_elsewhere",
                    name,
                    f"on rank {self._rank} what is stepped in its place are not its weights",
                    "the model's own, rounded to its dtype",
                )
        if samples:
            with self._guarded("the routing"):
                self._look_at_routing()
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

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Turn an exception inside into a finding, since the other ranks wait for this one."""
        try:
            yield
        except Exception as error:
            found = f"{what} could not be checked: {type(error).__name__}: {error}"
            self._say("audit_failed", f"rank {self._rank}", found, "a check")

    # --------------------------------------------------------------------------- before the step: without arithmetic

    def _look_at_momentum(self) -> None:
        """Find momentum that is not as the last step left it, if that was audited."""
        kept = self._schedule.kept
        if kept.step != self._schedule.num_steps - 1 or kept.state is not self._optimizer.state:
            return
        for name, param, left in kept.watched:
            if fingerprint(self._stored_momentum(param)) != left:
                self._say(
                    "momentum_changed_outside",
                    name,
                    f"on rank {self._rank} the momentum is not what step {kept.step} left",
                    "no change between steps",
                )

    def _look_at_routing(self) -> None:
        """Find parameters whose place contradicts the routing table, if there is one."""
        table = {row.name: row for row in self._optimizer.routing if row.optimizer != "frozen"}
        for index, group in enumerate(self._optimizer.param_groups):
            goes = "Muon" if group["use_muon"] else "AdamW"
            for name, _ in named_params(group, index):
                row = table.pop(name, None)
                if row is not None and row.optimizer != goes:
                    self._say(
                        "wrong_group",
                        name,
                        f"it is in group {index}, which goes to {goes}",
                        f"{row.optimizer}, as param_groups decided ({row.reason})",
                    )
        for name, row in table.items():
            self._say(
                "not_in_optimizer",
                name,
                "no group holds it, so it never changes",
                f"{row.optimizer}, as param_groups decided ({row.reason})",
            )

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
        with self._guarded("the layouts"):
            for spec, layout, one in zip(self._binding.plan.specs, table.layouts, table.params, strict=False):
                if use_muon and layout.view != spec.layout.view:
                    found, planned = ([(m.rows, m.cols) for m in v.matrices] for v in (layout.view, spec.layout.view))
                    self._stale(one.name, f"its matrices now are {found}, planned were {planned}")
                elif use_muon and layout.digest != spec.layout.digest:
                    self._stale(one.name, "its pieces lie on other ranks than the plan says")
        return table

    def _listed(self, use_muon: bool) -> list[Listed]:
        """The parameters of one kind as the groups hold them now, without those that cannot be described, or that ranks
        outside of the component share.

        Raises:
            ValueError: There are more or fewer of Muon's than were planned for.
        """
        members, found = self._binding.members, list[Listed]()
        for index, group in enumerate(self._optimizer.param_groups):
            for name, p in named_params(group, index) if group["use_muon"] == use_muon else ():
                one = Listed(name, name if names_of(group) else "", p, group, view_options(group) if use_muon else None)
                if (not use_muon or takes_part(p)) and self._lies_here(one):
                    found.append(one)
        if use_muon and len(found) != len(members):
            text = f"the groups hold {len(found)} parameters that take part in steps of ranks"
            raise ValueError(f"{text} {ranks_text(self._binding.component)}, the plan {len(members)}")
        for one, member in zip(found, members, strict=True) if use_muon else ():
            if one.param is not member.param:
                self._stale(member.name, "the group holds another tensor than the one that was planned for")
        return found

    def _lies_here(self, one: Listed) -> bool:
        """True for a parameter that can be described, and that no rank outside of the component shares."""
        try:
            (said,) = describe([one])
        except ValueError:
            return False
        return {*said.ties.parts, *said.ties.mates} <= {*self._binding.component}

    def _stale(self, where: str, text: str) -> None:
        """Note that the step was run by a plan for other parameters."""
        self._say("stale_plan", where, text, "the parameters that were planned for, as they were then")

    # ---------------------------------------------------------------------------------- before the step: the samples

    def _take(self, table: Table, ranks: Ranks, numbers: Sequence[int]) -> list[_Sample]:
        """Choose this set's matrices, and copy what the step is about to change."""
        items = [(number, matrix) for number in numbers for matrix in range(len(table.layouts[number].view.matrices))]
        read: list[_Sample | None] = []
        for at in choose(len(items), self._samples, self._schedule.num_audits):
            read.append(None)
            with self._guarded(table.params[items[at][0]].name):
                read[-1] = self._read(table, *items[at])
        told = gather([None if s is None else (len(s.part.places), s.has_grad, s.wide) for s in read], ranks)
        taken = []
        for sample, *of_ranks in zip(read, *told, strict=True):
            if sample is not None and None not in of_ranks:
                sample.wide = any(wide for _, _, wide in of_ranks)
                if self._can_be_judged(sample, [has_grad for size, has_grad, _ in of_ranks if size]):
                    taken.append(sample)
        shapes = sorted({(sample.row.rows, sample.row.cols) for sample in taken})
        for sample in taken:  # matrices of one shape meet on one rank, which can tell if they were swapped
            number, matrix = sample.row.order
            place = shapes.index((sample.row.rows, sample.row.cols)) + self._schedule.num_audits
            sample.target = ranks[place % len(ranks)]
            for kept in self._binding.plan.specs[number].kept:  # it must be there to judge by
                view, of_rank = kept.layout.view, kept.layout.of_rank
                keepers = [rank for rank in kept.layout.ranks if len(part_of(view, matrix, of_rank(rank)).places)]
                if sample.target not in keepers:
                    sample.target = keepers[0]
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
        weight, momentum = engine_of(one.param).storage(one.param), self._momentum(one.param)
        grad, settings, part = (
            self._gradient(one.param, number),
            settings_of(one.group),
            sent_by(layout, matrix, self._rank),
        )
        arithmetic, shape = self._arithmetic(item, grad), layout.view.matrices[matrix]
        stored = str(arithmetic.stored_dtype).removeprefix("torch.")
        who = name, (number, matrix), shape.rows, shape.cols, item.owners, item.route
        row = MatrixRow(*who, str(arithmetic), "no gradient", momentum_dtype=stored)
        before = [weight.new_empty(0) if value is None else part.select(value) for value in (weight, momentum, grad)]
        wide = torch.float64 in (weight.dtype, arithmetic.stored_dtype, arithmetic.grad_dtype)
        kept = self._kept(one.param, number, matrix, settings)
        return _Sample(row, one.param, settings, arithmetic, layout, part, before, grad is not None, kept, wide)

    def _can_be_judged(self, sample: _Sample, have: Sequence[bool]) -> bool:
        """True if the audit knows its stages, and the ranks that hold any of it have gradients."""
        unknown = [type(stage).__name__ for stage in sample.settings.stages if type(stage) not in FORMULAS]
        if unknown:
            sample.row = replace(sample.row, status=f"not checked: {unknown[0]}")
        if unknown or not any(have):
            self._rows += [sample.row] if self._rank == sample.layout.ranks[0] else []
            return False
        if not all(have):
            text = f"only {sum(have)} of the {len(have)} ranks that hold pieces of it have a gradient"
            self._say("gradient_missing", sample.row.name, text, "all or none")
        return all(have)

    def _arithmetic(self, item: Item, grad: Tensor | None) -> Arithmetic:
        """The arithmetic of a matrix by the plan."""
        param, choice = self._binding.members[item.param].param, Choice.of(item.how)
        stored, device = self._stored_momentum(param).dtype, self._binding.ns_device
        return Arithmetic(
            choice.method,
            choice.dtype or default_dtype(choice.method, device or param.device),
            _WIRES[self._binding.plan.specs[item.param].itemsizes[item.matrix]],
            param.dtype,
            torch.float32 if self._optimizer.keeper.widens else stored,
            stored,
            param.dtype if grad is None else grad.dtype,
            choice.kernel,
            choice.alone,
            choice.split_k,
            device,
            item.route == "gram",
        )

    def _gradient(self, param: Tensor, number: int) -> Tensor | None:
        """A parameter's gradient on this rank. One that is placed otherwise was redistributed for the step."""
        if param.grad is None:
            return None
        engine = engine_of(param)
        aligned = engine.is_aligned(param.grad, param)
        return engine.storage(param.grad) if aligned else self._proposal.grads[number]

    def _stored_momentum(self, param: Tensor) -> Tensor:
        """A parameter's momentum as this rank stores it; zeros before its first step."""
        engine = engine_of(param)
        buffer = self._optimizer.state.get(param, {}).get(BUFFER)
        return torch.zeros_like(engine.storage(param)) if buffer is None else engine.storage(buffer)

    def _momentum(self, param: Tensor) -> Tensor:
        """A parameter's momentum on this rank, decoded and where its weights are; zeros before its first step."""
        engine = engine_of(param)
        values = self._optimizer.keeper.values(engine, self._optimizer.state.get(param, {}))
        return torch.zeros_like(engine.storage(param)) if values is None else values.to(param.device)

    def _kept(self, param: Tensor, number: int, matrix: int, settings: Settings) -> dict[str, Tensor]:
        """Numbers that stages keep of a matrix on this rank, by key (copies, fp64, 1-D): zeros before its first
        step."""
        found = {}
        for stage, kept in zip(keeping(settings.stages), self._binding.plan.specs[number].kept, strict=True):
            part = part_of(kept.layout.view, matrix, kept.layout.of_rank(self._rank))
            if len(part.places):
                length = kept.layout.view.matrices[matrix].cols
                stored = found[stage.key] = torch.zeros(length, dtype=torch.float64, device=param.device)
                value = self._optimizer.state.get(param, {}).get(stage.key)
                if value is not None:
                    values = part.select(engine_of(param).storage(value))
                    stored[part.places.to(param.device)] = values.to(stored)
        return found

    # -------------------------------------------------------------------------------------------- after the step

    def finish(self) -> AuditReport:
        """Gather, judge and share. The same report on every rank of the component."""
        run = self._count_runs()
        for table in self._tables:
            for ranks, numbers in table.sets.items():
                if table is self._tables[0]:
                    self._judge_set(ranks)
                if len(ranks) > 1:
                    prints: _Prints = {}
                    with self._guarded("replicas"):
                        prints = self._prints(table, numbers)
                    self._compare(gather(prints, ranks), ranks)
        said = self._findings, self._rows, {self._rank: run}, self._compared
        findings, rows, runs, compared = zip(*gather(said, self._binding.component), strict=True)
        with self._guarded("what the next audit compares"):
            self._remember()
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
            self._say(
                "orthogonalized_count",
                f"rank {self._rank}",
                f"{found} matrices went through the orthogonalizer in the step",
                f"{planned}, each matrix of the plan once",
            )
        return found, planned

    def _judge_set(self, ranks: Ranks) -> None:
        """Put the sampled matrices of a set together, and judge those whose target is this rank."""
        judged: list[Evidence] = []
        for sample in self._taken.get(ranks, ()):
            name, after = sample.row.name, [torch.full((len(sample.part.places),), math.nan)] * 2
            with self._guarded(name):
                after = self._read_after(sample)
            matrix, parts = sample.row.order[1], sample.sent([*sample.before, *after])
            tensors, places = collect(sample.layout, matrix, parts, sample.target)
            if tensors:
                with self._guarded(name):
                    evidence = self._evidence(sample, tensors, places)
                    judge(evidence)
                    judged.append(evidence)
        for e in judged:
            if e.differs:
                with self._guarded(e.row.name):
                    e.findings.append(name_fault(e, [o for o in judged if o.before.shape == e.before.shape]))
            self._rows.append(e.row)
            self._findings += e.findings

    def _read_after(self, sample: _Sample) -> list[Tensor]:
        """Elements of weights and momentum that this rank stores after the step."""
        param, grad = sample.param, self._gradient(sample.param, sample.row.order[0])
        if grad is not None and fingerprint(sample.part.select(grad)) != fingerprint(sample.before[2]):
            found, allowed = f"on rank {self._rank} the step changed the gradient", "no change"
            self._say("gradient_written", sample.row.name, found, allowed)
        return [sample.part.select(value) for value in (engine_of(param).storage(param), self._momentum(param))]

    def _evidence(self, sample: _Sample, tensors: Sequence[Tensor], places: list[Tensor]) -> Evidence:
        number, matrix = sample.row.order
        how = self._proposal.rounding.get(number)
        rounding = None if how is None or how.weights is None else (how.weights, matrix)
        kept = sample.kept, self._kept(sample.param, number, matrix, sample.settings)
        before, buffer, grad, after, buffer_after = (tensor.double() for tensor in tensors)
        what = sample.row, sample.arithmetic, sample.settings, sample.layout, places
        fresh = self._proposal.fresh.get(number, ())
        return Evidence(*what, before, buffer, grad, after, buffer_after, rounding, *kept, fresh)

    # ------------------------------------------------------------------------------------------------- replicas

    def _replicated(self, table: Table, number: int) -> Iterator[tuple[str, ParamLayout, str, Any]]:
        """Name, layout, quantity and storage here of all that lies as a parameter's replicas do."""
        one, layout = table.params[number], table.layouts[number]
        storage, state = engine_of(one.param).storage, self._optimizer.state.get(one.param, {})
        yield one.name, layout, "weights", storage(one.param)
        if not one.group["use_muon"]:
            yield one.name, layout, "momentum", storage(state["exp_avg"]) if "exp_avg" in state else None
            return
        yield one.name, layout, "momentum", self._stored_momentum(one.param)
        yield one.name, layout, "gradient", self._gradient(one.param, number)
        stages, specs = keeping(self._proposal.settings[number].stages), self._binding.plan.specs
        for stage, kept in zip(stages, specs[number].kept, strict=True):
            value = storage(state[stage.key]) if stage.key in state else None
            yield one.name, kept.layout, stage.key, value

    def _prints(self, table: Table, numbers: Sequence[int]) -> _Prints:
        """Fingerprints of all that has replicas and of which this rank holds something."""
        prints: _Prints = {}
        for number in numbers:
            for name, layout, what, value in self._replicated(table, number):
                pieces = tuple(held.piece for held in layout.of_rank(self._rank) if held.piece.numel)
                if layout.has_replicas and pieces and value is not None:
                    prints[name, what] = pieces, fingerprint(value)
        return prints

    def _compare(self, everyone: Sequence[_Prints], ranks: Ranks) -> None:
        """Find differences between ranks that hold the same pieces."""
        first: dict[tuple[str, str, tuple[Piece, ...]], tuple[int, int]] = {}
        odd: dict[tuple[str, str, int], list[int]] = {}
        for rank, prints in zip(ranks, everyone, strict=True):
            for (name, what), (pieces, print_) in prints.items():
                reference, expected = first.setdefault((name, what, pieces), (rank, print_))
                if print_ != expected:
                    odd.setdefault((name, what, reference), []).append(rank)
        for (name, what, reference), others in odd.items():
            self._say(
                "gradient_replicas_differ" if what == "gradient" else "replica_drift",
                name,
                f"the {what} on rank(s) {', '.join(map(str, others))} differ from those on rank {reference}",
                "equal bits on all ranks that hold the same piece",
            )
        self._compared |= {name for name, _, _ in first}

    def _remember(self) -> None:
        """Note for the next audit how the step left the momentum of sampled parameters."""
        watched: dict[int, tuple[str, Tensor, int]] = {}
        for sample in itertools.chain(*self._taken.values()):
            name = self._binding.members[sample.row.order[0]].name
            watched[sample.row.order[0]] = name, sample.param, fingerprint(self._stored_momentum(sample.param))
        step = self._schedule.num_steps if self._samples else -1  # the same on all ranks, whatever they have
        self._schedule.kept = AuditNotes(tuple(watched.values()), self._optimizer.state, step)
