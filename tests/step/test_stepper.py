"""The new core's step on real ranks: validate, vote, commit. Bits are those of `shardmuon.Muon` on the same layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardmuon.step.stepper import Config, Stepper
from torch import Tensor

from shardmuon import Exchange, Muon, Storage
from shardmuon._torch import local_if_any
from shardmuon.errors import Refused
from shardmuon.testing import RankPool
from shardmuon.testing.cases import PARAMS
from shardmuon.testing.layouts import LAYOUTS, parameters

VECTORS = {"bias": (40,), "scale": (7,)}  # AdamW has them


# what the present core steps, too: variants, stored momentum, random rounding, routes, wires
CASES: dict[str, dict[str, Any]] = {
    "stages": {"variant": "muon_eq+normuon", "beta2": 0.8},
    "norms": {"variant": "normuon+hyperball", "weight_decay": 0.0},
    "bf16 momentum": {"storage": Storage(momentum_dtype=torch.bfloat16)},
    "rounded weights": {"storage": Storage(stochastic_rounding=True, momentum_dtype=torch.float32)},
    "gram": {"exchange": Exchange(route="gram", bucket_bytes=3000)},
    "wide wire": {"exchange": Exchange(dtype=torch.float32, bucket_bytes=3000), "nesterov": False},
    "l2": {"weight_decay_mode": "l2", "ns_coefficients": "polar_express", "adjust_lr_fn": "match_rms_adamw"},
}


def _optimizer(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> Muon:
    groups: list[dict[str, Any]] = [
        {"params": [(name, p)], **PARAMS[name].options} for name, p in params.items() if name in PARAMS
    ]
    vectors = [(name, p) for name, p in params.items() if name in VECTORS]
    options = {"exchange": Exchange(bucket_bytes=3000), **options}
    return Muon([*groups, {"params": vectors, "use_muon": False}], lr=0.02, **options)


def _twins(layout: str, options: Mapping[str, Any], dtype: torch.dtype) -> tuple[Muon, Muon]:
    """Two optimizers over equal parameters of a layout."""
    world, case = dist.get_world_size(), LAYOUTS[layout]
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        full = {name: torch.randn(c.shape).to(dtype) for name, c in PARAMS.items()}
        built = case.build(full, case.mesh(world))
        built |= {name: torch.randn(shape) for name, shape in VECTORS.items()}
        made.append(_optimizer(parameters(built), {**case.options(world), **options}))
    return made[0], made[1]


def _set_gradients(
    optimizers: Sequence[Muon], layout: str, step: int, dtype: torch.dtype, lacking: bool = False
) -> None:
    """The same gradients for all; one is missing in the second step. `lacking`: so are those of empty shards."""
    world, case = dist.get_world_size(), LAYOUTS[layout]
    torch.manual_seed(10 + step)
    full = {name: torch.randn(c.shape).to(dtype) for name, c in PARAMS.items()}
    grads = case.build(full, case.mesh(world)) | {name: torch.randn(shape) for name, shape in VECTORS.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
            for name, p in zip(group["param_names"], group["params"], strict=True):
                missing = step == 1 and name in ("wide", "experts", "bias")
                nothing = lacking and name in PARAMS and local_if_any(p).numel() == 0
                p.grad = None if missing or nothing else grads[name].clone()


def _stepper(optimizer: Muon) -> Stepper:
    config = optimizer.config
    asked = Config(config.orthogonalizer, config.exchange, config.storage)
    return Stepper(optimizer.param_groups, optimizer.state, asked)


def _unlike(
    layout: str, options: Mapping[str, Any], dtype: torch.dtype = torch.float32, lacking: bool = False
) -> list[str]:
    """What differs after three steps between the old core and the new one."""
    old, new = _twins(layout, options, dtype)
    stepper = _stepper(new)
    found = []
    for step in range(3):
        _set_gradients((old, new), layout, step, dtype, lacking)
        old.step()
        with torch.no_grad():
            stepper.step()
        for mine, theirs in zip(old.param_groups, new.param_groups, strict=True):
            for name, p, q in zip(mine["param_names"], mine["params"], theirs["params"], strict=True):
                pairs = {"weight": (p, q)} | {
                    key: (value, new.state[q][key]) for key, value in old.state[p].items() if isinstance(value, Tensor)
                }
                found += [
                    f"step {step}, {key} of {name}"
                    for key, pair in pairs.items()
                    if not torch.equal(*(local_if_any(t) for t in pair))
                ]
                assert set(old.state[p]) == set(new.state[q])
    return found


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_step_has_the_bits_of_the_present_core(layout: str, world4: RankPool) -> None:
    assert world4.run(_unlike, layout, {}) == [[]] * 4


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "tp x dp", "mcore buffers"])
def test_a_step_of_two_ranks_has_the_bits_of_the_present_core(layout: str, world2: RankPool) -> None:
    assert world2.run(_unlike, layout, {}) == [[]] * 2


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (case, layout)
        for case in CASES
        for layout in ("fsdp2", "hsdp", "ep+fsdp", "fsdp2+tp", "mcore buffers")
        # the Gram route sums an owner's part first, and the two planners choose other owners on these
        if case != "gram" or layout not in ("ep+fsdp", "fsdp2+tp")
    ],
)
def test_options_have_the_bits_of_the_present_core(case: str, layout: str, world4: RankPool) -> None:
    dtype = torch.bfloat16 if case == "rounded weights" else torch.float32
    assert world4.run(_unlike, layout, CASES[case], dtype) == [[]] * 4


@pytest.mark.parametrize("variant", [None, "normuon+hyperball"])
@pytest.mark.parametrize("layout", ["megatron-fsdp", "megatron-fsdp hfsdp", "megatron-fsdp+tp"])
def test_ranks_that_store_nothing_need_no_gradient(layout: str, variant: str | None, world4: RankPool) -> None:
    """Megatron-FSDP gives empty shards none; what the others have, they hear in the vote."""
    options = {"variant": variant, "weight_decay": 0.0}
    assert world4.run(_unlike, layout, options, torch.float32, True) == [[]] * 4


def _one_lacks(layout: str) -> str:
    """What is raised where the last rank that stores any of a matrix has no gradient; nothing has changed."""
    _, new = _twins(layout, {}, torch.float32)
    stepper, rank = _stepper(new), dist.get_rank()
    _set_gradients((new,), layout, 0, torch.float32, lacking=True)
    group = next(g for g in new.param_groups if g["param_names"] == ["square"])
    storing: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(storing, local_if_any(group["params"][0]).numel() > 0)
    if rank == max(r for r, some in enumerate(storing) if some):
        group["params"][0].grad = None
    before = [local_if_any(p).clone() for g in new.param_groups for p in g["params"]]
    with torch.no_grad(), pytest.raises(Refused) as refused:
        stepper.step()
    after = [local_if_any(p) for g in new.param_groups for p in g["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(new.state.values())
    return str(refused.value)


def test_a_rank_that_stores_some_and_lacks_the_gradient_is_named(world4: RankPool) -> None:
    everyone = world4.run(_one_lacks, "megatron-fsdp")
    assert len(set(everyone)) == 1
    with pytest.raises(ValueError, match=r"square: .*have no gradient.* have a gradient|square: .*a gradient.*no grad"):
        raise ValueError(everyone[0])
