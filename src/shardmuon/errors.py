"""Errors that all ranks of a collective operation raise together, and functions that format their messages.

`Refused` reports a problem that was found before anything changed. Public functions convert it to a ValueError. On a
rank that was interrupted or ran out of memory, they raise the original exception instead. `ExchangeError` reports a
step that failed in the middle.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class ExchangeError(RuntimeError):
    """Error for a failure in the middle of a step: another rank died, failed, or did not respond within the process
    group's timeout, or this rank failed between two exchanges.

    The message names the operation that failed, the original error (also available as `__cause__`), and the bucket. A
    bucket is a set of matrices that are exchanged together, numbered as in `print(optimizer.plan)`. After this error,
    the ranks are out of sync, and their process group can no longer be used. Further steps raise an error until a state
    dict is loaded into the optimizer.

    Attributes:
        UNCHANGED: Sentence for errors before the step has changed anything on this rank.
        HALF_DONE: Sentence for errors after which only some weights and momentum may have been updated.
        REMEDY: Sentence that says how to recover if several ranks step together.
        RELOAD: Sentence that says how to recover if this rank steps alone.
    """

    UNCHANGED = "This step has changed nothing on this rank, but the ranks are out of step"
    HALF_DONE = "Weights and momentum may be half updated"
    REMEDY = "Start the ranks again from the last checkpoint"
    RELOAD = "Load the last checkpoint into model and optimizer, or accept them as they are: optimizer.broken = None"

    @classmethod
    def of(cls, error: Exception, where: str, damage: str = HALF_DONE) -> ExchangeError:
        """Build an ExchangeError from an exception. The message has four parts: the failed operation (`where`), the
        original error, a sentence about the data that may now be inconsistent (`damage`), and the remedy."""
        cause = f"{type(error).__name__}: {error}".rstrip(". \n")
        return cls(f"{where}: {cause}. {damage}. {cls.REMEDY}")

    @classmethod
    @contextmanager
    def naming(cls, where: Callable[[], str], damage: str = HALF_DONE) -> Iterator[None]:
        """Convert any exception raised inside the `with` block to an ExchangeError. The error's message begins with
        `where()`, which names the failed operation, and contains `damage`, a sentence that states which data the
        failure may have left inconsistent."""
        try:
            yield
        except ExchangeError:
            raise
        except Exception as error:
            raise cls.of(error, where(), damage) from error


# out-of-memory errors keep their class when they are re-raised, so that callers can catch them
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def stays_itself(error: BaseException) -> bool:
    """Return True for interrupts and out-of-memory errors, which are re-raised unchanged on the rank where they
    occur."""
    return isinstance(error, _OUT_OF_MEMORY) or not isinstance(error, Exception)


class Refused(ValueError):
    """Error that all ranks of a collective call raise together, before anything has changed on any of them.

    Attributes:
        cause: The original exception; None if it occurred on another rank.
    """

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.cause = cause

    def public(self) -> BaseException:
        """Return the exception that users see: this rank's own interrupt or out-of-memory error, or a ValueError in all
        other cases."""
        if self.cause is not None and stays_itself(self.cause):
            return self.cause
        error = ValueError(str(self))
        error.__cause__ = self.cause if str(self.cause) != str(self) else None
        return error

    @staticmethod
    @contextmanager
    def made_public() -> Iterator[None]:
        """Convert a `Refused` error raised inside the `with` block to the exception that users see."""
        try:
            yield
        except Refused as refused:
            public = refused.public()
            raise public from public.__cause__


@contextmanager
def about(name: str) -> Iterator[None]:
    """Add a parameter's name to any exception raised inside the `with` block. Out-of-memory errors keep their class;
    all other exceptions become a ValueError."""
    try:
        yield
    except _OUT_OF_MEMORY as wrong:
        # `fault_text` puts `_shardmuon_at`, the parameter's name, in front of the error message.
        wrong.__dict__.setdefault("_shardmuon_at", f"{name}: ")
        raise
    except Exception as wrong:
        raise ValueError(f"{name}: {fault_text(wrong)}") from wrong


def fault_text(error: BaseException) -> str:
    """Format an exception as a message to send to the other ranks. The message of an out-of-memory error begins with
    the parameter's name, if `about` has recorded the name."""
    where = error.__dict__.get("_shardmuon_at", "")
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    if isinstance(error, KeyError):
        return f"{where}lacks the option {text}"
    for frame in traceback.extract_tb(error.__traceback__)[-1:] if not text else ():
        text = f"raised at {os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{where}{type(error).__name__}: {text or 'no text'}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Format ranks, given in ascending order, for messages and tables: "0,1,3", "0-7", "0-3,9,12-15"."""
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    # In a run of consecutive ranks, the difference between a rank and its position in the list is constant.
    numbered = itertools.groupby(enumerate(ranks), key=lambda one: one[1] - one[0])
    runs = [[rank for _, rank in run] for _, run in numbered]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


_OURS = ("shardmuon", "shardmuon_qkclip", "torch")  # `level_of_the_caller` skips the stack frames of these packages


def level_of_the_caller() -> int:
    """Return the `stacklevel` that makes a warning point at the line of user code that called `optimizer.step()`,
    instead of at a wrapper of `step`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level
