"""Megatron-core: a `get_megatron_optimizer` that makes shardmuon's optimizer for Megatron's own training loop.

Megatron still handles gradient buffers and their reduction, fp32 main weights, loss scale, clipping over all parallel
groups, the scheduler and distributed checkpoints. shardmuon assigns parameters to Muon or AdamW and takes the step: it
distributes the matrices over the data-parallel replicas and joins the shards of tensor-parallel matrices. As in
Megatron, experts are replicated over a separate process group and have a separate optimizer. Pipeline stages are
independent, except that all have the same list of parameter groups. Wrappers, shards and checkpoints are in shards.py,
Megatron-FSDP is in fsdp.py.

Works with megatron-core 0.19 (docs/megatron.md lists the exact versions).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardmuon.comm.groups import group_ranks, num_ranks
from shardmuon.comm.vote import Fault, gather
from shardmuon.errors import made_public
from shardmuon.frameworks.megatron.shards import WholeHost, check_shards, distributed_optimizer
from shardmuon.muon import Muon
from shardmuon.options import MuonConfig
from shardmuon.routing.groups import Overrides, Rule, param_groups, parse_overrides
from shardmuon.routing.roles import find_places


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    *,
    pg_collection: Any = None,
    adamw_lr: float | None = None,
    overrides: Overrides | None = None,
    use_gloo_process_groups: bool = True,
    **muon_options: Any,
) -> Any:
    """Make a `ChainedOptimizer` of Megatron's own classes around `shardmuon.Muon`. Collective over all ranks.

    Args:
        config: `OptimizerConfig`. Fields used: lr, min_lr, weight_decay, adam_beta1, adam_beta2, adam_eps, the
            ``muon_`` fields (momentum, nesterov, scale_mode, num_ns_steps, coefficient_type, extra_scale_factor,
            split_qkv), and the fields that Megatron's own classes use. `muon_tp_mode` and `muon_fp32_matmul_prec` are
            ignored.
        model_chunks: Model chunks, each wrapped in Megatron's `DistributedDataParallel`.
        pg_collection: `ProcessGroupCollection`. Default: Megatron's global groups. With tensor parallelism, dense
            matrices are sharded over group `tp`, and experts over group `expt_tp`.
        adamw_lr: Learning rate of AdamW's parameters; their min_lr is scaled by the same factor. Default: `config.lr`.
        overrides: (pattern, choice) pairs, see `shardmuon.param_groups`. Patterns match the model's parameter names,
            without the wrappers' prefix ``module.``.
        use_gloo_process_groups: True gives the distributed optimizer a gloo group, as in Megatron. Some checkpoint
            formats need this group.
        **muon_options: Options of `Muon` (``method``, ``momentum``, ...); they take precedence over `config`.

    Returns:
        The `ChainedOptimizer`, with one optimizer for dense parameters and one for experts, if this rank has any.

    Raises:
        ValueError: The configuration is not supported, or the matrices of a parameter cannot be determined.
    """
    groups = pg_collection or _core("process_groups_config").ProcessGroupCollection.use_mpu_process_groups()
    options = _options(config, muon_options)
    given, listed, matched = list[Rule](), list[dict[str, Any]](), set[int]()
    distributed, fault = bool(config.use_distributed_optimizer), Fault()
    with fault:  # record errors, which are raised on all pipeline stages in `_aligned`
        given = parse_overrides(overrides)
        _check(config, model_chunks, options)
        for chunk in model_chunks:
            here = _matching(chunk, given)
            matched.update(here)
            rules = [*(given[i] for i in here), *parse_overrides(_qkv(config, chunk))]
            listed += _routed(config, chunk, adamw_lr, rules, options["adjust_lr_fn"], groups)
        for expert in (False, True) if distributed else ():
            check_shards([g for g in listed if g["is_expert_parallel"] == expert], _tp(groups, expert))
    with made_public():
        merged = _aligned(listed, fault, given, matched)
    shared = None
    if distributed:
        setup = _core("process_groups_config").ProcessGroupCollection.setup_process_groups_for_optimizer
        shared = setup(pg_collection, model_chunks, use_gloo_process_groups and pg_collection is None)
    parts = []
    for expert in (False, True):
        members = [group for group in merged if group["is_expert_parallel"] == expert]
        if members:
            place = {"process_group": groups.expt_dp if expert else groups.dp_cp, "tp_group": _tp(groups, expert)}
            muon = Muon([{**group, **place} for group in members], **place, lr=config.lr, **options)
            parts.append(_wrapped(config, muon, groups, expert, model_chunks, shared))
    return _core("optimizer.optimizer").ChainedOptimizer(parts)


def _core(module: str) -> Any:
    try:
        return importlib.import_module(f"megatron.core.{module}")
    except ImportError as error:
        raise ImportError(
            "shardmuon.frameworks.megatron needs megatron-core: pip install 'shardmuon[megatron]'"
        ) from error


# -------------------------------------------------------------------------------------------------------------- checks


_LAYER_WISE = "use_layer_wise_distributed_optimizer"
_NOT_DISTRIBUTED = "use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"


def _check(config: Any, chunks: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    """Raise ValueError if the configuration contradicts itself or is not supported."""
    if getattr(config, _LAYER_WISE, False):
        raise ValueError(
            f"{_LAYER_WISE} gives whole matrices to ranks, which shardmuon does itself. Set it to False in "
            "OptimizerConfig; use_distributed_optimizer=True shards main weights and momentum"
        )
    wanted = bool(config.use_distributed_optimizer)
    for number, chunk in enumerate(chunks):
        ddp = getattr(chunk, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            raise ValueError(
                "the model is wrapped by Megatron-FSDP, whose parameters shardmuon.Muon takes as they are: write "
                "optimizer = Muon(model, lr=...) and megatron_fsdp.fully_shard_optimizer(optimizer)"
            )
        if bool(getattr(ddp, "use_distributed_optimizer", False)) != wanted:
            raise ValueError(
                f"use_distributed_optimizer is {wanted} in OptimizerConfig and {not wanted} in the "
                f"DistributedDataParallelConfig of model chunk {number}. Set both to the same"
            )
        for name, param in chunk.named_parameters():
            if param.requires_grad and getattr(param, "is_gtp_weight_remat", False):
                raise ValueError(
                    f"{name}: Megatron keeps it cut over its weight-rematerialization group (GTP), which is not "
                    "supported. Set the size of that group to 1"
                )
    refused = next((key for key in _NOT_DISTRIBUTED if wanted and getattr(config, key, False)), None)
    if refused is not None:
        raise ValueError(f"{refused}=True does not go with shardmuon. Set it to False in OptimizerConfig")
    stored = MuonConfig(**{key: options[key] for key in MuonConfig.STORED if key in options}).stored()
    if wanted and stored:
        raise ValueError(
            f"{stored}: Megatron's distributed optimizer keeps fp32 shards of weights and state. Leave it out"
        )


def _is_expert(param: torch.Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def _tp(groups: Any, expert: bool) -> Any:
    """Return the tensor-parallel group of dense parameters or of experts; None if it has only one rank."""
    group = getattr(groups, "expt_tp", None) if expert else groups.tp
    return group if group is not None and len(group_ranks(group)) > 1 else None


# -------------------------------------------------------------------------------------------------------- options


def _options(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the options of `Muon` from Megatron's config. The user's options take precedence."""
    if {"process_group", "tp_group"} & given.keys():
        raise ValueError(
            "process_group and tp_group are Megatron's to say: give pg_collection=, or leave it out for its global "
            "groups"
        )
    if not config.decoupled_weight_decay:
        raise ValueError(
            "decoupled_weight_decay=False adds the decay to gradients, of whose size a matrix's update is independent. "
            "Leave it out: the decay is on the weights then"
        )
    options = {
        "weight_decay": config.weight_decay,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "ns_coefficients": config.muon_coefficient_type,
        "ns_steps": config.muon_num_ns_steps,
        **given,
    }
    if "ns_coefficients" in given:  # Megatron's number of steps is for other coefficients
        options["ns_steps"] = given.get("ns_steps")
    if "adjust_lr_fn" not in given:
        options["adjust_lr_fn"] = _scale_of(config)
    return options


