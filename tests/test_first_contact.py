"""The likeliest first mistakes of a new user, and what each one is told."""

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

from shardmuon import Muon, Orthogonalizer, clip_grad_norm_, param_groups
from shardmuon.first_step import find_ddp, repeated_text
from shardmuon.testing.pool import RankPool

with warnings.catch_warnings():  # torch's own: the package compiles functional optimizers with torch.jit.script
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    from torch.distributed.optim.post_localSGD_optimizer import averagers


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 12))


def _large_model() -> nn.Sequential:
    """Just large enough for a search of who wraps it."""
    return nn.Sequential(nn.Linear(8, 2**16), nn.Linear(2**16, 8), nn.Linear(8, 12))


def _backward(model: nn.Module, seed: int) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def _heard(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(item.message) for item in caught if "shardmuon" in str(item.message) or item.category is UserWarning]


# ------------------------------------------------------------------------------------------------ what is given


@pytest.mark.parametrize(
    "params",
    [
        lambda model: model.parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
    ],
    ids=["parameters", "named parameters", "decay groups of a trainer"],
)
def test_all_parameters_of_a_model_are_refused_with_what_to_write(params: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError, match=r"(?s)cannot be a matrix.*Muon\(model, \.\.\.\).*\{'model': model") as error:
        Muon(params(_model()), lr=1e-3)
    assert "1 dim(s)" in str(error.value)


def test_a_group_that_says_that_it_holds_matrices_is_not_told_to_pass_the_model() -> None:
    with pytest.raises(ValueError, match="cannot be a matrix") as error:
        Muon([{"params": [nn.Parameter(torch.zeros(4))], "use_muon": True}], lr=1e-3)
    assert "model" not in str(error.value)


def _weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]


@pytest.mark.parametrize("kind", [set, frozenset, WeakSet], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("give", "write"),
    [
        (lambda made: Muon(made, lr=1e-3), "a list, or model.named_parameters()"),
        (lambda made: Muon([{"params": made}], lr=1e-3), "a list"),
        (lambda made: Muon(_weights(), lr=1e-3).add_param_group({"params": made}), "a list"),
        (lambda made: clip_grad_norm_(made, 1.0), "the optimizer, or a list"),
    ],
    ids=["Muon", "group", "add_param_group", "clip_grad_norm_"],
)
def test_sets_of_parameters_are_refused_since_each_rank_orders_them_otherwise(
    kind: Callable[[Any], Any], give: Callable[[Any], Any], write: str
) -> None:
    held = _weights()
    with pytest.raises(TypeError, match=re.escape(f"process: give {write}, not a set")):
        give(kind(held))


def test_a_set_of_overrides_is_refused_since_the_first_that_matches_wins() -> None:
    with pytest.raises(TypeError, match="give a dict, or a list of pairs, not a set"):
        param_groups(_model(), lr=1e-3, overrides={("0.weight", "adamw"), ("*", "muon")})  # type: ignore[arg-type]
    split = {"0.weight": {"split_sizes": {4, 12}}}
    with pytest.raises(ValueError, match=r"0\.weight .*has no order, and blocks lie one after the other"):
        param_groups(_model(), lr=1e-3, overrides=split)


def test_what_has_an_order_is_taken_and_keeps_it() -> None:
    held = _weights()
    by_name = {str(i): p for i, p in enumerate(held)}
    for given in (by_name.values(), dict.fromkeys(held).keys(), (p for p in held), by_name.items()):
        taken = Muon(given, lr=1e-3).param_groups[0]["params"]
        assert [id(p) for p in taken] == [id(p) for p in held]
    held[1].grad = torch.ones_like(held[1])
    assert float(clip_grad_norm_(by_name.values(), 1.0)) == 4.0


def test_the_group_of_new_group_on_a_rank_that_it_leaves_out_is_named() -> None:
    with pytest.raises(ValueError, match=r"process_group=-100 is what new_group\(\) gives a rank that it leaves out"):
        Muon([nn.Parameter(torch.zeros(4, 4))], lr=1e-3, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match=r"process_group='world' is no process group\. Give one of torch.distributed"):
        Muon([nn.Parameter(torch.zeros(4, 4))], lr=1e-3, process_group="world")


# ------------------------------------------------------------------------------------------- a step for nothing


def test_steps_without_any_gradient_are_said_once() -> None:
    model = _model()
    optimizer = Muon(model, lr=0.02)
    (heard,) = _heard(lambda: (optimizer.step(), optimizer.step()))
    assert heard.startswith("no parameter of this optimizer has a gradient, so this step trained nothing")
    _backward(model, 0)
    assert not _heard(optimizer.step)


