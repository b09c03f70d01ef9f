"""Every Muon parameter of an optimizer with what its engine says of it, ready to be compared with the other ranks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import my_rank
from shardmuon.engines import engine_for
from shardmuon.engines.fsdp1 import refuse_flat
from shardmuon.errors import OUT_OF_MEMORY, fault_text
from shardmuon.options import check_hyperparameters, per_step
from shardmuon.planning.views import MatrixView, Ranks
from shardmuon.stepping.binding import Candidate
from shardmuon.stepping.settings import Group, batch_text, name_of, names_of, replicas_of, takes_part, view_of
from shardmuon.variants import stages_of


def find_candidates(
    groups: Sequence[Group], options_text: Callable[[Group], str], named: bool
) -> tuple[list[Candidate], str | None, dict[Ranks, Any]]:
    """Describe the parameters of all groups with use_muon.

    Args:
        groups: Of the optimizer.
        options_text: Group -> the options that ranks must share.
        named: Whether updates hang on parameters' names (random rounding does).

    Returns:
        The candidates, the first thing that is wrong with any parameter, and the groups of ranks that may wait for this
        one because of those left out, frozen or wrong (-> process group, if known).
    """
    candidates: list[Candidate] = []
    fault = None
    waiting: dict[Ranks, Any] = {}
    for index, group in enumerate(groups):
        for position, p in enumerate(group["params"]):
            try:
                if not group["use_muon"]:
                    refuse_flat(p)
                    continue
                if not takes_part(p):
                    waiting |= sharers(p, group)
                    continue
                check_hyperparameters(f"group {index}: ", group)
                name = name_of(group, index, position)
                names = names_of(group)
                identity = names[position] if names else name if named else ""
                candidates.append(_candidate(name, identity, p, group, options_text))
            except OUT_OF_MEMORY:
                raise
            except Exception as wrong:  # whatever it is, the other ranks must hear of it
                fault = fault or fault_text(wrong, f"{name_of(group, index, position)}: ")
                waiting |= sharers(p, group)
    return candidates, fault, waiting


def all_sharers(groups: Sequence[Group]) -> dict[Ranks, Any]:
    """The groups of ranks that may wait for this one, when nothing else is known -> process group, if known."""
    waiting: dict[Ranks, Any] = {}
    for group in groups:
        if group.get("use_muon"):
            for p in group["params"]:
                waiting |= sharers(p, group)
    return waiting


def _candidate(name: str, identity: str, p: Tensor, group: Group, options_text: Callable[[Group], str]) -> Candidate:
    view = view_of(name, p, group)
    try:
        engine = engine_for(p, group)
        about = engine.describe(p, view, replicas_of(group))
    except ValueError as wrong:
        raise ValueError(f"{name}: {wrong}") from None
    coefficients = per_step(group["ns_coefficients"], group["ns_steps"])
    options, batch = options_text(group), batch_text(group)
    return Candidate(name, identity, p, engine, about, coefficients, options, batch, stages_of(group))


def sharers(p: Tensor, group: Group) -> dict[Ranks, Any]:
    """The ranks that share a parameter, whatever its matrices are -> process group, if known. Never raises: what is
    wrong with the parameter is reported already, and the others must hear of it all the same."""
    try:
        engine = engine_for(p, group)
        about = engine.describe(p, MatrixView(engine.shape(p), 1, ()), replicas_of(group))
        return {about.ranks: about.group} if len(about.ranks) > 1 else {}
    except Exception:
        return _likely_sharers(p, group)


def _likely_sharers(p: Tensor, group: Group) -> dict[Ranks, Any]:
    """The ranks of a parameter that its engine cannot describe: those of its mesh, or of its group's option."""
    try:
        if is_dtensor(p):
            mesh = p.device_mesh
            ranks: Ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
            hint = mesh.get_group() if mesh.ndim == 1 else None
        else:
            hint = replicas_of(group)
            ranks = () if hint is None else tuple(sorted(hint.ranks))
    except Exception:
        return {}
    return {ranks: hint} if len(ranks) > 1 and my_rank() in ranks else {}
