"""DeepSpeed's NVMe offload at ZeRO 3: real swap files, the real package.

The tests that swap need DeepSpeed's async_io, which takes minutes to compile: `make nvme` builds and runs them. The
others say what is refused, and run everywhere.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_deepspeed as base
import torch
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.frameworks.deepspeed import host as zero
from shardmuon.frameworks.deepspeed import load_checkpoint
from shardmuon.frameworks.deepspeed.partitions import TESTED, Mark, alignment_of, refuse_misplaced
from shardmuon.testing import RankError, RankPool

swaps = pytest.mark.skipif(
    os.environ.get("SHARDMUON_NVME") != "1" or importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed's async_io, which takes minutes to compile: make nvme",
)
MIB = 2**20
Shapes = dict[str, tuple[int, ...]]

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
GROUPS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("a", "b", "c"), {"lr": 0.02}),
    (("d", "e"), {"lr": 0.01, "weight_decay": 0.2}),
    (("emb",), {"use_muon": False, "lr": 3e-3}),
    (("v", "w"), {"use_muon": False, "lr": 1e-3}),
    (("heads",), {"num_heads": 3, "lr": 0.03, "momentum": 0.9}),
]


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        folder: Where swap files go.
        offload: Added to `offload_optimizer`.
        zero: Added to `zero_optimization`.
    """

    folder: str = ""
    offload: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    accumulate: int = 1
    shapes: Shapes = field(default_factory=lambda: SHAPES)
    groups: list[tuple[tuple[str, ...], dict[str, Any]]] = field(default_factory=lambda: GROUPS)

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in {**self.offload, **self.zero, "dtype": self.dtype}.items())


class Net(nn.Module):
    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) * 0.05))
        self.names = tuple(shapes)

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, n) * factors[n]).sum().float() for n in self.names]).sum()


class Job(base.Job):
    """A model under DeepSpeed, and the same parameters dense in this process."""

    def __init__(self, deepspeed: Any, case: Case) -> None:
        self.shapes = case.shapes
        self.make = lambda: Net(case.shapes)
        self.groups = lambda net, *_: [
            {"params": [(n, getattr(net, n)) for n in names], **options} for names, options in case.groups
        ]
        offload = {"device": "nvme", "nvme_path": case.folder, **case.offload}
        settings = {"offload_optimizer": offload, "sub_group_size": 600_000, **case.zero}
        super().__init__(deepspeed, base.Case(3, dtype=case.dtype, accumulate=case.accumulate, zero=settings))

    def weights(self) -> dict[str, Tensor]:
        return {n: base.whole_weight(getattr(self.net, n)) for n in self.shapes}

    def momentum(self) -> dict[str, Tensor]:
        return {n: base.whole_momentum(getattr(self.net, n)) for n in self.shapes}

    def errors(self) -> dict[str, float]:
        """Relative error of what the steps changed, by parameter; 0 only if all bits are equal."""
        found = self.weights()
        return {n: base._error(w, self.dense.get_parameter(n).detach(), self.start[n]) for n, w in found.items()}

    def files(self) -> list[str]:
        return sorted(os.listdir(self.engine.optimizer.optimizer_swapper.swap_folder))


def _dense_momentum(job: Job, name: str) -> Tensor:
    return job.reference.state[job.dense.get_parameter(name)]["exp_avg" if name in ADAMW else "momentum_buffer"]


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, timeout=200.0) as pool:
        yield pool


def _run(case: Case, steps: int) -> dict[str, Any]:
    with base._quiet() as deepspeed:
        job = Job(deepspeed, case)
        for number in range(steps):
            job.step(number)
        flats = [flat for flat, state in job.optimizer.state.items() if flat.dim() == 1]
        momentum = job.momentum()
        out = {
            "errors": job.errors(),
            "momentum": max(float((momentum[n] - _dense_momentum(job, n)).abs().max()) for n in case.shapes),
            "files": job.files(),
            "in_files": sum(not flat.numel() for flat in flats),
            "kept": [
                sum(s.numel() for k, s in job.optimizer.state[f].items() if k != "step") for f in flats if not f.numel()
            ],
            "squares": sum("exp_avg_sq" in job.optimizer.state[f] for f in flats if not f.numel()),
            "changed": min(float((job.dense.get_parameter(n) - job.start[n]).norm()) for n in case.shapes),
        }
        job.engine.destroy()
        return out


