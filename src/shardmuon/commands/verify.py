"""`shardmuon verify`: compare the results of all sharding layouts with a dense reference and with torch.optim.Muon, and
print a table."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.testing.compare import Comparison
from shardmuon.testing.frameworks import Fsdp1Run, ZeroRun
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.pool import RankPool
from shardmuon.testing.slots import search
from shardmuon.texts import table
from shardmuon.variants import VARIANTS, names_in, stages_of


def _row(pool: RankPool, layout: str, variant: str = "") -> tuple[bool, dict[str, str]]:
    """Check one layout: compare steps of Muon on a pool of ranks with references.

    The first reference is a dense (unsharded) run of Muon in a single process. The second reference is
    torch.optim.Muon, which has no variants and is used only if `variant` is empty. In layouts without sharding or
    replication (such as "single"), each rank has its own matrices.

    Returns:
        A tuple (passed, row). `passed` is True if all results are bitwise equal to the references, on every rank and
        after every step, with matrix products in fp32 and in bf16. `row` is the layout's row in the table, a dict from
        column name to cell. The column "collectives" counts exchanges of tensors, votes, and all-reduces of weight
        norms. The column "bytes/rank" counts the bytes that a rank sends in exchanges (in fp32) and in all-reduces (8
        bytes per matrix). Both columns contain the maximum over all ranks.
    """
    options: dict[str, Any] = {"variant": variant} if variant else {}
    if not all(stage.decays for stage in stages_of({"variant": variant or None})):
        options["weight_decay"] = 0.0
    dense, torches = list[Comparison](), list[Comparison]()
    for dtype in (torch.float32, torch.bfloat16):
        dense += pool.run(Comparison.with_dense, layout, ns_dtype=dtype, lr=0.02, **options)
        # With ZeRO stage 0 in half precision, DeepSpeed gives the optimizer copies of the weights, and shardmuon
        # rejects such copies.
        if not variant and (layout != "zero0" or dtype == torch.float32):
            torches += pool.run(Comparison.with_torch, layout, dtype=dtype, lr=0.02)
    difference, done = _worst(c.max_difference for c in dense), [c.traffic for c in dense]
    same, same_as_torch = (all(c.bitwise for c in found) for found in (dense, torches))
    cells = {
        "layout": f"{layout} {variant}".rstrip(),
        "matrices": str(dense[0].num_matrices),
        "NS runs": str(sum(t.orthogonalized for t in done[: pool.world_size])),
        "max rel diff": f"{difference:.2e}",
        "bitwise": "yes" if same else "NO",
        "= torch": "-" if variant else "yes" if same_as_torch else "NO",
        "collectives": str(max(t.exchanges + t.agreements + t.norm_reductions for t in done)),
        "bytes/rank": str(max(t.bytes_sent + 8 * t.norms_sent for t in done)),
    }
    return same and same_as_torch and difference == 0.0, cells


def _worst(found: Iterable[float]) -> float:
    """Return the largest number, or NaN if any number is NaN."""
    return max(found, key=lambda number: (math.isnan(number), number))


# names of the layouts in each set, keyed by the set's name
_SETS = {"torch": (*LAYOUTS, *Fsdp1Run.ROWS), "deepspeed": tuple(ZeroRun.ROWS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shardmuon verify` to a parser."""
    parser.set_defaults(run=_run)
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
    """Search for batched matrix products whose results on this device depend on the position (slot) of a matrix in the
    batch. Return the exit status: 0 if none are found, otherwise 1."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{machine_stamp(device)}\nsearching batches of every shape below 2048 rows on {device}", flush=True)
    compared = unequal = 0
    for what, equal in search(device):
        print(f"{what}: {equal.count(False)} of {len(equal)} differ", flush=True)
        compared, unequal = compared + len(equal), unequal + equal.count(False)
    print(f"{unequal} of {compared} differ" + (". Please report it, with all of this text" if unequal else ""))
    return 1 if unequal else 0


def _run(args: argparse.Namespace) -> int:
    """Print a table with a row for each layout and variant, or run the search that `--slots` requests. Return the exit
    status: 0 if every layout passes the check in `_row`, or if the search finds nothing, otherwise 1."""
    if args.slots:
        return _slots()
    if args.ranks < 1:
        raise ValueError(f"--ranks {args.ranks} must be at least 1")
    variants = dict.fromkeys(name for word in args.variant or () for name in (VARIANTS if word == "all" else [word]))
    for variant in variants:
        names_in(variant)
    start = time.perf_counter()
    names = [name for word in args.layout or ["torch"] for name in _SETS.get(word, (word,))]
    if any(name in ZeroRun.ROWS for name in names) and importlib.util.find_spec("deepspeed") is None:
        raise ValueError("DeepSpeed's rows need it: pip install 'shardmuon[deepspeed]'")
    rows, failed = list[dict[str, str]](), list[str]()
    with RankPool(args.ranks) as pool:
        for name, variant in itertools.product(names, ("", *variants)):
            print(f"{name} {variant}".rstrip(), end=" ", file=sys.stderr, flush=True)
            ok, cells = _row(pool, name, variant)
            print("keeps the contract" if ok else "FALLS SHORT", file=sys.stderr, flush=True)
            rows.append(cells)
            failed += [] if ok else [cells["layout"]]
    print(table([[*rows[0]], *([*cells.values()] for cells in rows)]))
    print(
        f"\n{len(rows) - len(failed)} of {len(rows)} {'rows' if variants else 'layouts'} keep the contract on "
        f"{args.ranks} ranks ({time.perf_counter() - start:.0f} s)"
        f"{': ' + ', '.join(failed) + ' do not' if failed else ''}.\n"
        "max rel diff, bitwise: against one process with the same gradients, 3 steps, products in fp32 and bf16.\n"
        "= torch: method 'torch' has torch.optim.Muon's bits, weights in fp32 and bf16.\n"
        "NS runs: matrices orthogonalized in the whole job in one step. collectives, bytes/rank: of one rank in "
        "one step, counted; with the reduction of norms where a variant has one."
    )
    return 1 if failed else 0
