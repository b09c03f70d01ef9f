"""Tests of shardmuon with Megatron-FSDP. They cover shards with unequal numbers of rows, empty shards without
gradients, and faults for which a step must raise an error and change nothing.

The real megatron-fsdp package (0.6.1) builds the layouts on CPUs, with a stand-in for torch.cuda. The reference is
shardmuon in a single process with the full gradients.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from demo_script import load_example
from megatron_gpt import drawn, import_megatron_fsdp, tensor_parallel_part
from standin_cuda import cuda_on_cpu
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from shardmuon import Muon, clip_grad_norm_, param_groups
from shardmuon._torch import local_if_any
from shardmuon.testing.pool import RankPool
from shardmuon.variants import KEPT_KEYS

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("megatron_fsdp") is None, reason="megatron-fsdp is not installed (docs/megatron.md)"
)

# --------------------------------------------------------------------------------------- as the package builds it


class Unit(nn.ModuleDict):
    """A module whose parameters Megatron-FSDP gathers together. The forward pass takes `grads`, a dict from parameter
    name to gradient, and returns a loss. The backward pass of this loss gives each parameter exactly its gradient from
    `grads`."""

    def __init__(self, prefix: str, **layers: nn.Module) -> None:
        super().__init__(layers)
        self.prefix = prefix

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * grads[f"{self.prefix}.{n}"]).sum() for n, p in self.named_parameters()]).sum()


class Model(nn.Module):
    """A model of three submodules, each of which Megatron-FSDP shards as a unit. The first two have up and down
    projections and a norm. The third has an embedding, a linear layer named mixer, and a head. `kind` is part of the
    parameter names of the first two, because Megatron-FSDP recognizes experts by their parameter names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        units = nn.ModuleList()
        for i in range(2):
            up, down = nn.Linear(6, 12, bias=False), nn.Linear(12, 6, bias=False)
            units.append(Unit(f"layer.{kind}.{i}", up=up, down=down, norm=nn.LayerNorm(6)))
        self.layer = nn.ModuleDict({kind: units})
        mixer, head = nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.ends = Unit("ends", embedding=nn.Embedding(11, 6), mixer=mixer, head=head)

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([unit(grads) for unit in self.modules() if isinstance(unit, Unit)]).sum()


MATRICES = ["0.up.weight", "0.down.weight", "1.up.weight", "1.down.weight"]
BLOCKS, EXPERTS, TENSOR_PARALLEL = "blocks", "experts", "tensor parallel"
MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")
# Each value gives the partition_dim and partition_stride of a weight. The three weights are column-parallel,
# row-parallel and gated column-parallel.
CUTS = {
    "layer.blocks.0.up.weight": (0, 1),
    "layer.blocks.0.down.weight": (1, 1),
    "layer.blocks.1.up.weight": (0, 2),
}


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


