"""Variant state, through checkpoints onto other layouts and numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_checkpoint import KEPT, RESUMED_UNTIL, Job, on, snapshot
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardmuon import Muon, checkpoint
from shardmuon.testing import RankPool
from shardmuon.testing.tolerances import assert_bitwise

KEY = "second_moment"
# torch says so whenever one process saves or loads
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, dict[str, Tensor]]:
    job = Job("single", variants=True)
    job.run(range(RESUMED_UNTIL))
    return snapshot(job)


def _run_and_compare(layout: str, expected: Any) -> list[str]:
    job = Job(layout, variants=True)
    job.run(range(RESUMED_UNTIL))
    return job.differences(expected)


@pytest.mark.ranks
@pytest.mark.parametrize("key", KEPT)
def test_the_comparison_sees_one_number_that_is_off(key: str, uninterrupted: Any) -> None:
    name = next(iter(uninterrupted[key]))
    wrong = uninterrupted[key][name].clone()
    wrong[0, -1] *= 1 + 2**-20
    expected = {**uninterrupted, key: {**uninterrupted[key], name: wrong}}
    found = on(4, _run_and_compare, "fsdp2", expected)
    assert {difference for of_rank in found for difference in of_rank} == {f"{key} of {name}"}
    assert name == "experts" or all(found)  # of a stack each rank has its own matrices


def test_state_that_was_made_before_the_first_step_takes_the_norm_of_that_step() -> None:
    """Hyperball's R was the norm after it, another one than without a checkpoint."""
    weights = []
    for made in (False, True):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(6, 4))
        optimizer = Muon([("w", param)], lr=0.02, variant="hyperball", weight_decay=0.0)
        if made:
            optimizer.complete_state()
            optimizer.load_state_dict(optimizer.state_dict())
        for seed in range(2):
            param.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        weights.append(param.detach())
    assert_bitwise(weights[1], weights[0])


def small(variant: str | None, steps: int = 2) -> tuple[nn.Parameter, Muon]:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 4))
    decay = 0.0 if "hyperball" in (variant or "") else 0.1
    optimizer = Muon([("w", param)], lr=0.02, weight_decay=decay, variant=variant)
    for _ in range(steps):
        param.grad = torch.randn(6, 4)
        optimizer.step()
    return param, optimizer


def test_a_state_dict_brings_everything_back_and_takes_its_variant_along() -> None:
    _, first = small("normuon")
    param, second = small(None)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["variant"] == "normuon"
    (kept,) = (first.state[p][KEY] for p in first.state)
    assert_bitwise(second.state[param][KEY], kept)


def test_plain_state_does_not_begin_a_variant_in_silence() -> None:
    _, plain = small(None)
    _, normuon = small("normuon")
    with pytest.raises(ValueError, match=r"group 0: the checkpoint was saved with variant=None, .* 'normuon'"):
        normuon.load_state_dict(plain.state_dict())
    unsaid = plain.state_dict()  # as torch.optim.Muon's, whose groups know no variant
    for group in unsaid["param_groups"]:
        del group["variant"]
    with pytest.raises(ValueError, match=r"w: .* lacks \['second_moment'\], which variant='normuon' keeps"):
        normuon.load_state_dict(unsaid)
    param, first = small(None)
    first.param_groups[0]["variant"] = "normuon"  # what the message says to do
    param.grad = torch.randn(6, 4)
    first.step()
    assert first.state[param][KEY].shape == (1, 6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1, 4), r"a Tensor of shape \(1, 4\), not a tensor of shape \(1, 6\)"),
        (torch.zeros(1, 6, dtype=torch.int64), "not a floating-point tensor"),
        (None, "not a floating-point tensor"),
    ],
)
def test_state_that_does_not_fit_is_refused(value: Any, message: str) -> None:
    _, optimizer = small("normuon")
    saved = optimizer.state_dict()
    saved["state"][0][KEY] = value
    with pytest.raises(ValueError, match=f"w: its second_moment in the checkpoint is .*{message}"):
        optimizer.load_state_dict(saved)


def test_state_that_was_changed_by_hand_is_an_error_before_anything_changes() -> None:
    param, optimizer = small("normuon")
    optimizer.state[param][KEY] = torch.zeros(1, 3)
    before = param.detach().clone()
    param.grad = torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"w: its second_moment is a Tensor of shape \(1, 3\)"):
        optimizer.step()
    assert_bitwise(param.detach(), before)


