"""Scale rows of sharded weights by maxima of logits that ranks have measured: found once, then one reduction a step.

[Note: exact on any sharding]
    A weight is multiplied element by element with a factor that every rank computes alike, from maxima that are the
    same on every rank after a reduction by max, in which no order matters. So a rank scales what it stores and the bits
    are those of one process. Where the pieces lie is said by a layout table, which all ranks make together and keep.

[Note: who reduces]
    A layer's weights may lie on several sets of ranks, of which each overlaps with another. Its maxima are reduced over
    all ranks that the sets connect, in one group. Layers with the same ranks go together.

[Note: weights that layers share]
    A weight is scaled once, however many layers have it. Layers that share one are scaled by the same factors: those of
    the largest logit of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon.attention.heads import Attention, Rows, check_numbers, factors, gains
from shardmuon.comm.component import Ranks, in_order
from shardmuon.comm.faults import Fault, Unlike
from shardmuon.comm.groups import GroupRef, group_for, my_rank, num_ranks, talking_device
from shardmuon.comm.lane import lane_of
from shardmuon.comm.vote import Phase
from shardmuon.errors import (
    OUT_OF_MEMORY,
    RELOAD,
    REMEDY,
    ExchangeError,
    Refused,
    fault_text,
    naming,
    ranks_text,
    stays_itself,
)
from shardmuon.host import Core, Hosts, Weight, clipped_by_host
from shardmuon.layout.bind import Listed, Table, settle
from shardmuon.layout.calls import Call, Kept, Said, agree, digest_of
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import Group, named_params
from shardmuon.layout.pieces import Box, spans_of
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints, Matrix, MatrixView, matrix_view
from shardmuon.options import view_options
from shardmuon.routing.roles import find_places
from shardmuon.step.kept import Matrices, forget_norms

__all__ = ["Scaled", "Scaler", "Source", "weights_of"]

Source = Optimizer | nn.Module


def weights_of(source: Source) -> list[Weight]:
    """Every weight of an optimizer as it is stepped, or of a model."""
    if isinstance(source, nn.Module):
        return [Weight(places[0].name, param, param, {}) for param, places in find_places(source)]
    hosts = getattr(source, "hosts", None)
    host = hosts.active if isinstance(hosts, Hosts) else None
    if host is not None:
        return host.weights(source)
    return [
        Weight(name, param, param, group)
        for index, group in enumerate(source.param_groups)
        for name, param in named_params(group, index)
    ]


def named_now(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by every name that they have."""
    return {place.name: param for param, places in find_places(model) for place in places}


class Scaled(NamedTuple):
    """What was done with a layer.

    Attributes:
        maxima: (num_heads,), fp32: the largest logits over all ranks; -inf where none was measured.
        gains: (num_groups,), fp32: what the logits of each key head were scaled by.
    """

    maxima: Tensor
    gains: Tensor


class Reduced(NamedTuple):
    """The maxima over all ranks, and what follows from them.

    Attributes:
        scaled: What is to be done with each layer.
        factors: What its rows are multiplied with.
        fault: What was raised on this rank after the ranks had agreed; `apply_` tells the others.
    """

    scaled: list[Scaled]
    factors: list[Tensor]
    fault: Fault


@dataclass(frozen=True, slots=True)
class _Target:
    """A weight of one or more layers, with its rows."""

    layers: tuple[int, ...]
    rows: Rows
    weight: Weight
    places: Tensor  # (rows,), int64, on the weight's device
    param: Tensor | None  # the model's, if it is known
    frozen: bool

    @property
    def layer(self) -> int:
        """The first; the others have the same factors."""
        return self.layers[0]


class _Lies(NamedTuple):
    """How this rank stores a weight, as far as it can tell alone: another table is needed when it changes."""

    engine: Engine
    signature: object
    options: tuple[Any, ...]

    @classmethod
    def of(cls, weight: Weight) -> _Lies:
        """That of a weight as it is now."""
        engine = engine_for(weight.stored, {**weight.group, "use_muon": False})
        return cls(engine, engine.signature(weight.stored), tuple(weight.group.get(key) for key in _OPTIONS))


