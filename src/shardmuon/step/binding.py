"""A plan bound to the parameters of this rank, kept until parameters, layouts or options are others; and the specs of
which it is made. Ranks of a running job and `shardmuon plan`, which has none, make their specs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef, wire_device
from shardmuon.comm.vote import Unlike, in_order
from shardmuon.errors import ranks_text
from shardmuon.layout.bind import KeptTable, Listed, Table
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import Claim, name_of, names_of
from shardmuon.layout.engines.fsdp1 import refuse_flat
from shardmuon.layout.engines.tensor_parallel import remember_shape
from shardmuon.layout.mesh import OnMesh
from shardmuon.layout.table import ParamLayout, Ranks, kept_layout
from shardmuon.layout.views import Ints, kept_view
from shardmuon.momentum.keeper import Keeper, offloaded_from, tiles_cut
from shardmuon.momentum.stores import BLOCK, GAMMA, mix_
from shardmuon.options import Exchange, MuonConfig, Orthogonalizer
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.choice import Choice, Chooser, Task, can_slice, factor_flops, is_narrow, slice_costs, work
from shardmuon.orthogonalize.gram import schedule_fault
from shardmuon.orthogonalize.stamp import machine_stamp, precision_flags
from shardmuon.plan.machines import machine_of
from shardmuon.plan.plan import Bucket, Gram, Kept, Plan, Policy, Spec, make_plan
from shardmuon.plan.program import make_program
from shardmuon.plan.slices import Slicing
from shardmuon.step.bucket import Bound, Buckets
from shardmuon.step.options import Group, GroupOptions, rates_text
from shardmuon.step.stages import WeightSet, weight_sets
from shardmuon.variants import Stage, Stages, WeightStage, gram_fault, keeping


class Member(NamedTuple):
    """A Muon parameter of a plan.

    Attributes:
        param: The tensor.
        group: Number of its group.
        name, identity: Name for messages, and the name that all ranks give it.
        engine: The engine that reaches its storage.
        signature: Its engine's, when the plan was made.
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
class Binding(KeptTable):
    """A plan with this rank's part of it. `sets`, `component`, `token` and `world` are its table's.

    Attributes:
        table: Who stores what.
        plan: Plan of the table's parameters.
        members: The table's parameters, index for index.
        planned: For each group, the text of options that the plan was made for.
        buckets: Those that this rank takes part in, in the plan's order.
        shapes: Shape of this rank's storage of each parameter.
        digests: Set of ranks -> what its ranks plan alike, and that no other plan has.
        on_weights: Number -> stages, of parameters that have one on weights.
        alike: Set of ranks -> the parameters that its ranks must step alike: all that share one, but only those that
            store any of it where the others may lack the gradient.
        elsewhere: The parameters that only other ranks store any of, and whose gradient may lack here.
        bits: Number -> presence bit of each parameter whose gradient some ranks may lack.
        num_bits: Number of presence bits of the component.
        ns_device: Where matrices are orthogonalized; None: where their buckets' wires are.
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
    ns_device: torch.device | None = None
    said: dict[Ranks, tuple[object, bytes]] = field(default_factory=dict)  # what a set's last digest was made of
    _of_step: dict[frozenset[int], Buckets] = field(default_factory=dict)
    _weights: dict[frozenset[int], list[WeightSet]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.table)

    def buckets_without(self, missing: frozenset[int]) -> Buckets:
        """The programs of a step in which these parameters have no gradient."""
        if missing not in self._of_step:
            whole = self._of_step.get(frozenset())
            self._of_step = {} if whole is None else {frozenset(): whole}  # two at most: of all, and the last of some
            programs = [make_program(self.plan, bucket, self.rank, missing) for bucket in self.buckets]
            bounds = [Bound(self.plan, one, self.shapes, self._device(one.bucket)) for one in programs]
            self._of_step[missing] = Buckets.of(bounds)
        return self._of_step[missing]

    def _device(self, bucket: Bucket) -> torch.device:
        """Device of a bucket's wires."""
        device = self.members[self.plan.items[bucket.items[0]].param].param.device
        return wire_device(device, self.ns_device, bucket.ranks if bucket.exchange else (self.rank,))

    def weight_sets(self, stages: Mapping[int, Stages]) -> list[WeightSet]:
        """The sets in which norms of these parameters' weights are summed."""
        key = frozenset(stages)
        if key not in self._weights:
            if len(self._weights) > 2:  # of those whose norms are fresh, of all, of the last step's
                self._weights.clear()
            self._weights[key] = weight_sets(self.plan, stages, self.rank, self.shapes)
        return self._weights[key]


