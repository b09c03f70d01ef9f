"""Tests of shardmuon with Megatron-core (0.19) on CPUs. They use Megatron's own GPT model, gradient buffers, wrappers,
parallel layers and distributed optimizer, whose fp32 shards may split a matrix at any element. The reference is
shardmuon in a single process with full matrices. Its gradients are the sums of all ranks' gradients, which are exact in
any order of summation."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import queue
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from injection import plant_in_all
from megatron_gpt import Job, gpt, megatron, needs_megatron, optimizer_config, shards_of
from torch import Tensor, nn

from shardmuon import ExchangeError, Muon, audit, clip_grad_norm_, param_groups
from shardmuon.frameworks.megatron import get_megatron_optimizer
from shardmuon.step import update as pipeline
from shardmuon.testing import RankPool

VARIANT = {"variant": "normuon+hyperball"}
STILL = {"weight_decay": 0.0}  # Hyperball does not support weight decay, so weight decay is turned off.
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 6,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_grouped_gemm": False,
}
SHARDED = {"use_distributed_optimizer": True}
TP = {"tensor_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
EP_WITHOUT_TP = {**TP, **EP, "expert_tensor_parallel_size": 1}
INSTANCES = {"num_distributed_optimizer_instances": 2}
STAGES = {"pipeline_model_parallel_size": 2}
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 2500}


def job(
    sizes: dict[str, int],
    dtype: torch.dtype = torch.bfloat16,
    distributed: bool = True,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> Job:
    instances = {key: value for key, value in sizes.items() if key.startswith("num_distributed")}
    layers = {key: value for key, value in sizes.items() if key not in instances}
    experts = EXPERTS if any(key.startswith("expert") for key in sizes) else {}
    return Job(dtype, distributed, ddp={**instances, **(ddp or {})}, **layers, **experts, **options)


# --------------------------------------------------------------------------------------------- the dense update


def _train(sizes: dict[str, int], dtype: torch.dtype, distributed: bool, ddp: dict[str, Any]) -> dict[str, Any]:
    """Train two steps and compare each with the dense optimizer. Return the number of matrices orthogonalized on this
    rank, the sets of ranks that share work according to this rank's plans, and a description of the shards that
    Megatron reports."""
    with megatron(**sizes):
        made = job(sizes, dtype, distributed, ddp=ddp)
        for step in range(2):
            made.step(step)
        matrices = {n for muon in made.muons for g in muon.param_groups if g["use_muon"] for n in g["param_names"]}
        return {
            "runs": [muon.traffic.orthogonalized for muon in made.muons],
            "plans": [
                [str(ranks) for plan in muon.plans for ranks in sorted({b.ranks for b in plan.buckets if b.exchange})]
                for muon in made.muons
            ],
            "held": {n: held for n, held, _ in shards_of(made.optimizer) if n in matrices},
            "cols": {name: made.params[name].shape[-1] for name in matrices},
            "num_buckets": sum(len(buffer.buckets) for buffer in made.models[0].buffers),
            "strides": {
                name[17:-7]: cut.stride for name, cut in made.cuts.items() if "0." in name and cut.num_parts > 1
            },
        }


def _facts(ranks: list[dict[str, Any]]) -> dict[str, bool]:
    """Map each sharding feature, such as "cuts rows", to whether the shards reported by Megatron have it."""
    helds, cols = [found["held"] for found in ranks], ranks[0]["cols"]
    pairs = [(held, other) for at, held in enumerate(helds) for other in helds[:at] if held]
    return {
        "straddles": any(set(held) & set(other) for held, other in pairs if held != other),
        "cuts rows": any(start % cols[name] for held in helds for name, (start, _) in held.items()),
        "leaves out": any(set(held) < set(cols) for held in helds),
        "replicas": {held == other for held, other in pairs} == {True, False},
        "buckets": ranks[0]["num_buckets"] > 1,
        "strides": ranks[0]["strides"] == STRIDES,
    }


STRIDES = {"self_attention.linear_proj": 1, "self_attention.linear_qkv": 1, "mlp.linear_fc1": 2, "mlp.linear_fc2": 1}
STRADDLES = {"straddles", "cuts rows", "leaves out"}
# In each of 2 steps, the job orthogonalizes the matrices q, k, v, proj, fc1 and fc2 once, not once per replica.
DENSE = [2 * 6]
# In each of 2 steps, a job with experts orthogonalizes the four attention matrices with one optimizer, and the matrices
# fc1 and fc2 of each of six experts with another.
BOTH = [2 * 4, 2 * 2 * 6]
EVERYONE = ["(0, 1, 2, 3)"]
JOBS: list[tuple[int, dict[str, int], torch.dtype, bool, dict[str, Any], list[int], set[str], Any]] = [
    # Each case gives the number of ranks, the parallel sizes, the dtype, whether the optimizer is distributed, and the
    # DDP options. Then it gives the expected results: the number of orthogonalizations by each optimizer, features of
    # the sharding, and the sets of ranks that share work in the first rank's plans (None: not checked).
    (2, {}, torch.float32, False, {}, DENSE, set(), None),
    (2, {}, torch.bfloat16, False, {}, DENSE, set(), None),
    (3, {}, torch.float32, True, {}, DENSE, STRADDLES, None),
    (4, {}, torch.bfloat16, True, BUCKETS, DENSE, {*STRADDLES, "buckets"}, None),
    (4, INSTANCES, torch.float32, True, {}, DENSE, {"replicas"}, None),
    (4, TP, torch.bfloat16, False, {}, DENSE, {"strides"}, None),
    (4, TP, torch.float32, True, {}, DENSE, {"strides", "straddles"}, None),
    (4, STAGES, torch.float32, True, {}, [2 * 2 * 6], set(), [["(0, 1)"]]),
    (4, EP, torch.float32, True, {}, BOTH, set(), [EVERYONE, ["(0, 2)"]]),
    (4, EP_WITHOUT_TP, torch.float32, False, {}, BOTH, set(), [EVERYONE, ["(0, 2)"]]),
    (4, {"expert_tensor_parallel_size": 2}, torch.float32, True, {}, BOTH, set(), [EVERYONE, EVERYONE]),
]


@needs_megatron
@pytest.mark.parametrize(("world", "sizes", "dtype", "distributed", "ddp", "runs", "facts", "plans"), JOBS)
def test_weights_and_main_weights_get_the_dense_update(
    world: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    distributed: bool,
    ddp: dict[str, Any],
    runs: list[int],
    facts: set[str],
    plans: list[list[str]] | None,
) -> None:
    ranks = RankPool.cached(world).run(_train, sizes, dtype, distributed, ddp)
    assert [sum(of_ranks) for of_ranks in zip(*(found["runs"] for found in ranks), strict=True)] == runs
    assert facts <= {name for name, holds in _facts(ranks).items() if holds}
    assert plans in (None, ranks[0]["plans"])


def _scaled(distributed: bool) -> None:
    """Train five steps in fp16. The third step overflows on one rank and must be skipped. Check the loss scale after
    each step."""
    scaler = {"initial_loss_scale": 2.0**10, "min_loss_scale": 1.0, "loss_scale_window": 2, "hysteresis": 1}
    with megatron():
        made = job({}, torch.float16, distributed, config=scaler)
        for step, scale in enumerate((2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11)):
            before, used = made.whole(), float(made.optimizer.get_loss_scale())
            if step == 2:
                assert not made.train(step, used, spoil=True)
                assert all(torch.equal(before[name], p) for name, p in made.params.items())
            else:
                made.step(step, scale=used)
            assert float(made.optimizer.get_loss_scale()) == scale


@needs_megatron
@pytest.mark.parametrize("distributed", [False, True])
def test_fp16_steps_are_unscaled_and_an_overflow_on_one_rank_skips_the_step_on_all(
    distributed: bool, world2: RankPool
) -> None:
    world2.run(_scaled, distributed)


def _looked_into() -> None:
    with megatron():
        made = job({}, torch.float32, config={"clip_grad": 1.0})
        model, muon = made.models[0], made.muons[0]
        planned = str(muon.prepare())
        check = audit(muon, samples=100)
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
        mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
        model(tokens, torch.arange(8).expand(2, 8), mask, labels=tokens).float().mean().backward()
        model.finish_grad_sync()
        assert made.optimizer.step()[:1] == (True,)
        with pytest.raises(ValueError, match="clip_grad in OptimizerConfig"):
            clip_grad_norm_(muon, 1.0)
        found = [str(finding) for finding in check.report.findings], len(check.report.matrices)
        assert (str(muon.plan), *found) == (planned, [], 6)


@needs_megatron
def test_flat_shards_can_be_planned_and_audited_but_are_clipped_by_megatron(world2: RankPool) -> None:
    world2.run(_looked_into)


def _chunks() -> list[nn.Module]:
    return [gpt(seed, ddp=SHARDED, calculate_per_token_loss=True) for seed in (0, 1)]


def _hardly_anything() -> list[nn.Module]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)
    torch.manual_seed(0)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **SHARDED)
    return [DistributedDataParallel(config, ddp, nn.Sequential(nn.Linear(8, 8, bias=False)))]


def _of_models(models: Callable[[], list[nn.Module]], muon: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Take two training steps on the given models. Return, for each Muon optimizer, the number of elements stored on
    this rank and the number of matrices orthogonalized on this rank."""
    with megatron():
        made = Job(models=models(), muon=muon)
        for step in range(2):
            made.step(step)
        held = [sum(p.numel() for group in muon.param_groups for p in group["params"]) for muon in made.muons]
        return held, [muon.traffic.orthogonalized for muon in made.muons]