_OPTIONS = ("rank_local", "process_group", "tp_group", "partition_dim", "partition_stride")


@dataclass(frozen=True, slots=True)
class _Found:
    """The weights of some layers.

    Attributes:
        layers: The layers.
        targets: Their weights.
        lies: Of each weight.
        listed: ids of all that was stepped then.
        together: Of each layer those that it shares weights with, itself too.
        spared: Layers that are not scaled.
    """

    layers: tuple[Attention, ...]
    targets: tuple[_Target, ...]
    lies: tuple[_Lies, ...]
    listed: frozenset[int]
    together: tuple[tuple[int, ...], ...]
    spared: frozenset[int]

    def text(self, target: _Target) -> str:
        """What ranks that share a weight must have alike."""
        family = self.together[target.layer]
        heads = [(self.layers[at].name, self.layers[at].num_heads, self.layers[at].num_groups) for at in family]
        return f"{heads} {target.rows} {target.layers} {target.frozen} {target.layer in self.spared}"


class _Told(NamedTuple):
    """What a rank tells its component of a new table.

    Attributes:
        sets: Sets of ranks that share some layers -> names of these layers.
        beyond: The ranks of its `process_group`.
        layers: Number and digest of all that it lists.
    """

    sets: dict[tuple[Ranks, ...], list[str]]
    beyond: Ranks | None
    layers: tuple[int, bytes]


class _Bound(Kept):
    """A layout table of the weights, which all ranks have.

    Attributes:
        found: The weights, index for index the table's parameters.
        beyond: The ranks of `process_group`.
        layouts: Of each weight.
        matrices: Which of its matrices each place of its rows is in.
        reductions: Ranks that share layers -> these, in the order in which they reduce; see [Note: who reduces].
    """

    def __init__(self, table: Table, found: _Found, beyond: Ranks | None) -> None:
        super().__init__(table)
        self.found, self.beyond, self.layouts = found, beyond, table.layouts
        for target, layout in zip(found.targets, self.layouts, strict=True):
            size = layout.view.shape[target.rows.dim]
            if size != target.rows.total:  # the layout is the same on every rank that has it
                raise Unlike(
                    f"{found.layers[target.layer].name}: {target.rows.weight} has {size} rows, and its parts "
                    f"{target.rows.parts} repeated {target.rows.repeats} times make {target.rows.total}"
                )
        shapes = [layout.view.shape for layout in self.layouts]
        self.matrices = [_matrices(target, shape) for target, shape in zip(found.targets, shapes, strict=True)]
        self.reductions: dict[Ranks, tuple[int, ...]] = {}

    def tells(self) -> _Told:
        """What the other ranks hear of it."""
        sets: dict[tuple[Ranks, ...], list[str]] = {}
        beyond = () if self.beyond is None else (self.beyond,)
        for layer, family in zip(self.found.layers, self.found.together, strict=True):
            mine = {n for n, target in enumerate(self.found.targets) if not set(family).isdisjoint(target.layers)}
            of_layer = [ranks for ranks, numbers in self.sets.items() if not mine.isdisjoint(numbers)]
            sets.setdefault(tuple(in_order([*of_layer, *beyond])), []).append(layer.name)
        layers = self.found.layers
        return _Told(sets, self.beyond, (len(layers), digest_of(repr(layers).encode())))

    def hear(self, everyone: Mapping[int, _Told]) -> None:
        """Find out who reduces with whom, from what each rank tells.

        Raises:
            Unlike: Ranks of a `process_group` list different layers.
        """
        for ranks in dict.fromkeys(theirs.beyond for theirs in everyone.values() if theirs.beyond is not None):
            for rank in ranks:
                first, other = everyone[ranks[0]].layers, everyone[rank].layers
                if first != other:
                    raise Unlike(
                        f"process_group has ranks {ranks_text(ranks)}, which list different attention layers: rank "
                        f"{ranks[0]} has {first[0]}, rank {rank} {other[0]}. Pass ranks that hold the same layers "
                        "(data- and context-parallel ones)"
                    )
        names = [layer.name for layer in self.found.layers]
        members: dict[Ranks, list[int]] = {}
        for number, ranks in enumerate(_connected(my_rank(), names, everyone)):
            members.setdefault(ranks, []).append(number)
        # by name: what other ranks list besides may stand between
        order = {ranks: sorted(members[ranks], key=lambda number: names[number]) for ranks in in_order(members)}
        self.reductions = {ranks: tuple(numbers) for ranks, numbers in order.items()}


