"""Save what a plan says, and read it again: JSON that `Exchange(expected_plan=...)` holds a live job to."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardmuon.foresight.types import BucketCount, Exact, Matrices, MatrixKind, Mesh, RankClass, Sent, Stored
from shardmuon.stepping.promise import FORMAT, read_promise


def save(exact: Exact, path: str | Path) -> None:
    """Write a file that `load` and `Exchange(expected_plan=...)` read."""
    Path(path).write_text(json.dumps(as_dict(exact), indent=1) + "\n")


def as_dict(exact: Exact) -> dict[str, Any]:
    """All of it as JSON takes it, with sums of each class."""
    found: dict[str, Any] = {"shardmuon_plan": FORMAT, **asdict(exact)}
    size = getattr(torch, exact.options.get("weights", "float32")).itemsize
    plain = exact.mesh.engine in ("fsdp2", "ddp")  # others step copies
    for entry, one in zip(found["classes"], exact.classes, strict=True):
        entry |= {"sent": one.sent, "plans": len(exact.digests) or 1}
        entry["muon_weights"] = one.muon_elements * size if plain else None
    return found


def load(path: str | Path) -> Exact:
    """What `save` wrote.

    Raises:
        ValueError: The file is no saved plan, or one of another version.
    """
    found = read_promise(str(path))
    return Exact(
        **{key: found[key] for key in ("model", "source", "num_params", "muon_params", "adamw_params")},
        mesh=Mesh(**found["mesh"]),
        classes=tuple(_class(entry) for entry in found["classes"]),
        matrices=tuple(MatrixKind(**entry) for entry in found["matrices"]),
        **{key: found[key] for key in ("digests", "copies", "options", "tokens_flops")},
    )


def _class(entry: dict[str, Any]) -> RankClass:
    names = ("stage", "peak", "muon_elements", "adamw_elements", "exchanges", "agreements")
    return RankClass(
        ranks=tuple(entry["ranks"]),
        stored=Stored(**entry["stored"]),
        buckets=tuple(_bucket(bucket) for bucket in entry["buckets"]),
        **{name: entry[name] for name in names},
    )


def _bucket(entry: dict[str, Any]) -> BucketCount:
    sides = {name: Sent(*entry[name]) for name in ("gather", "gather_received", "scatter", "scatter_received")}
    return BucketCount(**{**entry, **sides, "matrices": tuple(Matrices(*m) for m in entry["matrices"])})
