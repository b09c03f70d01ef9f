"""Helpers for the benchmarks: descriptions of the machine and the commit, summaries of times, and result files."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """The device and the software versions, without anything that identifies this particular machine."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {cpu}"
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "device": device,
        "cpu_capability": capability,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The short hash of HEAD, followed by "+changes" if src/ differs from it."""
    where = Path(__file__).parent
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True, check=False
    )
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--", "../src"], cwd=where, capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # device type -> process-group backend


def together() -> None:
    """Wait for the GPU, if there is one, and for all other ranks, if torch.distributed is running."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def summary(seconds: Sequence[float]) -> str:
    """Format values as "median (min..max)"."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}..{max(seconds):.3f})"


def write(name: str, text: str, data: Any) -> None:
    """Write results/NAME.md and .json, headed by the device, the commit and the command that was run."""
    RESULTS.mkdir(exist_ok=True)
    command = "python " + shlex.join(sys.argv)
    head = machine() | {"commit": commit(), "command": command}
    lines = "\n".join(f"- {key}: `{value}`" for key, value in head.items())
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{lines}\n\n{text}\n")
    (RESULTS / f"{name}.json").write_text(json.dumps(head | {"data": data}, indent=1) + "\n")
    print(text)
