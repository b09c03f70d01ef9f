"""Megatron's distributed optimizer: fp32 shards of main weights, cut anywhere out of flat buffers.

Every private attribute of Megatron's that shardmuon reads or overrides is in this file.

[Note: what Megatron steps]
    Each bucket of a gradient buffer is cut in as many equal parts as the data-parallel group has ranks, whatever matrix
    that cuts through. `DistributedOptimizer` takes the parameters out of the optimizer's groups and puts in 1-D shards
    of those that this rank's parts hold some of (`model_param_gbuf_map`, `_get_model_param_range_map`). They are
    views of the parameters where these are fp32 and copies where they are not.

[Note: checkpoints]
    All of Megatron's formats read and write state through two methods, which know Adam's two names. Momentum goes by
    `exp_avg`, and `exp_avg_sq` of a matrix is zeros, made when it is asked for. What stages of variants keep has
    another shape: the saved groups carry it, see kept.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef
from shardmuon.comm.vote import run_together
from shardmuon.errors import made_public
from shardmuon.frameworks.megatron.host import ShardHost
from shardmuon.frameworks.megatron.kept import BY_PLACE, bring_together, carried_by, places_of
from shardmuon.layout.engines.flat import FlatShard, mark_flat
from shardmuon.layout.engines.tensor_parallel import cut_of
from shardmuon.momentum.keeper import BUFFER
from shardmuon.muon import Muon
from shardmuon.step.kept import CARRIED, loaded_over, missing_fault
from shardmuon.variants import keeping, stages_of

KIND = "shards of Megatron's distributed optimizer"


@cache
def _optimizer_class(base: type) -> type:
    class Distributed(base):  # type: ignore[misc]
        """Megatron's `DistributedOptimizer` around `shardmuon.Muon`."""

        optimizer_state_keys = ("exp_avg", "exp_avg_sq")

        def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
            shard = self.shardmuon_shards[model_param]
            state = self.optimizer.state[shard]
            if BUFFER in state:
                return {"param": shard, "exp_avg": state[BUFFER], "exp_avg_sq": torch.zeros_like(shard)}
            return {"param": shard, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

        @torch.no_grad()
        def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: Mapping[str, Tensor]) -> None:
            kept = self._get_main_param_and_optimizer_states(model_param)
            for key, value in kept.items():
                value.copy_(tensors[key])

        def sharded_state_dict(
            self, model_sharded_state_dict: Any = None, is_loading: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            model_sharded_state_dict = model_sharded_state_dict or {}
            self.shardmuon_places = places_of(self.shardmuon_params, model_sharded_state_dict)  # may be changed after
            made = super().sharded_state_dict(model_sharded_state_dict, is_loading, *args, **kwargs)
            by_rank_0 = made["param_state_sharding_type"] in self.checkpoint_fully_reshardable_formats
            if by_rank_0 and not is_loading and any(keeping(stages_of(g)) for g in self.optimizer.param_groups):
                one = self.data_parallel_group.rank() == 0 and self.distributed_optimizer_instance_id == 0
                with made_public():
                    bring_together(made["optimizer"]["param_groups"], self.shardmuon_places, tells=one)
            return made

        def load_state_dict(self, state_dict: Any) -> None:
            with made_public():
                loadable = run_together(lambda: _with_kept(self, state_dict))
            super().load_state_dict(loadable)

    return Distributed


def _with_kept(wrapped: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose groups carry by name what stages keep of this rank's parameters.

    Raises:
        ValueError: The state dict has momentum, and not what the variant keeps.
    """
    packed = state_dict["optimizer"]["param_groups"]
    kept = carried_by(packed, wrapped.shardmuon_places)
    groups = [{key: value for key, value in group.items() if key not in (CARRIED, BY_PLACE)} for group in packed]
    by_label = {_label(group): group for group in groups}
    for group in wrapped.optimizer.param_groups:
        saved = by_label.get(_label(group), {})
        names, loaded = group["param_names"] if group["use_muon"] else (), loaded_over(group, saved)
        for name in names if loaded.get("step") else ():
            fault = missing_fault(name, loaded, kept.get(name, {}))
            if fault is not None:
                raise ValueError(fault)
        saved[CARRIED] = {name: kept[name] for name in names if name in kept}
    return {**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": groups}}


def _label(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key by which Megatron, too, finds the saved group of one."""
    return group.get("optimizer"), group.get("is_expert_parallel")


def distributed_optimizer(
    base: type,  # Megatron's DistributedOptimizer
    muon: Muon,
    *args: Any,  # its other arguments up to init_state_fn
    process_group: Any,
    tp_group: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's distributed optimizer around `muon`, whose groups hold the model's parameters.

    Args:
        process_group: The ranks that the parameters are replicated over, all optimizer instances together.
        tp_group: Their tensor-parallel group, or None.
    """
    made = [list(group["params"]) for group in muon.param_groups]
    host = ShardHost(muon)
    pairs = zip((group["param_names"] for group in muon.param_groups), made, strict=True)
    muon.hosts.insert(0, host)
    with torch.no_grad():  # else shards of fp32 parameters are no leaves
        wrapped = _optimizer_class(base)(muon, *args, **kwargs)
    shards: dict[Tensor, Tensor] = {}
    for whole, cut in (
        (wrapped.model_fp32_groups, wrapped.shard_fp32_groups),
        (wrapped.model_float16_groups, wrapped.shard_fp32_from_float16_groups),
    ):
        for params, parts in zip(whole, cut, strict=True):
            shards |= dict(zip(params, parts, strict=True))
    for part in shards.values():
        part.requires_grad_(True)  # else they would count as frozen
    wrapped.shardmuon_shards, wrapped.shardmuon_places = shards, {}
    wrapped.shardmuon_params = {name: p for names, params in pairs for name, p in zip(names, params, strict=True)}
    for index, (group, params) in enumerate(zip(muon.param_groups, made, strict=True)):
        if group["use_muon"]:  # AdamW's has what Megatron has put there
            group["params"] = [_shard(wrapped, param, process_group, tp_group) for param in params]
            orders = {param: (index, order) for order, param in enumerate(params) if param in shards}
            wrapped.model_param_group_index_map.update(orders)
    host.attach(muon)
    return wrapped


def _shard(wrapped: Any, param: Tensor, process_group: Any, tp_group: Any) -> Tensor:
    """The fp32 shard of a matrix on this rank, marked with its place in the matrix; an empty tensor if the rank has
    none."""
    found, start = wrapped.shardmuon_shards.get(param), 0
    if found is None:
        found = torch.empty(0, dtype=torch.float32, device=param.device, requires_grad=True)
    else:
        start = wrapped._get_model_param_range_map(param)["param"].start
    return mark_flat(found, _info(param, start, process_group, tp_group))


def _info(param: Tensor, start: int, process_group: Any, tp_group: Any) -> FlatShard:
    shards = GroupRef.of(tp_group, "tp_group")
    cut = None if shards is None else cut_of(param)
    shape = list(param.shape)
    if cut is not None and shards is not None:
        shape[cut.dim] *= len(shards.ranks)
    return FlatShard(tuple(shape), start, GroupRef.of(process_group), KIND, shards, cut)


def check_shards(groups: Sequence[Mapping[str, Any]], tp_group: Any) -> None:
    """Raise ValueError, with its name, for a matrix whose shards cannot be read."""
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True) if group["use_muon"] else ():
            try:
                _info(param, 0, None, tp_group)
            except ValueError as wrong:
                raise ValueError(f"{name}: {wrong}") from None
