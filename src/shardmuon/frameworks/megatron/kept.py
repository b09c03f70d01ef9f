"""State of variants' stages in Megatron's checkpoints: the saved groups carry it (`shardmuon.step.kept`).

[Note: sharded state]
    `sharded_state_dict` describes each tensor of an optimizer's state by its parameter's shape and shards, and fails on
    one of another shape. What a stage keeps is of another shape, and the same on all ranks that share the parameter:
    so the saved groups carry it. Groups are saved by rank 0 and loaded on all. That is enough unless ranks have other
    parameters than rank 0, as pipeline stages and expert-parallel ranks do.

[Note: whose groups are saved]
    Of the distributed optimizer, the formats that follow its buffers save the groups of each model-parallel rank apart,
    so names of parameters on this rank are enough. Those in model space save the groups of rank 0 for all: there
    everything is brought together, by the place that a parameter has in the whole model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.groups import num_ranks
from shardmuon.comm.vote import Fault, gather
from shardmuon.frameworks.stack import caller
from shardmuon.host import Core, Host
from shardmuon.step.kept import CARRIED, carry_by_position
from shardmuon.variants import KEPT_KEYS

BY_PLACE = "kept_state_by_place"  # in the first saved group: place in the whole model -> key -> tensor

KeptByName = dict[str, dict[str, Tensor]]  # name or place -> key -> tensor


def places_of(
    params: Mapping[str, Tensor],  # name -> the model's parameter
    model_state: Any,  # the model's `sharded_state_dict`, with the parameters themselves
) -> dict[str, str]:
    """Places of parameters in the whole model: a key there, and an index along the axes before a parameter's own
    (layers, experts). The same on all ranks that share it, however the model is cut. Without those whose place it does
    not say: whoever needs it refuses them, on every rank."""
    utils = importlib.import_module("megatron.core.dist_checkpointing.utils")
    dicts = importlib.import_module("megatron.core.dist_checkpointing.dict_utils")
    described, _ = utils.extract_sharded_tensors_and_factories(model_state)
    by_param = {id(sharded.data): sharded for sharded in dicts.nested_values(described)}
    found = {}
    for name, param in params.items():
        sharded = by_param.get(id(param))
        if sharded is not None:
            part = next(iter(dicts.nested_values(sharded.build()))) if hasattr(sharded, "build_fn") else sharded
            found[name] = f"{sharded.key} {[int(at) for at in part.global_offset[: part.prepend_axis_num]]}"
    return found


def bring_together(groups: Sequence[dict[str, Any]], places: Mapping[str, str], *, tells: bool) -> None:
    """Let the first of the saved groups carry what stages keep on any rank, by place. Collective over all ranks.

    Args:
        groups: Saved ones, which carry what this rank has by name.
        places: From `places_of`.
        tells: Whether this rank is the one among its replicas to tell the others.

    Raises:
        Refused: On every rank.
    """
    mine: KeptByName = {}
    fault = Fault()
    with fault:
        for group in groups:
            for name, kept in (group.pop(CARRIED, None) or {}).items():
                if name not in places:
                    raise ValueError(
                        f"{name}: its variant keeps {', '.join(kept)}, and the model's sharded state dict does not "
                        "say where the parameter is. Give model.sharded_state_dict(), which has the parameters "
                        "themselves, or save with distrib_optim_sharding_type='dp_reshardable'"
                    )
                _put(mine, places[name], kept)
    everyone = gather(mine if tells else {}, tuple(range(num_ranks())), fault.text, fault.cause)
    whole: KeptByName = {}
    for theirs in everyone:
        for place, kept in theirs.items():
            _put(whole, place, kept)
    if groups and whole:
        groups[0][BY_PLACE] = whole


def _put(whole: KeptByName, place: str, kept: dict[str, Tensor]) -> None:
    known = whole.setdefault(place, kept)
    if known.keys() != kept.keys() or any(not torch.equal(known[key], kept[key]) for key in kept):
        raise ValueError(
            f"{place}: two parameters at this place in Megatron's sharded state keep different {', '.join(kept)}, so "
            "a checkpoint in model space cannot tell them apart. Save with distrib_optim_sharding_type="
            "'dp_reshardable', or leave the variant out"
        )


def carried_by(groups: Sequence[Mapping[str, Any]], places: Mapping[str, str]) -> KeptByName:
    """State that saved groups carry, by name."""
    by_place: KeptByName = {}
    found: KeptByName = {}
    for group in groups:
        by_place.update(group.get(BY_PLACE) or {})
        found.update(group.get(CARRIED) or {})
    return found | {name: by_place[place] for name, place in places.items() if place in by_place}


class WholeHost(Host):
    """Host for Megatron's wrappers in which every replica has all main weights. Saved groups carry what stages keep.

    Args:
        elsewhere: Where other parameters than rank 0's may be, in words; "": nowhere. `sharded_state_dict` raises
            ValueError there, as rank 0 alone saves groups.
    """

    packages = ()

    def __init__(self, elsewhere: str) -> None:
        self._elsewhere = elsewhere

    def saved(self, core: Core, saved: dict[str, Any]) -> None:
        keys = sorted({key for state in saved["state"].values() for key in state if key in KEPT_KEYS})
        if keys and self._elsewhere and caller("sharded_state_dict", "megatron") is not None:
            raise ValueError(
                f"the optimizer's variant keeps {', '.join(keys)}, which Megatron's dist_checkpointing saves from rank "
                f"0 alone, and with {self._elsewhere} other ranks have parameters of their own. Save "
                "optimizer.state_dict() on every model-parallel rank (--ckpt-format torch), or leave the variant out"
            )
        carry_by_position(core.param_groups, saved)
