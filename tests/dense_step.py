"""A dense reference implementation of Muon, which steps full tensors in a single process.

Momentum, weight decay, matrix views and the order of roundings are implemented independently of the package.
Orthogonalization, the formulas of post-processing stages (such as NorMuon) and the rounding of tensors come from the
package, and are tested separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from simulated import CPU, LAYOUTS, SMALL, SimulatedRanks, cut, planned
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.layout.pieces import ParamLayout, Patch
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.stores import _NEAREST, Stream, _round_by, decode, encode, scale_shape
from shardmuon.options import MuonConfig, Settings
from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Policy
from shardmuon.step.update import Rounding
from shardmuon.variants import AfterStage, BeforeStage, WeightStage, keeping, scaled_, stages_of

HALVES = (torch.bfloat16, torch.float16)
SCALES = {
    None: lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
}


def matrices(shape: tuple[int, ...], options: Mapping[str, Any]) -> list[np.ndarray]:
    """Return, for each matrix of a parameter, an array of the matrix's shape that contains each element's index in the
    flattened parameter."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    stacked = list(numbers) if options.get("view") == "stack" else [numbers.reshape(shape[0], -1)]
    found = []
    for whole in stacked:
        turned = whole.T if options.get("transposed") else whole
        groups = np.split(turned, options.get("split_groups", 1))
        if isinstance(options.get("split_sizes"), int):
            blocks = np.split(turned, options["split_sizes"])
        elif options.get("split_sizes"):
            edges = np.cumsum(options["split_sizes"])[:-1]
            blocks = [np.concatenate(same) for same in zip(*(np.split(g, edges) for g in groups), strict=True)]
        else:
            blocks = [turned]
        found += blocks
    return found


