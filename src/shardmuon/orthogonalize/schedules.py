"""Table of Newton-Schulz coefficient schedules and their sources.

A schedule is a tuple with one triple (a, b, c) for each Newton-Schulz step. A step maps every singular value s of a
matrix to a s + b s^3 + c s^5. The matrix is first divided by its Frobenius norm, so its singular values are at most 1,
but rounding can lift them slightly above 1. Therefore a schedule is rejected if it flips a sign or diverges for any
input up to `_MARGIN`.

[Note: adding a schedule]
    To add a schedule, change this file, tests/schedule_cases.py, docs/orthogonalization.md and CHANGELOG.md:
    1. Append a row to `_SCHEDULES`, from which all other code reads schedules. Cite the publication of the coefficients
       as the row's source, or write "ours".
    2. Run `.venv/bin/python tests/schedule_cases.py NAME`. It prints a row for `CASES` in that file, and rows for the
       tables "Schedules" and "Errors" in docs/orthogonalization.md. Append these rows.
    3. Add a line to CHANGELOG.md.

    To check the schedule, run `pytest -k NAME tests/orthogonalize`, which takes about ten seconds. A schedule only
    needs to preserve signs and to keep its outputs within bounds (see `Schedule.fault`). Do not add the schedule to
    other tests, which are meant for particular schedules. A new row does not change the results of existing schedules,
    so it needs no training curve and no new files in benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Triples = tuple[tuple[float, float, float], ...]  # one triple (a, b, c) for each step

_MARGIN = 1.01  # largest input that a schedule must handle: bf16 rounds singular values up by at most 0.4%
_LARGEST = 2.0  # a schedule whose output exceeds this bound counts as divergent; one step of "polar_express" gives 1.99
_GRID = 200_001


@dataclass(frozen=True)
class Schedule:
    """Coefficients of all Newton-Schulz steps, and their source. If the schedule has a safety factor, the coefficients
    include it.

    Attributes:
        name: Name of the schedule, or "custom".
        triples: (a, b, c) of each step.
        source: Publication of the coefficients, and changes made to them.
    """

    name: str
    triples: Triples
    source: str

    def __call__(self, s: Any) -> Any:
        """Apply all steps to singular values `s` (a float, an array or a tensor)."""
        for a, b, c in self.triples:
            square = s * s
            s = s * (a + square * (b + square * c))
        return s

    @property
    def fault(self) -> str | None:
        """Description of the smallest input for which the schedule flips the sign or diverges; None if the schedule is
        usable."""
        grid = np.linspace(0.0, _MARGIN, _GRID)[1:]
        with np.errstate(over="ignore", invalid="ignore"):
            out = self(grid)
        # NaN must count as bad, so negate the test for good outputs
        bad = np.flatnonzero(~((out > 0.0) & (out <= _LARGEST)))
        if not bad.size:
            return None
        fault = "flips signs" if out[bad[0]] <= 0.0 else "diverges"
        return f"{fault}: it maps {grid[bad[0]]:.4g} to {out[bad[0]]:.3g}"


def _divided(factor: float, *steps: tuple[float, float, float]) -> Triples:
    """Include a safety factor in the triple of each Newton-Schulz step, so that the step divides its input by the
    factor. Schedules have such a factor if it was published with the coefficients, or if they would flip signs or
    diverge without it."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in steps)


_KELLER = (3.4445, -4.7750, 2.0315)
_TAYLOR = (1.875, -1.25, 0.375)  # (15, -10, 3) / 8: coefficients of the Taylor series of 1/sqrt up to second order

