"""The update of a step on one rank, once all ranks have agreed: buckets from momentum to weights, then AdamW.

`run_buckets` takes buckets in turns: while one is orthogonalized, the next one travels. `run_owners` is one bucket from
its first line to its last: gather, orthogonalize, scatter, relay. Exchanges are handed in, so real ranks and simulated
ones run the same lines. Behind it stand the tiles that it moves and changes (views of this step's tensors and of a
buffer, alike ones in one call), and the rules that change them. Each of weights, gradients and momentum may have its
own dtype and lie on another device than the buffers.

The rules take lists of views of local storage and change those whose names end in an underscore. The operations give
each element the same bits wherever it stands in a shard (checked by tests): fp32 `lerp`, `mul` and `add` do, half
precision `add` with `alpha` does not on CPUs, so half-precision weights are updated in fp32 and rounded once.

[Note: one form of AdamW]
    Parameters that are not matrices are stepped by torch's own functional AdamW, on local shards, with torch's state
    keys. Every element goes through torch's fused kernel, in a whole vector. On CPUs that kernel takes 64 bytes of a
    tensor at a time, and rounds what is left at the end, which fills no vector, in another way: bits would hang on
    where a tensor is cut. So the end of a tensor is copied to where it has zeros behind it. The kernel walks memory and
    takes no notice of strides: tensors that lie in another order than their weight are copied, too. Elsewhere it
    computes each element by itself. See docs/adr/0022-one-adamw-form.md.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw as functional_adamw

from shardmuon._torch import (
    flattened,
    foreach_add_,
    foreach_copy_,
    foreach_lerp,
    foreach_lerp_,
    foreach_scale_,
    foreach_to,
    is_dense,
)
from shardmuon.comm.groups import Pending, Traffic, group_for, start
from shardmuon.errors import HALF_DONE, ExchangeError, named, ranks_text
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.layout.pieces import Patch, Tile
from shardmuon.layout.views import Ints, MatrixView, row_major
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP
from shardmuon.momentum.stores import BLOCK, Rounding, Stream, round_patch, step_stored_
from shardmuon.options import ADAMW_DEFAULTS
from shardmuon.orthogonalize import default_dtype, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.plan.pipeline import turns
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Batch, BufferPlace, Copy, KeptLoad, Load, Program, Wire
from shardmuon.step.batch import BatchStages
from shardmuon.step.options import Settings
from shardmuon.texts import listed
from shardmuon.variants import KEPT_KEYS

_CPU = torch.device("cpu")
_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Stored = Sequence[Sequence[Tensor]]  # of each parameter and each of its `Spec.kept`, what this rank stores of it; fp32
Exchange = Callable[[Tensor, Ints, Ints], Pending]  # what goes to each rank, and how much to and from each


@dataclass
class Work:
    """Tensors of this step for each parameter of a plan; None for those without a gradient, here and on all ranks.

    Attributes:
        weights, grads, momenta: This rank's storage for each parameter.
        settings: Settings of each parameter's group.
        kept: For each parameter, this rank's storage for each of its `Spec.kept`.
        rounding: Number of a parameter -> its random bits, for those that are rounded at random.
    """

    weights: list[Tensor | None]
    grads: list[Tensor | None]
    momenta: list[Tensor | None]
    settings: list[Settings]
    kept: list[tuple[Tensor, ...]] = field(default_factory=list)
    rounding: dict[int, Rounding] = field(default_factory=dict)


class Kernel(NamedTuple):
    """Means to orthogonalize the matrices of all buckets.

    Attributes:
        device: Device that orthogonalizes; None: that of a bucket's wires.
        watch: See `orthogonalize`.
    """

    device: torch.device | None = None
    watch: FiniteWatch | None = None


class Bound:
    """A program with the sides that it has on this rank. Kept from step to step; holds no tensor.

    Args:
        plan: The plan.
        program: One of its programs.
        shapes: Shape of this rank's storage of each parameter.
        device: Device of its wires.

    Attributes:
        dtype: Of what travels, and of batches.
        num_owned: Matrices that are orthogonalized here.
        moves: True if anything travels.
        choices: How each batch is orthogonalized.
        like_torch: See `apply_results`.
        own, gathered, scattered, late: Tiles of matrices owned here, that the gather sends, that the scatter brings,
            that the relay brings.
        held: What changes as soon as the scatter has come.
        kept: What stages keep of each batch.
        told, heard: What stages keep, as each exchange has it; of what comes behind the scatter `told_on`,
            `heard_late`.
    """

    def __init__(self, plan: Plan, program: Program, shapes: Sequence[Ints], device: torch.device = _CPU) -> None:
        self.plan, self.program, self.device = plan, program, device
        self.dtype, self.num_owned = _WIRES[program.bucket.itemsize], program.num_owned
        self.moves = program.bucket.exchange
        self.choices = [Choice.of(plan.items[batch.items[0]].how) for batch in program.batches]
        self.like_torch = Choice.of(plan.items[program.bucket.items[0]].how).method == "torch"
        scatter, relay = program.scatter, program.relay or Wire((), (), (), ())
        views = [spec.layout.view for spec in plan.specs]
        self.own, self.gathered, self.scattered, self.late, self.held = (
            Side(loads, views, shapes)
            for loads in (
                program.own,
                program.gather.tiles,
                scatter.tiles,
                relay.tiles,
                (*program.own, *scatter.tiles),
            )
        )
        self.kept = sides_of_batches(plan, program)
        self.told, self.heard, self.told_on, self.heard_late = (
            KeptSide(plan, loads) for loads in (scatter.told, scatter.heard, relay.told, relay.heard)
        )

    def __str__(self) -> str:
        bucket, plan = self.program.bucket, self.plan
        items = [plan.items[number] for number in bucket.items]
        named = listed([f"{plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items])
        return f"bucket {plan.buckets.index(bucket)} of {len(plan.buckets)} (ranks {ranks_text(bucket.ranks)}: {named})"

    def buffer(self, splits: Sequence[int]) -> Tensor:  # 1-D
        """Memory for what goes to each rank."""
        return torch.empty(sum(splits), dtype=self.dtype, device=self.device)


class Buckets:
    """The buckets of this rank in a step in which certain parameters have a gradient. Kept from step to step.

    Attributes:
        bounds: The buckets, in the plan's order.
        order: Their turns, see `shardmuon.plan.pipeline.turns`.
        moves: True if anything travels, so that other ranks wait for this one.
    """

    def __init__(self, bounds: list[Bound]) -> None:
        relays = [bound.program.relay is not None for bound in bounds]
        self.bounds, self.moves = bounds, any(bound.moves for bound in bounds)
        self.order = list(turns(relays, [bound.program.bucket.ranks for bound in bounds]))


def run_buckets(buckets: Buckets, work: Work, kernel: Kernel, traffic: Traffic) -> None:
    """Run all buckets of a step. Collective among the ranks of each.

    Args:
        buckets: This rank's.
        work: This step's tensors.
        kernel: What orthogonalizes.
        traffic: Counts exchanges and matrices.

    Raises:
        ExchangeError: Something failed in the middle; names the bucket and the operation.
    """
    runs: dict[int, Iterator[None]] = {}
    bounds = buckets.bounds
    for turn, i in buckets.order:
        bound = bounds[i]
        try:
            if turn == "begin":
                group = group_for(bound.program.bucket.ranks) if bound.moves else None
                runs[i] = run_owners(bound, work, kernel, partial(start, group, traffic))
                traffic.orthogonalized += bound.num_owned
            next(runs[i], None)  # its last turn ends it
        except ExchangeError:
            raise
        except Exception as error:
            if not buckets.moves:
                raise
            raise named(error, f"{bound}, {turn}", HALF_DONE) from error


def run_owners(bound: Bound, work: Work, kernel: Kernel, exchange: Exchange) -> Iterator[None]:
    """Carry a bucket out. Yields while something travels (and where it would, if nothing moves), so that another
    bucket's turn comes: see `shardmuon.plan.pipeline.turns`.

    What came and what was sent is let go of as soon as it has been read: products need room.
    """
    program, gathers = bound.program, bound.program.bucket.gathers
    gather, scatter, relay = program.gather, program.scatter, program.relay
    pending: list[Pending] = []  # taken out before it is waited for: then nothing here holds what was sent
    if gathers:
        pending.append(exchange(_momenta(bound, work), gather.sent, gather.came))
    batches = torch.empty(program.batch_numel, dtype=bound.dtype, device=kernel.device or bound.device)
    own = bound.own.on(batches)
    update_momentum(bound.own, work, own)
    update_momentum(bound.late, work, None)  # of what another replica sends on
    yield
    if gathers:
        _copy(gather.copies, pending.pop().wait(), batches)
    _orthogonalize(bound, work, kernel, batches)
    if gathers:
        pending.append(exchange(_results(bound, scatter, bound.told, work, batches), scatter.sent, scatter.came))
    yield
    came = pending.pop().wait() if gathers else None
    if came is not None:
        if scatter.heard:
            bound.heard.hear(came, work.kept)
        own += bound.scattered.on(came)
    passed = None if relay is None else _results(bound, relay, bound.told_on, work, batches, came)
    apply_results(bound.held, work, own, like_torch=bound.like_torch)
    if passed is None or relay is None:
        return
    del batches, own, came
    pending.append(exchange(passed, relay.sent, relay.came))
    del passed
    yield
    came = pending.pop().wait()
    if relay.heard:
        bound.heard_late.hear(came, work.kept)
    apply_results(bound.late, work, bound.late.on(came), like_torch=bound.like_torch)


def _momenta(bound: Bound, work: Work) -> Tensor:  # 1-D: what the gather sends
    """Update the momentum of what other ranks orthogonalize."""
    send = bound.buffer(bound.program.gather.sent)
    update_momentum(bound.gathered, work, bound.gathered.on(send))
    return send


def _results(
    bound: Bound,
    wire: Wire,
    told: KeptSide,
    work: Work,
    batches: Tensor,
    came: Tensor | None = None,  # 1-D: from the scatter, for the relay
) -> Tensor:  # 1-D: what the scatter or the relay sends
    """Results for others, and what stages keep."""
    send = bound.buffer(wire.sent)
    _copy(wire.copies, send, batches, back=True)
    if came is not None:
        _copy(wire.passed, came, send)
    if wire.told:
        told.tell(work.kept, send)
    return send


def _copy(copies: Sequence[Copy], here: Tensor, there: Tensor, *, back: bool = False) -> None:
    """Copy blocks from `here` to `there`, or with `back` from `there` to `here`."""
    for copy in copies:
        one = here.as_strided(copy.sizes, copy.here.strides, copy.here.start)
        other = there.as_strided(copy.sizes, copy.there.strides, copy.there.start)
        if back:
            one.copy_(other)
        else:
            other.copy_(one)


def _orthogonalize(bound: Bound, work: Work, kernel: Kernel, batches: Tensor) -> None:
    """Put orthogonalized matrices in the place of those owned here."""
    for batch, choice, of_batch in zip(bound.program.batches, bound.choices, bound.kept, strict=True):
        settings, x = work.settings[bound.plan.items[batch.items[0]].param], _matrices(batch, batches)
        stages, fed, unit, overwrite = None, x, False, True
        if settings.stages:
            stages = BatchStages(settings.stages, [side.of(work.kept) for side in of_batch], x)
            products = choice.dtype or default_dtype(choice.method, x.device)
            fed, unit = stages.before(None if choice.method == "torch" else products)
            overwrite = stages.may_take(fed.dtype, products)
        out = orthogonalize(
            fed,
            settings.coefficients,
            method=choice.method,
            dtype=choice.dtype,
            watch=kernel.watch,
            overwrite=overwrite,
            unit=unit,
        )
        if stages is not None:
            stages.finish(out)
        elif out is not x:
            x.copy_(out)
        del stages, fed, out  # may be wider than the wire, and the next batch needs room


def _matrices(batch: Batch, batches: Tensor) -> Tensor:  # (B, rows, cols)
    return batches.as_strided(batch.shape, (batch.stride, batch.shape[2], 1), batch.start)


# ------------------------------------------------------------------------------------------------------- Muon's tiles

# Elements of a list of tiles, or one tile: of what momentum makes on its way to a buffer, and an update on its way to
# half-precision weights. A CPU's cache holds it; elsewhere it fills a launch.
PORTION, PORTION_ELSEWHERE = 1 << 17, 1 << 24

# Neighbouring tiles of one form at equal distances in a buffer, as one view with a dim more: sizes, strides, start
_Row = tuple[Ints, Ints, int]
_Pick = Callable[[Sequence[Any]], Sequence[Any]]  # takes some tiles' entries out of a list with one for each
_dtype_of, _device_of = operator.attrgetter("dtype"), operator.attrgetter("device")


def dealt(sizes: Sequence[int], kinds: Sequence[Sequence[object]], limit: int) -> list[list[int]]:
    """Tiles of these sizes in portions of at most so many elements (or one tile), alike in each of these columns."""
    found: dict[tuple[object, ...], tuple[list[list[int]], int]] = {}
    for at, kind in enumerate(zip(*kinds, strict=True)):
        portions, room = found.get(kind, ([], -1))
        if sizes[at] > room:
            portions.append([])
            room = limit
        portions[-1].append(at)
        found[kind] = portions, room - sizes[at]
    return [places for portions, _ in found.values() for places in portions]


def _pick(places: list[int]) -> _Pick:
    first, last = places[0], places[-1]
    return operator.itemgetter(slice(first, last + 1)) if last - first < len(places) else operator.itemgetter(*places)


class Side:
    """The tiles that a rank has in one buffer: a wire, or its batches.

    A storage is asked for its strides whenever it is touched: a gradient may lie otherwise than the one before it, and
    otherwise than its parameter.

    Args:
        loads: Loads of a program.
        views: View of each parameter.
        shapes: Shape of this rank's storage of each parameter.

    Attributes:
        loads: The tiles and their places.
        params: Number of each tile's parameter.
        views: View of each tile's parameter.
        shapes: (rows, cols) of each tile's matrix.
    """

    def __init__(self, loads: Sequence[Load], views: Sequence[MatrixView], shapes: Sequence[Ints]) -> None:
        self.loads = tuple(loads)
        self.params = [load.param for load in loads]
        self.views = [views[param] for param in self.params]
        matrices = [view.matrices[load.tile.matrix] for view, load in zip(self.views, loads, strict=True)]
        self.shapes = [(matrix.rows, matrix.cols) for matrix in matrices]
        # a tile that is all of a storage is that storage, whatever its strides
        self._parts = [at for at, load in enumerate(loads) if load.tile.sizes != shapes[load.param]]
        self._known: list[dict[Ints, tuple[int, Ints]]] = [{} for _ in loads]  # strides of a storage -> those of a tile
        self._rows = _rows(loads)
        self._dealt: dict[int, tuple[object, list[tuple[list[int], _Pick]]]] = {}  # number of columns -> last portions

    @cached_property
    def patches(self) -> list[Patch]:
        """The rows and columns of each tile."""
        return [load.tile.patch(view) for load, view in zip(self.loads, self.views, strict=True)]

    def of(self, storages: Sequence[Tensor | None]) -> list[Tensor]:
        """Each tile as a view of its parameter's storage (of weights, gradients or momentum)."""
        found = list(map(storages.__getitem__, self.params))
        for at in self._parts:
            storage = found[at]
            assert storage is not None, "parameters without a gradient are in no program"
            strides, tile = storage.stride(), self.loads[at].tile
            known = self._known[at].get(strides)
            if known is None:
                known = self._known[at][strides] = tile.in_storage(self.views[at], strides)
            found[at] = storage.as_strided(tile.sizes, known[1], storage.storage_offset() + known[0])
        return cast("list[Tensor]", found)

    def on(self, buffer: Tensor) -> list[Tensor]:
        """Each tile as a view of the buffer, in the shape that `of` gives it."""
        found: list[Tensor] = []
        for row in self._rows:
            found += buffer.as_strided(*row).unbind(0)
        return found

    def portions(self, work: Work, *columns: Sequence[Tensor]) -> list[tuple[list[int], _Pick]]:
        """The tiles that one call of a list operation takes: of the same settings, of one dtype and device in each
        column. Numbers of each portion's tiles, and what takes theirs out of a list for all."""
        first: dict[int, int] = {}  # settings, made anew whenever one changes -> the first tile that has them
        settings = map(id, map(work.settings.__getitem__, self.params))
        kinds: list[Sequence[object]] = [list(map(first.setdefault, settings, itertools.count()))]
        for column in columns:
            kinds += list(map(_dtype_of, column)), list(map(_device_of, column))
        if work.rounding:
            kinds.append([param in work.rounding for param in self.params])
        limit = PORTION if columns[0][0].device.type == "cpu" else PORTION_ELSEWHERE
        known, found = self._dealt.get(len(columns), (None, []))
        if known != (kinds, limit):
            sizes = [load.tile.numel for load in self.loads]
            found = [(places, _pick(places)) for places in dealt(sizes, kinds, limit)]
            self._dealt[len(columns)] = (kinds, limit), found
        return found


