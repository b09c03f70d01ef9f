"""Momentum as it is stored: plain, rounded to bf16, or as 8-bit codes; on the parameter's device or elsewhere.

A store is one parameter's momentum on this rank in one step. It loads fragments, updates them in at least fp32 and
writes them back; the pipeline does not know how.

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

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.momentum.rounding import NEAREST, Stream, fraction_of, round_by, slab_rows
from shardmuon.momentum.update import momentum_
from shardmuon.planning.layout import Fragment
from shardmuon.planning.views import Shape

BLOCK = 128  # columns
SCALE_DTYPE = torch.float32
_LEVELS = 127


class Momentum:
    """One parameter's momentum on this rank, in one step."""

    def update(
        self,
        fragments: Sequence[Fragment],
        grads: Sequence[Tensor],  # local views of these fragments, not written to
        *,
        momentum: float,
        nesterov: bool,
    ) -> Sequence[Tensor]:  # what to orthogonalize; may share memory with the momentum
        """Step these fragments' momentum, see `shardmuon.momentum.update.momentum_`."""
        raise NotImplementedError

    def direct(self, device: torch.device) -> Tensor | None:
        """The local storage, if `momentum_` may step it as it is with gradients on this device, beside other
        parameters' in one call; None: only `update` can."""
        return None


