"""Rounding errors of alternative ways to compute parts of an update: norms, MuonEq and the Newton-Schulz polynomial.

    python benchmarks/forms.py        # a minute on one core

All results are compared with fp64. Half precision is emulated by rounding operands and results where tensor cores do.
To measure another commit, run `PYTHONPATH=<its checkout>/src python benchmarks/forms.py --only iterations`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.schedules import Triples, schedule
from shardmuon.variants import MuonEq

SPECTRA = ("gauss", "log", "rank16", "power")


def drawn(kind: str, rows: int, cols: int, seed: int = 0) -> Tensor:  # (rows, cols), fp64
    """A random matrix. "gauss" is Gaussian. The other kinds have given singular values: log-spaced from 1 to 1e-3
    ("log"), 16 values of 1 and the rest 1e-4 ("rank16"), or 1, 1/2, 1/3, ... ("power")."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if kind == "gauss":
        return x
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    count = torch.arange(len(s), dtype=torch.float64)
    values = {
        "log": torch.logspace(0, -3, len(s), dtype=torch.float64),
        "rank16": torch.where(count < 16, 1.0, 0.0) + 1e-4,
        "power": 1 / (count + 1),
    }
    return (u * values[kind]) @ vh


def exact(x: Tensor, steps: Triples) -> Tensor:
    """The result of the Newton-Schulz steps, computed in fp64."""
    y = x.double() / x.double().norm()
    tall = y.shape[0] > y.shape[1]
    y = y.T if tall else y
    for a, b, c in steps:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if tall else y


def error(found: Tensor, wanted: Tensor) -> float:
    """The error of `found` relative to `wanted`, in the Frobenius norm."""
    return float((found.double() - wanted).norm() / wanted.norm())


def iterations() -> None:
    """Print errors of the package's Newton-Schulz iteration on fp32 input. Print them again with input and result
    rounded to bf16, as when matrices are sent in bf16."""
    steps = schedule("keller").triples
    print("| spectrum | shape | method, products | error | with a bf16 wire |\n|---|---|---|---|---|")
    for kind in ("gauss", "log"):
        for rows, cols in ((256, 1024), (1024, 256), (2048, 2048)):
            if kind == "log" and rows == 2048:
                continue  # the SVD of a matrix this large takes a minute
            x = drawn(kind, rows, cols)
            wanted = exact(x, steps)
            for method, dtype in (
                ("standard", torch.float32),
                ("gram", torch.float32),
                ("standard", torch.bfloat16),
                ("gram", torch.float16),
            ):
                if rows == 2048 and dtype != torch.float32:
                    continue  # products of this size are slow on CPUs that emulate bf16
                plain = orthogonalize(x[None].float(), steps, method=method, dtype=dtype)[0]
                sent = orthogonalize(x[None].bfloat16().float(), steps, method=method, dtype=dtype)[0].bfloat16()
                wire = "-" if dtype == torch.float32 else f"{error(sent, wanted):.1e}"
                name = str(dtype).removeprefix("torch.")
                print(f"| {kind} | {rows}x{cols} | {method}, {name} | {error(plain, wanted):.1e} | {wire} |")


