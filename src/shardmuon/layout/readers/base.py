"""What one rank says of a tensor by looking at it (its claim), and the layout that the claims of all ranks make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardmuon.layout.grid import Grid, Ranks, Ties, union
from shardmuon.layout.pieces import Held
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints, MatrixView

Group = Mapping[str, Any]  # one of an optimizer's parameter groups
ViewOf = Callable[[Ints], MatrixView]  # of a tensor with this global shape


class Claim(NamedTuple):
    """What one rank says of a tensor. Plain data.

    Attributes:
        form: How the tensor lies: the same on all ranks that share it.
        text: The same in words, for messages.
        stored: Shape of this rank's storage.
        part: More that only this rank knows.
        empty_lacks_gradient: A rank that stores nothing of it may have no gradient where others have theirs.
        uncounted: Why a norm over ranks would count it several times, though its layout is known; None: it would not.
    """

    form: tuple[object, ...]
    text: str
    stored: Ints
    part: Ints = ()
    empty_lacks_gradient: bool = False
    uncounted: str | None = None


class Reader(Protocol):
    """One way in which a framework keeps parameters. Stateless: it looks, and decides nothing.

    Its errors (ValueError) lack the parameter's name, which whoever asks puts before them.
    """

    def ties(self, param: Tensor, group: Group) -> Ties:
        """Say who shares the tensor. Reads no more than that takes, so that others hear of what is wrong with it."""
        ...

    def claim(self, param: Tensor, group: Group) -> Claim:
        """Say how the tensor lies, as far as this rank knows."""
        ...

    def layout(self, claims: Mapping[int, Claim], grid: Grid, view_of: ViewOf) -> ParamLayout:
        """Say who stores what. Pure: equal claims make equal layouts.

        Args:
            claims: Rank -> its claim, of all ranks of the grid. Their forms are equal.
            grid: Of the tensor.
            view_of: Global shape -> its matrices.

        Raises:
            ValueError: The claims do not fit together.
        """
        ...


def layout_on(view: MatrixView, ranks: Ranks, held: Mapping[int, tuple[Held, ...]]) -> ParamLayout:
    """The layout of these ranks; those that `held` lacks store nothing."""
    return ParamLayout(view, ranks, tuple(held.get(rank, ()) for rank in ranks))


__all__ = ["Claim", "Grid", "Group", "Reader", "Ties", "ViewOf", "layout_on", "union"]
