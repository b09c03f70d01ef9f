"""Tests of NVMe offloading in DeepSpeed ZeRO stage 3, with real swap files.

The tests that swap need DeepSpeed's async_io extension, which takes a few minutes to compile (`make nvme`). The other
tests do not need it: they check that unsupported settings raise errors.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed_job import Case, Groups, Shapes, started
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.frameworks.deepspeed import _refuse_loaded, _refuse_options, _refuse_swaps, _Slice, load_checkpoint
from shardmuon.testing import RankError, RankPool
from shardmuon.testing.frameworks import ZeroRun

swaps = pytest.mark.skipif(
    os.environ.get("SHARDMUON_NVME") != "1" or importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed's async_io, which takes minutes to compile: make nvme",
)
MIB = 2**20

# DeepSpeed divides these parameters into the sub-groups (a, b), (c), (d, e), (emb), (v, w) and (heads). On two ranks,
# the shard of "a" is exactly 1 MiB, the smallest size that is swapped to disk. The parameters c, v, w and heads stay in
# memory. The parameter e by itself is below the smallest size, but is swapped with its sub-group.
SHAPES: Shapes = {
    "a": (512, 1024),
    "b": (700, 768),
    "c": (96, 64),
    "d": (768, 704),
    "e": (40, 36),
    "emb": (1100, 512),
    "v": (37,),
    "w": (64,),
    "heads": (24, 16),
}
SWAPPED = 3
ADAMW = ("emb", "v", "w")
GROUPS: Groups = [
    (("a", "b", "c"), {"lr": 0.02}),
    (("d", "e"), {"lr": 0.01, "weight_decay": 0.2}),
    (("emb",), {"use_muon": False, "lr": 3e-3}),
    (("v", "w"), {"use_muon": False, "lr": 1e-3}),
    (("heads",), {"split_sizes": 3, "lr": 0.03, "momentum": 0.9}),
]


def nvme(
    folder: Path | str,
    offload: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    shapes: Shapes = SHAPES,
    groups: Groups = GROUPS,
    **options: Any,
) -> Case:
    """Return the configuration of a DeepSpeed job with ZeRO stage 3 and swap files in `folder`. `offload` and `zero`
    add settings to DeepSpeed's `offload_optimizer` and `zero_optimization` sections."""
    device = {"device": "nvme", "nvme_path": str(folder), **(offload or {})}
    settings = {"offload_optimizer": device, "sub_group_size": 600_000, **(zero or {})}
    return Case(3, zero=settings, shapes=shapes, groups=groups, **options)


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, timeout=200.0) as pool:
        yield pool


def _run(case: Case) -> None:
    with started(case) as job:
        for number in range(3):
            job.step(number)
        job.check()
        masters = job.masters()
        for name in case.shapes:
            dense = job.dense.get_parameter(name)
            assert torch.equal(masters[name], dense.detach()), name
            kept = job.reference.state[dense]["exp_avg" if name in ADAMW else "momentum_buffer"]
            assert torch.equal(ZeroRun.whole_momentum(getattr(job.net, name)), kept), name
            assert float((dense - job.start[name]).norm()) > 1e-3
        state = {flat: of for flat, of in job.optimizer.state.items() if flat.dim() == 1 and not flat.numel()}
        assert len(state) == SWAPPED
        assert sum("exp_avg_sq" in of for of in state.values()) == 1
        assert not any(s.numel() for of in state.values() for key, s in of.items() if key != "step")
        files = os.listdir(job.engine.optimizer.optimizer_swapper.swap_folder)
        assert sum(name.startswith("exp_avg-") for name in files) == SWAPPED
        assert any("gradient" in name for name in files)


@swaps
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": "bf16"},
        {"accumulate": 2, "offload": {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}},
    ],
    ids=str,
)
def test_swapped_weights_and_momentum_get_the_dense_update(
    two: RankPool, changed: dict[str, Any], tmp_path: Path
) -> None:
    two.run(_run, nvme(tmp_path, **changed))


def _save(case: Case, folder: str, later: int) -> dict[str, Tensor]:
    with started(case) as job:
        for number in range(later):
            job.train(number)
            if number == 2:
                job.optimizer.param_groups[1]["lr"] = 0.005
                job.engine.save_checkpoint(folder, tag="here")
        return job.masters()


def _resume(case: Case, folder: str, expected: dict[str, Tensor], before: int) -> None:
    """Train `before` steps on data that the saved job did not use, then load the saved job's checkpoint. The steps
    after loading must be bitwise identical to those of the job that saved the checkpoint."""
    with started(case) as job:
        for number in range(before):
            job.train(100 + number)
        load_checkpoint(job.engine, folder)
        assert {int(s["step"]) for s in job.optimizer.state.values()} == {3}
        for number in (3, 4):
            job.train(number)
        assert [n for n, w in job.masters().items() if not torch.equal(w, expected[n])] == []


