"""One row for each variant with stages, with expected values that tests cannot read from the stages. To add a variant,
copy a row.

The file has data only, because tests/golden/table.py also imports it in older revisions of the repository.
"""

from __future__ import annotations

from typing import NamedTuple


class VariantCase(NamedTuple):
    """Expected values for a variant.

    Attributes:
        launches: Most kernels that the variant adds to a step on an accelerator, for one layer and for four. If a
            number is too small, test_cuda_shape.py prints the number found.
        left_out: All findings of an audit of a step without the first stage: usually "variant_wrong" for a stage before
            the orthogonalizer, "kept_wrong" for a stage after it that keeps state, "wrong_matrix" for wrong rows or
            columns, "clipped_update" or "scale_wrong" for one wrong factor, and "norm_wrong" for a stage on weights. If
            the findings differ, test_audit.py prints them.
    """

    launches: tuple[int, int]
    left_out: set[str]


CASES = {
    "normuon": VariantCase((60, 86), {"kept_wrong"}),
    "muon_eq": VariantCase((28, 50), {"variant_wrong"}),
    "hyperball": VariantCase((51, 72), {"variant_wrong"}),
}
TOGETHER = "muon_eq+normuon+hyperball"
# The first three variants also occur by name in tests.
LATER = tuple(name for name in CASES if name not in TOGETHER.split("+"))
