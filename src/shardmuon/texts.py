"""Functions that format texts for messages and reports: tables, shortened lists, and suggestions for misspelled
names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Dict from an option's name in another library (DeepSpeed, VeOmni, dion, Moonlight, Emerging-Optimizers or Automodel)
# to its name in this package.
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


def did_you_mean(key: str, allowed: Sequence[str], cutoff: float = 0.6) -> str:
    """Format a "did you mean" suggestion for an unknown name `key`, to append to an error message. If `key` is another
    library's name for an allowed option, suggest this option. Otherwise, suggest the allowed name with the most similar
    spelling. Return an empty string if no name is similar."""
    known = _SPELLINGS.get(key)
    close = [known] if known in allowed else difflib.get_close_matches(key, allowed, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


def table(
    rows: Iterable[Sequence[str]],  # the first row is the table's header; all rows have the same length
) -> str:
    """Format a table with aligned columns and a line of dashes under the header."""
    header, *body = rows
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = (header, ["-" * width for width in widths], *body)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def listed(names: Sequence[str]) -> str:
    """Format the first three names and the number of remaining names, as in "a, b, c, 4 more"."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*names[:3], *more])
