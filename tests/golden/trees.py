"""Differences between trees of this project: the one place that changes when one of them does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import shardmuon


def muon(groups: list[dict[str, Any]], options: Mapping[str, Any]) -> shardmuon.Muon:
    """An optimizer of this tree. `orthogonalizer`, `exchange` and `storage` are dicts of fields."""
    given = dict(options)
    for key, kind in (("orthogonalizer", "Orthogonalizer"), ("exchange", "Exchange"), ("storage", "Storage")):
        if key in given:
            made = getattr(shardmuon, kind)
            known = {f.name for f in dataclasses.fields(made)}
            given[key] = made(**{name: value for name, value in given[key].items() if name in known})
    if "deterministic" in inspect.signature(shardmuon.Muon).parameters:
        given["deterministic"] = True  # later what every optimizer does
    return shardmuon.Muon(groups, **given)


def flat_shard(
    tensor: Tensor,  # 1-D, marked in place
    shape: tuple[int, ...],  # the whole tensor's
    start: int,
    groups: list[Any],  # data parallel and, if there are two, tensor parallel
    cut: tuple[int, int] | None,  # dim and stride over the second
) -> Tensor:
    """Say which part of a tensor a range of a flat buffer is; returns it."""
    group_ref = _named("GroupRef", "comm.groups", "ranks.exchange")
    flat = _named("FlatShard", "layout.engines.flat", "layout.readers.flat", "engines.flat")
    mark_flat = _named("mark_flat", "layout.engines.flat", "layout.readers.flat", "engines.flat")
    cut_kind = _named("Cut", "layout.shards", "layout.mesh", "engines.tensor_parallel")
    data, *tensor_parallel = (group_ref.of(group) for group in groups)
    parallel = tensor_parallel[0] if tensor_parallel else None
    marked: Tensor = mark_flat(
        tensor, flat(shape, start, data, "flat buffers", parallel, None if cut is None else cut_kind(*cut))
    )
    return marked


def _named(name: str, *modules: str) -> Any:
    """Return the object of this name in the first of these modules that a tree has: trees differ in where it stands."""
    for module in modules:
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(f"shardmuon.{module}"), name)
    raise ImportError(f"this tree has none of {modules}")


def put_in(stand_in: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Orthogonalize by (B, m, n) -> (B, m, n) where method "standard" is asked for; returns what undoes it."""
    from shardmuon.orthogonalize import BACKENDS

    own = BACKENDS["standard"]
    if "alone" in {f.name for f in dataclasses.fields(own)}:  # what is not called so has its operands normalized before
        made = type(own)(alone=lambda x, coefficients, eps: stand_in(x))
    else:
        made = dataclasses.replace(own, backend=lambda x, coefficients, products, *, eps: stand_in(x))
    BACKENDS["standard"] = made

    def undo() -> None:
        BACKENDS["standard"] = own

    return undo
