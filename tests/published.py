"""Predictions of the published measurements in data/published.yaml, made with shardmuon's cost model (`foresight`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardmuon.foresight import Hardware, plan
from shardmuon.foresight.hardware import Rates
from shardmuon.foresight.job import Exact
from shardmuon.foresight.models import build
from shardmuon.foresight.report import Price
from shardmuon.orthogonalize import flops
from shardmuon.orthogonalize.schedules import schedule

Interval = tuple[float, float]
_GPU = torch.device("cuda")
KELLER = schedule("keller", None).triples
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def decoder(*sizes: int, **others: Any) -> dict[str, Any]:
    """Return the config of a decoder-only transformer. `sizes` are the values of the fields listed in `_SIZES`,
    followed by that of `intermediate_size`."""
    return {**dict(zip((*_SIZES, "intermediate_size"), sizes, strict=True)), **others}


# The sizes are those of Llama-3.2-1B (huggingface.co/meta-llama/Llama-3.2-1B).
ONE_B = decoder(128256, 2048, 16, 32, 8, 64, 8192, tie_word_embeddings=True)
# The sizes are those of Qwen2.5-3B (huggingface.co/Qwen/Qwen2.5-3B).
QWEN_3B = decoder(151936, 2048, 36, 16, 2, 128, 11008, tie_word_embeddings=True, attention_bias=True)


def rounded(text: str) -> Interval:
    """Return the interval of numbers that round to `text` (for example, "1.2B")."""
    unit, half = {"B": 1e9, "M": 1e6, "T": 1e12}[text[-1]], 0.5 * 10.0 ** -len(text[:-1].partition(".")[2])
    # The published figures 400M and 800M are rounded to hundreds of millions.
    half = 50.0 if text[-1] == "M" else half
    return (float(text[:-1]) - half) * unit, (float(text[:-1]) + half) * unit


def _standard(exact: Exact) -> float:
    """Return the FLOPs needed to orthogonalize all of a model's matrices once with standard Newton-Schulz, as counted
    in the published figures."""
    found = ((c.count, m) for c in exact.classes for bucket in c.buckets for m in bucket.matrices)
    return sum(count * m.num * flops("standard", m.rows, m.cols, KELLER, torch.bfloat16, _GPU) for count, m in found)


def _over_adamw(model: str, mesh: str, gpu: str, muon_share: float, model_flops: float) -> Interval:
    """Predict the relative increase in training-step time when Muon replaces AdamW. The number of tokens is derived
    from `muon_share`, the published ratio of Muon's FLOPs to the model's. The step time with AdamW is derived from
    `model_flops`, the published FLOP/s per GPU."""
    hardware = Hardware.load(gpu)
    exact = Exact.of_job(model, mesh, gpus_per_node=hardware.gpus_per_node)
    tokens = _standard(exact) / (muon_share * exact.tokens_flops)
    whole = tokens * exact.tokens_flops / (exact.world * model_flops)
    price = Price.of(exact, hardware)
    ours, theirs = price.step, price.adamw
    return (ours.lo - theirs.lo) / whole, (ours.hi - theirs.hi) / whole


def _overhead(mesh: str, tokens: float) -> Interval:
    found = plan("llama3-8b", mesh, gpu="a100", tokens_per_step=tokens, gpus_per_node=8).overhead
    return found[0], found[2]


def one_b_8_b200() -> Interval:
    step = Price.of(Exact.of_job(build(ONE_B), "shard=8"), Hardware.load("b200")).step
    return step.lo, step.hi


def newton_schulz_on_h100() -> Interval:
    work = flops("standard", 2560, 2560, KELLER, torch.bfloat16, _GPU)
    best, _, worst = Rates(Hardware.load("h100")).product(2560, 2560, "standard bfloat16", 64, work)
    return 64 * work / worst, 64 * work / best


def qwen25_3b_memory() -> Interval:
    exact = Exact.of_job(build(QWEN_3B), "dp=8", engine="zero")
    # Muon stores one fp32 number per element where AdamW stores two, which saves 4 bytes per element.
    saved = [4 * c.muon_elements / 2**30 for c in exact.classes]
    return min(saved), max(saved)


def gram_over_standard(rows: int, cols: int) -> Interval:
    hardware, times = Hardware.load("a100"), []
    for method, dtype in (("standard", torch.bfloat16), ("gram", torch.float16)):
        work = flops(method, rows, cols, KELLER, dtype, _GPU)
        how = f"{method} {str(dtype).removeprefix('torch.')}"
        times.append(Rates(hardware).product(rows, cols, how, 1, work))
    # Both methods are assumed to reach the same fraction of the peak rate, so the shortest times are compared with each
    # other, and so are the longest.
    return times[0][0] / times[1][0], times[0][2] / times[1][2]


def extra_flops() -> Interval:
    """Return the ratio of the FLOPs for orthogonalizing a d x d matrix to those for training it on B tokens, in units
    of d / B. Training takes 6 FLOPs per element and token."""
    d = 4096
    found = flops("standard", d, d, KELLER, torch.bfloat16, _GPU) / (6 * d * d) / d
    return found, found


def torchtitan_tokens() -> Interval:
    exact = Exact.of_job("llama3-8b", "shard=8")
    hardware, tokens = Hardware.load("h100"), 8 * 8192.0
    price = Price.of(exact, hardware, tokens=tokens)
    whole, adamw = price.training, price.adamw
    assert whole is not None, "of these tokens"
    return tokens / exact.world / (whole.hi + adamw.hi), tokens / exact.world / (whole.lo + adamw.lo)


# Each row gives the ID of a published figure, the function that computes the figure, and the arguments of this
# function.
COMPUTED: dict[str, tuple[Callable[..., Interval], tuple[Any, ...]]] = {
    "V1": (_over_adamw, ("kimi-k2", "shard=64 ep=64 pp=4", "gb300", 51 / 1029, 1051e12)),
    "V2": (_over_adamw, ("qwen3-30b-a3b", "shard=8 ep=8", "gb300", 35 / 686, 713e12)),
    "V5": (_overhead, ("dp=16 shard=8", 128 * 4096)),
    "V6": (_overhead, ("shard=8", 8 * 4096)),
    "V7": (one_b_8_b200, ()),
    "V8": (newton_schulz_on_h100, ()),
    "V10": (qwen25_3b_memory, ()),
    "V11a": (gram_over_standard, (2048, 11059)),
    "V11b": (gram_over_standard, (3584, 19353)),
    "V18": (extra_flops, ()),
    "V19": (torchtitan_tokens, ()),
}
