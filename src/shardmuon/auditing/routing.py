"""Parameters that are not where they were routed, and matrices that never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardmuon.auditing.report import Finding
from shardmuon.layout.engines import engine_of
from shardmuon.layout.engines.base import name_of

if TYPE_CHECKING:
    from shardmuon.routing.groups import RoutingRow


def misrouted(groups: Sequence[Mapping[str, Any]], rows: Sequence[RoutingRow]) -> list[Finding]:
    """Find parameters whose place contradicts the routing table, if there is one."""
    table = {row.name: row for row in rows}
    findings = []
    for index, group in enumerate(groups):
        goes = "Muon" if group["use_muon"] else "AdamW"
        for position in range(len(group["params"])):
            name = name_of(group, index, position)
            row = table.pop(name, None)
            if row is not None and row.optimizer not in (goes, "frozen"):
                findings.append(
                    Finding(
                        "wrong_group",
                        name,
                        f"it is in group {index}, which goes to {goes}",
                        f"{row.optimizer}, as param_groups decided ({row.reason})",
                        "Put it into its group again; loading a checkpoint of other groups may have moved it",
                    )
                )
    return findings + [
        Finding(
            "not_in_optimizer",
            name,
            "no group holds it, so it never changes",
            f"{row.optimizer}, as param_groups decided ({row.reason})",
            "Give the optimizer the groups as they were made, or freeze the parameter before making them",
        )
        for name, row in table.items()
        if row.optimizer != "frozen"
    ]


def idle_params(groups: Sequence[Mapping[str, Any]], idle: dict[str, int], patience: int) -> list[Finding]:
    """Matrices that could not change in several audits in a row; counts them in `idle`."""
    findings = []
    for index, group in enumerate(groups):
        for position, p in enumerate(group["params"]):
            if not group["use_muon"]:
                continue
            name = name_of(group, index, position)
            why = None
            if not p.requires_grad and p.grad is None:
                why = "requires_grad is False"
            elif p.grad is None and engine_of(p).storage(p).numel():  # where nothing is stored, none may be made
                why = "it has no gradient"
            elif float(group["lr"]) == 0.0:
                why = "lr is 0"
            idle[name] = idle.get(name, 0) + 1 if why else 0
            if why and idle[name] % patience == 0:
                findings.append(
                    Finding(
                        "idle",
                        name,
                        f"{why}, in {idle[name]} audits in a row",
                        f"fewer than {patience}",
                        "Leave it out of the optimizer if it is meant to be frozen",
                        "warning",
                    )
                )
    return findings
