"""The schedule of audits and the delivery of reports."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from shardmuon.errors import level_of_the_caller

if TYPE_CHECKING:
    from shardmuon.auditing.report import AuditReport


class AuditError(RuntimeError):
    """Raised on every rank after an audited step that was not Muon's update. `report` has the findings. The step is
    complete: weights have changed."""

    def __init__(self, text: str, report: AuditReport) -> None:
        super().__init__(text)
        self.report = report


class AuditWarning(UserWarning):
    """A finding of severity "warning", which raises no error."""


class AuditSchedule:
    """Step counter that decides which steps are audited. Equal on all ranks that share parameters.

    Attributes:
        num_steps: Steps since construction. A step that was refused or skipped does not count.
        num_audits: Audits so far.
        asked: The audit of the next step that `audit()` requested, if any.
    """

    samples = 2  # matrices compared per audit in each group of ranks; each audit samples different ones

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self.num_steps = 0
        self.num_audits = 0
        self.asked: PendingAudit | None = None

    @property
    def due(self) -> int:
        """Number of matrices that an audit of the next step compares; 0 if that step is not audited."""
        if self.asked is not None:
            return self.asked.samples
        return self.samples if self.every is not None and self.num_steps % self.every == 0 else 0

    def due_text(self) -> str:
        """Text that ranks must agree on in an audited step: its number, the number of samples, and the audit's number,
        which selects the matrices."""
        return f" audit(step={self.num_steps + 1}, samples={self.due}, number={self.num_audits})"

    def deliver(self, report: AuditReport) -> None:
        """Deliver a finished audit's report to the `PendingAudit` that requested it, or else raise AuditError or issue
        warnings. The same on every rank."""
        asked, self.asked = self.asked, None
        if asked is not None:
            asked.found = report
        elif report.errors:
            raise AuditError(report.message(), report)
        else:
            for finding in report.findings:
                warnings.warn(f"audit of step {report.step}: {finding}", AuditWarning, stacklevel=level_of_the_caller())

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling: all but the requested audit, which belongs to one process."""
        return {**self.__dict__, "asked": None}


class PendingAudit:
    """An audit that was requested of the next step.

    Attributes:
        samples: Matrices compared in each group of ranks that shares parameters.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.found: AuditReport | None = None

    @property
    def report(self) -> AuditReport:
        """The finished audit's report.

        Raises:
            RuntimeError: No step has been taken since `audit()`.
        """
        if self.found is None:
            raise RuntimeError("no step was audited yet: call optimizer.step() after shardmuon.audit(optimizer)")
        return self.found
