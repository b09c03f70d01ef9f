"""The plan of a running job, counted and priced: `price_plan(optimizer.plan, "h100")`."""

from __future__ import annotations

from pathlib import Path

from shardmuon.errors import ranks_text
from shardmuon.foresight.counting import count_plan
from shardmuon.foresight.hardware import Hardware, load, names
from shardmuon.foresight.job import Share, classes_of, kinds_of
from shardmuon.foresight.pricing import Price, price
from shardmuon.foresight.types import Exact, Mesh, Stored
from shardmuon.plan.plan import Plan


def exact_of(
    plan: Plan,
    gpus_per_node: int = 8,
    adamw_elements: int = 0,
    world: int | None = None,
) -> Exact:
    """Counts of a plan.

    Args:
        plan: Plan of a live optimizer, or made by hand.
        gpus_per_node: Ranks of a node: rank // gpus_per_node is a rank's node.
        adamw_elements: What AdamW steps on each rank; a plan knows nothing of it.
        world: Ranks of the job. Default: as many as the plan names.

    Returns:
        Counts without bytes between steps (`Stored` is empty): a plan does not know how tensors are stored.
    """
    buckets, ranks = count_plan(plan, lambda rank: rank // gpus_per_node), plan.loads()
    voting = {rank for of_set in plan.digests if len(of_set) > 1 for rank in of_set}
    shares = {
        rank: [Share(0, Stored(), found, sum(b.held for b in found), adamw_elements, int(rank in voting))]
        for rank, found in buckets.items()
    }
    elements = sum(item.numel for item in plan.items)
    return Exact(
        "the plan given",
        "a live plan",
        elements + adamw_elements,
        elements,
        adamw_elements,
        Mesh(dp=max(1, max(ranks, default=-1) + 1 if world is None else world), gpus_per_node=gpus_per_node),
        classes_of(shares, lambda buckets: 0),
        kinds_of([plan]),
    )


def price_plan(
    plan: Plan,
    gpu: str | Path | Hardware,
    *,
    gpus_per_node: int | None = None,
    adamw_elements: int = 0,
    world: int | None = None,
) -> Price:
    """Say what a step of a plan takes on a machine: an interval of seconds, with a timeline.

    Args:
        plan: Plan of a live optimizer, or made by hand.
        gpu: A hardware file's name ("h100") or path, or a `Hardware`.
        gpus_per_node: Ranks that the fast links join. Default: the hardware's.
        adamw_elements: What AdamW steps on each rank; a plan knows nothing of it.
        world: Ranks of the job. Default: as many as the plan names.

    Raises:
        ValueError: There is no such hardware.
    """
    hardware = gpu if isinstance(gpu, Hardware) else load(gpu)
    per_node = hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
    return price(exact_of(plan, per_node, adamw_elements, world), hardware)


def summary(plan: Plan) -> list[str]:
    """Lines for the printed plan: what travels, what a step takes, what was chosen and what else there was.

    Seconds are of matrices alone, on the plan's machine. Without a hardware file for it that has their rates, or
    PyYAML, none are told.
    """
    machine, lines = plan.policy.machine, list[str]()
    exact = exact_of(plan, machine.per_node)
    most = max(exact.classes, key=lambda c: c.sent, default=None)
    if most is None or not most.sent:
        return lines
    sides = [side for bucket in most.buckets for side in bucket.sides[:4]]
    inside, across = (sum(side[way] for side in sides) for way in (0, 1))
    messages = sum(side.peers_inside + side.peers_across for side in sides)
    lines.append(
        f"rank {most.example} sends most: {inside / 2**20:.4g} MiB inside its node, {across / 2**20:.4g} MiB between "
        f"nodes of {machine.per_node} ranks, in {messages} messages of {most.exchanges} exchanges"
    )
    known = machine.name.rpartition(" ")[2]
    if known in names():
        try:
            found = price(exact, load(known))
        except (ImportError, ValueError):  # no PyYAML; or the file has no rate of these products
            pass
        else:
            waiting = found.parts["waiting for exchanges"].mid / found.step.mid
            lines.append(f"a step on {machine.name}: {found.step}, of which {waiting:.0%} waits for exchanges")
    return [*lines, *(f"ranks {ranks_text(choice.ranks)}: {choice.text}" for choice in plan.choices)]
