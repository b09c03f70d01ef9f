"""Validation of an optimizer step. Validation reads everything on which the step depends, without changing weights or
optimizer state, and collects the values that must be equal on all ranks that share a parameter. Before the step, ranks
vote on whether to take it, and compare digests of these values. If the digests differ, the error message contains the
values.

Validation may raise any exception, because its only caller reports the exception in this rank's vote. Missing momentum
is allocated during validation, so that a rank that runs out of memory can report this error before any rank has changed
its weights. The momentum becomes part of the optimizer's state once all ranks have agreed to the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor, local_if_any
from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import digest_of
from shardmuon.errors import about, ranks_text
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.layout.engines.base import GradientState, Group, named_params
from shardmuon.layout.mesh import same_storage
from shardmuon.layout.views import Ints
from shardmuon.momentum.keeper import BUFFER, MOMENTS, STEP, gradient_dtype
from shardmuon.options import Settings
from shardmuon.step.adamw import Row
from shardmuon.step.binding import Binding, Member
from shardmuon.step.update import Work
from shardmuon.variants import KEPT_KEYS, Stages, WeightStage, keeping

# One parameter's data for error messages: its name, the state of its gradient, and a text that lists its dtypes and
# options.
_Line = tuple[str, str, str]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass
class Proposal(Work):
    """The step that this rank will take if all ranks agree, with the values on which they must agree.

    Attributes:
        states: `GradientState` of each parameter's gradient.
        said: For each parameter, two strings that must be equal on all ranks that share it: the state of its gradient
            (from `states`), and its dtypes and options.
        made: New optimizer state of each parameter whose state must be created or converted. The keys are parameter
            indices, and each value is the complete state of one parameter.
        fresh: Dict from parameter index to the keys of missing state tensors and of weight norms that no step has
            checked (see `_unsettled`).
        adamw: Dict from the index of each AdamW group to one `Row` of local tensors per parameter. The entry of a
            parameter that fails a quick check is None, for example if its state is missing (see `_adamw_rows`).
        presence: Bit mask with one bit for each parameter whose gradient can be missing on some ranks (see
            `Binding.bits`). A bit is 1 if this rank has the gradient.
    """

    states: list[str] = field(default_factory=list)
    said: list[tuple[str, str]] = field(default_factory=list)
    made: dict[int, dict[str, Any]] = field(default_factory=dict)
    fresh: dict[int, tuple[str, ...]] = field(default_factory=dict)
    adamw: dict[int, list[Row | None]] = field(default_factory=dict)
    presence: int = 0

    def digests(self, binding: Binding, due: str) -> dict[Ranks, bytes]:
        """Return a dict from each set of ranks to a digest of the step's values that must be equal on these ranks.
        `due` describes the audit of this step; it is "" if the step is not audited."""
        found = {}
        for ranks, numbers in binding.alike.items():
            if len(ranks) > 1:
                said = map(self.said.__getitem__, numbers)
                runs = [(one, len(list(alike))) for one, alike in itertools.groupby(said)]
                found[ranks] = digest_of((binding.plan.digests.get(ranks), binding.token, due, runs))
        return found

    def lines(self, binding: Binding, ranks: Ranks, due: str) -> list[_Line]:
        """List the values that `digests` hashes for a set of ranks, as text for error messages: a `_Line` for the plan,
        then one for each parameter."""
        said = ((binding.members[number].name, *self.said[number]) for number in binding.alike[ranks])
        plan = "", (binding.plan.digests.get(ranks, b"") + binding.token).hex(), ""
        return [plan, *((name, word, text + due) for name, word, text in said)]

    @staticmethod
    def difference(ranks: Ranks, everyone: Sequence[Sequence[_Line] | None]) -> str:
        """Format an error message about the first difference between ranks that share parameters. `everyone` contains
        the result of `lines` on each rank, in the order of `ranks`, or None for a rank whose plan contains no
        parameters that are shared by exactly these ranks."""
        told = [lines for lines in everyone if lines is not None]
        plans, *lines = zip(*told, strict=False)
        if len(told) < len(ranks) or len(set(plans)) > 1:
            return (
                f"ranks {ranks} hold different plans. If there are several optimizers, step them in one order on all "
                "ranks; else call optimizer.prepare() on every rank"
            )
        for said in lines:  # `said` has one entry per rank, all for the same parameter
            (name, *_), gradients = said[0], [gradient for _, gradient, _ in said]
            if len(set(gradients)) > 1:
                have = {
                    word: [r for r, own in zip(ranks, gradients, strict=True) if own == word]
                    for word in sorted(set(gradients), reverse=True)
                }
                parts = (f"ranks {those} have {word}" for word, those in have.items())
                return (
                    f"{name}: {', '.join(parts)}. Every rank that shares a parameter must have its gradient, or none. "
                    "Set the missing ones to zeros"
                )
            words = [text.split(" ") for _, _, text in said]
            if any(mine != words[0] for mine in words):
                own = (" ".join(word for word in mine if any(word not in theirs for theirs in words)) for mine in words)
                texts = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, own, strict=True))
                return (
                    f"{name}: ranks {ranks} are about to step with different options or state: {texts}. Give them all "
                    "the same options, and load, copy or audit() an optimizer on every rank or on none"
                )
        return f"ranks {ranks_text(ranks)} are about to do different things"


def validate(binding: Binding, core: Any, options: Sequence[Settings | None]) -> Proposal:
    """Check this rank's gradients and state, and return the data of the step that this rank will take if all ranks
    agree. `options` contains the settings of each parameter group, or None for a group that AdamW updates.

    A fast path handles most parameters in nearly every step. It requires that the gradient and the momentum have the
    parameter's layout, and that the momentum is stored in the dtype in which it is computed. All other parameters are
    checked one by one.

    Raises:
        ValueError: A gradient or state is unusable. The message contains the parameter's name.
    """
    members, num = binding.members, len(binding.members)
    settings = cast("list[Settings]", list(map(options.__getitem__, binding.group_of)))
    found = Proposal([None] * num, [None] * num, [None] * num, settings, [()] * num)
    found.states, found.said, found.kinds = [GradientState.NONE] * num, [("", "")] * num, [()] * num
    for (index, engine, *_), numbers in binding.alike_members.items() if core.keeper.as_computed else ():
        of_group = cast(Settings, options[index])
        if not (binding.elsewhere or of_group.stages):
            _glance(found, engine, numbers, members, of_group, core)
    for number, said in enumerate(found.said):
        if not said[0]:
            with about(members[number].name):
                text = f"{_look(found, number, binding, core)}{settings[number].text}"
            found.said[number] = found.states[number], text
    for index, of_adamw in enumerate(core.param_groups):
        if options[index] is None:
            found.adamw[index] = _adamw_rows(of_adamw, index, core.state)
    for number, bit in binding.bits.items():
        if found.states[number] != GradientState.NONE and number not in binding.elsewhere:
            found.presence |= 1 << bit
    return found


def _glance(
    found: Proposal,
    engine: Engine,
    numbers: Sequence[int],
    members: Sequence[Member],
    of_group: Settings,
    core: Any,
) -> None:
    """Check in bulk the parameters of a group that have a gradient and no state except momentum, and fill in their
    entries in the proposal. This is the fast path of `validate`. If the layout of any of these gradients or momenta
    differs from its parameter's, do nothing."""
    rows, state = [], core.state
    for number in numbers:
        param = members[number].param
        grad, kept = param.grad, state.get(param, _NOTHING)
        if grad is not None and len(kept) == 1:
            # Momentum that was loaded from a state dict can be an object of any type.
            rows.append((number, param, grad, kept.get(BUFFER)))
    seen, *columns = zip(*rows, strict=True) if rows else ((),)
    storages = engine.storages(*columns) if rows else None
    if storages is None:
        return
    weights, grads, momenta = storages
    dtype, stored = grads[0].dtype, momenta[0].dtype
    if dtype.is_floating_point and stored == (core.keeper.dtype or dtype):
        said = GradientState.READY, f"weights={weights[0].dtype} gradient={dtype} {BUFFER}={stored} {of_group.text}"
        kind = members[seen[0]].group, weights[0].dtype, dtype, stored, weights[0].device, momenta[0].device, False
        for number, weight, grad, momentum in zip(seen, weights, grads, momenta, strict=True):
            found.weights[number], found.grads[number], found.momenta[number] = weight, grad, momentum
            found.states[number], found.said[number], found.kinds[number] = said[0], said, kind


