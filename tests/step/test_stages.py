"""Tests of the pre- and post-processing stages of variants (such as NorMuon): in a single process and on simulated
ranks, weights and state match a direct computation on full tensors bitwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from dense_step import assert_like_the_formula
from simulated import (
    EACH,
    LAYOUTS,
    OPTIONS,
    REPLICATED,
    SMALL,
    VIEWS,
    SimulatedRanks,
    group_of,
    in_both,
    in_turn,
    planned,
    sharded,
)

from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.options import MuonConfig
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Kept, Plan, Policy, Spec
from shardmuon.plan.planner import make_plan
from shardmuon.plan.program import BufferPlace, Load
from shardmuon.step import bucket
from shardmuon.step import stages as weights_module
from shardmuon.step.stages import WeightSet
from shardmuon.step.update import KeptSide
from shardmuon.variants import VARIANTS, stages_of

STAGED = [name for name, row in VARIANTS.items() if row]
ORDERS = [names for count in range(1, len(STAGED) + 1) for names in itertools.permutations(STAGED, count)]
# Different orders of the same variant names may result in the same pre- and post-processing stages. JOINED maps each
# tuple of stages to the first order that results in it.
JOINED = {stages_of({"variant": "+".join(names)}): "+".join(names) for names in reversed(ORDERS)}


def given(variant: str | None) -> dict[str, Any]:
    """Return the options of a parameter group with the given variant. Hyperball does not support weight decay, so
    variants with Hyperball get a weight decay of 0."""
    options: dict[str, Any] = {"variant": variant}
    return {**options, "weight_decay": 0.0} if variant and "hyperball" in variant else options


@pytest.mark.parametrize(("variant", "layout"), in_both(in_turn(JOINED.values(), every=4)))
def test_simulated_ranks_give_the_bits_of_one_process(layout: str, variant: str) -> None:
    compare(layout, [variant])


@pytest.mark.parametrize(
    ("layout", "policy"), in_both([*((name, SMALL) for name in LAYOUTS), *((name, EACH) for name in REPLICATED)])
)
def test_variants_side_by_side_have_their_own_rules(
    layout: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups with different variants, and one group with plain Muon, share a plan. Each group must match a direct
    computation of its own variant. The number of elements summed at a time (`_PART`) is set to a small value, so that
    each weight norm is summed in many parts."""
    monkeypatch.setattr(weights_module, "_PART", 16)
    compare(layout, [None, *JOINED.values()], policy)


@pytest.mark.parametrize(
    ("method", "dtype"), [("standard", torch.float16), ("standard", torch.float64), ("gram", None)]
)
@pytest.mark.parametrize("layout", ["fsdp", "no grid"])
def test_stages_stand_around_every_method(layout: str, method: Any, dtype: torch.dtype | None) -> None:
    compare(layout, [None, "muon_eq+normuon", "muon_eq+normuon+hyperball"], method=method, ns_dtype=dtype)


def compare(layout: str, variants: Sequence[str | None], policy: Policy = SMALL, **whole_options: Any) -> None:
    dtypes = [(dtype, dtype) for dtype in (torch.float32, torch.bfloat16)]
    options = [given(variant) for variant in variants]
    # Two steps are enough: the first one creates the state of the stages, and the second one uses it. Tests in
    # test_stores.py and test_sequences.py cover parameters that are updated again after a pause.
    assert_like_the_formula(VIEWS, OPTIONS, layout, options, dtypes, copies=2, policy=policy, steps=2, **whole_options)


# ------------------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32, torch.float64])
def test_kept_numbers_come_over_a_wire_of_any_dtype_bit_for_bit(wire: torch.dtype) -> None:
    """The state of a post-processing stage has five numbers for one parameter and eight for another, including NaNs
    with payload bits. The state is written from strided tensors to an odd offset of an exchange buffer, and read back
    into contiguous tensors. Neither the bits of the state nor the rest of the buffer may change."""
    views = [matrix_view((size, 3)).kept([size]) for size in (5, 8)]
    layouts = [ParamLayout.replicated(view, (0, 1)) for view in views]
    specs = [Spec("p", layout, ("",), (1,), (4,), kept=(Kept(layout, True),)) for layout in layouts]
    plan, loads, at = Plan(tuple(specs), (), ()), [], 3
    for param, layout in enumerate(layouts):
        loads.append(Load(param, layout.tiles[0][0][0], BufferPlace(at, (1,)), 0))
        at += math.ceil(layout.view.shape[1] * 4 / wire.itemsize)
    bits = [torch.randint(-(2**31), 2**31 - 1, view.shape, dtype=torch.int32) for view in views]
    bits[0][0, :3] = torch.tensor([0x7F800001, -1, 0x7FC12345], dtype=torch.int32)
    told = [[torch.stack([b.view(torch.float32)] * 2, -1)[..., 0]] for b in bits]
    heard = [[torch.zeros(view.shape)] for view in views]
    buffer = torch.full((at + 1,), 7.0, dtype=wire)
    side = KeptSide(plan, loads)
    side.tell(told, buffer)
    assert (buffer[:3] == 7).all() and buffer[-1] == 7
    side.hear(buffer, heard)
    assert all(torch.equal(one[0].view(torch.int32), b) for one, b in zip(heard, bits, strict=True))


