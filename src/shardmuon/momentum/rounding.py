"""Rounding to fewer bits at random, so that the expected value is exact.

[Note: bits belong to elements]
    The random bits of an element depend on (parameter, purpose, step, place in its matrix) and on nothing else:
    no generator state, no device, no layout. So replicas round alike, any sharding gives the same bits, and a resumed
    run goes on with the bits it would have had. The generator is SplitMix64 (Steele, Lea and Flood 2014,
    https://doi.org/10.1145/2714064.2660195) read as a counter: output i is a function of key + i. Each output serves
    four neighbours of a row with 16 bits each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon.layout.pieces import Patch

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as signed numbers: torch's int64 arithmetic wraps around
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_LANES = 4
_SEED = 0
NEAREST = 0x8000  # in the place of random bits: round to nearest


@dataclass(frozen=True, slots=True)
class Stream:
    """16 random bits for every element of one parameter, at one step, for one purpose.

    Attributes:
        key: 64 bits, signed.
        cols: Columns of the parameter's matrices, of the one that has most.
    """

    key: int
    cols: int

    @classmethod
    def of(cls, identity: str, purpose: str, step: int, cols: int) -> Stream:
        """The stream of these four; streams that differ in any are independent."""
        text = repr((_SEED, identity, purpose, step))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little", signed=True), cols)

    def bits(self, patch: Patch, device: torch.device) -> Tensor:  # patch.sizes, int32 in [0, 2**16)
        """The bits of these elements."""
        along = [d for d, step in enumerate(patch.cols) if step]  # dims that run along columns
        across = [d for d, step in enumerate(patch.cols) if not step]
        per_row = -(-self.cols // _LANES)
        begin = (patch.matrix << 44) + patch.row * per_row
        rows = _line(begin, [(patch.sizes[d], patch.rows[d] * per_row) for d in across], device)
        steps = [(patch.sizes[d], patch.cols[d]) for d in along]
        width = 1 + sum((size - 1) * step for size, step in steps)
        left, right = patch.col // _LANES, -(-(patch.col + width) // _LANES)
        counter = rows[:, None] + torch.arange(left, right, device=device, dtype=torch.int64)
        lanes = mix_(counter.mul_(GAMMA).add_(self.key)).view(torch.int16)
        skipped = patch.col - left * _LANES
        if width == math.prod(size for size, _ in steps):  # no column in between is left out
            lanes = lanes[:, skipped : skipped + width]
        else:
            lanes = lanes[:, _line(skipped, steps, device)]
        order = (*across, *along)
        found = (lanes.to(torch.int32) & 0xFFFF).view([patch.sizes[d] for d in order])
        return found.permute([order.index(d) for d in range(len(order))])


def _line(first: int, dims: Sequence[tuple[int, int]], device: torch.device) -> Tensor:  # 1-D, int64
    """`first` plus the sum of index times step over these dims (size, step), for every index in row-major order."""
    found = torch.full((1,), first, device=device, dtype=torch.int64)
    for size, step in dims:
        if size > 1:
            found = (found[:, None] + torch.arange(0, size * step, step, device=device)).flatten()
    return found


def mix_(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place: a bijection of int64 in which every bit of the result hangs on every bit."""
    z ^= _shifted(z, 30)
    z *= _MIX_1
    z ^= _shifted(z, 27)
    z *= _MIX_2
    z ^= _shifted(z, 31)
    return z


def _shifted(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own repeats the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def fraction_of(bits: Tensor) -> Tensor:  # int32 in [0, 2**16) -> fp32 in (0, 1)
    """The middle of the interval that 16 bits stand for. Integers plus 0.5 would be of torch's default dtype."""
    return (bits.float() + 0.5) / 0x10000


def round_by(
    x: Tensor,  # fp32
    bits: Tensor,  # int32 in [0, 2**16), shaped as x: random, or NEAREST
    dtype: torch.dtype,  # bfloat16 or float16
) -> Tensor:  # dtype
    """Round to one of the two neighbours in `dtype`: with random bits up with the probability that makes the expected
    value x. Values of `dtype` and those that are not finite stay as they are."""
    if dtype == torch.bfloat16:
        # bf16 is the upper half of fp32, also across powers of two: a carry out of the lower half is the next value
        rounded = ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    else:
        # fp16 has 10 bits after the leading one and no spacing below 2**-24
        exponent = torch.frexp(x).exponent.clamp_(-13, 17)
        spacing = ((exponent + (127 - 11)) << 23).view(torch.float32)
        scaled = x / spacing
        low = scaled.floor()
        rounded = (low + (scaled - low > fraction_of(bits))) * spacing  # a sum of scaled and bits would round
    return torch.where(x.isfinite(), rounded, x).to(dtype)


def slab(device: torch.device) -> int:
    """Number of elements to take at once: intermediate results stay in a CPU's cache, or fill an accelerator."""
    return 1 << 15 if device.type == "cpu" else 1 << 22


def round_patch(stream: Stream, patch: Patch, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Round elements at random. x: fp32, any shape in the patch's order; the result has that shape."""
    values = x.reshape(patch.sizes)
    out = torch.empty(patch.sizes, dtype=dtype, device=x.device)
    for cut, part in patch.slabs(slab(x.device), len(patch.sizes)):
        out.narrow(*cut).copy_(round_by(values.narrow(*cut), stream.bits(part, x.device), dtype))
    return out.view(x.shape)
