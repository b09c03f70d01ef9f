"""shardmuon inside Megatron-core (0.19) on CPUs: its own GPT model, gradient buffers and wrappers around the optimizer.

The reference is shardmuon on one process with the gradients that Megatron's wrapper stepped on.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_gpt import Dense, clean, gpt, half, main_tensors, megatron, needs_megatron, optimizer_config
from torch import Tensor, nn

from shardmuon import Muon, Storage, audit, clip_grad_norm_, param_groups
from shardmuon.frameworks.megatron import get_megatron_optimizer
from shardmuon.testing.pool import RankPool


class Reference:
    """The main weights of Megatron's optimizers as tensors of one process, in the same groups."""

    def __init__(self, chained: Any) -> None:
        self.chained = chained
        self.dense = Dense(chained, main_tensors(chained, "weights"))

    def follow(self) -> list[str]:
        """Step on the gradients that are still there; the parameters that now differ in some bit."""
        self.dense.step(main_tensors(self.chained, "grads"))
        now = main_tensors(self.chained, "weights")
        return [name for name, p in self.dense.params.items() if not torch.equal(p, now[name])]


def _train(model: nn.Module, optimizer: Any, seed: int, overflows: bool = False) -> tuple[bool, float, float]:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens, torch.arange(8).expand(2, 8), mask, labels=tokens).float().mean()
    optimizer.scale_loss(loss).backward()
    if overflows and dist.get_rank() == 1:
        next(iter(model.parameters())).main_grad.view(-1)[0] = torch.inf
    model.finish_grad_sync()
    done, norm, _ = optimizer.step()
    return done, float(norm or 0.0), float(loss)


def _data_parallel(dtype: torch.dtype) -> int:
    """Train, save, train on, and resume in a fresh job; number of matrices done here in three steps."""
    with megatron():
        options = half(dtype)
        model = gpt(**options)
        optimizer = get_megatron_optimizer(optimizer_config(**options), [model], adamw_lr=0.01)
        reference, losses = Reference(optimizer), []
        wrapped = optimizer.chained_optimizers[0]
        for seed in (1, 2, 3):
            done, norm, loss = _train(model, optimizer, seed)
            losses.append(loss)
            assert done and norm > 0.0
            assert reference.follow() == []
            if dtype == torch.bfloat16:  # what the model computes with follows the fp32 main weights
                pairs = zip(wrapped.float16_groups, wrapped.fp32_from_float16_groups, strict=True)
                assert all(torch.equal(m, p.bfloat16()) for ms, ps in pairs for m, p in zip(ms, ps, strict=True))
        assert losses[-1] < losses[0]
        runs = wrapped.optimizer.traffic.orthogonalized
        named = {name: g for g in wrapped.optimizer.param_groups for name in g["param_names"]}
        for name, expected in (
            ("decoder.layers.0.self_attention.linear_qkv.weight", (True, 0.05, 1.0)),
            ("embedding.word_embeddings.weight", (False, 0.01, 1.0)),
            ("output_layer.weight", (False, 0.01, 1.0)),
            ("decoder.final_layernorm.weight", (False, 0.01, 0.0)),
        ):
            assert tuple(named[name][key] for key in ("use_muon", "max_lr", "wd_mult")) == expected, name

        sharded = optimizer.sharded_state_dict(model.module.sharded_state_dict())
        assert _common_step(sharded) == 3
        states = copy.deepcopy(optimizer.state_dict())
        inner_state = states.get("optimizer", states)["state"]
        for values in inner_state.values():  # as Megatron's checkpoints keep it: one count for all
            values.pop("step", None)
        inner_state["common_step"] = torch.tensor(3.0)
        weights = copy.deepcopy(model.module.state_dict())
        _train(model, optimizer, 4)
        fresh = gpt(seed=9, **options)
        resumed = get_megatron_optimizer(optimizer_config(**options), [fresh], adamw_lr=0.01)
        template = resumed.sharded_state_dict(fresh.module.sharded_state_dict(), is_loading=True)
        assert _sharded_keys(template) == _sharded_keys(sharded), "not all state has a place to be loaded into"
        fresh.module.load_state_dict(weights)
        resumed.load_state_dict(states)
        _train(fresh, resumed, 4)
        pairs = zip(model.named_parameters(), fresh.parameters(), strict=True)
        assert [n for (n, p), q in pairs if not torch.equal(p, q)] == []
        assert _common_step(resumed.sharded_state_dict(fresh.module.sharded_state_dict())) == 4
        return int(runs)


