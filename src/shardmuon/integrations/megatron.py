"""Megatron-core: `get_megatron_optimizer` with shardmuon in it, for Megatron's own training loop.

Megatron keeps its part: gradient buffers and their reduction, fp32 main weights, loss scale, clipping over all parallel
groups, the scheduler and distributed checkpoints. shardmuon routes the parameters and takes the step, sharing the
matrices out over the data-parallel replicas. Experts are replicated over a group of their own and have an optimizer of
their own, as Megatron does it; a pipeline stage knows nothing of the others but the list of groups.

Works with megatron-core 0.19 (docs/megatron.md has the pins).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardmuon.exchange import group_ranks, num_ranks, share_objects
from shardmuon.groups import Overrides, param_groups
from shardmuon.muon import Muon
from shardmuon.roles import Place, find_places


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    *,
    pg_collection: Any = None,
    adamw_lr: float | None = None,
    overrides: Overrides | None = None,
    tp_group: Any = None,
    expert_tp_group: Any = None,
    **muon_options: Any,
) -> Any:
    """A `ChainedOptimizer` of Megatron's own classes around `shardmuon.Muon`. Collective over all ranks.

    Args:
        config: `OptimizerConfig`. Read: lr, min_lr, weight_decay, adam_beta1, adam_beta2, adam_eps, the ``muon_``
            fields (momentum, nesterov, scale_mode, num_ns_steps, coefficient_type, extra_scale_factor, split_qkv), and
            what Megatron's own classes read. `muon_tp_mode` and `muon_fp32_matmul_prec` have no meaning here.
        model_chunks: What Megatron trains, wrapped in its `DistributedDataParallel`.
        pg_collection: `ProcessGroupCollection`; default: Megatron's global groups.
        adamw_lr: Learning rate of what is not a matrix; its min_lr shrinks alike. Default: `config.lr`.
        overrides: See `shardmuon.param_groups`; names are the model's without the wrappers' ``module.``.
        tp_group: With tensor parallelism: handed on to `Muon`, which joins the shards. Without it such a model is
            refused.
        expert_tp_group: The same for experts.
        **muon_options: Options of `Muon` (``deterministic``, ``ns_method``, ``momentum``, ...); they win over `config`.

    Raises:
        ValueError: The configuration shards what must be whole, or a parameter's matrices cannot be known.
    """
    groups = pg_collection or _core("process_groups_config").ProcessGroupCollection.use_mpu_process_groups()
    routing, options = _options(config, muon_options)
    given = _pairs(overrides)
    listed: list[dict[str, Any]] = []
    matched: set[int] = set()
    fault = None
    try:  # whatever is wrong here, other pipeline stages must hear of it
        _check(config, model_chunks, groups, tp_group, expert_tp_group)
        for chunk in model_chunks:
            here = _matching(chunk, given)
            matched |= here
            choices = [*(given[i] for i in sorted(here)), *_qkv(config, chunk)]
            listed += _routed(config, chunk, adamw_lr, choices, routing)
    except (ValueError, TypeError) as error:
        fault = str(error)
    merged = _aligned(listed, fault, given, matched)
    parts = []
    for expert in (False, True):
        members = [group for group in merged if group["is_expert_parallel"] == expert]
        if members:
            parallel = expert_tp_group if expert else tp_group
            own = {**options, **({} if parallel is None else {"tp_group": parallel})}
            replicas = groups.expt_dp if expert else groups.dp_cp
            parts.append(_part(config, members, replicas, groups, expert, own))
    return _core("optimizer.optimizer").ChainedOptimizer(parts)


def _core(module: str) -> Any:
    try:
        return importlib.import_module(f"megatron.core.{module}")
    except ImportError as error:
        raise ImportError(
            "shardmuon.integrations.megatron needs megatron-core: pip install 'shardmuon[megatron]'"
        ) from error


# ---------------------------------------------------------------------------------------------------- what is refused


def _check(config: Any, chunks: Sequence[nn.Module], groups: Any, tp_group: Any, expert_tp_group: Any) -> None:
    ddp = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    if any(getattr(c, "use_megatron_fsdp", False) for c in ddp):
        raise ValueError(
            "the model is wrapped by Megatron-FSDP, whose parameters shardmuon.Muon takes as they are: write optimizer "
            "= Muon(param_groups(model)) and megatron_fsdp.fully_shard_optimizer(optimizer)"
        )
    sharded = config.use_distributed_optimizer or getattr(config, "use_layer_wise_distributed_optimizer", False)
    if sharded or any(getattr(c, "use_distributed_optimizer", False) for c in ddp):
        raise ValueError(
            "use_distributed_optimizer (or the layer-wise one) cuts main weights and gradients into pieces of flat "
            "buffers, which no engine of shardmuon reads yet. Set it to False in OptimizerConfig and "
            "DistributedDataParallelConfig; shardmuon shares the work out over the replicas"
        )
    for kind, group, given in (("tp", groups.tp, tp_group), ("expt_tp", groups.expt_tp, expert_tp_group)):
        trained = any(p.requires_grad and _is_expert(p) == (kind == "expt_tp") for c in chunks for p in c.parameters())
        size = len(group_ranks(group)) if group is not None else 1
        if size > 1 and given is None and trained:
            name = "expert_tp_group" if kind == "expt_tp" else "tp_group"
            raise ValueError(
                f"the {kind} group has {size} ranks, so each holds shards of matrices. Give {name}= that group, if "
                "this version's Muon takes one; otherwise use DTensor tensor parallelism"
            )


def _is_expert(param: torch.Tensor) -> bool:
    return not getattr(param, "allreduce", True)


# -------------------------------------------------------------------------------------------------------- options


def _options(config: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of Muon groups, and of the optimizer: Megatron's names, then the user's."""
    of_groups = {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "adjust_lr_fn": config.muon_scale_mode,
        "extra_scale_factor": config.muon_extra_scale_factor,
        "ns_coefficients": config.muon_coefficient_type,
        "ns_steps": config.muon_num_ns_steps,
    }
    keys = {*of_groups, "eps", "weight_decay_mode"}
    if callable(given.get("adjust_lr_fn")):
        raise ValueError("adjust_lr_fn must be a name here: Megatron's checkpoints keep every option of a group")
    if "ns_coefficients" in given:  # with a length of their own
        of_groups.pop("ns_steps")
    of_groups |= {key: value for key, value in given.items() if key in keys}
    if not config.decoupled_weight_decay:
        of_groups.setdefault("weight_decay_mode", "l2")
    return of_groups, {key: value for key, value in given.items() if key not in keys}


