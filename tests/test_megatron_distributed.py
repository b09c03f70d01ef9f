"""shardmuon inside Megatron-core's distributed optimizer, whose fp32 shards cut matrices anywhere, and on its
tensor-parallel layers. The reference is shardmuon on one process with the whole matrices."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import queue
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from injection import plant_in_all
from megatron_gpt import Dense, clean, gpt, half, megatron, needs_megatron, optimizer_config, shards_of
from torch import Tensor, nn

from shardmuon import ExchangeError
from shardmuon.frameworks.megatron import get_megatron_optimizer
from shardmuon.frameworks.megatron import shards as flat_shards
from shardmuon.step import update as pipeline
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.layouts import flat_ranges

VARIANT = "normuon+hyperball"
EXPERTS = {
    "num_moe_experts": 6,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_grouped_gemm": False,
}


def _group_of(param: Tensor) -> Any:
    """The ranks over which Megatron keeps replicas of it."""
    from megatron.core import parallel_state

    if getattr(param, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


class Cut:
    """Marks by which Megatron's layers say that a parameter is cut over its tensor-parallel group."""

    def __init__(self, param: Any) -> None:
        from megatron.core import parallel_state

        expert = not getattr(param, "allreduce", True)
        get = (
            parallel_state.get_expert_tensor_parallel_group
            if expert
            else parallel_state.get_tensor_model_parallel_group
        )
        self.group = get()
        self.dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else -1
        self.stride = getattr(param, "partition_stride", 1)
        self.num_parts = self.group.size() if self.dim >= 0 else 1

    def join(self, param: Tensor) -> Tensor:
        """The whole parameter. Collective."""
        if self.num_parts == 1:
            return param.detach().clone()
        parts: list[Any] = [None] * self.num_parts
        dist.all_gather_object(parts, param.detach(), group=self.group)
        blocks = [part.chunk(self.stride, self.dim) for part in parts]
        return torch.cat([part[i] for i in range(self.stride) for part in blocks], self.dim)

    def take(self, whole: Tensor) -> Tensor:
        """Take the shard of this rank."""
        if self.num_parts == 1:
            return whole
        blocks = [block.chunk(self.num_parts, self.dim) for block in whole.chunk(self.stride, self.dim)]
        return torch.cat([block[self.group.rank()] for block in blocks], self.dim)


def _contributions(shape: torch.Size, seed: int, number: int) -> list[Tensor]:
    """Contributions of each data-parallel rank to a gradient: eighths, so that no order of adding rounds."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-16, 17, shape, generator=generator) / 8 for _ in range(number)]


def _train(
    sizes: dict[str, int], dtype: torch.dtype, distributed: bool, bucket_size: int | None = None, **options: Any
) -> dict[str, Any]:
    """Three steps that are the dense optimizer's; what was done here, and what Megatron says that this rank holds."""
    ddp: dict[str, Any] = {"use_distributed_optimizer": distributed}
    if bucket_size is not None:  # else there is one bucket
        ddp |= {"overlap_grad_reduce": True, "bucket_size": bucket_size}
    ddp |= {key: value for key, value in sizes.items() if key.startswith("num_distributed")}
    with megatron(**sizes):
        from megatron.core import parallel_state

        ep = parallel_state.get_expert_model_parallel_rank()
        layers = {key: value for key, value in sizes.items() if not key.startswith("num_distributed")}
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        if "pipeline_model_parallel_size" in sizes:
            options |= {"num_layers": 2, "pipeline_dtype": dtype}
        model = gpt(0, first, last, ddp=ddp, calculate_per_token_loss=True, **layers, **half(dtype), **options)
        for name, p in model.named_parameters():
            if not getattr(p, "allreduce", True):  # experts differ by rank
                p.data.copy_(_contributions(p.shape, ep + len(name), 1)[0])
        params = {clean(name): p for name, p in model.named_parameters()}
        cuts = {name: Cut(p) for name, p in params.items()}
        whole = {name: cuts[name].join(p) for name, p in params.items()}
        config = optimizer_config(clip_grad=0.0, use_distributed_optimizer=distributed, **half(dtype))
        optimizer = get_megatron_optimizer(config, [model], adamw_lr=0.01)
        for part in optimizer.chained_optimizers:
            assert not distributed or part.shardmuon.shards, "this rank has no shard"
        dense = Dense(optimizer, whole)
        for step in range(3):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            grads = {}
            for index, (name, p) in enumerate(params.items()):
                group, own = _group_of(p), 0 if getattr(p, "allreduce", True) else 1 + ep
                added = _contributions(whole[name].shape, 1000 * step + 10 * index + own, group.size())
                p.main_grad.copy_(cuts[name].take(added[group.rank()]))
                grads[name] = sum(added, torch.zeros(whole[name].shape))
            if bucket_size is not None:
                model.start_grad_sync()
            model.finish_grad_sync()
            optimizer.step()
            dense.step(grads)
            now = {name: cuts[name].take(p.detach()) for name, p in dense.params.items()}
            for name, p in params.items():
                assert torch.equal(p, now[name].to(dtype)), f"{name}, step {step}"
            for name, (start, stop), shard in shards_of(optimizer) if distributed else ():
                assert torch.equal(shard, now[name].flatten()[start:stop]), f"main weights of {name}, step {step}"
        muons = [part.optimizer for part in optimizer.chained_optimizers]
        matrices = {n for muon in muons for g in muon.param_groups if g["use_muon"] for n in g["param_names"]}
        return {
            "runs": [muon.traffic.orthogonalized for muon in muons],
            "plans": [
                [str(ranks) for plan in muon.plans for ranks in sorted({b.ranks for b in plan.buckets if b.exchange})]
                for muon in muons
            ],
            "held": {n: held for n, held, _ in shards_of(optimizer) if n in matrices} if distributed else {},
            "cols": {name: p.shape[-1] for name, p in params.items()},
            "matrices": matrices,
            "num_buckets": sum(len(buffer.buckets) for buffer in model.buffers),
            "strides": {name: cut.stride for name, cut in cuts.items() if cut.num_parts > 1},
        }


