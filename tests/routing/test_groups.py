"""Tests of routing: every trainable parameter goes to Muon or AdamW based on its module type and shape, and ambiguous
cases are reported."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_models import (
    LAYERS,
    Llama,
    bare,
    but,
    conv1d,
    experts,
    frozen,
    gpt2_attention,
    gpt_oss_experts,
    hooked,
    known_types,
    linear,
    marked_block,
    placeholder,
    routed,
    shared,
    subclassed,
    table,
    tensor_parallel,
    tied,
    typed,
)
from spectra import run
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardmuon.layout.views import matrix_view
from shardmuon.muon import Muon
from shardmuon.options import ONLY_MUON, PLACE_OPTIONS, VIEW_DEFAULTS, MuonConfig
from shardmuon.routing.groups import param_groups
from shardmuon.testing import RankPool

# ------------------------------------------------------------------------------------------- what goes where, and why


class Case(NamedTuple):
    """A model and its expected routing.

    Attributes:
        model: Function that builds the model.
        rows: Expected fields of rows in the routing table, keyed by parameter name.
        says: Patterns, one for each expected warning.
        overrides: The `overrides` argument for routing.
        muon: Names of all parameters that go to Muon. If None, the test does not check these names.
    """

    model: Callable[[], nn.Module]
    rows: Mapping[str, Mapping[str, object]] = {}
    says: tuple[str, ...] = ()
    overrides: Any = None
    muon: list[str] | None = None


def why(**reasons: str) -> dict[str, dict[str, object]]:
    """Return the expected reasons for the routing of parameters, keyed by weight name. In the names of the keyword
    arguments, "__" stands for a dot."""
    return {f"{name.replace('__', '.')}.weight": {"reason": reason} for name, reason in reasons.items()}


def of(*matrices: tuple[int, int]) -> dict[str, object]:
    return {"matrices": matrices}


_MUON: dict[str, object] = {"optimizer": "Muon"}
_ADAMW: dict[str, object] = {"optimizer": "AdamW"}
_EQUAL = "output head: rows equal a vocabulary (100)"
_LAST = "output head: last matrix with as many rows as a vocabulary (16)"
_UNSURE = (
    r"went to AdamW as output heads, having as many rows as an embedding \(\d+\), though .*If right, write overrides="
)
_TWO_HEADS = {"head.weight": "adamw", "second.weight": "muon"}
_BOTH = [f"{model}.{name}" for model in ("actor", "critic") for name in LAYERS]


def three(**others: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that builds a model of a 16 x 16 embedding and the layers `others`, without repeated blocks."""
    return lambda: nn.ModuleDict({"embed": nn.Embedding(16, 16), **others})


def llama(*sizes: int, tied: bool = False, **others: nn.Module) -> Callable[[], nn.Module]:
    return lambda: but(Llama(*sizes, tied=tied), **others)


def two_models(*sizes: int) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({"actor": Llama(*sizes), "critic": Llama(*sizes)})


