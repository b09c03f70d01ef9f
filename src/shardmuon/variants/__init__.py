"""Variants of Muon: stages around the orthogonalization, each one file and one row here. Read base.py first.

A group's `variant` names one, or several joined by "+" ("muon_eq+normuon"). They run by their place (before, after, on
weights), and at one place in the order in which they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardmuon.variants.base import AfterStage, BeforeStage, Stage, WeightStage, scaled_
from shardmuon.variants.muon_eq import MuonEq
from shardmuon.variants.norm_control import HyperballUpdate, HyperballWeight
from shardmuon.variants.normuon import NorMuon

Stages = tuple[Stage, ...]


class Variant(NamedTuple):
    """A row of the table.

    Attributes:
        stages: Options of a group, rows of `VARIANT_OPTIONS` -> its stages.
        decays: True if weight decay has a meaning beside it.
    """

    stages: Callable[[Mapping[str, Any]], Stages]
    decays: bool = True


VARIANTS: dict[str, Variant] = {
    "muon_eq": Variant(lambda options: (MuonEq(),)),
    "normuon": Variant(lambda options: (NorMuon(float(options["beta2"])),)),
    "hyperball": Variant(lambda options: (HyperballUpdate(), HyperballWeight()), decays=False),
}
VARIANT_OPTIONS: dict[str, float] = {"beta2": 0.95}  # keys of a group that variants read, with their defaults

_STAGES = [stage for row in VARIANTS.values() for stage in row.stages(VARIANT_OPTIONS)]
KEPT_KEYS = tuple(dict.fromkeys(stage.key for stage in _STAGES if stage.key))  # all names of state that any stage has
WEIGHT_NORMS = tuple(stage.key for stage in _STAGES if isinstance(stage, WeightStage))  # of these, norms of weights
_ALL = ", ".join(map(repr, VARIANTS))


def names_in(variant: str | None) -> tuple[str, ...]:
    """The names in a group's `variant`. None: plain Muon.

    Raises:
        ValueError: A name does not exist, or comes twice; the message lacks the group.
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
    """Raise ValueError, without the group, for a variant or an option of variants that has no meaning."""
    for name in names_in(group.get("variant")):
        if not VARIANTS[name].decays and float(group.get("weight_decay", 0.0)) != 0.0:
            raise ValueError(
                f"variant={group['variant']!r}: {name!r} keeps the norm of weights, so weight_decay="
                f"{group['weight_decay']!r} would do nothing but turn them. Write weight_decay=0.0"
            )
    beta2 = group.get("beta2", VARIANT_OPTIONS["beta2"])
    if isinstance(beta2, bool) or not isinstance(beta2, (int, float)) or not 0.0 <= beta2 < 1.0:
        raise ValueError(f"beta2={beta2!r} must be a number from 0 to below 1")


def stages_of(group: Mapping[str, Any]) -> Stages:
    """The stages of a group, in the order in which they run. () for plain Muon.

    Raises:
        ValueError: See `names_in`.
    """
    options = {**VARIANT_OPTIONS, **group}
    found = [stage for name in names_in(group.get("variant")) for stage in VARIANTS[name].stages(options)]
    places = (BeforeStage, AfterStage, WeightStage)
    return tuple(stage for place in places for stage in found if isinstance(stage, place))


def keeping(stages: Stages) -> Stages:
    """The stages that keep something, the first of each `key`: so many state tensors there are, in this order."""
    first = {stage.key: stage for stage in reversed(stages) if stage.key}
    return tuple(stage for stage in stages if first.get(stage.key) is stage)


def stages_text(stages: Stages) -> str:
    """Text of stages, equal on ranks that do the same; "" for plain Muon."""
    return " ".join(map(repr, stages))


__all__ = [
    "KEPT_KEYS",
    "VARIANTS",
    "VARIANT_OPTIONS",
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
    "stages_text",
]
