"""Everything on which the bits of matrix products depend: text that identifies a machine and its torch build, and the
process's settings, which are set aside while matrices are orthogonalized."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from shardmuon._torch import cpu_has_amx, cpu_has_bf16_matmul

# Environment variables that make BLAS libraries choose other kernels or orders of summation.
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
    """Describe a machine in one line: torch's version and build, and the CPU's vector instructions or the GPU's
    architecture and number of SMs. `flags`: True to add the process's global precision settings for matrix products,
    on which only method "torch" depends.

    Ranks with equal stamps compute equal bits. docs/architecture.md says how far this has been tested.
    """
    build = hashlib.blake2b(torch.__config__.show().encode(), digest_size=4).hexdigest()
    steering = [f"{name}={os.environ[name]}" for name in _STEERING if os.environ.get(name)]
    settings = [f"{name}={value}" for name, value in _precision_flags(device).items()] if flags else []
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
        # the vendor, because MKL chooses kernels by vendor even for the same instruction set
        found = re.search(r"^vendor_id\s*: *(.*)", facts.read_text() if facts.exists() else "", re.MULTILINE)
        vendor = found[1].strip() if found else platform.machine()
        return f"{vendor} {torch.backends.cpu.get_cpu_capability()}{extra}, {threads} threads"
    return device.type


# ----------------------------------------------------------------------------------------------- the process's settings

_EXACT: dict[str, dict[str, Any]] = {  # device type -> flags of its matmul backend
    "cpu": {"fp32_precision": "ieee"},
    "cuda": {
        "fp32_precision": "ieee",
        "allow_fp16_reduced_precision_reduction": False,
        "allow_bf16_reduced_precision_reduction": False,
        "allow_fp16_accumulation": False,
    },
}


def _precision_flags(device: torch.device) -> dict[str, Any]:
    """Read the process's settings on which the bits of matrix products on this kind of device depend."""
    return {name: getattr(_matmul(device), name) for name in _EXACT.get(device.type, ())}


def _matmul(device: torch.device) -> Any:
    return (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul


@contextmanager
def exact_products(device: torch.device, flags: bool = True) -> Iterator[None]:
    """Make matrix products independent of the process's settings: no TF32, no bf16 passes, sums in fp32, and no
    autocast, which would change the dtype of products.

    The flags are global and restored at the end. If `flags` is False, only autocast is disabled.
    """
    before = _precision_flags(device) if flags else {}
    autocast = torch.is_autocast_enabled(device.type)
    try:
        for name in before:
            setattr(_matmul(device), name, _EXACT[device.type][name])
        with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            yield
    finally:
        for name, value in before.items():
            setattr(_matmul(device), name, value)
