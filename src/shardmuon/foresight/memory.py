"""The highest point of a step's memory: buffers in flight, batches, and what orthogonalizing takes.

What a bucket keeps and when it lets go follows step/commit.py and step/bucket.py. What orthogonalizing takes is
not a formula: the code itself runs on tensors without data, and their storages are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmuon.foresight.types import BucketCount
from shardmuon.momentum.update import PORTION
from shardmuon.orthogonalize import batch_size, empty_batch, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.plan.pipeline import turns


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
def work_space(shape: tuple[int, int, int], how: str, wire: torch.dtype, device: str, coefficients: Triples) -> int:
    """Bytes that orthogonalizing a batch takes beside it at most, its result among them."""
    choice = Choice.of(how)
    num, rows, cols = shape
    size = 1 if choice.alone else batch_size(rows, cols, torch.device(device))
    few = 2 * size + (num % size or size)  # with the last part of a batch, if there is one
    if num > few + size:  # from here on each batch adds what it leaves: thousands of experts need not be run
        first, more = (work_space((n, rows, cols), how, wire, device, coefficients) for n in (few, few + size))
        return first + (num - few) // size * (more - first)
    with FakeTensorMode():
        batch = empty_batch(shape, wire, torch.device(device))
        with LiveBytes() as live:
            orthogonalize(
                batch,
                coefficients,
                method=choice.method,
                dtype=choice.dtype,
                kernel="torch" if choice.kernel == "triton" else choice.kernel,
                alone=choice.alone,
                watch=FiniteWatch(),
                overwrite=True,
            )
    return int(live.peak)


class _Peak:
    """The buffers of a step, as step/commit.py and step/bucket.py take them and let them go."""

    def __init__(self, weights: torch.dtype, device: str, coefficients: Mapping[tuple[int, int], Triples]) -> None:
        self._weights, self._device, self._coefficients = weights, device, coefficients
        self._now = 0
        self.most: int = 0

    def _up(self, size: int) -> None:
        self._now += size
        self.most = max(self.most, self._now)

    def _passing(self, size: int) -> None:
        self._up(size)
        self._now -= size

    def begin(self, b: BucketCount) -> None:
        shards = b.batches if b.route == "gram" else 0
        self._up(b.gather.bytes + shards)
        self._stepped(b, b.stepped[0])
        self._up(b.gather_received.bytes)
        self._up(b.batches - shards)
        self._stepped(b, b.stepped[1])

    def compute(self, b: BucketCount) -> None:
        wire = getattr(torch, b.wire)
        came = b.gather_received.bytes
        self._now -= b.gather.bytes
        if b.route == "gram":  # what came is held until what goes back is packed
            self._up(b.scatter.bytes)
            self._now -= came
        else:
            self._now -= came
            for m in b.matrices:
                size, coefficients = (m.num, m.rows, m.cols), self._coefficients[m[:2]]
                self._passing(work_space(size, m.how, wire, self._device, coefficients))
            self._up(b.scatter.bytes)
        self._up(b.scatter_received.bytes)

    def apply(self, b: BucketCount) -> None:
        self._now -= b.scatter.bytes
        self._up(b.relay.bytes)
        self._applied(b, b.applied[0])
        self._now -= b.batches + b.scatter_received.bytes
        self._up(b.relay_received.bytes)

    def finish(self, b: BucketCount) -> None:
        self._now -= b.relay.bytes
        self._applied(b, b.applied[1])
        self._now -= b.relay_received.bytes

    def _stepped(self, b: BucketCount, portion: int) -> None:
        """Count the new momentum of one portion; on CPUs nothing if the buffer has the weights' dtype, as it is made
        there."""
        if self._device != "cpu" or getattr(torch, b.wire) != self._weights:
            self._passing(self._weights.itemsize * self._at_once(portion))

    def _applied(self, b: BucketCount, portion: int) -> None:
        """Results in the dtype in which weights take them, and 16-bit weights as fp32, of what is applied at once.

        A CPU's `add` widens 16-bit results itself, at most 512 KiB at a time, which is not counted.
        """
        half, wire = self._weights.itemsize == 2, getattr(torch, b.wire)
        wide = torch.float32 if half else self._weights
        made = int(half) + (wire != wide and not (self._device == "cpu" and wire.itemsize == 2))
        self._passing(made * wide.itemsize * self._at_once(portion))

    def _at_once(self, portion: int) -> int:
        """Elements, of a portion, that one operation makes: a large tile is cut on CPUs."""
        return min(portion, PORTION) if self._device == "cpu" else portion


def peak_bytes(
    buckets: Sequence[BucketCount],
    *,
    weights: torch.dtype,
    device: str,
    coefficients: Mapping[tuple[int, int], Triples],
) -> int:
    """Bytes beyond what is kept between steps at the highest point of the buckets of one step.

    Of the Gram route the buffers and shards are counted, not what adding up and iterating takes.

    Args:
        buckets: A rank's, in their order.
        weights: dtype of weights, gradients and momentum.
        device: Kind of device.
        coefficients: Shape -> its Newton-Schulz steps.
    """
    found = _Peak(weights, device, coefficients)
    for turn, at in turns([bucket.relays for bucket in buckets]):
        getattr(found, turn)(buckets[at])
    return found.most
