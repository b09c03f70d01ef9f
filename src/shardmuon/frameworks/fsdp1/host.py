"""A step on FSDP1's flat parameters (`use_orig_params=False`), tensor by tensor.

A user's groups name tensors (`param_groups` of the wrapped model, `named_parameters`), of which torch's optimizer
sees the flat parameters: FSDP1 asks for these. An *inner* core with the same groups steps leaves that share their
memory, each by its group's rule.

[Note: whose group a flat parameter is in]
    A flat parameter may hold tensors of several groups, and torch lets it be in one. It is in the first group that has
    any of its tensors, which means nothing but to FSDP1's functions; `group["parts"]` says which tensors a group steps.
    A group without a flat parameter takes one of a group with several: `torch.distributed.checkpoint.state_dict`
    loads at most one group without parameters.

[Note: state]
    The inner core keeps each tensor's state. A state dict has it in one piece per flat parameter (state.py), made when
    it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardmuon._fsdp1 import Unit
from shardmuon._torch import creates_state_only
from shardmuon.carried import CARRIED, carry, kept_in, loaded_over, missing_fault, take_carried
from shardmuon.engines.fsdp1 import part_of, place_of, refuse_piece, window
from shardmuon.errors import OUT_OF_MEMORY, fault_text
from shardmuon.frameworks.fsdp1.state import KINDS, flat_state, made_alike, part_state
from shardmuon.frameworks.guards import raised_by, step_inner
from shardmuon.host import Host, Weight
from shardmuon.options import PLACE_OPTIONS
from shardmuon.routing.roles import find_places
from shardmuon.stepping.settings import name_of
from shardmuon.variants import KEPT_KEYS

if TYPE_CHECKING:
    from shardmuon.core import Core, Course
    from shardmuon.planning.plan import Plan


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Like `model.named_parameters()` of a model wrapped in FSDP1, but tensor by tensor also with
    `use_orig_params=False`, to build parameter groups by hand. Names are those of the model before it was wrapped."""
    for param, places in find_places(model):
        yield places[0].name, param


