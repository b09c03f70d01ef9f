"""Where and in what dtype an optimizer keeps its momentum: creates state, converts loaded state, checks it.

It knows parameters, their state and their local storage; the arithmetic is `stores`'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shardmuon._torch import is_bare, is_dtensor
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.layout.engines.flat import home_of
from shardmuon.layout.mesh import same_storage
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints
from shardmuon.momentum.rounding import Stream
from shardmuon.momentum.stores import (
    BLOCK,
    SCALE_DTYPE,
    decode_whole,
    encode_whole,
    scale_shape,
)

MomentumDtype = torch.dtype | Literal["int8"] | None
BUFFER, SCALE, STEP = "momentum_buffer", "momentum_scale", "step"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, which has a "step" of its own


class Kept(Protocol):
    """A parameter whose momentum is kept.

    Attributes:
        param, engine: The tensor, and what reaches its storage.
        identity: The name that all ranks give it.
    """

    @property
    def param(self) -> Tensor: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def identity(self) -> str: ...


class Rows(Protocol):
    """What stored momentum depends on of a view: see `MatrixView`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_row_dims(self) -> int: ...
    @property
    def longest_row(self) -> int: ...


class Fitted(NamedTuple):
    """One parameter's momentum in one step.

    Attributes:
        buffer: Local storage of it, or of its codes.
        scale: Of codes.
        stream: Random bits for rounding it. None: it is stored as it is computed.
        weights: Random bits for rounding its weights. None: they are rounded to nearest.
    """

    buffer: Tensor
    scale: Tensor | None
    stream: Stream | None
    weights: Stream | None


