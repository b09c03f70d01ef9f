"""Models and meshes planned without ranks: totals, shapes from files, what is refused, and how long it takes."""

from __future__ import annotations

import contextlib
import json
import random
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from published import EXPERTS, assert_published, decoder
from torch import nn

from shardmuon.foresight import models
from shardmuon.foresight.job import count
from shardmuon.foresight.layouts import megatron_ranges, stages_of, zero_ranges
from shardmuon.foresight.models import active_of, build, load_model, preset, preset_names
from shardmuon.foresight.types import parse_mesh
from shardmuon.options import Exchange, Orthogonalizer
from shardmuon.testing.layouts import flat_ranges

SMALL = decoder(96, 48, 4, 4, 2, 12, 80)


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    data = preset(name)
    found = sum(p.numel() for p in build(data["config"]).parameters())
    published = data["published_parameters"]
    if isinstance(published, str):  # published rounded: to that many digits
        digits, unit = float(published[:-1]), {"B": 1e9, "T": 1e12}[published[-1]]
        assert abs(found / unit - digits) <= 0.5
    else:
        assert found == published
    assert data["source"].startswith("https://")
    assert data["published_at"].startswith("https://")


@pytest.mark.parametrize("row", EXPERTS, ids=lambda row: row["name"])
def test_published_models_of_experts_have_their_parameters_and_active_ones(row: dict[str, Any], tmp_path: Path) -> None:
    """Shapes are of config.json alone; tests/zoo/test_zoo.py has them by transformers' modules."""
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    if row["config"]["model_type"] in ("jamba", "minimax", "qwen3_next"):  # other layers than attention
        with pytest.raises(ValueError, match="is not one that is known without transformers"):
            load_model(str(tmp_path))
    else:
        assert_published(load_model(str(tmp_path)), row)


def test_sizes_that_differ_from_layer_to_layer_are_refused(tmp_path: Path) -> None:
    (row,) = (row for row in EXPERTS if row["name"] == "Hunyuan-A13B")
    (tmp_path / "config.json").write_text(json.dumps(row["config"] | {"moe_intermediate_size": [1024, 2048]}))
    with pytest.raises(ValueError, match=r"moe_intermediate_size=\[1024, 2048\] differs from layer to layer"):
        load_model(str(tmp_path))


def test_a_type_that_transformers_does_not_know_is_planned_if_we_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(text: str) -> nn.Module:
        raise ValueError("transformers does not recognize this architecture")

    monkeypatch.setattr(models, "model_from_config", unknown)
    (row,) = (row for row in EXPERTS if row["name"] == "Kimi-K2")
    for kind, message in (("kimi_k2", ""), ("kimi_k9", "does not recognize")):
        (tmp_path / "config.json").write_text(json.dumps(row["config"] | {"model_type": kind}))
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            assert load_model(str(tmp_path)).num_heads == 64


def _moe(experts: nn.Module, name: str = "experts", **config: Any) -> nn.Module:
    """A model of an embedding, an attention weight of 64 elements, and experts of 12 elements each."""
    layer = nn.Module()
    layer.attention = nn.Linear(8, 8, bias=False)
    layer.add_module(name, experts)
    model = nn.Module()
    model.embed = nn.Embedding(100, 8)
    model.layers = nn.ModuleList([layer])
    model.config = types.SimpleNamespace(**config)  # type: ignore[assignment]
    return model


def _list() -> nn.Module:
    return nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(8))


def _stack(**shapes: tuple[int, ...]) -> nn.Module:
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})


def _in_list(numbers: dict[str, Any]) -> nn.Module:
    return _moe(_list(), **numbers)


def _tied(**numbers: Any) -> nn.Module:
    model = _in_list(numbers)
    model.lm_head = nn.Linear(8, 100, bias=False)
    model.lm_head.weight = model.embed.weight  # type: ignore[union-attr, assignment]
    return model


EIGHT = {"num_experts": 8}


