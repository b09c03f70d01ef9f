"""Whether the Triton kernel runs on a device. Tried once: a Triton that is installed may lack a driver, or gcc."""

from __future__ import annotations

import functools

import torch

from shardmuon.orthogonalize.triton_symmetric import obstacle, symmetric_addmm


def why_not(device: torch.device) -> str | None:
    """What keeps the Triton kernel from running there; None if nothing does. Compiles a kernel at the first call."""
    return obstacle(device) or _trial(device)


@functools.cache
def _trial(device: torch.device) -> str | None:
    x = (torch.arange(2 * 33 * 20, device="cpu") % 5 - 2).view(2, 33, 20)  # small integers: every sum is exact
    try:
        found = symmetric_addmm(None, x.to(device, torch.float16), x.mT.to(device, torch.float16)).cpu()
    except RuntimeError as error:
        return f"a trial failed: {error}"
    return None if torch.equal(found.long(), x @ x.mT) else "a trial gave wrong numbers"