class FSDP1Host(Host):
    """FSDP1. Active if groups name tensors of flat parameters."""

    steps_all = True

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        # Of each group, once any of them names a tensor of a flat parameter: what the user gave it, and the options
        # that no state dict keeps.
        self._named: list[list[tuple[str, Tensor]]] = []
        self._places: list[dict[str, Any]] = []
        self._inner: Core | None = None
        self._loaded: dict[int, Mapping[str, Any]] = {}  # id(flat parameter) -> its state, not taken over yet
        self._carried: dict[str, dict[str, Tensor]] = {}  # name -> what stages keep of it, loaded with that

    @property
    def is_active(self) -> bool:
        return bool(self._named)

    @property
    def plans(self) -> tuple[Plan, ...]:
        return () if self._inner is None or self._inner.binding is None else (self._inner.binding.plan,)

    # ------------------------------------------------------------------------------------------------- groups

    def adding(self) -> None:
        if self._inner is not None:
            raise ValueError("FSDP1 with use_orig_params=False: add groups before the first step")

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        self._groups.append(group)
        if not self.is_active and all(part_of(p) is None for p in group["params"]):
            return
        for index, other in enumerate(self._groups[len(self._named) :], len(self._named)):
            self._named.append([(name_of(other, index, at), p) for at, p in enumerate(other["params"])])
            self._places.append({key: other[key] for key in PLACE_OPTIONS if key in other})
        for name, param in self._named[-1]:
            part = part_of(param)
            if part is not None:
                _refuse(name, param, group, sharded=part.unit.is_sharded)
        self._put_flats()

    def _put_flats(self) -> None:
        """See [Note: whose group a flat parameter is in]."""
        units: dict[int, tuple[Unit, list[int]]] = {}  # id -> unit, groups that have any of it
        first: dict[int, str] = {}  # id -> name of the first tensor
        for index, named in enumerate(self._named):
            for name, param in named:
                part = part_of(param)
                if part is not None:
                    first.setdefault(id(part.unit), name)
                    groups = units.setdefault(id(part.unit), (part.unit, []))[1]
                    groups += [] if index in groups else [index]
        in_group: list[list[Unit]] = [[] for _ in self._named]
        for unit, groups in units.values():
            in_group[groups[0]].append(unit)
        for index, named in enumerate(self._named):
            if not in_group[index] and not _ordinary(named):
                richest = max(range(len(in_group)), key=lambda i: len(in_group[i]))
                if len(in_group[richest]) > 1:
                    own = [unit for unit in in_group[richest] if index in units[id(unit)][1]]
                    chosen = (own or in_group[richest])[-1]
                    in_group[richest].remove(chosen)
                    in_group[index].append(chosen)
        named_so = [group.get("param_names") is not None for group in self._groups]
        for group, named, found in zip(self._groups, self._named, in_group, strict=True):
            ordinary = _ordinary(named)
            group["params"] = [p for _, p in ordinary] + [unit.flat for unit in found]
            group["parts"] = [name for name, p in named if part_of(p) is not None]
            if all(named_so):
                group["param_names"] = [name for name, _ in ordinary] + [first[id(unit)] + ", .." for unit in found]

    def replaced(self, groups: Sequence[dict[str, Any]]) -> None:
        if self.is_active:
            self._carried = take_carried(groups)
            self._groups = list(groups)
            for group, own in zip(groups, self._places, strict=True):
                group.update(own)

    # --------------------------------------------------------------------------------------------------- steps

    def instead_of_step(self, core: Core, plain: bool) -> Callable[[], None] | None:
        return (lambda: self._complete(core)) if self.is_active and plain and creates_state_only() else None

    def step(self, core: Core, course: Course, early: BaseException | None) -> None:
        inner = self._inner or self._make_inner(core)
        wrong = raised_by(lambda: self._refresh(core, inner))
        try:
            step_inner(inner, course, early or wrong)
        finally:
            for part in self._parts():
                part.grad = None  # `zero_grad` must be able to free it

    def prepare(self, core: Core) -> Plan:
        inner = self._inner or self._make_inner(core)
        return inner.make_plan(raised_by(lambda: self._refresh(core, inner)))

    def _make_inner(self, core: Core) -> Core:
        groups = [
            {**group, "params": [p for _, p in named], "param_names": [name for name, _ in named]}
            for group, named in zip(core.param_groups, self._named, strict=True)
        ]
        self._inner = core.over(groups, core.audits)
        return self._inner

    def _refresh(self, core: Core, inner: Core) -> None:
        """Show the inner core options, weights, gradients and state as they are now."""
        for mine, group in zip(inner.param_groups, core.param_groups, strict=True):
            mine.update({key: value for key, value in group.items() if key not in ("params", "param_names", "parts")})
        for name, param in (pair for named in self._named for pair in named):
            part = part_of(param)
            if part is None:
                inner.state[param] = core.state[param]
                continue
            try:
                _point(param, part.unit, part.number)
            except OUT_OF_MEMORY:
                raise
            except Exception as wrong:
                raise ValueError(fault_text(wrong, f"{name}: ")) from wrong
        self._take_over(core, inner)

    def weights(self, core: Core) -> list[Weight]:
        found = []
        for group, named in zip(core.param_groups, self._named, strict=True):
            for name, param in named:
                part = part_of(param)
                if part is not None:
                    _point(param, part.unit, part.number)
                found.append(Weight(name, param, param, group))
        return found

    def keeping(self, core: Core) -> Iterable[Core]:
        """The inner one has the parts of flat parameters, with what was loaded for them; the outer one what else was
        loaded."""
        if self._loaded:
            self._take_over(core, self._inner or self._make_inner(core))
        return (core,) if self._inner is None else (core, self._inner)

    def _parts(self) -> list[Tensor]:
        return [p for named in self._named for _, p in named if part_of(p) is not None]

    # --------------------------------------------------------------------------------------------- checkpoints

    def _complete(self, core: Core) -> None:
        """Every tensor has state."""
        inner = self._inner or self._make_inner(core)
        with torch.no_grad():
            self._refresh(core, inner)
            inner.complete_state()

    def _take_over(self, core: Core, inner: Core) -> None:
        """Give the tensors what was loaded for flat parameters. Afterwards these have an entry that says nothing but
        that there is state."""
        for flat in self._flats().values():
            core.state[flat] = {}
        if not self._loaded:
            return
        names = {id(p): name for named in self._named for name, p in named}
        for group in inner.param_groups:
            for param in group["params"]:
                part = part_of(param)
                found = None if part is None else self._loaded.get(id(part.unit.flat))
                if found:
                    inner.state[param] = part_state(param, found, use_muon=group["use_muon"], counts=core.keeper.rounds)
                    kept = self._carried.get(names[id(param)], {}) if group["use_muon"] else {}
                    inner.state[param] |= {key: value.to(param.device, copy=True) for key, value in kept.items()}
                elif part is not None:
                    inner.state.pop(param, None)
        self._loaded, self._carried = {}, {}

    def _flats(self) -> dict[int, Tensor]:
        found = [part_of(p) for p in self._parts()]
        return {id(part.unit): part.unit.flat for part in found if part is not None}

    def saved(self, core: Core, saved: dict[str, Any]) -> None:
        if not self.is_active:
            made_alike(core.param_groups, saved)
            _carry_kept(core.param_groups, saved)
            return
        has_state = self._loaded or (self._inner is not None and any(self._inner.state.values()))
        if has_state:
            self._complete(core)
        states: dict[int, tuple[Unit, list[tuple[Tensor, Mapping[str, Any]]]]] = {}
        for param in self._parts():
            part = part_of(param)
            assert part is not None
            if has_state and self._inner is not None and param.requires_grad:
                states.setdefault(id(part.unit.flat), (part.unit, []))[1].append((param, self._inner.state[param]))
        for group, packed in zip(core.param_groups, saved["param_groups"], strict=True):
            for param, key in zip(group["params"], packed["params"], strict=True):
                if id(param) in states:
                    saved["state"][key] = flat_state(*states[id(param)])
                elif not core.state.get(param):
                    saved["state"].pop(key, None)
        if self._inner is not None:
            for packed, named in zip(saved["param_groups"], self._named, strict=True):
                carry(packed, {name: kept_in(self._inner.state.get(p, {})) for name, p in named if part_of(p)})

    def loading(self, core: Core, state_dict: Mapping[str, Any]) -> None:
        """Check a state dict against the flat parameters, and keep their state as it is: torch would cast it."""
        theirs = state_dict.get("param_groups", ())
        if len(theirs) != len(core.param_groups):
            raise ValueError(
                f"the state dict has {len(theirs)} parameter groups, the optimizer {len(core.param_groups)}"
            )
        loaded: dict[int, Mapping[str, Any]] = {}
        flats = {id(flat) for flat in self._flats().values()}
        for index, (group, packed) in enumerate(zip(core.param_groups, theirs, strict=True)):
            if packed.get("parts") != group["parts"]:
                raise ValueError(
                    f"group {index}: the state dict's group steps {packed.get('parts')}, the optimizer's "
                    f"{group['parts']}. Route and wrap the model as it was when it was saved"
                )
            for param, key in zip(group["params"], packed["params"], strict=True):
                found = state_dict["state"].get(key)
                if id(param) not in flats or not found:
                    continue
                for kind in KINDS:
                    if kind in found and tuple(found[kind].shape) != tuple(param.shape):
                        raise ValueError(
                            f"group {index}: {kind} of a flat parameter has shape {tuple(found[kind].shape)}, the "
                            f"parameter {tuple(param.shape)}: it was saved on another number of ranks. Save what "
                            "FSDP.optim_state_dict(model, optimizer) returns, and load what "
                            "FSDP.optim_state_dict_to_load makes of it"
                        )
                loaded[id(param)] = found
        self._check_kinds(loaded)
        for group, packed, named in zip(core.param_groups, theirs, self._named, strict=True):
            carried = packed.get(CARRIED) or {}
            options = loaded_over(group, packed)
            for name, param in named if options.get("variant") is not None else ():
                part = part_of(param)
                wrong = missing_fault(name, options, carried.get(name, {})) if part is not None else None
                if wrong is not None and id(part.unit.flat) in loaded:  # type: ignore[union-attr]
                    raise ValueError(wrong)
        self._loaded = loaded

    def _check_kinds(self, loaded: Mapping[int, Mapping[str, Any]]) -> None:
        for group, named in zip(self._groups, self._named, strict=True):
            for name, param in named:
                part = part_of(param)
                found = None if part is None else loaded.get(id(part.unit.flat))
                needed = KINDS[:1] if group["use_muon"] else KINDS[1:]
                if found is not None and not set(needed) <= found.keys():
                    raise ValueError(
                        f"{name}: its flat parameter's state in the checkpoint is {sorted(found)}, and {list(needed)} "
                        "is needed. It was saved by another optimizer, or the parameter was routed otherwise"
                    )


