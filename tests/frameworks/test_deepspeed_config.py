"""DeepSpeed's JSON, versions and settings: what they make, and what is refused before anything is partitioned."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_job import Case, import_deepspeed, quiet
from torch import nn

from shardmuon import Audit, Muon, Orthogonalizer, Storage
from shardmuon.core import MuonConfig
from shardmuon.frameworks.deepspeed import REQUIRED, from_config
from shardmuon.frameworks.deepspeed.partitions import check_version, refuse_options, slices_of
from shardmuon.testing import RankPool

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": Storage(momentum_dtype="int8")}, "DeepSpeed keeps and offloads state"),
        ({"storage": Storage(stochastic_rounding=True)}, "stochastic_rounding=True"),
        ({"tp_group": (0,)}, "ZeRO partitions of tensor-parallel shards"),
        ({"storage": Storage(momentum_device="cpu")}, "use offload_optimizer"),
    ],
    ids=["int8 momentum", "random rounding", "tp_group", "momentum on the CPU"],
)
def test_options_that_have_no_place_on_flats_are_refused(options: dict[str, Any], words: str) -> None:
    optimizer = Muon([nn.Parameter(torch.ones(4, 3))], lr=1e-3, **options)
    with pytest.raises(ValueError, match=words):
        refuse_options(optimizer.keeper, optimizer.param_groups)


def test_a_parameter_that_is_marked_for_deepspeeds_own_muon_is_refused() -> None:
    """The configuration's "optimizer" marks it; DeepSpeed takes any optimizer with such a name for it."""
    marked: Any = nn.Parameter(torch.ones(4, 3))
    marked._hp_mapping, marked.use_muon = object(), True
    with pytest.raises(ValueError, match='Take "optimizer" out of the configuration'):
        slices_of(torch.ones(12), [marked])


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.19.7", pytest.raises(ValueError, match=r"before 0\.19\.8 .*Install deepspeed==0\.19\.8")),
        ("0.9.12", pytest.raises(ValueError, match="wrong gradients")),
        ("0.19.8+cpu", nullcontext()),
        *((version, pytest.warns(UserWarning, match=f"{version} is newer")) for version in ("0.19.9", "0.20.0", "1.0")),
    ],
    ids=str,
)
def test_an_older_deepspeed_is_refused_and_a_newer_one_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: AbstractContextManager[object]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    with expected:
        check_version()


# ------------------------------------------------------------------------------------------- DeepSpeed's JSON


