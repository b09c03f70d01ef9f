"""Megatron's optimizer classes around shardmuon: the tensors that they step, and the state in their checkpoints.

Every private attribute of Megatron's optimizers that shardmuon reads or overrides is in this file.

[Note: what Megatron steps]
    Each bucket of a gradient buffer is cut into equal parts, one per data-parallel rank; a cut can go through a matrix.
    `DistributedOptimizer` replaces the parameters in the optimizer's groups by 1-D shards, one for each parameter with
    elements in this rank's parts (`model_param_gbuf_map`, `_get_model_param_range_map`), in an order that differs by
    rank. A shard is a view of an fp32 parameter, or an fp32 copy for other dtypes. This module changes the groups: they
    get shards of all matrices, in the same order on every rank, some of them empty. The optimizer steps these shards
    like other flat shards. Without the distributed optimizer, every replica has all main weights, which are stepped as
    parameters.

[Note: checkpoints]
    All of Megatron's formats read and write state through two methods, which know only Adam's two state names. Momentum
    is saved as `exp_avg`; `exp_avg_sq` of a matrix is zeros, created on access. There is one step count, stored as the
    option ``step`` of every group and in every parameter's state.

[Note: what stages keep here]
    `sharded_state_dict` describes each tensor of an optimizer's state by the shape and shards of its parameter, and
    fails for a tensor of another shape. A variant's state per matrix (such as NorMuon's) has another shape, and is the
    same on all ranks that share the matrix, even if a rank's shard is empty. So this state is saved in the groups, by
    parameter name (see step/kept.py). This is sufficient if each model-parallel rank saves its own groups, as in the
    formats that follow the distributed optimizer's buffers. If rank 0 saves its groups for all ranks, however, ranks
    with other parameters would lose their state, so saving raises an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef
from shardmuon.comm.vote import Fault, run_together
from shardmuon.errors import about
from shardmuon.host import Host, Stepped, Weight, caller
from shardmuon.layout.engines.flat import FlatShard, mark_flat
from shardmuon.layout.engines.tensor_parallel import cut_of
from shardmuon.momentum.keeper import BUFFER
from shardmuon.muon import Muon
from shardmuon.options import loaded_over
from shardmuon.step.kept import carry, carry_by_position, check_carried, take_carried
from shardmuon.variants import KEPT_KEYS, keeping, stages_of

_KeptByName = dict[str, dict[str, Tensor]]  # parameter name -> state key -> tensor


class WholeHost(Host):
    """Integration with Megatron's wrappers in which every replica has all main weights. A variant's state per matrix is
    saved in the groups.

    Args:
        elsewhere: True if some ranks have other parameters than rank 0. `sharded_state_dict`, which saves only the
            groups of rank 0, then raises ValueError if there is state to save in them.
    """

    packages = ()

    def __init__(self, elsewhere: bool) -> None:
        self._elsewhere = elsewhere

    def saved(self, core: Stepped, saved: dict[str, Any]) -> None:
        keys = sorted({key for state in saved["state"].values() for key in state if key in KEPT_KEYS})
        if keys and self._elsewhere and caller("sharded_state_dict", "megatron") is not None:
            raise ValueError(
                f"the optimizer's variant keeps {', '.join(keys)}, which Megatron's dist_checkpointing saves from rank "
                "0 alone, and with pipeline or expert parallelism other ranks have parameters of their own. Save "
                "optimizer.state_dict() on every model-parallel rank (--ckpt-format torch), or leave the variant out"
            )
        carry_by_position(core.param_groups, saved)


# --------------------------------------------------------------------------------------------- flat shards


class _Unfinished(Host):
    """Temporary integration while Megatron's wrapper is being made. The wrapper saves and loads the optimizer's state
    before the shards in its groups have been described."""

    @property
    def is_active(self) -> bool:
        return True


class _ShardHost(_Unfinished):
    """Integration with Megatron's distributed optimizer.

    Args:
        core: Optimizer whose groups contain shards of all matrices, including empty shards. Parameters of different
            model chunks may have the same name; names are made unique.
        shards: Model parameter -> its fp32 shard, for parameters of which this rank has elements.
    """

    clipping = "these gradients are Megatron's, which clips them before step(): set clip_grad in OptimizerConfig"

    def __init__(self, core: Stepped, shards: Mapping[Tensor, Tensor]) -> None:
        self.shards, self._count = shards, 0
        seen: Counter[str] = Counter()
        for group in core.param_groups:
            if not group["use_muon"]:  # AdamW's shards have no replicas, so they need no process group
                group["process_group"] = GroupRef(())
            names, group["param_names"] = group["param_names"], []
            for name in names:
                group["param_names"].append(f"{name}#{seen[name]}" if seen[name] else name)
                seen[name] += 1
        # a checkpoint lacks these options, or has the values of the rank that wrote it
        own = ("tp_group", "process_group", "param_names")
        self._own_options = [{key: group[key] for key in own} for group in core.param_groups]
        self._restore(core)

    def take_over(self, core: Stepped, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict as torch does, and also the variant's state per matrix in its groups. Collective over all
        ranks."""
        kept, self._count = run_together(lambda: self._checked(core, state_dict["param_groups"]))
        super().take_over(core, state_dict)
        for weight in self.weights(core):  # Megatron passes in existing state: remove the old values
            state = core.state[weight.stored]
            for key in KEPT_KEYS:
                state.pop(key, None)
            # make new tensors, on all ranks at once, since all must agree on the norms that a step has already seen
            state.update({k: v.to(weight.stored.device, copy=True) for k, v in kept.get(weight.name, {}).items()})
        self._restore(core)

    def _checked(self, core: Stepped, packed: Sequence[Mapping[str, Any]]) -> tuple[_KeptByName, int]:
        """Check the saved groups. Returns the variant's state per matrix, by parameter name, and the step count.

        Raises:
            ValueError: State that the variant needs is missing although steps were taken, or step counts differ.
        """
        kept = take_carried([dict(group) for group in packed])
        for group, theirs in zip(core.param_groups, packed, strict=True):
            loaded = loaded_over(group, theirs)
            for name in group["param_names"] if group["use_muon"] and loaded.get("step") else ():
                check_carried(name, loaded, kept.get(name, {}))
        counts = {int(group["step"]) for group in packed if group.get("step") is not None}
        if len(counts) > 1:
            raise ValueError(f"the state dict's groups have taken {sorted(counts)} steps. All must have taken as many")
        return kept, max(counts, default=self._count)

    def _restore(self, core: Stepped) -> None:
        """Restore this rank's own options, and give each parameter a separate step counter, after groups and state were
        loaded. In the state that Megatron loads, all parameters share one counter or have none."""
        for group, own in zip(core.param_groups, self._own_options, strict=True):
            group.update(own)
        take_carried(core.param_groups)
        core.complete_state()
        for group in core.param_groups:
            group["step"] = self._count
            for param in group["params"]:
                core.state[param]["step"] = torch.tensor(self._count, dtype=torch.float32, device="cpu")

    def saved(self, core: Stepped, saved: dict[str, Any]) -> None:
        """Put the variant's state per matrix into the first saved group, by parameter name, because Megatron's
        checkpoints save only Adam's kinds of state."""
        carry(saved["param_groups"][0], {weight.name: core.state[weight.stored] for weight in self.weights(core)})

    def step(self, core: Stepped, fault: Fault) -> None:
        core.take_step(fault)
        self._count += 1
        for weight in self.weights(core):
            core.state[weight.stored]["step"] += 1
        for group in core.param_groups:
            group["step"] = self._count

    def weights(self, core: Stepped) -> list[Weight]:
        """List the shards of matrices, without AdamW's parameters."""
        return [
            Weight(name, shard, shard, group)
            for group in core.param_groups
            if group["use_muon"]
            for name, shard in zip(group["param_names"], group["params"], strict=True)
        ]


