"""Stages of a step. A variant of Muon is a tuple of stages; each is one file with its formula and source.

[Note: stages]
    A step of Muon is: momentum, orthogonalize, update the weights. A stage stands at one of three places:

    before    on what is to be orthogonalized, the whole matrix, at its owner
    after     on the orthogonalized matrix, at its owner, before the learning-rate scale
    weights   on the weights, once they are updated: told the norm of each whole matrix, it says a factor for it

    A stage before sees the whole matrix on every layout, and one after the norms of it or of its lines, for an owner
    has it whole. So they say nothing of shards, need no exchange, and give the same bits however weights are sharded.

[Note: what a stage keeps]
    A stage may keep numbers of each matrix from step to step (`num_kept`), fp32. They are state under the stage's
    `key`: a tensor (number of stacked matrices or 1, numbers of one), see layout/table.py. Every rank that shares the
    parameter has all of them, so that any of them may be the owner next (another plan, layout or checkpoint). What an
    owner's stage changed travels to the others behind the results, in the exchange that there is (`travels`), bit for
    bit. What all ranks compute alike (stages on weights) does not travel. Stages of one `key` share what they keep.

[Note: what a stage costs]
    Where a launch costs more than its arithmetic, factors after the orthogonalization are found for all matrices of a
    bucket at once, those on weights for all matrices of a step. So a factor is a formula of vectors, with a number for
    each matrix or each of its lines (variants/norms.py). A number of a matrix's shape comes in by
    `NumberLayout.times_`: `where` with a Python number makes a tensor of it, a launch more, and a product with a host's
    tensor would wait.

[Note: to add one]
    1. A file here: a frozen dataclass that derives from `BeforeStage`, `AfterStage` or `WeightStage`. Its docstring has
       the formula, the source, and what differs from that. An `AfterStage` multiplies matrices, or lines along their
       longer side: rows of tall matrices, columns of wide ones. A rule for the rows of every matrix needs this kind of
       lines first. In norms.py `NumberLayout` (sides, lines, sizes, `shaped`) and `measured` choose by rows >= cols;
       and as norms of lines of one kind do not follow from those of the other, let `scaled_` below read and scale once
       for each run of stages whose lines are of one kind.
    2. A row at the end of `VARIANTS` (variants/__init__.py): the name that users write, and the stages. A variant may
       have several (scale the update at the owner, then the weights).
    3. A row of `FORMULAS` (auditing/reference.py): the formula once more, in fp64, written anew. Without one the audit
       says which matrices it does not check.
    4. A row of the table in docs/variants.md, and the name where the others are: `grep -in hyperball README.md
       CHANGELOG.md docs/options.md src/shardmuon/muon.py`, one line of each.
    5. Tests. `VARIANTS` brings it into test_stages.py, test_one_process.py and test_cuda_shape.py of tests/step, into
       test_gpu.py and `shardmuon verify --variant`: nothing to write. To write:
       - tests/variants/test_variants.py: its formula, with a row of zeros (and the line in tests/CLAIMS.md); its name
         at `test_zeros_stay_zeros..` and, if after, at `test_a_matrix_has_the_same_bits_alone_and_among_others`. That
         one has a matrix of a single row, which some rules leave as it is.
       - `FAULTS` of tests/planted.py, at its end (tests deal out products by a row's number): `_of_variant(name,
         _running(Stage, lambda self, x, kept: x.float()), fault)` is a step without it. What audits call it:
         "variant_wrong" before; after, "wrong_matrix" where lines are off, "variant_wrong" where norms are,
         "scale_wrong" (`factor` times 1.25); "kept_wrong" if it keeps numbers.
       - rows of `VARIANTS` in tests/healthy_steps.py, of `ON_LAYOUTS` and `OPTIONS` in tests/auditing/test_audit.py,
         of `ADDED` in tests/step/test_cuda_shape.py (launches; a row that is too small prints what it found), of
         `OPTIONS` in tests/golden/table.py.
       - real ranks: a row in tests/variants/test_variants_layouts.py.
       - only if it keeps numbers: `KEEPING` of tests/variants/test_hostile_variants.py, `VARIANTS` of
         tests/checkpoint/test_resume.py (how groups resume), tests/step/test_memory_between_steps.py (its bytes).
    No step, plan, checkpoint or `shardmuon verify` names a variant: they read what a stage declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.variants.norms import Norms, NumberLayout, measured


@dataclass(frozen=True)
class Stage:
    """One stage of a variant. Its text (`repr`) is what ranks compare, and what matrices of a batch share.

    Attributes:
        key: The name of what it keeps in the optimizer's state; "" if it keeps nothing.
        travels: True if what it keeps is changed by owners, and sent to every rank that keeps it.
    """

    key: ClassVar[str] = ""
    travels: ClassVar[bool] = True

    def num_kept(self, rows: int, cols: int) -> int:
        """Numbers that it keeps of a matrix. 0: none."""
        return 0


class BeforeStage(Stage):
    """A stage on the momentum that is to be orthogonalized. Owners run it on batches of whole matrices of one shape."""

    def run(
        self,
        x: Tensor,  # (B, rows, cols), any float dtype and strides; may be overwritten
        kept: Tensor,  # (B, num_kept), fp32, on the device of x; updated in place
    ) -> Tensor:  # (B, rows, cols), at least fp32
        """Run on a batch. Computes in fp32, or in fp64 of fp64. Never waits for a device. Zeros stay zeros."""
        raise NotImplementedError

    def unit(
        self,
        x: Tensor,  # (1, rows, cols) on a CPU, (B, rows, cols) in aligned slots elsewhere; may be overwritten
    ) -> Tensor | None:  # of the same shape, in the dtype of x
        """Run on a batch and divide each matrix by its Frobenius norm, in no more passes than a backend needs to divide
        alone: then the backend does not. Bits of a matrix hang on no other: each is summed by itself. None, with x as
        it was: this stage or (on CPUs, as nothing waits for a device) this matrix cannot, so `run` it."""
        return None


class AfterStage(Stage):
    """A stage on the orthogonalized matrix: a factor for each matrix, or for each of its lines.

    Factors of all stages after a matrix follow from one read of it, and are multiplied in one pass (`scaled_`).

    Attributes:
        of_lines: True: its factor and what it keeps have a number for each line, laid out by `NumberLayout` (see
            variants/norms.py): rows where rows >= cols, else columns. False: they are those of each whole matrix.
    """

    of_lines: ClassVar[bool] = False

    def factor(
        self,
        norms: Norms,  # of N matrices as they are now, of one shape or several: see [Note: matrices together]
        kept: Tensor,  # (N, num_kept), or (L,) if of lines; fp32, updated in place
    ) -> Tensor:  # (N,), or (L,) if of lines; in the dtype of the norms
        """Factor by which each matrix or line is multiplied. Never waits for a device. Finite for a matrix of zeros: it
        stays one. What is not finite needs no care: its elements show it.

        Given `norms.whole` (N,) or, of lines, the mean squares `norms.means` (L,): `norms.cut.sums(means)[0]` adds up
        those of each matrix (N,), `norms.cut.combined(torch.div, these, means)` takes (N,) and (L,) in either order,
        and `over` divides (N,) by (N,) where that may be 0 / 0. `norms.cut.times_(numbers, factors)`
        multiplies (N,) in place, by one factor of each shape: for (_, rows, cols) in `norms.cut.shapes`.
        """
        raise NotImplementedError

    def run(self, x: Tensor, kept: Tensor) -> Tensor:  # (B, rows, cols), (B, num_kept) -> (B, rows, cols)
        """Run this stage alone, on a copy in at least fp32."""
        out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        scaled_((self,), [out], {self.key: kept.unbind(0)} if self.key else {})
        return out


def scaled_(
    stages: Sequence[AfterStage],
    xs: Sequence[Tensor],  # (B, rows, cols) each, of one device and float dtype; written to
    kept: Mapping[str, Sequence[Tensor]],  # key -> of each matrix (num_kept,), fp32; updated in place
) -> None:
    """Run stages one after the other: one read for the norms, one pass that scales. Zeros stay zeros."""
    cut = NumberLayout(tuple((x.shape[0], x.shape[1], x.shape[2]) for x in xs))
    norms = measured(xs, cut, any(stage.of_lines for stage in stages))
    total: Tensor | None = None
    for number, stage in enumerate(stages):
        numbers = _gathered(cut, kept[stage.key], stage.of_lines) if stage.key else _NOTHING
        factor = stage.factor(norms, numbers)
        if stage.travels and stage.key:
            foreach_copy_(kept[stage.key], cut.matrices(numbers) if stage.of_lines else numbers.unbind(0))
        if number + 1 < len(stages):
            norms = norms.scaled(factor)
        total = factor if total is None else cut.combined(torch.mul, total, factor)
    if total is not None:
        for x, of_batch in zip(xs, cut.shaped(total), strict=True):
            x.mul_(of_batch)


_NOTHING = torch.empty(0, 0, device="cpu")


def _gathered(
    cut: NumberLayout, rows: Sequence[Tensor], of_lines: bool
) -> Tensor:  # N of (num_kept,) -> (N, num_kept) or (L,)
    """Kept numbers of all matrices in one tensor."""
    if not of_lines:
        return torch.stack(list(rows))
    found = torch.empty(cut.size, dtype=rows[0].dtype, device=rows[0].device)
    foreach_copy_(cut.matrices(found), rows)
    return found


def over(numbers: Tensor, norms: Tensor) -> Tensor:  # (N,) both
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
