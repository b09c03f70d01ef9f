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
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.utils._pytree import tree_map_only

from shardmuon._torch import names_in
from shardmuon.checkpoint.state import init_missing, keys_of, merged_group, placed_like, read_param
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
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.momentum.keeper import SCALE, STEP, Keeper
from shardmuon.momentum.stores import BLOCK, scale_shape
from shardmuon.options import view_options
from shardmuon.step.kept import CARRIED, with_carried
from shardmuon.variants import KEPT_KEYS

Muon = Any  # `shardmuon.Muon`, which stands above


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
        saved = run_together(partial(_as_global, weights, state, model, optimizer.param_groups, table))
    saved["optimizer"]["param_groups"] = groups
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        dcp.save(saved, checkpoint_id=path)


_ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # DCP warns of it, where it works as well


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
    saved: dict[str, Any] = {"optimizer": {}}
    with made_public():
        table = _describe_shards(model, optimizer)
        reader, options, planner = run_together(lambda: (_Reader(path), _OptionsPlanner(), _Planner()))
    _read(saved, reader, options)
    with made_public():
        room = run_together(partial(_Room, model, optimizer, saved["optimizer"], options.kept))
        weights = run_together(lambda: _copied(get_model_state_dict(model)))
        targets = run_together(partial(_as_global, weights, room.state, model, room.groups, table))
    _read(targets, reader, planner)
    with made_public():
        state = run_together(partial(room.read, optimizer.keeper))
        _take_over(weights, state, room.groups, model, optimizer)


def _read(targets: dict[str, Any], reader: _Reader, planner: _Planner) -> None:
    """Let DCP read a checkpoint into these tensors. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        dcp.load(targets, storage_reader=reader, planner=planner)


class _Room:
    """Room for what a file has: state as it starts, and the groups as they will be.

    Attributes:
        state: Parameter's name -> key -> tensor.
        groups: The optimizer's with the saved options.

    Raises:
        ValueError: The file does not fit the optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: Muon, saved: Mapping[str, Any], kept: Mapping[str, Collection[str]]
    ) -> None:
        self._names, self._like, self.state = names_in(model), dict[str, Any](), dict[str, dict[str, Any]]()
        self._saved = _paired(optimizer.param_groups, saved.get("param_groups") or [], self._names)
        pairs = enumerate(zip(optimizer.param_groups, self._saved, strict=True))
        self.groups = [merged_group(index, *pair) for index, pair in pairs]
        for group, p in ((of, p) for of in self.groups for p in of["params"]):
            name, start, keeper = self._names[id(p)], dict[str, Any](), optimizer.keeper
            found = kept.get(name, ())
            if not found and p.requires_grad:
                raise ValueError(
                    f"{name}: the checkpoint has no state for it: it was frozen when it was saved, or the "
                    "checkpoint is damaged or of another model. To let it start afresh, call requires_grad_(False) "
                    "on it, load, and train it again"
                )
            if found:
                if group["use_muon"] and (SCALE in found) != (
                    keeper.dtype == "int8"
                ):  # as in the file: a step turns it
                    keeper = Keeper("int8" if SCALE in found else None, None, False)
                init_missing(p, group, start, keeper)
                self._like[name], self.state[name] = start, {key: start[key] for key in start if key in found}

    def read(self, keeper: Keeper) -> dict[Tensor, dict[str, Any]]:
        """Return what has been read, by parameter, checked and in the dtypes that the optimizer works with."""
        found: dict[Tensor, dict[str, Any]] = {}
        for group, theirs in zip(self.groups, self._saved, strict=True):
            carried = with_carried({}, [theirs])  # in files that FSDP1's own functions have made
            for p, name in ((p, self._names[id(p)]) for p in group["params"]):
                if name in self.state:
                    like, kept = self._like[name], carried.get(name, {})
                    entry = self.state[name] | {key: placed_like(kept[key], like.get(key)) for key in kept}
                    found[p] = read_param(name, p, entry, group, theirs, keeper)
        return found


