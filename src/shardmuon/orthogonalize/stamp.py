"""Machine stamp: a line of text that states everything on which the bits of matrix products depend, such as the
hardware and the torch build.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from shardmuon._torch import cpu_has_amx, cpu_has_bf16_matmul, precision_flags

# Environment variables that influence which kernels or summation orders BLAS libraries choose.
_STEERING = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)


def machine_stamp(device: torch.device, *, flags: bool = False) -> str:
    """Describe in one line the properties of a machine that affect the bits of matrix products.

    The line contains torch's version and build, environment variables that influence BLAS libraries, and the CPU's
    vector instructions or the GPU's architecture and number of SMs. If `flags` is True, it also contains the process's
    global precision settings for matrix products, which affect only method "torch".

    Ranks with equal stamps compute equal bits. docs/architecture.md states how far this has been tested.
    """
    build = hashlib.blake2b(torch.__config__.show().encode(), digest_size=4).hexdigest()
    steering = [f"{name}={os.environ[name]}" for name in _STEERING if os.environ.get(name)]
    settings = [f"{name}={value}" for name, value in precision_flags(device).items()] if flags else []
    return "; ".join([_hardware(device), f"torch {torch.__version__} build {build}", *steering, *settings])


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        tuned: Any = torch.cuda.tunable
        extra = ", TunableOp" if tuned.is_enabled() else ""
        version = torch.version.cuda or f"ROCm {torch.version.hip}"
        sizes = f"sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs"
        return f"{gpu.name}, {sizes}, CUDA {version}, {torch.backends.cuda.preferred_blas_library()}{extra}"
    if device.type == "cpu":
        extra = " amx" if cpu_has_amx() else " bf16" if cpu_has_bf16_matmul() else ""
        threads = torch.get_num_threads()
        facts = Path("/proc/cpuinfo")
        # The stamp names the CPU vendor, because MKL chooses kernels by vendor, even among CPUs with the same
        # instruction set.
        found = re.search(r"^vendor_id\s*: *(.*)", facts.read_text() if facts.exists() else "", re.MULTILINE)
        vendor = found[1].strip() if found else platform.machine()
        return f"{vendor} {torch.backends.cpu.get_cpu_capability()}{extra}, {threads} threads"
    return device.type
