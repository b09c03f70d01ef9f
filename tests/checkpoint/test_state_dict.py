"""Tests of state dicts and checkpoint files in one process. Loading must restore the optimizer, or reject the whole
file if the file does not match the optimizer."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from spectra import run as train
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from shardmuon import ExchangeError, Muon, checkpoint
from shardmuon.momentum.stores import decode
from shardmuon.step.bucket import Buckets

# Ignore the warning that torch.distributed.checkpoint gives when a single process saves or loads.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
BF16, FP32 = torch.bfloat16, torch.float32


def pair(dtype: torch.dtype = FP32, **options: Any) -> tuple[Muon, list[nn.Parameter]]:
    """Return a small optimizer and its parameters: w for Muon and b for AdamW."""
    w, b = (nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in ((4, 3), (3,)))
    groups = [{"params": [("w", w)], "lr": 0.1}, {"params": [("b", b)], "use_muon": False, "lr": 0.2}]
    return Muon(groups, lr=1e-3, **options), [w, b]


def options_of(optimizer: Muon) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def kept_by(optimizer: Muon, params: Any) -> list[dict[str, Tensor]]:
    kept = [{"weight": p.detach(), **optimizer.state.get(p, {})} for p in params]
    return [{key: of_one[key].clone() for key in sorted(of_one)} for of_one in kept]


@contextmanager
def unchanged(optimizer: Muon, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Assert that the code inside the `with` block changes no options, weights or state of the optimizer."""
    listed = list(params)
    before, kept = options_of(optimizer), kept_by(optimizer, listed)
    held = optimizer.state, optimizer.param_groups
    yield
    assert optimizer.state is held[0] and optimizer.param_groups is held[1] and options_of(optimizer) == before
    assert_bitwise(kept_by(optimizer, listed), kept)


# ------------------------------------------------------------------------------------------------- momentum's dtype

STORED = {
    "gradient's": {},
    "fp32": {"momentum_dtype": FP32, "stochastic_rounding": True},
    "bf16": {"momentum_dtype": BF16, "stochastic_rounding": True},
    "int8": {"momentum_dtype": "int8", "stochastic_rounding": True},
}


def _decoded(state: Mapping[str, Tensor]) -> Tensor:
    buffer = state["momentum_buffer"]
    return decode(buffer, state["momentum_scale"]) if buffer.dtype == torch.int8 else buffer.float()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("wanted", STORED)
@pytest.mark.parametrize("saved", STORED)
def test_momentum_saved_in_one_dtype_is_taken_over_in_another(saved: str, wanted: str, dtype: torch.dtype) -> None:
    """Loading must not cast fp32 momentum, or the scales of 8-bit momentum, to the dtype of the parameter, as torch's
    own loading code would. If the format of the momentum does not change, its bits must not change."""
    start = torch.randn(20, 300, generator=torch.Generator().manual_seed(9)).to(dtype)
    first, second = [nn.Parameter(start.clone())], [nn.Parameter(start.clone())]
    one, two = (Muon(p, lr=0.0, **STORED[s]) for p, s in ((first, saved), (second, wanted)))
    train(one, first, range(3))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    if saved == wanted:
        one.param_groups[0]["lr"] = two.param_groups[0]["lr"] = 0.1
        train(one, first, range(3, 5))
        train(two, second, range(3, 5))
        assert_bitwise(kept_by(two, second), kept_by(one, first))
    # Take a step that only converts the loaded momentum to its new dtype: with momentum=1.0 and lr=0, neither the
    # momentum's values nor the weights change.
    two.param_groups[0].update(momentum=1.0, lr=0.0)
    train(two, second, range(5, 6))
    state = two.state[second[0]]
    kind = {"gradient's": dtype, "fp32": FP32, "bf16": BF16, "int8": torch.int8}[wanted]
    assert state["momentum_buffer"].dtype == kind and ("momentum_scale" in state) == (wanted == "int8")
    found, before = _decoded(state), _decoded(one.state[first[0]])
    allowed = 0.0 if saved == wanted or kind == FP32 else {BF16: 2.0**-8, torch.int8: 0.03}[kind]
    assert float((found - before).norm() / before.norm()) <= allowed


