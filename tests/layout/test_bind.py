"""The table that ranks make of what each says: it names exactly the elements that each rank stores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from simulated import stored
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.errors import Refused
from shardmuon.layout.bind import Listed, bind
from shardmuon.layout.engines import engine_of
from shardmuon.layout.grid import Ties, grids_of
from shardmuon.layout.mesh import OnMesh
from shardmuon.layout.table import kept_layout
from shardmuon.layout.views import kept_view, matrix_view
from shardmuon.options import view_options
from shardmuon.step.binding import fingerprint
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.layouts import LAYOUTS, PARAMS, mesh_of, parameters

PARAMS_VIEWS = {name: matrix_view(case.shape, **case.options) for name, case in PARAMS.items()}


def _listed(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Listed]:
    """List parameters as an optimizer does, each in a group of its own."""
    groups = [{"params": [p], "param_names": [name], **PARAMS[name].options, **options} for name, p in params.items()]
    optimizer = Muon([{**g, "params": [(g["param_names"][0], g["params"][0])]} for g in groups], lr=0.1)
    return [
        Listed(name, name, p, group, view_options(group))
        for (name, p), group in zip(params.items(), optimizer.param_groups, strict=True)
    ]


def _bound(name: str) -> tuple[list[str], list[bytes]]:
    """Parameters of which the table says something else than what is stored here, and digests of its layouts."""
    world, rank, case, wrong = dist.get_world_size(), dist.get_rank(), LAYOUTS[name], []
    full = {key: torch.arange(math.prod(c.shape), dtype=torch.float32).view(c.shape) for key, c in PARAMS.items()}
    listed = _listed(parameters(case.build(full, case.mesh(world))), case.options(world))
    table = bind(rank, listed, fingerprint=fingerprint)
    for one, layout in zip(table.params, table.layouts, strict=True):
        storage, held = local_if_any(one.param).detach(), layout.of_rank(rank)
        fits = layout.view == PARAMS_VIEWS[one.name] and sum(h.piece.numel for h in held) == storage.numel()
        if not fits or not torch.equal(stored(held, full[one.name]).flatten(), storage.flatten()):
            wrong.append(one.name)
    return wrong, [layout.digest for layout in table.layouts if world == len(layout.ranks)]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        *((3, name) for name in ("fsdp2", "hsdp", "tp stride 2", "mcore buffers", "megatron-fsdp")),
        *((4, name) for name in LAYOUTS),
    ],
)
def test_the_table_names_what_each_rank_stores(world: int, layout: str) -> None:
    everyone = get_pool(world).run(_bound, layout)
    assert [wrong for wrong, _ in everyone] == [[]] * world
    assert all(digests == everyone[0][1] for _, digests in everyone)


STACKS = {name: case for name, case in PARAMS.items() if case.options.get("view") == "stack"}


def _kept(layout: str) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each stack: its experts, those of which this rank has numbers by its table, and those that it stores."""
    world, case, rank, found = dist.get_world_size(), LAYOUTS[layout], dist.get_rank(), []
    full = {n: torch.arange(c.shape[0]).view(-1, 1, 1).expand(c.shape).float().contiguous() for n, c in STACKS.items()}
    table = bind(rank, _listed(parameters(case.build(full, case.mesh(world))), case.options(world)))
    for one, of_param in zip(table.params, table.layouts, strict=True):
        engine, place = engine_of(one.param), None
        if engine.believes_placements:
            place = OnMesh(*engine.claim(one.param, one.group).form[1:])  # type: ignore[arg-type]
        view, experts = kept_view(of_param.view, [3] * len(of_param.view.matrices)), torch.arange(len(full[one.name]))
        numbers = stored(kept_layout(of_param, view, place).of_rank(rank), experts[:, None].expand(view.shape))
        storage = local_if_any(one.param).detach()
        here = [int(expert.flatten()[0]) for expert in storage] if storage.numel() else []
        found.append((experts.tolist(), numbers[..., :1].flatten().tolist(), here))
    return found


OF_STORED = ("ep", "ep+fsdp", "fsdp2", "lone strided")  # a mesh axis cuts the experts and nothing else
ON_NO_MESH = ("ddp", "tp column", "mcore buffers", "megatron-fsdp")


