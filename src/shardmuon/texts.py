"""Texts for messages and reports: near spellings of a name that does not exist, tables, long lists."""

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
    """The one of those allowed that someone who wrote `key` may have had in mind."""
    known = _SPELLINGS.get(key)
    close = [known] if known in allowed else difflib.get_close_matches(key, allowed, n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(key: str, allowed: Sequence[str]) -> str:
    """End of a message that names the nearest allowed key; empty if none comes near."""
    found = nearest(key, allowed)
    return "" if found is None else f" (did you mean {found}?)"


def table(
    rows: Iterable[Sequence[str]],  # of one length, the header first
) -> str:
    """Lines of a table, its columns side by side and dashes under the header."""
    header, *body = rows
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = (header, ["-" * width for width in widths], *body)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*names[:3], *more])
