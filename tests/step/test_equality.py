"""Tests that updates are bitwise identical on every layout. All layouts run on 4 ranks, some of them also on 2 or 3
ranks, and some layouts with two- and three-axis meshes run on 8 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from every_layout import ROWS, compared
from on_ranks import on_ranks
from simulated import APART, by_rates, quick_plans
from tolerances import assert_same_update
from torch.distributed.tensor import DTensor

from shardmuon import Muon, audit
from shardmuon.auditing.report import AuditSchedule
from shardmuon.orthogonalize import Products
from shardmuon.testing.compare import Comparison
from shardmuon.testing.layouts import LAYOUTS, PARAMS, ParamCase, parameters
from shardmuon.testing.pool import RankPool

TURNED = ("in_out", "in_out_experts", "columns", "in_out_qkv", "in_out_gate_up")


def _audited(layout: str, **given: Any) -> Comparison:
    with mock.patch.object(AuditSchedule, "samples", 20):
        return Comparison.with_dense(layout, audit_every=1, **given)


# Each row gives a comparison function, layouts, and optimizer options. The function compares a step on each layout with
# a reference. On several ranks, a batch contains fewer matrices than in a single process, so a matrix may be at a
# different position in its batch and next to different matrices. The result for the matrix must depend neither on the
# position nor on the other matrices.
BITS: list[tuple[Any, tuple[str, ...], dict[str, Any]]] = [
    (Comparison.with_torch, ("ddp", "hsdp+tp"), {"nesterov": False}),
    (Comparison.with_dense, ("fsdp2", "hsdp", "ep+fsdp"), {"method": "gram"}),
    # TransformerEngine tests its own Muon with the options in the next four rows. TransformerEngine's other names for
    # learning-rate scales are aliases of scales that are tested in this file.
    (Comparison.with_dense, ("tp column",), {"adjust_lr_fn": "match_rms_adamw"}),
    (Comparison.with_dense, ("tp column",), {"dtype": torch.bfloat16, "nesterov": False, "adjust_lr_fn": "none"}),
    (
        Comparison.with_dense,
        ("tp row",),
        {"adjust_lr_fn": "spectral", "nesterov": False},
    ),
    (Comparison.with_dense, ("tp row",), {"dtype": torch.bfloat16, "adjust_lr_fn": "unit_rms_norm"}),
    # `_audited` also audits every step. The audit assembles the full matrices independently, and raises an error if the
    # step differs from its own computation on these matrices.
    (_audited, ("fsdp2+tp",), {"params": TURNED}),
    *(
        (Comparison.with_dense, ("fsdp2",), {"method": method, "ns_dtype": dtype})
        for method, dtypes in (
            ("standard", (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
            ("gram", (torch.float16, torch.float64)),
        )
        for dtype in dtypes
    ),
]


@pytest.mark.parametrize(
    ("compare", "layout", "options"),
    [
        pytest.param(compare, layout, options, id=f"{layout} {options}")
        for compare, layouts, options in BITS
        for layout in layouts
    ],
)
@on_ranks(4)
@quick_plans()
def test_an_option_has_the_bits_of_one_process(compare: Any, layout: str, options: dict[str, Any]) -> None:
    """Updates must match a single-process run bitwise. With `Comparison.with_torch`, they must also match
    torch.optim.Muon."""
    found = compare(layout, lr=0.02, steps=2, **options)
    assert (found.bitwise, found.max_difference) == (True, 0.0)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(world, name, marks=[pytest.mark.numeric] if world == 4 and at % 6 == 0 else [])
        # Loop over the number of ranks first, so that each pool of ranks is started only once.
        for world, names in ROWS.items()
        for at, name in enumerate(names)
    ],
)
def test_update_is_bitwise_equal_to_one_process_and_to_torch(layout: str, world: int) -> None:
    found = compared(layout, world)
    for name in found[0]:
        for rank, comparisons in enumerate(found):
            one = comparisons[name]
            assert one.bitwise and not one.max_difference, f"{name}, rank {rank}: {one.worst}, {one.max_difference}"


@on_ranks(4)
def test_a_row_cuts_later_tensors_as_its_builder_does() -> None:
    full = {name: torch.randn(case.shape).bfloat16() for name, case in PARAMS.items()}
    for name, row in LAYOUTS.items():
        shape = row.mesh(dist.get_world_size())
        # The first call to a layout's `build` shards tensors of zeros and caches how they are sharded. The second call
        # must shard tensors with other values in the same way.
        row.build({n: torch.zeros_like(t) for n, t in full.items()}, shape)
        cut, built = row.build(full, shape), row.builder(full, shape)
        assert [n for n in built if _seen(cut[n]) != _seen(built[n])] == [], name


def _seen(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return everything that an optimizer can read from a (sharded) tensor, and from a parameter made from this tensor,
    as a tuple that can be compared."""
    found: list[object] = []
    for t in (tensor, parameters({"": tensor})[""]):
        local = t.detach().to_local() if isinstance(t, DTensor) else t.detach()
        placed = (t.device_mesh, t.placements, t._spec) if isinstance(t, DTensor) else ()
        marks = {key: repr(value) for key, value in vars(t).items() if key not in ("_spec", "_local_tensor")}
        elements = (local.shape, local.stride(), local.dtype, local.tolist())
        found.append((type(t), isinstance(t, torch.nn.Parameter), t.shape, t.stride(), *placed, marks, elements))
    return tuple(found)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"single", "mixed meshes"}))
