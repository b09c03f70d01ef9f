"""One agreed step over groups and state. `Muon` is the torch.optim face over it; a framework's host may run others.

Read `Core.take_step` first: every rank reads all that its step depends on, changing nothing (step/validate.py). Then
all ranks of the component vote (comm/vote.py): all raise the same error, or all go on (step/bucket.py). What goes wrong
after that leaves weights half updated: the optimizer is broken until state is loaded, and whoever waits for this rank
fails at once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardmuon._torch import default_group, is_dtensor
from shardmuon.auditing.report import AuditReport
from shardmuon.auditing.schedule import AuditError, AuditSchedule
from shardmuon.checkpoint.state import drop_others, init_missing
from shardmuon.comm.groups import GroupRef, Ranks, Traffic, group_for, group_ranks, my_rank
from shardmuon.comm.vote import Ballot, Fault, Flag, Phase, Verdict, close_lane
from shardmuon.errors import HALF_DONE, RELOAD, REMEDY, ExchangeError, Refused, made_public
from shardmuon.first_step import FirstStep
from shardmuon.host import Host, Hosts, Progress
from shardmuon.layout.bind import Call, Listed, Table, agree, current_world, renewed
from shardmuon.layout.engines.base import MISPLACED, NONE, name_of
from shardmuon.momentum.keeper import Keeper
from shardmuon.options import MuonConfig
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.plan.plan import Plan
from shardmuon.routing.groups import RoutingRow
from shardmuon.step.adamw import step_adamw
from shardmuon.step.binding import (
    Binding,
    bound,
    chooser_of,
    counts_of_lacking,
    fingerprint,
    groups_of,
    groups_of_params,
    listed_of,
    number_bits,
    stamp_of,
)
from shardmuon.step.bucket import Kernel, run_buckets
from shardmuon.step.kept import Settled
from shardmuon.step.options import Group, OptionsReader, Settings
from shardmuon.step.stages import ZeroWatch, begin_weights, finish_weights
from shardmuon.step.validate import Memory, Proposal, ProposalLine, difference, digests_of, lines_of, validate
from shardmuon.variants import WEIGHT_NORMS

if TYPE_CHECKING:
    from shardmuon.auditing.live import StepAudit


class Core:
    """Groups of parameters, their state, and the agreed step over them.

    Attributes:
        param_groups, state: As torch.optim.Optimizer has them. Frameworks replace both.
        config: Options of the whole optimizer.
        keeper, audits: What they keep: stored momentum, and when to audit.
        process_group: The group over which plain parameters are replicas.
        traffic: What this rank has done so far.
        routing: The table by which parameters were routed, if the optimizer was given a model.
        binding: The plan in force with what this rank knows of it.
        component: The ranks that have voted together last.
        broken: Why the last step left the ranks out of step.
        options: Reads groups.
        settled: Norms of weights that a step has looked at since they were made or loaded.
        hosts, first: Who may call `step`, and what a first one tells.
    """

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    in_step = False  # a signal handler may ask for state in the middle of one

    def __init__(
        self,
        config: MuonConfig,
        process_group: GroupRef | None,
        keeper: Keeper | None = None,  # default: a new one
        audits: AuditSchedule | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.config = config
        self.keeper = keeper or config.keeper()
        self.audits = audits or AuditSchedule(config.audit_every, config.audit_action)
        self.process_group = process_group
        self.traffic = traffic or Traffic()
        self.routing: tuple[RoutingRow, ...] = ()
        self.broken: str | None = None
        self._forget_process()

    def _forget_process(self) -> None:
        """Reset everything that belongs to one process."""
        self.binding: Binding | None = None
        self.component: Ranks | None = None
        self.world = current_world()  # that it is of
        self.options = OptionsReader()
        self.graphs = GraphCache() if self.config.cuda_graphs else None
        self.watch = FiniteWatch()
        self.zeros = ZeroWatch()
        self.settled: Settled = WeakIdKeyDictionary()
        self.hosts, self.first = Hosts(), FirstStep()

    def unlike_model(self) -> Sequence[str]:
        """Names of the parameters that are not what the model has. Only a host that steps copies can tell."""
        return ()

    # ---------------------------------------------------------------------------------------------- one step

    def take_step(self, fault: Fault) -> None:
        """Step the groups as they are. Collective among the ranks that share parameters.

        Args:
            fault: What is wrong on this rank already.

        Raises:
            Refused: All ranks raise it, and nothing has changed.
        """
        changing = False
        try:
            call = StepCall(self, fault)
            binding, verdict = agree(call, fault)
            changing = True
            report = self._carry_out(binding, call.proposal, verdict)
        except Refused:
            raise
        except BaseException as error:
            self.remember(error, changing)
            raise
        if report is not None:
            self.audits.deliver(report)

    def let_host_step(self, host: Host, fault: Fault) -> None:
        """Step groups that hold an active host's tensors."""
        progress = Progress()
        try:
            host.step(self, progress, fault)
        except Refused:
            raise
        except BaseException as error:
            self.remember(error, progress.changing)
            raise

    def _carry_out(self, binding: Binding, proposal: Proposal, verdict: Verdict) -> AuditReport | None:
        """Change weights and state, as all ranks have agreed. Returns what an audit of the step has found."""
        if binding.elsewhere:
            proposal.hear(binding, verdict.presence)
        if proposal.made or proposal.fresh or MISPLACED in proposal.states:
            self._take_over(binding, proposal)
        self.audits.num_steps += 1
        samples = self.audits.begin() if self.audits.num_steps >= self.audits.at else None
        # ranks that audit tell all ranks of the component what they find
        audit = self._audit(binding, proposal, samples or 0) if verdict.flags & Flag.AUDIT else None
        missing: frozenset[int] = frozenset()  # parameters without a gradient
        if NONE in proposal.states:
            missing = frozenset(n for n, state in enumerate(proposal.states) if state == NONE)
        on_weights: frozenset[int] = frozenset()
        if binding.on_weights:
            on_weights = frozenset(binding.on_weights) - missing
            new = frozenset(n for n in on_weights if not set(WEIGHT_NORMS).isdisjoint(proposal.fresh[n]))
            begin_weights(binding.weight_sets(new), proposal, self.traffic, self.zeros)
        kernel = Kernel(binding.ns_device, self.graphs, self.watch)
        run_buckets(binding.buckets_without(missing), proposal, kernel, self.traffic)
        if on_weights:
            finish_weights(binding.weight_sets(on_weights), proposal, self.traffic)
        if self.watch.seen:
            self.watch.send()
        members = binding.members
        if proposal.adamw:
            step_adamw(
                self.param_groups,
                self.state,
                lambda: {member.engine for n, member in enumerate(members) if n not in missing},
                proposal.adamw,
            )
        report = None if audit is None else audit.finish()
        return None if samples is None else report

    def _take_over(self, binding: Binding, proposal: Proposal) -> None:
        """Put the state that validating has made in place, and redistribute gradients as their parameters are
        placed."""
        for number, made in proposal.made.items():
            kept = self.state[binding.members[number].param]
            for key in kept.keys() - made.keys():  # what it kept as AdamW's, or of another variant
                del kept[key]
            kept.update(made)
        for number, keys in proposal.fresh.items():
            for key in keys:
                self.settled[self.state[binding.members[number].param][key]] = True
        for number in itertools.chain.from_iterable(binding.table.sets.values()):  # as all ranks go through sets
            if proposal.states[number] == MISPLACED:
                param, engine = binding.members[number].param, binding.members[number].engine
                assert param.grad is not None
                proposal.grads[number] = engine.storage(engine.align(param.grad, param))

    def _audit(self, binding: Binding, proposal: Proposal, samples: int) -> StepAudit:
        """Begin an audit of this step. Collective; never raises."""
        from shardmuon.auditing.live import StepAudit

        audit = StepAudit(self, binding, proposal, self.audits, samples)
        self.audits.num_audits += samples > 0
        return audit

    def remember(self, error: BaseException, changing: bool) -> None:
        """Note an error that ended a step between its first change and its last, or left other ranks waiting: no step
        may follow."""
        if isinstance(error, AuditError):  # raised out of the framework's step, with more to do in it
            self.broken = f"{error}. Groups and weights that come after these are as before. {REMEDY}"
            return
        if self.broken is not None:  # a host's own core has said so, and closed the lane
            return
        component = self.component or ()
        alone = default_group() is None or len(component) == 1
        if changing or not alone:
            text = f"{type(error).__name__}: {error}".rstrip(": .\n")
            self.broken = f"{text}. {HALF_DONE}. {RELOAD if alone else REMEDY}"
            if isinstance(error, ExchangeError):  # which says that itself
                self.broken = str(error)
        if changing and len(component) > 1:
            close_lane(component)  # whoever waits for this rank fails at once

    def torn(self) -> str | None:
        """The reason why the state is half moved, with what to do about it; None if it is that of a finished step."""
        if self.in_step:
            return (
                "a step is under way, and its state is half moved. Save when step() has returned: set a flag in the "
                "signal handler"
            )
        if self.broken is not None:
            return f"an earlier step was broken off, and its state is half moved: {self.broken}"
        return None

    def make_plan(self) -> Plan:
        """Plan now. Collective among the ranks that share parameters.

        Raises:
            ValueError: On every rank.
        """
        fault = Fault()
        with made_public():
            return renewed(StepCall(self, fault), fault).plan

    def complete_state(self) -> None:
        """Every trainable parameter has state, zeros where it never had a gradient: see [Note: state that is not there]
        in checkpoint/state.py. A frozen one keeps what it has of its group's kind."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    init_missing(p, group, self.state[p], self.keeper)
                elif self.state.get(p):
                    drop_others(group, self.state[p])


class StepCall(Call[Binding]):
    """Call of one rank for a step, or for a plan without a step: answers the questions that layout/bind.py asks.

    Attributes:
        options: Options of each group.
        proposal: The step as this rank would make it.
    """

    phase = Phase.STEP
    renews = False
    proposal: Proposal
    _due = ""  # when ranks audit, which they must do alike

    def __init__(self, core: Core, fault: Fault) -> None:
        self._core = core
        self.options: list[Settings | None] = []
        if core.process_group is not None:
            with fault:  # its ranks wait for this one, also where it has no parameter
                self.beyond = tuple(sorted(group_ranks(core.process_group)))  # raises if it was destroyed

    def before(self) -> Ranks | None:
        return self._core.component if self._core.world == current_world() else None

    def known(self) -> Binding | None:
        return self._core.binding

    def is_current(self, kept: Binding) -> bool:
        groups = self._core.param_groups
        self.options = self._core.options.read(groups)
        members = iter(kept.members)
        if len(kept.planned) != len(groups):
            return False
        for number, (group, settings) in enumerate(zip(groups, self.options, strict=True)):
            if kept.planned[number] != ("" if settings is None else settings.planned):
                return False
            for p in () if settings is None else group["params"]:  # frameworks swap parameters after __init__
                if p.requires_grad or p.grad is not None:  # `takes_part`
                    member = next(members, None)
                    if member is None or member.param is not p or member.group != number:
                        return False
                    if member.engine.signature(p) != member.signature:
                        return False  # it lies otherwise
        return next(members, None) is None

    def read(self, kept: Binding) -> Ballot:
        core, audits, flags = self._core, self._core.audits, Flag.NONE
        if core.watch.coming:
            core.watch.report()
        if core.zeros.coming:
            core.zeros.report()
        core.traffic.agreements += len(kept.component) > 1
        if audits.num_steps + 1 >= audits.at:
            self._due = audits.due_text()
            if audits.is_due:
                flags = Flag.AUDIT
        memory = Memory(core.state, core.keeper, core.settled)
        self.proposal = validate(kept, core.param_groups, self.options, memory)
        digests = digests_of(kept, self.proposal, self._due) if len(kept.component) > 1 else None
        return Ballot(self.phase, flags, digests, self.proposal.presence, kept.num_bits)

    def lines(self, kept: Binding, ranks: Ranks) -> list[ProposalLine]:
        return lines_of(kept, self.proposal, ranks, self._due)

    def difference(self, ranks: Ranks, everyone: Sequence[list[ProposalLine] | None]) -> str:
        return difference(ranks, everyone)

    # -------------------------------------------------------------------------------------------------- a new plan

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        # ranks that share AdamW's DTensors hear of each other's faults, too
        return [
            (name_of(group, index, position), p, group)
            for index, group in enumerate(self._core.param_groups)
            for position, p in enumerate(group["params"])
            if group.get("use_muon") or is_dtensor(p)
        ]

    def listed(self) -> list[Listed]:
        core = self._core
        self.options = core.options.read(core.param_groups)
        self._chooser = chooser_of(core.param_groups, core.config)
        listed = listed_of(core.param_groups, self.options, core.config, core.keeper, self._chooser)
        self.stamp = stamp_of(self._chooser, listed[0].param.device if listed else torch.device("cpu"))
        self._refs = groups_of_params(listed)
        self.groups = {ranks: ref.group_name for ranks, ref in self._refs.items()}
        self.fingerprint = fingerprint
        return listed

    def made(self, table: Table) -> tuple[Binding, dict[Ranks, int]]:
        # others are told of how many parameters gradients may lack here
        core = self._core
        made = bound(my_rank(), table, core.param_groups, self.options, core.config, self._chooser, core.keeper)
        sets = made.weight_sets(frozenset(made.on_weights))
        self._groups = {r: self._refs[r].live() if r in table.groups else None for r in groups_of(made.buckets, sets)}
        return made, counts_of_lacking(table)

    def heard(self, kept: Binding, everyone: Sequence[dict[Ranks, int]]) -> None:
        for ranks, known in self._groups.items():  # before the first exchange: who waits for buffers makes no group
            group_for(ranks, known)
        number_bits(kept, everyone)
        self._core.binding, self._core.component, self._core.world = kept, kept.component, kept.world
