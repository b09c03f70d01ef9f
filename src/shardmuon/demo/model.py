"""A small Llama-style byte language model: RMSNorm, rotary attention with grouped queries, SwiGLU or routed experts.

Knows nothing of process groups. The two things a parallel layout must be able to say to it are data: attention reads
its number of heads off the projections' outputs, so tensor parallelism may hand it fewer, and `Experts.split` says
over which mesh axis the experts (or the inside of each expert) are cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardmuon.demo.config import ModelConfig

__all__ = ["Attention", "Block", "Experts", "Model", "RoutedExperts", "Split", "SwiGLU"]


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dim."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(
        self,
        x: Tensor,  # (..., D)
    ) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)


def rotary_angles(seq_len: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, (T, head_dim / 2) each. https://arxiv.org/abs/2104.09864"""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(
    x: Tensor,  # (B, T, H, head_dim)
    cos: Tensor,  # (T, head_dim / 2)
    sin: Tensor,  # (T, head_dim / 2)
) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which `num_heads / num_kv_heads` query heads share one key-value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,  # (B, T, D)
        cos: Tensor,  # (T, head_dim / 2)
        sin: Tensor,  # (T, head_dim / 2)
    ) -> Tensor:
        # -1: under tensor parallelism the projections return this rank's heads only
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        share = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(share, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.wo(mixed.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`. https://arxiv.org/abs/2002.05202"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,  # (B, T, D)
    ) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


@dataclass(frozen=True, slots=True)
class Split:
    """How the expert stacks are cut over one mesh axis.

    `tokens` is the placement of the tokens over that axis: `Shard(0)` when each rank brings its own (expert parallel),
    `Replicate()` when all ranks hold the same (tensor parallel, each expert's hidden units cut).
    """

    mesh: DeviceMesh
    tokens: Placement
    first_expert: int

    def spread(
        self,
        x: Tensor,  # (S, C) tokens of this rank
    ) -> Tensor:
        """All the axis's tokens, (S * ranks, C) or (S, C). Backward sums the ranks' gradients of each token."""
        whole = DTensor.from_local(x, self.mesh, [self.tokens], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def collect(
        self,
        y: Tensor,  # this rank's share of the sum, for all the axis's tokens
    ) -> Tensor:
        """The sum over the axis's ranks, each rank its own tokens: the inverse of `spread`."""
        shares = DTensor.from_local(y, self.mesh, [Partial()], run_check=False)
        return shares.redistribute(placements=[self.tokens]).to_local()

    @property
    def gradient_scale(self) -> float:
        """What turns the gradient an expert collects from every rank's own mean loss into that of the global mean."""
        return 1.0 if self.tokens.is_replicate() else 1.0 / self.mesh.size()


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def _scale_gradient(x: Tensor, scale: float) -> Tensor:
    """`x`, whose gradient is multiplied by `scale`."""
    return cast(Tensor, _ScaleGradient.apply(x, scale))  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """E SwiGLUs as three stacks. A stack (E, M, N) holds E matrices, and Muon orthogonalizes each by itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.num_experts, config.expert_hidden, config.dim)
        self.gate = nn.Parameter(torch.empty(shape))  # (E, H, D)
        self.up = nn.Parameter(torch.empty(shape))  # (E, H, D)
        self.down = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))  # (E, D, H)
        self.split: Split | None = None

    def forward(
        self,
        tokens: Tensor,  # (S, D)
        weights: Tensor,  # (S, E) zero for every expert that a token was not sent to
    ) -> Tensor:
        """The weighted sum over experts. A rank computes its own experts on the tokens of the whole axis."""
        split = self.split
        if split is None:
            return self._compute(tokens, weights, 0, 1.0)
        packed = split.spread(torch.cat([tokens, weights], dim=1))
        tokens, weights = packed.split([tokens.shape[1], weights.shape[1]], dim=1)
        return split.collect(self._compute(tokens, weights, split.first_expert, split.gradient_scale))

    def _compute(self, tokens: Tensor, weights: Tensor, first_expert: int, gradient_scale: float) -> Tensor:
        stacks = [_local(stack) for stack in (self.gate, self.up, self.down)]
        if gradient_scale != 1.0:
            stacks = [_scale_gradient(stack, gradient_scale) for stack in stacks]
        out = torch.zeros_like(tokens)
        for index, (gate, up, down) in enumerate(zip(*stacks, strict=True), start=first_expert):
            rows = weights[:, index].nonzero().squeeze(1)  # may be empty: the expert's gradient is then zero, not None
            x = tokens[rows]
            y = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
            out = out.index_add(0, rows, y * weights[rows, index, None])
        return out


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class RoutedExperts(nn.Module):
    """Send each token to its `top_k` experts by a softmax router. No balancing loss: a mean over the batch inside the
    loss would make it depend on how the batch is cut."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(
        self,
        x: Tensor,  # (B, T, D)
    ) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = F.softmax(self.router(tokens), dim=-1)
        top, chosen = scores.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(dim=-1, keepdim=True))
        return cast(Tensor, self.experts(tokens, weights)).view_as(x)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp: SwiGLU | RoutedExperts = RoutedExperts(config) if config.num_experts else SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class Model(nn.Module):
    """Token ids (B, T) to logits (B, T, vocab), for up to `seq_len` positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_angles(seq_len, config.head_dim, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        tokens: Tensor,  # (B, T) int64
    ) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))

    @torch.no_grad()
    def initialize_(self, seed: int) -> None:
        """Set every weight from `seed` alone, the same on every rank. Changes the parameters in place.

        Matrices are normal with standard deviation 1/sqrt(inputs), the projections that write to the residual stream
        smaller by sqrt(2 * layers); the embedding is normal with 1, the head starts at zero (uniform predictions).
        """
        generator = torch.Generator().manual_seed(seed)
        residual = 1.0 / math.sqrt(2 * self.config.num_layers)
        for name, p in self.named_parameters():
            if p.ndim == 1:
                continue
            std = 1.0 if name.startswith("embed") else 0.0 if name.startswith("head") else p.shape[-1] ** -0.5
            std *= residual if name.endswith(("wo.weight", "down.weight", "experts.down")) else 1.0
            p.copy_(torch.randn(p.shape, generator=generator) * std)