class DenseMuon:
    """Reference optimizer that steps full tensors one matrix at a time.

    Args:
        weights: Initial value of each weight.
        groups: Parameter groups like `Muon.param_groups`, one for each weight.
        config: Options for orthogonalizing matrices and for storing momentum and weights.
        wire: Dtype in which matrices and results would be sent between ranks. Ignored with half-precision matmuls, and
            for fp64 weights, which are always sent in fp64.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        config: MuonConfig | None = None,
        wire: torch.dtype = torch.float32,
    ) -> None:
        self.params = [
            _Param(
                f"w{number}",
                weight.clone(),
                group,
                config or MuonConfig(),
                torch.float64 if weight.dtype == torch.float64 else wire,
            )
            for number, (weight, group) in enumerate(zip(weights, groups, strict=True))
        ]

    def step(self, grads: Sequence[Tensor | None], groups: Sequence[Mapping[str, Any]]) -> None:
        for param, grad, group in zip(self.params, grads, groups, strict=True):
            if grad is not None:
                param.step(grad, group)


class _Param:
    """A parameter and its optimizer state.

    Attributes:
        weight: The weight, in its stored dtype.
        state: Optimizer state, with the same keys and values as in `Muon.state`.
    """

    def __init__(
        self,
        name: str,
        weight: Tensor,
        group: Mapping[str, Any],
        config: MuonConfig,
        wire: torch.dtype,
    ) -> None:
        view = {key: group[key] for key in ("view", "split_sizes", "split_groups", "transposed")}
        view = {key: value for key, value in view.items() if value is not None}
        self.weight, self.state = weight, dict[str, Tensor]()
        self._elements = [torch.from_numpy(at.copy()) for at in matrices(tuple(weight.shape), view)]
        # The first two dims of a stack of matrices index rows. In all other parameters, only the first dim does.
        self._num_rows = 2 if group["view"] == "stack" else 1
        self._name, self._config, self._wire = name, config, wire
        self._steps = 0

    def step(self, grad: Tensor, group: Mapping[str, Any]) -> None:
        self._steps += 1
        stages = stages_of(group)
        on_weights = [stage for stage in stages if isinstance(stage, WeightStage)]
        for stage in on_weights:
            kept = self._kept(stage)
            for at, numbers in zip(self._elements, kept, strict=True):
                if numbers == 0:
                    numbers.copy_(self._norm(at))
        decay, cautious = group["weight_decay"], "cautious" in (group["variant"] or "")
        fed = self._momentum(grad, group["momentum"], group["nesterov"]).flatten()
        moved = self.weight.to(torch.float32 if self.weight.dtype in HALVES else self.weight.dtype, copy=True).flatten()
        like_torch = self._config.method == "torch" and not cautious and not self._rounds_weights
        if like_torch:
            moved = self.weight.flatten().clone()
        for number, at in enumerate(self._elements):
            result = self._orthogonalized(fed[at], number, group, stages)
            scale = SCALES[group["adjust_lr_fn"]](*at.shape)
            step = _like_torch if like_torch else _applied
            moved[at] = step(moved[at], result, group["lr"], scale, decay, cautious)
        self.weight = self._rounded(moved.view(self.weight.shape))
        for stage in on_weights:
            norms = torch.stack([self._norm(at) for at in self._elements]).double()
            kept = torch.stack(self._kept(stage))
            factors = stage.factor(norms, kept)
            for at, factor in zip(self._elements, factors, strict=True):
                flat = self.weight.view(-1)
                wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
                flat[at] = (flat[at].to(wide) * factor.to(wide)).to(flat.dtype)

    def _orthogonalized(self, x: Tensor, number: int, group: Mapping[str, Any], stages: Sequence[Any]) -> Tensor:
        """Return the orthogonalized matrix, rounded to the dtype in which results are sent."""
        coefficients = Settings.of(group).coefficients
        choice = Choice.made(self._config.method, self._config.ns_dtype, (len(x), x.shape[1]), coefficients, CPU)
        narrow = choice.dtype in HALVES or choice.method == "torch"
        wire = torch.bfloat16 if narrow and self._wire != torch.float64 else self._wire
        x = x.to(wire, copy=True).unsqueeze(0)
        before = [stage for stage in stages if isinstance(stage, BeforeStage)]
        if before and wire in HALVES and choice.method != "torch" and wire != choice.dtype:
            x = x.float()
        for stage in before:
            stage.run_(x)
        out = orthogonalize(x, coefficients, method=choice.method, dtype=choice.dtype, unit=bool(before))
        after = [stage for stage in stages if isinstance(stage, AfterStage)]
        if after:
            out = out.to(torch.promote_types(out.dtype, wire))
            scaled_(after, out, {stage.key: [self._kept(stage)[number]] for stage in after if stage.key})
        return out[0].to(wire)

    def _kept(self, stage: Any) -> list[Tensor]:
        sizes = [stage.num_kept(*at.shape) for at in self._elements]
        stacked = self.weight.shape[0] if self._num_rows == 2 else 1
        if stage.key not in self.state:
            self.state[stage.key] = torch.zeros(stacked, sum(sizes) // stacked)
        return list(self.state[stage.key].view(-1).split(sizes))

    def _norm(self, at: Tensor) -> Tensor:  # returns the norm of one matrix of the weight, as a 0-dim fp32 tensor
        return self.weight.flatten()[at].double().norm().float()

    def _bits(self, purpose: str) -> Tensor:
        """Return the random bits for stochastic rounding in the current step, one value for each element of the weight.
        `purpose` is "momentum" or "weights"."""
        stream = Stream.of(self._name, purpose, self._steps, max(at.shape[1] for at in self._elements))
        found = torch.empty(self.weight.numel(), dtype=torch.int32)
        for number, at in enumerate(self._elements):
            found[at] = stream.bits(Patch.rectangle(number, 0, 0, *at.shape), CPU)
        return found.view(self.weight.shape)

    def _momentum(self, grad: Tensor, momentum: float, nesterov: bool) -> Tensor:
        """Update the momentum, and return the tensor to orthogonalize."""
        asked, rows = self._config.momentum_dtype, self._num_rows
        dtype = torch.float32 if asked == "int8" else asked or grad.dtype
        rounded = asked in (torch.bfloat16, "int8")
        if "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros(grad.shape, dtype=torch.int8 if asked == "int8" else dtype)
            if asked == "int8":
                cols = math.prod(grad.shape[rows:])
                self.state["momentum_scale"] = torch.zeros(*grad.shape[:rows], -(-cols // 128))
        kept = self.state["momentum_buffer"]
        grad = grad.to(torch.float32 if rounded else dtype)
        old = kept.to(grad.dtype)
        if asked == "int8":
            old = decode(kept, self.state["momentum_scale"])
        new = old.lerp(grad, 1 - momentum)
        if asked == "int8":
            made = encode(new, rows, old, self._bits("momentum"))
            self.state["momentum_buffer"], self.state["momentum_scale"] = made
        # The momentum is rounded stochastically where it changed by less than the spacing of bf16 numbers, and to
        # nearest elsewhere.
        elif rounded:
            less = (new.view(torch.int32) - old.view(torch.int32)).abs() < 1 << 16
            self.state["momentum_buffer"] = _round_by(new, torch.where(less, self._bits("momentum"), _NEAREST))
        else:
            self.state["momentum_buffer"] = new
        return grad.lerp(new, momentum) if nesterov else new

    @property
    def _rounds_weights(self) -> bool:
        return self._config.stochastic_rounding and self.weight.dtype == torch.bfloat16

    def _rounded(self, moved: Tensor) -> Tensor:
        if self._rounds_weights:
            return _round_by(moved, self._bits("weights"))
        return moved.to(self.weight.dtype)


def _applied(weight: Tensor, result: Tensor, lr: Any, scale: float, decay: float, cautious: bool) -> Tensor:
    """Return the weight, in at least fp32, after weight decay and the update."""
    lr, result = float(lr), result.to(weight.dtype)
    decayed = weight * (1 - lr * decay)
    weight = torch.where(result * weight > 0, decayed, weight) if cautious else decayed
    return weight.add(result, alpha=-lr * scale)


def _like_torch(weight: Tensor, result: Tensor, lr: Any, scale: float, decay: float, cautious: bool) -> Tensor:
    """Return the updated weight, computed with torch.optim.Muon's operations in the dtype of the weight."""
    lr = lr.squeeze() if isinstance(lr, Tensor) else lr
    # torch.optim.Muon's iteration returns tall matrices in column-major order, so this function uses the same order.
    turned = result.mT.contiguous().mT if result.shape[0] > result.shape[1] else result
    return weight.clone().mul_(1 - lr * decay).add_(turned, alpha=-float(lr * scale))


