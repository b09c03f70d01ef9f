"""Tests of QK-clip on every layout: either the weights match a single-process run bitwise, or every rank raises the
same error."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from demo_script import train
from golden.table import placed
from megatron_gpt import clean, gpt, megatron, needs_megatron, optimizer_config
from spectra import normal
from test_qk_clip import Llama, clip_by
from tolerances import assert_rounded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.frameworks.megatron import get_megatron_optimizer
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import Fsdp1Run, ZeroRun
from shardmuon.testing.layouts import LAYOUTS, parameters
from shardmuon_qkclip import QKClip
from shardmuon_qkclip.layers import Attention, Rows

SHAPES = {
    "q": (30, 14),
    "k": (10, 14),
    "qkv": (36, 9),
    "turned": (7, 24),
    "q_b": (35, 6),
    "kv_b": (45, 5),
    "other": (11, 13),
}
BIASES = {"q_bias": (30,), "k_bias": (10,)}
LAYERS = (
    Attention(
        "separate",
        6,
        2,
        tuple(Rows(n, ((n[0], SHAPES[n[0]][0]),)) for n in ("q", "k", "q_bias", "k_bias")),  # type: ignore[arg-type]
    ),
    Attention("fused", 6, 3, (Rows("qkv", (("q", 6), ("k", 3), ("", 3)), repeats=3),)),
    Attention("turned", 4, 4, (Rows("turned", (("q", 8), ("k", 8), ("", 8)), dim=1),)),
    Attention("latent", 5, 5, (Rows("q_b", (("q", 4), ("q_pe", 3)), 5), Rows("kv_b", (("k", 4), ("", 5)), 5))),
)


def _model(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {n: normal(*s, seed=i).to(dtype) for i, (n, s) in enumerate({**SHAPES, **BIASES}.items())}


def _maxima(rank: int) -> dict[str, Tensor]:
    """Return the largest logit of each head over one rank's batches. About half of these logits exceed 100, and no
    single rank has the maximum of every head."""
    return {x.name: 100 + 60 * normal(x.num_heads, seed=100 * rank + i) for i, x in enumerate(LAYERS)}


def _optimizer(params: Mapping[str, Tensor], given: Any = None, **options: Any) -> Muon:
    groups = [{"params": [(n, p)], "use_muon": n not in BIASES} for n, p in params.items()]
    return Muon(groups, lr=0.02, **options, **(given or {}))


def _hooked(params: Mapping[str, nn.Parameter], optimizer: Muon, ranks: Iterable[int], **options: Any) -> QKClip:
    """Return a QKClip whose `logits` function returns the largest logit of each head over the batches of the given
    ranks. Each step has new batches."""
    warnings.filterwarnings("ignore", "no parameter of this optimizer has a gradient", UserWarning)
    steps = itertools.count(step=10)

    def logits() -> dict[str, Tensor]:
        step = next(steps)
        everyone = [_maxima(rank + step) for rank in ranks]
        return {x.name: torch.stack([theirs[x.name] for theirs in everyone]).amax(0) for x in LAYERS}

    return QKClip(nn.ParameterDict(params), optimizer, layers=LAYERS, logits=logits, **options)


def _on_one_process(weights: dict[str, Tensor], steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Take steps with the given gradients in a single process, and return the weights. QK-clip is given the maximum
    logits over all ranks' batches."""
    params = {n: nn.Parameter(t) for n, t in weights.items()}
    optimizer = _optimizer(params)
    _hooked(params, optimizer, range(dist.get_world_size()), process_group=(dist.get_rank(),))
    for grads in steps:
        for name, grad in grads.items():
            params[name].grad = grad.clone()
        optimizer.step()
    return {n: p.detach() for n, p in params.items()}


def _matches_one_process(layout: str, dtype: torch.dtype) -> list[str]:
    """Take two steps with QK-clip on a layout. Return the names of the parameters that differ from a single-process
    run."""
    params = parameters(placed(layout, _model(dtype)))
    optimizer = _optimizer(params, **LAYOUTS[layout].options(dist.get_world_size()))
    beyond = dist.group.WORLD if layout in ("single", "mixed meshes", "mcore buffers") else None
    _hooked(params, optimizer, (dist.get_rank(),), process_group=beyond)
    # Take two steps: the first one caches a table of the ranks that store each weight, and the second one reads this
    # table.
    for _ in range(2):
        optimizer.step()
    wanted = placed(layout, _on_one_process(_model(dtype), [{}, {}]))
    return [n for n, p in params.items() if not torch.equal(local_if_any(p), local_if_any(wanted[n]))]


