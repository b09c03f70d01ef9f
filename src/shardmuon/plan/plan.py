"""The plan: which rank orthogonalizes which matrix, and which matrices are exchanged together. A plan is pure data, and
ranks that share parameters have the same plan for them. `planner.make_plan` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import digest_of
from shardmuon.errors import ranks_text
from shardmuon.layout.pieces import ParamLayout
from shardmuon.price.machines import DEFAULT, MACHINES, Machine
from shardmuon.texts import table


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
    route: Literal["local", "owner"]
    how: str
    cost: int
    reason: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """Index of the parameter and of the matrix. A plan's items are sorted by it."""
        return self.param, self.matrix

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
    route: Literal["local", "owner"]
    num_owners: int
    kind: str
    itemsize: int
    items: tuple[int, ...] = ()
    gathers: bool = False

    @property
    def exchange(self) -> bool:
        """True if the bucket's matrices are exchanged between ranks."""
        return self.route != "local"


@dataclass(frozen=True)
class Plan:
    """Assignment of all matrices to owners, the ranks that orthogonalize them, and to buckets, which are exchanged
    together.

    Attributes:
        specs: Descriptions of the parameters.
        items: The matrices of all parameters, in order.
        buckets: Buckets in the order in which every rank begins them. The order depends only on the buckets' content:
            if ranks that exchange buckets with several sets of ranks used different orders, they could deadlock.
        notes: Lines printed below the plan: choices made by estimated time, and remarks on the whole plan.
        policy: Bounds and machine rates from which the plan was made.
    """

    specs: tuple[Spec, ...]
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    policy: Policy = field(default=Policy(), compare=False)

    @cached_property
    def digests(self) -> dict[Ranks, bytes]:
        """Set of ranks that share parameters -> 16-byte digest of the part of the plan that must be equal on all of
        these ranks."""
        found = {}
        for ranks in dict.fromkeys(spec.layout.ranks for spec in self.specs):
            params = [n for n, spec in enumerate(self.specs) if spec.layout.ranks == ranks]
            specs = [
                (spec.layout.digest, *spec[2:7], [(kept.layout.digest, kept.travels) for kept in spec.kept])
                for spec in map(self.specs.__getitem__, params)
            ]
            place = {param: at for at, param in enumerate(params)}
            items = {n: (place[i.param], *i[1:-1]) for n, i in enumerate(self.items) if i.param in place}
            moving = [
                (*bucket[1:5], bucket.gathers, [items[n] for n in bucket.items])
                for bucket in self.buckets
                if bucket.exchange and bucket.ranks == ranks
            ]
            # leave out local buckets: they depend on parameters that the owner shares with ranks outside this set
            local = [item for n, item in items.items() if self.items[n].route == "local"]
            found[ranks] = digest_of([specs, moving, local])
        return found

    def loads(self) -> dict[int, int]:
        """Map each rank to the floating point operations of the matrix products that it computes in one step."""
        loads = {rank: 0 for spec in self.specs for rank in spec.layout.ranks}
        for item in self.items:
            for owner in item.owners:
                loads[owner] += item.cost
        return loads

    def __str__(self) -> str:
        reasons = dict.fromkeys(f"{i.rows}x{i.cols}: {i.how}, {i.reason}" for i in self.items if i.reason)
        lines, loads = [_rows(self), *reasons], self.loads().values()
        if any(loads):
            mean = sum(loads) / len(loads)
            lines.append(
                f"{len(self.items)} matrices, {len(self.buckets)} buckets; most loaded rank {max(loads) / mean:.2f}x "
                f"of the mean {mean / 1e9:.2f} GFLOP a step"
            )
        return "\n".join([*lines, *self.notes])


def _rows(plan: Plan) -> str:
    """Make a text table of a plan's matrices, bucket by bucket."""
    rows = [("matrix", "shape", "route", "owner", "bucket", "method", "held by")]
    for number, bucket in enumerate(plan.buckets):
        for item in (plan.items[n] for n in bucket.items):
            spec = plan.specs[item.param]
            name = spec.name if len(spec.layout.view.matrices) == 1 else f"{spec.name}[{item.matrix}]"
            owners, held = ",".join(map(str, item.owners)), f"ranks {ranks_text(tuple(spec.layout.tiles[item.matrix]))}"
            rows.append((name, f"{item.rows}x{item.cols}", item.route, owners, str(number), item.how, held))
    return table(rows)