def test_a_fresh_optimizer_has_zeros_and_export_to_torch_is_refused() -> None:
    _, optimizer = small("normuon", steps=0)
    optimizer.complete_state()
    (state,) = optimizer.state.values()
    assert_bitwise(state[KEY], torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"variant='normuon' is none of those torch\.optim\.Muon has"):
        checkpoint.to_torch_muon(optimizer)


# ------------------------------------------------------------------------------------------------- other libraries


def dion_state(params: dict[str, Tensor], **group: Any) -> dict[str, Any]:
    """State as dion's NorMuon saves it: `momentum` is a sum, `variance_neuron` has one number for each row."""
    state = {
        i: {"momentum": torch.randn(p.shape), "variance_neuron": torch.rand(*p.shape[:-1], 1)}
        for i, p in enumerate(params.values())
    }
    options = {"mu": 0.95, "algorithm": "normuon", "muon_beta2": 0.95, "lr": 0.02, "step": 3, **group}
    return {"state": state, "param_groups": [{**options, "params": list(state), "param_names": list(params)}]}


def test_averages_of_dions_normuon_start_anew_and_its_momentum_does_not() -> None:
    params = {"tall": nn.Parameter(torch.randn(6, 4)), "wide": nn.Parameter(torch.randn(4, 6))}
    saved = dion_state(params)
    optimizer = Muon(list(params.items()), lr=0.02, variant="normuon")
    report = checkpoint.load_foreign(optimizer, saved)
    for number, p in enumerate(params.values()):
        assert_bitwise(optimizer.state[p]["momentum_buffer"], saved["state"][number]["momentum"] * (1 - 0.95))
        assert_bitwise(optimizer.state[p][KEY], torch.zeros(1, 6))
        assert "second_moment starts from zeros" in report.rows[number].conversions
        p.grad = torch.randn_like(p)
    optimizer.step()


def test_normuons_state_is_not_taken_for_muons_nor_the_other_way_round() -> None:
    params = {"w": nn.Parameter(torch.randn(6, 4))}
    with pytest.raises(ValueError, match=r"w: its state is NorMuon's .* Give the optimizer variant='normuon'"):
        checkpoint.load_foreign(Muon(list(params.items()), lr=0.02), dion_state(params))
    saved = dion_state(params, algorithm="muon")
    del saved["state"][0]["variance_neuron"]
    optimizer = Muon(list(params.items()), lr=0.02, variant="normuon")
    report = checkpoint.load_foreign(optimizer, saved)
    assert "second_moment starts from zeros" in report.rows[0].conversions


@pytest.mark.parametrize("variant", ["normuon", "hyperball", "normuon+hyperball"])
def test_what_a_variant_keeps_loads_by_name_and_the_run_goes_on(variant: str) -> None:
    param, first = small(variant)
    other = nn.Parameter(param.detach().clone())
    second = Muon([("w", other)], lr=0.02, weight_decay=first.param_groups[0]["weight_decay"], variant=variant)
    checkpoint.load_foreign(second, first.state_dict())
    for p, optimizer in ((param, first), (other, second)):
        p.grad = torch.ones(6, 4)
        optimizer.step()
    assert_bitwise(other.detach(), param.detach())
    for key, value in first.state[param].items():
        assert_bitwise(second.state[other][key], value)


@pytest.mark.parametrize("shape", [(6, 4), (1, 1)])
def test_normuons_averages_are_never_taken_for_norms(shape: tuple[int, int]) -> None:
    """(1, 1): the two have one shape."""
    param = nn.Parameter(torch.ones(shape))
    first = Muon([("w", param)], lr=0.02, variant="normuon")
    param.grad = torch.ones(shape)
    first.step()
    second = Muon([("w", param)], lr=0.02, variant="normuon+hyperball", weight_decay=0.0)
    (row,) = checkpoint.load_foreign(second, first.state_dict()).rows
    assert row.conversions == ("weight_radius starts from zeros",)
    assert_bitwise(second.state[param][KEY], first.state[param][KEY])
    assert not second.state[param]["weight_radius"].any()


def _on_shards() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    param = nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
    first = Muon([("w", param)], lr=0.02, variant="normuon+hyperball", weight_decay=0.0)
    param.grad = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    first.step()
    second = Muon([("w", param)], lr=0.02, variant="normuon+hyperball", weight_decay=0.0)
    checkpoint.load_foreign(second, first.state_dict())
    for key in KEPT:
        here, there = second.state[param][key], first.state[param][key]
        assert here.placements == there.placements and here is not there
        assert_bitwise(here.to_local(), there.to_local())
    second.step()


def test_what_a_variant_keeps_on_shards_loads_as_it_is_placed(world2: RankPool) -> None:
    world2.run(_on_shards)
