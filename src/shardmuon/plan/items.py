"""Data types of the planner: parameters, their matrices with owners, and buckets of matrices. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.plan.machines import DEFAULT, MACHINES, Machine

Route = Literal["local", "owner"]
Key = tuple[int, int]  # index of a parameter, index of the matrix in it


class Kept(NamedTuple):
    """State tensor (fp32) of one variant stage for one parameter, with a few values for each matrix.

    Attributes:
        layout: Layout of the state tensor. Its matrices have shape 1 x n, one for each matrix of the parameter, and a
            rank stores all of one or nothing.
        travels: True if owners change the state and send it to all ranks that store it.
    """

    layout: ParamLayout
    travels: bool


class Spec(NamedTuple):
    """The planner's description of one parameter.

    Attributes:
        name: Name for messages and tables.
        layout: Which rank stores which piece.
        hows: How each matrix is orthogonalized, as text; equal for all matrices of a batch.
        costs: Floating point operations of each matrix.
        itemsizes: Bytes per element of each matrix on the wire.
        batch: Text of coefficients and stages; equal for all matrices of a batch.
        kind: Device type; equal for all parameters of a bucket.
        kept: State tensor of each stage that has one.
        reasons: For each matrix, the reason for its method, for printed plans. Empty: none is printed.
    """

    name: str
    layout: ParamLayout
    hows: tuple[str, ...]
    costs: tuple[int, ...]
    itemsizes: tuple[int, ...]
    batch: str = ""
    kind: str = "cpu"
    kept: tuple[Kept, ...] = ()
    reasons: tuple[str, ...] = ()


class Policy(NamedTuple):
    """Bounds and rates that a plan depends on beside its parameters.

    Attributes:
        bucket_bytes: Most bytes (on the wire) of whole matrices that one owner has in a bucket. A larger matrix makes
            a bucket of its own. None: the size with the least memory among those that cost at most 2% more than the
            cheapest. For local matrices of a rank None means 32 MiB, or 1/32 of their momentum in fp32 if that is more;
            on a CPU 4 MiB.
        machine: The machine whose rates are used to price buckets.
        each: True if every replica may orthogonalize all its matrices itself, where that is cheaper. False if machines
            differ: replicas would diverge.
    """

    bucket_bytes: int | None = None
    machine: Machine = MACHINES[DEFAULT]
    each: bool = True


class Item(NamedTuple):
    """One matrix and its owners.

    Attributes:
        param, matrix: Index of the parameter's `Spec`, and of the matrix in its view.
        rows, cols: Shape of the matrix.
        owners: The rank that orthogonalizes the matrix, or one rank per replica, in the order of
            `ParamLayout.replicas`.
        route: "local": nothing is moved. "owner": the matrix is gathered on its owner and scattered back.
        how: How the matrix is orthogonalized, as text.
        cost: Floating point operations of an owner.
        reason: Reason for the method. Not compared between ranks, as it may name abilities of one machine.
    """

    param: int
    matrix: int
    rows: int
    cols: int
    owners: Ranks
    route: Route
    how: str
    cost: int
    reason: str = ""

    @property
    def key(self) -> Key:
        """Sort key of a plan's items."""
        return self.param, self.matrix

    @property
    def short(self) -> int:
        return min(self.rows, self.cols)

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def owner_for(self, layout: ParamLayout, rank: int) -> int:
        """The owner whose results a rank gets: the one in its own replica if each replica has an owner."""
        return self.owners[layout.replica_of[rank]] if len(self.owners) > 1 else self.owners[0]


class Bucket(NamedTuple):
    """Matrices that are exchanged together, or orthogonalized together without moving. Plans sort the buckets that move
    as tuples of these fields.

    Attributes:
        ranks: Ranks of the exchange. On the local route, the ranks that own any of the matrices.
        route, num_owners: Route and number of owners, equal for all of the bucket's items.
        kind: Device type.
        itemsize: Bytes per element on the wire.
        items: Indices of the plan's items.
        gathers: False if every owner stores its matrices whole, as plain replicas do, and no stage state is sent: there
            is no gather or scatter, only a relay to other replicas.
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
        """True if the bucket's matrices are exchanged between ranks."""
        return self.route != "local"