class Keeper:
    """One optimizer's choices about stored momentum and rounding.

    Args:
        dtype: None (the gradient's), torch.float32, torch.bfloat16 or "int8".
        device: None (the parameter's) or "cpu".
        rounds_weights: Whether half-precision weights are rounded at random.
    """

    def __init__(self, dtype: MomentumDtype, device: str | None, rounds_weights: bool) -> None:
        self.dtype, self.device, self.rounds_weights = dtype, device, rounds_weights
        self._plain = not self.rounds and device is None

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded at random: ranks must then agree on names, and steps are counted."""
        return self.rounds_weights or self.dtype in (torch.bfloat16, "int8")

    def text(self) -> str:
        """Equal on ranks that do the same."""
        return f"momentum_dtype={self.dtype} stochastic_rounding={self.rounds_weights}"

    def _dtype_of(self, like: torch.dtype) -> torch.dtype:
        if self.dtype is None:
            return like
        return torch.int8 if isinstance(self.dtype, str) else self.dtype

    def _place(self, like: Tensor) -> torch.device:
        return like.device if self.device is None else torch.device(self.device)

    # -------------------------------------------------------------------------------------------------- state

    def is_kept(self, state: Mapping[str, Any], buffer: Tensor | None, grad: Tensor, others: int = 0) -> bool:
        """True if a parameter's state is its momentum alone, stored as it is computed: most parameters, in nearly every
        step. Else `fit` makes or converts it.

        Args:
            state: Of the parameter.
            buffer: Local storage of its momentum, if it has any.
            grad: Of its gradient.
            others: State tensors of its variant's stages.
        """
        if buffer is None or len(state) != 1 + others or not self._plain:
            return False
        return buffer.dtype == grad.dtype and self.dtype in (None, grad.dtype) and buffer.device == grad.device

    def fit(self, c: Kept, view: Rows, grad: Tensor, state: MutableMapping[str, Any]) -> Fitted:
        """This step's momentum of a parameter, made or converted where need be, and how to round it and its weights.

        Args:
            c: The parameter.
            view: Its matrices.
            grad: Local storage of its gradient.
            state: Its state; filled and counted up here.
        """
        stream = weights = None
        count = count_of(state) + 1
        _forget_adamw(state)
        if self.rounds:
            state[STEP] = torch.tensor(count, dtype=torch.float32, device="cpu")  # as torch's optimizers count
            cols = view.longest_row
            if self.dtype in (torch.bfloat16, "int8"):
                stream = Stream.of(c.identity, "momentum", count, cols)
            if self.rounds_weights and c.param.dtype in (torch.bfloat16, torch.float16):
                weights = Stream.of(c.identity, "weights", count, cols)
        return Fitted(*self._stored(c, view, grad, state), stream, weights)

    def _stored(
        self, c: Kept, view: Rows, grad: Tensor, state: MutableMapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Local storages of the momentum (and its scales) in the dtype and place that the options ask for."""
        local = {key: c.engine.storage(state[key]) for key in (BUFFER, SCALE) if state.get(key) is not None}
        if self._fits(local, grad):
            return local[BUFFER], local.get(SCALE)
        rows = view.num_row_dims
        values = self.values(c.engine, state)
        buffer, scale = self._allocate(grad, self._dtype_of(grad.dtype), rows)
        if values is not None and values.numel() and scale is not None:
            for mine, made in zip((buffer, scale), encode_whole(values, rows), strict=True):
                mine.copy_(made)
        elif values is not None and values.numel():
            buffer.copy_(values)
        state[BUFFER] = c.engine.wrap(buffer, c.param)
        state.pop(SCALE, None)
        if scale is not None:
            state[SCALE] = c.engine.wrap(scale, c.param, scale_shape(tuple(view.shape), rows))
        return buffer, scale

    def _fits(self, local: Mapping[str, Tensor], grad: Tensor) -> bool:
        buffer, scale = local.get(BUFFER), local.get(SCALE)
        if buffer is None or (buffer.dtype == torch.int8) != (scale is not None):
            return False
        if buffer.dtype != self._dtype_of(grad.dtype) or (scale is not None and scale.dtype != SCALE_DTYPE):
            return False
        place = self._place(grad)
        return all(t.device == place and (t.is_contiguous() or scale is None) for t in local.values())

    def _allocate(self, grad: Tensor, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor | None]:
        """Zeros for a parameter's momentum (and its scales)."""
        place = self._place(grad)
        if dtype != torch.int8:
            return torch.zeros_like(grad, dtype=dtype, device=place), None
        shape = tuple(grad.shape)
        scale = torch.zeros(scale_shape(shape, rows), dtype=SCALE_DTYPE, device=place)
        return torch.zeros(shape, dtype=dtype, device=place), scale

    def values(self, engine: Engine, state: Mapping[str, Any]) -> Tensor | None:
        """What is stored of a parameter's momentum on this rank, decoded, in its storage's shape; None: nothing yet."""
        local = {key: engine.storage(state[key]) for key in (BUFFER, SCALE) if state.get(key) is not None}
        if SCALE not in local:
            return local.get(BUFFER)
        if not local[BUFFER].numel():
            return torch.zeros_like(local[BUFFER], dtype=torch.float32)
        return decode_whole(local[BUFFER], local[SCALE])

    @property
    def widens(self) -> bool:
        """Whether the momentum is computed in fp32, whatever it is stored as."""
        return self.dtype is not None

    # ---------------------------------------------------------------------------------------------- checkpoints

    def start(self, param: Tensor, num_row_dims: int, state: MutableMapping[str, Any]) -> None:
        """Fill in the state that a parameter starts from: zeros, and a count of 0 where steps are counted."""
        _forget_adamw(state)
        engine = engine_of(param)
        storage = engine.storage(param)
        dtype = self._dtype_of(gradient_dtype(param) or param.dtype)
        place = self._place(storage)
        state[BUFFER] = engine.wrap(torch.zeros_like(storage, dtype=dtype, device=place), param)
        if dtype == torch.int8:
            scale = torch.zeros(scale_shape(tuple(storage.shape), num_row_dims), dtype=SCALE_DTYPE, device=place)
            state[SCALE] = engine.wrap(scale, param, scale_shape(engine.shape(param), num_row_dims))
        if self.rounds:
            state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")

    def loaded_fault(self, param: Tensor, num_row_dims: int, values: Mapping[str, Any]) -> str | None:
        """What is wrong with the momentum of a state dict, if it is 8-bit codes and scales."""
        buffer, scale = values.get(BUFFER), values.get(SCALE)
        coded = isinstance(buffer, Tensor) and buffer.dtype == torch.int8
        if not coded and scale is None:
            return None
        if not coded or not isinstance(scale, Tensor) or not scale.is_floating_point():
            return (
                f"its {BUFFER} in the checkpoint is of dtype {getattr(buffer, 'dtype', None)} and its {SCALE} is "
                f"{'missing' if scale is None else 'there'}: 8-bit momentum is int8 and a floating-point scale"
            )
        assert isinstance(buffer, Tensor), "coded"
        shape = engine_of(param).shape(param)
        expected = scale_shape(tuple(shape), num_row_dims)
        if tuple(buffer.shape) == tuple(shape) and tuple(scale.shape) == tuple(expected):
            return None
        return (
            f"its {BUFFER} and {SCALE} in the checkpoint have shapes {tuple(buffer.shape)} and {tuple(scale.shape)}; "
            f"{tuple(shape)} and {tuple(expected)} were expected"
        )

    def take(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        """A loaded value in the dtype and place of this optimizer's own; what is coded otherwise is converted by the
        next step, which knows the layout."""
        dtype = value.dtype
        if key == BUFFER and value.is_floating_point() and not isinstance(self.dtype, str):
            dtype = self.dtype or gradient_dtype(param) or value.dtype
        if key == SCALE:
            dtype = SCALE_DTYPE
        return value.to(device=self._place(param), dtype=dtype)


def count_of(state: Mapping[str, Any]) -> int:
    """How many steps Muon has counted. AdamW's `step` of a parameter that was its own before is another count."""
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
    rows = view.num_row_dims
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        for held in of_rank:
            box = held.piece if isinstance(held.piece, Box) else None
            run = None if isinstance(held.piece, Box) else (held.piece.start, held.piece.stop)
            found = _cut(view, box, run, held.local)
            if found is not None and held.piece.numel:
                yield rank, found
    if view.split_dim == rows or any(matrix.start[-1] % BLOCK for matrix in view.matrices):
        yield layout.ranks[0], "matrices of columns that begin elsewhere (split_dim=1)"


def _cut(view: Rows, box: tuple[Ints, Ints] | None, run: tuple[int, int] | None, local: Ints) -> str | None:
    """What a piece is, if it begins or ends inside a block: offset and size of a box, or a run of elements."""
    rows, shape = view.num_row_dims, view.shape
    if run is not None or box is None:
        return None if run is None else f"elements {run[0]} to {run[1]}, a run that may begin anywhere in a row"
    offset, size = box
    inner = math.prod(shape[rows + 1 :])
    whole_inside = size[rows + 1 :] == shape[rows + 1 :]
    first, last = offset[rows], offset[rows] + size[rows]
    starts_here = first * inner % BLOCK == 0 and local[rows] * inner % BLOCK == 0
    if whole_inside and starts_here and (last == shape[rows] or last * inner % BLOCK == 0):
        return None
    return f"indices {first} to {last} of {shape[rows]} along dim {rows} of shape {shape}"


def is_coded(buffer: Tensor | None, state: Mapping[str, Any]) -> bool:
    """Whether a parameter's momentum is of codes, or has scales."""
    return buffer is not None and (buffer.dtype == torch.int8 or state.get(SCALE) is not None)


def scale_fault(c: Kept, view: Rows, state: Mapping[str, Any]) -> str | None:
    """What is wrong with 8-bit momentum, in words that lack the name."""
    buffer, scale = state[BUFFER], state.get(SCALE)
    if scale is None or buffer.dtype != torch.int8:
        return (
            f"its {BUFFER} is of dtype {buffer.dtype} and its {SCALE} is {'missing' if scale is None else 'there'}: "
            "8-bit momentum is int8 and a scale. Load both from one checkpoint, or neither"
        )
    found = tuple(c.engine.storage(scale).shape)
    expected = scale_shape(c.engine.storage(c.param).shape, view.num_row_dims)
    if same_storage(found, expected):
        return None
    return (
        f"its {SCALE} stores shape {found} here, {expected} was expected: the state was made for another layout. Load "
        "it through torch.distributed.checkpoint, which reshards it"
    )
