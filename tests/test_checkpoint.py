"""Checkpoints: saved on one layout, resumed on any other, bit for bit; and what does not fit is refused whole."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardmuon import ExchangeError, Muon, checkpoint, core
from shardmuon.layout.engines import engine_of
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.compare import rows_stored
from shardmuon.testing.layouts import LAYOUTS, mesh_of, parameters

Tensors = Mapping[str, Tensor]

# Nothing divides: shards are uneven, and some are strided on top of that (fsdp2+tp cuts rows twice).
SHAPES = {
    "squarish": (14, 15),
    "tall": (35, 11),
    "experts": (7, 6, 10),
    "wide": (13, 33),
    "table": (21, 6),  # AdamW's
    "late": (7, 5),  # has its first gradient after the checkpoint
    "frozen": (4, 4),
}
GROUPS: list[dict[str, Any]] = [
    {"names": ["squarish", "tall", "late", "frozen"], "lr": 0.03, "weight_decay": 0.2},
    {"names": ["experts"], "view": "stack", "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
    {"names": ["wide"], "split_sizes": (5, 8), "ns_coefficients": ((3.0, -4.0, 2.0), (1.5, -0.5, 0.0))},
    {"names": ["table"], "use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6},
]
VARIANTS = ("normuon+hyperball", "normuon", "hyperball")  # of the groups of matrices
KEPT = ("second_moment", "weight_radius")  # by these
# torch says so whenever one process saves or loads
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
SAVED_AFTER, RESUMED_UNTIL = 3, 5


class Bag(nn.Module):
    """Parameters by name."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, param in parameters(tensors).items():  # with the marks of tensor-parallel shards
            self.register_parameter(name, param.requires_grad_(name != "frozen"))


def values(seed: int) -> dict[str, Tensor]:
    """Full tensors that depend on nothing but the seed and the name."""
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + i))
        for i, (name, shape) in enumerate(SHAPES.items())
    }


@dataclass
class Job:
    """A model and its optimizer on one layout."""

    layout: str
    seed: int = 0
    variants: bool = False  # NorMuon and control of norms; the matrix "late" has state before it has taken a step
    world: int = 1

    def __post_init__(self) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.model = Bag(self.cut(values(self.seed)))
        params = dict(self.model.named_parameters())
        groups = [
            {**{k: v for k, v in g.items() if k != "names"}, "params": [(n, params[n]) for n in g["names"]]}
            for g in GROUPS
        ]
        for group, variant in zip(groups, VARIANTS if self.variants else (), strict=False):
            group |= {"variant": variant, "weight_decay": 0.0 if "hyperball" in variant else 0.1}
        self.optimizer = Muon(groups, lr=1e-3, **LAYOUTS[self.layout].options(self.world))

    def cut(self, tensors: Tensors) -> dict[str, Tensor]:
        row = LAYOUTS[self.layout]
        return row.build(tensors, row.mesh(self.world))

    def run(self, steps: range) -> None:
        for step in steps:
            for name, grad in self.cut(values(1000 + step)).items():
                param = self.model.get_parameter(name)
                missing = name == "frozen" or (name == "late" and step < SAVED_AFTER)
                param.grad = None if missing else grad
            self.optimizer.step()

    def differences(self, expected: Mapping[str, Tensors]) -> list[str]:
        """Names of what differs in any bit here; `expected` maps "weights" and state keys to full tensors by name."""
        found = []
        for key, full in expected.items():
            # cut all names together: builders go by position
            whole = {n: full.get(n, torch.zeros(s)) for n, s in SHAPES.items()}
            cut = full if key in ("step", *KEPT) else self.cut(whole)
            for name in full:
                param = self.model.get_parameter(name)
                here = param if key == "weights" else self.optimizer.state[param][key]
                wanted = rows_stored(full[name], here).reshape(-1) if key in KEPT else _local(cut[name])
                if not torch.equal(_local(here).reshape(-1) if key in KEPT else _local(here), wanted):
                    found.append(f"{key} of {name}")
        return found


def _local(tensor: Tensor) -> Tensor:
    storage = engine_of(tensor).storage(tensor)
    return storage if storage.numel() else storage.new_empty(0)


