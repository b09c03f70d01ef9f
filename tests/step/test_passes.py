"""Tests of the non-matmul work in a step: the number of passes over memory, and the accuracy of norms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from jobs import Job, Spec
from simulated import SimulatedRanks, group_of, spec
from spectra import normal
from tolerances import assert_rounded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmuon._torch import cpu_has_bf16_matmul, power_of_two
from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.orthogonalize import _normalize, _normalize_in_fp64, _row_blocks, empty_batch
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.schedules import schedule
from shardmuon.plan.plan import Policy
from shardmuon.plan.planner import make_plan
from shardmuon.variants import MuonEq, _line_norms, _unit_anyway_

CPU = torch.device("cpu")
KELLER = schedule("keller").triples
FP32, BF16 = torch.float32, torch.bfloat16


class Passes(TorchDispatchMode):
    """A dispatch mode that counts, by name, the operations that read or write a tensor of at least `size` elements.

    Views do not count. A foreach operation counts once for each large tensor in its first list.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        of_lists = args[0] if name.startswith("_foreach_") else tree_leaves((args, kwargs, out))
        large = sum(isinstance(t, Tensor) and t.numel() >= self.size for t in of_lists)
        if large and not func.is_view and not name.startswith(("empty", "detach", "_unsafe_view")):
            self.names[name] += large if name.startswith("_foreach_") else 1
        return out


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def _passes(rows: int, cols: int, **options: Any) -> Counter[str]:
    """Take two steps. Return the number of calls in the second step to each operation that reads or writes a whole
    matrix. Matmuls are not counted."""
    job = Job([{"params": [Spec("w", (rows, cols))]}], weight_decay=0.0, **options)
    job.step(1)
    with Passes(rows * cols) as passes:
        job.step()
    return Counter({name: count for name, count in passes.names.items() if name not in PRODUCTS})


@pytest.mark.parametrize("shape", [(128, 256), (256, 128)], ids=str)
def test_a_step_passes_over_a_matrix_few_times(shape: tuple[int, int]) -> None:
    """Apart from matmuls, a step makes seven passes over a wide or a tall matrix: two for momentum (the buffer and the
    Nesterov update), and one each for the copy to the batch, the norm, the division, the copy back and the update of
    the weight. The shapes are multiples of the chunk size in which norms are computed, so that a norm is a single
    operation."""
    found = Counter(name.rstrip("_") for name in _passes(*shape, method="standard").elements())
    wanted = {"_foreach_lerp": 2, "_foreach_copy": 1, "linalg_vector_norm": 1, "div": 1, "_foreach_add": 1, "copy": 1}
    assert found == wanted


def normalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _normalize(x, empty_batch(x.shape, dtype, x.device))


