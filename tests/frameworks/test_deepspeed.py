"""Tests of shardmuon with DeepSpeed ZeRO on CPUs. ZeRO's flat partitions split matrices at arbitrary elements. The
tests cover updates, errors for unsupported settings, checkpoints, audits, and faults on one rank. Results are compared
with a dense reference in one process (see deepspeed_job.py)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed_job import GROUPS, JOINED, MUON, RUNS, Case, Job, quiet, said_by, started
from injection import PROMPT, plant_in_all
from planted import updates
from torch import Tensor, nn

from shardmuon import audit, clip_grad_norm_
from shardmuon.auditing.report import AuditSchedule, Finding
from shardmuon.frameworks import deepspeed as zero
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import ZeroRun

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"),
]


@pytest.fixture(scope="module")
def two(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[2]


# Audits are tested with fp32 matmuls, because the rounding of bf16 matmuls could hide a planted fault.
FP32: dict[str, Any] = {"ns_dtype": torch.float32}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ROUND_ROBIN = {"round_robin_gradients": True}

# ------------------------------------------------------------------------------------------- the dense update

WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.03, "warmup_max_lr": 0.05}}}
STRADDLING = [Case(1), Case(2, "gram", accumulate=2, zero=OFFLOAD), Case(3)]
# Each case combines several DeepSpeed settings that do not affect each other, because starting DeepSpeed is slow.
# Together, the cases cover every setting named in docs/deepspeed.md.
CASES = [
    *((2, case) for case in STRADDLING),
    (2, Case(0, accumulate=2)),
    (3, Case(1, zero={"reduce_scatter": False, "parameter_alignment": True})),
    (4, Case(1, "gram", zero={**ROUND_ROBIN, **OFFLOAD, "parameter_alignment": True})),
    # bf16 weights with fp32 gradient accumulation make DeepSpeed use its BF16_Optimizer class.
    (3, Case(1, dtype="bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}, accumulate=2)),
    (2, Case(2, "gram", zero={**ROUND_ROBIN, "contiguous_gradients": False}, accumulate=2)),
    (3, Case(2, zero={**ROUND_ROBIN, "overlap_comm": True, "reduce_bucket_size": 1000, "parameter_alignment": True})),
    (3, Case(2, dtype="bf16", zero={**ROUND_ROBIN, **OFFLOAD}, accumulate=2)),
    (3, Case(2, dtype="fp16", zero=ROUND_ROBIN, config={"fp16": {"loss_scale": 1024}})),
    (2, Case(2, dtype="fp16", accumulate=2, config={"fp16": {"loss_scale": 0, "initial_scale_power": 8}})),
    (3, Case(3, dtype="fp16", config={"fp16": {"loss_scale": 1024}})),
    (
        2,
        Case(3, "gram", zero={"sub_group_size": 1000, "overlap_comm": False, "reduce_bucket_size": 1000}, accumulate=2),
    ),
    (3, Case(3, zero={"reduce_scatter": False}, zero_init=True)),
    (2, Case(3, config=WARMUP)),
    (4, Case(3, dtype="bf16", zero={**OFFLOAD, "offload_param": {"device": "cpu"}})),
    (4, Case(2, clip=1.0, accumulate=2, zero=OFFLOAD)),
    (3, Case(3, "gram", clip=1.0)),
]


def _stepped(case: Case) -> float:
    steps = 1 if case.clip else 2
    with started(case) as job:
        for number in range(steps):
            for mine, theirs in zip(job.reference.param_groups, job.optimizer.param_groups, strict=True):
                mine["lr"] = theirs["lr"] if "scheduler" in case.config else mine["lr"]
            job.step(number)
        job.check()
        # The comparison with the dense reference is meaningful only if the reference weights have moved. With lr 0.02,
        # a single-row matrix moves by at least 0.0136, because its update has a norm of at least 0.68.
        assert min(float((job.dense.get_parameter(n) - job.start[n]).norm()) for n in MUON) > 0.013
        assert ("scheduler" in case.config) == (job.optimizer.param_groups[0]["lr"] != case.groups[0][1]["lr"])
        if case.clip:
            assert float(job.engine.get_global_grad_norm()) > 2 * case.clip
        if case in STRADDLING:
            _check_straddling(job)
        return job.optimizer.traffic.orthogonalized / steps


def _check_straddling(job: Job) -> None:
    """Check that both ranks store elements of the matrix "b", and that the plans of both ranks are equal and list every
    matrix. Also check that DeepSpeed's function for reading optimizer state returns the same momentum as the dense
    reference."""
    ranks: list[Any] = [None] * 2
    held = {n for known in job.host._flats.values() for n, part, _ in known.parts if part.numel}
    dist.all_gather_object(ranks, (held, "\n".join(map(str, job.optimizer.plans))))
    (names, plan), (others, same) = ranks
    assert "b" in names & others
    assert plan == same and all(f"{name}[" in plan or f"\n{name} " in plan for name in MUON)
    for name in job.trained:
        key = "exp_avg" if name == "v" else "momentum_buffer"
        dense = job.reference.state[job.dense.get_parameter(name)][key]
        assert torch.equal(ZeroRun.whole_momentum(getattr(job.net, name)), dense), name


@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_flat_partitions_get_the_dense_update_at_every_setting(
    deepspeed_pools: dict[int, RankPool], world: int, case: Case
) -> None:
    """With ZeRO stages 1 to 3, the ranks together must orthogonalize each matrix exactly once per step. With ZeRO stage
    0, ranks do not share the work, so each rank must orthogonalize every matrix."""
    assert sum(deepspeed_pools[world].run(_stepped, case)) == (RUNS * world if case.stage == 0 else RUNS)


# ------------------------------------------------------------------------------------------- what is refused


def _marked(net: Any) -> None:
    net.a.ds_is_replaced_module = True


def _marked_on_one_rank(net: Any) -> None:
    net.a.ds_is_replaced_module = dist.get_rank() == 1


def _replaced(net: Any) -> None:
    """Replace a layer's weight with a new parameter that has fewer rows, as AutoTP does when it shards a layer."""
    net.a = nn.Parameter(net.a.detach()[:24].clone())


