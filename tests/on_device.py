"""A synthetic model and measurements of a step on a device, for tests/test_gpu.py and benchmarks/gpu.py."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardmuon.muon import Muon


class SyntheticModel(NamedTuple):
    """Parameters of a synthetic model: matrices for Muon and vectors for AdamW."""

    matrices: list[nn.Parameter]
    vectors: list[nn.Parameter]

    @property
    def params(self) -> list[nn.Parameter]:
        return [*self.matrices, *self.vectors]

    def set_gradients(self, seed: int) -> None:
        """Set random gradients, reusing the memory of existing gradients."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for p in self.params:
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu")
            p.grad = drawn.to(p.device) if p.grad is None else p.grad.copy_(drawn)


def make_model(device: torch.device, d: int = 64, layers: int = 2, num_vectors: int = 4) -> SyntheticModel:
    """Return a model whose parameters and gradients have the same values on every device."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers
    drawn = [torch.randn(s, generator=generator, device="cpu").to(device) for s in [*shapes, *[(d,)] * num_vectors]]
    params = [nn.Parameter(t) for t in drawn]
    model = SyntheticModel(params[: len(shapes)], params[len(shapes) :])
    model.set_gradients(1)
    return model


def make_optimizer(model: SyntheticModel, **options: Any) -> Muon:
    """Return an optimizer that has a Muon group and an AdamW group and has already taken three steps."""
    groups = [{"params": model.matrices}, {"params": model.vectors, "use_muon": False}]
    optimizer = Muon(groups, lr=0.02, **options)
    for _ in range(3):
        optimizer.step()
    return optimizer


@contextlib.contextmanager
def waits_are_errors(device: torch.device) -> Iterator[None]:
    """Raise an error if code in this context makes the host wait for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    try:
        # torch warns once that its synchronization debug mode is a prototype.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def bytes_above(device: torch.device, step: Callable[[], Any]) -> int:
    """Return the peak memory in bytes that a step allocates on a CUDA device, in addition to the memory allocated
    before the step."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kernels_of(step: Callable[[], Any]) -> int:
    """Return the number of kernels, copies and fills that a step runs on a CUDA device, as counted by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    # torch's profiler also records the whole optimizer step as an event on the device, which is not a kernel and is not
    # counted.
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == cuda and not event.is_user_annotation for event in profile.events())
