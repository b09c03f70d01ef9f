"""Compare an optimizer on sharded parameters with the dense one and with torch.optim.Muon.

Updates are compared, never parameters: a small learning rate hides any error in `after`, but not in
`(before * decay - after) / lr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from shardmuon import Orthogonalizer
from shardmuon._torch import is_dtensor
from shardmuon.auditing.reference import relative_difference
from shardmuon.comm.exchange import Traffic
from shardmuon.layout.engines import engine_of
from shardmuon.muon import Muon
from shardmuon.options import OPTION_OBJECTS
from shardmuon.testing.cases import PARAMS, ParamCase, cut_matrices, groups_of
from shardmuon.testing.deepspeed import ZERO_ROWS, ZeroRun
from shardmuon.testing.fsdp1 import FSDP1_ROWS, Fsdp1Run
from shardmuon.testing.layouts import LAYOUTS, parameters
from shardmuon.variants import KEPT_KEYS

Make = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Muon]

STANDARD = Orthogonalizer(method="standard")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one rank found. Numbers are over the steps and parameters it holds something of.

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
    orthogonalizer: Orthogonalizer = STANDARD,
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
    run = _Run(layout, cases, orthogonalizer, dtype, steps, seed, options)
    return run.compare(_Reference(_Dense(cases, orthogonalizer, options), run, remember), about)


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
    """The same against torch.optim.Muon, which is given every logical matrix as a parameter of its own."""
    cases = {name: PARAMS[name] for name in params}
    run = _Run(layout, cases, Orthogonalizer(method="torch"), dtype, steps, seed, options)
    return run.compare(_Reference(_Torch(cases, options), run, remember))


class _Dense:
    """shardmuon itself on plain tensors of one process."""

    def __init__(
        self,
        cases: Mapping[str, ParamCase],
        orthogonalizer: Orthogonalizer,
        options: Mapping[str, Any],
    ) -> None:
        self._make: Callable[..., Muon] = lambda params: Muon(
            groups_of(params, cases), orthogonalizer=orthogonalizer, **options
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

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """What stages of variants keep, by parameter and key."""
        return {name: _kept(self.optimizer.state[p]) for name, p in self.params.items()}


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
            numbers = torch.arange(math.prod(case.shape)).view(case.shape)  # of elements: where each entry belongs
            whole = torch.empty(numbers.numel(), dtype=values[name, 0].dtype)
            for i, places in enumerate(cut_matrices(case.view, numbers)):
                whole[places] = values[name, i]
            out[name] = whole.view(case.shape)
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

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Nothing."""
        return {}


