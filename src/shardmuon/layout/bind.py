"""The layout table of an optimizer's parameters. Each rank reports which part of each parameter it stores, and all
ranks compute the layouts from these reports.

[Note: describing together]
    Ranks share a parameter if they store parts or replicas of it. A component is a set of ranks that are connected,
    directly or through other ranks, by shared parameters. The ranks of a component build the table in three exchanges:

    1. Each rank determines which ranks share its parameters, and sends these sets of ranks to the whole component.
    2. Each rank sends its claims and a digest. A claim describes the part of a parameter that the rank stores. The
       digest is a hash of the data that must be equal on all ranks that share a parameter. The layout of a parameter
       depends only on the claims of the ranks that share it.
    3. Ranks exchange and compare fingerprints of replicated parameters. The values of other parameters are not read.

    If an error occurs on a rank, the rank's next message contains the error instead of the data. All ranks raise the
    error once they have received the message.
"""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from shardmuon._torch import local_if_any
from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import _K, Call, Fault, digest_of, discover, gather, refuse_unlike
from shardmuon.errors import Refused, about
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import Claim, Extent, Grid, Group, Ties
from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import MatrixView, matrix_view


class Listed(NamedTuple):
    """A parameter of an optimizer, with the options that determine its layout.

    Attributes:
        name: Name of the parameter in error messages.
        identity: Name that identifies the parameter on all ranks; "" if it has none.
        param, group: The parameter, and its parameter group.
        view: Keyword arguments of `matrix_view`, which define the matrices in the parameter. None if the caller needs
            no matrices, as in gradient clipping.
        options: Text that lists other options and properties of the parameter, such as its dtype. It must be equal on
            all ranks that share the parameter.
    """

    name: str
    identity: str
    param: Tensor
    group: Group
    view: Mapping[str, Any] | None
    options: str = ""


class _Described(NamedTuple):
    """A parameter with the engine (storage adapter) that handles it, and the engine's two reports about it: `ties`, the
    ranks that share the parameter, and `claim`, a description of the part that this rank stores."""

    listed: Listed
    engine: Engine
    ties: Ties
    claim: Claim


@dataclass(frozen=True, eq=False)
class Table:
    """The layouts of an optimizer's parameters, and the sets of ranks that share them. All ranks that share a parameter
    have the same layout for it.

    Attributes:
        component: The ranks that built the table together (see [Note: describing together]).
        params: This rank's parameters.
        claims: For each parameter, a description of the part that this rank stores.
        layouts: Layout of each parameter.
        sets: Dict from each set of ranks to the indices of the parameters that exactly these ranks share. Smaller sets
            come first.
        stamps: Dict from each rank of the component to a string that identifies the rank's hardware and software.
        token: 16 bytes that identify this table, equal on all ranks of the component. They depend on random bytes, so
            that identical optimizers have different tokens, and ranks that step them in different orders are detected.
    """

    component: Ranks
    params: tuple[Listed, ...]
    claims: tuple[Claim, ...]
    layouts: tuple[ParamLayout, ...]
    sets: dict[Ranks, tuple[int, ...]]
    stamps: dict[int, str]
    token: bytes


# ---------------------------------------------------------------------------- the grid of ranks that share a tensor


def union(groups: Collection[Ranks]) -> Ranks:
    """Return the union of several collections of ranks, in ascending order."""
    return tuple(sorted({rank for group in groups for rank in group}))


