"""The highest point of a step's memory: buffers in flight, batches, and what orthogonalizing takes.

What a bucket keeps and when it lets go follows step/bucket.py. What orthogonalizing takes is not a formula: the code
itself runs on tensors without data, and their storages are counted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmuon.foresight.counting import BucketCount
from shardmuon.orthogonalize import Summing, batch_size, empty_batch, orthogonalize, sliced
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
                split_k=choice.split_k,
                watch=FiniteWatch(),
                overwrite=True,
            )
    return int(live.peak)


@lru_cache(maxsize=1024)
def _slice_space(
    shape: tuple[int, int], parts: int, how: str, wire: torch.dtype, device: str, coefficients: Triples
) -> int:
    """Bytes that one slice of a matrix of this shape takes beside it at most, with what its owner is sent."""
    choice, (rows, cols) = Choice.of(how), shape
    with FakeTensorMode():
        own = (rows // parts, cols) if rows > cols else (rows, cols // parts)
        x = empty_batch(own, wire, torch.device(device))
        with LiveBytes() as live:
            made = sliced([x], shape, coefficients, method=choice.method, dtype=choice.dtype, watch=FiniteWatch())
            run = Summing(made)
            while run.said is not None:
                (mine,) = run.said
                sent, came = (mine.new_empty((parts - 1) * mine.numel()) for _ in range(2))
                del sent
                run.hear([mine, *(part.view(mine.shape) for part in came.chunk(parts - 1))])
                del came, mine
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
    moves = [_moves(bucket, weights, device, coefficients) for bucket in buckets]
    turned = (moves[at][turn] for turn, at in turns([bucket.relays for bucket in buckets]))
    return max(itertools.accumulate(itertools.chain.from_iterable(turned), initial=0))


def _moves(
    b: BucketCount, weights: torch.dtype, device: str, coefficients: Mapping[tuple[int, int], Triples]
) -> dict[str, list[int]]:
    """Bytes that each turn of a bucket takes (above 0) and lets go, in the order of step/bucket.py."""
    wire, on_cpu, half = getattr(torch, b.wire), device == "cpu", weights.itemsize == 2
    wide = torch.float32 if half else weights
    # The new momentum; on CPUs none if the buffer has the weights' dtype, as it is made there.
    momentum = 0 if on_cpu and wire == weights else weights.itemsize
    # Results in the dtype in which weights take them, and 16-bit weights as fp32. A CPU's `add` widens 16-bit results
    # itself, at most 512 KiB at a time, which is not counted.
    result = wide.itemsize * (half + (wire != wide and not (on_cpu and wire.itemsize == 2)))

    def at_once(portion: int) -> int:
        """Elements, of a portion, that one operation makes: a large tile is cut on CPUs."""
        return min(portion, PORTION) if on_cpu else portion

    packed, filled = (momentum * at_once(portion) for portion in b.stepped)
    applied, finished = (result * at_once(portion) for portion in b.applied)
    work = _work_of(b, wire, device, coefficients)
    sent, received = b.sent, b.received
    return {
        "begin": [sent.gather.bytes, packed, -packed, received.gather.bytes, b.batches, filled, -filled],
        "compute": [
            -sent.gather.bytes - received.gather.bytes,
            work,
            -work,
            sent.scatter.bytes,
            received.scatter.bytes,
        ],
        "apply": [
            sent.relay.bytes - sent.scatter.bytes,
            applied,
            -applied,
            received.relay.bytes - b.batches - received.scatter.bytes,
        ],
        "finish": [-sent.relay.bytes, finished, -finished, -received.relay.bytes],
    }


def _work_of(b: BucketCount, wire: torch.dtype, device: str, coefficients: Mapping[tuple[int, int], Triples]) -> int:
    """Bytes that orthogonalizing a bucket takes at most: one batch after the other, slices in step with each other."""
    taken, slices = list[int](), 0
    for m in b.matrices:
        settings = m.how, wire, device, coefficients[m[:2]]
        if m.owners > 1:
            slices += m.num * _slice_space(m[:2], m.owners, *settings)
        else:
            taken.append(_work_space((m.num, *m[:2]), *settings))
    return max([*taken, slices], default=0)
