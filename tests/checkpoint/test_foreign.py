"""State of other Muons: what each format means is checked against reimplementations of their update rules here."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardmuon import Muon, Orthogonalizer, Storage
from shardmuon.checkpoint import load_foreign, merge_ranks, to_torch_muon
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.tolerances import assert_bitwise, assert_rounded

SHAPES = {"a": (12, 8), "b": (8, 8), "bias": (8,), "table": (10, 8)}
MUON, ADAMW = ("a", "b"), ("bias", "table")
MU = 0.9
FP32 = torch.float32
Params = dict[str, nn.Parameter]


def tensors(seed: int, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def parameters(dtype: torch.dtype = FP32) -> Params:
    return {name: nn.Parameter(t) for name, t in tensors(0, dtype).items()}


def copied(params: Mapping[str, Tensor]) -> Params:
    return {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}


def ours(params: Params, *, names: bool = True, muon: Any = (), **options: Any) -> Muon:
    def members(which: Sequence[str]) -> list[Any]:
        return [(n, params[n]) if names else params[n] for n in which if n in params]

    return Muon(
        [
            {"params": members(MUON), "momentum": MU, **dict(muon)},
            {"params": members(ADAMW), "use_muon": False, "betas": (0.8, 0.9), "lr": 0.01, "eps": 1e-8},
        ],
        **{"lr": 0.02, "orthogonalizer": Orthogonalizer(method="torch"), **options},
    )


def run(optimizers: Iterable[torch.optim.Optimizer], params: Params, seeds: Iterable[int]) -> None:
    for seed in seeds:
        for name, grad in tensors(1000 + seed).items():
            params[name].grad = grad.to(params[name].dtype)
        for optimizer in optimizers:
            optimizer.step()


# --------------------------------------------------------------------------------------- torch, there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_in_torch_and_back_here_bit_for_bit(dtype: torch.dtype) -> None:
    here = parameters(dtype)
    mine = ours(here)
    run([mine], here, range(3))
    there = copied(here)
    theirs = (
        torch.optim.Muon([there[n] for n in MUON], lr=9.0),
        torch.optim.AdamW([there[n] for n in ADAMW], lr=9.0),
    )
    for optimizer, saved in zip(theirs, to_torch_muon(mine), strict=True):
        optimizer.load_state_dict(saved)
    run([mine], here, range(3, 6))
    run(theirs, there, range(3, 6))
    assert_bitwise(there, here)
    back = copied(there)
    again = ours(back)
    report = load_foreign(again, [optimizer.state_dict() for optimizer in theirs])
    assert [row.name for row in report.rows] == [*MUON, *ADAMW] and set(report.kinds) == {"torch"}
    run([again], back, range(6, 9))
    run([mine], here, range(6, 9))
    run(theirs, there, range(6, 9))
    assert_bitwise(back, there)
    assert_bitwise(here, there)


@pytest.mark.parametrize(
    ("index", "change", "says"),
    [
        (0, {"adjust_lr_fn": "spectral"}, "group 0: adjust_lr_fn='spectral' is none of those torch.optim.Muon has"),
        (0, {"weight_decay_mode": "l2"}, "group 0: weight_decay_mode='l2' is none of"),
        (0, {"variant": "normuon"}, "group 0: variant='normuon' is none of those torch.optim.Muon has"),
        (
            0,
            {"ns_coefficients": [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5)]},
            "group 0: torch.optim.Muon has one ns_coefficients triple",
        ),
        (0, {"num_heads": 2}, "a: torch.optim.Muon takes a 2-D parameter of shape (12, 8) as no or one matrix"),
        (1, {"adamw": "cautious"}, "group 1: adamw='cautious' is none that torch.optim.AdamW has"),
    ],
)
def test_what_torch_cannot_do_is_not_exported(index: int, change: dict[str, Any], says: str) -> None:
    mine = ours(parameters())
    mine.param_groups[index].update(change)
    with pytest.raises(ValueError, match=re.escape(says)):
        to_torch_muon(mine)


# ----------------------------------------------------------------------------------------- the other formats
#
# A format is written here as its library writes it: the state of 3 steps on known gradients, by its own recurrence.

STEPS = range(3)
PER_STEP = 4  # roundings of beta * m + (1 - beta) * g in fp32: two factors beside 1 - beta itself, and the sum


def recurrence(name: str, beta: float, *, power: int = 1, of_sum: bool = False) -> Tensor:
    out = torch.zeros(SHAPES[name])
    for seed in STEPS:
        value = tensors(1000 + seed)[name] ** power
        out = out.mul_(beta).add_(value) if of_sum else out.lerp_(value, 1 - beta)
    return out


def averages(name: str, beta: float, power: int = 1, *, size: bool = False) -> Tensor:
    """The exponential average of the gradients (or of their squares), in fp64; with `size` of their absolute values."""
    out = torch.zeros(SHAPES[name], dtype=torch.float64)
    for seed in STEPS:
        value = tensors(1000 + seed)[name].double() ** power
        out = beta * out + (1 - beta) * (value.abs() if size else value)
    return out


class Library(NamedTuple):
    """The names that one library has."""

    kind: str
    muon: dict[str, Any]  # options of its groups
    adamw: dict[str, Any] | None = None  # None: one group has all
    is_sum: bool = False
    momentum: str = "momentum_buffer"
    moments: tuple[str, str] = ("exp_avg", "exp_avg_sq")
    step: str | None = "step"  # None: groups count
    says_use_muon: bool = False  # in the state
    optimizers: int = 1


_MOONLIGHT = {"lr": 1e-3, "momentum": MU, "nesterov": True, "ns_steps": 5, "adamw_betas": (0.8, 0.9), "adamw_eps": 1e-8}
_DION = {"lr": 0.01, "mu": MU, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.01, "epsilon": 1e-8, "step": 3}
_DION |= {"cautious_wd": False, "nesterov": False, "flatten": False, "adjust_lr": "spectral_norm"}
_EMERGING = {"lr": 3e-4, "weight_decay": 0.01, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False}
_MOMENTS = {"is_sum": True, "moments": ("moment1", "moment2"), "says_use_muon": True}
dion = Library(
    "dion",
    {**_DION, "algorithm": "muon"},
    {**_DION, "algorithm": "adamw"},
    is_sum=True,
    momentum="momentum",
    moments=("momentum", "variance"),
    step="step_dev",
)
keller = Library(
    "keller",
    {"lr": 0.02, "momentum": MU, "weight_decay": 0, "use_muon": True},
    {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-10, "weight_decay": 0, "use_muon": False},
)
moonlight = Library("moonlight", {**_MOONLIGHT, "wd": 0.1}, **_MOMENTS)  # type: ignore[arg-type]
LIBRARIES = {
    "keller": keller,
    "moonlight": moonlight,
    "keller2024": Library("keller2024", {**_MOONLIGHT, "adamw_lr_ratio": 0.15, "adamw_wd": 0.1}, **_MOMENTS),  # type: ignore[arg-type]
    "dion": dion,
    "dion before step_dev": dion._replace(step=None),
    "emerging": Library(  # as Megatron-LM chains them; its Adam counts in the group
        "emerging",
        {**_EMERGING, "momentum": MU},
        {**_EMERGING, "betas": (0.8, 0.9), "eps": 1e-8, "step": 3},
        step=None,
        optimizers=2,
    ),
}


def write(library: Library = keller) -> Any:
    state: dict[int, Any] = {}
    for i, name in enumerate((*MUON, *ADAMW)):
        if name in MUON:
            state[i] = {library.momentum: recurrence(name, MU, of_sum=library.is_sum)}
        else:
            moments = recurrence(name, 0.8), recurrence(name, 0.9, power=2)
            state[i] = dict(zip(library.moments, moments, strict=True))
            state[i] |= {} if library.step is None else {library.step: torch.tensor(float(len(STEPS)))}
        state[i] |= {"use_muon": name in MUON} if library.says_use_muon else {}
    if library.adamw is None:
        return {"state": state, "param_groups": [{**library.muon, "params": [0, 1, 2, 3]}]}
    if library.optimizers == 2:
        halves = {0: state[0], 1: state[1]}, {0: state[2], 1: state[3]}
        options = library.muon, library.adamw
        return [{"state": s, "param_groups": [{**o, "params": [0, 1]}]} for s, o in zip(halves, options, strict=True)]
    groups = [{**library.muon, "params": [0, 1]}, {**library.adamw, "params": [2, 3]}]
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize("name", LIBRARIES)
def test_state_of_another_muon_becomes_the_averages_that_this_one_would_have(name: str) -> None:
    library = LIBRARIES[name]
    params = parameters()
    mine = ours(params)
    report = load_foreign(mine, write(library))
    assert set(report.kinds) == {library.kind}
    keys = (*((n, "momentum_buffer", MU, 1) for n in MUON), *((n, "exp_avg", 0.8, 1) for n in ADAMW))
    for n, key, beta, power in (*keys, *((n, "exp_avg_sq", 0.9, 2) for n in ADAMW)):
        found = mine.state[params[n]][key].double()
        terms, roundings = averages(n, beta, power, size=True), PER_STEP * len(STEPS) + 2
        assert_rounded(found, averages(n, beta, power), roundings=roundings, dtype=FP32, scale=terms)
    assert all(mine.state[params[n]]["step"] == 3 and mine.state[params[n]]["step"].dtype == FP32 for n in ADAMW)
    conversions = {row.name: row.conversions for row in report.rows}
    assert conversions["a"] == (("x (1 - 0.9)",) if library.is_sum else ())
    assert conversions["table"] == ()
    run([mine], params, [7])  # it goes on


def test_the_report_says_what_came_from_where() -> None:
    optimizer = ours(parameters(torch.bfloat16), weight_decay=0.3)
    text = str(load_foreign(optimizer, write(dion)))
    assert text.startswith("state of 4 parameters from dion\n")
    assert "  a <- 0: momentum  (x (1 - 0.9), float32 to bfloat16)\n" in text
    assert "  table <- 3: momentum, step_dev, variance  (float32 to bfloat16)" in text
    assert optimizer.param_groups[0]["weight_decay"] == 0.3, "options stay"


def assert_taken(mine: Muon, params: Params, saved: Any) -> None:
    for at, (name, key) in enumerate(zip(SHAPES, ("momentum_buffer",) * 2 + ("exp_avg",) * 2, strict=True)):
        assert_bitwise(mine.state[params[name]][key], saved["state"][at][key])


def flattened(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form of torch.distributed.checkpoint (`flatten_optimizer_state_dict`, as torchtitan saves)."""
    flat = {f"state.{name}.{key}": value for name, of in saved["state"].items() for key, value in of.items()}
    of_groups = [(f"param_groups.{name}", group) for group in saved["param_groups"] for name in group["params"]]
    return flat | {f"{of}.{key}": value for of, group in of_groups for key, value in group.items() if key != "params"}


