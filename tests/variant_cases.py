"""One row for each variant with pre- or post-processing stages, with expected values that tests cannot derive from the
stages. A new variant needs a new row.

The file contains only data, because `make golden` also imports it together with older revisions of the package.
"""

from __future__ import annotations

from typing import NamedTuple


class VariantCase(NamedTuple):
    """Expected values for a variant.

    Attributes:
        launches: Largest number of kernels that the variant may add to a step on an accelerator, for a model of one
            layer and for a model of four layers. If a number is too small, test_cuda_shape.py prints the number found.
        left_out: All findings that an audit must report when the variant's first pre- or post-processing stage is left
            out. For a stage before the orthogonalizer, this is usually "variant_wrong". For a stage after the
            orthogonalizer that keeps state, it is "kept_wrong", and for a stage on weights, "norm_wrong". Wrong rows or
            columns give "wrong_matrix", and a single wrong factor gives "clipped_update" or "scale_wrong". If the
            findings differ, test_audit.py prints them.
    """

    launches: tuple[int, int]
    left_out: set[str]


CASES = {
    "normuon": VariantCase((60, 86), {"kept_wrong"}),
    "muon_eq": VariantCase((28, 50), {"variant_wrong"}),
    "hyperball": VariantCase((51, 72), {"variant_wrong"}),
}
TOGETHER = "muon_eq+normuon+hyperball"
# LATER contains all variants except the three in TOGETHER, which tests name explicitly. All tests that use LATER
# therefore cover new variants automatically.
LATER = tuple(name for name in CASES if name not in TOGETHER.split("+"))