# Dict from a schedule's name to three entries: the triples of the first steps, the triple of all further steps, and the
# source ("ours" for unpublished coefficients). If the second entry is a triple, the schedule has five steps by default
# and allows any other number. If the second entry is None, the schedule has exactly the listed steps.
_SCHEDULES: dict[str, tuple[Triples, tuple[float, float, float] | None, str]] = {
    "keller": ((), _KELLER, "K. Jordan 2024, https://kellerjordan.github.io/posts/muon/; torch.optim.Muon's"),
    "quintic": (
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        None,
        "You Jiacheng 2025, https://x.com/YouJiacheng/status/1905861218138804534",
    ),
    "polar_express": (
        _divided(
            1.01,
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        ),
        _TAYLOR,
        "Amsel et al. 2025, https://arxiv.org/abs/2505.16932, Algorithm 1, with its safety factor 1.01",
    ),
    "cans": (
        _divided(
            1.01,
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        None,
        "Grishina et al. 2025, arXiv 2506.10935; divided by 1.01: as published it diverges at 1.001",
    ),
    "cubic": (
        _divided(
            1.01,
            (3.3657, -3.3421, 0.0),
            (2.5744, -1.4957, 0.0),
            (2.5369, -1.4313, 0.0),
            (2.4419, -1.2764, 0.0),
            (2.2230, -0.9631, 0.0),
        ),
        None,
        "arXiv 2606.00371: a third less work; divided by 1.01: as published it flips signs at 1.004",
    ),
    "deepseek_v4": (
        (_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        None,
        "DeepSeek-V4 technical report 2026: eight of Jordan's steps and two classical ones",
    ),
}
_ALIASES = {
    "simple": "keller",  # "simple" is Emerging-Optimizers' and Megatron's name for "keller"
    "original": "keller",
    "you": "quintic",
    "you5": "quintic",
    "polarexpress": "polar_express",
    "deepseekv4": "deepseek_v4",  # "deepseekv4" is Emerging-Optimizers' name for "deepseek_v4"
    "cubic5": "cubic",
}


def schedule(coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int | None = None) -> Schedule:
    """Make a schedule from a name, from one triple, or from one triple per step.

    Args:
        coefficients: A name, one triple (a, b, c) for all steps, or a sequence with one triple per step. Valid names
            are those in docs/orthogonalization.md, and names that other libraries use for the same schedules ("simple",
            "you5", "deepseekv4").
        steps: Number of Newton-Schulz steps. The default is 5 for "keller", "polar_express" and a single triple, and
            the published number of steps for any other name. Only "keller", "polar_express" and a single triple allow a
            different number. If one triple per step is given, `steps` is ignored.

    Returns:
        The schedule. It is cached, because every optimizer step reads the coefficients of every parameter group.

    Raises:
        ValueError: The name is unknown, the number of steps is not allowed, or the schedule flips signs or diverges for
            inputs up to 1.01.
        TypeError: `coefficients` is neither a name nor numbers.
    """
    return _made(coefficients if isinstance(coefficients, str) else _numbers(coefficients), steps)


@lru_cache(maxsize=256)
def _made(coefficients: Any, steps: int | None) -> Schedule:
    name, source = "custom", "given by the caller"
    if isinstance(coefficients, str) or coefficients == _KELLER:
        name = "keller" if coefficients == _KELLER else _ALIASES.get(coefficients.lower(), coefficients.lower())
        if name not in _SCHEDULES:
            known = ", ".join(map(repr, (*_SCHEDULES, *_ALIASES)))
            raise ValueError(
                f"{coefficients!r} is not a known schedule: write one of {known}, or the triples themselves"
            )
        first, tail, source = _SCHEDULES[name]
    elif coefficients and isinstance(coefficients[0], tuple):
        first, tail, steps = coefficients, None, None
    else:
        first, tail = (), coefficients
    if steps is None:
        steps = len(first) if tail is None else 5
    if steps < 1 or (tail is None and steps != len(first)):
        allowed = f"exactly {len(first)}" if tail is None else "at least one"
        raise ValueError(f"schedule {coefficients!r} has {allowed} steps, found {steps}. Leave ns_steps out")
    further = () if tail is None else (tail,) * (steps - len(first))
    found = Schedule(name, first[:steps] + further, source)
    fault = found.fault
    if fault is not None:
        raise ValueError(
            f"schedule {name!r} {fault}. Singular values up to {_MARGIN} must stay between 0 and {_LARGEST:g} "
            "(rounding lifts some above 1). Divide them by f = 1.02: write (a / f, b / f**3, c / f**5) for each "
            "(a, b, c), or take 'keller' or 'polar_express'"
        )
    return found


def _numbers(values: Any) -> Any:
    """Convert numbers to floats and lists to tuples. Checkpoints contain lists, which are not hashable."""
    return tuple(map(_numbers, values)) if isinstance(values, (list, tuple)) else float(values)
