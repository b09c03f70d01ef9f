"""State between steps: the tables of docs/kept.md are whole, and memory goes when the table says so."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import Cut, Job, Spec, as_in, unlike
from kept_in_source import kept_by, kept_in_source
from processes import run_to_the_end
from spectra import normal
from torch import nn
from variant_cases import LATER

from shardmuon.testing import RankPool
from shardmuon.variants import KEPT_KEYS

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "kept.md"

# -------------------------------------------------------------------------------------------------- the table is whole


def _rows(heading: str) -> list[list[str]]:
    """Cells of each row of the table under a heading."""
    section = TABLE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"][
        2:
    ]


def test_every_cache_of_the_package_stands_in_the_table_and_no_other() -> None:
    listed = [f"{where}: {name}".replace("`", "") for name, where, *_ in _rows("Of a process")]
    assert sorted(listed) == sorted(kept_in_source())


def test_the_search_finds_caches_of_every_kind() -> None:
    planted = textwrap.dedent(
        """
        _A = {}
        _B: dict[int, int] = {}
        _C = weakref.WeakKeyDictionary()
        _D = {"full": 1}
        _E: list[int] = []
        _F = defaultdict(list)
        class K:
            seen = {}
        @lru_cache(maxsize=2)
        def f(): ...
        @functools.cache
        def g(): ...
        def h():
            global _G
            _G = 1
        """
    )
    assert set(kept_by(ast.parse(planted))) == {"_A", "_B", "_C", "_E", "_F", "seen", "f", "g", "_G"}


# --------------------------------------------------------------------------------------------- memory goes when it says


def _job(variant: str | None, cut: Cut = torch.clone) -> Job:
    """Two matrices, one of them tall, and a vector."""
    matrices = {"params": [Spec("wide", (6, 9), cut), Spec("tall", (10, 4), cut)], "variant": variant}
    vector = {"params": [Spec("gain", (9,), cut)], "use_muon": False}
    return Job([matrices, vector], lr=0.05, weight_decay=0.0)


def _steps(job: Job, *seeds: int) -> None:
    for seed in seeds:
        job.step(seed)


def _off_and_on(variant: str, between: str | None, cut: Cut = torch.clone, by_hand: bool = False) -> Job:
    """A variant that another one takes turns with; `by_hand`: whose state is taken away by hand meanwhile."""
    job = _job(variant, cut)
    _steps(job, 0, 1)
    job.groups[0]["variant"] = between
    _steps(job, 2, 3)
    states = job.state.values()
    if between is None:
        assert {key for of_one in states for key in of_one} == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    for of_one in states if by_hand else ():
        for key in KEPT_KEYS:
            of_one.pop(key, None)
    job.groups[0]["variant"] = variant
    _steps(job, 4, 5)
    return job


@pytest.mark.parametrize("between", [None, "muon_eq"])
@pytest.mark.parametrize("variant", ["normuon", "hyperball", "normuon+hyperball", *LATER])
def test_a_variant_that_was_off_begins_anew(variant: str, between: str | None) -> None:
    assert not unlike(_off_and_on(variant, between).held(), _off_and_on(variant, between, by_hand=True).held())


def _on_shards(variant: str) -> None:
    cut = as_in("fsdp2")
    found = _off_and_on(variant, None, cut)
    assert not unlike(found.held(), _off_and_on(variant, None, cut, by_hand=True).held())
    assert not found.unlike_whole(_off_and_on(variant, None).named())


def test_nor_does_it_remember_on_shards(world2: RankPool) -> None:
    for variant in ("normuon", "hyperball", *LATER):
        world2.run(_on_shards, variant)


def _skip(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    job.set_gradients(7)
    job.first.grad.fill_(torch.inf)  # type: ignore[union-attr]
    scaler.step(job.optimizer)


def _fork(job: Job) -> None:
    """Fork workers as a data loader does: they drop what they got, and end."""
    child = os.fork()
    if not child:
        try:
            del job
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _add_and_remove_a_group(job: Job) -> None:
    more = nn.Parameter(normal(5, 5, seed=9))
    job.optimizer.add_param_group({"params": [("more", more)]})
    job.optimizer.prepare()
    del job.groups[-1]
    job.state.pop(more, None)


EVENTS: list[Callable[[Job], None]] = [_skip, _fork, _add_and_remove_a_group]  # others: test_sequences.py


@pytest.mark.parametrize("variant", [None, "normuon+hyperball"])
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_leaves_nothing_that_the_next_steps_feel(event: Callable[[Job], None], variant: str | None) -> None:
    job, quiet = _job(variant), _job(variant)
    for one in (job, quiet):
        _steps(one, 0, 1)
    event(job)
    assert not unlike(job.held(gradients=False), quiet.held(gradients=False))
    for one in (job, quiet):
        _steps(one, 2, 3)
    assert not unlike(job.held(), quiet.held())


# ------------------------------------------------------------------------------------- another default process group

_TWO_LIVES = textwrap.dedent(
    """
    import sys, warnings
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from shardmuon import Muon, clip_grad_norm_

    rank, folder = int(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")

    def join(life, number):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{life}", rank=number, world_size=2)

    def grads(params, number):
        for at, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + at))

    join(0, rank)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    shared, quiet = Muon(params, lr=0.02, process_group=dist.group.WORLD), Muon(alone, lr=0.02)
    named = Muon([nn.Parameter(torch.ones(4, 4))], lr=0.02, process_group=dist.new_group([0, 1]))
    named.prepare()
    old = FSDP(nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu"))

    def step_both(number):
        for optimizer, listed in ((shared, params), (quiet, alone)):
            grads(listed, number)
            norm = torch.cat([p.grad.flatten() for p in listed]).norm()
            assert abs(float(clip_grad_norm_(optimizer, 1.0) / norm) - 1) < 1e-6
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(alone, params, strict=True))

    step_both(0)
    dist.barrier()
    dist.destroy_process_group()

    join(1, 1 - rank)  # the other's number; the default group is that of today
    step_both(1)
    step_both(2)
    try:
        named.prepare()
    except ValueError as error:
        assert "has been destroyed. Make a new group" in str(error), error
    else:
        raise AssertionError("a group that is gone was taken")

    # a model of the group that is gone is still there
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = Muon(model, lr=0.02)
    model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert old is not None
    dist.destroy_process_group()
    print("done")
    """
)


@pytest.mark.ranks
@pytest.mark.apart
def test_nothing_is_kept_from_one_default_group_to_the_next(tmp_path: Path) -> None:
    for code, out, err in run_to_the_end(_TWO_LIVES, 2, tmp_path, str(tmp_path)):
        assert code == 0 and out.strip() == "done", err
