"""Random sequences of what happens to an optimizer, beside a dense reference in fp64 that knows no state but its own.

Most events are no step: forward passes that lead to none, batches that are skipped, errors after and in the middle of a
step, saving and loading into the same or other objects, groups that come and go. After each event all weights are
compared. The reference has the published formulas written out; it shares no line with the optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import Exchange, Muon, Orthogonalizer, checkpoint
from shardmuon.testing import RankPool
from shardmuon_qkclip import QKClip

FP64 = torch.float64
HEADS, SIZE, WIDTH, TOKENS = 2, 4, 8, 7
TAU = 2.0
KELLER = (3.4445, -4.7750, 2.0315)
FIXED: dict[str, Any] = {
    "orthogonalizer": Orthogonalizer("standard", FP64),
    "exchange": Exchange(dtype=FP64),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
    "ignore:Detected call of `lr_scheduler.step",
)


class Net(nn.Module):
    """One block of attention and a feed-forward part; `side` is trained by another optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = SIZE
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.largest: list[Tensor] | None = None  # a list is filled with the largest logit of each head

    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        x = self.embedding(tokens) + noise
        q, k, v = (
            part(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.largest is not None:
            self.largest.append((q @ k.mT / math.sqrt(SIZE)).detach().amax((0, 2, 3)))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o_proj(mixed)
        x = x + self.down(F.gelu(self.up(x))) + self.side(x)
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
            state["v"] = group["beta2"] * state.get("v", 0.0) + (1 - group["beta2"]) * mean
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

    def clip(self, largest: Tensor) -> None:  # (HEADS,)
        gain = (TAU / largest).clamp(max=1.0).sqrt().repeat_interleave(SIZE)[:, None]
        if bool((gain < 1).any()):
            for name in ("q_proj.weight", "k_proj.weight"):
                self.weights[name] = self.weights[name] * gain
                if "radius" in self.state.get(name, {}):
                    self.state[name]["radius"] = self.weights[name].norm()

    def copy(self) -> Dense:
        return copy.deepcopy(self)


# ---------------------------------------------------------------------------------------------- two jobs side by side

MATRIX = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "variant": None, "beta2": 0.9}
VECTOR = {"use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}
GROUPS = [
    (("q_proj.weight", "k_proj.weight"), MATRIX),
    (("v_proj.weight", "o_proj.weight"), MATRIX),
    (("up.weight", "down.weight"), MATRIX),
    (("embedding.weight", "up.bias"), VECTOR),
    (("head.weight",), VECTOR),
]
SIDE = [(("side.weight",), MATRIX)]


def make_model(sharded: bool) -> Net:
    model = Net().double()
    made = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        p.data.copy_(torch.randn(p.shape, generator=made, dtype=FP64) * (0.6 if name[:2] in ("q_", "k_") else 0.3))
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

    def __init__(self, seed: int, folder: Path, sharded: bool, clips: bool) -> None:
        self.chance, self.folder, self.sharded, self.clips = random.Random(seed), folder, sharded, clips
        self.groups = [(list(names), dict(options)) for names, options in GROUPS]
        self.away: list[tuple[list[str], dict[str, Any]]] = []  # groups that were taken out
        self.frozen: set[str] = set()
        self._take(make_model(sharded))
        whole = {name: _whole(p).clone() for name, p in self.model.named_parameters()}
        self.dense = Dense(whole, self._options())
        self.dense_side = Dense({}, {"side.weight": dict(MATRIX)})
        self.twin = make_model(False)
        self.saved: Saved | None = None
        self.moment = 0
        self.save(on_disk=False)

    def _take(self, model: Net, **changed: Any) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, self.groups, **changed)
        self.side = make_optimizer(model, SIDE)
        self.clip = QKClip(model, self.optimizer, tau=TAU) if self.clips else None
        for name, p in model.named_parameters():
            p.requires_grad_(name not in self.frozen)

    def _options(self) -> dict[str, dict[str, Any]]:
        return {name: options for names, options in self.groups for name in names}

    def batch(self, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        tokens = torch.randint(TOKENS, (2, 5), generator=made)
        return tokens, scale * torch.randn(2, 5, WIDTH, generator=made, dtype=FP64)

    # What a training loop does.

    def forward(self, scale: float = 1.0, backward: bool = True) -> None:
        """A forward and perhaps a backward pass of the job, not of the reference."""
        loss = self.model(*self.batch(scale))
        if backward:
            loss.backward()

    def backward(self, batches: int = 1, missing: bool = False) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of the job, and those of the reference with its largest logits."""
        made = [self.batch(self.chance.choice((0.5, 1.0, 2.0))) for _ in range(batches)]
        with torch.no_grad():
            for name, p in self.twin.named_parameters():
                p.copy_(self.dense.weights[name])
        self.twin.zero_grad()
        self.twin.largest = []
        for batch in made:
            self.model(*batch).backward()
            self.twin(*batch).backward()
        names = sorted(set(self.dense.weights) - self.frozen)
        without = set(self.chance.sample(names, self.chance.randrange(1, 4))) if missing else set()
        for name, p in self.model.named_parameters():
            if name in without:
                p.grad = None
        grads = {name: p.grad for name, p in self.twin.named_parameters() if name in set(names) - without}
        return {name: grad for name, grad in grads.items() if grad is not None}, torch.stack(self.twin.largest).amax(0)

    def stepped(self, grads: dict[str, Tensor], largest: Tensor) -> None:
        """The reference's step."""
        self.dense.options = self._options()
        self.dense.step({name: grad for name, grad in grads.items() if name != "side.weight"})
        if self.clips:
            self.dense.clip(largest)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.side.zero_grad()
        for name in (name for names, _ in self.away for name in names):  # no optimizer has it
            self.model.get_parameter(name).grad = None

    # Events.

    def train(self, missing: bool = False) -> None:
        grads, largest = self.backward(self.chance.choice((1, 1, 2)), missing)
        self.optimizer.step()
        self.zero_grad()
        self.stepped(grads, largest)

    def train_without_some_gradients(self) -> None:
        self.train(missing=True)

    def train_the_side(self) -> None:
        """The other optimizer's step on the same model."""
        grads, _ = self.backward()
        self.side.step()
        self.zero_grad()
        self.dense_side.weights = self.dense.weights
        self.dense_side.step({"side.weight": grads["side.weight"]} if "side.weight" in grads else {})

    def forward_without_a_step(self) -> None:
        self.forward(scale=30.0, backward=self.chance.random() < 0.5)
        self.zero_grad()

    def evaluate_with_gradients(self) -> None:
        self.model.eval()
        self.forward(scale=30.0, backward=False)
        self.model.train()

    def skip_a_batch_that_is_not_finite(self) -> None:
        self.forward(scale=math.nan, backward=self.chance.random() < 0.5)
        self.zero_grad()

    def skip_by_a_gradient_scaler(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        grads, largest = self.backward()
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(8.0)
        overflows = self.chance.random() < 0.5
        if overflows:
            next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(math.inf)
        scaler.scale(torch.ones(()))  # it is in use
        scaler.step(self.optimizer)
        scaler.update()
        self.zero_grad()
        if not overflows:
            self.stepped(grads, largest)

    def fail_in_a_hook_after_the_step(self) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("of a hook")

        handle = self.optimizer.register_step_post_hook(fail)
        grads, largest = self.backward()
        with pytest.raises(RuntimeError, match="of a hook"):
            self.optimizer.step()
        handle.remove()
        self.zero_grad()
        self.stepped(grads, largest)

    def interrupt_a_step(self) -> None:
        """Ctrl-C at a random operation. Either nothing has changed, or the job must be rolled back."""
        grads, largest = self.backward()
        before = [_whole(p).clone() for p in self.model.parameters()]
        done: list[bool] = []
        hook = self.optimizer.register_step_post_hook(lambda *_: done.append(True))
        with contextlib.suppress(KeyboardInterrupt), _Interrupted(self.chance.randrange(300)):
            self.optimizer.step()
        hook.remove()
        if done:  # it had fewer operations, or torch's wrapper was interrupted behind it
            self.zero_grad()
            self.stepped(grads, largest)
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

    def save(self, on_disk: bool = True) -> None:
        self.moment += 1
        path, states = self.folder / str(self.moment), None
        if on_disk:
            checkpoint.save(path, self.model, self.optimizer)
        else:
            states = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        groups = [(list(names), dict(options)) for names, options in self.groups]
        self.saved = Saved(
            path, states, copy.deepcopy(self.side.state_dict()), self.dense.copy(), self.dense_side.copy(), groups
        )

    def save_in_memory(self) -> None:
        self.save(on_disk=False)

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
        self.side.load_state_dict(copy.deepcopy(saved.side))
        self.dense, self.dense_side = saved.dense.copy(), saved.dense_side.copy()
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
        self._take(make_model(self.sharded), lr=0.5, momentum=0.3, weight_decay=0.0, variant=None, beta2=0.2)
        self._load()

    def copy_the_job(self) -> None:
        self.model, self.optimizer, self.side = copy.deepcopy((self.model, self.optimizer, self.side))
        self.clip = QKClip(self.model, self.optimizer, tau=TAU) if self.clips else None

    def change_options(self) -> None:
        at = self.chance.randrange(len(self.groups))
        options = self.groups[at][1]
        key = self.chance.choice(["lr", "weight_decay", *(["momentum"] if options["use_muon"] else [])])
        factor = self.chance.choice((0.5, 0.9))
        options[key] = self.optimizer.param_groups[at][key] = options[key] * factor

    def change_the_variant(self) -> None:
        at = self.chance.choice([i for i, (_, options) in enumerate(self.groups) if options["use_muon"]] or [-1])
        if at < 0:
            return
        variant = self.chance.choice([None, "normuon", "hyperball"])
        decay = 0.0 if variant == "hyperball" else 0.1
        self.groups[at][1].update(variant=variant, weight_decay=decay)
        self.optimizer.param_groups[at].update(variant=variant, weight_decay=decay)

    def freeze_or_unfreeze(self) -> None:
        name = self.chance.choice([name for names, _ in self.groups for name in names])
        if self.clips and name[:2] in ("q_", "k_"):
            return
        self.frozen ^= {name}
        self.model.get_parameter(name).requires_grad_(name not in self.frozen)

    def take_a_group_out(self) -> None:
        if len(self.groups) < 3 or self.clips:
            return
        at = self.chance.randrange(len(self.groups))
        del self.optimizer.param_groups[at]
        names, options = self.groups.pop(at)
        self.away.append((names, options))
        for name in names:
            self.optimizer.state.pop(self.model.get_parameter(name), None)
            self.dense.state.pop(name, None)

    def join_two_groups(self) -> None:
        pairs = [
            (i, j)
            for i, (_, first) in enumerate(self.groups)
            for j, (_, second) in enumerate(self.groups)
            if i < j and first == second
        ]
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

    def compare(self, event: str) -> None:
        bound = 1e-5  # norms are kept, and logits measured, in fp32
        for name, p in self.model.named_parameters():
            found, wanted = _whole(p), self.dense.weights[name]
            error = float((found - wanted).norm() / wanted.norm())
            assert error < bound, f"{name} is {error:.2g} off after {event}"


@dataclass
class Saved:
    """A moment to come back to."""

    path: Path
    states: Any
    side: Any
    dense: Dense
    dense_side: Dense
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
    Job.train,
    Job.train_without_some_gradients,
    Job.train_the_side,
    Job.forward_without_a_step,
    Job.evaluate_with_gradients,
    Job.skip_a_batch_that_is_not_finite,
    Job.skip_by_a_gradient_scaler,
    Job.fail_in_a_hook_after_the_step,
    Job.save,
    Job.save_in_memory,
    Job.save_in_memory,
    Job.roll_back,
    Job.resume,
    Job.change_options,
    Job.change_the_variant,
    Job.freeze_or_unfreeze,
    Job.take_a_group_out,
    Job.join_two_groups,
    Job.add_a_group,
]
ALONE = [*ANYWHERE, Job.interrupt_a_step, Job.copy_the_job]


def run(seed: int, folder: Path, sharded: bool = False, events: int = 7) -> None:
    """One sequence, which ends with a step."""
    job = Job(seed, folder, sharded, clips=seed % 2 == 1)
    told = []
    for _ in range(events):
        for event in (job.chance.choice(ANYWHERE if sharded else ALONE), Job.train):
            told.append(event.__name__)
            try:
                event(job)
            except (Exception, pytest.fail.Exception) as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__} in {told}: {error}") from error
            job.compare(f"{told} (seed {seed})")


@pytest.mark.stated
@pytest.mark.parametrize("first", range(0, 80, 10))
def test_no_event_leaves_anything_that_a_later_step_feels(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 10):
        run(seed, tmp_path / str(seed))


def _sharded(folder: Path, seeds: range) -> None:
    for seed in seeds:
        run(seed, folder / str(seed), sharded=True, events=6)


def test_nor_on_two_ranks(world2: RankPool, tmp_path: Path) -> None:
    world2.run(_sharded, tmp_path, range(1000, 1005))
