"""Tests that QK-clip needs no device synchronization and few kernel launches, on a simulated GPU."""

from __future__ import annotations

import torch
from cuda_shape import CUDA, CudaShape
from test_qk_clip import Llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardmuon import Muon
from shardmuon_qkclip import QKClip
from shardmuon_qkclip.layers import Attention, Rows
from shardmuon_qkclip.scaling import Scaler

HEADS, SIZE, DIM, LAYERS = 8, 16, 128, 6


def test_scaling_by_given_maxima_waits_for_nothing() -> None:
    layers = [
        Attention(str(i), HEADS, HEADS, (Rows(f"q{i}", (("q", DIM),)), Rows(f"k{i}", (("k", DIM),))))
        for i in range(LAYERS)
    ]
    with CudaShape(ranks=8, values=False) as mode:
        local, mesh = torch.empty(DIM // 8, DIM, device=CUDA), init_device_mesh("cuda", (8,))
        params = [
            (f"{name}{i}", nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))
            for i in range(LAYERS)
            for name in "qk"
        ]
        optimizer = Muon([{"params": params}], lr=1e-3)
        maxima = {layer.name: torch.empty(HEADS, device=CUDA) for layer in layers}
        scaler = Scaler(optimizer, layers)
        for _ in range(2):
            mode.clear()
            scaler.reduce(lambda: maxima)
            scaler.apply_()
        assert mode.waits == mode.uploads == []
        # Kernel launches for each layer: 1 to create the vector of maxima, 1 for the maximum of each head group, 10 for
        # the scaling rule, and 5 for the factors. Additional launches for each of q and k: 2 to expand the factors to
        # rows, and 1 to multiply the weight.
        assert mode.launches.total() <= LAYERS * (1 + 1 + 10 + 5 + 3 * 2) + 2


def test_measuring_and_stepping_wait_for_nothing() -> None:
    with CudaShape(values=False) as mode:
        with torch.device(CUDA):
            model = Llama(DIM, HEADS, HEADS, SIZE)
        optimizer = Muon(model, lr=0.02, method="standard")
        clip = QKClip(model, optimizer)
        for _ in range(3):
            mode.clear()
            model(torch.empty(2, 32, DIM, device=CUDA))
            for p in model.parameters():
                p.grad = torch.empty_like(p)
            optimizer.step()
        assert mode.waits == mode.uploads == []
        clip.close()
