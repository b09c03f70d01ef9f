"""Muon: one torch optimizer for matrices (orthogonalized momentum) and all other parameters (AdamW), with any sharding.

`Core` takes steps on parameter groups and their state. `Muon`, below, is a `Core` with the interface of
torch.optim.Optimizer; the host of a framework (host.py) may run further `Core`s. Read `Core.take_step` first.

In a step, each rank first reads everything that its step depends on, without changing anything (step/validate.py). Then
all ranks that are connected through shared parameters vote (comm/vote.py): either all raise the same error, or all
proceed (step/bucket.py). A failure after the vote leaves weights half updated. The optimizer then refuses to step until
state is loaded, and ranks that are waiting for the failed rank raise an error at once.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardmuon._torch import after_loading, before_loading, default_group, is_dtensor, never_compiled
from shardmuon.auditing.report import AuditError, AuditSchedule
from shardmuon.checkpoint.state import drop_others, init_missing, read_state
from shardmuon.comm.groups import (
    GroupRef,
    Ranks,
    Traffic,
    close_lane,
    group_for,
    group_ranks,
    my_rank,
)
from shardmuon.comm.vote import Ballot, Fault, Flag, Phase, current_world, in_order
from shardmuon.errors import HALF_DONE, RELOAD, REMEDY, ExchangeError, Refused, level_of_the_caller, made_public
from shardmuon.host import Host, Hosts, creates_state_only
from shardmuon.layout.bind import Listed, Table, TableCall
from shardmuon.layout.engines.base import MISPLACED, NONE, name_of
from shardmuon.layout.engines.fsdp1 import is_flattened
from shardmuon.momentum.keeper import Keeper, MomentumDtype
from shardmuon.options import (
    GROUP_DEFAULTS,
    PLACE_OPTIONS,
    Group,
    MuonConfig,
    OptionsReader,
    Settings,
    check_hyperparameters,
    complete,
    given_lr,
    loaded_over,
    new_group,
    refuse_sets,
    unknown_keyword,
)
from shardmuon.orthogonalize import FiniteWatch, MethodName
from shardmuon.orthogonalize.schedules import Coefficients
from shardmuon.plan.plan import Plan
from shardmuon.routing.groups import Overrides, RoutingRow, routed
from shardmuon.step.adamw import step_adamw
from shardmuon.step.binding import Binding, Offer, fingerprint
from shardmuon.step.stages import ZeroWatch, begin_weights, finish_weights
from shardmuon.step.validate import Memory, Proposal, difference, validate
from shardmuon.variants import WEIGHT_NORMS

if TYPE_CHECKING:
    from shardmuon.auditing.live import StepAudit
    from shardmuon.auditing.report import AuditReport


class Core:
    """Parameter groups with their state, and the step that updates them once all ranks have agreed to it.

    Attributes:
        param_groups, state: As in torch.optim.Optimizer. Frameworks replace both.
        config: Options of the whole optimizer.
        keeper: Object that creates and converts stored momentum.
        audits: Schedule of the audits, which compare a step with a dense reference.
        process_group: The process group on whose ranks plain (not DTensor) parameters are replicas.
        traffic: Counters of what this rank has sent and computed so far.
        routing: Table that shows which parameters of the model Muon or AdamW updates; empty if no model was given.
        binding: The current plan with this rank's parameters.
        component: The ranks that took part in the last vote.
        broken: Text about the failure of a step that left the ranks out of sync; None if there was none.
        options: Reader of the groups' options, which caches them.
        settled: Stored weight norms that a step has checked since they were created or loaded.
        hosts: Adapters to the frameworks that may call `step`.
        has_trained: True once some parameter had a gradient in a step.
    """

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    changing = False  # True once all ranks have agreed to a step: from then on, weights and state may be half updated
    in_step = False  # True during a step: `state_dict`, which a signal handler may call, then raises

    def __init__(
        self,
        config: MuonConfig,
        process_group: GroupRef | None,
        keeper: Keeper | None = None,  # default: a keeper made from `config`
        audits: AuditSchedule | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.config = config
        self.keeper = keeper or Keeper(config.momentum_dtype, config.momentum_device, config.stochastic_rounding)
        self.audits = audits or AuditSchedule(config.audit_every)
        self.process_group = process_group
        self.traffic = traffic or Traffic()
        self.routing: tuple[RoutingRow, ...] = ()
        self.broken: str | None = None
        self.component: Ranks | None = None
        self.world = current_world()  # the token of the default process group whose ranks `component` names
        self._forget_process()

    def _forget_process(self) -> None:
        """Reset all attributes that are meaningful in one process only: the plan, caches and hosts."""
        self.binding: Binding | None = None
        self.options = OptionsReader()
        self.watch = FiniteWatch()
        self.zeros = ZeroWatch()
        self.settled: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        self.hosts, self.has_trained = Hosts(), False

    def unlike_model(self) -> Sequence[str]:
        """Return the names of parameters whose values differ from the model's weights. Empty here; a host that updates
        copies of the weights overrides it."""
        return ()

    # ---------------------------------------------------------------------------------------------- one step

    def take_step(self, fault: Fault) -> None:
        """Take one step with the groups as they are. Collective among the ranks that share parameters.

        Args:
            fault: This rank's error so far, if it has one.

        Raises:
            Refused: Some rank has an error. Raised on every rank, before anything has changed.
        """
        with self._remembering():
            call = StepCall(self, fault)
            binding, verdict = call.agree(fault)
            self.changing = True
            report = self._carry_out(binding, call.proposal, verdict)
        if report is not None:
            self.audits.deliver(report)

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Record an error raised inside the `with` block, so that later steps are refused. `Refused` is not recorded:
        all ranks raise it, before anything has changed."""
        self.changing = False
        try:
            yield
        except Refused:
            raise
        except BaseException as error:
            self._note(error)
            raise

    def _carry_out(self, binding: Binding, proposal: Proposal, verdict: Ballot) -> AuditReport | None:
        """Update weights and state, after all ranks have agreed to the step. Return the report of the step's audit;
        None if there was no audit."""
        if binding.elsewhere:
            proposal.hear(binding, verdict.presence)
        if proposal.made or proposal.fresh or MISPLACED in proposal.states:
            self._take_over(binding, proposal)
        # an audit is collective: if any rank has requested one, all ranks that voted take part
        audit = self._audit(binding, proposal) if verdict.flags & Flag.AUDIT else None
        self.audits.num_steps += 1
        missing = frozenset[int]()  # indices of parameters without a gradient
        if NONE in proposal.states:
            missing = frozenset(n for n, state in enumerate(proposal.states) if state == NONE)
        on_weights = binding.on_weights - missing
        if on_weights:
            new = frozenset(n for n in on_weights if not set(WEIGHT_NORMS).isdisjoint(proposal.fresh[n]))
            begin_weights(binding.weight_sets(new), proposal, self.traffic, self.zeros)
        binding.buckets_without(missing).run(proposal, self.watch, self.traffic)
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
        if audit is None:
            return None
        report = audit.finish()
        return report if audit.samples else None

    def _take_over(self, binding: Binding, proposal: Proposal) -> None:
        """Install the state that validation has created, and redistribute gradients whose placements differ from those
        of their parameters."""
        for number, made in proposal.made.items():
            kept = self.state[binding.members[number].param]
            kept.clear()  # also removes state left over from AdamW or from another variant
            kept.update(made)
        for number, keys in proposal.fresh.items():
            for key in keys:
                self.settled[self.state[binding.members[number].param][key]] = True
        # redistribution is collective, so all ranks process parameters in the same order
        for number in itertools.chain.from_iterable(binding.table.sets.values()):
            if proposal.states[number] == MISPLACED:
                param, engine = binding.members[number].param, binding.members[number].engine
                assert param.grad is not None
                proposal.grads[number] = engine.storage(engine.align(param.grad, param))

    def _audit(self, binding: Binding, proposal: Proposal) -> StepAudit:
        """Begin an audit of this step and return it. Collective; never raises."""
        from shardmuon.auditing.live import StepAudit

        audit = StepAudit(self, binding, proposal, self.audits, self.audits.due)
        self.audits.num_audits += self.audits.due > 0
        return audit

    def _note(self, error: BaseException) -> None:
        """Record an error that interrupted a step after its first change or while other ranks were waiting, so that
        further steps are refused."""
        if isinstance(error, AuditError):  # raised when a framework's step has updated only some of the groups
            self.broken = f"{error}. Groups and weights that come after these are as before. {REMEDY}"
            return
        if self.broken is not None:  # the `Core` of a host has recorded the error and closed the connections
            return
        component = self.last_voters() or ()
        alone = default_group() is None or len(component) == 1
        if self.changing or not alone:
            text = f"{type(error).__name__}: {error}".rstrip(": .\n")
            self.broken = f"{text}. {HALF_DONE}. {RELOAD if alone else REMEDY}"
            if isinstance(error, ExchangeError):  # the error's message already has the consequences and the remedy
                self.broken = str(error)
        if self.changing and len(component) > 1:
            close_lane(component)  # ranks that are waiting for this rank then fail at once

    def last_voters(self) -> Ranks | None:
        """Return the ranks of the last vote; None if there was none under the current default process group."""
        return self.component if self.world == current_world() else None

    def torn(self) -> str | None:
        """Return the reason why the state may be only partly updated, with a remedy; None if the last step was
        completed."""
        if self.in_step:
            return (
                "a step is under way, and its state is half moved. Save when step() has returned: set a flag in the "
                "signal handler"
            )
        if self.broken is not None:
            return f"an earlier step was broken off, and its state is half moved: {self.broken}"
        return None

    def make_plan(self) -> Plan:
        """Make a plan without taking a step. Collective among the ranks that share parameters.

        Raises:
            ValueError: Some rank cannot plan. Raised on every rank. A rank that fails to create a process group raises
                alone, and the other ranks raise in the next step.
        """
        fault = Fault()
        with made_public():
            binding = StepCall(self, fault).renewed(fault)
            if fault.text is not None:  # found after ranks last exchanged errors; others learn of it in the next step
                raise Refused(fault.text, fault.cause)
        return binding.plan

    @torch.no_grad()
    def complete_state(self) -> None:
        """Create the missing state of every trainable parameter (zeros if it never had a gradient): see [Note: state
        that is not there] in checkpoint/state.py. Frozen parameters get no new state; existing state of theirs is
        removed if it does not fit their group."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    init_missing(p, group, self.state[p], self.keeper)
                elif self.state.get(p):
                    drop_others(group, self.state[p])


class StepCall(TableCall[Binding]):
    """One rank's part in the agreement on a step, or on a plan without a step. Implements `Call` of comm/vote.py.

    Attributes:
        options: Settings of each group; None for groups that AdamW updates.
        proposal: The step that this rank would take.
    """

    phase = Phase.STEP
    renews = False
    proposal: Proposal
    _due = ""  # text about an audit of this step, which must be equal on all ranks

    def __init__(self, core: Core, fault: Fault) -> None:
        self._core = core
        self.options: list[Settings | None] = []
        if core.process_group is not None:
            with fault:  # other ranks of the group wait for this rank even if it has no parameters
                self.beyond = tuple(sorted(group_ranks(core.process_group)))  # raises if the group was destroyed

    def before(self) -> Ranks | None:
        return self._core.last_voters()

    def known(self) -> Binding | None:
        return self._core.binding

    def is_current(self, kept: Binding) -> bool:
        groups = self._core.param_groups
        self.options = self._core.options.read(groups)
        if len(self.options) != len(kept.planned):
            return False
        found = []  # frameworks may replace parameters at any time; `Offer` selects the same ones
        for number, (settings, planned) in enumerate(zip(self.options, kept.planned, strict=True)):
            if planned != ("" if settings is None else settings.planned):
                return False
            if settings is not None:
                found += [(p, number) for p in groups[number]["params"] if p.requires_grad or p.grad is not None]
        if len(found) != len(kept.members):
            return False
        for (p, number), member in zip(found, kept.members, strict=True):
            if member.param is not p or member.group != number or member.engine.signature(p) != member.signature:
                return False
        return True

    def read(self, kept: Binding) -> Ballot:
        core, audits, flags = self._core, self._core.audits, Flag.NONE
        if core.watch.coming:
            core.watch.report()
        if core.zeros.coming:
            core.zeros.report()
        core.traffic.agreements += len(kept.component) > 1
        # `due` takes longer than the first test, which is false for optimizers that never audit
        if (audits.every or audits.asked) and audits.due:
            self._due, flags = audits.due_text(), Flag.AUDIT
        memory = Memory(core.state, core.keeper, core.settled)
        self.proposal = validate(kept, core.param_groups, self.options, memory)
        digests = self.proposal.digests(kept, self._due) if len(kept.component) > 1 else None
        return Ballot(self.phase, flags, digests, self.proposal.presence, kept.num_bits)

    def lines(self, kept: Binding, ranks: Ranks) -> list[Any]:
        return self.proposal.lines(kept, ranks, self._due)

    def difference(self, ranks: Ranks, everyone: Sequence[list[Any] | None]) -> str:
        return difference(ranks, everyone)

    # -------------------------------------------------------------------------------------------------- a new plan

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        # AdamW's DTensors are included so that the ranks that share them learn of each other's errors
        return [
            (name_of(group, index, position), p, group)
            for index, group in enumerate(self._core.param_groups)
            for position, p in enumerate(group["params"])
            if group.get("use_muon") or is_dtensor(p)
        ]

    def listed(self) -> list[Listed]:
        core = self._core
        self.options = core.options.read(core.param_groups)
        self._offer = Offer(core.param_groups, self.options, core.config, core.keeper)
        self.groups = {ranks: ref.group_name for ranks, ref in self._offer.refs.items()}
        self.stamp, self.fingerprint = self._offer.stamp, fingerprint
        return self._offer.listed

    def made(self, table: Table) -> tuple[Binding, dict[Ranks, int]]:
        # the second result is sent to the other ranks: for each set of ranks that share parameters, the number of
        # parameters whose gradients some of them may lack
        made = self._offer.bind(my_rank(), table)
        sets = made.weight_sets(made.on_weights)
        needed = in_order([*(one.ranks for one in made.buckets if one.exchange), *(one.ranks for one in sets)])
        self._groups = {r: self._offer.refs[r].live() if r in table.groups else None for r in needed}
        return made, made.num_lacking

    def heard(self, kept: Binding, everyone: Sequence[dict[Ranks, int]]) -> None:
        # process groups are created before the first exchange: creation is collective, and a rank that already waits
        # for tensors could not take part
        for ranks, known in self._groups.items():
            group_for(ranks, known)
        kept.number_bits(everyone)
        self._core.binding, self._core.component, self._core.world = kept, kept.component, kept.world


def _trained(groups: Sequence[Group]) -> bool:
    """Return True if some parameter had a gradient in a step; warn if none had. Later steps then need no check."""
    params = [p for group in groups for p in group["params"]]
    if any(p.grad is not None for p in params):
        return True
    if any(p.numel() > 0 or not is_flattened(p) for p in params):  # one of FSDP1 may have no elements on this rank
        warnings.warn(
            "no parameter of this optimizer has a gradient, so this step trained nothing. Call backward() before it. "
            "If you did, the model's parameters are other tensors by now: make the optimizer after fully_shard(), "
            "FSDP() or whatever else replaced them",
            stacklevel=level_of_the_caller(),
        )
    return False


_SEVERAL_PLANS = "DeepSpeed steps groups one by one, each by its own plan: print(*optimizer.plans)"


class Muon(Core, Optimizer):
    """Muon for matrices and AdamW for all other parameters, with the same update however the weights are sharded.

    For each matrix W with gradient G, momentum B, learning rate lr, decay wd and scale s:

        B <- mu B + (1 - mu) G
        U  = mu B + (1 - mu) G   (Nesterov), or B
        W <- (1 - lr wd) W - lr s(rows, cols) NS(U)

    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the form of torch.optim.Muon.) W is always the
    whole logical matrix, never a shard. Each matrix is orthogonalized once in the job, and s depends on its global
    shape.

    The first `step()` (or `prepare()`) reads the layout from the parameters themselves (DTensor mesh and placements)
    and plans, together with the other ranks, which rank orthogonalizes which matrix. All ranks that are connected by
    shared parameters vote before each step. Ranks that share matrices run two all-to-alls for each bucket of matrices.
    Every rank must call `step()`.

    Args:
        params: A module (routed by `shardmuon.param_groups`), parameters, `named_parameters()`, or group dicts. A group
            may set any option from `lr` to `tp_group`, and:
            ``use_muon`` (True): False sends the group to AdamW with ``betas`` ((0.9, 0.95)), ``eps`` (1e-8), ``lr`` and
            ``weight_decay``;
            ``view``, ``split_sizes``, ``split_groups``, ``transposed``: which matrices a parameter holds, see
            `shardmuon.layout.views.matrix_view`.
        lr: Learning rate, a float or a one-element tensor. Required; groups may have their own. docs/learning_rate.md.
        weight_decay: Factor wd of the decay.
        momentum: Factor mu.
        nesterov: Use Nesterov momentum.
        ns_coefficients: Name of a schedule ("keller", "quintic", "polar_express", .., see `shardmuon.schedule`), (a, b,
            c) of one Newton-Schulz step, or one triple per step. Coefficients that flip signs or diverge are refused.
        ns_steps: Number of Newton-Schulz steps (ignored if there is a triple per step). Default: the schedule's own
            number, or 5 for a single triple.
        adjust_lr_fn: Name of the scale s, which depends on the global shape of the matrix: None or "original" for
            `sqrt(max(1, rows/cols))`, "match_rms_adamw" for `0.2 sqrt(max(rows, cols))`, "spectral" for
            `sqrt(max(rows, cols))`, "unit_rms_norm" for `sqrt(rows/cols)`, "none" for 1. docs/learning_rate.md lists
            the names that other libraries use.
        variant: Name of a variant ("normuon", "hyperball", .., see docs/variants.md), or several joined by "+"
            ("muon_eq+cautious").
        process_group: Process group on whose ranks plain (not DTensor) parameters are replicas, as under DDP; its ranks
            share the work. Planning checks that the replicas are equal. Default: every rank orthogonalizes its own
            plain tensors. In a parameter group, () means that no other rank has its tensors (experts). Not pickled.
        tp_group: Tensor-parallel group, as a process group or global ranks. Plain parameters are shards over this group
            if TransformerEngine, Megatron or the user has marked them (`tensor_model_parallel`, `partition_dim`,
            `partition_stride`), and replicas otherwise. `process_group` then contains the ranks with the same shards.
            See docs/tensor_parallel.md. Default: none; marked shards are refused.
        method: "standard": fp32 norm, then Newton-Schulz in batches. "gram": the same steps iterated on the m x m Gram
            matrix, up to twice as fast for long matrices. "auto": "gram" if it takes at least a quarter less time at
            the peak rates of both dtypes, else "standard"; depends on shape, schedule, dtype and kind of device only.
            The plan prints the choice and its reason. "torch": torch.optim.Muon's arithmetic bit for bit (bf16 cast
            before the norm is computed).
        ns_dtype: Torch dtype of the matrix products. None: "standard" uses bfloat16 where the device multiplies it in
            hardware, float32 on other CPUs; "gram" uses float16 on accelerators, float32 on CPUs. Ignored by "torch",
            which uses bfloat16. Data sent between ranks is bfloat16 if products are bfloat16 or float16 (rounded with
            any sharding, even with one process), float64 if parameters or products are float64, else float32.
        momentum_dtype: Dtype of stored momentum: None (the gradient's dtype, in which it is then also computed),
            torch.float32, torch.bfloat16 or "int8" (all three computed in fp32). docs/memory.md.
        momentum_device: Device of stored momentum: None (the parameter's) or "cpu".
        stochastic_rounding: Round bf16 weights at random, without bias, after each update.
        bucket_bytes: Maximum size, in bytes, of the whole matrices that one rank orthogonalizes per bucket. None: the
            planner chooses the cheapest size, within the bound that `shardmuon.plan.plan.Policy` states.
        audit_every: Compare the first step and every `audit_every`-th step with a dense reference. If such a step
            differs from Muon's, every rank raises AuditError once the step is complete. None: audit a step only if
            `shardmuon.audit` requests it. docs/audit.md.
        adamw_lr: Learning rate of all parameters that are not matrices; only if `params` is a module. Default: the rate
            at which AdamW's updates are as large as those of the matrices; `shardmuon.param_groups` prints it.
            docs/learning_rate.md.
        overrides: Changes to which of a module's parameters Muon updates, see `shardmuon.param_groups`.

    Raises:
        ValueError: An option or a parameter does not fit. The message has its name, what was found and what to write.
            `step()` raises on every rank of a group or on none, before anything has changed.
        TypeError: A keyword is unknown (the message says what to write), parameters are in a set, whose order differs
            between ranks, or a parameter is not a tensor or has an integer or complex dtype.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = Muon([{"params": [model[0].weight, model[2].weight]},
        ...                   {"params": [model[0].bias, model[2].bias], "use_muon": False}], lr=0.02)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Coefficients | Sequence[Coefficients] = (3.4445, -4.7750, 2.0315),
        *,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = None,
        variant: str | None = None,
        process_group: Any = None,
        tp_group: Any = None,
        method: MethodName = "auto",
        ns_dtype: torch.dtype | None = None,
        momentum_dtype: MomentumDtype = None,
        momentum_device: Literal["cpu"] | None = None,
        stochastic_rounding: bool = False,
        bucket_bytes: int | None = None,
        audit_every: int | None = None,
        adamw_lr: float | Tensor | None = None,
        overrides: Overrides | None = None,
        **unknown: NoReturn,
    ) -> None:
        for key in unknown:
            raise unknown_keyword(key)
        lr = given_lr("Muon", lr)
        config = MuonConfig(
            method=method,
            ns_dtype=ns_dtype,
            momentum_dtype=momentum_dtype,
            momentum_device=momentum_device,
            stochastic_rounding=stochastic_rounding,
            bucket_bytes=bucket_bytes,
            audit_every=audit_every,
        )
        Core.__init__(self, config, GroupRef.of(process_group))
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "variant": variant,
            **GROUP_DEFAULTS,
            "process_group": self.process_group,
            "tp_group": GroupRef.of(tp_group, "tp_group"),
        }
        check_hyperparameters("", defaults)
        refuse_sets("Muon: parameters", params, "a list, or model.named_parameters()")
        routing = {"adamw_lr": adamw_lr, "overrides": overrides}
        params = routed(params, defaults, routing)
        self.routing = getattr(params, "rows", ())
        Optimizer.__init__(self, cast(Any, params), defaults)

    # ---------------------------------------------------------------------------------------------- one step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @never_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters once. Collective among the ranks that share parameters.

        Args:
            closure: Function that reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: Gradients, options or state are invalid on some rank, or a rank failed while reading them.
                Raised on every rank; nothing has changed. (A rank that runs out of memory raises its own
                OutOfMemoryError instead.)
            ExchangeError: A rank died, hung or failed in the middle of a step. The message has the bucket and phase.
                After this or any other exception in the middle of a step, even a KeyboardInterrupt, and even with one
                process, the optimizer refuses to step until the last checkpoint is reloaded.
        """
        if self.broken is not None:
            self._host.restore_groups(self)
            raise ExchangeError(f"an earlier step was broken off: {self.broken}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fault, instead, host = Fault(), None, None
        with fault:  # errors raised in this block are sent to the other ranks in the vote
            imported = sys.modules.keys()
            for one in self.hosts:
                if one.packages is not None and imported.isdisjoint(one.packages):
                    continue  # the host's framework is not imported
                if host is None and one.is_active:
                    host = one
                instead = instead or one.instead_of_step(self, closure is None)
            if closure is None and instead is None and not self.state and creates_state_only():
                instead = self.complete_state
        if fault.text is not None:
            host = self.hosts.active
        self.in_step = True
        try:
            if instead is not None:
                instead()
            elif host is not None:
                with self._remembering():
                    host.step(self, fault)
            else:
                self.take_step(fault)
                self.has_trained = self.has_trained or _trained(self.param_groups)
        except Refused as refused:
            error = refused.public()
            raise error from error.__cause__
        finally:
            self.in_step = False
        return loss

    @property
    def _host(self) -> Host:
        """The host whose own tensors are in the groups, or a plain `Host` if they are the user's parameters."""
        return self.hosts.active or Host()

    def __repr__(self) -> str:
        """Format the optimizer's non-default options and the options of each group."""
        return f"Muon (\n{self.config.text_with(self.param_groups)}\n)"

    def prepare(self) -> Plan:
        """Make the plan now instead of at the first step. Collective among the ranks that share parameters.

        Returns:
            The plan. `print(plan)` shows for each matrix its route, its bucket, and the rank that orthogonalizes it.
        """
        if self._host.in_parts:
            raise ValueError(_SEVERAL_PLANS)
        return self.make_plan()

    @property
    def plan(self) -> Plan | None:
        """The current plan; None before the first step, unless `prepare()` has made one.

        Raises:
            AttributeError: There may be several plans, as under DeepSpeed, which steps groups one by one. Use `plans`.
        """
        if self._host.in_parts:
            raise AttributeError(_SEVERAL_PLANS)
        return next(iter(self.plans), None)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All current plans: `plan`, or one for each set of groups that DeepSpeed has stepped together."""
        return self._host.plans(self)

    # ------------------------------------------------------------------------------------ groups and options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking that its options are valid and fit each of its parameters.

        Raises:
            ValueError: An option or a parameter does not fit; the optimizer is unchanged.
            TypeError: The parameters are in a set, or a parameter is not a tensor or has an integer or complex dtype.
        """
        for host in self.hosts:
            host.adding()
        super().add_param_group(new_group(self.param_groups, param_group, self.defaults))
        made, index = self.param_groups[-1], len(self.param_groups) - 1
        names = [name_of(made, index, position) for position in range(len(made["params"]))]
        for host in self.hosts:
            host.added(made, names)

    # ----------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict in torch's format, without process groups. Once there is any state, the dict has an
        entry for every trainable parameter on every rank.

        Raises:
            ExchangeError: A step was interrupted or is in progress. Its state must not replace the last good
                checkpoint.
        """
        torn = self.torn()
        if torn is not None:
            raise ExchangeError(torn)
        if any(self.state.values()) and self.hosts.active is None:
            self.complete_state()
        for host in self.hosts:
            host.saving(self)
        saved: dict[str, Any] = super().state_dict()
        for host in self.hosts:
            host.saved(self, saved)
        for group in saved.get("param_groups", []):
            group.update(dict.fromkeys(PLACE_OPTIONS))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state and the options of every group. Momentum is converted to the dtype and device given by this
        optimizer's `momentum_dtype` (default: the gradient's dtype) and `momentum_device`.

        This works before the first step and after any step. Everything is checked before anything changes: parameter
        names (if both sides have them), number and shapes, state keys, options. A state dict that was saved with
        another sharding must be loaded through torch.distributed.checkpoint. State of other optimizers is refused,
        except that of torch.optim.Muon, which has the same meaning.

        Raises:
            ValueError: The state dict does not fit; the optimizer is unchanged.
        """
        host = self.hosts.active
        if host is not None:  # the state dict has flat parameters with the same sharding as this host's
            with made_public():
                host.load(self, lambda: host.take_over(self, state_dict))
            return
        self.take_loaded(*read_state(self.param_groups, before_loading(self, state_dict), self.keeper))

    def take_loaded(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Install state and groups that were read from a state dict and checked."""
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        self.settled.clear()  # norms are no longer checked: the tensors may now hold loaded values
        after_loading(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickled state. Options that a saved group lacks (as in checkpoints of torch.optim.Muon) keep this
        optimizer's values."""
        mine = self.__dict__.get("param_groups", [])  # empty while unpickling
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            group.update(loaded_over(mine[index] if index < len(mine) else {}, group))
            complete(group, self.defaults)
        self.broken = state.get("broken")  # loading a state dict clears this, copying the optimizer does not
        if "hosts" not in self.__dict__:  # this is a copy: plan, process groups and hosts stay with the original
            self.process_group = None
            self._forget_process()

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """Copy the optimizer, with its process group."""
        made: Muon = memo.setdefault(id(self), self.__class__.__new__(self.__class__))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made.process_group = self.process_group
        for mine, theirs in zip((made.defaults, *made.param_groups), (self.defaults, *self.param_groups), strict=True):
            mine["process_group"] = theirs["process_group"]  # without a process group, replicas would silently diverge
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without objects that are valid in one process only: the plan,
        process groups and hosts. It has the ranks of the last vote, so that a copy votes together with ranks that made
        no copy and still have a plan."""
        own = {key: self.__dict__[key] for key in _OWN}
        state = super().__getstate__()
        groups = list(map(_without_ranks, state["param_groups"]))
        return {**state, **own, "param_groups": groups, "defaults": _without_ranks(state["defaults"])}


def _without_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Copy the options with `process_group` set to None, unless it is empty, which means that no other rank has the
    tensors."""
    group = options.get("process_group")
    return {**options, "process_group": None} if getattr(group, "ranks", group) else options


# attributes that copies and pickles include; a pickle's `world` is unknown in every other process
_OWN = ("config", "keeper", "audits", "traffic", "routing", "broken", "component", "world")
