"""Whole jobs in files of torch.distributed.checkpoint (DCP), saved on one layout and loaded on any.

[Note: plain shards]
    DCP takes a plain tensor for the same on every rank and writes one rank's, so all but one of the shards of tensor
    parallelism, and of FSDP1's original parameters, would be lost without a word. A layout table says who stores what,
    and views that know it stand in the shards' place: a file has whole tensors by name.

[Note: files run no code]
    DCP unpickles its metadata and every value that is not a tensor, and unpickling calls whatever the file names. Both
    are first read by unpicklers that know only what DCP and optimizer options are made of; DCP reads them afterwards.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.utils._pytree import tree_map_only

from shardmuon._torch import names_in
from shardmuon.checkpoint.state import init_missing, merged_group, read_state
from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.comm.vote import Fault, run_together
from shardmuon.errors import HALF_LOADED, ExchangeError, fault_text, made_public
from shardmuon.layout.bind import Listed, Table, bind
from shardmuon.layout.engines import engine_for, engine_of
from shardmuon.layout.engines.base import is_marked, name_of
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.engines.tensor_parallel import remember_shape
from shardmuon.layout.pieces import Box, Held, Tile, spans_of
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.momentum.keeper import BUFFER, SCALE, STEP, Keeper
from shardmuon.momentum.stores import BLOCK, scale_shape
from shardmuon.step.kept import CARRIED
from shardmuon.variants import KEPT_KEYS

Muon = Any  # `shardmuon.Muon`, which stands above
_Groups = Sequence[Mapping[str, Any]]


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Muon) -> None:
    """Write weights, state and options with torch.distributed.checkpoint. Collective among all ranks.

    Args:
        path: A folder.
        model: Its weights are saved.
        optimizer: Its state and options are.

    Raises:
        ValueError: What is to be saved cannot be read on some rank, or a step was broken off. On every rank; nothing is
            written.
        ExchangeError: A step is under way: a signal handler has called this. On this rank.
    """
    if optimizer.in_step:  # others may be in its exchanges: nobody can be told
        raise ExchangeError(optimizer.torn())

    with made_public():
        weights, state, groups = run_together(partial(_state_of, model, optimizer))
        table = _describe_shards(model, optimizer)
        saved = run_together(lambda: _as_global(weights, _counted(state, table), table))
    saved["optimizer"]["param_groups"] = groups
    with _quiet():
        dcp.save(saved, checkpoint_id=path)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Muon) -> None:
    """Read what `save` wrote, on any layout and number of ranks. Collective among all ranks.

    `torch.distributed.checkpoint.load` writes into the tensors it is given, which are the optimizer's own: a damaged
    file leaves them half old, half new. This reads into copies and takes them over when all of it has been read and
    checked, at the price of that memory and, at the end, of the weights' once more. A file cannot run code. The groups
    take all options that the file has, and frozen parameters their state.

    Raises:
        CheckpointException: A file is missing, damaged, or holds more than a checkpoint. On every rank; both are
            unchanged.
        ValueError: The checkpoint does not fit the optimizer on some rank, or the model itself refuses its weights
            there (a hook, too little memory). On every rank; both are unchanged. If a model refuses its own old weights
            as well, the optimizer makes no step before it has loaded a checkpoint.
    """
    saved: dict[str, Any] = {"optimizer": {"param_groups": ()}}
    with made_public():
        table = _describe_shards(model, optimizer)
        reader, planner = run_together(lambda: (_Reader(path), _Planner()))
    _read(saved, reader, planner)
    with made_public():
        groups = run_together(lambda: _paired(optimizer.param_groups, saved["optimizer"]["param_groups"], model))
        room = run_together(lambda: _room_for(reader.items, optimizer, groups))
        weights = run_together(lambda: _copied(get_model_state_dict(model)))
        targets = run_together(lambda: _as_global(weights, room, table))
    _read(targets, reader, planner)
    with made_public():
        found = {"state": room, "param_groups": groups}
        state, merged = run_together(lambda: read_state(optimizer.param_groups, found, optimizer.keeper))
        _take_over(weights, state, merged, model, optimizer)


def _read(targets: dict[str, Any], reader: _Reader, planner: _Planner) -> None:
    """Let DCP read a checkpoint into these tensors. Collective."""
    with _quiet():
        dcp.load(targets, storage_reader=reader, planner=planner)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning that there is one process, where it works as well."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _state_of(model: nn.Module, optimizer: Muon) -> tuple[dict[str, Any], dict[str, Any], tuple[dict[str, Any], ...]]:
    """Weights, state and groups by names, alike on every layout. Collective. DCP writes a tuple as one value."""
    members = _members(optimizer.param_groups, model)
    with torch.no_grad():
        optimizer.complete_state()
    packed = tree_map_only(Tensor, lambda t: t.detach().cpu(), optimizer.state_dict()["param_groups"])
    state = dict[str, Any]()
    for group, of_file, names in zip(optimizer.param_groups, packed, members, strict=True):
        of_file["params"] = names
        of_file.pop(CARRIED, None)  # FSDP1's form has it there
        for name, p in zip(names, group["params"], strict=True):
            state[name] = dict(optimizer.state.get(p, {}))
    return get_model_state_dict(model), state, tuple(packed)


def _members(groups: _Groups, model: nn.Module) -> list[list[str]]:
    """The model's names of each group's parameters."""
    names = names_in(model)
    for index, group in enumerate(groups):
        for position, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(f"{name_of(group, index, position)}: it is no parameter of the model. Give the model")
    return [[names[id(p)] for p in group["params"]] for group in groups]


def _paired(mine: _Groups, saved: _Groups, model: nn.Module) -> list[dict[str, Any]]:
    """The saved group of each of the optimizer's, with its parameters in the optimizer's order.

    Raises:
        ValueError: Groups have other members.
    """
    left, found = list(saved), list[dict[str, Any]]()
    for index, members in enumerate(_members(mine, model)):
        other = next((g for g in left if {*g["params"]} == {*members}), None)
        if other is None or len(saved) != len(mine):
            raise ValueError(
                f"group {index} of {len(mine)} ({', '.join(members[:3])}, ..; {len(members)} parameters): the "
                f"checkpoint has {len(saved)} groups, of {', '.join(str(len(g['params'])) for g in saved)} parameters, "
                f"and {'these in one' if other else 'no such one'}. Make the groups as they were when it was saved"
            )
        left = [group for group in left if group is not other]
        found.append({**other, "params": members, "param_names": None})
    return found


def _room_for(items: Mapping[str, Any], optimizer: Muon, groups: _Groups) -> dict[str, dict[str, Tensor]]:
    """Zeros for all state that a file has, as stored there: parameter's name -> key -> tensor.

    Args:
        items: The file's own list of what it holds.
        optimizer: Whose parameters they are.
        groups: The saved groups, in the optimizer's order.
    """
    room = dict[str, dict[str, Tensor]]()
    for index, pair in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        group = merged_group(index, *pair)
        for name, p in zip(pair[1]["params"], group["params"], strict=True):
            at, start = f"optimizer.state.{name}.", dict[str, Tensor]()
            momentum = items.get(at + BUFFER)
            dtype = None if momentum is None else momentum.properties.dtype
            keeper = Keeper("int8" if dtype == torch.int8 else dtype, optimizer.keeper.device, rounds_weights=True)
            init_missing(p, group, start, keeper)
            found = {key: value for key, value in start.items() if at + key in items}
            room |= {name: found} if found else {}
    return room


def _take_over(
    weights: dict[str, Any],
    state: dict[Tensor, dict[str, Any]],
    groups: list[dict[str, Any]],
    model: nn.Module,
    optimizer: Muon,
) -> None:
    """Let model and optimizer take what was read, on all ranks or on none. Collective."""
    old, before = dict[str, Any](), (optimizer.state, optimizer.param_groups, optimizer.broken)
    set_weights = partial(set_model_state_dict, model, options=StateDictOptions(strict=True))
    try:
        run_together(lambda: optimizer.take_loaded(state, groups))
        run_together(lambda: old.update(_copied(get_model_state_dict(model))))
        run_together(lambda: set_weights(weights))
    except BaseException as wrong:
        optimizer.state, optimizer.param_groups, optimizer.broken = before
        try:
            run_together(lambda: set_weights(old) if old else None)
        except BaseException:
            optimizer.broken = f"weights are half loaded: {fault_text(wrong)}. {HALF_LOADED}"
        raise


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = tree_map_only(Tensor, lambda t: t.detach().clone(), state)
    return copies


# ------------------------------------------------------------------------------------------------------------ shards


class _Shard(torch.Tensor):
    """One rank's pieces of a logical tensor, of its global shape; memory is shared with the storage.

    The dunder methods are DCP's protocol for tensors of other libraries (`_Checkpointable`).
    """

    _views: dict[torch.Size, Tensor]  # offset of a box of the whole -> what is stored of it

    @staticmethod
    def __new__(cls, storage: Tensor, layout: ParamLayout) -> _Shard:
        shape = layout.view.shape
        made: _Shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=storage.dtype, device=storage.device)
        made._views = {}
        for held in layout.of_rank(my_rank()):
            for start, sizes in spans_of(held.piece, shape):
                offset, strides = Tile(0, start, sizes, held).in_storage(layout.view, storage.stride())
                view = storage.as_strided(sizes, strides, storage.storage_offset() + offset)
                made._views[torch.Size(start)] = view
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"a _Shard is for checkpoints only and has no {func}")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, view.shape) for at, view in self._views.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        made, kind = TensorProperties(dtype=self.dtype), WriteItemType.SHARD
        return [
            WriteItem(MetadataIndex(fqn, at.offsets), kind, tensor_data=TensorWriteData(at, made, self.size()))
            for at in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "shards have offsets"
        return self._views[index.offset]


def _describe_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> Table:
    """The layouts of all that may be plain shards in the optimizer. Collective among all ranks.

    Raises:
        Refused: The shards of a group do not fit together, something is wrong with those of one rank, or one is in no
            group of the optimizer, so that nobody says where it belongs. On every rank.
    """
    fault, listed, everyone = Fault(), list[Listed](), tuple(range(num_ranks()))
    with fault:
        names = names_in(model)
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                name = names.pop(id(param), "")
                shown = name or name_of(group, index, position)
                try:
                    is_cut = engine_for(param, group).plain_shards
                except ValueError as wrong:
                    raise ValueError(f"{shown}: {fault_text(wrong)}") from wrong
                if is_cut:  # read as matrices, so that an order of elements that is none of rows and columns is refused
                    listed.append(Listed(shown, name, param, {**group, "use_muon": True}, None))
        for param in model.parameters():
            if id(param) in names and type(param.data) is Tensor and is_marked(param):
                raise ValueError(
                    f"{names[id(param)]}: it is a plain shard (tensor_model_parallel) that is in no group of the "
                    "optimizer, so which part it is cannot be told. Give it to the optimizer, frozen or not"
                )
    table = bind(my_rank(), listed, beyond=(everyone,), before=everyone, fault=fault)

    def remember() -> None:  # a shard does not know its global shape
        for one, layout in zip(table.params, table.layouts, strict=True):
            remember_shape(engine_for(one.param, one.group), one.param, layout)

    run_together(remember)
    return table


def _counted(state: Mapping[str, Mapping[str, Any]], table: Table) -> dict[str, Mapping[str, Any]]:
    """State by names, without the counts of shards of which this rank stores nothing: frameworks leave no gradient
    there, so nobody has counted, and DCP writes the count of any rank."""
    counted = dict(state)
    for one, layout in zip(table.params, table.layouts, strict=True):
        if not one.param.numel() and 0 not in layout.view.shape:
            counted[one.identity] = {key: v for key, v in state.get(one.identity, {}).items() if key != STEP}
    return counted


def _as_global(
    weights: Mapping[str, Any],  # by parameter names
    state: Mapping[str, Mapping[str, Any]],  # likewise
    table: Table,  # of all plain shards
) -> dict[str, Any]:
    """A job with every plain shard as a `_Shard`, as {"model": weights, "optimizer": {"state": state}}."""
    weights, kept = dict(weights), {name: dict(entry) for name, entry in state.items()}
    for one, layout in zip(table.params, table.layouts, strict=True):
        if not isinstance(engine_of(one.param), FlatEngine):  # FSDP1 itself has made tensors of its own of these
            weights[one.identity] = _Shard(weights[one.identity], layout)
        of_one = kept.get(one.identity, {})
        for key, value in of_one.items():
            if key == SCALE:
                of_one[key] = _Shard(value, _of_scales(layout, value.ndim - 1))
            elif isinstance(value, Tensor) and value.shape == one.param.shape and key not in KEPT_KEYS:
                of_one[key] = _Shard(value, layout)
    return {"model": weights, "optimizer": {"state": kept}}


def _of_scales(layout: ParamLayout, num_row_dims: int) -> ParamLayout:
    """The layout of 8-bit momentum's scales, one for each row and block of columns, given the momentum's. Its pieces
    begin where blocks do: others were refused when the momentum was made."""
    inner = math.prod(layout.view.shape[num_row_dims + 1 :])

    def in_blocks(index: Ints) -> Ints:
        return (*index[:num_row_dims], index[num_row_dims] * inner // BLOCK)

    held = [
        tuple(
            Held(Box(in_blocks(one.piece.offset), scale_shape(one.piece.size, num_row_dims)), in_blocks(one.local))
            for one in of_rank
            if isinstance(one.piece, Box)
        )
        for of_rank in layout.held
    ]
    shape = scale_shape(layout.view.shape, num_row_dims)
    return ParamLayout(MatrixView(shape, shape, -1, (), num_row_dims), layout.ranks, tuple(held))


# ----------------------------------------------------------------------------------------------------- reading files


_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module in ("torch", Metadata.__module__) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or getattr(found, "__module__", "") == Metadata.__module__:
                return found  # not what that module imports
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    """A reader of a checkpoint folder that looks at its metadata first.

    Attributes:
        items: What the file holds: "optimizer.state.<parameter>.<key>" -> its dtype and size.
    """

    items: Mapping[str, Any]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Do as DCP does, once it has been looked at.

        Raises:
            ValueError: The metadata names something that is not part of a checkpoint.
        """
        for file in sorted(Path(self.path).glob("*.metadata")):  # one for all ranks, or one for each
            try:
                with file.open("rb") as stream:
                    _MetadataUnpickler(stream).load()
            except pickle.UnpicklingError as error:
                raise ValueError(f"{file}: not read: {error}. Take another copy, from a source you trust") from None
        metadata = super().read_metadata(*args, **kwargs)
        self.items = metadata.state_dict_metadata
        return metadata


class _Planner(DefaultLoadPlanner):
    """A plan of loading that looks at values that are not tensors (options of groups) before it takes them over."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Do as DCP does, once it has been looked at.

        Raises:
            ValueError: The value is more than numbers, texts, tensors and containers of them.
        """
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition(" Please use")[0]
            raise ValueError(
                f"{read_item.dest_index.fqn}: not read: {reason} If you trust it, allow it with "
                "torch.serialization.add_safe_globals"
            ) from None
        value.seek(0)
        super().load_bytes(read_item, value)