# ------------------------------------------------------------------------------- on 2 and 3 ranks


def _expert_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_expert_model_parallel_rank())


def _stepped(models: list[nn.Module], optimizer: Any, step: int) -> None:
    """A step on gradients that do not depend on the number of data-parallel ranks."""
    optimizer.zero_grad()
    for model in models:
        model.zero_grad_buffer()
        for index, p in enumerate(model.parameters()):
            cut, shape = Cut(p), list(p.shape)
            shape[cut.dim] *= cut.num_parts
            seed = 1000 * step + 10 * index + (0 if getattr(p, "allreduce", True) else 1 + _expert_rank())
            total = cut.take(_contributions(torch.Size(shape), seed, 1)[0])
            p.main_grad.copy_(total if _group_of(p).rank() == 0 else torch.zeros_like(total))
        model.finish_grad_sync()
    optimizer.step()


def _job(seed: int, distributed: bool = True, variant: str | None = None, **options: Any) -> tuple[nn.Module, Any]:
    options |= half(torch.bfloat16)
    from megatron.core import parallel_state

    ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = gpt(seed, *ends, ddp={"use_distributed_optimizer": distributed}, calculate_per_token_loss=True, **options)
    config = optimizer_config(  # Hyperball knows no decay
        clip_grad=0.0, weight_decay=0.0, use_distributed_optimizer=distributed, **half(torch.bfloat16)
    )
    return model, get_megatron_optimizer(config, [model], adamw_lr=0.01, variant=variant)


def _with_transformer_engine(found: bool) -> contextlib.AbstractContextManager[Any]:
    """True where TransformerEngine is installed; Megatron then keeps the count of steps otherwise."""
    from megatron.core.optimizer import distrib_optimizer

    return mock.patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=found, USING_TE_OPTIMIZER=found)


def _checkpoint(model: nn.Module, optimizer: Any, kind: str, is_loading: bool) -> dict[str, Any]:
    weights = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": kind}
    state = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": state}


