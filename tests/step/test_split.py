"""Matrices whose slices have owners of their own: the bits of one process on every layout, and exchanges as planned."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from every_layout import Planned, assert_counted, planned
from simulated import LAYOUTS as SIMULATED
from simulated import REPLICATED, SimulatedRanks, group_of, sharded

import shardmuon.step.bucket as bucket_module
from shardmuon import Muon, Orthogonalizer, audit
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.orthogonalize.schedules import triples
from shardmuon.plan import owners
from shardmuon.plan import plan as plan_module
from shardmuon.plan.items import Policy, Spec
from shardmuon.plan.machines import MACHINES
from shardmuon.plan.plan import make_plan
from shardmuon.step.binding import make_spec
from shardmuon.step.options import OptionsReader
from shardmuon.testing.compare import Comparison, compare_with_dense
from shardmuon.testing.layouts import LAYOUTS, ParamCase, groups_of, parameters
from shardmuon.testing.pool import RankPool, get_pool

TABLE = {
    "wide": ParamCase((64, 256), "slices of columns"),
    "tall": ParamCase((256, 64), "slices of rows, of which few ranks store any"),
    "square": ParamCase((112, 112), "as wide as tall"),
    "experts": ParamCase((2, 64, 160), "slices inside a stack", {"view": "stack"}),
    "kernel": ParamCase((64, 16, 3, 3), "columns along several dims"),
    "qkv": ParamCase(
        (192, 160), "slices inside repeats, and matrices too small", {"split_sizes": (32, 16, 16), "split_groups": 3}
    ),
    "in_out": ParamCase((70, 160), "stored transposed", {"transposed": True}),
    "odd": ParamCase((64, 150), "divides in two only"),
    "small": ParamCase((16, 24), "runs in batches"),
}


@contextmanager
def forced(split: bool = True) -> Iterator[None]:
    """All matrices that can be are split among owners, or none."""
    gains = plan_module._gains

    def choose(before: int, after: int, latencies: int, policy: Policy) -> bool:
        return gains(before, after, latencies, policy) if latencies else split

    with (
        mock.patch.object(owners, "_ABOVE_MEAN", 0),
        mock.patch.object(plan_module, "parted", lambda *given: owners.parted(*given)[:1]),  # not the costliest alone
        mock.patch.object(plan_module, "_gains", choose),
    ):
        yield


# ------------------------------------------------------------------------------------------------------- real ranks

Case = tuple[str, int, torch.dtype, bool]  # layout, slices, dtype of products, split or not


def _cases(world: int) -> list[Case]:
    """Every other layout at 4 ranks, some of the others at fewer; numbers of slices and dtypes by turns, one case in
    five with one owner for each matrix."""
    layouts = [name for name in LAYOUTS if name != "single"]
    mine = layouts[::2] if world == 4 else layouts[2 * world - 3 :: 6]
    dtypes = torch.float32, torch.bfloat16
    return [(name, 4 if world == 4 and at % 3 else 2, dtypes[at % 2], at % 5 != 4) for at, name in enumerate(mine)]


def _about(optimizer: Muon) -> tuple[Planned, int]:
    """What is planned of a step, and how many matrices have several owners."""
    assert optimizer.plan is not None
    return planned(optimizer), sum(item.parts > 1 and not item.part for item in optimizer.plan.items)


def _of_both_sides(rows: int, cols: int) -> float:
    """A scale of the whole matrix's shape, which no slice has."""
    return rows / 50 + cols / 70


def _compared(cases: Sequence[Case]) -> list[Comparison]:
    found = []
    for at, (layout, split_k, dtype, split) in enumerate(cases):
        how = Orthogonalizer("standard", dtype, split_k=split_k)
        given: dict[str, Any] = {"orthogonalizer": how, "table": TABLE, "steps": 1, "lr": 0.02, "about": _about}
        if at == 1:
            given["adjust_lr_fn"] = _of_both_sides
        with forced(split):
            found.append(compare_with_dense(layout, remember=at != 1, **given))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_split_matrices_have_the_bits_of_one_process(world: int) -> None:
    """Split or not; by a scale of one's own, too; with as many exchanges, bytes and matrices on a rank as planned."""
    cases = _cases(world)
    for case, *found in zip(cases, *get_pool(world).run(_compared, cases), strict=True):
        for rank, comparison in enumerate(found):
            assert comparison.bitwise, f"{case}, rank {rank}: {comparison.worst} by {comparison.max_difference}"
            assert comparison.max_difference == 0.0
        plans, split = zip(*(comparison.about for comparison in found), strict=True)
        assert_counted([comparison.traffic for comparison in found], plans)
        assert min(split) >= 6 if case[3] else max(split) == 0


