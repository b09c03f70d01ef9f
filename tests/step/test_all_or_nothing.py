"""Tests that a fault on one rank causes an error on every rank that stores parts or replicas of the same parameters,
and leaves parameters and state unchanged.

Each fault changes a part of the job on one rank, for example a gradient or an option, before all ranks make the same
call. If the call raises an error, it must have no effect: the next step must be bitwise identical to that of a twin job
that never made the call.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import FAMILIES, Backup, Job, in_gradient, in_state, in_storage, layout_of, of_inference, one_row, unlike
from simulated import quick_plans
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardmuon import Muon, clip_grad_norm_, muon
from shardmuon.momentum.keeper import Keeper
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of

# --------------------------------------------------------------------------------------------------------- the faults


class Fault(NamedTuple):
    """A fault on one rank. The function `do` changes the job (for example, a gradient or an option) on this rank,
    `says` is a pattern for the error message on all ranks, and `own` is the class of the exception that the faulty rank
    must raise."""

    do: Callable[[Job], Any]
    says: str
    own: type[BaseException] = ValueError


def _option(key: str, value: Any, group: int = 0) -> Callable[[Job], None]:
    return lambda job: job.groups[group].update({key: value})


def _lacks(key: str) -> Callable[[Job], None]:
    return lambda job: job.groups[0].pop(key)


def _put(kind: str) -> Callable[[Job], None]:
    return lambda job: setattr(job.first, "grad", _placed(kind)(job.first.grad))  # type: ignore[arg-type]


def _swapped(make: Callable[[Tensor], Tensor]) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        old = job.first
        job.groups[0]["params"][0] = new = nn.Parameter(make(old.detach()))
        new.grad = torch.ones_like(new)

    return do


def _marked(job: Job) -> None:
    _swapped(torch.clone)(job)
    job.first.partition_dim = 0  # type: ignore[attr-defined]


def _momentum(make: Callable[[Tensor], Any]) -> Any:
    return in_state("momentum_buffer", make)


def _moment(make: Callable[[Tensor], Any]) -> Any:
    return in_state("exp_avg_sq", make, lambda job: job.adamw)


def _frozen(job: Job) -> None:
    job.first.grad = None
    job.first.requires_grad_(False)


def _unfrozen(job: Job) -> None:
    p = next(p for p, spec in job.specs.items() if spec.frozen)
    p.requires_grad_()
    p.grad = torch.ones_like(p)


def _one_more(job: Job) -> None:
    p = nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    job.groups.append({**job.groups[0], "params": [p], "param_names": ["more"]})


def _listed(order: slice) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        for key in ("params", "param_names"):
            job.groups[0][key] = job.groups[0][key][order]

    return do


def _renamed(job: Job) -> None:
    job.groups[0]["param_names"] = ["x", "y", "z"][: len(job.groups[0]["params"])]
    # Muon reads parameter names only when it makes a plan. Discard the plan, so that the next call reads the changed
    # names.
    job.optimizer.binding = None


def _moved(job: Job) -> None:
    """Move all matrices except the first to a new parameter group with a different lr, without changing the order of
    the matrices."""
    old = job.groups[0]
    new = {**old, "lr": 0.3}
    for key in ("params", "param_names"):
        new[key], old[key] = old[key][1:], old[key][:1]
    job.groups.insert(1, new)


def _given(**options: Any) -> Callable[[Job], None]:
    """Return a fault that replaces the job's optimizer with one that has the same parameter groups but different
    constructor options."""

    def do(job: Job) -> None:
        keys = {"params", "param_names", "process_group", "use_muon", "adjust_lr_fn"}
        named = [
            {k: v for k, v in group.items() if k in keys - {"param_names"}}
            | {"params": list(zip(group["param_names"], group["params"], strict=True))}
            for group in job.groups
        ]
        job.optimizer = Muon(named, lr=0.02, weight_decay=0.1, **options)

    return do


def _in_place(job: Job) -> None:
    row = job.groups[0]["ns_coefficients"][0]
    job.patches.callback(row.__setitem__, 0, row[0])
    row[0] = 3.0


def _patched(where: Any, name: str, error: BaseException) -> Callable[[Job], object]:
    return lambda job: job.patches.enter_context(mock.patch.object(where, name, side_effect=error))


FAULTS: dict[str, Fault] = {
    "gradient missing": Fault(in_gradient(lambda g: None), r"\w+: .*ranks \[[\d, ]+\] have no gradient"),
    "all gradients missing": Fault(lambda job: job.optimizer.zero_grad(), "no gradient"),
    "gradient sparse": Fault(
        in_gradient(lambda g: torch.zeros(g.shape).to_sparse()),
        r"rank \d: \w+: its gradient is (sparse|a plain tensor)",
    ),
    "gradient complex": Fault(in_gradient(lambda g: g.to(torch.complex64)), r"rank \d: \w+: its gradient is complex"),
    "gradient of another dtype": Fault(in_gradient(Tensor.double), r"\w+: .*float64"),
    "gradient elsewhere": Fault(
        lambda job: (vars(job.first).update(main_grad=job.first.grad), job.optimizer.zero_grad()),
        r"rank \d: \w+: its gradient is in p.main_grad",
    ),
    "lr": Fault(_option("lr", 0.5), r"\w+: .*lr=0.5"),
    "lr is NaN": Fault(_option("lr", float("nan")), r"rank \d: group 0: lr=nan must be finite"),
    "lr is text": Fault(_option("lr", "0.02"), r"rank \d: group 0: lr='0.02' is text"),
    "lr is a matrix": Fault(_option("lr", torch.ones(2, 2)), r"(?s)rank \d: group 0: lr=.* must have one element"),
    "lr is None": Fault(_option("lr", None), r"rank \d: group 0: lr=None must be a number"),
    "lr is a tensor": Fault(_option("lr", torch.tensor(0.5)), r"\w+: .*lr=0.5 \(torch.float32\)"),
    "lr missing": Fault(_lacks("lr"), r"rank \d: group 0: lacks the option 'lr'"),
    "params missing": Fault(_lacks("params"), r"rank \d: .*'params'"),
    "use_muon missing": Fault(_lacks("use_muon"), r"rank \d: group 0: lacks the option 'use_muon'"),
    "view missing": Fault(_lacks("view"), r"rank \d: group 0: lacks the option 'view'"),
    "momentum": Fault(_option("momentum", 0.5), r"\w+: .*momentum=0.5"),
    "momentum too large": Fault(_option("momentum", 2.0), r"rank \d: group 0: momentum=2.0 must be from 0 to 1"),
    "weight decay": Fault(_option("weight_decay", 0.7), r"\w+: .*weight_decay=0.7"),
    "cautious": Fault(_option("variant", "cautious"), r"\w+: .*cautious=True"),
    "nesterov": Fault(_option("nesterov", False), r"\w+: .*nesterov=False"),
    "no coefficients": Fault(_option("ns_coefficients", None), r"ns_coefficients=None must be the name of a schedule"),
    "ns_coefficients": Fault(_option("ns_coefficients", [(2.0, -1.5, 0.5)] * 5), r"describe them differently"),
    "another scale": Fault(_option("adjust_lr_fn", "match_rms_adamw"), r"adjust_lr_fn=match_rms_adamw"),
    "a scale that is a function": Fault(
        _option("adjust_lr_fn", max),
        r"rank \d: group 0: adjust_lr_fn=.* is not one of None, .*: for a factor c",
    ),
    "interrupted": Fault(
        _patched(muon, "validate", KeyboardInterrupt("stop")), "KeyboardInterrupt: stop", KeyboardInterrupt
    ),
    "a process group of nobody": Fault(_option("process_group", 5), r"rank \d: .*process_group=5 is no process group"),
    "a tensor-parallel group of nobody": Fault(_option("tp_group", "x"), r"rank \d: \w+: tp_group='x' is no process"),
    "another view": Fault(_option("transposed", True), r"describe them differently"),
    "no such view": Fault(_option("split_sizes", 4), r"split_sizes=4"),
    "a view of another type": Fault(_option("split_sizes", "3"), r"rank \d lists split_sizes='3'"),
    "no such split": Fault(_option("split_sizes", (4, 1)), r"split_sizes=\(4, 1\)"),
    "AdamW instead": Fault(_option("use_muon", False), r"ranks? \d"),
    "swapped": Fault(_swapped(torch.clone), r"\w+: .*None"),
    "frozen": Fault(_frozen, r"ranks .* describe them differently.* lacks .(a\d+|rows):"),
    "unfrozen": Fault(_unfrozen, r"ranks .* one of them lacks .f\d+:"),
    "one less": Fault(_listed(slice(1, None)), r"describe them differently: .*one of them lacks .(a\d+|rows):"),
    "turned": Fault(_listed(slice(None, None, -1)), r"describe them differently: rank \d lists "),
    "renamed": Fault(_renamed, "describe them differently: .*x: "),
    "no group": Fault(lambda job: job.groups.pop(0), r"ranks? \d"),
    "no groups": Fault(lambda job: job.groups.clear(), r"ranks? \d"),
    "replaced": Fault(lambda job: job.groups.insert(0, {**job.groups.pop(0), "lr": 0.5}), r"\w+: .*lr=0.5"),
    "moved": Fault(_moved, r"(b\d+|cols): .*lr=0.3"),
    "no momentum": Fault(lambda job: job.state.update({job.first: {}}), r"\w+: .*None"),
    "no state": Fault(lambda job: job.state.clear(), r"\w+: .*None"),
    "momentum of another shape": Fault(_momentum(lambda t: torch.ones(2, 3)), r"rank \d: \w+: its momentum_buffer"),
    "momentum of another dtype": Fault(_momentum(Tensor.bfloat16), r"\w+: .*bfloat16"),
    "momentum is a number": Fault(_momentum(lambda t: 1.0), r"rank \d: \w+: .*momentum_buffer"),
    "momentum is sparse": Fault(_momentum(lambda t: torch.ones(2).to_sparse()), r"rank \d: \w+: .*momentum_buffer"),
    "momentum of inference": Fault(_momentum(of_inference), r"rank \d: \w+: its momentum_buffer was made under"),
    "momentum complex": Fault(_momentum(lambda t: t.to(torch.complex64)), r"\w+: .*complex"),
    "AdamW betas": Fault(_option("betas", (2.0, 3.0), -1), r"rank \d: group \d: betas=\(2.0, 3.0\) must be two"),
    "AdamW lr": Fault(_option("lr", -1.0, -1), r"rank \d: group \d: lr=-1.0 must be finite"),
    "AdamW weight decay missing": Fault(
        lambda job: job.groups[-1].pop("weight_decay"), r"rank \d: group \d: lacks the option 'weight_decay'"
    ),
    "AdamW gradient sparse": Fault(
        in_gradient(Tensor.to_sparse, lambda job: job.adamw), r"rank \d: bias: its gradient is sparse"
    ),
    "AdamW gradient of another dtype": Fault(
        in_gradient(Tensor.double, lambda job: job.adamw), r"rank \d: bias: its gradient is .*64"
    ),
    "AdamW moment of another shape": Fault(_moment(lambda t: t[:3]), r"rank \d: bias: its exp_avg"),
    "AdamW moment is a number": Fault(_moment(lambda t: 1), r"rank \d: bias: .*exp_avg_sq"),
    "AdamW moment of another dtype": Fault(_moment(Tensor.double), r"rank \d: bias: .*exp_avg_sq"),
    "AdamW moment is read-only": Fault(_moment(one_row), r"rank \d: bias: .*exp_avg_sq"),
    "AdamW cast": Fault(in_storage(Tensor.double, of=lambda job: job.adamw), r"rank \d: bias: .*float64"),
    "AdamW steps are text": Fault(in_state("step", lambda t: "three", lambda job: job.adamw), r"rank \d: bias: .*step"),
    "no memory for momentum": Fault(
        lambda job: (job.state.clear(), _patched(Keeper, "_zeros", torch.OutOfMemoryError("no more"))(job)),
        r"\w+: OutOfMemoryError: no more",
        torch.OutOfMemoryError,
    ),
    "no memory for a plan": Fault(
        lambda job: (
            job.groups[0].update(ns_coefficients="cubic"),
            _patched(muon, "Offer", MemoryError("planted"))(job),
        ),
        r"rank \d: MemoryError: planted",
        MemoryError,
    ),
}
# REPLICA_FAULTS apply to plain tensors that are replicated on several ranks.
REPLICA_FAULTS: dict[str, Fault] = {
    "gradient of another shape": Fault(in_gradient(lambda g: g[:3]), r"rank \d: a\d+: its gradient .*\(3, 8\)"),
    "process group": Fault(_option("process_group", None), r"ranks? \d"),
    "coefficients changed in place": Fault(_in_place, "describe them differently"),
    "swapped for other values": Fault(_swapped(lambda t: t + 1), r"a\d+: ranks .* their values differ"),
    "cast": Fault(in_storage(Tensor.double), r"describe them differently: .*weights=torch.float64"),
    "cut": Fault(in_storage(lambda t: t[:3].clone()), r"describe them differently"),
    "one more": Fault(_one_more, r"one of them lacks .more:"),
    "marked as a shard": Fault(_marked, r"rank \d: a\d+: its attribute tensor_model_parallel says"),
    "momentum on meta": Fault(_momentum(lambda t: t.to("meta")), r"rank \d: a\d+: .*momentum_buffer"),
    "momentum read-only": Fault(_momentum(one_row), r"rank \d: a\d+: its momentum_buffer"),
    "weight read-only": Fault(in_storage(one_row, grads=False), r"rank \d: a\d+: .*expand"),
}


def _placed(kind: str) -> Callable[[Tensor], Tensor]:
    def make(like: Any) -> Tensor:
        mesh, local = like.device_mesh, like.to_local()
        placements: tuple[Any, ...] = like.placements
        if kind == "plain":
            return local
        if kind == "cut":
            local = local[:, :1]
        elif kind == "mesh":
            mesh, placements = mesh_of((2, 2)), (Replicate(), Shard(0))
            local = torch.ones(5, 8)
        # In a "crossed" tensor, the placements of the two mesh axes are swapped. Off-diagonal ranks of the mesh then
        # store a wrong block of the right shape.
        elif kind == "crossed":
            placements = placements[::-1]
        else:
            placements = ({"replicated": Replicate(), "columns": Shard(1), "partial": Partial()}[kind],) * mesh.ndim
            local = torch.ones(10, 2 if kind == "columns" else 8)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())

    return make


def _around_inference(like: Any) -> Tensor:
    return DTensor.from_local(of_inference(like.to_local()), like.device_mesh, like.placements, run_check=False)


SHARD_FAULTS: dict[str, Fault] = {
    "momentum around a tensor of inference": Fault(
        _momentum(_around_inference), r"rank \d: rows: its momentum_buffer was made under"
    ),
    "ns_steps": Fault(_option("ns_steps", 2), "describe them differently"),
    **{
        f"gradient {kind}": Fault(_put(kind), r"rows: .*ranks \[\d.* gradient that is placed unlike the parameter")
        for kind in ("replicated", "columns", "partial")
    },
    "gradient on another mesh": Fault(_put("mesh"), r"rank \d: rows: its gradient of shape .* is placed"),
    "gradient plain": Fault(
        lambda job: setattr(job.first, "grad", torch.zeros(10, 8)), r"rank \d: rows: its gradient is a plain tensor"
    ),
    "gradient cut": Fault(_put("cut"), r"rank \d: rows: its gradient stores shape"),
    **{
        f"resharded, {kind}": Fault(_swapped(_placed(kind)), r"rows: |describe them differently")
        for kind in ("replicated", "columns", "mesh", "cut", "plain")
    },
    **{
        f"momentum {kind}": Fault(_momentum(_placed(kind)), r"rank \d: rows: its momentum_buffer")
        for kind in ("plain", "replicated", "columns", "mesh", "cut")
    },
}
# GRID_FAULTS apply to matrices that are sharded along both dims, over the two axes of a 2-D mesh.
GRID_FAULTS: dict[str, Fault] = {
    "gradient crossed": Fault(_put("crossed"), r"rows: .*ranks \[\d.* gradient that is placed unlike the parameter"),
    "momentum crossed": Fault(
        _momentum(_placed("crossed")), r"its momentum_buffer is .* placed \(Shard\(dim=1\), Shard\(dim=0\)\)"
    ),
    "resharded, crossed": Fault(_swapped(_placed("crossed")), r"rows: |describe them differently"),
}
# WHOLE_FAULTS replace the optimizer of the faulty rank with one that has different constructor options. Before its
# first vote, a new optimizer knows only the ranks that store parts or replicas of its own parameters. These faults are
# therefore tested only in layouts in which at least one parameter is stored on all ranks.
WHOLE_FAULTS: dict[str, Fault] = {
    "another size of buckets": Fault(_given(bucket_bytes=128), "describe them differently"),
    "another method": Fault(_given(method="torch"), "describe them differently"),
    "other products": Fault(_given(ns_dtype=torch.float16), "describe them differently"),
}
ALL = FAULTS | REPLICA_FAULTS | SHARD_FAULTS | GRID_FAULTS | WHOLE_FAULTS


# ---------------------------------------------------------------------------------------------------------- the runner


def _anew(job: Job) -> None:
    """Clear the optimizer's state and plan, so that the next step runs like a first step."""
    job.state.clear()
    job.optimizer.binding = None


