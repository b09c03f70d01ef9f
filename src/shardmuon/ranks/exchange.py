"""The only module that calls collectives. It moves flat buffers; it knows nothing of matrices or momentum.

[Note: order of collectives]
    Every rank of a group calls the group's collectives in one order: the handshake when the plan is built, then in
    each step the agreement of every group (small groups first) and the exchanges bucket by bucket. A rank in several
    groups takes them in the order of `Plan.groups` and `Plan.buckets`, which depends only on their content, so no two
    ranks can wait for each other in different groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon.comm.exchange import Pending, Traffic, start
from shardmuon.comm.groups import (
    backends_of,
    group_for,
    my_rank,
    talking_device,
    talking_group,
)
from shardmuon.errors import EVERY_RANK, HALF_DONE, UNCHANGED, naming, ranks_text
from shardmuon.planning.types import Transfer


def start_exchange(
    send: Tensor,  # 1-D, wire dtype, sum(transfer.send_splits) elements
    transfer: Transfer,
    ranks: tuple[int, ...],
    traffic: Traffic,
) -> Pending:
    """Start one packed all-to-all among `ranks`."""
    return start(send, transfer.send_splits, transfer.recv_splits, ranks, traffic)


def share_bytes(value: bytes, ranks: tuple[int, ...], device: torch.device, hint: Any = None) -> list[bytes]:
    """Give `value` (of one length on all ranks) to every rank of the group; return all of them in rank order.

    An all-to-all on purpose: it opens the connections that the exchanges will use (lazy ones have deadlocked first
    steps on two nodes).
    """
    group = group_for(ranks, hint)
    send = torch.frombuffer(bytearray(value * len(ranks)), dtype=torch.uint8).to(talking_device(device, group))
    recv = torch.empty_like(send)
    with _before_a_step("comparing parameters and options", ranks):
        dist.all_to_all_single(recv, send, group=group)
    flat = bytes(recv.cpu().tolist())
    return [flat[i * len(value) : (i + 1) * len(value)] for i in range(len(ranks))]


def agree_max(
    flags: Tensor,  # 1-D uint8, equal length on all ranks
    ranks: tuple[int, ...],
    device: torch.device,
    traffic: Traffic,
) -> Tensor:  # 1-D uint8 on the CPU
    """Element-wise maximum over the group: on the CPU where they can, else where `device` is, with a wait."""
    group = talking_group(ranks)
    value = flags.clone() if "cpu" in backends_of(group) else flags.to(talking_device(device, group))
    with _before_a_step("the agreement", ranks):
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        value = value.cpu()
    traffic.agreements += 1
    return value


def reduce_(value: Tensor, how: Literal["sum", "max"], group: Any) -> Tensor:
    """All-reduce `value` in place; return it."""
    dist.all_reduce(value, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group=group)
    return value


def share_objects(value: object, ranks: tuple[int, ...], hint: Any = None) -> list[Any]:
    """Every rank's picklable value, in rank order. Only for errors and other rare paths."""
    values: list[Any] = [None] * len(ranks)
    group = group_for(ranks, hint)
    with _before_a_step("telling each other what is wrong", ranks):
        dist.all_gather_object(values, value, group=group)
    return values


def _before_a_step(what: str, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
    return naming(lambda: f"{what} of ranks {ranks_text(ranks)} before a step", f"{UNCHANGED}. {EVERY_RANK}")


def gather_to(
    send: Tensor,  # 1-D
    sizes: Sequence[int],  # elements that each rank sends
    ranks: tuple[int, ...],
    target: int,
) -> list[Tensor]:  # 1-D each, in rank order, on `target`; nothing elsewhere
    """Bring every rank's buffer to one of them. Of one dtype on all ranks."""
    if len(ranks) == 1:
        return [send]
    mine = my_rank() == target
    recv_splits = list(sizes) if mine else [0] * len(ranks)
    recv = torch.empty(sum(recv_splits), dtype=send.dtype, device=send.device)
    send_splits = [send.numel() if rank == target else 0 for rank in ranks]
    group = group_for(ranks)
    with naming(lambda: f"bringing an audited matrix to rank {target}, ranks {ranks_text(ranks)}", HALF_DONE):
        dist.all_to_all_single(recv, send, recv_splits, send_splits, group=group)
    return list(recv.split(recv_splits)) if mine else []
