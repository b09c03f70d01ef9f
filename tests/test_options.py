"""One process: the contract of torch.optim.Muon, every option against its formula, and every bad option's message."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim._muon import _zeropower_via_newtonschulz

from shardmuon import Exchange, Muon, Orthogonalizer, Storage, param_groups
from shardmuon.options import LR_SCALES
from shardmuon.step.update import decay_agreeing_
from shardmuon.testing.tolerances import assert_bitwise, assert_near, assert_rounded, polar_bound, roundoff

SHAPES = ((6, 9), (9, 6), (5, 5), (1, 7), (33, 4))
LIKE_TORCH: dict[str, Any] = {"orthogonalizer": Orthogonalizer(method="torch")}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrices(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def set_gradients(params: Iterable[Tensor], seed: int) -> None:
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=1000 * seed + i, dtype=p.dtype)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], seeds: Iterable[int]) -> None:
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


def assert_equal(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Bit for bit; in particular no NaN, which equals nothing."""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {i} differs by {(a.double() - b.double()).abs().max():.2e}"


# ------------------------------------------------------------------------------------- in place of torch.optim.Muon


def test_positional_arguments_are_torch_optim_muons() -> None:
    theirs = list(inspect.signature(torch.optim.Muon.__init__).parameters.values())
    ours = list(inspect.signature(Muon.__init__).parameters.values())
    for mine, wanted in zip(ours, theirs, strict=False):
        # None: the schedule's own steps, torch's 5 here; lr must be given
        default = None if wanted.name in ("lr", "ns_steps") else wanted.default
        assert (mine.name, mine.kind, mine.default) == (wanted.name, wanted.kind, default)
    assert len(ours) > len(theirs)
    *extra, for_module = ours[len(theirs) :]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in extra)
    assert for_module.kind is inspect.Parameter.VAR_KEYWORD
    assert issubclass(Muon, torch.optim.Optimizer)


@pytest.mark.stated
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize(
    ("dtype", "nesterov"),
    [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, True),  # False: torch.optim.Muon normalizes the momentum buffer in place, see the next test
        (torch.float16, True),
        (torch.float16, False),
        (torch.float64, True),
        (torch.float64, False),
    ],
)
def test_torchs_method_has_torchs_bits(dtype: torch.dtype, nesterov: bool, adjust: str | None) -> None:
    mine, theirs = matrices(dtype), matrices(dtype)
    options: dict[str, Any] = {"lr": 0.03, "nesterov": nesterov, "adjust_lr_fn": adjust, "weight_decay": 0.2}
    ours, torchs = Muon(mine, **LIKE_TORCH, **options), torch.optim.Muon(theirs, **options)
    for seed in (1, 2, 3):
        run(ours, mine, [seed])
        run(torchs, theirs, [seed])
        assert_equal(mine, theirs)
        assert_equal(
            [ours.state[p]["momentum_buffer"] for p in mine], [torchs.state[p]["momentum_buffer"] for p in theirs]
        )
    assert [set(s) for s in ours.state.values()] == [set(s) for s in torchs.state.values()]
    assert set(torchs.param_groups[0]) <= set(ours.param_groups[0])


