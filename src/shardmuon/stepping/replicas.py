"""Are replicas equal, bit for bit? Fingerprints of local storage, compared when a plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.momentum.rounding import GAMMA, mix_
from shardmuon.planning.layout import ParamLayout
from shardmuon.ranks.council import Council
from shardmuon.ranks.exchange import share_bytes

if TYPE_CHECKING:
    from shardmuon.stepping.binding import Candidate


def fingerprint(storage: Tensor) -> int:
    """64 bits of a tensor's bits and their order. Equal tensors give equal numbers on any device of one kind.

    Each 8 bytes are mixed with their place by a bijection in which every bit hangs on every other (`rounding.mix_`),
    then added: so a change of 8 bytes always shows, and changes of several cancel like random numbers, 1 in 2**64. A
    sum of words times weights would not do: neighbours that drift by +1, -1, -1, +1 ulp cancel in any function linear
    in word and place.
    """
    flat = storage.detach().contiguous().view(-1).view(torch.uint8)
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
    """Modulo 2**64 as a signed number."""
    return (number + 2**63) % 2**64 - 2**63


def compare_replicas(council: Council, group: Sequence[Candidate], layouts: Sequence[ParamLayout]) -> None:
    """Ranks that hold the same pieces must hold the same bits: otherwise they are not replicas (experts?)."""
    ranks = council.ranks
    replicated = [(c, layout) for c, layout in zip(group, layouts, strict=True) if layout.has_replicas]
    if not replicated:
        return
    prints = [fingerprint(c.engine.storage(c.param)) for c, _ in replicated]
    mine = torch.tensor(prints, dtype=torch.int64, device="cpu").numpy().tobytes()
    council.raise_any()
    everyone = share_bytes(mine, ranks, council.device)
    for i, (candidate, layout) in enumerate(replicated):
        kept: dict[Any, list[int]] = {}
        for rank in ranks:
            kept.setdefault(tuple(h.piece for h in layout.holders_of(rank) if h.piece.numel), []).append(rank)
        for pieces, keepers in kept.items():
            first = everyone[ranks.index(keepers[0])][8 * i : 8 * i + 8]
            for rank in keepers[1:]:
                if pieces and everyone[ranks.index(rank)][8 * i : 8 * i + 8] != first:
                    plain = candidate.description.from_shapes is None
                    remedy = "; or, if each rank has its own (experts), put it in a group with rank_local=True"
                    raise ValueError(
                        f"{candidate.name}: ranks {keepers[0]} and {rank} should hold replicas "
                        f"({candidate.description.text}) but their values differ. Broadcast the weights first"
                        + (remedy if plain else "")
                    )
