"""Tests of the errors that `add_param_group` raises when a part of the model starts to train later than the rest."""

from __future__ import annotations

import re

import pytest
from torch import nn

from shardmuon import Muon, param_groups


def test_a_part_that_is_added_as_it_stands_is_told_what_to_write() -> None:
    layers = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 5)
    model = nn.Sequential(*layers)
    model[:2].requires_grad_(False)
    optimizer = Muon(model, lr=0.03)
    part = model[:2].requires_grad_(True)
    says = "for g in shardmuon.param_groups(part, lr=...): optimizer.add_param_group(g)"
    with pytest.raises(ValueError, match=re.escape(says)):
        optimizer.add_param_group({"params": list(part.named_parameters())})
    with pytest.raises(ValueError, match=r"group 2: its parameters have no names, those of the .* have names\. Give"):
        optimizer.add_param_group({"params": [part[0].weight]})
    optimizer, (group, _) = Muon([model[4].weight], lr=0.03), param_groups(model[2:4], lr=0.03)
    with pytest.raises(ValueError, match=r"group 1: its parameters have names, those of .* none\. .*group\.pop"):
        optimizer.add_param_group(group)
    # The first group has no parameter names, so `add_param_group` rejects a group with names. Remove the names, as the
    # error message says, and try again.
    group.pop("param_names")
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1]["params"] == [model[2].weight]
