"""shardmuon inside Megatron-core (0.19) on CPUs: its own GPT model, gradient buffers and wrappers around the optimizer.

The reference is shardmuon on one process with the gradients that Megatron's wrapper stepped on.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from standin_cuda import cuda_on_cpu
from torch import Tensor, nn

from shardmuon import Muon, param_groups
from shardmuon.integrations.megatron import get_megatron_optimizer
from shardmuon.testing.pool import RankPool

_FOUND = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
needs_megatron = pytest.mark.skipif(not _FOUND, reason="megatron-core is not installed (docs/megatron.md)")


@contextlib.contextmanager
def _megatron(**sizes: int) -> Iterator[None]:
    """Megatron's process groups, e.g. `expert_model_parallel_size=2`."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with cuda_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        parallel_state.initialize_model_parallel(**sizes)
        get_cuda_rng_tracker().fork = lambda *args: contextlib.nullcontext()  # its generators live on GPUs
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            logging.disable(logging.NOTSET)


def _model(seed: int = 0, first: bool = True, last: bool = True, tied: bool = False, **options: Any) -> nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 24,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    config = TransformerConfig(**{**values, **options})
    torch.manual_seed(seed)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(options.get("num_moe_experts"), normalization="RMSNorm"),
        vocab_size=32,
        max_sequence_length=8,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    if config.bf16:
        model = model.bfloat16()
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def _config(**options: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    values = {"optimizer": "muon", "lr": 0.05, "min_lr": 0.005, "weight_decay": 0.1, "clip_grad": 1.0}
    return OptimizerConfig(**{**values, **options})


class Reference:
    """Every parameter of Megatron's optimizers as a tensor of one process, in the same groups."""

    def __init__(self, chained: Any) -> None:
        self.pairs: list[tuple[str, Tensor, nn.Parameter]] = []
        self.parts = []
        for part in chained.chained_optimizers:
            groups = []
            for group in part.optimizer.param_groups:
                copies = [nn.Parameter(p.detach().clone()) for p in group["params"]]
                self.pairs += zip(group["param_names"], group["params"], copies, strict=True)
                groups.append({**group, "params": copies})
            self.parts.append(Muon(groups, deterministic=True))

    def follow(self) -> list[str]:
        """Step on the gradients that are still there; the parameters that now differ in some bit."""
        for _, p, q in self.pairs:
            q.grad = None if p.grad is None else p.grad.clone()
        for optimizer in self.parts:
            optimizer.step()
        return [name for name, p, q in self.pairs if not torch.equal(p, q)]


def _train(model: nn.Module, optimizer: Any, seed: int) -> tuple[bool, float, float]:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens, torch.arange(8).expand(2, 8), mask, labels=tokens).float().mean()
    loss.backward()
    model.finish_grad_sync()
    done, norm, _ = optimizer.step()
    return done, float(norm), float(loss)


def _data_parallel() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with _megatron():
        for kind in ("fp32", "bf16"):
            half = {"bf16": True, "params_dtype": torch.bfloat16} if kind == "bf16" else {}
            model = _model(**half)
            optimizer = get_megatron_optimizer(_config(**half), [model], adamw_lr=0.01, deterministic=True)
            reference = Reference(optimizer)
            found[kind] = []
            for seed in (1, 2, 3):
                done, norm, loss = _train(model, optimizer, seed)
                found[kind].append((done, norm > 0.0, loss, reference.follow()))
                if kind == "bf16":  # what the model computes with follows the fp32 main weights
                    inner = optimizer.chained_optimizers[0]
                    pairs = zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True)
                    assert all(torch.equal(m, p.bfloat16()) for ms, ps in pairs for m, p in zip(ms, ps, strict=True)), (
                        "stale model weights"
                    )
            inner = optimizer.chained_optimizers[0].optimizer
            found[f"{kind} work"] = inner.traffic.orthogonalized
            found["groups"] = [(g["use_muon"], g["max_lr"], g["wd_mult"], g["param_names"]) for g in inner.param_groups]
            sharded = optimizer.sharded_state_dict(model.module.sharded_state_dict())
            states = copy.deepcopy(optimizer.state_dict())
            inner_state = states.get("optimizer", states)["state"]
            assert _common_step(sharded.get("optimizer", sharded)) == 3
            for values in inner_state.values():  # as Megatron's checkpoints keep it: one count for all
                values.pop("step", None)
            inner_state["common_step"] = torch.tensor(3.0)
            weights = copy.deepcopy(model.module.state_dict())
            _train(model, optimizer, 4)
            wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
            fresh = _model(seed=9, **half)
            resumed = get_megatron_optimizer(_config(**half), [fresh], adamw_lr=0.01, deterministic=True)
            template = resumed.sharded_state_dict(fresh.module.sharded_state_dict(), is_loading=True)
            assert _sharded_keys(template) == _sharded_keys(sharded), "not all state has a place to be loaded into"
            fresh.module.load_state_dict(weights)
            resumed.load_state_dict(states)
            _train(fresh, resumed, 4)
            found[f"{kind} resumed"] = [n for n, p in fresh.named_parameters() if not torch.equal(p, wanted[n])]
            again = resumed.sharded_state_dict(fresh.module.sharded_state_dict())
            found[f"{kind} again"] = _common_step(again.get("optimizer", again))
    return found


def _common_step(saved: dict[str, Any]) -> int:
    return int(saved["state"]["common_step"])


