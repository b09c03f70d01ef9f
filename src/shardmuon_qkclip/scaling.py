"""Multiply the rows of sharded query and key weights by factors computed from the largest attention logits of all
ranks.

[Note: the rule]
    Kimi K2 (https://arxiv.org/abs/2507.20534, section 2.1) and Megatron (`clip_qk` in attention.py and
    multi_latent_attention.py) use the same rule. Let S be the largest logit of a head or, if several heads share keys,
    of all these heads:

        g = tau / S if S > tau, else 1
        q rows times g^alpha,  k rows times g^(1 - alpha),  q_pe rows times g,  shared rotary keys unchanged

    This multiplies the logits of these heads by g. If S is not finite, nothing is scaled (g = 1), because a logit that
    is not finite says nothing about the size of the weights.

[Note: exact with any sharding]
    An all-reduce with MAX computes the largest logits over all ranks. A maximum does not depend on the order of its
    arguments, so all ranks get the same result and compute the same factors. Each rank scales the elements that it
    stores, so the scaled weights are bitwise equal to those of a single process. A cached layout table lists the
    elements that each rank stores.

[Note: variants that keep norms]
    The optimizer variant Hyperball restores the initial norm of each matrix, so it would undo the scaling in the next
    step. Hyperball does not need QK-clip either: the norms of query and key weights cannot grow, which bounds the
    logits. QK-clip therefore raises an error for weights whose variant keeps norms.

[Note: who reduces]
    Several sets of ranks can store weights of the same layer. Overlapping sets are merged, and the layer's maxima are
    taken over each merged set. A single all-reduce covers all layers. It runs over all ranks that are connected by
    weights, directly or indirectly: if ranks 0 and 1 store parts of one weight, and ranks 1 and 2 parts of another, it
    runs over ranks 0 to 2. The reduced vector has one slot for each layer and merged set, with one element per head. A
    rank contributes -inf to the slots of sets that do not contain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardmuon.comm.groups import GroupRef, Lane, Ranks, group_for, my_rank, num_ranks, wire_device
from shardmuon.comm.vote import Agreed, Ballot, Fault, Phase, digest_of
from shardmuon.errors import ExchangeError, Refused, about, fault_text, ranks_text, stays_itself
from shardmuon.host import Host, Hosts, Weight
from shardmuon.layout.bind import Listed, Table, TableCall, union
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import Group, named_params
from shardmuon.layout.pieces import ParamLayout
from shardmuon.options import PLACE_OPTIONS
from shardmuon.variants import WeightStage, stages_of
from shardmuon_qkclip.layers import Attention, Rows


class LayerLogits(NamedTuple):
    """Largest logits of one layer in one step, and the factors by which QK-clip scaled the logits.

    Attributes:
        name: Name of the layer.
        maxima: (num_heads,) fp32: largest logit of each head over all ranks; -inf if the head was not measured.
        gains: (num_groups,) fp32: for each key head, the factor by which the logits of its query heads were multiplied.
    """

    name: str
    maxima: Tensor
    gains: Tensor


class _Target(NamedTuple):
    """A weight of an attention layer, the roles of its rows, and the engine (storage adapter) that accesses its
    local tensor."""

    layer: Attention
    rows: Rows
    weight: Weight
    engine: Engine

    def key(self) -> object:
        """Return this weight's part of the layout table's cache key. It changes if the weight is replaced or its
        sharding changes."""
        stored, group = self.weight.stored, self.weight.group
        return self.rows, id(stored), self.engine, self.engine.signature(stored), *map(group.get, PLACE_OPTIONS)


# dict from (layer name, number of heads) to the ranks that store shards or copies of the layer's weights
_Told = dict[tuple[str, int], Ranks]


class _Bound(Agreed):
    """Layout table of the query and key weights. All ranks have the same table.

    Attributes:
        key: Cache key of the table. It changes if the weights or their sharding change.
        device: Device of the vector of largest logits.
        layouts: Layout of each weight, which lists the elements that each rank stores.
        slots: Slots of the vector of largest logits, in order. Each slot is a tuple (layer name, number of heads, ranks
            over which the maxima are taken).
    """

    slots: list[tuple[str, int, Ranks]]

    def __init__(self, table: Table, targets: Sequence[_Target]) -> None:
        super().__init__(table.component, table.token, table.sets)
        self.key, self.device = [target.key() for target in targets], targets[0].weight.stored.device
        self.layouts = table.layouts
        for target, layout in zip(targets, table.layouts, strict=True):
            rows, size = target.rows, layout.view.shape[target.rows.dim]
            # Every rank that stores this weight finds the same mismatch and raises this error.
            if size != rows.num():
                raise Refused(
                    f"{target.layer.name}: {rows.weight} has {size} rows, and its parts {rows.parts} repeated "
                    f"{rows.repeats} times make {rows.num()}"
                )

    def own_slots(self, flat: Tensor) -> dict[str, Tensor]:
        """Split `flat`, the vector that is reduced over ranks, into slots. Return a dict from layer name to the slot in
        which this rank stores the layer's largest logits."""
        parts = flat.split([num_heads for _, num_heads, _ in self.slots])
        return {name: part for (name, _, ranks), part in zip(self.slots, parts, strict=True) if my_rank() in ranks}


