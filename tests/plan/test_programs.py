"""Plans and programs: the programs of all ranks, carried out in one process over random layouts, views and stages."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from simulated import EACH, LAYOUTS, REPLICATED, VIEWS, cut, sharded, spec
from torch import Tensor

from shardmuon.layout.pieces import Box, Held
from shardmuon.layout.views import matrix_view
from shardmuon.plan.copies import BufferPlace, Copy, joined
from shardmuon.plan.plan import Item, Plan, Policy, Spec, _shares, make_plan
from shardmuon.plan.program import KeptLoad, Load, Program, make_program

GONE = -7.0  # where nothing has been written


def strided(buffer: Tensor, sizes: Sequence[int], place: BufferPlace) -> Tensor:
    return buffer.as_strided(sizes, place.strides, place.start)


class Ranks:
    """All ranks of a job in one process: their storages, and what programs do with them.

    Attributes:
        storages: Of each parameter, rank -> its storage.
        kept: Of each parameter and stage, rank -> its storage of what the stage keeps.
        sent: Rank -> elements that it has sent.
    """

    def __init__(self, plan: Plan, wholes: Sequence[Tensor]) -> None:
        self.plan = plan
        self.storages = [cut(spec.layout, whole) for spec, whole in zip(plan.specs, wholes, strict=True)]
        self.kept = [[cut(k.layout, torch.full(k.layout.view.shape, 1.0)) for k in spec.kept] for spec in plan.specs]
        self.sent: dict[int, int] = {}

    def step(self, rule: Callable[[Tensor], Tensor], missing: frozenset[int] = frozenset()) -> None:
        """Each matrix becomes rule(matrix); what stages keep of it grows by its largest entry."""
        for bucket in self.plan.buckets:
            programs = {rank: make_program(self.plan, bucket, rank, missing) for rank in bucket.ranks}
            self._gather(programs)
            self._compute(programs, rule)
            self._scatter(programs)

    def _view(self, load: Load, rank: int) -> Tensor:
        storage = self.storages[load.param][rank]
        offset, strides = load.tile.in_storage(self.plan.specs[load.param].layout.view, storage.stride())
        return storage.as_strided(load.tile.sizes, strides, storage.storage_offset() + offset)

    def _kept_view(self, load: KeptLoad, rank: int) -> Tensor:
        storage = self.kept[load.param][load.number][rank]
        offset, strides = load.tile.in_storage(
            self.plan.specs[load.param].kept[load.number].layout.view, storage.stride()
        )
        return storage.as_strided(load.tile.sizes, strides, storage.storage_offset() + offset).reshape(-1)

    def _gather(self, programs: Mapping[int, Program]) -> None:
        self.batches = {rank: torch.full((p.batch_numel,), GONE) for rank, p in programs.items()}
        sends = {}
        for rank, p in programs.items():
            sends[rank] = torch.full((sum(p.gather.holder_splits),), GONE)
            for load in p.foreign:
                strided(sends[rank], load.tile.sizes, load.place).copy_(self._view(load, rank))
            for load in p.own:
                strided(self.batches[rank], load.tile.sizes, load.place).copy_(self._view(load, rank))
        splits = {rank: (p.gather.holder_splits, p.gather.owner_splits) for rank, p in programs.items()}
        for rank, arrived in self._exchange(sends, splits).items():
            for copy in programs[rank].gather.copies:
                there = strided(self.batches[rank], copy.sizes, copy.there)
                assert (there == GONE).all(), "every element of a batch comes from one place"
                there.copy_(strided(arrived, copy.sizes, copy.here))

    def _compute(self, programs: Mapping[int, Program], rule: Callable[[Tensor], Tensor]) -> None:
        for rank, p in programs.items():
            for batch in p.batches:
                assert batch.start * p.bucket.itemsize % 64 == 0 == batch.stride * p.bucket.itemsize % 64
                cols = batch.shape[2]
                matrices = self.batches[rank].as_strided(batch.shape, (batch.stride, cols, 1), batch.start)
                assert (matrices != GONE).all(), "every element of a batch has come"
                for number, x in zip(batch.items, matrices, strict=True):
                    item = self.plan.items[number]
                    assert rank in item.owners
                    x.copy_(rule(x))
                    for k, kept in enumerate(self.plan.specs[item.param].kept):
                        tile = kept.layout.tiles[item.matrix][rank][0]
                        self._kept_view(KeptLoad(item.param, k, tile, 0, 0), rank).add_(x.max())

    def _scatter(self, programs: Mapping[int, Program]) -> None:
        sends = {}
        for rank, p in programs.items():
            sends[rank] = torch.full((sum(p.scatter.owner_splits),), GONE)
            for copy in p.scatter.copies:
                strided(sends[rank], copy.sizes, copy.here).copy_(strided(self.batches[rank], copy.sizes, copy.there))
            self._tell(sends[rank], p.scatter.told, rank)
        splits = {rank: (p.scatter.owner_splits, p.scatter.holder_splits) for rank, p in programs.items()}
        wires = self._exchange(sends, splits)
        relays, relayed = {}, {}
        for rank, p in programs.items():
            self._hear(wires[rank], p.scatter.heard, rank)
            for load in p.returned:
                self._view(load, rank).copy_(strided(wires[rank], load.tile.sizes, load.place))
            for load in p.own:
                self._view(load, rank).copy_(strided(self.batches[rank], load.tile.sizes, load.place))
            if p.relay is not None:
                relays[rank] = torch.full((sum(p.relay.send_splits),), GONE)
                relayed[rank] = p.relay.send_splits, p.relay.recv_splits
                for copies, source in ((p.relay.from_wire, wires[rank]), (p.relay.from_batch, self.batches[rank])):
                    for copy in copies:
                        there = strided(relays[rank], copy.sizes, copy.there)
                        there.copy_(strided(source, copy.sizes, copy.here))
                self._tell(relays[rank], p.relay.told, rank)
        assert len(relays) in (0, len(programs)), "all ranks of a bucket relay, or none"
        for rank, arrived in self._exchange(relays, relayed).items():
            for load in programs[rank].idle:
                self._view(load, rank).copy_(strided(arrived, load.tile.sizes, load.place))
            relay = programs[rank].relay
            assert relay is not None
            self._hear(arrived, relay.heard, rank)

    def _tell(self, buffer: Tensor, told: Sequence[KeptLoad], rank: int) -> None:
        for load in told:
            buffer[load.start : load.start + load.size] = 0.0  # more elements than numbers where they are narrow
            buffer[load.start : load.start + load.tile.numel] = self._kept_view(load, rank)

    def _hear(self, buffer: Tensor, heard: Sequence[KeptLoad], rank: int) -> None:
        for load in heard:
            self._kept_view(load, rank).copy_(buffer[load.start : load.start + load.tile.numel])

    def _exchange(
        self, sends: Mapping[int, Tensor], splits: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    ) -> dict[int, Tensor]:
        """An all-to-all. Ranks that disagree about a size fail here."""
        parts = {rank: send.split(list(splits[rank][0])) for rank, send in sends.items()}
        arrived: dict[int, Tensor] = {}
        for place, rank in enumerate(sends):
            found = [parts[other][place] for other in sends]
            assert [len(part) for part in found] == list(splits[rank][1]), "what is sent is what is expected"
            assert all((part != GONE).all() for part in found), "all that is sent has been written"
            arrived[rank] = torch.cat(found) if found else torch.empty(0)
            self.sent[rank] = self.sent.get(rank, 0) + sum(map(len, parts[rank])) - len(parts[rank][place])
        return arrived


@pytest.mark.parametrize("policy", [Policy(bucket_bytes=1200), EACH])
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_of_all_ranks_change_every_matrix_once(layout: str, stages: int, policy: Policy) -> None:
    """Every view in one plan, twice, one parameter without a gradient; buckets of at most two matrices or so."""
    specs = [spec(f"{name} {i}", LAYOUTS[layout](make()), stages) for name, make in VIEWS.items() for i in (0, 1)]
    plan, ranks = check(specs, missing=frozenset({3}), policy=policy)
    if policy is EACH and layout in REPLICATED:
        replicas = specs[0].layout.replicas
        assert all(len(item.owners) == len(replicas) for item in plan.items)
        assert all(owner in of for item in plan.items for owner, of in zip(item.owners, replicas, strict=True))
        assert any(ranks.sent.values()) == (layout != "hsdp 4x1")  # where every rank has all, nothing moves


@pytest.mark.parametrize("seed", range(12))
def test_sets_that_overlap_and_layouts_that_mix(seed: int) -> None:
    draw = random.Random(seed)
    specs = []
    for number in range(draw.randrange(1, 12)):
        layout = LAYOUTS[draw.choice(list(LAYOUTS))](draw.choice(list(VIEWS.values()))())
        specs.append(spec(f"p{number}", layout, draw.randrange(3), draw.choice([2, 4]), draw.random() < 0.5))
    missing = frozenset(number for number in range(len(specs)) if draw.random() < 0.2)
    check(specs, missing, Policy(bucket_bytes=draw.choice([100, 2000, 1 << 25])))
    check(specs, missing, EACH)


def check(specs: Sequence[Spec], missing: frozenset[int], policy: Policy) -> tuple[Plan, Ranks]:
    plan = make_plan(specs, policy)
    torch.manual_seed(1)
    wholes = [torch.rand(s.layout.view.shape) for s in specs]
    ranks = Ranks(plan, wholes)
    ranks.step(lambda x: 2 * x + x.flip(0, 1))
    ranks.step(lambda x: x - 3 * x.flip(0, 1), missing)
    for number, (s, whole, storages) in enumerate(zip(specs, wholes, ranks.storages, strict=True)):
        rules = [lambda x: 2 * x + x.flip(0, 1), lambda x: x - 3 * x.flip(0, 1)]
        expected, numbers = by_hand(s, whole, rules[: 1 if number in missing else 2])
        for rank, storage in cut(s.layout, expected).items():
            assert torch.equal(storage, storages[rank]), (s.name, rank)
        for k, kept in enumerate(s.kept):
            rows = [n.expand(1, m.cols) for m, n in zip(kept.layout.view.matrices, numbers, strict=True)]
            for rank, storage in cut(kept.layout, torch.cat(rows, 1)).items():
                assert torch.equal(storage, ranks.kept[number][k][rank]), (s.name, rank)
    return plan, ranks


def by_hand(s: Spec, whole: Tensor, rules: Sequence[Callable[[Tensor], Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """The tensor after these rules, and the number that is kept of each matrix; without any program."""
    view = s.layout.view
    out, numbers = whole.clone(), []
    for m in view.matrices:
        box = out.view(view.fine)[tuple(slice(a, a + n) for a, n in zip(m.start, m.sizes, strict=True))]
        x, number = torch.empty(m.rows, m.cols), torch.ones(1, 1)
        x.as_strided(m.sizes, m.strides).copy_(box)
        for rule in rules:
            x = rule(x).contiguous()
            number = number + x.max()
        box.copy_(x.as_strided(m.sizes, m.strides))
        numbers.append(number)
    return out, numbers


def test_local_matrices_stay_and_scarce_ones_are_shared_out() -> None:
    experts = spec("experts", LAYOUTS["fsdp"](VIEWS["experts"]()))
    dense = [spec(f"dense {i}", LAYOUTS["hsdp 2x2"](VIEWS["plain"]())) for i in range(8)]
    plan = make_plan([experts, *dense], Policy())
    assert [item.route for item in plan.items[:8]] == ["local"] * 8
    assert [item.owners for item in plan.items[:8]] == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert sorted(item.owners[0] for item in plan.items[8:]) == [0, 0, 1, 1, 2, 2, 3, 3]
    local = [bucket for bucket in plan.buckets if not bucket.exchange]
    assert [bucket.ranks for bucket in local] == [(0,), (1,), (2,), (3,)]


def test_owners_without_a_choice_count_before_the_others_choose() -> None:
    """Rank 0 alone stores a small matrix; three large ones go to the other ranks."""
    small = spec("small", dataclasses.replace(LAYOUTS["one"](matrix_view((4, 4))), ranks=(0, 1, 2, 3), held=_first()))
    large = [spec(f"large {i}", LAYOUTS["fsdp"](matrix_view((16, 16)))) for i in range(3)]
    plan = make_plan([*large, small], Policy())
    assert [item.owners for item in plan.items] == [(1,), (2,), (3,), (0,)]
    assert plan.items[3].route == "local"


def _first() -> tuple[tuple[Held, ...], ...]:
    return ((Held(Box((0, 0), (4, 4)), (0, 0)),), (), (), ())


def test_what_stages_keep_does_not_part_the_tiles_that_a_relay_joins() -> None:
    """8 matrices on 2 x 2 ranks: what a rank passes on to one other are two blocks at most, whatever stages keep."""
    layout = sharded(matrix_view((16, 32)), [(0, 1), (2, 3)], 0)
    plan = make_plan([spec(f"p{i}", layout, 2) for i in range(8)], Policy())
    for rank in range(4):
        relay = make_program(plan, plan.buckets[0], rank).relay
        assert relay is not None and relay.told
        assert len(relay.from_wire) == 1 and len(relay.from_batch) == 1


def test_the_local_route_is_redundant_on_replicas_and_refused_on_shards() -> None:
    copies = spec("copies", LAYOUTS["hsdp 4x1"](VIEWS["plain"]()))
    plan, ranks = check([copies], frozenset(), Policy(route="local"))
    assert plan.items[0].owners == (0, 1, 2, 3) and not any(ranks.sent.values())
    with pytest.raises(ValueError, match=r"cut: route='local' .* but rank 0 stores a part of it: 12x10"):
        make_plan([spec("cut", LAYOUTS["fsdp"](VIEWS["plain"]()))], Policy(route="local"))


def test_plans_differ_in_digest_where_they_differ_for_a_set_and_nowhere_else() -> None:
    specs = [spec("a", LAYOUTS["fsdp"](VIEWS["plain"]())), spec("b", LAYOUTS["pair"](VIEWS["plain"]()))]
    plan = make_plan(specs, Policy())
    other = make_plan([specs[0], spec("b", LAYOUTS["pair"](VIEWS["tall"]()))], Policy())
    assert plan.digests[0, 1, 2, 3] == other.digests[0, 1, 2, 3]
    assert plan.digests[1, 3] != other.digests[1, 3]
    alone = make_plan(specs[1:], Policy())  # as a rank sees it that is in one of the two sets only
    assert alone.digests[1, 3] == plan.digests[1, 3]


def test_ranks_of_one_set_digest_it_alike_whatever_other_sets_they_are_in() -> None:
    """Rank 1 cuts its local matrices of two sets into buckets together, of which rank 0 knows one set only."""

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
    assert plans[0].digests[0, 1] == plans[1].digests[0, 1]
    assert plans[2].digests[1, 2] == plans[1].digests[1, 2]


@pytest.mark.parametrize("change", ["owner", "member", "joined", "order", "kind"])
def test_a_digest_tells_owners_and_exchanges(change: str) -> None:
    view = VIEWS["plain"]()
    dense = [spec(f"dense {i}", LAYOUTS["fsdp"](view)) for i in range(8)]
    plan = make_plan([*dense, spec("local", LAYOUTS["one"](view))], Policy(bucket_bytes=480))
    local, a, b = plan.buckets
    assert a.exchange and b.exchange and b.items == (0, 1, 2, 3)
    changed = {
        "owner": (a, b),
        "member": (a._replace(items=a.items[1:]), b._replace(items=(*b.items, 4))),
        "joined": (a._replace(items=a.items + b.items),),
        "order": (b, a),
        "kind": (a._replace(kind="cuda"), b),
    }[change]
    items = list(plan.items)
    if change == "owner":
        items[0] = items[0]._replace(owners=(3,))
    other = dataclasses.replace(plan, items=tuple(items), buckets=(local, *changed))
    assert other.digests[0, 1, 2, 3] != plan.digests[0, 1, 2, 3]
    assert other.digests[2,] == plan.digests[2,]


@pytest.mark.parametrize("change", ["owner", "how"])
def test_a_digest_tells_what_becomes_of_local_matrices(change: str) -> None:
    plan = make_plan([spec("a", LAYOUTS["hsdp 4x1"](VIEWS["experts"]()))], Policy(route="local"))
    item = plan.items[5]
    item = item._replace(owners=(0, 1)) if change == "owner" else item._replace(how="gram float32")
    other = dataclasses.replace(plan, items=(*plan.items[:5], item, *plan.items[6:]))
    assert other.digests != plan.digests


def test_a_bucket_scatters_by_the_way_of_its_gather_unless_its_own_stages_keep_anything() -> None:
    layout = LAYOUTS["fsdp"](VIEWS["plain"]())
    plan = make_plan([spec(f"p{i}", layout, stages) for i, stages in enumerate([0, 0, 0, 0, 1])], Policy())
    bucket = plan.buckets[0]
    for rank in range(4):
        without, given = (make_program(plan, bucket, rank, missing) for missing in ({4}, {0}))
        assert without.scatter is without.gather and without.returned is without.foreign
        assert given.scatter is not given.gather
    small = make_plan(plan.specs, Policy(bucket_bytes=480))
    programs = [make_program(small, bucket, 0) for bucket in small.buckets]
    assert [[small.specs[n].kept != () for n in p.bucket.items] for p in programs] == [[True], [False] * 4]
    assert [p.scatter is p.gather for p in programs] == [False, True]


@pytest.mark.parametrize("seed", range(40))
def test_shares_are_the_fewest_in_which_no_owner_exceeds_a_bucket(seed: int) -> None:
    draw = random.Random(seed)
    sides = draw.choice([[4], [4, 6, 8], list(range(1, 40))])
    items = [
        Item(n, 0, draw.choice(sides), draw.choice(sides), (draw.randrange(3),), "owner", "", draw.randrange(100))
        for n in range(draw.randrange(1, 60))
    ]
    lines = [[n for n, item in enumerate(items) if item.owners == (rank,)] for rank in range(3)]
    for line in lines:
        line.sort(key=lambda n: -items[n].cost if seed % 2 else items[n].rows)
    lines = [line for line in lines if line]
    sizes = {n: item.rows * item.cols for n, item in enumerate(items)}
    for most, least in itertools.product((1, 16, 47, 100, 500, 10**5), (1, 4)):
        shares = _shares(lines, items, sizes, most, least)
        assert sorted(n for share in shares for n in share) == list(range(len(items)))
        fewest = max(len(_filled(line, sizes, most)) for line in lines)
        assert len(shares) == max(fewest, min(least, max(map(len, lines))))
        for line in lines:
            parts = [[n for n in share if n in line] for share in shares]
            assert [n for part in parts for n in part] == line  # in order
            assert all(len(part) == 1 or sum(sizes[n] for n in part) <= most for part in parts if part)
            assert sum(map(bool, parts)) == min(len(shares), len(line))


def _filled(line: Sequence[int], sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """A line in shares that are filled one after the other."""
    found: list[list[int]] = []
    for number in line:
        if not found or sum(sizes[n] for n in found[-1]) + sizes[number] > most:
            found.append([])
        found[-1].append(number)
    return found


def test_every_owner_has_equal_work_in_each_share() -> None:
    """48 layers on 8 ranks: three large matrices of two for each small one, two of which fill a bucket."""
    view, large = matrix_view((16, 16)), matrix_view((64, 16))
    layouts = [sharded(view, [range(8)], 0), sharded(large, [range(8)], 0)]
    plan = make_plan([spec(f"{i}", layouts[i % 3 > 0]) for i in range(144)], Policy(bucket_bytes=4 * 2 * 64 * 16))
    work = [
        [sum(plan.items[n].cost for n in b.items if plan.items[n].owners == (r,)) for r in range(8)]
        for b in plan.buckets
    ]
    assert len(work) == 7  # 12 large ones of an owner in six buckets, six small ones in one
    assert all(len(set(of_bucket)) == 1 for of_bucket in work)


@pytest.mark.parametrize(("itemsize", "size"), [(2, 24), (4, 12), (8, 6)])
def test_kept_numbers_travel_as_elements_of_the_wire(itemsize: int, size: int) -> None:
    """12 numbers of 4 bytes of each matrix, from its owner to the three other ranks."""
    plan = make_plan([spec("a", LAYOUTS["fsdp"](VIEWS["plain"]()), 1, itemsize)], Policy())
    programs = [make_program(plan, plan.buckets[0], rank) for rank in range(4)]
    assert [[load.size for load in p.scatter.told] for p in programs] == [[size] * 3, [], [], []]
    assert [[load.size for load in p.scatter.heard] for p in programs] == [[], [size], [size], [size]]
    assert [p.scatter.holder_splits[0] - p.gather.holder_splits[0] for p in programs] == [0, size, size, size]


def test_copies_join_in_rows_and_never_with_a_stride_of_zero() -> None:
    tiles = [Copy((2, 8), BufferPlace(16 * n, (8, 1)), BufferPlace(2 * 8 * n, (8, 1))) for n in range(6)]
    assert joined(tiles) == (Copy((96,), BufferPlace(0, (1,)), BufferPlace(0, (1,))),)
    columns = [Copy((4, 2), BufferPlace(8 * n, (2, 1)), BufferPlace(2 * n, (12, 1))) for n in range(6)]
    assert joined(columns) == (Copy((6, 4, 2), BufferPlace(0, (8, 2, 1)), BufferPlace(0, (2, 12, 1))),)
    same = [Copy((4,), BufferPlace(4 * n, (1,)), BufferPlace(0, (1,))) for n in range(3)]
    assert joined(same) == tuple(same)


@pytest.mark.parametrize(("replicas", "shards"), [(2, 4), (4, 2), (1, 8)])
@pytest.mark.parametrize(("num", "most"), [(60, 1.05), (8, 1.25)])
def test_ranks_send_equally_much(replicas: int, shards: int, num: int, most: float) -> None:
    grid = [range(r * shards, (r + 1) * shards) for r in range(replicas)]
    view = matrix_view((16, 32))
    layout = sharded(view, grid, 0)
    _, ranks = check([spec(f"p{i}", layout) for i in range(num)], frozenset(), Policy())
    sent = list(ranks.sent.values())
    assert max(sent) / (sum(sent) / len(sent)) <= most


def test_copies_of_two_shapes_that_take_turns_join_by_shape() -> None:
    """Each of five senders has rows of two matrices of 6 columns and of one of 4."""
    copies = []
    for sender in range(5):
        for number, (columns, first) in enumerate([(6, 0), (6, 60), (4, 120)]):
            here = BufferPlace(32 * sender + 12 * number, (columns, 1))
            copies.append(Copy((2, columns), here, BufferPlace(first + 2 * columns * sender, (columns, 1))))
    assert joined(copies) == (
        Copy((5, 2, 12), BufferPlace(0, (32, 12, 1)), BufferPlace(0, (12, 60, 1))),
        Copy((5, 8), BufferPlace(24, (32, 1)), BufferPlace(120, (8, 1))),
    )


def test_an_owner_of_a_matrix_on_1024_ranks_makes_a_handful_of_copies() -> None:
    layout = sharded(matrix_view((4096, 1024)), [range(1024)], 0)
    uneven = sharded(matrix_view((4099, 1024)), [range(1024)], 0)
    plan = make_plan([spec(f"p{i}", layout if i % 7 else uneven) for i in range(72)], Policy())
    for bucket in plan.buckets:
        owner = plan.items[bucket.items[0]].owners[0]
        program = make_program(plan, bucket, owner)
        assert sum(program.gather.owner_splits) > 0
        assert len(program.gather.copies) <= 4


def test_matrices_of_one_parameter_may_have_wires_of_unlike_widths() -> None:
    """Blocks of a fused weight, of which one is too small for half-precision products."""
    layout = sharded(matrix_view((12, 10), split_sizes=(8, 4)), [(0, 1)], 0)
    plan = make_plan([spec("qk", layout)._replace(itemsizes=(2, 4))], Policy())
    assert {(bucket.itemsize, bucket.items) for bucket in plan.buckets} == {(2, (0,)), (4, (1,))}
