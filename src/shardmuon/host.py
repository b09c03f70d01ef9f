"""Hosts are adapters to the code that calls `step()`: a training loop, torch's checkpointing or a framework such as
DeepSpeed. A host is active while its framework has replaced the tensors in the parameter groups.

Each framework's file in `shardmuon.frameworks` registers the framework's `Host` and its engines (classes that read the
layout of parameters). This module and the modules that it imports contain no code for a particular framework.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardmuon.comm.vote import Fault
from shardmuon.plan.plan import Plan


class Weight(NamedTuple):
    """A weight of the model and the tensor that the optimizer updates for it.

    Attributes:
        name: Name of the parameter in the user's model.
        param: The tensor that the user passed to the optimizer, or `stored` if that tensor is not known.
        stored: The tensor that the optimizer updates: the parameter itself, a copy of it, or a part of a flat buffer.
        group: The options of the weight's parameter group.
        now: True if the latest call to `step` updated the weight.
    """

    name: str
    param: Tensor
    stored: Tensor
    group: Mapping[str, Any]
    now: bool = True


class Host:
    """Base class of hosts, the adapters to frameworks. Each optimizer has its own instance of every registered host
    class.

    The methods of this base class suit a plain training loop. Their argument `core` is the optimizer, a
    `shardmuon.muon.Core`. It is annotated as `Any` to avoid a circular import.

    Attributes:
        in_parts: True if the framework calls `step()` several times per training step, each time with only some of the
            parameter groups.
        clipping: Error message that tells users to let the framework clip gradients. None if users can clip gradients
            themselves.
        marks: Names of attributes that identify parameters whose gradients the framework clips itself.
        packages: Names of the framework's packages. Optimizers ignore the host until one of these packages is imported.
            If None, optimizers never ignore the host.
    """

    in_parts = False
    clipping: str | None = None
    marks: tuple[str, ...] = ()
    packages: tuple[str, ...] | None = None

    @property
    def is_active(self) -> bool:
        """True while the parameter groups contain tensors that the framework has made and that only the host's `step`
        can update."""
        return False

    def adding(self) -> None:
        """Hook that is called before a parameter group is added. Raise ValueError if the framework has merged the
        groups, because merged groups do not show which parameters Muon updates and which AdamW updates."""

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        """Hook that is called after a parameter group has been added. `names` lists the names of its parameters."""

    def load(self, core: Any, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict into the optimizer while this host (framework integration) is active. The state dict must
        have been saved with the same sharding."""
        Optimizer.load_state_dict(core, dict(state_dict))

    def saved(self, core: Any, saved: dict[str, Any]) -> None:
        """Adapt a state dict from `torch.optim.Optimizer.state_dict` to the framework, in place. Its state tensors are
        the optimizer's own, whereas its groups are copies."""

    def instead_of_step(self, core: Any, plain: bool) -> Callable[[], None] | None:
        """Return a function to run instead of a step, or None to take the step as usual. A function is returned only if
        the framework calls `step` without intending to update weights. This method must not change any tensors.

        Args:
            core: The optimizer.
            plain: True if `step` was called without a closure.
        """
        return None

    def step(self, core: Any, fault: Fault) -> None:
        """Take a step of the optimizer while this host (framework integration) is active.

        Args:
            core: The optimizer. The host must set `core.changing` to True before it changes any weights or state
                itself, that is, without calling `core.take_step`.
            fault: Record of this rank's first error; empty if no error has occurred before this call.
        """
        raise NotImplementedError

    def weights(self, core: Any) -> list[Weight]:
        """List every weight that the optimizer updates while this host (framework integration) is active. The list is
        for code that changes weights after a step."""
        raise NotImplementedError

    def has_stepped_all(self, core: Any) -> bool:
        """True if the latest call to `step` was the last one of the training step. This method is called only while
        this host (framework integration) is active."""
        return True

    def restore_groups(self, core: Any) -> None:
        """Undo the changes that the framework has made to the parameter groups for a step. Called after a step has
        failed midway."""

    def plans(self, core: Any) -> tuple[Plan, ...]:
        """Return the optimizer's current plans (assignments of matrices to ranks). The tuple is empty before the first
        plan is made."""
        return () if core.binding is None else (core.binding.plan,)

    @staticmethod
    def caller(name: str, *packages: str) -> FrameType | None:
        """Return the innermost stack frame of a function with the given name in one of the given packages, or None if
        there is none. Hosts use this method to find out why a framework calls the optimizer, if the framework has no
        public API for this."""
        if sys.modules.keys().isdisjoint(packages):
            return None
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if frame.f_code.co_name == name)
        return next((one for one in frames if one.f_globals.get("__name__", "").startswith(packages)), None)

    @staticmethod
    def creates_state_only() -> bool:
        """True if torch.distributed.checkpoint is calling `step` only to create the state into which it then loads a
        checkpoint.

        For this call, torch sets every gradient and lr to 0. These values do not identify the call: during a warmup, a
        real step can have lr 0, and its gradients can be zero on some ranks. If each rank checked these values, ranks
        could disagree. So this function inspects the call stack instead.
        """
        return Host.caller("_init_optim_state", "torch.distributed.checkpoint.state_dict") is not None

    @classmethod
    def register(cls) -> None:
        """Register this class for all optimizers that are made after this call. The class takes precedence over classes
        that were registered earlier."""
        _HOSTS.insert(0, cls)


_HOSTS: list[type[Host]] = []


class Hosts(list[Host]):
    """List of the hosts (integrations with frameworks such as DeepSpeed) of one optimizer. If several hosts could
    handle a call, the first one takes precedence."""

    def __init__(self) -> None:
        super().__init__(host() for host in _HOSTS)

    @property
    def active(self) -> Host | None:
        """The host (framework integration) whose tensors are in the parameter groups, or None if the groups contain the
        user's parameters."""
        loaded = sys.modules.keys()
        asked = (host for host in self if host.packages is None or not loaded.isdisjoint(host.packages))
        return next((host for host in asked if host.is_active), None)

    @staticmethod
    def clipped(params: Iterable[Tensor]) -> str | None:
        """Return an error message if a framework itself clips the gradients of any of these parameters, because users
        must not clip them a second time. Otherwise, return None."""
        found = {name for param in params for name in vars(param)}
        return next((host.clipping for host in _HOSTS if not found.isdisjoint(host.marks)), None)
