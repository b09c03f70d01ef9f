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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon.engines import engine_for
from shardmuon.engines.base import NONE
from shardmuon.errors import fault_text
from shardmuon.momentum.keeper import BUFFER, Keeper, gradient_dtype
from shardmuon.momentum.rounding import Stream
from shardmuon.momentum.stores import Momentum
from shardmuon.stepping.binding import Binding
from shardmuon.stepping.checks import Seen, dtypes_text, scale_texts, see_gradients
from shardmuon.stepping.settings import Group, Settings, all_settings, batch_text, name_of, takes_part
from shardmuon.stepping.work import Kernel, ParamWork

State = MutableMapping[Tensor, dict[str, Any]]


class _Staged(NamedTuple):
    """A parameter's momentum in this step, and its state as it will be."""

    momentum: Momentum
    rounding: Stream | None
    state: dict[str, Any]


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
    """

    groups: Sequence[Group]
    state: State
    keeper: Keeper
    options_text: Callable[[Group], str]
    kernel: Callable[[], Kernel]
    remarks: Callable[[], str]


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
    _seen: list[Seen] = field(default_factory=list)
    _staged: dict[int, _Staged] = field(default_factory=dict)
    _at: str = ""  # what is being read, for messages

    def fail(self, wrong: BaseException) -> None:
        """Something was raised while this rank was reading."""
        text = fault_text(wrong)
        self.error = text if text.startswith(self._at) else f"{self._at}{text}"
        self.cause, self.stale = wrong, False

    def begin(self, binding: Binding, sources: Sources) -> dict[int, ParamWork]:
        """All ranks have agreed: the local storages of every Muon parameter with a gradient. Its state is there now.

        Collective among the ranks of a parameter whose gradient is placed otherwise.
        """
        binding.device_rates.agreed()
        work = {}
        for index, (c, status, settings) in enumerate(zip(binding.candidates, self.states, self.settings, strict=True)):
            if status == NONE:
                continue
            assert settings is not None, "all ranks have agreed"
            _, weight, grad = self._seen[index]
            if weight is None:  # this rank stores nothing of it, those that do have its gradient
                weight = c.engine.storage(c.param)
                grad = _nothing(weight, gradient_dtype(c.param))
                self._stage(index, binding, sources, grad)
            elif grad is None:
                assert c.param.grad is not None
                grad = c.engine.storage(c.engine.align(c.param.grad, c.param))
            momentum, rounding, staged = self._staged.pop(index)
            kept = sources.state[c.param]
            for key in kept.keys() - staged.keys():  # what it kept as AdamW's, or in another dtype
                del kept[key]
            kept.update(staged)
            work[index] = ParamWork(weight, grad, momentum, settings, rounding)
        return work

    def _stage(self, index: int, binding: Binding, sources: Sources, grad: Tensor) -> None:
        """Make this step's momentum of a parameter; `grad` says what its gradient's storage is like."""
        c = binding.candidates[index]
        state = dict(sources.state.get(c.param, ()))
        layout = binding.plan.specs[index].layout
        self._staged[index] = _Staged(*sources.keeper.momentum(c, layout, grad, state), state)


def read(reading: Reading, binding: Binding, sources: Sources) -> None:
    """Look at everything that this step hangs on and fill in `reading`. Talks to nobody, changes nothing."""
    reading.settings, texts, reading.error = all_settings(binding.device_rates.on_host(sources.groups))
    binding.device_rates.give_back(sources.groups, reading.settings, texts)
    if reading.error is not None:
        return
    if not _is_current(reading, binding, sources):
        reading.stale = True
        return
    reading._seen, error = see_gradients(binding, sources.groups, sources.state)
    states = [seen.state for seen in reading._seen]
    scales, wrong_scale = scale_texts(binding.candidates, reading.settings)
    more = sources.remarks()
    reading.kernel = sources.kernel()
    wire = reading.kernel.wire_dtype
    for index, (c, text, scale) in enumerate(zip(binding.candidates, texts, scales, strict=True)):
        reading._at = f"{c.name}: "
        buffer = sources.state.get(c.param, {}).get(BUFFER)
        texts[index] = f"{text}{scale} {dtypes_text(c.param, buffer, wire)}"
    reading._at = ""
    texts = sources.keeper.with_steps(binding, texts, sources.state)
    wrong = None if error else sources.keeper.fault(binding, states, sources.state)
    reading.states, reading.texts = states, [text + more for text in texts] if more else texts
    reading.error = error or wrong or wrong_scale
    if reading.error is not None:
        return
    for index, ((_, weight, grad), c) in enumerate(zip(reading._seen, binding.candidates, strict=True)):
        if weight is not None:
            reading._at = f"{c.name}: "
            if grad is None:
                assert c.param.grad is not None
                grad = torch.empty_like(weight, dtype=c.param.grad.dtype)
            reading._stage(index, binding, sources, grad)


def _is_current(reading: Reading, binding: Binding, sources: Sources) -> bool:
    """Whether the plan was made for just these parameters and options as they are now.

    Frameworks swap parameters after __init__, and `load_state_dict` replaces groups.
    """
    texts = []
    for index, group in enumerate(sources.groups):
        reading._at = f"{name_of(group, index, 0)}: " if group["params"] else f"group {index}: "
        texts.append((sources.options_text(group), batch_text(group)) if group["use_muon"] else ("", ""))
    reading._at = ""
    current = [
        (p, g, text)
        for g, text in zip(sources.groups, texts, strict=True)
        if g["use_muon"]
        for p in g["params"]
        if takes_part(p)
    ]
    if len(current) != len(binding.candidates):
        return False
    for (p, g, text), c, signature in zip(current, binding.candidates, binding.signatures, strict=True):
        if p is not c.param or text != (c.options, c.batch):
            return False
        reading._at = f"{c.name}: "
        if engine_for(p, g).signature(p) != signature:
            return False
    reading._at = ""
    return True


def _nothing(storage: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.zeros_like(storage, dtype=dtype or storage.dtype)
