"""Tests of `Muon` in one process: compatibility with torch.optim.Muon, the formula behind every option, and the error
for every invalid option."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import math
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from spectra import assert_equal, normal, run
from tolerances import assert_bitwise, assert_rounded
from torch import Tensor, nn
from torch.optim import lr_scheduler

from shardmuon import Muon, param_groups
from shardmuon.host import Host
from shardmuon.options import _LR_SCALES, ONLY_MUON, MuonConfig
from shardmuon.step.update import _decay_agreeing_

SHAPES = ((6, 9), (9, 6), (5, 5), (1, 7), (33, 4))
LIKE_TORCH: dict[str, Any] = {"method": "torch"}


def matrices(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def copies(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return copies([*tensors, *(t for state in optimizer.state.values() for t in state.values())])


# ------------------------------------------------------------------------------------- in place of torch.optim.Muon


def test_positional_arguments_are_torch_optim_muons() -> None:
    theirs = list(inspect.signature(torch.optim.Muon.__init__).parameters.values())
    ours = list(inspect.signature(Muon.__init__).parameters.values())
    # `Muon` must start with the arguments that torch.optim.Muon has before `eps`, in the same order, so that positional
    # arguments keep their meaning.
    same = [wanted.name for wanted in theirs].index("eps")
    # torch.optim.Muon has a default for lr, but `Muon` requires an lr, so the comparison ignores this default.
    wanted = [p.replace(default=None) if p.name == "lr" else p for p in theirs[:same]]
    assert [(p.name, p.kind, p.default) for p in ours[:same]] == [(p.name, p.kind, p.default) for p in wanted]
    assert {p.kind for p in ours[same:-1]} == {inspect.Parameter.KEYWORD_ONLY}
    # The annotation `NoReturn` makes type checkers reject every unknown keyword.
    assert str(ours[-1]) == "**unknown: 'NoReturn'"


LRS: list[float | Tensor] = [
    1e-3,
    *(torch.tensor(1e-3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    torch.tensor([1e-3]),
]


@pytest.mark.stated
@pytest.mark.parametrize("lr", LRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_torchs_method_has_torchs_bits(dtype: torch.dtype, lr: float | Tensor) -> None:
    """With a tensor lr, torch computes the factors for weight decay and update in the dtype of the lr, and `Muon` must
    do the same."""
    shapes = [*SHAPES, (10, 5), (33, 65), (64, 128)]
    for adjust, (nesterov, decay) in zip(
        itertools.cycle((None, "original", "match_rms_adamw")), [(True, 0.1), (False, 0.1), (True, 0.0), (False, 0.0)]
    ):
        # Without Nesterov, torch.optim.Muon normalizes the bf16 momentum buffer in place. shardmuon does not, so the
        # two cannot be compared.
        if dtype == torch.bfloat16 and not nesterov:
            continue
        mine, theirs = matrices(dtype, shapes), matrices(dtype, shapes)
        options: dict[str, Any] = {"lr": lr, "weight_decay": decay, "adjust_lr_fn": adjust, "nesterov": nesterov}
        ours, torchs = Muon(mine, **LIKE_TORCH, **options), torch.optim.Muon(theirs, **options)
        for seed in (1, 2, 3, 4):
            run(ours, mine, [seed])
            run(torchs, theirs, [seed])
            assert_equal(everything(ours), everything(torchs))
        assert [set(s) for s in ours.state.values()] == [set(s) for s in torchs.state.values()]
        assert {*torchs.param_groups[0]} - {"eps"} <= {*ours.param_groups[0]}


def test_a_checkpoint_without_our_options_leaves_those_of_the_group() -> None:
    """Loading must not reset options that are missing in the checkpoint to defaults, because this would silently undo
    head splits, views and AdamW groups."""
    theirs, mine = matrices(shapes=((8, 6), (6, 6))), matrices(shapes=((8, 6), (6, 6)))
    torchs = torch.optim.Muon([{"params": [theirs[0]]}, {"params": [theirs[1]]}], lr=0.1)
    run(torchs, theirs, [1])
    ours = Muon(
        [{"params": [mine[0]], "split_sizes": 4}, {"params": [mine[1]], "use_muon": False, "betas": (0.5, 0.6)}], lr=9.0
    )
    saved = torchs.state_dict()
    with pytest.raises(ValueError, match="parameter 0 of group 1: its state in the checkpoint is"):
        ours.load_state_dict(saved)
    # AdamW cannot use the momentum of torch.optim.Muon. So a checkpoint is accepted only without state for AdamW's
    # parameters, whose moments then start from zero.
    saved["state"][1] = {}
    ours.load_state_dict(saved)
    found = [[g[k] for k in ("split_sizes", "use_muon", "betas", "lr", "eps")] for g in ours.param_groups]
    # The eps of AdamW and the eps of torch.optim.Muon have different meanings, so the AdamW group keeps its default.
    assert found == [[4, True, (0.9, 0.95), 0.1, 1e-8], [None, False, (0.5, 0.6), 0.1, 1e-8]]
    run(ours, mine, [2])
    assert "exp_avg" in ours.state[mine[1]]
    assert len(ours.plan.items) == 4


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "CyclicLR without momentum": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 3),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_torch_optim_muon(name: str, tensor_lr: bool) -> None:
    """CyclicLR and OneCycleLR also cycle the momentum of Muon groups, but must leave the betas of AdamW groups
    alone."""
    lr, mine, theirs = torch.tensor(0.05) if tensor_lr else 0.05, matrices(), matrices()
    vector = {"params": [nn.Parameter(torch.ones(3))], "use_muon": False, "lr": 0.05}
    ours = Muon([{"params": mine}, vector], lr=lr, **LIKE_TORCH)
    torchs = torch.optim.Muon(theirs, lr=lr.clone() if tensor_lr else lr)
    schedulers, seen = [SCHEDULERS[name](optimizer) for optimizer in (ours, torchs)], set()
    for seed in range(6):
        found, wanted = ([float(o.param_groups[0][key]) for key in ("lr", "momentum")] for o in (ours, torchs))
        assert found == wanted
        seen.add(tuple(found))
        run(ours, mine, [seed])
        run(torchs, theirs, [seed])
        assert_equal(mine, theirs)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(seen) > 1, "the scheduler did nothing"
    assert ours.param_groups[1]["betas"] == (0.9, 0.95), "no momentum to cycle"


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    (p,), (q,) = matrices()[:1], matrices()[:1]
    ours, other, calls = Muon([p], lr=0.1), Muon([q], lr=0.1), list[bool]()

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        p.grad = 2 * p.detach()
        return p.detach().square().sum()

    for enabled in (True, False):
        before, q.grad = p.detach().square().sum(), 2 * q.detach()
        with torch.set_grad_enabled(enabled):
            assert torch.equal(torch.as_tensor(ours.step(closure)), before)
            assert torch.is_grad_enabled() is enabled
        assert other.step() is None
        assert_equal([p], [q])
    assert calls == [True, True]


def test_hooks_run() -> None:
    params, log = matrices(), list[tuple[str, bool]]()
    optimizer, start = Muon(params, lr=0.1), copies(params)

    def note(what: str) -> Callable[..., None]:
        return lambda o, *_: log.append((what, o is optimizer and torch.equal(params[0], start[0])))

    for where in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post"):
        getattr(optimizer, f"register_{where}_hook")(note(where))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "extra"})
    run(optimizer, params, [1])
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    Host().load(optimizer, saved)
    assert log[:3] == [("step_pre", True), ("step_post", False), ("state_dict_pre", False)]
    assert log[3:] == [("load_state_dict_pre", False), ("load_state_dict_post", False)] * 2


def _saved_to_a_file(params: list[nn.Parameter], optimizer: Muon) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved, others = torch.load(file, weights_only=True), list(map(nn.Parameter, copies(params)))
    assert saved["param_groups"][0]["param_names"] == [f"layer.{i}" for i in range(len(SHAPES))]
    other = _optimizer_of_two_kinds(others)
    other.load_state_dict(saved)
    return others, other


def _optimizer_of_two_kinds(params: list[nn.Parameter]) -> Muon:
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    groups = [{"params": named[:-1], "process_group": ()}, {"params": named[-1:], "use_muon": False}]
    return Muon(groups, lr=7.0, method="standard", bucket_bytes=64)


@pytest.mark.parametrize("again", [lambda *both: pickle.loads(pickle.dumps(both)), _saved_to_a_file])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_copy_continues_bit_for_bit_and_on_its_own(again: Callable[..., Any], steps_before: int) -> None:
    """A copy has all options of the original optimizer, even if the copy was made by loading a state dict into an
    optimizer with different options."""
    params = [*matrices(), nn.Parameter(normal(7, seed=9))]
    optimizer = _optimizer_of_two_kinds(params)
    of_matrices, of_vector = optimizer.param_groups
    of_matrices.update(lr=0.1, momentum=0.7, nesterov=False, adjust_lr_fn="spectral")
    of_matrices.update(ns_coefficients="polar_express", ns_steps=6)
    of_vector.update(lr=0.5, betas=(0.1, 0.2), eps=1e-3, weight_decay=torch.tensor(0.5))
    run(optimizer, params, range(steps_before))
    copied_params, copied = again(params, optimizer)
    assert copied.config == optimizer.config
    assert [g["process_group"] for g in copied.param_groups] == [g["process_group"] for g in optimizer.param_groups]
    before = copies(params)
    run(copied, copied_params, [5, 6])
    assert_equal(params, before)
    run(optimizer, params, [5, 6])
    assert_equal(copied_params, params)
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


# ---------------------------------------------------------------------------------------------- what is computed

# Formulas for the learning-rate scale of a matrix with r rows and c columns, keyed by the value of adjust_lr_fn.
SCALES: dict[Any, Callable[[int, int], float]] = {
    **dict.fromkeys(("original", None), lambda r, c: math.sqrt(max(1.0, r / c))),
    "match_rms_adamw": lambda r, c: 0.2 * math.sqrt(max(r, c)),
    "spectral": lambda r, c: math.sqrt(max(r, c)),
    "unit_rms_norm": lambda r, c: math.sqrt(r / c),
    "none": lambda r, c: 1.0,
}


def recovered(adjust: Any, shape: tuple[int, int], **options: Any) -> Tensor:
    """Take one step, and return the orthogonalized matrix times its learning-rate scale, in fp64, computed from the
    weights as (before - after) / lr."""
    p = nn.Parameter(normal(*shape).double())
    before = p.detach().clone()
    optimizer = Muon([p], lr=0.5, weight_decay=0.0, adjust_lr_fn=adjust, **options)
    p.grad = normal(*shape, seed=1).double()
    optimizer.step()
    return (before - p.detach()) / 0.5


@pytest.mark.parametrize("shape", [(4, 10), (10, 4), (3, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("given", SCALES, ids=str)
def test_every_lr_scale_is_its_formula(given: Any, shape: tuple[int, int]) -> None:
    assert {key for key in SCALES if isinstance(key, str)} == _LR_SCALES.keys()
    plain = recovered("none", shape)
    assert plain.any()
    found, scale = recovered(given, shape), SCALES[given](*shape)
    # `found` and `plain` are differences of stored weights, divided by the lr of 1/2, so the tolerance must cover the
    # rounding of the weights. Initial weights are at most 4 in magnitude. The other roundings are multiplications and
    # divisions by the lr and the scale.
    stored = 2 * (4.0 + 0.5 * float(found.abs().max())) / 0.5
    assert_rounded(found, plain * scale, roundings=6, scale=found.abs() + (1.0 + scale) * stored)


@pytest.mark.parametrize("factor", [1.0, 0.999, 0.5, 0.25, torch.tensor(0.999)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cautious_decay_has_the_bits_of_a_choice(dtype: torch.dtype, factor: float | Tensor) -> None:
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 1.0])
    ordinary = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    # The Cartesian product pairs every special value of the weight with every special value of `agreement`, whose sign
    # determines whether cautious weight decay applies.
    pairs = torch.cartesian_prod(special, special).T
    weight, agreement = (torch.cat([part, ordinary.roll(i)]).to(dtype) for i, part in enumerate(pairs))
    expected = torch.where(agreement > 0, weight * factor, weight)
    _decay_agreeing_(weight, agreement, factor)
    assert_bitwise(weight, expected)


# -------------------------------------------------------------------------------- options that change on the way


@pytest.mark.parametrize(
    ("variant", "changed"),
    [
        (None, {"ns_steps": 1, "split_sizes": 2, "lr": 0.5, "momentum": 0.5, "nesterov": False}),
        ("normuon", {"variant": "muon_eq"}),
    ],
)
def test_options_of_a_group_may_change_between_steps(variant: str | None, changed: dict[str, Any]) -> None:
    """Matrices of two groups share a batch as long as the options of the groups are equal. After an option changes, the
    next step must equal that of a new optimizer with the changed option."""
    mine, fresh = matrices(shapes=[(6, 9)] * 2), matrices(shapes=[(6, 9)] * 2)
    given: dict[str, Any] = {"lr": 0.1, "variant": variant}
    ours, first = (Muon([{"params": ps[:1]}, {"params": ps[1:]}], **given) for ps in (mine, fresh))
    run(ours, mine, [1])
    run(first, fresh, [1])
    ours.param_groups[1].update(changed)
    second = Muon([{"params": fresh[:1]}, {"params": fresh[1:], **changed}], **given)
    second.state.update(first.state)
    run(ours, mine, [2])
    run(second, fresh, [2])
    assert_equal(mine, fresh)


@pytest.mark.parametrize("key", ["lr", "weight_decay", "momentum"])
def test_a_number_that_is_a_tensor_may_change_in_place(key: str) -> None:
    mine, fresh = matrices(shapes=[(6, 9)]), matrices(shapes=[(6, 9)])
    number = torch.tensor(0.25)
    ours, plain = Muon(mine, **{"lr": 0.5, key: number}), Muon(fresh, **{"lr": 0.5, key: 0.25})
    run(ours, mine, [1])
    run(plain, fresh, [1])
    number.fill_(0.75)
    plain.param_groups[0][key] = 0.75
    run(ours, mine, [2])
    run(plain, fresh, [2])
    assert_equal(mine, fresh)


# --------------------------------------------------------------------------------------------------- bad options


def _w(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, "lr=-0.1 must be finite and at least 0"),
    ({"lr": math.nan}, "lr=nan must be finite"),
    ({"lr": torch.ones(2)}, "lr=tensor([1., 1.]) must have one element, found shape (2,)"),
    ({"lr": torch.tensor(-1.0)}, "lr=tensor(-1.) must be finite"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0 must be finite and at least 0"),
    ({"weight_decay": "0.1"}, "weight_decay='0.1' is text, not a number. Write it without quotes"),
    ({"momentum": "0.9"}, "momentum='0.9' is text, not a number"),
    ({"momentum": -0.1}, "momentum=-0.1 must be from 0 to 1"),
    ({"momentum": 1.5}, "momentum=1.5 must be from 0 to 1"),
    ({"momentum": None}, "momentum=None must be a number"),
    ({"ns_steps": 0}, "ns_steps=0 must be None or a whole number from 1 to 99"),
    ({"ns_steps": 100}, "ns_steps=100 must be None or a whole number from 1 to 99"),
    ({"ns_steps": 2.5}, "ns_steps=2.5 must be None or a whole number"),
    (
        {"ns_coefficients": (1.0, 2.0)},
        "ns_coefficients=(1.0, 2.0) must be the name of a schedule, (a, b, c) or one (a, b, c) per step",
    ),
    ({"ns_coefficients": ()}, "ns_coefficients=() must be the name of a schedule"),
    ({"ns_coefficients": None}, "ns_coefficients=None must be the name of a schedule"),
    ({"ns_coefficients": [(1.0, 2.0)]}, "ns_coefficients=[(1.0, 2.0)] must be the name of a schedule"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms' is not one of None, 'original'"),
    ({"nesterov": "no"}, "nesterov='no' is not one of True, False"),
    ({"method": "cubic"}, "method='cubic' is not one of 'auto', 'standard'"),
    ({"ns_dtype": torch.int32}, "ns_dtype=torch.int32 is not one of None, torch.bfloat16"),
    ({"method": "gram", "ns_dtype": torch.bfloat16}, "method='gram' needs products in torch.float16, torch.float32"),
    ({"bucket_bytes": 0}, "bucket_bytes=0 must be None or a whole number from 1 on"),
    ({"stochastic_rounding": 1}, "stochastic_rounding=1 is not one of True, False"),
    ({"momentum_dtype": "float16"}, "momentum_dtype='float16' is not one of None, torch.float32"),
    ({"variant": "adamuon"}, "variant='adamuon': 'adamuon' is not one of 'muon_eq', 'normuon', 'hyperball'"),
    ({"variant": "normuon+normuon"}, "variant='normuon+normuon' names 'normuon' twice"),
    ({"variant": ("muon_eq", "normuon")}, "variant=('muon_eq', 'normuon') must be None or text: one of 'muon_eq',"),
    (
        {"variant": "hyperball+cautious", "weight_decay": 0.0},
        "variant='hyperball+cautious': 'hyperball' keeps the norm of weights, which do not decay then",
    ),
    ({"variant": "hyperball", "weight_decay": 0.1}, "variant='hyperball': 'hyperball' keeps the norm of weights, so"),
    ({"audit_every": 0}, "audit_every=0 must be None or a whole number"),
    ({"momentum_device": "cuda"}, "momentum_device='cuda' is not one of None, 'cpu'"),
]

# Each row gives a name that other packages or older versions use for an option, and the error text, which contains the
# correct name.
SPELLINGS = {
    "num_heads": "is written split_sizes=h",
    "rank_local": "is written process_group=(), tp_group=()",
    "weight_decay_mode": 'is part of the variant: write variant="cautious"',
    "beta2": "of NorMuon is 0.95",
    "orthogonalizer": "is written Muon(..., method=..., ns_dtype=...)",
    "exchange": "is written Muon(..., bucket_bytes=...)",
    "storage": "is written Muon(..., momentum_dtype=..., momentum_device=..., stochastic_rounding=...)",
    "audit": "is written Muon(..., audit_every=...)",
}
MISSPELLED = {
    "weight_deacy": "weight_decay",
    "wd": "weight_decay",
    "momentums": "momentum",
    "nestrov": "nesterov",
    "split_size": "split_sizes",
    "use_mu0n": "use_muon",
    "learning_rate": "lr",
    "ns_step": "ns_steps",
    "adjust_lr": "adjust_lr_fn",
    "betas_": "betas",
}
BAD_KEYS = {
    **{key: f"{key} {says}" for key, says in SPELLINGS.items()},
    **{key: f"{key} applies to the whole optimizer. Write Muon(..., {key}=...)" for key in vars(MuonConfig())},
    **{key: f"there is no group option '{key}' (did you mean {near}?)" for key, near in MISSPELLED.items()},
}
OF_MATRICES = dict.fromkeys(ONLY_MUON, 7) | {
    "momentum": 0.5,
    "adjust_lr_fn": "none",
    "variant": "cautious",
    "nesterov": False,
    "transposed": True,
}
BAD_KEYWORDS = {
    **{key: f": {key} {says}" for key, says in SPELLINGS.items()},
    "split_sizes": ': it is an option of a group. Write {"params": [...], "split_sizes": ...}, or an override',
    "betas": ': it is an option of a group. Write {"params": [...], "betas": ...}, or an override',
    "learning_rate": " (did you mean lr?)",
    "momentum_dtpye": " (did you mean momentum_dtype?)",
    "capturable": "",
}

BAD_GROUPS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: {"params": [("w", _w(4, 4))], "lr": -1.0}, ValueError, "group 1: lr=-1.0 must be finite"),
    *(
        (
            lambda key=key: {"params": [("w", _w(4, 4))], key: "no"},
            ValueError,
            f"group 1: {key}='no' is not one of True",
        )
        for key in ("use_muon", "transposed")
    ),
    (
        lambda: {"params": [("w", _w(4, 4))], "split_dim": 1},
        ValueError,
        "group 1: split_dim is told by transposed=True",
    ),
    *(
        (
            lambda key=key: {"params": [("w", _w(4, 4))], key: 0},
            ValueError,
            f"group 1: {key} belongs to the tensor: write",
        )
        for key in ("partition_dim", "partition_stride")
    ),
    *(
        (
            lambda key=key, value=value: {"params": [("w", _w(4, 4))], "use_muon": False, key: value},
            ValueError,
            f"group 1: {key}={value} cannot be taken over: ",
        )
        for key, value in (("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", False))
    ),
    (lambda: {"params": [("w", _w(12, 4))], "split_sizes": (8, 3)}, ValueError, "w: split_sizes=(8, 3) sum to 11, but"),
    (
        lambda: {"params": [("w", _w(12, 4))], "split_sizes": (2, 2), "split_groups": 2},
        ValueError,
        "w: split_sizes=(2, 2) sum to 4 times split_groups=2, but there are 12 rows",
    ),
    (lambda: {"params": [("w", _w(12, 4))], "split_groups": 2}, ValueError, "w: split_groups=2 needs split_sizes"),
    (lambda: {"params": [("w", _w(12, 4))], "split_sizes": (12, 0)}, ValueError, "must be positive row counts"),
    (
        lambda: {"params": [("w", _w(12, 4))], "split_sizes": 5},
        ValueError,
        "w: split_sizes=5 does not divide the 12 rows",
    ),
    (lambda: {"params": [("w", _w(12, 4))], "split_sizes": 0}, ValueError, "w: split_sizes=0 does not divide"),
    (
        lambda: {"params": [("w", _w(12, 4))], "split_sizes": 2, "split_groups": 2},
        ValueError,
        "w: split_groups=2 needs split_sizes, the row counts of one repeat, found split_sizes=2",
    ),
    (
        lambda: {"params": [("w", _w(3, 4, 5))]},
        ValueError,
        "w: shape (3, 4, 5) is 3-D: write view='stack' if it holds 3",
    ),
    (lambda: {"params": [("w", _w(4, 5))], "view": "stack"}, ValueError, "w: view='stack' needs a 3-D"),
    (lambda: {"params": [("w", _w(4, 5))], "view": "batch"}, ValueError, "w: view='batch' is not one of"),
    (lambda: {"params": [("w", _w(4))]}, ValueError, "w: shape (4,) has 1 dim(s) and cannot be a matrix"),
    (lambda: {"params": [("w", _w())]}, ValueError, "w: shape () has 0 dim(s)"),
    (lambda: {"params": [("w", _w(0, 4))]}, ValueError, "w: shape (0, 4) has no elements"),
    *(
        (
            lambda key=key, value=value: {"params": [("w", _w(4))], "use_muon": False, "eps": 1e-8, key: value},
            ValueError,
            f"w: {{{key!r}: {value!r}}} are options of matrices, but the group says use_muon=False",
        )
        for key, value in OF_MATRICES.items()
    ),
    *(
        (lambda key=key: {"params": [("w", _w(4, 4))], key: 0.5}, ValueError, f"group 1: {says}")
        for key, says in BAD_KEYS.items()
    ),
    (
        lambda: {"params": [("w", _w(4, 4))], "use_muon": False, "betas": (0.9, 1.0)},
        ValueError,
        "group 1: betas=(0.9, 1.0) must be two numbers in [0, 1)",
    ),
    (
        lambda: {"params": [("w", _w(4, 4))], "use_muon": False, "betas": 0.9},
        ValueError,
        "group 1: betas=0.9 must be two numbers",
    ),
    (
        lambda: {"params": [("w", torch.zeros(4, 4, dtype=torch.complex64))]},
        TypeError,
        "w: dtype torch.complex64 cannot be optimized; parameters must be real",
    ),
    (
        lambda: {"params": [("w", torch.zeros(4, 4, dtype=torch.int64))]},
        TypeError,
        "w: dtype torch.int64 cannot be optimized",
    ),
    (lambda: {"params": [("w", "weights.pt")]}, TypeError, "w: an optimizer takes tensors, found str"),
    (lambda: {"params": {_w(4, 4)}}, TypeError, "give a list, not a set"),
    (lambda: {"params": [_w(4, 4)]}, ValueError, "its parameters have no names, those of the other groups have"),
    (lambda: {"params": [("w", _w(4, 4) * 2)]}, ValueError, "can't optimize a non-leaf Tensor"),
    (lambda: [("params", [_w(2, 2)])], TypeError, "a param group must be a dict, found list"),
    (
        lambda: {"params": [("b", (p := _w(4, 4))), ("c", p)]},
        ValueError,
        "c: the same parameter is listed twice (first as b)",
    ),
]


_NO_LR = 'needs lr: write lr=0.03 to train from scratch, AdamW\'s lr with adjust_lr_fn="match_rms_adamw" coming from'
BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Muon(matrices()), TypeError, f"Muon {_NO_LR}"),
    # `Muon` requires an lr even if every group has one, because groups that are added later would otherwise have no lr.
    (lambda: Muon([{"params": matrices(), "lr": 0.1}]), TypeError, f"Muon {_NO_LR}"),
    (lambda: Muon(nn.Linear(3, 4)), TypeError, f"Muon {_NO_LR}"),
    (lambda: param_groups(nn.Linear(3, 4)), TypeError, f"param_groups {_NO_LR}"),
    (lambda: Muon(nn.Linear(3, 4), lr="1e-3"), ValueError, "lr='1e-3' is text, not a number"),  # type: ignore[arg-type]
    (lambda: param_groups(nn.Linear(3, 4), lr="1e-3"), ValueError, "weight: lr='1e-3' is text"),  # type: ignore[arg-type]
    (lambda: param_groups(nn.Linear(3, 4), lr=1, adjust_lr_fn="rms"), ValueError, "weight: adjust_lr_fn='rms' is not"),
    (lambda: Muon([{"params": matrices(), "lr": "1e-3"}], lr=0.1), ValueError, "group 0: lr='1e-3' is text"),
    *(
        (lambda given=given: Muon(nn.Linear(3, 4), lr=0.1, **given), ValueError, f"group 1: {says}")  # type: ignore[misc]
        for given, says in (
            ({"adamw_lr": "1e-3"}, "lr='1e-3' is text"),
            ({"overrides": {"bias": {"eps": "1e-8"}}}, "eps='1e-8' is text"),
            ({"overrides": {"bias": {"betas": ("0.9", "0.95")}}}, "betas=('0.9', '0.95') must be two numbers"),
        )
    ),
    (
        lambda: Muon([{"params": [_w(2, 2), (p := _w(4, 4))]}, {"params": [p], "use_muon": False}], lr=1e-3),
        ValueError,
        "parameter 0 of group 1: the same parameter is listed twice",
    ),
    (lambda: Muon([("blocks.0.conv", _w(3, 4, 5))], lr=1e-3), ValueError, "blocks.0.conv: shape (3, 4, 5) is 3-D"),
    (lambda: Muon([], lr=1e-3), ValueError, "optimizer got an empty parameter list"),
    (lambda: Muon([_w(2, 2), _w(3)], lr=1e-3), ValueError, "parameter 1 of group 0: shape (3,) has 1 dim"),
    *((lambda given=given: Muon(matrices(), **{"lr": 1e-3, **given}), ValueError, says) for given, says in BAD_OPTIONS),  # type: ignore[misc]
]


@pytest.mark.parametrize(("make", "error", "says"), BAD_CALLS, ids=[says for *_, says in BAD_CALLS])
def test_bad_options_are_refused_with_what_to_write(
    make: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(says)}"):
        make()


@pytest.mark.parametrize("key", BAD_KEYWORDS)
def test_a_keyword_that_is_none_says_what_to_write(key: str) -> None:
    given: dict[str, Any] = {key: 1}
    says = f"got an unexpected keyword argument {key!r}{BAD_KEYWORDS[key]}"
    with pytest.raises(TypeError, match=re.escape(says) + ("$" if key not in SPELLINGS else "")):
        Muon(matrices(), lr=0.1, **given)


@pytest.mark.parametrize(("make", "error", "says"), BAD_GROUPS, ids=[says for *_, says in BAD_GROUPS])
def test_bad_groups_are_refused_and_leave_the_optimizer_as_it_was(
    make: Callable[[], Any], error: type[Exception], says: str
) -> None:
    p = nn.Parameter(normal(6, 4))
    optimizer = Muon([("first", p)], lr=0.1)
    run(optimizer, [p], [1])
    before, groups = everything(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    given = make()
    kept = copy.copy(given)
    with pytest.raises(error, match=re.escape(says)):
        optimizer.add_param_group(given)
    assert optimizer.state_dict()["param_groups"] == groups
    assert_equal(everything(optimizer), before)
    assert list(given) == list(kept), "the caller's dict has changed"
    run(optimizer, [p], [2])
