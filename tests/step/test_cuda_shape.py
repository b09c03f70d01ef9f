"""A step on an accelerator, as far as a CPU can tell: the real step on tensors that say cuda:0.

See `cuda_shape.py` for what stands in for CUDA and NCCL. It carries values, so updates are compared with those of a
plain CPU step; it counts launches, waits, uploads and bytes; and it refuses what a device or NCCL would refuse. The
faults at the end are put in on purpose: the stand-in must see each of them.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cuda_shape import CUDA, CudaShape, OnDevice, Refused, fake_ranks, launches_of
from tolerances import assert_bitwise, assert_rounded, assert_same_update
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from variant_cases import CASES

import shardmuon._torch as torch_symbols
import shardmuon.muon as muon
import shardmuon.step.bucket as buckets
import shardmuon.step.update as update
from shardmuon import ExchangeError, Muon, audit
from shardmuon.comm import lanes
from shardmuon.comm import vote as votes
from shardmuon.foresight.job import exact_of
from shardmuon.orthogonalize import ITERATIONS
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.testing import RankPool
from shardmuon.variants import KEPT_KEYS

FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(24, 8), (10, 16), (8, 8), (16, 40), (24, 8), (3, 16, 8)]
LENGTHS = [(5,), (8,), (3,)]
CONFIGS: dict[str, dict[str, Any]] = {
    "standard": {"method": "standard"},
    "gram": {"method": "gram"},
    "auto": {},  # "gram" where that has less arithmetic
}


def _in_fp32(config: str) -> dict[str, Any]:
    """The options of a configuration, with products and wire in fp32."""
    return {**CONFIGS[config], "ns_dtype": FP32}


PHASES = {
    "validate": (muon, "validate"),
    "vote": (votes, "vote"),
    "momentum": (buckets, "update_momentum"),
    "exchange": (buckets, "start"),
    "assemble": (buckets, "_orthogonalize"),
    "orthogonalize": (buckets, "orthogonalize"),
    "apply": (buckets, "apply_results"),
    "adamw": (muon, "step_adamw"),
}


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Place = Callable[[Tensor], Tensor]


def _parameters(place: Place, dtype: torch.dtype = FP32) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    made = [nn.Parameter(place(_normal(*shape, seed=i).to(dtype))) for i, shape in enumerate([*SHAPES, *LENGTHS])]
    return made[: len(SHAPES)], made[len(SHAPES) :]


def _optimizer(matrices: list[nn.Parameter], vectors: list[nn.Parameter], **options: Any) -> Muon:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in matrices if p.ndim == 2]},
        {"params": [p for p in matrices if p.ndim == 3], "view": "stack"},
        {"params": vectors, "use_muon": False},
    ]
    return Muon(groups, **{"lr": 0.05, "weight_decay": 0.1, **options})


def _steps(place: Place, count: int, dtype: torch.dtype = FP32, **options: Any) -> list[Tensor]:
    """Parameters after some steps."""
    matrices, vectors = _parameters(place, dtype)
    optimizer = _optimizer(matrices, vectors, **options)
    for step in range(count):
        _set_gradients([*matrices, *vectors], place, step)
        optimizer.step()
    return [_values(p) for p in (*matrices, *vectors)]


def _set_gradients(params: list[nn.Parameter], place: Place, step: int) -> None:
    shapes = [*SHAPES, *LENGTHS]
    for i, (p, shape) in enumerate(zip(params, shapes, strict=True)):
        p.grad = place(_normal(*shape, seed=100 * (step + 1) + i).to(p.dtype))


def _values(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    return local.inner.clone() if isinstance(local, OnDevice) else local.clone()


def _there(tensor: Tensor) -> Tensor:
    return tensor.to("cuda:0")


# ------------------------------------------------------------------------------------------------------- values


@pytest.mark.stated
@pytest.mark.parametrize("momentum", [None, FP32])
@pytest.mark.parametrize(("config", "dtype"), [("standard", FP32), ("standard", BF16), ("gram", BF16)])
def test_one_process_has_the_cpus_values(config: str, dtype: torch.dtype, momentum: torch.dtype | None) -> None:
    given = {**_in_fp32(config), "momentum_dtype": momentum}
    before = _steps(Tensor.clone, 0, dtype)
    expected = _steps(Tensor.clone, 1, dtype, **given)
    with CudaShape():
        found = _steps(_there, 1, dtype, **given)
    for one, other, start in zip(found, expected, before, strict=True):
        if one.ndim == 1:
            # ten operations on either side, of steps of size lr
            assert_rounded(one, other, roundings=20, scale=start.abs() + 2 * 0.05)
            continue
        for a, b, c in zip(*(t.view(-1, *t.shape[-2:]) for t in (one, other, start)), strict=True):
            scale = max(1.0, a.shape[0] / a.shape[1]) ** 0.5
            assert_same_update(a, b, before=c, lr=0.05, weight_decay=0.1, scale=scale, dtype=FP32)


def test_a_tensor_lr_on_the_device_follows_what_is_written_into_it() -> None:
    def steps(rate: Callable[[float], Any], fill: Callable[[Any, float], Any], **options: Any) -> list[Tensor]:
        matrices, vectors = _parameters(_there)
        optimizer = _optimizer(matrices, vectors, lr=rate(0.05), **options)
        for step, lr in enumerate((0.05, 0.02, 0.01)):
            for group in optimizer.param_groups:
                group["lr"] = fill(group["lr"], lr)
            _set_gradients([*matrices, *vectors], _there, step)
            optimizer.step()
        return [_values(p) for p in (*matrices, *vectors)]

    def number(_: Any, lr: float) -> float:
        return lr

    def write(tensor: Tensor, lr: float) -> Tensor:
        return tensor.fill_(lr)

    options = {"method": "standard", "ns_dtype": FP32}
    with CudaShape():
        expected = steps(float, number, **options)
        found = steps(lambda lr: torch.tensor(lr).to("cuda:0"), write, **options)
    for one, other in zip(found, expected, strict=True):
        # the tensor's lr is rounded to fp32: a few roundings of a sum of |weight| and lr, in each of three steps
        assert_rounded(one, other, roundings=3 * 12, scale=other.abs() + 3 * 0.1)


@pytest.mark.parametrize(
    "options",
    [{}, {"method": "standard", "ns_dtype": FP32}, {"variant": "muon_eq"}, {"variant": "muon_eq+normuon"}],
    ids=str,
)
def test_no_matrix_is_copied_in_fp64_to_sum_its_norm(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's `vector_norm` with a wider dtype makes such a copy, four times a matrix in bf16; of halves it sums in fp32
    what it reads."""
    real, seen = torch.linalg.vector_norm, Counter[torch.dtype]()

    def norm(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        if isinstance(x, OnDevice) and x.dim() > 1 and min(x.shape[-2:]) > 1:
            seen[dtype or x.dtype] += 1
            assert dtype in (None, x.dtype) or (dtype, x.dtype.itemsize) == (FP32, 2), (tuple(x.shape), x.dtype, dtype)
        return real(x, *args, dtype=dtype, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", norm)
    with CudaShape():
        matrices, vectors = _parameters(_there)
        optimizer = _optimizer(matrices, vectors, **options)
        for step in range(2):
            _set_gradients([*matrices, *vectors], _there, step)
            optimizer.step()
    assert seen[torch.float64] == 0


TOGETHER = ("muon_eq+normuon", "hyperball+normuon", "normuon+hyperball")


@pytest.mark.parametrize("variant", TOGETHER)
def test_variants_have_the_cpus_values(variant: str) -> None:
    """Matrices of a bucket together, beside each alone: batches of several and of one, lines that leave gaps."""

    def step(place: Place) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        matrices, vectors = _parameters(place)
        before = [_values(p).clone() for p in matrices]
        options = {"variant": variant, "weight_decay": 0.0}
        optimizer = _optimizer(matrices, vectors, method="standard", ns_dtype=FP32, **options)
        _set_gradients([*matrices, *vectors], place, 0)
        optimizer.step()
        kept = [optimizer.state[p][key] for p in matrices for key in KEPT_KEYS if key in optimizer.state[p]]
        return before, [_values(p) for p in matrices], [_values(k) for k in kept]

    with CudaShape():
        before, found, found_kept = step(_there)
    _, expected, expected_kept = step(Tensor.clone)
    for old, one, other in zip(before, found, expected, strict=True):
        assert not torch.equal(old, other)
        for matrices in zip(*((t if t.dim() == 3 else t[None]) for t in (old, one, other)), strict=True):
            rows, cols = matrices[0].shape
            grown = max(1.0, float(matrices[0].norm())) if "hyperball" in variant else 1.0
            scale = grown * max(1.0, rows / cols) ** 0.5
            assert_same_update(*matrices[1:], before=matrices[0], lr=0.05, scale=scale, dtype=FP32)
    assert len(found_kept) == len(expected_kept)
    for one, other in zip(found_kept, expected_kept, strict=True):
        # sums of at most 40 x 16 squares of a result of fifteen products of at most 40 terms; see assert_same_update
        assert_rounded(one, other, roundings=15 * 40 + 40 * 16, dtype=FP32)


@pytest.mark.parametrize("variant", TOGETHER)
def test_one_by_one_a_matrix_has_its_own_bits_among_others(variant: str) -> None:
    def steps(which: list[int]) -> list[Tensor]:
        with CudaShape():
            params = [nn.Parameter(_there(_normal(*SHAPES[i], seed=i))) for i in which]
            how = {"method": "standard", "ns_dtype": FP32}
            optimizer = Muon(params, lr=0.05, variant=variant, weight_decay=0.0, **how)
            for step in range(2):
                for i, p in zip(which, params, strict=True):
                    p.grad = _there(_normal(*SHAPES[i], seed=100 * (step + 1) + i))
                optimizer.step()
            state = [[optimizer.state[p][key] for key in KEPT_KEYS if key in optimizer.state[p]] for p in params]
            return [_values(t) for p, kept in zip(params, state, strict=True) for t in (p, *kept)]

    matrices = [i for i, shape in enumerate(SHAPES) if len(shape) == 2]
    assert_bitwise(steps(matrices), [t for i in matrices for t in steps([i])])


def test_control_of_norms_waits_for_nothing_and_says_zeros_all_the_same() -> None:
    how, variant = {"method": "standard", "ns_dtype": FP32}, "normuon+hyperball"
    with CudaShape() as mode, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        matrices, vectors = _parameters(_there)
        with torch.no_grad():
            matrices[0].zero_()
        optimizer = _optimizer(matrices, vectors, weight_decay=0.0, variant=variant, **how)
        for step in range(3):
            _set_gradients([*matrices, *vectors], _there, step)
            mode.clear()
            optimizer.step()
            assert not mode.waits, mode.waits
    texts = [str(w.message) for w in said if "zero before the first step" in str(w.message)]
    assert len(texts) == 1
    assert texts[0].startswith("parameter 0 of group 0: zero")


def test_an_audit_reads_the_lr_that_was_used() -> None:
    with CudaShape():
        matrices, _ = _parameters(_there)
        lr = torch.tensor(0.05).to("cuda:0")
        optimizer = Muon(matrices[:2], lr=lr, ns_dtype=FP32)
        for step in range(2):
            for i, p in enumerate(matrices[:2]):
                p.grad = _there(_normal(*SHAPES[i], seed=step))
            if step:
                lr.fill_(0.01)
                check = audit(optimizer)
            optimizer.step()
    assert not check.report.findings, check.report


# -------------------------------------------------------------------------------------- results that are not finite


def _spoiled(out: Tensor) -> Tensor:
    out[1, 2].fill_(float("inf"))
    return out


def test_a_result_that_is_not_finite_is_left_out_on_the_device_and_reported_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = ITERATIONS["gram"]

    def iteration(y: Tensor, **named: Any) -> Tensor:
        return _spoiled(sound(y, **named))

    monkeypatch.setitem(ITERATIONS, "gram", iteration)
    with CudaShape() as mode, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = [nn.Parameter(_there(_normal(8, 24, seed=i))) for i in range(3)]
        optimizer = Muon(params, lr=0.05, weight_decay=0.1, method="gram")
        before = [_values(p) for p in params]
        for step in range(2):
            for i, p in enumerate(params):
                p.grad = _there(_normal(8, 24, seed=10 * step + i))
            mode.clear()
            optimizer.step()
            assert not mode.waits or step == 0
            if step == 0:
                after = [_values(p) for p in params]
                told = [str(w.message) for w in caught]
        again = [str(w.message) for w in caught]
    assert_bitwise(after[1], before[1] * (1 - 0.05 * 0.1), "decayed, with no update")
    assert not any(torch.equal(after[i], before[i] * (1 - 0.05 * 0.1)) for i in (0, 2))
    assert told == []
    assert again == [
        "method='gram' on 8x24 gave a non-finite result for 1 of 3 finite matrices in an earlier step; they took no "
        "update in it"
    ]


# --------------------------------------------------------------------------------------------- real ranks as NCCL's


def _sharded(mesh: Any, placements: Any) -> Place:
    """Pieces of this rank on the device, as torch.chunk cuts them."""

    def place(full: Tensor) -> Tensor:
        placement = placements(full)
        local = full
        if isinstance(placement, Shard):
            parts = full.chunk(mesh.size(), placement.dim)
            rank = mesh.get_local_rank()
            local = parts[rank] if rank < len(parts) else full.narrow(placement.dim, 0, 0)
        return DTensor.from_local(
            _there(local.contiguous()), mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
        )

    return place


PLACEMENTS: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda t: Shard(0),
    "columns": lambda t: Shard(t.ndim - 1),
    "replicas": lambda t: Replicate(),
}


def _on_ranks(config: str, placements: str) -> tuple[list[Tensor], dict[str, int], int]:
    """Pieces of this rank after two steps, waits by line and uploads in the second."""
    with CudaShape() as mode:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        place = _sharded(mesh, PLACEMENTS[placements])
        matrices, vectors = _parameters(place)
        optimizer = _optimizer(matrices, vectors, **_in_fp32(config))
        for step in range(2):
            _set_gradients([*matrices, *vectors], place, step)
            mode.clear()
            optimizer.step()
        waits = {where: count for (_, where), count in mode.waits.items()}
        return [_values(p) for p in (*matrices, *vectors)], waits, sum(mode.uploads.values())


@pytest.mark.stated
@pytest.mark.parametrize(
    ("config", "placements"), [("standard", "rows"), ("gram", "columns"), ("standard", "replicas")]
)
def test_ranks_that_pose_as_nccls_wait_for_no_device_and_have_the_bits_of_one(
    config: str, placements: str, world4: RankPool
) -> None:
    found = world4.run(_on_ranks, config, placements)
    for _, waits, uploads in found:
        assert waits == {}
        assert uploads == 0
    with CudaShape():
        expected = _steps(_there, 2, **_in_fp32(config))
    for i, whole in enumerate(expected):
        pieces = [values[i] for values, *_ in found]
        if placements == "replicas":
            assert_bitwise(pieces[1:], pieces[:1] * 3, "replicas")
            pieces = pieces[:1]
        one = torch.cat(pieces, {"rows": 0, "columns": whole.ndim - 1, "replicas": 0}[placements])
        assert_bitwise(one, whole, f"parameter {i}")


# --------------------------------------------------------------------------------------------------------- budgets

MODEL = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
NUM_VECTORS = 50


def _model(world: int, d: int, layers: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    mesh = init_device_mesh("cuda", (world,)) if world > 1 else None

    def one(shape: tuple[int, ...]) -> Tensor:
        local = torch.empty(shape[0] // world, *shape[1:], device=CUDA)
        if mesh is None:
            return local
        stride = torch.empty(shape, device="meta").stride() if len(shape) == 1 else (shape[1], 1)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    shapes: list[tuple[int, ...]] = [tuple(n * d // 768 for n in shape) for shape in MODEL[: 4 * layers]]
    params = []
    for shape in [*shapes, *[(d,)] * NUM_VECTORS]:
        p = nn.Parameter(one(shape))
        p.grad = one(shape)
        params.append(p)
    return params[: len(shapes)], params[len(shapes) :]


class _Counts(NamedTuple):
    """Counts of one steady step; `above`: bytes beside what stands; `said`: those that `shardmuon plan` says."""

    launches: int
    by_phase: dict[str, int]
    waits: dict[tuple[str, str], int]
    uploads: dict[tuple[str, str], int]
    above: int
    num_buckets: int
    said: int


def _count(world: int, d: int = 768, layers: int = 12, **options: Any) -> _Counts:
    with CudaShape(mirror=world > 1, values=False) as mode, mode.phases(PHASES), fake_ranks(world):
        matrices, vectors = _model(world, d, layers)
        optimizer = Muon([{"params": matrices}, {"params": vectors, "use_muon": False}], lr=1e-3, **options)
        for _ in range(2):
            optimizer.step()
        mode.clear()
        standing = mode.bytes
        optimizer.step()
        assert optimizer.plan is not None
        said = max(c.peak for c in exact_of(optimizer.plan).classes)
        launches, by_phase = mode.launches.total(), mode.by_phase(mode.launches)
        kept = dict(mode.waits), dict(mode.uploads), mode.peak - standing
        return _Counts(launches, by_phase, *kept, len(optimizer.plan.buckets), said)


# Launches of a steady step, of 48 matrices and 50 vectors at d = 768. A batch has 15 products and 6 launches to
# normalize (5 of a single matrix), 1 that fills it up with zeros where it is not full and 1 that puts the result in its
# place; "gram" has about 47 in all, half of them fp16 products split in two. A batch has the same size on every layout,
# here 4, so that a matrix has the same bits on each: one rank has 15 or 16 batches, the first of 8 has 4 or 5, of one
# or two matrices. fp16 products that torch does not write into memory of ours take copies into aligned slots. Beside
# that a bucket with an exchange has momentum twice (of what travels first, then of what stays while that is on its
# way), one copy for each shape that came and one that goes.
BUDGETS = {
    ("standard", 8): 148,
    ("standard", 1): 376,
    ("gram", 8): 316,
    ("gram", 1): 792,
    ("auto", 8): 316,
    ("auto", 1): 792,
}


@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_steady_step_waits_for_nothing_and_takes_the_launches_and_memory_that_it_must(
    config: str, world: int
) -> None:
    """Memory in units of an owner's part of a bucket (32 MiB): two that travel or wait, the iterate before and after a
    product and the result turned back. In fp32: what momentum makes of a portion, or an update that is widened: at most
    2^24 elements, or what this rank holds of a bucket. In the Gram form and its m x m matrices everything is fp32
    beside."""
    found = _count(world, **CONFIGS[config])
    assert found.waits == {}
    assert found.uploads == {}
    assert found.launches <= BUDGETS[config, world], found.by_phase
    n = found.num_buckets
    assert found.by_phase.get("vote", 0) == found.by_phase.get("validate", 0) == 0
    assert found.by_phase["momentum"] == 3 * n + (3 * n if world > 1 else 0), "momentum, Nesterov's sum, the copy"
    assert found.by_phase.get("exchange", 0) == (2 * n if world > 1 else 0)
    # decay, one addition for each scale that a bucket has, fp32 of what came in bf16
    assert found.by_phase["apply"] <= n * (1 + 3 + 1)
    assert found.by_phase["adamw"] <= 11
    bucket, portion = 32 * 2**20, 4 * 2**24
    assert found.above <= 2 * bucket + (3 if config == "standard" else 4) * bucket + portion
    assert found.above <= found.said, "what `shardmuon plan` says"


# Launches that a variant adds to a steady step of one rank: of 4 matrices in 4 shapes, and of 16 in these 4 shapes.
# Each matrix is summed by itself, so that its bits hang on no other; the rest runs on batches or lists of them.
ADDED = {name: case.launches for name, case in CASES.items()} | {"muon_eq+normuon": (88, 136)}


@pytest.mark.parametrize("variant", ADDED)
def test_a_variant_adds_few_launches(variant: str) -> None:
    options: dict[str, Any] = {"weight_decay": 0.0}
    found = []
    for layers in (1, 4):
        plain, other = (_count(1, layers=layers, variant=v, **options, **CONFIGS["standard"]) for v in (None, variant))
        assert other.waits == other.uploads == {}
        found.append(other.launches - plain.launches)
    assert all(n <= most for n, most in zip(found, ADDED[variant], strict=True)), found


def test_a_column_cut_costs_launches_only_for_what_is_cut() -> None:
    """Lists of dense pairs stay lists: pieces that are not have launches of their own."""
    with CudaShape() as mode, mode.phases(PHASES):
        wide = _there(_normal(16, 64, seed=1))
        params = [nn.Parameter(_there(_normal(16, 32, seed=i))) for i in range(20)]
        params += [nn.Parameter(wide[:, :32])]
        for i, p in enumerate(params):
            p.grad = _there(_normal(16, 32, seed=50 + i))
        optimizer = Muon(params, lr=1e-3, method="standard")
        for _ in range(2):
            mode.clear()
            optimizer.step()
    assert mode.by_phase(mode.launches)["apply"] <= 3 + 3 + 2


# ----------------------------------------------------------------------------------------------- the stand-in itself


def _listed(*sizes: int) -> list[Tensor]:
    return [torch.empty(size, device="meta") for size in sizes]


def test_launches_of_a_list_are_counted_as_torch_cuts_it_up() -> None:
    small = _listed(*[10] * 111)
    assert launches_of("_foreach_add_", (small, 1.0)) == 2, "110 tensors a launch in one list"
    assert launches_of("_foreach_add_", (small, small)) == 2, "64 in two"
    assert launches_of("_foreach_lerp", (small[:48], small[:48], 0.5)) == 1, "48 in three"
    assert launches_of("_foreach_lerp", (small[:49], small[:49], 0.5)) == 2
    assert launches_of("_foreach_mul_", (_listed(320 * 65536), 2.0)) == 1
    assert launches_of("_foreach_mul_", (_listed(320 * 65536 + 1), 2.0)) == 2
    other = [torch.empty(2, 5, device="meta"), torch.empty(5, 2, device="meta").T]
    alike = [torch.empty(2, 5, device="meta") for _ in range(2)]
    assert launches_of("_foreach_add_", (other, alike)) == 2, "one a tensor: strides differ"
    assert launches_of("_foreach_add_", (alike, [t.bfloat16() for t in alike])) == 2, "one a tensor: dtypes differ"
    assert launches_of("_foreach_copy_", (alike, [t.bfloat16() for t in alike])) == 1, "copies may convert"
    gaps = [torch.empty(4, 10, device="meta")[:, :5] for _ in range(3)]
    assert launches_of("_foreach_mul_", (gaps, 2.0)) == 3, "one a tensor: not dense"


def test_the_stand_in_refuses_and_counts_what_it_says() -> None:
    with CudaShape() as mode:
        x = _there(torch.ones(3))
        assert mode.uploads.total() == mode.waits.total() == 1, "a blocking upload is a wait"
        with pytest.raises(Refused, match=r"on cuda:0 and on the CPU"):
            x + torch.ones(3)
        assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3, "a number may lie anywhere"
        mode.clear()
        for look in (lambda: float(x[0]), lambda: x.cpu(), lambda: x.nonzero(), lambda: torch.equal(x, x)):
            before = mode.waits.total()
            look()
            assert mode.waits.total() == before + 1
        host = torch.empty(3, pin_memory=True)
        mode.clear()
        host.copy_(x, non_blocking=True)
        assert not mode.waits
        torch.empty(3).copy_(x, non_blocking=True)
        assert mode.waits.total() == 1, "memory that is not pinned is waited for"
        held, before = mode.bytes, mode.peak
        y = torch.empty(1 << 20, dtype=FP32, device=CUDA)
        assert mode.bytes == held + (4 << 20)
        del y
        assert mode.bytes == held
        assert mode.peak >= before + (4 << 20) - held


# ------------------------------------------------------------------------------------------------- planted faults

real_start, real_packed = buckets.start, lanes._bytes_of


def _applies(spoil: Callable[[Tensor], Any]) -> Any:
    real = update.apply_

    def call(params: list[Tensor], updates: list[Tensor], *rest: Any) -> None:
        for u in updates:
            spoil(u)
        real(params, updates, *rest)

    return mock.patch.object(update, "apply_", call)


def _one_by_one(targets: Any, grads: Any, buffers: Any, *, momentum: float, nesterov: bool) -> None:
    for target, g, b in zip(targets, grads, buffers, strict=True):
        b.lerp_(g, 1 - momentum)
        target.copy_(g.lerp(b, momentum))


def _strided_send(group: Any, traffic: Any, send: Tensor, *splits: Any) -> Any:
    return real_start(group, traffic, torch.stack([send, send], 1)[:, 0], *splits)


def _over_the_device(message: Any) -> Tensor:
    return real_packed(message).to("cuda:0", non_blocking=True).cpu()


# name -> (the fault, options, ranks, what the stand-in must say: "waits", "uploads", "launches" or a refusal)
FAULTS: dict[str, tuple[Callable[[], Any], dict[str, Any], int, str]] = {
    "the vote goes over the device": (
        lambda: mock.patch.object(lanes, "_bytes_of", _over_the_device),
        CONFIGS["standard"],
        8,
        "waits",
    ),
    "norms are summed on the CPU under NCCL": (
        lambda: mock.patch("shardmuon.step.stages.talking_device", return_value=torch.device("cpu")),
        {**CONFIGS["standard"], "variant": "hyperball", "weight_decay": 0.0},
        8,
        "no backend for cpu tensors",
    ),
    "scratch memory on the CPU": (
        lambda: _applies(lambda u: u + torch.ones(u.shape)),
        CONFIGS["standard"],
        1,
        "on the CPU",
    ),
    "a number is uploaded for each piece": (
        lambda: _applies(lambda u: u * torch.tensor(1.0).to(u.device, non_blocking=True)),
        CONFIGS["standard"],
        1,
        "uploads",
    ),
    "momentum tensor by tensor": (
        lambda: mock.patch("shardmuon.step.update.momentum_into_", _one_by_one),
        CONFIGS["standard"],
        8,
        "launches",
    ),
    "a send buffer with gaps": (
        lambda: mock.patch("shardmuon.step.bucket.start", _strided_send),
        CONFIGS["standard"],
        8,
        "NCCL takes contiguous",
    ),
    "the host looks at what is finite": (
        lambda: mock.patch.object(
            FiniteWatch, "keep_finite", lambda self, out, x, text: out if out.isfinite().all() else x
        ),
        CONFIGS["gram"],
        1,
        "waits",
    ),
    "the host waits for what was finite": (
        lambda: mock.patch("shardmuon.orthogonalize.gram.Later", lambda value: mock.Mock(host=value.cpu())),
        CONFIGS["gram"],
        1,
        "waits",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_stand_in_sees_a_planted_fault(fault: str) -> None:
    plant, options, world, told = FAULTS[fault]
    with plant():
        if told not in ("waits", "uploads", "launches"):
            with pytest.raises((Refused, ExchangeError, ValueError), match=told):
                _count(world, layers=1, **options)
            return
        found = _count(world, layers=12 if told == "launches" else 1, **options)  # budgets are of the whole model
    if told == "launches":
        config = next(name for name, given in CONFIGS.items() if given is options)
        assert found.launches > BUDGETS[config, world]
    else:
        assert getattr(found, told)


def test_lists_told_at_a_glance_are_those_told_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if draw.random() < 0.1 and len(shape) > 1:
            return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="meta").mT
        return torch.empty(shape, dtype=dtype, device="meta")

    drawn = []
    for _ in range(300):
        shapes = draw.choices([*[(3, 4), (4, 3), (5,), (2, 3, 4)] * 3, (1, 5), (5, 1), (1,)], k=draw.randint(1, 4))
        kinds = [FP32] * 9 + [torch.bfloat16]
        dtypes = [draw.choices(kinds, k=len(shapes)) for _ in range(draw.randint(1, 3))]
        drawn.append([[tensor(*pair) for pair in zip(shapes, column, strict=True)] for column in dtypes])
    together = [torch_symbols._go_together(columns) for columns in drawn]
    assert 50 < sum(together) < 250
    found = [_lists_of(columns) for columns in drawn]
    monkeypatch.setattr(torch_symbols, "_go_together", lambda columns: False)
    assert found == [_lists_of(columns) for columns in drawn]


def _lists_of(columns: list[list[Tensor]]) -> list[list[list[int]]]:
    """The tensors, by their ids, that go into each call of an operation."""
    calls: list[list[list[int]]] = []
    torch_symbols._foreach(lambda *lists: calls.append([list(map(id, one)) for one in lists]), *columns)
    return calls
