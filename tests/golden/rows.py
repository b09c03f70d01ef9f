"""Run the rows of the golden table on N ranks, and write digests of all tensors that each step changes. A row is a
combination of layout, options and dtype. The package is imported from the source tree on PYTHONPATH.

    PYTHONPATH=TREE/src:tests python -m golden.rows --ranks 4 --out FILE [--only TEXT]

FILE contains {row: {tensor: [digest of each rank's bytes]}}. Weights are named "step 0/weight/NAME", and optimizer
state "step 0/KEY/NAME". For a row that raises an exception, such as an unsupported combination, the entry is
{"refused": [class of the exception]} instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from golden.table import DTYPES, FSDP1, LRS, MISSING, OPTIONS, PARAMS, Row, placed, rows_of
from torch import Tensor

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import Fsdp1Run
from shardmuon.testing.layouts import LAYOUTS, parameters

Digests = dict[str, str]


def digest(value: Tensor) -> str:
    here = value.contiguous()
    head = f"{here.dtype} {tuple(here.shape)}".encode()
    return hashlib.sha256(head + here.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def drawn(name: str, purpose: int, dtype: torch.dtype) -> Tensor:
    """Return a random full tensor, the same on every rank. `purpose` is -1 for weights and the step number for
    gradients."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {purpose}".encode()))
    return torch.randn(PARAMS[name].shape, generator=generator).to(dtype)


def run(row: Row) -> dict[str, Tensor]:
    """Run the optimizer steps of one row of the golden table. Return this rank's weights and optimizer state after each
    step, keyed by the tensor names in the output file."""
    kind, options, found = DTYPES[row.dtype], OPTIONS[row.options], dict[str, Tensor]()
    world = dist.get_world_size() if dist.is_initialized() else 1
    names = [name for name in PARAMS if name not in options.without]
    full = {name: drawn(name, -1, kind.weights) for name in names}
    as_given = torch.tensor if options.lr_tensor else float
    method: dict[str, Any] = {"method": "standard", "ns_dtype": kind.products}

    def make(params: Mapping[str, Tensor], given: Mapping[str, Any]) -> Muon:
        groups = [{"params": [(name, param)], **PARAMS[name].options} for name, param in params.items()]
        return Muon(groups, **{"lr": as_given(LRS[0]), **method, **given, **options.muon})

    wrapped = Fsdp1Run(FSDP1, full, make) if row.layout == FSDP1 else None
    if wrapped is not None:
        optimizer = wrapped.optimizer
    else:
        optimizer = make(parameters(placed(row.layout, full)), LAYOUTS[row.layout].options(world))
    params = {
        n: p for group in optimizer.param_groups for n, p in zip(group["param_names"], group["params"], strict=True)
    }
    for step, lr in enumerate(LRS):
        for group in optimizer.param_groups:
            group["lr"] = as_given(lr)
        grads = {name: drawn(name, step, kind.weights) for name in names}
        if wrapped is not None:
            wrapped.step(wrapped.gradients(grads))
        else:
            without, cut = names[MISSING[row.missing].get(step, slice(0))], placed(row.layout, grads)
            for name, param in params.items():
                param.grad = None if name in without else cut[name]
            optimizer.step()
        for name, param in params.items():
            for key, value in {"weight": param, **optimizer.state.get(param, {})}.items():
                found[f"step {step}/{key}/{name}"] = local_if_any(value).detach().clone()
    return found


def table_of(only: str) -> dict[str, Digests]:
    """Return a dict from row name to this rank's digests, for all golden rows whose names contain `only`."""
    warnings.simplefilter("ignore")
    found = {}
    for row in rows_of(dist.get_world_size()):
        if only in row.name:
            torch.manual_seed(0)
            try:
                found[row.name] = {key: digest(value) for key, value in run(row).items()}
            except Exception as error:
                found[row.name] = {"refused": type(error).__name__}
    return found


def main() -> None:
    # Import this module as golden.rows instead of using __main__, because the ranks know it by this name only.
    from golden import rows

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="only rows whose names hold this text")
    args = parser.parse_args()
    with RankPool(args.ranks, timeout=900.0) as pool:
        tables = pool.run(rows.table_of, args.only)
    merged = {
        row: {key: [of[row].get(key, "none") for of in tables] for key in {k: None for of in tables for k in of[row]}}
        for row in tables[0]
    }
    Path(args.out).write_text(json.dumps({"rows": merged}))


if __name__ == "__main__":
    main()