@needs_megatron
def test_model_chunks_of_an_interleaved_schedule_share_an_optimizer(world2: RankPool) -> None:
    assert [len(held) for held, _ in world2.run(_of_models, _chunks, {})] == [1, 1]


@needs_megatron
def test_ranks_that_hold_padding_only_take_part(world4: RankPool) -> None:
    found = world4.run(_of_models, _hardly_anything, {"overrides": {"0.weight": "muon"}})
    assert [held for held, _ in found] == [[32], [32], [0], [0]]
    assert sum(sum(runs) for _, runs in found) == 2


# --------------------------------------------------------------------------------------------- groups and refusals


def _groups() -> list[list[Any]]:
    with megatron(**STAGES):
        made, wrong = job(STAGES, torch.float32, False, tied=True), {"nothing.*": "adamw"}
        config = optimizer_config()
        with pytest.raises(ValueError, match="matches no parameter on any rank"):
            get_megatron_optimizer(config, made.models, overrides=wrong)

        def pattern(name: str, param: Tensor, module: nn.Module) -> bool:
            return name.startswith("embedding") and bool(module.no_such_attribute)

        with pytest.raises(ValueError, match=r"AttributeError.*no_such_attribute"):
            get_megatron_optimizer(config, made.models, overrides=[(pattern, "adamw")])
        overrides = {"embedding.*": {"lr": 0.02}}
        changed = get_megatron_optimizer(config, made.models, adamw_lr=0.01, overrides=overrides)
        groups, others = made.muons[0].param_groups, changed.chained_optimizers[0].param_groups
        assert len(others) == len(groups) + 1
        ends = ("embeddings.weight", "output_layer.weight")
        tied = [i for i, g in enumerate(groups) for n in g["param_names"] if n.endswith(ends) and not g["use_muon"]]
        assert len(tied) == 1
        for name, expected in {
            "decoder.layers.0.self_attention.linear_qkv.weight": (True, 0.05, 1.0),
            "decoder.layers.0.input_layernorm.weight": (False, 0.01, 0.0),
        }.items():
            (group,) = [g for g in groups if name in g["param_names"]]
            assert tuple(group[key] for key in ("use_muon", "max_lr", "wd_mult")) == expected
        return [
            [g["optimizer"] for g in groups],
            [g["optimizer"] for g in others],
            tied,
            [len(g["params"]) for g in groups],
        ]


