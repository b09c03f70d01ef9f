"""QK-clip on one process: the rule against fp64 code, what is measured, which layers are found, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from demo_script import train
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.testing.tolerances import assert_bitwise, assert_rounded
from shardmuon_qkclip import QKClip, qk_clip
from shardmuon_qkclip import clip as measuring
from shardmuon_qkclip.clip import largest_logits
from shardmuon_qkclip.layers import Attention, Rows, attention_layers


def _normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Llama(nn.Module):
    """Grouped queries, rotary positions left out: they keep the norms of q and k."""

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


def _dense_logits(attention: Llama, x: Tensor) -> Tensor:  # (B, H, T, T), -inf where a query may not look
    q, k, _ = (t.double() for t in attention.heads(x))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


def _largest(logits: Tensor) -> Tensor:  # (H,)
    return logits.detach().transpose(0, 1).flatten(1).amax(1)


def _idle(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps change nothing."""
    return torch.optim.SGD(model.named_parameters(), lr=0.0)


def _hooked(model: nn.Module, **options: Any) -> QKClip:
    return QKClip(model, _idle(model), **options)


def _clip(model: nn.Module, logits: Any, layers: Any = None, **options: Any) -> Any:
    return qk_clip(_idle(model), logits, layers=layers or attention_layers(model), **options)


# ------------------------------------------------------------------------------------------------------------ the rule


def test_weights_follow_the_rule_written_out_in_fp64() -> None:
    model = Llama()
    before = {n: p.detach().double() for n, p in model.named_parameters()}
    maxima = torch.tensor([50.0, 210.0, 90.0, 99.0, 100.0, -3.0])
    scaled = _clip(model, {"": maxima}, tau=100.0, alpha=0.3)
    gain = [100 / 210, 1.0]  # heads 0 to 2 share a key head, heads 3 to 5 the other one
    assert_rounded(scaled[""].gains, torch.tensor(gain, dtype=torch.float64), roundings=1, dtype=torch.float32)
    q, k = before["q_proj.weight"].clone(), before["k_proj.weight"].clone()
    for head, group in enumerate([0, 0, 0, 1, 1, 1]):
        q[4 * head : 4 * head + 4] *= gain[group] ** 0.3
    for group in range(2):
        k[4 * group : 4 * group + 4] *= gain[group] ** 0.7
    # the quotient, the power (2 ulp), the product
    assert_rounded(model.q_proj.weight, q, roundings=6)
    assert_rounded(model.k_proj.weight, k, roundings=6)
    for name in ("v_proj.weight", "o_proj.weight"):
        assert_bitwise(model.get_parameter(name).detach().double(), before[name])


def test_the_largest_logit_becomes_tau_and_the_others_shrink_with_it() -> None:
    model, x = Llama(bias=True).requires_grad_(False), _normal(3, 7, 12, seed=4, scale=8.0)
    before = _largest(_dense_logits(model, x))
    tau = float(before.max()) / 3
    _clip(model, {"": before.float()}, tau=tau)
    after = _largest(_dense_logits(model, x))
    shrunk = before.view(2, 3).amax(1).clamp(min=tau)  # of each group
    wanted = before * (tau / shrunk).repeat_interleave(3)
    # q and k each: two products with powers, sums of 12 terms with a bias; then a sum of 4 products of theirs
    assert_rounded(after, wanted, roundings=60, dtype=torch.float32, scale=float(shrunk.max()))
    assert float(after.max()) <= tau * (1 + 60 * torch.finfo(torch.float32).eps)


