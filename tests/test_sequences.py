"""Random sequences of what happens to an optimizer, beside a dense reference in fp64 that knows no state but its own.

Most events are no step: forward passes that lead to none, batches that are skipped, errors after and in the middle of a
step, saving and loading into the same or other objects, groups that come and go. Each is one that the documentation
makes a promise about, and the reference does what the promise says. After each event all weights are compared. The
reference has the published formulas written out; it shares no line with the optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import Muon, audit, checkpoint
from shardmuon.testing import RankPool

FP64 = torch.float64
WIDTH, TOKENS = 8, 7
KELLER = (3.4445, -4.7750, 2.0315)
FIXED: dict[str, Any] = {
    "method": "standard",
    "ns_dtype": FP64,
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
)


class Net(nn.Module):
    """A few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.first, self.second, self.third, self.fourth = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        x = self.embedding(tokens) + noise
        for layer in (self.first, self.second, self.third, self.fourth):
            x = x + layer(x).tanh()
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


# ------------------------------------------------------------------------------------------------------ the reference


def orthogonalized(x: Tensor) -> Tensor:
    """Five quintic Newton-Schulz steps on x / ||x||."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    y = wide / wide.norm() if wide.norm() > 0 else wide
    for _ in range(5):
        gram = y @ y.T
        y = KELLER[0] * y + (KELLER[1] * gram + KELLER[2] * gram @ gram) @ y
    return y if x.shape[0] <= x.shape[1] else y.T


@dataclass
class Dense:
    """Weights, options and state of one job, by name."""

    weights: dict[str, Tensor]
    options: dict[str, dict[str, Any]]
    state: dict[str, dict[str, Any]] = field(default_factory=dict)

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            if name in self.options:
                (self._muon if self.options[name]["use_muon"] else self._adamw)(name, grad)

    def _kept(self, name: str, *keys: str) -> dict[str, Any]:
        """A parameter's state, without what other rules left there."""
        state = self.state.setdefault(name, {})
        for key in set(state) - set(keys):
            del state[key]
        return state

    def _muon(self, name: str, grad: Tensor) -> None:
        group, weight = self.options[name], self.weights[name]
        own = {"normuon": ["v"], "hyperball": ["radius"]}.get(group["variant"], [])
        state = self._kept(name, "buffer", *own)
        state["buffer"] = group["momentum"] * state.get("buffer", 0.0) + (1 - group["momentum"]) * grad
        update = orthogonalized((1 - group["momentum"]) * grad + group["momentum"] * state["buffer"])
        rows, cols = weight.shape
        if group["variant"] == "normuon":
            mean = update.square().mean(1 if rows >= cols else 0, keepdim=True)
            state["v"] = 0.95 * state.get("v", 0.0) + (1 - 0.95) * mean
            scaled = update / state["v"].clamp(min=1e-10).sqrt()
            update = scaled * update.norm() / scaled.norm()
        lr = group["lr"] * math.sqrt(max(1.0, rows / cols))
        if group["variant"] == "hyperball":
            radius = state.setdefault("radius", weight.norm())
            moved = weight - lr * radius * update / update.norm()
            self.weights[name] = radius * moved / moved.norm()
        else:
            self.weights[name] = weight * (1 - group["lr"] * group["weight_decay"]) - lr * update

    def _adamw(self, name: str, grad: Tensor) -> None:
        group = self.options[name]
        (first, second), eps = group["betas"], group["eps"]
        state = self._kept(name, "count", "mean", "square")
        count = state["count"] = state.get("count", 0) + 1
        mean = state["mean"] = first * state.get("mean", 0.0) + (1 - first) * grad
        square = state["square"] = second * state.get("square", 0.0) + (1 - second) * grad**2
        root = (square / (1 - second**count)).sqrt() + eps
        decayed = self.weights[name] * (1 - group["lr"] * group["weight_decay"])
        self.weights[name] = decayed - group["lr"] * mean / (1 - first**count) / root


# ---------------------------------------------------------------------------------------------- two jobs side by side

