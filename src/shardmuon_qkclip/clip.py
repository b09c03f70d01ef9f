"""QK-clip: measure the largest attention logits of a model as it trains (logits.py), and scale queries and keys after
each step (scaling.py)."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon._torch import is_dtensor, never_compiled, on_zero_grad
from shardmuon.comm.groups import GroupRef, my_rank
from shardmuon.errors import level_of_the_caller, made_public
from shardmuon.host import creates_state_only
from shardmuon_qkclip.layers import Attention, Holder, find_holders, find_layers
from shardmuon_qkclip.logits import Watch
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


@dataclass(frozen=True, slots=True)
class LayerLogits:
    """A layer in the last measured step.

    Attributes:
        maxima: The largest logit of each head over all ranks; -inf where none was measured.
        gains: The factor of each key head's logits; 1 if its weights were not scaled.
    """

    name: str
    maxima: tuple[float, ...]
    gains: tuple[float, ...]


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
        return max((max(layer.maxima) for layer in self.layers), default=-math.inf)

    @property
    def num_clipped(self) -> int:
        """Key heads whose weights were scaled."""
        return sum(gain < 1.0 for layer in self.layers for gain in layer.gains)

    def __str__(self) -> str:
        lines = [f"attention logits of step {self.step}, tau={self.tau:g}"]
        for layer in self.layers:
            clipped = sum(gain < 1.0 for gain in layer.gains)
            lines.append(f"{layer.name}  max {max(layer.maxima):.4g}  clipped {clipped}  gain {min(layer.gains):.4g}")
        return "\n".join(lines)


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
        holders = find_holders(model)
        self.layers = tuple(find_layers(holders) if layers is None else layers)
        if every < 1 or not self.layers:
            raise ValueError(
                f"no attention was found in {type(model).__name__} (its modules hold none of the weights that "
                f"shardmuon_qkclip.layers knows: list its layers=[Attention(..)]), or every={every} is not 1 or more"
            )
        _refuse_normed(self.layers, tau)
        self.tau, self.alpha, self.every = tau, alpha, every
        self._optimizer, self._measure = _part_with(optimizer, self.layers), logits
        params = {place.name: param for holder in holders.values() for param, place in holder.weights.values()}
        self._scaler = Scaler(self._optimizer, self.layers, process_group, params)
        if host_of(self._optimizer) is None:
            self._scaler.check_model()
        self._pending: dict[str, Tensor] = {}  # of forward passes whose backward pass has come, see `reset`
        self._has_reduced = False  # for the step under way, or the last call of several that make one
        self._num_steps, self._measured, self._last = 0, 0, dict[str, Scaled]()
        self._handles: list[Any] = []
        for layer in self.layers if logits is None else ():
            if layer.name not in holders:
                raise ValueError(
                    f"layers: there is no module {layer.name!r} in {type(model).__name__} whose forward could be "
                    "measured. A layer's name is its module's, or write logits=, a function that returns the maxima"
                )
            self._watch(layer, holders[layer.name])
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

    def _watch(self, layer: Attention, holder: Holder) -> None:
        module, entered = holder.module, list[Watch]()

        def found(maxima: Tensor, result: Tensor) -> None:
            maxima = self._of_all_heads(layer, holder, maxima)
            if result.requires_grad:
                result.register_hook(partial(self._count, layer.name, maxima))

        @never_compiled
        def before(called: nn.Module, args: Any) -> None:
            if called is module and self._is_measured and torch.is_grad_enabled():  # a copy has these hooks, too
                entered.append(Watch(found).__enter__())  # type: ignore[no-untyped-call]

        @never_compiled
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is module and entered:
                entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    @property
    def _is_measured(self) -> bool:
        """True if the next step, or the one under way, is one that is measured."""
        return self._num_steps % self.every == 0

    def _count(self, name: str, maxima: Tensor, grad: Tensor) -> None:
        """Note that a backward pass has come through a layer: its forward pass is one of the next step's. Of each head
        the largest finite logit counts, where there is one: batches that are not finite are skipped."""
        seen = torch.stack([maxima, self._pending.get(name, maxima)])
        finite = seen.masked_fill(~seen.isfinite(), -math.inf).amax(dim=0)
        self._pending[name] = torch.where(finite.isfinite(), finite, seen.amax(dim=0))

    def reset(self) -> None:
        """Drop what has been measured since the last step: the gradients of those batches are dropped, too.

        `optimizer.zero_grad()` does so, and loading state into optimizer or model. Call it where gradients are dropped
        in another way: `model.zero_grad()` after a batch that is skipped.
        """
        self._pending.clear()
        self._has_reduced = False

    def _of_all_heads(self, layer: Attention, holder: Holder, maxima: Tensor) -> Tensor:
        """Maxima of this rank's heads in their places among all, or of batch times heads head by head."""
        here, total = len(maxima), layer.num_heads
        if here and here % total == 0:  # (batch * heads, L, S)
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
                self._scaler.reduce(self._measure or (lambda: self._pending), self.tau, self.alpha)
        self._has_reduced = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if creates_state_only():
            return
        try:
            if not self._has_reduced:
                self._reduce()
        except ValueError as wrong:
            self.reset()
            raise RuntimeError(f"{wrong}. The step itself is done; QK-clip has scaled nothing after it") from wrong
        done, host = dict[str, Scaled](), host_of(optimizer)
        try:
            if self._is_measured:
                done = self._scaler.apply_()
        finally:
            if host is None or host.has_stepped_all(cast("Any", optimizer)):
                self._conclude(done)

    def _conclude(self, done: dict[str, Scaled]) -> None:
        """End a training step."""
        self._num_steps += 1
        if done:
            missing = [layer.name for layer in self.layers if layer.name not in self._pending]
            if missing and not self._measured and self._measure is None:
                warnings.warn(
                    f"QK-clip has measured no attention logit of {', '.join(map(repr, missing))} in its first step, so "
                    "it does not bound them. A layer is measured when its module is called (not its forward()) and it "
                    "calls scaled_dot_product_attention or ends in softmax(logits, dim=-1). Where that is not so, "
                    "measure yourself: QKClip(model, optimizer, logits=..), or leave the layer out with layers=",
                    stacklevel=level_of_the_caller(),
                )
            self._last, self._measured = done, self._num_steps
        self.reset()

    @property
    def report(self) -> LogitReport:
        """The last measured step. Waits for the accelerator."""
        rows = (
            LayerLogits(name, tuple(of.maxima.tolist()), tuple(of.gains.tolist())) for name, of in self._last.items()
        )
        return LogitReport(self._measured, self.tau, tuple(rows))


def _part_with(optimizer: Any, layers: tuple[Attention, ...]) -> Optimizer:
    """The optimizer that steps the layers' weights: that itself, or a part of a chain, as Megatron keeps them."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    first = layers[0].rows[0].weight
    for part in (getattr(part, "optimizer", part) for part in getattr(optimizer, "chained_optimizers", ())):
        if any(first in (group.get("param_names") or ()) for group in part.param_groups):
            return cast("Optimizer", part)
    raise ValueError(
        f"optimizer is a {type(optimizer).__name__}, which is no torch.optim.Optimizer and has no part that steps "
        f"{first!r}. Give the shardmuon.Muon that does"
    )
