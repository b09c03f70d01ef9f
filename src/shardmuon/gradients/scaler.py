"""Loss scaling for fp16 with sharded gradients. All ranks use the same scale, and either all ranks skip a step or none
does.

[Note: what torch's scalers agree on]
    torch.amp.GradScaler decides on each rank separately whether to call `optimizer.step()`. If one rank skips a step,
    the other ranks wait for it forever. If only some ranks lower the scale, the next gradients are wrong.

    With DTensors, torch (2.11 to 2.13) reduces `found_inf` over the mesh axes that shard the *first* gradient of each
    dtype and device. This is right if all parameters have the same sharding. It is wrong if, for example, the first
    parameter is the replicated weight of a norm layer and later parameters are sharded. torch.amp.GradScaler also
    raises an error if some gradients are plain tensors and others are DTensors.

    torch's ShardedGradScaler reduces `found_inf` over a process group, but it also raises an error for plain tensors
    mixed with DTensors.

    An optimizer with the attribute `_step_supports_amp_scaling` decides itself whether to skip a step. Such an
    optimizer could make all ranks skip the step, but could not lower the scale on ranks whose gradients are finite.
    Frameworks also refuse to clip gradients for such optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardmuon._torch import default_group, local_if_any
from shardmuon.comm.groups import group_ranks, my_rank
from shardmuon.comm.vote import Fault, Phase
from shardmuon.errors import Refused
from shardmuon.gradients.clip import by_kind
from shardmuon.layout.engines.base import named_params


class GradScaler(torch.amp.GradScaler):
    """Drop-in replacement for torch.amp.GradScaler that works with any sharding and any optimizer.

    If any rank has an infinite or NaN gradient, `step` leaves weights, momentum and counters unchanged on all ranks,
    and `update` lowers the scale on all ranks. To clip gradients, call `unscale_`, then `shardmuon.clip_grad_norm_`,
    then `step`. With the default arguments, the scale is always a power of two. Such a scale does not change the bits
    of fp32 updates, unless a scaled value underflows or overflows.

    Args:
        device: Device of the scale, "cuda" or "cpu".
        init_scale: Initial scale.
        growth_factor: Factor by which the scale is multiplied after `growth_interval` steps without an infinite or NaN
            gradient.
        backoff_factor: Factor by which the scale is multiplied after a skipped step.
        growth_interval: Number of successive steps without an infinite or NaN gradient after which the scale grows.
        enabled: False disables scaling: `step` only calls `optimizer.step()`.
        process_group: Group of the ranks that train one model together. All of these ranks must call `unscale_` and
            `step` in the same order. Default: all ranks.

    Raises:
        ValueError: Some rank has fp16 or sparse gradients. `unscale_` or `step` raises this error on every rank. Some
            gradients may already be unscaled, so repeat the training step from its forward pass.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> scaler, optimizer = GradScaler("cpu", init_scale=4.0), torch.optim.SGD([weight], lr=1.0)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: Any = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._process_group = process_group

    # overrides a private method of torch.amp.GradScaler, as torch's ShardedGradScaler does (torch 2.11 to 2.13)
    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,  # 0-dim fp32 tensor with the reciprocal of the loss scale, by which gradients are multiplied
        found_inf: Tensor,  # 0-dim fp32 tensor, which is set to 1 if any gradient on any rank is not finite
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale every gradient in place. If any rank has a gradient that is not finite, set `found_inf` to 1 on all
        ranks, otherwise to 0. Collective over the ranks of `process_group`."""
        fault, bad, flags = Fault(), False, list[Tensor]()
        with fault:  # `fault` records exceptions in this block, and `fault.settle` reports them to the other ranks
            named = [pair for index, group in enumerate(optimizer.param_groups) for pair in named_params(group, index)]
            grads = [(name, param.grad) for name, param in named if param.grad is not None]
            for name, grad in grads:
                if grad.layout != torch.strided:
                    fault.add(
                        f"{name}: its gradient is sparse ({grad.layout}), which cannot be unscaled. Use sparse=False"
                    )
                elif grad.dtype == torch.float16 and not allow_fp16:
                    fault.add(
                        f"{name}: its gradient is fp16, which loses what the scale was to keep. Keep parameters in "
                        "fp32 and compute in fp16 by torch.autocast or FSDP2's MixedPrecisionPolicy(param_dtype="
                        "torch.float16, reduce_dtype=torch.float32)"
                    )
            # If any gradient on this rank has been rejected, this rank unscales none of its gradients.
            stored = [local_if_any(grad) for _, grad in grads] if fault.text is None else []
            for (device, _), alike in by_kind(local for local in stored if local.numel()).items():
                flags.append(torch.zeros((), dtype=torch.float32, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(alike, flags[-1], inv_scale.to(device))
            bad = any(map(bool, flags))
        group = default_group() if self._process_group is None else self._process_group
        ranks = (my_rank(),) if group is None else tuple(sorted(group_ranks(group)))
        with Refused.made_public():
            found_inf.fill_(float(fault.settle(ranks, Phase.UNSCALE, asked=bad)))
        return {found_inf.device: found_inf}