def _write(state: dict[str, Any], path: pathlib.Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    path.mkdir(exist_ok=True)
    dist.barrier()
    with mock.patch.object(filesystem_async, "get_write_results_queue", queue.Queue):  # it is a process's
        dist_checkpointing.save(state, str(path))


def _save(folder: str, kinds: list[str], variant: str | None = None, **sizes: int) -> dict[str, Tensor]:
    """Two steps, checkpoints of every kind, one more step; the whole weights then."""
    with megatron(**sizes):
        model, optimizer = _job(0, True, variant, **sizes)
        for step in range(2):
            _stepped([model], optimizer, step)
        for kind in kinds:
            if (
                kind == "torch"
            ):  # Megatron's older form, a file of each model-parallel rank and one of parameters' state
                optimizer.save_parameter_state(str(pathlib.Path(folder, "parameters")))
                torch.save(optimizer.state_dict(), pathlib.Path(folder, f"{kind}{dist.get_rank()}"))
                continue
            with _with_transformer_engine(kind == "fully_reshardable"):
                _write(_checkpoint(model, optimizer, kind, is_loading=False), pathlib.Path(folder, kind))
        _stepped([model], optimizer, 2)
        return {clean(name): Cut(p).join(p) for name, p in model.named_parameters()}


def _read(model: nn.Module, optimizer: Any, kind: str, folder: str) -> None:
    from megatron.core import dist_checkpointing

    if kind == "torch":  # the next step makes the model's weights from the main ones
        optimizer.load_state_dict(torch.load(pathlib.Path(folder, f"{kind}0")))
        optimizer.load_parameter_state(str(pathlib.Path(folder, "parameters")))
        return
    with _with_transformer_engine(kind == "fully_reshardable"):
        state = _checkpoint(model, optimizer, kind, is_loading=True)
        loaded = dist_checkpointing.load(state, str(pathlib.Path(folder, kind)))
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])


def _load(
    folder: str, kind: str, wanted: dict[str, Tensor], variant: str | None = None, lost: str = "", **sizes: int
) -> None:
    """The last step of a resumed run has the same bits. `lost`: what is halved, and has to be missed."""
    with megatron(**sizes):
        model, optimizer = _job(9, True, variant, **sizes)
        if variant:
            _stepped([model], optimizer, 5)  # what this has kept is forgotten
        with mock.patch.object(flat_shards, "_carried_by", _losing(lost)) if lost else contextlib.nullcontext():
            _read(model, optimizer, kind, folder)
        muon = optimizer.chained_optimizers[0].optimizer
        muon.prepare()
        assert len({_kept_text(found) for found in _gathered(muon.state_dict())}) == 1, "not the same on every rank"
        _stepped([model], optimizer, 2)
        assert {float(of["step"]) for of in (*muon.state.values(), *muon.param_groups)} == {3.0}
        found = {clean(n): Cut(p).join(p) for n, p in model.named_parameters()}
        unlike = [n for n, p in found.items() if not torch.equal(p, wanted[n])]
        assert any("linear_fc1" in name for name in unlike) if lost else unlike == []


def _gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _kept_text(state: dict[str, Any]) -> str:
    """All bits of what stages keep, by name, of ranks that share it also where their shards are empty."""
    kept = [group.get("kept_state", {}) for group in state["param_groups"]]
    return repr([{n: {k: v.tolist() for k, v in of.items()} for n, of in group.items()} for group in kept])


def _losing(lost: str) -> Any:
    original = flat_shards._carried_by

    def carried(*args: Any) -> Any:
        found = original(*args)
        assert any(kept[lost].any() for kept in found.values()), "nothing to lose"
        return {n: {**kept, lost: kept[lost] / 2} for n, kept in found.items()}

    return carried


KINDS = ["dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter", "torch"]
TP = {"tensor_model_parallel_size": 2}


@needs_megatron
@pytest.mark.parametrize(
    ("world", "sizes", "variant", "loads"),  # loads: on how many ranks, of what sizes, which kinds
    [
        (2, {}, None, [(2, {}, KINDS[:2]), (3, {}, KINDS[:2])]),
        (4, {}, VARIANT, [(2, {}, KINDS), (4, {}, KINDS[:1])]),
        (4, TP, VARIANT, [(2, TP, KINDS[:2]), (2, {}, KINDS[1:2])]),
    ],
    ids=["plain", "variant", "variant, tensor parallel"],
)
def test_checkpoints_of_flat_shards_resume_with_the_same_bits_on_other_ranks(
    world: int,
    sizes: dict[str, int],
    variant: str | None,
    loads: list[tuple[int, dict[str, int], list[str]]],
    tmp_path: pathlib.Path,
) -> None:
    kinds = list(dict.fromkeys(kind for *_, of_load in loads for kind in of_load))
    wanted = get_pool(world).run(_save, str(tmp_path), kinds, variant, **sizes)[0]
    for num_ranks, on, of_load in loads:
        for kind in of_load:
            get_pool(num_ranks).run(_load, str(tmp_path), kind, wanted, variant, **on)
    if variant and not sizes:
        for lost in ("second_moment", "weight_radius"):
            get_pool(2).run(_load, str(tmp_path), KINDS[1], wanted, variant, lost)
        get_pool(2).run(_load, str(tmp_path), KINDS[0], wanted)  # options come from the checkpoint


