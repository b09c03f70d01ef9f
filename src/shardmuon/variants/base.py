"""Stages of a step. A variant of Muon is a tuple of stages; each is one file with its formula and source.

[Note: stages]
    A step of Muon is: momentum, orthogonalize, update the weights. A stage runs at one of three places:

    before    on the orthogonalizer's input, the whole matrix, on its owner
    after     on the orthogonalized matrix, on its owner, before the learning-rate scale
    weights   on the updated weights: it gets the norm of each whole matrix and returns a factor for each

    The owner has the whole matrix on every layout: a stage before reads the matrix itself, a stage after reads its norm
    or the norms of its lines. So these stages know nothing of shards, need no exchange, and give the same bits however
    weights are sharded.

[Note: what a stage keeps]
    A stage after or on weights may store `num_kept` fp32 numbers per matrix from step to step. They are optimizer state
    under the stage's `key`: a tensor (number of stacked matrices or 1, num_kept), see layout/table.py. Every rank that
    shares the parameter has all of this state, so that any of these ranks can become the owner (under another plan,
    layout or checkpoint). If `travels`, owners send the changed numbers to the other ranks, bit for bit, in the same
    exchange as the results. State that all ranks compute alike (that of stages on weights) is not sent. Stages with the
    same `key` share their state.

[Note: to add one]
    Six files to write, besides this one and one example to read: norm_control.py's `HyperballUpdate` for a factor of a
    whole matrix, normuon.py for a factor of each line, muon_eq.py for a stage before, norm_control.py's
    `HyperballWeight` for a stage on weights. New rows go last in each table.
    1. variants/<name>.py: a subclass of `BeforeStage`, `AfterStage` or `WeightStage` below; a frozen dataclass if it
       has fields, because its `repr` must show them. Its docstring gives the formula, the source ("ours" if nobody
       published it), and the differences from the source. The lines of an `AfterStage` are the rows of tall matrices
       and the columns of wide ones; `scaled_` supports no others.
    2. A row in `VARIANTS` (variants/__init__.py): the name that users write, and the stages.
    3. A row in `FORMULAS` (auditing/reference.py) for each stage: the same formula in fp64, written independently.
    4. A row in `CASES` (tests/variant_cases.py). Start with placeholders, (0, 0) launches and any name for the audit's
       finding: the tests that fail print the values to put in.
    5. A row in the first table of docs/variants.md (source: a link, or "ours"). A stage that changes the size of
       updates changes what lr and the default adamw_lr mean: say so there.
    6. A line in CHANGELOG.md.

    `pytest -k "<name> or <Stage>" tests/variants tests/auditing tests/step/test_cuda_shape.py` shows whether it works
    (a minute). The other tests read these tables, too: they check the formula, zeros, bits alone and among other
    matrices, layouts, checkpoints, audits, accelerators, and a planted fault that skips the stage. Steps, plans,
    checkpoints and `shardmuon verify` name no variant: they read what a stage declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.variants.norms import Norms


class Stage:
    """Stage of a variant. Ranks compare stages by their `repr`, and a batch has only matrices whose stages have the
    same `repr`.

    Attributes:
        key: Name of the stage's state in the optimizer's state; "" for a stage without state.
        travels: True if owners change the state and send it to every other rank that stores it.
    """

    key: ClassVar[str] = ""
    travels: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def num_kept(self, rows: int, cols: int) -> int:
        """Number of fp32 values that the stage stores per matrix; 0: none."""
        return 0


class BeforeStage(Stage):
    """Stage on the orthogonalizer's input. Owners run it on whole matrices of one shape. It has no state."""

    def run_(
        self,
        x: Tensor,  # (1, rows, cols) on a CPU, (B, rows, cols) in aligned slots elsewhere
    ) -> None:
        """Transform the matrices in place, and scale each to Frobenius norm 1, so that the backend need not normalize.
        Sum each matrix by itself: its bits must not depend on the others. Never wait for a device. Zeros stay zeros."""
        raise NotImplementedError


