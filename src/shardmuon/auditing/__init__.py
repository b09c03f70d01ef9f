"""Audit optimizer steps: compare a step with a dense (unsharded) reference step, and report the causes of differences.

The function `audit` requests an audit of the next step, and `Muon(audit_every=N)` audits every N-th step. The module
`live` runs an audit: it determines from scratch which rank stores which part of each parameter, and assembles whole
matrices from their shards. The module `reference` computes the step of each whole matrix, once in the arithmetic of the
audited step and once in exact arithmetic. The module `judge` compares the results, decides which differences can be due
to rounding, and finds the causes of all other differences.
"""

from __future__ import annotations

from typing import Any

from shardmuon.auditing.report import AuditError, AuditWarning, PendingAudit

__all__ = ["AuditError", "AuditWarning", "PendingAudit", "audit"]


def audit(optimizer: Any, samples: int = 8) -> PendingAudit:
    """Request an audit that compares the optimizer's next step with a dense (unsharded) reference. All ranks that are
    connected, directly or through other ranks, by sharded or replicated parameters must call `audit`.

    Args:
        optimizer: The `shardmuon.Muon` whose next `step()` is audited. The audit reports faults but does not raise
            errors for them.
        samples: Number of matrices to compare for each set of ranks over which parameters are sharded or replicated.
            Successive audits sample different matrices.

    Returns:
        The pending audit. Its `report` is available after the step and is identical on all connected ranks.

    Raises:
        ValueError: `samples` is not a positive int, or DeepSpeed calls the optimizer's `step`.

    Examples:
        >>> import torch
        >>> from shardmuon import Muon, audit
        >>> weight = torch.nn.Parameter(torch.eye(4, 8))
        >>> optimizer = Muon([weight], lr=0.02)
        >>> weight.grad = torch.arange(32.0).view(4, 8)
        >>> check = audit(optimizer)
        >>> optimizer.step()
        >>> check.report.ok
        True
    """
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r} must be a whole number, at least 1")
    host = optimizer.hosts.active
    if host is not None and host.in_parts:
        raise ValueError("under DeepSpeed write Muon(..., audit_every=N): it audits each set of groups that is stepped")
    optimizer.audits.asked = PendingAudit(samples)
    return optimizer.audits.asked  # type: ignore[no-any-return]
