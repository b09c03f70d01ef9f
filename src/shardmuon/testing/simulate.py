"""Simulated ranks: a plan carried out in one process. Storages are tensors in a list, an exchange is a copy.

The lines that pack, orthogonalize and apply are the library's own (`BucketRun`); only the wire is missing. A thousand
ranks and layouts that no engine makes run in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmuon.momentum.stores import PlainMomentum
from shardmuon.planning.layout import Box, Holder, ParamLayout
from shardmuon.planning.plan import Plan
from shardmuon.planning.types import RankBucket
from shardmuon.planning.views import Shape
from shardmuon.stepping.program import Program
from shardmuon.stepping.run import make_run
from shardmuon.stepping.settings import Settings
from shardmuon.stepping.work import Kernel, ParamWork

DEFAULT_KERNEL = Kernel(torch.float32)


def default_settings(**changes: object) -> Settings:
    """Settings of one group with torch.optim.Muon's defaults."""
    values: dict[str, object] = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "coefficients": ((3.4445, -4.7750, 2.0315),) * 5,
        "eps": 1e-7,
        "adjust_lr_fn": None,
        "extra_scale_factor": 1.0,
        "weight_decay_mode": "decoupled",
    }
    return Settings(**{**values, **changes})  # type: ignore[arg-type]


def storage_shape(holders: Sequence[Holder]) -> Shape:
    """Shape of what one rank with these holders stores: N-D for boxes, 1-D for flat ranges."""
    if not holders:
        return (0,)
    if isinstance(holders[0].piece, Box):
        ends = [
            tuple(o + s for o, s in zip(h.local, h.piece.size, strict=True))
            for h in holders
            if isinstance(h.piece, Box)
        ]
        return tuple(max(end) for end in zip(*ends, strict=True))
    return (max(h.local[0] + h.piece.numel for h in holders),)


def _places(full: Tensor, storage: Tensor, holder: Holder) -> tuple[Tensor, Tensor]:
    """The holder's piece as views of the logical tensor and of the rank's storage."""
    if isinstance(holder.piece, Box):
        whole, local = full, storage
        for d, (offset, size) in enumerate(zip(holder.piece.offset, holder.piece.size, strict=True)):
            whole, local = whole.narrow(d, offset, size), local.narrow(d, holder.local[d], size)
        return whole, local
    whole = full.view(-1)[holder.piece.start : holder.piece.stop]
    return whole, storage[holder.local[0] : holder.local[0] + holder.piece.numel]


def shard(
    full: Tensor,  # the logical tensor
    holders: Sequence[Holder],  # of one rank
) -> Tensor:  # storage_shape(holders)
    """What one rank stores of a logical tensor."""
    storage = torch.zeros(storage_shape(holders), dtype=full.dtype)
    for holder in holders:
        if holder.piece.numel:
            whole, local = _places(full, storage, holder)
            local.copy_(whole)
    return storage


def unshard(storages: Mapping[int, Tensor], layout: ParamLayout) -> Tensor:
    """Put a logical tensor together again.

    Raises:
        AssertionError: Replicas of a piece differ in some bit.
    """
    full = torch.zeros(layout.shape, dtype=next(iter(storages.values())).dtype)
    seen: set[object] = set()
    for holder in layout.holders:
        if holder.piece.numel:
            whole, local = _places(full, storages[holder.rank], holder)
            if holder.piece in seen:
                assert torch.equal(whole, local), f"replicas of {holder.piece} differ on rank {holder.rank}"
            whole.copy_(local)
            seen.add(holder.piece)
    return full