def takes_part(param: Tensor) -> bool:
    """True unless it is frozen. One that is frozen takes part if someone gives it a gradient."""
    return param.requires_grad or param.grad is not None


def groups_of_params(listed: Sequence[Listed]) -> dict[Ranks, GroupRef]:
    """Set of ranks -> the process group over them that parameters bring along; of several that of the first name."""
    found: dict[Ranks, GroupRef] = {}
    brought = (engine_for(one.param, one.group).groups(one.param, one.group) for one in listed)
    for ref in (GroupRef.of(group) for groups in brought for group in groups):
        ranks = () if ref is None or not ref.group_name else tuple(sorted(ref.ranks))
        if ref is not None and ranks and ranks == ref.ranks:
            found[ranks] = min(found.get(ranks, ref), ref, key=lambda one: one.group_name)
    return found


def counts_of_lacking(table: Table) -> dict[Ranks, int]:
    """Set of sharers -> how many of its parameters have gradients that some ranks may lack."""
    found = {ranks: sum(_lacking(table, number) for number in numbers) for ranks, numbers in table.sets.items()}
    return {ranks: count for ranks, count in found.items() if count}


def number_bits(binding: Binding, everyone: Sequence[Mapping[Ranks, int]]) -> None:
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
    return tuple(rank for rank, pieces in layout.pieces.items() if pieces)


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


def listed_of(
    groups: Sequence[Group], options: Sequence[GroupOptions], config: MuonConfig, keeper: Keeper, how: How
) -> list[Listed]:
    found, whole = [], config.text()
    for index, (group, of_group) in enumerate(zip(groups, options, strict=True)):
        named, text = bool(names_of(group)) or keeper.rounds, f"{of_group.alike} {whole}"
        for position, p in enumerate(group["params"]):
            name = name_of(group, index, position)
            if of_group.settings is None:
                _check_not_flat(name, p)
            elif takes_part(p):
                dtypes = f"weights={p.dtype} products={how.products(p.device)}"
                found.append(Listed(name, name if named else "", p, group, of_group.view, f"{text} {dtypes}"))
    return found


def _check_not_flat(name: str, param: Tensor) -> None:
    try:
        refuse_flat(param)
    except ValueError as wrong:
        raise ValueError(f"{name}: {wrong}") from None


class How(NamedTuple):
    """The way to orthogonalize on this rank: the choice of a method for each matrix, and a device.

    Attributes:
        chooser: Chooses how to orthogonalize each matrix.
        device: Device that orthogonalizes; None: that of the parameters.
    """

    chooser: Chooser
    device: torch.device | None = None

    @classmethod
    def of(cls, groups: Sequence[Group], config: MuonConfig) -> How:
        device = config.ns_device
        if device is None:
            muon = (p for group in groups if group["use_muon"] for p in group["params"])
            device = next((home for home in map(offloaded_from, muon) if home is not None), None)
        return cls(replace(config.orthogonalizer.chooser(), device=device), device)

    def products(self, device: torch.device) -> torch.dtype:
        """The dtype of products, by default, of parameters on a device: on CPUs it depends on what they multiply in
        hardware, which may differ from rank to rank."""
        method = "standard" if self.chooser.method == "auto" else self.chooser.method
        return self.chooser.dtype or default_dtype(method, self.device or device)

    def stamp(self, device: torch.device) -> str:
        """Text about this machine, as far as products depend on it. `device`: that of the parameters."""
        where = self.device or device
        # "torch" leaves the process's own flags as they are
        flags = f"; {precision_flags(where)}" if self.chooser.method == "torch" else ""
        return machine_stamp(where) + flags


def _notes(table: Table, how: How, config: MuonConfig) -> tuple[str, ...]:
    """Lines for the printed plan on how far equal bits reach.

    Raises:
        Unlike: Ranks on unlike machines are to repeat each other's work.
    """
    notes: dict[str, None] = {}
    for ranks in table.sets:
        kinds: dict[str, list[int]] = {}
        for rank in ranks:
            kinds.setdefault(table.stamps[rank], []).append(rank)
        if len(kinds) > 1:
            unlike = "; ".join(f"ranks {ranks_text(tuple(those))} have {kind}" for kind, those in kinds.items())
            if config.exchange.route == "local":
                raise Unlike(f"route='local' needs equal machines, but {unlike}. Use Exchange(route='auto')")
            notes[f"machines differ: {unlike}. Each matrix has one owner; another one would give it other bits"] = None
    where = how.device or (table.params[0].param.device if table.params else torch.device("cpu"))
    if how.chooser.measured is not None:
        notes[how.chooser.measured.about_slots(where)] = None
    elif where.type != "cpu":
        notes["slots of batches: not searched on this machine, see `shardmuon verify --slots FILE`"] = None
    return tuple(notes)


