"""Errors that all ranks raise together, and the texts of their messages.

`Refused`, which users see as a ValueError, reports a problem found before anything has changed. `ExchangeError` reports
a step that the ranks cannot finish together.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

UNCHANGED = "This step has changed nothing on this rank, but the ranks are out of step"
HALF_DONE = "Weights and momentum may be half updated"
REMEDY = "Start the ranks again from the last checkpoint"
RELOAD = "Load the last checkpoint into model and optimizer, or accept them as they are: optimizer.broken = None"


class ExchangeError(RuntimeError):
    """Failure in the middle of a step: another rank died, failed or hung past the process group's timeout, or this rank
    failed between two exchanges.

    The message names the bucket (the matrices of one exchange, numbered as in `print(optimizer.plan)`), the phase and
    the original error, which is also the `__cause__`. The ranks are now out of sync: their process group can no longer
    be used, and the optimizer refuses further steps until state is loaded into it.
    """


_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # re-raised with their own class, which callers may catch


def stays_itself(error: BaseException) -> bool:
    """True for interrupts and out-of-memory errors, which the rank on which they occurred re-raises unchanged."""
    return isinstance(error, _OUT_OF_MEMORY) or not isinstance(error, Exception)


class Refused(ValueError):
    """Error that all ranks of a collective call raise together, before anything has changed on any of them.

    Attributes:
        cause: The original exception if it occurred on this rank, else None.
    """

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.cause = cause

    def public(self) -> BaseException:
        """Return the exception to raise to the user: a ValueError, or this rank's own interrupt or out-of-memory
        error."""
        if self.cause is not None and stays_itself(self.cause):
            return self.cause
        error = ValueError(str(self))
        error.__cause__ = self.cause if str(self.cause) != str(self) else None
        return error


@contextmanager
def made_public() -> Iterator[None]:
    """Convert a `Refused` raised inside the `with` block to the exception that users see (`Refused.public`)."""
    try:
        yield
    except Refused as refused:
        public = refused.public()
        raise public from public.__cause__


@contextmanager
def naming(where: Callable[[], str], damage: str) -> Iterator[None]:
    """Convert any exception raised inside the `with` block to an ExchangeError. Its message begins with `where()`, the
    place of the failure, and contains `damage`, a sentence on what the failure has left behind."""
    try:
        yield
    except ExchangeError:
        raise
    except Exception as error:
        raise named(error, where(), damage) from error


def named(error: Exception, where: str, damage: str) -> ExchangeError:
    """Build the ExchangeError for an exception. Its message has the place of the failure (`where`), the original error,
    a sentence on what the failure has left behind (`damage`), and the remedy."""
    cause = f"{type(error).__name__}: {error}".rstrip(". \n")
    return ExchangeError(f"{where}: {cause}. {damage}. {REMEDY}")


@contextmanager
def about(name: str) -> Iterator[None]:
    """Add a parameter's name to any exception raised inside the `with` block. Out-of-memory errors keep their class;
    all other exceptions become a ValueError."""
    try:
        yield
    except _OUT_OF_MEMORY as wrong:
        wrong.__dict__.setdefault("_shardmuon_at", f"{name}: ")  # `fault_text` says it to the other ranks
        raise
    except Exception as wrong:
        raise ValueError(f"{name}: {fault_text(wrong)}") from wrong


def fault_text(error: BaseException, where: str = "") -> str:
    """Format an exception as text to send to the other ranks. The text begins with `where`, the place of the error,
    unless the exception is a ValueError, whose own message already names the place."""
    where = error.__dict__.get("_shardmuon_at", where)
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    if isinstance(error, KeyError):
        return f"{where}lacks the option {text}"
    for frame in traceback.extract_tb(error.__traceback__)[-1:] if not text else ():
        text = f"raised at {os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{where}{type(error).__name__}: {text or 'no text'}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Format ranks (ascending) for messages and tables: "0,1,3", "0-7", "0-3,9,12-15"."""
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    numbered = itertools.groupby(enumerate(ranks), key=lambda one: one[1] - one[0])  # rank - index is constant in a run
    runs = [[rank for _, rank in run] for _, run in numbered]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


_OURS = ("shardmuon", "shardmuon_qkclip", "torch")  # `level_of_the_caller` skips stack frames of these packages


def level_of_the_caller() -> int:
    """Return the `stacklevel` with which a warning points at the user's call of `optimizer.step()`, not at wrappers."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level
