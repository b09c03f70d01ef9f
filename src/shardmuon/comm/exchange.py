"""The exchange: one packed all-to-all among some ranks, and counts of what was done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Ints = tuple[int, ...]


@dataclass(slots=True)
class Traffic:
    """Counts of this rank's communication and orthogonalized matrices, each counted where it happens.

    Attributes:
        exchanges: all-to-all calls (two for each bucket that gathers, one where replicas pass on).
        agreements: votes before a step that all ranks have gone on from, or refused.
        bytes_sent: Bytes that left this rank in exchanges.
        orthogonalized: Matrices that went through the orthogonalizer on this rank.
        reductions: Exchanges that carried parts of Gram matrices to be added up (one for each bucket of that route).
        norm_reductions: Small all-reduces of norms of weights, for variants that control them.
        norms_sent: Matrices whose norms were reduced, 8 bytes each.
    """

    exchanges: int = 0
    agreements: int = 0
    bytes_sent: int = 0
    orthogonalized: int = 0
    reductions: int = 0
    norm_reductions: int = 0
    norms_sent: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        """The difference to an earlier copy."""
        return Traffic(
            self.exchanges - earlier.exchanges,
            self.agreements - earlier.agreements,
            self.bytes_sent - earlier.bytes_sent,
            self.orthogonalized - earlier.orthogonalized,
            self.reductions - earlier.reductions,
            self.norm_reductions - earlier.norm_reductions,
            self.norms_sent - earlier.norms_sent,
        )


class Pending(NamedTuple):
    """An exchange under way. Holds what is sent, too: it must outlive the collective."""

    work: Any
    came: Tensor  # 1-D
    sent: Tensor  # 1-D

    def wait(self) -> Tensor:  # 1-D
        """Wait (on an accelerator: the current stream waits) until all has come; return it."""
        self.work.wait()
        return self.came


def start(group: Any, traffic: Traffic, send: Tensor, send_splits: Ints, recv_splits: Ints) -> Pending:
    """Start one packed all-to-all.

    Args:
        group: The process group over the ranks.
        traffic: Counts it.
        send: 1-D, what goes to each rank side by side.
        send_splits, recv_splits: Elements to and from each rank.
    """
    came = torch.empty(sum(recv_splits), dtype=send.dtype, device=send.device)
    work = dist.all_to_all_single(came, send, list(recv_splits), list(send_splits), group=group, async_op=True)
    traffic.exchanges += 1
    traffic.bytes_sent += send.numel() * send.element_size()
    return Pending(work, came, send)