def test_latent_attention_scales_the_rotary_queries_by_g_and_no_shared_key() -> None:
    heads, nope, rope, value = 3, 4, 2, 5
    layer = Attention(
        "attn",
        heads,
        heads,
        (Rows("q", (("q", nope), ("q_pe", rope)), heads), Rows("kv", (("k", nope), ("", value)), heads)),
    )
    weights = {"q": _normal(heads * 6, 7), "kv": _normal(heads * 9, 7, seed=1), "k_pe": _normal(rope, 7, seed=2)}
    optimizer = Muon([{"params": [(n, nn.Parameter(t.clone())) for n, t in weights.items()]}], lr=1e-3)
    maxima = torch.tensor([400.0, 25.0, 200.0])
    qk_clip(optimizer, {"attn": maxima}, layers=[layer], tau=100.0)
    found = dict(zip(weights, optimizer.param_groups[0]["params"], strict=True))
    for head, g in enumerate([0.25, 1.0, 0.5]):
        q, kv = (weights[n].double().view(heads, -1, 7)[head] for n in ("q", "kv"))
        powers = torch.tensor([g**0.5] * nope + [g] * rope, dtype=torch.float64)[:, None]
        assert_rounded(found["q"].view(heads, -1, 7)[head], q * powers, roundings=5)
        powers = torch.tensor([g**0.5] * nope + [1.0] * value, dtype=torch.float64)[:, None]
        assert_rounded(found["kv"].view(heads, -1, 7)[head], kv * powers, roundings=5)
    assert_bitwise(found["k_pe"].detach(), weights["k_pe"])


def test_repeats_and_columns_name_the_same_rows_as_slices_do() -> None:
    by_group = Attention("a", 4, 2, (Rows("w", (("q", 6), ("k", 3), ("", 3)), repeats=2),))
    turned = Attention("a", 2, 2, (Rows("w", (("q", 4), ("k", 4), ("", 4)), dim=1),))
    gain = torch.tensor([0.25, 0.5])
    numbers = [1] * 3 + [2] * 3 + [9] * 3 + [0] * 3 + [3] * 3 + [4] * 3 + [10] * 3 + [0] * 3
    assert by_group.places(by_group.rows[0]).tolist() == numbers
    weight = nn.Parameter(torch.ones(5, 12))
    qk_clip(Muon([{"params": [("w", weight)]}], lr=1e-3), {"a": 100.0 / gain}, layers=[turned])
    wanted = torch.tensor([0.5, 0.5, 0.5**0.5, 0.5**0.5] * 2 + [1.0] * 4, dtype=torch.float64)
    assert_rounded(weight, wanted.expand(5, 12), roundings=4)  # 100 / g, the quotient, the power


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_maxima_that_say_nothing_change_no_bit(bad: float) -> None:
    model = Llama(groups=6)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaled = _clip(model, {"": torch.full((6,), bad)}, tau=1.0)
    assert scaled[""].gains.tolist() == [1.0] * 6
    assert_bitwise({n: p.detach() for n, p in model.named_parameters()}, before)
    _clip(model, {})  # nothing was measured
    assert_bitwise({n: p.detach() for n, p in model.named_parameters()}, before)


def test_half_precision_weights_are_rounded_once() -> None:
    model = Llama().bfloat16()
    before = model.q_proj.weight.detach().clone()
    _clip(model, {"": torch.full((6,), 300.0)}, tau=100.0)
    factor = (torch.tensor(100.0) / 300.0) ** 0.5
    assert_bitwise(model.q_proj.weight.detach(), (before.float() * factor).bfloat16())


# ------------------------------------------------------------------------------------------------------------- measure


@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "padding"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_largest_logit_is_that_of_the_whole_matrix(groups: int, mask: str, chunk: int) -> None:
    q, k = _normal(3, 4, 9, 5, seed=1).double(), _normal(3, groups, 11, 5, seed=2).double()
    logits = q @ k.repeat_interleave(4 // groups, 1).transpose(-1, -2) * 0.7
    seen = torch.ones(9, 11, dtype=torch.bool)
    given: dict[str, Any] = {}
    if mask == "causal":
        seen, given = seen.tril(), {"is_causal": True}
    elif mask == "bool":
        seen = torch.rand(3, 4, 9, 11, generator=torch.Generator().manual_seed(3)) > 0.4
        given = {"attn_mask": seen}
    elif mask == "float":
        seen = torch.rand(9, 11, generator=torch.Generator().manual_seed(3)) > 0.4
        given = {"attn_mask": torch.zeros(9, 11).masked_fill(~seen, torch.finfo(torch.float32).min)}
    elif mask == "padding":
        seen = (torch.arange(11) < torch.tensor([[4], [11], [7]]))[:, None, None, :]
        given = {"attn_mask": seen}
    wanted = logits.masked_fill(~seen, -math.inf).transpose(0, 1).flatten(1).amax(1)
    found = largest_logits(q, k, scale=0.7, chunk=chunk, **given)
    assert_bitwise(found, wanted.float())
    assert bool((largest_logits(q, k, scale=0.7, bound=True) >= found).all())


def test_a_head_that_sees_nothing_has_no_largest_logit() -> None:
    q, k = _normal(1, 2, 3, 4), _normal(1, 2, 3, 4, seed=1)
    mask = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    mask[:, 1] = False
    found = largest_logits(q, k, attn_mask=mask)
    assert math.isfinite(found[0]) and found[1] == -math.inf


def test_no_chunk_holds_more_logits_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    matmul = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: sizes.append(matmul(a, b).numel()) or matmul(a, b))
    largest_logits(_normal(2, 4, 64, 8), _normal(2, 2, 64, 8), chunk=2048, is_causal=True)
    assert max(sizes) <= 2048 and len(sizes) == 2 * 4 * 64 * 64 // 2048


