"""A training loop around the optimizer leaves the update what it is on one process.

Gradients of the models here are small whole numbers, so that every order of summation gives the same bits.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardmuon import GradScaler, Muon, clip_grad_norm_
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, mesh_of
from shardmuon.testing.tolerances import assert_bitwise


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _snapshot(optimizer: Muon) -> list[Tensor]:
    """Every weight and all of its state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in params for _, t in sorted(optimizer.state.get(p, {}).items())]
    return [_local(t).clone() for t in (*params, *states)]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------- a model with a loop


class _Net(nn.Module):
    """Whole numbers in, whole numbers out. `side` is not used by every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.side = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(_whole(*p.shape, seed=i))

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        x = self.first(x)
        return self.last(x + self.side(x) if side else x)


def _whole(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def _muon(model: nn.Module, **options: Any) -> Muon:
    """Weights move by whole numbers only if they are zeroed: the test resets them, see `_round`."""
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    vectors = [(n, p) for n, p in model.named_parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "use_muon": False}]
    return Muon(groups, lr=0.25, weight_decay=0.0, **options)


def _round(model: nn.Module) -> None:
    """Back to whole numbers, so that the next gradients are exact, too; elementwise, so the same on any layout."""
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            local.copy_((local * 4).round().clamp(-8, 8) / 4)


def _batch(step: int, micro: int, rank: int) -> Tensor:
    return _whole(2, 6, seed=1000 * step + 100 * micro + rank)


UNUSED = 1  # the step whose batches do not use `side`
MICROS = 3


def _dense_run(world: int, zero: dict[str, Any]) -> _Net:
    """The same training on one process: the gradient is the mean over ranks of the sum over micro-batches."""
    model = _Net()
    optimizer = _muon(model)
    for step in range(3):
        for micro in range(MICROS):
            for rank in range(world):
                (model(_batch(step, micro, rank), step != UNUSED).sum() / world).backward()
        optimizer.step()
        optimizer.zero_grad(**zero)
        _round(model)
    return model


def _sharded_run(engine: str, zero: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = _Net()
    model: Any = plain
    options: dict[str, Any] = {}
    if engine == "ddp":
        model = DistributedDataParallel(plain, find_unused_parameters=True)
        options = {"process_group": dist.group.WORLD}
    else:
        mesh = mesh_of((world,)) if engine == "fsdp2" else mesh_of((2, world // 2))
        fully_shard(plain.side, mesh=mesh)
        fully_shard(plain, mesh=mesh)
    optimizer = _muon(plain, **options)
    for step in range(3):
        for micro in range(MICROS):
            last = micro == MICROS - 1
            if engine != "ddp":
                plain.set_requires_gradient_sync(last)  # type: ignore[operator]
            with contextlib.nullcontext() if engine != "ddp" or last else model.no_sync():
                model(_batch(step, micro, rank), step != UNUSED).sum().backward()
        optimizer.step()
        optimizer.zero_grad(**zero)
        _round(plain)
    expected = _dense_run(world, zero)
    for (name, p), q in zip(plain.named_parameters(), expected.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        assert torch.equal(whole.detach(), q.detach()), name


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp"])
def test_accumulating_without_sync_and_a_layer_that_a_batch_does_not_use_give_the_update_of_one_process(
    engine: str, set_to_none: bool, world4: RankPool
) -> None:
    world4.run(_sharded_run, engine, {"set_to_none": set_to_none})


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize(("dtype", "power"), [(torch.float64, 2), (torch.float32, 1)], ids=["fp64", "fp32"])
def test_micro_batches_are_one_batch(dtype: torch.dtype, power: int, parts: int) -> None:
    """Bit for bit: every product and sum of the gradient is exact, however the batch is cut.

    Inputs are whole numbers, weights multiples of 1/4, both of size 2 at most. So `first` gives multiples of 2**-2 of
    size 26, with `side` of 2**-4 and 444, `last` of 2**-6 and 7104 at most. No gradient of the squares is more than a
    sum of 12 products of twice that and 444, below 2**27, in units of 2**-10: 37 bits, and fp64 has 53. None of the
    sums' is more than 12 * 444, in units of 2**-4: 17 bits, and fp32 has 24.
    """

    def run(parts: int) -> list[Tensor]:
        model = _Net().to(dtype)
        optimizer = _muon(model)
        for step in range(3):
            for part in _whole(12, 6, seed=step).to(dtype).chunk(parts):
                model(part).pow(power).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            _round(model)
        return [p.detach() for p in model.parameters()]

    assert_bitwise(run(parts), run(1))


# --------------------------------------------------------------------------------- frozen, unused, other dtypes

SHAPES = {"first": (9, 7), "second": (6, 10), "stack": (4, 3, 5), "bias": (9,), "gain": (3,)}


def _full(seed: int) -> dict[str, Tensor]:
    return {
        name: torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + i))
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def _build(layout: str, full: dict[str, Tensor]) -> dict[str, Tensor]:
    case, world = LAYOUTS[layout], dist.get_world_size()
    rest = LAYOUTS["ddp" if layout == "ddp" else "replicate" if layout == "tp" else "fsdp2"]
    vectors = {name: t for name, t in full.items() if t.ndim == 1}
    matrices = case.build({n: t for n, t in full.items() if t.ndim > 1}, case.mesh(world))
    return matrices | rest.build(vectors, (world,))


class _Job:
    """One model in a layout, and the same one dense."""

    def __init__(self, layout: str, dtypes: dict[str, torch.dtype] | None = None, vectors_only: bool = False) -> None:
        self.layout, self.dtypes, self.vectors_only = layout, dtypes or {}, vectors_only
        self.params = {n: nn.Parameter(t) for n, t in _build(layout, self._draw(0)).items()}
        self.whole = {n: nn.Parameter(t) for n, t in self._draw(0).items()}
        group = dist.group.WORLD if LAYOUTS[layout].process_group else None
        self.optimizer = self._make(self.params, process_group=group)
        self.dense = self._make(self.whole)

    def _draw(self, seed: int) -> dict[str, Tensor]:
        full = {n: t.to(self.dtypes.get(n, t.dtype)) for n, t in _full(seed).items()}
        return {n: t for n, t in full.items() if t.ndim == 1} if self.vectors_only else full

    @staticmethod
    def _make(params: dict[str, nn.Parameter], **options: Any) -> Muon:
        groups = [
            {"params": [(n, p) for n, p in params.items() if p.ndim == 1], "lr": 0.01, "use_muon": False},
            {"params": [(n, p) for n, p in params.items() if p.ndim == 2]},
            {"params": [(n, p) for n, p in params.items() if p.ndim == 3], "view": "stack"},
        ]
        return Muon([g for g in groups if g["params"]], lr=0.1, **options)

    def set_gradients(self, seed: int, scale: float = 1.0) -> None:
        """Gradients of the dense run; the sharded ones are larger by `scale`."""
        full = self._draw(seed)
        for name, grad in _build(self.layout, {n: t * scale for n, t in full.items()}).items():
            self.params[name].grad, self.whole[name].grad = grad, full[name].clone()

    def check(self) -> None:
        expected = _build(self.layout, {n: p.detach() for n, p in self.whole.items()})
        for name, p in self.params.items():
            assert torch.equal(_local(p), _local(expected[name])), name


def _mixed_dtypes(layout: str) -> None:
    dtypes = {"second": torch.bfloat16, "stack": torch.float16, "gain": torch.bfloat16}
    job = _Job(layout, dtypes)
    for seed in (1, 2, 3):
        job.set_gradients(seed)
        for optimizer in (job.optimizer, job.dense):
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
        job.check()


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp", "fsdp2+tp", "tp"])
def test_dtypes_may_stand_side_by_side_in_both_halves(layout: str, world4: RankPool) -> None:
    world4.run(_mixed_dtypes, layout)


def _frozen_and_unused(layout: str) -> None:
    job = _Job(layout)
    job.set_gradients(1)
    job.optimizer.step()
    job.dense.step()
    kept = ("second", "bias")
    before = {
        n: [_local(t).clone() for t in (job.params[n], *job.optimizer.state[job.params[n]].values())] for n in kept
    }
    for p in (job.params["second"], job.whole["second"]):
        p.requires_grad_(False)
    for seed in (2, 3):
        job.set_gradients(seed)
        for params in (job.params, job.whole):
            for n in kept:
                params[n].grad = None
        for optimizer in (job.optimizer, job.dense):
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
    for n in kept:
        after = [_local(t) for t in (job.params[n], *job.optimizer.state[job.params[n]].values())]
        assert _equal(before[n], after), n
    job.check()


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp+tp"])
def test_frozen_and_unused_parameters_keep_weights_and_state_on_all_ranks(layout: str, world4: RankPool) -> None:
    world4.run(_frozen_and_unused, layout)


# ------------------------------------------------------------------------------------------------- loss scaling


def _scaler(kind: type = GradScaler, **options: Any) -> Any:
    scaler = kind("cpu", init_scale=1024.0, growth_interval=2, **options)
    scaler.scale(torch.ones(()))  # makes the scale, as a loop does by its loss
    return scaler


def _spoil(job: _Job, name: str, rank: int, value: float) -> None:
    """One element of one rank's gradient."""
    grad = job.params[name].grad
    if dist.get_rank() == rank and grad is not None:
        _local(grad).view(-1)[-1] = value


