"""Reading files of torch.distributed.checkpoint without running code that they bring.

DCP unpickles its metadata and every value that is not a tensor, and unpickling calls whatever the file names. Here both
are first read by unpicklers that know only what DCP and optimizer options are made of; DCP reads them afterwards.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

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


class VettedReader(FileSystemReader):
    """Reads a checkpoint folder after looking at its metadata."""

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


class VettedPlanner(DefaultLoadPlanner):
    """Takes over values that are not tensors (options of groups) after looking at them."""

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


class OptionsPlanner(VettedPlanner):
    """Reads what a file has of groups, whatever keys that are, into a dict that has "optimizer": {}.

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
