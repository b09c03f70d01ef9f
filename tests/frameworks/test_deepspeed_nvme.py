"""DeepSpeed's NVMe offload at ZeRO 3: real swap files, the real package.

The tests that swap need DeepSpeed's async_io, which takes minutes to compile: `make nvme` builds and runs them. The
others say what is refused, and run everywhere.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed_job import Case, Groups, Shapes, started
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.frameworks.deepspeed import host as zero
from shardmuon.frameworks.deepspeed import load_checkpoint, partitions
from shardmuon.frameworks.deepspeed.partitions import TESTED, refuse_loaded, refuse_misplaced, takes_address
from shardmuon.testing import RankError, RankPool
from shardmuon.testing.frameworks import whole_momentum

swaps = pytest.mark.skipif(
    os.environ.get("SHARDMUON_NVME") != "1" or importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed's async_io, which takes minutes to compile: make nvme",
)
MIB = 2**20

# On two ranks "a" is swapped from exactly 1 MiB on. The sub-groups: a and b; c; d and e; emb; v and w; heads.
# c, v, w and heads stay in memory; e is too small to be swapped but its sub-group is.
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
    (("heads",), {"num_heads": 3, "lr": 0.03, "momentum": 0.9}),
]
IN_MEMORY = {"save_muon_momentum_buffer_in_memory": True}


def nvme(
    folder: Path | str,
    offload: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    shapes: Shapes = SHAPES,
    groups: Groups = GROUPS,
    **options: Any,
) -> Case:
    """A job with swap files in a folder. `offload`: added to `offload_optimizer`; `zero`: to `zero_optimization`."""
    device = {"device": "nvme", "nvme_path": str(folder), **(offload or {})}
    settings = {"offload_optimizer": device, "sub_group_size": 600_000, **(zero or {})}
    return Case(3, zero=settings, shapes=shapes, groups=groups, **options)


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, timeout=200.0) as pool:
        yield pool


def _run(case: Case, in_memory: bool) -> None:
    with started(case) as job:
        for number in range(3):
            job.step(number)
        job.check()
        masters = job.masters()
        for name in case.shapes:
            dense = job.dense.get_parameter(name)
            assert torch.equal(masters[name], dense.detach()), name
            kept = job.reference.state[dense]["exp_avg" if name in ADAMW else "momentum_buffer"]
            assert torch.equal(whole_momentum(getattr(job.net, name)), kept), name
            assert float((dense - job.start[name]).norm()) > 1e-3
        state = {flat: of for flat, of in job.optimizer.state.items() if flat.dim() == 1 and not flat.numel()}
        assert len(state) == SWAPPED
        assert sum("exp_avg_sq" in of for of in state.values()) == 1  # AdamW's alone: none is made for Muon
        kept = [sum(s.numel() for key, s in of.items() if key != "step") > 0 for of in state.values()]
        assert sum(kept) == (2 if in_memory else 0)
        files = os.listdir(job.engine.optimizer.optimizer_swapper.swap_folder)
        assert sum(name.startswith("exp_avg-") for name in files) == (1 if in_memory else SWAPPED)
        assert any("gradient" in name for name in files)


@swaps
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": "bf16"},
        {"accumulate": 2},
        {"offload": {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}},
        {"zero": IN_MEMORY},
    ],
    ids=str,
)
def test_swapped_weights_and_momentum_get_the_dense_update(
    two: RankPool, changed: dict[str, Any], tmp_path: Path
) -> None:
    two.run(_run, nvme(tmp_path, **changed), "zero" in changed)


def _save(case: Case, folder: str, later: int) -> dict[str, Tensor]:
    with started(case) as job:
        for number in range(later):
            job.train(number)
            if number == 2:
                job.optimizer.param_groups[1]["lr"] = 0.005  # only the optimizer's part of a checkpoint knows it
                job.engine.save_checkpoint(folder, tag="here")
        return job.masters()


def _resume(case: Case, folder: str, expected: dict[str, Tensor], before: int) -> None:
    """Load after `before` steps of another training."""
    with started(case) as job:
        for number in range(before):
            job.train(100 + number)
        load_checkpoint(job.engine, folder)
        assert {int(s["step"]) for s in job.optimizer.state.values()} == {3}
        for number in (3, 4):
            job.train(number)
        assert [n for n, w in job.masters().items() if not torch.equal(w, expected[n])] == []


@swaps
@pytest.mark.parametrize("kept", [{}, IN_MEMORY], ids=str)
def test_a_new_process_resumes_bit_for_bit(kept: dict[str, Any], tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    with RankPool(2, timeout=200.0) as first:
        expected = first.run(_save, nvme(tmp_path / "swap", zero=kept), saved, 5)[0]
    arguments = nvme(tmp_path / "other", zero=kept), saved, expected
    for before in (0, 2):  # the second time there is state already
        with RankPool(2, timeout=200.0) as fresh:
            fresh.run(_resume, *arguments, before)
            if before:
                with pytest.raises(RankError, match="in a process that has made no other engine"):
                    fresh.run(_resume, *arguments, before)


def _loaded_by_deepspeed(case: Case, folder: str) -> None:
    """A step after DeepSpeed's own load; steps of a job that starts where another left its files, and saves."""
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


