"""More events between steps, mixed with those of test_sequences.py beside the same dense reference.

Each event is one that the documentation makes a promise about; the reference does what the promise says. Nothing here
was written with the optimizer's code at hand.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sequences import ALONE, FP64, HEADS, TAU, Job, _whole
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from shardmuon import GradScaler, Muon, Orthogonalizer, audit, checkpoint, clip_grad_norm_
from shardmuon.testing.tolerances import assert_rounded
from shardmuon_qkclip import QKClip, qk_clip
from shardmuon_qkclip.layers import attention_layers

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
    "ignore:Detected call of `lr_scheduler.step",
)

FIRST, SEQUENCES, EVENTS = 5000, 30, 6
NO_LOGIT = torch.zeros(HEADS, dtype=FP64)
ADAMW = {"use_muon": False, "betas": (0.9, 0.95), "eps": 1e-8}  # what the docs say a group gets that has none
MUON = {"use_muon": True, "momentum": 0.95, "variant": None, "beta2": 0.95}


class Hostile(Job):
    """A job with more to happen to it."""

    def _matrix_groups(self) -> list[int]:
        return [i for i, (_, options) in enumerate(self.groups) if options["use_muon"]]

    def _set(self, at: int, **options: Any) -> None:
        self.groups[at][1].update(options)
        self.optimizer.param_groups[at].update(options)

    def _all(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

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
        """Scale by shardmuon's scaler, with or without clipping; an infinite gradient skips the step."""
        scaler = GradScaler("cpu", init_scale=8.0)
        grads, largest = self.backward()
        own = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p in own:
            p.grad.mul_(8.0)
        overflows, clips = self.chance.random() < 0.5, self.chance.random() < 0.5
        if overflows:
            self.chance.choice(own).grad.view(-1)[-1] = self.chance.choice((math.inf, math.nan))
        scaler.scale(torch.ones(()))  # it is in use
        factor = 1.0
        if clips:
            scaler.unscale_(self.optimizer)
            norm = clip_grad_norm_(self.optimizer, 0.1)
            factor = min(1.0, 0.1 / (float(norm) + 1e-6))
        scaler.step(self.optimizer)
        scaler.update()
        self.zero_grad()
        assert scaler.get_scale() == (4.0 if overflows else 8.0)
        if not overflows:
            self.stepped({name: grad * factor for name, grad in grads.items()}, largest)

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
        names = [name for names, _ in self.groups for name in names]
        name = self.chance.choice([name for name in names if name not in self.frozen] or names)
        state = copy.deepcopy(self.optimizer.state_dict())
        state["state"][names.index(name)] = {}
        self.optimizer.load_state_dict(state)
        self.dense.state.pop(name, None)

    def _refused(self, error: type[BaseException], load: Callable[[], Any]) -> None:
        """Nothing changes: neither weights, state and options, nor what the gradients at hand lead to."""
        grads, largest = self.backward()
        before = self._all()
        with pytest.raises(error):
            load()
        assert same(self._all(), before), "something has changed"
        self.optimizer.step()
        self.zero_grad()
        self.stepped(grads, largest)

    def load_what_does_not_fit(self) -> None:
        self.train()
        state = copy.deepcopy(self.optimizer.state_dict())
        for entry in state["state"].values():
            for value in entry.values():
                value.mul_(2.0) if value.is_floating_point() else None
        names = [name for names, _ in self.groups for name in names]
        key = names.index(self.chance.choice([name for name in names if name not in self.frozen] or names))
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

    def pickle_the_job(self) -> None:
        """Pickle the job without the QK-clip, which is taken off and made anew."""
        if self.clip is not None:
            self.clip.close()
        self.forward(scale=30.0, backward=False)  # measured by nobody
        self.model, self.optimizer, self.side = pickle.loads(pickle.dumps((self.model, self.optimizer, self.side)))
        self.clip = QKClip(self.model, self.optimizer, tau=TAU) if self.clips else None

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
        self.forward(scale=30.0)
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
        """Refuse a step by an option without a meaning: nothing is lost, and the same gradients make a step
        afterwards."""
        at = self.chance.randrange(len(self.groups))
        wrong = [("lr", math.nan), ("weight_decay", -1.0)]
        if self.groups[at][1]["use_muon"]:
            wrong += [("momentum", 1.5), ("variant", "none such")]
        key, value = self.chance.choice(wrong)
        group = self.optimizer.param_groups[at]
        good, group[key] = group[key], value
        grads, largest = self.backward()
        before = copy.deepcopy(self.model.state_dict())
        with pytest.raises(ValueError, match=key):
            self.optimizer.step()
        assert same(self.model.state_dict(), before), "something has changed"
        group[key] = good
        self.optimizer.step()
        self.zero_grad()
        self.stepped(grads, largest)

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


def same(x: Any, y: Any) -> bool:
    """Equal in every bit and entry."""
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(_whole(x), _whole(y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return bool(x == y)


HOSTILE: list[Callable[[Hostile], None]] = [
    Hostile.audit_a_step,
    Hostile.clip_the_gradients,
    Hostile.scale_the_loss,
    Hostile.follow_a_schedule_and_go_back,
    Hostile.write_to_a_weight,
    Hostile.let_one_start_afresh,
    Hostile.load_what_does_not_fit,
    Hostile.load_a_damaged_checkpoint,
    Hostile.pickle_the_job,
    Hostile.change_the_kind_and_back,
    Hostile.count_gradients_of_zeros,
    Hostile.load_another_muons_state,
    Hostile.step_by_a_closure,
    Hostile.refuse_a_step,
    Hostile.clip_attention_by_hand,
]


def run(seed: int, folder: Path) -> None:
    """One sequence. It begins with each event of this file in turn, and a step follows each."""
    job = Hostile(seed, folder, sharded=False, clips=seed % 2 == 1)
    told: list[str] = []
    for number in range(EVENTS):
        known: list[Any] = HOSTILE if job.chance.random() < 0.7 else ALONE
        event: Any = job.chance.choice(known) if number else HOSTILE[seed % len(HOSTILE)]
        for each in (event, Job.train):
            told.append(each.__name__)
            try:
                each(job)
            except (Exception, pytest.fail.Exception, CheckpointException) as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__} in {told}: {error}") from error
            job.compare(f"{told} (seed {seed})")


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEQUENCES, 10))
def test_events_do_what_the_documentation_says(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 10):
        run(seed, tmp_path / str(seed))


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
