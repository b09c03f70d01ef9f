"""Tests that updates, state and checkpoints of Muon's AdamW parameter groups match those of torch.optim.AdamW bitwise,
in a single process and on shards."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from jobs import Job, Spec, as_in, whole
from on_ranks import on_ranks
from spectra import assert_equal, normal, run, set_gradients
from torch import Tensor, nn
from torch.optim import lr_scheduler

from shardmuon import Muon

SHAPES = ((9,), (1,), (33,), (7, 5), (2, 3, 4))
# Tensors of the shapes in WHOLE occupy a multiple of 64 bytes in every dtype of DTYPES, so each of them fills whole
# SIMD registers.
WHOLE = ((32,), (64,), (96,), (8, 12), (4, 4, 6))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def adamw_group(params: Iterable[Any], **options: Any) -> list[dict[str, Any]]:
    return [{"params": list(params), "use_muon": False, **OPTIONS, **options}]


def states(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], key: str) -> list[Tensor]:
    return [optimizer.state[p][key] for p in params]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_has_torchs_bits(dtype: torch.dtype) -> None:
    """The results of Muon's AdamW groups must equal those of torch's fused AdamW kernel. Tensor sizes are multiples of
    the SIMD width, because the kernel rounds differently for remainder elements that do not fill a SIMD register."""
    mine, theirs = parameters(dtype, WHOLE), parameters(dtype, WHOLE)
    ours = Muon(adamw_group(mine), lr=1e-3)
    torchs = torch.optim.AdamW(theirs, **OPTIONS, fused=True)
    for seed in (1, 2, 3):
        for o, params in ((ours, mine), (torchs, theirs)):
            set_gradients(params, seed)
            if seed == 2:
                # A parameter without a gradient is skipped, and its step count does not advance.
                params[2].grad = None
            o.step()
        assert_equal(mine, theirs)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_equal(states(ours, mine, key), states(torchs, theirs, key))
    assert [float(s) for s in states(ours, mine, "step")] == [3.0, 3.0, 2.0, 3.0, 3.0]
    for p, q in zip(mine, theirs, strict=True):
        forms = [[(k, t.dtype, t.shape, t.device) for k, t in o.state[x].items()] for o, x in ((ours, p), (torchs, q))]
        assert forms[0] == forms[1]


def test_states_load_from_torch_optim_adamw_and_back() -> None:
    whole, params = parameters(shapes=WHOLE), parameters(shapes=WHOLE)
    run(torch.optim.AdamW(whole, **OPTIONS, fused=True), whole, range(6))
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(params, **OPTIONS, fused=True)]
    made += [Muon([{"params": params, "use_muon": False}], lr=9.0), torch.optim.AdamW(params, lr=9.0, fused=True)]
    for at, optimizer in enumerate(made):
        if at:
            optimizer.load_state_dict(copy.deepcopy(made[at - 1].state_dict()))
        # A state dict that Muon saved lacks options that Muon does not have, such as amsgrad. torch.optim.AdamW loses
        # these options when it loads the state dict, so the test sets them again.
        if at == 2:
            optimizer.param_groups[0].update(fused=True, amsgrad=False, maximize=False, foreach=None, capturable=False)
        run(optimizer, params, (2 * at, 2 * at + 1))
    assert made[1].param_groups[0]["use_muon"] is False
    assert_equal(params, whole)


BETTER = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Each case gives the options of Muon's AdamW group, the equivalent options of torch.optim.AdamW, and a function that
# creates an LR scheduler (or None).
SAID: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "a tensor lr": ({**OPTIONS, "lr": torch.tensor(0.25)}, {**OPTIONS, "lr": 0.25}, None),
    "a tensor lr and other options": ({**BETTER, "lr": torch.tensor(0.25)}, {**BETTER, "lr": 0.25}, None),
    "defaults": ({}, {**BETTER, "lr": 0.01}, None),
    "LambdaLR": (OPTIONS, OPTIONS, lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step)),
    "CosineAnnealingLR": (OPTIONS, OPTIONS, lambda o: lr_scheduler.CosineAnnealingLR(o, 4)),
    "LinearLR": (OPTIONS, OPTIONS, lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3)),
    "OneCycleLR": (OPTIONS, OPTIONS, lambda o: lr_scheduler.OneCycleLR(o, 0.1, 6, cycle_momentum=False)),
}


@pytest.mark.parametrize("case", SAID)
def test_options_defaults_and_schedulers_mean_what_they_mean_in_torch(case: str) -> None:
    ours_say, torchs_say, make = SAID[case]
    mine, theirs, matrix = parameters(shapes=WHOLE), parameters(shapes=WHOLE), nn.Parameter(normal(4, 4, seed=1))
    ours = Muon([{"params": [matrix]}, {"params": mine, "use_muon": False, **ours_say}], lr=0.01, weight_decay=0.1)
    torchs = torch.optim.AdamW(theirs, **torchs_say, fused=True)
    schedulers, seen = [make(o) for o in (ours, torchs) if make], set()
    for seed in range(5):
        seen.add(torchs.param_groups[0]["lr"])
        run(ours, [*mine, matrix], [seed])
        run(torchs, theirs, [seed])
        for scheduler in schedulers:
            scheduler.step()
    assert (len(seen) > 1) == bool(schedulers)
    assert_equal(mine, theirs)


# ------------------------------------------------------------------------------------------------------- on shards


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*(("fsdp2", dtype) for dtype in DTYPES), ("hsdp", torch.bfloat16), ("replicate", torch.float16)],
)
@on_ranks(4)
def test_shards_have_the_bits_of_one_process(layout: str, dtype: torch.dtype) -> None:
    shapes = [*SHAPES, (1, 6), (64, 3)]
    groups = adamw_group(Spec(f"{i}", shape, as_in(layout), dtype=dtype) for i, shape in enumerate(shapes))
    job, dense = Job(groups), whole(groups)
    for seed in (1, 2, 3):
        job.step(seed)
        dense.step(seed)
        assert not job.unlike_whole(dense.named())
    for p in job.specs:
        kept = job.state[p]
        # Every rank must increment the step count, even if it stores no elements of the parameter.
        assert float(kept["step"]) == 3.0
        for t in (kept["exp_avg"], kept["exp_avg_sq"]):
            assert (t.placements, t.shape, t.dtype) == (p.placements, p.shape, p.dtype)  # type: ignore[attr-defined]


# Functions that copy the initial weights of a parameter. All except torch.clone change the strides or return a tensor
# with an unaligned address.
FORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.clone,
    lambda t: torch.stack([t, torch.full_like(t, 9.0)], dim=-1)[..., 0],
    lambda t: t.t().contiguous().t(),
    # The copy starts 5 elements into its storage, so its address is not a multiple of 64 bytes.
    lambda t: t.new_zeros(5 + t.numel())[5:].view(t.shape).copy_(t),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_has_the_same_bits_wherever_it_lies(dtype: torch.dtype) -> None:
    """Update a random matrix with one optimizer and the row blocks of the same matrix with another. Block sizes, memory
    layouts and the order of the blocks are random. The results must be bitwise identical."""
    draw, ends = random.Random(f"{dtype}"), 0
    for seed in range(40):
        rows, cols = draw.randint(1, 40), draw.choice([1, 2, 3, 7, 16, 33, 64])
        scale, lr = 10 ** draw.uniform(-5, 2), draw.choice([0.03, 0.001, torch.tensor(0.01)])
        cuts = sorted({0, rows, *(draw.randint(0, rows) for _ in range(3))})
        sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        start = normal(rows, cols, seed=seed, dtype=dtype)
        whole = nn.Parameter(start.clone())
        parts = [nn.Parameter(draw.choice(FORMS)(t)) for t in start.split(sizes)]
        order = draw.sample(parts, len(parts))
        one, other = (Muon(adamw_group(of, lr=lr), lr=1e-3) for of in ([whole], order))
        for step in (1, 2, 3):
            grad = scale * normal(rows, cols, seed=1000 * step + seed, dtype=dtype)
            # For some seeds, the gradient is a single row expanded to the full shape (stride 0), as in the backward
            # pass of `weight.sum(0)`.
            grad = grad[:1].expand(rows, cols) if seed % 5 == 0 else grad
            whole.grad = grad.clone(memory_format=torch.contiguous_format)
            for part, piece in zip(parts, grad.split(sizes), strict=True):
                part.grad = piece if seed % 5 == 0 else draw.choice(FORMS)(piece)
            one.step()
            other.step()
        assert torch.equal(torch.cat([p.detach() for p in parts]), whole.detach()), (rows, cols, cuts)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(torch.cat(states(other, parts, key)), one.state[whole][key]), (key, rows, cols, cuts)
        assert {float(step) for step in states(other, parts, "step")} == {3.0}
        ends += any(p.numel() * p.element_size() % 64 for p in parts)
    assert ends > 20, "hardly any piece has an end that fills no vector"


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tensors_of_unlike_step_counts_keep_their_own(dtype: torch.dtype) -> None:
    """Small tensors with equal step counts are copied into one padded buffer, which the fused AdamW kernel updates with
    a single step count. Tensors with different step counts must not share a buffer."""
    mine, alone = (parameters(dtype, ((3,), (5,), (7,), (9, 1))) for _ in range(2))
    together, single = Muon(adamw_group(mine), lr=1e-3), [Muon(adamw_group([p]), lr=1e-3) for p in alone]
    for seed in range(4):
        for params in (mine, alone):
            set_gradients(params, seed)
            # Parameter i gets its first gradient in step i, so that the step counts of all parameters differ.
            for late in params[seed + 1 :]:
                late.grad = None
        for optimizer in (together, *single[: seed + 1]):
            optimizer.step()
    assert [int(together.state[p]["step"]) for p in mine] == [4, 3, 2, 1]
    assert_equal(mine, alone)