def bound(
    rank: int,
    table: Table,
    groups: Sequence[Group],
    options: Sequence[GroupOptions],
    config: MuonConfig,
    how: How,
    keeper: Keeper,
) -> Binding:
    notes = _notes(table, how, config)
    of_group = {id(group): number for number, group in enumerate(groups)}
    members, specs, kept_layouts = [], [], dict[tuple[ParamLayout, str], ParamLayout]()
    for one, claim, layout in zip(table.params, table.claims, table.layouts, strict=True):
        number = of_group[id(one.group)]
        engine = engine_for(one.param, one.group)
        remember_shape(engine, one.param, layout)
        kept = partial(_kept_layout, kept_layouts, engine, claim, layout)
        wire = WireFormat.of(config.orthogonalizer, config.exchange, doubles=one.param.dtype == torch.float64)
        spec = make_spec(one.name, layout, options[number], one.param.device, how.chooser, wire, kept)
        keys = [stage.key for stage in keeping(_spec_stages(options[number]))]
        shapes = dict(zip(keys, (kept.layout.view.shape for kept in spec.kept), strict=True))
        signature = engine.signature(one.param)
        members.append(Member(one.param, number, one.name, one.identity, engine, signature, shapes))
        specs.append(spec)
        if keeper.dtype == "int8":
            check_blocks(one.name, layout)
            specs[-1] = specs[-1]._replace(slicings=())  # a slice may cut such a block
    machine = config.exchange.machine or machine_of(table.stamps.values())
    route = config.exchange.route
    if route == "auto" and len(set(table.stamps.values())) > 1:
        route = "owner"  # replicas on unlike machines would drift apart
    policy = Policy(route, config.exchange.bucket_bytes, machine, config.orthogonalizer.split_k)
    plan = make_plan(specs, policy)
    plan = replace(plan, notes=(*rates_text(plan, [options[member.group].settings for member in members]), *notes))
    of_each = [_spec_stages(options[member.group]) for member in members]
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
        ns_device=how.device,
    )


def _spec_stages(options: GroupOptions) -> Stages:
    """The stages of a group's matrices."""
    return () if options.settings is None else options.settings.stages


def _kept_layout(
    known: dict[tuple[ParamLayout, str], ParamLayout], engine: Engine, claim: Claim, layout: ParamLayout, stage: Stage
) -> ParamLayout:
    """Layout of the numbers that a stage keeps of a parameter; parameters that lie alike share one object (`known`)."""
    key = layout, stage.key
    if key not in known:
        view = kept_view(layout.view, [stage.num_kept(m.rows, m.cols) for m in layout.view.matrices])
        on_mesh = OnMesh(*cast(Any, claim.form[1:])) if engine.believes_placements else None
        known[key] = kept_layout(layout, view, on_mesh)
    return known[key]


class WireFormat(NamedTuple):
    """Bytes per element of wires, and True if matrices with half-precision products have narrower ones all the same:
    see `Exchange.dtype`."""

    itemsize: int
    narrows: bool

    @classmethod
    def of(cls, orthogonalizer: Orthogonalizer, exchange: Exchange, *, doubles: bool) -> WireFormat:
        """The wire of a parameter, as the optimizer's options ask for it. `doubles`: True for a parameter of fp64."""
        if exchange.dtype is not None:
            return cls(exchange.dtype.itemsize, False)
        if doubles or orthogonalizer.method == "reference" or orthogonalizer.products_dtype == torch.float64:
            return cls(8, False)  # fp64 gradients may lie outside the range of fp32
        return cls(4, True)


