"""Train a small language model with Megatron-FSDP and shardmuon, then compare the last update with an unsharded one.

Needs a CUDA GPU for each rank and `pip install shardmuon[megatron]`:

    torchrun --nproc-per-node 8 examples/megatron_fsdp_training.py --strategy optim_grads_params --hybrid shard

Every rank trains on its own batches of an artificial language (the next token is a fixed function of the last two). To
compare the last step, the script gathers whole weights and gradients, takes the step with whole matrices, and prints
whether the resulting weights are bitwise equal.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardmuon import Muon

VOCABULARY, LENGTH = 256, 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        q, k, v = (t.unflatten(-1, (-1, 32)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, VOCABULARY)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(generator: torch.Generator, device: torch.device) -> Tensor:  # (32, LENGTH + 1)
    columns = [torch.randint(VOCABULARY, (32,), generator=generator) for _ in range(2)]
    for _ in range(LENGTH - 1):
        columns.append((5 * columns[-1] + 3 * columns[-2] + 1) % VOCABULARY)
    return torch.stack(columns, 1).to(device)


def wrap(model: nn.Module, strategy: str, hybrid: str, device: torch.device) -> nn.Module:
    world = dist.get_world_size()
    options: dict[str, object] = {}
    if hybrid == "none":
        mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=("dp", "tp"))
    else:
        mesh = init_device_mesh(device.type, (2, world // 2, 1), mesh_dim_names=("dp_outer", "dp", "tp"))
        options = {"dp_outer_dim": "dp_outer", "hybrid_fsdp_group": dist.group.WORLD}
        options["outer_dp_sharding_strategy"] = "optim" if hybrid == "shard" else "no_shard"
    return fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        device=device,
        calculate_per_token_loss=True,  # sums gradients over ranks; `train` divides the loss by the number of ranks
        **options,
    )


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather whole tensors with Megatron-FSDP's function, because `full_tensor()` does not support uneven shards."""
    return {
        name: uneven_dtensor_to_full_tensor(t.detach()).clone()
        if any(p.is_shard() for p in t.placements)
        else t.to_local().clone()
        for name, t in tensors.items()
    }


def is_equal_to_one_process(model: nn.Module, optimizer: Muon, routing: dict[str, object]) -> bool:
    """Take the same step on the shards and on whole tensors; return True if the new weights are bitwise equal."""
    params = dict(model.named_parameters())
    # A rank that stores no rows of a parameter has no gradient for it, but must still take part in gathering it.
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
    before, full = whole(params), whole(grads)
    momentum = whole(
        {n: optimizer.state[p]["momentum_buffer"] for n, p in params.items() if "momentum_buffer" in optimizer.state[p]}
    )
    optimizer.step()
    after = whole(params)
    dense = {n: nn.Parameter(before[n]) for n in momentum}
    reference = Muon(list(dense.items()), **routing)
    for name, p in dense.items():
        p.grad = full[name]
        reference.state[p]["momentum_buffer"] = momentum[name]
    reference.step()
    return all(torch.equal(after[n], p) for n, p in dense.items())


def train(device: torch.device, strategy: str, hybrid: str, steps: int, width: int, layers: int) -> bool:
    """Train for `steps` steps, then take one more; return True if this step is bitwise equal to an unsharded step."""
    torch.manual_seed(0)
    model = wrap(Model(width, layers), strategy, hybrid, device)
    routing = {"lr": 0.02, "weight_decay": 0.01}
    optimizer = Muon(model, adamw_lr=1e-3, **routing)
    fully_shard_optimizer(optimizer)  # creates the optimizer state and leaves the weights unchanged
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(steps + 1):
        tokens = batch(generator, device)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / dist.get_world_size()).backward()
        model.finish_grad_sync()
        if step < steps:
            optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    return is_equal_to_one_process(model, optimizer, routing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--strategy", default="optim_grads_params")
    parser.add_argument("--hybrid", choices=("none", "replicate", "shard"), default="none")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("Megatron-FSDP keeps its buffers and streams on CUDA devices: run this where every rank has a GPU")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    equal = train(device, **vars(args))
    if dist.get_rank() == 0:
        print(f"the last update has {'the same' if equal else 'OTHER'} bits as that of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