@pytest.mark.parametrize(
    ("world", "layout"),
    sorted((4 if len(case.mesh(4)) > 1 or at % 2 else 3, name) for at, (name, case) in enumerate(LAYOUTS.items())),
)
def test_weights_have_the_bits_of_one_process(layout: str, world: int) -> None:
    dtype = torch.bfloat16 if world == 3 and "mcore" not in layout else torch.float32
    assert RankPool.cached(world).run(_matches_one_process, layout, dtype) == [[]] * world


# ------------------------------------------------------------------------------------------------------- frameworks


def _framework_matches(kind: type[Fsdp1Run] | type[ZeroRun], row: str, dtype: torch.dtype) -> list[str]:
    """Return the names of the weights (or of the fp32 master weights, if the framework keeps them) that differ from a
    single-process run."""
    clips = list[QKClip]()

    def make(params: Any, options: Any) -> Muon:
        optimizer = _optimizer(params, options)
        clips.append(_hooked(params, optimizer, (dist.get_rank(),)))
        return optimizer

    run = kind(row, _model(dtype), make)
    grads = [
        {n: normal(*t.shape, seed=50 * k + i).to(dtype) for i, (n, t) in enumerate(_model().items())} for k in range(3)
    ]
    for given in grads:
        run.step({n: t.to(dtype) for n, t in run.gradients(given).items()})
    assert clips[0].report.step == 3 and clips[0].report.num_clipped > 0
    found = run.weights()
    wanted = _on_one_process(run.start(_model(dtype)), [run.gradients(given) for given in grads])
    wrong = [n for n, t in found.items() if not torch.equal(t, wanted[n])]
    if dtype == torch.bfloat16:  # The model's weights must equal the clipped fp32 master weights, rounded to bf16.
        import deepspeed

        params = dict(run._params)
        with deepspeed.zero.GatheredParameters(list(params.values())) if "zero3" in row else nullcontext():
            wrong += [f"copy of {n}" for n, p in params.items() if not torch.equal(p, found[n].to(dtype))]
    run.close()
    return wrong


@pytest.mark.parametrize(
    ("row", "dtype"),
    [*((row, torch.float32) for row in ZeroRun.ROWS), ("zero2", torch.bfloat16), ("zero3", torch.bfloat16)],
)
def test_zero_steps_and_clips_as_one_process_does(
    row: str, dtype: torch.dtype, deepspeed_pools: dict[int, RankPool]
) -> None:
    assert deepspeed_pools[2].run(_framework_matches, ZeroRun, row, dtype) == [[]] * 2


@pytest.mark.parametrize("row", Fsdp1Run.ROWS)
def test_fsdp1_steps_and_clips_as_one_process_does(row: str, world4: RankPool) -> None:
    assert world4.run(_framework_matches, Fsdp1Run, row, torch.float32) == [[]] * 4


def _megatron_run(sizes: dict[str, int], distributed: bool, dtype: torch.dtype, clipped: bool) -> dict[str, Tensor]:
    """Return the weights of a Megatron model after two optimizer steps with lr=0, with or without QK-clip."""
    half = {"bf16": True, "params_dtype": dtype} if dtype == torch.bfloat16 else {}
    with megatron(**sizes):
        ddp = {"use_distributed_optimizer": distributed}
        model = gpt(0, ddp=ddp, calculate_per_token_loss=True, **sizes, **half)
        config = optimizer_config(lr=0.0, clip_grad=0.0, use_distributed_optimizer=distributed, **half)
        optimizer = get_megatron_optimizer(config, [model], adamw_lr=0.0)
        if clipped:
            maxima = [[50.0, 400.0, 60.0, 70.0], [900.0, 20.0, 110.0, 10.0]][dist.get_rank() % 2]
            given = {"decoder.layers.0.self_attention": torch.tensor(maxima)}
            QKClip(model, optimizer.chained_optimizers[0].optimizer, logits=lambda: given)
        for _ in range(2):
            model.zero_grad_buffer()
            for p in model.parameters():
                p.main_grad.fill_(0.125)
            model.finish_grad_sync()
            optimizer.step()
        return {clean(n): p.detach().float().clone() for n, p in model.named_parameters()}


