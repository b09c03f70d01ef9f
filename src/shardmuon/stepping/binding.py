"""Bind a plan to the parameters of this process, and keep all ranks agreed about both.

[Note: who may raise when]
    A plan is built and a step begins with small collectives (the handshake, the agreement). Everything that can be
    wrong with parameters, options or gradients is found before the first exchange and reported through them: either
    no rank goes on or every rank does. A rank that is in several groups reports to the small ones first and carries
    bad news on to the larger ones, so in a family of nested groups every rank hears of it. Where groups overlap without
    being nested (rows and columns of a mesh), news is passed on in as many rounds as a rank has largest groups: one hop
    per axis of the mesh reaches everyone. Nobody raises before the last round, for others still wait for his report.
    While a plan is built, a group talks several times, and something may be raised on one rank in between. So before
    each talk its ranks ask each other whether to go on (`Council`).
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardmuon._torch import default_group
from shardmuon.comm.component import largest_of
from shardmuon.comm.exchange import Traffic
from shardmuon.comm.groups import my_rank
from shardmuon.engines import Description, Engine
from shardmuon.errors import ExchangeError, ranks_text
from shardmuon.orthogonalize.choice import Choice, Chooser, Task, work
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.sharded import factor_flops, schedule_fault
from shardmuon.orthogonalize.stamp import machine_stamp, precision_flags
from shardmuon.planning.layout import ParamLayout, same_storage
from shardmuon.planning.plan import Plan, make_plan
from shardmuon.planning.types import ParamSpec, Policy, Recipe
from shardmuon.planning.views import Ranks, Shape
from shardmuon.ranks.council import Council, Faults, GroupFault, exception_text, relay, spread_fault
from shardmuon.ranks.exchange import agree_max, share_bytes, share_objects
from shardmuon.stepping.kept import plan_kept
from shardmuon.stepping.program import Program
from shardmuon.stepping.rates import DeviceRates
from shardmuon.stepping.replicas import compare_replicas
from shardmuon.variants import Stages, gram_fault


@dataclass(frozen=True, slots=True)
class Candidate:
    """A Muon parameter before planning.

    Attributes:
        name: For messages.
        identity: Name given by the user, or ""; ranks must agree on it.
        coefficients: One (a, b, c) per Newton-Schulz step.
        options: Text of every option that ranks must agree on and that does not change between steps.
        batch: Text of the options that a batch of matrices must share.
        stages: Of its variant.
    """

    name: str
    identity: str
    param: Tensor
    engine: Engine
    description: Description
    coefficients: Triples
    options: str
    batch: str
    stages: Stages = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """A plan with this rank's part of it.

    Attributes:
        candidates: The parameters, index for index the plan's specs.
        signatures: What each parameter's layout hung on when the plan was made.
        members: Rank set of more than one rank -> the parameters that it shares; small sets first. All of them agree
            before a step, also those that exchange nothing (`route="local"`): replicas would drift apart in silence.
        plan_digests: Rank set -> what its ranks must agree on.
        talking_devices: Rank set -> where it talks: the device of the first parameter that it shares.
        rounds: Rank set -> how often it passes news on, see [Note: who may raise when].
        lacking: group -> those of its parameters whose gradient some ranks may lack, as they store nothing of them.
        device_rates: Learning rates that lie on an accelerator.
        looked_up: What parts of a step look up once for many steps of this plan, by their name.
        world: The default process group in which the plan was made. In another one ranks may have other numbers.
    """

    candidates: tuple[Candidate, ...]
    signatures: tuple[object, ...]
    plan: Plan
    programs: tuple[Program, ...]
    members: dict[Ranks, tuple[int, ...]]
    plan_digests: dict[Ranks, bytes]
    talking_devices: dict[Ranks, torch.device]
    rounds: dict[Ranks, int]
    lacking: dict[Ranks, tuple[int, ...]]
    device_rates: DeviceRates = field(default_factory=DeviceRates)
    looked_up: dict[str, Any] = field(default_factory=dict)
    world: Callable[[], Any] = field(default_factory=lambda: _reference(default_group()))

    def holds(self, index: int, rank: int) -> bool:
        """Whether a rank stores any of a parameter."""
        return any(holder.piece.numel for holder in self.plan.specs[index].layout.holders_of(rank))

    @property
    def devices(self) -> list[torch.device]:
        """Where each program's wire buffers live."""
        return [self.device(p.rank_bucket.bucket.items) for p in self.programs]

    def device(self, items: Sequence[int]) -> torch.device:
        """The device of the first of these items' parameters."""
        return self.candidates[self.plan.items[items[0]].param].param.device


