"""One guarded reading of everything that a step hangs on, before the ranks agree to it. It changes nothing.

[Note: one guard]
    Between the plan in force and the agreement nothing runs but `read`, and its one caller catches whatever is raised
    there, of whatever class and wherever: it becomes what this rank says in the agreement, so that all ranks raise it
    together. Otherwise the others would wait for this one until the time-out. Whoever adds something to look at before
    a step adds it here.

[Note: memory before the agreement]
    Momentum is made or converted here too, beside the state: a rank that has no memory for it says so while all can
    still stop. It becomes part of the state once every rank has agreed (`begin`).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardmuon.engines import engine_for
from shardmuon.engines.base import MISPLACED, NONE
from shardmuon.errors import fault_text
from shardmuon.momentum.keeper import Keeper, gradient_dtype, is_coded
from shardmuon.stepping.binding import Binding
from shardmuon.stepping.checks import Seen, dtypes_text, scale_texts, see_gradients
from shardmuon.stepping.kept import Settled, start_kept, stored_kept, unsettled
from shardmuon.stepping.settings import Group, Settings, all_settings, batch_text, name_of, settings_text, taking_part
from shardmuon.stepping.work import Kernel, ParamWork
from shardmuon.variants import KEPT_KEYS, keeping

State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sources:
    """What a step hangs on besides the plan.

    Attributes:
        groups: The optimizer's.
        state: The optimizer's; not written to before `Reading.begin`.
        keeper: How momentum is stored.
        options_text: Group -> the options that a plan is made for, as text.
        kernel: Makes what all matrices have in common.
        remarks: More that the ranks must agree on.
        settled: See `kept.unsettled`; filled in by `Reading.begin`.
    """

    groups: Sequence[Group]
    state: State
    keeper: Keeper
    options_text: Callable[[Group], str]
    kernel: Callable[[], Kernel]
    remarks: Callable[[], str]
    settled: Settled


@dataclass(slots=True)
class Reading:
    """What a rank has found, and what it says in the agreement.

    Attributes:
        states: NONE, READY or MISPLACED per parameter; the agreement fills in what this rank stores nothing of.
        texts: Per parameter what ranks must agree on.
        settings: Per parameter its group's options.
        stale: Parameters or options are no longer those of the plan; nothing else has been read then.
        error: The first thing that is wrong.
        cause: The exception behind it, if it is not a ValueError about gradients, options or state.
        kernel: What all matrices have in common in this step.
    """

    states: list[int]
    texts: list[str]
    settings: list[Settings | None] = field(default_factory=list)
    stale: bool = False
    error: str | None = None
    cause: BaseException | None = None
    kernel: Kernel | None = None
    _work: dict[int, ParamWork] = field(default_factory=dict)
    _new_states: dict[int, dict[str, Any]] = field(default_factory=dict)  # of parameters whose state will change
    _fresh: dict[int, tuple[str, ...]] = field(default_factory=dict)  # of what this rank stores, see ParamWork
    _at: str = ""  # the name of what is being read, for messages

    def fail(self, wrong: BaseException) -> None:
        """Something was raised while this rank was reading."""
        text, where = fault_text(wrong), f"{self._at}: " if self._at else ""
        self.error = text if text.startswith(where) else f"{where}{text}"
        self.cause, self.stale = wrong, False

    def begin(self, binding: Binding, sources: Sources) -> dict[int, ParamWork]:
        """All ranks have agreed: the local storages of every Muon parameter with a gradient. Its state is there now.

        Collective among the ranks of a parameter whose gradient is placed otherwise.
        """
        binding.device_rates.agreed()
        for index, status in enumerate(self.states):
            if status != NONE and index not in self._work:  # only other ranks store any of it
                c = binding.candidates[index]
                weight = c.engine.storage(c.param)
                nothing, kept = _nothing(weight, gradient_dtype(c.param)), sources.state.get(c.param) or {}
                self._stage(index, binding, sources, Seen(status, weight, nothing, None, kept))
            elif status == MISPLACED:
                c = binding.candidates[index]
                assert c.param.grad is not None
                grad = c.engine.storage(c.engine.align(c.param.grad, c.param))
                self._work[index] = self._work[index]._replace(grad=grad)
        for index, state in self._new_states.items():
            kept = sources.state[binding.candidates[index].param]
            for key in kept.keys() - state.keys():  # what it kept as AdamW's, or in another dtype
                del kept[key]
            kept.update(state)
        for index, work in self._work.items():
            for key in work.fresh:
                sources.settled[sources.state[binding.candidates[index].param][key]] = True
        return self._work

    def _stage(self, index: int, binding: Binding, sources: Sources, seen: Seen) -> None:
        """Make this step's momentum of a parameter, if it is not there as it is needed."""
        settings, weight, grad = self.settings[index], seen.weight, seen.grad
        assert settings is not None and weight is not None
        if grad is None:  # redistributed when all have agreed; like this its storage will be
            grad = torch.empty_like(weight, dtype=gradient_dtype(binding.candidates[index].param))
        kept: tuple[Tensor, ...] = ()
        others, state = 0, None
        if settings.stages:
            state, kept = self._keep(index, binding, seen)
            others = len(kept)
        fresh = self._fresh.get(index)
        if fresh is None:
            fresh = unsettled(settings.stages, seen.kept, sources.settled) if settings.stages else ()
        momentum = None if state else sources.keeper.as_kept(seen.kept, seen.buffer, grad, others)
        rounding = None
        if momentum is None:
            state = self._new_states[index] = state or dict(seen.kept)
            own = [stage.key for stage in keeping(settings.stages)]
            for key in KEPT_KEYS:  # of a variant that the group had before: it would be stale when that comes back
                if key not in own:
                    state.pop(key, None)
            c, layout = binding.candidates[index], binding.plan.specs[index].layout
            momentum, rounding = sources.keeper.momentum(c, layout, grad, state)
        self._work[index] = ParamWork(weight, grad, momentum, settings, rounding, kept, fresh)

    def _keep(self, index: int, binding: Binding, seen: Seen) -> tuple[dict[str, Any] | None, tuple[Tensor, ...]]:
        """What this rank stores of what stages of a parameter's variant keep; and its state, if some of it was made."""
        c = binding.candidates[index]
        known = binding.looked_up.setdefault(_KEPT, {})
        if index not in known:
            spec, keys = binding.plan.specs[index], [stage.key for stage in keeping(c.stages)]
            shapes = dict(zip(keys, (kept.layout.shape for kept in spec.kept), strict=True))
            known[index] = shapes, spec.layout.view.num_row_dims == 2
        shapes, stacked = known[index]
        made = start_kept(shapes, c.engine, c.param, seen.kept, stacked=stacked)
        state = {**seen.kept, **made}
        return state if made else None, stored_kept(shapes, c.engine, c.param, state, stacked=stacked)


