"""Rows of weights and the heads of an attention layer that they belong to. Pure: integers, and factors of given maxima.

Words: a *layer* is one attention layer; a *head* is a query head; a *group* is the query heads that share one key head;
a *role* says what rows are: "q" and "k" are scaled against each other, "q_pe" are query rows whose keys all heads share
(rotary keys of multi-head latent attention), "" is anything else (values, gates).

[Note: the rule]
    Kimi K2 (https://arxiv.org/abs/2507.20534, section 2.1) and Megatron (`clip_qk` in attention.py and
    multi_latent_attention.py): with S the largest logit of a head, of all heads of a group where they share keys,

        g = tau / S if S > tau, else 1
        q rows <- g^alpha,  k rows <- g^(1 - alpha),  q_pe rows <- g,  shared rotary keys unchanged

    so that the head's logits shrink by g. A maximum that is not finite says nothing about weights: g = 1.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Role = Literal["q", "k", "q_pe", ""]
Parts = tuple[tuple[Role, int], ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The meaning of the rows of one parameter.

    Attributes:
        weight: The parameter's name.
        parts: (role, number of rows) of the blocks of one repeat, in order.
        repeats: How often the blocks follow each other: once for [all q, all k, all v], the number of heads for
            [q, k, v of head 0, q, k, v of head 1, ..].
        dim: The dim of the parameter that they run along: 1 where it is stored the other way round (`x @ W`).

    Raises:
        ValueError: A role is unknown or a count is not positive.

    Examples:
        >>> Rows("q_proj.weight", (("q", 64),))
        >>> Rows("qkv.weight", (("q", 64), ("k", 16), ("", 16)))  # fused, values last
        >>> Rows("kv_b_proj.weight", (("k", 32), ("", 32)), repeats=8)  # 8 heads of (k, v)
    """

    weight: str
    parts: Parts
    repeats: int = 1
    dim: int = 0

    def __post_init__(self) -> None:
        known = all(role in ("q", "k", "q_pe", "") and size > 0 for role, size in self.parts)
        if not known or not self.parts or self.repeats < 1 or self.dim not in (0, 1):
            raise ValueError(
                f"{self.weight}: parts={self.parts}, repeats={self.repeats}, dim={self.dim}: parts are pairs of a role "
                "('q', 'k', 'q_pe' or '', which is anything else) and 1 row or more, repeats 1 or more, dim 0 or 1"
            )

    @property
    def total(self) -> int:
        """Number of all rows."""
        return self.repeats * sum(size for _, size in self.parts)

    def num(self, role: Role) -> int:
        """Number of rows of a role."""
        return self.repeats * sum(size for what, size in self.parts if what == role)


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer.

    Attributes:
        name: As in the mapping of maxima.
        num_heads: Query heads.
        num_groups: Key heads; `num_heads` unless several query heads share one.
        rows: The parameters that make queries and keys; biases, too.
        normed: What normalizes queries or keys after their projection, if anything does. Scaling the weights then does
            nothing to the logits.

    Raises:
        ValueError: The numbers do not fit together.
    """

    name: str
    num_heads: int
    num_groups: int
    rows: tuple[Rows, ...]
    normed: str = ""

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_groups < 1 or self.num_heads % self.num_groups:
            raise ValueError(f"{self.name}: {self.num_heads} heads do not share {self.num_groups} key heads evenly")
        for role, heads in self._heads.items():
            uneven = next((rows for rows in self.rows if rows.num(role) % heads), None)
            if uneven is not None:
                raise ValueError(
                    f"{self.name}: {uneven.weight} has {uneven.num(role)} rows of role {role!r}, which {heads} heads "
                    "do not divide"
                )
            if role in ("q", "k") and not any(rows.num(role) for rows in self.rows):
                raise ValueError(f"{self.name}: no rows of role {role!r}: name the parameters of queries and of keys")

    @property
    def _heads(self) -> dict[Role, int]:
        """Role -> number of heads that share its rows, in the order in which `factors` has theirs."""
        return {"": 1, "q": self.num_heads, "q_pe": self.num_heads, "k": self.num_groups}

    def places(self, rows: Rows) -> Tensor:  # (rows.total,), int64
        """The place of each row's factor in what `factors` returns. Rows of a role are dealt to its heads in order, in
        equal parts."""
        out, seen = list[Tensor](), Counter[Role]()
        first = dict(zip(self._heads, itertools.accumulate(self._heads.values(), initial=0), strict=False))
        for role, size in rows.parts * rows.repeats:
            index = torch.arange(seen[role], seen[role] + size, device="cpu")
            out.append(first[role] + index // (rows.num(role) // self._heads[role]))
            seen[role] += size
        return torch.cat(out)


def gains(
    layer: Attention,
    maxima: Tensor,  # (num_heads,), fp32
    tau: float,
) -> Tensor:  # (num_groups,), fp32
    """g of each key head, see [Note: the rule]."""
    largest = maxima.view(layer.num_groups, -1).amax(dim=1)
    over = (largest > tau) & torch.isfinite(largest)
    # a number over a tensor would be a product with its reciprocal, rounded twice
    return torch.where(over, torch.full_like(largest, tau) / largest, torch.ones_like(largest))


def factors(
    layer: Attention,
    gain: Tensor,  # (num_groups,)
    alpha: float,
) -> Tensor:  # (1 + 2 num_heads + num_groups,): 1, of each head's q and q_pe, of each group's k
    """The numbers that rows are multiplied with."""
    of_head = gain.repeat_interleave(layer.num_heads // layer.num_groups)
    return torch.cat([gain.new_ones(1), of_head.pow(alpha), of_head, gain.pow(1.0 - alpha)])


def check_numbers(tau: float, alpha: float) -> None:
    """Raise ValueError for numbers that the rule does not know."""
    if not tau > 0.0:
        raise ValueError(
            f"tau={tau!r}: the largest logit that is allowed must be above 0; 100 is usual, math.inf only measures"
        )
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha={alpha!r}: the queries' share must be in [0, 1]; 0.5 is usual")
