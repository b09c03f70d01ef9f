"""Faults known from other optimizers, each with the job in which the fault is planted and all findings that an audit
must report.

A fault is planted on the ranks by replacing a function that the step calls or by corrupting data, and is undone
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from variant_cases import CASES

from shardmuon import Muon, audit, muon
from shardmuon.auditing import live
from shardmuon.auditing.report import AuditReport
from shardmuon.comm import vote as votes
from shardmuon.comm.vote import Ballot, Flag, Phase
from shardmuon.layout.engines import engine_of
from shardmuon.orthogonalize import ITERATIONS
from shardmuon.step import bucket, stages, update
from shardmuon.step.stages import WeightSet
from shardmuon.testing.layouts import LAYOUTS, meshes_on, parameters
from shardmuon.variants import (
    VARIANTS,
    AfterStage,
    BeforeStage,
    HyperballUpdate,
    HyperballWeight,
    MuonEq,
    Norms,
    NorMuon,
    WeightStage,
    scaled_,
)

Shapes = Mapping[str, tuple[int, int]]
SHAPES: Shapes = {"a": (24, 16), "b": (24, 16), "c": (24, 16), "d": (24, 16), "square": (16, 16), "wide": (12, 40)}
VARIED: Shapes = {"tall": (96, 32), "wide": (32, 48), "square": (40, 40)}
TABLE = "table"  # the name of the model's AdamW parameter


def shapes_of(rows: int | None) -> Shapes:
    """Return SHAPES or, if `rows` is given, similar shapes in which the four equal matrices have `rows` rows each."""
    if rows is None:
        return SHAPES
    return dict.fromkeys("abcd", (rows, 24)) | {"square": (32, 32), "wide": (12, 40)}


class Job:
    """A small model, sharded according to `layout`, and its optimizer. Each step gets new random gradients, so that
    momentum, gradient and update differ."""

    def __init__(
        self, layout: str, dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES, **options: Any
    ) -> None:
        self.case, self.dtype, self.shapes = LAYOUTS[layout], dtype, {**shapes, TABLE: (16, 12)}
        world = dist.get_world_size()
        self.mesh = self.case.mesh(world)
        full = {name: 0.05 * t for name, t in self._draw(0).items()}
        self.params = parameters(self.case.build(full, self.mesh))
        matrices = [(name, p) for name, p in self.params.items() if name != TABLE]
        groups = [{"params": matrices}, {"params": [(TABLE, self.params[TABLE])], "use_muon": False}]
        options = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"} | self.case.options(world) | options
        self.optimizer = Muon(groups, **options)

    def _draw(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
        return {name: t.to(self.dtype) for name, t in drawn.items()}

    def gradients(self, seed: int) -> None:
        for name, t in self.case.build(self._draw(seed), self.mesh).items():
            self.params[name].grad = t

    def step(self, seed: int) -> None:
        self.gradients(seed)
        self.optimizer.step()


def step_of(optimizer: Muon, samples: int = 8) -> AuditReport:
    check = audit(optimizer, samples)
    optimizer.step()
    return check.report


def names_of(report: AuditReport) -> set[str]:
    return {finding.name for finding in report.findings}


def local(tensor: Tensor) -> Tensor:
    return engine_of(tensor).storage(tensor)


# ------------------------------------------------------------------------------------------------------- how to plant

Plant = Callable[[Job], AbstractContextManager[object]]


def replaced(name: str, make: Callable[[Any], Any], on: Any = bucket, rank: int | None = None) -> Plant:
    """Return a fault that replaces the function `name`, which the step calls, with `make(original)`. The fault affects
    the rank `rank` or, by default, all ranks."""

    def plant(job: Job) -> AbstractContextManager[object]:
        original = getattr(on, name)
        return mock.patch.object(on, name, make(original) if rank is None or rank == dist.get_rank() else original)

    return plant


def now(damage: Callable[[Job], object], rank: int | None = None) -> Plant:
    """Return a fault that damages the job once before the step by calling `damage(job)`, on the rank `rank` or, by
    default, on all ranks."""

    return lambda job: nullcontext(damage(job) if rank in (None, dist.get_rank()) else None)


def _inputs(change: Callable[[Tensor], Tensor]) -> Plant:
    """Return a fault in which the step calls `change` in place of the orthogonalization function."""
    return replaced("orthogonalize", lambda original: lambda x, *a, **k: change(x))


def updates(change: Callable[[Tensor], Tensor]) -> Plant:
    """Return a fault that changes orthogonalized updates before they are applied to the weights."""
    return replaced(
        "apply_", lambda original: lambda p, u, *a, **k: original(p, [change(x) for x in u], *a, **k), update
    )


def _results(change: Callable[[Tensor], Tensor]) -> Plant:
    """Return a fault that replaces the orthogonalized matrices of each batch, of shape (B, rows, cols), with
    `change(matrices)`."""

    def make(original: Any) -> Any:
        def orthogonalize(bound: Any, work: Any, kernel: Any, batches: Tensor) -> None:
            original(bound, work, kernel, batches)
            for one in bound.program.batches:
                place = batches.as_strided(one.shape, (one.stride, one.shape[2], 1), one.start)
                place.copy_(change(place.clone()))

        return orthogonalize

    return replaced("_orthogonalize", make)


Tensors = Sequence[Tensor]


def _momentum(damage: Callable[[Tensors, Tensors, Tensors], object], rank: int | None = None) -> Plant:
    """Return a fault that calls `damage` after each momentum update. The arguments of `damage` are the inputs of the
    orthogonalization, the gradients and the momentum buffers."""

    def plant(job: Job) -> AbstractContextManager[object]:
        real = update.momentum_

        def momentum_(out: Tensors | None, grads: Tensors, buffers: Tensors, **options: Any) -> None:
            real(out, grads, buffers, **options)
            damage(out or (), grads, buffers)

        if rank not in (None, dist.get_rank()):
            return nullcontext()
        return mock.patch.object(update, "momentum_", momentum_)

    return plant


def _broken(change: Callable[[Tensor], Tensor]) -> Plant:
    """Return a fault that applies `change` to the results of all orthogonalization methods, both in the step and in the
    audit's dense reference."""

    def wrong(iteration: Any) -> Any:
        return lambda y, **given: change(iteration(y, **given))

    made = {name: wrong(iteration) for name, iteration in ITERATIONS.items()}
    return lambda job: mock.patch.dict(ITERATIONS, made)


