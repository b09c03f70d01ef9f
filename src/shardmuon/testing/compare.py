"""Compare an optimizer on sharded parameters with the dense one and with torch.optim.Muon.

Updates are compared, never parameters: a small learning rate hides any error in `after`, but not in
`(before * decay - after) / lr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon.auditing.reference import relative_difference
from shardmuon.engines import engine_of
from shardmuon.exchange import Traffic
from shardmuon.layout import MatrixView, matrix_view
from shardmuon.muon import Muon
from shardmuon.orthogonalize import MethodName, default_dtype
from shardmuon.orthogonalize.schedules import hashable, triples
from shardmuon.testing.deepspeed import ZERO_ROWS, ZeroRun
from shardmuon.testing.layouts import LAYOUTS, parameters
from shardmuon.testing.tolerances import relative_bound, roundoff

Make = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Muon]


@dataclass(frozen=True, slots=True)
class ParamCase:
    """A parameter of the comparison: global shape, group options, and which case it covers."""

    shape: tuple[int, ...]
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> MatrixView:
        """Its matrices."""
        return matrix_view(self.shape, **self.options)


PARAMS: dict[str, ParamCase] = {
    "square": ParamCase((16, 16), "divides on every mesh up to 8"),
    "tall": ParamCase((65, 33), "nothing divides; orthogonalized transposed"),
    "wide": ParamCase((33, 65), "nothing divides"),
    "few_rows": ParamCase((3, 40), "more ranks than rows: empty shards"),
    "few_cols": ParamCase((40, 3), "more ranks than columns"),
    "one_row": ParamCase((1, 24), "a matrix of one row"),
    "one_col": ParamCase((24, 1), "a matrix of one column"),
    "experts": ParamCase((8, 6, 10), "a stack that divides by expert", {"view": "stack"}),
    "odd_experts": ParamCase((5, 7, 4), "a stack that does not", {"view": "stack"}),
    "gate_up": ParamCase((26, 9), "two blocks that end inside shards", {"split_sizes": (13, 13)}),
    "qkv": ParamCase((24, 10), "2 query groups of (8, 2, 2) rows", {"split_sizes": (8, 2, 2), "split_groups": 2}),
    "heads": ParamCase((21, 8), "heads that end inside shards", {"num_heads": 7}),
    "expert_gate_up": ParamCase((4, 10, 6), "blocks inside experts", {"view": "stack", "split_sizes": (5, 5)}),
    "conv": ParamCase((10, 4, 3, 3), "a kernel, flattened"),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one rank found. Numbers are over the steps and parameters it holds something of.

    Attributes:
        max_difference: Largest relative difference of a parameter's local update to the expected one.
        bitwise: Weights after every step and momentum after the last have the expected bits.
        traffic: What this rank sent and did in the last step.
        num_matrices: Matrices of the model.
        worst: The parameter with the largest difference.
        share: Largest difference of a parameter's update as a fraction of what rounding explains, see
            `testing.tolerances`; 0 where every bit is expected to be equal (`deterministic=True`).
    """

    max_difference: float
    bitwise: bool
    traffic: Traffic
    num_matrices: int
    worst: str
    share: float = 0.0


def groups_of(params: Mapping[str, Tensor], cases: Mapping[str, ParamCase], **options: Any) -> list[dict[str, Any]]:
    """Parameter groups that say how each parameter reads as matrices."""
    table: dict[str, dict[str, Any]] = {}
    for name, param in params.items():
        group = table.setdefault(repr(cases[name].options), {"params": [], **cases[name].options, **options})
        group["params"].append((name, param))
    return list(table.values())


def compare_with_dense(
    layout: str,
    *,
    ns_method: MethodName = "standard",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    deterministic: bool = True,
    params: Sequence[str] | None = None,
    seed: int = 0,
    table: Mapping[str, ParamCase] = PARAMS,
    **options: Any,
) -> Comparison:
    """Step a sharded model and the same one on one process (plain tensors) on the same gradients. All ranks call."""
    cases = {name: table[name] for name in params or table}
    reference = _Dense(cases, ns_method, deterministic, options)
    return _compare(layout, cases, reference, ns_method, dtype, steps, deterministic, seed, options)