def test_a_step_without_gradients_after_others_is_nobodys_business() -> None:
    model = _model()
    optimizer = Muon(model, lr=0.02)
    _backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    assert not _heard(optimizer.step)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_gradients_of_vectors_alone_are_gradients() -> None:
    model = _model()
    optimizer = Muon(model, lr=0.02)
    model[1].weight.grad = torch.ones(16)
    optimizer.step()


def _made_before_sharding() -> list[str]:
    model = _model()
    optimizer = Muon(model, lr=0.02)
    fully_shard(model)
    _backward(model, 0)
    return _heard(lambda: (optimizer.step(), optimizer.step()))


def test_an_optimizer_made_before_fully_shard_says_on_every_rank_that_it_trains_nothing(world2: RankPool) -> None:
    for (heard,) in world2.run(_made_before_sharding):
        assert "make the optimizer after fully_shard()" in heard


# ------------------------------------------------------------------------------------------ DDP, and who shares


def _under_ddp(options: dict[str, Any], **for_group: Any) -> tuple[list[str], list[str]]:
    model = _large_model()
    wrapped = DistributedDataParallel(model)
    if options.get("process_group") == "world":
        options = {**options, "process_group": dist.group.WORLD}
    optimizer = Muon([{**group, **for_group} for group in param_groups(model, lr=0.02)], lr=0.02, **options)
    _backward(wrapped, dist.get_rank())
    return _heard(optimizer.step), _heard(optimizer.step)


def test_ddp_whose_ranks_repeat_the_work_is_said_once_on_one_rank(world2: RankPool) -> None:
    first, second = world2.run(_under_ddp, {})
    ((heard,), again) = first
    assert heard == (
        "DistributedDataParallel keeps this optimizer's matrices equal on 2 ranks, and each of them orthogonalizes "
        "all. Share the work: Muon(..., process_group=torch.distributed.group.WORLD)"
    )
    assert not again and second == ([], [])


@pytest.mark.parametrize("told", [{"process_group": "world"}, {"rank_local": True}], ids=str)
def test_ddp_is_not_mentioned_to_an_optimizer_that_was_told(world2: RankPool, told: dict[str, Any]) -> None:
    options = {key: value for key, value in told.items() if key == "process_group"}
    of_group = {key: value for key, value in told.items() if key != "process_group"}
    for heard in world2.run(_under_ddp_told, options, of_group):
        assert heard == ([], [])


def _under_ddp_told(options: dict[str, Any], of_group: dict[str, Any]) -> tuple[list[str], list[str]]:
    return _under_ddp(options, **of_group)


def _made_before_init() -> str:
    model = _large_model()
    group = dist.new_group()
    wrapped = DistributedDataParallel(model, process_group=group)
    found = find_ddp(object(), model.parameters())
    assert found is wrapped
    assert find_ddp(object(), _model().parameters()) is None
    return repeated_text(found, made_alone=True)


def test_the_ddp_line_names_the_group_and_the_order(world2: RankPool) -> None:
    for text in world2.run(_made_before_init):
        assert "process_group=the process group that DistributedDataParallel was given" in text
        assert text.endswith("before it, torch.distributed.group.WORLD is None")


@pytest.mark.parametrize(
    "act", [Muon.prepare, lambda optimizer: clip_grad_norm_(optimizer, 1.0)], ids=["prepare", "clip_grad_norm_"]
)
def test_partitions_of_zero_3_that_are_stepped_without_deepspeed_are_refused(act: Callable[[Muon], object]) -> None:
    """`zero.Init` leaves a parameter without elements, which would be a matrix of nothing."""
    param = nn.Parameter(torch.zeros(0))
    param.ds_shape = torch.Size((6, 4))  # type: ignore[attr-defined]
    optimizer = Muon([("layer.w", param)], lr=0.1)
    with pytest.raises(ValueError, match=r"layer\.w: ZeRO 3 keeps it in partitions.*deepspeed\.initialize\("):
        act(optimizer)