def _look(found: Proposal, number: int, binding: Binding, core: Any) -> str:
    """Take the slow path of `validate`: check the gradient and state of one parameter, and fill in its entries in the
    proposal. Return a string of its dtypes and state, which must be equal on all ranks that share the parameter."""
    member, keeper, stages = binding.members[number], core.keeper, found.settings[number].stages
    param, engine, kept = member.param, member.engine, core.state.get(member.param, _NOTHING)
    grad, weight = param.grad, engine.storage(param)
    if number in binding.elsewhere:
        grad = engine.wrap(torch.zeros_like(weight, dtype=gradient_dtype(param) or weight.dtype), param)
    if grad is None:
        _check_gradient_elsewhere(param)
        return ""
    _check_writable("storage", weight)
    storage = gradient_storage(param, grad, engine, weight)
    buffer = kept.get(BUFFER)
    momentum = None if buffer is None else state_storage(param, buffer, BUFFER, engine, weight)
    found.states[number] = GradientState.MISPLACED if storage is None else GradientState.READY
    found.weights[number], found.grads[number], found.momenta[number] = weight, storage, momentum
    text = f"weights={weight.dtype} gradient={grad.dtype} {BUFFER}={None if buffer is None else buffer.dtype} "
    if keeper.rounds:
        text += f"{STEP}={keeper.count_of(kept)} "
    if stages:
        found.fresh[number] = _unsettled(stages, kept, core.settled)
        text += f"new={','.join(found.fresh[number])} "
    given = storage if storage is not None else torch.empty_like(weight, dtype=grad.dtype)
    _make(found, number, binding, core, given)
    made = found.momenta[number]
    assert made is not None, "`_make` has made it"
    rounds = number in found.rounding
    found.kinds[number] = member.group, weight.dtype, grad.dtype, made.dtype, weight.device, made.device, rounds
    return text


