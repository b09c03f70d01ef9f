"""Claims about routing: every trainable parameter goes to Muon or AdamW for what it is, and nothing goes in silence."""

from __future__ import annotations

import copy
import doctest
import inspect
import math
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardmuon.layout.views import matrix_view
from shardmuon.muon import Muon
from shardmuon.options import MUON_OPTIONS, OPTION_OBJECTS, PLACE_OPTIONS, VIEW_DEFAULTS
from shardmuon.routing import groups as groups_module
from shardmuon.routing.groups import ParamGroups, RoutingRow, matched_lr, param_groups
from shardmuon.testing import RankPool


def routed(model: nn.Module, **options: Any) -> dict[str, RoutingRow]:
    return {row.name: row for row in param_groups(model, **{"lr": 1e-3, **options}).rows}


def group_of(groups: ParamGroups, name: str) -> dict[str, Any]:
    (group,) = (group for group in groups if name in group["param_names"])
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class Block(nn.Module):
    def __init__(self, dim: int, kv: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv, bias=False)
        self.wv = nn.Linear(dim, kv, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)


class Llama(nn.Module):
    """A decoder with grouped queries: `kv` rows of keys and values, fewer than `dim`."""

    def __init__(
        self, vocab: int = 100, dim: int = 16, kv: int = 8, hidden: int = 24, *, depth: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, kv, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Tied(nn.Module):
    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        embed, head, hidden = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False), nn.Linear(8, 8, bias=False)
        head.weight = embed.weight
        if head_first:
            self.head, self.hidden, self.embed = head, hidden, embed
        else:
            self.embed, self.hidden, self.head = embed, hidden, head


HIDDEN = ("wq", "wk", "wv", "wo", "up", "down")
LAYERS = [f"layers.{i}.{name}.weight" for i in range(2) for name in HIDDEN]


# ------------------------------------------------------------------------------------------- embeddings and heads


def plus(model: nn.Module, **modules: nn.Module) -> nn.Module:
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def square(width: int = 16, outputs: int = 16) -> nn.Linear:
    return nn.Linear(width, outputs, bias=False)


def table_of(**modules: nn.Module) -> nn.ModuleDict:
    """A model of bytes without repeated blocks, as wide as its vocabulary."""
    return nn.ModuleDict({"embed": nn.Embedding(16, 16), **modules})


def frozen(model: Llama) -> Llama:
    model.embed.requires_grad_(False)
    return model


def bare_head(shape: tuple[int, int]) -> Llama:
    model = Llama()
    del model.head
    model.register_parameter("unembed", nn.Parameter(torch.zeros(shape)))
    return model