def _grids_of(known: Mapping[int, Collection[Ties]]) -> dict[Ties, Grid]:
    """Build the grids of ranks that share a tensor, and return a dict from each `Ties` in `known` to its grid. All
    ranks compute the same grids.

    Args:
        known: Dict from each rank to the `Ties` of its tensors, for all ranks that are connected by shared tensors.

    Raises:
        Refused: The `Ties` of some ranks do not form a grid.
    """
    found: dict[Ties, Grid] = {}
    for rank, of_rank in known.items():
        for ties in of_rank:
            if ties not in found:
                grid = found[ties] = _grid(rank, ties, known)
                columns = [tuple(sorted(column)) for column in zip(*grid, strict=True)]
                # `cells` maps each rank of the grid to the `Ties` that the rank must have reported. The grid is stored
                # under each of these `Ties`, because computing it again for each of N ranks would take O(N^3) time.
                cells = {one: Ties(row, column) for row in grid for one, column in zip(row, columns, strict=True)}
                for other, cell in cells.items():
                    if cell not in known.get(other, ()) or len(cells) < len(grid) * len(columns):
                        raise Refused(_no_grid(rank, ties, other, known))
                    found.setdefault(cell, grid)
    return found


def _grid(rank: int, ties: Ties, known: Mapping[int, Collection[Ties]]) -> Grid:
    # `columns[i]` is the set of ranks that store part i. `rows` maps each rank in `ties.mates` to its row: the
    # ranks that store its replica.
    columns = [{mate for t in known.get(part, ()) if t.parts == ties.parts for mate in t.mates} for part in ties.parts]
    rows: dict[int, Ranks] = {}
    for mate in ties.mates:
        alike = [t.parts for t in known.get(mate, ()) if t.mates == ties.mates and len(t.parts) == len(columns)]
        fitting = (parts for parts in alike if all(part in column for part, column in zip(parts, columns, strict=True)))
        rows[mate] = next(fitting, ())
        if not rows[mate]:
            raise Refused(_no_grid(rank, ties, mate, known))
    rows[rank] = ties.parts
    return tuple(sorted(rows.values()))


def _no_grid(rank: int, ties: Ties, other: int, known: Mapping[int, Collection[Ties]]) -> str:
    if len(ties.parts) == 1 and not any(ties.mates in t.sets for t in known.get(other, ())):
        return (
            f"ranks {ties.mates} share parameters but rank {other} lists none that it shares with them. Every rank "
            "must give the optimizer the same parameters, order and options"
        )
    has = " or ".join(f"tp_group {t.parts} and process_group {t.mates}" for t in known.get(other, ())) or "none"
    return (
        f"rank {rank} has tp_group {ties.parts} and process_group {ties.mates}, which form no grid with those of the "
        f"other ranks: rank {other} has {has}. process_group must join the ranks that hold the same shard, one of each "
        "tensor-parallel group, and all of these the same way"
    )


# ----------------------------------------------------------------------------------------------------------- the table


def describe(listed: Sequence[Listed]) -> list[_Described]:
    """Ask each parameter's engine (storage adapter) which ranks share the parameter and which part of it this rank
    stores.

    Raises:
        ValueError: A parameter cannot be used. The message contains the parameter's name and the reason.
    """
    found = []
    for one in listed:
        with about(one.name):
            engine = engine_for(one.param, one.group)
            found.append(_Described(one, engine, engine.ties(one.param, one.group), engine.claim(one.param, one.group)))
    return found


def _sharers_of(
    params: Callable[[], Sequence[tuple[str, Tensor, Group]]], fault: Fault
) -> dict[Ties, tuple[Ranks, ...]]:
    """Find the ranks that share each parameter listed by `params`. Return a dict from the parameters' `Ties` to their
    `Ties.sets`.

    An error for one parameter is recorded in `fault` and does not stop the search, because the ranks that share the
    other parameters wait for this rank's message. After any error, the search is repeated once, because an interrupt
    may have cut it short.
    """
    found: dict[Ties, tuple[Ranks, ...]] = {}
    for _ in range(2):
        with fault:
            for name, param, group in params():
                with fault, about(name):
                    ties = engine_for(param, group).ties(param, group)
                    found[ties] = ties.sets
        if fault.text is None:
            break
    return found


