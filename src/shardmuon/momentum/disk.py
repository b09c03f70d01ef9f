"""Optimizer state in a file: one file per rank, mapped into memory, with a slot for each tensor.

The file is scratch space of one process: it is made anew, locked while in use and removed with the optimizer. What has
to last is in checkpoints. All of it is reserved when it is made, so a full disk is an error then and never a SIGBUS
later.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardmuon.planning.views import Shape


@dataclass(frozen=True, slots=True)
class Need:
    """A tensor that wants a slot."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MappedFile:
    """Tensors that live in a file. All zeros at first.

    Args:
        folder: Made if it does not exist.
        name: Of the file in it.
        needs: One slot each, in this order.

    Raises:
        ValueError: The file cannot be made or is in use, or the disk has no room for it.
    """

    def __init__(self, folder: str, name: str, needs: Sequence[Need]) -> None:
        self.path = Path(folder) / name
        self.needs = tuple(needs)
        starts = [0]
        for need in needs:
            starts.append(-(-(starts[-1] + need.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.size = max(starts[-1], mmap.PAGESIZE)
        self._starts = starts
        self._file = self._open()
        try:
            self._map = mmap.mmap(self._file, self.size)
        except OSError as error:
            os.close(self._file)
            raise ValueError(f"cannot map {self.path}: {error.strerror}. Name a folder on a local disk") from None
        stat = os.fstat(self._file)
        self._inode = (stat.st_dev, stat.st_ino)
        self._close = weakref.finalize(self, _remove, self._file, self.path, self._inode)
        self.tensors = tuple(self._tensor(need, start) for need, start in zip(needs, starts, strict=False))

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(
                f"cannot make {self.path} for the momentum: {error.strerror}. Name another folder"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise ValueError(
                f"cannot lock {self.path} ({error.strerror}): another optimizer keeps its momentum there. Give each "
                "optimizer a folder of its own on a disk that has locks"
            ) from None
        try:
            os.ftruncate(file, 0)  # what another process left
            os.posix_fallocate(file, 0, self.size)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(file)
            with contextlib.suppress(OSError):
                free = os.statvfs(self.path.parent)
                raise ValueError(
                    f"cannot reserve {self.size} bytes in {self.path} for the momentum of this rank "
                    f"({error.strerror}); {free.f_bavail * free.f_frsize} bytes are free. Free some, name a folder on "
                    "another disk, or keep less with Storage.momentum_dtype"
                ) from None
            raise ValueError(f"cannot reserve {self.size} bytes in {self.path}: {error.strerror}") from None
        return file

    def _tensor(self, need: Need, start: int) -> Tensor:
        count = math.prod(need.shape)
        if not count:
            return torch.zeros(need.shape, dtype=need.dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=need.dtype, count=count, offset=start).view(need.shape)

    def fault(self) -> str | None:
        """What has happened to the file behind our back, if anything."""
        try:
            stat = os.stat(self.path)
        except OSError as error:
            found = error.strerror
        else:
            if (stat.st_dev, stat.st_ino) != self._inode:
                found = "another file stands in its place"
            elif stat.st_size != self.size:
                found = f"it has {stat.st_size} bytes instead of {self.size}"
            else:
                return None
        return (
            f"the momentum file {self.path} is not as it was made: {found}. The momentum is lost: make the optimizer "
            "anew and load the last checkpoint, and keep the folder from being cleaned up"
        )

    def drop(self, slot: int) -> None:
        """Give the slot's memory back to the system; its values stay in the file."""
        start, stop = self._starts[slot], self._starts[slot + 1]
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _remove(file: int, path: Path, inode: tuple[int, int]) -> None:
    with contextlib.suppress(OSError):
        stat = os.stat(path)
        if (stat.st_dev, stat.st_ino) == inode:
            os.unlink(path)
    os.close(file)
