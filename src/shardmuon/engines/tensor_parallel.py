"""Plain tensors that are one rank's shard of a tensor, as TransformerEngine's and Megatron's layers keep them.

Nothing in such a tensor says over which ranks it is cut, so the user does (`tp_group`); along which dim, its own
attributes say (`tensor_model_parallel`, `partition_dim`, `partition_stride`) or the options of its group.

[Note: sizes]
    The global shape is the sum of the shards, and a rank sees its own only. Whoever has made a layout table, in which
    the ranks tell each other their shapes, notes the sizes here. Until then shards are taken to be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import GroupRef
from shardmuon.engines.local import LocalEngine
from shardmuon.layout.pieces import Box
from shardmuon.layout.readers.tensor_parallel import cut_of, shards_of
from shardmuon.layout.shards import Cut
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints


def tensor_parallel_engine(param: Tensor, group: Mapping[str, Any]) -> TensorParallelEngine | None:
    """The engine of a plain tensor whose group has a `tp_group`; None if that does not apply to it.

    Raises:
        ValueError: The group's options do not fit the tensor.
    """
    shards = shards_of(group)
    if shards is None:
        return None
    cut = cut_of(param, group)
    if cut is None and group.get("rank_local"):
        return None  # this rank's own, whole
    return TensorParallelEngine(shards, cut)


def check_expert(param: Tensor, group: Mapping[str, Any], inherited: Collection[str]) -> None:
    """Experts (`allreduce=False`) have process groups of their own: none may come from the optimizer unsaid.

    Args:
        param: The parameter.
        group: Options of its group.
        inherited: Those of tp_group and process_group that the group took from the optimizer.

    Raises:
        ValueError: It would take over one.
    """
    if getattr(param, "allreduce", True) or is_dtensor(param):
        return
    taken = [key for key in inherited if group.get(key) is not None and group[key].ranks]
    if group.get("rank_local"):
        whole = tensor_parallel_engine(param, group) is None
        taken = [key for key in taken if key == "tp_group" and not whole]
    if taken:
        raise ValueError(
            f"its attribute allreduce=False marks an expert's parameter, whose groups are not the dense ones, but "
            f"{' and '.join(sorted(taken))} would come from the optimizer. Put it in a group with its own tp_group and "
            "process_group (the expert-tensor-parallel and expert-data-parallel ones; () for none)"
        )


# parameter -> (what its shard was, sizes along the cut dim of all shards)
_SIZES: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True, slots=True)
class TensorParallelEngine:
    """A plain tensor of an optimizer with a `tp_group`: one of its shards, or a replica on each of its ranks.

    Attributes:
        shards: The tensor-parallel group.
        cut: How the tensor is cut over it. None: every rank has it whole.
    """

    shards: GroupRef
    cut: Cut | None

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds less than the tensor."""
        return self.cut is not None and len(self.shards.ranks) > 1

    def recognizes(self, param: Tensor) -> bool:
        return LocalEngine().recognizes(param)

    def knows_shape(self, param: Tensor) -> bool:
        """Whether `shape` is more than an assumption, see [Note: sizes]."""
        return not self.is_cut or self._known_sizes(param) is not None

    def shape(self, param: Tensor) -> Ints:
        if not self.is_cut:
            return tuple(param.shape)
        assert self.cut is not None
        total = sum(self._sizes(param))
        return tuple(total if dim == self.cut.dim else size for dim, size in enumerate(param.shape))

    def storage(self, tensor: Tensor) -> Tensor:
        return LocalEngine().storage(tensor)

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        return LocalEngine().stored_alike(tensor, param)

    def wrap(self, storage: Tensor, param: Tensor, shape: Ints | None = None) -> Tensor:
        return storage

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        return LocalEngine().is_aligned(grad, param)

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        return LocalEngine().align(grad, param)

    def signature(self, param: Tensor) -> object:
        return tuple(param.shape), self

    def lacks_gradient(self, param: Tensor) -> bool:
        return False

    def _key(self, param: Tensor) -> object:
        return tuple(param.shape), self.shards.ranks, self.cut

    def _known_sizes(self, param: Tensor) -> Ints | None:
        key, sizes = _SIZES.get(param, (None, None))
        return sizes if key == self._key(param) else None

    def _sizes(self, param: Tensor) -> tuple[int, ...]:
        assert self.cut is not None
        return self._known_sizes(param) or (int(param.shape[self.cut.dim]),) * len(self.shards.ranks)

    def remember_sizes(self, param: Tensor, sizes: tuple[int, ...]) -> None:
        """Remember the sizes of all shards."""
        _SIZES[param] = (self._key(param), sizes)


def remember_shape(engine: object, param: Tensor, layout: ParamLayout) -> None:
    """Remember the sizes of a parameter's shards, from its layout."""
    if isinstance(engine, TensorParallelEngine) and engine.cut is not None and engine.is_cut:
        dim, held = engine.cut.dim, dict(zip(layout.ranks, layout.held, strict=True))
        engine.remember_sizes(
            param,
            tuple(
                sum(one.piece.size[dim] for one in held[rank] if isinstance(one.piece, Box))
                for rank in engine.shards.ranks
            ),
        )
