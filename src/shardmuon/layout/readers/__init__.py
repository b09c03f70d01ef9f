"""How parameters lie: one file for each way, and the choice among them. Readers of frameworks are registered."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.readers.base import Group, Reader
from shardmuon.layout.readers.flat import FlatReader
from shardmuon.layout.readers.local import LocalReader
from shardmuon.layout.readers.tensor_parallel import TensorParallelReader, cut_of, shards_of

_LOCAL, _FLAT, _PARTS = LocalReader(), FlatReader(), TensorParallelReader()
_REGISTERED: list[tuple[Callable[[Tensor], bool], Reader]] = []


def register(recognizes: Callable[[Tensor], bool], reader: Reader) -> None:
    """Ask this reader before those that are known: it recognizes only what is its framework's."""
    _REGISTERED.insert(0, (recognizes, reader))


@lru_cache(maxsize=1)
def _dtensors() -> Reader:
    """The reader of DTensors, made when the first is met: torch.distributed.tensor takes longer than torch itself."""
    from shardmuon.layout.readers.dtensor import DTensorReader

    return DTensorReader()


def reader_of(param: Tensor, group: Group) -> Reader:
    """The reader that describes this parameter, given what the options of its group say of plain tensors.

    Raises:
        ValueError: The options do not fit the parameter; the message lacks its name.
    """
    for recognizes, reader in _REGISTERED:
        if recognizes(param):
            return reader
    if is_dtensor(param):
        found = _dtensors()
    elif hasattr(param, "_shardmuon_flat"):
        found = _FLAT
    elif shards_of(group) is not None and not (group.get("rank_local") and cut_of(param, group) is None):
        return _PARTS
    else:
        return _LOCAL
    if group.get("partition_dim") is not None:
        raise ValueError(
            f"partition_dim={group['partition_dim']} is for plain tensors; it is a {type(param).__name__}, which says "
            "itself how it is cut. Put it in a group without partition_dim"
        )
    return found


def known_groups(param: Tensor, group: Group) -> list[GroupRef]:
    """Process groups that a parameter, or the options of its group, brings along."""
    found: list[Any] = [group.get("process_group"), group.get("tp_group")]
    info: Any = getattr(reader_of(param, group), "info", None)  # of those that are flat
    if info is not None:
        found += [info(param).group, info(param).tp_group]
    if is_dtensor(param) and param.device_mesh.ndim == 1:
        found.append(param.device_mesh.get_group())
    return [ref for ref in map(GroupRef.of, found) if ref is not None and ref.group_name]
