"""Tests that an audit reports nothing for a correct optimizer on any layout, and that it catches and names every fault
defined in `planted.py`.

All ranks must return the same report.
"""

from __future__ import annotations

import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from healthy_steps import DTYPES, IN_TURN, healthy
from planted import (
    FAULTS,
    PRODUCTS,
    Job,
    caught_all,
    check_caught,
    local,
    names_of,
    step_of,
    updates,
)
from simulated import quick_plans
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from variant_cases import CASES, LATER

from shardmuon import AuditError, AuditWarning, Muon, audit, muon, param_groups
from shardmuon._torch import local_if_any
from shardmuon.auditing.report import AuditReport
from shardmuon.layout import pieces
from shardmuon.layout.pieces import Held, Tile
from shardmuon.layout.views import MatrixView
from shardmuon.step.binding import fingerprint
from shardmuon.testing import RankPool
from shardmuon.testing.compare import Comparison
from shardmuon.testing.layouts import LAYOUTS, mesh_of
from shardmuon.variants import VARIANTS, NorMuon

# ------------------------------------------------------------------------------------------------- sound optimizers

ON_LAYOUTS = (None, "muon_eq+normuon", "normuon+hyperball", "muon_eq+hyperball", *LATER)
METHODS = ("auto", "standard", "gram")