MATRIX = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "variant": None}
VECTOR = {"use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}
GROUPS = [
    (("first.weight", "second.weight"), MATRIX),
    (("third.weight", "fourth.weight"), MATRIX),
    (("up.weight", "down.weight"), MATRIX),
    (("embedding.weight", "up.bias"), VECTOR),
    (("head.weight",), VECTOR),
]
VARIANTS = (None, "normuon", "hyperball")


def make_model(sharded: bool) -> Net:
    model = Net().double()
    made = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=made, dtype=FP64) * 0.3)
    return fully_shard(model) if sharded else model


def make_optimizer(model: Net, groups: Any, **changed: Any) -> Muon:
    params = dict(model.named_parameters())
    made = []
    for names, options in groups:
        known = {key: value for key, value in changed.items() if key in options}
        made.append({**options, **known, "params": [(name, params[name]) for name in names]})
    return Muon(made, lr=0.02, **FIXED)


class Job:
    """A model with its optimizers and, beside it, the reference, to which all events happen alike."""

    def __init__(self, seed: int, folder: Path, sharded: bool) -> None:
        self.chance, self.folder, self.sharded = random.Random(seed), folder, sharded
        self.groups = [(list(names), dict(options)) for names, options in GROUPS]
        self.away: list[tuple[list[str], dict[str, Any]]] = []  # groups that were taken out
        self.frozen: set[str] = set()
        self._take(make_model(sharded))
        whole = {name: _whole(p).clone() for name, p in self.model.named_parameters()}
        self.dense = Dense(whole, self._options())
        self.saved: Saved | None = None
        self.moment = 0
        self.save()

    def _take(self, model: Net, **changed: Any) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, self.groups, **changed)
        for name, p in model.named_parameters():
            p.requires_grad_(name not in self.frozen)

    def _options(self) -> dict[str, dict[str, Any]]:
        return {name: options for names, options in self.groups for name in names}

    def _set(self, at: int, **options: Any) -> None:
        self.groups[at][1].update(options)
        self.optimizer.param_groups[at].update(options)

    def _all(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def batch(self, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        tokens = torch.randint(TOKENS, (2, 5), generator=made)
        return tokens, scale * torch.randn(2, 5, WIDTH, generator=made, dtype=FP64)

    # What a training loop does.

    def backward(self, batches: int = 1, missing: bool = False) -> dict[str, Tensor]:
        """Gradients of the job, whole."""
        for _ in range(batches):
            self.model(*self.batch(self.chance.choice((0.5, 1.0, 2.0)))).backward()
        names = sorted(set(self.dense.weights) - self.frozen)
        without = set(self.chance.sample(names, self.chance.randrange(1, 4))) if missing else set()
        for name in without:
            self.model.get_parameter(name).grad = None
        named = self.model.named_parameters()
        return {name: _whole(p.grad).clone() for name, p in named if p.grad is not None and name in names}

    def stepped(self, grads: dict[str, Tensor]) -> None:
        """The reference's step."""
        self.dense.options = self._options()
        self.dense.step(grads)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for name in (name for names, _ in self.away for name in names):  # no optimizer has it
            self.model.get_parameter(name).grad = None

    # Events.

    def step(self, grads: dict[str, Tensor]) -> None:
        """A step of both."""
        self.optimizer.step()
        self.zero_grad()
        self.stepped(grads)

    def train(self) -> None:
        self.step(self.backward(self.chance.choice((1, 1, 2))))

    def train_without_some_gradients(self) -> None:
        self.step(self.backward(missing=True))

    def forward_without_a_step(self) -> None:
        """A large batch, in evaluation or not, or one that is not finite; nothing is stepped."""
        self.model.train(self.chance.random() < 0.7)
        loss = self.model(*self.batch(30.0))
        if self.chance.random() < 0.5:
            loss.backward()
        if self.chance.random() < 0.3:
            self.model(*self.batch(math.nan))
        self.model.train()
        self.zero_grad()

    def fail_in_a_hook_after_the_step(self) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("of a hook")

        handle = self.optimizer.register_step_post_hook(fail)
        grads = self.backward()
        with pytest.raises(RuntimeError, match="of a hook"):
            self.optimizer.step()
        handle.remove()
        self.zero_grad()
        self.stepped(grads)

    def interrupt_a_step(self) -> None:
        """Ctrl-C at a random operation. Either nothing has changed, or the job must be rolled back."""
        grads = self.backward()
        before = [_whole(p).clone() for p in self.model.parameters()]
        done: list[bool] = []
        hook = self.optimizer.register_step_post_hook(lambda *_: done.append(True))
        with contextlib.suppress(KeyboardInterrupt), _Interrupted(self.chance.randrange(300)):
            self.optimizer.step()
        hook.remove()
        if done:  # it had fewer operations, or torch's wrapper was interrupted behind it
            self.zero_grad()
            self.stepped(grads)
            return
        if self.optimizer.broken is None:
            assert all(torch.equal(_whole(p), old) for p, old in zip(self.model.parameters(), before, strict=True))
            self.zero_grad()
            return
        with pytest.raises(RuntimeError, match="broken off"):
            self.optimizer.step()
        with pytest.raises(ValueError, match="broken off"):
            checkpoint.save(self.folder / "torn", self.model, self.optimizer)
        assert not (self.folder / "torn").exists()
        self.zero_grad()
        self.roll_back()

    def save(self) -> None:
        self.moment += 1
        path, states = self.folder / str(self.moment), None
        if self.moment > 1 and self.chance.random() < 0.3:
            checkpoint.save(path, self.model, self.optimizer)
        else:
            states = self._all()
        groups = [(list(names), dict(options)) for names, options in self.groups]
        self.saved = Saved(path, states, copy.deepcopy(self.dense), groups)

    def _load(self) -> None:
        saved = self.saved
        assert saved is not None
        for group, (_, options) in zip(self.optimizer.param_groups, saved.groups, strict=True):
            if options.get("variant") is None and group["use_muon"]:
                group["variant"] = None  # else plain state is refused, so that no variant ends in silence
        if saved.states is None:
            checkpoint.load(saved.path, self.model, self.optimizer)
        else:
            model, optimizer = copy.deepcopy(saved.states)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        self.dense = copy.deepcopy(saved.dense)
        self.groups = [(list(names), dict(options)) for names, options in saved.groups]

    def roll_back(self) -> None:
        """Onto the same objects, if the groups are the same; else onto others."""
        assert self.saved is not None
        if [names for names, _ in self.saved.groups] == [names for names, _ in self.groups]:
            self._load()
        else:
            self.resume()

    def resume(self) -> None:
        """Resume into other objects, whose optimizer was made with other arguments."""
        assert self.saved is not None
        kept = {tuple(names) for names, _ in self.saved.groups}
        self.away = [(list(n), dict(o)) for n, o in GROUPS if not any(set(n) <= set(names) for names in kept)]
        self.groups = [(list(names), dict(options)) for names, options in self.saved.groups]
        self._take(make_model(self.sharded), lr=0.5, momentum=0.3, weight_decay=0.0, variant=None)
        self._load()

    def copy_the_job(self) -> None:
        job, pickled = (self.model, self.optimizer), self.chance.random() < 0.5
        self.model, self.optimizer = pickle.loads(pickle.dumps(job)) if pickled else copy.deepcopy(job)

    def change_options(self) -> None:
        at = self.chance.randrange(len(self.groups))
        options = self.groups[at][1]
        key = self.chance.choice(["lr", "weight_decay", *(["momentum"] if options["use_muon"] else [])])
        self._set(at, **{key: options[key] * self.chance.choice((0.5, 0.9))})

    def change_the_variant(self) -> None:
        """Change to one, to another and back: what the first kept is gone then."""
        groups = [at for at, (_, options) in enumerate(self.groups) if options["use_muon"]]
        if not groups:
            return
        at, (first, other) = self.chance.choice(groups), self.chance.sample(VARIANTS, 2)
        for variant in (first, other, first):
            self._set(at, variant=variant, weight_decay=0.0 if variant == "hyperball" else 0.1)
            self.train()

    def freeze_or_unfreeze(self) -> None:
        name = self.chance.choice(list(self._options()))
        self.frozen ^= {name}
        self.model.get_parameter(name).requires_grad_(name not in self.frozen)

    def take_a_group_out(self) -> None:
        if len(self.groups) < 3:
            return
        at = self.chance.randrange(len(self.groups))
        del self.optimizer.param_groups[at]
        names, options = self.groups.pop(at)
        self.away.append((names, options))
        for name in names:
            self.optimizer.state.pop(self.model.get_parameter(name), None)
            self.dense.state.pop(name, None)

    def join_two_groups(self) -> None:
        numbers = range(len(self.groups))
        pairs = [(i, j) for i in numbers for j in numbers if i < j and self.groups[i][1] == self.groups[j][1]]
        if not pairs:
            return
        i, j = self.chance.choice(pairs)
        other = self.optimizer.param_groups.pop(j)
        for key in ("params", "param_names"):
            self.optimizer.param_groups[i][key] = [*self.optimizer.param_groups[i][key], *other[key]]
        self.groups[i] = (self.groups[i][0] + self.groups.pop(j)[0], self.groups[i][1])

    def add_a_group(self) -> None:
        if not self.away:
            return
        names, options = self.away.pop()
        params = [(name, self.model.get_parameter(name)) for name in names]
        self.optimizer.add_param_group({**options, "params": params})
        self.groups.append((names, options))

    def audit_a_step(self) -> None:
        """A skipped batch or a refused step before it is not audited; the step after it checks the momentum again."""
        check = audit(self.optimizer)
        self.chance.choice([self.forward_without_a_step, self.refuse_a_step])()
        self.train()
        assert check.report.ok, check.report.findings
        self.train()
        assert check.report.ok, check.report.findings

    def refuse_a_step(self) -> None:
        """Refuse a step by an option without a meaning: weights, state and options stay, and the same gradients make
        a step afterwards."""
        at = self.chance.randrange(len(self.groups))
        wrong = [("lr", math.nan), ("weight_decay", -1.0)]
        if self.groups[at][1]["use_muon"]:
            wrong += [("momentum", 1.5), ("variant", "none such")]
        key, value = self.chance.choice(wrong)
        grads, before = self.backward(), self._all()
        self.optimizer.param_groups[at][key] = value
        with pytest.raises(ValueError, match=key):
            self.optimizer.step()
        self.optimizer.param_groups[at][key] = self.groups[at][1][key]
        assert_bitwise(self._all(), before)
        self.step(grads)

    def compare(self, event: str) -> None:
        bound = 1e-5  # what variants keep is fp32
        for name, p in self.model.named_parameters():
            found, wanted = _whole(p), self.dense.weights[name]
            error = float((found - wanted).norm() / wanted.norm())
            assert error < bound, f"{name} is {error:.2g} off after {event}"


@dataclass
class Saved:
    """A moment to come back to."""

    path: Path
    states: Any
    dense: Dense
    groups: list[tuple[list[str], dict[str, Any]]]


class _Interrupted(TorchDispatchMode):
    """Raises KeyboardInterrupt in place of the operation of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def _whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


ANYWHERE: list[Callable[[Job], None]] = [
    Job.train,
    Job.train_without_some_gradients,
    Job.forward_without_a_step,
    Job.fail_in_a_hook_after_the_step,
    Job.save,
    Job.roll_back,
    Job.resume,
    Job.change_options,
    Job.change_the_variant,
    Job.freeze_or_unfreeze,
    Job.take_a_group_out,
    Job.join_two_groups,
    Job.add_a_group,
]
ALONE: list[Callable[[Job], None]] = [
    *ANYWHERE,
    Job.interrupt_a_step,
    Job.copy_the_job,
    Job.audit_a_step,
    Job.refuse_a_step,
]


def run(seeds: range, folder: Path, sharded: bool = False) -> None:
    """Sequences of six events, the first of them each event in turn; a step follows each."""
    known = ANYWHERE if sharded else ALONE
    for seed in seeds:
        job, told = Job(seed, folder / str(seed), sharded), list[str]()
        for number in range(6):
            for event in (job.chance.choice(known) if number else known[seed % len(known)], Job.train):
                told.append(event.__name__)
                try:
                    event(job)
                except (Exception, pytest.fail.Exception, CheckpointException) as error:
                    raise AssertionError(f"seed {seed}: {type(error).__name__} in {told}: {error}") from error
                job.compare(f"{told} (seed {seed})")


@pytest.mark.stated
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_event_leaves_anything_that_a_later_step_feels(first: int, tmp_path: Path) -> None:
    run(range(first, first + 10), tmp_path)


def test_nor_on_two_ranks(world2: RankPool, tmp_path: Path) -> None:
    world2.run(run, range(1000, 1005), tmp_path, sharded=True)