def _make(found: Proposal, number: int, binding: Binding, core: Any, grad: Tensor) -> None:
    """Create the optimizer state that a parameter lacks, or convert its state to the form that the group's options
    require, and record the new state in the proposal."""
    member, spec, keeper = binding.members[number], binding.plan.specs[number], core.keeper
    param, engine, view = member.param, member.engine, spec.layout.view
    stages, stacked = keeping(found.settings[number].stages), view.num_row_dims == 2
    shapes = {stage.key: kept.layout.view.shape for stage, kept in zip(stages, spec.kept, strict=True)}
    kept = core.state.get(param, _NOTHING)
    made = {
        key: engine.kept_zeros(param, shape, torch.float32, stacked=stacked)
        for key, shape in shapes.items()
        if kept.get(key) is None
    }
    state = {**kept, **made}
    found.kept[number] = _stored_kept(shapes, engine, param, state, stacked=stacked)
    if not made and keeper.is_kept(kept, found.momenta[number], grad, len(shapes)):
        return
    keeper.check_coded(engine, param, view.num_row_dims, kept)
    # Drop the state of all Muon variants except the group's current variant. If the group returned to an earlier
    # variant, that variant's state would be out of date.
    for key in KEPT_KEYS:
        if key not in shapes:
            state.pop(key, None)
    found.made[number] = state
    found.momenta[number], rounding = keeper.fit(param, engine, member.identity, view, grad, state)
    if rounding.momentum is not None or rounding.weights is not None:
        found.rounding[number] = rounding


def _unsettled(stages: Stages, state: Mapping[str, Any], settled: Mapping[Tensor, bool]) -> tuple[str, ...]:
    """Return the keys of state tensors that are missing, and of weight norms that no step has checked since they were
    created or loaded. Such a norm is 0 (unknown) if checkpointing created the state before the first step.

    Ranks must agree on these keys for two reasons. First, computing an unknown norm is a collective. Second, a rank
    that lacks state would restart from zeros while the other ranks continue with theirs.
    """
    on_weights = {stage.key for stage in stages if isinstance(stage, WeightStage)}
    keys = [stage.key for stage in keeping(stages)]
    return tuple(k for k in keys if state.get(k) is None or (k in on_weights and state[k] not in settled))


