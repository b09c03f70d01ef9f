"""Management of stored momentum: `Keeper` creates, converts and checks the momentum of each parameter, in the dtype and
on the device that the optimizer's options select. The arithmetic is in stores.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor, local_if_any
from shardmuon.errors import Refused
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.layout.mesh import same_storage
from shardmuon.layout.pieces import FlatRange, ParamLayout
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.stores import (
    BLOCK,
    Rounding,
    Stream,
    decode,
    encode,
    scale_shape,
)

MomentumDtype = torch.dtype | Literal["int8"] | None
BUFFER, SCALE, STEP = "momentum_buffer", "momentum_scale", "step"
MOMENTS = ("exp_avg", "exp_avg_sq")  # keys of AdamW's optimizer state, in addition to "step"


class Keeper:
    """Manager of an optimizer's stored momentum. It creates, converts and checks the momentum, and provides the random
    bits with which momentum and weights are rounded.

    Args:
        dtype: Dtype of stored momentum: torch.float32, torch.bfloat16 or "int8"; None for the gradient's dtype.
        device: Device of stored momentum: "cpu", or None for the parameter's device.
        rounds_weights: True if bf16 weights are rounded stochastically.

    Attributes:
        rounds: True if momentum or weights are rounded stochastically. In this case, steps are counted, and ranks must
            agree on parameter names, because the random bits for a parameter depend on its name and on the step.
        as_computed: True if momentum is stored on the device where it is computed, without stochastic rounding.
    """

    def __init__(self, dtype: MomentumDtype, device: str | None, rounds_weights: bool) -> None:
        self.dtype, self.device, self.rounds_weights = dtype, device, rounds_weights
        self.rounds = rounds_weights or dtype in (torch.bfloat16, "int8")
        self.as_computed = not self.rounds and device is None

    def _kinds(self, like: Tensor, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, torch.device]]:
        """Return a dict from state key to a pair (dtype, device) for each stored tensor: the momentum and, if momentum
        is stored as 8-bit codes, the scales.

        Args:
            like: Any tensor on the parameter's device.
            dtype: Dtype in which the momentum is computed.
        """
        place = like.device if self.device is None else torch.device(self.device)
        if isinstance(self.dtype, str):
            return {BUFFER: (torch.int8, place), SCALE: (torch.float32, place)}
        return {BUFFER: (self.dtype or dtype, place)}

    # -------------------------------------------------------------------------------------------------- state

    def is_kept(self, state: Mapping[str, Any], buffer: Tensor | None, grad: Tensor, others: int = 0) -> bool:
        """True if a parameter's state can be used without changes: it contains only the momentum and the state of the
        Muon variant, and the momentum has the gradient's dtype and device. Always False if `as_computed` is False. If
        the result is False, the caller must call `fit`.

        Args:
            state: State of the parameter.
            buffer: Local storage of the momentum; None before the first step.
            grad: Local storage of the gradient.
            others: Number of state tensors that the Muon variant (such as NorMuon) stores for the parameter.
        """
        if buffer is None or len(state) != 1 + others or not self.as_computed:
            return False
        return buffer.dtype == grad.dtype and self.dtype in (None, grad.dtype) and buffer.device == grad.device

    def fit(
        self,
        param: Tensor,
        engine: Engine,
        identity: str,  # name of the parameter, equal on all ranks
        view: MatrixView,
        grad: Tensor,  # local storage of the gradient
        state: MutableMapping[str, Any],  # the parameter's state, step count included; updated in place
    ) -> tuple[Tensor, Rounding]:
        """Create or convert a parameter's stored momentum as needed for this step.

        Returns:
            A pair: the local storage of the momentum (or of its 8-bit codes), and the `Rounding` of momentum and
            weights.
        """
        stream = weights = None
        count = self.count_of(state) + 1
        _forget_adamw(state)
        if self.rounds:
            # The step count is fp32, like the step counts of torch's own optimizers.
            state[STEP] = torch.tensor(count, dtype=torch.float32, device="cpu")
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
            stored = self._zeros(state, engine, param, grad, grad.dtype, view.num_row_dims)
            if values is not None and values.numel():
                made = encode(values, view.num_row_dims) if SCALE in stored else (values,)
                for place, value in zip(stored.values(), made, strict=True):
                    place.copy_(value)
        return stored[BUFFER], Rounding(stream, stored.get(SCALE), weights)

    def _zeros(
        self,
        state: MutableMapping[str, Any],  # state of the parameter, which is updated in place
        engine: Engine,
        param: Tensor,
        like: Tensor,  # local storage of the parameter or its gradient, which determines shape and device
        dtype: torch.dtype,  # dtype in which the momentum is computed
        num_row_dims: int,  # number of leading dims that index rows
    ) -> dict[str, Tensor]:
        """Put zero-filled momentum and, if 8-bit codes are used, zero-filled scales into a parameter's state, as
        DTensors if the parameter is a DTensor. Return a dict from state key to local tensor.
        """
        kinds = self._kinds(like, dtype)
        if SCALE not in kinds:
            stored = {key: torch.zeros_like(like, dtype=kind, device=place) for key, (kind, place) in kinds.items()}
        else:
            shapes = {BUFFER: tuple(like.shape), SCALE: scale_shape(like.shape, num_row_dims)}
            stored = {key: torch.zeros(shapes[key], dtype=kind, device=place) for key, (kind, place) in kinds.items()}
        state.pop(SCALE, None)
        state[BUFFER] = engine.wrap(stored[BUFFER], param)
        if SCALE in stored:
            state[SCALE] = engine.wrap(stored[SCALE], param, scale_shape(engine.shape(param), num_row_dims))
        return stored

    @staticmethod
    def count_of(state: Mapping[str, Any]) -> int:
        """Return the number of steps that Muon has counted for a parameter; a `step` left over from AdamW counts as
        0."""
        return int(state.get(STEP, 0)) if BUFFER in state and not _was_adamws(state) else 0

    @staticmethod
    def check_coded(engine: Engine, param: Tensor, num_row_dims: int, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the codes and scales of 8-bit momentum do not match each other or the parameter. The
        message does not name the parameter. The shape of the codes is not checked here, because the callers check
        the shape of stored momentum in every dtype."""
        buffer, scale = state.get(BUFFER), state.get(SCALE)
        coded = isinstance(buffer, Tensor) and buffer.dtype == torch.int8
        if not coded and scale is None:
            return
        if not coded or not isinstance(scale, Tensor) or not scale.is_floating_point():
            raise ValueError(
                f"its {BUFFER} is of dtype {getattr(buffer, 'dtype', None)} and its {SCALE} is "
                f"{'missing' if scale is None else 'there'}: 8-bit momentum is int8 and a scale of floating point. "
                "Load both from one checkpoint, or neither"
            )
        expected, found = scale_shape(engine.storage(param).shape, num_row_dims), tuple(local_if_any(scale).shape)
        if is_dtensor(scale) != is_dtensor(param) or not same_storage(found, expected):
            raise ValueError(
                f"its {SCALE} stores shape {found} here, {expected} was expected: the state was made for another "
                "layout. Load it through torch.distributed.checkpoint, which reshards it"
            )

    def values(self, engine: Engine, state: Mapping[str, Any]) -> Tensor | None:
        """Decode the momentum that this rank stores for a parameter. The result has the shape of the rank's local
        tensor. Before the first step, it is None."""
        return _decoded(_stored(engine, state))

    # ---------------------------------------------------------------------------------------------- checkpoints

    def start(self, param: Tensor, num_row_dims: int, state: MutableMapping[str, Any]) -> None:
        """Create a parameter's initial state: zero momentum and, if steps are counted, a step count of 0."""
        _forget_adamw(state)
        engine = engine_of(param)
        dtype = gradient_dtype(param) or param.dtype
        self._zeros(state, engine, param, engine.storage(param), dtype, num_row_dims)
        if self.rounds:
            state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")

    def take(self, param: Tensor, key: str, value: Tensor) -> Tensor:
        """Convert a loaded state tensor to the dtype and device of this optimizer's momentum. Conversion from or to
        8-bit codes needs the parameter's layout, so it is left to the next step."""
        dtype, place = self._kinds(param, gradient_dtype(param) or value.dtype)[BUFFER]
        if key == SCALE:
            dtype = torch.float32
        elif not (value.is_floating_point() and dtype.is_floating_point):
            dtype = value.dtype
        return value.to(device=place, dtype=dtype)


