"""Training jobs in which ranks share parameters in various ways, with helpers that compare and back up everything that
a step may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from spectra import normal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.testing.layouts import LAYOUTS as TABLE
from shardmuon.testing.layouts import mesh_of, parameters
from shardmuon.variants import KEPT_KEYS

Cut = Callable[[Tensor], Tensor]  # maps a full tensor to the part that this rank stores
Sets = Sequence[tuple[int, ...]]

FAMILIES: dict[str, Sets] = {
    "chain": [(0, 1), (1, 2), (2, 3)],
    "ring": [(0, 1), (1, 2), (2, 3), (0, 3)],
    "rows and columns": [(0, 1), (2, 3), (0, 2), (1, 3)],
    "nested": [(0, 1, 2, 3), (0, 1), (2, 3)],
    "tied stages": [(0, 1), (2, 3), (0, 3)],
    "overlapping": [(0, 1, 2), (1, 2, 3)],
    "apart": [(0, 1), (2, 3)],
    "all": [(0, 1, 2, 3)],
    "one without": [(0, 1), (1, 2)],
    "ring of eight": [*((rank, rank + 1) for rank in range(7)), (0, 7)],
}


def rows_on(mesh: DeviceMesh, *placements: Placement) -> Cut:
    return lambda t: distribute_tensor(t, mesh, placements or [Shard(0)], src_data_rank=None)


def as_in(layout: str) -> Cut:
    """Return a function that shards a tensor as the layout `layout` of shardmuon.testing.layouts does."""
    case = TABLE[layout]
    return lambda t: case.build({"t": t}, case.mesh(dist.get_world_size()))["t"]


class Spec(NamedTuple):
    """A parameter of a `Job`. If `lacks` is True, ranks that store no element of the parameter have no gradient, as in
    Megatron-FSDP."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = torch.clone
    frozen: bool = False
    dtype: torch.dtype = torch.float32
    lacks: bool = False


def replicas(sets: Sets, *, frozen: bool = True) -> list[dict[str, Any]]:
    """Return a parameter group for each set of ranks that contains this rank. The set replicates two trained matrices
    and, if `frozen` is True, a frozen one."""
    found = []
    for ranks in sets:
        if dist.get_rank() in ranks:
            name = "".join(map(str, ranks))
            specs = [Spec(f"a{name}", (6, 8)), Spec(f"b{name}", (5, 7)), Spec(f"f{name}", (4, 6), frozen=True)]
            options = {"adjust_lr_fn": "spectral", "ns_coefficients": [[3.4445, -4.7750, 2.0315] for _ in range(5)]}
            found.append({"params": specs[: 2 + frozen], "process_group": ranks, **options})
    return found


def shards(layout: str) -> list[dict[str, Any]]:
    """Return a parameter group of matrices that are sharded as in the layout `layout` of shardmuon.testing.layouts."""
    return [{"params": [Spec("rows", (10, 8), as_in(layout)), Spec("cols", (6, 10), as_in(layout))]}]


def alone() -> list[dict[str, Any]]:
    """Return a parameter group with an expert that only this rank has, and one with vectors for AdamW."""
    return [
        {"params": [Spec(f"expert{dist.get_rank()}", (6, 8))], "process_group": (), "tp_group": ()},
        {"params": [Spec("bias", (9,)), Spec("scale", (4,))], "use_muon": False},
    ]


def layout_of(name: str) -> list[dict[str, Any]]:
    if name in FAMILIES:
        return [*replicas(FAMILIES[name]), *alone()]
    if name == "AdamW's DTensors":
        return [{"params": [Spec("v", (8, 6), as_in("fsdp2"))], "use_muon": False}]
    # Creating a mesh is collective, so all ranks create the 2 x 2 mesh that one of the planted faults uses on a single
    # rank.
    mesh_of((2, 2))
    return [*shards(name), *replicas(FAMILIES["chain"]), *alone()]