_QKH = {"q": linear(), "k": linear(), "head": linear()}
HEADS: dict[str, Case] = {
    "a tied embedding, first": Case(
        lambda: tied(head_first=False), why(embed="embedding, tied to head.weight"), muon=["hidden.weight"]
    ),
    "a tied embedding, last": Case(
        lambda: tied(head_first=True), why(head="tied to embedding embed.weight"), muon=["hidden.weight"]
    ),
    "a decoder": Case(Llama, why(head=_EQUAL, norm="norm", embed="embedding"), muon=LAYERS),
    "as wide as the vocabulary": Case(llama(16, 16), why(head=_LAST), muon=LAYERS),
    "one block": Case(lambda: Llama(16, 16, depth=1), muon=LAYERS[:6]),
    # The vocabulary size is 8, so a linear layer with 8 rows could be an output head. wk and wv have 8 rows, but must
    # go to Muon, because neither is the last matrix of its repeated block.
    "keys with the rows of a vocabulary": Case(llama(8, 16, 8), muon=LAYERS),
    "tied, another as wide": Case(llama(tied=True, project=linear()), muon=[*LAYERS, "project.weight"]),
    "tied, all as wide": Case(llama(16, 16, tied=True, project=linear()), muon=[*LAYERS, "project.weight"]),
    "nothing tells the head": Case(
        three(**_QKH),
        says=(rf'head\.weight {_UNSURE}\{{"head\.weight": "ad',),
        muon=["q.weight", "k.weight"],
    ),
    "settled": Case(three(**_QKH), overrides={"head.weight": "adamw"}, muon=["q.weight", "k.weight"]),
    "settled otherwise": Case(three(**_QKH), overrides={"q.weight": "adamw"}, muon=["k.weight", "head.weight"]),
    "a lone candidate that is not last": Case(
        three(inner=linear(), out=linear(16, 5)), says=(rf"inner\.weight {_UNSURE}",), muon=["out.weight"]
    ),
    "which is hidden": Case(
        three(inner=linear(), out=linear(16, 5)),
        overrides={"inner.weight": "muon"},
        muon=["inner.weight", "out.weight"],
    ),
    "several candidates": Case(
        llama(second=linear(16, 100)), says=(rf"head\.weight, second\.weight {_UNSURE}",), muon=LAYERS
    ),
    "of which one is hidden": Case(
        llama(second=linear(16, 100)), overrides=_TWO_HEADS, muon=[*LAYERS, "second.weight"]
    ),
    "heads that end repeated blocks": Case(
        llama(extra=nn.ModuleList(nn.Sequential(linear(), linear(16, 100)) for _ in range(2))),
        says=(rf"extra.* {_UNSURE}",),
        muon=[*LAYERS, *(f"extra.{i}.0.weight" for i in range(2))],
    ),
    "two models are no blocks": Case(
        two_models(),
        why(actor__head=_EQUAL, critic__head=_EQUAL),
        (rf"actor\.head\.weight, critic\.head\.weight {_UNSURE}",),
        muon=_BOTH,
    ),
    "two models of bytes": Case(
        two_models(16, 16),
        says=(rf"critic\.head\.weight {_UNSURE}",),
        muon=[*_BOTH[: len(LAYERS)], "actor.head.weight", *_BOTH[len(LAYERS) :]],
    ),
    "a head for positions beside a tied head": Case(
        llama(tied=True, positions=nn.Embedding(40, 16), project=linear(16, 40)),
        says=(rf"project\.weight {_UNSURE}",),
        muon=LAYERS,
    ),
    "a bare head is no linear layer, and is asked about": Case(
        lambda: but(nn.ModuleDict({"e": nn.Embedding(100, 16), "n": nn.RMSNorm(16)}), unembed=table(100, 16)),
        says=(r"unembed \(100x16\) .*no rule recognizes",),
        muon=["unembed"],
    ),
    "a model that names its head": Case(
        lambda: hooked("decoder"), why(decoder="output head: get_output_embeddings()"), muon=["pooler.weight"]
    ),
    "below a wrapper": Case(lambda: nn.DataParallel(hooked("decoder")), muon=["pooler.weight"]),
    "a model that says it has none": Case(lambda: hooked(None), muon=["decoder.weight", "pooler.weight"]),
    "embeddings by their sizes, not by their names": Case(
        lambda: nn.ModuleDict(
            {
                "lm_head": linear(8, 8),
                "linear": but(bare(40, 8), num_embeddings=40, embedding_dim=8),
                "bag": nn.EmbeddingBag(30, 8),
            }
        ),
        muon=["lm_head.weight"],
    ),
    "a frozen embedding still tells the vocabulary": Case(
        lambda: frozen(Llama(), "embed"), why(embed="requires_grad is False", head=_EQUAL), muon=LAYERS
    ),
    "attention as wide as the vocabulary": Case(
        three(head=linear(), attention=nn.MultiheadAttention(16, 4)),
        says=(rf"head\.weight {_UNSURE}",),
        muon=["attention.in_proj_weight", "attention.out_proj.weight"],
    ),
}


# ------------------------------------------------------------------------------------------- what users and modules say


def three_dims(num: int, rows: int, cols: int) -> Case:
    """Return a test case with a 3-D parameter in a module of unknown type. The shape alone does not tell whether the
    parameter is a stack of experts (transposed or not) or a lookup table."""
    went = rf"weight \({num}x{rows}x{cols}\) .*a stack of matrices, each of \(outputs, inputs\)\. "
    settle = r'If right, write overrides=\{"weight": "muon"\}; \{"transposed": True\} if .*"adamw" if it is a table'
    row: dict[str, object] = {"reason": f"stack of {num} matrices, by its shape alone", **of(*[(rows, cols)] * num)}
    return Case(lambda: bare(num, rows, cols), {"weight": {**_MUON, **row}}, (went + settle,))