@needs_megatron
def test_pipeline_stages_list_the_same_groups_and_treat_tied_embeddings_alike(world2: RankPool) -> None:
    """Both pipeline stages must list the same parameter groups. All ranks must raise an error for a routing override
    whose pattern matches no parameter of any stage, and for an override whose function raises an exception on one
    stage."""
    first, last = world2.run(_groups)
    assert first[:3] == last[:3] and first[3] != last[3]


def _refusals() -> None:
    chunk_0 = "in the DistributedDataParallelConfig of model chunk 0"
    with megatron():
        model, cut = gpt(), gpt(ddp=SHARDED)
        stored = {"momentum_dtype": torch.bfloat16} if dist.get_rank() == 1 else {}
        layer_wise = optimizer_config(use_layer_wise_distributed_optimizer=True)
        refused: list[tuple[nn.Module, Any, dict[str, Any], str]] = [
            (model, optimizer_config(**SHARDED), {}, f"is True in OptimizerConfig and False {chunk_0}"),
            (cut, optimizer_config(), {}, f"is False in OptimizerConfig and True {chunk_0}"),
            (cut, optimizer_config(**SHARDED), stored, r"momentum_dtype=torch\.bfloat16"),
            (model, layer_wise, {}, "use_layer_wise_distributed_optimizer"),
            (model, optimizer_config(), {"tp_group": dist.group.WORLD}, "give pg_collection="),
        ]
        for chunk, config, options, words in refused:
            with pytest.raises(ValueError, match=words):
                get_megatron_optimizer(config, [chunk], **options)
        for p in model.parameters():
            # Megatron sets tensor_model_parallel=True even if the tensor-parallel size is 1. Muon would then require a
            # `tp_group`, so reset the attribute.
            p.tensor_model_parallel = False
        bare = Muon(param_groups(model, lr=1e-3), lr=1e-3)
        with pytest.raises(ValueError, match=r"shardmuon\.frameworks\.megatron, or set p\.grad = p\.main_grad"):
            bare.step()  # Megatron keeps its gradients in p.main_grad, so p.grad is None.
    with megatron(**TP):
        model = gpt(ddp=SHARDED, **TP)
        model.module.decoder.layers[0].mlp.linear_fc2.weight.partition_stride = 2
        unknown = r"mlp\.linear_fc2\.weight: .*\(24, 44\) that tensor parallelism cuts along dim 1 with stride 2"
        with pytest.raises(ValueError, match=unknown):
            get_megatron_optimizer(optimizer_config(**SHARDED), [model])


