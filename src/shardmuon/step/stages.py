"""Stages of variants in a step: on batches of whole matrices at owners, and on weights, by norms of whole matrices.

See [Note: stages] and [Note: what a stage keeps] in variants/base.py. Stages read and write what this rank stores of
what they keep; owners tell others from there, and others write there what they hear. A stage on weights takes the norm
of every whole matrix by one sum over ranks, then multiplies by a factor for each; a `WeightSet` gives what a rank adds
and is handed the sums, which `begin_weights` and `finish_weights` make.

[Note: norms of whole matrices]
    Squares are summed in fp64, by the first of the ranks that keep a piece; the ranks that share a parameter add up
    their sums, and the root is rounded to fp32. Another layout adds in another order, which shows in fp64 alone: the
    sums differ by some 1e-16 of themselves, so the fp32 norm is another one only where it falls between two fp32
    numbers as closely, once in some 25 million norms. As for gradients (gradients/clip.py).

[Note: matrices of zeros]
    They are found with the norms before the first step, and said once, by name. No host waits for its device: what is
    found travels to it beside the work, and the next step says it, in its guard.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import Later, arrived, foreach_copy_, foreach_mul_, foreach_norm
from shardmuon.comm.groups import Traffic, group_for, talking_device
from shardmuon.errors import HALF_DONE, UNCHANGED, level_of_the_caller, naming, ranks_text
from shardmuon.layout.table import Ranks
from shardmuon.layout.views import Ints, row_major
from shardmuon.orthogonalize import empty_batch
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import BufferPlace, KeptLoad, Load, Program
from shardmuon.step.update import Side, Stored, Work
from shardmuon.texts import listed
from shardmuon.variants import AfterStage, BeforeStage, Stages, WeightStage, keeping, scaled_


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


class BatchStages:
    """The stages of a batch in one step.

    Args:
        stages: Stages of its matrices.
        sides: Storage of what they keep, one for each of `keeping(stages)`.
        stored: This step's storages.
        place: The batch, and where results go: (B, rows, cols) in slots, of the wire's dtype.

    Attributes:
        out: The results before stages after; may be `place`.
        after: Stages after the orthogonalization.
        kept: Key -> of each matrix what its stages keep, fp32, where the batch is; changed in place.
    """

    def __init__(self, stages: Stages, sides: Sequence[KeptSide], stored: Stored, place: Tensor) -> None:
        self.place = self.out = place
        self._before = [stage for stage in stages if isinstance(stage, BeforeStage)]
        self.after = tuple(stage for stage in stages if isinstance(stage, AfterStage))
        self.kept: dict[str, Sequence[Tensor]] = {}
        self._moved: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []  # storage elsewhere, and what is here
        for stage, side in zip(keeping(stages), sides, strict=True):
            if isinstance(stage, WeightStage):
                continue
            rows: Sequence[Tensor] = side.of(stored)
            if rows[0].device != place.device:
                here = torch.stack(list(rows)).to(place.device).unbind(0)
                self._moved.append((rows, here))
                rows = here
            self.kept[stage.key] = rows

    def before(
        self,
        products: torch.dtype | None,  # None: torch.optim.Muon's
    ) -> tuple[Tensor, bool]:  # (B, rows, cols) in slots, and True if their norms are 1
        """Run the stages that come before the orthogonalization, on a CPU one matrix after the other. They overwrite
        the batch, unless products have another dtype than its half precision."""
        x = self.place
        if self._before and x.dtype in (torch.bfloat16, torch.float16) and products not in (None, x.dtype):
            x = empty_batch(x.shape, torch.float32, x.device)
            foreach_copy_([x], [self.place])
        for matrices in x.split(1) if x.device.type == "cpu" else (x,):
            for stage in self._before:
                stage.run_(matrices)
        return x, bool(self._before)

    def may_take(self, fed: torch.dtype, products: torch.dtype) -> bool:
        """True if results may take the place of what was fed, and so its dtype. A batch of one matrix has that of the
        products, and what a stage computes in must not depend on the batch, which is another one on every layout."""
        return fed == products or not self.after

    def settle(self) -> None:
        """Put results where they go, and what stages have changed, where storage is elsewhere."""
        if self.out is not self.place:
            self.place.copy_(self.out)
        for stored, here in self._moved:
            foreach_copy_(stored, here)


def finish(batches: Sequence[BatchStages]) -> None:
    """Run the stages after, on all batches that have the same ones together, and put results where they go: see
    [Note: matrices together] in variants/norms.py."""
    together: dict[tuple[tuple[AfterStage, ...], torch.dtype], list[BatchStages]] = {}
    for one in batches:
        if one.after:
            one.out = one.out.to(torch.promote_types(one.out.dtype, one.place.dtype))
            together.setdefault((one.after, one.out.dtype), []).append(one)
    for (after, _), alike in together.items():
        kept: Mapping[str, Sequence[Tensor]] = {
            stage.key: [row for one in alike for row in one.kept[stage.key]] for stage in after if stage.key
        }
        scaled_(after, [one.out for one in alike], kept)
    for one in batches:
        one.settle()


_PART = 1 << 17  # elements: CPUs copy what they sum to fp64 first, and so many stay in cache


class WeightSet:
    """Parameters that one set of ranks shares and whose weights have one stage, on one of these ranks. Kept from step
    to step; holds no tensor.

    Args:
        plan: The plan.
        stages: Number of a parameter -> its stages.
        rank: This one.
        shapes: Shape of this rank's storage of each parameter of the plan.

    Attributes:
        ranks: The ranks that share them.
    """

    def __init__(self, plan: Plan, stages: Mapping[int, Stages], rank: int, shapes: Sequence[Ints]) -> None:
        specs = {param: plan.specs[param] for param in sorted(stages)}
        self._first, self._rank, self._stage = min(stages), rank, _on_weights(next(iter(stages.values())))
        self.ranks = specs[self._first].layout.ranks
        self._text = f"ranks {ranks_text(self.ranks)}: {listed([spec.name for spec in specs.values()])}"
        self._names = list[str]()  # of each matrix
        # of each tile and of each kept number that is here: its matrix; and if the tile is this rank's to sum
        self._tiles_at, self._kept_at, self._counts = list[int](), list[int](), list[bool]()
        loads, kept = list[Load](), list[KeptLoad]()
        for param, spec in specs.items():
            number = [one.key for one in keeping(stages[param])].index(self._stage.key)
            pairs = zip(spec.layout.tiles, spec.kept[number].layout.tiles, strict=True)
            for i, (tiles, numbers) in enumerate(pairs):
                for tile in tiles.get(rank, ()):
                    self._tiles_at.append(len(self._names))
                    self._counts.append(spec.layout.keepers[tile.held.piece][0] == rank)
                    loads.append(Load(param, tile, BufferPlace(0, row_major(tile.sizes))))
                for tile in numbers.get(rank, ()):
                    self._kept_at.append(len(self._names))
                    kept.append(KeptLoad(param, number, tile))
                self._names.append(f"{spec.name}[{i}]" if len(spec.layout.tiles) > 1 else spec.name)
        self._tiles = Side(loads, [spec.layout.view for spec in plan.specs], shapes)
        self._kept = KeptSide(plan, kept)

    def __str__(self) -> str:
        return self._text

    def squares(self, work: Work) -> Tensor:  # (matrices,), fp64
        """The part of each matrix's squared norm that this rank has."""
        parts: list[list[Tensor]] = [[] for _ in self._names]
        tiles = self._tiles.of(work.weights)
        for at, counts, tile in zip(self._tiles_at, self._counts, tiles, strict=True):
            if counts:
                parts[at] += _parts(tile)
        weight = work.weights[self._first]
        assert weight is not None, "parameters of a set have gradients"
        parts = [of_matrix or [weight.new_zeros(1)] for of_matrix in parts]
        norms = foreach_norm(list(itertools.chain.from_iterable(parts)), 2)
        if len(norms) > len(parts):
            norms = foreach_norm(torch.stack(norms).split([len(of_matrix) for of_matrix in parts]), 2)
        return torch.stack(norms).square_()

    def begin(self, squares: Tensor, work: Work, watch: ZeroWatch) -> None:  # (matrices,), fp64
        """Keep norms that are not known yet, and tell of matrices of zeros. Runs before the update."""
        norm, kept = _norms(squares), self._read(work, squares.device)
        self._write(work, torch.where(kept == 0, norm.float().unsqueeze(1), kept))
        if self._rank == self.ranks[0]:  # one of them says so
            watch.coming.append((self._names, Later((kept[:, 0] == 0).logical_and_(norm == 0))))

    def finish(self, squares: Tensor, work: Work) -> None:  # (matrices,), fp64
        """Multiply the weights with their factors. Runs after the update."""
        kept = self._read(work, squares.device)
        factor = self._stage.factor(_norms(squares), kept)
        self._write(work, kept)
        tiles = self._tiles.of(work.weights)
        # CPUs multiply half precision by a 0-dim fp32 number in fp32; elsewhere the factor has a dim, else it would be
        # rounded to the weight's dtype first
        factor = factor if factor.device.type == "cpu" else factor.unsqueeze(-1)
        for dtype in {tile.dtype for tile in tiles}:
            numbers = (factor if dtype == torch.float64 else factor.float()).unbind(0)
            pairs = [(tile, numbers[at]) for tile, at in zip(tiles, self._tiles_at, strict=True) if tile.dtype == dtype]
            foreach_mul_([tile for tile, _ in pairs], [number for _, number in pairs])

    def _read(self, work: Work, device: torch.device) -> Tensor:  # (matrices, 1), fp32
        """The number kept of each matrix; 0 if it is not stored here."""
        found = [torch.zeros(1, dtype=torch.float32, device=device)] * len(self._names)
        for at, number in zip(self._kept_at, self._kept.of(work.kept), strict=True):
            found[at] = number
        return torch.stack(found)

    def _write(self, work: Work, values: Tensor) -> None:  # (matrices, 1)
        if self._kept_at:
            rows = values.unbind(0)
            foreach_copy_(self._kept.of(work.kept), [rows[at] for at in self._kept_at])


