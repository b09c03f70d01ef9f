"""Variants of Muon. A variant adds computations, called stages, to each step of Muon. `VARIANTS` lists all variants.
The docstring of each stage gives its formula and source.

The option `variant` of a parameter group names one variant, or several joined by "+" ("muon_eq+normuon"). Stages before
the orthogonalization run first, then stages after the orthogonalization, then stages on weights. Stages of the same
kind run in the order in which `variant` names them.

[Note: stages]
    A step of Muon updates the momentum, orthogonalizes it, and updates the weights. There are three kinds of stages:

    before    transforms the input of the orthogonalization
    after     scales the orthogonalized matrix, before it is multiplied by the learning rate
    weights   scales the updated weights, by a factor computed from the norm of the whole matrix

    The owner of a matrix is the rank that orthogonalizes it. With any sharding, the owner has the whole matrix, and
    runs the stages before and after the orthogonalization. Stages before the orthogonalization read the elements of the
    matrix. Stages after the orthogonalization read the norm of the matrix, or the norms of its rows or columns. So
    these two kinds of stages need no communication, and give the same bits with any sharding.

[Note: state of stages]
    A stage that runs after the orthogonalization or on weights can store `num_kept` fp32 numbers per matrix between
    steps. The optimizer's state contains these numbers under the stage's `key`, as a tensor of shape (number of stacked
    matrices or 1, num_kept). See layout/mesh.py. Stages with the same `key` share their state.

    Every rank that shares the parameter stores all of these numbers. So any of these ranks can become the owner under
    another plan, with another sharding, or after a checkpoint is loaded. If the stage's `travels` is True, the owner
    sends the changed numbers to the other ranks, bit for bit, in the same exchange as the results. The state of stages
    on weights is not sent, because all ranks compute the same bits.

[Note: adding a stage]
    A new stage requires changes in five files. Use a class in this file as an example: `HyperballUpdate` for a factor
    per matrix, `NorMuon` for a factor per row or column, `MuonEq` for a stage before the orthogonalization, or
    `HyperballWeight` for a stage on weights. Add new rows at the end of each table.
    1. In this file, add a subclass of `BeforeStage`, `AfterStage` or `WeightStage`. A subclass with fields must be a
       frozen dataclass, so that its `repr` shows the fields. The docstring gives the formula, the source ("ours" if
       nobody published it), and the differences from the source. An `AfterStage` with one factor per line must use the
       rows of tall matrices and the columns of wide matrices, because `scaled_` supports no other lines.
    2. At the end of this file, add a row to `VARIANTS`: the name that users write, and the stages.
    3. In auditing/reference.py, add a row to `_FORMULAS` for each stage: the same formula in fp64, written
       independently.
    4. In tests/variant_cases.py, add a row to `CASES`. Start with placeholders: (0, 0) for the numbers of launches, and
       any name for the audit's finding. The failing tests then print the correct values.
    5. In docs/variants.md, add a row to the first table, with a link to the source, or "ours". If the stage changes the
       size of updates, explain how this affects lr and the default adamw_lr.
    6. In CHANGELOG.md, add a line.

    `pytest -k "<name> or <Stage>" tests/variants tests/auditing tests/step/test_cuda_shape.py` shows in a minute
    whether the stage works. Many other tests also run for each row of these tables. They check the formula, all-zero
    matrices, layouts, checkpoints, audits and accelerators. They also check that a matrix gets the same bits alone and
    in a batch, and that an audit finds a step that skips the stage. Steps, plans, checkpoints and `shardmuon verify`
    use only the attributes that a stage declares, so they need no changes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_, foreach_norm, power_of_two

# ---------------------------------------------------------------------------------------------------------------- norms


class Norms:
    """Norms of the matrices of a batch, computed in at least fp32, and optionally the mean squares of their lines.
    The lines of a matrix are its rows if rows >= cols, and its columns otherwise. Each matrix is read only once.

    The bits of a matrix's norms do not depend on the rest of the batch, because each matrix is summed separately. Sums
    read aligned memory (`_aligned`), because kernels sum in a different order if memory is not aligned. All other
    operations are elementwise, and their rounding does not depend on the position of an element in a vector.

    Args:
        x: The matrices, (B, rows, cols), which are not modified.
        of_lines: True to compute `means` as well.

    Attributes:
        means: (B, L), the mean square of the elements of each of the L lines; None if `of_lines` is False.
        shape: (B, rows, cols).
    """

    def __init__(self, x: Tensor, of_lines: bool) -> None:
        count, rows, cols = self.shape = x.shape
        self._side = min(rows, cols)
        self._whole: Tensor | None = None
        self.means: Tensor | None = None
        wide = torch.promote_types(x.dtype, torch.float32)
        if not of_lines:
            self._whole = torch.stack(foreach_norm(list(map(_aligned, x.unbind(0))), 2, wide)).unsqueeze(1)
            return
        means = torch.empty(count, max(rows, cols), dtype=wide, device=x.device)
        for matrix, target in zip(x.split(1), means.split(1), strict=True):
            _line_norms(_aligned(matrix), -1 if rows >= cols else -2, target)
        self.means = means.square_().mul_(1 / self._side)

    @property
    def whole(self) -> Tensor:  # returns one norm per matrix, shape (B, 1)
        """The Frobenius norm of each matrix (not squared)."""
        if self._whole is None:
            assert self.means is not None, "one of the two is known"
            self._whole = self.sums(self.means)[0].mul_(self._side).sqrt_()
        return self._whole

    def sums(self, *several: Tensor) -> Sequence[Tensor]:
        """Sum nonnegative values over the lines (rows or columns) of each matrix. Each given tensor has one value per
        line, shape (B, L), and each result has one sum per matrix, shape (B, 1)."""
        lines = [_aligned(row) for one in several for row in one.unbind(0)]
        found: Sequence[Tensor] = torch.stack(foreach_norm(lines, 1, several[0].dtype)).unsqueeze(1).chunk(len(several))
        return found

    def scale_(self, factor: Tensor) -> None:  # `factor` has shape (B, 1) or, if `means` is known, (B, L)
        """Update the norms as if the matrices were multiplied by `factor`, which has one number per matrix or per line
        (row or column)."""
        if self.means is None:
            self._whole = self.whole * factor
        else:
            self.means, self._whole = factor.square() * self.means, None


def _aligned(x: Tensor) -> Tensor:
    """Return the tensor itself if its memory starts at a multiple of 64 bytes, else a copy in aligned memory."""
    return x if x.data_ptr() % 64 == 0 else x.clone()


def _line_norms(
    x: Tensor,  # shape (B, m, n), not modified
    dim: int,  # -1 for the norms of rows, -2 for the norms of columns
    out: Tensor | None = None,
) -> Tensor:  # returns norms in at least fp32, shape (B, m) for rows, (B, n) for columns
    """Compute the Euclidean norms of rows or columns, accumulated in at least fp32.

    On CPUs, `vector_norm` is slow along a dim whose elements are not adjacent in memory: it takes five to ten times as
    long as a sum. Along such a dim, the norm is computed from a sum of squares.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    last_in_memory = -1 if x.is_contiguous() else -2
    if dim == last_in_memory or x.device.type != "cpu":
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=wide, out=out)
        return norms
    return torch.sum(x.to(wide).square(), dim, out=out).sqrt_()


