"""Functions that run a script from examples/ on several ranks. On each rank, they record the optimizer's plan, the
number of orthogonalized matrices, the findings of an audit, and the final weights. Importing the frameworks takes
seconds, so they are imported only once, in the process from which ranks are forked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from demo_script import load_example

from shardmuon.testing import RankPool

# Number of the audited step, counted from 1. Every run of an example takes more steps, even one that resumes halfway.
AUDITED = 2

RankPool.preload("stack_preload")


@dataclass
class Seen:
    """Observations on one rank that ran an example.

    Attributes:
        owners: Ranks that orthogonalize each parameter's matrices according to the plan, keyed by parameter name.
        mine: Number of matrices that this rank orthogonalizes according to the plan.
        runs: Number of matrices that this rank orthogonalized in each step.
        findings: The audit's findings, as text.
        compared: Number of matrices that the audit compared with the dense reference.
        muon: Names of the parameters in Muon's groups.
        weights: Digest of each full parameter after the last step, keyed by parameter name.
        heard: Messages of all warnings.
    """

    owners: dict[str, tuple[int, ...]] = field(default_factory=dict)
    mine: int = 0
    runs: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    compared: int = 0
    muon: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------ in the test


def run(example: str, world: int, *, prepare: str = "", **arguments: Any) -> list[Seen]:
    """Call the function `train` of a script in examples/ on every rank.

    Args:
        example: Name of the file in examples/.
        world: Number of ranks. A single rank runs as a plain process without torch.distributed.
        prepare: Name of a function in this file that each rank calls first.
        arguments: Arguments for the example's `train`. Exception: `kind`, a dict of arguments for the example's
            `options`, which returns further arguments for `train`.

    Returns:
        The observations on each rank.
    """
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # The pool kills its ranks on exit, so the frameworks' shutdown code does not run.
    with RankPool(world, timeout=120.0) as pool:
        return pool.run(_watched, example, port, prepare, arguments)


# ---------------------------------------------------------------------------------------------------- in each rank


def _watched(example: str, port: int, prepare: str, arguments: dict[str, Any]) -> Seen:
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="shardmuon", GROUP_RANK="0")
    # On a single rank, only DeepSpeed needs the launcher's environment variables, so remove them for the other
    # examples.
    if os.environ["WORLD_SIZE"] == "1" and prepare != "deepspeed_on_cpu":
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            del os.environ[key]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if prepare:
            globals()[prepare]()
        module = load_example(example)
        seen, kind = _watching(), arguments.pop("kind", {})
        model = module.train(**arguments, **(module.options(**kind) if kind else {}))
    seen.heard = [str(item.message) for item in caught]
    for name, param in model.named_parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        seen.weights[name] = hashlib.sha256(whole.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return seen


def deepspeed_on_cpu() -> None:
    """Disable DeepSpeed's shared-memory communication, whose C++ extension would take minutes to compile."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def force_fsdp2() -> None:
    """Make accelerate use FSDP2 on a CPU. Without this change, accelerate silently ignores an FSDP plugin on CPUs,
    although torch's fully_shard works on CPUs."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            # Set the distributed type, because AcceleratorState sets it only on a GPU.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = make


def _watching() -> Seen:
    """Install hooks that record every Muon step in this process, and return the `Seen` that they fill in."""
    import torch.optim.optimizer as hooks

    from shardmuon import Muon, audit

    seen = Seen()
    before = 0
    checks: list[Any] = []

    def on_start(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal before
        if isinstance(optimizer, Muon):
            before = optimizer.traffic.orthogonalized
            active = optimizer.hosts.active
            if len(seen.runs) + 1 == AUDITED and not (active is not None and active.in_parts):
                checks.append(audit(optimizer, samples=1000))

    def on_end(optimizer: Any, args: Any, kwargs: Any) -> None:
        # torch's checkpoint functions call `step` to create state. Muon makes no plan for such a step, so the step is
        # not recorded.
        if isinstance(optimizer, Muon) and optimizer.plans:
            seen.runs.append(optimizer.traffic.orthogonalized - before)
            _look(optimizer, seen)
            if checks:
                report = checks.pop().report
                seen.findings = [str(finding) for finding in report.findings]
                seen.compared = sum(row.compared for row in report.matrices)

    # The hooks need not be removed, because the process exits when the example ends.
    hooks.register_optimizer_step_pre_hook(on_start)
    hooks.register_optimizer_step_post_hook(on_end)
    return seen


def _look(optimizer: Any, seen: Seen) -> None:
    if len(seen.runs) > 1:
        return
    for group in optimizer.param_groups:
        seen.muon.extend(group.get("param_names", ()) if group["use_muon"] else ())
    for plan in optimizer.plans:
        for item in plan.items:
            name = plan.specs[item.param].name
            seen.owners[name] = (*seen.owners.get(name, ()), *item.owners)
            seen.mine += int(os.environ.get("RANK", 0)) in item.owners