def _scale_of(config: Any) -> str:
    """Return the value of `adjust_lr_fn` that corresponds to Megatron's options for scaling the learning rate."""
    mode, extra = config.muon_scale_mode, config.muon_extra_scale_factor
    if (mode, extra) != ("spectral", 0.2) and extra != 1.0:
        raise ValueError(
            f"muon_extra_scale_factor={extra!r} with muon_scale_mode={mode!r}: it must be 1, or 0.2 with 'spectral'. "
            f"Multiply the matrices' lr by {extra!r} and divide their weight_decay by it"
        )
    return "match_rms_adamw" if extra == 0.2 else str(mode)


def _qkv(config: Any, chunk: nn.Module) -> list[tuple[Any, Any]]:
    """Make overrides that split Megatron's fused attention projections, which store (q, k, v) rows for each query
    group, into three matrices, or into four with gated attention."""
    if not config.muon_split_qkv:
        return []
    found: list[tuple[Any, Any]] = []
    for module in chunk.modules():
        model = getattr(module, "config", None)
        weight = getattr(getattr(module, "linear_qkv", None), "weight", None)
        if model is None or weight is None or not weight.requires_grad or weight.ndim != 2:
            continue
        queries = model.num_attention_heads // model.num_query_groups * model.kv_channels
        gates = 2 if getattr(model, "attention_output_gate", False) else 1
        sizes = (queries,) * gates + (model.kv_channels, model.kv_channels)
        choice = {"split_sizes": sizes, "split_groups": model.num_query_groups}
        found.append((lambda name, param, module, weight=weight: param is weight, choice))
    return found


