"""The Gram route in the new core: it is taken for the matrices for which the old planner takes it, with its bits."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardmuon.planning import layout as old_layout
from shardmuon.planning import plan as old_plan
from shardmuon.planning import types as old_types
from shardmuon.planning import views as old_views
from simulated import LAYOUTS, VIEWS, SimulatedRanks, flat, matrices_of, settings_for, sharded
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmuon import Exchange, Muon
from shardmuon.comm.exchange import Traffic
from shardmuon.layout.pieces import Box, FlatRange, Held, Piece
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.orthogonalize import orthogonalize
from shardmuon.plan.gram import GramProgram
from shardmuon.plan.plan import Bucket, Gram, Plan, Policy, Spec, make_plan
from shardmuon.plan.program import make_program
from shardmuon.step.bucket import Bound, Work
from shardmuon.step.commit import make_groups, run_buckets
from shardmuon.stepping.settings import settings_of
from shardmuon.testing import get_pool
from shardmuon.testing import layouts as engines
from shardmuon.testing.cases import PARAMS
from shardmuon.testing.compare import groups_of, relative_difference

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------- both planners


def spec_of(name: str, layout: ParamLayout, fault: str = "", itemsize: int = 4) -> Spec:
    matrices = layout.view.matrices
    costs = tuple(m.rows * m.cols * min(m.rows, m.cols) for m in matrices)
    grams = tuple(Gram(min(m.rows, m.cols) ** 3, fault) for m in matrices)
    return Spec(
        name, layout, ("standard float32",) * len(matrices), costs, itemsizes=(itemsize,) * len(matrices), grams=grams
    )


def as_old(spec: Spec, options: Mapping[str, Any]) -> old_types.ParamSpec:
    layout = spec.layout
    recipes = tuple(
        old_types.Recipe(how, cost, "", gram.cost, gram.fault)
        for how, cost, gram in zip(spec.hows, spec.costs, spec.grams, strict=True)
    )
    view = old_views.matrix_view(layout.view.shape, **options)
    return old_types.ParamSpec(spec.name, old_layout.layout_of(view, layout.ranks, layout.held), recipes)


def draw_view(draw: random.Random) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A shape, and options that read it as matrices."""
    kind, side = draw.choice(["auto", "stack", "flatten", "kernel"]), 0
    sizes, groups = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))], draw.randint(1, 3)
    if kind in ("auto", "stack"):
        side = draw.randint(0, 1)
    options: dict[str, Any] = {"transposed": draw.random() < 0.3, "split_dim": side}
    length, other = sum(sizes) * groups, draw.randint(1, 16)
    if draw.random() < 0.6:
        options |= {"split_sizes": tuple(sizes), "split_groups": groups}
    sides = (other, length) if side else (length, other)
    if kind == "stack":
        return (draw.randint(1, 3), *sides), {**options, "view": "stack"}
    if kind == "auto":
        return sides, options
    more = (draw.randint(1, 3),) if kind == "flatten" else (draw.randint(1, 3), 2)
    return (length, other, *more), {**options, "view": "flatten"}


