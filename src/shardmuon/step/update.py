"""Elementwise updates of momentum and weights. The updates run on tiles, the parts of matrices that this rank stores.
A tile is accessed as a view of a local tensor or of an exchange buffer.

Momentum and weights are updated in place, with one call for many tiles. This module does not communicate or
orthogonalize. Weights, gradients and momentum can have different dtypes, and need not be on the device of the exchange
buffers.

The functions that implement Muon's update rules are at the end of the module and take lists of views. Functions whose
names end in an underscore work in place. The bits of an updated element do not depend on its position in a shard (tests
check this). torch's fp32 `lerp`, `mul` and `add` have this property, but half-precision `add` with `alpha` on CPUs does
not. Therefore half-precision weights are updated in fp32 and rounded once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from shardmuon._torch import foreach, foreach_copy_
from shardmuon.layout.pieces import Patch, Tile
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.momentum.stores import BLOCK, Rounding, Stream, step_stored_
from shardmuon.options import Settings, lr_scale
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Load, evenly_spaced

_Kind = tuple[object, ...]
# for each parameter, the fp32 state tensors that its Muon variant keeps on this rank
_Stored = Sequence[Sequence[Tensor]]


@dataclass
class Work:
    """Tensors and settings of a step, for each parameter of a plan.

    Attributes:
        weights, grads, momenta: This rank's local tensor for each parameter; None if no rank has a gradient of the
            parameter.
        settings: Settings of each parameter's group.
        kept: For each parameter, this rank's state tensors of the Muon variant's stages (such as NorMuon's second
            moments), in the order of `Spec.kept`.
        rounding: Dict from parameter index to random bits and scales for stochastic or 8-bit rounding. It contains only
            parameters that use such rounding.
        kinds: For each parameter, a tuple of its group, dtypes and devices. One list operation (torch._foreach_*) can
            process several parameters only if their tuples are equal.
    """

    weights: list[Tensor | None]
    grads: list[Tensor | None]
    momenta: list[Tensor | None]
    settings: list[Settings]
    kept: list[tuple[Tensor, ...]] = field(default_factory=list)
    rounding: dict[int, Rounding] = field(default_factory=dict)
    kinds: list[_Kind] = field(default_factory=list)


# Maximum number of elements that one list operation (torch._foreach_*) processes. The first value is for CPUs, the
# second value for other devices. The limit bounds the size of temporary tensors. On a CPU, these tensors fit in the
# cache. On other devices, the limit is large enough for efficient kernel launches. A tile (part of a matrix) with more
# elements is processed alone.
_PORTION, PORTION_ELSEWHERE = 1 << 17, 1 << 24
# Smallest number of equally spaced tiles in a portion for which the Nesterov update on a CPU is a single operation.
# This operation needs a copy of the momentum. For fewer tiles, the copy takes more time than the operation saves.
_MANY = 32

# (sizes, strides, start) of a view of a buffer. The view contains consecutive tiles (parts of matrices) that have equal
# sizes and strides and are equally spaced. Its first dim indexes the tiles.
_Row = tuple[Ints, Ints, int]
# Function that takes a list with one entry per tile (part of a matrix), and returns the entries of one portion. A
# portion is a set of tiles that one list operation (torch._foreach_*) processes.
_Pick = Callable[[Sequence[Any]], Sequence[Any]]


def _dealt(sizes: Sequence[int], kinds: Sequence[object], limit: int) -> list[list[int]]:
    """Group tiles (parts of matrices) into portions, each of which one list operation (torch._foreach_*) can process.
    Return the indices of the tiles in each portion. The tiles of a portion have equal `kinds` and at most `limit`
    elements in total. A tile with more than `limit` elements forms a portion of its own."""
    found: dict[object, tuple[list[list[int]], int]] = {}
    for at, kind in enumerate(kinds):
        portions, room = found.get(kind, ([], -1))
        if sizes[at] > room:
            portions.append([])
            room = limit
        portions[-1].append(at)
        found[kind] = portions, room - sizes[at]
    return [places for portions, _ in found.values() for places in portions]


def _pick(places: list[int]) -> _Pick:
    first, last = places[0], places[-1]
    return operator.itemgetter(slice(first, last + 1)) if last - first < len(places) else operator.itemgetter(*places)


class Side:
    """The tiles of a buffer, which is either an exchange buffer or the buffer in which matrices are orthogonalized. A
    tile is a part of a matrix that this rank stores. The class makes views of the tiles in local tensors (`of`) and in
    the buffer (`on`).

    Strides of local tensors are read on every access, because the strides of a gradient can change between steps and
    can differ from the strides of its parameter.

    Args:
        loads: The tiles and their places in the buffer.
        views: For each parameter, the `MatrixView` that describes its matrices.
        shapes: For each parameter, the shape of this rank's local storage.

    Attributes:
        params: For each tile, the index of its parameter.
        views: For each tile, the `MatrixView` of its parameter.
        shapes: For each tile, the shape (rows, cols) of its whole matrix.
    """

    def __init__(self, loads: Sequence[Load], views: Sequence[MatrixView], shapes: Sequence[Ints]) -> None:
        self.loads = tuple(loads)
        self.params = [load.param for load in loads]
        self.views = [views[param] for param in self.params]
        matrices = [view.matrices[load.tile.matrix] for view, load in zip(self.views, loads, strict=True)]
        self.shapes = [(matrix.rows, matrix.cols) for matrix in matrices]
        # Indices of the tiles (parts of matrices) that cover only a part of a local tensor. `of` must make views of
        # these tiles. All other tiles are whole local tensors.
        self._parts = [at for at, load in enumerate(loads) if load.tile.sizes != shapes[load.param]]
        # For each tile (part of a matrix), a dict that caches the tile's offset and strides. The keys are strides of
        # the local tensor that contains the tile.
        self._known: list[dict[Ints, tuple[int, Ints]]] = [{} for _ in loads]
        self._rows = _rows(loads)
        # arguments for which the cached portions were computed: the kind of each tile, and the maximum number of
        # elements per portion
        self._dealt_for: tuple[list[_Kind], int] | None = None
        self._dealt: list[tuple[list[int], _Pick, _Row | None]] = []

    @cached_property
    def patches(self) -> list[Patch]:
        """One `Patch` per tile (part of a matrix), which describes the matrix rows and columns that the tile covers."""
        return [load.tile.patch(view) for load, view in zip(self.loads, self.views, strict=True)]

    def of(self, storages: Sequence[Tensor | None]) -> list[Tensor]:
        """Return a view of each tile (part of a matrix) in the local tensors. `storages` contains one local tensor per
        parameter: its weights, gradient or momentum."""
        found = list(map(storages.__getitem__, self.params))
        for at in self._parts:
            storage = found[at]
            assert storage is not None, "parameters without a gradient are in no program"
            strides, tile = storage.stride(), self.loads[at].tile
            known = self._known[at].get(strides)
            if known is None:
                known = self._known[at][strides] = tile.in_storage(self.views[at], strides)
            found[at] = storage.as_strided(tile.sizes, known[1], storage.storage_offset() + known[0])
        return cast("list[Tensor]", found)

    def on(self, buffer: Tensor) -> list[Tensor]:
        """Make a view of each tile (part of a matrix) in `buffer`. The views have the same shapes as the views of local
        tensors that `of` returns."""
        found: list[Tensor] = []
        for row in self._rows:
            found += buffer.as_strided(*row).unbind(0)
        return found

    def portions(self, work: Work) -> list[tuple[list[int], _Pick, _Row | None]]:
        """Split the tiles (parts of matrices) into portions, each of which one list operation (torch._foreach_*) can
        process.

        Returns:
            A triple for each portion: the indices of its tiles, a function that selects their entries from a list with
            one entry per tile, and the (sizes, strides, start) of a view of the buffer that contains exactly these
            tiles. The last is None if there are fewer than `_MANY` tiles or no such view exists.
        """
        weight = work.weights[self.params[0]]
        assert weight is not None, "parameters without a gradient are in no program"
        limit = _PORTION if weight.device.type == "cpu" else PORTION_ELSEWHERE
        kinds = list(map(work.kinds.__getitem__, self.params))
        if self._dealt_for != (kinds, limit):
            self._dealt = []
            for places in _dealt([load.tile.numel for load in self.loads], kinds, limit):
                pick, rows = _pick(places), _rows([self.loads[at] for at in places])
                self._dealt.append((places, pick, rows[0] if len(rows) == 1 and len(places) >= _MANY else None))
            self._dealt_for = kinds, limit
        return self._dealt

    def update_momentum(self, work: Work, buffer: Tensor | None) -> list[Tensor]:
        """Update the momentum of all tiles (parts of matrices). If `buffer` is not None, also write the input of the
        orthogonalization to `buffer`, and return a view of each tile in it."""
        targets = [] if buffer is None else self.on(buffer)
        if not self.loads:
            return targets
        grads, momenta = self.of(work.grads), self.of(work.momenta)
        for places, of, row in self.portions(work):
            first = self.params[places[0]]
            s, given, kept = work.settings[first], of(grads), of(momenta)
            out = None if buffer is None else of(targets)
            if first in work.rounding and work.rounding[first].momentum is not None:
                for at, i in enumerate(places):
                    self._update_rounded(work, i, kept[at], given[at], None if out is None else out[at])
                continue
            device = given[0].device
            loaded = kept if kept[0].device == device else [m.to(device) for m in kept]
            whole = None if buffer is None or row is None else buffer.as_strided(*row)
            momentum_(out, given, loaded, momentum=s.momentum, nesterov=s.nesterov, whole=whole)
            if loaded is not kept:
                foreach_copy_(kept, loaded)
        return targets

    def _update_rounded(self, work: Work, at: int, kept: Tensor, grad: Tensor, out: Tensor | None) -> None:
        param = self.params[at]
        settings, rounding, codes = work.settings[param], work.rounding[param], work.momenta[param]
        assert rounding.momentum is not None and codes is not None
        stored = [kept]
        if rounding.scales is not None:
            stored.append(_scales_of(self.loads[at].tile, self.views[at], codes, rounding.scales))
        patch, stream = self.patches[at], rounding.momentum
        step_stored_(
            stored, grad, out, patch=patch, stream=stream, momentum=settings.momentum, nesterov=settings.nesterov
        )

    def apply_results(
        self,
        work: Work,
        updates: Sequence[Tensor],  # for each tile, a view of its orthogonalized update
        *,
        # True to update weights with exactly the operations of torch.optim.Muon. Has no effect on parameters with
        # cautious weight decay or stochastic rounding.
        like_torch: bool,
    ) -> None:
        """Apply weight decay and the orthogonalized updates to the weights of the tiles (parts of matrices)."""
        if not self.loads:
            return
        weights = self.of(work.weights)
        for places, of, _ in self.portions(work):
            first = self.params[places[0]]
            s, chosen, added = work.settings[first], of(weights), of(updates)
            shapes, device = of(self.shapes), chosen[0].device
            if any(update.device != device for update in added):
                added = [update.to(device) for update in added]
            rounded: list[Callable[[Tensor], Tensor]] | None = None
            if first in work.rounding and work.rounding[first].weights is not None:
                streams = [cast(Stream, work.rounding[self.params[i]].weights) for i in places]
                rounded = [partial(stream.round, self.patches[i]) for i, stream in zip(places, streams, strict=True)]
            elif like_torch and not s.cautious:
                for w, u, i, shape in zip(chosen, added, places, shapes, strict=True):
                    scale = lr_scale(s.adjust_lr_fn, *shape)
                    _apply_like_torch_(w, u, s.given_lr, scale, self.patches[i], shape, weight_decay=s.weight_decay)
                continue
            alpha_of = {shape: s.lr * lr_scale(s.adjust_lr_fn, *shape) for shape in set(shapes)}
            alphas = list(map(alpha_of.__getitem__, shapes))
            apply_(chosen, added, alphas, s.lr, s.weight_decay, s.cautious, rounded)


def _scales_of(tile: Tile, view: MatrixView, codes: Tensor, scales: Tensor) -> Tensor:
    """Make a view of the scales of a tile's 8-bit momentum. A tile is a part of a matrix, and must start at a block
    boundary. `scales` contains this rank's scales for the whole parameter. The view has the row dims of the parameter,
    followed by one dim that indexes blocks of columns."""
    rows = view.num_row_dims
    first, strides = tile.in_storage(view, (*scales.stride()[:rows], *(0 for _ in view.shape[rows:])))
    column, _ = tile.in_storage(view, (*(0 for _ in view.shape[:rows]), *codes.stride()[rows:]))
    num_cols = tile.sizes[len(tile.sizes) - len(view.shape) + rows :]
    kept = len(tile.sizes) - len(num_cols)
    return scales.as_strided(
        (*tile.sizes[:kept], -(-torch.Size(num_cols).numel() // BLOCK)),
        (*strides[:kept], scales.stride(-1)),
        scales.storage_offset() + first + column // BLOCK * scales.stride(-1),
    )


def _rows(loads: Sequence[Load]) -> list[_Row]:
    rows: list[_Row] = []
    for (sizes, strides), alike in itertools.groupby(loads, lambda load: (load.tile.sizes, load.place.strides)):
        starts = [(load.place.start,) for load in alike]
        for first, count, (step,) in evenly_spaced(starts):
            rows.append(((count, *sizes), (step, *strides), *starts[first]))
    return rows


class KeptSide:
    """Locations of stage state, the state of a Muon variant's stages (such as NorMuon's second moments). The class
    makes views of each matrix's stage state in this rank's state tensors and, for state that ranks exchange, in an
    exchange buffer. Objects are cached between steps and hold no tensors."""

    def __init__(self, plan: Plan, loads: Sequence[Load]) -> None:
        self._loads = tuple(loads)
        views = [plan.specs[load.param].kept[load.number].layout.view for load in loads]
        self._side = Side([load._replace(param=at) for at, load in enumerate(loads)], views, [()] * len(loads))

    def of(self, stored: _Stored) -> list[Tensor]:
        """Make a 1-D fp32 view of each matrix's stage state (the state of a Muon variant's post-processing stages) in
        this rank's state tensors."""
        tiles = self._side.of([stored[load.param][load.number] for load in self._loads])
        return [tile.view(-1) for tile in tiles]

    def tell(self, stored: _Stored, wire: Tensor) -> None:
        """Copy stage state (the state of a Muon variant's post-processing stages) from this rank's state tensors to an
        exchange buffer, bit for bit."""
        # `cat` copies the state to contiguous memory, because torch cannot view the bytes of a tensor with arbitrary
        # strides.
        foreach_copy_(self._bytes(wire), [torch.cat([numbers]).view(torch.uint8) for numbers in self.of(stored)])

    def hear(self, wire: Tensor, stored: _Stored) -> None:
        """Copy stage state (the state of a Muon variant's post-processing stages) from a receive buffer to this rank's
        state tensors."""
        targets = self.of(stored)
        # `cat` copies the received bytes to aligned memory, because torch can view only aligned bytes as fp32.
        came = torch.cat(self._bytes(wire)).view(torch.float32)
        foreach_copy_(targets, came.split(list(map(len, targets))))

    def _bytes(self, wire: Tensor) -> list[Tensor]:
        """Make a 1-D uint8 view of the bytes of each matrix's stage state in an exchange buffer."""
        size, whole = wire.element_size(), wire.view(torch.uint8)
        return [whole.narrow(0, load.place.start * size, load.tile.numel * 4) for load in self._loads]


