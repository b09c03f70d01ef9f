"""A step on the flat shards that Megatron's distributed optimizer puts in the parameters' place.

Megatron gives the optimizer the shards that this rank holds, in an order of its own. An *inner* optimizer with the
outer one's options has those of all matrices, in one order on every rank, some of them empty (engines/flat.py).
Momentum is the outer optimizer's state, so Megatron finds and saves it there.

[Note: counts]
    Megatron's checkpoints keep one count of steps, as the option ``step`` of every group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.frameworks.guards import adamw_fault, raised_by, step_inner
from shardmuon.host import Host, Weight
from shardmuon.momentum.keeper import BUFFER
from shardmuon.options import Storage
from shardmuon.variants import keeping, stages_of

if TYPE_CHECKING:
    from shardmuon.core import Core, Course
    from shardmuon.planning.plan import Plan


class ShardHost(Host):
    """Megatron's distributed optimizer. Made before the shards take their place; `attach` says which they are.

    Args:
        core: The outer optimizer, with the model's parameters.
    """

    has_copies = True
    clipping = "these gradients are Megatron's, which clips them before step(): set clip_grad in OptimizerConfig"

    def __init__(self, core: Core) -> None:
        own = ("tp_group", "process_group", "param_names")  # a checkpoint has those of the rank that wrote it, or none
        self._own_options = [{key: group[key] for key in own} for group in core.param_groups]
        self._shards: list[Sequence[Tensor]] = []
        self._muon: Core | None = None
        self._count, self._loaded = 0, False

    @property
    def is_active(self) -> bool:
        return True

    @property
    def plans(self) -> tuple[Plan, ...]:
        return () if self._muon is None or self._muon.binding is None else (self._muon.binding.plan,)

    def attach(self, core: Core, shards: Sequence[Sequence[Tensor]]) -> None:
        """The shards are in the groups now.

        Args:
            core: The outer optimizer.
            shards: For each Muon group the shards of all its parameters, in their order, and nothing for the others.
                They are empty where this rank holds nothing.
        """
        self._shards = list(shards)
        self.replaced(core.param_groups)
        self._restore_counts(core)
        self._muon = core.over(self._groups(core), core.audits)

    def replaced(self, groups: Sequence[dict[str, Any]]) -> None:
        """State and groups have been loaded."""
        for group, own in zip(groups, self._own_options, strict=True):
            group.update(own)
        counts = {int(group["step"]) for group in groups if group.get("step") is not None}
        if len(counts) > 1:
            raise ValueError(f"the state dict's groups have taken {sorted(counts)} steps. All must have taken as many")
        self._count, self._loaded = max(counts, default=self._count), True

    def prepare(self, core: Core) -> Plan:
        assert self._muon is not None, "attached"
        return self._muon.make_plan(raised_by(lambda: self._refresh_inner(core)))

    def _groups(self, core: Core) -> list[dict[str, Any]]:
        """The inner optimizer's: all matrices, with the outer one's options as they are now."""
        return [
            {**group, "params": list(shards)}
            for group, shards in zip(core.param_groups, self._shards, strict=True)
            if group["use_muon"]
        ]

    def _refresh_inner(self, core: Core) -> None:
        """Show the inner optimizer the options, gradients and state as they are now."""
        assert self._muon is not None, "attached"
        if self._loaded:
            self._restore_counts(core)
        for mine, current in zip(self._muon.param_groups, self._groups(core), strict=True):
            mine.update(current)  # learning-rate schedules write to the outer group
        for shard in self._all():
            self._muon.state[shard] = core.state[shard] if shard.numel() else {BUFFER: torch.empty_like(shard)}
        present = [shard for shard in self._all() if shard.numel()]
        if not present or any(shard.grad is not None for shard in present):
            for shard in self._all():
                if not shard.numel():  # no gradient reaches what is not there
                    shard.grad = torch.empty_like(shard)
        wrong = adamw_fault(core.param_groups, "Megatron")
        if wrong is not None:
            raise ValueError(wrong)

    def _all(self) -> list[Tensor]:
        return [shard for shards in self._shards for shard in shards]

    def step(self, core: Core, course: Course, early: BaseException | None) -> None:
        """Step the matrices; AdamW's groups are the outer optimizer's own."""
        assert self._muon is not None, "attached"
        wrong = raised_by(lambda: self._refresh_inner(core))
        step_inner(self._muon, course, early or wrong)
        self._count += 1
        for shard in self._all():
            if shard.numel():
                core.state[shard]["step"] += 1
        for group in core.param_groups:
            group["step"] = self._count

    def weights(self, core: Core) -> list[Weight]:
        """The matrices'."""
        return [
            Weight(name, shard, shard, group)
            for group, shards in zip(core.param_groups, self._shards, strict=True)
            if group["use_muon"]
            for name, shard in zip(group["param_names"], shards, strict=True)
        ]

    def _restore_counts(self, core: Core) -> None:
        """Each parameter its own counter: Megatron's loaded state shares one among all, or has none."""
        with torch.no_grad():
            core.complete_state()
        for group in core.param_groups:
            group["step"] = self._count
            for param in group["params"]:
                core.state[param]["step"] = torch.tensor(self._count, dtype=torch.float32, device="cpu")
        self._loaded = False


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of `Muon` that do not go with flat shards."""
    storage = options.get("storage", Storage())
    if replace(storage, rounding_seed=0) not in (Storage(), Storage(momentum_dtype=torch.float32)):
        raise ValueError(
            f"storage={storage!r}: Megatron's distributed optimizer keeps fp32 shards of weights and state. Leave "
            "storage out"
        )
    kept = [stage.key for stage in keeping(stages_of(options))]
    if kept:
        raise ValueError(
            f"variant={options['variant']!r} keeps {kept[0]}, for which checkpoints of Megatron's distributed "
            "optimizer have no place: it would be lost. Set use_distributed_optimizer=False, or leave the variant out"
        )
