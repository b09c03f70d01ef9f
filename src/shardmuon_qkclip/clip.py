"""QK-clip: measure the largest attention logits of a model as it trains, and scale queries and keys after each step.

[Note: what is measured]
    The logit of a query and a key is their product times the softmax scale, where the mask lets the query see the key.
    A bias that a mask adds is no part of it: no weight of q or k makes it. Products are made of fp32 values (fp64 of
    fp64), so what half-precision kernels round away is not seen. Nothing larger than a chunk of the matrix of all
    logits is kept.

[Note: where it is measured]
    Inside of a layer's forward a `TorchFunctionMode` sees `scaled_dot_product_attention`, by whatever name it was
    imported, with the queries and keys that it is given: rotated, cached, repeated. Attention that is written out ends
    in a softmax over the logits themselves (transformers' "eager"): there they are read off. torch's
    MultiheadAttention has paths that call neither, so its queries and keys are made once more from its inputs. Kernels
    that are no torch functions (flash-attn's) are not seen.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shardmuon._torch import creates_state_only, is_dtensor, local_if_any, never_compiled, on_zero_grad
from shardmuon.comm.groups import GroupRef, my_rank
from shardmuon.errors import level_of_the_caller, made_public
from shardmuon_qkclip.layers import Attention, Holder, find_layers, modules_of
from shardmuon_qkclip.scaling import Measure, Scaled, Scaler, check_numbers, host_of

_KNOWN: weakref.WeakKeyDictionary[Optimizer, Scaler] = weakref.WeakKeyDictionary()


@torch.no_grad()
def qk_clip(
    optimizer: Optimizer,
    logits: Mapping[str, Tensor] | Measure,
    *,
    layers: Iterable[Attention],
    tau: float = 100.0,
    alpha: float = 0.5,
    process_group: Any = None,
) -> dict[str, Scaled]:
    """Scale the query and key weights of each head whose largest logit exceeds `tau`, as MuonClip does.

    For each head g = min(1, tau / S), where S is its largest logit over all ranks that share or replicate the weights,
    and of the heads of a group that share keys the largest: rows of q are multiplied with g^alpha, rows of k with
    g^(1 - alpha), of latent attention the queries' rotary rows with g and the shared rotary keys not at all; biases
    like the weights. (Kimi K2, https://arxiv.org/abs/2507.20534; Megatron's `clip_qk`.) Weights have the bits that one
    process would give them, however they are sharded. Waits for no accelerator. Collective: call it after
    `optimizer.step()`, on every rank that shares a weight or is in `process_group`.

    Args:
        optimizer: Steps the weights, and has names for them. Not where a framework copies what `step` has changed into
            the model (DeepSpeed, Megatron): there use `QKClip`.
        logits: Layer -> the largest logit of each of its heads, (num_heads,), in this rank's batches since the last
            call, after the softmax scale; or a function without arguments that returns that. -inf, or no entry: not
            measured. A value that is not finite scales nothing.
        layers: What is scaled: those of `attention_layers(model)`, or your own.
        tau: Largest logit that is allowed. math.inf scales nothing.
        alpha: The queries' share of g, in [0, 1].
        process_group: Ranks that see other batches with the same weights, beyond those that share them: of plain
            tensors the data- and context-parallel group, unless the optimizer has it.

    Returns:
        Layer -> its maxima over all ranks and what its logits were scaled by, as tensors.

    Raises:
        ValueError: Arguments, layers or weights are wrong here or on another rank; raised on every rank, and nothing
            has been scaled.
    """
    listed, host = tuple(layers), host_of(optimizer)
    _refuse_normed(listed, tau)
    if host is not None and host.has_copies:
        raise ValueError(
            "a framework (DeepSpeed, Megatron) steps copies of the weights and copies them into the model inside of "
            "its own step, so scaling must happen in there: write QKClip(model, optimizer, logits=..)"
        )
    scaler = _KNOWN.get(optimizer)  # finding where weights lie takes longer than scaling them
    if scaler is None:
        scaler = _KNOWN[optimizer] = Scaler(cast("Optimizer", weakref.proxy(optimizer)))
    scaler.choose(listed, process_group)
    with made_public():
        scaler.reduce(logits if callable(logits) else lambda: logits, tau, alpha)
    return scaler.apply_()


def _refuse_normed(layers: Iterable[Attention], tau: float) -> None:
    for layer in layers:
        if layer.normed and not math.isinf(tau):
            raise ValueError(
                f"{layer.name}: {layer.normed} normalizes its queries or keys after their projection, so scaling the "
                "weights of the projection does not change its logits, which the norm's own gains bound. Leave it out "
                "with layers=, or write tau=math.inf to measure only"
            )


# ------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True, slots=True)
class LayerLogits:
    """A layer in the last measured step.

    Attributes:
        maxima: The largest logit of each head over all ranks; -inf where none was measured.
        num_clipped: Key heads whose weights were scaled.
        smallest_gain: The smallest factor of a head's logits, 1 if none was scaled.
    """

    name: str
    maxima: tuple[float, ...]
    num_clipped: int
    smallest_gain: float

    @property
    def largest(self) -> float:
        """The largest logit of all heads."""
        return max(self.maxima)


@dataclass(frozen=True, slots=True)
class LogitReport:
    """A record of what QK-clip has seen and done.

    Attributes:
        step: The last measured step, counted from 1; 0 before it.
        tau: Largest logit that is allowed.
        layers: Each layer in it.
    """

    step: int
    tau: float
    layers: tuple[LayerLogits, ...]

    @property
    def max_logit(self) -> float:
        """The largest of the last measured step; -inf before it."""
        return max((layer.largest for layer in self.layers), default=-math.inf)

    @property
    def num_clipped(self) -> int:
        """Key heads whose weights were scaled."""
        return sum(layer.num_clipped for layer in self.layers)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        rows = (
            f"{x.name.ljust(width)}  max {x.largest:.4g}  clipped {x.num_clipped}  gain {x.smallest_gain:.4g}"
            for x in self.layers
        )
        return "\n".join([f"attention logits of step {self.step}, tau={self.tau:g}", *rows])


# -------------------------------------------------------------------------------------------------------------- class


class QKClip:
    """Hooks that measure the largest logit of each head in forward passes, and scale queries and keys by `qk_clip`.

    Each `optimizer.step()` ends with it. So frameworks that step copies of the weights (DeepSpeed's ZeRO, Megatron)
    hand on what is scaled already, and the optimizer's groups say over which ranks plain tensors are replicas. What is
    wrong is raised before the step changes anything. A layer of which a weight is frozen is not scaled.

    A forward pass counts once a backward pass has come through the layer, and all of a step's count together.
    `optimizer.zero_grad()` and loading state drop what no step has used.

    Args:
        model: The model whose attention is measured.
        optimizer: Steps the model's weights. Megatron's `ChainedOptimizer`: the part of it which has the layers.
        tau: Largest logit that is allowed. math.inf only measures.
        alpha: The queries' share of the factor, in [0, 1].
        every: Measure and scale in every so many steps, the first included. Steps between cost nothing.
        layers: What is measured and scaled; a layer's name is its module's. Default: all that `attention_layers` finds.
        logits: A function that returns layer -> maxima, (num_heads,), in place of measuring by hooks: for kernels that
            give them (TransformerEngine's max_logit) and compiled models.
        process_group: See `qk_clip`.

    Attributes:
        layers: The layers.

    Raises:
        ValueError: There is no attention, a layer cannot be clipped, or a weight of it is not the optimizer's; says why
            and what to write.

    Examples:
        >>> from shardmuon import Muon
        >>> layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
        >>> model = nn.Sequential(nn.Linear(4, 16), layer)
        >>> optimizer = Muon(model, lr=0.02)
        >>> clip = QKClip(model, optimizer, tau=100.0)
        >>> model(torch.randn(2, 5, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> clip.report.num_clipped
        0
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
        logits: Measure | None = None,
        process_group: Any = None,
    ) -> None:
        check_numbers(tau, alpha)
        found = find_layers(model) if layers is None else modules_of(model, layers, logits is None)
        if every < 1 or not found:
            raise ValueError(
                f"no attention was found in {type(model).__name__} (its modules hold none of the weights that "
                f"shardmuon_qkclip.layers knows: list its layers=[Attention(..)]), or every={every} is not 1 or more"
            )
        self.layers = tuple(layer for layer, _ in found)
        _refuse_normed(self.layers, tau)
        self.tau, self.alpha, self.every = tau, alpha, every
        self._optimizer, self._measure = _inner(optimizer, self.layers), logits or self._maxima
        params = {place.name: param for _, holder in found for param, place in holder.weights.values()}
        self._scaler = Scaler(self._optimizer, self.layers, process_group, params)
        if host_of(self._optimizer) is None:
            self._scaler.find(strictly=True)
        self._pending: dict[str, Tensor] = {}  # of forward passes whose backward pass has come, see `reset`
        # of the step under way; of a training step whose weights are stepped in several calls until its last one
        self._has_reduced = False
        self._num_steps, self._measured, self._last = 0, 0, dict[str, Scaled]()
        self._handles: list[Any] = []
        for layer, holder in found if logits is None else ():
            self._hook(layer, holder)
        self._listen(model, self._optimizer)

    def _listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Listen to steps, and to all that drops what has been measured."""

        def loaded(module: nn.Module, _: Any) -> None:
            if module is model:  # a copy has this hook, too
                self.reset()

        self._handles += [
            model.register_load_state_dict_post_hook(loaded),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(lambda _: self.reset()),
            on_zero_grad(optimizer, self.reset),
        ]

    def close(self) -> None:
        """Take the hooks off model and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --------------------------------------------------------------------------------------------------- measuring

    def _hook(self, layer: Attention, holder: Holder) -> None:
        module, passes = holder.module, list[ExitStack]()

        def found(maxima: Tensor, of: Tensor) -> None:
            if len(maxima) != layer.num_heads:
                maxima = self._among_all(layer, holder, maxima)
            if of.requires_grad:
                of.register_hook(partial(self._count, layer.name, maxima))

        @never_compiled
        def before(called: nn.Module, args: tuple[Any, ...]) -> None:
            if called is not module:  # a copy has these hooks, too
                return
            passes.append(ExitStack())
            if self._is_seen and not isinstance(module, nn.MultiheadAttention):
                passes[-1].enter_context(_Watch(found))

        @never_compiled
        def after(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if called is not module or not passes:
                return
            passes.pop().close()
            if isinstance(module, nn.MultiheadAttention) and self._is_seen and output is not None:
                found(_of_multihead_attention(module, args, kwargs), output[0])

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    @property
    def _is_seen(self) -> bool:
        """True if a forward pass may be one of a step that is measured."""
        return self._is_measured and torch.is_grad_enabled()

    @property
    def _is_measured(self) -> bool:
        """True if the next step, or the one under way, is one that is measured."""
        return self._num_steps % self.every == 0

    def _count(self, name: str, maxima: Tensor, grad: Tensor) -> None:
        """Note that a backward pass has come through a layer: its forward pass is one of the next step's."""
        seen = self._pending.get(name)
        self._pending[name] = maxima if seen is None else _largest(torch.stack([seen, maxima]))

    def _maxima(self) -> dict[str, Tensor]:
        """Maxima over all forward passes that count."""
        return self._pending

    def reset(self) -> None:
        """Drop what has been measured since the last step: the gradients of those batches are dropped, too.

        `optimizer.zero_grad()` does so, and loading state into optimizer or model. Call it where gradients are dropped
        in another way: `model.zero_grad()` after a batch that is skipped.
        """
        self._pending.clear()
        self._has_reduced = False

    def _among_all(self, layer: Attention, holder: Holder, maxima: Tensor) -> Tensor:
        """Maxima of this rank's heads in their places among all, or of batch times heads head by head."""
        here, total = len(maxima), layer.num_heads
        if here > total and here % total == 0:  # (batch * heads, L, S)
            return maxima.view(-1, total).amax(dim=0)
        parts = [] if not here or total % here else self._parts(layer, holder, total // here)
        if len(parts) != 1:
            raise ValueError(
                f"{layer.name}: its forward makes logits of {here} heads, and it has {total} by its weights. Under "
                "tensor parallelism shardmuon finds a rank's heads by the weights' mesh or the optimizer's tp_group; "
                "where heads are shared out otherwise (Ulysses), or other things go through a softmax, measure them "
                "yourself: QKClip(model, optimizer, logits=..)"
            )
        whole = maxima.new_full((total,), -math.inf)
        whole[parts[0] * here : (parts[0] + 1) * here] = maxima
        return whole

    def _parts(self, layer: Attention, holder: Holder, num_parts: int) -> list[int]:
        """Numbers of the parts of the heads that this rank may have, by the weight as it is in the forward pass."""
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

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Settle with the other ranks what `optimizer.step()` will end with, while nothing has changed: all that can be
        wrong is raised here. A closure has yet to make the gradients, and an active host's tensors are not there before
        it has stepped them: then that is done after the step."""
        if creates_state_only() or getattr(optimizer, "broken", None) is not None or host_of(optimizer) is not None:
            return
        self._has_reduced = False  # of a step that was refused
        if (*args, *kwargs.values())[1:] in ((), (None,)):
            self._reduce()

    def _reduce(self) -> None:
        if self._is_measured:
            with made_public():
                self._scaler.reduce(self._measure, self.tau, self.alpha)
        self._has_reduced = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if creates_state_only():
            return
        done = dict[str, Scaled]()
        try:
            if not self._has_reduced:
                self._reduce()
        except ValueError as wrong:
            self.reset()
            raise RuntimeError(f"{wrong}. The step itself is done; QK-clip has scaled nothing after it") from wrong
        try:
            if self._is_measured:
                done = self._scaler.apply_()
        except BaseException:
            self._conclude(done)
            raise
        host = host_of(optimizer)
        if host is None or host.has_stepped_all(cast("Any", optimizer)):
            self._conclude(done)

    def _conclude(self, done: dict[str, Scaled]) -> None:
        """End a training step."""
        self._num_steps += 1
        if done:
            if not self._measured:
                self._warn_unmeasured()
            self._last, self._measured = done, self._num_steps
        self.reset()

    def _warn_unmeasured(self) -> None:
        missing = [layer.name for layer in self._scaler.trained() if layer.name not in self._pending]
        if missing and self._measure == self._maxima:
            warnings.warn(
                f"QK-clip has measured no attention logit of {', '.join(map(repr, missing))} in its first step, though "
                "queries have gradients, so it does not bound them. A layer is measured when its module is called (not "
                "its forward()) and it calls scaled_dot_product_attention or ends in softmax(logits, dim=-1). Where "
                "that is not so, measure yourself: QKClip(model, optimizer, logits=..), or leave the layer out with "
                "layers=",
                stacklevel=level_of_the_caller(),
            )

    @property
    def report(self) -> LogitReport:
        """The last measured step. Waits for the accelerator."""
        rows = []
        for name, (maxima, gain) in self._last.items():
            gains = gain.tolist()
            rows.append(LayerLogits(name, tuple(maxima.tolist()), sum(g < 1.0 for g in gains), min(gains)))
        return LogitReport(self._measured, self.tau, tuple(rows))


def _largest(seen: Tensor) -> Tensor:  # (forward passes, H) -> (H,)
    """The largest finite one of each head, where there is one: batches that are not finite are skipped, and the logits
    of the others count all the same."""
    finite = seen.masked_fill(~seen.isfinite(), -math.inf).amax(dim=0)
    return torch.where(finite.isfinite(), finite, seen.amax(dim=0))


def _inner(optimizer: Any, layers: tuple[Attention, ...]) -> Optimizer:
    """The optimizer that steps the layers' weights, among those that Megatron keeps in a chain."""
    parts = [getattr(part, "optimizer", part) for part in getattr(optimizer, "chained_optimizers", ())]
    first = layers[0].rows[0].weight
    for part in [optimizer] if isinstance(optimizer, Optimizer) else parts:
        if part is optimizer or any(first in (group.get("param_names") or ()) for group in part.param_groups):
            return cast("Optimizer", part)
    raise ValueError(
        f"optimizer is a {type(optimizer).__name__}, which is no torch.optim.Optimizer and has no part that steps "
        f"{first!r}. Give the shardmuon.Muon that does"
    )


# --------------------------------------------------------------------------------------------------------- measuring


CHUNK = 1 << 24  # logits that are looked at together

_Measured = Callable[[Tensor, Tensor], None]  # (maxima of the heads, what they were measured of)


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
        scale: Scale of the softmax. Default: 1 / sqrt(E).
        attn_mask: As there. What a mask of floats adds is not counted, see [Note: what is measured].
        is_causal: Query i sees keys 0 to i.
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


class _Watch(TorchFunctionMode):
    """A view of the attention of one layer while it is entered, see [Note: where it is measured].

    Args:
        found: Is given the maxima.
    """

    def __init__(self, found: _Measured) -> None:
        super().__init__()
        self._found = found

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
        maxima = largest_logits(query, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
        self._found(maxima, query if query.requires_grad else key)


_OF_TORCH = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")  # and more


@torch.no_grad()
def _of_multihead_attention(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
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
    return largest_logits(*made, attn_mask=None if hidden is None else ~hidden)


def _hidden_by_torch(attn: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """Positions that MultiheadAttention's masks hide: they are True there, or -inf."""
    found = [] if attn is None else [_is_hidden(attn, True)]
    if found and found[0].ndim == 3 and query.ndim == 4:  # (N H, L, S)
        found[0] = found[0].unflatten(0, (query.shape[0], -1))
    if padding is not None:
        here = _is_hidden(padding, True)
        found.append(here[:, None, None, :] if query.ndim == 4 else here[None, None, :])
    return found[0] | found[-1] if found else None
