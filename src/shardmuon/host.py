"""Hosts: adapters to the code that calls `step()`, such as a training loop, torch's checkpointing or a framework. A
host determines which tensors the parameter groups hold.

Each framework's folder in `shardmuon.frameworks` registers its `Host` and its engines (classes that read the layout of
parameters). This module and the modules that it imports contain no code for any particular framework.
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

Stepped = Any  # stands for `shardmuon.muon.Core`, since importing it here would be circular


class Weight(NamedTuple):
    """A weight of the model and the tensor that the optimizer updates for it.

    Attributes:
        name: The user's name of the parameter.
        param: The tensor that the optimizer was given, if known; else `stored`.
        stored: The tensor that is updated: the parameter, a copy of it, or a part of a flat buffer. An engine can read
            its layout.
        group: The options of the weight's group.
        now: True if the latest call of `step` has updated the weight.
    """

    name: str
    param: Tensor
    stored: Tensor
    group: Mapping[str, Any]
    now: bool = True


class Host:
    """Base class of hosts, the adapters to frameworks. Each optimizer has its own instances. The methods of this class
    suit a plain training loop.

    Attributes:
        in_parts: True if a training step calls `step()` several times, each time with some of the groups.
        clipping: Error text, with a remedy, if gradients cannot be clipped under this host; None if they can.
        packages: Names of the framework's packages. The host is skipped while none of them is imported. None: the host
            is never skipped.
    """

    in_parts = False
    clipping: str | None = None
    packages: tuple[str, ...] | None = None

    @property
    def is_active(self) -> bool:
        """True while the groups hold the host's own tensors, which only the host's `step` can update."""
        return False

    def adding(self) -> None:
        """React to a parameter group that is about to be added. Raises ValueError if the caller's groups no longer show
        which parameters go to Muon and which to AdamW."""

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        """React to a parameter group that has been added. `names` are the names of its parameters."""

    def load(self, core: Stepped, load: Callable[[], None]) -> None:
        """Call `load`, a function that loads a state dict while this host is active."""
        load()

    def take_over(self, core: Stepped, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that was saved with the same sharding, by `torch.optim.Optimizer.load_state_dict`."""
        Optimizer.load_state_dict(core, dict(state_dict))

    def saving(self, core: Stepped) -> None:
        """Prepare the optimizer's state before a state dict is made."""

    def saved(self, core: Stepped, saved: dict[str, Any]) -> None:
        """Complete, in place, the state dict that `torch.optim.Optimizer.state_dict` has returned."""

    def instead_of_step(self, core: Stepped, plain: bool) -> Callable[[], None] | None:
        """Return a function to run instead of a step if this call of `step` is not meant to take one, else None. The
        only tensors that this method itself may change are gradients that the framework has altered since the backward
        pass.

        Args:
            core: The optimizer.
            plain: True if `step` was called without a closure.
        """
        return None

    def step(self, core: Stepped, fault: Fault) -> None:
        """Take a step while this host is active.

        Args:
            core: The optimizer. A host that changes weights or state otherwise than by `take_step` first sets its
                `changing` to True.
            fault: This rank's error so far, if it has one.
        """
        raise NotImplementedError

    def weights(self, core: Stepped) -> list[Weight]:
        """List every weight that is updated while this host is active, for code that changes weights after a step."""
        raise NotImplementedError

    def has_stepped_all(self, core: Stepped) -> bool:
        """True if the latest call of `step` was the last one of its training step. Called only while the host is
        active."""
        return True

    def restore_groups(self, core: Stepped) -> None:
        """Restore the groups to the form that they have between steps, after an error in the middle of a step."""

    def plans(self, core: Stepped) -> tuple[Plan, ...]:
        """Return all current plans."""
        return () if core.binding is None else (core.binding.plan,)

    @classmethod
    def clips(cls, params: Iterable[Any]) -> str | None:
        """Return an error text if this host's framework clips the gradients of these parameters itself, so that the
        user must not; else None."""
        return None


_HOSTS: list[type[Host]] = []


def register(host: type[Host]) -> None:
    """Register a host class for all optimizers made from now on. It takes precedence over classes registered
    earlier."""
    _HOSTS.insert(0, host)


class Hosts(list[Host]):
    """The hosts of one optimizer, in order of precedence."""

    def __init__(self) -> None:
        super().__init__(host() for host in _HOSTS)

    @property
    def active(self) -> Host | None:
        """The host whose tensors are in the parameter groups; None if the groups hold the user's parameters."""
        loaded = sys.modules.keys()
        asked = (host for host in self if host.packages is None or not loaded.isdisjoint(host.packages))
        return next((host for host in asked if host.is_active), None)

    @staticmethod
    def clipped(params: Iterable[Tensor]) -> str | None:
        """Return an error text if some framework clips the gradients of these parameters itself, so that the user must
        not; else None."""
        listed = list(params)
        return next((text for text in (host.clips(listed) for host in _HOSTS) if text is not None), None)


def caller(name: str, *packages: str) -> FrameType | None:
    """Return the innermost stack frame of a function with this name in one of these packages; None if there is none.
    Used where a framework has no public sign of the purpose for which it calls the optimizer."""
    frame: FrameType | None = None if sys.modules.keys().isdisjoint(packages) else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_globals.get("__name__", "").startswith(packages):
            return frame
        frame = frame.f_back
    return None


def creates_state_only() -> bool:
    """True if torch.distributed.checkpoint calls `step` only to create the state that it then loads into.

    For this call, torch sets every gradient and lr to 0. These values prove nothing: in a real step, lr may be warming
    up from 0 while the shards of some ranks have zero gradients, so that ranks would come to different conclusions.
    Therefore this function inspects the call stack.
    """
    return caller("_init_optim_state", "torch.distributed.checkpoint.state_dict") is not None
