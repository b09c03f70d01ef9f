"""Findings and rows that the ranks of a component tell each other after an audit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shardmuon.auditing.replicas import Prints, compare_prints
from shardmuon.auditing.report import AuditReport, Finding, MatrixRow
from shardmuon.comm.groups import Ranks, my_rank
from shardmuon.comm.vote import gather

T = TypeVar("T")


@dataclass
class News:
    """Findings of one rank, and in the end of all."""

    findings: list[Finding] = field(default_factory=list)
    rows: list[MatrixRow] = field(default_factory=list)
    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    def merge(self, others: Sequence[News]) -> None:
        for other in others:
            self.findings += [f for f in other.findings if f not in self.findings]
            self.rows += [r for r in other.rows if (r.name, r.order) not in {(o.name, o.order) for o in self.rows}]
            self.runs |= other.runs
            self.compared |= other.compared

    def caught(self, what: str, read: Callable[[], T]) -> T | None:
        """Call `read`. An exception becomes a finding, since the other ranks wait for this one."""
        try:
            return read()
        except Exception as error:
            self.findings.append(_failed(f"rank {my_rank()}", what, error))
            return None

    def stale(self, where: str, text: str) -> None:
        """Note that the step was run by a plan for other parameters."""
        self.findings.append(
            Finding(
                "stale_plan",
                where,
                text,
                "the parameters that were planned for, as they were then",
                "Call optimizer.prepare() on every rank after replacing or resharding parameters",
            )
        )

    def compare(self, everyone: Sequence[Prints], ranks: Ranks) -> None:
        """Compare replicas: `everyone` has the prints of each of `ranks`."""
        findings, compared = compare_prints(everyone, ranks)
        self.merge([News(findings, [], {}, compared)])

    def spread(self, prints: Prints, component: Ranks) -> None:
        """Tell all ranks of the component, and compare replicas that all of them share. Collective."""
        everyone = gather((self, prints), component)
        self.merge([theirs for theirs, _ in everyone])
        self.compare([theirs for _, theirs in everyone], component)

    def report(self, step: int, plan: str) -> AuditReport:
        """The report of one audited step, the same on every rank."""
        return AuditReport(
            step,
            tuple(sorted(self.findings, key=lambda f: (f.severity, f.where, f.name, f.found))),
            tuple(sorted(self.rows, key=lambda r: (r.order, r.name))),
            dict(sorted(self.runs.items())),
            len(self.compared),
            plan,
        )


def _failed(where: str, what: str, error: Exception) -> Finding:
    return Finding(
        "audit_failed",
        where,
        f"{what} could not be checked: {type(error).__name__}: {error}",
        "a check",
        "Please report it with this text",
    )
