"""AdamW groups are torch.optim.AdamW: its bits, its state, its checkpoints; and its bits on shards, too."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.optim import lr_scheduler

from shardmuon import Muon, Storage
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, mesh_of
from shardmuon.testing.tolerances import assert_rounded, roundoff

SHAPES = ((9,), (1,), (33,), (7, 5), (2, 3, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def adamw_group(params: Iterable[Tensor], **options: Any) -> list[dict[str, Any]]:
    return [{"params": list(params), "use_muon": False, **OPTIONS, **options}]


def set_gradients(params: Sequence[Tensor], seed: int) -> None:
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=1000 * seed + i, dtype=p.dtype)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], seeds: Iterable[int]) -> None:
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def assert_equal(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {i} differs by {(a.double() - b.double()).abs().max():.2e}"


def states(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], key: str) -> list[Tensor]:
    return [optimizer.state[p][key] for p in params]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_has_torchs_bits(dtype: torch.dtype, deterministic: bool) -> None:
    """Its fused implementation; in deterministic mode its foreach one."""
    mine, theirs = parameters(dtype), parameters(dtype)
    ours = Muon(adamw_group(mine), lr=1e-3, deterministic=deterministic)
    torchs = torch.optim.AdamW(theirs, **OPTIONS, fused=not deterministic, foreach=deterministic)
    for seed in (1, 2, 3):
        for o, params in ((ours, mine), (torchs, theirs)):
            set_gradients(params, seed)
            if seed == 2:
                params[2].grad = None  # skipped, and its counter stands still
            o.step()
        assert_equal(mine, theirs)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_equal(states(ours, mine, key), states(torchs, theirs, key))
    assert [float(s) for s in states(ours, mine, "step")] == [3.0, 3.0, 2.0, 3.0, 3.0]
    for p, q in zip(mine, theirs, strict=True):
        assert list(ours.state[p]) == list(torchs.state[q])
        for key, value in torchs.state[q].items():
            found = ours.state[p][key]
            assert (found.dtype, found.shape, found.device) == (value.dtype, value.shape, value.device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("which", ["parameter", "gradient", "both"])
@pytest.mark.parametrize("how", ["transposed", "gaps", "expanded"])
def test_strides_change_nothing(how: str, which: str, deterministic: bool) -> None:
    """torch's fused kernel on CPUs ignores strides and pairs the wrong elements."""

    def lay(t: Tensor) -> Tensor:
        if how == "transposed":
            return t.T.contiguous().T
        if how == "gaps":
            return torch.stack([t, torch.full_like(t, 9.0)], dim=-1)[..., 0]
        return t[:, :1].expand(t.shape)

    start = normal(6, 4, seed=0)
    if how == "expanded" and which != "gradient":
        return  # such a parameter cannot be written to
    p = nn.Parameter(lay(start) if which != "gradient" else start.clone())
    q = nn.Parameter(start.clone())
    optimizer = Muon(adamw_group([p]), lr=1e-3, deterministic=deterministic)
    reference = torch.optim.AdamW([q], **OPTIONS, foreach=False)
    for seed in (1, 2):
        grad = normal(6, 4, seed=seed)
        p.grad = lay(grad) if which != "parameter" else grad
        q.grad = p.grad.contiguous()
        optimizer.step()
        reference.step()
    # two steps of ten operations (decay, moments, square root, eps, quotient, step) on either side, steps of size lr
    assert_rounded(p, q, roundings=2 * 2 * 10, scale=q.detach().abs() + 2 * OPTIONS["lr"])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("other", [{}, {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}])
def test_a_tensor_lr_is_a_number(other: dict[str, Any], deterministic: bool) -> None:
    mine, theirs = parameters(), parameters()
    lr = torch.tensor(0.25)
    ours = Muon(adamw_group(mine, **other, lr=lr), lr=1e-3, deterministic=deterministic)
    float_lr = Muon(adamw_group(theirs, **other, lr=0.25), lr=1e-3, deterministic=deterministic)
    for o, params in ((ours, mine), (float_lr, theirs)):
        run(o, params, [1, 2])
    assert_equal(mine, theirs)