def beside(*models: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({str(number): one for number, one in enumerate((*models, nn.Linear(4, 4)))})


def turned_over(*names: str) -> tuple[str, ...]:
    """Return the warnings expected for experts that have no router of matching shape and therefore seem to be stored
    transposed."""
    return tuple(rf'parameter of Experts.*"{re.escape(n)}": "muon"\}}; \{{"transposed": True\}} if' for n in names)


def small(name: str, param: Tensor, module: nn.Module) -> bool:
    return name.startswith("layers.0") and param.shape[0] == 8 and isinstance(module, nn.Linear)


# The fused QKV weight has two query groups. Each group has four query heads, one key head and one value head. The head
# size is 2.
_QKV = {"split_sizes": [8, 2, 2], "split_groups": 2}
_TURNED = {"transposed": True}
_PAIRS: dict[str, object] = {**_ADAMW, "reason": "last dim of 2: pairs of numbers, as complex ones are kept"}
_TABLE = r"0\.weight \(1x5x8\) .* stack of one expert.*overrides=\{\"0.weight\": \"adamw\"\}; \{\"use_muon\": True"
_CONV = "convolution, 1 group, shared with conv.weight"
SAID: dict[str, Case] = {
    **{f"three dims {sizes}": three_dims(*sizes) for sizes in ((8, 64, 48), (14, 14, 384), (4, 15, 15), (2, 5, 32))},
    "one warning for each kind": Case(
        beside(bare(8, 64, 48), bare(8, 64, 48), bare(6, 4), bare(6, 4)),
        {"3.weight": {**_MUON, **of((6, 4))}},
        (
            r"0\.weight \(8x64x48; 1 more like it\) is a parameter of Bare",
            r'2\.weight \(6x4; 1 more like it\).*overrides=\{"\*\.weight": "muon"\}; \{"transposed": True\} if',
        ),
    ),
    **{
        f"three dims, settled by {choice}": Case(
            beside(bare(8, 64, 48), bare(8, 64, 48)), overrides={"[01].weight": choice}
        )
        for choice in ("muon", "adamw", _TURNED, {"view": "stack"})
    },
    "a router confirms experts": Case(
        beside(experts()), {"0.w_down": {"reason": "stack of 4 experts, chosen by 0.router.weight"}}
    ),
    "a router of something else": Case(lambda: experts(router=5), says=(r"w_up \(4x24x16\)", r"w_down \(4x16x24\)")),
    "a router in the module around them": Case(lambda: experts(apart=True)),
    "experts that seem to be turned": Case(lambda: experts(inputs_first=True), says=turned_over("w_up", "w_down")),
    "one of them is settled": Case(
        lambda: experts(inputs_first=True), says=turned_over("w_up"), overrides={"w_down": _TURNED}
    ),
    "turned experts in two layers": Case(
        beside(experts(inputs_first=True), experts(inputs_first=True)), says=turned_over("*.w_up", "*.w_down")
    ),
    "experts that are settled": Case(lambda: experts(inputs_first=True), overrides={"w_*": "muon"}),
    "experts that are square": Case(lambda: experts(inputs_first=True, inner=16)),
    "turned experts": Case(
        lambda: experts(inputs_first=True),
        {"w_up": of(*[(24, 16)] * 4), "w_down": of(*[(16, 24)] * 4)},
        overrides={"w_*": _TURNED},
    ),
    **{
        f"complex numbers {sizes}": Case(
            beside(bare(*sizes)),
            {"0.weight": _PAIRS},
            (
                rf"\({'x'.join(map(str, sizes))}\) is a parameter of Bare with a last dim of 2.* It went to AdamW. "
                r'If right, write overrides=\{"0.weight": "adamw"\}; "muon" if',
            ),
        )
        for sizes in ((16, 8, 2), (16, 2))
    },
    "complex numbers, settled": Case(beside(bare(16, 8, 2)), overrides={"0.weight": "adamw"}),
    "complex numbers as a stack": Case(
        beside(bare(16, 8, 2)), {"0.weight": of(*[(8, 2)] * 16)}, overrides={"0.weight": "muon"}
    ),
    "complex numbers as a matrix": Case(beside(bare(16, 2)), {"0.weight": of((16, 2))}, overrides={"0.weight": "muon"}),
    "a table for a batch or a stack of one expert": Case(beside(bare(1, 5, 8)), {"0.weight": _ADAMW}, (_TABLE,)),
    "a stack of one expert is said beside its partner": Case(
        beside(typed("Stacks", up=table(1, 12, 8), down=table(1, 8, 12)), nn.LayerNorm(8)),
        says=(r"0\.up .*stack of one expert", r"0\.down .*stack of one expert"),
    ),
    "a table": Case(beside(bare(1, 5, 8)), {"0.weight": _ADAMW}, overrides={"0.*": "adamw"}),
    "a stack of one expert": Case(
        beside(bare(1, 5, 8)), {"0.weight": of((5, 8))}, overrides={"0.*": {"use_muon": True, "view": "stack"}}
    ),
    "a linear of somebody else's is asked about": Case(
        beside(typed("Linear", "somewhere.else", weight=table(6, 4))),
        says=("weight .* is a parameter of Linear, which no rule recognizes",),
    ),
    "no matrix": Case(lambda: nn.LayerNorm(4), {"weight": _ADAMW}, ("no parameter goes to Muon",)),
    "an override makes a scalar head a matrix": Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
        {"1.weight": of((1, 8))},
        overrides={"1.weight": "muon"},
    ),
    "a reference kept elsewhere changes nothing": Case(
        lambda: but(nn.ModuleDict({"a": shared(conv=nn.Conv1d(4, 8, 3), a=bare(1))}), b=linear()),
        {"a.conv.weight": {**of((8, 12)), "reason": "convolution, 1 group, shared with a.a.weight"}},
    ),
    "nor does it where it comes first": Case(
        lambda: nn.ModuleDict(dict(reversed([*shared(conv=nn.Conv1d(4, 8, 3), a=bare(1)).named_children()]))),
        {"a.weight": {**of((8, 12)), "reason": _CONV}},
    ),
    "an override settles a weight that modules read differently": Case(
        lambda: shared(conv=nn.Conv2d(8, 8, 1), deep=nn.Conv2d(8, 8, 1, groups=2)),
        {"conv.weight": of((8, 8))},
        overrides={"conv.weight": {"use_muon": True, "view": "flatten"}},
    ),
    "the first override that matches wins": Case(
        Llama,
        {
            "layers.0.wq.weight": {**_ADAMW, "reason": "override 'layers.0.*q*'"},
            "layers.1.wq.weight": {"reason": "linear, override '*.w?.weight'"},
        },
        overrides=[("layers.0.*q*", "adamw"), ("*.w?.weight", {"lr": 0.5}), ("*.wq.weight", "muon")],
    ),
    "a predicate sees name, parameter and module": Case(
        Llama,
        why(layers__0__wk="override small", layers__0__wv="override small", norm="norm", layers__1__wk="linear"),
        overrides=[(small, "adamw")],
    ),
    "an override reaches a tied weight by any of its names": Case(
        lambda: tied(head_first=False), {"embed.weight": of((100, 8))}, overrides={"head.weight": "muon"}
    ),
    "interleaved grouped-query weights split into q, k and v": Case(
        lambda: nn.ModuleDict({"qkv": linear(16, 24)}),
        {"qkv.weight": of((16, 16), (4, 16), (4, 16))},
        overrides={"qkv.weight": _QKV},
    ),
    "heads given replace default splits": Case(
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": of(*[(4, 8)] * 6)},
        overrides={"in_proj_weight": {"split_sizes": 6}},
    ),
    "no splits given replace default splits": Case(
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": of((24, 8))},
        overrides={"in_proj_weight": {"split_sizes": None}},
    ),
    "no heads given replace default ones": Case(
        lambda: nn.Conv2d(8, 8, 1, groups=2), {"weight": of((8, 4))}, overrides={"weight": {"split_sizes": None}}
    ),
    "columns still, in halves": Case(
        gpt_oss_experts, {"gate_up_proj": of(*[(10, 8)] * 6)}, overrides={"gate_up_proj": {"split_sizes": 2}}
    ),
    "still turned, no longer split": Case(
        gpt2_attention, {"c_attn.weight": of((24, 8))}, overrides={"c_attn.weight": {"split_sizes": None}}
    ),
    "a Conv1D that is not turned": Case(
        lambda: conv1d(12, 8), {"weight": of((8, 12))}, overrides={"weight": {"transposed": False}}
    ),
    "biases of experts as a matrix": Case(
        gpt_oss_experts, {"down_proj_bias": of((3, 8))}, overrides={"down_proj_bias": "muon"}
    ),
    "a type is known below wrappers and by its subclasses": Case(
        beside(
            checkpoint_wrapper(gpt2_attention()),
            typed("OptimizedModule", "torch._dynamo.eval_frame", _orig_mod=gpt2_attention()),
            subclassed(gpt2_attention()),
        ),
        {f"{at}.c_attn.weight": of(*[(8, 8)] * 3) for at in range(3)},
    ),
    "use_muon of a parameter, below overrides": Case(
        marked_block,
        {
            "layers.0.wk.weight": {**_ADAMW, "reason": "p.use_muon"},
            "layers.0.wq.weight": _MUON,
            "layers.1.wk.weight": _MUON,
        },
        overrides={"*.wq.weight": "muon"},
    ),
    "a parameter that Megatron marks as embedding": Case(
        beside(typed("Replica", weight=but(table(40, 8), is_embedding_or_output_parameter=True))),
        {"0.weight": {"reason": "p.is_embedding_or_output_parameter"}},
    ),
    "a placeholder counts by the shape it stands for": Case(
        lambda: placeholder(linear(4, 6), (6, 4)), {"weight": {**_MUON, "shape": (6, 4), **of((6, 4))}}
    ),
    "a placeholder of a head": Case(lambda: but(Llama(), head=placeholder(linear(), (100, 16))), why(head=_EQUAL)),
    "a tensor-parallel layer over one rank is whole": Case(lambda: tensor_parallel(8), {"weight": of((8, 4))}),
}


