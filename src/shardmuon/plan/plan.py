"""The plan, which assigns each matrix to the rank that orthogonalizes it, and to a bucket of matrices that are
exchanged together. A plan is pure data, made by `planner.make_plan`. Ranks that share parameters have the same plan for
these parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import digest_of
from shardmuon.errors import ranks_text
from shardmuon.layout.pieces import ParamLayout
from shardmuon.price.machines import MACHINES, Machine
from shardmuon.texts import table


class Kept(NamedTuple):
    """An fp32 state tensor of a Muon variant, with a few values for each matrix of a parameter. For example, NorMuon
    stores second moments in such a tensor.

    Attributes:
        layout: Layout of the state tensor, which has one 1 x n matrix for each matrix of the parameter. A rank stores
            such a 1 x n matrix as a whole or not at all.
        travels: True if the rank that orthogonalizes a matrix also updates the matrix's state values and must send them
            to all ranks that store them.
    """

    layout: ParamLayout
    travels: bool


class Spec(NamedTuple):
    """Description of one parameter for the planner.

    Attributes:
        name: Name of the parameter in messages and tables.
        layout: Layout of the parameter, which describes the pieces that each rank stores.
        choices: Method and dtype with which each matrix is orthogonalized, as an `orthogonalize.choice.Choice`. All
            matrices of a batch must have equal choices.
        costs: For each matrix, the number of floating point operations to orthogonalize it.
        itemsizes: For each matrix, the number of bytes per element when the matrix is sent to another rank.
        batch: String that contains the Newton-Schulz coefficients and the post-processing stages of the Muon variant.
            All parameters with matrices in the same batch must have equal strings.
        kind: Type of the parameter's device, such as "cuda". All parameters of a bucket must have the same type of
            device.
        kept: State tensors of the Muon variant with values per matrix, one for each post-processing stage that needs
            state.
    """

    name: str
    layout: ParamLayout
    choices: tuple[Any, ...]
    costs: tuple[int, ...]
    itemsizes: tuple[int, ...]
    batch: str = ""
    kind: str = "cpu"
    kept: tuple[Kept, ...] = ()


class Policy(NamedTuple):
    """Limits and machine data that, together with the parameters, determine a plan.

    Attributes:
        bucket_bytes: Maximum total size of the matrices that one rank orthogonalizes in a bucket, in bytes of the dtype
            in which matrices are sent. A larger matrix gets its own bucket. If None, the planner chooses a maximum. For
            exchanged matrices, it considers the sizes whose estimated step time is at most 2% above the shortest, and
            chooses the one that needs the least memory. For matrices that are not exchanged, it chooses 4 MiB on a CPU.
            On other devices, it chooses 1/32 of the matrices' total size in fp32, but at least 32 MiB.
        machine: Rates and latencies of the machine, from which the time of a step is estimated.
        each: True if the planner may let every replica orthogonalize all matrices itself where that is faster. Must be
            False if the ranks' machines differ, because replicas could then compute different bits and diverge.
    """

    bucket_bytes: int | None = None
    machine: Machine = MACHINES["h100"]
    each: bool = True


class Item(NamedTuple):
    """One matrix and its owners. An owner is a rank that orthogonalizes the matrix.

    Attributes:
        param, matrix: Index of the parameter's `Spec` in the plan, and index of the matrix in the parameter.
        rows, cols: Shape of the matrix.
        owners: A single rank, or one rank per replica in the order of `ParamLayout.replicas`.
        route: "local" if the matrix is orthogonalized without any exchange. "owner" if an owner receives parts of the
            matrix or sends the result to other ranks.
        choice: `orthogonalize.choice.Choice` of the method and dtype for the matrix.
        cost: Number of floating point operations to orthogonalize the matrix.
    """

    param: int
    matrix: int
    rows: int
    cols: int
    owners: Ranks
    route: Literal["local", "owner"]
    choice: Any
    cost: int

    @property
    def key(self) -> tuple[int, int]:
        """Key by which a plan sorts its items (matrices): (index of the parameter, index of the matrix in the
        parameter)."""
        return self.param, self.matrix

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def owner_for(self, layout: ParamLayout, rank: int) -> int:
        """Return the owner that orthogonalizes this matrix for `rank`: the one in its replica if each replica has an
        owner, otherwise the only one."""
        return self.owners[layout.replica_of[rank]] if len(self.owners) > 1 else self.owners[0]


class Bucket(NamedTuple):
    """Matrices that are processed together. They are either exchanged between ranks and orthogonalized, or only
    orthogonalized. A plan sorts exchanged buckets by the first five fields.

    Attributes:
        ranks: Ranks that exchange the bucket. If the bucket is not exchanged, the ranks that orthogonalize its
            matrices.
        exchange: True if the matrices are exchanged between ranks. False if every matrix's `Item.route` is "local".
        num_owners: Number of ranks that orthogonalize each matrix. It is equal for all matrices of the bucket.
        kind: Type of the device on which the parameters are, such as "cuda".
        itemsize: Number of bytes per element when the matrices are sent.
        items: Indices of the matrices in `Plan.items`.
        gathers: True if the bucket has a gather and a scatter. Otherwise, for example if all matrices are plain
            replicas, an exchanged bucket has only a relay, which sends results from one replica to the others.
    """

    ranks: Ranks
    exchange: bool
    num_owners: int
    kind: str
    itemsize: int
    items: tuple[int, ...] = ()
    gathers: bool = False


@dataclass(frozen=True)
class Plan:
    """Assignment of matrices to owners and buckets. The owners of a matrix are the ranks that orthogonalize it. A
    bucket is a group of matrices that are processed together.

    Attributes:
        specs: Descriptions of the parameters that the plan covers.
        items: The matrices of all parameters, sorted by `Item.key`.
        buckets: Buckets in the order in which every rank starts them. The order depends only on the contents of the
            buckets. If ranks used different orders, they could deadlock, because a rank can exchange buckets with
            several sets of ranks.
        notes: Lines that are printed below the plan, such as explanations of choices based on estimated times.
        policy: Limits and machine data from which the plan was made.
    """

    specs: tuple[Spec, ...]
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    policy: Policy = field(default=Policy(), compare=False)

    @cached_property
    def digests(self) -> dict[Ranks, bytes]:
        """Dict from each set of ranks that share parameters to a 16-byte digest. The digest covers the part of the plan
        that must be equal on all ranks of the set."""
        found = {}
        for ranks in dict.fromkeys(spec.layout.ranks for spec in self.specs):
            specs = [
                (spec.layout.digest, *spec[2:7], [(kept.layout.digest, kept.travels) for kept in spec.kept])
                for spec in self.specs
                if spec.layout.ranks == ranks
            ]
            # Number the matrices within this set, because indices in the plan differ between ranks: a rank's plan can
            # also contain parameters that it shares with ranks outside this set.
            numbers = [n for n, item in enumerate(self.items) if self.specs[item.param].layout.ranks == ranks]
            place = {number: at for at, number in enumerate(numbers)}
            # The digest leaves out local buckets, whose matrices are not exchanged. How a rank divides its matrices
            # into local buckets also depends on parameters that it shares with ranks outside this set.
            moving = [
                (*bucket[1:5], bucket.gathers, [place[n] for n in bucket.items])
                for bucket in self.buckets
                if bucket.exchange and bucket.ranks == ranks
            ]
            found[ranks] = digest_of([specs, [self.items[n][1:] for n in numbers], moving])
        return found

    def loads(self) -> dict[int, int]:
        """Return a dict from each rank to the number of floating point operations in the matrix products that the rank
        computes in one step."""
        loads = {rank: 0 for spec in self.specs for rank in spec.layout.ranks}
        for item in self.items:
            for owner in item.owners:
                loads[owner] += item.cost
        return loads

    def __str__(self) -> str:
        reasons = dict.fromkeys(f"{i.rows}x{i.cols}: {i.choice}, {i.choice.reason}" for i in self.items)
        lines, loads = [_rows(self), *reasons], self.loads().values()
        if any(loads):
            mean = sum(loads) / len(loads)
            lines.append(
                f"{len(self.items)} matrices, {len(self.buckets)} buckets; most loaded rank {max(loads) / mean:.2f}x "
                f"of the mean {mean / 1e9:.2f} GFLOP a step"
            )
        return "\n".join([*lines, *self.notes])


def _rows(plan: Plan) -> str:
    """Format the matrices of a plan as a text table, ordered by bucket. A bucket is a group of matrices that are
    processed together."""
    rows = [("matrix", "shape", "route", "owner", "bucket", "method", "held by")]
    for number, bucket in enumerate(plan.buckets):
        for item in (plan.items[n] for n in bucket.items):
            spec = plan.specs[item.param]
            name = spec.name if len(spec.layout.view.matrices) == 1 else f"{spec.name}[{item.matrix}]"
            owners, held = ",".join(map(str, item.owners)), f"ranks {ranks_text(tuple(spec.layout.tiles[item.matrix]))}"
            rows.append((name, f"{item.rows}x{item.cols}", item.route, owners, str(number), str(item.choice), held))
    return table(rows)
