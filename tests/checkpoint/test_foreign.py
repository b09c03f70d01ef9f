"""State of other Muons: what each format means is checked against reimplementations of their update rules here."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardmuon import Muon, Orthogonalizer
from shardmuon.checkpoint import load_foreign, merge_ranks, to_torch_muon
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.tolerances import assert_rounded

SHAPES = {"a": (12, 8), "b": (8, 8), "bias": (8,), "table": (10, 8)}
MUON, ADAMW = ("a", "b"), ("bias", "table")
MU = 0.9


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(t) for name, t in tensors(seed, dtype).items()}


def ours(params: dict[str, nn.Parameter], *, names: bool = True, **options: Any) -> Muon:
    def members(which: Sequence[str]) -> list[Any]:
        return [(n, params[n]) if names else params[n] for n in which]

    return Muon(
        [
            {"params": members(MUON), "momentum": MU},
            {"params": members(ADAMW), "use_muon": False, "betas": (0.8, 0.9), "lr": 0.01, "eps": 1e-8},
        ],
        **{"lr": 0.02, "orthogonalizer": Orthogonalizer(method="torch"), **options},
    )


def set_grads(params: dict[str, nn.Parameter], seed: int) -> None:
    for name, grad in tensors(1000 + seed).items():
        params[name].grad = grad.to(params[name].dtype)


def run(optimizers: Iterable[torch.optim.Optimizer], params: dict[str, nn.Parameter], seeds: Iterable[int]) -> None:
    for seed in seeds:
        set_grads(params, seed)
        for optimizer in optimizers:
            optimizer.step()


def assert_same(a: dict[str, nn.Parameter], b: dict[str, nn.Parameter]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


FP32 = torch.float32
PER_STEP = 4  # roundings of beta * m + (1 - beta) * g in fp32: two factors beside 1 - beta itself, and the sum


def averages(name: str, seeds: Iterable[int], beta: float, power: int = 1, *, size: bool = False) -> Tensor:
    """The exponential average of the gradients (or of their squares), in fp64; with `size` of their absolute values."""
    out = torch.zeros(SHAPES[name], dtype=torch.float64)
    for seed in seeds:
        value = tensors(1000 + seed)[name].double() ** power
        out = beta * out + (1 - beta) * (value.abs() if size else value)
    return out


# --------------------------------------------------------------------------------------- torch, there and back


def torchs(params: dict[str, nn.Parameter]) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    muon = torch.optim.Muon([params[n] for n in MUON], lr=0.02, momentum=MU)
    adamw = torch.optim.AdamW(
        [params[n] for n in ADAMW],
        lr=0.01,
        betas=(0.8, 0.9),
        weight_decay=0.1,
        fused=True,
    )
    return muon, adamw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_exported_goes_on_in_torch_bit_for_bit(dtype: torch.dtype) -> None:
    here = parameters(dtype)
    mine = ours(here)
    run([mine], here, range(3))
    there = {name: nn.Parameter(p.detach().clone()) for name, p in here.items()}
    muon, adamw = (cls([there[n] for n in which], lr=9.0) for cls, which in _TORCH)
    exported = to_torch_muon(mine)
    muon.load_state_dict(exported[0])
    adamw.load_state_dict(exported[1])
    run([mine], here, range(3, 6))
    run([muon, adamw], there, range(3, 6))
    assert_same(here, there)


_TORCH: list[tuple[Callable[..., torch.optim.Optimizer], Sequence[str]]] = [
    (torch.optim.Muon, MUON),
    (torch.optim.AdamW, ADAMW),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_two_optimizers_go_on_here_bit_for_bit(dtype: torch.dtype) -> None:
    there = parameters(dtype)
    muon, adamw = torchs(there)
    run([muon, adamw], there, range(3))
    here = {name: nn.Parameter(p.detach().clone()) for name, p in there.items()}
    mine = ours(here)
    report = load_foreign(mine, [muon.state_dict(), adamw.state_dict()])
    assert [row.name for row in report.rows] == [*MUON, *ADAMW]
    run([mine], here, range(3, 6))
    run([muon, adamw], there, range(3, 6))
    assert_same(here, there)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"adjust_lr_fn": "spectral"}, "group 0: adjust_lr_fn='spectral' is none of those torch.optim.Muon has"),
        ({"extra_scale_factor": 0.5}, "group 0: extra_scale_factor=0.5 is none of"),
        ({"weight_decay_mode": "l2"}, "group 0: weight_decay_mode='l2' is none of"),
        (
            {"ns_coefficients": [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5)]},
            "group 0: torch.optim.Muon has one ns_coefficients triple",
        ),
        ({"num_heads": 2}, "a: torch.optim.Muon takes a 2-D parameter of shape (12, 8) as no or one matrix"),
    ],
)
def test_what_torch_cannot_do_is_not_exported(change: dict[str, Any], says: str) -> None:
    mine = ours(parameters())
    mine.param_groups[0].update(change)
    with pytest.raises(ValueError, match=re.escape(says)):
        to_torch_muon(mine)


# ----------------------------------------------------------------------------------------- the other formats
#
# A format is written here as its library writes it: the state of 3 steps on known gradients, by its own recurrence.

STEPS = range(3)


def _sum(name: str) -> Tensor:
    out = torch.zeros(SHAPES[name])
    for seed in STEPS:
        out.mul_(MU).add_(tensors(1000 + seed)[name])
    return out


def _average(name: str) -> Tensor:
    out = torch.zeros(SHAPES[name])
    for seed in STEPS:
        out.lerp_(tensors(1000 + seed)[name], 1 - MU)
    return out


def _moments(name: str) -> tuple[Tensor, Tensor]:
    first, second = torch.zeros(SHAPES[name]), torch.zeros(SHAPES[name])
    for seed in STEPS:
        grad = tensors(1000 + seed)[name]
        first.lerp_(grad, 1 - 0.8)
        second.lerp_(grad.square(), 1 - 0.9)
    return first, second


def _keller() -> dict[str, Any]:
    state: dict[int, Any] = {i: {"momentum_buffer": _average(n)} for i, n in enumerate(MUON)}
    for i, n in enumerate(ADAMW, len(MUON)):
        state[i] = {**dict(zip(("exp_avg", "exp_avg_sq"), _moments(n), strict=True)), "step": len(STEPS)}
    muon = {"lr": 0.02, "momentum": MU, "weight_decay": 0, "use_muon": True, "params": [0, 1]}
    adam = {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-10, "weight_decay": 0, "use_muon": False, "params": [2, 3]}
    return {"state": state, "param_groups": [muon, adam]}


def _moonlight() -> dict[str, Any]:
    state: dict[int, Any] = {i: {"use_muon": True, "momentum_buffer": _sum(n)} for i, n in enumerate(MUON)}
    for i, n in enumerate(ADAMW, len(MUON)):
        moments = dict(zip(("moment1", "moment2"), _moments(n), strict=True))
        state[i] = {"use_muon": False, **moments, "step": len(STEPS)}
    group = {"lr": 1e-3, "wd": 0.1, "momentum": MU, "nesterov": True, "ns_steps": 5}
    group |= {"adamw_betas": (0.8, 0.9), "adamw_eps": 1e-8, "params": [0, 1, 2, 3]}
    return {"state": state, "param_groups": [group]}


def _keller2024() -> dict[str, Any]:
    saved = _moonlight()
    group = saved["param_groups"][0]
    group |= {"adamw_lr_ratio": 0.15, "adamw_wd": group.pop("wd")}
    return saved


def _dion() -> dict[str, Any]:
    state: dict[int, Any] = {i: {"momentum": _sum(n)} for i, n in enumerate(MUON)}
    for i, n in enumerate(ADAMW, len(MUON)):
        moments = dict(zip(("momentum", "variance"), _moments(n), strict=True))
        state[i] = {**moments, "step_dev": torch.tensor(float(len(STEPS)))}
    common = {"lr": 0.01, "mu": MU, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.01, "epsilon": 1e-8, "step": 3}
    common |= {"cautious_wd": False, "nesterov": False, "flatten": False, "adjust_lr": "spectral_norm"}
    groups = [{**common, "algorithm": "muon", "params": [0, 1]}, {**common, "algorithm": "adamw", "params": [2, 3]}]
    return {"state": state, "param_groups": groups}


def _old_dion() -> dict[str, Any]:
    saved = _dion()
    for entry in saved["state"].values():
        entry.pop("step_dev", None)  # it counted in the group alone
    return saved


def _emerging() -> list[dict[str, Any]]:
    """Two optimizers, as Megatron-LM chains them; its Adam counts in the group."""
    extra = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    muon = {"lr": 3e-4, "momentum": MU, "weight_decay": 0.01, **extra, "params": [0, 1]}
    adam = {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.01, "step": 3, **extra, "params": [0, 1]}
    moments = {i: dict(zip(("exp_avg", "exp_avg_sq"), _moments(n), strict=True)) for i, n in enumerate(ADAMW)}
    return [
        {"state": {i: {"momentum_buffer": _average(n)} for i, n in enumerate(MUON)}, "param_groups": [muon]},
        {"state": moments, "param_groups": [adam]},
    ]


WRITERS: dict[str, tuple[Callable[[], Any], str, bool]] = {  # -> (state dict, format found, momentum is a sum)
    "keller": (_keller, "keller", False),
    "moonlight": (_moonlight, "moonlight", True),
    "keller2024": (_keller2024, "keller2024", True),
    "dion": (_dion, "dion", True),
    "dion before step_dev": (_old_dion, "dion", True),
    "emerging": (_emerging, "emerging", False),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_state_of_another_muon_becomes_the_averages_that_this_one_would_have(writer: str) -> None:
    write, kind, is_sum = WRITERS[writer]
    params = parameters()
    mine, reference = ours(params), parameters()
    expected = ours(reference)
    run([expected], reference, STEPS)
    report = load_foreign(mine, write())
    assert set(report.kinds) == {kind}
    for name in MUON:
        found = mine.state[params[name]]["momentum_buffer"].double()
        terms = averages(name, STEPS, MU, size=True)
        assert_rounded(found, averages(name, STEPS, MU), roundings=PER_STEP * len(STEPS) + 2, dtype=FP32, scale=terms)
        stepped = expected.state[reference[name]]["momentum_buffer"].double()
        assert_rounded(found, stepped, roundings=2 * PER_STEP * len(STEPS) + 2, dtype=FP32, scale=terms)
    for name in ADAMW:
        state = mine.state[params[name]]
        for key, beta, power in (("exp_avg", 0.8, 1), ("exp_avg_sq", 0.9, 2)):
            terms = averages(name, STEPS, beta, power, size=True)
            wanted, roundings = averages(name, STEPS, beta, power), PER_STEP * len(STEPS) + power
            assert_rounded(state[key].double(), wanted, roundings=roundings, dtype=FP32, scale=terms)
        assert state["step"] == 3 and state["step"].dtype == torch.float32
    conversions = {row.name: row.conversions for row in report.rows}
    assert conversions["a"] == (("x (1 - 0.9)",) if is_sum else ())
    assert conversions["table"] == ()
    run([mine], params, [7])  # it goes on


def test_the_report_says_what_came_from_where() -> None:
    params = parameters(torch.bfloat16)
    optimizer = ours(params, weight_decay=0.3)
    text = str(load_foreign(optimizer, _dion()))
    assert text.startswith("state of 4 parameters from dion\n")
    assert "  a <- 0: momentum  (x (1 - 0.9), float32 to bfloat16)\n" in text
    assert "  table <- 3: momentum, step_dev, variance  (float32 to bfloat16)" in text
    assert optimizer.param_groups[0]["weight_decay"] == 0.3, "options stay"


def test_names_go_before_order_in_every_spelling_of_a_state_dict() -> None:
    saved = _keller()
    order = ["table", "b", "bias", "a"]  # unlike ours
    fqn = [*MUON, *ADAMW]
    nested = {
        "state": {f"_orig_mod.{fqn[i]}": saved["state"][i] for i in (3, 1, 2, 0)},
        "param_groups": [
            {**g, "params": [f"_orig_mod.{n}" for n in order if fqn.index(n) in g["params"]]}
            for g in saved["param_groups"]
        ],
    }
    flat = {f"state.{fqn[i]}.{key}": value for i, s in saved["state"].items() for key, value in s.items()}
    flat |= {
        f"param_groups.{fqn[i]}.{key}": v for g in saved["param_groups"] for i in g["params"] for key, v in g.items()
        if key != "params"
    }  # fmt: skip
    for given in (nested, flat):
        for named in (True, False):
            params = parameters()
            mine = ours(params, names=named)
            with_names = None if named else params
            load_foreign(mine, given, params=with_names)
            for name in MUON:
                assert torch.equal(mine.state[params[name]]["momentum_buffer"], _average(name))
            for name in ADAMW:
                assert torch.equal(mine.state[params[name]]["exp_avg"], _moments(name)[0])
    with pytest.raises(ValueError, match=r"give params=dict\(model\.named_parameters\(\)\)"):
        load_foreign(ours(parameters(), names=False), nested)


def test_an_order_may_be_given() -> None:
    saved = _keller()
    saved["param_groups"][0]["params"], saved["param_groups"][1]["params"] = [1, 0], [3, 2]
    params = parameters()
    mine = ours(params, names=False)
    with pytest.raises(
        ValueError, match=re.escape("parameter 0 of group 0: its momentum_buffer is a Tensor of shape (8, 8)")
    ):
        load_foreign(mine, saved)
    load_foreign(mine, saved, params=[params[n] for n in ("b", "a", "table", "bias")])
    assert torch.equal(mine.state[params["b"]]["momentum_buffer"], _average("b"))


def test_what_each_rank_kept_is_put_together() -> None:
    whole = _keller()
    parts = []
    for rank in range(2):
        part = copy.deepcopy(whole)
        del part["state"][1 - rank]  # momentum of matrix 0 on rank 0, of matrix 1 on rank 1; AdamW's on both
        parts.append(part)
    params = parameters()
    mine = ours(params)
    with pytest.raises(ValueError, match=r"b: no state for it \(1 such parameters\)\. .*merge_ranks"):
        load_foreign(mine, parts[0])
    load_foreign(mine, merge_ranks(parts))
    assert torch.equal(mine.state[params["b"]]["momentum_buffer"], _average("b"))
    parts[1]["param_groups"][0]["params"] = [1, 0]
    with pytest.raises(ValueError, match="list different parameters"):
        merge_ranks(parts)


def test_parameters_may_start_afresh_if_one_says_so() -> None:
    saved = _keller()
    del saved["state"][3]
    params = parameters()
    mine = ours(params)
    report = load_foreign(mine, saved, allow_missing=True)
    assert report.fresh == ("table",)
    assert "table starts afresh" in str(report)
    assert not mine.state.get(params["table"])


def _changed(change: Callable[[dict[str, Any]], Any], write: Callable[[], Any] = _keller) -> Callable[[], Any]:
    def make() -> Any:
        saved = write()
        return change(saved) or saved

    return make


def _sgd() -> Any:
    params = parameters()
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    run([optimizer], params, STEPS)
    return optimizer.state_dict()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "SGD": (_sgd, "cannot tell which optimizer saved this: its groups have ['dampening'"),
    "a fork of unknown convention": (
        _changed(lambda s: [g.update(nesterov=True, ns_steps=5) for g in s["param_groups"]] and None),
        "may be a sum or an average. Give kind=, one of 'torch'",
    ),
    "shape": (
        _changed(lambda s: s["state"][1].update(momentum_buffer=torch.zeros(4, 16))),
        "b: its momentum_buffer is a Tensor of shape (4, 16), the parameter stores shape (8, 8)",
    ),
    "second moment of AdaMuon": (
        _changed(lambda s: s["state"][1].update(moment2_buffer=torch.zeros(8, 8))),
        "b: its state in the checkpoint is ['moment2_buffer', 'momentum_buffer'], Muon's is ['momentum_buffer']",
    ),
    "routed otherwise": (
        _changed(lambda s: s["state"].update({1: s["state"][2]})),
        "b: its state is AdamW's (['exp_avg', 'exp_avg_sq', 'step']), but here it is Muon's",
    ),
    "lion": (
        _changed(lambda s: s["param_groups"][1].update(algorithm="lion"), _dion),
        "bias: its state is lion's",
    ),
    "dion2": (
        _changed(lambda s: s["param_groups"][0].update(algorithm="dion2"), _dion),
        "a: its state is dion2's",
    ),
    "state nobody lists": (_changed(lambda s: s["state"].update({9: {}})), "has state for 9, which none of its groups"),
    "too few": (_changed(lambda s: s["param_groups"].pop() and s["state"].pop(2) and s["state"].pop(3) and None),
                "the state dict lists 2 parameters, 4 are to take them"),
    "before the first step": (_changed(lambda s: s["state"].clear()), "it was saved before the first step"),
    "not an optimizer's": (lambda: {"model": {}, "optimizer": {}}, "Megatron-LM keeps it under 'optimizer'"),
    "step": (_changed(lambda s: s["state"][2].update(step=-1)), "bias: its step in the checkpoint is -1"),
    "no step": (_changed(lambda s: s["state"][2].pop("step") and None), "bias: its state in the checkpoint is"),
    "integers": (
        _changed(lambda s: s["state"][0].update(momentum_buffer=torch.zeros(12, 8, dtype=torch.int32))),
        "a: its momentum_buffer in the checkpoint is of dtype torch.int32, not a floating-point tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused_and_changes_nothing(case: str) -> None:
    make, says = REFUSED[case]
    params = parameters()
    mine = ours(params)
    run([mine], params, [50])
    before = copy.deepcopy(mine.state_dict())
    with pytest.raises(ValueError, match=re.escape(says)):
        load_foreign(mine, make())
    after = mine.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert after["state"][key].keys() == state.keys()
        assert all(torch.equal(value, after["state"][key][k]) for k, value in state.items())


# ------------------------------------------------------------------------------- from AdamW for everything


def _adamw_for_all(params: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    groups = [{"params": [params[n] for n in ("table", "a", "b")]}, {"params": [params["bias"]], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, fused=True)


def _order(params: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    return [params[n] for n in ("table", "a", "b", "bias")]


def test_a_run_of_adamw_goes_on_with_muon_for_its_matrices() -> None:
    """Matrices step as if new, the rest as if AdamW had gone on."""
    there = parameters()
    adamw = _adamw_for_all(there)
    run([adamw], there, STEPS)
    here = {name: nn.Parameter(p.detach().clone()) for name, p in there.items()}
    fresh = {name: nn.Parameter(p.detach().clone()) for name, p in there.items()}
    mine, new = ours(here), ours(fresh)
    mine.param_groups[1]["params"], mine.param_groups[1]["param_names"] = [here["table"]], ["table"]
    mine.add_param_group(
        {"params": [("bias", here["bias"])], "use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0}
    )
    with pytest.raises(ValueError, match=r"a: its state is AdamW's .*, but here it is Muon's. Give skip_matrices=True"):
        load_foreign(mine, adamw.state_dict(), params=_order(here))
    report = load_foreign(mine, adamw.state_dict(), params=_order(here), skip_matrices=True)
    assert report.skipped == ("a", "b") and report.fresh == ()
    assert [row.name for row in report.rows] == ["table", "bias"]
    assert "  b is a matrix: its state there was left out, its momentum starts from zero" in str(report)
    run([mine], here, range(3, 6))
    run([new], fresh, range(3, 6))
    run([adamw], there, range(3, 6))
    assert_same({n: here[n] for n in ADAMW}, {n: there[n] for n in ADAMW})
    assert_same({n: here[n] for n in MUON}, {n: fresh[n] for n in MUON})


def test_an_order_that_skipped_matrices_would_hide_is_refused() -> None:
    there, here = parameters(), parameters()
    adamw = _adamw_for_all(there)
    run([adamw], there, STEPS)
    mine = ours(here)
    with pytest.raises(ValueError, match=r"Give the order it had: params=list\(model\.parameters\(\)\)"):
        load_foreign(mine, adamw.state_dict(), skip_matrices=True)
    wrong = [here[n] for n in ("table", "b", "a", "bias")]
    with pytest.raises(ValueError, match=r"b: the state to leave out has shape \(12, 8\), the parameter \(8, 8\)"):
        load_foreign(mine, adamw.state_dict(), params=wrong, skip_matrices=True)
    assert not mine.state


def _adamw_goes_on_with_muon(by_name: bool) -> list[str]:
    """Go on with Muon on FSDP2, against one process that does the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = tensors(0)

    def gone_on(cut: Callable[[Tensor], Tensor]) -> dict[str, nn.Parameter]:
        model = nn.ParameterDict({n: nn.Parameter(cut(t)) for n, t in full.items()})
        params = dict(model.items())

        def steps(optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
            for seed in seeds:
                for name, grad in tensors(1000 + seed).items():
                    params[name].grad = cut(grad)
                optimizer.step()

        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps(adamw, STEPS)
        mine = ours(params)
        saved = get_optimizer_state_dict(model, adamw) if by_name else adamw.state_dict()
        report = load_foreign(mine, saved, params=None if by_name else list(model.parameters()), skip_matrices=True)
        assert set(report.skipped) == {*MUON}
        steps(mine, range(3, 6))
        return params

    one = gone_on(torch.clone)
    shards = gone_on(lambda t: distribute_tensor(t, mesh, [Shard(0)]))
    return [n for n in full if not torch.equal(shards[n].full_tensor(), one[n])]  # type: ignore[operator]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_run_of_adamw_goes_on_with_muon_on_shards(by_name: bool, world2: RankPool) -> None:
    assert world2.run(_adamw_goes_on_with_muon, by_name) == [[]] * 2


# --------------------------------------------------------------------------------------------- onto shards


def _onto(layout: str) -> list[str]:
    row = LAYOUTS[layout]
    mesh = row.mesh(4)
    full = {n: t for n, t in tensors(0).items() if n != "bias"}  # builders cut the last two dims
    params = {n: nn.Parameter(t) for n, t in row.build(full, mesh).items()}
    optimizer = Muon(
        [
            {"params": [("a", params["a"]), ("b", params["b"])]},
            {"params": [("table", params["table"])], "use_muon": False},
        ],
        lr=1e-3,
    )
    saved = _moonlight()
    del saved["state"][2]
    saved["param_groups"][0]["params"] = [0, 1, 3]
    if dist.get_rank() == 0:
        report = load_foreign(optimizer, saved)  # alone: a collective would hang
    dist.barrier()
    if dist.get_rank() > 0:
        report = load_foreign(optimizer, saved)
    assert all("cut to this rank's part" in r.conversions for r in report.rows)
    want = {"a": _sum("a") * (1 - MU), "b": _sum("b") * (1 - MU), "table": _moments("table")[1]}
    cut = row.build(want, mesh)
    wrong = []
    for name, key in (("a", "momentum_buffer"), ("b", "momentum_buffer"), ("table", "exp_avg_sq")):
        found = optimizer.state[params[name]][key]
        assert found.placements == params[name].placements  # type: ignore[attr-defined]
        if not torch.equal(found.to_local(), cut[name].to_local()):  # type: ignore[attr-defined]
            wrong.append(name)
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return wrong


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "fsdp2+tp", "two dims", "lone strided", "replicate"])
def test_whole_tensors_are_cut_to_each_ranks_part_without_communication(layout: str, world4: RankPool) -> None:
    assert world4.run(_onto, layout) == [[]] * 4
