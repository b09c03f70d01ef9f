"""The layout of parameters as it is now, described anew on every rank: an audit takes no plan's word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from shardmuon.comm.groups import my_rank
from shardmuon.layout.engines import engine_for
from shardmuon.layout.engines.base import Claim, Group
from shardmuon.layout.grid import Ties, grids_of, union
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import view_of

T = TypeVar("T")


class Description(NamedTuple):
    """One rank's description of a parameter.

    Attributes:
        ties: Who shares it.
        claim: How it lies.
    """

    ties: Ties
    claim: Claim


class Describer:
    """Describes the parameters of one audit.

    Layers are alike: of equal ties and forms there is one object, which is pickled once and compared quickly.
    """

    def __init__(self) -> None:
        self._alike: dict[Any, Any] = {}
        self._seen: dict[int, tuple[Any, Any]] = {}  # id -> object, which keeps its id, and the one that stands for it
        self._layouts: dict[object, ParamLayout] = {}

    def _one(self, value: T) -> T:
        """The object that stands for all that are equal to this one."""
        found = self._seen.get(id(value))
        if found is None:
            found = self._seen[id(value)] = value, self._alike.setdefault(value, value)
        alike: T = found[1]
        return alike

    def _unified(self, ties: Ties, claim: Claim) -> Description:
        return Description(self._one(ties), claim._replace(form=self._one(claim.form), text=self._one(claim.text)))

    def describe(self, param: Tensor, group: Group) -> Description:
        """Describe a parameter on this rank.

        Raises:
            ValueError: The tensor's layout cannot be told; the message lacks the parameter's name.
        """
        engine = engine_for(param, group)
        return self._unified(engine.ties(param, group), engine.claim(param, group))

    def layout(
        self, param: Tensor, group: Group, everyone: Mapping[int, Description], view: Mapping[str, Any] | None
    ) -> ParamLayout:
        """Lay a parameter out by the descriptions of all ranks of a set.

        Args:
            param, group: This rank's.
            everyone: Rank -> what it says, of all ranks of the set.
            view: How its matrices are read: arguments of `matrix_view`. None: it holds none.

        Raises:
            ValueError: That does not fit together, or other ranks share the parameter; without its name.
        """
        ranks, said = tuple(everyone), [self._unified(*theirs) for theirs in everyone.values()]
        told = tuple((id(one.ties), id(one.claim.form), id(one.claim.text), *one.claim[2:4]) for one in said)
        key = engine_for(param, group), ranks, told, repr(view)
        if key not in self._layouts:
            self._layouts[key] = _layout(param, group, dict(zip(ranks, said, strict=True)), view)
        return self._layouts[key]


def _layout(
    param: Tensor, group: Group, everyone: Mapping[int, Description], view: Mapping[str, Any] | None
) -> ParamLayout:
    ranks: Ranks = tuple(everyone)
    first = everyone[ranks[0]].claim
    for rank, (_, claim) in everyone.items():
        if claim[:2] != first[:2]:
            raise ValueError(f"it now is {first.text} on rank {ranks[0]}, {claim.text} on rank {rank}")
    grid = grids_of({rank: (said.ties,) for rank, said in everyone.items()})[everyone[my_rank()].ties]
    if union(grid) != ranks:
        raise ValueError(f"it now is {first.text} over ranks {union(grid)}, planned was one over ranks {ranks}")

    shape, held = engine_for(param, group).stored({rank: said.claim for rank, said in everyone.items()}, grid)
    return ParamLayout(view_of(shape, view), ranks, tuple(held[rank] for rank in ranks))