def _stored_kept(
    shapes: Mapping[str, Ints], engine: Engine, param: Tensor, state: Mapping[str, Any], *, stacked: bool
) -> tuple[Tensor, ...]:
    """Return this rank's part of a parameter's stage state (such as NorMuon's second moments): one tensor for each
    entry of `shapes`, in the same order.

    Raises:
        ValueError: A tensor is missing or has a wrong layout or dtype. The message does not contain the parameter's
            name.
    """
    found: list[Tensor] = []
    for key, shape in shapes.items():
        local = engine.kept_storage(state.get(key), param, shape, stacked=stacked)
        if isinstance(local, Tensor) and local.dtype != torch.float32:
            local = f"of dtype {local.dtype}, not {torch.float32}"
        if isinstance(local, str):
            raise ValueError(
                f"its {key} is {local}: the state was made for another layout or variant. Load it through "
                f"torch.distributed.checkpoint, which reshards it, or delete it: del optimizer.state[param][{key!r}]"
            )
        found.append(local)
    return tuple(found)


def _check_writable(what: str, tensor: Tensor) -> None:
    """Raise ValueError if several elements of a tensor share memory, as in an expanded view, because torch cannot write
    to such a tensor in place."""
    stride = tensor.stride()
    if any(step == 0 and size > 1 for step, size in zip(stride, tensor.shape, strict=True)):
        raise ValueError(
            f"its {what} is an expanded view of strides {stride}, of which several elements lie in one place. Give it "
            "memory of its own: tensor.data = tensor.data.clone()"
        )


_LOAD = "Load the optimizer's state again"


def _adamw_rows(group: Group, index: int, state: Mapping[Tensor, MutableMapping[str, Any]]) -> list[Row | None]:
    """Check an AdamW group, and return one `Row` of local tensors per parameter. The entry of a parameter that fails a
    quick check is None, for example if its state is missing.

    Raises:
        ValueError: A gradient or state is unusable. The message contains the parameter's name.
    """
    params = group["params"]
    found: list[Row | None] = [None] * len(params)
    rows: dict[Engine, list[tuple[Any, ...]]] = {}
    for position, p in enumerate(params):
        grad, kept = p.grad, state.get(p, _NOTHING)
        if grad is not None and len(kept) == 3 and isinstance(kept.get(STEP), Tensor) and kept[STEP].numel() == 1:
            row = position, kept, p, grad, kept.get(MOMENTS[0]), kept.get(MOMENTS[1])
            rows.setdefault(engine_of(p), []).append(row)
    for engine, of_engine in rows.items():
        positions, states, *columns = zip(*of_engine, strict=True)
        storages = engine.storages(*columns)
        if storages is not None:
            dtype, *others = (column[0].dtype for column in storages)
            if dtype.is_floating_point and set(others) == {dtype}:
                for position, of_one in zip(positions, zip(*storages, states, strict=True), strict=True):
                    found[position] = Row(*of_one)
    for ready, (name, p) in zip(found, named_params(group, index), strict=True) if None in found else ():
        if ready is None:
            with about(name):
                _check_adamw(p, state.get(p, _NOTHING))
    return found


def _check_adamw(p: Tensor, kept: Mapping[str, Any]) -> None:
    """Raise ValueError if torch's AdamW cannot update a parameter, for example because its gradient has another dtype.
    Without this check, AdamW would raise an error only after other parameters have changed."""
    if p.grad is None:
        _check_gradient_elsewhere(p)
        return
    engine, dtype = engine_of(p), p.grad.dtype
    weight = engine.storage(p)
    _check_writable("storage", weight)
    gradient_storage(p, p.grad, engine, weight)
    dtypes = {"the parameter": p.dtype}
    dtypes |= {f"its {k}": state_storage(p, kept[k], k, engine, weight).dtype for k in MOMENTS if k in kept}
    for what, found in dtypes.items():
        if found != dtype:
            raise ValueError(
                f"its gradient is {dtype}, {what} {found}, which AdamW cannot mix. Cast a model before its optimizer "
                "is made, or load the optimizer's state again after casting: that casts it too. If nothing was cast, "
                "an engine keeps gradients in another dtype: leave out FSDP1's keep_low_precision_grads"
            )
    steps = kept.get(STEP)
    if STEP in kept and not (isinstance(steps, Tensor) and steps.numel() == 1):
        raise ValueError(f"its {STEP} is {steps!r}, not a tensor of one element. {_LOAD}")


