"""DeepSpeed: its JSON configuration with shardmuon in the place of its own Muon.

ZeRO's partitions and swap files are in partitions.py, the step on them and checkpoints in host.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shardmuon.frameworks.deepspeed.host import load_checkpoint as load_checkpoint
from shardmuon.muon import Muon
from shardmuon.options import Audit, Exchange, Orthogonalizer
from shardmuon.routing.groups import Overrides, param_groups, parse_overrides

_GROUPS = {  # key in DeepSpeed's "params" -> argument of param_groups
    "lr": "lr",
    "muon_lr": "lr",
    "adam_lr": "adamw_lr",
    "weight_decay": "weight_decay",
    "betas": "adamw_betas",
}
_IGNORED = ("torch_adam", "fused")  # how DeepSpeed computes its AdamW
_NOT_HERE = {
    "per_head_muon": 'Name the heads with from_config(..., overrides={"*.q_proj.weight": {"num_heads": 8}})',
    "max_grad_norm": "Write gradient_clipping in the configuration itself",
    "fp32_optimizer_states": "State is fp32",
    "storage": "DeepSpeed keeps state, in fp32: write zero_optimization.offload_optimizer",
    "tp_group": "DeepSpeed's groups are used",
    "process_group": "DeepSpeed's groups are used",
}
_OBJECTS = {"orthogonalizer": Orthogonalizer, "exchange": Exchange, "audit": Audit}
_PARTS = "matrices would be replaced by parts of them"
_OWN_ADAM = "it steps with DeepSpeed's own CPU Adam"
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (  # key, what it may be, why nothing else
    ("tensor_parallel.autotp_size", (None, 0, 1), _PARTS),
    ("expert_parallel.enabled", (None, False), _PARTS),
    ("zero_optimization.zero_hpz_partition_size", (None, 1), "no hpZ"),
    ("zero_optimization.mics_shard_size", (None, 0, -1), "no MiCS"),
    ("zero_optimization.zenflow", (None,), "ZenFlow steps parts of a gradient by itself"),
    ("zero_optimization.offload_optimizer.ratio", (None, 1, 1.0), _OWN_ADAM),
    ("zero_optimization.offload_optimizer.super_offload", (None, False), _OWN_ADAM),
)
REQUIRED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def expert_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups in which DeepSpeed finds the experts of its MoE layers, whose gradients it reduces over other ranks.

    DeepSpeed's `split_params_into_different_moe_groups_for_optimizer` wants a name for each group and leaves the names
    of all parameters to both halves; this puts both right. Stages 1 and 2 (native MoE is not for stage 3).

    Args:
        groups: Of `shardmuon.param_groups(model)`.
    """
    from deepspeed.moe.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        split_params_into_different_moe_groups_for_optimizer,
    )

    found: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        names = {id(p): name for p, name in zip(group["params"], group["param_names"], strict=True)}
        halves = split_params_into_different_moe_groups_for_optimizer([{**group, "name": f"group {index}"}])
        found += [{**half, "param_names": [names[id(p)] for p in half["params"]]} for half in halves if half["params"]]
    return found


