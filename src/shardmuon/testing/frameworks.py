"""Runs of shardmuon under FSDP1 and DeepSpeed on a pool of ranks, for tests that compare the results with a reference.

Each run uses the framework's own functions for forward and backward passes, for gathering tensors, and for state dicts.
DeepSpeed starts without compiling extensions and logs only errors.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardmuon.muon import Muon

_Make = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Muon]


class _GivenGradients(nn.Module):
    """A module whose backward pass produces given gradients. `forward` takes one gradient tensor per parameter and
    returns a loss that has these gradients.

    Parameters are looked up by name, because FSDP1 replaces the parameter objects.

    Args:
        tensors: Initial values of the parameters, by name.
        inner: Optional module whose loss is added to the loss of this module.
    """

    def __init__(self, tensors: Mapping[str, Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))
        self.inner = inner

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        own = torch.stack([(getattr(self, name) * grads[name]).sum().float() for name in self.names]).sum()
        return own if self.inner is None else own + self.inner(grads)


class _Inner(_GivenGradients):
    """A submodule that FSDP1 wraps as a separate unit."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress all warnings inside the `with` block. torch emits deprecation warnings for FSDP1 and for functions that
    DeepSpeed calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Run:
    """Base class for test runs in which Muon updates a model with given gradients. Runs under FSDP1 and DeepSpeed
    gather whole weights and momentum on every rank.

    `gradients` rounds gradients to multiples of 1/8, so that frameworks average them over the ranks without rounding
    errors.

    Attributes:
        optimizer: The optimizer.
        steps: Dtype of the weights that the optimizer updates. The reference model uses the same dtype. Default: the
            model's dtype.
    """

    optimizer: Muon
    steps: torch.dtype | None = None

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut the reference model's tensors to the parts that this run returns. Default: the whole tensors."""
        return dict(full)

    def start(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the initial weights of the reference model: the tensors in `full`, converted to the dtype `self.steps`
        unless it is None."""
        return {name: t.to(self.steps or t.dtype) for name, t in full.items()}

    def gradients(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of a step: the random tensors in `drawn`, divided by 4, rounded to multiples of 1/8 and
        clamped to [-1, 1]. The dtype of the gradients is `self.steps`, or that of `drawn` if `self.steps` is None."""
        return {name: ((2 * t.float()).round().clamp(-8, 8) / 8).to(self.steps or t.dtype) for name, t in drawn.items()}

    def keeps(self, state: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Return whether the state of the Muon variant's stages (such as NorMuon's second moments) is bitwise equal to
        `state`.

        Under FSDP1 and DeepSpeed, the result is always True, because the framework decides where this state is stored.
        An error in this state would still be detected, because it would change the weights.
        """
        return True

    def close(self) -> None:
        """Release the resources of the framework."""


class Fsdp1Run(Run):
    """A run of Muon on a model wrapped in FSDP1. The first half of the parameters is in a separate FSDP1 unit."""

    ROWS: ClassVar[Mapping[str, str]] = {  # dict from layout name to the name of a ShardingStrategy
        "fsdp1": "FULL_SHARD",
        "fsdp1 zero2": "SHARD_GRAD_OP",
        "fsdp1 hybrid": "HYBRID_SHARD",
        "fsdp1 no shard": "NO_SHARD",
    }

    def __init__(self, row: str, full: Mapping[str, Tensor], make: _Make) -> None:
        strategy = self.ROWS[row]
        names = list(full)
        inside = {name: full[name] for name in names[: len(names) // 2]}
        outside = {name: full[name] for name in names[len(names) // 2 :]}
        self._model = self.wrap(_GivenGradients(outside, _Inner(inside) if inside else None), strategy)
        params = {name.rpartition(".")[2]: p for name, p in self._model.named_parameters()}
        options = {"process_group": dist.group.WORLD} if strategy == "NO_SHARD" else {}
        self.optimizer = make({name: params[name] for name in names}, options)

    @staticmethod
    def wrap(model: nn.Module, strategy: str, **options: Any) -> FullyShardedDataParallel:
        """Wrap a model in FSDP1 on the CPU. All ranks must call this method.

        Args:
            model: The model. By default, each of its `_Inner` submodules becomes a separate FSDP1 unit.
            strategy: Name of a `ShardingStrategy`. A hybrid strategy makes two replicas of the model if the number of
                ranks is even and greater than two, and one replica otherwise. `process_group` overrides this.
            options: Keyword arguments of `FullyShardedDataParallel`, which override the defaults of this function.
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

    @staticmethod
    def whole_weights(model: FullyShardedDataParallel) -> dict[str, Tensor]:
        """Gather full copies of all weights of a wrapped model. The keys are the names that the weights had before
        FSDP1 wrapped the model. All ranks must call this function."""
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
            return {name: p.detach().clone() for name, p in named}

    def step(self, grads: Mapping[str, Tensor]) -> None:
        self._model(grads).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name.removeprefix("inner."): t for name, t in self.whole_weights(self._model).items()}

    def momentum(self) -> dict[str, Tensor]:
        with quiet():
            found = FullyShardedDataParallel.optim_state_dict(self._model, self.optimizer)["state"]
        return {name.removeprefix("inner."): state["momentum_buffer"] for name, state in found.items()}


