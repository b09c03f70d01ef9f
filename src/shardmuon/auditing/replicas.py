"""Compare what should be equal on several ranks: weights, momentum and gradients of replicated pieces, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardmuon.auditing.anew import Describer, Description
from shardmuon.auditing.report import Finding
from shardmuon.host import Core
from shardmuon.layout.engines import engine_for
from shardmuon.layout.engines.base import name_of
from shardmuon.layout.pieces import Piece
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.step.binding import fingerprint

Prints = dict[tuple[str, str], tuple[tuple[Piece, ...], int]]  # (parameter, quantity) -> pieces kept here, fingerprint
Replicated = dict[str, tuple[ParamLayout, dict[str, Tensor | None]]]

_REMEDIES = {
    "gradient": "Reduce gradients over all ranks that hold replicas, in every micro-batch that counts",
    "weights": "Broadcast the weights of one rank; if each rank has its own (experts), set rank_local=True",
    "state": "Something else wrote to the optimizer's state, or results of the exchange went astray",
    "momentum": "Gradients differed in an earlier step, or something else wrote to the optimizer's state",
}
_NAMES = {"gradient": "gradient_replicas_differ"}


def _adamws(optimizer: Core) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
    """Name, tensor and group of AdamW's parameters."""
    for index, group in enumerate(optimizer.param_groups):
        if not group["use_muon"]:
            for position, p in enumerate(group["params"]):
                yield name_of(group, index, position), p, group


def said_of_adamws(optimizer: Core, ranks: Ranks, describer: Describer) -> dict[str, Description]:
    """Describe AdamW's parameters that no rank outside this set shares with this one."""
    found = {}
    for name, param, group in _adamws(optimizer):
        try:
            said = describer.describe(param, group)
        except ValueError:
            continue
        if len(said.ties.parts) * len(said.ties.mates) == len(ranks) and {*said.ties.parts, *said.ties.mates} <= {
            *ranks
        }:
            found[name] = said
    return found


def sharers(
    optimizer: Core, ranks: Ranks, everyone: Sequence[Mapping[str, Description]], describer: Describer
) -> Replicated:
    """AdamW's parameters that lie on just these ranks.

    Args:
        optimizer: Whose.
        ranks: The set.
        everyone: What `said_of_adamws` has found on each of them.
        describer: Of this audit.
    """
    found: Replicated = {}
    for name, param, group in _adamws(optimizer):
        if all(name in theirs for theirs in everyone):
            said = {rank: theirs[name] for rank, theirs in zip(ranks, everyone, strict=True)}
            try:
                layout = describer.layout(param, group, said, None)
            except ValueError:
                continue
            engine, moment = engine_for(param, group), optimizer.state.get(param, {}).get("exp_avg")
            stored = None if moment is None else engine.storage(moment)
            found[name] = layout, {"weights": engine.storage(param), "momentum": stored}
    return found


def local_prints(tensors: Replicated, rank: int) -> Prints:
    """Fingerprints of those that have replicas and of which this rank holds something."""
    prints: Prints = {}
    for name, (layout, values) in tensors.items():
        pieces = tuple(held.piece for held in layout.of_rank(rank) if held.piece.numel)
        if not layout.has_replicas or not pieces:
            continue
        for what, value in values.items():
            if value is not None:
                prints[name, what] = (pieces, fingerprint(value))
    return prints


def compare_prints(everyone: Sequence[Prints], ranks: Sequence[int]) -> tuple[list[Finding], set[str]]:
    """Differences between ranks that hold the same pieces, and the parameters that were compared."""
    first: dict[tuple[str, str, tuple[Piece, ...]], tuple[int, int]] = {}
    odd: dict[tuple[str, str, int], list[int]] = {}
    for rank, prints in zip(ranks, everyone, strict=True):
        for (name, what), (pieces, print_) in prints.items():
            reference, expected = first.setdefault((name, what, pieces), (rank, print_))
            if print_ != expected:
                odd.setdefault((name, what, reference), []).append(rank)
    findings = [
        Finding(
            _NAMES.get(what, "replica_drift"),
            name,
            f"the {what} on rank(s) {', '.join(map(str, others))} differ from those on rank {reference}",
            "equal bits on all ranks that hold the same piece",
            _REMEDIES[what],
        )
        for (name, what, reference), others in odd.items()
    ]
    return findings, {name for name, _, _ in first}
