"""A plan bound to the parameters of this rank, kept until parameters, layouts or options are others; and the specs of
which it is made. Ranks of a running job and `shardmuon plan`, which has none, make their specs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef, wire_device
from shardmuon.comm.vote import Agreed, Unlike, in_order
from shardmuon.errors import about, ranks_text
from shardmuon.layout.bind import Listed, Table
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import Claim, named_params, names_of
from shardmuon.layout.engines.fsdp1 import refuse_flat
from shardmuon.layout.engines.tensor_parallel import remember_shape
from shardmuon.layout.mesh import OnMesh
from shardmuon.layout.table import ParamLayout, Ranks, kept_layout
from shardmuon.layout.views import Ints, kept_view
from shardmuon.momentum.keeper import Keeper, offloaded_from, tiles_cut
from shardmuon.momentum.stores import BLOCK, GAMMA, mix_
from shardmuon.options import MuonConfig
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.choice import Choice, Chooser, Task, is_narrow, work
from shardmuon.orthogonalize.stamp import machine_stamp, precision_flags
from shardmuon.plan.items import Bucket, Kept, Policy, Spec
from shardmuon.plan.machines import machine_of
from shardmuon.plan.plan import Plan, make_plan
from shardmuon.plan.program import make_program
from shardmuon.step.bucket import Bound, Buckets
from shardmuon.step.options import Group, Settings
from shardmuon.step.stages import WeightSet, weight_sets
from shardmuon.variants import Stage, Stages, WeightStage, keeping


class Member(NamedTuple):
    """A Muon parameter of a plan.

    Attributes:
        param: The tensor.
        group: Number of its group.
        name, identity: Name for messages, and the name that all ranks give it.
        engine: The engine that reaches its storage.
        signature: Its engine's, when the plan was made.
    """

    param: Tensor
    group: int
    name: str
    identity: str
    engine: Engine
    signature: object


class Binding(Agreed):
    """A plan with this rank's part of it. `sets`, `component`, `token` and `world` are its table's.

    Args:
        rank: This one.
        table: Who stores what.
        plan: Plan of the table's parameters.
        members: The table's parameters, index for index.
        settings: Settings of each.
        planned: For each group, the text of options that the plan was made for; "" for AdamW's.
        ns_device: Where matrices are orthogonalized; None: where their buckets' wires are.

    Attributes:
        buckets: Those that this rank takes part in, in the plan's order.
        group_of: Number of each parameter's group.
        alike_members: Group, engine and dtype -> the numbers of such parameters.
        shapes: Shape of this rank's storage of each parameter.
        digests: Set of ranks -> what its ranks plan alike, and that no other plan has.
        on_weights: Number -> stages, of parameters that have one on weights.
        alike: Set of ranks -> the parameters that its ranks must step alike: all that share one, but only those that
            store any of it where the others may lack the gradient.
        elsewhere: The parameters that only other ranks store any of, and whose gradient may lack here.
        bits: Number -> presence bit of each parameter whose gradient some ranks may lack.
        num_bits: Number of presence bits of the component.
        buckets_without: The programs of a step in which these parameters have no gradient.
        weight_sets: The sets in which norms of these parameters' weights are summed.
    """

    def __init__(
        self,
        rank: int,
        table: Table,
        plan: Plan,
        members: tuple[Member, ...],
        settings: Sequence[Settings],
        planned: list[str],
        ns_device: torch.device | None,
    ) -> None:
        super().__init__(table.component, table.token, table.sets)
        self.rank, self.table, self.plan, self.members, self.planned = rank, table, plan, members, planned
        self.group_of, self.ns_device = [one.group for one in members], ns_device
        self.buckets = [bucket for bucket in plan.buckets if rank in bucket.ranks]
        self.alike_members: dict[tuple[int, Engine, torch.dtype], list[int]] = {}
        for number, one in enumerate(members):
            self.alike_members.setdefault((one.group, one.engine, one.param.dtype), []).append(number)
        self.shapes = [tuple(one.engine.storage(one.param).shape) for one in members]
        self.digests = {ranks: digest + table.token for ranks, digest in plan.digests.items() if len(ranks) > 1}
        stages = {number: of_member.stages for number, of_member in enumerate(settings)}
        self.on_weights = {n: of for n, of in stages.items() if any(isinstance(one, WeightStage) for one in of)}
        self.alike, self.elsewhere = _alike(table, rank)
        self.bits, self.num_bits = dict[int, int](), 0
        homes = [members[plan.items[bucket.items[0]].param].param.device for bucket in self.buckets]
        shapes, buckets = self.shapes, list(zip(self.buckets, homes, strict=True))
        # of all parameters and of the last step's; of those whose norms are fresh, too
        self.buckets_without = lru_cache(maxsize=2)(partial(_buckets, plan, rank, shapes, buckets, ns_device))
        self.weight_sets = lru_cache(maxsize=3)(partial(_weight_sets, plan, rank, shapes, self.on_weights))


def _buckets(
    plan: Plan,
    rank: int,
    shapes: Sequence[Ints],
    buckets: Sequence[tuple[Bucket, torch.device]],  # with the device of its parameters
    ns_device: torch.device | None,
    missing: frozenset[int],
) -> Buckets:
    found = []
    for bucket, home in buckets:
        device = wire_device(home, ns_device, bucket.ranks if bucket.exchange else (rank,))
        found.append(Bound(plan, make_program(plan, bucket, rank, missing), shapes, device))
    return Buckets(found)


def _weight_sets(
    plan: Plan, rank: int, shapes: Sequence[Ints], on_weights: Mapping[int, Stages], numbers: frozenset[int]
) -> list[WeightSet]:
    return weight_sets(plan, {n: stages for n, stages in on_weights.items() if n in numbers}, rank, shapes)


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


def _alike(table: Table, rank: int) -> tuple[dict[Ranks, list[int]], frozenset[int]]:
    """`Binding.alike` and `Binding.elsewhere`. Set by set: the order is the same on all ranks of one."""
    found: dict[Ranks, list[int]] = {ranks: [] for ranks in table.sets}
    elsewhere: list[int] = []
    numbers = [(ranks, number) for ranks, of_set in table.sets.items() for number in of_set]
    for ranks, number in sorted(numbers, key=lambda one: _lacking(table, one[1])):  # which come last
        holders = _holders(table.layouts[number]) if _lacking(table, number) else ranks
        if rank in holders:
            found.setdefault(holders, []).append(number)
        else:
            elsewhere.append(number)
    return found, frozenset(elsewhere)


def listed_of(
    groups: Sequence[Group],
    options: Sequence[Settings | None],
    config: MuonConfig,
    keeper: Keeper,
    chooser: Chooser,
) -> list[Listed]:
    found, whole = [], config.text()
    for index, (group, settings) in enumerate(zip(groups, options, strict=True)):
        named = bool(names_of(group)) or keeper.rounds
        for name, p in named_params(group, index):
            if settings is None:
                with about(name):
                    refuse_flat(p)
            elif takes_part(p):
                text = f"{settings.batch} {whole} weights={p.dtype} products={_products(chooser, p.device)}"
                found.append(Listed(name, name if named else "", p, group, settings.view, text))
    return found


def chooser_of(groups: Sequence[Group], config: MuonConfig) -> Chooser:
    """The choice of a method for each matrix on this rank, and of the device that orthogonalizes: that of the model, if
    an engine keeps parameters on the CPU; None: that of the parameters."""
    muon = (p for group in groups if group["use_muon"] for p in group["params"])
    homes = (home for home in map(offloaded_from, muon) if home is not None)
    return replace(config.chooser(), device=next(homes, None))


def _products(chooser: Chooser, device: torch.device) -> torch.dtype:
    """The dtype of products, by default, of parameters on a device: on CPUs it depends on what they multiply in
    hardware, which may differ from rank to rank."""
    method = "standard" if chooser.method == "auto" else chooser.method
    return chooser.dtype or default_dtype(method, chooser.device or device)


def stamp_of(chooser: Chooser, device: torch.device) -> str:
    """Text about this machine, as far as products depend on it. `device`: that of the parameters."""
    where = chooser.device or device
    # "torch" leaves the process's own flags as they are
    return machine_stamp(where) + (f"; {precision_flags(where)}" if chooser.method == "torch" else "")


def _notes(table: Table, chooser: Chooser) -> Iterator[str]:
    """Lines for the printed plan on how far equal bits reach."""
    for ranks in table.sets:
        kinds: dict[str, list[int]] = {}
        for rank in ranks:
            kinds.setdefault(table.stamps[rank], []).append(rank)
        if len(kinds) > 1:
            unlike = "; ".join(f"ranks {ranks_text(tuple(those))} have {kind}" for kind, those in kinds.items())
            yield f"machines differ: {unlike}. Each matrix has one owner; another one would give it other bits"
    where = chooser.device or (table.params[0].param.device if table.params else torch.device("cpu"))
    if where.type != "cpu":
        yield "slots of batches: not searched by tests as on CPUs; `shardmuon verify --slots` searches this device"


def bound(
    rank: int,
    table: Table,
    groups: Sequence[Group],
    options: Sequence[Settings | None],
    config: MuonConfig,
    chooser: Chooser,
    keeper: Keeper,
) -> Binding:
    notes = tuple(dict.fromkeys(_notes(table, chooser)))
    of_group = {id(group): number for number, group in enumerate(groups)}
    members, specs, settings, known = [], [], [], dict[tuple[ParamLayout, str], ParamLayout]()
    for one, claim, layout in zip(table.params, table.claims, table.layouts, strict=True):
        number, engine, param = of_group[id(one.group)], engine_for(one.param, one.group), one.param
        remember_shape(engine, param, layout)
        kept = partial(_kept_layout, known, engine, claim, layout)
        of_member = options[number]
        assert of_member is not None, "a group of matrices"
        settings.append(of_member)
        doubles = param.dtype == torch.float64
        spec = make_spec(one.name, layout, of_member, param.device, chooser, doubles, kept)
        members.append(Member(param, number, one.name, one.identity, engine, engine.signature(param)))
        if keeper.dtype == "int8":
            check_blocks(one.name, layout)
        specs.append(spec)
    machine, alike = machine_of(table.stamps.values()), len(set(table.stamps.values())) < 2
    plan = make_plan(specs, Policy(config.bucket_bytes, machine, each=alike))
    plan = replace(plan, notes=(*plan.notes, *notes))
    planned = ["" if of_options is None else of_options.planned for of_options in options]
    return Binding(rank, table, plan, tuple(members), settings, planned, chooser.device)


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


def _itemsize(choice: Choice, chooser: Chooser, doubles: bool) -> int:
    """Bytes per element of wires of matrices that are orthogonalized so. `doubles`: the parameter is of fp64."""
    if doubles or chooser.dtype == torch.float64:
        return 8  # fp64 gradients may lie outside the range of fp32
    return 2 if is_narrow(choice) else 4


def make_spec(
    name: str,
    layout: ParamLayout,
    settings: Settings,
    device: torch.device,
    chooser: Chooser,
    doubles: bool,
    kept_of: Callable[[Stage], ParamLayout],
) -> Spec:
    """One parameter as the planner sees it.

    Args:
        name: Name for messages.
        layout: Who stores what.
        settings: Settings of its group.
        device: Device of the parameter.
        chooser: The optimizer's chooser.
        doubles: True for a parameter of fp64.
        kept_of: A stage that keeps anything -> who keeps what.
    """
    made: dict[tuple[int, int], tuple[Any, ...]] = {}
    shapes = [(m.rows, m.cols) for m in layout.view.matrices]
    for shape in dict.fromkeys(shapes):
        task = Task(*shape, settings.coefficients, chooser.device or device)
        choice = chooser.choice(task)
        size = _itemsize(choice, chooser, doubles)
        made[shape] = str(choice), work(choice, *task), size, choice.reason
    columns = list(zip(*(made[shape] for shape in shapes), strict=True)) or [()] * 4
    hows, costs, sizes, reasons = columns
    kept = tuple(Kept(kept_of(stage), stage.travels) for stage in keeping(settings.stages))
    return Spec(name, layout, hows, costs, sizes, settings.batch, device.type, kept, reasons)


def check_blocks(name: str, layout: ParamLayout) -> None:
    """Raise Unlike if columns are cut inside a block that 8-bit momentum has one scale for."""
    for rank, found in tiles_cut(layout):
        raise Unlike(
            f"{name}: momentum_dtype='int8' keeps one scale for {BLOCK} columns, but rank {rank} holds {found}, which "
            "cuts such a block in two. Write momentum_dtype=torch.bfloat16, or cut the columns at multiples "
            f"of {BLOCK} only (Shard(0), another number of ranks, whole trailing dims)"
        )


def fingerprint(storage: Tensor) -> int:
    """64 bits of a tensor's bits and their order. Equal tensors give equal numbers on any device of one kind.

    Each 8 bytes are mixed with their place by a bijection in which every bit hangs on every other (`stores.mix_`), then
    added: so a change of 8 bytes always shows, and changes of several cancel like random numbers, 1 in 2**64. A sum of
    words times weights would not do: neighbours that drift by +1, -1, -1, +1 ulp cancel in any function linear in word
    and place.
    """
    flat = storage.detach().reshape(-1)
    # whole words in memory of their own: a view of other bytes wants both
    words = torch.cat([flat, flat.new_zeros(-len(flat) % (8 // flat.element_size()))]).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk = 1 << 15 if flat.device.type == "cpu" else 1 << 22  # intermediate results stay in a CPU's cache
    for start, part in zip(range(1, len(words) + 1, chunk), words.split(chunk), strict=False):
        places = torch.arange(start, start + len(part), device=flat.device, dtype=torch.int64)
        total += mix_(places.mul_(GAMMA).add_(part)).sum()  # wraps around modulo 2**64
    return int(total.item())


def groups_of(buckets: Sequence[Bucket], sets: Sequence[WeightSet] = ()) -> list[Ranks]:
    """The ranks of each group, in the order in which every rank makes them."""
    moving = [bucket.ranks for bucket in buckets if bucket.exchange]
    return in_order([*moving, *(one.ranks for one in sets)])