def _scaled_loop(layout: str, bad: str, value: float, clip: bool, vectors_only: bool) -> list[float]:
    job, scaler, scales = _Job(layout, vectors_only=vectors_only), _scaler(), []
    for seed in range(1, 6):
        scale = scaler.get_scale()
        job.set_gradients(seed, scale)
        infinite = seed in (1, 4)  # also before there is any state
        if infinite:
            _spoil(job, bad, 1, value)
        before = _snapshot(job.optimizer)
        if clip:
            scaler.unscale_(job.optimizer)
            clip_grad_norm_(job.optimizer, 1.0)
        scaler.step(job.optimizer)
        scaler.update()
        if infinite:
            assert _equal(before, _snapshot(job.optimizer))
        else:
            if clip:
                clip_grad_norm_(job.dense, 1.0)
            job.dense.step()
        job.check()
        scales.append(scaler.get_scale())
    return scales


SCALED = ["ddp", "fsdp2", "hsdp", "tp", "hsdp+tp", "mixed meshes", "ep+fsdp"]


@pytest.mark.parametrize(
    ("layout", "clip", "vectors_only"),
    [*((layout, clip, False) for layout in SCALED for clip in (False, True)), ("fsdp2", False, True)],
)
def test_scaled_steps_are_bitwise_unscaled_ones_and_infinite_ones_are_skipped_by_all_ranks(
    layout: str, clip: bool, vectors_only: bool, world4: RankPool
) -> None:
    bad, value = ("bias", float("nan")) if clip else ("bias" if vectors_only else "first", float("inf"))
    scales = world4.run(_scaled_loop, layout, bad, value, clip, vectors_only)
    assert scales == [[512.0, 512.0, 1024.0, 512.0, 512.0]] * 4


