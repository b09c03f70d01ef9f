"""Building blocks of a program: places, wires, batches. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import Ints
from shardmuon.plan.copies import BufferPlace, Copy
from shardmuon.plan.plan import Bucket

_ALIGNMENT = 64  # bytes: where every matrix of a batch begins at a multiple, its bits depend on no slot


def aligned(numel: int, itemsize: int) -> int:
    """Elements up to the next multiple of the alignment."""
    per_line = _ALIGNMENT // itemsize
    return -(-numel // per_line) * per_line


class Load(NamedTuple):
    """A tile that this rank stores, and its place in a buffer."""

    param: int
    tile: Tile
    place: BufferPlace


class KeptLoad(NamedTuple):
    """Numbers that a stage keeps of a matrix, and where their bits stand on a wire.

    Attributes:
        param, number: Number of the parameter, and which of its `Spec.kept`.
        tile: Their tile in this rank's storage.
        start, size: On the wire, in its elements.
    """

    param: int
    number: int
    tile: Tile
    start: int
    size: int


class Batch(NamedTuple):
    """Matrices of one shape that are orthogonalized alike.

    Attributes:
        items: Numbers of the plan's items, one for each slot.
        shape: (B, rows, cols).
        start, stride: Slot k begins at start + k * stride in the batches' buffer, in elements.
    """

    items: tuple[int, ...]
    shape: Ints
    start: int
    stride: int


class Wire(NamedTuple):
    """One exchange between holders and owners, as one rank sees both of its sides.

    Attributes:
        holder_splits: Elements for each rank of the bucket on this rank's side as a holder.
        owner_splits: Elements for each rank of the bucket on this rank's side as an owner.
        copies: Between the owner's side (`here`) and the batches (`there`).
        told: What stages keep, on the owner's side.
        heard: What stages keep, on the holder's side.
    """

    holder_splits: Ints
    owner_splits: Ints
    copies: tuple[Copy, ...]
    told: tuple[KeptLoad, ...] = ()
    heard: tuple[KeptLoad, ...] = ()


class Relay(NamedTuple):
    """The second exchange of results, from one replica to the others.

    Attributes:
        send_splits, recv_splits: Elements to and from each rank of the bucket.
        from_wire: Copies of what the scatter brought (`here`) to the buffer that is sent (`there`).
        from_batch: Copies of what is in the batches (`here`) to that buffer (`there`).
        told, heard: What stages keep, on the sent and on the received buffer.
    """

    send_splits: Ints
    recv_splits: Ints
    from_wire: tuple[Copy, ...]
    from_batch: tuple[Copy, ...]
    told: tuple[KeptLoad, ...] = ()
    heard: tuple[KeptLoad, ...] = ()


class Mates(NamedTuple):
    """The owners of the slices of a matrix of which this rank owns one.

    Attributes:
        item: Number of the plan's item that is owned here.
        ranks: Owner of each slice.
    """

    item: int
    ranks: Ints


@dataclass(frozen=True, kw_only=True)
class Program:
    """One bucket on one rank.

    Attributes:
        bucket, rank: The bucket, and the rank that carries it out.
        batches, batch_numel: What this rank owns, and the elements of the buffer that holds it.
        own: Tiles of what it owns, in that buffer.
        foreign: Tiles that it sends, on its side of the gather.
        returned: The same tiles on its side of the scatter.
        idle: Tiles whose results the relay brings, on its received buffer.
        gather, scatter: Sides changed over; the same object if no stage keeps anything of the matrices here.
        relay: None if nobody in the bucket needs one.
        sums: Exchanges between gather and scatter, in which owners of slices add up what they made.
        mates: Of each slice that is owned here, in one order on all ranks.
    """

    bucket: Bucket
    rank: int
    batches: tuple[Batch, ...] = ()
    batch_numel: int
    own: tuple[Load, ...]
    foreign: tuple[Load, ...]
    returned: tuple[Load, ...]
    idle: tuple[Load, ...] = ()
    gather: Wire
    scatter: Wire
    relay: Relay | None = None
    sums: int = 0
    mates: tuple[Mates, ...] = ()

    @property
    def num_owned(self) -> int:
        """Matrices that are orthogonalized here."""
        return sum(len(batch.items) for batch in self.batches)
