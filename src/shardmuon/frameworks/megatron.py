"""Megatron-core: a function `get_megatron_optimizer` that makes shardmuon's optimizer for Megatron's own training loop.

Megatron handles gradient buffers and their reduction, fp32 main weights, the loss scale, clipping over all parallel
groups, the scheduler and distributed checkpoints. shardmuon assigns parameters to Muon or AdamW and takes the step: it
distributes the matrices over the data-parallel replicas and gathers the shards of tensor-parallel matrices. As in
Megatron, experts are replicated over a separate process group and have a separate optimizer. Pipeline stages are
independent of each other, except that all of them must have the same list of parameter groups.

All code that reads or overrides private attributes of Megatron's optimizers is in this file. Megatron-FSDP is handled
in megatron_fsdp.py. This module works with megatron-core 0.19 (docs/megatron.md lists the exact versions).

[Note: what Megatron steps]
    With the distributed optimizer, each bucket of a gradient buffer is split into equal parts, one per data-parallel
    rank. A part can begin or end inside a matrix. `DistributedOptimizer` replaces the parameters in the optimizer's
    groups with 1-D shards, one for each parameter that has elements in this rank's parts (`model_param_gbuf_map`,
    `_get_model_param_range_map`). A shard of an fp32 parameter is a view; a shard of any other parameter is an fp32
    copy.

    The order of the shards differs between ranks. This module changes the groups so that every rank has one shard of
    each matrix, in the same order. A shard is empty if the rank stores no part of the matrix. The optimizer treats
    these shards as parts of a flat buffer.

    Without the distributed optimizer, every replica has the complete main weights, which the optimizer steps like
    ordinary parameters.

[Note: checkpoints]
    All of Megatron's checkpoint formats read and write state through two methods, which support only Adam's `exp_avg`
    and `exp_avg_sq`. So momentum is saved as `exp_avg`. The `exp_avg_sq` of a matrix is an all-zero tensor that is
    created when Megatron reads it. There is a single step count, which is stored as the option ``step`` of every group
    and in the state of every parameter.

[Note: state of variants]
    `sharded_state_dict` requires each state tensor to have the shape and shards of its parameter. The state that an
    optimizer variant stores for each matrix (such as NorMuon's second moments) has a different shape. It is equal on
    all ranks over which the matrix is sharded, even if a rank's shard is empty. So this state is saved in the groups,
    by parameter name (see step/kept.py).

    This works if each model-parallel rank saves its own groups, as in the formats that follow the distributed
    optimizer's buffers. In other formats, rank 0 saves its groups for all ranks. Ranks whose parameters differ from
    those of rank 0 would then lose their state, so saving raises an error.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardmuon.comm.groups import GroupRef, group_ranks, num_ranks
from shardmuon.comm.vote import Fault, gather, run_together
from shardmuon.errors import Refused, about
from shardmuon.host import Host, Weight
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine
from shardmuon.momentum.keeper import BUFFER
from shardmuon.muon import Muon
from shardmuon.options import MuonConfig, loaded_over
from shardmuon.routing.groups import Overrides, Rule, param_groups
from shardmuon.routing.roles import Placed
from shardmuon.step.kept import carry, carry_by_position, check_carried, take_carried
from shardmuon.variants import KEPT_KEYS, keeping, stages_of


@Refused.made_public()
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
    """Make a `ChainedOptimizer` from Megatron's own optimizer classes and `shardmuon.Muon`. Collective over all ranks.

    Args:
        config: `OptimizerConfig`. `Muon` uses the fields lr, min_lr, weight_decay, adam_beta1, adam_beta2, adam_eps,
            and the ``muon_`` fields momentum, nesterov, scale_mode, num_ns_steps, coefficient_type, extra_scale_factor
            and split_qkv. Megatron's own classes use further fields. `muon_tp_mode` and `muon_fp32_matmul_prec` are
            ignored.
        model_chunks: Model chunks, each wrapped in Megatron's `DistributedDataParallel`.
        pg_collection: `ProcessGroupCollection`. Default: Megatron's global groups. With tensor parallelism, dense
            matrices are sharded over the group `tp`, and experts over the group `expt_tp`.
        adamw_lr: Learning rate of the parameters that AdamW updates. Their minimum learning rate is `config.min_lr` x
            `adamw_lr` / `config.lr`. Default: `config.lr`.
        overrides: (pattern, choice) pairs (see `shardmuon.param_groups`). Patterns are matched against the model's
            parameter names without the prefix ``module.`` that wrappers add.
        use_gloo_process_groups: If True, the distributed optimizer gets a gloo group, which some checkpoint formats
            need. Megatron's own function has the same argument. It has no effect if `pg_collection` is given.
        **muon_options: Options of `Muon`, such as ``method`` and ``momentum``. They take precedence over `config`.

    Returns:
        A `ChainedOptimizer` that contains one optimizer for dense parameters and one for experts. An optimizer is left
        out if it has no parameters on any rank.

    Raises:
        ValueError: The configuration is not supported, or it is unclear how to read a parameter as matrices.
    """
    collection = _core("process_groups_config").ProcessGroupCollection
    groups = pg_collection or collection.use_mpu_process_groups()
    options = _options(config, muon_options)
    given, listed, matched = list[Rule](), list[dict[str, Any]](), set[int]()
    fault, shared = Fault(), None
    with fault:  # Catch errors on this rank; `_aligned` then raises the first of them on all ranks.
        given = Rule.parse(overrides)
        _check(config, model_chunks, options)
        for chunk in model_chunks:
            matched.update(_matching(chunk, given))
            rules = [*given, *Rule.parse(_qkv(config, chunk))]
            listed += _routed(config, chunk, adamw_lr, rules, options["adjust_lr_fn"], groups)
    merged = _aligned(listed, fault, given, matched)
    if config.use_distributed_optimizer:
        gloo = use_gloo_process_groups and pg_collection is None
        shared = collection.setup_process_groups_for_optimizer(pg_collection, model_chunks, gloo)
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


def _check(config: Any, chunks: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    """Raise ValueError if the configs of Megatron's optimizer and model chunks contradict each other, or if a setting
    or an option of `Muon` is not supported."""
    if getattr(config, "use_layer_wise_distributed_optimizer", False):
        raise ValueError(
            "use_layer_wise_distributed_optimizer gives whole matrices to ranks, which shardmuon does itself. Set it "
            "to False in OptimizerConfig; use_distributed_optimizer=True shards main weights and momentum"
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
    for key in ("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"):
        if wanted and getattr(config, key, False):
            raise ValueError(f"{key}=True does not go with shardmuon. Set it to False in OptimizerConfig")
    stored = MuonConfig(**{key: options[key] for key in MuonConfig.STORED if key in options}).stored()
    if wanted and stored:
        raise ValueError(
            f"{stored}: Megatron's distributed optimizer keeps fp32 shards of weights and state. Leave it out"
        )


def _is_expert(param: Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def _tp(groups: Any, expert: bool) -> Any:
    """Return the tensor-parallel group of dense parameters or of experts; None if the group has only one rank."""
    group = getattr(groups, "expt_tp", None) if expert else groups.tp
    return group if group is not None and len(group_ranks(group)) > 1 else None


# -------------------------------------------------------------------------------------------------------- options


def _options(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the options of `Muon` from Megatron's config and the user's options. The user's options take precedence.

    Raises:
        ValueError: An option cannot be used with Megatron, or `Muon` has no equivalent of a setting in the config.
    """
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
        # The number of Newton-Schulz steps in the config is valid only for the coefficients in the config.
        "ns_steps": None if "ns_coefficients" in given else config.muon_num_ns_steps,
        **given,
    }
    if "adjust_lr_fn" not in given:
        mode, extra = config.muon_scale_mode, config.muon_extra_scale_factor
        if (mode, extra) != ("spectral", 0.2) and extra != 1.0:
            raise ValueError(
                f"muon_extra_scale_factor={extra!r} with muon_scale_mode={mode!r}: it must be 1, or 0.2 with "
                f"'spectral'. Multiply the matrices' lr by {extra!r} and divide their weight_decay by it"
            )
        options["adjust_lr_fn"] = "match_rms_adamw" if extra == 0.2 else str(mode)
    return options