# --------------------------------------------------------------------------------------------------------------- stages


class Stage:
    """Base class of stages, the computations that variants of Muon add to a step. Stages with equal `repr` are treated
    as equal. Ranks compare their stages by `repr`, and matrices can share a batch only if their stages are equal.

    Attributes:
        key: Key under which the optimizer state contains the stage's state; "" for a stage without state.
        travels: True if the rank that orthogonalizes a matrix changes the state, and sends it to all other ranks that
            share the parameter.
        decays: False if the stage cancels the effect of weight decay. Such a stage cannot be combined with weight
            decay.
    """

    key: ClassVar[str] = ""
    travels: ClassVar[bool] = True
    decays: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def num_kept(self, rows: int, cols: int) -> int:
        """Return the number of fp32 values that the stage stores for a matrix of shape (rows, cols); 0 if the stage has
        no state."""
        return 1 if self.key else 0


class BeforeStage(Stage):
    """Base class of stages (computations that variants of Muon add to a step) that transform the input of the
    orthogonalization. The input consists of whole matrices of one shape. These stages have no state."""

    def run_(
        self,
        x: Tensor,  # (1, rows, cols) on a CPU; else (B, rows, cols), where each matrix starts at a multiple of 64 bytes
    ) -> None:
        """Transform the matrices in place, and scale each matrix to Frobenius norm 1. The orthogonalization then does
        not normalize the matrices again.

        Implementations must sum each matrix separately, so that the bits of a matrix do not depend on the rest of the
        batch. They must not wait for an accelerator, and must leave all-zero matrices unchanged.
        """
        raise NotImplementedError


