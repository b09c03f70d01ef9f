"""Megatron-FSDP: any number of rows on any rank, gradients that empty shards lack, a step that must change nothing.

Extents and layouts as numbers, and DTensors cut as Megatron-FSDP cuts them (shardmuon.testing.layouts), which need no
package. That such layouts get the dense update, are audited, clipped and resumed is shown where all layouts are (rows
"megatron-fsdp" of shardmuon.testing.layouts), and with the package itself in test_megatron_fsdp_package.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from standin_cuda import cuda_on_cpu
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardmuon import Muon
from shardmuon.layout.engines import engine_of
from shardmuon.layout.mesh import AxisCut, Extent, pieces_of_extents
from shardmuon.layout.pieces import FlatRange
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.testing.layouts import buffer_layout, mesh_of, row_ranges, shard_like_megatron
from shardmuon.testing.pool import RankPool

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("megatron_fsdp") is None, reason="megatron-fsdp is not installed (docs/megatron.md)"
)

# ------------------------------------------------------------------------------------------------ as numbers alone


def _random_units(count: int) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    rng = random.Random(0)
    for _ in range(count):
        dims = [rng.choice((1, 2, 2, 2, 3)) for _ in range(rng.randint(1, 7))]
        yield (
            [tuple(rng.choice((1, 2, 3, 4, 5, 6, 8, 12)) for _ in range(n)) for n in dims],
            rng.choice((1, 2, 3, 4, 8)),
        )


def test_shards_of_a_buffer_hold_whole_rows_and_every_row_once() -> None:
    for shapes, num_shards in _random_units(300):
        starts, total = buffer_layout(shapes, num_shards)
        taken = sorted((a, a + math.prod(shape)) for a, shape in zip(starts, shapes, strict=True))
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))
        assert total % num_shards == 0
        assert taken[-1][1] <= total
        for shape, ranges in zip(shapes, row_ranges(shapes, num_shards), strict=True):
            held = sorted(r for r in ranges if r[0] < r[1])
            assert [row for a, b in held for row in range(a, b)] == list(range(shape[0]))


@needs_package
def test_the_buffer_is_laid_out_as_the_package_does() -> None:
    with cuda_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_fsdp.experimental.layout import GlobalLayout

        for shapes, num_shards in _random_units(300):
            theirs = GlobalLayout.build(shapes, num_shards)
            assert (list(theirs.tensor_to_offset), theirs.size) == buffer_layout(shapes, num_shards)


def _cut_at_random(rng: random.Random, length: int, parts: int) -> list[tuple[int, int]]:
    edges = [0, *sorted(rng.randint(0, length) for _ in range(parts - 1)), length]
    return list(itertools.pairwise(edges))


def _tensor_parallel_part(full: Tensor, part: int, parts: int, dim: int, stride: int) -> Tensor:
    """The part that Megatron's layers keep: a share of each of `stride` equal blocks, one after the other."""
    return torch.cat([block.chunk(parts, dim)[part] for block in full.chunk(stride, dim)], dim)


def _check_content(layout: ParamLayout, full: Tensor, storages: Mapping[int, Tensor]) -> None:
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        storage = storages[rank]
        assert sum(piece.numel for piece, _ in of_rank) == storage.numel()
        for piece, local in of_rank:
            if isinstance(piece, FlatRange):
                assert torch.equal(full.flatten()[piece.start : piece.stop], storage)
                continue
            there = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
            here = tuple(slice(o, o + n) for o, n in zip(local, piece.size, strict=True))
            assert torch.equal(full[there], storage[here])


def _layout_of(
    extents: Sequence[Extent],
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    ranks: tuple[int, ...],
    cuts: tuple[AxisCut, ...],
) -> ParamLayout:
    held = pieces_of_extents(shape, mesh, ranks, cuts, tuple(extents))
    return ParamLayout(matrix_view(shape), ranks, held)


