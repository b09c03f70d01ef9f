"""adamw="cautious" under frameworks that keep weights and state in flat tensors, and in bf16, against the definition:
a weight decays only where it has the sign of its update."""

from __future__ import annotations

import copy
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_gpt import clean, gpt, half, megatron, needs_megatron, optimizer_config, shards_of
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from shardmuon import Muon
from shardmuon.frameworks.megatron import get_megatron_optimizer
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import Fsdp1Run, ZeroRun, quiet
from shardmuon.testing.tolerances import assert_rounded, roundoff

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 8), "embedding": (9, 8), "bias": (5,), "scale": (7,)}
# With this beta no sum of gradients that are eighths, of two or three steps, is zero: its sign would hang on rounding.
OPTIONS: dict[str, Any] = {"lr": 0.125, "betas": (0.83, 0.9), "eps": 1e-6, "weight_decay": 2.0}
STEPS = 3
# Each step: moments, corrections, square root, eps, quotient, decay and step, on either side.
ROUNDINGS = STEPS * 2 * 10


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def full(seed: int) -> dict[str, Tensor]:
    return {name: normal(shape, 100 * seed + i) for i, (name, shape) in enumerate(SHAPES.items())}


class Formula:
    """AdamW (arXiv 1711.05101) with cautious decay (arXiv 2510.12402) on whole tensors, in fp64."""

    def __init__(self, weights: Mapping[str, Tensor], options: Callable[[str], Mapping[str, Any]]) -> None:
        self.weights = {name: t.detach().double().clone() for name, t in weights.items()}
        self.start, self.options = dict(self.weights), options
        self.m = {name: torch.zeros_like(t) for name, t in self.weights.items()}
        self.v = {name: torch.zeros_like(t) for name, t in self.weights.items()}
        self.t = self.decayed = self.spared = 0

    def step(self, grads: Mapping[str, Tensor]) -> None:
        self.t += 1
        for name, w in self.weights.items():
            of, g = self.options(name), grads[name].double()
            (beta1, beta2), lr = of["betas"], of["lr"]
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * g * g
            update = self.m[name] / (1 - beta1**self.t) / ((self.v[name] / (1 - beta2**self.t)).sqrt() + of["eps"])
            agrees = torch.sign(update) == torch.sign(w)
            if of["weight_decay"]:
                self.decayed, self.spared = self.decayed + int(agrees.sum()), self.spared + int((~agrees).sum())
            self.weights[name] = w - lr * of["weight_decay"] * w * agrees - lr * update

    def check(self, name: str, found: Tensor, part: slice = slice(None)) -> None:
        wanted, begun = (of[name].flatten()[part].float() for of in (self.weights, self.start))
        scale = begun.abs() + STEPS * self.options(name)["lr"]  # updates are below lr
        assert_rounded(found.detach().flatten().float(), wanted, roundings=ROUNDINGS, scale=scale, what=name)


def make(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> Muon:
    matrix = {"params": [("matrix", params["matrix"])]}
    others = {"params": [(n, p) for n, p in params.items() if n != "matrix"], "use_muon": False, **OPTIONS}
    return Muon([matrix, others], lr=0.02, adamw="cautious", **options)


def _without_matrix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if name != "matrix"}


def test_in_bf16_each_step_is_the_formula() -> None:
    """Each step is the formula on weights and moments in bf16; counters are not."""
    params = {name: nn.Parameter(t.bfloat16()) for name, t in full(0).items()}
    optimizer = make(params, {})
    decayed = spared = bites = 0
    lr, decay, (beta1, beta2) = OPTIONS["lr"], OPTIONS["weight_decay"], OPTIONS["betas"]
    for t in range(1, STEPS + 1):
        before = {name: p.detach().double() for name, p in params.items()}
        moments = {n: {k: v.double() for k, v in optimizer.state[p].items()} for n, p in params.items()}
        for name, grad in full(t).items():
            params[name].grad = grad.bfloat16()
        optimizer.step()
        for name, w in _without_matrix(before).items():
            g = params[name].grad.double()  # type: ignore[union-attr]
            zero = torch.zeros_like(w)
            m = beta1 * moments[name].get("exp_avg", zero) + (1 - beta1) * g
            v = beta2 * moments[name].get("exp_avg_sq", zero) + (1 - beta2) * g * g
            update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + OPTIONS["eps"])
            clear = m.abs() > 4 * roundoff(torch.bfloat16) * (beta1 * (m - (1 - beta1) * g).abs() + g.abs())
            agrees = torch.sign(update) == torch.sign(w)
            wanted = w - lr * decay * w * agrees - lr * update
            # decay, quotient (of moments rounded before it), step: stored in bf16 each
            bound = 10 * roundoff(torch.bfloat16) * (w.abs() + lr * update.abs())
            off = (params[name].detach().double() - wanted).abs()
            assert bool((off <= bound)[clear].all()), f"{name}: {float((off / bound)[clear].max()):.2f}"
            bites += int(((lr * decay * w).abs() > 2 * bound)[clear].sum())
            decayed, spared = decayed + int(agrees[clear].sum()), spared + int((~agrees[clear]).sum())
        assert params["bias"].dtype == optimizer.state[params["bias"]]["exp_avg"].dtype == torch.bfloat16
    assert decayed > 50 and spared > 50 and bites > 100, (decayed, spared, bites)