def _fails(*args: Any) -> Any:
    raise ArithmeticError("no convergence")


def _failing_after_the_step(original: Any) -> Any:
    return lambda audit, *given: (
        _fails() if audit._optimizer.traffic.orthogonalized > audit._ran else original(audit, *given)
    )


def _rolled(original: Any) -> Any:
    """Return a replacement for `apply_`, which applies updates to weights. The replacement gives each matrix the update
    of the next matrix of the same shape, even if different ranks orthogonalized the two matrices."""

    def apply_(params: Tensors, given: Tensors, *args: Any, **options: Any) -> None:
        alike = [[j for j, other in enumerate(given) if other.shape == one.shape] for one in given]
        rolled = [given[ats[(ats.index(at) + 1) % len(ats)]] for at, ats in enumerate(alike)]
        original(params, rolled, *args, **options)

    return apply_


def _by_halves(original: Any) -> Any:
    return lambda x, *a, **k: torch.cat([original(half, *a, **k) for half in x.chunk(2, dim=-2)], dim=-2)


def _clamped(update: Tensor) -> Tensor:
    """Clamp the elements of a shard, half of the rows of an orthogonalized matrix, to 0.8 times the RMS of the full
    matrix."""
    limit = 0.8 / max(2 * update.shape[0], update.shape[1]) ** 0.5
    return update.clamp(-limit, limit)


def _other_tensor(job: Job) -> AbstractContextManager[object]:
    """Replace a parameter without notifying the optimizer, as a framework may do."""
    old = job.params["a"]
    new = nn.Parameter(old.detach().clone())
    new.grad = old.grad
    job.optimizer.param_groups[0]["params"][0] = new
    looks = muon.StepCall.is_current
    return mock.patch.object(muon.StepCall, "is_current", lambda call, kept: looks(call, kept) or True)


def _of_another_layout(job: Job) -> None:
    """Swap the pieces of a matrix between ranks in the plan, as if the plan had been made for another layout."""
    plan = job.optimizer.binding.plan  # type: ignore[union-attr]
    first, *others = plan.specs
    first = first._replace(layout=replace(first.layout, held=first.layout.held[::-1]))
    job.optimizer.binding.plan = replace(plan, specs=(first, *others))  # type: ignore[union-attr]