def _optimizer_class(base: type) -> type:
    class Distributed(base):  # type: ignore[misc]
        """Megatron's `DistributedOptimizer` around a `shardmuon.Muon`. `shardmuon`: the object that holds the
        optimizer's shards."""

        optimizer_state_keys = ("exp_avg", "exp_avg_sq")
        shardmuon: _ShardHost

        def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
            shard = self.shardmuon.shards[model_param]
            state = self.optimizer.state[shard]
            if BUFFER in state:
                return {"param": shard, "exp_avg": state[BUFFER], "exp_avg_sq": torch.zeros_like(shard)}
            return {"param": shard, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

        @torch.no_grad()
        def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: Mapping[str, Tensor]) -> None:
            for key, value in self._get_main_param_and_optimizer_states(model_param).items():
                value.copy_(tensors[key])

        def sharded_state_dict(
            self, model_sharded_state_dict: Any = None, is_loading: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            made = super().sharded_state_dict(model_sharded_state_dict, is_loading, *args, **kwargs)
            kind = made["param_state_sharding_type"]
            keeps = [group["variant"] for group in self.optimizer.param_groups if keeping(stages_of(group))]
            if keeps and not is_loading and kind in self.checkpoint_fully_reshardable_formats:
                raise ValueError(
                    f"variant={keeps[0]!r} keeps state of its own, and of distrib_optim_sharding_type={kind!r} "
                    "Megatron saves the groups, which carry it, from rank 0 alone. Save with "
                    "distrib_optim_sharding_type='dp_reshardable', or leave the variant out"
                )
            return made

    return Distributed


def distributed_optimizer(
    base: type,  # Megatron's DistributedOptimizer
    muon: Muon,
    *args: Any,  # other positional arguments of `base`, up to init_state_fn
    process_group: Any,
    tp_group: Any,
    **kwargs: Any,
) -> Any:
    """Wrap an optimizer in Megatron's distributed optimizer.

    Args:
        base: Megatron's `DistributedOptimizer`.
        muon: Optimizer whose groups hold the model's parameters; the parameters are replaced by shards.
        *args, **kwargs: Other arguments of `base`.
        process_group: Ranks over which the parameters are replicated, in all optimizer instances together.
        tp_group: Tensor-parallel group of the parameters, or None.
    """
    made = [list(group["params"]) for group in muon.param_groups]
    muon.hosts.insert(0, _Unfinished())
    with torch.no_grad():  # otherwise shards of fp32 parameters would not be leaves
        wrapped = _optimizer_class(base)(muon, *args, **kwargs)
    shards: dict[Tensor, Tensor] = {}
    for whole, cut in (
        (wrapped.model_fp32_groups, wrapped.shard_fp32_groups),
        (wrapped.model_float16_groups, wrapped.shard_fp32_from_float16_groups),
    ):
        for params, parts in zip(whole, cut, strict=True):
            shards |= dict(zip(params, parts, strict=True))
    for part in shards.values():
        part.requires_grad_(True)  # otherwise shards would count as frozen
    for index, (group, params) in enumerate(zip(muon.param_groups, made, strict=True)):
        if group["use_muon"]:  # AdamW's groups keep the shards that Megatron put there
            group["params"] = []
            for order, param in enumerate(params):
                shard, start = shards.get(param), 0
                if shard is None:
                    shard = torch.empty(0, dtype=torch.float32, device=param.device, requires_grad=True)
                    shard.grad = torch.empty_like(shard)  # Megatron unscales all gradients, but sets none here
                else:
                    start = wrapped._get_model_param_range_map(param)["param"].start
                    wrapped.model_param_group_index_map[param] = index, order
                group["params"].append(mark_flat(shard, _flat_shard(param, start, process_group, tp_group)))
    wrapped.shardmuon = muon.hosts[0] = _ShardHost(muon, shards)
    return wrapped


def _flat_shard(param: Tensor, start: int, process_group: Any, tp_group: Any) -> FlatShard:
    """Describe a shard that begins at element `start` of the flattened parameter. Raises ValueError if the parameter's
    tensor-parallel attributes (`partition_dim`, `partition_stride`) are invalid."""
    shards = GroupRef.of(tp_group, "tp_group")
    cut = None if shards is None else cut_of(param)
    shape = list(param.shape)
    if cut is not None and shards is not None:
        shape[cut.dim] *= len(shards.ranks)
    kind = "shards of Megatron's distributed optimizer"
    return FlatShard(tuple(shape), start, GroupRef.of(process_group), kind, shards, cut)


def check_shards(groups: Sequence[Mapping[str, Any]], tp_group: Any) -> None:
    """Raise ValueError, with the parameter's name, if a matrix has invalid tensor-parallel attributes."""
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True) if group["use_muon"] else ():
            with about(name):
                _flat_shard(param, 0, None, tp_group)
