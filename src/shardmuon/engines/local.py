"""Plain tensors: one process, DDP replicas, rank-local experts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import group_ranks, my_rank
from shardmuon.engines.base import Claim, Description
from shardmuon.layout.readers.local import refuse_marked
from shardmuon.planning.layout import Box, Holder, ParamLayout
from shardmuon.planning.views import MatrixView, Shape


@lru_cache(maxsize=4096)
def replicated_layout(view: MatrixView, ranks: tuple[int, ...]) -> ParamLayout:
    """Every rank holds the whole tensor."""
    zeros = (0,) * len(view.shape)
    whole = Box(zeros, view.shape)
    return ParamLayout(view, ranks, tuple(Holder(rank, whole, zeros) for rank in ranks))


class LocalEngine:
    """A plain tensor is whole where it is.

    Without a group it is orthogonalized on every rank that has it: right for DDP and for experts that differ by rank
    alike. With a group its ranks are taken for replicas (which is checked when the plan is built) and share the work.
    """

    def recognizes(self, param: Tensor) -> bool:
        return True

    def shape(self, param: Tensor) -> Shape:
        return tuple(param.shape)

    def describe(self, param: Tensor, view: MatrixView, group: Any) -> Description:
        refuse_marked(param)
        ranks = tuple(sorted(group_ranks(group))) if group is not None else (my_rank(),)
        claim = Claim(replicated_layout(view, ranks), view.shape)
        text = f"a plain tensor replicated over ranks {ranks}" if len(ranks) > 1 else "a plain tensor of this rank"
        return Description(ranks, (claim,), tuple(param.shape), text, group)

    def storage(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        plain = type(tensor) is Tensor and tensor.shape == param.shape and tensor.layout is torch.strided
        return tensor if plain else None

    def wrap(self, storage: Tensor, param: Tensor, shape: Shape | None = None) -> Tensor:
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
