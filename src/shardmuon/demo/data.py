"""Real text with no download: the Python standard library's own sources, as bytes.

About 13 MB of code and prose that every machine with Python has. Files are split into train and held-out by a hash
of their path, so no file is in both and every rank, run and machine with the same Python agrees.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Batches", "Corpus", "is_held_out", "read_corpus", "source_files"]

VOCAB = 256  # bytes
HELD_OUT_ONE_IN = 20
_SKIPPED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

Tokens = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Train and held-out bytes, each the files of that side in path order, one newline between files."""

    train: Tokens
    held_out: Tokens
    num_train_files: int
    num_held_out_files: int

    def __str__(self) -> str:
        return (
            f"Python standard library: train {self.train.size:,} bytes ({self.num_train_files} files), "
            f"held out {self.held_out.size:,} bytes ({self.num_held_out_files} files)"
        )


def source_files(root: Path) -> list[str]:
    """Paths of the library's modules relative to `root`, sorted, without tests and installed packages."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_DIRS]  # os.walk goes into those left
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def is_held_out(path: str) -> bool:
    """Whether the file at this relative path is held out: one in `HELD_OUT_ONE_IN`, by hash of the path."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the `*.py` files under `root` (default: this Python's standard library)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = source_files(root)
    sides = [name for name in names if not is_held_out(name)], [name for name in names if is_held_out(name)]
    train, held_out = (
        np.frombuffer(b"\n".join((root / name).read_bytes() for name in side), dtype=np.uint8) for side in sides
    )
    return Corpus(train, held_out, len(sides[0]), len(sides[1]))


@dataclass(frozen=True, slots=True)
class Batches:
    """The global batch of every step as a function of (seed, step), and this reader's rows of it.

    The rows of reader r of R are rows r*B/R to (r+1)*B/R of the global batch, so any number of readers sees the
    same data in the same order.
    """

    tokens: Tokens
    seq_len: int
    batch: int  # sequences in the global batch
    reader: int
    num_readers: int

    def __post_init__(self) -> None:
        if self.batch % self.num_readers:
            raise ValueError(
                f"a batch of {self.batch} sequences does not divide over {self.num_readers} readers: choose a "
                f"multiple of {self.num_readers}."
            )
        if self.tokens.size <= self.seq_len:
            raise ValueError(f"{self.tokens.size} tokens are too few for sequences of {self.seq_len}.")

    def train(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step, (B / R, T) int64 each: random windows of the tokens."""
        starts = np.random.default_rng([seed, step]).integers(0, self.tokens.size - self.seq_len, self.batch)
        return self._windows(starts)

    def held_out(self, num_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Always the same `num_batches` batches, their windows spread evenly over the tokens."""
        starts = np.linspace(0, self.tokens.size - self.seq_len - 1, num_batches * self.batch).astype(np.int64)
        for part in np.split(starts, num_batches):
            yield self._windows(part)

    def _windows(self, starts: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = self.batch // self.num_readers
        mine = starts[self.reader * rows : (self.reader + 1) * rows]
        windows = torch.from_numpy(self.tokens[mine[:, None] + np.arange(self.seq_len + 1)].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]