def test_defaults_of_a_group() -> None:
    mine, theirs = parameters(), parameters()
    ours = Muon([{"params": mine, "use_muon": False}], lr=0.01, weight_decay=0.2)
    torchs = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2, fused=True)
    for o, params in ((ours, mine), (torchs, theirs)):
        run(o, params, [1, 2])
    assert_equal(mine, theirs)


def test_states_load_from_torch_optim_adamw_and_back() -> None:
    theirs, mine = parameters(), parameters()
    torchs = torch.optim.AdamW(theirs, **OPTIONS, fused=True)
    run(torchs, theirs, [1, 2])
    ours = Muon([{"params": mine, "use_muon": False}], lr=9.0)
    with torch.no_grad():
        for p, q in zip(mine, theirs, strict=True):
            p.copy_(q)
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert ours.param_groups[0]["use_muon"] is False
    for o, params in ((ours, mine), (torchs, theirs)):
        run(o, params, [3, 4])
    assert_equal(mine, theirs)
    back = [nn.Parameter(p.detach().clone()) for p in mine]
    again = torch.optim.AdamW(back, lr=9.0, fused=True)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    again.param_groups[0].update(fused=True, amsgrad=False, maximize=False, foreach=None, capturable=False)
    for o, params in ((ours, mine), (again, back)):
        run(o, params, [5])
    assert_equal(mine, back)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 6, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_adamw_groups(name: str) -> None:
    mine, theirs, matrix = parameters(), parameters(), nn.Parameter(normal(4, 4, seed=1))
    ours = Muon([{"params": [matrix]}, *adamw_group(mine)], lr=0.1)
    torchs = torch.optim.AdamW(theirs, **OPTIONS, fused=True)
    schedulers = [SCHEDULERS[name](o) for o in (ours, torchs)]
    seen = []
    for seed in range(5):
        seen.append(torchs.param_groups[0]["lr"])
        run(ours, [*mine, matrix], [seed])
        run(torchs, theirs, [seed])
        for scheduler in schedulers:
            scheduler.step()
    assert len(set(seen)) > 1
    assert_equal(mine, theirs)


# ------------------------------------------------------------------------------------------------------- on shards


def _build(layout: str, full: dict[str, Tensor]) -> dict[str, Tensor]:
    case = LAYOUTS[layout]
    return case.build(full, case.mesh(dist.get_world_size()))


def _sharded(layout: str, dtype: torch.dtype, deterministic: bool, adamw: str = "adamw") -> float:
    """Steps a sharded and a dense optimizer on equal gradients; returns the largest difference in any tensor."""
    shapes = {f"{i}": shape for i, shape in enumerate([*SHAPES, (1, 6), (64, 3)])}
    full = {n: normal(*s, seed=i, dtype=dtype) for i, (n, s) in enumerate(shapes.items())}
    params = {n: nn.Parameter(t) for n, t in _build(layout, full).items()}
    dense = {n: nn.Parameter(t.clone()) for n, t in full.items()}
    optimizer = Muon(adamw_group(params.values(), adamw=adamw), lr=1e-3, deterministic=deterministic)
    reference = Muon(adamw_group(dense.values(), adamw=adamw), lr=1e-3, deterministic=deterministic)
    worst = 0.0
    for seed in (1, 2, 3):
        grads = {n: normal(*s, seed=1000 * seed + i, dtype=dtype) for i, (n, s) in enumerate(shapes.items())}
        for n, g in _build(layout, grads).items():
            params[n].grad, dense[n].grad = g, grads[n]
        optimizer.step()
        reference.step()
        for key in ("weight", "exp_avg", "exp_avg_sq"):
            whole = {n: p.detach() if key == "weight" else reference.state[p][key] for n, p in dense.items()}
            for n, wanted in _build(layout, whole).items():
                p = params[n]
                found = p if key == "weight" else optimizer.state[p][key]
                assert isinstance(found, DTensor)
                assert (found.placements, found.shape, found.dtype) == (p.placements, p.shape, p.dtype)
                assert local(found).shape == local(wanted).shape
                if local(found).numel():
                    worst = max(worst, float((local(found).double() - local(wanted).double()).abs().max()))
    for p in params.values():
        assert not isinstance(optimizer.state[p]["step"], DTensor)
        assert float(optimizer.state[p]["step"]) == 3.0  # also where this rank holds nothing
    if layout == "fsdp2":
        assert any(local(p).numel() == 0 for p in params.values()) == (dist.get_rank() > 0)
    return worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "replicate"])
