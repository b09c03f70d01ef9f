"""The last step's proof: is the update of the sharded run the one that a single process computes?

Before the last step every rank gathers the whole parameters, gradients and momentum of the Muon matrices; after it,
the whole parameters again. A fresh `Muon` in one process, on plain copies, then takes the same step, and the two
updates are compared. What is compared is the update, `(before * (1 - lr * weight_decay) - after) / lr`, and not the
parameter, in which a small learning rate would hide any error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.demo.engines import TorchEngine

__all__ = ["Proof", "StepRecorder"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What the last step showed. `largest_difference` is the largest over the matrices of
    `norm(sharded update - dense update) / norm(dense update)`; `worst` names that parameter."""

    layout: str
    num_matrices: int
    largest_difference: float
    worst: str
    bitwise_equal: bool
    replicas_equal: bool

    @property
    def passed(self) -> bool:
        return self.bitwise_equal and self.replicas_equal

    def __str__(self) -> str:
        def yes(value: bool) -> str:
            return "yes" if value else "no"

        verdict = "the sharded update is the dense one" if self.passed else "THE SHARDED UPDATE IS NOT THE DENSE ONE"
        return (
            f"{verdict}: layout {self.layout}, {self.num_matrices} matrices checked, "
            f"largest relative difference {self.largest_difference:.1e} ({self.worst}), "
            f"bitwise equal {yes(self.bitwise_equal)}, same weights on every rank {yes(self.replicas_equal)}"
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One Muon parameter, whole, just before the step."""

    name: str
    options: Mapping[str, Any]  # of its group
    before: Tensor
    grad: Tensor
    momentum: Tensor


class StepRecorder:
    """Record a step of `optimizer` and check it. Every rank calls `before`, then steps, then calls `check`."""

    def __init__(self, model: nn.Module, optimizer: Muon, options: Mapping[str, Any]) -> None:
        """`options` are the optimizer's constructor options that a group does not carry, but for its process group."""
        names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
        self._optimizer = optimizer
        # as they are now: an engine may put something else in the groups
        self._matrices = [
            (names[id(p)], p, index)
            for index, group in enumerate(optimizer.param_groups)
            if group["use_muon"]
            for p in group["params"]
        ]
        self._options = options
        self._recorded: list[_Recorded] = []

    def before(self, engine: TorchEngine) -> None:
        """Gather what the step will read. Collective; call with gradients in place."""
        self._recorded = []
        for name, p, index in self._matrices:
            # the reference is dense and on one rank
            here = ("params", "param_names", "tp_group", "process_group", "partition_dim", "partition_stride")
            options = {key: value for key, value in self._optimizer.param_groups[index].items() if key not in here}
            whole = engine.whole_weight(p), engine.whole_grad(p), engine.whole_momentum(p)
            self._recorded.append(_Recorded(name, options, *whole))

    def check(self, engine: TorchEngine, layout: str) -> Proof:
        """Gather the stepped parameters and compare on rank 0. Collective: an error of rank 0 is raised on all."""
        after = [engine.whole_weight(p) for _, p, _ in self._matrices]
        replicas_equal = _equal_on_all_ranks([engine.replica(p) for _, p, _ in self._matrices])
        verdict: list[Proof | str] = [""]
        if _rank() == 0:
            try:
                verdict = [self._compare(after, layout, replicas_equal)]
            except Exception as error:  # the other ranks wait for the verdict below
                verdict = [f"{type(error).__name__}: {error}"]
        if dist.is_initialized():
            dist.broadcast_object_list(verdict, src=0)
        if isinstance(verdict[0], str):
            raise RuntimeError(f"the dense reference of the last step failed: {verdict[0]}")
        return verdict[0]

    def _compare(self, after: list[Tensor], layout: str, replicas_equal: bool) -> Proof:
        dense = self._dense_step()
        worst, worst_name, num_matrices = 0.0, "all equal", 0
        for recorded, sharded_after, dense_after in zip(self._recorded, after, dense, strict=True):
            sharded, reference = (_update(recorded, result) for result in (sharded_after, dense_after))
            gap = (sharded - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1).clamp_min(1e-30)
            num_matrices += gap.numel()
            largest = gap.max().item()
            if largest > worst or math.isnan(largest):  # nothing is larger than a NaN, which so stays
                worst, worst_name = largest, recorded.name
        bitwise = all(torch.equal(a, b) for a, b in zip(after, dense, strict=True))
        return Proof(layout, num_matrices, worst, worst_name, bitwise, replicas_equal)

    def _dense_step(self) -> list[Tensor]:
        """The recorded parameters after the same step of a new Muon on plain tensors in this one process."""
        weights = [nn.Parameter(recorded.before.clone()) for recorded in self._recorded]
        groups = [
            dict(recorded.options, params=[weight]) for recorded, weight in zip(self._recorded, weights, strict=True)
        ]
        optimizer = Muon(groups, lr=groups[0]["lr"], **self._options)
        for recorded, weight in zip(self._recorded, weights, strict=True):
            weight.grad = recorded.grad.clone()
            optimizer.state[weight]["momentum_buffer"] = recorded.momentum.clone()
        optimizer.step()
        return [weight.detach() for weight in weights]


def _update(recorded: _Recorded, after: Tensor) -> Tensor:
    """The update that led to `after`, in fp64, as a batch of matrices (E, M, N)."""
    lr, weight_decay = float(recorded.options["lr"]), float(recorded.options["weight_decay"])
    update = (recorded.before.double() * (1.0 - lr * weight_decay) - after.double()) / lr
    return update.reshape(-1, *update.shape[-2:])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _equal_on_all_ranks(tensors: list[Tensor]) -> bool:
    """Whether every rank holds the same bytes. Collective."""
    if not dist.is_initialized():
        return True
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1