@pytest.mark.parametrize("form", [dict, flattened])
@pytest.mark.parametrize("named", [True, False])
def test_names_go_before_order_in_every_spelling_of_a_state_dict(named: bool, form: Callable[..., Any]) -> None:
    saved, names, order = write(), [*MUON, *ADAMW], ["table", "b", "bias", "a"]  # unlike ours
    given = {
        "state": {f"_orig_mod.{names[i]}": saved["state"][i] for i in (3, 1, 2, 0)},
        "param_groups": [
            {**g, "params": [f"_orig_mod.{n}" for n in order if names.index(n) in g["params"]]}
            for g in saved["param_groups"]
        ],
    }
    given, params = form(given), parameters()
    mine = ours(params, names=named)
    if not named:
        with pytest.raises(ValueError, match=r"give params=dict\(model\.named_parameters\(\)\)"):
            load_foreign(mine, given)
    load_foreign(mine, given, params=None if named else params)
    assert_taken(mine, params, saved)


def test_what_each_rank_kept_is_put_together_or_starts_afresh_if_one_says_so() -> None:
    whole, params = write(), parameters()
    mine, parts = ours(params), [copy.deepcopy(whole) for _ in range(2)]
    for rank, part in enumerate(parts):
        del part["state"][1 - rank]  # momentum of matrix 0 on rank 0, of matrix 1 on rank 1; AdamW's on both
    with pytest.raises(ValueError, match=r"b: no state for it \(1 such parameters\)\. .*merge_ranks"):
        load_foreign(mine, parts[0])
    report = load_foreign(mine, parts[0], allow_missing=True)
    assert report.fresh == ("b",) and "b starts afresh" in str(report) and not mine.state.get(params["b"])
    load_foreign(mine, merge_ranks(parts))
    assert_taken(mine, params, whole)
    parts[1]["param_groups"][0]["params"] = [1, 0]
    with pytest.raises(ValueError, match="list different parameters"):
        merge_ranks(parts)