def _reference(group: Any) -> Callable[[], Any]:
    """A weak reference to a process group, or to none: a binding keeps no group alive."""
    return (lambda: None) if group is None else weakref.ref(group)


@dataclass(slots=True)
class _Group:
    """What the ranks of one group have agreed on."""

    layouts: list[ParamLayout]
    recipes: list[tuple[Recipe, ...]]
    notes: tuple[str, ...] = ()  # for the plan


def bind(
    candidates: Sequence[Candidate],
    policy: Policy,
    chooser: Chooser,
    *,
    check_replicas: bool,
    device: torch.device,
    faults: Faults,
    known: Mapping[Ranks, Any] | None = None,
    check_layout: Callable[[str, ParamLayout], None] = lambda name, layout: None,
) -> Binding:
    """Compare notes with the other ranks, agree on the layouts, make the plan. Collective among each group's ranks.

    Args:
        candidates: The parameters of this rank.
        policy: The user's choices about the plan.
        chooser: The user's choice of the orthogonalizer.
        check_replicas: Whether to compare replicas bit for bit.
        device: Where to talk with groups in which this rank has no parameter.
        faults: What is wrong on this rank already; the others hear of it.
        known: Groups that expect to hear from this rank even if it has no parameter there -> process group or None.
        check_layout: Raises ValueError for a parameter's layout that the options cannot serve.

    Raises:
        Refused: Layouts, options or replicas do not fit together, or something was raised on a rank while it looked;
            the same on every rank of the groups concerned.
    """
    known = known or {}
    by_group: dict[Ranks, list[int]] = {}
    for ranks in known:
        by_group[ranks] = []
    for index, candidate in enumerate(candidates):
        by_group.setdefault(candidate.description.ranks, []).append(index)
    order = sorted(sorted(by_group), key=len)
    num_largest, hints = len(order), dict.fromkeys(order)  # more rounds than needed do no harm
    with faults.guard():
        num_largest = len(largest_of([ranks for ranks in order if len(ranks) > 1]))
        hints = {ranks: _hint([candidates[i] for i in by_group[ranks]], known.get(ranks)) for ranks in order}
    councils: dict[Ranks, Council] = {}
    agreed: dict[Ranks, _Group] = {}
    tokens: dict[Ranks, bytes] = {}
    rounds: dict[Ranks, int] = {}  # of the talks about the plan
    news = faults.signed
    for ranks in order:
        group = list(map(candidates.__getitem__, by_group[ranks]))
        where = group[0].param.device if group else device
        council = councils[ranks] = Council(ranks, where, num_largest, hints[ranks])
        try:
            council.raise_any(news)
            tokens[ranks], notes = _meet(council, group, chooser, chooser.device or where, policy)
            if group:
                agreed[ranks] = _agree_on_group(council, group, policy, chooser, check_replicas, check_layout)
                agreed[ranks].notes = notes
            council.raise_any()
        except GroupFault as heard:
            news = str(heard)
        except ExchangeError:
            raise
        except BaseException as wrong:
            news, faults.cause = council.report(wrong), faults.cause or wrong
        rounds[ranks] = council.rounds
    made: _Made | None = None
    if news is None:
        try:
            made = _make(candidates, by_group, agreed, tokens, policy)
        except BaseException as wrong:
            news, faults.cause = exception_text(wrong), faults.cause or wrong
    for _, ranks in relay(rounds):
        news = spread_fault(news, ranks, councils[ranks].device)[0]
    if news is not None or made is None:
        raise faults.refusal(news)
    in_steps: dict[Ranks, int] = {}
    for ranks in made.binding.members:
        in_steps[ranks] = int(agree_max(made.num_largest, ranks, councils[ranks].device, Traffic()))
    return replace(made.binding, rounds=in_steps)