class ZeroRun(Run):
    """A run of Muon under DeepSpeed, which keeps fp32 copies of the weights for the optimizer."""

    steps = torch.float32
    # Mapping from the layout name to the value of "zero_optimization" in DeepSpeed's configuration.
    ROWS: ClassVar[Mapping[str, dict[str, Any]]] = {
        "zero0": {"stage": 0},
        "zero1": {"stage": 1},
        "zero2": {"stage": 2},
        "zero3": {"stage": 3},
        "zero2+offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero3+offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }

    def __init__(self, row: str, full: Mapping[str, Tensor], make: _Make) -> None:
        zero = self.ROWS[row]
        self._whole = zero["stage"] == 0
        model = _GivenGradients(full)
        self._params = dict(model.named_parameters())
        self.optimizer = make(self._params, {"process_group": dist.group.WORLD} if self._whole else {})
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        halves = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        config |= {halves[t.dtype]: {"enabled": True} for t in full.values() if t.dtype in halves}
        self._engine = self.initialize(model, self.optimizer, config)

    @staticmethod
    def start_deepspeed() -> Any:
        """Import DeepSpeed with its CPU accelerator, and initialize its communication on the default process group. All
        ranks must call this function."""
        os.environ["DS_ACCELERATOR"] = "cpu"
        with quiet():
            import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
        # ignore warnings about deprecated torch functions that DeepSpeed calls
        old = r"`torch.distributed.\w+` is deprecated"
        warnings.filterwarnings("ignore", old, FutureWarning)
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # disable the extension deepspeed_shm_comm, which takes minutes to compile
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, auto_mpi_discovery=False)
        return deepspeed

    @staticmethod
    def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
        """Make a DeepSpeed engine on the CPU. All ranks must call this function.

        DeepSpeed's configuration `config` overrides the defaults of this function. By default, gradients are not
        clipped, progress reports are disabled, and optimizers that DeepSpeed has not been tested with are allowed.
        """
        fixed = {"steps_per_print": 10**9, "gradient_clipping": 0.0}
        fixed |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        deepspeed = ZeroRun.start_deepspeed()
        with quiet():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**fixed, **config})
        return engine

    @staticmethod
    def whole_weight(param: Tensor) -> Tensor:
        """Gather a copy of a whole fp32 weight, for ZeRO stages 1 to 3. All ranks must call this function."""
        return _find("safe_get_full_fp32_param", param)

    @staticmethod
    def whole_momentum(param: Tensor) -> Tensor:
        """Gather a copy of a parameter's whole momentum, for ZeRO stages 1 to 3. All ranks must call this function, and
        only after the first step."""
        return _find("safe_get_full_optimizer_state", param, "exp_avg")

    def step(self, grads: Mapping[str, Tensor]) -> None:
        self._engine.backward(self._engine(grads))
        self._engine.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() if self._whole else self.whole_weight(p) for name, p in self._params.items()}

    def momentum(self) -> dict[str, Tensor]:
        state = self.optimizer.state  # with ZeRO stage 0, the keys of the optimizer state are the model's parameters
        whole = self._whole
        return {n: state[p]["momentum_buffer"] if whole else self.whole_momentum(p) for n, p in self._params.items()}

    def close(self) -> None:
        self._engine.destroy()


def _find(function: str, param: Tensor, *key: str) -> Tensor:
    from deepspeed import utils

    found: Tensor = getattr(utils, function)(param, *key)
    shape = getattr(param, "ds_shape", param.shape)  # with ZeRO stage 3, `param` itself is empty
    return found.detach().clone().view(shape)
