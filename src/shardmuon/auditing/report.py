"""Schedule of audits, and reports on audited steps. The schedule and the reports are identical on all ranks that share
parameters."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardmuon.errors import level_of_the_caller
from shardmuon.texts import table

# Dict from the name of a fault to advice for the user. docs/audit.md explains the faults.
_REMEDIES = {
    "audit_failed": "Please report it with this text",
    "clipped_update": "Clip gradients before the step; an update must not be clipped, averaged or unscaled",
    "fragments_swapped": "Storage does not lie as the placements say, or a send and a receive are out of order",
    "frozen": "The step writes to other storage than the parameter's, or something restores the weights",
    "gradient_missing": "Set the missing gradients to zeros",
    "gradient_replicas_differ": "Reduce gradients over all ranks that hold replicas, in every micro-batch that counts",
    "gradient_written": "Neither the step nor the orthogonalizer may write to its input",
    "kept_wrong": "Look for what replaces the stage, or writes to optimizer.state; load a checkpoint from before",
    "momentum_wrong": "Nothing but the step may write to the momentum, nor the orthogonalizer to its input",
    "norm_of_shard": "Sum squares over all ranks that hold a piece before the root is taken",
    "norm_stale": "What changes weights between steps leaves a norm behind that is no longer theirs: delete it on "
    "every rank, del optimizer.state[param][key], and the next step takes the norm anew",
    "norm_wrong": "Look for what replaces the stage on weights, or writes to optimizer.state; load a checkpoint from "
    "before",
    "not_finite": "Skip steps whose gradients are not finite, and return to a checkpoint from before the first one",
    "not_in_optimizer": "Give the optimizer the groups as they were made, or freeze the parameter before making them",
    "not_orthogonalized": "The matrix is not stepped by Muon: look at its group, and for what replaces Newton-Schulz",
    "orthogonalized_by_shard": "Orthogonalize the whole matrix: the parameter's layout was not known when the plan was "
    "made",
    "orthogonalized_count": "A step must run once: after gradient accumulation, not in it",
    "orthogonalizer_wrong": "The orthogonalizer itself is wrong, or what it calls: run `shardmuon verify`, try another "
    "`method`, and look for what replaces torch's products",
    "replica_drift": "Broadcast the weights of one rank; if each rank has its own (experts), write process_group=(). "
    "State alone differs where gradients did in an earlier step, or something else wrote to it",
    "results_swapped": "Results went to the wrong matrix: ranks list parameters in different orders, or the plan is "
    "wrong",
    "scale_from_shard_shape": "Compute the learning-rate scale from the global shape",
    "scale_wrong": "Look for a scale, a sum over micro-batches or ranks, or a second step that is applied on top",
    "stale_plan": "Call optimizer.prepare() on every rank after replacing or resharding parameters",
    "transposed": "Check dim order and placements of the parameter",
    "update_differs": "Compare this rank's plan and options with the others', and look for what else writes to weights",
    "update_lost_to_rounding": "Keep the weights in float32 or raise the learning rate",
    "variant_wrong": "The stage did not run on this matrix, or not by its formula: look for what replaces it",
    "weights_elsewhere": "The copy was written to, or the framework keeps its partitions in another order than it says",
    "wrong_group": "Put it into its group again; loading a checkpoint of other groups may have moved it",
    "wrong_input": "Check momentum and nesterov of its group",
    "wrong_matrix": "Pieces or results of others were mixed in: check that all ranks list the same parameters in one "
    "order",
}


@dataclass(frozen=True)
class Finding:
    """One fault that an audit found.

    Attributes:
        name: Name of the fault, which is a key of `_REMEDIES`.
        where: Name of the parameter that has the fault (with the index of the matrix if the parameter has several
            matrices), or the ranks that have the fault.
        found: Description of the fault.
        allowed: Description of what would have been correct.
        remedy: Advice on what to do about the fault.
        severity: "error", or "warning" for a finding that may be intended. Warnings never cause an exception.
    """

    name: str
    where: str
    found: str
    allowed: str
    remedy: str
    severity: Literal["error", "warning"]

    @classmethod
    def of(cls, name: str, where: str, found: str, allowed: str) -> Finding:
        """Make a finding. Its remedy and severity are those of the fault with the given name."""
        return cls(
            name, where, found, allowed, _REMEDIES[name], "warning" if name == "update_lost_to_rounding" else "error"
        )

    def __str__(self) -> str:
        return f"{self.where}: {self.name}: {self.found}. Allowed: {self.allowed}. {self.remedy}"


@dataclass(frozen=True)
class MatrixRow:
    """Comparison of one matrix of the audited step with the dense reference.

    Attributes:
        name: Name of the parameter, with the matrix's index if the parameter has several matrices.
        order: Index of the parameter among Muon's parameters, and index of the matrix in the parameter.
        rows, cols: Shape of the matrix.
        owners: Ranks that orthogonalize the matrix according to the plan.
        arithmetic: Orthogonalization method and dtype of its matrix products.
        status: "ok", "fault", "no gradient", "lr is 0", "zero" if the orthogonalizer's input is zero, "inconclusive" if
            rounding alone could change half of the update, or "not checked: STAGE" if the audit has no formula for
            STAGE, an operation that a Muon variant adds to the step.
        compared: True if the step had an update to compare. Otherwise, `difference` and `allowed` are 0.
        difference: Relative difference between the applied update and the update of the dense reference, measured along
            the singular vector with the largest ratio of difference to rounding error (see [Note: the shake] in
            auditing/judge.py). If both updates lead to bitwise equal weights, it is 0.
        allowed: Largest relative difference that rounding can explain. If both updates lead to bitwise equal weights,
            this is the limit for the difference between the dense reference and exact arithmetic.
    """

    name: str
    order: tuple[int, int]
    rows: int
    cols: int
    owners: tuple[int, ...]
    arithmetic: str
    status: str
    compared: bool = False
    difference: float = 0.0
    allowed: float = 0.0


@dataclass(frozen=True)
class AuditReport:
    """Report on one audited step. It is identical on all ranks that are connected, directly or through other ranks, by
    sharded or replicated parameters.

    Attributes:
        step: Number of the step, counted since the optimizer was constructed.
        findings: All faults found.
        matrices: One row for each sampled matrix.
    """

    step: int
    findings: tuple[Finding, ...]
    matrices: tuple[MatrixRow, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity "error"."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def ok(self) -> bool:
        """True if the audit found neither errors nor warnings."""
        return not self.findings

    def message(self) -> str:
        """Format the findings as the message of an AuditError."""
        lines = [f"- {finding}" for finding in self.findings]
        return (
            f"the audit of step {self.step} found that it was not Muon's update. The step is complete: weights and "
            "momentum have changed. Return to the last checkpoint before the fault\n" + "\n".join(lines)
        )

    def __str__(self) -> str:
        parts = [f"audit of step {self.step}", _matrices(self.matrices) if self.matrices else ""]
        parts += [f"{f.severity}: {f}" for f in self.findings] or ["nothing found: this step was Muon's"]
        return "\n".join(part for part in parts if part)


def _matrices(matrices: Sequence[MatrixRow]) -> str:
    rows = [["matrix", "shape", "owner", "arithmetic", "status", "difference", "allowed"]]
    for m in matrices:
        about = [m.name, f"{m.rows}x{m.cols}", ",".join(map(str, m.owners)), m.arithmetic, m.status]
        rows.append([*about, *(f"{number:.1e}" if m.compared else "-" for number in (m.difference, m.allowed))])
    return table(rows) + "\n"


# -------------------------------------------------------------------------------------------------- the schedule


class AuditError(RuntimeError):
    """Error raised on every rank if a scheduled audit finds that a step did not apply Muon's update. Its attribute
    `report` is the `AuditReport`. When this error is raised, the step is complete and the weights have changed."""

    def __init__(self, text: str, report: AuditReport) -> None:
        super().__init__(text)
        self.report = report


class AuditWarning(UserWarning):
    """Warning for a finding of severity "warning", issued if a scheduled audit finds no errors."""


@dataclass(eq=False)
class AuditSchedule:
    """Schedule that determines which steps are audited. It is identical on all ranks over which a parameter is sharded
    or replicated.

    Attributes:
        every: Number of steps from one scheduled audit to the next; None if no audits are scheduled.
        num_steps: Number of steps since the optimizer was constructed. Skipped steps, and steps that raised an error
            before they changed any weights, do not count.
        num_audits: Number of audits so far.
        asked: The audit that the user has requested for the next step with `audit()`, or None.
    """

    # number of matrices that a scheduled audit compares for each set of ranks over which parameters are sharded or
    # replicated
    samples = 2
    every: int | None = None
    num_steps: int = 0
    num_audits: int = 0
    asked: PendingAudit | None = None

    @property
    def due(self) -> int:
        """Number of matrices to compare in the next step's audit; 0 if that step is not audited."""
        if self.asked is not None:
            return self.asked.samples
        return self.samples if self.every is not None and self.num_steps % self.every == 0 else 0

    def due_text(self) -> str:
        """Return a string that must be equal on all ranks before an audited step. It contains the step's number, the
        number of samples, and the audit's number, which determines the matrices that are sampled."""
        return f" audit(step={self.num_steps + 1}, samples={self.due}, number={self.num_audits})"

    def deliver(self, report: AuditReport) -> None:
        """Deliver the report of a finished audit. If the user requested the audit, store the report in the
        `PendingAudit`. If the audit was scheduled, raise AuditError or issue warnings for the findings, in the same way
        on every rank."""
        asked, self.asked = self.asked, None
        if asked is not None:
            asked.found = report
        elif report.errors:
            raise AuditError(report.message(), report)
        else:
            for finding in report.findings:
                warnings.warn(f"audit of step {report.step}: {finding}", AuditWarning, stacklevel=level_of_the_caller())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the requested audit, which belongs to the current process only."""
        return {**self.__dict__, "asked": None}


@dataclass(eq=False)
class PendingAudit:
    """Audit of the next step, requested by the user with `audit()`.

    Attributes:
        samples: Number of matrices to compare for each set of ranks over which parameters are sharded or replicated.
        found: The report of the audit; None before the step.
    """

    samples: int
    found: AuditReport | None = None

    @property
    def report(self) -> AuditReport:
        """The report of the finished audit.

        Raises:
            RuntimeError: No step has been taken since `audit()`.
        """
        if self.found is None:
            raise RuntimeError("no step was audited yet: call optimizer.step() after shardmuon.audit(optimizer)")
        return self.found
