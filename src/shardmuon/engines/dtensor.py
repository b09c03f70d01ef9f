"""DTensor: FSDP2, HSDP, tensor parallel, expert parallel and any product of them."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmuon._torch import dtensor_around, local_if_alike, local_tensor, placement_spec
from shardmuon.layout.readers.meshes import placed
from shardmuon.layout.views import Ints


class DTensorEngine:
    """A DTensor's local tensor."""

    cuts_stacks_by_placements = True  # see engines/kept.py

    def recognizes(self, param: Tensor) -> bool:
        return isinstance(param, DTensor)

    def shape(self, param: Tensor) -> Ints:
        return tuple(param.shape)

    def storage(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        local = local_tensor(tensor)
        return local.detach() if local.requires_grad and torch.is_grad_enabled() else local

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        if type(tensor) is not DTensor:
            return None
        assert isinstance(param, DTensor)
        local = local_if_alike(tensor, param)
        return local if local is not None and local.layout is torch.strided else None

    def wrap(self, storage: Tensor, param: Tensor, shape: Ints | None = None) -> Tensor:
        assert isinstance(param, DTensor)
        size = param.shape if shape is None else torch.Size(shape)
        stride = param.stride() if shape is None else tuple(itertools.accumulate((1, *size[:0:-1]), operator.mul))[::-1]
        return dtensor_around(storage, param.device_mesh, param.placements, size, stride)

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        assert isinstance(param, DTensor)
        if not isinstance(grad, DTensor):
            raise ValueError(f"its gradient is a plain tensor, the parameter a DTensor placed {placed(param)}")
        if grad.device_mesh != param.device_mesh or grad.shape != param.shape:
            raise ValueError(
                f"its gradient of shape {tuple(grad.shape)} is placed {placed(grad)}, the parameter of shape "
                f"{tuple(param.shape)} {placed(param)}. Redistribute the gradient to the parameter's mesh"
            )
        return grad.placements == param.placements

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        assert isinstance(grad, DTensor)
        assert isinstance(param, DTensor)
        return grad.redistribute(placements=param.placements)

    def signature(self, param: Tensor) -> object:
        assert isinstance(param, DTensor)
        spec = placement_spec(param)
        return spec.shape, spec.mesh, spec.placements, local_tensor(param).shape

    def lacks_gradient(self, param: Tensor) -> bool:
        return False
