"""Compare Muon on sharded parameters with one of two references: Muon on unsharded parameters, or torch.optim.Muon.

The comparison measures differences between updates instead of weights, because even a large error hardly changes the
weights if the learning rate is small. The update of a step is `(before * decay - after) / lr`. Here, `before` and
`after` are the weights before and after the step, and `decay` is `1 - lr * weight_decay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from shardmuon._torch import is_dtensor
from shardmuon.auditing.reference import relative_error
from shardmuon.comm.groups import Traffic
from shardmuon.layout.engines import engine_of
from shardmuon.muon import Muon
from shardmuon.testing.frameworks import Fsdp1Run, Run, ZeroRun
from shardmuon.testing.layouts import LAYOUTS, PARAMS, ParamCase, meshes_on, parameters
from shardmuon.variants import KEPT_KEYS

_Whole = Mapping[str, Tensor]
_Cases = Mapping[str, ParamCase]
# dict from parameter name to a dict of whole tensors: the weight (key "weight") and the optimizer state
_State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison on one rank, over all steps and all parameters.

    Attributes:
        max_difference: Largest relative difference between a parameter's update on this rank and the expected update.
        bitwise: Whether the weights after every step and the optimizer state after the last step are bitwise equal to
            the expected values.
        traffic: Counters of this rank's communication and work in the last step.
        num_matrices: Number of matrices in the model.
        worst: Name of the parameter with the largest difference.
        about: Return value of the caller's function `about`; None if the caller passed no such function.
    """

    max_difference: float
    bitwise: bool
    traffic: Traffic
    num_matrices: int
    worst: str
    about: Any = None

    @staticmethod
    def with_dense(layout: str, **given: Any) -> Comparison:
        """Compare a sharded model with an unsharded copy that takes the same steps in one process. All ranks must call
        this method.

        Args:
            layout: Name of a layout in `LAYOUTS`, `Fsdp1Run.ROWS` or `ZeroRun.ROWS`.
            given: Options of Muon, and keyword arguments of `_compare`. `method` defaults to "standard".
        """
        return _compare(layout, _dense_steps, **{"method": "standard", **given})

    @staticmethod
    def with_torch(layout: str, **given: Any) -> Comparison:
        """Compare a sharded model with an unsharded copy that torch.optim.Muon updates. In the copy, every matrix is a
        separate parameter. All ranks must call this method.

        Args:
            layout: Name of a layout in `LAYOUTS`, `Fsdp1Run.ROWS` or `ZeroRun.ROWS`.
            given: Options that Muon has in common with torch.optim.Muon, and keyword arguments of `_compare`. `method`
                is not allowed, because it is always "torch".

        Raises:
            TypeError: `given` contains `method`.
        """
        return _compare(layout, _torch_steps, method="torch", **given)


def _compare(
    layout: str,
    steps_of: Callable[[_Cases, Mapping[str, Any], _Whole, Sequence[_Whole]], Iterator[_State]],
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    params: Sequence[str] | None = None,
    table: _Cases = PARAMS,
    about: Callable[[Muon], object] | None = None,
    device: str = "cpu",
    **options: Any,
) -> Comparison:
    """Take the same steps with a sharded model and a reference model. Compare the weights after every step, and the
    optimizer state after the last step. The reference results are cached, because they do not depend on the layout. On
    CPUs, rank 0 computes them for all ranks.

    Args:
        layout: Name of a layout in `LAYOUTS`, `Fsdp1Run.ROWS` or `ZeroRun.ROWS`.
        steps_of: Generator function that yields the state of the reference model after each step.
        params: Names of the parameters to select from `table`. Default: all parameters.
        table: Mapping from the name of each parameter to its shape and options.
        about: Optional function that is called with the sharded model's optimizer after the last step.
        options: Options of Muon. `lr` defaults to 1e-3.
    """
    cases, options = {name: table[name] for name in params or table}, {"lr": 1e-3, **options}
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        normal = {name: torch.randn(case.shape, generator=generator) for name, case in cases.items()}
        return {name: t.to(device, dtype) for name, t in normal.items()}

    def make(params: _Whole, of_layout: Mapping[str, Any]) -> Muon:
        return Muon(ParamCase.groups(params, cases), **{**of_layout, **options})

    full = draw()
    kind = ZeroRun if layout in ZeroRun.ROWS else Fsdp1Run if layout in Fsdp1Run.ROWS else _LayoutRun
    with meshes_on(device):
        run: _AnyRun = kind(layout, full, make)
        full, grads = run.start(full), [run.gradients(draw()) for _ in range(steps)]
        key = repr((steps_of.__name__, kind, device, cases, dtype, steps, options))
        if key not in _REMEMBERED:
            made: list[list[_State]] = [[]]
            try:
                if device != "cpu" or dist.get_rank() == 0:
                    made = [list(steps_of(cases, options, full, grads))]
            finally:  # broadcast even if rank 0 fails, because the other ranks wait for it
                if device == "cpu":
                    dist.broadcast_object_list(made)
            if not made[0]:
                raise RuntimeError("rank 0 raised an error in the reference run")
            _REMEMBERED[key] = made[0]
        found = _beside(run, grads, _REMEMBERED[key], sum(len(case.view.matrices) for case in cases.values()))
        if about:
            found = replace(found, about=about(run.optimizer))
        run.close()
    return found