def norms() -> None:
    """Print errors of two ways to compute a norm: one fp32 sum, and chunks of 2^14 elements combined in fp64."""
    print("| elements, dtype | one sum | chunks |\n|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for rows, cols in ((384, 384), (384, 1536), (2048, 8192)):
            x = drawn("gauss", rows, cols).to(dtype)
            wanted = x.double().norm()
            one = torch.linalg.vector_norm(x, dtype=torch.float32).double()
            parts = torch.linalg.vector_norm(x.view(-1, 1 << 14), dim=1, dtype=torch.float32)
            chunks = torch.linalg.vector_norm(parts, dtype=torch.float64)
            name = f"{rows}x{cols} {str(dtype).removeprefix('torch.')}"
            print(f"| {name} | {abs(float(one / wanted - 1)):.1e} | {abs(float(chunks / wanted - 1)):.1e} |")


def _mean_norm(x: Tensor) -> Tensor:  # (m, n) -> the same shape, fp32
    """Scale every row to the root mean square of all row norms, computed in fp64. MuonEq used to do this on CPUs."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    factor = torch.where(norms > 0, norms.square().mean().sqrt() / norms, 0.0).clamp_(max=2.0**120)
    return x.float() * factor.float()


def _one_norm(x: Tensor) -> Tensor:  # (m, n) -> the same shape and dtype
    """Scale every row to norm 1 with the package's `MuonEq`."""
    found = x.clone().unsqueeze(0)
    MuonEq().run_(found)
    return found[0]


def muon_eq() -> None:
    """Compare MuonEq with rows scaled to their mean norm and with rows scaled to norm 1. For each, print two errors
    relative to fp64: that of the scaled matrix, up to a common factor, and that of the update computed from it."""
    steps, rows, cols = schedule("keller").triples, 128, 256
    zeros, tiny, huge = (drawn("gauss", rows, cols, seed) for seed in (1, 2, 3))
    zeros[::4] = 0
    for extreme, sign in ((tiny, -1), (huge, 1)):
        extreme[:2] *= torch.tensor([[10.0 ** (30 * sign)], [10.0 ** (20 * sign)]], dtype=torch.float64)
    cases = {kind: drawn(kind, rows, cols) for kind in SPECTRA}
    cases |= {"every fourth row zeros": zeros, "rows by 1e-30, 1e-20": tiny, "rows by 1e30, 1e20": huge}
    print("| rows | dtype | their mean norm: rows, update | norm 1: rows, update |\n|---|---|---|---|")
    for what, drawn_rows in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn_rows.to(dtype)
            wanted = torch.nn.functional.normalize(x.double(), dim=-1, eps=1e-300)  # rows of zeros remain zero
            update, cells = exact(wanted, steps), []
            for form in (_mean_norm, _one_norm):
                out = form(x)
                off = error(out.double() / out.double().norm(), wanted / wanted.norm())
                found = orthogonalize(out[None].to(dtype), steps, method="standard", dtype=dtype)[0].to(dtype)
                cells.append(f"{off:.1e}, {error(found, update):.2e}")
            print(f"| {what} | {str(dtype).removeprefix('torch.')} | {' | '.join(cells)} |")


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def _steps(x: Tensor, steps: Triples, dtype: torch.dtype, fold: str) -> Tensor:
    y = _rounded((x / x.norm()).float(), dtype)
    for a, b, c in steps:
        gram = _rounded(y @ y.T, dtype)
        poly = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        if fold == "no":
            y = _rounded(torch.addmm(y, _rounded(poly, dtype), y, beta=a), dtype)
            continue
        poly = _rounded(poly, dtype) if fold == "rounded twice" else poly
        poly.diagonal().add_(a)
        y = _rounded(_rounded(poly, dtype) @ y, dtype)
    return y


def folding() -> None:
    """Print the error of Newton-Schulz steps computed as (a I + b G + c G^2) X, where G = X X^T, divided by the error
    of steps computed as a X + (b G + c G^2) X."""
    print("| schedule, products | " + " | ".join(f"{kind} {n}" for kind in SPECTRA for n in ("m", "4m")) + " |")
    print("|---|" + "---|" * 2 * len(SPECTRA))
    for name in ("keller", "quintic", "polar_express", "cans", "deepseek_v4"):
        steps = schedule(name).triples
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for fold in ("rounded once", "rounded twice") if dtype != torch.float32 else ("rounded once",):
                ratios = []
                for kind in SPECTRA:
                    for cols in (128, 512):
                        errors = {"no": 0.0, fold: 0.0}
                        for seed in range(3):
                            x = drawn(kind, 128, cols, seed)
                            wanted = exact(x, steps)
                            for form in errors:
                                errors[form] += error(_steps(x, steps, dtype, form), wanted)
                        ratios.append(f"{errors[fold] / errors['no']:.2f}")
                print(f"| {name}, {str(dtype).removeprefix('torch.')}, {fold} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    tables = {"iterations": iterations, "norms": norms, "muon_eq": muon_eq, "folding": folding}
    parser.add_argument("--only", choices=tables, action="append")
    torch.set_num_threads(1)
    for table in parser.parse_args().only or tables:
        print(f"\n## {table}\n")
        tables[table]()
