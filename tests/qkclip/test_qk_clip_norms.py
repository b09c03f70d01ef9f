"""QK-clip between steps of norm control, attacked: what was clipped is measured again, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_qk_clip_layouts import _local, _normal
from torch import Tensor, nn

from shardmuon import Muon, audit
from shardmuon.layout.engines import engine_of
from shardmuon.testing.layouts import LAYOUTS, parameters
from shardmuon.testing.pool import get_pool
from shardmuon.testing.tolerances import assert_bitwise
from shardmuon.variants import WEIGHT_NORMS
from shardmuon_qkclip import qk_clip
from shardmuon_qkclip.layers import Attention, Rows

# ------------------------------------------------------------------------------ one process with a tensor a matrix

SHAPES = {"q": (8, 5), "k": (4, 5), "v": (4, 5), "few_q": (2, 9), "few_k": (2, 9)}
FUSED = ("q", "k", "v")
OF_MATRICES = (
    Attention("fused", 4, 2, (Rows("q", (("q", 8),)), Rows("k", (("k", 4),)))),
    Attention("few", 2, 2, (Rows("few_q", (("q", 2),)), Rows("few_k", (("k", 2),)))),
)
OF_WEIGHTS = (Attention("fused", 4, 2, (Rows("qkv", (("q", 8), ("k", 4), ("", 4))),)), OF_MATRICES[1])

Clip = tuple[int, float]  # number of the maxima, alpha
CLIPS: list[list[Clip]] = [[(0, 0.5)], [(1, 1.0)], [(2, 0.0), (3, 0.5)]]  # before each step


def _full(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    return {name: _normal(*shape, seed=seed + i).to(dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def _logits(number: int, rank: int) -> dict[str, Tensor]:
    return {
        x.name: 100 + 60 * _normal(x.num_heads, seed=100 * rank + 10 * number + i) for i, x in enumerate(OF_WEIGHTS)
    }


def _muon(params: dict[str, nn.Parameter], variant: str, **given: Any) -> Muon:
    groups: list[dict[str, Any]] = [{"params": [(n, p) for n, p in params.items() if n != "qkv"]}]
    if "qkv" in params:
        groups.append({"params": [("qkv", params["qkv"])], "split_sizes": [SHAPES[name][0] for name in FUSED]})
    return Muon(groups, lr=0.05, weight_decay=0.0, variant=variant, **given)


def _by_hand(world: int, variant: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Weights, and each of the norms that are kept, by name. The norms of what a clip has changed are deleted."""
    params = {name: nn.Parameter(t) for name, t in _full(dtype).items()}
    optimizer = _muon(params, variant)
    other = torch.optim.SGD(list(params.items()), lr=0.0)  # keeps no norms
    for number, before in enumerate(CLIPS):
        for maxima, alpha in before:
            each = [_logits(maxima, rank) for rank in range(world)]
            largest = {x.name: torch.stack([theirs[x.name] for theirs in each]).amax(0) for x in OF_MATRICES}
            old = {name: p.detach().clone() for name, p in params.items()}
            qk_clip(other, largest, layers=OF_MATRICES, alpha=alpha, process_group=(dist.get_rank(),))
            for name, p in params.items():
                for key in WEIGHT_NORMS if not torch.equal(p, old[name]) else ():
                    optimizer.state[p].pop(key, None)
        for name, grad in _full(dtype, seed=100 + 10 * number).items():
            params[name].grad = grad
        optimizer.step()
    kept = [
        {n: optimizer.state[p][key] for n, p in params.items() if key in optimizer.state[p]} for key in WEIGHT_NORMS
    ]
    return [_fused({n: p.detach() for n, p in params.items()}, 0), *(_fused(of_key, 1) for of_key in kept if of_key)]


def _fused(tensors: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    """A model with q, k and v in one weight, the last."""
    alone = {name: t for name, t in tensors.items() if name not in FUSED}
    return alone | {"qkv": torch.cat([tensors[name] for name in FUSED], dim)}


def _stepped(layout: str, variant: str, dtype: torch.dtype) -> None:
    """Clipped before the first step, at one end of alpha and the other, twice between steps, before a step that is
    refused by all ranks for what one has; the clip stands."""
    case, rank = LAYOUTS[layout], dist.get_rank()

    def build(full: dict[str, Tensor]) -> dict[str, Tensor]:
        return case.build(_fused(full, 0), case.mesh(dist.get_world_size()))

    params = parameters(build(_full(dtype)))
    optimizer = _muon(params, variant, **case.options(dist.get_world_size()))
    for number, clips in enumerate(CLIPS):
        for maxima, alpha in clips:
            qk_clip(optimizer, _logits(maxima, rank), layers=OF_WEIGHTS, alpha=alpha)
        for name, grad in build(_full(dtype, seed=100 + 10 * number)).items():
            params[name].grad = grad
        if number == len(CLIPS) - 1 and layout in ("fsdp2", "tp"):
            grad, params["few_k"].grad = params["few_k"].grad, None
            params["few_k"].grad = None if rank == 1 else grad
            with pytest.raises(ValueError, match=r"few_k.* no gradient"):
                optimizer.step()
            params["few_k"].grad = grad
        audited = audit(optimizer)
        optimizer.step()
        assert list(audited.report.findings) == []
    weights, *norms = _by_hand(dist.get_world_size(), variant, dtype)
    wanted = case.build(weights, case.mesh(dist.get_world_size()))
    assert_bitwise({n: _local(p) for n, p in params.items()}, {n: _local(wanted[n]) for n in params})
    keys = [key for key in WEIGHT_NORMS if key in optimizer.state[params["qkv"]]]
    for key, of_key in zip(keys, norms, strict=True):
        kept = {n: optimizer.state[p][key] for n, p in params.items()}
        assert_bitwise({n: engine_of(t).storage(t) for n, t in kept.items()}, {n: of_key[n] for n in kept})


@pytest.mark.parametrize(
    ("world", "layout", "variant", "dtype"),
    [
        (3, "fsdp2", "hyperball", torch.bfloat16),
        (3, "tp", "normuon+hyperball", torch.float64),
        (4, "ddp", "normuon+hyperball", torch.float32),
        (4, "hsdp", "hyperball", torch.bfloat16),
        (4, "fsdp2+tp", "muon_eq+hyperball", torch.float32),
        (4, "mcore buffers+tp", "hyperball", torch.float32),  # no rank's tensor has the whole weight's shape
        (4, "tp stride 2", "hyperball", torch.bfloat16),  # and some have none of its rows
    ],
)
def test_norms_of_clipped_matrices_are_measured_again_and_no_others(
    world: int, layout: str, variant: str, dtype: torch.dtype
) -> None:
    """A weight of several matrices was measured as a whole: R of v, which no clip changes, took over what bf16 weights
    are rounded by."""
    get_pool(world).run(_stepped, layout, variant, dtype)
