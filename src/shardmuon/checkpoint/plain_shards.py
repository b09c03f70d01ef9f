"""Plain shards as torch.distributed.checkpoint must see them.

It takes a plain tensor for the same on every rank and writes one rank's, so all shards but one would be lost without a
word. `describe_shards` finds out which part of the logical tensor each is, and `as_global` puts views in their place
that know it: what is saved can be loaded on any layout, DTensors included, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardmuon.checkpoint.state import clean_name
from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.comm.vote import Fault, run_together
from shardmuon.errors import fault_text
from shardmuon.layout.bind import Listed, Table, bind
from shardmuon.layout.engines import engine_for
from shardmuon.layout.engines.base import is_marked, name_of, names_of
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine, remember_shape
from shardmuon.layout.pieces import Box, Held
from shardmuon.layout.shards import Cut
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.momentum.keeper import SCALE
from shardmuon.momentum.stores import BLOCK, scale_shape
from shardmuon.options import view_options
from shardmuon.variants import KEPT_KEYS


class PlainShard(torch.Tensor):
    """One rank's pieces of a logical tensor, of its global shape; memory is shared with the storage.

    The dunder methods are DCP's protocol for tensors of other libraries (`_Checkpointable`, torch 2.11 .. 2.13).
    """

    _storage: Tensor
    _boxes: dict[torch.Size, tuple[Box, Ints]]  # offset -> a piece, and the index at which it is stored

    @staticmethod
    def __new__(cls, storage: Tensor, layout: ParamLayout) -> PlainShard:
        made: PlainShard = torch.Tensor._make_wrapper_subclass(
            cls, layout.view.shape, dtype=storage.dtype, device=storage.device
        )
        made._storage = storage
        made._boxes = {
            torch.Size(box.offset): (box, local)
            for box, local in layout.of_rank(my_rank())
            if isinstance(box, Box) and box.numel
        }
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"a PlainShard is for checkpoints only and has no {func}")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, torch.Size(box.size)) for at, (box, _) in self._boxes.items()]

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
        box, local = self._boxes[index.offset]
        found = self._storage
        for dim, (start, size) in enumerate(zip(local, box.size, strict=True)):
            found = found.narrow(dim, start, size)
        return found


def describe_shards(optimizer: torch.optim.Optimizer) -> Table:
    """The layouts of all that may be plain shards in the optimizer. Collective among all ranks.

    Raises:
        Refused: The shards of a tensor-parallel group do not fit together, or something is wrong with those of one
            rank. On every rank.
    """
    fault, listed, everyone = Fault(), list[Listed](), tuple(range(num_ranks()))
    with fault:
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                name = name_of(group, index, position)
                if _may_be_cut(name, param, group):
                    listed.append(Listed(name, name if names_of(group) else "", param, group, None))
    table = bind(my_rank(), listed, beyond=(everyone,), before=everyone, fault=fault)
    run_together(lambda: _remember(table))
    return table


def _remember(table: Table) -> None:
    """Global shapes, which a shard does not tell."""
    for one, layout in zip(table.params, table.layouts, strict=True):
        remember_shape(engine_for(one.param, one.group), one.param, layout)


def _may_be_cut(name: str, param: Tensor, group: Mapping[str, Any]) -> bool:
    try:
        return isinstance(engine_for(param, group), TensorParallelEngine)
    except ValueError as wrong:
        raise ValueError(f"{name}: {fault_text(wrong)}") from wrong


def as_global(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, table: Table
) -> dict[str, Any]:
    """`state` ("model" and "optimizer", by parameter names) with every plain shard as a `PlainShard`.

    Args:
        table: From `describe_shards`.

    Raises:
        ValueError: A marked shard is in no group of the optimizer, so that nobody says where it belongs.
    """
    described = zip(table.params, table.claims, table.layouts, strict=True)
    layouts = {id(one.param): layout for one, claim, layout in described if isinstance(claim.form[1], Cut)}
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    weights, kept = dict(state["model"]), dict(state["optimizer"]["state"])
    for full_name, param in model.named_parameters():
        name = clean_name(full_name)
        group, layout = groups.get(id(param)), layouts.get(id(param))
        if group is None and type(param.data) is Tensor and is_marked(param):
            raise ValueError(
                f"{name}: it is a plain shard (tensor_model_parallel) that is in no group of the optimizer, so "
                "which part it is cannot be told. Give it to the optimizer, frozen or not"
            )
        if group is None or layout is None:
            continue
        weights[name] = PlainShard(weights[name], layout)
        if name not in kept:
            continue
        kept[name] = dict(kept[name])
        for key, value in kept[name].items():
            if key == SCALE:
                rows = matrix_view(layout.view.shape, **view_options(group)).num_row_dims
                kept[name][key] = PlainShard(value, _of_scales(layout, rows))
            elif isinstance(value, Tensor) and value.shape == param.shape and key not in KEPT_KEYS:
                kept[name][key] = PlainShard(value, layout)
    return {"model": weights, "optimizer": {**state["optimizer"], "state": kept}}


def _of_scales(layout: ParamLayout, num_row_dims: int) -> ParamLayout:
    """The layout of 8-bit momentum's scales, one for each row and block of columns, given the momentum's. Its pieces
    begin where blocks do: others were refused when the momentum was made."""
    inner = math.prod(layout.view.shape[num_row_dims + 1 :])

    def in_blocks(index: Ints) -> Ints:
        return (*index[:num_row_dims], index[num_row_dims] * inner // BLOCK)

    held = []
    for of_rank in layout.held:
        boxes = [(one.piece, one.local) for one in of_rank if isinstance(one.piece, Box)]
        held.append(
            tuple(
                Held(Box(in_blocks(box.offset), scale_shape(box.size, num_row_dims)), in_blocks(local))
                for box, local in boxes
            )
        )
    shape = scale_shape(layout.view.shape, num_row_dims)
    return ParamLayout(MatrixView(shape, shape, -1, (), num_row_dims), layout.ranks, tuple(held))
