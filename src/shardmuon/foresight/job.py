"""A job planned without its ranks: routing, layouts, plans and counts of a model on a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shardmuon.foresight.active import given as given_active
from shardmuon.foresight.counting import Ints, PlanCounts
from shardmuon.foresight.layouts import Unit, make_units, uneven_experts
from shardmuon.foresight.memory import peak_bytes
from shardmuon.foresight.meshes import check_divides, parse_mesh
from shardmuon.foresight.models import Loader, Model, Param, in_megatrons_order, load_model, parameters_of, quiet
from shardmuon.foresight.splitting import Shares, split
from shardmuon.foresight.types import BucketCount, Exact, MatrixKind, Mesh, RankClass, Stored
from shardmuon.layout import views
from shardmuon.layout.mesh import OnMesh
from shardmuon.layout.table import ParamLayout, Ranks, kept_layout
from shardmuon.layout.views import MatrixView, kept_view, matrix_view
from shardmuon.muon import Muon
from shardmuon.options import Exchange, Orthogonalizer, Storage
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.plan.machines import DEFAULT, MACHINES, Machine
from shardmuon.plan.plan import Plan, Policy, Spec, make_plan
from shardmuon.step.options import GroupOptions, OptionsReader
from shardmuon.step.specs import WireFormat, check_blocks, make_spec
from shardmuon.variants import Stage

PeakOf = Callable[[Sequence[BucketCount]], int]


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a job that its plan or its bytes hang on.

    Attributes:
        device: Kind of device: "cuda" or "cpu".
        weights: dtype of the model's parameters; gradients have it too, as `fully_shard` and DDP leave them.
        orthogonalizer, exchange, storage: As given to `Muon`.
        machine: By whose rates buckets are chosen. None: `Exchange.machine`, or as a live job on such a device does.
    """

    device: str = "cuda"
    weights: torch.dtype = torch.float32
    orthogonalizer: Orthogonalizer = Orthogonalizer()
    exchange: Exchange = Exchange()
    storage: Storage = Storage()
    machine: Machine | None = None


def count(
    model: str | nn.Module,
    mesh: str | Mesh,
    *,
    engine: str | None = None,
    gpus_per_node: int | None = None,
    setting: Setting = Setting(),
    active_params: float | None = None,
    owners: int = 1,
    from_function: Loader | None = None,
    from_config: Loader | None = None,
    **options: Any,
) -> Exact:
    """Plan a job without its ranks, and count what each of them stores, sends and computes.

    Routing, layouts and the plan are the live job's own code, so `Exact.digests` are the digests of its plan, if it has
    these options.

    Args:
        model: See `models.load_model`.
        mesh: See `meshes.parse_mesh`.
        engine: See `meshes.parse_mesh`.
        gpus_per_node: Ranks of a node.
        setting: dtypes and the optimizer's options.
        active_params: How many parameters work on one token. Default: all but embeddings, and of experts as many as
            a token takes, if the model or its configuration says that.
        owners: Of a large matrix, at most, see splitting.py. No live job has more than one.
        from_function: Builds a model from MODULE:FUNCTION.
        from_config: Builds a model from a config.json.
        **options: Others of `Muon`, such as ``ns_steps`` or ``overrides``.

    Raises:
        ValueError: The model has no shapes, or the mesh does not fit it; says what to write.
    """
    active = None if active_params is None else given_active(active_params)
    found = load_model(model, from_function or _no_function, from_config or _no_transformers)
    found = found if active is None else replace(found, active=active)
    arranged = parse_mesh(mesh, engine, gpus_per_node)
    _check_heads(found, arranged)
    _check_storage(arranged, setting)
    if arranged.engine == "fsdp1":
        _check_flat(found, setting)
    return Job(found, arranged, setting, options, owners).exact()


def _no_function(text: str) -> nn.Module:
    raise ValueError(f"{text!r}: MODULE:FUNCTION is for the command. Give the module itself")


def _no_transformers(text: str) -> nn.Module:
    raise ImportError(text)


