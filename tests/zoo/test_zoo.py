"""Tests of routing for well-known models, which are built from tiny configs by their own libraries. The tests check
which parameters go to Muon, which matrices they consist of, which warnings are issued, and whether the parts of fused
weights have the expected roles.

`make zoo` runs these tests, which need transformers, timm, torchvision and peft. tests/routing/test_routing.py needs
none of these packages, because it imitates such models with plain modules.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo_expected import EXPECTED
from zoo_models import CLASSIFIERS, MODELS

from shardmuon import param_groups
from shardmuon.commands.main import main
from shardmuon.options import VIEW_DEFAULTS
from shardmuon.routing.groups import ParamGroups
from shardmuon.testing.layouts import ParamCase

_MISSING = [name for name in ("transformers", "timm", "torchvision", "peft") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"{', '.join(_MISSING)} not installed: make zoo installs them")


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return make()


@functools.cache
def built(name: str) -> nn.Module:
    """Return the model that `MODELS[name]` describes. It is cached for all tests, so no test may change it."""
    return made(MODELS[name])


def routed(model: nn.Module) -> tuple[ParamGroups, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = param_groups(model, lr=1e-3)
    return groups, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", dict.fromkeys([*MODELS, *EXPECTED]))
def test_each_parameter_goes_where_it_belongs(name: str) -> None:
    groups, said = routed(built(name))
    found: dict[str, list[str]] = {}
    for row in groups.rows:
        if len(row.shape) < 2:
            assert row.optimizer in ("AdamW", "frozen")
        elif row.optimizer != "frozen":
            sizes = [f"{rows}x{cols}" for rows, cols in row.matrices]
            text = ", ".join(f"{sizes.count(size)} of {size}" for size in dict.fromkeys(sizes)) or "adamw"
            listed = found.setdefault(re.sub(r"\d+", "#", row.name), [])
            listed.extend([text] if text not in listed else [])
    assert {key: " | ".join(texts) for key, texts in found.items()} == EXPECTED[name]
    nothing = [] if any(row.matrices for row in groups.rows) else ["no parameter goes to Muon"]
    assert len(said) == len(nothing) and all(text in message for text, message in zip(nothing, said, strict=True))
    assert not [row.name for row in groups.rows if "fused?" in row.reason]


@pytest.mark.parametrize("labels", [1, 2, 3, 64, 96, 320])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_is_one_whatever_its_number_of_labels(name: str, labels: int) -> None:
    groups, said = routed(made(lambda: CLASSIFIERS[name](labels)))
    plain, _ = routed(made(lambda: CLASSIFIERS[name](7)))
    assert {r.name: r.optimizer for r in groups.rows} == {r.name: r.optimizer for r in plain.rows}
    last = next(row for row in reversed(groups.rows) if len(row.shape) == 2)
    assert (last.optimizer, last.shape[0], said) == ("AdamW", labels, [])


# ------------------------------------------------------------------------------ the parts are what they are called


def parts(model: nn.Module, name: str, tensor: Tensor) -> list[Tensor]:
    """Split `tensor`, which is the parameter `name` or its gradient, into matrices according to the options of the
    parameter's group."""
    (group,) = [g for g in routed(model)[0] if name in g["param_names"]]
    options = {key: group[key] for key in VIEW_DEFAULTS if key in group}
    return ParamCase(tuple(tensor.shape), "", options).matrices(tensor)


def gradient(model: nn.Module, run: Callable[[nn.Module], Tensor], name: str) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    output = run(model)
    (output * torch.randn_like(output)).sum().backward()
    grad = dict(model.named_parameters())[name].grad
    assert grad is not None
    return parts(model, name, grad)


def one_token(model: Any) -> Any:
    return model(input_ids=torch.tensor([[7]])).logits


def one_patch(model: Any) -> Any:
    attention = model.blocks[0].attn
    return attention(torch.randn(1, 1, attention.qkv.in_features))


