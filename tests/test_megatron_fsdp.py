"""Megatron-FSDP: any number of rows on any rank, gradients that empty shards lack, a step that must change nothing.

Three tiers: extents and layouts as numbers; DTensors cut as Megatron-FSDP cuts them (shardmuon.testing.layouts), which
need no package; and the package itself (0.6.1, v1 and v2) on CPUs, skipped where it is not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
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

from shardmuon import Audit, Muon, audit, clip_grad_norm_
from shardmuon.layout.engines import engine_of
from shardmuon.layout.mesh import AxisCut, Extent, pieces_of_extents
from shardmuon.layout.pieces import FlatRange
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.testing.layouts import buffer_layout, mesh_of, row_ranges, shard_like_megatron
from shardmuon.testing.pool import RankPool, get_pool
from shardmuon.testing.tolerances import assert_rounded

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
FORMS = {
    "fsdp": (lambda world: (world,), {}),
    "hsdp": (lambda world: (2, world // 2), {"outer": "replicate"}),
    "hfsdp": (lambda world: (2, world // 2), {"outer": "shard"}),
    "fsdp+tp": (lambda world: (world // 2, 2), {"tensor_parallel": True}),
}
WORLDS = {"fsdp": (2, 3, 4), "hsdp": (4,), "hfsdp": (4,), "fsdp+tp": (4,)}


def _full(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _cut(form: str, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shape, options = FORMS[form]
    mesh = mesh_of(shape(dist.get_world_size()), purpose=f"tests {form}")
    matrices = {name: t for name, t in full.items() if t.ndim > 1}
    rest = {name: t for name, t in full.items() if t.ndim == 1}
    if options.get("tensor_parallel"):  # vectors are not cut by tensor parallelism here
        flat = mesh_of((dist.get_world_size(),), purpose="tests vectors")
        return shard_like_megatron(matrices, mesh, **options) | shard_like_megatron(rest, flat)
    return shard_like_megatron(full, mesh, **options)


class Job:
    """One model cut like Megatron-FSDP's and the same one dense, stepped on equal gradients."""

    def __init__(self, form: str, **options: Any) -> None:
        self.form = form
        self.params: dict[str, nn.Parameter] = {}
        for name, t in _cut(form, _full(0)).items():
            self.params[name] = p = nn.Parameter(t)
            for key in ("megatron_fsdp_dist_index", "megatron_fsdp_slice"):
                setattr(p, key, getattr(t, key))
        self.whole = {name: nn.Parameter(t) for name, t in _full(0).items()}
        self.optimizer = Muon(self._groups(self.params), **{"lr": 1e-3, **options})
        self.dense = Muon(self._groups(self.whole), **{"lr": 1e-3, **options})

    @staticmethod
    def _groups(params: Mapping[str, Any]) -> list[dict[str, Any]]:
        split = {"params": [("second", params["second"])], "lr": 0.1, "split_sizes": (2, 4), "split_groups": 2}
        rest = [(name, p) for name, p in params.items() if p.ndim > 1 and name != "second"]
        return [split, {"params": rest, "lr": 0.1}, {"params": [("bias", params["bias"])], "use_muon": False}]

    def set_gradients(self, seed: int) -> None:
        full = _full(seed)
        for name, grad in _cut(self.form, full).items():
            self.params[name].grad = grad if grad.to_local().numel() else None  # as v1 leaves it
            self.whole[name].grad = full[name]

    def step(self, seed: int) -> None:
        self.set_gradients(seed)
        self.optimizer.step()
        self.dense.step()
        self.check()

    def check(self) -> None:
        """Weights and all state have the dense one's bits, and the same counters on every rank."""
        for key in ("weight", "momentum_buffer", "exp_avg", "exp_avg_sq", "step"):
            for name, p in self.params.items():
                q = self.whole[name]
                found = p if key == "weight" else self.optimizer.state[p].get(key)
                wanted = q.detach() if key == "weight" else self.dense.state[q].get(key)
                assert (found is None) == (wanted is None), (key, name)
                if wanted is None:
                    continue
                if key != "step":
                    others = {n: torch.zeros(shape) for n, shape in SHAPES.items()}
                    wanted = _cut(self.form, others | {name: wanted})[name].to_local()
                    found = found.detach().to_local()
                assert torch.equal(found, wanted), (key, name)

    def snapshot(self) -> list[Tensor]:
        tensors: list[Tensor] = list(self.params.values())
        tensors += [t for p in self.params.values() for t in self.optimizer.state.get(p, {}).values()]
        return [engine_of(t).storage(t).clone() for t in tensors]


def _three_steps(form: str) -> tuple[list[str], int, int]:
    job = Job(form)
    for seed in (1, 2, 3):
        job.step(seed)
    empty = [name for name, p in job.params.items() if not p.to_local().numel()]
    return empty, job.optimizer.traffic.agreements, job.optimizer.traffic.orthogonalized