def snapshot(job: Job) -> dict[str, dict[str, Tensor]]:
    """Everything of a job on one process, by state key and name."""
    out: dict[str, dict[str, Tensor]] = {"weights": {n: p.detach().clone() for n, p in job.model.named_parameters()}}
    for name, p in job.model.named_parameters():
        for key, value in job.optimizer.state.get(p, {}).items():
            out.setdefault(key, {})[name] = value.clone()
    return out


@pytest.fixture(scope="module", params=[False])
def uninterrupted(request: pytest.FixtureRequest) -> dict[str, dict[str, Tensor]]:
    """Everything after all steps on one process; with variants where a test asks for them."""
    job = Job("single", variants=request.param)
    job.run(range(RESUMED_UNTIL))
    return snapshot(job)


# ------------------------------------------------------------------------------------- one layout to another

# Ways to save and load: torch's functions, their flat form, and shardmuon's own.
FORMS = ("torch", "flat", "ours")


def _state(job: Job, form: str) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    optim = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    return {"model": get_model_state_dict(job.model), "optim": optim}


def _save(layout: str, path: str, form: str, variants: bool) -> None:
    job = Job(layout, variants=variants)
    job.run(range(SAVED_AFTER))
    if form == "ours":
        checkpoint.save(path, job.model, job.optimizer)
    else:
        dcp.save(_state(job, form), checkpoint_id=path)


def _resume(layout: str, path: str, form: str, variants: bool, expected: Mapping[str, Tensors]) -> list[str]:
    job = Job(layout, seed=7, variants=variants)
    for group in job.optimizer.param_groups:
        wrong = {"lr": 9.0, "momentum": 0.1, "betas": (0.1, 0.2), "adjust_lr_fn": "spectral", "nesterov": False}
        group.update({key: value for key, value in wrong.items() if key in group})
    if form == "flat" or (variants and form == "torch"):
        job.run(range(50, 52))  # a plan, momentum and counters to be forgotten
    if form == "ours":
        checkpoint.load(path, job.model, job.optimizer)
    else:
        state = _state(job, form)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(job.model, state["model"])
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        set_optimizer_state_dict(job.model, job.optimizer, state["optim"], options=options)
    job.run(range(SAVED_AFTER, RESUMED_UNTIL))
    return job.differences(expected)


# saved on, ranks, loaded on, ranks: a file knows its source by the pieces in it alone, so each source meets one process
# and other cuts
ONE, TWO, FOUR, HSDP, GRID, EXPERTS, DIMS = (
    *(("single", 1), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("fsdp2+tp", 4), ("ep+fsdp", 4), ("two dims", 4)),
)
TORCHS = [
    *((ONE, ONE), (ONE, HSDP), (ONE, EXPERTS), (FOUR, TWO), (FOUR, GRID), (FOUR, DIMS), (HSDP, ONE), (HSDP, HSDP)),
    *((HSDP, EXPERTS), (GRID, TWO), (GRID, GRID), (GRID, DIMS), (EXPERTS, ONE), (EXPERTS, HSDP), (EXPERTS, EXPERTS)),
]
WITH_VARIANTS = [
    *((ONE, FOUR), (ONE, EXPERTS), (TWO, ONE), (TWO, FOUR), (TWO, DIMS), (HSDP, ONE), (HSDP, TWO), (HSDP, GRID)),
    *((GRID, ONE), (GRID, TWO), (GRID, EXPERTS), (EXPERTS, ONE), (EXPERTS, HSDP), (EXPERTS, GRID)),
]
# of plain tensor-parallel shards only shardmuon's own functions know which part of the whole they are
COLUMN, ROW, STRIDED, CROSS = ("tp column", 2), ("tp row", 3), ("tp stride 2", 2), ("tp x dp", 4)
OURS = [
    *((CROSS, COLUMN), (("tp stride 2", 4), TWO), (GRID, STRIDED), (ONE, ROW), (ROW, CROSS), (FOUR, ONE), (ONE, GRID)),
]
RESUMES = [
    *((*pair, "torch", False) for pair in TORCHS),
    *((*pair, "flat", False) for pair in ((GRID, TWO), (GRID, HSDP), (GRID, ONE), (ONE, TWO), (ONE, HSDP))),
    *((*pair, "torch", True) for pair in WITH_VARIANTS),
    *((*pair, "ours", False) for pair in OURS),
    *((*pair, "ours", True) for pair in ((FOUR, GRID), (COLUMN, COLUMN), (GRID, CROSS))),
]


