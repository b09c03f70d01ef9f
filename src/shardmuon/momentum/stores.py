"""Momentum as it is stored: plain, rounded to bf16, or as 8-bit codes; and rounding at random, exact on average.

[Note: bits belong to elements]
    The random bits of an element depend on (parameter, purpose, step, place in its matrix) and on nothing else:
    no generator state, no device, no layout. So replicas round alike, any sharding gives the same bits, and a resumed
    run goes on with the bits it would have had. The generator is SplitMix64 (Steele, Lea and Flood 2014,
    https://doi.org/10.1145/2714064.2660195) read as a counter: output i is a function of key + i. Each output serves
    four neighbours of a row with 16 bits each.

[Note: rounding of the momentum]
    A step moves the momentum B by (1 - mu)(G - B), often less than what the storage dtype can tell apart. Rounding to
    nearest loses such steps: with bf16 and mu = 0.95, B stops 4% to 8% short of a constant gradient. Random rounding
    loses nothing on average, but it is sqrt(2) times noisier where steps are large, as they are in training. So an
    element is rounded at random where it moved by less than the spacing of its values, and to nearest elsewhere.

[Note: 8-bit codes]
    A block is 1 x 128 elements of a row and has one fp32 scale, its largest magnitude. Code k in -127 .. 127 stands for
    sign(k) (k / 127)**2 * scale: finer near zero than equal steps, where most of a block lies. Blocks start at
    multiples of 128 columns of the logical tensor, so codes do not depend on the layout as long as no piece begins or
    ends inside a block. A block with an entry that is not finite reads as NaN.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardmuon.layout.pieces import Patch
from shardmuon.layout.views import Ints

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as signed numbers: torch's int64 arithmetic wraps around
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_LANES = 4
_SEED = 0
NEAREST = 0x8000  # in the place of random bits: round to nearest


@dataclass(frozen=True)
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


class Rounding(NamedTuple):
    """Random bits for one parameter's storages in one step.

    Attributes:
        momentum: Random bits for a momentum of bf16 or 8-bit codes. None: the momentum is stored as it is computed.
        scales: Scales of 8-bit codes; None for other momentum.
        weights: Random bits for bf16 weights. None: they are rounded to nearest.
    """

    momentum: Stream | None = None
    scales: Tensor | None = None
    weights: Stream | None = None


def _line(first: int, dims: Sequence[tuple[int, int]], device: torch.device) -> Tensor:  # 1-D, int64
    """`first` plus the sum of index times step over these dims (size, step), for every index in row-major order."""
    found = torch.full((1,), first, device=device, dtype=torch.int64)
    for size, step in dims:
        if size > 1:
            found = (found[:, None] + torch.arange(0, size * step, step, device=device)).flatten()
    return found


def mix_(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place: a bijection of int64 in which every bit of the result hangs on every bit."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # a logical shift: torch's own repeats the sign
        z *= factor
    return z


def round_by(
    x: Tensor,  # fp32
    bits: Tensor,  # int32 in [0, 2**16), shaped as x: random, or NEAREST
) -> Tensor:  # bf16
    """Round to one of the two neighbours in bf16: with random bits up with the probability that makes the expected
    value x. Values of bf16 and those that are not finite stay as they are."""
    # bf16 is the upper half of fp32, also across powers of two: a carry out of the lower half is the next value
    rounded = ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def slab(device: torch.device) -> int:
    """Number of elements to take at once: intermediate results stay in a CPU's cache, or fill an accelerator."""
    return 1 << 15 if device.type == "cpu" else 1 << 22


def round_patch(stream: Stream, patch: Patch, x: Tensor) -> Tensor:  # bf16
    """Round elements at random. x: fp32, any shape in the patch's order; the result has that shape."""
    values = x.reshape(patch.sizes)
    out = torch.empty(patch.sizes, dtype=torch.bfloat16, device=x.device)
    for cut, part in patch.slabs(slab(x.device), len(patch.sizes)):
        out.narrow(*cut).copy_(round_by(values.narrow(*cut), stream.bits(part, x.device)))
    return out.view(x.shape)


BLOCK = 128  # columns
SCALE_DTYPE = torch.float32
_LEVELS = 127


