"""Stages of variants on weights, by norms of whole matrices. See [Note: stages] in variants/base.py.

A stage on weights takes the norm of every whole matrix by one sum over ranks, then multiplies by a factor for each; a
`WeightSet` gives what a rank adds and is handed the sums, which `begin_weights` and `finish_weights` make.

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
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import BufferPlace, KeptLoad, Load
from shardmuon.step.update import KeptSide, Side, Work
from shardmuon.texts import listed
from shardmuon.variants import Stages, WeightStage, keeping

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
