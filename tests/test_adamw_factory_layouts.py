"""adamw= a function, in a training loop on layouts: loss scaling, clipping, schedules, missing gradients, checkpoints.

Each is compared, bit for bit, with torch's optimizers alone, which step dense tensors in one process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_adamw_factory import Lion, local
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate
from torch.optim import lr_scheduler

import shardmuon.checkpoint
from shardmuon import GradScaler, Muon, clip_grad_norm_
from shardmuon.testing import RankPool
from shardmuon.testing.deepspeed import ZeroRun
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.tolerances import assert_bitwise

# Muon's, then AdamW's by `adamw`, then Lion's by `lion`. Nothing divides.
Shapes = Mapping[str, tuple[int, ...]]
SHAPES: Shapes = {"matrix": (6, 5), "embedding": (9, 4), "gain": (7,), "table": (5, 3), "scalar": (1,)}
GROUPS: Mapping[str, tuple[str, ...]] = {"adamw": ("embedding", "gain"), "lion": ("table", "scalar")}
OURS = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
REST = [name for names in GROUPS.values() for name in names]
MAX_NORM = 1.5


def adamw(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{key: group[key] for key in OURS}, foreach=True)


def lion(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return Lion(params, lr=group["lr"] / 4, weight_decay=group["weight_decay"] * 4)  # ratios that round nothing


def adamw_fused(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{key: group[key] for key in OURS}, fused=True)


def sgd_fused(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=group["lr"], momentum=0.9, weight_decay=0.1, fused=True)


FACTORIES = {"adamw": adamw, "lion": lion}


def eighths(seed: int, shapes: Shapes = SHAPES) -> dict[str, Tensor]:
    """Multiples of 1/8: sums of their squares, and means, are exact in any order."""
    drawn = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + i))
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {name: (4 * t).round() / 8 for name, t in drawn.items()}


def cut(layout: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    row = LAYOUTS[layout]
    return row.build(tensors, row.mesh(dist.get_world_size() if dist.is_initialized() else 1))


class Dense:
    """Whole tensors and torch's optimizers alone."""

    def __init__(self) -> None:
        self.params = {name: nn.Parameter(t) for name, t in eighths(0).items()}
        self.optimizers = [FACTORIES[key]([self.params[n] for n in names], dict(OURS)) for key, names in GROUPS.items()]

    def step(self, grads: Mapping[str, Tensor], missing: Iterable[str] = (), clip: bool = False) -> float:
        """Returns the norm of all gradients that are there, by which they are clipped."""
        there = {name: g for name, g in grads.items() if name not in missing}
        norm = torch.tensor(math.sqrt(sum(float(g.double().square().sum()) for g in there.values())))
        factor = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0) if clip else torch.tensor(1.0)
        for name in REST:
            self.params[name].grad = there[name] * factor if name in there else None
        for optimizer in self.optimizers:
            optimizer.step()
        return float(norm)

    def state(self) -> dict[str, dict[str, Any]]:
        return {n: o.state[self.params[n]] for n in REST for o in self.optimizers if self.params[n] in o.state}


class Bag(nn.Module):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


class Ours:
    """The same parameters in a layout, and Muon with a function for each group of the rest."""

    def __init__(self, layout: str, seed: int = 0) -> None:
        self.layout = layout
        self.model = Bag(cut(layout, eighths(seed)))
        self.params = dict(self.model.named_parameters())
        listed: list[dict[str, Any]] = [{"params": [self.params["matrix"]]}]
        for key, names in GROUPS.items():
            params = [self.params[name] for name in names]
            listed.append({"params": params, "use_muon": False, "adamw": FACTORIES[key], **OURS})
        options = LAYOUTS[layout].options(dist.get_world_size()) if dist.is_initialized() else {}
        self.optimizer = Muon(listed, lr=0.1, **options)

    def set_gradients(self, grads: Mapping[str, Tensor], missing: Iterable[str] = ()) -> None:
        for name, grad in cut(self.layout, grads).items():
            self.params[name].grad = None if name in missing else grad

    def snapshot(self) -> dict[str, Any]:
        """Weights, options and state, copied; Muon's too."""
        values = {name: {"weight": local(p).clone()} for name, p in self.params.items()}
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                values[name][key] = local(value).clone() if isinstance(value, Tensor) else value
        return values

    def check(self, dense: Dense) -> None:
        """Weights and state of the rest, against the elements that this rank has of the dense ones."""
        found, expected = self.snapshot(), {n: {"weight": self._part(n, dense.params[n])} for n in REST}
        for name, state in dense.state().items():
            for key, value in state.items():
                whole = value.shape == dense.params[name].shape and key != "step"
                expected[name][key] = self._part(name, value) if whole else value
        assert_bitwise({name: found[name] for name in REST}, expected, self.layout)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        zeros = {n: torch.zeros(shape) for n, shape in SHAPES.items()}  # builders go by position
        return local(cut(self.layout, {**zeros, name: whole.detach().clone()})[name])


