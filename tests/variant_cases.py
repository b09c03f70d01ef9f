"""One row for each variant with stages: what tests cannot read from the stages themselves. Copy a row to add one.

All tests of variants take their rows from here or from `VARIANTS` of shardmuon/variants. This is data alone, since
tests/golden/table.py runs in older trees, too.
"""

from __future__ import annotations

from typing import NamedTuple


class VariantCase(NamedTuple):
    """A variant.

    Attributes:
        launches: Kernels that it adds to a step on an accelerator, at most: of one layer, and of four. Where they are
            too few test_cuda_shape.py prints what it found.
        left_out: All that an audit says of a step without its first stage: mostly "variant_wrong" of a stage before the
            orthogonalizer, "kept_wrong" of one after it that keeps numbers, "wrong_matrix" of other lines,
            "clipped_update" or "scale_wrong" of one factor for the matrix, "norm_wrong" of weights. Where it says
            otherwise test_audit.py prints what it said.
    """

    launches: tuple[int, int]
    left_out: set[str]


CASES = {
    "normuon": VariantCase((60, 86), {"kept_wrong"}),
    "muon_eq": VariantCase((28, 50), {"variant_wrong"}),
    "hyperball": VariantCase((51, 72), {"variant_wrong"}),
}
TOGETHER = "muon_eq+normuon+hyperball"
LATER = tuple(name for name in CASES if name not in TOGETHER.split("+"))  # the first three have rows by name, too