@dataclass
class SimulatedRanks:
    """All ranks of a plan with their storages of weights and momentum.

    Attributes:
        plan: The plan that they carry out.
        weights: rank -> param index -> storage.
        momentum: The same for the momentum.
        sent: rank -> wire elements sent so far.
        orthogonalized: Matrices orthogonalized so far, all ranks together.
        exchanges: Exchanges so far (a bucket has two, or none).
        kept: rank -> param index -> what it stores of each tensor that stages keep; zeros at first.
    """

    plan: Plan
    weights: dict[int, dict[int, Tensor]]
    momentum: dict[int, dict[int, Tensor]]
    sent: dict[int, int]
    orthogonalized: int = 0
    exchanges: int = 0
    kept: dict[int, dict[int, tuple[Tensor, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, weights: Sequence[Tensor]) -> SimulatedRanks:
        """Cut these logical weights (one per spec of the plan) up; momentum starts at zero."""
        held = _shard_all(plan, weights)
        zeros = {rank: {i: torch.zeros_like(t) for i, t in row.items()} for rank, row in held.items()}
        kept = {
            rank: {
                i: tuple(torch.zeros(storage_shape(k.layout.holders_of(rank))) for k in plan.specs[i].kept) for i in row
            }
            for rank, row in held.items()
        }
        return cls(plan, held, zeros, dict.fromkeys(held, 0), kept=kept)

    def full_weights(self) -> list[Tensor]:
        """The logical weights; asserts that replicas are equal."""
        return [
            unshard({rank: self.weights[rank][i] for rank in spec.layout.ranks}, spec.layout)
            for i, spec in enumerate(self.plan.specs)
        ]

    def step(self, grads: Sequence[Tensor], settings: Settings | None = None, kernel: Kernel = DEFAULT_KERNEL) -> None:
        """One optimizer step of all ranks on these logical gradients (one per spec)."""
        settings = settings or default_settings()
        local = _shard_all(self.plan, grads)
        work = {
            rank: {
                i: ParamWork(
                    self.weights[rank][i],
                    grad,
                    PlainMomentum(self.momentum[rank][i]),
                    settings,
                    kept=self.kept[rank][i],
                )
                for i, grad in row.items()
            }
            for rank, row in local.items()
        }
        for bucket in self.plan.buckets:
            views = {rank: self.plan.rank_bucket(bucket, rank) for rank in bucket.ranks}
            runs = {
                rank: make_run(Program(self.plan, view, rank), work[rank], kernel, torch.device("cpu"))
                for rank, view in views.items()
            }
            packed = {rank: run.pack() for rank, run in runs.items()}
            arrived = self._exchange(views, packed, "gather") if bucket.exchange else packed
            results = {rank: run.orthogonalize(arrived[rank]) for rank, run in runs.items()}
            returned = self._exchange(views, results, "scatter") if bucket.exchange else results
            for rank, run in runs.items():
                run.apply(returned[rank])
                self.orthogonalized += run.num_orthogonalized

    def _exchange(self, views: Mapping[int, RankBucket], send: Mapping[int, Tensor], which: str) -> dict[int, Tensor]:
        """What `all_to_all_single` does, after checking that both ends of every message expect the same size."""
        transfers = {rank: getattr(view, which) for rank, view in views.items()}
        messages: dict[int, list[Tensor]] = {rank: [] for rank in views}
        for position, source in enumerate(views):
            assert sum(transfers[source].send_splits) == send[source].numel()
            self.sent[source] += send[source].numel()
            parts = send[source].split(list(transfers[source].send_splits))
            for target, part in zip(views, parts, strict=True):
                assert transfers[target].recv_splits[position] == part.numel(), (which, source, target)
                if part.numel():
                    messages[target].append(part)
        self.exchanges += 1
        empty = next(iter(send.values())).new_empty(0)
        return {rank: torch.cat(parts) if parts else empty for rank, parts in messages.items()}


def _shard_all(plan: Plan, tensors: Sequence[Tensor]) -> dict[int, dict[int, Tensor]]:
    """rank -> param index -> storage, for logical tensors that correspond to the plan's specs."""
    held: dict[int, dict[int, Tensor]] = {}
    for index, (spec, full) in enumerate(zip(plan.specs, tensors, strict=True)):
        for rank in spec.layout.ranks:
            held.setdefault(rank, {})[index] = shard(full, spec.layout.holders_of(rank))
    return held