def on(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return [function(*args)] if world == 1 else get_pool(world).run(function, *args)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder in which a job was saved on some ranks, once for all who load it."""
    made: dict[Any, str] = {}

    def get(source: tuple[str, int], form: str, variants: bool) -> str:
        key = (source, form, variants)
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("saved"))
            on(source[1], _save, source[0], made[key], form, variants)
        return made[key]

    return get


@pytest.mark.ranks
@pytest.mark.parametrize(("source", "target", "form", "uninterrupted"), RESUMES, indirect=["uninterrupted"], ids=str)
def test_a_run_resumed_on_another_layout_equals_the_uninterrupted_one(
    source: tuple[str, int], target: tuple[str, int], form: str, saved: Any, uninterrupted: Any
) -> None:
    variants = set(KEPT) <= set(uninterrupted)
    path = saved(source, form, variants)
    assert on(target[1], _resume, target[0], path, form, variants, uninterrupted) == [[]] * target[1]


def test_a_run_that_loads_nothing_differs(uninterrupted: Any) -> None:
    job = Job("single", seed=7)
    job.run(range(SAVED_AFTER, RESUMED_UNTIL))
    found = job.differences(uninterrupted)
    assert len(found) == sum(map(len, uninterrupted.values())) - len(["momentum_buffer of late"])


def _full(layout: str, path: str | None, broadcast: bool, expected: Any) -> Any:
    """Save a full state dict from rank 0 with torch.save, or load one, on rank 0 alone if it is to be broadcast."""
    job = Job(layout, seed=0 if path is None else 7)
    if path is None:
        job.run(range(SAVED_AFTER))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(job.model, job.optimizer, options=options)
        model = get_model_state_dict(job.model, options=options)
        return (model, state) if dist.get_rank() == 0 else None
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    whole = torch.load(path, weights_only=True) if dist.get_rank() == 0 or not broadcast else ({}, {})
    set_model_state_dict(job.model, whole[0], options=options)
    set_optimizer_state_dict(job.model, job.optimizer, whole[1], options=options)
    job.run(range(SAVED_AFTER, RESUMED_UNTIL))
    return job.differences(expected)


@pytest.mark.ranks
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_full_state_dict_in_one_file_resumes_on_any_layout(
    broadcast: bool, world4: RankPool, tmp_path: Path, uninterrupted: Any
) -> None:
    state = world4.run(_full, "fsdp2+tp", None, broadcast, None)[0]
    torch.save(state, tmp_path / "full.pt")
    for layout in ("hsdp", "ep+fsdp"):
        assert world4.run(_full, layout, str(tmp_path / "full.pt"), broadcast, uninterrupted) == [[]] * 4


def _fully_sharded(path: str, action: str) -> list[Tensor]:
    """A model that `fully_shard` itself manages, trained with autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(action == "load")
    mesh = mesh_of((dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = Muon(model, lr=0.02)
    if action == "save":
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            model(torch.randn(8, 12)).square().mean().backward()
            optimizer.step()
        checkpoint.save(path, model, optimizer)
    else:
        checkpoint.load(path, model, optimizer)
    state = [s for p in model.parameters() for s in optimizer.state[p].values()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in (*model.parameters(), *state)]


@pytest.mark.ranks
def test_a_fully_sharded_model_is_saved_on_4_ranks_and_loaded_on_2(
    world4: RankPool, world2: RankPool, tmp_path: Path
) -> None:
    saved = world4.run(_fully_sharded, str(tmp_path), "save")[0]
    for rank in world2.run(_fully_sharded, str(tmp_path), "load"):
        assert [torch.equal(a, b) for a, b in zip(rank, saved, strict=True)] == [True] * len(saved)


# ------------------------------------------------------------------------------------ state before loading


def _created(layout: str) -> tuple[list[str], list[float], int, int]:
    job = Job(layout)
    job.optimizer.param_groups[0]["weight_decay_mode"] = "independent"  # would decay even with lr=0
    before = snapshot(job) if layout == "single" else {"weights": values(0)}
    get_optimizer_state_dict(job.model, job.optimizer)
    changed = job.differences(before)
    sums = [float(_local(t).abs().sum()) for s in job.optimizer.state.values() for t in s.values()]
    return changed, sums, len(job.optimizer.state), job.optimizer.traffic.exchanges


@pytest.mark.ranks
@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("fsdp2+tp", 4)])
def test_asking_a_fresh_optimizer_for_its_state_makes_zeros_and_counts_nothing(layout: str, world: int) -> None:
    for changed, sums, count, exchanges in on(world, _created, layout):
        assert changed == []
        assert sums == [0.0] * len(sums)
        assert count == len(SHAPES) - len(["frozen"])
        assert exchanges == 0


def _stepped_on_zeros(layout: str) -> list[str]:
    """Create state as other checkpoint code does by hand."""
    job = Job(layout)
    for p in job.model.parameters():
        p.grad = torch.zeros_like(p)
    rates = [g["lr"] for g in job.optimizer.param_groups]
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    job.optimizer.step()
    for group, lr in zip(job.optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    zeros = {n: torch.zeros(s) for n, s in SHAPES.items() if n != "table"}
    return job.differences({"weights": values(0), "momentum_buffer": zeros})


@pytest.mark.ranks
@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("ep+fsdp", 4)])
def test_a_step_on_zero_gradients_with_lr_0_changes_no_bit(layout: str, world: int) -> None:
    assert on(world, _stepped_on_zeros, layout) == [[]] * world


