"""Tests of the automatic choice of the orthogonalizer, which must be the same on every rank and must be printed in the
plan. Other tests in this file check FLOPs estimates, precision flags, the dtypes in which ranks exchange data, and
non-finite results."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spectra import normal, spectrum
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardmuon import Muon, clip_grad_norm_, schedule
from shardmuon.orthogonalize import ITERATIONS, FiniteWatch, flops, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.step import binding as binding_module
from shardmuon.testing import RankPool
from shardmuon.testing.compare import Comparison
from shardmuon.testing.layouts import ParamCase

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KELLER, POLAR = (schedule(name).triples for name in ("keller", "polar_express"))


# ------------------------------------------------------------------------------------------------------------- FLOPs


FORMS = [("standard", FP32), ("gram", FP32), ("gram", FP16)]
SMALL = itertools.product(("keller", "polar_express", "cubic", "deepseek_v4"), FORMS, (96, 336, 384, 768))


@pytest.mark.parametrize(
    ("name", "form", "m", "n", "device"),
    [
        *((name, form, 96, n, CUDA) for name, form, n in SMALL),
        # On a CPU, symmetric matmuls of large matrices compute only ten of the sixteen blocks of the result.
        *(("keller", form, m, n, CPU) for form in FORMS[:2] for m, n in ((384, 1536), (512, 512))),
    ],
)
def test_flops_are_those_that_torch_counts(
    name: str, form: tuple[str, torch.dtype], m: int, n: int, device: torch.device
) -> None:
    method, dtype = form
    coefficients = schedule(name).triples
    with FlopCounterMode(display=False) as counter:
        orthogonalize(normal(1, m, n), coefficients, method=method, dtype=dtype)
    counted = flops(method, m, n, coefficients, dtype, device)
    # The FLOPs estimate is not exact, because the row blocks of symmetric matmuls may have unequal sizes.
    assert 0.98 < counter.get_total_flops() / counted < 1.02


@pytest.mark.parametrize(
    ("method", "steps", "dtype", "n", "with_n", "small"),
    # `with_n` and `small` are the coefficients in the expected number of FLOPs, with_n * m^2 n + small * m^3.
    [
        ("standard", KELLER, FP64, 512, 20, 10),
        # In fp64, the Gram form does not restart.
        ("gram", KELLER, FP64, 512, 4, 34),
        # In fp32, the Gram form restarts once, with a new Gram matrix of the updated iterate X.
        ("gram", POLAR, FP32, 512, 8, 28),
        # In fp16 and with n/m above 5/2, the Gram form restarts without recomputing the Gram matrix from X. The steps
        # take 4 m^2 n + 28 m^3 FLOPs. Two m x m matmuls with an fp32 operand, each computed as two fp16 matmuls, add 8
        # m^3. Merging the factors Q from before and after the restart adds 2 m^3.
        ("gram", POLAR, FP16, 512, 4, 38),
        ("gram", POLAR, FP16, 310, 8, 28),
        ("gram", POLAR, FP16, 128, 8, 28),
    ],
)
def test_flops_of_five_quintic_steps_are_the_published_counts(
    method: str, steps: Any, dtype: torch.dtype, n: int, with_n: int, small: int
) -> None:
    assert flops(method, 128, n, steps, dtype, CUDA) == with_n * 128 * 128 * n + small * 128**3


# -------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("rows", "cols", "device", "dtype", "wanted", "says"),
    [
        (64, 64, CPU, FP32, Choice("standard", FP32), "by rule: at n/m = 1.00 the Gram form has 1.07x of the work"),
        (64, 80, CPU, FP32, Choice("standard", FP32), "by rule: at n/m"),
        (64, 256, CPU, FP32, Choice("gram", FP32), r"by rule: at n/m = 4.00 .* \(taken below 0.75x\)"),
        (256, 64, CPU, FP32, Choice("gram", FP32), "by rule: at n/m = 4.00"),
        (64, 256, CUDA, None, Choice("gram", FP16), "by rule: at n/m"),
        (64, 64, CUDA, None, Choice("standard", BF16), "by rule: at n/m"),
        (64, 256, CPU, BF16, Choice("standard", BF16), "not safe in torch.bfloat16"),
        (64, 256, CUDA, BF16, Choice("standard", BF16), "not safe in torch.bfloat16"),
        (64, 256, CUDA, FP64, Choice("gram", FP64), "by rule: at n/m"),
    ],
    ids=str,
)
def test_the_rule_takes_the_gram_form_for_long_matrices_but_not_in_bf16(
    rows: int, cols: int, device: torch.device, dtype: Any, wanted: Choice, says: str
) -> None:
    found = Choice.made("auto", dtype, (rows, cols), KELLER, device)
    assert found == wanted and re.search(says, found.reason), found


def test_the_reason_of_a_choice_is_not_compared() -> None:
    """The reason of a `Choice` must not affect its equality or its `repr`, by which ranks compare plans."""
    one, other = Choice("gram", FP32, "by rule"), Choice("gram", FP32, "by ns_dtype")
    assert one == other and repr(one) == repr(other) and str(one) == "gram float32"
    assert one != Choice("gram", FP16) and repr(one) != repr(Choice("gram", FP16))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"method": "standard"}, "standard (bfloat16|float32), the default of standard on cpu"),
        ({"method": "gram"}, "gram float32, the default of gram on cpu"),
        ({"method": "gram", "ns_dtype": torch.float16}, "gram float16, by ns_dtype"),
        ({"method": "torch"}, "torch bfloat16, as in torch.optim.Muon"),
        ({}, "by rule: .*; the default of (standard|gram) on cpu"),
    ],
    ids=str,
)
def test_the_plan_says_what_the_products_are_and_why(how: dict[str, Any], says: str) -> None:
    plan = Muon([("w", nn.Parameter(normal(12, 48)))], lr=1e-3, **how).prepare()
    assert re.search(f"12x48: {says}" if "by rule" not in says else says, str(plan))


def _stepped_apart(method: Any) -> tuple[str, bool]:
    """Take a step on a matrix that is replicated on two ranks whose settings differ. With the method "auto", the second
    rank reports a different machine. With other methods, it sets a different precision flag. Return the plan's text,
    and whether the step left the weight unchanged."""
    rank, real, flags = dist.get_rank(), binding_module.machine_stamp, torch.backends.mkldnn.matmul
    p, before_flags = nn.Parameter(normal(12, 48)), flags.fp32_precision
    p.grad, before = normal(12, 48, seed=3), p.detach().clone()
    optimizer = Muon([("w", p)], lr=0.1, process_group=dist.group.WORLD, method=method)
    try:
        flags.fp32_precision = "bf16" if rank and method != "auto" else before_flags
        stamp = (lambda device, flags: "other chip") if rank and method == "auto" else real
        with mock.patch.object(binding_module, "machine_stamp", stamp):
            optimizer.step()
    finally:
        flags.fp32_precision = before_flags
    return str(optimizer.plan), torch.equal(p, before)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("auto", "machines differ: ranks 0 have {own}; ranks 1 have other chip"),
        ("torch", r"machines differ.*fp32_precision"),  # The method "torch" uses torch's global precision flags.
        # Unlike "torch", the method "standard" sets the precision flags itself, so flags that differ between ranks are
        # not reported.
        ("standard", r"^(?!.*machines differ)"),
    ],
)
def test_the_plan_which_is_one_says_how_ranks_are_unlike(method: str, says: str, world2: RankPool) -> None:
    (plan, still), (other, also_still) = world2.run(_stepped_apart, method)
    assert not still and not also_still
    says = says.format(own=re.escape(str(machine_stamp(CPU))))
    assert re.search(says, plan, re.DOTALL) and re.search(says, other, re.DOTALL)
    assert len({tuple(re.findall(r"12x48: [^,]*", text)) for text in (plan, other)}) == 1


# ------------------------------------------------------------------------------------------------ never a bad number


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_zeros_take_the_place_of_a_non_finite_fast_result(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the fast method returns non-finite values for a finite gradient, the result must be replaced by zeros with a
    warning. If the gradient itself is non-finite, the result must stay non-finite without a warning."""
    x, watch, real = normal(4, 8, 40), FiniteWatch(), ITERATIONS["gram"]
    x[3, 0, 0] = bad
    sound = orthogonalize(x, KELLER, method="gram")

    def spoiled(y: Tensor, **given: Any) -> Tensor:
        out = real(y, **given)
        out[1, 2, 3] = bad
        return out

    monkeypatch.setitem(ITERATIONS, "gram", spoiled)
    found = orthogonalize(x, KELLER, method="gram", watch=watch)
    assert torch.equal(found[[0, 2]], sound[[0, 2]])
    assert not found[1].any() and not found[3].isfinite().any()
    watch.send()
    with pytest.warns(UserWarning, match="'gram' on 8x40 gave a non-finite result for 1 of 4 finite matrices in an"):
        watch.report()


