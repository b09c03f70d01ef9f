"""A step on the flat shards that Megatron's distributed optimizer puts in the parameters' place.

Megatron gives the optimizer the shards that this rank holds, in an order of its own. buffers.py puts those of all
matrices in the groups, in one order on every rank, some of them empty; then the optimizer steps them as any others.

[Note: counts]
    Megatron's checkpoints keep one count of steps, as the option ``step`` of every group and of every state.

[Note: what stages keep here]
    All of it is on every rank that shares the matrix, also where the shard is empty. State that Megatron loads is what
    there was before, so what is kept comes from the saved groups alone (`shardmuon.step.kept`), by name. Taken over as
    new tensors on every rank at once: which norms a step has looked at must be the same on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardmuon.comm.vote import Fault
from shardmuon.host import Host, Progress, Weight
from shardmuon.step.kept import carry, kept_in, take_carried
from shardmuon.variants import KEPT_KEYS, keeping, stages_of

if TYPE_CHECKING:
    from shardmuon.core import Core


class ShardHost(Host):
    """Host for Megatron's distributed optimizer. Made before the shards take their place; `attach` says that they have.

    Args:
        core: The optimizer, with the model's parameters. Model chunks may have some of one name: names become unique.
    """

    has_copies = True
    clipping = "these gradients are Megatron's, which clips them before step(): set clip_grad in OptimizerConfig"

    def __init__(self, core: Core) -> None:
        seen: Counter[str] = Counter()
        for group in core.param_groups:
            group["rank_local"] = not group["use_muon"]  # AdamW's shards are replicas of nothing
            names, group["param_names"] = group["param_names"], []
            for name in names:
                group["param_names"].append(f"{name}#{seen[name]}" if seen[name] else name)
                seen[name] += 1
        # A checkpoint has those of the rank that wrote it, or none.
        own = ("tp_group", "process_group", "rank_local", "param_names")
        self._own_options = [{key: group[key] for key in own} for group in core.param_groups]
        self._count, self._attached = 0, False

    @property
    def is_active(self) -> bool:
        return True

    def attach(self, core: Core) -> None:
        """Take over groups that now hold shards of all their parameters, empty ones where this rank has nothing."""
        self._attached = True
        self._restore(core)
        self._fill_gradients(core)

    def take_over(self, core: Core, state_dict: Mapping[str, Any]) -> None:
        super().take_over(core, state_dict)
        if self._attached:
            self._restore(core)

    def _restore(self, core: Core) -> None:
        """Restore this rank's options, what stages keep and a counter for each parameter, once groups and state were
        loaded. Megatron's loaded state shares one counter among all, or has none."""
        groups = core.param_groups
        for group, own in zip(groups, self._own_options, strict=True):
            group.update(own)
        counts = {int(group["step"]) for group in groups if group.get("step") is not None}
        if len(counts) > 1:
            raise ValueError(f"the state dict's groups have taken {sorted(counts)} steps. All must have taken as many")
        self._count = max(counts, default=self._count)
        carried = take_carried(groups)
        for weight in self.weights(core):
            state = core.state[weight.stored]
            for key in KEPT_KEYS:
                state.pop(key, None)
            kept = carried.get(weight.name, {})
            state.update({key: value.to(weight.stored.device, copy=True) for key, value in kept.items()})
        with torch.no_grad():
            core.complete_state()
        for group in groups:
            group["step"] = self._count
            for param in group["params"]:
                core.state[param]["step"] = torch.tensor(self._count, dtype=torch.float32, device="cpu")

    def saved(self, core: Core, saved: dict[str, Any]) -> None:
        """Let the groups carry what stages keep, on the CPU, where files are read: Megatron's checkpoints have no place
        for it beside Adam's state."""
        for packed, group in zip(saved["param_groups"], core.param_groups, strict=True):
            if keeping(stages_of(packed)):
                mine = [weight for weight in self.weights(core) if weight.group is group]
                kept = {w.name: {key: v.cpu() for key, v in kept_in(core.state[w.stored]).items()} for w in mine}
                carry(packed, kept)

    def instead_of_step(self, core: Core, plain: bool) -> Callable[[], None] | None:
        """Give empty shards their gradients; it is always a step."""
        self._fill_gradients(core)
        return None

    def _fill_gradients(self, core: Core) -> None:
        """Give empty shards empty gradients, as no gradient reaches them."""
        for weight in self.weights(core):
            if not weight.stored.numel():
                weight.stored.grad = torch.empty_like(weight.stored)

    def step(self, core: Core, progress: Progress, fault: Fault) -> None:
        core.take_step(fault)
        self._count += 1
        for weight in self.weights(core):
            core.state[weight.stored]["step"] += 1
        for group in core.param_groups:
            group["step"] = self._count

    def weights(self, core: Core) -> list[Weight]:
        """Weights of the matrices. None before Megatron is made, which saves and loads to make itself."""
        return [
            Weight(name, shard, shard, group)
            for group in core.param_groups
            if group["use_muon"] and self._attached
            for name, shard in zip(group["param_names"], group["params"], strict=True)
        ]
