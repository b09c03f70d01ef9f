"""Save and load the model and the optimizer of a job with torch.distributed.checkpoint (DCP). The job that loads a
checkpoint can have a different sharding or number of ranks than the job that saved it.

[Note: plain shards]
    DCP assumes that a plain tensor is the same on every rank, and writes only one rank's tensor. In tensor parallelism
    and with FSDP1's original parameters, a plain tensor can be a shard, and DCP would silently lose all shards but one.
    So this module replaces each shard with a `_Shard`, a tensor subclass that reports the position of the shard in the
    whole tensor to DCP. Checkpoints therefore contain whole tensors.

[Note: files run no code]
    DCP unpickles its metadata and all values that are not tensors. Unpickling a file can call any function that the
    file names. So before DCP reads the metadata and these values, this module reads them with unpicklers that accept
    only the types of DCP's metadata and of optimizer options.
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
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
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
from shardmuon.errors import Refused, about, fault_text
from shardmuon.layout.bind import Listed, Table, bind
from shardmuon.layout.engines import engine_for, engine_of
from shardmuon.layout.engines.base import is_marked, named_params
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.pieces import Box, Held, ParamLayout
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.momentum.keeper import BUFFER, SCALE, STEP, Keeper
from shardmuon.momentum.stores import BLOCK, scale_shape
from shardmuon.step.kept import CARRIED
from shardmuon.variants import KEPT_KEYS


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch.distributed.checkpoint's warning that torch.distributed is not initialized, because a
    single-process job does not need torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@_quiet()
@Refused.made_public()
def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Any) -> None:
    """Save the model's weights and the optimizer's state and options with torch.distributed.checkpoint. Collective over
    all ranks.

    Args:
        path: Folder to write to.
        model: Model whose weights are saved.
        optimizer: `Muon` whose state and options are saved.

    Raises:
        ValueError: Some rank cannot read its weights or state, or a step was interrupted. Raised on every rank. Nothing
            is written.
        ExchangeError: `save` was called from a signal handler while a step was running. Raised on this rank only.
    """
    # If an optimizer step is running, other ranks are still exchanging tensors and cannot vote on saving.
    if optimizer.in_step:
        optimizer.refuse_torn()

    # `_state_of` needs the global shapes of plain shards, which the ranks determine here.
    table = _describe_shards(model, optimizer)
    weights, state, groups = run_together(partial(_state_of, model, optimizer))
    saved = run_together(lambda: _as_global(weights, state, table))
    saved["optimizer"]["param_groups"] = groups
    dcp.save(saved, checkpoint_id=path)


@_quiet()
@Refused.made_public()
def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Any) -> None:
    """Load a checkpoint that `save` wrote. The sharding and the number of ranks can differ from those of the job that
    saved the checkpoint. Collective over all ranks.

    This function first reads everything into copies and checks it, and only then changes the model and the optimizer.
    In contrast, `torch.distributed.checkpoint.load` writes directly into the tensors of the model and the optimizer, so
    a damaged file can leave them partly old and partly new. Loading needs memory for the copies and, at the end, for
    one more copy of the weights. It never runs code from a file.

    Parameter groups get all options that were saved. Frozen parameters also get their state.

    Args:
        path: Folder that `save` wrote.
        model: Model that gets the loaded weights.
        optimizer: `Muon` that gets the loaded state and options.

    Raises:
        CheckpointException: A file is missing or damaged, or contains types that no checkpoint needs. Raised on every
            rank. The model and the optimizer are unchanged.
        ValueError: The checkpoint does not fit the optimizer on some rank, or some rank cannot set the weights in the
            model (for example, because memory runs out). Raised on every rank. The model and the optimizer are
            unchanged, unless the old weights cannot be restored. In that case, every step raises an error until a
            checkpoint has been loaded.
    """
    saved: dict[str, Any] = {"optimizer": {"param_groups": ()}}
    table = _describe_shards(model, optimizer)
    reader, planner = run_together(lambda: (_Reader(path), _Planner()))
    dcp.load(saved, storage_reader=reader, planner=planner)
    groups = run_together(lambda: _paired(optimizer.param_groups, saved["optimizer"]["param_groups"], model))
    room = run_together(lambda: _room_for(cast(Metadata, planner.metadata).state_dict_metadata, optimizer, groups))
    weights = run_together(lambda: _copied(get_model_state_dict(model)))
    targets = run_together(lambda: _as_global(weights, room, table))
    dcp.load(targets, storage_reader=reader, planner=planner)
    found = {"state": room, "param_groups": groups}
    state, merged = run_together(lambda: read_state(optimizer.param_groups, found, optimizer.keeper))
    _take_over(weights, state, merged, model, optimizer)


def _state_of(model: nn.Module, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any], tuple[dict[str, Any], ...]]:
    """Return weights, optimizer state and parameter groups in the form in which they are saved. Collective over all
    ranks.

    Parameters are identified by names that do not depend on the sharding. The groups are returned as a tuple, because
    torch.distributed.checkpoint writes a tuple, unlike a list, as a single value.
    """
    members = _members(optimizer.param_groups, model)
    optimizer.complete_state()
    packed = tree_map_only(Tensor, lambda t: t.detach().cpu(), optimizer.state_dict()["param_groups"])
    state = dict[str, Any]()
    for group, of_file, names in zip(optimizer.param_groups, packed, members, strict=True):
        of_file["params"] = names
        # Under FSDP1, the saved groups also contain the state of Muon variants (such as NorMuon). This copy is dropped,
        # because `state` contains the same state.
        of_file.pop(CARRIED, None)
        for name, p in zip(names, group["params"], strict=True):
            state[name] = dict(optimizer.state.get(p, {}))
            # An empty shard gets no gradient, so its step count is outdated. The count is left out, because
            # torch.distributed.checkpoint writes the step count of an arbitrary rank.
            if not p.numel() and 0 not in engine_for(p, group).shape(p):
                state[name].pop(STEP, None)
    return get_model_state_dict(model), state, tuple(packed)


def _members(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> list[list[str]]:
    """Return one list for each of the optimizer's groups: the names of the group's parameters in the model.

    Raises:
        ValueError: A group has a parameter that is not in the model.
    """
    names = names_in(model)
    for index, group in enumerate(groups):
        for given, p in named_params(group, index):
            if id(p) not in names:
                raise ValueError(f"{given}: it is no parameter of the model. Give the model")
    return [[names[id(p)] for p in group["params"]] for group in groups]


def _paired(
    mine: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], model: nn.Module
) -> list[dict[str, Any]]:
    """Match saved parameter groups to the optimizer's groups by the names of their parameters.

    Returns:
        For each of the optimizer's groups, the saved group with the same parameters, in the optimizer's order.

    Raises:
        ValueError: The optimizer and the checkpoint group the parameters differently.
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