# With a single token, the softmax of the attention is always 1, so the gradients of q and k are zero up to rounding.
# The gradients of other parts are nonzero. Each row gives a fused weight, a function that runs the model or one
# attention module on a single token, and for each part of the weight, whether its gradient must be zero.
SINGLE = {
    "GPT-2": ("transformer.h.0.attn.c_attn.weight", one_token, (True, True, False)),
    "GPT-NeoX": ("gpt_neox.layers.0.attention.query_key_value.weight", one_token, (True, True, False)),
    "Phi-3": ("model.layers.0.self_attn.qkv_proj.weight", one_token, (True, True, False)),
    "DeepSeek-V3": ("model.layers.0.self_attn.kv_b_proj.weight", one_token, (True, False)),
    "Qwen3-Next": ("model.layers.1.self_attn.q_proj.weight", one_token, (True, False)),
    "ViT, timm": ("blocks.0.attn.qkv.weight", one_patch, (True, True, False)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_only_values_matter_to_a_single_token(name: str) -> None:
    weight, run, silent = SINGLE[name]
    found = gradient(built(name).eval(), run, weight)
    loudest = max(float(part.abs().max()) for part in found)
    # For a single output p = 1 and an incoming gradient g, the gradient of the softmax, p (g - p g), is zero. Rounding
    # may still give q and k tiny gradients.
    assert [float(part.abs().max()) < 1e-5 * loudest for part in found] == [*silent]
    for part, is_silent in zip(found, silent, strict=True):
        assert is_silent or (part.abs().amax(1) > 0).all()


# If the gate part of a fused weight is zero, the gradient of the part that it gates is zero. If the gate part is
# nonzero, every row of the gated part has a nonzero gradient.
GATED = {
    "Phi-3": ("model.layers.0.mlp.gate_up_proj.weight", 0, 1),
    "Qwen3-MoE": ("model.layers.0.mlp.experts.gate_up_proj", 0, 1),
    "Mixtral": ("model.layers.0.mlp.experts.gate_up_proj", 0, 1),
    "DeepSeek-V3": ("model.layers.1.mlp.experts.gate_up_proj", 0, 1),
    "gpt-oss": ("model.layers.0.mlp.experts.gate_up_proj", 0, 1),
    "Mamba": ("backbone.layers.0.mixer.in_proj.weight", 1, 0),
    "Qwen3-Next": ("model.layers.0.linear_attn.in_proj_qkvz.weight", 3, 2),
}


@pytest.mark.parametrize("name", GATED)
def test_a_closed_gate_stops_what_it_gates(name: str) -> None:
    weight, gate, gated = GATED[name]
    model = made(MODELS[name]).eval()
    param = dict(model.named_parameters())[weight]
    per_expert = 4 if name == "Qwen3-Next" else 2
    # With 32 tokens, the model's router chooses every expert at least once, so every expert gets a gradient.
    tokens = torch.arange(3, 35)[None]

    def run(model: Any) -> Any:
        return model(input_ids=tokens).logits

    opened = gradient(model, run, weight)
    assert all((part.abs().amax(1) > 0).all() for part in opened[gated::per_expert])
    numbers = torch.arange(param.numel()).view(param.shape)
    with torch.no_grad():
        for places in parts(model, weight, numbers)[gate::per_expert]:
            param.view(-1)[places.reshape(-1)] = 0.0
        if weight.endswith("gate_up_proj") and hasattr(
            model.get_submodule(weight.rpartition(".")[0]), "gate_up_proj_bias"
        ):
            model.get_submodule(weight.rpartition(".")[0]).gate_up_proj_bias.zero_()  # type: ignore[operator,union-attr]
    closed = gradient(model, run, weight)
    assert all(not part.any() for part in closed[gated::per_expert])
    assert any(part.any() for part in closed[gate::per_expert])


# ---------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", ["Llama, tied", "gpt-oss", "BERT"])
def test_a_config_file_gives_the_table(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = built(name)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**model.config.to_dict(), "architectures": [type(model).__name__]}))
    assert main(["route", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(routed(model)[0])
    assert main(["route", str(tmp_path)]) == 0
    assert "(2)" in capsys.readouterr().out
