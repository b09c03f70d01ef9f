"""A fault on one rank is refused on every rank, before anything has changed, and nothing hangs.

Each case runs on real ranks, which return the text of the error they saw. A rank that hangs or passes without an
error fails the test, and so does one whose weights, momentum or counters have changed, or which cannot go on.
"""

from __future__ import annotations

import copy
import math
import random
import socket
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import run_to_the_end
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardmuon import Exchange, Muon, Orthogonalizer
from shardmuon.plan.machines import MACHINES
from shardmuon.step import binding
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, mesh_of

SHAPES = {"first": (9, 7), "second": (6, 10), "bias": (9,)}  # nothing divides; the bias is AdamW's
STORES = ("ddp", "fsdp2", "hsdp")  # replicas, shards, both


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _full(seed: int) -> dict[str, Tensor]:
    return {name: _normal(*shape, seed=100 * seed + i) for i, (name, shape) in enumerate(SHAPES.items())}


def _build(layout: str, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Build this rank's part: matrices in the layout, vectors replicated (ddp) or sharded over all ranks."""
    world = dist.get_world_size()
    case, rest = LAYOUTS[layout], LAYOUTS["ddp" if layout == "ddp" else "fsdp2"]
    matrices = {name: t for name, t in full.items() if t.ndim > 1}
    vectors = {name: t for name, t in full.items() if t.ndim == 1}
    return case.build(matrices, case.mesh(world)) | rest.build(vectors, (world,))


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _groups(params: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"params": [(name, p) for name, p in params.items() if p.ndim > 1], "lr": 0.1},
        {"params": [(name, p) for name, p in params.items() if p.ndim == 1], "lr": 0.01, "use_muon": False},
    ]


class Job:
    """One model in a layout, and the same one dense, stepped on equal gradients."""

    def __init__(self, layout: str, **options: Any) -> None:
        self.layout = layout
        self.params = {name: nn.Parameter(t) for name, t in _build(layout, _full(0)).items()}
        self.whole = {name: nn.Parameter(t) for name, t in _full(0).items()}
        group = dist.group.WORLD if LAYOUTS[layout].process_group else None
        self.optimizer = Muon(_groups(self.params), lr=1e-3, process_group=group, **options)
        self.dense = Muon(_groups(self.whole), lr=1e-3, **options)

    def set_gradients(self, seed: int) -> None:
        full = _full(seed)
        for name, grad in _build(self.layout, full).items():
            self.params[name].grad = grad.clone()
            self.whole[name].grad = full[name]

    def step(self, seed: int) -> None:
        """A correct step: must give the dense one's bits in weights and state."""
        self.set_gradients(seed)
        self.optimizer.step()
        self.dense.step()
        self.check()

    def check(self) -> None:
        found = {"weight": self.params} | _by_key(self.params, self.optimizer)
        wanted = {"weight": self.whole} | _by_key(self.whole, self.dense)
        assert found.keys() == wanted.keys()
        for key, tensors in wanted.items():
            expected = _build(self.layout, {name: t.detach() for name, t in tensors.items()})
            assert found[key].keys() == expected.keys(), key
            for name, t in expected.items():
                assert torch.equal(_local(found[key][name]), _local(t)), (key, name)

    def snapshot(self) -> dict[str, Tensor]:
        out = {name: _local(p).clone() for name, p in self.params.items()}
        for name, p in self.params.items():
            out |= {f"{name}.{key}": _local(t).clone() for key, t in self.optimizer.state.get(p, {}).items()}
        return out


def _by_key(params: dict[str, nn.Parameter], optimizer: Muon) -> dict[str, dict[str, Tensor]]:
    """State key -> name -> tensor; counters are left to the snapshot, as they have no layout."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, p in params.items():
        for key, value in optimizer.state.get(p, {}).items():
            if key != "step":
                found.setdefault(key, {})[name] = value
    return found


def _same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys(), "state appeared or went away"
    for key, value in before.items():
        assert torch.equal(value, after[key]), f"{key} has changed"


def _error(step: Callable[[], object]) -> str:
    try:
        step()
    except ValueError as error:
        return str(error)
    raise AssertionError("no error was raised on this rank")


def _refused(job: Job) -> str:
    """The error of a step that must fail and must leave everything as it was."""
    before = job.snapshot()
    text = _error(job.optimizer.step)
    _same(before, job.snapshot())
    return text


def _refused_first(optimizer: Muon) -> str:
    """The error of a first step, which must change no weight and make no state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [_local(p).clone() for p in params]
    text = _error(optimizer.step)
    assert all(torch.equal(a, _local(p)) for a, p in zip(before, params, strict=True))
    assert not optimizer.state
    return text


# --------------------------------------------------------------------------------- one rank's gradients or state


def _drop(name: str) -> Callable[[Job], None]:
    def damage(job: Job) -> None:
        job.params[name].grad = None

    return damage


def _sparse(job: Job) -> None:
    p = job.params["first"]
    p.grad = torch.zeros(p.shape).to_sparse()


def _complex(job: Job) -> None:
    p = job.params["first"]
    p.grad_dtype = None  # torch refuses to assign it otherwise
    p.grad = p.detach().to(torch.complex64)


def _wrong_momentum(job: Job) -> None:
    job.optimizer.state[job.params["first"]]["momentum_buffer"] = torch.zeros(2, 3)


def _wrong_moment(job: Job) -> None:
    job.optimizer.state[job.params["bias"]]["exp_avg"] = torch.zeros(4)


def _set(**options: object) -> Callable[[Job], None]:
    def damage(job: Job) -> None:
        job.optimizer.param_groups[0].update(options)

    return damage


def _no_scale(rows: int, cols: int) -> float:
    raise RuntimeError("out of tables")


def _nan_scale(rows: int, cols: int) -> float:
    return math.nan


