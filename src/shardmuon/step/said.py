"""What ranks must say alike before a step: as a digest in each vote, in words when digests differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from shardmuon.comm.component import Ranks
from shardmuon.errors import ranks_text
from shardmuon.layout.calls import digest_of
from shardmuon.layout.engines.base import STATES
from shardmuon.momentum.keeper import BUFFER
from shardmuon.step.binding import Binding
from shardmuon.step.options import GroupOptions
from shardmuon.step.validate import Proposal


def digests_of(binding: Binding, proposal: Proposal, options: Sequence[GroupOptions]) -> dict[Ranks, bytes]:
    """Set of ranks -> what its ranks must have alike in this step."""
    found = {}
    for ranks, numbers in binding.alike.items():
        if len(ranks) > 1:
            said = tuple((proposal.said[n], options[binding.members[n].group].text) for n in numbers)
            last = binding.said.get(ranks)
            if last is None or last[0] != said:  # in most steps as in the one before
                runs = [(one, len(list(alike))) for one, alike in itertools.groupby(said)]
                digest = digest_of(binding.digests.get(ranks, b"") + repr(runs).encode())
                last = binding.said[ranks] = said, digest
            found[ranks] = last[1]
    return found


class Line(NamedTuple):
    """What a rank is about to do with one parameter, in words.

    Attributes:
        name: Of the parameter.
        gradient: Whether there is one, see `STATES`.
        text: Dtypes, state and options, apart by spaces.
    """

    name: str
    gradient: str
    text: str


def lines_of(binding: Binding, proposal: Proposal, options: Sequence[GroupOptions], ranks: Ranks) -> list[Line]:
    """The same of one set in words, a line for each parameter; the first one is the plan's."""
    lines = [Line("", binding.digests.get(ranks, b"").hex(), "")]
    for number in binding.alike[ranks]:
        member, said = binding.members[number], proposal.said[number][1:]
        named = [f"{what}={dtype}" for what, dtype in zip(("weights", "gradient", BUFFER), said, strict=False)]
        more = [str(value).replace(" ", "") for value in said[3:]]
        text = " ".join([*named, *more, options[member.group].text])
        lines.append(Line(member.name, STATES[proposal.states[number]], text))
    return lines


def difference(ranks: Ranks, everyone: Sequence[Sequence[Line] | None]) -> str:
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
            parts = (f"ranks {found[word]} have {word}" for word in STATES if word in found)
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
