"""Times made of counts: tables, hardware files, the pipeline on a clock, intervals and what they rest on."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shardmuon.foresight.hardware import (
    FOLDER,
    Fact,
    Hardware,
    MeasuredTable,
    Uses,
    exchange_seconds,
    load,
    measured,
    names,
    parse,
    pass_seconds,
    product_seconds,
    products_dtype,
    slowdown,
)
from shardmuon.foresight.pricing import PriceError, adamw_step, price
from shardmuon.foresight.types import (
    BucketCount,
    Exact,
    Matrices,
    MatrixKind,
    Mesh,
    RankClass,
    Sent,
    Stored,
    Time,
    total,
)
from shardmuon.orthogonalize import batch_size
from shardmuon.plan import pipeline
from shardmuon.plan.pipeline import BucketTimes
from shardmuon.testing.tolerances import assert_rounded

# ------------------------------------------------------------------------------------------------------------- tables


def test_between_neighbours_a_table_is_straight_in_logarithms() -> None:
    curve = _table([(100, 1.0, 2.0, 4.0), (10_000, 16.0, 18.0, 64.0)])
    found = curve.at(1_000)
    assert (round(found.lo, 9), round(found.mid, 9), round(found.hi, 9)) == (4.0, 6.0, 16.0)
    assert not found.outside
    assert [curve.at(size)[:3] for size in (100, 10_000)] == [(1.0, 2.0, 4.0), (16.0, 18.0, 64.0)]


def test_beyond_its_ends_a_rate_stays_a_time_grows_and_both_say_so() -> None:
    rows = [(10, 1.0, 1.0), (100, 2.0, 2.0)]
    rate, time = _table(rows), _table(rows, slope=1.0)
    assert rate.at(1_000) == (2.0, 2.0, 2.0, True)
    assert time.at(1_000) == (20.0, 20.0, 20.0, True)
    assert rate.at(1) == (1.0, 1.0, 1.0, True)
    assert time.at(1) == (1.0, 1.0, 1.0, False)  # all latency there, and it was measured


def test_a_surface_goes_along_sizes_then_between_aspects() -> None:
    rows = {1.0: measured([(10, 1.0, 1.0)]), 4.0: measured([(10, 16.0, 16.0)])}
    surface = MeasuredTable("here", True, rows)
    assert round(surface.at(10, 2.0).mid, 9) == 4.0
    assert surface.at(10, 1.0).mid == 1.0
    assert surface.at(10, 9.0).outside
    assert surface.at(20, 2.0).outside


@pytest.mark.parametrize("points", ([], [(2.0, 1.0, 1.0), (1.0, 1.0, -1.0)]))
def test_a_table_without_sense_is_refused(points: list[tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="positive values"):
        measured(points)
    with pytest.raises(ValueError, match="ascending"):
        measured([(2, 1, 1), (2, 1, 2)])


# ----------------------------------------------------------------------------------------------------- hardware files


@pytest.mark.parametrize("name", names())
def test_every_shipped_file_gives_a_source_for_every_number(name: str) -> None:
    hardware = load(name)
    facts = [*hardware.flops.values(), *hardware.facts.values()]
    tables = [*hardware.products.values(), *hardware.exchanges.values(), *hardware.passes.values()]
    assert hardware.name == name
    assert all(len(one.source) > 8 for one in [*facts, *tables])
    assert {"bfloat16", "float32", "float64"} <= set(hardware.flops)
    assert any(not fact.verified for fact in facts)  # nobody has measured all of one of these here


def test_all_machines_that_are_promised_are_there() -> None:
    assert {"a100", "h100", "h200", "b200", "gb300", "mi300x", "cpu-gloo"} <= set(names())


def test_an_unknown_gpu_is_an_error_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"h9000.*a100, b200.*copy .*h100.yaml"):
        load("h9000")
    with pytest.raises(ValueError, match="no such file"):
        load("mine.yaml")


def test_a_file_that_lacks_something_is_told_what() -> None:
    import yaml

    data = yaml.safe_load((FOLDER / "h100.yaml").read_text())
    del data["facts"]["nic"], data["products"]
    data["facts"]["speed"] = data["facts"]["link"]
    with pytest.raises(ValueError, match=r"mine: lacks products, facts.nic \(bytes/s.*; has the unknown facts.speed"):
        parse(data, "mine")
    data = yaml.safe_load((FOLDER / "h100.yaml").read_text())
    data["facts"]["nic"] = 5e10
    with pytest.raises(ValueError, match=r"facts.nic must be \{value"):
        parse(data, "mine")
    data["facts"]["nic"] = {"low": 3, "high": 2, "source": "x", "verified": True}
    with pytest.raises(ValueError, match="low before high"):
        parse(data, "mine")
    with pytest.raises(ValueError, match="a hardware file is a mapping"):
        parse([], "mine")


def test_fp64_on_b300_is_27_to_54_times_slower_than_on_h100() -> None:
    ours, theirs = load("gb300").flops["float64"], load("h100").flops["float64"]
    assert 27 <= theirs.hi / ours.hi <= 54


# ---------------------------------------------------------------------------------------------------- seconds of parts


def test_products_take_operations_over_the_peak_and_the_share_of_it() -> None:
    uses = Uses()
    found = product_seconds(_machine(), 2048, 2048, "standard bfloat16", 1, 10**12, uses)
    assert found == Time(10**12 / (1e14 * 0.8), found.mid, 10**12 / (1e14 * 0.2))
    assert "peak bfloat16" not in uses.unverified
    assert "efficiency of any" in uses.unverified
    assert not uses.extrapolated
    product_seconds(_machine(), 64, 1024, "standard bfloat16", 1, 10**12, uses)
    assert list(uses.extrapolated) == ["efficiency of any: 64x1024"]


def test_a_batch_lies_between_one_matrix_and_one_as_large_as_all() -> None:
    machine = load("h100")
    size = batch_size(256, 256, torch.device("cuda"))
    alone = product_seconds(machine, 256, 256, "standard bfloat16 alone", 1, 10**11, Uses())
    batch = product_seconds(machine, 256, 256, "standard bfloat16", size, 10**11, Uses())
    large = product_seconds(machine, 1024, 1024, "standard bfloat16 alone", 1, size * 10**11, Uses())
    assert size == 32
    assert batch.hi == alone.times(size).hi
    assert alone.times(size).lo > batch.lo >= large.lo


def test_zeros_that_fill_a_batch_take_the_time_of_matrices() -> None:
    machine, how = load("h100"), "standard bfloat16"
    of = {num: product_seconds(machine, 256, 256, how, num, 10**11, Uses()) for num in (1, 32, 33, 64)}
    assert of[1] == of[32]
    assert of[33] == of[64] == of[32].times(2)
    one_by_one = product_seconds(machine, 256, 256, f"{how} alone", 33, 10**11, Uses())
    assert one_by_one.hi < 34 * product_seconds(machine, 256, 256, f"{how} alone", 1, 10**11, Uses()).hi


def test_small_batches_take_their_launches() -> None:
    found = product_seconds(load("h100"), 256, 256, "standard bfloat16", 1, 1000, Uses())
    assert found.lo == 22 * load("h100").facts["launch"].lo


def test_a_choice_multiplies_in_the_dtype_of_its_backend() -> None:
    assert products_dtype("gram float32", "cuda") == "float32"
    assert products_dtype("standard bfloat16 triton", "cuda") == "bfloat16"
    assert [products_dtype("gram", kind) for kind in ("cuda", "cpu")] == ["float16", "float32"]
    assert products_dtype("torch", "cpu") == "bfloat16"
    assert products_dtype("reference", "cuda") == "float64"


def test_an_exchange_is_as_slow_as_the_slower_way() -> None:
    machine = _machine()
    inside = exchange_seconds(machine, 8, 10**9, 0, 7, False, Uses())
    both = exchange_seconds(machine, 16, 10**9, 10**9, 15, True, Uses())
    assert inside[1] == Time(0.01, 0.01, 0.01)  # 1e11 bytes/s
    assert both[1] == Time(0.1, 0.1, 0.1)  # 1e10 bytes/s of one NIC each
    assert exchange_seconds(machine, 1, 0, 0, 0, False, Uses()) == (Time(0, 0, 0), Time(0, 0, 0))
    few = replace(machine, facts={**machine.facts, "nics_per_node": _exactly(2.0)})
    assert exchange_seconds(few, 16, 0, 10**9, 15, True, Uses())[1].mid == 0.4  # eight ranks share two


def test_measured_exchanges_are_read_and_other_sizes_are_said_to_be_beyond() -> None:
    table = _table([(1_000, 1.0, 1.0, 1.0), (1_000_000, 3.0, 3.0, 3.0)], 1.0)
    machine = replace(_machine(), exchanges={4: table})
    uses = Uses()
    assert exchange_seconds(machine, 4, 1_000_000, 0, 3, False, uses) == (Time(1, 1, 1), Time(2, 2, 2))
    assert not uses.extrapolated
    exchange_seconds(machine, 8, 1_000, 0, 7, False, uses)
    exchange_seconds(machine, 4, 2_000_000, 0, 3, False, uses)
    assert len(uses.extrapolated) == 2


def test_passes_go_by_bytes_or_by_what_was_measured() -> None:
    machine = _machine()
    adamw = pass_seconds(machine, "adamw", 1_000, 10, 2, Uses())
    assert_rounded(adamw.mid, 28_000 / 1e12, roundings=3)
    measured = replace(machine, passes={"adamw": _table([(1, 2.0, 2.0)])})
    assert pass_seconds(measured, "adamw", 1_000, 1, 2, Uses()) == Time(2_000.0, 2_000.0, 2_000.0)


def test_more_ranks_than_were_measured_share_what_there_is() -> None:
    table = _table([(1, 1.0, 1.0), (2, 1.5, 1.5)])
    machine = replace(_machine(), together=table)
    uses = Uses()
    assert slowdown(machine, 2, uses).mid == 1.5
    assert not uses.extrapolated
    assert slowdown(machine, 4, uses).mid == 3.0
    assert uses.extrapolated


# -------------------------------------------------------------------------------------------------------- the pipeline


def test_one_bucket_is_the_sum_of_its_parts() -> None:
    (course,) = pipeline.run([[BucketTimes("a", 1, 2, 3, 4, 5)]], 10, [20], 1.0)
    assert course.end == 45
    assert course.waited == 6


def test_the_next_bucket_travels_while_one_is_orthogonalized() -> None:
    works = [BucketTimes(i, 1.0, 10.0, 10.0, 10.0, 1.0) for i in range(6)]
    (hidden,), (exposed,) = (pipeline.run([works], 0.0, [0.0], share) for share in (1.0, 0.0))
    assert exposed.end == 6 * 32.0
    assert hidden.end == 1.0 + 6 * 20.0 + 1.0  # its links never rest between the first pack and the last apply
    assert exposed.waited == 6 * 20.0


def test_products_hide_what_travels() -> None:
    works = [BucketTimes(i, 0.0, 1.0, 10.0, 1.0, 0.0) for i in range(8)]
    (course,) = pipeline.run([works], 0.0, [0.0], 1.0)
    assert course.end == 1.0 + 8 * 10.0 + 1.0  # the first gather and the last scatter are seen


def test_an_exchange_begins_when_its_last_rank_has_given_it() -> None:
    ranks = [[BucketTimes("g", 1, 1, 100, 1, 1)], [BucketTimes("g", 50, 1, 1, 1, 1)]]
    first, second = pipeline.run(ranks, 0, [0, 0], 1.0)
    assert first.end == 50 + 1 + 100 + 1 + 1
    assert second.end == first.end  # it idles until the other has its result


def test_ranks_that_exchange_nothing_wait_for_nobody() -> None:
    alone, other = pipeline.run([[BucketTimes(None, 1, 0, 2, 0, 3)], [BucketTimes("b", 9, 9, 9, 9, 9)]], 0, [0, 0], 1.0)
    assert alone.end == 6
    assert other.end == 45


def test_ranks_of_different_groups_in_different_order_still_end() -> None:
    a, b = BucketTimes("a", 1, 1, 1, 1, 1), BucketTimes("b", 1, 1, 1, 1, 1)
    courses = pipeline.run([[a, b, b._replace(key="c")], [b._replace(key="c"), b, a]], 0, [0, 0], 1.0)
    assert all(math.isfinite(course.end) for course in courses)


def test_a_step_is_never_shorter_than_what_one_rank_must_do_nor_longer_than_all_in_a_row() -> None:
    generator = random.Random(0)
    for _ in range(200):
        works = [BucketTimes(i, *(generator.random() for _ in range(5))) for i in range(generator.randrange(1, 7))]
        slow, fast = (pipeline.run([works], 0.0, [0.0], share)[0].end for share in (0.0, 1.0))
        computed = sum(w.pack + w.orthogonalize + w.apply for w in works)
        carried = sum(w.gather + w.scatter for w in works)
        rounding = 2.0**-40  # of a few dozen sums of numbers below 1
        assert max(computed, carried) <= fast + rounding
        assert fast <= slow + rounding
        assert slow <= computed + carried + rounding


def test_a_relay_passes_while_the_next_bucket_is_orthogonalized() -> None:
    """A relay is given when the next bucket is computed, and what it brings is applied at the end."""
    works = [BucketTimes(i, 0.0, 0.0, 10.0, 0.0, 0.0, 0.0, 8.0, 1.0) for i in range(3)]
    (course,) = pipeline.run([works], 0.0, [0.0], 1.0)
    relays = [e for e in course.events if e.phase == "relay"]
    assert [e.start for e in relays] == [20.0, 30.0, 38.0]  # the last one waits for the one before it
    assert course.end == 38.0 + 8.0 + 1.0
    assert course.waited == 14.0


def test_events_follow_each_other_and_fill_the_step() -> None:
    works = [BucketTimes(i, 1.0, 2.0, 3.0, 2.0, 1.0) for i in range(4)]
    (course,) = pipeline.run([works], 5.0, [7.0], 0.5)
    computing = [e for e in course.events if e.phase not in ("gather", "scatter")]
    assert all(a.end <= b.start for a, b in itertools.pairwise(computing))
    assert course.events[0].phase == "begin"
    assert course.events[-1] == (-1, "adamw", course.end - 7.0, course.end)
    assert [e.phase for e in course.events].count("gather") == 4


# -------------------------------------------------------------------------------------------------------------- prices


def test_what_is_certain_has_an_interval_without_width() -> None:
    found = price(_exact(), _machine(certain=True))
    assert found.step.lo == found.step.mid == found.step.hi
    assert found.reason == "nothing in it is uncertain"


def test_a_wide_interval_names_its_reason() -> None:
    found = price(_exact(), _machine())
    assert found.step.lo < found.step.mid < found.step.hi
    assert found.reasons[0][0] == "products"
    assert "share of the peak" in found.reason or "peak the matrix products reach" in found.reason
    assert math.fsum(share for _, _, share in found.reasons) > 0.5


def test_the_parts_of_the_slowest_rank_make_its_step() -> None:
    found = price(_exact(), _machine(certain=True))
    assert_rounded(total(found.parts.values()).mid, found.step.mid, roundings=40)


def test_shares_and_money_follow_from_the_seconds() -> None:
    exact = _exact()
    found = price(exact, _machine(certain=True), tokens=1e6, dollars_per_hour=3.6)
    assert found.training is not None and found.dollars is not None and found.training_dollars is not None
    whole = 6 * 10**9 * 1e6 / (exact.world * 1e14 * 0.5)
    assert_rounded(found.training.forward_backward.mid, whole, roundings=6)
    step = found.step.mid
    assert_rounded(found.training.share[1], step / (step + whole), roundings=8)
    assert_rounded(found.dollars.mid, step * exact.world, roundings=8)  # $3.60 an hour, 1,000 times
    assert_rounded(found.training_dollars.mid, (step + whole) * exact.world, roundings=12)


@pytest.mark.parametrize("wrong", ({"tokens": 0.0}, {"dollars_per_hour": -1.0}))
def test_what_cannot_be_priced_is_an_error(wrong: dict[str, float]) -> None:
    with pytest.raises(PriceError, match=next(iter(wrong))):
        price(_exact(), _machine(), **wrong)
    with pytest.raises(PriceError, match="how many FLOPs a token takes is not known"):
        price(replace(_exact(), tokens_flops=0), _machine(), tokens=1e6)


def test_the_gram_route_costs_on_b300_what_its_fp64_costs() -> None:
    exact = _exact(route="gram")
    on_h100, on_b300 = (price(exact, load(name)).parts["products"] for name in ("h100", "gb300"))
    assert on_b300.mid > 20 * on_h100.mid
    owner = _exact()
    assert price(owner, load("gb300")).parts["products"].mid < price(owner, load("h100")).parts["products"].mid


def test_a_machine_that_does_not_know_a_dtype_says_what_to_add() -> None:
    machine = _machine()
    with pytest.raises(ValueError, match=r"no peak for products in bfloat16.*flops:"):
        price(_exact(), replace(machine, flops={"float64": machine.flops["float64"]}))
    with pytest.raises(ValueError, match=r"no table says how fast.*products:"):
        price(_exact(), replace(machine, products={}))


def test_unverified_and_extrapolated_numbers_are_named() -> None:
    found = price(_exact(rows=64), load("h100"))
    assert "overlap" in found.unverified
    assert "link" not in found.unverified
    assert found.extrapolated == ("efficiency of any: 64x4096",)


# --------------------------------------------------------------------------------------------------------------- AdamW


def test_adamw_steps_all_elements_of_the_rank_that_holds_most() -> None:
    exact, machine = _exact(), _machine(certain=True)
    (rank,) = exact.classes
    fuller = replace(rank, ranks=(4,), adamw_elements=2_000)
    found = adamw_step(replace(exact, classes=(rank, fuller)), machine, Uses())
    seconds = 1e-3 + 28 * (rank.muon_elements + 2_000) / 1e12  # it reads p, g, m, v and writes p, m, v in fp32
    for value in found:
        assert_rounded(value, seconds, roundings=8, dtype=torch.float64)
    assert found.hi < price(exact, machine).step.lo


# ------------------------------------------------------------------------------------------------------------- helpers


def _table(rows: Sequence[Sequence[float]], slope: float = 0.0) -> MeasuredTable:
    return MeasuredTable("here", True, {1.0: measured(rows)}, slope)


def _exactly(value: float) -> Fact:
    return Fact(value, value, "made for tests", True)


def _machine(certain: bool = False) -> Hardware:
    """Round numbers: 1e14 FLOP/s, 1e12 bytes/s of memory, 1e11 of links, 1e10 of NICs."""
    rows = [(256, 0.5, 0.5), (4096, 0.5, 0.5)] if certain else [(256, 0.2, 0.8), (4096, 0.2, 0.8)]
    values = {
        "memory_bytes": 8e10,
        "memory_bandwidth": 1e12,
        "memory_efficiency": 1.0,
        "gpus_per_node": 8.0,
        "link": 1e11,
        "link_efficiency": 1.0,
        "nic": 1e10,
        "nics_per_node": 8.0,
        "nic_efficiency": 1.0,
        "latency_inside": 1e-5,
        "latency_across": 2e-5,
        "latency_peer": 0.0,
        "agreement": 1e-4,
        "host_step": 1e-3,
        "host_matrix": 1e-5,
        "host_bucket": 1e-4,
        "launch": 0.0,
        "overlap": 1.0,
        "mfu": 0.5,
    }
    return Hardware(
        "test",
        "A machine of round numbers",
        "cuda",
        {dtype: _exactly(1e14) for dtype in ("bfloat16", "float16", "float32", "float64")},
        {name: _exactly(value) for name, value in values.items()},
        {"any": MeasuredTable("made for tests", certain, {1.0: measured(rows)})},
    )


def _exact(route: str = "owner", rows: int = 1024) -> Exact:
    """Four ranks that share eight matrices of rows x 4096 in two buckets, one matrix a rank and bucket."""
    size = rows * 4096
    moved = Sent(inside=2 * size * 3 // 4, peers_inside=3)
    buckets = tuple(
        BucketCount(
            number=number,
            route=route,  # type: ignore[arg-type]
            num_ranks=4,
            num_nodes=1,
            wire="bfloat16",
            matrices=(Matrices(rows, 4096, "standard bfloat16", 1, 10**12),),
            held=size,
            gather=moved,
            gather_received=moved,
            scatter=moved,
            scatter_received=moved,
            foreign=size * 3 // 4,
            local_flops=10**11 if route == "gram" else 0,
        )
        for number in range(2)
    )
    rank = RankClass(
        ranks=(0, 1, 2, 3),
        stage=0,
        stored=Stored(weights=8 * size, momentum=8 * size, moments=8_000),
        peak=4 * size,
        buckets=buckets,
        muon_elements=2 * size,
        adamw_elements=1_000,
        exchanges=4,
        votes=1,
    )
    kind = MatrixKind("w", rows, 4096, "standard bfloat16", route, "for tests", 8, 10**12)  # type: ignore[arg-type]
    params = 8 * size + 4_000
    return Exact(
        "toy", "made for tests", params, 8 * size, 4_000, Mesh(shard=4), (rank,), (kind,), tokens_flops=6 * 10**9
    )