def _first_step(case: Case, change: Callable[[Any], object] | None, options: dict[str, Any]) -> str:
    """Return the message of the error raised by DeepSpeed's initialization or by the first step, or "" if both succeed.
    A step that raises must leave all weights unchanged."""
    try:
        with started(case, change=change, **options) as job:
            before, ran = job.weights(), job.optimizer.traffic.orthogonalized
            said = job.said()
            unchanged = all(torch.equal(before[n], w) for n, w in job.weights().items())
            assert unchanged == bool(said) == (job.optimizer.traffic.orthogonalized == ran)
            return said
    except ValueError as error:
        return f"ValueError: {error}"


BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
MASTERS = Case(1, config={"bf16": BF16_MASTERS})
STORED = "DeepSpeed keeps and offloads state"
REFUSED: list[tuple[Case, Callable[[Any], object] | None, dict[str, Any], str]] = [
    *(
        (case, change, {}, words)
        for case in (Case(1), Case(3))
        for change, words in ((_marked, "is a tensor-parallel shard"), (_replaced, "AutoTP, AutoEP"))
    ),
    (Case(1), _marked_on_one_rank, {}, "is a tensor-parallel shard"),
    (MASTERS, None, {"momentum_dtype": torch.float32}, STORED),
    (MASTERS, None, {}, ""),
    *((Case(0, dtype=dtype), None, {}, "ValueError: at ZeRO 0 with bf16 or fp16") for dtype in ("bf16", "fp16")),
]


@pytest.mark.parametrize(("case", "change", "options", "words"), REFUSED, ids=str)
def test_what_may_be_a_part_of_a_matrix_or_cannot_be_exact_is_refused_on_all(
    two: RankPool, case: Case, change: Any, options: dict[str, Any], words: str
) -> None:
    for said in two.run(_first_step, case, change, options):
        assert words in said and bool(words) == bool(said)


# ------------------------------------------------------------------------------------------- checkpoints


