"""Tests of the memory that is kept between steps. The tables in docs/kept.md must list every cache, and memory must be
freed at the times that the tables give."""

from __future__ import annotations

import ast
import os
import textwrap
from pathlib import Path

import pytest
from jobs import Job, Spec, unlike
from kept_in_source import kept_by, kept_in_source
from processes import run_to_the_end
from variant_cases import LATER

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "kept.md"

# -------------------------------------------------------------------------------------------------- the table is whole


def _rows(heading: str) -> list[list[str]]:
    """Return the cells of each row of the table under `heading` in docs/kept.md."""
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

MATRICES = {"params": [Spec("wide", (6, 9)), Spec("tall", (10, 4))], "variant": "normuon+hyperball"}
# Parameter groups for tests that change the variant of a group in a single process.
GROUPS = [MATRICES, {"params": [Spec("gain", (9,))], "use_muon": False}]


@pytest.mark.parametrize("between", [None, "muon_eq"])
@pytest.mark.parametrize("variant", ["normuon", "hyperball", "normuon+hyperball", *LATER])
def test_a_variant_that_is_off_has_left_nothing_in_the_state(variant: str, between: str | None) -> None:
    job = Job(GROUPS, weight_decay=0.0)
    for seed, now in enumerate((variant, between)):
        job.groups[0]["variant"] = now
        job.step(seed)
    kept = {key for of_one in job.state.values() for key in of_one}
    assert kept == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_a_forked_worker_that_drops_what_it_got_leaves_nothing_that_the_next_steps_feel() -> None:
    jobs = [Job(GROUPS, weight_decay=0.0) for _ in range(2)]
    for job in jobs:
        job.step(0)
    child = os.fork()
    if not child:
        try:
            jobs.clear()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for job in jobs:
        job.step(1)
    assert not unlike(*(job.held() for job in jobs))


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
