"""What a step does with each parameter: the parts of a plan that this rank carries out, and their arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.errors import ranks_text
from shardmuon.momentum.rounding import Stream, round_fragment
from shardmuon.momentum.stores import Momentum
from shardmuon.momentum.update import apply_, apply_like_torch_, l2_gradient, lr_scale, momentum_
from shardmuon.orthogonalize import FiniteWatch
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.planning.layout import Fragment
from shardmuon.planning.plan import Plan
from shardmuon.planning.routes import Messages, gram_messages, sources
from shardmuon.planning.types import RankBucket
from shardmuon.stepping.rates import on_device
from shardmuon.stepping.settings import Settings


@dataclass(frozen=True, slots=True)
class Kernel:
    """What all matrices of the optimizer have in common; how each is orthogonalized stands in the plan.

    Attributes:
        wire_dtype: In which matrices travel.
        follows_products: Whether bf16 products take a bf16 wire all the same. Then every matrix is rounded as if its
            own method had been forced, whatever "auto" took for others.
        deterministic: One matrix at a time.
        finite_check, watch: See `orthogonalize`.
        graphs: See `orthogonalize`.
        device: Where to orthogonalize; None: where the wire buffers are.
    """

    wire_dtype: torch.dtype
    deterministic: bool
    finite_check: bool = True
    graphs: GraphCache | None = None
    device: torch.device | None = None
    follows_products: bool = False
    watch: FiniteWatch | None = None

    def wire_of(self, how: str) -> torch.dtype:
        """The wire of matrices that are orthogonalized like this. A bucket's are all of one kind."""
        narrow = self.follows_products and Choice.of(how).dtype == torch.bfloat16
        return torch.bfloat16 if narrow else self.wire_dtype


class ParamWork(NamedTuple):
    """One parameter in one step: this rank's local storages, all of one shape."""

    weight: Tensor
    grad: Tensor
    momentum: Momentum
    settings: Settings
    rounding: Stream | None = None  # random bits for half-precision weights


class Held(NamedTuple):
    """A fragment that this rank stores, and where it goes and comes from."""

    item: int
    fragment: Fragment
    send_start: int | None  # offset in the gather's send buffer, if this rank is the fragment's source
    recv_start: int | None  # offset in the scatter's receive buffer; None if this rank owns the item


# Elements: what momentum makes on its way to the wire, and an update on its way to half-precision weights, is at most
# this, or one fragment. On a CPU what fits a cache; elsewhere so much that a list fills a launch.
_PORTION, _PORTION_ELSEWHERE = 1 << 17, 1 << 24


class Portion(NamedTuple):
    """Fragments of one parameter that this rank stores.

    Attributes:
        held: All of them.
        fragments: Theirs.
        used: Those that this rank sends or orthogonalizes, and their fragments.
        idle: Of a replica that others do: only the momentum moves on.
        shapes: (rows, cols) of the matrix of each of `held`.
    """

    param: int
    held: tuple[Held, ...]
    fragments: tuple[Fragment, ...]
    used: tuple[Held, ...]
    used_fragments: tuple[Fragment, ...]
    idle_fragments: tuple[Fragment, ...]
    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plan: Plan, owned: Collection[int], param: int, held: Sequence[Held]) -> Portion:
        """`owned`: items that this rank orthogonalizes."""
        reads = [h.send_start is not None or h.item in owned for h in held]
        used = tuple(itertools.compress(held, reads))
        return cls(
            param,
            tuple(held),
            tuple(h.fragment for h in held),
            used,
            tuple(h.fragment for h in used),
            tuple(h.fragment for h, read in zip(held, reads, strict=True) if not read),
            tuple((plan.items[h.item].rows, plan.items[h.item].cols) for h in held),
        )