def bind(
    listed: Sequence[Listed],
    waiting: Callable[[], Sequence[tuple[str, Tensor, Group]]] | None = None,
    *,
    beyond: Sequence[Ranks] = (),
    before: Ranks | None = None,
    stamp: str = "",
    fingerprint: Callable[[Tensor], int] | None = None,
    fault: Fault | None = None,
) -> Table:
    """Build the layout table of an optimizer's parameters (see [Note: describing together]). Collective over the
    component: all ranks that are connected, directly or through other ranks, by shared parameters or by the sets in
    `beyond`.

    Args:
        listed: This rank's parameters.
        waiting: Function that returns the name, tensor and group of every parameter for which other ranks may be
            waiting for this rank, including all parameters in `listed`. Default: only these.
        beyond: Additional sets of ranks that must belong to the component. Each set contains this rank.
        before: Component of the previous table; None if there is none. If its ranks disagree about which ranks share
            parameters, they raise an error at once instead of after a timeout.
        stamp: Text that identifies this rank's hardware and software.
        fingerprint: Function that hashes a parameter's local storage to 64 bits, to compare replicas. None: replicas
            are not compared.
        fault: Record of this rank's first error before this call. None: no error has occurred.

    Raises:
        Refused: A rank has an error, or the reports of ranks contradict each other. Every rank of the component raises
            this error.
        ExchangeError: A rank has not answered in time, or its process has ended.
    """
    fault = fault or Fault()
    mine, table = list[_Described](), list[Table]()
    sharers = _sharers_of(waiting or (lambda: [(one.name, one.param, one.group) for one in listed]), fault)
    with fault:
        mine = describe(listed)
    sets = tuple(dict.fromkeys([*itertools.chain(*sharers.values()), *beyond]))
    known = discover(sets, (tuple(sharers), stamp, os.urandom(8)), fault, before)
    component, grids, numbers = tuple(known), dict[Ties, Grid](), dict[Ranks, list[int]]()
    lines, said = dict[Ranks, list[str]](), dict[Ranks, tuple[bytes, list[Extent]]]()
    with fault:
        grids = _grids_of({other: ties for other, (ties, _, _) in known.items()})
        ranks_of = {ties: union(grids[ties]) for ties in sharers}
        # Sets of ranks are sorted by size and then by their ranks, so that all ranks process the sets in the same
        # order.
        order = sorted({*ranks_of.values()}, key=lambda ranks: (len(ranks), ranks))
        numbers = {ranks: [n for n, one in enumerate(mine) if ranks_of[one.ties] == ranks] for ranks in order}
        lines = {ranks: [_line(mine[n], fingerprint is not None) for n in of_set] for ranks, of_set in numbers.items()}
        said = {ranks: (digest_of(lines[ranks]), [mine[n].claim.extent for n in numbers[ranks]]) for ranks in numbers}
    everyone = dict(zip(component, gather(said, component, fault), strict=True))
    digests = {of: {ranks: digest for ranks, (digest, _) in theirs.items()} for of, theirs in everyone.items()}
    refuse_unlike(digests, lines.__getitem__, lambda of, told: _unlike_lists(of, [ls or [] for ls in told]), fault)
    with fault:
        table.append(
            Table(
                component,
                tuple(one.listed for one in mine),
                tuple(one.claim for one in mine),
                tuple(_layouts(mine, numbers, everyone, grids)),
                {ranks: tuple(of_set) for ranks, of_set in numbers.items() if of_set},
                {other: theirs for other, (_, theirs, _) in known.items()},
                digest_of([nonce for _, _, nonce in known.values()]),
            )
        )
        for one, layout in zip(mine, table[0].layouts, strict=True):
            one.engine.remember(one.listed.param, layout.view.shape)
    _compare_replicas(mine, table, component, fingerprint, fault)
    return table[0]