# ------------------------------------------------------------------------------------------------------- beside ranks


class Stores:
    """Momentum shards of several parameters, as simulated ranks store them, and the step count of each parameter."""

    def __init__(self, config: MuonConfig, layouts: Sequence[ParamLayout], grads: Sequence[Tensor]) -> None:
        self._config, self._layouts = config, layouts
        self.counts = [0] * len(layouts)
        self.momenta: list[dict[int, Tensor]] = []
        self.scales: list[dict[int, Tensor]] = []
        for layout, grad in zip(layouts, grads, strict=True):
            dtype = torch.int8 if config.momentum_dtype == "int8" else config.momentum_dtype or grad.dtype
            place, cuts = config.momentum_device or grad.device, cut(layout, grad)
            rows = layout.view.num_row_dims
            self.momenta.append({r: torch.zeros(c.shape, dtype=dtype, device=place) for r, c in cuts.items()})
            if dtype == torch.int8:
                shapes = {r: scale_shape(c.shape, rows) for r, c in cuts.items() if c.numel()}
                self.scales.append({r: torch.zeros(shape, device=place) for r, shape in shapes.items()})

    def rounding(self, weights: Sequence[torch.dtype]) -> Callable[[int], Mapping[int, Rounding]]:
        """Return a function that maps a rank to its rounding data: for each parameter's index, the random bits for
        stochastic rounding and the scales of 8-bit momentum."""
        drawn = [
            [Stream.of(f"w{i}", purpose, count, layout.view.longest_row) for purpose in ("momentum", "weights")]
            for i, (count, layout) in enumerate(zip(self.counts, self._layouts, strict=True))
        ]
        rounds = self._config.momentum_dtype in (torch.bfloat16, "int8")

        def of_rank(rank: int) -> Mapping[int, Rounding]:
            found = {}
            for i, (momentum, of_weights) in enumerate(drawn):
                halves = self._config.stochastic_rounding and weights[i] == torch.bfloat16
                scales = self.scales[i].get(rank) if self.scales else None
                found[i] = Rounding(momentum if rounds else None, scales, of_weights if halves else None)
            return found

        return of_rank

    def values(self, number: int, rank: int) -> Tensor:
        """Return a rank's shard of a parameter's momentum, dequantized if it is 8-bit."""
        kept = self.momenta[number][rank]
        return decode(kept, self.scales[number][rank]) if self.scales and kept.numel() else kept