def _paired(
    mine: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """The saved group of each of the optimizer's, by the names of its parameters.

    Raises:
        ValueError: Groups have other members.
    """
    left, found = list(saved), list[dict[str, Any]]()
    for index, group in enumerate(mine):
        members = _names_of(group, index, names)
        other = next((g for g in left if {*g["params"]} == {*members}), None)
        if other is None:
            raise ValueError(
                f"group {index} ({', '.join(members[:3])}, ..; {len(members)} parameters): no group of the checkpoint "
                f"has these parameters. It has groups of {', '.join(str(len(g['params'])) for g in saved)} parameters. "
                "Make the groups as they were when it was saved"
            )
        left.remove(other)
        found.append(other)
    if left:
        raise ValueError(
            f"the checkpoint has a group more ({', '.join(left[0]['params'][:3])}, ..) than the optimizer. Make the "
            "groups as they were when it was saved"
        )
    return found


def _state_of(model: nn.Module, optimizer: Muon) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Weights, state and groups by names, alike on every layout: without what FSDP1's form adds. Collective."""
    names = names_in(model)
    members = [_names_of(group, index, names) for index, group in enumerate(optimizer.param_groups)]
    with torch.no_grad():
        optimizer.complete_state()
    saved = optimizer.state_dict()
    entries, state = with_carried(saved["state"], saved["param_groups"]), dict[str, Any]()
    for group, packed, own in zip(optimizer.param_groups, saved["param_groups"], members, strict=True):
        wanted = {*keys_of(group), *((SCALE, STEP) if group["use_muon"] and optimizer.keeper.rounds else (SCALE,))}
        packed.pop(CARRIED, None)
        for name, key in zip(own, packed["params"], strict=True):
            if key in entries:
                state[name] = {kind: value for kind, value in entries[key].items() if kind in wanted}
        packed["params"] = own
    return get_model_state_dict(model), state, saved["param_groups"]


def _names_of(group: Mapping[str, Any], index: int, names: Mapping[int, str]) -> list[str]:
    """The model's names of a group's parameters."""
    lost = next((at for at, p in enumerate(group["params"]) if id(p) not in names), None)
    if lost is not None:
        raise ValueError(f"{name_of(group, index, lost)}: it is no parameter of the model. Give the whole model")
    return [names[id(p)] for p in group["params"]]


def _take_over(
    weights: dict[str, Any],
    state: dict[Tensor, dict[str, Any]],
    groups: list[dict[str, Any]],
    model: nn.Module,
    optimizer: Muon,
) -> None:
    """Let model and optimizer take what was read, on all ranks or on none. Collective."""
    strict, old = StateDictOptions(strict=True), dict[str, Any]()
    before = optimizer.state, optimizer.param_groups, optimizer.broken
    try:
        run_together(lambda: optimizer.take_loaded(state, groups))
        run_together(lambda: old.update(_copied(get_model_state_dict(model))))
        run_together(lambda: set_model_state_dict(model, weights, options=strict))
    except BaseException as wrong:
        optimizer.state, optimizer.param_groups, optimizer.broken = before
        try:
            run_together(lambda: set_model_state_dict(model, old, options=strict) if old else None)
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
        Refused: The shards of a group do not fit together, or something is wrong with those of one rank. On every rank.
    """
    fault, listed, everyone = Fault(), list[Listed](), tuple(range(num_ranks()))
    with fault:
        names = names_in(model)
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                name = names.get(id(param)) or name_of(group, index, position)
                try:
                    is_cut = engine_for(param, group).plain_shards
                except ValueError as wrong:
                    raise ValueError(f"{name}: {fault_text(wrong)}") from wrong
                if is_cut:  # read as matrices, so that an order of elements that is none of rows and columns is refused
                    listed.append(Listed(name, names.get(id(param), ""), param, {**group, "use_muon": True}, None))
    table = bind(my_rank(), listed, beyond=(everyone,), before=everyone, fault=fault)

    def remember() -> None:  # a shard does not know its global shape
        for one, layout in zip(table.params, table.layouts, strict=True):
            remember_shape(engine_for(one.param, one.group), one.param, layout)

    run_together(remember)
    return table


def _as_global(
    weights: Mapping[str, Any],
    state: Mapping[str, Mapping[str, Any]],
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    table: Table,
) -> dict[str, Any]:
    """A job with every plain shard as a `_Shard`, as {"model": weights, "optimizer": {"state": state}}.

    Args:
        weights, state: By parameter names.
        groups: The optimizer's, or as they will be.
        table: From `_describe_shards`.

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
            weights[name] = _Shard(weights[name], layout)
        for key, value in kept.get(name, {}).items():
            if key == SCALE:
                rows = matrix_view(layout.view.shape, **view_options(group)).num_row_dims
                kept[name][key] = _Shard(value, _of_scales(layout, rows))
            elif isinstance(value, Tensor) and value.shape == param.shape and key not in KEPT_KEYS:
                kept[name][key] = _Shard(value, layout)
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
_METADATA_MODULE = Metadata.__module__


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == _METADATA_MODULE and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:  # not what that module imports
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    """A reader of a checkpoint folder that looks at its metadata first."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._folder = Path(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Do as DCP does, once it has been looked at.

        Raises:
            ValueError: The metadata names something that is not part of a checkpoint.
        """
        for file in sorted(self._folder.glob("*.metadata")):  # one for all ranks, or one for each
            try:
                with file.open("rb") as stream:
                    _MetadataUnpickler(stream).load()
            except pickle.UnpicklingError as error:
                raise ValueError(f"{file}: not read: {error}. Take another copy, from a source you trust") from None
        return super().read_metadata(*args, **kwargs)


class _Planner(DefaultLoadPlanner):
    """A plan of loading that looks at values that are not tensors (options of groups) before it takes them over."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Do as DCP does, once it has been looked at.

        Raises:
            ValueError: The value is more than numbers, texts, tensors and containers of them.
        """
        name = read_item.dest_index.fqn
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition(" Please use")[0]
            raise ValueError(
                f"{name}: not read: {reason} If you trust it, allow it with torch.serialization.add_safe_globals"
            ) from None
        value.seek(0)
        super().load_bytes(read_item, value)


class _OptionsPlanner(_Planner):
    """A plan of loading all that a file has of groups, under whatever keys, into a dict that has "optimizer": {}.

    Attributes:
        kept: Parameter's name -> keys of the state that the file has of it.
    """

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Make the places, then do as DCP does."""
        self.kept: dict[str, set[str]] = {}
        for name, path in dict(getattr(metadata, "planner_data", None) or {}).items():
            kind = path[1] if len(path) > 1 and path[0] == "optimizer" else None
            if kind == "state" and len(path) == 4:
                self.kept.setdefault(path[2], set()).add(path[3])
            if kind == "param_groups" and metadata is not None:
                item, place = metadata.state_dict_metadata[name], None
                if isinstance(item, TensorStorageMetadata):
                    place = torch.empty(item.size, dtype=item.properties.dtype)
                set_element(state_dict, path, place)
        super().set_up_planner(state_dict, metadata, is_coordinator)