class Job:
    """An optimizer over this rank's shards of a model, with gradients that depend only on a seed."""

    def __init__(self, groups: Sequence[dict[str, Any]], **options: Any) -> None:
        self.specs: dict[Tensor, Spec] = {}
        self.model = nn.Module()
        self.patches = contextlib.ExitStack()  # mock patches that a planted fault has applied
        self.optimizer = self.made(groups, **options)

    def made(self, groups: Sequence[dict[str, Any]], **options: Any) -> Muon:
        made = [{**group, "params": [self.parameter(spec) for spec in group["params"]]} for group in groups]
        return Muon(made, **{"lr": 0.02, "weight_decay": 0.1, **options})

    def parameter(self, spec: Spec) -> tuple[str, nn.Parameter]:
        whole = normal(*spec.shape, seed=sum(map(ord, spec.name)), dtype=spec.dtype)
        (param,) = parameters({spec.name: spec.cut(whole)}).values()
        self.specs[param] = spec
        self.model.register_parameter(spec.name, param)
        param.requires_grad_(not spec.frozen)
        return spec.name, param

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def first(self) -> Tensor:
        return self.groups[0]["params"][0]  # type: ignore[no-any-return]

    @property
    def adamw(self) -> Tensor:
        return self.groups[-1]["params"][0]  # type: ignore[no-any-return]

    def replace(self, made: dict[str, nn.Parameter]) -> None:
        """Replace the parameters that have the given names with other tensors."""
        self.specs = {made.get(spec.name, p): spec for p, spec in self.specs.items()}
        for name, p in made.items():
            self.model.register_parameter(name, p)

    def set_gradients(self, seed: int) -> None:
        for p, spec in self.specs.items():
            given = p.requires_grad and not (spec.lacks and not local_if_any(p).numel())
            p.grad = spec.cut(self.gradient(p, seed)) if given else None

    def gradient(self, p: Tensor, seed: int) -> Tensor:
        """Return the full gradient of a parameter."""
        spec = self.specs[p]
        return normal(*spec.shape, seed=1000 * seed + sum(map(ord, spec.name)), dtype=spec.dtype)

    def step(self, seed: int | None = None) -> None:
        if seed is not None:
            self.set_gradients(seed)
        self.optimizer.step()

    def held(self, *, gradients: bool = True) -> dict[str, object]:
        """Return everything in the job that a step may change: options, weights, gradients and optimizer state."""
        found: dict[str, object] = {"groups": len(self.groups)}
        for at, group in enumerate(self.groups):
            found |= {f"{at} {key}": repr(value) for key, value in group.items() if key != "params"}
            for number, p in enumerate(group.get("params", ())):
                kept = {"weight": p, "gradient": p.grad if gradients else None, **self.state.get(p, {})}
                found |= {f"{at} {number} {key}": _bits(value) for key, value in kept.items()}
        return found

    def named(self) -> dict[str, dict[str, Any]]:
        """Return the weight and the state of each parameter, keyed by parameter name."""
        return {spec.name: {"weight": p.detach(), **self.state.get(p, {})} for p, spec in self.specs.items()}

    def unlike_whole(self, dense: dict[str, dict[str, Any]]) -> list[str]:
        """Compare the weights and the state with this rank's shards of an unsharded job's weights and state. Return the
        parameter name and the key of every tensor that differs."""
        wrong = []
        # Every rank stores the full state of post-processing stages (such as NorMuon).
        whole = ("step", *KEPT_KEYS)
        cuts = {spec.name: spec.cut for spec in self.specs.values()}
        for name, mine in self.named().items():
            cut = {key: t if key in whole else cuts[name](t.contiguous()) for key, t in dense[name].items()}
            wrong += [f"{name}: {key}" for key in unlike(*({k: _bits(v) for k, v in of.items()} for of in (mine, cut)))]
        return wrong


def whole(groups: Sequence[dict[str, Any]], **options: Any) -> Job:
    """Return a job that trains the given parameter groups in a single process, with full tensors."""
    places = ("process_group", "tp_group")
    return Job(
        [
            {k: v for k, v in group.items() if k not in places}
            | {"params": [spec._replace(cut=torch.clone) for spec in group["params"]]}
            for group in groups
        ],
        **options,
    )


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no error was raised on this rank")


def _bits(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    local = local_if_any(value).detach()
    return local.dtype, local.shape, None if local.is_meta else local.to_dense().contiguous().clone()


def unlike(a: dict[str, object], b: dict[str, object]) -> list[str]:
    """Return a list of the keys that only one of two dicts has, or whose values differ. Tensors are compared with
    `torch.equal`."""

    def same(x: object, y: object) -> bool:
        if isinstance(x, tuple) and isinstance(y, tuple):
            return len(x) == len(y) and all(map(same, x, y))
        return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)

    return [key for key in {**a, **b} if key not in a or key not in b or not same(a[key], b[key])]


class Backup:
    """A backup of everything in a job that a planted fault may replace."""

    def __init__(self, job: Job) -> None:
        self._job, self._optimizer = job, job.optimizer
        self._groups = [(group, {**group, "params": list(group["params"])}) for group in job.groups]
        self._params = [(p, p.data, p.grad, p.requires_grad) for group in job.groups for p in group["params"]]
        self._state = {p: dict(kept) for p, kept in job.state.items()}

    def restore(self) -> None:
        self._job.patches.close()
        self._job.optimizer = self._optimizer
        self._job.groups[:] = [group for group, _ in self._groups]
        for group, kept in self._groups:
            group.clear()
            group.update(kept)
        for p, data, grad, requires in self._params:
            p.grad = None
            p.data = data
            p.requires_grad_(requires)
            p.grad = grad
        self._job.state.clear()
        self._job.state.update(self._state)


# ------------------------------------------------------------------------------------------ what a fault changes


def in_gradient(make: Callable[[Tensor], Tensor | None], of: Callable[[Job], Tensor] = lambda job: job.first) -> Any:
    def do(job: Job) -> None:
        p = of(job)
        made, (p.grad) = make(p.grad), None  # type: ignore[arg-type]
        if made is not None and made.shape != p.shape:
            p.grad = torch.zeros_like(p)
            p.grad.data = made
        else:
            # Set grad_dtype to None, because torch otherwise refuses a gradient whose dtype differs from the
            # parameter's.
            p.grad_dtype = None
            p.grad = made

    return do


def in_storage(
    make: Callable[[Tensor], Tensor], *, grads: bool = True, of: Callable[[Job], Tensor] = lambda job: job.first
) -> Callable[[Job], None]:
    """Return a fault that replaces a parameter's data and, if `grads` is True, its gradient with the results of
    `make`."""

    def do(job: Job) -> None:
        p = of(job)
        grad, p.grad = p.grad, None
        p.data = make(p.data)
        assert grad is not None
        p.grad = make(grad) if grads else grad

    return do


def in_state(key: str, make: Callable[[Tensor], Any], of: Callable[[Job], Tensor] = lambda job: job.first) -> Any:
    def do(job: Job) -> None:
        kept = dict(job.state[of(job)])
        job.state[of(job)] = {**kept, key: make(kept[key])}

    return do


def of_inference(like: Tensor) -> Tensor:
    with torch.inference_mode():
        return like.clone()


def one_row(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)
