"""Exact counts of a plan: bytes, collectives, matrices, floating point operations. Nothing is estimated.

Times, prices and advice are made from these counts elsewhere. Elements are of tensors; bytes are as stored or as sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from shardmuon.plan.plan import Route

EngineName = Literal["fsdp2", "ddp", "fsdp1", "zero1", "zero2", "zero3", "megatron"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The arrangement of a job's ranks. They count as (pp, dp, shard, tp), the last axis fastest.

    Attributes:
        dp: Replicas: DDP's ranks, HSDP's outer axis, the data-parallel ranks of ZeRO and Megatron.
        shard: Ranks that parameters are cut over (FSDP).
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks. They are taken from dp x shard, so they do not count in `world`.
        pp: Pipeline stages.
        gpus_per_node: Ranks of one node.
        engine: What cuts parameters up.
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    engine: EngineName = "fsdp2"

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.dp * self.shard * self.tp * self.pp

    @property
    def num_nodes(self) -> int:
        """Nodes, the last perhaps not full."""
        return -(-self.world // self.gpus_per_node)

    def __str__(self) -> str:
        """The mesh as a user writes it."""
        sizes = ((name, getattr(self, name)) for name in ("dp", "shard", "tp", "ep", "pp"))
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp=1"


class Matrices(NamedTuple):
    """Equal matrices that one rank orthogonalizes in one bucket.

    Attributes:
        rows, cols: Shape of each.
        how: Text of a `Choice`: method, dtype of products, kernel.
        num: Number of these matrices.
        flops: Floating point operations of one, as the planner counts them. On the Gram route: those of the iteration
            on the owner, in fp64.
    """

    rows: int
    cols: int
    how: str
    num: int
    flops: int


class Sent(NamedTuple):
    """Bytes that one rank sends or receives in one exchange. Its own part, which moves nowhere, is not in it.

    Attributes:
        inside: Bytes between ranks of one node.
        across: Bytes between nodes.
        peers_inside: Ranks of this node with which any byte is exchanged.
        peers_across: Ranks of other nodes.
    """

    inside: int = 0
    across: int = 0
    peers_inside: int = 0
    peers_across: int = 0

    @property
    def bytes(self) -> int:
        """Bytes inside the node and between nodes."""
        return self.inside + self.across


NOTHING = Sent()


@dataclass(frozen=True, slots=True)
class BucketCount:
    """One bucket as a rank of one class carries it out.

    Attributes:
        number: Number of the bucket in the plan; ranks that exchange it have the same. -1: nothing moves.
        route: See plan/plan.py.
        num_ranks: Ranks that take part in its exchanges; 1 if nothing moves.
        num_nodes: Nodes that these ranks lie on.
        wire: dtype of batches and of what travels.
        matrices: What this rank orthogonalizes; empty for one that idles.
        held: Elements of the bucket whose momentum and weights this rank updates.
        gather: Bytes sent to owners. With the Gram route: parts of Gram matrices.
        gather_received: Bytes that this rank receives as an owner.
        scatter: Bytes of results sent to holders, and of what stages keep.
        scatter_received: Bytes that this rank receives as a holder.
        relay: Bytes of results sent to other replicas.
        relay_received: Bytes that this rank receives from another replica.
        gathers: True if the bucket has a gather and a scatter, whether or not this rank sends anything in them.
        relays: True if the bucket has a relay.
        foreign: Elements of `held` that are sent to owners.
        idle: Elements of `held` whose results the relay brings.
        batches: Bytes of `matrices` where they are orthogonalized; on the Gram route of this rank's shards.
        stepped: Elements of updates that momentum makes at once, at most: while this rank packs, and while it fills its
            batches.
        applied: Elements that are applied at once, at most: of its own matrices and what the scatter brings, of what
            the relay brings.
        local_flops: On the Gram route: products of this rank's shards with each other and with the factor; else 0.
        owners: Of each of `matrices`, how many ranks share it, see splitting.py; `Matrices.flops` are one's share.
            Empty: each has one owner.
    """

    number: int
    route: Route
    num_ranks: int
    num_nodes: int
    wire: str
    matrices: tuple[Matrices, ...]
    held: int
    gather: Sent = NOTHING
    gather_received: Sent = NOTHING
    scatter: Sent = NOTHING
    scatter_received: Sent = NOTHING
    relay: Sent = NOTHING
    relay_received: Sent = NOTHING
    gathers: bool = False
    relays: bool = False
    foreign: int = 0
    idle: int = 0
    batches: int = 0
    stepped: tuple[int, int] = (0, 0)
    applied: tuple[int, int] = (0, 0)
    local_flops: int = 0
    owners: tuple[int, ...] = ()

    @property
    def exchange(self) -> bool:
        """True if anything moves."""
        return self.route != "local"

    @property
    def exchanges(self) -> int:
        """all-to-all calls."""
        return 2 * self.gathers + self.relays

    @property
    def sides(self) -> tuple[Sent, ...]:
        """The exchanges that this rank sends, then those that it receives."""
        return (
            *(self.gather, self.scatter, self.relay),
            *(self.gather_received, self.scatter_received, self.relay_received),
        )

    @property
    def flops(self) -> int:
        """Floating point operations of orthogonalizing on this rank."""
        return sum(m.num * m.flops for m in self.matrices) + self.local_flops

    @property
    def sent(self) -> int:
        """Bytes that leave this rank."""
        return sum(side.bytes for side in self.sides[:3])


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes that one rank keeps between steps: of tensors as they are shaped, or of the flat buffers that they lie in,
    with the engine's padding. No allocator's rounding.

    Attributes:
        weights: Parameters.
        gradients: As they stand at `step()`.
        momentum: Muon's.
        moments: AdamW's two.
        masters: fp32 copies of the weights, of engines that keep them (ZeRO, Megatron).
    """

    weights: int = 0
    gradients: int = 0
    momentum: int = 0
    moments: int = 0
    masters: int = 0

    def __add__(self, other: Stored) -> Stored:
        """The sum of both, kind by kind."""
        return Stored(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that hold and do the same.

    Attributes:
        ranks: All of them, ascending.
        stage: Its pipeline stage.
        stored: Bytes between steps.
        peak: Bytes beyond `stored` at the highest point of a step.
        buckets: Buckets in the order in which they run.
        muon_elements: Elements whose momentum and weights this rank updates (replicas count on each rank).
        adamw_elements: Elements that AdamW updates on this rank.
        exchanges: all-to-all calls of a step.
        votes: Votes before a step.
    """

    ranks: tuple[int, ...]
    stage: int
    stored: Stored
    peak: int
    buckets: tuple[BucketCount, ...]
    muon_elements: int
    adamw_elements: int
    exchanges: int
    votes: int

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def example(self) -> int:
        """The lowest of them."""
        return self.ranks[0]

    @property
    def flops(self) -> int:
        """Floating point operations of orthogonalizing."""
        return sum(bucket.flops for bucket in self.buckets)

    @property
    def sent(self) -> int:
        """Bytes that leave a rank in exchanges; `Traffic.bytes_sent` of one step."""
        return sum(bucket.sent for bucket in self.buckets)

    @property
    def orthogonalized(self) -> int:
        """Matrices per step; `Traffic.orthogonalized`."""
        return sum(m.num for bucket in self.buckets for m in bucket.matrices)


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """Matrices of the whole model that are alike.

    Attributes:
        example: The first one's parameter.
        rows, cols: Shape of each.
        how: See `Matrices`.
        route: Route of the plan.
        reason: Reason for it, in the plan's words.
        count: Number in the model, each counted once, however many ranks hold it.
        flops: Floating point operations of one.
    """

    example: str
    rows: int
    cols: int
    how: str
    route: Route
    reason: str
    count: int
    flops: int


@dataclass(frozen=True, slots=True)
class Exact:
    """Everything that the planner counts of one model on one mesh.

    Attributes:
        model: Its name, as the user gave it.
        source: Where its shapes come from (an address, a file, a function).
        num_params: All trainable elements; tied ones count once.
        muon_params, adamw_params: Those of them that Muon and AdamW step.
        mesh: The arrangement of ranks.
        classes: Ranks that are alike, by example rank.
        matrices: By kind, the dearest first.
        digests: "number of the plan: ranks" of each group that exchanges anything -> hex digest of its part of the
            plan, which is in `Plan.digests` of the live job. Of groups that are copies of each other (stages of equal
            layers, expert groups) the first stands here.
        copies: How many groups have a plan like it, by the same key.
        options: What the plan hangs on beside model and mesh: dtypes, route, bucket size, as text by name.
        tokens_flops: Floating point operations of forward and backward per token, 6 x active parameters; 0: unknown.
        active: Where the number of active parameters is from, for people; "": there are no experts.
        uneven: How experts are cut where they do not divide over ranks, and what to write; "": they do.
    """

    model: str
    source: str
    num_params: int
    muon_params: int
    adamw_params: int
    mesh: Mesh
    classes: tuple[RankClass, ...]
    matrices: tuple[MatrixKind, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    tokens_flops: int = 0
    active: str = ""
    uneven: str = ""

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.mesh.world

    @property
    def heaviest(self) -> RankClass:
        """The class of ranks whose products take longest; the first of several."""
        return max(self.classes, key=lambda c: c.flops)

    @property
    def largest(self) -> RankClass:
        """The ranks that need most memory at the peak."""
        return max(self.classes, key=lambda c: c.stored.total + c.peak)

    @property
    def balance(self) -> float:
        """Floating point operations of the most loaded rank over the mean; 1 is best."""
        total = sum(c.count * c.flops for c in self.classes)
        return self.heaviest.flops * self.world / total if total else 1.0

    @property
    def idle(self) -> int:
        """Ranks that orthogonalize nothing."""
        return sum(c.count for c in self.classes if not c.flops)
