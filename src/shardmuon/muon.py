"""Muon: one torch optimizer for matrices (orthogonalized momentum) and everything else (AdamW), on any layout.

Read `Muon.step` first: it is the flow of docs/architecture.md in the order in which it happens.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from shardmuon._torch import after_loading, before_loading, never_compiled
from shardmuon.checkpoint.state import read_state, without_callables
from shardmuon.comm.groups import GroupRef
from shardmuon.comm.vote import Fault
from shardmuon.core import Core
from shardmuon.errors import ExchangeError, Refused, made_public
from shardmuon.host import Host, creates_state_only
from shardmuon.layout.engines.base import name_of
from shardmuon.momentum.keeper import MomentumDtype
from shardmuon.options import (
    GROUP_DEFAULTS,
    PLACE_OPTIONS,
    AuditAction,
    LrScale,
    MuonConfig,
    check_hyperparameters,
    given_lr,
    options_text,
    refuse_sets,
)
from shardmuon.orthogonalize import MethodName
from shardmuon.orthogonalize.schedules import Coefficients
from shardmuon.plan.plan import Plan
from shardmuon.routing.groups import Overrides, routed
from shardmuon.step.options import (
    as_group,
    check_param_group,
    complete,
    fill_up,
)


class Muon(Core, Optimizer):
    """Muon with AdamW inside, giving the same update however the weights are sharded.

    For each matrix W with gradient G, momentum B, learning rate lr, decay wd and scale s:

        B <- mu B + (1 - mu) G
        U  = mu B + (1 - mu) G   (Nesterov), or B
        W <- (1 - lr wd) W - lr s(rows, cols) NS(U)

    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the form of torch.optim.Muon.) The matrix is always
    the whole logical one, each is orthogonalized once in the job, and the scale s uses its global shape.

    The first `step()` (or `prepare()`) reads the layout off the parameters themselves (DTensor mesh and placements) and
    plans, with the other ranks, who orthogonalizes what. All ranks that parameters connect vote before each step;
    those that share matrices have two all-to-alls per bucket. Every rank must call `step()`.

    Args:
        params: A module (routed by `shardmuon.param_groups`), parameters, `named_parameters()`, or group dicts. A group
            may set any option from `lr` to `tp_group`, and:
            ``use_muon`` (True): False sends the group to AdamW with ``betas`` ((0.9, 0.95)), ``eps`` (1e-8), ``lr`` and
            ``weight_decay``;
            ``view``, ``split_sizes``, ``split_groups``, ``transposed``: which matrices a parameter holds, see
            `shardmuon.layout.views.matrix_view`.
        lr: Learning rate, a float or a one-element tensor. Required; groups may have their own. docs/learning_rate.md.
        weight_decay: Factor wd of the decay.
        momentum: mu.
        nesterov: Use Nesterov momentum.
        ns_coefficients: Name of a schedule ("keller", "quintic", "polar_express", .., see `shardmuon.schedule`), (a, b,
            c) of one Newton-Schulz step, or one triple per step. One that flips signs or diverges is refused.
        ns_steps: Number of Newton-Schulz steps (ignored if there is a triple per step). Default: the schedule's own, 5
            for a single triple.
        adjust_lr_fn: Scale s of the learning rate by the global matrix shape: None or "original"
            (`sqrt(max(1, rows/cols))`), "match_rms_adamw" (`0.2 sqrt(max(rows, cols))`), "spectral"
            (`sqrt(max(rows, cols))`), "unit_rms_norm" (`sqrt(rows/cols)`), "none", or a callable
            (rows, cols) -> float. docs/learning_rate.md has the names other libraries use.
        variant: "normuon", "muon_eq", "hyperball", "cautious" (W decays only where that does not work against the
            update), or several joined by "+" ("muon_eq+normuon"): docs/variants.md.
        process_group: Plain (not DTensor) parameters are replicas over this group, as under DDP: share
            their work out. That they are equal is checked when the plan is built. Default: every rank orthogonalizes
            its own plain tensors. In a group, () says that no other rank has its tensors (experts). Not kept by
            pickling.
        tp_group: Plain parameters are shards over this group, if they are marked so (`tensor_model_parallel`,
            `partition_dim`, `partition_stride`, as by TransformerEngine and Megatron), and replicas otherwise: a
            process group, or global ranks. `process_group` then joins the ranks with the same shards. See
            docs/tensor_parallel.md. Default: none; a marked shard is refused.
        method: "standard": fp32 norm, then Newton-Schulz in batches. "gram": the same steps iterated on the m x m Gram
            matrix, up to twice as fast for long matrices. "auto": "gram" where its arithmetic, at its dtype's rate, is
            less by a quarter, else "standard": a rule of shape, schedule, dtype and kind of device. The plan prints
            what was taken and why. "torch": torch.optim.Muon's arithmetic bit for bit (bf16 cast before the norm).
        ns_dtype: Products' torch dtype. None: "standard" takes bfloat16 where the device multiplies it in hardware,
            float32 on CPUs that do not; "gram" float16 on accelerators, float32 on CPUs. Ignored by "torch" (bfloat16).
            What travels between ranks is rounded to bfloat16 where products are bfloat16 or float16, on every layout
            and on one process; it is float64 where parameters or products are, else float32.
        split_k: Slices of the long side over which X X^T is summed (split-K): 1, 2, 4 or 8. Above 1, a matrix may have
            so many owners, each of one slice, where that is cheaper: ranks of one node, among many more ranks than
            matrices. It rounds otherwise than 1 does, and alike on every layout. For matrices whose slices fill a
            device, if their number divides the long side, of "standard" and "gram"; others stay whole.
        cuda_graphs: Capture the orthogonalization of batch shapes that repeat as CUDA graphs: fewer launches, some more
            memory (each shape keeps a batch and work space). Nothing on other devices.
        momentum_dtype: Dtype that momentum is stored as: None (the gradient's, in which it is computed too),
            torch.float32, torch.bfloat16 or "int8" (all computed in fp32). docs/memory.md.
        momentum_device: None (with the parameter) or "cpu".
        stochastic_rounding: Round bf16 weights at random, without bias, after each update.
        bucket_bytes: Most bytes of whole matrices that one owner holds per bucket. None: as many as are cheapest,
            within the bound that `shardmuon.plan.items.Policy` states.
        audit_every: The first step and every so many are compared with a dense reference. None: only when
            `shardmuon.audit` asks for it. docs/audit.md.
        audit_action: "raise" an `AuditError` on every rank, after the step; or "warn".
        adamw_lr: Of a module only: the learning rate of all that is not a matrix. Default: the one at which AdamW's
            updates are as large as the matrices', which `shardmuon.param_groups` prints. docs/learning_rate.md.
        overrides: Of a module only: changes to its routing, see `shardmuon.param_groups`.

    Raises:
        ValueError: An option or a parameter does not fit; says the name, what was found and what to write. `step()`
            raises on every rank of a group or on none, and before anything has changed.
        TypeError: Parameters come in a set, whose order differs from rank to rank; or see `add_param_group`.

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
        adjust_lr_fn: LrScale = None,
        variant: str | None = None,
        process_group: Any = None,
        tp_group: Any = None,
        method: MethodName = "auto",
        ns_dtype: torch.dtype | None = None,
        split_k: int = 1,
        cuda_graphs: bool = False,
        momentum_dtype: MomentumDtype = None,
        momentum_device: Literal["cpu"] | None = None,
        stochastic_rounding: bool = False,
        bucket_bytes: int | None = None,
        audit_every: int | None = None,
        audit_action: AuditAction = "raise",
        adamw_lr: float | Tensor | None = None,
        overrides: Overrides | None = None,
    ) -> None:
        lr = given_lr("Muon", lr)
        config = MuonConfig(
            method=method,
            ns_dtype=ns_dtype,
            split_k=split_k,
            cuda_graphs=cuda_graphs,
            momentum_dtype=momentum_dtype,
            momentum_device=momentum_device,
            stochastic_rounding=stochastic_rounding,
            bucket_bytes=bucket_bytes,
            audit_every=audit_every,
            audit_action=audit_action,
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
            closure: Reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: Gradients, options or state are wrong here or on another rank, or something else was raised
                while a rank read them. Nothing has changed then. (On its own rank an OutOfMemoryError stays one.)
            ExchangeError: A rank died, hung or failed in the middle; names the bucket and phase. Reload the last
                checkpoint: until then this optimizer refuses to step. So it does after any other exception in the
                middle of a step, also in one process and also after a KeyboardInterrupt.
        """
        if self.broken is not None:
            (self.hosts.active or Host()).restore_groups(self)
            raise ExchangeError(f"an earlier step was broken off: {self.broken}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fault, instead, host = Fault(), None, None
        with fault:  # the other ranks must hear of it
            imported = sys.modules.keys()
            for one in self.hosts:
                if one.packages is not None and imported.isdisjoint(one.packages):
                    continue  # it has nothing to say to a step
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
                self.let_host_step(host, fault)
            else:
                self.take_step(fault)
                if not self.first.is_over:
                    self.first.stepped(self, self.param_groups)
        except Refused as refused:
            error = refused.public()
            raise error from error.__cause__
        finally:
            self.in_step = False
        return loss

    def __repr__(self) -> str:
        """The options that apply: what differs from its default in those of the whole optimizer, and each group's."""
        return f"Muon (\n{options_text(self.config, self.param_groups)}\n)"

    def prepare(self) -> Plan:
        """Plan now instead of at the first step. Collective among the ranks that share parameters.

        Returns:
            The plan. `print(optimizer.plan)` shows each matrix's route, owner and bucket.
        """
        return (self.hosts.active or Host()).prepare(self)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first step, unless `prepare()` has made one.

        Raises:
            AttributeError: DeepSpeed steps groups one by one, each by its own plan: see `plans`.
        """
        return (self.hosts.active or Host()).plan(self)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans in force: `plan`, or one for each set of groups that DeepSpeed has stepped together."""
        return (self.hosts.active or Host()).plans(self)

    # ------------------------------------------------------------------------------------ groups and options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its options and that each of its parameters can be what the group says.

        Raises:
            ValueError: See the message; the optimizer is unchanged.
            TypeError: Parameters come in a set; or one is not a tensor, or of an integer dtype.
        """
        group = as_group(param_group)
        given = [key for key in param_group if key != "params"]
        for host in self.hosts:
            host.adding()
        complete(group, self.defaults)
        check_param_group(self.param_groups, group, given, self.defaults)
        super().add_param_group(group)
        made, index = self.param_groups[-1], len(self.param_groups) - 1
        names = [name_of(made, index, position) for position in range(len(made["params"]))]
        for host in self.hosts:
            host.added(made, names)

    # ----------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """State dict as torch makes it, with two differences: once there is state, every trainable parameter has an
        entry on every rank; and functions among the options are saved by name only (loading keeps the optimizer's own).

        Raises:
            ExchangeError: A step was broken off, or is under way: this state must not replace the last good one.
        """
        torn = self.torn()
        if torn is not None:
            raise ExchangeError(torn)
        if any(self.state.values()) and self.hosts.active is None:
            with torch.no_grad():
                self.complete_state()
        for host in self.hosts:
            host.saving(self)
        saved: dict[str, Any] = super().state_dict()
        for host in self.hosts:
            host.saved(self, saved)
        without_callables(saved.get("param_groups", []))
        for group in saved.get("param_groups", []):
            group.update(dict.fromkeys(PLACE_OPTIONS))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state and the options of every group. Momentum of another dtype or place becomes what this
        optimizer keeps: its gradient's dtype, or what `momentum_dtype` and
        `momentum_device` ask for.

        Works before the first step and after any. Checked whole before anything changes: names (if both sides have
        them), number and shapes, keys, options. A state dict saved on another layout comes through
        torch.distributed.checkpoint. State of another optimizer is refused, but for torch.optim.Muon's, which means the
        same.

        Raises:
            ValueError: It does not fit; the optimizer is unchanged.
        """
        host = self.hosts.active
        if host is not None:  # state of flats, on this very cut
            with made_public():
                host.load(self, lambda: host.take_over(self, state_dict))
            return
        self.take_loaded(*read_state(self.param_groups, before_loading(self, state_dict), self.keeper))

    def take_loaded(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Take over state and groups that have been checked."""
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        self.settled.clear()  # loaded into the tensors that there were
        after_loading(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickled state. Options that a saved group lacks (checkpoints of torch.optim.Muon) stay as they are
        here."""
        mine = self.__dict__.get("param_groups", [])  # none while unpickling
        super().__setstate__(state)
        fill_up(self.param_groups, mine, self.defaults)
        self.broken = state.get("broken")  # loading state makes the optimizer whole again, copying it does not
        if "hosts" not in self.__dict__:  # a copy: the plan, process groups, graphs and hosts stay with the original
            self.process_group = None
            self._forget_process()

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """Copy the optimizer. The copy votes with the same ranks: those that have made none know its plan no more than
        it knows theirs."""
        made: Muon = memo.setdefault(id(self), self.__class__.__new__(self.__class__))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made.component, made.world = self.component, self.world
        made.process_group = self.process_group
        for mine, theirs in zip((made.defaults, *made.param_groups), (self.defaults, *self.param_groups), strict=True):
            mine["process_group"] = theirs["process_group"]  # else replicas would part in silence
        return made

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling: everything but what belongs to one process: the plan, process groups, graphs and
        hosts."""
        own = {key: self.__dict__[key] for key in _OWN}
        state = super().__getstate__()
        groups = list(map(_without_ranks, state["param_groups"]))
        return {**state, **own, "param_groups": groups, "defaults": _without_ranks(state["defaults"])}


def _without_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Options without a process group over which there are replicas."""
    group = options["process_group"]
    return options if group is None or not group.ranks else {**options, "process_group": None}


_OWN = ("config", "keeper", "audits", "traffic", "routing", "broken")  # what copies and pickles take along