@pytest.mark.parametrize("layout", [*OF_STORED, "hsdp", "two dims", "one dim twice", *ON_NO_MESH])
def test_a_rank_has_the_numbers_of_the_experts_that_it_stores(layout: str, world4: RankPool) -> None:
    """Numbers lie in the order of the experts; where no axis of a mesh cuts the experts, a rank has those of all."""
    for found in world4.run(_kept, layout):
        for experts, told, stored_here in found:
            if layout in ON_NO_MESH:
                assert told == experts
            elif stored_here:
                assert told == stored_here or (told == experts and layout not in OF_STORED)


# ------------------------------------------------------------------------------------------------ what does not fit


def _plain(rank: int, sets: Mapping[str, tuple[int, ...]]) -> list[Listed]:
    """Replicas of one matrix on each of these sets of ranks."""
    return [
        Listed(name, name, torch.ones(4, 6), {"use_muon": True, "process_group": ranks}, {})
        for name, ranks in sets.items()
        if rank in ranks
    ]


Flaw = Callable[[int], list[Listed]]  # of a rank
CHAIN = {"a": (0, 1), "b": (1, 2), "c": (2, 3)}
ALL = {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}


def _each(change: Callable[[int, Listed], Listed], sets: Mapping[str, tuple[int, ...]] = CHAIN) -> Flaw:
    return lambda rank: [change(rank, one) for one in _plain(rank, sets)]


def _marked(rank: int) -> list[Listed]:
    found = _plain(rank, CHAIN)
    if rank == 3:
        found[0].param.tensor_model_parallel, found[0].param.partition_dim = True, 0  # type: ignore[attr-defined]
    return found


FLAWS: dict[str, tuple[Flaw, str]] = {
    "lacks one": (
        lambda rank: _plain(rank, ALL)[: 1 if rank == 2 else 2],
        r'rank 0 lists 2 parameters, rank 2 lists 1; one of them lacks "b: ',
    ),
    "other option": (
        _each(lambda rank, one: one._replace(options=f"momentum={0.9 + 0.01 * (rank == 3)}")),
        r"ranks \(2, 3\) share parameters but describe them differently: .*momentum=0.91",
    ),
    "other view": (
        _each(lambda rank, one: one._replace(view={"transposed": rank == 0})),
        r"ranks \(0, 1\) share .* rank 0 lists transposed=True, rank 1 lists transposed=False",
    ),
    "other values": (
        _each(lambda rank, one: one._replace(param=one.param + (rank == 0))),
        r"a: ranks 0 and 1 should hold replicas .* but their values differ",
    ),
    "other shape": (
        _each(lambda rank, one: one._replace(param=torch.ones(4, 5 if rank == 0 else 6))),
        r"ranks \(0, 1\) share parameters but describe them differently: .*\(4, 5\)",
    ),
    "marked": (_marked, r"c: its attribute tensor_model_parallel says"),
    "no view": (
        _each(lambda rank, one: one._replace(view={"split_sizes": 5 if rank < 2 and one.name == "a" else 1})),
        r"a: ranks \(0, 1\) store shapes .*: split_sizes=5 does not divide the 4 rows",
    ),
    "no grid": (  # rank 3 says that it shares a matrix with rank 0 over two process groups that form none
        _each(lambda rank, one: one._replace(group={**one.group, "tp_group": (0, 1) if rank < 2 else (3, 2)}), ALL),
        r"form no grid with those of the other ranks",
    ),
}


def _refusals(names: Sequence[str]) -> dict[str, str]:
    """Errors by flaw; then a table of parameters in order, which shows that nobody waits for anybody."""
    rank, found = dist.get_rank(), {}
    for name in names:
        try:
            bind(rank, FLAWS[name][0](rank), fingerprint=fingerprint)
        except Refused as refused:
            found[name] = str(refused)
    table = bind(rank, _plain(rank, CHAIN), fingerprint=fingerprint)
    found["component"] = str(table.component)
    return found


