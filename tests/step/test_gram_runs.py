"""The Gram route: which matrices take it, what travels, and that its update is the formula's on every layout.

It has no bits of one process to be held to: sums over shards round as the matrix is cut. So simulated ranks are
compared with the step on whole tensors within what rounding explains, in fp64 as well, where that hides no fault, and
real ranks with simulated ones bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from dense_step import DenseMuon
from drawn import layout_of, layouts, viewed
from golden.exact import matrices
from golden.table import Param
from hypothesis import given, settings
from simulated import LAYOUTS, OPTIONS, VIEWS, SimulatedRanks, cut, flat, planned, sharded, spec, stored
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmuon import Exchange, Muon, Orthogonalizer
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.orthogonalize import Products, factor_of, orthogonalize
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.orthogonalize.gram import pack_symmetric, schedule_fault, unpack_symmetric
from shardmuon.orthogonalize.schedules import schedule
from shardmuon.plan.gram import GramProgram, message_size
from shardmuon.plan.plan import Policy, make_plan
from shardmuon.plan.program import make_program
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing import layouts as engines
from shardmuon.testing.compare import groups_of
from shardmuon.testing.layouts import PARAMS
from shardmuon.testing.tolerances import KELLER, assert_near, relative_bound, relative_error, roundoff

# ------------------------------------------------------------------------------------------------------- the plan


def expected_route(
    layout: ParamLayout, number: int, at: Tensor, options: Mapping[str, Any]
) -> tuple[str, str, list[int]]:
    """The route of a matrix with these elements (rows, cols), by what each piece has of it, element by element. Of a
    matrix that no rank has whole also the reason (a pattern), and the ranks of which one is named there: those whose
    pieces are not of whole lines, or those that share a piece and not all."""
    numbers = torch.arange(math.prod(layout.view.shape)).view(layout.view.shape)
    pieces = [
        (rank, torch.isin(at, stored([one._replace(local=(0,) * len(one.local))], numbers)))
        for rank, of_rank in zip(layout.ranks, layout.held, strict=True)
        for one in of_rank
    ]
    of_ranks = dict.fromkeys(layout.ranks, torch.zeros(at.shape, dtype=torch.bool))
    for rank, mine in pieces:
        of_ranks[rank] = of_ranks[rank] | mine
    if any(bool(mine.all()) for mine in of_ranks.values()):
        return ("local" if sum(bool(mine.any()) for mine in of_ranks.values()) == 1 else "owner"), "", []
    rows, cols = at.shape
    cut_at: list[list[int]] = []
    for short in (dim for dim, fits in enumerate((rows <= cols, cols <= rows)) if fits):
        bad = [rank for rank, has in pieces if not torch.equal(has.any(short), has.all(short))]
        if _repeats_along(short, options) and not _single_columns(number, options):
            bad = [rank for rank, has in pieces if has.any()]  # each repeat is a line by itself
        cut_at.append(bad)
    if all(cut_at):
        return "owner", _CUT, cut_at[0]
    shards = {rank: [has.flatten().tolist() for r, has in pieces if r == rank and has.any()] for rank in layout.ranks}
    unlike = [
        rank
        for rank, shard in shards.items()
        if any(shard != other and any(piece in other for piece in shard) for other in shards.values())
    ]
    return ("owner", _UNLIKE, unlike) if unlike else ("gram", "on request", [])


_CUT = r"rank (\d+) holds \d+x\d+ of it: it is cut along its short dim"
_UNLIKE = r"ranks (\d+) and \d+ share a piece of it, but not all"


def _single_columns(number: int, options: Mapping[str, Any]) -> bool:
    """True if a matrix's repeats are columns that lie one by one."""
    sizes = options.get("split_sizes", (0,))
    return bool(options["transposed"] and sizes[number % len(sizes)] == 1)


def _repeats_along(dim: int, options: Mapping[str, Any]) -> bool:
    """True if a dim of the matrices holds repeats of a block."""
    several = options.get("split_groups", 1) > 1 and len(options["split_sizes"]) > 1
    return several and dim == 0


