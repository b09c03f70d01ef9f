"""Tests that matmuls and orthogonalization give a matrix the same bits at every position in a batch, regardless of the
other matrices and of their number."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from tolerances import KELLER
from torch import Tensor

from shardmuon.orthogonalize import _ALIGNMENT, Products, _normalize, _operands, batch_size, empty_batch, orthogonalize
from shardmuon.orthogonalize.schedules import schedule
from shardmuon.testing.slots import _SHAPES, search

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("dtypes", "least"),
    [
        # Only bf16 matmuls depend on whether the CPU multiplies bf16 matrices in hardware, so only the bf16 case has
        # the pytest mark `numeric`.
        pytest.param((torch.bfloat16,), 1_500, marks=pytest.mark.numeric),
        ((torch.float32, torch.float16, torch.float64), 5_000),
    ],
    ids=["bf16", "others"],
)
def test_no_product_depends_on_its_slot_or_its_neighbours(dtypes: tuple[torch.dtype, ...], least: int) -> None:
    found = list(search(CPU, dtypes=dtypes, draws=3))
    assert sum(len(equal) for _, equal in found) > least
    assert [what for what, equal in found if not all(equal)] == []


# Each case gives the environment variables of a new process, and the tuples of arguments with which that process calls
# `found_with`. The case "avx2" restricts an AVX-512 CPU to AVX2, and "narrow" restricts the CPU to instructions without
# AVX.
_ELSEWHERE: dict[str, tuple[dict[str, str], list[tuple[int, int, bool]]]] = {
    "narrow": (
        {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
        [(1, 1, False), (1, 1, True)],
    ),
    "avx2": (
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        [(1, 1, False)],
    ),
    "two threads": ({"OMP_WAIT_POLICY": "passive"}, [(2, 1, False)]),
}


def _packed(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def found_with(threads: int, draws: int, packed: bool) -> tuple[int, int]:
    """Return the number of matmul results compared, and the number of those that differ between positions in a batch.
    If `packed` is True, the matrices of a batch follow each other without gaps, instead of each starting at a multiple
    of 64 bytes."""
    torch.set_num_threads(threads)
    modules = ("orthogonalize", "testing.slots") if packed else ()
    with ExitStack() as patched:
        for module in modules:
            patched.enter_context(mock.patch(f"shardmuon.{module}.empty_batch", _packed))
        shapes = [shape for shape in _SHAPES if not packed or max(shape) < 1100]
        found = list(search(CPU, shapes=shapes, dtypes=(torch.float64, torch.float32), draws=draws))
    return sum(len(equal) for _, equal in found), sum(equal.count(False) for _, equal in found)


@cache
def _elsewhere(name: str) -> list[list[int]]:
    """Run `found_with` in a new process with the environment variables of a case in `_ELSEWHERE`, once for each tuple
    of arguments in the case."""
    variables, given = _ELSEWHERE[name]
    env = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"import test_slots\nfor given in {given}: print(*test_slots.found_with(*given))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return [list(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", _ELSEWHERE)
def test_nor_with_other_instructions_or_threads(name: str) -> None:
    """Each matrix must have the same bits at every position in a batch, even with two threads or with a restricted set
    of CPU instructions."""
    assert _elsewhere(name)[0][0] > 1_000 and _elsewhere(name)[0][1] == 0


def test_packed_slots_would_be_found() -> None:
    """Negative control: if the matrices of a batch are packed without gaps and therefore not aligned to 64 bytes, some
    matmul results must depend on the position in the batch, either with restricted CPU instructions or with the full
    instruction set."""
    assert _elsewhere("narrow")[1][1] or found_with(torch.get_num_threads(), 1, True)[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(5, 257), (33, 20), (96, 200)])
def test_matrices_of_norm_one_are_taken_as_they_are_only_from_slots(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Matrices of norm 1 that each start at a multiple of 64 bytes must not be modified, and must be used without a
    copy unless a matmul needs another dtype. Unaligned matrices must be copied to aligned memory, and the results must
    have the same bits."""
    size = batch_size(rows, cols, CPU)
    x = torch.randn(size, rows, cols, generator=torch.Generator().manual_seed(0))
    x = _normalize(x, empty_batch(x.shape, dtype, CPU))
    given = x.clone()
    packed = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x)
    turned = x.mT.contiguous().mT
    shape = (rows, cols) if size == 1 else (size, rows, cols)
    products = Products(shape, CPU, dtype)
    assert (_operands(x, shape, products, unit=True).data_ptr() == x.data_ptr()) == (products.operands == dtype)
    found, *others = (orthogonalize(t, KELLER, dtype=dtype, unit=True) for t in (x, packed, turned))
    assert torch.equal(x, given) and all(torch.equal(found, other) for other in others)
    # `_operands` copies unaligned matrices to memory aligned to 64 bytes and pads the last batch with zeros.
    assert _operands(packed, shape, products, unit=True).data_ptr() % _ALIGNMENT == 0
    with mock.patch("shardmuon.orthogonalize.empty_batch", lambda *given: empty_batch(*given).fill_(math.nan)):
        assert size == 1 or not _operands(x[1:], shape, products, unit=True)[-1].any()