def test_extents_name_exactly_what_each_rank_stores() -> None:
    # mesh (replica, outer, inner, tensor parallel); any rows on any rank; TP on rows or columns, also in strides
    rng = random.Random(1)
    for _ in range(200):
        sizes = [rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 2)]
        num_parts, stride, dim = sizes[3], rng.choice((1, 1, 2)), rng.randint(0, 1)
        shape = [rng.randint(1, 9), rng.randint(1, 5)]
        shape[dim] *= num_parts * stride
        full = torch.arange(float(math.prod(shape))).view(shape)
        flat = dim == 0 and stride == 1 and rng.random() < 0.3
        storages: dict[int, Tensor] = {}
        extents: list[Extent] = []
        edges: dict[int, list[tuple[int, int]]] = {}
        for rank, (_, outer, inner, part) in enumerate(itertools.product(*(range(n) for n in sizes))):
            kept = _tensor_parallel_part(full, part, num_parts, dim, stride)
            whole = kept.flatten() if flat else kept
            cut = edges.setdefault(part, _cut_at_random(rng, len(whole), sizes[1] * sizes[2]))
            start, stop = cut[inner * sizes[1] + outer]
            storages[rank] = whole[start:stop].clone()
            known = start * (1 if flat else kept.shape[1]) if rng.random() < 0.5 else -1
            extents.append(Extent(tuple(storages[rank].shape), known))
        cuts = (AxisCut(3, dim, True, stride), AxisCut(2, 0), AxisCut(1, 0))
        if num_parts == 1 and stride == 1:
            cuts = cuts[1:]
        ranks = tuple(range(len(extents)))
        layout = _layout_of(extents, tuple(shape), tuple(sizes), ranks, cuts)
        _check_content(layout, full, storages)


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ([Extent((3, 4)), Extent((2, 4))], "leave a gap"),
        ([Extent((3, 4)), Extent((4, 4))], "out of bounds"),
        ([Extent((3, 4)), Extent((3, 3))], r"rank 5 stores shape \(3, 3\), which is not as wide"),
        ([Extent((3, 4), 0), Extent((3, 4), 8)], r"rank 5 says that its part begins at element 8.*store 12"),
        ([Extent((3, 4)), Extent((12,))], r"ranks \[2\] store whole rows of it, ranks \[5\] 1-D runs"),
        ([Extent((13,)), Extent((12,))], "out of bounds of 24 elements"),
    ],
)
def test_extents_that_do_not_make_the_whole_are_refused(extents: list[Extent], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _layout_of(extents, (6, 4), (2,), (2, 5), (AxisCut(0, 0),))


# --------------------------------------------------------------------------------- cut like Megatron-FSDP, without it

SHAPES = {"first": (10, 8), "second": (12, 8), "wide": (4, 16), "few": (2, 8), "bias": (9,)}  # AdamW has the bias


def _full(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _cut(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return shard_like_megatron(full, mesh_of((dist.get_world_size(),), purpose="tests"))


class Job:
    """One model cut like Megatron-FSDP's; ranks without rows of a parameter have no gradient of it, as v1 leaves it."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        for name, t in _cut(_full(0)).items():
            self.params[name] = p = nn.Parameter(t)
            for key in ("megatron_fsdp_dist_index", "megatron_fsdp_slice"):
                setattr(p, key, getattr(t, key))
        matrices = [(name, p) for name, p in self.params.items() if name != "bias"]
        bias = {"params": [("bias", self.params["bias"])], "use_muon": False}
        self.optimizer = Muon([{"params": matrices, "lr": 0.1}, bias], lr=1e-3)
        self.set_gradients(1)

    def set_gradients(self, seed: int) -> None:
        for name, grad in _cut(_full(seed)).items():
            self.params[name].grad = grad if grad.to_local().numel() else None

    def step(self, seed: int) -> None:
        self.set_gradients(seed)
        self.optimizer.step()

    def is_holder(self, name: str, at: int) -> bool:
        """True on one of the ranks that store some of a parameter, by its number among them."""
        holders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(holders, bool(self.params[name].to_local().numel()))
        return dist.get_rank() == [rank for rank, holds in enumerate(holders) if holds][at]

    def snapshot(self) -> list[Tensor]:
        tensors: list[Tensor] = list(self.params.values())
        tensors += [t for p in self.params.values() for t in self.optimizer.state.get(p, {}).values()]
        return [engine_of(t).storage(t).clone() for t in tensors]


def _no_gradients() -> None:
    job = Job()
    for p in job.params.values():
        p.grad = None
    with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient"):
        job.optimizer.step()
    assert not any(job.optimizer.state.values())
    job.step(1)
    assert any(not p.to_local().numel() for p in job.params.values()) or dist.get_rank() < 2  # an empty shard took part
    before = job.snapshot()
    for p in job.params.values():
        p.grad = None
    job.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, job.snapshot(), strict=True))


def test_without_any_gradient_nothing_changes_and_nothing_is_counted(world3: RankPool) -> None:
    world3.run(_no_gradients)


def _lacks_a_gradient(job: Job) -> None:
    if job.is_holder("second", 0):
        job.params["second"].grad = None


def _lies_about_its_place(job: Job) -> None:
    if job.is_holder("second", -1):
        kept = job.params["second"].megatron_fsdp_slice
        job.params["second"].megatron_fsdp_slice = slice(kept.start + 8, kept.stop + 8)


def _lacks_a_row(job: Job) -> None:
    p = job.params["second"]
    local = p.to_local().detach()
    rows = local[: max(0, len(local) - 1)]
    q = nn.Parameter(DTensor.from_local(rows, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()))
    job.optimizer.param_groups[0]["params"][1] = q


def _is_of_another_kind(key: str) -> Callable[[Job], None]:
    def plant(job: Job) -> None:
        setattr(job.params["second"], key, torch.ones(1))
        job.params["second"].grad = None

    return plant


def _is_misplaced(job: Job) -> None:
    p = job.params["second"]
    p.grad = DTensor.from_local(torch.ones(12, 8), p.device_mesh, [Partial()], run_check=False)


def _is_a_copy(job: Job) -> None:
    raw = nn.Parameter(torch.ones(12, 8))
    setattr(raw, "__fsdp_param__", True)  # noqa: B010
    raw.grad = torch.ones(12, 8)
    job.optimizer.param_groups[0]["params"][1] = raw


FAULTS: dict[str, tuple[Callable[[Job], None], str]] = {
    "lacks": (_lacks_a_gradient, r"second: ranks .*have no gradient"),
    "lies": (_lies_about_its_place, r"second: ranks \(0, 1, 2\) store shapes .*says that its part begins at element"),
    "gap": (_lacks_a_row, r"second: .*leave a gap"),
    "decoupled": (_is_of_another_kind("decoupled_grad"), r"second: .*use_decoupled_grad=False"),
    "main_grad": (_is_of_another_kind("main_grad"), r"second: .*shardmuon\.frameworks\.megatron"),
    "placement": (_is_misplaced, r"second: .*Finish the gradient reduction first"),
    "copy": (_is_a_copy, r"second: .*the copy that Megatron-FSDP computes with"),
}


def _refused(which: str) -> str:
    plant, words = FAULTS[which]
    job = Job()
    plant(job)
    before = job.snapshot()
    with pytest.raises(ValueError, match=words) as caught:
        job.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, job.snapshot(), strict=True))
    if which == "lacks":
        job.step(2)  # and it goes on
    return str(caught.value)


@pytest.mark.parametrize("which", FAULTS)
def test_gradients_parameters_and_rows_that_are_not_the_real_ones_are_refused_on_every_rank(
    which: str, world3: RankPool
) -> None:
    assert len(set(world3.run(_refused, which))) == 1


def _placements_say_what_is_stored() -> bool:
    """The control of all this, without a collective: one by placements alone would mix up sizes."""
    second = _cut(_full(0))["second"]
    assert type(engine_of(second)).__name__ == "MegatronFSDPEngine" and isinstance(second, DTensor)
    shape, _ = compute_local_shape_and_global_offset(second.shape, second.device_mesh, second.placements)
    return tuple(shape) == tuple(second.to_local().shape)


def test_placements_alone_are_wrong_here(world4: RankPool) -> None:
    assert not all(world4.run(_placements_say_what_is_stored))


def _in_runs(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """1-D runs of elements that end anywhere in a row."""
    mesh = mesh_of((dist.get_world_size(),), purpose="tests runs")
    mesh._shard_order = [0]
    out: dict[str, Tensor] = {}
    for i, (name, t) in enumerate(full.items()):
        start, stop = _cut_at_random(random.Random(i), t.numel(), dist.get_world_size())[dist.get_rank()]
        local = t.flatten()[start:stop].clone()
        out[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=t.shape, stride=t.stride())
    return out


def _runs() -> None:
    full = {name: t for name, t in _full(0).items() if t.ndim > 1}
    params = {name: nn.Parameter(t) for name, t in _in_runs(full).items()}
    whole = {name: nn.Parameter(t.clone()) for name, t in full.items()}
    optimizer, dense = Muon(list(params.items()), lr=0.1), Muon(list(whole.items()), lr=0.1)
    for seed in (1, 2):
        grads = {name: t for name, t in _full(seed).items() if name in full}
        for name, local in _in_runs(grads).items():
            params[name].grad, whole[name].grad = local, grads[name]
        optimizer.step()
        dense.step()
    wanted = _in_runs({name: q.detach() for name, q in whole.items()})
    assert all(torch.equal(params[name].to_local(), wanted[name].to_local()) for name in full)


def test_runs_that_end_inside_rows_are_whole_matrices_too(world3: RankPool) -> None:
    world3.run(_runs)


def _save_without_offsets(folder: str) -> None:
    job = Job()
    for p in job.params.values():
        del p.megatron_fsdp_slice
    job.step(1)  # the rows of the other ranks are enough for that
    with pytest.raises(CheckpointException, match="this rank's part of Megatron-FSDP's buffer is not known here"):
        dcp.save({"optimizer": job.optimizer.state_dict()["state"]}, checkpoint_id=folder)


def test_state_of_unknown_offset_is_not_saved_by_placements(world3: RankPool, tmp_path: Path) -> None:
    world3.run(_save_without_offsets, str(tmp_path))