# --------------------------------------------------------------------------------------------------- a training loop

Scheduled = Callable[[torch.optim.Optimizer, float], lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Scheduled] = {
    "LambdaLR": lambda optimizer, ratio: lr_scheduler.LambdaLR(
        optimizer, lambda step: [0.5, 1.0, 0.75, 0.3, 0.1][step]
    ),
    "OneCycleLR": lambda optimizer, ratio: lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.25 * ratio] * len(optimizer.param_groups), total_steps=6, cycle_momentum=False
    ),
}
MISSING: dict[int, tuple[str, ...]] = {1: ("gain",), 3: ("table", "embedding"), 5: tuple(GROUPS["lion"])}
INFINITE = {2: "embedding", 4: "matrix"}  # seed -> where one rank has an infinite element


def _loop(layout: str, schedule: str) -> list[float]:
    """Scaled, clipped and scheduled, with missing gradients, and steps that one rank alone has to skip."""
    ours, dense, scaler = Ours(layout), Dense(), GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    following = [SCHEDULES[schedule](ours.optimizer, 1.0)]
    following += [SCHEDULES[schedule](o, r) for o, r in zip(dense.optimizers, (1.0, 0.25), strict=True)]
    scales = []
    for seed in range(1, 7):
        grads, missing = eighths(seed), MISSING.get(seed, ())
        ours.set_gradients({name: g * scaler.get_scale() for name, g in grads.items()}, missing)
        if seed in INFINITE and dist.get_rank() == 1:
            local(ours.params[INFINITE[seed]].grad).view(-1)[-1] = math.inf
        before = ours.snapshot()
        scaler.unscale_(ours.optimizer)
        norm = float(clip_grad_norm_(ours.optimizer, MAX_NORM))
        scaler.step(ours.optimizer)
        scaler.update()
        ours.optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if seed in INFINITE:
            assert_bitwise(ours.snapshot(), before, f"{layout}, skipped")
        else:
            assert norm == dense.step(grads, missing, clip=True) > MAX_NORM
            for scheduler in following:
                scheduler.step()
        ours.check(dense)
    return scales


def _loops(layouts: Mapping[str, str]) -> list[list[float]]:
    return [_loop(layout, schedule) for layout, schedule in layouts.items()]


def test_a_training_loop_has_the_bits_of_torchs_optimizers_alone(world4: RankPool) -> None:
    """Where one rank finds an infinite gradient all skip, and no state of a made optimizer moves."""
    layouts = {"hsdp": "LambdaLR", "fsdp2+tp": "OneCycleLR", "mixed meshes": "LambdaLR", "ddp": "OneCycleLR"}
    scales = [1024.0, 512.0, 512.0, 256.0, 256.0, 256.0]
    assert world4.run(_loops, layouts) == [[scales] * len(layouts)] * 4


# ------------------------------------------------------------------------------------------------------ checkpoints


