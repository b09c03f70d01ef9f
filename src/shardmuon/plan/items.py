"""Data types of the planner: parameters, their matrices, and buckets of matrices that are processed together."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardmuon.comm.groups import Ranks
from shardmuon.layout.pieces import ParamLayout
from shardmuon.price.machines import DEFAULT, MACHINES, Machine

Route = Literal["local", "owner"]
Key = tuple[int, int]  # index of a parameter, index of the matrix in it


class Kept(NamedTuple):
    """State tensor (fp32) with a few values for each matrix of a parameter, as stored by one stage of a Muon variant
    (NorMuon's second moments, for example).

    Attributes:
        layout: Layout of the state tensor. For each matrix of the parameter, it has one matrix of shape 1 x n, of which
            a rank stores either all or nothing.
        travels: True if the rank that orthogonalizes a matrix also changes the values and must send them to all ranks
            that store them.
    """

    layout: ParamLayout
    travels: bool


class Spec(NamedTuple):
    """The planner's description of one parameter.

    Attributes:
        name: Name for messages and tables.
        layout: Layout of the parameter, which gives the pieces that each rank stores.
        hows: Text that describes how each matrix is orthogonalized; equal for all matrices of a batch.
        costs: Floating point operations to orthogonalize each matrix.
        itemsizes: Bytes per element when a matrix is sent, for each matrix.
        batch: Text of coefficients and variant stages; equal for all matrices of a batch.
        kind: Device type; equal for all parameters of a bucket.
        kept: State tensors with values per matrix, one for each variant stage that has such state.
        reasons: For each matrix, the reason why its method was chosen, for printed plans. Empty: print no reasons.
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
    """Bounds and machine rates on which a plan depends besides its parameters.

    Attributes:
        bucket_bytes: Maximum size of the matrices that one rank orthogonalizes in a bucket, in bytes as sent. A larger
            matrix gets a separate bucket. None: choose the size that needs the least memory among sizes whose estimated
            time is at most 2% above the fastest. For matrices that are not exchanged, None means 32 MiB, or 1/32 of
            their momentum in fp32 if that is more; on a CPU, 4 MiB.
        machine: Rates from which the time of a plan is estimated.
        each: True if every replica may orthogonalize all of its matrices itself where that is faster. False if the
            ranks' machines differ: their results could differ in bits, and replicas would diverge.
    """

    bucket_bytes: int | None = None
    machine: Machine = MACHINES[DEFAULT]
    each: bool = True


class Item(NamedTuple):
    """One matrix and its owners, the ranks that orthogonalize it.

    Attributes:
        param, matrix: Index of the parameter's `Spec`, and index of the matrix in the parameter's view.
        rows, cols: Shape of the matrix.
        owners: A single rank, or one rank per replica in the order of `ParamLayout.replicas`.
        route: "local": no element is sent. "owner": the matrix is gathered on its owner, and the result is scattered.
        how: Text that describes how the matrix is orthogonalized.
        cost: Floating point operations to orthogonalize the matrix.
        reason: Reason why the method was chosen. It may name capabilities of one rank's machine, so ranks do not
            compare it.
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
        """Index of the parameter and of the matrix. A plan's items are sorted by it."""
        return self.param, self.matrix

    @property
    def short(self) -> int:
        return min(self.rows, self.cols)

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def owner_for(self, layout: ParamLayout, rank: int) -> int:
        """Return the owner whose results a rank receives: if each replica has an owner, the owner in the rank's
        replica."""
        return self.owners[layout.replica_of[rank]] if len(self.owners) > 1 else self.owners[0]


class Bucket(NamedTuple):
    """Matrices that are processed together: exchanged between ranks and orthogonalized, or only orthogonalized. Plans
    sort the buckets that are exchanged as tuples of these fields.

    Attributes:
        ranks: Ranks of the exchange. On the local route, the ranks that orthogonalize any of the matrices.
        route, num_owners: Route, and number of owners of a matrix, equal for all of the bucket's items.
        kind: Device type.
        itemsize: Bytes per element as sent.
        items: Indices into the plan's items.
        gathers: False if every owner stores its matrices whole, as plain replicas do, and sends no state. The bucket
            then needs no gather or scatter, only a relay of results to other replicas.
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