@pytest.mark.parametrize("bias", [False, True])
def test_hooks_measure_scaled_dot_product_attention_over_all_batches_of_a_step(bias: bool) -> None:
    model = nn.ModuleDict({"a": Llama(bias=bias), "b": Llama(groups=6)})
    clip = _hooked(model, tau=math.inf)
    batches = [_normal(2, 5, 12, seed=s, scale=1.0 + s) for s in range(3)]
    for x in batches:
        for one in model.values():
            one(x).sum().backward()
    with torch.no_grad():
        model["a"](100 * batches[0])  # evaluation does not count
    clip._optimizer.step()
    for layer, one in zip(clip.report.layers, model.values(), strict=True):
        wanted = torch.stack([_largest(_dense_logits(one, x)) for x in batches]).amax(0)
        # a sum of 12 products and a bias on each side, a sum of 4 products, a scale
        assert_rounded(torch.tensor(layer.maxima), wanted, roundings=40, dtype=torch.float32, scale=float(wanted.max()))
    assert clip.report.history == ((1, clip.report.max_logit),)
    clip.close()
    model["a"](batches[0]).sum().backward()
    assert not clip._pending


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_hooks_measure_torchs_multihead_attention(mask: str, batch_first: bool, need_weights: bool) -> None:
    attention = nn.MultiheadAttention(12, 3, batch_first=batch_first)
    nn.init.normal_(attention.in_proj_bias, generator=torch.Generator().manual_seed(5))
    x = _normal(2, 7, 12, seed=3, scale=3.0)
    given: dict[str, Any] = {}
    seen = torch.ones(7, 7, dtype=torch.bool)
    if mask == "causal":
        seen, given = seen.tril(), {"attn_mask": nn.Transformer.generate_square_subsequent_mask(7)}
    elif mask == "padding":
        padding = torch.arange(7) >= torch.tensor([[4], [7]])
        seen, given = ~padding[:, None, None, :], {"key_padding_mask": padding}
    clip = _hooked(attention, tau=math.inf)
    inputs = x if batch_first else x.transpose(0, 1)
    attention(inputs, inputs, inputs, need_weights=need_weights, **given)[0].sum().backward()
    clip._optimizer.step()
    q, k, _ = (F.linear(x, attention.in_proj_weight, attention.in_proj_bias)).double().chunk(3, dim=-1)
    q, k = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (q, k))
    wanted = _largest((q @ k.transpose(-1, -2) / 2).masked_fill(~seen, -math.inf))
    found = torch.tensor(clip.report.layers[0].maxima)
    assert_rounded(found, wanted, roundings=40, dtype=torch.float32, scale=float(wanted.max()))


class Eager(Llama):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        logits = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        logits = logits + torch.full(logits.shape[-2:], torch.finfo(torch.float32).min).triu(1)
        return self.o_proj((F.softmax(logits, dim=-1, dtype=torch.float32) @ v).transpose(1, 2).flatten(2))


def test_attention_that_is_written_out_is_measured_at_its_softmax() -> None:
    model, x = Eager(), _normal(2, 5, 12, scale=4.0)
    clip = _hooked(model, tau=math.inf)
    model(x).sum().backward()
    clip._optimizer.step()
    wanted = _largest(_dense_logits(model, x))
    found = torch.tensor(clip.report.layers[0].maxima)
    assert_rounded(found, wanted, roundings=40, dtype=torch.float32, scale=float(wanted.max()))


