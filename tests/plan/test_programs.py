"""Tests that plans, and the programs of the ranks (copies, exchanges and batches), assign each piece of work to the
right rank and only once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Sequence

import pytest
import torch
from simulated import EACH, LAYOUTS, VIEWS, along, cut, sharded, spec

from shardmuon.comm.groups import Ranks
from shardmuon.foresight.counting import BucketCount
from shardmuon.layout.pieces import ParamLayout, Tile
from shardmuon.layout.views import Ints, matrix_view
from shardmuon.plan.plan import Item, Policy, Spec
from shardmuon.plan.planner import _lines, _shares_of, make_plan
from shardmuon.plan.program import BufferPlace, Copy, Load, Program, _joined


@pytest.mark.parametrize("policy", [Policy(bucket_bytes=1200), EACH], ids=["one owner", "one of each replica"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_of_storages_batches_and_wires_is_written_once(layout: str, policy: Policy) -> None:
    """Every element of storages, batches and exchange buffers must be written exactly once. The test counts writes,
    because writing the same value twice would not change any result."""
    cases = [(name, LAYOUTS[layout](make()), i) for name, make in VIEWS.items() for i in (0, 1)]
    plan = make_plan([spec(f"{name} {i}", of, 2, 4 << i, everywhere=i > 0) for name, of, i in cases], policy)
    weights = [cut(s.layout, torch.zeros(s.layout.view.shape)) for s in plan.specs]
    kept = [[cut(k.layout, torch.zeros(k.layout.view.shape)) for k in s.kept] for s in plan.specs]
    for p in (Program.of(plan, bucket, rank) for bucket in plan.buckets for rank in bucket.ranks):
        rank = p.rank
        batches = _written(p.batch_numel, [*_loads(p.own), *((c.sizes, c.there) for c in p.gather.copies)])
        for b in p.batches:
            matrices = batches.as_strided(b.shape, (b.stride, b.shape[2], 1), b.start)
            assert (matrices == 1).all()
            matrices.zero_()
        assert not batches.any(), "nothing between the matrices"
        results = [(c.sizes, c.here) for c in p.scatter.copies]
        wires = [_written(sum(p.gather.sent), _loads(p.gather.tiles))]
        wires += [_written(sum(p.scatter.sent), results, p.scatter.told, p.bucket.itemsize)]
        if p.relay is not None:
            passed = [*((c.sizes, c.there) for c in p.relay.passed), *((c.sizes, c.here) for c in p.relay.copies)]
            wires += [_written(sum(p.relay.sent), passed, p.relay.told, p.bucket.itemsize)]
        assert all((wire == 1).all() for wire in wires)
        for load in (*p.own, *p.scatter.tiles, *(p.relay.tiles if p.relay is not None else ())):
            _add(load.tile, plan.specs[load.param].layout, weights[load.param][rank])
        owned = [plan.items[n] for b in p.batches for n in b.items]
        found = [
            (i.param, k, of.layout.tiles[i.matrix]) for i in owned for k, of in enumerate(plan.specs[i.param].kept)
        ]
        told = [(param, k, tiles[rank][0]) for param, k, tiles in found]
        heard = (*p.scatter.heard, *(p.relay.heard if p.relay is not None else ()))
        for param, k, tile in (*told, *((load.param, load.number, load.tile) for load in heard)):
            _add(tile, plan.specs[param].kept[k].layout, kept[param][k][rank])
    stored = [*weights, *(of_stage for of_param in kept for of_stage in of_param)]
    assert all((storage == 1).all() for of in stored for storage in of.values())


def _loads(loads: Sequence[Load]) -> list[tuple[Ints, BufferPlace]]:
    return [(load.tile.sizes, load.place) for load in loads]


def _written(
    numel: int, blocks: Iterable[tuple[Ints, BufferPlace]], told: Iterable[Load] = (), itemsize: int = 1
) -> torch.Tensor:
    out = torch.zeros(numel)
    for sizes, place in blocks:
        out.as_strided(sizes, place.strides, place.start).add_(1)
    for load in told:
        out[load.place.start :][: math.ceil(load.tile.numel * 4 / itemsize)] += 1
    return out


def _add(tile: Tile, layout: ParamLayout, storage: torch.Tensor) -> None:
    offset, strides = tile.in_storage(layout.view, storage.stride())
    storage.as_strided(tile.sizes, strides, offset).add_(1)


def test_local_matrices_stay_and_scarce_ones_are_shared_out() -> None:
    experts = spec("experts", LAYOUTS["fsdp"](VIEWS["experts"]()))
    dense = [spec(f"dense {i}", LAYOUTS["hsdp 2x2"](VIEWS["plain"]())) for i in range(8)]
    plan = make_plan([experts, *dense], Policy())
    owners = [(item.route, item.owners) for item in plan.items]
    assert [*owners[:8], *sorted(owners[8:])] == [
        (way, (rank // 2,)) for way in ("local", "owner") for rank in range(8)
    ]
    assert [bucket.ranks for bucket in plan.buckets if not bucket.exchange] == [(0,), (1,), (2,), (3,)]


def test_owners_without_a_choice_count_before_the_others_choose() -> None:
    """A small matrix is stored on rank 0 alone, so rank 0 must process this matrix. The three large matrices must
    therefore go to the other ranks."""
    small = spec("small", along(matrix_view((4, 4)), 0, {0: [(0, 4)], 1: [], 2: [], 3: []}))
    large = [spec(f"large {i}", LAYOUTS["fsdp"](matrix_view((16, 16)))) for i in range(3)]
    assert [(item.owners, item.route) for item in make_plan([*large, small], Policy()).items] == [
        *(((rank,), "owner") for rank in (1, 2, 3)),
        ((0,), "local"),
    ]


def test_a_replica_is_served_by_its_own_ranks_and_what_stages_keep_does_not_part_what_a_relay_joins() -> None:
    """A rank that passes results on to the other replica must send them as one block, even if post-processing stages
    (such as NorMuon) keep state for the matrices. The gather of shards must stay within a replica. If no stage keeps
    state, the scatter of results must stay within a replica, too."""
    layout = sharded(matrix_view((16, 32)), [(0, 1), (2, 3)], 0)
    plan = make_plan([spec(f"p{i}", layout, 2) for i in range(8)], Policy())
    bare = make_plan([spec(f"p{i}", layout) for i in range(8)], Policy())
    for rank in range(4):
        program, alone = (Program.of(one, one.buckets[0], rank) for one in (plan, bare))
        assert program.relay is not None and program.relay.told
        assert len(program.relay.passed) == len(program.relay.copies) == 1
        for peer in (2, 3) if rank < 2 else (0, 1):
            assert program.gather.sent[peer] == alone.scatter.sent[peer] == 0


def test_ranks_of_one_set_digest_it_alike_whatever_other_sets_they_are_in() -> None:
    """Rank 1 belongs to two sets of ranks and packs its local matrices from both sets into the same buckets. For each
    set, rank 1 must compute the same digest of the set's part of the plan as the ranks that belong only to that set."""

    def of_set(name: str, ranks: Ranks, num_experts: int) -> list[Spec]:
        stacks = [matrix_view((num_experts, rows, 6), view="stack") for rows in (4, 8)]
        views = [*stacks, VIEWS["plain"](), VIEWS["tall"]()]
        return [spec(f"{name}{i}", sharded(view, [ranks], 0)) for i, view in enumerate(views)]

    policy = Policy(bucket_bytes=600)
    first, second = of_set("first", (0, 1), 4), of_set("second", (1, 2), 8)
    mixed = [s for pair in zip(second, first, strict=True) for s in pair]
    plans = [make_plan(specs, policy) for specs in (first, mixed, second)]
    assert {item.route for item in plans[1].items} == {"local", "owner"}
    cuts = [[b for b in plan.buckets if b.ranks == (1,)] for plan in plans]
    assert [len(of_rank) for of_rank in cuts] == [1, 3, 2] and not any(b.exchange for of_rank in cuts for b in of_rank)
    assert (plans[0].digests[0, 1], plans[2].digests[1, 2]) == (plans[1].digests[0, 1], plans[1].digests[1, 2])
    other = make_plan([*first, *of_set("second", (1, 2), 12)], policy)
    assert other.digests[0, 1] == plans[0].digests[0, 1] and other.digests[1, 2] != plans[1].digests[1, 2]


