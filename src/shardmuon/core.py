"""One agreed step over groups and state. `Muon` is the torch.optim face over it; a framework's host may run others.

Read `Core.take_step` first: it is the flow of docs/architecture.md in the order in which it happens.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardmuon._torch import default_group, local_if_any
from shardmuon.auditing.report import AuditReport
from shardmuon.auditing.schedule import AuditError, AuditSchedule
from shardmuon.checkpoint.state import drop_others, init_missing
from shardmuon.comm.exchange import Traffic
from shardmuon.comm.groups import GroupRef, group_ranks, wire_device
from shardmuon.engines.base import NONE
from shardmuon.engines.tensor_parallel import gather_shards
from shardmuon.errors import HALF_DONE, RELOAD, REMEDY, ExchangeError, Refused, made_public
from shardmuon.host import Host, Hosts
from shardmuon.momentum.keeper import Keeper, offloaded_from
from shardmuon.options import OPTION_OBJECTS, Audit, Exchange, Orthogonalizer, Storage, check_objects, view_options
from shardmuon.orthogonalize import FiniteWatch, default_dtype
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.planning.plan import Plan
from shardmuon.planning.types import Policy
from shardmuon.ranks.council import Faults
from shardmuon.routing.groups import RoutingRow
from shardmuon.stepping.adamw import step_adamw
from shardmuon.stepping.agreement import agree
from shardmuon.stepping.binding import Binding, bind
from shardmuon.stepping.candidates import all_sharers, find_candidates
from shardmuon.stepping.kept import Settled
from shardmuon.stepping.rates import with_value
from shardmuon.stepping.reading import Reading, Sources, read
from shardmuon.stepping.run import run_buckets
from shardmuon.stepping.weight_stages import stages_on_weights
from shardmuon.stepping.work import Kernel, ParamWork
from shardmuon.stepping.zero_weights import ZeroWatch
from shardmuon.variants import stages_of, stages_text

if TYPE_CHECKING:
    from shardmuon.auditing.live import StepAudit


class Course:
    """How far a step has come. `changing`: all ranks have agreed to it, and what it changes may be half changed."""

    changing = False


@dataclass(frozen=True, slots=True)
class Config:
    """Options of a whole optimizer, as its constructor was given them."""

    orthogonalizer: Orthogonalizer = Orthogonalizer()
    exchange: Exchange = Exchange()
    storage: Storage = Storage()
    audit: Audit = Audit()

    def __post_init__(self) -> None:
        check_objects({key: getattr(self, key) for key in OPTION_OBJECTS})

    @property
    def ns_device(self) -> torch.device | None:
        """Where matrices are orthogonalized, if the user said so."""
        device = self.orthogonalizer.device
        return None if device is None else torch.device(device)

    def text(self) -> str:
        """Equal on ranks that do the same. Devices may differ from rank to rank."""
        here = replace(self.orthogonalizer, device=None, tuning=None), replace(self.storage, momentum_device=None)
        measured = self.orthogonalizer.chooser().measured
        text = repr((*here, self.exchange, self.audit))
        return text if measured is None else f"{text}, tuning file of digest {measured.digest}"


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
        storage, audit = config.storage, config.audit
        self.config = config
        self.keeper = keeper or Keeper(storage.momentum_dtype, storage.momentum_device, storage.stochastic_rounding)
        self.audits = audits or AuditSchedule(audit.every, audit.samples, audit.action)
        self.process_group = process_group
        self.traffic = traffic or Traffic()
        self.routing: tuple[RoutingRow, ...] = ()
        self.broken: str | None = None
        self._forget_process()

    def _forget_process(self) -> None:
        """Begin without what belongs to one process."""
        self.binding: Binding | None = None
        self.graphs = GraphCache() if self.config.orthogonalizer.cuda_graphs else None
        self.watch = FiniteWatch()
        self.zeros = ZeroWatch()
        self.settled: Settled = WeakIdKeyDictionary()
        self.hosts = Hosts()
        # made here, so that nothing can be raised before the guard of a step: see [Note: one guard]
        self._config_text = self.config.text()
        self._chooser = self.config.orthogonalizer.chooser()

    def over(self, groups: Sequence[Mapping[str, Any]], audits: AuditSchedule | None = None) -> Core:
        """Another core with these options over other groups: its own plan and state, and this one's traffic. It talks
        with those who share its groups, and not over `process_group`: others may step other groups meanwhile.

        Args:
            groups: Complete groups.
            audits: Default: those of this core from now on, on its own.
        """
        made = Core(self.config, None, self.keeper, audits or copy.copy(self.audits), self.traffic)
        made.param_groups = [dict(group) for group in groups]
        made.state = defaultdict(dict)
        return made

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
        """Step groups that hold an active host's tensors. AdamW's are stepped as they are."""
        course = Course()
        try:
            host.step(self, course, early)
            course.changing = True
            step_adamw(self.param_groups, self.state, set)
        except Refused:
            raise
        except BaseException as error:
            if not host.tells_later(error):
                self.remember(error, course)
                raise
        host.conclude(self)

    def _carry_out(self, binding: Binding, work: dict[int, ParamWork], kernel: Kernel) -> AuditReport | None:
        """A step that all ranks have agreed to. Returns what an audit of it has found."""
        self.audits.num_steps += 1
        samples = self.audits.begin() if self.audits.num_steps >= self.audits.at else None
        audit = None if samples is None else self._audit(binding, work, samples)
        ranks = [p.rank_bucket.bucket.ranks for p in binding.programs]
        devices = [wire_device(d, kernel.device, r) for d, r in zip(binding.devices, ranks, strict=True)]
        on_weights = stages_on_weights(binding, work, self.traffic, self.zeros)
        if on_weights is not None:
            on_weights.start()
        run_buckets(binding.programs, work, kernel, devices, self.traffic)
        if on_weights is not None:
            on_weights.finish()
        self.watch.send()
        candidates = binding.candidates
        step_adamw(
            self.param_groups,
            self.state,
            lambda: {candidates[index].engine for index in work},
        )
        return None if audit is None else audit.finish()

    def _audit(self, binding: Binding, work: Mapping[int, ParamWork], samples: int) -> StepAudit:
        """Begin an audit of this step. Collective; never raises."""
        from shardmuon.auditing.live import StepAudit

        now = {index: of._replace(settings=with_value(of.settings)) for index, of in work.items()}
        audit = StepAudit(self, binding, now, self.audits, samples)
        self.audits.num_audits += samples > 0
        return audit

    def remember(self, error: BaseException, course: Course) -> None:
        """A step that ended between its first change and its last, or left other ranks waiting, must be the last."""
        if isinstance(error, AuditError):  # raised out of the framework's step, with more to do in it
            self.broken = f"{error}. Groups and weights that come after these are as before. {REMEDY}"
            return
        alone = default_group() is None or (self.binding is not None and not self.binding.members)
        if self.broken is None and (course.changing or not alone):
            known = isinstance(error, ExchangeError)
            text = f"{type(error).__name__}: {error}".rstrip(": .\n")
            self.broken = str(error) if known else f"{text}. {HALF_DONE}. {RELOAD if alone else REMEDY}"

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
        with made_public():
            self.binding = self._bind((), early)
        return self.binding.plan

    # ------------------------------------------------------------------------------- before anything changes

    @torch.no_grad()
    def _bind(self, groups: Iterable[tuple[int, ...]], early: BaseException | None = None) -> Binding:
        """A plan for the parameters as they are now, settled with these groups of ranks too.

        What is raised while this rank looks at its parameters becomes what it tells the others, as in `read`.
        """
        known: dict[tuple[int, ...], Any] = {}
        if self.process_group is not None and len(group_ranks(self.process_group)) > 1:  # raises if it was destroyed
            known[tuple(sorted(group_ranks(self.process_group)))] = self.process_group
        policy, chooser, device = Policy(), self._chooser, torch.device("cpu")
        faults = Faults()
        grids: dict[tuple[int, ...], Any] = {}
        try:
            faults, grids = gather_shards(self.param_groups)
            if early is not None:
                raise early
            candidates, fault, waiting = find_candidates(self.param_groups, self._options_text, self.keeper.rounds)
            device = next((p.device for g in self.param_groups for p in g["params"]), device)
            ns_device = self.resolved_ns_device()
            chooser = replace(self._chooser, device=ns_device)
            faults.add(fault)
            exchange, (wire, narrows) = self.config.exchange, self._wire()
            policy = Policy(exchange.route, exchange.bucket_bytes, wire.itemsize, narrows)
        except BaseException as wrong:
            faults.catch(wrong)
            candidates, waiting = [], all_sharers(self.param_groups)
        return bind(
            candidates,
            policy,
            chooser,
            check_replicas=self.config.exchange.check_replicas,
            device=device,
            faults=faults,
            known=dict.fromkeys(groups) | grids | waiting | known,
            check_layout=self.keeper.check_layout,
        )

    def _agree(self, course: Course, early: BaseException | None) -> tuple[Binding, dict[int, ParamWork], Kernel]:
        """Settle with all ranks what this step does: the plan in force, each parameter's local storages, the kernel.

        Between the plan and the agreement nothing runs but `read`, in its guard: see [Note: one guard].
        """
        sources = Sources(
            self.param_groups,
            self.state,
            self.keeper,
            self._options_text,
            self.kernel,
            self._remarks,
            self.settled,
        )
        known: Iterable[tuple[int, ...]] = ()
        try:
            if self.binding is not None and self.binding.world() is not default_group():
                self.binding = None  # all ranks have joined another default group, perhaps under other numbers
        except BaseException as wrong:
            early = early or wrong
        while True:
            binding = self.binding = self.binding or self._bind(known, early)
            count = len(binding.candidates)
            reading = Reading([NONE] * count, [""] * count)
            try:
                if early is not None:
                    raise early
                self.watch.report()
                self.zeros.report()
                read(reading, binding, sources)
            except BaseException as wrong:
                reading.fail(wrong)
            mine = reading.states, reading.texts, reading.error, reading.stale
            if not agree(binding, *mine, self.traffic, reading.cause):
                course.changing = True
                assert reading.kernel is not None, "all ranks have agreed"
                return binding, reading.begin(binding, sources), reading.kernel
            self.binding, known = None, tuple(binding.members)

    def _remarks(self) -> str:
        """What an audit needs the ranks to agree on."""
        return self.audits.due_text() if self.audits.num_steps + 1 >= self.audits.at else ""

    def _options_text(self, group: Mapping[str, Any]) -> str:
        """Every option that ranks must agree on and that a plan is made for."""
        view = {key: list(value) if isinstance(value, tuple) else value for key, value in view_options(group).items()}
        cut = group["partition_dim"], group["partition_stride"]
        products = self._products_in(group)
        text = repr((self._config_text, products, view, group["rank_local"], cut))
        stages = stages_of(group)
        return f"{text} {stages_text(stages)}" if stages else text

    def _products_in(self, group: Mapping[str, Any]) -> str:
        """The dtype that products have by default, where the user names none. It hangs on the device, and on CPUs on
        what they multiply in hardware, which may differ from rank to rank."""
        asked = self.config.orthogonalizer
        if asked.products_dtype is not None or not group["params"]:
            return ""
        first = group["params"][0]
        device = self.config.ns_device or offloaded_from(first) or first.device
        method = "standard" if asked.method == "auto" else asked.method
        return f"products={default_dtype(method, device)}"

    def complete_state(self) -> None:
        """Every trainable parameter has state, zeros where it never had a gradient: see [Note: state that is not there]
        in checkpoint/state.py. A frozen one keeps what it has of its group's kind."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    init_missing(p, group, self.state[p], self.keeper)
                elif self.state.get(p):
                    drop_others(group, self.state[p])

    def kernel(self) -> Kernel:
        """What all matrices of a step have in common."""
        wire, narrows = self._wire()
        return Kernel(wire, narrows, self.graphs, self.resolved_ns_device(), self.watch)

    def resolved_ns_device(self) -> torch.device | None:
        """None: where the parameters are."""
        if self.config.ns_device is not None:
            return self.config.ns_device
        muon = (p for g in self.param_groups if g["use_muon"] for p in g["params"])
        return next((d for d in map(offloaded_from, muon) if d is not None), None)

    def _wire(self) -> tuple[torch.dtype, bool]:
        """The dtype of matrices on the wire, and True if those with half-precision products travel in bf16 all the
        same: see `Exchange.dtype`."""
        exchange, asked = self.config.exchange, self.config.orthogonalizer
        if exchange.dtype is not None:
            return exchange.dtype, False
        muon = (p for g in self.param_groups if g["use_muon"] for p in g["params"])
        wide = asked.method == "reference" or asked.products_dtype == torch.float64
        if wide or any(local_if_any(p).dtype == torch.float64 for p in muon):
            return torch.float64, False  # fp64 gradients may lie outside the range of fp32
        return torch.float32, True