class WithHook(nn.Module):
    def __init__(self, head: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.decoder = nn.Linear(16, 16, bias=False)
        self.pooler = nn.Linear(16, 16, bias=False)
        self._head = head

    def get_output_embeddings(self) -> nn.Module | None:
        return None if self._head is None else self.get_submodule(self._head)


class VocabParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = 40, 8
        self.weight = nn.Parameter(torch.zeros(40, 8))


@dataclass(frozen=True)
class Case:
    """A model and how it is routed.

    Attributes:
        model: Makes it.
        muon: Names of all that goes to Muon.
        reasons: Name -> its reason.
        says: What the only warning says, as a pattern; "": there is none.
        overrides: What the user writes.
    """

    model: Callable[[], nn.Module]
    muon: list[str]
    reasons: dict[str, str] = field(default_factory=dict)
    says: str = ""
    overrides: Any = None


_EQUAL, _LAST = (
    "output head: rows equal a vocabulary (100)",
    "output head: last matrix with as many rows as a vocabulary",
)
_TWO_HEADS = {"head.weight": "adamw", "second.weight": "muon"}
_ENDS = [f"extra.{i}.0.weight" for i in range(2)]
_BOTH = [f"{model}.{name}" for model in ("actor", "critic") for name in LAYERS]


def extra_heads() -> nn.Module:
    return plus(Llama(), extra=nn.ModuleList(nn.Sequential(square(), square(16, 100)) for _ in range(2)))


def actor_and_critic(*sizes: int) -> nn.Module:
    return nn.ModuleDict({"actor": Llama(*sizes), "critic": Llama(*sizes)})


HEADS: dict[str, Case] = {
    "a tied embedding, first": Case(
        lambda: Tied(head_first=False), ["hidden.weight"], {"embed.weight": "embedding, tied to head.weight"}
    ),
    "a tied embedding, last": Case(
        lambda: Tied(head_first=True), ["hidden.weight"], {"head.weight": "tied to embedding embed.weight"}
    ),
    "a decoder": Case(Llama, LAYERS, {"head.weight": _EQUAL, "norm.weight": "norm", "embed.weight": "embedding"}),
    "as wide as the vocabulary": Case(lambda: Llama(16, 16), LAYERS, {"head.weight": f"{_LAST} (16)"}),
    "one block": Case(lambda: Llama(16, 16, depth=1), LAYERS[:6]),
    # nothing reads 8 features, so shape alone would call wk and wv heads
    "keys with the rows of a vocabulary": Case(lambda: Llama(vocab=8, kv=8), LAYERS),
    "tied, another as wide": Case(lambda: plus(Llama(tied=True), project=square()), [*LAYERS, "project.weight"]),
    "tied, all as wide": Case(lambda: plus(Llama(16, 16, tied=True), project=square()), [*LAYERS, "project.weight"]),
    "nothing tells the head": Case(
        lambda: table_of(q=square(), k=square(), head=square()),
        ["q.weight", "k.weight"],
        says=r'head\.weight went to AdamW.*q\.weight, k\.weight to Muon.*"head\.weight": "ad',
    ),
    "settled": Case(
        lambda: table_of(q=square(), k=square(), head=square()),
        ["q.weight", "k.weight"],
        overrides={"head.weight": "adamw"},
    ),
    "settled otherwise": Case(
        lambda: table_of(q=square(), k=square(), head=square()),
        ["k.weight", "head.weight"],
        overrides={"q.weight": "adamw"},
    ),
    "a lone candidate that is not last": Case(
        lambda: table_of(inner=square(), out=square(16, 5)),
        ["out.weight"],
        says=r"inner\.weight went to AdamW as the head\. If right",
    ),
    "which is hidden": Case(
        lambda: table_of(inner=square(), out=square(16, 5)),
        ["inner.weight", "out.weight"],
        overrides={"inner.weight": "muon"},
    ),
    "several candidates": Case(
        lambda: plus(Llama(), second=square(16, 100)),
        LAYERS,
        says=r"head\.weight, second\.weight went to AdamW as output heads",
    ),
    "of which one is hidden": Case(
        lambda: plus(Llama(), second=square(16, 100)), [*LAYERS, "second.weight"], overrides=_TWO_HEADS
    ),
    "heads that end repeated blocks": Case(extra_heads, [*LAYERS, *_ENDS], says="output heads"),
    "two models are no blocks": Case(
        actor_and_critic,
        _BOTH,
        {"actor.head.weight": _EQUAL, "critic.head.weight": _EQUAL},
        says=r"actor\.head\.weight, critic\.head\.weight",
    ),
    "two models of bytes": Case(
        lambda: actor_and_critic(16, 16),
        [*_BOTH[: len(LAYERS)], "actor.head.weight", *_BOTH[len(LAYERS) :]],
        says=r"critic\.head\.weight went to AdamW as the head, and actor\.head\.weight to Muon",
    ),
    "a head for positions beside a tied head": Case(
        lambda: plus(Llama(tied=True), positions=nn.Embedding(40, 16), project=square(16, 40)),
        LAYERS,
        says=r"project\.weight went to AdamW .* though the model has a head for another",
    ),
    "a bare head": Case(lambda: bare_head((100, 16)), LAYERS, {"unembed": _EQUAL}),
    "a bare head, turned": Case(lambda: bare_head((16, 100)), LAYERS, {"unembed": _EQUAL.replace("rows", "columns")}),
    "a model that names its head": Case(
        lambda: WithHook("decoder"), ["pooler.weight"], {"decoder.weight": "output head: get_output_embeddings()"}
    ),
    "below a wrapper": Case(lambda: nn.DataParallel(WithHook("decoder")), ["pooler.weight"]),
    "a model that says it has none": Case(lambda: WithHook(None), ["decoder.weight", "pooler.weight"]),
    "embeddings by their sizes, not by their names": Case(
        lambda: nn.ModuleDict({"lm_head": square(8, 8), "linear": VocabParallel(), "bag": nn.EmbeddingBag(30, 8)}),
        ["lm_head.weight"],
    ),
    "a frozen embedding still tells the vocabulary": Case(
        lambda: frozen(Llama()), LAYERS, {"embed.weight": "requires_grad is False", "head.weight": _EQUAL}
    ),
    "attention as wide as the vocabulary": Case(
        lambda: table_of(head=square(), attention=nn.MultiheadAttention(16, 4)),
        ["attention.in_proj_weight", "attention.out_proj.weight"],
        says=r"head\.weight went to AdamW",
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_embeddings_and_heads_go_to_adamw_and_what_shapes_leave_open_is_said(case: str) -> None:
    wanted = HEADS[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = routed(wanted.model(), overrides=wanted.overrides)
    assert [name for name, row in rows.items() if row.optimizer == "Muon"] == wanted.muon
    assert {name: rows[name].reason for name in wanted.reasons} == wanted.reasons
    assert len(caught) == bool(wanted.says) and all(re.search(wanted.says, str(one.message)) for one in caught)


# ------------------------------------------------------------------------------------------- other kinds of modules


def one(module: nn.Module, leaf: str = "weight") -> RoutingRow:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "param_groups: no parameter goes to Muon")
        return routed(nn.ModuleDict({"m": module}))[f"m.{leaf}"]


class Bare(nn.Module):
    """A parameter of a module that torch does not know."""

    def __init__(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape, dtype=dtype))


def normed(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


_APART = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
# module, parameter, its matrices (none: AdamW's), reason ("": not looked at)
KINDS: list[tuple[nn.Module, str, tuple[tuple[int, int], ...], str]] = [
    (nn.Conv2d(3, 8, 3), "weight", ((8, 27),), "convolution, 1 group"),
    (nn.Conv2d(1, 8, 3), "weight", ((8, 9),), ""),  # one input channel, but not depthwise: groups is 1
    (nn.Conv1d(4, 8, 3), "weight", ((8, 12),), ""),
    (nn.Conv3d(2, 8, 2), "weight", ((8, 16),), ""),
    (nn.Conv2d(8, 4, 1), "weight", ((4, 8),), ""),
    (nn.Conv2d(8, 12, 3, groups=4), "weight", ((3, 18),) * 4, "convolution, 4 groups"),
    (nn.ConvTranspose2d(6, 8, 2), "weight", ((6, 32),), ""),
    (nn.ConvTranspose2d(6, 8, 2, groups=2), "weight", ((3, 16),) * 2, ""),
    (nn.ConvTranspose2d(8, 4, 2, groups=4), "weight", ((2, 4),) * 4, ""),  # two inputs each, one output each
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
    (normed(nn.Conv2d(3, 8, 3)), "parametrizations.weight.original0", (), "1 vector (8x1x1x1)"),
    (normed(nn.Conv2d(3, 8, 3)), "parametrizations.weight.original1", ((8, 27),), "convolution, 1 group"),
    (nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), "parametrizations.weight.original", ((4, 4),), "linear"),
    (nn.Linear(2, 16), "weight", ((16, 2),), "linear"),  # torch knows that these are inputs
    (nn.Linear(8, 1), "weight", (), "1 vector (1x8)"),
    (nn.Bilinear(4, 6, 5), "weight", ((4, 6),) * 5, "stack of 5 matrices"),
    (nn.Bilinear(4, 2, 5), "weight", ((4, 2),) * 5, ""),
    *((Bare(*sizes), "weight", (), "") for sizes in ((1, 5), (5, 1), (1, 1, 5), (4, 1, 5), (1, 4, 5, 6), (7, 1, 1))),
]


@pytest.mark.parametrize(("module", "leaf", "matrices", "reason"), KINDS, ids=str)
def test_a_module_that_torch_knows_says_which_matrices_a_parameter_holds(
    module: nn.Module, leaf: str, matrices: tuple[tuple[int, int], ...], reason: str
) -> None:
    row = one(module, leaf)
    assert (row.optimizer, row.matrices) == ("Muon" if matrices else "AdamW", matrices)
    assert reason in ("", row.reason)


def test_norms_do_not_decay_in_whatever_shape() -> None:
    model = nn.ModuleDict({"m": nn.LayerNorm((3, 4)), "w": nn.Linear(4, 4, bias=False)})
    assert group_of(param_groups(model, lr=1e-3), "m.weight")["weight_decay"] == 0.0


class Experts(nn.Module):
    """Experts and their router, stored either way round."""

    def __init__(self, *, inputs_first: bool, width: int = 16, inner: int = 24, num: int = 4) -> None:
        super().__init__()
        up, down = (num, inner, width), (num, width, inner)
        self.router = nn.Linear(width, num, bias=False)
        self.w_up = nn.Parameter(torch.ones(down if inputs_first else up))
        self.w_down = nn.Parameter(torch.ones(up if inputs_first else down))


# -------------------------------------------------------------------------------------------------- what users say


def test_a_predicate_sees_name_parameter_and_module() -> None:
    seen = []

    def small(name: str, param: Tensor, module: nn.Module) -> bool:
        seen.append((name, type(module)))
        return param.ndim == 2 and param.shape[0] == 8

    rows = routed(Llama(), overrides=[(small, "adamw")])
    assert [name for name, row in rows.items() if row.reason == "override small"] == [
        f"layers.{i}.{name}.weight" for i in range(2) for name in ("wk", "wv")
    ]
    assert ("layers.0.wq.weight", nn.Linear) in seen


@pytest.mark.parametrize(
    ("pattern", "close"),
    [("*.w_q.weight", "layers.0.wq.weight"), ("haed.weight", "head.weight"), ("embed", "embed.weight")],
)
def test_an_override_that_matches_nothing_names_what_is_close(pattern: str, close: str) -> None:
    with pytest.raises(ValueError, match="matches none of the model's 17 parameter names") as error:
        param_groups(Llama(), lr=1e-3, overrides={pattern: "adamw"})
    assert close in str(error.value).partition("Close: ")[2]


def test_options_of_an_override_make_a_group_of_their_own() -> None:
    groups = param_groups(Llama(), lr=0.02, adamw_lr=0.003, overrides={"*.wq.weight": {"num_heads": 4, "lr": 0.01}})
    assert group_of(groups, "layers.1.wq.weight") == {"use_muon": True, "lr": 0.01, "weight_decay": 0.1, "num_heads": 4}
    assert group_of(groups, "layers.1.wk.weight") == {"use_muon": True, "lr": 0.02, "weight_decay": 0.1}
    assert {row.name: row.matrices for row in groups.rows}["layers.0.wq.weight"] == ((4, 16),) * 4
    assert len(groups) == 4
    (group, *_) = param_groups(square(16, 24), lr=1e-3, overrides={"weight": _QKV})
    assert group["split_sizes"] == (8, 2, 2)


# ----------------------------------------------------------------------------------------------- what is refused


def placeholder(module: nn.Linear, ds_shape: tuple[int, ...] | None) -> nn.Linear:
    module.weight = nn.Parameter(torch.empty(0))
    if ds_shape is not None:
        module.weight.ds_shape = torch.Size(ds_shape)  # type: ignore[attr-defined]
    return module


def tensor_parallel_piece() -> nn.Module:
    module = Bare(8, 4)
    vars(module).update(output_size=16, output_size_per_partition=8)
    module.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    return module


def flat_piece() -> nn.Module:
    module = nn.Linear(4, 6, bias=False)
    module.weight = nn.Parameter(torch.zeros(12))
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: placeholder(nn.Linear(4, 6, bias=False), None), "no elements.*Build the groups before wrapping"),
        (flat_piece, "the weight of a Linear has 2 dims.*Build the groups before wrapping"),
        (tensor_parallel_piece, "shape of one rank's shard"),
        (lambda: nn.LazyLinear(4, bias=False), "Run one forward pass"),
        (lambda: Bare(2, 3, 4, 5), r"which dims form matrices is unknown.*\"view\": \"flatten\""),
    ],
)
def test_a_parameter_whose_matrices_cannot_be_known_is_an_error_not_adamw(
    make: Callable[[], nn.Module], message: str
) -> None:
    model = nn.ModuleDict({"m": make(), "w": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=r'(?s)m\.weight.*overrides=\{"m\.weight": "adamw"\}') as error:
        param_groups(model, lr=1e-3)
    assert re.search(message, str(error.value))
    assert routed(model, overrides={"m.weight": "adamw"})["m.weight"].optimizer == "AdamW"


def test_a_model_without_matrices_warns() -> None:
    with pytest.warns(UserWarning, match="no parameter goes to Muon"):
        assert [group["use_muon"] for group in param_groups(nn.LayerNorm(4), lr=1e-3)] == [False]


def beside_complex() -> nn.Module:
    """S4D's rates stand beside its C, which is no stack."""
    model = Bare(16, 8)
    model.register_parameter("C", nn.Parameter(torch.ones(16, 8, 2)))
    return model


def kept_elsewhere() -> nn.Module:
    model = nn.ModuleDict({"a": Bare(1), "conv": nn.Conv1d(4, 8, 3)})
    model["a"].weight = cast(nn.Conv1d, model["conv"]).weight
    return model


def read_in_two_ways() -> nn.Module:
    model = nn.ModuleDict({"conv": nn.Conv2d(8, 8, 1), "deep": nn.Conv2d(8, 8, 1, groups=2)})
    model["deep"].weight = model["conv"].weight
    return model


def marked_block() -> nn.Module:
    model = Llama()
    for p in model.layers[0].parameters():
        p.use_muon = False  # type: ignore[attr-defined]
    return model


def megatrons_embedding() -> nn.Module:
    model = nn.ModuleDict({"replica": Bare(40, 8), "w": nn.Linear(8, 8)})
    setattr(model["replica"].weight, "is_embedding_or_output_parameter", True)  # noqa: B010
    return model


def gathered_head() -> nn.Module:
    """ZeRO-3's head while it is a placeholder."""
    model = Llama()
    placeholder(model.head, (100, 16))
    return model


def over_one_rank() -> nn.Module:
    module = tensor_parallel_piece()
    vars(module).update(output_size=8)
    return nn.ModuleDict({"m": module})


Said = tuple[Callable[[], nn.Module], Any, dict[str, dict[str, object]], list[str]]


def experts(*, router: int = 4, apart: bool = False, inner: int = 24, inputs_first: bool = False) -> nn.Module:
    model = Experts(inputs_first=inputs_first, inner=inner)
    model.router = nn.Linear(16, router, bias=False)
    if not apart:
        return model
    del model.router
    return nn.ModuleDict({"gate": nn.Linear(16, 4, bias=False), "experts": model})  # as torchtitan has it


def three_dims(num: int, rows: int, cols: int) -> Said:
    """Of which only the shape speaks: experts may be stored either way round, and tables look alike."""
    went = rf"weight \({num}x{rows}x{cols}\) .*a stack of {num} matrices, each of \(outputs, inputs\)\. "
    settle = r'If right, write overrides=\{"weight": "muon"\}; \{"transposed": True\} if .*"adamw" if it is a table'
    reason = f"stack of {num} matrices, by its shape alone"
    row: dict[str, object] = {"optimizer": "Muon", "matrices": ((rows, cols),) * num, "reason": reason}
    return lambda: Bare(num, rows, cols), None, {"weight": row}, [went + settle]


def beside(*models: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList([*models, nn.Linear(4, 4)])


def turned_over(*names: str) -> list[str]:
    """What is said of experts that seem to be stored the other way round: their router does not confirm them."""
    return [rf'parameter of Experts.*"{re.escape(name)}": "muon"\}}; \{{"transposed": True\}} if' for name in names]


# two query groups of four heads of 2, one key and one value head
_QKV = {"split_sizes": [8, 2, 2], "split_groups": 2}
_COMPLEX = "last dim of 2: pairs of numbers, as complex ones are kept"
_TURNED = {"transposed": True}
# case -> model, overrides, what the rows of some parameters say, and the warnings
SAID: dict[str, Said] = {
    **{f"three dims {sizes}": three_dims(*sizes) for sizes in ((8, 64, 48), (14, 14, 384), (4, 15, 15), (2, 5, 32))},
    "one warning for each kind": (
        beside(Bare(8, 64, 48), Bare(8, 64, 48), Bare(6, 4), Bare(6, 4)),
        None,
        {"3.weight": {"optimizer": "Muon", "matrices": ((6, 4),)}},
        [
            r"0\.weight \(8x64x48; 1 more like it\) is a parameter of Bare",
            r'2\.weight \(6x4; 1 more like it\).*overrides=\{"\*\.weight": "muon"\}; \{"transposed": True\} if',
        ],
    ),
    **{
        f"three dims, settled by {choice}": (beside(Bare(8, 64, 48), Bare(8, 64, 48)), {"[01].weight": choice}, {}, [])
        for choice in ("muon", "adamw", _TURNED, {"view": "stack"})
    },
    "a router confirms experts": (
        beside(experts()),
        None,
        {"0.w_down": {"reason": "stack of 4 experts, chosen by 0.router.weight"}},
        [],
    ),
    "a router of something else": (lambda: experts(router=5), None, {}, [r"w_up \(4x24x16\)", r"w_down \(4x16x24\)"]),
    "a router in the module around them": (lambda: experts(apart=True), None, {}, []),
    "experts that seem to be turned": (lambda: experts(inputs_first=True), None, {}, turned_over("w_up", "w_down")),
    "one of them is settled": (lambda: experts(inputs_first=True), {"w_down": _TURNED}, {}, turned_over("w_up")),
    "turned experts in two layers": (
        beside(experts(inputs_first=True), experts(inputs_first=True)),
        None,
        {},
        turned_over("*.w_up", "*.w_down"),
    ),
    "experts that are settled": (lambda: experts(inputs_first=True), {"w_*": "muon"}, {}, []),
    "experts that are square": (lambda: experts(inputs_first=True, inner=16), None, {}, []),
    "turned experts": (
        lambda: experts(inputs_first=True),
        {"w_*": _TURNED},
        {"w_up": {"matrices": ((24, 16),) * 4}, "w_down": {"matrices": ((16, 24),) * 4}},
        [],
    ),
    **{
        f"complex numbers {sizes}": (
            beside(Bare(*sizes)),
            None,
            {"0.weight": {"optimizer": "AdamW", "reason": _COMPLEX}},
            [
                rf"\({'x'.join(map(str, sizes))}\) is a parameter of Bare with a last dim of 2.* It went to AdamW. "
                r'If right, write overrides=\{"0.weight": "adamw"\}; "muon" if'
            ],
        )
        for sizes in ((16, 8, 2), (16, 2))
    },
    "complex numbers, settled": (beside(Bare(16, 8, 2)), {"0.weight": "adamw"}, {}, []),
    "complex numbers as a stack": (
        beside(Bare(16, 8, 2)),
        {"0.weight": "muon"},
        {"0.weight": {"matrices": ((8, 2),) * 16}},
        [],
    ),
    "complex numbers as a matrix": (
        beside(Bare(16, 2)),
        {"0.weight": "muon"},
        {"0.weight": {"matrices": ((16, 2),)}},
        [],
    ),
    "a table for a batch or a stack of one expert": (
        beside(Bare(1, 5, 8)),
        None,
        {"0.weight": {"optimizer": "AdamW"}},
        [r"0\.weight: a \(1, M, N\) parameter .* stack of one expert"],
    ),
    "a table": (beside(Bare(1, 5, 8)), {"0.*": "adamw"}, {"0.weight": {"optimizer": "AdamW"}}, []),
    "a stack of one expert": (
        beside(Bare(1, 5, 8)),
        {"0.*": {"use_muon": True, "view": "stack"}},
        {"0.weight": {"matrices": ((5, 8),)}},
        [],
    ),
    "rows beside complex numbers are no biases of experts": (
        beside_complex,
        {"C": "adamw", "weight": {"view": "auto"}},
        {"weight": {"reason": "2-D parameter, override 'weight'"}},
        [],
    ),
    "an override makes a scalar head a matrix": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
        {"1.weight": "muon"},
        {"1.weight": {"matrices": ((1, 8),)}},
        [],
    ),
    "a reference kept elsewhere changes nothing": (
        kept_elsewhere,
        None,
        {"a.weight": {"matrices": ((8, 12),), "reason": "convolution, 1 group, shared with conv.weight"}},
        [],
    ),
    "an override settles a weight that modules read differently": (
        read_in_two_ways,
        {"conv.weight": {"use_muon": True, "view": "flatten"}},
        {"conv.weight": {"matrices": ((8, 8),)}},
        [],
    ),
    "the first override that matches wins": (
        Llama,
        [("layers.0.*q*", "adamw"), ("*.w?.weight", {"lr": 0.5}), ("*.wq.weight", "muon")],
        {
            "layers.0.wq.weight": {"optimizer": "AdamW", "reason": "override 'layers.0.*q*'"},
            "layers.1.wq.weight": {"reason": "linear, override '*.w?.weight'"},
        },
        [],
    ),
    "an override reaches a tied weight by any of its names": (
        lambda: Tied(head_first=False),
        {"head.weight": "muon"},
        {"embed.weight": {"matrices": ((100, 8),)}},
        [],
    ),
    "interleaved grouped-query weights split into q, k and v": (
        lambda: nn.ModuleDict({"qkv": nn.Linear(16, 24, bias=False)}),
        {"qkv.weight": _QKV},
        {"qkv.weight": {"matrices": ((16, 16), (4, 16), (4, 16))}},
        [],
    ),
    "heads given replace default splits": (
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": {"num_heads": 6}},
        {"in_proj_weight": {"matrices": ((4, 8),) * 6}},
        [],
    ),
    "no splits given replace default splits": (
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": {"split_sizes": None}},
        {"in_proj_weight": {"matrices": ((24, 8),)}},
        [],
    ),
    "no heads given replace default ones": (
        lambda: nn.Conv2d(8, 8, 1, groups=2),
        {"weight": {"num_heads": None}},
        {"weight": {"matrices": ((8, 4),)}},
        [],
    ),
    "use_muon of a parameter, below overrides": (
        marked_block,
        {"*.wq.weight": "muon"},
        {
            "layers.0.wk.weight": {"optimizer": "AdamW", "reason": "p.use_muon"},
            "layers.0.wq.weight": {"optimizer": "Muon"},
            "layers.1.wk.weight": {"optimizer": "Muon"},
        },
        [],
    ),
    "a parameter that Megatron marks as embedding": (
        megatrons_embedding,
        None,
        {"replica.weight": {"reason": "p.is_embedding_or_output_parameter"}},
        [],
    ),
    "a placeholder counts by the shape it stands for": (
        lambda: nn.ModuleDict({"m": placeholder(nn.Linear(4, 6, bias=False), (6, 4))}),
        None,
        {"m.weight": {"optimizer": "Muon", "shape": (6, 4), "matrices": ((6, 4),)}},
        [],
    ),
    "a placeholder of a head": (
        gathered_head,
        None,
        {"head.weight": {"reason": "output head: rows equal a vocabulary (100)"}},
        [],
    ),
    "a tensor-parallel layer over one rank is whole": (over_one_rank, None, {"m.weight": {"matrices": ((8, 4),)}}, []),
}


@pytest.mark.parametrize("case", SAID)
def test_what_users_and_modules_say_of_a_parameter_decides(case: str) -> None:
    model, overrides, wanted, says = SAID[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = routed(model(), overrides=overrides)
    assert {name: {key: getattr(rows[name], key) for key in row} for name, row in wanted.items()} == wanted
    assert len(caught) == len(says)
    assert all(re.search(pattern, str(one.message)) for pattern, one in zip(says, caught, strict=True))


def never(name: str, param: Tensor, module: nn.Module) -> bool:
    return False


def _overridden(pattern: str, choice: Any) -> tuple[Callable[[], Any], dict[str, Any]]:
    return Llama, {"overrides": {pattern: choice}}


# what is routed, options, the error, and what it says
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (read_in_two_ways, {}, ValueError, r"conv\.weight is shared by modules that read it differently.*overrides=\{"),
    (Llama, {"overrides": [(never, "adamw")]}, ValueError, "override never matches none"),
    (Llama, {"overrides": ["*.wq.weight"]}, TypeError, "must be pairs"),
    (*_overridden("*.wq.weight", {"use_muon": "yes"}), TypeError, "use_muon is 'yes'"),
    (
        *_overridden("norm.weight", {"use_muon": True, "num_heads": 2}),
        ValueError,
        r"norm\.weight \(override .*1 dim\(s\) and cannot be a matrix",
    ),
    (*_overridden("norm.weight", "muon"), ValueError, r"norm\.weight .*use_muon=False"),
    (
        *_overridden("*", {"num_heads": 2}),
        ValueError,
        r"embed\.weight: override '\*' sets num_heads=2, an option of Muon.*Narrow the pattern",
    ),
    (
        *_overridden("*.wq.weight", {"betas": (0.9, 0.9)}),
        ValueError,
        r"an option of AdamW, but the parameter goes to Muon",
    ),
    (
        *_overridden("*.wq.weight", {"num_heads": 3}),
        ValueError,
        r"layers\.0\.wq\.weight .*num_heads=3 does not divide the 16 rows",
    ),
    (
        *_overridden("*.wq.weight", {"split_sizes": (8, 4)}),
        ValueError,
        r"layers\.0\.wq\.weight .*sum to 12, but there are 16 rows",
    ),
    (*_overridden("*.wq.weight", {"view": "stack"}), ValueError, r"needs a 3-D"),
    (
        *_overridden("*.wq.weight", {"heads": 3}),
        ValueError,
        r"no group option 'heads' \(did you mean num_heads\?\)\. Allowed: use_muon, lr",
    ),
    (*_overridden("*.wq.weight", "sgd"), ValueError, r"'sgd' is not 'muon', 'adamw' or a dict"),
    (*_overridden("*.wq.weight", None), ValueError, r"None is not 'muon', 'adamw' or a dict"),
    (
        lambda: Bare(4, 4, dtype=torch.complex64),
        {"overrides": {"weight": "adamw"}},
        ValueError,
        r"weight: complex parameters \(torch.complex64\) are not supported",
    ),
    (
        lambda: Llama().requires_grad_(False),
        {},
        ValueError,
        "the model has 17 parameters, and none requires a gradient",
    ),
    (nn.ReLU, {}, ValueError, "the model has 0 parameters"),
    *(
        (given, {}, TypeError, r"needs the model.*Pass the module itself")
        for given in (
            lambda: Llama().named_parameters(),
            lambda: list(Llama().parameters()),
            lambda: dict(Llama().named_parameters()),
        )
    ),
]


@pytest.mark.parametrize(("given", "options", "kind", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_what_cannot_be_routed_is_refused_with_what_to_write(
    given: Callable[[], Any], options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        param_groups(given(), lr=1e-3, **options)


# ------------------------------------------------------------------------------------------------------- groups


def test_options_are_those_of_the_optimizer() -> None:
    optimizer = Muon([{"params": [nn.Parameter(torch.zeros(2, 2))]}], lr=1e-3)
    roles = {"lr", "weight_decay", "use_muon", "rank_local", *PLACE_OPTIONS}
    assert set(optimizer.defaults) - {"betas"} == {*MUON_OPTIONS, *VIEW_DEFAULTS, *roles}
    assert {key: optimizer.defaults[key] for key in VIEW_DEFAULTS} == VIEW_DEFAULTS
    arguments = set(inspect.signature(Muon).parameters) - {"params"}
    routing = {"lr", "adamw_lr", "weight_decay", "adjust_lr_fn", "overrides", "tp_group"}
    assert arguments == {*MUON_OPTIONS, *OPTION_OBJECTS, "process_group", *routing}
    assert set(inspect.signature(param_groups).parameters) == {"model", *routing}
    assert {
        key: p.default for key, p in inspect.signature(matrix_view).parameters.items() if key != "shape"
    } == VIEW_DEFAULTS


def test_groups_carry_the_options_given() -> None:
    rate = torch.tensor(0.02)
    groups = param_groups(
        Llama(),
        lr=rate,
        adamw_lr=0.003,
        weight_decay=0.2,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = {"use_muon": False, "lr": 0.003}
    assert [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups] == [
        {"use_muon": True, "lr": rate, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"},
        {**adamw, "weight_decay": 0.2},
        {**adamw, "weight_decay": 0.0},
    ]
    assert groups[1]["param_names"] == ["embed.weight", "head.weight"]


def _rms_of_updates(model: nn.Module, optimizer: Muon) -> dict[bool, float]:
    """Root mean square of one step's updates, of the matrices (True) and of the rest."""
    before = {p: p.detach().clone() for p in model.parameters()}
    squares = {True: [0.0, 0], False: [0.0, 0]}
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    for group in optimizer.param_groups:
        for p in group["params"]:
            squares[group["use_muon"]][0] += float((p.detach() - before[p]).double().square().sum())
            squares[group["use_muon"]][1] += p.numel()
    return {kind: math.sqrt(total / count) for kind, (total, count) in squares.items()}


@pytest.mark.parametrize(
    ("scale", "lr"),
    [
        (None, 0.02),
        ("match_rms_adamw", torch.tensor(0.02)),
        ("spectral", 0.02),
        ("unit_rms_norm", torch.tensor(0.02)),
        ("none", 0.02),
        (lambda r, c: r / c, torch.tensor(0.02)),
    ],
)
def test_adamws_lr_is_matched_to_the_matrices_updates(lr: Any, scale: Any) -> None:
    """One step of each: an orthogonalized matrix has an RMS of 1/sqrt(max(r, c)) within its schedule's band of 0.68 to
    1.14, and AdamW's first step has an RMS of lr, 1 / 0.2 times what it settles to."""
    model = Llama()
    optimizer = Muon(model, lr=lr, adjust_lr_fn=scale, weight_decay=0.0)
    rms = _rms_of_updates(model, optimizer)
    assert 0.68 < rms[True] / (0.2 * rms[False]) < 1.15
    groups = param_groups(Llama(), lr=lr, adjust_lr_fn=scale)
    rates = {float(group["lr"]) for group in groups if not group["use_muon"]}
    assert rates == {float(g["lr"]) for g in optimizer.param_groups if not g["use_muon"]}
    assert groups.matched is not None
    assert rates == {float(lr * groups.matched)}
    assert f"AdamW's lr is {groups.matched:.3g} times Muon's" in str(groups)


def test_a_matched_lr_is_muons_where_their_updates_are_alike_and_a_given_one_is_taken() -> None:
    rate = torch.tensor(0.5)
    same = param_groups(Llama(), lr=rate, adjust_lr_fn="match_rms_adamw")
    assert same.matched == 1.0
    assert all(group["lr"] is rate for group in same)
    given = param_groups(Llama(), lr=0.5, adamw_lr=0.3)
    assert given.matched is None
    assert "no adamw_lr" not in str(given)
    assert {group["lr"] for group in given} == {0.5, 0.3}
    with pytest.warns(UserWarning, match="no parameter goes to Muon"):
        assert param_groups(nn.LayerNorm(4), lr=0.5)[0]["lr"] == 0.5
    one = matched_lr([(1024, 1024, 1.0)])  # a square matrix of 1024: RMS lr / 32
    assert one == float(f"{1 / 32 / 0.2:.6g}")  # given to six digits


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


def test_muon_groups_come_first_and_all_follow_model_order() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Conv2d(4, 4, 1), nn.Linear(4, 4), nn.Conv2d(4, 4, 1), nn.Linear(4, 4))
    assert [(group["use_muon"], group["param_names"]) for group in param_groups(model, lr=1e-3)] == [
        (True, ["1.weight", "3.weight"]),
        (True, ["2.weight", "4.weight"]),
        (False, ["0.weight", "0.bias", "1.bias", "2.bias", "3.bias", "4.bias"]),
    ]


def test_groups_survive_copy_and_pickle_and_torch_optimizers_take_them() -> None:
    groups = param_groups(Llama(), lr=1e-3)
    for copied in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert str(copied) == str(groups)
        assert [group["param_names"] for group in copied] == [group["param_names"] for group in groups]
    assert [g["param_names"] for g in torch.optim.SGD(groups).param_groups] == [g["param_names"] for g in groups]


def test_the_table_shows_every_parameter_with_its_matrices_and_reason() -> None:
    model = Llama(depth=1)
    model.layers[0].get_submodule("norm").requires_grad_(False)
    splits: dict[Any, Any] = {"*.wq.*": {"num_heads": 4}, "*.up.*": {"split_sizes": (8, 4, 8, 4)}}
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
    model = Llama()
    table = str(param_groups(model, lr=1e-3))
    assert str(param_groups(nn.DataParallel(model), lr=1e-3)) == table
    assert str(param_groups(cast(nn.Module, torch.compile(model, backend="eager")), lr=1e-3)) == table
    for at, block in enumerate(model.layers):
        model.layers[at] = cast(nn.Module, torch.compile(checkpoint_wrapper(block), backend="eager"))
    assert str(param_groups(model, lr=1e-3)) == table


def _table_of(how: str) -> tuple[str, str]:
    model: Any = WithHook("decoder") if "says" in how else Llama()
    before = str(param_groups(model, lr=1e-3))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif "fsdp1" in how:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif how == "tp":
        plan = {"embed": RowwiseParallel(), "head": ColwiseParallel(), "layers.*.wq": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], {**plan, "layers.*.wo": RowwiseParallel()})
    if how in ("fsdp2", "tp"):
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["tp" if how == "fsdp2" else "dp"])
    return before, str(param_groups(model, lr=1e-3))


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "tp", "fsdp1", "fsdp1, the model says its head"])
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
        lambda: Bare(a, b, 3),
        lambda: Bare(a, b),
        lambda: Bare(a),
    ]
    return draw(st.sampled_from(makers))()


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Nested containers of random layers, some frozen, some sharing a weight."""
    leaves = [_leaf(draw) for _ in range(draw(st.integers(1, 8)))]
    for module in leaves:
        if isinstance(module, (nn.Linear, nn.Embedding, Bare)) and draw(st.booleans()):
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
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        with pytest.raises(ValueError, match="nothing to optimize"):
            param_groups(model, lr=1e-3)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        groups, again = param_groups(model, lr=1e-3), param_groups(model, lr=1e-3)
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(trainable)
    assert sorted(map(id, (p for group in groups for p in group["params"]))) == sorted(
        id(p) for p in model.parameters() if p.requires_grad
    )
    assert all(group["params"] for group in groups)
    assert [g["use_muon"] for g in groups] == sorted((g["use_muon"] for g in groups), reverse=True)
    assert [row.name for row in groups.rows] == [name for name, _ in model.named_parameters()]
    assert (groups.rows, [g["param_names"] for g in groups]) == (again.rows, [g["param_names"] for g in again])
    for row, p in zip(groups.rows, model.parameters(), strict=True):
        assert row.reason
        if row.optimizer == "Muon":
            assert sum(rows * cols for rows, cols in row.matrices) == p.numel()
    Muon(groups, lr=1e-3)


# ------------------------------------------------------------------------------------------------ documentation


def test_the_example_of_the_docstring_prints_what_it_shows() -> None:
    assert doctest.testmod(groups_module) == (0, 2)


ROUTING = Path(__file__).parents[2] / "docs" / "routing.md"


def test_the_examples_of_the_guide_run_and_print_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = ROUTING.read_text()
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", text, flags=re.DOTALL)
    assert len(blocks) > 3
    for code, shown in blocks:
        capsys.readouterr()
        exec(code, namespace)
        if shown:
            assert capsys.readouterr().out.strip() == shown.strip()