def test_results_take_the_place_of_what_was_fed_only_in_the_dtype_that_one_matrix_has() -> None:
    program = SimpleNamespace(batches=[SimpleNamespace(items=[0], shape=(2, 4, 4), stride=16, start=0)])
    plan = SimpleNamespace(items=[SimpleNamespace(param=0)])
    sides = [SimpleNamespace(of=lambda kept: [torch.zeros(4), torch.zeros(4)])]

    def overwrites(variant: str | None, products: torch.dtype) -> bool:
        stages = stages_of({"variant": variant})
        bound: Any = SimpleNamespace(program=program, plan=plan, choices=[Choice("standard", products)], kept=[sides])
        work: Any = SimpleNamespace(settings=[SimpleNamespace(stages=stages, coefficients=())], kept=[])
        with mock.patch.object(bucket, "orthogonalize", side_effect=lambda x, *_, **__: x) as called:
            bucket._orthogonalize(bound, work, None, torch.randn(32, dtype=torch.bfloat16))
        return bool(called.call_args.kwargs["overwrite"])

    assert overwrites("normuon", torch.bfloat16)
    assert not overwrites("normuon", torch.float16)
    assert overwrites(None, torch.float16)


def test_matrices_of_zeros_are_said_by_the_first_rank_and_keep_the_norm_of_their_first_step() -> None:
    """One expert of a stack and one other matrix are zero, and all shards are replicated. Only the first of the four
    ranks must warn about the zero matrices. Later steps must keep the weight norms stored in the first step."""
    views = [matrix_view((3, 4, 6), view="stack"), matrix_view((8, 5)), matrix_view((8, 5))]
    weights = [torch.randn(view.shape) for view in views]
    weights[0][1], weights[2][:] = 0, 0
    group = group_of(**given("hyperball"))
    layouts = [sharded(view, [(1, 2), (4, 5)], 1) for view in views]
    ranks = SimulatedRanks(planned(layouts, [group] * 3, MuonConfig("standard", torch.float32)), weights)
    ranks.step([torch.randn(view.shape) for view in views], [group] * 3)
    with pytest.warns(UserWarning, match=r"^p0\[1\], p2: zero before the first step"):
        ranks.watches[1].report()
    for rank in (2, 4, 5):
        # Only rank 1 may warn about all-zero matrices. On the other ranks, a warning from `report` would fail the test,
        # because pytest turns warnings into errors.
        ranks.watches[rank].report()
    first = [{rank: kept.clone() for rank, kept in of_param[0].items()} for of_param in ranks.kept]
    assert all((kept > 0).all() for of_param in first for kept in of_param.values())
    ranks.step([torch.randn(view.shape) for view in views], [group] * 3)
    for of_param, before in zip(ranks.kept, first, strict=True):
        assert all(torch.equal(of_param[0][rank], kept) for rank, kept in before.items())


def test_a_norm_that_was_loaded_is_held_although_the_weights_have_another() -> None:
    view = matrix_view((8, 5))
    group = group_of(**given("hyperball"))
    plan = planned([sharded(view, [(1, 2), (4, 5)], 1)], [group], MuonConfig("standard", torch.float32))
    ranks = SimulatedRanks(plan, [torch.randn(view.shape)])
    for kept in ranks.kept[0][0].values():
        kept.fill_(0.25)
    # The first step must keep the weight norms that were loaded into Hyperball's state, because a step computes weight
    # norms only if none are stored.
    ranks.step([torch.randn(view.shape)], [group])
    assert all(torch.equal(kept, torch.full((1, 1), 0.25)) for kept in ranks.kept[0][0].values())


def test_sets_are_summed_in_one_order_and_apart_by_kind() -> None:
    """Weight sets must be sorted by their number of ranks, and must not mix device types. Parameters whose variant has
    no stage that acts on weights must be left out."""
    layouts = [LAYOUTS[name](VIEWS["plain"]()) for name in ("fsdp", "pair", "fsdp", "one", "fsdp", "strided")]
    group = group_of(**given("hyperball"))
    plan = planned(layouts, [group] * 6)
    specs = [spec._replace(kind="cuda" if i == 4 else "cpu") for i, spec in enumerate(plan.specs)]
    stages = {i: stages_of(group) for i in (5, 4, 3, 2, 1, 0)}
    stages[2] = stages_of({"variant": "normuon"})
    plan = make_plan(specs, Policy())
    assert [one.ranks for one in WeightSet.of_rank(plan, {i: stages[i] for i in (5, 4, 0, 2)}, 0, [()] * 6)] == [
        (0, 1),
        (0, 1, 2, 3),
        (0, 1, 2, 3),
    ]
    assert [one.ranks for one in WeightSet.of_rank(plan, {i: stages[i] for i in (3, 0)}, 2, [()] * 6)] == [
        (2,),
        (0, 1, 2, 3),
    ]