_KEPT = "shapes of what stages keep"


def read(reading: Reading, binding: Binding, sources: Sources) -> None:
    """Look at everything that this step hangs on and fill in `reading`. Talks to nobody, changes nothing."""
    groups, keeper = sources.groups, sources.keeper
    settings, reading.error = all_settings(binding.device_rates.on_host(groups))
    if reading.error is not None:
        return
    settings = binding.device_rates.give_back(groups, settings)
    params = [taking_part(group) if group["use_muon"] else [] for group in groups]
    if not _is_current(reading, binding, sources, params):
        reading.stale = True
        return
    reading.settings = [s for s, listed in zip(settings, params, strict=True) for _ in listed]
    texts = ["" if s is None else settings_text(s) for s in settings]
    grads = [grad for listed in params for _, grad in listed]
    found, error = see_gradients(binding, grads, groups, sources.state)
    scales, wrong_scale = scale_texts(binding.candidates, reading.settings)
    more = sources.remarks()
    reading.kernel = sources.kernel()
    wire = reading.kernel.wire_dtype
    texts = [text for text, listed in zip(texts, params, strict=True) for _ in listed]
    for index, (c, grad, seen, scale) in enumerate(zip(binding.candidates, grads, found, scales, strict=True)):
        reading._at = c.name
        texts[index] += f"{scale} {dtypes_text(seen, c.param, grad, wire)}{more}"
        if c.stages:
            new = unsettled(c.stages, seen.kept, sources.settled)
            texts[index] += f" new={new}" if new else ""
            if seen.weight is not None:
                reading._fresh[index] = new
    reading._at = ""
    reading.texts = keeper.with_steps(binding, texts, sources.state)
    reading.states = [seen.state for seen in found]
    coded = {index: seen.kept for index, seen in enumerate(found) if is_coded(seen.buffer, seen.kept)}
    wrong = None if error else keeper.fault(binding, coded)
    reading.error = error or wrong or wrong_scale
    if reading.error is not None:
        return
    for index, (seen, c) in enumerate(zip(found, binding.candidates, strict=True)):
        if seen.weight is not None:
            reading._at = c.name
            reading._stage(index, binding, sources, seen)


def _is_current(
    reading: Reading,
    binding: Binding,
    sources: Sources,
    params: Sequence[Sequence[tuple[Tensor, Tensor | None]]],  # of each group, with gradients
) -> bool:
    """Whether the plan was made for just these parameters and options as they are now.

    Frameworks swap parameters after __init__, and `load_state_dict` replaces groups.
    """
    if sum(map(len, params)) != len(binding.candidates):
        return False
    planned = zip(binding.candidates, binding.signatures, strict=True)
    for index, (group, listed) in enumerate(zip(sources.groups, params, strict=True)):
        if not group["use_muon"]:
            continue
        reading._at = name_of(group, index, 0) if group["params"] else f"group {index}"
        options, batch = sources.options_text(group), batch_text(group)
        for p, _ in listed:
            c, signature = next(planned)
            if p is not c.param or options != c.options or batch != c.batch:
                return False
            reading._at = c.name
            if engine_for(p, group).signature(p) != signature:
                return False
    reading._at = ""
    return True


def _nothing(storage: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.zeros_like(storage, dtype=dtype or storage.dtype)