def _connected(rank: int, names: Sequence[str], everyone: Mapping[int, _Told]) -> list[Ranks]:
    """All ranks that sets connect with this one, of each of its layers."""
    numbers: dict[Ranks, int] = {}
    sets_of: dict[str, dict[int, set[int]]] = {}  # name -> rank -> numbers of its sets
    for other, theirs in everyone.items():
        for sets, of_sets in theirs.sets.items():
            these = {numbers.setdefault(ranks, len(numbers)) for ranks in sets}
            for name in of_sets:
                sets_of.setdefault(name, {}).setdefault(other, set()).update(these)
    every, found = list(numbers), []
    for name in names:
        reached, seen, todo = {rank}, set[int](), [rank]
        while todo:
            for number in sets_of[name].get(todo.pop(), set()) - seen:
                seen.add(number)
                todo += set(every[number]) - reached
                reached.update(every[number])
        found.append(tuple(sorted(reached)))
    return found


class Scaler:
    """The weights of some attention layers, where this rank keeps them.

    Args:
        source: Whose weights are scaled: an optimizer that steps them, or a model of which nobody keeps copies.
        layers: The layers.
        params: Parameter name -> the model's parameter, where names of the source may differ.
        today: The model's parameters by name as they are now. A weight that is found by its name alone must be among
            them, as another model's may have the same name.
        spares_frozen: Leave layers alone of which a weight is frozen.
        process_group: Ranks that see other batches with the same weights, beyond those that share the weights.
    """

    def __init__(
        self,
        source: Source,
        layers: Sequence[Attention],
        *,
        params: Mapping[str, Tensor] | None = None,
        today: Callable[[], Mapping[str, Tensor]] | None = None,
        spares_frozen: bool = False,
        process_group: Any = None,
    ) -> None:
        self._source, self._params = source, dict(params or {})
        self._today = today or (lambda: named_now(source) if isinstance(source, nn.Module) else {})
        self._spares_frozen = spares_frozen
        self._bound: _Bound | None = None
        self.choose(layers, process_group)

    def choose(self, layers: Sequence[Attention], process_group: Any) -> None:
        """Other arguments from now on. The table stays until the other ranks have heard of it."""
        self.layers, self._group = tuple(layers), GroupRef.of(process_group)
        ranks = () if self._group is None else tuple(sorted(self._group.ranks))
        self.beyond: Ranks | None = ranks if len(ranks) > 1 else None

    def is_for(self, layers: Sequence[Attention], process_group: GroupRef | None) -> bool:
        """True if it has these arguments."""
        return self.layers == tuple(layers) and self._group == process_group

    # -------------------------------------------------------------------------------------------------- one step

    @torch.no_grad()
    def reduce(self, measure: Callable[[], Mapping[str, Tensor]], tau: float, alpha: float) -> Reduced:
        """The maxima over all ranks, and what rows are multiplied with. Collective; changes no weight.

        Args:
            measure: Layer -> maxima of this rank, (num_heads,). Layers may be missing. The user's function, so it
                may raise anything.
            tau, alpha: See [Note: the rule] in heads.py.

        Raises:
            Refused: Something is wrong here or on another rank. On every rank.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        try:
            return self._reduce(measure, tau, alpha)
        except Refused:  # all ranks raise, and may go on
            raise
        except BaseException as error:
            self._out_of_step(error)
            raise

    def _reduce(self, measure: Callable[[], Mapping[str, Tensor]], tau: float, alpha: float) -> Reduced:
        fault, given = Fault(), dict[str, Tensor]()
        with fault:
            fault.add(check_numbers(tau, alpha))
            given = self._ask(measure)  # type: ignore[assignment]
        call = _Clipping(self, given, tau, alpha, self.beyond)
        bound, _ = agree(call, fault)
        largest: list[Tensor] = []
        for ranks, flat in zip(bound.reductions, call.flats, strict=True):
            largest.append(_largest(flat, ranks, self._group))
        reduced = Reduced([], [], Fault())
        with reduced.fault:  # whoever has voted waits for this rank in `apply_`
            vectors, found = call.vectors, bound.found
            for numbers, flat in zip(bound.reductions.values(), largest, strict=True):
                for number, part in zip(numbers, flat.split([len(vectors[n]) for n in numbers]), strict=True):
                    vectors[number] = part.to(vectors[number].device)
            for number, (layer, family) in enumerate(zip(found.layers, found.together, strict=True)):
                of_family = [vectors[other] for other in family]
                most = of_family[0] if len(family) == 1 else torch.stack(of_family).amax(dim=0)
                gain = gains(layer, most, math.inf if number in found.spared else tau)
                reduced.scaled.append(Scaled(vectors[number], gain))
                reduced.factors.append(factors(layer, gain, alpha))
        return reduced

    def _ask(self, measure: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """What the user's function returns."""
        try:
            return measure()
        except OUT_OF_MEMORY:
            raise
        except Exception as wrong:
            raise ValueError(
                f"QK-clip: the function logits= raised {type(wrong).__name__}: {wrong}. It must return the largest "
                f"logit of each head, as tensors, of the layers {[layer.name for layer in self.layers]}"
            ) from wrong

    @torch.no_grad()
    def apply_(self, reduced: Reduced) -> None:
        """Multiply this rank's rows with the factors that `reduce` has returned. Collective: whether every rank has.

        Raises:
            ExchangeError: Here or on another rank something was raised meanwhile, so that weights may be half scaled,
                which the optimizer remembers. On its own rank an interrupt and being out of memory stay what they are.
        """
        bound, fault = self._bound, Fault()
        assert bound is not None, "reduced"
        fault.add(reduced.fault.text, reduced.fault.cause, own=False)
        if fault.text is None:
            with fault:
                self._scale(bound, reduced.factors)
        try:
            settle(fault, bound.component, Phase.QK_CLIP)
            return
        except Refused as refused:
            text = str(refused)
        except ExchangeError as error:
            self.remember(str(error))
            raise
        broken = self.remember(f"{text}. Weights of queries and keys may be half scaled")
        if fault.cause is not None and stays_itself(fault.cause):
            raise fault.cause
        raise ExchangeError(broken) from fault.cause

    def remember(self, text: str) -> str:
        """Let the optimizer refuse further steps, as after an error in one of its own; returns why."""
        alone = num_ranks() == 1 or (self._bound is not None and len(self._bound.component) == 1)
        text = f"QK-clip was broken off: {text}. {RELOAD if alone else REMEDY}"
        core = self._core()
        if core is not None:
            core.broken = core.broken or text
        return text

    def _out_of_step(self, error: BaseException) -> None:
        """Something else than a refusal was raised in `reduce`: other ranks may wait, or have gone on."""
        if num_ranks() == 1:
            return
        self.remember(f"{fault_text(error)}. This has scaled nothing on this rank, but ranks are out of step")
        bound = self._bound
        if bound is not None and len(bound.component) > 1 and not isinstance(error, ExchangeError):
            lane_of(bound.component).close()  # whoever waits for this rank fails at once

    def _core(self) -> Core | None:
        """The optimizer, if it is one of ours."""
        return self._source if isinstance(getattr(self._source, "hosts", None), Hosts) else None

    def _scale(self, bound: _Bound, found: Sequence[Tensor]) -> None:
        now = self._listed()
        targets = zip(bound.found.targets, bound.found.lies, bound.layouts, bound.matrices, strict=True)
        for target, lies, layout, matrices in targets:
            stored = target.weight.stored
            if target.layer in bound.found.spared or not now.get(id(stored), True):
                continue  # a later call of the same training step brings it
            factor = found[target.layer]
            per_row = factor[target.places.to(factor.device)]  # of the whole weight, on every rank
            if per_row.device.type == "cpu" and bool((per_row == 1.0).all()):  # elsewhere the host would wait
                continue
            self._forget_norms(stored, per_row, matrices)
            local = lies.engine.storage(stored)
            if not local.numel():
                continue
            per_row = per_row.to(local.device, torch.float64 if local.dtype == torch.float64 else None)
            for view, start in _views(local, layout, target.rows.dim):
                shape = [1] * view.ndim
                shape[target.rows.dim] = size = view.shape[target.rows.dim]
                view.mul_(per_row[start : start + size].view(shape))

    def keeping(self) -> tuple[Core, ...]:
        """Who keeps norms of the weights."""
        mine = self._core()
        if mine is None:
            return ()
        host = mine.hosts.active
        return (mine,) if host is None else tuple(host.keeping(mine))

    def unmeasured(self, largest: Sequence[float]) -> list[str]:
        """Names of layers without a logit on any rank, whose queries have gradients all the same. Only one rank of
        those that share a layer names it.

        Args:
            largest: Of each layer, as reduced.
        """
        bound, found = self._bound, []
        assert bound is not None, "reduced"
        elsewhere = {n for ranks, numbers in bound.reductions.items() if my_rank() != ranks[0] for n in numbers}
        for target in bound.found.targets:
            if target.rows.num("q") and target.weight.param.grad is not None:
                mine = [n for n in target.layers if largest[n] == -math.inf and n not in elsewhere]
                found += [self.layers[number].name for number in mine]
        return list(dict.fromkeys(found))

    def _forget_norms(self, stored: Tensor, per_row: Tensor, matrices: Matrices | None) -> None:
        """Norms of this weight that variants keep are those before it was scaled."""
        for core in self.keeping():
            if stored in core.state:
                forget_norms(core.state[stored], core.settled, per_row, matrices)

    def vectors(self, given: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
        """One vector for each layer, -inf where nothing was measured."""
        if not isinstance(given, Mapping):
            raise ValueError(
                f"QK-clip: logits are {type(given).__name__}, expected layer -> the largest logits of its heads"
            )
        unknown = sorted(set(given) - {layer.name for layer in self.layers})
        if unknown:
            raise ValueError(f"logits of {unknown[0]!r}: no such layer. Layers are {[x.name for x in self.layers]}")
        found = []
        for layer in self.layers:
            maxima = given.get(layer.name)
            if maxima is None:
                maxima = torch.full((layer.num_heads,), -torch.inf, device=device)
            if not isinstance(maxima, Tensor) or tuple(maxima.shape) != (layer.num_heads,):
                what = tuple(maxima.shape) if isinstance(maxima, Tensor) else type(maxima).__name__
                raise ValueError(
                    f"logits of {layer.name!r}: found {what}, expected a tensor of shape ({layer.num_heads},), the "
                    "largest logit of each head; -inf for heads that other ranks of a tensor-parallel group have"
                )
            found.append(maxima.detach().float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf))
        return found

    # ------------------------------------------------------------------------------------------------ where it lies

    def check(self) -> None:
        """Raise ValueError if a weight of a layer is not there or cannot be scaled, as far as this rank can tell."""
        if isinstance(self._source, nn.Module) or not _is_hosted(self._source):
            self._targets(strictly=True)

    def _targets(self, *, strictly: bool = False) -> list[_Target]:
        """Every weight of the layers. Raises ValueError if one is not there, unless it was frozen and taken out."""
        weights = weights_of(self._source)
        copied = isinstance(self._source, Optimizer) and _is_hosted(self._source)
        if isinstance(self._source, nn.Module):
            _refuse_copied(weights)
        by_param = {id(w.param): w for w in weights}
        by_name = {w.name: w for w in weights}
        today = {} if copied else self._today()
        found: dict[int, _Target] = {}
        for number, layer in enumerate(self.layers):
            for rows in layer.rows:
                known = self._params.get(rows.weight)
                now = today.get(rows.weight, known)
                weight = by_param.get(id(now)) or by_param.get(id(known))
                if weight is None and (copied or now is None or _is_copy(by_name.get(rows.weight), now)):
                    weight = by_name.get(rows.weight)
                if weight is None:
                    frozen = self._is_frozen(now)
                    if frozen and not strictly:
                        continue
                    raise ValueError(self._not_there(layer, rows, frozen, rows.weight in by_name))
                param, places = known if copied else now, layer.places(rows).to(weight.stored.device)
                one = _Target((number,), rows, weight, places, param, self._is_frozen(param))
                other = found.get(id(weight.stored))
                if other is not None:
                    self._refuse_unlike(other, one)
                    one = replace(other, layers=(*other.layers, number))
                found[id(weight.stored)] = one
        if not found:
            raise ValueError(f"{self.layers[0].name}: all attention layers are frozen and no longer the optimizer's")
        return list(found.values())

    def _is_frozen(self, param: Tensor | None) -> bool:
        return self._spares_frozen and param is not None and not param.requires_grad

    def _not_there(self, layer: Attention, rows: Rows, frozen: bool, named: bool) -> str:
        holder = self._source.__class__.__name__
        why = ""
        if frozen:
            why = " It is frozen (requires_grad=False); unfrozen when the optimizer is made, it would be."
        elif named:
            why = f" {holder} has a weight of this name, which is another tensor than the model's: of another model?"
        return (
            f"{layer.name}: {rows.weight} is not among the weights of {holder}, so it cannot be scaled "
            f"with the others.{why} Give it to the optimizer with its name, or leave the layer out with layers="
        )

    def _refuse_unlike(self, first: _Target, second: _Target) -> None:
        """Raise ValueError if layers do not share a weight in the same way: see [Note: weights that layers share]."""
        one, other = (self.layers[target.layer] for target in (first, second))
        alike = (one.num_heads, one.num_groups) == (other.num_heads, other.num_groups)
        if one is other or not alike or replace(second.rows, weight=first.rows.weight) != first.rows:
            raise ValueError(
                f"{first.rows.weight} of {one.name} and {second.rows.weight} of {other.name} are one weight, with rows "
                f"{first.rows.parts} and {second.rows.parts}: no one factor is right for both. Layers may share a "
                "weight if it is the same to all of them, and queries none with keys; leave the layers out with layers="
            )

    def known(self) -> _Bound | None:
        """The table of the last call, if the default group is still the same."""
        return self._bound if self._bound is not None and self._bound.is_of_this_world else None

    def is_current(self, bound: _Bound) -> bool:
        """True if a table is for the arguments, and weights are those that were found."""
        found = bound.found
        if found.layers != self.layers or bound.beyond != self.beyond:
            return False
        now = {id(w.stored): w for w in self.weights()}
        for target, lies in zip(found.targets, found.lies, strict=True):
            stored = target.weight.stored
            gone = id(stored) in found.listed and id(stored) not in now
            if gone or _Lies.of(now.get(id(stored), target.weight)) != lies:
                return False
        num_found = sum(len(target.layers) for target in found.targets)
        if num_found < sum(len(layer.rows) for layer in self.layers) and found.listed != now.keys():
            return False  # what was taken out may have come back
        return all(target.frozen == self._is_frozen(target.param) for target in found.targets)

    def weights(self) -> list[Weight]:
        """Every weight of the source."""
        return weights_of(self._source)

    def _listed(self) -> dict[int, bool]:
        """id of what is stepped -> True if this call of `step` has stepped it."""
        return {id(w.stored): w.now for w in self.weights()}

    def find(self) -> tuple[_Found, list[Listed]]:
        """The weights of the layers, and what the layout table needs to know of each.

        Raises:
            ValueError: One is not there, or cannot be scaled.
        """
        targets = tuple(self._targets())
        together = _together(len(self.layers), [target.layers for target in targets])
        free = [layer for target in targets if not target.frozen for layer in target.layers]
        whole = {number for number, layer in enumerate(self.layers) if free.count(number) == len(layer.rows)}
        spared = {number for number, layers in enumerate(together) if not whole.issuperset(layers)}
        groups, lies = [], []
        for target in targets:
            try:
                lies.append(_Lies.of(target.weight))
                groups.append(self._group_of(target.weight))
            except ValueError as wrong:
                raise ValueError(f"{target.weight.name}: {wrong}") from None
        found = _Found(self.layers, targets, tuple(lies), frozenset(self._listed()), together, frozenset(spared))
        listed = [
            Listed(target.weight.name, target.rows.weight, target.weight.stored, group, None, found.text(target))
            for target, group in zip(targets, groups, strict=True)
        ]
        return found, listed

    def _group_of(self, weight: Weight) -> Group:
        """The options of a weight; those of a plain one also say over which ranks it is replicated.

        Raises:
            ValueError: Nobody has said so; the message lacks the name.
        """
        group: dict[str, Any] = {**weight.group, "use_muon": False}  # no matrices are read
        engine, replicas = engine_for(weight.stored, group), GroupRef.of(group.get("process_group"))
        if group.get("rank_local") or (replicas is not None and not replicas.ranks):
            replicas = None
        if replicas is None and type(engine) is Engine and not group.get("rank_local"):
            replicas = group["process_group"] = self._group
        alone = engine.ties(weight.stored, group).sets == ((my_rank(),),)
        if alone and num_ranks() > 1 and self._group is None and replicas is None:
            raise ValueError(
                f"it is a plain tensor on each of {num_ranks()} ranks, and which of them see other batches with the "
                "same weights is not known. Write process_group=torch.distributed.group.WORLD if all do (DDP), or the "
                f"data- and context-parallel group; process_group=({my_rank()},) for this rank alone"
            )
        return group

    def keep(self, bound: _Bound) -> None:
        """Remember a table."""
        self._bound = bound


