"""Small models for the routing tests. They imitate well-known models without importing the libraries of those
models."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from shardmuon import param_groups
from shardmuon.routing.groups import RoutingRow


def routed(model: nn.Module, **options: Any) -> dict[str, RoutingRow]:
    return {row.name: row for row in param_groups(model, **{"lr": 1e-3, **options}).rows}


def but(module: nn.Module, **attributes: Any) -> Any:
    """Set attributes, submodules or parameters of a module, and return the module."""
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


@functools.cache
def _kind(name: str, package: str) -> type[nn.Module]:
    return type(name, (nn.Module,), {"__module__": package})


def typed(name: str, package: str = "transformers.models.any", **attributes: Any) -> Any:
    """Return a module whose class has the given name and package."""
    return but(_kind(name, package)(), **attributes)


def subclassed(module: nn.Module) -> nn.Module:
    module.__class__ = type("Mine", (type(module),), {})
    return module


def config(**values: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**values)


def table(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


def bare(*shape: int, **options: Any) -> Any:
    """Return a module of an unknown type whose only parameter is `weight`."""
    return typed("Bare", weight=table(*shape, **options))


def linear(inputs: int = 16, outputs: int = 16) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def mlp(width: int = 8, hidden: int = 12) -> nn.Module:
    return typed("Mlp", up=linear(width, hidden), down=linear(hidden, width))


class Llama(nn.Module):
    """A decoder with grouped-query attention, whose k and v projections have `kv` rows."""

    def __init__(
        self, vocab: int = 100, dim: int = 16, kv: int = 8, hidden: int = 24, *, depth: int = 2, tied: bool = False
    ) -> None:
        def block() -> nn.Module:
            sizes = {"wq": (dim, dim), "wk": (dim, kv), "wv": (dim, kv), "wo": (dim, dim)}
            sizes |= {"up": (dim, hidden), "down": (hidden, dim)}
            return typed("Block", norm=nn.RMSNorm(dim), **{name: linear(*size) for name, size in sizes.items()})

        super().__init__()
        layers = nn.ModuleList(block() for _ in range(depth))
        but(self, embed=nn.Embedding(vocab, dim), layers=layers, norm=nn.RMSNorm(dim), head=linear(dim, vocab))
        if tied:
            self.head.weight = self.embed.weight


HIDDEN = ("wq", "wk", "wv", "wo", "up", "down")
LAYERS = [f"layers.{i}.{name}.weight" for i in range(2) for name in HIDDEN]


def tied(*, head_first: bool) -> nn.Module:
    embed, head = nn.Embedding(100, 8), linear(8, 100)
    head.weight = embed.weight
    ends = {"head": head, "embed": embed} if head_first else {"embed": embed, "head": head}
    return nn.ModuleDict({**ends, "hidden": linear(8, 8)})


def hooked(head: str | None) -> nn.Module:
    """Return a model whose get_output_embeddings returns the submodule named `head`, or None if `head` is None."""
    model = typed("Hooked", embed=nn.Embedding(16, 16), decoder=linear(), pooler=linear())
    return but(model, get_output_embeddings=lambda: None if head is None else model.get_submodule(head))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def shared(**modules: Any) -> nn.Module:
    """Return a ModuleDict whose modules all share the first module's weight."""
    first = next(iter(modules.values()))
    return nn.ModuleDict({name: but(module, weight=first.weight) for name, module in modules.items()})


def placeholder(module: nn.Linear, ds_shape: tuple[int, ...] | None) -> nn.Linear:
    """Replace the weight of a linear layer with an empty placeholder, and return the layer. If a shape is given, it
    becomes the placeholder's `ds_shape`, as in ZeRO-3."""
    module.weight = nn.Parameter(torch.empty(0))
    if ds_shape is not None:
        module.weight.ds_shape = torch.Size(ds_shape)  # type: ignore[attr-defined]
    return module


def tensor_parallel(num_rows: int) -> nn.Module:
    """Return a tensor-parallel layer with `num_rows` rows in total, 8 of them on this rank."""
    module = typed("ColumnParallelLinear", weight=table(8, 4), output_size=num_rows, output_size_per_partition=8)
    return but(module, weight=but(module.weight, tensor_model_parallel=True))


def experts(*, router: int = 4, apart: bool = False, inner: int = 24, inputs_first: bool = False) -> nn.Module:
    """Return four experts and their router. If `inputs_first` is True, the experts' matrices are stored transposed."""
    up, down = (4, inner, 16), (4, 16, inner)
    up, down = (down, up) if inputs_first else (up, down)
    stacks = typed("Experts", w_up=table(*up), w_down=table(*down))
    if apart:
        # torchtitan keeps the router outside the experts module.
        return nn.ModuleDict({"gate": linear(16, 4), "experts": stacks})
    return but(stacks, router=linear(16, router))


def marked_block() -> nn.Module:
    model = Llama()
    for p in model.layers[0].parameters():
        but(p, use_muon=False)
    return model


# --------------------------------------------------------------------------------------------------- well-known types


def conv1d(outputs: int, inputs: int) -> nn.Module:
    return typed("Conv1D", nf=outputs, nx=inputs, weight=table(inputs, outputs), bias=table(outputs))


def gpt2_attention(width: int = 8, *, cross: bool = False) -> nn.Module:
    c_attn = conv1d((2 if cross else 3) * width, width)
    return typed(
        "GPT2Attention", split_size=width, is_cross_attention=cross, c_attn=c_attn, c_proj=conv1d(width, width)
    )


def timm_attention(package: str = "timm.layers.attention") -> nn.Module:
    return typed("Attention", package, qkv=linear(8, 24), proj=linear(8, 8))


def gpt_oss_experts() -> nn.Module:
    gate_up, down = {"gate_up_proj": table(3, 8, 20), "gate_up_proj_bias": table(3, 20)}, table(3, 10, 8)
    return typed("GptOssExperts", **gate_up, down_proj=down, down_proj_bias=table(3, 8))


def known_types() -> nn.Module:
    layers = nn.ModuleList([gpt2_attention(), gpt_oss_experts(), timm_attention(), nn.Sequential(conv1d(12, 8))])
    return typed("Model", layers=layers)
