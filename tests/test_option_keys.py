"""Tests of the option keys that parameter groups store, and of the option keys that the optimizer's `repr` shows."""

from __future__ import annotations

import torch
from torch import nn

from shardmuon import Muon


def test_keys_of_somebody_else_stay() -> None:
    keys = ("name", "initial_lr", "lr_scale", "max_momentum", "base_momentum", "layer", "swa_lr")
    (group,) = Muon([{"params": [nn.Parameter(torch.ones(3, 3))], **dict.fromkeys(keys, 0.5)}], lr=0.02).param_groups
    assert [group[key] for key in keys] == [0.5] * len(keys)


def test_an_adamw_group_may_say_the_optimizers_own_option_of_matrices() -> None:
    """Frameworks copy the optimizer's defaults into every parameter group, and create new optimizers from existing
    groups. `Muon` must therefore accept AdamW groups that contain options for matrices."""
    group = {"params": [("b", nn.Parameter(torch.ones(4)))], "use_muon": False, "momentum": 0.9, "nesterov": False}
    (made,) = Muon([group], lr=0.1, momentum=0.9, nesterov=False).param_groups
    assert (made["use_muon"], made["momentum"], made["nesterov"]) == (False, 0.9, False)
    assert Muon([made], lr=0.1).param_groups[0]["momentum"] == 0.9


def test_repr_shows_the_options_that_apply() -> None:
    weight, bias = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4))
    groups = [{"params": [weight]}, {"params": [bias], "use_muon": False}]
    made = Muon(groups, lr=0.02, method="gram", momentum_dtype="int8", ns_steps=3)
    made.param_groups[0].update(split_sizes=2, initial_lr=0.3)
    assert repr(made).splitlines() == [
        "Muon (",
        "    method: gram",
        "    momentum_dtype: int8",
        "group 0: Muon, 1 parameter",
        "    lr: 0.02",
        "    weight_decay: 0.1",
        "    momentum: 0.95",
        "    nesterov: True",
        "    ns_coefficients: (3.4445, -4.775, 2.0315)",
        "    ns_steps: 3",
        "    split_sizes: 2",
        "    initial_lr: 0.3",
        "group 1: AdamW, 1 parameter",
        "    lr: 0.02",
        "    weight_decay: 0.1",
        "    betas: (0.9, 0.95)",
        "    eps: 1e-08",
        ")",
    ]