@swaps
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dtype="bf16"),
        Case(accumulate=2),
        Case(offload={"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}),
        Case(zero={"save_muon_momentum_buffer_in_memory": True}),
    ],
    ids=str,
)
def test_swapped_weights_and_momentum_get_the_dense_update(two: RankPool, case: Case, tmp_path: Path) -> None:
    in_memory = case.zero.get("save_muon_momentum_buffer_in_memory", False)
    for found in two.run(_run, Case(**{**vars(case), "folder": str(tmp_path)}), 3):
        assert found["errors"] == dict.fromkeys(SHAPES, 0.0)
        assert found["momentum"] == 0.0
        assert found["changed"] > 1e-3
        assert found["in_files"] == SWAPPED
        assert found["squares"] == 1  # AdamW's alone: none is made for Muon
        states = [name for name in found["files"] if name.startswith("exp_avg-")]
        assert len(states) == (1 if in_memory else SWAPPED)
        assert any("gradient" in name for name in found["files"])
        assert [n > 0 for n in sorted(found["kept"])] == ([False, True, True] if in_memory else [False] * SWAPPED)


def _save(case: Case, folder: str, later: int) -> dict[str, Tensor]:
    with base._quiet() as deepspeed:
        job = Job(deepspeed, case)
        for number in range(3):
            job.train(number)
        job.optimizer.param_groups[1]["lr"] = 0.005  # an option that only the optimizer's part of a checkpoint knows
        job.engine.save_checkpoint(folder, tag="here")
        for number in range(3, later):
            job.train(number)
        found = job.weights()
        job.engine.destroy()
        return found


def _resume(case: Case, folder: str, later: int, expected: dict[str, Tensor], before: int) -> dict[str, Any]:
    """Load after `before` steps of another training."""
    with base._quiet() as deepspeed:
        job = Job(deepspeed, case)
        for number in range(before):
            job.train(100 + number)
        load_checkpoint(job.engine, folder)
        steps = {int(s["step"]) for s in job.optimizer.state.values()}
        for number in range(3, later):
            job.train(number)
        found = job.weights()
        job.engine.destroy()
        return {"differs": [n for n in found if not torch.equal(found[n], expected[n])], "steps": steps}


@swaps
@pytest.mark.parametrize("case", [Case(), Case(zero={"save_muon_momentum_buffer_in_memory": True})], ids=str)
def test_a_new_process_resumes_bit_for_bit(case: Case, tmp_path: Path) -> None:
    options = {**vars(case), "folder": str(tmp_path / "swap")}
    with RankPool(2, timeout=200.0) as first:
        expected = first.run(_save, Case(**options), str(tmp_path / "saved"), 5)[0]
    options["folder"] = str(tmp_path / "other")
    arguments = Case(**options), str(tmp_path / "saved"), 5, expected
    for before in (0, 2):  # the second time there is state already
        with RankPool(2, timeout=200.0) as fresh:
            for found in fresh.run(_resume, *arguments, before):
                assert found == {"differs": [], "steps": {3}}
            if before:
                with pytest.raises(RankError, match="in a process that has made no other engine"):
                    fresh.run(_resume, *arguments, before)