class AfterStage(Stage):
    """Base class of post-processing stages (such as NorMuon), which multiply each orthogonalized matrix by a factor, or
    by one factor per line. Lines are the rows of the matrix if rows >= cols, else its columns.

    If there are several post-processing stages, the matrix is read only once to compute all of their factors, and then
    multiplied by the product of the factors (see `scaled_`).

    Attributes:
        of_lines: True if the factor and the state have one number per line. False if the factor has one number per
            matrix.
    """

    of_lines: ClassVar[bool] = False

    def factor(
        self,
        # norms of the B matrices after multiplication by the factors of all earlier post-processing stages
        norms: Norms,
        kept: Tensor,  # the stage's state, shape (B, num_kept), fp32; updated in place
    ) -> Tensor:  # returns factors of shape (B, 1), or (B, L) if `of_lines`, in the dtype of the norms
        """Compute the factor by which each matrix or each line (row or column) is multiplied.

        Implementations must not wait for an accelerator. For an all-zero matrix, the factor must be finite, so that the
        matrix stays zero. Matrices with NaN or Inf need no special handling, because their elements stay NaN or Inf.

        Implementations can use these values:
        - `norms.shape` is (B, rows, cols).
        - `norms.whole`, of shape (B, 1), is the Frobenius norm of each matrix (not squared).
        - `norms.means`, of shape (B, L), is the mean square of each of the L lines. It is available only if `of_lines`
          is True.
        - `norms.sums(means)[0]`, of shape (B, 1), is the sum of `means` over the lines of each matrix.
        - `_over(a, b)` is a / b for tensors of shape (B, 1), with 1 in place of quotients that are not finite.

        For example, ``_over(torch.full_like(norms.whole, 0.5), norms.whole)`` gives all matrices the norm 0.5.
        """
        raise NotImplementedError


def scaled_(
    stages: Sequence[AfterStage],  # post-processing stages (such as NorMuon), at least one
    x: Tensor,  # (B, rows, cols), scaled in place
    # Dict from a stage's key to one fp32 state tensor of shape (num_kept,) per matrix. The state can be on any device,
    # and is updated in place.
    kept: Mapping[str, Sequence[Tensor]],
) -> None:
    """Apply several post-processing stages in succession, with only two passes over the matrices: the first pass
    computes norms, and the second pass multiplies by the product of all factors. All-zero matrices stay zero."""
    norms = Norms(x, any(stage.of_lines for stage in stages))
    factors: list[Tensor] = []
    for stage in stages:
        rows = kept.get(stage.key, ())
        # state on another device is copied to the device of the matrices in a single transfer
        numbers = torch.stack(list(rows)).to(x.device) if rows else x.new_empty(len(x), 0, dtype=torch.float32)
        factor = stage.factor(norms, numbers)
        if rows and stage.travels:
            foreach_copy_(rows, numbers.unbind(0))
        if stage is not stages[-1]:
            norms.scale_(factor)
        factors.append(factor)
    total = functools.reduce(torch.mul, factors)
    x.mul_(total.unsqueeze(-1 if x.shape[1] >= x.shape[2] else -2))


def _over(numbers: Tensor, norms: Tensor) -> Tensor:  # both arguments and the result have shape (B, 1)
    """Divide numbers by norms. Quotients that are NaN or infinite, as for all-zero matrices or matrices with NaN or
    Inf, are replaced with 1."""
    return (numbers / norms).nan_to_num_(nan=1.0, posinf=1.0)


class WeightStage(Stage):
    """Base class of stages (such as Hyperball's) that multiply each weight matrix by a factor after the update. A
    variant of Muon has at most one such stage. In each step, one all-reduce per `WeightSet` (step/stages.py) sums the
    squared norms of its matrices.

    The state is one number per matrix: the norm of the matrix before the first step, or 0 while this norm is unknown.
    The state is not sent between ranks, because every rank computes the same bits.
    """

    travels: ClassVar[bool] = False

    def factor(
        self,
        norm: Tensor,  # (N,), fp64: Frobenius norms of N whole matrices after the update, bitwise equal on all ranks
        kept: Tensor,  # (N, 1), fp32: the stage's state, updated in place
    ) -> Tensor:  # returns one fp64 factor per matrix, (N,)
        """Compute the factor by which each matrix is multiplied; 1 leaves a matrix unchanged."""
        raise NotImplementedError


# --------------------------------------------------------------------------------------------------------------- MuonEq

# A row norm between these bounds is accurate if it is computed in fp32. Above the lower bound, the squared norm is
# above 2^-80. Squares that underflow are below 2^-126, so even 2^20 of them add up to less than 2^-26 of the squared
# norm. Below the upper bound, the squared norm is below 2^80, far from overflow.
_LOW, _HIGH = 2.0**-40, 2.0**40


