"""Which route a matrix takes, and what the Gram route sends. Pure: no tensors, no torch.distributed.

[Note: the Gram route]
    A matrix that is cut along its long dim only, X = [X_1 .. X_p] with m short rows each, needs no rank to hold it
    whole: R = sum_r X_r X_r^T is m x m, Newton-Schulz makes of it a factor Q (see orthogonalize/gram.py), and Q X_r is
    rank r's part of the result. Each rank sends its part of R to the matrix's owner, which adds them up in rank order
    and iterates; Q goes back to every holder. One reduction and one broadcast for all matrices of a bucket together,
    every matrix iterated once. A part is scaled by its own norm, which travels with it, so nothing can overflow; both
    R and Q are symmetric, so their upper triangles are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardmuon.planning.layout import Fragment, ParamLayout
from shardmuon.planning.views import Ranks

if TYPE_CHECKING:
    from shardmuon.planning.plan import Plan
    from shardmuon.planning.types import Bucket

RouteOption = Literal["auto", "owner", "local", "gram"]
Route = Literal["owner", "local", "gram"]
ROUTES: tuple[RouteOption, ...] = ("auto", "owner", "local", "gram")
_NORM_BYTES = 8  # a part's norm travels as fp64


def message_size(short: int, itemsize: int) -> int:
    """Elements that a symmetric short x short matrix and a norm take on the wire."""
    return short * (short + 1) // 2 + _NORM_BYTES // itemsize


def cut_fault(layout: ParamLayout, matrix: int) -> str:
    """Why the Gram route cannot serve this matrix, or ""."""
    shape = layout.view.matrices[matrix]
    for rank, fragments in layout.fragments[matrix].items():
        for f in fragments:
            if (f.num_rows != shape.rows) if shape.rows <= shape.cols else (f.num_cols != shape.cols):
                if shape.rows == shape.cols and all(
                    g.num_cols == shape.cols for theirs in layout.fragments[matrix].values() for g in theirs
                ):
                    return ""
                return (
                    f"rank {rank} holds {f.num_rows}x{f.num_cols} of it: it is cut along its short dim, of which the "
                    "Gram matrix needs all"
                )
    return ""


def along_rows(layout: ParamLayout, matrix: int) -> bool:
    """Whether the long dim, along which the matrix is cut, is the rows."""
    shape = layout.view.matrices[matrix]
    if shape.rows != shape.cols:
        return shape.rows > shape.cols
    return any(f.num_rows != shape.rows for theirs in layout.fragments[matrix].values() for f in theirs)


class Message(NamedTuple):
    """One item's Gram matrix or factor on its way between this rank and `peer`, in elements of a wire buffer."""

    item: int
    peer: int
    start: int
    size: int


class Messages(NamedTuple):
    """One of the two exchanges of a Gram bucket as one rank sees it."""

    send: tuple[Message, ...]
    send_splits: tuple[int, ...]
    recv: tuple[Message, ...]
    recv_splits: tuple[int, ...]


def sources(layout: ParamLayout, matrix: int, owner: int) -> dict[int, tuple[Fragment, ...]]:
    """The fragments whose part of the Gram matrix each rank adds, no fragment twice: those it would send to `owner`."""
    found = {
        rank: tuple(f for f in fragments if layout.source(f, owner) == rank)
        for rank, fragments in layout.fragments[matrix].items()
    }
    return {rank: fragments for rank, fragments in found.items() if fragments}


def gram_messages(plan: Plan, bucket: Bucket, rank: int) -> tuple[Messages, Messages]:
    """The reduction to owners and the way back, as `rank` sees them."""
    parts: list[tuple[int, int]] = []  # (peer, item): this rank's part of a Gram matrix goes to its owner
    arriving: list[tuple[int, int]] = []
    factors: list[tuple[int, int]] = []
    coming: list[tuple[int, int]] = []
    for index in bucket.items:
        item = plan.items[index]
        layout, owner = plan.specs[item.param].layout, item.owners[0]
        adders, holders = sources(layout, item.matrix, owner), layout.fragments[item.matrix]
        if rank == owner:
            arriving.extend((peer, index) for peer in adders if peer != rank)
            factors.extend((peer, index) for peer in holders if peer != rank)
        else:
            parts.extend([(owner, index)] if rank in adders else [])
            coming.extend([(owner, index)] if rank in holders else [])
    sizes = {i: message_size(min(plan.items[i].rows, plan.items[i].cols), bucket.itemsize) for i in bucket.items}
    gather = Messages(*_lay_out(parts, sizes, bucket.ranks), *_lay_out(arriving, sizes, bucket.ranks))
    scatter = Messages(*_lay_out(factors, sizes, bucket.ranks), *_lay_out(coming, sizes, bucket.ranks))
    return gather, scatter


def _lay_out(
    messages: list[tuple[int, int]], sizes: Mapping[int, int], ranks: Ranks
) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    counts = dict.fromkeys(ranks, 0)
    found, at = [], 0
    for peer, index in sorted(messages):
        found.append(Message(index, peer, at, sizes[index]))
        counts[peer] += sizes[index]
        at += sizes[index]
    return tuple(found), tuple(counts.values())
