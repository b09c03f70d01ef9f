"""Tests of the weight norms that Hyperball stores: matrices of zeros cause a warning, and a stored norm is never
recomputed."""

from __future__ import annotations

import pytest
import torch
from spectra import normal, run
from tolerances import assert_bitwise
from torch import nn

from shardmuon import Muon


def test_matrices_of_zeros_are_said_once_by_name() -> None:
    experts = torch.stack([torch.zeros(4, 5), torch.ones(4, 5), torch.zeros(4, 5)])
    full = {"a": torch.zeros(4, 5), "b": torch.zeros(5, 4), "c": torch.eye(4), "experts": experts}
    named = [(name, nn.Parameter(t)) for name, t in full.items()]
    groups = [{"params": named[:-1]}, {"params": named[-1:], "view": "stack"}]
    optimizer = Muon(groups, lr=0.1, weight_decay=0.0, variant="hyperball")
    with pytest.warns(UserWarning, match=r"^a, b, experts\[0\], 1 more: zero before the first step") as said:
        run(optimizer, [p for _, p in named], range(4))
    assert len(said) == 1


def test_a_variant_that_is_added_takes_no_norm_anew() -> None:
    """Adding NorMuon must not change the norms that Hyperball has stored. In an earlier version, creating the state of
    one variant overwrote the state of the other."""
    params = [nn.Parameter(normal(*shape)) for shape in ((12, 12), (17, 5))]
    optimizer = Muon(params, lr=0.1, weight_decay=0.0, variant="hyperball")
    run(optimizer, params, [0])
    radii = [optimizer.state[p]["weight_radius"].clone() for p in params]
    for p in params:
        p.data.mul_(1.5)
    optimizer.param_groups[0]["variant"] = "normuon+hyperball"
    run(optimizer, params, [1])
    assert_bitwise([optimizer.state[p]["weight_radius"] for p in params], radii)