def _resumed(case: Case, folder: str, lost: bool = False) -> None:
    """Run three audited steps and save a checkpoint after the first. A second job loads the checkpoint, repeats the
    last two steps, and must end with the same weights. If `lost` is True, NorMuon's state is deleted after loading, and
    the next step must raise an error."""
    options = {"audit_every": 1, "variant": "normuon", **FP32}
    with started(case, **options) as job:
        for number in range(3):
            job.step(number)
            if number == 0:
                job.engine.save_checkpoint(folder, tag="here")
        job.check()
        expected = job.weights()
    with started(case, **options) as again:
        again.engine.load_checkpoint(folder, tag="here")
        for group in again.optimizer.param_groups if lost else ():
            group.pop("kept_state", None)
        for number in range(1, 3):
            again.train(number)
        assert [n for n, w in again.weights().items() if not torch.equal(w, expected[n])] == []


SMALL = {"reduce_bucket_size": 500}
SUB_GROUPS = {"sub_group_size": 300, "stage3_param_persistence_threshold": 100, **SMALL}


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case(0)),
        (3, Case(1, accumulate=2, zero={**ROUND_ROBIN, **OFFLOAD, **SMALL})),
        (2, Case(2)),
        (2, Case(3, dtype="bf16", accumulate=2, zero=SUB_GROUPS)),
    ],
    ids=str,
)
def test_a_checkpoint_resumes_bit_for_bit_with_every_step_audited(
    deepspeed_pools: dict[int, RankPool], world: int, case: Case, tmp_path: Path
) -> None:
    """The resumed job must end with the same weights as an uninterrupted job. With NorMuon, it therefore needs the
    saved second moment as well as the momentum."""
    deepspeed_pools[world].run(_resumed, case, str(tmp_path))


def test_a_checkpoint_that_lost_what_stages_keep_is_an_error_at_the_first_step(two: RankPool, tmp_path: Path) -> None:
    for error in two.run_catching(_resumed, Case(2), str(tmp_path), True):
        assert "its momentum was loaded, and not second_moment" in str(error), error


Saved = dict[str, tuple[Tensor, dict[str, Tensor]]]


def _save(case: Case, folder: str, variant: str | None) -> Saved:
    """Train for two steps, save a checkpoint, and convert it to DeepSpeed's universal format. Return the unpartitioned
    weights and optimizer state of the reference model, which is trained in the same way."""
    with started(case, variant=variant) as job:
        for number in range(2):
            job.step(number)
        job.engine.save_checkpoint(folder, tag="here")
        named = [(name, job.dense.get_parameter(name)) for name in job.trained]
        saved = {name: (p.detach().clone(), dict(job.reference.state[p])) for name, p in named}
    if dist.get_rank() == 0:  # Rank 0 runs DeepSpeed's converter, which users normally run as a separate program.
        with quiet(), contextlib.redirect_stdout(io.StringIO()):
            tool = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
            arguments = f"--input_folder {folder}/here --output_folder {folder}/universal --inject_missing_state"
            workers = "--num_extract_workers 1 --num_merge_workers 1"
            with mock.patch.object(sys, "argv", f"ds_to_universal {arguments} {workers}".split()):
                tool.main(tool.parse_arguments())
    dist.barrier()
    return saved


