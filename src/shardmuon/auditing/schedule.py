"""The schedule of audits, what one keeps for the next, and the delivery of reports."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from shardmuon.errors import level_of_the_caller
from shardmuon.options import AuditAction

if TYPE_CHECKING:
    from shardmuon.auditing.report import AuditReport

_NEVER = sys.maxsize


class AuditError(RuntimeError):
    """An audited step was not Muon's. `report` says what was found. The step is complete: weights have changed."""

    def __init__(self, text: str, report: AuditReport) -> None:
        super().__init__(text)
        self.report = report


class AuditWarning(UserWarning):
    """A finding of an audit, with audit_action="warn"."""


class AuditNotes(NamedTuple):
    """Notes of one audit for the next.

    Attributes:
        watched: Name, parameter and fingerprint of momentum that must be the same when the next step begins.
        state: The optimizer's state at that time; loading a checkpoint replaces it.
        step: The audited step.
    """

    watched: tuple[tuple[str, Tensor, int | None], ...] = ()
    state: Any = None
    step: int = -1


class AuditSchedule:
    """Counts steps and starts an audit when one is due. Equal on all ranks that share parameters.

    Attributes:
        num_steps: Steps since construction. A step that was refused or skipped does not count.
        num_audits: Audits that sampled matrices.
        at: The first step that needs attention; nothing happens before it.
        kept: Notes of the last audit.
        asked: What `audit()` asked for of the next step.
    """

    samples = 2  # matrices compared each time in each group of ranks, others every time

    def __init__(self, every: int | None = None, action: AuditAction = "raise") -> None:
        self.every, self.action = every, action
        self.num_steps = 0
        self.num_audits = 0
        self.at = _NEVER if every is None else 1
        self.kept = AuditNotes()
        self.asked: PendingAudit | None = None

    def samples_at(self, step: int) -> int | None:
        """Number of matrices that an audit of this step samples; 0: it only looks at momentum again; None: no audit."""
        regular = self.every is not None and (step - 1) % self.every == 0
        samples = self.asked.samples if self.asked is not None else self.samples if regular else 0
        return samples if samples or self.kept.step == step - 1 else None

    @property
    def is_due(self) -> bool:
        """True if the next step is audited."""
        return self.samples_at(self.num_steps + 1) is not None

    def due_text(self) -> str:
        """Text that ranks must agree on in a step with attention: what is audited, and how far the rotation is."""
        asked = None if self.asked is None else self.asked.samples
        return f" audit(step={self.num_steps + 1}, asked={asked}, number={self.num_audits}, due={self.is_due})"

    def request(self, request: PendingAudit) -> None:
        """Audit the next step for `audit()`."""
        self.asked, self.at = request, self.num_steps + 1

    def begin(self) -> int | None:
        """Begin a step that needs attention (`num_steps` is already its number). Returns as `samples_at`."""
        samples = self.samples_at(self.num_steps)
        if self.every is None:
            self.at = _NEVER
        elif samples:
            self.at = self.num_steps + 1  # to look at the momentum once more
        else:
            self.at = self.num_steps + self.every - (self.num_steps - 1) % self.every
        return samples

    def deliver(self, report: AuditReport) -> None:
        """Hand out a finished audit's report: to who asked, as an error or as warnings. The same on every rank."""
        asked, self.asked = self.asked, None
        if asked is not None:
            asked.found = report
        elif report.errors and self.action == "raise":
            raise AuditError(report.message(), report)
        else:
            for finding in report.findings:
                warnings.warn(f"audit of step {report.step}: {finding}", AuditWarning, stacklevel=level_of_the_caller())

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to one process."""
        return {**self.__dict__, "kept": AuditNotes(), "asked": None}


class PendingAudit:
    """An audit that the next step will carry out.

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
            RuntimeError: No step has been taken since.
        """
        if self.found is None:
            raise RuntimeError("no step was audited yet: call optimizer.step() after shardmuon.audit(optimizer)")
        return self.found