def test_a_first_step_at_lr_0_on_real_gradients_counts_as_torchs_does() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": [p], "use_muon": False}], lr=0.0)
    p.grad = torch.zeros(3)  # a row that no token used, say
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_state_for_parameters_without_gradients_is_listed_as_soon_as_there_is_any() -> None:
    job = Job("single")
    assert job.optimizer.state_dict()["state"] == {}
    job.run(range(1))
    state = job.optimizer.state_dict()["state"]
    names = [n for g in GROUPS for n in g["names"]]
    assert {names[i] for i in state} == set(SHAPES) - {"frozen"}
    assert not state[names.index("late")]["momentum_buffer"].any()


# ----------------------------------------------------------------------------------------------- one process


def pair(dtype: torch.dtype = torch.float32) -> tuple[Muon, list[nn.Parameter]]:
    """A small optimizer: a Muon parameter w, an AdamW parameter b."""
    w, b = (nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in ((4, 3), (3,)))
    groups = [{"params": [("w", w)], "lr": 0.1}, {"params": [("b", b)], "use_muon": False, "lr": 0.2}]
    return Muon(groups, lr=1e-3), [w, b]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_momentum_of_another_dtype_is_cast_to_the_one_this_run_works_with(first: torch.dtype) -> None:
    second = torch.float32 if first == torch.bfloat16 else torch.bfloat16
    old, old_params = pair(first)
    train(old, old_params, range(2))
    new, params = pair(second)
    new.load_state_dict(old.state_dict())
    for p, q in zip(params, old_params, strict=True):
        for key, value in old.state[q].items():
            dtype = torch.float32 if key == "step" else second
            assert torch.equal(new.state[p][key], value.to(dtype)) and new.state[p][key].dtype == dtype
    train(new, params, range(2, 3))


def test_fp32_momentum_of_bf16_weights_stays_fp32() -> None:
    def make() -> tuple[Muon, nn.Parameter]:
        w = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
        w.grad_dtype = None  # gradients accumulate in fp32
        return Muon([w], lr=1e-3), w

    (old, w), (new, v) = make(), make()
    w.grad = torch.randn(4, 3)
    old.step()
    new.load_state_dict(old.state_dict())
    assert new.state[v]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(new.state[v]["momentum_buffer"], old.state[w]["momentum_buffer"])
    # known only at the next gradient: bf16 this time
    v.grad = torch.randn(4, 3).bfloat16()
    new.step()
    assert new.state[v]["momentum_buffer"].dtype == torch.bfloat16


