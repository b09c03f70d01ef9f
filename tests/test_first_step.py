"""Tests that the most likely mistakes of new users cause a helpful error or warning."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardmuon import Muon, clip_grad_norm_, param_groups
from shardmuon.testing.pool import RankPool

# Importing torch.distributed.optim compiles functional optimizers with torch.jit.script. This function is deprecated,
# so the import raises a warning, which is ignored here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def _model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, 12))


def _backward(model: nn.Module, seed: int) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def _heard(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(item.message) for item in caught if "shardmuon" in str(item.message) or item.category is UserWarning]


# ------------------------------------------------------------------------------------------------ what is given


def _weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]


def _partition() -> Muon:
    """Return an optimizer for a parameter that DeepSpeed's `zero.Init` has partitioned. Such a parameter is an empty
    placeholder, so no plan can be made."""
    param = nn.Parameter(torch.zeros(0))
    param.ds_shape = torch.Size((6, 4))  # type: ignore[attr-defined]
    return Muon([("layer.w", param)], lr=0.1)


PASS_THE_MODEL = r"(?s)1 dim\(s\).*cannot be a matrix.*Muon\(model, \.\.\.\).*\{'model': model"
IN_PARTS = r"layer\.w: ZeRO 3 keeps it in partitions.*deepspeed\.initialize\("
GIVEN: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "parameters": (lambda: Muon(_model().parameters(), lr=1e-3), ValueError, PASS_THE_MODEL),
    "named parameters": (lambda: Muon(list(_model().named_parameters()), lr=1e-3), ValueError, PASS_THE_MODEL),
    "decay groups of a trainer": (
        lambda: Muon([{"params": list(_model().parameters()), "weight_decay": 0.1}], lr=1e-3),
        ValueError,
        PASS_THE_MODEL,
    ),
    "a group that says that it holds matrices": (
        lambda: Muon([{"params": [nn.Parameter(torch.zeros(4))], "use_muon": True}], lr=1e-3),
        ValueError,
        r"^(?!.*model).*cannot be a matrix",
    ),
    "a set": (
        lambda: Muon({*_weights()}, lr=1e-3),
        TypeError,
        r"give a list, or model.named_parameters\(\), not a set",
    ),
    "a frozen set": (lambda: Muon(frozenset(_weights()), lr=1e-3), TypeError, "process: give a list, or .*, not a set"),
    "a weak set": (lambda: Muon(WeakSet(_weights()), lr=1e-3), TypeError, "process: give a list, or .*, not a set"),
    "a group of a set": (
        lambda: Muon([{"params": {*_weights()}}], lr=1e-3),
        TypeError,
        "process: give a list, not a set",
    ),
    "a set added": (
        lambda: Muon(_weights(), lr=1e-3).add_param_group({"params": {*_weights()}}),
        TypeError,
        "process: give a list, not a set",
    ),
    "a set to clip": (
        lambda: clip_grad_norm_({*_weights()}, 1.0),
        TypeError,
        "process: give the optimizer, or a list, not a set",
    ),
    "a set of overrides": (
        lambda: param_groups(_model(), lr=1e-3, overrides={("0.weight", "adamw"), ("*", "muon")}),  # type: ignore[arg-type]
        TypeError,
        "give a dict, or a list of pairs, not a set",
    ),
    "a set of sizes": (
        lambda: param_groups(_model(), lr=1e-3, overrides={"0.weight": {"split_sizes": {4, 12}}}),
        ValueError,
        r"0\.weight .*has no order. Write how many",
    ),
    "partitions of ZeRO-3 to plan": (lambda: _partition().prepare(), ValueError, IN_PARTS),
    "partitions of ZeRO-3 to clip": (lambda: clip_grad_norm_(_partition(), 1.0), ValueError, IN_PARTS),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_likely_given_by_mistake_is_refused_with_what_to_write(name: str) -> None:
    """If a user makes a likely mistake, such as passing `model.parameters()`, the error must say what to write instead.
    Sets of parameters or options are rejected, too, because the order of a set differs between processes."""
    act, kind, says = GIVEN[name]
    with pytest.raises(kind, match=says):
        act()


def test_what_has_an_order_is_taken_and_keeps_it() -> None:
    held = _weights()
    by_name = {str(i): p for i, p in enumerate(held)}
    for given in (by_name.values(), dict.fromkeys(held).keys(), (p for p in held), by_name.items()):
        assert [id(p) for p in Muon(given, lr=1e-3).param_groups[0]["params"]] == [id(p) for p in held]
    held[1].grad = torch.ones_like(held[1])
    assert float(clip_grad_norm_(by_name.values(), 1.0)) == 4.0


@pytest.mark.parametrize("lr", [3e-4, 1e-3])
def test_adamws_rate_with_the_default_scale_warns_and_each_advice_ends_it(lr: float) -> None:
    with pytest.warns(
        UserWarning, match='write adjust_lr_fn="match_rms_adamw"; .* write lr=0.03; .*"original"'
    ) as told:
        Muon(_model(), lr=lr)
    assert [Path(warning.filename).name for warning in told] == ["test_first_step.py"], "once, at the caller's line"
    for ends in ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust_lr_fn": "original"}, {"lr": 0.03}):
        Muon(_model(), **{"lr": lr, **ends})


def test_rates_that_a_schedule_or_groups_give_do_not_warn() -> None:
    for rate in (0.0, torch.tensor(1e-4)):
        Muon(_model(), lr=rate)
    Muon(param_groups(_model(), lr=1e-4), lr=1e-4)
    for group in (optimizer := Muon(_model(), lr=0.03)).param_groups:
        group["lr"] = 1e-5
    optimizer.add_param_group({"params": [("w", nn.Parameter(torch.ones(2, 2)))], "lr": 1e-5})


def test_a_sparse_embedding_is_stepped_by_an_optimizer_of_its_own() -> None:
    """Muon rejects sparse gradients. With a separate optimizer for the embedding, the other parameters train as in a
    model without the embedding."""
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 16), nn.Linear(16, 8))
    refused = Muon(model, lr=0.03)
    model(torch.arange(4)).square().sum().backward()
    with pytest.raises(ValueError, match=r"0\.weight: its gradient is sparse .*set requires_grad to False while Muon"):
        refused.step()
    model[0].requires_grad_(False)
    optimizer = Muon(model, lr=0.03)
    model[0].requires_grad_(True)
    plain = Muon((twin := copy.deepcopy(model))[1:], lr=0.03)
    for p, q in zip(model[1:].parameters(), twin[1:].parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    before = model[0].weight.detach().clone()
    own = torch.optim.SparseAdam(model[0].parameters(), lr=0.01)
    for step in (optimizer.step, own.step, plain.step):
        step()
    assert (model[0].weight != before).any(dim=1).tolist() == [True] * 4 + [False] * 6
    assert all(map(torch.equal, model[1:].parameters(), twin[1:].parameters()))


# ------------------------------------------------------------------------------------------- a step for nothing


def test_steps_without_any_gradient_are_told_until_one_has_some() -> None:
    model = _model()
    optimizer = Muon(model, lr=0.02)
    (heard,) = _heard(optimizer.step)
    assert heard.startswith("no parameter of this optimizer has a gradient, so this step trained nothing")
    _backward(model, 0)
    assert not _heard(optimizer.step)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    assert not _heard(optimizer.step)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    vector = _model()
    vector[1].weight.grad = torch.ones(16)
    assert not _heard(Muon(vector, lr=0.02).step), "gradients of vectors alone are gradients"


def _before_fully_shard() -> tuple[list[str], list[str], list[str]]:
    """Create an optimizer before `fully_shard()`, which replaces the parameters. Return three lists of this rank's
    warnings: from the first step, the second step, and a step of another optimizer. The other optimizer's only
    parameter has no gradient. Its single row is stored on rank 0."""
    optimizer = Muon(model := _model(), lr=0.02)
    fully_shard(model)
    _backward(model, dist.get_rank())
    return (
        _heard(optimizer.step),
        _heard(optimizer.step),
        _heard(Muon(fully_shard(nn.Linear(5, 1, bias=False)).parameters(), lr=0.02).step),
    )


def test_ranks_whose_parameters_were_replaced_are_told_in_each_step(world2: RankPool) -> None:
    for rank, (first, second, of_row) in enumerate(world2.run(_before_fully_shard)):
        assert len(first) == 1 and "make the optimizer after fully_shard()" in first[0] and second == first
        assert of_row == (first if rank == 0 else []), "a rank that stores nothing cannot tell"


# ------------------------------------------------------------------------------- torch's ZeroRedundancyOptimizer


def _zero(options: dict[str, Any]) -> tuple[list[str], bool]:
    """Wrap Muon in ZeroRedundancyOptimizer and take three steps. Return all warnings, and whether the parameters equal
    those of a plain Muon."""
    model, plain = _model(), _model()
    if options:
        with pytest.raises(ValueError, match=r"give it functools\.partial\(Muon, method=\.\.\.\)"):
            ZeroRedundancyOptimizer([model[0].weight], optimizer_class=Muon, lr=0.03, **options)
    mine, theirs = (param_groups(one, lr=0.02, adamw_lr=1e-3) for one in (model, plain))
    with pytest.raises(ValueError, match=r"found \d param_names for \d parameters.*or leave param_names out"):
        ZeroRedundancyOptimizer(mine, optimizer_class=Muon, lr=1e-3)
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in mine]
    wrapped, made = DistributedDataParallel(model), list[Any]()
    kind: Any = functools.partial(Muon, **options) if options else Muon
    heard = _heard(lambda: made.append(ZeroRedundancyOptimizer(groups, optimizer_class=kind, lr=1e-3)))
    optimizer, reference = made[0], Muon(theirs, lr=1e-3, **options)
    for step in range(3):
        optimizer.zero_grad()
        _backward(wrapped, 7 * step + dist.get_rank())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        assert not _heard(optimizer.step)
        reference.step()
    optimizer.optim.prepare()
    assert re.search(r"parameter \d of group 0", str(optimizer.optim.plan))
    return heard, all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"method": "torch"}], ids=str)
def test_zero_redundancy_optimizer_without_names_and_with_options(world2: RankPool, options: dict[str, Any]) -> None:
    assert world2.run(_zero, options) == [([], True)] * 2
