"""The Gram route: the shards stay, one reduction, the owner route's update within rounding; and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from simulated import SimulatedRanks, group_of, spec
from spectra import exact_steps
from torch import Tensor, nn

from shardmuon import Exchange, Muon, Orthogonalizer
from shardmuon.auditing import audit
from shardmuon.layout.pieces import Box, Held
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.orthogonalize import Products, factor_of, orthogonalize
from shardmuon.orthogonalize.gram import pack_symmetric, schedule_fault, unpack_symmetric
from shardmuon.orthogonalize.schedules import schedule
from shardmuon.plan.cuts import cut_faults
from shardmuon.plan.gram import message_size
from shardmuon.plan.plan import Policy, RouteOption, Spec, make_plan
from shardmuon.plan.program import make_program
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.compare import compare_with_dense, recovered_update, relative_difference
from shardmuon.testing.layouts import LAYOUTS, parameters

KELLER = schedule("keller").triples
BAND = 1e-4  # the Gram form and the standard one differ by rounding only; measured below 3e-5


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------ the mathematics


@pytest.mark.parametrize("name", ["keller", "quintic", "cubic"])
@pytest.mark.parametrize("spectrum", ["gaussian", "decaying"])
def test_the_factor_of_the_gram_matrix_is_all_that_the_steps_do(name: str, spectrum: str) -> None:
    steps = schedule(name).triples
    x = _normal(24, 60, seed=0)
    if spectrum == "decaying":
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        x = u @ torch.diag(torch.logspace(0, -3, 24)) @ v
    y = (x / x.norm()).unsqueeze(0)
    exact = orthogonalize(x.double().unsqueeze(0), steps, dtype=torch.float64)
    gram = Products(y.shape, y.device, torch.float32).gram_fp32(y).double()
    found = factor_of(gram, steps, Products(gram.shape, gram.device, torch.float64)).float() @ y
    assert relative_difference(found.double(), exact) < (BAND if spectrum == "gaussian" else 5 * BAND)


def test_a_symmetric_matrix_goes_through_its_triangle() -> None:
    matrix = _normal(7, 7, seed=0)
    matrix = matrix + matrix.T
    packed = torch.zeros(28)
    pack_symmetric(matrix, packed)
    assert torch.equal(unpack_symmetric(packed, 7), matrix)
    assert message_size(7, 4) == 28 + 2
    assert message_size(7, 8) == 28 + 1


def test_schedules_that_amplify_rounding_too_much_are_known() -> None:
    assert schedule_fault(KELLER, torch.float32) == ""
    fault = schedule_fault(schedule("polar_express", 8).triples, torch.float32)
    assert "8 steps" in fault and "6363" in fault
    assert schedule_fault(schedule("polar_express", 8).triples, torch.float64) == ""


# ---------------------------------------------------------------------------------------------- the route on real ranks

CUT = {"up": ((32, 96), 1), "down": ((96, 32), 0), "square": ((40, 40), 0), "square too": ((40, 40), 1)}


def _both_routes(layout_scale: float, options: dict[str, Any]) -> tuple[float, dict[str, int], dict[str, int], int]:
    """The same steps by both routes. Shards have uneven sizes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    updates: dict[str, dict[str, Tensor]] = {}
    traffic = {}
    owned = 0
    for route in ("owner", "gram"):
        params = {}
        for i, (name, (shape, dim)) in enumerate(CUT.items()):
            parts = _normal(*shape, seed=i).split(_sizes(shape[dim], world), dim)
            params[name] = nn.Parameter(parts[rank].clone())
        groups = [{"params": [(n, params[n])], "partition_dim": CUT[n][1]} for n in CUT]
        optimizer = Muon(
            groups, lr=1.0, weight_decay=0.0, tp_group=dist.group.WORLD, exchange=Exchange(route=route), **options
        )
        for step in range(3):
            before = {n: p.detach().clone() for n, p in params.items()}
            for i, (name, (shape, dim)) in enumerate(CUT.items()):
                grad = layout_scale * _normal(*shape, seed=10 * step + i)
                params[name].grad = grad.split(_sizes(shape[dim], world), dim)[rank].clone()
            earlier = optimizer.traffic.since(type(optimizer.traffic)())
            optimizer.step()
        updates[route] = {n: recovered_update(before[n], p.detach(), 1.0, 1.0) for n, p in params.items()}
        found = optimizer.traffic.since(earlier)
        traffic[route] = {
            "exchanges": found.exchanges,
            "reductions": found.reductions,
            "bytes": found.bytes_sent,
            "runs": found.orthogonalized,
        }
        assert {item.route for item in optimizer.plan.items} == {route}
        owned = sum(rank in item.owners for item in optimizer.plan.items)
    worst = max(relative_difference(updates["gram"][n], updates["owner"][n]) for n in CUT)
    return worst, traffic["owner"], traffic["gram"], owned