_NORMED = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
_APART = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
# Each case gives a module, the name of a parameter, the expected shapes of its matrices (none if the parameter goes to
# AdamW), and the expected reason for the routing (not checked if empty).
KINDS: list[tuple[nn.Module, str, tuple[tuple[int, int], ...], str]] = [
    (nn.Conv2d(3, 8, 3), "weight", ((8, 27),), "convolution, 1 group"),
    (nn.Conv2d(1, 8, 3), "weight", ((8, 9),), ""),
    (nn.Conv1d(4, 8, 3), "weight", ((8, 12),), ""),
    (nn.Conv3d(2, 8, 2), "weight", ((8, 16),), ""),
    (nn.Conv2d(8, 4, 1), "weight", ((4, 8),), ""),
    (nn.Conv2d(8, 12, 3, groups=4), "weight", ((3, 18),) * 4, "convolution, 4 groups"),
    (nn.ConvTranspose2d(6, 8, 2), "weight", ((6, 32),), ""),
    (nn.ConvTranspose2d(6, 8, 2, groups=2), "weight", ((3, 16),) * 2, ""),
    (nn.ConvTranspose2d(8, 4, 2, groups=4), "weight", ((2, 4),) * 4, ""),
    (nn.Conv2d(8, 8, 3, groups=8), "weight", (), "depthwise convolution"),
    (nn.Conv1d(8, 16, 4, groups=8), "weight", (), "depthwise convolution"),
    (nn.ConvTranspose2d(8, 8, 2, groups=8), "weight", (), "depthwise convolution"),
    (nn.Conv2d(8, 1, 3), "weight", (), "1 vector (1x72)"),
    *(
        (norm, "weight", (), "norm")
        for norm in (
            *(nn.LayerNorm(4), nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4)), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)),
            *(nn.InstanceNorm1d(4, affine=True), nn.SyncBatchNorm(4)),
        )
    ),
    (nn.MultiheadAttention(8, 2), "in_proj_weight", ((8, 8),) * 3, "fused q, k, v"),
    (_APART, "q_proj_weight", ((8, 8),), "linear"),
    (_APART, "k_proj_weight", ((8, 4),), "linear"),
    (_APART, "v_proj_weight", ((8, 6),), "linear"),
    (_APART, "bias_k", (), "1 vector (1x1x8)"),
    (nn.LSTM(6, 4), "weight_ih_l0", ((4, 6),) * 4, "4 fused gates"),
    (nn.LSTM(6, 4, proj_size=3), "weight_hr_l0", ((3, 4),), "linear"),
    (nn.GRUCell(6, 4), "weight_hh", ((4, 4),) * 3, "3 fused gates"),
    (nn.RNN(6, 4), "weight_hh_l0", ((4, 4),), "linear"),
    (_NORMED, "parametrizations.weight.original0", (), "1 vector (8x1x1x1)"),
    (_NORMED, "parametrizations.weight.original1", ((8, 27),), "convolution, 1 group"),
    (nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), "parametrizations.weight.original", ((4, 4),), "linear"),
    # The weight of a Linear with two inputs must go to Muon, although a last dim of 2 may stand for complex numbers.
    (nn.Linear(2, 16), "weight", ((16, 2),), "linear"),
    (nn.Linear(8, 1), "weight", (), "1 vector (1x8)"),
    (nn.Bilinear(4, 6, 5), "weight", ((4, 6),) * 5, "a matrix for each output"),
    (nn.Bilinear(4, 2, 5), "weight", ((4, 2),) * 5, ""),
    *((bare(*sizes), "weight", (), "") for sizes in ((1, 5), (5, 1), (1, 1, 5), (4, 1, 5), (1, 4, 5, 6), (7, 1, 1))),
]


