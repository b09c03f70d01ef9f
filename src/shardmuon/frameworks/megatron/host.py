"""A step on the flat shards that Megatron's distributed optimizer puts in the parameters' place.

Megatron gives the optimizer the shards that this rank holds, in an order of its own. An *inner* optimizer with the
outer one's options has those of all matrices, in one order on every rank, some of them empty (engines/flat.py).
Momentum is the outer optimizer's state, so Megatron finds and saves it there.

[Note: counts]
    Megatron's checkpoints keep one count of steps, as the option ``step`` of every group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.frameworks.deepspeed.host import Course, ZeroSteps, adamw_fault, raised_by
from shardmuon.momentum.keeper import BUFFER

if TYPE_CHECKING:
    from shardmuon.muon import Muon
    from shardmuon.planning.plan import Plan


class ShardSteps(ZeroSteps):
    """The inner optimizer of one `Muon`. Made before the shards take their place; `settle` says which they are.

    Args:
        optimizer: The outer optimizer, with the model's parameters.
    """

    in_parts = False
    clipping = "these gradients are Megatron's, which clips them before step(): set clip_grad in OptimizerConfig"

    def __init__(self, optimizer: Muon) -> None:
        super().__init__()
        own = ("tp_group", "process_group", "param_names")  # a checkpoint has those of the rank that wrote it, or none
        self._own_options = [{key: group[key] for key in own} for group in optimizer.param_groups]
        self._shards: list[Sequence[Tensor]] = []
        self._muon: Muon | None = None
        self._count, self._loaded = 0, False

    @property
    def is_active(self) -> bool:
        return True

    @property
    def plans(self) -> tuple[Plan, ...]:
        return () if self._muon is None else self._muon.plans

    def settle(self, optimizer: Muon, shards: Sequence[Sequence[Tensor]]) -> None:
        """The shards are in the groups now.

        Args:
            optimizer: The outer optimizer.
            shards: For each Muon group the shards of all its parameters, in their order, and nothing for the others.
                They are empty where this rank holds nothing.
        """
        self._shards = list(shards)
        self.replaced(optimizer.param_groups)
        self._restore_counts(optimizer)
        self._muon = self._make(optimizer, self._groups(optimizer))
        self._muon._audits = optimizer._audits

    def replaced(self, groups: Sequence[dict[str, Any]]) -> None:
        """State and groups have been loaded."""
        for group, own in zip(groups, self._own_options, strict=True):
            group.update(own)
        counts = {int(group["step"]) for group in groups if group.get("step") is not None}
        if len(counts) > 1:
            raise ValueError(f"the state dict's groups have taken {sorted(counts)} steps. All must have taken as many")
        self._count, self._loaded = max(counts, default=self._count), True

    def restore_groups(self, optimizer: Muon) -> None:
        """Megatron leaves them as they are."""

    def saved(self) -> None:
        """Megatron's checkpoints hold all of it."""

    @property
    def plan(self) -> Plan | None:
        return next(iter(self.plans), None)

    def prepare(self, optimizer: Muon) -> Plan:
        assert self._muon is not None, "settled"
        return self._muon._prepare(raised_by(lambda: self._refresh_inner(optimizer)))

    def _groups(self, optimizer: Muon) -> list[dict[str, Any]]:
        """The inner optimizer's: all matrices, with the outer one's options as they are now."""
        return [
            {**group, "params": list(shards)}
            for group, shards in zip(optimizer.param_groups, self._shards, strict=True)
            if group["use_muon"]
        ]

    def _refresh_inner(self, optimizer: Muon) -> None:
        """Show the inner optimizer the options, gradients and state as they are now."""
        assert self._muon is not None, "settled"
        if self._loaded:
            self._restore_counts(optimizer)
        for mine, current in zip(self._muon.param_groups, self._groups(optimizer), strict=True):
            mine.update(current)  # learning-rate schedules write to the outer group
        for shard in self._all():
            self._muon.state[shard] = optimizer.state[shard] if shard.numel() else {BUFFER: torch.empty_like(shard)}
        present = [shard for shard in self._all() if shard.numel()]
        if not present or any(shard.grad is not None for shard in present):
            for shard in self._all():
                if not shard.numel():  # no gradient reaches what is not there
                    shard.grad = torch.empty_like(shard)
        wrong = adamw_fault(optimizer.param_groups)
        if wrong is not None:
            raise ValueError(wrong)

    def _all(self) -> list[Tensor]:
        return [shard for shards in self._shards for shard in shards]

    def step(self, optimizer: Muon, course: Course, early: BaseException | None) -> None:
        """Step the matrices; AdamW's groups are the outer optimizer's own."""
        assert self._muon is not None, "settled"
        wrong = raised_by(lambda: self._refresh_inner(optimizer))
        self._step_inner(self._muon, course, early or wrong)
        self._count += 1
        for shard in self._all():
            if shard.numel():
                optimizer.state[shard]["step"] += 1
        for group in optimizer.param_groups:
            group["step"] = self._count

    def _restore_counts(self, optimizer: Muon) -> None:
        """Each parameter its own counter: Megatron's loaded state shares one among all, or has none."""
        with torch.no_grad():
            optimizer._complete_state()
        for group in optimizer.param_groups:
            group["step"] = self._count
            for param in group["params"]:
                optimizer.state[param]["step"] = torch.tensor(self._count, dtype=torch.float32, device="cpu")
        self._loaded = False


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of `Muon` that do not go with flat shards."""
    allowed = {"momentum_dtype": (None, torch.float32), "momentum_device": (None,), "stochastic_rounding": (False,)}
    for key, values in allowed.items():
        if options.get(key, values[0]) not in values:
            raise ValueError(
                f"{key}={options[key]!r}: Megatron's distributed optimizer keeps fp32 shards of weights and state. "
                f"Leave {key} out"
            )