class Call(NamedTuple):
    """A call that uses an optimizer, such as `step`. The function `before` prepares the job for the call. If
    `notices_all` is True, the call must detect every fault."""

    call: Callable[[Job], object]
    before: Callable[[Job], object] = lambda job: None
    notices_all: bool = True


CALLS = {
    "step": Call(lambda job: job.step()),
    "first step": Call(lambda job: job.step(), _anew),
    "plan": Call(lambda job: job.optimizer.prepare(), notices_all=False),
    "clip": Call(lambda job: clip_grad_norm_(job.optimizer, 0.5, process_group=dist.group.WORLD), notices_all=False),
}
OF_ADAMW = (" eps", " betas", " adamw")
Round = dict[int, str]  # A Round describes one call: it maps each faulty rank to the name of its fault.
# Found is the outcome of a call on one rank: the class and message of the exception that it raised, and the names of
# all wrong values. A value is wrong if a failed call has changed it, or if it differs after the next step from that of
# a twin job without the failed calls.
Found = tuple[str, str, list[str]]


@quick_plans()
def _refusals(layout: str, call: str, rounds: Sequence[Round]) -> list[Found]:
    rank, found = dist.get_rank(), []
    job, twin = (Job(layout_of(layout)) for _ in range(2))
    job.step(0)
    twin.step(0)
    for number, faults in enumerate(rounds):
        for one in (job, twin):
            one.set_gradients(number + 1)
            CALLS[call].before(one)
        backup, kind, text, wrong = Backup(job), "", "", list[str]()
        if rank in faults:
            ALL[faults[rank]].do(job)
        before = job.held()
        try:
            CALLS[call].call(job)
        except BaseException as refused:
            kind, text = type(refused).__name__, str(refused)
            # Reading the options of an AdamW group fills in its defaults, so these options may differ before and after
            # the call.
            wrong = [f"refused: {key}" for key in unlike(before, job.held()) if not key.endswith(OF_ADAMW)]
        else:
            CALLS[call].call(twin)
        backup.restore()
        for one in (job, twin):
            one.step(1000 + number)
        found.append((kind, text, wrong + unlike(job.held(), twin.held())))
    return found


