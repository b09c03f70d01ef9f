"""Plan a job without its ranks: routing, layouts, plans and counts of a model on a mesh."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardmuon.errors import ranks_text
from shardmuon.foresight.counting import RankClass, Stored, count_plan
from shardmuon.foresight.layouts import Mesh, Placed, Unit, make_units, parse_mesh
from shardmuon.foresight.models import Model, Param, load_model, parameters_of
from shardmuon.layout.table import ParamLayout, kept_layout
from shardmuon.layout.views import Ints, MatrixView, kept_view, matrix_view
from shardmuon.muon import Muon
from shardmuon.options import CONFIG_OPTIONS, MuonConfig
from shardmuon.plan.items import Policy, Spec
from shardmuon.plan.plan import Plan, make_plan
from shardmuon.price.machines import DEFAULT, MACHINES, Machine
from shardmuon.step.binding import check_blocks, make_spec
from shardmuon.step.options import OptionsReader
from shardmuon.variants import Stage


@dataclass(frozen=True)
class Exact:
    """Exact counts of one model on one mesh.

    Attributes:
        model: Name of the model, as the user gave it.
        source: Origin of the model's shapes (an address, a file, a function).
        muon_params, adamw_params: Trainable elements that Muon and AdamW update; tied parameters count once.
        mesh: Arrangement of ranks.
        classes: Classes of ranks that store and do the same, in the order of their lowest ranks.
        digests: "index of the plan: ranks" for each group of ranks that exchange anything -> hex digest of the group's
            part of the plan, equal to the one in `Plan.digests` of the live job.
        options: Other inputs of the plan, as text by name: device, dtype of weights, changed options.
        tokens_flops: Floating point operations of forward and backward per token, 6 x active parameters; 0: unknown.
    """

    model: str
    source: str
    muon_params: int
    adamw_params: int
    mesh: Mesh
    classes: tuple[RankClass, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    tokens_flops: int = 0

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.mesh.world

    @property
    def largest(self) -> RankClass:
        """Class of the ranks that need the most memory in a step."""
        return max(self.classes, key=lambda c: c.stored.total + c.peak)


def count(
    model: str | nn.Module,
    mesh: str | Mesh,
    *,
    engine: str | None = None,
    gpus_per_node: int | None = None,
    device: str = "cuda",
    weights: torch.dtype = torch.float32,
    machine: Machine | None = None,
    active_params: float | None = None,
    **options: Any,
) -> Exact:
    """Plan a job without its ranks, and count what each rank stores, sends and computes.

    Routing, layouts and the plan are made by the live job's own code, so `Exact.digests` equal the digests of a live
    job with the same options.

    Args:
        model: See `models.load_model`.
        mesh, engine: See `layouts.parse_mesh`.
        gpus_per_node: Ranks of a node.
        device: Type of torch device: "cuda" or "cpu".
        weights: dtype of the model's parameters, and of their gradients, as with `fully_shard` and DDP.
        machine: Machine by whose rates buckets are chosen. Default: the one that a live job on such a device uses.
        active_params: Number of parameters used per token. Default: all but embeddings; for a model with experts, the
            preset's number, or unknown if the model is not a preset.
        **options: Options of `Muon`, such as ``method``, ``ns_steps`` or ``overrides``.

    Raises:
        ValueError: The model has no shapes, or the mesh does not fit it; the message says what to write.
    """
    if active_params is not None and (isinstance(active_params, (bool, str)) or not 1 <= active_params < math.inf):
        raise ValueError(f"active_params={active_params!r} must be a number of parameters of at least 1, such as 3e9")
    found, arranged = load_model(model), parse_mesh(mesh, engine, gpus_per_node)
    if active_params is not None:
        found = replace(found, active=round(active_params))
    job = _Planned(found, arranged, device, weights, options)
    return job.exact(machine or MACHINES["cpu-gloo" if device == "cpu" else DEFAULT])


class _Planned:
    """Model on a mesh, with the options of its optimizer."""

    def __init__(self, model: Model, mesh: Mesh, device: str, weights: torch.dtype, options: Mapping[str, Any]) -> None:
        self._model, self._mesh, self._device, self._weights = model, mesh, device, weights
        self._config = MuonConfig(**{key: options[key] for key in CONFIG_OPTIONS if key in options})
        if mesh.engine == "zero" and self._config.stored():
            raise ValueError(
                f"engine zero keeps fp32 momentum and weights itself, and refuses {self._config.stored()}. Leave that "
                "out (--momentum of the command)"
            )
        with warnings.catch_warnings():  # the live job will show routing's warnings
            warnings.simplefilter("ignore")
            self._groups = Muon(model.module, **{"lr": 0.02, **options}).param_groups
        self._options = OptionsReader().read(self._groups)
        self._chooser = self._config.chooser()
        self._views: dict[tuple[int, Ints], MatrixView] = {}
        self._specs: dict[tuple[int, ParamLayout], Spec] = {}  # by group and layout

    def exact(self, machine: Machine) -> Exact:
        """Counts of the job, planned with the rates of `machine`."""
        model, mesh = self._model, self._mesh
        params = parameters_of(self._groups, model.module)
        policy = Policy(self._config.bucket_bytes, machine)
        units = make_units(params, mesh, self._view_of)
        plans = [make_plan([self._spec_of(one) for one in unit.placed if one.param.use_muon], policy) for unit in units]
        shares: dict[int, list[RankClass]] = {}
        for unit, plan in zip(units, plans, strict=True):
            for rank, share in zip(unit.ranks, self._shares(unit, plan), strict=True):
                shares.setdefault(rank, []).append(share)
        muon, adamw = (sum(p.numel for p in params if p.use_muon == kind) for kind in (True, False))
        return Exact(
            model.name,
            model.source,
            muon,
            adamw,
            mesh,
            _classes_of(shares),
            {
                f"{number}: {ranks_text(ranks)}": plan.digests[ranks].hex()
                for number, plan in enumerate(plans)
                for ranks in sorted(plan.digests, key=lambda ranks: (len(ranks), ranks))
                if len(ranks) > 1
            },
            {
                "device": self._device,
                "weights": str(self._weights).removeprefix("torch."),
                **{key: str(value) for key, value in self._config.changed().items()},
            },
            6 * model.active,
        )

    def _view_of(self, param: Param) -> MatrixView:
        key, settings = (param.group, param.shape), self._options[param.group]
        if key not in self._views:
            nothing = MatrixView(param.shape, param.shape, -1, (), 1)
            self._views[key] = nothing if settings is None else matrix_view(param.shape, **settings.view)
        return self._views[key]

    def _spec_of(self, placed: Placed) -> Spec:
        param, layout, place = placed
        key, settings = (param.group, layout), self._options[param.group]
        if key not in self._specs:
            assert settings is not None, "a group of matrices"
            if self._config.momentum_dtype == "int8":
                check_blocks(param.name, layout)

            def kept_of(stage: Stage) -> ParamLayout:
                numbers = [stage.num_kept(m.rows, m.cols) for m in layout.view.matrices]
                return kept_layout(layout, kept_view(layout.view, numbers), place)

            device = torch.device(self._device)
            doubles = self._weights == torch.float64
            self._specs[key] = make_spec(param.name, layout, settings, device, self._chooser, doubles, kept_of)
        return self._specs[key]._replace(name=param.name)

    def _shares(self, unit: Unit, plan: Plan) -> Iterable[RankClass]:
        buckets = count_plan(plan, lambda rank: rank // self._mesh.gpus_per_node)
        voting = _voting(plan)
        for rank, (muon, adamw, weights, scales) in zip(unit.ranks, unit.elements().T.tolist(), strict=True):
            stored = self._stored(muon, adamw, weights, scales)
            yield RankClass((), unit.stage, stored, buckets.get(rank, ()), muon, adamw, int(rank in voting))

    def _stored(self, muon: int, adamw: int, weights: int, scales: int) -> Stored:
        """Bytes that a rank stores between steps, from its numbers of elements that Muon and AdamW update, of weights,
        and of scales of 8-bit momentum."""
        size, momentum = self._weights.itemsize, self._config.momentum_dtype
        if self._mesh.engine == "zero":
            stepped = 4 * (muon + adamw)
            return Stored(size * weights, stepped, 4 * muon, 8 * adamw, stepped)
        of_momentum = 4 * scales + muon if momentum == "int8" else muon * (momentum or self._weights).itemsize
        return Stored(size * weights, size * weights, of_momentum, 2 * size * adamw)


def _voting(plan: Plan) -> set[int]:
    return {rank for ranks in plan.digests if len(ranks) > 1 for rank in ranks}


def _classes_of(shares: Mapping[int, Sequence[RankClass]]) -> tuple[RankClass, ...]:
    """Group the ranks whose counts are equal in all their units.

    Args:
        shares: Rank -> its counts in each of its units, with an empty `ranks`.
    """
    members: dict[tuple[RankClass, ...], list[int]] = {}
    for rank in sorted(shares):
        members.setdefault(tuple(shares[rank]), []).append(rank)
    return tuple(
        RankClass(
            ranks=tuple(ranks),
            stage=units[0].stage,
            stored=Stored(*map(sum, zip(*(unit.stored for unit in units), strict=True))),
            buckets=tuple(bucket for unit in units for bucket in unit.buckets),
            muon_elements=sum(unit.muon_elements for unit in units),
            adamw_elements=sum(unit.adamw_elements for unit in units),
            votes=sum(unit.votes for unit in units),
        )
        for units, ranks in members.items()
    )


def exact_of(plan: Plan, gpus_per_node: int = 8, world: int | None = None) -> Exact:
    """Counts of a plan. AdamW's elements and the bytes stored between steps are 0, because a plan does not list them.

    Args:
        plan: Plan of a live optimizer, or one made by hand.
        gpus_per_node: Ranks of a node: rank // gpus_per_node is a rank's node.
        world: Number of ranks of the job. Default: the highest rank in the plan, plus 1.
    """
    voting = _voting(plan)
    shares = {
        rank: [RankClass((), 0, Stored(), found, sum(b.held for b in found), 0, int(rank in voting))]
        for rank, found in count_plan(plan, lambda rank: rank // gpus_per_node).items()
    }
    mesh = Mesh(dp=max(1, max(shares, default=-1) + 1 if world is None else world), gpus_per_node=gpus_per_node)
    elements = sum(item.numel for item in plan.items)
    return Exact("the plan given", "a live plan", elements, 0, mesh, _classes_of(shares))