@pytest.mark.parametrize(("form", "world"), [(form, world) for form, worlds in WORLDS.items() for world in worlds])
def test_update_is_bitwise_equal_to_one_process_where_empty_shards_lack_gradients(form: str, world: int) -> None:
    found = get_pool(world).run(_three_steps, form)
    assert any(empty for empty, *_ in found), "no rank lacks anything: the case tests nothing"
    assert {agreements for _, agreements, _ in found} == {3}  # one a step
    assert sum(count for *_, count in found) == 3 * 5  # `second` holds two matrices; replicas share the work


def _audited(form: str) -> list[str]:
    job = Job(form, audit=Audit(every=1, samples=8))
    for seed in (1, 2):  # an audit that finds an error raises
        job.step(seed)
    job.set_gradients(3)
    check = audit(job.optimizer, 8)
    job.optimizer.step()
    return [str(finding) for finding in check.found.findings]


@pytest.mark.parametrize("form", ["fsdp", "hsdp", "fsdp+tp"])
def test_the_audit_reads_such_layouts_too_and_finds_nothing(form: str, world4: RankPool) -> None:
    assert world4.run(_audited, form) == [[]] * 4


def _holders_disagree() -> tuple[str, bool]:
    job = Job("fsdp")
    job.step(1)
    job.set_gradients(2)
    name = "wide"
    holders: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(holders, bool(job.params[name].to_local().numel()))
    if dist.get_rank() == holders.index(True):
        job.params[name].grad = None
    before = job.snapshot()
    with pytest.raises(ValueError, match="wide: ranks") as caught:
        job.optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, job.snapshot(), strict=True))
    job.step(2)  # and it goes on
    return str(caught.value), same


def test_a_gradient_that_a_holder_lacks_is_refused_on_every_rank(world3: RankPool) -> None:
    found = world3.run(_holders_disagree)
    assert len({text for text, _ in found}) == 1
    assert all(same for _, same in found)
    assert "have no gradient" in found[0][0]


def _no_gradients() -> bool:
    job = Job("fsdp")
    with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient"):
        job.optimizer.step()
    untouched = not any(job.optimizer.state.values())
    job.step(1)
    before = job.snapshot()
    for p in job.params.values():
        p.grad = None
    job.optimizer.step()
    return untouched and all(torch.equal(a, b) for a, b in zip(before, job.snapshot(), strict=True))


def test_without_any_gradient_nothing_changes_and_nothing_is_counted(world3: RankPool) -> None:
    assert world3.run(_no_gradients) == [True] * 3


def _lying_about_its_place(rank: int) -> str:
    job = Job("fsdp")
    holders: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(holders, bool(job.params["second"].to_local().numel()))
    if dist.get_rank() == [i for i, held in enumerate(holders) if held][-1]:
        kept = job.params["second"].megatron_fsdp_slice
        job.params["second"].megatron_fsdp_slice = slice(kept.start + 8, kept.stop + 8)
    with pytest.raises(ValueError, match=r"second: ranks \(0, 1, 2\) store shapes ") as caught:
        job.optimizer.prepare()
    return str(caught.value)


def test_an_offset_that_the_rows_of_other_ranks_contradict_is_refused(world3: RankPool) -> None:
    found = world3.run(_lying_about_its_place, 1)
    assert len(set(found)) == 1
    assert "says that its part begins at element" in found[0]