class MuonEq(BeforeStage):
    """MuonEq: scaling of all nonzero rows to the same norm before the orthogonalization. For each row N_i of the matrix
    N to be orthogonalized (the momentum):

        N_i <- N_i / (||N_i|| sqrt(m))    with m the number of nonzero rows

    Source: https://arxiv.org/abs/2603.28254, in the paper's default form "R" (rows), which nanochat also uses
    (nanochat/optim.py). There are two differences from nanochat. First, nanochat preserves the mean norm of the rows.
    This class does not, because the result of the orthogonalization depends only on the ratios of the norms. Second,
    nanochat replaces row norms below 1e-6 with 1e-6. This class divides every nonzero row by its own norm, because rows
    with small gradients can have norms below 1e-6.
    """

    def run_(self, x: Tensor) -> None:
        # This fast path for CPUs makes a step 3% faster on a model of width 384 with fp32 matrix products.
        if x.device.type == "cpu":
            norms = _line_norms(x, -1)  # norms of the m rows, (1, m)
            low, high = torch.aminmax(norms)
            if float(low) > _LOW and float(high) < _HIGH:  # the condition is False if any row norm is 0 or NaN
                x.mul_(norms.mul_(x.shape[-2] ** 0.5).reciprocal_().unsqueeze(-1))
                return
        _unit_anyway_(x)


