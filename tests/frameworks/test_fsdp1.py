"""Tests of FSDP1: equality with a single process, state dicts, gradient clipping, audits, and errors for unsupported
setups."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp1_model import OPTIONS, alone, full_state, job, loss, plain_weights, tied, train, unlike, wrapped
from injection import join, plant_in_all
from planted import updates
from tolerances import roundoff, sum_roundoff
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import shardmuon
from shardmuon import Muon, checkpoint, param_groups
from shardmuon.layout.engines.fsdp1 import UnitPlace
from shardmuon.testing.compare import Comparison
from shardmuon.testing.frameworks import Fsdp1Run, quiet
from shardmuon.testing.layouts import ParamCase
from shardmuon.testing.pool import RankPool

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")

# ------------------------------------------------------------------------------------------- the same update


def _trained(strategy: str, before: bool, how: dict[str, Any]) -> tuple[list[str], bool]:
    # On a CPU, FSDP1 with CPU offloading adds the second step's gradient to the first step's, so only one step is
    # compared.
    net, steps = tied(), 1 if how else 3
    model = net if before else wrapped(net, strategy, **how)
    optimizer = Muon(model, **OPTIONS)
    model = wrapped(net, strategy, **how) if before else model
    # pin_memory and stream synchronization need an accelerator, so both are replaced with functions that do nothing.
    with (
        mock.patch.object(Tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch.cpu.Stream, "synchronize", create=True),
    ):
        train(model, optimizer, range(steps))
    routed, plain = (param_groups(each, lr=1e-3).rows for each in (model, tied()))
    return unlike(Fsdp1Run.whole_weights(model), alone(steps)), routed == plain


@pytest.mark.parametrize(
    # On four ranks, HYBRID_SHARD has two replicas, and the replicas divide the orthogonalizations between them.
    ("world", "strategy", "before", "how"),
    [
        *((2, strategy, at % 2 == 0, {}) for at, strategy in enumerate(STRATEGIES)),
        (2, "FULL_SHARD", False, {"cpu_offload": CPUOffload(offload_params=True)}),
        (4, "HYBRID_SHARD", False, {}),
    ],
)
def test_a_model_trains_as_on_one_process(world: int, strategy: str, before: bool, how: dict[str, Any]) -> None:
    """Train a model with matrices, a tied embedding, norms, biases and a frozen FSDP unit. The weights must equal those
    of a single process, and parameters must be routed as in the unwrapped model. `before` says whether the optimizer is
    created before wrapping."""
    assert RankPool.cached(world).run(_trained, strategy, before, how) == [([], True)] * world


def _mixed() -> list[str]:
    """Train two steps in mixed precision. Return the names of the weights that differ from a single-process run. The
    single-process run gets copies of FSDP1's gradients, because FSDP1 computes gradients with bf16 weights."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = wrapped(tied(), mixed_precision=precision), tied()
    both = Muon(model, **OPTIONS), Muon(plain, **OPTIONS)
    for step in range(2):
        loss(model, step).backward()
        with FSDP.summon_full_params(model, writeback=False, with_grads=True):
            named = ((name.replace("_fsdp_wrapped_module.", ""), p.grad) for name, p in model.named_parameters())
            found = {name: grad.clone() for name, grad in named if grad is not None}
        for name, p in plain.named_parameters():
            p.grad = found.get(name)
        for each in both:
            each.step()
            each.zero_grad()
    return unlike(Fsdp1Run.whole_weights(model), plain_weights(plain))


def test_mixed_precision_steps_fp32_weights(world2: RankPool) -> None:
    assert world2.run(_mixed) == [[], []]


def _nothing_here() -> tuple[bool, int]:
    """Take a step on a 2 x 2 matrix on three ranks. The last rank's shard is only padding. Return whether the result is
    bitwise equal to the dense reference, and the number of elements stored on this rank."""
    found = Comparison.with_dense(
        "fsdp1",
        table={"w": ParamCase((2, 2), "")},
        lr=0.25,
        about=lambda muon: sum(place.numel for place in map(UnitPlace.of, muon.param_groups[0]["params"]) if place),
    )
    return found.bitwise, found.about


def test_a_rank_may_keep_nothing_at_all(world3: RankPool) -> None:
    assert world3.run(_nothing_here) == [(True, 2), (True, 2), (True, 0)]


# ------------------------------------------------------------------------------------------------ checkpoints


def _saved_full(strategy: str, file: str) -> list[str]:
    model, optimizer = job(strategy, KEEPING)
    train(model, optimizer, range(2))
    saved = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(saved, file)
    train(model, optimizer, range(2, 4))
    return unlike(Fsdp1Run.whole_weights(model), alone(4, **KEEPING))