@pytest.mark.parametrize(
    ("model", "expected", "says"),
    [
        (_in_list(EIGHT | {"num_experts_per_tok": 2}), 64 + 2 * 12, "2 of 8 experts (num_experts_per_tok)"),
        (_in_list(EIGHT | {"num_experts_per_tok": [1, 3]}), 64 + 2 * 12, "2 of 8 experts (num_experts_per_tok)"),
        (_in_list({"text_config": EIGHT | {"moe_k": 2}}), 64 + 2 * 12, "2 of 8 experts (moe_k)"),
        (
            _in_list(EIGHT | {"model_type": "switch_transformers"}),
            64 + 12,
            "1 of 8 experts (model_type switch_transfor",
        ),
        (_moe(_stack(w=(8, 3, 4), b=(8, 3)), moe_topk=4, **EIGHT), 64 + 4 * 15, "4 of 8 experts (moe_topk)"),
        (  # DBRX: one matrix for all experts
            _moe(_stack(w1=(24, 4)), ffn_config={"moe_num_experts": 8, "moe_top_k": 4}),
            64 + 4 * 12,
            "4 of 8 experts (moe_top_k)",
        ),
        (  # Granite: experts by another name
            _moe(_stack(input_linear=(8, 3, 4)), "moe", num_local_experts=8, num_experts_per_tok=2),
            64 + 2 * 12,
            "2 of 8 experts",
        ),
        (_tied(num_experts_per_tok=2, **EIGHT), 64 + 2 * 12 + 800, "2 of 8 experts"),
        (_moe(_list(), "shared_experts", num_experts_per_tok=2, **EIGHT), 64 + 8 * 12, ""),
        (_moe(_stack(relative=(8, 3, 4)), "moe", num_experts_per_tok=2), 64 + 8 * 12, ""),  # eight of what?
        *(
            (_in_list(said), 64 + 8 * 12, f"all {many}experts are counted as active, as no configuration says how many")
            for said, many in (
                ({}, ""),
                (EIGHT | {"top_k": 2}, "8 "),  # a sampler's
                (EIGHT | {"num_experts_per_tok": 9}, "8 "),
                (EIGHT | {"num_experts_per_tok": True}, "8 "),
            )
        ),
    ],
)
def test_experts_of_a_token_are_those_that_a_configuration_says(model: nn.Module, expected: int, says: str) -> None:
    """All are counted where none says it, and that is said; without experts nothing is."""
    elements, source = active_of(model, models.flattened(vars(model.config)))
    assert elements == expected
    assert source.startswith(says) and bool(source) == bool(says)


SPARSE = SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_shared_experts": 1}


def _hugging_face(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes}


