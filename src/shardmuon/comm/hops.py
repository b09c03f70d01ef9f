"""Recursive doubling: how the messages of all ranks become one on every rank. Pure: whoever drives it communicates.

After the hop of reach k a rank has merged the messages of its block of 2k ranks. Ranks beyond the largest power of two
hand theirs to a partner first and get the result at the end. Each message is counted once, as a sum must. That is
log2(n) hops of one small message, and two more where n is no power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar, cast


class Hop(NamedTuple):
    """What a member of the group does next. Members are places in the group, not ranks.

    Attributes:
        to: Whom it sends `message`; None: nobody.
        source: Whom it receives a message from; None: nobody.
        behind: Members that the received message waits for; any of them may be the one that is late.
    """

    to: int | None
    message: bytes
    source: int | None
    behind: tuple[int, ...] = ()


Merge = Callable[[bytes, bytes], bytes]
Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")


def driven(asking: Generator[Q | R, A, None], answer: Callable[[Q], A], kind: type[Q]) -> R:
    """Answer all questions of this kind that a generator asks; return the first other thing that it yields."""
    asked = next(asking)
    while isinstance(asked, kind):
        asked = asking.send(answer(asked))
    return cast("R", asked)


def doubling(me: int, num: int, message: bytes, merge: Merge) -> Generator[Hop | bytes, bytes, None]:
    """Yields hops and is sent what was received (b"" if nothing was to be); at last yields all messages merged."""
    power = 1 << (num.bit_length() - 1)
    if me >= power:
        yield Hop(me - power, message, None)
        yield (yield Hop(None, b"", me - power, tuple(m for m in range(num) if m != me)))
        return
    if me + power < num:
        message = merge(message, (yield Hop(None, b"", me + power, (me + power,))))
    reach = 1
    while reach < power:
        other = me ^ reach
        first = other // reach * reach
        block = [*range(first, first + reach), *range(first + power, min(first + power + reach, num))]
        message = merge(message, (yield Hop(other, message, other, tuple(block))))
        reach *= 2
    if me + power < num:
        yield Hop(me + power, message, None)
    yield message