def _save_and_load(how: str, folder: str, old: Ours, new: Ours) -> None:
    if how == "ours":
        shardmuon.checkpoint.save(folder, old.model, old.optimizer)
        shardmuon.checkpoint.load(folder, new.model, new.optimizer)
        return
    for job, use in ((old, dcp.save), (new, dcp.load)):
        state = {
            "model": get_model_state_dict(job.model),
            "optimizer": get_optimizer_state_dict(job.model, job.optimizer),
        }
        use(state, checkpoint_id=folder)
    set_model_state_dict(new.model, state["model"])
    set_optimizer_state_dict(new.model, new.optimizer, state["optimizer"])


def _resumed(folder: str, how: str, late: tuple[str, ...], used: bool) -> None:
    """Two steps on HSDP, and two more on FSDP2 x TP, of one schedule.

    `late`: parameters whose first gradient comes after the checkpoint. `used`: the optimizer that loads it has stepped
    before, others than those.
    """
    old, dense, new = Ours("hsdp"), Dense(), Ours("fsdp2+tp", seed=9)
    if used:
        new.set_gradients(eighths(8), ("embedding", "table"))
        new.optimizer.step()
    schedule = SCHEDULES["LambdaLR"]
    whole = [schedule(o, 1.0) for o in dense.optimizers]
    before, after = schedule(old.optimizer, 1.0), schedule(new.optimizer, 1.0)
    for seed in (1, 2, 3, 4):
        job, scheduler = (old, before) if seed < 3 else (new, after)
        if seed == 3:
            _save_and_load(how, folder, old, new)
            after.load_state_dict(before.state_dict())
            new.check(dense)
        missing = late if seed < 3 else ()
        job.set_gradients(eighths(seed), missing)
        job.optimizer.step()
        job.optimizer.zero_grad()
        dense.step(eighths(seed), missing)
        for following in (scheduler, *whole):
            following.step()
        job.check(dense)


def _all_resumed(folder: str, how: str) -> None:
    for late in ((), ("gain", "scalar")):
        for used in (False, True):
            _resumed(f"{folder}/{len(late)} {used}", how, late, used)


@pytest.mark.parametrize("how", ["ours", "torch"])
def test_a_checkpoint_of_hsdp_goes_on_under_fsdp2_and_tensor_parallelism(
    how: str, world4: RankPool, tmp_path: Any
) -> None:
    """Also of parameters that have no state yet, on either side."""
    world4.run(_all_resumed, str(tmp_path), how)


