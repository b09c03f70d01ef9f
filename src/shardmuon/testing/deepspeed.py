"""DeepSpeed on this process's ranks, for comparisons: the package itself, started without its log and compilers."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon.frameworks.deepspeed import REQUIRED

if TYPE_CHECKING:
    from shardmuon.muon import Muon

ZERO_ROWS: dict[str, dict[str, Any]] = {  # name -> "zero_optimization" of DeepSpeed's configuration
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2+offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3+offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def start_deepspeed(device: str) -> Any:
    """DeepSpeed as a module, on the process group that there is, with nothing compiled for the CPU. Collective.

    Args:
        device: "cpu" or "cuda".
    """
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.setdefault("LOCAL_RANK", rank)  # DeepSpeed reads these three
    os.environ |= {"RANK": rank, "WORLD_SIZE": ranks}
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    with _quiet():
        import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    old = r"`torch.distributed.\w+` is deprecated"  # newer torch, about names that DeepSpeed calls for older ones
    warnings.filterwarnings("ignore", old, FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a faster gloo that takes minutes to compile
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, auto_mpi_discovery=False)
    return deepspeed


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], device: str) -> Any:
    """A DeepSpeed engine without its own clipping. Collective.

    Args:
        config: What there is to say beside the two settings that a client optimizer needs.
    """
    quiet = {"steps_per_print": 10**9, "gradient_clipping": 0.0, **REQUIRED}
    deepspeed = start_deepspeed(device)
    with _quiet():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**quiet, **config})
    return engine


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's notices about DeepSpeed's calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def whole_weight(param: Tensor) -> Tensor:
    """A copy of the fp32 weight at stages 1 to 3. Collective."""
    return _find("safe_get_full_fp32_param", param)


def whole_momentum(param: Tensor) -> Tensor:
    """A copy of Muon's momentum at stages 1 to 3, after the first step. Collective."""
    return _find("safe_get_full_optimizer_state", param, "exp_avg")


def _find(function: str, param: Tensor, *key: str) -> Tensor:
    from deepspeed import utils

    found: Tensor = getattr(utils, function)(param, *key)
    shape = getattr(param, "ds_shape", param.shape)  # stage 3 keeps a placeholder in the parameter
    return found.detach().clone().view(shape)


class GivenGradients(nn.Module):
    """Parameters, and a loss whose gradients are given."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(p * grads[name]).sum().float() for name, p in self.named_parameters()]).sum()


class ZeroRun:
    """An optimizer under DeepSpeed, fed with gradients; what it finds are whole tensors, the same on every rank.

    Gradients are rounded to multiples of 1/8: DeepSpeed's mean over the ranks is exact with them.
    """

    def __init__(
        self,
        row: str,
        full: Mapping[str, Tensor],
        make: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Muon],
        dtype: torch.dtype,
    ) -> None:
        zero = ZERO_ROWS[row]
        self._whole = zero["stage"] == 0
        model = GivenGradients(full)
        self._params = dict(model.named_parameters())
        self.optimizer = make(self._params, {"process_group": dist.group.WORLD} if self._whole else {})
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        if dtype != torch.float32:
            config[{torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]] = {"enabled": True}
        self._made = [name for group in self.optimizer.param_groups for name in group["param_names"]]
        self._engine = initialize(model, self.optimizer, config, "cpu")

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors as this run shows them."""
        return dict(full)

    def start(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The reference's first weights: DeepSpeed steps fp32 copies."""
        return {name: t.float() for name, t in full.items()}

    def gradients(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of a step, of the dtype that the reference takes."""
        return {name: (2 * t.float()).round().clamp(-8, 8) / 8 for name, t in drawn.items()}

    def step(self, grads: Mapping[str, Tensor]) -> None:
        self._engine.backward(self._engine(grads))
        self._engine.step()

    def weights(self) -> dict[str, Tensor]:
        if self._whole:  # the parameters, or fp32 copies of them
            stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
            return {name: p.detach().clone() for name, p in zip(self._made, stepped, strict=True)}
        return {name: whole_weight(p) for name, p in self._params.items()}

    def momentum(self) -> dict[str, Tensor]:
        if self._whole:
            stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
            states = [self.optimizer.state[p]["momentum_buffer"] for p in stepped]
            return dict(zip(self._made, states, strict=True))
        return {name: whole_momentum(p) for name, p in self._params.items()}

    def close(self) -> None:
        self._engine.destroy()
