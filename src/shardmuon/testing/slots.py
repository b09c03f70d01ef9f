"""Search for matrix products whose bits depend on the position (slot) of a matrix in a batch, or on the other matrices
in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardmuon.orthogonalize import Products, batch_size, empty_batch, orthogonalize, products_dtype
from shardmuon.orthogonalize.schedules import schedule

# Shapes for which libraries often choose special kernels: matrices with fewer rows than a vector register has elements,
# with one row more or less than a power of two, or with few rows but many columns.
_SHAPES = (
    *((1, 1), (1, 5), (2, 3), (3, 7), (5, 3), (7, 9), (8, 16), (9, 12), (10, 27), (16, 16), (16, 32), (17, 33)),
    *((1, 1025), (3, 1000), (5, 257), (257, 5), (31, 100), (33, 17), (40, 90), (63, 65), (64, 64), (64, 160)),
    *((100, 300), (127, 129), (128, 384), (255, 257), (384, 384), (384, 1536), (768, 768), (1000, 3), (1024, 1024)),
)


def search(
    device: torch.device,
    *,
    shapes: Sequence[tuple[int, int]] = _SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    draws: int = 4,
) -> Iterator[tuple[str, list[bool]]]:
    """Check whether the results for a matrix are bitwise identical at several positions (slots) in a batch. The results
    are the orthogonalized matrix and the matrix products of a Newton-Schulz step.

    Args:
        device: Device that multiplies the matrices.
        shapes: Shapes (rows, cols) of the matrices. Shapes whose batches have only one slot are skipped.
        dtypes: Dtypes of the products.
        draws: Number of random matrices for each shape and dtype. The rest of each batch contains zeros, other random
            matrices, or copies of the matrix.

    Yields:
        A pair for each combination of shape, orthogonalization method and dtype: a description of the combination, and
        a list with one bool per comparison, which is True if the results are bitwise identical. The method "standard"
        is combined with all `dtypes`, and "gram" only with its default dtype on this device, if `dtypes` contains it.
    """
    generator, of_gram = torch.Generator().manual_seed(0), products_dtype("gram", None, device)
    ways = [("standard", dtype) for dtype in dtypes]
    if of_gram in dtypes:
        ways.append(("gram", of_gram))
    for rows, cols in shapes:
        size = batch_size(rows, cols, device)
        for method, dtype in ways if size > 1 else ():
            equal = list(_comparisons((size, rows, cols), method, dtype, device, draws, generator))
            yield f"{rows}x{cols}, batches of {size}, {method} {dtype}", equal


def _comparisons(
    shape: tuple[int, int, int],
    method: str,
    dtype: torch.dtype,
    device: torch.device,
    draws: int,
    generator: torch.Generator,
) -> Iterator[bool]:
    """Place each of `draws` random matrices at several positions in a batch. At each position, orthogonalize the matrix
    and compute the matrix products of a Newton-Schulz step. Yield one bool per result, which is True if the result is
    bitwise identical to that at the first position."""
    products = Products(shape, device, dtype)
    steps = schedule("keller").triples
    for draw in range(draws):
        matrix = torch.randn(shape[1:], generator=generator)
        others = (torch.zeros(shape), torch.randn(shape, generator=generator), matrix.expand(shape))[draw % 3]
        first: list[Tensor] = []
        for slot in sorted({0, 1, shape[0] // 2, shape[0] - 1}):
            batch = others.clone()
            batch[slot] = matrix
            batch = batch.to(device)
            # Also orthogonalize the matrix in a smaller batch, which `orthogonalize` pads with zeros. In odd-numbered
            # draws, this batch also contains the next matrix of `batch`, if there is one.
            given = batch[slot : slot + 1 + draw % 2]
            whole, among = (orthogonalize(t, steps, method=method, dtype=dtype) for t in (given, batch))
            results = [*(part[slot] for part in _products_of(batch, products)), whole[0], among[slot]]
            first = first or [*results[:-1], whole[0]]
            yield from map(torch.equal, results, first)


def _products_of(batch: Tensor, products: Products) -> list[Tensor]:
    """Compute the three matrix products of one Newton-Schulz step for all matrices in a batch. Return four results: the
    last product is computed twice, once alone and once with another matrix added to it."""
    y = empty_batch(batch.shape, products.operands, batch.device)
    y.copy_(batch / torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True).clamp(min=1e-30))
    y = products.rounded_(y)
    tall = y.shape[-2] > y.shape[-1]
    squares = [empty_batch((len(y), *[min(y.shape[1:])] * 2), y.dtype, y.device) for _ in range(2)]
    gram = products.symmetric_mm(*((y.mT, y) if tall else (y, y.mT)), out=squares[0])
    poly = products.symmetric_addmm(gram, gram, gram, beta=-4.775, alpha=2.0315, out=squares[1])
    left, right = (y, poly) if tall else (poly, y)
    result, summed = (empty_batch(y.shape, y.dtype, y.device) for _ in range(2))
    return [
        gram,
        poly,
        products.mm(left, right, out=result),
        products.addmm(y, left, right, beta=3.4445, out=summed),
    ]
