"""Bindings, and the specs from which plans are made.

A binding combines a plan with this rank's parameters. The plan assigns each matrix to the ranks that orthogonalize it.
The binding is cached until parameters, layouts or options change.

A spec describes one parameter to the planner. Specs are made both for optimizers and for the command `shardmuon plan`,
which runs in a single process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef, Ranks
from shardmuon.comm.vote import MOST_BITS, Agreed, in_order
from shardmuon.errors import Refused, about, ranks_text
from shardmuon.layout.bind import Listed, Table
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import Claim, Group, named_params, names_of
from shardmuon.layout.engines.fsdp1 import UnitPlace
from shardmuon.layout.pieces import ParamLayout
from shardmuon.momentum.keeper import Keeper, check_blocks, offloaded_from
from shardmuon.momentum.stores import mix_
from shardmuon.options import MuonConfig, Settings
from shardmuon.orthogonalize import flops, products_dtype
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.plan.plan import Kept, Plan, Policy, Spec
from shardmuon.plan.planner import make_plan
from shardmuon.price.machines import Machine
from shardmuon.step.bucket import Buckets
from shardmuon.step.stages import WeightSet
from shardmuon.variants import Stage, WeightStage, keeping


class Member(NamedTuple):
    """One of the parameters that a plan covers.

    Attributes:
        param: The tensor.
        group: Index of the parameter's group.
        name: Name of the parameter in messages.
        identity: Name that identifies the parameter on all ranks; "" if it has none.
        engine: Storage adapter, which gives access to the parameter's layout and local storage.
        signature: Summary of the parameter's layout at the time when the plan was made. If the engine returns a
            different summary later, the layout has changed.
    """

    param: Tensor
    group: int
    name: str
    identity: str
    engine: Engine
    signature: object


class Binding(Agreed):
    """A plan, with this rank's parameters and buckets. A bucket is a set of matrices that are processed together.

    Args:
        rank: Global rank for which the binding is made.
        table: Layout table, which lists the pieces of each parameter that each rank stores.
        plan: Plan for the parameters of the table, which assigns each matrix to the ranks that orthogonalize it.
        members: The parameters of the table, in the same order.
        settings: Settings of each parameter's group.
        planned: For each parameter group, a string of the options on which the plan depends; "" for a group that AdamW
            updates.
        ns_device: Device on which matrices are orthogonalized. If None, the device of each bucket's exchange buffers.

    Attributes:
        buckets: The buckets that this rank takes part in, in the plan's order.
        group_of: Index of each parameter's group.
        alike_members: Dict from (index of a group, engine, dtype, device) to the indices of the parameters that have
            these four properties.
        on_weights: Indices of parameters whose Muon variant (such as Hyperball) rescales the updated weights.
        lacking: Indices of the parameters whose gradient can be missing on a rank that stores none of their elements,
            keyed by the set of ranks over which the parameters are sharded or replicated.
        elsewhere: Indices of the parameters in `lacking` that have no elements on this rank.
        alike: Dict from a set of ranks to the indices of the parameters whose `Proposal.said` must be equal on these
            ranks. They are all ranks over which the parameter is sharded or replicated. For a parameter in `lacking`,
            they are only those that store elements of it.
        bits: Dict from the index of each parameter in `lacking` to the position of its bit in the vote before a step.
            The bit shows whether any rank has the parameter's gradient.
        num_bits: Number of these bits: one for each parameter that is in `lacking` on any voting rank.
        buckets_without: Function that takes the indices of parameters without a gradient and returns the buckets for a
            step without these parameters.
        weight_sets: Function that takes indices of parameters and returns the `WeightSet`s that compute the norms of
            the matrices in these parameters.
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
        self.table, self.plan, self.members, self.planned = table, plan, members, planned
        self.group_of, self.ns_device = [one.group for one in members], ns_device
        self.buckets = [bucket for bucket in plan.buckets if rank in bucket.ranks]
        self.alike_members: dict[tuple[int, Engine, torch.dtype, torch.device], list[int]] = {}
        for number, one in enumerate(members):
            alike = one.group, one.engine, one.param.dtype, one.param.device
            self.alike_members.setdefault(alike, []).append(number)
        shapes = [tuple(one.engine.storage(one.param).shape) for one in members]
        stages = [of_member.stages for of_member in settings]
        self.on_weights = frozenset(n for n, of in enumerate(stages) if any(isinstance(one, WeightStage) for one in of))
        # For each parameter, its ranks except those that can lack its gradient because their shard is empty.
        alike_on = [
            tuple(rank for rank, pieces in layout.pieces.items() if pieces or not claim.empty_lacks_gradient)
            for claim, layout in zip(table.claims, table.layouts, strict=True)
        ]
        self.lacking = {of: [n for n in numbers if alike_on[n] != of] for of, numbers in table.sets.items()}
        self.elsewhere = frozenset(n for numbers in self.lacking.values() for n in numbers if rank not in alike_on[n])
        self.alike, self.bits, self.num_bits = {ranks: list[int]() for ranks in table.sets}, dict[int, int](), 0
        for number in itertools.chain.from_iterable(table.sets.values()):
            if number not in self.elsewhere:
                self.alike.setdefault(alike_on[number], []).append(number)
        buckets = [(bucket, members[plan.items[bucket.items[0]].param].param.device) for bucket in self.buckets]
        # `buckets_without` and `weight_sets` cache their results for two sets of parameters: all parameters, and the
        # parameters that had gradients in the last step. `weight_sets` also caches its result for the parameters whose
        # weight norms have yet to be computed.
        self.buckets_without = lru_cache(maxsize=2)(partial(Buckets, plan, rank, shapes, buckets, ns_device))
        self.weight_sets = lru_cache(maxsize=3)(
            lambda numbers: WeightSet.of_rank(plan, {n: stages[n] for n in sorted(numbers)}, rank, shapes)
        )

    def number_bits(self, everyone: Sequence[Mapping[Ranks, int]]) -> None:
        """Assign a bit of the vote to each parameter in `lacking`. Different parameters get different bits, even if
        they are stored on different ranks.

        Args:
            everyone: One dict per rank. It maps a set of ranks to the number of parameters in `lacking` that are
                sharded or replicated over this set.

        Raises:
            Refused: The ranks have more parameters in `lacking` than a vote has bits.
        """
        counts = {ranks: count for theirs in everyone for ranks, count in theirs.items()}
        if sum(counts.values()) > MOST_BITS:
            raise Refused(
                f"{sum(counts.values())} parameters may lack a gradient on ranks that store nothing of them, and a "
                f"vote has room for {MOST_BITS}. Step them in several optimizers"
            )
        for ranks in in_order(counts):
            self.bits.update((n, bit) for bit, n in enumerate(self.lacking.get(ranks, ()), self.num_bits))
            self.num_bits += counts[ranks]