def test_shards_have_the_bits_of_one_process(layout: str, dtype: torch.dtype, world4: RankPool) -> None:
    assert world4.run(_sharded, layout, dtype, True) == [0.0] * 4


def test_the_fused_kernel_is_near(world4: RankPool) -> None:
    """It rounds exp_avg_sq differently in the vector body and in the tail of a tensor: one ulp."""
    found = world4.run(_sharded, "fsdp2", torch.float32, False)
    # three steps, of ten operations on either side; weights are below 8 and moments below them
    assert max(found) <= 3 * 2 * 10 * roundoff(torch.float32) * 8


def _partial_and_missing() -> None:
    """AdamW needs no other rank, so a gradient may be missing on some; unreduced ones are reduced."""
    mesh, full = mesh_of((2,)), normal(6, seed=0)
    p = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
    q = nn.Parameter(full.clone())
    optimizer = Muon(adamw_group([p]), lr=1e-3)
    reference = torch.optim.AdamW([q], **OPTIONS, foreach=True)
    q.grad = normal(6, seed=1)
    p.grad = DTensor.from_local(q.grad / 2, mesh, [Partial()], run_check=False)
    optimizer.step()
    reference.step()
    start = 3 * dist.get_rank()
    assert torch.equal(local(p), q.detach()[start : start + 3])
    before = local(p).clone()
    p.grad = None if dist.get_rank() == 0 else torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(before, local(p)) == (dist.get_rank() == 0)


def test_adamw_gradients_may_be_partial_or_missing_on_a_rank(world2: RankPool) -> None:
    world2.run(_partial_and_missing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_foreach_adamw_gives_an_element_the_same_bits_anywhere(dtype: torch.dtype) -> None:
    """What the test on shards rests on, for every offset in a vector register."""
    whole = [nn.Parameter(normal(101, seed=0, dtype=dtype))]
    run(Muon(adamw_group(whole), lr=1e-3), whole, [1, 2])
    for start, size in itertools.product(range(0, 40, 3), (1, 7, 16, 33, 61)):
        part = nn.Parameter(normal(101, seed=0, dtype=dtype)[start : start + size].clone())
        optimizer = Muon(adamw_group([part]), lr=1e-3)
        for seed in (1, 2):
            part.grad = normal(101, seed=1000 * seed, dtype=dtype)[start : start + size].clone()
            optimizer.step()
        assert_equal([part], [whole[0][start : start + size]])


# ----------------------------------------------------------------------- parameters that change their optimizer

MUON_STATE = {None: ["momentum_buffer"], "bf16": ["momentum_buffer", "step"]}
MUON_STATE["int8"] = ["momentum_buffer", "momentum_scale", "step"]
ADAMW_STATE = ["exp_avg", "exp_avg_sq", "step"]
STORED = {
    None: Storage(),
    "bf16": Storage(momentum_dtype=torch.bfloat16, stochastic_rounding=True),
    "int8": Storage(momentum_dtype="int8", stochastic_rounding=True),
}


def _switching(params: list[nn.Parameter], kind: str | None, use_muon: bool) -> Muon:
    halves: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "use_muon": use_muon, "eps": 1e-7}]
    return Muon(halves, lr=0.02, storage=STORED[kind])


