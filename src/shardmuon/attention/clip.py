"""QK-clip: measure the largest attention logits of a model as it trains, and scale queries and keys after each step."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon._torch import Later, creates_state_only, is_dtensor, never_compiled, on_zero_grad
from shardmuon.attention.heads import Attention, Rows, check_numbers
from shardmuon.attention.layers import Found, attention_layers, find_layers
from shardmuon.attention.logits import Watch, measure, of_multihead_attention
from shardmuon.attention.report import LayerLogits, LogitReport
from shardmuon.attention.scaling import Reduced, Scaled, Scaler, Source, named_now
from shardmuon.comm.groups import GroupRef, my_rank
from shardmuon.errors import HALF_DONE, RELOAD, level_of_the_caller, made_public
from shardmuon.host import Host, Hosts

__all__ = ["Attention", "LayerLogits", "LogitReport", "QKClip", "Rows", "attention_layers", "qk_clip"]


@torch.no_grad()
def qk_clip(
    source: Source,
    logits: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]],
    *,
    layers: Iterable[Attention] | None = None,
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
        source: The optimizer that steps the weights, by the names that it has for them, or the model. Not where a
            framework copies what `step` has changed into the model (DeepSpeed, Megatron): there give both to `QKClip`.
        logits: Layer -> the largest logit of each of its heads, (num_heads,), in this rank's batches since the last
            call, after the softmax scale; or a function without arguments that returns that. -inf, or no entry: not
            measured. A value that is not finite scales nothing.
        layers: What is scaled. Default: those that `attention_layers` finds, if `source` is a model.
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
    if layers is None and isinstance(source, nn.Module):
        layers = attention_layers(source)
    if layers is None:
        raise ValueError("an optimizer does not say which of its weights are attention's: write layers=[Attention(..)]")
    listed = tuple(layers)
    _refuse_normed(listed, tau)
    host = _host(source)
    if host is not None and host.has_copies:
        raise ValueError(
            "a framework (DeepSpeed, Megatron) steps copies of the weights and copies them into the model inside of "
            "its own step, so scaling must happen in there: write QKClip(model, optimizer, logits=..)"
        )
    scaler = _scaler(source, listed, process_group)
    with made_public():
        reduced = scaler.reduce(logits if callable(logits) else lambda: logits, tau, alpha)
    scaler.apply_(reduced)
    return {layer.name: one for layer, one in zip(listed, reduced.scaled, strict=True)}


_KNOWN: weakref.WeakKeyDictionary[Any, Scaler] = weakref.WeakKeyDictionary()


def _scaler(source: Source, layers: tuple[Attention, ...], process_group: Any) -> Scaler:
    """The one of an earlier call: finding where weights lie takes longer than scaling them."""
    group = GroupRef.of(process_group)
    kept = _KNOWN.get(source)
    if kept is None:
        kept = _KNOWN[source] = Scaler(cast("Source", weakref.proxy(source)), layers, process_group=group)
    elif not kept.is_for(layers, group):
        kept.choose(layers, group)
    return kept


def _refuse_normed(layers: Iterable[Attention], tau: float) -> None:
    for layer in layers:
        if layer.normed and not math.isinf(tau):
            raise ValueError(
                f"{layer.name}: {layer.normed} normalizes its queries or keys after their projection, so scaling the "
                "weights of the projection does not change its logits, which the norm's own gains bound. Leave it out "
                "with layers=, or write tau=math.inf to measure only"
            )


# -------------------------------------------------------------------------------------------------------------- class

_MANY = 64  # maxima of a layer that are kept one by one, before they become one


class QKClip:
    """Measures the largest attention logit of each head in forward passes, and scales queries and keys by `qk_clip`.

    A forward pass counts once a backward pass has come through the layer, and all of a step's count together.
    `optimizer.zero_grad()` and loading state drop what no step has used; without an optimizer, `reset()` does.

    Without an optimizer call `step()` after `optimizer.step()`. With one, each `optimizer.step()` ends with it, and
    `step()` need not be called: so frameworks that step copies of the weights (DeepSpeed's ZeRO, Megatron) hand on what
    is scaled already, and the optimizer's groups say over which ranks plain tensors are replicas. What is wrong is then
    raised before the step changes anything. A layer of which a weight is frozen is not scaled.

    Args:
        model: Whose attention is measured.
        optimizer: Scale at the end of each of its steps. Megatron's `ChainedOptimizer`: of that which has the layers.
        tau: Largest logit that is allowed. math.inf only measures.
        alpha: The queries' share of the factor, in [0, 1].
        every: Measure and scale in every so many steps, the first included. Steps between cost nothing.
        layers: What is measured and scaled; a layer's name is its module's. Default: all that `attention_layers` finds.
        logits: A function that returns layer -> maxima, (num_heads,), in place of measuring by hooks: for kernels that
            give them (TransformerEngine's max_logit) and compiled models.
        bound: Measure an upper bound without any product of queries and keys, max |q| max |k| scale: it clips more.
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
        optimizer: Any = None,
        *,
        tau: float = 100.0,
        alpha: float = 0.5,
        every: int = 1,
        layers: Iterable[Attention] | None = None,
        logits: Callable[[], Mapping[str, Tensor]] | None = None,
        bound: bool = False,
        process_group: Any = None,
    ) -> None:
        wrong = check_numbers(tau, alpha)
        if wrong is not None or every < 1:
            raise ValueError(wrong or f"every={every}: measure in every 1 step or more")
        found = _chosen(model, layers, hooked=logits is None)
        if not found:
            raise ValueError(
                f"no attention was found in {type(model).__name__}: its modules hold none of the weights that "
                "shardmuon.attention.layers knows. List its layers: layers=[Attention(..)]"
            )
        self.layers = tuple(one.layer for one in found)
        _refuse_normed(self.layers, tau)
        self.tau, self.alpha, self.every = tau, alpha, every
        optimizer = _inner(optimizer, self.layers)
        self._optimizer, self._logits, self._bound = optimizer, logits, bound
        params = {name: param for one in found for name, (param, _) in one.params.items()}
        source: Source = model if optimizer is None else optimizer
        self._scaler = Scaler(
            source,
            self.layers,
            params=params,
            today=lambda: named_now(model),
            spares_frozen=True,
            process_group=process_group,
        )
        self._scaler.check()
        self._pending: dict[str, list[Tensor]] = {}  # of forward passes whose backward pass has come, see `reset`
        self._num_steps, self._measured = 0, 0
        self._last: list[Scaled] = []
        # of the step under way; of a training step whose weights are stepped in several calls until its last one
        self._has_reduced = False
        self._reduced: Reduced | None = None  # None if it is not measured
        self._history: list[tuple[int, float]] = []
        self._arriving: list[tuple[int, Tensor | Later]] = []
        self._measured_once: set[str] = set()  # layers; the last batch of a rank may be empty, which is no fault
        self._said_unmeasured: set[str] = set()
        self._handles: list[Any] = []
        for one in found if logits is None else ():
            self._hook(one)
        self._listen(model)

    def _listen(self, model: nn.Module) -> None:
        """To steps, and to all that drops what has been measured."""

        def loaded(module: nn.Module, _: Any) -> None:
            if module is model:  # a copy has this hook, too
                self.reset()

        self._handles.append(model.register_load_state_dict_post_hook(loaded))
        optimizer = self._optimizer
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            self._handles.append(optimizer.register_load_state_dict_post_hook(lambda _: self.reset()))
            self._handles.append(on_zero_grad(optimizer, self.reset))
            audits = getattr(optimizer, "audits", None)
            if audits is not None:
                audits.logits = self._past

    def close(self) -> None:
        """Take the hooks off model and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        audits = getattr(self._optimizer, "audits", None)
        if audits is not None and audits.logits == self._past:
            audits.logits = None

    def __enter__(self) -> QKClip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- measuring

    @property
    def _measures(self) -> bool:
        """Whether the step under way is one of those that are measured."""
        return self._num_steps % self.every == 0

    def _hook(self, one: Found) -> None:
        module, passes = one.module, list[tuple[list[Tensor], ExitStack]]()

        @never_compiled
        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is not module or not (self._measures and torch.is_grad_enabled()):  # a copy has these hooks, too
                return
            waiting = self._pending.get(one.layer.name, [])
            if len(waiting) > _MANY:
                waiting[:] = [_largest(torch.stack(waiting))]
            seen: list[Tensor] = []
            watching = ExitStack()

            def found(maxima: Tensor, size: int) -> None:
                seen.append(maxima if len(maxima) == one.layer.num_heads else self._among_all(one, maxima))

            if isinstance(module, nn.MultiheadAttention):
                found(of_multihead_attention(module, args, kwargs, bound=self._bound), 0)
            else:
                watching.callback(_watch_interface(module, found, self._bound))
                watching.enter_context(Watch(found, self._bound))
            passes.append((seen, watching))

        @never_compiled
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if passes and called is module:
                seen, watching = passes.pop()
                watching.close()
                for tensor in _tensors(output) if seen else ():
                    if tensor.requires_grad:
                        tensor.register_hook(partial(self._count, one.layer.name, seen))

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _count(self, name: str, seen: list[Tensor], grad: Tensor) -> None:
        """A backward pass has come to a layer: its forward pass is one of the next step's."""
        self._pending.setdefault(name, []).extend(seen)
        self._measured_once.add(name)

    def _maxima(self) -> dict[str, Tensor]:
        """Of all forward passes that count."""
        return {name: _largest(torch.stack(seen)) for name, seen in self._pending.items()}

    def reset(self) -> None:
        """Drop what has been measured since the last step: the gradients of those batches are dropped, too.

        `optimizer.zero_grad()` of the optimizer that it was made with does so, and loading state into that optimizer or
        the model. Call it where gradients are dropped in another way: `model.zero_grad()` after a batch that is
        skipped, any `zero_grad()` where it was made without an optimizer.
        """
        self._pending.clear()
        self._has_reduced, self._reduced = False, None

    def _among_all(self, one: Found, maxima: Tensor) -> Tensor:
        """Maxima of this rank's heads in their places among all, or of batch times heads by head."""
        layer, here = one.layer, len(maxima)
        total = layer.num_heads
        if here > total and here % total == 0:  # (batch * heads, L, S)
            return maxima.view(-1, total).amax(dim=0)
        part = _part_of(one, total // here, self._optimizer) if here and total % here == 0 else None
        if part is None:
            raise ValueError(
                f"{layer.name}: its forward makes logits of {here} heads, and it has {total} by its weights. Under "
                "tensor parallelism shardmuon finds a rank's heads by the weights' mesh or the optimizer's tp_group; "
                "where heads are shared out otherwise (Ulysses), or other things go through a softmax, measure them "
                "yourself: QKClip(model, logits=..)"
            )
        whole = maxima.new_full((total,), -math.inf)
        whole[part * here : (part + 1) * here] = maxima
        return whole

    # ---------------------------------------------------------------------------------------------------- stepping

    def step(self) -> None:
        """Scale what exceeds `tau`, after `optimizer.step()`. Collective among the ranks that share weights.

        Raises:
            ValueError: See `qk_clip`.
            RuntimeError: It was made with an optimizer, whose step has not come.
        """
        if self._optimizer is not None:
            if self._pending and not self._has_reduced:
                raise RuntimeError(
                    "logits were measured, and no step of the optimizer that QKClip was given has come since. Call "
                    "optimizer.step(), which scales at its end, or make QKClip(model) without it and call step()"
                )
            return
        self._reduce()
        self._scale(ends=True)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Settle with the other ranks what `optimizer.step()` will end with, while nothing has changed: all that can be
        wrong is raised here. A closure makes the gradients, so it is done when that returns. An active host's tensors
        are not there before it has stepped them."""
        if creates_state_only() or getattr(optimizer, "broken", None) is not None or _host(optimizer) is not None:
            return None
        self._has_reduced, self._reduced = False, None  # of a step that was refused
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._reduce()
        elif isinstance(getattr(optimizer, "hosts", None), Hosts):  # others may call it between changes

            def then_reduce() -> Any:
                loss = closure()
                self._reduce()
                return loss

            return args[:1], {**kwargs, "closure": then_reduce}
        return None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """At the end of `optimizer.step()`."""
        if creates_state_only():
            return
        try:
            self._clip_after(optimizer)
        except Exception:
            raise
        except BaseException as interrupt:  # weights are stepped, and perhaps not scaled, or not on all ranks
            if getattr(optimizer, "broken", "") is None:
                text = f"{type(interrupt).__name__}: {interrupt}".rstrip(": .")
                optimizer.broken = f"{text}, in QK-clip after a step. {HALF_DONE}. {RELOAD}"  # type: ignore[attr-defined]
            raise

    def _clip_after(self, optimizer: Optimizer) -> None:
        if not self._has_reduced:
            try:
                self._reduce()
            except ValueError as wrong:
                self.reset()
                raise RuntimeError(f"{wrong}. The step itself is done; QK-clip has scaled nothing after it") from wrong
        host = _host(optimizer)
        self._scale(ends=host is None or host.has_stepped_all(optimizer))

    def _reduce(self) -> None:
        if self._measures:
            with made_public():
                self._reduced = self._scaler.reduce(self._logits or self._maxima, self.tau, self.alpha)
        self._has_reduced = True

    def _scale(self, *, ends: bool) -> None:
        """`ends`: it is the last call of its training step."""
        assert self._has_reduced
        reduced = self._reduced
        try:
            if reduced is not None and not math.isinf(self.tau):
                self._scaler.apply_(reduced)
            elif reduced is not None and reduced.fault.cause is not None:
                raise reduced.fault.cause
        except BaseException:
            self._conclude(reduced)
            raise
        if ends:
            self._conclude(reduced)

    def _conclude(self, reduced: Reduced | None) -> None:
        self._num_steps += 1
        self.reset()
        if reduced is None or reduced.fault.text is not None:
            return
        self._last, self._measured = reduced.scaled, self._num_steps
        largest = torch.stack([one.maxima.max() for one in reduced.scaled])  # of each layer
        self._arriving.append((self._measured, largest if largest.device.type == "cpu" else Later(largest)))
        self._take_in()

    def _take_in(self) -> None:
        """Note what has arrived of the measured steps, and say once which layers are never measured."""
        while self._arriving:
            step, value = self._arriving[0]
            if isinstance(value, Later):
                if not value.has_arrived():
                    return
                value = value.value()
            del self._arriving[0]
            self._history.append((step, float(value.max())))
            if self._logits is None and bool((value == -math.inf).any()):
                known = self._said_unmeasured | self._measured_once
                names = [n for n in self._scaler.unmeasured(value.tolist()) if n not in known]
                self._said_unmeasured.update(names)
                if names:
                    warnings.warn(_unmeasured_text(names), stacklevel=level_of_the_caller())

    # ------------------------------------------------------------------------------------------------------ report

    def _past(self) -> tuple[tuple[int, float], ...]:
        """(step, largest logit) of the measured steps whose values have arrived."""
        self._take_in()
        return tuple(self._history)

    @property
    def report(self) -> LogitReport:
        """The last measured step, and the maxima over time. Waits for the accelerator."""
        rows = []
        for layer, one in zip(self.layers, self._last, strict=False):
            maxima, gain = one.maxima.tolist(), one.gains.tolist()
            rows.append(LayerLogits(layer.name, tuple(maxima), sum(g < 1.0 for g in gain), min(gain)))
        return LogitReport(self._measured, self.tau, tuple(rows), self._past())


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list, Mapping)):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(each)
    elif is_dataclass(output):
        yield from _tensors(vars(output))


def _largest(seen: Tensor) -> Tensor:  # (forward passes, H) -> (H,)
    """The largest finite one of each head, where there is one: batches that are not finite are skipped, and the logits
    of the others count all the same."""
    finite = seen.masked_fill(~seen.isfinite(), -math.inf).amax(dim=0)
    return torch.where(finite.isfinite(), finite, seen.amax(dim=0))


def _host(optimizer: Any) -> Host | None:
    hosts = getattr(optimizer, "hosts", None)
    return hosts.active if isinstance(hosts, Hosts) else None


def _unmeasured_text(names: Iterable[str]) -> str:
    listed = ", ".join(map(repr, names))
    return (
        f"QK-clip has measured no attention logit of {listed} in a step, though its queries have gradients, so it does "
        "not bound them. A layer is measured when its module is called (not its "
        "forward()) and it calls scaled_dot_product_attention or ends in softmax(logits, dim=-1). Where that is not "
        "so, measure yourself: QKClip(model, optimizer, logits=..), or leave the layer out with layers="
    )


def _inner(optimizer: Any, layers: Iterable[Attention]) -> Optimizer | None:
    """The optimizer that steps the layers' weights, among those that Megatron keeps in a chain."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    parts = [getattr(part, "optimizer", part) for part in getattr(optimizer, "chained_optimizers", ())]
    first = next(iter(layers)).rows[0].weight
    for part in parts:
        if any(first in (group.get("param_names") or ()) for group in part.param_groups):
            return cast(Optimizer, part)
    raise ValueError(
        f"optimizer is a {type(optimizer).__name__}, which is no torch.optim.Optimizer and has no part that steps "
        f"{first!r}. Give the shardmuon.Muon that does"
    )


def _chosen(model: nn.Module, layers: Iterable[Attention] | None, *, hooked: bool) -> list[Found]:
    """The layers with their modules."""
    if layers is None:
        return find_layers(model)
    listed = tuple(layers)
    try:
        known = {one.layer.name: one for one in find_layers(model)}
    except ValueError:  # of a type that is not known: the user says what it is
        known = {}
    modules = dict(model.named_modules())
    found = []
    for layer in listed:
        module = known[layer.name].module if layer.name in known else modules.get(layer.name)
        if module is None and hooked:
            raise ValueError(
                f"layers: there is no module {layer.name!r} in {type(model).__name__} whose forward could be measured. "
                "A layer's name is its module's, or write logits=, a function that returns the maxima"
            )
        params = known[layer.name].params if layer.name in known else {}
        found.append(Found(layer, module or model, params))
    return found


def _part_of(one: Found, num_parts: int, optimizer: Optimizer | None) -> int | None:
    """Which of so many equal parts of the heads this rank has, by the weight as it is in the forward pass."""
    rows = next(rows for rows in one.layer.rows if rows.num("q"))
    found = one.params.get(rows.weight)
    if found is None:
        return None
    path, _, leaf = found[1].rpartition(".")
    module = one.module.get_submodule(path) if path else one.module
    live = getattr(module, leaf)
    if is_dtensor(live):
        mesh = live.device_mesh
        axes = [axis for axis, p in enumerate(live.placements) if mesh.size(axis) == num_parts and p.is_shard(rows.dim)]
        coordinate = mesh.get_coordinate()
        return coordinate[axes[0]] if len(axes) == 1 and coordinate is not None else None
    groups = () if optimizer is None else optimizer.param_groups
    refs = {GroupRef.of(group.get("tp_group"), "tp_group") for group in groups}
    fitting = [ref for ref in refs if ref is not None and len(ref.ranks) == num_parts]
    return fitting[0].ranks.index(my_rank()) if len(fitting) == 1 else None


def _watch_interface(module: nn.Module, found: Callable[[Tensor, int], None], bound: bool) -> Callable[[], None]:
    """Where transformers would call a kernel that is no torch function, measure what that is given; returns how to give
    the kernel back. Its masks are of its own kind: what they hide counts, but for later positions."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen in (None, "eager", "sdpa") or "transformers" not in sys.modules:
        return lambda: None
    functions = sys.modules["transformers"].modeling_utils.ALL_ATTENTION_FUNCTIONS
    kernel = functions.get(chosen)
    if kernel is None:
        return lambda: None

    def watched(
        owner: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if owner is module:
            given = kwargs.get("is_causal")
            causal = getattr(owner, "is_causal", True) if given is None else given
            seen = bool(causal) and query.shape[-2] == key.shape[-2]
            found(measure(query, key, None, seen, kwargs.get("scaling"), bound=bound), query.shape[-1])
        return kernel(owner, query, key, value, mask, *args, **kwargs)

    functions[chosen] = watched
    return lambda: functions.__setitem__(chosen, kernel)
