"""Forward passes that a step clips by, and what happens to QK-clip when something goes wrong between or in steps."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_qk_clip import Llama, _dense_logits, _largest, _normal
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from shardmuon import Muon, checkpoint
from shardmuon.errors import ExchangeError
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import ZERO_ROWS, initialize
from shardmuon.testing.tolerances import assert_bitwise, assert_rounded
from shardmuon_qkclip import QKClip, qk_clip, scaling
from shardmuon_qkclip.layers import Attention, Rows

TAU = 0.5


class Job:
    """Two layers, of which another optimizer trains a part of its own."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Llama(), nn.Linear(12, 12, bias=False), Llama(groups=6))
        with torch.no_grad():
            for at in (0, 2):
                self.model[at].q_proj.weight.mul_(6.0)
        self.optimizer = Muon([*self.model[0].parameters(), *self.model[2].parameters()], lr=0.02)
        self.optimizer.param_groups[0]["param_names"] = [
            f"{at}.{name}" for at in (0, 2) for name, _ in self.model[at].named_parameters()
        ]
        self.side = Muon(self.model[1], lr=0.02)
        self.clip = QKClip(self.model, self.optimizer, tau=TAU, **options)

    def loss(self, seed: int, scale: float = 1.0) -> Tensor:
        return self.model(_normal(2, 5, 12, seed=seed, scale=scale)).square().mean()

    def step(self, *seeds: int) -> list[Tensor]:
        """Returns what the largest logits are, in fp64."""
        seen = []
        for seed in seeds:
            seen.append(_seen(self.model, seed))
            self.loss(seed).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [torch.stack(layer).amax(0) for layer in zip(*seen, strict=True)]

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def _seen(model: Any, seed: int) -> list[Tensor]:
    """The largest logits of both layers for a batch, in fp64."""
    x = _normal(2, 5, 12, seed=seed)
    with torch.no_grad():
        between = model[1](model[0].o_proj(_mixed(model[0], x)))
    return [_largest(_dense_logits(model[0], x)), _largest(_dense_logits(model[2], between))]