class Offer:
    """This rank's contribution to a plan that all ranks make together.

    Args:
        groups: The optimizer's parameter groups.
        options: Settings of each group; None for groups that AdamW updates.
        config: Options of the whole optimizer.
        keeper: Object that creates and converts stored momentum.

    Attributes:
        ns_device: Device on which this rank orthogonalizes matrices. It is the accelerator if parameters are offloaded
            to the CPU. None means the device of each parameter.
        listed: This rank's parameters that Muon updates.
        stamp: Text that lists the properties of this machine that affect the bits of matrix products.
        refs: Dict from a tuple of ranks to a process group of exactly these ranks, found in a parameter or its options.
            If there are several such groups, the one whose name comes first alphabetically is used.
    """

    def __init__(
        self, groups: Sequence[Group], options: Sequence[Settings | None], config: MuonConfig, keeper: Keeper
    ) -> None:
        self._groups, self._options, self._config, self._keeper = groups, options, config, keeper
        homes = (offloaded_from(p) for group in groups if group["use_muon"] for p in group["params"])
        self.ns_device = next((home for home in homes if home is not None), None)
        self.listed, self.refs, whole = list[Listed](), dict[Ranks, GroupRef](), config.text()
        for index, (group, settings) in enumerate(zip(groups, options, strict=True)):
            named = bool(names_of(group)) or keeper.rounds
            for name, p in named_params(group, index):
                with about(name):
                    if settings is None:
                        UnitPlace.refuse_flat(p)
                    # `listed` includes frozen parameters that have a gradient
                    elif p.requires_grad or p.grad is not None:
                        text = f"{settings.batch} {whole} weights={p.dtype} products={self._products(p)}"
                        self.listed.append(Listed(name, name if named else "", p, group, settings.view, text))
                        self._add_refs(map(GroupRef.of, engine_for(p, group).groups(p, group)))
        where = self.ns_device or (self.listed[0].param.device if self.listed else torch.device("cpu"))
        # The stamp contains torch's global precision flags only for the method "torch", because no other method's
        # results depend on them.
        self.stamp = machine_stamp(where, flags=config.method == "torch")

    def _products(self, param: Tensor) -> torch.dtype:
        """Return the dtype in which a parameter's matrices are multiplied when they are orthogonalized. On CPUs, the
        default dtype depends on hardware support, which can differ between ranks."""
        method = "standard" if self._config.method == "auto" else self._config.method
        return products_dtype(method, self._config.ns_dtype, self.ns_device or param.device)

    def _add_refs(self, refs: Iterable[GroupRef | None]) -> None:
        for ref in refs:
            if ref is not None and ref.group_name and ref.ranks and ref.ranks == tuple(sorted(ref.ranks)):
                self.refs[ref.ranks] = min(self.refs.get(ref.ranks, ref), ref, key=lambda one: one.group_name)

    def bind(self, rank: int, table: Table) -> Binding:
        """Make a plan for the parameters in `table`, the layout table that all ranks have built together. Return the
        plan with this rank's parameters, as a `Binding`."""
        of_group = {id(group): number for number, group in enumerate(self._groups)}
        members, specs, settings, known = [], [], [], dict[tuple[ParamLayout, str], ParamLayout]()
        for one, claim, layout in zip(table.params, table.claims, table.layouts, strict=True):
            number, engine, param = of_group[id(one.group)], engine_for(one.param, one.group), one.param
            kept = partial(_kept_layout, known, engine, claim, layout)
            of_member = self._options[number]
            assert of_member is not None, "a group of matrices"
            settings.append(of_member)
            doubles = param.dtype == torch.float64
            specs.append(
                make_spec(one.name, layout, of_member, self._config, param.device, self.ns_device, doubles, kept)
            )
            members.append(Member(param, number, one.name, one.identity, engine, engine.signature(param)))
            if self._keeper.dtype == "int8":
                check_blocks(one.name, layout)
        machines: dict[str, list[int]] = {}
        for other, stamp in sorted(table.stamps.items()):
            machines.setdefault(stamp, []).append(other)
        policy = Policy(self._config.bucket_bytes, Machine.slowest(table.stamps.values()), each=len(machines) < 2)
        plan = make_plan(specs, policy)
        if len(machines) > 1:
            unlike = "; ".join(f"ranks {ranks_text(tuple(those))} have {kind}" for kind, those in machines.items())
            note = f"machines differ: {unlike}. Each matrix has one owner; another one would give it other bits"
            plan = replace(plan, notes=(*plan.notes, note))
        planned = ["" if of_options is None else of_options.planned for of_options in self._options]
        return Binding(rank, table, plan, tuple(members), settings, planned, self.ns_device)


