"""The gradients that a call is about: whose they are, who counts them, and what this rank keeps of them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon.comm.component import Ranks
from shardmuon.comm.faults import Fault
from shardmuon.comm.groups import my_rank
from shardmuon.errors import fault_text
from shardmuon.host import Hosts, clipped_by_host
from shardmuon.layout.bind import Listed, Table
from shardmuon.layout.calls import Kept
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import MISPLACED, NONE, READY, STATES, Claim, named_params
from shardmuon.layout.table import ParamLayout
from shardmuon.step.checks import check_can_align, gradient_storage

Source = Optimizer | nn.Module | Tensor | Iterable[Any]
Options = Mapping[str, Any]

_NO_OPTIONS: Options = {"use_muon": False, "clip_grad": True}  # no matrices are read


@dataclass
class Given:
    """The parameters that the user passed, in the user's order.

    Attributes:
        beyond: The ranks of `process_group`, ascending; None if it has no other than this one.
        names, params: Of each.
        options: Of the group of each, as far as they matter here.
    """

    beyond: Ranks | None
    names: list[str] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    options: list[Options] = field(default_factory=list)

    def read(self, source: Source, fault: Fault) -> None:
        """List the parameters of a source."""
        names, params, options = list[str](), list[Any](), list[Options]()
        for of_group, group in _groups_of(source):
            names += [name for name, _ in of_group]
            params += [param for _, param in of_group]
            options += [group] * len(of_group)
        for number in [n for n, param in enumerate(params) if not isinstance(param, Tensor)][::-1]:
            fault.add(f"{names[number]}: a parameter is a tensor, found {type(params[number]).__name__}")
            del names[number], params[number], options[number]
        self.names, self.params, self.options = names, params, options

    def listed(self) -> list[Listed]:
        """The same for the layout table."""
        return [
            Listed(name, _said(name), param, options, None, f"clip_grad={options['clip_grad']}")
            for name, param, options in zip(self.names, self.params, self.options, strict=True)
        ]

    def clipped(self) -> list[Tensor]:
        """Those that take part in clipping."""
        return [p for p, options in zip(self.params, self.options, strict=True) if options["clip_grad"]]


def _groups_of(source: Source) -> Iterable[tuple[list[tuple[str, Any]], Options]]:
    """Names and parameters of each group, with its options."""
    if isinstance(source, Optimizer):
        return [(named_params(group, index), _options_of(group)) for index, group in enumerate(source.param_groups)]
    if isinstance(source, nn.Module):
        source = source.named_parameters()
    named = []
    for index, entry in enumerate([source] if isinstance(source, Tensor) else source):
        is_named = isinstance(entry, tuple) and len(entry) == 2
        name, param = entry if is_named else (f"parameter {index}", entry)
        named.append((str(name), param))
    return [(named, _NO_OPTIONS)]


def _options_of(group: Mapping[str, Any]) -> Options:
    """Those that matter here."""
    kept = {key: group.get(key) for key in ("rank_local", "process_group", "tp_group")}
    cut = {key: group.get(key) for key in ("partition_dim", "partition_stride")}
    return {**_NO_OPTIONS, **kept, **cut, "clip_grad": bool(group.get("clip_grad", True))}


def _said(name: str) -> str:
    """The name that ranks compare: one that the user gave."""
    return "" if name.startswith("parameter ") else name


def clipped_by_framework(source: Source, params: Iterable[Tensor]) -> str | None:
    """Why these gradients cannot be clipped here, on every rank alike: they are a framework's, which clips them."""
    hosts = getattr(source, "hosts", None)
    active = hosts.active if isinstance(hosts, Hosts) else None
    return active.clipping if active is not None else clipped_by_host(params)


class Share(NamedTuple):
    """One parameter's gradient on this rank, as far as it is the same in every call.

    Attributes:
        name: For messages.
        engine: Reaches its storage.
        signature: What its layout depended on.
        ranks: All that share the parameter, ascending.
        counted: Of the ranks that keep this data, this one counts it.
        rank_local: The user said that this plain tensor is this rank's own.
        loose: Nobody has said whether other ranks hold the same tensor, as under DDP, or tensors of their own.
        clipped: The parameter's group takes part in clipping.
        compared: Either all of `ranks` have a gradient, or none.
        line: What every rank that shares it says of it, but for its gradient.
        fault: Why it would be counted several times.
    """

    name: str
    engine: Engine
    signature: object
    ranks: Ranks
    counted: bool
    rank_local: bool
    loose: bool
    clipped: bool
    compared: bool
    line: str
    fault: str | None

    @classmethod
    def of(cls, listed: Listed, claim: Claim, layout: ParamLayout, counted: bool) -> Share:
        """That of a parameter of the table."""
        name, identity, param, options, *_ = listed
        rank_local, clipped = bool(options.get("rank_local")), options["clip_grad"]
        engine = engine_for(param, options)
        return cls(
            name,
            engine,
            engine.signature(param),
            layout.ranks,
            counted,
            rank_local,
            len(layout.ranks) == 1 and not rank_local,
            clipped,
            not claim.empty_lacks_gradient,
            f"{identity} {layout.view.shape} {clipped}",
            claim.uncounted if clipped else None,
        )

    def read(self, param: Tensor) -> tuple[int, Tensor | None]:
        """NONE, READY or MISPLACED, and the gradient's local storage if it is ready.

        Raises:
            ValueError: The gradient is unusable; the message lacks the name.
        """
        if self.fault is not None:
            raise ValueError(self.fault)
        grad = param.grad
        if grad is None:
            return NONE, None
        weight = self.engine.storage(param)
        local = gradient_storage(param, grad, self.engine, weight)
        if local is None:
            check_can_align(param, weight)
            return MISPLACED, None
        return READY, local


