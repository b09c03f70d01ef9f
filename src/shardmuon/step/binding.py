"""A plan bound to the parameters of this rank, kept until parameters, layouts or options are others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from shardmuon.comm.component import in_order
from shardmuon.comm.faults import Fault
from shardmuon.comm.groups import group_for
from shardmuon.comm.vote import Phase, gather
from shardmuon.engines import Engine, engine_for
from shardmuon.engines.base import name_of, names_of
from shardmuon.layout.bind import Listed, Table, bind, settle
from shardmuon.layout.kept import OnMesh, kept_layout
from shardmuon.layout.mesh import Placements
from shardmuon.layout.readers.base import Claim
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Ints, kept_view
from shardmuon.momentum.keeper import Keeper, tiles_cut
from shardmuon.momentum.stores import BLOCK
from shardmuon.options import Exchange, Orthogonalizer, Storage
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.plan.plan import Bucket, Plan, Policy, Spec, make_plan
from shardmuon.plan.program import make_program
from shardmuon.step.bucket import Bound
from shardmuon.step.commit import groups_of
from shardmuon.step.options import Group, GroupOptions
from shardmuon.step.specs import Wire, make_spec
from shardmuon.step.weights import WeightSet, weight_sets
from shardmuon.stepping.replicas import fingerprint
from shardmuon.variants import Stage, Stages, WeightStage, keeping


class Config(NamedTuple):
    """Options of the whole optimizer that a plan depends on."""

    orthogonalizer: Orthogonalizer
    exchange: Exchange
    storage: Storage = Storage()

    def keeper(self) -> Keeper:
        """What keeps momentum as `storage` says."""
        return Keeper(self.storage.momentum_dtype, self.storage.momentum_device, self.storage.stochastic_rounding)


class Member(NamedTuple):
    """A Muon parameter of a plan.

    Attributes:
        param: The tensor.
        group: Number of its group.
        name, identity: For messages, and the name that all ranks give it.
        engine: Reaches its storage.
        signature: What its layout depended on when the plan was made.
        kept: Key -> global shape of each state tensor of its stages.
    """

    param: Tensor
    group: int
    name: str
    identity: str
    engine: Engine
    signature: object
    kept: Mapping[str, Ints]


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
        on_weights: Number -> stages, of parameters that have one on weights.
        alike: Set of ranks -> the parameters that its ranks must step alike: all that share one, but only those that
            store any of it where the others may lack the gradient.
        elsewhere: The parameters that only other ranks store any of, and whose gradient may lack here.
        bits: Number -> presence bit of each parameter whose gradient some ranks may lack.
        num_bits: Of the component.
    """

    rank: int
    table: Table
    plan: Plan
    members: tuple[Member, ...]
    planned: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    shapes: tuple[Ints, ...]
    digests: dict[Ranks, bytes]
    on_weights: dict[int, Stages]
    alike: dict[Ranks, tuple[int, ...]]
    elsewhere: frozenset[int]
    bits: dict[int, int] = field(default_factory=dict)
    num_bits: int = 0
    said: dict[Ranks, tuple[object, bytes]] = field(default_factory=dict)  # what a set's last digest was made of
    _bounds: dict[frozenset[int], list[Bound]] = field(default_factory=dict)
    _sets: dict[frozenset[int], list[WeightSet]] = field(default_factory=dict)

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

    def weight_sets(self, stages: Mapping[int, Stages]) -> list[WeightSet]:
        """The sets in which norms of these parameters' weights are summed."""
        key = frozenset(stages)
        if key not in self._sets:
            if len(self._sets) > 2:  # of those whose norms are fresh, of all, of the last step's
                self._sets.clear()
            self._sets[key] = weight_sets(self.plan, stages, self.rank, self.shapes)
        return self._sets[key]


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
    lacking: dict[Ranks, int] = {}
    groups_to_make: list[Ranks] = []
    with fault:
        binding = _bound(rank, table, groups, options, config)
        lacking = _counts(table)
        groups_to_make = groups_of(binding.buckets, binding.weight_sets(binding.on_weights))
    if settle(fault, table.component, Phase.PLAN, asked=bool(lacking)):
        everyone = gather(lacking, table.component)
        with fault:
            assert binding is not None, "all ranks have settled"
            _number_bits(binding, everyone)
        settle(fault, table.component, Phase.PLAN)
    assert binding is not None, "all ranks have settled"
    for ranks in groups_to_make:  # before the first exchange: whoever waits for buffers makes no group
        group_for(ranks)
    return binding


def _counts(table: Table) -> dict[Ranks, int]:
    """Set of sharers -> how many of its parameters have gradients that some ranks may lack."""
    found = {ranks: sum(_lacking(table, number) for number in numbers) for ranks, numbers in table.sets.items()}
    return {ranks: count for ranks, count in found.items() if count}


def _number_bits(binding: Binding, everyone: Sequence[Mapping[Ranks, int]]) -> None:
    """Give a presence bit of the component to each parameter whose gradient some ranks may lack."""
    counts = {ranks: count for theirs in everyone for ranks, count in theirs.items()}
    for ranks in in_order(counts):
        mine = [n for n in binding.table.sets.get(ranks, ()) if _lacking(binding.table, n)]
        binding.bits.update((number, binding.num_bits + at) for at, number in enumerate(mine))
        binding.num_bits += counts[ranks]


def _lacking(table: Table, number: int) -> bool:
    """True if some ranks store nothing of a parameter and may lack its gradient."""
    return table.claims[number].empty_lacks_gradient and len(_holders(table.layouts[number])) < len(
        table.layouts[number].ranks
    )