def _sharded_keys(saved: Any) -> set[str]:
    """Keys of everything that Megatron's checkpoints cut up."""
    if isinstance(saved, dict):
        return set().union(*map(_sharded_keys, saved.values()))
    if isinstance(saved, (list, tuple)):
        return set().union(*map(_sharded_keys, saved))
    return {saved.key} if hasattr(saved, "global_offset") else set()


@needs_megatron
def test_data_parallel_training_has_the_bits_of_one_process_and_resumes(world2: RankPool) -> None:
    ranks = world2.run(_data_parallel)
    for found in ranks:
        for kind in ("fp32", "bf16"):
            assert [(done, clipped, wrong) for done, clipped, _, wrong in found[kind]] == [(True, True, [])] * 3, kind
            losses = [loss for *_, loss, _ in found[kind]]
            assert losses[-1] < losses[0]
            assert found[f"{kind} resumed"] == []
            assert found[f"{kind} again"] == 4
    # q, k, v, proj, fc1, fc2: each orthogonalized once in the job, not on every replica
    assert sum(found["fp32 work"] for found in ranks) == 3 * 6
    names = {name: (muon, lr, decay) for muon, lr, decay, group in ranks[0]["groups"] for name in group}
    assert names["decoder.layers.0.self_attention.linear_qkv.weight"] == (True, 0.05, 1.0)
    assert names["embedding.word_embeddings.weight"] == (False, 0.01, 1.0)
    assert names["output_layer.weight"] == (False, 0.01, 1.0)
    assert names["decoder.final_layernorm.weight"] == (False, 0.01, 0.0)


def _experts() -> tuple[list[str], list[tuple[int, ...]], list[list[str]]]:
    with _megatron(expert_model_parallel_size=2):
        from megatron.core import parallel_state

        ep = parallel_state.get_expert_model_parallel_rank()
        model = _model(
            num_moe_experts=4,
            moe_router_topk=1,
            moe_router_pre_softmax=True,
            expert_model_parallel_size=2,
            moe_grouped_gemm=False,
        )
        generator = torch.Generator().manual_seed(3 + ep)
        with torch.no_grad():
            for p in model.parameters():  # experts differ by rank; all else is the same
                if not getattr(p, "allreduce", True):
                    p.copy_(torch.randn(p.shape, generator=generator))
        optimizer = get_megatron_optimizer(_config(clip_grad=0.0), [model], deterministic=True)
        reference = Reference(optimizer)
        wrong: list[str] = []
        for step in range(2):
            for i, p in enumerate(model.parameters()):
                own = 100 * ep if not getattr(p, "allreduce", True) else 0
                p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(own + 10 * step + i)))
            optimizer.step()
            wrong += reference.follow()
        groups = [part.optimizer.plan.groups for part in optimizer.chained_optimizers]
        names = [
            [n for g in part.optimizer.param_groups for n in g["param_names"]] for part in optimizer.chained_optimizers
        ]
        return wrong, [ranks for plan in groups for ranks in plan], names


@needs_megatron
def test_experts_are_shared_out_over_their_own_data_parallel_group(world4: RankPool) -> None:
    found = world4.run(_experts)
    assert [wrong for wrong, *_ in found] == [[]] * 4
    assert [groups for _, groups, _ in found] == [[(0, 1, 2, 3), (r % 2, r % 2 + 2)] for r in range(4)]
    for *_, (dense, experts) in found:
        assert all(".experts." in name for name in experts)
        assert len(experts) == 4
        assert not any(".experts." in name for name in dense)


def _stages() -> dict[str, Any]:
    with _megatron(pipeline_model_parallel_size=2):
        first = dist.get_rank() == 0
        options = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, "num_layers": 2}
        model = _model(first=first, last=not first, tied=True, **options)
        with pytest.raises(ValueError, match="matches no parameter on any rank") as caught:
            get_megatron_optimizer(_config(), [model], overrides={"nothing.*": "adamw"})
        overrides = {"embedding.*": {"lr": 0.02}}  # only the first stage calls it that
        optimizer = get_megatron_optimizer(_config(clip_grad=0.0), [model], overrides=overrides, deterministic=True)
        plain = get_megatron_optimizer(_config(clip_grad=0.0), [model], deterministic=True)
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


def _refusals() -> list[str]:
    texts = []
    with _megatron():
        model = _model()
        with pytest.raises(ValueError, match="use_distributed_optimizer") as caught:
            get_megatron_optimizer(_config(use_distributed_optimizer=True), [model])
        texts.append(str(caught.value))
        for p in model.parameters():
            p.tensor_model_parallel = False  # as the size is 1
        bare = Muon(param_groups(model), deterministic=True)
        with pytest.raises(ValueError, match=r"p\.main_grad") as caught:
            bare.step()  # Megatron's gradients never reach p.grad by themselves
        texts.append(str(caught.value))
    with _megatron(tensor_model_parallel_size=2):
        model = _model(tensor_model_parallel_size=2)
        with pytest.raises(ValueError, match="tp group has 2 ranks") as caught:
            get_megatron_optimizer(_config(), [model])
        texts.append(str(caught.value))
    return texts


@needs_megatron
def test_what_is_sharded_beneath_the_optimizer_is_refused(world2: RankPool) -> None:
    for distributed, bare, parallel in world2.run(_refusals):
        assert "Set it to False" in distributed
        assert "shardmuon.integrations.megatron" in bare
        assert "Give tp_group=" in parallel


def test_without_megatron_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError, match=r"pip install 'shardmuon\[megatron\]'"):
        get_megatron_optimizer(object(), [])