def _wrapped(form: str, model: nn.Module) -> Any:
    """Wrap the model with Megatron-FSDP. `form` is EXPERTS, TENSOR_PARALLEL or the name of a ZeRO strategy, which may
    be prefixed with "hybrid" (outer replicas) or "hybrid shard" (optimizer state is also sharded over the outer
    replicas)."""
    from megatron_fsdp import fully_shard_model

    *outer, strategy = form.split() if form not in (TENSOR_PARALLEL, EXPERTS) else ["optim_grads_params"]
    tensor_parallel = 2 if form == TENSOR_PARALLEL else 1
    world = dist.get_world_size() // tensor_parallel
    mesh, options = _mesh((world, tensor_parallel), ("inner", "tp")), dict[str, Any]()
    if outer:
        mesh = _mesh((2, world // 2, tensor_parallel), ("outer", "inner", "tp"))
        flat = _mesh((world, tensor_parallel), ("flat", "tp"))["flat"]
        options = {"dp_outer_dim": "outer", "hybrid_fsdp_group": flat.get_group()}
        options["outer_dp_sharding_strategy"] = "optim" if "shard" in outer else "no_shard"
    if form == EXPERTS:
        options = {"expt_device_mesh": _mesh((2, 2, 1), ("inner", "ep", "tp"))}
    return fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="inner",
        tp_dim="tp",
        fsdp_unit_modules=[Unit],
        zero_dp_strategy=strategy,
        device=torch.device("cpu"),
        # With calculate_per_token_loss, gradients are summed. Averaging them would need a reduction that gloo does not
        # support.
        calculate_per_token_loss=True,
        **options,
    )


class Job:
    """A model wrapped by Megatron-FSDP, its optimizer, and a single-process reference. The reference consists of the
    same model (with this rank's experts), unwrapped, and an optimizer of its own."""

    def __init__(self, form: str, **options: Any) -> None:
        torch.manual_seed(0)
        rank, world, tensor_parallel = dist.get_rank(), dist.get_world_size(), 1 + (form == TENSOR_PARALLEL)
        self.form, self.cuts = form, CUTS if form == TENSOR_PARALLEL else {}
        kind = EXPERTS if form == EXPERTS else BLOCKS
        self.matrices, self.dense_model = [f"layer.{kind}.{name}" for name in MATRICES], Model(kind)
        self.source, self.sources = rank // tensor_parallel, range(world // tensor_parallel)
        self.of_units = range(rank % 2, world, 2) if form == EXPERTS else self.sources
        for p in self.dense_model.layer.parameters() if form == EXPERTS else ():
            p.data += rank % 2
        model = copy.deepcopy(self.dense_model)
        for name, p in model.named_parameters():
            p.data = self.part(p.data, name)
            vars(p).update({"allreduce": False} if kind in name and form == EXPERTS else {})
            vars(p).update(zip(MARKS, (True, *self.cuts[name]), strict=True) if name in self.cuts else {})
        self.model = _wrapped(form, model)
        settings = {"lr": 0.1, "adamw_lr": 0.01, "overrides": {"*up.weight": {"split_sizes": (6, 6)}}}
        settings |= {key: value for key, value in options.items() if key == "weight_decay"}
        groups = param_groups(self.model, **settings)
        assert [row.name for row in groups.rows if row.optimizer == "Muon"] == [*self.matrices, "ends.mixer.weight"]
        self.optimizer = Muon(groups, lr=0.1, **options)
        self.dense = Muon(param_groups(self.dense_model, **settings), lr=0.1, **options)
        self.wrap()

    def wrap(self) -> None:
        from megatron_fsdp import fully_shard_optimizer

        self.optimizer.zero_grad()
        fully_shard_optimizer(self.optimizer)

    def state_dicts(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def params(self) -> dict[str, DTensor]:
        return {name.removeprefix("module."): p for name, p in self.model.named_parameters()}

    def gradients(self, seed: int, source: int) -> dict[str, Tensor]:
        """Return the full gradients of one data-parallel rank, in multiples of 1/8, so that sums are exact in any
        order."""
        named = enumerate(self.dense_model.named_parameters())
        return {name: drawn(p.shape, 1000 * seed + 100 * source + at) for at, (name, p) in named}

    def backward(self, seed: int) -> None:
        mine = {name: self.part(grad, name) for name, grad in self.gradients(seed, self.source).items()}
        self.optimizer.zero_grad()
        self.model(mine).backward()
        self.model.finish_grad_sync()

    def step(self, seed: int, missing: tuple[str, ...] = ()) -> None:
        """Take a step with the Megatron-FSDP optimizer and one with the reference optimizer. The parameters in
        `missing` have no gradient."""
        self.backward(seed)
        of_sources = {source: self.gradients(seed, source) for source in self.sources}
        params = self.params()
        for name, p in self.dense_model.named_parameters():
            sources = self.of_units if name.startswith("layer") else self.sources
            p.grad = torch.stack([of_sources[source][name] for source in sources]).sum(0)
            if name in missing:
                p.grad = params[name].grad = None
        if self.form == TENSOR_PARALLEL:
            with pytest.raises(ValueError, match=r"replicated over the 2 tensor-parallel ranks.* Megatron's own"):
                clip_grad_norm_(self.optimizer, 1.0)
        elif self.form != EXPERTS:
            grads = [p.grad.double().flatten() for p in self.dense_model.parameters() if p.grad is not None]
            norm = torch.cat(grads).norm()
            assert float(clip_grad_norm_(self.optimizer, 1e9)) == float(norm.float()), "not every row counts once"
        Muon.step(self.optimizer)
        self.model.install_optimized_model_weights()
        self.dense.step()

    def check(self) -> set[str]:
        """Assert that this rank's weights and state match the single-process reference bitwise. Return the names of the
        parameters that have elements on this rank."""
        params = self.params()
        for name, q in self.dense_model.named_parameters():
            p, kept = params[name], self.dense.state[q]
            assert self.optimizer.state[p].keys() == kept.keys(), name
            for key, value in {"weight": q.detach(), **kept}.items():
                mine = p if key == "weight" else self.optimizer.state[p][key]
                wanted = value if key in KEPT_KEYS or value.ndim == 0 else self.stored(value, name)
                assert torch.equal(local_if_any(mine), wanted), (name, key)
        return {name for name, p in params.items() if p.to_local().numel()}

    def part(self, full: Tensor, name: str) -> Tensor:
        """Return this rank's tensor-parallel part of a full tensor."""
        cut = self.cuts.get(name)
        return full if cut is None else tensor_parallel_part(full, dist.get_rank() % 2, 2, *cut)

    def stored(self, full: Tensor, name: str) -> Tensor:
        """Return this rank's shard of a full tensor: the slice of its tensor-parallel part that megatron-fsdp
        stores."""
        part, p = self.part(full, name), self.params()[name]
        # Parameters that are not sharded have no attribute `megatron_fsdp_slice`, and every rank stores all of their
        # elements.
        kept = getattr(p, "megatron_fsdp_slice", slice(0, None))
        return part.flatten()[kept.start : kept.stop].view(-1, *part.shape[1:])


def _train(form: str, variant: dict[str, Any]) -> tuple[set[str], list[tuple[int, ...]]]:
    """Train a few steps and check the result of each. Return the names of the parameters that have elements on this
    rank, and the ranks of two device meshes: that of the first matrix and that of the weight of "mixer"."""
    with _megatron():
        job = Job(form, **variant)
        fresh = [local_if_any(t) for p in job.params().values() for t in job.optimizer.state[p].values()]
        assert len(fresh) >= len(job.params()) and not any(t.any() for t in fresh)
        job.step(10)
        job.check()
        job.step(20, (job.matrices[0],))
        stored = job.check()
        meshes = [job.params()[name].device_mesh.mesh for name in (job.matrices[0], "ends.mixer.weight")]
        ranks = [tuple(mesh.flatten().tolist()) for mesh in meshes]
        job.wrap()  # Wrapping the model again, as is done after loading, must keep the optimizer state.
        job.check()
        job.step(30, ("ends.mixer.weight", "ends.mixer.bias"))
        ones = {name: torch.ones_like(p) for name, p in job.dense_model.named_parameters()}
        if form != TENSOR_PARALLEL:
            with torch.no_grad():
                assert torch.equal(job.model(ones), job.dense_model(ones)), "the update was not passed on"
        return stored, ranks


HYPERBALL = {"variant": "normuon+hyperball", "weight_decay": 0.0}


@needs_package
@pytest.mark.parametrize(
    ("form", "world", "variant"),
    [
        ("optim_grads_params", 3, {}),
        ("optim_grads_params", 3, HYPERBALL),
        ("optim_grads", 3, {}),
        ("optim", 3, {"variant": "hyperball", "weight_decay": 0.0}),
        ("no_shard", 2, {}),
        ("hybrid optim_grads_params", 4, {}),
        ("hybrid shard optim_grads_params", 4, {}),
        (TENSOR_PARALLEL, 4, {}),
        (EXPERTS, 4, {}),
    ],
)
def test_update_is_bitwise_equal_to_one_process_and_reaches_the_model(
    form: str, world: int, variant: dict[str, Any]
) -> None:
    """Weights and state must match a single process bitwise. The cases cover parameters without a gradient, empty
    shards (whose gradient is None), strided and contiguous tensor-parallel shards, and experts with their own
    data-parallel group."""
    found = RankPool.cached(world).run(_train, form, variant)
    names = {name for name, _ in Model(EXPERTS if form == EXPERTS else BLOCKS).named_parameters()}
    assert {name for stored, _ in found for name in stored} == names
    if form == EXPERTS:
        everyone = (0, 1, 2, 3)
        assert [ranks for _, ranks in found] == [[of_experts, everyone] for of_experts in ((0, 2), (1, 3)) * 2]


# ------------------------------------------------------------------------------------------------- what is refused

REFUSED = "layer.blocks.0.up.weight"


def _shift(p: Any, elements: int) -> None:
    kept = p.megatron_fsdp_slice
    p.megatron_fsdp_slice = slice(kept.start + elements, kept.stop + elements)


def _of_another_kind(p: Any, key: str) -> None:
    setattr(p, key, torch.ones(1))
    p.grad = None


# Each case gives a function that plants a fault in a parameter, the ranks on which this function is called (as a slice
# of the list of ranks with a nonempty shard), and a pattern for the error message.
FAULTS: list[tuple[Callable[[Any], None], slice, str]] = [
    (lambda p: setattr(p, "grad", None), slice(1), r"ranks .*have no gradient"),
    (partial(_shift, elements=-6), slice(-1, None), r"ranks \(.*\) store shapes .*leave a gap"),
    (partial(_shift, elements=6), slice(-1, None), r"rank \d stores shape \(\d, 6\) .*, which should be \(\d, 6\)"),
    (partial(_shift, elements=-3), slice(-1, None), r"its attribute megatron_fsdp_slice, .* does not say where"),
    (
        lambda p: delattr(p, "megatron_fsdp_slice"),
        slice(1),
        r"its attribute megatron_fsdp_slice, .* does not say where",
    ),
    (partial(_of_another_kind, key="decoupled_grad"), slice(None), r".*use_decoupled_grad=False"),
    (partial(_of_another_kind, key="main_grad"), slice(None), r".*shardmuon\.frameworks\.megatron"),
    (partial(_of_another_kind, key="_mfsdp_parameter_group"), slice(None), r".*experimental version 2, which is not"),
    (
        lambda p: setattr(
            p, "grad", DTensor.from_local(torch.ones(12, 6), p.device_mesh, [Partial()], run_check=False)
        ),
        slice(None),
        r".*Finish the gradient reduction first",
    ),
]


def _refused() -> list[str]:
    """Plant each fault in FAULTS in turn. The step must raise an error and must change neither weights nor state.
    Return the error messages."""
    with _megatron():
        job, said = Job("optim_grads_params"), []
        job.backward(1)
        p, holds = job.params()[REFUSED], [None] * dist.get_world_size()
        dist.all_gather_object(holds, p.to_local().numel())
        ranks = [rank for rank, numel in enumerate(holds) if numel]
        for plant, where, words in FAULTS:
            fresh, grad, kept = Muon(param_groups(job.model, lr=0.1), lr=0.1), p.grad, dict(vars(p))
            if dist.get_rank() in ranks[where]:
                plant(p)
            with pytest.raises(ValueError, match=f"{re.escape(REFUSED)}: {words}") as caught:
                fresh.step()
            said.append(str(caught.value))
            vars(p).clear()
            vars(p).update(kept)
            p.grad = grad
        job.step(2)
        job.check()
        if dist.get_rank() == ranks[-1]:
            _shift(p, -6)
        with pytest.raises(ValueError, match="leave a gap"):
            Muon.step(job.optimizer)
        return said


@needs_package
def test_gradients_parameters_and_rows_that_are_not_the_real_ones_are_refused_on_every_rank(world3: RankPool) -> None:
    first, *others = world3.run(_refused)
    assert others == [first, first]


# -------------------------------------------------------------------------------------------------- checkpoints


UPDATED_BY_ADAMW = ("ends.embedding.weight", "ends.mixer.bias", "ends.head.weight", "layer.blocks.0.norm.weight")


def _save(form: str, folder: str, variant: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    with _megatron():
        job = Job(form, **variant)
        job.step(10)
        job.step(20, UPDATED_BY_ADAMW)
        # Mark step counts as not to be written, as an earlier save does on a rank without elements. This save must
        # ignore the mark.
        for values in job.optimizer.state.values():
            if "step" in values:
                values["step"].__create_write_items__ = lambda *_: []
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
    ("saved", "loaded", "worlds", "variant"),
    [
        ("optim_grads_params", "optim_grads_params", (2, 3), {"variant": "normuon"}),
        ("hybrid shard optim_grads_params", "optim", (4, 3), {}),
        ("optim_grads", "hybrid optim_grads_params", (3, 4), {}),
    ],
)
def test_a_checkpoint_resumes_with_the_same_bits_on_other_ranks(
    saved: str, loaded: str, worlds: tuple[int, int], variant: dict[str, Any], tmp_path: Path
) -> None:
    states = RankPool.cached(worlds[0]).run(_save, saved, str(tmp_path), variant)[0]
    RankPool.cached(worlds[1]).run(_load, loaded, str(tmp_path), variant, *states)


# ---------------------------------------------------------------------------------------------------- wrapping


def _misused() -> None:
    with _megatron():
        from megatron_fsdp import fully_shard

        model, mesh = Model(BLOCKS), _mesh((dist.get_world_size(), 1), ("inner", "tp"))
        optimizer = Muon(param_groups(model, lr=1e-3), lr=1e-3)
        how = {"device_mesh": mesh, "dp_shard_dim": "inner", "tp_dim": "tp", "fsdp_unit_modules": [Unit]}
        with pytest.raises(ValueError, match=r"puts all parameters in one group.* fully_shard_optimizer\(optimizer\)"):
            fully_shard(model, optimizer, device=torch.device("cpu"), **how)
        model = Model(BLOCKS)
        optimizer = Muon(param_groups(model, lr=1e-3), lr=1e-3)
        ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        _wrapped("optim_grads_params", model)(ones).backward()
        with pytest.raises(
            ValueError, match=r"layer\.blocks\.0\.up\.weight: it is the copy that Megatron-FSDP computes with"
        ):
            optimizer.step()


@needs_package
def test_one_group_for_all_and_parameters_from_before_wrapping_are_refused(world4: RankPool) -> None:
    world4.run(_misused)


# ------------------------------------------------------------------------------------------------------ the example


def _all_gather(outputs: list[Tensor], mine: Tensor, group: Any) -> None:
    """Replacement for torch's `all_gather` that gathers tensors of unequal sizes with gloo. torch's own function
    supports unequal sizes only with NCCL."""
    everyone: list[Any] = [None] * len(outputs)
    dist.all_gather_object(everyone, mine, group=group)
    for output, tensor in zip(outputs, everyone, strict=True):
        output.copy_(tensor)


def _example(hybrid: str) -> bool:
    with _megatron(), mock.patch.object(dist, "all_gather", _all_gather):
        module = load_example("megatron_fsdp_training")
        said = io.StringIO()
        started = mock.patch.object(sys, "argv", [module.__file__]), mock.patch.object(torch.cuda, "is_available", bool)
        with started[0], started[1], contextlib.redirect_stderr(said), pytest.raises(SystemExit, match="2"):
            module.main()
        assert "run this where every rank has a GPU" in said.getvalue()
        return bool(module.train(torch.device("cpu"), "optim_grads_params", hybrid, 2, 32, 1))


@needs_package
@pytest.mark.parametrize(("hybrid", "world"), [("shard", 4)])
def test_the_example_trains_with_the_bits_of_one_process_and_says_at_once_that_it_needs_gpus(
    hybrid: str, world: int
) -> None:
    assert RankPool.cached(world).run(_example, hybrid) == [True] * world