def _check_heads(model: Model, mesh: Mesh) -> None:
    if mesh.tp > 1:
        for what, number in (("attention heads", model.num_heads), ("key-value heads", model.num_kv_heads)):
            if number:
                check_divides(mesh, what, number, model.name)


def _check_storage(mesh: Mesh, setting: Setting) -> None:
    given = setting.storage
    alone = mesh.engine == "megatron" or mesh.engine.startswith("zero")
    if alone and (
        given.momentum_dtype not in (None, torch.float32) or given.momentum_device or given.stochastic_rounding
    ):
        raise ValueError(
            f"engine {mesh.engine} keeps fp32 momentum and weights itself, and refuses {given!r}. Leave storage out "
            "(--momentum of the command)"
        )


def _check_flat(model: Model, setting: Setting) -> None:
    """Raise ValueError for what FSDP1's flat parameters cannot be planned with: frozen parameters, which lie in them as
    well, and weights that are not fp32."""
    frozen = next((name for name, p in model.module.named_parameters() if not p.requires_grad), None)
    if frozen is not None:
        raise ValueError(f"engine fsdp1: {frozen} is not trained, and where it lies is not known. Write engine fsdp2")
    if setting.weights != torch.float32:
        raise ValueError("engine fsdp1 is planned with fp32 weights only. Leave --weights out, or write engine fsdp2")


