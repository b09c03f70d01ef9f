"""Gradients at ZeRO 0 with fp16, without the loss scale that DeepSpeed divides them by.

[Note: divided, never multiplied]
    At stage 0 with fp16 `FP16_UnfusedOptimizer.step` copies the gradients to fp32, divides the copies by the loss scale
    and calls the optimizer. `engine.backward` (the only way there: at stage 0 DeepSpeed refuses `loss.backward()`)
    multiplies the loss by it at the other stages only (0.19.8). Muon's update has no scale, but momentum would mix
    gradients of two scales whenever a dynamic one changes, AdamW's eps is too large beside them, and the norm of
    `gradient_clipping` is too small. The fp16 gradients are still there while the optimizer is called, so the copies
    are made anew from them and clipped by the norm that DeepSpeed has taken.
"""

from __future__ import annotations

import warnings
from typing import Any

from shardmuon.frameworks.deepspeed.partitions import TESTED, caller, is_tested, version

_SAID = (
    f"at ZeRO 0 with fp16 DeepSpeed {TESTED} divides gradients by a loss scale that it has not multiplied the loss by, "
    "which shardmuon undoes. What DeepSpeed {version} does is not known, and a dynamic scale may change the weight of "
    'gradients in the momentum. Use bf16, ZeRO stage 1, or a static scale: "fp16": {{"loss_scale": 1024}}'
)


def warn_of_unknown_scale() -> None:
    """Warn, while its wrapper is made, of a DeepSpeed with a dynamic scale whose gradients are stepped as they come."""
    frame = caller("initialize_optimizer_states")
    wrapper = None if frame is None else frame.f_locals.get("self")
    scale = getattr(wrapper, "loss_scale_config", None)
    if scale is not None and scale.dynamic_loss_scale and not is_tested():
        warnings.warn(_SAID.format(version=version()), stacklevel=2)


def restore_gradients() -> None:
    """Give the copies that DeepSpeed's fp16 wrapper steps now the gradients that backward has made, clipped."""
    frame = caller("step")
    wrapper: Any = None if frame is None else frame.f_locals.get("self")
    if type(wrapper).__name__ != "FP16_UnfusedOptimizer" or not is_tested():
        return
    if wrapper.loss_scale_config.cur_scale == 1:  # bf16 too
        return
    excess = 1.0
    if wrapper.clip_grad > 0:  # as DeepSpeed clips elsewhere
        excess = max(1.0, (float(wrapper._global_grad_norm) + 1e-6) / wrapper.clip_grad)
    for copies, params in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        for fp32, fp16 in zip(copies, params, strict=True):
            if fp16.grad is not None:  # else zeros
                fp32.grad.copy_(fp16.grad)
                if excess > 1:
                    fp32.grad.mul_(1 / excess)
