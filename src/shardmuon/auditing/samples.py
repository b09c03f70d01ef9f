"""What an audit takes of a matrix: how it was chosen, what each rank says and holds of it, what is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardmuon.auditing.dense import MatrixPieces
from shardmuon.auditing.evidence import Evidence
from shardmuon.auditing.same import Arithmetic
from shardmuon.comm.groups import my_rank
from shardmuon.engines import engine_of
from shardmuon.momentum.keeper import BUFFER
from shardmuon.momentum.rounding import Stream
from shardmuon.momentum.update import lr_scale
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.choice import Choice
from shardmuon.planning.types import Kept
from shardmuon.planning.views import Ranks, Shape
from shardmuon.stepping.settings import Settings
from shardmuon.stepping.work import ParamWork
from shardmuon.variants import Stages, keeping

if TYPE_CHECKING:
    from shardmuon.core import Core


def choose(count: int, samples: int, number: int) -> list[int]:
    """Which of `count` matrices audit `number` takes: spread over the layers, others each time, all of them in turn."""
    if not count:
        return []
    stride = max(1, round(0.618 * count))
    while math.gcd(stride, count) > 1:
        stride += 1
    return [(number * samples + i) * stride % count for i in range(min(samples, count))]


def stored_momentum(optimizer: Core, param: Tensor) -> Tensor:  # as the parameter's storage
    """What is stored of a parameter's momentum on this rank; zeros before its first step."""
    engine = engine_of(param)
    buffer = optimizer.state.get(param, {}).get(BUFFER)
    return torch.zeros_like(engine.storage(param)) if buffer is None else engine.storage(buffer)


def read_momentum(optimizer: Core, param: Tensor) -> Tensor:  # as the parameter's storage
    """A parameter's momentum on this rank, decoded; zeros before its first step."""
    engine = engine_of(param)
    values = optimizer.keeper.values(engine, optimizer.state.get(param, {}))
    return torch.zeros_like(engine.storage(param)) if values is None else values


def read_gradient(param: Tensor, work: ParamWork | None) -> Tensor | None:
    """A parameter's gradient on this rank. One that is placed otherwise was redistributed for the step: that one."""
    engine = engine_of(param)
    if param.grad is None:
        return None
    if engine.is_aligned(param.grad, param):
        return engine.storage(param.grad)
    return None if work is None else work.grad


def arithmetic_of(optimizer: Core, param: Tensor, how: str, route: str, grad: Tensor | None) -> Arithmetic:
    """How a matrix of a parameter is orthogonalized: `how` and `route` are the plan's."""
    kernel, choice = optimizer.kernel(), Choice.of(how)
    device = kernel.device or param.device
    stored = stored_momentum(optimizer, param).dtype
    computed = torch.float32 if optimizer.keeper.widens else stored
    products = choice.dtype or default_dtype(choice.method, device)
    return Arithmetic(
        choice.method,
        products,
        kernel.wire_of(how),
        param.dtype,
        computed,
        stored,
        param.dtype if grad is None else grad.dtype,
        choice.kernel,
        choice.alone,
        kernel.device,
        route == "gram",
        optimizer.keeper.rounds_weights,
    )


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank says that it holds of a sampled parameter, before the step."""

    trouble: str | None
    shape: Shape = ()
    fits: tuple[bool, ...] = ()
    has_grad: bool = False
    wide: bool = False  # whether anything of it is fp64
    extent: tuple[int, ...] | None = None


@dataclass
class Sample:
    """A sampled matrix, read before the step."""

    name: str
    order: tuple[int, int]
    param: Tensor
    settings: Settings
    arithmetic: Arithmetic
    pieces: MatrixPieces
    shapes: tuple[Shape, ...]
    owners: Ranks
    route: str
    dtype: torch.dtype  # in which it is gathered
    before: list[Tensor] = field(default_factory=list)
    target: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)  # by stages, before the step, where this rank keeps it


def read_kept(optimizer: Core, param: Tensor, kept: Sequence[Kept], stages: Stages, matrix: int) -> dict[str, Tensor]:
    """What stages keep of a matrix on this rank (copies, fp64, 1-D), by key: zeros before its first step, and nothing
    of what other ranks keep."""
    engine, found = engine_of(param), {}
    for stage, of_stage in zip(keeping(stages), kept, strict=True):
        fragments = of_stage.layout.fragments[matrix].get(my_rank())
        if fragments:
            value = optimizer.state.get(param, {}).get(stage.key)
            zeros = torch.zeros(of_stage.size(matrix), dtype=torch.float64, device=param.device)
            stored = None if value is None else fragments[0].select_local(engine.storage(value)).reshape(-1)
            found[stage.key] = zeros if stored is None else stored.to(torch.float64, copy=True)
    return found


def evidence_of(
    sample: Sample,
    tensors: Sequence[Tensor],
    rounding: tuple[Stream, int] | None,
    kept_after: Mapping[str, Tensor],
    fresh: tuple[str, ...],
) -> Evidence:
    before, buffer, grad, after, buffer_after = (t.to(torch.float64) for t in tensors)
    settings, pieces = sample.settings, sample.pieces
    shards = [(b[0].stop - b[0].start, b[1].stop - b[1].start) for b in pieces.blocks()]
    shards += [(s[0], torch.Size(s[1:]).numel()) for s in sample.shapes if len(s) > 1 and 0 not in s]
    scales = {}
    for shape in dict.fromkeys(shards):
        if shape != (pieces.rows, pieces.cols):
            try:
                scales[shape] = lr_scale(settings.adjust_lr_fn, *shape, settings.extra_scale_factor)
            except Exception:  # the caller's own scale need not know shapes of shards
                continue
    return Evidence(
        sample.name,
        sample.order,
        sample.owners,
        sample.route,
        sample.arithmetic,
        settings,
        lr_scale(settings.adjust_lr_fn, pieces.rows, pieces.cols, settings.extra_scale_factor),
        scales,
        pieces,
        before,
        buffer,
        grad,
        after,
        buffer_after,
        rounding,
        sample.kept,
        kept_after,
        fresh,
    )
