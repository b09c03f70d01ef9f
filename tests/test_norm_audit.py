"""The audit knows control of norms: healthy steps pass in every arithmetic, and planted faults are named."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Audit, AuditError, Muon, Orthogonalizer, audit
from shardmuon.auditing.report import AuditReport
from shardmuon.step import commit, weights
from shardmuon.step.weights import WeightSet
from shardmuon.testing.layouts import LAYOUTS, PARAMS, groups_of, parameters
from shardmuon.testing.pool import RankPool
from shardmuon.variants.norm_control import HyperballUpdate, HyperballWeight
from shardmuon.variants.norms import Norms

SHAPES = [(48, 16), (16, 24), (20, 20)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Job:
    """Three matrices under one variant."""

    def __init__(
        self, variant: str, products: torch.dtype, weights: torch.dtype, *, seed: int = 0, lr: float = 0.1, **more: Any
    ) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), weights
        scale = 0.05 if seed % 2 else 1.0
        self.params = [nn.Parameter((scale * self._normal(*shape)).to(weights)) for shape in SHAPES]
        self.optimizer = Muon(
            [(f"w{i}", p) for i, p in enumerate(self.params)],
            lr=lr,
            weight_decay=0.0,
            variant=variant,
            orthogonalizer=Orthogonalizer(method="standard", dtype=products),
            **more,
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


@pytest.mark.stated
@pytest.mark.parametrize("variant", ["hyperball", "muon_eq+hyperball", "normuon+hyperball"])
@pytest.mark.parametrize("products", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
def test_healthy_steps_are_ok(variant: str, products: str, weights: str) -> None:
    for seed in range(2):  # 72 steps in all
        job = Job(variant, DTYPES[products], DTYPES[weights], seed=seed, lr=(0.02, 0.2)[seed])
        for _ in range(3):
            report = job.audited()
            assert report.ok, str(report)
            assert [row.status for row in report.matrices] == ["ok"] * 3


# ------------------------------------------------------------------------------------------------------------ faults

Fault = contextlib.AbstractContextManager[object]


def _no_stage(self: Any, norms: Norms, kept: Tensor) -> Tensor:
    return torch.ones_like(norms.whole)


def _longer(stage: type) -> Fault:
    real = stage.factor
    return mock.patch.object(stage, "factor", lambda *given: real(*given) * 1.25)


def _norm_of_half(stage: type, params: list[nn.Parameter]) -> Fault:
    """The stage takes the norm of the upper half of the rows of what it keeps for the whole's."""
    real, norms = stage.factor, {p.shape: p.detach()[: len(p) // 2].double().norm() for p in params}

    def factor(self: Any, of_updates: Norms, kept: Tensor) -> Tensor:
        ((_, *shape),) = of_updates.cut.shapes  # on a CPU one batch
        return real(self, of_updates, torch.full_like(kept, float(norms[torch.Size(shape)])))

    return mock.patch.object(stage, "factor", factor)


def _scaled_by(factor: Callable[[Tensor], Tensor]) -> Fault:
    """Multiply weights with this instead of the factors of the stage."""
    real = weights.foreach_products_

    def products(tiles: Any, numbers: Any) -> None:
        real(tiles, [factor(number) for number in numbers])

    return mock.patch.object(weights, "foreach_products_", products)


def _written_times(factor: float) -> Fault:
    """Keep another number than the stage's after a step."""
    real = WeightSet._write

    def write(self: WeightSet, work: Any, values: Tensor) -> None:
        real(self, work, values * factor)

    return mock.patch.object(WeightSet, "_write", write)


def _each_half(params: list[nn.Parameter]) -> Fault:
    """Each half of the rows keeps its own norm, as where shards take theirs for the whole's."""
    before = {p.shape: [half.double().norm() for half in p.detach().split(len(p) // 2)] for p in params}

    def products(tiles: Any, numbers: Any) -> None:
        for weight in tiles:  # one process: each is all of its matrix
            for half, norm in zip(weight.split(len(weight) // 2), before[weight.shape], strict=True):
                half.mul_((norm / half.double().norm()).float())

    return mock.patch.object(weights, "foreach_products_", products)


@contextlib.contextmanager
def _kept_times(job: Job, factor: float) -> Iterator[None]:
    for p in job.params:
        for key, value in job.optimizer.state[p].items():
            if key.startswith("weight_"):
                value.mul_(factor)
    yield


@contextlib.contextmanager
def _weights_times(job: Job, factor: float) -> Iterator[None]:
    with torch.no_grad():
        for p in job.params:
            p.mul_(factor)
    yield


def _wrong_rule(self: HyperballWeight, norm: Tensor, kept: Tensor) -> Tensor:
    """Half of a change of the norm is let through."""
    target = kept[:, 0].double().lerp(norm, 0.5)
    kept[:, 0] = target.float()
    return target / norm


FAULTS: dict[str, tuple[Callable[[Job], Fault], str]] = {
    "O not on the sphere": (
        lambda job: mock.patch.object(HyperballUpdate, "factor", _no_stage),
        "variant_wrong",
    ),
    "R of a part": (lambda job: _norm_of_half(HyperballUpdate, job.params), "norm_of_shard"),
    "update too long": (lambda job: _longer(HyperballUpdate), "scale_wrong"),
    "norm not restored": (lambda job: _scaled_by(torch.ones_like), "norm_not_restored"),
    "other factor": (lambda job: _scaled_by(lambda total: total * 1.01), "norm_wrong"),
    "norms of halves": (lambda job: _each_half(job.params), "norm_of_shard"),
    "weights loaded": (lambda job: _weights_times(job, 1.5), "norm_stale"),
    "stale R": (lambda job: _kept_times(job, 0.8), "norm_stale"),
    "R not kept": (lambda job: _written_times(1.25), "kept_wrong"),
    "other rule": (
        lambda job: mock.patch.object(HyperballWeight, "factor", _wrong_rule),
        "norm_wrong",
    ),
}


# Turn halves by some percent of the update and leave norm and kept numbers nearly as they are: bf16 products hide that.
SMALL = {"norms of halves"}


@pytest.mark.stated
@pytest.mark.parametrize("products", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, products: str) -> None:
    plant, name = FAULTS[fault]
    if fault in SMALL and products == "bf16":
        pytest.skip("smaller than what rounding of bf16 products explains, see SMALL")
    job = Job("hyperball", DTYPES[products], torch.float32)
    job.step()
    with plant(job):
        report = job.audited()
    assert name in {finding.name for finding in report.findings}, str(report)


@pytest.mark.stated
def test_a_fault_in_half_precision_weights_is_named() -> None:
    job = Job("hyperball", torch.bfloat16, torch.bfloat16)
    job.step()
    with _scaled_by(lambda total: total * 0.97):
        report = job.audited()
    assert {finding.name for finding in report.findings} == {"norm_wrong"}, str(report)


@pytest.mark.stated
def test_a_regular_audit_raises() -> None:
    job = Job("hyperball", torch.float32, torch.float32, audit=Audit(every=2))
    job.step()
    job.step()
    with _kept_times(job, 2.0), pytest.raises(AuditError, match=r"norm_stale.*del optimizer.state\[param\]"):
        job.step()


@pytest.mark.stated
@pytest.mark.filterwarnings("ignore:.*zero before the first step")
def test_matrices_of_zeros_and_gradients_of_zeros_are_ok() -> None:
    job = Job("hyperball", torch.float32, torch.float32)
    with torch.no_grad():
        job.params[0].zero_()
    for number in range(3):
        report = job.audited()
        assert report.ok, f"{number}: {report}"
    for p in job.params:
        for key in job.optimizer.state[p]:
            if key == "momentum_buffer":
                job.optimizer.state[p][key].zero_()
    check = audit(job.optimizer)
    for p in job.params:
        p.grad = torch.zeros_like(p)
    with mock.patch.object(job.optimizer.audits, "kept", type(job.optimizer.audits.kept)()):
        job.optimizer.step()
    assert check.report.ok, str(check.report)
    assert {row.status for row in check.report.matrices} == {"zero"}


# ----------------------------------------------------------------------------------------------------------- layouts


def _on_layout(layout: str, variant: str, of_shards: int) -> tuple[bool, list[str], set[str], str]:
    """`of_shards`: the step from which norms are not added up over ranks."""
    row, world = LAYOUTS[layout], dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    cases = {name: PARAMS[name] for name in ("tall", "wide", "experts", "qkv", "in_out")}
    full = {name: torch.randn(case.shape, generator=generator) for name, case in cases.items()}
    params = parameters(row.build(full, row.mesh(world)))
    more = {"audit": Audit(action="warn"), **row.options(world)}
    optimizer = Muon(groups_of(params, cases), lr=0.1, weight_decay=0.0, variant=variant, **more)
    for step in range(2):
        grads = {name: torch.randn(case.shape, generator=generator) for name, case in cases.items()}
        for name, grad in row.build(grads, row.mesh(world)).items():
            params[name].grad = grad
        check = audit(optimizer, samples=20)
        summed = commit._summed if step < of_shards else lambda values, ranks, traffic: values
        with mock.patch.object(commit, "_summed", summed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*zero before the first step")  # a shard that stores nothing of a matrix
            optimizer.step()
    found = {finding.name for finding in check.report.findings}
    return check.report.ok, sorted({r.status for r in check.report.matrices}), found, str(check.report)


@pytest.mark.stated
@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        ("fsdp2", "muon_eq+hyperball"),
        ("ep+fsdp", "muon_eq+hyperball"),
        ("ddp", "normuon+hyperball"),
        ("hsdp", "normuon+hyperball"),
        ("tp x dp", "normuon+hyperball"),
        ("mcore buffers+tp", "normuon+hyperball"),
    ],
)
def test_healthy_steps_on_layouts_are_ok(layout: str, variant: str, world4: RankPool) -> None:
    for ok, statuses, _, text in world4.run(_on_layout, layout, variant, 2):
        assert ok, text
        assert statuses == ["ok"]


@pytest.mark.stated
@pytest.mark.parametrize("of_shards", [0, 1])
def test_norms_of_shards_are_named(of_shards: int, world4: RankPool) -> None:
    for _, _, found, text in world4.run(_on_layout, "fsdp2", "hyperball", of_shards):
        assert "norm_of_shard" in found, text