class Rates(torch.optim.Optimizer):
    """Its state does not begin at zeros: the first gradient's sign is what every further step goes by."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sign = self.state[p].setdefault("sign", p.grad.sign() + group["lr"])
                    p.data.add_(sign, alpha=-group["lr"])


def rates(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return Rates(params, group["lr"])


def test_what_stands_in_for_state_is_in_state_dicts_alone() -> None:
    """Nothing else moves when one is asked for, and nobody takes it over."""
    jobs = []
    for start in (0, 9):
        params = [nn.Parameter(t) for t in eighths(start).values()]
        rest = {"params": params[1:], "use_muon": False, "adamw": rates, **OURS}
        jobs.append((Muon([{"params": params[:1]}, rest], lr=0.1), params))
    (old, params), (new, others) = jobs
    for p, grad in zip(params[:3], eighths(1).values(), strict=False):
        p.grad = grad
    old.step()
    before = [(p.detach().clone(), p.grad) for p in params]
    saved = old.state_dict()
    assert all(torch.equal(p, weight) and p.grad is grad for p, (weight, grad) in zip(params, before, strict=True))
    assert [float(saved["state"][i]["has_begun"]) for i in range(1, 5)] == [1.0, 1.0, 0.0, 0.0]
    assert [list(old.state.get(p, {})) for p in params[1:]] == [["sign"], ["sign"], [], []]
    new.load_state_dict(copy.deepcopy(saved))
    assert [list(new.state.get(p, {})) for p in others[1:]] == [["sign"], ["sign"], [], []]
    for p, q, grad in zip(params, others, eighths(2).values(), strict=True):
        q.data.copy_(p)
        p.grad, q.grad = grad, grad.clone()
    old.step()
    new.step()
    assert_bitwise([q.detach() for q in others], [p.detach() for p in params])
    signs = [(eighths(seed)[name].sign() + 0.03) for seed, name in ((1, "gain"), (2, "scalar"))]
    assert_bitwise([new.state[others[i]]["sign"] for i in (2, 4)], signs)


def test_load_foreign_takes_adamws_state_from_an_optimizer_that_a_function_made() -> None:
    def muon(**options: Any) -> tuple[Muon, dict[str, nn.Parameter]]:
        params = {name: nn.Parameter(t) for name, t in eighths(0).items()}
        rest = {"params": [(n, params[n]) for n in REST], "use_muon": False, **OURS}
        return Muon([{"params": [("matrix", params["matrix"])]}, rest], lr=0.1, **options), params

    (old, params), (new, others) = muon(adamw=adamw), muon()
    for name, grad in eighths(1).items():
        params[name].grad = None if name == "gain" else grad
    old.step()
    with pytest.raises(ValueError, match=r"^gain: no state for it \(1 such parameters\)"):
        shardmuon.checkpoint.load_foreign(new, old.state_dict())
    shardmuon.checkpoint.load_foreign(new, old.state_dict(), allow_missing=True)
    for name in REST:
        found, expected = new.state.get(others[name], {}), old.state.get(params[name], {})
        assert_bitwise(dict(sorted(found.items())), dict(sorted(expected.items())), name)


# ------------------------------------------------------------------------------------------------------ fused kernels


def _alone(factory: Any, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return factory([params[name] for name in REST], dict(OURS))


FUSED_SHAPES = {"matrix": (64, 64), "embedding": (128, 64), "gain": (256,), "table": (64, 64), "scalar": (256,)}


def _fused(layout: str, factory: Any) -> None:
    """Shards of whole vectors: torch's fused kernels round elements in the rest of a tensor in other places."""
    drawn = [eighths(seed, FUSED_SHAPES) for seed in range(4)]
    dense = {name: nn.Parameter(t.clone()) for name, t in drawn[0].items()}
    params = {name: nn.Parameter(t) for name, t in cut(layout, drawn[0]).items()}
    alone = _alone(factory, dense)
    rest = {"params": [params[name] for name in REST], "use_muon": False, "adamw": factory, **OURS}
    ours = Muon([{"params": [params["matrix"]]}, rest], lr=0.1)
    for grads in drawn[1:]:
        for name, grad in cut(layout, grads).items():
            params[name].grad = grad
            dense[name].grad = grads[name].clone()
        ours.step()
        alone.step()
    keys = list(alone.state[dense["gain"]])
    assert keys == list(ours.state[params["gain"]])
    for key in ("weight", *keys):
        whole = {n: p.detach() if key == "weight" else alone.state[p].get(key, p.detach()) for n, p in dense.items()}
        pieces = whole if key == "step" else cut(layout, whole)
        for name in REST:
            found = params[name] if key == "weight" else ours.state[params[name]][key]
            assert_bitwise(local(found), local(pieces[name]), f"{layout}: {key} of {name}")


@pytest.mark.parametrize("factory", [adamw_fused, sgd_fused])
def test_fused_kernels_have_torchs_bits_in_one_process(factory: Any) -> None:
    _fused("single", factory)


def _replicated_gradients() -> None:
    """Gradients that lie unlike their parameters are given on as these lie, and stay as they were."""
    ours, dense = Ours("hsdp"), Dense()
    for seed in (1, 2):
        ours.set_gradients(eighths(seed))
        given = {name: ours.params[name].grad.redistribute(placements=[Replicate()] * 2) for name in REST}  # type: ignore[union-attr]
        for name, grad in given.items():
            ours.params[name].grad = grad
        ours.optimizer.step()
        dense.step(eighths(seed))
        ours.check(dense)
        for name, grad in given.items():
            assert ours.params[name].grad is grad
            assert_bitwise(local(grad), eighths(seed)[name])


def test_replicated_gradients_of_shards(world4: RankPool) -> None:
    world4.run(_replicated_gradients)


def _fused_on_shards() -> str:
    for layout in ("hsdp", "fsdp2+tp"):
        _fused(layout, adamw_fused)
    with pytest.raises(NotImplementedError) as caught:
        _fused("hsdp", sgd_fused)
    return str(caught.value)