def _megatron_clips(sizes: dict[str, int], distributed: bool, dtype: torch.dtype) -> list[str]:
    """Clip in each of two optimizer steps with lr=0. The query and key rows must be scaled twice in fp32 and rounded to
    `dtype` only once. Return the names of the weights that differ."""
    wanted, found = (_megatron_run(sizes, distributed, dtype, clipped) for clipped in (False, True))
    weight = wanted["decoder.layers.0.self_attention.linear_qkv.weight"]
    first = dist.get_rank() % 2 if sizes else 0
    rows = weight.view(-1, 4, 6, weight.shape[1]).clone()  # shape (groups, 4 heads (q, q, k, v), head size, columns)
    gain = 100.0 / torch.tensor([900.0, 110.0])[first : first + len(rows)]
    for _ in range(2):
        rows[:, :3].mul_(gain.pow(0.5).view(-1, 1, 1, 1))
    weight.copy_(rows.to(dtype).view_as(weight))
    return [n for n, t in found.items() if not torch.equal(t, wanted[n])]


@needs_megatron
@pytest.mark.parametrize(
    ("sizes", "distributed", "dtype"),
    [
        ({}, True, torch.bfloat16),
        ({"tensor_model_parallel_size": 2}, True, torch.float32),
    ],
    ids=["dp bf16 distributed", "tp fp32 distributed"],
)
def test_megatrons_weights_and_their_copies_are_clipped(
    sizes: dict[str, int], distributed: bool, dtype: torch.dtype, world4: RankPool
) -> None:
    assert world4.run(_megatron_clips, sizes, distributed, dtype) == [[]] * 4


# ------------------------------------------------------------------------------------------------ measured on ranks

_SIZES = train.Config(dim=32, layers=2, heads=4, kv_heads=2, hidden=48, seq_len=16)


def _measured(shape: dict[str, int], parts: int) -> list[list[list[float]]]:
    """Measure each layer's largest logits twice: in a single process on all sequences, and on a mesh whose ranks each
    process a part of the sequences. Each measurement has two backward passes, of which only the second synchronizes
    gradients. Return the logits of both measurements."""
    everyone = torch.randint(0, 32, (8, 17), generator=torch.Generator().manual_seed(1))
    reports = []
    for mesh in (None, init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))):
        torch.manual_seed(0)
        whole = train.Model(_SIZES)
        with torch.no_grad():
            for block in whole.blocks:
                block.attention.wq.weight *= 20.0
        model: Any = train.parallelize(whole, mesh)
        optimizer = train.build_muon(model, lr=0.02, weight_decay=0.1)
        alone = {"process_group": (dist.get_rank(),)} if mesh is None else {}
        clip = QKClip(model, optimizer, tau=0.05, **alone)
        ids = everyone if mesh is None else everyone.chunk(parts)[dist.get_rank() * parts // dist.get_world_size()]
        # Ignore FSDP2's warning that the demo model's output is a view.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        for rows, is_last in zip(ids.chunk(2), (False, True), strict=True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            # Like DDP's `no_sync`, set `require_backward_grad_sync` so that only the last backward pass reduces
            # gradients.
            model.require_backward_grad_sync = is_last
            train.loss_of(model, rows).backward()
        optimizer.step()
        reports.append([layer.maxima.tolist() for layer in clip.report.layers])
        assert clip.report.num_clipped > 0
        clip.close()
    return reports


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ({"shard": 4}, 4),
        ({"shard": 2, "tp": 2}, 2),
        ({"tp": 2}, 1),
        ({"replicate": 2, "shard": 2}, 4),
        ({"replicate": 2}, 2),
    ],
    ids=str,
)
def test_each_ranks_heads_and_batches_are_measured(shape: dict[str, int], parts: int) -> None:
    (alone, together), *others = RankPool.cached(math.prod(shape.values())).run(_measured, shape, parts)
    assert all(theirs[1] == together for theirs in others)  # The measured logits must have the same bits on every rank.
    for here, wanted in zip(together, alone, strict=True):
        # The bound covers the rounding errors of both measurements. Each measurement sums 32 terms for every element of
        # q and k, applies norms and rotations, and sums 8 terms for the product of q and k.
        a, b = (torch.tensor(x) for x in (here, wanted))
        assert_rounded(a, b, roundings=2 * (32 + 8 + 48), dtype=torch.float32, scale=float(b.max()))


def _unknown_replicas() -> None:
    with pytest.raises(RuntimeError, match=r"q_proj.weight: it is a plain tensor on each of 2 ranks.*process_group="):
        clip_by({}, Llama())


def test_replicas_that_nobody_names_are_refused(world2: RankPool) -> None:
    world2.run(_unknown_replicas)
