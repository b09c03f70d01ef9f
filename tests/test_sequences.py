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
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import Exchange, GradScaler, Muon, Orthogonalizer, audit, checkpoint, clip_grad_norm_
from shardmuon.testing import RankPool
from shardmuon.testing.tolerances import assert_rounded
from shardmuon_qkclip import QKClip, qk_clip
from shardmuon_qkclip.layers import attention_layers

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
# what the docs say a group gets whose kind is changed, and that has none of its own
ADAMW = {"use_muon": False, "betas": (0.9, 0.95), "eps": 1e-8}
MUON = {"use_muon": True, "momentum": 0.95, "variant": None, "beta2": 0.95}
NO_LOGIT = torch.zeros(HEADS, dtype=FP64)


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
        self.save()

    def _take(self, model: Net, **changed: Any) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, self.groups, **changed)
        self.side = make_optimizer(model, SIDE)
        self.clip = QKClip(model, self.optimizer, tau=TAU) if self.clips else None
        for name, p in model.named_parameters():
            p.requires_grad_(name not in self.frozen)

    def _options(self) -> dict[str, dict[str, Any]]:
        return {name: options for names, options in self.groups for name in names}

    def _matrix_groups(self) -> list[int]:
        return [at for at, (_, options) in enumerate(self.groups) if options["use_muon"]]

    def _set(self, at: int, **options: Any) -> None:
        self.groups[at][1].update(options)
        self.optimizer.param_groups[at].update(options)

    def _names(self) -> list[str]:
        return [name for names, _ in self.groups for name in names]

    def _trained(self) -> str:
        """A parameter of the optimizer; not a frozen one if there is another."""
        names = self._names()
        return self.chance.choice([name for name in names if name not in self.frozen] or names)

    def _all(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def batch(self, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        tokens = torch.randint(TOKENS, (2, 5), generator=made)
        return tokens, scale * torch.randn(2, 5, WIDTH, generator=made, dtype=FP64)

    # What a training loop does.

    def forward(self, backward: bool = False) -> None:
        """Make a forward and perhaps a backward pass of a large batch, that the reference does not hear of."""
        loss = self.model(*self.batch(30.0))
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

    def step(self, grads: dict[str, Tensor], largest: Tensor) -> None:
        """A step of both."""
        self.optimizer.step()
        self.zero_grad()
        self.stepped(grads, largest)

    def train(self) -> None:
        self.step(*self.backward(self.chance.choice((1, 1, 2))))

    def train_without_some_gradients(self) -> None:
        self.step(*self.backward(missing=True))

    def train_the_side(self) -> None:
        """The other optimizer's step on the same model."""
        grads, _ = self.backward()
        self.side.step()
        self.zero_grad()
        self.dense_side.weights = self.dense.weights
        self.dense_side.step({"side.weight": grads["side.weight"]} if "side.weight" in grads else {})

    def forward_without_a_step(self) -> None:
        """A batch of large logits, in evaluation or not, or one that is not finite; nothing is stepped."""
        self.model.train(self.chance.random() < 0.7)
        self.forward(backward=self.chance.random() < 0.5)
        if self.chance.random() < 0.3:
            self.model(*self.batch(math.nan))
        self.model.train()
        self.zero_grad()

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

    def save(self) -> None:
        self.moment += 1
        path, states = self.folder / str(self.moment), None
        if self.moment > 1 and self.chance.random() < 0.3:
            checkpoint.save(path, self.model, self.optimizer)
        else:
            states = self._all()
        groups = [(list(names), dict(options)) for names, options in self.groups]
        self.saved = Saved(
            path, states, copy.deepcopy(self.side.state_dict()), self.dense.copy(), self.dense_side.copy(), groups
        )

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
        """Copy the job, or pickle it without the QK-clip, which is made anew."""
        pickled = self.chance.random() < 0.5
        if pickled and self.clip is not None:
            self.clip.close()
            self.forward()  # measured by nobody
        job = self.model, self.optimizer, self.side
        self.model, self.optimizer, self.side = pickle.loads(pickle.dumps(job)) if pickled else copy.deepcopy(job)
        self.clip = QKClip(self.model, self.optimizer, tau=TAU) if self.clips else None

    def fork_a_worker(self) -> None:
        """Fork as a data loader does: the child drops what it got, and ends."""
        child = os.fork()
        if not child:
            try:
                del self.model, self.optimizer, self.side, self.clip
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    def change_options(self) -> None:
        at = self.chance.randrange(len(self.groups))
        options = self.groups[at][1]
        key = self.chance.choice(["lr", "weight_decay", *(["momentum"] if options["use_muon"] else [])])
        self._set(at, **{key: options[key] * self.chance.choice((0.5, 0.9))})

    def change_the_variant(self) -> None:
        if self._matrix_groups():
            variant = self.chance.choice([None, "normuon", "hyperball"])
            decay = 0.0 if variant == "hyperball" else 0.1
            self._set(self.chance.choice(self._matrix_groups()), variant=variant, weight_decay=decay)

    def freeze_or_unfreeze(self) -> None:
        name = self.chance.choice(self._names())
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

    def clip_the_gradients(self) -> None:
        """Clip by one norm over all groups but one that is kept out; then a step or none."""
        grads, largest = self.backward()
        out = self.chance.choice([-1, *range(len(self.groups))])
        if out >= 0:
            self.optimizer.param_groups[out]["clip_grad"] = False
        power, bound = self.chance.choice((2.0, 1.0, math.inf)), self.chance.choice((1e-3, 0.1, 1e3))
        counted = {name for i, (names, _) in enumerate(self.groups) if i != out for name in names} & set(grads)
        own = [self.model.get_parameter(name).grad for name in sorted(counted)]
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in own if grad is not None]), power)
        found = clip_grad_norm_(self.optimizer, bound, power)
        assert_rounded(found, norm, roundings=2 * sum(grad.numel() for grad in own if grad is not None))
        factor = min(1.0, bound / (float(norm) + 1e-6))
        clipped = {name: grad * factor if name in counted else grad for name, grad in grads.items()}
        if self.chance.random() < 0.6:
            self.optimizer.step()
            self.stepped(clipped, largest)
        self.zero_grad()
        self.optimizer.param_groups[out]["clip_grad"] = True

    def scale_the_loss(self) -> None:
        """Scale by torch's scaler or shardmuon's, with or without clipping; what is not finite skips the step."""
        ours, clips, overflows = (self.chance.random() < 0.5 for _ in range(3))
        scaler = (GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=8.0)
        grads, largest = self.backward()
        own = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in own:
            grad.mul_(8.0)
        if overflows:
            self.chance.choice(own).fill_(self.chance.choice((math.inf, math.nan)))
        scaler.scale(torch.ones(()))  # it is in use
        if clips and ours:
            scaler.unscale_(self.optimizer)
            factor = min(1.0, 0.1 / (float(clip_grad_norm_(self.optimizer, 0.1)) + 1e-6))
            grads = {name: grad * factor for name, grad in grads.items()}
        scaler.step(self.optimizer)
        scaler.update()
        self.zero_grad()
        assert scaler.get_scale() == (4.0 if overflows else 8.0)
        if not overflows:
            self.stepped(grads, largest)

    def follow_a_schedule_and_go_back(self) -> None:
        """A scheduler of torch, of which a state dict is loaded two steps later, with the optimizer's."""
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.8**epoch)
        first = [options["lr"] for _, options in self.groups]

        def train(epoch: int) -> None:
            self.train()
            scheduler.step()
            for (_, options), lr in zip(self.groups, first, strict=True):
                options["lr"] = lr * 0.8**epoch

        train(1)
        model, optimizer = self._all()
        schedule, dense = copy.deepcopy(scheduler.state_dict()), self.dense.copy()
        train(2)
        train(3)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        scheduler.load_state_dict(schedule)
        self.dense = dense
        for (_, options), lr in zip(self.groups, first, strict=True):
            options["lr"] = lr * 0.8
        self.compare("going back with a schedule")
        train(2)

    def write_to_a_weight(self) -> None:
        """The norm that Hyperball keeps stays behind, until it is deleted."""
        queries = [names for names, _ in self.groups if "q_proj.weight" in names] if self.clips else []
        at = self.chance.choice([i for i in self._matrix_groups() if self.groups[i][0] not in queries] or [-1])
        if at < 0:
            return
        self._set(at, variant="hyperball", weight_decay=0.0)
        self.train()
        name = self.chance.choice(self.groups[at][0])
        p = self.model.get_parameter(name)
        with torch.no_grad():
            p.mul_(0.7)
        self.dense.weights[name] = self.dense.weights[name] * 0.7
        if self.chance.random() < 0.5 and "radius" in self.dense.state.get(name, {}):
            del self.optimizer.state[p]["weight_radius"]
            del self.dense.state[name]["radius"]

    def let_one_start_afresh(self) -> None:
        """Let a parameter start afresh by an empty entry of a state dict."""
        self.train()
        name = self._trained()
        state = copy.deepcopy(self.optimizer.state_dict())
        state["state"][self._names().index(name)] = {}
        self.optimizer.load_state_dict(state)
        self.dense.state.pop(name, None)

    def _refused(self, error: type[BaseException], act: Callable[[], Any]) -> None:
        """Nothing changes: neither weights, state and options, nor what the gradients at hand lead to."""
        grads, largest = self.backward()
        before = self._all()
        with pytest.raises(error):
            act()
        assert same(self._all(), before), "something has changed"
        self.step(grads, largest)

    def load_what_does_not_fit(self) -> None:
        self.train()
        state = copy.deepcopy(self.optimizer.state_dict())
        for entry in state["state"].values():
            for value in entry.values():
                value.mul_(2.0) if value.is_floating_point() else None
        names = self._names()
        key = names.index(self._trained())
        group = self.chance.choice(state["param_groups"])
        matrix = "momentum_buffer" if "momentum_buffer" in state["state"].get(key, {}) else "exp_avg"
        fault = self.chance.choice(("shape", "missing", "unknown", "group", "option", "names", "kind"))
        if fault == "shape" and key in state["state"]:
            state["state"][key][matrix] = torch.zeros(3, 5, dtype=FP64)
        elif fault == "missing" and key in state["state"]:
            del state["state"][key]
        elif fault == "unknown":
            state["state"][len(names) + 3] = {"momentum_buffer": torch.zeros(2, 2)}
        elif fault == "option":
            group["weight_decay"] = self.chance.choice((-1.0, math.nan, "much"))
        elif fault == "names" and len(group["param_names"]) > 1:
            group["param_names"] = group["param_names"][::-1]
        elif fault == "kind":
            group["use_muon"] = not group["use_muon"]
        else:
            state["param_groups"].pop()
        self._refused(ValueError, lambda: self.optimizer.load_state_dict(state))

    def load_a_damaged_checkpoint(self) -> None:
        path = self.folder / f"damaged{self.moment}"
        self.moment += 1
        checkpoint.save(path, self.model, self.optimizer)
        self.train()
        data = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
        damage = self.chance.choice(("cut", "gone", "no metadata"))
        if damage == "cut":
            data.write_bytes(data.read_bytes()[: int(data.stat().st_size * self.chance.choice((0.3, 0.9)))])
        else:
            (data if damage == "gone" else path / ".metadata").unlink()
        self._refused(CheckpointException, lambda: checkpoint.load(path, self.model, self.optimizer))

    def change_the_kind_and_back(self) -> None:
        """Change a group's kind; parameters start afresh at a step with another kind; until then nothing is lost."""
        heads = [i for i, (names, _) in enumerate(self.groups) if names == ["head.weight"]]
        at = self.chance.choice(self._matrix_groups() + heads)
        options, group = self.groups[at][1], self.optimizer.param_groups[at]
        old, other = dict(options), ADAMW if options["use_muon"] else MUON
        before = copy.deepcopy(self.optimizer.state_dict())
        eps = group["eps"]
        group.update(use_muon=other["use_muon"], eps=other.get("eps", eps))
        with pytest.raises(ValueError, match=r"use_muon"):
            self.optimizer.load_state_dict(before)
        if self.chance.random() < 0.7:
            options.update(other)
            self.train()
            options.clear()
            options.update(old)
        group.update(use_muon=old["use_muon"], eps=eps)

    def count_gradients_of_zeros(self) -> None:
        """Left by zero_grad(set_to_none=False): a real step, which at lr=0 changes no weight but counts."""
        self.train()
        grads, _ = self.backward()
        self.optimizer.zero_grad(set_to_none=False)
        rates = [options["lr"] for _, options in self.groups]
        still = self.chance.random() < 0.5
        for at in range(len(rates) if still else 0):
            self._set(at, lr=0.0)
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer.step()
        self.stepped({name: torch.zeros_like(grad) for name, grad in grads.items()}, NO_LOGIT)
        self.zero_grad()
        for at, lr in enumerate(rates if still else []):
            self._set(at, lr=lr)
            if self.groups[at][1].get("variant") != "hyperball":  # its norm is set anew, in fp32
                for name in self.groups[at][0]:
                    assert torch.equal(self.model.get_parameter(name), before[name]), name

    def load_another_muons_state(self) -> None:
        """Load state of torch.optim.Muon and AdamW after two steps of theirs; what a variant keeps starts afresh."""
        if self.frozen:
            return
        made = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        dense, theirs = {}, []
        for use_muon in (True, False):
            names = [name for names, options in self.groups if options["use_muon"] == use_muon for name in names]
            twins = [torch.nn.Parameter(self.dense.weights[name].clone()) for name in names]
            if not names:
                continue
            kind: Any = torch.optim.Muon if use_muon else torch.optim.AdamW
            optimizer = kind(twins, lr=1e-3, **({"momentum": 0.7} if use_muon else {"betas": (0.7, 0.8)}))
            for count in (1, 2):
                for name, p in zip(names, twins, strict=True):
                    g = p.grad = torch.randn(p.shape, generator=made, dtype=FP64)
                    old = dense.get(name, {})
                    if use_muon:
                        dense[name] = {"buffer": 0.7 * old.get("buffer", 0.0) + 0.3 * g}
                    else:
                        mean, square = 0.7 * old.get("mean", 0.0) + 0.3 * g, 0.8 * old.get("square", 0.0) + 0.2 * g * g
                        dense[name] = {"count": count, "mean": mean, "square": square}
                optimizer.step()
            theirs.append(optimizer.state_dict())
        checkpoint.load_foreign(self.optimizer, theirs)
        self.dense.state = dense

    def step_by_a_closure(self) -> None:
        self.forward(backward=True)
        told: list[tuple[dict[str, Tensor], Tensor]] = []

        def closure() -> Tensor:
            self.zero_grad()
            told.append(self.backward(2))
            return torch.tensor(1.5)

        with torch.no_grad():
            assert float(self.optimizer.step(closure)) == 1.5
        self.zero_grad()
        assert len(told) == 1
        self.stepped(*told[0])

    def refuse_a_step(self) -> None:
        """Refuse a step by an option without a meaning; the same gradients make one afterwards."""
        at = self.chance.randrange(len(self.groups))
        wrong = [("lr", math.nan), ("weight_decay", -1.0)]
        if self.groups[at][1]["use_muon"]:
            wrong += [("momentum", 1.5), ("variant", "none such")]
        key, value = self.chance.choice(wrong)
        group, good = self.optimizer.param_groups[at], self.groups[at][1][key]

        def step() -> None:
            group[key] = value
            try:
                self.optimizer.step()
            finally:
                group[key] = good

        self._refused(ValueError, step)

    def clip_attention_by_hand(self) -> None:
        """Clip by hand: through the optimizer norms follow; through another one they stay behind."""
        away = {name for names, _ in self.away for name in names}
        if {"q_proj.weight", "k_proj.weight"} & (self.frozen | away):
            return
        layers = attention_layers(self.model)
        logits = torch.tensor([self.chance.choice((1.0, 3.0, math.inf, math.nan)), 5.0], dtype=FP64)
        by_optimizer = self.clips or self.chance.random() < 0.5
        optimizer = self.optimizer if by_optimizer else torch.optim.SGD(self.model.named_parameters(), lr=0.0)
        qk_clip(optimizer, {layers[0].name: logits}, layers=layers, tau=TAU)
        state = copy.deepcopy(self.dense.state)
        self.dense.clip(logits.where(logits.isfinite(), torch.ones(())))
        if not by_optimizer:
            self.dense.state = state

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


