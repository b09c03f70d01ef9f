"""The largest attention logit of each head, from queries and keys or from a running forward pass.

[Note: what is measured]
    The logit of a query and a key is their product times the softmax scale, where the mask lets the query see the key.
    A bias that a mask adds is no part of it: no weight of q or k makes it. Products are made of fp32 values (fp64 of
    fp64), so what half-precision kernels round away is not seen. Nothing larger than a chunk of the matrix of all
    logits is kept. `bound` is cheaper, the largest |q| times the largest |k| times the scale (Cauchy-Schwarz): never
    less than the largest logit and often much more, so that clipping by it clips more.

[Note: where it is measured]
    Inside of a layer's forward a `TorchFunctionMode` sees `scaled_dot_product_attention`, by whatever name it was
    imported, with the queries and keys that it is given: rotated, cached, repeated. Attention that is written out ends
    in a softmax over the logits themselves (transformers' "eager"): there they are read off. torch's
    MultiheadAttention has paths that call neither, so its queries and keys are made once more from its inputs. Kernels
    that are no torch functions (flash-attn's) are seen where transformers looks them up (`watch_interface`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardmuon._torch import local_if_any

CHUNK = 1 << 24  # logits that are looked at together

Measured = Callable[[Tensor, Tensor], None]  # (maxima of the heads, what they were measured of)


@torch.no_grad()
def largest_logits(
    query: Tensor,  # (.., H, L, E)
    key: Tensor,  # (.., G, S, E); G divides H
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,  # broadcasts to (.., H, L, S); False or -inf: not seen
    is_causal: bool = False,
    bound: bool = False,
    chunk: int = CHUNK,
) -> Tensor:  # (H,), fp32; -inf for a head that sees nothing
    """The largest logit of each head over batch and positions.

    Args:
        query: As `torch.nn.functional.scaled_dot_product_attention` takes it; of a DTensor this rank's part.
        key: Likewise; of fewer heads if several query heads share one.
        scale: Scale of the softmax. Default: 1 / sqrt(E).
        attn_mask: As there. What a mask of floats adds is not counted, see [Note: what is measured].
        is_causal: Query i sees keys 0 to i.
        bound: Return a number that no logit of a head is larger than, without any product of queries and keys.
        chunk: How many logits to look at together, at least one row of each head.

    Raises:
        ValueError: The shapes do not fit together.
    """
    query, key = (t if t.dtype == torch.float64 else t.float() for t in map(_local, (query, key)))
    if query.ndim < 3 or key.ndim < 3 or query.shape[-1] != key.shape[-1] or query.shape[-3] % key.shape[-3]:
        raise ValueError(
            f"queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}: expected (.., heads, "
            "positions, size) with the heads of the keys dividing those of the queries"
        )
    heads, length, size = query.shape[-3:]
    share, num_keys = heads // key.shape[-3], key.shape[-2]
    scale = size**-0.5 if scale is None else scale
    found = query.new_full((heads,), -math.inf)
    if bound and query.numel() and key.numel():
        longest, others = (_per_head(t.norm(dim=-1, keepdim=True)) for t in (query, key))
        return torch.mul(longest * others.repeat_interleave(share), abs(scale)).float()
    query = query.unflatten(-3, (-1, share))  # (.., G, H/G, L, E)
    keys = key.unsqueeze(-3)  # (.., G, 1, S, E)
    hidden = None if attn_mask is None else _is_hidden(_local(attn_mask), False)
    batch = math.prod(torch.broadcast_shapes(query.shape[:-4], keys.shape[:-4]))
    rows = max(1, chunk // max(1, batch * heads * num_keys))
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen = min(num_keys, stop) if is_causal else num_keys
        logits = (query[..., start:stop, :] @ keys[..., :seen, :].mT).mul_(scale).flatten(-4, -3)
        if hidden is not None:
            of_rows = hidden[..., start:stop, :] if hidden.shape[-2] > 1 else hidden
            logits = logits.masked_fill(of_rows[..., :seen], -math.inf)
        if is_causal:
            later = torch.ones(stop - start, seen, dtype=torch.bool, device=logits.device).triu(start + 1)
            logits = logits.masked_fill(later, -math.inf)
        found = torch.maximum(found, _per_head(logits))
    return found.float()


def _per_head(logits: Tensor) -> Tensor:  # (.., H, L, S) -> (H,), -inf of none at all
    each = logits.transpose(0, -3).flatten(1)
    return each.amax(dim=1) if logits.numel() else each.new_full((len(each),), -math.inf)


def _local(tensor: Tensor) -> Tensor:
    return local_if_any(tensor).detach()


def _is_hidden(mask: Tensor, when: bool) -> Tensor:
    """Say where a mask of booleans is `when`, or one of numbers -inf or about the lowest number of its dtype."""
    return mask == when if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


class Watch(TorchFunctionMode):
    """Sees the attention of one layer while it is entered, see [Note: where it is measured].

    Args:
        found: Is given the maxima.
        bound: An upper bound will do.
    """

    def __init__(self, found: Measured, bound: bool) -> None:
        super().__init__()
        self._found, self._bound = found, bound

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._see(*args, **kwargs)
        elif func in (F.softmax, torch.softmax, Tensor.softmax):
            logits = args[0] if args else kwargs["input"]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if logits.ndim >= 3 and dim in (-1, logits.ndim - 1):
                self._found(_per_head(_local(logits)).float(), logits)
        return func(*args, **kwargs)

    def _see(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        given: Any = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "bound": self._bound}
        self._found(largest_logits(query, key, **given), query if query.requires_grad else key)


@contextmanager
def watch_interface(module: nn.Module, found: Measured, bound: bool) -> Iterator[None]:
    """Measure what transformers gives to a kernel that is no torch function. Its masks are of
    its own kind: what they hide counts, but for later positions."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    functions: Any = {}
    if chosen not in (None, "eager", "sdpa") and "transformers" in sys.modules:
        functions = sys.modules["transformers"].modeling_utils.ALL_ATTENTION_FUNCTIONS
    kernel = functions.get(chosen)
    if kernel is None:
        yield
        return

    def watched(
        owner: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if owner is module:
            given = kwargs.get("is_causal")
            causal = getattr(owner, "is_causal", True) if given is None else given
            seen = bool(causal) and query.shape[-2] == key.shape[-2]
            maxima = largest_logits(query, key, scale=kwargs.get("scaling"), is_causal=seen, bound=bound)
            found(maxima, query if query.requires_grad else key)
        return kernel(owner, query, key, value, mask, *args, **kwargs)

    functions[chosen] = watched
    try:
        yield
    finally:
        functions[chosen] = kernel


_OF_TORCH = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")  # and more


@torch.no_grad()
def of_multihead_attention(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bound: bool
) -> Tensor:  # (num_heads,)
    """The maxima of torch's MultiheadAttention for these arguments of its forward."""
    given = {**dict(zip(_OF_TORCH, args, strict=False)), **kwargs}
    fused, bias = module.in_proj_weight, module.in_proj_bias
    weights = (module.q_proj_weight, module.k_proj_weight) if fused is None else fused.chunk(3)[:2]
    biases = (None, None) if bias is None else bias.chunk(3)[:2]
    made = []
    for inputs, weight, of_it in zip((given["query"], given["key"]), weights, biases, strict=True):
        heads = F.linear(inputs, weight, of_it).unflatten(-1, (module.num_heads, -1))  # (L, N, H, E), or (L, H, E)
        if heads.ndim == 4 and not module.batch_first:
            heads = heads.transpose(0, 1)
        made.append(heads.transpose(-3, -2))
    hidden = _hidden_by_torch(given.get("attn_mask"), given.get("key_padding_mask"), made[0])
    return largest_logits(*made, attn_mask=None if hidden is None else ~hidden, bound=bound)


def _hidden_by_torch(attn: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """Positions that MultiheadAttention's masks hide: they are True there, or -inf."""
    found = [] if attn is None else [_is_hidden(attn, True)]
    if found and found[0].ndim == 3 and query.ndim == 4:  # (N H, L, S)
        found[0] = found[0].unflatten(0, (query.shape[0], -1))
    if padding is not None:
        here = _is_hidden(padding, True)
        found.append(here[:, None, None, :] if query.ndim == 4 else here[None, None, :])
    return found[0] | found[-1] if found else None