class Job:
    """A model on a mesh, with everything that was computed of it.

    Attributes:
        params: Trainable parameters in the optimizer's order.
        units: See layouts.py.
        plans: Plan of each unit.
    """

    def __init__(self, model: Model, mesh: Mesh, setting: Setting, options: Mapping[str, Any], owners: int = 1) -> None:
        self.model, self.mesh, self.setting = model, mesh, setting
        here = replace(setting.orthogonalizer, device=setting.device)
        given = {"lr": 0.02, **options}
        self._muon: Muon = quiet(
            lambda: Muon(
                model.module,
                orthogonalizer=here,
                exchange=setting.exchange,
                storage=setting.storage,
                **given,
            )
        )
        self._options: list[GroupOptions] = OptionsReader().read(self._muon.param_groups)
        self._chooser = setting.orthogonalizer.chooser()
        self._wire = WireFormat.of(setting.orthogonalizer, setting.exchange, doubles=setting.weights == torch.float64)
        self.params: list[Param] = parameters_of(self._muon.param_groups, model.module)
        if mesh.engine == "megatron":
            self.params = in_megatrons_order(self.params, self._muon.param_groups)
        self._views: dict[tuple[int, views.Ints], MatrixView] = {}
        self._coefficients: dict[tuple[int, int], Triples] = {}
        self._specs: dict[tuple[int, int], Spec] = {}  # by group and layout
        machine = (
            setting.exchange.machine or setting.machine or MACHINES["cpu-gloo" if setting.device == "cpu" else DEFAULT]
        )
        policy = Policy(setting.exchange.route, setting.exchange.bucket_bytes, machine)
        self.units: list[Unit] = make_units(self.params, mesh, self._view_of, self._spec_of)
        self.plans: list[Plan] = [make_plan(unit.specs, policy) for unit in self.units]
        self._shares: list[Shares] = [{} for _ in self.plans]
        for at, plan in enumerate(self.plans) if owners > 1 else ():
            self.plans[at], self._shares[at] = split(plan, policy, owners)

    def _view_of(self, param: Param) -> MatrixView:
        key = param.group, param.shape
        if key not in self._views:
            options = self._options[param.group].view
            if options is None:
                self._views[key] = MatrixView(param.shape, param.shape, -1, (), 1)
            elif len(param.shape) == 2:
                self._views[key] = matrix_view(param.shape, **{**options, "view": "auto"})  # also of one of a stack
            else:
                self._views[key] = matrix_view(param.shape, **options)
        return self._views[key]

    def _spec_of(self, param: Param, layout: ParamLayout, place: OnMesh | None) -> Spec:
        key = param.group, id(layout)
        if key not in self._specs:
            options, device = self._options[param.group], torch.device(self.setting.device)
            if self.setting.storage.momentum_dtype == "int8":
                check_blocks(param.name, layout)

            def kept_of(stage: Stage) -> ParamLayout:
                numbers = [stage.num_kept(m.rows, m.cols) for m in layout.view.matrices]
                return kept_layout(layout, kept_view(layout.view, numbers), place)

            found = make_spec(param.name, layout, options, device, self._chooser, self._wire, kept_of)
            self._specs[key] = found
            assert options.settings is not None, "a group of matrices"
            shapes = ((m.rows, m.cols) for m in layout.view.matrices)
            self._coefficients.update(dict.fromkeys(shapes, options.settings.coefficients))
        return self._specs[key]._replace(name=param.name)

    def exact(self) -> Exact:
        """The counts of the job."""
        counted = [self._count(*of_unit) for of_unit in zip(self.units, self.plans, self._shares, strict=True)]
        classes = _classes(self.mesh.world, self.units, counted, self._stored, self._peak)
        digests, copies = self._digests()
        numels = [(p.numel, p.use_muon) for p in self.params]
        active, setting = self.model.active, self.setting
        return Exact(
            self.model.name,
            self.model.source,
            sum(n for n, _ in numels),
            sum(n for n, muon in numels if muon),
            sum(n for n, muon in numels if not muon),
            self.mesh,
            classes,
            self._matrices(),
            digests,
            copies,
            {
                "device": setting.device,
                "weights": str(setting.weights).removeprefix("torch."),
                "orthogonalizer": repr(replace(setting.orthogonalizer, device=None)),
                "exchange": repr(setting.exchange),
                "storage": repr(setting.storage),
            },
            6 * active.elements,
            active.source,
            uneven_experts(self.params, self.mesh),
        )

    def _count(self, unit: Unit, plan: Plan, shares: Shares) -> _CountedUnit:
        """A unit's counts, once for each way in which its copies lie on nodes."""
        per_node = self.mesh.gpus_per_node
        patterns: dict[tuple[int, ...], int] = {}
        made: list[PlanCounts] = []
        which = []
        for copy in unit.copies:
            first = copy[0] // per_node
            pattern = tuple(rank // per_node - first for rank in copy)
            if pattern not in patterns:
                patterns[pattern] = len(made)
                node_of = dict(zip(unit.ranks, pattern, strict=True))
                made.append(PlanCounts(plan, node_of.__getitem__, shares))
            which.append(patterns[pattern])
        return _CountedUnit(made, which)

    def _stored(self, unit: Unit, at: int) -> Stored:
        """Bytes that a rank keeps of a unit."""
        muon, adamw, kept = int(unit.muon[at]), int(unit.adamw[at]), int(unit.stored[at])
        weights, size = self.setting.weights, self.setting.weights.itemsize
        engine = self.mesh.engine
        stepped = muon + adamw
        momentum = self.setting.storage.momentum_dtype
        if engine == "megatron" or engine.startswith("zero"):
            masters = 4 * stepped if engine.startswith("zero") or weights != torch.float32 else 0
            gradients = 4 * kept if engine == "megatron" else 4 * stepped + size * (kept if engine == "zero1" else 0)
            return Stored(size * kept, gradients, 4 * muon, 8 * adamw, masters)
        of_momentum = size * muon if momentum is None else 4 * int(unit.scales[at]) + muon
        if isinstance(momentum, torch.dtype):
            of_momentum = momentum.itemsize * muon
        return Stored(size * kept, size * kept, of_momentum, 2 * size * adamw, 0)

    def _peak(self, buckets: Sequence[BucketCount]) -> int:
        """Bytes beyond what is kept, at the highest point of a step."""
        masters = self.mesh.engine == "megatron" or self.mesh.engine.startswith("zero")
        return peak_bytes(
            buckets,
            weights=torch.float32 if masters else self.setting.weights,
            device=self.setting.device,
            coefficients=self._coefficients,
        )

    def _digests(self) -> tuple[dict[str, str], dict[str, int]]:
        digests: dict[str, str] = {}
        copies: dict[str, int] = {}
        for number, (unit, plan) in enumerate(zip(self.units, self.plans, strict=True)):
            for ranks in sorted(plan.digests, key=lambda ranks: (len(ranks), ranks)):
                if len(ranks) > 1:
                    key = f"{number}: {_ranks_text(ranks)}"
                    digests[key] = plan.digests[ranks].hex()
                    copies[key] = len(unit.copies)
        return digests, copies

    def _matrices(self) -> tuple[MatrixKind, ...]:
        found: dict[tuple[Any, ...], list[Any]] = {}
        for unit, plan in zip(self.units, self.plans, strict=True):
            for item in plan.items:
                key = (item.rows, item.cols, item.how, item.route, item.reason, item.cost)
                one = found.setdefault(key, [plan.specs[item.param].name, 0])
                one[1] += len(unit.copies)
        kinds = [
            MatrixKind(name, rows, cols, how, route, reason, num, cost)
            for (rows, cols, how, route, reason, cost), (name, num) in found.items()
        ]
        return tuple(sorted(kinds, key=lambda kind: -kind.flops))


@dataclass(frozen=True, slots=True)
class _CountedUnit:
    """A unit's counts: for each way of lying on nodes, and which way each copy takes."""

    ways: list[PlanCounts]
    which: list[int]


def _ranks_text(ranks: Ranks) -> str:
    """Ranks for people and keys: runs of equal steps as first-last."""
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def _classes(
    world: int,
    units: Sequence[Unit],
    counted: Sequence[_CountedUnit],
    stored: Callable[[Unit, int], Stored],
    peak_of: PeakOf,
) -> tuple[RankClass, ...]:
    """Ranks that are alike in all units that they are in."""
    columns = []
    for unit, counts in zip(units, counted, strict=True):
        column: Ints = np.full((world, 5), -1, dtype=np.int64)
        for copy, way in zip(unit.copies, counts.which, strict=True):
            found = counts.ways[way]
            kinds = np.full(len(unit.ranks), -1, dtype=np.int64)
            if found.ranks:
                position = {rank: i for i, rank in enumerate(unit.ranks)}
                kinds[[position[rank] for rank in found.ranks]] = found.class_of
            own = np.stack([np.full(len(kinds), way), kinds, unit.muon, unit.adamw, unit.stored], 1)
            column[list(copy)] = own
        columns.append(column)
    table = np.ascontiguousarray(np.concatenate(columns, 1))
    members: dict[bytes, list[int]] = {}
    for rank, row in enumerate(table):
        members.setdefault(row.tobytes(), []).append(rank)
    return tuple(_class_of(ranks, units, counted, stored, peak_of) for ranks in members.values())


def _class_of(
    ranks: Sequence[int],
    units: Sequence[Unit],
    counted: Sequence[_CountedUnit],
    stored: Callable[[Unit, int], Stored],
    peak_of: PeakOf,
) -> RankClass:
    example, kept = ranks[0], Stored()
    buckets: list[BucketCount] = []
    muon = adamw = votes = peak = 0
    stage = None
    for unit, counts in zip(units, counted, strict=True):
        copy = next((i for i, copy in enumerate(unit.copies) if example in copy), None)
        if copy is None:
            continue
        at = unit.copies[copy].index(example)
        stage = unit.stage if stage is None else stage
        kept = kept + stored(unit, at)
        muon, adamw = muon + int(unit.muon[at]), adamw + int(unit.adamw[at])
        found = counts.ways[counts.which[copy]]
        if unit.ranks[at] in found.ranks:
            votes += found.votes[found.ranks.index(unit.ranks[at])]
            of_unit = found.buckets_of(unit.ranks[at])
            peak = max(peak, peak_of(of_unit))  # units are stepped one after the other
            buckets += of_unit
    exchanges = sum(bucket.exchanges for bucket in buckets)
    return RankClass(tuple(ranks), stage or 0, kept, peak, tuple(buckets), muon, adamw, exchanges, votes)
