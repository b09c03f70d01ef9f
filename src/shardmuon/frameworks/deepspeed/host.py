"""A step on ZeRO's flat partitions: the same optimizer, run on the parts of matrices that the flats hold.

DeepSpeed puts flats in the place of parameters (partitions.py). For each set of flats that it steps together
there is an *inner* optimizer with the outer one's options, whose parameters are shards: views of the flats. Momentum
belongs to the outer optimizer and is as long as the flat, so DeepSpeed finds, offloads and saves it as that of any
other optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.carried import CARRIED, carry, kept_in, missing_fault, take_carried
from shardmuon.comm.faults import Fault
from shardmuon.comm.vote import Phase, run_together
from shardmuon.errors import REMEDY, ExchangeError, Refused, fault_text, stays_itself
from shardmuon.frameworks.deepspeed.flats import Flat, momentum_of
from shardmuon.frameworks.deepspeed.loss_scale import restore_gradients, warn_of_unknown_scale
from shardmuon.frameworks.deepspeed.nvme import refuse_params, refuse_swaps, swapper_of, zero3_of
from shardmuon.frameworks.deepspeed.partitions import (
    check_version,
    flats_of_stage_3,
    is_initializing,
    is_partitioned,
    known_insides,
    loading_engine,
    refuse_options,
    refuse_parts,
    refuse_tagged_early,
)
from shardmuon.frameworks.deepspeed.resume import Mark
from shardmuon.frameworks.guards import adamw_fault, raised_by, step_inner
from shardmuon.host import Host, Weight
from shardmuon.layout.bind import settle
from shardmuon.momentum.keeper import BUFFER
from shardmuon.options import check_hyperparameters
from shardmuon.step.adamw import init_state

if TYPE_CHECKING:
    from shardmuon.core import Core, Course
    from shardmuon.plan.plan import Plan

Named = tuple[str, Tensor]


class DeepSpeedHost(Host):
    """DeepSpeed's engine. Active once its flats are in the groups.

    Attributes:
        groups: (group, its named parameters) as the optimizer was made.
        mark: Of checkpoints with NVMe offload.
    """

    in_parts = True
    has_copies = True
    packages = ("deepspeed",)
    clipping = 'these gradients are DeepSpeed\'s, which clips them before step(): set "gradient_clipping" in its config'

    def __init__(self) -> None:
        self.groups: list[tuple[dict[str, Any], list[Named]]] = []
        self._options: list[dict[str, Any]] = []  # of each group, as it was last stepped
        self._flats: dict[int, Flat] = {}
        self._others: dict[int, Flat] = {}  # AdamW's, once somebody asks for all weights
        self._inner: dict[tuple[int, ...], Core] = {}
        self._attached = self._swaps = False
        self._unchecked = True  # weights may have come from elsewhere since the last step
        self._apart: frozenset[int] | None = None  # the ranks that share any flat, if not all share every flat
        self._fault: BaseException | None = None  # of this training step, for the first vote to tell
        self._carried: dict[str, dict[str, Tensor]] = {}  # name -> what stages keep, loaded and not taken over yet
        self.mark = Mark()
        self._count = 0  # of all flats, AdamW's too
        self._stepped: set[int] = set()  # flats of this training step
        self._no_agreement = False  # in this call, of a training step that has one in others
        # Of calls without a vote, for every talk to tell until state is loaded.
        self._untold: BaseException | None = None

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        """Remember a group's parameters before DeepSpeed takes their place."""
        refuse_tagged_early(group["params"])
        self.groups.append((group, list(zip(names, group["params"], strict=True))))
        self._options.append(_options(group))

    def instead_of_step(self, core: Core, plain: bool) -> Callable[[], None] | None:
        """Its stage-0 wrappers step on zero gradients only to have state made, once fp32 copies are in the groups."""
        if is_initializing():
            return lambda: self._initialized(core.param_groups)
        restore_gradients()
        return None

    def _initialized(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if the copies may be parts."""
        check_version()
        warn_of_unknown_scale()
        for group, (_, named) in zip(groups, self.groups, strict=True):
            refuse_parts([p for _, p in named], group["params"])

    @classmethod
    def clips(cls, params: Iterable[Any]) -> str | None:
        return cls.clipping if is_partitioned(params) else None

    def replaced(self, groups: Sequence[dict[str, Any]]) -> None:
        """The optimizer's groups are other dicts now (`load_state_dict`)."""
        self.groups = [(new, named) for new, (_, named) in zip(groups, self.groups, strict=True)]
        self._unchecked, self._untold, self._carried = True, None, {}
        self._take_carried()
        self._options = [_options(group) for group in groups]
        self._forget_kept()

    def _take_carried(self) -> bool:
        """What loaded groups carry. DeepSpeed loads a universal checkpoint by writing to the groups that there are."""
        there = any(CARRIED in group for group, _ in self.groups)
        if there:
            self._carried = take_carried(group for group, _ in self.groups)
        return there

    def _forget_kept(self) -> None:
        """What stages kept is of the past."""
        for inner in self._inner.values():
            for state in inner.state.values():
                state.clear()

    def saved(self, core: Core, saved: dict[str, Any]) -> None:
        """What stages of variants keep has no place in state that is as long as a flat."""
        if not self.is_active:
            return
        kept = dict(self._carried)
        for known in self._flats.values():
            for inner in self._inner.values():
                found = {name: kept_in(inner.state[s]) for name, s in known.named_shards() if s in inner.state}
                kept |= {name: of_param for name, of_param in found.items() if of_param}
        # By name, all in the first group: of a universal checkpoint stage 3 loads that one's options, for every group.
        carry(saved["param_groups"][0], kept)

    @property
    def is_active(self) -> bool:
        """Whether the groups hold flats."""
        return is_partitioned(p for _, named in self.groups for _, p in named)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those of all that has been stepped so far."""
        return tuple(inner.binding.plan for inner in self._inner.values() if inner.binding is not None)

    @property
    def plan(self) -> Plan | None:
        raise AttributeError(_SEVERAL_PLANS)

    def prepare(self, core: Core) -> Plan:
        raise ValueError(_SEVERAL_PLANS)

    def load(self, core: Core, load: Callable[[], None]) -> None:
        """Where DeepSpeed loads a checkpoint all ranks do, and collectives of its own follow: what one raises is
        raised on each. Where they load one after the other (`pipeline_loading_checkpoint`), the next talk tells it."""
        engine = loading_engine()
        if engine is None:
            load()
        elif engine._config.zero_config.pipeline_loading_checkpoint:
            try:
                load()
            except Exception as wrong:
                self._untold = self._untold or wrong
        else:
            try:
                run_together(load)
            except Refused as refused:  # others may have taken their state over, and all have the model's weights
                core.broken = f"a checkpoint was not loaded: {refused}. {REMEDY}"
                self.restore_groups(core)
                raise

    def refuse_untold(self) -> None:
        """Raise what no talk has told yet."""
        if self._untold is not None:
            raise self._untold

    def saving(self, core: Core) -> None:
        if not self.is_active:
            return
        self._restore_options(core)
        swapper = swapper_of(p for _, named in self.groups for _, p in named)
        if swapper is not None:
            self.mark.write(swapper.swap_folder)

    def _begin(self, core: Core, early: BaseException | None) -> None:
        """Before the first flat of a training step. Collective the first time, with NVMe offload, and where flats are
        shared by different ranks (experts), since then no later vote reaches all of them."""

        def read() -> None:
            if early is not None:
                raise early
            with known_insides():
                swapper = swapper_of(p for _, named in self.groups for _, p in named)
                if swapper is not None:
                    self.mark.refuse_loaded(swapper.swap_folder)
                self._restore_options(core)
                if not self._attached:
                    self._attach(core)
                    self._swaps = swapper is not None
                if self._unchecked:
                    self._refuse_unlike_model()
                if self._apart is not None:
                    self._refuse_wrong(core)
                sharers = {known.ranks for known in self._flats.values()}
                self._apart = frozenset[int]().union(*sharers) if len(sharers) > 1 else None

        self._fault = None
        if not self._attached or self._swaps:
            run_together(read)
        elif self._apart is not None:
            run_together(read, tuple(sorted(self._apart)))
        else:
            self._fault = raised_by(read)
        self._attached, self._unchecked = True, self._fault is not None

    def _refuse_unlike_model(self) -> None:
        """Raise ValueError if DeepSpeed steps other weights than the model has."""
        wrong = [name for known in self._flats.values() for name in known.unlike_model()]
        if wrong:
            in_stage_3 = zero3_of(p for _, named in self.groups for _, p in named) is not None
            raise ValueError(
                f"{', '.join(wrong)}: the fp32 weights that DeepSpeed steps are not the model's. If some were set "
                "after deepspeed.initialize(), bring both in line before the step: engine.optimizer."
                f"refresh_fp32_params() after writing to the model, {_SET_IN_STAGE_3 if in_stage_3 else _SET}. If "
                "not, DeepSpeed lays its partitions out in a way that is not known: please report it with its config"
            )

    def _refuse_wrong(self, core: Core) -> None:
        """Raise ValueError for options or momentum with which a later group of this training step would fail."""
        for index, (group, _) in enumerate(self.groups):
            check_hyperparameters(f"group {index}: ", group)
        for known in self._flats.values():
            momentum_of(core, known)

    def _all_flats(self) -> list[tuple[int, Tensor]]:
        """(index of the group, flat) of all flats."""
        flats = flats_of_stage_3(p for _, named in self.groups for _, p in named)
        return flats or [(i, flat) for i, (group, _) in enumerate(self.groups) for flat in group["params"]]

    def weights(self, core: Core) -> list[Weight]:
        """Parts of the flats, AdamW's too."""
        stepped = {id(flat) for group in core.param_groups for flat in group["params"]}
        found: list[Weight] = []
        for index, flat in self._all_flats():
            group, named = self.groups[index]
            known = self._flats.get(id(flat)) or self._others.get(id(flat))
            if known is None or known.flat is not flat:
                names = {id(p): name for name, p in named}
                known = self._others[id(flat)] = Flat(flat, names, [p for _, p in named])
            if known.swapped:
                raise ValueError(
                    f"{known.names[0]}: DeepSpeed keeps it in files (offload to NVMe), where nothing but a step "
                    'reaches it. Use offload_optimizer {"device": "cpu"}'
                )
            for name, part, shard in zip(known.names, known.slices, known.shards, strict=True):
                shard.data = flat.detach().narrow(0, part.offset, part.numel)
                found.append(Weight(name, part.param, shard, group, id(flat) in stepped))
        return found

    def keeping(self, core: Core) -> Iterable[Core]:
        return self._inner.values()

    def has_stepped_all(self, core: Core) -> bool:
        return len(self._stepped) >= self._count

    def _attach(self, core: Core) -> None:
        """Find what every flat holds and make its state before the first one is stepped. DeepSpeed looks for state
        once, after it."""
        check_version()
        refuse_options(core.keeper, [group for group, _ in self.groups])
        refuse_params([pair for _, named in self.groups for pair in named])
        flats = self._all_flats()
        self._count = len(flats)
        for index, flat in flats:
            group, named = self.groups[index]
            swapped = refuse_swaps(flat, named, num_states=1 if group["use_muon"] else 2)
            known = self._flat(group, flat) if group["use_muon"] else None
            if known is not None and core.keeper.dtype not in (None, flat.dtype):
                raise ValueError(
                    f"Storage.momentum_dtype={core.keeper.dtype}: DeepSpeed keeps weights and momentum of group "
                    f"{index} as {flat.dtype} (bf16_master_weights_and_grads in its config). Leave momentum_dtype out"
                )
            if swapped:  # its state is made when it is stepped: in memory there is one sub-group's at a time
                continue
            if known is not None:
                momentum_of(core, known)
            else:
                init_state(flat, flat, core.state[flat])

    def step(self, core: Core, course: Course, early: BaseException | None) -> None:
        """Step the Muon groups among those that DeepSpeed has put into `core.param_groups` for this call."""
        flats: list[tuple[dict[str, Any], Tensor]] = []  # by loops: what is called here could raise on one rank alone
        for group in core.param_groups:
            for flat in group["params"]:
                flats.append((group, flat))
        again = False
        for _, flat in flats:
            again = again or id(flat) in self._stepped
        if again:  # a new training step
            self._stepped.clear()
        self._no_agreement = False
        try:
            if not self._stepped:
                self._begin(core, early)
            self._no_agreement = bool(self._flats) and all(not group["use_muon"] for group, _ in flats)
            if early is None or not self.tells_later(early):
                self._step_muon(core, flats, course, early)
        except BaseException as error:
            self.restore_groups(core)
            if self._stepped and not course.changing:
                core.broken = f"{fault_text(error)}. Other groups had been updated already. {REMEDY}"
            raise
        for _, flat in flats:
            self._stepped.add(id(flat))

    def tells_later(self, error: BaseException) -> bool:
        """A call for AdamW's groups alone has no vote. The other ranks go on to Muon's groups, or to DeepSpeed's
        own collectives, and would wait there: the next vote tells them, or `conclude` where none follows."""
        if self._no_agreement:
            self._untold = self._untold or error
        return self._no_agreement

    def conclude(self, core: Core) -> None:
        """Where a training step ends with AdamW's groups, one more talk: their weights may be half updated on one rank,
        and DeepSpeed gathers them next. Collective."""
        if not self._no_agreement or len(self._stepped) < self._count:
            return
        wrong = self._untold
        sharers = frozenset[int]().union(*(known.ranks for known in self._flats.values()))
        fault = Fault()
        with fault:
            if wrong is not None:
                raise wrong
        try:
            settle(fault, tuple(sorted(sharers)), Phase.STEP)
            return
        except Refused as refused:
            heard = str(refused)
        self.restore_groups(core)
        core.broken = f"{heard}. Other groups had been updated already. {REMEDY}"
        if wrong is not None and (len(sharers) == 1 or stays_itself(wrong)):
            raise wrong
        raise ExchangeError(core.broken) from wrong

    def _step_muon(
        self,
        core: Core,
        flats: Sequence[tuple[dict[str, Any], Tensor]],
        course: Course,
        early: BaseException | None,
    ) -> None:
        """Step those of the flats that are Muon's. Between two talks nothing runs but what is guarded."""
        muon: list[tuple[dict[str, Any], Tensor]] = []
        key: tuple[int, ...] = ()
        ranks: frozenset[int] = frozenset()
        for group, flat in flats:
            if group["use_muon"]:
                muon.append((group, flat))
                key += (id(flat),)
                ranks |= self._flats[id(flat)].ranks
        if not muon:
            wrong = early or (None if self._flats else self._fault)
            if wrong is not None:  # nobody waits for these flats: see `tells_later`
                raise wrong
            return
        if key not in self._inner:
            made: list[Core] = []

            def make() -> None:
                if early is not None:
                    raise early
                made.append(self._make_for(core, muon))

            run_together(make, tuple(sorted(ranks)))
            self._inner[key] = made[0]
        inner = self._inner[key]
        wrong = raised_by(lambda: self._refresh(core, inner, muon))
        step_inner(inner, course, early or self._fault or self._untold or wrong)
        for _, flat in muon:
            core.state[flat]["step"] += 1

    def _refresh(self, core: Core, inner: Core, muon: Sequence[tuple[dict[str, Any], Tensor]]) -> None:
        """Show an inner optimizer the options, weights, gradients and momentum as they are now."""
        for mine, (group, _) in zip(inner.param_groups, muon, strict=True):
            mine.update(_options(group) | {"param_names": mine["param_names"]})  # schedules write to the outer group
        wrong = adamw_fault([group for group, _ in self.groups])
        faults = [] if wrong is None else [ValueError(wrong)]
        for group, flat in muon:
            known = self._flat(group, flat)
            try:
                momentum = momentum_of(core, known)
            except ValueError as error:
                faults.append(error)
                momentum = torch.zeros_like(flat)  # nothing is done with it
            for name, shard in known.named_shards():
                if BUFFER not in inner.state[shard] and float(core.state[flat].get("step", 0)) > 0:  # it was loaded
                    carried = self._carried.pop(name, {})
                    fault = missing_fault(name, group, carried)
                    faults += [] if fault is None else [ValueError(fault)]
                    inner.state[shard] |= {key: value.to(flat.device, copy=True) for key, value in carried.items()}
            known.refresh(momentum, inner.state)
        if faults:
            raise faults[0]

    def restore_groups(self, core: Core) -> None:
        """As they are between steps, which DeepSpeed sees to only without an error."""
        core.param_groups = [group for group, _ in self.groups]
        if zero3_of(p for _, named in self.groups for _, p in named) is not None:
            for group in core.param_groups:
                group["params"] = []

    def _restore_options(self, core: Core) -> None:
        """Loading a universal checkpoint, DeepSpeed gives groups the options of the checkpoint's groups in their order,
        at stage 3 all of them those of the first. And all sub-groups get one and the same tensor as "step" there, which
        each of them would then count up for all."""
        if self._take_carried():
            self._forget_kept()
        seen: set[int] = set()
        for state in core.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    if id(value) in seen:
                        state[key] = value.clone()
                    seen.add(id(value))
        for index, (group, named) in enumerate(self.groups):
            own, names = self._options[index], [name for name, _ in named]
            if group.setdefault("param_names", names) != own.setdefault("param_names", names):  # another group's
                flats = group["params"]
                group.clear()
                group.update(own, params=flats)
            self._options[index] = _options(group)

    def _flat(self, group: dict[str, Any], flat: Tensor) -> Flat:
        known = self._flats.get(id(flat))
        if known is None or known.flat is not flat:
            named = next((named for made, named in self.groups if made is group), None)
            if named is None:
                raise ValueError(
                    "a group of the optimizer is none of those that it was made with: DeepSpeed's (or another) wrapper "
                    "replaced it. Make the optimizer from the groups as they are and initialize DeepSpeed again"
                )
            names = {id(p): name for name, p in named}
            known = self._flats[id(flat)] = Flat(flat, names, [p for _, p in named])
        return known

    def _make_for(self, core: Core, muon: Sequence[tuple[dict[str, Any], Tensor]]) -> Core:
        """The inner optimizer of flats that are stepped together."""
        flats = [self._flat(group, flat) for group, flat in muon]
        groups = [
            {**group, "params": known.shards, "param_names": known.names}
            for (group, _), known in zip(muon, flats, strict=True)
        ]
        inner = core.over(groups)
        inner.unlike_model = lambda: [name for known in flats for name in known.unlike_model()]  # type: ignore[method-assign]
        return inner


_SET = "engine.optimizer.update_lp_params() after safe_set_full_fp32_param()"
_SET_IN_STAGE_3 = (
    "which at stage 3 is the only way before the first step: write under "
    "deepspeed.zero.GatheredParameters([p], modifier_rank=0), not by safe_set_full_fp32_param()"
)
_SEVERAL_PLANS = "DeepSpeed steps groups one by one, each by its own plan: print(*optimizer.plans)"


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