def test_every_option_and_the_schedule_survive() -> None:
    def make() -> tuple[Muon, list[nn.Parameter], Any]:
        optimizer, params = pair()
        return optimizer, params, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    old, old_params, old_schedule = make()
    old.param_groups[0].update(momentum=0.7, adjust_lr_fn="spectral", ns_coefficients=[(3.0, -4.0, 2.0)] * 2)
    old.param_groups[1].update(betas=(0.1, 0.2), eps=1e-3, weight_decay=torch.tensor(0.5))
    for seed in range(4):
        train(old, old_params, range(seed, seed + 1))
        old_schedule.step()
    new, params, schedule = make()
    new.load_state_dict(copy.deepcopy(old.state_dict()))  # loading shares tensors, by torch's own rule
    schedule.load_state_dict(old_schedule.state_dict())
    for a, b in zip(new.param_groups, old.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
    with torch.no_grad():
        for p, q in zip(params, old_params, strict=True):
            p.copy_(q)
    for optimizer, ps, lr in ((old, old_params, old_schedule), (new, params, schedule)):
        train(optimizer, ps, range(4, 5))
        lr.step()
        train(optimizer, ps, range(5, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, old_params, strict=True))


@pytest.mark.parametrize("broken", [None, "a rank died"])
def test_gradients_that_are_there_do_not_keep_state_from_being_loaded(broken: str | None, tmp_path: Path) -> None:
    """torch makes no state to load into then. A first step that was broken off leaves some behind, too."""
    old, new = Job("single"), Job("single", seed=1)
    old.run(range(SAVED_AFTER))
    checkpoint.save(tmp_path, old.model, old.optimizer)
    for p in new.model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    grads = [p.grad for p in new.model.parameters()]
    new.optimizer.broken = broken
    checkpoint.load(tmp_path, new.model, new.optimizer)
    assert new.optimizer.broken is None
    assert new.differences(snapshot(old)) == []
    assert all(p.grad is grad for p, grad in zip(new.model.parameters(), grads, strict=True))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_group_takes_nothing_from_the_others(position: int, tmp_path: Path) -> None:
    def make(lr: float) -> tuple[Bag, Muon]:
        model = Bag({"w": torch.ones(4, 3), "b": torch.ones(3)})
        groups: list[dict[str, Any]] = [
            {"params": [model.w], "lr": lr},
            {"params": [model.b], "use_muon": False, "lr": 2 * lr, "betas": (lr, lr)},
        ]
        groups.insert(position, {"params": [], "lr": 3 * lr})
        return model, Muon(groups, lr=1e-3)

    model, old = make(0.1)
    train(old, list(model.parameters()), range(1))
    checkpoint.save(tmp_path, model, old)
    other, new = make(0.3)
    checkpoint.load(tmp_path, other, new)
    muon, adamw = (g for g in new.param_groups if g["params"])
    assert (muon["lr"], adamw["lr"], adamw["betas"]) == (0.1, 0.2, (0.1, 0.1))


def test_tied_parameters_are_saved_once_and_loaded(tmp_path: Path) -> None:
    def make(value: float) -> tuple[nn.Module, Muon]:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, value)
        return model, Muon([model[0].weight], lr=1e-3)

    model, old = make(0.5)
    train(old, [model[0].weight], range(2))
    checkpoint.save(tmp_path, model, old)
    other, new = make(9.0)
    checkpoint.load(tmp_path, other, new)
    train(old, [model[0].weight], range(2, 4))
    train(new, [other[0].weight], range(2, 4))
    assert torch.equal(model[0].weight, other[1].weight)


def _async(path: str, expected: Any) -> list[str]:
    job = Job("fsdp2")
    job.run(range(SAVED_AFTER))
    state = {"model": get_model_state_dict(job.model), "optim": get_optimizer_state_dict(job.model, job.optimizer)}
    own = dist.new_group(backend="gloo")  # torch's rule: steps use the default group meanwhile
    future = dcp.async_save(state, checkpoint_id=path, process_group=own)
    job.run(range(SAVED_AFTER, 20))  # while it is being written
    future.result()
    return _resume("fsdp2", path, "torch", False, expected)


@pytest.mark.ranks
def test_an_asynchronous_save_holds_the_moment_of_the_call(
    world2: RankPool, tmp_path: Path, uninterrupted: Any
) -> None:
    assert world2.run(_async, str(tmp_path), uninterrupted) == [[]] * 2


# ---------------------------------------------------------------------------------------- options, frozen, broken


def _two(**options: Any) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    return model, Muon(model, lr=0.02, **options)