def _pairs(overrides: Overrides | None) -> list[tuple[Any, Any]]:
    return list(overrides.items()) if isinstance(overrides, Mapping) else list(overrides or ())


def _qkv(config: Any, chunk: nn.Module) -> list[tuple[Any, Any]]:
    """Fused projections as Megatron lays them out, (q, k, v) rows per query group: three matrices."""
    if not config.muon_split_qkv:
        return []
    found: list[tuple[Any, Any]] = []
    for name, module in chunk.named_modules():
        layer = getattr(module, "linear_qkv", None)
        model = getattr(module, "config", None)
        weight = getattr(layer, "weight", None)
        if layer is None or model is None or weight is None or not weight.requires_grad or weight.ndim != 2:
            continue
        queries = model.num_attention_heads // model.num_query_groups * model.kv_channels
        gates = 2 if getattr(model, "attention_output_gate", False) else 1
        sizes = (queries,) * gates + (model.kv_channels, model.kv_channels)
        if weight.shape[0] != sum(sizes) * model.num_query_groups:
            raise ValueError(
                f"{name}.linear_qkv.weight has {weight.shape[0]} rows, not {model.num_query_groups} query groups of "
                f"{sizes}. Set muon_split_qkv=False in OptimizerConfig to orthogonalize it as one matrix, or pass an "
                "override with its split_sizes and split_groups"
            )
        choice = {"split_sizes": sizes, "split_groups": model.num_query_groups}
        found.append((_same(weight), choice))
    return found


def _matching(chunk: nn.Module, overrides: Sequence[tuple[Any, Any]]) -> set[int]:
    """Which overrides have something to do in this chunk; the others may, on another pipeline stage."""
    found = find_places(chunk)

    def fits(pattern: Any, param: torch.Tensor, place: Place) -> bool:
        if isinstance(pattern, str):
            return fnmatchcase(place.name, pattern)
        return bool(pattern(place.name, param, place.module))

    return {
        i
        for i, (pattern, _) in enumerate(overrides)
        if any(fits(pattern, param, place) for param, places in found for place in places)
    }


def _same(wanted: torch.Tensor) -> Callable[[str, torch.Tensor, nn.Module], bool]:
    return lambda name, param, module: param is wanted