def step_stored_(
    stored: Sequence[Tensor],  # momentum in bf16; or int8 codes, and their scales; on any device, updated in place
    grad: Tensor,  # the shape of the first of them; not written to
    out: Tensor | None,  # the same shape: what to orthogonalize goes there, in its dtype
    *,
    patch: Patch,  # of that shape
    stream: Stream,
    momentum: float,
    nesterov: bool,
) -> None:
    """`shardmuon.step.update.momentum_` in fp32, see [Note: rounding of the momentum] and [Note: 8-bit codes].

    Codes have the dims of rows as they are stored, then those of columns; scales the same dims of rows, then blocks.
    """
    is_coded = len(stored) > 1
    num_dims = stored[-1].dim() - is_coded
    for cut, part in patch.slabs(slab(grad.device), num_dims):
        places, given = [t.narrow(*cut) for t in stored], grad.narrow(*cut).float()
        here = [place.to(given.device) for place in places]
        old = decode(*here) if is_coded else here[0].float()
        new = torch.lerp(old, given, 1 - momentum)
        if out is not None:
            out.narrow(*cut).copy_(torch.lerp(given, new, momentum) if nesterov else new)
        bits = stream.bits(part, given.device)
        made = encode(new, num_dims, old, bits) if is_coded else (_round_small_steps(new, old, bits),)
        for place, value in zip(places, made, strict=True):
            place.copy_(value)


def _round_small_steps(new: Tensor, old: Tensor, bits: Tensor) -> Tensor:  # bf16
    moved = (new.view(torch.int32) - old.view(torch.int32)).abs_()  # in units of 2**-16 spacings
    return round_by(new, torch.where(moved < 0x10000, bits, NEAREST))


def scale_shape(shape: Sequence[int], num_row_dims: int) -> Ints:
    """Shape of the scales of a tensor (the logical one, or a rank's storage): one per row and block of columns."""
    cols = torch.Size(shape[num_row_dims:]).numel()
    return (*shape[:num_row_dims], -(-cols // BLOCK))


def encode(
    new: Tensor,  # any float dtype, the shape of a rank's storage
    num_row_dims: int,
    old: Tensor | None = None,  # fp32, the same before the step; None: round all to nearest
    bits: Tensor | None = None,  # int32 in [0, 2**16), of that shape
) -> tuple[Tensor, Tensor]:  # int8, the same shape; (rows.., blocks) fp32
    """Codes and scales of these values. Blocks begin where those of the logical tensor do."""
    flat = new.flatten(num_row_dims).float()
    blocks = _blocks(flat)
    scale = blocks.abs().amax(-1)
    # in squared codes; a block of zeros gives 0 / 0, one that is not finite gives NaN or 0
    square = (blocks.abs() / scale[..., None]).nan_to_num_(0.0).mul_(_LEVELS**2)
    low = square.sqrt().floor_()
    gap = 2 * low + 1  # to the next code
    fraction = square.sub_(low * low).div_(gap)
    threshold: Tensor | float = 0.5
    if old is not None and bits is not None:
        moved = ((blocks - _blocks(old.flatten(num_row_dims))).abs_() / scale[..., None]).mul_(_LEVELS**2)
        random = (_blocks(bits.flatten(num_row_dims)).float() + 0.5) / 0x10000  # the middle of what 16 bits stand for
        threshold = torch.where(moved < gap, random, 0.5)
    codes = (low + (fraction > threshold)).copysign_(blocks)
    return codes.to(torch.int8).flatten(-2)[..., : flat.shape[-1]].view(new.shape), scale


def decode(
    codes: Tensor,  # int8, the shape of a rank's storage
    scale: Tensor,  # (rows.., blocks)
) -> Tensor:  # fp32, the shape of the codes
    """Values that 8-bit codes and their scales stand for."""
    flat = codes.flatten(scale.dim() - 1)
    k = _blocks(flat.float())
    scale = scale.to(SCALE_DTYPE)  # a file may hold another
    return (k * k.abs()).div_(_LEVELS**2).mul_(scale[..., None]).flatten(-2)[..., : flat.shape[-1]].view(codes.shape)


def _blocks(x: Tensor) -> Tensor:  # (..., cols) -> (..., blocks, BLOCK)
    padded = F.pad(x, (0, -x.shape[-1] % BLOCK))
    return padded.view(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