def _parallel_resume(folder: str, sizes: dict[str, int], distributed: bool, variant: str | None) -> None:
    """A resumed run has the bits of the same one that was not interrupted."""
    parallel: dict[str, Any] = {**sizes, **(EXPERTS if "expert_model_parallel_size" in sizes else {})}
    if "pipeline_model_parallel_size" in sizes:
        parallel |= {"num_layers": 2, "pipeline_dtype": torch.bfloat16}
    with megatron(**sizes):
        from megatron.core import dist_checkpointing

        model, optimizer = _job(0, distributed, variant, **parallel)
        _stepped([model], optimizer, 0)
        _write(_checkpoint(model, optimizer, "fully_reshardable", is_loading=False), pathlib.Path(folder))
        _stepped([model], optimizer, 1)
        fresh, resumed = _job(9, distributed, variant, **parallel)
        if variant:
            _stepped([fresh], resumed, 5)  # what this has kept is forgotten
        loaded = dist_checkpointing.load(_checkpoint(fresh, resumed, "fully_reshardable", is_loading=True), folder)
        fresh.module.load_state_dict(loaded["model"])
        resumed.load_state_dict(loaded["optimizer"])
        _stepped([fresh], resumed, 1)
        pairs = zip(model.named_parameters(), fresh.parameters(), strict=True)
        assert [name for (name, p), q in pairs if not torch.equal(p, q)] == []


@needs_megatron
@pytest.mark.parametrize(
    ("sizes", "distributed", "variant"),
    [
        ({}, False, VARIANT),
        (TP, False, VARIANT),
        (TP, True, VARIANT),
        ({"expert_model_parallel_size": 2}, False, None),
        ({"expert_model_parallel_size": 2}, True, VARIANT),
        ({"pipeline_model_parallel_size": 2}, True, VARIANT),
    ],
    ids=str,
)
def test_checkpoints_of_parallel_layers_experts_and_stages_resume_with_the_same_bits(
    sizes: dict[str, int], distributed: bool, variant: str | None, tmp_path: pathlib.Path, world2: RankPool
) -> None:
    world2.run(_parallel_resume, str(tmp_path), sizes, distributed, variant)


@needs_megatron
def test_what_rank_0_would_not_save_is_refused_on_all(tmp_path: pathlib.Path, world2: RankPool) -> None:
    sizes = {"expert_model_parallel_size": 2}
    for error in world2.run_catching(_parallel_resume, str(tmp_path), sizes, False, "normuon"):
        assert error.type_name == "ValueError"
        assert "keeps second_moment, which Megatron's dist_checkpointing saves from rank 0 alone" in error.message
        assert "with expert parallelism other ranks have parameters of their own" in error.message


def _chunks() -> None:
    """Model chunks of one optimizer have the bits of the same ones with an optimizer each."""
    with megatron():
        config = optimizer_config(clip_grad=0.0, use_distributed_optimizer=True)
        jobs = []
        for split in ([(0, 1)], [(0,), (1,)]):
            parts = []
            for seeds in split:
                models = [gpt(s, ddp={"use_distributed_optimizer": True}, calculate_per_token_loss=True) for s in seeds]
                parts.append((models, get_megatron_optimizer(config, models)))
            for step in range(2):
                for models, optimizer in parts:
                    _stepped(models, optimizer, step)
            jobs.append([p for models, _ in parts for model in models for p in model.named_parameters()])
        assert [name for (name, p), (_, q) in zip(*jobs, strict=True) if not torch.equal(p, q)] == []


@needs_megatron
def test_model_chunks_of_an_interleaved_schedule_share_an_optimizer(world2: RankPool) -> None:
    world2.run(_chunks)


def _real_ranges() -> None:
    with megatron():  # quietly
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

    generator = random.Random(0)
    for _ in range(100):
        params = [nn.Parameter(torch.zeros(generator.randint(1, 700))) for _ in range(generator.randint(1, 9))]
        bucket, num_ranks = generator.choice([None, 500, 1000]), generator.randint(1, 8)
        layout = DistributedOptimizer._compute_per_buffer_param_layout(
            params, bucket, num_ranks, SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)
        )
        theirs = [[(0, 0)] * num_ranks for _ in params]
        for start, end in layout.bucket_indices:
            part = (end - start) // num_ranks
            for k in range(num_ranks):
                held = DistributedOptimizer._build_model_gbuf_param_range_map(
                    layout.param_index_map, Range(start + k * part, start + (k + 1) * part), start
                )
                for number, param in enumerate(params):
                    if param in held:
                        theirs[number][k] = (held[param]["param"].start, held[param]["param"].end)
        assert flat_ranges([p.numel() for p in params], num_ranks, bucket) == theirs