CASES = HEADS | SAID
for _module, _leaf, _matrices, _reason in KINDS:
    _row: dict[str, object] = {**(_MUON if _matrices else _ADAMW), **of(*_matrices)}
    CASES[f"{_module} {_leaf}"] = Case(beside(_module), {f"0.{_leaf}": _row | ({"reason": _reason} if _reason else {})})


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_goes_where_it_belongs_for_a_reason_and_what_is_left_open_is_said(case: str) -> None:
    model, wanted, says, overrides, muon = CASES[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = routed(model(), overrides=overrides)
    assert muon in (None, [name for name, row in rows.items() if row.optimizer == "Muon"])
    assert {name: {key: getattr(rows[name], key) for key in row} for name, row in wanted.items()} == wanted
    assert len(caught) == len(says)
    assert all(re.search(pattern, str(one.message)) for pattern, one in zip(says, caught, strict=True))


# ----------------------------------------------------------------------------------------------- what is refused


def never(name: str, param: Tensor, module: nn.Module) -> bool:
    return False


def over(pattern: str, choice: Any) -> tuple[Callable[[], Any], Any]:
    return Llama, {pattern: choice}


_WRAP = "Build the groups before wrapping"
_NAMED = r"matches none of the model's 17 parameter names \(did you mean "
# Each case gives a function that makes a model, the overrides for its routing, and the type and message of the expected
# error.
REFUSED: list[tuple[Callable[[], Any], Any, type[Exception], str]] = [
    (
        lambda: shared(conv=nn.Conv2d(8, 8, 1), deep=nn.Conv2d(8, 8, 1, groups=2)),
        None,
        ValueError,
        r"conv\.weight is shared by modules that read it differently.*overrides=\{",
    ),
    (Llama, [(never, "adamw")], ValueError, "override never matches none"),
    (*over("*.w_q.weight", "adamw"), ValueError, _NAMED + r"layers\.[01]\.wq\.weight"),
    (*over("haed.weight", "adamw"), ValueError, _NAMED + r"head\.weight"),
    (*over("embed", "adamw"), ValueError, _NAMED + r"embed\.weight"),
    (Llama, ["*.wq.weight"], TypeError, "must be pairs"),
    (*over("*.wq.weight", {"use_muon": "yes"}), TypeError, "use_muon is 'yes'"),
    (
        *over("norm.weight", {"use_muon": True, "split_sizes": 2}),
        ValueError,
        r"norm\.weight \(override .*1 dim\(s\) and cannot be a matrix",
    ),
    (*over("norm.weight", "muon"), ValueError, r"norm\.weight .*use_muon=False"),
    (
        *over("*", {"split_sizes": 2}),
        ValueError,
        r"embed\.weight: override '\*' sets split_sizes=2, an option of Muon.*Narrow the pattern",
    ),
    (
        *over("*.wq.weight", {"betas": (0.9, 0.9)}),
        ValueError,
        "an option of AdamW, but the parameter goes to Muon",
    ),
    (
        *over("*.wq.weight", {"split_sizes": 3}),
        ValueError,
        r"layers\.0\.wq\.weight .*split_sizes=3 does not divide the 16 rows",
    ),
    (
        *over("*.wq.weight", {"split_sizes": (8, 4)}),
        ValueError,
        r"layers\.0\.wq\.weight .*sum to 12, but there are 16 rows",
    ),
    (*over("*.wq.weight", {"view": "stack"}), ValueError, "needs a 3-D"),
    (
        *over("*.wq.weight", {"heads": 3}),
        ValueError,
        r"no group option 'heads' \(did you mean split_sizes\?\)\. Allowed: use_muon, lr",
    ),
    (*over("*.wq.weight", "sgd"), ValueError, "'sgd' is not 'muon', 'adamw' or a dict"),
    (*over("*.wq.weight", None), ValueError, "None is not 'muon', 'adamw' or a dict"),
    (
        lambda: Llama().requires_grad_(False),
        None,
        ValueError,
        "the model has 17 parameters, and none requires a gradient",
    ),
    (nn.ReLU, None, ValueError, "the model has 0 parameters"),
    *(
        (given, None, TypeError, "needs the model.*Pass the module itself")
        for given in (
            lambda: Llama().named_parameters(),
            lambda: list(Llama().parameters()),
            lambda: dict(Llama().named_parameters()),
        )
    ),
]


@pytest.mark.parametrize(("given", "overrides", "kind", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_what_cannot_be_routed_is_refused_with_what_to_write(
    given: Callable[[], Any], overrides: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        param_groups(given(), lr=1e-3, overrides=overrides)


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    rf"no elements.*{_WRAP}": lambda: placeholder(linear(4, 6), None),
    rf"the weight of a Linear has 2 dims.*{_WRAP}": lambda: but(linear(4, 6), weight=table(12)),
    "shape of one rank's shard": lambda: tensor_parallel(16),
    "Run one forward pass": lambda: nn.LazyLinear(4, bias=False),
    r"which dims form matrices is unknown.*\"view\": \"flatten\"": lambda: bare(2, 3, 4, 5),
}


@pytest.mark.parametrize("says", UNKNOWN)
def test_a_parameter_whose_matrices_cannot_be_known_is_an_error_not_adamw(says: str) -> None:
    model = nn.ModuleDict({"m": UNKNOWN[says](), "w": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=r'(?s)m\.weight.*overrides=\{"m\.weight": "adamw"\}') as error:
        param_groups(model, lr=1e-3)
    assert re.search(says, str(error.value))
    assert routed(model, overrides={"m.weight": "adamw"})["m.weight"].optimizer == "AdamW"


# ------------------------------------------------------------------------------------------------------- groups


def test_options_are_those_of_the_optimizer() -> None:
    optimizer = Muon([{"params": [nn.Parameter(torch.zeros(2, 2))]}], lr=1e-3)
    roles = {"lr", "weight_decay", "use_muon", *PLACE_OPTIONS}
    assert set(optimizer.defaults) - {"betas"} == {*ONLY_MUON, *roles}
    assert {key: optimizer.defaults[key] for key in VIEW_DEFAULTS} == VIEW_DEFAULTS
    routing = {"lr", "adamw_lr", "weight_decay", "adjust_lr_fn", "overrides", "tp_group"}
    arguments = {*set(ONLY_MUON).difference(VIEW_DEFAULTS), *vars(MuonConfig()), "process_group", *routing}
    # `unknown` is the name of the `**` argument with which `Muon` collects misspelled options.
    assert set(inspect.signature(Muon).parameters) == {*arguments, "params", "unknown"}
    assert set(inspect.signature(param_groups).parameters) == {"model", *routing}
    assert {
        key: p.default for key, p in inspect.signature(matrix_view).parameters.items() if key != "shape"
    } == VIEW_DEFAULTS


def test_groups_carry_the_options_given_and_those_of_an_override_make_a_group_of_their_own() -> None:
    given: dict[str, Any] = {"lr": torch.tensor(0.02), "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    overrides: dict[Any, Any] = {"*.wq.weight": {"split_sizes": 4, "lr": 0.01}, "*.up.weight": {"split_sizes": [8, 16]}}
    groups = param_groups(Llama(), adamw_lr=0.003, overrides=overrides, **given)
    muon, adamw = {"use_muon": True, **given}, {"use_muon": False, "lr": 0.003}
    assert [{key: g[key] for key in g.keys() - {"params", "param_names"}} for g in groups] == [
        {**muon, "lr": 0.01, "split_sizes": 4},
        muon,
        {**muon, "split_sizes": (8, 16)},
        {**adamw, "weight_decay": 0.2},
        {**adamw, "weight_decay": 0.0},
    ]
    assert groups[0]["param_names"] == ["layers.0.wq.weight", "layers.1.wq.weight"]
    assert groups[3]["param_names"] == ["embed.weight", "head.weight"]


@pytest.mark.parametrize(
    ("scale", "lr"),
    [
        (None, 0.02),
        ("match_rms_adamw", torch.tensor(0.02)),
        ("spectral", 0.02),
        ("unit_rms_norm", torch.tensor(0.02)),
        ("none", 0.02),
    ],
)
def test_adamws_lr_is_matched_to_the_matrices_updates(lr: Any, scale: Any) -> None:
    """With the default lr of AdamW groups, the updates of Muon and AdamW must have about the same RMS. The two
    RMS values may differ by as much as the singular values of orthogonalized matrices differ from 1. The RMS of AdamW's
    first update is lr, but that of later updates is usually 0.2 lr, so the test multiplies the first RMS by 0.2."""
    model = Llama()
    groups = param_groups(model, lr=lr, adjust_lr_fn=scale)
    optimizer = Muon(model, lr=lr, adjust_lr_fn=scale, weight_decay=0.0)
    before = {p: p.detach().double().clone() for p in model.parameters()}
    run(optimizer, list(before), [0])
    of_muon, of_adamw = (
        torch.cat([(p.detach() - before[p]).flatten() for g in groups if g["use_muon"] == kind for p in g["params"]])
        for kind in (True, False)
    )
    rms = of_muon.square().mean().sqrt(), 0.2 * of_adamw.square().mean().sqrt()
    assert 0.68 < rms[0] / rms[1] < 1.15
    assert groups.matched is not None and f"AdamW's lr is {groups.matched:.3g} times Muon's" in str(groups)
    for made in (groups, optimizer.param_groups):
        assert {float(g["lr"]) for g in made if not g["use_muon"]} == {float(lr * groups.matched)}


def test_a_matched_lr_is_muons_where_their_updates_are_alike_and_a_given_one_is_taken() -> None:
    rate = torch.tensor(0.5)
    same = param_groups(Llama(), lr=rate, adjust_lr_fn="match_rms_adamw")
    assert same.matched == 1.0 and all(group["lr"] is rate for group in same)
    given = param_groups(Llama(), lr=0.5, adamw_lr=0.3)
    assert given.matched is None and "no adamw_lr" not in str(given)
    with pytest.warns(UserWarning, match="no parameter goes to Muon"):
        assert param_groups(nn.LayerNorm(4), lr=0.5)[0]["lr"] == 0.5
    # For a matrix of 1024 x 1024, the usual RMS of Muon's update is lr / 32, and that of AdamW's update is 0.2 lr. The
    # ratio of the two is rounded to six digits.
    assert param_groups(linear(1024, 1024), lr=1.0).matched == float(f"{1 / 32 / 0.2:.6g}")


def test_the_optimizer_takes_the_routing_options_with_a_module_only() -> None:
    options: dict[str, Any] = {"adamw_lr": 3e-4, "overrides": {"*.wq.weight": "adamw"}}
    model = Llama()
    made = Muon(model, lr=0.02, **options).param_groups
    wanted = param_groups(model, lr=0.02, **options)
    keys = ("use_muon", "param_names", "lr", "weight_decay")
    assert [[g.get(k) for k in keys] for g in made] == [[g.get(k) for k in keys] for g in wanted]
    for key, value in options.items():
        for params in (list(model.parameters()), list(model.named_parameters()), wanted):
            with pytest.raises(TypeError, match=rf"{key} is for a module.*Muon\(model, {key}=\.\.\.\)"):
                Muon(params, lr=1e-3, **{key: value})


def test_a_lr_matched_to_another_scale_is_refused() -> None:
    option: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}
    with pytest.raises(ValueError, match="Give adjust_lr_fn to param_groups, or give it adamw_lr"):
        Muon(param_groups(Llama(), lr=1e-3), lr=1e-3, **option)
    Muon(param_groups(Llama(), lr=1e-3, **option), lr=1e-3, **option)
    Muon(param_groups(Llama(), lr=1e-3, adamw_lr=1e-3), lr=1e-3, **option)


def test_groups_survive_copy_and_pickle_and_torch_optimizers_take_them() -> None:
    groups = param_groups(Llama(), lr=1e-3)
    for copied in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert (str(copied), copied[0]["param_names"]) == (str(groups), groups[0]["param_names"])
    assert [g["param_names"] for g in torch.optim.SGD(groups).param_groups] == [g["param_names"] for g in groups]


def test_the_table_shows_every_parameter_with_its_matrices_and_reason() -> None:
    model = frozen(Llama(depth=1), "layers.0.norm")
    splits: dict[Any, Any] = {"*.wq.*": {"split_sizes": 4}, "*.up.*": {"split_sizes": (8, 4, 8, 4)}}
    assert str(param_groups(model, lr=1e-3, overrides=splits)) == (
        "name                  shape   matrices              optimizer  reason\n"
        "--------------------  ------  --------------------  ---------  ------------------------------------------\n"
        "embed.weight          100x16  -                     AdamW      embedding\n"
        "layers.0.norm.weight  16      -                     frozen     requires_grad is False\n"
        "layers.0.wq.weight    16x16   4 of 4x16             Muon       linear, override '*.wq.*'\n"
        "layers.0.wk.weight    8x16    1 of 8x16             Muon       linear\n"
        "layers.0.wv.weight    8x16    1 of 8x16             Muon       linear\n"
        "layers.0.wo.weight    16x16   1 of 16x16            Muon       linear\n"
        "layers.0.up.weight    24x16   2 of 8x16, 2 of 4x16  Muon       linear, override '*.up.*'\n"
        "layers.0.down.weight  16x24   1 of 16x24            Muon       linear\n"
        "norm.weight           16      -                     AdamW      norm\n"
        "head.weight           100x16  -                     AdamW      output head: rows equal a vocabulary (100)\n"
        "\n"
        "Muon: 6 parameters, 12 matrices, 1,536 elements\n"
        "AdamW: 3 parameters, 3,216 elements\n"
        "frozen: 1 parameter, 16 elements\n"
        "AdamW's lr is 1.2 times Muon's, to make its updates as large (no adamw_lr was given)"
    )


# ------------------------------------------------------------------------------------ wrapped and sharded models


def test_wrappers_change_neither_names_nor_table() -> None:
    model, compiled = Llama(), functools.partial(torch.compile, backend="eager")
    tables = [param_groups(wrap(model), lr=1e-3).rows for wrap in (but, nn.DataParallel, compiled)]
    for at, block in enumerate(model.layers):
        model.layers[at] = compiled(checkpoint_wrapper(block))
    assert {*tables} == {param_groups(model, lr=1e-3).rows}


def _table_of(how: str) -> tuple[Any, Any]:
    model: Any = hooked("decoder") if "says" in how else known_types() if "known" in how else Llama()
    before = param_groups(model, lr=1e-3).rows
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif "fsdp1" in how:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif how == "tp":
        plan = {"embed": RowwiseParallel(), "head": ColwiseParallel(), "layers.*.wq": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], {**plan, "layers.*.wo": RowwiseParallel()})
    if how in ("fsdp2", "fsdp2, known types", "tp"):
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["dp" if how == "tp" else "tp"])
    return before, param_groups(model, lr=1e-3).rows


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2, known types", "tp", "fsdp1", "fsdp1, the model says its head"])
def test_every_rank_routes_a_sharded_model_as_the_whole_one(world2: RankPool, how: str) -> None:
    before, after = zip(*world2.run(_table_of, how), strict=True)
    assert {*after} == {*before} == {before[0]}


# ------------------------------------------------------------------------------------------------ random models


def _leaf(draw: st.DrawFn) -> nn.Module:
    a, b = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(a, b),
        lambda: nn.Embedding(a, b),
        lambda: nn.LayerNorm(a),
        lambda: nn.Conv2d(2 * a, 2 * b, 2, groups=2),
        lambda: nn.Conv1d(a, a, 3, groups=a),
        lambda: nn.MultiheadAttention(2 * a, 2),
        lambda: nn.GRU(a, b),
        lambda: bare(a, b, 3),
        lambda: bare(a, b),
        lambda: bare(a),
    ]
    return draw(st.sampled_from(makers))()


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Generate nested containers of random layers. Some layers are frozen, and some share a weight."""
    leaves = [_leaf(draw) for _ in range(draw(st.integers(1, 8)))]
    for module in leaves:
        if hasattr(module, "weight") and not isinstance(module, nn.modules.conv._ConvNd) and draw(st.booleans()):
            first = next(m for m in leaves if isinstance(m, type(module)) and m.weight.shape == module.weight.shape)
            module.weight = first.weight
        if draw(st.integers(0, 4)) == 0:
            module.requires_grad_(False)
    cut = draw(st.integers(0, len(leaves)))
    inner = nn.Sequential(*leaves[:cut]) if draw(st.booleans()) else nn.ModuleList(leaves[:cut])
    return nn.ModuleList([inner, *leaves[cut:]])


@given(models())
@settings(max_examples=150)
def test_every_trainable_parameter_is_in_one_group_for_a_reason(model: nn.Module) -> None:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        with pytest.raises(ValueError, match="nothing to optimize"):
            param_groups(model, lr=1e-3)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        groups, again = param_groups(model, lr=1e-3), param_groups(model, lr=1e-3)
    listed = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    assert len(listed) == len(trainable) and all(trainable[name] is p for name, p in listed)
    for group in groups:
        assert group["params"] and group["param_names"] == [n for n in trainable if n in group["param_names"]]
    assert [g["use_muon"] for g in groups] == sorted((g["use_muon"] for g in groups), reverse=True)
    assert [row.name for row in groups.rows] == [name for name, _ in model.named_parameters()]
    assert (groups.rows, [g["param_names"] for g in groups]) == (again.rows, [g["param_names"] for g in again])
    for row, p in zip(groups.rows, model.parameters(), strict=True):
        assert row.reason
        if row.optimizer == "Muon":
            assert sum(rows * cols for rows, cols in row.matrices) == p.numel()
    Muon(groups, lr=1e-3)
