"""What an engine says of a parameter. An engine only describes; it never decides who computes what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shardmuon.planning.layout import ParamLayout
from shardmuon.planning.views import MatrixView, Shape

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


@dataclass(frozen=True, slots=True)
class Claim:
    """A layout and the storage shape that it implies on this rank."""

    layout: ParamLayout
    storage_shape: Shape


@dataclass(frozen=True, slots=True)
class Description:
    """One parameter as this rank sees it, before the ranks have compared notes.

    [Note: believe storage]
    Placements are claims. An engine may list several readings of them, likeliest first; the first one whose storage
    shape is right on *every* rank is taken. If none is, `from_shapes` may build the layout from the shapes that the
    ranks really store. If that fails too, the parameter is refused on every rank.

    Attributes:
        ranks: Ranks of the parameter's mesh, ascending; (own rank,) if nothing is shared.
        claims: Readings of the placements.
        storage_shape: Shape of this rank's storage as it is.
        group: A process group over `ranks`, if the engine knows one.
        from_shapes: Builds the layout from all ranks' storage shapes (in `ranks` order), or raises ValueError.
        text: How the engine would spell the placement, for messages.
        extent: Numbers that say what this rank stores, as many on every rank. The ranks exchange them when the plan is
            built, and `from_extents` makes the layout of all ranks' (in `ranks` order), whatever the claims say; it
            raises ValueError if they do not fit together.
        empty_lacks_gradient: A rank that stores nothing of the parameter may have no gradient where others have theirs.
    """

    ranks: tuple[int, ...]
    claims: tuple[Claim, ...]
    storage_shape: Shape
    text: str
    group: Any = None
    from_shapes: Callable[[Sequence[Shape]], ParamLayout] | None = None
    extent: tuple[int, ...] | None = None
    from_extents: Callable[[Sequence[Sequence[int]]], ParamLayout] | None = None
    empty_lacks_gradient: bool = False


class Engine(Protocol):
    """One way in which a framework keeps parameters. Stateless."""

    def recognizes(self, param: Tensor) -> bool:
        """Whether this engine describes the parameter."""
        ...

    def shape(self, param: Tensor) -> Shape:
        """The global logical shape."""
        ...

    def describe(self, param: Tensor, view: MatrixView, group: Any) -> Description:
        """Say who holds what.

        Args:
            param: The parameter.
            view: Its matrices.
            group: The process group over which plain parameters are replicated, or None.

        Raises:
            ValueError: The parameter's layout cannot be known (partial placement); the message lacks its name.
        """
        ...

    def storage(self, tensor: Tensor) -> Tensor:
        """This rank's local storage of a parameter, gradient or state tensor; shares memory with it."""
        ...

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        """The local storage of a gradient or state tensor if a quick look tells that it lies as the parameter does, as
        nearly all do: dense, of its shapes and placements. None: `is_aligned` looks closer, and has the words."""
        ...

    def wrap(self, storage: Tensor, param: Tensor, shape: Shape | None = None) -> Tensor:
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
