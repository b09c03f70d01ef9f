"""Variants of Muon. A variant consists of stages: computations added before or after the orthogonalization, or after
the update of the weights. Each variant has a row in `VARIANTS`, and its stages have a file in this folder. Read base.py
first.

A group's `variant` names one variant, or several joined by "+" ("muon_eq+normuon"). Stages before the orthogonalization
run first, then stages after it, then stages on weights. Stages of one kind run in the order in which the variants are
named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardmuon.variants.base import AfterStage, BeforeStage, Stage, WeightStage, scaled_
from shardmuon.variants.muon_eq import MuonEq
from shardmuon.variants.norm_control import HyperballUpdate, HyperballWeight
from shardmuon.variants.normuon import NorMuon

Stages = tuple[Stage, ...]


class Variant(NamedTuple):
    """An entry of the table of variants.

    Attributes:
        stages: The variant's stages.
        decays: True if the variant can be combined with weight decay.
    """

    stages: Stages
    decays: bool = True


CAUTIOUS = "cautious"  # has no stage; it changes the weight decay, in `apply_` of step/update.py
VARIANTS: dict[str, Variant] = {
    "muon_eq": Variant((MuonEq(),)),
    "normuon": Variant((NorMuon(),)),
    "hyperball": Variant((HyperballUpdate(), HyperballWeight()), decays=False),
    CAUTIOUS: Variant(()),
}

_STAGES = [stage for row in VARIANTS.values() for stage in row.stages]
KEPT_KEYS = tuple(dict.fromkeys(stage.key for stage in _STAGES if stage.key))  # state keys of all stages
WEIGHT_NORMS = tuple(stage.key for stage in _STAGES if isinstance(stage, WeightStage))  # state keys of weight norms
_ALL = ", ".join(map(repr, VARIANTS))


def names_in(variant: str | None) -> tuple[str, ...]:
    """Split a group's `variant` into the names of variants; () for None, which is plain Muon.

    Raises:
        ValueError: `variant` is not text, or a name is unknown or given twice. The message does not name the group.
    """
    if variant is None:
        return ()
    if not isinstance(variant, str):
        raise ValueError(
            f"variant={variant!r} must be None or text: one of {_ALL}, or several joined by '+' ('muon_eq+normuon')"
        )
    names = tuple(name.strip() for name in variant.split("+"))
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variant={variant!r}: {name!r} is not one of {_ALL}. Join several by '+'")
        if names.count(name) > 1:
            raise ValueError(f"variant={variant!r} names {name!r} twice. Name it once")
    return names


def check_variant(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a group's variants cannot be combined with each other or with its weight decay. The message
    does not name the group."""
    names = names_in(group.get("variant"))
    for name in names:
        if VARIANTS[name].decays:
            continue
        if CAUTIOUS in names:
            raise ValueError(
                f"variant={group['variant']!r}: {name!r} keeps the norm of weights, which do not decay then, "
                f"cautiously or not. Leave {CAUTIOUS!r} out"
            )
        if float(group.get("weight_decay", 0.0)) != 0.0:
            raise ValueError(
                f"variant={group['variant']!r}: {name!r} keeps the norm of weights, so weight_decay="
                f"{group['weight_decay']!r} would do nothing but turn them. Write weight_decay=0.0"
            )


def stages_of(group: Mapping[str, Any]) -> Stages:
    """Return the stages of a group's variant, in the order in which they run; () for plain Muon.

    Raises:
        ValueError: The group's `variant` is invalid.
    """
    found = [stage for name in names_in(group.get("variant")) for stage in VARIANTS[name].stages]
    places = (BeforeStage, AfterStage, WeightStage)
    return tuple(stage for place in places for stage in found if isinstance(stage, place))


def keeping(stages: Stages) -> Stages:
    """Select the stages that have state, one for each state `key` (the first). A parameter has one state tensor for
    each of them, in this order."""
    first = {stage.key: stage for stage in reversed(stages) if stage.key}
    return tuple(stage for stage in stages if first.get(stage.key) is stage)


__all__ = [
    "CAUTIOUS",
    "KEPT_KEYS",
    "VARIANTS",
    "WEIGHT_NORMS",
    "AfterStage",
    "BeforeStage",
    "Stage",
    "Stages",
    "Variant",
    "WeightStage",
    "check_variant",
    "keeping",
    "names_in",
    "scaled_",
    "stages_of",
]