def test_fp32_momentum_of_bf16_weights_stays_fp32_until_a_gradient_says_otherwise() -> None:
    (old, (w, _)), (new, (v, _)) = pair(BF16), pair(BF16)
    w.grad_dtype = v.grad_dtype = None  # lets torch accept fp32 gradients of bf16 weights
    w.grad = torch.randn(4, 3)
    old.step()
    new.load_state_dict(old.state_dict())
    assert_bitwise(new.state[v]["momentum_buffer"], old.state[w]["momentum_buffer"])
    train(new, [v], range(1))
    assert new.state[v]["momentum_buffer"].dtype == BF16


# --------------------------------------------------------------------------------------------- what is brought back


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("how", ["loaded", "copied"])
def test_a_run_of_torchs_muon_goes_on_here_with_equal_bits(how: str, dtype: torch.dtype) -> None:
    """A run of torch.optim.Muon must continue in shardmuon with bitwise equal weights, both from torch's state dict,
    which includes the options, and from state that is copied as shown in docs/migration.md."""
    theirs = [nn.Parameter(torch.full(s, 0.5, dtype=dtype)) for s in ((4, 3), (6, 9))]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    old = torch.optim.Muon(theirs, **options)
    train(old, theirs, range(3))
    ours = copy.deepcopy(theirs)
    new = Muon(ours, method="torch", **{"lr": 9.0} if how == "loaded" else options)
    if how == "loaded":
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    else:
        new.state.update({q: copy.deepcopy(old.state[p]) for p, q in zip(theirs, ours, strict=True)})
    train(old, theirs, range(3, 6))
    train(new, ours, range(3, 6))
    assert_bitwise([p.detach() for p in ours], [p.detach() for p in theirs])


def test_numbers_that_require_grad_are_numbers() -> None:
    """Options such as lr may be tensors that require grad, and must still require grad after loading. torch warns if
    such a tensor is converted to a number without being detached, and the test suite turns this warning into an error.
    """
    (old, params), (new, others) = pair(), pair()
    for group in old.param_groups:
        group.update(lr=torch.tensor(0.05, requires_grad=True), weight_decay=torch.tensor(0.5, requires_grad=True))
        group.update(betas=(torch.tensor(0.5), 0.75), eps=torch.tensor(0.5))
    new.load_state_dict(old.state_dict())
    for optimizer, of in ((old, params), (new, others)):
        train(optimizer, of, range(2))
    assert_bitwise(others, params)
    assert all(group["lr"].requires_grad for group in new.param_groups)


@dataclass(frozen=True)
class File:
    """A test case for loading a checkpoint file: properties of the model, and of the optimizer that loads the file."""

    options: tuple[tuple[str, Any], ...] = ()  # options of the optimizer that loads the file
    tied: bool = False  # True if both layers of the model share one weight
    frozen: bool = False
    empty_at: int | None = None  # index at which an empty parameter group is inserted into the optimizer
    # If not None, the parameters have gradients before loading. A non-empty text is also set as `optimizer.broken`, as
    # if an earlier step had been interrupted.
    busy: str | None = None


FILES = [
    File(),
    File((("variant", "normuon"),), empty_at=0),
    File((("variant", "muon_eq"), ("adamw_lr", 0.5), ("weight_decay", 0.0)), empty_at=1),
    File(tied=True, empty_at=2),
    File(frozen=True),
    File(busy=""),
    File(busy="a rank died"),
]


def two(file: File = File(), **options: Any) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if file.tied:
        model[1].weight = model[0].weight
    optimizer = Muon(model, lr=0.02, **options)
    if file.empty_at is not None:
        optimizer.param_groups.insert(file.empty_at, {**optimizer.param_groups[0], "params": [], "param_names": []})
    return model, optimizer