def test_each_matrix_is_orthogonalized_once_in_two_exchanges(layout: str) -> None:
    """A step must consist of one vote, in which ranks agree on the step, and two exchanges, one to gather matrices and
    one to scatter results. With sharded replicas, a third exchange passes results on to the other replicas. Unsharded
    replicas need only a single exchange."""
    found = [comparisons["torch fp32"] for comparisons in compared(layout, 4)]
    assert sum(one.traffic.orthogonalized for one in found) == found[0].num_matrices
    assert {(one.traffic.exchanges, one.traffic.agreements) for one in found} == {(LAYOUTS[layout].exchanges, 1)}


def _bytes(wire: torch.dtype) -> int:
    shapes = [(256, 256), (1024, 256), (256, 1024), (768, 256)] * 2
    found = Comparison.with_dense(
        "fsdp2",
        table={f"w{i}": ParamCase(shape, "") for i, shape in enumerate(shapes)},
        steps=1,
        lr=1e-3,
        ns_dtype=wire,
        # `Comparison.with_dense` sets method="standard", so the assignment of matrices to ranks does not depend on the
        # estimated cost of different methods.
    )
    return found.traffic.bytes_sent


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
def test_bytes_per_rank_stay_within_a_tenth_of_the_owner_routes_bound(world: int, wire: torch.dtype) -> None:
    found = RankPool.cached(world).run(_bytes, wire)
    elements = 2 * 256 * (256 + 1024 + 1024 + 768)
    bound = 2 * wire.itemsize * elements * (world - 1) / world**2
    assert max(found) <= 1.1 * bound
    assert sum(found) == round(world * bound)


@on_ranks(2)
def test_products_that_round_more_on_one_rank_are_seen_on_all() -> None:
    """Negative control: on rank 1, matmul results are rounded to fp16 in the sharded step but not in the unsharded
    reference, so every rank must report a difference."""
    init, sharded = Products.__init__, [False]
    step = Muon.step

    def rounding(self: Products, *args: Any) -> None:
        init(self, *args)
        product = self.addmm
        if dist.get_rank() == 1 and sharded[0]:
            self.addmm = lambda *operands, out, **factors: out.copy_(product(*operands, out=out, **factors).half())

    def stepped(self: Muon, *args: Any) -> Any:
        sharded[0] = isinstance(self.param_groups[0]["params"][0], DTensor)
        return step(self, *args)

    with mock.patch.object(Products, "__init__", rounding), mock.patch.object(Muon, "step", stepped):
        found = Comparison.with_dense("fsdp2", method="standard", ns_dtype=torch.float32, lr=0.02)
    assert not found.bitwise
    # Rounding to fp16 changes a value between 1/2 and 1 by up to 2^-12, so the largest reported difference must exceed
    # half of that.
    assert found.max_difference > 2.0**-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)])