class _Made(NamedTuple):
    """A binding that lacks the rounds, and what this rank says about them."""

    binding: Binding
    num_largest: Tensor  # one uint8


def _make(
    candidates: Sequence[Candidate],
    by_group: Mapping[Ranks, Sequence[int]],
    agreed: Mapping[Ranks, _Group],
    tokens: Mapping[Ranks, bytes],
    policy: Policy,
) -> _Made:
    """The plan and this rank's part of it. Talks to nobody."""
    layouts: dict[int, ParamLayout] = {}
    recipes: dict[int, tuple[Recipe, ...]] = {}
    for ranks, group in agreed.items():
        layouts.update(zip(by_group[ranks], group.layouts, strict=True))
        recipes.update(zip(by_group[ranks], group.recipes, strict=True))
    specs = [
        ParamSpec(
            c.name,
            layouts[i],
            recipes[i],
            c.param.device.type,
            c.batch,
            c.identity,
            plan_kept(c.stages, c.engine, c.param, layouts[i]),
            gram_fault(c.stages),
        )
        for i, c in enumerate(candidates)
    ]
    plan = make_plan(specs, policy)
    plan = replace(plan, notes=tuple(dict.fromkeys(note for group in agreed.values() for note in group.notes)))
    groups = tuple(ranks for ranks in sorted(sorted(by_group), key=len) if len(ranks) > 1 and by_group[ranks])
    members = {ranks: tuple(by_group[ranks]) for ranks in groups}
    rank = my_rank()
    binding = Binding(
        tuple(candidates),
        tuple(c.engine.signature(c.param) for c in candidates),
        plan,
        tuple(Program(plan, rank_bucket, rank) for rank_bucket in plan.for_rank(rank)),
        members,
        {ranks: plan.digest(ranks) + tokens[ranks] for ranks in groups},
        {ranks: candidates[shared[0]].param.device for ranks, shared in members.items()},
        {},
        {ranks: tuple(i for i in members[ranks] if _may_lack(candidates[i], layouts[i])) for ranks in members},
    )
    return _Made(binding, torch.tensor([len(largest_of(groups))], dtype=torch.uint8, device="cpu"))


def _agree_on_group(
    council: Council,
    group: Sequence[Candidate],
    policy: Policy,
    chooser: Chooser,
    check_replicas: bool,
    check_layout: Callable[[str, ParamLayout], None],
) -> _Group:
    """Where the pieces of one group's parameters lie, and how each of its matrices is orthogonalized. Collective."""
    layouts = _agree_on_layouts(council, group)
    for candidate, layout in zip(group, layouts, strict=True):
        check_layout(candidate.name, layout)
    if check_replicas and len(council.ranks) > 1:
        compare_replicas(council, group, layouts)
    return _Group(layouts, _choose(council, group, layouts, chooser, policy))


def _may_lack(candidate: Candidate, layout: ParamLayout) -> bool:
    holders = {holder.rank for holder in layout.holders if holder.piece.numel}
    return candidate.description.empty_lacks_gradient and len(holders) < len(layout.ranks)


def _hint(group: Sequence[Candidate], known: Any) -> Any:
    """The process group to talk in. Several may have these ranks: take the same one in whatever order they come."""
    hints = [c.description.group for c in group] or [known]
    return min((hint for hint in hints if hint is not None), key=lambda hint: str(hint.group_name), default=None)