@needs_megatron
def test_flat_buffers_are_laid_out_as_megatron_does(world2: RankPool) -> None:
    world2.run(_real_ranges)


# ------------------------------------------------------------------------- and, last, on 4 (pools start once)


@needs_megatron
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_checkpoint_without_what_the_variant_keeps_is_refused_on_all(
    kind: str, tmp_path: pathlib.Path, world2: RankPool
) -> None:
    wanted = world2.run(_save, str(tmp_path), [kind])[0]
    for error in world2.run_catching(_load, str(tmp_path), kind, wanted, VARIANT):
        assert error.type_name == "ValueError"
        assert "its momentum was loaded, and not second_moment, which variant='normuon+hyperball'" in error.message
        assert "set the group's variant to None for one step" in error.message
    world2.run(_begin_from_zeros, str(tmp_path), kind)


def _begin_from_zeros(folder: str, kind: str) -> None:
    """Begin from zeros as the message says: every matrix has variant state after a step with the variant again."""
    with megatron():
        model, optimizer = _job(9, True, VARIANT)
        groups = [group for group in optimizer.param_groups if group["use_muon"]]
        for group in groups:
            group["variant"] = None
        _read(model, optimizer, kind, folder)
        _stepped([model], optimizer, 2)
        for group in optimizer.param_groups:
            if group["use_muon"]:
                group["variant"] = VARIANT
        _stepped([model], optimizer, 3)
        muon = optimizer.chained_optimizers[0].optimizer
        kept = [of for group in muon.state_dict()["param_groups"] for of in group.get("kept_state", {}).values()]
        assert kept and all(value.any() for of in kept for value in of.values())


def _straddle(ranks: list[dict[str, Any]]) -> None:
    straddling = [n for n in ranks[0]["matrices"] if sum(n in found["held"] for found in ranks) > 1]
    assert straddling, "no matrix lies on two ranks"
    starts = [found["held"][n][0] % found["cols"][n] for n in straddling for found in ranks if n in found["held"]]
    assert any(starts), "no matrix is cut inside a row"
    assert any(n not in found["held"] for n in ranks[0]["matrices"] for found in ranks), "each rank holds some of all"


def _straddle_in_buckets(ranks: list[dict[str, Any]]) -> None:
    _straddle(ranks)
    assert ranks[0]["num_buckets"] > 1


