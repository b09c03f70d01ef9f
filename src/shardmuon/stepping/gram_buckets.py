"""A bucket whose shards stay where they are: the route "gram". The counterpart of `buckets.BucketRun`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from shardmuon._torch import foreach_norm, ieee_products
from shardmuon.orthogonalize import Products
from shardmuon.orthogonalize.newton_schulz import normalize
from shardmuon.orthogonalize.sharded import factor_of, pack_symmetric, unpack_symmetric
from shardmuon.planning.layout import Fragment
from shardmuon.planning.routes import Message, along_rows
from shardmuon.stepping.program import Part, Program
from shardmuon.stepping.work import Kernel, ParamWork, apply_results, update_momentum


class GramRun:
    """One bucket in one step on one rank: `pack`, `orthogonalize`, `apply`, in this order. See [Note: the Gram route].

    Its tensors are fp32 (fp64 for fp64 products), whatever the wire dtype of other buckets: see ADR 8.
    """

    def __init__(self, program: Program, work: Mapping[int, ParamWork], kernel: Kernel, device: torch.device) -> None:
        """Args: see `BucketRun`."""
        plan, bucket = program.plan, program.rank_bucket.bucket
        self._program = program
        self._plan, self._bucket, self._rank, self._kernel, self._device = plan, bucket, program.rank, kernel, device
        self._work = work
        self._gather, self._scatter = program.messages
        self._dtype = torch.float64 if bucket.itemsize == 8 else torch.float32
        self._active = tuple(i for i in bucket.items if plan.items[i].param in work)
        self._held: dict[int, tuple[Fragment, ...]] = {}  # item -> this rank's fragments
        for index, fragment in program.rank_bucket.held:
            if index in self._active:
                self._held[index] = (*self._held.get(index, ()), fragment)
        self._shards: dict[int, tuple[Tensor, Tensor]] = {}  # item -> (shard / norm, norm); (m, n_r), 0-dim fp64
        self._parts: dict[int, list[tuple[Tensor, Tensor]]] = {}  # owned item -> Gram matrices of parts, their norms
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}  # item -> factor (m, m), norm of the whole
        self.num_orthogonalized = 0

    moves = True  # it always has exchanges

    def pack(self) -> Tensor:  # 1-D: the reduction's send buffer
        """Update the momentum of every fragment held here; normalize the shards; send their Gram matrices."""
        updates = self._update_momentum()
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        for index, fragments in self._held.items():
            pieces = [updates[index, f] for f in fragments]
            self._shards[index] = _normalized(torch.cat(pieces, 1))
            adds = self._program.added[index]
            if not adds:
                continue
            shard, norm = (
                self._shards[index]
                if adds == fragments
                else _normalized(torch.cat([updates[index, f] for f in adds], 1))
            )
            # S S^T, however few columns this rank holds
            parts[index] = self._products().multiply(None, shard, shard.mT, symmetric=True), norm
        owned = {i: part for i, part in parts.items() if self._plan.items[i].owners == (self._rank,)}
        self._parts = {index: [part] for index, part in owned.items()}
        return self._fill(self._gather.send, self._gather.send_splits, parts)

    def _update_momentum(self) -> dict[tuple[int, Fragment], Tensor]:  # (short dim, n) each, fp32 or fp64
        """What is to be orthogonalized, fragment by fragment, turned so that the short dim comes first."""
        by_param: dict[int, list[tuple[int, Fragment]]] = {}
        for index, fragments in self._held.items():
            by_param.setdefault(self._plan.items[index].param, []).extend((index, f) for f in fragments)
        found = {}
        for param, pairs in by_param.items():
            part = Part.of(self._plan, param, [f for _, f in pairs])
            updates = update_momentum([(self._work[param], part)])
            for (index, f), update in zip(pairs, updates, strict=True):
                matrix = update.reshape(f.num_rows, f.num_cols).to(self._device, self._dtype)
                found[index, f] = matrix.mT if self._turned(index) else matrix
        return found

    def _turned(self, index: int) -> bool:
        item = self._plan.items[index]
        return along_rows(self._plan.specs[item.param].layout, item.matrix)

    def _products(self) -> Products:
        return Products(self._device, self._dtype)

    def _fill(
        self, messages: tuple[Message, ...], splits: tuple[int, ...], values: Mapping[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        send = torch.zeros(sum(splits), dtype=self._dtype, device=self._device)
        for message in messages:
            if message.item in values:
                matrix, norm = values[message.item]
                target = send.narrow(0, message.start, message.size)
                bits = norm.reshape(1).view(self._dtype)  # the fp64 norm, bit for bit
                pack_symmetric(matrix, target[: -len(bits)])
                target[-len(bits) :].copy_(bits)
        return send

    def _read(self, recv: Tensor, message: Message) -> tuple[Tensor, Tensor]:
        item = self._plan.items[message.item]
        source = recv.narrow(0, message.start, message.size)
        tail = 8 // source.element_size()
        norm = source[-tail:].clone().view(torch.float64)[0]
        return unpack_symmetric(source[:-tail], min(item.rows, item.cols)), norm

    def orthogonalize(
        self,
        recv: Tensor,  # 1-D: what the reduction brought
    ) -> Tensor:  # 1-D: the factors' send buffer
        """Add up and iterate the Gram matrices owned here; pack the factors."""
        for message in self._gather.recv:  # in the order of ranks
            if message.item in self._active:
                self._parts.setdefault(message.item, []).append(self._read(recv, message))
        owned = sorted(self._parts, key=self._batch_key)
        for _, group in itertools.groupby(owned, key=self._batch_key):
            self._iterate(list(group))
        return self._fill(self._scatter.send, self._scatter.send_splits, self._factors)

    def _batch_key(self, index: int) -> tuple[int, str]:
        item = self._plan.items[index]
        return min(item.rows, item.cols), self._plan.specs[item.param].batch

    def _iterate(self, indices: list[int]) -> None:
        summed, norms = zip(*(_sum(self._parts.pop(index)) for index in indices), strict=True)
        coefficients = self._work[self._plan.items[indices[0]].param].settings.coefficients
        with ieee_products(self._device):
            factors = factor_of(torch.stack(summed), coefficients, Products(self._device, torch.float64))
        for index, factor, norm in zip(indices, factors.to(self._dtype), norms, strict=True):
            self._factors[index] = (factor.triu() + factor.triu(1).mT, norm)  # as the others will see it
        self.num_orthogonalized += len(indices)

    def apply(
        self,
        recv: Tensor,  # 1-D: the factors from other owners
    ) -> None:
        """Decay and update the weights of every fragment held here."""
        for message in self._scatter.recv:
            if message.item in self._active:
                self._factors[message.item] = self._read(recv, message)
        by_param: dict[int, tuple[list[Fragment], list[Tensor]]] = {}
        for index, fragments in self._held.items():
            whole = self._result(index)
            listed, updates = by_param.setdefault(self._plan.items[index].param, ([], []))
            for f, part in zip(fragments, whole.split([self._long(index, f) for f in fragments], 1), strict=True):
                listed.append(f)
                updates.append(part.mT if self._turned(index) else part)
        for param, (fragments_of, updates) in by_param.items():
            apply_results([(self._work[param], Part.of(self._plan, param, fragments_of))], updates)

    def _long(self, index: int, fragment: Fragment) -> int:
        return fragment.num_rows if self._turned(index) else fragment.num_cols

    def _result(self, index: int) -> Tensor:  # (short, n_r): this rank's part of the orthogonalized matrix
        shard, norm = self._shards[index]
        factor, whole = self._factors[index]
        with ieee_products(self._device):
            return (factor * _ratio(norm, whole)) @ shard


def _normalized(shard: Tensor) -> tuple[Tensor, Tensor]:
    """A shard divided by its Frobenius norm, at any scale, and the norm as fp64."""
    norm = foreach_norm([shard], 2)[0]
    return normalize(shard.unsqueeze(0))[0], norm


def _sum(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The Gram matrix of a whole (fp64) from those of its parts, each of trace 1, and their norms; trace 1 too."""
    whole = torch.linalg.vector_norm(torch.stack([norm for _, norm in parts]))
    total = torch.zeros_like(parts[0][0], dtype=torch.float64)
    for gram, norm in parts:
        total.add_(gram * _ratio(norm, whole).square())
    return total, whole


def _ratio(part: Tensor, whole: Tensor) -> Tensor:  # 0-dim fp64
    return torch.where(whole > 0, part / whole, 0.0)