def test_a_bound_is_never_below_the_largest_logit_and_clips_at_least_as_much() -> None:
    x, reports = _normal(2, 5, 12, scale=4.0), []
    for bound in (False, True):
        torch.manual_seed(0)
        model = Llama()
        clip = _hooked(model, tau=0.5, bound=bound)
        model(x).sum().backward()
        clip._optimizer.step()
        reports.append(clip.report.layers[0])
    assert all(b >= a for a, b in zip(reports[0].maxima, reports[1].maxima, strict=True))
    assert reports[1].smallest_gain < reports[0].smallest_gain < 1.0


def test_only_every_nth_step_is_measured() -> None:
    model, seen = Llama(), []
    clip = _hooked(model, tau=1e-3, every=3)
    for _ in range(7):
        with torch.no_grad():
            model.q_proj.weight *= 1000.0
        before = model.q_proj.weight.detach().clone()
        model(_normal(1, 4, 12)).sum().backward()
        clip._optimizer.step()
        seen.append(not torch.equal(before, model.q_proj.weight))
    assert seen == [True, False, False, True, False, False, True]
    assert [step for step, _ in clip.report.history] == [1, 4, 7]


def test_a_function_gives_the_maxima() -> None:
    model = Llama(groups=6)
    clip = _hooked(model, logits=lambda: {"": torch.tensor([1.0, 2.0, 400.0, 4.0, 5.0, 6.0])})
    clip._optimizer.step()
    assert clip.report.num_clipped == 1
    assert clip.report.layers[0].smallest_gain == 0.25
    assert clip.report.max_logit == 400.0
    assert "max 400  clipped 1  gain 0.25" in str(clip.report)


# -------------------------------------------------------------------------------------------------- layers are found


def test_layers_of_the_demo_are_found_with_their_groups() -> None:
    config = train.Config()
    layers = attention_layers(train.Model(config))
    assert len(layers) == config.layers
    assert {(x.num_heads, x.num_groups) for x in layers} == {(config.heads, config.kv_heads)}
    assert layers[0].rows[0].weight.endswith("wq.weight")


class _Config:
    num_attention_heads, num_query_groups, kv_channels = 4, 2, 3
    qk_head_dim, qk_pos_emb_head_dim, v_head_dim = 4, 2, 5


class _Megatron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()
        self.linear_qkv = nn.Linear(6, 2 * (6 + 3 + 3))


class _MegatronLatent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()
        self.linear_q_up_proj = nn.Linear(6, 4 * (4 + 2), bias=False)
        self.linear_kv_up_proj = nn.Linear(6, 4 * (4 + 5), bias=False)


def test_megatrons_layers_are_found() -> None:
    (fused,) = attention_layers(nn.Sequential(_Megatron()))
    parts = (("q", 6), ("k", 3), ("", 3))
    assert fused == Attention("0", 4, 2, (Rows("0.linear_qkv.weight", parts, 2), Rows("0.linear_qkv.bias", parts, 2)))
    (latent,) = attention_layers(nn.Sequential(_MegatronLatent()))
    assert latent.rows == (
        Rows("0.linear_q_up_proj.weight", (("q", 4), ("q_pe", 2)), 4),
        Rows("0.linear_kv_up_proj.weight", (("k", 4), ("", 5)), 4),
    )


# ------------------------------------------------------------------------------------------------------------- errors


class Normed(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(4)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.qkv = nn.Linear(8, 24)


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)


_LAYER = Attention("", 6, 2, (Rows("q_proj.weight", (("q", 24),)), Rows("k_proj.weight", (("k", 8),))))