def _mixed(layer: Llama, x: Tensor) -> Tensor:
    q, k, v = layer.heads(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def _assert_measured(clip: QKClip, wanted: list[Tensor]) -> None:
    for found, layer in zip(clip.report.layers, wanted, strict=True):
        # sums of 12 terms in q and in k and of 4 in their product, on both sides
        assert_rounded(
            torch.tensor(found.maxima), layer, roundings=80, dtype=torch.float32, scale=float(layer.abs().max())
        )


# ------------------------------------------------------------------------------------------ what led to no step


def _evaluate(job: Job, folder: Path) -> None:
    job.loss(50, 30.0)


def _skip(job: Job, folder: Path) -> None:
    job.loss(50, 30.0).backward()
    job.optimizer.zero_grad()
    job.side.zero_grad()


def _skip_nan(job: Job, folder: Path) -> None:
    job.loss(50, math.nan).backward()
    job.optimizer.zero_grad(set_to_none=False)
    job.side.zero_grad()
    job.loss(51, math.inf)


def _scaler_skips(job: Job, folder: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(job.loss(50, 30.0)).backward()
    job.model[0].q_proj.weight.grad.fill_(math.inf)
    scaler.step(job.optimizer)
    scaler.update()
    job.optimizer.zero_grad()
    job.side.zero_grad()


def _step_the_side(job: Job, folder: Path) -> None:
    job.loss(50, 30.0).backward()
    kept = job.model[1].weight.detach().clone()
    job.side.step()
    job.side.zero_grad()
    job.optimizer.zero_grad()
    with torch.no_grad():
        job.model[1].weight.copy_(kept)


def _roll_back(job: Job, folder: Path) -> None:
    good = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    with torch.no_grad():
        job.model[0].q_proj.weight.mul_(30.0)
    job.loss(50).backward()
    job.model.zero_grad()
    job.model.load_state_dict(good[0])
    job.optimizer.load_state_dict(good[1])


def _load(job: Job, folder: Path) -> None:
    checkpoint.save(folder / "file", job.model, job.optimizer)
    job.loss(50, 30.0).backward()
    job.model.zero_grad()
    checkpoint.load(folder / "file", job.model, job.optimizer)


def _load_the_optimizer(job: Job, folder: Path) -> None:
    good = copy.deepcopy(job.optimizer.state_dict())
    job.loss(50, 30.0).backward()
    job.model.zero_grad()
    job.optimizer.load_state_dict(good)


def _reset(job: Job, folder: Path) -> None:
    job.loss(50, 30.0).backward()
    job.model.zero_grad()
    job.clip.reset()


def _fail_in_the_forward(job: Job, folder: Path) -> None:
    handle = job.model[2].o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.loss(50, 30.0)
    handle.remove()


def _refuse_a_step(job: Job, folder: Path) -> None:
    job.loss(50, 30.0).backward()
    job.optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        job.optimizer.step()
    job.optimizer.param_groups[0]["lr"] = 0.02
    job.optimizer.zero_grad()
    job.side.zero_grad()


NO_STEP = (
    _evaluate,
    _skip,
    _skip_nan,
    _scaler_skips,
    _step_the_side,
    _roll_back,
    _load,
    _load_the_optimizer,
    _reset,
    _fail_in_the_forward,
    _refuse_a_step,
)


@pytest.mark.parametrize("event", NO_STEP, ids=lambda event: event.__name__[1:])
def test_forwards_that_lead_to_no_step_clip_nothing(event: Callable[[Job, Path], None], tmp_path: Path) -> None:
    """The weights have the bits of a job in which it did not happen."""
    job, plain = Job(), Job()
    for one in (job, plain):
        one.step(1)
    event(job, tmp_path)
    wanted = job.step(2, 3)
    plain.step(2, 3)
    assert job.clip.report.num_clipped > 0
    _assert_measured(job.clip, wanted)
    assert_bitwise(job.weights(), plain.weights())


def test_a_batch_that_is_not_finite_does_not_outvote_those_that_are() -> None:
    """A framework may skip its step, and `zero_grad` may be another's."""
    job = Job()
    job.loss(50, math.nan).backward()
    job.model.zero_grad()
    _assert_measured(job.clip, job.step(1))
    assert job.clip.report.num_clipped > 0


# ------------------------------------------------------------------------------------------------ what led to one


def _in_turn(job: Job, losses: list[Callable[[], Tensor]]) -> None:
    for loss in losses:
        loss().backward()


def _forwards_first(job: Job, losses: list[Callable[[], Tensor]]) -> None:
    torch.stack([loss() for loss in losses]).sum().backward()


def _zero_grad_after_the_forward(job: Job, losses: list[Callable[[], Tensor]]) -> None:
    total = torch.stack([loss() for loss in losses]).sum()
    job.optimizer.zero_grad()
    total.backward()


@pytest.mark.parametrize("how", [_in_turn, _forwards_first, _zero_grad_after_the_forward])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_all_forwards_of_a_step_count(how: Any, reentrant: bool | None) -> None:
    job = Job()
    wanted = [torch.stack(layer).amax(0) for layer in zip(*(_seen(job.model, seed) for seed in (1, 2, 3)), strict=True)]

    def loss(seed: int) -> Tensor:
        if reentrant is None:
            return job.loss(seed)
        x = _normal(2, 5, 12, seed=seed).requires_grad_()
        for layer in job.model:
            x = recomputed(layer, x, use_reentrant=reentrant)
        return x.square().mean()

    how(job, [lambda seed=seed: loss(seed) for seed in (1, 2, 3)])
    job.optimizer.step()
    _assert_measured(job.clip, wanted)


def test_hundreds_of_batches_count_as_a_few_do() -> None:
    job = Job()
    seeds = [int(seed) for seed in torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    _assert_measured(job.clip, job.step(*seeds))


def test_a_closures_forward_counts_and_its_errors_come_before_the_step() -> None:
    job, plain = Job(), Job()

    def closure() -> Tensor:
        job.optimizer.zero_grad()
        loss = job.loss(1)
        loss.backward()
        return loss

    wanted = _seen(job.model, 1)
    job.optimizer.step(closure)
    _assert_measured(job.clip, wanted)
    plain.step(1)
    assert_bitwise(job.weights(), plain.weights())
    job = Job(logits=lambda: {"0": torch.zeros(5)})
    before = job.weights()
    with pytest.raises(ValueError, match=r"logits of '0': found \(5,\)"):
        job.optimizer.step(closure)
    assert_bitwise(job.weights(), before)


def _accumulated(kind: str) -> tuple[list[tuple[float, ...]], list[Tensor]]:
    """Measurements over three batches of each rank, of which two send no gradients; and each rank's own in fp64."""
    rank = dist.get_rank()
    job = Job()
    job.clip.close()
    seeds = [10 * rank + number for number in range(3)]
    own = [torch.stack(layer).amax(0) for layer in zip(*(_seen(job.model, seed) for seed in seeds), strict=True)]
    model: Any = job.model
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = Muon(model, lr=0.02, **({"process_group": dist.group.WORLD} if kind == "ddp" else {}))
    clip = QKClip(model, optimizer, tau=TAU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of outputs that are views
        model(_normal(2, 5, 12, seed=90, scale=30.0)).sum().backward()  # skipped
        optimizer.zero_grad()
        for number, seed in enumerate(seeds):
            if kind == "fsdp2":
                model.set_requires_gradient_sync(number == 2)
                model(_normal(2, 5, 12, seed=seed)).square().mean().backward()
            elif number < 2:
                with model.no_sync():
                    model(_normal(2, 5, 12, seed=seed)).square().mean().backward()
            else:
                model(_normal(2, 5, 12, seed=seed)).square().mean().backward()
    optimizer.step()
    assert clip.report.num_clipped > 0
    return [layer.maxima for layer in clip.report.layers], own


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accumulated_batches_of_all_ranks_count(kind: str, world2: RankPool) -> None:
    found = world2.run(_accumulated, kind)
    assert found[0][0] == found[1][0]
    for at, here in enumerate(found[0][0]):
        wanted = torch.stack([own[at] for _, own in found]).amax(0)
        assert_rounded(torch.tensor(here), wanted, roundings=80, dtype=torch.float32, scale=float(wanted.abs().max()))


# ------------------------------------------------------------------------------------- exceptions while it scales


def test_an_exception_while_it_scales_is_the_last_step_until_state_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plain = Job(), Job()
    for one in (job, plain):
        one.step(1)
    good = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    views, calls = scaling._views, []

    def out_of_memory(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:  # q is scaled, k is not
            raise torch.OutOfMemoryError("none left")
        return views(*args)

    with torch.no_grad():
        job.model[0].q_proj.weight.mul_(50.0)
    monkeypatch.setattr(scaling, "_views", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        job.step(2)
    monkeypatch.undo()
    assert job.optimizer.broken is not None
    with pytest.raises(ExchangeError, match=r"QK-clip was broken off: OutOfMemoryError.*half scaled"):
        job.optimizer.step()
    job.optimizer.zero_grad()
    job.model.load_state_dict(good[0])
    job.optimizer.load_state_dict(good[1])
    for one in (job, plain):
        one.step(2)
        one.step(3)
    assert_bitwise(job.weights(), plain.weights())


def _one_rank_out_of_memory() -> tuple[list[str], bool]:
    """Errors of three steps, of which rank 1 cannot finish the first one; and whether both go on once they have loaded
    what there was, as if it had not happened."""
    rank, said = dist.get_rank(), []
    job, plain = Job(process_group=dist.group.WORLD), Job(process_group=dist.group.WORLD)
    good = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    views = scaling._views
    for number in range(3):
        if rank == 1 and number == 0:
            scaling._views = lambda *_: torch.ones(1 << 62)  # type: ignore[assignment]
        try:
            job.step(number)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        scaling._views = views
        job.optimizer.zero_grad()
    job.model.load_state_dict(good[0])
    job.optimizer.load_state_dict(good[1])
    for one in (job, plain):
        one.step(4)
    return said, all(torch.equal(job.weights()[name], p) for name, p in plain.weights().items())


def test_an_exception_on_one_rank_ends_the_step_of_all_of_them(world2: RankPool) -> None:
    for said, goes_on in world2.run(_one_rank_out_of_memory):
        assert all(text.startswith("ExchangeError") and "QK-clip was broken off: rank 1" in text for text in said), said
        assert goes_on


# -------------------------------------------------------------------------------------------------- shared weights


@pytest.mark.parametrize("shared", [("q_proj", "k_proj"), ("q_proj",)])
def test_a_weight_that_layers_share_is_scaled_once(shared: tuple[str, ...]) -> None:
    model = nn.ModuleList([Llama(), Llama(), Llama()])
    for name in shared:
        getattr(model[2], name).weight = getattr(model[0], name).weight
    before = {name: p.detach().double() for name, p in model.named_parameters(remove_duplicate=False)}
    optimizer = Muon(model, lr=0.0, weight_decay=0.0)
    clip = QKClip(model, optimizer, tau=TAU, alpha=0.3)
    inputs = [_normal(2, 5, 12, seed=seed, scale=9.0) for seed in range(3)]
    largest = [_largest(_dense_logits(layer, x)) for layer, x in zip(model, inputs, strict=True)]
    torch.stack([layer(x).square().mean() for layer, x in zip(model, inputs, strict=True)]).sum().backward()
    optimizer.step()
    _assert_measured(clip, [largest[int(layer.name)] for layer in clip.layers])
    higher = largest[0] > largest[2]
    assert bool(higher.any()) and not bool(higher.all())
    together = torch.maximum(largest[0], largest[2])
    for at, of_layer in enumerate((together, largest[1], together)):
        gain = (TAU / of_layer.view(2, 3).amax(1)).clamp(max=1.0)
        assert float(gain.max()) < 1.0
        q, k = gain.repeat_interleave(12)[:, None] ** 0.3, gain.repeat_interleave(4)[:, None] ** 0.7
        for name, factor in (("q_proj", q), ("k_proj", k)):
            found = getattr(model[at], name).weight
            wanted = before[f"{at}.{name}.weight"] * factor
            assert_rounded(found, wanted, roundings=100, scale=float(wanted.abs().max()))


def test_queries_that_are_keys_are_refused() -> None:
    model = Llama(groups=6)
    model.k_proj.weight = model.q_proj.weight
    with pytest.raises(ValueError, match=r"q_proj.weight.* and k_proj.weight.* are one weight.*none with keys"):
        QKClip(model, Muon(model, lr=0.02))


# --------------------------------------------------------------------------------------------- mistakes, in time


def _frozen(job: Job) -> None:
    job.model[0].q_proj.weight.requires_grad_(False)
    QKClip(job.model, Muon(job.model, lr=0.02))


def _of_others(job: Job) -> None:
    QKClip(job.model, job.side)


def _of_a_twin(job: Job) -> None:
    QKClip(job.model, Muon(Job().model, lr=0.02))


def _of_a_twin_by_listed_layers(job: Job) -> None:
    QKClip(job.model, Muon(Job().model, lr=0.02), layers=job.clip.layers)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_frozen, "0: 0.q_proj.weight is not among the weights of Muon.*It is frozen"),
        (_of_others, "0: 0.q_proj.weight is not among the weights of Muon.*leave the layer out"),
        (_of_a_twin, "0.q_proj.weight is not among.*a weight of this name, which is another tensor than the model's"),
        (_of_a_twin_by_listed_layers, "0.q_proj.weight is not among.*another tensor than the model's"),
    ],
)
def test_weights_that_are_not_the_optimizers_are_found_when_it_is_made(make: Callable[[Job], None], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(Job())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: {"0": torch.zeros(5)}, r"logits of '0': found \(5,\)"),
        (lambda: {"x": torch.zeros(6)}, "logits of 'x': no such layer"),
        (lambda: {}["max_logit"], r"QK-clip: the function logits= raised KeyError: 'max_logit'.*\['0', '2'\]"),
        (lambda: [1.0], "QK-clip: logits are list, expected layer ->"),
    ],
)
def test_what_is_wrong_with_given_logits_is_raised_before_anything_moves(given: Any, said: str) -> None:
    job = Job(logits=given)
    before = job.weights()
    job.loss(1).backward()
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            job.optimizer.step()
    assert_bitwise(job.weights(), before)
    assert not job.optimizer.state and job.optimizer.broken is None


def _interrupted_on_one_rank() -> tuple[str, bool]:
    """Errors of the step in which rank 1 is interrupted while it gives its logits, and whether the next one is as if
    that had not been."""
    given = {"0": torch.full((6,), 3.0)}
    told = [dist.get_rank() == 1]

    def logits() -> dict[str, Tensor]:
        if told.pop() if told else False:
            raise KeyboardInterrupt
        return given

    job = Job(process_group=dist.group.WORLD, logits=logits)
    plain = Job(process_group=dist.group.WORLD, logits=lambda: given)
    job.loss(1).backward()
    with pytest.raises((KeyboardInterrupt, ValueError)) as caught:
        job.optimizer.step()
    job.optimizer.zero_grad()
    for one in (job, plain):
        one.step(2)
    return caught.typename, all(torch.equal(job.weights()[name], p) for name, p in plain.weights().items())


def test_an_interrupt_before_the_step_is_refused_by_all_and_the_next_step_goes_on(world2: RankPool) -> None:
    assert world2.run(_interrupted_on_one_rank) == [("ValueError", True), ("KeyboardInterrupt", True)]


def _wrong_under_deepspeed() -> str:
    """An engine's tensors are known once it has stepped them."""
    torch.manual_seed(0)
    model = Llama()
    optimizer = Muon(model, lr=0.02)
    QKClip(model, optimizer, logits=lambda: {"": torch.zeros(5)})
    engine = initialize(
        model, optimizer, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO_ROWS["zero2"]}, "cpu"
    )
    engine.backward(engine(_normal(2, 5, 12)).square().mean())
    with pytest.raises(RuntimeError, match=r"found \(5,\).*The step itself is done") as caught:
        engine.step()
    engine.destroy()
    return type(caught.value).__name__


