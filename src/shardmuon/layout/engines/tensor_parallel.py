"""Engine for plain tensors that are tensor-parallel shards, as in the layers of TransformerEngine and Megatron.

A tensor does not record which ranks share it, so the user passes these ranks as a process group (`tp_group`).
Attributes of the tensor (`tensor_model_parallel`, `partition_dim`, `partition_stride`) state whether the tensor is cut,
and along which dim. The ranks send each other the shapes of their shards. The global size of the cut dim is the sum of
the shards' sizes.

[Note: global shape]
    A rank knows only the shape of its own shard. Once the ranks have exchanged these shapes, each rank stores the
    global shape as an attribute of the parameter, together with the shard's signature (local shape, dtype, device,
    cut). The stored shape is valid while the signature is unchanged. If there is no valid stored shape, all shards are
    assumed to have equal shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.base import Claim, Engine, Extent, Grid, Group, Stored, Ties, is_marked
from shardmuon.layout.mesh import Cut
from shardmuon.layout.views import Ints


@dataclass(frozen=True)
class TensorParallelEngine(Engine):
    """Engine (storage adapter) for the plain tensors of a parameter group with the option `tp_group`. Each rank of
    `tp_group` stores either a shard or a replica of the tensor.

    Attributes:
        shards: `GroupRef` of the tensor-parallel process group.
    """

    plain_shards = True

    shards: GroupRef

    def cut(self, param: Tensor) -> Cut | None:
        """Read the dim and the stride of the tensor-parallel cut from the tensor's attributes. Return None if every
        rank has the whole tensor.

        Raises:
            ValueError: The tensor's attributes name an invalid dim or stride.
        """
        if not is_marked(param):
            return None
        dim = getattr(param, "partition_dim", None)
        if not isinstance(dim, int) or not 0 <= dim < param.ndim:
            raise ValueError(
                f"its attribute tensor_model_parallel says that this {tuple(param.shape)} tensor is a shard of a "
                f"matrix, but partition_dim={dim!r} is no dim of it. Write param.partition_dim = d for the dim that is "
                f"cut, 0 to {param.ndim - 1}, or -1 for none (DeepSpeed's AutoTP sets none: 0 for a layer of "
                "partition_type column, 1 for row)"
            )
        stride = getattr(param, "partition_stride", 1)
        if not isinstance(stride, int) or stride < 1:
            raise ValueError(f"partition_stride={stride!r} must be a whole number of at least 1")
        return Cut(dim, stride) if len(self.shards.ranks) > 1 else None

    def ties(self, param: Tensor, group: Group) -> Ties:
        return Ties(self.shards.ranks, Engine.ties(self, param, group).mates)

    def claim(self, param: Tensor, group: Group) -> Claim:
        cut, shape = self.cut(param), tuple(param.shape)
        if cut is None:
            return Claim((shape, None), "a plain tensor replicated over tensor-parallel ranks", Extent(shape))
        stride = f" with stride {cut.stride}" if cut.stride > 1 else ""
        text = f"a plain tensor cut along dim {cut.dim}{stride} over {len(self.shards.ranks)} tensor-parallel ranks"
        return Claim((_at_dim(shape, cut.dim, -1), cut), text, Extent(shape))

    def stored(self, form: tuple[Any, ...], extents: Mapping[int, Extent], grid: Grid) -> Stored:
        cut = form[1]
        if cut is None:
            return Engine.stored(self, form, extents, grid)
        sizes = {row: tuple(extents[rank].shape[cut.dim] for rank in row) for row in grid}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the shards of replicas have different sizes along dim {cut.dim}: {sizes}")
        of_row = sizes[grid[0]]
        shape = _at_dim(extents[grid[0][0]].shape, cut.dim, sum(of_row))
        parts = cut.parts(shape, of_row)
        return shape, {rank: of_rank for row in grid for rank, of_rank in zip(row, parts, strict=True)}

    def signature(self, param: Tensor) -> object:
        return Engine.signature(self, param), self.shards, self.cut(param)

    def knows_shape(self, param: Tensor) -> bool:
        """True if the ranks have determined the parameter's global shape together. If False, the method `shape` assumes
        that the shards on all ranks have equal shapes ([Note: global shape])."""
        return self.cut(param) is None or self._known(param) is not None

    def shape(self, param: Tensor) -> Ints:
        cut, shape = self.cut(param), tuple(param.shape)
        if cut is None:
            return shape
        return self._known(param) or _at_dim(shape, cut.dim, shape[cut.dim] * len(self.shards.ranks))

    def remember(self, param: Tensor, shape: Ints) -> None:
        param._shardmuon_whole = self.signature(param), shape  # type: ignore[attr-defined]

    def _known(self, param: Tensor) -> Ints | None:
        found: tuple[object, Ints] | None = getattr(param, "_shardmuon_whole", None)
        return found[1] if found is not None and found[0] == self.signature(param) else None


def _at_dim(numbers: Ints, dim: int, value: int) -> Ints:
    """Return a copy of a shape, or of any tuple with one number per dim, in which `value` replaces the number for
    `dim`."""
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def check_expert(param: Tensor, group: Group, inherited: Collection[str]) -> None:
    """Check that an expert's parameter (marked by `allreduce=False`) does not inherit process groups from the
    optimizer. The optimizer's process groups are intended for parameters outside of experts.

    Args:
        param: The parameter.
        group: Its parameter group.
        inherited: Options, out of "tp_group" and "process_group", that the parameter group inherits from the optimizer.

    Raises:
        ValueError: An expert's parameter would inherit a process group other than the empty group ().
    """
    if getattr(param, "allreduce", True) or is_dtensor(param):
        return
    taken = [key for key in inherited if group.get(key) is not None and group[key].ranks]
    if taken:
        raise ValueError(
            f"its attribute allreduce=False marks an expert's parameter, whose groups are not the dense ones, but "
            f"{' and '.join(sorted(taken))} would come from the optimizer. Put it in a group with its own tp_group and "
            "process_group (the expert-tensor-parallel and expert-data-parallel ones; () for none)"
        )