def _swapped_alone(job: Job) -> AbstractContextManager[object]:
    # An audit of a single matrix checks a different matrix each time, starting with matrix 0. Reset the number of
    # earlier audits to 0, so that this audit checks matrix 0.
    job.optimizer.audits.num_audits = 0
    return _results(lambda o: o.roll(-1, 0))(job)


@contextmanager
def _without_agreement(job: Job) -> Iterator[None]:
    """Remove the gradient on one rank, and hide the removal from the vote before the step."""
    if dist.get_rank() == 1:
        job.params["a"].grad = None
    agreed, real = Ballot(Phase.STEP, Flag.AUDIT), votes.vote

    def vote(ballot: Ballot, ranks: Sequence[int]) -> Ballot:
        return agreed if ballot.phase == Phase.STEP else real(ballot, tuple(ranks))

    with mock.patch.object(votes, "vote", vote), mock.patch.object(bucket.Buckets, "run"):
        yield


# ----------------------------------------------------------------------------------------------------- of variants

_MUON_EQ = MuonEq.run_


def _alone(self: AfterStage, x: Tensor, kept: Tensor) -> Tensor:
    """Apply one post-processing stage, such as NorMuon, to a copy of the matrices."""
    out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    scaled_((self,), out, {self.key: kept.unbind(0)} if self.key else {})
    return out


def _stage_by_halves(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    """Apply NorMuon to each half of the rows separately, as if the halves were shards on different ranks."""
    if x.shape[1] < 2 * x.shape[2]:
        return _alone(self, x, kept)
    halves = zip(x.chunk(2, 1), kept.chunk(2, 1), strict=True)
    return torch.cat([_alone(self, part, k) for part, k in halves], 1)


def _other_dim(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    """Make NorMuon average squares over the longer dim instead of the shorter one."""
    own = torch.zeros(len(x), min(x.shape[1:]), device=x.device)
    dim = -2 if x.shape[1] >= x.shape[2] else -1
    own.lerp_(x.float().square().mean(dim), 1 - self.beta2)
    scaled = x.float() * own.rsqrt().unsqueeze(dim)
    return scaled * (x.float().norm(dim=(1, 2), keepdim=True) / scaled.norm(dim=(1, 2), keepdim=True))


def _rows_left(self: MuonEq, x: Tensor) -> None:
    _MUON_EQ(self, x)
    x[:, 0] *= 3
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))


def _one_by_one(stages: Sequence[Any], batch: Tensor, kept: Mapping[str, Sequence[Tensor]]) -> None:
    for stage in stages:
        for at, x in enumerate(batch.split(1)):
            run = getattr(stage, "run", partial(_alone, stage))
            x.copy_(run(x, kept[stage.key][at].unsqueeze(0) if stage.key else x.new_empty(1, 0)))


def _divided_alone(self: BeforeStage, x: Tensor) -> None:
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))


def _ones(self: Any, norms: Any, kept: Tensor) -> Tensor:
    return torch.ones_like(norms if isinstance(self, WeightStage) else norms.means if self.of_lines else norms.whole)


def _running(stage: type, run: Callable[..., Tensor]) -> Plant:
    """Return a fault in which the function `run` replaces the pre- or post-processing stage `stage`. The function
    `scaled_`, which combines several stages, is replaced with a function that applies the stages one after another."""

    @contextmanager
    def plant(job: Job) -> Iterator[None]:
        with (
            mock.patch.object(stage, "run_" if issubclass(stage, BeforeStage) else "run", run, create=True),
            mock.patch.object(bucket, "scaled_", _one_by_one),
        ):
            yield

    return plant


