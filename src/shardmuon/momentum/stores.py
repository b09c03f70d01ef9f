"""Storage formats of momentum (plain, bf16, 8-bit codes), and stochastic rounding, which is unbiased.

[Note: bits belong to elements]
    The random bits of an element depend only on the parameter, the purpose (momentum or weights), the step and the
    element's position in its matrix. There is no generator state, and the bits do not depend on device or layout.
    Therefore replicas round in the same way, all shardings use the same bits, and a resumed run uses the same bits as
    an uninterrupted run.

    The generator is SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2714064.2660195). It is used with a
    counter: output i depends only on the key and i. An output has 64 bits, 16 for each of four neighboring elements of
    a row.

[Note: rounding of the momentum]
    With gradient G and momentum coefficient mu, a step changes the momentum B by (1 - mu)(G - B). This change is often
    smaller than the spacing of numbers in the storage dtype. Rounding to nearest then loses the change: with bf16 and
    mu = 0.95, B stops 4% to 8% short of a constant gradient. Stochastic rounding does not lose such changes on average,
    but its RMS error is sqrt(2) times as large as that of rounding to nearest. Therefore an element is rounded
    stochastically if the step changes it by less than the spacing at its value, and to nearest otherwise.

[Note: 8-bit codes]
    A block has 128 consecutive elements of a row and one fp32 scale, the largest magnitude in the block. Code k, from
    -127 to 127, represents the value sign(k) (k / 127)**2 * scale. These values are denser near zero, where most
    elements are, than equidistant values would be. Blocks start at multiples of 128 columns of the logical tensor. So
    codes do not depend on the layout, unless a shard begins or ends inside a block. A block with a NaN or Inf decodes
    to NaN.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardmuon.layout.pieces import Patch
from shardmuon.layout.views import Ints

# The constants of SplitMix64, written as signed integers because torch's int64 arithmetic wraps around.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_LANES = 4
_NEAREST = 0x8000  # rounds an element to nearest if used in place of its 16 random bits


@dataclass(frozen=True)
class Stream:
    """Source of 16 random bits for each element of one parameter, in one step and for one purpose (momentum or
    weights).

    Attributes:
        key: 64-bit hash of parameter, purpose and step, as a signed integer.
        cols: Number of columns of the parameter's widest matrix.
    """

    key: int
    cols: int

    @classmethod
    def of(cls, identity: str, purpose: str, step: int, cols: int) -> Stream:
        """Create the stream of random bits for one parameter, purpose and step. Streams that differ in any of the three
        are independent.

        Args:
            identity: The parameter's name, the same on all ranks.
            purpose: "momentum" or "weights".
            step: Number of the step, counted from 1.
            cols: Number of columns of the parameter's widest matrix. This number is not hashed, but it determines which
                counters of the random number generator each row uses.
        """
        text = repr((0, identity, purpose, step))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little", signed=True), cols)

    def bits(self, patch: Patch, device: torch.device) -> Tensor:
        """Generate 16 random bits for each element of a patch (rows and columns of a matrix). The result is an int32
        tensor of shape `patch.sizes` with values in [0, 2**16)."""
        # `along`: dims of the patch that step through columns of the matrix; `across`: dims that step through rows
        along = [d for d, step in enumerate(patch.cols) if step]
        across = [d for d, step in enumerate(patch.cols) if not step]
        order = (*across, *along)
        height, width = (
            1 + sum((size - 1) * step for size, step in zip(patch.sizes, steps, strict=True))
            for steps in (patch.rows, patch.cols)
        )
        per_row = -(-self.cols // _LANES)
        left, right = patch.col // _LANES, -(-(patch.col + width) // _LANES)
        rows = torch.arange(patch.row, patch.row + height, device=device).mul_(per_row).add_(patch.matrix << 44)
        rows = rows.as_strided([patch.sizes[d] for d in across], [patch.rows[d] for d in across])
        lanes = mix_(rows.unsqueeze(-1) + torch.arange(left, right, device=device), self.key).view(torch.int16)
        strides = (*lanes.stride()[:-1], *(patch.cols[d] for d in along))
        found = lanes.as_strided([patch.sizes[d] for d in order], strides, patch.col - left * _LANES)
        return (found.to(torch.int32) & 0xFFFF).permute([order.index(d) for d in range(len(order))])

    def round(self, patch: Patch, x: Tensor) -> Tensor:  # returns bf16 values
        """Round the elements of a patch (rows and columns of a matrix) stochastically. `x` holds the elements in fp32,
        in the order of the patch. It can have any shape, and the result has the same shape."""
        values = x.reshape(patch.sizes)
        out = torch.empty(patch.sizes, dtype=torch.bfloat16, device=x.device)
        for cut, part in patch.slabs(_slab(x.device), len(patch.sizes)):
            out.narrow(*cut).copy_(_round_by(values.narrow(*cut), self.bits(part, x.device)))
        return out.view(x.shape)


class Rounding(NamedTuple):
    """Random bits and scales with which one parameter's momentum and weights are rounded in one step.

    Attributes:
        momentum: Source of random bits for momentum in bf16 or 8-bit codes. None: momentum is stored as computed.
        scales: Scales of 8-bit codes; None in other formats.
        weights: Source of random bits for bf16 weights. None: weights are rounded to nearest.
    """

    momentum: Stream | None = None
    scales: Tensor | None = None
    weights: Stream | None = None


def mix_(z: Tensor, key: Tensor | int) -> Tensor:
    """Replace the counters `z`, in place, with SplitMix64's outputs for a key. Changing only the counter or only the
    key always changes the output. Each bit of the output depends on all bits of both."""
    z.mul_(_GAMMA).add_(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        # mask off the copies of the sign bit that the shift inserts
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z *= factor
    return z


def _round_by(
    x: Tensor,  # values to round, in fp32
    bits: Tensor,  # random bits (int32 in [0, 2**16)) or _NEAREST, with the shape of x
) -> Tensor:  # returns bf16 values
    """Round each element of x to one of its two neighbors in bf16: to the nearest if its entry in `bits` is _NEAREST,
    otherwise at random, so that the expected value is x. NaN, Inf and elements that bf16 represents exactly do not
    change."""
    # A bf16 number is the upper half of an fp32 number, so a carry out of the lower half gives the next bf16 number,
    # even across powers of 2.
    rounded = ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _slab(device: torch.device) -> int:
    """Return the number of elements of a momentum or weight tensor to process at once: on a CPU, few enough for
    temporaries to fit in the cache; on an accelerator, enough to keep it busy."""
    return 1 << 15 if device.type == "cpu" else 1 << 22


BLOCK = 128  # columns per block; all elements of a block share a scale
_LEVELS = 127


def step_stored_(
    stored: Sequence[Tensor],  # (bf16 momentum,) or (8-bit codes of momentum, scales), on any device; updated in place
    grad: Tensor,  # gradient, with the shape of stored[0]; not changed
    out: Tensor | None,  # tensor with the shape of `grad`, overwritten with the orthogonalization's input
    *,
    patch: Patch,  # the part of the matrix that `grad` covers, viewed in the shape of `grad`
    stream: Stream,
    momentum: float,
    nesterov: bool,
) -> None:
    """Update stored momentum by one step, computed in fp32 as in `shardmuon.step.update.momentum_`. See [Note: rounding
    of the momentum] and [Note: 8-bit codes].

    The dims of the 8-bit codes are row dims followed by column dims. The dims of the scales are the same row dims,
    followed by one dim that indexes blocks.
    """
    is_coded = len(stored) > 1
    num_dims = stored[-1].dim() - is_coded
    for cut, part in patch.slabs(_slab(grad.device), num_dims):
        places, given = [t.narrow(*cut) for t in stored], grad.narrow(*cut).float()
        here = [place.to(given.device) for place in places]
        old = decode(*here) if is_coded else here[0].float()
        new = torch.lerp(old, given, 1 - momentum)
        if out is not None:
            out.narrow(*cut).copy_(torch.lerp(given, new, momentum) if nesterov else new)
        bits = stream.bits(part, given.device)
        if is_coded:
            made: tuple[Tensor, ...] = encode(new, num_dims, old, bits)
        else:
            # Number of fp32 values between the old and the new momentum. Neighboring bf16 values are 2**16 fp32 values
            # apart.
            moved = (new.view(torch.int32) - old.view(torch.int32)).abs_()
            made = (_round_by(new, torch.where(moved < 0x10000, bits, _NEAREST)),)
        for place, value in zip(places, made, strict=True):
            place.copy_(value)


def scale_shape(shape: Sequence[int], num_row_dims: int) -> Ints:
    """Return the shape of the scales of 8-bit momentum for a parameter with the given (logical or local) shape: one
    scale per row and block of columns."""
    cols = torch.Size(shape[num_row_dims:]).numel()
    return (*shape[:num_row_dims], -(-cols // BLOCK))


def encode(
    new: Tensor,  # momentum in any float dtype, with the shape of a rank's local tensor
    num_row_dims: int,
    old: Tensor | None = None,  # momentum before the step, in fp32; None: all values are rounded to nearest
    bits: Tensor | None = None,  # random bits (int32 in [0, 2**16)); None: all values are rounded to nearest
) -> tuple[Tensor, Tensor]:  # int8 codes with the shape of `new`, and fp32 scales with shape (..., blocks)
    """Convert the momentum `new` to 8-bit codes and scales. Each row of the rank's local tensor must begin where a
    block of the whole tensor begins."""
    flat = new.flatten(num_row_dims).float()
    blocks = _blocks(flat)
    scale = blocks.abs().amax(-1)
    # Squares of the unrounded 8-bit codes. A block of zeros (0 / 0) or a block with NaN or Inf gives NaN, which is
    # replaced with 0.
    square = (blocks.abs() / scale[..., None]).nan_to_num_(0.0).mul_(_LEVELS**2)
    low = square.sqrt().floor_()
    gap = 2 * low + 1  # distance between the square of a code and the square of the next code
    fraction = square.sub_(low * low).div_(gap)
    threshold: Tensor | float = 0.5
    if old is not None and bits is not None:
        moved = ((blocks - _blocks(old.flatten(num_row_dims))).abs_() / scale[..., None]).mul_(_LEVELS**2)
        # The 16 random bits of an element select one of 2**16 equal intervals of (0, 1). The midpoint of the interval
        # becomes the threshold above which the code is rounded up.
        random = (_blocks(bits.flatten(num_row_dims)).float() + 0.5) / 0x10000
        threshold = torch.where(moved < gap, random, 0.5)
    codes = (low + (fraction > threshold)).copysign_(blocks)
    return codes.to(torch.int8).flatten(-2)[..., : flat.shape[-1]].view(new.shape), scale


def decode(
    codes: Tensor,  # 8-bit codes (int8), with the shape of a rank's local tensor
    scale: Tensor,  # scales with shape (..., blocks)
) -> Tensor:  # returns fp32 values with the shape of `codes`
    """Convert 8-bit codes and their scales to fp32 values."""
    flat = codes.flatten(scale.dim() - 1)
    k = _blocks(flat.float())
    scale = scale.float()  # scales that come from a checkpoint can have a dtype other than fp32
    return (k * k.abs()).div_(_LEVELS**2).mul_(scale[..., None]).flatten(-2)[..., : flat.shape[-1]].view(codes.shape)


def _blocks(x: Tensor) -> Tensor:  # reshapes (..., cols) to (..., blocks, BLOCK); pads the last block with zeros
    padded = F.pad(x, (0, -x.shape[-1] % BLOCK))
    return padded.view(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
