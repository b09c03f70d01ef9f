"""Train on this rank: the same loop for every layout and both optimizers.

A layout changes three things only: what `parallelize` (or DeepSpeed) does to the model, which rows of the global batch
this rank reads, and over which ranks losses are averaged.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardmuon.demo.config import OptimizerName, TrainConfig
from shardmuon.demo.data import Batches, Corpus, read_corpus
from shardmuon.demo.engines import TorchEngine, ZeroEngine
from shardmuon.demo.layouts import make_mesh, parallelize, reader
from shardmuon.demo.mesh import num_readers
from shardmuon.demo.model import Model
from shardmuon.demo.optimizers import build_adamw, build_muon, local_state_bytes, muon_options
from shardmuon.demo.proof import StepRecorder
from shardmuon.demo.report import Reporter
from shardmuon.demo.result import RunResult

__all__ = ["run_rank", "train"]

_LOSSES_EVERY = 10  # steps between two averagings of the training loss over ranks: one small all-reduce


def run_rank(config: TrainConfig, device_type: str) -> int:
    """The whole demo on one rank, in the process group there is or in the one torchrun describes.

    Returns:
        The exit status: 1 when the last step's proof failed, the same on every rank.
    """
    silence_known_warnings()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.num_ranks))
    torch.set_num_threads(max(1, num_cores() // local_ranks))
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    joins = config.num_ranks > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = make_mesh(device.type, config.mesh)
    reporter = Reporter(config, is_chief=mesh is None or dist.get_rank() == 0)
    corpus = share_corpus(device)
    reporter.begin(str(corpus), device)
    results = []
    for name in config.optimizers:
        results.append(train(config, name, corpus, mesh, device, reporter))
        gc.collect()  # the last run's model, before the next one is built
    reporter.finish(results)
    if joins:
        dist.barrier()  # rank 0 draws the figure while the others wait, then all leave together
        dist.destroy_process_group()
    return int(any(result.proof is not None and not result.proof.passed for result in results))


def train(
    config: TrainConfig,
    name: OptimizerName,
    corpus: Corpus,
    mesh: DeviceMesh | None,
    device: torch.device,
    reporter: Reporter,
) -> RunResult:
    """Train a fresh model with one optimizer. Collective."""
    began = time.perf_counter()
    part, parts = reader(mesh), num_readers(config.mesh)
    data, held_out = (
        Batches(side, config.seq_len, config.batch, part, parts) for side in (corpus.train, corpus.held_out)
    )
    model = build_model(config, mesh, device)
    optimizer, recorder = build_optimizer(config, name, model, device, reporter)
    engine: TorchEngine = TorchEngine(model, optimizer)
    if config.engine == "deepspeed":
        engine = ZeroEngine(model, optimizer, config, device.type)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(config))
    result = RunResult(name, config.learning_rate(name))
    losses: list[Tensor] = []
    with reporter.progress(name) as progress:
        for step in range(config.steps):
            proving = recorder if step == config.steps - 1 else None
            clock = Clock(device)
            loss = loss_of(engine.model, data.train(config.seed, step), device)
            engine.backward(loss)
            gradient_seconds = clock.seconds()
            if proving is not None:
                proving.before(engine)
            clock = Clock(device)
            engine.step()
            result.optimizer_seconds.append(clock.seconds())
            result.step_seconds.append(gradient_seconds + result.optimizer_seconds[-1])
            if proving is not None:
                result.proof = proving.check(engine, config.layout)
            engine.zero_grad()
            schedule.step()
            losses.append(loss.detach())
            if len(losses) == _LOSSES_EVERY or step == config.steps - 1:
                result.train_loss += mean_over_ranks(torch.stack(losses)).tolist()
                losses.clear()
            if (step + 1) % config.eval_every == 0 or step == config.steps - 1:
                result.held_out.append((step + 1, evaluate(engine.model, held_out, config.eval_batches, device)))
            progress.update(step + 1, result)
    result.state_bytes = max_over_ranks(local_state_bytes(optimizer), device)
    engine.close()
    result.seconds = time.perf_counter() - began
    return result


def build_model(config: TrainConfig, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
    """The model with the weights of `config.seed`, cut along `mesh`. Collective."""
    model = Model(config.model, config.seq_len)
    model.initialize_(config.seed)
    model.to(device)
    return model if config.engine == "deepspeed" else parallelize(model, mesh)


def build_optimizer(
    config: TrainConfig, name: OptimizerName, model: nn.Module, device: torch.device, reporter: Reporter
) -> tuple[torch.optim.Optimizer, StepRecorder | None]:
    """The optimizer, and for Muon what proves its last step."""
    if name == "adamw":
        return build_adamw(model, config.adamw_lr, config.weight_decay), None
    options = muon_options()
    whole = config.engine == "deepspeed" and config.zero == 0
    optimizer, routing = build_muon(model, config.lr, config.weight_decay, options, replicated=whole)
    if config.show_routing:
        reporter.say(routing)
    return optimizer, StepRecorder(model, optimizer, options)


def lr_factor(config: TrainConfig) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to `final_lr_fraction`."""

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        done = (step - config.warmup) / max(1, config.steps - config.warmup)
        low = config.final_lr_fraction
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    return factor


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Mean cross entropy of this rank's rows, nats per byte."""
    inputs, targets = (side.to(device) for side in batch)
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, data: Batches, num_batches: int, device: torch.device) -> float:
    """Mean held-out loss. Collective."""
    losses = [loss_of(model, batch, device) for batch in data.held_out(num_batches)]
    return float(mean_over_ranks(torch.stack(losses)).mean())


def mean_over_ranks(
    x: Tensor,  # this rank's means over its part of each batch
) -> Tensor:
    """Means over the global batches: parts are equal, and tensor-parallel ranks repeat theirs equally often."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def max_over_ranks(value: int, device: torch.device) -> int:
    x = torch.tensor(value, device=device)
    if dist.is_initialized():
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return int(x)


def share_corpus(device: torch.device) -> Corpus:
    """Rank 0 reads the text and sends it: reading 700 files takes longer than a broadcast of 12 MB, and ranks on
    machines with other Pythons train on the same bytes. Collective."""
    if not dist.is_initialized():
        return read_corpus()
    mine: list[Corpus | None] = [read_corpus() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(mine, src=0, device=device)
    assert mine[0] is not None
    return mine[0]


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Clock:
    """Seconds since it was made, with the device's queued work done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()

    def seconds(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._start


def silence_known_warnings() -> None:
    """Hide what torch says about its own calls where they are used as intended."""
    known = (
        "`broadcast_buffers` is deprecated",  # 2.13; the new name does not exist in 2.12
        r"FSDP2-wrapped module \(FSDP\w+\) returned a view tensor",  # nothing here changes an output in place
    )
    for message in known:
        warnings.filterwarnings("ignore", message=message)
    # gathers in two hops are what a weight cut twice along one dim needs
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
        lambda record: not record.getMessage().startswith("While redistributing from")
    )