def test_where_it_is_raised_after_the_step_it_says_so(deepspeed_pools: dict[int, RankPool]) -> None:
    assert deepspeed_pools[2].run(_wrong_under_deepspeed) == ["RuntimeError"] * 2


@pytest.mark.parametrize("out", [False, True])
def test_a_layer_is_not_scaled_while_a_weight_of_it_is_frozen(out: bool) -> None:
    """`out`: it is taken out of the optimizer meanwhile."""
    job = Job()
    group = job.optimizer.param_groups[0]
    job.step(1)
    frozen = job.model[0].q_proj.weight
    frozen.requires_grad_(False)
    listed = list(group["params"])
    if out:
        names = list(group["param_names"])
        at = next(i for i, p in enumerate(listed) if p is frozen)
        group["params"], group["param_names"] = listed[:at] + listed[at + 1 :], names[:at] + names[at + 1 :]
        job.optimizer.state.pop(frozen)
    before = frozen.detach().clone()
    with torch.no_grad():
        job.model[0].k_proj.weight.mul_(50.0)
        job.model[2].q_proj.weight.mul_(50.0)
    job.step(2)
    assert_bitwise(frozen.detach(), before)
    first, second = job.clip.report.layers
    assert first.num_clipped == 0 and max(first.maxima) > TAU
    assert second.num_clipped > 0
    frozen.requires_grad_(True)
    if out:
        group["params"], group["param_names"] = listed, names
    with torch.no_grad():
        frozen.mul_(50.0)
    _assert_measured(job.clip, job.step(3))
    assert job.clip.report.layers[0].num_clipped > 0