class AfterStage(Stage):
    """Stage on the orthogonalized matrix: a factor for each matrix, or for each of its lines.

    The factors of all such stages are computed from one read of the matrix and applied in one pass (`scaled_`).

    Attributes:
        of_lines: True: factor and state have one number per line; lines are the rows where rows >= cols, else the
            columns. False: one factor per matrix.
    """

    of_lines: ClassVar[bool] = False

    def factor(
        self,
        norms: Norms,  # of the B matrices, after earlier stages
        kept: Tensor,  # the stage's state, fp32, updated in place: (B, num_kept), or (B, P) if `of_lines`
    ) -> Tensor:  # (B, 1), or (B, P) if `of_lines`; in the dtype of the norms
        """Factor by which each matrix or line is multiplied.

        Never wait for a device. The factor must be finite for a matrix of zeros, which stays zeros. Matrices with NaN
        or Inf need no care: their elements show it.

        `norms.shape` is (B, rows, cols). `norms.whole` (B, 1) is the Frobenius norm of each matrix (not squared). If
        `of_lines`, `norms.means` (B, P) has the mean square of each line's elements (P >= number of lines: padded), and
        `norms.sums(means)[0]` (B, 1) adds up the lines of each matrix. `over(a, b)` is a / b for tensors (B, 1), and 1
        where that is not finite; for a constant write ``over(torch.full_like(norms.whole, 0.5), norms.whole)``.
        """
        raise NotImplementedError

    def run(self, x: Tensor, kept: Tensor) -> Tensor:  # (B, rows, cols), (B, num_kept) -> (B, rows, cols)
        """The matrices after this stage alone, as a copy in at least fp32."""
        out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        scaled_((self,), out, {self.key: kept.unbind(0)} if self.key else {})
        return out


def scaled_(
    stages: Sequence[AfterStage],
    x: Tensor,  # (B, rows, cols), scaled in place
    kept: Mapping[str, Sequence[Tensor]],  # key -> state of each matrix, (num_kept,), fp32; updated in place
) -> None:
    """Run stages one after the other in two passes: one reads the norms, one scales. Zeros stay zeros."""
    norms = Norms(x, any(stage.of_lines for stage in stages))
    total: Tensor | None = None
    for stage in stages:
        rows = kept.get(stage.key, ())
        numbers = norms.gathered(rows, stage.of_lines) if rows else x.new_empty(len(x), 0, dtype=torch.float32)
        factor = stage.factor(norms, numbers)
        if rows and stage.travels:
            foreach_copy_(rows, numbers.narrow(1, 0, len(rows[0])).unbind(0))
        if stage is not stages[-1]:
            norms.scale_(factor)
        total = factor if total is None else total * factor
    if total is not None:
        x.mul_(
            total.narrow(1, 0, min(total.shape[1], norms.num_lines)).unsqueeze(-1 if x.shape[1] >= x.shape[2] else -2)
        )


def over(numbers: Tensor, norms: Tensor) -> Tensor:  # (B, 1) each
    """numbers / norms; 1 where that is NaN or infinite: for matrices of zeros, or with elements that are not finite."""
    return (numbers / norms).nan_to_num_(nan=1.0, posinf=1.0)


class WeightStage(Stage):
    """Stage on weights after the update; a variant has at most one. One reduction per step gives the norms of all
    matrices.

    Its state is one number per matrix: the norm before the first step, or 0 while that is not known. Every rank
    computes it from the same bits, so it is not sent.
    """

    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(
        self,
        norm: Tensor,  # (N,), fp64: Frobenius norms of N whole matrices after the update, the same bits on every rank
        kept: Tensor,  # (N, 1), fp32: the stage's state, updated in place
    ) -> Tensor:  # (N,), fp64
        """Factor by which each matrix is multiplied; 1 leaves a matrix unchanged."""
        raise NotImplementedError
