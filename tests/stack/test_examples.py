"""Tests that run every training script in examples/ on 1 and 2 ranks. They check which ranks orthogonalize each matrix,
how many matrices each rank orthogonalizes, and the findings of an audit. A run that is resumed from a checkpoint must
end with weights that are bitwise identical to those of an uninterrupted run."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run

LLAMA = [
    f"model.layers.{layer}.{part}.weight"
    for layer in range(2)
    for part in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
]
NET = [f"blocks.{block}.{part}.weight" for block in range(2) for part in ("up", "down")]
VIT = [
    *(
        f"blocks.{block}.{part}.weight"
        for block in range(2)
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ),
    "patch_embed.proj.weight",
]


def _lora(name: str) -> list[str]:
    base = name.removesuffix(".weight")
    return [f"base_model.model.{base}.lora_{side}.default.weight" for side in "AB"]


@dataclass(frozen=True)
class Case:
    """An example script with one set of arguments.

    Attributes:
        example: Name of the example's file, without the suffix.
        world: Number of ranks.
        middle: Path of the checkpoint written halfway, relative to the run's folder.
        muon: Names of parameters that must go to Muon.
        prepare: Name of a function in `ranks.py` that each rank calls first.
        fixed: Arguments of the example's function `options`. If empty, the function is not called.
        needs: Required packages, apart from those that all examples need.
        either: Names of parameters that may go to either Muon or AdamW.
        name: Name of the layout, for the ID of the test.
        calls: Number of calls to `step()` per training step. Each call updates some of the parameter groups.
    """

    example: str
    world: int
    middle: str
    muon: list[str]
    prepare: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    name: str = ""
    calls: int = 1

    def __str__(self) -> str:
        return f"{self.example}-{self.name or ('one' if self.world == 1 else 'ddp')}"


TRAINER = {"middle": "checkpoint-3", "muon": LLAMA, "needs": ("transformers", "accelerate")}
SFT = {**TRAINER, "needs": ("trl", "datasets")}
ADAPTED = {**TRAINER, "muon": [part for name in LLAMA for part in _lora(name)], "needs": ("transformers", "peft")}
ZERO = {**TRAINER, "prepare": "deepspeed_on_cpu", "calls": 3, "needs": ("transformers", "accelerate", "deepspeed")}
LOOP = {"middle": "after-6", "muon": NET, "needs": ("accelerate",)}
LIGHTNING = {"middle": "step=3.ckpt", "muon": [f"net.{name}" for name in NET], "needs": ("lightning",)}
TITAN = {"middle": "after-3", "muon": NET, "needs": ("torchtitan", "tyro")}
TIMM = {"middle": "after-3.pt", "muon": VIT, "needs": ("timm",), "either": ("head.weight",)}

# A correct example never causes a warning that contains one of these phrases.
MISFIRES = ("has a gradient", "orthogonalizes all", "no parameter goes to Muon")

CASES = [
    Case("hf_trainer", 1, **TRAINER),
    Case("hf_trainer", 2, **TRAINER),
    Case("hf_trainer", 2, **TRAINER, prepare="force_fsdp2", fixed={"fsdp": True}, name="fsdp2"),
    Case("trl_sft", 1, **SFT),
    Case("trl_sft", 2, **SFT),
    Case("peft_lora", 1, **ADAPTED),
    Case("peft_lora", 2, **ADAPTED),
    Case("hf_deepspeed", 1, **ZERO),
    Case("hf_deepspeed", 2, **ZERO, name="zero2"),
    Case("accelerate_loop", 1, **LOOP),
    Case("accelerate_loop", 2, **LOOP),
    Case("accelerate_loop", 2, **LOOP, prepare="force_fsdp2", fixed={"fsdp": True}, name="fsdp2"),
    Case("lightning_module", 1, **LIGHTNING, fixed={"devices": 1, "strategy": "auto"}),
    Case("lightning_module", 2, **LIGHTNING, fixed={"devices": 2, "strategy": "ddp"}),
    Case("lightning_module", 2, **LIGHTNING, fixed={"devices": 2, "strategy": "modelparallel"}, name="fsdp2"),
    Case("torchtitan_optimizer", 1, **TITAN),
    Case("torchtitan_optimizer", 2, **TITAN, name="fsdp2"),
    Case("timm_model", 1, **TIMM),
    Case("timm_model", 2, **TIMM),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_example_trains_is_muon_and_resumes_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    _need(*case.needs)
    given: dict[str, Any] = {"folder": str(tmp_path / "run"), "kind": case.fixed}
    whole = run(case.example, case.world, prepare=case.prepare, **given)
    for rank in whole:
        assert set(case.muon) <= set(rank.muon) <= {*case.muon, *case.either}
        matrices = sum(map(len, rank.owners.values()))
        owned = [owner for name in case.muon for owner in rank.owners[name]]
        assert len(owned) == matrices - sum(len(rank.owners.get(name, ())) for name in case.either)
        assert set(owned) == set(range(case.world))
        # Examples that call `step()` several times per training step have their own Audit, which raises an error on a
        # finding, so ranks.py adds no audit to them.
        assert rank.compared == (matrices if case.calls == 1 else 0)
        assert [text for text in rank.heard if any(words in text for words in MISFIRES)] == []
        assert sum(rank.mine for rank in whole) == matrices
    middle = str(tmp_path / "run" / case.middle)
    resumed = run(case.example, case.world, prepare=case.prepare, **given, resume=middle)
    for rank, steps in (*((rank, 6) for rank in whole), *((rank, 3) for rank in resumed)):
        assert [sum(rank.runs[i : i + case.calls]) for i in range(0, len(rank.runs), case.calls)] == [rank.mine] * steps
        assert rank.findings == []
        assert rank.weights == whole[0].weights


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_the_factory_takes_from_the_arguments_what_is_not_given() -> None:
    _need("transformers", "accelerate")
    import transformers

    from shardmuon.frameworks.transformers import MuonFactory

    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 8))
    args = transformers.TrainingArguments(
        learning_rate=2e-3, weight_decay=0.03, adam_beta2=0.98, adam_epsilon=1e-6, use_cpu=True, report_to=[]
    )
    muon, *adamw = MuonFactory(args)()(model, adamw_lr=5e-4).param_groups
    assert (muon["lr"], muon["weight_decay"]) == (2e-3, 0.03)
    assert {(g["lr"], g["betas"], g["eps"]) for g in adamw} == {(5e-4, (0.9, 0.98), 1e-6)}
    muon, *adamw = MuonFactory(args, lr=0.01, weight_decay=0.0)()(model).param_groups
    assert (muon["lr"], muon["weight_decay"], adamw[0]["betas"]) == (0.01, 0.0, (0.9, 0.98))


def test_torchtitan_refuses_its_own_routing_and_parts_with_unlike_rates() -> None:
    _need("torchtitan", "tyro")
    from torchtitan.components.optimizer import ParamGroupConfig

    from shardmuon.frameworks.torchtitan import MuonOptimizers

    parts = [torch.nn.ModuleDict({name: torch.nn.Linear(4, 6)}) for name in ("first", "second")]
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]
    with pytest.raises(ValueError, match="routes parameters"):
        MuonOptimizers.Config(param_groups=groups).build(model_parts=parts)
    with pytest.raises(ValueError, match="adamw_lr"):
        MuonOptimizers.Config(options={"lr": 0.02}).build(model_parts=parts)
    made = MuonOptimizers.Config(options={"lr": 0.02, "adamw_lr": 1e-3}).build(model_parts=parts)
    before = [p.clone() for part in parts for p in part.parameters()]
    made.load_state_dict(made.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(before, (p for part in parts for p in part.parameters()), strict=True))
    assert {float(state["step"]) for o in made for state in o.state.values() if "step" in state} <= {0.0}
