"""Scale rows of sharded weights by maxima of logits that ranks have measured: found once, then one reduction a step.

[Note: exact on any sharding]
    A weight is multiplied element by element with a factor that every rank computes alike, from maxima that are the
    same on every rank after a reduction by max, in which no order matters. So a rank scales what it stores and the bits
    are those of one process. Where the pieces lie is settled as for a plan (`stepping.binding.bind`), with the same
    agreement about what is wrong.

[Note: weights that layers share]
    A weight is scaled once, however many layers have it. Layers that share one are scaled by the same factors: those of
    the largest logit of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardmuon.attention.heads import Attention, Rows, check_numbers, factors, gains
from shardmuon.comm.groups import GroupRef, group_for, my_rank, num_ranks, talking_device
from shardmuon.engines import engine_for
from shardmuon.engines.base import named_params
from shardmuon.engines.local import LocalEngine
from shardmuon.engines.tensor_parallel import gather_shards
from shardmuon.errors import OUT_OF_MEMORY, RELOAD, REMEDY, ExchangeError, fault_text, stays_itself
from shardmuon.host import Hosts, Weight, clipped_by_host
from shardmuon.options import Orthogonalizer, view_options
from shardmuon.planning.layout import Box, FlatBox, Holder, flat_rects
from shardmuon.planning.types import Policy
from shardmuon.planning.views import MatrixView, Ranks, Runs, matrix_view
from shardmuon.ranks.council import Faults, relay, share_with_faults, spread_fault
from shardmuon.ranks.exchange import reduce_
from shardmuon.routing.roles import find_places
from shardmuon.stepping.binding import Binding, Candidate, bind
from shardmuon.stepping.candidates import sharers
from shardmuon.stepping.kept import Matrices, forget_norms
from shardmuon.stepping.settings import replicas_of

if TYPE_CHECKING:
    from shardmuon.core import Core

__all__ = ["Scaled", "Scaler", "Source", "weights_of"]

Source = Optimizer | nn.Module


def weights_of(source: Source) -> list[Weight]:
    """Every weight of an optimizer as it is stepped, or of a model."""
    if isinstance(source, nn.Module):
        return [Weight(places[0].name, param, param, {}) for param, places in find_places(source)]
    hosts = getattr(source, "hosts", None)
    host = hosts.active if isinstance(hosts, Hosts) else None
    if host is not None:
        return host.weights(source)  # type: ignore[arg-type]
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


@dataclass(frozen=True, slots=True)
class _Bound:
    """Targets, index for index the binding's parameters, and who reduces with whom."""

    targets: tuple[_Target, ...]
    matrices: tuple[Matrices | None, ...]  # which of its matrices each place of a target's rows is in
    binding: Binding
    rounds: dict[Ranks, int]
    hints: dict[Ranks, Any]
    layers_of: dict[Ranks, tuple[int, ...]]
    listed: frozenset[int]  # ids of all that was stepped then
    together: tuple[tuple[int, ...], ...]  # of each layer those that it shares weights with, itself too
    spared: frozenset[int]  # layers that are not scaled


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
        """Other arguments from now on. What was settled with the other ranks stays until they have heard of it."""
        self.layers, self._beyond, self._changed = tuple(layers), GroupRef.of(process_group), True

    def is_for(self, layers: Sequence[Attention], process_group: GroupRef | None) -> bool:
        """Whether it has these arguments."""
        return self.layers == tuple(layers) and self._beyond == process_group

    # -------------------------------------------------------------------------------------------------- one step

    @torch.no_grad()
    def reduce(
        self, measure: Callable[[], Mapping[str, Tensor]], tau: float, alpha: float
    ) -> tuple[list[Scaled], list[Tensor]]:
        """The maxima over all ranks, and what rows are multiplied with. Collective; changes no weight.

        Args:
            measure: Layer -> maxima of this rank, (num_heads,). Layers may be missing. The user's function, so it
                may raise anything.
            tau, alpha: See [Note: the rule] in heads.py.

        Returns:
            For each layer what is to be done, and the factors.

        Raises:
            Refused: Something is wrong here or on another rank.
        """
        faults = Faults()
        given: Mapping[str, Tensor] = {}
        mine: list[Tensor] = []
        with faults.guard():
            faults.add(check_numbers(tau, alpha))
            given = self._ask(measure)
        while True:
            bound = self._bound or self._bind(faults)
            stale, news = self._changed, faults.signed
            with faults.guard():
                mine = self._vectors(given, bound.targets[0].weight.stored.device)
                stale = stale or self._is_stale(bound)
                self._keeping()  # takes over what was loaded: where the others hear of it if that fails
            for _, ranks in relay(bound.rounds):
                device = bound.binding.talking_devices.get(ranks, torch.device("cpu"))
                news, flags = spread_fault(news or faults.signed, ranks, device, bound.hints.get(ranks), [stale])
                stale = bool(flags[0])
            if news is not None or faults.text is not None:
                self._bound = None  # what was wrong with it would be found only once
                raise faults.refusal(news)
            if not stale:
                break
            self._bound = None
        for _, ranks in relay(bound.rounds):
            _reduce(mine, bound, ranks)
        scaled, found = [], []
        for index, layer in enumerate(self.layers):
            others = bound.together[index]
            largest = mine[index] if len(others) == 1 else torch.stack([mine[each] for each in others]).amax(dim=0)
            gain = gains(layer, largest, math.inf if index in bound.spared else tau)
            scaled.append(Scaled(mine[index], gain))
            found.append(factors(layer, gain, alpha))
        return scaled, found

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
    def apply_(self, found: Sequence[Tensor]) -> None:
        """Multiply this rank's rows with the factors that `reduce` has returned. Collective: whether every rank has.

        Raises:
            ExchangeError: Here or on another rank something was raised meanwhile, so that weights may be half scaled,
                which the optimizer remembers. On its own rank an interrupt and being out of memory stay what they are.
        """
        bound = self._bound
        assert bound is not None, "reduced"
        faults = Faults()
        with faults.guard():
            self._scale(bound, found)
        news = faults.signed
        for _, ranks in relay(bound.rounds):
            device = bound.binding.talking_devices.get(ranks, torch.device("cpu"))
            news, _ = spread_fault(news or faults.signed, ranks, device, bound.hints.get(ranks))
        if news is not None:
            broken = self.remember(f"{news}. Weights of queries and keys may be half scaled")
            if faults.cause is not None and stays_itself(faults.cause):
                raise faults.cause
            raise ExchangeError(broken) from faults.cause

    def remember(self, text: str) -> str:
        """Let the optimizer refuse further steps, as after an error in one of its own; returns why."""
        bound = self._bound
        alone = num_ranks() == 1 or (bound is not None and all(len(ranks) == 1 for ranks in bound.rounds))
        text = f"QK-clip was broken off: {text}. {RELOAD if alone else REMEDY}"
        core = self._core()
        if core is not None:
            core.broken = core.broken or text
        return text

    def out_of_step(self, error: BaseException) -> None:
        """Something else than a refusal was raised in `reduce`: other ranks may wait, or have gone on."""
        if num_ranks() > 1:
            self.remember(f"{fault_text(error)}. This has scaled nothing on this rank, but ranks are out of step")

    def _core(self) -> Core | None:
        """The optimizer, if it is one of ours."""
        return cast("Core", self._source) if isinstance(getattr(self._source, "hosts", None), Hosts) else None

    def _scale(self, bound: _Bound, found: Sequence[Tensor]) -> None:
        now = self._listed()
        rank = my_rank()
        for index, target in enumerate(bound.targets):
            stored = target.weight.stored
            if target.layer in bound.spared or not now.get(id(stored), True):
                continue  # a later call of the same training step brings it
            factor = found[target.layer]
            per_row = factor[target.places.to(factor.device)]  # of the whole weight, on every rank
            if per_row.device.type == "cpu" and bool((per_row == 1.0).all()):  # elsewhere the host would wait
                continue
            self._forget_norms(stored, per_row, bound.matrices[index])
            engine = bound.binding.candidates[index].engine
            local = engine.storage(stored)
            if not local.numel():
                continue
            per_row = per_row.to(local.device, torch.float64 if local.dtype == torch.float64 else None)
            for holder in bound.binding.plan.specs[index].layout.holders_of(rank):
                for view, start, dim in _views(local, holder, engine.shape(stored), target.rows.dim):
                    shape = [1] * view.ndim
                    shape[dim] = view.shape[dim]
                    view.mul_(per_row[start : start + view.shape[dim]].view(shape))

    def _keeping(self) -> tuple[Core, ...]:
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
        for target in bound.targets:
            if not target.rows.num("q") or target.weight.param.grad is None:
                continue
            for index in target.layers:
                sharers = [r for ranks, layers in bound.layers_of.items() if index in layers for r in ranks]
                if largest[index] == -math.inf and my_rank() == min(sharers, default=my_rank()):
                    found.append(self.layers[index].name)
        return list(dict.fromkeys(found))

    def _forget_norms(self, stored: Tensor, per_row: Tensor, matrices: Matrices | None) -> None:
        """Norms of this weight that variants keep are those before it was scaled."""
        for core in self._keeping():
            if stored in core.state:
                forget_norms(core.state[stored], core.settled, per_row, matrices)

    def _vectors(self, given: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
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

    def _is_stale(self, bound: _Bound) -> bool:
        """Whether weights are no longer those that were found."""
        now = self._listed()
        for candidate, signature in zip(bound.binding.candidates, bound.binding.signatures, strict=True):
            gone = id(candidate.param) in bound.listed and id(candidate.param) not in now
            if gone or candidate.engine.signature(candidate.param) != signature:
                return True
        found = sum(len(target.layers) for target in bound.targets)
        if found < sum(len(layer.rows) for layer in self.layers) and bound.listed != now.keys():
            return True  # what was taken out may have come back
        return any(target.frozen != self._is_frozen(target.param) for target in bound.targets)

    def _listed(self) -> dict[int, bool]:
        """id of what is stepped -> whether this call of `step` has stepped it."""
        if isinstance(self._source, nn.Module):
            return dict.fromkeys(map(id, self._source.parameters()), True)
        return {id(w.stored): w.now for w in weights_of(self._source)}

    def _bind(self, faults: Faults) -> _Bound:
        """Find the weights and settle with the other ranks where they lie. Collective."""
        targets: list[_Target] = []
        candidates: list[Candidate] = []
        known: dict[Ranks, Any] = {}
        device = torch.device("cpu")
        if isinstance(self._source, Optimizer) and not _is_hosted(self._source):
            wrong, grids = gather_shards(self._source.param_groups)
            faults.add(wrong.text, wrong.cause)
            known |= grids
        if self._beyond is not None and len(self._beyond.ranks) > 1:
            known[tuple(sorted(self._beyond.ranks))] = self._beyond
        with faults.guard():
            for weight in weights_of(self._source):
                known |= sharers(weight.stored, weight.group)
            targets = self._targets()
            candidates = [self._candidate(target) for target in targets]
            device = targets[0].weight.stored.device
        chooser = Orthogonalizer().chooser()
        binding = bind(candidates, Policy(), chooser, check_replicas=False, device=device, faults=faults, known=known)
        matrices: list[Matrices | None] = []
        for target, spec in zip(targets, binding.plan.specs, strict=True):
            with faults.guard():
                matrices.append(_matrices(target, spec.layout.shape))
            size = spec.layout.shape[target.rows.dim]
            if size != target.rows.total:  # the layout is the same on every rank that has it
                faults.add(
                    f"{self.layers[target.layer].name}: {target.rows.weight} has {size} rows, and its parts "
                    f"{target.rows.parts} repeated {target.rows.repeats} times make {target.rows.total}"
                )
        rounds, hints = dict(binding.rounds), dict(known)
        layers_of = {
            ranks: tuple(sorted({layer for index in members for layer in targets[index].layers}))
            for ranks, members in binding.members.items()
        }
        if self._beyond is not None and len(self._beyond.ranks) > 1:
            beyond = tuple(sorted(self._beyond.ranks))
            faults.add(self._unlike(beyond))
            if beyond not in rounds:  # it and the others in turn, until everyone has heard of everything
                rounds = {ranks: count + 1 for ranks, count in rounds.items()} | {beyond: 2}
                layers_of[beyond] = tuple(range(len(self.layers)))
        self._changed = False
        listed = frozenset(self._listed())
        together = _together(len(self.layers), [target.layers for target in targets])
        free = [layer for target in targets if not target.frozen for layer in target.layers]
        whole = {index for index, layer in enumerate(self.layers) if free.count(index) == len(layer.rows)}
        spared = {index for index, layers in enumerate(together) if not whole.issuperset(layers)}
        self._bound = _Bound(
            tuple(targets),
            tuple(matrices),
            binding,
            rounds,
            hints,
            layers_of,
            listed,
            together,
            frozenset(spared),
        )
        return self._bound

    def _candidate(self, target: _Target) -> Candidate:
        weight, layer = target.weight, self.layers[target.layer]
        try:
            engine = engine_for(weight.stored, {**weight.group, "use_muon": False})
            replicas = replicas_of(weight.group)
            if replicas is None and type(engine) is LocalEngine and not weight.group.get("rank_local"):
                replicas = self._beyond
            shape = engine.shape(weight.stored)
            about = engine.describe(weight.stored, MatrixView(shape, 1, ()), replicas)
        except ValueError as wrong:
            raise ValueError(f"{weight.name}: {wrong}") from None
        if about.ranks == (my_rank(),) and num_ranks() > 1 and self._beyond is None and replicas is None:
            raise ValueError(
                f"{weight.name}: it is a plain tensor on each of {num_ranks()} ranks, and which of them see other "
                "batches with the same weights is not known. Write process_group=torch.distributed.group.WORLD if all "
                f"do (DDP), or the data- and context-parallel group; process_group=({my_rank()},) for this rank alone"
            )
        text = f"{layer.name} {layer.num_heads} {layer.num_groups} {target.rows} {target.layers} {target.frozen}"
        return Candidate(weight.name, target.rows.weight, weight.stored, engine, about, (), text, "")

    def _unlike(self, ranks: Ranks) -> str | None:
        """Ranks that share no weight must list the same layers all the same. Collective."""
        heard, everyone = share_with_faults(None, repr(self.layers), ranks, self._beyond)
        if heard is None and len(set(everyone)) == 1:
            return None
        return (
            f"process_group has ranks {ranks}, which list different attention layers: {len(self.layers)} here. Pass "
            "ranks that hold the same layers (data- and context-parallel ones)"
        )


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


def _matrices(target: _Target, shape: Sequence[int]) -> Matrices | None:
    """By the options of a group of Muon's; None: one alone, or a place is in several."""
    group = target.weight.group
    if len(shape) != 2 or not group.get("use_muon") or "view" not in group:
        return None
    found = matrix_view(shape, **view_options(group)).matrices
    number = torch.full((shape[target.rows.dim],), -1, device="cpu")
    for at, matrix in enumerate(found):
        runs = matrix.columns or Runs(0, shape[1], shape[1], 1)
        spans = runs.within(0, shape[1]) if target.rows.dim else ((0, *rows, 1) for rows in matrix.intervals)
        for _, start, stop, step in spans:
            if bool((number[start:stop:step] >= 0).any()):
                return None
            number[start:stop:step] = at
    whole = len(found) < 2 or bool((number < 0).any())
    return None if whole else Matrices(number.to(target.places.device), len(found))


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


def _reduce(vectors: list[Tensor], bound: _Bound, ranks: Ranks) -> None:
    """The maxima of a group's layers over its ranks."""
    members = bound.layers_of.get(ranks, ())
    if not members:
        return
    group = group_for(ranks, bound.hints.get(ranks))
    place = talking_device(vectors[members[0]].device, group)
    flat = torch.cat([vectors[index].to(place) for index in members])
    reduced = reduce_(flat, "max", group)
    for index, part in zip(members, reduced.split([len(vectors[index]) for index in members]), strict=True):
        vectors[index] = part.to(vectors[index].device)


def _views(local: Tensor, holder: Holder, shape: Sequence[int], dim: int) -> Iterator[tuple[Tensor, int, int]]:
    """What a holder keeps, as (view of local storage, its first row, the dim along which rows run)."""
    piece = holder.piece
    if isinstance(piece, Box):
        view = local
        for at, (start, size) in enumerate(zip(holder.local, piece.size, strict=True)):
            view = view.narrow(at, start, size)
        if view.numel():
            yield view, piece.offset[dim], dim
        return
    cols = piece.box.size[1] if isinstance(piece, FlatBox) else _columns(shape)
    corner = piece.box.offset if isinstance(piece, FlatBox) else (0, 0)
    for rect in flat_rects(piece, holder.local[0], cols, corner):
        ((start, stop),) = rect.local
        yield local[start:stop].view(rect.num_rows, rect.num_cols), (rect.col if dim else rect.row), dim


def _columns(shape: Sequence[int]) -> int:
    columns = 1
    for size in shape[1:]:
        columns *= size
    return columns
