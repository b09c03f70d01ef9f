"""What an audit takes of a matrix: how it was chosen, what each rank says and holds of it, what is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmuon.auditing.anew import Said
from shardmuon.auditing.dense import MatrixPieces, pieces_of
from shardmuon.auditing.evidence import Evidence
from shardmuon.auditing.same import Arithmetic
from shardmuon.comm.groups import my_rank
from shardmuon.host import Core
from shardmuon.layout.engines import engine_of
from shardmuon.layout.table import Ranks
from shardmuon.layout.views import Ints
from shardmuon.momentum.keeper import BUFFER
from shardmuon.momentum.rounding import Stream
from shardmuon.momentum.update import lr_scale
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Item, Kept
from shardmuon.step.binding import Binding
from shardmuon.step.options import Settings
from shardmuon.variants import Stages, keeping


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


def read_gradient(param: Tensor, aligned: Tensor | None) -> Tensor | None:
    """A parameter's gradient on this rank. One that is placed otherwise was redistributed for the step: `aligned`."""
    engine = engine_of(param)
    if param.grad is None:
        return None
    return engine.storage(param.grad) if engine.is_aligned(param.grad, param) else aligned


def arithmetic_of(optimizer: Core, binding: Binding, item: Item, grad: Tensor | None) -> Arithmetic:
    """How a matrix is orthogonalized, by the plan."""
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
class Found:
    """What a rank finds of a sampled parameter, before the step.

    Attributes:
        trouble: Why it cannot be described, or is not what was planned for; None: it is.
        said: Its description.
        has_grad: True if it has a gradient here.
        wide: True if anything of it is fp64.
    """

    trouble: str | None
    said: Said | None = None
    has_grad: bool = False
    wide: bool = False


@dataclass
class Sample:
    """A sampled matrix, read before the step."""

    name: str
    order: tuple[int, int]
    param: Tensor
    settings: Settings
    arithmetic: Arithmetic
    pieces: MatrixPieces
    shapes: tuple[Ints, ...]
    owners: Ranks
    route: str
    dtype: torch.dtype  # in which it is gathered
    before: list[Tensor] = field(default_factory=list)
    target: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)  # by stages, before the step, where this rank keeps it


def keepers_of(kept: Kept, matrix: int) -> Ranks:
    """The ranks that keep what a stage keeps of a matrix."""
    ranks = kept.layout.ranks
    return tuple(rank for rank in ranks if pieces_of(kept.layout, matrix, only=rank).spots)


def read_kept(optimizer: Core, param: Tensor, kept: Sequence[Kept], stages: Stages, matrix: int) -> dict[str, Tensor]:
    """What stages keep of a matrix on this rank (copies, fp64, 1-D), by key: zeros before its first step, and nothing
    of what other ranks keep."""
    engine, found, rank = engine_of(param), {}, my_rank()
    for stage, of_stage in zip(keeping(stages), kept, strict=True):
        pieces = pieces_of(of_stage.layout, matrix, only=rank)
        if pieces.spots:
            value = optimizer.state.get(param, {}).get(stage.key)
            stored = torch.zeros(pieces.cols, dtype=torch.float64, device=param.device)
            if value is not None:
                storage = engine.storage(value)
                sent = [pieces.select(storage, r) for r in pieces.ranks]
                stored = pieces.assemble(sent).reshape(-1).to(torch.float64, copy=True)
            found[stage.key] = stored
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