@dataclass(frozen=True)
class Program:
    """A rank's bucket with everything looked up that does not change between steps."""

    plan: Plan
    rank_bucket: RankBucket
    rank: int

    @cached_property
    def held(self) -> tuple[Held, ...]:
        bucket = self.rank_bucket
        sends = {(s.item, s.fragment): s.start for s in bucket.gather.send} if bucket.gather else {}
        recvs = {(s.item, s.fragment): s.start for s in bucket.scatter.recv} if bucket.scatter else {}
        return tuple(Held(i, f, sends.get((i, f)), recvs.get((i, f))) for i, f in bucket.held)

    @cached_property
    def portions(self) -> tuple[tuple[Portion, ...], ...]:
        """What this rank holds by parameter, dealt into portions that are stepped together."""
        cpu = self.plan.specs[self.plan.items[self.rank_bucket.bucket.items[0]].param].kind == "cpu"
        limit = _PORTION if cpu else _PORTION_ELSEWHERE
        portions: list[list[tuple[int, list[Held]]]] = []
        size = limit + 1
        by_param: dict[int, list[Held]] = {}
        for held in self.held:
            by_param.setdefault(self.plan.items[held.item].param, []).append(held)
        for param, fragments in by_param.items():
            for held in fragments:
                if size + held.fragment.numel > limit:
                    portions.append([])
                    size = 0
                if not portions[-1] or portions[-1][-1][0] != param:
                    portions[-1].append((param, []))
                portions[-1][-1][1].append(held)
                size += held.fragment.numel
        owned = set(self.rank_bucket.owned)
        return tuple(tuple(Portion.of(self.plan, owned, *part) for part in portion) for portion in portions)

    @cached_property
    def params(self) -> frozenset[int]:
        """The parameters of which this rank holds something."""
        return frozenset(part.param for portion in self.portions for part in portion)

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Owned items by shape and orthogonalizer settings: each tuple runs as one batch."""
        table: dict[tuple[int, int, str, str], list[int]] = {}
        for index in self.rank_bucket.owned:
            item = self.plan.items[index]
            key = (item.rows, item.cols, item.how, self.plan.specs[item.param].batch)
            table.setdefault(key, []).append(index)
        return tuple(tuple(batch) for batch in table.values())

    @cached_property
    def messages(self) -> tuple[Messages, Messages]:
        """The two exchanges of a Gram bucket."""
        return gram_messages(self.plan, self.rank_bucket.bucket, self.rank)

    @cached_property
    def added(self) -> dict[int, tuple[Fragment, ...]]:
        """Of a Gram bucket: item -> the fragments whose part of the Gram matrix this rank sends."""
        found = {}
        for index in self.rank_bucket.bucket.items:
            item = self.plan.items[index]
            layout = self.plan.specs[item.param].layout
            found[index] = sources(layout, item.matrix, item.owners[0]).get(self.rank, ())
        return found

    def __str__(self) -> str:
        bucket = self.rank_bucket.bucket
        items = [self.plan.items[index] for index in bucket.items]
        matrices = [f"{self.plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items[:3]]
        number = f"bucket {self.plan.buckets.index(bucket)} of {len(self.plan.buckets)}"
        more = [f"{len(items) - 3} more"] if len(items) > 3 else []
        return f"{number} (ranks {ranks_text(bucket.ranks)}: {', '.join(matrices + more)})"


class Part(NamedTuple):
    """Fragments of one parameter."""

    work: ParamWork
    fragments: Sequence[Fragment]


def update_momentum(
    parts: Sequence[Part],
    *,
    read: bool = True,  # False where nobody looks at the result, which then is not made
) -> list[Sequence[Tensor]]:  # of each part, what is to be orthogonalized of its fragments
    """Update the momentum of these fragments. Parameters with the same rule and dtype are stepped in one call."""
    found: list[Sequence[Tensor]] = [()] * len(parts)
    together: dict[tuple[object, ...], list[tuple[int, Sequence[Tensor], Sequence[Tensor]]]] = {}
    for at, (work, fragments) in enumerate(parts):
        if not fragments:
            continue
        s = work.settings
        nesterov = s.nesterov and read
        grads = [f.select_local(work.grad) for f in fragments]
        if s.weight_decay_mode == "l2" and s.weight_decay:
            weights = [f.select_local(work.weight) for f in fragments]
            grads = [l2_gradient(g, w, s.weight_decay) for g, w in zip(grads, weights, strict=True)]
        buffers = work.momentum.direct(fragments, grads)
        if buffers is None:
            found[at] = work.momentum.update(fragments, grads, momentum=s.momentum, nesterov=nesterov)
        else:
            key = (s.momentum, nesterov, grads[0].device, buffers[0].dtype)
            together.setdefault(key, []).append((at, grads, buffers))
    for group in together.values():
        s = parts[group[0][0]].work.settings
        grads = [g for _, of_part, _ in group for g in of_part]
        kept = [b for _, _, of_part in group for b in of_part]
        updates = iter(momentum_(grads, kept, momentum=s.momentum, nesterov=s.nesterov and read))
        for at, of_part, _ in group:
            found[at] = list(itertools.islice(updates, len(of_part)))
    return found


class Results(NamedTuple):
    """Orthogonalized fragments of one parameter.

    Attributes:
        weights: Local storage of each fragment.
        updates: Each of its fragment's elements.
        shapes: (rows, cols) of each fragment's whole matrix.
        like_torch: Apply by torch's own operations, where the options allow.
    """

    work: ParamWork
    fragments: Sequence[Fragment]
    weights: Sequence[Tensor]
    updates: Sequence[Tensor]
    shapes: Sequence[tuple[int, int]]
    like_torch: bool = False


class _Applied(NamedTuple):
    """What one call of `apply_` takes."""

    settings: Settings
    lr: float | Tensor
    weights: list[Tensor]
    updates: list[Tensor]
    alphas: list[float]
    rounded: list[Callable[[Tensor], Tensor]]


def apply_results(results: Sequence[Results]) -> None:
    """Decay and update the weights of these fragments. Parameters with the same rule are changed in one call."""
    together: dict[tuple[object, ...], _Applied] = {}
    for work, fragments, weights, given, shapes, like_torch in results:
        s = work.settings
        updates = [
            u if u.shape == w.shape and u.device == w.device else u.reshape(w.shape).to(w.device)
            for u, w in zip(given, weights, strict=True)
        ]
        scales = [lr_scale(s.adjust_lr_fn, *shape, s.extra_scale_factor) for shape in shapes]
        if like_torch and work.rounding is None and s.weight_decay_mode == "decoupled":
            lr = s.lr if s.tensor_lr is None else s.tensor_lr
            for f, w, u, scale, shape in zip(fragments, weights, updates, scales, shapes, strict=True):
                apply_like_torch_(w, u, lr, scale, f, shape, weight_decay=s.weight_decay)
            continue
        device, dtype = work.weight.device, work.weight.dtype
        rate = _lr_on(device, s)
        known = id(s.tensor_lr) if isinstance(rate, Tensor) else rate
        key = (known, s.weight_decay, s.weight_decay_mode, device, dtype, work.rounding is None)
        rule = together.setdefault(key, _Applied(s, rate, [], [], [], []))
        rule.weights.extend(weights)
        rule.updates.extend(updates)
        rule.alphas.extend(scales if isinstance(rate, Tensor) else (rate * scale for scale in scales))
        if work.rounding is not None:
            rule.rounded.extend(partial(round_fragment, work.rounding, f, work.weight.dtype) for f in fragments)
    for s, rate, weights, updates, alphas, rounded in together.values():
        apply_(weights, updates, alphas, rate, s.weight_decay, s.weight_decay_mode, rounded or None)


def _lr_on(device: torch.device, settings: Settings) -> float | Tensor:
    """The lr of weights on this device: a tensor that lies with them on an accelerator as it is."""
    lr = on_device(settings.tensor_lr)
    if lr is None:
        return settings.lr
    return lr.reshape(()) if lr.device == device else float(lr)
