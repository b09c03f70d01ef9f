"""What runs forward, backward and step: torch by itself, or DeepSpeed's ZeRO around the same model and optimizer."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmuon.demo.config import TrainConfig
from shardmuon.testing import deepspeed as zero

__all__ = ["TorchEngine", "ZeroEngine", "check_engine"]


class TorchEngine:
    """The model as `parallelize` left it.

    Attributes:
        model: What to call for a loss.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self._optimizer = optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Give back what the engine holds."""

    # Whole tensors of a parameter, copied. Collective.

    def whole_weight(self, param: Tensor) -> Tensor:
        return _whole(param)

    def replica(self, param: Tensor) -> Tensor:
        """The whole weight as this rank has it."""
        return self.whole_weight(param)

    def whole_grad(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return _whole(param.grad)

    def whole_momentum(self, param: Tensor) -> Tensor:
        """Zeros before the first step."""
        momentum = self._optimizer.state[param].get("momentum_buffer")
        return torch.zeros_like(_whole(param)) if momentum is None else _whole(momentum)


def _whole(x: Tensor) -> Tensor:
    x = x.detach()
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.clone()


class ZeroEngine(TorchEngine):
    """DeepSpeed at the stage of `config`. Collective over all ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, device: str) -> None:
        super().__init__(model, optimizer)
        self._stage = config.zero
        self._engine = zero.initialize(model, optimizer, _json(config), device)
        self.model = self._engine

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        """DeepSpeed's step has done so."""

    def close(self) -> None:
        self._engine.destroy()

    def whole_weight(self, param: Tensor) -> Tensor:
        return zero.whole_weight(param) if self._stage else super().whole_weight(param)

    def replica(self, param: Tensor) -> Tensor:
        """The model's own copy, where it has one: the fp32 weights above are gathered, so the same on every rank."""
        return param.detach().clone() if self._stage < 3 else self.whole_weight(param)

    def whole_grad(self, param: Tensor) -> Tensor:
        return zero.whole_grad(param) if self._stage else super().whole_grad(param)

    def whole_momentum(self, param: Tensor) -> Tensor:
        if not self._stage:
            return super().whole_momentum(param)
        return zero.whole_momentum(param) if self._optimizer.state else torch.zeros_like(self.whole_weight(param))


def check_engine(engine: str, zero: int, offload: str, nvme_path: str | None) -> None:
    """Raise ValueError for settings of DeepSpeed that do not go together, or where it is not installed."""
    if engine == "torch":
        given = [name for name, value in (("--offload", offload != "none"), ("--nvme-path", nvme_path)) if value]
        if given:
            raise ValueError(f"{given[0]} is for --engine deepspeed.")
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("--engine deepspeed needs DeepSpeed: pip install 'shardmuon[deepspeed]'.")
    if offload == "cpu" and zero == 0:
        raise ValueError("--offload cpu: ZeRO 0 offloads nothing. Write --zero 1, 2 or 3.")
    if offload == "nvme" and zero != 3:
        raise ValueError(f"--offload nvme: ZeRO {zero} cannot, stage 3 can. Write --zero 3.")
    if nvme_path is not None and offload != "nvme":
        raise ValueError("--nvme-path is for --offload nvme.")


def _json(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    settings: dict[str, Any] = {"stage": config.zero}
    if config.offload != "none":
        settings["offload_optimizer"] = {"device": config.offload}
    if config.offload == "nvme":
        settings["offload_optimizer"]["nvme_path"] = config.nvme_path
    return {"train_micro_batch_size_per_gpu": config.batch // config.num_ranks, "zero_optimization": settings}