def _cast_gradient(name: str) -> Callable[[Job], None]:
    def damage(job: Job) -> None:
        p = job.params[name]
        grad, p.grad_dtype = p.grad, None  # torch refuses to assign it otherwise
        p.grad = grad.to(torch.bfloat16)

    return damage


def _plain_gradient(job: Job) -> None:
    job.params["first"].grad = torch.zeros(9, 7)


def _unreduced(job: Job) -> None:
    p = job.params["second"]
    placed = [Partial()] * p.device_mesh.ndim
    p.grad = DTensor.from_local(torch.zeros(SHAPES["second"]), p.device_mesh, placed, run_check=False)


def _lose_momentum(job: Job) -> None:
    del job.optimizer.state[job.params["second"]]["momentum_buffer"]


def _half_momentum(job: Job) -> None:
    state = job.optimizer.state[job.params["second"]]
    state["momentum_buffer"] = state["momentum_buffer"].to(torch.bfloat16)


def _lose_option(key: str) -> Callable[[Job], None]:
    return lambda job: job.optimizer.param_groups[0].pop(key)


def _frozen(*names: str) -> Callable[[Job], None]:
    def damage(job: Job) -> None:
        for name in names:
            job.params[name].requires_grad_(False)
            job.params[name].grad = None

    return damage


@dataclass(frozen=True)
class Fault:
    """Something that is wrong on one rank (negative: counted from the last), what each rank must then say, and in which
    layouts and after how many steps it is tried."""

    rank: int
    damage: Callable[[Job], object]
    says: str
    steps: tuple[int, ...] = (1,)
    layouts: tuple[str, ...] = STORES


FSDP2, EITHER = ("fsdp2",), (0, 1)
FAULTS = {
    "no first gradient on rank 0": Fault(0, _drop("first"), "first: ranks [0] have no gradient, ranks [1, 2, 3] have"),
    "no second gradient on the last": Fault(-1, _drop("second"), "second: ranks [3] have no gradient"),
    "no second gradient, first step": Fault(
        1, _drop("second"), "second: ranks [1] have no gradient, ranks [0, 2, 3] have a gradient", (0,)
    ),
    "sparse gradient": Fault(1, _sparse, "first: its gradient is sparse"),
    "complex gradient": Fault(2, _complex, "first: its gradient is complex (torch.complex64)"),
    "plain gradient": Fault(
        0,
        _plain_gradient,
        "first: its gradient is a plain tensor, the parameter a DTensor placed (Shard(dim=0),)",
        EITHER,
        FSDP2,
    ),
    "gradient placed otherwise": Fault(
        1,
        _unreduced,
        "second: ranks [0, 2, 3] have a gradient, ranks [1] have a gradient that is placed unlike",
        layouts=("fsdp2", "hsdp", "fsdp2+tp"),
    ),
    "gradient dtype, first step": Fault(
        1,
        _cast_gradient("first"),
        "first: ranks (0, 1, 2, 3) are about to step with different options or state: rank 0: gradient=torch.float32; "
        "rank 1: gradient=torch.bfloat16; rank 2: gradient=torch.float32",
        (0,),
    ),
    "gradient dtype": Fault(1, _cast_gradient("first"), "rank 1: gradient=torch.bfloat16"),
    "AdamW's gradient dtype": Fault(
        1, _cast_gradient("bias"), "bias: its gradient is torch.bfloat16, the parameter torch.float", EITHER
    ),
    "momentum of another shape": Fault(
        1, _wrong_momentum, "first: its momentum_buffer is a Tensor of shape (2, 3)", (2,)
    ),
    "AdamW state of another shape": Fault(3, _wrong_moment, "bias: its exp_avg is a Tensor of shape (4,)", (2,)),
    "lost momentum": Fault(1, _lose_momentum, "rank 1: momentum_buffer=None; rank 2: momentum_buffer=torch.float32"),
    "momentum dtype": Fault(1, _half_momentum, "rank 1: momentum_buffer=torch.bfloat16"),
    "lost option": Fault(1, _lose_option("momentum"), "group 0: lacks the option 'momentum'", EITHER),
    "lost option of the plan": Fault(1, _lose_option("view"), "group 0: lacks the option 'view'"),
    "option of another type": Fault(1, _set(num_heads="3"), "rank 1 lists num_heads='3'"),
    "another lr": Fault(0, _set(lr=0.3), "rank 0: lr=0.3", EITHER, FSDP2),
    "another momentum": Fault(1, _set(momentum=0.5), "momentum=0.5", EITHER, FSDP2),
    "another scale": Fault(1, _set(adjust_lr_fn="spectral"), "adjust_lr_fn=spectral", EITHER, FSDP2),
    "another decay": Fault(2, _set(weight_decay_mode="cautious"), "weight_decay_mode=cautious", EITHER, FSDP2),
    "no nesterov": Fault(3, _set(nesterov=False), "nesterov=False", EITHER, FSDP2),
    "lr that is NaN": Fault(2, _set(lr=math.nan), "lr=nan must be finite", EITHER, FSDP2),
    "lr that is no number": Fault(2, _set(lr=None), "lr=None must be a number", EITHER, FSDP2),
    "a scale that raises": Fault(
        1, _set(adjust_lr_fn=_no_scale), "first: adjust_lr_fn(9, 7) raised RuntimeError: out of", EITHER, FSDP2
    ),
    "a scale that is NaN": Fault(
        1, _set(adjust_lr_fn=_nan_scale), "first: adjust_lr_fn(9, 7) returned nan", EITHER, FSDP2
    ),
    "other coefficients": Fault(1, _set(ns_steps=3), "ranks (0, 1, 2, 3)", EITHER, FSDP2),
    "coefficients that are none": Fault(
        1, _set(ns_coefficients=None), "ns_coefficients=None must be the name of a schedule", EITHER, FSDP2
    ),
    "heads on one rank": Fault(1, _set(num_heads=3), "num_heads=3", EITHER, FSDP2),
    "split sizes that are no sizes": Fault(1, _set(split_sizes=4), "split_sizes=4", EITHER, FSDP2),
    "heads that do not divide": Fault(1, _set(num_heads=4), "num_heads=4", EITHER, FSDP2),
    "first frozen": Fault(1, _frozen("first"), "first: (", EITHER, FSDP2),
    "second frozen": Fault(1, _frozen("second"), "second: (", EITHER, FSDP2),
    "both frozen": Fault(1, _frozen("first", "second"), "share parameters but", EITHER, FSDP2),
}
CASES = [(name, at, steps) for name, fault in FAULTS.items() for at in fault.layouts for steps in fault.steps]


