"""What must be true of gradients and state before a step. Each check raises ValueError without the parameter's name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.engines import Description, Engine, engine_of
from shardmuon.engines.base import MISPLACED, NONE, READY
from shardmuon.errors import OUT_OF_MEMORY, fault_text
from shardmuon.momentum.keeper import BUFFER
from shardmuon.planning.layout import same_storage
from shardmuon.stepping.binding import Binding, Candidate
from shardmuon.stepping.settings import Settings, name_of

_NONE_YET: Mapping[str, Any] = MappingProxyType({})


class Seen(NamedTuple):
    """What a step needs of a Muon parameter, read once.

    Attributes:
        state: NONE, READY or MISPLACED.
        weight: Local storage of the parameter; None where there is no gradient.
        grad: Local storage of its gradient, if it lies as the parameter does.
        buffer: Local storage of its momentum, if there is any yet.
        kept: Its state.
    """

    state: int = NONE
    weight: Tensor | None = None
    grad: Tensor | None = None
    buffer: Tensor | None = None
    kept: Mapping[str, Any] = _NONE_YET


def see_gradients(
    binding: Binding,
    grads: Sequence[Tensor | None],  # of the Muon parameters of `binding`
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> tuple[list[Seen], str | None]:
    """Each Muon parameter of `binding`, and the first thing that is wrong with any gradient or state, AdamW's too."""
    found, error = [], None
    for c, grad in zip(binding.candidates, grads, strict=True):
        seen = _NOTHING
        try:
            seen = _see(c, grad, state)
        except OUT_OF_MEMORY:
            raise
        except Exception as wrong:  # whatever it is, the other ranks must hear of it
            error = error or f"{c.name}: {fault_text(wrong)}"
        found.append(seen)
    for index, group in enumerate(groups):
        if group["use_muon"]:
            continue
        for position, p in enumerate(group["params"]):
            try:
                _check_adamw(p, state.get(p, {}))
            except OUT_OF_MEMORY:
                raise
            except Exception as wrong:
                error = error or f"{name_of(group, index, position)}: {fault_text(wrong)}"
    return found, error


_NOTHING = Seen()


def _see(c: Candidate, grad: Tensor | None, state: Mapping[Tensor, Mapping[str, Any]]) -> Seen:
    param, engine = c.param, c.engine
    if grad is None:
        check_gradient_elsewhere(param)
        return _NOTHING
    weight = engine.storage(param)
    storage = gradient_storage(param, grad, engine, weight)
    if storage is None:
        check_can_align(c.description)
    kept = state.get(param, _NONE_YET)
    buffer = kept.get(BUFFER)
    if buffer is not None:
        buffer = state_storage(param, buffer, BUFFER, engine, weight)
    return Seen(MISPLACED if storage is None else READY, weight, storage, buffer, kept)


def _check_adamw(param: Tensor, state: Mapping[str, Any]) -> None:
    grad = param.grad
    if grad is None:
        check_gradient_elsewhere(param)
        return
    engine = engine_of(param)
    weight = engine.storage(param)
    gradient_storage(param, grad, engine, weight)
    check_adamw_dtypes(param, grad, state.get("exp_avg"))
    for key in ("exp_avg", "exp_avg_sq"):
        moment = state.get(key)
        if moment is not None:
            state_storage(param, moment, key, engine, weight)


def gradient_storage(param: Tensor, grad: Tensor, engine: Engine, weight: Tensor) -> Tensor | None:
    """The gradient's local storage, or None if it does not lie as the parameter does, whose storage is `weight`.

    Raises:
        ValueError: It is unusable; the message lacks the name.
    """
    plain = engine.stored_alike(grad, param)
    if plain is not None and not plain.is_complex():
        return plain
    if grad.layout != torch.strided:
        raise ValueError(
            f"its gradient is sparse ({grad.layout}). Use sparse=False, or an optimizer for sparse gradients"
        )
    if grad.is_complex():
        raise ValueError(f"its gradient is complex ({grad.dtype}); parameters and gradients must be real")
    if not engine.is_aligned(grad, param):
        return None
    storage = engine.storage(grad)
    if storage.shape != weight.shape and not same_storage(storage.shape, weight.shape):
        raise ValueError(f"its gradient stores shape {tuple(storage.shape)} here, the parameter {tuple(weight.shape)}")
    return storage


def check_gradient_elsewhere(param: Tensor) -> None:
    """Raise ValueError if a parameter without `grad` has one under another name: it would never be trained."""
    for name, remedy in (
        ("decoupled_grad", "Wrap the model with use_decoupled_grad=False"),
        ("main_grad", "Use shardmuon.frameworks.megatron, or set p.grad = p.main_grad before the step"),
    ):
        if isinstance(getattr(param, name, None), Tensor):
            raise ValueError(f"its gradient is in p.{name} and p.grad is None. {remedy}")