def _sgd(saved: dict[str, Any]) -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    run([optimizer], params, STEPS)
    saved |= optimizer.state_dict()


def state(key: int, **values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved["state"][key].update(values)


def groups(index: int | slice, **values: Any) -> Callable[[dict[str, Any]], Any]:
    at = slice(index, index + 1) if isinstance(index, int) else index
    return lambda saved: [g.update(values) for g in saved["param_groups"][at]]


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "SGD": (_sgd, "cannot tell which optimizer saved this: its groups have ['dampening'"),
    "a fork of unknown convention": (
        groups(slice(None), nesterov=True, ns_steps=5),
        "may be a sum or an average. Give kind=, one of 'torch'",
    ),
    "shape": (
        state(1, momentum_buffer=torch.zeros(4, 16)),
        "b: its momentum_buffer is a Tensor of shape (4, 16), the parameter stores shape (8, 8)",
    ),
    "second moment of AdaMuon": (
        state(1, moment2_buffer=torch.zeros(8, 8)),
        "b: its state in the checkpoint is ['moment2_buffer', 'momentum_buffer'], Muon's is ['momentum_buffer']",
    ),
    "routed otherwise": (
        lambda s: s["state"].update({1: s["state"][2]}),
        "b: its state is AdamW's (['exp_avg', 'exp_avg_sq', 'step']), but here it is Muon's",
    ),
    "dion: lion": (groups(1, algorithm="lion"), "bias: its state is lion's"),
    "dion: dion2": (groups(0, algorithm="dion2"), "a: its state is dion2's"),
    "dion: normuon": (groups(0, algorithm="normuon"), "a: its state is NorMuon's"),
    "state nobody lists": (lambda s: s["state"].update({9: {}}), "has state for 9, which none of its groups"),
    "too few": (
        lambda s: (s["param_groups"].pop(), s["state"].pop(2), s["state"].pop(3)),
        "the state dict lists 2 parameters, 4 are to take them",
    ),
    "before the first step": (lambda s: s["state"].clear(), "it was saved before the first step"),
    "not an optimizer's": (
        lambda s: (s.clear(), s.update(model={}, optimizer={})),
        "Megatron-LM keeps it under 'optimizer'",
    ),
    "step": (state(2, step=-1), "bias: its step in the checkpoint is -1"),
    "no step": (lambda s: s["state"][2].pop("step"), "bias: its state in the checkpoint is"),
    "integers": (
        state(0, momentum_buffer=torch.zeros(12, 8, dtype=torch.int32)),
        "a: its momentum_buffer in the checkpoint is of dtype torch.int32, not a floating-point tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused_and_changes_nothing(case: str) -> None:
    params = parameters()
    mine = ours(params)
    run([mine], params, [50])
    before, saved = copy.deepcopy(mine.state_dict()), write(dion if case.startswith("dion") else keller)
    REFUSED[case][0](saved)
    with pytest.raises(ValueError, match=re.escape(REFUSED[case][1])):
        load_foreign(mine, saved)
    after = mine.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_bitwise(after["state"], before["state"])


def test_codes_are_not_exported() -> None:
    params = parameters()
    mine = ours(params, storage=Storage("int8"), orthogonalizer=Orthogonalizer())
    run([mine], params, [0])
    with pytest.raises(ValueError, match=r"a: its momentum is 8-bit codes, which torch\.optim\.Muon cannot read"):
        to_torch_muon(mine)


# ------------------------------------------------------------------------------------- what stages of variants keep


@pytest.mark.parametrize("of_normuon", [True, False])
def test_averages_of_dions_normuon_start_anew_and_its_momentum_does_not(of_normuon: bool) -> None:
    """Its own are of rows, ours of rows or columns."""
    params, saved = parameters(), write(dion)
    if of_normuon:
        saved["param_groups"][0]["algorithm"] = "normuon"
        for number, n in enumerate(MUON):
            saved["state"][number]["variance_neuron"] = torch.rand(SHAPES[n][0], 1)
    mine = ours(params, muon={"variant": "normuon"})
    report = load_foreign(mine, saved)
    for number, n in enumerate(MUON):
        kept = mine.state[params[n]]
        assert_bitwise(kept["momentum_buffer"], saved["state"][number]["momentum"] * (1 - MU))
        assert_bitwise(kept["second_moment"], torch.zeros(1, max(SHAPES[n])))
        assert "second_moment starts from zeros" in report.rows[number].conversions
    run([mine], params, [7])


@pytest.mark.parametrize(
    ("theirs", "here"),
    [
        ("normuon", "normuon"),
        ("hyperball", "hyperball"),
        ("normuon+hyperball", "normuon+hyperball"),
        ("normuon", "normuon+hyperball"),
    ],
)
@pytest.mark.parametrize("shape", [(6, 4), (1, 1)])  # (1, 1): averages and norms have one shape
def test_what_a_variant_keeps_loads_by_name(theirs: str, here: str, shape: tuple[int, int]) -> None:
    made = []
    for variant in (theirs, here):
        param = nn.Parameter(torch.ones(shape))
        made.append((param, Muon([("w", param)], lr=0.02, variant=variant, weight_decay=0.0)))
    (param, first), (other, second) = made
    param.grad = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 1
    first.step()
    (row,) = load_foreign(second, first.state_dict()).rows
    kept = dict(second.state[other])
    anew = {} if theirs == here else {"weight_radius": torch.zeros(1, 1)}
    assert row.conversions == tuple(f"{key} starts from zeros" for key in anew)
    assert_bitwise(dict(sorted(kept.items())), dict(sorted({**first.state[param], **anew}.items())))


# ------------------------------------------------------------------------------- from AdamW for everything


def _adamw_for_all(params: Mapping[str, Tensor]) -> torch.optim.AdamW:
    groups = [{"params": [params[n] for n in ("table", "a", "b")]}, {"params": [params["bias"]], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, fused=True)


def test_a_run_of_adamw_goes_on_with_muon_for_its_matrices() -> None:
    """Matrices step as if new, the rest as if AdamW had gone on."""
    there = parameters()
    adamw = _adamw_for_all(there)
    run([adamw], there, STEPS)
    here, fresh = copied(there), copied(there)
    mine, new = ours(here), ours(fresh)
    mine.param_groups[1]["params"], mine.param_groups[1]["param_names"] = [here["table"]], ["table"]
    mine.add_param_group(
        {"params": [("bias", here["bias"])], "use_muon": False, "lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0}
    )
    order = [here[n] for n in ("table", "a", "b", "bias")]
    for given, skips, says in (
        (order, False, r"a: its state is AdamW's .*, but here it is Muon's. Give skip_matrices=True"),
        (None, True, r"Give the order it had: params=list\(model\.parameters\(\)\)"),
        (
            [order[i] for i in (0, 2, 1, 3)],
            True,
            r"b: the state to leave out has shape \(12, 8\), the parameter \(8, 8\)",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            load_foreign(mine, adamw.state_dict(), params=given, skip_matrices=skips)
        assert not mine.state
    report = load_foreign(mine, adamw.state_dict(), params=order, skip_matrices=True)
    assert report.skipped == ("a", "b") and report.fresh == ()
    assert [row.name for row in report.rows] == ["table", "bias"]
    assert "  b is a matrix: its state there was left out, its momentum starts from zero" in str(report)
    for optimizer, params in ((mine, here), (new, fresh), (adamw, there)):
        run([optimizer], params, range(3, 6))
    assert_bitwise({n: here[n] for n in ADAMW}, {n: there[n] for n in ADAMW})
    assert_bitwise({n: here[n] for n in MUON}, {n: fresh[n] for n in MUON})


@pytest.mark.parametrize("form", ["order", "names", "flat"])
def test_a_run_of_adamw_goes_on_with_muon_on_shards(form: str, world2: RankPool) -> None:
    """FSDP2 against one process that does the same."""
    for one, shards in world2.run(_adamw_goes_on_with_muon, form):
        assert_bitwise(shards, one)


def _adamw_goes_on_with_muon(form: str) -> list[dict[str, Tensor]]:
    made = []
    for layout in ("single", "fsdp2"):
        model = nn.ParameterDict({n: nn.Parameter(t) for n, t in _cut(layout, 0).items()})
        params, listed = dict(model.items()), list(model.parameters())
        adamw, mine = torch.optim.AdamW(listed, lr=0.01), ours(params)
        for optimizer, seeds in ((adamw, STEPS), (mine, range(3, 6))):
            if optimizer is mine:
                options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
                saved = (
                    adamw.state_dict() if form == "order" else get_optimizer_state_dict(model, adamw, options=options)
                )
                order = listed if form == "order" else None
                assert load_foreign(mine, saved, params=order, skip_matrices=True).skipped == MUON
            for seed in seeds:
                for name, grad in _cut(layout, 1000 + seed).items():
                    params[name].grad = grad
                optimizer.step()
        made.append({n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in params.items()})
    return made


# --------------------------------------------------------------------------------------------- onto shards


def _cut(layout: str, seed: int) -> dict[str, Tensor]:
    """Builders cut the last two dims."""
    row, full = LAYOUTS[layout], {n: t for n, t in tensors(seed).items() if n != "bias"}
    return row.build(full, row.mesh(dist.get_world_size()))


def _onto(layout: str) -> None:
    """Whole tensors onto shards; then what those keep, variants too, onto a second optimizer as it is placed."""
    params = {n: nn.Parameter(t) for n, t in _cut(layout, 0).items()}
    first, second = (
        ours(params, muon={"variant": variant}, weight_decay=0.0) for variant in (None, "normuon+hyperball")
    )
    saved = write(moonlight)
    del saved["state"][2]
    saved["param_groups"][0]["params"] = [0, 1, 3]
    if dist.get_rank() == 0:
        report = load_foreign(first, saved)  # alone: a collective would hang
    dist.barrier()
    if dist.get_rank() > 0:
        report = load_foreign(first, saved)
    assert all("cut to this rank's part" in r.conversions for r in report.rows)
    want = {n: recurrence(n, MU, of_sum=True) * (1 - MU) for n in MUON} | {"table": recurrence("table", 0.9, power=2)}
    cut = LAYOUTS[layout].build(want, LAYOUTS[layout].mesh(dist.get_world_size()))
    for name, p in params.items():
        found: Any = first.state[p]["exp_avg_sq" if name == "table" else "momentum_buffer"]
        assert found.placements == p.placements  # type: ignore[attr-defined]
        assert_bitwise(found.to_local(), cut[name].to_local())  # type: ignore[attr-defined]
        p.grad = torch.ones_like(p)
    first.step()
    second.step()
    third = ours(params, muon={"variant": "normuon+hyperball"}, weight_decay=0.0)
    load_foreign(third, second.state_dict())
    for p in params.values():
        for key, there in second.state[p].items():
            here: Any = third.state[p][key]
            assert here is not there and getattr(here, "placements", None) == getattr(there, "placements", None)
            assert_bitwise(*(getattr(t, "_local_tensor", t) for t in (here, there)))
    third.step()


@pytest.mark.parametrize("layout", ["hsdp", "fsdp2+tp", "two dims", "lone strided"])
def test_state_is_cut_to_each_ranks_part_without_communication(layout: str, world4: RankPool) -> None:
    world4.run(_onto, layout)