def _matching(chunk: nn.Module, rules: Sequence[Rule]) -> list[int]:
    """Find the indices of the overrides that match a parameter of this model chunk. Other overrides may match on
    another pipeline stage."""
    found = find_places(chunk)
    return [i for i, rule in enumerate(rules) if any(rule.matches(*one) for one in found)]


def _of_experts(chunk: nn.Module, rules: Sequence[Rule], tp_group: Any) -> list[Rule]:
    """Make copies of these overrides that apply only to experts, and that set the experts' tensor-parallel group, which
    differs from the group of dense parameters."""

    def fits(name: str, param: torch.Tensor, module: nn.Module, rule: Rule) -> bool:
        return _is_expert(param) and rule.fits(name, param, module)

    place = {"tp_group": () if tp_group is None else tp_group}
    made = [
        rule._replace(pattern=partial(fits, rule=rule), options={**rule.options, **place})
        for rule in (*rules, *parse_overrides({"*": {}}))
    ]
    return [made[i] for i in _matching(chunk, made)]


def _routed(
    config: Any,
    chunk: nn.Module,
    adamw_lr: float | None,
    rules: Sequence[Rule],
    adjust_lr_fn: str | None,
    groups: Any,
) -> list[dict[str, Any]]:
    """Make the parameter groups of a model chunk, separately for dense parameters and experts, with the keys that
    Megatron's scheduler and checkpoints need."""
    if not any(p.requires_grad for p in chunk.parameters()):
        return []
    if _tp(groups, False) is not None or _tp(groups, True) is not None:
        rules = [*_of_experts(chunk, rules, _tp(groups, True)), *rules]
    made = param_groups(
        chunk,
        tp_group=_tp(groups, False),
        lr=config.lr,
        adamw_lr=config.lr if adamw_lr is None else adamw_lr,  # the default would differ between pipeline stages
        weight_decay=config.weight_decay,
        overrides=[(rule.pattern, rule.options) for rule in rules],
        adjust_lr_fn=adjust_lr_fn,
    )
    out = []
    for group in made:
        group.pop("tp_group", None)  # groups must be equal on all ranks, so `Muon` gets the process group directly
        if not group["use_muon"]:
            group.setdefault("betas", (config.adam_beta1, config.adam_beta2))
            group.setdefault("eps", config.adam_eps)
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
            named = dict(zip(group["param_names"], group["params"], strict=True))
            named = {name: p for name, p in named.items() if _is_expert(p) == expert}
            if named:
                whose = {"is_expert_parallel": expert, "params": list(named.values()), "param_names": list(named)}
                out.append({**group, **own, **whose})
    return out