def _greet(council: Council, group: Sequence[Candidate], stamp: str, policy: Policy) -> tuple[bytes, str]:
    """Compare what the ranks list. Raises ValueError, the same on each of them, if it is not the same, or if ranks on
    unlike machines are to repeat each other's work.

    Args:
        stamp: This rank's `machine_stamp`.

    Returns:
        Bytes that no other plan has, so that two optimizers of one shape which ranks step in different order are told
        apart; and where ranks have machines that may round differently, which, else "".
    """
    if len(council.ranks) == 1:
        return b"", ""
    lines = [f"{c.identity} {c.description.claims[0].layout.view} {c.description.text} {c.options}" for c in group]
    listed = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
    mine = listed + hashlib.blake2b(stamp.encode(), digest_size=8).digest() + os.urandom(8)
    council.raise_any()
    everyone = share_bytes(mine, council.ranks, council.device)
    if len({theirs[:16] for theirs in everyone}) > 1:
        raise ValueError(_difference(council, group))
    unlike = ""
    if len({theirs[16:24] for theirs in everyone}) > 1:
        council.raise_any()
        stamps = share_objects(stamp, council.ranks)
        unlike = "; ".join(
            f"ranks {ranks_text(tuple(r for r, s in zip(council.ranks, stamps, strict=True) if s == kind))} have {kind}"
            for kind in dict.fromkeys(stamps)
        )
    if unlike and policy.route == "local":
        raise ValueError(f"route='local' needs equal machines, but {unlike}. Use Exchange(route='auto')")
    return hashlib.blake2b(b"".join(everyone), digest_size=8).digest(), unlike


def _meet(
    council: Council, group: Sequence[Candidate], chooser: Chooser, device: torch.device, policy: Policy
) -> tuple[bytes, tuple[str, ...]]:  # the group's token, `_notes`
    """Compare notes on what is to be stepped and on the machines. `device`: where matrices are orthogonalized."""
    stamp = machine_stamp(device)
    if chooser.method == "torch":  # which leaves the process's own flags as they are
        stamp += f"; {precision_flags(device)}"
    token, unlike = _greet(council, group, stamp, policy)
    return token, _notes(unlike, device, chooser)


def _notes(unlike: str, device: torch.device, chooser: Chooser) -> tuple[str, ...]:
    """Lines for the printed plan on how far equal bits reach."""
    notes = []
    if unlike:
        notes.append(f"machines differ: {unlike}. Each matrix has one owner; another one would give it other bits")
    if chooser.measured is not None:
        notes.append(chooser.measured.about_slots(device))
    elif device.type != "cpu":
        notes.append("slots of batches: not searched on this machine, see `shardmuon verify --slots FILE`")
    return tuple(notes)


def _difference(council: Council, group: Sequence[Candidate]) -> str:
    """Every rank must list the same parameters in the same order with the same options: say where they do not."""
    ranks = council.ranks
    named = [f"{c.name}: {tuple(c.engine.shape(c.param))}, {c.description.text}, {c.options}" for c in group]
    council.raise_any()
    everyone: list[list[str]] = share_objects(named, ranks)
    for rank, theirs in zip(ranks, everyone, strict=True):
        if theirs != everyone[0]:
            at = next((i for i, (a, b) in enumerate(zip(everyone[0], theirs, strict=False)) if a != b), None)
            if at is None:
                lacking = max(everyone[0], theirs, key=len)[min(len(everyone[0]), len(theirs))]
                found = (
                    f"rank {ranks[0]} lists {len(everyone[0])} parameters, rank {rank} lists {len(theirs)}; one of "
                    f"them lacks {lacking!r}"
                )
            else:
                found = f"rank {ranks[0]} lists {everyone[0][at]!r}, rank {rank} lists {theirs[at]!r}"
            return (
                f"ranks {ranks} share parameters but describe them differently: {found}. Every rank must give the "
                "optimizer the same parameters, order and options"
            )
    identities = [c.identity for c in group]
    return f"ranks {ranks} share parameters but list different names for them: rank {my_rank()} lists {identities}"


def _agree_on_layouts(council: Council, group: Sequence[Candidate]) -> list[ParamLayout]:
    """Take, for each parameter, the first reading of its placements that every rank's storage bears out."""
    ranks = council.ranks
    most = max(len(c.description.claims) for c in group)
    wrong = torch.ones(len(group), most, dtype=torch.uint8, device="cpu")
    for i, candidate in enumerate(group):
        for j, claim in enumerate(candidate.description.claims):
            wrong[i, j] = not same_storage(claim.storage_shape, candidate.description.storage_shape)
    if len(ranks) > 1:
        council.raise_any()
        wrong = agree_max(wrong.flatten(), ranks, council.device, Traffic()).view_as(wrong)
    measured = _layouts_from_extents(council, group)
    layouts = []
    for i, candidate in enumerate(group):
        if i in measured:
            layouts.append(measured[i])
            continue
        fitting = [claim for j, claim in enumerate(candidate.description.claims) if not wrong[i, j]]
        layouts.append(fitting[0].layout if fitting else _layout_from_storage(council, candidate))
    return layouts


