"""Compare what should be equal on several ranks: weights, momentum and gradients of replicated pieces, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shardmuon.auditing.report import Finding
from shardmuon.engines import engine_for
from shardmuon.planning.layout import ParamLayout, Piece
from shardmuon.planning.views import MatrixView
from shardmuon.stepping.replicas import fingerprint
from shardmuon.stepping.settings import name_of, replicas_of

if TYPE_CHECKING:
    from shardmuon.core import Core

Prints = dict[tuple[str, str], tuple[tuple[Piece, ...], int]]  # (parameter, quantity) -> pieces kept here, fingerprint
Replicated = dict[str, tuple[ParamLayout, dict[str, Tensor | None]]]

_REMEDIES = {
    "gradient": "Reduce gradients over all ranks that hold replicas, in every micro-batch that counts",
    "weights": "Broadcast the weights of one rank; if each rank has its own (experts), set rank_local=True",
    "state": "Something else wrote to the optimizer's state, or results of the exchange went astray",
    "momentum": "Gradients differed in an earlier step, or something else wrote to the optimizer's state",
}
_NAMES = {"gradient": "gradient_replicas_differ"}


def sharers(optimizer: Core, ranks: tuple[int, ...]) -> Replicated:
    """AdamW's parameters that lie on just these ranks."""
    found: Replicated = {}
    for index, group in enumerate(optimizer.param_groups):
        if group["use_muon"]:
            continue
        for position, p in enumerate(group["params"]):
            try:
                engine = engine_for(p, group)
                view = MatrixView(engine.shape(p), min(1, p.ndim), ())
                about = engine.describe(p, view, replicas_of(group))
            except ValueError:
                continue
            if about.ranks == ranks and about.extent is None:  # else its claims name no pieces
                moment = optimizer.state.get(p, {}).get("exp_avg")
                stored = None if moment is None else engine.storage(moment)
                values = {"weights": engine.storage(p), "momentum": stored}
                found[name_of(group, index, position)] = (about.claims[0].layout, values)
    return found


def local_prints(tensors: Replicated, rank: int) -> Prints:
    """Fingerprints of those that have replicas and of which this rank holds something."""
    prints: Prints = {}
    for name, (layout, values) in tensors.items():
        pieces = tuple(h.piece for h in layout.holders_of(rank) if h.piece.numel)
        if not layout.has_replicas or not pieces:
            continue
        for what, value in values.items():
            if value is not None:
                prints[name, what] = (pieces, fingerprint(value))
    return prints


def compare_prints(
    everyone: Sequence[Mapping[tuple[str, str], tuple[tuple[Piece, ...], int]]], ranks: Sequence[int]
) -> tuple[list[Finding], set[str]]:
    """What differs between ranks that hold the same pieces, and the parameters that were compared."""
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