def _line(one: _Described, compared: bool) -> str:
    """Describe, in one line of text, the properties of a parameter that must be equal on all ranks that share it.
    `compared` is True if these ranks also compare the values of their replicas."""
    shape, *form = one.claim.form
    view = (f"{key}={value!r}" for key, value in sorted((one.listed.view or {}).items()))
    # in the shape, a size of -1 marks a dim that ranks cut into parts of arbitrary sizes
    sizes = f"{shape}".replace("-1", "any")
    title = f'"{one.listed.identity or "a parameter"}: {sizes}, {one.claim.text}"'
    return "; ".join((title, f"{form}", f"replicas_compared={compared}", *one.listed.options.split(" "), *view))


def _unlike_lists(ranks: Ranks, everyone: Sequence[Sequence[str]]) -> str:
    """Make the error message for ranks that list different parameters or describe a parameter differently. The message
    compares the first rank with one rank whose list differs. It shows a parameter that is missing from the shorter list
    or, if the lists have equal lengths, the first difference."""
    first = everyone[0]
    rank, theirs = next((rank, lines) for rank, lines in zip(ranks, everyone, strict=True) if lines != first)
    if len(first) != len(theirs):
        longer, shorter = sorted((first, theirs), key=len, reverse=True)
        lacking = next((line for line in longer if line not in shorter), longer[-1]).split("; ")[0]
        title, texts = "", [f"{len(first)} parameters", f"{len(theirs)}; one of them lacks {lacking}"]
    else:
        one, other = next((a.split("; "), b.split("; ")) for a, b in zip(first, theirs, strict=True) if a != b)
        pairs = (one, other), (other, one)
        texts = [" ".join(part for part in mine if part not in others) for mine, others in pairs]
        title = f"{one[0]}: " if one[0] == other[0] else ""
    return (
        f"ranks {ranks} share parameters but describe them differently: {title}rank {ranks[0]} lists {texts[0]}, rank "
        f"{rank} lists {texts[1]}. Every rank must give the optimizer the same parameters, order and options"
    )


def _layouts(
    mine: Sequence[_Described],
    numbers: Mapping[Ranks, Sequence[int]],
    everyone: Mapping[int, Mapping[Ranks, tuple[bytes, list[Extent]]]],
    grids: Mapping[Ties, Grid],
) -> list[ParamLayout]:
    """Compute the layout of each parameter. Parameters with equal layouts share one object."""
    known: dict[object, ParamLayout] = {}
    found: dict[int, ParamLayout] = {}
    for ranks, of_set in numbers.items():
        for number, *told in zip(of_set, *(everyone[rank][ranks][1] for rank in ranks), strict=True):
            one = mine[number]
            key = one.engine, one.claim.form, one.ties, tuple(told), repr(one.listed.view)
            if key not in known:
                known[key] = _layout(one, dict(zip(ranks, told, strict=True)), grids[one.ties])
            found[number] = known[key]
    return [found[number] for number in range(len(mine))]


def _layout(one: _Described, told: Mapping[int, Extent], grid: Grid) -> ParamLayout:
    try:
        shape, held = one.engine.stored(one.claim.form, told, grid)
        options = one.listed.view
        view = MatrixView(shape, shape, -1, (), 1) if options is None else matrix_view(shape, **options)
        return ParamLayout(view, tuple(told), tuple(held[rank] for rank in told))
    except ValueError as wrong:
        stored = (
            f"ranks {(*told,)} store shapes {[extent.shape for extent in told.values()]} of it ({one.claim.text}): "
        )
        raise Refused(f"{one.listed.name}: {stored if len(told) > 1 else ''}{wrong}") from wrong