def _one_rank_is_wrong(name: str, layout: str, steps_before: int) -> str:
    fault = FAULTS[name]
    job = Job(layout)
    for seed in range(steps_before):
        job.step(seed + 1)
    repair = _keep(job)
    job.set_gradients(7)
    if dist.get_rank() == fault.rank % dist.get_world_size():
        fault.damage(job)
    text = _refused(job)  # in a first step: with no state made
    repair()
    job.step(8)
    return text


def _keep(job: Job) -> Callable[[], None]:
    """Remember options and state; return what puts them back."""
    intact = [dict(group) for group in job.optimizer.param_groups]
    state = {p: dict(values) for p, values in job.optimizer.state.items()}

    def repair() -> None:
        for group, values in zip(job.optimizer.param_groups, intact, strict=True):
            group.update(values)
        job.optimizer.state.update(state)
        for p in job.params.values():
            p.requires_grad_(True)

    return repair


@pytest.mark.parametrize(("name", "layout", "steps_before"), CASES)
def test_what_is_wrong_on_one_rank_is_refused_on_all(
    name: str, layout: str, steps_before: int, world4: RankPool
) -> None:
    for text in world4.run(_one_rank_is_wrong, name, layout, steps_before):
        assert FAULTS[name].says in text


def _storm(layout: str, seed: int) -> list[str | None]:
    """Rounds in which every rank may be wrong in its own way. Returns what this rank was told in each."""
    job, told = Job(layout), []
    common, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    for number in range(12):
        repair = _keep(job)
        job.set_gradients(2 * number)
        names = [n for n, fault in FAULTS.items() if layout in fault.layouts and min(fault.steps) <= number]
        fault = own.choice(names) if common.random() < 0.8 and own.random() < 0.4 else None
        faults: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
        if any(faults):
            if fault is not None:
                FAULTS[fault].damage(job)
            told.append(_refused(job))
            repair()
        job.step(2 * number + 1)
    return told


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("layout", STORES)
def test_no_storm_of_faults_puts_ranks_out_of_step(layout: str, seed: int, world4: RankPool) -> None:
    told = world4.run(_storm, layout, seed)
    assert len(told[0]) > 5
    assert {len(texts) for texts in told} == {len(told[0])}


def _several_wrong() -> str:
    job = Job("fsdp2")
    job.step(1)
    job.set_gradients(2)
    if dist.get_rank() == 0:
        job.params["first"].grad = None
    if dist.get_rank() == 1:
        _sparse(job)
    if dist.get_rank() == 2:
        job.optimizer.param_groups[0]["lr"] = -1.0
    text = _refused(job)
    job.optimizer.param_groups[0]["lr"] = 0.1
    job.step(3)
    return text


def test_several_ranks_with_different_faults_all_stop(world3: RankPool) -> None:
    first, *others = world3.run(_several_wrong)
    assert "first: its gradient is sparse" in first
    assert "lr=-1.0" in first
    assert all("first: its gradient is sparse" in text or "lr=-1.0" in text for text in others)


# ------------------------------------------------------------------------------------ gradients that are nowhere


def _skip(layout: str) -> None:
    job = Job(layout)
    for seed in (1, 2):
        job.set_gradients(seed)
        before = _local(job.params["first"]).clone()
        for params in (job.params, job.whole):
            params["first"].grad = params["bias"].grad = None
        job.optimizer.step()
        job.dense.step()
        job.check()
        assert torch.equal(before, _local(job.params["first"]))
        assert job.params["first"] not in job.optimizer.state
        assert job.params["bias"] not in job.optimizer.state
    job.step(3)
    assert float(job.optimizer.state[job.params["bias"]]["step"]) == 1.0
    for params in (job.params, job.whole):
        for p in params.values():
            p.grad = None
    before_all = job.snapshot()
    job.optimizer.step()
    _same(before_all, job.snapshot())


@pytest.mark.parametrize("layout", STORES)
def test_a_matrix_without_a_gradient_on_any_rank_is_skipped(layout: str, world4: RankPool) -> None:
    world4.run(_skip, layout)


def _skip_like_torch() -> None:
    full = _full(0)
    mine = {n: nn.Parameter(t) for n, t in _build("fsdp2", {n: full[n] for n in ("first", "second")}).items()}
    theirs = {n: nn.Parameter(full[n].clone()) for n in mine}
    ours = Muon(list(mine.items()), lr=0.1, orthogonalizer=Orthogonalizer(method="torch"))
    torchs = torch.optim.Muon(list(theirs.values()), lr=0.1)
    for seed, missing in ((1, "first"), (2, None), (3, "second"), (4, None)):
        grads = {n: g for n, g in _full(seed).items() if n in mine}
        for (n, p), g in zip(mine.items(), _build("fsdp2", grads).values(), strict=True):
            p.grad = None if n == missing else g
            theirs[n].grad = None if n == missing else grads[n]
        ours.step()
        torchs.step()
        assert {n: p in ours.state for n, p in mine.items()} == {n: theirs[n] in torchs.state for n in mine}
        whole = _build("fsdp2", {n: p.detach() for n, p in theirs.items()})
        for n, p in mine.items():
            assert torch.equal(_local(p), _local(whole[n])), (seed, n)