def _a_row_is_missing() -> str:
    job = Job("fsdp")
    p = job.params["second"]
    local = p.to_local().detach()
    job.params["second"] = q = nn.Parameter(
        DTensor.from_local(
            local[: max(0, len(local) - 1)], p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
    )
    with pytest.raises(ValueError, match=r"second: .*leave a gap") as caught:
        Muon([("second", q)], lr=1e-3).step()
    return str(caught.value)


def test_rows_that_no_rank_stores_are_refused(world3: RankPool) -> None:
    assert len(set(world3.run(_a_row_is_missing))) == 1


def _torchs_own_reading() -> tuple[float, bool]:
    """The reading of such a parameter by placements alone: the control of all this."""
    full = _full(0)
    second = _cut("hfsdp", full)["second"]
    try:
        wrong = float((second.full_tensor() - full["second"]).abs().max())
    except Exception:
        wrong = math.inf
    return wrong, engine_of(second) is engine_of(_cut("fsdp", full)["first"])


def test_placements_alone_are_wrong_here(world4: RankPool) -> None:
    found = world4.run(_torchs_own_reading)
    assert max(wrong for wrong, _ in found) > 0.1
    assert all(special for _, special in found)


def _norms(form: str) -> tuple[float, float]:
    job = Job(form)
    job.set_gradients(1)
    found = clip_grad_norm_(job.optimizer, 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(job.whole.values(), 0.5)
    clipped = _cut(form, {name: q.grad for name, q in job.whole.items()})
    # ours is rounded once, torch's sums squares in fp32 and takes two roots; then 1e-6, the quotient and the product
    norm = 4 + math.sqrt(sum(q.numel() for q in job.whole.values()) / 6)
    assert_rounded(found, wanted, roundings=norm)
    for name, p in job.params.items():
        if p.grad is not None:
            assert_rounded(p.grad.to_local(), clipped[name].to_local(), roundings=norm + 2 * 3, what=name)
    return float(found), float(wanted)


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_norm_counts_every_row_once(form: str, world4: RankPool) -> None:
    found = world4.run(_norms, form)
    assert len(set(found)) == 1  # the same bits on every rank
    assert found[0][0] > 0.5  # so it was clipped


def _unusable(which: str) -> str:
    job = Job("fsdp")
    job.set_gradients(1)
    p = job.params["second"]
    if which == "decoupled":
        p.decoupled_grad, p.grad = torch.ones(1), None
    elif which == "main_grad":
        p.main_grad, p.grad = torch.ones(1), None
    elif which == "placement":
        partial = DTensor.from_local(torch.ones(12, 8), p.device_mesh, [Partial()], run_check=False)
        p.grad = partial
    elif which == "raw":
        raw = nn.Parameter(torch.ones(12, 8))
        setattr(raw, "__fsdp_param__", True)  # noqa: B010
        raw.grad = torch.ones(12, 8)
        job.optimizer.param_groups[0]["params"][0] = raw
    before = job.snapshot()
    with pytest.raises(ValueError, match="second: ") as caught:
        job.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, job.snapshot(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("decoupled", "use_decoupled_grad=False"),
        ("main_grad", "shardmuon.frameworks.megatron"),
        ("placement", "Finish the gradient reduction first"),
        ("raw", "the copy that Megatron-FSDP computes with"),
    ],
)
def test_gradients_and_parameters_that_are_not_the_real_ones_are_refused(
    which: str, message: str, world3: RankPool
) -> None:
    assert all(message in text for text in world3.run(_unusable, which))


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


def _runs() -> list[bool]:
    full = {name: t for name, t in _full(0).items() if t.ndim > 1}
    params = {name: nn.Parameter(t) for name, t in _in_runs(full).items()}
    whole = {name: nn.Parameter(t.clone()) for name, t in full.items()}
    options = {"lr": 0.1}
    optimizer, dense = Muon(list(params.items()), **options), Muon(list(whole.items()), **options)
    for seed in (1, 2):
        grads = {name: t for name, t in _full(seed).items() if name in full}
        for name, local in _in_runs(grads).items():
            params[name].grad, whole[name].grad = local, grads[name]
        optimizer.step()
        dense.step()
    wanted = _in_runs({name: q.detach() for name, q in whole.items()})
    return [torch.equal(params[name].to_local(), wanted[name].to_local()) for name in full]


def test_runs_that_end_inside_rows_are_whole_matrices_too(world3: RankPool) -> None:
    assert world3.run(_runs) == [[True] * 4] * 3


def _save_without_offsets(folder: str) -> str:
    job = Job("fsdp")
    for p in job.params.values():
        del p.megatron_fsdp_slice
    job.step(1)  # the rows of the other ranks are enough for that
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"optimizer": job.optimizer.state_dict()["state"]}, checkpoint_id=folder)
    return str(caught.value)


def test_state_of_unknown_offset_is_not_saved_by_placements(world3: RankPool, tmp_path: Path) -> None:
    for text in world3.run(_save_without_offsets, str(tmp_path)):
        assert "this rank's part of Megatron-FSDP's buffer is not known here" in text


def _save(form: str, folder: str) -> dict[str, Any]:
    job = Job(form)
    job.step(1)
    job.step(2)
    dcp.save({"state": job.optimizer.state_dict()["state"]}, checkpoint_id=folder)
    return {"weights": {name: q.detach() for name, q in job.whole.items()}, "dense": job.dense.state_dict()}


def _load(form: str, folder: str, weights: dict[str, Tensor], dense: dict[str, Any]) -> None:
    job = Job(form)
    job.step(9)  # so that there is state to load into
    saved = job.optimizer.state_dict()
    dcp.load({"state": saved["state"]}, checkpoint_id=folder)
    job.optimizer.load_state_dict(saved)
    job.dense.load_state_dict(dense)
    with torch.no_grad():
        for name, local in _cut(form, weights).items():
            job.params[name].to_local().copy_(local.to_local())
            job.whole[name].copy_(weights[name])
    job.check()
    job.step(3)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("hfsdp", "fsdp"), ("fsdp", "hsdp"), ("fsdp", "fsdp+tp"), ("fsdp+tp", "hfsdp")]
)
def test_state_resumes_with_the_same_bits_in_another_form(
    saved: str, loaded: str, world4: RankPool, tmp_path: Path
) -> None:
    kept = world4.run(_save, saved, str(tmp_path))[0]
    world4.run(_load, loaded, str(tmp_path), **kept)