def _local_sgd() -> list[str]:
    model = _large_model()
    wrapped = DistributedDataParallel(model)
    averager = averagers.PeriodicModelAverager(period=4, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(Muon(model, lr=0.02), averager)
    _backward(wrapped, dist.get_rank())
    return _heard(optimizer.step)


def test_local_sgd_is_not_told_to_share_the_work_of_unequal_ranks(world2: RankPool) -> None:
    assert world2.run(_local_sgd) == [[], []]


# ------------------------------------------------------------------------------- torch's ZeroRedundancyOptimizer


def _zero(named: bool) -> tuple[list[str], list[str], bool, bool]:
    """Compare parameters after three steps with those of one optimizer of all of them."""
    model, plain = _model(), _model()
    groups = param_groups(model, lr=0.02, adamw_lr=1e-3)
    if not named:
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    wrapped = DistributedDataParallel(model)
    made: list[Any] = []
    made_with = _heard(lambda: made.append(ZeroRedundancyOptimizer(groups, optimizer_class=Muon, lr=1e-3)))
    optimizer = made[0]
    reference = Muon(param_groups(plain, lr=0.02, adamw_lr=1e-3), lr=1e-3)
    heard: list[str] = []
    for step in range(3):
        optimizer.zero_grad()
        _backward(wrapped, 7 * step + dist.get_rank())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        heard += _heard(optimizer.step)
        reference.step()
    equal = all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    for group in optimizer.optim.param_groups:  # it copies the names of all back into its part
        assert not named or "param_names" in group
    optimizer.optim.prepare()
    rows = str(optimizer.optim.plan)
    return made_with, heard, equal, bool(re.search(r"parameter \d of group 0", rows))


@pytest.mark.parametrize("named", [True, False], ids=["named", "nameless"])
def test_zero_redundancy_optimizer_with_the_names_of_all(world2: RankPool, named: bool) -> None:
    for made_with, heard, equal, numbered in world2.run(_zero, named):
        assert not heard and equal and numbered
        assert bool(made_with) == named
        assert all("No parameter keeps its name" in text for text in made_with)


@pytest.mark.parametrize("lr", [3e-4, 1e-3])
def test_adamws_rate_with_the_default_scale_warns_and_each_advice_ends_it(lr: float) -> None:
    with pytest.warns(
        UserWarning, match='write adjust_lr_fn="match_rms_adamw"; .* write lr=0.03; .*"original"'
    ) as told:
        Muon(_model(), lr=lr)
    assert [Path(warning.filename).name for warning in told] == ["test_first_contact.py"], "once, at the caller's line"
    Muon(_model(), lr=lr, adjust_lr_fn="match_rms_adamw")
    Muon(_model(), lr=lr, adjust_lr_fn="original")
    Muon(_model(), lr=0.03)


def test_rates_that_a_schedule_or_groups_give_do_not_warn() -> None:
    Muon(_model(), lr=0.0)
    Muon(_model(), lr=torch.tensor(1e-4))
    Muon(param_groups(_model(), lr=1e-4), lr=1e-4)
    for group in (optimizer := Muon(_model(), lr=0.03)).param_groups:
        group["lr"] = 1e-5
    optimizer.add_param_group({"params": [("w", nn.Parameter(torch.ones(2, 2)))], "lr": 1e-5})


def test_a_sparse_embedding_is_stepped_by_an_optimizer_of_its_own() -> None:
    """The rest trains as without the embedding, as the message says."""
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 16), nn.Linear(16, 8))
    tokens = torch.arange(4)
    refused = Muon(model, lr=0.03)
    model(tokens).square().sum().backward()
    with pytest.raises(ValueError, match=r"0\.weight: its gradient is sparse .*set requires_grad to False while Muon"):
        refused.step()
    model[0].requires_grad_(False)
    optimizer = Muon(model, lr=0.03)
    model[0].requires_grad_(True)
    own = torch.optim.SparseAdam(model[0].parameters(), lr=0.01)
    plain = Muon((twin := copy.deepcopy(model))[1:], lr=0.03)
    for p, q in zip(model[1:].parameters(), twin[1:].parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    before = model[0].weight.detach().clone()
    optimizer.step()
    own.step()
    plain.step()
    assert (model[0].weight != before).any(dim=1).tolist() == [True] * 4 + [False] * 6
    assert all(map(torch.equal, model[1:].parameters(), twin[1:].parameters()))


def _zero_with_an_orthogonalizer() -> list[bool]:
    """Weights equal to those of one optimizer, made as the message says."""
    model, plain = _model(), _model()
    told = Orthogonalizer(method="torch")
    params = [p for p in model.parameters() if p.ndim == 2]
    with pytest.raises(ValueError, match=r"give it functools\.partial\(Muon, orthogonalizer=\.\.\.\)"):
        ZeroRedundancyOptimizer(params, optimizer_class=Muon, lr=0.03, orthogonalizer=told)
    made = functools.partial(Muon, orthogonalizer=told)
    optimizer = ZeroRedundancyOptimizer(params, optimizer_class=made, lr=0.03)  # type: ignore[arg-type]
    others = [p for p in plain.parameters() if p.ndim == 2]
    for at, (p, q) in enumerate(zip(params, others, strict=True)):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(at))
        q.grad = p.grad.clone()
    optimizer.step()
    Muon(others, lr=0.03, orthogonalizer=told).step()
    return [torch.equal(p, q) for p, q in zip(params, others, strict=True)]


def test_zero_redundancy_optimizer_with_an_option_of_the_whole_optimizer(world2: RankPool) -> None:
    assert world2.run(_zero_with_an_orthogonalizer) == [[True] * 3] * 2