class Scaler(TableCall[_Bound]):
    """Reduce the largest logits over ranks, and scale the parts of query and key weights that this rank stores.

    Args:
        optimizer: The optimizer that updates the weights.
        layers: The attention layers to scale.
        tau: Largest allowed logit.
        alpha: Exponent of the factor for the queries, in [0, 1] (see [Note: the rule]).
        process_group: Ranks that train the same weights on different batches. Required only if weights are plain
            tensors and their parameter groups have no `process_group`.
        params: The model's parameters, keyed by name.

    Raises:
        ValueError: tau or alpha is out of range, or two layers have the same name.
    """

    phase = Phase.QK_CLIP
    doing = "scale queries and keys"
    rule = (
        "Every rank that shares a weight must pass the same tau and alpha, and those of process_group the same layers"
    )

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[Attention],
        tau: float = 100.0,
        alpha: float = 0.5,
        process_group: Any = None,
        params: Mapping[str, Tensor] | None = None,
    ) -> None:
        if not (tau > 0.0 and 0.0 <= alpha <= 1.0):
            raise ValueError(
                f"tau={tau!r}, alpha={alpha!r}: tau, the largest allowed logit, must be above 0 (100 is usual, "
                "math.inf only measures), and alpha, the queries' share, in [0, 1] (0.5 is usual)"
            )
        self._by_name = {layer.name: layer for layer in layers}
        if len(self._by_name) < len(layers):
            raise ValueError(f"layers: found {[layer.name for layer in layers]}, expected layers of unlike names")
        self._tau, self._alpha = float(tau), float(alpha)
        self._optimizer, self._params = optimizer, params or {}
        self._bound: _Bound | None = None
        self._group = GroupRef.of(process_group)
        self.beyond = None if self._group is None else union([self._group.ranks]) or None

    # -------------------------------------------------------------------------------------------------- one step

    @torch.no_grad()
    def reduce(
        self,
        measure: Callable[[], Mapping[str, Tensor]],  # returns a dict from layer name to a tensor of shape (num_heads,)
    ) -> None:
        """Compute the largest logits over all ranks, which `apply_` uses to scale the weights. Collective. Changes no
        weights.

        Args:
            measure: Function that returns this rank's largest logits. The result may omit layers that were not
                measured.

        Raises:
            Refused: An error occurred on this rank or on another rank, for example in `measure`. Raised on every rank.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        fault = Fault()
        with fault, about("QK-clip: the function logits="):
            self._given = dict(measure())
        try:
            bound, _ = self.agree(fault)
            self._all = _largest(self._own, bound.component, self._group)
        except Refused:  # all ranks raise Refused at the same point, so training can continue
            raise
        # The ranks are out of step: other ranks may still be waiting for this rank, or may have continued.
        except BaseException as error:
            if not self._is_alone:
                self._remember(f"{fault_text(error)}. This has scaled nothing on this rank, but ranks are out of step")
                if self._bound is not None:
                    # ranks that are waiting for this rank fail at once when their connections are closed
                    Lane.close_over(self._bound.component)
            raise

    @torch.no_grad()
    def apply_(self) -> tuple[LayerLogits, ...]:
        """Multiply this rank's rows of query and key weights by factors computed from the result of `reduce`.
        Collective, because the ranks vote on whether the scaling succeeded.

        Raises:
            ExchangeError: An error occurred on this or another rank during scaling, so some weights may be scaled and
                others not. The optimizer then refuses further steps. An interrupt or an out-of-memory error is raised
                unchanged on the rank on which it occurred.
        """
        bound, fault, done = self._bound, Fault(), tuple[LayerLogits, ...]()
        assert bound is not None, "reduced"
        with fault:
            done = self._scale(bound)
        try:
            fault.settle(bound.component, Phase.QK_CLIP)
        except (Refused, ExchangeError) as error:
            broken, cause = self._remember(f"{error}. Weights of queries and keys may be half scaled"), fault.cause
            if cause is not None and stays_itself(cause):
                raise cause from None
            raise ExchangeError(broken) from cause
        return done

    def _scale(self, bound: _Bound) -> tuple[LayerLogits, ...]:
        """Scale this rank's elements of each query and key weight. Return each layer's largest logits and scaling
        factors (gains)."""
        maxima = bound.own_slots(self._all.to(self._own.device))
        gains = {name: _gains(layer, maxima[name], self._tau) for name, layer in self._by_name.items()}
        of_heads = {name: _factors(layer, gains[name], self._alpha) for name, layer in self._by_name.items()}
        for target, layout in zip(self.find(), bound.layouts, strict=True):
            # If a framework splits a step into several calls, scale only the weights that the current call has updated.
            if math.isinf(self._tau) or not target.weight.now:
                continue
            dim, local = target.rows.dim, target.engine.storage(target.weight.stored)
            per_row = target.rows.factors(of_heads[target.layer.name])  # one factor for each row of the full weight
            per_row = per_row.to(local.device, torch.promote_types(local.dtype, torch.float32))
            for part, start in _views(local, layout, dim):
                part.mul_(per_row[start : start + part.shape[dim]].view(-1, *[1] * (part.ndim - 1 - dim)))
        return tuple(LayerLogits(name, maxima[name], gain) for name, gain in gains.items())

    def _remember(self, text: str) -> str:
        """Make the optimizer refuse further steps, as it does after an error in a step. Return the complete error
        message, with `text` as the reason."""
        text = f"QK-clip was broken off: {text}. {ExchangeError.RELOAD if self._is_alone else ExchangeError.REMEDY}"
        if hasattr(self._optimizer, "broken"):
            self._optimizer.broken = self._optimizer.broken or text
        return text

    @property
    def _is_alone(self) -> bool:
        return num_ranks() == 1 or (self._bound is not None and len(self._bound.component) == 1)

    # --------------------------------------------------------------------------- calls of TableCall: table and ballot

    def known(self) -> _Bound | None:
        return self._bound

    def is_current(self, kept: _Bound) -> bool:
        return kept.key == [target.key() for target in self.find()]

    def listed(self) -> list[Listed]:
        return [self._one_listed(target) for target in self.find()]

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        return [(weight.name, weight.stored, weight.group) for weight in self._weights()]

    def made(self, table: Table) -> tuple[_Bound, _Told]:
        found = self.find()
        sharing = [(ranks, {found[number].layer.name for number in of_set}) for ranks, of_set in table.sets.items()]
        mine = [(my_rank(),), self.beyond or ()]
        told = {
            (name, layer.num_heads): union([*mine, *(ranks for ranks, names in sharing if name in names)])
            for name, layer in self._by_name.items()
        }
        return _Bound(table, found), told

    def heard(self, kept: _Bound, everyone: Sequence[_Told]) -> None:
        """Merge the sets of ranks that store each layer's weights, and give each layer one slot per merged set in the
        vector of largest logits (see [Note: who reduces]). `everyone` contains one dict per rank, which maps layers to
        sets of ranks."""
        kept.slots = []
        for layer in sorted(set().union(*everyone)):
            connected: list[Ranks] = []
            for ranks in [theirs[layer] for theirs in everyone if layer in theirs]:
                touching = [other for other in connected if not set(other).isdisjoint(ranks)]
                connected = [other for other in connected if other not in touching] + [union([ranks, *touching])]
            kept.slots += [(*layer, ranks) for ranks in sorted(connected)]
        self._bound = kept

    def read(self, kept: _Bound) -> Ballot:
        num_slots = sum(num_heads for _, num_heads, _ in kept.slots)
        self._own = torch.full((num_slots,), -math.inf, dtype=torch.float32, device=kept.device)
        slots = kept.own_slots(self._own)
        for name, maxima in self._given.items():
            found = maxima.shape if isinstance(maxima, Tensor) else type(maxima).__name__
            if name not in slots or found != slots[name].shape:
                raise ValueError(
                    f"logits of {name!r}: found {found}, expected a tensor of the largest logit of each head, -inf for "
                    "heads that other ranks of a tensor-parallel group have. Layers and their numbers of heads are "
                    f"{ {layer.name: layer.num_heads for layer in self._by_name.values()} }"
                )
            slots[name].copy_(maxima.detach())
        self._own.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        sets = (*kept.sets, *(() if self.beyond is None else (self.beyond,)))
        return Ballot(self.phase, digests={ranks: digest_of((kept.token, self.lines(kept, ranks))) for ranks in sets})

    def lines(self, kept: _Bound, ranks: Ranks) -> list[str]:
        found = list(map(repr, self._by_name.values())) if ranks == self.beyond else []
        return [f"tau={self._tau!r} alpha={self._alpha!r}", f"{len(found)} attention layers", *found]

    # ------------------------------------------------------------------------------------------- finding the weights

    @property
    def host(self) -> Host | None:
        """Integration with the framework (such as DeepSpeed) that provides the optimizer's tensors, or None without a
        framework."""
        hosts = getattr(self._optimizer, "hosts", None)
        return hosts.active if isinstance(hosts, Hosts) else None

    def _weights(self) -> list[Weight]:
        """List all weights that the optimizer updates, including a framework's copies of parameters."""
        if self.host is not None:
            return self.host.weights(self._optimizer)
        groups = enumerate(self._optimizer.param_groups)
        return [Weight(name, p, p, group) for index, group in groups for name, p in named_params(group, index)]

    def find(self) -> list[_Target]:
        """Find all weights of the attention layers in the optimizer. The optimizer contains the model's parameters or,
        with some frameworks, copies of them with the same names.

        Raises:
            ValueError: A weight is not in the optimizer, must not be scaled, or belongs to two layers.
        """
        weights = self._weights()
        known: dict[object, Weight] = {key: w for w in weights for key in (w.name, id(w.param))}
        found, has_copies = dict[int, _Target](), self.host is not None
        for layer, rows in [(one, rows) for one in self._by_name.values() for rows in one.rows]:
            param = self._params.get(rows.weight)
            weight = known.get(id(param)) or known.get(rows.weight)
            other = None if weight is None or weight.param is param or has_copies else param
            if weight is None or (other is not None and weight.param.dtype == other.dtype):
                raise ValueError(
                    f"{layer.name}: {rows.weight} is not among the weights of {self._optimizer.__class__.__name__}, so "
                    "it cannot be scaled with the others. Make the optimizer of this very model (another tensor of "
                    "that name is none of its weights), with names and before a layer is frozen, or leave the layer "
                    "out with layers="
                )
            first = found.get(id(weight.stored))
            if first is not None:
                raise ValueError(
                    f"{first.rows.weight} of {first.layer.name} and {rows.weight} of {layer.name} are one weight: no "
                    "one factor is right for both. Leave the layers out with layers="
                )
            self._check_may_be_scaled(layer, weight, weight.param if param is None else param)
            with about(weight.name):
                found[id(weight.stored)] = _Target(layer, rows, weight, engine_for(weight.stored, weight.group))
        return list(found.values())

    def _check_may_be_scaled(self, layer: Attention, weight: Weight, param: Tensor) -> None:
        """Raise ValueError if `tau` is finite and scaling a weight would be useless or wrong: the layer normalizes the
        queries or keys after their projection, the weight is frozen, or the optimizer variant keeps the weight's norm.
        """
        stages = stages_of(weight.group) if weight.group.get("use_muon") else ()
        reasons = {
            f"{layer.normed} normalizes the queries or keys that it makes, and bounds the logits": layer.normed,
            f"it is variant={weight.group.get('variant')!r}, which keeps norms": any(
                isinstance(stage, WeightStage) for stage in stages
            ),
            "it is frozen": not param.requires_grad,
        }
        why = next((text for text, holds in reasons.items() if holds), None)
        if why is not None and math.isfinite(self._tau):
            raise ValueError(
                f"{weight.name}: {why}, so QK-clip must not scale it. Leave the layer out with layers=, or write "
                "tau=math.inf to measure only"
            )

    def _one_listed(self, target: _Target) -> Listed:
        """Return a weight's entry in the layout table, which lists the elements that each rank stores.

        Raises:
            ValueError: The weight is a plain tensor, and it is unknown which ranks hold replicas of the weight.
        """
        # List the weight as a single tensor, not as the matrices that it contains, because QK-clip scales rows.
        weight, group = target.weight, {**target.weight.group, "use_muon": False}
        is_unknown = type(target.engine) is Engine and self._group is None and group.get("process_group") is None
        if is_unknown and num_ranks() > 1:
            raise ValueError(
                f"{weight.name}: it is a plain tensor on each of {num_ranks()} ranks, and which of them see other "
                "batches with the same weights is not known. Write process_group=torch.distributed.group.WORLD if "
                f"all do (DDP), or the data- and context-parallel group; process_group=({my_rank()},) for this "
                "rank alone"
            )
        return Listed(weight.name, target.rows.weight, weight.stored, group, None, f"{target.layer} {target.rows}")


