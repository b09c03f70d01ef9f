"""Estimate how often cutting a vector into pieces changes its fp32 norm, if the norm is computed in fp64 and rounded.

The final fp32 norm changes only if the fp64 norm lies so close to the midpoint between two fp32 numbers that the cut
moves it to the other side. This is too rare to count, so the rate is estimated as the change in the fp64 value divided
by the spacing of fp32 numbers, averaged over random vectors and cuts.
"""

from __future__ import annotations

import itertools
import math
import random
import sys

import torch
from common import commit, machine

from shardmuon.gradients.clip import _combine, _norm_of


def main(draws: int) -> None:
    """Print the estimated rate at which cuts change the fp32 norm, and the number of norms that did change."""
    draw, moves, changed = random.Random(0), 0.0, 0
    for seed in range(draws):
        size = draw.randint(1000, 60_000)
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        cuts = sorted({0, size, *(draw.randrange(size) for _ in range(draw.choice((1, 3, 7))))})
        whole = _norm_of([x], 2.0)
        cut = _combine([_norm_of([x[a:b]], 2.0) for a, b in itertools.pairwise(cuts)], 2.0)
        moves += abs(whole - cut) / math.ldexp(1.0, math.frexp(whole)[1] - 24)
        changed += float(torch.tensor(whole).float()) != float(torch.tensor(cut).float())
    print(f"{draws} draws, {changed} fp32 norms differ, expected {moves / draws:.1e} of all; {machine()}, {commit()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
