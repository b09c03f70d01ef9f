"""How wire buffers and batches of matrices are cut into fragments, in few operations however many fragments there are.

[Note: rows of blocks]
    A wire buffer and a batch of matrices are cut in rectangles, one for each fragment. Most stand in rows of equal
    ones: what one rank sends to another follows each other, the matrices of a batch are all cut alike. A row is one
    view with a dim more. On a CPU it is filled or moved by one operation; elsewhere the fragments of all rows go in one
    list, for a launch takes lists, but no views with gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_

WIRE = -1  # in place of the number of a batch
_SMALL = 1 << 12  # elements: side by side in one operation they are copied faster than each by its own
Row = tuple[tuple["Block", ...], int]  # the first of equal ones in each column, and how many there are


class Block(NamedTuple):
    """A fragment's place: `at` is its first element on the wire, or the number of its matrix in its batch."""

    batch: int
    row: int
    col: int
    num_rows: int
    num_cols: int
    at: int

    def after(self, count: int) -> Block:
        """The one that follows `count` of these."""
        return self._replace(at=self.at + count * (self.num_rows * self.num_cols if self.batch == WIRE else 1))


class Blocks:
    """The places of some fragments, see [Note: rows of blocks]."""

    def __init__(self, places: Sequence[Block]) -> None:
        self._rows, self._sorted = _rows_of([(place,) for place in places])
        found = {i: number for number, i in enumerate(self._sorted)}
        self._order = [found[i] for i in range(len(places))]

    def of(
        self,
        batches: Sequence[Tensor],  # (B, rows, cols) each
        wire: Tensor,  # 1-D
        dtype: torch.dtype | None = None,  # default: theirs
    ) -> list[Tensor]:  # (num_rows, num_cols) each
        """A view of each fragment's place; with another dtype a copy of what is there."""
        found: list[Tensor] = []
        for (first,), count in self._rows:
            row = _cut(first, count, batches, wire)
            found += (row if dtype is None else row.to(dtype)).unbind(0)
        return [found[i] for i in self._order]

    def fill(
        self,
        values: Sequence[Tensor],  # each fragment's elements in their order
        batches: Sequence[Tensor],
        wire: Tensor,
        reshaped: bool,  # whether any value may have another shape than its place
    ) -> None:
        """Copy each fragment to its place."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        start = 0
        for (first,), count in self._rows:
            row = _cut(first, count, batches, wire)
            given = [values[i] for i in self._sorted[start : start + count]]
            start += count
            if reshaped or count == 1 or row.device.type != "cpu" or first.num_rows * first.num_cols > _SMALL:
                targets.extend(row.unbind(0))
                sources.extend(given)
            elif given[0].dtype == row.dtype and row.is_contiguous():
                torch.stack(given, out=row)
            else:
                row.copy_(torch.stack(given))
        if reshaped:
            pairs = [_in_one_shape(*pair) for pair in zip(targets, sources, strict=True)]
            targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
        if targets:
            foreach_copy_(targets, sources)


class Moves:
    """Copies of fragments between a wire buffer and batches, see [Note: rows of blocks]."""

    def __init__(self, pairs: Sequence[tuple[Block, Block]]) -> None:
        """`pairs`: from where, and to where."""
        self._rows, _ = _rows_of(pairs)

    def run(
        self,
        batches: Sequence[Tensor],  # (B, rows, cols) each
        wire: Tensor,  # 1-D
    ) -> None:
        """Copy all of them."""
        sources = [_cut(source, count, batches, wire) for (source, _), count in self._rows]
        targets = [_cut(target, count, batches, wire) for (_, target), count in self._rows]
        if wire.device.type != "cpu":
            sources, targets = ([block for row in rows for block in row.unbind(0)] for rows in (sources, targets))
        if targets:
            foreach_copy_(targets, sources)


def _rows_of(entries: Sequence[tuple[Block, ...]]) -> tuple[list[Row], list[int]]:
    """Rows of blocks that follow each other in every column, and the numbers of the entries in the rows' order."""
    order = sorted(range(len(entries)), key=entries.__getitem__)
    rows: list[Row] = []
    for i in order:
        if rows:
            first, count = rows[-1]
            if all(block == before.after(count) for block, before in zip(entries[i], first, strict=True)):
                rows[-1] = first, count + 1
                continue
        rows.append((entries[i], 1))
    return rows, order


def _cut(
    first: Block, count: int, batches: Sequence[Tensor], wire: Tensor
) -> Tensor:  # (count, num_rows, num_cols), a view
    batch, row, col, num_rows, num_cols, at = first
    if batch == WIRE:
        return wire.narrow(0, at, count * num_rows * num_cols).view(count, num_rows, num_cols)
    blocks = batches[batch]
    for dim, start, size in ((0, at, count), (1, row, num_rows), (2, col, num_cols)):
        if size != blocks.shape[dim]:
            blocks = blocks.narrow(dim, start, size)
    return blocks


def _in_one_shape(target: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Both in a shape in which neither needs a copy, if there is one."""
    return (target.view(value.shape), value) if target.is_contiguous() else (target, value.reshape(target.shape))