def _loaded_by_deepspeed(case: Case, folder: str) -> list[str]:
    """Messages of steps: after DeepSpeed's own load, and in a job that starts where another left its files."""
    with base._quiet() as deepspeed:
        job = Job(deepspeed, case)
        job.engine.load_checkpoint(folder, tag="here")
        before = job.weights()
        messages = [job.said()]
        assert all(torch.equal(before[n], w) for n, w in job.weights().items())
        job.engine.destroy()
        again = Job(deepspeed, case)
        messages.append(again.said())
        again.engine.save_checkpoint(folder, tag="there")
        messages.append(again.said())
        again.engine.destroy()
        return messages


@swaps
def test_a_checkpoint_loaded_by_deepspeed_alone_is_not_trained_on(two: RankPool, tmp_path: Path) -> None:
    case = Case(folder=str(tmp_path / "swap"))
    two.run(_save, case, str(tmp_path / "saved"), 3)
    for first, fresh, saved in two.run(_loaded_by_deepspeed, case, str(tmp_path / "saved")):
        assert "load_checkpoint(engine, folder, tag)" in first
        assert (fresh, saved) == ("", "")


def _leading(k: int, folder: str) -> Case:
    """A gradient that is swapped, behind one of `k` elements a rank that is not."""
    shapes = {"first": (2, k), "large": (512, 1024)}
    return Case(folder=folder, shapes=shapes, groups=[(("first", "large"), {"lr": 0.02})])


def _misplaced(k: int, folder: str, unchecked: bool) -> tuple[str, float, int]:
    check = mock.patch.object(zero, "refuse_swaps") if unchecked else nullcontext()
    with base._quiet() as deepspeed, check:
        job = Job(deepspeed, _leading(k, folder))
        aligned = alignment_of(job.engine.optimizer.optimizer_swapper.swap_folder, MIB)
        message = ""
        for number in range(3):
            before = job.weights()
            message = job.said(number)
            if message:
                assert all(torch.equal(before[n], w) for n, w in job.weights().items())
                break
            job.step_dense(number)
        error = 0.0 if message else job.errors()["large"]
        job.engine.destroy()
        return message, error, aligned


@swaps
@pytest.mark.parametrize("k", [1, 64, 127, 128, 256, 384])
def test_an_offset_is_refused_where_deepspeed_loses_the_gradient_and_nowhere_else(
    two: RankPool, k: int, tmp_path: Path
) -> None:
    unchecked = two.run(_misplaced, k, str(tmp_path), True)
    checked = two.run(_misplaced, k, str(tmp_path), False)
    for (_, error, aligned), (message, exact, _) in zip(unchecked, checked, strict=True):
        print(f"{k} elements in front, addresses in multiples of {aligned} bytes: error {error:.3g} unchecked")
        if 4 * k % aligned:
            assert error > 0.5
            assert ": large: " in message
            assert f"element {k} of its sub-group (byte {4 * k})" in message
        else:
            assert (error, exact, message) == (0.0, 0.0, "")


LARGE: Shapes = {"a": (1024, 1088), "b": (1100, 1024), "emb": (1024, 1152), "v": (37,)}


def _params(case: Case, has_fp16: bool) -> tuple[dict[str, float], int, str]:
    with base._quiet() as deepspeed:
        # DeepSpeed keeps the model's dtype on accelerators with fp16, as some CPUs and all GPUs are, else bf16.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: has_fp16
        job = Job(deepspeed, case)
        for number in range(3):
            message = job.said(number)
            if message:
                return {}, 0, message
            job.step_dense(number)
        files = os.listdir(job.net.a.nvme_swapper.swap_folder)
        errors = job.errors()
        job.engine.destroy()
        return errors, sum(name.endswith("_param.tensor.swp") for name in files), ""


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
    groups = [(("a", "b"), {"lr": 0.02}), (("emb", "v"), {"use_muon": False, "lr": 3e-3})]
    case = Case(str(tmp_path), offload, settings, dtype, shapes=LARGE, groups=groups)
    for errors, files, message in two.run(_params, case, has_fp16):
        assert words in message
        if not words:
            assert (errors, files, message) == (dict.fromkeys(LARGE, 0.0), 3, "")