def _beside(run: _AnyRun, grads: Sequence[_Whole], reference: Sequence[_State], num_matrices: int) -> Comparison:
    """Step `run` with the gradients in `grads`. Compare the weights after each step, and the optimizer state after the
    last step, with the states in `reference`."""
    group = run.optimizer.param_groups[0]
    lr, decay = float(group["lr"]), 1 - float(group["lr"]) * float(group["weight_decay"])
    bitwise, worst, where, traffic = True, 0.0, "", Traffic()
    for of_step, state in zip(grads, reference, strict=True):
        before = run.weights()
        earlier = run.optimizer.traffic.since(Traffic())
        run.step(of_step)
        traffic = run.optimizer.traffic.since(earlier)
        expected = run.cut({name: of["weight"] for name, of in state.items()})
        for name, found in run.weights().items():
            bitwise &= torch.equal(found, expected[name])
            decayed = before[name].double() * decay
            one, other = ((decayed - after.double()) / lr for after in (found, expected[name]))
            difference = relative_error(one, other)
            if difference > worst or math.isnan(difference):  # treat NaN as the largest difference
                worst, where = difference, name
    # Momentum of any dtype can be converted to fp64 exactly, so the comparison is bitwise.
    momentum = run.cut({name: of["momentum_buffer"].double() for name, of in state.items()})
    bitwise &= all(torch.equal(found.double(), momentum[name]) for name, found in run.momentum().items())
    return Comparison(worst, bitwise and run.keeps(state), traffic, num_matrices, where)


# Cached states of reference models. The keys do not contain the name of the layout, because the layout has no effect on
# the reference model.
_REMEMBERED: dict[str, list[_State]] = {}


def _dense_steps(cases: _Cases, options: Mapping[str, Any], full: _Whole, grads: Sequence[_Whole]) -> Iterator[_State]:
    """Yield the state of a reference model after each step of shardmuon on unsharded tensors."""
    params = {name: nn.Parameter(t.clone()) for name, t in full.items()}
    optimizer = Muon(ParamCase.groups(params, cases), **options)
    for of_step in grads:
        for name, grad in of_step.items():
            params[name].grad = grad.clone()
        optimizer.step()
        states = {name: {"weight": p.detach(), **optimizer.state[p]} for name, p in params.items()}
        yield {name: {key: t.clone() for key, t in state.items()} for name, state in states.items()}


def _torch_steps(cases: _Cases, options: Mapping[str, Any], full: _Whole, grads: Sequence[_Whole]) -> Iterator[_State]:
    """Yield the state of a reference model after each step of torch.optim.Muon, with one 2-D parameter per matrix."""
    matrices = {name: [nn.Parameter(m.clone()) for m in cases[name].matrices(t)] for name, t in full.items()}
    theirs = {key: value for key, value in options.items() if key != "method"}
    optimizer = torch.optim.Muon([p for of_tensor in matrices.values() for p in of_tensor], **theirs)

    def joined(name: str, values: Sequence[Tensor]) -> Tensor:
        whole = torch.empty_like(full[name])
        places = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
        for at, value in zip(cases[name].matrices(places), values, strict=True):
            whole.view(-1)[at] = value
        return whole

    for of_step in grads:
        for name, grad in of_step.items():
            for p, matrix in zip(matrices[name], cases[name].matrices(grad), strict=True):
                p.grad = matrix
        optimizer.step()
        yield {
            name: {
                "weight": joined(name, [p.detach() for p in of]),
                "momentum_buffer": joined(name, [optimizer.state[p]["momentum_buffer"] for p in of]),
            }
            for name, of in matrices.items()
        }


class _LayoutRun(Run):
    """A run of Muon on parameters that are sharded by a layout in `LAYOUTS`. `weights` and `momentum` return this
    rank's local tensors."""

    def __init__(
        self, name: str, full: Mapping[str, Tensor], make: Callable[[_Whole, Mapping[str, Any]], Muon]
    ) -> None:
        row, world = LAYOUTS[name], dist.get_world_size()
        self._built: Callable[[_Whole], dict[str, Tensor]] = lambda whole: row.build(whole, row.mesh(world))
        self._params = parameters(self._built(full))
        # For each parameter, the indices of this rank's elements in the flattened whole tensor.
        self._stored = {n: _local(t).long() for n, t in row.numbers(full, row.mesh(world)).items()}
        self.optimizer = make(self._params, row.options(world))

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.reshape(-1)[self._stored[name]] for name, t in full.items()}

    def gradients(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(drawn)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in self._built(grads).items():
            self._params[name].grad = grad
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: _local(p).clone() for name, p in self._params.items()}

    def momentum(self) -> dict[str, Tensor]:
        return {name: _local(self.optimizer.state[p]["momentum_buffer"]) for name, p in self._params.items()}

    def keeps(self, state: Mapping[str, Mapping[str, Tensor]]) -> bool:
        return all(
            torch.equal(_local(found).view(-1), _rows_stored(of_param[key], found).view(-1))
            for name, of_param in state.items()
            for key in KEPT_KEYS
            if key in of_param
            for found in [self.optimizer.state[self._params[name]][key]]
        )


_AnyRun = ZeroRun | Fsdp1Run | _LayoutRun


def _rows_stored(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of the whole tensor `whole`, sharded like `like`. If `like` is not a DTensor, return all
    of `whole`."""
    if not is_dtensor(like):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _local(tensor: Tensor) -> Tensor:
    storage = engine_of(tensor).storage(tensor)
    return storage if storage.numel() else storage.new_empty(0)
