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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardmuon._torch import local_if_any

__all__ = ["Watch", "largest_logits", "logits_bound", "of_multihead_attention"]

CHUNK = 1 << 24  # logits that are looked at together


@torch.no_grad()
def largest_logits(
    query: Tensor,  # (.., H, L, E)
    key: Tensor,  # (.., G, S, E); G divides H
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,  # broadcasts to (.., H, L, S); False or -inf: not seen
    is_causal: bool = False,
    chunk: int = CHUNK,
) -> Tensor:  # (H,), fp32; -inf for a head that sees nothing
    """The largest logit of each head over batch and positions.

    Args:
        query: As `torch.nn.functional.scaled_dot_product_attention` takes it; of a DTensor this rank's part.
        key: Likewise; of fewer heads if several query heads share one.
        scale: Of the softmax. Default: 1 / sqrt(E).
        attn_mask: As there. What a mask of floats adds is not counted, see [Note: what is measured].
        is_causal: Query i sees keys 0 to i.
        chunk: How many logits to look at together, at least one row of each head.

    Raises:
        ValueError: The shapes do not fit together.
    """
    query, key = _wide(query), _wide(key)
    heads, length = _check(query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    share, num_keys = heads // key.shape[-3], key.shape[-2]
    query = query.unflatten(-3, (-1, share))  # (.., G, H/G, L, E)
    keys = key.unsqueeze(-3)  # (.., G, 1, S, E)
    batch = math.prod(torch.broadcast_shapes(query.shape[:-4], keys.shape[:-4]))
    rows = max(1, chunk // max(1, batch * heads * num_keys))
    found = query.new_full((heads,), -math.inf)
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen = min(num_keys, stop) if is_causal else num_keys
        logits = (query[..., start:stop, :] @ keys[..., :seen, :].mT).mul_(scale).flatten(-4, -3)
        hidden = _hidden(attn_mask, is_causal, (start, stop), seen, logits.device)
        for where in hidden:
            logits = logits.masked_fill(where, -math.inf)
        found = torch.maximum(found, _per_head(logits))
    return found.float()


@torch.no_grad()
def logits_bound(
    query: Tensor,  # (.., H, L, E)
    key: Tensor,  # (.., G, S, E)
    *,
    scale: float | None = None,
) -> Tensor:  # (H,), fp32
    """A number that no logit of a head is larger than, without any product of queries and keys."""
    query, key = _wide(query), _wide(key)
    heads, _ = _check(query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not query.numel() or not key.numel():
        return query.new_full((heads,), -math.inf).float()
    longest = [_per_head(t.norm(dim=-1).unsqueeze(-1)) for t in (query, key)]
    bound: Tensor = longest[0] * longest[1].repeat_interleave(heads // key.shape[-3]) * abs(scale)
    return bound.float()


def _per_head(logits: Tensor) -> Tensor:  # (.., H, L, S) -> (H,), -inf of none at all
    each = logits.transpose(0, -3).flatten(1)
    return each.amax(dim=1) if logits.numel() else each.new_full((len(each),), -math.inf)


def _wide(tensor: Tensor) -> Tensor:
    local = local_if_any(tensor).detach()
    return local if local.dtype == torch.float64 else local.float()


def _check(query: Tensor, key: Tensor) -> tuple[int, int]:
    """(H, L)."""
    if query.ndim < 3 or key.ndim < 3 or query.shape[-1] != key.shape[-1] or query.shape[-3] % key.shape[-3]:
        raise ValueError(
            f"queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}: expected (.., heads, "
            "positions, size) with the heads of the keys dividing those of the queries"
        )
    return query.shape[-3], query.shape[-2]


def _hidden(
    mask: Tensor | None, is_causal: bool, rows: tuple[int, int], seen: int, device: torch.device
) -> Iterator[Tensor]:
    """Where logits of these query rows do not count."""
    if mask is not None:
        mask = local_if_any(mask).detach()
        if mask.shape[-2] > 1:
            mask = mask[..., rows[0] : rows[1], :]
        if mask.shape[-1] > 1:
            mask = mask[..., :seen]
        # "not seen" is -inf, or the lowest number of the dtype, maybe of a narrower one
        yield ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    if is_causal:
        yield torch.ones(rows[1] - rows[0], seen, dtype=torch.bool, device=device).triu(rows[0] + 1)


Measured = Callable[[Tensor, int], None]  # (maxima of the heads, size of a head or 0)


class Watch(TorchFunctionMode):
    """Sees the attention of one layer while it is entered, see [Note: where it is measured].

    Args:
        found: Is given the maxima, and the size of a head where it is known.
        bound: Whether an upper bound will do.
    """

    def __init__(self, found: Measured, bound: bool) -> None:
        super().__init__()
        self._found, self._bound = found, bound

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._see(*args, **kwargs)
        elif func in (F.softmax, torch.softmax, Tensor.softmax):
            logits = local_if_any(args[0] if args else kwargs["input"])
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if logits.ndim >= 3 and dim in (-1, logits.ndim - 1):
                self._found(_per_head(logits.detach()).float(), 0)
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
        self._found(measure(query, key, attn_mask, is_causal, scale, bound=self._bound), query.shape[-1])


def measure(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    *,
    bound: bool,
) -> Tensor:  # (H,)
    """The maxima, or their bound."""
    if bound:
        return logits_bound(query, key, scale=scale)
    return largest_logits(query, key, scale=scale, attn_mask=attn_mask, is_causal=is_causal)


@torch.no_grad()
def of_multihead_attention(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bound: bool
) -> Tensor:  # (num_heads,)
    """The maxima of torch's MultiheadAttention for these arguments of its forward."""
    names = (
        "query",
        "key",
        "value",
        "key_padding_mask",
        "need_weights",
        "attn_mask",
        "average_attn_weights",
        "is_causal",
    )
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    size = module.embed_dim
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight[:size], module.in_proj_weight[size : 2 * size]
    else:
        weights = module.q_proj_weight, module.k_proj_weight
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.split(size)[:2]
    made = []
    for inputs, weight, bias in zip((given["query"], given["key"]), weights, biases, strict=True):
        made.append(F.linear(inputs, weight, bias).unflatten(-1, (module.num_heads, -1)))  # (L, N, H, E), or (L, H, E)
    if made[0].ndim == 4:
        order = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
        query, key = (t.permute(order) for t in made)
    else:
        query, key = (t.transpose(0, 1) for t in made)
    mask = _torch_mask(given.get("attn_mask"), given.get("key_padding_mask"), query)
    return measure(query, key, mask, False, None, bound=bound)


def _torch_mask(attn: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """MultiheadAttention's masks (True: not seen) as one of `largest_logits` (True: seen)."""
    seen: Tensor | None = None
    if attn is not None:
        seen = ~attn if attn.dtype == torch.bool else attn > torch.finfo(attn.dtype).min / 2
        if seen.ndim == 3 and query.ndim == 4:  # (N H, L, S)
            seen = seen.unflatten(0, (query.shape[0], -1))
    if padding is not None:
        here = ~padding if padding.dtype == torch.bool else padding > torch.finfo(padding.dtype).min / 2
        here = here[:, None, None, :] if query.ndim == 4 else here[None, None, :]
        seen = here if seen is None else seen & here
    return seen
