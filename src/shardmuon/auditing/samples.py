"""Matrices that an audit samples: their choice, and what each rank says and holds of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardmuon.auditing.anew import Description
from shardmuon.auditing.dense import Part, part_of
from shardmuon.auditing.report import MatrixRow
from shardmuon.auditing.same import Arithmetic
from shardmuon.comm.groups import my_rank
from shardmuon.host import Core
from shardmuon.layout.engines import engine_of
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Ints
from shardmuon.momentum.keeper import BUFFER
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Item, Kept
from shardmuon.step.binding import Binding
from shardmuon.step.options import Settings
from shardmuon.variants import keeping


def choose(count: int, samples: int, number: int) -> list[int]:
    """Choose matrices of `count` for audit `number`: spread over the layers, others each time, all of them in turn."""
    if not count:
        return []
    stride = max(1, round(0.618 * count))
    while math.gcd(stride, count) > 1:
        stride += 1
    return [(number * samples + i) * stride % count for i in range(min(samples, count))]


def stored_momentum(optimizer: Core, param: Tensor) -> Tensor:  # as the parameter's storage
    """A parameter's momentum as this rank stores it; zeros before its first step."""
    engine = engine_of(param)
    buffer = optimizer.state.get(param, {}).get(BUFFER)
    return torch.zeros_like(engine.storage(param)) if buffer is None else engine.storage(buffer)


def read_momentum(optimizer: Core, param: Tensor) -> Tensor:  # as the parameter's storage
    """A parameter's momentum on this rank, decoded; zeros before its first step."""
    engine = engine_of(param)
    values = optimizer.keeper.values(engine, optimizer.state.get(param, {}))
    return torch.zeros_like(engine.storage(param)) if values is None else values


def read_gradient(param: Tensor, aligned: Tensor | None) -> Tensor | None:
    """A parameter's gradient on this rank. One that is placed otherwise was redistributed for the step: `aligned`."""
    engine = engine_of(param)
    if param.grad is None:
        return None
    return engine.storage(param.grad) if engine.is_aligned(param.grad, param) else aligned


def arithmetic_of(optimizer: Core, binding: Binding, item: Item, grad: Tensor | None) -> Arithmetic:
    """The arithmetic of a matrix by the plan."""
    param, choice = binding.members[item.param].param, Choice.of(item.how)
    stored = stored_momentum(optimizer, param).dtype
    return Arithmetic(
        choice.method,
        choice.dtype or default_dtype(choice.method, binding.ns_device or param.device),
        _WIRES[binding.plan.specs[item.param].itemsizes[item.matrix]],
        param.dtype,
        torch.float32 if optimizer.keeper.widens else stored,
        stored,
        param.dtype if grad is None else grad.dtype,
        choice.kernel,
        choice.alone,
        binding.ns_device,
        item.route == "gram",
    )


_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, slots=True)
class SampledParam:
    """One rank's description of a sampled parameter before the step.

    Attributes:
        trouble: Why it cannot be described, or is not what was planned for; None: it is.
        said: Its description.
        has_grad: True if it has a gradient here.
        wide: True if anything of it is fp64.
    """

    trouble: str | None
    said: Description | None = None
    has_grad: bool = False
    wide: bool = False


@dataclass
class Sample:
    """A sampled matrix, read before the step.

    Attributes:
        order: Number of its parameter, and its own in the parameter.
        layout: Layout of its parameter.
        part: What this rank sends.
        shapes: Shapes of the ranks' storages of the parameter.
        dtype: The dtype in which it is gathered.
        sizes: Elements that each rank sends.
        target: The rank that judges it.
        before: What this rank sends of weights, momentum and gradient before the step.
        kept: Numbers that stages keep, before the step, if this rank keeps them.
    """

    name: str
    order: tuple[int, int]
    param: Tensor
    settings: Settings
    arithmetic: Arithmetic
    layout: ParamLayout
    part: Part
    shapes: tuple[Ints, ...]
    owners: Ranks
    route: str
    dtype: torch.dtype
    sizes: list[int] = field(default_factory=list)
    target: int = 0
    before: list[Tensor] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        matrix = self.layout.view.matrices[self.order[1]]
        return matrix.rows, matrix.cols

    def row(self, status: str, **found: Any) -> MatrixRow:
        """The report's line for this matrix."""
        arithmetic, stored = str(self.arithmetic), str(self.arithmetic.stored_dtype).removeprefix("torch.")
        who = self.name, self.order, *self.shape, self.owners, self.route
        return MatrixRow(*who, arithmetic, status, momentum_dtype=stored, **found)


def keepers_of(kept: Kept, matrix: int) -> Ranks:
    """The ranks that keep what a stage keeps of a matrix."""
    layout = kept.layout
    return tuple(r for r in layout.ranks if len(part_of(layout.view, matrix, layout.of_rank(r)).places))


def read_kept(optimizer: Core, sample: Sample, kept: Sequence[Kept]) -> dict[str, Tensor]:
    """Numbers that stages keep of a matrix on this rank, by key (copies, fp64, 1-D): zeros before its first step."""
    param, matrix = sample.param, sample.order[1]
    engine, found = engine_of(param), {}
    for stage, of_stage in zip(keeping(sample.settings.stages), kept, strict=True):
        view = of_stage.layout.view
        part = part_of(view, matrix, of_stage.layout.of_rank(my_rank()))
        if len(part.places):
            stored = torch.zeros(view.matrices[matrix].cols, dtype=torch.float64, device=param.device)
            value = optimizer.state.get(param, {}).get(stage.key)
            if value is not None:
                stored[part.places.to(param.device)] = part.select(engine.storage(value)).to(stored)
            found[stage.key] = stored
    return found
