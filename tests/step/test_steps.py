"""Steps of `Muon` on real ranks beside AdamW's vectors, with options together, and where ranks lack gradients.

Every layout with plain options: test_equality.py. Options on all layouts: test_variants_layouts.py, test_momentum.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated import in_turn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardmuon import Exchange, Muon, Storage
from shardmuon._torch import local_if_any
from shardmuon.comm import groups
from shardmuon.testing import RankPool
from shardmuon.testing.compare import rows_stored
from shardmuon.testing.layouts import LAYOUTS, PARAMS, parameters
from shardmuon.variants import KEPT_KEYS

VECTORS = {"bias": (40,), "scale": (7,)}  # AdamW has them
MISSING = {1: ("wide", "experts", "bias"), 0: ("square",)}  # step -> have no gradient
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stages": {"variant": "muon_eq+normuon", "beta2": 0.8},
    "norms": {"variant": "normuon+hyperball", "weight_decay": 0.0},
    "bf16 momentum": {"storage": Storage(momentum_dtype=torch.bfloat16)},
    "rounded weights": {"storage": Storage(stochastic_rounding=True, momentum_dtype=torch.float32)},
    "wide wire": {"exchange": Exchange(dtype=torch.float32, bucket_bytes=3000), "nesterov": False},
    "l2": {"weight_decay_mode": "l2", "ns_coefficients": "polar_express", "adjust_lr_fn": "match_rms_adamw"},
}


def _drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(case.shape, generator=generator).to(dtype) for name, case in PARAMS.items()} | {
        name: torch.randn(shape, generator=generator) for name, shape in VECTORS.items()
    }


def _placed(layout: str, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Place tensors as a layout stores them; vectors whole on every rank."""
    row, world = LAYOUTS[layout], dist.get_world_size()
    return row.build({name: full[name] for name in PARAMS}, row.mesh(world)) | {n: full[n].clone() for n in VECTORS}


