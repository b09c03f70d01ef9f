"""Tests of predicted step times: the measurement tables from which times are interpolated, the hardware files, and the
prediction intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from tolerances import assert_rounded
from torch import nn

from shardmuon.foresight import hardware as hardware_module
from shardmuon.foresight.hardware import Hardware, Rates
from shardmuon.foresight.job import Exact
from shardmuon.foresight.report import Price, Time
from shardmuon.orthogonalize import batch_size

# ------------------------------------------------------------------------------------------------------------- tables


SHIPPED = Hardware.load("h100")


def _known(rows: dict[float, Sequence[Sequence[float]]], slope: float = 0.0, verified: bool = True) -> Any:
    """Return a table like those in a hardware file. `rows` maps each aspect ratio to rows (size, low, middle, high).
    Each row gives a low, a middle and a high estimate of a measured quantity, such as a bandwidth, at one size."""
    return replace(SHIPPED["link"], source="made for tests", verified=verified, rows=rows, slope=slope)  # type: ignore[type-var]


def _table(rows: Sequence[Sequence[float]], slope: float = 0.0, verified: bool = True) -> Any:
    full = [(at, low, *(middle or [math.sqrt(low * high)]), high) for at, low, *middle, high in rows]
    return _known({1.0: full}, slope, verified)


CURVE = _table([(100, 1.0, 2.0, 4.0), (10_000, 16.0, 18.0, 64.0)])
RATE, TIME = (_table([(10, 1.0, 1.0), (100, 2.0, 2.0)], slope) for slope in (0.0, 1.0))
SURFACE = _known({1.0: [(10, 1.0, 1.0, 1.0)], 4.0: [(10, 16.0, 16.0, 16.0)]})


@pytest.mark.parametrize(
    ("table", "at", "value", "outside"),
    [
        (CURVE, (1_000,), (4.0, 6.0, 16.0), False),
        (CURVE, (100,), (1.0, 2.0, 4.0), False),
        (CURVE, (10_000,), (16.0, 18.0, 64.0), False),
        (RATE, (1_000,), (2.0, 2.0, 2.0), True),
        (TIME, (1_000,), (20.0, 20.0, 20.0), True),
        (RATE, (1,), (1.0, 1.0, 1.0), True),
        # Below the smallest size in the measurement table, the predicted time is pure latency and therefore constant.
        (TIME, (1,), (1.0, 1.0, 1.0), False),
        # A measurement table with several aspect ratios is interpolated over sizes first, then over aspect ratios.
        (SURFACE, (10, 2.0), (4.0, 4.0, 4.0), False),
        (SURFACE, (10, 1.0), (1.0, 1.0, 1.0), False),
        (SURFACE, (10, 9.0), (16.0, 16.0, 16.0), True),
        (SURFACE, (20, 2.0), (4.0, 4.0, 4.0), True),
    ],
)
def test_tables_are_straight_in_logarithms_and_say_where_they_end(
    table: Any, at: tuple[float, ...], value: tuple[float, ...], outside: bool
) -> None:
    found, beyond = table.at(*at)
    assert tuple(round(number, 9) for number in found) == value and beyond == outside


# ----------------------------------------------------------------------------------------------------- hardware files


@pytest.mark.parametrize("name", Hardware.names())
def test_every_shipped_file_gives_a_source_for_every_number(name: str) -> None:
    hardware = Hardware.load(name)
    assert hardware.name == name
    assert all(len(one.source) > 8 for one in hardware.numbers.values())
    # Every hardware file contains numbers that were derived or taken from second-hand sources. These numbers must be
    # marked as unverified.
    assert not all(one.verified for one in hardware.numbers.values())


def _without_products(data: Any) -> None:
    del data["numbers"]["nic"], data["numbers"]["efficiency of any"], data["title"]
    data["numbers"]["speed"] = data["numbers"]["pass copy"] = data["numbers"]["link"]


def _number(name: str, number: Any) -> Callable[[Any], None]:
    return lambda data: data["numbers"].update({name: number})


def _rows(*rows: Sequence[float]) -> Callable[[Any], None]:
    return lambda data: data["numbers"]["efficiency of any"].update(rows=[*rows])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without_products, r"mine.yaml: lacks title, nic \(bytes/s.*; has the unknown speed, pass copy"),
        (_number("nic", 5e10), r"nic: it must be \{value"),
        (_number("nic", {"low": 3, "high": 2, "source": "x", "verified": True}), "low before high"),
        (_number("peak float16", {"high": 2, "source": "x", "verified": True}), "peak float16: lacks 'low'"),
        (_rows(), "ascending"),
        (_rows((2, 1, 1), (2, 1, 2)), "ascending"),
        (_rows((2.0, 1.0, 1.0), (1.0, 0.0, 1.0)), "positive values"),
        (_rows((2.0, 1.0, 1.0), (1.0, 1.0, -1.0)), "low before high"),
        (_rows((2.0, 1.0)), r"a row is \[size"),
        (lambda data: data["numbers"]["efficiency of any"].pop("source"), "efficiency of any: lacks 'source'"),
        (lambda data: data.pop("numbers"), "a hardware file is a mapping with numbers"),
    ],
)
def test_a_file_that_is_wrong_is_told_where(change: Callable[[Any], None], told: str, tmp_path: Path) -> None:
    shipped, file = Path(hardware_module.__file__).parent / "data" / "hardware" / "h100.yaml", tmp_path / "mine.yaml"
    data = yaml.safe_load(shipped.read_text())
    change(data)
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(ValueError, match=told):
        Hardware.load(file)


# ---------------------------------------------------------------------------------------------------- seconds of parts


def test_products_take_operations_over_the_peak_and_the_share_of_it() -> None:
    rates = Rates(_machine())
    found = Time(*rates.product(2048, 2048, "standard bfloat16", 1, 10**12))
    assert found == Time(10**12 / (1e14 * 0.8), found.mid, 10**12 / (1e14 * 0.2))
    assert list(rates.unverified) == ["efficiency of any"] and not rates.extrapolated
    rates.product(64, 1024, "standard bfloat16", 1, 10**12)
    assert list(rates.extrapolated) == ["efficiency of any: 64x1024"]


def test_a_batch_lies_between_one_matrix_and_one_as_large_as_all() -> None:
    """A partly filled batch of matrices is padded with zeros, so its predicted time must be that of a full batch. The
    predicted time of a batch of tiny matrices must be the launch latency of its kernels."""
    machine, size = Hardware.load("h100"), batch_size(256, 256, torch.device("cuda"))

    def of(num: int, side: int = 256, flops: int = 10**11) -> Time:
        return Time(*Rates(machine).product(side, side, "standard bfloat16", num, flops))

    with mock.patch.object(hardware_module, "batch_size", return_value=1):
        one, large, each = of(1), of(1, 1024, size * 10**11), of(33)
    assert size == 32 and of(size).hi == size * one.hi and size * one.lo > of(size).lo >= large.lo
    assert of(1) == of(32) and of(33) == of(64) == Time(*(2 * end for end in of(32)))
    assert each.hi < 34 * one.hi
    assert of(1, flops=1000).lo == 22 * machine["launch"].at()[0][0]


def test_an_exchange_is_as_slow_as_the_slower_way() -> None:
    machine = _machine()

    def on_wire(hardware: Hardware, ranks: int, inside: int, across: int) -> Time:
        return Time(*Rates(hardware).exchange(ranks, inside, across, ranks - 1, across > 0)["wire"])

    few = _but("", {"nics_per_node": _exactly(2.0)})
    assert on_wire(machine, 8, 10**9, 0) == Time(0.01, 0.01, 0.01)
    assert on_wire(machine, 16, 10**9, 10**9) == Time(0.1, 0.1, 0.1)
    assert on_wire(few, 16, 0, 10**9).mid == 0.4
    assert on_wire(machine, 1, 0, 0) == Time(0, 0, 0)
    # The lower end of a predicted time interval is computed from the highest rate and the lowest latency.
    unsure = {"link_efficiency": _table([(1.0, 0.5, 0.8, 1.0)]), "latency_inside": _table([(1.0, 1e-5, 2e-5, 4e-5)])}
    unsure_machine = _but("", unsure)
    assert on_wire(unsure_machine, 8, 10**9, 0) == Time(0.01, 0.0125, 0.02)
    assert Time(*Rates(unsure_machine).exchange(8, 1, 0, 7, False)["latency"]) == Time(1e-5, 2e-5, 4e-5)


def test_what_was_measured_is_read_and_other_sizes_are_said_to_be_beyond() -> None:
    assert_rounded(Rates(_machine()).passed("adamw", 1_000, 10, 2)[1], 28_000 / 1e12, roundings=3)
    tables = {
        "all-to-all 4": _table([(1_000, 1.0, 1.0, 1.0), (1_000_000, 3.0, 3.0, 3.0)], 1.0),
        "pass adamw": _table([(1, 2.0, 2.0)]),
        "ranks at once": _table([(1, 1.0, 1.0), (2, 1.5, 1.5)], 1.0),
    }
    rates = Rates(_but("", tables))
    assert rates.passed("adamw", 1_000, 1, 2).tolist() == [2_000.0] * 3
    assert {key: [*ends] for key, ends in rates.exchange(4, 1_000_000, 0, 3, False).items()} == {
        "latency": [1.0] * 3,
        "wire": [2.0] * 3,
    }
    assert rates.slowdown(2).tolist() == [1.5] * 3 and not rates.extrapolated
    rates.exchange(8, 1_000, 0, 7, False)
    rates.exchange(4, 2_000_000, 0, 3, False)
    # `slowdown` is the factor by which several ranks of a node slow each other down. Beyond the largest measured number
    # of ranks, the factor is assumed to be proportional to the number of ranks.
    assert rates.slowdown(4).tolist() == [3.0] * 3
    assert len(rates.extrapolated) == 3


# -------------------------------------------------------------------------------------------------------------- prices


def test_a_wide_interval_names_its_reason_and_what_is_certain_has_no_width() -> None:
    found, certain = Price.of(_exact(), _machine()), Price.of(_exact(), _machine(certain=True))
    assert certain.step.lo == certain.step.mid == certain.step.hi and certain.reason == "nothing in it is uncertain"
    assert_rounded(math.fsum(part.mid for part in certain.parts.values()), certain.step.mid, roundings=40)
    assert found.step.lo < found.step.mid < found.step.hi
    assert found.reasons[0][0] == "products" and "peak the matrix products reach" in found.reason
    assert math.fsum(share for _, _, share in found.reasons) > 0.5
    shipped = Price.of(_exact(rows=64), Hardware.load("h100"))
    assert "overlap" in shipped.unverified and "link" not in shipped.unverified
    assert shipped.extrapolated == ("efficiency of any: 64x4096",)


@pytest.mark.parametrize(
    ("how", "without", "told"),
    [
        ("gram float32", "peak", "peak float32"),
        ("standard bfloat16", "peak", "peak bfloat16"),
        ("gram float16", "peak", "peak float16"),
        ("torch bfloat16", "peak", "peak bfloat16"),
        ("standard bfloat16", "efficiency", "efficiency of any"),
    ],
)
def test_what_cannot_be_priced_says_what_is_missing(how: str, without: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"no {told}, only others.*numbers:"):
        Rates(_but(without, {})).product(64, 64, how, 1, 10**12)


def test_adamw_steps_all_elements_of_the_rank_that_holds_most() -> None:
    exact, machine = _exact(), _machine(certain=True)
    (rank,) = exact.classes
    exact = replace(exact, classes=(rank, replace(rank, ranks=(4,), adamw_elements=2_000)))
    found = Price.of(exact, machine).adamw
    # For each element, AdamW reads the parameter p, the gradient g and the moments m and v, and writes p, m and v, all
    # in fp32.
    seconds = 1e-3 + 28 * (rank.muon_elements + 2_000) / 1e12
    for value in found:
        assert_rounded(value, seconds, roundings=8, dtype=torch.float64)
    assert found.hi < Price.of(exact, machine).step.lo


# ------------------------------------------------------------------------------------------------------------- helpers


def _exactly(value: float) -> Any:
    return _table([(1.0, value, value, value)])


def _machine(certain: bool = False) -> Hardware:
    """Return the hardware numbers of a simple machine: 1e14 FLOP/s for matmuls, and 1e12, 1e11 and 1e10 bytes/s for
    memory, links and NICs."""
    share = (0.5, 0.5) if certain else (0.2, 0.8)
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
    numbers = {name: _exactly(value) for name, value in values.items()}
    numbers |= {f"peak {dtype}": _exactly(1e14) for dtype in ("bfloat16", "float16", "float32", "float64")}
    numbers["efficiency of any"] = _table([(256, *share), (4096, *share)], verified=certain)
    return Hardware("test", "A machine of round numbers", "cuda", numbers)


def _but(without: str, given: dict[str, Any]) -> Hardware:
    """Return the hardware numbers of `_machine` with those in `given` added or replaced. Numbers whose name contains
    the word given as `without` are left out; for example, without="peak" leaves out every peak rate."""
    machine = _machine()
    kept = {name: known for name, known in machine.numbers.items() if without not in name.split()}
    return replace(machine, numbers={**kept, **given})


def _exact(rows: int = 1024) -> Exact:
    """Return the exact counts of what each rank stores, sends and computes in a job on four ranks with eight matrices
    of `rows` x 4096 and a vector of 4,000 elements."""
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(*(nn.Linear(4096, rows, bias=False) for _ in range(8)), nn.RMSNorm(4000))
    return Exact.of_job(model, "shard=4", method="standard", ns_dtype=torch.bfloat16)
