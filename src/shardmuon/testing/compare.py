"""Compare an optimizer on sharded parameters with the dense one and with torch.optim.Muon.

Updates are compared, never parameters: a small learning rate hides any error in `after`, but not in
`(before * decay - after) / lr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from shardmuon import Orthogonalizer
from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import Traffic
from shardmuon.layout.engines import engine_of
from shardmuon.muon import Muon
from shardmuon.options import OPTION_OBJECTS
from shardmuon.testing.frameworks import FSDP1_ROWS, ZERO_ROWS, Fsdp1Run, Run, ZeroRun
from shardmuon.testing.layouts import LAYOUTS, PARAMS, ParamCase, cut_matrices, groups_of, mesh_kind, parameters
from shardmuon.testing.tolerances import recovered_update, relative_error
from shardmuon.variants import KEPT_KEYS

_Whole = Mapping[str, Tensor]
_Make = Callable[[_Whole, Mapping[str, Any]], Muon]
_StepsOf = Callable[["_Job", _Whole, Sequence[_Whole]], "Iterator[_Step]"]

_STANDARD = Orthogonalizer(method="standard")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison on one rank. Numbers are over the steps and parameters it holds something of.

    Attributes:
        max_difference: Largest relative difference of a parameter's local update to the expected one.
        bitwise: Weights after every step and momentum after the last have the expected bits.
        traffic: What this rank sent and did in the last step.
        num_matrices: Matrices of the model.
        worst: The parameter with the largest difference.
        about: What `about` said of the optimizer after the last step.
    """

    max_difference: float
    bitwise: bool
    traffic: Traffic
    num_matrices: int
    worst: str
    about: Any = None


def compare_with_dense(
    layout: str,
    *,
    orthogonalizer: Orthogonalizer = _STANDARD,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    params: Sequence[str] | None = None,
    seed: int = 0,
    table: Mapping[str, ParamCase] = PARAMS,
    remember: bool = False,
    about: Callable[[Muon], object] | None = None,
    **options: Any,
) -> Comparison:
    """Step a sharded model and the same one on one process (plain tensors) on the same gradients. All ranks call.

    `remember` keeps the reference's steps for the next layout: with equal arguments they are the same. `about` is shown
    the sharded model's optimizer after the last step.
    """
    cases = {name: table[name] for name in params or table}
    job = _Job(layout, cases, orthogonalizer, dtype, steps, seed, options)
    return job.compare(_dense_steps, remember, about)


def compare_with_torch(
    layout: str,
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    params: Sequence[str] = tuple(PARAMS),
    seed: int = 0,
    remember: bool = False,
    **options: Any,
) -> Comparison:
    """Compare a sharded model with torch.optim.Muon, which is given every logical matrix as a parameter of its own. All
    ranks call."""
    cases = {name: PARAMS[name] for name in params}
    job = _Job(layout, cases, Orthogonalizer(method="torch"), dtype, steps, seed, options)
    return job.compare(_torch_steps, remember, None)


class _Step(NamedTuple):
    """Whole weights, momentum, and what stages keep, of a reference after a step."""

    weights: dict[str, Tensor]
    momentum: dict[str, Tensor]
    kept: dict[str, dict[str, Tensor]]


def _dense_steps(job: _Job, full: _Whole, grads: Sequence[_Whole]) -> Iterator[_Step]:
    """shardmuon itself on plain tensors of one process."""
    params = {name: nn.Parameter(t.clone()) for name, t in full.items()}
    optimizer = Muon(groups_of(params, job.cases), orthogonalizer=job.orthogonalizer, **job.options)
    for of_step in grads:
        for name, grad in of_step.items():
            params[name].grad = grad.clone()
        optimizer.step()
        states = {name: {key: t.clone() for key, t in optimizer.state[p].items()} for name, p in params.items()}
        weights = {name: p.detach().clone() for name, p in params.items()}
        kept = {name: {key: of[key] for key in KEPT_KEYS if key in of} for name, of in states.items()}
        yield _Step(weights, {name: of["momentum_buffer"] for name, of in states.items()}, kept)


def _torch_steps(job: _Job, full: _Whole, grads: Sequence[_Whole]) -> Iterator[_Step]:
    """torch.optim.Muon on one 2-D parameter per logical matrix."""
    cut = {name: partial(cut_matrices, case.view) for name, case in job.cases.items()}
    matrices = {name: [nn.Parameter(m.clone()) for m in cut[name](t)] for name, t in full.items()}
    optimizer = torch.optim.Muon([p for of_tensor in matrices.values() for p in of_tensor], **job.options)

    def joined(name: str, values: Sequence[Tensor]) -> Tensor:
        numbers = torch.arange(math.prod(job.cases[name].shape)).view(job.cases[name].shape)  # where an entry belongs
        whole = values[0].new_empty(numbers.numel())
        for places, value in zip(cut[name](numbers), values, strict=True):
            whole[places] = value
        return whole.view(numbers.shape)

    for of_step in grads:
        for name, grad in of_step.items():
            for p, matrix in zip(matrices[name], cut[name](grad), strict=True):
                p.grad = matrix
        optimizer.step()
        weights = {name: joined(name, [p.detach() for p in of]) for name, of in matrices.items()}
        buffers = {n: joined(n, [optimizer.state[p]["momentum_buffer"] for p in of]) for n, of in matrices.items()}
        yield _Step(weights, buffers, {})


