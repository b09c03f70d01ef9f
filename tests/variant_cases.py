"""Expected values for the variants of Muon that add pre- or post-processing stages. Each variant needs a row, because
tests cannot derive these values from the stages.

This file contains only data, because `make golden` also imports it when older revisions of the package run.
"""

from __future__ import annotations

from typing import NamedTuple


class VariantCase(NamedTuple):
    """Expected values for a variant.

    Attributes:
        launches: Largest number of kernels that the variant may add to a step on an accelerator, for a model of one
            layer and for a model of four layers. If a limit is exceeded, test_cuda_shape.py prints the number of
            kernels.
        left_out: All findings that an audit must report when the variant's first pre- or post-processing stage is left
            out. This is usually "variant_wrong" for a stage before the orthogonalizer, "kept_wrong" for a stage after
            it that keeps state, and "norm_wrong" for a stage that changes weights. Wrong rows or columns cause
            "wrong_matrix". A single wrong factor causes "clipped_update" or "scale_wrong". If the findings differ,
            test_audit.py prints them.
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
