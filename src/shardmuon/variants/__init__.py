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
        stages: The options that it reads, in the order of `options` -> its stages.
        options: Keys of a group, rows of `VARIANT_OPTIONS`.
        decays: True if weight decay has a meaning beside it.
    """

    stages: Callable[..., Stages]
    options: tuple[str, ...] = ()
    decays: bool = True


VARIANTS: dict[str, Variant] = {
    "muon_eq": Variant(lambda: (MuonEq(),)),
    "normuon": Variant(lambda beta2: (NorMuon(beta2),), ("beta2",)),
    "hyperball": Variant(lambda: (HyperballUpdate(), HyperballWeight()), decays=False),
}


class VariantOption(NamedTuple):
    """An option of a group that variants read: its default, what is allowed in words, and the check of a number."""

    default: float
    allowed: str
    fits: Callable[[float], bool]


VARIANT_OPTIONS: dict[str, VariantOption] = {
    "beta2": VariantOption(0.95, "a number from 0 to below 1", lambda value: 0.0 <= value < 1.0),
}

_STAGES = [
    stage for row in VARIANTS.values() for stage in row.stages(*(VARIANT_OPTIONS[k].default for k in row.options))
]
KEPT_KEYS = tuple(dict.fromkeys(stage.key for stage in _STAGES if stage.key))  # all names of state that any stage has
WEIGHT_NORMS = tuple(stage.key for stage in _STAGES if isinstance(stage, WeightStage))  # of these, norms of weights


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


_ALL = ", ".join(map(repr, VARIANTS))


def check_variant(group: Mapping[str, Any]) -> None:
    """Raise ValueError, without the group, for a variant or an option of variants that has no meaning."""
    names = names_in(group.get("variant"))
    for name in names:
        if not VARIANTS[name].decays and float(group.get("weight_decay", 0.0)) != 0.0:
            raise ValueError(
                f"variant={group['variant']!r}: {name!r} keeps the norm of weights, so weight_decay="
                f"{group['weight_decay']!r} would do nothing but turn them. Write weight_decay=0.0"
            )
    for key, option in VARIANT_OPTIONS.items():
        value = group.get(key, option.default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not option.fits(float(value)):
            raise ValueError(f"{key}={value!r} must be {option.allowed}")


def stages_of(group: Mapping[str, Any]) -> Stages:
    """The stages of a group, in the order in which they run. () for plain Muon.

    Raises:
        ValueError: See `names_in`.
    """
    variant = group.get("variant")
    if variant is None:
        return ()
    options = {key: float(group.get(key, option.default)) for key, option in VARIANT_OPTIONS.items()}
    rows = [VARIANTS[name] for name in names_in(variant)]
    found = [stage for row in rows for stage in row.stages(*(options[key] for key in row.options))]
    places = (BeforeStage, AfterStage, WeightStage)
    return tuple(stage for place in places for stage in found if isinstance(stage, place))


def keeping(stages: Stages) -> Stages:
    """The stages that keep something, the first of each `key`: so many state tensors there are, in this order."""
    found: dict[str, Stage] = {}
    for stage in stages:
        if stage.key:
            found.setdefault(stage.key, stage)
    return tuple(found.values())


def stages_text(stages: Stages) -> str:
    """Text of stages, equal on ranks that do the same; "" for plain Muon."""
    return " ".join(map(repr, stages))


def gram_fault(stages: Stages) -> str:
    """The reason why matrices with these stages cannot take the Gram route, or ""."""
    needing = [type(stage).__name__ for stage in stages if stage.whole]
    return f"{needing[0]} needs the whole matrix on one rank" if needing else ""


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
    "VariantOption",
    "WeightStage",
    "check_variant",
    "gram_fault",
    "keeping",
    "names_in",
    "scaled_",
    "stages_of",
    "stages_text",
]