def _qkv(config: Any, chunk: nn.Module) -> list[tuple[Any, Any]]:
    """Make overrides that split Megatron's fused attention projections into separate matrices: q, k and v and, with
    gated attention, the gates. In a fused projection, the rows of these matrices are interleaved by query group."""
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
    """Return the indices of the overrides that match a parameter of the given model chunk. The other overrides can
    match parameters on other pipeline stages."""
    found = Placed.all_in(chunk)
    return [i for i, rule in enumerate(rules) if any(map(rule.matches, found))]


def _of_experts(rules: Sequence[Rule], tp_group: Any) -> list[Rule]:
    """Copy overrides for experts, whose tensor-parallel group differs from that of dense parameters. The copies match
    only experts and set the experts' group. A final override sets this group for all experts that no copy matches."""

    def fits(name: str, param: Tensor, module: nn.Module, rule: Rule) -> bool:
        return _is_expert(param) and rule.fits(name, param, module)

    place = {"tp_group": () if tp_group is None else tp_group}
    return [
        rule._replace(pattern=partial(fits, rule=rule), options={**rule.options, **place})
        for rule in (*rules, *Rule.parse({"*": {}}))
    ]


def _routed(
    config: Any,
    chunk: nn.Module,
    adamw_lr: float | None,
    rules: Sequence[Rule],
    adjust_lr_fn: str | None,
    groups: Any,
) -> list[dict[str, Any]]:
    """Make the parameter groups of a model chunk, with the keys that Megatron's scheduler and checkpoints need. Dense
    parameters and experts are in separate groups."""
    if not any(p.requires_grad for p in chunk.parameters()):
        return []
    if _tp(groups, False) is not None or _tp(groups, True) is not None:
        rules = [*_of_experts(rules, _tp(groups, True)), *rules]
    made = param_groups(
        chunk,
        tp_group=_tp(groups, False),
        lr=config.lr,
        # Set `adamw_lr` explicitly, because its default in `param_groups` depends on the matrices in this pipeline
        # stage.
        adamw_lr=config.lr if adamw_lr is None else adamw_lr,
        weight_decay=config.weight_decay,
        overrides=[(rules[i].pattern, rules[i].options) for i in _matching(chunk, rules)],
        adjust_lr_fn=adjust_lr_fn,
    )
    out = []
    for group in made:
        # Process groups differ between ranks, so they are added after `_aligned` has compared the parameter groups of
        # all ranks.
        group.pop("tp_group", None)
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
            pairs = zip(group["param_names"], group["params"], strict=True)
            named = {name: p for name, p in pairs if _is_expert(p) == expert}
            if named:
                whose = {"is_expert_parallel": expert, "params": list(named.values()), "param_names": list(named)}
                out.append({**group, **own, **whose})
            for name, p in named.items() if group["use_muon"] and config.use_distributed_optimizer else ():
                with about(name):
                    _flat_shard(p, 0, None, _tp(groups, expert))  # only checks `p`'s tensor-parallel attributes
    return out