def _other_stage() -> float:
    """One rank has no part in the bad parameter; another has no gradient at all."""
    rank, mesh = dist.get_rank(), mesh_of((2, 2))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["a1"], [Shard(0)], src_data_rank=None))
    optimizer, scaler = Muon([param], lr=0.1), _scaler()
    if rank < 2:
        param.grad = distribute_tensor(torch.ones(4, 4), mesh["a1"], [Shard(0)], src_data_rank=None)
    if rank == 0:
        _local(param.grad)[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(_local(param), torch.ones(2, 4)) and not optimizer.state
    return scaler.get_scale()


def test_ranks_that_share_nothing_with_the_bad_gradient_skip_and_lower_their_scale(world4: RankPool) -> None:
    assert world4.run(_other_stage) == [512.0] * 4


def _refused_gradient(kind: str) -> str:
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.float16 if kind == "fp16" and dist.get_rank() == 1 else None))
    param.grad = torch.ones_like(param)
    if kind == "sparse" and dist.get_rank() == 1:
        param.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(ValueError, match=r"w: its gradient is") as caught:
        _scaler().step(Muon([("w", param)], lr=1e-3))
    return str(caught.value)


@pytest.mark.parametrize(("kind", "said"), [("fp16", "reduce_dtype=torch.float32"), ("sparse", "Use sparse=False")])
def test_gradients_that_cannot_be_unscaled_on_one_rank_are_refused_on_all(
    kind: str, said: str, world3: RankPool
) -> None:
    assert all(said in text for text in world3.run(_refused_gradient, kind))


def test_torchs_question_for_infinities_alone_takes_fp16_gradients() -> None:
    """`GradScaler` asks it of optimizers that unscale by themselves; nothing is unscaled, so fp16 loses nothing."""
    params = [nn.Parameter(torch.zeros(4, 4, dtype=torch.float16)) for _ in range(2)]
    params[0].grad = torch.full((4, 4), 2.0, dtype=torch.float16)
    scaler, optimizer = _scaler(), Muon([("a", params[0]), ("b", params[1])], lr=1e-3)
    assert [float(found) for found in scaler._check_inf_per_device(optimizer).values()] == [0.0]
    params[1].grad = torch.full((4, 4), torch.inf, dtype=torch.float16)
    assert [float(found) for found in scaler._check_inf_per_device(optimizer).values()] == [1.0]
    assert torch.equal(params[0].grad, torch.full((4, 4), 2.0, dtype=torch.float16))