def _stored(engine: Engine, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a dict from state key to local tensor for a parameter's momentum and, if momentum is stored as 8-bit
    codes, for its scales. Tensors that do not exist yet are left out."""
    return {key: engine.storage(state[key]) for key in (BUFFER, SCALE) if state.get(key) is not None}


def _decoded(stored: Mapping[str, Tensor]) -> Tensor | None:
    if SCALE not in stored:
        return stored.get(BUFFER)
    if not stored[BUFFER].numel():
        return torch.zeros_like(stored[BUFFER], dtype=torch.float32)
    return decode(stored[BUFFER], stored[SCALE])


def _was_adamws(state: Mapping[str, Any]) -> bool:
    return any(key in state for key in MOMENTS)


def _forget_adamw(state: MutableMapping[str, Any]) -> None:
    """Remove AdamW's state from a parameter that Muon now updates. The state would be out of date if AdamW updated the
    parameter again later."""
    if _was_adamws(state):
        for key in (STEP, *MOMENTS):
            state.pop(key, None)


def gradient_dtype(param: Tensor) -> torch.dtype | None:
    """Return the dtype of a parameter's gradient, or None if the dtype is unknown until there is a gradient
    (`param.grad_dtype` is None)."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", param.dtype) if param.grad is None else param.grad.dtype
    return dtype


