"""Plain shards as torch.distributed.checkpoint must see them: tensor-parallel ones, and FSDP1's original parameters.

It takes a plain tensor for the same on every rank and writes one rank's, so all shards but one would be lost without a
word. `describe_shards` makes the table of who stores what, and `as_global` puts views in their place that know it: a
file has whole tensors by name, and can be loaded on any layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardmuon._torch import names_in
from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.comm.vote import Fault, run_together
from shardmuon.errors import fault_text
from shardmuon.layout.bind import Listed, Table, bind
from shardmuon.layout.engines import engine_for, engine_of
from shardmuon.layout.engines.base import is_marked, name_of
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.engines.tensor_parallel import remember_shape
from shardmuon.layout.pieces import Box, Held, Tile, spans_of
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.momentum.keeper import SCALE
from shardmuon.momentum.stores import BLOCK, scale_shape
from shardmuon.options import view_options
from shardmuon.variants import KEPT_KEYS


class CheckpointShard(torch.Tensor):
    """One rank's pieces of a logical tensor, of its global shape; memory is shared with the storage.

    The dunder methods are DCP's protocol for tensors of other libraries (`_Checkpointable`).
    """

    _views: dict[torch.Size, Tensor]  # offset of a box of the whole -> what is stored of it

    @staticmethod
    def __new__(cls, storage: Tensor, layout: ParamLayout) -> CheckpointShard:
        shape = layout.view.shape
        made: CheckpointShard = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=storage.dtype, device=storage.device
        )
        made._views = {}
        for held in layout.of_rank(my_rank()):
            for start, sizes in spans_of(held.piece, shape):
                offset, strides = Tile(0, start, sizes, held).in_storage(layout.view, storage.stride())
                view = storage.as_strided(sizes, strides, storage.storage_offset() + offset)
                made._views[torch.Size(start)] = view
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"a CheckpointShard is for checkpoints only and has no {func}")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, view.shape) for at, view in self._views.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "shards have offsets"
        return self._views[index.offset]


def describe_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> Table:
    """The layouts of all that may be plain shards in the optimizer. Collective among all ranks.

    Raises:
        Refused: The shards of a group do not fit together, or something is wrong with those of one rank. On every rank.
    """
    fault, listed, everyone = Fault(), list[Listed](), tuple(range(num_ranks()))
    with fault:
        names = names_in(model)
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                name = names.get(id(param)) or name_of(group, index, position)
                if _may_be_cut(name, param, group):
                    # read as matrices, so that an order of elements that is none of rows and columns is refused
                    listed.append(Listed(name, names.get(id(param), ""), param, {**group, "use_muon": True}, None))
    table = bind(my_rank(), listed, beyond=(everyone,), before=everyone, fault=fault)
    run_together(lambda: _remember(table))
    return table


def _remember(table: Table) -> None:
    """Tell plain shards the global shapes found in layouts: a shard does not know its own."""
    for one, layout in zip(table.params, table.layouts, strict=True):
        remember_shape(engine_for(one.param, one.group), one.param, layout)


def _may_be_cut(name: str, param: Tensor, group: Mapping[str, Any]) -> bool:
    try:
        return engine_for(param, group).plain_shards
    except ValueError as wrong:
        raise ValueError(f"{name}: {fault_text(wrong)}") from wrong


def as_global(
    weights: Mapping[str, Any],
    state: Mapping[str, Mapping[str, Any]],
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    table: Table,
) -> dict[str, Any]:
    """A job with every plain shard as a `CheckpointShard`, as {"model": weights, "optimizer": {"state": state}}.

    Args:
        weights, state: By parameter names.
        groups: The optimizer's, or as they will be.
        table: From `describe_shards`.

    Raises:
        ValueError: A marked shard is in no group of the optimizer, so that nobody says where it belongs.
    """
    layouts = {id(one.param): layout for one, layout in zip(table.params, table.layouts, strict=True)}
    owners = {id(p): g for g in groups for p in g["params"]}
    weights, kept = dict(weights), {name: dict(entry) for name, entry in state.items()}
    names = names_in(model)
    for param in model.parameters():
        name, group, layout = names[id(param)], owners.get(id(param)), layouts.get(id(param))
        if group is None and type(param.data) is Tensor and is_marked(param):
            raise ValueError(
                f"{name}: it is a plain shard (tensor_model_parallel) that is in no group of the optimizer, so "
                "which part it is cannot be told. Give it to the optimizer, frozen or not"
            )
        if group is None or layout is None:
            continue
        if not isinstance(engine_of(param), FlatEngine):  # FSDP1 itself has made tensors of its own of these
            weights[name] = CheckpointShard(weights[name], layout)
        for key, value in kept.get(name, {}).items():
            if key == SCALE:
                rows = matrix_view(layout.view.shape, **view_options(group)).num_row_dims
                kept[name][key] = CheckpointShard(value, _of_scales(layout, rows))
            elif isinstance(value, Tensor) and value.shape == param.shape and key not in KEPT_KEYS:
                kept[name][key] = CheckpointShard(value, layout)
    return {"model": weights, "optimizer": {"state": kept}}


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