@pytest.mark.parametrize(("name", "steps"), [("keller", 30), ("deepseek_v4", 10), ("polar_express", 12)])
def test_long_schedules_do_not_break_down_in_fp16(name: str, steps: int) -> None:
    """Singular values must be near 1 after long schedules in fp16. The restarts of the Gram form keep rounding noise in
    the null space from overflowing, so that no fallback is needed."""
    x = spectrum("rank 16", 128, 512)
    found = orthogonalize(x[None].float(), schedule(name, steps).triples, method="gram", dtype=FP16)[0]
    values = torch.linalg.svdvals(found.double())
    assert float(values[:16].min()) > 0.65 and float(values.max()) < 1.25


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_global_precision_flags_change_nothing(method: str) -> None:
    x, flags = normal(2, 40, 130), torch.backends.mkldnn.matmul
    before, wanted = flags.fp32_precision, orthogonalize(x, KELLER, method=method, dtype=FP32)
    flags.fp32_precision = "bf16"
    try:
        assert torch.equal(orthogonalize(x, KELLER, method=method, dtype=FP32), wanted)
        assert flags.fp32_precision == "bf16", "the caller's flag was not put back"
    finally:
        flags.fp32_precision = before


# torch 2.11 itself, not shardmuon, causes the DeprecationWarning about torch.jit.script_method.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_neither_a_compiled_step_nor_compiled_clipping_is_traced() -> None:
    import torch._dynamo

    results = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        params = [nn.Parameter(normal(4 + i, 9 + 2 * i, seed=i)) for i in range(12)]
        for i, p in enumerate(params):
            p.grad = normal(*p.shape, seed=50 + i)
        optimizer = Muon(params, lr=0.1, method="standard")
        calls = optimizer.step, partial(clip_grad_norm_, optimizer, 5.0)
        for call in calls * 3:
            torch.compile(call, backend="eager")() if compiled else call()
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["frames"]["total"] < 10
    torch._dynamo.reset()


