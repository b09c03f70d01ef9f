"""QK-clip on a device that counts waits, copies and launches: measuring, reducing and scaling wait for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_shape import CUDA, CudaShape, fake_ranks
from mirrored import mirrored_lanes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardmuon import Muon, Orthogonalizer
from shardmuon_qkclip import QKClip
from shardmuon_qkclip.layers import Attention, Rows
from shardmuon_qkclip.scaling import Scaler

HEADS, SIZE, DIM, LAYERS = 8, 16, 128, 6


def _params(world: int) -> dict[str, nn.Parameter]:
    mesh = init_device_mesh("cuda", (world,)) if world > 1 else None

    def one() -> Tensor:
        local = torch.empty(DIM // world, DIM, device=CUDA)
        if mesh is None:
            return local
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((DIM, DIM)), stride=(DIM, 1)
        )

    found = {}
    for i in range(LAYERS):
        for name in "qk":
            found[f"{name}{i}"] = nn.Parameter(one())
            found[f"{name}{i}"].grad = one()
    return found


@pytest.mark.parametrize("world", [1, 8])
def test_scaling_by_given_maxima_waits_for_nothing(world: int) -> None:
    layers = [
        Attention(str(i), HEADS, HEADS, (Rows(f"q{i}", (("q", DIM),)), Rows(f"k{i}", (("k", DIM),))))
        for i in range(LAYERS)
    ]
    with CudaShape(mirror=world > 1, values=False) as mode, fake_ranks(world), mirrored_lanes():
        optimizer = Muon([{"params": list(_params(world).items())}], lr=1e-3)
        maxima = {layer.name: torch.empty(HEADS, device=CUDA) for layer in layers}
        scaler = Scaler(optimizer, layers)
        for _ in range(2):
            mode.clear()
            scaler.reduce(lambda: maxima)
            scaler.apply_()
        assert dict(mode.waits) == {}
        assert dict(mode.uploads) == {}
        # a layer: its vector, largest of each group, the rule (10), the factors (5); of q and of k rows (2), a product
        assert sum(mode.launches.values()) <= LAYERS * (1 + 1 + 10 + 5 + 3 * 2) + 2


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = SIZE
        self.q_proj, self.k_proj = (nn.Linear(DIM, DIM, bias=False, device=CUDA) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (proj(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for proj in (self.q_proj, self.k_proj))
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def test_measuring_and_stepping_wait_for_nothing() -> None:
    with CudaShape(values=False) as mode:
        model = _Attention()
        optimizer = Muon(model, lr=0.02, orthogonalizer=Orthogonalizer(method="standard"))
        clip = QKClip(model, optimizer)
        x = torch.empty(2, 32, DIM, device=CUDA)
        counts: list[dict[Any, int]] = []
        for _ in range(3):
            mode.clear()
            model(x)
            for p in model.parameters():
                p.grad = torch.empty_like(p)
            optimizer.step()
            counts.append({**mode.waits, **mode.uploads})
        assert counts[-1] == {}
        clip.close()