def _rows(loads: Sequence[Load]) -> list[_Row]:
    rows: list[_Row] = []
    for load in loads:
        sizes, strides, start = load.tile.sizes, load.place.strides, load.place.start
        if rows:
            (count, *last_sizes), (distance, *last_strides), first = rows[-1]
            step = start - first
            alike = (*last_sizes,) == sizes and (*last_strides,) == strides
            if alike and step > 0 and (count == 1 or step == count * distance):
                rows[-1] = (count + 1, *sizes), (step // count, *strides), first
                continue
        rows.append(((1, *sizes), (0, *strides), start))
    return rows


class KeptSide:
    """Numbers that stages keep of some matrices, in this rank's storage of them, and on a wire if they travel. Kept
    from step to step; holds no tensor."""

    def __init__(self, plan: Plan, loads: Sequence[KeptLoad]) -> None:
        self._loads = tuple(loads)
        views = [plan.specs[load.param].kept[load.number].layout.view for load in loads]
        tiles = [Load(at, load.tile, BufferPlace(0, row_major(load.tile.sizes))) for at, load in enumerate(loads)]
        self._side = Side(tiles, views, [()] * len(tiles))

    def of(self, stored: Stored) -> list[Tensor]:  # 1-D each, fp32
        """Kept numbers of each matrix, as views of this rank's storage."""
        tiles = self._side.of([stored[load.param][load.number] for load in self._loads])
        return [tile.view(-1) for tile in tiles]

    def tell(self, stored: Stored, wire: Tensor) -> None:
        """Write the kept numbers to the wire, bit for bit."""
        targets = [wire.narrow(0, load.start, load.size) for load in self._loads]
        foreach_copy_(targets, [_as_elements(numbers, wire) for numbers in self.of(stored)])

    def hear(self, wire: Tensor, stored: Stored) -> None:
        """Store the numbers that came on the wire."""
        # one copy into memory of its own, for a slot may begin where no fp32 number may
        came = torch.cat([wire.narrow(0, load.start, load.size) for load in self._loads]).view(torch.float32)
        sizes = [load.size * wire.element_size() // came.element_size() for load in self._loads]
        targets = self.of(stored)
        numbers = zip(came.split(sizes), targets, strict=True)
        foreach_copy_(targets, [one.narrow(0, 0, len(target)) for one, target in numbers])


def _as_elements(numbers: Tensor, wire: Tensor) -> Tensor:  # 1-D fp32 -> 1-D of the wire's dtype
    """The same bits as elements of a wire, which only moves them."""
    padding = -len(numbers) % -(-wire.element_size() // numbers.element_size())
    whole = torch.cat([numbers, numbers.new_zeros(padding)]) if padding else numbers.contiguous()
    return whole.view(wire.dtype).to(wire.device)


def sides_of_batches(plan: Plan, program: Program) -> list[list[KeptSide]]:
    """Local storage of the numbers kept of matrices: one side for each batch and each `Spec.kept` of its matrices."""
    found = []
    for batch in program.batches:
        items = [plan.items[number] for number in batch.items]
        sides = []
        for number in range(len(plan.specs[items[0].param].kept)):
            tiles = [plan.specs[i.param].kept[number].layout.tiles[i.matrix][program.rank][0] for i in items]
            loads = [KeptLoad(item.param, number, tile) for item, tile in zip(items, tiles, strict=True)]
            sides.append(KeptSide(plan, loads))
        found.append(sides)
    return found


def update_momentum(
    side: Side,
    work: Work,
    targets: Sequence[Tensor] | None,  # of each tile, take what is to be orthogonalized; None: another replica does it
) -> None:
    """Update the momentum of a side's tiles."""
    if not side.loads:
        return
    grads, momenta = side.of(work.grads), side.of(work.momenta)
    for places, of in side.portions(work, grads, momenta):
        first = side.params[places[0]]
        s, given, kept = work.settings[first], of(grads), of(momenta)
        out = None if targets is None else of(targets)
        if first in work.rounding and work.rounding[first].momentum is not None:
            for at, i in enumerate(places):
                _update_rounded(side, work, i, kept[at], given[at], None if out is None else out[at])
            continue
        device = given[0].device
        loaded = kept if kept[0].device == device else [m.to(device) for m in kept]
        if out is None:
            momentum_(given, loaded, momentum=s.momentum, nesterov=False)
        else:
            momentum_into_(out, given, loaded, momentum=s.momentum, nesterov=s.nesterov)
        if loaded is not kept:
            foreach_copy_(kept, loaded)


def _update_rounded(side: Side, work: Work, at: int, kept: Tensor, grad: Tensor, out: Tensor | None) -> None:
    param = side.params[at]
    settings, rounding, codes = work.settings[param], work.rounding[param], work.momenta[param]
    assert rounding.momentum is not None and codes is not None
    stored = [kept]
    if rounding.scales is not None:
        stored.append(_scales_of(side.loads[at].tile, side.views[at], codes, rounding.scales))
    patch, stream = side.patches[at], rounding.momentum
    step_stored_(stored, grad, out, patch=patch, stream=stream, momentum=settings.momentum, nesterov=settings.nesterov)


def _scales_of(tile: Tile, view: MatrixView, codes: Tensor, scales: Tensor) -> Tensor:  # dims of rows, then blocks
    """The scales of a tile, a view of those that its rank stores beside the codes. It begins where a block does."""
    rows = view.num_row_dims
    first, strides = tile.in_storage(view, (*scales.stride()[:rows], *(0 for _ in view.shape[rows:])))
    column, _ = tile.in_storage(view, (*(0 for _ in view.shape[:rows]), *codes.stride()[rows:]))
    num_cols = tile.sizes[len(tile.sizes) - len(view.shape) + rows :]
    kept = len(tile.sizes) - len(num_cols)
    return scales.as_strided(
        (*tile.sizes[:kept], -(-torch.Size(num_cols).numel() // BLOCK)),
        (*strides[:kept], scales.stride(-1)),
        scales.storage_offset() + first + column // BLOCK * scales.stride(-1),
    )


def apply_results(
    side: Side,
    work: Work,
    updates: Sequence[Tensor],  # of each tile, orthogonalized
    *,
    like_torch: bool,  # by torch's own operations, where the options allow
) -> None:
    """Decay and update the weights of a side's tiles."""
    if not side.loads:
        return
    weights = side.of(work.weights)
    for places, of in side.portions(work, weights):
        first = side.params[places[0]]
        s, chosen, added = work.settings[first], of(weights), of(updates)
        shapes, device = of(side.shapes), chosen[0].device
        if {*map(_device_of, added)} != {device}:
            added = [update.to(device) for update in added]
        rounded: list[Callable[[Tensor], Tensor]] | None = None
        if first in work.rounding and work.rounding[first].weights is not None:
            streams = (cast("Stream", work.rounding[side.params[i]].weights) for i in places)
            rounded = [partial(round_patch, stream, side.patches[i]) for stream, i in zip(streams, places, strict=True)]
        elif like_torch and not s.cautious:
            for w, u, i, shape in zip(chosen, added, places, shapes, strict=True):
                apply_like_torch_(
                    w, u, s.given_lr, s.scales[shape], side.patches[i], shape, weight_decay=s.weight_decay
                )
            continue
        alphas = [s.lr * s.scales[shape] for shape in shapes]
        apply_(chosen, added, alphas, s.lr, s.weight_decay, s.cautious, rounded)


# -------------------------------------------------------------------------------------------------------- Muon's rules

_HALVES = (torch.bfloat16, torch.float16)


def momentum_(
    grads: Sequence[Tensor],  # local views of one dtype, not written to
    buffers: Sequence[Tensor],  # local views of the momentum, of one dtype, updated in place
    *,
    momentum: float,
    nesterov: bool,
) -> Sequence[Tensor]:  # what to orthogonalize; with nesterov=False the buffers themselves
    """B <- B + (1 - momentum) (G - B); return G + momentum (B - G) (Nesterov) or B. As torch.optim.Muon."""
    if grads[0].dtype != buffers[0].dtype:
        grads = foreach_to(grads, buffers)
    foreach_lerp_(buffers, grads, weight=1 - momentum)
    return foreach_lerp(grads, buffers, momentum) if nesterov else buffers


def momentum_into_(
    out: Sequence[Tensor],  # takes what to orthogonalize; of one dtype, not the gradients' memory
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """`momentum_` with its result in memory that there is: on a CPU without more, where its dtype is the momentum's.

    Accelerators take lists in one launch only where all tensors are dense, and a tile of a batch may have gaps.
    """
    first, last = out[0], buffers[0]
    in_place = nesterov and first.dtype == last.dtype and first.device.type == last.device.type == "cpu"
    for to, given, stored in in_cache(out, grads, buffers):
        if in_place:
            results, kept = list(to), list(stored)
            torch._foreach_copy_(results, list(given))
            torch._foreach_lerp_(kept, results, weight=1 - momentum)
            torch._foreach_lerp_(results, kept, weight=momentum)
        else:
            foreach_copy_(to, momentum_(given, stored, momentum=momentum, nesterov=nesterov))


def in_cache(*columns: Sequence[Tensor]) -> Iterator[Sequence[Sequence[Tensor]]]:
    """Lists of tensors, alike place by place, in slabs that a CPU's cache holds; elsewhere as they are.

    Only a list of one tensor is cut: longer ones were dealt in portions (step/update.py).
    """
    first = columns[0][0]
    if len(columns[0]) > 1 or first.device.type != "cpu" or first.numel() <= PORTION:
        yield columns
        return
    dim = next(dim for dim, size in enumerate(first.shape) if size > 1)
    step = max(1, PORTION * first.shape[dim] // first.numel())
    yield from zip(*(((slab,) for slab in column[0].split(step, dim)) for column in columns), strict=True)


def apply_(
    params: Sequence[Tensor],  # local views of one device and dtype, updated in place
    updates: Sequence[Tensor],  # same shapes, orthogonalized; wire dtype
    alphas: Sequence[float],  # lr * scale of each view's matrix
    lr: float,
    weight_decay: float,
    cautious: bool,
    rounded: Sequence[Callable[[Tensor], Tensor]] | None = None,  # fp32 -> half precision; default: to nearest
) -> None:
    """W <- (1 - lr * wd) W - alpha * O for each view. `cautious`: W decays only where O * W > 0, so that decay never
    works against the update."""
    half = params[0].dtype in _HALVES
    factor = 1 - lr * weight_decay
    for stored, given in [(params, updates)] if rounded else in_cache(params, updates):
        weights = foreach_to(stored, stored, torch.float32) if half else stored
        if weight_decay and cautious:
            for w, update in zip(weights, given, strict=True):
                decay_agreeing_(w, update * w, factor)
        elif weight_decay:
            foreach_scale_(weights, factor)
        # a CPU's `add` widens as it goes; other devices have no list operation for that
        widens = given[0].dtype in _HALVES and weights[0].device.type == "cpu"
        summands = given if widens or given[0].dtype == weights[0].dtype else foreach_to(given, weights)
        rows: dict[float, list[tuple[Tensor, Tensor]]] = {}
        for weight, summand, alpha in zip(weights, summands, alphas, strict=True):
            rows.setdefault(alpha, []).append((weight, summand))
        for alpha, alike in rows.items():
            foreach_add_(*zip(*alike, strict=True), alpha=-alpha)
        if half:
            foreach_copy_(stored, weights if rounded is None else [r(w) for r, w in zip(rounded, weights, strict=True)])


def decay_agreeing_(
    weight: Tensor,  # updated in place
    agreement: Tensor,  # same shape: positive where weight and update agree
    factor: float,
) -> None:
    """W <- factor W where `agreement` is positive; elsewhere, and where it is NaN, W stays."""
    # not where(.., factor, 1.0): that is fp32 whatever the weights are
    weight.copy_(torch.where(agreement > 0, weight * factor, weight))


def apply_like_torch_(
    param: Tensor,  # local view, any shape in the order of the patch; updated in place
    update: Tensor,  # same elements, bf16
    lr: float | Tensor,  # a tensor of any number of dims, with one element
    scale: float,  # of the whole matrix
    patch: Patch,
    shape: tuple[int, int],  # of the whole matrix
    *,
    weight_decay: float,
) -> None:
    """Exactly torch.optim.Muon's `param.mul_(1 - lr * decay); param.add_(update, alpha=-lr * scale)`, also on a shard.

    A tensor lr takes part as it is: torch rounds both factors to its dtype.

    torch's half-precision `add` rounds an element differently in the vector body and in the tail of a tensor, and
    differently again if the update is a transposed view, as it is for tall matrices. So the view is put at its own
    place in a matrix of the full size, and torch's own operation runs on that. It costs one matrix of scratch memory
    and is meant for proofs, not for speed.
    """
    if isinstance(lr, Tensor):
        lr = lr.squeeze().cpu()
    param.mul_(1 - lr * weight_decay)
    alpha = float(lr * scale)
    rows, cols = shape
    whole = torch.zeros(rows, cols, dtype=param.dtype, device=param.device)
    moved = torch.zeros(min(shape), max(shape), dtype=update.dtype, device=param.device)
    moved = moved.T if rows > cols else moved
    target, source = (
        matrix.as_strided(patch.sizes, strides, first)
        for matrix in (whole, moved)
        for first, strides in (patch.address(*matrix.stride()),)
    )
    target.copy_(param.reshape(patch.sizes))
    source.copy_(update.reshape(patch.sizes))
    whole.add_(moved, alpha=-alpha)
    param.copy_(target.reshape(param.shape))


# ------------------------------------------------------------------------------------------- AdamW of everything else

_VECTOR = 64  # bytes that a CPU's kernel takes at a time, at most (AVX512; torch 2.11 .. 2.13)
_SMALL = 1 << 14  # elements: fewer are copied whole where their end must be


class Row(NamedTuple):
    """One parameter in one step, on this rank's storages."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    state: MutableMapping[str, Any]


def step_adamw(
    groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],  # makes what is missing
    engines: Callable[[], set[Engine]],  # of the Muon parameters that have gradients in this step
    seen: Mapping[int, Sequence[Row | None]] = MappingProxyType({}),  # number of a group -> its rows; None: unknown
) -> None:
    """Step the groups with use_muon=False. Element-wise, so no rank needs another. Waits for no accelerator."""
    for number, group in enumerate(groups):
        if group["use_muon"]:
            continue
        rows = seen.get(number, [None] * len(group["params"]))
        if None in rows:
            rows = _completed(groups, group["params"], rows, state, engines)
        of_devices: dict[torch.device, list[Row]] = {}
        for row in rows:
            assert row is not None, "all are complete"
            param, step = row.param, row.state[STEP]
            if not param.numel():  # a rank may hold nothing; it still counts, so that checkpoints see all ranks alike
                step += 1
                continue
            device = param.device
            if step.device != device:  # made, or loaded
                row.state[STEP] = step.to(device, non_blocking=device.type != "cpu")
            of_devices.setdefault(device, []).append(row)
        for device, alike in of_devices.items():
            _update_(alike, {**ADAMW_DEFAULTS, **group}, device)  # a group may have lost some


def _completed(
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    rows: Sequence[Row | None],
    state: MutableMapping[Tensor, dict[str, Any]],
    engines: Callable[[], set[Engine]],
) -> list[Row]:
    """The rows of a group's parameters that have a gradient, or lack it only because nothing of them is stored here."""
    others = (p for group in groups if not group["use_muon"] for p in group["params"] if p.grad is not None)
    stepped = engines() | set(map(engine_of, others))  # engines of which some parameter is stepped
    found: list[Row] = []
    for p, row in zip(params, rows, strict=True):
        grad, engine = p.grad, engine_of(p)
        if grad is None and p.requires_grad and engine in stepped and engine.lacks_gradient(p):
            grad = engine.wrap(torch.zeros_like(engine.storage(p)), p)
        if grad is not None:
            found.append(row or _row(p, grad, engine, state[p]))
    return found


def _row(param: Tensor, grad: Tensor, engine: Engine, state: MutableMapping[str, Any]) -> Row:
    """Tensors of one parameter that AdamW steps; makes its state if it is missing. Collective if its gradient is to be
    aligned."""
    if not engine.is_aligned(grad, param):
        grad = engine.align(grad, param)
    init_state(param, grad, state)
    weight, local, moment, square = map(engine.storage, (param, grad, *map(state.__getitem__, MOMENTS)))
    return Row(weight, local, moment, square, state)


def init_state(param: Tensor, grad: Tensor, state: MutableMapping[str, Any]) -> None:
    """Create `step`, `exp_avg` and `exp_avg_sq` as torch.optim.AdamW has them, in the parameter's own form.

    What a parameter kept as Muon's goes: its `step` counts other things, and its momentum and what stages kept would
    come back stale.
    """
    for key in (BUFFER, SCALE, *KEPT_KEYS):
        state.pop(key, None)
    if all(key in state for key in (STEP, *MOMENTS)):
        return
    engine = engine_of(param)
    local = engine.storage(param)
    state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")  # `adamw_` puts it where its kernel reads it
    for key in MOMENTS:
        state[key] = engine.wrap(torch.zeros_like(local), param)


_Tensors = Sequence[Tensor]  # weight, gradient, moments
_Line = tuple[_Tensors, Tensor]  # what the kernel walks, and its count of steps


def _lines(rows: Sequence[Row], cuts: bool) -> tuple[list[_Line], list[Tensor], list[tuple[_Line, list[_Tensors]]]]:
    """Lists of tensors that the kernel walks on one device: see [Note: one form of AdamW].

    Args:
        rows: Parameters on one device.
        cuts: True if the kernel rounds the end of a tensor in another way.

    Returns:
        Tensors to step where they lie; step counts of parameters that are stepped in copies alone; copies, each with
        the tensors that it was made of.
    """
    lines: list[_Line] = []
    uncounted: list[Tensor] = []
    copied: dict[tuple[object, ...], tuple[Tensor, list[_Tensors]]] = {}
    for *tensors, state in rows:
        step, param = state[STEP], tensors[0]
        numel, strides = param.numel(), param.stride()
        rest = numel % (_VECTOR // param.element_size()) if cuts else 0
        dense = all(map(Tensor.is_contiguous, tensors))
        if not dense and is_dense(param) and all(t.stride() == strides for t in tensors):
            tensors, dense = [t.as_strided((numel,), (1,)) for t in tensors], True  # the kernel looks at no strides
        if dense and not rest:
            lines.append((tensors, step))
            continue
        end: _Tensors = tensors
        if dense and numel >= _SMALL:
            whole = numel - rest
            flats = [t.view(-1) for t in tensors]
            lines.append(([t[:whole] for t in flats], step))
            end = [t[whole:] for t in flats]
        else:
            uncounted.append(step)
        # side by side with others of their dtypes and number of steps, if no wait tells that
        key = (*(t.dtype for t in end), float(step) if cuts else len(copied))
        copied.setdefault(key, (step, []))[1].append(end)
    return lines, uncounted, [(_side_by_side(several, step), several) for step, several in copied.values()]


def _side_by_side(several: Sequence[_Tensors], step: Tensor) -> _Line:
    """Copies of several parameters' tensors, side by side; zeros behind them fill the last vector."""
    first = several[0][0]
    missing = -sum(row[0].numel() for row in several) % (_VECTOR // first.element_size())
    columns = zip(*several, strict=True)
    return [flattened([*column, column[0].new_zeros(missing)]) for column in columns], step.clone()


def _copy_back(copied: _Line, targets: Sequence[_Tensors]) -> None:
    """Copy stepped weights and moments back to where they belong."""
    for number in (0, 2, 3):
        column = [row[number] for row in targets]
        line = copied[0][number]
        parts = line[: sum(map(Tensor.numel, column))].split([t.numel() for t in column])
        foreach_copy_(column, [p if t.dim() == 1 else p.view(t.shape) for p, t in zip(parts, column, strict=True)])


def _update_(rows: Sequence[Row], group: Mapping[str, Any], device: torch.device) -> None:
    """One AdamW step of parameters on one device, in place; `group`: lr, betas, eps, weight_decay."""
    lines, uncounted, copies = _lines(rows, device.type == "cpu")
    lines += [line for line, _ in copies]
    params, grads, exp_avgs, exp_avg_sqs = map(list, zip(*(tensors for tensors, _ in lines), strict=True))
    beta1, beta2 = map(float, group["betas"])
    functional_adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step for _, step in lines],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=False,
    )
    for copied, targets in copies:
        _copy_back(copied, targets)
    if uncounted:
        torch._foreach_add_(uncounted, 1)
