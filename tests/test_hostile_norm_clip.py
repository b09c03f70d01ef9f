"""QK-clip between steps of norm control, attacked: what was clipped is measured again, and nothing else."""

from __future__ import annotations

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
from shardmuon.testing.pool import RankPool
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
BEFORE: list[list[Clip]] = [[(0, 0.5)], [(1, 1.0)], [(2, 0.0), (3, 0.5)]]  # clips before each step
AFTER: list[list[Clip]] = [[], [(4, 0.5)]]


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


def _by_hand(world: int, variant: str, dtype: torch.dtype, clips: list[list[Clip]]) -> list[dict[str, Tensor]]:
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
    def __init__(self, layout: str, variant: str, dtype: torch.dtype) -> None:
        self.world, self.case = dist.get_world_size(), LAYOUTS[layout]
        self.dtype = dtype
        self.params = parameters(self.build(_fused(_full(dtype), 0)))
        self.optimizer = _muon(self.params, variant, **self.case.options(self.world))
        self.findings: list[str] = []

    def build(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.case.build(full, self.case.mesh(self.world))

    def run(self, steps: range, maxima_of: tuple[int, ...], refused: bool = False) -> None:
        for number in steps:
            for maxima, alpha in (BEFORE + AFTER)[number]:
                each = [_logits(maxima, rank) for rank in maxima_of]
                mine = {x.name: torch.stack([theirs[x.name] for theirs in each]).amax(0) for x in OF_WEIGHTS}
                qk_clip(self.optimizer, mine, layers=OF_WEIGHTS, alpha=alpha)
            for name, grad in self.build(_fused(_full(self.dtype, seed=100 + 10 * number), 0)).items():
                self.params[name].grad = grad
            if refused:  # by all ranks, for what one has; the clip stands
                grad, self.params["few_k"].grad = self.params["few_k"].grad, None
                self.params["few_k"].grad = None if dist.get_rank() == 1 else grad
                with pytest.raises(ValueError, match=r"few_k.* no gradient"):
                    self.optimizer.step()
                self.params["few_k"].grad = grad
            audited = audit(self.optimizer)
            self.optimizer.step()
            self.findings += map(str, audited.report.findings)

    def differences(self, wanted: list[dict[str, Tensor]]) -> list[str]:
        full = self.build(wanted[0])
        found = [n for n, p in self.params.items() if not torch.equal(_local(p), _local(full[n]))]
        keys = [key for key in WEIGHT_NORMS if key in self.optimizer.state[self.params["qkv"]]]
        for key, norms in zip(keys, wanted[1:], strict=True):
            for name, p in self.params.items():
                kept = self.optimizer.state[p][key]
                if not torch.equal(engine_of(kept).storage(kept), norms[name]):
                    found.append(f"{key} of {name}")
        return found + self.findings


def _saved(layout: str, variant: str, dtype: torch.dtype, folder: str) -> list[str]:
    """Clipped before the first step, at one end of alpha and the other, twice between steps, before a step that is
    refused; saved right after a clip, at whose end nothing was measured yet."""
    job = _Job(layout, variant, dtype)
    ranks = (dist.get_rank(),)
    job.run(range(2), ranks)
    job.run(range(2, 3), ranks, refused=True)
    found = job.differences(_by_hand(job.world, variant, dtype, BEFORE))
    for number, alpha in AFTER[1]:
        qk_clip(job.optimizer, _logits(number, dist.get_rank()), layers=OF_WEIGHTS, alpha=alpha)
    model = _module(job)
    dcp.save(
        {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, job.optimizer)}, checkpoint_id=folder
    )
    return found


def _resumed(layout: str, variant: str, dtype: torch.dtype, folder: str, world: int) -> list[str]:
    job = _Job(layout, variant, dtype)
    job.run(range(1), (dist.get_rank(),))  # another run's norms are here
    model = _module(job)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, job.optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, job.optimizer, state["optim"])
    job.run(range(3, 4), (0,))
    return job.differences(_by_hand(world, variant, dtype, [*BEFORE, AFTER[1]]))


def _module(job: _Job) -> nn.Module:
    model = nn.Module()
    for name, p in job.params.items():
        model.register_parameter(name, p)
    return model


@pytest.mark.parametrize(
    ("layout", "variant", "dtype"),
    [
        ("fsdp2", "hyperball", torch.bfloat16),
        ("tp", "normuon+hyperball", torch.float64),
    ],
)
def test_matrices_that_were_not_clipped_keep_their_norms(
    layout: str, variant: str, dtype: torch.dtype, world3: RankPool, world2: RankPool, tmp_path: Any
) -> None:
    """A weight of several matrices was measured as a whole: R of v, which no clip changes, took over what bf16 weights
    are rounded by."""
    folder = str(tmp_path)
    assert world3.run(_saved, layout, variant, dtype, folder) == [[]] * 3
    assert world2.run(_resumed, "fsdp2", variant, dtype, folder, 3) == [[]] * 2


def _stepped(layout: str, dtype: torch.dtype) -> list[str]:
    job = _Job(layout, "hyperball", dtype)
    job.run(range(3), (dist.get_rank(),))
    return job.differences(_by_hand(job.world, "hyperball", dtype, BEFORE))


@pytest.mark.parametrize(("layout", "dtype"), [("mcore buffers+tp", torch.float32), ("tp stride 2", torch.bfloat16)])
def test_plain_shards_measure_the_same_matrices(layout: str, dtype: torch.dtype, world4: RankPool) -> None:
    """No rank's tensor has the whole weight's shape, and some have none of its rows."""
    assert world4.run(_stepped, layout, dtype) == [[]] * 4