@dataclass
class _Clipping(Call[_Bound]):
    """This rank's side of a reduction.

    Attributes:
        scaler: Whose weights are scaled.
        given: Layer -> maxima of this rank.
        tau, alpha: See [Note: the rule] in heads.py.
        beyond: The ranks of `process_group`.
        found: The weights, of a new table.
        vectors: The maxima of each layer.
        flats: The same side by side, for each reduction.
    """

    scaler: Scaler
    given: Mapping[str, Tensor]
    tau: float
    alpha: float
    beyond: Ranks | None
    found: _Found | None = None
    vectors: list[Tensor] = field(default_factory=list)
    flats: list[Tensor] = field(default_factory=list)

    phase = Phase.QK_CLIP
    doing = "scale queries and keys"
    rule = "Every rank that shares a weight must pass the same tau and alpha"

    def known(self) -> _Bound | None:
        return self.scaler.known()

    def is_current(self, kept: _Bound) -> bool:
        return self.scaler.is_current(kept)

    def listed(self) -> list[Listed]:
        self.found, listed = self.scaler.find()
        return listed

    def waiting(self) -> list[tuple[Tensor, Group]]:
        return [(weight.stored, weight.group) for weight in self.scaler.weights()]

    def made(self, table: Table) -> tuple[_Bound, _Told]:
        assert self.found is not None, "listed"
        bound = _Bound(table, self.found, self.beyond)
        return bound, bound.tells()

    def heard(self, kept: _Bound, everyone: Sequence[_Told]) -> None:
        kept.hear(dict(zip(kept.component, everyone, strict=True)))
        self.scaler.keep(kept)

    def read(self, kept: _Bound) -> Said:
        device = kept.found.targets[0].weight.stored.device
        self.vectors = self.scaler.vectors(self.given, device)
        self.flats = []
        for numbers in kept.reductions.values():
            parts = [self.vectors[number] for number in numbers]
            self.flats.append(torch.cat([part.to(parts[0].device) for part in parts]))
        self.scaler.keeping()  # takes over what was loaded: where the others hear of it if that fails
        digest = digest_of(kept.token + self._text.encode())
        beyond = () if kept.beyond is None else (kept.beyond,)
        return Said(dict.fromkeys((*kept.sets, *beyond), digest))

    def lines(self, kept: _Bound, ranks: Ranks) -> list[str]:
        return [self._text]

    @property
    def _text(self) -> str:
        return f"tau={float(self.tau)!r} alpha={float(self.alpha)!r}"