def make_spec(
    name: str,
    layout: ParamLayout,
    options: GroupOptions,
    device: torch.device,
    chooser: Chooser,
    wire: WireFormat,
    kept_of: Callable[[Stage], ParamLayout],
) -> Spec:
    """One parameter as the planner sees it.

    Args:
        name: Name for messages.
        layout: Who stores what.
        options: Options of its group, which is one of matrices.
        device: Device of the parameter.
        chooser: The optimizer's chooser.
        wire: Of this parameter.
        kept_of: A stage that keeps anything -> who keeps what.

    Raises:
        ValueError: A choice cannot run on the device.
    """
    assert options.settings is not None, "a group of matrices"
    coefficients, stages = options.settings.coefficients, options.settings.stages
    shapes = [(m.rows, m.cols) for m in layout.view.matrices]
    tasks = {shape: Task(*shape, coefficients, chooser.device or device) for shape in dict.fromkeys(shapes)}
    choices = {shape: chooser.choice(task) for shape, task in tasks.items()}
    sizes = {s: 2 if wire.narrows and is_narrow(choice) else wire.itemsize for s, choice in choices.items()}
    costs = {shape: work(choice, *tasks[shape]) for shape, choice in choices.items()}
    sliced = {s: not stages and can_slice(choice, tasks[s]) for s, choice in choices.items()}
    slicings = {s: Slicing(*slice_costs(choices[s], tasks[s])) if can else None for s, can in sliced.items()}
    grams = {shape: _gram(choice, tasks[shape], sizes[shape], stages) for shape, choice in choices.items()}
    return Spec(
        name,
        layout,
        tuple(str(choices[shape]) for shape in shapes),
        tuple(costs[shape] for shape in shapes),
        options.batch,
        device.type,
        tuple(sizes[shape] for shape in shapes),
        tuple(Kept(kept_of(stage), stage.travels) for stage in keeping(stages)),
        tuple(grams[shape] for shape in shapes),
        tuple(choices[shape].reason for shape in shapes),
        tuple(slicings[shape] for shape in shapes) if any(slicings.values()) else (),
    )


def _gram(choice: Choice, task: Task, itemsize: int, stages: Stages) -> Gram:
    """The Gram route for matrices of one shape; its wire is never narrower than fp32."""
    fault = gram_fault(stages)
    if not fault and choice.method not in ("standard", "gram"):
        fault = f"method={choice.method!r} has no Gram form"
    fault = fault or schedule_fault(task.coefficients, torch.float64 if itemsize == 8 else torch.float32)
    share = 0.625 if task.device.type == "cpu" else 1.0  # of symmetric products, see `choice.work`
    return Gram(factor_flops(min(task.rows, task.cols), task.coefficients, share), fault)


def check_blocks(name: str, layout: ParamLayout) -> None:
    """Raise Unlike if columns are cut inside a block that 8-bit momentum has one scale for."""
    for rank, found in tiles_cut(layout):
        raise Unlike(
            f"{name}: momentum_dtype='int8' keeps one scale for {BLOCK} columns, but rank {rank} holds {found}, which "
            "cuts such a block in two. Write Storage(momentum_dtype=torch.bfloat16), or cut the columns at multiples "
            f"of {BLOCK} only (Shard(0), another number of ranks, whole trailing dims)"
        )


def fingerprint(storage: Tensor) -> int:
    """64 bits of a tensor's bits and their order. Equal tensors give equal numbers on any device of one kind.

    Each 8 bytes are mixed with their place by a bijection in which every bit hangs on every other (`stores.mix_`), then
    added: so a change of 8 bytes always shows, and changes of several cancel like random numbers, 1 in 2**64. A sum of
    words times weights would not do: neighbours that drift by +1, -1, -1, +1 ulp cancel in any function linear in word
    and place.
    """
    dense = storage.detach().contiguous()
    # one element may have any stride and still be contiguous, where a view of other bytes wants 1
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    pad = -flat.numel() % 8
    if pad:
        flat = torch.nn.functional.pad(flat, (0, pad))
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.empty(0, dtype=torch.int64, device=flat.device)
    chunk = 1 << 15 if flat.device.type == "cpu" else 1 << 22  # intermediate results stay in a CPU's cache
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        if len(places) != len(part):
            places = torch.arange(1, len(part) + 1, device=flat.device, dtype=torch.int64).mul_(GAMMA)
        total += mix_((places + part).add_(_wrapped(start * GAMMA))).sum()  # wraps around modulo 2**64
    return int(total.item())


def _wrapped(number: int) -> int:
    """An integer modulo 2**64, as a signed number."""
    return (number + 2**63) % 2**64 - 2**63


def groups_of(buckets: Sequence[Bucket], sets: Sequence[WeightSet] = ()) -> list[Ranks]:
    """The ranks of each group, in the order in which every rank makes them."""
    moving = [bucket.ranks for bucket in buckets if bucket.exchange]
    return in_order([*moving, *(one.ranks for one in sets)])