def _optimizer(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> Muon:
    groups: list[dict[str, Any]] = [{"params": [(n, params[n])], **case.options} for n, case in PARAMS.items()]
    vectors = [(name, params[name]) for name in VECTORS]
    options = {"exchange": Exchange(bucket_bytes=3000), **options}
    return Muon([*groups, {"params": vectors, "use_muon": False}], lr=0.02, **options)


def _on_layout(layout: str, options: Mapping[str, Any]) -> tuple[Muon, dict[str, Tensor]]:
    params = parameters(_placed(layout, _drawn(3, options.get("dtype", torch.float32))))
    return _optimizer(params, {**LAYOUTS[layout].options(dist.get_world_size()), **options}), params


def _rate(step: int) -> float:
    return 0.02 / (1 + step)


@cache
def _alone(case: str) -> list[dict[str, dict[str, Tensor]]]:
    """Weight and state of one process by parameter, after each of three steps. Once for all layouts."""
    params = {name: torch.nn.Parameter(t) for name, t in _drawn(3, _dtype(case)).items()}
    optimizer, found = _optimizer(params, CASES[case]), []
    for step in range(3):
        full = _drawn(10 + step, _dtype(case))
        for group in optimizer.param_groups:
            group["lr"] = _rate(step)
        for name, p in params.items():
            p.grad = None if name in MISSING.get(step, ()) else full[name]
        optimizer.step()
        found.append({name: {"weight": p.detach().clone(), **_kept(optimizer, p)} for name, p in params.items()})
    return found


def _kept(optimizer: Muon, p: Tensor) -> dict[str, Tensor]:
    return {key: t.clone() for key, t in optimizer.state[p].items() if isinstance(t, Tensor)}


def _dtype(case: str) -> torch.dtype:
    return torch.bfloat16 if case == "rounded weights" else torch.float32


def _unlike_one_process(layout: str, case: str, lacking: bool = False) -> list[str]:
    """Tensors that this rank stores otherwise than one process after any of three steps; gradients are missing in two.
    `lacking`: so are, on each rank, those of its empty shards."""
    world, start = dist.get_world_size(), _drawn(3, _dtype(case))
    params = parameters(_placed(layout, start))
    ranks = _optimizer(params, {**LAYOUTS[layout].options(world), **CASES[case]})
    elements = {n: torch.arange(t.numel(), dtype=torch.float64).view(t.shape) for n, t in start.items()}
    stored = {n: local_if_any(t).long() for n, t in _placed(layout, elements).items()}
    found = []
    for step in range(3):
        grads, missing = _placed(layout, _drawn(10 + step, _dtype(case))), MISSING.get(step, ())
        for group in ranks.param_groups:
            group["lr"] = _rate(step)
        for name, p in params.items():
            nothing = lacking and not stored[name].numel()
            p.grad = None if name in missing or nothing else grads[name]
        ranks.step()
        for name, p in params.items():
            mine, expected = {"weight": p, **_kept(ranks, p)}, _alone(case)[step][name]
            assert set(mine) == set(expected)
            for key, here in mine.items():
                there = expected[key]
                if key in KEPT_KEYS:
                    there = rows_stored(there, here)
                elif there.dim():
                    there = there.flatten()[stored[name]]
                here = local_if_any(here).detach()
                if not torch.equal(here, there.view(here.shape)):
                    found.append(f"step {step}, {key} of {name}")
    return found


@pytest.mark.parametrize(
    ("case", "layout"),
    in_turn(CASES, ("fsdp2", "hsdp", "ep+fsdp", "fsdp2+tp", "mcore buffers")),
)
def test_options_beside_vectors_have_the_bits_of_one_process(case: str, layout: str, world4: RankPool) -> None:
    """Options keep the bits of one process in small buckets, with gradients missing in some steps."""
    assert world4.run(_unlike_one_process, layout, case) == [[]] * 4


@pytest.mark.parametrize(
    ("layout", "case"), [("megatron-fsdp", "norms"), ("megatron-fsdp hfsdp", "plain"), ("megatron-fsdp+tp", "norms")]
)
def test_ranks_that_store_nothing_need_no_gradient(layout: str, case: str, world4: RankPool) -> None:
    """Megatron-FSDP gives empty shards none; what the others have, they hear in the vote."""
    assert world4.run(_unlike_one_process, layout, case, True) == [[]] * 4


def _one_lacks(layout: str) -> str:
    """Error where the last rank that stores any of a matrix has no gradient; nothing has changed."""
    optimizer, params = _on_layout(layout, {})
    for name, grad in _placed(layout, _drawn(10, torch.float32)).items():
        params[name].grad = grad if name in VECTORS or local_if_any(grad).numel() else None
    storing: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(storing, local_if_any(params["square"]).numel() > 0)
    if dist.get_rank() == max(r for r, some in enumerate(storing) if some):
        params["square"].grad = None
    before = {name: local_if_any(p).detach().clone() for name, p in params.items()}
    with pytest.raises(ValueError, match=r"gradient") as refused:
        optimizer.step()
    assert all(torch.equal(before[name], local_if_any(p)) for name, p in params.items())
    assert not any(optimizer.state.values())
    return str(refused.value)


def test_a_rank_that_stores_some_and_lacks_the_gradient_is_named(world4: RankPool) -> None:
    everyone = world4.run(_one_lacks, "megatron-fsdp")
    assert len(set(everyone)) == 1
    with pytest.raises(ValueError, match=r"square: .*have no gradient.* have a gradient|square: .*a gradient.*no grad"):
        raise ValueError(everyone[0])


# ------------------------------------------------------------------------------------------------------ process groups


def _forget(ranks: tuple[int, ...]) -> None:
    """Let go of the group that another test has made. The number of groups that were made stays: their names differ."""
    made = groups.MADE.setdefault(dist.group.WORLD, groups.Made()).groups
    if ranks in made:
        made[ranks] = made[ranks][0], lambda: None


def _takes_its_group(common: bool) -> bool:
    """True if exchanges use the process group that the optimizer was given. `common`: all of its ranks were."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own = pairs[dist.get_rank() // 2]
    ranks = tuple(dist.get_process_group_ranks(own))
    _forget(ranks)
    params = [torch.nn.Parameter(torch.ones(6, 8)) for _ in range(3)]
    given = own if common or dist.get_rank() % 2 else ranks
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, process_group=given)
    for p in params:
        p.grad = torch.eye(6, 8)
    optimizer.step()
    assert optimizer.traffic.exchanges > 0
    return groups.group_for(ranks) is own


def _takes_the_group_of_its_mesh() -> bool:
    """True if exchanges of DTensors use the process group of their mesh, which has one axis."""
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "within"))["within"]
    ranks = tuple(own.mesh.tolist())
    _forget(ranks)
    params = [torch.nn.Parameter(DTensor.from_local(torch.ones(3, 8), own, [Shard(0)])) for _ in range(3)]
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1)
    for p in params:
        p.grad = DTensor.from_local(torch.eye(3, 8), own, [Shard(0)])
    optimizer.step()
    assert optimizer.traffic.exchanges > 0
    return groups.group_for(ranks) is own.get_group()


def test_exchanges_of_dtensors_use_the_group_of_their_mesh(world4: RankPool) -> None:
    assert world4.run(_takes_the_group_of_its_mesh) == [True] * 4


def test_exchanges_use_a_group_that_all_of_its_ranks_were_given(world4: RankPool) -> None:
    """Exchanges use its communicators and time-out; where one rank was given ranks alone, all of them make another
    group."""
    assert world4.run(_takes_its_group, True) == [True] * 4
    assert world4.run(_takes_its_group, False) == [False] * 4


def _copied_and_unlike() -> str:
    """Error of a deep copy for a replica whose gradient is missing on one rank."""
    params = [torch.nn.Parameter(torch.ones(6, 8)) for _ in range(3)]
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, process_group=dist.group.WORLD)
    made = copy.deepcopy(optimizer)
    for p in made.param_groups[0]["params"]:
        p.grad = torch.eye(6, 8)
    made.step()
    if dist.get_rank() == 1:
        made.param_groups[0]["params"][0].grad = None
    with pytest.raises(ValueError, match=r"w0: ranks \[1\] have no gradient, ranks \[0\] have a gradient") as caught:
        made.step()
    return str(caught.value)


def test_a_deep_copy_shares_work_with_the_ranks_of_its_original(world2: RankPool) -> None:
    first, second = world2.run(_copied_and_unlike)
    assert first == second


def _doubles_on_two_of_three() -> tuple[bool, tuple[int, ...]]:
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    a, b = torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    a.grad, b.grad = torch.randn_like(a), torch.randn_like(b)
    alone = torch.nn.Parameter(a.detach().clone())
    alone.grad = a.grad.clone()
    groups = [{"params": [("a", a)], "process_group": dist.group.WORLD}]
    if dist.get_rank() < 2:
        groups.append({"params": [("b", b)], "process_group": pair})
    together, single = Muon(groups, lr=0.1), Muon([("a", alone)], lr=0.1)
    together.step()
    single.step()
    assert together.plan is not None
    return torch.equal(a, alone), tuple(bucket.itemsize for bucket in together.plan.buckets)


def test_fp64_parameters_of_some_ranks_leave_the_wires_of_others_alone(world3: RankPool) -> None:
    found = world3.run(_doubles_on_two_of_three)
    assert [equal for equal, _ in found] == [True] * 3
    assert found[0][1] == found[1][1]
    assert sorted(found[0][1]) == sorted((*found[2][1], 8)), "a wire is as wide as its parameters ask for"
