"""Stages: the computations that variants of Muon add to a step. The docstring of each stage has its formula and source.

[Note: stages]
    A step of Muon updates the momentum, orthogonalizes it, and updates the weights. A stage runs at one of three
    places:

    before    on the input of the orthogonalization, a whole matrix, on the rank that owns the matrix
    after     on the orthogonalized matrix, on its owner, before it is multiplied by the learning rate
    weights   on the updated weights: the stage gets the norm of each whole matrix and returns a factor for each

    The owner of a matrix is the rank that orthogonalizes it, so it has the whole matrix however weights are sharded. A
    stage before the orthogonalization reads the matrix itself; a stage after it reads the norm of the matrix or of its
    rows or columns. Therefore these stages need no knowledge of shards and no communication, and they give the same
    bits with any sharding.

[Note: what a stage keeps]
    A stage that runs after the orthogonalization or on weights may store `num_kept` fp32 numbers per matrix from one
    step to the next. They are optimizer state under the stage's `key`: a tensor of shape (number of stacked matrices or
    1, num_kept), see layout/table.py. Every rank that shares the parameter stores all of these numbers, so that any of
    these ranks can become the owner (under another plan, with another sharding, or from a checkpoint). If `travels` is
    True, owners send the changed numbers to the other ranks, bit for bit, in the same exchange as the results. State
    that all ranks compute identically, such as that of stages on weights, is not sent. Stages with the same `key` share
    their state.

[Note: to add one]
    A new stage requires changes in six files. Besides this file, read one example: `HyperballUpdate` in norm_control.py
    for a factor per matrix, normuon.py for a factor per row or column, muon_eq.py for a stage before the
    orthogonalization, `HyperballWeight` in norm_control.py for a stage on weights. Add rows at the end of each table.
    1. variants/<name>.py: a subclass of `BeforeStage`, `AfterStage` or `WeightStage` below; a frozen dataclass if it
       has fields, because its `repr` must show them. Its docstring gives the formula, the source ("ours" if nobody
       published it), and the differences from the source. The lines of an `AfterStage` are the rows of tall matrices
       and the columns of wide ones; `scaled_` supports no others.
    2. A row in `VARIANTS` (variants/__init__.py): the name that users write, and the stages.
    3. A row in `FORMULAS` (auditing/reference.py) for each stage: the same formula in fp64, written independently.
    4. A row in `CASES` (tests/variant_cases.py). Start with placeholders: (0, 0) launches and any name for the audit's
       finding. The failing tests then print the right values.
    5. A row in the first table of docs/variants.md (source: a link, or "ours"). If the stage changes the size of
       updates, say there what lr and the default adamw_lr then mean.
    6. A line in CHANGELOG.md.

    `pytest -k "<name> or <Stage>" tests/variants tests/auditing tests/step/test_cuda_shape.py` shows in a minute
    whether the stage works. The other tests read these tables, too. They check the formula, matrices of zeros, that a
    matrix gets the same bits alone and in a batch, layouts, checkpoints, audits and accelerators, and that audits
    notice if the stage is skipped. Steps, plans, checkpoints and `shardmuon verify` have no code for particular
    variants: they use only the attributes that a stage declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.variants.norms import Norms


class Stage:
    """Base class of stages, the computations that variants add to a step. Stages with equal `repr` count as equal, when
    ranks compare their stages and when matrices with equal stages are put into one batch.

    Attributes:
        key: Key of the stage's state in the optimizer's state; "" for a stage without state.
        travels: True if the owner of a matrix changes the state and sends it to every other rank that stores it.
    """

    key: ClassVar[str] = ""
    travels: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def num_kept(self, rows: int, cols: int) -> int:
        """Return the number of fp32 values that the stage stores for a matrix of this shape; 0 without state."""
        return 0


class BeforeStage(Stage):
    """Stage on the input of the orthogonalization, without state. It runs on whole matrices of one shape."""

    def run_(
        self,
        x: Tensor,  # (1, rows, cols) on a CPU, (B, rows, cols) in aligned slots elsewhere
    ) -> None:
        """Transform the matrices in place, and scale each to Frobenius norm 1, so that the orthogonalization need not.

        Implementations must sum each matrix separately, so that its bits do not depend on the rest of the batch. They
        must not wait for the device, and must leave matrices of zeros unchanged.
        """
        raise NotImplementedError


class AfterStage(Stage):
    """Stage on the orthogonalized matrix: multiplies each matrix, or each of its lines, by a factor. Lines are the rows
    of a matrix with rows >= cols, else its columns.

    The factors of all stages after the orthogonalization are computed from one read of the matrix and applied in one
    pass (`scaled_`).

    Attributes:
        of_lines: True if the factor and the state have one number per line. False: the factor has one per matrix.
    """

    of_lines: ClassVar[bool] = False

    def factor(
        self,
        norms: Norms,  # norms of the B matrices after earlier stages
        kept: Tensor,  # the stage's state, fp32, updated in place: (B, num_kept), or (B, P) if `of_lines`
    ) -> Tensor:  # (B, 1), or (B, P) if `of_lines`; in the dtype of the norms
        """Compute the factor by which each matrix or line is multiplied.

        Implementations must not wait for the device. The factor must be finite for a matrix of zeros, which stays zero.
        Matrices with NaN or Inf need no special care, because their elements stay NaN or Inf.

        `norms.shape` is (B, rows, cols). `norms.whole` (B, 1) is the Frobenius norm of each matrix (not squared). If
        `of_lines`, `norms.means` (B, P) has the mean square of each line's elements, where P is the number of lines
        plus padding, and `norms.sums(means)[0]` (B, 1) adds up the lines of each matrix. `over(a, b)` is a / b for
        tensors (B, 1), and 1 where the quotient is not finite. To give all matrices the norm 0.5, for example, return
        ``over(torch.full_like(norms.whole, 0.5), norms.whole)``.
        """
        raise NotImplementedError

    def run(self, x: Tensor, kept: Tensor) -> Tensor:  # (B, rows, cols), (B, num_kept) -> (B, rows, cols)
        """Apply this stage alone to a copy of the matrices in at least fp32, and return the copy."""
        out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        scaled_((self,), out, {self.key: kept.unbind(0)} if self.key else {})
        return out


def scaled_(
    stages: Sequence[AfterStage],
    x: Tensor,  # (B, rows, cols), scaled in place
    kept: Mapping[str, Sequence[Tensor]],  # key -> state of each matrix, (num_kept,), fp32; updated in place
) -> None:
    """Apply several stages, one after the other, in two passes over the matrices: the first computes norms, the second
    multiplies by the product of all factors. Zeros stay zeros."""
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
    """Divide numbers by norms. The result is 1 where the quotient is NaN or infinite, which happens for matrices of
    zeros and for matrices with NaN or Inf."""
    return (numbers / norms).nan_to_num_(nan=1.0, posinf=1.0)


class WeightStage(Stage):
    """Stage on weights after the update. A variant has at most one. A single reduction per step computes the norms of
    all matrices.

    The state is one number per matrix: the norm before the first step, or 0 while it is not known. Every rank computes
    the state from the same bits, so it is not sent.
    """

    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(
        self,
        norm: Tensor,  # (N,), fp64: Frobenius norms of N whole matrices after the update, the same bits on every rank
        kept: Tensor,  # (N, 1), fp32: the stage's state, updated in place
    ) -> Tensor:  # (N,), fp64
        """Compute the factor by which each matrix is multiplied; 1 leaves a matrix unchanged."""
        raise NotImplementedError