@needs_deepspeed
@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"muon_lr": 0.03},
        {"adam_lr": 1e-4},
        {"lr": 5e-3},
        {"lr": 5e-3, "adam_lr": 0, "eps": 1e-7},
        {"lr": 1e-3, "muon_lr": 0.03, "weight_decay": 0.01, "betas": [0.8, 0.9], "momentum": 0.9},
    ],
)
def test_a_json_says_and_leaves_out_what_it_does_with_deepspeeds_muon(params: dict[str, Any] | None) -> None:
    """Options of every parameter, biases and norms too: learning rate, decay and the rest of the half that it is in. A
    parameter's own `use_muon` is followed, and removed; the caller's configuration is left as it is."""
    import_deepspeed()
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    model: Any = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6, bias=False), nn.Linear(6, 4))
    model[3].weight.use_muon = False
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Muon", "params": params}}
    mine, rest = from_config(model, config)
    assert rest == {"zero_optimization": {"stage": 1}, **REQUIRED}
    assert "optimizer" in config
    assert not any(hasattr(p, "use_muon") for p in model.parameters())
    for p in model.parameters():
        p.use_muon = p.ndim == 2 and p is not model[3].weight
    theirs = MuonWithAuxAdam(DeepSpeedEngine._muon_param_groups(list(model.parameters()), params or {}))
    for p in model.parameters():
        found, expected = (
            next(group for group in optimizer.param_groups if any(p is q for q in group["params"]))
            for optimizer in (mine, theirs)
        )
        for key in ("use_muon", "lr", "weight_decay", *(["momentum"] if p.use_muon else ["betas", "eps"])):
            value = expected[key]
            assert found[key] == (tuple(value) if isinstance(value, list) else value), (tuple(p.shape), key)
        assert found.get("weight_decay_mode", "decoupled") == "decoupled"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"ns_method": "auto"}, {}),
        ({"ns_method": "gram"}, {"orthogonalizer": Orthogonalizer(method="gram")}),
        (
            {"orthogonalizer": {"method": "gram", "dtype": "float32"}},
            {"orthogonalizer": Orthogonalizer("gram", "float32")},
        ),
        ({"orthogonalizer": {"dtype": "auto", "cuda_graphs": False}}, {"orthogonalizer": Orthogonalizer(dtype="auto")}),
        ({"exchange": {"route": "auto"}}, {}),
        ({"audit": {"every": 1000, "action": "warn"}}, {"audit": Audit(1000, action="warn")}),
        ({}, {}),
    ],
)
def test_a_json_says_options_of_the_whole_optimizer(params: dict[str, Any], expected: dict[str, Any]) -> None:
    optimizer, _ = from_config(nn.Linear(4, 8), {"optimizer": {"type": "Muon", "params": params}})
    assert optimizer.config == MuonConfig(**expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": {"type": "Muon", "params": {"adam_lr": None}}}, "adam_lr is null"),
        ({"optimizer": {"type": "Muon", "params": {"betas": None}}}, "betas is null"),
        ({"optimizer": {"type": "AdamW", "params": {}}}, '"type": "Muon"'),
        ({"optimizer": {"type": "Muon", "params": {"lrate": 1}}}, "no keyword 'lrate'"),
        ({"optimizer": {"type": "Muon", "params": {"audit": {"evry": 9}}}}, "argument 'evry'"),
        ({"optimizer": {"type": "Muon", "params": {"exchange": "owner"}}}, "must be a shardmuon.Exchange"),
        ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer: found False"),
        ({"optimizer": {"type": "Muon", "params": {"lr": "auto"}}}, "lr='auto' is text"),
        (
            {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}},
            "per_head_muon is true.*num_heads",
        ),
        ({"optimizer": {"type": "Muon", "params": {"adam_w_mode": False}}}, "adam_w_mode is false"),
        ({"optimizer": {"type": "Muon", "params": {"storage": {"momentum_device": "cpu"}}}}, "offload_optimizer"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size: found 2.* Write 0 or 1"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled: found true"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size: found 2"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size: found 2"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow.* Leave it out"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio: found 0.5"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "super_offload"),
    ],
)
def test_a_json_that_asks_for_something_else_is_refused(change: dict[str, Any], words: str) -> None:
    config: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        from_config(nn.Linear(4, 4), config)


def _stepped_from_json(stage: int) -> tuple[bool, float]:
    with quiet() as deepspeed:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))
        params = {"lr": 0.02, "adam_lr": 1e-3, "ns_method": "standard"}
        written = {**Case(stage).written(), "optimizer": {"type": "Muon", "params": params}}
        del written["gradient_clipping"]
        optimizer, config = from_config(model, written)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        before = [p.detach().clone() for p in model.parameters()]
        engine.backward(engine(torch.ones(2, 16)).square().sum())
        engine.step()
        moved = all(not torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
        ran = torch.tensor(float(optimizer.traffic.orthogonalized))
        dist.all_reduce(ran)
        clipped = engine.gradient_clipping()
        engine.destroy()
        return moved and ran.item() == 2, clipped


@needs_deepspeed
def test_the_optimizer_of_a_json_orthogonalizes_each_matrix_once(deepspeed_pools: dict[int, RankPool]) -> None:
    """DeepSpeed clips where the configuration does not say so, as docs/deepspeed.md does."""
    assert deepspeed_pools[2].run(_stepped_from_json, 2) == [(True, 1.0)] * 2
