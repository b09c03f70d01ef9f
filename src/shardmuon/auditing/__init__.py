"""Compare a live step with a dense reference computed beside it, and name what differs.

`audit` asks for the next step; `Muon(audit_every=...)` asks every so many (`schedule`). `live` carries one audit
out: it describes parameters anew, `dense` puts a matrix together from its holders, `reference` steps it in the live
arithmetic and in exact one, `judge` compares and says what rounding explains, `naming` says what went wrong.
"""

from __future__ import annotations

from typing import Any

from shardmuon.auditing.schedule import AuditError, AuditWarning, PendingAudit

__all__ = ["AuditError", "AuditWarning", "PendingAudit", "audit"]


def audit(optimizer: Any, samples: int = 8) -> PendingAudit:
    """Check the next step against a dense reference. Every rank that shares parameters must call it.

    Args:
        optimizer: The `shardmuon.Muon` whose next `step()` is audited. It raises nothing for what the audit finds.
        samples: Matrices compared in each group of ranks that shares parameters. Later audits take others.

    Returns:
        The audit; its `report` is there after the step, the same on every rank.

    Raises:
        ValueError: `samples` is not positive, or DeepSpeed steps the optimizer.

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