def _component(layout: str, ranks: set[int]) -> set[int]:
    """Return `ranks` together with all ranks connected to them by shared parameters, directly or through other
    ranks."""
    for _ in range(8):
        ranks = ranks.union(*(set(sets) for sets in FAMILIES.get(layout, FAMILIES["chain"]) if ranks & set(sets)))
    return ranks


def _check(layout: str, call: str, rounds: Sequence[Round], everyone: Sequence[list[Found]]) -> int:
    """Check that in each round (one call on all ranks, with faults on some of them), the call raised errors on the
    right ranks. Return the number of rounds in which it raised an error."""
    refused = 0
    for number, faults in enumerate(rounds):
        concerned = _component(layout, set(faults))
        told = [of_rank[number] for of_rank in everyone]
        texts = {told[rank][1] for rank in concerned}
        at = f"{faults} in {call} on {layout}: {told}"
        assert all(found[2] == [] for found in told), at
        assert all(told[rank][:2] == ("", "") for rank in set(range(len(everyone))) - concerned), at
        assert texts == {""} or "" not in texts, at
        if texts == {""}:
            assert not CALLS[call].notices_all, at
            continue
        refused += 1
        for rank in concerned:
            own = ALL[faults[rank]].own.__name__ if rank in faults else "ValueError"
            assert told[rank][0] == own or (told[rank][0] == "ValueError" and not CALLS[call].notices_all), at
        if len(faults) == 1:
            (name,) = faults.values()
            others = {told[rank][1] for rank in concerned if told[rank][0] == "ValueError"}
            assert len(others) <= 1, at
            assert all(re.search(ALL[name].says, text) for text in others) or not CALLS[call].notices_all, at
    return refused


