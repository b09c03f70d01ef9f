"""Tests of routing by module type. The modules imitate the names and sizes of well-known models, so that the models'
libraries are not needed. tests/zoo tests the libraries' own models."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from routing_models import (
    but,
    config,
    conv1d,
    gpt2_attention,
    gpt_oss_experts,
    known_types,
    linear,
    mlp,
    routed,
    table,
    timm_attention,
    typed,
)
from torch import nn

from shardmuon import param_groups
from shardmuon.commands.main import main
from shardmuon.options import VIEW_DEFAULTS
from shardmuon.testing.layouts import ParamCase


def matrices(model: nn.Module, name: str, **options: Any) -> list[torch.Tensor]:
    """Split a parameter into matrices according to the options of its parameter group. The elements of the returned
    matrices are indices into the flattened parameter."""
    (group,) = [g for g in param_groups(model, **{"lr": 1e-3, **options}) if name in g["param_names"]]
    param = dict(model.named_parameters())[name]
    case = ParamCase(tuple(param.shape), "", {key: group[key] for key in VIEW_DEFAULTS if key in group})
    return case.matrices(torch.arange(param.numel()).view(param.shape))


# Each case gives a module, the name of a parameter, and a function that slices the expected matrices out of this
# parameter (None if the parameter goes to AdamW).
Parts = Callable[[torch.Tensor], list[torch.Tensor]] | None
CASES: dict[str, tuple[Callable[[], nn.Module], str, Parts]] = {
    "Conv1D": (lambda: conv1d(12, 8), "weight", lambda w: [w.T]),
    "GPT-2": (gpt2_attention, "c_attn.weight", lambda w: [w[:, :8].T, w[:, 8:16].T, w[:, 16:].T]),
    "GPT-2, cross": (lambda: gpt2_attention(cross=True), "c_attn.weight", lambda w: [w[:, :8].T, w[:, 8:].T]),
    "of the name of GPT-2's, around a Conv1D": (
        lambda: typed("GPT2Attention", c_attn=conv1d(12, 8)),
        "c_attn.weight",
        lambda w: [w.T],
    ),
    "GPT-NeoX": (
        lambda: typed(
            "GPTNeoXAttention", head_size=2, config=config(num_attention_heads=3), query_key_value=linear(6, 18)
        ),
        "query_key_value.weight",
        lambda w: [torch.cat([w[6 * h + 2 * k : 6 * h + 2 * k + 2] for h in range(3)]) for k in range(3)],
    ),
    "Phi-3": (
        lambda: typed(
            "Phi3Attention",
            head_dim=3,
            num_key_value_heads=2,
            config=config(num_attention_heads=4),
            qkv_proj=linear(10, 24),
        ),
        "qkv_proj.weight",
        lambda w: [w[:12], w[12:18], w[18:]],
    ),
    "DeepSeek": (
        lambda: typed("DeepseekV3Attention", qk_nope_head_dim=3, v_head_dim=2, num_heads=2, kv_b_proj=linear(4, 10)),
        "kv_b_proj.weight",
        lambda w: [torch.cat([w[:3], w[5:8]]), torch.cat([w[3:5], w[8:]])],
    ),
    "DeepSeek-V3.2": (
        lambda: typed(
            "DeepseekV32Attention", kv_lora_rank=6, qk_rope_head_dim=3, kv_a_proj_with_mqa=linear(8, 9), v_head_dim=2
        ),
        "kv_a_proj_with_mqa.weight",
        lambda w: [w[:6], w[6:]],
    ),
    "timm": (timm_attention, "qkv.weight", lambda w: list(w.split(8))),
    "Qwen3-MoE": (
        lambda: typed("Qwen3MoeExperts", gate_up_proj=table(3, 20, 8), down_proj=table(3, 8, 10)),
        "gate_up_proj",
        lambda w: [part for expert in w for part in expert.split(10)],
    ),
    "gpt-oss": (
        gpt_oss_experts,
        "gate_up_proj",
        lambda w: [part.T for expert in w for part in (expert[:, ::2], expert[:, 1::2])],
    ),
    "gpt-oss, down": (gpt_oss_experts, "down_proj", lambda w: [expert.T for expert in w]),
    "gpt-oss, biases": (gpt_oss_experts, "gate_up_proj_bias", None),
    "experts that say so": (
        lambda: typed("AriaExperts", is_transposed=True, is_concatenated=True, gate_up_proj=table(3, 8, 20)),
        "gate_up_proj",
        lambda w: [part.T for expert in w for part in expert.split(10, 1)],
    ),
    "Mamba": (lambda: typed("MambaMixer", A_log=table(16, 4), D=table(16)), "A_log", None),
    "Mamba-2": (
        lambda: typed(
            "Mamba2Mixer", intermediate_size=8, n_groups=2, ssm_state_size=3, num_heads=4, in_proj=linear(6, 32)
        ),
        "in_proj.weight",
        lambda w: list(w.split((8, 8, 6, 6, 4))),
    ),
    "Bamba": (
        lambda: typed(
            "BambaMixer", intermediate_size=8, n_groups=2, ssm_state_size=3, num_heads=4, in_proj=linear(6, 32)
        ),
        "in_proj.weight",
        lambda w: list(w.split((8, 8, 6, 6, 4))),
    ),
    "position biases": (
        lambda: typed(
            "ShiftedWindowAttention",
            "torchvision.models.swin_transformer",
            relative_position_bias_table=table(49, 4),
        ),
        "relative_position_bias_table",
        None,
    ),
    "router": (lambda: typed("MixtralTopKRouter", weight=table(4, 8)), "weight", None),
    "OFT": (lambda: typed("OFTRotationModule", weight=table(8, 28)), "weight", None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_known_type_reads_as_its_parts(case: str) -> None:
    make, name, parts = CASES[case]
    model = nn.ModuleDict({"m": make(), "w": linear(8, 8)})
    param = dict(model.named_parameters())[f"m.{name}"]
    row = routed(model)[f"m.{name}"]
    if parts is None:
        assert (row.optimizer, row.matrices) == ("AdamW", ())
        return
    expected = parts(torch.arange(param.numel()).view(param.shape))
    found = matrices(model, f"m.{name}")
    assert row.optimizer == "Muon" and [m.tolist() for m in found] == [m.tolist() for m in expected]


def test_norms_and_entries_that_are_no_map_do_not_decay_and_routers_do() -> None:
    router, norm = typed("GptOssTopKRouter", weight=table(3, 8)), nn.LayerNorm((3, 4))
    model = nn.ModuleDict({"e": gpt_oss_experts(), "r": router, "n": norm})
    decays = {
        name: g["weight_decay"] for g in param_groups(model, lr=1e-3, weight_decay=0.1) for name in g["param_names"]
    }
    assert {name for name, decay in decays.items() if not decay} == {
        *("e.gate_up_proj_bias", "e.down_proj_bias", "n.weight", "n.bias")
    }


@pytest.mark.parametrize(
    ("name", "rows", "cols", "hint"),
    [
        ("to_qkv", 24, 8, 'if q, then k, then v: "*.to_qkv.weight": {"split_sizes": (8, 8, 8)}'),
        ("to_qkv", 24, 16, 'if q, then k, then v: "*.to_qkv.weight": {"split_sizes": (q rows, k rows, v rows)}'),
        ("W_pack", 24, 8, 'if q, then k, then v: "*.W_pack.weight": {"split_sizes": (8, 8, 8)}'),
        ("to_kv", 12, 8, 'if k, then v: "*.to_kv.weight": {"split_sizes": (6, 6)}'),
        ("kv", 12, 8, 'if k, then v: "*.kv.weight": {"split_sizes": (6, 6)}'),
        ("w12", 24, 8, 'if gate, then up: "*.w12.weight": {"split_sizes": (12, 12)}'),
        ("Wi", 24, 8, 'if gate, then up: "*.Wi.weight": {"split_sizes": (12, 12)}'),
        ("kv_b_proj", 24, 8, '"*.kv_b_proj.weight": {"split_sizes": (..)}'),
        ("wi", 24, 8, ""),
        ("to_q", 8, 8, ""),
    ],
)
def test_names_that_often_mean_fused_parts_are_marked(name: str, rows: int, cols: int, hint: str) -> None:
    for layer, what in (
        (linear(cols, rows), "linear"),
        (nn.Conv2d(cols, rows, 1, bias=False), "convolution, 1 group"),
        (nn.Conv1d(cols, rows, 1, bias=False), "convolution, 1 group"),
    ):
        model = nn.ModuleList([nn.ModuleDict({name: layer})])
        (row,) = routed(model).values()
        assert row.reason == (f"{what}, fused? {hint}" if hint else what)
        line = re.search(r"\{.*\d.*\}", hint)
        if line is not None:
            split = routed(model, overrides={f"*.{name}.weight": ast.literal_eval(line[0])})[row.name].matrices
            assert len(split) == hint.count("then") + 1


def test_placeholders_count_by_the_shapes_they_stand_for() -> None:
    """DeepSpeed's zero.Init replaces parameters with empty placeholders and stores the real shape in ds_shape. Routing
    must use the real shape."""
    models = [known_types(), known_types()]
    for module in models[1].modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(0)))
            getattr(module, name).ds_shape = p.shape
    assert param_groups(models[1], lr=1e-3).rows == param_groups(models[0], lr=1e-3).rows


# -------------------------------------------------------------------------------------------- routers, by structure


def stacks(experts: int = 4) -> nn.Module:
    return typed("Stacks", up=table(experts, 12, 8), down=table(experts, 8, 12))


@pytest.mark.parametrize("experts", [lambda: nn.ModuleList(mlp() for _ in range(4)), stacks])
@pytest.mark.parametrize("router", [lambda: linear(8, 4), lambda: typed("Gate", weight=table(4, 8))])
def test_rows_that_choose_among_the_experts_beside_them_are_a_router(
    experts: Callable[[], nn.Module], router: Callable[[], nn.Module]
) -> None:
    block = nn.ModuleDict({"choose": router(), "experts": experts()})
    rows = routed(nn.ModuleList([block, nn.ModuleDict({"choose": router(), "experts": experts()})]))
    assert rows["1.choose.weight"].reason == "router: its rows choose among 4 experts"
    assert all(row.optimizer == "Muon" for name, row in rows.items() if "experts" in name)


# ------------------------------------------------------------------------------------------------------------ heads


def blocks(num: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": mlp()}) for _ in range(num))


def classifier(labels: int, *, says: bool = False) -> nn.Module:
    tables = {"words": nn.Embedding(50, 8), "types": nn.Embedding(2, 8), "positions": nn.Embedding(16, 8)}
    first: dict[str, Any] = tables if says else {"stem": linear(5, 8)}
    model = typed("Classifier", **first, blocks=blocks(), pool=linear(8, 8), classify=nn.Linear(8, labels))
    return but(model, num_labels=labels, get_input_embeddings=lambda: model.words) if says else model  # type: ignore[no-any-return]


@pytest.mark.parametrize("labels", [1, 2, 3, 8, 12, 16, 50])
@pytest.mark.parametrize("says", [False, True])
def test_a_classifier_is_one_whatever_its_number_of_labels(labels: int, says: bool) -> None:
    rows = routed(classifier(labels, says=says))
    assert rows["classify.weight"].optimizer == "AdamW"
    assert [row.optimizer for name, row in rows.items() if "mlp" in name or name == "pool.weight"] == ["Muon"] * 5


# ------------------------------------------------------------------------------------------------------ the command


MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)) for _ in range(3))

def build():
    return Net()

built = Net()
number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "route_example", raising=False)
    return tmp_path / "route_example.py"


_STRANGE = MODEL + "\nbuilt.rates = nn.Parameter(__import__('torch').zeros(6, 4))\n"
# In the expected output, each * stands for a layer number.
_LINES = "blocks.*.*.weight (6)  8x8    1 of 8x8  Muon       linear"
# Each case gives the arguments of the command `route`, the source code of the model file, the exit code, and a part of
# the expected output.
COMMANDS_OF_ROUTE: list[tuple[list[str], str, int, str]] = [
    *(([name], MODEL, 0, _LINES) for name in ("route_example:build", "route_example.py:build", "route_example:built")),
    (["route_example:built"], MODEL, 0, "Muon: 6 parameters, 6 matrices, 384 elements"),
    (["route_example:build", "--meta"], MODEL, 0, _LINES),
    (["route_example:built"], _STRANGE, 0, "warning: param_groups: rates (6x4) is a parameter of Net"),
    (["route_example"], MODEL, 2, "is no model that is known"),
    (["route_example:"], MODEL, 2, "is no MODULE:FUNCTION and no config.json"),
    (["llama3-8b"], MODEL, 0, "Muon"),
    (["route_example:missing"], MODEL, 2, "has no attribute 'missing'"),
    (["no_such_module:build"], MODEL, 2, "No module named 'no_such_module'"),
    (["route_example:number"], MODEL, 2, "'int' object is not callable"),
    (["none/config.json"], MODEL, 2, "there is no such file"),
]


@pytest.mark.parametrize(("argv", "text", "code", "says"), COMMANDS_OF_ROUTE)
def test_route_prints_the_table_of_any_model_or_what_is_wrong(
    argv: list[str], text: str, code: int, says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["route", *argv]) == code
    printed = capsys.readouterr()
    assert says in (printed.err if code else printed.out)


def llama_of(read: Any) -> nn.Module:
    model = nn.ModuleDict({"w": linear(read.hidden_size, read.hidden_size)})
    assert model.get_parameter("w.weight").is_meta
    return model


def test_route_builds_the_model_of_a_config_on_the_meta_device(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = config(hidden_size=8, architectures=["LlamaForCausalLM"])
    hub: Any = types.ModuleType("transformers")
    hub.LlamaForCausalLM = llama_of
    hub.AutoConfig = config(from_pretrained=lambda path: read)
    hub.AutoModelForCausalLM = config(from_config=llama_of)
    monkeypatch.setitem(sys.modules, "transformers", hub)
    (file.parent / "config.json").write_text("{}")
    for path, kind in (("config.json", "LlamaForCausalLM"), (".", "LlamaForCausalLM"), ("config.json", "Somebodys")):
        read.architectures = [kind]
        assert main(["route", path]) == 0
        assert "w.weight  8x8    1 of 8x8  Muon       linear" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["route", "config.json"]) == 2 and "it takes transformers" in capsys.readouterr().err


def timms() -> nn.Module:
    model = nn.Sequential(linear(5, 8), nn.ModuleDict({"a": linear(8, 3), "b": nn.LayerNorm(8)}))
    return but(model, get_classifier=lambda: model[1]["a"])  # type: ignore[index]


_QKV = 'linear, fused? if q, then k, then v: "m.qkv.weight": {"split_sizes": (8, 8, 8)}'
_MLP = 'linear, fused? if gate, then up: "m.gate_up_proj.weight": {"split_sizes": (10, 10)}'
_ENGINE = "transformer_engine.pytorch"
# Each case gives a module and, for some of its parameters, the expected shapes of the matrices and the expected reason
# for the routing.
REASONS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[tuple[tuple[int, int], ...], str]]]] = {
    "a name that other classes bear is not enough: LeViT keeps q, k and v head by head": (
        lambda: timm_attention("timm.models.levit"),
        {"qkv.weight": (((24, 8),), _QKV)},
    ),
    "whose Attention it is elsewhere nobody knows": (
        lambda: timm_attention("my.models"),
        {"qkv.weight": (((24, 8),), _QKV)},
    ),
    "sizes that do not add up are no proof": (
        lambda: typed("Phi3MLP", config=config(intermediate_size=7), gate_up_proj=linear(8, 20)),
        {"gate_up_proj.weight": (((20, 8),), _MLP)},
    ),
    "a Conv1D with outputs first is not turned": (
        lambda: typed("Conv1D", "my.models", nf=12, nx=8, out_features=12, weight=table(12, 8)),
        {"weight": (((12, 8),), "linear (Conv1D)")},
    ),
    "a kernel wider than a position is no fused projection": (
        lambda: nn.ModuleDict({"qkv": nn.Conv2d(8, 24, 3)}),
        {"qkv.weight": (((24, 72),), "convolution, 1 group")},
    ),
    "torch_geometric's Linear is a linear layer": (
        lambda: typed("Linear", "torch_geometric.nn.dense.linear", weight=table(6, 4)),
        {"weight": (((6, 4),), "linear")},
    ),
    "a module that names its outputs is a linear layer, as Transformer Engine's": (
        lambda: typed("TELinear", _ENGINE, weight=table(6, 4), out_features=6),
        {"weight": (((6, 4),), "linear (TELinear)")},
    ),
    "a module that names its outputs is a linear layer, as Megatron's": (
        lambda: typed("TELinear", _ENGINE, weight=table(6, 4), output_size_per_partition=6),
        {"weight": (((6, 4),), "linear (TELinear)")},
    ),
    "a router in the module that holds the stacks": (
        lambda: but(stacks(), choose=linear(8, 4)),
        {"choose.weight": ((), "router: its rows choose among 4 experts")},
    ),
    "a layer with as many rows as a model has blocks is no router": (
        lambda: nn.ModuleDict({"stem": linear(8, 4), "blocks": blocks(4), "norm": nn.LayerNorm(8)}),
        {"stem.weight": (((4, 8),), "linear")},
    ),
    "a model that names its words has no other vocabulary": (
        # a text model like CLIP's, whose projection has as many rows as there are position embeddings
        lambda: but(classifier(16, says=True), num_labels=0, project=linear(8, 16), get_output_embeddings=lambda: None),
        {"project.weight": (((16, 8),), "linear"), "classify.weight": (((16, 8),), "linear")},
    ),
    "timm's classifier is asked for": (timms, {"1.a.weight": ((), "output head: get_classifier()")}),
    "layers without blocks have no head": (
        lambda: nn.Sequential(linear(8, 8), linear(8, 3)),
        {"0.weight": (((8, 8),), "linear"), "1.weight": (((3, 8),), "linear")},
    ),
    "positions as wide as a norm are a table, without a word": (
        lambda: nn.ModuleDict({"e": typed("Embed", cls=table(1, 1, 8), pos=table(1, 17, 8)), "n": nn.LayerNorm(8)}),
        {"e.pos": ((), "leading dim of 1: a table for all of a batch")},
    ),
}


@pytest.mark.filterwarnings("ignore:param_groups. no parameter goes to Muon")
@pytest.mark.parametrize("claim", REASONS)
def test_a_parameter_goes_where_it_belongs_for_this_reason(claim: str) -> None:
    make, wanted = REASONS[claim]
    rows = routed(nn.ModuleDict({"m": make()}))
    assert {name: (rows[f"m.{name}"].matrices, rows[f"m.{name}"].reason) for name in wanted} == wanted
