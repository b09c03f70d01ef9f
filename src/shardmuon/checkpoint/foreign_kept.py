"""NorMuon's averages of other libraries as a stage here keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.layout.engines import engine_for
from shardmuon.layout.views import Ints, MatrixView, kept_view, matrix_view
from shardmuon.options import view_options
from shardmuon.step.kept import KEPT_DTYPE, start_kept
from shardmuon.variants import keeping, stages_of


def taken_over(
    name: str,
    p: Tensor,
    group: Mapping[str, Any],
    key: str,
    value: Any,
    of_rows: bool,
    conversions: list[str],
    own_part: Callable[[str, Tensor, Tensor], Tensor],
) -> Tensor:
    """A parameter's state tensor, theirs or zeros with a word about it.

    Args:
        name, p, group: The parameter, and its group here.
        key: Of the state here.
        value: What they have of it; None: nothing.
        of_rows: It has one number for each stored row, as dion's.
        conversions: What is done is added here.
        own_part: (name, DTensor, whole tensor) -> what this rank stores of the whole, placed as the DTensor.

    Raises:
        ValueError: It does not fit; says the name.
    """
    engine = engine_for(p, group)
    try:
        view = matrix_view(engine.shape(p), **view_options(group))
    except ValueError as wrong:
        raise ValueError(f"{name}: {wrong}") from None
    stage = next(stage for stage in keeping(stages_of(group)) if stage.key == key)
    shape = kept_view(view, [stage.num_kept(matrix.rows, matrix.cols) for matrix in view.matrices]).shape
    made = start_kept({key: shape}, engine, p, {}, stacked=view.num_row_dims == 2)[key]
    if value is None:
        conversions.append(f"{key} starts from zeros")
        return made
    if is_dtensor(value):
        stacked = view.num_row_dims == 2
        stored = engine.kept_storage(value, p, shape, stacked=stacked)
        if isinstance(stored, str):
            raise ValueError(
                f"{name}: its {key} is {stored}. Give whole tensors: value.full_tensor() on all ranks of its mesh"
            )
        own = stored.to(device=engine.storage(p).device, dtype=KEPT_DTYPE, copy=True)
        return engine.wrap_kept(own, p, shape, stacked=stacked)
    if of_rows:
        value, lost = _from_rows(name, value, view, shape)
        if lost:
            conversions.append(f"{key} of {lost} matrices from zeros: theirs is of rows, here it is of columns")
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: its {key} has shape {found}, {shape} was expected")
    whole = value.to(device=p.device, dtype=KEPT_DTYPE, copy=True)
    if is_dtensor(made):
        return own_part(name, made, whole)
    return whole


def _from_rows(name: str, value: Tensor, view: MatrixView, shape: Ints) -> tuple[Tensor, int]:
    """One number for each stored row as numbers of each matrix along its longer dim, and of how many matrices there are
    none."""
    rows, expected = value.reshape(-1), math.prod(view.shape[: view.num_row_dims])
    if len(rows) != expected:
        raise ValueError(
            f"{name}: its averages have shape {tuple(value.shape)}; one for each of {expected} rows was expected"
        )
    num_dims = view.num_row_dims + (0 <= view.split_dim < view.num_row_dims)  # of the fine index space, that count rows
    rows = rows.view(view.fine[:num_dims])
    parts, lost = [], 0
    for matrix in view.matrices:
        start, sizes = matrix.start[:num_dims], matrix.sizes[:num_dims]
        as_stored = math.prod(sizes) == matrix.rows and matrix.strides[-1] == 1  # not turned round
        fits = matrix.rows >= matrix.cols and as_stored and matrix.sizes[num_dims:] == view.fine[num_dims:]
        lost += not fits
        own = rows[tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))]
        parts.append(own.flatten() if fits else rows.new_zeros(max(matrix.rows, matrix.cols)))
    return torch.cat(parts).reshape(shape), lost
