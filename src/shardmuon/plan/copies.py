"""Copies of strided blocks between two buffers, as few as can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardmuon.layout.views import Ints


class BufferPlace(NamedTuple):
    """Place of a block in a buffer: its first element, and the stride of each dim."""

    start: int
    strides: Ints


class Copy(NamedTuple):
    """A block in two buffers, to be copied one way or the other. No stride is 0: places differ."""

    sizes: Ints
    here: BufferPlace
    there: BufferPlace


def joined(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """The same copies with fewer blocks and dims.

    Blocks of one form at equal distances on both sides become one with a dim more. Done twice: the tiles of one sender
    join, and then the senders, each of which sends matrices of several shapes.
    """
    return tuple(_rows(_rows([_merged(copy) for copy in copies])))


def _merged(copy: Copy) -> Copy:
    """The same copy without dims of size 1, and with neighbouring dims taken as one if they follow on without gaps on
    both sides."""
    dims: list[tuple[int, int, int]] = []
    for size, here, there in zip(copy.sizes, copy.here.strides, copy.there.strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * here, size * there):
            dims[-1] = (dims[-1][0] * size, here, there)
        else:
            dims.append((size, here, there))
    sizes, here_strides, there_strides = zip(*(dims or [(1, 1, 1)]), strict=True)
    return Copy(sizes, BufferPlace(copy.here.start, here_strides), BufferPlace(copy.there.start, there_strides))


def _rows(copies: Sequence[Copy]) -> list[Copy]:
    forms: dict[object, list[Copy]] = {}
    for copy in copies:
        forms.setdefault((copy.sizes, copy.here.strides, copy.there.strides), []).append(copy)
    found: list[Copy] = []
    for alike in forms.values():
        at = 0
        while at < len(alike):
            count, steps = _run(alike, at)
            first = alike[at]
            if count > 1:
                here, there = (
                    BufferPlace(place.start, (step, *place.strides))
                    for place, step in zip((first.here, first.there), steps, strict=True)
                )
                first = _merged(Copy((count, *first.sizes), here, there))
            found.append(first)
            at += count
    return found


def _run(alike: Sequence[Copy], at: int) -> tuple[int, tuple[int, int]]:
    """Count the copies of one form, from `at` on, that lie at equal distances. Returns the count, and the distances on
    both sides."""
    first, steps, count = alike[at], (0, 0), 1
    for other in alike[at + 1 :]:
        apart = other.here.start - first.here.start, other.there.start - first.there.start
        if count == 1:
            steps = apart
        if apart != (count * steps[0], count * steps[1]) or min(steps) <= 0:
            break
        count += 1
    return count, steps