@contextmanager
def _aligned_operands() -> Iterator[list[int]]:
    """Assert that, in the operands and the result of every batched matmul, each matrix starts at a multiple of 64
    bytes. Yield a list to which the size of each batch is appended."""
    batches: list[int] = []
    real = {name: getattr(torch, name) for name in ("bmm", "baddbmm")}

    def watched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = real[name](*args, **kwargs)
            for t in filter(torch.is_tensor, (*args, *kwargs.values(), out)):
                assert t.data_ptr() % _ALIGNMENT == t.stride(0) * t.element_size() % _ALIGNMENT == 0
                batches.append(len(t))
            return out

        return call

    with mock.patch.object(torch, "bmm", watched("bmm")), mock.patch.object(torch, "baddbmm", watched("baddbmm")):
        yield batches


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=[pytest.mark.numeric] if d == torch.bfloat16 else []) for d in DTYPES], ids=str
)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("coefficients", ["keller", "polar_express", "cubic"])
def test_every_operand_of_a_batch_is_aligned_and_every_batch_is_full(
    coefficients: str, method: str, dtype: torch.dtype
) -> None:
    """In every batched matmul, each matrix must start at a multiple of 64 bytes, and a partial batch must be padded to
    the full batch size. The cases include cubic steps and both kinds of restart (see [Note: restarts])."""
    if method == "gram" and dtype == torch.bfloat16:
        pytest.skip("refused: see test_gram.py")
    for rows, cols in ((5, 257), (257, 5), (9, 12), (1, 5), (3, 100)):
        x = torch.randn(batch_size(rows, cols, CPU) + 1, rows, cols)
        with _aligned_operands() as batches:
            orthogonalize(x, schedule(coefficients).triples, method=method, dtype=dtype)
        assert set(batches) == {batch_size(rows, cols, CPU)}


@pytest.mark.numeric
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(5, 257), (257, 5), (17, 33), (1, 1025), (3, 1000), (40, 24), (384, 200)], ids=str)
def test_a_matrix_alone_has_the_bits_that_it_has_among_others(shape: tuple[int, int], method: str) -> None:
    """The bits of an orthogonalized matrix must depend neither on the alignment and strides of the input in memory, nor
    on the batch size or the number of batches."""
    size = batch_size(*shape, CPU)
    x = torch.randn(size + 3, *shape)
    dtype = torch.float32 if method == "gram" else None
    together = orthogonalize(x, KELLER, method=method, dtype=dtype)
    for count in {1, 2, 3, size, size + 2}:
        assert torch.equal(orthogonalize(x[:count], KELLER, method=method, dtype=dtype), together[:count])
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert torch.equal(orthogonalize(shifted, KELLER, method=method, dtype=dtype), together)
    turned = x.mT.contiguous().mT
    assert torch.equal(orthogonalize(turned, KELLER, method=method, dtype=dtype), together)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 4e-7), (torch.bfloat16, 4e-6), (torch.float64, 4e-15)], ids=str
)
def test_a_norm_is_summed_in_one_order_and_exact(dtype: torch.dtype, bound: float) -> None:
    threads = torch.get_num_threads()
    for rows, cols in ((1, 5), (17, 33), (128, 128), (129, 1000), (700, 900)):
        x = torch.randn(2, rows, cols).to(dtype)
        out = empty_batch(x.shape, torch.promote_types(dtype, torch.float32), CPU)
        alone = _normalize(x[:1], torch.empty_like(out[:1]))
        exact = x[:1].double() / math.sqrt(math.fsum(x[:1].double().square().flatten().tolist()))
        assert float((alone.double() - exact).abs().max() / exact.abs().max()) < bound
        try:
            torch.set_num_threads(2)
            assert torch.equal(_normalize(x, out)[:1], alone)
        finally:
            torch.set_num_threads(threads)
        shifted = torch.empty(x.numel() + 3, dtype=dtype)[3:].view(x.shape).copy_(x)
        assert torch.equal(_normalize(shifted, out)[:1], alone)


def test_sizes_are_powers_of_two_by_shape_and_kind_of_device_alone() -> None:
    for rows, cols in _SHAPES:
        for kind in ("cpu", "cuda"):
            size = batch_size(rows, cols, torch.device(kind))
            assert size == batch_size(cols, rows, torch.device(kind)) > 0
            assert size & (size - 1) == 0
    assert [batch_size(n, n, torch.device("cuda")) for n in (128, 768, 2048, 8192)] == [64, 4, 1, 1]
