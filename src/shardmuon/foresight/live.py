"""The plan of a running job, counted and priced: `price_plan(optimizer.plan, "h100")`."""

from __future__ import annotations

from pathlib import Path

from shardmuon.errors import ranks_text
from shardmuon.foresight.hardware import Hardware, load, names
from shardmuon.foresight.job import CountedUnit, classes_of, kinds_of
from shardmuon.foresight.layouts import Unit
from shardmuon.foresight.pricing import Price, price
from shardmuon.foresight.types import Exact, Mesh, Stored
from shardmuon.plan.plan import Plan, Policy, make_plan


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
    sets = {id(spec.layout.ranks): spec.layout.ranks for spec in plan.specs}.values()  # hashing them takes long
    ranks = tuple(sorted({rank for of_set in sets for rank in of_set}))
    unit = Unit(ranks, (ranks,), 0)
    counted = CountedUnit(unit, plan, gpus_per_node)
    unit.muon[:] = [sum(bucket.held for bucket in counted.of_copies[0].buckets_of(rank)) for rank in ranks]
    unit.adamw[:] = adamw_elements
    world = max(ranks, default=-1) + 1 if world is None else world
    elements = sum(item.numel for item in plan.items)
    return Exact(
        "the plan given",
        "a live plan",
        elements + adamw_elements,
        elements,
        adamw_elements,
        Mesh(dp=max(1, world), gpus_per_node=gpus_per_node),
        classes_of([counted], world, lambda unit, at: Stored(), lambda buckets: 0),
        kinds_of([counted]),
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


def _splitting(plan: Plan, hardware: Hardware, as_it_is: Price) -> list[str]:
    """A line on what splitting large matrices among owners would take, if there are any."""
    found = list[tuple[float, int, int]]()
    policy = Policy("auto" if plan.policy.route == "auto" else "owner", machine=plan.policy.machine)
    for num in (2, 4) if plan.policy.split_k == 1 else ():
        other = make_plan(plan.specs, policy._replace(split_k=num))
        taken = sum(item.parts > 1 and not item.part for item in other.items)
        if taken:
            step = price(exact_of(other, plan.policy.machine.per_node), hardware).step
            found.append((step.mid / as_it_is.step.mid, taken, num))
    return [
        f"{num} matrices split among {owners} owners each: {times:.3g}x as long, within rounding; write "
        f"Orthogonalizer(split_k={owners})"
        for times, num, owners in sorted(found)[:1]
    ]


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
            lines += _splitting(plan, load(known), found)
    return [*lines, *(f"ranks {ranks_text(choice.ranks)}: {choice.text}" for choice in plan.choices)]
