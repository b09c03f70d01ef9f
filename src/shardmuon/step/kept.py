"""State of variants' stages: makes it, checks it, and says where it lies. See [Note: what a stage keeps] in
variants/base.py; where it lies engines say."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.layout.engines import Engine
from shardmuon.layout.views import Ints, MatrixView, kept_view
from shardmuon.variants import WEIGHT_NORMS, Stages, WeightStage, keeping

Settled = MutableMapping[Tensor, bool]  # state tensors of stages on weights, once a step has looked at them

KEPT_DTYPE = torch.float32  # whatever weights and products are


def state_shapes(stages: Stages, view: MatrixView) -> dict[str, Ints]:
    """Key -> the global shape of each state tensor of a parameter with these matrices."""
    return {stage.key: _view_of(stage, view).shape for stage in keeping(stages)}


def _view_of(stage: Any, view: MatrixView) -> MatrixView:
    return kept_view(view, [stage.num_kept(matrix.rows, matrix.cols) for matrix in view.matrices])


def start_kept(
    shapes: Mapping[str, Ints], engine: Engine, param: Tensor, state: Mapping[str, Any], *, stacked: bool
) -> dict[str, Tensor]:
    """Zeros for each state tensor that is missing, on the parameter's device. `stacked`: the parameter is a stack."""
    made: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        if state.get(key) is None:
            local = engine.kept_shape(param, shape, stacked=stacked)
            zeros = torch.zeros(local, dtype=KEPT_DTYPE, device=engine.storage(param).device)
            made[key] = engine.wrap_kept(zeros, param, shape, stacked=stacked)
    return made


def unsettled(stages: Stages, state: Mapping[str, Any], settled: Settled) -> tuple[str, ...]:
    """Keys of state tensors that are missing, and of norms that no step has looked at since they were made or loaded.

    Checkpoints make state before there was a step, where a norm of 0 says that it is not known. Ranks must agree on
    these: stages on weights begin with a reduction for them, and a copy that only one rank lost would begin from zeros.
    """
    on_weights = [stage.key for stage in stages if isinstance(stage, WeightStage)]
    found = []
    for stage in keeping(stages):
        value = state.get(stage.key)
        if value is None or (stage.key in on_weights and value not in settled):
            found.append(stage.key)
    return tuple(found)


class MatrixNumbers(NamedTuple):
    """Numbers of the matrices in which each row (or column) of a parameter lies.

    Attributes:
        number: (rows,), int64: number of each row's matrix.
        total: Number of matrices.
    """

    number: Tensor
    total: int


def forget_norms(
    state: Mapping[str, Any],
    settled: Settled,
    factors: Tensor,  # (rows,), or of columns
    matrices: MatrixNumbers | None,  # None: each row is in all of them
) -> None:
    """Let the next step measure anew the norms of matrices that have any row whose factor is not 1, as a parameter's
    rows have been multiplied with `factors`. To be called on every rank that shares it; waits for no device."""
    changed = factors != 1.0
    for key in WEIGHT_NORMS:
        value = state.get(key)
        if isinstance(value, Tensor):
            settled.pop(value, None)
            local = value.to_local() if is_dtensor(value) else value
            if matrices is None or local.shape[-1] != matrices.total:
                wrong = changed.any()
            else:
                sums = torch.zeros(matrices.total, dtype=torch.int32, device=changed.device)
                wrong = sums.index_add_(0, matrices.number.to(changed.device), changed.int()) > 0
            local.masked_fill_(wrong.to(local.device), 0.0)


def stored_kept(
    shapes: Mapping[str, Ints], engine: Engine, param: Tensor, state: Mapping[str, Any], *, stacked: bool
) -> tuple[Tensor, ...]:
    """Local storage of each state tensor of a parameter's stages, in the order of `shapes`.

    Raises:
        ValueError: A tensor is missing or has another layout or dtype; the message lacks the parameter's name.
    """
    found: list[Tensor] = []
    for key, shape in shapes.items():
        local = engine.kept_storage(state.get(key), param, shape, stacked=stacked)
        if isinstance(local, Tensor) and local.dtype != KEPT_DTYPE:
            local = f"of dtype {local.dtype}, not {KEPT_DTYPE}"
        if isinstance(local, str):
            raise ValueError(
                f"its {key} is {local}: the state was made for another layout or variant. Load it through "
                f"torch.distributed.checkpoint, which reshards it, or delete it: del optimizer.state[param][{key!r}]"
            )
        found.append(local)
    return tuple(found)
