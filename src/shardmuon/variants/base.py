"""Stages of a step. A variant of Muon is a tuple of stages; each is one file with its formula and source.

[Note: stages]
    A step of Muon is: momentum, orthogonalize, update the weights. A stage stands at one of three places:

    before    on what is to be orthogonalized, the whole matrix, at its owner
    after     on the orthogonalized matrix, at its owner, before the learning-rate scale
    weights   on the weights, once they are updated: told the norm of each whole matrix, it says a factor for it

    A stage before sees the whole matrix on every layout, and one after the norms of it or of its lines, for an owner
    has it whole. So they say nothing of shards, need no exchange, and give the same bits however weights are sharded.

[Note: what a stage keeps]
    A stage after or on weights may keep numbers of each matrix from step to step (`num_kept`), fp32. They are state
    under the stage's `key`: a tensor (number of stacked matrices or 1, numbers of one), see layout/table.py. Every rank
    that shares the parameter has all of them, so that any of them may be the owner next (another plan, layout or
    checkpoint). What an owner's stage changed travels to the others behind the results, in the exchange that there is
    (`travels`), bit for bit. What all ranks compute alike (stages on weights) does not travel. Stages of one `key`
    share what they keep.

[Note: to add one]
    Seven files; variants/normuon.py is a whole example (muon_eq.py of a stage before, norm_control.py on weights).
    1. variants/<name>.py: a class that derives from `BeforeStage`, `AfterStage` or `WeightStage` below, a frozen
       dataclass if it has fields: its text (`repr`) must tell them. Its docstring has the formula, the source, and what
       differs from that. Lines of an `AfterStage` run along the shorter side: they are rows of tall matrices, columns
       of wide ones; `scaled_` knows no others.
    2. A row at the end of `VARIANTS` (variants/__init__.py): the name that users write, and the stages.
    3. A row of `FORMULAS` (auditing/reference.py) for each stage: the formula once more, in fp64, written anew.
    4. A row of `CASES` (tests/variant_cases.py), which says what its two entries are.
    5. A row of the table in docs/variants.md; a line in CHANGELOG.md.

    `pytest -k "<name> or <Stage>" tests/variants tests/auditing tests/step/test_cuda_shape.py` shows whether it works
    (a minute). The other tests take their rows from these tables, too: its formula, zeros, bits alone and among others,
    layouts, checkpoints, audits, accelerators, and a fault that leaves it out. No step, plan, checkpoint or `shardmuon
    verify` names a variant: they read what a stage declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.variants.norms import Norms


class Stage:
    """One stage of a variant. Its text (`repr`) is what ranks compare, and what matrices of a batch share.

    Attributes:
        key: The name of what it keeps in the optimizer's state; "" if it keeps nothing.
        travels: True if what it keeps is changed by owners, and sent to every rank that keeps it.
    """

    key: ClassVar[str] = ""
    travels: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def num_kept(self, rows: int, cols: int) -> int:
        """Numbers that it keeps of a matrix. 0: none."""
        return 0


class BeforeStage(Stage):
    """A stage on the momentum that is to be orthogonalized. Owners run it on whole matrices of one shape. It keeps
    nothing."""

    def run_(
        self,
        x: Tensor,  # (1, rows, cols) on a CPU, (B, rows, cols) in aligned slots elsewhere
    ) -> None:
        """Run in place, and divide each matrix by its Frobenius norm, so that the backend need not. Bits of a matrix
        hang on no other: each is summed by itself. Never waits for a device. Zeros stay zeros."""
        raise NotImplementedError


class AfterStage(Stage):
    """A stage on the orthogonalized matrix: a factor for each matrix, or for each of its lines.

    Factors of all stages after a matrix follow from one read of it, and are multiplied in one pass (`scaled_`).

    Attributes:
        of_lines: True: its factor and what it keeps have a number for each line (see variants/norms.py): rows where
            rows >= cols, else columns. False: one of each whole matrix.
    """

    of_lines: ClassVar[bool] = False

    def factor(
        self,
        norms: Norms,  # of B matrices as they are now
        kept: Tensor,  # (B, num_kept), or (B, P) if of lines; fp32, updated in place
    ) -> Tensor:  # (B, 1), or (B, P) if of lines; in the dtype of the norms
        """Factor by which each matrix or line is multiplied. Never waits for a device. Finite for a matrix of zeros: it
        stays one. What is not finite needs no care: its elements show it.

        Given `norms.shape` (B, rows, cols), and `norms.whole` (B, 1) or, of lines, the mean squares `norms.means`
        (B, P): `norms.sums(means)[0]` adds up those of each matrix (B, 1), and `over` divides (B, 1) by (B, 1) where
        that may be 0 / 0.
        """
        raise NotImplementedError

    def run(self, x: Tensor, kept: Tensor) -> Tensor:  # (B, rows, cols), (B, num_kept) -> (B, rows, cols)
        """Run this stage alone, on a copy in at least fp32."""
        out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        scaled_((self,), out, {self.key: kept.unbind(0)} if self.key else {})
        return out


def scaled_(
    stages: Sequence[AfterStage],
    x: Tensor,  # (B, rows, cols), written to
    kept: Mapping[str, Sequence[Tensor]],  # key -> of each matrix (num_kept,), fp32; updated in place
) -> None:
    """Run stages one after the other: one read for the norms, one pass that scales. Zeros stay zeros."""
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


def over(numbers: Tensor, norms: Tensor) -> Tensor:  # (B, 1) both
    """numbers / norms; 1 where that is not finite: for a matrix of zeros, or one that shows it by its elements."""
    return (numbers / norms).nan_to_num_(nan=1.0, posinf=1.0)


class WeightStage(Stage):
    """A stage on weights after the update, the only one of its variant. All matrices of a step are told their norms by
    one reduction.

    It keeps one number of each matrix, 0 for a norm that is not known: the norm before the first step is put there.
    That is computed alike on every rank from the same bits, so it does not travel.
    """

    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(
        self,
        norm: Tensor,  # (N,), fp64: Frobenius norms of N whole matrices as they are now, the same bits on every rank
        kept: Tensor,  # (N, 1), fp32; updated in place
    ) -> Tensor:  # (N,), fp64
        """Factor by which each matrix is multiplied, element by element. 1 leaves it as it is."""
        raise NotImplementedError
