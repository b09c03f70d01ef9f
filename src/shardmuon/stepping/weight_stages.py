"""Stages of variants on weights: the norm of every whole matrix in one reduction, then a factor for each.

[Note: norms of whole matrices]
    Squares are summed in fp64, by the first rank of those that keep a piece; the ranks that share a parameter add up
    their sums, and the root is rounded to fp32. Another layout adds in another order, which shows in fp64 alone: the
    sums differ by some 1e-16 of themselves, so the fp32 norm is another one only where it falls between two fp32
    numbers as closely, once in some 25 million norms. As for gradients (gradients/common_sum.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_, foreach_norm, foreach_products_
from shardmuon.comm.exchange import Traffic
from shardmuon.comm.groups import group_for, my_rank, talking_device
from shardmuon.errors import HALF_DONE, UNCHANGED, naming, ranks_text
from shardmuon.planning.layout import Fragment
from shardmuon.planning.views import Ranks
from shardmuon.ranks.exchange import reduce_
from shardmuon.stepping.binding import Binding
from shardmuon.stepping.work import ParamWork
from shardmuon.stepping.zero_weights import ZeroWatch
from shardmuon.variants import Stages, WeightStage, keeping

_PART = 1 << 17  # elements
_LISTS = "stages on weights"


class _Param(NamedTuple):
    """A parameter with a stage on weights.

    Attributes:
        place: Among the plan's parameters.
        counted: Per matrix: the fragments whose squares this rank adds.
        held: Per matrix: those that it stores.
        kept: Number of what the stage keeps, among all that is kept of the parameter.
        stored: Per matrix: where that lies in this rank's storage of it; None if not here.
    """

    place: int
    stage: WeightStage
    counted: tuple[tuple[Fragment, ...], ...]
    held: tuple[tuple[Fragment, ...], ...]
    kept: int
    stored: tuple[Fragment | None, ...]


@dataclass(slots=True)
class WeightLists:
    """What is looked up once for all steps of a plan in which the same parameters have gradients and the same stages.

    Attributes:
        wanted: Those with stages: place, stages, device.
        groups: The ranks that share parameters -> those with stages on weights.
        alike: The ranks -> numbers of those parameters among them whose stage runs once for all.
    """

    wanted: list[tuple[int, Stages, torch.device]] = field(default_factory=list)
    groups: dict[Ranks, list[_Param]] = field(default_factory=dict)
    alike: dict[Ranks, list[list[int]]] = field(default_factory=dict)


def _lists(binding: Binding, wanted: list[tuple[int, Stages, torch.device]]) -> WeightLists:
    rank = my_rank()
    shared = {index: ranks for ranks, members in binding.members.items() for index in members}
    groups: dict[Ranks, list[_Param]] = {}
    alike: dict[Ranks, dict[object, list[int]]] = {}
    for index, stages, device in sorted(wanted, key=lambda one: one[0]):
        stage = next((s for s in stages if isinstance(s, WeightStage)), None)
        if stage is not None:
            ranks = shared.get(index, (rank,))
            params = groups.setdefault(ranks, [])
            params.append(_param(binding, index, stage, stages, rank))
            alike.setdefault(ranks, {}).setdefault((stage, device), []).append(len(params) - 1)
    order = sorted(sorted(groups), key=len)
    return WeightLists(wanted, {r: groups[r] for r in order}, {r: list(alike[r].values()) for r in order})


class WeightStages:
    """The stages on weights of a plan's parameters, on this rank.

    Args:
        binding: The plan.
        lists: What it says of them.
        work: Of the step under way: the parameters that have gradients. The same on all ranks that share them.
        traffic: Counts reductions.
        watch: Is told of matrices of zeros.
    """

    def __init__(
        self, binding: Binding, lists: WeightLists, work: Mapping[int, ParamWork], traffic: Traffic, watch: ZeroWatch
    ) -> None:
        self._binding, self._lists, self._work, self._traffic, self._watch = binding, lists, work, traffic, watch

    def start(self) -> None:
        """Before the update: norms of weights whose stages do not know them yet, as far as these have just been made or
        loaded. Collective, if any have, which all ranks that share them have agreed on.

        Raises:
            ExchangeError: A rank that shares them died, hung or failed.
        """
        if not any(of.fresh for of in self._work.values()):
            return
        for ranks, params in self._lists.groups.items():
            new = [param for param in params if param.stage.key in self._work[param.place].fresh]
            with self._named(ranks, new, "before the update", UNCHANGED):
                for param, norm in zip(new, self._norms(ranks, new), strict=True):
                    kept = self._read([param], norm.device)
                    unknown = kept[:, 0] == 0
                    self._write([param], torch.where(kept == 0, norm.float().unsqueeze(1), kept))
                    if my_rank() == ranks[0]:  # one of them says so
                        spec = self._binding.plan.specs[param.place]
                        self._watch.add(spec.name, param.stage, unknown.logical_and_(norm == 0))

    def finish(self) -> None:
        """After the update: multiply weights with their factors. Collective.

        Raises:
            ExchangeError: A rank that shares them died, hung or failed.
        """
        for ranks, params in self._lists.groups.items():
            with self._named(ranks, params, "after the update", HALF_DONE):
                norms = self._norms(ranks, params)
                for places in self._lists.alike[ranks]:  # a stage runs on all matrices that have it at once
                    self._finish([params[at] for at in places], [norms[at] for at in places])

    def _finish(self, params: Sequence[_Param], norms: Sequence[Tensor]) -> None:  # (matrices,) each, fp64
        """Of parameters with the same stage."""
        norm = torch.cat(list(norms)) if len(norms) > 1 else norms[0]
        kept = self._read(params, norm.device)
        factor = params[0].stage.factor(norm, kept)
        self._write(params, kept)
        self._scale_(params, factor)

    def _named(self, ranks: Ranks, params: Sequence[_Param], when: str, damage: str) -> AbstractContextManager[None]:
        """What is raised inside, as an ExchangeError. Alone it passes as it is: nobody else is left behind."""
        if len(ranks) == 1:
            return nullcontext()
        names = [self._binding.plan.specs[param.place].name for param in params[:3]]
        more = [f"{len(params) - 3} more"] if len(params) > 3 else []
        return naming(lambda: f"norms of weights {when} (ranks {ranks_text(ranks)}: {', '.join(names + more)})", damage)

    def _norms(self, ranks: Ranks, params: Sequence[_Param]) -> list[Tensor]:  # (matrices of a parameter,) each, fp64
        """Of each parameter's matrices, rounded to fp32. One reduction."""
        if not params:
            return []
        flat = self._squares(params)
        if len(ranks) > 1:
            group = group_for(ranks)
            flat = reduce_(flat.to(talking_device(flat.device, group)), "sum", group).to(flat.device)
            self._traffic.norm_reductions += 1
            self._traffic.norms_sent += flat.numel()
        norms = torch.sqrt(flat, out=torch.empty_like(flat, dtype=torch.float32))  # in fp64, rounded as it is written
        return list(norms.double().split([len(param.counted) for param in params]))

    def _squares(self, params: Sequence[_Param]) -> Tensor:  # (matrices of all of them,), fp64
        views = [
            [fragment.select_local(self._work[param.place].weight) for fragment in fragments]
            for param in params
            for fragments in param.counted
        ]
        norms = _norms_of([view for of_matrix in views for view in of_matrix])
        if all(len(of_matrix) == 1 for of_matrix in views):
            return torch.stack(list(norms)).square_()
        found = iter(norms)
        by_matrix = [[next(found) for _ in of_matrix] for of_matrix in views]
        # the first fragment of each matrix, then the second ...
        zero = torch.zeros((), dtype=torch.float64, device=self._work[params[0].place].weight.device)
        columns = list(itertools.zip_longest(*by_matrix, fillvalue=zero)) or [(zero,) * len(views)]
        total = torch.stack(columns[0]).square_()
        for column in columns[1:]:
            total = total + torch.stack(column).square_()
        return total

    def _stored(self, params: Sequence[_Param]) -> list[Tensor | None]:  # (1,) of each matrix, views
        """Where what is kept of matrices lies; None if not here."""
        found: list[Tensor | None] = []
        for param in params:
            storage = self._work[param.place].kept[param.kept]
            found += [None if f is None else f.select_local(storage).view(-1) for f in param.stored]
        return found

    def _read(self, params: Sequence[_Param], device: torch.device) -> Tensor:  # (matrices, 1), fp32
        rows = self._stored(params)
        here = [row for row in rows if row is not None]
        if len(here) < len(rows):
            missing = torch.zeros(1, dtype=torch.float32, device=here[0].device if here else device)
            here = [missing if row is None else row for row in rows]
        return torch.stack(here).to(device)

    def _write(self, params: Sequence[_Param], values: Tensor) -> None:  # (matrices of all, 1)
        pairs = zip(self._stored(params), values.unbind(0), strict=True)
        here = [(target, row) for target, row in pairs if target is not None]
        if here:
            foreach_copy_([target for target, _ in here], [row for _, row in here])

    def _scale_(self, params: Sequence[_Param], factor: Tensor) -> None:  # (matrices of all of them,), fp64
        held = [(self._work[param.place].weight, fragments) for param in params for fragments in param.held]
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        # CPUs multiply half precision by a 0-dim fp32 number in fp32; elsewhere the factor has a dim, else it would be
        # rounded to the weight's dtype first.
        factor = factor if factor.device.type == "cpu" else factor.unsqueeze(-1)
        numbers: dict[bool, Sequence[Tensor]] = {}
        for at, (weight, fragments) in enumerate(held):
            views, factors = by_dtype.setdefault(weight.dtype, ([], []))
            wide = weight.dtype == torch.float64
            if wide not in numbers:
                numbers[wide] = (factor if wide else factor.float()).unbind(0)
            for fragment in fragments:
                views.append(fragment.select_local(weight))
                factors.append(numbers[wide][at])
        for views, factors in by_dtype.values():
            if views:
                foreach_products_(views, factors)