def test_fused_adamw_has_torchs_bits_on_shards_and_fused_sgd_is_what_torch_lacks(world4: RankPool) -> None:
    """Every rank hears of it."""
    for text in world4.run(_fused_on_shards):
        assert "_fused_sgd_" in text and "sharding strategy" in text


# --------------------------------------------------------------------------------------------------------- DeepSpeed


def _named(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> Muon:
    listed: list[dict[str, Any]] = [{"params": [("matrix", params["matrix"])]}]
    for key, names in GROUPS.items():
        named = [(name, params[name]) for name in names]
        listed.append({"params": named, "use_muon": False, "adamw": FACTORIES[key], **OURS})
    return Muon(listed, lr=0.1, **options)


def _stage_0() -> None:
    """The engine steps the parameters, or fp32 copies of bf16 ones."""
    for dtype in (torch.float32, torch.bfloat16):
        run, dense = ZeroRun("zero0", {n: t.to(dtype) for n, t in eighths(0).items()}, _named, dtype), Dense()
        for seed in (1, 2, 3):
            drawn = {name: grad.to(dtype) for name, grad in eighths(seed).items()}
            run.step(run.gradients(drawn))
            dense.step(run.gradients(drawn))
        found = run.weights()
        assert_bitwise({n: found[n] for n in REST}, {n: dense.params[n].detach() for n in REST}, f"{dtype}")
        stepped = [p for group in run.optimizer.param_groups[1:] for p in group["params"]]
        for name, p in zip(REST, stepped, strict=True):
            assert_bitwise(dict(run.optimizer.state[p]), dict(dense.state()[name]), f"{dtype}: {name}")
        run.close()


def test_deepspeed_without_zero_steps_them(deepspeed_pools: dict[int, RankPool]) -> None:
    pytest.importorskip("deepspeed")
    deepspeed_pools[2].run(_stage_0)


def test_flattened_state_dicts_begin_where_the_run_did() -> None:
    """SGD with dampening begins otherwise than from momentum of zeros."""

    def make() -> tuple[nn.Module, Muon]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
        return model, Muon(model, lr=0.1, adamw=lambda params, group: torch.optim.SGD(params, 0.1, 0.9, 0.5))

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    (model, optimizer), (other, fresh) = make(), make()
    late = model[1].bias
    for number in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + number) if p is not late else None
        optimizer.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=flat))
    get_optimizer_state_dict(other, fresh, options=flat)
    set_optimizer_state_dict(other, fresh, saved, options=flat)
    other.load_state_dict(model.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.grad, q.grad = torch.full_like(p, 3.0), torch.full_like(p, 3.0)
    optimizer.step()
    fresh.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == fresh.state[q].keys()


@pytest.mark.filterwarnings("ignore:param_groups. no parameter goes to Muon")
@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize("broken", [None, "a rank died"])
def test_an_optimizer_that_keeps_nothing_is_saved_and_loaded(matrix: bool, broken: str | None, tmp_path: Any) -> None:
    """Plain SGD: there may be no state at all. What loads may have broken off its first step."""

    def make() -> tuple[nn.Module, Muon]:
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)) if matrix else nn.Sequential(nn.LayerNorm(5))
        return model, Muon(model, lr=0.1, adamw=lambda params, group: torch.optim.SGD(params, group["lr"]))

    (old, optimizer), (new, fresh) = make(), make()
    for number in range(2):
        for p in old.parameters():
            p.grad = torch.full_like(p, 1.0 + number)
        optimizer.step()
    shardmuon.checkpoint.save(tmp_path, old, optimizer)
    fresh.broken = broken
    shardmuon.checkpoint.load(tmp_path, new, fresh)
    for p, q in zip(old.parameters(), new.parameters(), strict=True):
        p.grad, q.grad = torch.full_like(p, 3.0), torch.full_like(p, 3.0)
    optimizer.step()
    fresh.step()
    assert_bitwise([q.detach() for q in new.parameters()], [p.detach() for p in old.parameters()])