_UNLIKE = Attention("b", 12, 2, _LAYER.rows)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _hooked(Normed()), r"q_norm normalizes its queries or keys .*tau=math.inf"),
        (lambda: _hooked(nn.Linear(3, 3)), "no attention was found in Linear"),
        (lambda: _hooked(Unknown()), r"qkv.weight: by its name it holds queries and keys.*layers=\["),
        (lambda: _hooked(Headless()), "of what size a head is it does not say"),
        (lambda: _hooked(Llama(), tau=0.0), "tau=0.0: the largest logit"),
        (lambda: _hooked(Llama(), alpha=1.5), r"alpha=1.5: the queries' share must be in \[0, 1\]"),
        (lambda: _hooked(Llama(), every=0), "every=0"),
        (lambda: _hooked(Llama(), layers=[Attention("x", 6, 2, _LAYER.rows)]), "there is no module 'x'"),
        (lambda: _hooked(nn.MultiheadAttention(4, 2, add_bias_kv=True)), "add_bias_kv=True"),
        (lambda: _clip(Llama(), {"x": torch.ones(6)}), "logits of 'x': no such layer"),
        (lambda: _clip(Llama(), {"": torch.ones(5)}), r"found \(5,\), expected a tensor of shape \(6,\)"),
        (lambda: _clip(Llama(), {"": 3.0}), "found float, expected a tensor"),  # type: ignore[dict-item]
        (
            lambda: qk_clip(Muon(nn.Linear(3, 3), lr=0.03), {}, layers=[_LAYER]),
            "q_proj.weight is not among the weights of Muon",
        ),
        (lambda: _clip(Llama(), {}, layers=[_LAYER, _UNLIKE]), r"q_proj.weight of  and q_proj.weight of b are one"),
        (lambda: _clip(Llama(size=5), {}, layers=[_LAYER]), "has 30 rows, and its parts"),
        (lambda: Attention("a", 6, 4, _LAYER.rows), "do not share 4 key heads evenly"),
        (lambda: Attention("a", 5, 1, _LAYER.rows), "24 rows of role 'q', which 5 heads do not divide"),
        (lambda: Attention("a", 6, 2, _LAYER.rows[:1]), "no rows of role 'k'"),
        (lambda: Rows("w", (("z", 3),)), "'z', 3.*parts are pairs of a role"),  # type: ignore[arg-type]
        (lambda: Rows("w", (("q", 3),), repeats=0), "repeats 1 or more"),
    ],
)
def test_what_is_wrong_is_said_with_a_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_layer_with_normed_queries_can_be_measured() -> None:
    model = Normed()
    clip = _hooked(model, tau=math.inf)
    before = model.q_proj.weight.detach().clone()
    model(_normal(1, 4, 12)).sum().backward()
    clip._optimizer.step()
    assert math.isfinite(clip.report.max_logit)
    assert torch.equal(before, model.q_proj.weight)


def test_heads_that_do_not_fit_the_weights_are_refused_where_they_are_measured() -> None:
    model = Llama()
    model.head_dim = 8
    _hooked(model, layers=[_LAYER])
    with pytest.raises(ValueError, match="its forward makes logits of 3 heads, and it has 6"):
        model(_normal(1, 4, 12))


# ------------------------------------------------------------------------------------------------------------- a run


class Growing(nn.Module):
    """A byte model with logits that a large lr makes grow."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(16, 12), Llama(), nn.Linear(12, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.rms_norm(self.embed(ids), (12,))
        return self.head(x + self.attention(x))


def _train(tau: float, steps: int = 60) -> tuple[list[float], list[float]]:
    """Largest logit before each step, and losses."""
    torch.manual_seed(0)
    model = Growing()
    for name in ("q_proj", "k_proj"):
        nn.init.normal_(getattr(model.attention, name).weight, std=1.0)
    optimizer = Muon(model, lr=0.2, weight_decay=0.0, adamw_lr=0.01)
    clip = QKClip(model, optimizer, tau=tau)
    ids = torch.randint(0, 16, (4, 33), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return [value for _, value in clip.report.history], losses


@pytest.mark.numeric
def test_growing_logits_are_held_while_the_loss_goes_on_falling() -> None:
    free, free_losses = _train(math.inf)
    held, held_losses = _train(20.0)
    assert free[0] == held[0]  # the same model
    assert max(free[10:]) > 100.0  # what is held would grow
    # a step may lift logits above tau again before it is measured: by its own update, of q and of k
    assert max(held[10:]) < 2 * 20.0 and max(held[10:]) < min(free[30:]) / 2
    assert held_losses[-1] < held_losses[5] < held_losses[0]
    assert math.isfinite(free_losses[-1])


def test_measuring_leaves_outputs_and_gradients_alone() -> None:
    model, x = Llama(), _normal(2, 5, 12)
    plain = model(x)
    plain.sum().backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    _hooked(model)
    found = model(x)
    found.sum().backward()
    assert_bitwise(found.detach(), plain.detach())
    assert_bitwise({n: p.grad for n, p in model.named_parameters()}, wanted)
    assert measuring.CHUNK >= 1 << 20
