"""QK-clip between steps of norm control, attacked: what was clipped is measured again, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_qk_clip_layouts import _local, _normal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

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
SAVED_AFTER: Clip = (4, 0.5)


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


def _by_hand(
    world: int, variant: str, dtype: torch.dtype, clips: Sequence[Sequence[Clip]] = CLIPS
) -> list[dict[str, Tensor]]:
    """Weights, and each of the norms that are kept, by name. The norms of what a clip has changed are deleted."""
    params = {name: nn.Parameter(t) for name, t in _full(dtype).items()}
    optimizer = _muon(params, variant)
    other = torch.optim.SGD(list(params.items()), lr=0.0)  # keeps no norms
    for number, before in enumerate(clips):
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


class _Job:
    """The weights on a layout, in a module, and their optimizer."""

    def __init__(self, layout: str, variant: str, dtype: torch.dtype) -> None:
        self.case, self.dtype, self.world = LAYOUTS[layout], dtype, dist.get_world_size()
        self.params = parameters(self.build(_fused(_full(dtype), 0)))
        self.optimizer = _muon(self.params, variant, **self.case.options(self.world))
        self.model = nn.Module()
        for name, p in self.params.items():
            self.model.register_parameter(name, p)

    def build(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.case.build(full, self.case.mesh(self.world))

    def step(self, number: int, clips: Sequence[Clip], refused: bool = False) -> None:
        for maxima, alpha in clips:
            qk_clip(self.optimizer, _logits(maxima, dist.get_rank()), layers=OF_WEIGHTS, alpha=alpha)
        for name, grad in self.build(_fused(_full(self.dtype, seed=100 + 10 * number), 0)).items():
            self.params[name].grad = grad
        if refused:
            grad = self.params["few_k"].grad
            self.params["few_k"].grad = None if dist.get_rank() == 1 else grad
            with pytest.raises(ValueError, match=r"few_k.* no gradient"):
                self.optimizer.step()
            self.params["few_k"].grad = grad
        audited = audit(self.optimizer)
        self.optimizer.step()
        assert list(audited.report.findings) == []

    def check(self, weights: dict[str, Tensor], *norms: dict[str, Tensor]) -> None:
        wanted = self.build(weights)
        assert_bitwise({n: _local(p) for n, p in self.params.items()}, {n: _local(wanted[n]) for n in self.params})
        keys = [key for key in WEIGHT_NORMS if key in self.optimizer.state[self.params["qkv"]]]
        for key, of_key in zip(keys, norms, strict=True):
            kept = {n: self.optimizer.state[p][key] for n, p in self.params.items()}
            assert_bitwise({n: engine_of(t).storage(t) for n, t in kept.items()}, {n: of_key[n] for n in kept})

    def saved(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": get_optimizer_state_dict(self.model, self.optimizer)}


def _stepped(layout: str, variant: str, dtype: torch.dtype, folder: str) -> None:
    """Clipped before the first step, at one end of alpha and the other, twice between steps, before a step that is
    refused by all ranks for what one has; the clip stands. Saved right after a clip, where nothing was measured yet."""
    job = _Job(layout, variant, dtype)
    for number, clips in enumerate(CLIPS):
        job.step(number, clips, refused=number == len(CLIPS) - 1 and layout in ("fsdp2", "tp"))
    job.check(*_by_hand(job.world, variant, dtype))
    if folder:
        maxima, alpha = SAVED_AFTER
        qk_clip(job.optimizer, _logits(maxima, dist.get_rank()), layers=OF_WEIGHTS, alpha=alpha)
        dcp.save(job.saved(), checkpoint_id=folder)


def _resumed(world: int, variant: str, dtype: torch.dtype, folder: str) -> None:
    """On other ranks, where another run's norms are kept."""
    job = _Job("fsdp2", variant, dtype)
    job.step(0, CLIPS[0])
    state = job.saved()
    dcp.load(state, checkpoint_id=folder)
    job.model.load_state_dict(state["model"])
    set_optimizer_state_dict(job.model, job.optimizer, state["optim"])
    job.step(len(CLIPS), [])
    job.check(*_by_hand(world, variant, dtype, [*CLIPS, [SAVED_AFTER]]))


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
    world: int, layout: str, variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A weight of several matrices was measured as a whole: R of v, which no clip changes, took over what bf16 weights
    are rounded by."""
    folder = str(tmp_path) if world == 3 else ""
    get_pool(world).run(_stepped, layout, variant, dtype, folder)
    if folder:
        get_pool(2).run(_resumed, world, variant, dtype, folder)