def _resumed_full(strategy: str, file: str, lost: bool = False) -> list[str]:
    saved = torch.load(file, weights_only=True)
    for group in saved["optimizer"]["param_groups"] if lost else ():
        # Delete the first matrix's post-processing state (such as NorMuon's). Every rank must raise an error, although
        # some ranks store no element of this matrix.
        group.get("kept_state", {}).pop("0", None)
    model, optimizer = job(strategy, KEEPING)
    with quiet(), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"]))
    again = full_state(model, optimizer)["optimizer"]["state"]
    for name, state in saved["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(again[name][key]), torch.as_tensor(value)), (name, key)
    assert all("kept_state" not in group for group in optimizer.param_groups)
    train(model, optimizer, range(2, 4))
    return unlike(Fsdp1Run.whole_weights(model), alone(4, **KEEPING))


KEEPING = {"variant": "normuon"}


def test_full_state_resumes_on_any_number_of_ranks_or_is_refused_where_it_lost_what_stages_keep(
    world2: RankPool, world4: RankPool, tmp_path: Path
) -> None:
    file = str(tmp_path / "full.pt")
    assert world2.run(_saved_full, "FULL_SHARD", file) == [[], []]
    assert world2.run(_resumed_full, "SHARD_GRAD_OP", file) == [[], []]
    for strategy in ("HYBRID_SHARD", "FULL_SHARD"):
        assert world4.run(_resumed_full, strategy, file) == [[]] * 4
        assert_refused(
            world4, "lacks ['second_moment'], which variant='normuon' keeps", _resumed_full, strategy, file, True
        )
    # The full state dict, saved with FSDP1, must also load in a single process without FSDP1.
    saved = torch.load(file, weights_only=True)
    model = tied()
    optimizer = Muon(model, **OPTIONS, **KEEPING)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    kept = {"momentum_buffer", "second_moment"}
    assert all(set(optimizer.state[p]) == kept for p in optimizer.param_groups[0]["params"])
    train(model, optimizer, range(2, 4))
    assert unlike(plain_weights(model), alone(4, **KEEPING)) == []


def _states(model: nn.Module, optimizer: Muon, options: StateDictOptions | None) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True))


def _load(folder: str, model: nn.Module, optimizer: Muon, options: StateDictOptions | None = None) -> None:
    with quiet():
        found = _states(model, optimizer, options)
        dcp.load(found, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=options is None))
        states = {"model_state_dict": found["model"], "optim_state_dict": found["optim"]}
        set_state_dict(model, optimizer, **states, options=options)


def _resumed(folder: str, form: str, options: dict[str, Any]) -> list[str]:
    """Train two steps, transfer the state to a second optimizer as a state dict of the type `form`, and train that
    optimizer for two more steps. Return the names of the weights that differ from an uninterrupted run."""
    placed = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))} if form == "dtensors" else {}
    first, optimizer = job("FULL_SHARD", options, **placed)
    train(first, optimizer, range(2))
    if form == "a rank's own":
        second, other = first, Muon(first, **OPTIONS, **options)
        other.load_state_dict(optimizer.state_dict())
    else:
        how = StateDictOptions(full_state_dict=form == "full", flatten_optimizer_state_dict=form == "flattened")
        with quiet():
            dcp.save(_states(first, optimizer, how), checkpoint_id=folder)
        second, other = job("FULL_SHARD", options, **placed)
        _load(folder, second, other, how)
    train(second, other, range(2, 4))
    return unlike(Fsdp1Run.whole_weights(second), alone(4, **options))


