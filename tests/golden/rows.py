"""Run the golden rows on N ranks with the tree on PYTHONPATH and write digests of all that a step changes.

    PYTHONPATH=TREE/src:tests python -m golden.rows --ranks 4 --out FILE [--only TEXT]

FILE: {row: {tensor: [digest of each rank's bytes]}}; tensors are "step 0/weight/NAME" and "step 0/KEY/NAME" of state.
A row that is refused has {"refused": [class of the exception]}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from golden.fsdp1 import Fsdp1
from golden.layouts import LAYOUTS, Piece, local
from golden.table import DTYPES, FSDP1, LRS, MISSING, OPTIONS, PARAMS, Row, rows_of
from golden.trees import muon

Digests = dict[str, str]


def digest(value: object) -> str:
    """Digest all bytes of a tensor's local storage, with its dtype and shape; of the text of anything else."""
    if not isinstance(value, Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
    here = local(value).detach().contiguous()
    head = f"{here.dtype} {tuple(here.shape)}".encode()
    return hashlib.sha256(head + here.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def drawn(name: str, purpose: int, dtype: torch.dtype) -> Tensor:
    """A full tensor, the same on every rank. `purpose`: -1 for weights, else the step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {purpose}".encode()))
    return torch.randn(PARAMS[name].shape, generator=generator).to(dtype)


def groups_of(params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Parameter groups that say how each reads as matrices."""
    table: dict[str, dict[str, Any]] = {}
    for name, param in params.items():
        group = table.setdefault(repr(PARAMS[name].options), {"params": [], **PARAMS[name].options})
        group["params"].append((name, param))
    return list(table.values())


def lacking(row: Row, step: int, names: list[str]) -> set[str]:
    """Parameters that have no gradient in a step."""
    every, first = MISSING[row.missing].get(step, (0, 0))
    return set(names[first::every]) if every else set()


def run(row: Row) -> Digests:
    """The digests of this rank."""
    kind, options, found = DTYPES[row.dtype], OPTIONS[row.options], {}
    names = [name for name in PARAMS if name not in options.without]
    full = {name: drawn(name, -1, kind.weights) for name in names}
    wrapped, pieces, given = None, dict[str, Piece](), {}
    if row.layout == FSDP1:
        wrapped = Fsdp1(full)
        params: Mapping[str, Any] = {name: wrapped.params[name] for name in names}
    else:
        layout = LAYOUTS[row.layout]
        pieces = layout.pieces(row.layout, {name: PARAMS[name].shape for name in names})
        params = {name: pieces[name].parameter(full[name]) for name in names}
        given = layout.groups(layout.meshes[dist.get_world_size()])
    method = {"method": "standard", "dtype": kind.products}
    lr = torch.tensor(LRS[0]) if options.lr_tensor else LRS[0]
    optimizer = muon(groups_of(params), {"lr": lr, "orthogonalizer": method, **given, **options.muon})
    for step, lr in enumerate(LRS):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(lr) if options.lr_tensor else lr
        grads = {name: drawn(name, step, kind.weights) for name in names}
        without = lacking(row, step, names)
        if wrapped is not None:
            wrapped.backward(grads)
        else:
            for name, param in params.items():
                param.grad = None if name in without else pieces[name].cut(grads[name])
        optimizer.step()
        for name, param in params.items():
            found[f"step {step}/weight/{name}"] = digest(param)
            for key, value in optimizer.state.get(param, {}).items():
                found[f"step {step}/{key}/{name}"] = digest(value)
    return found


def work(rank: int, world: int, store: str, out: str, only: str) -> None:
    """A rank: all rows, then rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    started, table = time.monotonic(), {}
    for row in rows_of(world):
        if only not in row.name:
            continue
        torch.manual_seed(0)
        try:
            mine = run(row)
        except Exception as error:
            mine = {"refused": type(error).__name__}
            if rank == 0:
                print(f"{row.name}:", "".join(traceback.format_exception_only(error)), file=sys.stderr)
        table[row.name] = mine
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, table)
    if rank == 0:
        merged = {
            row: {
                key: [of[row].get(key, "none") for of in gathered]
                for key in dict.fromkeys(k for of in gathered for k in of[row])
            }
            for row in table
        }
        Path(out).write_text(json.dumps({"seconds": time.monotonic() - started, "rows": merged}))
    dist.barrier()
    os._exit(0)  # without interpreter teardown, which waits for the threads of gloo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="only rows whose names hold this text")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(target=work, args=(r, args.ranks, store, args.out, args.only)) for r in range(args.ranks)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    sys.exit(max(rank.exitcode or 0 for rank in ranks))


if __name__ == "__main__":
    main()