class _Job:
    """An optimizer on FSDP2 that splits what it can."""

    def __init__(self, split_k: int = 2) -> None:
        case = LAYOUTS["fsdp2"]
        torch.manual_seed(0)
        cases = {name: TABLE[name] for name in ("wide", "tall", "in_out", "small")}
        self._build: Callable[[], dict[str, torch.Tensor]] = lambda: case.build(
            {name: torch.randn(of.shape) for name, of in cases.items()}, case.mesh(dist.get_world_size())
        )
        self.params = parameters(self._build())
        self.optimizer = Muon(
            groups_of(self.params, cases),
            lr=0.02,
            orthogonalizer=Orthogonalizer("standard", torch.float32, split_k=split_k),
        )

    def step(self) -> None:
        for name, grad in self._build().items():
            self.params[name].grad = grad
        with forced():
            self.optimizer.step()


def _own_slice_only(own: Any, shape: Any, *given: Any, **options: Any) -> Any:
    """Slices orthogonalized as if each were a matrix."""
    run = _SLICED(own, tuple(own[0].shape), *given, **options)
    said = next(run)
    while True:
        yield said
        try:
            said = run.send(said)
        except StopIteration as end:
            return end.value


_SLICED = bucket_module.sliced


def _audited() -> list[tuple[set[str], set[str]]]:
    """Names and places of what an audit finds in a sound step, and in one whose owners do not add up."""
    job, found = _Job(), []
    job.step()
    for plant in (_SLICED, _own_slice_only):
        check = audit(job.optimizer)
        with mock.patch.object(bucket_module, "sliced", plant):
            job.step()
        found.append(({f.name for f in check.report.findings}, {f.where for f in check.report.findings}))
    return found


def test_an_audit_passes_split_matrices_and_names_one_orthogonalized_by_slices(world2: RankPool) -> None:
    sound, planted = world2.run(_audited)[0]
    assert sound == (set(), set())
    assert planted[0] - {"update_differs"} == {"orthogonalized_by_shard"}
    assert planted[1] == {"wide", "tall", "in_out"}


TIMEOUT = 6.0  # seconds


