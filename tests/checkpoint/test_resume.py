"""Tests that a job saved on one layout and resumed on another stays bitwise identical to an uninterrupted run, for
various layouts, momentum formats and variants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from variant_cases import LATER

from shardmuon import Muon, checkpoint
from shardmuon.layout.engines import engine_of
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, parameters
from shardmuon.variants import KEPT_KEYS, VARIANTS, keeping, stages_of

Tensors = Mapping[str, Tensor]

# Most dims are not divisible by the number of ranks, so shards are uneven. The layout "fsdp2+tp" shards the rows over
# two mesh axes, so some of its shards are also strided.
SHAPES = {
    "squarish": (14, 15),
    "tall": (35, 11),
    "experts": (7, 6, 10),
    "wide": (13, 133),  # 133 columns, so that each row of 8-bit momentum has two quantization blocks
    "table": (21, 6),
    "late": (7, 5),  # "late" gets its first gradient after the checkpoint
    "frozen": (4, 4),
    # Some ranks have an empty shard of "few". If it is a plain tensor, it gets no gradient before the checkpoint.
    "few": (1, 6),
}
GROUPS: list[dict[str, Any]] = [
    {"names": ["squarish", "tall", "late", "frozen"], "lr": 0.03, "weight_decay": 0.2},
    {"names": ["experts"], "view": "stack", "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
    {"names": ["wide"], "split_sizes": (5, 8), "ns_coefficients": ((3.0, -4.0, 2.0), (1.5, -0.5, 0.0))},
    {"names": ["table", "few"], "use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6},
]
MIXED = ("normuon+hyperball", "normuon", "hyperball")
KEEPING = [name for name in LATER if keeping(VARIANTS[name])]


class Kind(NamedTuple):
    """A job configuration: the dtype of the weights, the options for storing momentum (such as its dtype), and the
    variants of the parameter groups."""

    dtype: torch.dtype = torch.float32
    storage: Mapping[str, Any] = MappingProxyType({})
    variants: Sequence[str] = ()


BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {
    "plain": Kind(),
    "variants": Kind(variants=MIXED),
    "fp32": Kind(BF16, {"momentum_dtype": FP32, "stochastic_rounding": True}),
    "bf16": Kind(BF16, {"momentum_dtype": BF16, "stochastic_rounding": True}),
    "int8": Kind(BF16, {"momentum_dtype": "int8", "stochastic_rounding": True}, variants=MIXED),
    **{name: Kind(variants=[name] * 3) for name in KEEPING},
}
# Ignore the warning that torch.distributed.checkpoint gives when a single process saves or loads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.ranks,
]
SAVED_AFTER, RESUMED_UNTIL = 2, 4


def values(seed: int) -> dict[str, Tensor]:
    """Return random full tensors that depend only on the seed and the parameter."""
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + i))
        for i, (name, shape) in enumerate(SHAPES.items())
    }


@dataclass
class Job:
    layout: str
    kind: str = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        self.world, kind = dist.get_world_size() if dist.is_initialized() else 1, KINDS[self.kind]
        params = parameters(self.cut(values(self.seed)))
        params["frozen"].requires_grad_(False)
        self.model = nn.ParameterDict(params)
        groups = [
            {**{k: v for k, v in g.items() if k != "names"}, "params": [(n, params[n]) for n in g["names"]]}
            for g in GROUPS
        ]
        for group, variant in zip(groups, kind.variants, strict=False):
            decays = all(stage.decays for stage in stages_of({"variant": variant}))
            group |= {"variant": variant, "weight_decay": 0.1 if decays else 0.0}
        self.optimizer = Muon(groups, lr=1e-3, **kind.storage, **LAYOUTS[self.layout].options(self.world))

    def cut(self, tensors: Tensors) -> dict[str, Tensor]:
        row = LAYOUTS[self.layout]
        return row.build({n: t.to(KINDS[self.kind].dtype) for n, t in tensors.items()}, row.mesh(self.world))

    def run(self, steps: range) -> None:
        for step in steps:
            for name, grad in self.cut(values(1000 + step)).items():
                param = self.model.get_parameter(name)
                lacks = name == "late" or (name == "few" and not param.numel())
                missing = name == "frozen" or (lacks and step < SAVED_AFTER)
                param.grad = None if missing else grad
            self.optimizer.step()

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Copy this rank's local weights and optimizer state. Return a dict from "weights" or a state key to a dict
        from parameter name to tensor."""
        out: dict[str, dict[str, Tensor]] = {"weights": {n: p.detach() for n, p in self.model.named_parameters()}}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                out.setdefault(key, {})[name] = value
        return {key: {name: local(t).clone() for name, t in of_key.items()} for key, of_key in out.items()}

    def differences(self, expected: Mapping[str, Tensors]) -> list[str]:
        """Compare this rank's weights and state with the full tensors `expected` of a single-process run. Return the
        names of the tensors that are not bitwise equal."""
        found, row = list[str](), LAYOUTS[self.layout]
        for key, full in expected.items():
            # `build`, which shards full tensors, requires one tensor per parameter, with a dtype that supports
            # gradients. So replace missing state with zeros, and convert all state to fp32.
            whole = {n: full.get(n, torch.zeros(s)).float() for n, s in SHAPES.items()}
            cut = full if key in ("step", *KEPT_KEYS) else row.build(whole, row.mesh(self.world))
            for name, of_one in full.items():
                param = self.model.get_parameter(name)
                here = param if key == "weights" else self.optimizer.state[param][key]
                wanted = of_one if key in KEPT_KEYS else local(cut[name])
                if key in KEPT_KEYS and isinstance(here, DTensor):
                    wanted = distribute_tensor(of_one, here.device_mesh, here.placements, src_data_rank=None).to_local()
                stored = local(here).flatten()
                if stored.dtype != of_one.dtype or not torch.equal(stored, wanted.flatten().to(of_one.dtype)):
                    found.append(f"{key} of {name}")
        return found