# --------------------------------------------------------------------------------------------- bits, and the wire

WIRES = [  # Each row gives the method, the matmul dtype, and the dtype in which ranks exchange data.
    ("standard", FP32, FP32),
    ("standard", BF16, BF16),
    ("standard", FP16, BF16),
    ("gram", FP16, BF16),
    ("gram", FP32, FP32),
    ("torch", None, BF16),
    ("standard", FP64, FP64),
]


def _travelled(options: dict[str, Any]) -> tuple[bool, int]:
    found = Comparison.with_dense("fsdp2", table={"w": ParamCase((12, 48), "")}, steps=1, lr=0.1, **options)
    return found.bitwise, found.traffic.bytes_sent


@pytest.mark.parametrize(("method", "dtype", "wire"), WIRES, ids=str)
def test_half_precision_products_travel_in_bf16_and_one_process_rounds_alike(
    method: Any, dtype: Any, wire: torch.dtype, world2: RankPool
) -> None:
    options: dict[str, Any] = {"method": method, "ns_dtype": dtype}
    found = world2.run(_travelled, options)
    assert [bitwise for bitwise, _ in found] == [True, True]
    assert sum(sent for _, sent in found) == 12 * 48 * wire.itemsize
    p = nn.Parameter(torch.zeros(12, 48))
    p.grad = normal(12, 48, seed=3)
    Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn="none", **options).step()
    rounded = p.bfloat16().to(p.dtype)
    assert torch.equal(rounded, p) == (wire == BF16 or dtype == BF16), "an update of other bits than its wire has"
