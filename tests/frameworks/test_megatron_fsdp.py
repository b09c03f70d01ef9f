"""Megatron-FSDP: any number of rows on any rank, gradients that empty shards lack, a step that must change nothing.

Extents and layouts as numbers, and DTensors cut as Megatron-FSDP cuts them (shardmuon.testing.layouts), which need no
package; then what the megatron-fsdp package (0.6.1) really builds, on CPUs with a stand-in for torch.cuda.
There the reference is shardmuon on one process, given the gradients that Megatron-FSDP reduced, put together by
Megatron-FSDP's own offsets. That such layouts are audited, clipped and resumed is shown where all layouts are (rows
"megatron-fsdp" of shardmuon.testing.layouts).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_gpt import import_megatron_fsdp
from standin_cuda import cuda_on_cpu
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from shardmuon import Muon, clip_grad_norm_, param_groups
from shardmuon._torch import local_if_any
from shardmuon.layout.engines import engine_of
from shardmuon.layout.mesh import Cut, rows_of_part
from shardmuon.testing.layouts import mesh_of, shard_like_megatron
from shardmuon.testing.pool import RankPool, get_pool
from shardmuon.variants import KEPT_KEYS

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("megatron_fsdp") is None, reason="megatron-fsdp is not installed (docs/megatron.md)"
)

# ------------------------------------------------------------------------------------------------ as numbers alone


def _tensor_parallel_part(full: Tensor, part: int, parts: int, dim: int, stride: int) -> Tensor:
    """The part that Megatron's layers keep: a share of each of `stride` equal blocks, one after the other."""
    return torch.cat([block.chunk(parts, dim)[part] for block in full.chunk(stride, dim)], dim)


@pytest.mark.parametrize(
    ("shape", "dim", "stride"), [((9, 4), 0, 1), ((12, 5), 0, 2), ((3, 6), 1, 1), ((7, 12), 1, 2), ((5, 4, 6), 2, 1)]
)
def test_rows_of_a_part_are_what_slicing_it_gives(shape: tuple[int, ...], dim: int, stride: int) -> None:
    """Tensor-parallel parts of rows or columns, also in strides; any rows of them on any rank."""
    full = torch.arange(float(math.prod(shape))).view(shape)
    for num_parts in (1, 3):
        for part in range(num_parts):
            kept = _tensor_parallel_part(full, part, num_parts, dim, stride)
            for start, stop in itertools.combinations_with_replacement(range(len(kept) + 1), 2):
                rows, found = kept[start:stop], torch.full((stop - start, *kept.shape[1:]), torch.nan)
                held, stored = rows_of_part(shape, Cut(dim, stride), part, num_parts, range(start, stop))
                assert stored == tuple(rows.shape)
                for (offset, size), local in held:
                    there = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
                    here = tuple(slice(o, o + n) for o, n in zip(local, size, strict=True))
                    found[here] = full[there]
                assert torch.equal(found, rows)


# --------------------------------------------------------------------------------- cut like Megatron-FSDP, without it

SHAPES = {"first": (10, 8), "second": (12, 8), "wide": (4, 16), "few": (2, 8), "bias": (9,)}  # AdamW has the bias