BF16 = {"momentum_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {}) for form in ("full", "sharded tensors", "dtensors", "flattened", "a rank's own")),
        ("a rank's own", BF16),
    ],
)
def test_state_in_every_form_resumes(world2: RankPool, form: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert world2.run(_resumed, str(tmp_path), form, options) == [[], []]


def _net(kind: str) -> nn.Module:
    """Return a small model whose row counts are divisible by 2 and 4, because torch cannot load state dicts with other
    row counts into FSDP1. The norm layer's weight is stored on the first rank and the last bias on the last rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    if kind == "fsdp1":
        return Fsdp1Run.wrap(net, "FULL_SHARD")
    if kind == "fsdp2":
        return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return nn.parallel.DistributedDataParallel(net) if kind == "ddp" else net


def _run(model: nn.Module, optimizer: Muon, seeds: range) -> dict[str, Tensor]:
    for seed in seeds:
        model(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with quiet():
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


KINDS = ("fsdp1", "fsdp2", "ddp")


def _saved_by(folder: str) -> None:
    for kind in KINDS:
        model = _net(kind)
        optimizer = Muon(model, **KEEPING, **OPTIONS)
        _run(model, optimizer, range(2))
        with quiet():
            checkpoint.save(f"{folder}/{kind}", model, optimizer)


def _loaded_by(folder: str, pairs: list[tuple[str, str]]) -> list[str]:
    plain, wrong = _net("plain"), []
    expected = _run(plain, Muon(plain, **KEEPING, **OPTIONS), range(4))
    for source, target in pairs:
        model = _net(target)
        optimizer = Muon(model, **OPTIONS)
        with quiet():
            checkpoint.load(f"{folder}/{source}", model, optimizer)
        wrong += [f"{source} -> {target}: {name}" for name in unlike(_run(model, optimizer, range(2, 4)), expected)]
    return wrong


def _by_dcp_alone(folder: str, source: str) -> list[str]:
    model, other = _net(source), _net("fsdp1")
    optimizer, loading = (Muon(each, **OPTIONS) for each in (model, other))
    _run(model, optimizer, range(1))
    with quiet():
        dcp.save(_states(model, optimizer, None), checkpoint_id=folder)
    _load(folder, other, loading)
    return unlike(_run(other, loading, range(1, 3)), _run(model, optimizer, range(1, 3)))


@pytest.mark.parametrize("source", ["fsdp2", "ddp"])
def test_dcp_alone_loads_into_fsdp1_what_others_saved_if_it_may_leave_zeros(
    source: str, world2: RankPool, tmp_path: Path
) -> None:
    assert world2.run(_by_dcp_alone, str(tmp_path), source) == [[], []]


def test_state_goes_between_fsdp1_fsdp2_and_ddp_in_every_direction_and_onto_other_ranks(
    world4: RankPool, world2: RankPool, tmp_path: Path
) -> None:
    world4.run(_saved_by, str(tmp_path))
    # The checkpoints were saved on 4 ranks. On 2 ranks, each kind of model loads the checkpoints of all kinds, which
    # shows that the checkpoints are sound. On 4 ranks, each kind therefore loads only that of one other kind.
    assert [
        *world2.run(_loaded_by, str(tmp_path), [*itertools.product(KINDS, KINDS)]),
        *world4.run(_loaded_by, str(tmp_path), [*zip(KINDS, KINDS[1:] + KINDS[:1], strict=True)]),
    ] == [[]] * 6


# --------------------------------------------------------------------------------- clipping, audits


def _clipped(strategy: str) -> list[tuple[float, ...]]:
    """Call shardmuon's `clip_grad_norm_` with the optimizer, then with the model. For each call, return three gradient
    norms: the plain model's norm (computed by torch), the sharded model's norm (by shardmuon), and the sharded model's
    norm after clipping (by FSDP1)."""
    plain, (model, optimizer), found = tied(), job(strategy), []
    for given in (optimizer, model):
        for each in (plain, model):
            each.zero_grad()
            loss(each, 0).backward()
        norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01), shardmuon.clip_grad_norm_(given, 0.01)
        found.append((*map(float, norms), float(model.clip_grad_norm_(1e9))))
    return found


@pytest.mark.parametrize(("world", "strategy"), [(2, "FULL_SHARD"), (2, "NO_SHARD"), (4, "HYBRID_SHARD")])
def test_clipping_counts_each_element_once(world: int, strategy: str) -> None:
    """shardmuon's norm must equal torch's norm of the unwrapped model's gradients. After clipping, the norm must be
    max_norm * norm / (norm + 1e-6), up to rounding."""
    for expected, ours, theirs in itertools.chain(*RankPool.cached(world).run(_clipped, strategy)):
        assert abs(ours - expected) <= NORM_ROUNDOFF * expected
        left = 0.01 * expected / (expected + 1e-6)
        assert abs(theirs - left) <= (2 * NORM_ROUNDOFF + roundoff(torch.float32)) * left


# NORM_ROUNDOFF bounds the relative difference between two norms of 2,300 elements. Both norms sum squares in fp32. The
# square root halves the relative error of each sum, so the bound for one sum suffices.
NORM_ROUNDOFF = sum_roundoff(torch.float32, 2_300)


def assert_refused(pool: RankPool, says: str, call: Callable[..., None], *args: Any, kind: str = "ValueError") -> None:
    """Assert that every rank raises an error whose class is named `kind` and whose message contains `says`."""
    for failure in pool.run_catching(call, *args):
        assert failure is not None and failure.type_name == kind and says in failure.message, failure


def _audited(factor: float) -> None:
    model, optimizer = job(options={"audit_every": 1})
    with updates(lambda update: factor * update)(None):  # type: ignore[arg-type]
        train(model, optimizer, range(2))
    assert optimizer.audits.num_audits == 2


def test_an_audit_names_a_planted_fault_and_none_in_a_sound_step(world2: RankPool) -> None:
    world2.run(_audited, 1)
    assert_refused(world2, "layers.", _audited, 2, kind="AuditError")


# ------------------------------------------------------------------------------------------------- what is refused


def _mistake(case: str) -> None:
    net: nn.Module = tied()
    if case == "memory order":
        net = nn.Sequential(nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), nn.Linear(4, 4))
    if case == "tensor parallel":
        vars(net.get_parameter("layers.0.up.weight")).update(tensor_model_parallel=True, partition_dim=0)
    model = wrapped(net)
    if case == "all parameters":
        Muon(model.parameters(), lr=0.02)
    optimizer = Muon(model, **OPTIONS)
    if case == "gathered":
        with FSDP.summon_full_params(model):
            optimizer.prepare()
    if case == "model gone":
        del model, net
        gc.collect()  # FSDP1's modules are part of reference cycles, so only garbage collection frees them.
    optimizer.prepare()
    with model.no_sync():
        train(model, optimizer, range(1))


MISTAKES = {
    "all parameters": "give Muon the model",
    "memory order": "0.weight: FSDP1 has flattened it in the order of its memory, which was not contiguous",
    "tensor parallel": "layers.0.up.weight: it is marked as a tensor-parallel shard",
    "gathered": "FSDP1 has gathered it",
    "no_sync": "its gradient is a tensor of shape",
    "model gone": "its wrapped model cannot be found",
}
FLAT = (
    "it is a flat parameter of FSDP1 (use_orig_params=False), the tensors of a unit in one: write "
    "FullyShardedDataParallel(..., use_orig_params=True)"
)


def _clip(model: nn.Module) -> None:
    model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    shardmuon.clip_grad_norm_(model, 1.0)


GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "the model": lambda model: Muon(model, **OPTIONS),
    "part of it": lambda model: param_groups(nn.Sequential(model), lr=0.02),
    "parameters": lambda model: Muon(model.parameters(), lr=0.02),
    "AdamW's": lambda model: Muon([{"params": list(model.named_parameters()), "use_muon": False}], lr=0.02),
    "added": lambda model: Muon([nn.Parameter(torch.ones(2, 2))], lr=0.02).add_param_group(
        {"params": list(model.parameters())}
    ),
    "clipped": _clip,
}


def _flat(case: str) -> None:
    GIVEN[case](wrapped(tied(), STRATEGIES[list(GIVEN).index(case) % 4], use_orig_params=False))


def _put_in_later(use_muon: bool) -> None:
    """On rank 1, replace a parameter in one of the optimizer's parameter groups with an FSDP1 flat parameter, as
    frameworks that swap parameters do."""
    (_net, optimizer), flat = job(), wrapped(tied(), use_orig_params=False)
    if dist.get_rank() == 1:
        group = next(g for g in optimizer.param_groups if g["use_muon"] == use_muon)
        group["params"] = [next(flat.parameters()), *group["params"][1:]]
    optimizer.prepare()


@pytest.mark.parametrize(
    ("call", "case", "says"),
    [
        *((_mistake, case, says) for case, says in MISTAKES.items()),
        *((_flat, case, FLAT) for case in GIVEN),
        *((_put_in_later, use_muon, FLAT) for use_muon in (True, False)),
    ],
)
def test_what_does_not_fit_is_refused_by_all_ranks_with_what_to_write(
    world2: RankPool, call: Callable[..., None], case: Any, says: str
) -> None:
    """If FSDP1 is used in an unsupported way, all ranks must raise an error that says what to change. For example,
    FSDP1's flat parameters must be rejected."""
    assert_refused(world2, says, call, case)


# By default, the test raises an exception in every 9th function that a step runs before its first collective. With
# PLANT_STRIDE=1, the test covers every such function, which takes a minute.
STRIDE = int(os.environ.get("PLANT_STRIDE", "9"))


def _planted(store: str) -> tuple[list[str], list[str]]:
    join(store)
    torch.manual_seed(0)
    model = Fsdp1Run.wrap(nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False)), "FULL_SHARD")
    optimizer = Muon(model, **OPTIONS)

    def run() -> None:
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # Run two steps to fill the caches, because the exceptions must be raised in a step that uses cached results.
    for _ in range(2):
        run()
    return plant_in_all(optimizer, run, STRIDE)


def test_an_exception_anywhere_before_the_agreement_is_raised_on_every_rank(tmp_path: Path) -> None:
    with RankPool(2, timeout=120.0) as pool:
        for known, passed in pool.run(_planted, str(tmp_path / "store")):
            assert "read" in known and passed == []
