"""Scale rows of sharded weights by maxima of logits that ranks have measured: found once, then one reduction a step.

[Note: the rule]
    Kimi K2 (https://arxiv.org/abs/2507.20534, section 2.1) and Megatron (`clip_qk` in attention.py and
    multi_latent_attention.py): with S the largest logit of a head, of all heads of a group where they share keys,

        g = tau / S if S > tau, else 1
        q rows <- g^alpha,  k rows <- g^(1 - alpha),  q_pe rows <- g,  shared rotary keys unchanged

    so that the head's logits shrink by g. A maximum that is not finite says nothing about weights: g = 1.

[Note: exact on any sharding]
    A weight is multiplied element by element with a factor that every rank computes alike, from maxima that are the
    same on every rank after a reduction by max, in which no order matters. So a rank scales what it stores and the bits
    are those of one process. Where the pieces lie is said by a layout table, which all ranks make together and keep.

[Note: who reduces]
    A layer's weights may lie on several sets of ranks, of which each overlaps with another. Its maxima are those of all
    ranks that the sets connect. One reduction over the component brings all of them: each layer of such ranks has
    places of its own in it, and who does not have the layer leaves -inf there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardmuon.comm.groups import GroupRef, Ranks, group_for, my_rank, num_ranks, talking_device
from shardmuon.comm.vote import Ballot, Fault, Phase, Unlike, close_lane
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
from shardmuon.host import Host, Hosts, Stepped, Weight
from shardmuon.layout.bind import Call, KeptTable, Listed, Table, agree, settle
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import Group, named_params
from shardmuon.layout.pieces import Tile, spans_of
from shardmuon.layout.table import ParamLayout, digest_of
from shardmuon.layout.views import Ints, matrix_view
from shardmuon.options import PLACE_OPTIONS, view_options
from shardmuon.step.kept import MatrixNumbers, forget_norms
from shardmuon_qkclip.layers import Attention, Rows

if TYPE_CHECKING:
    from shardmuon.core import Core

Measure = Callable[[], Mapping[str, Tensor]]  # layer -> maxima of this rank, (num_heads,)


def _core_of(optimizer: Any) -> Core | None:
    """The optimizer, if it is one of ours."""
    return cast("Core", optimizer) if isinstance(getattr(optimizer, "hosts", None), Hosts) else None


def host_of(optimizer: Any) -> Host | None:
    """The framework whose tensors an optimizer steps, if one is active."""
    core = _core_of(optimizer)
    return None if core is None else core.hosts.active


def _weights_of(optimizer: Optimizer) -> list[Weight]:
    """Every weight as it is stepped."""
    host, groups = host_of(optimizer), enumerate(optimizer.param_groups)
    if host is not None:
        return host.weights(cast("Core", optimizer))
    return [Weight(name, p, p, group) for index, group in groups for name, p in named_params(group, index)]


class Scaled(NamedTuple):
    """The outcome for one layer.

    Attributes:
        maxima: (num_heads,), fp32: the largest logits over all ranks; -inf where none was measured.
        gains: (num_groups,), fp32: what the logits of each key head were scaled by.
    """

    maxima: Tensor
    gains: Tensor


class _ClippedWeight(NamedTuple):
    """A weight of a layer.

    Attributes:
        layer: The layer.
        rows: What its rows are.
        weight: As it is stepped.
        engine: Reaches its storage.
        key: Changes with all that the layout table depends on.
    """

    layer: Attention
    rows: Rows
    weight: Weight
    engine: Engine
    key: object


class _Found(NamedTuple):
    """The weights of some layers.

    Attributes:
        key: Changes with all that the layout table depends on.
        targets: The weights.
        spared: Layers that are not scaled, having a frozen weight.
    """

    key: object
    targets: list[_ClippedWeight]
    spared: set[str]


_Told = dict[tuple[Ranks, ...], list[tuple[str, int]]]  # sets of ranks that share some layers -> names, num_heads


class _Bound(KeptTable):
    """A layout table of the weights, which all ranks have.

    Attributes:
        found: The weights.
        beyond: The ranks of `process_group`.
        layouts: Who stores what of each weight.
        places: For each, where its rows' factors stand, on its device.
        matrices: For each, which of its matrices a row is in.
        slots: (layer, number of heads, ranks that the layer's sets connect), in the order of the reduction.
        mine: The layer of each slot; None: it is of other ranks.
    """

    def __init__(self, table: Table, found: _Found, beyond: Ranks | None) -> None:
        super().__init__(table)
        self.found, self.beyond, self.layouts = found, beyond, table.layouts
        self.mine, self.slots = list[str | None](), list[tuple[str, int, Ranks]]()
        self.places, self.matrices = list[Tensor](), list[MatrixNumbers | None]()
        for target, layout in zip(found.targets, table.layouts, strict=True):
            rows, size = target.rows, layout.view.shape[target.rows.dim]
            if size != rows.total:  # the layout is the same on every rank that has it
                raise Unlike(
                    f"{target.layer.name}: {rows.weight} has {size} rows, and its parts {rows.parts} repeated "
                    f"{rows.repeats} times make {rows.total}"
                )
            self.places.append(target.layer.places(rows).to(target.weight.stored.device))
            self.matrices.append(_matrices(target, layout.view.shape))

    def hear(self, everyone: Sequence[_Told]) -> None:
        """Give each layer its slots in the reduction, from what each rank of the component tells."""
        listed: dict[tuple[Ranks, ...], set[tuple[str, int]]] = {}
        for theirs in everyone:
            for sets, layers in theirs.items():
                listed.setdefault(sets, set()).update(layers)
        for layer in sorted(set().union(*listed.values())):
            connected: list[set[int]] = []
            for ranks in (ranks for sets, layers in listed.items() if layer in layers for ranks in sets):
                touching = [other for other in connected if not other.isdisjoint(ranks)]
                connected = [other for other in connected if other.isdisjoint(ranks)]
                connected.append(set(ranks).union(*touching))
            self.slots += [(*layer, tuple(ranks)) for ranks in sorted(map(sorted, connected))]
        own = {target.layer.name for target in self.found.targets}
        self.mine = [name if name in own and my_rank() in ranks else None for name, _, ranks in self.slots]


class Scaler(Call[_Bound]):
    """The weights of some attention layers, where this rank keeps them.

    Args:
        optimizer: Steps them.
        layers: The layers.
        process_group: Ranks that see other batches with the same weights, beyond those that share the weights.
        params: Parameter name -> the model's parameter, where it is known. A layer is left alone while one is frozen.
    """

    phase = Phase.QK_CLIP
    doing = "scale queries and keys"
    rule = (
        "Every rank that shares a weight must pass the same tau and alpha, and those of process_group the same layers"
    )

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[Attention] = (),
        process_group: Any = None,
        params: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._optimizer, self._params = optimizer, params or {}
        self._bound: _Bound | None = None
        self.choose(layers, process_group)

    def choose(self, layers: Sequence[Attention], process_group: Any) -> None:
        """Use other arguments from now on. The table stays until the other ranks have heard of it."""
        self._layers, self._by_name = tuple(layers), {layer.name: layer for layer in layers}
        self._group = GroupRef.of(process_group)
        ranks = () if self._group is None else tuple(sorted(self._group.ranks))
        self.beyond = ranks if len(ranks) > 1 else None

    # -------------------------------------------------------------------------------------------------- one step

    @torch.no_grad()
    def reduce(self, measure: Measure, tau: float, alpha: float) -> None:
        """Find the maxima over all ranks, for `apply_`. Collective; changes no weight.

        Args:
            measure: Layers may be missing. The user's function, so it may raise anything.
            tau, alpha: See [Note: the rule].

        Raises:
            Refused: Something is wrong here or on another rank. On every rank.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        fault = Fault()
        with fault:
            check_numbers(tau, alpha)
            self._numbers = float(tau), float(alpha)
            try:
                self._given = measure()
            except OUT_OF_MEMORY:
                raise
            except Exception as wrong:
                raise ValueError(
                    f"QK-clip: the function logits= raised {type(wrong).__name__}: {wrong}. It must return the largest "
                    f"logit of each head, as tensors, of the layers {list(self._by_name)}"
                ) from wrong
        try:
            bound, _ = agree(self, fault)
            self._all = _largest(self._flat, bound.component, self._group) if bound.slots else self._flat
        except Refused:  # all ranks raise, and may go on
            raise
        except BaseException as error:  # other ranks may wait, or have gone on
            if num_ranks() > 1:
                self._remember(f"{fault_text(error)}. This has scaled nothing on this rank, but ranks are out of step")
                if self._bound is not None and not self._is_alone and not isinstance(error, ExchangeError):
                    close_lane(self._bound.component)  # whoever waits for this rank fails at once
            raise

    @torch.no_grad()
    def apply_(self) -> dict[str, Scaled]:
        """Multiply this rank's rows by what `reduce` has found. Collective: the ranks settle that each of them has.

        Raises:
            ExchangeError: Here or on another rank something was raised meanwhile, so that weights may be half scaled,
                which the optimizer remembers. On its own rank an interrupt and being out of memory stay what they are.
        """
        bound, fault, done = self._bound, Fault(), dict[str, Scaled]()
        assert bound is not None, "reduced"
        with fault:
            done = self._scale(bound)
        try:
            settle(fault, bound.component, Phase.QK_CLIP)
            return done
        except Refused as refused:
            text = str(refused)
        except ExchangeError as error:
            self._remember(str(error))
            raise
        broken = self._remember(f"{text}. Weights of queries and keys may be half scaled")
        if fault.cause is not None and stays_itself(fault.cause):
            raise fault.cause
        raise ExchangeError(broken) from fault.cause

    def _scale(self, bound: _Bound) -> dict[str, Scaled]:
        (tau, alpha), done, factor = self._numbers, dict[str, Scaled](), dict[str, Tensor]()
        found, device = bound.found, self._own[self._layers[0].name].device
        parts = self._all.to(device).split([num_heads for _, num_heads, _ in bound.slots])
        maxima = self._own | {name: part for name, part in zip(bound.mine, parts, strict=True) if name is not None}
        for name, layer in self._by_name.items():
            gain = gains(layer, maxima[name], math.inf if name in found.spared else tau)
            done[name], factor[name] = Scaled(maxima[name], gain), _factors(layer, gain, alpha)
        now = {id(w.stored): w.now for w in _weights_of(self._optimizer)}
        for at, target in enumerate(found.targets):
            name, is_now = target.layer.name, now.get(id(target.weight.stored), True)
            if math.isfinite(tau) and name not in found.spared and is_now:  # else a later call of this step scales it
                self._multiply(target, factor[name], bound.layouts[at], bound.places[at], bound.matrices[at])
        return done

    def _multiply(
        self,
        target: _ClippedWeight,
        factor: Tensor,
        layout: ParamLayout,
        places: Tensor,
        matrices: MatrixNumbers | None,
    ) -> None:
        """Scale what this rank stores of a weight."""
        stored, dim = target.weight.stored, target.rows.dim
        per_row = factor.to(places.device)[places]  # of the whole weight, on every rank
        if per_row.device.type == "cpu" and bool((per_row == 1.0).all()):  # elsewhere the host would wait
            return
        for core in self._keeping():  # norms that variants keep are those before it is scaled
            if stored in core.state:
                forget_norms(core.state[stored], core.settled, per_row, matrices)
        local = target.engine.storage(stored)
        per_row = per_row.double() if local.dtype == torch.float64 else per_row
        for view, start in _views(local, layout, dim):
            view.mul_(per_row[start : start + view.shape[dim]].view(-1, *[1] * (view.ndim - 1 - dim)))

    def _remember(self, text: str) -> str:
        """Let the optimizer refuse further steps, as after an error in one of its own; returns why."""
        text = f"QK-clip was broken off: {text}. {RELOAD if self._is_alone else REMEDY}"
        core = _core_of(self._optimizer)
        if core is not None:
            core.broken = core.broken or text
        return text

    @property
    def _is_alone(self) -> bool:
        return num_ranks() == 1 or (self._bound is not None and len(self._bound.component) == 1)

    def _keeping(self) -> tuple[Stepped, ...]:
        """Cores that keep norms of the weights."""
        core, host = _core_of(self._optimizer), host_of(self._optimizer)
        return () if core is None else (core,) if host is None else tuple(host.keeping(core))

    def trained(self) -> list[Attention]:
        """Layers whose queries have gradients."""
        targets = () if self._bound is None else self._bound.found.targets
        return [t.layer for t in targets if t.rows.num("q") and t.weight.param.grad is not None]

    # ------------------------------------------------------------------------------------------------- what is voted

    def known(self) -> _Bound | None:
        return self._bound

    def is_current(self, kept: _Bound) -> bool:
        return kept.beyond == self.beyond and kept.found.key == self.find().key

    def listed(self) -> list[Listed]:
        self._found = self.find()
        return [self._one_listed(target) for target in self._found.targets]

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        return [(weight.name, weight.stored, weight.group) for weight in _weights_of(self._optimizer)]

    def made(self, table: Table) -> tuple[_Bound, _Told]:
        bound, told = _Bound(table, self._found, self.beyond), _Told()
        beyond = () if self.beyond is None else (self.beyond,)
        for name, layer in self._by_name.items():
            mine = {number for number, target in enumerate(self._found.targets) if target.layer is layer}
            sets = [ranks for ranks, numbers in bound.sets.items() if not mine.isdisjoint(numbers)]
            told.setdefault((*sets, *beyond), []).append((name, layer.num_heads))
        return bound, told

    def heard(self, kept: _Bound, everyone: Sequence[_Told]) -> None:
        kept.hear(everyone)
        self._bound = kept

    def read(self, kept: _Bound) -> Ballot:
        device = kept.found.targets[0].weight.stored.device
        self._own = self._maxima(device)
        fp32: Any = {"dtype": torch.float32, "device": device}
        parts = [
            torch.full((num_heads,), -math.inf, **fp32) if name is None else self._own[name]
            for name, (_, num_heads, _) in zip(kept.mine, kept.slots, strict=True)
        ]
        self._flat = torch.cat([torch.empty(0, **fp32), *parts])
        self._keeping()  # takes over what was loaded: where the others hear of it if that fails
        sets = (*kept.sets, *(() if kept.beyond is None else (kept.beyond,)))
        return Ballot(self.phase, digests={ranks: digest_of((kept.token, self.lines(kept, ranks))) for ranks in sets})

    def lines(self, kept: _Bound, ranks: Ranks) -> list[str]:
        tau, alpha = self._numbers
        layers = [f"{len(self._layers)} attention layers", *map(repr, self._layers)]
        return [f"tau={tau!r} alpha={alpha!r}", *(layers if ranks == kept.beyond else ())]

    def _maxima(self, device: torch.device) -> dict[str, Tensor]:
        """One vector for each layer, -inf where nothing was measured."""
        given, found = self._given, dict[str, Tensor]()
        if not isinstance(given, Mapping):
            raise ValueError(
                f"QK-clip: logits are {type(given).__name__}, expected layer -> the largest logits of its heads"
            )
        unknown = sorted(set(given) - set(self._by_name))
        if unknown:
            raise ValueError(f"logits of {unknown[0]!r}: no such layer. Layers are {list(self._by_name)}")
        for name, layer in self._by_name.items():
            maxima = given.get(name)
            if maxima is None:
                maxima = torch.full((layer.num_heads,), -torch.inf, device=device)
            if not isinstance(maxima, Tensor) or tuple(maxima.shape) != (layer.num_heads,):
                what = tuple(maxima.shape) if isinstance(maxima, Tensor) else type(maxima).__name__
                raise ValueError(
                    f"logits of {name!r}: found {what}, expected a tensor of shape ({layer.num_heads},), the largest "
                    "logit of each head; -inf for heads that other ranks of a tensor-parallel group have"
                )
            maxima = maxima.detach().to(device, torch.float32)
            found[name] = maxima.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return found

    # ------------------------------------------------------------------------------------------------ where it lies

    def find(self, *, strictly: bool = False) -> _Found:
        """Every weight of the layers: the model's parameter, or what is stepped by its name.

        Raises:
            ValueError: One is not there, but for one that was frozen and taken out (`strictly`: also then, and where
                another tensor than the model's is stepped by its name), or two layers have it.
        """
        weights = _weights_of(self._optimizer)
        by_param, by_name = {id(w.param): w for w in weights}, {w.name: w for w in weights}
        found, spared = dict[int, _ClippedWeight](), set[str]()
        for layer, rows in [(one, rows) for one in self._layers for rows in one.rows]:
            param, named = self._params.get(rows.weight), by_name.get(rows.weight)
            weight, frozen = by_param.get(id(param)), param is not None and not param.requires_grad
            if weight is None and not (strictly and param is not None and not _is_copy(named, param)):
                weight = named
            if frozen:
                spared.add(layer.name)
            if weight is None and (strictly or not frozen):
                kind, why = self._optimizer.__class__.__name__, ""
                if frozen:
                    why = " It is frozen (requires_grad=False); unfrozen when the optimizer is made, it would be."
                elif named is not None:
                    why = " It steps a weight of this name, which is another tensor than the model's."
                raise ValueError(
                    f"{layer.name}: {rows.weight} is not among the weights of {kind}, so it cannot be scaled with "
                    f"the others.{why} Give it to the optimizer with its name, or leave the layer out with layers="
                )
            if weight is not None:
                first = found.setdefault(id(weight.stored), _target(layer, rows, weight))
                if (first.layer, first.rows) != (layer, rows):
                    raise ValueError(
                        f"{first.rows.weight} of {first.layer.name} and {rows.weight} of {layer.name} are one weight: "
                        "no one factor is right for both. Leave the layers out with layers="
                    )
        if not found or len(self._by_name) < len(self._layers):
            raise ValueError("all attention layers are frozen and no longer the optimizer's, or two have one name")
        key = (self._layers, sorted(spared), [target.key for target in found.values()])
        return _Found(key, list(found.values()), spared)

    def _one_listed(self, target: _ClippedWeight) -> Listed:
        """A weight as the layout table lists it.

        Raises:
            ValueError: Nobody has said over which ranks a plain one is replicated.
        """
        weight = target.weight
        group: dict[str, Any] = {**weight.group, "use_muon": False}  # no matrices are read
        engine, replicas = engine_for(weight.stored, group), GroupRef.of(group.get("process_group"))
        if group.get("rank_local") or (replicas is not None and not replicas.ranks):
            replicas = None
        if replicas is None and type(engine) is Engine and not group.get("rank_local"):
            replicas = group["process_group"] = self._group
        alone = engine.ties(weight.stored, group).sets == ((my_rank(),),)
        if alone and num_ranks() > 1 and self._group is None and replicas is None:
            raise ValueError(
                f"{weight.name}: it is a plain tensor on each of {num_ranks()} ranks, and which of them see other "
                "batches with the same weights is not known. Write process_group=torch.distributed.group.WORLD if all "
                f"do (DDP), or the data- and context-parallel group; process_group=({my_rank()},) for this rank alone"
            )
        alike = f"{target.layer} {target.rows} {target.layer.name in self._found.spared}"
        return Listed(weight.name, target.rows.weight, weight.stored, group, None, alike)


def _target(layer: Attention, rows: Rows, weight: Weight) -> _ClippedWeight:
    try:
        engine = engine_for(weight.stored, {**weight.group, "use_muon": False})
        lies = engine.signature(weight.stored)
    except ValueError as wrong:
        raise ValueError(f"{weight.name}: {wrong}") from None
    place = [weight.group.get(key) for key in ("rank_local", *PLACE_OPTIONS)]
    return _ClippedWeight(layer, rows, weight, engine, (id(weight.stored), engine, lies, place))


def _is_copy(weight: Weight | None, param: Tensor) -> bool:
    """True if a weight of a parameter's name is its copy in another precision, as mixed precision steps it."""
    if weight is None:
        return False
    return param.dtype != weight.param.dtype or getattr(param, "main_param", None) is weight.param


def _matrices(target: _ClippedWeight, shape: Ints) -> MatrixNumbers | None:
    """The matrix that each row is in, by the options of its group; None: there is one, or a row is in several."""
    group, dim = target.weight.group, target.rows.dim
    if len(shape) != 2 or not group.get("use_muon") or "view" not in group:
        return None
    view = matrix_view(shape, **view_options(group))
    first = dim + (0 <= view.split_dim < dim)
    mine = range(first, first + 1 + (view.split_dim == dim))  # fine dims that run along the rows
    number = torch.full([size if d in mine else 1 for d, size in enumerate(view.fine)], -1, device="cpu")
    for at, matrix in enumerate(view.matrices):
        spans = enumerate(zip(matrix.start, matrix.sizes, strict=True))
        here = number[tuple(slice(a, a + size) if d in mine else slice(None) for d, (a, size) in spans)]
        if bool((here >= 0).any()):
            return None
        here.fill_(at)
    return None if len(view.matrices) < 2 else MatrixNumbers(number.flatten().to(target.weight.stored.device), at + 1)


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
    """Parts of a tensor that this rank stores, as views of its storage with the tensor's dims; and the index along
    `dim` at which each begins."""
    for held in layout.of_rank(my_rank()):
        for start, sizes in spans_of(held.piece, layout.view.shape):
            offset, strides = Tile(0, start, sizes, held).in_storage(layout.view, local.stride())
            yield local.as_strided(sizes, strides, local.storage_offset() + offset), start[dim]


# ---------------------------------------------------------------------------------------------------------- the rule


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


def _factors(
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
