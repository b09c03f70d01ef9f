"""Tests that run random sequences of events on an optimizer, and compare the results bitwise with an unsharded
reference. The reference creates a new optimizer for every step.

The events are skipped batches, errors, saving and loading, added and removed groups, copies and replaced tensors. An
event happens on all ranks, or on a random subset if the other ranks need not take part.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import FAMILIES, Cut, Job, Spec, as_in, whole
from process_default import process_default
from simulated import quick_plans
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import Muon, audit, checkpoint
from shardmuon._torch import local_if_any
from shardmuon.testing import RankPool
from shardmuon.variants import KEPT_KEYS, keeping, stages_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
    "ignore:no parameter of this optimizer has a gradient",
)

MATRIX: dict[str, Any] = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "variant": None}
VECTOR: dict[str, Any] = {"use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
GROUPS: list[tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = [
    ({"a": (8, 6), "b": (5, 7)}, MATRIX),
    ({"c": (6, 8), "d": (9, 4)}, MATRIX),
    ({"e": (12, 8), "f": (8, 12)}, MATRIX),
    ({"g": (7, 3), "h": (12,)}, VECTOR),
    ({"i": (9,)}, VECTOR),
]
VARIANTS = (None, "normuon", "hyperball", "cautious")
STORED: list[dict[str, Any]] = [
    {},
    {"momentum_dtype": torch.bfloat16, "stochastic_rounding": True},
    {"momentum_dtype": "int8"},
]
FORMS: dict[str, Cut] = {
    "rows": torch.clone,
    "columns": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t.clone(),
    # In the form "one row", the gradient is a single row expanded to all rows (stride 0), as in the backward pass of
    # `weight.sum(0)`.
    "one row": lambda t: t[:1].expand_as(t),
}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: list[Callable[[], Any]] = [
    contextlib.nullcontext,
    deterministic,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autocast("cpu", torch.float16),
    lambda: process_default("float64"),
    lambda: process_default("meta"),
]


@dataclass
class Group:
    """A parameter group: its parameters, their options and the ranks on which the group exists."""

    specs: list[Spec]
    options: dict[str, Any]
    ranks: tuple[int, ...]


def groups_in(layout: str) -> list[Group]:
    """Return the parameter groups of a layout. In the layout "chain", each group of matrices is replicated over two
    neighboring ranks."""
    sets = FAMILIES.get(layout, [(0, 1, 2, 3)])
    cut = torch.clone if layout in (*FAMILIES, "alone") else as_in(layout)
    made = []
    for at, (shapes, options) in enumerate(GROUPS):
        ranks = sets[at % len(sets)] if options is MATRIX else (0, 1, 2, 3)
        specs = [Spec(*of, cut, dtype=torch.bfloat16 if "i" in of else torch.float32) for of in shapes.items()]
        made.append(Group(specs, options | ({"process_group": ranks} if layout in FAMILIES else {}), ranks))
    return made


@dataclass
class Kept:
    """A snapshot from which a job can be restored: the weight and the optimizer state of each parameter, keyed by name,
    the parameter groups in the optimizer, and the removed parameter groups."""

    named: dict[str, dict[str, Any]]
    groups: list[Group]
    away: list[Group] = field(default_factory=list)
    files: Path | None = None  # The checkpoint folder, or None if the snapshot was not saved to files.
    states: Any = None  # The state dicts of the model and the optimizer, or None if the snapshot was saved to files.


class Sequence:
    """A job and its unsharded reference, which go through the same random events. The random generators of all ranks
    have the same seed, so all ranks choose the same events."""

    def __init__(self, seed: int, folder: Path, layout: str) -> None:
        self.chance, self.folder, self.layout = random.Random(seed), folder, layout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.stored, self.frozen, self.batch = self.chance.choice(STORED), set[str](), 0
        self.now = Kept({}, groups_in(layout))
        self._take()
        self.now.named = whole(self._here(self.now.groups)).named()
        self.save()

    def _here(self, groups: list[Group], **changed: Any) -> list[dict[str, Any]]:
        made = [{**g.options, **changed, "params": g.specs} for g in groups if self.rank in g.ranks]
        for options in made:
            # Remove `momentum` and `variant` from AdamW groups, because the constructor of `Muon` does not accept them
            # there.
            if not options["use_muon"]:
                options.pop("momentum", None)
                options.pop("variant", None)
        return made

    def _take(self, **changed: Any) -> None:
        groups = [*self.now.groups, *self.now.away]
        self.job = Job(self._here(groups, **changed), **self.stored)
        for group in self.now.away:
            self._drop(group)
        for name, p in self.params.items():
            p.requires_grad_(name not in self.frozen)

    @property
    def params(self) -> dict[str, Tensor]:
        return {spec.name: p for p, spec in self.job.specs.items()}

    def _at(self, group: Group) -> int | None:
        """Return the index of a parameter group in this rank's optimizer, or None if this rank does not have the
        group."""
        firsts = [of["param_names"][0] for of in self.job.groups]
        return firsts.index(group.specs[0].name) if self.rank in group.ranks else None

    def _set(self, group: Group, **options: Any) -> None:
        group.options.update(options)
        if (at := self._at(group)) is not None:
            self.job.groups[at].update(options)

    def _drop(self, group: Group) -> None:
        if (at := self._at(group)) is not None:
            del self.job.groups[at]

    def _concerned(self, *, anew: bool = False) -> bool:
        """Draw a random subset of ranks, and return whether this rank is in the subset. In a single process, always
        return True.

        Pass anew=True for events that create a new optimizer. In the layout "chain", they must happen on all ranks,
        because before its first vote, a new optimizer knows only the ranks with which it shares matrices.
        """
        drawn = self.chance.sample(range(4), self.chance.randrange(1, 5))
        return self.rank in drawn or self.layout == "alone" or (anew and self.layout == "chain")

    def _ruled(self, name: str) -> dict[str, Any]:
        """Return the weight and state that a parameter must have after the events so far, excluding state left behind
        by an earlier optimizer or variant."""
        known = self.now.named[name]
        (options,) = (g.options for g in self.now.groups if name in [spec.name for spec in g.specs])
        if ("exp_avg" in known) == options["use_muon"]:
            return {"weight": known["weight"]}
        stale = {*KEPT_KEYS} - {stage.key for stage in keeping(stages_of(options))}
        return {key: value for key, value in known.items() if key not in stale}

    def backward(self, missing: bool = False) -> dict[str, Tensor]:
        """Set the gradients of the job, and return them as full tensors. If `missing` is True, some parameters get no
        gradient."""
        self.batch += 1
        form, turned = self.chance.choice(list(FORMS)), self._concerned()
        names = sorted({spec.name for group in self.now.groups for spec in group.specs} - self.frozen)
        without = self.chance.sample(names, min(len(names), self.chance.randrange(1, 4))) if missing else []
        grads = {}
        for name, p in self.params.items():
            if name in names and name not in without:
                grads[name] = self.job.gradient(p, self.batch)
                if form == "one row":
                    grads[name] = grads[name][:1].repeat(len(grads[name]), *[1] * (p.ndim - 1))
                p.grad = self.job.specs[p].cut(grads[name])
                local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                laid = FORMS[form if turned or form == "one row" else "rows"](local)
                if isinstance(p.grad, DTensor):
                    p.grad._local_tensor = laid
                else:
                    p.grad = laid
        return grads

    def stepped(self, grads: dict[str, Tensor]) -> None:
        self.job.optimizer.zero_grad()
        quiet = whole(self._here(self.now.groups), **self.stored)
        for p, spec in quiet.specs.items():
            known = self._ruled(spec.name)
            p.data.copy_(known.pop("weight"))
            p.grad = grads.get(spec.name)
            if p.grad is not None and known:
                quiet.state[p] = known
        quiet.step()
        self.now.named |= {name: of for name, of in quiet.named().items() if name in grads}

    def compare(self) -> None:
        """Assert that weights and state match the reference bitwise, except for all-zero state that saving has
        created."""
        made = {
            f"{name}: {key}"
            for name, of in self.job.named().items()
            for key, value in of.items()
            if key not in self.now.named[name] and not local_if_any(value).any()
        }
        assert {*self.job.unlike_whole(self.now.named)} <= made

    def train(self, *, missing: bool = False, around: Callable[[], Any] | None = None) -> None:
        grads = self.backward(missing)
        with (around or self.chance.choice(AROUND))():
            self.job.step()
        self.stepped(grads)

    def train_without_some_gradients(self) -> None:
        self.train(missing=True)

    def train_with_options_in_other_words(self) -> None:
        """On some ranks, pass the same option values as different types (for example, the lr as a tensor), and take a
        step."""
        before = [dict(group) for group in self.job.groups]
        if self._concerned():
            for group in self.job.groups:
                lr = group["lr"]
                group["lr"] = float(lr) if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float64)
                if group["use_muon"]:
                    group["ns_coefficients"] = [list(row) for row in [(3.4445, -4.7750, 2.0315)] * 5]
                    # Changing AdamW's betas in a Muon group must have no effect on the update of matrices.
                    group["betas"] = (0.5, 0.5)
        self.train()
        for group, old in zip(self.job.groups, before, strict=True):
            group.update(old)

    def skip_a_batch(self) -> None:
        self.backward()
        self.job.optimizer.zero_grad()

    def interrupt_a_step(self) -> None:
        """Interrupt a step at a random operation. Afterwards, the job must be restored from a snapshot, unless the step
        has changed nothing."""
        grads, done = self.backward(), list[bool]()
        hook = self.job.optimizer.register_step_post_hook(lambda *_: done.append(True))
        with contextlib.suppress(KeyboardInterrupt), _Interrupted(self.chance.randrange(300)):
            self.job.step()
        hook.remove()
        # The step hook runs after the whole step, so if it has run, the interrupt came too late to have an effect.
        if done:
            self.stepped(grads)
        elif self.job.optimizer.broken is not None:
            with pytest.raises(RuntimeError, match="broken off"):
                self.job.step()
            with pytest.raises(ValueError, match="broken off"):
                checkpoint.save(self.folder / "torn", self.job.model, self.job.optimizer)
            assert not (self.folder / "torn").exists()
            self.roll_back()
        self.job.optimizer.zero_grad()

    def refuse_a_step(self) -> None:
        group = self.chance.choice(self.now.groups)
        right = group.options["lr"]
        self.backward()
        self._set(group, lr=math.nan)
        with pytest.raises(ValueError, match="lr"):
            self.job.step()
        self._set(group, lr=right)
        self.job.optimizer.zero_grad()

    def audit_a_step(self) -> None:
        """Audit the first step after a skipped batch or after a step that raised an error. Another step follows,
        because an audit checks the momentum again one step later."""
        check = audit(self.job.optimizer)
        self.chance.choice([self.skip_a_batch, self.refuse_a_step])()
        for _ in range(2):
            self.train(around=contextlib.nullcontext)
            assert check.report.ok, check.report.findings

    def save(self) -> None:
        """Save checkpoint files or copy the state dicts. Checkpoint files do not support the layout "chain", in which
        ranks have different parameters."""
        both = self.job.model, self.job.optimizer
        self.saved = copy.deepcopy(Kept(self.now.named, self.now.groups, self.now.away))
        if self.chance.random() < 0.3 and self.layout != "chain":
            self.saved.files = self.folder / str(self.batch)
            if not self.saved.files.exists():
                checkpoint.save(self.saved.files, *both)
        else:
            self.saved.states = copy.deepcopy([one.state_dict() for one in both])

    def _load(self) -> None:
        for group in self.saved.groups:
            at = self._at(group)
            if at is not None and group.options.get("variant") is None:
                # Loading raises an error if a param group sets `variant` but the saved group has none, so set the
                # group's `variant` to None first.
                self.job.groups[at]["variant"] = None
        if self.saved.files:
            checkpoint.load(self.saved.files, self.job.model, self.job.optimizer)
        else:
            for one, state in zip((self.job.model, self.job.optimizer), self.saved.states, strict=True):
                one.load_state_dict(copy.deepcopy(state))
        self.now = copy.deepcopy(self.saved)

    def roll_back(self) -> None:
        """Load the saved state into the same objects if the parameter groups are unchanged, and into new objects
        otherwise."""
        told = [[[spec.name for spec in group.specs] for group in kept.groups] for kept in (self.now, self.saved)]
        self._load() if told[0] == told[1] else self.resume()

    def resume(self) -> None:
        """Load the saved state into a new model and a new optimizer, whose constructor options differ from those of the
        saved optimizer."""
        self.now = copy.deepcopy(self.saved)
        self._take(lr=0.5, weight_decay=0.0, variant=None)
        self._load()

    def copy_the_job(self) -> None:
        """On some ranks, replace the model and the optimizer with deep copies or pickled copies."""
        pickled = self.chance.random() < 0.5
        if not self._concerned():
            return
        both = self.job.model, self.job.optimizer
        self.job.model, self.job.optimizer = pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)
        self.job.replace(dict(self.job.model.named_parameters()))

    def swap_tensors(self) -> None:
        """Replace the tensors in param_groups with new ones, as accelerate does."""
        if not self._concerned():
            return
        for group in self.job.groups:
            for at, old in enumerate(group["params"]):
                group["params"][at] = new = nn.Parameter(old.detach().clone(), old.requires_grad)
                self.job.replace({self.job.specs[old].name: new})
                if old in self.job.state:
                    self.job.state[new] = self.job.state.pop(old)

    def make_the_optimizer_anew(self) -> None:
        """On some ranks, replace the optimizer with a new one that has no plan yet but is given the state of the old
        one."""
        if self._concerned(anew=True):
            kept = self.job.state
            named = [{**group, "param_names": list(group["param_names"])} for group in self.job.groups]
            self.job.optimizer = Muon(named, lr=0.02, **self.stored)
            self.job.state.update(kept)

    def load_its_own_state(self) -> None:
        if self._concerned():
            self.job.optimizer.load_state_dict(self.job.optimizer.state_dict())

    def change_options(self) -> None:
        group = self.chance.choice(self.now.groups)
        key = self.chance.choice(["lr", "weight_decay", *(["momentum"] if group.options["use_muon"] else [])])
        value = float(group.options[key]) * self.chance.choice((0.5, 0.9))
        as_tensor = key == "lr" and self.chance.random() < 0.5
        self._set(group, **{key: torch.tensor(value) if as_tensor else value})

    def change_the_variant(self) -> None:
        """Train a group with one variant, then with a second one, then with the first one again. State of the first
        variant must be discarded when the second variant takes its place."""
        group = self.chance.choice(self.now.groups)
        if not group.options["use_muon"]:
            return
        first, other = self.chance.sample(VARIANTS, 2)
        for variant in (first, other, first):
            self._set(group, variant=variant, weight_decay=0.0 if variant == "hyperball" else 0.1)
            self.train()

    def change_the_optimizer(self) -> None:
        """Train a group of matrices with AdamW and then with Muon again. After each change, training must start from
        fresh state, and a state dict must contain no state of the previous optimizer."""
        group = self.chance.choice(self.now.groups)
        if not group.options["use_muon"] or self.frozen & {spec.name for spec in group.specs}:
            return
        for use_muon in (False, True):
            self._set(group, use_muon=use_muon, variant=None)
            if self.chance.random() < 0.5:
                self.job.optimizer.load_state_dict(self.job.optimizer.state_dict())
            self.train()

    def freeze_or_unfreeze(self) -> None:
        name = self.chance.choice([spec.name for group in self.now.groups for spec in group.specs])
        self.frozen ^= {name}
        if name in self.params:
            self.params[name].requires_grad_(name not in self.frozen)

    def take_a_group_out(self) -> None:
        if len(self.now.groups) < 3:
            return
        group = self.chance.choice(self.now.groups)
        self._drop(group)
        self.now.groups.remove(group)
        self.now.away.append(group)
        for name in {spec.name for spec in group.specs} & {*self.params}:
            self.job.state.pop(self.params[name], None)
            self.now.named[name] = {"weight": self.now.named[name]["weight"]}

    def join_two_groups(self) -> None:
        pairs = [(i, j) for i in self.now.groups for j in self.now.groups if i is not j and i.options == j.options]
        if not pairs:
            return
        one, other = self.chance.choice(pairs)
        if (at := self._at(one)) is not None:
            mine, theirs = self.job.groups[at], self.job.groups[self._at(other)]  # type: ignore[index]
            for key in ("params", "param_names"):
                mine[key] = [*mine[key], *theirs[key]]
        self._drop(other)
        self.now.groups.remove(other)
        one.specs += other.specs

    def add_a_group(self) -> None:
        """Add a removed parameter group back to the optimizer, at least one step after its removal."""
        if not self.now.away:
            self.take_a_group_out()
            self.train()
        if not self.now.away:
            return
        group = self.now.away.pop()
        if self.rank in group.ranks:
            params = [(spec.name, self.params[spec.name]) for spec in group.specs]
            self.job.optimizer.add_param_group({**group.options, "params": params})
        self.now.groups.append(group)


class _Interrupted(TorchDispatchMode):
    """A dispatch mode that raises KeyboardInterrupt instead of running the tensor operation with the index `number`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