def _switch(kind: str | None, to_adamw: bool, layout: str, reload: bool) -> list[bool]:
    """A group steps twice, changes its optimizer and steps twice more, as if it had been made then."""
    full = {name: normal(16, 256, seed=seed) for seed, name in enumerate("ab")}

    def build(whole: dict[str, Tensor]) -> list[Tensor]:
        return [t.detach() for t in (whole if layout == "plain" else _build(layout, whole)).values()]

    def gradients(params: Sequence[Tensor], seed: int) -> None:
        grads = build({name: normal(16, 256, seed=10 * seed + i) for i, name in enumerate("ab")})
        for p, g in zip(params, grads, strict=True):
            p.grad = g

    params = [nn.Parameter(t) for t in build(full)]
    optimizer = _switching(params, kind, use_muon=to_adamw)
    for seed in (1, 2):
        gradients(params, seed)
        optimizer.step()
    optimizer.param_groups[1]["use_muon"] = not to_adamw
    if reload:  # saved between the switch and the next step: nothing of the former optimizer is left
        saved = optimizer.state_dict()
        optimizer = _switching(params, kind, use_muon=not to_adamw)
        optimizer.load_state_dict(saved)
    other = [nn.Parameter(p.detach().clone()) for p in params]
    fresh = _switching(other, kind, use_muon=not to_adamw)
    for seed in (3, 4):
        gradients(params, seed)
        gradients(other, seed)
        optimizer.step()
        fresh.step()
    found = [sorted(optimizer.state[p]) for p in params]
    wanted = [MUON_STATE[kind], ADAMW_STATE if to_adamw else MUON_STATE[kind]]
    saved = optimizer.state_dict()["state"]
    return [
        torch.equal(local(params[1]), local(other[1])),
        found == wanted,
        [sorted(saved[key]) for key in (0, 1)] == wanted,
        all(
            torch.equal(local(optimizer.state[params[1]][key]), local(fresh.state[other[1]][key])) for key in wanted[1]
        ),
    ]


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("to_adamw", [True, False])
@pytest.mark.parametrize("kind", [None, "bf16", "int8"])
def test_a_group_that_changes_its_optimizer_starts_afresh(kind: str | None, to_adamw: bool, reload: bool) -> None:
    assert _switch(kind, to_adamw, "plain", reload) == [True] * 4


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("to_adamw", [True, False])
@pytest.mark.parametrize("kind", [None, "bf16", "int8"])
def test_ranks_change_a_groups_optimizer_together(
    kind: str | None, to_adamw: bool, reload: bool, world2: RankPool
) -> None:
    assert world2.run(_switch, kind, to_adamw, "fsdp2", reload) == [[True] * 4] * 2


# -------------------------------------------------------------------------------------------------- cautious decay


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_cautious_decay_is_the_formula(tensor_lr: bool, deterministic: bool) -> None:
    mine = parameters(torch.float64)
    lr: Any = torch.tensor(0.25, dtype=torch.float64) if tensor_lr else 0.25
    optimizer = Muon([{**adamw_group(mine, lr=lr)[0]}], lr=1e-3, adamw="cautious", deterministic=deterministic)
    assert optimizer.param_groups[0]["adamw"] == "cautious"
    whole = [p.detach().clone() for p in mine]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in whole]
    (beta1, beta2), eps, wd = OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"]
    for t in (1, 2, 3):
        run(optimizer, mine, [t])
        for p, w, (m, v) in zip(mine, whole, moments, strict=True):
            assert p.grad is not None
            m.mul_(beta1).add_(p.grad * (1 - beta1))
            v.mul_(beta2).add_(p.grad**2 * (1 - beta2))
            update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
            w.copy_(w - 0.25 * wd * w * (update * w > 0) - 0.25 * update)
    for p, w in zip(mine, whole, strict=True):
        # three steps of ten operations (decay, moments, square root, eps, quotient, step) on either side
        assert_rounded(p, w, roundings=3 * 2 * 10, scale=w.abs() + 3 * 0.25)


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "replicate"])
def test_cautious_shards_have_the_bits_of_one_process(layout: str, world4: RankPool) -> None:
    assert world4.run(_sharded, layout, torch.float32, True, "cautious") == [0.0] * 4


def test_adamw_must_be_a_known_kind() -> None:
    with pytest.raises(ValueError, match="adamw='lion' is not one of 'adamw', 'cautious'"):
        Muon(adamw_group(parameters(), adamw="lion"), lr=1e-3)


@pytest.mark.parametrize("place", ["group", "optimizer"])
def test_a_function_in_place_of_the_rule_is_refused(place: str) -> None:
    rule: dict[str, Any] = {"adamw": torch.optim.RMSprop}
    of_group, own = (rule, {}) if place == "group" else ({}, rule)
    says = "adamw=RMSprop is a function or a class, not one of 'adamw', 'cautious'. .* into an optimizer of your own"
    with pytest.raises(ValueError, match=says):
        Muon(adamw_group(parameters(), **of_group), lr=1e-3, **own)