def test_matrices_take_the_route_that_no_rank_has_whole_and_all_have_in_whole_lines() -> None:
    """Random tensors, read in every way, on random layouts, against their elements one by one."""
    found = set()

    @settings(max_examples=600)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        shape, options = data.draw(viewed())
        layout = data.draw(layouts(matrix_view(shape, **options)))
        plan = make_plan([spec("w", layout, gram_fault="")], Policy("gram"))
        for item, at in zip(plan.items, matrices(Param(shape, options)), strict=True):
            route, why, ranks = expected_route(layout, item.matrix, torch.from_numpy(at.copy()), options)
            if why != _CUT and "short dim" in item.reason and _single_columns(item.matrix, options):
                continue  # a piece that begins inside of a repeat is read as two
            assert item.route == route
            assert item.cost == (item.short**3 if route == "gram" else 4 * at.size * item.short)
            said = re.match(why or "$", item.reason)
            assert said and all(int(rank) in ranks for rank in said.groups())
            found.add((item.route, why))
            assert item.owners[0] in layout.ranks
            assert item.route != "gram" or item.owners[0] in layout.tiles[item.matrix]

    check()
    assert found == {("gram", "on request"), ("owner", _CUT), ("owner", _UNLIKE), ("owner", ""), ("local", "")}


def test_the_plan_says_that_bits_depend_on_the_layout_by_this_route_alone_which_auto_never_takes() -> None:
    layout = sharded(matrix_view((64, 8192)), [range(4)], 1)
    plans = {route: make_plan([spec("w", layout, gram_fault="")], Policy(route)) for route in ("gram", "owner", "auto")}
    assert [plan.items[0].route for plan in plans.values()] == ["gram", "owner", "owner"]
    for route, plan in plans.items():
        said = "not bitwise: 1 matrices take the Gram route, whose sums over shards round" in str(plan)
        assert said == (route == "gram")


@pytest.mark.parametrize("fault", ["method='torch' has no Gram form", None])
def test_what_excludes_the_route_is_an_error_only_where_it_would_be_taken(fault: str | None) -> None:
    short, long = (spec("w", sharded(matrix_view((6, 20)), [(0, 1)], dim), gram_fault=fault) for dim in (0, 1))
    assert make_plan([short], Policy("gram")).items[0].route == "owner"
    assert make_plan([long], Policy("owner")).items[0].route == "owner"
    why = "no schedule was named" if fault is None else fault
    text = rf"^w: route='gram' is impossible for this 6x20 matrix: {why}. Use Exchange\(route='owner'\)$"
    with pytest.raises(ValueError, match=text):
        make_plan([long], Policy("gram"))


def test_buckets_keep_routes_and_kinds_apart_and_are_never_narrower_than_fp32() -> None:
    layouts = [sharded(matrix_view((6, 20)), [(0, 1)], dim) for dim in (0, 1, 1)]
    narrow = [spec(f"w{i}", layout, itemsize=2, gram_fault="") for i, layout in enumerate(layouts)]
    wide = spec("wide", layouts[1], itemsize=8, gram_fault="")
    plan = make_plan([*narrow, wide], Policy("gram"))
    assert [(b.route, b.itemsize, b.items, b.exchange) for b in plan.buckets] == [
        ("gram", 4, (1, 2), True),
        ("gram", 8, (3,), True),
        ("owner", 2, (0,), True),
    ]
    other = dataclasses.replace(plan, buckets=(plan.buckets[0]._replace(route="owner"), *plan.buckets[1:]))
    assert other.digests != plan.digests


def test_an_owners_triangles_count_against_the_bytes_of_a_bucket() -> None:
    """64 ranks send 8 x 8 triangles: 2,048 elements of each 8 x 64 matrix, of 512."""
    layout = sharded(matrix_view((8, 64)), [range(64)], 1)
    specs = [spec(f"w{i}", layout, gram_fault="") for i in range(512)]
    assert len(make_plan(specs, Policy("gram", 4 * 2048)).buckets) == 8  # of an owner's eight
    assert len(make_plan(specs, Policy("gram", 4 * 4096)).buckets) == 4
    assert len(make_plan(specs, Policy("gram", 4 * 2047)).buckets) == 8, "a single one makes a bucket of its own"


