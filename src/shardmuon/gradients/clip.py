"""Clip all gradients by one norm for the whole job, however the parameters are sharded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon._torch import foreach_mul_, local_if_any
from shardmuon.comm.groups import group_ranks, my_rank
from shardmuon.comm.vote import Fault
from shardmuon.errors import OUT_OF_MEMORY, ExchangeError, Refused, fault_text, made_public
from shardmuon.gradients.common_sum import Clipping, Source, listed_of
from shardmuon.gradients.norms import by_kind
from shardmuon.host import Hosts, clipped_by_host
from shardmuon.layout.bind import Listed
from shardmuon.options import SETS, refuse_sets


@torch.no_grad()
def clip_grad_norm_(
    parameters: Source,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    process_group: Any = None,
) -> Tensor:  # 0-dim, plain
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)); the norm is that of all of them as one vector.

    Call it after the last backward pass of a step and before `step()`, on every rank that shares a parameter, also if
    none of its gradients is there. Muon's and AdamW's parameters, DTensors on any meshes and plain tensors count
    alike, each element once. The norm is summed in fp64 and rounded to fp32 (not if a gradient is fp64), and has the
    same bits on every rank. docs/clipping.md says what clipping does to Muon, and which ranks sum.

    Args:
        parameters: An optimizer, a module, parameters or named parameters. Only an optimizer's groups can say
            ``clip_grad`` (True; False: neither counted nor scaled), ``rank_local``, and over which `process_group` its
            plain tensors are replicas; prefer it.
        max_norm: What the norm may be at most.
        norm_type: p > 0 of the p-norm; inf for the largest absolute value.
        error_if_nonfinite: Raise if the norm is inf or nan. Otherwise gradients are multiplied with 0 or nan, as torch
            does.
        process_group: Also sum over these ranks, which hold other parameters: pipeline stages, experts per rank. It
            must contain every rank that shares a parameter with one of its ranks, or one rank of each such set.

    Returns:
        The norm before clipping, on the device of the first parameter.

    Raises:
        ValueError: Gradients or arguments are wrong here or on another rank, or the ranks have no common sum. Raised
            on every rank; no gradient has been scaled.
        TypeError: Parameters come in a set, whose order differs from rank to rank.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set. Raised on every rank.
        ExchangeError: A rank died or hung, or something was raised here after the ranks had agreed on the norm. This
            rank's gradients are dropped (None), so that no rank steps with them.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if isinstance(parameters, SETS):  # asked here: a function could raise on one rank, while the others wait for it
        refuse_sets("clip_grad_norm_: parameters", parameters, "the optimizer, or a list")
    if not isinstance(parameters, (Optimizer, nn.Module, Tensor)):
        parameters = list(parameters)  # read more than once
    ranks = () if process_group is None else tuple(sorted(group_ranks(process_group)))
    fault, listed = Fault(), list[Listed]()
    refused: str | None = None
    for _ in range(2):  # who shares them waits for this rank: what interrupted it once may be gone
        with fault:
            listed = listed_of(parameters, fault)
            break
    with fault:
        hosts = getattr(parameters, "hosts", None)
        host = hosts.active if isinstance(hosts, Hosts) else None
        refused = clipped_by_host(one.param for one in listed) if host is None else host.clipping
    if refused is not None:  # on every rank alike: the gradients are a framework's, which clips them
        raise ValueError(refused)
    if not norm_type > 0.0:
        fault.add(f"norm_type={norm_type} must be above 0")
    if not max_norm >= 0.0:
        fault.add(f"max_norm={max_norm} must be at least 0")
    text = f"norm_type={norm_type} max_norm={max_norm} error_if_nonfinite={error_if_nonfinite}"
    call = Clipping(listed, norm_type, text, fault, ranks if len(ranks) > 1 else None)
    with made_public(), _or_dropped(listed):
        total, wide = call.norm()
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the gradients' total norm of order {norm_type} is {total}, so it cannot be clipped. Skip this step, or "
            "write error_if_nonfinite=False"
        )
    with _or_dropped(listed):
        norm = torch.tensor(total, dtype=torch.float64 if wide else torch.float32, device="cpu")
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch's formula, in its dtypes
        if float(factor) != 1.0:
            for (device, _), alike in by_kind(local for _, local in call.held).items():
                foreach_mul_(alike, factor.to(device))
        return norm.to(local_if_any(listed[0].param).device) if listed else norm


@contextmanager
def _or_dropped(listed: Sequence[Listed]) -> Iterator[None]:
    """Drop this rank's gradients and raise if something fails here after the last talk, which other ranks cannot hear
    of: they go on with gradients that they have scaled. The next step is then refused on every rank that shares
    them."""
    try:
        yield
    except Refused:
        raise
    except BaseException as wrong:
        for one in listed:
            one.param.grad = None if one.group["clip_grad"] else one.param.grad
        if isinstance(wrong, (ExchangeError, *OUT_OF_MEMORY)) or not isinstance(wrong, Exception):
            raise
        raise ExchangeError(
            f"clipping ended on rank {my_rank()} alone: {fault_text(wrong)}. Its gradients are dropped, those of other "
            "ranks are clipped. Compute the gradients of this step anew on all ranks"
        ) from wrong
