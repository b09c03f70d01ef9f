"""Norms of local tensors, summed in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardmuon._torch import flattened, foreach_norm

_SMALL = 1 << 12  # elements; smaller tensors are concatenated, since a copy takes less time than a separate norm
_CHUNK = 1 << 22  # elements; CPUs copy to fp64 before they sum, and this bounds the size of the copy


def norm_of(tensors: Sequence[Tensor], norm_type: float) -> float:
    """Compute the p-norm of all elements of the tensors, taken as one vector. Waits for the result once per device and
    dtype."""
    found: list[float] = []
    for alike in by_kind(tensors).values():
        small = [part for part in alike if part.numel() < _SMALL]
        whole = [part for part in alike if part.numel() >= _SMALL] + ([flattened(small)] if small else [])
        parts = [chunk for part in whole for chunk in ([part] if part.numel() <= _CHUNK else _chunks(part))]
        found += torch.stack(foreach_norm(parts, norm_type)).tolist()
    return combine(found, norm_type)


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors by device and dtype."""
    table: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        table.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return table


def _chunks(storage: Tensor) -> list[Tensor]:
    if storage.is_contiguous():
        return list(storage.view(-1).split(_CHUNK))
    return list(storage.split(max(1, _CHUNK * len(storage) // storage.numel())))


def combine(norms: Iterable[float], norm_type: float) -> float:
    """Compute the p-norm of a vector from the p-norms of its parts. The order of the parts does not change the
    result."""
    values = [norm for norm in norms if norm != 0.0]
    if any(map(math.isnan, values)):
        return math.nan
    largest = max(values, default=0.0)
    if len(values) < 2 or math.isinf(norm_type) or math.isinf(largest):
        return largest
    exponent = math.frexp(largest)[1]  # scaling by a power of two is exact and avoids overflow
    power = math.fsum([math.ldexp(value, -exponent) ** norm_type for value in values])
    root = math.sqrt(power) if norm_type == 2.0 else power ** (1.0 / norm_type)
    return math.ldexp(root, exponent) if math.frexp(root)[1] + exponent <= 1024 else math.inf