def test_every_owner_has_equal_work_in_each_share() -> None:
    """Each of 48 layers has one small and two large matrices, all sharded over 8 ranks. The bucket size lets each rank
    orthogonalize two large matrices per bucket. Within each bucket, all ranks must have equal work."""
    view, large = matrix_view((16, 16)), matrix_view((64, 16))
    layouts = [sharded(view, [range(8)], 0), sharded(large, [range(8)], 0)]
    plan = make_plan([spec(f"{i}", layouts[i % 3 > 0]) for i in range(144)], Policy(bucket_bytes=4 * 2 * 64 * 16))
    work = [
        [sum(plan.items[n].cost for n in b.items if plan.items[n].owners == (r,)) for r in range(8)]
        for b in plan.buckets
    ]
    # Each rank orthogonalizes 12 large matrices, two in each of six buckets, and six small matrices in the seventh
    # bucket.
    assert len(work) == 7
    assert all(len(set(of_bucket)) == 1 for of_bucket in work)


def test_an_owner_of_a_matrix_on_1024_ranks_makes_a_handful_of_copies() -> None:
    layout = sharded(matrix_view((4096, 1024)), [range(1024)], 0)
    uneven = sharded(matrix_view((4099, 1024)), [range(1024)], 0)
    plan = make_plan([spec(f"p{i}", layout if i % 7 else uneven) for i in range(72)], Policy())
    for bucket in plan.buckets:
        program = Program.of(plan, bucket, plan.items[bucket.items[0]].owners[0])
        assert sum(program.gather.came) > 0 and len(program.gather.copies) <= 4