def _sizes(total: int, parts: int) -> list[int]:
    """Uneven shards."""
    sizes = [total // parts] * parts
    sizes[0], sizes[-1] = sizes[0] - 3, sizes[-1] + 3 + total % parts
    return sizes


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_it_gives_the_owner_routes_update_with_one_reduction(world: int, scale: float) -> None:
    options = {"orthogonalizer": Orthogonalizer(method="standard", dtype="float32")}
    found = get_pool(world).run(_both_routes, scale, options)
    sizes = [4 * message_size(min(shape), 4) for shape, _ in CUT.values()]
    for worst, owner, gram, owned in found:
        assert 0.0 < worst < BAND
        assert gram["reductions"] == 1
        assert owner["reductions"] == 0
        assert gram["exchanges"] == owner["exchanges"] == 2
        assert gram["runs"] == owned
    assert sum(gram["runs"] for _, _, gram, _ in found) == len(CUT)
    # every rank but the owner sends its part of R and gets Q
    assert sum(gram["bytes"] for _, _, gram, _ in found) == 2 * (world - 1) * sum(sizes)


def _against_dense(layout: str, route: str, params: list[str]) -> tuple[float, int, int]:
    found = compare_with_dense(
        layout,
        params=params,
        exchange=Exchange(route=route),
        orthogonalizer=Orthogonalizer(method="standard", dtype="float32"),
        lr=0.5,
    )
    return found.max_difference, found.traffic.reductions, found.traffic.orthogonalized


# cut along rows: only what has more rows than columns may take the route, the others go to owners in the same plan
@pytest.mark.parametrize("layout", ["tp column", "tp stride 2", "fsdp2", "hsdp", "tp x dp", "lone strided"])
def test_it_serves_every_layout_that_cuts_the_long_dim(layout: str, world4: RankPool) -> None:
    params = ["square", "tall", "wide", "few_cols", "experts", "gate_up", "qkv"]
    found = world4.run(_against_dense, layout, "gram", params)
    assert max(worst for worst, _, _ in found) < BAND
    assert {reductions for _, reductions, _ in found} == {1}
    assert sum(runs for _, _, runs in found) == 7 - 3 + 8 + 2 + 3  # each of the 17 matrices once


def _replicas_keep_equal_bits() -> bytes:
    row = LAYOUTS["tp x dp"]
    full = {"w": _normal(24, 10, seed=0)}
    params = parameters(row.build(full, row.mesh(4)))
    optimizer = Muon(list(params.items()), lr=1e-3, exchange=Exchange(route="gram"), **row.options(4))
    for step in range(2):
        params["w"].grad = row.build({"w": _normal(24, 10, seed=step)}, row.mesh(4))["w"].detach()
        optimizer.step()
    assert [item.route for item in optimizer.plan.items] == ["gram"]
    return params["w"].detach().numpy().tobytes()


def test_replicas_of_a_shard_keep_equal_bits(world4: RankPool) -> None:
    found = world4.run(_replicas_keep_equal_bits)
    assert found[0] == found[2] != found[1] == found[3]


def _missing_and_zero() -> tuple[bool, bool, float]:
    rank = dist.get_rank()
    params = [nn.Parameter(_normal(6, 20, seed=i).chunk(2, 1)[rank].clone()) for i in range(3)]
    group = {"params": params, "partition_dim": 1}
    optimizer = Muon([group], lr=0.1, weight_decay=0.0, tp_group=dist.group.WORLD, exchange=Exchange(route="gram"))
    params[0].grad = torch.zeros_like(params[0])
    params[2].grad = _normal(6, 20, seed=9).chunk(2, 1)[rank].clone()
    before = [p.detach().clone() for p in params]
    optimizer.step()
    same = [torch.equal(b, p) for b, p in zip(before, params, strict=True)]
    return same[0], same[1], float((params[2].detach() - before[2]).norm())


def test_zeros_stay_zeros_and_a_matrix_without_gradient_is_left_alone(world2: RankPool) -> None:
    for zero, missing, change in world2.run(_missing_and_zero):
        assert zero and missing
        # a step of lr 0.1 on 6 orthogonal rows, whose singular values become 0.68 or more
        assert change > 0.1 * (6**0.5) * 0.5


# ------------------------------------------------------------------------------------------------------ what is refused


def _audited(route: str) -> tuple[set[str], list[str]]:
    """Findings of an audit, which knows no routes, in the second step."""
    rank = dist.get_rank()
    params = [nn.Parameter(_normal(64, 24, seed=i).chunk(2, 0)[rank].clone()) for i in range(3)]
    group = {"params": params, "partition_dim": 0}
    optimizer = Muon([group], lr=0.02, tp_group=dist.group.WORLD, exchange=Exchange(route=route))  # type: ignore[arg-type]
    check = None
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = _normal(64, 24, seed=10 * step + i).chunk(2, 0)[rank].clone()
        check = audit(optimizer, samples=3) if step else None
        optimizer.step()
    assert check is not None
    return {f.name for f in check.report.findings}, [row.status for row in check.report.matrices]


@pytest.mark.numeric
def test_an_audit_finds_muons_update_on_the_gram_route(world2: RankPool) -> None:
    assert world2.run(_audited, "gram") == [(set(), ["ok"] * 3)] * 2


def _plans() -> list[bool]:
    """True where the printed plan of each route says that its bits depend on the layout."""
    said = []
    for route in ("gram", "owner", "auto"):
        group = {"params": [nn.Parameter(torch.ones(4, 6))], "partition_dim": 1}
        exchange = Exchange(route=route)  # type: ignore[arg-type]
        plan = Muon([group], lr=1e-3, tp_group=dist.group.WORLD, exchange=exchange).prepare()
        said.append("not bitwise: 1 matrices take the Gram route, whose sums over shards round" in str(plan))
    return said


def test_the_plan_says_that_bits_depend_on_the_layout_by_this_route_alone(world2: RankPool) -> None:
    assert world2.run(_plans) == [[True, False, False]] * 2


def _refused(options: dict[str, Any]) -> str:
    param = nn.Parameter(torch.ones(6, 10))
    optimizer = Muon(
        [{"params": [("w", param)], "partition_dim": 1}],
        lr=1e-3,
        tp_group=dist.group.WORLD,
        exchange=Exchange(route="gram"),
        **options,
    )
    with pytest.raises(ValueError, match=r"w: route='gram' is impossible for this 6x20 matrix") as caught:
        optimizer.prepare()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ns_coefficients": "polar_express", "ns_steps": 8}, "8 steps multiplies small singular values by 6363"),
        ({"orthogonalizer": Orthogonalizer(method="torch")}, "method='torch' has no Gram form"),
        ({"orthogonalizer": Orthogonalizer(method="reference")}, "method='reference' has no Gram form"),
    ],
)
def test_schedules_and_methods_without_a_gram_form_are_refused_on_every_rank(
    options: dict[str, Any], text: str, world2: RankPool
) -> None:
    assert all(text in found and "route='owner'" in found for found in world2.run(_refused, options))