def _load(case: Case, folder: str, saved: Saved, variant: str | None) -> None:
    """Load a universal checkpoint and take two more steps. Weights and state must match those of the dense reference
    bitwise, and each group must keep its own options and step counts."""
    with started(replace(case, config={"checkpoint": {"load_universal": True}}), variant=variant) as job:
        if variant:
            # This extra step creates the variant's optimizer state (such as NorMuon's second moment), which loading the
            # checkpoint must replace.
            job.step(5)
        job.engine.load_checkpoint(folder, tag="universal", load_module_strict=False)
        job.step_dense(7)
        for name, (weight, state) in saved.items():
            p = job.dense.get_parameter(name)
            p.data.copy_(weight)
            for key, value in state.items():
                job.reference.state[p][key].copy_(value)
        for number in (7, 8):
            job.step(number)
        job.check()
        assert [g["lr"] for g in job.optimizer.param_groups] == [options["lr"] for _, options in case.groups]
        for states in (job.optimizer.state.values(), job.reference.state.values()):
            assert {float(state["step"]) for state in states if "step" in state} == {4.0}
        kept = [t for state in job.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        assert len({t.untyped_storage().data_ptr() for t in kept}) == len(kept), "flats share state"


# When DeepSpeed loads a checkpoint, it matches the saved parameter groups to the optimizer's groups by position. With
# ZeRO stage 3, it gives all groups the options of the first group. TURNED contains the groups of JOINED in a different
# order, beginning with an AdamW group, to test that each group nevertheless keeps its own options.
TURNED = [*JOINED[2:], *JOINED[:2]]


@pytest.mark.parametrize(
    ("world", "saved", "case", "variant"),
    [
        (4, JOINED, Case(1, groups=JOINED), "normuon+hyperball"),
        (4, JOINED, Case(3, groups=JOINED), "normuon+hyperball"),
        (2, TURNED, Case(3, groups=JOINED), None),
        (2, TURNED, Case(3, groups=TURNED, named=False), None),
    ],
    ids=["1 variant", "3 variant", "3 turned", "3 unnamed"],
)
def test_a_universal_checkpoint_goes_on_with_other_ranks_and_every_groups_own_options(
    deepspeed_pools: dict[int, RankPool], world: int, saved: Any, case: Case, variant: str | None, tmp_path: Path
) -> None:
    found = deepspeed_pools[2].run(_save, replace(case, groups=saved), str(tmp_path), variant)[0]
    deepspeed_pools[world].run(_load, case, str(tmp_path), found, variant)


# ------------------------------------------------------------------------------------------- audits and the model


@contextmanager
def _heard() -> Iterator[list[Finding]]:
    """Yield a list that collects audit findings. No AuditError is raised, so the step continues with the remaining
    parameter groups."""
    found: list[Finding] = []
    with mock.patch.object(AuditSchedule, "deliver", lambda schedule, report: found.extend(report.findings)):
        yield found


def _halved() -> AbstractContextManager[object]:
    return updates(lambda update: 0.5 * update)(None)  # type: ignore[arg-type]


def _audited(stage: int) -> None:
    with started(Case(stage), audit_every=1, **FP32) as job:
        job.optimizer.audits.samples = 4
        for number, plant in enumerate((nullcontext, _halved)):
            with _heard() as found, plant():
                job.train(number)
            # The matrix "tiny" has only two elements, too few for the audit to tell a halved update from other faults.
            names = {finding.name for finding in found if finding.where != "tiny"}
            assert bool(names) == number and names <= {"clipped_update", "scale_wrong", "update_differs"}
        known = next(iter(job.host._flats.values()))
        with _heard() as found:
            known.flat.data.narrow(0, known.parts[0][1].offset, 1).add_(1.0)
            job.train(2)
        assert "weights_elsewhere" in {finding.name for finding in found}
        calls: list[tuple[Callable[[], object], str]] = [
            (job.optimizer.prepare, "optimizer.plans"),
            (lambda: audit(job.optimizer), "audit_every=N"),
            (lambda: clip_grad_norm_(job.optimizer, 1.0), "gradient_clipping"),
            (lambda: clip_grad_norm_(job.net.parameters(), 1.0), "gradient_clipping"),
            (lambda: job.optimizer.plan, r"optimizer\.plans"),
        ]
        for refused, words in calls:
            with pytest.raises((ValueError, AttributeError), match=words):
                refused()


@pytest.mark.parametrize("stage", [1, 3])
def test_audits_see_whole_matrices_through_partitions_and_weights_that_are_elsewhere(two: RankPool, stage: int) -> None:
    two.run(_audited, stage)


def _unlike_model(stage: int, written: bool) -> None:
    """Make a weight of the model differ from its fp32 master weight. If `written` is True, change the
    model's weight on rank 1. Otherwise, change the master weight. Steps must then raise an error until the user follows
    the advice in the error message."""
    with started(Case(stage)) as job:
        import deepspeed

        e = job.net.e
        wanted = job.dense.e.detach() * 2 if written else job.dense.e.detach().flip(0).clone()
        own = e if stage < 3 else e.ds_tensor
        if not written:
            deepspeed.utils.safe_set_full_fp32_param(e, wanted)
        elif dist.get_rank() == 1:
            own.data.mul_(2)
        said = job.said()
        assert re.match(r"ValueError: ranks? [01,]+: e: the fp32 weights that DeepSpeed steps", said)
        assert "GatheredParameters([p], modifier_rank=0)" in said
        with deepspeed.zero.GatheredParameters([e], modifier_rank=0, enabled=stage == 3):
            e.data.copy_(wanted)
        assert "engine.optimizer.refresh_fp32_params()" in said
        job.engine.optimizer.refresh_fp32_params()
        job.dense.e.data.copy_(wanted)
        job.step(0)
        job.check()


@pytest.mark.parametrize(("stage", "written"), [(2, True), (1, False), (3, False)])
def test_weights_that_only_one_side_has_are_refused_with_a_way_that_there_is(
    two: RankPool, stage: int, written: bool
) -> None:
    two.run(_unlike_model, stage, written)


# ------------------------------------------------------------------------------------------- all or nothing


def _adamw_raises() -> AbstractContextManager[object]:
    original = zero.step_adamw

    def fails(groups: Any, *args: Any) -> None:
        if dist.get_rank() == 1 and any(not group["use_muon"] and group["params"] for group in groups):
            raise ValueError("planted in AdamW")
        original(groups, *args)

    return mock.patch.object(zero, "step_adamw", fails)


_OUT_OF_MEMORY = partial(mock.patch, "shardmuon.step.update.apply_", side_effect=RuntimeError("out of memory"))
AUDITED: dict[str, Any] = {"audit_every": 1, **FP32}


def _in_a_step(plant: Callable[[], AbstractContextManager[object]], job: Job, folder: str) -> str:
    with plant():
        return job.said(1)


def _without_a_group(job: Job, saved: Any) -> None:
    saved["base_optimizer_state" if job.case.stage < 3 else "optimizer_state_dict"]["param_groups"].pop()


def _in_loading(job: Job, folder: str) -> str:
    """Load a checkpoint in which rank 1's file lacks a parameter group, put the complete file back, and return the
    error message."""
    path = Path(job.engine._get_zero_ckpt_name(folder, "here"))
    whole = path.read_bytes()
    if dist.get_rank() == 1:
        saved = torch.load(path, weights_only=False)
        _without_a_group(job, saved["optimizer_state_dict"])
        torch.save(saved, path)
    dist.barrier()
    said = said_by(lambda: job.engine.load_checkpoint(folder, tag="here"))
    path.write_bytes(whole)
    dist.barrier()
    return said


def _broken(stage: int, options: dict[str, Any], fail: Callable[[Job, str], str], words: str, folder: str) -> None:
    with started(Case(stage), **options) as job:
        job.step(0)
        job.engine.save_checkpoint(folder, tag="here")
        began = time.monotonic()
        assert re.match(words.split(" or ")[-dist.get_rank()], fail(job, folder), re.DOTALL)
        refused = "ExchangeError: an earlier step was broken off"
        assert job.said(2).startswith(refused) and job.said(3).startswith(refused)
        assert time.monotonic() - began < PROMPT and len(job.optimizer.param_groups) == len(GROUPS)
        job.engine.load_checkpoint(folder, tag="here")
        # DeepSpeed still has the gradients of the step that raised an error. Discard these gradients before the next
        # step.
        job.engine.optimizer.zero_grad()
        job.step(1)
        job.check(MUON)


@pytest.mark.parametrize(
    ("stage", "options", "fail", "words"),
    [
        (3, {}, partial(_in_a_step, _OUT_OF_MEMORY), "ExchangeError: .*out of memory"),
        # When AdamW raises on rank 1, rank 0 has already started to update the next parameter group, which Muon
        # optimizes. Rank 0 must raise as well, because rank 1 does not take part in this update.
        (
            1,
            {},
            partial(_in_a_step, _adamw_raises),
            "ExchangeError: .*does not answer or ValueError: planted in AdamW",
        ),
        # The audit raises an error between the updates of two parameter groups, so the step is incomplete.
        (3, AUDITED, partial(_in_a_step, _halved), "AuditError"),
        # When loading fails on rank 1, the other ranks must raise as well. Otherwise they would wait in DeepSpeed's own
        # collectives, or continue training with the loaded state.
        *((stage, {}, _in_loading, "ValueError.*parameter group") for stage in (1, 3)),
    ],
)
def test_what_broke_off_on_one_rank_is_raised_on_all_until_a_checkpoint_is_loaded(
    two: RankPool, stage: int, options: dict[str, Any], fail: Any, words: str, tmp_path: Path
) -> None:
    two.run(_broken, stage, options, fail, words, str(tmp_path))


def _loaded_by_hand(stage: int, folder: str) -> None:
    with started(Case(stage)) as job:
        job.step(0)
        job.engine.save_checkpoint(folder, tag="here")
        if dist.get_rank() == 1:
            saved = torch.load(job.engine._get_zero_ckpt_name(folder, "here"), weights_only=False)
            every = [saved["optimizer_state_dict"]] * 2
            # With ZeRO stage 3, `load_state_dict` is a collective operation, because it shards small parameters again.
            # Below stage 3, rank 1 can load state by itself.
            if stage < 3:
                job.engine.optimizer.load_state_dict(every)
            _without_a_group(job, every[0])
            assert re.match("ValueError.*parameter group", said_by(lambda: job.engine.optimizer.load_state_dict(every)))
        job.step(1)
        job.check(MUON)


@pytest.mark.parametrize("stage", [1, 3])
def test_state_that_one_rank_loads_by_itself_or_refuses_leaves_all_in_step(
    two: RankPool, stage: int, tmp_path: Path
) -> None:
    """Unlike `load_checkpoint` of the DeepSpeed engine, `load_state_dict` of DeepSpeed's optimizer can run on a single
    rank. Whether or not this load succeeds, the next step must match the dense reference on all ranks."""
    two.run(_loaded_by_hand, stage, str(tmp_path))


def _option(index: int, key: str, value: Any) -> Callable[[Job], AbstractContextManager[object]]:
    return lambda job: mock.patch.dict(job.host.groups[index][0], {key: value})


def _short_momentum(job: Job) -> AbstractContextManager[object]:
    flat = next(flat for flat, s in job.optimizer.state.items() if s["exp_avg_sq"].stride() == (0,))
    return mock.patch.dict(job.optimizer.state[flat], {"exp_avg": torch.zeros(3)})


def _planted_in(method: str) -> tuple[str, Callable[[Job], AbstractContextManager[object]]]:
    """Return an error text, and a function that makes a method of `_Flat`, the optimizer core for a DeepSpeed flat
    buffer, raise an error with this text."""
    error = RuntimeError(f"planted in {method}")
    return str(error), lambda job: mock.patch.object(zero._Flat, method, side_effect=error)


OF_ONE_RANK = [
    ("lr", _option(2, "lr", math.nan)),
    ("betas", _option(2, "betas", (0.9,))),
    ("momentum of a ZeRO partition", _short_momentum),
    *map(_planted_in, ("show", "take_options")),
]


def _faults_on_one_rank(stage: int) -> None:
    """On rank 1, plant invalid options, then momentum of the wrong shape, then an exception in each function that runs
    before the first collective of a step. For each of these faults, all ranks must raise an error before the step
    changes anything."""
    with started(Case(stage)) as job:
        job.step(0)
        for words, plant in OF_ONE_RANK:
            # Discard the optimizer cores that step DeepSpeed's flat buffers, so that the next step runs all checks of a
            # first step again.
            vars(job.host).update(_flats={}, _unchecked=True, _num_stepped=0)
            with plant(job) if dist.get_rank() == 1 else nullcontext():
                said = job.said(1)
            assert said.startswith("ValueError") and words in said
            job.engine.optimizer.zero_grad()
        numbers, original, host = itertools.count(1), job.optimizer.step, job.host

        def step(*args: Any, **options: Any) -> Any:
            # Discard the optimizer cores that step DeepSpeed's flat buffers, as loading a checkpoint does, so that the
            # step repeats all of its preparations.
            if host._num_stepped in (0, len(host._flats)):
                vars(host).update(_flats={}, _unchecked=True, _num_stepped=0)
            return original(*args, **options)

        job.optimizer.step = step  # type: ignore[method-assign]
        known, passed = plant_in_all(job.optimizer, lambda: job.step(next(numbers)))
        assert {"_attach", "_begin", "_slices_of", "_make_shard", "_differs_from_model", "_refuse_options"} <= {*known}
        assert passed == []
        # `check` compares the weights with the dense reference, so it passes only if the steps that raised an error
        # changed nothing.
        job.check()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_goes_wrong_on_one_rank_before_the_agreement_is_raised_on_all(two: RankPool, stage: int) -> None:
    two.run(_faults_on_one_rank, stage)
