"""Keys of groups: where they are refused, and what a group carries and prints."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from shardmuon import Muon
from shardmuon.options import ADAMW_DEFAULTS, CONFIG_OPTIONS, GROUP_DEFAULTS, MUON_OPTIONS, ONLY_MUON


def _two_groups(**options: Any) -> Muon:
    weight, bias = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4))
    return Muon([{"params": [("w", weight)]}, {"params": [("b", bias)], "use_muon": False}], lr=0.02, **options)


# ------------------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize("key", CONFIG_OPTIONS)
def test_an_option_of_the_whole_optimizer_written_in_a_group_says_where_it_goes(key: str) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(4, 6))], key: 1}]
    says = f"group 0: {key} applies to the whole optimizer. Write Muon(..., {key}=...)"
    with pytest.raises(ValueError, match=re.escape(says)):
        Muon(groups, lr=0.1)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("num_heads", "is written split_sizes=h"),
        ("rank_local", "is written process_group=(), tp_group=()"),
        ("weight_decay_mode", 'is part of the variant: write variant="cautious"'),
        ("beta2", "of NorMuon is 0.95"),
        ("orthogonalizer", "is written Muon(..., method=..., ns_dtype=...)"),
        ("exchange", "is written Muon(..., bucket_bytes=...)"),
        ("storage", "is written Muon(..., momentum_dtype=..., momentum_device=..., stochastic_rounding=...)"),
        ("audit", "is written Muon(..., audit_every=...)"),
    ],
)
def test_another_spelling_of_an_option_is_an_error_with_what_to_write(key: str, says: str) -> None:
    weight, given = nn.Parameter(torch.ones(4, 6)), dict[str, Any]({key: 1})
    with pytest.raises(ValueError, match=re.escape(f"group 0: {key} {says}")):
        Muon([{"params": [weight], **given}], lr=0.1)
    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {key!r}: {key} {says}")):
        Muon([weight], lr=0.1, **given)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("split_sizes", ': it is an option of a group. Write {"params": [...], "split_sizes": ...}, or an override'),
        ("betas", ': it is an option of a group. Write {"params": [...], "betas": ...}, or an override'),
        ("learning_rate", " (did you mean lr?)"),
        ("momentum_dtpye", " (did you mean momentum_dtype?)"),
        ("capturable", ""),
    ],
)
def test_a_keyword_that_is_none_says_what_to_write(key: str, says: str) -> None:
    given: dict[str, Any] = {key: 1}
    with pytest.raises(TypeError, match=re.escape(f"got an unexpected keyword argument {key!r}{says}") + "$"):
        Muon([nn.Parameter(torch.ones(4, 6))], lr=0.1, **given)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("weight_deacy", "weight_decay"),
        ("wd", "weight_decay"),
        ("momentums", "momentum"),
        ("nestrov", "nesterov"),
        ("split_size", "split_sizes"),
        ("use_mu0n", "use_muon"),
        ("learning_rate", "lr"),
        ("ns_step", "ns_steps"),
        ("adjust_lr", "adjust_lr_fn"),
        ("betas_", "betas"),
    ],
)
def test_a_misspelled_key_of_a_group_is_an_error_with_the_nearest_name(key: str, near: str) -> None:
    optimizer = _two_groups()
    extra = {"params": [nn.Parameter(torch.ones(3, 3))], key: 0.5}
    with pytest.raises(ValueError, match=rf"group 2: there is no option '{key}'. Did you mean '{near}'\?"):
        optimizer.add_param_group(extra)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("key", ["name", "initial_lr", "lr_scale", "max_momentum", "base_momentum", "layer", "swa_lr"])
def test_a_key_of_somebody_else_stays(key: str) -> None:
    optimizer = _two_groups()
    optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(3, 3)))], key: 0.5})
    assert optimizer.param_groups[2][key] == 0.5


# ------------------------------------------------------------------------------------------------ what a group carries


def _carries(group: dict[str, Any]) -> set[str]:
    return group.keys() - {"params", "param_names", "differentiable"}


def test_a_group_carries_every_option() -> None:
    for group in _two_groups().param_groups:
        assert _carries(group) == {"lr", "weight_decay", *MUON_OPTIONS, *ADAMW_DEFAULTS, *GROUP_DEFAULTS}


def test_an_adamw_group_may_say_the_optimizers_own_option_of_matrices() -> None:
    """Frameworks give each group every default, and make optimizers of the groups of others."""
    group = {"params": [("b", nn.Parameter(torch.ones(4)))], "use_muon": False, "momentum": 0.9, "nesterov": False}
    (made,) = Muon([group], lr=0.1, momentum=0.9, nesterov=False).param_groups
    assert (made["use_muon"], made["momentum"], made["nesterov"]) == (False, 0.9, False)
    assert Muon([made], lr=0.1).param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("key", sorted(ONLY_MUON))
def test_an_adamw_group_given_an_option_of_matrices_is_refused(key: str) -> None:
    value = {"momentum": 0.5, "adjust_lr_fn": "none", "variant": "cautious", "nesterov": False, "transposed": True}
    group = {"params": [("b", nn.Parameter(torch.ones(4)))], "use_muon": False, key: value.get(key, 7)}
    group.update(betas=(0.9, 0.95), eps=1e-8)
    with pytest.raises(
        ValueError, match=rf"b: .'{key}': .* are options of matrices, but the group says use_muon=False"
    ):
        Muon([group], lr=0.1)


# -------------------------------------------------------------------------------------------------------------- repr


def test_repr_shows_the_options_that_apply() -> None:
    made = _two_groups(method="gram", momentum_dtype="int8", ns_steps=3)
    made.param_groups[0].update(split_sizes=2, initial_lr=0.3)
    text = repr(made)
    assert text.splitlines() == [
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
        "    adjust_lr_fn: None",
        "    split_sizes: 2",
        "    initial_lr: 0.3",
        "group 1: AdamW, 1 parameter",
        "    lr: 0.02",
        "    weight_decay: 0.1",
        "    betas: (0.9, 0.95)",
        "    eps: 1e-08",
        ")",
    ]