def test_skipping_is_torch_optim_muons_bit_for_bit(world4: RankPool) -> None:
    world4.run(_skip_like_torch)


# --------------------------------------------------------------------------- gradients that lie somewhere else


def _partial(layout: str) -> None:
    """Gradients as unreduced sums. Equal parts of a power of two ranks add up without rounding."""
    job = Job(layout)
    job.step(1)
    job.set_gradients(2)
    for name, p in job.params.items():
        if isinstance(p, DTensor):
            mesh = p.device_mesh
            local = _full(2)[name] / mesh.size()
            p.grad = DTensor.from_local(local, mesh, [Partial()] * mesh.ndim, run_check=False)
    job.optimizer.step()
    job.dense.step()
    job.check()


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "tp", "fsdp2+tp", "hsdp+tp", "one dim twice", "lone strided"])
def test_gradients_placed_otherwise_on_all_ranks_are_redistributed(layout: str, world4: RankPool) -> None:
    world4.run(_partial, layout)


# ----------------------------------------------------------------------------- options that ranks do not share


def _reordered(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].reverse()


def _one_fewer(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].pop()


def _none_at_all(groups: list[dict[str, Any]]) -> None:
    groups[0]["use_muon"] = False


def _renamed(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"] = [(f"other_{name}", p) for name, p in groups[0]["params"]]


def _split(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"], rest = groups[0]["params"][:1], groups[0]["params"][1:]
    groups.append({"params": rest, "lr": 0.1, "split_sizes": (3, 3)})


# how one rank lists its groups, or what it gives the optimizer; what must be said, and where it is tried
UNLIKE: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "another order": (_reordered, 'rank 0 lists "first: (9, 7)', STORES),
    "one parameter fewer": (_one_fewer, 'one of them lacks "second: (6, 10)', STORES),
    # needs process_group: no rank can know that another one's DTensors were meant to be listed
    "no matrices at all": (_none_at_all, "rank 3 lists none that it shares with them", ("ddp",)),
    "other names": (_renamed, "other_first", STORES),
    "another view": (_split, "split_sizes=(3, 3)", STORES),
    "bucket_bytes": ({"exchange": Exchange(bucket_bytes=128)}, "first: (9, 7)", ("ddp", "fsdp2")),
    "method": ({"orthogonalizer": Orthogonalizer(method="torch")}, "first: (9, 7)", ("ddp", "fsdp2")),
    "dtype of products": ({"orthogonalizer": Orthogonalizer(dtype=torch.float16)}, "first: (9, 7)", ("ddp", "fsdp2")),
    "dtype on the wire": ({"exchange": Exchange(dtype=torch.float64)}, "first: (9, 7)", ("ddp", "fsdp2")),
    "prices": ({"exchange": Exchange(machine=MACHINES["a100"])}, "first: (9, 7)", ("ddp", "fsdp2")),
}


def _unlike(name: str, layout: str) -> str:
    job, what = Job(layout), UNLIKE[name][0]
    groups = _groups(job.params)
    options = {"lr": 1e-3, "process_group": dist.group.WORLD if LAYOUTS[layout].process_group else None}
    if dist.get_rank() == 3 and callable(what):
        what(groups)
    elif dist.get_rank() == 3:
        options |= what
    good, job.optimizer = job.optimizer, Muon(groups, **options)
    job.set_gradients(1)
    text = _refused(job)
    assert _error(job.optimizer.step) == text, "the second try says something else"
    job.optimizer = good
    job.step(2)
    return text


@pytest.mark.parametrize(("name", "layout"), [(name, at) for name, (_, _, layouts) in UNLIKE.items() for at in layouts])
def test_ranks_that_list_or_are_given_unlike_things_are_refused(name: str, layout: str, world4: RankPool) -> None:
    for text in world4.run(_unlike, name, layout):
        assert "share parameters but" in text
        assert UNLIKE[name][1] in text


def _same_lr_in_other_words() -> None:
    job = Job("fsdp2")
    if dist.get_rank() == 1:
        job.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
        job.optimizer.param_groups[0]["ns_coefficients"] = [[3.4445, -4.7750, 2.0315]] * 5
        job.optimizer.param_groups[0]["betas"] = (0.5, 0.5)  # of AdamW: nothing that matrices depend on
    job.step(1)


def test_options_that_mean_the_same_are_the_same(world2: RankPool) -> None:
    world2.run(_same_lr_in_other_words)


# ------------------------------------------------------------------------------------------------------ replicas


def _unequal_replicas(layout: str) -> str:
    job = Job(layout)
    if dist.get_rank() == 2:
        with torch.no_grad():
            _local(job.params["second"]).view(-1)[0] += 1e-6
    job.set_gradients(1)
    text = _refused(job)
    with torch.no_grad():
        job.params["second"].copy_(nn.Parameter(_build(layout, _full(0))["second"]))
    job.step(1)
    return text


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", "ranks 0 and 2"), ("hsdp", "ranks 0 and 2")])
def test_replicas_that_differ_are_refused_and_named(layout: str, ranks: str, world4: RankPool) -> None:
    for text in world4.run(_unequal_replicas, layout):
        assert f"second: {ranks} should hold replicas" in text


def _wrong_axis(claim: str) -> str:
    """Ranks 0, 1 store the upper rows, 2, 3 the lower ones; which are replicas is said otherwise."""
    rank, mesh = dist.get_rank(), mesh_of((2, 2))
    part = _normal(8, 6, seed=1).chunk(2)[rank // 2].clone()
    right, crossed = [Shard(0), Replicate()], [Replicate(), Shard(0)]
    if claim == "plain replicas":
        p, group = nn.Parameter(part), dist.group.WORLD
    else:
        placements = crossed if claim == "on all ranks" or rank == 1 else right
        p, group = nn.Parameter(DTensor.from_local(part, mesh, placements, run_check=False)), None
    p.grad = torch.ones_like(p)
    return _refused_first(Muon([("w", p)], lr=0.1, process_group=group))


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ("plain replicas", "w: ranks 0 and 2 should hold replicas"),
        ("on all ranks", "w: ranks 0 and 2 should hold replicas"),
        ("on rank 1", "share parameters but describe them differently"),
    ],
)
def test_a_wrong_replica_axis_is_named(claim: str, says: str, world4: RankPool) -> None:
    began = time.monotonic()
    for text in world4.run(_wrong_axis, claim):
        assert says in text
    assert time.monotonic() - began < 30.0


