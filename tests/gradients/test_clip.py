"""Tests of gradient clipping: either the norm over all parameters and ranks matches a single-process run bitwise on
every rank, or every rank raises an error."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from golden.table import placed
from spectra import normal
from tolerances import assert_rounded
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardmuon import Muon, clip_grad_norm_
from shardmuon._torch import local_if_any
from shardmuon.gradients.clip import _BOUND, _combine
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, PARAMS, ParamCase, mesh_of, parameters

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf)


def _param(like: Tensor, grad: Tensor | None) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(like))
    param.grad = grad
    return param


# --------------------------------------------------------------------------------------------------- every layout

# The following vectors are updated by AdamW. Some of them have fewer elements than there are ranks.
VECTORS = {"bias": (33,), "short": (2,), "scalar": (1,)}


def _model(dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    shapes = {name: case.shape for name, case in PARAMS.items()} | VECTORS
    return {name: normal(*shape, seed=seed + i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}


def _optimizer(params: dict[str, nn.Parameter], **options: Any) -> Muon:
    matrices = {n: p for n, p in params.items() if n in PARAMS}
    vectors = [(n, p) for n, p in params.items() if n in VECTORS]
    return Muon([*ParamCase.groups(matrices, PARAMS), {"params": vectors, "use_muon": False}], lr=0.02, **options)


@lru_cache
def _clipped_by_one(dtype: torch.dtype, orders: tuple[float, ...]) -> list[tuple[Any, Tensor, dict[str, Tensor]]]:
    """Return the single-process results with which every layout is compared: for each norm order, the full gradients,
    their norm, and the clipped gradients."""
    whole = {n: nn.Parameter(t) for n, t in _model(dtype, 0).items()}
    dense, found = _optimizer(whole), []
    for seed, order in enumerate(orders):
        full = _model(dtype, 100 * seed)
        for name, grad in full.items():
            whole[name].grad = grad.clone()
        norm = clip_grad_norm_(dense, 1.0, order)
        clipped = {n: p.grad.clone() for n, p in whole.items() if p.grad is not None}
        assert any(not torch.equal(clipped[n], full[n]) for n in clipped)
        found.append((full, norm, clipped))
    return found


def _matches_dense(layout: str, runs: dict[torch.dtype, tuple[float, ...]]) -> list[str]:
    """Compare norms and clipped gradients with a single-process run. Return a message for each combination of dtype and
    norm order whose results differ."""
    options = LAYOUTS[layout].options(dist.get_world_size())
    wrong = []
    for dtype, orders in runs.items():
        params = parameters(placed(layout, _model(dtype, 0)))
        sharded = _optimizer(params, **options)
        for order, (full, norm, whole) in zip(orders, _clipped_by_one(dtype, orders), strict=True):
            for name, grad in placed(layout, full).items():
                params[name].grad = grad
            found = clip_grad_norm_(sharded, 1.0, order)
            assert type(found) is Tensor and found.ndim == 0 and found.dtype == torch.float32
            pairs = [(params[n].grad, grad) for n, grad in placed(layout, whole).items()]
            equal = all(grad is None or torch.equal(*map(local_if_any, (grad, clipped))) for grad, clipped in pairs)
            if not torch.equal(found, norm) or not equal:
                wrong.append(f"{dtype} order {order}: {float(found)} for {float(norm)}, equal={equal}")
    return wrong


@pytest.mark.parametrize(
    ("world", "layout"),
    sorted((4 if len(case.mesh(4)) > 1 or at % 2 else 3, name) for at, (name, case) in enumerate(LAYOUTS.items())),
)
def test_norm_and_clipped_gradients_are_bitwise_those_of_one_process(layout: str, world: int) -> None:
    """The gradient norm and the clipped gradients on every layout must match a single-process run bitwise. Every layout
    is tested in fp32 with norm order 2. Half of the layouts are also tested in bf16, and the other half with a second
    norm order."""
    at = list(LAYOUTS).index(layout)
    orders = (2.0, ORDERS[1 + at // 2 % (len(ORDERS) - 1)])
    runs = {torch.float32: orders[:1], torch.bfloat16: orders[:1]} if at % 2 else {torch.float32: orders}
    assert RankPool.cached(world).run(_matches_dense, layout, runs) == [[]] * world


# ------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@torch.autocast("cpu", torch.float16)  # must have no effect; under it, torch cannot concatenate bf16 tensors
def test_on_one_process_it_is_torchs_clip_within_its_rounding(order: float, dtype: torch.dtype) -> None:
    grads = [normal(*shape, seed=len(shape)).to(dtype) for shape in ((7, 5), (3,))]
    ours, theirs = ([_param(g, g) for g in of] for of in (grads, [g.to(torch.float64, copy=True) for g in grads]))
    before = [b.grad.clone() for b in theirs if b.grad is not None]
    exact = torch.nn.utils.clip_grad_norm_(theirs, 0.5, order)
    below = clip_grad_norm_(ours, 1.01 * float(exact), order)
    assert all(torch.equal(a.grad.double(), grad) for a, grad in zip(ours, before, strict=True))
    found = clip_grad_norm_(ours, 0.5, order)
    assert torch.equal(below, found) and found.dtype == torch.float32
    assert_rounded(found, exact.float(), roundings=0)
    factor = 0.5 / (found + 1e-6)
    wide = torch.promote_types(dtype, torch.float32)
    for a, b, grad in zip(ours, theirs, before, strict=True):
        # shardmuon's clipping rounds four times: the sum norm + 1e-6, the quotient, the product, and the cast to the
        # gradient's dtype. torch's fp64 result is rounded only by the cast.
        assert_rounded(a.grad, b.grad.to(dtype), roundings=6, dtype=torch.float32 if dtype == torch.float64 else dtype)
        assert torch.equal(a.grad, (grad.to(wide) * factor.to(wide)).to(dtype))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_refused_or_spreads_as_in_torch(bad: float) -> None:
    ours, theirs = (_param(torch.zeros(2), torch.tensor([bad, 1.0])) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 is (inf|nan)"):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    assert str(ours.grad) == str(theirs.grad)
    assert not math.isfinite(float(clip_grad_norm_(ours, 1.0)))
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert_rounded(ours.grad, theirs.grad, roundings=0)


@pytest.mark.parametrize("options", [{"norm_type": 0}, {"norm_type": -1}, {"norm_type": math.nan}, {"max_norm": -1.0}])
def test_arguments_without_meaning_are_refused(options: dict[str, float]) -> None:
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    param = _param(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="must be"):
        clip_grad_norm_(param, **{"max_norm": 1.0, **options})
    assert param.grad is not None and param.grad.tolist() == [1.0, 1.0]


def test_of_some_groups_alone_gradients_are_counted_and_scaled() -> None:
    params = [_param(torch.zeros(n), torch.ones(n)) for n in (12, 3, 8)]
    groups = Muon([{"params": [p], "use_muon": False} for p in params], lr=1e-3).param_groups
    assert float(clip_grad_norm_(groups[1:], 1.0)) == float(torch.tensor(11.0).sqrt())
    factor = float(torch.tensor(1.0) / (torch.tensor(11.0).sqrt() + 1e-6))
    assert [p.grad.unique().tolist() for p in params if p.grad is not None] == [[1.0], [factor], [factor]]


@pytest.mark.parametrize("small", [1, 40, 100])
def test_large_strided_and_empty_gradients_count_every_element_once(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmuon.gradients.clip._CHUNK", 16)
    monkeypatch.setattr("shardmuon.gradients.clip._SMALL", small)
    grads = [normal(9, 7, seed=1), normal(9, 7, seed=2).T, normal(1, 50, seed=3)[:, ::2], torch.zeros(0, 3)]
    params = [_param(torch.zeros(g.shape), g) for g in grads]
    exact = torch.cat([g.double().flatten() for g in grads]).norm()
    assert float(clip_grad_norm_(params, 1e9)) == float(exact.float())


def test_combining_norms_does_not_depend_on_order_and_does_not_overflow() -> None:
    values = [10.0 ** random.Random(i).uniform(-8, 8) for i in range(200)]
    for order in ORDERS:
        assert _combine(values, order) == _combine(values[::-1], order) == _combine(sorted(values), order)
    # `_combine` rounds when it scales and squares each of the two norms, when it adds the squares, and when it scales
    # the square root back.
    assert_rounded(_combine([3e300, 4e300], 2.0), 5e300, roundings=6)
    assert_rounded(_combine([3e-300, 4e-300], 2.0), 5e-300, roundings=6)
    assert _combine([1.7e308, 1.7e308], 1.0) == math.inf
    # The exponent 1 / 20, the 20th root and the expected value are rounded. The sum of powers is exact.
    assert_rounded(_combine([1.0] * 2**10, 20.0), 2**0.5, roundings=3)


# ------------------------------------------------------------------------------------------------ groups of ranks


def _sharded(full: Tensor, mesh: Any, *placements: Any, grad: Tensor | None = None) -> nn.Parameter:
    cut = distribute_tensor(full, mesh, list(placements), src_data_rank=None)
    return _param(cut, cut if grad is None else grad)


def _unused(full: Tensor, mesh: Any) -> nn.Parameter:
    return _param(_sharded(full, mesh, Shard(0)).detach(), None)


def _uneven(part: Tensor, mesh: Any) -> nn.Parameter:
    """Return a parameter of shape (6, 3) that is sharded by rows. `part` is this rank's shard, and may have any number
    of rows."""
    cut = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], run_check=False, shape=(6, 3), stride=(3, 1))
    return _param(cut, cut)


def _norm_of(*grads: Tensor) -> float:
    return float(torch.cat([g.double().flatten() for g in grads]).norm().float())


def _named(*params: nn.Parameter) -> list[tuple[str, nn.Parameter]]:
    return list(zip(("first", "second", "third"), params, strict=False))


class Job(NamedTuple):
    """The arguments that one rank passes to clip_grad_norm_, and the expected norm or error."""

    source: Any
    wanted: float | str
    group: Any = None
    max_norm: float = 1.0


class Data:
    """Parameters and gradients on the four ranks of a 2 x 2 mesh, from which the arguments of clip_grad_norm_ are
    built."""

    def __init__(self) -> None:
        self.rank, self.mesh, self.flat = dist.get_rank(), mesh_of((2, 2)), mesh_of((4,))
        self.odd, self.world = self.rank == 1, dist.group.WORLD
        self.across, self.inside = (self.mesh[axis].get_group() for axis in ("a0", "a1"))
        sizes = ((5, 3), (4, 3), (3, 4))
        self.rows, self.columns, self.own = ([normal(*size, seed=s) for s in range(4)] for size in sizes)
        self.shared, self.other, self.whole = normal(7, 2, seed=20), normal(2, 6, seed=21), normal(6, 3, seed=22)
        self.large = normal(16, 8, seed=23)
        # The elements of `counts` are integers, so that their sums are exact in any order.
        self.counts = [torch.arange(24.0).view(6, 4) - 5 * r for r in range(4)]
        self.row = _sharded(self.rows[self.rank // 2], self.mesh["a1"], Shard(0))
        self.column = _sharded(self.columns[self.rank % 2], self.mesh["a0"], Shard(1))
        self.all_of = _sharded(self.shared, self.flat, Shard(0))
        self.lone = _sharded(self.other, self.mesh, Replicate(), Shard(1))

    def muon(self, plain: Tensor, first: nn.Parameter | None = None, own: bool = False, **options: Any) -> Muon:
        others: dict[str, Any] = {"params": [("plain", _param(plain, plain.clone()))], "use_muon": False}
        others |= {"process_group": (), "tp_group": ()} if own else {}
        return Muon([{"params": [("first", self.all_of if first is None else first)]}, others], lr=1e-3, **options)

    def chain(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank stores, out of three that are sharded over ranks 0 and 1, ranks 1 and 2,
        and ranks 2 and 3. Ranks 1 and 2 are in two process groups each, so they can detect that no group contains all
        ranks."""
        pairs = [(at, dist.new_group([at, at + 1])) for at in range(3)]
        meshes = [(at, DeviceMesh.from_group(g, "cpu")) for at, g in pairs if self.rank in (at, at + 1)]
        return [(f"pair {at}", _sharded(self.columns[at], mesh, Shard(0))) for at, mesh in meshes]

    def halves(self) -> Any:
        return [dist.new_group(pair) for pair in ([0, 1], [2, 3])][self.rank // 2]


JOBS: dict[str, Callable[[Data], Job]] = {
    "sharded": lambda d: Job(_named(d.all_of, d.lone), _norm_of(d.shared, d.other)),
    "nested": lambda d: Job(_named(d.row, d.all_of), _norm_of(*d.rows[:2], d.shared)),
    "crossing": lambda d: Job(_named(d.row, d.column), _norm_of(*d.rows[:2], *d.columns[:2]), d.world),
    "crossing without a group": lambda d: Job(_named(d.row, d.column), _norm_of(*d.rows[:2], *d.columns[:2])),
    "chain": lambda d: Job(d.chain(), _norm_of(*d.columns[:3])),
    "replicas on parts of a mesh": lambda d: Job(
        _named(d.all_of, _sharded(d.rows[0], d.mesh["a1"], Shard(0))), _norm_of(d.shared, d.rows[0])
    ),
    "replicas on parts of a mesh and within them": lambda d: Job(
        _named(d.all_of, _sharded(d.rows[0], d.mesh["a1"], Replicate())), _norm_of(d.shared, d.rows[0])
    ),
    "replicas on parts of a mesh beside experts": lambda d: Job(
        _named(
            d.all_of,
            _sharded(d.large, d.mesh["a1"], Shard(0)),
            _sharded(d.columns[d.rank // 2], d.mesh["a1"], Shard(0)),
        ),
        _norm_of(d.shared, d.large, *d.columns[:2]),
    ),
    "experts with an element that is equal": lambda d: Job(
        _named(
            d.all_of,
            _sharded(torch.ones(1), d.mesh["a1"], Replicate()),
            _sharded(d.columns[d.rank // 2], d.mesh["a1"], Shard(0)),
        ),
        _norm_of(d.shared, torch.ones(2), *d.columns[:2]),
    ),
    "replicas in another order": lambda d: Job(
        _named(d.all_of, *(_param(t, t.clone()) for t in (d.rows[0], d.own[0])[:: -1 if d.odd else 1])),
        _norm_of(d.shared, d.rows[0], d.own[0]),
    ),
    "equal parts of one tensor": lambda d: Job(
        _named(d.all_of, _sharded(torch.ones(4, 3), d.mesh["a1"], Shard(0))), _norm_of(d.shared, torch.ones(4, 3))
    ),
    "stages": lambda d: Job(
        _named(d.row, _sharded(d.rows[d.rank // 2], d.mesh["a1"], Replicate())),
        _norm_of(*d.rows[:2], *d.rows[:2]),
        d.across,
    ),
    "stages with plain tensors": lambda d: Job(
        d.muon(d.own[d.rank // 2], d.row), _norm_of(*d.rows[:2], *d.own[:2]), d.across
    ),
    "stages in one group": lambda d: Job(
        d.muon(d.own[d.rank // 2], d.row, process_group=d.inside),
        _norm_of(*d.rows[:2], *d.own[:2]),
        d.world,
    ),
    "a group of some of those that share": lambda d: Job(_named(d.all_of), _norm_of(d.shared), d.halves()),
    "a group that one rank does not pass": lambda d: Job(
        _named(d.all_of), _norm_of(d.shared), None if d.odd else d.world
    ),
    "experts": lambda d: Job(d.muon(d.own[d.rank], own=True), _norm_of(d.shared, *d.own), d.world),
    "experts beside what all share": lambda d: Job(d.muon(d.own[d.rank], own=True), _norm_of(d.shared, *d.own)),
    "experts without a group": lambda d: Job(
        d.muon(d.own[d.rank], d.row, own=True), r"plain: process_group=\(\).*process_group="
    ),
    "experts of which nothing is said": lambda d: Job(
        d.muon(d.own[d.rank]), r"plain tensors \(plain\) differ between ranks"
    ),
    "replicas": lambda d: Job(d.muon(d.own[0]), _norm_of(d.shared, d.own[0])),
    "declared replicas": lambda d: Job(d.muon(d.own[0], process_group=d.world), _norm_of(d.shared, d.own[0]), d.world),
    "replicas over a group": lambda d: Job(d.muon(d.own[0]), _norm_of(d.shared, d.own[0]), d.world),
    "experts of which some are replicas": lambda d: Job(
        d.muon(d.own[d.rank // 2]), _norm_of(d.shared, *d.own[:2]), d.world
    ),
    "replicas that cannot be told": lambda d: Job(
        _named(
            _uneven(d.whole[:5] if d.rank % 2 else d.whole[:1], d.mesh)
            if d.odd
            else _sharded(d.whole, d.mesh, Replicate(), Shard(0))
        ),
        r"first: ranks \(0, 1, 2, 3\) store shapes.*cannot tell which elements a rank holds",
    ),
    "a parameter without gradient": lambda d: Job(_named(d.all_of, _unused(d.other, d.flat)), _norm_of(d.shared)),
    "no gradients": lambda d: Job(_named(_unused(d.other, d.flat), _unused(d.shared, d.flat)), 0.0),
    "unfinished sums and other placements": lambda d: Job(
        _named(
            _sharded(
                d.counts[0],
                d.mesh,
                Replicate(),
                Shard(0),
                grad=DTensor.from_local(d.counts[d.rank], d.mesh, [Partial(), Partial()], run_check=False),
            ),
            _sharded(
                d.shared, d.flat, Shard(0), grad=distribute_tensor(d.shared, d.flat, [Shard(1)], src_data_rank=None)
            ),
        ),
        _norm_of(d.counts[0] + d.counts[1] + d.counts[2] + d.counts[3], d.shared),
    ),
    "missing on one rank": lambda d: Job(
        _named(d.all_of, _unused(d.other, d.flat) if d.odd else _sharded(d.other, d.flat, Shard(0))),
        r"rank 1 has 'second \(2, 6\) no gradient'",
    ),
    "plain on one rank": lambda d: Job(
        _named(d.all_of, _sharded(d.other, d.flat, Shard(0), grad=d.other if d.odd else None)),
        "^rank 1: second: its gradient is a plain tensor",
    ),
    "elsewhere on one rank": lambda d: Job(
        _named(
            d.all_of,
            _sharded(
                d.other,
                d.flat,
                Shard(0),
                grad=distribute_tensor(d.other, d.flat, [Replicate()], src_data_rank=None) if d.odd else None,
            ),
        ),
        r"rank 1 has 'second \(2, 6\) a gradient that is placed unlike the parameter'",
    ),
    "fewer on one rank": lambda d: Job(
        _named(d.all_of, d.lone)[: 1 if d.odd else 2],
        "rank 0 lists 2 parameters, rank 1 lists 1; one of them lacks",
    ),
    "other arguments on one rank": lambda d: Job(
        _named(d.all_of),
        "rank 1 has 'norm_type=2.0 max_norm=2.0",
        max_norm=2.0 if d.odd else 1.0,
    ),
}


def _called(name: str) -> None:
    source, wanted, group, max_norm = JOBS[name](Data())
    params = (
        [p for g in source.param_groups for p in g["params"]] if isinstance(source, Muon) else [p for _, p in source]
    )
    kept = [None if p.grad is None else local_if_any(p.grad).clone() for p in params]
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=f"(?s){wanted}"):
            clip_grad_norm_(source, max_norm, process_group=group)
        assert all(g is None or torch.equal(g, local_if_any(p.grad)) for g, p in zip(kept, params, strict=True))
        return
    aligned = [p.grad.redistribute(placements=p.placements) if isinstance(p.grad, DTensor) else p.grad for p in params]
    kept = [None if grad is None else local_if_any(grad).clone() for grad in aligned]
    norm = clip_grad_norm_(source, max_norm, process_group=group)
    assert float(norm) == wanted
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad, p in zip(kept, params, strict=True):
        assert (grad is None) == (p.grad is None)
        assert grad is None or torch.equal(local_if_any(p.grad), grad * factor)
        assert not isinstance(p.grad, DTensor) or p.grad.placements == p.placements


@pytest.mark.parametrize("name", JOBS)
def test_every_element_counts_once_or_every_rank_raises_and_nothing_is_scaled(name: str, world4: RankPool) -> None:
    world4.run(_called, name)


# CHANGES lists what some ranks change before they call clip_grad_norm_: an argument or a gradient. After the changes
# "nothing" and "other tensors", the call must still succeed.
CHANGES = ("nothing", "other tensors", "missing", "plain", "sparse", "norm_type", "fewer")


def _storm(name: str) -> None:
    """Call clip_grad_norm_ repeatedly. In each call, one or two ranks change their arguments or gradients while the
    other ranks use cached descriptions of their parameters. All ranks must get the same norm, or all must raise an
    error."""
    draw = random.Random(0)
    named, norm, group, _ = JOBS[name](Data())
    optimizer = Muon([{"params": [entry]} for entry in named], lr=1e-3)
    grads = [p.grad for _, p in named]
    for number, change in enumerate(CHANGES * 2):
        source, order = [optimizer, named][number % 2], 2.0
        for (_, p), grad in zip(named, grads, strict=True):
            p.grad = grad
        one, param = draw.randrange(4), named[draw.randrange(2)][1]
        # Change the arguments of clip_grad_norm_, or a gradient, on some but not all of the ranks that share a tensor,
        # so that the ranks disagree.
        if dist.get_rank() in draw.choice([(one,), (one, 3 - one)]):
            ones = torch.ones(param.shape)
            bad: dict[str, Any] = {"missing": None, "plain": ones, "sparse": ones.to_sparse()}
            param.grad, order = bad.get(change, param.grad), -1.0 if change == "norm_type" else 2.0
            source = {"fewer": named[:1], "other tensors": JOBS[name](Data()).source}.get(change, source)
        if change in CHANGES[:2]:
            assert float(clip_grad_norm_(source, 1e9, order, process_group=group)) == norm, (number, change)
        else:
            with pytest.raises(ValueError, match="rank"):
                clip_grad_norm_(source, 1e9, order, process_group=group)


@pytest.mark.parametrize("name", ["sharded", "nested", "crossing"])
def test_a_rank_that_passes_something_else_than_before_is_heard_by_all_and_nobody_is_out_of_step(
    name: str, world4: RankPool
) -> None:
    world4.run(_storm, name)


def _by_turns() -> list[float]:
    """Return the gradient norms of three lists of two tensors each. The first tensor is the same in all lists. The
    second tensor is sharded in the first list, plain in the second, and sharded in the third. All norms must be equal,
    although the cache of clip_grad_norm_ is keyed by a list's first tensor."""
    first, plain = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(6, 4))
    first.grad, plain.grad = torch.ones(2, 2), torch.ones(6, 4)
    sharded = _sharded(torch.ones(6, 4), mesh_of((dist.get_world_size(),)), Shard(0))
    return [float(clip_grad_norm_([first, other], 1e9)) for other in (sharded, plain, sharded)]


def test_lists_that_begin_with_one_tensor_may_go_on_with_others(world3: RankPool) -> None:
    assert world3.run(_by_turns) == [[float(torch.tensor(28.0).sqrt())] * 3] * 3


def _gone() -> bool:
    """Clip the gradients of two parameters, and delete the parameters. Return whether the parameters and the objects
    cached for them are freed."""
    params = [_sharded(normal(6, 4, seed=s), mesh_of((dist.get_world_size(),)), Shard(0)) for s in (1, 2)]
    clip_grad_norm_(params, 1.0)
    bound = _BOUND[params[0]]
    clip_grad_norm_(params, 1.0)
    assert _BOUND[params[0]] is bound
    refs = [*map(weakref.ref, params), weakref.ref(bound)]
    del params, bound
    gc.collect()
    return [ref() for ref in refs] == [None] * 3


def test_what_is_kept_of_parameters_ends_with_them(world3: RankPool) -> None:
    assert world3.run(_gone) == [True] * 3


# -------------------------------------------------------------------------------------------------------- what it costs


def _events(num_params: int) -> dict[str, int]:
    """Clip the gradients of `num_params` DTensors twice, and return how often each torch operator runs in the second
    call."""
    mesh = mesh_of((dist.get_world_size(),))
    params = [_sharded(torch.ones(8, 16), mesh, Shard(0)) for _ in range(num_params)]
    optimizer = Muon([{"params": [(f"w{i}", p) for i, p in enumerate(params)]}], lr=1e-3)
    clip_grad_norm_(optimizer, 1e9)
    with torch.autograd.profiler.profile() as seen:
        clip_grad_norm_(optimizer, 1e-3)
    return {event.key: event.count for event in seen.key_averages()}


def test_a_call_computes_in_lists_however_many_gradients_there_are(world3: RankPool) -> None:
    for few, many in zip(world3.run(_events, 10), world3.run(_events, 30), strict=True):
        for name in ("aten::_foreach_norm", "aten::stack", "aten::_foreach_mul_"):
            assert (few[name], many[name]) == (1, 1), name
        # Each call of `_local_scalar_dense` makes the CPU wait for the device, so the number of calls must not grow
        # with the number of gradients.
        assert few.get("aten::_local_scalar_dense", 0) == many.get("aten::_local_scalar_dense", 0)
