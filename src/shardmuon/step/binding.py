"""A plan bound to the parameters of this rank, kept until parameters, layouts or options are others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.comm.faults import Fault
from shardmuon.comm.vote import Phase
from shardmuon.engines import Engine, engine_for
from shardmuon.engines.base import name_of, names_of
from shardmuon.layout.bind import Listed, Table, bind, settle
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Ints
from shardmuon.options import Exchange, Orthogonalizer
from shardmuon.orthogonalize.choice import Chooser, Task, work
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.plan.plan import Bucket, Plan, Policy, Spec, make_plan
from shardmuon.plan.program import make_program
from shardmuon.planning.types import is_narrow
from shardmuon.step.bucket import Bound
from shardmuon.step.commit import make_groups
from shardmuon.step.options import Group, GroupOptions
from shardmuon.stepping.replicas import fingerprint


class Config(NamedTuple):
    """Options of the whole optimizer that a plan depends on."""

    orthogonalizer: Orthogonalizer
    exchange: Exchange


class Member(NamedTuple):
    """A Muon parameter of a plan.

    Attributes:
        param: The tensor.
        group: Number of its group.
        name: For messages.
        engine: Reaches its storage.
        signature: What its layout depended on when the plan was made.
    """

    param: Tensor
    group: int
    name: str
    engine: Engine
    signature: object


@dataclass
class Binding:
    """A plan with this rank's part of it.

    Attributes:
        table: Who stores what.
        plan: Of the table's parameters.
        members: They, index for index.
        planned: Of each group, the text of options that the plan was made for.
        buckets: Those that this rank takes part in, in the plan's order.
        shapes: Of what this rank stores of each parameter.
        digests: Set of ranks -> what its ranks plan alike, and that no other plan has.
    """

    rank: int
    table: Table
    plan: Plan
    members: tuple[Member, ...]
    planned: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    shapes: tuple[Ints, ...]
    digests: dict[Ranks, bytes]
    said: dict[Ranks, tuple[object, bytes]] = field(default_factory=dict)  # what a set's last digest was made of
    _bounds: dict[frozenset[int], list[Bound]] = field(default_factory=dict)

    def bounds(self, missing: frozenset[int]) -> list[Bound]:
        """The programs of a step in which these parameters have no gradient."""
        if missing not in self._bounds:
            whole = self._bounds.get(frozenset())
            self._bounds = {} if whole is None else {frozenset(): whole}  # two at most: of all, and the last of some
            self._bounds[missing] = [
                Bound(self.plan, make_program(self.plan, bucket, self.rank, missing), self.shapes)
                for bucket in self.buckets
            ]
        return self._bounds[missing]


def takes_part(param: Tensor) -> bool:
    """True unless it is frozen. One that is frozen takes part if someone gives it a gradient."""
    return param.requires_grad or param.grad is not None


def make_binding(
    rank: int,
    groups: Sequence[Group],
    options: Sequence[GroupOptions],
    config: Config,
    before: Ranks | None,
    fault: Fault,
) -> Binding:
    """Plan together with the other ranks. Collective over the component.

    Args:
        rank: This one.
        groups, options: Of the optimizer; no options if they could not be read.
        config: Of the whole optimizer.
        before: The component so far, if there was one.
        fault: What is wrong on this rank already.

    Raises:
        Refused: Something is wrong on some rank. On every rank.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    listed: list[Listed] = []
    waiting: list[tuple[Tensor, Group]] = []
    stamp, binding = "", None
    with fault:
        waiting = [(p, group) for group in groups if group.get("use_muon") for p in group["params"]]
    with fault:
        listed = _listed(groups, options, config)
        stamp = machine_stamp(listed[0].param.device if listed else torch.device("cpu"))
    check = fingerprint if config.exchange.check_replicas else None
    table = bind(rank, listed, waiting, before=before, stamp=stamp, fingerprint=check, fault=fault)
    with fault:
        binding = _bound(rank, table, groups, options, config)
    settle(fault, table.component, Phase.PLAN)
    assert binding is not None, "all ranks have settled"
    make_groups(binding.buckets)
    return binding


def _listed(groups: Sequence[Group], options: Sequence[GroupOptions], config: Config) -> list[Listed]:
    found = []
    for index, (group, of_group) in enumerate(zip(groups, options, strict=True)):
        if of_group.settings is None:
            continue
        named, text = bool(names_of(group)), f"{of_group.alike} {config}"
        for position, p in enumerate(group["params"]):
            if takes_part(p):
                name = name_of(group, index, position)
                found.append(Listed(name, name if named else "", p, group, of_group.view, text))
    return found


def _bound(
    rank: int, table: Table, groups: Sequence[Group], options: Sequence[GroupOptions], config: Config
) -> Binding:
    chooser = config.orthogonalizer.chooser()
    of_group = {id(group): number for number, group in enumerate(groups)}
    members, specs = [], []
    for one, layout in zip(table.params, table.layouts, strict=True):
        number = of_group[id(one.group)]
        engine = engine_for(one.param, one.group)
        members.append(Member(one.param, number, one.name, engine, engine.signature(one.param)))
        specs.append(_spec(one, layout, options[number], chooser))
    route = config.exchange.route
    assert route != "gram", "later"
    plan = make_plan(specs, Policy(route, config.exchange.bucket_bytes))
    shapes = tuple(tuple(m.engine.storage(m.param).shape) for m in members)
    return Binding(
        rank,
        table,
        plan,
        tuple(members),
        tuple(o.planned for o in options),
        tuple(bucket for bucket in plan.buckets if rank in bucket.ranks),
        shapes,
        {ranks: digest + table.token for ranks, digest in plan.digests.items() if len(ranks) > 1},
    )


def _spec(one: Listed, layout: ParamLayout, options: GroupOptions, chooser: Chooser) -> Spec:
    assert options.settings is not None
    coefficients, device = options.settings.coefficients, one.param.device
    tasks = [Task(m.rows, m.cols, coefficients, device) for m in layout.view.matrices]
    choices = [chooser.choice(task) for task in tasks]
    costs = tuple(work(c, t.rows, t.cols, coefficients, device) for c, t in zip(choices, tasks, strict=True))
    hows = tuple(map(str, choices))
    sizes = tuple(8 if one.param.dtype == torch.float64 else 2 if is_narrow(how) else 4 for how in hows)
    return Spec(one.name, layout, hows, costs, options.batch, device.type, sizes)
