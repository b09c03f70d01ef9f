"""Parameters as the planner sees them, their matrices or slices with their owners, and buckets of these. Pure.

For slices see `orthogonalize`, [Note: slices of the long side].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Matrix
from shardmuon.plan.machines import DEFAULT, MACHINES, Machine

Route = Literal["local", "owner"]
Key = tuple[int, int, int]  # of a matrix or a slice: parameter, matrix, part


Tiles = Mapping[int, tuple[Tile, ...]]  # by rank


class Kept(NamedTuple):
    """Numbers that a stage keeps of each matrix from step to step, fp32.

    Attributes:
        layout: Layout of the state tensor. Its matrices are 1 x so many numbers, one for each matrix of the parameter,
            and a rank has all of one or nothing.
        travels: True if owners change them and send them to all who keep them.
    """

    layout: ParamLayout
    travels: bool


class Slicing(NamedTuple):
    """The cost of giving slices of a matrix to owners of their own.

    Attributes:
        sums: Exchanges of Gram matrices in the middle of its iteration; of norms there is one before them.
        itemsize: Bytes of an element of these.
        each: Floating point operations of small products, which each owner repeats.
    """

    sums: int
    itemsize: int
    each: int


class Spec(NamedTuple):
    """One parameter as the planner sees it.

    Attributes:
        name: Name for messages and tables.
        layout: Who stores what.
        hows: How each matrix is orthogonalized, as text. Matrices of one batch share it.
        costs: Floating point operations of each matrix.
        batch: Matrices of different batch texts (coefficients, stages) never share a batch.
        kind: Device type. Parameters of different kinds never share a bucket.
        itemsizes: Bytes per element of each matrix's wire. Empty: 4 each.
        kept: Kept numbers of each stage that keeps any.
        reasons: Why each is orthogonalized like this. Empty: nothing is said.
        slicings: The cost of slices of each matrix; None: it stays whole. Empty: all do.
    """

    name: str
    layout: ParamLayout
    hows: tuple[str, ...]
    costs: tuple[int, ...]
    batch: str = ""
    kind: str = "cpu"
    itemsizes: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    reasons: tuple[str, ...] = ()
    slicings: tuple[Slicing | None, ...] = ()


class Policy(NamedTuple):
    """Bounds and rates by which a plan is made, beside its parameters.

    Attributes:
        bucket_bytes: Most bytes (of the wire) of whole matrices that one owner has in a bucket. A larger matrix makes
            a bucket of its own. None: what is hardly dearer than the cheapest; of what moves nowhere 32 MiB, or a
            thirty-second part of what its momentum takes on a rank in fp32, if that is more.
        machine: The machine by whose rates buckets are chosen.
        split_k: Owners of a matrix that takes more than the mean load of its ranks, each of one slice, where that is
            cheaper and a node has so many.
        each: True if replicas may each work for themselves, where that is cheaper. False where machines differ:
            replicas would drift apart.
    """

    bucket_bytes: int | None = None
    machine: Machine = MACHINES[DEFAULT]
    split_k: int = 1
    each: bool = True


class Item(NamedTuple):
    """One matrix, or a slice of one, and who orthogonalizes it.

    Attributes:
        param, matrix: Number of its `Spec`, and of the matrix in the view.
        rows, cols: Shape of the matrix.
        owners: The rank that orthogonalizes it, or one of each replica, in their order (see `ParamLayout.replicas`).
        route: "local": nothing of it moves. "owner": all of it goes to its owner and back.
        how: See `Spec`.
        cost: Floating point operations of an owner.
        part, parts: Which of how many slices it is; 0 of 1: the matrix.
        reason: Why it is orthogonalized like this. Not compared between ranks: it may name what one machine can do.
    """

    param: int
    matrix: int
    rows: int
    cols: int
    owners: Ranks
    route: Route
    how: str
    cost: int
    part: int = 0
    parts: int = 1
    reason: str = ""

    @property
    def key(self) -> Key:
        """The order of a plan's items."""
        return self.param, self.matrix, self.part

    @property
    def short(self) -> int:
        return min(self.rows, self.cols)

    @property
    def numel(self) -> int:
        """Elements of the matrix, or of the slice."""
        return self.rows * self.cols // self.parts

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, or of the slice."""
        tall = self.rows > self.cols
        return (self.rows // self.parts, self.cols) if tall else (self.rows, self.cols // self.parts)

    def box(self, spec: Spec) -> Matrix:
        """The matrix, or the slice."""
        matrix = spec.layout.view.matrices[self.matrix]
        found = slice_of(matrix, self.part, self.parts) if self.parts > 1 else matrix
        assert found is not None, "only boxes are planned"
        return found

    def owner_for(self, layout: ParamLayout, rank: int) -> int:
        """The owner that sends a rank its results."""
        return self.owners[layout.replica_of[rank]] if len(self.owners) > 1 else self.owners[0]


class Bucket(NamedTuple):
    """Matrices that move in one exchange, or are orthogonalized where they are. Plans have those that move in this
    order.

    Attributes:
        ranks: Ranks of the exchange. On the local route, those that own any of them.
        route, num_owners: Of each of its items.
        kind: See `Spec`.
        itemsize: Bytes per element of the wire.
        items: Numbers of the plan's items.
        gathers: False if every owner stores its matrices whole, as plain replicas do, and no stage keeps anything:
            nothing travels before products, and afterwards only to other replicas.
    """

    ranks: Ranks
    route: Route
    num_owners: int
    kind: str
    itemsize: int
    items: tuple[int, ...] = ()
    gathers: bool = False

    @property
    def exchange(self) -> bool:
        """False if nothing moves."""
        return self.route != "local"


def slice_of(matrix: Matrix, part: int, parts: int) -> Matrix | None:
    """A slice of a matrix's long side, itself row-major; None if no equal boxes of indexes have the slices."""
    rows, cols = matrix[:2]
    tall = rows > cols
    end = rows * cols if tall else cols  # the outermost dim of the long side reaches so far
    dims = enumerate(zip(matrix.sizes, matrix.strides, strict=True))
    d = next((d for d, (size, stride) in dims if size > 1 and size * stride == end), None)
    if d is None or matrix.sizes[d] % parts:
        return None
    size = matrix.sizes[d] // parts
    start = (*matrix.start[:d], matrix.start[d] + part * size, *matrix.start[d + 1 :])
    sizes = (*matrix.sizes[:d], size, *matrix.sizes[d + 1 :])
    if tall:
        return Matrix(rows // parts, cols, start, sizes, matrix.strides)
    strides = tuple(stride if stride < cols else stride // parts for stride in matrix.strides)
    return Matrix(rows, cols // parts, start, sizes, strides)


def clipped(tiles: Iterable[Tile], box: Matrix) -> tuple[Tile, ...]:
    """The parts of these tiles that lie in a slice of their matrix."""
    found = []
    for tile in tiles:
        start = tuple(map(max, tile.start, box.start))
        ends = zip(tile.start, tile.sizes, box.start, box.sizes, strict=True)
        sizes = tuple(min(a + n, b + m) - at for at, (a, n, b, m) in zip(start, ends, strict=True))
        if min(sizes) > 0:
            found.append(tile._replace(start=start, sizes=sizes))
    return tuple(found)