def check_can_align(about: Description) -> None:
    """A gradient is redistributed by placements, so the storage must be what placements say."""
    if not any(same_storage(claim.storage_shape, about.storage_shape) for claim in about.claims):
        raise ValueError(
            f"its gradient is placed unlike the parameter, which stores shape {about.storage_shape} here and not what "
            f"its placements imply ({about.text}). Redistribute the gradient to the parameter's rows first"
        )


def dtypes_text(seen: Seen, param: Tensor, grad: Tensor | None, wire_dtype: torch.dtype) -> str:
    """The dtypes that ranks must share in a step: a rank that lost its momentum, or was cast alone, shows here."""
    weight, storage, buffer = seen.weight, seen.grad, seen.buffer
    if weight is None or storage is None:
        return _dtypes(param.dtype, None if grad is None else grad.dtype, _dtype_of(buffer), wire_dtype)
    return _dtypes(weight.dtype, storage.dtype, _dtype_of(buffer), wire_dtype)


def _dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@lru_cache(maxsize=64)
def _dtypes(weights: torch.dtype, gradient: torch.dtype | None, kept: torch.dtype | None, wire: torch.dtype) -> str:
    if gradient is None:
        return f"weights={weights} wire={wire}"
    return f"weights={weights} gradient={gradient} momentum_buffer={kept} wire={wire}"


def check_adamw_dtypes(param: Tensor, grad: Tensor, moment: Tensor | None) -> None:
    """torch's AdamW mixes no dtypes, and finds out when other parameters have changed."""
    kept = param if moment is None else moment
    if grad.dtype != kept.dtype:
        what = "the parameter" if moment is None else "its exp_avg"
        raise ValueError(
            f"its gradient is {grad.dtype}, {what} {kept.dtype}, which AdamW cannot mix. Cast a model before its "
            "optimizer is made, or load the optimizer's state again after casting: that casts it too"
        )


def check_buffer(param: Tensor, buffer: Tensor | None, key: str) -> None:
    """Raise ValueError (without the name) if a state tensor does not lie as the parameter, or may not be written to."""
    if buffer is not None:
        engine = engine_of(param)
        state_storage(param, buffer, key, engine, engine.storage(param))


def state_storage(param: Tensor, buffer: Tensor, key: str, engine: Engine, weight: Tensor) -> Tensor:
    """The local storage of a state tensor, which lies as the parameter does and may be written to.

    Raises:
        ValueError: It does not, or may not; the message lacks the name.
    """
    plain = engine.stored_alike(buffer, param)
    if plain is not None and not plain.is_inference():
        return plain
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"its {key} was made under torch.inference_mode() and cannot be updated outside. Step under torch.no_grad()"
        )
    try:
        aligned = engine.is_aligned(buffer, param)
    except ValueError:
        aligned = False
    if aligned and same_storage(engine.storage(buffer).shape, weight.shape):
        return engine.storage(buffer)
    found = f"a {type(buffer).__name__} of shape {tuple(buffer.shape)}"
    if is_dtensor(buffer):
        found += f" placed {tuple(buffer.placements)} that stores shape {tuple(buffer.to_local().shape)} here"
    raise ValueError(
        f"its {key} is {found}, the parameter stores shape {tuple(weight.shape)}: the state was made "
        "for another layout. Load it through torch.distributed.checkpoint, which reshards it"
    )


def scale_texts(candidates: Sequence[Candidate], settings: Sequence[Settings | None]) -> tuple[list[str], str | None]:
    """For each parameter what the user's own learning-rate scale returns, and what is wrong with it, if anything.

    Asked before anything has changed. The values count, not the name: two ranks may hold different closures.
    """
    texts = [""] * len(candidates)
    for index, (c, s) in enumerate(zip(candidates, settings, strict=True)):
        if s is None or not callable(s.adjust_lr_fn):
            continue
        for rows, cols in dict.fromkeys((m.rows, m.cols) for m in c.description.claims[0].layout.view.matrices):
            try:
                scale = float(s.adjust_lr_fn(rows, cols))
            except OUT_OF_MEMORY:
                raise
            except Exception as error:  # whatever the caller's function raises must reach every rank
                return texts, f"{c.name}: adjust_lr_fn({rows}, {cols}) raised {type(error).__name__}: {error}"
            if not math.isfinite(scale):
                return texts, f"{c.name}: adjust_lr_fn({rows}, {cols}) returned {scale}, which is not finite"
            texts[index] += f" adjust_lr_fn({rows}, {cols})={scale!r}"
    return texts, None