def _one_by_one(names: Sequence[str], ranks: Sequence[int] = (0, 3, 1, 2)) -> list[Round]:
    return [{ranks[number % len(ranks)]: name} for number, name in enumerate(names)]


def _storm(names: Sequence[str]) -> list[Round]:
    draw = random.Random(0)
    return [{rank: draw.choice(names) for rank in draw.sample(range(4), draw.randint(2, 4))} for _ in range(5)]


PLAIN, CUT = [*FAULTS, *REPLICA_FAULTS], [*FAULTS, *SHARD_FAULTS, *WHOLE_FAULTS]
AGAINST_STATE = (
    "no state",
    "no momentum",
    "swapped",
    "resharded",
    "momentum ",
    "AdamW moment",
    "AdamW steps",
    "AdamW cast",
    "weight",
)
# Faults in FRESH do not depend on optimizer state, so even a first step, which has no state yet, must detect them.
FRESH = [name for name in (*PLAIN, *WHOLE_FAULTS) if not name.startswith(AGAINST_STATE)]
# Each row gives a layout, a call, the number of ranks, the faults that are planted in each round, and the minimum
# number of rounds in which the call must raise an error.
CASES: list[tuple[str, str, int, list[Round], int]] = [
    ("chain", "step", 4, _one_by_one(PLAIN), len(PLAIN)),
    ("fsdp2", "step", 4, _one_by_one([*SHARD_FAULTS, *WHOLE_FAULTS, *list(FAULTS)[::6]]), 31),
    *((at, "step", 4, _one_by_one(PLAIN[3 * n :: 24]), 2) for n, at in enumerate(list(FAMILIES)[1:8])),
    ("one without", "step", 4, _one_by_one(PLAIN[::16], (0, 2)), 4),
    ("hsdp", "step", 4, _one_by_one(list(FAULTS)[1::8]), 7),
    ("two dims", "step", 4, _one_by_one([*GRID_FAULTS]), 3),
    ("fsdp2+tp", "step", 4, _one_by_one(list(FAULTS)[2::16]), 4),
    ("AdamW's DTensors", "step", 4, _one_by_one(["AdamW betas", "AdamW lr"]), 2),
    ("ring of eight", "step", 8, _one_by_one(PLAIN[::24]), 3),
    ("all", "first step", 4, _one_by_one(FRESH[::5]), 9),
    ("fsdp2", "first step", 4, _one_by_one([name for name in FRESH[1::12] if name not in REPLICA_FAULTS]), 4),
    ("chain", "plan", 4, _one_by_one(PLAIN[3::8]), 4),
    ("fsdp2", "plan", 4, _one_by_one(CUT[1::10]), 3),
    ("chain", "clip", 4, _one_by_one(PLAIN[1::8]), 1),
    ("fsdp2", "clip", 4, _one_by_one(CUT[::10]), 1),
    *((at, "step", 4, _storm(list(FAULTS)), 5) for at in ("all", "fsdp2")),
]


@pytest.mark.parametrize(
    ("layout", "call", "world", "rounds", "least"), CASES, ids=[f"{c[1]}, {c[0]}, {len(c[3])}" for c in CASES]
)
def test_a_fault_is_raised_by_all_ranks_of_its_component_and_changes_nothing(
    layout: str, call: str, world: int, rounds: list[Round], least: int, world4: RankPool, world8: RankPool
) -> None:
    everyone = (world4 if world == 4 else world8).run(_refusals, layout, call, rounds)
    assert _check(layout, call, rounds, everyone) >= least