def _common_step(saved: dict[str, Any]) -> int:
    return int(saved.get("optimizer", saved)["state"]["common_step"])


def _sharded_keys(saved: Any) -> set[str]:
    """Keys of everything that Megatron's checkpoints cut up."""
    if isinstance(saved, dict):
        return set().union(*map(_sharded_keys, saved.values()))
    if isinstance(saved, (list, tuple)):
        return set().union(*map(_sharded_keys, saved))
    return {saved.key} if hasattr(saved, "global_offset") else set()


@needs_megatron
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_parallel_training_has_the_bits_of_one_process_and_resumes(dtype: torch.dtype, world2: RankPool) -> None:
    # q, k, v, proj, fc1, fc2: each orthogonalized once in the job, not on every replica
    assert sum(world2.run(_data_parallel, dtype)) == 3 * 6


def _scaled(distributed: bool) -> None:
    """Steps in fp16: two that count, one that overflows on one rank, two more."""
    with megatron():
        kind = half(torch.float16)
        model = gpt(ddp={"use_distributed_optimizer": distributed}, **kind)
        scaler = {"initial_loss_scale": 2.0**10, "min_loss_scale": 1.0, "loss_scale_window": 2, "hysteresis": 1}
        config = optimizer_config(use_distributed_optimizer=distributed, **kind, **scaler)
        optimizer = get_megatron_optimizer(config, [model], adamw_lr=0.01)
        reference, weights = Reference(optimizer), {clean(name): p for name, p in model.named_parameters()}
        for seed, scale in enumerate((2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11)):
            before = main_tensors(optimizer, "weights")
            done, norm, _ = _train(model, optimizer, seed, overflows=seed == 2)
            now = main_tensors(optimizer, "weights")
            changed = any(not torch.equal(now[name], before[name]) for name in now)
            assert done == (norm > 0.0) == changed == (seed != 2)
            assert not done or reference.follow() == []
            assert float(optimizer.get_loss_scale()) == scale
            assert [name for name in now if not torch.equal(weights[name], now[name].half())] == []


@needs_megatron
@pytest.mark.parametrize("distributed", [False, True])
def test_fp16_steps_are_unscaled_and_an_overflow_on_one_rank_skips_the_step_on_all(
    distributed: bool, world2: RankPool
) -> None:
    world2.run(_scaled, distributed)


def _looked_into() -> None:
    with megatron():
        sharded = {"use_distributed_optimizer": True}
        model = gpt(ddp=sharded)
        optimizer = get_megatron_optimizer(optimizer_config(**sharded), [model])
        muon = optimizer.chained_optimizers[0].optimizer
        planned = str(muon.prepare())
        check = audit(muon, samples=100)
        _train(model, optimizer, 1)
        with pytest.raises(ValueError, match="clip_grad in OptimizerConfig"):
            clip_grad_norm_(muon, 1.0)
        assert str(muon.plan) == planned
        assert [str(finding) for finding in check.report.findings] == []
        assert len(check.report.matrices) == 6


@needs_megatron
def test_flat_shards_can_be_planned_and_audited_but_are_clipped_by_megatron(world2: RankPool) -> None:
    world2.run(_looked_into)


def _stages() -> dict[str, Any]:
    with megatron(pipeline_model_parallel_size=2):
        first = dist.get_rank() == 0
        options = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, "num_layers": 2}
        model = gpt(first=first, last=not first, tied=True, **options)
        with pytest.raises(ValueError, match="matches no parameter on any rank") as caught:
            get_megatron_optimizer(optimizer_config(), [model], overrides={"nothing.*": "adamw"})
        overrides = {"embedding.*": {"lr": 0.02}}  # only the first stage calls it that
        optimizer = get_megatron_optimizer(optimizer_config(clip_grad=0.0), [model], overrides=overrides)
        plain = get_megatron_optimizer(optimizer_config(clip_grad=0.0), [model])
        reference = Reference(plain)
        for i, p in enumerate(model.parameters()):
            p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        plain.step()
        groups = plain.chained_optimizers[0].param_groups
        tables = [g for part in plain.chained_optimizers for g in part.param_groups if not g["use_muon"]]
        tied = [
            i
            for i, g in enumerate(tables)
            for n in g["param_names"]
            if n.endswith(("embeddings.weight", "output_layer.weight"))
        ]
        return {
            "wrong": reference.follow(),
            "refused": str(caught.value),
            "labels": [g["optimizer"] for g in groups],
            "counts": [len(g["params"]) for g in groups],
            "overridden": [g["optimizer"] for g in optimizer.chained_optimizers[0].param_groups],
            "tied": tied,
        }


