"""What stages of variants keep, through Megatron's `dist_checkpointing`, where every replica has all main weights.

[Note: sharded state]
    `sharded_state_dict` describes each tensor of an optimizer's state by its parameter's shape and shards, and fails on
    one of another shape. What a stage keeps is of another shape, and the same on all ranks that share the parameter:
    so the saved groups carry it (`shardmuon.carried`). Groups are saved by rank 0 and loaded on all. That is enough
    unless ranks have other parameters than rank 0, as pipeline stages and expert-parallel ranks do.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from shardmuon.carried import carry, kept_in
from shardmuon.muon import Muon
from shardmuon.variants import KEPT_KEYS


def carry_when_sharded(
    wrapped: Any,  # Megatron's FP32Optimizer or Float16OptimizerWithFloat16Params
    muon: Muon,
    elsewhere: str,  # where other parameters than rank 0's may be, in words; "": nowhere
) -> None:
    """Let `wrapped.sharded_state_dict` carry what stages of `muon` keep.

    It raises ValueError where other ranks have parameters that rank 0 does not save.
    """
    sharded = wrapped.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        keys = sorted({key for state in muon.state.values() for key in state if key in KEPT_KEYS})
        if not keys:
            return sharded(*args, **kwargs)
        if elsewhere:
            raise ValueError(
                f"the optimizer's variant keeps {', '.join(keys)}, which Megatron's dist_checkpointing saves from rank "
                f"0 alone, and with {elsewhere} other ranks have parameters of their own. Save optimizer.state_dict() "
                "on every model-parallel rank (--ckpt-format torch), or leave the variant out"
            )
        hook = muon.register_state_dict_post_hook(_carried)
        try:
            return sharded(*args, **kwargs)
        finally:
            hook.remove()

    wrapped.sharded_state_dict = sharded_state_dict


def _carried(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict with what is kept in its groups instead of its state, by position."""
    state = {key: {k: v for k, v in of.items() if k not in KEPT_KEYS} for key, of in saved["state"].items()}
    groups = []
    for group in saved["param_groups"]:
        groups.append(dict(group))
        found = {str(at): kept_in(saved["state"].get(key, {})) for at, key in enumerate(group["params"])}
        carry(groups[-1], found)
    return {**saved, "state": state, "param_groups": groups}
