"""Norms of what this rank keeps, summed in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardmuon._torch import flattened, foreach_norm

_CHUNK = 1 << 22  # elements: CPUs convert to fp64 before they sum, so this bounds the copy
_SMALL = 1 << 14  # elements: copying so few side by side costs less than a norm of their own
_MANY = 1 << 8  # small tensors in one copy


def norm_of(tensors: Sequence[Tensor], norm_type: float) -> float:
    """The p-norm of all of them as one vector. Waits once for each device and dtype."""
    found: list[float] = []
    for alike in by_kind(tensors).values():
        parts = [chunk for part in _side_by_side(alike) for chunk in _chunks(part)]
        found += torch.stack(foreach_norm(parts, norm_type)).tolist()
    return combine(found, norm_type)


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors grouped by device and dtype."""
    table: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        table.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return table


def _side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Small tensors copied into few long ones, the others as they are."""
    small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
    batches = (small[at : at + _MANY] for at in range(0, len(small), _MANY))
    large = [tensor for tensor in tensors if tensor.numel() > _SMALL]
    return [*large, *(flattened(batch) if len(batch) > 1 else batch[0] for batch in batches)]


def _chunks(storage: Tensor) -> list[Tensor]:
    if storage.numel() <= _CHUNK:
        return [storage]
    if storage.is_contiguous():
        return list(storage.view(-1).split(_CHUNK))
    return list(storage.split(max(1, _CHUNK * len(storage) // storage.numel())))


def combine(norms: Iterable[float], norm_type: float) -> float:
    """The p-norm of a vector from those of its parts, whatever their order."""
    values = [norm for norm in norms if norm != 0.0]
    if any(math.isnan(value) for value in values):
        return math.nan
    largest = max(values, default=0.0)
    if len(values) < 2 or math.isinf(norm_type) or math.isinf(largest):
        return largest
    exponent = math.frexp(largest)[1]  # powers of two scale exactly, so that no power overflows
    power = math.fsum(math.ldexp(value, -exponent) ** norm_type for value in values)
    root = math.sqrt(power) if norm_type == 2.0 else power ** (1.0 / norm_type)
    return math.ldexp(root, exponent) if math.frexp(root)[1] + exponent <= 1024 else math.inf