LRS: dict[str, float | Tensor] = {
    "number": 1e-3,
    **{str(d): torch.tensor(1e-3, dtype=d) for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    "one dim": torch.tensor([1e-3]),
}


@pytest.mark.stated
@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_torchs_method_has_torchs_bits_with_any_tensor_lr(dtype: torch.dtype, decay: float, lr: str) -> None:
    """torch computes the factors of decay and update in the dtype of a tensor lr."""
    shapes = [(10, 5), (5, 10), (7, 7), (33, 65), (1, 9), (64, 128)]
    for adjust in ("original", "match_rms_adamw"):
        mine, theirs = matrices(dtype, shapes=shapes), matrices(dtype, shapes=shapes)
        options: dict[str, Any] = {"lr": LRS[lr], "weight_decay": decay, "adjust_lr_fn": adjust}
        ours, torchs = Muon(mine, **LIKE_TORCH, **options), torch.optim.Muon(theirs, **options)
        for seed in (1, 2, 3, 4):
            run(ours, mine, [seed])
            run(torchs, theirs, [seed])
            assert_equal(mine, theirs)


@pytest.mark.parametrize("method", ["standard", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_buffer_is_an_average_of_gradients_and_nothing_else(dtype: torch.dtype, method: Any) -> None:
    params = matrices(dtype)
    optimizer = Muon(params, lr=0.1, nesterov=False, orthogonalizer=Orthogonalizer(method=method))
    averages = [torch.zeros_like(p) for p in params]
    for seed in (1, 2, 3):
        run(optimizer, params, [seed])
        for average, p in zip(averages, params, strict=True):
            assert p.grad is not None
            average.lerp_(p.grad, 1 - 0.95)
        assert_equal([optimizer.state[p]["momentum_buffer"] for p in params], averages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_torch_optim_muon_load_here_and_ours_load_there(dtype: torch.dtype) -> None:
    theirs, mine = matrices(dtype), matrices(dtype)
    torchs = torch.optim.Muon(theirs, lr=0.05, momentum=0.9, weight_decay=0.3)
    run(torchs, theirs, [1, 2])
    ours = Muon(mine, lr=1e-3, **LIKE_TORCH)
    run(ours, mine, [7])  # must be forgotten
    with torch.no_grad():
        for p, q in zip(mine, theirs, strict=True):
            p.copy_(q)
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))  # loading shares tensors, by torch's own rule
    assert ours.param_groups[0]["momentum"] == 0.9
    for o, params in ((ours, mine), (torchs, theirs)):
        run(o, params, [3, 4])
    assert_equal(mine, theirs)
    back = matrices(dtype)
    with torch.no_grad():
        for p, q in zip(back, mine, strict=True):
            p.copy_(q)
    again = torch.optim.Muon(back, lr=9.0)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    for o, params in ((ours, mine), (again, back)):
        run(o, params, [5, 6])
    assert_equal(mine, back)


def test_a_state_dict_survives_a_file_and_names() -> None:
    params, fresh = matrices(), matrices()
    names = [f"layer.{i}" for i in range(len(params))]
    ours = Muon(zip(names, params, strict=True), lr=0.1)
    run(ours, params, [1, 2])
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["param_groups"][0]["param_names"] == names
    with torch.no_grad():
        for p, q in zip(fresh, params, strict=True):
            p.copy_(q)
    other = Muon(zip(names, fresh, strict=True), lr=7.0)
    other.load_state_dict(saved)
    for o, ps in ((ours, params), (other, fresh)):
        run(o, ps, [3])
    assert_equal(fresh, params)


def test_a_checkpoint_without_our_options_leaves_those_of_the_group() -> None:
    """Defaults would undo heads, views and AdamW groups in silence."""
    shapes = ((8, 6), (6, 6), (4, 6, 5))
    theirs, mine = matrices(shapes=shapes[:2]), matrices(shapes=shapes[:2])
    torchs = torch.optim.Muon([{"params": [theirs[0]]}, {"params": [theirs[1]]}], lr=0.1)
    run(torchs, theirs, [1])
    ours = Muon(
        [{"params": [mine[0]], "num_heads": 4}, {"params": [mine[1]], "use_muon": False, "betas": (0.5, 0.6)}], lr=9.0
    )
    saved = torchs.state_dict()
    with pytest.raises(ValueError, match="parameter 0 of group 1: its state in the checkpoint is"):
        ours.load_state_dict(saved)
    saved["state"][1] = {}  # on purpose: AdamW has no use for Muon's momentum, and starts afresh
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["num_heads"] == 4
    assert ours.param_groups[1]["use_muon"] is False
    assert ours.param_groups[1]["betas"] == (0.5, 0.6)
    assert [g["lr"] for g in ours.param_groups] == [0.1, 0.1]
    run(ours, mine, [2])
    assert "exp_avg" in ours.state[mine[1]]
    assert len(ours.plan.items) == 4


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "CyclicLR without momentum": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 3),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_torch_optim_muon(name: str, tensor_lr: bool) -> None:
    """Momentum included: CyclicLR and OneCycleLR cycle it. torch computes 1 - lr * decay in fp32 if lr is a tensor."""
    weights, seen = [], []
    for make, options in ((Muon, LIKE_TORCH), (torch.optim.Muon, {})):
        params = matrices()
        optimizer = make(params, lr=torch.tensor(0.05) if tensor_lr else 0.05, **options)
        scheduler = SCHEDULERS[name](optimizer)
        values = []
        for seed in range(6):
            values.append((float(optimizer.param_groups[0]["lr"]), float(optimizer.param_groups[0]["momentum"])))
            run(optimizer, params, [seed])
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        weights.append(params)
        seen.append(values)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 1, "the scheduler did nothing"
    if not tensor_lr:
        assert_equal(*weights)
    for a, b in zip(*weights, strict=True):
        # updates have the same bits; each of 6 steps rounds decay, product and difference once more on either side
        assert_rounded(a, b, roundings=2 * 6 * 4, scale=b.abs().max())


def test_a_tensor_lr_is_read_at_every_step() -> None:
    mine, wanted = matrices(), matrices()
    lr = torch.tensor(0.1)
    ours, other = Muon(mine, lr=lr), Muon(wanted, lr=0.1)
    for value in (0.1, 0.02):
        lr.fill_(value)
        other.param_groups[0]["lr"] = float(lr)
        run(ours, mine, [1])
        run(other, wanted, [1])
    assert_equal(mine, wanted)
    assert_rounded(lr, torch.tensor(0.02), roundings=1)


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    mine, wanted = matrices()[:1], matrices()[:1]
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        mine[0].grad = None
        loss = mine[0].square().sum()
        loss.backward()
        return loss

    before = mine[0].detach().square().sum()
    ours = Muon(mine, lr=0.1)
    loss = ours.step(closure)
    assert calls == [True]
    assert torch.equal(torch.as_tensor(loss), before)
    wanted[0].grad = 2 * wanted[0].detach()
    other = Muon(wanted, lr=0.1)
    assert other.step() is None
    assert_equal(mine, wanted)
    with torch.no_grad():
        ours.step(closure)
        assert not torch.is_grad_enabled()
    assert calls == [True, True]


def test_hooks_run() -> None:
    params = matrices()
    optimizer = Muon(params, lr=0.1)
    set_gradients(params, 1)
    start = [p.detach().clone() for p in params]
    log: list[str] = []

    def before(o: Any, args: Any, kwargs: Any) -> None:
        assert o is optimizer
        assert_equal(params, start)
        log.append("pre")

    def after(o: Any, args: Any, kwargs: Any) -> None:
        assert not torch.equal(params[0], start[0])
        log.append("post")

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert log == ["pre", "post"]
    optimizer.register_state_dict_pre_hook(lambda o: log.append("saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda o: log.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert log[2:] == ["saving", "loaded"]


def test_zero_grad() -> None:
    params = matrices()
    optimizer = Muon(params, lr=1e-3)
    set_gradients(params, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def _copied(pair: Any) -> Any:
    return copy.deepcopy(pair)


def _pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("again", [_copied, _pickled])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_copy_continues_bit_for_bit_and_on_its_own(again: Callable[[Any], Any], steps_before: int) -> None:
    params = [*matrices(), nn.Parameter(normal(7, seed=9))]
    optimizer = Muon(
        [{"params": params[:-1]}, {"params": params[-1:], "use_muon": False, "lr": 0.5}],
        lr=0.1,
        orthogonalizer=Orthogonalizer(method="torch"),
        exchange=Exchange(dtype=torch.float32, bucket_bytes=64, route="local"),
    )
    run(optimizer, params, range(steps_before))
    copied_params, copied = again((params, optimizer))
    assert copied.config == optimizer.config
    before = [p.detach().clone() for p in params]
    run(copied, copied_params, [5, 6])
    assert_equal(params, before)
    run(optimizer, params, [5, 6])
    assert_equal(copied_params, params)
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_module_is_routed_to_muon_and_adamw() -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
    optimizer = Muon(model, lr=0.1, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    names = {id(p): n for n, p in model.named_parameters()}
    by_muon = {names[id(p)] for p, state in optimizer.state.items() if "momentum_buffer" in state}
    by_adamw = {names[id(p)] for p, state in optimizer.state.items() if "exp_avg" in state}
    assert "1.weight" in by_muon
    assert {"0.weight", "1.bias", "3.bias"} <= by_adamw
    assert by_muon.isdisjoint(by_adamw)
    assert by_muon | by_adamw == set(names.values())


# ---------------------------------------------------------------------------------------------- what is computed

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda r, c: math.sqrt(max(1.0, r / c)),
    "match_rms_adamw": lambda r, c: 0.2 * math.sqrt(max(r, c)),
    "spectral": lambda r, c: math.sqrt(max(r, c)),
    "unit_rms_norm": lambda r, c: math.sqrt(r / c),
    "none": lambda r, c: 1.0,
}


def recovered(adjust: Any, shape: tuple[int, int], **options: Any) -> Tensor:
    """Scaled orthogonal factor of one step, in fp64: (before - after) / lr."""
    p = nn.Parameter(normal(*shape).double())
    before = p.detach().clone()
    optimizer = Muon([p], lr=0.5, weight_decay=0.0, adjust_lr_fn=adjust, **options)
    p.grad = normal(*shape, seed=1).double()
    optimizer.step()
    return (before - p.detach()) / 0.5


def near_scaled(found: Tensor, plain: Tensor, scale: float) -> None:
    """Tolerance for the same orthogonalization: each side stores a weight of up to 4 (normal ones here) and takes the
    difference from it, divided by a lr of 1/2; the scale's formula, with lr, is six operations beside."""
    stored = 2 * (4.0 + 0.5 * float(found.abs().max())) / 0.5
    assert_rounded(found, plain * scale, roundings=6, scale=found.abs() + (1.0 + scale) * stored)


@pytest.mark.parametrize("shape", [(4, 10), (10, 4), (3, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("name", [None, *LR_SCALES])
def test_every_lr_scale_is_its_formula(name: str | None, shape: tuple[int, int]) -> None:
    plain = recovered("none", shape)
    assert plain.any()
    scale = SCALES[name or "original"](*shape)
    near_scaled(recovered(name, shape), plain, scale)
    near_scaled(recovered(name, shape, extra_scale_factor=2.5), plain, 2.5 * scale)


def test_every_lr_scale_has_a_formula_here() -> None:
    assert SCALES.keys() == LR_SCALES.keys()


def test_a_callable_scale_gets_rows_and_columns_of_each_matrix() -> None:
    seen = []

    def scale(rows: int, cols: int) -> float:
        seen.append((rows, cols))
        return 3.0

    plain = recovered("none", (4, 10))
    near_scaled(recovered(scale, (4, 10)), plain, 3.0)
    assert set(seen) == {(4, 10)}
    seen.clear()
    p = nn.Parameter(normal(10, 4))
    optimizer = Muon([{"params": [p], "split_sizes": (7, 3)}], lr=1e-3, adjust_lr_fn=scale)
    run(optimizer, [p], [1])
    assert set(seen) == {(7, 4), (3, 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["decoupled", "l2", "independent", "cautious"])
def test_every_weight_decay_is_its_formula(mode: Any, dtype: torch.dtype) -> None:
    """Written out with torch.optim.Muon's own Newton-Schulz. Half precision: in fp32, rounded once."""
    lr, decay, momentum = 0.1, 0.25, 0.9
    shape = (9, 6)
    p = nn.Parameter(normal(*shape, dtype=dtype))
    optimizer = Muon(
        [p],
        lr,
        decay,
        momentum,
        weight_decay_mode=mode,
        adjust_lr_fn="none",
        orthogonalizer=Orthogonalizer(method="torch"),
    )
    weight, buffer = p.detach().clone(), torch.zeros(shape, dtype=dtype)
    for seed in (1, 2, 3):
        run(optimizer, [p], [seed])
        grad = normal(*shape, seed=1000 * seed, dtype=dtype)
        if mode == "l2":
            grad = (grad.float() + decay * weight.float()).to(dtype)
        buffer.lerp_(grad, 1 - momentum)
        update = _zeropower_via_newtonschulz(grad.lerp(buffer, momentum), (3.4445, -4.7750, 2.0315), 5, 1e-7)
        if mode == "decoupled":  # torch.optim.Muon's own, in place and in the weight's dtype
            weight.mul_(1 - lr * decay).add_(update, alpha=-lr)
        else:
            new = weight.float()
            if mode == "independent":
                new = new * (1 - decay)
            if mode == "cautious":
                new = torch.where(update.float() * new > 0, new * (1 - lr * decay), new)
            weight = new.add(update.float(), alpha=-lr).to(dtype)
        assert_equal([p.detach(), optimizer.state[p]["momentum_buffer"]], [weight, buffer])


@pytest.mark.parametrize("factor", [1.0, 0.999, 0.5, 0.25, torch.tensor(0.999)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cautious_decay_has_the_bits_of_a_choice(dtype: torch.dtype, factor: float | Tensor) -> None:
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 1.0])
    ordinary = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    pairs = torch.cartesian_prod(special, special).T  # each weight with each agreement
    weight, agreement = (torch.cat([part, ordinary.roll(i)]).to(dtype) for i, part in enumerate(pairs))
    expected = torch.where(agreement > 0, weight * factor, weight)
    decay_agreeing_(weight, agreement, factor)
    assert_bitwise(weight, expected)


def test_cautious_decay_touches_some_weights_and_spares_others() -> None:
    p, q = (nn.Parameter(normal(6, 6)) for _ in range(2))
    start = p.detach().clone()
    for x, decay in ((p, 0.5), (q, 0.0)):
        optimizer = Muon([x], lr=0.1, weight_decay=decay, weight_decay_mode="cautious")
        run(optimizer, [x], [1])
    decayed = (p != q).detach()
    update = (start - q.detach()) / 0.1
    assert torch.equal(decayed, update * start > 0)
    assert 0 < int(decayed.sum()) < 36


@pytest.mark.parametrize(
    ("group", "shape", "rows"),
    [
        ({"num_heads": 3}, (12, 5), [range(4), range(4, 8), range(8, 12)]),
        ({"split_sizes": (6, 3, 3)}, (12, 5), [range(6), range(6, 9), range(9, 12)]),
        (
            {"split_sizes": (4, 1, 1), "split_groups": 2},
            (12, 5),
            [[0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11]],
        ),
        ({"view": "stack"}, (3, 4, 5), [range(4), range(4, 8), range(8, 12)]),
        ({"view": "stack", "num_heads": 2}, (2, 6, 5), [range(3), range(3, 6), range(6, 9), range(9, 12)]),
        (
            {"view": "stack", "split_sizes": (1, 2), "split_groups": 2},
            (2, 6, 5),
            [[0, 3], [1, 2, 4, 5], [6, 9], [7, 8, 10, 11]],
        ),
        ({"view": "flatten"}, (12, 5, 2), [range(12)]),
        ({}, (12, 5, 3, 2), [range(12)]),
        ({}, (12, 2, 3, 1, 2), [range(12)]),
        ({"split_sizes": (4, 8)}, (12, 5, 3, 2), [range(4), range(4, 12)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_is_as_good_as_separate_matrices(
    group: dict[str, Any], shape: tuple[int, ...], rows: list[Sequence[int]], dtype: torch.dtype
) -> None:
    """torch.optim.Muon on each block as a parameter of its own, bit for bit; each block has its own lr scale."""
    cols = math.prod(shape[1:]) if group.get("view") != "stack" else shape[2]

    def blocks(t: Tensor) -> list[Tensor]:
        return [t.reshape(-1, cols)[list(block)].clone() for block in rows]

    p = nn.Parameter(normal(*shape, dtype=dtype))
    separate = [nn.Parameter(b) for b in blocks(p.detach())]
    options: dict[str, Any] = {"lr": 0.07, "weight_decay": 0.3, "adjust_lr_fn": "original"}
    ours = Muon([{"params": [p], **group}], **LIKE_TORCH, **options)
    theirs = torch.optim.Muon(separate, **options)
    for seed in (1, 2):
        p.grad = normal(*shape, seed=seed, dtype=dtype)
        for q, g in zip(separate, blocks(p.grad), strict=True):
            q.grad = g
        ours.step()
        theirs.step()
        assert_equal(blocks(p.detach()), separate)
        buffers = [theirs.state[q]["momentum_buffer"] for q in separate]
        assert_equal(blocks(ours.state[p]["momentum_buffer"]), buffers)


def _strided(t: Tensor, how: str) -> Tensor:
    """The same values, laid out otherwise in memory."""
    if how == "transposed":
        return t.T.contiguous().T
    if how == "gaps":
        return torch.stack([t, torch.full_like(t, 7.0)], dim=-1)[..., 0]
    return torch.cat([torch.zeros_like(t), t])[len(t) :]  # an offset


@pytest.mark.parametrize("method", ["standard", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["transposed", "gaps", "offset"])
@pytest.mark.parametrize("which", ["parameter", "gradient", "both"])
def test_memory_layout_changes_no_bit(which: str, how: str, dtype: torch.dtype, method: Any) -> None:
    mine, wanted = matrices(dtype), matrices(dtype)
    if which != "gradient":
        mine = [nn.Parameter(_strided(p.detach(), how)) for p in mine]
    ours, other = (Muon(ps, lr=0.1, orthogonalizer=Orthogonalizer(method=method)) for ps in (mine, wanted))
    for seed in (1, 2, 3):
        set_gradients(wanted, seed)
        for p, q in zip(mine, wanted, strict=True):
            assert q.grad is not None
            p.grad = _strided(q.grad, how) if which != "parameter" else q.grad.clone()
        ours.step()
        other.step()
        assert_equal(mine, wanted)


def test_fp64_stays_fp64_where_it_is_asked_for() -> None:
    p = nn.Parameter(normal(6, 9).double())
    optimizer = Muon(
        [p],
        lr=1.0,
        weight_decay=0.0,
        orthogonalizer=Orthogonalizer(method="reference"),
        exchange=Exchange(dtype=torch.float64),
        adjust_lr_fn="none",
    )
    before, grad = p.detach().clone(), normal(6, 9, seed=1).double()
    p.grad = grad
    optimizer.step()
    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    polar = u @ vh
    bound = 2 * polar_bound(grad) + 2 * roundoff(torch.float64) * float(before.norm() + polar.norm())
    assert_near(before - p.detach(), polar, bound / float(polar.norm()))
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float64


def _every_kind() -> list[dict[str, Any]]:
    return [
        {"params": matrices()},
        {"params": matrices(torch.bfloat16)},
        {"params": [nn.Parameter(normal(2, 3, 4))], "view": "stack"},
        {"params": [nn.Parameter(normal(5)), nn.Parameter(normal(4, 4))], "use_muon": False},
    ]


@pytest.mark.parametrize("method", ["standard", "gram", "torch", "reference"])
def test_zero_gradients_and_lr_create_state_and_change_nothing(method: Any) -> None:
    """Step on zeros, as torch's checkpoint code does before loading (`_init_optim_state`)."""
    groups = _every_kind()
    params = [p for g in groups for p in g["params"]]
    optimizer = Muon(groups, lr=0.0, orthogonalizer=Orthogonalizer(method=method))
    for p in params:
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert_equal(params, before)
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            assert set(state) == ({"momentum_buffer"} if group["use_muon"] else {"step", "exp_avg", "exp_avg_sq"})
            assert all(not t.any() for key, t in state.items() if key != "step")


@pytest.mark.parametrize("method", ["standard", "gram", "torch", "reference"])
def test_a_zero_gradient_gives_a_zero_update(method: Any) -> None:
    params = matrices()
    optimizer = Muon(params, lr=0.1, weight_decay=0.0, orthogonalizer=Orthogonalizer(method=method))
    for p in params:
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert_equal(params, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["standard", "gram", "torch"])
def test_a_bad_gradient_stays_in_its_own_matrix(method: Any, bad: float) -> None:
    shapes = [(4, 12)] * 3 + [(12, 4)]
    mine, wanted = matrices(shapes=shapes), matrices(shapes=shapes)
    stack, wanted_stack = nn.Parameter(normal(3, 4, 12)), nn.Parameter(normal(3, 4, 12))
    for params, one_bad in ((mine, True), (wanted, False)):
        extra = stack if one_bad else wanted_stack
        optimizer = Muon(
            [{"params": params}, {"params": [extra], "view": "stack"}],
            lr=0.1,
            orthogonalizer=Orthogonalizer(method=method),
        )
        set_gradients([*params, extra], 1)
        if one_bad:
            assert params[1].grad is not None
            assert extra.grad is not None
            params[1].grad[2, 3] = bad
            extra.grad[0, 1, 1] = bad
        optimizer.step()
    assert not mine[1].isfinite().any()
    assert not stack[0].isfinite().any()
    assert_equal([*mine[:1], *mine[2:], stack[1:]], [*wanted[:1], *wanted[2:], wanted_stack[1:]])


@pytest.mark.parametrize("mode", ["decoupled", "l2"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("method", ["standard", "gram", "torch", "reference"])
def test_nothing_is_written_into_gradients(method: Any, nesterov: bool, mode: Any) -> None:
    groups = _every_kind()
    params = [p for g in groups for p in g["params"]]
    optimizer = Muon(
        groups, lr=0.1, nesterov=nesterov, orthogonalizer=Orthogonalizer(method=method), weight_decay_mode=mode
    )
    for seed in (1, 2):
        set_gradients(params, seed)
        given = [p.grad for p in params]
        before = [g.clone() for g in given if g is not None]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(params, given, strict=True))
        assert_equal([g for g in given if g is not None], before)


def test_frozen_parameters_are_left_alone_until_they_get_a_gradient() -> None:
    """A gradient counts, requires_grad does not, as in torch.optim."""
    mine, theirs = matrices(), matrices()
    ours, torchs = Muon(mine, lr=0.1, **LIKE_TORCH), torch.optim.Muon(theirs, lr=0.1)
    for params in (mine, theirs):
        params[1].requires_grad_(False)
    start = mine[1].detach().clone()
    for o, params in ((ours, mine), (torchs, theirs)):
        run(o, [params[0], *params[2:]], [1, 2])
    assert torch.equal(mine[1], start)
    assert mine[1] not in ours.state
    for o, params in ((ours, mine), (torchs, theirs)):
        run(o, params, [3])
    assert not torch.equal(mine[1], start)
    assert_equal(mine, theirs)


@pytest.mark.parametrize("power", [-100, 100])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["standard", "gram", "reference"])
def test_the_scale_of_gradients_changes_no_bit(method: Any, wire: torch.dtype, power: int) -> None:
    """2 ** 100 is 1.3e30. Products of such numbers overflow or vanish in fp32."""
    updates = []
    for factor in (1.0, 2.0**power):
        params = matrices()
        optimizer = Muon(
            params,
            lr=0.1,
            orthogonalizer=Orthogonalizer(method=method),
            exchange=Exchange(dtype=wire),
        )
        for seed in (1, 2):
            set_gradients(params, seed)
            for p in params:
                assert p.grad is not None
                p.grad.mul_(factor)
            optimizer.step()
        updates.append([p.detach() for p in params])
    if method == "reference":  # a library's SVD, in fp64
        # a power of two changes nothing before it; of its result, rounded to the wire's dtype, a bit at most, and each
        # of two steps of lr 0.1 brings 0.1 times that into the weights
        for a, b in zip(*updates, strict=True):
            scale = math.sqrt(max(1.0, a.shape[0] / a.shape[1]))
            flipped = 2 * 2 * roundoff(wire) * 0.1 * scale
            assert_rounded(a, b, roundings=2 * 2 * 3, scale=b.abs().max() + flipped / roundoff(torch.float32))
    else:
        assert_equal(*updates)


@pytest.mark.parametrize("method", ["standard", "gram", "torch"])
def test_what_is_set_around_a_step_changes_no_bit(method: Any) -> None:
    """Autocast, default dtype and device, deterministic algorithms: all of these belong to the model."""
    outcomes = []
    for setting in ("none", "autocast", "dtype", "device", "algorithms"):
        params = [*matrices(), nn.Parameter(normal(7, seed=9))]
        optimizer = Muon(
            [{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}],
            lr=1e-3,
            orthogonalizer=Orthogonalizer(method=method),
        )
        try:
            for seed in (1, 2):
                set_gradients(params, seed)
                if setting == "dtype":
                    torch.set_default_dtype(torch.float64)
                if setting == "device":
                    torch.set_default_device("meta")  # what is not put on a device by name has no data
                torch.use_deterministic_algorithms(setting == "algorithms")
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting == "autocast"):
                    optimizer.step()
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
            torch.use_deterministic_algorithms(False)
        assert all(not t.is_meta for state in optimizer.state.values() for t in state.values())
        outcomes.append(params)
    for other in outcomes[1:]:
        assert_equal(other, outcomes[0])


# -------------------------------------------------------------------------------- options that change on the way


def test_options_of_a_group_may_change_between_steps() -> None:
    """Two groups of one shape run as one batch, until they differ: batches of other sizes round alike."""
    mine, fresh = matrices(shapes=[(6, 9)] * 2), matrices(shapes=[(6, 9)] * 2)
    ours = Muon([{"params": mine[:1]}, {"params": mine[1:]}], lr=0.1)
    run(ours, mine, [1])
    ours.param_groups[1].update(ns_steps=1, num_heads=2, lr=0.5, momentum=0.5, nesterov=False)
    run(ours, mine, [2])
    first = Muon([{"params": fresh[:1]}, {"params": fresh[1:]}], lr=0.1)
    run(first, fresh, [1])
    second = Muon(
        [
            {"params": fresh[:1]},
            {"params": fresh[1:], "ns_steps": 1, "num_heads": 2, "lr": 0.5, "momentum": 0.5, "nesterov": False},
        ],
        lr=0.1,
    )
    second.state.update(first.state)
    run(second, fresh, [2])
    assert_equal(mine, fresh)


def test_a_group_may_go_to_adamw_and_back() -> None:
    params = matrices()
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    run(optimizer, params, [1])
    optimizer.param_groups[1]["use_muon"] = False
    other = [nn.Parameter(p.detach().clone()) for p in params[2:]]
    adamw = torch.optim.AdamW(other, lr=0.1, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    set_gradients(params, 2)
    for p, q in zip(params[2:], other, strict=True):
        q.grad = p.grad
    optimizer.step()
    adamw.step()
    for p, q in zip(params[2:], other, strict=True):
        # from equal weights and no state: decay, moments, square root, eps, quotient, step: ten operations on each side
        assert_rounded(p, q, roundings=2 * 10, scale=q.abs() + 0.1)
    optimizer.param_groups[1]["use_muon"] = True
    before = params[2].detach().clone()
    run(optimizer, params, [3])
    assert len(optimizer.plan.specs) == len(params)
    assert not torch.equal(before, params[2])


@pytest.mark.parametrize(
    ("group", "change", "says"),
    [
        (0, {"lr": -1.0}, "lr=-1.0 must be finite and at least 0"),
        (0, {"lr": None}, "lr=None must be a number"),
        (0, {"ns_steps": 0}, "ns_steps=0 must be a whole number between 1 and 99"),
        (0, {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients=(1.0, 2.0) must be the name of a schedule"),
        (0, {"weight_decay_mode": "none"}, "weight_decay_mode='none' is not one of 'decoupled'"),
        (1, {"weight_decay_mode": "none"}, "group 1: weight_decay_mode='none' is not one of 'decoupled'"),
        (0, {"num_heads": 4}, "parameter 0 of group 0: num_heads=4 does not divide the 6 rows"),
        (0, {"adjust_lr_fn": lambda rows, cols: 1 / 0}, "adjust_lr_fn(6, 9) raised ZeroDivisionError"),
        (0, {"adjust_lr_fn": lambda rows, cols: math.inf}, "adjust_lr_fn(6, 9) returned inf, which is not finite"),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_bad_options_set_later_change_nothing(group: int, change: dict[str, Any], says: str, steps_before: int) -> None:
    params = [*matrices(), nn.Parameter(normal(4))]
    optimizer = Muon([{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}], lr=0.1)
    run(optimizer, params, range(steps_before))
    set_gradients(params, 5)
    before = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[group].update(change)
    with pytest.raises(ValueError, match=re.escape(says)):
        optimizer.step()
    assert_equal(params, before)
    after = optimizer.state_dict()["state"]
    assert after.keys() == state.keys()
    for key, values in state.items():
        assert_equal(after[key].values(), values.values())


# --------------------------------------------------------------------------------------------------- bad options

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, "lr=-0.1 must be finite and at least 0"),
    ({"lr": math.nan}, "lr=nan must be finite"),
    ({"lr": math.inf}, "lr=inf must be finite"),
    ({"lr": "fast"}, "lr='fast' is text, not a number"),
    ({"lr": "1e-3"}, "lr='1e-3' is text, not a number. Write lr=1e-3 without quotes"),
    ({"lr": torch.ones(2)}, "a tensor lr must have one element, found shape (2,)"),
    ({"lr": torch.tensor(-1.0)}, "lr=-1.0 must be finite"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0 must be finite and at least 0"),
    ({"weight_decay": math.nan}, "weight_decay=nan must be finite"),
    ({"weight_decay": "0.1"}, "weight_decay='0.1' is text, not a number. Write weight_decay=0.1 without quotes"),
    ({"momentum": "0.9"}, "momentum='0.9' is text, not a number"),
    ({"eps": "1e-7"}, "eps='1e-7' is text, not a number"),
    ({"extra_scale_factor": "1"}, "extra_scale_factor='1' is text, not a number"),
    ({"momentum": -0.1}, "momentum=-0.1 must be finite and at least 0"),
    ({"momentum": 1.5}, "momentum=1.5 must be at most 1"),
    ({"momentum": None}, "momentum=None must be a number"),
    ({"eps": -1e-8}, "eps=-1e-08 must be finite and at least 0"),
    ({"extra_scale_factor": math.inf}, "extra_scale_factor=inf must be finite"),
    ({"ns_steps": 0}, "ns_steps=0 must be a whole number between 1 and 99"),
    ({"ns_steps": 100}, "ns_steps=100 must be a whole number between 1 and 99"),
    ({"ns_steps": 2.5}, "ns_steps=2.5 must be a whole number between 1 and 99"),
    (
        {"ns_coefficients": (1.0, 2.0)},
        "ns_coefficients=(1.0, 2.0) must be the name of a schedule, (a, b, c) or one (a, b, c) per step",
    ),
    ({"ns_coefficients": ()}, "ns_coefficients=() must be the name of a schedule"),
    ({"ns_coefficients": None}, "ns_coefficients=None must be the name of a schedule"),
    ({"ns_coefficients": [(1.0, 2.0)]}, "ns_coefficients=[(1.0, 2.0)] must be the name of a schedule"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms' is not one of None, 'original'"),
    ({"adamw": "lion"}, "adamw='lion' is not one of 'adamw', 'cautious'"),
    (
        {"adamw": torch.optim.RMSprop},
        "adamw=RMSprop is a function or a class, not one of 'adamw', 'cautious'. Leave these parameters out of Muon, "
        "put them into an optimizer of your own",
    ),
    ({"weight_decay_mode": "L2"}, "weight_decay_mode='L2' is not one of 'decoupled', 'l2', 'independent', 'cautious'"),
]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Muon", lambda: Muon(matrices())),
        ("Muon", lambda: Muon([{"params": matrices(), "lr": 0.1}])),  # groups added later take the optimizer's
        ("Muon", lambda: Muon(nn.Linear(3, 4))),
        ("param_groups", lambda: param_groups(nn.Linear(3, 4))),
    ],
    ids=["matrices", "groups", "module", "param_groups"],
)
def test_a_missing_lr_is_an_error_that_says_what_to_write(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=rf'^{name} needs lr: write lr=0.03 .*adjust_lr_fn="match_rms_adamw"'):
        make()


@pytest.mark.parametrize("make", [Muon, param_groups])
def test_a_lr_that_is_text_is_refused_by_name_before_anything_is_made_of_it(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{make.__name__}: lr='1e-3' is text, not a number. Write lr=1e-3"):
        make(nn.Linear(3, 4), lr="1e-3")
    with pytest.raises(ValueError, match=r"^group 0: lr='1e-3' is text"):
        Muon([{"params": matrices(), "lr": "1e-3"}], lr=0.1)
    for options, key in (({"adamw_lr": "1e-3"}, "lr"), ({"adamw_eps": "1e-8"}, "eps")):
        with pytest.raises(ValueError, match=rf"^group 1: {key}='1e-\d' is text"):
            Muon(nn.Linear(3, 4), lr=0.1, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^group 1: betas=\('0.9', '0.95'\) must be two numbers"):
        Muon(nn.Linear(3, 4), lr=0.1, adamw_betas=("0.9", "0.95"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS, ids=str)
def test_bad_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Muon(matrices(), **{"lr": 1e-3, **options})


BAD_OBJECTS: list[tuple[Callable[[], object], str]] = [
    (lambda: Orthogonalizer(method="cubic"), "Orthogonalizer.method='cubic' is not one of 'auto', 'standard'"),
    (lambda: Orthogonalizer(dtype=torch.int32), "Orthogonalizer.dtype=torch.int32 is not one of 'auto', 'bfloat16'"),
    (lambda: Orthogonalizer("gram", torch.bfloat16), "method='gram' needs products in torch.float16, torch.float32"),
    (lambda: Orthogonalizer(tuning="no such file"), "Orthogonalizer.tuning='no such file' must be a file that"),
    (lambda: Exchange(dtype=torch.float16), "Exchange.dtype=torch.float16 is not one of torch.bfloat16, torch.float32"),
    (lambda: Exchange(bucket_bytes=0), "Exchange.bucket_bytes=0 must be positive"),
    (lambda: Exchange(route="remote"), "Exchange.route='remote' is not one of 'auto', 'owner', 'local'"),
    (lambda: Storage("float16"), "Storage.momentum_dtype='float16' is not one of None, torch.float32"),
]


@pytest.mark.parametrize(("make", "says"), BAD_OBJECTS, ids=[says for _, says in BAD_OBJECTS])
def test_bad_objects_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make()


def _w(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


BAD_GROUPS: list[tuple[Callable[[], dict[str, Any]], type[Exception], str]] = [
    (lambda: {"params": [("w", _w(4, 4))], "lr": -1.0}, ValueError, "group 1: lr=-1.0 must be finite"),
    (lambda: {"params": [("w", _w(12, 4))], "split_sizes": (8, 3)}, ValueError, "w: split_sizes=(8, 3) sum to 11, but"),
    (
        lambda: {"params": [("w", _w(12, 4))], "split_sizes": (2, 2), "split_groups": 2},
        ValueError,
        "w: split_sizes=(2, 2) sum to 4 times split_groups=2, but there are 12 rows",
    ),
    (lambda: {"params": [("w", _w(12, 4))], "split_groups": 2}, ValueError, "w: split_groups=2 needs split_sizes"),
    (lambda: {"params": [("w", _w(12, 4))], "split_sizes": (12, 0)}, ValueError, "must be positive row counts"),
    (lambda: {"params": [("w", _w(12, 4))], "num_heads": 5}, ValueError, "w: num_heads=5 does not divide the 12 rows"),
    (lambda: {"params": [("w", _w(12, 4))], "num_heads": 0}, ValueError, "w: num_heads=0 does not divide"),
    (
        lambda: {"params": [("w", _w(12, 4))], "num_heads": 2, "split_sizes": (6, 6)},
        ValueError,
        "w: num_heads and split_sizes exclude each other",
    ),
    (
        lambda: {"params": [("w", _w(3, 4, 5))]},
        ValueError,
        "w: shape (3, 4, 5) is 3-D: write view='stack' if it holds 3",
    ),
    (lambda: {"params": [("w", _w(4, 5))], "view": "stack"}, ValueError, "w: view='stack' needs a 3-D"),
    (lambda: {"params": [("w", _w(4, 5))], "view": "batch"}, ValueError, "w: view='batch' is not one of"),
    (lambda: {"params": [("w", _w(4))]}, ValueError, "w: shape (4,) has 1 dim(s) and cannot be a matrix"),
    (lambda: {"params": [("w", _w())]}, ValueError, "w: shape () has 0 dim(s)"),
    (lambda: {"params": [("w", _w(0, 4))]}, ValueError, "w: shape (0, 4) has no elements"),
    (
        lambda: {"params": [("w", _w(4, 4))], "use_muon": False, "num_heads": 2},
        ValueError,
        "w: {'num_heads': 2} are options of matrices, but the group says use_muon=False",
    ),
    (
        lambda: {"params": [("w", _w(4, 4))], "use_muon": False, "betas": (0.9, 1.0)},
        ValueError,
        "group 1: betas=(0.9, 1.0) must be two numbers in [0, 1)",
    ),
    (
        lambda: {"params": [("w", _w(4, 4))], "use_muon": False, "betas": 0.9},
        ValueError,
        "group 1: betas=0.9 must be two numbers",
    ),
    (
        lambda: {"params": [("w", _w(4, 4))], "orthogonalizer": Orthogonalizer(method="torch")},
        ValueError,
        "group 1: orthogonalizer applies to the whole optimizer. Write Muon(..., orthogonalizer=...)",
    ),
    (
        lambda: {"params": [("w", torch.zeros(4, 4, dtype=torch.complex64))]},
        ValueError,
        "w: complex parameters (torch.complex64) are not supported",
    ),
    (
        lambda: {"params": [("w", torch.zeros(4, 4, dtype=torch.int64))]},
        TypeError,
        "w: dtype torch.int64 cannot be optimized",
    ),
    (lambda: {"params": [("w", "weights.pt")]}, TypeError, "w: an optimizer takes tensors, found str"),
    (lambda: {"params": {_w(4, 4)}}, TypeError, "give a list, not a set"),
    (
        lambda: {"params": [_w(4, 4)]},
        ValueError,
        "group 1: its parameters have no names, those of the other groups have. Give (name, parameter) pairs",
    ),
    (lambda: {"params": [("w", _w(4, 4) * 2)]}, ValueError, "can't optimize a non-leaf Tensor"),
]


@pytest.mark.parametrize(("make", "error", "says"), BAD_GROUPS, ids=[says for *_, says in BAD_GROUPS])
def test_bad_groups_are_refused_and_leave_the_optimizer_as_it_was(
    make: Callable[[], dict[str, Any]], error: type[Exception], says: str
) -> None:
    p = nn.Parameter(normal(6, 4))
    optimizer = Muon([("first", p)], lr=0.1)
    run(optimizer, [p], [1])
    before = copy.deepcopy(optimizer.state_dict())
    given = make()
    kept = dict(given)
    with pytest.raises(error, match=re.escape(says)):
        optimizer.add_param_group(given)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_equal([s["momentum_buffer"] for s in after["state"].values()], [before["state"][0]["momentum_buffer"]])
    assert given.keys() == kept.keys(), "the caller's dict has changed"
    run(optimizer, [p], [2])


def test_a_parameter_is_listed_once() -> None:
    p, q = _w(4, 4), _w(4, 4)
    with pytest.raises(ValueError, match=re.escape("b: the same parameter is listed twice (first as a)")):
        Muon([("a", p), ("b", p)], lr=1e-3)
    with pytest.raises(ValueError, match="parameter 0 of group 1: the same parameter is listed twice"):
        Muon([{"params": [q, p]}, {"params": [p], "use_muon": False}], lr=1e-3)


def test_names_are_in_the_messages_and_positions_where_there_are_none() -> None:
    with pytest.raises(ValueError, match=r"^blocks\.0\.conv: shape \(3, 4, 5\) is 3-D"):
        Muon([("blocks.0.conv", _w(3, 4, 5))], lr=1e-3)
    with pytest.raises(ValueError, match=r"^parameter 1 of group 0: shape \(3,\) has 1 dim"):
        Muon([_w(2, 2), _w(3)], lr=1e-3)
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([], lr=1e-3)


@pytest.mark.parametrize("use_muon", [True, False])
def test_gradients_that_cannot_be_used_change_nothing(use_muon: bool) -> None:
    good, bad = nn.Parameter(normal(4, 4)), nn.Parameter(normal(4, 4, seed=1))
    optimizer = Muon([{"params": [("good", good)]}, {"params": [("bad", bad)], "use_muon": use_muon}], lr=0.1)
    run(optimizer, [good, bad], [1])
    before = [t.clone() for t in (good.detach(), *(t for s in optimizer.state.values() for t in s.values()))]
    bad.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(ValueError, match=r"bad: its gradient is sparse \(torch\.sparse_coo\)"):
        optimizer.step()
    bad.grad_dtype = None
    bad.grad = torch.ones(4, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"bad: its gradient is complex \(torch\.complex64\)"):
        optimizer.step()
    bad.grad = torch.ones(4, 4)
    key = "momentum_buffer" if use_muon else "exp_avg"
    kept, optimizer.state[bad][key] = optimizer.state[bad][key], torch.zeros(2, 8)
    with pytest.raises(ValueError, match=re.escape(f"bad: its {key} is a Tensor of shape (2, 8)")):
        optimizer.step()
    optimizer.state[bad][key] = kept
    assert_equal([good.detach(), *(t for s in optimizer.state.values() for t in s.values())], before)
    optimizer.step()
    assert not torch.equal(good, before[0])


def test_a_group_that_is_no_dict_is_named() -> None:
    optimizer = Muon([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    with pytest.raises(TypeError, match="a param group must be a dict, found list"):
        optimizer.add_param_group([("params", [nn.Parameter(torch.zeros(2, 2))])])  # type: ignore[arg-type]
    assert len(optimizer.param_groups) == 1