# -------------------------------------------------------------------------------------------------------- Muon's rules

_HALVES = (torch.bfloat16, torch.float16)


def momentum_(
    # tensors of one dtype, to which the input of the orthogonalization is written; must not share memory with `grads`
    out: Sequence[Tensor] | None,
    grads: Sequence[Tensor],  # views of the gradients on this rank, all of one dtype; not modified
    buffers: Sequence[Tensor],  # views of the momentum on this rank, all of one dtype; updated in place
    *,
    momentum: float,
    nesterov: bool,
    # One tensor whose slices along the first dim are the tensors in `out`. If it is given, Nesterov momentum on a CPU
    # needs a temporary copy of the momentum, but fewer calls.
    whole: Tensor | None = None,
) -> None:
    """Update the momentum B with the gradient G: B <- B + (1 - momentum) (G - B). If `out` is not None, also write the
    input of the orthogonalization to `out`: G + momentum (B - G) with Nesterov momentum, otherwise B. torch.optim.Muon
    uses the same formulas.

    On a CPU, Nesterov momentum needs no temporary tensors if `out` has the dtype of the momentum and `whole` is None.
    On accelerators, it uses dense temporary tensors, because the views in `out` can have gaps, and one kernel launch
    can process a list only if all of its tensors are dense.
    """
    places, last = buffers if out is None else out, buffers[0]
    in_place = out is not None and nesterov and places[0].dtype == last.dtype
    in_place = in_place and places[0].device.type == last.device.type == "cpu"
    for to, given, stored in _in_cache(places, grads, buffers):
        if in_place:
            results, kept = list(to), list(stored)
            # On a CPU, a list operation calls one kernel per tensor, so a single operation on `whole` is faster.
            if whole is None:
                torch._foreach_copy_(results, list(given))
            else:
                torch.stack(list(given), out=whole)
            torch._foreach_lerp_(kept, results, weight=1 - momentum)
            if whole is None:
                torch._foreach_lerp_(results, kept, weight=momentum)
            else:
                whole.lerp_(torch.stack(kept), momentum)
            continue
        summands = given if given[0].dtype == stored[0].dtype else _converted(given, stored)
        foreach("lerp_", stored, summands, weight=1 - momentum)
        if out is not None:
            foreach_copy_(to, foreach("lerp", summands, stored, weight=momentum) if nesterov else stored)