def _layouts_from_extents(council: Council, group: Sequence[Candidate]) -> dict[int, ParamLayout]:
    """Index -> layout, for parameters whose engine goes by what every rank says that it stores. One small exchange."""
    ranks = council.ranks
    measured = {i: c for i, c in enumerate(group) if c.description.from_extents is not None}
    if not measured:
        return {}
    mine = np.array([n for c in measured.values() for n in c.description.extent or ()], dtype=np.int64).tobytes()
    council.raise_any()
    everyone = [mine] if len(ranks) == 1 else share_bytes(mine, ranks, council.device)
    tables = [np.frombuffer(theirs, dtype=np.int64).tolist() for theirs in everyone]
    layouts: dict[int, ParamLayout] = {}
    at = 0
    for i, candidate in measured.items():
        about = candidate.description
        assert about.from_extents is not None
        end = at + len(about.extent or ())
        try:
            layouts[i] = about.from_extents([table[at:end] for table in tables])
        except ValueError as error:
            raise ValueError(
                f"{candidate.name}: what ranks {ranks} store of it ({about.text}) does not make up the whole of shape "
                f"{about.claims[0].layout.shape}: {error}"
            ) from None
        at = end
    return layouts


def _layout_from_storage(council: Council, candidate: Candidate) -> ParamLayout:
    about, ranks = candidate.description, council.ranks
    shapes: list[Shape] = [about.storage_shape]
    if len(ranks) > 1:
        council.raise_any()
        shapes = share_objects(about.storage_shape, ranks)
    try:
        if about.from_shapes is None:
            raise ValueError(f"a plain tensor of shape {about.claims[0].storage_shape} was expected")
        return about.from_shapes(shapes)
    except ValueError as error:
        raise ValueError(
            f"{candidate.name}: ranks {ranks} store shapes {shapes}, which placements {about.text} of global shape "
            f"{about.claims[0].layout.shape} do not imply: {error}"
        ) from None


def _choose(
    council: Council, group: Sequence[Candidate], layouts: Sequence[ParamLayout], chooser: Chooser, policy: Policy
) -> list[tuple[Recipe, ...]]:
    """How each matrix of a group is orthogonalized. Talks to nobody: ranks compare their plans."""
    tasks = [
        [Task(m.rows, m.cols, c.coefficients, chooser.device or c.param.device) for m in layout.view.matrices]
        for c, layout in zip(group, layouts, strict=True)
    ]
    different = dict.fromkeys(task for row in tasks for task in row)
    try:
        whole = {task: recipe_for(chooser.choice(task), task, policy) for task in different}
    except ValueError as wrong:
        raise ValueError(f"rank {my_rank()}: {wrong}") from None
    return [tuple(whole[task] for task in row) for row in tasks]


def recipe_for(choice: Choice, task: Task, policy: Policy) -> Recipe:
    """A choice for matrices of one shape as the planner sees it."""
    return Recipe(
        str(choice),
        work(choice, task.rows, task.cols, task.coefficients, task.device),
        choice.reason,
        factor_flops(min(task.rows, task.cols), task.coefficients, 0.625 if task.device.type == "cpu" else 1.0),
        _gram_fault(choice, task, policy),
    )


def _gram_fault(choice: Choice, task: Task, policy: Policy) -> str:
    """Why a matrix's method or schedule cannot take the Gram route, or ""."""
    if choice.method not in ("standard", "gram"):
        return f"method={choice.method!r} has no Gram form"
    return schedule_fault(task.coefficients, torch.float64 if policy.gram_bytes == 8 else torch.float32)