def _full(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _shards(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return shard_like_megatron(full, mesh_of((dist.get_world_size(),), purpose="tests"))


def _muon(params: Mapping[str, Any], **options: Any) -> Muon:
    matrices = {"params": [(name, p) for name, p in params.items() if name != "bias"], "lr": 0.1, **options}
    return Muon([matrices, {"params": [("bias", params["bias"])], "use_muon": False}], lr=1e-3)


class CutJob:
    """One model cut like Megatron-FSDP's; ranks without rows of a parameter have no gradient of it, as there."""

    def __init__(self, **options: Any) -> None:
        self.params: dict[str, Any] = {}
        for name, t in _shards(_full(0)).items():
            self.params[name] = p = nn.Parameter(t)
            for key in ("megatron_fsdp_dist_index", "megatron_fsdp_slice"):
                setattr(p, key, getattr(t, key))
        self.optimizer = _muon(self.params, **options)
        self.set_gradients(1)

    def set_gradients(self, seed: int) -> None:
        for name, grad in _shards(_full(seed)).items():
            self.params[name].grad = grad if grad.to_local().numel() else None

    def is_holder(self, name: str, at: int) -> bool:
        """True on one of the ranks that store some of a parameter, by its number among them."""
        holders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(holders, bool(self.params[name].to_local().numel()))
        return dist.get_rank() == [rank for rank, holds in enumerate(holders) if holds][at]

    def snapshot(self) -> list[Tensor]:
        tensors: list[Tensor] = list(self.params.values())
        tensors += [t for p in self.params.values() for t in self.optimizer.state.get(p, {}).values()]
        return [engine_of(t).storage(t).clone() for t in tensors]


def _lacks_a_gradient(job: CutJob) -> None:
    if job.is_holder("second", 0):
        job.params["second"].grad = None


def _lies_about_its_place(elements: int) -> Callable[[CutJob], None]:
    def plant(job: CutJob) -> None:
        if job.is_holder("second", -1):
            kept = job.params["second"].megatron_fsdp_slice
            job.params["second"].megatron_fsdp_slice = slice(kept.start + elements, kept.stop + elements)

    return plant


def _has_lost_its_place(job: CutJob) -> None:
    if job.is_holder("second", 0):
        del job.params["second"].megatron_fsdp_slice


def _is_of_another_kind(key: str) -> Callable[[CutJob], None]:
    def plant(job: CutJob) -> None:
        setattr(job.params["second"], key, torch.ones(1))
        job.params["second"].grad = None

    return plant


def _is_misplaced(job: CutJob) -> None:
    p = job.params["second"]
    p.grad = DTensor.from_local(torch.ones(12, 8), p.device_mesh, [Partial()], run_check=False)


FAULTS: dict[str, tuple[Callable[[CutJob], None], str]] = {
    "lacks": (_lacks_a_gradient, r"second: ranks .*have no gradient"),
    "gap": (_lies_about_its_place(-8), r"second: ranks \(0, 1, 2\) store shapes .*leave a gap"),
    "beyond": (_lies_about_its_place(8), r"second: rank 2 stores shape \(4, 8\) .*, which should be \(3, 8\)"),
    "inside a row": (_lies_about_its_place(-3), r"second: its attribute megatron_fsdp_slice, .* does not say where"),
    "lost": (_has_lost_its_place, r"second: its attribute megatron_fsdp_slice, .* does not say where its"),
    "decoupled": (_is_of_another_kind("decoupled_grad"), r"second: .*use_decoupled_grad=False"),
    "main_grad": (_is_of_another_kind("main_grad"), r"second: .*shardmuon\.frameworks\.megatron"),
    "version 2": (_is_of_another_kind("_mfsdp_parameter_group"), r"second: .*experimental version 2, which is not"),
    "placement": (_is_misplaced, r"second: .*Finish the gradient reduction first"),
}


def _refused(which: str) -> str:
    plant, words = FAULTS[which]
    job = CutJob()
    plant(job)
    before = job.snapshot()
    with pytest.raises(ValueError, match=words) as caught:
        job.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, job.snapshot(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize("which", FAULTS)
def test_gradients_parameters_and_rows_that_are_not_the_real_ones_are_refused_on_every_rank(
    which: str, world3: RankPool
) -> None:
    assert len(set(world3.run(_refused, which))) == 1


def _beside_one_process(**options: Any) -> None:
    """In the first step the one matrix that some rank stores nothing of has no gradient, in the second another and
    AdamW's vector."""
    job, whole = CutJob(**options), {name: nn.Parameter(t) for name, t in _full(0).items()}
    dense = _muon(whole, **options)
    for seed, missing in ((1, ("few",)), (2, ("first", "bias")), (3, ())):
        job.set_gradients(seed)
        for name, grad in _full(seed).items():
            whole[name].grad = grad
        for name in missing:
            job.params[name].grad = whole[name].grad = None
        job.optimizer.step()
        dense.step()
        cut = _shards({name: p.detach() for name, p in whole.items()})
        assert_bitwise({n: p.to_local() for n, p in job.params.items()}, {n: t.to_local() for n, t in cut.items()})
    for name, p in job.params.items():
        mine, theirs = job.optimizer.state[p], dense.state[whole[name]]
        assert mine.keys() == theirs.keys(), f"{name}, of which {p.to_local().numel()} elements are here"
        kept = {key: engine_of(t).storage(t) for key, t in mine.items() if key in KEPT_KEYS}
        assert_bitwise(kept, {key: theirs[key] for key in kept})


@pytest.mark.parametrize("variant", [None, "hyperball", "normuon+hyperball"])
def test_empty_shards_without_a_gradient_step_and_keep_norms_as_one_process_does(
    variant: str | None, world3: RankPool
) -> None:
    """Also AdamW's state, which a rank that stores nothing of a vector has as the others do."""
    world3.run(_beside_one_process, **({"variant": variant, "weight_decay": 0.0} if variant else {}))


# --------------------------------------------------------------------------------------- as the package builds it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mixer = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mixer(x))


@contextlib.contextmanager
def _megatron() -> Iterator[None]:
    import_megatron_fsdp()
    logging.disable(logging.WARNING)
    with cuda_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@lru_cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _wrapped(form: str, model: nn.Module, tensor_parallel: int = 1, **options: Any) -> Any:
    """`form` is a strategy, with "hybrid " (outer replicas) or "hybrid shard " before it. `options`: of the wrapper."""
    from megatron_fsdp import fully_shard_model

    *outer, strategy = form.split()
    world = dist.get_world_size() // tensor_parallel
    if outer:
        mesh = _mesh((2, world // 2, tensor_parallel), ("outer", "inner", "tp"))
        flat = _mesh((world, tensor_parallel), ("flat", "tp"))["flat"]
        options = {"dp_outer_dim": "outer", "hybrid_fsdp_group": flat.get_group()}
        options["outer_dp_sharding_strategy"] = "optim" if "shard" in outer else "no_shard"
    else:
        mesh = _mesh((world, tensor_parallel), ("inner", "tp"))
    return fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="inner",
        tp_dim="tp",
        fsdp_unit_modules=[Block, _Bag],
        zero_dp_strategy=strategy,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,  # sums gradients: averages need a reduction that gloo lacks
        **options,
    )


class Gatherer:
    """Puts parameters, gradients and state together at the offsets that Megatron-FSDP computes."""

    def __init__(self, params: dict[str, DTensor]) -> None:
        from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

        self._params = params
        self._offsets = {name: gather_and_compute_chunk_metadata(p).offsets for name, p in params.items()}

    def __call__(self, tensors: dict[str, DTensor | None]) -> dict[str, Tensor]:
        mine = {n: (self._offsets[n], t.detach().to_local().clone()) for n, t in tensors.items() if t is not None}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        whole = {name: torch.full(self._params[name].shape, torch.nan) for name in tensors}
        for parts in everyone:
            for name, (offset, part) in parts.items():
                whole[name][tuple(slice(o, o + s) for o, s in zip(offset, part.shape, strict=True))] = part
        assert not any(t.isnan().any() for t in whole.values()), "no rank has some of it"
        return whole


class Job:
    """A model wrapped by Megatron-FSDP with its optimizer, and the same model on one process."""

    def __init__(self, form: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.dense_model, model = Model(), Model()
        model.load_state_dict(self.dense_model.state_dict())
        self.model = _wrapped(form, model)
        settings = {"lr": 0.1, "adamw_lr": 0.01, "overrides": {"*up.weight": {"split_sizes": (4, 6)}}}
        groups = param_groups(self.model, **settings)
        self.names = [row.name for row in groups.rows if row.optimizer == "Muon"]
        self.optimizer = Muon(groups, lr=0.1, **options)
        self.dense = Muon(param_groups(self.dense_model, **settings), lr=0.1, **options)
        self.gather = Gatherer(self.params())
        self.before = self.gather(self.params())
        self.wrap()

    def wrap(self) -> None:
        from megatron_fsdp import fully_shard_optimizer

        self.optimizer.zero_grad()
        fully_shard_optimizer(self.optimizer)

    def state_dicts(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def params(self) -> dict[str, DTensor]:
        return {name.removeprefix("module."): p for name, p in self.model.named_parameters()}

    def step(self, seed: int) -> None:
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed + dist.get_rank()))
        self.optimizer.zero_grad()
        self.model(tokens).square().mean().backward()
        self.model.finish_grad_sync()
        grads = self.gather({name: p.grad for name, p in self.params().items()})
        norm = torch.cat([t.double().flatten() for t in grads.values()]).norm()
        assert float(clip_grad_norm_(self.optimizer, 1e9)) == float(norm.float()), "not every row counts once"
        for name, p in self.dense_model.named_parameters():
            p.grad = grads[name]
        self.optimizer.step()
        self.dense.step()

    def check(self) -> None:
        """Every rank's weights and state have the bits of one process, and counters are equal everywhere."""
        params = self.params()
        found = {"weight": self.gather(params)}
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            states = {name: self.optimizer.state[p].get(key) for name, p in params.items()}
            found[key] = self.gather({name: t for name, t in states.items() if t is not None})
        for name, q in self.dense_model.named_parameters():
            wanted = {"weight": q.detach(), **self.dense.state[q]}
            assert self.optimizer.state[params[name]].keys() == self.dense.state[q].keys(), name
            for key, value in wanted.items():
                have = found[key][name] if key in found else local_if_any(self.optimizer.state[params[name]][key])
                assert torch.equal(have, value), (name, key)


def _fresh_state_of_zeros(job: Job) -> None:
    after = job.gather(job.params())
    for name, p in job.params().items():
        assert torch.equal(after[name], job.before[name]), f"{name} has changed"
        kept = job.optimizer.state[p]
        assert set(kept) == ({"momentum_buffer"} if name in job.names else {"step", "exp_avg", "exp_avg_sq"})
        assert not any(local_if_any(value).any() for value in kept.values()), name


def _train(form: str) -> None:
    with _megatron():
        job = Job(form)
        _fresh_state_of_zeros(job)
        for seed in (10, 20):
            job.step(seed)
        job.check()
        if form == "no_shard":
            job.wrap()  # again, or after loading: it finds state, which must stay as it is
            job.check()
            job.step(30)
            job.check()
        tokens = torch.arange(10).view(2, 5)
        with torch.no_grad():
            assert torch.equal(job.model(tokens), job.dense_model(tokens)), "the update was not passed on"
        assert job.names == [f"blocks.{i}.{w}.weight" for i in (0, 1) for w in ("up", "down")] + ["mixer.weight"]


@needs_package
@pytest.mark.parametrize(
    ("form", "world"),
    [
        ("optim_grads_params", 3),
        ("optim_grads", 4),
        ("optim", 4),
        ("no_shard", 4),
        ("hybrid optim_grads_params", 4),
        ("hybrid shard optim_grads_params", 4),
    ],
)
def test_update_is_bitwise_equal_to_one_process_and_reaches_the_model(form: str, world: int) -> None:
    get_pool(world).run(_train, form)


# -------------------------------------------------------------------------------------------------- checkpoints


def _save(form: str, folder: str, variant: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    with _megatron():
        job = Job(form, **variant)
        job.step(10)
        dcp.save(job.state_dicts(), checkpoint_id=folder)
        return job.dense_model.state_dict(), job.dense.state_dict()


def _load(form: str, folder: str, variant: dict[str, Any], dense_model: dict[str, Any], dense: dict[str, Any]) -> None:
    with _megatron():
        job = Job(form, **variant)
        saved = job.state_dicts()
        dcp.load(saved, checkpoint_id=folder)
        job.model.load_state_dict(saved["model"])
        job.optimizer.load_state_dict(saved["optimizer"])
        job.dense_model.load_state_dict(dense_model)
        job.dense.load_state_dict(dense)
        job.check()
        job.model.install_optimized_model_weights()
        job.step(30)
        job.check()


@needs_package
@pytest.mark.parametrize(
    ("saved", "loaded", "world", "variant"),
    [
        ("optim_grads_params", "optim_grads_params", 3, {"variant": "normuon"}),
        ("hybrid shard optim_grads_params", "optim", 4, {}),
        ("optim_grads", "hybrid optim_grads_params", 4, {}),
    ],
)
def test_a_checkpoint_resumes_with_the_same_bits_on_other_ranks(
    saved: str, loaded: str, world: int, variant: dict[str, Any], tmp_path: Path
) -> None:
    states = get_pool(4).run(_save, saved, str(tmp_path), variant)[0]
    get_pool(world).run(_load, loaded, str(tmp_path), variant, *states)


# ---------------------------------------------------------------------------------- tensor parallel, experts


class _Bag(nn.Module):
    """Parameters with the attributes that Megatron's layers write."""

    def __init__(self, tensors: dict[str, Tensor], marks: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(leaf, param := nn.Parameter(tensor.clone()))
            for key, value in marks.get(name, {}).items():
                setattr(param, key, value)


def _cut(full: Tensor, param: Any) -> Tensor:
    """Cut a full tensor to what this rank stores: of its tensor-parallel part by Megatron's rule the package's
    slice."""
    names = param.device_mesh.mesh_dim_names
    if "tp" in names and getattr(param, "tensor_model_parallel", False):
        axis = names.index("tp")
        part, parts = param.device_mesh.get_coordinate()[axis], param.device_mesh.size(axis)
        full = _tensor_parallel_part(full, part, parts, param.partition_dim, param.partition_stride)
    kept = param.megatron_fsdp_slice
    return full.flatten()[kept.start : kept.stop].view(-1, *full.shape[1:])


_SHARDED = {
    "column": ((12, 6), {"partition_dim": 0, "partition_stride": 1}),
    "gate_up": ((24, 6), {"partition_dim": 0, "partition_stride": 2}),
    "row": ((6, 12), {"partition_dim": 1, "partition_stride": 1}),
    "same": ((6, 6), {}),
}


def _step_by_hand(
    wrapped: Any, full: dict[str, Tensor], groups: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> list[str]:
    """Two steps on given gradients; the parameters with the bits of one process, of which this rank stores some."""
    params = {name.removeprefix("module."): p for name, p in wrapped.named_parameters()}
    dense = {name: nn.Parameter(t.clone()) for name, t in full.items()}
    for name, p in params.items():
        assert torch.equal(p.to_local(), _cut(full[name], p)), f"{name}: not what Megatron stores"
    optimizer = Muon(groups(params), lr=0.1)
    reference = Muon(groups(dense), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        for name, p in params.items():
            grad = torch.randn(full[name].shape, generator=generator)
            dense[name].grad, local = grad, _cut(grad, p)
            p.grad = None
            if local.numel():
                p.grad = DTensor.from_local(
                    local.clone(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                )
        optimizer.step()
        reference.step()
    return [
        n for n, p in params.items() if torch.equal(p.to_local(), _cut(dense[n].detach(), p)) and p.to_local().numel()
    ]


def _tensor_parallel() -> list[str]:
    with _megatron():
        generator = torch.Generator().manual_seed(0)
        full = {name: torch.randn(shape, generator=generator) for name, (shape, _) in _SHARDED.items()}
        part = dist.get_rank() % 2
        parts = {
            name: _tensor_parallel_part(full[name], part, 2, *marks.values()) if marks else full[name]
            for name, (_, marks) in _SHARDED.items()
        }
        marks = {n: {"tensor_model_parallel": True, **marks} for n, (_, marks) in _SHARDED.items() if marks}
        wrapped = _wrapped("optim_grads_params", _Bag(parts, marks), tensor_parallel=2)

        def groups(params: dict[str, Any]) -> list[dict[str, Any]]:
            gate_up = {"params": [("gate_up", params["gate_up"])], "split_sizes": (12, 12)}
            return [gate_up, {"params": [(n, p) for n, p in params.items() if n != "gate_up"]}]

        right = _step_by_hand(wrapped, full, groups)
        optimizer = Muon(wrapped.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"replicated over the 2 tensor-parallel ranks.* Clip with Megatron's own"):
            clip_grad_norm_(optimizer, 1.0)
        return right


@needs_package
def test_tensor_parallel_shards_are_read_as_the_whole_matrix_also_gate_and_up(world4: RankPool) -> None:
    assert {name for right in world4.run(_tensor_parallel) for name in right} == set(_SHARDED)


def _experts() -> tuple[list[str], tuple[int, ...], tuple[int, ...]]:
    with _megatron():
        of_experts = _mesh((2, 2, 1), ("inner", "ep", "tp"))
        ep = of_experts.get_coordinate()[1]
        shared = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(1 + ep)
        full = {"layer.mixer": torch.randn(10, 6, generator=shared)}
        full |= {f"layer.experts.{i}": torch.randn(9, 6, generator=own) for i in range(2)}
        marks = {name: {"allreduce": False} for name in full if "experts" in name}
        wrapped = _wrapped("optim_grads_params", _Bag(full, marks), expt_device_mesh=of_experts)
        params = dict(wrapped.named_parameters())
        groups = tuple(
            tuple(params[f"module.layer.{name}"].device_mesh.mesh.flatten().tolist()) for name in ("mixer", "experts.0")
        )
        return _step_by_hand(wrapped, full, lambda params: [{"params": list(params.items())}]), *groups


@needs_package
def test_experts_are_orthogonalized_within_their_own_data_parallel_group(world4: RankPool) -> None:
    found = world4.run(_experts)
    assert [ranks for *_, ranks in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert {ranks for _, ranks, _ in found} == {(0, 1, 2, 3)}
    for first, second in ((0, 2), (1, 3)):  # both ranks of a group together hold, and got right, everything
        assert {"layer.experts.0", "layer.experts.1"} <= {*found[first][0], *found[second][0]}
    assert "layer.mixer" in {name for right, *_ in found for name in right}


# ---------------------------------------------------------------------------------------------------- wrapping


def _misused() -> None:
    with _megatron():
        from megatron_fsdp import fully_shard

        model = Model()
        groups = param_groups(model, lr=1e-3)
        mesh = _mesh((dist.get_world_size(), 1), ("inner", "tp"))
        with pytest.raises(ValueError, match=r"puts all parameters in one group.* fully_shard_optimizer\(optimizer\)"):
            fully_shard(
                model,
                Muon(groups, lr=1e-3),
                device_mesh=mesh,
                dp_shard_dim="inner",
                tp_dim="tp",
                fsdp_unit_modules=[Block],
                device=torch.device("cpu"),
            )
        model = Model()
        optimizer = Muon(param_groups(model, lr=1e-3), lr=1e-3)
        _wrapped("optim_grads_params", model)(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
        with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight: it is the copy that Megatron-FSDP computes with"):
            optimizer.step()


@needs_package
def test_one_group_for_all_and_parameters_from_before_wrapping_are_refused(world4: RankPool) -> None:
    world4.run(_misused)


# ------------------------------------------------------------------------------------------------------ the example

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_fsdp_training.py"


def _all_gather(outputs: list[Tensor], mine: Tensor, group: Any) -> None:
    """`all_gather` of unequal sizes, which NCCL has and gloo lacks."""
    everyone: list[Any] = [None] * len(outputs)
    dist.all_gather_object(everyone, mine, group=group)
    for output, tensor in zip(outputs, everyone, strict=True):
        output.copy_(tensor)


def _example(hybrid: str) -> bool:
    with _megatron(), mock.patch.object(dist, "all_gather", _all_gather):
        spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        said = io.StringIO()
        started = mock.patch.object(sys, "argv", [str(EXAMPLE)]), mock.patch.object(torch.cuda, "is_available", bool)
        with started[0], started[1], contextlib.redirect_stderr(said), pytest.raises(SystemExit, match="2"):
            module.main()
        assert "run this where every rank has a GPU" in said.getvalue()
        return bool(module.train(torch.device("cpu"), "optim_grads_params", hybrid, 2, 32, 1))


@needs_package
@pytest.mark.parametrize(("hybrid", "world"), [("shard", 4)])
def test_the_example_trains_with_the_bits_of_one_process_and_says_at_once_that_it_needs_gpus(
    hybrid: str, world: int
) -> None:
    assert get_pool(world).run(_example, hybrid) == [True] * world