def _aligned(
    listed: Sequence[Mapping[str, Any]], fault: Fault, rules: Sequence[Rule], matched: set[int]
) -> list[dict[str, Any]]:
    """Merge groups with equal options, and make all ranks have the same groups in the same order, because Megatron's
    checkpoints save a single list of groups for all ranks. A group is empty on pipeline stages without parameters for
    it. Collective.

    Args:
        listed: Groups of this rank.
        fault: Record of an error on this rank, if any, which is raised on all ranks.
        rules: The user's overrides.
        matched: Indices of the overrides that match a parameter on this rank.

    Raises:
        ValueError: An override matches no parameter on any rank.
    """
    mine: dict[str, dict[str, Any]] = {}
    for group in listed:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        label = f"{'Muon' if group['use_muon'] else 'AdamW'} {sorted(options.items(), key=lambda item: item[0])!r}"
        kept = mine.setdefault(label, {**options, "params": [], "param_names": [], "optimizer": label})
        kept["params"].extend(group["params"])
        kept["param_names"].extend(group["param_names"])
    empty = {label: {**group, "params": [], "param_names": []} for label, group in mine.items()}
    everyone = gather((matched, empty), tuple(range(num_ranks())), fault)
    idle = [rule.label for i, rule in enumerate(rules) if all(i not in theirs for theirs, _ in everyone)]
    if idle:
        raise ValueError(f"overrides[{idle[0]}] matches no parameter on any rank. Correct it or leave it out")
    known = {label: group for _, theirs in everyone for label, group in theirs.items()}
    return [mine.get(label, known[label]) for label in sorted(known, key=lambda label: (label[:4] != "Muon", label))]


# ------------------------------------------------------------------------------------------------- Megatron's classes


def _wrapped(
    config: Any, muon: Muon, groups: Any, expert: bool, chunks: Sequence[nn.Module], shared: Mapping[str, Any] | None
) -> Any:
    """Wrap an optimizer in Megatron's wrapper class.

    Args:
        config: Megatron's `OptimizerConfig`.
        muon: Optimizer of dense parameters or of experts.
        groups: Megatron's process groups.
        expert: True for the experts' optimizer.
        chunks: Model chunks.
        shared: Process groups of the distributed optimizer, by Megatron's names. None: there is no distributed
            optimizer, and every replica has all main weights.
    """
    tp_group = _tp(groups, expert)
    if shared is not None:
        instances = shared["inter_dist_opt_group"]
        wrapped = distributed_optimizer(
            _core("optimizer.distrib_optimizer").DistributedOptimizer,
            muon,
            config,
            _scaler(config),
            _fill_state,
            process_group=groups.expt_dp if expert else groups.dp_cp,
            tp_group=tp_group,
            model_chunks=chunks,
            per_model_buffers={i: c.expert_parallel_buffers if expert else c.buffers for i, c in enumerate(chunks)},
            data_parallel_group=shared["intra_expt_dp_group" if expert else "intra_dp_cp_group"],
            data_parallel_group_gloo=shared["intra_expt_dp_group_gloo" if expert else "intra_dp_cp_group_gloo"],
            data_parallel_group_idx=shared["expt_tp_pp_with_egtp_remat_group" if expert else "mp_group"].rank(),
            distributed_optimizer_instance_id=0 if instances is None else instances.rank(),
        )
        wrapped.grad_stats_parallel_group = shared["intra_dist_opt_group"]
    else:
        kinds, half = _core("optimizer.optimizer"), config.fp16 or config.bf16
        kind = kinds.Float16OptimizerWithFloat16Params if half else kinds.FP32Optimizer
        wrapped = kind(muon, config, *([_scaler(config)] if half else []), _fill_state)
        wrapped.grad_stats_parallel_group = groups.tp_ep_pp if expert else groups.mp
        muon.hosts.insert(0, WholeHost(groups.pp.size() > 1 or (expert and groups.ep.size() > 1)))
    wrapped.tp_group, wrapped.expert_tp_group = groups.tp, getattr(groups, "expt_tp", groups.tp)
    for param in wrapped.get_parameters():
        param.requires_grad_(True)  # Megatron's fp32 main weights would count as frozen
        if tp_group is None:
            param.tensor_model_parallel = False  # Megatron's layers set True even without tensor parallelism
    return wrapped


def _scaler(config: Any) -> Any:
    """Make the gradient scaler that Megatron would choose; None if it would choose none."""
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
    """Create the optimizer's missing state as zeros, so that checkpoints can be loaded into it."""
    optimizer.complete_state()
