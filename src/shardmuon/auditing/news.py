"""What the ranks tell each other of an audit, until every rank that is connected through groups has heard of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardmuon.auditing.replicas import compare_prints
from shardmuon.auditing.report import AuditReport, Finding, MatrixRow, RoutedParam
from shardmuon.comm.component import largest_of
from shardmuon.comm.groups import my_rank
from shardmuon.planning.views import Ranks
from shardmuon.ranks.council import relay
from shardmuon.ranks.exchange import share_objects

T = TypeVar("T")


@dataclass
class News:
    """What is passed on between ranks."""

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
        """What `read` returns; what it raises becomes a finding, for the other ranks wait for this one."""
        try:
            return read()
        except Exception as error:
            self.findings.append(_failed(f"rank {my_rank()}", what, error))
            return None

    def stale(self, where: str, text: str) -> None:
        """The step was run by a plan for other parameters."""
        self.findings.append(
            Finding(
                "stale_plan",
                where,
                text,
                "the parameters that were planned for, as they were then",
                "Call optimizer.prepare() on every rank after replacing or resharding parameters",
            )
        )

    def compare(self, prints: Any, ranks: Ranks, groups: Sequence[Ranks]) -> int:
        """Tell one group, and compare replicas there; how often it must pass news on. Collective."""
        everyone = shared((self, prints, len(largest_of([r for r in groups if len(r) > 1]))), ranks)
        self.merge([theirs for theirs, _, _ in everyone])
        found, compared = compare_prints([theirs for _, theirs, _ in everyone], ranks)
        self.merge([News(found, [], {}, compared)])
        return max(rounds for _, _, rounds in everyone)

    def pass_on(self, rounds: Mapping[Ranks, int]) -> None:
        """From group to group; all have told once. Collective."""
        for _, ranks in relay(rounds, first=1):
            self.merge(shared(self, ranks))

    def report(
        self, step: int, routes: Sequence[RoutedParam], plan: str, logits: tuple[tuple[int, float], ...] = ()
    ) -> AuditReport:
        """The same on every rank."""
        return AuditReport(
            step,
            tuple(sorted(self.findings, key=lambda f: (f.severity, f.where, f.name, f.found))),
            tuple(sorted(self.rows, key=lambda r: (r.order, r.name))),
            dict(sorted(self.runs.items())),
            len(self.compared),
            tuple(routes),
            plan,
            logits,
        )


def shared(value: T, ranks: Ranks) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    return share_objects(value, ranks) if len(ranks) > 1 else [value]


def _failed(where: str, what: str, error: Exception) -> Finding:
    return Finding(
        "audit_failed",
        where,
        f"{what} could not be checked: {type(error).__name__}: {error}",
        "a check",
        "Please report it with this text",
    )
