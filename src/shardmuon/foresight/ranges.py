"""Elements of each parameter on each rank where flat buffers are cut, by the rules of ZeRO, Megatron and FSDP1."""

from __future__ import annotations

import math
from collections.abc import Sequence


def zero_ranges(sizes: Sequence[int], num_ranks: int, stage: int) -> tuple[list[list[tuple[int, int]]], int]:
    """Ranges that DeepSpeed gives each rank of the parameters of one group, and the length of a flat.

    Stages 1 and 2: the parameters one after the other, padded at the end to a multiple of 2 x ranks, in equal parts
    (`nccl_start_alignment_factor` of stage_1_and_2.py, 0.19). Stage 3: an equal part of each, padded at its end.

    Returns:
        For each parameter its elements [start, stop) on each rank, and the elements of a flat, padding and all.
    """
    if stage == 3:
        parts = [-(-size // num_ranks) for size in sizes]
        table = [
            [(min(r * part, size), min((r + 1) * part, size)) for r in range(num_ranks)]
            for size, part in zip(sizes, parts, strict=True)
        ]
        return table, sum(parts)
    unit = 2 * num_ranks
    part = -(-sum(sizes) // unit) * unit // num_ranks
    table, at = [], 0
    for size in sizes:
        table.append([_overlap(at, size, r * part, (r + 1) * part) for r in range(num_ranks)])
        at += size
    return table, part


def _overlap(at: int, size: int, first: int, last: int) -> tuple[int, int]:
    """The part of [at, at + size) that lies in [first, last), counted from `at`; (0, 0) if nothing does."""
    start, stop = max(at, first), min(at + size, last)
    return (start - at, stop - at) if start < stop else (0, 0)


def megatron_ranges(
    sizes: Sequence[int], num_ranks: int, bucket_size: int | None = None
) -> tuple[list[list[tuple[int, int]]], int]:
    """Ranges that Megatron-core's distributed optimizer gives each data-parallel rank of a gradient buffer.

    They lie in reverse order, each at a multiple of 64 elements; a bucket ends after the first one that fills it,
    padded to a multiple of lcm(ranks, 128), and each rank has an equal part of every bucket
    (param_and_grad_buffer.py, 0.19).

    Args:
        sizes: Elements of each parameter, in the model's order.
        num_ranks: Data-parallel ranks.
        bucket_size: Elements that fill a bucket; None: there is one.

    Returns:
        For each parameter its elements [start, stop) on each rank, and the elements of the whole buffer.
    """
    unit = math.lcm(num_ranks, 128)
    table: list[list[tuple[int, int]]] = [[(0, 0)] * num_ranks for _ in sizes]
    inside: list[tuple[int, int]] = []
    end = total = 0
    for index in reversed(range(len(sizes))):
        start = -(-end // 64) * 64
        inside.append((index, start))
        end = start + sizes[index]
        if index and (bucket_size is None or end < bucket_size):
            continue
        padded = -(-end // unit) * unit
        part, total = padded // num_ranks, total + padded
        for number, first in inside:
            ends = (first // part, min(num_ranks - 1, (first + sizes[number] - 1) // part))
            for rank in range(ends[0], ends[1] + 1):
                table[number][rank] = _overlap(first, sizes[number], rank * part, (rank + 1) * part)
        inside, end = [], 0
    return table, total


def fsdp1_ranges(sizes: Sequence[int], num_ranks: int) -> tuple[list[list[tuple[int, int]]], int]:
    """Ranges of one flat parameter's tensors that FSDP1 keeps on each rank.

    They lie one after the other in equal parts, the last ranks' perhaps empty. Each begins at a multiple of 16 bytes
    (`_init_flat_param_and_metadata` of torch/distributed/fsdp/_flat_param.py, 2.13), which are 4 elements: FSDP1's own
    weights are fp32 (`MixedPrecision` casts what it gathers).

    Args:
        sizes: Elements of each tensor, in the module's order.
        num_ranks: That share it.

    Returns:
        For each tensor its elements [start, stop) on each rank, and the elements of a rank's part, padding and all.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // 4) * 4)
        end = starts[-1] + size
    part = -(-end // num_ranks)
    table = [
        [_overlap(start, size, r * part, (r + 1) * part) for r in range(num_ranks)]
        for start, size in zip(starts, sizes, strict=True)
    ]
    return table, part
