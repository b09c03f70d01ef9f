"""The arithmetic of the live step on one whole matrix alone: what is fed in, its result, what the weights become.

Live and dense may then differ by the order of sums alone: on the Gram route, by how sums were spread over shards, and
where slots of a batch round otherwise (see `shardmuon.orthogonalize`). The orthogonalizers are the live ones, so a
broken one shows only beside `reference`. Of plan, buckets, routes, exchange, momentum and update nothing is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon._torch import ieee_products
from shardmuon.auditing.reference import decay_factor
from shardmuon.layout.pieces import Patch
from shardmuon.momentum.rounding import Stream, round_patch
from shardmuon.orthogonalize import BACKENDS, KernelName, Products, factor_of, normalize, orthogonalize
from shardmuon.step.options import Settings
from shardmuon.variants import BeforeStage

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of one matrix's step, and the dtypes in which it is stored.

    Attributes:
        method, ns_dtype: The orthogonalizer and the dtype of its products.
        wire_dtype: What travels between ranks: input and result are rounded to it.
        weight_dtype: Dtype of the parameter.
        momentum_dtype: Dtype of the momentum's computation; what is orthogonalized was rounded to it.
        stored_dtype: Dtype of the stored momentum; int8 stands for 8-bit codes.
        grad_dtype: Dtype of the gradient.
        kernel: What multiplies symmetric results.
        alone: Never in a batch.
        device: Where matrices are orthogonalized; None: where they are.
        by_gram: Whether the shards stay where they are and only their Gram matrices are added up.
    """

    method: str
    ns_dtype: torch.dtype
    wire_dtype: torch.dtype
    weight_dtype: torch.dtype
    momentum_dtype: torch.dtype
    stored_dtype: torch.dtype
    grad_dtype: torch.dtype = torch.float32
    kernel: KernelName = "torch"
    alone: bool = False
    device: torch.device | None = None
    by_gram: bool = False

    @property
    def products(self) -> torch.dtype:
        """Dtype to which products are rounded."""
        return _travels(self) if self.by_gram else self.ns_dtype

    def __str__(self) -> str:
        return f"{self.method} {str(self.ns_dtype).removeprefix('torch.')}"


def fed(
    buffer: Tensor,  # (rows, cols) momentum before the step; all of these in a dtype that holds them exactly
    grad: Tensor,
    weight: Tensor,  # before the step
    a: Arithmetic,
    s: Settings,
) -> Tensor:  # (rows, cols) as `run` takes it
    """The orthogonalizer's input, bit for bit as in the step: `lerp` gives an element equal bits in any shard."""
    grad = grad.to(a.grad_dtype)
    if s.weight_decay_mode == "l2" and s.weight_decay:
        weight = weight.to(a.weight_dtype)
        if a.grad_dtype in _HALF:
            grad = (grad.float() + weight.float() * s.weight_decay).to(a.grad_dtype)
        else:
            grad = grad + weight * s.weight_decay
    grad = grad.to(a.momentum_dtype)
    after = torch.lerp(buffer.to(a.momentum_dtype), grad, 1 - s.momentum)
    update = torch.lerp(grad, after, s.momentum) if s.nesterov else after
    return update.to(_travels(a))


def _travels(a: Arithmetic) -> torch.dtype:
    if not a.by_gram:
        return a.wire_dtype
    return torch.float64 if a.wire_dtype == torch.float64 else torch.float32


def run(
    values: Tensor,  # (B, rows, cols), of the dtype that `fed` gives, or any
    a: Arithmetic,
    s: Settings,
    *,
    nudged: bool = False,  # the values lie between those that can travel: they are not rounded to the wire
) -> Tensor:  # (B, rows, cols)
    """Orthogonalize whole matrices in the live arithmetic; rounded as they travel."""
    # stages before the orthogonalizer run where it does, on what has travelled
    staged = nudged or any(isinstance(stage, BeforeStage) for stage in s.stages)
    wide = torch.promote_types(_travels(a), torch.float32)
    x = values.to(wide if staged else _travels(a)).to(a.device or values.device).contiguous()
    if a.by_gram:
        return _by_gram(x, s).to(values.device)
    out = orthogonalize(x, s.coefficients, method=a.method, eps=s.eps, dtype=a.ns_dtype, kernel=a.kernel, alone=a.alone)
    return out.to(a.wire_dtype).to(values.device)


def _by_gram(x: Tensor, s: Settings) -> Tensor:
    """[Note: the Gram route] with one shard."""
    turn = x.shape[-2] > x.shape[-1]
    y = normalize(x.mT if turn else x)
    with ieee_products(x.device):
        gram = Products(y.shape, y.device, y.dtype).gram_fp32(y)
        factor = factor_of(gram.double(), s.coefficients, Products(gram.shape, gram.device, torch.float64)).to(x.dtype)
        out = (factor.triu() + factor.triu(1).mT) @ y
    return out.mT if turn else out


def stepped(
    before: Tensor,  # (rows, cols) weights
    update: Tensor,  # (rows, cols) as it travels
    scale: float,
    a: Arithmetic,
    s: Settings,
    rounding: tuple[Stream, int] | None,  # random bits for half-precision weights, and which matrix of its parameter
) -> Tensor:  # (rows, cols), the weights' dtype
    """Weights after this update: decayed, updated and rounded as the step does it."""
    weights, alpha = before.to(a.weight_dtype), s.lr * scale
    if BACKENDS[a.method].like_torch and rounding is None and s.weight_decay_mode == "decoupled":
        return weights.mul(1 - s.lr * s.weight_decay).add_(update.to(weights.device), alpha=-alpha)
    half = a.weight_dtype in _HALF
    wide = weights.float() if half else weights.clone()
    update = update.to(wide.device, wide.dtype)
    if s.weight_decay and s.weight_decay_mode != "l2":
        decayed = wide * decay_factor(s)
        wide = torch.where(update * wide > 0, decayed, wide) if s.weight_decay_mode == "cautious" else decayed
    wide = wide.add(update, alpha=-alpha)
    if half and rounding is not None:
        stream, matrix = rounding
        return round_patch(stream, Patch.rectangle(matrix, 0, 0, *wide.shape), a.weight_dtype, wide)
    return wide.to(a.weight_dtype)