def _compare_replicas(
    mine: Sequence[_Described],
    table: Sequence[Table],  # a list with this rank's layout table; empty after an error
    component: Ranks,
    fingerprint: Callable[[Tensor], int] | None,
    fault: Fault,
) -> None:
    """Compare the replicas of each parameter by their fingerprints, and raise an error on all ranks if any rank finds a
    difference or already has an error. Collective over `component` (all connected ranks)."""
    # Fingerprint of each replicated parameter's local storage. The keys are tuples (set of ranks, position of the
    # parameter among the parameters that these ranks share).
    prints = dict[tuple[Ranks, int], int]()
    with fault:
        if table and fingerprint is not None:
            prints = {
                (ranks, at): fingerprint(local_if_any(mine[number].listed.param))
                for ranks, numbers in table[0].sets.items()
                for at, number in enumerate(numbers)
                if table[0].layouts[number].has_replicas
            }
    found = dict(zip(component, gather(prints, component, fault), strict=True))
    if any(found.values()):  # all ranks gathered the same `found`, so either all ranks call `gather` again or none does
        with fault:
            for ranks, at in prints:
                number = table[0].sets[ranks][at]
                _compare(mine[number], table[0].layouts[number], [found[rank][ranks, at] for rank in ranks])
        gather(None, component, fault)


def _compare(one: _Described, layout: ParamLayout, prints: Sequence[int]) -> None:
    """Raise Refused if a parameter's replicas have different values. `prints` contains the fingerprint of the
    parameter's local storage on each rank that shares the parameter."""
    seen: dict[object, tuple[int, int]] = {}
    for (rank, pieces), value in zip(layout.pieces.items(), prints, strict=True):
        first, wanted = seen.setdefault(pieces, (rank, value))
        if pieces and value != wanted:
            raise Refused(
                f"{one.listed.name}: ranks {first} and {rank} should hold replicas ({one.claim.text}) but their "
                "values differ. Broadcast the weights first; if each rank has its own (experts), put it in a group "
                "with process_group=(), tp_group=(); if they are shards over a tp_group, write "
                "param.tensor_model_parallel, param.partition_dim = True, <the dim that is cut>"
            )


# --------------------------------------------------------------------------------------- collective calls with a table


class TableCall(Call[_K]):
    """Base class of collective calls that need the layouts of parameters, such as an optimizer step. Each call uses a
    binding: either a plan that is derived from the layouts, or the layouts themselves. The binding is cached for later
    calls. If no valid binding is cached, the ranks build a new layout table, and the method `made` derives a new
    binding from it.

    Attributes:
        beyond: Ranks that must take part in the call even if they share no parameter with this rank. None: there are no
            such ranks.
        stamp, fingerprint: Arguments that are passed to `bind` to build a new table.
    """

    beyond: Ranks | None = None
    stamp = ""
    fingerprint: Callable[[Tensor], int] | None = None

    @abstractmethod
    def listed(self) -> list[Listed]:
        """Return the parameters of this rank whose layouts a new layout table must contain."""

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        """Return the name, tensor and group of every parameter for which other ranks may be waiting for this rank,
        including parameters for which `listed` raises an error."""
        return [(one.name, one.param, one.group) for one in self.listed()]

    @abstractmethod
    def made(self, table: Table) -> tuple[_K, Any]:
        """Derive the binding (the plan or the layouts, which later calls reuse) from a new layout table. Return the
        binding and a picklable message, which the caller sends to all ranks that built the table together."""

    @abstractmethod
    def heard(self, kept: _K, everyone: Sequence[Any]) -> None:
        """Complete the binding `kept` with the messages that `made` returned on all ranks, and store it for later
        calls."""

    def sets(self, fault: Fault) -> list[Ranks]:
        found = _sharers_of(self.waiting, fault).values()
        return [*itertools.chain(*found), *([] if self.beyond is None else [self.beyond])]

    def renew(self, before: Ranks | None, fault: Fault) -> _K:
        listed: list[Listed] = []
        kept: _K | None = None
        told: Any = None
        with fault:
            listed = self.listed()
        table = bind(
            listed,
            self.waiting,
            beyond=() if self.beyond is None else (self.beyond,),
            before=before,
            stamp=self.stamp,
            fingerprint=self.fingerprint,
            fault=fault,
        )
        with fault:
            kept, told = self.made(table)
        everyone = gather(told, table.component, fault)
        assert kept is not None, "all ranks have settled"
        with fault:
            self.heard(kept, everyone)
        return kept