def _steps(case: Case, has_fp16: bool = False, checked: bool = True) -> tuple[str, list[str], int]:
    """What one of three steps says, having changed nothing; else whose weights differ, and files of parameters."""
    check = nullcontext() if checked else mock.patch.object(zero, "refuse_swaps")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    # DeepSpeed keeps the model's dtype on accelerators with fp16, as some CPUs and all GPUs are, else bf16.
    with mock.patch.object(accelerator, "is_fp16_supported", return_value=has_fp16), started(case) as job, check:
        for number in range(3):
            before = job.masters()
            said = job.said(number)
            if said:
                assert all(torch.equal(before[n], w) for n, w in job.masters().items())
                return said, [], 0
            job.step_dense(number)
        wrong = [n for n, w in job.masters().items() if not torch.equal(w, job.dense.get_parameter(n).detach())]
        swapper = getattr(next(job.net.parameters()), "nvme_swapper", None)
        files = () if swapper is None else os.listdir(swapper.swap_folder)
        return "", wrong, sum(name.endswith("_param.tensor.swp") for name in files)


@swaps
@pytest.mark.parametrize("k", [1, 64, 127, 128, 256, 384])
def test_an_offset_is_refused_where_deepspeed_loses_the_gradient_and_nowhere_else(
    two: RankPool, k: int, tmp_path: Path
) -> None:
    """A gradient that is swapped, behind one of `k` elements a rank that is not."""
    shapes: Shapes = {"first": (2, k), "large": (512, 1024)}
    case = nvme(tmp_path, shapes=shapes, groups=[(("first", "large"), {"lr": 0.02})])
    lost = [*two.run(_steps, case, checked=False)]
    assert all(not said for said, *_ in lost)
    for said, wrong, _ in two.run(_steps, case):
        assert wrong == []
        assert bool(said) == (lost[0][1] == ["large"])
        assert not said or (": large: " in said and f"element {k} of its sub-group (byte {4 * k})" in said)


LARGE: Shapes = {"a": (1024, 1088), "b": (1100, 1024), "emb": (1024, 1152), "v": (37,)}