def _aligned(
    listed: Sequence[Mapping[str, Any]], fault: Fault, rules: Sequence[Rule], matched: set[int]
) -> list[dict[str, Any]]:
    """Merge parameter groups with equal options, and give all ranks the same groups in the same order. Collective over
    all ranks.

    Megatron's checkpoints save a single list of groups for all ranks, so the groups must be equal on all ranks. If a
    pipeline stage has no parameters for a group, the group is empty on the ranks of that stage.

    Args:
        listed: Parameter groups of this rank.
        fault: Record of the error on this rank, if one occurred. The error is raised on all ranks.
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
    """Wrap an optimizer in the Megatron class that the config selects.

    Args:
        config: Megatron's `OptimizerConfig`.
        muon: Optimizer of dense parameters or of experts.
        groups: Megatron's process groups.
        expert: True for the experts' optimizer.
        chunks: Model chunks.
        shared: Process groups for the distributed optimizer, as a dict with Megatron's names as keys. None: the
            distributed optimizer is not used, and every replica has the complete main weights.
    """
    tp_group = _tp(groups, expert)
    if shared is not None:
        instances = shared["inter_dist_opt_group"]
        wrapped = _distributed_optimizer(
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
        muon.hosts.insert(0, _WholeHost(groups.pp.size() > 1 or (expert and groups.ep.size() > 1)))
    wrapped.tp_group, wrapped.expert_tp_group = groups.tp, getattr(groups, "expt_tp", groups.tp)
    for param in wrapped.get_parameters():
        # Megatron's fp32 main weights have requires_grad=False, so `Muon` would otherwise treat them as frozen.
        param.requires_grad_(True)
        if tp_group is None:
            # Megatron's layers set `tensor_model_parallel` to True even without tensor parallelism, so `Muon` would
            # otherwise mistake the parameter for a shard.
            param.tensor_model_parallel = False
    return wrapped


def _scaler(config: Any) -> Any:
    """Make the gradient scaler that Megatron uses with this config. Return None if Megatron does not scale
    gradients."""
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
    """Create the optimizer's missing state, filled with zeros, because Megatron loads checkpoints into existing
    state."""
    optimizer.complete_state()


# ------------------------------------------------------------------------------------- what Megatron steps and saves


class _WholeHost(Host):
    """Integration with the Megatron wrappers that give every replica the complete main weights. The state that a Muon
    variant stores for each matrix is saved in the parameter groups.

    Args:
        elsewhere: True if the parameters of some ranks differ from those of rank 0. Megatron's `sharded_state_dict`
            saves only the groups of rank 0. So if `elsewhere` is True and the variant has state, saving raises
            ValueError.
    """

    packages = ()

    def __init__(self, elsewhere: bool) -> None:
        self._elsewhere = elsewhere

    def saved(self, core: Any, saved: dict[str, Any]) -> None:
        keys = sorted({key for state in saved["state"].values() for key in state if key in KEPT_KEYS})
        if keys and self._elsewhere and self.caller("sharded_state_dict", "megatron") is not None:
            raise ValueError(
                f"the optimizer's variant keeps {', '.join(keys)}, which Megatron's dist_checkpointing saves from rank "
                "0 alone, and with pipeline or expert parallelism other ranks have parameters of their own. Save "
                "optimizer.state_dict() on every model-parallel rank (--ckpt-format torch), or leave the variant out"
            )
        carry_by_position(saved)


class _Unfinished(Host):
    """Temporary integration that is active while Megatron's wrapper is constructed. The wrapper's constructor saves and
    loads the optimizer's state before the layouts of the shards in the optimizer's groups are known."""

    @property
    def is_active(self) -> bool:
        return True


class _ShardHost(_Unfinished):
    """Integration with Megatron's distributed optimizer. If model chunks use the same parameter names, a number is
    appended to repeated names.

    Args:
        core: Optimizer whose groups contain shards of all matrices, including empty shards.
        shards: Dict from model parameter to its fp32 shard, for all parameters that have elements on this rank.
    """

    clipping = "these gradients are Megatron's, which clips them before step(): set clip_grad in OptimizerConfig"

    def __init__(self, core: Any, shards: Mapping[Tensor, Tensor]) -> None:
        self.shards = shards
        seen: Counter[str] = Counter()
        for group in core.param_groups:
            # Each shard that AdamW updates exists on one rank only, so groups that AdamW updates need no process group.
            if not group["use_muon"]:
                group["process_group"] = GroupRef(())
            names, group["param_names"] = group["param_names"], []
            for name in names:
                group["param_names"].append(f"{name}#{seen[name]}" if seen[name] else name)
                seen[name] += 1
        self._restore(core, 0)

    def load(self, core: Any, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict as torch does. In addition, restore the Muon variant's per-matrix state (such as NorMuon's
        second moments), which is saved in the groups. Collective over all ranks."""
        kept, count = run_together(lambda: self._checked(core, state_dict["param_groups"]))
        super().load(core, state_dict)
        for weight in self.weights(core):  # Megatron loads into existing state, so remove the Muon variant's old state.
            state = core.state[weight.stored]
            for key in KEPT_KEYS:
                state.pop(key, None)
            # Always copy, so that the loaded tensors are new to the optimizer on every rank. The next step checks
            # weight norms in all new tensors, and all ranks must check the same tensors.
            state.update({k: v.to(weight.stored.device, copy=True) for k, v in kept.get(weight.name, {}).items()})
        self._restore(core, count)

    def _checked(self, core: Any, packed: Sequence[Mapping[str, Any]]) -> tuple[dict[str, dict[str, Tensor]], int]:
        """Check the groups of a state dict, and return the Muon variant's state and the step count that they contain.

        Returns:
            A pair: a dict from parameter name to the variant's state for the parameter's matrices, and the step count.

        Raises:
            ValueError: The groups have different step counts, or steps have been taken but state that the variant needs
                is missing.
        """
        kept = take_carried([dict(group) for group in packed])
        for group, theirs in zip(core.param_groups, packed, strict=True):
            loaded = loaded_over(group, theirs)
            for name in group["param_names"] if group["use_muon"] and loaded.get("step") else ():
                check_carried(name, loaded, kept.get(name, {}))
        counts = {int(group["step"]) for group in packed if group.get("step") is not None}
        if len(counts) > 1:
            raise ValueError(f"the state dict's groups have taken {sorted(counts)} steps. All must have taken as many")
        return kept, max(counts, default=core.param_groups[0]["step"])

    def _restore(self, core: Any, count: int) -> None:
        """Create missing state and give each parameter its own step counter with the value `count`, after Megatron has
        loaded groups and state. In the loaded state, all parameters share one step counter, or no parameter has one."""
        take_carried(core.param_groups)
        core.complete_state()
        for group in core.param_groups:
            group["step"] = count
            for param in group["params"]:
                core.state[param]["step"] = torch.tensor(count, dtype=torch.float32, device="cpu")

    def saved(self, core: Any, saved: dict[str, Any]) -> None:
        """Put the state that the Muon variant stores per matrix into the first saved group, by parameter name.
        Megatron's checkpoints cannot save this state as optimizer state, because they save only Adam's state keys."""
        carry(saved["param_groups"][0], {weight.name: core.state[weight.stored] for weight in self.weights(core)})

    def step(self, core: Any, fault: Fault) -> None:
        core.take_step(fault)
        for weight in self.weights(core):
            core.state[weight.stored]["step"] += 1
        for group in core.param_groups:
            group["step"] += 1

    def weights(self, core: Any) -> list[Weight]:
        """List the shards of all matrices, excluding parameters that AdamW updates."""
        return [
            Weight(name, shard, shard, group)
            for group in core.param_groups
            if group["use_muon"]
            for name, shard in zip(group["param_names"], group["params"], strict=True)
        ]


