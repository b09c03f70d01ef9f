"""Everything that a step depends on, read once and without changing anything that is in use.

It may fail in any way: its one caller turns that into what this rank says in the vote. Momentum that is not there yet
is made here, so that a rank without memory for it says so while all can still stop; it becomes state once all agree.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.component import Ranks
from shardmuon.engines import engine_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS
from shardmuon.step.binding import Binding, Member, takes_part
from shardmuon.step.options import Group, GroupOptions
from shardmuon.stepping.checks import (
    check_adamw_dtypes,
    check_gradient_elsewhere,
    gradient_storage,
    state_storage,
)
from shardmuon.stepping.settings import Settings, name_of

NONE, READY, MISPLACED = 0, 1, 2  # of a gradient: there is none; it lies as the parameter does; elsewhere
WORDS = ("no gradient", "a gradient", "a gradient that is placed unlike the parameter")
State = Mapping[Tensor, Mapping[str, Any]]
_NOTHING: Mapping[str, Any] = {}


class Proposal:
    """What this rank would do in a step, and what it says of that.

    Attributes:
        weights, grads, momenta: What this rank stores of each parameter of the plan; None where there is no gradient.
        settings: Of the group of each.
        states: NONE, READY or MISPLACED, of each.
        said: What ranks must do alike with each.
        made: Number -> momentum that the state does not have yet.
    """

    def __init__(self, num: int) -> None:
        self.weights: list[Tensor | None] = [None] * num
        self.grads: list[Tensor | None] = [None] * num
        self.momenta: list[Tensor | None] = [None] * num
        self.settings: list[Settings] = []
        self.states: list[int] = [NONE] * num
        self.said: list[tuple[object, ...]] = []
        self.made: dict[int, Tensor] = {}

    @property
    def missing(self) -> frozenset[int]:
        """The parameters without a gradient."""
        return frozenset(number for number, state in enumerate(self.states) if state == NONE)


def is_current(binding: Binding, groups: Sequence[Group], options: Sequence[GroupOptions]) -> bool:
    """True if the plan was made for just these parameters and options. Frameworks swap parameters after __init__."""
    if binding.planned != tuple(o.planned for o in options):
        return False
    members = iter(binding.members)
    for number, group in enumerate(groups):
        if options[number].settings is None:
            continue
        for p in group["params"]:
            if not takes_part(p):
                continue
            member = next(members, None)
            if member is None or member.param is not p or member.engine.signature(p) != member.signature:
                return False
    return next(members, None) is None


def validate(binding: Binding, groups: Sequence[Group], options: Sequence[GroupOptions], state: State) -> Proposal:
    """Read gradients and state.

    Raises:
        ValueError: One is unusable; with the parameter's name.
    """
    found = Proposal(len(binding.members))
    for number, member in enumerate(binding.members):
        settings = options[member.group].settings
        assert settings is not None, "an AdamW group has no matrices"
        found.settings.append(settings)
        try:
            found.said.append(_read(found, number, member, state.get(member.param, _NOTHING)))
        except ValueError as wrong:
            raise ValueError(f"{member.name}: {wrong}") from wrong
    for index, group in enumerate(groups):
        if options[index].settings is None:
            _check_adamw(index, group, state)
    return found


def _read(found: Proposal, number: int, member: Member, kept: Mapping[str, Any]) -> tuple[object, ...]:
    """Note what this rank has of a parameter; what ranks must have alike of it."""
    param, engine = member.param, member.engine
    grad = param.grad
    if grad is None:
        check_gradient_elsewhere(param)
        return (NONE,)
    weight = engine.storage(param)
    storage = gradient_storage(param, grad, engine, weight)
    found.states[number] = READY if storage is not None else MISPLACED
    buffer = kept.get(BUFFER)
    momentum = None if buffer is None else state_storage(param, buffer, BUFFER, engine, weight)
    if momentum is None or momentum.dtype != grad.dtype:  # as its gradients are
        like = weight if storage is None else storage
        made = found.made[number] = torch.zeros_like(like, dtype=grad.dtype)
        momentum = made if momentum is None else made.copy_(momentum)
    found.weights[number], found.grads[number], found.momenta[number] = weight, storage, momentum
    return found.states[number], weight.dtype, grad.dtype, None if buffer is None else buffer.dtype


def _check_adamw(index: int, group: Group, state: State) -> None:
    for position, p in enumerate(group["params"]):
        grad, kept = p.grad, state.get(p, _NOTHING)
        try:
            if grad is None:
                check_gradient_elsewhere(p)
                continue
            engine = engine_of(p)
            weight = engine.storage(p)
            gradient_storage(p, grad, engine, weight)
            check_adamw_dtypes(p, grad, kept.get(MOMENTS[0]))
            for key in MOMENTS:
                if key in kept:
                    state_storage(p, kept[key], key, engine, weight)
        except ValueError as wrong:
            raise ValueError(f"{name_of(group, index, position)}: {wrong}") from wrong


def digests_of(binding: Binding, proposal: Proposal, options: Sequence[GroupOptions]) -> dict[Ranks, bytes]:
    """Set of ranks -> what its ranks must have alike in this step."""
    found = {}
    for ranks, numbers in binding.table.sets.items():
        if len(ranks) > 1:
            said = tuple((proposal.said[n], options[binding.members[n].group].text) for n in numbers)
            last = binding.said.get(ranks)
            if last is None or last[0] != said:  # in most steps as in the one before
                runs = [(one, len(list(alike))) for one, alike in itertools.groupby(said)]
                digest = hashlib.blake2b(binding.digests[ranks] + repr(runs).encode(), digest_size=16).digest()
                last = binding.said[ranks] = said, digest
            found[ranks] = last[1]
    return found


def lines_of(binding: Binding, proposal: Proposal, options: Sequence[GroupOptions], ranks: Ranks) -> list[str]:
    """The same of one set in words, a line for each parameter; the first one is the plan's."""
    lines = [f"plan {binding.digests[ranks].hex()}"]
    for number in binding.table.sets[ranks]:
        member = binding.members[number]
        dtypes = ", ".join(map(str, proposal.said[number][1:]))  # of weight, gradient and momentum
        lines.append(f"{member.name}: {WORDS[proposal.states[number]]}; {dtypes} {options[member.group].text}")
    return lines


__all__ = ["Proposal", "digests_of", "is_current", "lines_of", "validate"]