def _routed(
    config: Any, chunk: nn.Module, adamw_lr: float | None, overrides: Sequence[tuple[Any, Any]], routing: Any
) -> list[dict[str, Any]]:
    """The groups of a model chunk with what Megatron's scheduler and checkpoints want of a group."""
    if not any(p.requires_grad for p in chunk.parameters()):
        return []
    made = param_groups(
        chunk,
        lr=config.lr,
        adamw_lr=adamw_lr,
        weight_decay=config.weight_decay,
        adamw_betas=(config.adam_beta1, config.adam_beta2),
        adamw_eps=config.adam_eps,
        overrides=overrides or None,
        **routing,
    )
    out = []
    for group in made:
        lr = float(group["lr"])
        own = {
            "max_lr": lr,
            "min_lr": (config.min_lr or 0.0) * (lr / config.lr if config.lr else 1.0),
            "wd_mult": group["weight_decay"] / config.weight_decay if config.weight_decay else 1.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "default_config": lr == config.lr,
        }
        for expert in (False, True):
            members = [
                (n, p) for n, p in zip(group["param_names"], group["params"], strict=True) if _is_expert(p) == expert
            ]
            if members:
                names, params = zip(*members, strict=True)
                whose = {"is_expert_parallel": expert, "params": list(params), "param_names": list(names)}
                out.append({**group, **own, **whose})
    return out


def _aligned(
    listed: Sequence[Mapping[str, Any]], fault: str | None, overrides: Sequence[tuple[Any, Any]], matched: set[int]
) -> list[dict[str, Any]]:
    """Groups with equal options made one, and in one order on all ranks, with empty ones for those of other pipeline
    stages: Megatron's checkpoints list the groups once for all."""
    mine: dict[str, dict[str, Any]] = {}
    for group in listed:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        label = f"{'Muon' if group['use_muon'] else 'AdamW'} {sorted(options.items(), key=lambda item: item[0])!r}"
        kept = mine.setdefault(label, {**options, "params": [], "param_names": [], "optimizer": label})
        kept["params"].extend(group["params"])
        kept["param_names"].extend(group["param_names"])
    empty = {label: {**group, "params": [], "param_names": []} for label, group in mine.items()}
    report = (fault, matched, empty)
    everyone = [report] if num_ranks() == 1 else share_objects(report, tuple(range(num_ranks())))
    faults = list(dict.fromkeys(f"rank {rank}: {theirs[0]}" for rank, theirs in enumerate(everyone) if theirs[0]))
    if faults:
        raise ValueError(fault or faults[0])
    idle = [overrides[i][0] for i in range(len(overrides)) if all(i not in theirs[1] for theirs in everyone)]
    if idle:
        raise ValueError(f"overrides[{idle[0]!r}] matches no parameter on any rank. Correct it or leave it out")
    known: dict[str, dict[str, Any]] = {}
    for theirs in everyone:
        known |= theirs[2]
    return [mine.get(label, known[label]) for label in sorted(known, key=lambda label: (label[:4] != "Muon", label))]


# ------------------------------------------------------------------------------------------------- Megatron's classes


def _part(
    config: Any, members: list[dict[str, Any]], replicas: Any, groups: Any, expert: bool, options: Mapping[str, Any]
) -> Any:
    """One optimizer in Megatron's wrapper."""
    core = _core("optimizer.optimizer")
    muon = Muon(members, lr=config.lr, weight_decay=config.weight_decay, process_group=replicas, **options)
    muon.register_load_state_dict_pre_hook(_drop_counts)
    if config.fp16 or config.bf16:
        wrapped = core.Float16OptimizerWithFloat16Params(muon, config, _scaler(config), _fill_state)
    else:
        wrapped = core.FP32Optimizer(muon, config, _fill_state)
    wrapped.grad_stats_parallel_group = groups.tp_ep_pp if expert else groups.mp
    wrapped.tp_group, wrapped.expert_tp_group = groups.tp, getattr(groups, "expt_tp", groups.tp)
    alone = len(group_ranks(wrapped.expert_tp_group if expert else wrapped.tp_group)) == 1
    for param in wrapped.get_parameters():
        param.requires_grad_(True)  # fp32 main weights do not, so they would count as frozen and have no state to load
        if alone:
            param.tensor_model_parallel = False  # Megatron's layers say True even where one rank has the whole
    return wrapped


def _scaler(config: Any) -> Any:
    """As Megatron chooses it."""
    scalers = _core("optimizer.grad_scaler")
    if config.loss_scale:
        return scalers.ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return scalers.DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def _fill_state(optimizer: Muon, config: Any = None) -> None:
    """State to load into: zeros."""
    with torch.no_grad():
        optimizer._complete_state()


def _drop_counts(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Megatron saves one count of steps and gives it back to every parameter; Muon's have none."""
    muon = [key for group in state_dict["param_groups"] if group["use_muon"] for key in group["params"]]
    state = dict(state_dict["state"])
    for key in muon:
        if key in state and "momentum_scale" not in state[key]:
            state[key] = {name: value for name, value in state[key].items() if name != "step"}
    return {**state_dict, "state": state}
