"""Tests of QK-clip in a single process: the scaling rule against fp64 code, measured logits, layer discovery, and
errors for unsupported models."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from demo_script import train
from spectra import normal
from tolerances import assert_bitwise, assert_rounded
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon_qkclip import QKClip
from shardmuon_qkclip.clip import _largest_logits
from shardmuon_qkclip.layers import Attention, Rows


class Llama(nn.Module):
    """A grouped-query attention layer. It has no rotary embeddings, because they do not change the norms of q and k."""

    def __init__(self, dim: int = 12, heads: int = 6, groups: int = 2, size: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = size
        self.q_proj = nn.Linear(dim, heads * size, bias=bias)
        self.k_proj = nn.Linear(dim, groups * size, bias=bias)
        self.v_proj = nn.Linear(dim, groups * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, dim, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in made)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x), is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Eager(Llama):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        logits = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        logits = logits + torch.full(logits.shape[-2:], torch.finfo(torch.float32).min).triu(1)
        return self.o_proj((F.softmax(logits, dim=-1, dtype=torch.float32) @ v).transpose(1, 2).flatten(2))


# `largest` returns the largest logit of each head among the positions that the causal mask keeps, as an fp64 tensor of
# shape (H,).
def largest(attention: Any, x: Tensor) -> Tensor:
    q, k, _ = (t.detach().double() for t in attention.heads(x))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -math.inf).transpose(0, 1).flatten(1).amax(1)


def assert_measured(clip: QKClip, wanted: Sequence[Tensor]) -> None:
    for layer, maxima in zip(clip.report.layers, wanted, strict=True):
        # The bound covers the rounding errors of the measured and the expected logits. Each element of q and k is a
        # sum of 12 products, and each logit is a sum of 4 products of these elements.
        assert_rounded(layer.maxima, maxima, roundings=80, dtype=torch.float32, scale=float(maxima.abs().max()))


def _with(model: Any, **changes: Any) -> Any:
    vars(model).update(changes)
    return model


def _hooked(model: nn.Module, **options: Any) -> QKClip:
    return QKClip(model, torch.optim.SGD(model.named_parameters(), lr=0.0), **options)


def clip_by(logits: Any, model: nn.Module, **options: Any) -> Tensor:
    """Take a step without gradients, in which QK-clip scales the model's weights based on the given maximum logits.
    Return the gain of each key head of the first layer (the factor for its logits)."""
    clip = _hooked(model, logits=lambda: logits, **options)
    clip._optimizer.step()
    return clip.report.layers[0].gains


# ------------------------------------------------------------------------------------------------------------ the rule

_QK = (Rows("q", (("q", 24),)), Rows("k", (("k", 8),)))
_TWO = (0.25, 0.5)
# Each case gives a layer, the gain of each key head (the factor for its logits), alpha, and the expected factor of each
# row of each weight, or of each column if `dim` is 1.
RULES: dict[str, tuple[Attention, tuple[float, ...], float, dict[str, list[float]]]] = {
    "groups": (
        Attention("a", 6, 2, _QK),
        _TWO,
        0.3,
        {"q": [g**0.3 for g in _TWO for _ in range(12)], "k": [g**0.7 for g in _TWO for _ in range(4)], "v": [1.0] * 8},
    ),
    "of each group its queries, key and value": (
        Attention("a", 4, 2, (Rows("w", (("q", 6), ("k", 3), ("", 3)), repeats=2),)),
        _TWO,
        0.3,
        {"w": [f for g in _TWO for f in [g**0.3] * 6 + [g**0.7] * 3 + [1.0] * 3]},
    ),
    "columns": (
        Attention("a", 2, 2, (Rows("w", (("q", 4), ("k", 4), ("", 4)), dim=1),)),
        _TWO,
        0.5,
        {"w": [*(g**0.5 for _ in "qk" for g in _TWO for _ in range(2)), *[1.0] * 4]},
    ),
    "latent attention, whose shared rotary keys stay": (
        Attention("a", 2, 2, (Rows("q", (("q", 4), ("q_pe", 2)), 2), Rows("kv", (("k", 4), ("", 5)), 2))),
        _TWO,
        0.5,
        {
            "q": [f for g in _TWO for f in [g**0.5] * 4 + [g] * 2],
            "kv": [f for g in _TWO for f in [g**0.5] * 4 + [1.0] * 5],
            "k_pe": [1.0] * 2,
        },
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_weights_follow_the_rule_written_out_in_fp64(name: str, dtype: torch.dtype) -> None:
    """The expected weights are computed in fp64. Half-precision weights must be multiplied in fp32 and rounded only
    once."""
    layer, gain, alpha, factors = RULES[name]
    turned = any(rows.dim for rows in layer.rows)
    shapes = {n: (5, len(f)) if turned else (len(f), 5) for n, f in factors.items()}
    params = nn.ParameterDict({n: normal(*shape, seed=i).to(dtype) for i, (n, shape) in enumerate(shapes.items())})
    before = {n: p.detach().clone() for n, p in params.items()}
    share = layer.num_heads // layer.num_groups
    most = 100.0 / torch.tensor(gain).repeat_interleave(share)
    # The last head of each group has the largest logit of the group, which determines the group's gain.
    most -= (torch.arange(layer.num_heads) + 1) % share
    assert clip_by({"a": most}, params, layers=[layer], alpha=alpha).tolist() == list(gain)
    for n, found in params.items():
        factor = torch.tensor(factors[n], dtype=torch.float64)
        factor = factor if turned else factor[:, None]
        if dtype == torch.float32:
            assert_rounded(found, before[n].double() * factor, roundings=4)
        else:
            assert_bitwise(found.detach(), (before[n].float() * factor.float()).to(dtype))
        untouched = (factor == 1.0).expand(found.shape)
        assert torch.equal(found[untouched], before[n][untouched])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_maxima_that_say_nothing_change_no_bit(bad: float | None) -> None:
    model = Llama(groups=6)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert clip_by({} if bad is None else {"": torch.full((6,), bad)}, model, tau=1.0).tolist() == [1.0] * 6
    assert_bitwise({n: p.detach() for n, p in model.named_parameters()}, before)


# ------------------------------------------------------------------------------------------------------------- measure


@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "padding", "blind"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_largest_logit_is_that_of_the_whole_matrix(groups: int, mask: str, chunk: int) -> None:
    q, k = normal(3, 4, 9, 5, seed=1).double(), normal(3, groups, 11, 5, seed=2).double()
    logits = q @ k.repeat_interleave(4 // groups, 1).transpose(-1, -2) * 0.7
    drawn = torch.rand(3, 4, 9, 11, generator=torch.Generator().manual_seed(3)) > 0.4
    seen = {
        "causal": torch.ones(9, 11, dtype=torch.bool).tril(),
        "bool": drawn,
        "float": drawn[0, 0],
        "padding": (torch.arange(11) < torch.tensor([[4], [11], [7]]))[:, None, None, :],
        "blind": (torch.arange(4) != 1)[:, None, None],
    }.get(mask, torch.ones(9, 11, dtype=torch.bool))
    given: Any = {"is_causal": True} if mask == "causal" else {"attn_mask": None if mask == "none" else seen}
    if mask == "float":
        given = {"attn_mask": torch.zeros(9, 11).masked_fill(~seen, torch.finfo(torch.float32).min)}
    wanted = logits.masked_fill(~seen, -math.inf).transpose(0, 1).flatten(1).amax(1)
    assert_bitwise(_largest_logits(q, k, scale=0.7, chunk=chunk, **given), wanted.float())


def test_no_chunk_holds_more_logits_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    matmul = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: sizes.append(matmul(a, b).numel()) or matmul(a, b))
    _largest_logits(normal(2, 4, 64, 8), normal(2, 2, 64, 8), chunk=2048, is_causal=True)
    assert max(sizes) <= 2048 and len(sizes) == 2 * 4 * 64 * 64 // 2048


MEASURED: dict[str, Any] = {
    "sdpa": Llama,
    "sdpa, biases": lambda: Llama(bias=True),
    "sdpa, a head a key": lambda: Llama(groups=6),
    "written out": Eager,
    "normed queries, which are only measured": lambda: _with(Llama(), q_norm=nn.RMSNorm(4)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_hooks_measure_attention_over_all_batches_of_a_step_and_change_nothing(name: str) -> None:
    model = MEASURED[name]()
    batches = [(1.0 + s) * normal(2, 5, 12, seed=s) for s in range(3)]
    for x in batches:
        x[0, -1] *= 10.0

    def run() -> list[Tensor]:
        made = [model(x) for x in batches]
        grads = torch.autograd.grad([x.sum() for x in made], list(model.parameters()), allow_unused=True)
        return [*made, *(t for t in grads if t is not None), *(p.detach().clone() for p in model.parameters())]

    before, clip = run(), _hooked(model, tau=math.inf)
    assert_bitwise(run(), before)
    clip._optimizer.step()
    assert_bitwise([p.detach() for p in model.parameters()], before[-len([*model.parameters()]) :])
    assert_measured(clip, [torch.stack([largest(model, x) for x in batches]).amax(0)])
    clip.close()
    model(batches[0])
    assert not clip._pending


def test_only_every_nth_step_is_measured() -> None:
    model, seen = Llama(), []
    clip = _hooked(model, tau=1e-3, every=3)
    for _ in range(7):
        with torch.no_grad():
            model.q_proj.weight *= 1000.0
        before = model.q_proj.weight.detach().clone()
        model(normal(1, 4, 12)).sum().backward()
        clip._optimizer.step()
        seen.append((not torch.equal(before, model.q_proj.weight), clip.report.step))
    assert seen == [(True, 1), (False, 1), (False, 1), (True, 4), (False, 4), (False, 4), (True, 7)]
    assert re.search(r"step 7, tau=0.001\n  max .*  clipped 2  gain \d", str(clip.report))


# -------------------------------------------------------------------------------------------------- layers are found


def _of(config: Any = None, **layers: Any) -> nn.Module:
    """Return a module with the given attributes. An attribute given as a tuple (inputs, outputs) becomes a linear
    layer."""
    module = nn.ModuleDict({n: nn.Linear(*sizes) for n, sizes in layers.items() if isinstance(sizes, tuple)})
    for name, value in {"config": config, **layers}.items():
        if not isinstance(value, tuple):
            setattr(module, name, value)
    return module


_FUSED = (("q", 6), ("k", 3), ("", 3))
_DEMO = train.Config()
_PAIR = (("wq", "q", _DEMO.heads), ("wk", "k", _DEMO.kv_heads))
FOUND: dict[str, tuple[nn.Module, list[Attention]]] = {
    "demo": (
        train.Model(_DEMO),
        [
            Attention(
                f"blocks.{at}.attention",
                _DEMO.heads,
                _DEMO.kv_heads,
                tuple(
                    Rows(f"blocks.{at}.attention.{leaf}.weight", ((role, heads * _DEMO.dim // _DEMO.heads),))
                    for leaf, role, heads in _PAIR
                ),
            )
            for at in range(_DEMO.layers)
        ],
    ),
    "megatron": (
        nn.Sequential(
            _of(
                SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=3),
                linear_qkv=(6, 24),
            )
        ),
        [Attention("0", 4, 2, (Rows("0.linear_qkv.weight", _FUSED, 2), Rows("0.linear_qkv.bias", _FUSED, 2)))],
    ),
    "latent": (
        nn.Sequential(
            _of(
                SimpleNamespace(num_attention_heads=4, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=5),
                linear_q_up_proj=(6, 24, False),
                linear_kv_up_proj=(6, 36, False),
            )
        ),
        [
            Attention(
                "0",
                4,
                4,
                (
                    Rows("0.linear_q_up_proj.weight", (("q", 4), ("q_pe", 2)), 4),
                    Rows("0.linear_kv_up_proj.weight", (("k", 4), ("", 5)), 4),
                ),
            )
        ],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_layers_of_the_demo_and_of_megatron_are_found_with_their_groups(name: str) -> None:
    model, layers = FOUND[name]
    assert list(Attention.all_in(model)) == layers


# ------------------------------------------------------------------------------------------------------------- errors


def _tied(model: nn.Module, name: str, other: str) -> nn.Module:
    model.get_submodule(name).weight = model.get_submodule(other).weight
    return model


_LAYER = Attention("", 6, 2, (Rows("q_proj.weight", (("q", 24),)), Rows("k_proj.weight", (("k", 8),))))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: _hooked(_with(Llama(), q_norm=nn.RMSNorm(4))),
            r"q_proj.weight: q_norm normalizes the queries or keys that it makes.*tau=math.inf",
        ),
        (lambda: _hooked(nn.Linear(3, 3)), "no attention was found in Linear"),
        (
            lambda: _hooked(_of(qkv=(8, 24), head_dim=4)),
            r"qkv.weight: by its name it holds queries and keys.*layers=\[",
        ),
        (lambda: _hooked(_of(q_proj=(8, 8), k_proj=(8, 8))), "of what size a head is it does not say"),
        (lambda: _hooked(Llama(), tau=0.0), "tau=0.0, alpha=0.5: tau, the largest allowed logit, must be above 0"),
        (lambda: _hooked(Llama(), alpha=1.5), r"alpha=1.5: .* and alpha, the queries' share, in \[0, 1\]"),
        (lambda: _hooked(Llama(), every=0), "every=0"),
        (lambda: _hooked(Llama(), layers=[Attention("x", 6, 2, _LAYER.rows)]), "there is no module 'x'"),
        (lambda: _hooked(nn.MultiheadAttention(4, 2)), "MultiheadAttention makes queries and keys inside"),
        (lambda: QKClip(Llama(), object()), "optimizer is a object.*chained_optimizers"),
        (lambda: _hooked(Llama().requires_grad_(False)), "q_proj.weight: it is frozen, so"),
        (
            lambda: QKClip(model := Llama(), Muon(model, lr=0.1, variant="muon_eq+hyperball", weight_decay=0.0)),
            "q_proj.weight: it is variant='muon_eq.hyperball', which keeps norms, so QK-clip must not scale it",
        ),
        (lambda: clip_by({"": 3.0}, Llama()), "found float, expected a tensor"),
        (
            lambda: QKClip(Llama(), Muon(nn.Linear(3, 3), lr=0.03)),
            "q_proj.weight is not among the weights of Muon.*leave the layer",
        ),
        (lambda: QKClip(Llama(), Muon(Llama(), lr=0.02)), "q_proj.weight is not among.*another tensor of that name"),
        (lambda: _hooked(Llama(), layers=[_LAYER, _LAYER]), r"found \['', ''\], expected layers of unlike names"),
        (
            lambda: _hooked(Llama(), layers=[_LAYER, Attention("b", 12, 2, _LAYER.rows)]),
            r"q_proj.weight of  and q_proj.weight of b are one",
        ),
        (
            lambda: _hooked(_tied(Llama(groups=6), "k_proj", "q_proj")),
            r"q_proj.weight of  and k_proj.weight of  are one weight: no one factor",
        ),
        (
            lambda: _hooked(_tied(nn.ModuleList([Llama(), Llama()]), "1.q_proj", "0.q_proj")),
            r"0.q_proj.weight of 0 and 1.q_proj.weight of 1 are one weight",
        ),
        (lambda: clip_by({}, Llama(size=5), layers=[_LAYER]), "has 30 rows, and its parts"),
        (
            lambda: (_hooked(model := _with(Llama(), head_dim=8), layers=[_LAYER]), model(normal(1, 4, 12))),
            "its forward makes logits of 3 heads, and it has 6",
        ),
        (lambda: Attention("a", 6, 4, _LAYER.rows), "a: 6 heads, 4 key heads and rows .* do not fit"),
        (lambda: Attention("a", 5, 1, _LAYER.rows), r"a: 5 heads, 1 key heads and rows .*'q': 24"),
        (lambda: Attention("a", 6, 2, _LAYER.rows[:1]), r"'q': 24\}\} do not fit. Name the parameters"),
        (lambda: Rows("w", (("z", 3),)), "'z', 3.*parts are pairs of a role"),  # type: ignore[arg-type]
        (lambda: Rows("w", (("q", 3),), repeats=0), "repeats 1 or more"),
    ],
)
def test_what_is_wrong_is_said_with_a_name(make: Any, said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        make()