def offloaded_from(param: Tensor) -> torch.device | None:
    """Return the accelerator from which a parameter was offloaded to the CPU, or None if the parameter was not
    offloaded or if its tensor does not record the accelerator."""
    if not is_dtensor(param):
        return getattr(param, "_shardmuon_home", None) if param.device.type == "cpu" else None
    kind = param.device_mesh.device_type
    if kind == "cpu" or param.device.type != "cpu":
        return None
    return torch.device(kind, torch.get_device_module(kind).current_device())


def check_blocks(name: str, layout: ParamLayout) -> None:
    """Raise Refused if a shard or a matrix begins or ends inside a block of columns. In 8-bit momentum, all elements of
    a block share a scale, so a block cannot be divided."""
    view = layout.view
    dim = view.num_row_dims
    # pairs (rank, description of its shard) for shards that can begin or end inside a block of columns
    inner, cut = math.prod(view.shape[dim + 1 :]), list[tuple[int, str]]()
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        for box, local in of_rank:
            if isinstance(box, FlatRange):
                if box.numel:
                    cut.append((rank, f"elements {box.start} to {box.stop}, a run that may begin anywhere in a row"))
                continue
            first, last = box.offset[dim], box.offset[dim] + box.size[dim]
            edges = first, local[dim], 0 if last == view.shape[dim] else last
            whole = box.size[dim + 1 :] == view.shape[dim + 1 :] and not any(edge * inner % BLOCK for edge in edges)
            if box.numel and not whole:
                text = f"indices {first} to {last} of {view.shape[dim]} along dim {dim} of shape {view.shape}"
                cut.append((rank, text))
    if view.split_dim == dim or any(matrix.start[-1] % BLOCK for matrix in view.matrices):
        cut.append((layout.ranks[0], "matrices of columns that begin elsewhere (transposed=True)"))
    for rank, found in cut[:1]:
        raise Refused(
            f"{name}: momentum_dtype='int8' keeps one scale for {BLOCK} columns, but rank {rank} holds {found}, which "
            "cuts such a block in two. Write momentum_dtype=torch.bfloat16, or cut the columns at multiples "
            f"of {BLOCK} only (Shard(0), another number of ranks, whole trailing dims)"
        )