def _next_step(optimizer: Muon) -> AuditReport:
    """Take a step in which each gradient is the sine of the previous gradient, so that gradients and momentum point in
    different directions. Return the step's audit report."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        local_if_any(p.grad).sin_()  # DTensor operations are slow for every new shape
    return step_of(optimizer)


@quick_plans()
def sound(layout: str, dtype: torch.dtype = torch.float32, **options: Any) -> AuditReport:
    """Assert that a step on the layout `layout` matches a single-process run bitwise, and return the audit report of
    the next step."""
    given: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, **options}
    with warnings.catch_warnings():
        # ignore Hyperball's warning about all-zero weight matrices
        warnings.filterwarnings("ignore", ".*zero before the first step")
        found = Comparison.with_dense(layout, dtype=dtype, steps=1, about=_next_step, **given)
    assert found.bitwise and isinstance(found.about, AuditReport)
    return found.about


def _row(*values: Any, numeric: bool) -> Any:
    """Return a pytest parameter set with the given values. If `numeric` is True, add the marker `numeric`, for tests
    whose result can depend on the default matmul dtype."""
    return pytest.param(*values, marks=[pytest.mark.numeric] if numeric else [], id=f"{values[-1]}".strip("(),'"))


_FEWEST = {name: 2 if len(case.mesh(4)) == 1 else 4 for name, case in LAYOUTS.items()}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        _row(_FEWEST[name], name, numeric=at % 8 == 4)
        for at, name in sorted(enumerate(LAYOUTS), key=lambda row: _FEWEST[row[1]])
    ],
)
def test_a_sound_optimizer_gives_no_finding(world: int, layout: str) -> None:
    """An audit of a correct step must report nothing on any layout. Each layout is tested with only one variant and one
    method, because neither affects how an audit reads sharded tensors. Each variant is always combined with the same
    method, so that several layouts share one single-process run."""
    turn = list(LAYOUTS).index(layout) % len(ON_LAYOUTS)
    variant, method = ON_LAYOUTS[turn], METHODS[turn % len(METHODS)]
    reports = RankPool.cached(world).run(sound, layout, variant=variant, method=method)
    for report in reports:
        assert report.ok and {row.status for row in report.matrices} == {"ok"}, report
        assert len(report.matrices) >= 8
        assert max(row.difference / row.allowed for row in report.matrices) < 0.6
        assert layout == "single" or report == reports[0]


POLAR_EXPRESS = [(8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250)]
IN_FP64 = {"method": "standard", "ns_dtype": torch.float64}


# OPTIONS omits Nesterov momentum, named schedules and the remaining matmul dtypes, because the random steps in DRAWN
# cover them.
OPTIONS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"variant": "cautious", "weight_decay": 0.5}),
    (torch.float32, {"ns_coefficients": POLAR_EXPRESS}),
    (torch.float32, {"method": "torch"}),
    (torch.float64, {"ns_dtype": torch.float64}),
    (torch.float64, IN_FP64),
    *((torch.float64, {**IN_FP64, "variant": name, "weight_decay": 0.0}) for name in CASES),
    (torch.bfloat16, {"method": "torch"}),
    (torch.bfloat16, {}),
    (torch.float32, {"momentum_dtype": torch.bfloat16}),
    (torch.float32, {"momentum_dtype": "int8"}),
    (torch.bfloat16, {"momentum_dtype": torch.float32, "momentum_device": "cpu"}),
    (torch.float64, {**IN_FP64, "variant": "hyperball+normuon", "weight_decay": 0.0}),
]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [_row(dtype, options, numeric=not {"method", "ns_dtype"} & options.keys()) for dtype, options in OPTIONS],
)
def test_every_option_is_part_of_the_reference(world2: RankPool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """An audit must report nothing for a correct step with any options, including fp64 weights with variants that store
    fp32 state (such as NorMuon)."""
    for report in world2.run(sound, "fsdp2", dtype, params=("square", "tall", "wide", "experts"), **options):
        assert report.ok and {row.status for row in report.matrices} == {"ok"}, report
        assert max(row.difference / row.allowed for row in report.matrices) < 0.8


# Steps with the largest rounding errors among many random correct steps, as (dtype, seed, variant). In the steps
# without a variant, rounding completely changes one pair of singular vectors of the update. In the steps with MuonEq,
# the matrix is all ones, so all elements have the same rounding error. In the step with seed 8500193, the weights are
# in bf16 and are updated by torch's own addition.
MOVED_MOST = [
    ("bf16", 50170, None),
    ("fp16", 807, None),
    ("fp16", 969, None),
    ("fp16", 300030, None),
    ("fp16", 300794, None),
    ("fp16", 301809, None),
    ("bf16", 1000729, None),
    ("fp16", 7000019, "normuon+hyperball"),
    ("fp16", 7000129, "normuon"),
    ("fp32", 7000075, "muon_eq+normuon"),
    ("fp32", 7000267, "muon_eq+normuon"),
    ("fp32", 11000979, "muon_eq+normuon"),
    ("fp32", 11001039, "muon_eq+normuon"),
    ("bf16", 8500193, "hyperball"),
]
DRAWN = [(dtype, seed, variant) for dtype in DTYPES for seed, variant in enumerate(IN_TURN)]


@pytest.mark.parametrize(("dtype", "seed", "variant"), [*MOVED_MOST, *DRAWN])
def test_sound_steps_drawn_at_random_give_no_finding(dtype: str, seed: int, variant: str | None) -> None:
    """An audit must report nothing for correct steps with random options. benchmarks/audit_sharpness.py runs the same
    check on 1,000 random steps."""
    findings, statuses, _, drawn = healthy(dtype, seed, 32 if seed >= 100 and variant is None else 40, variant=variant)
    assert findings == [] and set(statuses) <= {"ok", "inconclusive", "zero"}, drawn
    assert seed < 100 or statuses.count("ok") >= len(statuses) - (seed == 1000729), drawn


@pytest.mark.filterwarnings("ignore:.*zero before the first step")
def test_matrices_of_zeros_and_gradients_of_zeros_are_sound() -> None:
    weights = [nn.Parameter(torch.zeros(8, 6)), nn.Parameter(torch.eye(6, 8)), nn.Parameter(torch.zeros(5, 7))]
    optimizer = Muon(weights, lr=0.1, weight_decay=0.0, variant="hyperball")
    for step in range(4):
        for at, weight in enumerate(weights):
            made = torch.Generator().manual_seed(step + 10 * at)
            moves = step < 3 and at < 2
            weight.grad = torch.randn(weight.shape, generator=made) if moves else torch.zeros_like(weight)
        if step == 3:
            optimizer = Muon(weights, lr=0.1, weight_decay=0.0, variant="hyperball")
        report = step_of(optimizer)
        assert report.ok, f"{step}: {report}"
        assert [row.status for row in report.matrices] == (["ok", "ok", "zero"] if step < 3 else ["zero"] * 3)


class Unknown(NorMuon):
    """A post-processing stage for which audits have no reference formula."""


@pytest.mark.parametrize(("variant", "status"), [("muon_eq", "ok"), ("unknown", "not checked: Unknown")])
def test_rows_of_zeros_are_sound_and_a_stage_without_a_formula_is_said_to_be_unchecked(
    variant: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VARIANTS, "unknown", (Unknown(),))
    weight = nn.Parameter(torch.eye(6, 8))
    weight.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.0], [1.0]] * 3)
    report = step_of(Muon([weight], lr=0.1, variant=variant))
    assert report.ok and [row.status for row in report.matrices] == [status], report


def test_a_matrix_of_one_element_of_any_stride_is_audited_by_its_value() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        strided = torch.arange(1, 9, dtype=dtype).view(2, 4)[1:, 1:2].as_strided((1, 1), (2, 2), 5)
        assert strided.stride() == (2, 2)
        assert fingerprint(strided) == fingerprint(torch.full((1, 1), 6, dtype=dtype))
        weight = nn.Parameter(torch.ones(1, 1, dtype=dtype))
        weight.grad = strided
        assert step_of(Muon([weight], lr=0.1)).ok


# ---------------------------------------------------------------------------------------------------- planted faults


INEXACT = tuple(name for name, fault in FAULTS.items() if not fault.exact)
BY_TORCH = ("Hyperball: other rule", *[name for name in INEXACT if not name.startswith("orthogon")][1::8])
OF_STAGES = tuple(n for n in FAULTS if n.startswith(("NorMuon: n", "NorMuon: the", "NorMuon: b", "MuonEq")))
# Every fault in planted.py is tested with the default matmul dtype. Faults that are not marked `exact` are tested a
# second time, with fp16 matmuls or larger matrices. Some faults are also tested with torch's own orthogonalizer, or on
# the optimizer's first step. benchmarks/audit_sharpness.py tests all combinations.
PLANTED = [
    *(_row({}, None, False, (name,), numeric=not fault.exact) for name, fault in FAULTS.items()),
    *(
        pytest.param(PRODUCTS[products], rows, False, names, id=f"{products} {rows}")
        for products, rows, names in (
            ("fp32", 256, INEXACT[::4]),
            ("bf16", 256, INEXACT[2::4]),
            ("fp16", 32, INEXACT[1::4]),
            ("fp16 gram", 32, INEXACT[3::4]),
            ("torch", 32, BY_TORCH),
        )
    ),
    pytest.param({}, None, True, OF_STAGES, id="in a first step", marks=pytest.mark.numeric),
]


@pytest.mark.parametrize(("options", "rows", "first", "names"), PLANTED)
def test_a_planted_fault_is_caught_and_named(
    world2: RankPool, options: dict[str, Any], rows: int | None, first: bool, names: tuple[str, ...]
) -> None:
    """The audit must report the findings that the test case lists for the planted fault. If `first` is True, the fault
    is planted in the first step, before any optimizer state exists."""
    found = world2.run(caught_all, rows, options, names, first=first)
    for name in names:
        check_caught(name, found)


@pytest.mark.parametrize("products", ["fp32", "bf16", "fp16"])
def test_low_rank_is_judged_by_the_directions_that_are_settled(products: str) -> None:
    """With half-precision matmuls, rounding moves a low-rank update by more than the norm of the update, but only in
    the null directions. The audit must ignore these directions and still find a clipped update."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 128, generator=generator))
    optimizer = Muon([("w", weight)], lr=0.02, variant="cautious", **PRODUCTS[products])
    found = []
    for length in (1.0, 0.7):
        weight.grad = torch.randn(64, 1, generator=generator) @ torch.randn(1, 128, generator=generator)
        with updates(lambda u, length=length: u * length)(None):  # type: ignore[misc, arg-type]
            found.append(names_of(step_of(optimizer)))
    assert found == [set(), {"clipped_update"}]