def _optimizer_class(base: type) -> type:
    class Distributed(base):  # type: ignore[misc]
        """Megatron's `DistributedOptimizer`, wrapped around a `shardmuon.Muon`. Its attribute `shardmuon` is the
        integration object that stores the optimizer's shards."""

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


def _distributed_optimizer(
    base: type,
    muon: Muon,
    *args: Any,
    process_group: Any,
    tp_group: Any,
    **kwargs: Any,
) -> Any:
    """Wrap an optimizer in Megatron's distributed optimizer.

    Args:
        base: Megatron's `DistributedOptimizer` class.
        muon: Optimizer whose groups contain the model's parameters. This function replaces the parameters with shards.
        *args, **kwargs: Further arguments of `base`. The last positional argument is `init_state_fn`.
        process_group: Group of all ranks over which the parameters are replicated, across all instances of Megatron's
            distributed optimizer.
        tp_group: Tensor-parallel group of the parameters; None without tensor parallelism.
    """
    made = [list(group["params"]) for group in muon.param_groups]
    muon.hosts.insert(0, _Unfinished())
    with torch.no_grad():  # With grad mode enabled, shards of fp32 parameters would not be leaf tensors.
        wrapped = _optimizer_class(base)(muon, *args, **kwargs)
    whole = chain.from_iterable([*wrapped.model_fp32_groups, *wrapped.model_float16_groups])
    parts = chain.from_iterable([*wrapped.shard_fp32_groups, *wrapped.shard_fp32_from_float16_groups])
    shards: dict[Tensor, Tensor] = dict(zip(whole, parts, strict=True))
    for part in shards.values():
        part.requires_grad_(True)  # Megatron's shards have requires_grad=False, which `Muon` would treat as frozen.
    for index, (group, params) in enumerate(zip(muon.param_groups, made, strict=True)):
        if group["use_muon"]:  # AdamW's groups keep the shards that Megatron has made
            group["params"] = []
            for order, param in enumerate(params):
                shard, start = shards.get(param), 0
                if shard is None:
                    shard = torch.empty(0, dtype=torch.float32, device=param.device, requires_grad=True)
                    # Megatron unscales the gradients of all shards, but sets none on empty shards.
                    shard.grad = torch.empty_like(shard)
                else:
                    start = wrapped._get_model_param_range_map(param)["param"].start
                    wrapped.model_param_group_index_map[param] = index, order
                group["params"].append(_flat_shard(param, start, process_group, tp_group).mark(shard))
    wrapped.shardmuon = muon.hosts[0] = _ShardHost(muon, shards)
    return wrapped


def _flat_shard(param: Tensor, start: int, process_group: Any, tp_group: Any) -> FlatShard:
    """Make a `FlatShard`, which describes a shard that begins at element `start` of the flattened parameter.

    Raises:
        ValueError: The parameter's tensor-parallel attributes (`partition_dim`, `partition_stride`) are invalid.
    """
    shards, shape, cut = GroupRef.of(tp_group, "tp_group"), tuple(param.shape), None
    if shards is not None:
        engine = TensorParallelEngine(shards)
        shape, cut = engine.shape(param), engine.cut(param)
    kind = "shards of Megatron's distributed optimizer"
    return FlatShard(shape, start, GroupRef.of(process_group), kind, shards, cut)