def test_bf16_products_are_torchs_within_their_rounding(shape: tuple[int, int], dtype: torch.dtype) -> None:
    # Both optimizers round every matmul to bf16, but `Muon` normalizes a matrix before casting it to bf16, and
    # torch.optim.Muon normalizes it afterwards, so some roundings differ. The weights start at zero, because larger
    # bf16 weights would round the update away.
    start = torch.zeros(shape, dtype=dtype)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for param, make in (
        (ours, partial(Muon, method="standard", ns_dtype=torch.bfloat16)),
        (theirs, torch.optim.Muon),
    ):
        param.grad = grad.clone()
        make([param], lr=1.0, weight_decay=0.0).step()
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    assert not torch.equal(ours, theirs)
    assert_same_update(
        ours, theirs, before=start, lr=1.0, scale=scale, dtype=torch.bfloat16, matrix=grad, what="torch.optim.Muon's"
    )


@on_ranks(2)
def test_replicas_with_hardly_a_network_repeat_the_work_and_move_nothing() -> None:
    with by_rates(APART):
        found = Comparison.with_dense("ddp", lr=0.02)
    assert found.bitwise
    assert (found.traffic.exchanges, found.traffic.orthogonalized) == (0, found.num_matrices)


@on_ranks(3)
def test_replicas_that_exchange_nothing_agree_before_a_step() -> None:
    """All ranks must raise an error before a step if one rank lacks a gradient, or if only one rank requested an
    audit."""
    params = {
        name: torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
        for name, shape in {"a": (8, 6), "b": (3, 7), "c": (5, 5)}.items()
    }
    optimizer = Muon(list(params.items()), process_group=dist.group.WORLD, lr=0.1)
    # Autocast must have no effect. Under it, torch cannot concatenate bf16 tensors.
    with by_rates(APART), torch.autocast("cpu", torch.float16):
        optimizer.prepare()
    said = []
    for number, missing in enumerate((None, "b", "b", None)):
        for i, p in enumerate(params.values()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i), dtype=p.dtype)
        before = [p.detach().clone() for p in params.values()]
        if number == 1 and dist.get_rank() == 1:
            params["b"].grad = None
        if number == 2 and dist.get_rank() == 0:
            audit(optimizer)
        if missing is None:
            optimizer.step()
            continue
        with pytest.raises(ValueError, match=r"ranks") as caught:
            optimizer.step()
        said.append(str(caught.value))
        assert all(torch.equal(p, b) for p, b in zip(params.values(), before, strict=True))
        optimizer.audits.asked = None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.detach() for p in params.values()])
    assert all(torch.equal(p, q) for theirs in everyone for p, q in zip(theirs, everyone[0], strict=True))
    assert said[0].startswith("b: ranks [1] have no gradient, ranks [0, 2] have a gradient")
    assert "are about to step with different options or state: rank 0: " in said[1]
    assert "audit(step" in said[1] and "copy or audit() an optimizer on every rank" in said[1]


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_fp64_gradients_outside_the_range_of_fp32_keep_their_direction(scale: float) -> None:
    grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = [torch.nn.Parameter(torch.zeros(12, 20, dtype=torch.float64)) for _ in range(2)]
    params[0].grad, params[1].grad = grad, grad * scale
    for p in params:
        Muon([p], lr=1.0, ns_dtype=torch.float64).step()
    assert_same_update(
        params[1], params[0], before=torch.zeros_like(grad), lr=1.0, dtype=torch.float64, matrix=grad, what="scaled"
    )
