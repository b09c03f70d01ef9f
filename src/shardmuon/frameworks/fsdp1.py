"""FSDP1: state dicts in a form that `FSDP.optim_state_dict` can gather.

[Note: state of a unit]
    A unit is a module that FSDP1 wraps. For each state key (`momentum_buffer`, `exp_avg`, ..), FSDP1 gathers the state
    tensors of all parameters of a unit as one tensor that is as long as the unit's flat parameter. So all parameters of
    a unit must have the same state keys, and state of the same dtype. But parameters that Muon updates and parameters
    that AdamW updates have different state keys. For this reason, shardmuon saves zeros for keys that a parameter
    lacks, and discards them on loading.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from shardmuon.host import Host
from shardmuon.layout.engines.fsdp1 import UnitPlace
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE
from shardmuon.step.kept import carry_by_position


class _FSDP1Host(Host):
    """Integration with FSDP1. It prepares state dicts for `FSDP.optim_state_dict`, and does not affect steps."""

    packages = ()

    def saved(self, core: Any, saved: dict[str, Any]) -> None:
        """Add zeros for missing state keys, and convert state to a common dtype, so that all parameters of an FSDP1
        unit have the same state keys and dtype. See [Note: state of a unit]."""
        state = saved["state"]
        units: dict[Any, list[tuple[int, Tensor]]] = {}
        for group, packed in zip(core.param_groups, saved["param_groups"], strict=True):
            for param, key in zip(group["params"], packed["params"], strict=True):
                place = UnitPlace.of(param) if key in state else None
                if place is not None and place.is_sharded:
                    units.setdefault(place.unit, []).append((key, param))
        for members in units.values():
            kinds = [kind for kind in (BUFFER, *MOMENTS) if any(kind in state[key] for key, _ in members)]
            dtypes = [state[key][kind].dtype for key, _ in members for kind in kinds if kind in state[key]]
            if not dtypes or any(SCALE in state[key] for key, _ in members):
                continue  # Skip an FSDP1 unit that has no state yet, or has 8-bit momentum, which FSDP1 cannot save.
            # `dtype` can exactly represent the values of all state tensors of the FSDP1 unit.
            dtype = reduce(torch.promote_types, dtypes)
            for key, param in members:
                zeros = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
                state[key] = {**state[key], **{kind: state[key].get(kind, zeros).to(dtype) for kind in kinds}}
        # FSDP1 saves only state tensors that are as long as their parameter, so the state of Muon variants, such as
        # NorMuon's second moments, is saved in the parameter groups.
        if units:
            carry_by_position(saved)


_FSDP1Host.register()
