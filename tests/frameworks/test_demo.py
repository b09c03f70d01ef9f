"""Tests of the demo `examples/train.py`. Training runs must give the same result on every layout, and the demo's
bitwise check against a single process must detect wrong steps. The command line and the evaluation on held-out files
are tested as well."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from demo_script import train
from tolerances import assert_near, roundoff, sum_roundoff
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardmuon.testing import RankPool

TINY = train.Config(
    dim=32, heads=4, kv_heads=2, hidden=48, seq_len=16, batch=8, steps=3, warmup=1, layers=1, eval_batches=1
)
TEXT = [np.random.default_rng(side).integers(0, 256, 2048, dtype=np.uint8) for side in (0, 1)]
# The bound on the rounding error of gradients assumes about 50 consecutive operations in the forward and backward
# passes, each summing at most 128 terms (one per token of the batch). The factor 2 is needed because both of the
# compared gradients are rounded.
GRADIENTS = 2 * 50 * (roundoff(torch.float32) + sum_roundoff(torch.float32, 128))


def mesh_of(layout: str) -> DeviceMesh | None:
    axes = train.LAYOUTS[layout]
    if not axes:
        return None
    sizes = np.arange(dist.get_world_size()).reshape(tuple(axes.values())).shape
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))


def cut_model(mesh: DeviceMesh | None) -> tuple[torch.nn.Module, Tensor]:
    """Run the forward and backward passes of the parallelized model on the first batch. Return the model with its
    gradients, and the loss on this rank's rows of the batch. The head gets nonzero weights, because a zero head would
    pass no gradient to the layers."""
    model = train.Model(TINY)
    model.head.weight.data = 0.1 * torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(0))
    cut = train.parallelize(model, mesh)
    tp = mesh["tp"].size() if mesh and "tp" in (mesh.mesh_dim_names or ()) else 1
    reader, readers = (dist.get_rank() // tp, dist.get_world_size() // tp) if mesh else (0, 1)
    loss = train.loss_of(cut, train.train_rows(TEXT[0], TINY, 0).unflatten(0, (readers, -1))[reader])
    loss.backward()
    return cut, loss


def batch_and_run(layout: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the full gradients and the loss for the first batch, and the report of a complete training run."""
    mesh = mesh_of(layout)
    model, loss = cut_model(mesh)
    batch = {name.removeprefix("module."): train.whole(p.grad) for name, p in model.named_parameters()}
    batch["loss"] = torch.tensor(train.mean_over_ranks([loss]))
    return batch, train.train(TINY, "muon", TEXT, mesh, "cpu")


@functools.cache
def in_one_process() -> tuple[dict[str, Tensor], dict[str, Any]]:
    return batch_and_run("single")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("ddp", 2),
        ("fsdp2", 2),
        ("tp", 2),
        pytest.param("fsdp2+tp", 4, marks=pytest.mark.numeric),
        ("hsdp+tp", 8),
    ],
)
def test_training_is_that_of_one_process_in_every_layout(layout: str, ranks: int) -> None:
    expected, alone = in_one_process()
    for batch, run in RankPool.cached(ranks).run(batch_and_run, layout):
        assert batch.keys() == expected.keys()
        # The test compares raw gradients, because Muon's update does not depend on the scale of the gradients and would
        # hide a wrong scale.
        for name, whole in expected.items():
            assert_near(batch[name], whole, GRADIENTS, name)
        assert run["proof"] == alone["proof"] == {
            "matrices": 7, "largest_difference": 0.0, "bitwise_equal": True, "replicas_equal": True
        }  # fmt: skip
        assert run["train_loss"][-1] < run["train_loss"][0]


def proof_of_a_spoiled_step(layout: str, matrix: int, ranks: tuple[int, ...], value: float) -> tuple[bool, bool]:
    """Run the demo's bitwise check. After the checked step, the ranks in `ranks` overwrite one element of a matrix.
    Return whether the check finds the step equal to that of a single process, and whether it finds all replicas
    equal."""
    model, _ = cut_model(mesh_of(layout))
    optimizer = train.build_muon(model, TINY.lr, TINY.weight_decay)
    optimizer.step()
    right = optimizer.step

    def step() -> None:
        right()
        weight = [p for group in optimizer.param_groups if group["use_muon"] for p in group["params"]][matrix]
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if not dist.is_initialized() or dist.get_rank() in ranks:
            local.detach()[0, 0] = value

    optimizer.step = step  # type: ignore[method-assign, assignment]
    proof = train.proven_step(optimizer, train.Model(TINY), TINY.weight_decay)
    return proof["bitwise_equal"], proof["replicas_equal"]


@pytest.mark.parametrize(
    ("layout", "matrix", "ranks", "value", "replicas_equal"),
    [
        ("fsdp2", 0, (), 0.0, True),
        ("fsdp2", 0, (0,), 1e-3, True),
        ("fsdp2", -1, (1,), math.nan, True),
        ("ddp", 0, (0, 1), 1e-3, True),
        ("ddp", 0, (1,), 1e-3, False),
    ],
)
def test_the_proof_fails_a_wrong_step_and_replicas_that_differ(
    world2: RankPool, layout: str, matrix: int, ranks: tuple[int, ...], value: float, replicas_equal: bool
) -> None:
    assert world2.run(proof_of_a_spoiled_step, layout, matrix, ranks, value) == [(not ranks, replicas_equal)] * 2


def test_text_is_split_by_files_without_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package" / "test").mkdir(parents=True)
    names = [f"package/module_{number}.py" for number in range(60)]
    for name in (*names, "package/test/test_it.py", "package/notes.txt"):
        (tmp_path / name).write_text(f"# {name}\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    lines = [[line for line in bytes(side).decode().splitlines() if line] for side in train.read_text()]
    assert 0 < len(lines[1]) < 15 and sorted(lines[0] + lines[1]) == sorted(f"# {name}" for name in names)
    assert [sorted(side) for side in lines] == lines


def test_the_command_compares_proves_and_writes_its_files(tmp_path: Path) -> None:
    sizes = "--steps 6 --dim 32 --layers 2 --hidden 64 --batch 4 --seq-len 32 --eval-batches 1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--layout", "fsdp2", "--compare", "--out", str(tmp_path), *sizes.split()]
    source = Path(sys.modules["shardmuon"].__file__ or "").parents[1]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, train.__file__, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the sharded update is the dense one: matrices 14, largest difference 0.0, bitwise equal True" in done.stdout
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["config"]["dim"] == 32 and written["config"].keys() == asdict(TINY).keys()
    assert [run["optimizer"] for run in written["runs"]] == ["muon", "adamw"]
    assert all(len(run["train_loss"]) == 6 and run["held_out"][-1][0] == 6 for run in written["runs"])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_that_do_not_divide_over_a_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for layout in ("single", "fsdp2+tp"):
        monkeypatch.setattr(sys, "argv", ["train.py", "--layout", layout])
        with pytest.raises(ValueError, match="cannot reshape array of size 3"):
            train.main()