def _norms_of(views: Sequence[Tensor]) -> Sequence[Tensor]:  # 0-dim each, fp64
    """Frobenius norms. A CPU sums in fp64 what it has copied to fp64: in parts that stay in its cache."""
    if not views:
        return ()
    if views[0].device.type != "cpu":
        return foreach_norm(views, 2)
    parts = [view.split(max(1, _PART * len(view) // view.numel())) for view in views]
    norms = foreach_norm([part for of_view in parts for part in of_view], 2)
    if len(norms) == len(views):
        return norms
    return foreach_norm(torch.stack(norms).split([len(of_view) for of_view in parts]), 2)


def _param(binding: Binding, index: int, stage: WeightStage, stages: Stages, rank: int) -> _Param:
    spec = binding.plan.specs[index]
    held = tuple(by_rank.get(rank, ()) for by_rank in spec.layout.fragments)
    counted = tuple(tuple(f for f in of_matrix if spec.layout.first_keeper(f) == rank) for of_matrix in held)
    kept = [one.key for one in keeping(stages)].index(stage.key)
    stored = tuple(next(iter(by_rank.get(rank, ())), None) for by_rank in spec.kept[kept].layout.fragments)
    return _Param(index, stage, counted, held, kept, stored)


def stages_on_weights(
    binding: Binding, work: Mapping[int, ParamWork], traffic: Traffic, watch: ZeroWatch
) -> WeightStages | None:
    """None where no parameter of this step has any."""
    wanted = [(index, of.settings.stages, of.weight.device) for index, of in work.items() if of.settings.stages]
    if not wanted:  # a step of plain Muon
        return None
    lists = binding.looked_up.get(_LISTS)
    if lists is None or lists.wanted != wanted:
        lists = binding.looked_up[_LISTS] = _lists(binding, wanted)
    return WeightStages(binding, lists, work, traffic, watch) if lists.groups else None


__all__ = ["WeightLists", "WeightStages", "stages_on_weights"]
