"""Pure functions that compute which pieces of a tensor each rank stores, from the tensor's placements on a mesh or from
a tensor-parallel cut.

[Note: order of cuts]
    Placements are listed in the order of the mesh axes. If several axes shard the same tensor dim, they may have cut it
    in a different order. Axes with plain shards cut the dim in the listed order. A strided shard with split factor s
    means that the dim had already been cut into s shards before the strided shard's axis cut it. For example,
    `fully_shard` on top of tensor parallelism gives mesh (dp, tp) and placements (_StridedShard(0, 2), Shard(0)). Here,
    tp cuts first, and dp then cuts each tp shard.

    Torch's own offset helper and `distribute_tensor` apply these placements from left to right. If sizes do not divide
    evenly, the rows that they compute for a rank differ from the rows that `fully_shard` stores there. This module
    computes the rows that `fully_shard` stores. An error is raised if a rank's storage does not have the computed
    shape.

[Note: lone strided shard]
    A strided shard is the only shard of its dim if the axis that cut the dim first has been gathered. With split factor
    s, the dim then consists of s parts. The axis of the strided shard cuts each part, and a rank stores its share of
    every part. For example, with 8 rows in 2 parts on 2 ranks, the first rank stores rows 0, 1, 4 and 5, not rows 0 to
    3. Its storage then contains two pieces, one after the other.

[Note: stride]
    A stride of s means that the dim consists of s equal blocks, for example a gate and an up projection fused into one
    weight. Each shard stores its share of every block, one after the other. Megatron and TransformerEngine call the
    stride `partition_stride`.

[Note: placement of stage state]
    Some variants of Muon, such as NorMuon, store values for each matrix between steps ([Note: state of stages] in
    variants.py). The values of a parameter form a 2-D state tensor. For a stack of matrices, it has one row per index
    of dim 0. For any other parameter, it has a single row.

    The state tensor is replicated on every rank that shares the parameter, including ranks that store no part of the
    parameter, because torch's checkpoints read replicated tensors from any rank. The exception is a stack of matrices
    (experts) that a mesh shards along dim 0. Each rank then stores the values of its own matrices, and the state tensor
    is placed like the parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from shardmuon.layout.pieces import Box, Held, ParamLayout
from shardmuon.layout.views import Ints

_Ranges = tuple[tuple[int, int], ...]  # intervals [start, stop) of one tensor dim, in storage order
# (pieces of a tensor that one rank stores, shape of the storage that contains these pieces)
_OfRank = tuple[tuple[Held, ...], Ints]


class Shard(NamedTuple):
    """Placement of a mesh axis that shards a tensor dim. For a strided shard, `factor` is the split factor: the number
    of shards into which earlier cuts have divided the dim ([Note: order of cuts]). For a plain shard, `factor` is 1."""

    dim: int
    factor: int = 1


class OnMesh(NamedTuple):
    """Placement of a tensor on a mesh of ranks.

    Attributes:
        mesh: Size of each mesh axis.
        ranks: Global ranks, in row-major order of their mesh coordinates.
        placements: For each mesh axis, its `Shard`, or None if the axis replicates the tensor.
    """

    mesh: Ints
    ranks: Ints
    placements: tuple[Shard | None, ...]

    def reading(self, shape: Ints) -> dict[int, _OfRank]:
        """Compute the pieces that each rank stores of a tensor with this global shape, and the shape of the storage
        that contains these pieces. The keys of the returned dict are in the order of `ranks`."""
        places = itertools.product(*map(range, self.mesh))
        return {rank: self.read_at(shape, place) for rank, place in zip(self.ranks, places, strict=True)}

    def read_at(self, shape: Ints, place: Ints) -> _OfRank:
        """Compute the pieces that the rank at mesh coordinate `place` stores of a tensor with this global shape, and
        the shape of the storage that contains these pieces."""
        ranges = []
        for dim, size in enumerate(shape):
            listed = [(axis, p.factor) for axis, p in enumerate(self.placements) if p and p.dim == dim]
            ranges.append(_ranges(size, _nested(listed, self.mesh), self.mesh, place))
        return _stored(ranges)

    def kept(self, layout: ParamLayout, sizes: Sequence[int]) -> ParamLayout:
        """Make the layout of a state tensor from `layout`, the layout of its parameter. The state tensor contains
        `sizes[i]` values for matrix i, which a variant of Muon, such as NorMuon, stores between steps ([Note: placement
        of stage state])."""
        view, is_stack = layout.view.kept(sizes), layout.view.num_row_dims == 2
        # Mesh axes that shard dim 0 of a stack also shard dim 0 of the state tensor. All other axes replicate the state
        # tensor.
        cuts = tuple(p if p is not None and p.dim == 0 and is_stack else None for p in self.placements)
        found = self._replace(placements=cuts).reading(view.shape)
        return ParamLayout(view, layout.ranks, tuple(found[rank][0] for rank in layout.ranks))


def _nested(listed: Sequence[tuple[int, int]], mesh: Ints) -> Sequence[tuple[int, int]]:
    """Sort the (mesh axis, split factor) pairs of a tensor dim into the order in which the axes cut the dim ([Note:
    order of cuts]). Divide each factor by the sizes of the axes whose cuts it counts. A quotient above 1 comes from
    axes that have been gathered ([Note: lone strided shard])."""
    ordered: list[tuple[int, int]] = []
    for axis, factor in reversed(listed):
        before, position = 1, 0
        while before < factor and position < len(ordered):
            before *= mesh[ordered[position][0]]
            position += 1
        if factor % before:
            return listed
        ordered.insert(position, (axis, factor // before))
    return ordered


def _ranges(size: int, cuts: Sequence[tuple[int, int]], mesh: Ints, place: Ints) -> _Ranges:
    """Compute the indices of a tensor dim that are stored at mesh coordinate `place`. Each cut first splits the dim
    into `factor` parts, and then splits each part among the ranks along the mesh axis, so that a rank stores a share of
    every part."""
    ranges: _Ranges = ((0, size),)
    for axis, factor in cuts:
        parts = (_chunk(ranges, factor, part) for part in range(factor))
        ranges = tuple(itertools.chain.from_iterable(_chunk(part, mesh[axis], place[axis]) for part in parts))
    return ranges


def _chunk(ranges: _Ranges, num_parts: int, part: int) -> _Ranges:
    """Concatenate index ranges, split the result into `num_parts` chunks of the same sizes as in `torch.chunk`, and
    return the index ranges in the chunk at position `part`."""
    step = -(-sum(stop - start for start, stop in ranges) // num_parts)
    return _narrow(ranges, part * step, step)


def _narrow(ranges: _Ranges, first: int, num: int) -> _Ranges:
    """Concatenate index ranges, select `num` indices beginning at position `first`, and return them as index ranges."""
    found, at = [], 0
    for start, stop in ranges:
        a, b = max(first, at), min(first + num, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at))
        at += stop - start
    return tuple(found)


def _stored(ranges: Sequence[_Ranges]) -> _OfRank:
    """Combine the index ranges of all dims into boxes that are stored without gaps. Return them with the shape of the
    storage."""
    starts = [list(itertools.accumulate((b - a for a, b in dim), initial=0)) for dim in ranges]
    held = []
    for pick in itertools.product(*(zip(dim, at, strict=False) for dim, at in zip(ranges, starts, strict=True))):
        box = Box(tuple(start for (start, _), _ in pick), tuple(stop - start for (start, stop), _ in pick))
        held.append(Held(box, tuple(at for _, at in pick)))
    return tuple(held), tuple(of_dim[-1] for of_dim in starts)


def same_storage(first: Ints, second: Ints) -> bool:
    """True if the shapes of two local storages are equal, or if neither storage has any elements. The exact shape of an
    empty storage is not reliable: `fully_shard` stores an empty shard of shape (12, 0) with shape (0, 0)."""
    return first == tuple(second) or (0 in first and 0 in second)


# ------------------------------------------------------------------------------------------------- parts along one dim


class Cut(NamedTuple):
    """Cut of a tensor along `dim` by a tensor-parallel group. The dim consists of `stride` equal blocks, and each block
    is cut separately ([Note: stride])."""

    dim: int
    stride: int

    def parts(self, shape: Ints, sizes: Ints) -> tuple[tuple[Held, ...], ...]:
        """Compute the pieces of each tensor-parallel shard ("part"). `sizes` lists the sizes of the parts along the cut
        dim.

        Raises:
            ValueError: The size of a part is not divisible by the stride. The message does not contain the parameter's
                name.
        """
        return tuple(_stored(self._ranges(shape, sizes, part))[0] for part in range(len(sizes)))

    def rows_of_part(self, shape: Ints, part: int, num_parts: int, rows: range) -> _OfRank:
        """Compute the pieces that make up a range of rows of one tensor-parallel shard ("part"), and the shape of a
        storage that contains only these rows.

        Args:
            shape: Shape of the whole tensor.
            part, num_parts: Index of the part, and number of parts. The parts have the same sizes as in `torch.chunk`.
            rows: Range of indices along dim 0 of the part.

        Raises:
            ValueError: The size of a part is not divisible by the stride. The message does not contain the parameter's
                name.
        """
        num = shape[self.dim]
        step = -(-num // num_parts)
        sizes = tuple(max(0, min(step, num - at * step)) for at in range(num_parts))
        first, *others = self._ranges(shape, sizes, part)
        return _stored([_narrow(first, rows.start, len(rows)), *others])

    def _ranges(self, shape: Ints, sizes: Ints, part: int) -> list[_Ranges]:
        """Compute, for each dim of the tensor, the index ranges that a part (tensor-parallel shard) covers."""
        if any(size % self.stride for size in sizes):
            raise ValueError(
                f"partition_stride={self.stride} says that each shard holds {self.stride} parts of one size, but the "
                f"shards have {sizes} indices along dim {self.dim}. Set partition_stride=1 if they are cut in one "
                "piece each"
            )
        start, stop = sum(sizes[:part]) // self.stride, sum(sizes[: part + 1]) // self.stride
        blocks = range(0, sum(sizes), max(1, sum(sizes) // self.stride))
        ranges: list[_Ranges] = [((0, n),) for n in shape]
        ranges[self.dim] = tuple((block + start, block + stop) for block in blocks)
        return ranges
