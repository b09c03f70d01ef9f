"""A job planned without its ranks: routing, layouts, plans and counts of a model on a mesh."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardmuon.errors import ranks_text
from shardmuon.foresight.counting import PlanCounts
from shardmuon.foresight.layouts import Unit, make_units, uneven_experts
from shardmuon.foresight.memory import peak_bytes
from shardmuon.foresight.models import Model, Param, in_megatrons_order, load_model, parameters_of
from shardmuon.foresight.types import BucketCount, Exact, MatrixKind, Mesh, RankClass, Stored, check_divides, parse_mesh
from shardmuon.layout.mesh import OnMesh
from shardmuon.layout.table import ParamLayout, kept_layout
from shardmuon.layout.views import Ints, MatrixView, kept_view, matrix_view
from shardmuon.muon import Muon
from shardmuon.options import Exchange, Orthogonalizer, Storage
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.plan.machines import DEFAULT, MACHINES, Machine
from shardmuon.plan.plan import Plan, Policy, Spec, make_plan
from shardmuon.step.binding import check_blocks, make_spec
from shardmuon.step.options import OptionsReader
from shardmuon.variants import Stage


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
    """Plan a job without its ranks, and count what each of them stores, sends and computes.

    Routing, layouts and the plan are the live job's own code, so `Exact.digests` are the digests of its plan, if it has
    these options.

    Args:
        model: See `models.load_model`.
        mesh, engine: See `types.parse_mesh`.
        gpus_per_node: Ranks of a node.
        device: Kind of device: "cuda" or "cpu".
        weights: dtype of the model's parameters; gradients have it too, as `fully_shard` and DDP leave them.
        machine: By whose rates buckets are chosen. Default: as a live job on such a device does. `Exchange.machine`
            comes before.
        active_params: How many parameters work on one token. Default: all but embeddings, and of experts as many as
            a token takes, if the model or its configuration says that.
        **options: Of `Muon`, such as ``exchange``, ``ns_steps`` or ``overrides``.

    Raises:
        ValueError: The model has no shapes, or the mesh does not fit it; says what to write.
    """
    if active_params is not None and (isinstance(active_params, (bool, str)) or not 1 <= active_params < math.inf):
        raise ValueError(f"active_params={active_params!r} must be a number of parameters of at least 1, such as 3e9")
    found, arranged = load_model(model), parse_mesh(mesh, engine, gpus_per_node)
    if active_params is not None:
        found = replace(found, active=(round(active_params), "as given"))
    job = _Planning(found, arranged, device, weights, options)
    _check(found, arranged, job.storage)
    return job.exact(machine or MACHINES["cpu-gloo" if device == "cpu" else DEFAULT])


def _check(model: Model, mesh: Mesh, storage: Storage) -> None:
    """Raise ValueError for what an engine cannot do with a model."""
    if mesh.tp > 1:
        for what, number in (("attention heads", model.num_heads), ("key-value heads", model.num_kv_heads)):
            check_divides(mesh, what, number, model.name)
    own_momentum = storage.momentum_dtype not in (None, torch.float32) or storage.momentum_device
    if mesh.masters and (own_momentum or storage.stochastic_rounding):
        raise ValueError(
            f"engine {mesh.engine} keeps fp32 momentum and weights itself, and refuses {storage!r}. Leave storage out "
            "(--momentum of the command)"
        )


class _Planning:
    """A model on a mesh with the options of its optimizer."""

    def __init__(self, model: Model, mesh: Mesh, device: str, weights: torch.dtype, options: Mapping[str, Any]) -> None:
        given = {
            "lr": 0.02,
            "orthogonalizer": Orthogonalizer(),
            "exchange": Exchange(),
            "storage": Storage(),
            **options,
        }
        self._model, self._mesh, self._device, self._weights = model, mesh, device, weights
        self._orthogonalizer: Orthogonalizer = given.pop("orthogonalizer")
        self._exchange: Exchange = given["exchange"]
        self.storage: Storage = given["storage"]
        here = replace(self._orthogonalizer, device=device)
        with warnings.catch_warnings():  # routing repeats its doubts when the job is built
            warnings.simplefilter("ignore")
            muon = Muon(model.module, orthogonalizer=here, **given)
        self._groups = muon.param_groups
        self._options = OptionsReader().read(self._groups)
        self._chooser = self._orthogonalizer.chooser()
        self._wire = self._exchange.dtype, weights == torch.float64
        self._views: dict[tuple[int, Ints], MatrixView] = {}
        self._coefficients: dict[tuple[int, int], Triples] = {}
        self._specs: dict[tuple[int, int], Spec] = {}  # by group and layout

    def exact(self, machine: Machine) -> Exact:
        """The counts of the job."""
        model, mesh = self._model, self._mesh
        params = parameters_of(self._groups, model.module)
        params = in_megatrons_order(params, self._groups) if mesh.engine == "megatron" else params
        exchange, split_k = self._exchange, self._orthogonalizer.split_k
        policy = Policy(exchange.route, exchange.bucket_bytes, exchange.machine or machine, split_k)
        units = make_units(params, mesh, self._view_of, self._spec_of)
        plans = [make_plan(unit.specs, policy) for unit in units]
        counted = [CountedUnit(*each, mesh.gpus_per_node) for each in zip(units, plans, strict=True)]
        muon, adamw = (sum(p.numel for p in params if p.use_muon == kind) for kind in (True, False))
        digests = [
            (f"{number}: {ranks_text(ranks)}", plan.digests[ranks].hex(), len(unit.copies))
            for number, (unit, plan) in enumerate(zip(units, plans, strict=True))
            for ranks in sorted(plan.digests, key=lambda ranks: (len(ranks), ranks))
            if len(ranks) > 1
        ]
        return Exact(
            model.name,
            model.source,
            muon + adamw,
            muon,
            adamw,
            mesh,
            classes_of(counted, mesh.world, self._stored, self._peak),
            kinds_of(counted),
            {key: digest for key, digest, _ in digests},
            {key: copies for key, _, copies in digests},
            {
                "device": self._device,
                "weights": str(self._weights).removeprefix("torch."),
                "orthogonalizer": repr(replace(self._orthogonalizer, device=None)),
                "exchange": repr(self._exchange),
                "storage": repr(self.storage),
            },
            6 * model.active[0],
            model.active[1],
            uneven_experts(params, mesh),
        )

    def _view_of(self, param: Param) -> MatrixView:
        key = param.group, param.shape
        if key not in self._views:
            settings = self._options[param.group]
            if settings is None:
                self._views[key] = MatrixView(param.shape, param.shape, -1, (), 1)
            else:
                flat = {"view": "auto"} if len(param.shape) == 2 else {}  # also of one of a stack
                self._views[key] = matrix_view(param.shape, **{**settings.view, **flat})
        return self._views[key]

    def _spec_of(self, param: Param, layout: ParamLayout, place: OnMesh | None) -> Spec:
        key = param.group, id(layout)
        if key not in self._specs:
            settings = self._options[param.group]
            assert settings is not None, "a group of matrices"
            if self.storage.momentum_dtype == "int8":
                check_blocks(param.name, layout)

            def kept_of(stage: Stage) -> ParamLayout:
                numbers = [stage.num_kept(m.rows, m.cols) for m in layout.view.matrices]
                return kept_layout(layout, kept_view(layout.view, numbers), place)

            device = torch.device(self._device)
            made = make_spec(param.name, layout, settings, device, self._chooser, self._wire, kept_of)
            self._specs[key] = made._replace(slicings=()) if self.storage.momentum_dtype == "int8" else made
            shapes = ((m.rows, m.cols) for m in layout.view.matrices)
            self._coefficients.update(dict.fromkeys(shapes, settings.coefficients))
        return self._specs[key]._replace(name=param.name)

    def _stored(self, unit: Unit, at: int) -> Stored:
        """Bytes that a rank keeps of a unit."""
        muon, adamw, kept = int(unit.muon[at]), int(unit.adamw[at]), int(unit.stored[at])
        size, engine, momentum = self._weights.itemsize, self._mesh.engine, self.storage.momentum_dtype
        stepped = muon + adamw
        if self._mesh.masters:
            masters = 4 * stepped if engine != "megatron" or self._weights != torch.float32 else 0
            gradients = 4 * kept if engine == "megatron" else 4 * stepped + size * (kept if engine == "zero1" else 0)
            return Stored(size * kept, gradients, 4 * muon, 8 * adamw, masters)
        of_momentum = 4 * int(unit.scales[at]) + muon  # int8
        if momentum != "int8":
            of_momentum = muon * (momentum or self._weights).itemsize
        return Stored(size * kept, size * kept, of_momentum, 2 * size * adamw, 0)

    def _peak(self, buckets: Sequence[BucketCount]) -> int:
        weights = torch.float32 if self._mesh.masters else self._weights
        return peak_bytes(buckets, weights=weights, device=self._device, coefficients=self._coefficients)


class CountedUnit:
    """A unit with its plan, counted once for each way in which its copies lie on nodes.

    Attributes:
        unit, plan: As given.
        of_copies: The counts of each copy.
    """

    def __init__(self, unit: Unit, plan: Plan, per_node: int) -> None:
        self.unit, self.plan = unit, plan
        ways: dict[tuple[int, ...], PlanCounts] = {}
        self.of_copies: list[PlanCounts] = []
        for copy in unit.copies:
            way = tuple(rank // per_node - copy[0] // per_node for rank in copy)
            if way not in ways:
                node_of = dict(zip(unit.ranks, way, strict=True))
                ways[way] = PlanCounts(plan, node_of.__getitem__)
            self.of_copies.append(ways[way])


def classes_of(
    counted: Sequence[CountedUnit],
    world: int,
    stored: Callable[[Unit, int], Stored],
    peak: Callable[[Sequence[BucketCount]], int],
) -> tuple[RankClass, ...]:
    """Ranks that are alike in all units that they are in.

    Args:
        counted: The units of the job.
        world: Its ranks.
        stored: Bytes that the rank at a position keeps of a unit.
        peak: Bytes that buckets take beyond that.
    """
    places: list[list[tuple[CountedUnit, PlanCounts, int]]] = [[] for _ in range(world)]
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(world)]
    for number, one in enumerate(counted):
        unit = one.unit
        numbers = list(zip(unit.muon.tolist(), unit.adamw.tolist(), unit.stored.tolist(), strict=True))
        for copy, counts in zip(unit.copies, one.of_copies, strict=True):
            kinds = dict(zip(counts.ranks, counts.class_of.tolist(), strict=True))
            for at, rank in enumerate(copy):
                places[rank].append((one, counts, at))
                rows[rank].append((number, id(counts), kinds.get(unit.ranks[at], -1), *numbers[at]))
    members: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank, row in enumerate(rows):
        if row:
            members.setdefault(tuple(row), []).append(rank)
    return tuple(_class_of(ranks, places[ranks[0]], stored, peak) for ranks in members.values())


def _class_of(
    ranks: Sequence[int],
    places: Sequence[tuple[CountedUnit, PlanCounts, int]],
    stored: Callable[[Unit, int], Stored],
    peak: Callable[[Sequence[BucketCount]], int],
) -> RankClass:
    kept, buckets = Stored(), list[BucketCount]()
    muon = adamw = votes = most = 0
    for one, counts, at in places:
        unit, rank = one.unit, one.unit.ranks[at]
        kept = kept + stored(unit, at)
        muon, adamw = muon + int(unit.muon[at]), adamw + int(unit.adamw[at])
        if rank in counts.ranks:
            votes += counts.votes[counts.ranks.index(rank)]
            of_unit = counts.buckets_of(rank)
            most = max(most, peak(of_unit))  # units are stepped one after the other
            buckets += of_unit
    exchanges = sum(bucket.exchanges for bucket in buckets)
    stage = places[0][0].unit.stage
    return RankClass(tuple(ranks), stage, kept, most, tuple(buckets), muon, adamw, exchanges, votes)


def kinds_of(counted: Sequence[CountedUnit]) -> tuple[MatrixKind, ...]:
    """The matrices of all units by kind, the dearest first."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for one in counted:
        for item in (item for item in one.plan.items if not item.part):
            key = (item.rows, item.cols, item.how, item.route, item.reason, item.cost * item.parts)
            example = found.setdefault(key, [one.plan.specs[item.param].name, 0])
            example[1] += len(one.unit.copies)
    kinds = [
        MatrixKind(name, rows, cols, how, route, reason, num, cost)
        for (rows, cols, how, route, reason, cost), (name, num) in found.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: -kind.flops))
