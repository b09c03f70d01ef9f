"""Tests that unusual but valid shards and gradients give the same step as a single process, and that storage that
contradicts its placements raises an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import FAMILIES, Cut, Job, Spec, alone, as_in, layout_of, refusal, replicas, rows_on, shards, unlike, whole
from on_ranks import on_ranks
from spectra import normal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardmuon.orthogonalize
from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.price.machines import MACHINES, Machine
from shardmuon.testing.layouts import mesh_of

# ----------------------------------------------------------------------------------------------- beside one process


def _rows(cut: Callable[[], Cut], *shapes: tuple[int, int]) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [{"params": [Spec(f"w{n}", shape, cut()) for n, shape in enumerate(shapes)]}]


def _megatron(layout: str, dtype: torch.dtype, **options: Any) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that creates parameter groups of two matrices and a stack of matrices in a layout of
    Megatron-FSDP. Ranks that store no elements of a parameter have no gradient for it."""

    def groups() -> list[dict[str, Any]]:
        few, many, stack = (
            Spec(f"w{n}", shape, as_in(layout), dtype=dtype, lacks=True)
            for n, shape in enumerate(((3, 8), (16, 8), (3, 4, 6)))
        )
        return [{"params": [many, few], **options}, {"params": [stack], "view": "stack", **options}, *alone()]

    return groups


def _turned_on_odd_ranks(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if dist.get_rank() % 2 else t.clone()


def _crossing() -> list[dict[str, Any]]:
    """Return parameter groups on overlapping sets of ranks. Between two buckets that ranks 2 and 3 share, rank 2
    shares several buckets with rank 1, while rank 3 has none at all."""
    sets = {"all": (0, 1, 2, 3), "a": (0, 2, 3), **{f"b{i}": (1, 2) for i in range(4)}, "c": (2, 3)}
    # Creating a mesh is a collective operation, so every rank creates all meshes.
    on = {ranks: rows_on(DeviceMesh("cpu", ranks)) for ranks in dict.fromkeys(sets.values())}
    mine = [Spec(name, (12, 10), on[ranks]) for name, ranks in sets.items() if dist.get_rank() in ranks]
    return [{"params": mine}, *alone()]


EVERY_STAGE = {"variant": "muon_eq+normuon+hyperball", "weight_decay": 0.0}
CUTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "ranks of a mesh in any order": _rows(lambda: rows_on(DeviceMesh("cpu", [3, 1, 0, 2])), (9, 8), (7, 6)),
    "ranks that hold nothing": _rows(lambda: as_in("fsdp2"), (1, 8), (2, 8)),
    "rank_local": lambda: [*replicas(FAMILIES["all"], frozen=False), *alone()],
    "replicas of unlike strides": lambda: [
        {"params": [Spec("wide", (6, 8), _turned_on_odd_ranks), Spec("tall", (9, 5), _turned_on_odd_ranks)]}
        | {"process_group": (0, 1, 2, 3)},
        *alone(),
    ],
    "fsdp2": lambda: [*shards("fsdp2"), *alone()],
    "hsdp": lambda: [*shards("hsdp"), *alone()],
    "ranks that hold nothing, with every stage": lambda: [
        group | EVERY_STAGE for group in _rows(lambda: as_in("fsdp2"), (1, 8), (2, 8))()
    ],
    "hsdp with every stage": lambda: [*(group | EVERY_STAGE for group in shards("hsdp")), *alone()],
    "sets of ranks that cross": _crossing,
    "megatron-fsdp": _megatron("megatron-fsdp", torch.float32, **EVERY_STAGE),
    "megatron-fsdp hfsdp": _megatron("megatron-fsdp hfsdp", torch.bfloat16),
    "megatron-fsdp+tp": _megatron("megatron-fsdp+tp", torch.float32, **EVERY_STAGE),
    "megatron-fsdp+tp in bf16": _megatron("megatron-fsdp+tp", torch.bfloat16, variant="muon_eq+normuon"),
}
OF_ALL: dict[str, dict[str, Any]] = {
    # The bucket size is so small that a rank set has several buckets, two of which are in flight at a time.
    "sets of ranks that cross": {"bucket_bytes": 300},
    "megatron-fsdp hfsdp": {"stochastic_rounding": True, "momentum_dtype": torch.float32},
}


