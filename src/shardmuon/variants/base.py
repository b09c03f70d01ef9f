"""What a stage of a step is. A variant of Muon is a tuple of stages; each is one file with its formula and source.

[Note: stages]
    A step of Muon is: momentum, orthogonalize, update the weights. A stage stands at one of three places:

    before    on what is to be orthogonalized, the whole matrix, at its owner
    after     on the orthogonalized matrix, at its owner, before the learning-rate scale
    weights   on the weights, once they are updated: told the norm of each whole matrix, it says a factor for it

    Stages before and after see whole matrices on every layout, for an owner has them whole. So they say nothing of
    shards, need no exchange, and give the same bits however weights are sharded. Matrices with such stages never take
    the Gram route, on which no rank has them whole.

[Note: what a stage keeps]
    A stage may keep numbers of each matrix from step to step (`num_kept`), fp32. They are state under the stage's
    `key`: a tensor (number of stacked matrices or 1, numbers of one), see engines/kept.py. Every rank that shares the
    parameter has all of them, so that any of them may be the owner next (another plan, layout or checkpoint). What an
    owner's stage changed travels to the others behind the results, in the exchange that there is (`travels`), bit for
    bit. What all ranks compute alike (stages on weights) does not travel. Stages of one `key` share what they keep.

[Note: to add one]
    1. A file here: a frozen dataclass that derives from `BeforeStage`, `AfterStage` or `WeightStage`. Its fields are
       its options; its docstring has the formula, the source, and what differs from that.
    2. A row in `VARIANTS` (variants/__init__.py): the name that users write, and a function from a group's options to
       the stages. A variant may have several (scale the update at the owner, then the weights).
    3. An option that it reads: a row in `VARIANT_OPTIONS` there, with its default and its check.
    4. A row in the table of dense references (auditing/variants.py; norm_rules.py of stages on weights): the formula
       once more, in fp64, written anew.
       Without one the audit says which matrices it does not check.
    No step, plan, checkpoint or `shardmuon verify` names a variant: they read what a stage declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shardmuon.variants.passes import scale_, squares, wide_of


@dataclass(frozen=True)
class Stage:
    """One stage of a variant. Its text (`repr`) is what ranks compare, and what matrices of a batch share.

    Attributes:
        key: The name of what it keeps in the optimizer's state; "" if it keeps nothing.
        whole: Whether it must see whole matrices at one rank.
        travels: Whether what it keeps is changed by owners, and sent to every rank that keeps it.
    """

    key: ClassVar[str] = ""
    whole: ClassVar[bool] = True
    travels: ClassVar[bool] = True

    def num_kept(self, rows: int, cols: int) -> int:
        """Numbers that it keeps of a matrix. 0: none."""
        return 0


class BeforeStage(Stage):
    """On what is to be orthogonalized. Owners run it on batches of whole matrices of one shape."""

    def run(
        self,
        x: Tensor,  # (B, rows, cols), any float dtype and strides; may be overwritten
        kept: Tensor,  # (B, num_kept), fp32, on the device of x; updated in place
    ) -> Tensor:  # (B, rows, cols), at least fp32
        """Run on a batch. Computes in fp32, or in fp64 of fp64. Never waits for a device. Zeros stay zeros."""
        raise NotImplementedError

    def unit(
        self,
        x: Tensor,  # (1, rows, cols) on a CPU, (B, rows, cols) elsewhere; may be overwritten
    ) -> Tensor | None:  # of the same shape, in the dtype of x
        """What `run` gives, divided by its Frobenius norm, in the passes in which a backend only divides: then the
        backend does not. None, with x as it was: this stage or (on CPUs, as nothing waits for a device) this matrix
        cannot, so `run` it."""
        return None


class AfterStage(Stage):
    """On what was orthogonalized: a factor for each matrix, or for each of its lines.

    Factors of all stages after a matrix follow from one read of it, and are multiplied in one pass (`scaled_`).

    Attributes:
        of_lines: Whether it needs the squares of each line along the longer dim (of rows where rows >= cols), or of
            the whole matrix alone.
    """

    of_lines: ClassVar[bool] = False

    def factor(
        self,
        squares: Tensor,  # (B, lines) or (B, 1), at least fp32: sums of squares of each line or matrix; not written to
        kept: Tensor,  # (B, num_kept), fp32, on the device of squares; updated in place
        shape: tuple[int, int],  # rows, cols of a matrix
    ) -> Tensor:  # (B, lines) or (B, 1), in the dtype of squares
        """What each line or matrix is multiplied with. Never waits for a device."""
        raise NotImplementedError

    def run(self, x: Tensor, kept: Tensor) -> Tensor:  # (B, rows, cols), (B, num_kept) -> (B, rows, cols)
        """This stage alone, on a copy in at least fp32."""
        return scaled_((self,), x.to(wide_of(x.dtype), copy=True), {self.key: kept})


def scaled_(
    stages: Sequence[AfterStage],
    x: Tensor,  # (B, rows, cols), any float dtype; written to
    kept: Mapping[str, Tensor],  # key -> (B, num_kept), fp32; updated in place
) -> Tensor:  # x
    """Run stages one after the other: one read for the sums of squares, one pass that scales. Zeros stay zeros."""
    if x.device.type == "cpu" and len(x) > 1:  # each by itself, so that no sum is cut by how many there are
        for at in range(len(x)):
            scaled_(stages, x[at : at + 1], {key: numbers[at : at + 1] for key, numbers in kept.items()})
        return x
    shape = (x.shape[-2], x.shape[-1])
    longer = -1 if shape[0] >= shape[1] else -2
    sums = squares(x, longer if any(stage.of_lines for stage in stages) else None)
    total: Tensor | None = None
    for stage in stages:
        if total is not None:  # of what the stages before have made
            found = stage.factor(sums * total.square(), kept[stage.key], shape)
            total = total * found
        else:
            total = stage.factor(sums, kept[stage.key], shape)
    if total is None:
        return x
    return scale_(x, total.unsqueeze(longer))


def norm_of(squares: Tensor) -> Tensor:  # (B, lines) -> (B, 1)
    """Frobenius norms of whole matrices."""
    return (squares if squares.shape[-1] == 1 else squares.sum(-1, keepdim=True)).sqrt()


class WeightStage(Stage):
    """On weights after the update. All matrices of a step are told their norms by one reduction.

    What it keeps is computed alike on every rank from the same bits, so it does not travel.

    Attributes:
        scales: Whether its factor may be another than 1.
    """

    scales: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    travels: ClassVar[bool] = False
    last: ClassVar[bool] = False  # whether it runs after those that scale, however the variant is written

    def factor(
        self,
        norm: Tensor,  # (N,), fp64: Frobenius norms of N whole matrices as they are now, the same bits on every rank
        kept: Tensor,  # (N, num_kept), fp32; updated in place
    ) -> Tensor:  # (N,), fp64
        """What each matrix is multiplied with, element by element. 1 leaves it as it is."""
        raise NotImplementedError