# ------------------------------------------------------------------------------------------------------------- the plan


def _cut(rows: int, cols: int, dim: int, parts: int) -> ParamLayout:
    sizes = [len(part) for part in np.array_split(np.arange((rows, cols)[dim]), parts)]
    held, at = [], 0
    for size in sizes:
        offset, shape = ((at, 0), (size, cols)) if dim == 0 else ((0, at), (rows, size))
        held.append((Held(Box(offset, shape), (0, 0)),))
        at += size
    return ParamLayout(matrix_view((rows, cols)), tuple(range(parts)), tuple(held))


def _specs(layouts: list[ParamLayout]) -> list[Spec]:
    return [spec(f"w{i}", layout, gram_fault="") for i, layout in enumerate(layouts)]


def _plan(layouts: list[ParamLayout], route: RouteOption = "auto") -> list[tuple[str, str]]:
    return [(item.route, item.reason) for item in make_plan(_specs(layouts), Policy(route)).items]


def test_a_short_dim_that_is_cut_goes_to_an_owner_and_says_why() -> None:
    (route, why), (other, _) = _plan([_cut(64, 16, 1, 4), _cut(64, 16, 0, 4)], route="gram")
    assert (route, other) == ("owner", "gram")
    assert "cut along its short dim" in why
    assert cut_faults(_cut(16, 16, 0, 4)) == cut_faults(_cut(16, 16, 1, 4)) == ("",)


