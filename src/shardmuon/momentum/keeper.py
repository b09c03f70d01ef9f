"""The keeper of an optimizer's momentum: decides where and in what dtype it is stored, creates state, converts loaded
state, checks it.

It knows parameters, their state and their local storage; the arithmetic is `stores`'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor

from shardmuon._torch import is_bare, is_dtensor
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.layout.engines.flat import home_of
from shardmuon.layout.mesh import same_storage
from shardmuon.layout.pieces import FlatRange
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.momentum.stores import (
    BLOCK,
    SCALE_DTYPE,
    Rounding,
    Stream,
    decode,
    encode,
    scale_shape,
)

MomentumDtype = torch.dtype | Literal["int8"] | None
BUFFER, SCALE, STEP = "momentum_buffer", "momentum_scale", "step"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, which has a "step" of its own


class Keeper:
    """One optimizer's choices about stored momentum and rounding.

    Args:
        dtype: None (the gradient's), torch.float32, torch.bfloat16 or "int8".
        device: None (the parameter's) or "cpu".
        rounds_weights: Whether bf16 weights are rounded at random.

    Attributes:
        rounds: Anything is rounded at random: ranks must then agree on names, and steps are counted.
        as_computed: Momentum lies where it is computed, and rounded to the nearest if at all.
    """

    def __init__(self, dtype: MomentumDtype, device: str | None, rounds_weights: bool) -> None:
        self.dtype, self.device, self.rounds_weights = dtype, device, rounds_weights
        self.rounds = rounds_weights or dtype in (torch.bfloat16, "int8")
        self.as_computed = not self.rounds and device is None

    def text(self) -> str:
        """Text of these choices, equal on ranks that make the same."""
        return f"momentum_dtype={self.dtype} stochastic_rounding={self.rounds_weights}"

    def _kinds(self, like: Tensor, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, torch.device]]:
        """State of a momentum that is computed in this dtype on the device of `like`: key -> dtype and device."""
        place = like.device if self.device is None else torch.device(self.device)
        if isinstance(self.dtype, str):
            return {BUFFER: (torch.int8, place), SCALE: (SCALE_DTYPE, place)}
        return {BUFFER: (self.dtype or dtype, place)}

    # -------------------------------------------------------------------------------------------------- state

    def is_kept(self, state: Mapping[str, Any], buffer: Tensor | None, grad: Tensor, others: int = 0) -> bool:
        """True if a parameter's state is its momentum alone, stored as it is computed: most parameters, in nearly every
        step. Else `fit` makes or converts it.

        Args:
            state: State of the parameter.
            buffer: Local storage of its momentum, if it has any.
            grad: Local storage of its gradient.
            others: State tensors of its variant's stages.
        """
        if buffer is None or len(state) != 1 + others or not self.as_computed:
            return False
        return buffer.dtype == grad.dtype and self.dtype in (None, grad.dtype) and buffer.device == grad.device

    def fit(
        self,
        param: Tensor,
        engine: Engine,
        identity: str,  # the name that all ranks give it
        view: MatrixView,
        grad: Tensor,  # local storage
        state: MutableMapping[str, Any],  # filled and counted up here
    ) -> tuple[Tensor, Rounding]:
        """Local storage of a parameter's momentum (or of its codes) in this step, made or converted if need be, and the
        random bits for rounding it and its weights."""
        stream = weights = None
        count = count_of(state) + 1
        _forget_adamw(state)
        if self.rounds:
            state[STEP] = torch.tensor(count, dtype=torch.float32, device="cpu")  # as torch's optimizers count
            cols = view.longest_row
            if self.dtype in (torch.bfloat16, "int8"):
                stream = Stream.of(identity, "momentum", count, cols)
            if self.rounds_weights and param.dtype == torch.bfloat16:
                weights = Stream.of(identity, "weights", count, cols)
        stored = _stored(engine, state)
        kinds = {key: (t.dtype, t.device) for key, t in stored.items()}
        dense = SCALE not in stored or all(t.is_contiguous() for t in stored.values())
        if not dense or kinds != self._kinds(grad, grad.dtype):
            values = _decoded(stored)
            stored = self._zeros(grad, grad.dtype, view.num_row_dims)
            if values is not None and values.numel():
                made = encode(values, view.num_row_dims) if SCALE in stored else (values,)
                for place, value in zip(stored.values(), made, strict=True):
                    place.copy_(value)
            state.pop(SCALE, None)
            _keep(state, stored, engine, param, view.shape, view.num_row_dims)
        return stored[BUFFER], Rounding(stream, stored.get(SCALE), weights)

    def _zeros(self, like: Tensor, dtype: torch.dtype, num_row_dims: int) -> dict[str, Tensor]:
        """Zeros for the momentum, computed in this dtype, of a parameter with such a storage (and its scales)."""
        kinds = self._kinds(like, dtype)
        if SCALE not in kinds:
            return {key: torch.zeros_like(like, dtype=kind, device=place) for key, (kind, place) in kinds.items()}
        shapes = {BUFFER: tuple(like.shape), SCALE: scale_shape(like.shape, num_row_dims)}
        return {key: torch.zeros(shapes[key], dtype=kind, device=place) for key, (kind, place) in kinds.items()}

    def values(self, engine: Engine, state: Mapping[str, Any]) -> Tensor | None:
        """Momentum of a parameter as stored on this rank, decoded, in its storage's shape; None: nothing yet."""
        return _decoded(_stored(engine, state))

    @property
    def widens(self) -> bool:
        """True if the momentum is computed in fp32, whatever it is stored as."""
        return self.dtype is not None

    # ---------------------------------------------------------------------------------------------- checkpoints

    def start(self, param: Tensor, num_row_dims: int, state: MutableMapping[str, Any]) -> None:
        """Fill in the state that a parameter starts from: zeros, and a count of 0 where steps are counted."""
        _forget_adamw(state)
        engine = engine_of(param)
        stored = self._zeros(engine.storage(param), gradient_dtype(param) or param.dtype, num_row_dims)
        _keep(state, stored, engine, param, engine.shape(param), num_row_dims)
        if self.rounds:
            state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")

    def take(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        """A loaded value in the dtype and place of this optimizer's own; what is coded otherwise is converted by the
        next step, which knows the layout."""
        dtype, place = self._kinds(param, gradient_dtype(param) or value.dtype)[BUFFER]
        if key == SCALE:
            dtype = SCALE_DTYPE
        elif key != BUFFER or not value.is_floating_point() or isinstance(self.dtype, str):
            dtype = value.dtype
        return value.to(device=place, dtype=dtype)


def _stored(engine: Engine, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Local storages of a parameter's momentum and its scales, as far as there are any."""
    return {key: engine.storage(state[key]) for key in (BUFFER, SCALE) if state.get(key) is not None}


def _keep(
    state: MutableMapping[str, Any],
    stored: Mapping[str, Tensor],
    engine: Engine,
    param: Tensor,
    shape: Ints,
    num_row_dims: int,
) -> None:
    """Put local storages into the state of a parameter of this global shape."""
    state[BUFFER] = engine.wrap(stored[BUFFER], param)
    if SCALE in stored:
        state[SCALE] = engine.wrap(stored[SCALE], param, scale_shape(shape, num_row_dims))


def _decoded(stored: Mapping[str, Tensor]) -> Tensor | None:
    if SCALE not in stored:
        return stored.get(BUFFER)
    if not stored[BUFFER].numel():
        return torch.zeros_like(stored[BUFFER], dtype=torch.float32)
    return decode(stored[BUFFER], stored[SCALE])


def count_of(state: Mapping[str, Any]) -> int:
    """Number of steps that Muon has counted. The `step` that AdamW left, if the parameter was its own before, does not
    count."""
    return int(state.get(STEP, 0)) if BUFFER in state and not _was_adamws(state) else 0


def _was_adamws(state: Mapping[str, Any]) -> bool:
    return any(key in state for key in MOMENTS)


def _forget_adamw(state: MutableMapping[str, Any]) -> None:
    """Drop what a parameter kept while it was AdamW's, which would come back stale."""
    if _was_adamws(state):
        for key in (STEP, *MOMENTS):
            state.pop(key, None)


def gradient_dtype(param: Tensor) -> torch.dtype | None:
    """Dtype of a parameter's gradient. None: unknown until there is one (`grad_dtype=None`)."""
    if param.grad is not None:
        return param.grad.dtype
    dtype: torch.dtype | None = getattr(param, "grad_dtype", param.dtype)
    return dtype


def offloaded_from(param: Tensor) -> torch.device | None:
    """The device that a parameter kept on the CPU belongs to, if it says so."""
    if is_bare(param):
        return None
    if not is_dtensor(param):
        return home_of(param)
    kind = param.device_mesh.device_type
    if kind == "cpu" or param.device.type != "cpu":
        return None
    return torch.device(kind, torch.get_device_module(kind).current_device())


def tiles_cut(layout: ParamLayout) -> Iterator[tuple[int, str]]:
    """(rank, what it holds) for each piece or matrix that begins or ends inside a block of columns."""
    view = layout.view
    dim = view.num_row_dims
    inner = math.prod(view.shape[dim + 1 :])
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        for box, local in of_rank:
            if isinstance(box, FlatRange):
                if box.numel:
                    yield rank, f"elements {box.start} to {box.stop}, a run that may begin anywhere in a row"
                continue
            first, last = box.offset[dim], box.offset[dim] + box.size[dim]
            edges = first, local[dim], 0 if last == view.shape[dim] else last
            whole = box.size[dim + 1 :] == view.shape[dim + 1 :] and not any(edge * inner % BLOCK for edge in edges)
            if box.numel and not whole:
                yield rank, f"indices {first} to {last} of {view.shape[dim]} along dim {dim} of shape {view.shape}"
    if view.split_dim == dim or any(matrix.start[-1] % BLOCK for matrix in view.matrices):
        yield layout.ranks[0], "matrices of columns that begin elsewhere (transposed=True)"


def coded_fault(engine: Engine, param: Tensor, num_row_dims: int, state: Mapping[str, Any]) -> str | None:
    """Words, without the parameter's name, on what is wrong with 8-bit momentum; None if nothing is, or the momentum is
    not 8-bit."""
    buffer, scale = state.get(BUFFER), state.get(SCALE)
    coded = isinstance(buffer, Tensor) and buffer.dtype == torch.int8
    if not coded and scale is None:
        return None
    if not coded or not isinstance(scale, Tensor) or not scale.is_floating_point():
        return (
            f"its {BUFFER} is of dtype {getattr(buffer, 'dtype', None)} and its {SCALE} is "
            f"{'missing' if scale is None else 'there'}: 8-bit momentum is int8 and a scale of floating point. Load "
            "both from one checkpoint, or neither"
        )
    shape = engine.storage(param).shape
    for key, expected in ((BUFFER, tuple(shape)), (SCALE, scale_shape(shape, num_row_dims))):
        value = state[key]
        found = tuple(engine.storage(value).shape) if is_dtensor(value) == is_dtensor(param) else None
        if found is None or not same_storage(found, expected):
            return (
                f"its {key} stores shape {found or tuple(value.shape)} here, {expected} was expected: the state was "
                "made for another layout. Load it through torch.distributed.checkpoint, which reshards it"
            )
    return None