def run(model: nn.Module, optimizer: Muon, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_brings_back_options_and_state_whatever_the_optimizer_was_made_with(file: File, tmp_path: Path) -> None:
    (model, old), (other, new) = two(file, variant="normuon", momentum=0.9), two(file, **dict(file.options))
    run(model, old, range(2))
    for of in (model, other):
        of.get_submodule("0").requires_grad_(not file.frozen)
    checkpoint.save(tmp_path, model, old)
    new.param_groups.reverse()
    if file.busy is not None:
        other(torch.ones(1, 8)).sum().backward()
        new.broken = file.busy or None
    grads = [p.grad for p in other.parameters()]
    checkpoint.load(tmp_path, other, new)
    new.param_groups.reverse()
    assert new.broken is None and all(p.grad is g for p, g in zip(other.parameters(), grads, strict=True))
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    for steps in (range(0), range(2, 4)):
        run(model, old, steps)
        run(other, new, steps)
        assert options_of(new) == options_of(old)
        assert_bitwise(kept_by(new, other.parameters()), kept_by(old, model.parameters()))


@pytest.mark.parametrize("use_muon", [True, False])
def test_state_of_a_frozen_parameter_whose_group_changed_its_kind_is_not_saved(use_muon: bool) -> None:
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = Muon([{"params": params, "use_muon": use_muon}], lr=0.02)
    train(optimizer, params, range(1))
    params[1].requires_grad_(False).grad = None
    optimizer.param_groups[0]["use_muon"] = not use_muon
    train(optimizer, params[:1], range(1, 2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert not any(value.any() for value in optimizer.state[params[1]].values())
    assert_bitwise(optimizer.state[params[0]], saved["state"][0])


# ------------------------------------------------------------------------------------------------- broken, under way


def test_a_broken_step_or_one_under_way_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving must raise an error while a step is running. After an error in a step, saving must raise an error until
    the user sets `optimizer.broken` to None."""
    (model, optimizer), said, whole = two(), list[str](), Buckets.run

    def save(says: str) -> None:
        for act in (optimizer.state_dict, lambda: checkpoint.save(tmp_path / "one", model, optimizer)):
            with pytest.raises((ExchangeError, ValueError), match=says):
                act()
        said.append(says)

    monkeypatch.setattr(Buckets, "run", lambda *args: (save("a step is under way"), whole(*args)))
    run(model, optimizer, range(1))
    optimizer.broken = "planted"
    save("its state is half moved: planted")
    assert len(said) == 2 and not (tmp_path / "one").exists()
    optimizer.broken = None
    checkpoint.save(tmp_path / "two", model, optimizer)


# ------------------------------------------------------------------------------------------------- refusals

Edit = Callable[[dict[str, Any]], Any]


def state(key: int, **values: Any) -> Edit:
    return lambda saved: saved["state"][key].update(values)


def group(index: int, **values: Any) -> Edit:
    return lambda saved: saved["param_groups"][index].update(values)


MOMENT = "w: its second_moment in the checkpoint is "
REFUSED: dict[str, tuple[Edit, str]] = {
    "momentum missing": (
        lambda s: s["state"].pop(0),
        "w: the state dict has no state for it (key 0), although it has for 1 other parameters",
    ),
    "key missing": (
        lambda s: s["state"][1].pop("exp_avg_sq"),
        "b: its state in the checkpoint is ['exp_avg', 'step'], AdamW's is ['exp_avg', 'exp_avg_sq', 'step']",
    ),
    "key of another optimizer": (
        state(0, moment2_buffer=torch.zeros(4, 3)),
        "w: its state in the checkpoint is ['moment2_buffer', 'momentum_buffer', 'second_moment'], Muon's is ",
    ),
    "state of a parameter that is not listed": (
        lambda s: s["state"].update({7: {"momentum_buffer": torch.zeros(4, 3)}}),
        "in the state dict 7 has state and is listed nowhere",
    ),
    "a parameter more": (
        group(0, params=[0, 9], param_names=["w", "v"]),
        "group 0: the state dict lists 2 parameters, the optimizer 1, beginning with w",
    ),
    "a parameter twice": (group(1, params=[0]), "in the state dict 0 is listed 2 times"),
    "shape": (
        state(0, momentum_buffer=torch.zeros(3, 4)),
        "w: its momentum_buffer is a Tensor of shape (3, 4), the parameter stores shape (4, 3)",
    ),
    "a group less": (
        lambda s: s["param_groups"].pop(),
        "the state dict has 1 parameter groups, the optimizer 2",
    ),
    "other names": (group(0, param_names=["v"]), "w: parameter 0 of group 0 is called 'v' in the state dict"),
    "groups swapped": (
        lambda s: s["param_groups"].reverse(),
        "w: parameter 0 of group 0 is called 'b' in the state dict",
    ),
    "SGD's, with the same state key": (
        lambda s: [of_one.pop("ns_coefficients") for of_one in s["param_groups"]],
        "w: the checkpoint's group has no 'ns_coefficients' (it has ['adjust_lr_fn'",
    ),
    "dion's, which is told what to do": (
        lambda s: s["state"].update({0: {"momentum": torch.zeros(4, 3)}}),
        "w: its state in the checkpoint is ['momentum'], Muon's is ['momentum_buffer', 'second_moment']. It was saved "
        "by another optimizer, or the parameter was routed otherwise. State of other optimizers is not converted: "
        "begin with fresh state and warm lr up over about 50 steps, or copy what means the same, such as "
        "momentum_buffer of torch.optim.Muon, by hand (docs/migration.md)",
    ),
    "routed otherwise": (
        group(1, use_muon=True),
        "group 1: the checkpoint's group is Muon's (use_muon=True), the optimizer's AdamW's (use_muon=False)",
    ),
    "an option without a meaning": (group(0, lr=float("nan")), "group 0: lr=nan must be finite and at least 0"),
    "torch's AdamW that maximizes": (group(1, maximize=True), "group 1: maximize=True cannot be taken over: "),
    "Adam's, with the same state keys": (
        group(1, decoupled_weight_decay=False),
        "group 1: decoupled_weight_decay=False cannot be taken over: ",
    ),
    "an option written elsewhere": (
        group(0, num_heads=2),
        "group 0: the state dict has num_heads=2, but num_heads is written split_sizes=h",
    ),
    "a view that does not fit": (group(0, split_sizes=3), "w: split_sizes=3 does not divide the 4 rows"),
    "a count that is none": (
        state(1, step=torch.tensor(float("nan"))),
        "b: its step in the checkpoint is tensor(nan), not a whole number",
    ),
    "integers": (
        state(0, momentum_buffer=torch.zeros(4, 3, dtype=torch.int64)),
        "w: its momentum_buffer in the checkpoint is of dtype torch.int64, not a floating-point tensor",
    ),
    "a variant that begins in silence": (
        group(0, variant=None),
        "group 0: the checkpoint was saved with variant=None, the optimizer has 'normuon'. Load it with variant=None, ",
    ),
    "a variant that nobody names": (
        lambda s: [s["state"][0].pop("second_moment"), *(of_one.pop("variant") for of_one in s["param_groups"])],
        "lacks ['second_moment'], which variant='normuon' keeps",
    ),
    "a variant's state of another shape": (
        state(0, second_moment=torch.zeros(1, 3)),
        MOMENT + "a Tensor of shape (1, 3), not a tensor of shape (1, 4)",
    ),
    "a variant's state in integers": (
        state(0, second_moment=torch.zeros(1, 4, dtype=torch.int64)),
        MOMENT + "a Tensor, not a floating-point tensor of shape (1, 4)",
    ),
    "a variant's state that is none": (state(0, second_moment=None), "not a floating-point tensor"),
    "a state dict of a model": (
        lambda s: (s.clear(), s.update(w=torch.zeros(4, 3))),
        "dicts that list 'params'; found ['w']. Give what optimizer.state_dict()",
    ),
    "no dict at all": (lambda s: [], "found list"),
    "groups without parameters": (
        lambda s: s["param_groups"][0].pop("params"),
        "'param_groups', dicts that list 'params'; found ['param_groups', 'state']",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_dict_that_does_not_fit_is_refused_whole(case: str) -> None:
    (old, old_params), (new, params) = pair(variant="normuon"), pair(variant="normuon")
    train(old, old_params, range(2))
    train(new, params, range(5, 7))
    saved, (edit, says) = copy.deepcopy(old.state_dict()), REFUSED[case]
    edited = edit(saved)
    with unchanged(new, params), pytest.raises(ValueError, match=re.escape(says)):
        new.load_state_dict(edited if case == "no dict at all" else saved)
    train(new, params, range(7, 8))


# --------------------------------------------------------------------------------------------- files run no code


class _Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("place", ["metadata", "option"])
def test_a_checkpoint_folder_with_code_is_refused_and_the_code_never_runs(place: str, tmp_path: Path) -> None:
    folder, ran = tmp_path / "saved", tmp_path / "ran"
    (model, old), (other, new) = two(), two()
    run(model, old, range(1))
    if place == "option":
        old.param_groups[0]["initial_lr"], new.param_groups[0]["initial_lr"] = _Malicious(ran), 0.1
    checkpoint.save(folder, model, old)
    if place == "metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data = _Malicious(ran)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    says = r"not read: (it names|Unsupported global: GLOBAL) "
    with unchanged(new, other.parameters()), pytest.raises(CheckpointException, match=says):
        checkpoint.load(folder, other, new)
    assert not ran.exists()
    if place == "metadata":
        dcp.FileSystemReader(folder).read_metadata()
        assert ran.exists()