def _first_message(case: Case) -> str:
    with base._quiet() as deepspeed:
        job = Job(deepspeed, case)
        message = job.said()
        job.engine.destroy()
        return message


@swaps
def test_too_few_swap_buffers_are_refused_before_the_first_update(two: RankPool, tmp_path: Path) -> None:
    for message in two.run(_first_message, Case(folder=str(tmp_path), offload={"buffer_count": 3})):
        assert "buffer_count=3" in message
        assert "Write 4 or more" in message


# ------------------------------------------------------------------------------------------ without swap files


def _gradients(*numels: int) -> list[tuple[str, int, int]]:
    offsets = itertools.accumulate((0, *numels[:-1]))
    return [(f"p{i}", offset, numel) for i, (offset, numel) in enumerate(zip(offsets, numels, strict=True))]


QUARTER = MIB // 4  # elements of the smallest gradient that is swapped


@pytest.mark.parametrize(
    ("numels", "alignment", "wrong", "cause"),
    [
        ((QUARTER, QUARTER), 512, None, None),
        ((QUARTER + 128, QUARTER), 512, None, None),
        ((QUARTER + 128, QUARTER), 1024, "p1", "p0"),
        ((37, QUARTER - 1), 512, None, None),  # too small to be swapped: it is copied
        ((37, QUARTER), 512, "p1", "p0"),
        ((QUARTER, 64, 64, QUARTER), 512, None, None),  # two that are wrong make a right one
        ((QUARTER, 128, 65, QUARTER), 512, "p3", "p2"),
        ((37, QUARTER), 4, None, None),  # a file system that takes any address
    ],
)
def test_swapped_gradients_must_begin_where_direct_io_can_write(
    numels: tuple[int, ...], alignment: int, wrong: str | None, cause: str | None
) -> None:
    if wrong is None:
        refuse_misplaced(_gradients(*numels), MIB, 4, alignment, "/swap")
        return
    with pytest.raises(ValueError, match=f"^{wrong}: DeepSpeed reads its gradient") as error:
        refuse_misplaced(_gradients(*numels), MIB, 4, alignment, "/swap")
    offset = sum(numels[: int(wrong[1:])])
    assert f"element {offset} of its sub-group (byte {4 * offset})" in str(error.value)
    assert f"{cause}, which is before it" in str(error.value)
    assert "group of their own" in str(error.value)


@pytest.mark.parametrize("needed", [4, 512, 4096])
def test_the_alignment_is_what_reads_need(needed: int, tmp_path: Path) -> None:
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
        assert alignment_of(str(tmp_path), MIB) == needed


def test_a_read_that_arrives_elsewhere_is_no_read(tmp_path: Path) -> None:
    with mock.patch.object(os, "preadv", return_value=MIB):  # what it returns is not believed
        assert alignment_of(str(tmp_path), MIB) == 4096


def test_a_checkpoint_that_has_come_back_is_told_from_ones_own_and_old_files(tmp_path: Path) -> None:
    old, folder, saved = Mark(), str(tmp_path / "swap"), tmp_path / "saved"
    os.mkdir(folder)
    old.write(folder)
    time.sleep(0.05)  # the file system's clock is coarser than Python's
    mine = Mark()
    mine.refuse_loaded(folder)  # left behind by an earlier process
    assert os.listdir(folder) == []
    mine.write(folder)
    shutil.copytree(folder, saved)
    mine.refuse_loaded(folder)  # saved a moment ago: nothing has changed since
    assert os.listdir(folder) == []
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"frameworks\.deepspeed\.load_checkpoint"):
        mine.refuse_loaded(folder)  # its own last save, but it has stepped since
    other = Mark()
    other._born -= 1
    with pytest.raises(ValueError, match=r"frameworks\.deepspeed\.load_checkpoint"):
        other.refuse_loaded(folder)
    other.remove(folder)
    other.refuse_loaded(folder)


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
