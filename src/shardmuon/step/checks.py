"""Checks of gradients and state before a step. Each raises ValueError without the parameter's name."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.layout.engines.dtensor import lies_as_placed, placed
from shardmuon.layout.mesh import same_storage


def gradient_storage(param: Tensor, grad: Tensor, engine: Engine, weight: Tensor) -> Tensor | None:
    """The gradient's local storage, or None if it does not lie as the parameter does, whose storage is `weight`.

    Raises:
        ValueError: The gradient is unusable; the message lacks the name.
    """
    quick = engine.storages(param, grad)
    if quick is not None and not quick[1].is_complex():
        return quick[1]
    if grad.layout != torch.strided:
        raise ValueError(
            f"its gradient is sparse ({grad.layout}), which no update here takes. Use sparse=False, or leave it out "
            "here (set requires_grad to False while Muon is made) and step it by its own optimizer, such as "
            "torch.optim.SparseAdam"
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


def check_can_align(param: Tensor, weight: Tensor) -> None:
    """Raise ValueError if the storage (`weight`) is not what placements say: a gradient is redistributed by
    placements."""
    assert is_dtensor(param), "gradients of others lie as they do, or are refused"
    if not lies_as_placed(param):
        raise ValueError(
            f"its gradient is placed unlike the parameter, which stores shape {tuple(weight.shape)} here and not what "
            f"its placements imply ({placed(param)}). Redistribute the gradient to the parameter's rows first"
        )


def check_adamw_dtypes(param: Tensor, grad: Tensor, moment: Tensor | None) -> None:
    """Raise ValueError if dtypes differ: torch's AdamW mixes none, and finds out only when other parameters have
    changed."""
    kept = param if moment is None else moment
    if grad.dtype != kept.dtype:
        what = "the parameter" if moment is None else "its exp_avg"
        raise ValueError(
            f"its gradient is {grad.dtype}, {what} {kept.dtype}, which AdamW cannot mix. Cast a model before its "
            "optimizer is made, or load the optimizer's state again after casting: that casts it too. If nothing was "
            "cast, an engine keeps gradients in another dtype: leave out FSDP1's keep_low_precision_grads"
        )


def check_buffer(param: Tensor, buffer: Tensor | None, key: str) -> None:
    """Raise ValueError (without the name) if a state tensor does not lie as the parameter, or may not be written to."""
    if buffer is not None:
        engine = engine_of(param)
        state_storage(param, buffer, key, engine, engine.storage(param))


def state_storage(param: Tensor, buffer: Tensor, key: str, engine: Engine, weight: Tensor) -> Tensor:
    """The local storage of a state tensor, which lies as the parameter does and may be written to.

    Raises:
        ValueError: It lies otherwise, or may not be written to; the message lacks the name.
    """
    quick = engine.storages(param, buffer)
    if quick is not None:
        return quick[1]
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