def test_a_configuration_says_it_with_transformers_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules come from elsewhere with transformers, and only the file says how many experts a token takes."""
    sparse = SPARSE | {"qk_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(_hugging_face(sparse)))
    made = build(sparse)
    made.config = None  # type: ignore[assignment]
    flops = count(build(sparse), "shard=2").tokens_flops
    of_file = count(str(tmp_path), "shard=2")
    monkeypatch.setattr(models, "model_from_config", lambda text: made)
    with_modules = count(str(tmp_path), "shard=2")
    assert of_file.tokens_flops == with_modules.tokens_flops == flops
    assert of_file.active == with_modules.active == "2 of 8 experts (num_experts_per_tok)"
    whole = sparse | {"num_experts_per_tok": 8}
    assert flops < count(build(whole), "shard=2").tokens_flops


def test_the_number_can_be_given() -> None:
    given = count(build(SPARSE), "shard=2", active_params=3e5)
    assert (given.tokens_flops, given.active) == (1800000, "as given")
    for wrong in (0, -1e9, float("nan"), float("inf"), True, "3B"):
        with pytest.raises(ValueError, match=r"active_params=.* must be a number of parameters"):
            count(build(SPARSE), "shard=2", active_params=wrong)  # type: ignore[arg-type]


def test_a_configuration_of_a_known_type_needs_no_transformers(tmp_path: Path) -> None:
    known = preset("llama3-8b")["config"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [], **known}))
    assert count(str(tmp_path), "shard=8").num_params == 8030261248
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", **known}))
    with pytest.raises(ValueError, match="'unheard_of' is not one that is known without transformers"):
        count(str(tmp_path), "shard=8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    with pytest.raises(ValueError, match="vocab_size, num_hidden_layers, num_attention_heads is missing"):
        count(str(tmp_path), "shard=8")


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("model", "mesh", "engine", "message"),
    [
        ("llama3-8", "dp=2", None, r"'llama3-8' is no model that is known.*did you mean llama3-8b"),
        ("llama3-8b", "", None, "the mesh is empty"),
        ("llama3-8b", "shards=8", None, r"'shards=8' is no axis=size.*did you mean shard\?"),
        ("llama3-8b", "shard=0", None, "sizes whole numbers of at least 1"),
        ("llama3-8b", "shard=8 shard=2", None, "shard stands there twice"),
        ("llama3-8b", "shard=8", "fsdp3", r"engine='fsdp3' is not one of fsdp2.*did you mean fsdp2"),
        ("llama3-8b", "shard=8 pp=2", "fsdp1", "fsdp1 with pp is not planned. Write pp=1"),
        ("llama3-8b", "dp=8", "fsdp1", "Write shard=8 for FULL_SHARD, or engine ddp"),
        ("llama3-8b", "shard=20000", None, "10,240 are the most"),
        ("llama3-8b", "tp=24", None, r"tp=24 does not divide the 32 attention heads of Llama 3 8B. Write tp=16"),
        ("llama3-8b", "tp=16", None, r"tp=16 does not divide the 8 key-value heads of Llama 3 8B. Write tp=8"),
        ("llama3-8b", "dp=2 shard=4", "zero1", r"zero1 has no axis shard.*dp=8 instead of dp=2 shard=4"),
        ("llama3-8b", "dp=2 tp=4", "zero3", "zero3 with tp or ep is not supported"),
        ("llama3-8b", "shard=4 pp=64", None, r"pp=64 stages for 32 layers. Write pp=32"),
        ("qwen3-30b-a3b", "shard=12 ep=8", None, r"ep=8 does not divide shard x tp = 12.*ep=6"),
        ("qwen3-30b-a3b", "shard=12 ep=3", None, r"ep=3 does not divide the 128 experts.*Write ep=1"),
        ("nowhere/config.json", "dp=2", None, "there is no such file"),
    ],
)
def test_wrong_input_says_what_to_write(model: str, mesh: str, engine: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count(model, mesh, engine=engine)


# ------------------------------------------------------------------------------------------------- stages and buffers


def test_stages_of_equal_layers_are_planned_once() -> None:
    one, four = (count(build(SMALL), mesh, gpus_per_node=2) for mesh in ("shard=2", "shard=2 pp=4"))
    assert four.world == 8
    assert sum(four.copies.values()) == 4
    assert {c.stage for c in four.classes} <= {0, 1, 2, 3}
    assert sum(c.count * c.muon_elements for c in four.classes) == sum(c.count * c.muon_elements for c in one.classes)
    assert sum(c.count * c.orthogonalized for c in four.classes) == sum(c.count * c.orthogonalized for c in one.classes)


def test_stages_take_layers_as_evenly_as_they_divide() -> None:
    found = build(SMALL | {"num_hidden_layers": 11})
    job = count(found, "shard=1 pp=4")
    params = [c.stored.weights // 4 for c in job.classes]
    assert sum(p * c.count for p, c in zip(params, job.classes, strict=True)) == job.num_params
    assert stages_of([], parse_mesh("dp=1")) == [[]]


def test_layers_are_told_from_their_experts() -> None:
    """Eight experts in each of two layers are no eight layers."""
    model = _in_list(EIGHT | {"num_experts_per_tok": 2})
    model.layers.append(_in_list({}).layers[0])  # type: ignore[operator, union-attr, index]
    first, second = count(model, "shard=1 pp=2", gpus_per_node=1).classes
    assert (first.stage, second.stage) == (0, 1)
    assert first.muon_elements == second.muon_elements == 64 + 8 * 12


def test_experts_that_lie_whole_on_ranks_are_counted_each_by_its_size() -> None:
    """Experts are counted by size in buckets of one matrix each, of which many are alike."""
    config = SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    how = Orthogonalizer("standard", torch.float32)
    exact = count(build(config), "shard=4 ep=4", device="cpu", orthogonalizer=how, exchange=Exchange(bucket_bytes=1))
    sizes: Counter[tuple[int, int]] = Counter()
    for c in exact.classes:
        assert sum(b.held for b in c.buckets) == c.muon_elements
        assert sum(not b.exchange for b in c.buckets) >= 3 * 2 * config["num_hidden_layers"]  # gate, up, down of two
        for b in c.buckets:
            sizes.update({(m.rows, m.cols): c.count * m.num for m in b.matrices})
    wanted: Counter[tuple[int, int]] = Counter()
    for m in exact.matrices:
        wanted[m.rows, m.cols] += m.count
    assert sizes == wanted


def test_experts_that_lie_whole_move_nowhere_in_few_buckets() -> None:
    """DeepSeek-V3's: 58 layers of 4 experts of 3 matrices on each rank, in 17 buckets, not 348, but for a
    few that a late rank hands on. One takes a 32nd part of the momentum at most, in one batch of each shape."""
    exact = count("deepseek-v3", "shard=64 ep=8")
    for c in exact.classes:
        local = [bucket for bucket in c.buckets if not bucket.exchange]
        assert len(local) <= 17 and not any(bucket.sent for bucket in local)
        assert 0.95 * 58 * 4 * 3 <= sum(m.num for bucket in local for m in bucket.matrices) <= 58 * 4 * 3
        for bucket in local:
            assert bucket.batches <= 4 * c.muon_elements / 32
            assert len({m[:2] for m in bucket.matrices}) == len(bucket.matrices) <= 2


def test_megatron_buffers_are_those_of_the_layout_table() -> None:
    draw = random.Random(0)
    for _ in range(100):
        sizes = [draw.randint(1, 700) for _ in range(draw.randint(1, 9))]
        num, bucket = draw.randint(1, 8), draw.choice([None, 500, 1000])
        assert megatron_ranges(sizes, num, bucket)[0] == flat_ranges(sizes, num, bucket)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shares_every_element_out_once(stage: int) -> None:
    draw = random.Random(0)
    for _ in range(50):
        sizes, num = [draw.randint(1, 300) for _ in range(draw.randint(1, 9))], draw.randint(1, 7)
        table, length = zero_ranges(sizes, num, stage)
        for size, held in zip(sizes, table, strict=True):
            assert sum(stop - start for start, stop in held) == size
        assert num * length >= sum(sizes)


def test_megatron_experts_are_planned_for_one_expert_group() -> None:
    sparse = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    exact = count(build(sparse), "dp=4 tp=2 ep=2", engine="megatron", gpus_per_node=4)
    assert list(exact.copies.values()) == [1, 2]
    assert sum(kind.count for kind in exact.matrices) == sum(
        c.count * c.orthogonalized for c in exact.classes
    )  # each matrix once in the job, whatever the groups
    assert sum(c.count * c.muon_elements for c in exact.classes) == exact.muon_params


def test_wires_of_half_the_width_halve_the_bytes() -> None:
    hows = (Orthogonalizer("standard", dtype) for dtype in (torch.float32, torch.bfloat16))
    counted = (count(build(SMALL), "shard=4", device="cpu", orthogonalizer=how) for how in hows)
    wide, narrow = (sum(c.count * c.sent for c in exact.classes) for exact in counted)
    assert wide == 2 * narrow > 0


# ---------------------------------------------------------------------------------------------------- how long it takes


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "mesh", "seconds"),  # the goal; measured on one core: 1.1, 7.3
    [("llama3-8b", "shard=64", 2), ("deepseek-v3", "shard=1024", 20)],
)
def test_large_jobs_are_planned_in_seconds(model: str, mesh: str, seconds: float) -> None:
    start = time.process_time()
    exact = count(model, mesh)
    assert time.process_time() - start < 2 * seconds  # twice the goal: other work slows this machine's caches
    assert sum(c.count for c in exact.classes) == exact.world
    assert sum(c.count * c.muon_elements for c in exact.classes) == exact.muon_params


@pytest.mark.parametrize(
    ("mesh", "better"),
    [
        ("shard=8 ep=2", "dp=2 shard=4 ep=2"),  # 10 experts of each of 2 ranks over 4: 3 3 3 1
        ("shard=8", "dp=2 shard=4"),  # 20 over 8: six have 3, one has 2, one none
        ("dp=2 shard=4 ep=2", ""),
        ("shard=24 ep=2", ""),  # more ranks than experts: their rows are cut
    ],
)
def test_experts_that_do_not_divide_over_shards_are_told(mesh: str, better: str) -> None:
    """Uneven cuts follow torch.chunk, as FSDP2's; the mesh that is proposed cuts evenly."""
    few = SMALL | {"num_hidden_layers": 1, "num_experts": 20, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    uneven = count(build(few), mesh).uneven
    if not better:
        assert uneven == ""
        return
    arranged = parse_mesh(mesh)
    share = arranged.shard // arranged.ep
    held = [len(part) for part in torch.arange(20 // arranged.ep).chunk(share)]
    held += [0] * (share - len(held))
    assert uneven.startswith(f"20 experts do not divide over {arranged.shard} ranks")
    assert f"which hold {min(held)} to {max(held)} of a layer" in uneven
    assert uneven.endswith(f'They do with --mesh "{better}"')
    assert count(build(few), better).uneven == ""