def _two_instances(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["held"] == ranks[2]["held"] != ranks[1]["held"] == ranks[3]["held"]


def _tensor_parallel(ranks: list[dict[str, Any]]) -> None:
    layer = "decoder.layers.0"
    assert {name: stride for name, stride in ranks[0]["strides"].items() if layer in name} == {
        f"{layer}.self_attention.linear_proj.weight": 1,
        f"{layer}.self_attention.linear_qkv.weight": 1,
        f"{layer}.mlp.linear_fc1.weight": 2,  # gate and up
        f"{layer}.mlp.linear_fc2.weight": 1,
    }
    if ranks[0]["held"]:  # ranks 0 and 2 share the shards of one tensor-parallel rank
        assert any(n in ranks[0]["held"] and n in ranks[2]["held"] for n in ranks[0]["matrices"])


def _two_stages(ranks: list[dict[str, Any]]) -> None:
    assert [found["plans"] for found in ranks] == [[["(0, 1)"]], [["(0, 1)"]], [["(2, 3)"]], [["(2, 3)"]]]


def _experts_over(of_experts: str) -> Callable[[list[dict[str, Any]]], None]:
    def check(ranks: list[dict[str, Any]]) -> None:
        assert ranks[0]["plans"] == [["(0, 1, 2, 3)"], [of_experts]]
        assert sum(found["runs"][1] for found in ranks) == 3 * 2 * 6  # fc1 and fc2 of each expert, once in the job

    return check


DENSE = 3 * 6  # q, k, v, proj, fc1, fc2: once in the job
EP = {"expert_model_parallel_size": 2}
EP_WITHOUT_TP = {**TP, **EP, "expert_tensor_parallel_size": 1}
INSTANCES = {"num_distributed_optimizer_instances": 2}
STAGES = {"pipeline_model_parallel_size": 2}
JOBS: list[tuple[int, dict[str, int], torch.dtype, bool, dict[str, Any], int, Any]] = [
    (2, {}, torch.bfloat16, True, {}, DENSE, _straddle),
    (3, {}, torch.float32, True, {}, DENSE, _straddle),
    (4, {}, torch.float32, True, {}, DENSE, _straddle),
    (4, {}, torch.bfloat16, True, {"bucket_size": 2500}, DENSE, _straddle_in_buckets),
    (4, INSTANCES, torch.float32, True, {}, DENSE, _two_instances),
    (4, TP, torch.bfloat16, False, {}, DENSE, _tensor_parallel),
    (4, TP, torch.float32, True, {}, DENSE, _tensor_parallel),
    (4, STAGES, torch.float32, True, {}, 2 * DENSE, _two_stages),
    (4, EP, torch.float32, True, EXPERTS, 3 * 4, _experts_over("(0, 2)")),
    (4, EP_WITHOUT_TP, torch.float32, False, EXPERTS, 3 * 4, _experts_over("(0, 2)")),
    (4, {"expert_tensor_parallel_size": 2}, torch.float32, True, EXPERTS, 3 * 4, _experts_over("(0, 1, 2, 3)")),
]


@needs_megatron
@pytest.mark.parametrize(("world", "sizes", "dtype", "distributed", "options", "runs", "check"), JOBS)
def test_main_weights_get_the_dense_update(
    world: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    distributed: bool,
    options: dict[str, Any],
    runs: int,
    check: Callable[[list[dict[str, Any]]], None],
) -> None:
    ranks = get_pool(world).run(_train, sizes, dtype, distributed, **options)
    assert sum(found["runs"][0] for found in ranks) == runs
    check(ranks)


def _hardly_anything() -> tuple[int, int]:
    with megatron():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        module = nn.Sequential(nn.Linear(8, 8, bias=False))
        module[0].weight.data.copy_(weight)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        model = DistributedDataParallel(config, ddp, module)
        optimizer = get_megatron_optimizer(
            optimizer_config(clip_grad=0.0, use_distributed_optimizer=True),
            [model],
            overrides={"0.weight": "muon"},
        )
        dense = Dense(optimizer, {"0.weight": weight})
        for step in range(2):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            parts = _contributions(weight.shape, step, dist.get_world_size())
            module[0].weight.main_grad.copy_(parts[dist.get_rank()])
            model.finish_grad_sync()
            optimizer.step()
            dense.step({"0.weight": sum(parts, torch.zeros(8, 8))})
        muon = optimizer.chained_optimizers[0].optimizer
        held = sum(p.numel() for group in muon.param_groups for p in group["params"])
        assert torch.equal(module[0].weight, dense.params["0.weight"])
        return held, muon.traffic.orthogonalized


@needs_megatron
def test_ranks_that_hold_padding_only_take_part(world4: RankPool) -> None:
    held, runs = zip(*world4.run(_hardly_anything), strict=True)
    assert held == (32, 32, 0, 0)
    assert sum(runs) == 2


def _broken_then_loaded() -> None:
    with megatron():
        model, optimizer = _job(0)
        _stepped([model], optimizer, 0)
        muon = optimizer.chained_optimizers[0].optimizer
        saved = copy.deepcopy(muon.state_dict())
        for words in ("out of memory", "^an earlier step was broken off"):
            fails = mock.patch.object(pipeline, "apply_", side_effect=RuntimeError("out of memory"))
            with fails, pytest.raises(ExchangeError, match=words):
                _stepped([model], optimizer, 1)
        muon.load_state_dict(saved)
        _stepped([model], optimizer, 1)
        assert all(int(s["step"]) == 2 for s in muon.state.values())


@needs_megatron
def test_a_step_that_broke_off_goes_on_when_state_is_loaded(world2: RankPool) -> None:
    world2.run(_broken_then_loaded)


def _faults_in_every_function() -> None:
    with megatron():
        model, optimizer = _job(0)
        seeds = iter(range(9))
        _stepped([model], optimizer, next(seeds))
        muon = optimizer.chained_optimizers[0].optimizer
        known, passed = plant_in_all(muon, lambda: _stepped([model], optimizer, next(seeds)))
        assert {"instead_of_step", "_fill_gradients", "weights", "signature"} <= {*known}
        assert passed == []


@needs_megatron
def test_an_exception_in_any_function_before_the_agreement_is_raised_on_all(world2: RankPool) -> None:
    world2.run(_faults_in_every_function)
