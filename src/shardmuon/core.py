"""One agreed step over groups and state. `Muon` is the torch.optim face over it; a framework's host may run others.

Read `Core.take_step` first: every rank reads all that its step depends on, changing nothing (step/validate.py). Then
all ranks of the component vote (comm/vote.py): all raise the same error, or all go on (step/commit.py). What goes wrong
after that leaves weights half updated: the optimizer is broken until state is loaded, and whoever waits for this rank
fails at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardmuon._torch import default_group
from shardmuon.auditing.report import AuditReport
from shardmuon.auditing.schedule import AuditError, AuditSchedule
from shardmuon.checkpoint.state import drop_others, init_missing
from shardmuon.comm.component import Ranks
from shardmuon.comm.exchange import Traffic
from shardmuon.comm.faults import Fault
from shardmuon.comm.groups import GroupRef, group_ranks, my_rank
from shardmuon.comm.lane import lane_of
from shardmuon.comm.vote import Ballot, Flag, Phase, Verdict, vote
from shardmuon.errors import HALF_DONE, RELOAD, REMEDY, ExchangeError, Refused, made_public
from shardmuon.host import Host, Hosts
from shardmuon.momentum.keeper import Keeper
from shardmuon.options import Config
from shardmuon.orthogonalize import FiniteWatch
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.plan.plan import Plan
from shardmuon.routing.groups import RoutingRow
from shardmuon.step.adamw import step_adamw
from shardmuon.step.binding import Binding, Place, make_binding
from shardmuon.step.bucket import Kernel
from shardmuon.step.commit import begin_weights, finish_weights, run_buckets
from shardmuon.step.kept import Settled
from shardmuon.step.options import GroupOptions, OptionsReader
from shardmuon.step.rates import DeviceRates, on_device
from shardmuon.step.refuse import refuse
from shardmuon.step.update import Work
from shardmuon.step.validate import MISPLACED, NONE, Memory, Proposal, digests_of, is_current, validate
from shardmuon.step.zero_weights import ZeroWatch
from shardmuon.variants import WEIGHT_NORMS

if TYPE_CHECKING:
    from shardmuon.auditing.live import StepAudit


class Course:
    """How far a step has come. `changing`: all ranks have agreed to it, and what it changes may be half changed."""

    changing = False


class Core:
    """Groups of parameters, their state, and the agreed step over them.

    Attributes:
        param_groups, state: As torch.optim.Optimizer has them. Frameworks replace both.
        config: Options of the whole optimizer.
        keeper, audits: What they keep: stored momentum, and when to audit.
        process_group: Over which plain parameters are replicas.
        traffic: What this rank has done so far.
        routing: The table by which parameters were routed, if the optimizer was given a model.
        binding: The plan in force with what this rank knows of it.
        component: The ranks that have voted together last.
        broken: Why the last step left the ranks out of step.
        settled: Norms of weights that a step has looked at since they were made or loaded.
        hosts: Who may call `step`.
    """

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    in_step = False  # a signal handler may ask for state in the middle of one

    def __init__(
        self,
        config: Config,
        process_group: GroupRef | None,
        keeper: Keeper | None = None,  # default: a new one
        audits: AuditSchedule | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        audit = config.audit
        self.config = config
        self.keeper = keeper or config.keeper()
        self.audits = audits or AuditSchedule(audit.every, audit.samples, audit.action)
        self.process_group = process_group
        self.traffic = traffic or Traffic()
        self.routing: tuple[RoutingRow, ...] = ()
        self.broken: str | None = None
        self._forget_process()

    def _forget_process(self) -> None:
        """Begin without what belongs to one process."""
        self.binding: Binding | None = None
        self.component: Ranks | None = None
        self._world: weakref.ref[Any] | None = None  # the default process group that it is of; keeps none alive
        self._options, self._rates = OptionsReader(), DeviceRates()
        self.graphs = GraphCache() if self.config.orthogonalizer.cuda_graphs else None
        self.watch = FiniteWatch()
        self.zeros = ZeroWatch()
        self.settled: Settled = WeakIdKeyDictionary()
        self.hosts = Hosts()

    def unlike_model(self) -> Sequence[str]:
        """Names of the parameters that are not what the model has. Only a host that steps copies can tell."""
        return ()

    # ---------------------------------------------------------------------------------------------- one step

    def take_step(self, early: BaseException | None = None) -> None:
        """Step the groups as they are. Collective among the ranks that share parameters.

        Args:
            early: What was raised on this rank before, of which the others must hear.

        Raises:
            Refused: All ranks raise it, and nothing has changed.
        """
        course = Course()
        try:
            report = self._carry_out(*self._agree(course, early))
        except Refused:
            raise
        except BaseException as error:
            self.remember(error, course)
            raise
        if report is not None:
            self.audits.deliver(report)

    def let_host_step(self, host: Host, early: BaseException | None) -> None:
        """Step groups that hold an active host's tensors."""
        course = Course()
        try:
            host.step(self, course, early)
        except Refused:
            raise
        except BaseException as error:
            self.remember(error, course)
            raise

    def _carry_out(self, binding: Binding, proposal: Proposal, presence: int) -> AuditReport | None:
        """Change weights and state, as all ranks have agreed.

        Args:
            presence: Of gradients, on any rank.

        Returns:
            What an audit of the step has found.
        """
        proposal.hear(binding, presence)
        self._take_over(binding, proposal)
        self.audits.num_steps += 1
        samples = self.audits.begin() if self.audits.num_steps >= self.audits.at else None
        # ranks that audit tell all ranks of the component what they find
        audit = self._audit(binding, proposal, samples or 0) if proposal.audited else None
        p = proposal
        work = Work(p.weights, p.grads, p.momenta, p.settings, p.kept, p.rounding)
        on_weights = {n: s for n, s in binding.on_weights.items() if p.states[n] != NONE}
        new = {n: s for n, s in on_weights.items() if not set(WEIGHT_NORMS).isdisjoint(p.fresh[n])}
        if new:
            begin_weights(binding.weight_sets(new), work, self.traffic, self.zeros)
        kernel = Kernel(binding.ns_device, self.graphs, self.watch)
        run_buckets(binding.bounds(p.missing), work, kernel, self.traffic)
        if on_weights:
            finish_weights(binding.weight_sets(on_weights), work, self.traffic)
        self.watch.send()
        stepped = zip(binding.members, p.states, strict=True)
        step_adamw(self.param_groups, self.state, lambda: {m.engine for m, state in stepped if state != NONE}, p.adamw)
        report = None if audit is None else audit.finish()
        return None if samples is None else report

    def _take_over(self, binding: Binding, proposal: Proposal) -> None:
        """Make what validating has made state, and bring gradients to where their parameters lie."""
        self._rates.agreed()
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

    def remember(self, error: BaseException, course: Course) -> None:
        """A step that ended between its first change and its last, or left other ranks waiting, must be the last."""
        if isinstance(error, AuditError):  # raised out of the framework's step, with more to do in it
            self.broken = f"{error}. Groups and weights that come after these are as before. {REMEDY}"
            return
        component = self.component or ()
        alone = default_group() is None or len(component) == 1
        if self.broken is not None:  # a host's own core has said so
            return
        if course.changing or not alone:
            text = f"{type(error).__name__}: {error}".rstrip(": .\n")
            self.broken = f"{text}. {HALF_DONE}. {RELOAD if alone else REMEDY}"
            if isinstance(error, ExchangeError):  # which says that itself
                self.broken = str(error)
        if course.changing and len(component) > 1:
            lane_of(component).close()  # whoever waits for this rank fails at once

    def torn(self) -> str | None:
        """Why the state is that of no step, if it is none; ends with what to do."""
        if self.in_step:
            return (
                "a step is under way, and its state is half moved. Save when step() has returned: set a flag in the "
                "signal handler"
            )
        if self.broken is not None:
            return f"an earlier step was broken off, and its state is half moved: {self.broken}"
        return None

    def make_plan(self, early: BaseException | None = None) -> Plan:
        """Plan now. Collective among the ranks that share parameters.

        Args:
            early: What was raised on this rank before, of which the others must hear.

        Raises:
            ValueError: On every rank.
        """
        fault, options = Fault(), list[GroupOptions]()
        self.binding = None
        with made_public():
            with fault:
                self._forget_other_world()
                if early is not None:
                    raise early
                options = self._read_options()
            if self.component is not None:  # whoever has a plan makes a new one too
                self._vote(Phase.PLAN, options, fault)
            self.binding = self._bind(options, fault)
        return self.binding.plan

    # ------------------------------------------------------------------------------- before anything changes

    def _bind(self, options: Sequence[GroupOptions], fault: Fault) -> Binding:
        """A plan for the parameters as they are now. Collective over the component; all ranks raise or none."""
        beyond: list[Ranks] = []
        with fault:
            if self.process_group is not None:  # its ranks wait for this one, also where it has no parameter
                beyond = [tuple(sorted(group_ranks(self.process_group)))]  # raises if it was destroyed
        place = Place(my_rank(), self.component, tuple(beyond))
        made = make_binding(place, self.param_groups, options, self.config, self.keeper, fault)
        self.component = made.table.component
        world = default_group()
        self._world = None if world is None else weakref.ref(world)
        return made

    def _forget_other_world(self) -> None:
        """All ranks have joined another default process group, perhaps under other numbers."""
        world = default_group()
        if world is not (None if self._world is None else self._world()) or (world is None) != (self._world is None):
            self.binding = self.component = None

    def _read_options(self) -> list[GroupOptions]:
        """The options of all groups as they are now. See [Note: an lr on the device] in step/rates.py."""
        if self.binding is None:  # others may have looked in another step
            self._rates = DeviceRates()
        groups = self._rates.on_host(self.param_groups)
        read = self._options.read(groups)
        if groups is not self.param_groups:
            rates = [on_device(group.get("lr")) for group in self.param_groups]
            read = [o if lr is None else o.with_rate(lr) for o, lr in zip(read, rates, strict=True)]
        due = self.audits.due_text() if self.audits.num_steps + 1 >= self.audits.at else ""
        if due:  # ranks must audit alike
            read = [options._replace(text=f"{options.text}{due}") for options in read]
        return read

    def _agree(self, course: Course, early: BaseException | None) -> tuple[Binding, Proposal, int]:
        """Settle with all ranks what this step does: the plan, this rank's tensors, and whose gradients are anywhere.
        Nothing has changed when it raises.

        Between two talks nothing runs outside the guard: the other ranks wait for this one.
        """
        new = False  # all ranks make new plans
        while True:
            fault, options = Fault(), list[GroupOptions]()
            with fault:
                self._forget_other_world()
                if early is not None:
                    raise early
                options = self._read_options()
            if self.binding is None and (new or self.component is None):
                self.binding = self._bind(options, fault)
            proposal, verdict = self._vote(Phase.STEP, options, fault)
            if verdict.flags & Flag.STALE:
                self.binding, new = None, True
                continue
            assert self.binding is not None and proposal is not None, "all ranks have agreed"
            course.changing = True
            return self.binding, proposal, verdict.presence

    def _vote(self, phase: Phase, options: Sequence[GroupOptions], fault: Fault) -> tuple[Proposal | None, Verdict]:
        """Validate and vote. A verdict is that all go on alike, or that some plan is stale.

        Raises:
            Refused: On every rank.
        """
        binding, proposal = self.binding, None
        flags, digests = Flag.STALE, dict[Ranks, bytes]()
        with fault:
            self.watch.report()
            self.zeros.report()
            if binding is not None and is_current(binding, self.param_groups, options):
                memory = Memory(self.state, self.keeper, self.settled)
                proposal = validate(binding, self.param_groups, options, memory)
                flags, digests = Flag.NONE, digests_of(binding, proposal, options)
            if phase == Phase.STEP and self.audits.is_due:
                flags |= Flag.AUDIT
        if fault.text is not None:
            flags, digests = Flag.FAULT, {}
        component = self.component
        assert component is not None, "it is known before the first vote"
        ballot = Ballot(phase, flags, digests)
        if binding is not None:
            ballot = Ballot(phase, flags, digests, 0 if proposal is None else proposal.presence, binding.num_bits)
        verdict = vote(ballot, component)
        self.traffic.agreements += len(component) > 1
        goes_on = verdict.alike and not verdict.flags & ~Flag.AUDIT and verdict.phase == phase
        if verdict.flags & Flag.FAULT or not (goes_on or verdict.flags & Flag.STALE):
            refuse(component, binding, proposal, options, fault, verdict)
        if proposal is not None:
            proposal.audited = bool(verdict.flags & Flag.AUDIT)
        return proposal, verdict

    def complete_state(self) -> None:
        """Every trainable parameter has state, zeros where it never had a gradient: see [Note: state that is not there]
        in checkpoint/state.py. A frozen one keeps what it has of its group's kind."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    init_missing(p, group, self.state[p], self.keeper)
                elif self.state.get(p):
                    drop_others(group, self.state[p])
