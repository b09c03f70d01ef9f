"""The largest attention logit of each head, from given queries and keys or from the calls inside a layer's forward.

[Note: what is measured]
    The logit of a query and a key is their product times the softmax scale, where the mask lets the query see the key.
    A bias that a mask adds does not count, since no weight of q or k produces it. Products are computed in fp32 (in
    fp64 for fp64 inputs), so rounding in half-precision kernels is not reproduced. At most one chunk of the matrix of
    logits is in memory at a time.

[Note: where it is measured]
    Inside a layer's forward, a `TorchFunctionMode` intercepts the functions of `_MEASURES`, under any name they were
    imported as, with their arguments: queries and keys after rotation, caching and repetition. Attention written out in
    torch operations ends in a softmax over the logits themselves (transformers' "eager"). Kernels that are not torch
    functions (flash-attn's) are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmuon._torch import local_if_any

_CHUNK = 1 << 24  # logits that are computed at a time


@torch.no_grad()
def largest_logits(
    query: Tensor,  # (.., H, L, E)
    key: Tensor,  # (.., G, S, E); G divides H
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,  # broadcasts to (.., H, L, S); False or -inf: hidden
    is_causal: bool = False,
    chunk: int = _CHUNK,
) -> Tensor:  # (H,), fp32; -inf for a head that sees nothing
    """The largest logit of each head over batch and positions.

    Args:
        query: As `torch.nn.functional.scaled_dot_product_attention` takes it; of a DTensor, this rank's part is used.
        key: Likewise; with fewer heads if several query heads share one.
        scale: Scale of the softmax. Default: 1 / sqrt(E).
        attn_mask: As in that function. Values that a float mask adds are not counted, see [Note: what is measured].
        is_causal: If True, query i sees keys 0 to i only.
        chunk: Number of logits to compute at a time, but at least one row of each head.
    """
    query, key = (t if t.dtype == torch.float64 else t.float() for t in map(local_if_any, (query, key)))
    heads, length, size = query.shape[-3:]
    num_keys, scale = key.shape[-2], size**-0.5 if scale is None else scale
    query, keys = query.unflatten(-3, (key.shape[-3], -1)), key.unsqueeze(-3)  # (.., G, H/G, L, E), (.., G, 1, S, E)
    hidden = None if attn_mask is None else _is_hidden(local_if_any(attn_mask))
    batch = math.prod(torch.broadcast_shapes(query.shape[:-4], keys.shape[:-4]))
    rows = max(1, chunk // max(1, batch * heads * num_keys))
    found = query.new_full((heads,), -math.inf)
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


def _per_head(logits: Tensor) -> Tensor:  # (.., H, L, S) -> (H,), -inf if there are no logits
    each = logits.transpose(0, -3).flatten(1)
    return each.amax(dim=1) if logits.numel() else each.new_full((len(each),), -math.inf)


def _is_hidden(mask: Tensor) -> Tensor:
    """True where a mask hides a key from a query: where it is False, -inf, or about the lowest value of its dtype."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


# ------------------------------------------------------------------------------------------------- inside of a forward


def _of_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return largest_logits(query, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def _of_softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor | None:
    if input.ndim < 3 or dim not in (-1, input.ndim - 1):
        return None
    return _per_head(local_if_any(input).detach()).float()


_MEASURES: dict[Any, Callable[..., Tensor | None]] = {
    F.scaled_dot_product_attention: _of_attention,
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
}


class Watch(TorchFunctionMode):
    """A context that observes one layer's attention, see [Note: where it is measured].

    Args:
        found: Function to call with the maxima of the heads, for each call that is seen.
    """

    def __init__(self, found: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        maxima = _MEASURES[func](*args, **kwargs) if func in _MEASURES else None
        if maxima is not None:
            self._found(maxima)
        return func(*args, **kwargs)