def normalize_in_fp64(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalize a batch with the implementation for accelerators, which sums the squares of each norm in fp64."""
    return _normalize_in_fp64(x, empty_batch(x.shape, dtype, x.device))


def _reference(x: Tensor) -> Tensor:
    peak = x.double().abs().amax(dim=(-2, -1), keepdim=True)
    x = x.double() / torch.where(peak > 0, peak, 1.0)
    return x / torch.where(peak > 0, torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True), 1.0)


@pytest.mark.parametrize("form", [normalize, normalize_in_fp64])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("factor", [1e-44, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e37])
def test_both_forms_of_the_norm_are_right_at_any_scale(
    factor: float, count: int, dtype: torch.dtype, form: Any
) -> None:
    """Both implementations of normalization must match an fp64 reference within rounding, even if the elements are very
    small or very large.

    The tolerance is 32 roundings to fp32 (2^-24 each) for the norm and the quotient, plus one rounding to `dtype`.
    Summing 24 x 40 squares pairwise or in 16 SIMD lanes takes at most 60 roundings. The square root halves their
    effect, to 30 roundings.
    """
    x = (normal(count, 24, 40, dtype=torch.float64) * factor).to(dtype)
    found = form(x.mT, dtype)
    assert found.dtype == dtype
    assert found.stride()[1:] == (24, 1)
    assert found.data_ptr() % 64 == found.stride(0) * found.element_size() % 64 == 0
    bound = 2.0**-24 * 32 + (2.0**-8 if dtype == BF16 else 0.0)
    wanted = _reference(x.mT)
    assert float((found.double() - wanted).abs().max()) <= bound * float(wanted.abs().max())
    info = torch.finfo(dtype)
    # At least one element must survive the cast to `dtype`, unless `factor` is below the smallest subnormal.
    assert (x != 0).any() or factor < info.smallest_normal * info.eps


@pytest.mark.parametrize("form", [normalize, normalize_in_fp64])
def test_zeros_stay_and_bad_entries_spoil_all_of_their_own_matrix(form: Any) -> None:
    x = normal(4, 5, 8)
    x[1], x[2, 3, 4], x[3, 0, 0] = 0.0, float("inf"), float("nan")
    found = form(x, FP32)
    assert not found[1].any() and found[2:].isnan().all()
    assert torch.equal(found[0], form(x[:1], FP32)[0])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_scaled_form_has_the_plain_ones_bits(dtype: torch.dtype) -> None:
    """A matrix must have the same bits whether or not another matrix in its batch has to be scaled before
    normalization."""
    x = normal(3, 24, 40).to(dtype)
    plain = normalize(x, dtype)
    for neighbour in (0.0, 1e-38, 1e38):
        mixed = torch.cat([x, torch.full((1, 24, 40), neighbour).to(dtype)])
        assert torch.equal(normalize(mixed, dtype)[:3], plain)
    largest = x.float().abs().amax()
    assert 1.0 <= float(largest / power_of_two(largest.clone())) < 2.0


# ------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("native", [False, True])
def test_the_rule_knows_what_a_dtype_costs(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gram form halves the FLOPs, but would run in fp32. If bf16 matmuls run at several times the rate of fp32,
    method="auto" must not choose it."""
    monkeypatch.setattr("shardmuon.orthogonalize.cpu_has_bf16_matmul", lambda: native)
    found = Choice.made("auto", None, (384, 1536), KELLER, CPU)
    assert found == (Choice("standard", BF16) if native else Choice("gram", FP32))
    assert ("float32 at 1/4 of the rate" in found.reason) == native


def test_blocks_follow_the_arithmetic_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for dtype in (torch.float64, FP32, BF16):
        counts = [_row_blocks(rows, 4 * rows, dtype) for rows in (64, 128, 256, 512, 1024, 4096)]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 4)
    assert _row_blocks(384, 384, BF16) < _row_blocks(384, 384, FP32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    assert _row_blocks(512, 512, BF16) == _row_blocks(512, 512, FP32) == 1, "threads leave less to save"


# --------------------------------------------------------------------------------------- replicas that others handle


def test_a_replica_that_others_orthogonalize_makes_no_nesterov_update() -> None:
    """Each of four ranks orthogonalizes two of eight replicated matrices. For each of the other six, the rank must
    update the momentum without computing the Nesterov update."""
    shape = (16, 24)
    layout = ParamLayout.replicated(matrix_view(shape), (0, 1, 2, 3))
    plan = make_plan([spec(f"w{i}", layout) for i in range(8)], Policy(each=False))
    ranks = SimulatedRanks(plan, [normal(*shape, seed=i) for i in range(8)])
    with Passes(16 * 24) as passes:
        ranks.step([normal(*shape, seed=10 + i) for i in range(8)], [group_of()] * 8)
    assert passes.names["_foreach_lerp_"] + passes.names["_foreach_lerp"] == 8 * 4 + 8


# ---------------------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (256, 256)], ids=str)
def test_a_variant_reads_a_matrix_once_and_scales_it_once(shape: tuple[int, int]) -> None:
    """All post-processing stages together take one pass to read a matrix and one to scale it. Hyperball adds one pass
    for the norm of the weights and one to scale them. MuonEq adds no pass: it computes row norms instead of the norm of
    the matrix, and scales the rows instead of dividing the matrix by its norm."""
    how = {"method": "standard"}
    plain = _passes(*shape, **how)
    of_weights = {"_foreach_norm": 1, "_foreach_mul_": 1}
    once = Counter({"_foreach_norm": 1, "mul_": 1})
    assert _passes(*shape, **how, variant="hyperball") == plain + once + Counter(of_weights)
    # Column norms take one pass to square and one to sum, after a conversion to fp32 if matmuls are in bf16.
    columns, half = shape[0] < shape[1], cpu_has_bf16_matmul()
    lines = Counter(["pow", "sum"] + ["_to_copy"] * half if columns else ["linalg_vector_norm"]) + Counter(["mul_"])
    assert _passes(*shape, **how, variant="normuon") == plain + lines
    assert _passes(*shape, **how, variant="normuon+hyperball") == plain + lines + Counter(of_weights)
    assert _passes(*shape, **how, variant="muon_eq") == plain - Counter(["div"]) + Counter(["mul_"])


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(37, 101), (101, 37), (1, 9), (9, 1), (64, 64)], ids=str)
def test_lines_are_summed_in_at_least_fp32(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Norms of rows and columns must be as accurate as sums in fp32, or in fp64 for fp64 matrices. A sum of n positive
    terms has at most n roundings. Squaring the terms and taking the root of the sum add six more roundings."""
    wide = torch.float64 if dtype == torch.float64 else FP32
    for turned in (False, True):
        x = normal(1, *shape).to(dtype)
        x = x.mT if turned else x
        for dim in (-1, -2):
            wanted = torch.linalg.vector_norm(x.double(), dim=dim)
            into = torch.empty_like(wanted, dtype=wide)
            for found in (_line_norms(x, dim), _line_norms(x, dim, into)):
                assert found.dtype == wide
                assert_rounded(found, wanted, roundings=x.shape[dim] + 6, dtype=wide)
            assert torch.equal(_line_norms(x, dim), into)


@pytest.mark.stated
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
@pytest.mark.parametrize("factor", [1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e37])
def test_rows_are_equalized_at_any_scale(factor: float, dtype: torch.dtype, turned: bool) -> None:
    """Row normalization must be accurate in both implementations: the batched implementation for accelerators, and the
    implementation for CPUs, which processes one matrix at a time. Some rows are zero, one matrix is all zeros, and one
    matrix has an infinite element. In fp64, the norms of rows span sixteen orders of magnitude."""
    decades = 10.0 ** torch.linspace(-8, 8, 24, dtype=torch.float64)
    x = normal(4, 24, 40, dtype=torch.float64) * factor
    x = x * (decades if dtype == torch.float64 else decades**0.0).view(1, 24, 1)
    x[1, 3:5] = 0.0
    x[2] = 0.0
    x[3, 1, 2] = float("inf")
    x = x.to(dtype)
    x = x.mT.contiguous().mT if turned else x
    norms = x.double().norm(dim=-1, keepdim=True)
    rows = torch.where(norms > 0, x.double() / norms, 0.0)
    rows /= (norms > 0).sum(-2, keepdim=True).clamp(min=1).double().sqrt()
    one_by_one = x.clone()
    for matrix in one_by_one.split(1):
        MuonEq().run_(matrix)
    _unit_anyway_(x)
    # `few` covers the roundings of a sum of 40 squares, two square roots, their product, its reciprocal and the final
    # multiplication. In bf16, the intermediate results are fp32, so their roundings are negligible.
    few = 40 + 6 if dtype != BF16 else 2
    for found in (x, one_by_one):
        assert_rounded(found[:3], rows[:3], roundings=few, dtype=dtype)
        assert found[3].isnan().all()
