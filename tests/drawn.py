"""Hypothesis strategies for random tensor shapes, their matrix views, and their layouts on ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as st
from simulated import layout_of

from shardmuon.layout.mesh import OnMesh, Shard
from shardmuon.layout.pieces import Box, FlatRange, ParamLayout, Piece
from shardmuon.layout.views import MatrixView, matrix_view

Shape = tuple[int, ...]
Viewed = tuple[Shape, dict[str, Any]]  # a tensor's shape, and options that say how Muon reads it as matrices


@st.composite
def viewed(draw: st.DrawFn) -> Viewed:
    """Draw the shape of a tensor, and the options that say how Muon reads the tensor as matrices. The tensor is a
    matrix, a stack of matrices, a flattened tensor or a convolution kernel. The options may split one side of the
    matrices into blocks or heads."""
    kind = draw(st.sampled_from(["auto", "stack", "flatten", "kernel"]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    groups = draw(st.integers(1, 4))
    turned = draw(st.booleans())
    options: dict[str, Any] = {"transposed": turned}
    can_split = kind in ("auto", "stack") or not turned
    how = draw(st.sampled_from(["whole", "split", "heads"] if can_split else ["whole"]))
    length = sum(sizes) * groups
    if how == "split":
        options |= {"split_sizes": tuple(sizes), "split_groups": groups}
    elif how == "heads":
        options["split_sizes"] = draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
    other = draw(st.integers(1, 9))
    sides = (other, length) if turned else (length, other)
    if kind == "stack":
        return (draw(st.integers(1, 3)), *sides), {**options, "view": "stack"}
    if kind == "auto":
        return sides, options
    more = (draw(st.integers(1, 3)), *((2,) if kind == "kernel" else ()))
    return (length, other, *more), {**options, "view": "flatten"}


def _boxes(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Draw a partition of a tensor into boxes. Boxes are cut repeatedly at random positions along one or two dims."""
    boxes = [Box((0,) * len(shape), shape)]
    dims = draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, max_size=2))
    for _ in range(draw(st.integers(0, 4))):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(0, size[dim]))
        rest = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
        sizes = ((*size[:dim], n, *size[dim + 1 :]) for n in (at, size[dim] - at))
        boxes += [Box(start, n) for start, n in zip((offset, rest), sizes, strict=True)]
    return boxes


def _ranges(draw: st.DrawFn, box: Box, within: Box | None = None) -> list[Piece]:
    """Draw a partition of a flattened box into ranges. Ranges may be empty, and may end inside a row."""
    unit = draw(st.sampled_from([1, math.prod(box.size[1:]) or 1]))
    cuts = sorted(unit * n for n in draw(st.lists(st.integers(0, box.numel // unit), max_size=4)))
    return [FlatRange(a, b, within) for a, b in itertools.pairwise([0, *cuts, box.numel])]


@st.composite
def partitions(draw: st.DrawFn, shape: Shape) -> list[Piece]:
    """Draw a partition of a tensor into boxes, into ranges of the flattened tensor, or into ranges of flattened
    boxes."""
    kind = draw(st.sampled_from(["boxes", "boxes", "ranges", "ranges of boxes"]))
    if kind == "boxes":
        return list(_boxes(draw, shape))
    if kind == "ranges":
        return _ranges(draw, Box((0,) * len(shape), shape))
    return [piece for box in _boxes(draw, shape) for piece in _ranges(draw, box, box)]


@st.composite
def layouts(draw: st.DrawFn, view: MatrixView) -> ParamLayout:
    """Draw a layout of a tensor on up to five ranks. A piece of the tensor may be stored on several ranks, and a rank
    may store any number of pieces."""
    ranks = range(draw(st.integers(1, 5)))
    pieces: dict[int, list[Piece]] = {rank: [] for rank in ranks}
    for piece in draw(partitions(view.shape)):
        for rank in draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=draw(st.sampled_from([1, len(ranks)])))):
            pieces[rank].append(piece)
    return layout_of(view, pieces)


@st.composite
def mesh_layouts(draw: st.DrawFn, view: MatrixView, mesh: tuple[int, ...]) -> ParamLayout:
    """Draw a layout with random placements on a mesh. Some shards are strided, as when two mesh axes shard the same dim
    in reverse order."""
    dims = st.integers(0, len(view.shape) - 1)
    placements: list[Shard | None] = [None if draw(st.booleans()) else Shard(draw(dims)) for _ in mesh]
    for axis, placement in enumerate(placements):
        if placement is not None and draw(st.booleans()):
            later = [mesh[a] for a in range(axis + 1, len(mesh)) if placements[a] == placement]
            placements[axis] = Shard(placement.dim, math.prod(later) if later else draw(st.sampled_from([1, 2, 3])))
    ranks = tuple(range(math.prod(mesh)))
    held, _ = zip(*OnMesh(mesh, ranks, tuple(placements)).reading(view.shape).values(), strict=True)
    return ParamLayout(view, ranks, held)


@st.composite
def models(draw: st.DrawFn) -> list[tuple[ParamLayout, dict[str, Any]]]:
    """Draw the layouts of up to four tensors, each with the options that say how Muon reads the tensor as matrices. A
    tensor's layout is either on a mesh of at most twelve ranks, or on at most five ranks without a mesh."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 12)))
    model = []
    for shape, options in draw(st.lists(viewed(), min_size=1, max_size=4)):
        view = matrix_view(shape, **options)
        model.append((draw(mesh_layouts(view, mesh) | layouts(view)), options))
    return model
