"""Plain tensors: one process, DDP replicas, rank-local experts."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.layout.views import Ints


class LocalEngine:
    """A plain tensor is its own storage."""

    def recognizes(self, param: Tensor) -> bool:
        return True

    def shape(self, param: Tensor) -> Ints:
        return tuple(param.shape)

    def storage(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        plain = type(tensor) is Tensor and tensor.shape == param.shape and tensor.layout is torch.strided
        return tensor if plain else None

    def wrap(self, storage: Tensor, param: Tensor, shape: Ints | None = None) -> Tensor:
        return storage

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        if grad.shape != param.shape or is_dtensor(grad):
            kind = "DTensor" if is_dtensor(grad) else "tensor"
            raise ValueError(
                f"its gradient is a {kind} of shape {tuple(grad.shape)}, the parameter has {tuple(param.shape)}"
            )
        return True

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        raise AssertionError("plain gradients need no alignment")

    def signature(self, param: Tensor) -> object:
        return param.shape

    def lacks_gradient(self, param: Tensor) -> bool:
        return False
