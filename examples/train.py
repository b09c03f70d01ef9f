"""Train a small Llama-style language model with Muon in one of seven layouts, and verify its last update.

One process:  python examples/train.py
Four ranks:   torchrun --nproc-per-node 4 examples/train.py --layout fsdp2+tp --compare --out demo-out

The text is the source code of Python's standard library, as bytes, so nothing is downloaded. See docs/demo.md. `--out`
plots the losses with matplotlib (pip install 'shardmuon[demo]'). Every field of the class Config is also an option.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import sysconfig
import time
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardmuon import Muon, param_groups

VOCAB = 256  # a token is a byte
# Mesh axes, outermost first, and the number of ranks along each axis. -1 stands for all remaining ranks.
LAYOUTS = {
    "single": {},
    "ddp": {"replicate": -1},
    "fsdp2": {"shard": -1},
    "hsdp": {"replicate": 2, "shard": -1},
    "tp": {"tp": -1},
    "fsdp2+tp": {"shard": -1, "tp": 2},
    "hsdp+tp": {"replicate": 2, "shard": -1, "tp": 2},
}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and settings of the training. Each field is also a command-line option."""

    dim: int = 224
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2  # several query heads share each key-value head
    hidden: int = 640
    seq_len: int = 128
    batch: int = 16  # sequences per step on all ranks together
    steps: int = 130  # at least 3, because the first and last steps are not timed
    lr: float = 2e-2  # learning rate of Muon, and of the AdamW inside it
    adamw_lr: float = 4e-3  # learning rate of torch.optim.AdamW, the baseline of --compare
    weight_decay: float = 0.1
    warmup: int = 30  # steps of linear warm-up, before a cosine decay to a tenth
    eval_every: int = 26  # steps from one evaluation to the next
    eval_batches: int = 4
    seed: int = 0


def read_text() -> list[np.ndarray]:
    """Training bytes and held-out bytes. One file in twenty is held out, chosen by a hash of its path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if left_out.isdisjoint(name.split("/")):
            held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 20 == 0
            sides[held_out].append((root / name).read_bytes())
    return [np.frombuffer(b"\n".join(side), np.uint8) for side in sides]


def train_rows(text: np.ndarray, config: Config, step: int) -> Tensor:
    """The global batch of a step, (batch, seq_len + 1) int64: random windows of the text."""
    starts = np.random.default_rng([config.seed, step]).integers(0, text.size - config.seq_len, config.batch)
    return windows(text, starts, config)


def held_out_rows(text: np.ndarray, config: Config) -> Tensor:
    """All held-out batches, (eval_batches, batch, seq_len + 1) int64: windows spread evenly over the text."""
    starts = np.linspace(0, text.size - config.seq_len - 1, config.eval_batches * config.batch).astype(np.int64)
    return windows(text, starts, config).unflatten(0, (config.eval_batches, config.batch))


def windows(text: np.ndarray, starts: np.ndarray, config: Config) -> Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(config.seq_len + 1)].astype(np.int64))


class Attention(nn.Module):
    """Causal attention with rotary position embeddings."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:  # (B, T, D), (T, head_dim / 2)
        # -1, because under tensor parallelism the projections return only this rank's heads
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(rotate(q, angle), rotate(k, angle), v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, angle: Tensor) -> Tensor:  # (B, H, T, head_dim), (T, head_dim / 2)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class SwiGLU(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angle)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Language model from token ids (B, T) to logits (B, T, VOCAB). The initial weights depend only on the config."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, VOCAB, bias=False)
        head_dim = config.dim // config.heads
        frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(config.seq_len).float(), frequency)
        self.register_buffer("angle", angle, persistent=False)
        generator = torch.Generator().manual_seed(config.seed)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                std = 1.0 if name.startswith("embed") else 0.0 if name.startswith("head") else p.shape[-1] ** -0.5
                if name.endswith(("wo.weight", "down.weight")):  # layers that add to the residual stream
                    std /= math.sqrt(2 * config.layers)
                p.data = torch.randn(p.shape, generator=generator) * std

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.angle[: tokens.shape[1]])
        return self.head(self.norm(x))


# Convert inputs to DTensors once per module, so that the gradients of q, k and v (or gate and up) need one all-reduce.
BLOCK_PLAN = {
    "attention": PrepareModuleInput(input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
ENDS_PLAN = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}


def parallelize(model: Model, mesh: DeviceMesh | None) -> nn.Module:
    """Distribute a model over the axes of the mesh, tensor parallelism first. All ranks must pass equal models."""
    axes = mesh.mesh_dim_names if mesh else ()
    if "tp" in axes:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], BLOCK_PLAN)
        parallelize_module(model, mesh["tp"], ENDS_PLAN)
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if data_axes == ("replicate",):
        return DistributedDataParallel(model)
    if data_axes:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh[data_axes])
    return model