@pytest.mark.parametrize("seed", range(10))
def test_shares_divide_the_work_of_each_owner_evenly_within_the_size_of_a_bucket(seed: int) -> None:
    draw = random.Random(seed)
    sides = draw.choice([[4], [4, 6, 8], list(range(1, 40))])
    items = [
        Item(n, 0, draw.choice(sides), draw.choice(sides), (draw.randrange(3),), "owner", "", draw.randrange(100))
        for n in range(draw.randrange(1, 60))
    ]
    lines, longest = _lines(items), max(map(len, _lines(items)))
    for most, least in itertools.product((1, 16, 47, 100, 500, 10**5), (1, 4)):
        shares = _shares_of(lines, most, least)
        needed = [min(len(line), max(least, -(-sum(item.numel for item in line) // most))) for line in lines]
        assert min(least, longest) <= len(shares) <= min(2 * max(needed), longest)
        assert most < 10**5 or len(shares) == min(least, longest)
        assert sorted(item.param for share in shares for item in share) == list(range(len(items)))
        for line in lines:
            parts = [part for share in shares if (part := [item for item in share if item in line])]
            assert [item for part in parts for item in part] == line
            assert all(len(part) == 1 or sum(item.numel for item in part) <= most for part in parts)
            if most == 10**5:  # no owner has this many elements, so the limit has no effect
                assert len(parts) == min(len(shares), len(line))
                work = [sum(item.cost for item in part) for part in parts]
                assert len(shares) * (max(work) - line[0].cost) <= sum(work)


PLAIN = LAYOUTS["fsdp"](VIEWS["plain"]())


@pytest.mark.parametrize("change", ["owner", "member", "joined", "order", "kind", "owners of local", "how of local"])
def test_a_digest_tells_owners_and_exchanges_and_what_becomes_of_local_matrices(change: str) -> None:
    dense = [spec(f"dense {i}", PLAIN) for i in range(8)]
    plan = make_plan([*dense, spec("local", LAYOUTS["one"](VIEWS["plain"]()))], Policy(bucket_bytes=480))
    local, a, b = plan.buckets
    assert a.exchange and b.exchange and len(a.items) == len(b.items) == 4
    buckets = {
        "member": (a._replace(items=a.items[1:]), b._replace(items=(*b.items, a.items[0]))),
        "joined": (a._replace(items=a.items + b.items),),
        "order": (b, a),
        "kind": (a._replace(kind="cuda"), b),
    }
    number, item = {
        "owner": (0, plan.items[0]._replace(owners=(3,))),
        "owners of local": (8, plan.items[8]._replace(owners=(0, 2))),
        "how of local": (8, plan.items[8]._replace(choice="gram float32")),
    }.get(change, (0, plan.items[0]))
    items = (*plan.items[:number], item, *plan.items[number + 1 :])
    other = dataclasses.replace(plan, items=items, buckets=(local, *buckets.get(change, (a, b))))
    of_local = change.endswith("local")
    assert (other.digests[0, 1, 2, 3] == plan.digests[0, 1, 2, 3]) == of_local
    assert (other.digests[2,] == plan.digests[2,]) != of_local


@pytest.mark.parametrize(("replicas", "shards"), [(2, 4), (4, 2), (1, 8)])
@pytest.mark.parametrize(("num", "most"), [(60, 1.05), (8, 1.25)])
def test_ranks_send_equally_much(replicas: int, shards: int, num: int, most: float) -> None:
    layout = sharded(matrix_view((16, 32)), [range(r * shards, (r + 1) * shards) for r in range(replicas)], 0)
    counts = BucketCount.of_plan(make_plan([spec(f"p{i}", layout) for i in range(num)], Policy()), int)
    sent = [sum(side.bytes for bucket in buckets for side in bucket.sent) for buckets in counts.values()]
    assert max(sent) / (sum(sent) / len(sent)) <= most


def _copies(num: int, sizes: tuple[int, int], here: tuple[int, ...], there: tuple[int, ...]) -> list[Copy]:
    """Return `num` instructions that copy blocks of the same size between two buffers. `here` and `there` give the
    positions in the two buffers: (step between blocks, row stride), optionally followed by the position of the first
    element."""
    (step, row, *first), (far_step, far_row, *far_first) = here, there
    starts = [(sum(first) + step * n, sum(far_first) + far_step * n) for n in range(num)]
    return [Copy(sizes, BufferPlace(a, (row, 1)), BufferPlace(b, (far_row, 1))) for a, b in starts]


def test_copies_join_in_rows_and_by_shape_and_never_with_a_stride_of_zero() -> None:
    """Copies of evenly spaced blocks must be joined into one strided copy, unless a stride of the joined copy would be
    zero. If copies of two shapes are interleaved, those of each shape must be joined."""
    place = BufferPlace
    assert _joined(_copies(6, (2, 8), (16, 8), (16, 8))) == (Copy((96,), place(0, (1,)), place(0, (1,))),)
    columns = _copies(6, (4, 2), (8, 2), (2, 12))
    assert _joined(columns) == (Copy((6, 4, 2), place(0, (8, 2, 1)), place(0, (2, 12, 1))),)
    same = [Copy((4,), place(4 * n, (1,)), place(0, (1,))) for n in range(3)]
    assert _joined(same) == tuple(same)
    of_matrices = [_copies(5, (2, n), (32, n, 12 * k), (2 * n, n, 60 * k)) for k, n in enumerate((6, 6, 4))]
    assert _joined([copy for of_sender in zip(*of_matrices, strict=True) for copy in of_sender]) == (
        Copy((5, 2, 12), place(0, (32, 12, 1)), place(0, (12, 60, 1))),
        Copy((5, 8), place(24, (32, 1)), place(120, (8, 1))),
    )


def test_matrices_of_one_parameter_may_have_wires_of_unlike_widths() -> None:
    """One of the two matrices of a fused weight is too small for half-precision matmuls, so it must be exchanged in a
    wider dtype and in a separate bucket."""
    layout = sharded(matrix_view((12, 10), split_sizes=(8, 4)), [(0, 1)], 0)
    plan = make_plan([spec("qk", layout)._replace(itemsizes=(2, 4))], Policy())
    assert {(bucket.itemsize, bucket.items) for bucket in plan.buckets} == {(2, (0,)), (4, (1,))}
