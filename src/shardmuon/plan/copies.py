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


def _rows(copies: Iterable[Copy]) -> list[Copy]:
    """Runs of copies of one form that lie at equal distances, each as one."""
    forms: dict[object, list[list[Copy]]] = {}
    for copy in copies:
        runs = forms.setdefault((copy.sizes, copy.here.strides, copy.there.strides), [[]])
        if not _goes_on(runs[-1], copy):
            runs.append([])
        runs[-1].append(copy)
    return [_as_one(run) for runs in forms.values() for run in runs]


def _apart(first: Copy, other: Copy) -> tuple[int, int]:
    return other.here.start - first.here.start, other.there.start - first.there.start


def _goes_on(run: Sequence[Copy], copy: Copy) -> bool:
    """True if a copy lies as far behind the last one of a run as that behind the one before."""
    if not run:
        return True
    steps = _apart(run[-1], copy)
    return min(steps) > 0 and (len(run) == 1 or steps == _apart(run[-2], run[-1]))


def _as_one(run: Sequence[Copy]) -> Copy:
    sizes, *places = run[0]
    if len(run) == 1:
        return run[0]
    here, there = (
        BufferPlace(place.start, (step, *place.strides)) for place, step in zip(places, _apart(*run[:2]), strict=True)
    )
    return _merged(Copy((len(run), *sizes), here, there))
