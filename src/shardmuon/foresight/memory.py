"""The highest point of a step's memory: buffers in flight, batches, and what orthogonalizing takes.

What a bucket keeps and when it lets go follows stepping/run.py and stepping/buckets.py. What orthogonalizing takes is
not a formula: the code itself runs on tensors without data, and their storages are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmuon.foresight.types import BucketCount
from shardmuon.orthogonalize import FiniteWatch, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.slots import empty_batch


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
    with FakeTensorMode():
        batch = empty_batch(shape, wire, torch.device(device))
        with LiveBytes() as live:
            out = orthogonalize(
                batch,
                coefficients,
                method=choice.method,
                dtype=choice.dtype,
                kernel="torch" if choice.kernel == "triton" else choice.kernel,
                alone=choice.alone,
                watch=FiniteWatch(),
                overwrite=True,
            )
            out = out.to(wire)
    return int(live.peak)


def peak_bytes(
    buckets: Sequence[BucketCount],
    *,
    wire_of: Callable[[str], torch.dtype],
    weights: torch.dtype,
    device: str,
    coefficients: Mapping[tuple[int, int], Triples],
) -> int:
    """Bytes beyond what is kept between steps at the highest point of the buckets of one step.

    Of the Gram route the buffers, shards and owned Gram matrices are counted, not what iterating on them takes.

    Args:
        buckets: A rank's, in their order.
        wire_of: Text of a choice -> dtype on the wire.
        weights: dtype of weights, gradients and momentum.
        device: Kind of device.
        coefficients: Shape -> its Newton-Schulz steps.
    """
    now = peak = 0

    def up(size: int) -> None:
        nonlocal now, peak
        now += size
        peak = max(peak, now)

    def begin(b: BucketCount) -> None:
        up(b.own + b.gather.bytes)
        up(weights.itemsize * (2 * b.held if b.route == "gram" else b.stepped))
        up(-weights.itemsize * (b.held if b.route == "gram" else b.stepped))
        up(b.gather_received.bytes)

    def compute(b: BucketCount) -> None:
        up(-b.gather.bytes - b.gather_received.bytes)
        for m in b.matrices if b.route != "gram" else ():
            wire, steps = wire_of(m.how), coefficients[m.rows, m.cols]
            space = work_space((m.num, m.rows, m.cols), m.how, wire, device, steps)
            up(space)
            up(-space)
        up(b.scatter.bytes)
        up(b.scatter_received.bytes)

    def finish(b: BucketCount) -> None:
        up(-b.scatter.bytes)
        wire = getattr(torch, b.wire) if b.wire else weights
        copies = weights.itemsize * b.applied if wire != weights else 0
        up(copies)
        up(-copies - b.scatter_received.bytes - b.own - (weights.itemsize * b.held if b.route == "gram" else 0))

    for i in range(len(buckets) + 1):
        if i == 0 and buckets:
            begin(buckets[0])
        if i + 1 < len(buckets):
            begin(buckets[i + 1])
        if i < len(buckets):
            compute(buckets[i])
        if i > 0:
            finish(buckets[i - 1])
    return peak
