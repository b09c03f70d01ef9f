"""Checkpoints: saved on one layout, resumed on any other, bit for bit; and what does not fit is refused whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardmuon import Muon
from shardmuon.engines import engine_of
from shardmuon.testing import get_pool
from shardmuon.testing.layouts import LAYOUTS

Tensors = Mapping[str, Tensor]

# name -> shape. Where a layout cuts rows twice with strides (every other one) they divide by 4: otherwise torch's own
# checkpoint code names other rows than fully_shard stores (docs/checkpoints.md), for weights just as for state.
SHAPES = {
    "square": (16, 16),
    "tall": (35, 11),
    "experts": (8, 6, 10),
    "wide": (13, 33),
    "table": (20, 6),  # AdamW's
    "late": (7, 5),  # has its first gradient after the checkpoint
    "frozen": (4, 4),
}
GROUPS: list[dict[str, Any]] = [
    {"names": ["square", "tall", "late", "frozen"], "lr": 0.03, "weight_decay": 0.2},
    {"names": ["experts"], "view": "stack", "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
    {"names": ["wide"], "split_sizes": (5, 8), "ns_coefficients": ((3.0, -4.0, 2.0), (1.5, -0.5, 0.0))},
    {"names": ["table"], "use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6},
]
# torch says so whenever one process saves or loads
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
SAVED_AFTER, RESUMED_UNTIL = 3, 5


class Bag(nn.Module):
    """Parameters by name."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=name != "frozen"))


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
    world: int = 1

    def __post_init__(self) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.model = Bag(self.cut(values(self.seed)))
        params = dict(self.model.named_parameters())
        groups = [
            {**{k: v for k, v in g.items() if k != "names"}, "params": [(n, params[n]) for n in g["names"]]}
            for g in GROUPS
        ]
        group = dist.group.WORLD if LAYOUTS[self.layout].process_group else None
        self.optimizer = Muon(groups, deterministic=True, process_group=group)

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
        """What differs in any bit here; `expected` maps "weights" and state keys to full tensors by name."""
        found = []
        for key, full in expected.items():
            # cut all names together: builders go by position
            cut = full if key == "step" else self.cut({n: full.get(n, torch.zeros(s)) for n, s in SHAPES.items()})
            for name in full:
                param = self.model.get_parameter(name)
                here = param if key == "weights" else self.optimizer.state[param][key]
                if not torch.equal(_local(here), _local(cut[name])):
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


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, dict[str, Tensor]]:
    job = Job("single")
    job.run(range(RESUMED_UNTIL))
    return snapshot(job)


# ------------------------------------------------------------------------------------- one layout to another


def _options(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def _save(layout: str, path: str, flat: bool) -> None:
    job = Job(layout)
    job.run(range(SAVED_AFTER))
    state = {
        "model": get_model_state_dict(job.model),
        "optim": get_optimizer_state_dict(job.model, job.optimizer, options=_options(flat)),
    }
    dcp.save(state, checkpoint_id=path)


def _resume(layout: str, path: str, flat: bool, expected: Mapping[str, Tensors], stepped: bool) -> list[str]:
    job = Job(layout, seed=7)
    for group in job.optimizer.param_groups:
        wrong = {"lr": 9.0, "momentum": 0.1, "betas": (0.1, 0.2), "adjust_lr_fn": "spectral", "nesterov": False}
        group.update({key: value for key, value in wrong.items() if key in group})
    if stepped:
        job.run(range(50, 52))  # a plan, momentum and counters to be forgotten
    model = get_model_state_dict(job.model)
    optim = get_optimizer_state_dict(job.model, job.optimizer, options=_options(flat))
    dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
    set_model_state_dict(job.model, model)
    set_optimizer_state_dict(job.model, job.optimizer, optim, options=_options(flat))
    job.run(range(SAVED_AFTER, RESUMED_UNTIL))
    return job.differences(expected)


SAVE_ON = [("single", 1), ("fsdp2", 4), ("hsdp", 4), ("fsdp2+tp", 4), ("ep+fsdp", 4)]
LOAD_ON = [("single", 1), ("fsdp2", 2), ("hsdp", 4), ("fsdp2+tp", 4), ("ep+fsdp", 4), ("two dims", 4)]


def on(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return [function(*args)] if world == 1 else get_pool(world).run(function, *args)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, bool], str]:
    made: dict[tuple[str, int, bool], str] = {}

    def get(layout: str, world: int, flat: bool) -> str:
        key = (layout, world, flat)
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("saved"))
            on(world, _save, layout, made[key], flat)
        return made[key]

    return get


@pytest.mark.ranks
@pytest.mark.parametrize(("source", "world"), SAVE_ON, ids=str)
@pytest.mark.parametrize(("target", "worlds"), LOAD_ON, ids=str)
def test_a_run_resumed_on_another_layout_equals_the_uninterrupted_one(
    source: str, world: int, target: str, worlds: int, saved: Any, uninterrupted: Any
) -> None:
    path = saved(source, world, False)
    assert on(worlds, _resume, target, path, False, uninterrupted, False) == [[]] * worlds