def _steps(model: nn.Module, optimizer: Muon, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        optimizer.step()


OTHERS: list[dict[str, Any]] = [
    {},
    {"variant": "normuon"},
    {"variant": "muon_eq", "adamw_lr": 0.5, "weight_decay": 0.0},
]


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_options_and_what_they_keep_come_from_the_file_whatever_the_optimizer_was_made_with(
    others: dict[str, Any], tmp_path: Path
) -> None:
    model, old = _two(variant="normuon", beta2=0.5, adamw="cautious", momentum=0.9)
    _steps(model, old, range(2))
    checkpoint.save(tmp_path, model, old)
    other, new = _two(**others)
    new.param_groups.reverse()
    checkpoint.load(tmp_path, other, new)
    new.param_groups.reverse()
    for mine, theirs in zip(new.param_groups, old.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    _steps(model, old, range(2, 4))
    _steps(other, new, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert old.state[p].keys() == new.state[q].keys()
        assert all(torch.equal(value, new.state[q][key]) for key, value in old.state[p].items())


def test_a_variant_that_the_file_lacks_is_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    model, old = _two()
    _steps(model, old, range(2))
    checkpoint.save(tmp_path, model, old)
    other, new = _two(variant="normuon")
    _steps(other, new, range(5, 6))
    state, groups = new.state, new.param_groups
    before, weights = copy.deepcopy(new.state_dict()), [p.clone() for p in other.parameters()]
    with pytest.raises(ValueError, match=r"group 0: .* variant=None, .* 'normuon'\. Load it with variant=None"):
        checkpoint.load(tmp_path, other, new)
    assert new.state is state and new.param_groups is groups
    assert_unchanged(new, before)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), weights, strict=True))


def test_a_layer_that_is_frozen_while_loading_keeps_the_state_that_the_file_has(tmp_path: Path) -> None:
    model, old = _two()
    _steps(model, old, range(2))
    model[0].requires_grad_(False)
    checkpoint.save(tmp_path, model, old)
    other, new = _two()
    other[0].requires_grad_(False)
    checkpoint.load(tmp_path, other, new)
    assert [p.requires_grad for p in other.parameters()] == [False, False, True, True]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert old.state[p].keys() == new.state[q].keys()
        assert all(torch.equal(value, new.state[q][key]) for key, value in old.state[p].items())


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
    assert not optimizer.state.get(params[1])
    assert all(torch.equal(value, optimizer.state[params[0]][key]) for key, value in saved["state"][0].items())


def test_a_broken_step_is_not_saved_until_it_is_accepted(tmp_path: Path) -> None:
    model, optimizer = _two()
    _steps(model, optimizer, range(1))
    optimizer.broken = "planted"
    with pytest.raises(ExchangeError, match="its state is half moved: planted"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="half moved: planted"):
        checkpoint.save(tmp_path / "one", model, optimizer)
    assert not (tmp_path / "one").exists()
    optimizer.broken = None
    checkpoint.save(tmp_path / "two", model, optimizer)
    other, new = _two()
    checkpoint.load(tmp_path / "two", other, new)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_save_in_the_middle_of_a_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _two()
    said = []
    run = core.run_buckets

    def interrupted(*args: Any) -> None:
        for save in (optimizer.state_dict, lambda: checkpoint.save(tmp_path / "one", model, optimizer)):
            with pytest.raises(ExchangeError, match="a step is under way"):
                save()
            said.append(True)
        run(*args)

    monkeypatch.setattr(core, "run_buckets", interrupted)
    _steps(model, optimizer, range(1))
    assert said == [True, True]
    optimizer.state_dict()


# ------------------------------------------------------------------------------------------------- refusals


def _edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def edit(saved: dict[str, Any]) -> Any:
        change(saved)
        return saved

    return edit