@swaps
def test_a_new_process_resumes_bit_for_bit(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    with RankPool(2, timeout=200.0) as first:
        expected = first.run(_save, nvme(tmp_path / "swap"), saved, 5)[0]
    arguments = nvme(tmp_path / "other"), saved, expected
    for before in (0, 2):  # If `before` is 2, the optimizer already has state when it loads the checkpoint.
        with RankPool(2, timeout=200.0) as fresh:
            fresh.run(_resume, *arguments, before)
            if before:
                with pytest.raises(RankError, match="in a process that has made no other engine"):
                    fresh.run(_resume, *arguments, before)


def _loaded_by_deepspeed(case: Case, folder: str) -> None:
    """Load a checkpoint with DeepSpeed's own `load_checkpoint` instead of shardmuon's, and check that the next step
    raises an error. Then check that a new job in the same swap folder can train and save."""
    with started(case) as job:
        job.engine.load_checkpoint(folder, tag="here")
        before = job.masters()
        assert "load_checkpoint(engine, folder, tag)" in job.said()
        assert all(torch.equal(before[n], w) for n, w in job.masters().items())
    with started(case) as again:
        again.train(0)
        again.engine.save_checkpoint(folder, tag="there")
        again.train(1)


@swaps
def test_a_checkpoint_loaded_by_deepspeed_alone_is_not_trained_on(two: RankPool, tmp_path: Path) -> None:
    case = nvme(tmp_path / "swap")
    two.run(_save, case, str(tmp_path / "saved"), 3)
    two.run(_loaded_by_deepspeed, case, str(tmp_path / "saved"))


def _first_step(case: Case) -> str:
    with started(case) as job:
        return job.said()


@swaps
def test_a_gradient_at_an_odd_address_is_refused(two: RankPool, tmp_path: Path) -> None:
    """The first parameter has a single element per rank and stays in memory. The next gradient, which is swapped to
    disk, therefore starts at an unaligned address. DeepSpeed would lose this gradient, so the first step must raise an
    error."""
    shapes: Shapes = {"first": (2, 1), "large": (512, 1024)}
    for said in two.run(_first_step, nvme(tmp_path, shapes=shapes, groups=[(("first", "large"), {"lr": 0.02})])):
        assert ": large: " in said and "element 1 of its sub-group (byte 4)" in said


# ------------------------------------------------------------------------------------------ without swap files

QUARTER = MIB // 4  # Gradients with fewer than QUARTER elements (1 MiB in fp32) are not swapped to disk.


@pytest.mark.parametrize(
    ("numels", "wrong"),
    [
        ((QUARTER, QUARTER), None),
        ((QUARTER + 128, QUARTER), "p1"),
        # A gradient below the minimum size for swapping is copied in memory, so it may start at any address.
        ((37, QUARTER - 1), None),
        ((37, QUARTER), "p1"),
        # Each of the two small gradients fills half a page, so the gradient after them starts at a page boundary.
        ((QUARTER, 512, 512, QUARTER), None),
    ],
)
def test_swapped_gradients_must_begin_at_a_page(numels: tuple[int, ...], wrong: str | None) -> None:
    offsets = [0, *itertools.accumulate(numels[:-1])]
    zero3 = SimpleNamespace(optimizer_swapper=SimpleNamespace(min_aio_bytes=MIB, swap_element_size=4))
    params = [SimpleNamespace(partition_numel=lambda numel=numel: numel) for numel in numels]
    slices = [_Slice(p, 0, numel, at) for p, numel, at in zip(params, numels, offsets, strict=True)]
    words = f"^{wrong}: DeepSpeed reads its gradient .* element {offsets[-1]} .*byte {4 * offsets[-1]}.* of their own"
    with pytest.raises(ValueError, match=words) if wrong else nullcontext():
        _refuse_swaps([(f"p{i}", part, torch.empty(0)) for i, part in enumerate(slices)], zero3)


def test_weights_on_nvme_are_refused() -> None:
    weight: Any = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([weight], lr=0.1)
    groups = [(optimizer.param_groups[0], [("w", weight)], {})]
    weight.nvme_swapper = None
    _refuse_options(optimizer.keeper, groups)
    weight.nvme_swapper = object()
    with pytest.raises(ValueError, match="w: offload_param to NVMe is not supported"):
        _refuse_options(optimizer.keeper, groups)


def test_a_checkpoint_that_only_the_engine_has_loaded_is_refused() -> None:
    for loaded in (None, 2):
        engine = SimpleNamespace(loaded_checkpoint_dp_world_size=loaded)
        with pytest.raises(ValueError, match=r"frameworks\.deepspeed\.load_checkpoint") if loaded else nullcontext():
            _refuse_loaded(SimpleNamespace(f_locals={"self": engine}))  # type: ignore[arg-type]