def from_config(
    model: nn.Module, config: Mapping[str, Any] | str | Path, overrides: Overrides | None = None
) -> tuple[Muon, dict[str, Any]]:
    """The optimizer that a DeepSpeed configuration asks for, and the configuration to initialize DeepSpeed with.

    Args:
        model: The model; its parameters are routed by `shardmuon.param_groups`.
        config: DeepSpeed's configuration, or the path of its JSON file, with
            ``"optimizer": {"type": "Muon", "params": {...}}``: ``lr``, ``muon_lr``, ``adam_lr``, ``momentum``,
            ``weight_decay``, ``betas``, ``eps`` (AdamW's) and ``ns_method`` as DeepSpeed has them, and any option of
            `shardmuon.Muon` that JSON can write; its objects as ``"audit": {"every": 1000}``. As with
            DeepSpeed's Muon ``weight_decay`` holds for all parameters, biases and norms too; ``overrides`` can spare
            them.
        overrides: See `shardmuon.param_groups`.

    Returns:
        (optimizer, configuration): give both to ``deepspeed.initialize(model=..., optimizer=..., config=...)``. The
        configuration is a copy without "optimizer", with the two settings that DeepSpeed asks for where an optimizer is
        not its own. Attributes ``use_muon`` of parameters have been followed and removed, for with them DeepSpeed would
        orthogonalize gradients itself.

    Raises:
        ValueError, TypeError: The configuration asks for another optimizer, `Muon` refuses a key or a value, or it
            shards in a way that is not supported. Says what to write.
    """
    given = json.loads(Path(config).read_text()) if isinstance(config, (str, Path)) else copy.deepcopy(dict(config))
    wanted = given.pop("optimizer", None) or {}
    if str(wanted.get("type", "")).lower() != "muon":
        raise ValueError(
            f'optimizer: found {json.dumps(wanted)}; write "optimizer": {{"type": "Muon", "params": {{"lr": 0.02, '
            '"adam_lr": 0.0003, "weight_decay": 0.1}}}}'
        )
    params = {key: value for key, value in (wanted.get("params") or {}).items() if key not in _IGNORED}
    for key, value in params.items():
        if key in _NOT_HERE:
            raise ValueError(f"optimizer.params: {key} has no meaning here. {_NOT_HERE[key]}, and delete it")
        if value is None and key in (*_GROUPS, "eps"):
            raise ValueError(f"optimizer.params: {key} is null. Write a value, or delete it for DeepSpeed's default")
    if not params.pop("adam_w_mode", True):
        raise ValueError(
            "optimizer.params: adam_w_mode is false, but AdamW's decay is decoupled here. Delete it, or write true"
        )
    _refuse_sharding(given)
    eps = params.pop("eps", 1e-10)
    options = {key: value for key, value in params.items() if key not in _GROUPS}
    if "ns_method" in options:
        options["orthogonalizer"] = {"method": options.pop("ns_method"), **options.get("orthogonalizer", {})}
    for key, kind in _OBJECTS.items():
        if isinstance(options.get(key), Mapping):
            options[key] = kind(**options[key])
    # DeepSpeed's defaults; it decays all parameters alike, biases and norms too
    routed: dict[str, Any] = {"weight_decay": 0.0, "lr": 0.02, "adamw_lr": 3e-4}
    routed |= {"adamw_lr": params["lr"]} if "lr" in params else {}
    routed |= {argument: params[key] for key, argument in _GROUPS.items() if key in params}  # muon_lr after lr
    if "adamw_betas" in routed:
        routed["adamw_betas"] = tuple(routed["adamw_betas"])
    decays = {"weight_decay": routed["weight_decay"]}
    rules = [(rule.pattern, {**decays, **rule.options}) for rule in parse_overrides(overrides)]
    groups: Iterable[dict[str, Any]] = param_groups(model, overrides=[*rules, ("*", decays)], **routed)
    for group in groups:
        if not group["use_muon"]:
            group.setdefault("eps", eps)
    if any(getattr(p, "allreduce", True) is False for p in model.parameters()):
        groups = expert_groups(groups)
    optimizer = Muon(groups, lr=routed["lr"], **options)
    for p in model.parameters():
        if hasattr(p, "use_muon"):
            del p.use_muon
    for key, value in REQUIRED.items():
        if given.get(key, value) != value:
            raise ValueError(f"{key}: found {given[key]}; DeepSpeed takes an optimizer not its own only with {value}")
        given[key] = value
    return optimizer, given


def _refuse_sharding(config: Mapping[str, Any]) -> None:
    """Raise ValueError for what puts parts of matrices in the place of matrices, or steps with DeepSpeed's own Adam."""
    for name, allowed, why in _REFUSED:
        found: Any = config
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found not in allowed:
            written = " or ".join(json.dumps(value) for value in dict.fromkeys(allowed) if value is not None)
            remedy = f"Write {written}, or leave it out" if written else "Leave it out"
            raise ValueError(f"{name}: found {json.dumps(found)}, which is not supported: {why}. {remedy}")
