"""The audit knows variants and control of norms: healthy steps pass in any arithmetic, and planted faults are named."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Audit, AuditError, Muon, Orthogonalizer, audit
from shardmuon.auditing.reference import FORMULAS
from shardmuon.auditing.report import AuditReport
from shardmuon.step import stages
from shardmuon.step.stages import WeightSet
from shardmuon.testing.layouts import LAYOUTS, PARAMS, groups_of, parameters
from shardmuon.testing.pool import RankPool
from shardmuon.variants.muon_eq import MuonEq
from shardmuon.variants.norm_control import HyperballUpdate, HyperballWeight
from shardmuon.variants.norms import Norms
from shardmuon.variants.normuon import NorMuon

SHAPES = [(96, 32), (32, 48), (40, 40)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VARIANTS = ("normuon", "muon_eq", "muon_eq+normuon", "hyperball", "muon_eq+hyperball", "normuon+hyperball")


class Job:
    """Three matrices under one variant."""

    def __init__(self, variant: str, products: str = "fp32", weights: str = "fp32", seed: int = 0, **more: Any) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), DTYPES[weights]
        scale = 0.05 if seed % 2 else 1.0
        self.params = [nn.Parameter((scale * self._normal(*shape)).to(self._dtype)) for shape in SHAPES]
        options = {"lr": 0.1, "weight_decay": 0.0, "audit": Audit(action="warn")} | more
        self.optimizer = Muon(
            [(f"w{i}", p) for i, p in enumerate(self.params)],
            variant=variant,
            orthogonalizer=Orthogonalizer(method="standard", dtype=DTYPES[products]),
            **options,
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def step(self) -> None:
        for p in self.params:
            p.grad = self._normal(*p.shape).to(self._dtype)
        self.optimizer.step()

    def audited(self) -> AuditReport:
        check = audit(self.optimizer, samples=len(SHAPES))
        self.step()
        return check.report


def names_of(report: AuditReport) -> set[str]:
    return {finding.name for finding in report.findings}


@pytest.mark.stated
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("products", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
def test_healthy_steps_are_ok(variant: str, products: str, weights: str) -> None:
    for seed in range(2):
        job = Job(variant, products, weights, seed, lr=(0.1, 0.2)[seed])
        for _ in range(2):
            report = job.audited()
            assert report.ok, str(report)
            coarse = weights == "bf16" and seed == 0  # weights of size 1 may swallow half of an update
            assert {row.status for row in report.matrices} <= ({"ok", "inconclusive"} if coarse else {"ok"})


# ------------------------------------------------------------------------------------------------------------ faults

Fault = contextlib.AbstractContextManager[object]
REAL = {NorMuon: NorMuon.run, MuonEq: MuonEq.run}


def _plain(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    return x.float()


def _by_halves(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    """The norm restored for each half of the rows, as on shards."""
    run = REAL[NorMuon]
    if x.shape[1] < 2 * x.shape[2]:
        return run(self, x, kept)
    half = x.shape[1] // 2
    kept_parts = kept[:, :half].clone(), kept[:, half:].clone()
    out = torch.cat([run(self, part, k) for part, k in zip(x.split(half, 1), kept_parts, strict=True)], 1)
    kept.copy_(torch.cat(kept_parts, 1))
    return out


def _other_dim(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    """Mean squares along the longer dim, one for each of the shorter one."""
    own = torch.zeros(len(x), min(x.shape[1:]))
    dim = -2 if x.shape[1] >= x.shape[2] else -1
    own.lerp_(x.float().square().mean(dim), 1 - self.beta2)
    scaled = x.float() * own.rsqrt().unsqueeze(dim)
    return scaled * (x.float().norm(dim=(1, 2), keepdim=True) / scaled.norm(dim=(1, 2), keepdim=True))


def _too_long(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    return REAL[NorMuon](self, x, kept) * 1.25


def _forgotten(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    return REAL[NorMuon](self, x, kept.clone())


def _wrong_average(self: NorMuon, x: Tensor, kept: Tensor) -> Tensor:
    return REAL[NorMuon](self, x, kept.mul_(1.5))


def _rows_left(self: MuonEq, x: Tensor, kept: Tensor) -> Tensor:
    out = REAL[MuonEq](self, x, kept)
    out[:, 0] = x[:, 0] * 3
    return out


def _one_by_one(stages: Sequence[Any], xs: Sequence[Tensor], kept: Mapping[str, Sequence[Tensor]]) -> None:
    for stage in stages:
        for at, x in enumerate(matrix for batch in xs for matrix in batch.split(1)):
            x.copy_(stage.run(x, kept[stage.key][at].unsqueeze(0) if stage.key else x.new_empty(1, 0)))


def _running(stage: type, run: Callable[..., Tensor]) -> Callable[[Job], Fault]:
    """A live step calls `run` in the stage's place: stages' passes are not shared then."""

    @contextlib.contextmanager
    def plant(job: Job) -> Iterator[None]:
        with (
            mock.patch.object(stage, "run", run),
            mock.patch.object(stages, "scaled_", _one_by_one),
            mock.patch.object(MuonEq, "unit", return_value=None),
        ):
            yield

    return plant


def _factor(stage: type, make: Callable[[Any], Any]) -> Callable[[Job], Fault]:
    """Replace the stage's factor by `make(the original)`."""
    return lambda job: mock.patch.object(stage, "factor", make(stage.factor))  # type: ignore[attr-defined]


