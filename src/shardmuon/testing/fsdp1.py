"""FSDP1 on this process's ranks, for comparisons: its own forward and backward pass, gather and state dicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

if TYPE_CHECKING:
    from shardmuon.muon import Muon

FSDP1_ROWS = {  # name -> strategy
    "fsdp1": "FULL_SHARD",
    "fsdp1 zero2": "SHARD_GRAD_OP",
    "fsdp1 hybrid": "HYBRID_SHARD",
    "fsdp1 no shard": "NO_SHARD",
}


class FSDP1Unit(nn.Module):
    """Parameters, perhaps of a smaller unit inside, and a loss whose gradients are given. FSDP1 shows a module its own
    parameters by their names only."""

    def __init__(self, tensors: Mapping[str, Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))
        self.inner = inner

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        own = torch.stack([(getattr(self, name) * grads[name]).sum().float() for name in self.names]).sum()
        return own if self.inner is None else own + self.inner(grads)


class Inner(FSDP1Unit):
    """A module that is wrapped by itself."""


def wrap(model: nn.Module, strategy: str, **options: Any) -> FullyShardedDataParallel:
    """The model in FSDP1, each `Inner` a unit of its own. Collective.

    HYBRID_SHARD: two replicas, where the number of ranks allows it.
    """
    world = dist.get_world_size()
    if strategy.startswith("HYBRID") and "process_group" not in options:
        shape = (2, world // 2) if world % 2 == 0 and world > 2 else (1, world)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        options["process_group"] = (mesh.get_group("shards"), mesh.get_group("replicas"))
    options = {"auto_wrap_policy": ModuleWrapPolicy({Inner}), "use_orig_params": True, **options}
    with quiet():
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            **options,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's notices: that NO_SHARD and FSDP1's state dicts are about to go, that one rank has no need of
    FSDP1, and what FSDP1's own code calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", r"FSDP.state_dict_type\(\) and FSDP.set_state_dict_type\(\)", FutureWarning)
        warnings.filterwarnings("ignore", r"FSDP is switching to use `NO_SHARD`", UserWarning)
        warnings.filterwarnings("ignore", r"`_get_pg_default_device` will be deprecated", UserWarning)
        warnings.filterwarnings("ignore", r"Please use DTensor instead and we are deprecating", FutureWarning)
        warnings.filterwarnings("ignore", r"Multiple backends are registered with this ProcessGroup", UserWarning)
        yield


def whole_weights(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Copies of all weights, by the names that they had before they were wrapped. Collective."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
        return {name: p.detach().clone() for name, p in named}


class Fsdp1Run:
    """An optimizer under FSDP1, fed with gradients; what it finds are whole tensors, the same on every rank.

    Gradients are rounded to multiples of 1/8: FSDP1's mean over the ranks is exact with them.
    """

    def __init__(
        self,
        row: str,
        full: Mapping[str, Tensor],
        make: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Muon],
    ) -> None:
        strategy = FSDP1_ROWS[row]
        names = list(full)
        inside = {name: full[name] for name in names[: len(names) // 2]}
        outside = {name: full[name] for name in names[len(names) // 2 :]}
        self._model = wrap(FSDP1Unit(outside, Inner(inside) if inside else None), strategy)
        params = {name.rpartition(".")[2]: p for name, p in self._model.named_parameters()}
        options = {"process_group": dist.group.WORLD} if strategy == "NO_SHARD" else {}
        self.optimizer = make({name: params[name] for name in names}, options)

    def cut(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors as this run shows them."""
        return dict(full)

    def start(self, full: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The reference's first weights."""
        return full

    def gradients(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of a step."""
        return {name: ((2 * t.float()).round().clamp(-8, 8) / 8).to(t.dtype) for name, t in drawn.items()}

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

    def close(self) -> None:
        """Give nothing back: there is nothing to close."""
