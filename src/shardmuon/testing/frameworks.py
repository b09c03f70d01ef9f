"""Run FSDP1 and DeepSpeed on this process's ranks, for comparisons. Both use their own forward and backward pass,
gathering and state dicts. DeepSpeed starts without its log and without compiling."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardmuon.frameworks.deepspeed import REQUIRED
from shardmuon.muon import Muon

_Make = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Muon]

FSDP1_ROWS = {  # name -> strategy
    "fsdp1": "FULL_SHARD",
    "fsdp1 zero2": "SHARD_GRAD_OP",
    "fsdp1 hybrid": "HYBRID_SHARD",
    "fsdp1 no shard": "NO_SHARD",
}


class GivenGradients(nn.Module):
    """A module whose loss has given gradients, with an optional inner module as a smaller unit. FSDP1 shows a module
    its own parameters by their names only."""

    def __init__(self, tensors: Mapping[str, Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))
        self.inner = inner

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        own = torch.stack([(getattr(self, name) * grads[name]).sum().float() for name in self.names]).sum()
        return own if self.inner is None else own + self.inner(grads)


class _Inner(GivenGradients):
    """A module that FSDP1 wraps as a unit of its own."""


def wrap(model: nn.Module, strategy: str, **options: Any) -> FullyShardedDataParallel:
    """Wrap a model in FSDP1, each `_Inner` as a unit of its own. Collective.

    HYBRID_SHARD makes two replicas, where the number of ranks allows it.
    """
    world = dist.get_world_size()
    if strategy.startswith("HYBRID") and "process_group" not in options:
        shape = (2, world // 2) if world % 2 == 0 and world > 2 else (1, world)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        options["process_group"] = (mesh.get_group("shards"), mesh.get_group("replicas"))
    options = {"auto_wrap_policy": ModuleWrapPolicy({_Inner}), "use_orig_params": True, **options}
    with quiet():
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            **options,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings: torch's notices about deprecated frameworks, and about what their own code calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def whole_weights(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Copies of all weights, by their names before wrapping. Collective."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
        return {name: p.detach().clone() for name, p in named}


class Run:
    """An optimizer that is stepped with given gradients. Runs in a framework return whole tensors, equal on every rank.

    Gradients are rounded to multiples of 1/8, so that the framework's mean over the ranks is exact.

    Attributes:
        optimizer: The optimizer.
        steps: Dtype in which the framework and the reference step; None: the weights' dtype.
    """

    optimizer: Muon
    steps: torch.dtype | None = None

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reduce whole tensors to the parts that this run returns."""
        return dict(full)

    def start(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Initial weights of the reference."""
        return {name: t.to(self.steps or t.dtype) for name, t in full.items()}

    def gradients(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of a step, rounded, in the dtype that the reference takes."""
        return {name: ((2 * t.float()).round().clamp(-8, 8) / 8).to(self.steps or t.dtype) for name, t in drawn.items()}

    def keeps(self, state: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """True if stages' stored values have the bits of those in `state`. Not checked in frameworks, which may store
        state anywhere: a difference shows in their weights."""
        return True

    def close(self) -> None:
        """Free the framework's memory."""


class Fsdp1Run(Run):
    """An optimizer under FSDP1."""

    def __init__(self, row: str, full: Mapping[str, Tensor], make: _Make) -> None:
        strategy = FSDP1_ROWS[row]
        names = list(full)
        inside = {name: full[name] for name in names[: len(names) // 2]}
        outside = {name: full[name] for name in names[len(names) // 2 :]}
        self._model = wrap(GivenGradients(outside, _Inner(inside) if inside else None), strategy)
        params = {name.rpartition(".")[2]: p for name, p in self._model.named_parameters()}
        options = {"process_group": dist.group.WORLD} if strategy == "NO_SHARD" else {}
        self.optimizer = make({name: params[name] for name in names}, options)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        self._model(grads).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name.removeprefix("inner."): t for name, t in whole_weights(self._model).items()}

    def momentum(self) -> dict[str, Tensor]:
        with quiet():
            found = FullyShardedDataParallel.optim_state_dict(self._model, self.optimizer)["state"]
        return {name.removeprefix("inner."): state["momentum_buffer"] for name, state in found.items()}


# ------------------------------------------------------------------------------------------------------------ DeepSpeed

ZERO_ROWS: dict[str, dict[str, Any]] = {  # name -> "zero_optimization" of DeepSpeed's configuration
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2+offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3+offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def start_deepspeed() -> Any:
    """Import DeepSpeed for the CPU, and start it on a pool rank's process group, compiling nothing. Collective."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with quiet():
        import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    old = r"`torch.distributed.\w+` is deprecated"  # newer torch warns of old names that DeepSpeed calls
    warnings.filterwarnings("ignore", old, FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a faster gloo, which takes minutes to compile
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, auto_mpi_discovery=False)
    return deepspeed


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
    """Make a DeepSpeed engine on a CPU, without DeepSpeed's gradient clipping. Collective.

    Args:
        model: The model.
        optimizer: The optimizer.
        config: DeepSpeed's configuration, without the two settings that a client optimizer needs.
    """
    fixed = {"steps_per_print": 10**9, "gradient_clipping": 0.0, **REQUIRED}
    deepspeed = start_deepspeed()
    with quiet():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**fixed, **config})
    return engine


def whole_weight(param: Tensor) -> Tensor:
    """Copy of a whole fp32 weight, at stages 1 to 3. Collective."""
    return _find("safe_get_full_fp32_param", param)


def whole_momentum(param: Tensor) -> Tensor:
    """Copy of Muon's whole momentum of a parameter, at stages 1 to 3, after the first step. Collective."""
    return _find("safe_get_full_optimizer_state", param, "exp_avg")


def _find(function: str, param: Tensor, *key: str) -> Tensor:
    from deepspeed import utils

    found: Tensor = getattr(utils, function)(param, *key)
    shape = getattr(param, "ds_shape", param.shape)  # stage 3 leaves a placeholder in the parameter
    return found.detach().clone().view(shape)


class ZeroRun(Run):
    """An optimizer under DeepSpeed, which steps fp32 copies."""

    steps = torch.float32

    def __init__(self, row: str, full: Mapping[str, Tensor], make: _Make) -> None:
        zero = ZERO_ROWS[row]
        self._whole = zero["stage"] == 0
        model = GivenGradients(full)
        self._params = dict(model.named_parameters())
        self.optimizer = make(self._params, {"process_group": dist.group.WORLD} if self._whole else {})
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        halves = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        config |= {halves[t.dtype]: {"enabled": True} for t in full.values() if t.dtype in halves}
        self._engine = initialize(model, self.optimizer, config)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        self._engine.backward(self._engine(grads))
        self._engine.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() if self._whole else whole_weight(p) for name, p in self._params.items()}

    def momentum(self) -> dict[str, Tensor]:
        state = self.optimizer.state  # at stage 0 of the parameters themselves
        return {n: state[p]["momentum_buffer"] if self._whole else whole_momentum(p) for n, p in self._params.items()}

    def close(self) -> None:
        self._engine.destroy()