def _unit_anyway_(x: Tensor) -> None:  # `x` has shape (B, m, n)
    """Divide each row by its norm and by the square root of the number of nonzero rows, in place. The result is correct
    for values of any magnitude. The function does not synchronize with the device.

    Each row is first divided by a power of two, which is exact. The largest magnitude in a nonzero row is then between
    1 and 2, or at least 2^-23 (2^-52 in fp64) if all numbers in the row are subnormal. So sums need no fp64 copy of x.

    Each matrix is summed separately, so that the bits of a matrix do not depend on the rest of the batch.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x.div_(power_of_two(torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=wide)))
    norms = torch.empty(*x.shape[:2], 1, dtype=wide, device=x.device)  # 0 only for all-zero rows
    for matrix, found in zip(x.split(1), norms.split(1), strict=True):
        torch.linalg.vector_norm(matrix, dim=-1, keepdim=True, dtype=wide, out=found)
    # The square root of the number of nonzero rows is computed as the norm of a vector, divided by `least`. The vector
    # contains `least` for each nonzero row, and 0 for each all-zero row. `least` is a power of two, so the sum of
    # squares is exact in any order. The result is NaN if any row norm is NaN.
    least = torch.finfo(wide).eps
    root = torch.linalg.vector_norm(norms.clamp(max=least), dim=1, keepdim=True)
    x.div_((norms * root.mul_(1 / least)).clamp_(min=least))


# -------------------------------------------------------------------------------------------------------------- NorMuon


class NorMuon(AfterStage):
    """NorMuon: scaling of the rows or columns of an orthogonalized matrix O (m x n), based on a running average v of
    their mean squares. v starts at zero.

        v   <- beta2 v + (1 - beta2) mean(O^2)    of each row (m numbers) if m >= n, else of each column (n numbers)
        O'  =  O / sqrt(max(v, 1e-10))
        O'' =  O' ||O||_F / ||O'||_F

    Source: Li et al. 2025, https://arxiv.org/abs/2510.05491, in the form used by nanochat (nanochat/optim.py,
    `muon_step_fused`), which takes means over the shorter dim. Means over the longer dim would have little effect,
    because orthogonalization already gives equal norms to the columns of a tall matrix and to the rows of a wide
    matrix. dion (dion/normuon.py) uses a different form: it always takes the mean of each row, divides by
    `sqrt(v) + 1e-8`, and restores the norm of each shard of a sharded matrix. v needs no bias correction, because the
    norm of the whole matrix is restored.

    Attributes:
        beta2: Weight of the previous value in the running average v. nanochat and the paper use the same value.
    """

    beta2: ClassVar[float] = 0.95
    key: ClassVar[str] = "second_moment"
    of_lines: ClassVar[bool] = True

    def num_kept(self, rows: int, cols: int) -> int:
        return max(rows, cols)

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        means = norms.means
        assert means is not None, "for `of_lines`"
        kept.lerp_(means.to(kept.dtype), 1 - self.beta2)
        floored = kept.to(means.dtype).clamp(min=1e-10)  # nanochat uses the same lower bound
        # ||O||^2 and ||O'||^2 are sums over lines (rows or columns) of the mean squares, times a constant that cancels.
        restored = _over(*norms.sums(means, means / floored))
        return (restored / floored).sqrt_()


# ------------------------------------------------------------------------------------------------------------ Hyperball


class HyperballUpdate(AfterStage):
    """Hyperball: scaling of the update O to the norm R at which `HyperballWeight` keeps the weights:

        O <- R O / ||O||_F

    The state is R, one fp32 number per matrix: the norm of the weights before the first step, or 0 while this norm is
    unknown. R is unknown in two cases. If torch's checkpointing has created the state before the first step, the next
    step computes R before it updates the weights. If the weights are all zeros, the next step is a step of plain Muon,
    and R is the norm of the weights after this step.
    """

    key: ClassVar[str] = "weight_radius"
    travels: ClassVar[bool] = False

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        radius = kept.to(norms.whole.dtype)
        return _over(torch.where(radius > 0, radius, norms.whole), norms.whole)


class HyperballWeight(WeightStage):
    """Hyperball: scaling of each weight matrix to a constant norm after the update. With R = ||W_0||_F, the norm before
    the first step:

        W <- R V / ||V||_F    with V = W - lr R O / ||O||_F

    If a weight matrix is all zeros before the first step, the first step is a step of plain Muon, and R is the norm
    after this step.

    Source: https://arxiv.org/abs/2606.16899, in the form of Emerging-Optimizers (weight_update_hooks/hyperball.py).
    There is one difference: in this class, each matrix has its own R. In Emerging-Optimizers, the user sets one R for
    all matrices, each matrix is first scaled to this norm, and a matrix whose norm is nearly 0 becomes 0.
    """

    key: ClassVar[str] = HyperballUpdate.key
    decays: ClassVar[bool] = False

    def factor(self, norm: Tensor, kept: Tensor) -> Tensor:
        radius = kept[:, 0].double()
        radius = torch.where(radius > 0, radius, norm)
        kept[:, 0] = radius
        return _over(radius, norm)


# ------------------------------------------------------------------------------------------------------------ the table

Stages = tuple[Stage, ...]

VARIANTS: dict[str, Stages] = {
    "muon_eq": (MuonEq(),),
    "normuon": (NorMuon(),),
    "hyperball": (HyperballUpdate(), HyperballWeight()),
    "cautious": (),  # needs no stages, because `apply_` in step/update.py implements it
}

# State keys of all variants' stages, without duplicates.
KEPT_KEYS = tuple({stage.key: None for row in VARIANTS.values() for stage in row if stage.key})
_ALL = ", ".join(map(repr, VARIANTS))


def names_in(variant: str | None) -> tuple[str, ...]:
    """Split a group's `variant` into the names of variants, or return () for None, which means plain Muon.

    Raises:
        ValueError: `variant` is not a string, or a name is unknown or given twice. The message does not name the group.
    """
    if variant is None:
        return ()
    if not isinstance(variant, str):
        raise ValueError(
            f"variant={variant!r} must be None or text: one of {_ALL}, or several joined by '+' ('muon_eq+normuon')"
        )
    names = tuple(name.strip() for name in variant.split("+"))
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variant={variant!r}: {name!r} is not one of {_ALL}. Join several by '+'")
        if names.count(name) > 1:
            raise ValueError(f"variant={variant!r} names {name!r} twice. Name it once")
    return names


def check_variant(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a group's variants cannot be combined with each other or with the group's weight decay. The
    message does not name the group."""
    names = names_in(group.get("variant"))
    for name in names:
        if all(stage.decays for stage in VARIANTS[name]):
            continue
        if "cautious" in names:
            raise ValueError(
                f"variant={group['variant']!r}: {name!r} keeps the norm of weights, which do not decay then, "
                "cautiously or not. Leave 'cautious' out"
            )
        if float(group.get("weight_decay", 0.0)) != 0.0:
            raise ValueError(
                f"variant={group['variant']!r}: {name!r} keeps the norm of weights, so weight_decay="
                f"{group['weight_decay']!r} would do nothing but turn them. Write weight_decay=0.0"
            )


def stages_of(group: Mapping[str, Any]) -> Stages:
    """Return the stages (extra computations) that a group's Muon variant adds to a step, in the order in which they
    run, or () for plain Muon.

    Raises:
        ValueError: The group's `variant` is invalid.
    """
    found = [stage for name in names_in(group.get("variant")) for stage in VARIANTS[name]]
    places = (BeforeStage, AfterStage, WeightStage)
    return tuple(stage for place in places for stage in found if isinstance(stage, place))


def keeping(stages: Stages) -> Stages:
    """Select the stages of a Muon variant that have state. If several stages share a `key`, select only the first. A
    parameter has one state tensor for each selected stage, in the same order."""
    first = {stage.key: stage for stage in reversed(stages) if stage.key}
    return tuple(stage for stage in stages if first.get(stage.key) is stage)