def same(x: Any, y: Any) -> bool:
    """Equal in every bit and entry."""
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(_whole(x), _whole(y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return bool(x == y)


ANYWHERE: list[Callable[[Job], None]] = [
    Job.train,
    Job.train_without_some_gradients,
    Job.train_the_side,
    Job.forward_without_a_step,
    Job.scale_the_loss,
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
    Job.fork_a_worker,
    Job.audit_a_step,
    Job.clip_the_gradients,
    Job.follow_a_schedule_and_go_back,
    Job.write_to_a_weight,
    Job.let_one_start_afresh,
    Job.load_what_does_not_fit,
    Job.load_a_damaged_checkpoint,
    Job.change_the_kind_and_back,
    Job.count_gradients_of_zeros,
    Job.load_another_muons_state,
    Job.step_by_a_closure,
    Job.refuse_a_step,
    Job.clip_attention_by_hand,
]


def run(seeds: range, folder: Path, sharded: bool = False) -> None:
    """Sequences of six events, the first of them each event in turn; a step follows each."""
    known = ANYWHERE if sharded else ALONE
    for seed in seeds:
        job, told = Job(seed, folder / str(seed), sharded, clips=seed % 2 == 1), list[str]()
        for number in range(6):
            for event in (job.chance.choice(known) if number else known[seed // 2 % len(known)], Job.train):
                told.append(event.__name__)
                try:
                    event(job)
                except (Exception, pytest.fail.Exception, CheckpointException) as error:
                    raise AssertionError(f"seed {seed}: {type(error).__name__} in {told}: {error}") from error
                job.compare(f"{told} (seed {seed})")


@pytest.mark.stated
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_event_leaves_anything_that_a_later_step_feels(first: int, tmp_path: Path) -> None:
    run(range(first, first + 10), tmp_path)


def test_nor_on_two_ranks(world2: RankPool, tmp_path: Path) -> None:
    world2.run(run, range(1000, 1005), tmp_path, sharded=True)


def test_a_group_that_changes_to_adamw_has_adamws_eps() -> None:
    """`use_muon=False` "sends the group to AdamW with betas ((0.9, 0.95)), eps (1e-8)", also between two steps."""
    weight = torch.nn.Parameter(torch.zeros(4, 6, dtype=FP64))
    optimizer = Muon([weight], lr=1.0, weight_decay=0.0)
    optimizer.param_groups[0]["use_muon"] = False
    weight.grad = torch.full_like(weight, 1e-7)
    optimizer.step()
    wanted = torch.full_like(weight, -1e-7 / (1e-7 + 1e-8))
    assert_rounded(weight.detach(), wanted, roundings=60)  # 1 - 0.95 cancels


@pytest.mark.parametrize(("eps", "after"), [(None, 1e-7), (1e-8, 1e-7), (1e-5, 1e-5)])
def test_a_group_that_changes_to_muon_has_muons_eps_unless_it_has_one_of_its_own(
    eps: float | None, after: float
) -> None:
    """Numbers of method "torch", the one that reads eps, show it: a matrix whose norm is below eps is not scaled up."""
    given = {} if eps is None else {"eps": eps}
    weights = [torch.nn.Parameter(torch.zeros(4, 6)) for _ in range(2)]
    changed = Muon(
        [{"params": weights[:1], "use_muon": False, **given}], lr=1.0, orthogonalizer=Orthogonalizer("torch")
    )
    changed.param_groups[0]["use_muon"] = True
    made = Muon(weights[1:], lr=1.0, eps=after, orthogonalizer=Orthogonalizer("torch"))
    for weight, optimizer in zip(weights, (changed, made), strict=True):
        weight.grad = torch.full_like(weight, 1e-9)
        optimizer.step()
    assert weights[0].abs().max() > 0
    assert torch.equal(weights[0], weights[1])


def test_a_state_without_the_variant_is_refused_before_any_step_too() -> None:
    """The group is neither left with its variant in silence nor without it."""
    optimizer = Muon([torch.nn.Parameter(torch.ones(4, 6))], lr=0.02, beta2=0.9)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0].update(variant="normuon", beta2=0.5)
    with pytest.raises(ValueError, match=r"saved with variant=None, the optimizer has 'normuon'. Load"):
        optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["variant"], group["beta2"]) == ("normuon", 0.5)
    group["variant"] = None
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["variant"], group["beta2"]) == (None, 0.9)
