"""Plain tensors that are one rank's shard, as TransformerEngine's and Megatron's layers keep them.

Nothing in such a tensor says over which ranks it is cut, so the user does (`tp_group`); along which dim, its own
attributes say (`tensor_model_parallel`, `partition_dim`, `partition_stride`) or the options of its group. The global
shape is the sum of the shards, whose sizes the ranks tell each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardmuon.comm.groups import GroupRef
from shardmuon.layout.readers.base import Claim, Grid, Group, Ties, ViewOf, layout_on, union
from shardmuon.layout.readers.local import AUTOTP_GROUP, mates_of
from shardmuon.layout.shards import Cut, at_dim, parts_of
from shardmuon.layout.table import ParamLayout, replicated


def cut_of(param: Tensor, group: Group) -> Cut | None:
    """How its group's options, else its own attributes, say that a plain tensor is cut. None: it is not.

    Raises:
        ValueError: They name no dim or stride of the tensor.
    """
    dim, where = group.get("partition_dim"), "the option partition_dim"
    if dim is None:
        flag = getattr(param, "tensor_model_parallel", None)
        if flag is not None and not flag:
            return None
        if flag and not hasattr(param, "partition_dim"):
            raise ValueError(
                f"its attribute tensor_model_parallel says that this {tuple(param.shape)} tensor is a shard of a "
                "matrix, but it has no attribute partition_dim, the dim that is cut (-1: none). Set it, or the group "
                "option partition_dim (DeepSpeed's AutoTP sets none: 0 for a layer of partition_type column, 1 for row)"
            )
        dim, where = getattr(param, "partition_dim", None), "its attribute partition_dim"
    if dim is None or dim == -1:
        return None
    if not isinstance(dim, int) or not 0 <= dim < param.ndim:
        raise ValueError(f"{where}={dim!r} is no dim of shape {tuple(param.shape)}: write 0 to {param.ndim - 1}, or -1")
    stride = group.get("partition_stride")
    stride = getattr(param, "partition_stride", 1) if stride is None else stride
    if not isinstance(stride, int) or stride < 1:
        raise ValueError(f"partition_stride={stride!r} must be a whole number of at least 1")
    return Cut(dim, stride)


def shards_of(group: Group) -> GroupRef | None:
    """The tensor-parallel group of a group's plain tensors.

    Raises:
        ValueError: There is none, and the group says that its tensors are cut.
    """
    shards = GroupRef.of(group.get("tp_group"), "tp_group")
    if shards is not None and shards.ranks:
        return shards
    if group.get("partition_dim") not in (None, -1):
        raise ValueError(
            f"partition_dim={group['partition_dim']} says that it is cut, but no tp_group says over which ranks. "
            f"Give Muon(...) or its group tp_group=, the tensor-parallel process group ({AUTOTP_GROUP})"
        )
    return None


class TensorParallelReader:
    """A plain tensor of a group with a `tp_group`: one of its shards, or a replica on each of its ranks."""

    def ties(self, param: Tensor, group: Group) -> Ties:
        shards = shards_of(group)
        assert shards is not None, "whoever chose this reader found one"
        return Ties(shards.ranks, mates_of(group))

    def claim(self, param: Tensor, group: Group) -> Claim:
        shards, cut, shape = shards_of(group), cut_of(param, group), tuple(param.shape)
        if cut is None or shards is None or len(shards.ranks) == 1:
            return Claim((shape, None), "a plain tensor replicated over tensor-parallel ranks", shape)
        stride = f" with stride {cut.stride}" if cut.stride > 1 else ""
        text = f"a plain tensor cut along dim {cut.dim}{stride} over {len(shards.ranks)} tensor-parallel ranks"
        return Claim((at_dim(shape, cut.dim, -1), cut), text, shape)

    def layout(self, claims: Mapping[int, Claim], grid: Grid, view_of: ViewOf) -> ParamLayout:
        ranks = union(grid)
        shape, cut = claims[ranks[0]].stored, claims[ranks[0]].form[1]
        if not isinstance(cut, Cut):
            return replicated(view_of(shape), ranks)
        sizes = {row: tuple(claims[rank].stored[cut.dim] for rank in row) for row in grid}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the shards of replicas have different sizes along dim {cut.dim}: {sizes}")
        of_row = sizes[grid[0]]
        shape = at_dim(shape, cut.dim, sum(of_row))
        view, pieces = view_of(shape), parts_of(shape, cut, of_row)
        return layout_on(
            view, ranks, {rank: of_rank for row in grid for rank, of_rank in zip(row, pieces, strict=True)}
        )