def test_a_program_sends_a_triangle_and_a_norm_once_each_way() -> None:
    """Two replicas of three shards: the owner's replica sends parts, and all others get the factor."""
    layout = sharded(matrix_view((4, 12)), [(0, 1, 2), (3, 4, 5)], 1)
    plan = make_plan([spec("w", layout, gram_fault="")], Policy("gram"))
    assert plan.items[0].owners == (0,)
    programs = [make_program(plan, plan.buckets[0], rank) for rank in range(6)]
    size = 4 * 5 // 2 + 2
    for rank, program in enumerate(programs):
        assert isinstance(program, GramProgram)
        assert program.gather.holder_splits == ((size if rank in (1, 2) else 0), 0, 0, 0, 0, 0)
        assert program.scatter.holder_splits == ((size if rank else 0), 0, 0, 0, 0, 0)
        assert program.gather.owner_splits == (0, size, size, 0, 0, 0) if rank == 0 else (0,) * 6
        assert program.scatter.owner_splits == (0, *(size,) * 5) if rank == 0 else (0,) * 6
    assert make_program(plan, plan.buckets[0], 1, missing={0}).gather.holder_splits == (0,) * 6


# ------------------------------------------------------------------------------------------------------ simulated ranks


MORE: dict[str, Any] = {
    "wide": lambda: matrix_view((4, 43)),
    "square": lambda: matrix_view((12, 12)),
    "long kernel": lambda: matrix_view((4, 5, 3, 2)),
    "single columns": lambda: matrix_view((4, 24), split_sizes=(1, 1), split_groups=12, transposed=True),
}
MORE_OPTIONS: dict[str, dict[str, Any]] = {
    "wide": {},
    "square": {},
    "long kernel": {},
    "single columns": {"split_sizes": (1, 1), "split_groups": 12, "transposed": True},
}
MORE_LAYOUTS: dict[str, Any] = {
    "flat rows": lambda view: flat(
        view, range(3), sorted(n * math.prod(view.shape[1:]) for n in (view.shape[0] // 5, view.shape[0] // 2))
    ),
    "two dims": lambda view: sharded(view, [(0, 1), (2, 3)], len(view.shape) - 2),
    "chain": lambda view: _chain(view),
    "many": lambda view: sharded(view, [range(64)], 0),
}


def _chain(view: MatrixView) -> ParamLayout:
    """Three parts of the rows on ranks (first, second), (third, second), (third): they share pieces beside others."""
    bounds = [0, view.shape[0] // 4, view.shape[0] // 2, view.shape[0]]
    rest = view.shape[1:]
    first, second, third = (Box((a, *(0,) * len(rest)), (b - a, *rest)) for a, b in itertools.pairwise(bounds))
    return layout_of(view, {0: [first, second], 2: [third, second], 3: [third]})


@cache
def _bound_of_both(shape: tuple[int, ...], dtype: torch.dtype, values: bytes) -> float:
    """Bound of what rounding explains of the two forms together, once for all layouts, which orthogonalize equal
    matrices."""
    matrix = torch.frombuffer(bytearray(values), dtype=dtype).view(shape)
    return relative_bound(KELLER, dtype, matrix) + relative_bound(KELLER, dtype, matrix, gram=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE_LAYOUTS])
def test_simulated_ranks_give_the_update_of_the_formula(layout: str, dtype: torch.dtype) -> None:
    """Every view twice, in several buckets; three steps with changing lr and gradients of any scale, of which one is
    zeros in the first and two are missing in the second. Momentum has the formula's bits, replicas have each other's:
    of pieces that ranks share beside others ("chain"), by an owner."""
    make, rule = {**VIEWS, **MORE}, {**LAYOUTS, **MORE_LAYOUTS}[layout]
    options = {**OPTIONS, **MORE_OPTIONS}
    names = [name for name in make for _ in (0, 1)]
    torch.manual_seed(7)
    weights = [torch.randn(make[name]().shape, dtype=dtype) for name in names]
    groups = Muon([{"params": [w], **options[n]} for n, w in zip(names, weights, strict=True)], lr=0.1).param_groups
    chooser, wide = Chooser("standard", dtype), range(len(names) if dtype == torch.float64 else 0)
    plan = planned([rule(make[name]()) for name in names], groups, chooser, Policy("gram", 2000), wide=wide)
    ranks, dense = SimulatedRanks(plan, weights), DenseMuon(weights, groups, chooser, wire=dtype)
    for step in range(3):
        for group in groups:
            group["lr"] = 0.1 / (1 + step)
        grads: list[Tensor | None] = [torch.randn_like(w) * (1, 1e-25, 1e25)[i % 3] for i, w in enumerate(weights)]
        if step == 0:
            grads[2] = torch.zeros_like(weights[2])
        elif step == 1:
            grads[0] = grads[5] = None
        before = ranks.full_weights()
        for one, weight in zip(dense.params, before, strict=True):  # from equal weights
            one.weight = weight.clone()
        dense.step(grads, groups)
        ranks.step(grads, groups)
        for i, (s, of, found, grad, group) in enumerate(
            zip(plan.specs, dense.params, ranks.full_weights(), grads, groups, strict=True)
        ):
            for rank, storage in cut(s.layout, of.state["momentum_buffer"]).items():
                assert torch.equal(ranks.momenta[i][rank], storage), (step, s.name)
            if grad is None:
                assert torch.equal(found, before[i]), s.name
                continue
            fed = grad.lerp(of.state["momentum_buffer"], group["momentum"])
            decayed = before[i] * (1 - group["lr"] * group["weight_decay"])
            for at in map(torch.from_numpy, matrices(Param(tuple(found.shape), options[names[i]]))):
                mine, expected, start, matrix = (t.flatten()[at.clone()] for t in (found, of.weight, decayed, fed))
                if not matrix.any():
                    assert torch.equal(mine, expected)
                    continue
                bound = _bound_of_both(tuple(matrix.shape), dtype, matrix.numpy().tobytes())
                bound += 4 * roundoff(dtype) * float(start.norm() / (start - expected).norm())
                assert_near(start - mine, start - expected, bound, f"{names[i]}, step {step}")


# ----------------------------------------------------------------------------------------------------------- real ranks


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _on_both(names: Sequence[str], dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Tensors of each layout in which this rank's bits differ from those of the first rank's simulation, and the routes
    of its buckets; three steps, gradients missing in one."""
    found, world, rank = {}, dist.get_world_size(), dist.get_rank()
    for name in names:
        row = engines.LAYOUTS[name]
        torch.manual_seed(5)
        full = {n: torch.randn(case.shape).to(dtype) for n, case in PARAMS.items()}
        params = engines.parameters(row.build(full, row.mesh(world)))
        exchange = Exchange(route="gram", bucket_bytes=6000)
        optimizer = Muon(groups_of(params, PARAMS), lr=0.05, exchange=exchange, **row.options(world), **options)
        plan = optimizer.prepare()
        groups = {n: group for group in optimizer.param_groups for n in group["param_names"]}
        ranks = SimulatedRanks(plan, [full[s.name] for s in plan.specs]) if rank == 0 else None  # what all compare with
        wrong = []
        for step in range(3):
            drawn = {n: torch.randn(w.shape).to(dtype) for n, w in full.items()}
            missing = ("tall", "experts") if step == 1 else ()
            for n, grad in row.build(drawn, row.mesh(world)).items():
                params[n].grad = None if n in missing else grad.detach()
            optimizer.step()
            simulated: list[Any] = [None]
            if ranks is not None:
                grads = [None if s.name in missing else drawn[s.name] for s in plan.specs]
                ranks.step(grads, [groups[s.name] for s in plan.specs])
                simulated = [(ranks.weights, ranks.momenta)]
            dist.broadcast_object_list(simulated)
            weights, momenta = simulated[0]
            for i, s in enumerate(plan.specs):
                p = params[s.name]
                pairs = [(_local(p), weights[i][rank])]
                if p in optimizer.state:
                    pairs.append((_local(optimizer.state[p]["momentum_buffer"]), momenta[i][rank]))
                wrong += [(step, s.name) for one, other in pairs if not torch.equal(one.flatten(), other.flatten())]
        found[name] = wrong, [bucket.route for bucket in plan.buckets if rank in bucket.ranks], optimizer.traffic
    return found


@pytest.mark.parametrize(
    ("world", "names", "dtype", "options"),
    [
        pytest.param(2, ["fsdp2", "tp row", "tp column", "tp stride 2"], torch.float32, {}, marks=pytest.mark.numeric),
        (3, ["fsdp2 dim 1", "tp", "lone strided"], torch.float32, {}),
        (4, ["tp x dp", "fsdp2+tp", "hsdp+tp", "one dim twice"], torch.float32, {}),
        (4, ["tp", "hsdp", "mcore buffers"], torch.bfloat16, {"weight_decay_mode": "cautious", "nesterov": False}),
    ],
)
def test_real_ranks_have_the_bits_of_simulated_ones(
    world: int, names: list[str], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Every shape of the comparison on the layouts of engines, over gloo; Gram buckets, each with one reduction, among
    those of owners."""
    for of_rank in get_pool(world).run(_on_both, names, dtype, options):
        for name, (wrong, routes, traffic) in of_rank.items():
            assert wrong == [], name
            assert "gram" in routes and "owner" in routes
            assert traffic.reductions == 3 * routes.count("gram")
        assert max(routes.count("gram") for _, routes, _ in of_rank.values()) > 1, "several buckets"


def _refused(options: dict[str, Any]) -> str:
    param = torch.nn.Parameter(torch.ones(6, 10))
    param.partition_dim = 1  # type: ignore[attr-defined]
    groups = [{"params": [("w", param)], "tp_group": dist.group.WORLD}]
    with pytest.raises(ValueError, match=r"w: route='gram' is impossible for this 6x20 matrix") as caught:
        Muon(groups, lr=1e-3, exchange=Exchange(route="gram"), **options).prepare()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ns_coefficients": "polar_express", "ns_steps": 8}, "8 steps multiplies small singular values by 6363"),
        ({"orthogonalizer": Orthogonalizer(method="torch")}, "method='torch' has no Gram form"),
    ],
)
def test_schedules_and_methods_without_a_gram_form_are_refused_on_every_rank(
    options: dict[str, Any], text: str, world2: RankPool
) -> None:
    assert all(text in found and "route='owner'" in found for found in world2.run(_refused, options))


# ------------------------------------------------------------------------------------------------------ the mathematics


BANDS = {0: 1e-4, 3: 5e-4}  # both forms differ by rounding only: measured below 3e-5 of a flat spectrum


@pytest.mark.parametrize("name", ["keller", "quintic", "cubic"])
@pytest.mark.parametrize("decades", BANDS)
def test_the_factor_of_the_gram_matrix_is_all_that_the_steps_do(name: str, decades: int) -> None:
    """Of spectra flat and decaying."""
    steps, generator = schedule(name).triples, torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(24, 60, generator=generator), full_matrices=False)
    x = u @ torch.diag(torch.logspace(0, -decades, 24)) @ v
    y = (x / x.norm()).unsqueeze(0)
    exact = orthogonalize(x.double().unsqueeze(0), steps, dtype=torch.float64)
    gram = Products(y.shape, y.device, torch.float32).gram_fp32(y).double()
    found = factor_of(gram, steps, Products(gram.shape, gram.device, torch.float64)).float() @ y
    assert relative_error(found, exact) < BANDS[decades]


def test_a_symmetric_matrix_goes_through_its_triangle() -> None:
    matrix = torch.arange(49.0).view(7, 7)
    matrix, packed = matrix + matrix.T, torch.zeros(28)
    pack_symmetric(matrix, packed)
    assert torch.equal(unpack_symmetric(packed, 7), matrix)
    assert [message_size(7, itemsize) for itemsize in (4, 8)] == [28 + 2, 28 + 1]


def test_schedules_that_amplify_rounding_too_much_are_known() -> None:
    assert schedule_fault(KELLER, torch.float32) == ""
    eight = schedule("polar_express", 8).triples
    fault = schedule_fault(eight, torch.float32)
    assert "8 steps" in fault and "6363" in fault
    assert schedule_fault(eight, torch.float64) == ""