def _unequal_prices() -> str:
    """Rank 1 has another table of machines, as of another release, by which more buckets are cheaper."""
    full, rates = {f"w{i}": _normal(8, 6, seed=i) for i in range(16)}, MACHINES["cpu-gloo"]
    params = {name: nn.Parameter(t) for name, t in LAYOUTS["fsdp2"].build(full, (4,)).items()}
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer = Muon(list(params.items()), lr=0.1)
    if dist.get_rank() == 1:
        rates = rates._replace(inside=0, across=0, matrix=0)
    with mock.patch.object(binding, "machine_of", return_value=rates):
        text = _refused_first(optimizer)
    optimizer.prepare()  # as it says
    optimizer.step()
    return text


def test_unequal_prices_that_choose_other_plans_are_refused_on_all_ranks(world4: RankPool) -> None:
    for text in world4.run(_unequal_prices):
        assert "ranks (0, 1, 2, 3) hold different plans" in text and "call optimizer.prepare() on every rank" in text


def _rank_local() -> None:
    rank = dist.get_rank()
    shared, expert = nn.Parameter(_normal(6, 4, seed=1)), nn.Parameter(_normal(5, 8, seed=10 + rank))
    alone = [copy.deepcopy(p) for p in (shared, expert)]
    optimizer = Muon(
        [{"params": [("shared", shared)]}, {"params": [("expert", expert)], "rank_local": True}],
        lr=0.1,
        process_group=dist.group.WORLD,
    )
    dense = Muon([*alone], lr=0.1)
    for seed in (1, 2):
        for p, q, s in zip((shared, expert), alone, (seed, 50 * seed + rank), strict=True):
            p.grad = q.grad = _normal(*p.shape, seed=s)
        optimizer.step()
        dense.step()
        assert torch.equal(shared, alone[0])
        assert torch.equal(expert, alone[1])
    runs = [0] * dist.get_world_size()
    dist.all_gather_object(runs, optimizer.traffic.orthogonalized)
    assert sorted(runs) == [2, 2, 4]  # two steps: each its expert, one rank also the shared matrix


def test_rank_local_gives_each_rank_its_own_update(world3: RankPool) -> None:
    world3.run(_rank_local)


# --------------------------------------------------------------- storage that is not what the placements claim


def _liar(full: Tensor, start: int, size: int, dim: int, mesh: DeviceMesh, placements: list[Any]) -> Tensor:
    local = full.narrow(dim, min(start, full.shape[dim]), 0) if not size else full.narrow(dim, start, size)
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _arbitrary(sizes: tuple[int, ...], dim: int, mesh_shape: tuple[int, ...]) -> None:
    """Rows (or columns) as an engine might deal them, and a neighbour that lies as usual."""
    rank, mesh = dist.get_rank(), mesh_of(mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(dim)]
    line = rank % mesh_shape[-1]
    start, size = sum(sizes[:line]), sizes[line]

    def lay(seed: int) -> tuple[Tensor, Tensor]:
        whole = _normal(9, 9, seed=seed)
        return whole, _liar(whole, start, size, dim, mesh, placements)

    whole, mine = lay(0)
    p, q = nn.Parameter(mine), nn.Parameter(whole)
    neighbour = nn.Parameter(distribute_tensor(_normal(5, 6, seed=5), mesh, placements, src_data_rank=None))
    optimizer = Muon([("p", p), ("neighbour", neighbour)], lr=0.1)
    dense = Muon([q], lr=0.1)
    for seed in (1, 2):
        q.grad, p.grad = lay(seed)
        neighbour.grad = distribute_tensor(_normal(5, 6, seed=seed), mesh, placements, src_data_rank=None)
        optimizer.step()
        dense.step()
        assert torch.equal(_local(p), q.detach().narrow(dim, start, size))
        buffer = optimizer.state[p]["momentum_buffer"]
        assert torch.equal(_local(buffer), dense.state[q]["momentum_buffer"].narrow(dim, start, size))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("sizes", "mesh_shape"),
    [((5, 0, 3, 1), (4,)), ((0, 0, 9, 0), (4,)), ((1, 1, 1, 6), (4,)), ((7, 2), (2, 2))],
    ids=str,
)
def test_any_number_of_rows_a_rank_is_right(
    sizes: tuple[int, ...], mesh_shape: tuple[int, ...], dim: int, world4: RankPool
) -> None:
    world4.run(_arbitrary, sizes, dim, mesh_shape)