def build_muon(model: nn.Module, lr: float, weight_decay: float) -> Muon:
    """Muon for the matrices, AdamW for the rest. Muon's updates are scaled so that both use one learning rate."""
    # DTensors contain their mesh, but DDP's replicas share the work only if they get a process group.
    group = dist.group.WORLD if isinstance(model, DistributedDataParallel) else None
    groups = param_groups(model, lr=lr, adamw_lr=lr, weight_decay=weight_decay)
    return Muon(groups, lr=lr, adjust_lr_fn="match_rms_adamw", process_group=group)


def build_adamw(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW for every parameter. Vectors have no weight decay."""
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay}
    vectors = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, vectors], lr=lr, betas=(0.9, 0.95), foreach=False)


def lr_factor(step: int, config: Config) -> float:
    """The factor on the learning rate at a step: linear warm-up, then a cosine decay to a tenth."""
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return (step + 1) / config.warmup if done < 0 else 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))


def whole(x: Tensor) -> Tensor:
    """A copy of the full tensor, gathered from all ranks if it is sharded. Collective."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def proven_step(optimizer: Muon, dense: Model, weight_decay: float) -> dict[str, Any]:
    """Take a step, and the same step on whole matrices in `dense`. Return a dict with the largest difference between
    the new weights, relative to the update, and with flags for bitwise equality with `dense` and between ranks.
    Collective."""
    reference = build_muon(dense, optimizer.param_groups[0]["lr"], weight_decay)
    pairs = []
    for group in (group for group in optimizer.param_groups if group["use_muon"]):
        for name, p in zip(group["param_names"], group["params"], strict=True):
            q = dense.get_parameter(name.removeprefix("module."))
            q.data, q.grad = whole(p), whole(p.grad)
            reference.state[q]["momentum_buffer"] = whole(optimizer.state[p]["momentum_buffer"])
            pairs.append((p, q, whole(p)))
    optimizer.step()
    reference.step()
    digest, gaps, equal = hashlib.sha256(), [], True
    for p, q, before in pairs:
        found, expected = whole(p), q.detach()
        digest.update(found.cpu().numpy().tobytes())
        equal &= torch.equal(found, expected)
        # relative to the update: at a small learning rate, even a wrong update hardly changes the weight
        gaps.append((found.double() - expected).norm() / (before.double() - expected).norm())
    seen = [(equal, digest.hexdigest())]
    if dist.is_initialized():
        seen = seen * dist.get_world_size()
        dist.all_gather_object(seen, (equal, digest.hexdigest()))
    return {
        "matrices": len(pairs),
        "largest_difference": float(torch.stack(gaps).max()),
        "bitwise_equal": all(equal for equal, _ in seen),
        "replicas_equal": len({digest for _, digest in seen}) == 1,
    }


def now() -> float:
    """Current time in seconds, after the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy of rows (B, seq_len + 1), in nats per byte."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """Average the loss of each batch over all ranks. Collective."""
    means = torch.stack(losses).detach()
    if dist.is_initialized():
        dist.all_reduce(means)
        means /= dist.get_world_size()
    return means.tolist()


def train(config: Config, name: str, text: list[np.ndarray], mesh: DeviceMesh | None, device: str) -> dict[str, Any]:
    """Train a new model with the optimizer "muon" or "adamw". Return a dict with the losses, the speed, the size of the
    optimizer state and, for "muon", the verification of the last step. Collective."""
    train_text, held_out_text = text
    build, lr = (build_muon, config.lr) if name == "muon" else (build_adamw, config.adamw_lr)
    model = parallelize(Model(config).to(device), mesh)
    optimizer = build(model, lr, config.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, config))
    tp = mesh["tp"].size() if mesh and "tp" in mesh.mesh_dim_names else 1
    reader, readers = (dist.get_rank() // tp, dist.get_world_size() // tp) if mesh else (0, 1)

    def loss(rows: Tensor) -> Tensor:  # ranks along tp, the innermost axis, read the same rows
        return loss_of(model, rows.unflatten(0, (readers, -1))[reader].to(device))

    run: dict[str, Any] = {"optimizer": name, "lr": lr, "train_loss": [], "held_out": []}
    losses, step_seconds, optimizer_seconds = [], [], []
    for step in range(1, config.steps + 1):
        began = now()
        losses.append(loss(train_rows(train_text, config, step - 1)))
        losses[-1].backward()
        stepping = now()
        if step == config.steps and name == "muon":
            run["proof"] = proven_step(optimizer, Model(config).to(device), config.weight_decay)
        else:
            optimizer.step()
        optimizer_seconds.append(now() - stepping)
        step_seconds.append(now() - began)
        optimizer.zero_grad()
        schedule.step()
        if step % config.eval_every == 0 or step == config.steps:
            with torch.no_grad():
                found = mean_over_ranks([loss(rows) for rows in held_out_rows(held_out_text, config)])
            run["held_out"].append((step, float(np.mean(found))))
        if step % 10 == 0 or step == config.steps:
            run["train_loss"] += mean_over_ranks(losses)
            losses.clear()
            say(f"{name:5} step {step:4}/{config.steps}  loss {run['train_loss'][-1]:.2f}")
    # Leave out the first step, which includes planning, and the last one, which is verified.
    seconds = float(np.mean(step_seconds[1:-1]))
    stored = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
    return run | {
        "bytes_per_second": config.batch * config.seq_len / seconds,
        "optimizer_share": float(np.mean(optimizer_seconds[1:-1])) / seconds,
        "state_bytes": sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in stored),
    }


def draw(runs: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot training losses and their moving averages as lines, and held-out losses as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), dpi=150, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="cross entropy (nats per byte)")
    for run, color in zip(runs, ("#0b6e4f", "#c8553d"), strict=False):
        steps = np.arange(1, len(run["train_loss"]) + 1)
        weights = 0.6 ** np.abs(steps[:, None] - steps)  # a symmetric window, so that the line does not lag
        axes.plot(steps, run["train_loss"], color=color, alpha=0.18, linewidth=0.8)
        smoothed = weights @ run["train_loss"] / weights.sum(1)
        axes.plot(steps, smoothed, color=color, linewidth=2.0, label=f"{run['optimizer']}, train (smoothed)")
        label = f"{run['optimizer']}, held out: {run['held_out'][-1][1]:.3f} at the end"
        axes.plot(*zip(*run["held_out"], strict=True), "o", color=color, markeredgecolor="white", label=label)
    losses = [loss for run in runs for loss in run["train_loss"]]
    axes.set_ylim(0.95 * min(losses), 1.02 * np.quantile(losses, 0.95))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    """Train with the options of the command line; return 1 if the last update is wrong, and 0 otherwise."""
    # FSDP2 warns that outputs must not be modified in place. This script modifies none.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    # Hide the warning that DTensors sharded over two mesh dims are gathered in two steps.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="single", help="how weights are cut (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="train again with torch.optim.AdamW")
    parser.add_argument("--out", type=Path, help="folder for run.json and loss.png")
    for option in fields(Config):
        flag = f"--{option.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(option.default), default=option.default, help="(%(default)s)")
    args = parser.parse_args()
    config = Config(**{option.name: getattr(args, option.name) for option in fields(Config)})

    device = "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "cpu"
    axes, ranks = LAYOUTS[args.layout], np.arange(int(os.environ.get("WORLD_SIZE", "1")))
    sizes = ranks.reshape(tuple(axes.values())).shape  # raises if the number of ranks does not fit the layout
    mesh = init_device_mesh(device, sizes, mesh_dim_names=tuple(axes)) if axes else None
    text = read_text()
    where = f"layout {args.layout} ({' x '.join(map('{} {}'.format, axes, sizes)) or 'one process'}), {device}"
    say(f"{where}; train on {text[0].size:,} bytes, {text[1].size:,} held out")
    runs = [train(config, name, text, mesh, device) for name in ("muon", "adamw")[: 1 + args.compare]]
    for run in runs:
        say(
            f"{run['optimizer']:5} lr {run['lr']:g}  train loss {np.mean(run['train_loss'][-13:]):.4f}  "
            f"held out {run['held_out'][-1][1]:.4f}  {run['bytes_per_second']:,.0f} bytes/s  "
            f"optimizer {run['optimizer_share']:.1%}  state {run['state_bytes']:,} bytes a rank"
        )
    proof = runs[0]["proof"]
    passed = proof["bitwise_equal"] and proof["replicas_equal"]
    facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in proof.items())
    say(f"the sharded update is {'' if passed else 'NOT '}the dense one: {facts}")
    if args.out and (mesh is None or dist.get_rank() == 0):
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "run.json").write_text(json.dumps({"config": asdict(config), "runs": runs}, indent=1))
        draw(runs, f"Byte language model on the Python standard library\n{where}", args.out / "loss.png")
    if mesh is not None:
        dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