@swaps
@pytest.mark.parametrize(
    ("dtype", "has_fp16", "offload", "words"),
    [
        ("bf16", True, {}, ""),
        ("bf16", False, {}, ""),
        ("fp32", True, {}, ""),
        ("fp32", False, {}, "a: offload_param to NVMe keeps it as torch.bfloat16, the model is torch.float32"),
        ("bf16", False, {"fast_init": True}, 'Write "fast_init": false'),
    ],
    ids=["bf16", "bf16 without fp16", "fp32", "fp32 without fp16", "fast_init"],
)
def test_parameters_on_nvme_are_exact_or_refused(
    two: RankPool, dtype: str, has_fp16: bool, offload: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Whatever this machine has."""
    param = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 2_000_000, "max_in_cpu": 0}
    settings = {"offload_param": param, "sub_group_size": 2_000_000, "stage3_param_persistence_threshold": 1000}
    groups: Groups = [(("a", "b"), {"lr": 0.02}), (("emb", "v"), {"use_muon": False, "lr": 3e-3})]
    case = nvme(tmp_path, offload, settings, LARGE, groups, dtype=dtype)
    for said, wrong, files in two.run(_steps, case, has_fp16):
        assert words in said
        assert words or (said, wrong, files) == ("", [], 3)


def _first_step(case: Case) -> str:
    with started(case) as job:
        return job.said()


@swaps
def test_too_few_swap_buffers_are_refused_before_the_first_update(two: RankPool, tmp_path: Path) -> None:
    for said in two.run(_first_step, nvme(tmp_path, {"buffer_count": 3})):
        assert "buffer_count=3" in said and "Write 4 or more" in said


# ------------------------------------------------------------------------------------------ without swap files

QUARTER = MIB // 4  # elements of the smallest gradient that is swapped


@pytest.mark.parametrize(
    ("numels", "alignment", "wrong"),
    [
        ((QUARTER, QUARTER), 512, None),
        ((QUARTER + 128, QUARTER), 512, None),
        ((QUARTER + 128, QUARTER), 1024, "p1"),
        ((37, QUARTER - 1), 512, None),  # too small to be swapped: it is copied
        ((37, QUARTER), 512, "p1"),
        ((QUARTER, 64, 64, QUARTER), 512, None),  # two that are wrong make a right one
        ((QUARTER, 128, 65, QUARTER), 512, "p3"),
        ((37, QUARTER), 4, None),  # a file system that takes any address
    ],
)
def test_swapped_gradients_must_begin_where_direct_io_can_write(
    numels: tuple[int, ...], alignment: int, wrong: str | None
) -> None:
    offsets = [0, *itertools.accumulate(numels[:-1])]
    gradients = [(f"p{i}", *each) for i, each in enumerate(zip(offsets, numels, strict=True))]
    words = f"^{wrong}: DeepSpeed reads its gradient .* element {offsets[-1]} .*byte {4 * offsets[-1]}.* of their own"
    refused = pytest.raises(ValueError, match=words) if wrong else nullcontext()
    with mock.patch.object(partitions, "takes_address", lambda folder, behind, least: behind % alignment == 0), refused:
        refuse_misplaced(gradients, MIB, 4, "/swap")


@pytest.mark.parametrize("needed", [4, 512, 4096])
def test_an_address_is_taken_if_a_read_arrives_there(needed: int, tmp_path: Path) -> None:
    real = os.preadv

    def preadv(handle: int, buffers: list[Any], offset: int) -> int:
        """The file system's answer, stricter than any here; at an address of our own choosing."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
        if address % needed:
            raise OSError(errno.EINVAL, "Invalid argument")
        with (tmp_path / "copy").open("rb", buffering=0) as file:
            return real(file.fileno(), buffers, offset)

    content = os.urandom(MIB)
    (tmp_path / "copy").write_bytes(content)
    with mock.patch.object(os, "preadv", preadv), mock.patch.object(os, "urandom", return_value=content):
        taken = [behind for behind in (4, 256, 512, 2048) if takes_address(str(tmp_path), behind, MIB)]
    assert taken == [behind for behind in (4, 256, 512, 2048) if behind % needed == 0]
    with mock.patch.object(os, "preadv", return_value=MIB):  # what it returns is not believed
        assert not takes_address(str(tmp_path), 2048, MIB)


def test_a_checkpoint_that_only_the_engine_has_loaded_is_refused() -> None:
    for loaded in (None, 2):
        engine = SimpleNamespace(loaded_checkpoint_dp_world_size=loaded)
        words = r"frameworks\.deepspeed\.load_checkpoint"
        with pytest.raises(ValueError, match=words) if loaded else nullcontext():
            refuse_loaded(SimpleNamespace(f_locals={"self": engine}))  # type: ignore[arg-type]


@pytest.mark.parametrize("lacks", ["sub_group_to_group_id", "fp16_groups"])
def test_a_deepspeed_with_other_insides_is_refused_by_version_and_what_it_lacks(lacks: str) -> None:
    flat, weight = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(4, 4))
    insides = {"sub_group_to_group_id": {0: 0}, "fp32_partitioned_groups_flat": [flat], "fp16_groups": [[weight]]}
    del insides[lacks]
    optimizer = Muon([weight], lr=1e-3)
    weight._z3_optimizer = type("DeepSpeedZeroOptimizer_Stage3", (), insides)()  # type: ignore[attr-defined]
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones(16)
    words = rf"DeepSpeed 0.19.8\+other does not keep its partitions .* '{lacks}'. Install deepspeed=={TESTED}"
    fake = mock.Mock(__version__="0.19.8+other")
    with mock.patch.dict(sys.modules, {"deepspeed": fake}), pytest.raises(ValueError, match=words):
        optimizer.step()
    assert torch.equal(flat, torch.ones(16))
