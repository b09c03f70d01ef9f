"""Plain shards as torch.distributed.checkpoint must see them.

It takes a plain tensor for the same on every rank and writes one rank's, so all shards but one would be lost without a
word. `as_global` puts views in their place that know their part of the logical tensor: what is saved can be loaded on
any layout, DTensors included, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardmuon.checkpoint.state import clean_name
from shardmuon.comm.groups import my_rank
from shardmuon.engines import engine_for
from shardmuon.engines.tensor_parallel import TensorParallelEngine, gather_shards
from shardmuon.errors import made_public
from shardmuon.layout.readers.local import is_marked
from shardmuon.momentum.keeper import SCALE
from shardmuon.momentum.stores import scale_shape
from shardmuon.planning.layout import Box, Holder, ParamLayout
from shardmuon.planning.views import MatrixView
from shardmuon.stepping.settings import replicas_of, view_of
from shardmuon.variants import KEPT_KEYS


class PlainShard(torch.Tensor):
    """One rank's pieces of a logical tensor, of its global shape; memory is shared with the storage.

    The dunder methods are DCP's protocol for tensors of other libraries (`_Checkpointable`, torch 2.11 .. 2.13).
    """

    _storage: Tensor
    _boxes: dict[torch.Size, Holder]

    @staticmethod
    def __new__(cls, storage: Tensor, layout: ParamLayout) -> PlainShard:
        made: PlainShard = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, dtype=storage.dtype, device=storage.device
        )
        made._storage = storage
        held = [h for h in layout.holders_of(my_rank()) if isinstance(h.piece, Box) and h.piece.numel]
        made._boxes = {torch.Size(h.piece.offset): h for h in held if isinstance(h.piece, Box)}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"a PlainShard is for checkpoints only and has no {func}")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        sizes = [h.piece.size for h in self._boxes.values() if isinstance(h.piece, Box)]
        return [ChunkStorageMetadata(at, torch.Size(size)) for at, size in zip(self._boxes, sizes, strict=True)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._storage)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "shards have offsets"
        holder = self._boxes[index.offset]
        assert isinstance(holder.piece, Box)
        found = self._storage
        for dim, (start, size) in enumerate(zip(holder.local, holder.piece.size, strict=True)):
            found = found.narrow(dim, start, size)
        return found


def as_global(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`state` ("model" and "optimizer", by parameter names) with every plain shard as a `PlainShard`. Collective.

    Raises:
        ValueError: The shards of a tensor-parallel group do not fit together, or a marked shard is in no group of the
            optimizer, so that nobody says where it belongs.
    """
    with made_public():
        faults = gather_shards(optimizer.param_groups).faults
        if faults.text is not None:
            raise faults.refusal(faults.text)
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    weights, kept = dict(state["model"]), dict(state["optimizer"]["state"])
    for full_name, param in model.named_parameters():
        name = clean_name(full_name)
        group = groups.get(id(param))
        if group is None:
            if type(param.data) is Tensor and is_marked(param):
                raise ValueError(
                    f"{name}: it is a plain shard (tensor_model_parallel) that is in no group of the optimizer, so "
                    "which part it is cannot be told. Give it to the optimizer, frozen or not"
                )
            continue
        engine = engine_for(param, group)
        if not isinstance(engine, TensorParallelEngine) or not engine.is_cut:
            continue
        shape, replicas = engine.shape(param), replicas_of(group)
        layout = engine.describe(param, MatrixView(shape, 1, ()), replicas).claims[0].layout
        weights[name] = PlainShard(weights[name], layout)
        if name not in kept:
            continue
        kept[name] = dict(kept[name])
        for key, value in kept[name].items():
            if key == SCALE:
                rows = view_of(name, param, group).num_row_dims
                of_scale = engine.layout_of_blocks(param, scale_shape(shape, rows), rows, replicas)
                kept[name][key] = PlainShard(value, of_scale)
            elif isinstance(value, Tensor) and value.shape == param.shape and key not in KEPT_KEYS:
                kept[name][key] = PlainShard(value, layout)
    return {"model": weights, "optimizer": {**state["optimizer"], "state": kept}}