@needs_megatron
def test_pipeline_stages_list_the_same_groups_and_treat_tied_embeddings_alike(world2: RankPool) -> None:
    first, last = world2.run(_stages)
    assert first["wrong"] == last["wrong"] == []
    assert first["refused"] == last["refused"]
    assert first["labels"] == last["labels"]
    assert first["overridden"] == last["overridden"]
    assert len(first["overridden"]) == len(first["labels"]) + 1
    assert first["counts"] != last["counts"]
    assert first["tied"] == last["tied"] != []


def _refusals() -> None:
    sharded = {"use_distributed_optimizer": True}
    chunk_0 = "in the DistributedDataParallelConfig of model chunk 0"
    with megatron():
        model, cut = gpt(), gpt(ddp=sharded)
        stored = {"storage": Storage(momentum_dtype=torch.bfloat16)} if dist.get_rank() == 1 else {}  # on one rank only
        layer_wise = optimizer_config(use_layer_wise_distributed_optimizer=True)
        refused: list[tuple[nn.Module, Any, dict[str, Any], str]] = [
            (model, optimizer_config(**sharded), {}, f"is True in OptimizerConfig and False {chunk_0}"),
            (cut, optimizer_config(), {}, f"is False in OptimizerConfig and True {chunk_0}"),
            (cut, optimizer_config(**sharded), stored, r"momentum_dtype=torch\.bfloat16"),
            (model, layer_wise, {}, "use_layer_wise_distributed_optimizer"),
            (model, optimizer_config(), {"tp_group": dist.group.WORLD}, "give pg_collection="),
        ]
        for chunk, config, options, words in refused:
            with pytest.raises(ValueError, match=words):
                get_megatron_optimizer(config, [chunk], **options)
        for p in model.parameters():
            p.tensor_model_parallel = False  # as the size is 1
        bare = Muon(param_groups(model, lr=1e-3), lr=1e-3)
        with pytest.raises(ValueError, match=r"shardmuon\.frameworks\.megatron, or set p\.grad = p\.main_grad"):
            bare.step()  # Megatron's gradients never reach p.grad by themselves
    with megatron(tensor_model_parallel_size=2):
        model = gpt(ddp=sharded, tensor_model_parallel_size=2)
        model.module.decoder.layers[0].mlp.linear_fc2.weight.partition_stride = 2
        unknown = r"mlp\.linear_fc2\.weight: .*\(24, 44\) that tensor parallelism cuts along dim 1 with stride 2"
        with pytest.raises(ValueError, match=unknown):
            get_megatron_optimizer(optimizer_config(**sharded), [model])


@needs_megatron
def test_what_does_not_fit_is_refused_on_every_rank(world2: RankPool) -> None:
    world2.run(_refusals)


def _stage_fault() -> None:
    with megatron(pipeline_model_parallel_size=2):
        first = dist.get_rank() == 0
        options = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, "num_layers": 2}
        model = gpt(first=first, last=not first, **options)

        def pattern(name: str, param: Tensor, module: nn.Module) -> bool:
            return name.startswith("embedding") and bool(module.no_such_attribute)

        with pytest.raises(ValueError, match=r"AttributeError.*no_such_attribute"):
            get_megatron_optimizer(optimizer_config(), [model], overrides=[(pattern, "adamw")])


@needs_megatron
def test_an_override_that_fails_on_one_stage_is_refused_on_every_rank(world2: RankPool) -> None:
    world2.run(_stage_fault)


def test_without_megatron_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in {"megatron", *(name for name in sys.modules if name.startswith("megatron."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'shardmuon\[megatron\]'"):
        get_megatron_optimizer(object(), [])
