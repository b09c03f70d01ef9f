"""Random matrices, matrices with known singular values, and optimizer steps on random gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Newton-Schulz variants are compared on five matrices, each given as (kind of spectrum, rows, cols).
SPECTRA = (
    ("gauss", 256, 1024),
    ("gauss", 256, 256),
    ("log", 256, 1024),
    ("power", 256, 1024),
    ("rank 16", 256, 1024),
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def set_gradients(params: Iterable[Tensor], seed: int) -> None:
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=1000 * seed + i, dtype=p.dtype)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], seeds: Iterable[int]) -> None:
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


def assert_equal(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Assert that corresponding tensors have equal dtypes and values. NaNs are never equal."""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {i} differs by {(a.double() - b.double()).abs().max():.2e}"


def spectrum(kind: str, rows: int, cols: int) -> Tensor:  # returns a tensor of shape (rows, cols) in fp64
    """Return a matrix with the given kind of spectrum.

    The kind "gauss" has standard normal entries. The kind "log" has log-spaced singular values from 1 to 1e-3, and
    "power" has singular values 1/i. The kind "rank r" is a product of two normal matrices and has rank r.
    """
    if kind == "gauss":
        return normal(rows, cols, dtype=torch.float64)
    if kind.startswith("rank"):
        rank = int(kind.split()[1])
        return normal(rows, rank, dtype=torch.float64) @ normal(rank, cols, seed=1, dtype=torch.float64)
    u, _ = torch.linalg.qr(normal(rows, rows, dtype=torch.float64))
    v, _ = torch.linalg.qr(normal(cols, rows, seed=1, dtype=torch.float64))
    index = torch.arange(rows, dtype=torch.float64)
    return (u * {"log": 10 ** (-3 * index / (rows - 1)), "power": 1 / (1 + index)}[kind]) @ v.T


def polar_factor(x: Tensor) -> Tensor:  # returns a tensor of shape (rows, cols) in fp64
    """Return U V^T from the singular value decomposition of a matrix. Singular vectors with a singular value of zero
    are left out."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u * (s > s.amax() * 1e-12)) @ vh