@pytest.mark.parametrize("name", CUTS)
@on_ranks(4)
def test_parameters_in_odd_parts_are_stepped_as_in_one_process(name: str) -> None:
    """A parameter is skipped if no rank has a gradient for it. The step must raise an error if one rank lacks a
    gradient that other ranks have, even if that rank stores no elements of the parameter."""
    groups, options = CUTS[name](), OF_ALL.get(name, {})
    job, dense = Job(groups, **options), whole(groups, **options)
    for seed in (1, 2, 3, 4):
        for one in (job, dense):
            one.set_gradients(seed)
            # Two parameters have no gradient in steps 1 and 3. Skipping them in step 1 must not create any state for
            # them.
            if seed in (1, 3):
                one.first.grad = one.adamw.grad = None
        before = local_if_any(job.first).detach().clone()
        job.step()
        dense.step()
        assert job.unlike_whole(dense.named()) == []
        assert torch.equal(before, local_if_any(job.first)) == (seed in (1, 3) or not before.numel())
        assert seed > 1 or job.first not in job.state
    for p in job.specs:
        p.grad = None
    held = job.held()
    job.step()
    assert unlike(held, job.held()) == [], "no gradient at all"
    job.set_gradients(5)
    if dist.get_rank() == 3:
        job.first.grad = None
    assert re.search(r"ranks \[3\] have no gradient|a gradient.*no grad", refusal(job.step))
    if name.startswith("ranks that hold nothing"):
        assert local_if_any(job.first).numel() == (0 if dist.get_rank() else 8)


def test_skipping_is_torch_optim_muons_bit_for_bit() -> None:
    """A parameter without a gradient is skipped, and a parameter with a gradient is updated even if requires_grad is
    False, as in torch.optim.Muon."""
    groups = [{"params": [Spec("a", (9, 7)), Spec("b", (6, 10))]}]
    mine, theirs = Job(groups, lr=0.1, method="torch"), Job(groups)
    torchs = torch.optim.Muon(list(theirs.specs), lr=0.1)
    for seed, missing in ((1, "a"), (2, ""), (3, "b"), (4, "")):
        for job, optimizer in ((mine, mine.optimizer), (theirs, torchs)):
            for p, spec in job.specs.items():
                p.requires_grad_(p.requires_grad and spec.name != missing)
                p.grad = None if spec.name == missing else job.gradient(p, seed)
            optimizer.step()
        for p, q in zip(mine.specs, theirs.specs, strict=True):
            assert (p in mine.state) == (q in torchs.state)
            assert torch.equal(p, q)


# ----------------------------------------------------------------------------------------- gradients placed otherwise

