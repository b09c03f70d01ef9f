"""Tests that unsupported DeepSpeed versions and settings raise an error before any parameter is partitioned."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardmuon import Muon
from shardmuon.frameworks.deepspeed import _check_version, _refuse_options, _slices_of


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum_dtype": "int8"}, "DeepSpeed keeps and offloads state"),
        ({"stochastic_rounding": True}, "stochastic_rounding=True"),
        ({"tp_group": (0,)}, "ZeRO partitions of tensor-parallel shards"),
        ({"momentum_device": "cpu"}, "use offload_optimizer"),
    ],
    ids=["int8 momentum", "random rounding", "tp_group", "momentum on the CPU"],
)
def test_options_that_have_no_place_on_flats_are_refused(options: dict[str, Any], words: str) -> None:
    optimizer = Muon([nn.Parameter(torch.ones(4, 3))], lr=1e-3, **options)
    with pytest.raises(ValueError, match=words):
        _refuse_options(optimizer.keeper, [(group, [], {}) for group in optimizer.param_groups])


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.19.7", pytest.raises(ValueError, match=r"before 0\.19\.8 .*Install deepspeed==0\.19\.8")),
        ("0.9.12", pytest.raises(ValueError, match="wrong gradients")),
        ("0.19.8+cpu", nullcontext()),
        *((version, nullcontext()) for version in ("0.19.9", "0.20.0", "1.0")),
    ],
    ids=str,
)
def test_an_older_deepspeed_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: AbstractContextManager[object]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    with expected:
        _check_version()


def _zero_3(kind: str = "DeepSpeedZeroOptimizer_Stage3", **settings: Any) -> dict[str, Any]:
    return {"_z3_optimizer": type(kind, (), settings)()}


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        # DeepSpeed sets `use_muon` on parameters if the "optimizer" section of its configuration selects DeepSpeed's
        # own Muon, which then updates these parameters.
        ({"_hp_mapping": object(), "use_muon": True}, 'Take "optimizer" out of the configuration'),
        (_zero_3("MiCS_Optimizer"), r"MiCS_Optimizer \(MiCS, ZenFlow\) is not supported"),
        (_zero_3(zero_hpz_partition_size=2), r"zero_hpz_partition_size=2 of ZeRO 3 .* leave it out"),
        (_zero_3(partial_offload=0.5), "partial_offload=0.5 of ZeRO 3"),
        (_zero_3(zenflow=True), "zenflow=True of ZeRO 3"),
    ],
)
def test_parameters_that_deepspeed_steps_by_itself_or_cuts_otherwise_are_refused(
    marks: dict[str, Any], words: str
) -> None:
    param = nn.Parameter(torch.ones(4, 3))
    vars(param).update(marks)
    with pytest.raises(ValueError, match=words):
        _slices_of(torch.ones(12), [param], marks.get("_z3_optimizer"))
