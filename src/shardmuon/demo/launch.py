"""Run a training on ranks of this machine, or on those that torchrun started, and end all of them together.

A rank that raises ends all of them, and its traceback is shown once. After Ctrl-C, or when this process is killed,
no rank is left either: they live in a `shardmuon.testing.RankPool`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch

from shardmuon.demo.config import TrainConfig
from shardmuon.demo.loop import run_rank
from shardmuon.testing.pool import RankError, RankPool

__all__ = ["check_device", "inside_launcher", "launch"]

_TIMEOUT = 7 * 24 * 3600.0  # seconds; the pool wants one


def inside_launcher() -> bool:
    """Whether something else (torchrun) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_device(config: TrainConfig) -> None:
    """Raise ValueError when the run insists on GPUs that are not there."""
    num_gpus, num_ranks = torch.cuda.device_count(), _num_local_ranks(config)
    if config.device == "cuda" and num_gpus < num_ranks:
        raise ValueError(
            f"--device cuda: {num_ranks} ranks on this machine need a GPU each, found {num_gpus}. "
            "Use fewer --ranks or --device cpu."
        )


def _device_type(config: TrainConfig) -> str:
    """ "cuda" where this machine has a GPU for each of its ranks, else "cpu"."""
    return "cuda" if config.device != "cpu" and torch.cuda.device_count() >= _num_local_ranks(config) else "cpu"


def _num_local_ranks(config: TrainConfig) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.num_ranks))


def launch(config: TrainConfig) -> int:
    """Train as `config` says, here when it has one rank or torchrun started this one, else on ranks of its own.

    Returns:
        Exit status: 0, 1 when the proof or a rank failed, 130 after Ctrl-C.
    """
    device_type = _device_type(config)
    try:
        if inside_launcher() or (config.num_ranks == 1 and config.engine == "torch"):
            return run_rank(config, device_type)
        with (
            _swap_folder(config) as config,
            RankPool(config.num_ranks, "nccl" if device_type == "cuda" else "gloo", _TIMEOUT) as pool,
        ):
            return max(pool.run(run_rank, config, device_type))
    except RankError as error:
        print(f"shardmuon.demo: {_first_cause(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nshardmuon.demo: interrupted", file=sys.stderr)
        return 130
    finally:
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # a rank killed under its progress bar leaves the cursor hidden


@contextmanager
def _swap_folder(config: TrainConfig) -> Iterator[TrainConfig]:
    """With a folder for offload to NVMe that goes away again, if none was given."""
    if config.offload != "nvme" or config.nvme_path is not None:
        yield config
        return
    with TemporaryDirectory(prefix="shardmuon-nvme-", ignore_cleanup_errors=True) as folder:
        yield replace(config, nvme_path=folder)


def _first_cause(error: RankError) -> str:
    """The failure of a rank that raised or died. The others hang in a collective with it or lose its connection."""
    hung = ("TimeoutError", "DistBackendError", "DistNetworkError")
    causes = [f for f in error.failures if f.type_name not in hung and "closed by peer" not in f.message]
    return str((causes or error.failures)[0])