ANYWHERE: list[Callable[[Sequence], None]] = [
    Sequence.train,
    Sequence.train_without_some_gradients,
    Sequence.train_with_options_in_other_words,
    Sequence.skip_a_batch,
    Sequence.save,
    Sequence.roll_back,
    Sequence.resume,
    Sequence.copy_the_job,
    Sequence.swap_tensors,
    Sequence.make_the_optimizer_anew,
    Sequence.load_its_own_state,
    Sequence.change_options,
    Sequence.change_the_variant,
    Sequence.change_the_optimizer,
    Sequence.freeze_or_unfreeze,
    Sequence.take_a_group_out,
    Sequence.join_two_groups,
    Sequence.add_a_group,
]
ALONE = [*ANYWHERE, Sequence.interrupt_a_step, Sequence.audit_a_step, Sequence.refuse_a_step]


@quick_plans()
def run(seeds: range, folder: Path, layout: str, length: int) -> None:
    """Run one random sequence of events per seed, with a training step after each event. The seed determines the first
    event, so that consecutive seeds start with different events."""
    known = ALONE if layout == "alone" else ANYWHERE
    for seed in seeds:
        job, told = Sequence(seed, folder / str(seed), layout), list[str]()
        for number in range(length):
            for event in (job.chance.choice(known) if number else known[seed % len(known)], Sequence.train):
                told.append(event.__name__)
                try:
                    event(job)
                    job.compare()
                except (Exception, pytest.fail.Exception, CheckpointException) as error:
                    raise AssertionError(f"seed {seed}: {type(error).__name__} in {told}: {error}") from error


@pytest.mark.parametrize("first", range(0, 44, 11))
def test_no_event_leaves_anything_that_a_later_step_feels(first: int, tmp_path: Path) -> None:
    run(range(first, first + 11), tmp_path, "alone", 6)


# A sequence has two events on the layouts "hsdp" and "chain", but only one on the simpler layouts "fsdp2" and "all".
# To save time, half of the possible events are tested on "fsdp2" and the other half on "all".
@pytest.mark.parametrize(
    ("layout", "seeds", "length"),
    [
        ("fsdp2", range(0, len(ANYWHERE), 2), 1),
        ("all", range(1, len(ANYWHERE), 2), 1),
        ("hsdp", range(len(ANYWHERE)), 2),
        ("chain", range(len(ANYWHERE)), 2),
    ],
    ids=str,
)
def test_nor_on_ranks_all_or_some_of_which_it_happens_to(
    layout: str, seeds: range, length: int, world4: RankPool, tmp_path: Path
) -> None:
    world4.run(run, seeds, tmp_path, layout, length)
