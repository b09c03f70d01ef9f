"""State between steps: the tables of docs/kept.md are whole, and memory goes when the table says so."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
import torch
from kept_in_source import kept_by, kept_in_source
from processes import run_to_the_end
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.testing.tolerances import assert_bitwise

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "kept.md"

# -------------------------------------------------------------------------------------------------- the table is whole


def test_every_cache_of_the_package_stands_in_the_table_and_no_other() -> None:
    section = TABLE.read_text().split("## Of a process\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")][2:]
    listed = [f"{cells[2].strip()}: {cells[1].strip()}".replace("`", "") for cells in rows]
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


def _off_and_on(variant: str, between: str | None, by_hand: bool) -> list[Tensor]:
    """Weights and state after a variant that another one takes turns with; `by_hand` takes its state away."""
    made = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=made)) for shape in ((6, 9), (10, 4))]
    optimizer = Muon(params, lr=0.05, weight_decay=0.0, variant=variant)
    for number in range(6):
        if number in (2, 4):
            optimizer.param_groups[0]["variant"] = between if number == 2 else variant
        if number == 4 and by_hand:
            for state in optimizer.state.values():
                for key in ("second_moment", "weight_radius"):
                    state.pop(key, None)
        elif number == 4 and between is None:
            assert {key for state in optimizer.state.values() for key in state} == {"momentum_buffer"}
        for p in params:
            p.grad = 0.1 + p.detach() * (0.3 + 0.1 * number)
        optimizer.step()
    return [*params, *(value for p in params for _, value in sorted(optimizer.state[p].items()))]


@pytest.mark.parametrize("between", [None, "muon_eq"])
@pytest.mark.parametrize("variant", ["normuon", "hyperball", "normuon+hyperball"])
def test_a_variant_that_was_off_begins_anew(variant: str, between: str | None) -> None:
    found, wanted = (_off_and_on(variant, between, by_hand) for by_hand in (False, True))
    assert_bitwise(found, wanted)


def test_a_file_of_measurements_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    from shardmuon.orthogonalize import tuning

    path = tmp_path / "tuning.json"
    found = []
    for machine in ("one", "other"):
        path.write_text(f'{{"format": {tuning.FORMAT}, "machines": {{"{machine}": {{}}}}}}')
        found.append(tuning.load(str(path)))
    assert list(found[1].machines) == ["other"] and found[0].digest != found[1].digest


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