def _room_for(
    items: Mapping[str, Any], optimizer: Any, groups: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Allocate tensors, filled with zeros, into which a checkpoint's optimizer state can be read. Tensors for momentum
    have the checkpoint's dtype.

    Args:
        items: The checkpoint's metadata. For each tensor of optimizer state, it maps the name
            "optimizer.state.<parameter>.<key>" to the dtype and size.
        optimizer: The optimizer that will get the state.
        groups: The saved groups, in the optimizer's order.

    Returns:
        A dict that maps each parameter name to a dict from state key to tensor.
    """
    room = dict[str, dict[str, Tensor]]()
    for index, pair in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        group = merged_group(index, *pair)
        for name, p in zip(pair[1]["params"], group["params"], strict=True):
            at, start = f"optimizer.state.{name}.", dict[str, Tensor]()
            dtype = items[at + BUFFER].properties.dtype if at + BUFFER in items else None
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
    optimizer: Any,
) -> None:
    """Put loaded weights and state into the model and the optimizer. If this fails on any rank, restore the old weights
    and state on all ranks. Collective over all ranks."""
    old, before = dict[str, Any](), (optimizer.state, optimizer.param_groups, optimizer.broken)
    set_weights = partial(set_model_state_dict, model, options=StateDictOptions(strict=True))
    try:
        run_together(lambda: optimizer.take_loaded(state, groups))
        run_together(lambda: old.update(_copied(get_model_state_dict(model))))
        run_together(lambda: set_weights(weights))
    except BaseException as wrong:
        optimizer.state, optimizer.param_groups, broken = before
        remedy = "Load a checkpoint into model and optimizer on all ranks"
        # Setting the attribute `broken` makes every optimizer step raise an error until the attribute is reset, which
        # happens below if the old weights can be restored.
        optimizer.broken = f"weights are half loaded: {fault_text(wrong)}. {remedy}"
        run_together(lambda: set_weights(old) if old else None)
        optimizer.broken = broken
        raise


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], tree_map_only(Tensor, lambda t: t.detach().clone(), state))


# ------------------------------------------------------------------------------------------------------------ shards


class _Shard(torch.Tensor):
    """Tensor that describes one rank's shard of a parameter or state tensor to torch.distributed.checkpoint. The tensor
    has the global shape and shares memory with the shard.

    The methods `__create_chunk_list__`, `__create_write_items__` and `__get_tensor_shard__` implement
    `_Checkpointable`, the protocol of torch.distributed.checkpoint for tensor classes of other libraries.
    """

    # dict from the offset of each rectangular block in the global tensor to a view of the block in local storage
    _views: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, storage: Tensor, layout: ParamLayout) -> _Shard:
        shape = layout.view.shape
        made: _Shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=storage.dtype, device=storage.device)
        made._views = {}
        for start, sizes, strides, offset in layout.spans(my_rank(), storage.stride()):
            made._views[torch.Size(start)] = storage.as_strided(sizes, strides, storage.storage_offset() + offset)
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
    """Determine the layouts of all optimizer parameters that are shards in plain tensors, as in tensor parallelism.
    Collective over all ranks.

    Raises:
        Refused: The shards of a parameter do not fit together, some rank cannot determine the layout of a shard, or a
            shard in the model does not belong to the optimizer. Raised on every rank.
    """
    fault, listed, everyone = Fault(), list[Listed](), tuple(range(num_ranks()))
    with fault:
        names = names_in(model)
        for index, group in enumerate(optimizer.param_groups):
            for given, param in named_params(group, index):
                name = names.pop(id(param), "")
                shown = name or given
                with about(shown):
                    is_cut = engine_for(param, group).plain_shards
                # With use_muon=True, FSDP1 parameters that were not flattened in row-major order are rejected.
                if is_cut:
                    listed.append(Listed(shown, name, param, {**group, "use_muon": True}, None))
        for param in model.parameters():
            if id(param) in names and type(param.data) is Tensor and is_marked(param):
                raise ValueError(
                    f"{names[id(param)]}: it is a plain shard (tensor_model_parallel) that is in no group of the "
                    "optimizer, so which part it is cannot be told. Give it to the optimizer, frozen or not"
                )
    return bind(listed, beyond=(everyone,), before=everyone, fault=fault)


def _as_global(
    weights: Mapping[str, Any],  # dict from parameter name to weights
    state: Mapping[str, Mapping[str, Any]],  # dict from parameter name to a dict of its optimizer state
    table: Table,  # layouts of all parameters whose shards are plain tensors
) -> dict[str, Any]:
    """Convert shards that are plain tensors in the weights and the optimizer state to `_Shard`s, which record the
    position of a shard in the whole tensor ([Note: plain shards]).

    Returns:
        {"model": weights, "optimizer": {"state": state}}. The arguments are not changed.
    """
    weights, kept = dict(weights), {name: dict(entry) for name, entry in state.items()}
    for one, layout in zip(table.params, table.layouts, strict=True):
        # FSDP1's weight shards stay as they are, because FSDP1 has already converted them to types that can be saved.
        if not isinstance(engine_of(one.param), FlatEngine):
            weights[one.identity] = _Shard(weights[one.identity], layout)
        of_one = kept.get(one.identity, {})
        for key, value in of_one.items():
            if key == SCALE:
                of_one[key] = _Shard(value, _of_scales(layout, value.ndim - 1))
            elif isinstance(value, Tensor) and value.shape == one.param.shape and key not in KEPT_KEYS:
                of_one[key] = _Shard(value, layout)
    return {"model": weights, "optimizer": {"state": kept}}


def _of_scales(layout: ParamLayout, num_row_dims: int) -> ParamLayout:
    """Compute the layout of the scales of 8-bit momentum (one scale per row and block of columns) from the layout of
    the momentum. Shards of 8-bit momentum always begin at block boundaries."""
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


# (module, name) of every type and function that the pickled metadata of a checkpoint may name
_ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "WindowsPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        *(
            (Metadata.__module__, name)
            for name, value in vars(dcp_metadata).items()
            if getattr(value, "__module__", "") == Metadata.__module__
        ),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reader of a checkpoint folder that checks the metadata before torch.distributed.checkpoint unpickles it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of a checkpoint as torch.distributed.checkpoint does, but first check that unpickling it
        runs no code.

        Raises:
            ValueError: The metadata names a type or function that no checkpoint needs.
        """
        # Check all metadata files, because torch.distributed.checkpoint writes either one for all ranks or one per
        # rank.
        for file in sorted(Path(self.path).glob("*.metadata")):
            try:
                with file.open("rb") as stream:
                    _MetadataUnpickler(stream).load()
            except pickle.UnpicklingError as error:
                raise ValueError(f"{file}: not read: {error}. Take another copy, from a source you trust") from None
        return super().read_metadata(*args, **kwargs)


class _Planner(DefaultLoadPlanner):
    """Load planner of torch.distributed.checkpoint that checks values other than tensors (such as options of groups)
    before torch.distributed.checkpoint unpickles them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a non-tensor value in the same way as torch.distributed.checkpoint, but first check that unpickling it
        runs no code.

        Raises:
            ValueError: The value contains types that `torch.load(weights_only=True)` rejects.
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
