"""Compare each Muon variant with its original code: relative differences of five updates, and rounding errors.

    PYTHONPATH=dion:Emerging-Optimizers python benchmarks/variants_origins.py --nanochat nanochat \
        --modded-nanogpt modded-nanogpt

The script takes less than a minute on a CPU. The original projects are read from your own checkouts; none is part of
this repository. microsoft/dion and NVIDIA-NeMo/Emerging-Optimizers (with absl-py) must be on PYTHONPATH;
karpathy/nanochat and KellerJordan/modded-nanogpt are given as folders. These two are training programs, so only the
required functions and classes of a file are executed. A project that is not found is reported and skipped. Nothing is
compiled (TORCHDYNAMO_DISABLE=1).

The original code is called the origin of the variant. Both start with the same weights and get the same gradients,
whose rows differ in scale by up to 100. Both use the origin's coefficients, momentum, decay and learning-rate scale.
Every origin runs three times: unchanged (with bf16 products), with its casts to bf16 replaced by fp32, and with all its
casts replaced by fp64. The difference between an origin's run in bf16 or fp32 and its run in fp64 is called the band.
The band estimates the rounding error of a run, so two runs that differ by more than twice the band are "outside". Runs
with cautious decay can differ more: if a weight times its update is zero up to rounding, the weight may decay in one
run and not in the other.

The last column of the table shows that the comparison can detect errors: it gives the difference from the origin if
shardmuon's variant lacks one of its stages.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from origins import arithmetic, blob, emerging, folder, taken
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.auditing.reference import relative_error

SHAPES = ((256, 64), (192, 128), (128, 128), (128, 192), (64, 256))
STEPS = 5
LR, MOMENTUM, BETA2 = 0.02, 0.95, 0.95
PRODUCTS = (torch.float32, torch.bfloat16)
KELLER = ((3.4445, -4.7750, 2.0315),) * 5


# --------------------------------------------------------------------------------------------------------- what is run


class Case(NamedTuple):
    """An origin (another project's optimizer) and the variant of shardmuon to compare with it.

    Attributes:
        origin: The name of the origin.
        variant: The variant of shardmuon; any other options follow after a comma.
        source: The part of the origin that is run, and its version.
        theirs: A function from a parameter to the origin's optimizer, an object with a `step` method.
        ours: Options of `Muon` that match the origin's settings. An option can be a function of the matrix's shape.
        without: Variants that each lack at least one stage of `variant`. The value None stands for plain Muon.
        another_rule: A function that returns True for shapes on which the origin follows a different rule.
        remark: A note on behaviour of the origin that does not follow from its settings.
    """

    origin: str
    variant: str
    source: str
    theirs: Callable[[nn.Parameter], Any]
    ours: dict[str, Any]
    without: tuple[str | None, ...] = (None,)
    another_rule: Callable[[tuple[int, int]], bool] = lambda shape: False
    remark: str = ""


def scaled_norm(coefficients: Sequence[Sequence[float]], factor: float) -> tuple[tuple[float, ...], ...]:
    """Convert coefficients meant to start from X / (factor ||X||) into equivalent ones that start from X / ||X||."""
    (a, b, c), *rest = coefficients
    return ((a / factor, b / factor**3, c / factor**5), *(tuple(row) for row in rest))


def nanochat(args: argparse.Namespace) -> list[Case]:
    file = folder(args.nanochat, "--nanochat") / "nanochat" / "optim.py"
    names = ("polar_express_coeffs", "muon_step_fused", "MuonAdamW")
    found = taken(file, names, {"COMPUTE_DTYPE": torch.bfloat16})

    def theirs(p: nn.Parameter) -> Any:
        group = {"params": [p], "kind": "muon", "lr": LR, "momentum": MOMENTUM, "ns_steps": 5}
        return found["MuonAdamW"]([{**group, "beta2": BETA2, "weight_decay": 0.1}])

    stages = ("muon_eq", "normuon", "cautious")
    ours = {
        "weight_decay": lambda rows, cols: 0.1 * math.sqrt(max(1, rows / cols)),
        "ns_coefficients": scaled_norm(found["polar_express_coeffs"], 1.01),
    }
    without = tuple("+".join(stage for stage in stages if stage != left) for left in stages[:2])
    remark = (
        "sets the norm of each update to sqrt(min(m, n)), which ours does not; adds 1e-6 to the norm, clamps rows' "
        "norms at 1e-6; its decay is scaled by the shape like the update, so ours "
    )
    remark += "is given weight_decay times sqrt(max(1, rows / cols))"
    source = f"MuonAdamW of {blob(file)}"
    ours_lacks = lambda shape: True  # noqa: E731
    return [Case("nanochat", "+".join(stages), source, theirs, ours, without, another_rule=ours_lacks, remark=remark)]


def dion(args: argparse.Namespace) -> list[Case]:
    module = importlib.import_module("dion.normuon")
    table = importlib.import_module("dion.polar_express")._POLAR_EXPRESS_COEFFS

    def theirs(p: nn.Parameter) -> Any:
        options = {"weight_decay": 0.1, "cautious_wd": True, "nesterov": True, "adjust_lr": None}
        return module.NorMuon([p], lr=LR, mu=MOMENTUM, muon_beta2=BETA2, **options)

    ours = {"weight_decay": 0.1, "adjust_lr_fn": "none"}
    ours["ns_coefficients"] = scaled_norm(table, 1.02)
    remark = "divides by sqrt(v) + 1e-8; takes the mean along columns of wide matrices, too, where ours and the others "
    source = f"NorMuon of {blob(Path(module.__file__))}"
    wide = lambda shape: shape[0] < shape[1]  # noqa: E731
    return [
        Case("dion", "normuon+cautious", source, theirs, ours, another_rule=wide, remark=remark + "take it along rows"),
    ]


class ModdedNorMuon:
    """An optimizer made of modded-nanogpt's functions for orthogonalization and NorMuon, without bit-packed weights."""

    def __init__(self, p: nn.Parameter, found: dict[str, Any]) -> None:
        self._p, self._found = p, found
        self._momentum, self._dim = torch.zeros_like(p.data)[None], -1 if p.shape[0] >= p.shape[1] else -2
        self._second = self._momentum.float().mean(self._dim, keepdim=True)

    def step(self) -> None:
        assert self._p.grad is not None
        found, grad = self._found, self._p.grad.clone()[None]
        o = found["polar_express"](grad, self._momentum, torch.tensor(MOMENTUM))
        reduce = found["NorMuonAndAdam._apply_normuon_variance_reduction"]
        o = reduce(o, self._second, BETA2, self._dim)
        self._p.data.sub_(o[0].float(), alpha=LR)


def modded(args: argparse.Namespace) -> list[Case]:
    file = folder(args.modded_nanogpt, "--modded-nanogpt") / "train_gpt.py"
    method = "NorMuonAndAdam._apply_normuon_variance_reduction"
    products = {  # plain torch versions of modded-nanogpt's Triton kernels
        "XXT": lambda x, out: torch.matmul(x, x.mT, out=out),
        "XTX": lambda x, out: torch.matmul(x.mT, x, out=out),
        "ba_plus_cAA": lambda a, alpha, beta, out: torch.add(beta * a, alpha * (a @ a), out=out),
    }
    found = taken(file, ("polar_express_coeffs", "polar_express", method), products)
    found[method] = found["_apply_normuon_variance_reduction"]
    ours = {"ns_coefficients": scaled_norm(found["polar_express_coeffs"], 1.02)}
    ours |= {"weight_decay": 0.0, "adjust_lr_fn": "none"}
    source = f"polar_express and {method} of {blob(file)}"
    remark = "adds 1e-6 to the norm; its Triton kernels are replaced by torch's products; the update stays in bf16"
    case = Case("modded-nanogpt", "normuon", source, lambda p: ModdedNorMuon(p, found), ours, remark=remark)
    return [case]


def emerging_optimizers(args: argparse.Namespace) -> list[Case]:
    adaptive = emerging("orthogonalized_optimizers.adaptive_muon")
    hyperball = emerging("orthogonalized_optimizers.muon_hyperball")
    common_options = {"lr": LR, "momentum": MOMENTUM, "nesterov": True}
    keller = {**common_options, "coefficient_type": "simple", "scale_mode": "shape_scaling"}

    def normuon(p: nn.Parameter) -> Any:
        return adaptive.AdaptiveMuon([p], **keller, weight_decay=0.1, moment2_method="normuon", beta2=BETA2)

    def ball(p: nn.Parameter) -> Any:
        radius = float(torch.linalg.vector_norm(p.detach()))
        return hyperball.MuonHyperball([p], **keller, weight_decay=0.0, hyperball_radius=radius)

    def case(variant: str, where: str, theirs: Any, ours: dict[str, Any], **more: Any) -> Case:
        module, _, name = where.rpartition(".")
        source = f"{name} of {blob(Path(emerging(module).__file__))}"
        return Case("Emerging-Optimizers", variant, source, theirs, {"ns_coefficients": KELLER, **ours}, **more)

    decayed, none = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    clamp = "clamps the mean of squares at 1e-8, ours at 1e-10"
    kept = "its radius is set to the norm of the weights, which ours keeps in fp32"
    folder_name = "orthogonalized_optimizers"
    return [
        case("normuon", f"{folder_name}.adaptive_muon.AdaptiveMuon", normuon, decayed, remark=clamp),
        case(
            "hyperball",
            f"{folder_name}.muon_hyperball.MuonHyperball",
            ball,
            none | {"adjust_lr_fn": "none"},
            remark=kept,
        ),
    ]


ORIGINS: dict[str, Callable[[argparse.Namespace], list[Case]]] = {
    "nanochat": nanochat,
    "dion": dion,
    "modded-nanogpt": modded,
    "Emerging-Optimizers": emerging_optimizers,
}


# ------------------------------------------------------------------------------------------------------- the comparison


def problem(shape: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """Random weights and gradients in fp32. The rows of each gradient have scales from 0.01 to 1."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    rows = torch.logspace(-2, 0, shape[0])[:, None]
    grads = [torch.randn(shape, generator=generator) * rows for _ in range(STEPS)]
    return torch.randn(shape, generator=generator) * 0.02, grads


def updates_of(make: Callable[[nn.Parameter], Any], weights: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Run one step for each gradient, in the dtype of the weights; return the change that each step makes, in fp64."""
    p = nn.Parameter(weights.clone())
    optimizer, found = make(p), []
    for grad in grads:
        before = p.detach().clone()
        p.grad = grad.to(weights.dtype, copy=True)
        optimizer.step()
        found.append(before.double() - p.detach().double())
    return found


def theirs_in(case: Case, shape: tuple[int, int], products: torch.dtype) -> list[Tensor]:
    weights, grads = problem(shape)
    with arithmetic(products):
        return updates_of(case.theirs, weights.to(torch.float32), [g.to(torch.float32) for g in grads])


def ours_in(case: Case, shape: tuple[int, int], products: torch.dtype, variant: str | None) -> list[Tensor]:
    weights, grads = problem(shape)
    how = {"method": "standard", "ns_dtype": products}
    wide = torch.float64 if products == torch.float64 else torch.float32

    options = {key: value(*shape) if callable(value) else value for key, value in case.ours.items()}

    def make(p: nn.Parameter) -> Muon:
        return Muon([p], lr=LR, momentum=MOMENTUM, variant=variant, **how, **options)

    return updates_of(make, weights.to(wide), [g.to(wide) for g in grads])


def differences(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [relative_error(a, b) for a, b in zip(found, expected, strict=True)]


def compare(case: Case, shape: tuple[int, int]) -> dict[str, Any]:
    """Compare the updates of a variant with those of the original code (the origin) for one shape. Return a dict with
    the relative differences in fp64, fp32 and bf16, the origin's rounding errors in fp32 and bf16, and the largest fp64
    difference of each version of the variant that lacks a stage."""
    exact = theirs_in(case, shape, torch.float64)
    row: dict[str, Any] = {"origin": case.origin, "variant": case.variant, "shape": shape}
    variant = case.variant.partition(",")[0]
    row["float64"] = differences(ours_in(case, shape, torch.float64, variant), exact)
    for products in PRODUCTS:
        reference = theirs_in(case, shape, products)
        row[_name(products)] = differences(ours_in(case, shape, products, variant), reference)
        row[f"band {_name(products)}"] = differences(reference, exact)
    row["another rule"] = case.another_rule(shape)
    left = [max(differences(ours_in(case, shape, torch.float64, v), exact)) for v in case.without]
    row["left out"] = dict(zip(map(str, case.without), left, strict=True))
    return row


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inside(row: dict[str, Any], products: torch.dtype) -> bool:
    """True if the variant differs from the original code by at most twice that code's rounding error, at every step."""
    pairs = zip(row[_name(products)], row[f"band {_name(products)}"], strict=True)
    return all(difference <= 2 * band for difference, band in pairs)


def verdict(row: dict[str, Any], products: torch.dtype) -> str:
    if row["another rule"]:
        return "another rule"
    return "inside" if inside(row, products) else "OUTSIDE"


def written(row: dict[str, Any]) -> str:
    variant, comma, more = row["variant"].partition(",")
    return f"`{variant}`{comma}{more}"


def table(rows: list[dict[str, Any]]) -> str:
    """A table with a row for each variant and shape: the largest difference from the original code over all steps."""
    lines = [
        "| origin | variant | shape | fp64 | fp32 | its band | | bf16 | its band | | a stage left out |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["origin"], written(row), "x".join(map(str, row["shape"])), f"{max(row['float64']):.0e}"]
        for products in PRODUCTS:
            name = _name(products)
            cells += [f"{max(row[name]):.1e}", f"{max(row[f'band {name}']):.1e}", verdict(row, products)]
        lines.append(f"| {' | '.join(cells)} | {min(row['left out'].values()):.1e} |")
    return "\n".join(lines)


def steps_table(rows: list[dict[str, Any]]) -> str:
    """A table of the difference from the original code, and of that code's own rounding error, at every step. Each
    variant is shown for one shape."""
    lines = [
        "| origin | variant | shape | products | " + " | ".join(f"step {i + 1}" for i in range(STEPS)) + " |",
        "|---" * (4 + STEPS) + "|",
    ]
    seen = set()
    for row in rows:
        if (row["origin"], row["variant"]) in seen:
            continue
        seen.add((row["origin"], row["variant"]))
        for products in PRODUCTS:
            name = _name(products)
            pairs = zip(row[name], row[f"band {name}"], strict=True)
            cells = [row["origin"], written(row), "x".join(map(str, row["shape"])), name]
            lines.append(f"| {' | '.join(cells + [f'{d:.1e} / {b:.1e}' for d, b in pairs])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, help="a checkout of karpathy/nanochat")
    parser.add_argument("--modded-nanogpt", type=Path, help="a checkout of KellerJordan/modded-nanogpt")
    parser.add_argument("--name", default="variants_origins", help="name of the result file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads would not help with such small matrices
    rows, sources, absent = [], [], []
    for name, cases_of in ORIGINS.items():
        try:
            cases = cases_of(args)
        except (ImportError, FileNotFoundError) as error:
            absent.append(f"{name} ({error})")
            continue
        for case in cases:
            rows += [compare(case, shape) for shape in SHAPES]
            remark = case.remark[:1].upper() + case.remark[1:]
            sources.append(f"- {case.origin}, {written(rows[-1])}: {case.source}. {remark}.")
    wrong = [row for row in rows for p in PRODUCTS if verdict(row, p) == "OUTSIDE"]
    lines = [
        f"Relative difference of updates to the origin's: the largest of {STEPS} steps. `its band`: how far the",
        "origin's own run in this arithmetic is from its run in fp64. Inside: at every step at most twice that.",
        "`fp64`: both in fp64, so the formulas and the origin's epsilons alone. `a stage left out`: how far ours is in",
        "fp64 without one of the stages, whichever shows least.",
        "",
        table(rows),
        "",
        f"{len(wrong)} outside. Not found: {', '.join(absent) or 'none'}.",
        "",
        "## What was run",
        "",
        *sources,
        "",
        "## Step by step: difference / band",
        "",
        steps_table(rows),
    ]  # fmt: skip
    common.write(args.name, "\n".join(lines), rows)
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
