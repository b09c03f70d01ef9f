"""Megatron's ways of cutting parameters up, without Megatron: Megatron-FSDP's DTensors with any number of rows on any
rank, and Megatron-core's flat buffers cut anywhere.

The layouts of flat buffers are computed here as Megatron computes them (tests compare the two where the packages are
installed), so that a comparison with one of these never leans on shardmuon's own reading.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardmuon.testing.device import mesh_kind

Shape = tuple[int, ...]


def buffer_layout(shapes: Sequence[Shape], num_shards: int) -> tuple[list[int], int]:
    """Start of each tensor of a unit in its flat buffer, and the buffer's size (divisible by `num_shards`).

    Shards end at multiples of a chunk, which holds whole rows of every tensor. A tensor that does not fill its
    last chunk leaves a gap: its end takes a later tensor's incomplete chunk, the rest small tensors and padding.
    """
    rows = [math.prod(shape[1:]) for shape in shapes]
    sizes = [math.prod(shape) for shape in shapes]
    chunk = math.lcm(*rows)
    small = sorted((i for i, size in enumerate(sizes) if size < chunk), key=lambda i: -sizes[i])
    large = [i for i, size in enumerate(sizes) if size >= chunk]
    starts: dict[int, int] = {}

    end = 0
    while large:
        first = large.pop(0)
        starts[first], gap = end, end + sizes[first]
        end = gap_end = _up(gap, chunk)
        left = sizes[first] % chunk
        if not left:
            continue
        fitting = [i for i in large if 0 < sizes[i] % chunk <= chunk - left]
        if fitting:
            large.remove(fitting[0])
            starts[fitting[0]] = gap_end = end - sizes[fitting[0]] % chunk
            end = gap_end + sizes[fitting[0]]
        for i in list(small):
            if _up(gap, rows[i]) + sizes[i] <= gap_end:
                starts[i] = _up(gap, rows[i])
                gap = starts[i] + sizes[i]
                small.remove(i)
    for i in small:
        starts[i] = _up(end, rows[i])
        end = starts[i] + sizes[i]
    return [starts[i] for i in range(len(shapes))], _up(end, chunk * num_shards)


def row_ranges(shapes: Sequence[Shape], num_shards: int) -> list[list[tuple[int, int]]]:
    """Rows [start, stop) of each tensor in each shard of the buffer; (0, 0) where it has none."""
    starts, total = buffer_layout(shapes, num_shards)
    shard = total // num_shards
    table = []
    for shape, start in zip(shapes, starts, strict=True):
        row, size = math.prod(shape[1:]), math.prod(shape)
        found = []
        for k in range(num_shards):
            first, last = max(start, k * shard) - start, min(start + size, (k + 1) * shard) - start
            found.append((first // row, last // row) if first < last else (0, 0))
        table.append(found)
    return table


def _row_ranges_among_others(shapes: Sequence[Shape], num_shards: int) -> list[list[tuple[int, int]]]:
    """Rows as in `row_ranges`, with each tensor in a unit of its own between two others with rows of its size. Units
    of odd shapes have chunks so large that the first shard takes all of them."""
    found = []
    for i, shape in enumerate(shapes):
        others = [(1 + (3 * i + k) % 7, *shape[1:]) for k in (0, 2)]
        found.append(row_ranges([others[0], shape, others[1]], num_shards)[1])
    return found


def shard_like_megatron(
    tensors: Mapping[str, Tensor],  # full ones
    mesh: DeviceMesh,
    *,
    one_unit: bool = True,  # all tensors in one buffer, or each between others
    outer: str = "",  # "replicate" or "shard": what the first axis does, beside the inner data-parallel axis
    tensor_parallel: bool = False,  # whether the last axis cuts columns and rows in turn
    attributes: bool = True,  # what Megatron-FSDP writes on parameters; nn.Parameter(...) loses it
) -> dict[str, Tensor]:
    """Make this rank's DTensors as Megatron-FSDP v1 makes them. Talks to no other rank."""
    at = list(mesh.get_coordinate() or ())
    num_parts, part = (mesh.size(mesh.ndim - 1), at.pop()) if tensor_parallel else (1, 0)
    sharding = [Shard(0)] if not outer else [Shard(0) if outer == "shard" else Replicate(), Shard(0)]
    # The inner axis cuts first: rank (outer o, inner i) has shard i * num_outer + o.
    num_outer, first = (mesh.size(0), at[0]) if outer == "shard" else (1, 0)
    inner = 1 if outer else 0
    num_shards, shard = mesh.size(inner) * num_outer, at[inner] * num_outer + first
    dims = [i % 2 + t.ndim - 2 for i, t in enumerate(tensors.values())]
    parts = {
        name: _chunk(t, num_parts, dim)[part] if tensor_parallel else t
        for (name, t), dim in zip(tensors.items(), dims, strict=True)
    }
    stored = {name: t for name, t in parts.items() if t.numel()}  # a buffer has no place for what has no elements
    ranges = row_ranges if one_unit else _row_ranges_among_others
    rows = dict(zip(stored, ranges([tuple(t.shape) for t in stored.values()], num_shards), strict=True))
    mesh._shard_order = list(reversed(range(mesh.ndim)))  # type: ignore[attr-defined]
    out: dict[str, Tensor] = {}
    for (name, full), dim in zip(tensors.items(), dims, strict=True):
        start, stop = rows[name][shard] if name in rows else (0, 0)
        placements: list[Placement] = [*sharding, *([Shard(dim)] if tensor_parallel else [])]
        local = parts[name][start:stop].contiguous().clone()
        out[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
        if attributes:
            row = math.prod(parts[name].shape[1:])
            tp_dim = mesh.mesh_dim_names[-1] if tensor_parallel and mesh.mesh_dim_names else None
            out[name].megatron_fsdp_dist_index = SimpleNamespace(tp_dim=tp_dim)  # type: ignore[attr-defined]
            out[name].megatron_fsdp_slice = slice(start * row, stop * row)  # type: ignore[attr-defined]
    return out


def _chunk(tensor: Tensor, num_parts: int, dim: int) -> list[Tensor]:
    size = tensor.shape[dim]
    step = -(-size // num_parts)
    starts = [min(size, i * step) for i in range(num_parts + 1)]
    return [tensor.narrow(dim, a, b - a) for a, b in itertools.pairwise(starts)]


def flat_ranges(sizes: Sequence[int], num_shards: int, bucket_size: int | None = None) -> list[list[tuple[int, int]]]:
    """Elements that Megatron-core's distributed optimizer gives each rank of parameters in one gradient buffer.

    Parameters lie in reverse order, each at a multiple of 64 elements. A bucket ends after the first one that fills it,
    and every rank has an equal part of each bucket.

    Args:
        sizes: Elements of each parameter, in the model's order.
        num_shards: Ranks of the data-parallel group.
        bucket_size: Elements that fill a bucket; None: one bucket.

    Returns:
        For each parameter its elements [start, stop) on each rank; (0, 0) where there are none.
    """
    unit = math.lcm(num_shards, 128)
    table: list[list[tuple[int, int]]] = [[(0, 0)] * num_shards for _ in sizes]
    bucket: list[tuple[int, int]] = []  # (parameter, its start in the bucket)
    end = 0
    for index in reversed(range(len(sizes))):
        start = _up(end, 64)
        bucket.append((index, start))
        end = start + sizes[index]
        if index and (bucket_size is None or end < bucket_size):
            continue
        part = _up(end, unit) // num_shards
        for number, first in bucket:
            for k in range(num_shards):
                held = max(first, k * part) - first, min(first + sizes[number], (k + 1) * part) - first
                if held[0] < held[1]:
                    table[number][k] = held
        bucket, end = [], 0
    return table


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_MESHES: dict[tuple[object, str, Shape, str], DeviceMesh] = {}


def megatron_mesh(shape: Shape, purpose: str) -> DeviceMesh:
    """A mesh of its own for each purpose, since Megatron-FSDP writes on it. Collective at the first call."""
    key = (dist.group.WORLD, mesh_kind(), shape, purpose)
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(mesh_kind(), shape, mesh_dim_names=tuple(f"m{i}" for i in range(len(shape))))
    return _MESHES[key]
