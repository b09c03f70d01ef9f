"""A step on the flat shards that Megatron's distributed optimizer puts in the parameters' place.

Megatron gives the optimizer the shards that this rank holds, in an order of its own. An *inner* optimizer with the
outer one's options has those of all matrices, in one order on every rank, some of them empty (layout/engines/flat.py).
Momentum is the outer optimizer's state, so Megatron finds and saves it there.

[Note: counts]
    Megatron's checkpoints keep one count of steps, as the option ``step`` of every group.

[Note: what stages keep here]
    All of it is on every rank that shares the matrix, also where the shard is empty: beside momentum in the outer
    optimizer's state, or in the inner one's for an empty shard. State that Megatron loads is what there was before, so
    what is kept comes from the saved groups alone (`shardmuon.carried`), by name. Taken over as new tensors on every
    rank at once: which norms a step has looked at must be the same on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.carried import carry, kept_in, missing_fault, take_carried
from shardmuon.frameworks.guards import adamw_fault, raised_by, step_inner
from shardmuon.host import Host, Weight
from shardmuon.momentum.keeper import BUFFER
from shardmuon.options import Storage
from shardmuon.variants import KEPT_KEYS, keeping, stages_of

if TYPE_CHECKING:
    from shardmuon.core import Core, Course
    from shardmuon.plan.plan import Plan


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
        self._carried: dict[str, dict[str, Tensor]] = {}  # name -> what stages keep, loaded and not taken over yet
        self.names = _unique([group["param_names"] if group["use_muon"] else () for group in core.param_groups])

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
        self._muon = core.over(self._groups(core), core.audits)
        self._restore(core)

    def replaced(self, groups: Sequence[dict[str, Any]]) -> None:
        """State and groups have been loaded."""
        for group, own in zip(groups, self._own_options, strict=True):
            group.update(own)
        counts = {int(group["step"]) for group in groups if group.get("step") is not None}
        if len(counts) > 1:
            raise ValueError(f"the state dict's groups have taken {sorted(counts)} steps. All must have taken as many")
        self._count, self._loaded = max(counts, default=self._count), True
        self._carried = take_carried(groups)

    def saved(self, core: Core, saved: dict[str, Any]) -> None:
        """Let the groups carry what stages keep: Megatron's checkpoints have no place for it beside Adam's state."""
        for packed, names, shards in zip(saved["param_groups"], self.names, self._shards, strict=False):
            if keeping(stages_of(packed)):
                carry(packed, {n: self._kept(core, n, shard) for n, shard in zip(names, shards, strict=True)})

    def _kept(self, core: Core, name: str, shard: Tensor) -> dict[str, Tensor]:
        """Copies on the CPU, where files are read."""
        found = self._carried.get(name, {}) if self._loaded else self._state(core, shard)
        return {key: value.cpu() for key, value in kept_in(found).items()}

    def lacking(
        self,
        groups: Sequence[Mapping[str, Any]],  # as they will be, with the options that are loaded
        kept: Mapping[str, Mapping[str, Tensor]],  # what saved groups carry, by name
    ) -> str | None:
        """What to say of the first matrix of which a checkpoint has momentum, and not what its variant keeps."""
        for group, names in zip(groups, self.names, strict=True):
            for name in names if group.get("step") else ():
                fault = missing_fault(name, group, kept.get(name, {}))
                if fault is not None:
                    return fault
        return None

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
        for mine, current in zip(self._muon.param_groups, self._groups(core), strict=True):
            mine.update(current)  # learning-rate schedules write to the outer group
        if self._loaded:
            self._restore(core)
        for shard in self._all():
            self._muon.state[shard] = self._state(core, shard)
        present = [shard for shard in self._all() if shard.numel()]
        if not present or any(shard.grad is not None for shard in present):
            for shard in self._all():
                if not shard.numel():  # no gradient reaches what is not there
                    shard.grad = torch.empty_like(shard)
        wrong = adamw_fault(core.param_groups)
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

    def keeping(self, core: Core) -> Iterable[Core]:
        return () if self._muon is None else (self._muon,)

    def _state(self, core: Core, shard: Tensor) -> MutableMapping[str, Any]:
        """Where momentum of a shard is, and what is kept of its matrices."""
        assert self._muon is not None, "attached"
        if shard.numel():
            found: MutableMapping[str, Any] = core.state[shard]
            return found
        own: MutableMapping[str, Any] = self._muon.state[shard]
        own.setdefault(BUFFER, torch.empty_like(shard))
        return own

    def _restore(self, core: Core) -> None:
        """After loading: what stages keep, and a counter for each parameter. Megatron's loaded state shares one
        counter among all, or has none."""
        assert self._muon is not None, "attached"
        for names, shards in zip(self.names, self._shards, strict=True):
            for name, shard in zip(names, shards, strict=True):
                state = self._state(core, shard)
                for key in KEPT_KEYS:
                    state.pop(key, None)
                carried = self._carried.get(name, {})
                state.update({key: value.to(shard.device, copy=True) for key, value in carried.items()})
                self._muon.state[shard] = state
        with torch.no_grad():
            core.complete_state()
            self._muon.complete_state()  # of empty shards
        for group in core.param_groups:
            group["step"] = self._count
            for param in group["params"]:
                core.state[param]["step"] = torch.tensor(self._count, dtype=torch.float32, device="cpu")
        self._loaded, self._carried = False, {}


def _unique(names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Names that differ: model chunks of one optimizer may have parameters of one name."""
    seen: Counter[str] = Counter()
    found: list[list[str]] = []
    for of_group in names:
        found.append([])
        for name in of_group:
            found[-1].append(f"{name}#{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return found


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of `Muon` that do not go with flat shards."""
    storage = options.get("storage", Storage())
    if storage not in (Storage(), Storage(momentum_dtype=torch.float32)):
        raise ValueError(
            f"storage={storage!r}: Megatron's distributed optimizer keeps fp32 shards of weights and state. Leave "
            "storage out"
        )