def _sgd(saved: dict[str, Any]) -> Any:
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=0.1, momentum=0.9)
    train(optimizer, params, range(1))
    return optimizer.state_dict()


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "momentum missing": (
        _edited(lambda s: s["state"].pop(0)),
        "w: the state dict has no state for it (key 0), although it has for 1 other parameters",
    ),
    "key missing": (
        _edited(lambda s: s["state"][1].pop("exp_avg_sq")),
        "b: its state in the checkpoint is ['exp_avg', 'step'], AdamW's is ['exp_avg', 'exp_avg_sq', 'step']",
    ),
    "key of another optimizer": (
        _edited(lambda s: s["state"][0].update(moment2_buffer=torch.zeros(4, 3))),
        "w: its state in the checkpoint is ['moment2_buffer', 'momentum_buffer'], Muon's is ['momentum_buffer']",
    ),
    "state of a parameter that is not listed": (
        _edited(lambda s: s["state"].update({7: {"momentum_buffer": torch.zeros(4, 3)}})),
        "in the state dict 7 has state and is listed nowhere",
    ),
    "a parameter more": (
        _edited(lambda s: s["param_groups"][0].update(params=[0, 9], param_names=["w", "v"])),
        "group 0: the state dict lists 2 parameters, the optimizer 1, beginning with w",
    ),
    "a parameter twice": (
        _edited(lambda s: s["param_groups"][1].update(params=[0])),
        "in the state dict 0 is listed 2 times",
    ),
    "shape": (
        _edited(lambda s: s["state"][0].update(momentum_buffer=torch.zeros(3, 4))),
        "w: its momentum_buffer is a Tensor of shape (3, 4), the parameter stores shape (4, 3)",
    ),
    "a group less": (
        _edited(lambda s: s["param_groups"].pop()),
        "the state dict has 1 parameter groups, the optimizer 2",
    ),
    "other names": (
        _edited(lambda s: s["param_groups"][0].update(param_names=["v"])),
        "w: parameter 0 of group 0 is called 'v' in the state dict",
    ),
    "groups swapped": (
        _edited(lambda s: s["param_groups"].reverse()),
        "w: parameter 0 of group 0 is called 'b' in the state dict",
    ),
    "SGD's, with the same state key": (_sgd, "w: the checkpoint's group has no 'ns_coefficients' (it has ['dampening'"),
    "routed otherwise": (
        _edited(lambda s: s["param_groups"][1].update(use_muon=True)),
        "group 1: the checkpoint's group is Muon's (use_muon=True), the optimizer's AdamW's (use_muon=False)",
    ),
    "an option without a meaning": (
        _edited(lambda s: s["param_groups"][0].update(lr=float("nan"))),
        "group 0: lr=nan must be finite and at least 0",
    ),
    "a view that does not fit": (
        _edited(lambda s: s["param_groups"][0].update(num_heads=3)),
        "w: num_heads=3 does not divide the 4 rows",
    ),
    "a count that is none": (
        _edited(lambda s: s["state"][1].update(step=torch.tensor(float("nan")))),
        "b: its step in the checkpoint is tensor(nan), not a whole number",
    ),
    "integers": (
        _edited(lambda s: s["state"][0].update(momentum_buffer=torch.zeros(4, 3, dtype=torch.int64))),
        "w: its momentum_buffer in the checkpoint is of dtype torch.int64, not a floating-point tensor",
    ),
    "a state dict of a model": (
        lambda s: {"w": torch.zeros(4, 3)},
        "has the keys 'state' and 'param_groups', found ['w']",
    ),
    "no dict at all": (lambda s: [], "found list"),
    "groups without parameters": (
        _edited(lambda s: s["param_groups"][0].pop("params")),
        "its 'param_groups' dicts that list 'params'",
    ),
}


def assert_unchanged(optimizer: Muon, before: dict[str, Any]) -> None:
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][k]) for k, value in state.items())


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_dict_that_does_not_fit_is_refused_whole(case: str) -> None:
    edit, says = REFUSED[case]
    old, old_params = pair()
    train(old, old_params, range(2))
    new, params = pair()
    train(new, params, range(5, 7))
    before = copy.deepcopy(new.state_dict())
    with pytest.raises(ValueError, match=re.escape(says)):
        new.load_state_dict(edit(copy.deepcopy(old.state_dict())))
    assert_unchanged(new, before)
    train(new, params, range(7, 8))


def _of_another_layout() -> str:
    job, other = Job("fsdp2"), Job("two dims")
    job.run(range(1))
    other.run(range(1))
    before = copy.deepcopy(other.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"Load it through torch\.distributed\.checkpoint") as caught:
        other.optimizer.load_state_dict(job.optimizer.state_dict())
    after = other.optimizer.state_dict()
    for key, state in before["state"].items():
        assert all(torch.equal(_local(value), _local(after["state"][key][k])) for k, value in state.items())
    return str(caught.value)


def test_state_of_another_layout_is_refused_by_name(world4: RankPool) -> None:
    assert all(text.startswith("squarish: its momentum_buffer is a DTensor") for text in world4.run(_of_another_layout))


