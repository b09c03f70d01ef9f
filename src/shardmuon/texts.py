"""Texts for messages and reports: suggestions for a misspelled name, tables, shortened lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# What other libraries call our options: DeepSpeed, VeOmni, dion, Moonlight, Emerging-Optimizers, Automodel.
_SPELLINGS = {
    "mu": "momentum",
    "heads": "split_sizes",
    "muon_momentum": "momentum",
    "wd": "weight_decay",
    "muon_weight_decay": "weight_decay",
    "learning_rate": "lr",
    "muon_lr": "lr",
    "adam_lr": "adamw_lr",
    "scalar_lr": "adamw_lr",
    "adam_betas": "betas",
    "epsilon": "eps",
    "num_ns_steps": "ns_steps",
    "adjust_lr": "adjust_lr_fn",
    "scale_mode": "adjust_lr_fn",
}


def nearest(key: str, allowed: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The allowed name that is closest to `key`, or that another library's `key` stands for; None if there is none."""
    known = _SPELLINGS.get(key)
    close = [known] if known in allowed else difflib.get_close_matches(key, allowed, n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(key: str, allowed: Sequence[str]) -> str:
    """End of a message that suggests the nearest allowed key; empty if no key is close."""
    found = nearest(key, allowed)
    return "" if found is None else f" (did you mean {found}?)"


def table(
    rows: Iterable[Sequence[str]],  # of equal lengths, the header first
) -> str:
    """Text of a table with aligned columns and dashes under the header."""
    header, *body = rows
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = (header, ["-" * width for width in widths], *body)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def listed(names: Sequence[str]) -> str:
    """The first three names and the number of further ones, as text."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*names[:3], *more])
