"""The highest point of a step's memory: buffers in flight, batches, and what orthogonalizing takes.

What a bucket keeps and when it lets go follows step/update.py. What orthogonalizing takes is not a formula: the code
itself runs on tensors without data, and their storages are counted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmuon.foresight.counting import BucketCount
from shardmuon.orthogonalize import batch_size, empty_batch, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.plan.pipeline import turns
from shardmuon.step.update import PORTION


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside, now and at most; of tensors without data, too.

    Where a result without data is looked at, norms are taken to be 1 and nothing to be wrong.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.peak: int = 0
        self._live: set[int] = set()
        self._wrong: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            key = id(args[0])
            if func is torch.ops.aten._local_scalar_dense.default:
                return key not in self._wrong if args[0].dtype == torch.bool else 1.0
            if func is torch.ops.aten.addmm.out:  # makes no storage, and fails on tensors without data of a device
                return kwargs["out"]
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.any.default:
            self._wrong.add(id(out))  # it is asked whether any is wrong
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._live:
                    self._live.add(key)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage.nbytes(), key)
        return out

    def _gone(self, nbytes: int, key: int) -> None:
        self.now -= nbytes
        self._live.discard(key)


@lru_cache(maxsize=4096)
def _work_space(shape: tuple[int, int, int], how: str, wire: torch.dtype, device: str, coefficients: Triples) -> int:
    """Bytes that orthogonalizing a batch takes beside it at most, its result among them."""
    choice = Choice.of(how)
    num, rows, cols = shape
    size = batch_size(rows, cols, torch.device(device))
    few = 2 * size + (num % size or size)  # with the last part of a batch, if there is one
    if num > few + size:  # from here on each batch adds what it leaves: thousands of experts need not be run
        first, more = (_work_space((n, rows, cols), how, wire, device, coefficients) for n in (few, few + size))
        return first + (num - few) // size * (more - first)
    with FakeTensorMode():
        batch = empty_batch(shape, wire, torch.device(device))
        with LiveBytes() as live:
            orthogonalize(
                batch,
                coefficients,
                method=choice.method,
                dtype=choice.dtype,
                watch=FiniteWatch(),
                overwrite=True,
            )
    return int(live.peak)


def peak_bytes(
    buckets: Sequence[BucketCount],
    *,
    weights: torch.dtype,
    device: str,
    coefficients: Mapping[tuple[int, int], Triples],
) -> int:
    """Bytes beyond what is kept between steps at the highest point of the buckets of one step.

    Args:
        buckets: A rank's, in their order.
        weights: dtype of weights, gradients and momentum.
        device: Kind of device.
        coefficients: Shape -> its Newton-Schulz steps.
    """
    moves = _Moves(weights, device, coefficients)
    turned: Iterator[list[int]] = (
        getattr(moves, turn)(buckets[at]) for turn, at in turns([bucket.relays for bucket in buckets])
    )
    return max(itertools.accumulate(itertools.chain.from_iterable(turned), initial=0))


class _Moves(NamedTuple):
    """Bytes that each turn of a bucket takes (above 0) and lets go, in the order of step/update.py."""

    weights: torch.dtype
    device: str
    coefficients: Mapping[tuple[int, int], Triples]

    def begin(self, b: BucketCount) -> list[int]:
        packed, filled = (self._stepped(b, portion) for portion in b.stepped)
        return [b.sent.gather.bytes, packed, -packed, b.received.gather.bytes, b.batches, filled, -filled]

    def compute(self, b: BucketCount) -> list[int]:
        wire = getattr(torch, b.wire)
        taken = (_work_space((m.num, *m[:2]), m.how, wire, self.device, self.coefficients[m[:2]]) for m in b.matrices)
        most = max(taken, default=0)  # one after the other
        return [
            -b.sent.gather.bytes - b.received.gather.bytes,
            most,
            -most,
            b.sent.scatter.bytes,
            b.received.scatter.bytes,
        ]

    def apply(self, b: BucketCount) -> list[int]:
        made = self._applied(b, b.applied[0])
        done = b.batches + b.received.scatter.bytes
        return [b.sent.relay.bytes - b.sent.scatter.bytes, made, -made, b.received.relay.bytes - done]

    def finish(self, b: BucketCount) -> list[int]:
        made = self._applied(b, b.applied[1])
        return [-b.sent.relay.bytes, made, -made, -b.received.relay.bytes]

    def _stepped(self, b: BucketCount, portion: int) -> int:
        """The new momentum of a portion; on CPUs nothing if the buffer has the weights' dtype, as it is made there."""
        made_there = self.device == "cpu" and getattr(torch, b.wire) == self.weights
        return 0 if made_there else self.weights.itemsize * self._at_once(portion)

    def _applied(self, b: BucketCount, portion: int) -> int:
        """Results in the dtype in which weights take them, and 16-bit weights as fp32, of what is applied at once.

        A CPU's `add` widens 16-bit results itself, at most 512 KiB at a time, which is not counted.
        """
        half: bool = self.weights.itemsize == 2
        wire: torch.dtype = getattr(torch, b.wire)
        wide = torch.float32 if half else self.weights
        made = half + (wire != wide and not (self.device == "cpu" and wire.itemsize == 2))
        return made * wide.itemsize * self._at_once(portion)

    def _at_once(self, portion: int) -> int:
        """Elements, of a portion, that one operation makes: a large tile is cut on CPUs."""
        return min(portion, PORTION) if self.device == "cpu" else portion