def compare_with_torch(
    layout: str,
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    params: Sequence[str] = tuple(PARAMS),
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """The same against torch.optim.Muon, which is given every logical matrix as a parameter of its own."""
    cases = {name: PARAMS[name] for name in params}
    return _compare(layout, cases, _Torch(cases, options), "torch", dtype, steps, True, seed, options)


class _Dense:
    """shardmuon itself on plain tensors of one process."""

    def __init__(
        self, cases: Mapping[str, ParamCase], method: MethodName, deterministic: bool, options: Mapping[str, Any]
    ) -> None:
        self._make: Callable[..., Muon] = lambda params: Muon(
            groups_of(params, cases), ns_method=method, deterministic=deterministic, **options
        )

    def start(self, full: Mapping[str, Tensor]) -> None:
        self.params = {name: nn.Parameter(t.clone()) for name, t in full.items()}
        self.optimizer = self._make(self.params)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in grads.items():
            self.params[name].grad = grad.clone()
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.params.items()}

    def momentum(self) -> dict[str, Tensor]:
        return {name: self.optimizer.state[p]["momentum_buffer"] for name, p in self.params.items()}


class _Torch:
    """torch.optim.Muon on one 2-D parameter per logical matrix."""

    def __init__(self, cases: Mapping[str, ParamCase], options: Mapping[str, Any]) -> None:
        self._cases, self._options = cases, options

    def start(self, full: Mapping[str, Tensor]) -> None:
        self.matrices = {
            (name, i): nn.Parameter(m.clone())
            for name, t in full.items()
            for i, m in enumerate(cut_matrices(self._cases[name].view, t))
        }
        self.optimizer = torch.optim.Muon(list(self.matrices.values()), **self._options)

    def _join(self, values: Mapping[tuple[str, int], Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, case in self._cases.items():
            rows = torch.empty(0)
            for i, matrix in enumerate(case.view.matrices):
                value = values[name, i]
                if i == 0:
                    rows = torch.empty(case.shape, dtype=value.dtype).view(-1, case.view.num_cols)
                for (a, b), part in zip(
                    matrix.intervals, value.split([b - a for a, b in matrix.intervals]), strict=True
                ):
                    rows[a:b] = part
            out[name] = rows.view(case.shape)
        return out

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in grads.items():
            for i, matrix in enumerate(cut_matrices(self._cases[name].view, grad)):
                self.matrices[name, i].grad = matrix
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return self._join({key: p.detach() for key, p in self.matrices.items()})

    def momentum(self) -> dict[str, Tensor]:
        return self._join({key: self.optimizer.state[p]["momentum_buffer"] for key, p in self.matrices.items()})


class _LayoutRun:
    """An optimizer on the parameters of a row of `LAYOUTS`; what it finds is what this rank stores."""

    def __init__(self, name: str, full: Mapping[str, Tensor], make: Make) -> None:
        self._row = LAYOUTS[name]
        self._mesh = self._row.mesh(dist.get_world_size())
        self._params = parameters(self._row.build(full, self._mesh))
        self.optimizer = make(self._params, self._row.options(dist.get_world_size()))

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _local(t) for name, t in self._row.build(full, self._mesh).items()}

    def start(self, full: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return full

    def gradients(self, drawn: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return drawn

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in self._row.build(grads, self._mesh).items():
            self._params[name].grad = grad
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: _local(p).clone() for name, p in self._params.items()}

    def momentum(self) -> dict[str, Tensor]:
        return {name: _local(self.optimizer.state[p]["momentum_buffer"]) for name, p in self._params.items()}

    def close(self) -> None:
        """Nothing to give back."""


def _compare(
    layout: str,
    cases: Mapping[str, ParamCase],
    reference: _Dense | _Torch,
    method: MethodName,
    dtype: torch.dtype,
    steps: int,
    deterministic: bool,
    seed: int,
    options: Mapping[str, Any],
) -> Comparison:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, Tensor]:
        return {name: torch.randn(case.shape, generator=generator).to(dtype) for name, case in cases.items()}

    def make(params: Mapping[str, Tensor], of_layout: Mapping[str, Any]) -> Muon:
        given = {**of_layout, **options}
        return Muon(groups_of(params, cases), ns_method=method, deterministic=deterministic, **given)

    full = draw()
    run = ZeroRun(layout, full, make, dtype) if layout in ZERO_ROWS else _LayoutRun(layout, full, make)
    reference.start(run.start(full))
    group = run.optimizer.param_groups[0]
    lr, decay = float(group["lr"]), 1 - float(group["lr"]) * float(group["weight_decay"])
    products = options.get("ns_dtype") or default_dtype(method, torch.device("cpu"))
    if not deterministic and method != "standard":
        raise NotImplementedError(f"the rounding of ns_method={method!r} is not derived: write deterministic=True")
    bitwise, worst, where, share, traffic = True, 0.0, "", 0.0, Traffic()
    for _ in range(steps):
        grads = run.gradients(draw())
        before, whole_before = run.weights(), {name: t.clone() for name, t in reference.weights().items()}
        earlier = run.optimizer.traffic.since(Traffic())
        run.step(grads)
        reference.step(grads)
        traffic = run.optimizer.traffic.since(earlier)
        whole = reference.weights()
        expected = run.cut(whole)
        explained = {} if deterministic else _explained(cases, group, products, reference, grads, whole_before)
        for name, found in run.weights().items():
            bitwise &= torch.equal(found, expected[name])
            one, other = (recovered_update(before[name], after, lr, decay) for after in (found, expected[name]))
            difference = relative_difference(one, other)
            if difference > worst or math.isnan(difference):  # nothing is larger than a NaN, which so stays
                worst, where = difference, name
            if explained:
                off = float((one - other).norm()) / explained[name]
                share = off if off > share or math.isnan(off) else share
    momentum = run.cut({name: t.double() for name, t in reference.momentum().items()})  # exact, also for codes
    for name, found in run.momentum().items():
        bitwise &= torch.equal(found.double(), momentum[name])
    run.close()
    num_matrices = sum(len(case.view.matrices) for case in cases.values())
    return Comparison(worst, bitwise, traffic, num_matrices, where, share)


def _explained(
    cases: Mapping[str, ParamCase],
    group: Mapping[str, Any],
    products: torch.dtype,
    reference: _Dense | _Torch,
    grads: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> dict[str, float]:
    """By how much (Frobenius norm) two steps on each parameter may differ, both rounded as the options say.

    See `testing.tolerances`. The reference has already stepped: its momentum and the gradient give what it
    orthogonalized, its weights how large the update was.
    """
    coefficients = triples(hashable(group["ns_coefficients"]), group["ns_steps"])
    lr, mu = float(group["lr"]), float(group["momentum"])
    decay = 1 - lr * float(group["weight_decay"])
    out = {}
    for name, after in reference.weights().items():
        momentum = reference.momentum()[name].double()
        fed = mu * momentum + (1 - mu) * grads[name].double() if group["nesterov"] else momentum
        update = recovered_update(before[name], after, lr, decay)
        parts = zip(cut_matrices(cases[name].view, fed), cut_matrices(cases[name].view, update), strict=True)
        energy = sum((2 * relative_bound(coefficients, products, x) * float(u.norm())) ** 2 for x, u in parts)
        # the decayed weight and the difference are rounded once each, on both sides
        stored = 4 * roundoff(after.dtype) * float(torch.maximum(before[name].norm(), after.norm())) / lr
        out[name] = math.sqrt(energy) + stored
    return out


def cut_matrices(view: MatrixView, full: Tensor) -> list[Tensor]:
    """The matrices of a logical tensor."""
    rows = full.reshape(-1, view.num_cols)
    return [torch.cat([rows[a:b] for a, b in matrix.intervals]) for matrix in view.matrices]


def _local(tensor: Tensor) -> Tensor:
    storage = engine_of(tensor).storage(tensor)
    return storage if storage.numel() else storage.new_empty(0)


def recovered_update(before: Tensor, after: Tensor, lr: float, decay: float) -> Tensor:
    """The update that a step applied, from the weights around it, in fp64: (before * decay - after) / lr."""
    return (before.double() * decay - after.double()) / lr
