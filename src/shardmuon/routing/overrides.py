"""Overrides and options as users write them, read and checked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardmuon.options import (
    GROUP_OPTIONS,
    MUON_OPTIONS,
    OPTIMIZER_KEYWORDS,
    PLACES,
    VIEW_OPTIONS,
    refuse_sets,
)
from shardmuon.routing.roles import Place
from shardmuon.texts import did_you_mean

Pattern = str | Callable[[str, Tensor, nn.Module], bool]
OverrideChoice = str | Mapping[str, Any]  # "muon", "adamw" or group options
Overrides = Mapping[Pattern, OverrideChoice] | Sequence[tuple[Pattern, OverrideChoice]]

SPLIT_OPTIONS = {"split_sizes", "split_groups", "num_heads"}


class Rule(NamedTuple):
    """One override."""

    pattern: Pattern
    label: str
    options: Mapping[str, Any]

    def matches(self, param: Tensor, places: Iterable[Place]) -> bool:
        return any(self.fits(place.name, param, place.module) for place in places)

    def fits(self, name: str, param: Tensor, module: nn.Module) -> bool:
        """True if it speaks of a parameter that the model has by this name."""
        return fnmatchcase(name, self.pattern) if isinstance(self.pattern, str) else self.pattern(name, param, module)


def parse(overrides: Overrides | None) -> list[Rule]:
    refuse_sets("overrides, of which the first that matches wins,", overrides, "a dict, or a list of pairs")
    pairs: Iterable[Any] = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    rules = []
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and (isinstance(pair[0], str) or callable(pair[0]))):
            raise TypeError(
                f"overrides must be pairs (name pattern or predicate, choice), found {pair!r}. "
                'Write overrides={"*.qkv.weight": {"num_heads": 8}}'
            )
        pattern, choice = pair
        label = repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))
        options = {"use_muon": choice == "muon"} if choice in ("muon", "adamw") else choice
        if not isinstance(options, Mapping):
            raise ValueError(f"override {label}: {choice!r} is not 'muon', 'adamw' or a dict of group options")
        for key in options:
            if key not in GROUP_OPTIONS:
                raise ValueError(
                    f"override {label}: there is no group option {key!r}{did_you_mean(key, GROUP_OPTIONS)}. "
                    f"Allowed: {', '.join(GROUP_OPTIONS)}"
                )
        rules.append(Rule(pattern, label, dict(options)))
    return rules


def check_all_match(rules: Iterable[Rule], found: Sequence[tuple[Tensor, tuple[Place, ...]]]) -> None:
    for rule in rules:
        if any(rule.matches(*item) for item in found):
            continue
        names = [place.name for _, places in found for place in places]
        close = difflib.get_close_matches(str(rule.pattern), names, n=3, cutoff=0.5)
        raise ValueError(
            f"override {rule.label} matches none of the model's {len(names)} parameter names."
            + (f" Close: {', '.join(close)}." if close else "")
            + " A pattern is a glob over the whole name, such as '*.attn.qkv.weight'"
        )


def check_for_module(given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise TypeError for keywords of `Muon` that are no options of `param_groups` which it passes on."""
    for key in given:
        if key in allowed:
            continue
        place = PLACES.get(key)
        if place is not None:
            raise TypeError(f"Muon: there is no keyword {key!r}. Write {place}")
        raise TypeError(f"Muon: there is no keyword {key!r}{did_you_mean(key, (*allowed, *OPTIMIZER_KEYWORDS))}")


def check_options(given: Iterable[str], parameters: Iterable[inspect.Parameter]) -> None:
    """Raise TypeError for keys that are no options of `param_groups`, whose parameters these are."""
    for key in given:
        if key in MUON_OPTIONS:
            continue
        place = PLACES.get(key) or (f"{key}=..." if key in OPTIMIZER_KEYWORDS else None)
        if place is not None:
            raise TypeError(f"param_groups: {key} is an option of the optimizer. Write shardmuon.Muon(groups, {place})")
        if key in VIEW_OPTIONS:
            raise TypeError(
                f"param_groups: {key} says how some parameters read as matrices. "
                f'Write overrides={{"<name pattern>": {{"{key}": ...}}}}'
            )
        allowed = (*(p.name for p in parameters if p.kind is p.KEYWORD_ONLY), *MUON_OPTIONS)
        raise TypeError(
            f"param_groups: there is no option {key!r}{did_you_mean(key, allowed)}. Allowed: {', '.join(allowed)}"
        )


def override_text(names: Iterable[str], choice: object) -> str:
    """The line that a user may write to settle how these parameters are routed."""
    text = repr(choice).replace("'", '"')
    return "overrides={" + ", ".join(f'"{name}": {text}' for name in names) + "}"


def few(names: Sequence[str]) -> str:
    """The first four of these names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