@pytest.mark.parametrize(
    ("parts", "why"),  # of the rows that each rank stores, in order
    [
        (((0, 1), (2, 1), (2,)), "ranks 0 and 1 share a piece"),
        (((0, 1), (2,), (2,), (1, 0)), "ranks 0 and 3 share a piece"),  # sums over rows in another order
        (((0, 1), (2,), (2,), (0, 1)), "on request"),
        (((0, 2), (1,)), "on request"),
    ],
)
def test_ranks_that_share_a_piece_but_not_all_go_to_an_owner_and_the_plan_says_why(
    parts: tuple[tuple[int, ...], ...], why: str
) -> None:
    """Shards of other widths, or with their rows in another order, round otherwise: replicas would drift apart."""
    held = [[Held(Box((8 * n, 0), (8, 10)), (8 * at, 0)) for at, n in enumerate(mine)] for mine in parts]
    layout = ParamLayout(matrix_view((24, 10)), tuple(range(len(parts))), tuple(map(tuple, held)))
    plan = make_plan(_specs([layout]), Policy("gram"))
    assert plan.items[0].route == ("gram" if why == "on request" else "owner")
    assert f"24x10: standard float32, {why}" in str(plan)


def test_auto_never_takes_the_gram_route() -> None:
    layouts = [_cut(8192, 64, 0, 4)]
    assert _plan(layouts, route="gram")[0][0] == "gram"
    assert _plan(layouts)[0] == _plan(layouts, route="owner")[0] == ("owner", "")


@pytest.mark.parametrize("num_ranks", [3, 64])
def test_many_simulated_ranks_give_the_update_of_one(num_ranks: int) -> None:
    layouts = [_cut(200, 6, 0, num_ranks), _cut(5, 300, 1, num_ranks), _cut(12, 12, 1, num_ranks)]
    starts = [torch.zeros(layout.view.shape) for layout in layouts]
    grads = [_normal(*layout.view.shape, seed=10 + i) for i, layout in enumerate(layouts)]
    routes: tuple[RouteOption, ...] = ("owner", "gram")
    for route in routes:
        plan = make_plan(_specs(layouts), Policy(route))
        assert {item.route for item in plan.items} == {route}
        ranks = SimulatedRanks(plan, starts)
        ranks.step(grads, [_PLAIN] * 3)
        assert ranks.orthogonalized == 3
        for grad, end in zip(grads, ranks.full_weights(), strict=True):
            assert relative_difference(-end.double(), exact_steps(grad, KELLER)) < _fp32_bound(grad)


_PLAIN = group_of(lr=1.0, weight_decay=0.0, adjust_lr_fn="none")  # weights 0 become -update


def _fp32_bound(grad: Tensor) -> float:
    """An fp32 iteration, and one on a Gram matrix in fp64 of fp32 shards, against fp64.

    Each of the 3 products of a step, the norm, the momentum and the wire round by at most 2^-24 of the largest value
    that they meet, which is below 2 (1.2 by the schedule, and sums of two terms of opposite signs). A step multiplies
    an error in a direction by |p'(s)| there, and by p(s)/s across; both are at most a = 3.4445 in each of 5 steps, so
    an error of step k grows by a^(5 - k) at most: their sum is below a^5 / (1 - 1/a) = 683 for the input's own, and
    relative to a result whose singular values are 0.68 or more. Errors of entries add in the root over rows and
    columns as the result's do, so no factor of the size remains.
    """
    a = max(abs(triple[0]) for triple in KELLER)
    growth = a ** len(KELLER) / (1 - 1 / a)
    s = torch.linalg.svdvals(grad.double()) / grad.double().norm()
    growth = min(growth, 1.2 / float(s.min()) / (1 - 1 / a))  # what lies at s cannot have grown beyond the band
    return 6 * 2 * 2.0**-24 * growth / 0.68


def test_messages_cover_what_every_rank_expects() -> None:
    plan = make_plan(_specs([_cut(8 * i + 30, 6, 0, 4) for i in range(7)]), Policy("gram"))
    for bucket in plan.buckets:
        programs = [make_program(plan, bucket, rank) for rank in bucket.ranks]
        gathers = [(p.gather.holder_splits, p.gather.owner_splits) for p in programs]
        scatters = [(p.scatter.owner_splits, p.scatter.holder_splits) for p in programs]
        for splits in (gathers, scatters):
            table = np.array([sent for sent, _ in splits])
            assert (table == np.array([received for _, received in splits]).T).all()
            assert (np.diag(table) == 0).all()
