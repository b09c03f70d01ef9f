"""Muon: one torch optimizer for matrices (orthogonalized momentum) and everything else (AdamW), on any layout.

Read `Muon.step` first: it is the flow of docs/architecture.md in the order in which it happens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from shardmuon._torch import after_loading, before_loading, creates_state_only, default_group, never_compiled
from shardmuon.auditing.schedule import AuditAction, AuditError, Schedule
from shardmuon.checkpoint.state import init_missing, read_state, without_callables
from shardmuon.engines.tensor_parallel import meet
from shardmuon.errors import HALF_DONE, RELOAD, REMEDY, ExchangeError, Refused, told
from shardmuon.frameworks.deepspeed.host import Course, ZeroSteps
from shardmuon.frameworks.deepspeed.partitions import is_initializing
from shardmuon.frameworks.megatron.fsdp import is_wrapping_optimizer, mark_state, refuse_one_group
from shardmuon.momentum.keeper import Keeper, MomentumDtype, offloaded_from
from shardmuon.momentum.update import LrScale, WeightDecayMode
from shardmuon.options import (
    ADAMW_DEFAULTS,
    GROUP_DEFAULTS,
    PLACE_OPTIONS,
    VIEW_OPTIONS,
    check_choice,
    check_hyperparameters,
    check_param_group,
    name_of,
    products_dtype,
    routed,
)
from shardmuon.orthogonalize import NS_METHODS, MethodName, check_gram_dtype, default_dtype
from shardmuon.orthogonalize.chooser import Chooser, KernelOption, check_kernel
from shardmuon.orthogonalize.dao import check_installed
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.orthogonalize.schedules import Coefficients
from shardmuon.planning.plan import Plan, Policy
from shardmuon.planning.routes import ROUTES, Rates, RouteOption, check_route
from shardmuon.ranks.exchange import GroupRef, Traffic, group_ranks, wire_device
from shardmuon.stepping.adamw import step_adamw
from shardmuon.stepping.binding import NONE, Binding, agree, bind
from shardmuon.stepping.buckets import Kernel, ParamWork, run_buckets
from shardmuon.stepping.candidates import all_sharers, find_candidates
from shardmuon.stepping.reading import Reading, Sources, read

if TYPE_CHECKING:
    from shardmuon.auditing.report import Report
    from shardmuon.routing.groups import Overrides, RoutingRow

StepKind = Literal["state only", "initializing", "flats", "step"]
WIRE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Muon(Optimizer):
    r"""Muon with AdamW inside, giving the same update however the weights are sharded.

    For each matrix with momentum buffer :math:`B` and gradient :math:`G`:

    .. math::
        B \leftarrow \mu B + (1-\mu) G, \qquad
        U = \mu B + (1-\mu) G \text{ (Nesterov) or } B, \qquad
        W \leftarrow (1 - \gamma\lambda) W - \gamma\, s(\text{rows}, \text{cols})\, \mathrm{NS}(U)

    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the form of torch.optim.Muon.) The matrix is always
    the whole logical one, each is orthogonalized once in the job, and the scale s uses its global shape.

    The first `step()` (or `prepare()`) reads the layout off the parameters themselves (DTensor mesh and placements),
    plans who orthogonalizes what, and compares notes with the other ranks. A step has one small all-reduce and two
    all-to-alls per bucket in each group of ranks that shares matrices, and nothing at all for matrices that are whole
    where they are. Every rank of a group must call `step()`.

    Args:
        params: A module (routed by `shardmuon.param_groups`), parameters, `named_parameters()`, or group dicts. A group
            may set any option below that is not marked "optimizer only", and:
            ``use_muon`` (True): False sends the group to AdamW with ``betas`` ((0.9, 0.95)), ``eps`` (1e-8), ``lr`` and
            ``weight_decay``;
            ``view``, ``split_sizes``, ``split_groups``, ``num_heads``: which matrices a parameter holds, see
            `shardmuon.planning.layout.matrix_view`;
            ``partition_dim``, ``partition_stride``: how its plain tensors are cut over `tp_group`, before their own
            attributes;
            ``rank_local`` (False): plain tensors of this group differ from rank to rank (experts), so `process_group`
            does not apply to them;
            ``clip_grad`` (True): False keeps the group out of `shardmuon.clip_grad_norm_`.
        lr: Learning rate, a float or a one-element tensor.
        weight_decay: Factor of the decay.
        momentum: :math:`\mu`.
        nesterov: Use Nesterov momentum.
        ns_coefficients: Name of a schedule ("keller", "quintic", "polar_express", .., see `shardmuon.schedule`), (a, b,
            c) of one Newton-Schulz step, or one triple per step. One that flips signs or diverges is refused.
        eps: ``ns_method="torch"`` clamps the norm at eps as torch does. The other methods normalize exactly at any
            scale and do not use it.
        ns_steps: Number of Newton-Schulz steps (ignored if there is a triple per step). Default: the schedule's own, 5
            for a single triple.
        adjust_lr_fn: Scale s of the learning rate by the global matrix shape: None or "original"
            (:math:`\sqrt{\max(1, r/c)}`), "match_rms_adamw" (:math:`0.2\sqrt{\max(r, c)}`), "spectral"
            (:math:`\sqrt{\max(r, c)}`), "unit_rms_norm" (:math:`\sqrt{r/c}`), "shape_scaling" (as "original"), "none",
            or a callable (rows, cols) -> float. docs/learning_rate.md has the names other libraries use.
        extra_scale_factor: Multiplies s.
        weight_decay_mode: "decoupled", "l2", "independent" or "cautious", see `shardmuon.momentum.update.apply_`.
        ns_method: Optimizer only. "standard": fp32 norm, then Newton-Schulz in batches. "gram": the same steps iterated
            on the m x m Gram matrix, up to twice as fast for long matrices. "auto": whichever of the two is faster for
            a matrix's shape on this device, measured once and kept on disk (`shardmuon tune` measures anew); with
            ``deterministic=True``, and where ranks hold replicas without a process group, by a rule that looks at the
            shape alone. The plan prints what was taken and why. "torch": torch.optim.Muon's arithmetic bit for bit
            (bf16 cast before the norm). "reference": exact polar factor by SVD in fp64. "gram-newton-schulz": that
            package's kernels, if it is installed.
        ns_dtype: Optimizer only. Dtype of the products, a torch dtype or its name. Default ("auto"): "standard" takes
            bfloat16 where the device multiplies it in hardware, float32 on CPUs that do not; "gram" float16 on
            accelerators, float32 on CPUs. Ignored by "torch" (bfloat16) and "reference" (float64).
        ns_kernel: Optimizer only. "torch" or "triton": what multiplies symmetric results on accelerators. "auto": the
            faster one with ``ns_method="auto"``, else "torch". "triton" computes half of each such product and needs
            ``pip install 'shardmuon[triton]'``; refused when the plan is built where it cannot run.
        ns_finite_check: Optimizer only. Repeat a matrix whose "gram" result is not finite, though it is itself, with
            "standard" in fp32, and warn.
        ns_cuda_graphs: Optimizer only. Capture the orthogonalization of batch shapes that repeat as CUDA graphs: fewer
            launches, some more memory (each shape keeps a batch and work space). Nothing on other devices.
        deterministic: Optimizer only. Orthogonalize one matrix at a time, so that the update has the same bits on any
            layout and world size (same kind of device, same number of threads). Otherwise matrices of one shape run as
            one batch, which may round differently.
        process_group: Plain (not DTensor) parameters are replicas over this group, as under DDP: share
            their work out. That they are equal is checked when the plan is built. Default: every rank orthogonalizes
            its own plain tensors. Not kept by pickling.
        tp_group: Plain parameters are shards over this group, if they are marked so (`tensor_model_parallel`,
            `partition_dim`, `partition_stride`, as by TransformerEngine and Megatron) or ``partition_dim`` says so, and
            replicas otherwise: a process group, or global ranks. `process_group` then joins the ranks with the same
            shards. See docs/tensor_parallel.md. Default: none; a marked shard is refused.
        wire_dtype: Optimizer only. Dtype in which momentum and updates travel, and to which they are rounded on every
            layout, so also on one process. Default: float64 if parameters or products are, bfloat16 if the products
            are, else float32. With ``ns_method="auto"`` that holds for what was taken for each matrix, so that "auto"
            that takes "gram" has the bits of ``ns_method="gram"``.
        bucket_bytes: Optimizer only. Bytes of whole matrices that one owner holds per bucket.
        route: Optimizer only. "auto", "owner", "local", "gram" or "blockwise", see `shardmuon.planning.plan.Policy`.
            "gram" is refused with ``deterministic=True``: sums over shards round differently on every layout.
            "blockwise" is other mathematics: the update of each rank's part alone, which depends on the layout.
        route_rates: Optimizer only. What "auto" prices the Gram route with: `shardmuon.planning.routes.Rates`, or
            "measure" to time exchanges and products when the plan is made. None: "auto" never takes it.
        check_replicas: Optimizer only. Compare replicas bit for bit when the plan is built.
        momentum_dtype: Optimizer only. What momentum is stored as: None (the gradient's dtype, in which it is computed
            too), torch.float32, torch.bfloat16 or "int8" (both computed in fp32). See docs/memory.md.
        momentum_device: Optimizer only. Where momentum is stored: None (with the parameter), "cpu", or "disk:FOLDER",
            a file per rank in that folder.
        stochastic_rounding: Optimizer only. Round bf16 and fp16 weights at random, without bias, after each update.
        rounding_seed: Optimizer only. Of all random rounding; equal on all ranks.
        ns_device: Optimizer only. Where matrices are orthogonalized. Default: where the parameters are; for DTensors
            that are kept on the CPU (FSDP2's CPUOffloadPolicy) on their mesh's device.
        audit_every: Optimizer only. Compare the first step and every so many with a dense reference, see docs/audit.md.
        audit_samples: Optimizer only. Matrices compared each time in each group of ranks, others every time.
        audit_action: Optimizer only. "raise" an `AuditError` on every rank, after the step; or "warn".
        adamw_lr: Of a module only: the learning rate of all that is not a matrix. Default: the one at which AdamW's
            updates are as large as the matrices', which `shardmuon.param_groups` prints. docs/learning_rate.md.
        adamw_weight_decay, adamw_betas, adamw_eps, decay_1d, overrides: Of a module only, see `shardmuon.param_groups`.

    Raises:
        ValueError: An option or a parameter does not fit; says the name, what was found and what to write. `step()`
            raises on every rank of a group or on none, and before anything has changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = Muon([{"params": [model[0].weight, model[2].weight]},
        ...                   {"params": [model[0].bias, model[2].bias], "use_muon": False}], lr=0.02)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Coefficients | Sequence[Coefficients] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int | None = None,
        adjust_lr_fn: LrScale = None,
        *,
        extra_scale_factor: float = 1.0,
        weight_decay_mode: WeightDecayMode = "decoupled",
        ns_method: MethodName = "auto",
        ns_dtype: torch.dtype | str | None = None,
        ns_kernel: KernelOption = "auto",
        ns_finite_check: bool = True,
        ns_cuda_graphs: bool = False,
        deterministic: bool = False,
        process_group: Any = None,
        tp_group: Any = None,
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = 32 * 2**20,
        route: RouteOption = "auto",
        route_rates: Rates | Literal["measure"] | None = None,
        check_replicas: bool = True,
        momentum_dtype: MomentumDtype = None,
        momentum_device: str | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        ns_device: torch.device | str | None = None,
        audit_every: int | None = None,
        audit_samples: int = 2,
        audit_action: AuditAction = "raise",
        adamw_lr: float | Tensor | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] | None = None,
        adamw_eps: float | None = None,
        decay_1d: bool | None = None,
        overrides: Overrides | None = None,
    ) -> None:
        check_choice("ns_method", ns_method, NS_METHODS)
        check_choice("ns_kernel", ns_kernel, ("auto", "torch", "triton"))
        check_choice("route", route, ROUTES)
        check_route(route, deterministic)
        if wire_dtype is not None:
            check_choice("wire_dtype", wire_dtype, WIRE_DTYPES)
        dtype = products_dtype(ns_dtype)
        if ns_method == "gram" and dtype is not None:
            check_gram_dtype(dtype)
        check_kernel(ns_kernel, ns_method, dtype)
        if ns_method == "gram-newton-schulz":
            check_installed(dtype)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be positive")
        self._chooser = Chooser(ns_method, dtype, ns_kernel, deterministic)
        self._ns_finite_check = ns_finite_check
        self._ns_cuda_graphs = ns_cuda_graphs
        self._graphs = GraphCache() if ns_cuda_graphs else None
        self._wire_dtype = wire_dtype
        self._process_group = GroupRef.of(process_group)
        self._bucket_bytes = bucket_bytes
        self._route: RouteOption = route
        if route_rates is not None and not isinstance(route_rates, Rates):
            check_choice("route_rates", route_rates, ("measure",))
        self._route_rates = route_rates
        self._check_replicas = check_replicas
        self._keeper = Keeper(momentum_dtype, momentum_device, stochastic_rounding, rounding_seed)
        self._ns_device = None if ns_device is None else torch.device(ns_device)
        self._audits = Schedule(audit_every, audit_samples, audit_action)
        self._binding: Binding | None = None
        self._broken: str | None = None  # why the last step left the ranks out of step
        self.traffic = Traffic()
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "extra_scale_factor": extra_scale_factor,
            "weight_decay_mode": weight_decay_mode,
            **GROUP_DEFAULTS,
            "process_group": self._process_group,
            "tp_group": GroupRef.of(tp_group, "tp_group"),
        }
        check_hyperparameters("", defaults)
        routing = {
            "adamw_lr": adamw_lr,
            "adamw_weight_decay": adamw_weight_decay,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "decay_1d": decay_1d,
            "overrides": overrides,
        }
        params = routed(params, defaults, {key: value for key, value in routing.items() if value is not None})
        self._routing: tuple[RoutingRow, ...] = getattr(params, "rows", ())
        self._zero = ZeroSteps()
        self._own = (*self.__dict__, "_own")  # what copies and pickles take along; torch's own and users' come later
        super().__init__(cast(Any, params), defaults)

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
        if self._broken is not None:
            if self._zero.is_active:
                self._zero.restore_groups(self)
            raise ExchangeError(f"an earlier step was broken off: {self._broken}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step(None, closure is None)
        except Refused as refused:
            public = refused.public()
            raise public from public.__cause__
        return loss

    def _step(self, early: BaseException | None, plain: bool = True) -> None:
        """`step` without its closure.

        Args:
            early: What was raised on this rank before, of which the others must hear.
            plain: Whether there is no closure.

        Raises:
            Refused: All ranks raise it, and nothing has changed.
        """
        kind: StepKind = "step"
        try:
            kind = self._kind_of_step(plain)
        except BaseException as wrong:
            early = early or wrong
        if early is not None:
            kind = "flats" if self._zero.is_active else "step"
        if kind == "state only":
            self._complete_state()  # a step that counts would leave AdamW's counters at 1
            return
        if kind == "initializing":
            self._zero.initialized(self.param_groups)
            return
        course, report = Course(), None
        try:
            if kind == "flats":
                self._zero.step(self, course, early)
                course.changing = True
                step_adamw(self.param_groups, self.state, set(), fused=not self._chooser.deterministic)
            else:
                report = self._carry_out(*self._agree(course, early))
        except Refused:
            raise
        except BaseException as error:
            self._remember(error, course)
            raise
        if report is not None:
            self._audits.settle(report)

    def _kind_of_step(self, plain: bool) -> StepKind:
        """What this call of `step`, `plain` if it has no closure, is for."""
        if plain and ((not self.state and creates_state_only()) or is_wrapping_optimizer()):
            return "state only"
        if is_initializing():
            return "initializing"
        return "flats" if self._zero.is_active else "step"

    def _carry_out(self, binding: Binding, work: dict[int, ParamWork]) -> Report | None:
        """A step that all ranks have agreed to. Returns what an audit of it has found."""
        self._audits.num_steps += 1
        due = self._audits.num_steps >= self._audits.at
        audit = self._audits.begin(self, binding, work) if due else None
        kernel = self._kernel()
        ranks = [p.rank_bucket.bucket.ranks for p in binding.programs]
        devices = [wire_device(d, kernel.device, r) for d, r in zip(binding.devices, ranks, strict=True)]
        run_buckets(binding.programs, work, kernel, devices, self.traffic)
        engines = {binding.candidates[index].engine for index in work}
        step_adamw(self.param_groups, self.state, engines, fused=not self._chooser.deterministic)
        return None if audit is None else audit.finish()

    def _remember(self, error: BaseException, course: Course) -> None:
        """A step that ended between its first change and its last, or left other ranks waiting, must be the last."""
        if isinstance(error, AuditError):  # raised out of the framework's step, with more to do in it
            self._broken = f"{error}. Groups and weights that come after these are as before. {REMEDY}"
            return
        alone = default_group() is None or (self._binding is not None and not self._binding.members)
        if self._broken is None and (course.changing or not alone):
            known = isinstance(error, ExchangeError)
            text = f"{type(error).__name__}: {error}".rstrip(": .\n")
            self._broken = str(error) if known else f"{text}. {HALF_DONE}. {RELOAD if alone else REMEDY}"

    def prepare(self) -> Plan:
        """Plan now instead of at the first step. Collective among the ranks that share parameters.

        Returns:
            The plan. `print(optimizer.plan)` shows each matrix's route, owner and bucket.
        """
        if self._zero.is_active:
            return self._zero.prepare(self)
        return self._prepare(None)

    def _prepare(self, early: BaseException | None) -> Plan:
        """`early`: what was raised on this rank before, of which the others must hear."""
        try:
            self._binding = self._bind((), early)
        except Refused as refused:
            public = refused.public()
            raise public from public.__cause__
        return self._binding.plan

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first step, unless `prepare()` has made one.

        Raises:
            AttributeError: DeepSpeed steps groups one by one, each by its own plan: see `plans`.
        """
        if self._zero.is_active:
            return self._zero.plan
        return None if self._binding is None else self._binding.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans in force: `plan`, or one for each set of groups that DeepSpeed has stepped together."""
        if self._zero.is_active:
            return self._zero.plans
        return () if self._binding is None else (self._binding.plan,)

    # ------------------------------------------------------------------------------- before anything changes

    @torch.no_grad()
    def _bind(self, groups: Iterable[tuple[int, ...]], early: BaseException | None = None) -> Binding:
        """A plan for the parameters as they are now, settled with these groups of ranks too.

        What is raised while this rank looks at its parameters becomes what it tells the others, as in `read`.
        """
        known: dict[tuple[int, ...], Any] = {}
        if self._process_group is not None and len(group_ranks(self._process_group)) > 1:  # raises if it was destroyed
            known[tuple(sorted(group_ranks(self._process_group)))] = self._process_group
        policy, chooser, device = Policy(), self._chooser, torch.device("cpu")
        cause: BaseException | None = None
        unmet: str | None = None
        grids: dict[tuple[int, ...], Any] = {}
        try:
            unmet, grids, cause = meet(self.param_groups)
            if early is not None:
                raise early
            candidates, fault, waiting = find_candidates(self.param_groups, self._options_text, self._keeper.rounds)
            device = next((p.device for g in self.param_groups for p in g["params"]), device)
            chooser = replace(self._chooser, device=self._resolved_ns_device())
            fault = unmet or fault or chooser.fault(c.param.device for c in candidates)
            size = self._resolved_wire_dtype().itemsize
            policy = Policy(self._route, self._bucket_bytes, size, self._chooser.deterministic)
        except BaseException as wrong:
            cause, fault = cause or wrong, unmet or told(wrong)
            candidates, waiting = [], all_sharers(self.param_groups)
        return bind(
            candidates,
            policy,
            chooser,
            check_replicas=self._check_replicas,
            device=device,
            fault=fault,
            cause=cause,
            known=dict.fromkeys(groups) | grids | waiting | known,
            check_layout=self._keeper.check_layout,
            rates=self._route_rates,
        )

    def _agree(self, course: Course, early: BaseException | None) -> tuple[Binding, dict[int, ParamWork]]:
        """Settle with all ranks what this step does: the plan in force and each parameter's local storages.

        Between the plan and the agreement nothing runs but `read`, in its guard: see [Note: one guard].
        """
        sources = Sources(
            self.param_groups,
            self.state,
            self._keeper,
            self._options_text,
            self._resolved_wire_dtype,
            self._remarks,
        )
        known: Iterable[tuple[int, ...]] = ()
        while True:
            binding = self._binding = self._binding or self._bind(known, early)
            count = len(binding.candidates)
            reading = Reading([NONE] * count, [""] * count)
            try:
                if early is not None:
                    raise early
                read(reading, binding, sources)
            except BaseException as wrong:
                reading.fail(wrong)
            told = reading.states, reading.texts, reading.error, reading.stale
            if not agree(binding, *told, self.traffic, reading.cause):
                course.changing = True
                return binding, reading.begin(binding, sources)
            self._binding, known = None, tuple(binding.members)

    def _remarks(self) -> str:
        """What an audit needs the ranks to agree on."""
        return self._audits.due_text() if self._audits.num_steps + 1 >= self._audits.at else ""

    def _options_text(self, group: Mapping[str, Any]) -> str:
        """Every option that ranks must agree on and that a plan is made for."""
        fixed = (
            self._chooser,
            self._ns_finite_check,
            self._ns_cuda_graphs,
            self._wire_dtype,
            self._bucket_bytes,
            self._route,
            self._route_rates,
            self._keeper.text(),
        )
        view = {key: list(group[key]) if isinstance(group[key], tuple) else group[key] for key in VIEW_OPTIONS}
        cut = group["partition_dim"], group["partition_stride"]
        products = self._products_in(group)
        return repr((fixed, products, self._check_replicas, view, group["rank_local"], cut, self._audits.options()))

    def _products_in(self, group: Mapping[str, Any]) -> str:
        """The dtype that products have by default, where the user names none. It hangs on the device, and on CPUs on
        what they multiply in hardware, which may differ from rank to rank."""
        if self._chooser.dtype is not None or not group["params"]:
            return ""
        first = group["params"][0]
        device = self._ns_device or offloaded_from(first) or first.device
        method = "standard" if self._chooser.method == "auto" else self._chooser.method
        return f"products={default_dtype(method, device)}"

    # ------------------------------------------------------------------------------------ groups and options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its options and that each of its parameters can be what the group says.

        Raises:
            ValueError: See the message; the optimizer is unchanged.
            TypeError: A parameter is not a tensor, or of an integer dtype.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a param group must be a dict, found {type(param_group).__name__}")
        group = dict(param_group)
        given = group.get("params")
        if isinstance(given, set):
            raise TypeError("parameters must come in an order that all ranks share: give a list, not a set")
        group["params"] = [given] if isinstance(given, Tensor) else list(cast("Iterable[Any]", given or ()))
        if not group.get("use_muon", True):
            group = {**ADAMW_DEFAULTS, **group}
        refuse_one_group()
        for key in ("tp_group", "process_group"):
            if key in group:
                group[key] = GroupRef.of(group[key], key)
        check_param_group(self.param_groups, {**self.defaults, **group}, group.keys())
        super().add_param_group(group)
        made, index = self.param_groups[-1], len(self.param_groups) - 1
        self._zero.add(made, [name_of(made, index, position) for position in range(len(made["params"]))])

    # ----------------------------------------------------------------------------------------- checkpoints

    def _complete_state(self) -> None:
        """Every trainable parameter has state, zeros where it never had a gradient: see [Note: state that is not there]
        in checkpoint/state.py."""
        for group in self.param_groups:
            if not group["use_muon"]:  # Muon's until now: the options that AdamW takes belong to what is saved
                group.update({key: value for key, value in ADAMW_DEFAULTS.items() if key not in group})
            for p in group["params"]:
                if p.requires_grad:
                    init_missing(p, group, self.state[p], self._keeper)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with two differences: once there is state, every trainable parameter has an entry on every rank;
        and functions among the options are saved by name only (loading keeps the optimizer's own)."""
        if any(self.state.values()) and not self._zero.is_active:
            with torch.no_grad():
                self._complete_state()
                mark_state(self.state)
        if self._zero.is_active:
            self._zero.saved()
        saved: dict[str, Any] = super().state_dict()
        without_callables(saved.get("param_groups", []))
        for group in saved.get("param_groups", []):
            group.update(dict.fromkeys(PLACE_OPTIONS))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state and the options of every group. Momentum of another dtype or place becomes what this
        optimizer keeps: its gradient's dtype, or what `momentum_dtype` and `momentum_device` ask for.

        Works before the first step and after any. Checked whole before anything changes: names (if both sides have
        them), number and shapes, keys, options. A state dict saved on another layout comes through
        torch.distributed.checkpoint, one of another Muon through `shardmuon.checkpoint.load_foreign`.

        Raises:
            ValueError: It does not fit; the optimizer is unchanged.
        """
        if self._zero.is_active:  # state of flats, on this very cut
            super().load_state_dict(before_loading(self, state_dict))
            self._zero.replaced(self.param_groups)
            return
        state, groups = read_state(self.param_groups, before_loading(self, state_dict), self._keeper)
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        after_loading(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Options that a saved group lacks (checkpoints of torch.optim.Muon, older versions) stay as they are here."""
        mine = self.__dict__.get("param_groups", [])  # none while unpickling
        super().__setstate__(state)
        defaults = {key: value for key, value in {**self.defaults, **GROUP_DEFAULTS}.items() if key != "differentiable"}
        for index, group in enumerate(self.param_groups):
            for key, value in {**defaults, **(mine[index] if index < len(mine) else {})}.items():
                group.setdefault(key, value)
        self.__dict__.setdefault("_own", (*(key for key in state if key not in _OF_TORCH), "_own"))
        self.__dict__.setdefault("_graphs", GraphCache() if self.__dict__.get("_ns_cuda_graphs") else None)
        self._broken = state.get("_broken")  # loading state makes the optimizer whole again, copying it does not
        self.__dict__.setdefault("_binding", None)  # `_is_current` sees whether a plan still fits
        self.__dict__.setdefault("_audits", Schedule())
        self.__dict__.setdefault("_routing", ())
        self.__dict__.setdefault("_zero", ZeroSteps())

    def __getstate__(self) -> dict[str, Any]:
        """All of its own but what belongs to one process: the plan, process groups, graphs, a framework's parts."""
        own = {key: self.__dict__[key] for key in self._own if key not in _OF_ONE_PROCESS}
        state = super().__getstate__()
        groups = [{**group, "process_group": None} for group in state["param_groups"]]
        defaults = {**state["defaults"], "process_group": None}
        return {**state, **own, "param_groups": groups, "defaults": defaults, "_process_group": None}

    def _kernel(self) -> Kernel:
        return Kernel(
            self._resolved_wire_dtype(),
            self._chooser.deterministic,
            self._ns_finite_check,
            self._graphs,
            self._resolved_ns_device(),
            self._wire_follows_products(),
        )

    def _resolved_ns_device(self) -> torch.device | None:
        """None: where the parameters are."""
        if self._ns_device is not None:
            return self._ns_device
        muon = (p for g in self.param_groups if g["use_muon"] for p in g["params"])
        return next((d for d in map(offloaded_from, muon) if d is not None), None)

    def _resolved_wire_dtype(self) -> torch.dtype:
        if self._wire_dtype is not None:
            return self._wire_dtype
        if self._chooser.method == "torch":
            return torch.bfloat16  # exact: torch casts to bf16 first, and its result is bf16
        muon = [p for g in self.param_groups if g["use_muon"] for p in g["params"]]
        device = self._resolved_ns_device() or (muon[0].device if muon else torch.device("cpu"))
        if self._chooser.method == "auto" and self._chooser.dtype is None:
            products = torch.float32  # what is taken later may be "gram"; see `_wire_follows_products`
        else:
            products = self._chooser.dtype or default_dtype(self._chooser.method, device)
        if products == torch.float64 or any(p.dtype == torch.float64 for p in muon):
            return torch.float64  # fp64 gradients may lie outside the range of fp32
        return torch.bfloat16 if products == torch.bfloat16 else torch.float32

    def _wire_follows_products(self) -> bool:
        """Whether each bucket's wire dtype hangs on what "auto" took for its matrices."""
        open_ = self._wire_dtype is None and self._chooser.method == "auto" and self._chooser.dtype is None
        return open_ and self._resolved_wire_dtype() == torch.float32


_OF_TORCH = ("defaults", "state", "param_groups")
_OF_ONE_PROCESS = ("_binding", "_graphs", "_process_group", "_zero")