def _kept_layout(
    known: dict[tuple[ParamLayout, str], ParamLayout], engine: Engine, claim: Claim, layout: ParamLayout, stage: Stage
) -> ParamLayout:
    """Return the layout of the state tensor in which a post-processing stage of a Muon variant (such as NorMuon's)
    stores its state for a parameter. `known` caches layouts, so that parameters with equal layouts share one object."""
    key = layout, stage.key
    if key not in known:
        numbers = [stage.num_kept(m.rows, m.cols) for m in layout.view.matrices]
        if engine.believes_placements:
            known[key] = claim.form[1].kept(layout, numbers)
        else:
            known[key] = ParamLayout.replicated(layout.view.kept(numbers), layout.ranks)
    return known[key]


def make_spec(
    name: str,
    layout: ParamLayout,
    settings: Settings,
    config: MuonConfig,
    device: torch.device,
    ns_device: torch.device | None,
    doubles: bool,
    kept_of: Callable[[Stage], ParamLayout],
) -> Spec:
    """Make the `Spec` of one parameter, which is the planner's input.

    Args:
        name: Name of the parameter in messages.
        layout: Layout of the parameter, which lists the pieces that each rank stores.
        settings: Settings of the parameter's group.
        config: Options of the whole optimizer, which determine how each matrix is orthogonalized.
        device: Device of the parameter.
        ns_device: Device on which the matrices are orthogonalized. If None, the parameter's device.
        doubles: True if the parameter is fp64.
        kept_of: Function that takes a post-processing stage of the parameter's Muon variant and returns the layout of
            the stage's state tensor.
    """
    at, steps = ns_device or device, settings.coefficients
    shapes = [(m.rows, m.cols) for m in layout.view.matrices]
    made = {shape: Choice.made(config.method, config.ns_dtype, shape, steps, at) for shape in dict.fromkeys(shapes)}
    work = {shape: flops(choice.method, *shape, steps, choice.dtype, at) for shape, choice in made.items()}
    choices = tuple(made[shape] for shape in shapes)
    # Number of bytes that each matrix element takes when the matrix is sent to other ranks. The number is 8 for fp64
    # parameters, because their gradients can exceed the range of fp32.
    sizes = tuple(8 if doubles or config.ns_dtype == torch.float64 else choice.dtype.itemsize for choice in choices)
    kept = tuple(Kept(kept_of(stage), stage.travels) for stage in keeping(settings.stages))
    return Spec(name, layout, choices, tuple(work[shape] for shape in shapes), sizes, settings.batch, device.type, kept)


def fingerprint(storage: Tensor) -> int:
    """Compute a 64-bit hash of a tensor's bits and their order. Equal tensors on devices of the same type have equal
    hashes.

    The hash is a sum over all 8-byte words. Each word is first mixed with its position by a bijection in which every
    output bit depends on every input bit (`stores.mix_`). Therefore a change of one word is always detected, and
    changes of several words cancel with a probability of only 2**-64. Multiplying each word by its position would not
    suffice: changes of +1, -1, -1 and +1 in four neighboring words would cancel.
    """
    flat = storage.detach().reshape(-1)
    # `cat` pads the tensor to whole 8-byte words and copies it to aligned memory, as required for viewing it as int64
    words = torch.cat([flat, flat.new_zeros(-len(flat) % (8 // flat.element_size()))]).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # number of 8-byte words to hash at a time; on CPUs, a chunk of this size fits in the cache
    chunk = 1 << 15 if flat.device.type == "cpu" else 1 << 22
    for start, part in zip(range(1, len(words) + 1, chunk), words.split(chunk), strict=False):
        places = torch.arange(start, start + len(part), device=flat.device, dtype=torch.int64)
        total += mix_(places, part).sum()  # the sum of hashed words wraps around modulo 2**64
    return int(total.item())