def gradient_storage(param: Tensor, grad: Tensor, engine: Engine, weight: Tensor) -> Tensor | None:
    """Return the local storage of a gradient; None if the gradient's layout differs from the parameter's. `weight` is
    the local storage of the parameter.

    Raises:
        ValueError: The gradient is unusable. The message does not contain the parameter's name.
    """
    if grad.layout != torch.strided:
        raise ValueError(
            f"its gradient is sparse ({grad.layout}), which no update here takes. Use sparse=False, or leave it out "
            "here (set requires_grad to False while Muon is made) and step it by its own optimizer, such as "
            "torch.optim.SparseAdam"
        )
    if grad.is_complex():
        raise ValueError(f"its gradient is complex ({grad.dtype}); parameters and gradients must be real")
    if not engine.is_aligned(grad, param):
        return None
    storage = engine.storage(grad)
    if storage.shape != weight.shape and not same_storage(storage.shape, weight.shape):
        raise ValueError(f"its gradient stores shape {tuple(storage.shape)} here, the parameter {tuple(weight.shape)}")
    return storage


def _check_gradient_elsewhere(param: Tensor) -> None:
    """Raise ValueError if a parameter's `grad` is None but another attribute, such as `main_grad`, contains its
    gradient. Without this error, the parameter would silently stay untrained."""
    for name, remedy in (
        ("decoupled_grad", "Wrap the model with use_decoupled_grad=False"),
        ("main_grad", "Use shardmuon.frameworks.megatron, or set p.grad = p.main_grad before the step"),
    ):
        if isinstance(getattr(param, name, None), Tensor):
            raise ValueError(f"its gradient is in p.{name} and p.grad is None. {remedy}")


def state_storage(param: Tensor, buffer: object, key: str, engine: Engine, weight: Tensor) -> Tensor:
    """Return the local storage of a state tensor.

    Raises:
        ValueError: The state is not a real-valued strided tensor, its layout differs from the parameter's, or it cannot
            be updated in place. The message does not contain the parameter's name.
    """
    if not isinstance(buffer, Tensor):
        raise ValueError(f"its {key} is a {type(buffer).__name__}, not a tensor. {_LOAD}")
    if local_if_any(buffer).is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"its {key} was made under torch.inference_mode() and cannot be updated outside. Step under torch.no_grad()"
        )
    try:
        aligned = engine.is_aligned(buffer, param)
    except ValueError:
        raise _unlike(buffer, key, weight) from None
    stored = engine.storage(buffer)
    if not aligned or not same_storage(stored.shape, weight.shape):
        raise _unlike(buffer, key, weight)
    if stored.layout is not torch.strided or stored.is_complex() or stored.is_meta != weight.is_meta:
        raise ValueError(
            f"its {key} is {stored.layout}, {stored.dtype} on {stored.device}, and must be strided, real and not "
            f"on meta. {_LOAD}"
        )
    _check_writable(key, stored)
    return stored


def _unlike(buffer: Tensor, key: str, weight: Tensor) -> ValueError:
    """Make the ValueError that `state_storage` raises for a state tensor whose layout differs from the parameter's."""
    found = f"a {type(buffer).__name__} of shape {tuple(buffer.shape)}"
    if is_dtensor(buffer):
        found += f" placed {tuple(buffer.placements)} that stores shape {tuple(buffer.to_local().shape)} here"
    return ValueError(
        f"its {key} is {found}, the parameter stores shape {tuple(weight.shape)}: the state was made for another "
        "layout. Load it through torch.distributed.checkpoint, which reshards it"
    )