def test_saved_groups_say_so() -> None:
    """State goes on cautiously, also in an optimizer that was made otherwise."""
    params = {name: nn.Parameter(t) for name, t in full(0).items()}
    optimizer = make(params, {})

    def step(optimizer: Muon, params: Mapping[str, nn.Parameter], seed: int) -> None:
        for name, grad in full(seed).items():
            params[name].grad = grad
        optimizer.step()

    step(optimizer, params, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    others = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    listed = [{"params": [others["matrix"]]}, {"params": list(_without_matrix(others).values()), "use_muon": False}]
    again = Muon(listed, lr=1e-3)
    again.load_state_dict(saved)
    assert again.param_groups[1]["adamw"] == "cautious"
    for seed in (2, 3):
        step(optimizer, params, seed)
        step(again, others, seed)
    assert all(torch.equal(p, others[name]) for name, p in params.items())


# ------------------------------------------------------------------------------------------------ under frameworks


def _compared(run: Any, start: Mapping[str, Tensor]) -> list[bool]:
    formula = Formula(_without_matrix(run.start(start)), lambda name: OPTIONS)
    for step in range(1, STEPS + 1):
        grads = run.gradients(full(step))
        run.step({name: g.to(start[name].dtype) for name, g in grads.items()})
        formula.step(grads)
    found = run.weights()
    for name in formula.weights:
        formula.check(name, found[name])
    return [formula.decayed > 50, formula.spared > 50]


# As in test_fsdp1.py: on CPUs torch 2.13 gives all kinds of state one memory with offload_to_cpu=True.
_WHOLE = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)


def _under_fsdp1() -> list[bool]:
    run = Fsdp1Run("fsdp1", full(0), make)
    found = _compared(run, full(0))
    weights = run.weights()
    other = Fsdp1Run("fsdp1", {name: weights[name] for name in SHAPES}, make)
    with quiet(), FSDP.state_dict_type(run._model, StateDictType.FULL_STATE_DICT, *_WHOLE):
        saved = FSDP.optim_state_dict(run._model, run.optimizer)
    with quiet(), FSDP.state_dict_type(other._model, StateDictType.FULL_STATE_DICT, *_WHOLE):
        other.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other._model, other.optimizer, saved))
    for each in (run, other):
        each.step(each.gradients(full(9)))
    mine, theirs = run.weights(), other.weights()
    return [*found, all(torch.equal(mine[name], theirs[name]) for name in SHAPES)]


def test_fsdp1_has_the_formula_and_resumes(world2: RankPool) -> None:
    assert world2.run(_under_fsdp1) == [[True] * 3] * 2


def _under_zero(row: str, dtype: torch.dtype, folder: str) -> list[bool]:
    start = {name: t.to(dtype) for name, t in full(0).items()}
    run = ZeroRun(row, start, make, dtype)
    found = _compared(run, start)
    run._engine.save_checkpoint(folder, tag="here")
    dist.barrier()
    other = ZeroRun(row, {name: torch.zeros_like(t) for name, t in start.items()}, make, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other._engine.load_checkpoint(folder, tag="here")
    for each in (run, other):
        each.step({name: g.to(dtype) for name, g in each.gradients(full(9)).items()})
    mine, theirs = run.weights(), other.weights()
    found.append(all(torch.equal(mine[name], theirs[name]) for name in SHAPES))
    for each in (run, other):
        each.close()
    return found


@pytest.mark.parametrize(("row", "dtype"), [("zero1", torch.float32), ("zero3", torch.bfloat16)])
def test_zero_has_the_formula_and_resumes(
    row: str, dtype: torch.dtype, deepspeed_pools: dict[int, RankPool], tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("deepspeed")
    assert deepspeed_pools[2].run(_under_zero, row, dtype, str(tmp_path)) == [[True] * 3] * 2


def _under_megatron() -> list[bool]:
    """bf16 weights, of which the distributed optimizer steps fp32 shards."""
    with megatron():
        from megatron.core import parallel_state

        ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dtype, sharded = half(torch.bfloat16), {"use_distributed_optimizer": True}
        model = gpt(0, ddp=sharded, calculate_per_token_loss=True, **dtype)
        config = optimizer_config(clip_grad=0.0, adam_beta1=0.83, adam_beta2=0.9, weight_decay=2.0, **sharded, **dtype)
        optimizer = get_megatron_optimizer(config, [model], adamw_lr=0.125, adamw="cautious")
        groups = {
            n: g for part in optimizer.chained_optimizers for g in part.optimizer.param_groups for n in g["param_names"]
        }
        params = {clean(name): p for name, p in model.named_parameters()}
        rest = {name: p for name, p in params.items() if not groups[name]["use_muon"]}
        formula = Formula(rest, groups.__getitem__)
        for step in range(STEPS):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            grads = {}
            for index, (name, p) in enumerate(params.items()):
                generator = torch.Generator().manual_seed(1000 * step + index)
                grads[name] = torch.randint(-16, 17, p.shape, generator=generator) / 8
                p.main_grad.copy_(grads[name] if ranks.rank() == 0 else torch.zeros_like(grads[name]))
            model.finish_grad_sync()
            optimizer.step()
            formula.step(grads)
        compared = 0
        for name, (start, stop), shard in shards_of(optimizer):
            if name in rest:
                formula.check(name, shard, slice(start, stop))
                compared += shard.numel()
        return [compared > 0, formula.decayed > 50, formula.spared > 50]


@needs_megatron
def test_megatrons_distributed_optimizer_has_the_formula(world2: RankPool) -> None:
    assert world2.run(_under_megatron) == [[True] * 3] * 2