def _broken_off(store: str) -> tuple[float, str, str]:
    """Seconds and what is raised on a rank when one of them fails between two sums; and in the next step."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT)
    )
    job = _Job()
    job.step()

    def failing(*given: Any, **options: Any) -> Any:
        run = _SLICED(*given, **options)
        yield run.send((yield next(run)))
        raise RuntimeError("it broke")

    begun, said = time.monotonic(), []
    with mock.patch.object(bucket_module, "sliced", failing if rank else _SLICED):
        for _ in range(2):
            try:
                job.step()
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return time.monotonic() - begun, said[0], said[1]


@pytest.mark.ranks
@pytest.mark.apart
def test_a_rank_that_fails_between_two_sums_ends_all(tmp_path: Path) -> None:
    with RankPool(2, timeout=60.0) as pool:
        for seconds, first, second in pool.run(_broken_off, str(tmp_path / "store")):
            assert seconds < 3 * TIMEOUT
            assert first.startswith("ExchangeError: bucket ")
            named = re.findall(r"(\w+) \d+x\d+", first)
            assert named
            assert len(named) == len(set(named)), first
            assert ", compute" in first
            assert second.startswith("ExchangeError: an earlier step was broken off: ")


# -------------------------------------------------------------------------------------------------- simulated ranks

_KEEPS_NOTHING: Any = None  # asked for stages only
VIEWS = {name: case.view for name, case in TABLE.items()}
CPU = torch.device("cpu")


def _stepped(layout: str, split: bool, how: Chooser) -> tuple[plan_module.Plan, list[torch.Tensor]]:
    group = group_of()
    (options,) = OptionsReader().read([group])

    def spec(name: str, view: MatrixView) -> Spec:
        return make_spec(name, SIMULATED[layout](view), options, CPU, how, (None, False), _KEEPS_NOTHING)

    def chosen(before: int, after: int, latencies: int, policy: Policy) -> bool:
        return bool(latencies) or split  # owners of each replica where there can be some

    with forced(split), mock.patch.object(plan_module, "_gains", chosen):
        made = make_plan([spec(*one) for one in VIEWS.items()], Policy(split_k=how.split_k, bucket_bytes=100_000))
    torch.manual_seed(0)
    full, grads = ([torch.randn(view.shape) for view in VIEWS.values()] for _ in range(2))
    ranks = SimulatedRanks(made, full)
    ranks.step(grads, [group] * len(full))
    return made, ranks.full_weights()


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("layout", [name for name in SIMULATED if name not in ("strided", "one")])
def test_slices_in_several_buckets_and_of_each_replica_have_the_bits_of_one_owner(layout: str, method: str) -> None:
    num = 4 if layout in ("fsdp", "last dim") else 2
    how = Chooser(method, torch.float32, split_k=num)
    (split, found), (whole, expected) = (_stepped(layout, taken, how) for taken in (True, False))
    assert all(map(torch.equal, found, expected))
    slices = [item for item in split.items if item.parts > 1]
    assert len(slices) >= (4 if layout == "no grid" else 10)  # there one rank alone has most matrices whole
    assert not any(item.parts > 1 for item in whole.items)
    if layout in REPLICATED[::2]:
        assert max(len(item.owners) for item in slices) == 2  # an expert that a rank of each replica has is shared
    for bucket in split.buckets:  # what adds up is in one bucket, on ranks of its own
        for item in (split.items[n] for n in bucket.items if not split.items[n].part and split.items[n].parts > 1):
            mates = [split.items[n] for n in bucket.items if split.items[n][:2] == item[:2]]
            assert [mate.part for mate in mates] == list(range(num))
            assert len({owner for mate in mates for owner in mate.owners}) == num * len(item.owners)
    for item in slices:
        held = sum(tile.numel for tiles in split.tiles_of(item).values() for tile in tiles)
        copies = sum(one.numel for tiles in split.specs[item.param].layout.tiles[item.matrix].values() for one in tiles)
        assert held == copies // num


# ------------------------------------------------------------------------------------------------ options and choice


@pytest.mark.parametrize("value", [0, 3, 16, -2, True, 2.0, 2.5, "2", None, torch.tensor(2)])
def test_a_number_of_slices_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Orthogonalizer\.split_k=.* is not one of 1, 2, 4, 8"):
        Orthogonalizer(split_k=value)


def _priced(split_k: int, **changes: int) -> plan_module.Plan:
    """A plan on 16 ranks by the rates of an H100, some of them changed."""
    (options,) = OptionsReader().read([group_of()])
    how, cuda = Chooser("auto", None, split_k=split_k), torch.device("cuda")
    layouts = [sharded(matrix_view(shape), [range(16)], 0) for shape in ((4096, 14336), (2048, 2048), (512, 2048))]
    specs = [make_spec("w", each, options, cuda, how, (None, False), _KEEPS_NOTHING) for each in layouts]
    return make_plan(specs, Policy(machine=MACHINES["h100"]._replace(**changes), split_k=split_k))


def test_plans_are_split_by_price_where_a_node_has_the_ranks() -> None:
    split = _priced(2)
    assert [(item.parts, item.part) for item in split.items] == [(2, 0), (2, 1), (1, 0), (1, 0)]
    assert len({item.owners[0] // 8 for item in split.items[:2]}) == 1
    assert len({item.owners for item in split.items}) == 4
    assert "1 matrices are split among 2 owners each, by price (h100); whole, it would take 1." in str(split)
    for changes in ({"link": 100}, {"per_node": 1}):
        assert all(item.parts == 1 for item in _priced(2, **changes).items), changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slices_are_as_near_to_fp64_as_whole_matrices(dtype: torch.dtype) -> None:
    """And so is a matrix of zeros, of 1e30 or of 1e-30 (in what fp32 holds); one NaN spoils every slice."""
    torch.manual_seed(0)
    steps = triples("keller", None)
    for shape in ((96, 384), (384, 96), (128, 128)):
        x = torch.randn(1, *shape)
        for method in ("standard", "gram") if dtype != torch.bfloat16 else ("standard",):
            exact = orthogonalize(x.double(), steps, dtype=torch.float64)
            found = [orthogonalize(x, steps, method=method, dtype=dtype, split_k=k).double() for k in (1, 2, 4)]
            errors = [float((one - exact).norm() / exact.norm()) for one in found]
            assert max(errors[1:]) < 1.2 * errors[0], (shape, method)
            for scale in (0.0, 2.0**100, 2.0**-100):
                scaled = orthogonalize(x * scale, steps, method=method, dtype=dtype, split_k=2).double()
                assert torch.equal(scaled, found[1] * (scale > 0))
            x[0, 5, 7] = torch.nan
            assert orthogonalize(x, steps, method=method, dtype=dtype, split_k=4).isnan().all()
            x[0, 5, 7] = 1.0