class Reach(NamedTuple):
    """Whom a rank sums with.

    Attributes:
        largest: The ranks that share its parameters.
        beyond: Those of its `process_group`, if it has one.
        contained: They contain the others; if not, each stands for those that it shares parameters with.
    """

    largest: Ranks
    beyond: Ranks | None
    contained: bool

    @property
    def text(self) -> str:
        """The part of it that ranks which share a parameter have alike."""
        return f"process_group={self.beyond}" if self.contained else f"one rank each={self.beyond is not None}"


class Bound(Kept):
    """The layout table of some parameters, as far as their gradients need it, made by all ranks of a component.

    Attributes:
        beyond: See `Given`.
        shares: Of each parameter.
        reaches: Of each rank of the component.
        alike: The same the other way round.
    """

    def __init__(self, table: Table, given: Given) -> None:
        super().__init__(table)
        self._params = [weakref.ref(one.param) for one in table.params]  # no tensor lives on because it was clipped
        self._names, self._options, self.beyond = given.names, given.options, given.beyond
        self._in_order = [number for numbers in table.sets.values() for number in numbers]
        counts = {layout: _counts(layout) for layout in dict.fromkeys(table.layouts)}
        rows = zip(table.params, table.claims, table.layouts, strict=True)
        self.shares = [Share.of(one, claim, layout, counts[layout]) for one, claim, layout in rows]
        self.reaches: dict[int, Reach] = {}
        self.alike: dict[Reach, list[int]] = {}

    def hear(self, reaches: Sequence[Reach]) -> None:
        """Take note of whom each rank of the component sums with."""
        self.reaches = dict(zip(self.component, reaches, strict=True))
        for rank, reach in self.reaches.items():
            self.alike.setdefault(reach, []).append(rank)

    def is_current(self, given: Given) -> bool:
        """True if it was made for just these parameters, layouts and options."""
        if (
            self._names != given.names
            or self._options != given.options
            or not all(map(operator.is_, [ref() for ref in self._params], given.params))
        ):
            return False
        for share, param, options in zip(self.shares, given.params, given.options, strict=True):
            engine = engine_for(param, options)
            if engine != share.engine or engine.signature(param) != share.signature:
                return False
        return True

    def read(self, given: Given, fault: Fault) -> tuple[list[int], list[tuple[Share, Tensor]]]:
        """Each gradient's state, and what this rank keeps of those that are clipped."""
        states: list[int] = []
        held: list[tuple[Share, Tensor]] = []
        for share, param in zip(self.shares, given.params, strict=True):
            state, local = NONE, None
            if share.clipped:
                try:
                    state, local = share.read(param)
                except Exception as wrong:
                    fault.add(f"{share.name}: {fault_text(wrong)}", wrong)
            states.append(state)
            if local is not None and local.numel():
                held.append((share, local))
        return states, held

    def lines(self, ranks: Ranks, states: Sequence[int]) -> list[str]:
        """What the ranks of a set must have alike of their gradients, a line for each parameter."""
        shares = [(self.shares[number], states[number]) for number in self.sets.get(ranks, ())]
        return [f"{share.line} {STATES[state]}" if share.compared else share.line for share, state in shares]

    def align_(self, given: Given, states: Sequence[int]) -> None:
        """Redistribute gradients to their parameters' placements, in one order on all ranks that share any of them:
        small sets first, then as listed. Collective."""
        for number in self._in_order:
            param = given.params[number]
            if states[number] == MISPLACED:
                param.grad = self.shares[number].engine.align(param.grad, param)


def _counts(layout: ParamLayout) -> bool:
    """True if this rank counts what it keeps of a tensor: it is the first of those that keep it.

    Raises:
        ValueError: So it is for a part of it alone.
    """
    rank = my_rank()
    pieces = [held.piece for held in layout.of_rank(rank) if held.piece.numel]
    first = {layout.keepers[piece][0] == rank for piece in pieces}
    if len(first) > 1:
        raise ValueError(
            f"a tensor of shape {layout.view.shape} has replicas of some of the parts that rank {rank} keeps of it, so "
            "a norm would count them several times. Redistribute it"
        )
    return True in first


# first parameter -> the table of the last parameters that began with it
_BOUND: Any = WeakTensorKeyDictionary()


def known(given: Given) -> Bound | None:
    """The table that these parameters had last, or others that begin with the same one."""
    found: Bound | None = _BOUND.get(given.params[0]) if given.params else None
    same = found is not None and found.is_of_this_world and found.beyond == given.beyond  # the same ranks vote
    return found if same else None


def keep(bound: Bound, given: Given) -> None:
    """Remember a table."""
    if given.params:
        _BOUND[given.params[0]] = bound
