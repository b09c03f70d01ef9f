"""`Muon`, a torch optimizer that updates matrices with orthogonalized momentum and all other parameters with AdamW.
Parameters can be sharded in any way.

The class `Core` takes steps on parameter groups and their state. The class `Muon` is a `Core` with the interface of
torch.optim.Optimizer. Framework integrations (see host.py) can create further `Core`s. To read the code, start at
`Core.take_step`.

In a step, each rank first validates all data on which its step depends, without changing anything (step/validate.py).
Then all ranks that are connected by parameters, directly or through other ranks, vote (comm/vote.py). (Two ranks are
connected if a parameter is sharded or replicated over them.) Either all connected ranks raise the same error, or all of
them update their weights (step/bucket.py).

A failure after the vote can leave weights half updated. The optimizer then refuses further steps until a state dict is
loaded. Ranks that are waiting for the failed rank raise an error at once.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardmuon._torch import default_group, is_dtensor, local_if_any, without_autocast
from shardmuon.auditing.report import AuditError, AuditReport, AuditSchedule
from shardmuon.checkpoint.state import init_missing, read_state
from shardmuon.comm.groups import GroupRef, Lane, Ranks, Traffic, group_for, group_ranks, my_rank
from shardmuon.comm.vote import Ballot, Fault, Flag, Phase, current_world, in_order
from shardmuon.errors import ExchangeError, Refused, level_of_the_caller
from shardmuon.host import Host, Hosts
from shardmuon.layout.bind import Listed, Table, TableCall
from shardmuon.layout.engines.base import GradientState, Group, named_params
from shardmuon.momentum.keeper import Keeper, MomentumDtype
from shardmuon.options import (
    ADAMW_DEFAULTS,
    ONLY_MUON,
    PLACE_OPTIONS,
    VIEW_DEFAULTS,
    MuonConfig,
    OptionsReader,
    Settings,
    check_hyperparameters,
    given_lr,
    loaded_over,
    new_group,
    refuse_sets,
    unknown_keyword,
)
from shardmuon.orthogonalize import FiniteWatch, MethodName
from shardmuon.plan.plan import Plan
from shardmuon.routing.groups import Overrides, ParamGroups, RoutingRow
from shardmuon.step.adamw import step_adamw
from shardmuon.step.binding import Binding, Offer, fingerprint
from shardmuon.step.stages import ZeroWatch, scale_weights
from shardmuon.step.validate import Proposal, validate


class Core:
    """Parameter groups and their optimizer state, with a method that takes a step once all ranks have agreed to step.

    Attributes:
        param_groups, state: As in torch.optim.Optimizer. Frameworks can replace both.
        config: Options that apply to the whole optimizer.
        keeper: Object that creates and converts stored momentum.
        audits: Schedule of the audits. An audit compares a step with an unsharded reference step.
        process_group: The process group whose ranks have replicas of the plain (not DTensor) parameters; None if there
            is none.
        traffic: Counters of this rank's exchanges and orthogonalized matrices.
        routing: Table that shows whether Muon or AdamW updates each parameter of the model; empty if the optimizer was
            made without a model.
        binding: The current plan with this rank's parameters; None before the first plan is made.
        component: The ranks that took part in the last vote; None before the first vote.
        broken: Description of the failure that interrupted a step; None if no step has been interrupted.
        options: Reader of the groups' options, which caches them.
        settled: Stored weight norms (state tensors of variant "hyperball") that need no further check, because a step
            has checked them since they were created or loaded.
        hosts: Integrations with the frameworks that may call `step`.
        has_trained: True once some parameter has had a gradient in a step.
    """

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    changing = False  # True once all ranks have agreed to a step: from then on, an error can leave weights half updated
    in_step = False  # True during a step, so that `state_dict` raises if a signal handler calls it

    def __init__(
        self,
        config: MuonConfig,
        process_group: GroupRef | None,
        keeper: Keeper | None = None,  # manages stored momentum; default: one made from `config`
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
        # token that identifies the default process group to which the rank numbers in `component` refer
        self.world = current_world()
        self._forget_process()

    def _forget_process(self) -> None:
        """Reset all attributes that are valid only in one process: the plan, the caches and the hosts (framework
        integrations)."""
        self.binding: Binding | None = None
        self.options = OptionsReader()
        self.watch = FiniteWatch()
        self.zeros = ZeroWatch()
        self.settled: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        self.hosts, self.has_trained = Hosts(), False

    def unlike_model(self) -> Sequence[str]:
        """Return the names of parameters whose values differ from the model's weights. The base class returns none;
        hosts (framework integrations) that update copies of the weights override this method."""
        return ()

    # ---------------------------------------------------------------------------------------------- one step

    def take_step(self, fault: Fault) -> None:
        """Take one step on the current parameter groups. Collective among the ranks that share parameters.

        Args:
            fault: Record of this rank's first error; empty if no error has occurred before this call.

        Raises:
            Refused: Some rank has an error. Every rank raises this exception, before anything has changed.
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
        """Update weights and state, after all ranks have agreed to the step. Return the report of the step's audit, or
        None if the step was not audited."""
        # A parameter without elements on this rank takes part in the step if any rank has a gradient for it.
        for number in binding.elsewhere:
            if not verdict.presence >> binding.bits[number] & 1:
                proposal.states[number] = GradientState.NONE
        missing = frozenset[int]()  # indices of the parameters without a gradient in this step
        if GradientState.NONE in proposal.states:
            missing = frozenset(n for n, state in enumerate(proposal.states) if state == GradientState.NONE)
        if proposal.made or proposal.fresh or GradientState.MISPLACED in proposal.states:
            self._take_over(binding, proposal, missing)
        # An audit is collective, so if any rank has requested one, all ranks that voted must take part.
        audit = None
        if verdict.flags & Flag.AUDIT:
            from shardmuon.auditing.live import StepAudit

            audit = StepAudit(self, binding, proposal, self.audits, self.audits.due)
            self.audits.num_audits += self.audits.due > 0
        self.audits.num_steps += 1
        on_weights = binding.on_weights - missing
        if on_weights:
            new = frozenset(n for n in on_weights if proposal.fresh[n])
            scale_weights(binding.weight_sets(new), proposal, self.traffic, self.zeros)
        binding.buckets_without(missing).run(proposal, self.watch, self.traffic)
        if on_weights:
            scale_weights(binding.weight_sets(on_weights), proposal, self.traffic)
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

    def _take_over(self, binding: Binding, proposal: Proposal, missing: frozenset[int]) -> None:
        """Move the state tensors that the step's validation has created into the optimizer's state, except for
        parameters without a gradient (`missing`). Then redistribute each gradient whose placements differ from its
        parameter's."""
        for number in sorted(proposal.made.keys() - missing):
            kept = self.state[binding.members[number].param]
            kept.clear()  # remove state that AdamW or another variant may have left behind
            kept.update(proposal.made[number])
        for number in proposal.fresh.keys() - missing:
            for key in proposal.fresh[number]:
                self.settled[self.state[binding.members[number].param][key]] = True
        # redistributing gradients is collective, so all ranks must process parameters in the same order
        for number in itertools.chain.from_iterable(binding.table.sets.values()):
            if proposal.states[number] == GradientState.MISPLACED:
                param, engine = binding.members[number].param, binding.members[number].engine
                assert param.grad is not None
                proposal.grads[number] = engine.storage(engine.align(param.grad, param))

    def _note(self, error: BaseException) -> None:
        """Record an error that interrupted a step, so that the optimizer refuses further steps. An error is not
        recorded if nothing has changed and this rank steps alone."""
        # after an AuditError, a framework that steps groups one by one skips the remaining groups
        if isinstance(error, AuditError):
            self.broken = f"{error}. Groups and weights that come after these are as before. {ExchangeError.REMEDY}"
            return
        # after an earlier error, the connections to other ranks are already closed
        if self.broken is not None:
            return
        component = self.last_voters() or ()
        alone = default_group() is None or len(component) == 1
        if self.changing or not alone:
            text = f"{type(error).__name__}: {error}".rstrip(": .\n")
            self.broken = (
                f"{text}. {ExchangeError.HALF_DONE}. {ExchangeError.RELOAD if alone else ExchangeError.REMEDY}"
            )
            if isinstance(error, ExchangeError):  # an ExchangeError's message already states the remedy
                self.broken = str(error)
        if self.changing and len(component) > 1:
            # close the connections, so that ranks that are waiting for this rank fail at once
            Lane.close_over(component)

    def last_voters(self) -> Ranks | None:
        """Return the ranks that took part in the last vote, or None if no vote has taken place under the current
        default process group."""
        return self.component if self.world == current_world() else None

    def refuse_torn(self) -> None:
        """Raise ExchangeError if a step is in progress or was interrupted, because the state may then be half
        updated."""
        if self.in_step:
            raise ExchangeError(
                "a step is under way, and its state is half moved. Save when step() has returned: set a flag in the "
                "signal handler"
            )
        if self.broken is not None:
            raise ExchangeError(f"an earlier step was broken off, and its state is half moved: {self.broken}")

    def make_plan(self) -> Plan:
        """Make a plan without taking a step. Collective among the ranks that share parameters.

        Raises:
            ValueError: A rank cannot make a plan. Every rank raises this error. If a rank fails to create a process
                group, that rank raises the error at once, and the other ranks raise it in the next step.
        """
        fault = Fault()
        with Refused.made_public(), without_autocast():
            binding = StepCall(self, fault).renewed(fault)
            # If `fault` contains an error here, it occurred after the ranks had exchanged errors, so only this rank
            # raises it.
            if fault.text is not None:
                raise Refused(fault.text, fault.cause)
        return binding.plan

    @torch.no_grad()
    def complete_state(self) -> None:
        """Create the missing state of every trainable parameter, filled with zeros (see [Note: state that is not there]
        in checkpoint/state.py). Frozen parameters that have no state do not get any. If `use_muon` or `variant` changed
        while a parameter was frozen, so that its state does not match the options of its group, this state is replaced
        with zeros."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad or self.state.get(p):
                    init_missing(p, group, self.state[p], self.keeper)


# Message from a rank that has made a plan: two dicts keyed by sets of ranks. The first counts the parameters that a set
# shares and whose gradient can be missing on some of its ranks. The second gives the names of the process groups that
# the sending rank already has.
_Told = tuple[dict[Ranks, int], dict[Ranks, str]]


class StepCall(TableCall[Binding]):
    """This rank's part in a vote on a step, or on a plan that is made without a step. Implements the interface `Call`
    of comm/vote.py.

    Attributes:
        options: Settings of each parameter group; None for groups that AdamW updates.
        proposal: The step that this rank will take if all ranks agree.
    """

    phase = Phase.STEP
    renews = False
    proposal: Proposal
    _due = ""  # description of this step's audit, which must be equal on all ranks; "" without an audit

    def __init__(self, core: Core, fault: Fault) -> None:
        self._core = core
        self.options: list[Settings | None] = []
        if core.process_group is not None:
            with fault:  # all ranks of `process_group` must plan together, including ranks without parameters
                # `group_ranks` raises an error if the process group has been destroyed
                self.beyond = tuple(sorted(group_ranks(core.process_group)))

    def before(self) -> Ranks | None:
        return self._core.last_voters()

    def known(self) -> Binding | None:
        return self._core.binding

    def is_current(self, kept: Binding) -> bool:
        groups = self._core.param_groups
        self.options = self._core.options.read(groups)
        # Frameworks can replace parameters, so the parameters in the groups are listed again. `Offer` in
        # step/binding.py must use the same condition to select parameters for a plan.
        planned, found, group_of = list[str](), list[Tensor](), list[int]()
        for number, (settings, group) in enumerate(zip(self.options, groups, strict=True)):
            planned.append("" if settings is None else settings.planned)
            if settings is not None:
                found += [p for p in group["params"] if p.requires_grad or p.grad is not None]
                group_of += [number] * (len(found) - len(group_of))
        if planned != kept.planned or group_of != kept.group_of:
            return False
        for p, member in zip(found, kept.members, strict=True):
            if member.param is not p or member.engine.signature(p) != member.signature:
                return False
        return True

    def read(self, kept: Binding) -> Ballot:
        core, audits, flags = self._core, self._core.audits, Flag.NONE
        if core.watch.coming:
            core.watch.report()
        if core.zeros:
            core.zeros.report()
        core.traffic.agreements += len(kept.component) > 1
        # the first condition avoids computing `audits.due`, which is slow, for optimizers that never run audits
        if (audits.every or audits.asked) and audits.due:
            self._due, flags = audits.due_text(), Flag.AUDIT
        self.proposal = validate(kept, core, self.options)
        digests = self.proposal.digests(kept, self._due) if len(kept.component) > 1 else None
        return Ballot(self.phase, flags, digests, self.proposal.presence)

    def lines(self, kept: Binding, ranks: Ranks) -> list[Any]:
        return self.proposal.lines(kept, ranks, self._due)

    def difference(self, ranks: Ranks, everyone: Sequence[list[Any] | None]) -> str:
        return Proposal.difference(ranks, everyone)

    # -------------------------------------------------------------------------------------------------- a new plan

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        # Besides Muon's parameters, list the DTensors that AdamW updates, so that the ranks that share these DTensors
        # learn of each other's errors.
        return [
            (name, p, group)
            for index, group in enumerate(self._core.param_groups)
            for name, p in named_params(group, index)
            if group.get("use_muon") or is_dtensor(p)
        ]

    def listed(self) -> list[Listed]:
        core = self._core
        self.options = core.options.read(core.param_groups)
        self._offer = Offer(core.param_groups, self.options, core.config, core.keeper)
        self.stamp, self.fingerprint = self._offer.stamp, fingerprint
        return self._offer.listed

    def made(self, table: Table) -> tuple[Binding, _Told]:
        made, refs = self._offer.bind(my_rank(), table), self._offer.refs
        sets = made.weight_sets(made.on_weights)
        needed = in_order([*(one.ranks for one in made.buckets if one.exchange), *(one.ranks for one in sets)])
        self._groups = {ranks: refs[ranks].live() if ranks in refs else None for ranks in needed}
        return made, (
            {ranks: len(numbers) for ranks, numbers in made.lacking.items() if numbers},
            {ranks: refs[ranks].group_name for ranks in needed if ranks in refs},
        )

    def heard(self, kept: Binding, everyone: Sequence[_Told]) -> None:
        counts, names = zip(*everyone, strict=True)
        names_on = dict(zip(kept.component, names, strict=True))
        # process groups must be created before the first exchange, because creation is collective and a rank that is
        # already waiting for tensors from other ranks could not take part
        for ranks, known in self._groups.items():
            all_alike = len({names_on[rank].get(ranks) for rank in ranks}) == 1
            group_for(ranks, known if all_alike else None)
        kept.number_bits(counts)
        self._core.binding, self._core.component, self._core.world = kept, kept.component, kept.world


def _trained(groups: Sequence[Group]) -> bool:
    """Return True if any parameter has a gradient in this step. Otherwise, return False, and warn if this rank stores
    part of a parameter. Once the result has been True, later steps skip this check."""
    params = [p for group in groups for p in group["params"]]
    if any(p.grad is not None for p in params):
        return True
    # a rank that stores no elements of any parameter may never have gradients, so it must not warn
    if any(local_if_any(p).numel() > 0 for p in params):
        warnings.warn(
            "no parameter of this optimizer has a gradient, so this step trained nothing. Call backward() before it. "
            "If you did, the model's parameters are other tensors by now: make the optimizer after fully_shard(), "
            "FSDP() or whatever else replaced them",
            stacklevel=level_of_the_caller(),
        )
    return False


_SEVERAL_PLANS = "DeepSpeed steps groups one by one, each by its own plan: print(*optimizer.plans)"


class Muon(Core, Optimizer):
    """Optimizer that updates matrices with Muon and all other parameters with AdamW. The updates are the same for any
    sharding of the weights.

    Each matrix W with gradient G and momentum B is updated as follows:

        B <- mu B + (1 - mu) G
        U  = mu B + (1 - mu) G   (Nesterov), or B
        W <- (1 - lr wd) W - lr s(rows, cols) NS(U)

    Here, lr is the learning rate, wd the weight decay, mu the momentum factor, and s a scale that depends on the global
    shape of the matrix. NS orthogonalizes a matrix by Newton-Schulz steps. W is always the whole logical matrix, never
    a shard. Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, in the form of torch.optim.Muon.

    The first `step()` (or `prepare()`) reads the layout from the parameters themselves, for example from the mesh and
    placements of a DTensor. Together, the ranks then make a plan, which determines which rank orthogonalizes which
    matrix. Before each step, all connected ranks vote on the step. Two ranks are connected if a parameter is sharded or
    replicated over them, or if both are connected to the same rank. Ranks that share matrices exchange them by
    all-to-alls, one bucket (a set of matrices) at a time. Every rank must call `step()`.

    Args:
        params: A module (whose parameters `shardmuon.param_groups` assigns to Muon and AdamW), parameters,
            `named_parameters()`, or group dicts. A group dict can contain any option from `lr` to `tp_group`, and the
            following options. ``use_muon`` (default: True): if False, AdamW updates the group, with its ``lr``,
            ``weight_decay``, ``betas`` (default: (0.9, 0.95)) and ``eps`` (default: 1e-8). ``view``, ``split_sizes``,
            ``split_groups`` and ``transposed`` define which matrices a parameter contains (see
            `shardmuon.layout.views.matrix_view`).
        lr: Learning rate, a float or a one-element tensor. Required, even if every group has its own learning rate. See
            docs/learning_rate.md.
        weight_decay: Weight decay wd.
        momentum: Momentum factor mu.
        nesterov: Use Nesterov momentum.
        ns_coefficients: Name of a schedule (such as "keller", "quintic" or "polar_express"; see `shardmuon.schedule`),
            one triple of coefficients (a, b, c) for all Newton-Schulz steps, or one triple per step. A schedule that
            diverges or flips the sign of a singular value is rejected.
        ns_steps: Number of Newton-Schulz steps. Ignored if `ns_coefficients` has one triple per step. Default: the
            schedule's own number, or 5 for a single triple.
        adjust_lr_fn: Name of the scale s. rows x cols is the global shape of the matrix. None or "original":
            `sqrt(max(1, rows/cols))`. "match_rms_adamw": `0.2 sqrt(max(rows, cols))`. "spectral": `sqrt(max(rows,
            cols))`. "unit_rms_norm": `sqrt(rows/cols)`. "none": 1. docs/learning_rate.md lists the names that other
            libraries use.
        variant: Name of a variant of Muon (such as "normuon" or "hyperball"; see docs/variants.md), or several names
            joined by "+", as in "muon_eq+cautious".
        process_group: Process group whose ranks have replicas of the plain (not DTensor) parameters, as under DDP, and
            share the work. The replicas are compared when a plan is made. Default: every rank orthogonalizes its own
            plain tensors. In a group dict, () means that no other rank has the group's tensors, as for experts. After
            unpickling, only the default process group can be used; any other group must be set again.
        tp_group: Tensor-parallel group, as a process group or global ranks. Plain parameters that TransformerEngine,
            Megatron or the user has marked (by `tensor_model_parallel`, `partition_dim`, `partition_stride`) are shards
            over this group. All other plain parameters are replicas. `process_group` then contains the ranks with the
            same shards. See docs/tensor_parallel.md. Default: no group; marked parameters are rejected.
        method: Method of orthogonalization. "standard": divide by the fp32 norm, then run Newton-Schulz steps on
            batches. "gram": run the same steps on the Gram matrix of the shorter side, which is up to twice as fast for
            matrices with a large aspect ratio. "auto": use "gram" if its estimated time is less than 3/4 of that of
            "standard", else "standard". The estimate depends only on shape, schedule, dtype and type of device. The
            printed plan shows the choice with its reason. "torch": compute the same bits as torch.optim.Muon, which
            casts to bf16 before it computes the norm.
        ns_dtype: Torch dtype of the matrix products. None: "standard" uses float32 on CPUs without hardware support for
            bfloat16, else bfloat16; "gram" uses float16 on accelerators and float32 on CPUs. Method "torch" ignores
            this option and uses bfloat16. Data sent between ranks is bfloat16 if products are bfloat16 or float16,
            float64 if parameters or products are float64, else float32. The data is rounded to this dtype with any
            sharding, even in a single process.
        momentum_dtype: Dtype of stored momentum: torch.float32, torch.bfloat16 or "int8". The momentum is then computed
            in fp32. None: momentum is computed and stored in the gradient's dtype. See docs/memory.md.
        momentum_device: Device of stored momentum: None for the parameter's device, or "cpu".
        stochastic_rounding: Round bf16 weights stochastically (at random, without bias) after each update.
        bucket_bytes: Maximum total size, in bytes, of the matrices that one rank orthogonalizes per bucket. The whole
            matrices count, not shards. None: the planner chooses a size as described in `shardmuon.plan.plan.Policy`.
        audit_every: Interval between audits, in steps. The first step is audited. An audit compares the step with an
            unsharded reference step. If they differ, every rank raises AuditError once the step is complete. None:
            audit a step only if `shardmuon.audit` requests it. See docs/audit.md.
        adamw_lr: Learning rate of all parameters that AdamW updates. Allowed only if `params` is a module. Default: the
            rate at which AdamW's updates are as large as Muon's; `shardmuon.param_groups` prints this rate. See
            docs/learning_rate.md.
        overrides: Changes to the default assignment of the module's parameters to Muon and AdamW (see
            `shardmuon.param_groups`).

    Raises:
        ValueError: An option or a parameter is invalid. The message names it, shows the invalid value, and suggests a
            correction.
        TypeError: `lr` is missing, a keyword is unknown, the parameters are in a set (whose order can differ between
            ranks), or a parameter is not a tensor or has an integer or complex dtype.

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
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = (3.4445, -4.7750, 2.0315),
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
            "use_muon": True,
            **VIEW_DEFAULTS,
            "process_group": self.process_group,
            "tp_group": GroupRef.of(tp_group, "tp_group"),
        }
        check_hyperparameters("", defaults)
        refuse_sets("Muon: parameters", params, "a list, or model.named_parameters()")
        routing = {"adamw_lr": adamw_lr, "overrides": overrides}
        params = ParamGroups.routed(params, defaults, routing)
        self.routing = getattr(params, "rows", ())
        Optimizer.__init__(self, cast(Any, params), defaults)

    # ---------------------------------------------------------------------------------------------- one step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    # `torch._disable_dynamo` keeps torch.compile away from the step, because a compiled step would be recompiled for
    # every matrix shape. The public `torch.compiler.disable` would import the compiler at once, which takes seconds.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters once. Collective among the ranks that share parameters.

        Args:
            closure: Function that reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: Gradients, options or state are invalid on some rank, or a rank failed while reading them. Every
                rank raises this error, before anything has changed. A rank that ran out of memory raises its
                OutOfMemoryError instead.
            ExchangeError: A rank died, hung or failed in the middle of a step. The message names the bucket and the
                operation. After any exception in the middle of a step (even a KeyboardInterrupt, and even with a single
                process), the optimizer refuses further steps until a state dict is loaded.
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
                    continue  # an integration with a framework that is not imported cannot be active
                if host is None and one.is_active:
                    host = one
                instead = instead or one.instead_of_step(self, closure is None)
            if closure is None and instead is None and not self.state and Host.creates_state_only():
                instead = self.complete_state
        if fault.text is not None:
            host = self.hosts.active
        self.in_step = True
        try:
            with without_autocast():
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
        """The active host (integration with a framework that has replaced the tensors in the parameter groups), or a
        plain `Host` if no host is active."""
        return self.hosts.active or Host()

    def __repr__(self) -> str:
        """Format the options for printing: first the optimizer-wide options that differ from their defaults, then, for
        each group, the options of its algorithm (Muon or AdamW) and any keys that other code has stored in the group.
        Group options that are None, and view options with default values, are omitted."""
        lines = [f"    {key}: {value}" for key, value in self.config.changed().items()]
        for index, group in enumerate(self.param_groups):
            muon, count = group["use_muon"], len(group["params"])
            hidden = {"params", "param_names", "use_muon", *(ADAMW_DEFAULTS if muon else ONLY_MUON)}
            shown = {k: v for k, v in group.items() if k not in hidden and v != VIEW_DEFAULTS.get(k)}
            lines.append(f"group {index}: {'Muon' if muon else 'AdamW'}, {count} parameter{'' if count == 1 else 's'}")
            lines += [f"    {key}: {value}" for key, value in shown.items()]
        return "\n".join(["Muon (", *lines, ")"])

    def prepare(self) -> Plan:
        """Make the plan before the first step. Collective among the ranks that share parameters.

        Returns:
            The plan. For each matrix, `print(plan)` shows its route (whether and how it is exchanged), its bucket (the
            set of matrices that are exchanged together), and the rank that orthogonalizes it.

        Raises:
            ValueError: The optimizer is used with DeepSpeed, or a rank cannot make a plan.
        """
        if self._host.in_parts:
            raise ValueError(_SEVERAL_PLANS)
        return self.make_plan()

    @property
    def plan(self) -> Plan | None:
        """The current plan; None before the first step, unless `prepare()` has made one.

        Raises:
            AttributeError: The optimizer is used with DeepSpeed, which steps groups one by one, so there can be several
                plans. Use `plans` instead.
        """
        if self._host.in_parts:
            raise AttributeError(_SEVERAL_PLANS)
        return next(iter(self.plans), None)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All current plans: under DeepSpeed, one for each set of groups that are stepped together; otherwise one, or
        none before a plan is made."""
        return self._host.plans(self)

    # ------------------------------------------------------------------------------------ groups and options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, after checking that its options are valid and match the shapes of its parameters.

        Raises:
            ValueError: An option or a parameter is invalid. The optimizer is unchanged.
            TypeError: The parameters are in a set, or a parameter is not a tensor or has an integer or complex dtype.
        """
        for host in self.hosts:
            host.adding()
        super().add_param_group(new_group(self.param_groups, param_group, self.defaults))
        made, index = self.param_groups[-1], len(self.param_groups) - 1
        names = [name for name, _ in named_params(made, index)]
        for host in self.hosts:
            host.added(made, names)

    # ----------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict in torch's format, without process groups. Once any parameter has state, the dict has
        an entry for every trainable parameter on every rank.

        Raises:
            ExchangeError: A step was interrupted or is in progress. This error prevents a good checkpoint from being
                overwritten with half-updated state.
        """
        self.refuse_torn()
        if any(self.state.values()) and self.hosts.active is None:
            self.complete_state()
        saved: dict[str, Any] = super().state_dict()
        for host in self.hosts:
            host.saved(self, saved)
        for group in saved.get("param_groups", []):
            group.update(dict.fromkeys(PLACE_OPTIONS))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and the options of every group from a state dict. Momentum is converted to this optimizer's
        `momentum_dtype` (default: the gradient's dtype) and `momentum_device`.

        The method can be called before the first step and between steps. Before it changes anything, it checks the
        number and shapes of the parameters, the state keys and the options. Parameter names are checked if both the
        state dict and the optimizer have them.

        A state dict that was saved with a different sharding must be loaded through torch.distributed.checkpoint. State
        of torch.optim.Muon is accepted, since its entries have the same meaning. State of any other optimizer is
        rejected.

        Raises:
            ValueError: The state dict does not match this optimizer. The optimizer is left unchanged.
        """
        host = self.hosts.active
        # An active host (framework integration) loads the state dict itself, because the dict contains the state of
        # the framework's tensors.
        if host is not None:
            with Refused.made_public():
                host.load(self, state_dict)
            return
        state_dict = copy.copy(state_dict)  # load hooks can modify the state dict, so they get a copy
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.take_loaded(*read_state(self.param_groups, state_dict, self.keeper))

    def take_loaded(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Replace this optimizer's state and groups with those from a state dict, which the caller has checked."""
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        self.settled.clear()  # the next step must check the weight norms that Hyperball has stored in the loaded state
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the optimizer from a pickle or a loaded state dict. Options that a loaded group lacks, as in a state
        dict of torch.optim.Muon, keep the values that they have in this optimizer."""
        mine = self.__dict__.get("param_groups", [])  # an optimizer that is being unpickled has no groups yet
        super().__setstate__(state)
        for own, group in zip(mine, self.param_groups, strict=False):
            group.update(loaded_over(own, group))
        # `broken` describes the failure that interrupted a step. Copies and pickles keep it; loading a state dict,
        # which lacks this key, resets it to None.
        self.broken = state.get("broken")
        if "hosts" not in self.__dict__:  # copies of the optimizer do not inherit its plan and framework integrations
            self._forget_process()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without objects that are valid only in one process: the plan, caches
        and framework integrations. The state contains the ranks of the last vote. A copy has no plan, but it must vote
        together with these ranks, which may still use the original optimizer and its plan.

        A copy uses the process groups of the original. After unpickling, only the default process group can be used.
        """
        own = {key: self.__dict__[key] for key in _OWN} | {"process_group": GroupRef.of(self.process_group)}
        state = super().__getstate__()
        groups = [{**g, **{key: GroupRef.of(g[key], key) for key in PLACE_OPTIONS}} for g in self.param_groups]
        return {**state, **own, "param_groups": groups}


# Attributes that copies and pickles contain. `component` contains the ranks of the last vote. It is valid only under
# the default process group that `world` identifies, so it is ignored after unpickling in another process.
_OWN = ("config", "keeper", "audits", "traffic", "routing", "broken", "component", "world")