def _holders(layout: ParamLayout) -> Ranks:
    """The ranks that store any of a tensor."""
    held = zip(layout.ranks, layout.held, strict=True)
    return tuple(rank for rank, of_rank in held if any(one.piece.numel for one in of_rank))


def _alike(table: Table, rank: int) -> tuple[dict[Ranks, tuple[int, ...]], frozenset[int]]:
    """`Binding.alike` and `Binding.elsewhere`."""
    found: dict[Ranks, list[int]] = {ranks: [] for ranks in table.sets}
    lacking: list[int] = []
    for ranks, numbers in table.sets.items():
        for number in numbers:
            if _lacking(table, number):
                lacking.append(number)
            else:
                found[ranks].append(number)
    for number in lacking:  # set by set: the order is the same on all of its ranks
        holders = _holders(table.layouts[number])
        if rank in holders:
            found.setdefault(holders, []).append(number)
    elsewhere = frozenset(number for number in lacking if rank not in _holders(table.layouts[number]))
    return {ranks: tuple(numbers) for ranks, numbers in found.items()}, elsewhere


def _listed(groups: Sequence[Group], options: Sequence[GroupOptions], config: Config) -> list[Listed]:
    found = []
    for index, (group, of_group) in enumerate(zip(groups, options, strict=True)):
        if of_group.settings is None:
            continue
        named, text = bool(names_of(group)) or config.keeper().rounds, f"{of_group.alike} {config}"
        for position, p in enumerate(group["params"]):
            if takes_part(p):
                name = name_of(group, index, position)
                found.append(Listed(name, name if named else "", p, group, of_group.view, text))
    return found


def _bound(
    rank: int, table: Table, groups: Sequence[Group], options: Sequence[GroupOptions], config: Config
) -> Binding:
    chooser, wire = config.orthogonalizer.chooser(), _Wire.of(table, config)
    of_group = {id(group): number for number, group in enumerate(groups)}
    members, specs = [], []
    for one, claim, layout in zip(table.params, table.claims, table.layouts, strict=True):
        number = of_group[id(one.group)]
        engine = engine_for(one.param, one.group)
        kept = partial(_kept_layout, engine, claim, layout)
        spec = _spec(one, layout, options[number], chooser, wire, kept)
        keys = [stage.key for stage in keeping(spec_stages(options[number]))]
        shapes = dict(zip(keys, (kept.layout.view.shape for kept in spec.kept), strict=True))
        members.append(Member(one.param, number, one.name, one.identity, engine, engine.signature(one.param), shapes))
        specs.append(spec)
        _check_blocks(one.name, layout, config)
    plan = make_plan(specs, Policy(config.exchange.route, config.exchange.bucket_bytes))
    of_each = [spec_stages(options[member.group]) for member in members]
    stored = tuple(tuple(m.engine.storage(m.param).shape) for m in members)
    return Binding(
        rank,
        table,
        plan,
        tuple(members),
        tuple(o.planned for o in options),
        tuple(bucket for bucket in plan.buckets if rank in bucket.ranks),
        stored,
        {ranks: digest + table.token for ranks, digest in plan.digests.items() if len(ranks) > 1},
        {number: stages for number, stages in enumerate(of_each) if any(isinstance(s, WeightStage) for s in stages)},
        *_alike(table, rank),
    )


class _Wire(NamedTuple):
    """Bytes per element of wires, and True if matrices with half-precision products have narrower ones all the same:
    see `Exchange.dtype`."""

    itemsize: int
    narrows: bool

    @classmethod
    def of(cls, table: Table, config: Config) -> _Wire:
        if config.exchange.dtype is not None:
            return cls(config.exchange.dtype.itemsize, False)
        asked = config.orthogonalizer
        wide = asked.method == "reference" or asked.products_dtype == torch.float64
        if wide or any(one.param.dtype == torch.float64 for one in table.params):
            return cls(8, False)  # fp64 gradients may lie outside the range of fp32
        return cls(4, True)


def _spec(
    one: Listed,
    layout: ParamLayout,
    options: GroupOptions,
    chooser: Chooser,
    wire: _Wire,
    kept_of: Callable[[Stage], ParamLayout],
) -> Spec:
    return make_spec(one.name, layout, options, one.param.device, chooser, Wire(*wire), kept_of)


def spec_stages(options: GroupOptions) -> Stages:
    """The stages of a group's matrices."""
    return () if options.settings is None else options.settings.stages


def _kept_layout(engine: Engine, claim: Claim, layout: ParamLayout, stage: Stage) -> ParamLayout:
    view = kept_view(layout.view, [stage.num_kept(m.rows, m.cols) for m in layout.view.matrices])
    place = None
    if getattr(engine, "cuts_stacks_by_placements", False):  # then its form is that of a mesh
        _, *on_mesh = claim.form
        place = OnMesh(*cast("tuple[Ints, Ints, Placements]", tuple(on_mesh)))
    return kept_layout(layout, view, place)


def _check_blocks(name: str, layout: ParamLayout, config: Config) -> None:
    """Raise ValueError if 8-bit momentum is to be kept of columns that are cut inside a block of one scale."""
    if config.storage.momentum_dtype == "int8":
        for rank, found in tiles_cut(layout):
            raise ValueError(
                f"{name}: momentum_dtype='int8' keeps one scale for {BLOCK} columns, but rank {rank} holds {found}, "
                "which cuts such a block in two. Write Storage(momentum_dtype=torch.bfloat16), or cut the columns at "
                f"multiples of {BLOCK} only (Shard(0), another number of ranks, whole trailing dims)"
            )
