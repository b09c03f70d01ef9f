"""Expected values for the variants of Muon that add pre- or post-processing stages. Each variant needs a row, because
tests cannot derive these values from the stages.

This module imports nothing from shardmuon, because `make golden` also uses it with older revisions of the package.
"""

from __future__ import annotations

from typing import NamedTuple


class VariantCase(NamedTuple):
    """Expected values for a variant.

    Attributes:
        launches: Upper limits on the number of kernel launches that the variant adds to a step, as a pair: for a model
            of one layer, and for a model of four.
        left_out: All findings that an audit must report when the variant's first pre- or post-processing stage is left
            out. If others are reported, test_audit.py prints them.
    """

    launches: tuple[int, int]
    left_out: set[str]


CASES = {
    "normuon": VariantCase((60, 86), {"kept_wrong"}),
    "muon_eq": VariantCase((28, 50), {"variant_wrong"}),
    "hyperball": VariantCase((51, 72), {"variant_wrong"}),
}
TOGETHER = "muon_eq+normuon+hyperball"
# Tests name the three variants in TOGETHER explicitly. LATER contains all other variants, so tests that use LATER cover
# new variants automatically.
LATER = tuple(name for name in CASES if name not in TOGETHER.split("+"))