def _moved(held: Held, experts: int) -> Held:
    """Return `held`, a piece of a stack of experts, with its start in the local storage moved by `experts` experts."""
    return held._replace(local=(held.local[0] + experts, *held.local[1:]))


def stacked() -> AuditReport:
    """Return the audit report of the second step on a stack of experts whose rows are sharded over two ranks. As a
    planted fault, both ranks swap the locations of the first two experts in the second rank's shard."""
    original = pieces._tiles_of

    def tiles_of(held: Held, view: MatrixView) -> tuple[Tile, ...]:
        if not held.piece.offset[1]:  # type: ignore[union-attr]
            return original(held, view)
        first, second, third = original(held, view)
        return first._replace(held=_moved(held, 1)), second._replace(held=_moved(held, -1)), third

    mesh = mesh_of((2,))["a0"]
    full = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None))
    optimizer = Muon([{"params": [("experts", weight)], "view": "stack"}], lr=0.02)
    with mock.patch.object(pieces, "_tiles_of", tiles_of):
        for step in range(2):
            weight.grad = distribute_tensor(full.sin() + step, mesh, [Shard(1)], src_data_rank=None)
            report = step_of(optimizer)
    return report


def test_tiles_that_are_wrong_are_found(world2: RankPool) -> None:
    for report in world2.run(stacked):
        assert {f.where for f in report.findings} == {"experts[0]", "experts[1]"}
        assert {row.status for row in report.matrices if row.name == "experts[2]"} == {"ok"}