def test_an_entry_that_is_empty_on_purpose_starts_afresh() -> None:
    old, old_params = pair()
    train(old, old_params, range(2))
    saved = old.state_dict()
    saved["state"][0] = {}
    new, params = pair()
    new.load_state_dict(saved)
    assert not new.state.get(params[0])
    assert new.state[params[1]]["step"] == 2


def _damaged(path: str, layout: str, num_cut: int) -> list[str]:
    """Cut the largest file short, by most of it or by the last bytes, then load."""
    job = Job(layout)
    job.run(range(2))
    checkpoint.save(path, job.model, job.optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        largest = max(Path(path).glob("*.distcp"), key=lambda p: p.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-num_cut])
    if dist.is_initialized():
        dist.barrier()
    job.run(range(20, 22))
    weights = {n: _local(p).clone() for n, p in job.model.named_parameters()}
    state = {n: _local(job.optimizer.state[job.model.get_parameter(n)].get("momentum_buffer", p)).clone() for n, p in
             job.model.named_parameters() if n != "frozen"}  # fmt: skip
    with pytest.raises(CheckpointException):
        checkpoint.load(path, job.model, job.optimizer)
    return [
        n
        for n, p in job.model.named_parameters()
        if not torch.equal(_local(p), weights[n])
        or (n in state and not torch.equal(_local(job.optimizer.state[p].get("momentum_buffer", p)), state[n]))
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("num_cut", [30, 2000])
@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("fsdp2", 4)])
def test_a_file_cut_short_is_an_error_on_every_rank_and_changes_nothing(
    layout: str, world: int, num_cut: int, tmp_path: Path
) -> None:
    assert on(world, _damaged, str(tmp_path), layout, num_cut) == [[]] * world


class _Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _half(rows: int, cols: int) -> float:
    return 0.5


def test_a_state_dict_needs_no_code_to_load_and_a_file_with_code_is_refused(tmp_path: Path) -> None:
    old, params = pair()
    train_with = _half
    old.param_groups[0]["adjust_lr_fn"] = train_with
    train(old, params, range(2))
    torch.save(old.state_dict(), tmp_path / "good.pt")
    saved = torch.load(tmp_path / "good.pt", weights_only=True)
    assert saved["param_groups"][0]["adjust_lr_fn"].startswith("callable: ")
    new, _ = pair()
    with pytest.raises(ValueError, match="group 0: adjust_lr_fn was a function when the checkpoint was saved"):
        new.load_state_dict(saved)
    new.param_groups[0]["adjust_lr_fn"] = train_with
    new.load_state_dict(saved)
    assert new.param_groups[0]["adjust_lr_fn"] is train_with
    assert old.param_groups[0]["adjust_lr_fn"] is train_with
    saved["state"][0]["momentum_buffer"] = _Malicious(tmp_path / "ran")
    torch.save(saved, tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "bad.pt", weights_only=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["metadata", "option"])
def test_a_checkpoint_folder_with_code_is_refused_and_the_code_never_runs(place: str, tmp_path: Path) -> None:
    def job() -> tuple[nn.Module, Muon]:
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        return model, Muon(model, lr=0.02)

    model, old = job()
    model(torch.ones(2, 8)).sum().backward()
    old.step()
    folder = tmp_path / "saved"
    if place == "option":
        old.param_groups[0]["initial_lr"] = _Malicious(tmp_path / "ran")
    checkpoint.save(folder, model, old)
    assert not (tmp_path / "ran").exists()
    if place == "metadata":
        with (folder / ".metadata").open("rb") as stream:
            metadata = pickle.load(stream)
        metadata.planner_data = _Malicious(tmp_path / "ran")
        with (folder / ".metadata").open("wb") as stream:
            pickle.dump(metadata, stream)
    model, new = job()
    if place == "option":
        new.param_groups[0]["initial_lr"] = 0.1
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointException, match=r"not read: (it names|Unsupported global: GLOBAL) "):
        checkpoint.load(folder, model, new)
    assert not (tmp_path / "ran").exists()
    assert not any(t.any() for state in new.state.values() for t in state.values())  # what it starts from
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if place == "metadata":
        dcp.FileSystemReader(folder).read_metadata()
        assert (tmp_path / "ran").exists()  # what torch alone runs
