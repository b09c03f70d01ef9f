"""Meshes as users write them, and which ranks stand where on them. Ranks count as (pp, dp, shard, tp), tp fastest."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Literal, get_args

from shardmuon.foresight.types import EngineName, Mesh
from shardmuon.layout.table import Ranks
from shardmuon.texts import did_you_mean

AXES = ("dp", "shard", "tp", "ep", "pp")
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
MOST_RANKS = 10_240
_ZERO = ("zero1", "zero2", "zero3")


def parse_mesh(text: str | Mesh, engine: str | None = None, gpus_per_node: int | None = None) -> Mesh:
    """A mesh from text such as "dp=8 shard=64 tp=8".

    Args:
        text: ``axis=size`` pairs with spaces or commas between them; axes left out have size 1. Or a mesh as it is,
            with the other arguments put in where they are given.
        engine: What cuts parameters up. Default: "ddp" if there is `dp` and neither `shard`, `tp` nor `ep`; else
            "fsdp2".
        gpus_per_node: Ranks of a node. Default: 8.

    Raises:
        ValueError: The text is no mesh, or one that the engine does not make; says what to write.

    Examples:
        >>> parse_mesh("dp=2 shard=64 tp=8").world
        1024
    """
    if isinstance(text, Mesh):
        given = {f.name: getattr(text, f.name) for f in fields(Mesh)}
    else:
        sizes = _sizes(text)
        given = {**dict.fromkeys(AXES, 1), **sizes, "gpus_per_node": 8}
        alone = set(sizes) <= {"dp"} and sizes.get("dp", 1) > 1
        given["engine"] = "ddp" if alone else "fsdp2"
    if engine is not None:
        given["engine"] = engine
    if gpus_per_node is not None:
        given["gpus_per_node"] = gpus_per_node
    _check_engine(str(given["engine"]))
    mesh = Mesh(**given)
    _check(mesh)
    return mesh


def _sizes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        axis, equals, size = word.partition("=")
        if not equals or axis not in AXES or not (size.isascii() and size.isdigit()) or int(size) < 1:
            hint = did_you_mean(axis, AXES) if equals and axis not in AXES else ""
            raise ValueError(
                f"mesh {text!r}: {word!r} is no axis=size. Axes are {', '.join(AXES)}, sizes whole numbers of at least "
                f'1: write for example "dp=2 shard=64 tp=8"{hint}'
            )
        if axis in found:
            raise ValueError(f"mesh {text!r}: {axis} stands there twice. Write it once")
        found[axis] = int(size)
    if not found:
        raise ValueError('the mesh is empty. Write its axes, for example "shard=64", or "dp=1" for one rank')
    return found


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise ValueError(
            f"engine={engine!r} is not one of {', '.join(ENGINES)}{did_you_mean(engine, ENGINES)}. HSDP is fsdp2 with "
            "dp > 1, tensor parallelism alone is fsdp2 with tp > 1"
        )


def _check(mesh: Mesh) -> None:
    if mesh.gpus_per_node < 1:
        raise ValueError(f"gpus_per_node={mesh.gpus_per_node} must be at least 1")
    if mesh.world > MOST_RANKS:
        raise ValueError(f"mesh {mesh} has {mesh.world:,} ranks, {MOST_RANKS:,} are the most that are planned for")
    engine = mesh.engine
    if engine in ("ddp", "megatron", *_ZERO) and mesh.shard > 1:
        raise ValueError(
            f"mesh {mesh}: engine {engine} has no axis shard (it shares its state out over dp). Write "
            f"dp={mesh.dp * mesh.shard} instead of dp={mesh.dp} shard={mesh.shard}, or engine fsdp2"
        )
    if engine in (*_ZERO, "fsdp1") and (mesh.tp > 1 or mesh.ep > 1):
        raise ValueError(f"mesh {mesh}: {engine} with tp or ep is not supported by shardmuon. Write tp=1 ep=1")
    if engine == "fsdp1" and mesh.pp > 1:
        raise ValueError(f"mesh {mesh}: {engine} with pp is not planned. Write pp=1")
    if engine == "fsdp1" and mesh.shard == 1 < mesh.dp:
        raise ValueError(
            f"mesh {mesh}: {engine} shares parameters out over the axis shard. Write shard={mesh.dp} for FULL_SHARD, "
            "or engine ddp for NO_SHARD"
        )
    if engine == "ddp" and mesh.ep > 1:
        raise ValueError(f"mesh {mesh}: engine ddp has no experts of its own. Write engine fsdp2 or megatron")
    lent = mesh.dp if engine == "megatron" else mesh.shard * mesh.tp
    if lent % mesh.ep:
        what = f"dp={mesh.dp}" if engine == "megatron" else f"shard x tp = {lent}"
        raise ValueError(
            f"mesh {mesh}: ep={mesh.ep} does not divide {what}, from which expert-parallel ranks are taken. Write an "
            f"ep that does, for example ep={_largest_divisor(lent, mesh.ep)}"
        )


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def stage_ranks(mesh: Mesh, stage: int) -> Ranks:
    """The ranks of a pipeline stage."""
    size = mesh.world // mesh.pp
    return tuple(range(stage * size, (stage + 1) * size))


def check_divides(mesh: Mesh, what: str, size: int, name: str, axis: Literal["tp", "ep"] = "tp") -> None:
    """Raise ValueError if an axis does not divide something; it says which size would."""
    given = mesh.tp if axis == "tp" else mesh.ep
    if size % given:
        good = _largest_divisor(size, given) if axis == "tp" else math.gcd(size, given)  # that still divides its ranks
        raise ValueError(
            f"mesh {mesh}: {axis}={given} does not divide the {size} {what} of {name}. Write {axis}={good}"
        )