# ------------------------------------------------------------------------------------------------------------ routing


@pytest.mark.parametrize(
    ("moved", "finding", "where"),
    [
        (True, "wrong_group", {"1.weight", "2.weight"}),
        (False, "not_in_optimizer", {"0.weight", "1.bias", "3.weight", "3.bias"}),
    ],
)
def test_a_parameter_in_the_wrong_group_or_in_none_is_named(moved: bool, finding: str, where: set[str]) -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 12), nn.Linear(12, 8, bias=False), nn.Linear(8, 50))
    optimizer = Muon(param_groups(model, lr=0.02), lr=1e-3)
    if moved:
        optimizer.param_groups[0]["use_muon"] = False
    else:
        del optimizer.param_groups[1:]
    model(torch.arange(20).view(4, 5)).square().mean().backward()
    report = step_of(optimizer)
    assert {(f.name, f.where) for f in report.findings} == {(finding, name) for name in where}
    assert ("it goes to AdamW, in group 0" in str(report)) == moved


# ------------------------------------------------------------------------------------------------- during training


def scheduled(name: str) -> list[str]:
    """Run ten steps with an audit of every third step. Plant the fault `name` in step 5, which is not audited, and in
    step 7, which is audited. Return one line per step that says whether the step passed or raised an error."""
    fault = FAULTS[name]
    job = Job("fsdp2", fault.dtype, audit_every=3, **fault.options)
    log = []
    for step in range(1, 11):
        before = local(job.params["a"]).clone()
        job.optimizer.param_groups[0]["lr"] = 0.02
        with fault.plant(job) if step in (5, 7) else nullcontext(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                job.step(step)
                log.append(f"{step} passed {[Path(w.filename).name for w in seen if w.category is AuditWarning]}")
            except AuditError as error:
                complete = "The step is complete" in str(error) and not torch.equal(before, local(job.params["a"]))
                log.append(f"{step} raised {len(error.report.findings)} {error.report.step} {complete}")
    return log


@pytest.mark.parametrize(
    ("name", "seventh"),
    [
        ("clipped after, by norm", "7 raised 2 7 True"),
        ("weights too coarse", "7 passed ['planted.py', 'planted.py']"),
    ],
)
def test_a_fault_in_an_audited_step_is_raised_or_a_warning_on_every_rank_and_later_steps_go_on(
    world2: RankPool, name: str, seventh: str
) -> None:
    """If an audit finds a fault that the user may have intended, it only warns. For any other fault, it raises an
    error. All ranks must react in the same way, and training must be able to continue after a warning or an error."""
    expected = [seventh if step == 7 else f"{step} passed []" for step in range(1, 11)]
    assert world2.run(scheduled, name) == [expected, expected]


def asked_where_nothing_is_shared() -> tuple[int, set[str] | None]:
    """Train a different expert on each rank, so that the ranks share no parameters, only the optimizer's process group.
    Only rank 0 requests an audit. Return the optimizer's number of steps, and the names of the audit's findings (None
    on rank 1)."""
    weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank())))
    optimizer = Muon(
        [{"params": [("w", weight)], "process_group": (), "tp_group": ()}], lr=0.02, process_group=dist.group.WORLD
    )
    check = None
    for step in range(3):
        weight.grad = weight.detach().sin()
        if dist.get_rank() == 0 and step == 1:
            check = audit(optimizer)
        optimizer.step()
    return optimizer.audits.num_steps, check and names_of(check.report)


def test_a_rank_that_shares_nothing_need_not_be_asked(world2: RankPool) -> None:
    assert world2.run(asked_where_nothing_is_shared) == [(3, set()), (3, None)]


def shared_by(pairs: list[tuple[int, int]], drifts: bool) -> AuditReport:
    """Return the audit report of a step in which each pair of ranks in `pairs` shares one matrix. If `drifts` is True,
    rank 3 has changed its copy of the third matrix."""
    full = {at: torch.randn(8, 6 + at, generator=torch.Generator().manual_seed(at)) for at in range(len(pairs))}
    params = {at: nn.Parameter(full[at].clone()) for at, pair in enumerate(pairs) if dist.get_rank() in pair}
    optimizer = Muon([{"params": [(f"of {at}", p)], "process_group": pairs[at]} for at, p in params.items()], lr=0.02)
    for step in range(2):
        for at, p in params.items():
            p.grad = full[at].sin() + step
            if step and drifts and (dist.get_rank(), at) == (3, 2):
                p.data.add_(1e-3)
        report = step_of(optimizer, 2)
    return report