def draw_pieces(draw: random.Random, shape: tuple[int, ...]) -> list[Piece]:
    """A partition in boxes, mostly along one dim; in flat ranges; in flat ranges of boxes (of two dims)."""
    kind = draw.choice(["boxes", "boxes", "boxes", "ranges", "ranges of boxes"])
    if kind == "ranges" or (kind == "ranges of boxes" and len(shape) > 2):
        unit = draw.choice([1, math.prod(shape[1:])])  # whole rows, or not
        cuts = sorted(unit * draw.randint(0, math.prod(shape) // unit) for _ in range(draw.randint(1, 3)))
        return [FlatRange(a, b) for a, b in itertools.pairwise([0, *cuts, math.prod(shape)])]
    boxes = [((0,) * len(shape), shape)]
    dims = [draw.randrange(len(shape))] if draw.random() < 0.8 else range(len(shape))
    for _ in range(draw.randint(0, 3)):
        offset, size = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.choice(dims)
        at = draw.randint(0, size[dim])
        first, rest = ((*size[:dim], n, *size[dim + 1 :]) for n in (at, size[dim] - at))
        boxes += [(offset, first), ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), rest)]
    found = [Box(offset, size) for offset, size in boxes]
    if kind == "boxes":
        return list(found)
    halves = [(box, draw.randint(0, box.numel // box.size[1]) * box.size[1]) for box in found if box.numel]
    return [FlatRange(a, b, box) for box, at in halves for a, b in ((0, at), (at, box.numel))]


def draw_layout(draw: random.Random, view: MatrixView) -> ParamLayout:
    """Pieces on up to five ranks; some on several, and several on some."""
    held: list[list[Held]] = [[] for _ in range(draw.randint(1, 5))]
    for piece in draw_pieces(draw, view.shape):
        for rank in draw.sample(range(len(held)), 1 if draw.random() < 0.7 else draw.randint(1, len(held))):
            local = (0,) * len(view.shape) if isinstance(piece, Box) else (0,)
            held[rank].append(Held(piece, local))
    return ParamLayout(view, tuple(range(len(held))), tuple(tuple(of_rank) for of_rank in held))


@pytest.mark.parametrize("seed", range(8))
def test_both_planners_take_the_route_for_the_same_matrices(seed: int) -> None:
    """150 random tensors, read in every way, on random layouts. What does not take it says why in the same words."""
    draw, found = random.Random(seed), set()
    for _ in range(150):
        shape, options = draw_view(draw)
        spec = spec_of("w", draw_layout(draw, matrix_view(shape, **options)))
        new, old = make_plan([spec], Policy("gram")), old_plan.make_plan([as_old(spec, options)], _old_policy())
        repeats = options.get("split_groups", 1) > 1
        single = repeats and options["split_dim"] == 1 and 1 in options["split_sizes"]
        for a, b in zip(new.items, old.items, strict=True):
            reasons = [a.reason, b.reason]
            if single and (a.route, b.route) == ("owner", "gram"):
                continue  # one fragment, however many columns between its own lie elsewhere; several tiles
            if repeats and len(options["split_sizes"]) == 1 and (a.route, b.route) == ("gram", "owner"):
                continue  # repeats of one block are no repeats
            assert (a.route, a.cost) == (b.route, b.cost), (shape, options, spec.layout.held)
            if len(shape) > 2 or repeats:  # a tile need not have a fragment's size
                reasons = [re.sub(r"\d+x\d+", "", why) for why in reasons]
            assert reasons[0] == reasons[1]
            found.add((a.route, bool(a.reason)))
            assert a.route != "gram" or a.owners[0] in spec.layout.tiles[a.matrix]
    assert found == {("gram", True), ("owner", True), ("owner", False), ("local", False)}


def _old_policy(bucket_bytes: int = 32 * 2**20, itemsize: int = 4) -> old_types.Policy:
    return old_types.Policy("gram", bucket_bytes, itemsize)


@pytest.mark.parametrize("fault", ["method='torch' has no Gram form", None])
def test_what_excludes_the_route_is_an_error_only_where_it_would_be_taken(fault: str | None) -> None:
    short, long = (spec_of("w", sharded(matrix_view((6, 20)), [(0, 1)], dim), fault or "") for dim in (0, 1))
    if fault is None:
        fault, short, long = "no schedule was named", short._replace(grams=()), long._replace(grams=())
    assert make_plan([short], Policy("gram")).items[0].route == "owner"
    assert make_plan([long], Policy("owner")).items[0].route == "owner"
    text = rf"^w: route='gram' is impossible for this 6x20 matrix: {fault}. Use Exchange\(route='owner'\)$"
    with pytest.raises(ValueError, match=text):
        make_plan([long], Policy("gram"))
    if long.grams:
        with pytest.raises(ValueError, match=text):
            old_plan.make_plan([as_old(long, {})], _old_policy())


def test_buckets_keep_routes_and_kinds_apart_and_are_never_narrower_than_fp32() -> None:
    layouts = [sharded(matrix_view((6, 20)), [(0, 1)], dim) for dim in (0, 1, 1)]
    narrow = [spec_of(f"w{i}", layout, itemsize=2) for i, layout in enumerate(layouts)]
    wide = spec_of("wide", layouts[1], itemsize=8)
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
    specs = [spec_of(f"w{i}", sharded(matrix_view((8, 64)), [range(64)], 1)) for i in range(512)]
    assert len(make_plan(specs, Policy("gram", 4 * 2048)).buckets) == 8  # of an owner's eight
    assert len(make_plan(specs, Policy("gram", 4 * 4096)).buckets) == 4
    assert len(make_plan(specs, Policy("gram", 4 * 2047)).buckets) == 8, "a single one makes a bucket of its own"


def test_a_program_sends_a_triangle_and_a_norm_once_each_way() -> None:
    """Two replicas of three shards: the owner's replica sends parts, and all others get the factor."""
    layout = sharded(matrix_view((4, 12)), [(0, 1, 2), (3, 4, 5)], 1)
    plan = make_plan([spec_of("w", layout)], Policy("gram"))
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
    "single columns": lambda: matrix_view((4, 24), split_sizes=(1, 1), split_groups=12, split_dim=1),
}
MORE_LAYOUTS: dict[str, Any] = {
    "flat rows": lambda view: flat(
        view, range(3), sorted(n * math.prod(view.shape[1:]) for n in (view.shape[0] // 5, view.shape[0] // 2))
    ),
    "two dims": lambda view: sharded(view, [(0, 1), (2, 3)], len(view.shape) - 2),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE_LAYOUTS])
def test_simulated_ranks_give_the_update_of_one(layout: str) -> None:
    """Every view, in several buckets; in fp64, where a part that is added twice or never stands far above rounding."""
    rule = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    specs = [spec_of(name, rule(make()), itemsize=8) for name, make in {**VIEWS, **MORE}.items()]
    plan = make_plan(specs, Policy("gram", 4000))
    torch.manual_seed(7)
    grads = [torch.randn(s.layout.view.shape, dtype=torch.float64) for s in specs]
    ranks = SimulatedRanks(plan, [torch.zeros_like(grad) for grad in grads])
    settings = settings_for(lr=1.0, weight_decay=0.0, adjust_lr_fn="none")  # weights 0 become -update
    ranks.step(grads, settings)
    for s, grad, end in zip(specs, grads, ranks.full_weights(), strict=True):
        for x, found in zip(matrices_of(s.layout.view, grad), matrices_of(s.layout.view, -end), strict=True):
            expected = orthogonalize(x.unsqueeze(0), settings.coefficients, dtype=torch.float64)[0]
            assert relative_difference(found, expected) < 1e-4, s.name  # owners have fp32 products


# ----------------------------------------------------------------------------------------------------------- real ranks


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def translated(old: old_plan.Plan, views: Mapping[str, MatrixView]) -> Plan:
    """The new plan of the same parameters, with the owners and buckets of the old one."""
    specs = []
    for number, spec in enumerate(old.specs):
        mine = {old.items[n].matrix: b.itemsize for b in old.buckets for n in b.items if old.items[n].param == number}
        sizes = tuple(mine[matrix] for matrix in sorted(mine))
        held = [
            tuple(Held(_piece(holder.piece), holder.local) for holder in spec.layout.holders_of(rank))
            for rank in spec.layout.ranks
        ]
        layout = ParamLayout(views[spec.name], spec.layout.ranks, tuple(held))
        hows, costs = tuple(r.how for r in spec.recipes), tuple(r.cost for r in spec.recipes)
        grams = tuple(Gram(r.gram_cost, spec.gram_fault or r.gram_fault) for r in spec.recipes)
        specs.append(Spec(spec.name, layout, hows, costs, spec.batch, spec.kind, sizes, (), grams))
    plan = make_plan(specs, Policy("gram"))
    assert [(i.route, i.how, i.cost) for i in plan.items] == [(i.route, i.how, i.cost) for i in old.items]
    items = [a._replace(owners=b.owners) for a, b in zip(plan.items, old.items, strict=True)]
    buckets = [Bucket(b.ranks, b.items, b.kind, b.itemsize, b.route) for b in old.buckets]
    return dataclasses.replace(plan, items=tuple(items), buckets=tuple(buckets))


def _piece(piece: old_layout.Piece) -> Piece:
    if isinstance(piece, old_layout.Box):
        return Box(piece.offset, piece.size)
    box = Box(piece.box.offset, piece.box.size) if isinstance(piece, old_layout.FlatBox) else None
    return FlatRange(piece.start, piece.stop, box)


def _both_cores(names: Sequence[str], dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Of each layout, where this rank's bits of the new core differ from the old one's, and the routes of its buckets;
    three steps, a gradient missing in one."""
    found, world = {}, dist.get_world_size()
    for name in names:
        row = engines.LAYOUTS[name]
        torch.manual_seed(5)
        full = {n: torch.randn(case.shape).to(dtype) for n, case in PARAMS.items()}
        params = engines.parameters(row.build(full, row.mesh(world)))
        exchange = Exchange(route="gram", bucket_bytes=6000)
        optimizer = Muon(groups_of(params, PARAMS), lr=0.05, exchange=exchange, **row.options(world), **options)
        old = optimizer.prepare()
        plan = translated(old, {n: matrix_view(case.shape, **case.options) for n, case in PARAMS.items()})
        named = {n: (p, g) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
        order = [named[s.name] for s in plan.specs]
        weights = [_local(p).clone() for p, _ in order]
        momenta = [torch.zeros_like(w) for w in weights]
        settings = [settings_of(group) for _, group in order]
        mine = [bucket for bucket in plan.buckets if dist.get_rank() in bucket.ranks]
        make_groups(mine)
        wrong = []
        for step in range(3):
            grads = row.build({n: torch.randn(w.shape).to(dtype) for n, w in full.items()}, row.mesh(world))
            missing = {i for i, s in enumerate(plan.specs) if step == 1 and s.name in ("tall", "experts")}
            for n, p in params.items():
                p.grad = None if step == 1 and n in ("tall", "experts") else grads[n].detach()
            local = [None if i in missing else _local(p.grad).clone() for i, (p, _) in enumerate(order)]  # type: ignore[arg-type]
            optimizer.step()
            shapes = [tuple(w.shape) for w in weights]
            bounds = [Bound(plan, make_program(plan, b, dist.get_rank(), missing), shapes) for b in mine]
            run_buckets(bounds, Work(weights, local, momenta, settings), CPU, Traffic())
            for s, (p, _), w, m in zip(plan.specs, order, weights, momenta, strict=True):
                state = optimizer.state[p].get("momentum_buffer")
                if not torch.equal(_local(p), w) or (state is not None and not torch.equal(_local(state), m)):
                    wrong.append((step, s.name))
        found[name] = wrong, [bucket.route for bucket in mine]
    return found


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("world", "names", "dtype", "options"),
    [
        (2, ["fsdp2", "tp row", "tp stride 2"], torch.float32, {}),
        (3, ["fsdp2 dim 1", "tp", "lone strided"], torch.float32, {}),
        (4, ["fsdp2", "hsdp", "tp x dp", "tp row", "fsdp2+tp", "hsdp+tp", "one dim twice"], torch.float32, {}),
        (4, ["tp", "hsdp", "mcore buffers"], torch.bfloat16, {"weight_decay_mode": "cautious", "nesterov": False}),
    ],
)
def test_real_ranks_have_the_bits_of_the_old_core(
    world: int, names: list[str], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Every shape of the comparison on the layouts of engines, over gloo; Gram buckets among those of owners."""
    for of_rank in get_pool(world).run(_both_cores, names, dtype, options):
        for name, (wrong, routes) in of_rank.items():
            assert wrong == [], name
            assert "gram" in routes and "owner" in routes
        assert max(routes.count("gram") for _, routes in of_rank.values()) > 1, "several buckets"
