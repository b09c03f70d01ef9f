"""Find out together why a step cannot be taken, and raise it on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from shardmuon.comm.component import Ranks, in_order
from shardmuon.comm.faults import Fault
from shardmuon.comm.vote import Verdict, gather
from shardmuon.errors import Refused, ranks_text
from shardmuon.step.binding import Binding
from shardmuon.step.options import GroupOptions
from shardmuon.step.validate import WORDS, Line, Proposal, digests_of, lines_of


def refuse(
    component: Ranks,
    binding: Binding | None,
    proposal: Proposal | None,
    options: Sequence[GroupOptions],
    fault: Fault,
    verdict: Verdict,
) -> NoReturn:
    """Raise what keeps any rank from the step. Collective over the component.

    Args:
        component: All ranks that have voted.
        binding, proposal, options: Of this rank.
        fault: What is wrong on it.
        verdict: Of the vote.

    Raises:
        Refused: On every rank, with the same text.
    """
    digests = dict[Ranks, bytes]()
    with fault:
        if binding is not None and proposal is not None:
            digests = digests_of(binding, proposal, options)
    everyone = gather(digests, component, fault.text, fault.cause)
    found: dict[Ranks, set[bytes]] = {}
    for theirs in everyone:
        for ranks, digest in theirs.items():
            found.setdefault(ranks, set()).add(digest)
    if verdict.phase.bit_count() > 1:  # other ranks are in another call, and gather no lines
        raise Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}")
    unlike = next((ranks for ranks in in_order(found) if len(found[ranks]) > 1), None)
    if unlike is None:
        raise Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}")
    lines = None
    with fault:
        if unlike in digests and binding is not None and proposal is not None:
            lines = lines_of(binding, proposal, options, unlike)
    said = gather(lines, component, fault.text, fault.cause)
    raise Refused(_difference(unlike, [said[component.index(rank)] for rank in unlike]))


def _difference(ranks: Ranks, everyone: Sequence[Sequence[Line] | None]) -> str:
    """Where what the ranks of a set are about to do differs first. None: a rank has no such set in its plan."""
    told = [lines for lines in everyone if lines is not None]
    plans, *lines = zip(*told, strict=False)
    if len(told) < len(ranks) or len(set(plans)) > 1:
        return (
            f"ranks {ranks} hold different plans. If there are several optimizers, step them in one order on all "
            "ranks; else call optimizer.prepare() on every rank"
        )
    for said in lines:  # of one parameter, by each rank
        found: dict[str, list[int]] = {}
        for rank, line in zip(ranks, said, strict=True):
            found.setdefault(line.gradient, []).append(rank)
        if len(found) > 1:
            parts = (f"ranks {found[word]} have {word}" for word in WORDS if word in found)
            return (
                f"{said[0].name}: {', '.join(parts)}. Every rank that shares a parameter must have its gradient, or "
                "none. Set the missing ones to zeros"
            )
        words = [line.text.split(" ") for line in said]
        if any(mine != words[0] for mine in words):
            own = (" ".join(word for word in mine if any(word not in theirs for theirs in words)) for mine in words)
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, own, strict=True))
            return f"{said[0].name}: ranks {ranks} are about to step with different options or state: {texts}"
    return f"ranks {ranks_text(ranks)} are about to do different things"
