"""QK-clip: measure a model's largest attention logits during training, and scale its query and key weights after each
step. The scaling is implemented in scaling.py.

[Note: what is measured]
    The logit of a query and a key is their dot product times the softmax scale. Pairs that the mask hides are ignored.
    A bias that a float mask adds to logits is also ignored, because it does not come from the query and key weights.
    Products are computed in fp32 (in fp64 for fp64 inputs), so the rounding errors of half-precision kernels are not
    reproduced. The matrix of logits is computed in chunks to save memory.

[Note: where it is measured]
    During a layer's forward pass, a `TorchFunctionMode` intercepts calls of the functions in `_MEASURES`, under
    whatever name the layer has imported them. For calls of `scaled_dot_product_attention`, the logits are computed from
    the arguments: the queries and keys after rotary embedding, caching and the repetition of shared key heads. For
    attention that is written in basic torch operations (transformers' "eager"), the logits are the input of the
    softmax. Kernels that are not torch functions, such as those of flash-attn, cannot be intercepted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shardmuon._torch import is_dtensor, local_if_any
from shardmuon.comm.groups import GroupRef, my_rank
from shardmuon.errors import Refused, level_of_the_caller
from shardmuon.host import Host
from shardmuon_qkclip.layers import Attention, Holder
from shardmuon_qkclip.scaling import LayerLogits, Scaler


class LogitReport(NamedTuple):
    """Largest attention logits in the last measured step, and the factors by which QK-clip scaled the logits.

    Attributes:
        step: Number of the last measured step, counted from 1; 0 before the first measured step.
        tau: Largest allowed logit.
        layers: Largest logits and scaling factors of each layer's heads, as tensors on the device of the weights.
    """

    step: int
    tau: float
    layers: tuple[LayerLogits, ...] = ()

    @property
    def max_logit(self) -> float:
        """Largest logit over all layers; -inf before the first measured step. Reading this property synchronizes with
        the accelerator."""
        return max((float(layer.maxima.max()) for layer in self.layers), default=-math.inf)

    @property
    def num_clipped(self) -> int:
        """Number of key heads whose weights were scaled after the last measured step. Reading this property
        synchronizes with the accelerator."""
        return sum(int((layer.gains < 1.0).sum()) for layer in self.layers)

    def __str__(self) -> str:
        each = [
            f"{name}  max {float(maxima.max()):.4g}  clipped {int((gains < 1.0).sum())}  gain {float(gains.min()):.4g}"
            for name, maxima, gains in self.layers
        ]
        return "\n".join([f"attention logits of step {self.step}, tau={self.tau:g}", *each])


class QKClip:
    """Hooks that measure the largest logit of each attention head in forward passes, and scale queries and keys after
    each step.

    The scaling factor of a head is g = min(1, tau / S), where S is the head's largest logit in all forward passes with
    gradients since the last step, over all ranks that share or replicate the weights. If several query heads share a
    key head, S is the largest logit of all these heads. The rows of the weights that produce queries are multiplied by
    g^alpha, and those that produce keys by g^(1 - alpha). In latent attention, the queries' rotary rows are multiplied
    by g, and the shared rotary keys do not change. Biases are scaled like weights. Kimi K2
    (https://arxiv.org/abs/2507.20534) and Megatron (`clip_qk`) use the same rule. With any sharding, the scaled weights
    have the same bits as in one process.

    Scaling runs at the end of each `optimizer.step()`. Frameworks whose optimizers update copies of the weights
    (DeepSpeed's ZeRO, Megatron) therefore copy the scaled weights back to the model. Scaling is collective and does not
    wait for the accelerator. If an error occurs on one rank, or if ranks have different settings, `step()` raises a
    RuntimeError on every rank. The step is then complete, but nothing has been scaled.

    Args:
        model: The model whose attention is measured.
        optimizer: The optimizer that updates the model's weights. Its parameter groups must contain the weights' names.
            With Megatron's ChainedOptimizer, pass the inner optimizer that updates the matrices.
        tau: Largest allowed logit. If it is math.inf, logits are measured but weights are not scaled.
        alpha: Exponent of the factor for the queries, in [0, 1].
        every: Interval in steps. Logits are measured and weights are scaled only in the first step of each interval.
            The other steps cost nothing.
        layers: Layers to measure and scale. The name of each layer must be the name of its module. Default: all layers
            that `Attention.all_in` finds.
        logits: Optional function that replaces the hooks, for compiled models and for kernels that return the largest
            logits (TransformerEngine's max_logit). It returns a mapping from layer names to (num_heads,) tensors: the
            largest logit of each head since the function's last call, after the softmax scale. Heads with -inf, and
            layers that the mapping does not contain, count as not measured.
        process_group: Ranks that train the same weights on other batches. Required only if these ranks cannot be
            derived from the sharding of the weights or from the option `process_group` of the optimizer's parameter
            groups. For plain tensors, pass the data- and context-parallel group.

    Attributes:
        layers: The attention layers that are measured and scaled.
        report: `LogitReport` of the last measured step.

    Raises:
        ValueError: No attention layer was found, a layer cannot be clipped, or one of its weights is not in the
            optimizer. The message says how to fix this.

    Examples:
        >>> from shardmuon import Muon
        >>> model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("q_proj", "k_proj")})
        >>> model.head_dim = 4
        >>> optimizer = Muon(model, lr=0.02)
        >>> clip = QKClip(model, optimizer, logits=lambda: {"": torch.tensor([50.0, 400.0])})
        >>> for weight in model.parameters():
        ...     weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> clip.report.max_logit, clip.report.num_clipped
        (400.0, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        tau: float = 100.0,
        alpha: float = 0.5,
        every: int = 1,
        layers: Iterable[Attention] | None = None,
        logits: Callable[[], Mapping[str, Tensor]] | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer is a {type(optimizer).__name__}, which is no torch.optim.Optimizer. Give the one that "
                "steps the weights, of Megatron's chain optimizer.chained_optimizers[0].optimizer"
            )
        holders = Holder.all_in(model)
        self.layers = tuple(Attention.all_in(model) if layers is None else layers)
        if every < 1 or not self.layers:
            raise ValueError(
                f"no attention was found in {type(model).__name__} (its modules hold none of the weights that "
                f"shardmuon_qkclip.layers knows: list its layers=[Attention(..)]), or every={every} is not 1 or more"
            )
        self.every, self._optimizer, self._measure = every, optimizer, logits
        params = {place.name: param for holder in holders.values() for param, place in holder.weights.values()}
        self._scaler = Scaler(optimizer, self.layers, tau, alpha, process_group, params)
        if self._scaler.host is None:
            self._scaler.find()
        # dict from layer name to the largest logit of each head since the last step
        self._pending: dict[str, Tensor] = {}
        # True if the largest logits of this training step have already been reduced over ranks. A framework can call
        # step() several times per training step.
        self._has_reduced = False
        self._num_steps, self.report = 0, LogitReport(0, tau)
        self._handles: list[Any] = []
        for layer in self.layers if logits is None else ():
            if layer.name not in holders:
                raise ValueError(
                    f"layers: there is no module {layer.name!r} in {type(model).__name__} whose forward could be "
                    "measured. A layer's name is its module's, or write logits=, a function that returns the maxima"
                )
            self._watch(layer, holders[layer.name])
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        self._handles.append(optimizer.register_load_state_dict_post_hook(lambda _: self.reset()))

    def close(self) -> None:
        """Remove the hooks from the model and the optimizer."""
        for handle in self._handles:
            handle.remove()

    def reset(self) -> None:
        """Discard the logits measured since the last step. This happens automatically when optimizer state is loaded.
        Call this method if you change the model's weights without loading optimizer state."""
        self._pending.clear()
        self._has_reduced = False

    # --------------------------------------------------------------------------------------------------- measuring

    def _watch(self, layer: Attention, holder: Holder) -> None:
        module, entered = holder.module, list[_Watch]()

        @torch._disable_dynamo
        def before(called: nn.Module, args: Any) -> None:
            # deepcopy copies hooks, so this hook also runs for copies of the module. Ignore the copies.
            if called is module and self._is_measured and torch.is_grad_enabled():
                watch = _Watch(lambda maxima: self._count(layer.name, self._of_all_heads(layer, holder, maxima)))
                entered.append(watch.__enter__())  # type: ignore[no-untyped-call]

        @torch._disable_dynamo
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is module and entered:
                entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    @property
    def _is_measured(self) -> bool:
        """True if logits are measured in the current step. Between steps, this means the next step."""
        return self._num_steps % self.every == 0

    def _count(self, name: str, maxima: Tensor) -> None:
        """Merge the largest logits of one forward pass into the layer's largest logits since the last step. A
        non-finite value is kept only for a head without any finite value."""
        seen = torch.stack([maxima, self._pending.get(name, maxima)])
        finite = seen.masked_fill(~seen.isfinite(), -math.inf).amax(dim=0)
        self._pending[name] = torch.where(finite.isfinite(), finite, seen.amax(dim=0))

    def _of_all_heads(self, layer: Attention, holder: Holder, maxima: Tensor) -> Tensor:
        """Convert the maxima measured in one forward pass to one maximum for each head of the layer.

        Under tensor parallelism, `maxima` may cover only this rank's heads. All other heads then get -inf. If the
        logits have a single dim for batch and heads, `maxima` has one number for each pair of batch entry and head. The
        result is then the maximum over the batch.
        """
        here, total = len(maxima), layer.num_heads
        # If the logits had shape (batch * heads, L, S), there is one maximum for each pair of batch entry and head.
        if here and here % total == 0:
            return maxima.view(-1, total).amax(dim=0)
        parts = [] if not here or total % here else self._parts(layer, holder, total // here)
        if len(parts) != 1:
            raise ValueError(
                f"{layer.name}: its forward makes logits of {here} heads, and it has {total} by its weights. Under "
                "tensor parallelism shardmuon finds a rank's heads by the weights' mesh or the optimizer's tp_group; "
                "where heads are shared out otherwise (Ulysses), or other things go through a softmax, measure them "
                "yourself: QKClip(model, optimizer, logits=..)"
            )
        whole = maxima.new_full((total // here, here), -math.inf)
        whole[parts[0]] = maxima
        return whole.flatten()

    def _parts(self, layer: Attention, holder: Holder, num_parts: int) -> list[int]:
        """Find the index of this rank's heads among `num_parts` equal parts of all heads, under tensor parallelism.

        Returns:
            List of candidate indices. The index is known only if there is exactly one candidate. Candidates come from
            the sharding of the query weight if it is a DTensor in the forward pass, otherwise from the option
            `tp_group` of the optimizer's parameter groups.
        """
        rows = next(rows for rows in layer.rows if rows.num("q"))
        below = [below for below, (_, place) in holder.weights.items() if place.name == rows.weight]
        live = attrgetter(below[0])(holder.module) if below else None
        if is_dtensor(live):
            mesh = live.device_mesh
            sharded = [axis for axis, placement in enumerate(live.placements) if placement.is_shard(rows.dim)]
            return [mesh.get_local_rank(axis) for axis in sharded if mesh.size(axis) == num_parts]
        refs = {GroupRef.of(group.get("tp_group"), "tp_group") for group in self._optimizer.param_groups}
        return [ref.ranks.index(my_rank()) for ref in refs if ref is not None and len(ref.ranks) == num_parts]

    # ---------------------------------------------------------------------------------------------------- stepping

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if Host.creates_state_only():
            return
        done, host = tuple[LayerLogits, ...](), self._scaler.host
        try:
            if self._is_measured:
                if not self._has_reduced:
                    with Refused.made_public():
                        self._scaler.reduce(self._measure or (lambda: self._pending))
                    self._has_reduced = True
                done = self._scaler.apply_()
        except ValueError as wrong:
            raise RuntimeError(f"{wrong}. The step itself is done; QK-clip has scaled nothing after it") from wrong
        finally:
            if host is None or host.has_stepped_all(cast("Any", optimizer)):
                self._conclude(done)

    def _conclude(self, done: tuple[LayerLogits, ...]) -> None:
        """Finish a training step: increase the step count, warn about layers that were not measured, and update the
        report."""
        self._num_steps += 1
        missing = [layer.name for layer in done if layer.name not in self._pending]
        if missing and not self.report.step and self._measure is None:
            warnings.warn(
                f"QK-clip has measured no attention logit of {', '.join(map(repr, missing))} in its first step, so it "
                "does not bound them. A layer is measured when its module is called (not its forward()) and it calls "
                "scaled_dot_product_attention or ends in softmax(logits, dim=-1). Where that is not so, measure "
                "yourself: QKClip(model, optimizer, logits=..), or leave the layer out with layers=",
                stacklevel=level_of_the_caller(),
            )
        if done:
            self.report = self.report._replace(step=self._num_steps, layers=done)
        self.reset()


# --------------------------------------------------------------------------------------------------- the largest logits


@torch.no_grad()
def _largest_logits(
    query: Tensor,  # shape (..., H, L, E)
    key: Tensor,  # shape (..., G, S, E), where G divides H
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,  # broadcast to shape (..., H, L, S); False or -inf hides a key
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    chunk: int = 1 << 24,
) -> Tensor:  # shape (H,), fp32; -inf for a head whose logits are all hidden by the mask
    """Compute the largest logit of each head over all batches and positions.

    The function takes the arguments of `torch.nn.functional.scaled_dot_product_attention` and, in addition, `chunk`.
    `value`, `dropout_p` and `enable_gqa` do not affect the result.

    Args:
        query: Queries. For a DTensor, this rank's part is used.
        key: Keys. For a DTensor, this rank's part is used. If several query heads share a key head, there are fewer key
            heads than query heads.
        attn_mask: Attention mask. Finite values that a float mask adds to logits are ignored (see
            [Note: what is measured]).
        is_causal: If True, query i attends only to keys 0 to i.
        scale: Scale of the softmax. Default: 1 / sqrt(E).
        chunk: Maximum number of logits to compute at a time. At least one query position is computed at a time, even if
            its logits exceed this maximum.
    """
    query, key = (t if t.dtype == torch.float64 else t.float() for t in map(local_if_any, (query, key)))
    heads, length, size = query.shape[-3:]
    num_keys, scale = key.shape[-2], size**-0.5 if scale is None else scale
    # shapes: (..., G, H/G, L, E) for queries, (..., G, 1, S, E) for keys
    query, keys = query.unflatten(-3, (key.shape[-3], -1)), key.unsqueeze(-3)
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


def _per_head(logits: Tensor) -> Tensor:  # one maximum per head: (..., H, L, S) -> (H,); -inf if there are no logits
    each = logits.transpose(0, -3).flatten(1)
    return each.amax(dim=1) if logits.numel() else each.new_full((len(each),), -math.inf)


def _is_hidden(mask: Tensor) -> Tensor:
    """Return a bool mask that is True where `mask` hides a key from a query. In a bool mask, False hides a key. In a
    float mask, -inf or a value near the lowest value of the dtype hides a key."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


# ------------------------------------------------------------------------------------------------- inside of a forward


def _of_softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor | None:
    if input.ndim < 3 or dim not in (-1, input.ndim - 1):
        return None
    return _per_head(local_if_any(input).detach()).float()


_MEASURES: dict[Any, Callable[..., Tensor | None]] = {
    F.scaled_dot_product_attention: _largest_logits,
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
}


class _Watch(TorchFunctionMode):
    """Context manager that measures the logits of one attention layer (see [Note: where it is measured]).

    Args:
        found: Callback that is called for each intercepted function call, with the largest logit of each head.
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
