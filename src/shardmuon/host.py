"""Hosts: callers of `step()`, such as a training loop, torch's checkpoints or a framework. The host decides which
tensors the parameter groups hold.

Each framework's folder in `shardmuon.frameworks` registers its `Host` and its engines; this module and those below it
know no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardmuon.comm.vote import Fault
from shardmuon.plan.plan import Plan

Stepped = Any  # `shardmuon.muon.Core`, which this module must not import


class Progress:
    """Progress of a step. `changing`: all ranks have agreed to the step, and weights and state may be half updated."""

    changing = False


class Weight(NamedTuple):
    """A weight and the tensor that a host steps for it.

    Attributes:
        name: The user's name of the parameter.
        param: The tensor that the optimizer was given, if known; else `stored`.
        stored: The tensor that is stepped, readable by an engine: the parameter, a copy, or a part of a flat buffer.
        group: The options of the weight's group.
        now: True if the latest call of `step` has stepped the weight.
    """

    name: str
    param: Tensor
    stored: Tensor
    group: Mapping[str, Any]
    now: bool = True


class Host:
    """Base class of hosts; each optimizer has its own instances. The defaults are those of a plain training loop.

    Attributes:
        in_parts: True if a training step calls `step()` several times, each time with some of the groups.
        clipping: Why gradients cannot be clipped under this host, and what to write; None if they can.
        packages: Packages of the framework: the host is skipped while none is imported. None: never skipped.
    """

    in_parts = False
    clipping: str | None = None
    packages: tuple[str, ...] | None = None

    @property
    def is_active(self) -> bool:
        """True while the groups hold the host's own tensors, which only the host's `step` can update."""
        return False

    def adding(self) -> None:
        """React to a group that is about to be added. Raises ValueError if the group no longer tells which parameters
        go to Muon and which to AdamW."""

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        """React to a group that has been added. `names`: names of its parameters."""

    def load(self, core: Stepped, load: Callable[[], None]) -> None:
        """Run `load`, a function that loads a state dict while the groups hold an active host's tensors."""
        load()

    def take_over(self, core: Stepped, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that was saved with the same sharding, as torch does."""
        Optimizer.load_state_dict(core, dict(state_dict))

    def saving(self, core: Stepped) -> None:
        """Prepare the optimizer's state before a state dict is made."""

    def saved(self, core: Stepped, saved: dict[str, Any]) -> None:
        """Complete, in place, the state dict that `torch.optim.Optimizer.state_dict` has made."""

    def instead_of_step(self, core: Stepped, plain: bool) -> Callable[[], None] | None:
        """A function to run in place of a step, if this call of `step` is not meant as one; else None. Only gradients
        that the framework has altered since backward may be changed before that function runs.

        Args:
            core: The optimizer.
            plain: True if `step` was called without a closure.
        """
        return None

    def step(self, core: Stepped, progress: Progress, fault: Fault) -> None:
        """Step the groups of an active host.

        Args:
            core: The optimizer.
            progress: Progress of the step, updated in place.
            fault: Errors found on this rank so far.
        """
        raise NotImplementedError

    def prepare(self, core: Stepped) -> Plan:
        """Make a plan now, and return it."""
        plan: Plan = core.make_plan()
        return plan

    def weights(self, core: Stepped) -> list[Weight]:
        """Every weight that an active host steps, for code that changes weights after a step."""
        raise NotImplementedError

    def has_stepped_all(self, core: Stepped) -> bool:
        """True if the latest call of `step` was the last one of its training step. Asked of an active host only."""
        return True

    def restore_groups(self, core: Stepped) -> None:
        """Restore the groups to their form between steps, after an error in the middle of a step."""

    def plans(self, core: Stepped) -> tuple[Plan, ...]:
        """All current plans."""
        return () if core.binding is None else (core.binding.plan,)

    def plan(self, core: Stepped) -> Plan | None:
        """The current plan; None if there is none yet.

        Raises:
            AttributeError: There may be several plans.
        """
        return next(iter(self.plans(core)), None)

    @classmethod
    def clips(cls, params: Iterable[Any]) -> str | None:
        """The reason why the user cannot clip these parameters' gradients, if this host clips them; else None."""
        return None


_HOSTS: list[type[Host]] = []


def register(host: type[Host]) -> None:
    """Register a host class for all optimizers made from now on. New classes are asked before those registered
    earlier."""
    _HOSTS.insert(0, host)


def clipped_by_host(params: Iterable[Tensor]) -> str | None:
    """The reason why the user cannot clip these parameters' gradients, if some host clips them itself; else None."""
    listed = list(params)
    return next((text for text in (host.clips(listed) for host in _HOSTS) if text is not None), None)


class Hosts(list[Host]):
    """The hosts of one optimizer, in the order in which they are asked."""

    def __init__(self) -> None:
        super().__init__(host() for host in _HOSTS)

    @property
    def active(self) -> Host | None:
        """The host whose tensors are in the groups; None if the groups hold the user's parameters."""
        loaded = sys.modules.keys()
        asked = (host for host in self if host.packages is None or not loaded.isdisjoint(host.packages))
        return next((host for host in asked if host.is_active), None)


def caller(name: str, *packages: str) -> FrameType | None:
    """Innermost stack frame of a function with this name in one of these packages; None if there is none. For
    frameworks that give no public sign of why they call."""
    frame: FrameType | None = None if sys.modules.keys().isdisjoint(packages) else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_globals.get("__name__", "").startswith(packages):
            return frame
        frame = frame.f_back
    return None


def creates_state_only() -> bool:
    """True if torch.distributed.checkpoint calls `step` only to create state to load into.

    torch then sets every gradient and lr to 0, but these values are no proof: some rank's shards may hold zero
    gradients while lr warms up from 0, so the ranks could disagree.
    """
    return caller("_init_optim_state", "torch.distributed.checkpoint.state_dict") is not None
