"""What is raised when ranks cannot finish together what they began. What is wrong *before* that is a ValueError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

UNCHANGED = "This step has changed nothing on this rank, but the ranks are out of step"
HALF_DONE = "Weights and momentum may be half updated"
REMEDY = "Start the ranks again from the last checkpoint"


class ExchangeError(RuntimeError):
    """A peer died, hung past the process group's time-out or failed, or something here failed between two exchanges.

    The message names the bucket (numbered as in `print(optimizer.plan)`), the phase and the original error, which is
    also the `__cause__`. The ranks are out of step: their process group cannot be used any more, and the optimizer
    refuses further steps until state is loaded into it.
    """


@contextmanager
def naming(where: Callable[[], str], damage: str) -> Iterator[None]:
    """Raise any exception from inside as an ExchangeError that begins with `where()` and ends with the remedy."""
    try:
        yield
    except ExchangeError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".rstrip(". \n")
        raise ExchangeError(f"{where()}: {cause}. {damage}. {REMEDY}") from error


def told(error: Exception, where: str = "") -> str:
    """An exception of any class as the other ranks are told of it. A ValueError names its place itself."""
    if isinstance(error, ValueError):
        return str(error)
    kind = "lacks the option" if isinstance(error, KeyError) else f"{type(error).__name__}:"
    return f"{where}{kind} {error}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks (ascending) as messages and tables show them."""
    if len(ranks) > 4 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