def _parts(tile: Tensor) -> list[Tensor]:
    while tile.dim() > 1 and len(tile) == 1:
        tile = tile[0]
    if tile.device.type != "cpu":
        return [tile]
    return list(tile.split(max(1, _PART * len(tile) // tile.numel())))


def _norms(squares: Tensor) -> Tensor:  # fp64 -> fp64
    """Square roots, rounded to fp32."""
    return torch.sqrt(squares, out=torch.empty_like(squares, dtype=torch.float32)).double()


def _on_weights(stages: Stages) -> WeightStage:
    return next(stage for stage in stages if isinstance(stage, WeightStage))


def weight_sets(plan: Plan, stages: Mapping[int, Stages], rank: int, shapes: Sequence[Ints]) -> list[WeightSet]:
    """The sets of a rank, in the order in which every rank sums their norms: it depends on nothing but their content.

    Args:
        plan: The plan.
        stages: Number of a parameter -> its stages, of those that the rank shares and that are meant: before the update
            those whose norms are fresh, after it those that have gradients. The same on all ranks that share them.
        rank: The rank.
        shapes: Shape of its storage of each parameter of the plan.
    """
    found: dict[tuple[int, Ranks, str, str], dict[int, Stages]] = {}
    for param, of_param in stages.items():
        if any(isinstance(stage, WeightStage) for stage in of_param):
            spec = plan.specs[param]
            key = len(spec.layout.ranks), spec.layout.ranks, spec.kind, repr(_on_weights(of_param))
            found.setdefault(key, {})[param] = of_param
    return [WeightSet(plan, of_set, rank, shapes) for _, of_set in sorted(found.items(), key=lambda one: one[0])]


# ------------------------------------------------------------------------------------------------- matrices of zeros


class ZeroWatch:
    """Watch for matrices whose norm was 0 when their stages first asked for it. One for each optimizer."""

    def __init__(self) -> None:
        self.coming: deque[tuple[Sequence[str], Later]] = deque()  # names of matrices, which are zero

    def report(self) -> None:
        """Warn of what has arrived by now."""
        found = [
            name for names, zero in arrived(self.coming) for name, is_zero in zip(names, zero, strict=True) if is_zero
        ]
        if found:
            warnings.warn(
                f"{listed(found)}: zero before the first step, so there was no norm to keep. That step was one of "
                "plain Muon, and the norm that it gave counts from now on. If it is not to be held so small, write "
                '{"params": [...], "variant": None} for these, or initialize them',
                stacklevel=level_of_the_caller(),
            )


def begin_weights(sets: Sequence[WeightSet], work: Work, traffic: Traffic, watch: ZeroWatch) -> None:
    """Run the stages on weights before the update, of parameters whose norms are fresh. Collective among each set.

    Raises:
        ExchangeError: A rank of a set died, hung or failed.
    """
    for one in sets:
        with _named(one, "before the update", UNCHANGED):
            one.begin(_summed(one.squares(work), one.ranks, traffic), work, watch)


def finish_weights(sets: Sequence[WeightSet], work: Work, traffic: Traffic) -> None:
    """Run the stages on weights after the update. Collective among each set.

    Raises:
        ExchangeError: A rank of a set died, hung or failed.
    """
    for one in sets:
        with _named(one, "after the update", HALF_DONE):
            one.finish(_summed(one.squares(work), one.ranks, traffic), work)


def _named(one: WeightSet, when: str, damage: str) -> AbstractContextManager[None]:
    """Name a set in what is raised inside. Alone it passes as it is: nobody else is left behind."""
    return nullcontext() if len(one.ranks) == 1 else naming(lambda: f"norms of weights {when} ({one})", damage)


def _summed(values: Tensor, ranks: Ranks, traffic: Traffic) -> Tensor:
    if len(ranks) == 1:
        return values
    group = group_for(ranks)
    sums = values.to(talking_device(values.device, group))
    dist.all_reduce(sums, group=group)
    traffic.norm_reductions += 1
    traffic.norms_sent += values.numel()
    return sums.to(values.device)