def _carry_kept(groups: Sequence[Mapping[str, Any]], saved: dict[str, Any]) -> None:
    """FSDP1 saves only state that is as long as the parameter: what stages keep goes with the groups."""
    for group, packed in zip(groups, saved["param_groups"], strict=True):
        kept: dict[str, dict[str, Tensor]] = {}
        for position, (param, key) in enumerate(zip(group["params"], packed["params"], strict=True)):
            place = place_of(param) if kept_in(saved["state"].get(key, {})) else None
            if place is not None and place.unit.is_sharded:
                kept[str(position)] = kept_in(saved["state"][key])
                saved["state"][key] = {k: v for k, v in saved["state"][key].items() if k not in KEPT_KEYS}
        carry(packed, kept)


def _ordinary(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, param) for name, param in named if part_of(param) is None]


def _refuse(name: str, param: Tensor, group: Mapping[str, Any], *, sharded: bool) -> None:
    """Raise ValueError for options that a tensor of a flat parameter cannot have."""
    part = part_of(param)
    assert part is not None
    if group["use_muon"]:
        try:
            refuse_piece(param, part.piece)
        except ValueError as wrong:
            raise ValueError(f"{name}: {wrong}") from None
    if group.get("clip_grad") is False:
        raise ValueError(
            f"{name}: clip_grad=False needs gradients tensor by tensor, and FSDP1 with use_orig_params=False has one "
            "for a whole unit. Wrap with use_orig_params=True"
        )
    if sharded and (group.get("tp_group") is not None or group.get("partition_dim") is not None):
        raise ValueError(f"{name}: tp_group and partition_dim are for plain tensors; FSDP1 has flattened this one")


def _point(part: Tensor, unit: Unit, index: int) -> None:
    """Let a leaf and its gradient share memory with the flat parameter as it is now."""
    flat, piece = unit.flat, unit.pieces[index]
    if flat.numel() != unit.numel:
        raise ValueError(
            f"FSDP1 has gathered its flat parameter: {flat.numel()} elements are here, where this rank keeps "
            f"{unit.numel}. Step after backward(), and outside of summon_full_params()"
        )
    here = window(unit, flat.detach(), piece)
    if here.data_ptr() != part.data_ptr() or here.dtype != part.dtype or here.device != part.device:
        part.data = here
    if flat.grad is None:
        part.grad = None
        return
    if flat.grad.numel() != flat.numel():
        raise ValueError(
            f"the gradient of its flat parameter has {flat.grad.numel()} elements, of which this rank keeps "
            f"{flat.numel()}: it is not reduced yet. Leave no_sync() for the last backward() before a step"
        )
    grad = window(unit, flat.grad.detach(), piece)
    if grad.dtype == part.dtype:
        part.grad = grad
    else:  # keep_low_precision_grads
        part.grad = torch.empty_like(part)
        part.grad.data = grad