def _norm_of_half(job: Job) -> Fault:
    """The norm of the upper half of the rows of what is kept is taken for the whole's."""
    norms = {p.shape: p.detach()[: len(p) // 2].double().norm() for p in job.params}
    real = HyperballUpdate.factor

    def factor(self: Any, of_updates: Norms, kept: Tensor) -> Tensor:
        ((_, *shape),) = of_updates.cut.shapes  # on a CPU one batch
        return real(self, of_updates, torch.full_like(kept, float(norms[torch.Size(shape)])))

    return mock.patch.object(HyperballUpdate, "factor", factor)


def _scaled_by(factor: Callable[[Tensor], Tensor]) -> Callable[[Job], Fault]:
    """Multiply weights with this instead of the factors of the stage."""
    real = stages.foreach_mul_

    def products(tiles: Any, numbers: Any) -> None:
        real(tiles, [factor(number) for number in numbers])

    return lambda job: mock.patch.object(stages, "foreach_mul_", products)


def _each_half(job: Job) -> Fault:
    """Each half of the rows keeps its own norm, as where shards take theirs for the whole's."""
    before = {p.shape: [half.double().norm() for half in p.detach().split(len(p) // 2)] for p in job.params}

    def products(tiles: Any, numbers: Any) -> None:
        for weight in tiles:  # one process: each is all of its matrix
            for half, norm in zip(weight.split(len(weight) // 2), before[weight.shape], strict=True):
                half.mul_((norm / half.double().norm()).float())

    return mock.patch.object(stages, "foreach_mul_", products)


def _written_times(factor: float) -> Callable[[Job], Fault]:
    """Keep another number than the stage's after a step."""
    real = WeightSet._write

    def write(self: WeightSet, work: Any, values: Tensor) -> None:
        real(self, work, values * factor)

    return lambda job: mock.patch.object(WeightSet, "_write", write)


def _times(factor: float, of: Callable[[Job], Sequence[Tensor]]) -> Callable[[Job], Fault]:
    """Multiply weights or what is kept of them before the step."""

    @contextlib.contextmanager
    def plant(job: Job) -> Iterator[None]:
        with torch.no_grad():
            for value in of(job):
                value.mul_(factor)
        yield

    return plant


def _kept_norms(job: Job) -> list[Tensor]:
    return [value for state in job.optimizer.state.values() for key, value in state.items() if key[:7] == "weight_"]


def _wrong_rule(self: HyperballWeight, norm: Tensor, kept: Tensor) -> Tensor:
    """Half of a change of the norm is let through."""
    target = kept[:, 0].double().lerp(norm, 0.5)
    kept[:, 0] = target.float()
    return target / norm


# variant, plant, a finding that must be there, steps before
FAULTS: dict[str, tuple[str, Callable[[Job], Fault], str, int]] = {
    "no stage": ("normuon", _running(NorMuon, _plain), "kept_wrong", 0),
    "stage by halves": ("normuon", _running(NorMuon, _by_halves), "", 0),
    "the other dim": ("normuon", _running(NorMuon, _other_dim), "kept_wrong", 0),
    "norm not restored": ("normuon", _running(NorMuon, _too_long), "scale_wrong", 0),
    "nothing kept": ("normuon", _running(NorMuon, _forgotten), "kept_wrong", 0),
    "average off": ("normuon", _running(NorMuon, _wrong_average), "kept_wrong", 2),
    "a row left out": ("muon_eq", _running(MuonEq, _rows_left), "variant_wrong", 0),
    "O not on the sphere": (
        "hyperball",
        _factor(HyperballUpdate, lambda real: lambda self, norms, kept: torch.ones_like(norms.whole)),
        "variant_wrong",
        1,
    ),
    "R of a part": ("hyperball", _norm_of_half, "norm_of_shard", 1),
    "update too long": (
        "hyperball",
        _factor(HyperballUpdate, lambda real: lambda *given: real(*given) * 1.25),
        "scale_wrong",
        1,
    ),
    "weights not restored": ("hyperball", _scaled_by(torch.ones_like), "norm_not_restored", 1),
    "other factor": ("hyperball", _scaled_by(lambda total: total * 1.01), "norm_wrong", 1),
    "norms of halves": ("hyperball", _each_half, "norm_of_shard", 1),
    "weights loaded": ("hyperball", _times(1.5, lambda job: job.params), "norm_stale", 1),
    "stale R": ("hyperball", _times(0.8, _kept_norms), "norm_stale", 1),
    "R not kept": ("hyperball", _written_times(1.25), "kept_wrong", 1),
    "other rule": ("hyperball", _factor(HyperballWeight, lambda real: _wrong_rule), "norm_wrong", 1),
}
# 1 to 10 %, which bf16 products hide: one matrix in another order differs by as much.
SMALL = {"stage by halves", "norms of halves"}


@pytest.mark.stated
@pytest.mark.parametrize(
    ("fault", "products"), [(f, p) for f in FAULTS for p in DTYPES if p == "fp32" or f not in SMALL]
)
def test_a_planted_fault_is_named(fault: str, products: str) -> None:
    variant, plant, name, steps = FAULTS[fault]
    job = Job(variant, products)
    for _ in range(steps):
        job.step()
    with plant(job):
        report = job.audited()
    assert not report.ok, str(report)
    assert name in {"", *names_of(report)}, str(report)


@pytest.mark.stated
def test_a_fault_in_half_precision_weights_is_named() -> None:
    job = Job("hyperball", "bf16", "bf16")
    job.step()
    with _scaled_by(lambda total: total * 0.97)(job):
        assert names_of(job.audited()) == {"norm_wrong"}


@pytest.mark.stated
def test_a_regular_audit_raises() -> None:
    job = Job("hyperball", audit=Audit(every=2))
    job.step()
    job.step()
    with _times(2.0, _kept_norms)(job), pytest.raises(AuditError, match=r"norm_stale.*del optimizer.state\[param\]"):
        job.step()


@pytest.mark.stated
@pytest.mark.filterwarnings("ignore:.*zero before the first step")
def test_matrices_of_zeros_and_gradients_of_zeros_are_ok() -> None:
    job = Job("hyperball")
    with torch.no_grad():
        job.params[0].zero_()
    for number in range(3):
        report = job.audited()
        assert report.ok, f"{number}: {report}"
    check = audit(job.optimizer)
    for p in job.params:
        job.optimizer.state[p]["momentum_buffer"].zero_()
        p.grad = torch.zeros_like(p)
    with mock.patch.object(job.optimizer.audits, "kept", type(job.optimizer.audits.kept)()):
        job.optimizer.step()
    assert check.report.ok, str(check.report)
    assert {row.status for row in check.report.matrices} == {"zero"}


def test_a_stage_without_a_formula_is_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FORMULAS, NorMuon)
    assert {row.status for row in Job("normuon").audited().matrices} == {"not checked: NorMuon"}


# ----------------------------------------------------------------------------------------------------------- layouts


def _on_layout(layout: str, variant: str, of_shards: int = 2, spoil: bool = False) -> tuple[set[str], set[str], str]:
    """Statuses and findings of the second of two steps.

    Args:
        of_shards: The step from which norms of weights are not added up over ranks.
        spoil: Whether the last rank's copy of what a stage keeps is another one before the second step.
    """
    row, world = LAYOUTS[layout], dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    cases = {name: PARAMS[name] for name in ("tall", "wide", "experts", "qkv", "in_out")}
    full = {name: torch.randn(case.shape, generator=generator) for name, case in cases.items()}
    params = parameters(row.build(full, row.mesh(world)))
    options = {"lr": 0.1 if "hyperball" in variant else 0.02, "weight_decay": 0.0, "audit": Audit(action="warn")}
    optimizer = Muon(groups_of(params, cases), variant=variant, **options, **row.options(world))
    for step in range(2):
        grads = {name: torch.randn(case.shape, generator=generator) for name, case in cases.items()}
        for name, grad in row.build(grads, row.mesh(world)).items():
            params[name].grad = grad
        check = audit(optimizer, samples=20)
        if step and spoil and dist.get_rank() == world - 1:
            state = optimizer.state[params["tall"]]["second_moment"]
            getattr(state, "_local_tensor", state).mul_(1.25)
        summed = stages._summed if step < of_shards else lambda values, ranks, traffic: values
        with mock.patch.object(stages, "_summed", summed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*zero before the first step")  # a shard that stores nothing of a matrix
            optimizer.step()
    return {r.status for r in check.report.matrices}, names_of(check.report), str(check.report)


@pytest.mark.stated
@pytest.mark.parametrize(
    ("layout", "variant"),
    [(layout, "muon_eq+normuon") for layout in ("ddp", "fsdp2", "hsdp", "ep+fsdp", "tp x dp", "mcore buffers+tp")]
    + [(layout, "muon_eq+hyperball") for layout in ("fsdp2", "ep+fsdp")]
    + [(layout, "normuon+hyperball") for layout in ("ddp", "hsdp", "tp x dp", "mcore buffers+tp")],
)
def test_healthy_steps_on_layouts_are_ok(layout: str, variant: str, world4: RankPool) -> None:
    for statuses, found, text in world4.run(_on_layout, layout, variant):
        assert (statuses, found) == ({"ok"}, set()), text


@pytest.mark.stated
@pytest.mark.parametrize("of_shards", [0, 1])
def test_norms_of_shards_are_named(of_shards: int, world4: RankPool) -> None:
    for _, found, text in world4.run(_on_layout, "fsdp2", "hyperball", of_shards):
        assert "norm_of_shard" in found, text


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_a_copy_that_drifted_on_one_rank_is_found_or_repaired(layout: str, world4: RankPool) -> None:
    """The owner's is what counts: it brings the others back in line, and its own error is found."""
    for _, found, text in world4.run(_on_layout, layout, "muon_eq+normuon", spoil=True):
        assert not found or found & {"kept_wrong", "update_differs", "scale_wrong"}, text
