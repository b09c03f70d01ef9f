"""FSDP1 with `use_orig_params=True`: its own forward and backward pass give the gradients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

Tensors = Mapping[str, Tensor]


class _Unit(nn.Module):
    """Parameters, and a loss whose gradients are given."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def forward(self, grads: Tensors) -> Tensor:
        return torch.stack([(getattr(self, name) * grads[name]).sum().float() for name in self.names]).sum()


class Fsdp1:
    """The wrapped parameters, by name."""

    def __init__(self, full: Tensors) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what FSDP1's own code calls is deprecated; one rank has no need of it
            self._model = FullyShardedDataParallel(
                _Unit(full),
                sharding_strategy=ShardingStrategy.FULL_SHARD,
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )
        self.params = {n.removeprefix("_fsdp_wrapped_module."): p for n, p in self._model.named_parameters()}

    def backward(self, grads: Tensors) -> None:
        """Gradients of the parameters. They are rounded to multiples of 1/8, so that the mean over ranks is exact."""
        rounded = {name: ((2 * g.float()).round().clamp(-8, 8) / 8).to(g.dtype) for name, g in grads.items()}
        self._model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model(rounded).backward()
