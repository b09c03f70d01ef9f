"""What a plan is made of: the choices, the parameters as the planner sees them, items, buckets, transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shardmuon.planning.layout import Fragment, ParamLayout
from shardmuon.planning.routes import Route, RouteOption


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices a user may make about the plan.

    Attributes:
        route: "auto" or "owner": matrices that only one rank holds whole stay there, all others get one owner. "local":
            every rank that holds a matrix whole orthogonalizes it itself, replicas redundantly, and nothing moves; an
            error where no rank holds it whole. "gram": the Gram route for every matrix that is cut along its long dim
            only, an owner for the others, with the reason in the plan.
        bucket_bytes: Upper bound on the bytes (wire dtype) of whole matrices that one owner holds in one bucket. A
            single larger matrix makes a bucket of its own.
        wire_bytes: Bytes per element of the wire dtype.
        narrows: Matrices with half-precision products have a wire of 2 bytes all the same.
    """

    route: RouteOption = "auto"
    bucket_bytes: int = 32 * 2**20
    wire_bytes: int = 2
    narrows: bool = False

    def wire_bytes_of(self, how: str) -> int:
        """Bytes per element on the wire of a matrix that is orthogonalized like this."""
        return 2 if self.narrows and is_narrow(how) else self.wire_bytes

    @property
    def gram_bytes(self) -> int:
        """Bytes per element of a Gram matrix on the wire: never less than fp32's."""
        return 8 if self.wire_bytes == 8 else 4


def is_narrow(how: str) -> bool:
    """True for half-precision products, by the text of a matrix's choice. Those of "torch" are bf16."""
    return not {"bfloat16", "float16", "torch"}.isdisjoint(how.split())


class Recipe(NamedTuple):
    """How a matrix is orthogonalized and what that costs.

    Attributes:
        how: Text of an `orthogonalize.choice.Choice`. Matrices of one batch share it, and so do peers.
        cost: Floating point operations.
        reason: Why this way, for the printed plan.
        gram_cost: What the iteration on the Gram route costs.
        gram_fault: Why its method or schedule cannot take the Gram route, or "".
    """

    how: str
    cost: int
    reason: str = ""
    gram_cost: int = 0
    gram_fault: str = "no schedule was named"


def default_recipe(rows: int, cols: int) -> Recipe:
    """Five quintic Newton-Schulz steps in the standard form."""
    short, long = min(rows, cols), max(rows, cols)
    return Recipe("standard float32", 5 * (4 * short * short * long + 2 * short**3))


class Kept(NamedTuple):
    """Numbers that a stage of a variant keeps of each matrix from step to step, fp32.

    Attributes:
        layout: Who keeps which. A "matrix" of its view is what is kept of one matrix of the parameter, 1 x so many. It
            is never cut: a rank has all of it or nothing.
        travels: Whether owners change them and send them to all who keep them.
    """

    layout: ParamLayout
    travels: bool

    def keepers(self, matrix: int) -> tuple[int, ...]:
        """The ranks that keep those of a matrix, ascending."""
        return tuple(self.layout.fragments[matrix])

    def size(self, matrix: int) -> int:
        """How many they are."""
        return self.layout.view.matrices[matrix].cols


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the planner sees it.

    Attributes:
        name: For messages and tables.
        layout: Who holds what.
        recipes: How each matrix of the view is orthogonalized. Empty: `default_recipe` for all.
        kind: Parameters of different kinds (device types) never share a bucket.
        batch: Matrices of different batch keys (coefficients, steps, eps) never share a batch.
        identity: What a peer must list at the same place (a name that the user gave); part of the digest.
        kept: What each stage of its variant keeps that keeps anything.
        gram_fault: Why its variant excludes the Gram route, or "".
    """

    name: str
    layout: ParamLayout
    recipes: tuple[Recipe, ...] = ()
    kind: str = "cpu"
    batch: str = ""
    identity: str = ""
    kept: tuple[Kept, ...] = ()
    gram_fault: str = ""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """The unit placed on an owner: one matrix.

    Attributes:
        param: Index of its `ParamSpec`.
        matrix: Index of the matrix within the parameter's view.
        owners: Ranks that orthogonalize it: one, or every whole holder on the redundant local route.
        route: "local": nothing of it ever moves. "gram": see [Note: the Gram route].
        cost: Floating point operations.
        how: See `Recipe`.
        reason: See `Recipe`.
    """

    param: int
    matrix: int
    rows: int
    cols: int
    owners: tuple[int, ...]
    route: Route
    cost: int
    how: str = "standard float32"
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Items that move together. `exchange` is False when nothing moves (`ranks` is then just the one owner)."""

    ranks: tuple[int, ...]
    items: tuple[int, ...]
    kind: str
    exchange: bool
    route: Route = "owner"
    itemsize: int = 0  # bytes per element on its wire


class Slot(NamedTuple):
    """Where one fragment of one item sits in a wire buffer, in elements."""

    item: int
    fragment: Fragment
    start: int


class KeptSlot(NamedTuple):
    """Where the bits of what stage `number` (of `ParamSpec.kept`) keeps of an item sit in a wire buffer; elements."""

    item: int
    number: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One exchange as one rank sees it: slots of its send and receive buffers, and elements per group rank.

    `kept_send` and `kept_recv` are what owners' stages have changed, behind the results for each rank.
    """

    send: tuple[Slot, ...]
    send_splits: tuple[int, ...]
    recv: tuple[Slot, ...]
    recv_splits: tuple[int, ...]
    kept_send: tuple[KeptSlot, ...] = ()
    kept_recv: tuple[KeptSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class RankBucket:
    """A bucket as one rank carries it out.

    Attributes:
        held: Every (item, fragment) of the bucket that this rank stores: momentum and weights are updated there.
        owned: Items that this rank orthogonalizes.
        kept: Those of `held` whose item this rank owns; they are copied, never sent.
        gather: Fragments to owners. None if the bucket has no exchange.
        scatter: Results to holders. None if the bucket has no exchange.
    """

    bucket: Bucket
    held: tuple[tuple[int, Fragment], ...]
    owned: tuple[int, ...]
    kept: tuple[tuple[int, Fragment], ...]
    gather: Transfer | None
    scatter: Transfer | None
