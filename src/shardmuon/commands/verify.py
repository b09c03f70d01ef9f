"""`shardmuon verify`: run every layout against the dense reference and torch.optim.Muon, and print a table."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.testing.compare import Comparison, compare_with_dense, compare_with_torch
from shardmuon.testing.frameworks import FSDP1_ROWS, ZERO_ROWS
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.pool import RankPool
from shardmuon.testing.slots import search
from shardmuon.texts import table
from shardmuon.variants import VARIANTS, names_in


@dataclass(frozen=True)
class LayoutRow:
    """Result of one layout over all ranks.

    Attributes:
        layout: Name of the layout, and of the variant of Muon if there is one.
        matrices: Matrices in the model; for "single" and on ranks' own tensors each rank has its own.
        max_difference: Largest relative difference between an update and the dense reference's.
        bitwise: True if weights and momentum equal the dense reference's bit for bit on every rank after every step,
            with products in fp32 and in bf16.
        torch_bitwise: True if, with method "torch", they equal torch.optim.Muon's bit for bit, in fp32 and in bf16.
            None with a variant, because torch.optim.Muon has none.
        collectives: Collectives of one rank in a step: exchanges, votes and reductions of norms of weights.
        orthogonalized: Newton-Schulz runs in a step, over the whole job.
        bytes_per_rank: Most bytes that one rank sent in a step: exchanges (fp32 on the wire) and reductions of norms
            (8 bytes per matrix).
    """

    layout: str
    matrices: int
    max_difference: float
    bitwise: bool
    torch_bitwise: bool | None
    collectives: int
    orthogonalized: int
    bytes_per_rank: int

    @property
    def ok(self) -> bool:
        """True if the layout keeps the contract: every result is bitwise equal."""
        return self.bitwise and self.torch_bitwise is not False and self.max_difference == 0.0

    @property
    def cells(self) -> dict[str, str]:
        """Texts of the row in the table, by column."""
        said = {None: "-", True: "yes", False: "NO"}
        return {
            "layout": self.layout,
            "matrices": str(self.matrices),
            "NS runs": str(self.orthogonalized),
            "max rel diff": f"{self.max_difference:.2e}",
            "bitwise": said[self.bitwise],
            "= torch": said[self.torch_bitwise],
            "collectives": str(self.collectives),
            "bytes/rank": str(self.bytes_per_rank),
        }


def verify_layout(pool: RankPool, layout: str, ranks: int, variant: str = "") -> LayoutRow:
    """Check one layout on a pool of ranks. A variant is compared only with the dense reference in one process, because
    torch.optim.Muon has no variants."""
    given: dict[str, Any] = {"lr": 0.02}
    fixed: dict[str, Any] = {"variant": variant} if variant else {}
    if variant and not all(VARIANTS[name].decays for name in names_in(variant)):
        fixed["weight_decay"] = 0.0
    dense, torches = list[Comparison](), list[Comparison]()
    for dtype in (torch.float32, torch.bfloat16):
        dense += pool.run(compare_with_dense, layout, ns_dtype=dtype, **given, **fixed)
        # at stage 0 with half precision DeepSpeed steps copies of the weights, which shardmuon refuses
        skipped = variant or (layout == "zero0" and dtype == torch.bfloat16)
        torches += [] if skipped else pool.run(compare_with_torch, layout, dtype=dtype, **given)
    return LayoutRow(
        layout=f"{layout} {variant}".rstrip(),
        matrices=dense[0].num_matrices,
        max_difference=_worst(c.max_difference for c in dense),
        bitwise=all(c.bitwise for c in dense),
        torch_bitwise=None if variant else all(c.bitwise for c in torches),
        collectives=max(c.traffic.exchanges + c.traffic.agreements + c.traffic.norm_reductions for c in dense),
        orthogonalized=sum(c.traffic.orthogonalized for c in dense[:ranks]),
        bytes_per_rank=max(c.traffic.bytes_sent + 8 * c.traffic.norms_sent for c in dense),
    )


def _worst(found: Iterable[float]) -> float:
    """Largest number, or NaN if any is NaN."""
    return max(found, key=lambda number: (math.isnan(number), number))


_SETS = {"torch": (*LAYOUTS, *FSDP1_ROWS), "deepspeed": tuple(ZERO_ROWS)}  # name of a set -> its layouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks to start (default: 4)")
    parser.add_argument(
        "--layout",
        action="append",
        choices=(*_SETS, *itertools.chain(*_SETS.values())),
        help="only this one, or all that torch or DeepSpeed's ZeRO makes (repeatable; default: torch)",
    )
    parser.add_argument(
        "--variant",
        action="append",
        metavar="NAME",
        help=f"{', '.join(VARIANTS)}, or several joined by '+': each layout with it, too; 'all': each (repeatable)",
    )
    parser.add_argument(
        "--slots",
        action="store_true",
        help="instead: search this device for products that differ between slots of a batch; 1 if there are any",
    )


def _slots() -> int:
    """Search this device for batched products that differ between slots of the batch. Returns exit status 0 if there
    are none, else 1."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{machine_stamp(device)}\nsearching batches of every shape below 2048 rows on {device}", flush=True)
    compared = unequal = 0
    for found in search(device):
        print(f"{found.what}: {found.num_unequal} of {found.num} differ", flush=True)
        compared, unequal = compared + found.num, unequal + found.num_unequal
    print(f"{unequal} of {compared} differ" + (". Please report it, with all of this text" if unequal else ""))
    return 1 if unequal else 0


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns exit status 0 if every layout keeps the contract, 1 if not."""
    return _slots() if args.slots else _verify(args)


def _verify(args: argparse.Namespace) -> int:
    if args.ranks < 1:
        raise ValueError(f"--ranks {args.ranks} must be at least 1")
    variants = dict.fromkeys(name for word in args.variant or () for name in (VARIANTS if word == "all" else [word]))
    for variant in variants:
        names_in(variant)
    start = time.perf_counter()
    names = [name for word in args.layout or ["torch"] for name in _SETS.get(word, (word,))]
    if any(name in ZERO_ROWS for name in names) and importlib.util.find_spec("deepspeed") is None:
        raise ValueError("DeepSpeed's rows need it: pip install 'shardmuon[deepspeed]'")
    rows: list[LayoutRow] = []
    with RankPool(args.ranks) as pool:
        for name in names:
            for variant in ("", *variants):
                print(f"{name} {variant}".rstrip(), end=" ", file=sys.stderr, flush=True)
                rows.append(verify_layout(pool, name, args.ranks, variant))
                print("keeps the contract" if rows[-1].ok else "FALLS SHORT", file=sys.stderr, flush=True)
    failed = [row.layout for row in rows if not row.ok]
    seconds = time.perf_counter() - start
    which = "rows (layouts, and each with its variants)" if variants else "layouts"
    print(table([[*rows[0].cells], *([*row.cells.values()] for row in rows)]))
    print(
        f"\n{len(rows) - len(failed)} of {len(rows)} {which} keep the contract on {args.ranks} ranks "
        f"({seconds:.0f} s){': ' + ', '.join(failed) + ' do not' if failed else ''}.\n"
        "max rel diff, bitwise: against one process with the same gradients, 3 steps, products in fp32 and bf16.\n"
        "= torch: method 'torch' has torch.optim.Muon's bits, weights in fp32 and bf16.\n"
        "NS runs: matrices orthogonalized in the whole job in one step. collectives, bytes/rank: of one rank in "
        "one step, counted; with the reduction of norms where a variant has one."
    )
    return 1 if failed else 0
