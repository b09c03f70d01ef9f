"""One bucket of the Gram route in one step on one rank, on shards that stay.

See plan/cuts.py, [Note: the Gram route]. Its tensors are fp32 (fp64 where wires are), whatever the products of other
buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import foreach_norm, ieee_products
from shardmuon.layout.views import Ints
from shardmuon.orthogonalize import Products, factor_of, normalize_into
from shardmuon.orthogonalize.gram import pack_symmetric, unpack_symmetric
from shardmuon.plan.gram import GramProgram, GramShard, Message
from shardmuon.step.bucket import Bound, Exchange, Kernel
from shardmuon.step.update import Results, Work, apply_results, update_momentum


class _Scaled(NamedTuple):
    """A symmetric matrix and a norm that travel together: a part of a Gram matrix with the norm of its columns, or a
    factor with the norm of the whole matrix."""

    matrix: Tensor
    norm: Tensor  # 0-dim fp64


def run_gram(bound: Bound, work: Work, kernel: Kernel, exchange: Exchange) -> Iterator[None]:
    """Carry a bucket out, see `shardmuon.step.bucket.run_owners`. Shards stay where they are, whatever the kernel's
    device."""
    run, gather, scatter = GramRun(bound, work), bound.program.gather, bound.program.scatter
    pending = [exchange(run.pack(), gather.holder_splits, gather.owner_splits)]
    run.fill()
    yield
    send = run.iterate(pending.pop().wait())
    pending.append(exchange(send, scatter.owner_splits, scatter.holder_splits))
    del send
    yield
    run.apply(pending.pop().wait())


class GramRun:
    """One bucket's shards on this rank in one step, with norms, parts and factors of their matrices."""

    def __init__(self, bound: Bound, work: Work) -> None:
        assert isinstance(bound.program, GramProgram), "of a bucket of this route"
        self._bound, self._program, self._work = bound, bound.program, work
        self._wire, self._device = bound.wire, bound.device
        self._norms: dict[int, Tensor] = {}  # item -> norm of this rank's shard
        self._parts: dict[int, list[_Scaled]] = {}  # owned item -> parts of its Gram matrix, this rank's first
        self._factors: dict[int, _Scaled] = {}

    def pack(self) -> Tensor:  # 1-D: the gather's send buffer
        """Update the momentum of what other ranks add up, and send its Gram matrices."""
        self._shards = self._bound.buffer([self._program.batch_numel])
        update_momentum(self._bound.foreign, self._work, self._bound.foreign.on(self._shards))
        sent = {message.item for message in self._program.parts_sent}
        parts = {shard.item: self._part(shard) for shard in self._program.shards if shard.item in sent}
        return self._packed(self._program.parts_sent, self._program.gather.holder_splits, parts)

    def fill(self) -> None:
        """Update the momentum of all else, and make the parts of what this rank adds up."""
        update_momentum(self._bound.own, self._work, self._bound.own.on(self._shards))
        for shard in self._program.shards:
            if shard.item not in self._norms:
                if shard.added:
                    self._parts[shard.item] = [self._part(shard)]
                else:
                    self._norms[shard.item] = _normalize(self._view(shard))

    def _view(self, shard: GramShard) -> Tensor:  # (short side, columns)
        return self._shards.as_strided(shard.shape, (shard.shape[1], 1), shard.start)

    def _part(self, shard: GramShard) -> _Scaled:
        """Normalize a shard. Returns its Gram matrix and its norm."""
        x = self._view(shard)
        norm = self._norms[shard.item] = _normalize(x)
        # X X^T, however few columns this rank has
        return _Scaled(
            Products(x.shape, self._device, self._wire).symmetric_mm(x, x.mT, out=x.new_empty(len(x), len(x))), norm
        )

    def _packed(self, messages: Sequence[Message], splits: Ints, values: Mapping[int, _Scaled]) -> Tensor:
        send = self._bound.buffer(splits)
        for message in messages:
            target, (matrix, norm) = send.narrow(0, message.start, message.size), values[message.item]
            bits = norm.reshape(1).view(self._wire)  # the fp64 norm, bit for bit
            pack_symmetric(matrix, target[: -len(bits)])
            target[-len(bits) :].copy_(bits)
        return send

    def _read(self, came: Tensor, message: Message) -> _Scaled:
        source = came.narrow(0, message.start, message.size)
        tail = torch.float64.itemsize // self._wire.itemsize
        norm = source[-tail:].clone().view(torch.float64)[0]
        return _Scaled(unpack_symmetric(source[:-tail], self._bound.plan.items[message.item].short), norm)

    def iterate(self, came: Tensor) -> Tensor:  # 1-D, 1-D: from the gather, the scatter's send buffer
        """Add up and iterate the Gram matrices owned here; pack the factors for those who hold the matrices."""
        for message in self._program.parts_came:
            self._parts[message.item].append(self._read(came, message))
        for items in self._program.iterated:
            self._iterate(items)
        return self._packed(self._program.factors_sent, self._program.scatter.owner_splits, self._factors)

    def _iterate(self, items: Ints) -> None:
        sums = [_sum(self._parts.pop(number)) for number in items]
        coefficients = self._work.settings[self._bound.plan.items[items[0]].param].coefficients
        with ieee_products(self._device):
            whole = torch.stack([one.matrix for one in sums])
            factors = factor_of(whole, coefficients, Products(whole.shape, self._device, torch.float64))
        for number, factor, one in zip(items, factors.to(self._wire), sums, strict=True):
            self._factors[number] = _Scaled(factor.triu() + factor.triu(1).mT, one.norm)  # as the others will see it

    def apply(self, came: Tensor) -> None:  # 1-D: from the scatter
        """Update the weights of all that is held here."""
        bound = self._bound
        for message in self._program.factors_came:
            self._factors[message.item] = self._read(came, message)
        for shard in self._program.shards:
            x, factor = self._view(shard), self._factors.pop(shard.item)
            with ieee_products(self._device):
                x.copy_((factor.matrix * _ratio(self._norms.pop(shard.item), factor.norm)) @ x)
        results = [Results(side, self._shards) for side in (bound.own, bound.returned)]
        apply_results(bound.held, self._work, results, like_torch=bound.like_torch)


def _normalize(x: Tensor) -> Tensor:  # (short side, columns), divided in place; 0-dim fp64
    """Divide a shard by its Frobenius norm, at any scale. Returns the norm."""
    norm = foreach_norm([x], 2)[0]
    batch = x.unsqueeze(0)
    normalize_into(batch, batch)  # its norm is taken before the first element is written
    return norm


def _sum(parts: Sequence[_Scaled]) -> _Scaled:
    """The Gram matrix of a whole (fp64) from those of its parts, each of trace 1, and their norms; trace 1 too."""
    whole = torch.linalg.vector_norm(torch.stack([part.norm for part in parts]))
    total = torch.zeros_like(parts[0].matrix, dtype=torch.float64)
    for part in parts:
        total.add_(part.matrix * _ratio(part.norm, whole).square())
    return _Scaled(total, whole)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:  # 0-dim fp64
    return torch.where(whole > 0, part / whole, 0.0)
