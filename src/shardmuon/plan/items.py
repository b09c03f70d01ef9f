"""Parameters as the planner sees them, and their matrices or slices with their owners. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Matrix
from shardmuon.plan.machines import DEFAULT, MACHINES, Machine
from shardmuon.plan.slices import Slicing, slice_of

Route = Literal["local", "owner"]
Key = tuple[int, int, int]  # of a matrix or a slice: parameter, matrix, part


class Kept(NamedTuple):
    """Numbers that a stage keeps of each matrix from step to step, fp32.

    Attributes:
        layout: Layout of the state tensor. Its matrices are 1 x so many numbers, one for each matrix of the parameter,
            and a rank has all of one or nothing.
        travels: True if owners change them and send them to all who keep them.
    """

    layout: ParamLayout
    travels: bool


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
    """What is given about a plan beside its parameters.

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