def assert_like_the_formula(
    views: Mapping[str, Callable[[], MatrixView]],
    view_options: Mapping[str, Mapping[str, Any]],
    layout: str,  # layout of the simulated ranks
    options: Sequence[Mapping[str, Any]],  # param-group options, assigned to parameters in turn
    # pairs (weight dtype, gradient dtype), assigned to parameters in turn
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]],
    *,
    copies: int = 1,  # number of parameters for each entry of `views`
    lr: Callable[[float], Any] = float,
    policy: Policy = SMALL,
    device: str = "cpu",  # device of the weights
    buffers: str | None = None,  # device of the step's buffers, by default the device of the weights
    steps: int = 3,
    **whole_options: Any,
) -> None:
    """Assert that `Muon` in one process, `Muon` on simulated ranks and dense Muon give bitwise identical results over
    `steps` steps.

    The lr changes at every step. Some parameters have no gradient in the first or the second step, so at least three
    steps are needed to test that each of them steps again after a missing gradient. The gradients of the first two
    parameters have a row of zeros. On devices other than the CPU, only the momentum is compared bitwise with dense
    Muon.
    """
    torch.manual_seed(8)
    config, at = MuonConfig(**whole_options), torch.device(buffers or device)
    made = [(name, make()) for name, make in views.items() for _ in range(copies)]
    kinds = [dtypes[i % len(dtypes)] for i in range(len(made))]
    params = [
        nn.Parameter(torch.randn(view.shape).to(device, kind[0])) for (_, view), kind in zip(made, kinds, strict=True)
    ]
    for p, (_, of_grad) in zip(params, kinds, strict=True):
        p.grad_dtype = of_grad
    groups = [
        {"params": [(f"w{i}", p)], **view_options[name], **options[i % len(options)]}
        for i, ((name, _), p) in enumerate(zip(made, params, strict=True))
    ]
    optimizer = Muon(groups, lr=0.05, **whole_options)
    layouts = [LAYOUTS[layout](view) for _, view in made]
    wire = torch.float64 if config.ns_dtype == torch.float64 else torch.float32
    dense = DenseMuon([p.detach().cpu() for p in params], optimizer.param_groups, config, wire)
    wide = [i for i, kind in enumerate(kinds) if kind[0] == torch.float64]
    plan = planned(layouts, optimizer.param_groups, config, policy, device=at, wide=wide)
    ranks = SimulatedRanks(plan, [p.detach() for p in params], at)
    kept = Stores(config, layouts, [torch.zeros_like(p, dtype=kind[1]) for p, kind in zip(params, kinds, strict=True)])
    ranks.momenta, gone = kept.momenta, {0: (3, 8), 1: (0, 5)}
    for step in range(steps):
        grads = [
            None if i in gone.get(step, ()) else torch.randn(p.shape).to(device, kind[1])
            for i, (p, kind) in enumerate(zip(params, kinds, strict=True))
        ]
        for grad in grads[:2]:
            if grad is not None:
                grad[1] = 0
        rate = lr(0.05 / (1 + step))
        for i, (p, grad, group) in enumerate(zip(params, grads, optimizer.param_groups, strict=True)):
            p.grad, group["lr"] = grad, rate.to(device) if isinstance(rate, Tensor) else rate
            kept.counts[i] += grad is not None
        optimizer.step()
        ranks.step(grads, optimizer.param_groups, kept.rounding([kind[0] for kind in kinds]))
        told = [{**group, "lr": rate} for group in optimizer.param_groups]
        dense.step([None if grad is None else grad.cpu() for grad in grads], told)
        _assert_dense(optimizer, params, dense, "" if at.type == "cpu" else "momentum")
        _assert_on_ranks(optimizer, params, ranks, kept)


def _assert_dense(optimizer: Muon, params: Sequence[Tensor], dense: DenseMuon, which: str) -> None:
    """Assert that weights and state match the dense reference. Tensors whose key starts with `which` must be bitwise
    equal. Other tensors may differ, because matmuls on another device round differently, but they must have the same
    dtype, and must be all zero if and only if the reference is."""
    for p, expected in zip(params, dense.params, strict=True):
        found = {"weight": p.detach(), **{key: t for key, t in optimizer.state[p].items() if key != "step"}}
        assert found.keys() == {"weight", *expected.state}
        for key, wanted in {"weight": expected.weight, **expected.state}.items():
            here = found[key].cpu()
            assert here.dtype == wanted.dtype and bool(here.any()) == bool(wanted.any()), key
            assert torch.equal(here, wanted) or not key.startswith(which), key


def _assert_on_ranks(optimizer: Muon, params: Sequence[Tensor], ranks: SimulatedRanks, stores: Stores) -> None:
    for number, (p, spec) in enumerate(zip(params, ranks.plan.specs, strict=True)):
        state, layout = optimizer.state[p], spec.layout
        assert state.get("step", stores.counts[number]) == stores.counts[number]
        pairs = [(ranks.weights[number], cut(layout, p.detach()))]
        if state:
            pairs.append((stores.momenta[number], cut(layout, state["momentum_buffer"])))
            stages = keeping(Settings.of(optimizer.param_groups[number]).stages)
            for stage, of_stage, found in zip(stages, spec.kept, ranks.kept[number], strict=True):
                pairs.append((found, cut(of_stage.layout, state[stage.key])))
        if "momentum_scale" in state:
            decoded = cut(layout, decode(state["momentum_buffer"], state["momentum_scale"]))
            pairs.append(({rank: stores.values(number, rank) for rank in decoded}, decoded))
        for found, expected in pairs:
            assert all(same(found[rank], storage) for rank, storage in expected.items()), spec.name


def same(found: Tensor, expected: Tensor) -> bool:
    """Return True if two tensors have equal values, dtypes and devices. An empty `found` counts as equal to any
    tensor."""
    alike = (found.dtype, found.device) == (expected.dtype, expected.device)
    return not found.numel() or (alike and torch.equal(found, expected))
