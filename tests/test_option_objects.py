"""Options in their own objects: what they print, where they are refused, and what a group carries."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shardmuon import Audit, Exchange, Muon, Orthogonalizer, Storage
from shardmuon.options import ADAMW_DEFAULTS, GROUP_DEFAULTS, MUON_OPTIONS, ONLY_MUON, OPTION_OBJECTS
from shardmuon.plan.machines import MACHINES, Machine

OTHERS: dict[str, Any] = {
    "orthogonalizer": Orthogonalizer("gram", torch.float32),
    "exchange": Exchange(torch.float64, 1 << 20, MACHINES["h100"]),
    "storage": Storage("int8", "cpu", stochastic_rounding=True),
    "audit": Audit(100, samples=4, action="warn"),
}


def _two_groups(**options: Any) -> Muon:
    weight, bias = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4))
    return Muon([{"params": [("w", weight)]}, {"params": [("b", bias)], "use_muon": False}], lr=0.02, **options)


# ---------------------------------------------------------------------------------------------------- the objects


@pytest.mark.parametrize("key", OPTION_OBJECTS)
def test_an_object_prints_what_differs_from_its_defaults_and_does_not_change(key: str) -> None:
    kind, other = OPTION_OBJECTS[key], OTHERS[key]
    assert repr(kind()) == f"{kind.__name__}()"
    assert (
        eval(repr(other), {"torch": torch, "Machine": Machine, kind.__name__: kind})
        == pickle.loads(pickle.dumps(other))
        == other
    )
    assert hash(other) == hash(copy.deepcopy(other))
    for field in fields(kind):
        assert (f"{field.name}=" in repr(other)) == (getattr(other, field.name) != field.default)
        with pytest.raises(FrozenInstanceError):
            setattr(other, field.name, None)


@pytest.mark.parametrize("key", OPTION_OBJECTS)
@pytest.mark.parametrize("wrong", ["gram", {"method": "gram"}, None, 1000])
def test_something_else_in_an_objects_place_is_refused(key: str, wrong: Any) -> None:
    name = OPTION_OBJECTS[key].__name__
    with pytest.raises(TypeError, match=rf"{key} must be a shardmuon\.{name}\(\w+=\.\., .*found {wrong!r}"):
        _two_groups(**{key: wrong})


# -------------------------------------------------------------------------------------------- where they are written


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("bucket_bytes", r"exchange=shardmuon.Exchange(bucket_bytes=...)"),
        ("momentum_dtype", r"storage=shardmuon.Storage(momentum_dtype=...)"),
        ("stochastic_rounding", r"storage=shardmuon.Storage(stochastic_rounding=...)"),
    ],
)
def test_a_field_written_in_a_group_says_where_it_goes(key: str, place: str) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(4, 6))], key: 1}]
    with pytest.raises(
        ValueError, match=re.escape(f"group 0: {key} applies to the whole optimizer. Write Muon(..., {place})")
    ):
        Muon(groups, lr=0.1)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("weight_deacy", "weight_decay"),
        ("wd", "weight_decay"),
        ("momentums", "momentum"),
        ("nestrov", "nesterov"),
        ("split_size", "split_sizes"),
        ("num_head", "num_heads"),
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
    value = {"momentum": 0.5, "beta2": 0.5, "adjust_lr_fn": "none", "weight_decay_mode": "cautious"}
    value |= {"nesterov": False, "transposed": True}
    group = {"params": [("b", nn.Parameter(torch.ones(4)))], "use_muon": False, key: value.get(key, 7)}
    group.update(betas=(0.9, 0.95), eps=1e-8)
    with pytest.raises(
        ValueError, match=rf"b: .'{key}': .* are options of matrices, but the group says use_muon=False"
    ):
        Muon([group], lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_a_scheduler_that_cycles_momentum_leaves_adamws_betas(make: Callable[..., Any]) -> None:
    optimizer, momenta = _two_groups(), set[float]()
    scheduler = make(optimizer)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    for _ in range(6):
        momenta.add(optimizer.param_groups[0]["momentum"])
        assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
        optimizer.step()
        scheduler.step()
    assert len(momenta) > 3


# -------------------------------------------------------------------------------------------------------------- repr


def test_repr_shows_the_options_that_apply() -> None:
    made = _two_groups(orthogonalizer=Orthogonalizer("gram"), storage=Storage("int8"), ns_steps=3)
    made.param_groups[0].update(num_heads=2, initial_lr=0.3)
    text = repr(made)
    assert text.splitlines() == [
        "Muon (",
        "    orthogonalizer=Orthogonalizer(method='gram')",
        "    storage=Storage(momentum_dtype='int8')",
        "group 0: Muon, 1 parameter",
        "    lr: 0.02",
        "    weight_decay: 0.1",
        "    momentum: 0.95",
        "    nesterov: True",
        "    ns_coefficients: (3.4445, -4.775, 2.0315)",
        "    ns_steps: 3",
        "    adjust_lr_fn: None",
        "    weight_decay_mode: decoupled",
        "    num_heads: 2",
        "    initial_lr: 0.3",
        "group 1: AdamW, 1 parameter",
        "    lr: 0.02",
        "    weight_decay: 0.1",
        "    betas: (0.9, 0.95)",
        "    eps: 1e-08",
        ")",
    ]