class _LayoutRun(Run):
    """An optimizer on the parameters of a row of `LAYOUTS`; what it finds is what this rank stores."""

    def __init__(self, name: str, full: Mapping[str, Tensor], make: _Make) -> None:
        row, world = LAYOUTS[name], dist.get_world_size()
        self._cut: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = lambda whole: row.build(whole, row.mesh(world))
        self._params = parameters(self._cut(full))
        numbers = {
            n: torch.arange(t.numel(), dtype=torch.float64, device=mesh_kind()).view(t.shape) for n, t in full.items()
        }
        self._stored = {n: _local(t).long() for n, t in self._cut(numbers).items()}  # which elements this rank stores
        self.optimizer = make(self._params, row.options(world))

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.reshape(-1)[self._stored[name]] for name, t in full.items()}

    def gradients(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(drawn)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in self._cut(grads).items():
            self._params[name].grad = grad
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: _local(p).clone() for name, p in self._params.items()}

    def momentum(self) -> dict[str, Tensor]:
        return {name: _local(self.optimizer.state[p]["momentum_buffer"]) for name, p in self._params.items()}

    def keeps(self, whole: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """True if this rank's copies of what stages keep have the bits of these."""
        return all(
            torch.equal(_local(found).view(-1), rows_stored(expected, found).view(-1))
            for name, of_param in whole.items()
            for key, expected in of_param.items()
            for found in [self.optimizer.state[self._params[name]][key]]
        )


_REMEMBERED: dict[str, list[_Step]] = {}


@dataclass(frozen=True, slots=True)
class _Job:
    """One comparison on one layout."""

    layout: str
    cases: Mapping[str, ParamCase]
    orthogonalizer: Orthogonalizer
    dtype: torch.dtype
    steps: int
    seed: int
    options: Mapping[str, Any]

    def _key(self, steps_of: _StepsOf) -> str:
        """Everything that the reference depends on; not the layout."""
        simple = (bool, int, float, str, torch.dtype, type(None), *OPTION_OBJECTS.values())
        assert all(isinstance(value, simple) for value in self.options.values()), f"cannot remember {self.options}"
        which = (self.cases, self.orthogonalizer, self.dtype, self.steps, self.seed, self.options)
        return repr((steps_of.__name__, self.layout in ZERO_ROWS, self.layout in FSDP1_ROWS, *which))

    def compare(self, steps_of: _StepsOf, remember: bool, about: Callable[[Muon], object] | None) -> Comparison:
        """Step both and look at weights after every step, at momentum after the last."""
        run, full, grads = self._started()
        key = self._key(steps_of) if remember else ""
        reference, passed = iter(_REMEMBERED.get(key) or steps_of(self, full, grads)), list[_Step]()
        group = run.optimizer.param_groups[0]
        lr, decay = float(group["lr"]), 1 - float(group["lr"]) * float(group["weight_decay"])
        bitwise, worst, where, traffic = True, 0.0, "", Traffic()
        for of_step in grads:
            before = run.weights()
            earlier = run.optimizer.traffic.since(Traffic())
            run.step(of_step)
            traffic = run.optimizer.traffic.since(earlier)
            passed.append(next(reference))
            expected = run.cut(passed[-1].weights)
            for name, found in run.weights().items():
                bitwise &= torch.equal(found, expected[name])
                one, other = (recovered_update(before[name], after, lr, decay) for after in (found, expected[name]))
                difference = relative_error(one, other)
                if difference > worst or math.isnan(difference):  # nothing is larger than a NaN, which so stays
                    worst, where = difference, name
        if isinstance(run, _LayoutRun):  # frameworks' hosts keep state where they like: their weights tell
            bitwise &= run.keeps(passed[-1].kept)
        momentum = run.cut({name: t.double() for name, t in passed[-1].momentum.items()})  # exact, also for codes
        for name, found in run.momentum().items():
            bitwise &= torch.equal(found.double(), momentum[name])
        if remember:
            _REMEMBERED[key] = passed
        said = about(run.optimizer) if about else None
        run.close()
        num_matrices = sum(len(case.view.matrices) for case in self.cases.values())
        return Comparison(worst, bitwise, traffic, num_matrices, where, said)

    def _started(self) -> tuple[ZeroRun | Fsdp1Run | _LayoutRun, Mapping[str, Tensor], list[Mapping[str, Tensor]]]:
        """The sharded model, what the reference starts from, and the gradients of each step."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw() -> dict[str, Tensor]:
            normal = {name: torch.randn(case.shape, generator=generator) for name, case in self.cases.items()}
            return {name: t.to(mesh_kind(), self.dtype) for name, t in normal.items()}

        def make(params: Mapping[str, Tensor], of_layout: Mapping[str, Any]) -> Muon:
            given = {"lr": 1e-3, **of_layout, **self.options}
            groups = groups_of(params, self.cases)
            return Muon(groups, orthogonalizer=self.orthogonalizer, **given)

        full = draw()
        run: ZeroRun | Fsdp1Run | _LayoutRun
        if self.layout in ZERO_ROWS:
            run = ZeroRun(self.layout, full, make, self.dtype)
        elif self.layout in FSDP1_ROWS:
            run = Fsdp1Run(self.layout, full, make)
        else:
            run = _LayoutRun(self.layout, full, make)
        return run, run.start(full), [run.gradients(draw()) for _ in range(self.steps)]


def rows_stored(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of what a stage keeps that this rank stores, by the placements of the state tensor `like`."""
    if not is_dtensor(like) or all(p.is_replicate() for p in like.placements):
        return whole
    numbers = torch.arange(whole.shape[0], device=whole.device)[:, None]  # torch cuts them up as it does the tensor
    rows = distribute_tensor(numbers, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return whole[rows.view(-1)]


def _local(tensor: Tensor) -> Tensor:
    storage = engine_of(tensor).storage(tensor)
    return storage if storage.numel() else storage.new_empty(0)