def _in_cache(*columns: Sequence[Tensor]) -> Iterator[Sequence[Sequence[Tensor]]]:
    """Yield the given lists of tensors. If each list contains a single large tensor on a CPU, split the tensors into
    slabs that fit in the cache, and yield one slab of each tensor at a time. Longer lists are yielded whole, because
    `Side.portions` has already limited their total size. Tensors at the same index of the lists must have the same
    shape."""
    first = columns[0][0]
    if len(columns[0]) > 1 or first.device.type != "cpu" or first.numel() <= _PORTION:
        yield columns
        return
    dim = next(dim for dim, size in enumerate(first.shape) if size > 1)
    step = max(1, _PORTION * first.shape[dim] // first.numel())
    yield from zip(*(((slab,) for slab in column[0].split(step, dim)) for column in columns), strict=True)


def _converted(tensors: Sequence[Tensor], like: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Convert each tensor of a list to `dtype`. Default: the dtype of the tensor at the same index in `like`. A
    converted tensor gets the strides of the tensor in `like`, so that one kernel can process both lists. Tensors that
    already have the dtype are returned unchanged."""
    found = list(tensors)
    others = [i for i, t in enumerate(tensors) if t.dtype != (dtype or like[i].dtype)]
    for i in others:
        found[i] = torch.empty_like(like[i], dtype=dtype)
    foreach_copy_([found[i] for i in others], [tensors[i] for i in others])
    return found


def apply_(
    params: Sequence[Tensor],  # views of this rank's weights, all with the same device and dtype; updated in place
    # orthogonalized updates with the shapes of `params`, in the dtype in which matrices are exchanged
    updates: Sequence[Tensor],
    # for each view of weights, the learning rate times Muon's factor for the shape of the matrix
    alphas: Sequence[float],
    lr: float,
    weight_decay: float,
    cautious: bool,
    # For each view of weights, a function that rounds fp32 weights to half precision. Default: round to nearest.
    rounded: Sequence[Callable[[Tensor], Tensor]] | None = None,
) -> None:
    """Apply weight decay and the orthogonalized update O to each view W of weights:

        W <- (1 - lr * weight_decay) W - alpha O

    If `cautious` is True, only elements with O * W > 0 decay: the decay of these elements has the same direction as
    their update.
    """
    half = params[0].dtype in _HALVES
    factor = 1 - lr * weight_decay
    for stored, given in [(params, updates)] if rounded else _in_cache(params, updates):
        weights = _converted(stored, stored, torch.float32) if half else stored
        if weight_decay and cautious:
            for w, update in zip(weights, given, strict=True):
                _decay_agreeing_(w, update * w, factor)
        elif weight_decay:
            # The factor is a tensor, because on CPUs, list operations (torch._foreach_*) would convert a Python number
            # to a tensor again for every weight tensor.
            foreach("mul_", weights, other=torch.tensor(factor, dtype=weights[0].dtype, device="cpu"))
        # On a CPU, `add` converts half-precision updates itself. On other devices, list operations cannot convert
        # updates, so updates are first converted to the dtype of the weights.
        widens = given[0].dtype in _HALVES and weights[0].device.type == "cpu"
        summands = given if widens or given[0].dtype == weights[0].dtype else _converted(given, weights)
        rows: dict[float, list[tuple[Tensor, Tensor]]] = {}
        for weight, summand, alpha in zip(weights, summands, alphas, strict=True):
            rows.setdefault(alpha, []).append((weight, summand))
        for alpha, alike in rows.items():
            foreach("add_", *zip(*alike, strict=True), alpha=-alpha)
        if half:
            foreach_copy_(stored, weights if rounded is None else [r(w) for r, w in zip(rounded, weights, strict=True)])


def _decay_agreeing_(
    weight: Tensor,  # view of weights on this rank, updated in place
    agreement: Tensor,  # same shape as `weight`; positive where weight and update have the same sign
    factor: float,
) -> None:
    """Multiply elements of `weight` by `factor` where `agreement` is positive. All other elements stay unchanged, even
    where `agreement` is NaN."""
    # `weight * where(agreement > 0, factor, 1.0)` would round the factor to fp32, which is too imprecise for fp64
    # weights.
    weight.copy_(torch.where(agreement > 0, weight * factor, weight))


def _apply_like_torch_(
    # view of a tile's weights, updated in place; `patch` gives the positions of the elements in the whole matrix
    param: Tensor,
    update: Tensor,  # orthogonalized update in bf16, with as many elements as `param`
    lr: float | Tensor,  # learning rate; a tensor must have one element
    scale: float,  # Muon's shape-dependent factor for the learning rate, computed from the shape of the whole matrix
    patch: Patch,
    shape: tuple[int, int],  # (rows, cols) of the whole matrix
    *,
    weight_decay: float,
) -> None:
    """Compute `param.mul_(1 - lr * decay); param.add_(update, alpha=-lr * scale)` exactly as torch.optim.Muon does,
    even on a shard.

    If `lr` is a tensor, it is not converted to a float, because torch rounds the factors `1 - lr * decay` and
    `lr * scale` to the dtype of `lr`.

    In torch's half-precision `add`, the rounding of an element depends on its position in the tensor, and on whether
    the update is a transposed view, as it is for tall matrices. Therefore the local view is copied to its position in a
    matrix of full size, and torch's operation runs on this matrix. This needs temporary memory for two such matrices.
    The function is intended for exact comparisons with torch, not for speed.
    """
    if isinstance(lr, Tensor):
        lr = lr.squeeze().cpu()
    param.mul_(1 - lr * weight_decay)
    alpha = float(lr * scale)
    rows, cols = shape
    whole = torch.zeros(rows, cols, dtype=param.dtype, device=param.device)
    moved = torch.zeros(min(shape), max(shape), dtype=update.dtype, device=param.device)
    moved = moved.T if rows > cols else moved
    target, source = (
        matrix.as_strided(patch.sizes, strides, first)
        for matrix in (whole, moved)
        for first, strides in (patch.address(*matrix.stride()),)
    )
    target.copy_(param.reshape(patch.sizes))
    source.copy_(update.reshape(patch.sizes))
    whole.add_(moved, alpha=-alpha)
    param.copy_(target.reshape(param.shape))