CHAIN, STAGES = [(0, 1), (1, 2), (2, 3)], [(0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("pairs", "drifts", "heard"),
    [
        (CHAIN, False, ["012"] * 4),
        (CHAIN, True, ["012"] * 4),
        (STAGES, True, ["0", "0", "12", "12"]),
    ],
)
def test_every_rank_that_others_connect_hears_of_a_fault_and_no_other_one(
    pairs: list[tuple[int, int]], drifts: bool, heard: list[str], world4: RankPool
) -> None:
    reports = world4.run(shared_by, pairs, drifts)
    assert reports[2] == reports[3]
    for report, names in zip(reports, heard, strict=True):
        assert [row.name for row in report.matrices] == [f"of {at}" for at in names]
        found = {("replica_drift", "of 2")} if drifts and "2" in names else set()
        assert {(f.name, f.where) for f in report.findings} == found


def widened_unnoticed() -> AuditReport | None:
    """Take a step on ranks 0 and 1, which share a matrix. Then change the option `process_group` from these two ranks
    to all four, and return the audit report of the next step (None on ranks 2 and 3, which do not take part). A patch
    hides the change from the optimizer, which therefore keeps its old plan."""
    pair = (0, 1) if dist.get_rank() < 2 else (2, 3)
    weight = nn.Parameter(torch.eye(6, 4))
    optimizer = Muon([{"params": [("w", weight)], "process_group": pair}], lr=0.02)
    weight.grad = torch.ones(6, 4)
    optimizer.step()
    if pair == (2, 3):
        return None
    optimizer.param_groups[0]["process_group"] = (0, 1, 2, 3)
    looks = muon.StepCall.is_current
    with mock.patch.object(muon.StepCall, "is_current", lambda call, kept: looks(call, kept) or True):
        return step_of(optimizer)


def test_an_audit_waits_for_no_rank_that_is_not_in_the_step(world4: RankPool) -> None:
    first, second, *others = world4.run(widened_unnoticed)
    assert first is not None and first == second and others == [None, None]
    assert [(f.name, f.where) for f in first.findings] == [("stale_plan", "ranks 0,1")]
    assert "the groups hold 1 parameters, 0 of them of ranks 0,1, the plan 1" in str(first)


@pytest.mark.parametrize(("every", "audited"), [(4, [1, 5, 9]), (None, [])])
def test_every_so_many_steps_are_audited_and_a_copy_goes_on(every: int | None, audited: list[int]) -> None:
    optimizer, found = Muon([nn.Parameter(torch.randn(4, 6))], lr=0.02, audit_every=every), list[int]()
    for step in range(1, 10):
        if step == 4:
            optimizer = pickle.loads(pickle.dumps(optimizer))
        optimizer.param_groups[0]["params"][0].grad = torch.randn(4, 6)
        before = optimizer.audits.num_audits
        optimizer.step()
        found += [step] * (optimizer.audits.num_audits - before)
    assert found == audited


@pytest.mark.parametrize(("count", "samples"), [(1, 2), (7, 2), (24, 8), (100, 3)])
def test_the_rotation_takes_every_matrix_in_turn(count: int, samples: int) -> None:
    params = [nn.Parameter(torch.eye(2)) for _ in range(count)]
    optimizer, taken = Muon(params, lr=0.1), []
    for _ in range(-(-count // min(samples, count))):
        for p in params:
            p.grad = torch.eye(2)
        check = audit(optimizer, samples)
        optimizer.step()
        taken.append([row.order[0] for row in check.report.matrices])
    assert all(len(set(t)) == len(t) == min(samples, count) for t in taken)
    assert set().union(*taken) == set(range(count))


def test_options_without_a_meaning_and_reports_before_the_step_are_refused() -> None:
    optimizer = Muon([nn.Parameter(torch.zeros(2, 2))], lr=1e-3)
    with pytest.raises(ValueError, match="samples=0 must be a whole number"):
        audit(optimizer, samples=0)
    with pytest.raises(RuntimeError, match=r"call optimizer.step\(\)"):
        audit(optimizer).report  # noqa: B018