LIES: dict[str, tuple[tuple[int, ...], list[Any], tuple[int, ...], str]] = {
    # mesh, placements, rows that each rank stores of 9, what must be said
    "two axes": ((2, 2), [Shard(0), Shard(0)], (5, 2, 1, 1), "cannot tell which elements a rank holds"),
    "replicas cut differently": ((2, 2), [Replicate(), Shard(0)], (7, 2, 6, 3), "pieces overlap"),
    "too few rows": ((4,), [Shard(0)], (5, 0, 2, 1), "pieces leave a gap"),
    "too many rows": ((4,), [Shard(0)], (5, 2, 3, 1), "out of bounds"),
    "replicas of part": ((4,), [Replicate()], (5, 0, 3, 1), "cannot tell which elements a rank holds"),
    "one rank lies": ((4,), [Shard(0)], (3, 3, 3, 4), "out of bounds"),
}


def _lie(name: str) -> str:
    mesh_shape, placements, sizes, _ = LIES[name]
    whole, mesh = _normal(9, 6, seed=0), mesh_of(mesh_shape)
    rows = sizes[dist.get_rank()]
    mine = DTensor.from_local(
        torch.zeros(rows, 6), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    p = nn.Parameter(mine)
    honest = nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    optimizer = Muon([("honest", honest), ("liar", p)], lr=0.1)
    p.grad, honest.grad = torch.zeros_like(mine), torch.zeros_like(honest)
    return _refused_first(optimizer)


@pytest.mark.parametrize("name", LIES)
def test_storage_that_no_layout_explains_is_refused_on_all_ranks(name: str, world4: RankPool) -> None:
    for text in world4.run(_lie, name):
        assert text.startswith("liar: ranks (0, 1, 2, 3) store shapes [")
        assert LIES[name][3] in text


def _redistribute_a_liar() -> str:
    mesh, whole = mesh_of((4,)), _normal(9, 6, seed=0)
    sizes = (3, 3, 2, 1)  # ranks 0, 1 hold what Shard(0) implies, ranks 2, 3 do not
    start = sum(sizes[: dist.get_rank()])
    p = nn.Parameter(_liar(whole, start, sizes[dist.get_rank()], 0, mesh, [Shard(0)]))
    optimizer = Muon([("p", p)], lr=0.1)
    p.grad = DTensor.from_local(_normal(9, 6, seed=1), mesh, [Partial()], run_check=False)
    return _refused_first(optimizer)


def test_a_gradient_that_cannot_follow_arbitrary_rows_is_refused_on_all_ranks(world4: RankPool) -> None:
    for text in world4.run(_redistribute_a_liar):
        assert "p: its gradient is placed unlike the parameter, which stores shape (" in text


def _other_grid() -> str:
    mesh = mesh_of((2, 2))
    p = nn.Parameter(distribute_tensor(_normal(8, 8, seed=0), mesh, [Shard(0), Shard(1)], src_data_rank=None))
    optimizer = Muon([("p", p)], lr=0.1)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    state = optimizer.state[p]
    if dist.get_rank() == 3:  # the same local shape, but of the transposed block
        local = state["momentum_buffer"].to_local()
        state["momentum_buffer"] = DTensor.from_local(local, mesh, [Shard(1), Shard(0)], run_check=False)
    return _error(optimizer.step)


def test_momentum_of_the_right_shape_in_the_wrong_place_is_refused(world4: RankPool) -> None:
    for text in world4.run(_other_grid):
        assert "p: its momentum_buffer is a DTensor of shape (8, 8) placed (Shard(dim=1), Shard(dim=0))" in text


def _unfinished_and_elsewhere() -> None:
    """A gradient that a collective has not delivered yet, in a program whose default device is not the parameters'."""
    job = Job("fsdp2")
    torch.set_default_device("meta")
    try:
        for seed in (1, 2):
            with torch.device("cpu"):
                job.set_gradients(seed)
                parts = {n: _full(seed)[n] / dist.get_world_size() for n in SHAPES}
                for n, p in job.params.items():
                    mesh = p.device_mesh
                    partial = DTensor.from_local(parts[n], mesh, [Partial()], run_check=False)
                    p.grad = partial.redistribute(placements=p.placements, async_op=True)
                    assert type(p.grad._local_tensor) is not Tensor
            job.optimizer.step()
            job.dense.step()
    finally:
        torch.set_default_device(None)
    job.check()


def test_gradients_may_be_on_their_way(world4: RankPool) -> None:
    world4.run(_unfinished_and_elsewhere)


def _permuted_mesh() -> None:
    """Ranks of a mesh in an order of their own. (torch's own full_tensor() mixes such shards up.)"""
    mesh = DeviceMesh("cpu", [3, 1, 0, 2])
    whole = nn.Parameter(_normal(9, 8, seed=0))
    p = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None))
    optimizer, dense = (Muon([x], lr=0.1) for x in (p, whole))
    whole.grad = _normal(9, 8, seed=1)
    p.grad = distribute_tensor(whole.grad, mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()
    dense.step()
    position = mesh.mesh.tolist().index(dist.get_rank())
    assert torch.equal(_local(p), whole.detach()[3 * position : 3 * position + 3])


def test_a_mesh_may_list_its_ranks_in_any_order(world4: RankPool) -> None:
    world4.run(_permuted_mesh)


# -------------------------------------------------------------------------------- parameters that come and go


def _swap(after_steps: int, ranks: tuple[int, ...]) -> None:
    """Swap tensors as accelerate does: param_groups get other tensors than the optimizer was made with."""
    job = Job("fsdp2")
    if after_steps == 0 and dist.get_rank() in ranks:
        plain = {name: nn.Parameter(t) for name, t in _full(0).items()}
        job.optimizer = Muon(_groups(plain), lr=1e-3)
    for seed in range(after_steps):
        job.step(seed + 1)
    if dist.get_rank() in ranks:
        for group in job.optimizer.param_groups:
            for i, (name, old) in enumerate(zip(group["param_names"], group["params"], strict=True)):
                new = nn.Parameter(job.params[name].detach().clone())
                if old in job.optimizer.state:
                    job.optimizer.state[new] = job.optimizer.state.pop(old)
                group["params"][i] = job.params[name] = new
    for seed in range(3):
        job.step(seed + 5)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2,)], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("after_steps", [0, 2])
