"""What reaches a parameter's storage, and that of its gradient and state. Readers (layout/readers/) say how it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardmuon.layout.views import Ints

NONE, READY, MISPLACED = 0, 1, 2  # of a parameter's gradient: there is none; it lies as the parameter does; elsewhere
STATES = ("no gradient", "a gradient", "a gradient that is placed unlike the parameter")  # the same in messages


def name_of(group: Mapping[str, Any], index: int, position: int) -> str:
    """The user's name of a parameter, or where it stands."""
    names = names_of(group)
    return str(names[position]) if names else f"parameter {position} of group {index}"


def names_of(group: Mapping[str, Any]) -> Sequence[str]:
    """The user's names of a group's parameters; none if they are of others: ZeroRedundancyOptimizer keeps a rank's part
    of the parameters, and the names of all."""
    names = group.get("param_names") or ()
    return names if len(names) == len(group["params"]) else ()


def named_params(group: Mapping[str, Any], index: int) -> list[tuple[str, Any]]:
    """(name, parameter) of a group, as `name_of` has them."""
    params = group["params"]
    names = [str(name) for name in names_of(group)] or [f"parameter {at} of group {index}" for at in range(len(params))]
    return list(zip(names, params, strict=True))


class Engine(Protocol):
    """One way in which a framework keeps parameters. Stateless."""

    def recognizes(self, param: Tensor) -> bool:
        """True for a parameter that is kept in its way."""
        ...

    def shape(self, param: Tensor) -> Ints:
        """The global logical shape."""
        ...

    def storage(self, tensor: Tensor) -> Tensor:
        """This rank's local storage of a parameter, gradient or state tensor; shares memory with it."""
        ...

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        """The local storage of a gradient or state tensor if a quick look tells that it lies as the parameter does, as
        nearly all do: dense, of its shapes and placements. None: `is_aligned` looks closer, and has the words."""
        ...

    def wrap(self, storage: Tensor, param: Tensor, shape: Ints | None = None) -> Tensor:
        """A state tensor in the parameter's own form around local storage (the inverse of `storage`), on the storage's
        device. `shape`: its global shape if not the parameter's; it is placed as the parameter all the same."""
        ...

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        """Whether the storages of gradient and parameter correspond element by element.

        Raises:
            ValueError: They do not, and `align` cannot make them; names both placements.
        """
        ...

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        """The gradient redistributed to the parameter's placement. Collective on the parameter's mesh."""
        ...

    def signature(self, param: Tensor) -> object:
        """Changes whenever the layout may have: comparing it each step tells when to plan anew. Cheap."""
        ...

    def lacks_gradient(self, param: Tensor) -> bool:
        """Whether a parameter without `grad` lacks it only because nothing of it is stored here, once others that this
        engine describes have theirs."""
        ...
