"""What is wrong on a rank, kept until the others can hear of it. Raised alone, it would leave them waiting."""

from __future__ import annotations

from types import TracebackType

from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.errors import Refused, fault_text


class Unlike(ValueError):
    """A flaw that several ranks find alike in what all of them have said: it is no single rank's."""


class Fault:
    """The first thing that went wrong on this rank since the ranks last settled.

    As a context manager it takes whatever is raised inside, of any class: what follows has to go on to the next talk.

    Attributes:
        text: For the others; None: nothing is wrong.
        cause: The exception behind it.
    """

    def __init__(self) -> None:
        self.text: str | None = None
        self.cause: BaseException | None = None

    def add(self, text: str | None, cause: BaseException | None = None, *, own: bool = True) -> None:
        """Note something, if nothing is noted yet. `own`: it is of this rank, which the others are told."""
        if text is not None and self.text is None:
            self.text, self.cause = f"rank {my_rank()}: {text}" if own and num_ranks() > 1 else text, cause

    def note(self, error: BaseException) -> None:
        """Note an exception of any class."""
        if isinstance(error, Refused):  # other ranks have raised it, too
            self.add(str(error), error.cause, own=False)
        else:
            self.add(fault_text(error), error, own=not isinstance(error, Unlike))

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.note(error)
        return True