class PlainMomentum(Momentum):
    """Kept in the dtype in which it is computed. It may live on another device than the gradient."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def direct(self, device: torch.device) -> Tensor | None:
        return self._buffer if self._buffer.device == device else None

    def update(
        self, fragments: Sequence[Fragment], grads: Sequence[Tensor], *, momentum: float, nesterov: bool
    ) -> Sequence[Tensor]:
        kept = [f.select_local(self._buffer) for f in fragments]
        loaded = [b.to(g.device) for b, g in zip(kept, grads, strict=True)]
        updates = momentum_(grads, loaded, momentum=momentum, nesterov=nesterov)
        foreach_copy_(kept, loaded)
        return updates


class RoundedMomentum(Momentum):
    """Computed in fp32, kept in bf16, see [Note: rounding of the momentum]."""

    def __init__(self, buffer: Tensor, stream: Stream) -> None:
        self._buffer, self._stream = buffer, stream

    def update(
        self, fragments: Sequence[Fragment], grads: Sequence[Tensor], *, momentum: float, nesterov: bool
    ) -> Sequence[Tensor]:
        updates = []
        for fragment, grad in zip(fragments, grads, strict=True):
            kept = fragment.select_local(self._buffer)
            whole = kept.reshape(fragment.num_rows, -1)  # a copy only where a row is cut in several dims
            update = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
            for first, stop, g, out in _slabs(fragment, grad, update):
                old = whole[first:stop].to(g.device, torch.float32)
                new = _step(old, g, out, momentum, nesterov)
                moved = (new.view(torch.int32) - old.view(torch.int32)).abs_()  # in units of 2**-16 spacings
                bits = self._stream.bits(fragment, g.device, first, stop)
                whole[first:stop] = round_by(new, torch.where(moved < 0x10000, bits, NEAREST), torch.bfloat16)
            if not _is_view(whole, kept):
                kept.copy_(whole.view(kept.shape))
            updates.append(update)
        return updates


class CodedMomentum(Momentum):
    """Computed in fp32, kept as 8-bit codes with a scale per block, see [Note: 8-bit codes]."""

    def __init__(
        self,
        codes: Tensor,  # local storage's shape, int8
        scales: Tensor,  # `scale_shape`, fp32
        stream: Stream | None,  # None: `store_` rounds to nearest
        num_row_dims: int,
    ) -> None:
        self._codes, self._scales, self._stream, self._num_row_dims = codes, scales, stream, num_row_dims

    def update(
        self, fragments: Sequence[Fragment], grads: Sequence[Tensor], *, momentum: float, nesterov: bool
    ) -> Sequence[Tensor]:
        updates = []
        for fragment, grad in zip(fragments, grads, strict=True):
            codes, scales = self._select(fragment)
            update = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
            turned = fragment.turned
            # of a transpose all at once: the bits are drawn along the rows of the matrix, the blocks lie along others
            slabs = ((0, None, grad.reshape(codes.T.shape).T.float(), update.view(codes.T.shape).T),)
            for first, stop, g, out in slabs if turned else _slabs(fragment, grad, update):
                old = decode(codes[first:stop].to(g.device), scales[first:stop].to(g.device))
                new = _step(old, g, out, momentum, nesterov)
                assert self._stream is not None
                bits = self._stream.bits(fragment, g.device, first, stop)
                codes[first:stop], scales[first:stop] = encode(new, old, bits.T if turned else bits)
            updates.append(update)
        return updates

    def store_(self, fragments: Sequence[Fragment], values: Tensor) -> None:
        """Replace the momentum by these values (local storage's shape), rounded to nearest."""
        for fragment in fragments:
            codes, scales = self._select(fragment)
            flat = fragment.as_stored().select_local(values).reshape(codes.shape)
            encoded, scale = encode(flat.float(), None, None)
            codes.copy_(encoded)
            scales.copy_(scale)

    def load(self, fragments: Sequence[Fragment], dtype: torch.dtype) -> Tensor:
        """The values, in local storage's shape."""
        values = torch.zeros(self._codes.shape, dtype=dtype, device=self._codes.device)
        for fragment in fragments:
            codes, scales = self._select(fragment)
            target = fragment.as_stored().select_local(values)
            target.copy_(decode(codes, scales).view(target.shape))
        return values

    def _select(self, fragment: Fragment) -> tuple[Tensor, Tensor]:  # (rows, cols) and (rows, blocks), views
        """A fragment's codes and scales, as stored. Only its first column dim may be cut (`cuts_of` refuses others)."""
        rows = self._num_row_dims
        fragment = fragment.as_stored()
        codes = fragment.select_local(self._codes)
        inner = codes.shape[rows + 1 :].numel()
        first = fragment.local[rows][0] * inner // BLOCK
        scales = self._scales.narrow(rows, first, -(-fragment.num_cols // BLOCK))
        for dim, (start, stop) in enumerate(fragment.local[:rows]):
            scales = scales.narrow(dim, start, stop - start)
        return codes.view(fragment.num_rows, fragment.num_cols), scales.view(fragment.num_rows, -1)


def scale_shape(shape: Sequence[int], num_row_dims: int) -> Shape:
    """Shape of the scales of a tensor (the logical one, or a rank's storage): one per row and block of columns."""
    cols = torch.Size(shape[num_row_dims:]).numel()
    return (*shape[:num_row_dims], -(-cols // BLOCK))


def encode(
    new: Tensor,  # (rows, cols) fp32
    old: Tensor | None,  # the same before the step; None: round all to nearest
    bits: Tensor | None,  # (rows, cols) int32 in [0, 2**16)
) -> tuple[Tensor, Tensor]:  # (rows, cols) int8, (rows, blocks) fp32
    """Codes and scales of these values."""
    cols = new.shape[1]
    blocks = _blocks(new)
    scale = blocks.abs().amax(-1)
    # in squared codes; a block of zeros gives 0 / 0, one that is not finite gives NaN or 0
    square = (blocks.abs() / scale[..., None]).nan_to_num_(0.0).mul_(_LEVELS**2)
    low = square.sqrt().floor_()
    gap = 2 * low + 1  # to the next code
    fraction = square.sub_(low * low).div_(gap)
    threshold: Tensor | float = 0.5
    if old is not None and bits is not None:
        moved = ((blocks - _blocks(old)).abs_() / scale[..., None]).mul_(_LEVELS**2)
        threshold = torch.where(moved < gap, fraction_of(_blocks(bits)), 0.5)
    codes = (low + (fraction > threshold)).copysign_(blocks)
    return codes.to(torch.int8).view(len(new), -1)[:, :cols], scale


def decode(
    codes: Tensor,  # (rows, cols) int8
    scale: Tensor,  # (rows, blocks) fp32
) -> Tensor:  # (rows, cols) fp32
    """What codes stand for."""
    cols = codes.shape[1]
    k = _blocks(codes.float())
    scale = scale.to(SCALE_DTYPE)  # a file may hold another
    return (k * k.abs()).div_(_LEVELS**2).mul_(scale[..., None]).view(len(codes), -1)[:, :cols]


def _blocks(x: Tensor) -> Tensor:  # (rows, cols) -> (rows, blocks, BLOCK)
    return F.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)


def _slabs(fragment: Fragment, grad: Tensor, update: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Rows [first, stop) of a fragment with the gradient (fp32) and the place of the result."""
    flat, out = grad.reshape(fragment.num_rows, -1), update.view(fragment.num_rows, -1)
    step = slab_rows(grad.device, fragment.num_cols)
    for first in range(0, fragment.num_rows, step):
        stop = min(first + step, fragment.num_rows)
        yield first, stop, flat[first:stop].float(), out[first:stop]


def _step(old: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool) -> Tensor:
    """`momentum_` of decoded values: the new ones; what to orthogonalize goes to `out`."""
    new = torch.lerp(old, grad, 1 - momentum)
    out.copy_(torch.lerp(grad, new, momentum) if nesterov else new)
    return new


def _is_view(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
