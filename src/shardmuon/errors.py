"""Errors that all ranks raise, and their texts: a fault that was found before anything has changed is a `Refused` (for
users a ValueError), a step that ranks cannot finish together an `ExchangeError`."""

from __future__ import annotations

import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

UNCHANGED = "This step has changed nothing on this rank, but the ranks are out of step"
HALF_DONE = "Weights and momentum may be half updated"
HALF_LOADED = "Load a checkpoint into model and optimizer on all ranks"
REMEDY = "Start the ranks again from the last checkpoint"
RELOAD = "Load the last checkpoint into model and optimizer, or accept them as they are: optimizer.broken = None"


class ExchangeError(RuntimeError):
    """A peer died, hung past the process group's time-out or failed, or something here failed between two exchanges.

    The message names the bucket (numbered as in `print(optimizer.plan)`), the phase and the original error, which is
    also the `__cause__`. The ranks are out of step: their process group cannot be used any more, and the optimizer
    refuses further steps until state is loaded into it.
    """


OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # whoever handles them goes by their class


def stays_itself(error: BaseException) -> bool:
    """True if the rank where an error began raises it as it is: interrupts, out of memory."""
    return isinstance(error, OUT_OF_MEMORY) or not isinstance(error, Exception)


class Refused(ValueError):
    """Error that every rank concerned has heard of and raises; nothing has changed on any of them.

    Attributes:
        cause: This rank's own exception, if it began here.
    """

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.cause = cause

    def public(self) -> BaseException:
        """Return the caller's exception: a ValueError, or the rank's own interrupt or out-of-memory error."""
        if self.cause is not None and stays_itself(self.cause):
            return self.cause
        error = ValueError(str(self))
        error.__cause__ = self.cause if str(self.cause) != str(self) else None
        return error


@contextmanager
def made_public() -> Iterator[None]:
    """Raise a `Refused` from inside as what the caller sees."""
    try:
        yield
    except Refused as refused:
        public = refused.public()
        raise public from public.__cause__


@contextmanager
def naming(where: Callable[[], str], damage: str) -> Iterator[None]:
    """Raise any exception from inside as `named` has it, with the place `where()`."""
    try:
        yield
    except ExchangeError:
        raise
    except Exception as error:
        raise named(error, where(), damage) from error


def named(error: Exception, where: str, damage: str) -> ExchangeError:
    """An exception as an ExchangeError that begins with its place and ends with the remedy."""
    cause = f"{type(error).__name__}: {error}".rstrip(". \n")
    return ExchangeError(f"{where}: {cause}. {damage}. {REMEDY}")


@contextmanager
def about(name: str) -> Iterator[None]:
    """Raise what is raised inside with the name of a parameter: as a ValueError, or of its class if memory ran out."""
    try:
        yield
    except OUT_OF_MEMORY as wrong:
        raised_at(wrong, name)
        raise
    except Exception as wrong:
        raise ValueError(f"{name}: {fault_text(wrong)}") from wrong


def raised_at(error: BaseException, name: str) -> None:
    """Note of which parameter an exception is that keeps its class, for `fault_text`."""
    error.__dict__.setdefault("_shardmuon_at", f"{name}: ")


def fault_text(error: BaseException, where: str = "") -> str:
    """An exception of any class as the other ranks are told of it. A ValueError names its place itself."""
    where = error.__dict__.get("_shardmuon_at", where)
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    if isinstance(error, KeyError):
        return f"{where}lacks the option {text}"
    return f"{where}{type(error).__name__}: {text or _place(error)}"


def _place(error: BaseException) -> str:
    """File and line at which an exception without text was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"raised at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "no text"


_SIGNED = re.compile(r"rank (\d+): (.*)", re.DOTALL)


def told_by(everyone: Iterable[str | None]) -> list[str]:
    """Merge the faults of all ranks: each text once, with its ranks, as in "ranks 0-7: out of memory"."""
    found: dict[str, set[int]] = {}
    for said in everyone:
        if said is not None:
            signed = _SIGNED.match(said)
            found.setdefault(signed[2] if signed else said, set()).update({int(signed[1])} if signed else ())
    return [
        f"rank{'s' * (len(of) > 1)} {ranks_text(tuple(sorted(of)))}: {text}" if of else text
        for text, of in found.items()
    ]


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks (ascending) as messages and tables show them: "0,1,3", "0-7", "0-3,9,12-15"."""
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    numbered = itertools.groupby(enumerate(ranks), key=lambda one: one[1] - one[0])  # equal along a run
    runs = [[rank for _, rank in run] for _, run in numbered]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


_OURS = ("shardmuon", "shardmuon_qkclip", "torch")  # packages whose frames are no caller's


def level_of_the_caller() -> int:
    """The stacklevel that makes a warning point at the code that called `optimizer.step()`; wrappers are torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level