PLACES = {"columns": Shard(1), "replicated": Replicate()}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((at, "partial") for at in ("fsdp2", "hsdp", "tp", "fsdp2+tp", "hsdp+tp", "one dim twice", "lone strided")),
        *(("fsdp2", kind) for kind in ("columns", "replicated", "on its way")),
    ],
)
@on_ranks(4)
def test_gradients_that_are_placed_otherwise_on_all_ranks_are_brought(layout: str, kind: str) -> None:
    """On all ranks, gradients have placements that differ from those of their parameters. The step must redistribute
    these gradients.

    Gradients with Partial placements are summed exactly, because all ranks have equal terms and the number of ranks is
    a power of two. With the kind "on its way", the gradients' redistribution is still in progress when the step starts,
    and the step runs under another default device. At the end, an AdamW parameter must be updated on exactly those
    ranks that have a gradient for it.
    """
    vector = {"params": [Spec("vector", (8, 4), as_in(layout))], "use_muon": False}
    job, twin = (Job([*shards(layout), *alone(), vector]) for _ in range(2))
    for seed in (1, 2):
        job.set_gradients(seed)
        twin.step(seed)
        for p in job.specs:
            if not isinstance(p, DTensor):
                continue
            full, mesh = job.gradient(p, seed), p.device_mesh
            given: Any = DTensor.from_local(full / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
            if kind in PLACES:
                given = rows_on(mesh, PLACES[kind])(full)
            p.grad = given.redistribute(placements=p.placements, async_op=True) if kind == "on its way" else given
        with torch.device("meta" if kind == "on its way" else "cpu"):
            job.step()
    assert unlike(job.held(gradients=False), twin.held(gradients=False)) == []
    for p in job.specs:
        p.grad = torch.zeros_like(p) if p is job.adamw and dist.get_rank() else None
    before = local_if_any(job.adamw).detach().clone()
    job.step()
    assert torch.equal(before, local_if_any(job.adamw)) == (not dist.get_rank())


@on_ranks(2)
def test_a_gradient_placed_otherwise_is_no_fault_of_ranks_outside_of_its_mesh() -> None:
    mesh = DeviceMesh("cpu", [0])
    p = nn.Parameter(rows_on(mesh)(torch.ones(6)))
    p.grad = rows_on(mesh, Replicate())(torch.ones(6))
    Muon([{"params": [p], "use_muon": False}], lr=0.1).step()
    stored = local_if_any(p)
    assert stored.numel() == (0 if dist.get_rank() else 6) and bool((stored < 1).all())


# ----------------------------------------------------------------------- storage that is not what the placements claim

ROWS, OTHER_ROWS = [Replicate(), Shard(0)], [Shard(0), Replicate()]
# Each case gives a mesh shape, the placements on all ranks except rank 1, the placements on rank 1, a pair (first row,
# number of rows) for each rank's part of 9 rows, and a part of the expected error message.
LIES: dict[str, tuple[tuple[int, ...], list[Any], list[Any], Sequence[tuple[int, int]], str]] = {
    "two axes": (
        (2, 2),
        [Shard(0)] * 2,
        [Shard(0)] * 2,
        ((0, 5), (5, 2), (7, 1), (8, 1)),
        "cannot tell which elements a rank holds",
    ),
    "replicas cut differently": ((2, 2), ROWS, ROWS, ((0, 7), (7, 2), (0, 6), (6, 3)), "cannot tell which elements"),
    "too many rows": ((4,), [Shard(0)], [Shard(0)], ((0, 5), (5, 2), (6, 3), (8, 1)), "cannot tell which elements"),
    "replicas of part": (
        (4,),
        [Replicate()],
        [Replicate()],
        ((0, 5), (5, 0), (5, 3), (8, 1)),
        "cannot tell which elements a rank holds",
    ),
    "another replica axis": (
        (2, 2),
        ROWS,
        ROWS,
        ((0, 5), (0, 4), (4, 5), (5, 4)),
        "liar: ranks 0 and 2 should hold replicas",
    ),
    "another replica axis on one rank": (
        (2, 2),
        OTHER_ROWS,
        ROWS,
        ((0, 5), (0, 5), (5, 4), (5, 4)),
        "describe them differently",
    ),
}


def _refused_at_first(named: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Take a first step that must raise an error, and check that it changed no weight and created no state. Return the
    error message."""
    optimizer = Muon(named, lr=0.1)
    params = optimizer.param_groups[0]["params"]
    before = [local_if_any(p).detach().clone() for p in params]
    text = refusal(optimizer.step)
    assert not optimizer.state
    assert all(torch.equal(a, local_if_any(p)) for a, p in zip(before, params, strict=True))
    return text


@pytest.mark.parametrize("name", LIES)
@on_ranks(4)
def test_storage_that_no_layout_explains_is_refused_on_all_ranks(name: str) -> None:
    mesh_shape, placements, on_one, rows, says = LIES[name]
    (start, size), mesh = rows[dist.get_rank()], mesh_of(mesh_shape)
    local, placed = normal(9, 6)[start : start + size].clone(), on_one if dist.get_rank() == 1 else placements
    made = DTensor.from_local(local, mesh, placed, run_check=False, shape=torch.Size((9, 6)), stride=(6, 1))
    params = {"honest": nn.Parameter(rows_on(mesh, *[Replicate()] * mesh.ndim)(normal(9, 6, seed=1)))}
    params["liar"] = nn.Parameter(made)
    for p in params.values():
        p.grad = torch.zeros_like(p)
    text = _refused_at_first(params.items())
    assert says in text and "liar: " in text


# -------------------------------------------------------------------------------------- parameters placed otherwise


@on_ranks(2)
def test_a_dtensor_that_is_placed_otherwise_in_place_is_planned_anew() -> None:
    """After a step, shard a parameter and its momentum by columns instead of rows, in the same tensor objects."""
    job, dense = (made([{"params": [Spec("w", (8, 6), as_in("fsdp2"))]}]) for made in (Job, whole))
    for seed in (1, 2):
        job.step(seed)
        dense.step(seed)
        for t in (job.first, job.state[job.first]["momentum_buffer"]):
            torch.utils.swap_tensors(t, t.detach().redistribute(placements=[Shard(1)]).requires_grad_(t.requires_grad))
    assert torch.equal(job.first.full_tensor(), dense.first)


# ------------------------------------------------------------------------------------- machines, prices, routes, order


@pytest.mark.parametrize(
    ("what", "options", "says"),
    [
        ("prices", {}, ("ranks (0, 1) hold different plans", "call optimizer.prepare() on every rank")),
        ("products", {}, ("products=torch.float32", "products=torch.bfloat16")),
        ("products", {"ns_dtype": torch.float32}, ()),
        ("products", {"method": "gram"}, ()),
        ("products", {"method": "torch"}, ()),
    ],
    ids=str,
)
@on_ranks(2)
def test_machines_that_would_step_otherwise_are_told_before_the_first_step(
    what: str, options: dict[str, Any], says: Sequence[str]
) -> None:
    """The first step must raise an error if the ranks estimate the speed of their machines differently. It must also
    raise one if their default matmul dtypes differ, unless an option fixes the dtype."""
    cut, rates = as_in("fsdp2"), MACHINES["cpu-gloo"]
    params = [(f"w{i}", nn.Parameter(cut(normal(8, 6, seed=i)))) for i in range(16)]
    for _, p in params:
        p.grad = torch.ones_like(p)
    if dist.get_rank() == 1:
        rates = rates._replace(inside=0, across=0, matrix=0)
    patch = {
        "prices": mock.patch.object(Machine, "slowest", return_value=rates),
        "products": mock.patch.object(
            shardmuon.orthogonalize, "cpu_has_bf16_matmul", return_value=dist.get_rank() == 1
        ),
    }[what]
    with patch:
        if says:
            text = _refused_at_first(params)
            assert all(words in text for words in says)
        else:
            Muon(params, lr=0.1, **options).step()


@pytest.mark.parametrize("layout", ["chain", "nested", "fsdp2"])
@on_ranks(4)
def test_optimizers_that_are_stepped_in_unlike_order_are_told_so(layout: str) -> None:
    """Rank 3 steps two optimizers in the opposite order, so both steps must raise an error. Afterwards, all ranks step
    the optimizers in the same order, and the results must equal those of identical optimizers that never made the
    failed steps."""
    jobs = [Job(layout_of(layout)) for _ in range(4)]
    for one in jobs:
        one.step(0)
        one.set_gradients(1)
    before = [one.held() for one in jobs]
    for one in jobs[:2][:: -1 if dist.get_rank() == 3 else 1]:
        assert "hold different plans. If there are several optimizers, step them in one order" in refusal(one.step)
    assert [unlike(held, one.held()) for one, held in zip(jobs, before, strict=True)] == [[]] * 4
    for one in jobs:
        one.step()
    assert [unlike(mine.held(), twin.held()) for mine, twin in zip(jobs[:2], jobs[2:], strict=True)] == [[], []]


def test_gradients_that_are_one_tensor_are_not_written_to() -> None:
    job = Job([{"params": [Spec("a", (8, 8)), Spec("b", (8, 8))], "variant": "cautious"}])
    gradient = normal(8, 8, seed=3)
    for p in job.specs:
        p.grad = gradient
    job.step()
    assert torch.equal(gradient, normal(8, 8, seed=3))