def test_parameters_may_be_swapped_in_the_groups(after_steps: int, ranks: tuple[int, ...], world4: RankPool) -> None:
    world4.run(_swap, after_steps, ranks)


def _reload_on_one_rank() -> None:
    job = Job("hsdp")
    job.step(1)
    if dist.get_rank() == 1:
        job.optimizer.load_state_dict(job.optimizer.state_dict())
    job.step(2)
    job.step(3)


def test_loading_state_on_one_rank_does_not_put_ranks_out_of_step(world4: RankPool) -> None:
    world4.run(_reload_on_one_rank)


def _grow(ranks: tuple[int, ...]) -> str:
    job = Job("fsdp2")
    job.step(1)
    late = {"late": _normal(5, 4, seed=77)}
    text = ""

    def add() -> None:
        p, q = nn.Parameter(_build("fsdp2", late)["late"]), nn.Parameter(late["late"].clone())
        job.params["late"], job.whole["late"] = p, q
        job.optimizer.add_param_group({"params": [("late", p)], "lr": 0.2, "momentum": 0.5})
        job.dense.add_param_group({"params": [("late", q)], "lr": 0.2, "momentum": 0.5})

    if dist.get_rank() in ranks:
        add()
    if len(ranks) < dist.get_world_size():
        job.set_gradients(2)
        text = _refused(job)
        if dist.get_rank() not in ranks:
            add()
    for seed in (3, 4):
        gradient = {"late": _normal(5, 4, seed=seed)}
        job.params["late"].grad, job.whole["late"].grad = _build("fsdp2", gradient)["late"], gradient["late"]
        job.step(seed)
    return text


@pytest.mark.parametrize(("ranks", "says"), [((0, 1, 2), ""), ((1,), 'one of them lacks "late: (5, 4)')])
def test_a_group_may_be_added_midway_on_all_ranks(ranks: tuple[int, ...], says: str, world3: RankPool) -> None:
    for text in world3.run(_grow, ranks):
        assert says in text and bool(text) == bool(says)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        with torch.no_grad():
            self.first.weight.copy_(_normal(6, 6, seed=0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def _tied() -> None:
    model, whole = _Tied(), _Tied()
    optimizer = Muon(model.named_parameters(), lr=0.1, process_group=dist.group.WORLD)
    dense = Muon(whole.parameters(), lr=0.1)
    for seed in (1, 2):
        for m, o in ((model, optimizer), (whole, dense)):
            o.zero_grad()
            m(_normal(3, 6, seed=seed)).square().sum().backward()
            o.step()
    assert model.second.weight is model.first.weight
    assert torch.equal(model.first.weight, whole.first.weight)
    both = [("first", model.first.weight), ("second", model.second.weight)]
    assert "second: the same parameter is listed twice (first as first)" in _error(lambda: Muon(both, lr=1e-3))


def test_tied_weights_are_one_parameter(world2: RankPool) -> None:
    world2.run(_tied)


def _two_optimizers() -> None:
    job = Job("hsdp")
    first, rest = _groups(job.params)
    job.optimizer = Muon([{**first, "params": first["params"][1:]}], lr=1e-3)
    other = Muon([{**first, "params": first["params"][:1]}, rest], lr=1e-3)
    for seed in (1, 2, 3):
        job.set_gradients(seed)
        other.step()
        job.optimizer.step()
        job.dense.step()
        for name, t in _build("hsdp", {n: p.detach() for n, p in job.whole.items()}).items():
            assert torch.equal(_local(job.params[name]), _local(t)), name


def test_two_optimizers_may_share_a_model(world4: RankPool) -> None:
    world4.run(_two_optimizers)


def _nothing_here() -> int:
    """One and two rows over four ranks: the last two hold nothing at all."""
    whole = {"one": _normal(1, 8, seed=1), "two": _normal(2, 8, seed=2)}
    params = {n: nn.Parameter(t) for n, t in _build("fsdp2", whole).items()}
    dense = {n: nn.Parameter(t.clone()) for n, t in whole.items()}
    optimizer = Muon(list(params.items()), lr=0.1)
    reference = Muon(list(dense.items()), lr=0.1)
    for seed in (3, 4):
        grads = {n: _normal(*t.shape, seed=seed) for n, t in whole.items()}
        for n, g in _build("fsdp2", grads).items():
            params[n].grad, dense[n].grad = g, grads[n]
        optimizer.step()
        reference.step()
        for n, t in _build("fsdp2", {n: p.detach() for n, p in dense.items()}).items():
            assert torch.equal(_local(params[n]), _local(t))
            buffer = optimizer.state[params[n]]["momentum_buffer"]
            assert isinstance(buffer, DTensor)
            assert buffer.shape == t.shape
    if dist.get_rank() == 3:
        params["two"].grad = None
    assert "two: ranks [3] have no gradient" in _error(optimizer.step)
    return sum(_local(p).numel() for p in params.values())


def test_a_rank_that_holds_nothing_takes_part(world4: RankPool) -> None:
    assert world4.run(_nothing_here) == [16, 8, 0, 0]


# --------------------------------------------------------------------------------- groups of ranks that overlap


def _overlapping(family: str) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter], Callable[[int], None]]:
    """Parameters on the rows, the columns, all of a 2 x 2 mesh, and the same dense."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    meshes = {"row": mesh["a1"], "column": mesh["a0"], "all": mesh_of((4,))}
    seeds = {"row": 10 + rank // 2, "column": 20 + rank % 2, "all": 30}
    names = {"nested": ("row", "all"), "crossing": ("row", "column")}[family]
    dense = {n: nn.Parameter(_normal(8, 6, seed=seeds[n])) for n in names}
    params = {
        n: nn.Parameter(distribute_tensor(p.detach(), meshes[n], [Shard(0)], src_data_rank=None))
        for n, p in dense.items()
    }

    def set_gradients(seed: int) -> None:
        for n, p in params.items():
            dense[n].grad = _normal(8, 6, seed=100 * seed + seeds[n])
            p.grad = distribute_tensor(dense[n].grad, meshes[n], [Shard(0)], src_data_rank=None)

    return params, dense, set_gradients


def _far_away(family: str, when: str, culprit: int) -> str:
    params, dense, set_gradients = _overlapping(family)
    groups = [{"params": [(n, p)]} for n, p in params.items()]
    bad = tuple(params)[culprit % 2 if family == "crossing" else 0]
    if when == "at the first step" and dist.get_rank() == culprit:
        next(g for g in groups if g["params"][0][0] == bad)["num_heads"] = 2
    optimizer = Muon(groups, lr=0.1)
    reference = Muon(list(dense.values()), lr=0.1)
    set_gradients(1)
    if when == "later":
        optimizer.step()
        reference.step()
        set_gradients(2)
        if dist.get_rank() == culprit:
            params[bad].grad = None
    before = [_local(p).clone() for p in params.values()]
    text = _error(optimizer.step)
    assert all(torch.equal(a, _local(b)) for a, b in zip(before, params.values(), strict=True))
    for group in optimizer.param_groups:
        group["num_heads"] = None
    for seed in (3, 4):
        set_gradients(seed)
        optimizer.step()
        reference.step()
    for n, p in params.items():
        mesh = p.device_mesh
        want = distribute_tensor(dense[n].detach(), mesh, [Shard(0)], src_data_rank=None)
        assert torch.equal(_local(p), _local(want)), n
    return text


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("when", ["at the first step", "later"])
@pytest.mark.parametrize("family", ["nested", "crossing"])
def test_news_reaches_ranks_that_share_nothing_with_the_culprit(
    family: str, when: str, culprit: int, world4: RankPool
) -> None:
    bad = "row" if family == "nested" or culprit % 2 == 0 else "column"
    texts = world4.run(_far_away, family, when, culprit)
    for text in texts:
        assert (f"{bad}: ranks [{culprit}] have no gradient" if when == "later" else f"{bad}: (8, 6)") in text


def _far_away_error() -> str:
    params, _, set_gradients = _overlapping("crossing")
    optimizer = Muon(list(params.items()), lr=0.1)
    set_gradients(1)
    if dist.get_rank() == 3:
        params["column"].grad = torch.zeros(8, 6).to_sparse()
    return _error(optimizer.step)


def test_an_error_of_one_rank_is_told_in_its_words_everywhere(world4: RankPool) -> None:
    *others, own = world4.run(_far_away_error)
    assert own.startswith("rank 3: column: its gradient is sparse")
    assert others == [own] * 3


def _refused_layout() -> str:
    """route="local" is impossible for the row's matrix; the ranks of the other row must not wait for this one."""
    params, _, set_gradients = _overlapping("nested")
    set_gradients(1)
    return _error(Muon(list(params.items()), lr=0.1, exchange=Exchange(route="local")).step)