def _overflow_in_backward() -> tuple[list[float], list[bool], bool]:
    """Real fp16: one rank's batch overflows some rows of the gradient, which only their holders see."""
    world, rank = dist.get_world_size(), dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _Net()
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh_of((world,)), mp_policy=policy)
    optimizer, scaler = _muon(model), GradScaler("cpu", init_scale=2.0**8)
    scales, moved, finite = [], [], True
    for step in range(4):
        x = _batch(0, 0, rank)
        if rank == 2 and step == 1:
            x[0, 0] = 80.0  # times 2**8 times a sum of weights, which is above 3 for some rows: more than fp16 holds
        before = _snapshot(optimizer)
        scaler.scale(model(x, False).float().sum()).backward()
        if step == 1:
            finite = all(bool(_local(p.grad).isfinite().all()) for p in model.parameters() if p.grad is not None)
        scaler.unscale_(optimizer)
        clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        after = _snapshot(optimizer)
        optimizer.zero_grad()
        _round(model)
        scales.append(scaler.get_scale())
        moved.append(not _equal(before, after))
        assert all(torch.isfinite(t).all() for t in after)
    return scales, moved, finite


def test_an_overflow_of_fp16_on_one_rank_skips_one_step_everywhere(world4: RankPool) -> None:
    found = world4.run(_overflow_in_backward)
    assert [scales for scales, *_ in found] == [[256.0, 128.0, 128.0, 128.0]] * 4
    assert [moved for _, moved, _ in found] == [[True, False, True, True]] * 4
    assert {finite for *_, finite in found} == {True, False}  # some ranks saw nothing wrong in their shards


def test_a_disabled_scaler_only_steps() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.eye(2)
    optimizer, scaler = Muon([param], lr=1.0, weight_decay=0.0), GradScaler("cpu", enabled=False)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.grad, torch.eye(2)) and param.detach().abs().max() > 0.5


def test_a_scaler_is_saved_and_loaded_as_torchs() -> None:
    scaler, other = _scaler(), _scaler(torch.amp.GradScaler)
    scaler.update(64.0)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 64.0


def _torch_scaler(kind: str, case: str) -> tuple[float, str]:
    """Verdicts of torch's own scalers, from one infinite element on rank 2."""
    flat = mesh_of((4,))

    def make(*placements: Any) -> nn.Parameter:
        param = nn.Parameter(distribute_tensor(torch.zeros(8, 4), flat, list(placements), src_data_rank=None))
        param.grad = distribute_tensor(torch.ones(8, 4), flat, list(placements), src_data_rank=None)
        return param

    sharded = nn.Parameter(torch.zeros(8, 4)) if case == "plain" else make(Shard(0))
    sharded.grad = torch.ones(8, 4) if sharded.grad is None else sharded.grad
    first = make(Replicate()) if case == "replicated first" else nn.Parameter(torch.zeros(4))
    if case == "two meshes":
        mesh = mesh_of((2, 2))["a1"]
        first = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None))
        first.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    first.grad = torch.ones(4) if first.grad is None else first.grad
    if dist.get_rank() == 2:
        _local(sharded.grad)[0, 0] = float("inf")
    scaler = _scaler({"torch": torch.amp.GradScaler, "sharded": ShardedGradScaler, "ours": GradScaler}[kind])
    optimizer = torch.optim.SGD([sharded] if case == "alike" else [first, sharded], lr=1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ShardedGradScaler hands DTensor a tensor of one dim
            scaler.unscale_(optimizer)
    except RuntimeError as error:
        return -1.0, str(error)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), ""


@pytest.mark.parametrize(
    ("case", "kind", "scales"),
    [
        ("alike", "torch", [512.0] * 4),
        ("alike", "sharded", [512.0] * 4),
        ("alike", "ours", [512.0] * 4),
        ("replicated first", "torch", [1024.0, 1024.0, 512.0, 1024.0]),  # the others would wait in step() for rank 2
        ("replicated first", "sharded", [512.0] * 4),
        ("replicated first", "ours", [512.0] * 4),
        ("two meshes", "torch", [1024.0, 1024.0, 512.0, 512.0]),
        ("two meshes", "sharded", [512.0] * 4),
        ("two meshes", "ours", [512.0] * 4),
        ("plain", "torch", [1024.0, 1024.0, 512.0, 1024.0]),
        ("plain", "sharded", [512.0] * 4),
        ("plain", "ours", [512.0] * 4),
        ("plain first", "torch", [-1.0] * 4),
        ("plain first", "sharded", [-1.0] * 4),
        ("plain first", "ours", [512.0] * 4),
    ],
)
def test_what_torchs_scalers_agree_on_is_what_the_documents_say(
    case: str, kind: str, scales: list[float], world4: RankPool
) -> None:
    found = world4.run(_torch_scaler, kind, case)
    assert [scale for scale, _ in found] == scales
    assert all("mixed torch.Tensor and DTensor" in text for scale, text in found if scale < 0)