def _is_copy(weight: Weight | None, param: Tensor) -> bool:
    """Whether a weight of a parameter's name is its copy in another precision, as mixed precision steps it."""
    if weight is None:
        return False
    return param.dtype != weight.param.dtype or getattr(param, "main_param", None) is weight.param


def _together(num_layers: int, shared: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Of each layer those that it shares weights with, over others too."""
    family = [{layer} for layer in range(num_layers)]
    for layers in shared:
        joined = set().union(*(family[layer] for layer in layers))
        for layer in joined:
            family[layer] = joined
    return tuple(tuple(sorted(layers)) for layers in family)


def _matrices(target: _Target, shape: Ints) -> Matrices | None:
    """By the options of a group of Muon's; None: one alone, or a place is in several."""
    group = target.weight.group
    if len(shape) != 2 or not group.get("use_muon") or "view" not in group:
        return None
    view = matrix_view(shape, **view_options(group))
    number = torch.full((shape[target.rows.dim],), -1, device="cpu")
    for at, matrix in enumerate(view.matrices):
        here = _indices(view, matrix, target.rows.dim)
        if bool((number[here] >= 0).any()):
            return None
        number[here] = at
    whole = len(view.matrices) < 2 or bool((number < 0).any())
    return None if whole else Matrices(number.to(target.places.device), len(view.matrices))


def _indices(view: MatrixView, matrix: Matrix, dim: int) -> Tensor:  # 1-D, int64
    """The indices along a dim of a 2-D tensor at which a matrix has elements."""
    at = dim + (0 <= view.split_dim < dim)
    every = torch.arange(view.shape[dim], device="cpu")
    rows = slice(matrix.start[at], matrix.start[at] + matrix.sizes[at])
    if view.split_dim != dim:
        return every[rows]
    places = slice(matrix.start[at + 1], matrix.start[at + 1] + matrix.sizes[at + 1])
    return every.view(view.fine[at : at + 2])[rows, places].flatten()


def _refuse_copied(weights: Sequence[Weight]) -> None:
    """Raise ValueError for a model whose optimizer steps copies of its weights."""
    copied = [w.name for w in weights if hasattr(w.param, "main_param")]
    if copied or clipped_by_host(w.param for w in weights) is not None:
        raise ValueError(
            f"{(copied or [weights[0].name])[0]}: a framework (DeepSpeed, Megatron) steps copies of the model's "
            "weights, and would overwrite what is scaled here. Give the optimizer, whose step then scales what it has "
            "stepped: QKClip(model, optimizer)"
        )


def _is_hosted(source: Optimizer) -> bool:
    hosts = getattr(source, "hosts", None)
    return isinstance(hosts, Hosts) and hosts.active is not None


def _largest(
    flat: Tensor,  # 1-D
    ranks: Ranks,
    hint: GroupRef | None,
) -> Tensor:  # 1-D
    """The elementwise maximum over some ranks. Collective among them."""
    group = group_for(ranks, hint)
    flat = flat.to(talking_device(flat.device, group))
    with naming(lambda: f"QK-clip: the largest logits of ranks {ranks_text(ranks)}", "Nothing was scaled here"):
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    return flat


def _views(local: Tensor, layout: ParamLayout, dim: int) -> Iterator[tuple[Tensor, int]]:
    """What this rank stores of a tensor, as views of its storage with the tensor's dims; with the index along `dim` at
    which each begins."""
    for piece, at in layout.of_rank(my_rank()):
        if isinstance(piece, Box):
            view = local
            for d, (begin, size) in enumerate(zip(at, piece.size, strict=True)):
                view = view.narrow(d, begin, size)
            if view.numel():
                yield view, piece.offset[dim]
            continue
        (first,) = at
        for start, sizes in spans_of(piece, layout.view.shape):
            last = first + math.prod(sizes)
            yield local[first:last].view(sizes), start[dim]
            first = last
