"""Fingerprints of local storage, by which replicas are compared when a plan is made."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.momentum.rounding import GAMMA, mix_


def fingerprint(storage: Tensor) -> int:
    """64 bits of a tensor's bits and their order. Equal tensors give equal numbers on any device of one kind.

    Each 8 bytes are mixed with their place by a bijection in which every bit hangs on every other (`rounding.mix_`),
    then added: so a change of 8 bytes always shows, and changes of several cancel like random numbers, 1 in 2**64. A
    sum of words times weights would not do: neighbours that drift by +1, -1, -1, +1 ulp cancel in any function linear
    in word and place.
    """
    dense = storage.detach().contiguous()
    # one element may have any stride and still be contiguous, where a view of other bytes wants 1
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    pad = -flat.numel() % 8
    if pad:
        flat = torch.nn.functional.pad(flat, (0, pad))
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.empty(0, dtype=torch.int64, device=flat.device)
    chunk = 1 << 15 if flat.device.type == "cpu" else 1 << 22  # intermediate results stay in a CPU's cache
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        if len(places) != len(part):
            places = torch.arange(1, len(part) + 1, device=flat.device, dtype=torch.int64).mul_(GAMMA)
        total += mix_((places + part).add_(_wrapped(start * GAMMA))).sum()  # wraps around modulo 2**64
    return int(total.item())


def _wrapped(number: int) -> int:
    """An integer modulo 2**64, as a signed number."""
    return (number + 2**63) % 2**64 - 2**63