class _LayoutRun:
    """An optimizer on the parameters of a row of `LAYOUTS`; what it finds is what this rank stores."""

    def __init__(self, name: str, full: Mapping[str, Tensor], make: Make) -> None:
        row, world = LAYOUTS[name], dist.get_world_size()
        self._cut: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = lambda whole: row.build(whole, row.mesh(world))
        self._params = parameters(self._cut(full))
        self._stored = _stored_elements(name, world, tuple((name, t.shape) for name, t in full.items()))
        self.optimizer = make(self._params, row.options(world))

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.reshape(-1)[self._stored[name]] for name, t in full.items()}

    def start(self, full: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return full

    def gradients(self, drawn: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return drawn

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in self._cut(grads).items():
            self._params[name].grad = grad
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: _local(p).clone() for name, p in self._params.items()}

    def momentum(self) -> dict[str, Tensor]:
        return {name: _local(self.optimizer.state[p]["momentum_buffer"]) for name, p in self._params.items()}

    def keeps(self, whole: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Whether this rank's copies of what stages keep have the bits of these."""
        return all(
            torch.equal(_local(found).view(-1), rows_stored(expected, found).view(-1))
            for name, of_param in whole.items()
            for key, expected in of_param.items()
            for found in [self.optimizer.state[self._params[name]][key]]
        )

    def close(self) -> None:
        """Nothing to give back."""


@lru_cache(maxsize=64)
def _stored_elements(layout: str, world_size: int, shapes: tuple[tuple[str, torch.Size], ...]) -> dict[str, Tensor]:
    """Which elements of each tensor this rank stores, in the shape in which it does: a row cuts their numbers up."""
    numbers = {name: torch.arange(shape.numel(), dtype=torch.float64).view(shape) for name, shape in shapes}
    built = LAYOUTS[layout].build(numbers, LAYOUTS[layout].mesh(world_size))
    return {name: _local(t).long() for name, t in built.items()}


class _Stepped(NamedTuple):
    """Whole weights, momentum, and what stages keep, of the reference after a step."""

    weights: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    kept: Mapping[str, Mapping[str, Tensor]]


class _Reference:
    """The steps of a reference, one after the other, or as they were found with the same arguments before."""

    def __init__(self, stepper: _Dense | _Torch, run: _Run, remember: bool) -> None:
        self._stepper = stepper
        key = run.key() if remember else None
        self._found: list[_Stepped] = _REMEMBERED.setdefault(key, []) if key is not None else []

    def start(self, full: Mapping[str, Tensor]) -> None:
        self._full = full

    def after(self, step: int, grads: Sequence[Mapping[str, Tensor]]) -> _Stepped:
        """What `grads[:step]` lead to."""
        if not self._found and step:
            self._stepper.start(self._full)
        while len(self._found) < step:
            self._stepper.step(grads[len(self._found)])
            weights, momentum = (
                {name: t.clone() for name, t in value.items()}
                for value in (self._stepper.weights(), self._stepper.momentum())
            )
            kept = {
                name: {key: t.clone() for key, t in of_param.items()} for name, of_param in self._stepper.kept().items()
            }
            self._found.append(_Stepped(weights, momentum, kept))
        return self._found[step - 1] if step else _Stepped(self._full, {}, {})


_REMEMBERED: dict[str, list[_Stepped]] = {}


@dataclass(frozen=True, slots=True)
class _Run:
    """What is compared on one layout."""

    layout: str
    cases: Mapping[str, ParamCase]
    orthogonalizer: Orthogonalizer
    dtype: torch.dtype
    steps: int
    seed: int
    options: Mapping[str, Any]

    def key(self) -> str:
        """Everything that the reference depends on; not the layout."""
        simple = (bool, int, float, str, torch.dtype, type(None), *OPTION_OBJECTS.values())
        assert all(isinstance(value, simple) for value in self.options.values()), f"cannot remember {self.options}"
        which = (self.cases, self.orthogonalizer, self.dtype, self.steps, self.seed, self.options)
        return repr((self.layout in ZERO_ROWS, self.layout in FSDP1_ROWS, *which))

    def compare(self, reference: _Reference, about: Callable[[Muon], object] | None = None) -> Comparison:
        """Step both and look at weights after every step, at momentum after the last."""
        run, full, grads = self._started()
        reference.start(full)
        group = run.optimizer.param_groups[0]
        lr, decay = float(group["lr"]), 1 - float(group["lr"]) * float(group["weight_decay"])
        bitwise, worst, where, traffic = True, 0.0, "", Traffic()
        for step in range(self.steps):
            before = run.weights()
            earlier = run.optimizer.traffic.since(Traffic())
            run.step(grads[step])
            traffic = run.optimizer.traffic.since(earlier)
            expected = run.cut(reference.after(step + 1, grads).weights)
            for name, found in run.weights().items():
                bitwise &= torch.equal(found, expected[name])
                one, other = (recovered_update(before[name], after, lr, decay) for after in (found, expected[name]))
                difference = relative_difference(one, other)
                if difference > worst or math.isnan(difference):  # nothing is larger than a NaN, which so stays
                    worst, where = difference, name
        last = reference.after(self.steps, grads)
        if isinstance(run, _LayoutRun):  # frameworks' hosts keep state where they like: their weights tell
            bitwise &= run.keeps(last.kept)
        momentum = run.cut({name: t.double() for name, t in last.momentum.items()})  # exact, also for codes
        for name, found in run.momentum().items():
            bitwise &= torch.equal(found.double(), momentum[name])
        said = about(run.optimizer) if about else None
        run.close()
        num_matrices = sum(len(case.view.matrices) for case in self.cases.values())
        return Comparison(worst, bitwise, traffic, num_matrices, where, said)

    def _started(self) -> tuple[ZeroRun | Fsdp1Run | _LayoutRun, Mapping[str, Tensor], list[Mapping[str, Tensor]]]:
        """The sharded model, what the reference starts from, and the gradients of each step."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw() -> dict[str, Tensor]:
            normal = {name: torch.randn(case.shape, generator=generator) for name, case in self.cases.items()}
            return {name: t.to(self.dtype) for name, t in normal.items()}

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
    numbers = torch.arange(whole.shape[0])[:, None]  # torch cuts them up as it does the tensor
    rows = distribute_tensor(numbers, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return whole[rows.view(-1)]


def _kept(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: state[key] for key in KEPT_KEYS if key in state}


def _local(tensor: Tensor) -> Tensor:
    storage = engine_of(tensor).storage(tensor)
    return storage if storage.numel() else storage.new_empty(0)


def recovered_update(before: Tensor, after: Tensor, lr: float, decay: float) -> Tensor:
    """The update that a step applied, from the weights around it, in fp64: (before * decay - after) / lr."""
    return (before.double() * decay - after.double()) / lr
