"""Checks of a step that need a real accelerator, as functions that take the device.

`tests/test_gpu.py` claims their answers, `benchmarks/gpu.py` writes them down beside timings. On a CPU they run too,
where they have less to find: so they are known to run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardmuon import Orthogonalizer
from shardmuon.muon import Muon
from shardmuon.orthogonalize import KernelName, Products
from shardmuon.orthogonalize.triton_symmetric import why_not
from shardmuon.testing.compare import Comparison, compare_with_dense
from shardmuon.testing.layouts import meshes_on
from shardmuon.variants import VARIANTS, names_in

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "standard": {"orthogonalizer": Orthogonalizer(method="standard")},
    "gram": {"orthogonalizer": Orthogonalizer(method="gram")},
}


class SyntheticModel(NamedTuple):
    """Matrices for Muon, vectors for AdamW."""

    matrices: list[nn.Parameter]
    vectors: list[nn.Parameter]

    @property
    def params(self) -> list[nn.Parameter]:
        """Matrices, then vectors."""
        return [*self.matrices, *self.vectors]

    def set_gradients(self, seed: int) -> None:
        """Draw new ones into the memory of the old, where there are any."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for p in self.params:
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu")
            p.grad = drawn.to(p.device) if p.grad is None else p.grad.copy_(drawn)


def shapes_of(d: int, layers: int) -> list[tuple[int, int]]:
    """The matrices of so many layers of width d."""
    return [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers


def make_model(device: torch.device, d: int = 64, layers: int = 2, num_vectors: int = 4) -> SyntheticModel:
    """A model's parameters with gradients, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes: list[tuple[int, ...]] = [*shapes_of(d, layers), *[(d,)] * num_vectors]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float32, device="cpu").to(device) for s in shapes]
    params = [nn.Parameter(t) for t in drawn]
    model = SyntheticModel(params[: len(params) - num_vectors], params[len(params) - num_vectors :])
    model.set_gradients(1)
    return model


def make_optimizer(model: SyntheticModel, **options: Any) -> Muon:
    """An optimizer with both kinds of group."""
    groups = [{"params": model.matrices}, {"params": model.vectors, "use_muon": False}]
    return Muon(groups, **{"lr": 0.02, **options})


@contextlib.contextmanager
def waits_are_errors(device: torch.device) -> Iterator[None]:
    """Raise if anything inside makes the host wait for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # torch says once that this is a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_without_a_wait(device: torch.device, **options: Any) -> None:
    """Take a steady step. Raises RuntimeError where it waits for a CUDA device."""
    model = make_model(device)
    optimizer = make_optimizer(model, lr=0.02, **options)
    for _ in range(3):
        optimizer.step()
    with waits_are_errors(device):
        optimizer.step()
        optimizer.step()


def graph_differs(device: torch.device, replays: int = 3, **options: Any) -> list[int]:
    """Capture a whole step as a CUDA graph, replay it on new gradients, and step another optimizer as usual. The
    numbers of the parameters that differ in any bit."""
    eager, captured = make_model(device), make_model(device)
    one, other = make_optimizer(eager, **options), make_optimizer(captured, **options)
    for seed in range(3):
        for model, optimizer in ((eager, one), (captured, other)):
            model.set_gradients(seed)
            optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        other.step()
    for seed in range(10, 10 + replays):
        eager.set_gradients(seed)
        one.step()
        captured.set_gradients(seed)
        graph.replay()
    torch.cuda.synchronize()
    pairs = zip(eager.params, captured.params, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


def bytes_above(device: torch.device, step: Callable[[], Any]) -> int:
    """The most that a step takes of a CUDA device beside what stands before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kernels_of(step: Callable[[], Any]) -> int:
    """Kernels, copies and fills that a step runs on a CUDA device, as the profiler counts them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # torch marks a whole optimizer step there, too
    return sum(event.device_type == cuda and not event.is_user_annotation for event in profile.events())


class _KernelError(NamedTuple):
    """A symmetric product by Triton beside torch's in fp64."""

    rows: int
    inner: int
    dtype: str
    triton: float  # largest error over the largest entry
    torch: float


def kernel_errors(device: torch.device, sizes: Sequence[tuple[int, int]]) -> list[_KernelError] | str:
    """Both kernels on random matrices, or why Triton cannot run there."""
    hindrance = why_not(device)
    if hindrance is not None:
        return hindrance
    both: tuple[KernelName, ...] = ("triton", "torch")
    found = []
    for rows, inner in sizes:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            generator = torch.Generator("cpu").manual_seed(rows)
            drawn = torch.randn(2, rows, inner, generator=generator, dtype=torch.float32, device="cpu")
            x = (drawn / inner**0.5).to(device, dtype)
            exact = x.double() @ x.double().mT
            largest = float(exact.abs().max())
            products = [Products(x.shape, device, dtype, kernel) for kernel in both]
            results = [one.symmetric_mm(x, x.mT, out=torch.empty_like(exact, dtype=dtype)) for one in products]
            errors = [float((result.double() - exact).abs().max()) / largest for result in results]
            found.append(_KernelError(rows, inner, str(dtype).removeprefix("torch."), *errors))
    return found


def step_on_layout(layout: str, kind: str, steps: int = 2, variant: str | None = None) -> list[Comparison]:
    """Step a row of `LAYOUTS` on real ranks and the same matrices on this rank alone. Collective.

    Returns:
        Comparisons with products in fp32 and in bf16. Their `about` is the error of one more step in which waits are
        errors, or "".
    """

    def once_more(optimizer: Muon) -> str:
        try:
            with waits_are_errors(torch.device(kind)):
                optimizer.step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    decay = 0.1 if all(VARIANTS[name].decays for name in names_in(variant)) else 0.0
    given: dict[str, Any] = {"lr": 0.02, "variant": variant, "weight_decay": decay, "steps": steps, "about": once_more}
    with meshes_on(kind):
        return [
            compare_with_dense(layout, orthogonalizer=Orthogonalizer("standard", products), **given)
            for products in (torch.float32, torch.bfloat16)
        ]
