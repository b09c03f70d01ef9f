"""Parameters as the planner sees them, their matrices with their owners, and buckets of these. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.plan.machines import DEFAULT, MACHINES, Machine

Route = Literal["local", "owner"]
Key = tuple[int, int]  # of a matrix: parameter, matrix


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


class Policy(NamedTuple):
    """Bounds and rates by which a plan is made, beside its parameters.

    Attributes:
        bucket_bytes: Most bytes (of the wire) of whole matrices that one owner has in a bucket. A larger matrix makes
            a bucket of its own. None: what is hardly dearer than the cheapest; of what moves nowhere 32 MiB, or a
            thirty-second part of what its momentum takes on a rank in fp32, if that is more.
        machine: The machine by whose rates buckets are chosen.
        each: True if replicas may each work for themselves, where that is cheaper. False where machines differ:
            replicas would drift apart.
    """

    bucket_bytes: int | None = None
    machine: Machine = MACHINES[DEFAULT]
    each: bool = True


class Item(NamedTuple):
    """One matrix, and who orthogonalizes it.

    Attributes:
        param, matrix: Number of its `Spec`, and of the matrix in the view.
        rows, cols: Shape of the matrix.
        owners: The rank that orthogonalizes it, or one of each replica, in their order (see `ParamLayout.replicas`).
        route: "local": nothing of it moves. "owner": all of it goes to its owner and back.
        how: See `Spec`.
        cost: Floating point operations of an owner.
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
    reason: str = ""

    @property
    def key(self) -> Key:
        """The order of a plan's items."""
        return self.param, self.matrix

    @property
    def short(self) -> int:
        return min(self.rows, self.cols)

    @property
    def numel(self) -> int:
        return self.rows * self.cols

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