def test_what_does_not_fit_is_raised_on_every_rank_of_the_component(world4: RankPool) -> None:
    """Ranks that share nothing with those at fault raise it, too."""
    everyone = world4.run(_refusals, list(FLAWS))
    assert all(found == everyone[0] for found in everyone)
    assert everyone[0]["component"] == "(0, 1, 2, 3)"
    for name, (_, message) in FLAWS.items():
        with pytest.raises(ValueError, match=message):
            raise ValueError(everyone[0][name])


def _read(placement: Placement) -> int:
    """How many storages a table is made with fingerprints of."""
    local = torch.empty(2, 6, device="meta")
    param = nn.Parameter(DTensor.from_local(local, mesh_of((4,)), [placement], run_check=False))
    seen: list[Tensor] = []
    listed = [Listed("a", "a", param, {"use_muon": True}, {}), *_plain(dist.get_rank(), {"b": (0, 1)})]
    bind(dist.get_rank(), listed, fingerprint=lambda storage: seen.append(storage) or 0)  # type: ignore[func-returns-value]
    return len(seen)


def test_only_what_has_replicas_is_read(world4: RankPool) -> None:
    """What is sharded alone may lie on meta still, and takes seconds to read where it is offloaded."""
    assert world4.run(_read, Shard(0)) == [1, 1, 0, 0]
    assert world4.run(_read, Replicate()) == [2, 2, 1, 1]


def test_grids_are_found_from_what_each_rank_knows() -> None:
    """200 grids of shuffled ranks, several in one component: each rank's two groups give the whole grid to all."""
    draw = random.Random(1)
    for _ in range(200):
        known: dict[int, list[Ties]] = {}
        wanted = {}
        for _ in range(draw.randint(1, 3)):
            parts, replicas = draw.randint(1, 4), draw.randint(1, 4)
            ranks = draw.sample(range(16), parts * replicas)
            rows = tuple(tuple(ranks[i * parts : (i + 1) * parts]) for i in range(replicas))
            columns = [tuple(sorted(row[at] for row in rows)) for at in range(parts)]
            for row in rows:
                for at, rank in enumerate(row):
                    ties = Ties(row, columns[at])
                    known.setdefault(rank, []).append(ties)
                    wanted[ties] = tuple(sorted(rows))
        assert grids_of(known) == wanted


AB, CD, DC, A_C, B_D = (0, 1), (2, 3), (3, 2), (0, 2), (1, 3)


@pytest.mark.parametrize(
    ("known", "message"),  # of ranks 0, 1, ..: parts and mates
    [
        ([(AB, A_C), (AB, B_D), ((2,), A_C)], r"rank 2 has tp_group \(2,\)"),
        ([(AB, A_C), (AB, B_D), (CD, A_C), ((3,), (3,))], r"rank 3 has tp_group \(3,\) and process_group \(3,\)"),
        (
            [(AB, A_C), (AB, B_D), (DC, A_C), (DC, B_D)],
            r"rank 2 has tp_group \(3, 2\) and process_group \(0, 2\)",
        ),
        (
            [(AB, A_C), (AB, (1,)), (CD, A_C), (CD, B_D)],
            r"rank 2 has tp_group \(2, 3\) and process_group \(0, 2\)",
        ),
        (
            [(AB, A_C), (AB, (1, 3, 5)), (CD, A_C), (CD, B_D)],
            r"rank 1 has tp_group \(0, 1\) and process_group \(1, 3, 5\)",
        ),
        (
            [(AB, AB, (1, 0), AB), ((1, 0), AB, AB, AB)],
            r"form no grid .* rank 0 has tp_group \(0, 1\) and process_group \(0, 1\) or",
        ),
    ],
)
def test_groups_that_form_no_grid_are_refused(known: list[tuple[tuple[int, ...], ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grids_of({rank: list(map(Ties, of[::2], of[1::2])) for rank, of in enumerate(known)})


def test_a_parameter_whose_sharers_cannot_be_told_is_named() -> None:
    optimizer = Muon([("up", torch.nn.Parameter(torch.ones(3, 4)))], lr=0.1)
    with (
        mock.patch.object(type(engine_of(torch.ones(1))), "ties", side_effect=ValueError("its group is gone")),
        pytest.raises(ValueError, match="up: its group is gone"),
    ):
        optimizer.prepare()
