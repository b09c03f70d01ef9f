"""Stages of variants on weights: the norm of every whole matrix by one sum over ranks, then a factor for each.

It never communicates: it gives what a rank adds, and is handed the sums over all ranks, which `step/commit.py` makes.

[Note: norms of whole matrices]
    Squares are summed in fp64, by the first of the ranks that keep a piece; the ranks that share a parameter add up
    their sums, and the root is rounded to fp32. Another layout adds in another order, which shows in fp64 alone: the
    sums differ by some 1e-16 of themselves, so the fp32 norm is another one only where it falls between two fp32
    numbers as closely, once in some 25 million norms. As for gradients (gradients/common_sum.py).

[Note: matrices of zeros]
    They are found with the norms before the first step, and said once, by name. No host waits for its device: what is
    found travels to it beside the work, and the next step says it, in its guard.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardmuon._torch import Later, foreach_copy_, foreach_norm, foreach_products_
from shardmuon.errors import level_of_the_caller, ranks_text
from shardmuon.layout.table import Ranks
from shardmuon.layout.views import Ints, row_major
from shardmuon.plan.copies import BufferPlace
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import KeptLoad, Load
from shardmuon.step.stages import KeptSide
from shardmuon.step.update import Side, Work
from shardmuon.variants import Stages, WeightStage, keeping

_PART = 1 << 17  # elements: CPUs copy what they sum to fp64 first, and so many stay in cache


class WeightSet:
    """Parameters that one set of ranks shares and whose weights have one stage, on one of these ranks. Kept from step
    to step; holds no tensor.

    Attributes:
        ranks: The ranks that share them.
    """

    def __init__(self, plan: Plan, stages: Mapping[int, Stages], rank: int, shapes: Sequence[Ints]) -> None:
        """
        Args:
            plan: The plan.
            stages: Number of a parameter -> its stages.
            rank: This one.
            shapes: Shape of this rank's storage of each parameter of the plan.
        """
        self._params = {param: plan.specs[param] for param in sorted(stages)}
        self.ranks, self._rank = next(iter(self._params.values())).layout.ranks, rank
        self._stage = _on_weights(next(iter(stages.values())))
        self._sizes = [len(spec.layout.tiles) for spec in self._params.values()]
        tiles, kept = list[Load](), list[KeptLoad]()
        self._tiles_at, self._counts, self._kept_at = list[int](), list[bool](), list[int]()
        matrices = [
            (param, matrix) for param, size in zip(self._params, self._sizes, strict=True) for matrix in range(size)
        ]
        for at, (param, matrix) in enumerate(matrices):
            layout = self._params[param].layout
            for tile in layout.tiles[matrix].get(rank, ()):
                tiles.append(Load(param, tile, BufferPlace(0, row_major(tile.sizes))))
                self._tiles_at.append(at)
                self._counts.append(layout.keepers[tile.held.piece][0] == rank)
            number = [stage.key for stage in keeping(stages[param])].index(self._stage.key)
            for tile in self._params[param].kept[number].layout.tiles[matrix].get(rank, ()):
                kept.append(KeptLoad(param, number, tile, 0, 0))
                self._kept_at.append(at)
        self._tiles = Side(tiles, [spec.layout.view for spec in plan.specs], shapes)
        self._kept = KeptSide(plan, kept)

    def __str__(self) -> str:
        names = [spec.name for spec in self._params.values()]
        more = [f"{len(names) - 3} more"] if len(names) > 3 else []
        return f"ranks {ranks_text(self.ranks)}: {', '.join(names[:3] + more)}"

    def squares(self, work: Work) -> Tensor:  # (matrices,), fp64
        """The part of each matrix's squared norm that this rank has."""
        weight = work.weights[next(iter(self._params))]
        assert weight is not None, "parameters of a set have gradients"
        parts: list[list[Tensor]] = [[] for _ in range(sum(self._sizes))]
        for at, counts, tile in zip(self._tiles_at, self._counts, self._tiles.of(work.weights), strict=True):
            if counts:
                parts[at] += _parts(tile)
        parts = [of_matrix or [weight.new_zeros(1)] for of_matrix in parts]
        norms = foreach_norm(list(itertools.chain.from_iterable(parts)), 2)
        if len(norms) > len(parts):
            norms = foreach_norm(torch.stack(norms).split([len(of_matrix) for of_matrix in parts]), 2)
        return torch.stack(norms).square_()

    def begin(self, squares: Tensor, work: Work, watch: ZeroWatch) -> None:  # (matrices,), fp64
        """Keep norms that are not known yet, and tell of matrices of zeros. Runs before the update."""
        norm, kept = _norms(squares), self._read(work, squares.device)
        zero = (kept[:, 0] == 0).logical_and_(norm == 0)
        self._write(work, torch.where(kept == 0, norm.float().unsqueeze(1), kept))
        if self._rank == self.ranks[0]:  # one of them says so
            for spec, of_param in zip(self._params.values(), zero.split(self._sizes), strict=True):
                watch.add(spec.name, self._stage, of_param)

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
            foreach_products_([tile for tile, _ in pairs], [number for _, number in pairs])

    def _read(self, work: Work, device: torch.device) -> Tensor:  # (matrices, 1), fp32
        """The number kept of each matrix; 0 if it is not stored here."""
        found = [torch.zeros(1, dtype=torch.float32, device=device)] * sum(self._sizes)
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

_SHOWN = 3  # names in a message


class ZeroWatch:
    """Watch for matrices whose norm was 0 when their stages first asked for it. One for each optimizer."""

    def __init__(self) -> None:
        self.coming: deque[tuple[str, str, Tensor | Later]] = deque()  # parameter, its stage, which are zero

    def add(
        self,
        name: str,
        stage: WeightStage,
        zero: Tensor,  # (matrices of the parameter,), bool
    ) -> None:
        """Note which matrices of one parameter are zeros. Waits for nothing."""
        self.coming.append((name, type(stage).__name__, zero if zero.device.type == "cpu" else Later(zero)))

    def report(self) -> None:
        """Warn of what has arrived by now: once for each kind of stage."""
        found: dict[str, list[str]] = {}
        while self.coming:
            name, stage, zero = self.coming[0]
            if isinstance(zero, Later):
                if not zero.has_arrived():
                    break
                zero = zero.value()
            self.coming.popleft()
            which = zero.nonzero().flatten().tolist()
            if which:
                found.setdefault(stage, []).append(name if len(which) == len(zero) else f"{name}{which}")
        if not found:
            return
        texts = [f"{_listed(names)} ({stage})" for stage, names in found.items()]
        warnings.warn(
            f"{'; '.join(texts)}: zero before the first step, so there was no norm to keep. That step was one of plain "
            "Muon, and the norm that it gave counts from now on. If it is not to be held so small, write "
            '{"params": [...], "variant": None} for these, or initialize them',
            stacklevel=level_of_the_caller(),
        )


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join(names[:_SHOWN] + more)


__all__ = ["WeightSet", "ZeroWatch", "weight_sets"]