def test_a_plan_that_cannot_be_made_is_refused_on_all_ranks(world4: RankPool) -> None:
    for text in world4.run(_refused_layout):
        assert "row: route='local' orthogonalizes a matrix where it is stored whole and moves nothing, but rank" in text


# ------------------------------------------------------------------------------- process groups that come and go

_LIVES = textwrap.dedent(
    """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from shardmuon import Muon

    rank, ports = int(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    kept, alive, sums = [], [], []
    for life, port in enumerate(ports):
        store = dist.TCPStore("127.0.0.1", int(port), 4, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
        torch.manual_seed(0)

        def cut(mesh, *placements):
            return nn.Parameter(distribute_tensor(torch.randn(9, 6), mesh, placements, src_data_rank=None))

        both = cut(mesh["a", "b"], Shard(0), Shard(1))
        row = cut(mesh["b", "c"], Shard(0), Replicate())  # two axes: no group of the mesh covers both
        plain = nn.Parameter(torch.randn(5, 5))
        pair = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
        optimizer = Muon([both, row, plain], lr=0.1, process_group=pair)
        for p in (both, row, plain):
            p.grad = p.detach().clone()
        optimizer.step()
        part = nn.Parameter(torch.ones(4, 6))
        part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, 0, 1
        column = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3], use_local_synchronization=True)
        parallel = Muon([("w", part)], lr=1e-3, tp_group=pair, process_group=column)
        part.grad = torch.ones(4, 6)
        parallel.step()
        sums.append([float(t.sum()) for t in (both.to_local(), row.to_local(), plain, part)])
        if life == 0:
            kept.append(optimizer)  # one optimizer outlives its groups, the other goes before them
        alive.append(parallel)  # all of these outlive theirs
        dist.destroy_process_group()
    assert all(s == sums[0] for s in sums), sums
    try:
        alive[0].prepare()
    except RuntimeError as error:
        assert "torch.distributed is not initialized" in str(error), error
        print("done")
    """
)


def _free_ports(count: int) -> Iterable[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.mark.ranks
@pytest.mark.apart
def test_process_groups_may_end_and_begin_again_and_ranks_exit_cleanly(tmp_path: Path) -> None:
    """gloo threads that outlive their group abort the process at exit: `terminate called`, exit code -6."""
    ports = ",".join(map(str, _free_ports(2)))
    for code, out, err in run_to_the_end(_LIVES, 4, tmp_path, ports):
        assert code == 0, err
        assert out.strip() == "done"
        assert "terminate called" not in err
