"""adamw= a function: groups with use_muon=False are stepped by the optimizer that it makes, on the same tensors."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_gpt import gpt, megatron, needs_megatron, optimizer_config
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

import shardmuon.checkpoint
from shardmuon import Muon, audit, clip_grad_norm_
from shardmuon.foresight import plan as foresight_plan
from shardmuon.frameworks.megatron.training import get_megatron_optimizer
from shardmuon.testing import RankPool
from shardmuon.testing.deepspeed import ZeroRun
from shardmuon.testing.fsdp1 import Fsdp1Run
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.tolerances import assert_rounded

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 4), "embedding": (9, 4), "bias": (5,), "scalar": (1,)}
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


class Lion(torch.optim.Optimizer):
    """Signed momentum (arXiv 2302.06675), algorithm 2."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr, wd = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - lr * wd).add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def adamw(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{key: group[key] for key in OPTIONS}, foreach=True)


def lion(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return Lion(params, lr=group["lr"] / 3, weight_decay=group["weight_decay"] * 3)


def adagrad(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    if not group["lr"]:
        raise ValueError("no learning rate")  # torch's checkpoints set it to zero to have state made
    return torch.optim.Adagrad(params, lr=group["lr"])  # its state is there before any step


def sgd(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=group["lr"], momentum=0.9, dampening=0.3)  # keeps what Muon calls by this name


FACTORIES = {"adamw": adamw, "lion": lion, "adagrad": adagrad, "sgd": sgd}


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def full(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: normal(shape, 100 * seed + i, dtype) for i, (name, shape) in enumerate(SHAPES.items())}


Build = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def plain(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


def on(layout: str) -> Build:
    case = LAYOUTS[layout]
    return lambda tensors: case.build(tensors, case.mesh(dist.get_world_size()))


class Job:
    """Parameters in a layout, and an optimizer over them."""

    def __init__(self, make: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], build: Build = plain) -> None:
        self.build = build
        self.params = {name: nn.Parameter(t) for name, t in build(full()).items()}
        self.optimizer = make(self.params)

    def step(self, *seeds: int, missing: Iterable[str] = ()) -> None:
        for seed in seeds:
            for name, grad in self.build(full(seed)).items():
                self.params[name].grad = None if name in missing else grad
            self.optimizer.step()

    def copy_weights(self, other: Job) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(other.params[name])


def rest(params: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    return [p for name, p in params.items() if name != "matrix"]


def groups(params: Mapping[str, nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    return [{"params": [params["matrix"]]}, {"params": rest(params), "use_muon": False, **OPTIONS, **options}]


def muon(factory: Any) -> Callable[[dict[str, nn.Parameter]], Muon]:
    return lambda params: Muon(groups(params), lr=0.1, adamw=factory)


def local(t: Tensor) -> Tensor:
    return t.detach().to_local() if isinstance(t, DTensor) else t.detach()


def same(a: Job, b: Job, names: Iterable[str] = tuple(SHAPES)) -> bool:
    return all(torch.equal(local(a.params[name]), local(b.params[name])) for name in names)


def same_state(a: Job, b: Job) -> bool:
    for name in SHAPES:
        x, y = a.optimizer.state.get(a.params[name], {}), b.optimizer.state.get(b.params[name], {})
        if list(x) != list(y):
            return False
        for key, value in x.items():
            other = y[key]
            if isinstance(value, Tensor) and not torch.equal(local(value), local(other)):
                return False
            if not isinstance(value, Tensor) and value != other:
                return False
    return True


# ------------------------------------------------------------------------------------------------ the same update


def _equals_itself(build: Build, name: str) -> list[bool]:
    """Muon with a function, and the optimizer that the function makes alone, on the same tensors and gradients."""
    ours = Job(muon(FACTORIES[name]), build)
    group = {"params": [], **OPTIONS}
    alone = Job(lambda params: FACTORIES[name](rest(params), dict(group)), build)
    found = []
    names = [key for key in SHAPES if key != "matrix"]
    for seed in (1, 2, 3):
        missing = ("bias",) if seed == 2 else ()
        ours.step(seed, missing=missing)
        alone.step(seed, missing=missing)
        found.append(same(ours, alone, names))
    for key in names:
        mine, theirs = ours.optimizer.state[ours.params[key]], alone.optimizer.state[alone.params[key]]
        found.append(list(mine) == list(theirs))
        for k, value in theirs.items():
            found.append(type(mine[k]) is type(value) and torch.equal(local(mine[k]), local(value)))
    found.append("momentum_buffer" in ours.optimizer.state[ours.params["matrix"]])
    return found


@pytest.mark.parametrize("name", FACTORIES)
def test_one_process_has_the_bits_of_the_optimizer_alone(name: str) -> None:
    assert all(_equals_itself(plain, name))


def _on_layouts() -> dict[str, bool]:
    found = {}
    for layout in ("fsdp2", "tp"):
        for name in FACTORIES:
            found[f"{layout} {name}"] = all(_equals_itself(on(layout), name))
    return found


def test_shards_have_the_bits_of_the_optimizer_alone(world2: RankPool) -> None:
    for found in world2.run(_on_layouts):
        assert found and all(found.values()), found


# -------------------------------------------------------------------------------------------- options that follow


def _lion_by_hand(build: Build, rates: list[tuple[float, float]]) -> Job:
    """Lion alone, with a learning rate and a decay for each step."""
    alone = Job(lambda params: Lion(rest(params), lr=1.0), build)
    for seed, (lr, decay) in enumerate(rates, 1):
        alone.optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
        alone.step(seed)
    return alone


def test_what_a_scheduler_writes_reaches_the_optimizer() -> None:
    """In the ratio that the function chose."""
    ours = Job(muon(lion))
    scheduler = lr_scheduler.LambdaLR(ours.optimizer, lambda step: [0.0, 0.5, 1.0][step])  # begins at 0
    rates = []
    for seed in (1, 2, 3):
        rates.append((ours.optimizer.param_groups[1]["lr"] * ((0.03 / 3) / 0.03), 0.3 * 3))
        ours.step(seed)
        if seed < 3:
            scheduler.step()
    assert [lr > 0 for lr, _ in rates] == [False, True, True]
    assert same(ours, _lion_by_hand(plain, rates), [name for name in SHAPES if name != "matrix"])


def test_a_rate_that_was_zero_at_first_keeps_its_ratio() -> None:
    ours = Job(muon(lion))
    ours.optimizer.param_groups[1]["lr"] = 0.0
    ours.step(1)
    ours.optimizer.param_groups[1]["lr"] = 0.03
    ours.step(2)
    ours.optimizer.param_groups[1]["weight_decay"] = 0.6
    ours.step(3)
    rates = [(0.0, 0.9), (0.03 / 3, 0.3 * 3), (0.03 / 3, 0.6 * (0.3 * 3 / 0.3))]
    assert same(ours, _lion_by_hand(plain, rates), [name for name in SHAPES if name != "matrix"])


def test_options_that_the_function_chose_itself_stay() -> None:
    made: list[torch.optim.Optimizer] = []

    def factory(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
        parts = [{"params": params[:1], "weight_decay": 0.0, "betas": group["betas"]}, {"params": params[1:]}]
        made.append(torch.optim.AdamW(parts, lr=group["lr"], betas=(0.9, 0.999), weight_decay=0.02))
        return made[-1]

    ours = Job(muon(factory))
    ours.step(1)
    ours.optimizer.param_groups[1].update(lr=0.06, betas=(0.5, 0.6), eps=1.0, weight_decay=0.6)
    ours.step(2)
    assert len(made) == 1
    first, second = made[0].param_groups
    assert (first["lr"], first["betas"], first["eps"], first["weight_decay"]) == (0.06, (0.5, 0.6), 1e-8, 0.0)
    assert (second["betas"], second["eps"]) == ((0.9, 0.999), 1e-8)
    assert second["weight_decay"] == 0.6 * (0.02 / 0.3)


def test_a_tensor_lr_is_given_on() -> None:
    found = []
    for lr in (torch.tensor(0.25), 0.25):
        job = Job(lambda params, lr=lr: Muon(groups(params, lr=lr), lr=0.1, adamw=lion))
        job.step(1)
        job.optimizer.param_groups[1]["lr"] = lr * 2
        job.step(2)
        found.append(job)
    for name in SHAPES:
        # two steps of five operations on either side, of size lr; the tensor is fp32, the number fp64
        assert_rounded(found[0].params[name], found[1].params[name], roundings=20, scale=torch.tensor(4.0))


# ------------------------------------------------------------------------------------------------------ checkpoints


def _resumed(build: Build, name: str) -> bool:
    """Three steps, and the last two again from a state dict, in an optimizer of another lr."""
    whole = Job(muon(FACTORIES[name]), build)
    whole.step(1)
    saved = copy.deepcopy(whole.optimizer.state_dict())
    other = Job(lambda params: Muon(groups(params, lr=9.0), lr=9.0, adamw=FACTORIES[name]), build)
    other.copy_weights(whole)
    other.optimizer.load_state_dict(saved)
    for job in (whole, other):
        job.step(2, 3)
    functions = [g.get("adamw") for g in other.optimizer.param_groups] == [None, FACTORIES[name]]
    names = [g.get("adamw") for g in saved["param_groups"]] == [None, f"callable: {name}"]
    return same(whole, other) and same_state(whole, other) and functions and names


@pytest.mark.parametrize("name", FACTORIES)
def test_a_resumed_run_has_the_same_bits(name: str) -> None:
    assert _resumed(plain, name)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_loaded_state_replaces_what_was_there(steps_before: int) -> None:
    whole = Job(muon(adamw))
    whole.step(1)
    saved = copy.deepcopy(whole.optimizer.state_dict())
    other = Job(muon(adamw))
    other.step(*range(50, 50 + steps_before))
    other.copy_weights(whole)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    other.optimizer.load_state_dict(torch.load(buffer, weights_only=True))  # no function is in the file
    for job in (whole, other):
        job.step(2)
    assert same(whole, other) and same_state(whole, other)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, t in full().items():
            if name != "scalar":  # FSDP2 takes no more ranks than rows here
                self.register_parameter(name, nn.Parameter(t))


def _dcp(folder: str, how: str, name: str) -> list[bool]:
    def make(train: Iterable[int], model: nn.Module | None = None) -> tuple[nn.Module, Muon]:
        if model is None:
            model = Model()
            if dist.is_initialized():
                fully_shard(model)
        named = dict(model.named_parameters())
        optimizer = Muon(groups(named), lr=0.1, adamw=FACTORIES[name])
        step(model, optimizer, train)
        return model, optimizer

    def step(model: nn.Module, optimizer: Muon, seeds: Iterable[int]) -> None:
        for seed in seeds:
            grads = Model.__new__(Model)
            nn.Module.__init__(grads)
            for key, t in full(seed).items():
                if key != "scalar":
                    grads.register_parameter(key, nn.Parameter(t))
            if dist.is_initialized():
                fully_shard(grads)
            for p, g in zip(model.parameters(), grads.parameters(), strict=True):
                p.grad = g.detach()
            optimizer.step()

    model, optimizer = make([1, 2])
    if how == "ours":
        shardmuon.checkpoint.save(folder, model, optimizer)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    other, fresh = make([])
    if how == "ours":
        shardmuon.checkpoint.load(folder, other, fresh)
    else:
        template = {"optimizer": get_optimizer_state_dict(other, fresh)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(template, checkpoint_id=folder)
        set_optimizer_state_dict(other, fresh, template["optimizer"])
        with torch.no_grad():
            for p, q in zip(other.parameters(), model.parameters(), strict=True):
                p.copy_(q)
    found = []
    for seed in (3, 4):
        step(model, optimizer, [seed])
        step(other, fresh, [seed])
        pairs = list(zip(model.parameters(), other.parameters(), strict=True))
        found += [torch.equal(local(p), local(q)) for p, q in pairs]
        for p, q in pairs:
            assert optimizer.state[p].keys() == fresh.state[q].keys()
            for key, value in optimizer.state[p].items():
                found.append(torch.equal(local(torch.as_tensor(value)), local(torch.as_tensor(fresh.state[q][key]))))
    # state that was made only to be loaded into leaves no trace
    third, untouched = make([])
    fourth, asked = make([])
    get_optimizer_state_dict(fourth, asked)
    found.append(
        all(torch.equal(local(p), local(q)) for p, q in zip(third.parameters(), fourth.parameters(), strict=True))
    )
    step(third, untouched, [5])
    step(fourth, asked, [5])
    found.append(
        all(torch.equal(local(p), local(q)) for p, q in zip(third.parameters(), fourth.parameters(), strict=True))
    )
    return found


@pytest.mark.parametrize("how", ["ours", "torch"])
@pytest.mark.parametrize("name", FACTORIES)
def test_torchs_checkpoints_resume(name: str, how: str, tmp_path: Any) -> None:
    assert all(_dcp(str(tmp_path), how, name))


def test_torchs_checkpoints_resume_on_shards(world2: RankPool, tmp_path: Any) -> None:
    for name in FACTORIES:
        for how in ("ours", "torch"):
            for found in world2.run(_dcp, str(tmp_path / f"{name} {how}"), how, name):
                assert all(found), (name, how, found)


def test_state_of_another_rule_is_refused() -> None:
    made, usual = Job(muon(adamw)), Job(muon("adamw"))
    for job in (made, usual):
        job.step(1)
    with pytest.raises(ValueError, match=r"group 1: its state was saved by an optimizer that adamw=adamw had made"):
        usual.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    saved = copy.deepcopy(usual.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"group 1: the state dict's group is AdamW's .* here adamw=adamw makes"):
        made.optimizer.load_state_dict(saved)
    for key in saved["param_groups"][1]["params"]:  # what the message says
        saved["state"][key] = {}
    saved["param_groups"][1]["adamw"] = "callable: adamw"
    made.optimizer.load_state_dict(saved)
    made.step(2)
    assert float(made.optimizer.state[made.params["bias"]]["step"]) == 1.0


def test_state_of_another_shape_is_refused() -> None:
    job = Job(muon(adamw))
    job.step(1)
    assert isinstance(job.optimizer, Muon)
    with pytest.raises(ValueError, match=r"group 1: adamw=<function adamw .* is none that torch.optim.AdamW has"):
        shardmuon.checkpoint.to_torch_muon(job.optimizer)


class Counts(Lion):
    """Keeps a count in its group."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] += 1


def test_what_an_optimizer_keeps_in_its_group_is_not_saved_and_said() -> None:
    def factory(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
        made = Counts(params, group["lr"])
        made.param_groups[0]["k"] = 0
        return made

    job = Job(muon(factory))
    with pytest.warns(UserWarning, match=r"group 1: Counts, made by adamw=.*factory, keeps k in its param_groups"):
        job.step(1)
    job.step(2)  # once


@pytest.mark.parametrize("factory", [adamw, sgd])
def test_copies_and_pickles(factory: Any) -> None:
    job, whole = _after(factory, 1), _after(factory, 1, 2)
    for make in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        again = make(job.optimizer)
        weights = [p for g in again.param_groups for p in g["params"]]
        mine = [p for g in job.optimizer.param_groups for p in g["params"]]
        apart = Job(muon(factory))
        apart.copy_weights(job)
        apart.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        for name, p in zip(SHAPES, weights, strict=True):
            p.grad = full(2)[name]
        again.step()
        apart.step(2)
        assert all(torch.equal(p, whole.params[name]) for name, p in zip(SHAPES, weights, strict=True))
        assert same(apart, whole)
        assert not any(torch.equal(p, q) for p, q in zip(weights, mine, strict=True))


# ---------------------------------------------------------------------------------------------------- the optimizer


def test_groups_may_have_functions_of_their_own() -> None:
    seen: list[tuple[str, int]] = []

    def noting(name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
        def made(params: list[nn.Parameter], group: dict[str, Any]) -> torch.optim.Optimizer:
            seen.append((name, len(params)))
            group["lr"] *= 1  # a copy: nobody else sees it
            group.clear()
            return factory(params, {**OPTIONS})

        return made

    def make(params: dict[str, nn.Parameter]) -> Muon:
        listed = [{"params": [params[name]], "use_muon": False, **OPTIONS} for name in ("embedding", "bias")]
        listed[1]["adamw"] = noting("own", lion)
        return Muon([{"params": [params["matrix"]]}, *listed], lr=0.1, adamw=noting("default", adamw))

    job = Job(make)
    assert not seen  # made when the first step comes
    job.step(1)
    job.optimizer.add_param_group({"params": [job.params["scalar"]], "use_muon": False, "adamw": "cautious", **OPTIONS})
    job.step(2)
    assert seen == [("default", 1), ("own", 1)]
    kinds = {name: set(job.optimizer.state[p]) for name, p in job.params.items()}
    assert kinds["embedding"] == {"step", "exp_avg", "exp_avg_sq"} == kinds["scalar"]
    assert kinds["bias"] == {"exp_avg"} and kinds["matrix"] == {"momentum_buffer"}
    text = repr(job.optimizer)
    assert "group 2: the optimizer of test_groups_may_have_functions_of_their_own" in text
    assert "group 3: AdamW, 1 parameter" in text and "<function" not in text


def test_a_new_function_and_a_way_back() -> None:
    """State of a rule that no longer applies goes."""
    job = Job(muon(lion))
    job.step(1)
    job.optimizer.param_groups[1]["adamw"] = "adamw"
    job.step(2)
    assert set(job.optimizer.state[job.params["bias"]]) == {"step", "exp_avg", "exp_avg_sq"}
    fresh = Job(muon("adamw"))
    fresh.copy_weights(_after(lion, 1))
    fresh.step(2)
    assert same(job, fresh, ["bias", "embedding", "scalar"])


def test_a_matrix_that_was_muons_begins_anew() -> None:
    """SGD's momentum has the name that Muon's has. Loaded after it has become SGD's, it is SGD's."""

    def handed_over() -> Job:
        job = _after(sgd, 1)
        muons, others = job.optimizer.param_groups
        others["params"].append(muons["params"].pop())
        return job

    job, again = handed_over(), handed_over()
    weight = nn.Parameter(job.params["matrix"].detach().clone())
    alone = sgd([weight], OPTIONS)
    for seed in (2, 3):
        job.step(seed)
        weight.grad = full(seed)["matrix"]
        alone.step()
        assert torch.equal(job.params["matrix"], weight)
    again.copy_weights(job)
    again.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    for each in (job, again):
        each.step(4)
    assert same(job, again)


def _after(factory: Any, *seeds: int) -> Job:
    job = Job(muon(factory))
    job.step(*seeds)
    return job


def test_clipping_zero_grad_and_the_audit_know_it() -> None:
    job = Job(muon(lion))
    assert isinstance(job.optimizer, Muon)
    check = audit(job.optimizer)
    job.step(1)
    assert check.report is not None and check.report.ok
    whose = {r.name: r.optimizer for r in check.report.routing}
    assert [whose[f"parameter {i} of group 1"] for i in range(3)] == ["the optimizer of lion"] * 3
    for name, grad in full(2).items():
        job.params[name].grad = grad.clone()
    norm = clip_grad_norm_(job.optimizer, 0.5)
    assert float(norm) > 0.5
    left = torch.stack([p.grad.double().square().sum() for p in job.params.values()]).sum().sqrt()  # type: ignore[union-attr]
    assert_rounded(
        left.float(), torch.tensor(0.5), roundings=sum(p.numel() for p in job.params.values()), scale=left.float()
    )
    job.optimizer.zero_grad()
    assert all(p.grad is None for p in job.params.values())


# ----------------------------------------------------------------------------------------------------------- faults


class Broken(Lion):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise RuntimeError("no step today")


def _raises(params: list[nn.Parameter], group: dict[str, Any]) -> Any:
    raise KeyError("no such option")


_SHARED: dict[int, Lion] = {}


def _shares(params: list[nn.Parameter], group: dict[str, Any]) -> Any:
    return _SHARED.setdefault(0, Lion(params, group["lr"]))


BAD: dict[str, tuple[Any, str]] = {
    "raises": (_raises, r"group 1 \(parameter 0 of group 1, \.\.\): adamw=_raises raised KeyError: 'no such option'"),
    "nothing": (lambda params, group: None, r"group 1 .*: adamw=<lambda> returned None, not a torch\.optim\.Optimizer"),
    "a list": (lambda params, group: [], r"returned a list, not a torch\.optim\.Optimizer"),
    "some": (lambda params, group: Lion(params[:2], 0.1), r"holds 2 parameters, 0 of them of others, and lacks 1"),
    "others": (
        lambda params, group: Lion([*params, nn.Parameter(torch.ones(2))], 0.1),
        r"holds 4 parameters, 1 of them of others, and lacks 0 of the 3",
    ),
    "a class": (torch.optim.Adagrad, r"group 1 .*: adamw=Adagrad raised TypeError.*Write adamw=lambda params, group"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_function_is_refused_before_anything_changes(fault: str) -> None:
    factory, message = BAD[fault]
    job = Job(muon(factory))
    with pytest.raises(ValueError, match=message):
        job.step(1)
    assert all(torch.equal(p, full()[name]) for name, p in job.params.items())
    assert not any(job.optimizer.state.values())
    job.optimizer.param_groups[1]["adamw"] = lion  # and may be put right
    job.step(1)
    assert same(job, _after(lion, 1))


def test_one_optimizer_for_two_groups_is_refused() -> None:
    def make(params: dict[str, nn.Parameter]) -> Muon:
        listed = [{"params": [params[name]], "use_muon": False} for name in ("embedding", "bias")]
        return Muon([{"params": [params["matrix"]]}, *listed], lr=0.1, adamw=_shares)

    _SHARED.clear()
    job = Job(make)
    with pytest.raises(ValueError, match=r"group 2 .* holds 1 parameters, 1 of them of others, and lacks 1 of the 1"):
        job.step(1)


def _one_rank(fault: str) -> tuple[str, str, bool]:
    """A function that is bad on rank 1 alone: what this rank raises, and whether its weights are as they were."""
    build = on("fsdp2")
    bad: Any = (lambda params, group: Broken(params, 0.1)) if fault == "step" else BAD[fault][0]
    job = Job(muon(bad if dist.get_rank() == 1 else lion), build)
    before = {name: local(p).clone() for name, p in job.params.items()}
    raised = ""
    try:
        job.step(1)
    except (ValueError, RuntimeError) as wrong:
        raised = f"{type(wrong).__name__}: {wrong}"
    unchanged = all(torch.equal(local(p), before[name]) for name, p in job.params.items())
    again = ""
    if fault == "step":
        try:
            if dist.get_rank() == 1:
                job.step(2)
        except RuntimeError as wrong:
            again = str(wrong)
    else:
        job.optimizer.param_groups[1]["adamw"] = lion
        job.step(1)
    return raised, again, unchanged


@pytest.mark.parametrize("fault", ["raises", "nothing", "others"])
def test_what_is_wrong_on_one_rank_is_raised_on_all(fault: str, world2: RankPool) -> None:
    for raised, _, unchanged in world2.run(_one_rank, fault):
        assert raised.startswith("ValueError: ") and "group 1 (parameter 0 of group 1, ..): " in raised, raised
        assert unchanged


def test_an_exception_in_its_step_breaks_the_optimizer_off_there(world2: RankPool) -> None:
    """As any other after the agreement: the rank refuses to step until state is loaded."""
    (fine, _, _), (raised, again, _) = world2.run(_one_rank, "step")
    assert fine == "" and raised == "RuntimeError: no step today"
    assert "an earlier step was broken off: RuntimeError: no step today" in again


# ------------------------------------------------------------------------------------------------------ what refuses it


def _named(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> Muon:
    rest = {"params": [(n, p) for n, p in params.items() if n != "matrix"], "use_muon": False, **OPTIONS}
    return Muon([{"params": [("matrix", params["matrix"])]}, rest], lr=0.1, adamw=lion, **options)


def _refused_by_fsdp1() -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        Fsdp1Run("fsdp1", full(), _named)
    return str(caught.value)


def test_fsdp1_is_refused_when_the_optimizer_is_made(world2: RankPool) -> None:
    for text in world2.run(_refused_by_fsdp1):
        assert text.startswith("embedding: adamw=lion makes an optimizer of its own, which works on plain"), text
        assert text.endswith('Write adamw="adamw" or "cautious"')


def _refused_by_zero() -> list[tuple[str, bool]]:
    found = []
    for row in ("zero1", "zero3"):
        run = ZeroRun(row, full(), _named, torch.float32)
        before = run.weights()
        with pytest.raises(ValueError, match=r".") as caught:
            run.step(full(1))
        after = run.weights()
        found.append((str(caught.value), all(torch.equal(after[name], before[name]) for name in SHAPES)))
        run.close()
    return found


def test_deepspeed_refuses_the_first_step_on_every_rank(deepspeed_pools: dict[int, RankPool]) -> None:
    pytest.importorskip("deepspeed")
    for found in deepspeed_pools[2].run(_refused_by_zero):
        for text, unchanged in found:
            assert "group 1: adamw=lion makes an optimizer of its own, and DeepSpeed puts tensors of its own" in text
            assert unchanged


def _refused_by_megatron() -> list[str]:
    texts = []
    with megatron():
        for sharded in ({}, {"use_distributed_optimizer": True}):
            with pytest.raises(ValueError, match=r".") as caught:
                get_megatron_optimizer(optimizer_config(**sharded), [gpt(ddp=sharded)], adamw=lion)
            texts.append(str(caught.value))
    return texts


@needs_megatron
def test_megatron_refuses_it(world2: RankPool) -> None:
    for texts in world2.run(_refused_by_megatron):
        for text in texts:
            assert "adamw=lion makes an optimizer of its own, and Megatron puts tensors of its own" in text, text


def test_the_planner_and_loading_of_others_state_refuse_it() -> None:
    with pytest.raises(ValueError, match=r"adamw=lion makes an optimizer of its own, and what that keeps is not known"):
        foresight_plan(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8)), "shard=2", adamw=lion)
    job, params = Job(muon(lion)), [nn.Parameter(t) for t in full().values()]
    others = [torch.optim.AdamW(params[1:])]
    for p in params:
        p.grad = torch.ones_like(p)
    others[0].step()
    assert isinstance(job.optimizer, Muon)
    with pytest.raises(ValueError, match=r"the optimizer that its group's adamw makes steps it here"):
        shardmuon.checkpoint.load_foreign(job.optimizer, others[0].state_dict(), params=rest(job.params))