@needs_megatron
def test_what_does_not_fit_is_refused_on_every_rank(world2: RankPool) -> None:
    world2.run(_refusals)


def test_without_megatron_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"megatron", *(name for name in sys.modules if name.startswith("megatron."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'shardmuon\[megatron\]'"):
        get_megatron_optimizer(object(), [])


# --------------------------------------------------------------------------------------------- checkpoints

KINDS = ["dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter", "torch"]


def _with_transformer_engine(found: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a patch that makes Megatron behave as if TransformerEngine were installed (if `found` is True) or missing.
    Megatron stores the step count in a different place in each case."""
    from megatron.core.optimizer import distrib_optimizer

    return mock.patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=found, USING_TE_OPTIMIZER=found)


def _state(made: Job, kind: str, is_loading: bool) -> dict[str, Any]:
    weights = made.models[0].module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": kind}
    state = made.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": state}


def _write(made: Job, kind: str, path: pathlib.Path) -> None:
    # Megatron's older checkpoint format has one file per model-parallel rank, plus one file with the parameter state.
    if kind == "torch":
        made.optimizer.save_parameter_state(str(path / "parameters"))
        torch.save(made.optimizer.state_dict(), path / f"torch{dist.get_rank()}")
        return
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    (path / kind).mkdir(exist_ok=True)
    dist.barrier()
    # Megatron would reuse one write queue for all saves in a process, so give each save a new queue.
    own = mock.patch.object(filesystem_async, "get_write_results_queue", queue.Queue)
    with own, _with_transformer_engine(kind == "fully_reshardable"):
        dist_checkpointing.save(_state(made, kind, False), str(path / kind))


def _read(made: Job, kind: str, path: pathlib.Path) -> None:
    # After loading, the next step copies the fp32 main weights to the model, so there is no need to load the model's
    # own weights.
    if kind == "torch":
        made.optimizer.load_state_dict(torch.load(path / "torch0"))
        made.optimizer.load_parameter_state(str(path / "parameters"))
        return
    from megatron.core import dist_checkpointing

    with _with_transformer_engine(kind == "fully_reshardable"):
        loaded = dist_checkpointing.load(_state(made, kind, True), str(path / kind))
        made.models[0].module.load_state_dict(loaded["model"])
        made.optimizer.load_state_dict(loaded["optimizer"])


Whole = dict[str, Tensor]


def _save(
    folder: pathlib.Path, kinds: list[str], sizes: dict[str, int], distributed: bool, muon: dict[str, Any]
) -> Whole:
    """Train two steps, write a checkpoint in every format, and train a third step. Return the full weights."""
    with megatron(**sizes):
        made = job(sizes, distributed=distributed, config=STILL, muon=muon)
        for step in range(2):
            made.train(step)
        for kind in kinds:
            _write(made, kind, folder)
        made.train(2)
        return made.whole()


def _load(
    folder: pathlib.Path, kind: str, sizes: dict[str, int], distributed: bool, muon: dict[str, Any], wanted: list[Whole]
) -> None:
    """Load a checkpoint into a fresh job. The next step of the fresh job must be bitwise identical to that of the
    uninterrupted job."""
    with megatron(**sizes):
        made = job(sizes, distributed=distributed, config=STILL, muon=muon, seed=9)
        if muon:
            made.train(5)
        _read(made, kind, folder)
        for part in made.muons:
            part.prepare()
        made.train(2)
        counted = [of for part in made.muons if distributed for of in (*part.state.values(), *part.param_groups)]
        assert all(float(of["step"]) == 3.0 for of in counted)
        # Ranks whose numbers are equal modulo len(wanted) have the same parameters.
        expected = wanted[dist.get_rank() % len(wanted)]
        assert [n for n, p in made.whole().items() if not torch.equal(p, expected[n])] == []


RESUMED: list[tuple[int, dict[str, int], bool, dict[str, Any], list[tuple[int, dict[str, int], list[str]]]]] = [
    # Each case begins with the job that saves: its number of ranks, its parallel sizes, whether its optimizer is
    # distributed, and Muon's options. The list at the end gives the number of ranks, the parallel sizes and the
    # checkpoint formats of each job that loads.
    (2, {}, True, {}, [(2, {}, KINDS[:2]), (3, {}, KINDS[:2])]),
    (4, {}, True, VARIANT, [(2, {}, [KINDS[0], *KINDS[2:]]), (4, {}, KINDS[:1])]),
    (4, TP, True, {}, [(2, TP, KINDS[1:2]), (2, {}, KINDS[1:2])]),
    (2, TP, False, VARIANT, [(2, TP, KINDS[1:2])]),
    (2, EP, False, {}, [(2, EP, KINDS[1:2])]),
    (2, EP, True, VARIANT, [(2, EP, KINDS[:1])]),
    (2, STAGES, True, VARIANT, [(2, STAGES, KINDS[:1])]),
    (2, STAGES, True, {}, [(2, STAGES, KINDS[1:2])]),
]


@needs_megatron
@pytest.mark.parametrize(("world", "sizes", "distributed", "muon", "loads"), RESUMED, ids=str)
def test_checkpoints_resume_with_the_same_bits_on_other_ranks(
    world: int,
    sizes: dict[str, int],
    distributed: bool,
    muon: dict[str, Any],
    loads: list[tuple[int, dict[str, int], list[str]]],
    tmp_path: pathlib.Path,
) -> None:
    kinds = list(dict.fromkeys(kind for *_, of_load in loads for kind in of_load))
    wanted = RankPool.cached(world).run(_save, tmp_path, kinds, sizes, distributed, muon)
    for num_ranks, on, of_load in loads:
        for kind in of_load:
            RankPool.cached(num_ranks).run(_load, tmp_path, kind, on, distributed, muon, wanted)


@needs_megatron
@pytest.mark.parametrize(
    ("sizes", "distributed", "words"),
    [
        (
            EP,
            False,
            "keeps second_moment, which Megatron's dist_checkpointing saves from rank 0 alone, and with pipeline or "
            "expert parallelism other ranks have parameters of their own",
        ),
        ({}, True, "keeps state of its own, and of distrib_optim_sharding_type='fully_reshardable'"),
    ],
)
def test_variant_state_that_rank_0_would_not_save_is_refused_on_all(
    sizes: dict[str, int], distributed: bool, words: str, tmp_path: pathlib.Path, world2: RankPool
) -> None:
    for error in world2.run_catching(_save, tmp_path, KINDS[1:2], sizes, distributed, {"variant": "normuon"}):
        assert error.type_name == "ValueError" and words in error.message


def _begin_from_zeros(folder: pathlib.Path, kind: str) -> None:
    """Load a checkpoint that lacks the variant's state (such as NorMuon's second moment), and start this state from
    zeros as the error message advises: take one step without the variant, then one with it."""
    with megatron():
        made = job({}, config=STILL, muon=VARIANT, seed=9)
        for group in made.optimizer.param_groups:
            group |= {"variant": None} if group["use_muon"] else {}
        _read(made, kind, folder)
        made.train(2)
        for group in made.optimizer.param_groups:
            group |= VARIANT if group["use_muon"] else {}
        made.train(3)
        kept = [of for g in made.muons[0].state_dict()["param_groups"] for of in g.get("kept_state", {}).values()]
        assert kept and all(value.any() for of in kept for value in of.values())


@needs_megatron
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_checkpoint_without_what_the_variant_keeps_is_refused_on_all(
    kind: str, tmp_path: pathlib.Path, world2: RankPool
) -> None:
    wanted = world2.run(_save, tmp_path, [kind], {}, True, {})
    for error in world2.run_catching(_load, tmp_path, kind, {}, True, VARIANT, wanted):
        assert error.type_name == "ValueError" and "set the group's variant to None for one step" in error.message
        assert "its momentum was loaded, and not second_moment, which variant='normuon+hyperball'" in error.message
    world2.run(_begin_from_zeros, tmp_path, kind)


def _unlike_counts() -> None:
    with megatron():
        made = job({})
        made.train(0)
        saved = copy.deepcopy(made.muons[0].state_dict())
        saved["param_groups"][-1]["step"] += 1
        with pytest.raises(ValueError, match=r"groups have taken \[1, 2\] steps"):
            made.muons[0].load_state_dict(saved)


@needs_megatron
def test_groups_with_unlike_step_counts_are_refused_on_every_rank(world2: RankPool) -> None:
    world2.run(_unlike_counts)


# --------------------------------------------------------------------------------------------- all or nothing


def _faults() -> None:
    with megatron():
        made = job({})
        steps = iter(range(9))
        made.train(next(steps))
        muon = made.muons[0]
        known, passed = plant_in_all(muon, lambda: made.train(next(steps)))
        assert passed == [] and {"is_active", "read", "signature", "validate"} <= {*known}, known
        saved = copy.deepcopy(muon.state_dict())
        for words in ("out of memory", "^an earlier step was broken off"):
            fails = mock.patch.object(pipeline, "apply_", side_effect=RuntimeError("out of memory"))
            with fails, pytest.raises(ExchangeError, match=words):
                made.train(8)
        muon.load_state_dict(saved)
        made.train(8)
        assert {int(s["step"]) for s in muon.state.values()} == {5}


@needs_megatron
def test_an_exception_in_any_function_is_raised_on_all_and_after_the_agreement_until_state_is_loaded(
    world2: RankPool,
) -> None:
    world2.run(_faults)