# -------------------------------------------------------------------------------------------- nothing is measured


class Own(Llama):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.repeat_interleave(3, 1).mT).exp()
        return self.o_proj(
            (weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(3, 1)).transpose(1, 2).flatten(2)
        )


def test_layers_that_are_never_measured_are_named_once() -> None:
    model = nn.ModuleDict({"seen": Llama(), "own": Own(), "idle": Llama()})
    optimizer = Muon(model, lr=0.02)
    clip = QKClip(model, optimizer)
    x = _normal(2, 5, 12)
    for number in range(3):
        (model["seen"](x).sum() + model["own"](x).sum()).backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(one.message) for one in said if "QK-clip" in str(one.message)]
        assert len(texts) == (number == 0)
        assert number or ("'own'" in texts[0] and "'seen'" not in texts[0] and "'idle'" not in texts[0])
        optimizer.zero_grad()
    assert clip.report.layers[1].largest == -math.inf


# --------------------------------------------------------------------------------------------- the hook of zero_grad


@pytest.mark.parametrize("kind", [Muon, torch.optim.SGD])
def test_zero_grad_is_the_optimizers_own_again_after_closing(kind: Any) -> None:
    model = Llama()
    optimizer = kind(model if kind is Muon else model.parameters(), lr=0.02)
    own = optimizer.zero_grad
    with closing(QKClip(model, optimizer)) as clip:
        for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert "zero_grad" not in vars(again)
        model(_normal(2, 5, 12)).sum().backward()
        assert clip._pending
        optimizer.zero_grad(set_to_none=False)
        assert not clip._pending
        assert all(not bool(p.grad.any()) for p in model.parameters() if p.grad is not None)
    assert optimizer.zero_grad == own
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_layers_may_be_listed_with_the_same_weights() -> None:
    rows = (Rows("q_proj.weight", (("q", 24),)), Rows("k_proj.weight", (("k", 8),)))
    model, both = Llama(), Llama()
    both.load_state_dict(model.state_dict())
    first, second = torch.tensor([300.0] * 3 + [50.0] * 3), torch.tensor([20.0] * 3 + [150.0] * 3)
    clip_both, clip_one = (partial(qk_clip, Muon(one, lr=0.02)) for one in (both, model))
    clip_both({"a": first, "b": second}, layers=[Attention("a", 6, 2, rows), Attention("b", 6, 2, rows)])
    clip_one({"a": torch.maximum(first, second)}, layers=[Attention("a", 6, 2, rows)])
    assert_bitwise(dict(both.state_dict()), dict(model.state_dict()))
