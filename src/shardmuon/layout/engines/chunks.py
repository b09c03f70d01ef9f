"""Tell torch.distributed.checkpoint which part of a DTensor a rank stores, where placements are wrong about it.

torch asks a DTensor's local tensor for `__create_chunk_list__` and `__create_write_items__` before it computes offsets
from placements (torch 2.11 .. 2.13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


def tell_chunk(
    local: Tensor,  # the very tensor that the DTensor keeps
    offsets: tuple[int, ...],  # of its first element in the whole tensor
) -> None:
    """Write on `local` where it lies."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=local.size())

    def write_items(fqn: str, tensor: Any) -> list[WriteItem]:  # must not keep `local`, which keeps it
        if not chunk.sizes.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor.to_local()), tensor.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    _set(local, lambda: [chunk], write_items)


def refuse_to_save(local: Tensor, why: str) -> None:
    """Write on `local` that it must not be saved or loaded by its placements."""

    def refuse(fqn: str = "a state tensor", *_: Any) -> NoReturn:
        raise ValueError(f"{fqn}: {why}")

    _set(local, refuse, refuse)


def _set(local: Tensor, chunk_list: Any, write_items: Any) -> None:
    local.__create_chunk_list__ = chunk_list  # type: ignore[attr-defined]
    local.__create_write_items__ = write_items  # type: ignore[attr-defined]
