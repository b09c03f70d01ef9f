"""Execution of weight stages, the stages of Muon variants (such as Hyperball's) that rescale each weight matrix after
its update. The scaling factor depends on the norm of the whole matrix. See [Note: stages] in variants.py.

A `WeightSet` computes this rank's part of the squared norm of each matrix. `scale_weights` sums these parts over ranks
and passes the sums back to the `WeightSet`, which rescales the matrices.

[Note: norms of whole matrices]
    Each rank sums the squares of its shards in fp64. If several ranks store the same shard, only the first of these
    ranks includes it. An all-reduce adds the sums of all ranks that share the parameter, and the square root of the
    total is rounded to fp32. The order of the additions depends on the sharding, so the fp64 sums of two shardings have
    a relative difference of about 5e-15. The rounded norms differ only if the fp64 value is equally close to the
    midpoint of two fp32 numbers, which happens for about one norm in 25 million. Gradient norms are computed in the
    same way (gradients/clip.py).

[Note: all-zero matrices]
    All-zero weight matrices are detected when norms are first computed, and one warning names all of them. The CPU does
    not wait for the device: the result is copied asynchronously, and a later step issues the warning.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import Coming, foreach, foreach_copy_, foreach_norm
from shardmuon.comm.groups import Ranks, Traffic, group_for, wire_device
from shardmuon.errors import ExchangeError, level_of_the_caller, ranks_text
from shardmuon.layout.views import Ints
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Load
from shardmuon.step.update import KeptSide, Side, Work
from shardmuon.texts import listed
from shardmuon.variants import Stages, WeightStage, keeping

# Number of weights that CPUs square and sum at a time. The fp64 copies of this many weights fit in the cache.
_PART = 1 << 17


class WeightSet:
    """Parameters that are sharded or replicated over the same ranks and rescaled by the same stage of a Muon variant
    (such as Hyperball's). The class computes this rank's part of the squared norms of the weight matrices, and rescales
    the matrices. Objects are cached between steps and hold no tensors.

    Args:
        plan: Plan that contains the parameters.
        stages: Dict from the index of each parameter of the set to the stages of its Muon variant.
        rank: Global rank that uses the set.
        shapes: Shape of this rank's local storage for each parameter of the plan.

    Attributes:
        ranks: Ranks over which the parameters are sharded or replicated.
        text: The ranks and the names of the parameters, for error messages.
    """

    def __init__(self, plan: Plan, stages: Mapping[int, Stages], rank: int, shapes: Sequence[Ints]) -> None:
        specs = {param: plan.specs[param] for param in sorted(stages)}
        self._first, self._rank, self._stage = min(stages), rank, _on_weights(next(iter(stages.values())))
        self.ranks = specs[self._first].layout.ranks
        self.text = f"ranks {ranks_text(self.ranks)}: {listed([spec.name for spec in specs.values()])}"
        matrices = [(param, i) for param, spec in specs.items() for i in range(len(spec.layout.tiles))]
        # name of each matrix of the set, for the warning about all-zero matrices
        self._names = [specs[p].name + (f"[{i}]" if len(specs[p].layout.tiles) > 1 else "") for p, i in matrices]
        # for each parameter, the index in `Spec.kept` of the state tensor that contains its weight norms
        numbers = {p: [one.key for one in keeping(of_param)].index(self._stage.key) for p, of_param in stages.items()}
        loads = [Load(p, tile) for p, i in matrices for tile in specs[p].layout.tiles[i].get(rank, ())]
        kept = [
            Load(p, tile, number=numbers[p])
            for p, i in matrices
            for tile in specs[p].kept[numbers[p]].layout.tiles[i].get(rank, ())
        ]
        # `_tiles_at` contains the index in `_names` of each tile's matrix. A tile is a part of a matrix on this rank.
        # `_kept_at` contains the index in `_names` of each matrix whose norm this rank stores.
        indices = {matrix: at for at, matrix in enumerate(matrices)}
        self._tiles_at = [indices[load.param, load.tile.matrix] for load in loads]
        self._kept_at = [indices[load.param, load.tile.matrix] for load in kept]
        # For each tile (part of a matrix), True if this rank includes the tile in the sum of squares. If several ranks
        # store the tile, only one of them includes it.
        self._counts = [specs[load.param].layout.keepers[load.tile.held.piece][0] == rank for load in loads]
        self._tiles = Side(loads, [spec.layout.view for spec in plan.specs], shapes)
        self._kept = KeptSide(plan, kept)

    @classmethod
    def of_rank(cls, plan: Plan, stages: Mapping[int, Stages], rank: int, shapes: Sequence[Ints]) -> list[WeightSet]:
        """Make the weight sets (`WeightSet`) of a rank. The order of the sets depends only on their contents, so ranks
        process the sets that they have in common in the same order.

        Args:
            stages: The parameters to process, as a dict from parameter index to the stages of the Muon variant. Ranks
                that share a parameter must agree on whether it is included.
            shapes: Shape of the rank's local storage for each parameter of the plan.
        """
        found: dict[tuple[int, Ranks, str, str], dict[int, Stages]] = {}
        for param, of_param in stages.items():
            if any(isinstance(stage, WeightStage) for stage in of_param):
                spec = plan.specs[param]
                key = len(spec.layout.ranks), spec.layout.ranks, spec.kind, repr(_on_weights(of_param))
                found.setdefault(key, {})[param] = of_param
        return [cls(plan, of_set, rank, shapes) for _, of_set in sorted(found.items(), key=lambda one: one[0])]

    def squares(self, work: Work) -> Tensor:
        """Compute this rank's part of the squared norm of each weight matrix. The result has one fp64 number per
        matrix."""
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

    def begin(self, squares: Tensor, work: Work, watch: ZeroWatch) -> None:
        """Store the norm of each weight matrix whose norm is still unknown, and queue a check for all-zero matrices.
        Call this method before the weights are updated. `squares` contains the squared norm of each matrix, in fp64."""
        norm, kept = _norms(squares), self._read(work, squares.device)
        self._write(work, torch.where(kept == 0, norm.float().unsqueeze(1), kept))
        # Of the ranks that share the weight matrices, only the first rank warns about all-zero matrices.
        if self._rank == self.ranks[0]:
            watch.send(self._names, (kept[:, 0] == 0).logical_and_(norm == 0))

    def finish(self, squares: Tensor, work: Work) -> None:
        """Multiply each weight matrix by the factor that the stage of the Muon variant (such as Hyperball's) computes
        from the matrix's new norm and its stored norm. Call this method after the weights have been updated. `squares`
        contains the squared norm of each whole matrix, in fp64."""
        kept = self._read(work, squares.device)
        factor = self._stage.factor(_norms(squares), kept)
        self._write(work, kept)
        tiles = self._tiles.of(work.weights)
        # On CPUs, torch multiplies half-precision weights by a 0-dim fp32 factor in fp32. On other devices, it would
        # first round a 0-dim factor to the dtype of the weights, so the factors get one dim.
        factor = factor if factor.device.type == "cpu" else factor.unsqueeze(-1)
        wide, numbers = factor.unbind(0), factor.float().unbind(0)
        pairs = zip(tiles, self._tiles_at, strict=True)
        foreach("mul_", tiles, [(wide if tile.dtype == torch.float64 else numbers)[at] for tile, at in pairs])

    def _read(self, work: Work, device: torch.device) -> Tensor:  # returns fp32 norms of shape (number of matrices, 1)
        """Read the stored norm of each weight matrix from the optimizer state. The result is 0 for matrices whose norms
        this rank does not store."""
        found = [torch.zeros(1, dtype=torch.float32, device=device)] * len(self._names)
        for at, number in zip(self._kept_at, self._kept.of(work.kept), strict=True):
            found[at] = number
        return torch.stack(found)

    # `values`: fp32 norms, shape (number of matrices, 1)
    def _write(self, work: Work, values: Tensor) -> None:
        if self._kept_at:
            rows = values.unbind(0)
            foreach_copy_(self._kept.of(work.kept), [rows[at] for at in self._kept_at])


def _parts(tile: Tensor) -> list[Tensor]:
    while tile.dim() > 1 and len(tile) == 1:
        tile = tile[0]
    if tile.device.type != "cpu":
        return [tile]
    return list(tile.split(max(1, _PART * len(tile) // tile.numel())))


def _norms(squares: Tensor) -> Tensor:
    """Compute norms from fp64 squared norms. The norms are rounded to fp32 and returned as fp64."""
    return torch.sqrt(squares, out=torch.empty_like(squares, dtype=torch.float32)).double()


def _on_weights(stages: Stages) -> WeightStage:
    return next(stage for stage in stages if isinstance(stage, WeightStage))


# ------------------------------------------------------------------------------------------------- all-zero matrices


class ZeroWatch(Coming[Sequence[str]]):
    """Queue of checks that find weight matrices whose norm is 0 when it is first computed. An entry of the queue holds
    the names of some matrices and a mask that is True for all-zero matrices. Each optimizer has one queue."""

    def report(self) -> None:
        """Warn about all-zero weight matrices. Checks whose results have not yet arrived from the device stay in the
        queue for a later call."""
        found = [name for names, zero in self.arrived() for name, is_zero in zip(names, zero, strict=True) if is_zero]
        if found:
            warnings.warn(
                f"{listed(found)}: zero before the first step, so there was no norm to keep. That step was one of "
                "plain Muon, and the norm that it gave counts from now on. If it is not to be held so small, write "
                '{"params": [...], "variant": None} for these, or initialize them',
                stacklevel=level_of_the_caller(),
            )


def scale_weights(sets: Sequence[WeightSet], work: Work, traffic: Traffic, watch: ZeroWatch | None = None) -> None:
    """Run the stages of Muon variants (such as Hyperball's) that multiply each weight matrix by a factor. Call this
    function after the weight update. Collective over the ranks of each `WeightSet`.

    With `watch`, call it before the weight update. It then changes no weights, but stores weight norms that are still
    unknown, and queues a check for all-zero matrices in `watch`.

    Raises:
        ExchangeError: A rank of a set died, hung or failed. The message names the ranks and the parameters of the set.
    """
    when, damage = "before the update", ExchangeError.UNCHANGED
    if watch is None:
        when, damage = "after the update", ExchangeError.HALF_DONE
    for one in sets:
        where = partial("norms of weights {} ({})".format, when, one.text)
        with nullcontext() if len(one.ranks) == 1 else ExchangeError.naming(where, damage):
            squares = _summed(one.squares(work), one.ranks, traffic)
            if watch is None:
                one.finish(squares, work)
            else:
                one.begin(squares, work, watch)


def _summed(values: Tensor, ranks: Ranks, traffic: Traffic) -> Tensor:
    if len(ranks) == 1:
        return values
    group = group_for(ranks)
    sums = values.to(wire_device(values.device, ranks))
    dist.all_reduce(sums, group=group)
    traffic.norm_reductions += 1
    traffic.norms_sent += values.numel()
    return sums.to(values.device)