def _norm_of_half(job: Job) -> AbstractContextManager[object]:
    """Make Hyperball use the norm of the upper half of the rows in place of the stored norm of the full matrix."""
    norms = {p.shape: p.detach()[: len(p) // 2].double().norm() for p in job.params.values()}
    real = HyperballUpdate.factor

    def factor(self: Any, of_updates: Norms, kept: Tensor) -> Tensor:
        return real(self, of_updates, torch.full_like(kept, norms[of_updates.shape[1:]]))

    return mock.patch.object(HyperballUpdate, "factor", factor)


def _factors(change: Callable[[Tensor], Tensor]) -> Plant:
    """Return a fault that applies `change` to the factors by which a post-processing stage multiplies weights."""
    return replaced(
        "foreach", lambda real: lambda name, tiles, numbers: real(name, tiles, [change(n) for n in numbers]), stages
    )


def _each_half(job: Job) -> AbstractContextManager[object]:
    """Make Hyperball restore the norm of each half of the rows separately, as if a shard used its own norm instead of
    the full matrix's."""
    before = {p.shape: [half.double().norm() for half in p.detach().split(len(p) // 2)] for p in job.params.values()}

    def products(name: str, tiles: Any, numbers: Any) -> None:
        # This fault is planted only in single-process jobs, where each tile in `tiles` is a full matrix.
        for weight in tiles:
            for half, norm in zip(weight.split(len(weight) // 2), before[weight.shape], strict=True):
                half.mul_((norm / half.double().norm()).float())

    return mock.patch.object(stages, "foreach", products)


def _wrong_rule(self: HyperballWeight, norm: Tensor, kept: Tensor) -> Tensor:
    """Make Hyperball undo only half of the change in a weight's norm."""
    target = kept[:, 0].double().lerp(norm, 0.5)
    kept[:, 0] = target.float()
    return target / norm


def _kept(job: Job, key: str) -> list[Tensor]:
    return [local(state[key]) for state in job.optimizer.state.values() if key in state]


# --------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Fault:
    """A fault, the job in which it is planted, and the findings that the audit must report."""

    plant: Plant
    names: set[str]
    where: set[str] | None = None  # names of the parameters that the audit must report, or None to allow any names
    layout: str = "fsdp2"
    says: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    # Findings that an audit may report in addition to `names`, for example because they depend on which rank
    # orthogonalizes a matrix.
    also: set[str] = field(default_factory=set)
    # If True, the audit finds the fault only in bitwise comparisons, or only with the matmul dtype in `options`, so no
    # other matmul dtype is tested.
    exact: bool = False
    samples: int = 8
    dtype: torch.dtype = torch.float32
    shapes: Shapes | None = None


_LENGTH = ("wrong_matrix",)  # optional finding for faults that give the rows of an update wrong norms


def _of_variant(variant: str, plant: Plant, name: str, also: Sequence[str] = (), **more: Any) -> Fault:
    options = {"variant": variant, "lr": 0.1, "weight_decay": 0.0, **more.pop("options", {})}
    more = {"layout": "single", "shapes": VARIED, **more}
    return Fault(plant, {name}, options=options, also=set(also), **more)


def _left_out(variant: str) -> Fault:
    """Return a fault in which the first pre- or post-processing stage of a variant does nothing."""
    stage, names = VARIANTS[variant][0], CASES[variant].left_out
    how = ("run_", _divided_alone) if isinstance(stage, BeforeStage) else ("factor", _ones)
    also = _LENGTH if "kept_wrong" in names else ()
    return replace(_of_variant(variant, lambda job: mock.patch.object(type(stage), *how), "", also), names=names)


PRODUCTS: dict[str, dict[str, Any]] = {
    "fp32": {"ns_dtype": torch.float32},
    "bf16": {"ns_dtype": torch.bfloat16},
    "fp16": {"method": "standard", "ns_dtype": torch.float16},
    "fp16 gram": {"method": "gram", "ns_dtype": torch.float16},
    # With method="torch" and without a variant, torch itself would update the weights, and no fault could be planted in
    # the update. The variant "cautious" prevents this.
    "torch": {"method": "torch", "variant": "cautious"},
}

ALL, FOUR = set(SHAPES), {"a", "b", "c", "d"}
FAULTS = {
    "plain SGD on the momentum": Fault(_inputs(lambda x: x), {"not_orthogonalized"}, ALL, says="plain SGD"),
    "normalized momentum": Fault(
        _inputs(lambda x: x / x.norm(dim=(-2, -1), keepdim=True)), {"not_orthogonalized"}, ALL, says="plain SGD"
    ),
    "sign of the momentum": Fault(_inputs(torch.sign), {"not_orthogonalized"}, ALL, says="sign of the momentum"),
    "half a matrix": Fault(replaced("orthogonalize", _by_halves), {"orthogonalized_by_shard"}, ALL),
    "clipped after, by norm": Fault(updates(lambda u: u * 0.36), {"clipped_update"}, ALL, says="0.36 of its length"),
    "clipped after, by value": Fault(updates(_clamped), {"clipped_update"}, ALL, says="elements are clamped at"),
    "scale of the shard": Fault(
        replaced("lr_scale", lambda original: lambda name, rows, cols: original(name, rows // 2, cols), update),
        {"scale_from_shard_shape"},
        # The fault computes the learning-rate scale from the shape of a row shard instead of the full matrix. The scale
        # depends on the larger dim, which row sharding reduces only for the matrices "a" to "d".
        FOUR,
        says=" shard, not ",
    ),
    "scaled twice": Fault(
        replaced("lr_scale", lambda original: lambda *a: 2 * original(*a), update),
        {"scale_wrong"},
        ALL,
        says="2 times",
    ),
    "results of matrices swapped": Fault(
        _results(lambda o: o.roll(-1, 0)), {"results_swapped"}, FOUR, says="it is the update of"
    ),
    "updates swapped": Fault(
        replaced("apply_", _rolled, update), {"results_swapped"}, FOUR, says="it is the update of"
    ),
    "results swapped, the other not sampled": Fault(_swapped_alone, {"wrong_matrix"}, {"a"}, samples=1, exact=True),
    "transposed": Fault(_results(lambda o: o.mT if o.shape[-1] == o.shape[-2] else o), {"transposed"}, {"square"}),
    "fragments swapped": Fault(
        _results(lambda o: o.roll(o.shape[1] // 2, 1)), {"fragments_swapped"}, ALL, says="block 0 of its 2"
    ),
    "momentum ignored": Fault(
        _momentum(lambda fed, grads, _: [f.copy_(g) for f, g in zip(fed, grads, strict=False)]),
        {"wrong_input"},
        ALL,
        says="the gradient alone",
    ),
    "momentum wrong on one rank": Fault(
        _momentum(lambda fed, grads, buffers: [b[..., 0].add_(1.0) for b in buffers], rank=1),
        {"momentum_wrong"},
        ALL,
        exact=True,
    ),
    "momentum normalized in place": Fault(
        _momentum(lambda fed, grads, buffers: [b.div_(b.norm()) for b in buffers]),
        {"momentum_wrong"},
        ALL,
        layout="ddp",
        exact=True,
    ),
    "gradient written": Fault(
        _momentum(lambda fed, grads, buffers: [g.mul_(0.5) for g in grads]),
        {"gradient_written"},
        ALL,
        exact=True,
    ),
    "gradient on only some holders": Fault(
        _without_agreement, {"gradient_missing"}, also={"frozen", "momentum_wrong", "orthogonalized_count"}, exact=True
    ),
    "weights never written": Fault(
        replaced("apply_", lambda original: lambda *a, **k: None, update), {"frozen"}, ALL, exact=True
    ),
    "stale plan": Fault(_other_tensor, {"stale_plan", "frozen", "momentum_wrong"}, {"a"}, exact=True),
    "plan for another layout": Fault(
        now(_of_another_layout),
        {"stale_plan"},
        {"a"},
        says="or its matrices lie on other ranks than planned",
        exact=True,
    ),
    "run twice": Fault(
        replaced("run", lambda original: lambda *a: (original(*a), original(*a))[0], on=bucket.Buckets),
        {"orthogonalized_count", "momentum_wrong"},
        {*ALL, "rank 0", "rank 1"},
        says="6 matrices went through the orthogonalizer in the step. Allowed: 3",
        # The fault runs the whole update twice. The direction of the second update determines whether an audit also
        # reports "update_differs" or "scale_wrong", so both are allowed.
        also={"update_differs", "scale_wrong"},
    ),
    "weights of one replica": Fault(
        now(lambda job: job.params["b"].data.add_(1e-3), rank=1),
        {"replica_drift"},
        {"b"},
        "ddp",
        "the weights",
        exact=True,
    ),
    "weights of one replica, sharded": Fault(
        now(lambda job: local(job.params["b"]).add_(1e-3), rank=1),
        {"replica_drift"},
        {"b"},
        "hsdp",
        "the weights",
        exact=True,
    ),
    "momentum of one replica": Fault(
        now(lambda job: _kept(job, "momentum_buffer")[-1][0, 0].add_(1.0), rank=1),
        {"replica_drift"},
        {"wide"},
        "ddp",
        "the momentum on rank(s) 1",
        # The momentum is wrong on rank 1 only. The audit uses the momentum of rank 0 for all replicas, so the update
        # looks wrong if rank 1 orthogonalizes the matrix.
        also={"wrong_matrix", "update_differs"},
        exact=True,
    ),
    "gradient of one replica": Fault(
        now(lambda job: job.params["a"].grad.mul_(2.0), rank=1),  # type: ignore[union-attr]
        {"gradient_replicas_differ", "replica_drift"},
        {"a"},
        "ddp",
        "the gradient on rank(s) 1",
        also={"wrong_matrix", "update_differs"},
        exact=True,
    ),
    "not finite": Fault(
        now(lambda job: job.params["a"].grad.fill_(float("nan"))),  # type: ignore[union-attr]
        {"not_finite"},
        {"a"},
        exact=True,
    ),
    "weights too coarse": Fault(
        now(lambda job: job.optimizer.param_groups[0].update(lr=1e-6)),
        {"update_lost_to_rounding"},
        options={"method": "torch", "weight_decay": 0.0},
        dtype=torch.bfloat16,
        exact=True,
    ),
    "orthogonalizer at 0.7 of its length": Fault(_broken(lambda y: 0.7 * y), {"orthogonalizer_wrong"}),
    "orthogonalizer mirrored": Fault(_broken(lambda y: y.flip(-1)), {"orthogonalizer_wrong"}),
    "orthogonalizer of norm 1": Fault(
        _broken(lambda y: y / y.norm(dim=(-2, -1), keepdim=True)), {"orthogonalizer_wrong"}
    ),
    "a check fails on one rank": Fault(
        replaced("judge", lambda original: _fails, live, rank=1),
        {"audit_failed"},
        {"rank 1"},
        says="no convergence",
        exact=True,
    ),
    # If the audit cannot read tensors on a rank, this rank still sends as many elements as the other ranks expect, so
    # that they do not wait forever.
    "reading fails on one rank": Fault(
        replaced("_elements", _failing_after_the_step, live.StepAudit, rank=1),
        {"audit_failed", "not_finite"},
        {*ALL, "rank 1"},
        says="no convergence",
        exact=True,
    ),
    "NorMuon: no stage": _left_out("normuon"),
    "NorMuon: by halves": _of_variant(
        "normuon", _running(NorMuon, _stage_by_halves), "wrong_matrix", exact=True, options=PRODUCTS["fp32"]
    ),
    "NorMuon: the other dim": _of_variant("normuon", _running(NorMuon, _other_dim), "kept_wrong", _LENGTH),
    "NorMuon: norm not restored": _of_variant(
        "normuon", _running(NorMuon, lambda *given: _alone(*given) * 1.25), "scale_wrong"
    ),
    "NorMuon: nothing kept": _of_variant(
        "normuon", _running(NorMuon, lambda self, x, kept: _alone(self, x, kept.clone())), "kept_wrong"
    ),
    "NorMuon: average off": _of_variant(
        "normuon", _running(NorMuon, lambda self, x, kept: _alone(self, x, kept.mul_(1.5))), "kept_wrong", _LENGTH
    ),
    "NorMuon: its state of one replica": Fault(
        now(lambda job: [v.mul_(1.25) for v in _kept(job, "second_moment")], rank=1),
        # NorMuon's state is wrong on rank 1 only, so the audit reports only matrices that rank 1 orthogonalizes. For
        # other matrices, the audit gets the correct state from another rank.
        {"kept_wrong"},
        # With fp32 matmuls, the error that wrong NorMuon state causes in the update also exceeds the tolerance, so the
        # audit reports "wrong_matrix", too.
        also={"wrong_matrix"},
        layout="ddp",
        options={"variant": "muon_eq+normuon"},
        exact=True,
    ),
    "MuonEq: a row left out": _of_variant("muon_eq", _running(MuonEq, _rows_left), "variant_wrong"),
    "Hyperball: O not on the sphere": _left_out("hyperball"),
    "Hyperball: R of a part": _of_variant("hyperball", _norm_of_half, "norm_of_shard"),
    "Hyperball: update too long": _of_variant(
        "hyperball", replaced("factor", lambda real: lambda *given: real(*given) * 1.25, HyperballUpdate), "scale_wrong"
    ),
    "Hyperball: weights not restored": _of_variant(
        "hyperball", _factors(torch.ones_like), "norm_wrong", says="its stages on weights did not run"
    ),
    "Hyperball: other factor": _of_variant("hyperball", _factors(lambda total: total * 1.01), "norm_wrong"),
    "Hyperball: other factor, bf16 weights": _of_variant(
        "hyperball", _factors(lambda total: total * 0.97), "norm_wrong", dtype=torch.bfloat16
    ),
    "Hyperball: norms of halves": _of_variant(
        "hyperball", _each_half, "norm_of_shard", exact=True, options=PRODUCTS["fp32"]
    ),
    "Hyperball: norms of shards": _of_variant(
        "hyperball",
        replaced("_summed", lambda real: lambda values, ranks, traffic: values, stages),
        "norm_of_shard",
        layout="fsdp2",
    ),
    "Hyperball: weights loaded": _of_variant(
        "hyperball", now(lambda job: [p.data.mul_(1.5) for p in job.params.values()]), "norm_stale"
    ),
    "Hyperball: stale R": _of_variant(
        "hyperball",
        now(lambda job: [r.mul_(0.8) for r in _kept(job, "weight_radius")]),
        "norm_stale",
        says="del optimizer.state[param]",
    ),
    "Hyperball: R not kept": _of_variant(
        "hyperball",
        replaced("_write", lambda real: lambda self, work, values: real(self, work, values * 1.25), WeightSet),
        "kept_wrong",
    ),
    "Hyperball: other rule": _of_variant(
        "hyperball", replaced("factor", lambda real: _wrong_rule, HyperballWeight), "norm_wrong", ["kept_wrong"]
    ),
    **{f"{name}: left out": _left_out(name) for name in CASES if name not in ("normuon", "hyperball")},
}


_SOUND: set[str] = set()  # combinations of model and options for which a correct second step has already been audited


def caught(name: str, rows: int | None, first: bool, **options: Any) -> AuditReport:
    """Plant a fault in the first step (if `first` is True) or in the third step. Return the audit report of this step.

    If `first` is False, also assert that an audit of the correct second step finds nothing. This is done only once for
    all faults with the same model and options.
    """
    fault = FAULTS[name]
    options = options | fault.options
    job = Job(fault.layout, fault.dtype, fault.shapes or shapes_of(rows), **options)
    key = repr((fault.layout, fault.dtype, job.params[TABLE].device.type, job.shapes, sorted(options.items(), key=str)))
    for seed in () if first else (1, 2):
        job.gradients(seed)
        if seed == 2 and key not in _SOUND:
            assert names_of(step_of(job.optimizer)) == set(), "a sound step was blamed"
            _SOUND.add(key)
        else:
            job.optimizer.step()
    job.gradients(3)
    with fault.plant(job):
        return step_of(job.optimizer, fault.samples)


def caught_all(
    rows: int | None,
    options: dict[str, Any],
    names: Sequence[str] = tuple(FAULTS),
    device: str = "cpu",
    first: bool = False,
) -> dict[str, AuditReport]:
    # With the layout "single", ranks do not communicate, so only rank 0 plants the fault.
    with meshes_on(device):
        return {
            name: caught(name, rows, first, **options)
            for name in names
            if FAULTS[name].layout != "single" or dist.get_rank() == 0
        }


def check_caught(name: str, found: Sequence[Mapping[str, AuditReport]]) -> None:
    fault = FAULTS[name]
    reports = [of_rank[name] for of_rank in (found[:1] if fault.layout == "single" else found)]
    for report in reports:
        assert report == reports[0], "ranks disagree"
        names, where = names_of(report), {finding.where for finding in report.findings}
        assert names and fault.names <= names <= fault.names | fault.also, f"{name}: {names}"
        # In the fault "results of matrices swapped", a rank that orthogonalizes only one of the four equal matrices has
        # no results to swap, so the audit need not report all four matrices.
        if name == "results of matrices swapped":
            assert len(where) >= 2 and where <= FOUR
        elif fault.where is not None:
            assert where == fault.where
        assert fault.says in str(report)
        assert all(f.found and f.allowed and f.remedy for f in report.findings)
        statuses = {row.status for row in report.matrices}
        assert "inconclusive" not in statuses or names <= {"update_lost_to_rounding", "orthogonalizer_wrong"}