def _largest(
    flat: Tensor,
    ranks: Ranks,
    hint: GroupRef | None,
) -> Tensor:
    """Compute the elementwise maximum, over `ranks`, of each rank's vector `flat`. Collective among `ranks`."""
    if len(ranks) == 1:
        return flat
    group = group_for(ranks, None if hint is None else hint.live())
    flat = flat.to(wire_device(flat.device, ranks))
    where = f"QK-clip: the largest logits of ranks {ranks_text(ranks)}"
    with ExchangeError.naming(lambda: where, "Nothing was scaled here"):
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    return flat


def _views(local: Tensor, layout: ParamLayout, dim: int) -> Iterator[tuple[Tensor, int]]:
    """Yield each part of a weight that this rank stores, as (view, start). The view has as many dims as the weight, and
    `start` is the index, along `dim` of the weight, at which the part begins."""
    for start, sizes, strides, offset in layout.spans(my_rank(), local.stride()):
        yield local.as_strided(sizes, strides, local.storage_offset() + offset), start[dim]


# ---------------------------------------------------------------------------------------------------------- the rule


def _gains(
    layer: Attention,
    maxima: Tensor,  # shape (num_heads,), fp32
    tau: float,
) -> Tensor:  # shape (num_groups,), fp32
    """Compute the factor g by which QK-clip multiplies the logits of each key head (see [Note: the rule])."""
    largest = maxima.view(layer.num_groups, -1).amax(dim=1)
    over = (largest > tau) & torch.isfinite(largest)
    # The dividend is a tensor, because torch computes number / tensor as number * (1 / tensor), which is rounded twice.
    return torch.where(over, torch.full_like(largest, tau) / largest, torch.ones_like(largest))


def _factors(
    layer: Attention,
    gain: Tensor,  # shape (num_groups,)
    alpha: float,
) -> dict[Any, Tensor]:
    """Compute the factors by which QK-clip multiplies the rows of each role. The roles "q" (queries) and "q_pe" (rotary
    part of queries) have one factor per query head, "k" (keys) has one per key head, and "" (other rows) has the single
    factor 1."""
    of_head = gain.repeat_interleave(layer.num_heads // layer.num_groups)
    return {"": gain.new_ones(1), "q": of_head.pow(alpha), "q_pe": of_head, "k": gain.pow(1.0 - alpha)}
