"""Specs of parameters for the planner: how each matrix is orthogonalized and why, its cost and its wire.

Ranks of a running job and `shardmuon plan`, which has none, make their specs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from shardmuon.comm.vote import Unlike
from shardmuon.layout.table import ParamLayout
from shardmuon.momentum.keeper import tiles_cut
from shardmuon.momentum.stores import BLOCK
from shardmuon.options import Exchange, Orthogonalizer
from shardmuon.orthogonalize.choice import Choice, Chooser, Task, factor_flops, is_narrow, work
from shardmuon.orthogonalize.gram import schedule_fault
from shardmuon.plan.plan import Gram, Kept, Spec
from shardmuon.step.options import GroupOptions
from shardmuon.variants import Stage, Stages, gram_fault, keeping


class WireFormat(NamedTuple):
    """Bytes per element of wires, and True if matrices with half-precision products have narrower ones all the same:
    see `Exchange.dtype`."""

    itemsize: int
    narrows: bool

    @classmethod
    def of(cls, orthogonalizer: Orthogonalizer, exchange: Exchange, *, doubles: bool) -> WireFormat:
        """The wire of a parameter, as the optimizer's options ask for it. `doubles`: True for a parameter of fp64."""
        if exchange.dtype is not None:
            return cls(exchange.dtype.itemsize, False)
        if doubles or orthogonalizer.method == "reference" or orthogonalizer.products_dtype == torch.float64:
            return cls(8, False)  # fp64 gradients may lie outside the range of fp32
        return cls(4, True)

    def itemsize_of(self, choice: Choice) -> int:
        """Bytes per element of the wire of a matrix that is orthogonalized as `choice` says."""
        return 2 if self.narrows and is_narrow(choice) else self.itemsize


def make_spec(
    name: str,
    layout: ParamLayout,
    options: GroupOptions,
    device: torch.device,
    chooser: Chooser,
    wire: WireFormat,
    kept_of: Callable[[Stage], ParamLayout],
) -> Spec:
    """One parameter as the planner sees it.

    Args:
        name: Name for messages.
        layout: Who stores what.
        options: Options of its group, which is one of matrices.
        device: Device of the parameter.
        chooser: The optimizer's chooser.
        wire: Of this parameter.
        kept_of: A stage that keeps anything -> who keeps what.

    Raises:
        ValueError: A choice cannot run on the device.
    """
    assert options.settings is not None, "a group of matrices"
    coefficients, stages = options.settings.coefficients, options.settings.stages
    shapes = [(m.rows, m.cols) for m in layout.view.matrices]
    tasks = {shape: Task(*shape, coefficients, chooser.device or device) for shape in dict.fromkeys(shapes)}
    choices = {shape: chooser.choice(task) for shape, task in tasks.items()}
    sizes = {shape: wire.itemsize_of(choice) for shape, choice in choices.items()}
    costs = {shape: work(choice, *tasks[shape]) for shape, choice in choices.items()}
    grams = {shape: _gram(choice, tasks[shape], sizes[shape], stages) for shape, choice in choices.items()}
    return Spec(
        name,
        layout,
        tuple(str(choices[shape]) for shape in shapes),
        tuple(costs[shape] for shape in shapes),
        options.batch,
        device.type,
        tuple(sizes[shape] for shape in shapes),
        tuple(Kept(kept_of(stage), stage.travels) for stage in keeping(stages)),
        tuple(grams[shape] for shape in shapes),
        tuple(choices[shape].reason for shape in shapes),
    )


def _gram(choice: Choice, task: Task, itemsize: int, stages: Stages) -> Gram:
    """The Gram route for matrices of one shape; its wire is never narrower than fp32."""
    fault = gram_fault(stages)
    if not fault and choice.method not in ("standard", "gram"):
        fault = f"method={choice.method!r} has no Gram form"
    fault = fault or schedule_fault(task.coefficients, torch.float64 if itemsize == 8 else torch.float32)
    share = 0.625 if task.device.type == "cpu" else 1.0  # of symmetric products, see `choice.work`
    return Gram(factor_flops(min(task.rows, task.cols), task.coefficients, share), fault)


def check_blocks(name: str, layout: ParamLayout) -> None:
    """Raise Unlike if columns are cut inside a block that 8-bit momentum has one scale for."""
    for rank, found in tiles_cut(layout):
        raise Unlike(
            f"{name}: momentum_dtype='int8' keeps one scale for {BLOCK} columns, but rank {rank} holds {found}, which "
            "cuts such a block in two. Write Storage(momentum_dtype=torch.bfloat16), or cut the columns at multiples "
            f"of {BLOCK} only (Shard(0), another number of ranks, whole trailing dims)"
        )