def local(tensor: Tensor) -> Tensor:
    return engine_of(tensor).storage(tensor).detach()


@functools.cache
def uninterrupted(kind: str) -> dict[str, dict[str, Tensor]]:
    """Run all steps in a single process without a checkpoint, and return the weights and the state."""
    job = Job("single", kind)
    job.run(range(RESUMED_UNTIL))
    return job.snapshot()


def on(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return [function(*args)] if world == 1 else RankPool.cached(world).run(function, *args)


# ------------------------------------------------------------------------------------- one layout to another


FULL = {"full_state_dict": True, "cpu_offload": True}
OPTIONS = {
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(**FULL),
    "broadcast": StateDictOptions(**FULL, broadcast_from_rank0=True),
}


def _state(job: Job, form: str) -> dict[str, Any]:
    options = OPTIONS.get(form)
    optim = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    return {"model": get_model_state_dict(job.model, options=options), "optim": optim}


def _save(layout: str, path: str, form: str, kind: str) -> None:
    job = Job(layout, kind)
    job.run(range(SAVED_AFTER))
    if form == "ours":
        checkpoint.save(path, job.model, job.optimizer)
    elif form == "full":
        state = _state(job, form)
        if dist.get_rank() == 0:
            torch.save(state, Path(path, "full.pt"))
    elif form == "async":
        # async_save needs its own process group, because steps use the default group in the meantime.
        own = dist.new_group(backend="gloo")
        future = dcp.async_save(_state(job, form), checkpoint_id=path, process_group=own)
        job.run(range(SAVED_AFTER, 20))
        future.result()
    else:
        dcp.save(_state(job, form), checkpoint_id=path)


def _resume(layout: str, path: str, form: str, kind: str, expected: Mapping[str, Tensors]) -> list[str]:
    job = Job(layout, kind, seed=7)
    for group in job.optimizer.param_groups:
        wrong = {"lr": 9.0, "momentum": 0.1, "betas": (0.1, 0.2), "adjust_lr_fn": "spectral", "nesterov": False}
        group.update({key: value for key, value in wrong.items() if key in group})
    if form == "flat" or kind == "variants":
        # Before loading, take a step on different data, so that the job has a plan, momentum and a wrong step count.
        # None of these may affect the steps after loading.
        job.run(range(50, 51))
    if form == "ours":
        checkpoint.load(path, job.model, job.optimizer)
    elif form:
        state: dict[str, Any] = {"model": {}, "optim": {}}
        if form == "full" or (form == "broadcast" and dist.get_rank() == 0):
            state = torch.load(Path(path, "full.pt"), weights_only=True)
        elif form != "broadcast":
            state = _state(job, form)
            dcp.load(state, checkpoint_id=path)
        set_model_state_dict(job.model, state["model"], options=OPTIONS.get(form))
        set_optimizer_state_dict(job.model, job.optimizer, state["optim"], options=OPTIONS.get(form))
    job.run(range(SAVED_AFTER, RESUMED_UNTIL))
    return job.differences(expected)


# Each test saves a checkpoint from a source job and loads it into a target job. Source and target are given as (layout,
# number of ranks). A checkpoint does not contain the layout of the job that saved it, so each layout is combined with
# only a few others.
ONE, TWO, FOUR, HSDP = ("single", 1), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)
GRID, EXPERTS, DIMS = ("fsdp2+tp", 4), ("ep+fsdp", 4), ("two dims", 4)
COLUMN, ROW, STRIDED, CROSS = ("tp column", 2), ("tp row", 3), ("tp stride 2", 2), ("tp x dp", 4)
# If a shard is a plain tensor instead of a DTensor, torch's functions cannot tell which part of the full tensor it
# contains. So these layouts are tested only with shardmuon's functions.
PLAIN_SHARDS = [name for name, row in LAYOUTS.items() if row.plain_shards and not name.startswith("tp ")]
# Each case gives the source, the target, the checkpoint format and the kind of job. The format "ours" uses shardmuon's
# functions, and all other formats use torch's. "flat" flattens the optimizer's state dict, and "async" saves while
# steps run. "full" and "broadcast" save a single file. With "full", every rank reads the file, and with "broadcast",
# only rank 0 reads it. 8-bit momentum is used only on layouts that do not split its quantization blocks.
RESUMES = [
    (GRID, TWO, "torch", "plain"),
    *((*pair, "torch", "variants") for pair in ((ONE, EXPERTS), (EXPERTS, ONE), (GRID, EXPERTS), (EXPERTS, HSDP))),
    *((*pair, "torch", "variants") for pair in ((HSDP, GRID), (TWO, DIMS))),
    *((*pair, "flat", "plain") for pair in ((GRID, HSDP), (ONE, TWO))),
    *((*pair, "ours", "plain") for pair in ((CROSS, COLUMN), (("tp stride 2", 4), TWO), (GRID, STRIDED), (ONE, ROW))),
    *((*pair, "ours", "variants") for pair in ((FOUR, GRID), (COLUMN, COLUMN), (GRID, CROSS), (ROW, CROSS))),
    *((*pair, "torch", "int8") for pair in ((FOUR, TWO),)),
    *((*pair, "ours", "int8") for pair in ((HSDP, ONE), (COLUMN, TWO), (ONE, COLUMN))),
    (ONE, FOUR, "torch", "bf16"),
    (TWO, TWO, "async", "plain"),
    (FOUR, TWO, "ours", "fp32"),
    *((GRID, EXPERTS, form, name) for name in KEEPING for form in ("torch", "ours")),
    *((GRID, target, form, "plain") for target, form in ((HSDP, "full"), (EXPERTS, "broadcast"), (HSDP, "broadcast"))),
    *((*pair, "ours", "plain") for name in PLAIN_SHARDS for pair in (((name, 4), TWO), (GRID, (name, 4)))),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that saves a job, unless it has been saved before, and returns the folder of the checkpoint."""

    @functools.cache
    def get(source: tuple[str, int], form: str, kind: str) -> str:
        path = str(tmp_path_factory.mktemp("saved"))
        on(source[1], _save, source[0], path, form, kind)
        return path

    return get


@pytest.mark.parametrize(("source", "target", "form", "kind"), RESUMES, ids=str)
def test_a_run_resumed_on_another_layout_equals_the_uninterrupted_one(
    source: tuple[str, int], target: tuple[str, int], form: str, kind: str, saved: Any
) -> None:
    path, expected = saved(source, "full" if form == "broadcast" else form, kind), uninterrupted(kind)
    kept = {stage.key for variant in KINDS[kind].variants for stage in stages_of({"variant": variant}) if stage.key}
    assert kept == set(KEPT_KEYS) & set(expected)
    assert on(target[1], _resume, target[0], path, form, kind, expected) == [[]] * target[1]


@pytest.mark.parametrize(("source", "kind"), [(ONE, "plain"), (FOUR, "int8")])
def test_the_comparison_sees_a_run_that_loads_nothing(source: tuple[str, int], kind: str) -> None:
    expected = uninterrupted(kind)
    found = on(source[1], _resume, source[0], "", "", kind, expected)
    equal = {f"{key} of {name}" for key, of_key in expected.items() for name in of_key} - set().union(*found)
    # The parameter "late" gets its first gradient after the checkpoint, so its step count is correct even if no
    # checkpoint is loaded.
    assert equal <= {"step of late"}


# ------------------------------------------------------------------------------------ state before loading


def _made(layout: str, how: str) -> None:
    """Create optimizer state as checkpoint code does before loading: by `get_optimizer_state_dict` if `how` is "asked",
    otherwise by a step with lr=0 and zero gradients. Check that the weights do not change, and that all state except
    step counts is zero."""
    job = Job(layout, "variants" if how == "asked" else "plain")
    before = job.snapshot()["weights"]
    assert job.optimizer.state_dict()["state"] == {}
    if how == "asked":
        get_optimizer_state_dict(job.model, job.optimizer)
    else:
        for group in job.optimizer.param_groups:
            group["lr"] = 0.0
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        job.optimizer.step()
    found = job.snapshot()
    assert_bitwise(found.pop("weights"), before)
    # Even a step with lr=0 increases AdamW's step count, as in torch.
    assert found.pop("step")["table"] == (how == "stepped")
    assert [key for key, of_key in found.items() for value in of_key.values() if value.any()] == []
    of_variants = {"second_moment", "weight_radius"} if how == "asked" else set()
    assert set(found) == {"momentum_buffer", "exp_avg", "exp_avg_sq", *of_variants}
    assert (job.optimizer.traffic.exchanges == 0) == (how == "asked" or job.world == 1)
    assert len(job.optimizer.state) == len(SHAPES) - len(["frozen"])


@pytest.mark.parametrize(
    ("layout", "world", "how"),
    [("single", 1, "asked"), ("fsdp2+tp", 4, "asked"), ("single", 1, "stepped"), ("ep+fsdp", 4, "stepped")],
)
def test_state_that_is_made_before_loading_is_zeros_and_moves_no_weight(layout: str, world: int, how: str) -> None:
    on(world, _made, layout, how)


# ------------------------------------------------------------------------------------------- what does not fit


def _of_another_layout() -> str:
    job, other = Job("fsdp2"), Job("two dims")
    job.run(range(1))
    other.run(range(1))
    before = other.snapshot()
    with pytest.raises(ValueError, match=r"Load it through torch\.distributed\.checkpoint") as caught:
        other.optimizer.load_state_dict(job.optimizer.state_dict())
    assert_bitwise(other.snapshot(), before)
    return str(caught.value)


def test_state_of_another_layout_is_refused_by_name(world4: RankPool) -> None:
    assert all(text.startswith("squarish: its momentum_buffer is a DTensor") for text in world4.run(_of_another_layout))


def _damaged(path: str, layout: str, num_cut: int) -> None:
    """Truncate the largest checkpoint file by `num_cut` bytes, and check that loading fails and changes nothing."""
    job = Job(layout)
    job.run(range(2))
    checkpoint.save(path, job.model, job.optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        largest = max(Path(path).glob("*.distcp"), key=lambda p: p.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-num_cut])
    if dist.is_initialized():
        dist.barrier()
    job.run(range(20, 22))
    before = job.snapshot()
    with pytest.raises(CheckpointException):
        checkpoint.load(path, job.model, job.optimizer)
    assert_bitwise(job.snapshot(), before)
    job.run(range(22, 23))


@pytest.mark.parametrize(("layout", "world", "num_cut"), [("single", 1, 2000), ("fsdp2", 4, 30), ("fsdp2", 4, 2000)])
def test_a_file_cut_short_is_an_error_on_every_rank_and_changes_nothing(
    layout: str, world: int, num_cut: int, tmp_path: Path
) -> None:
    on(world, _damaged, str(tmp_path), layout, num_cut)
