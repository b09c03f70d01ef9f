"""Hosts: the kinds of callers of `step()`, which decide what is in the groups then: a training loop, torch's
checkpoints, a framework.

A framework's folder registers its `Host` and its engines (`shardmuon.frameworks`); nothing here or below names one.
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

Stepped = Any  # an optimizer as a host or an audit meets it: `shardmuon.muon.Core`, which stands above both


class Progress:
    """Progress of a step. `changing`: all ranks have agreed to it, and what it changes may be half changed."""

    changing = False


class Weight(NamedTuple):
    """A weight as a host steps it.

    Attributes:
        name: The user's.
        param: What the optimizer was made with, where that is known; else what is stepped.
        stored: What is stepped, in a form that an engine describes: the parameter, a copy, a part of a flat buffer.
        group: The options of its group.
        now: True if the call of `step` that has just ended has stepped it.
    """

    name: str
    param: Tensor
    stored: Tensor
    group: Mapping[str, Any]
    now: bool = True


class Host:
    """One kind of caller, as one optimizer meets it. What a host does not say is as in a plain training loop.

    Attributes:
        in_parts: True if a training step calls `step()` several times, with some of the groups each.
        clipping: Why gradients cannot be clipped here, and what to write; None where they can.
        packages: It may have something to say to a step if any of these is imported; None: always.
    """

    in_parts = False
    clipping: str | None = None
    packages: tuple[str, ...] | None = None

    @property
    def is_active(self) -> bool:
        """True while the groups hold the host's own tensors, which only its `step` can step."""
        return False

    def adding(self) -> None:
        """React to a group that is about to be added. Raises ValueError where that would lose what belongs to Muon."""

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        """React to a group that has been added, with these parameters."""

    def load(self, core: Stepped, load: Callable[[], None]) -> None:
        """Run `load`, which takes over a state dict while an active host's tensors are in the groups."""
        load()

    def take_over(self, core: Stepped, state_dict: Mapping[str, Any]) -> None:
        """Take over a state dict of this very cut, as torch does."""
        Optimizer.load_state_dict(core, dict(state_dict))

    def saving(self, core: Stepped) -> None:
        """Prepare the optimizer's state for being saved."""

    def saved(self, core: Stepped, saved: dict[str, Any]) -> None:
        """Complete what `torch.optim.Optimizer.state_dict` has made."""

    def instead_of_step(self, core: Stepped, plain: bool) -> Callable[[], None] | None:
        """A function to run in place of a step, if this call of `step` is not meant as one; else None. Changes nothing
        before that function is called, but for gradients that the framework did not hand over as backward made them.

        Args:
            core: The optimizer.
            plain: Whether `step` was called without a closure.
        """
        return None

    def step(self, core: Stepped, progress: Progress, fault: Fault) -> None:
        """Step the groups of an active host.

        Args:
            core: The optimizer.
            progress: How far it has come.
            fault: What is wrong on this rank already.
        """
        raise NotImplementedError

    def prepare(self, core: Stepped) -> Plan:
        """Plan now."""
        plan: Plan = core.make_plan()
        return plan

    def weights(self, core: Stepped) -> list[Weight]:
        """Every weight that is stepped here, for whoever changes weights after a step. Of an active host."""
        raise NotImplementedError

    def has_stepped_all(self, core: Stepped) -> bool:
        """True if the call of `step` that has just ended was the last one of its training step. Of an active host."""
        return True

    def restore_groups(self, core: Stepped) -> None:
        """Bring the groups back to what they are between steps, after an error in one."""

    def plans(self, core: Stepped) -> tuple[Plan, ...]:
        """All plans in force."""
        return () if core.binding is None else (core.binding.plan,)

    def plan(self, core: Stepped) -> Plan | None:
        """The only plan.

        Raises:
            AttributeError: There may be several.
        """
        return next(iter(self.plans(core)), None)

    @classmethod
    def clips(cls, params: Iterable[Any]) -> str | None:
        """The reason why these parameters' gradients cannot be clipped here, as this host clips them itself; else
        None."""
        return None


_HOSTS: list[type[Host]] = []


def register(host: type[Host]) -> None:
    """Let every optimizer made from now on know a host. It is asked before those that are known."""
    _HOSTS.insert(0, host)


def clipped_by_host(params: Iterable[Tensor]) -> str | None:
    """The reason why no gradient of these parameters can be clipped here, as some host clips them itself; else None."""
    listed = list(params)
    return next((text for text in (host.clips(listed) for host in _HOSTS) if text is not None), None)


class Hosts(list[Host]):
    """The hosts of one optimizer, in the order in which they are asked."""

    def __init__(self) -> None:
        super().__init__(host() for host in _HOSTS)

    @property
    def active(self) -> Host | None:
        """The host whose tensors are in the groups; None: they are the user's parameters."""
        loaded = sys.modules.keys()
        asked = (host for host in self if host.packages is None or not loaded.isdisjoint(host.packages))
        return next((host for host in asked if host.is_active), None)


def caller(name: str, *packages: str) -> FrameType | None:
    """The innermost function of this name on the interpreter's stack that is of one of these packages, where a
    framework gives no public sign of a call's purpose; None: there is none."""
    frame: FrameType | None = None if sys.modules.keys().isdisjoint(packages) else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_globals.get("__name__", "").startswith(packages):
            return frame
        frame = frame.f_back
    return None


def creates_state_only() -> bool:
    """True if torch.distributed.checkpoint calls `step` only to have state to load into.

    It sets every gradient to zero and lr to 0. These values alone would not tell, on every rank alike: some rank's
    shards may hold zeros while lr warms up from 0.
    """
    return caller("_init_optim_state", "torch.distributed.checkpoint.state_dict") is not None
