"""The words of a planned job: its mesh, what each rank stores, sends and computes, and seconds as intervals.

Elements are of tensors; bytes are as stored or as sent. Counts are exact; times are made from them elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from shardmuon.plan.items import Route
from shardmuon.texts import did_you_mean

EngineName = Literal["fsdp2", "ddp", "zero1", "zero2", "zero3", "megatron"]
_AXES = ("dp", "shard", "tp", "ep", "pp")
_MOST_RANKS = 10_240


# ------------------------------------------------------------------------------------------------------------ the mesh


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

    @property
    def masters(self) -> bool:
        """True if the engine keeps fp32 weights and momentum itself."""
        return self.engine == "megatron" or self.engine.startswith("zero")

    def __str__(self) -> str:
        """The mesh as a user writes it."""
        sizes = ((name, getattr(self, name)) for name in _AXES)
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp=1"


def parse_mesh(text: str | Mesh, engine: str | None = None, gpus_per_node: int | None = None) -> Mesh:
    """A mesh from text such as "dp=8 shard=64 tp=8".

    Args:
        text: ``axis=size`` pairs with spaces or commas between them; axes left out have size 1. Or a mesh as it is,
            with the other arguments put in where they are given.
        engine: What cuts parameters up. Default: "ddp" if there is `dp` and neither `shard`, `tp` nor `ep`; else
            "fsdp2".
        gpus_per_node: Ranks of a node. Default: 8.

    Raises:
        ValueError: The text is no mesh, or one that the engine does not make; says what to write.

    Examples:
        >>> parse_mesh("dp=2 shard=64 tp=8").world
        1024
    """
    if isinstance(text, Mesh):
        mesh = text
    else:
        sizes: dict[str, Any] = _sizes(text)
        mesh = Mesh(**sizes, engine="ddp" if set(sizes) == {"dp"} and sizes["dp"] > 1 else "fsdp2")
    given: dict[str, Any] = {"engine": engine, "gpus_per_node": gpus_per_node}
    mesh = replace(mesh, **{key: value for key, value in given.items() if value is not None})
    _check(mesh)
    return mesh


def _sizes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        axis, equals, size = word.partition("=")
        if not equals or axis not in _AXES or not (size.isascii() and size.isdigit()) or int(size) < 1:
            hint = did_you_mean(axis, _AXES) if equals and axis not in _AXES else ""
            raise ValueError(
                f"mesh {text!r}: {word!r} is no axis=size. Axes are {', '.join(_AXES)}, sizes whole numbers of at "
                f'least 1: write for example "dp=2 shard=64 tp=8"{hint}'
            )
        if axis in found:
            raise ValueError(f"mesh {text!r}: {axis} stands there twice. Write it once")
        found[axis] = int(size)
    if not found:
        raise ValueError('the mesh is empty. Write its axes, for example "shard=64", or "dp=1" for one rank')
    return found


def _check(mesh: Mesh) -> None:
    """Raise ValueError for the first thing that is wrong with a mesh."""
    engine, engines = mesh.engine, get_args(EngineName)
    zero, lent = engine.startswith("zero"), mesh.dp if engine == "megatron" else mesh.shard * mesh.tp
    what = f"dp={mesh.dp}" if engine == "megatron" else f"shard x tp = {lent}"
    faults = (
        (
            engine not in engines,
            f"engine={engine!r} is not one of {', '.join(engines)}{did_you_mean(engine, engines)}. HSDP is fsdp2 with "
            "dp > 1, tensor parallelism alone is fsdp2 with tp > 1",
        ),
        (mesh.gpus_per_node < 1, f"gpus_per_node={mesh.gpus_per_node} must be at least 1"),
        (
            mesh.world > _MOST_RANKS,
            f"mesh {mesh} has {mesh.world:,} ranks, {_MOST_RANKS:,} are the most that are planned for",
        ),
        (
            (zero or engine in ("ddp", "megatron")) and mesh.shard > 1,
            f"mesh {mesh}: engine {engine} has no axis shard (it shares its state out over dp). Write "
            f"dp={mesh.dp * mesh.shard} instead of dp={mesh.dp} shard={mesh.shard}, or engine fsdp2",
        ),
        (
            zero and (mesh.tp > 1 or mesh.ep > 1),
            f"mesh {mesh}: {engine} with tp or ep is not supported by shardmuon. Write tp=1 ep=1",
        ),
        (
            engine == "ddp" and mesh.ep > 1,
            f"mesh {mesh}: engine ddp has no experts of its own. Write engine fsdp2 or megatron",
        ),
        (
            bool(lent % mesh.ep),
            f"mesh {mesh}: ep={mesh.ep} does not divide {what}, from which expert-parallel ranks are taken. Write an "
            f"ep that does, for example ep={_largest_divisor(lent, mesh.ep)}",
        ),
    )
    wrong = next((message for is_wrong, message in faults if is_wrong), None)
    if wrong:
        raise ValueError(wrong)


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def check_divides(mesh: Mesh, what: str, size: int, name: str, axis: Literal["tp", "ep"] = "tp") -> None:
    """Raise ValueError if an axis does not divide something; it says which size would."""
    given = mesh.tp if axis == "tp" else mesh.ep
    if size % given:
        good = _largest_divisor(size, given) if axis == "tp" else math.gcd(size, given)  # that still divides its ranks
        raise ValueError(
            f"mesh {mesh}: {axis}={given} does not divide the {size} {what} of {name}. Write {axis}={good}"
        )


# -------------------------------------------------------------------------------------------------------------- times


class Time(NamedTuple):
    """Seconds that something takes, or another number that is uncertain.

    Attributes:
        lo: If all that is uncertain turns out well.
        mid: What to expect; of measured times the median.
        hi: If it turns out badly.
    """

    lo: float
    mid: float
    hi: float

    def __str__(self) -> str:
        """Text like "1.2 .. 3.4 ms"."""
        return scaled((1e6 * self.lo, 1e6 * self.hi), 1000, _UNITS)


_UNITS = ("us", "ms", "s")


def seconds(value: float) -> str:
    """Text like "3.4 ms"."""
    return scaled((1e6 * value,), 1000, _UNITS)


def scaled(values: Sequence[float], step: int, units: Sequence[str]) -> str:
    """Text of numbers in three digits, or whole, in the largest of these units in which the last one is 1 or more.

    Args:
        values: Numbers in the first unit.
        step: Number of units that make one of the next.
        units: Names, ascending.
    """
    at = 0
    while abs(values[-1]) >= step ** (at + 1) and at + 1 < len(units):
        at += 1
    parts = (value / step**at for value in values)
    texts = (f"{part:,.0f}" if abs(part) >= 100 or part == 0 else f"{part:.3g}" for part in parts)
    return f"{' .. '.join(texts)} {units[at]}"


# ------------------------------------------------------------------------------------------------------------- counts


class Matrices(NamedTuple):
    """Equal matrices that one rank orthogonalizes in one bucket.

    Attributes:
        rows, cols: Shape of each.
        how: Text of a `Choice`: method, dtype of products, slices.
        num: Number of these matrices.
        flops: Floating point operations of one, as the planner counts them.
        owners: How many owners each has, each of a slice; `flops` are one's.
    """

    rows: int
    cols: int
    how: str
    num: int
    flops: int
    owners: int = 1


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


_NONE = Sent()


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
        gather: Bytes sent to owners.
        gather_received: Bytes that this rank receives as an owner.
        scatter: Bytes of results sent to holders, and of what stages keep.
        scatter_received: Bytes that this rank receives as a holder.
        relay: Bytes of results sent to other replicas.
        relay_received: Bytes that this rank receives from another replica.
        gathers: True if the bucket has a gather and a scatter, whether or not this rank sends anything in them.
        relays: True if the bucket has a relay.
        foreign: Elements of `held` that are sent to owners.
        idle: Elements of `held` whose results the relay brings.
        batches: Bytes of `matrices` where they are orthogonalized.
        stepped: Elements of updates that momentum makes at once, at most: while this rank packs, and while it fills its
            batches.
        applied: Elements that are applied at once, at most: of its own matrices and what the scatter brings, of what
            the relay brings.
        sums: Exchanges in which owners of slices add up what they made.
        summed: Bytes sent in these, of which as many come, and messages.
    """

    number: int
    route: Route
    num_ranks: int
    num_nodes: int
    wire: str
    matrices: tuple[Matrices, ...]
    held: int
    gather: Sent = _NONE
    gather_received: Sent = _NONE
    scatter: Sent = _NONE
    scatter_received: Sent = _NONE
    relay: Sent = _NONE
    relay_received: Sent = _NONE
    gathers: bool = False
    relays: bool = False
    foreign: int = 0
    idle: int = 0
    batches: int = 0
    stepped: tuple[int, int] = (0, 0)
    applied: tuple[int, int] = (0, 0)
    sums: int = 0
    summed: Sent = _NONE

    @property
    def exchange(self) -> bool:
        """True if anything moves."""
        return self.route != "local"

    @property
    def exchanges(self) -> int:
        """all-to-all calls."""
        return 2 * self.gathers + self.relays + self.sums

    @property
    def sides(self) -> tuple[Sent, ...]:
        """The exchanges that this rank sends, then those that it receives."""
        return (
            *(self.gather, self.scatter, self.relay, self.summed),
            *(self.gather_received, self.scatter_received, self.relay_received, self.summed),
        )

    @property
    def flops(self) -> int:
        """Floating point operations of orthogonalizing on this rank."""
        return sum(m.num * m.flops for m in self.matrices)

    @property
    def sent(self) -> int:
        """Bytes that leave this rank."""
        return sum(side.bytes for side in self.sides[:4])


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
        return Stored(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(astuple(self))


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
            plan, which is in `Plan.digests` of the live job.
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
    options: Mapping[str, str] = field(default_factory=dict)
    tokens_flops: int = 0
    active: str = ""
    uneven: str = ""

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.mesh.world

    @property
    def largest(self) -> RankClass:
        """The ranks that need most memory at the peak."""
        return max(self.classes, key=lambda c: c.stored.total + c.peak)
