"""Muon: one torch optimizer for matrices (orthogonalized momentum) and everything else (AdamW), on any layout.

Read `Muon.step` first: it is the flow of docs/architecture.md in the order in which it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from shardmuon.adamw import adamw_, init_state
from shardmuon.auditing.schedule import AuditAction, Schedule
from shardmuon.binding import MISPLACED, NONE, READY, Binding, Candidate, agree, bind
from shardmuon.checks import check_buffer, check_can_align, check_gradient
from shardmuon.engines import engine_of
from shardmuon.exchange import Traffic, group_ranks
from shardmuon.layout import MatrixView
from shardmuon.options import (
    ADAMW_DEFAULTS,
    GROUP_DEFAULTS,
    OPTIMIZER_ONLY,
    VIEW_OPTIONS,
    Coefficients,
    batch_text,
    check_choice,
    check_hyperparameters,
    name_of,
    per_step,
    scale_error,
    settings_of,
    settings_text,
    takes_part,
    view_of,
)
from shardmuon.orthogonalize import BACKENDS, MethodName, default_dtype
from shardmuon.pipeline import Kernel, ParamWork, Settings, run_buckets
from shardmuon.plan import Plan, Policy, RouteOption
from shardmuon.update import LrScale, WeightDecayMode

if TYPE_CHECKING:
    from shardmuon.groups import RoutingRow

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
            `shardmuon.layout.matrix_view`;
            ``rank_local`` (False): plain tensors of this group differ from rank to rank (experts), so `process_group`
            does not apply to them.
        lr: Learning rate, a float or a one-element tensor.
        weight_decay: Factor of the decay.
        momentum: :math:`\mu`.
        nesterov: Use Nesterov momentum.
        ns_coefficients: (a, b, c) of one Newton-Schulz step, or one triple per step.
        eps: ``ns_method="torch"`` clamps the norm at eps as torch does. The other methods normalize exactly at any
            scale and do not use it.
        ns_steps: Number of Newton-Schulz steps (ignored if there is a triple per step).
        adjust_lr_fn: Scale s of the learning rate by the global matrix shape: None or "original"
            (:math:`\sqrt{\max(1, r/c)}`), "match_rms_adamw" (:math:`0.2\sqrt{\max(r, c)}`), "spectral"
            (:math:`\sqrt{\max(r, c)}`), "unit_rms_norm" (:math:`\sqrt{r/c}`), "shape_scaling" (as "original"), "none",
            or a callable (rows, cols) -> float. docs/learning_rate.md has the names other libraries use.
        extra_scale_factor: Multiplies s.
        weight_decay_mode: "decoupled", "l2", "independent" or "cautious", see `shardmuon.update.apply_`.
        ns_method: Optimizer only. "standard": fp32 norm, then Newton-Schulz in batches. "gram": the same steps iterated
            on the m x m Gram matrix, fp32 or fp64 only, up to twice as fast for long matrices on CPUs. "torch":
            torch.optim.Muon's arithmetic bit for bit (bf16 cast before the norm). "reference": exact polar factor by
            SVD in fp64.
        ns_dtype: Optimizer only. Dtype of the products. Default: bfloat16 where the device multiplies it in hardware,
            float32 on CPUs that do not. Ignored by "torch" (bfloat16) and "reference" (float64).
        deterministic: Optimizer only. Orthogonalize one matrix at a time, so that the update has the same bits on any
            layout and world size (same kind of device, same number of threads). Otherwise matrices of one shape run as
            one batch, which may round differently.
        process_group: Optimizer only. Plain (not DTensor) parameters are replicas over this group, as under DDP: share
            their work out. That they are equal is checked when the plan is built. Default: every rank orthogonalizes
            its own plain tensors. Not kept by pickling.
        wire_dtype: Optimizer only. Dtype in which momentum and updates travel, and to which they are rounded on every
            layout, so also on one process. Default: float64 if parameters or products are, bfloat16 if the products
            are, else float32.
        bucket_bytes: Optimizer only. Bytes of whole matrices that one owner holds per bucket.
        route: Optimizer only. "auto", "owner" or "local", see `shardmuon.plan.Policy`.
        check_replicas: Optimizer only. Compare replicas bit for bit when the plan is built.
        audit_every: Optimizer only. Compare the first step and every so many with a dense reference, see docs/audit.md.
        audit_samples: Optimizer only. Matrices compared each time in each group of ranks, others every time.
        audit_action: Optimizer only. "raise" an `AuditError` on every rank, after the step; or "warn".

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
        ns_coefficients: Coefficients | Sequence[Coefficients] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: LrScale = None,
        *,
        extra_scale_factor: float = 1.0,
        weight_decay_mode: WeightDecayMode = "decoupled",
        ns_method: MethodName = "standard",
        ns_dtype: torch.dtype | None = None,
        deterministic: bool = False,
        process_group: Any = None,
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = 32 * 2**20,
        route: RouteOption = "auto",
        check_replicas: bool = True,
        audit_every: int | None = None,
        audit_samples: int = 2,
        audit_action: AuditAction = "raise",
    ) -> None:
        check_choice("ns_method", ns_method, tuple(BACKENDS))
        check_choice("route", route, ("auto", "owner", "local"))
        if wire_dtype is not None:
            check_choice("wire_dtype", wire_dtype, WIRE_DTYPES)
        if ns_dtype is not None:
            check_choice("ns_dtype", ns_dtype, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
        if ns_method == "gram" and ns_dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"ns_method='gram' needs ns_dtype=torch.float32 or torch.float64, found {ns_dtype}: rounding in half "
                "precision is amplified without bound. Use ns_method='standard'"
            )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be positive")
        self._ns_method: str = ns_method
        self._ns_dtype = ns_dtype
        self._wire_dtype = wire_dtype
        self._deterministic = deterministic
        self._process_group = process_group
        self._bucket_bytes = bucket_bytes
        self._route: RouteOption = route
        self._check_replicas = check_replicas
        self._audits = Schedule(audit_every, audit_samples, audit_action)
        self._binding: Binding | None = None
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
        }
        check_hyperparameters("", defaults)
        if isinstance(params, nn.Module):
            from shardmuon.groups import param_groups  # groups imports layout only; here to keep muon readable alone

            params = param_groups(params, lr=lr, weight_decay=weight_decay)
        self._routing: tuple[RoutingRow, ...] = getattr(params, "rows", ())
        super().__init__(cast(Any, params), defaults)

    # ---------------------------------------------------------------------------------------------- one step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters once. Collective among the ranks that share parameters.

        Args:
            closure: Reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: Gradients or options are wrong here or on another rank. Nothing has changed then. After any
                other exception from inside an exchange, reload the last checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding, work = self._agree()
        self._audits.num_steps += 1
        due = self._audits.num_steps >= self._audits.at
        audit = self._audits.begin(self, binding, work) if due else None
        run_buckets(binding.programs, work, self._kernel(), binding.devices, self.traffic)
        self._step_adamw()
        if audit is not None:
            audit.finish()
        return loss

    def prepare(self) -> Plan:
        """Plan now instead of at the first step. Collective among the ranks that share parameters.

        Returns:
            The plan. `print(optimizer.plan)` shows each matrix's route, owner and bucket.
        """
        self._binding = self._bind(())
        return self._binding.plan

    @property
    def plan(self) -> Plan:
        """The plan in force. Collective if there is none yet, see `prepare`."""
        return self._binding.plan if self._binding is not None else self.prepare()

    # ------------------------------------------------------------------------------- before anything changes

    @torch.no_grad()
    def _bind(self, groups: Iterable[tuple[int, ...]]) -> Binding:
        """A plan for the parameters as they are now, settled with these groups of ranks too."""
        candidates, fault, waiting = self._candidates()
        known: dict[tuple[int, ...], Any] = dict.fromkeys(groups) | waiting
        if self._process_group is not None and len(group_ranks(self._process_group)) > 1:
            known[tuple(sorted(group_ranks(self._process_group)))] = self._process_group
        return bind(
            candidates,
            Policy(self._route, self._bucket_bytes, self._resolved_wire_dtype().itemsize),
            check_replicas=self._check_replicas,
            device=next((p.device for g in self.param_groups for p in g["params"]), torch.device("cpu")),
            fault=fault,
            known=known,
        )

    def _agree(self) -> tuple[Binding, dict[int, ParamWork]]:
        """Settle with all ranks what this step does: the plan in force and each parameter's local storages."""
        known: Iterable[tuple[int, ...]] = ()
        while True:
            binding = self._binding = self._binding or self._bind(known)
            stale = not self._is_current(binding)
            states, error = ([NONE] * len(binding.candidates), None) if stale else self._gradient_states(binding)
            settings, texts, wrong = ([], [""] * len(states), None) if stale else self._settings()
            error = error or wrong or (None if stale else scale_error(binding.candidates, settings))
            if self._audits.num_steps + 1 >= self._audits.at:
                texts = [text + self._audits.due_text() for text in texts]
            if not agree(binding, states, texts, error, stale, self.traffic):
                return binding, self._work(binding, states, cast("list[Settings]", settings))
            self._binding, known = None, binding.groups

    def _settings(self) -> tuple[list[Settings | None], list[str], str | None]:
        """For each Muon parameter its group's settings and their text, and what is wrong with them, if anything."""
        settings: list[Settings | None] = []
        texts: list[str] = []
        error = None
        for index, group in enumerate(self.param_groups):
            of_group: Settings | None = None
            try:
                check_hyperparameters(f"group {index}: ", group)
                of_group = settings_of(group)
            except ValueError as wrong:
                error = error or str(wrong)
            if group["use_muon"]:
                count = sum(takes_part(p) for p in group["params"])
                settings.extend([of_group] * count)
                texts.extend(["" if of_group is None else settings_text(of_group)] * count)
        return settings, texts, error

    def _is_current(self, binding: Binding) -> bool:
        """Whether the plan was made for just these parameters and options as they are now.

        Frameworks swap parameters after __init__, and `load_state_dict` replaces groups.
        """
        texts = [(self._options_text(g), batch_text(g)) for g in self.param_groups]
        current = [
            (p, text)
            for g, text in zip(self.param_groups, texts, strict=True)
            if g["use_muon"]
            for p in g["params"]
            if takes_part(p)
        ]
        return len(current) == len(binding.candidates) and all(
            p is c.param and c.engine.signature(p) == signature and text == (c.options, c.batch)
            for (p, text), c, signature in zip(current, binding.candidates, binding.signatures, strict=True)
        )

    def _gradient_states(self, binding: Binding) -> tuple[list[int], str | None]:
        """NONE, READY or MISPLACED for each Muon parameter, and the first thing that is wrong with any gradient."""
        states, error = [], None
        for c in binding.candidates:
            state = NONE
            try:
                if c.param.grad is not None:
                    state = READY if check_gradient(c.param, c.param.grad) else MISPLACED
                    if state == MISPLACED:
                        check_can_align(c)
                    check_buffer(c.param, self.state.get(c.param, {}).get("momentum_buffer"), "momentum_buffer")
            except ValueError as wrong:
                error = error or f"{c.name}: {wrong}"
            states.append(state)
        for index, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                try:
                    if not group["use_muon"] and p.grad is not None:
                        check_gradient(p, p.grad)
                        for key in ("exp_avg", "exp_avg_sq"):
                            check_buffer(p, self.state.get(p, {}).get(key), key)
                except ValueError as wrong:
                    error = error or f"{name_of(group, index, position)}: {wrong}"
        return states, error

    def _work(self, binding: Binding, states: Sequence[int], settings: Sequence[Settings]) -> dict[int, ParamWork]:
        """Local storages of every Muon parameter that has a gradient; creates momentum where there is none."""
        work = {}
        for index, (c, state, s) in enumerate(zip(binding.candidates, states, settings, strict=True)):
            grad = c.param.grad
            if state == NONE or grad is None:
                continue
            grad = c.engine.storage(c.engine.align(grad, c.param) if state == MISPLACED else grad)
            momentum = self.state[c.param]
            if "momentum_buffer" not in momentum:
                momentum["momentum_buffer"] = c.engine.wrap(torch.zeros_like(grad), c.param)
            buffer = c.engine.storage(momentum["momentum_buffer"])
            work[index] = ParamWork(c.engine.storage(c.param), grad, buffer, s)
        return work

    def _candidates(self) -> tuple[list[Candidate], str | None, dict[tuple[int, ...], Any]]:
        """Every Muon parameter with its description, the first thing that is wrong with any of them, and the groups of
        ranks that may wait for this one because of those left out, frozen or wrong (-> process group, if known)."""
        candidates: list[Candidate] = []
        fault = None
        waiting: dict[tuple[int, ...], Any] = {}
        for index, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                if not group["use_muon"]:
                    continue
                if not takes_part(p):
                    waiting |= self._sharers(p, group)
                    continue
                try:
                    check_hyperparameters(f"group {index}: ", group)
                    candidates.append(self._candidate(p, group, index, position))
                except (TypeError, ValueError) as wrong:
                    fault = fault or str(wrong)
                    waiting |= self._sharers(p, group)
        return candidates, fault, waiting

    def _sharers(self, p: Tensor, group: Mapping[str, Any]) -> dict[tuple[int, ...], Any]:
        """The ranks that share a parameter, whatever its matrices are -> process group, if known."""
        engine = engine_of(p)
        view = MatrixView(engine.shape(p), 1, ())
        try:
            about = engine.describe(p, view, None if group["rank_local"] else self._process_group)
        except ValueError:
            return {}
        return {about.ranks: about.group} if len(about.ranks) > 1 else {}

    def _candidate(self, p: Tensor, group: Mapping[str, Any], index: int, position: int) -> Candidate:
        name = name_of(group, index, position)
        view = view_of(name, p, group)
        engine = engine_of(p)
        try:
            about = engine.describe(p, view, None if group["rank_local"] else self._process_group)
        except ValueError as wrong:
            raise ValueError(f"{name}: {wrong}") from None
        names = group.get("param_names")
        identity = names[position] if names else ""
        num_steps = len(per_step(group["ns_coefficients"], group["ns_steps"]))
        return Candidate(name, identity, p, engine, about, num_steps, self._options_text(group), batch_text(group))

    def _options_text(self, group: Mapping[str, Any]) -> str:
        """Every option that ranks must agree on and that a plan is made for."""
        fixed = (
            self._ns_method,
            self._ns_dtype,
            self._wire_dtype,
            self._deterministic,
            self._bucket_bytes,
            self._route,
        )
        view = {key: list(group[key]) if isinstance(group[key], tuple) else group[key] for key in VIEW_OPTIONS}
        return repr((fixed, self._check_replicas, view, group["rank_local"], self._audits.options()))

    # ------------------------------------------------------------------------------------------- AdamW's half

    def _step_adamw(self) -> None:
        for group in self.param_groups:
            if group["use_muon"]:
                continue
            params = [p for p in group["params"] if p.grad is not None]
            grads = []
            for p in params:
                engine = engine_of(p)
                grads.append(p.grad if engine.is_aligned(p.grad, p) else engine.align(p.grad, p))
                init_state(p, p.grad, self.state[p])
            if params:
                settings = {**ADAMW_DEFAULTS, **group}  # a group may have been Muon's before
                adamw_(params, grads, [self.state[p] for p in params], settings, fused=not self._deterministic)

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
        self._check_group({**self.defaults, **group}, len(self.param_groups))
        super().add_param_group(group)

    def _check_group(self, group: Mapping[str, Any], index: int) -> None:
        params = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
        given = [p[0] for p in group["params"] if isinstance(p, tuple)]
        names = given or group.get("param_names") or []
        known = {id(p): name_of(g, i, at) for i, g in enumerate(self.param_groups) for at, p in enumerate(g["params"])}
        check_hyperparameters(f"group {index}: ", group)
        misplaced = [key for key in OPTIMIZER_ONLY if key in group]
        if misplaced:
            raise ValueError(f"group {index}: {misplaced} apply to the whole optimizer. Give them to Muon(...) itself")
        for position, p in enumerate(params):
            name = names[position] if position < len(names) else f"parameter {position} of group {index}"
            if not isinstance(p, Tensor):
                raise TypeError(f"{name}: an optimizer takes tensors, found {type(p).__name__}")
            if id(p) in known:
                raise ValueError(f"{name}: the same parameter is listed twice (first as {known[id(p)]}). List it once")
            known[id(p)] = name
            if p.is_complex():
                raise ValueError(f"{name}: complex parameters ({p.dtype}) are not supported. Leave it out")
            if not p.is_floating_point():
                raise TypeError(f"{name}: dtype {p.dtype} cannot be optimized; parameters must be floating point")
            if group["use_muon"]:
                view_of(name, p, group)
            elif any(group[key] != GROUP_DEFAULTS[key] for key in VIEW_OPTIONS):
                found = {key: group[key] for key in VIEW_OPTIONS if group[key] != GROUP_DEFAULTS[key]}
                raise ValueError(f"{name}: {found} are options of matrices, but the group says use_muon=False")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Options that a saved group lacks (checkpoints of torch.optim.Muon, older versions) stay as they are here."""
        mine = self.__dict__.get("param_groups", [])  # none while unpickling
        super().__setstate__(state)
        defaults = {key: value for key, value in {**self.defaults, **GROUP_DEFAULTS}.items() if key != "differentiable"}
        for index, group in enumerate(self.param_groups):
            for key, value in {**defaults, **(mine[index] if index < len(mine) else {})}.items():
                group.setdefault(key, value)
        self.__dict__.setdefault("_binding", None)  # `_is_current` sees whether a plan still fits
        self.__dict__.setdefault("_audits", Schedule())
        self.__dict__.setdefault("_routing", ())

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the plan and the process group, which belong to one process."""
        own = {key: value for key, value in self.__dict__.items() if key in _PICKLED}
        return {**super().__getstate__(), **own, "_process_group": None}

    def _kernel(self) -> Kernel:
        return Kernel(self._ns_method, self._ns_dtype, self._resolved_wire_dtype(), self._deterministic)

    def _resolved_wire_dtype(self) -> torch.dtype:
        if self._wire_dtype is not None:
            return self._wire_dtype
        if self._ns_method == "torch":
            return torch.bfloat16  # exact: torch casts to bf16 first, and its result is bf16
        muon = [p for g in self.param_groups if g["use_muon"] for p in g["params"]]
        device = muon[0].device if muon else torch.device("cpu")
        products = self._ns_dtype or default_dtype(self._ns_method, device)
        if products == torch.float64 or any(p.dtype == torch.float64 for p in muon):
            return torch.float64  # fp64 gradients may lie outside the range of fp32
        return torch.bfloat16 if products == torch.bfloat16 else torch.float32


_PICKLED = (
    "_ns_method",
    "_ns_dtype",
    "_wire_dtype",
    "_deterministic",
    "_bucket_bytes",
    "_route",
    "_check_replicas",
    "_audits",
    "_routing",
    "traffic",
)
