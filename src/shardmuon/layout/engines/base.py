"""One way to keep a parameter: who shares it, how it lies, and how its storage is reached.

A plain tensor is whole where it is. `Engine` says so; the other ways are subclasses that say what is otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import is_bare, is_dtensor
from shardmuon.comm.groups import GroupRef, Ranks, my_rank
from shardmuon.layout.grid import Grid, Ties
from shardmuon.layout.mesh import Extent, same_storage
from shardmuon.layout.pieces import Held, whole
from shardmuon.layout.views import Ints

NONE, READY, MISPLACED = 0, 1, 2  # of a parameter's gradient: there is none; it lies as the parameter does; elsewhere
STATES = ("no gradient", "a gradient", "a gradient that is placed unlike the parameter")  # the same in messages

_SIGNATURE = attrgetter("shape", "dtype", "device")
_SHAPE, _DEVICE, _DTYPE, _LAYOUT = map(attrgetter, ("shape", "device", "dtype", "layout"))

Group = Mapping[str, Any]  # one of an optimizer's parameter groups
Stored = tuple[Ints, Mapping[int, tuple[Held, ...]]]  # global shape, and rank -> the pieces that it stores

# what messages say of where to find it
AUTOTP_GROUP = "of DeepSpeed's AutoTP: deepspeed.utils.groups.get_tensor_model_parallel_group()"


def name_of(group: Group, index: int, position: int) -> str:
    """The user's name of a parameter, or where it stands."""
    names = names_of(group)
    return str(names[position]) if names else f"parameter {position} of group {index}"


def names_of(group: Group) -> Sequence[str]:
    """The user's names of a group's parameters; none if they are of others: ZeroRedundancyOptimizer keeps a rank's part
    of the parameters, and the names of all."""
    names = group.get("param_names") or ()
    return names if len(names) == len(group["params"]) else ()


def named_params(group: Group, index: int) -> list[tuple[str, Any]]:
    """(name, parameter) of a group, as `name_of` has them."""
    return [(name_of(group, index, position), param) for position, param in enumerate(group["params"])]


class Claim(NamedTuple):
    """One rank's account of a tensor. Plain data.

    Attributes:
        form: The tensor's layout: the same on all ranks that share it, which refuse each other otherwise.
        text: The form in words, for messages.
        extent: This rank's storage, of which the others do not know.
        empty_lacks_gradient: A rank that stores nothing of it may have no gradient where others have theirs: set it if
            the framework leaves `grad` None there.
        uncounted: Reason why a norm over ranks would count it several times though its layout is known; None: none.
    """

    form: tuple[Any, ...]
    text: str
    extent: Extent
    empty_lacks_gradient: bool = False
    uncounted: str | None = None


class Engine:
    """One way to keep a parameter. Stateless: it looks, and decides nothing.

    Its errors (ValueError) lack the parameter's name. Of `claim` they reach users as "rank R: NAME: ...", of `stored`
    as "NAME: ranks .. store shapes ..: ..."; say neither.

    As it is, a plain tensor. Without a process group it is orthogonalized on every rank that has it: right for DDP and
    for experts that differ by rank alike. With one its ranks are taken for replicas, which is checked when a plan is
    made, and share the work.

    Attributes:
        believes_placements: Placements say what ranks store, or the tensor is refused: what stages keep of a stack (see
            `kept_shape`) is placed alike. The form of claims is then (shape, *`OnMesh`).
        plain_shards: Its tensors are plain, and parts of larger ones: checkpoints cut and join them by the table.
    """

    believes_placements = False
    plain_shards = False

    def recognizes(self, param: Tensor) -> bool:
        """True for a parameter that is kept in this way."""
        return True

    # ------------------------------------------------------------------------------------------------- how it lies

    def ties(self, param: Tensor, group: Group) -> Ties:
        """Say who shares the tensor. Reads no more than that takes, so that others hear of what is wrong with it.

        Parts that are numbered by rank, one for each, are `parts`: `Ties(<ranks in the order of parts>, (my_rank(),))`,
        or `mates_of(group)` in the second place if a `process_group` joins replicas of a part. Ranks of a group that
        cut a tensor anywhere, each saying in its claim where its part begins, are `mates`: `Ties((my_rank(),), <ranks
        of the group>)`. Where ranks name unlike groups, some wait until the time-out: no rank alone can tell.
        """
        return Ties((my_rank(),), mates_of(group))

    def claim(self, param: Tensor, group: Group) -> Claim:
        """Say how the tensor lies, as far as this rank knows. What it raises, all ranks of the tensor raise."""
        if is_marked(param):
            raise ValueError(
                f"its attribute tensor_model_parallel says that this plain {tuple(param.shape)} tensor may be a shard "
                "of a matrix, but no tp_group says over which ranks. Give Muon(...), or the parameter's group, "
                f"tp_group=<its tensor-parallel process group> ({AUTOTP_GROUP}); tp_group=({my_rank()},) if that has "
                "this rank alone"
            )
        ranks, shape = mates_of(group), tuple(param.shape)
        text = f"a plain tensor replicated over ranks {ranks}" if len(ranks) > 1 else "a plain tensor of this rank"
        return Claim((shape,), text, Extent(shape))

    def stored(self, form: tuple[Any, ...], extents: Mapping[int, Extent], grid: Grid) -> Stored:
        """Say who stores what. Pure: equal claims give equal answers. Gaps, overlaps and what is out of bounds are
        refused by whoever asks.

        Where storage has the tensor's dims, a piece is `Held(Box(offset, sizes), local)`: from this index of the tensor
        on, and from `local` on in the storage, whose strides may be any. Where it is 1-D, a piece is a run of elements,
        `Held(FlatRange(start, stop), (local,))`. A rank that stores nothing has no pieces, (), but is listed.

        Args:
            form: That of all claims.
            extents: Rank -> that of its claim, of all ranks of the grid.
            grid: Ranks of the tensor, by replica and part.

        Raises:
            ValueError: The claims do not fit together.
        """
        shape = extents[grid[0][0]].shape
        return shape, dict.fromkeys(extents, whole(shape))

    def groups(self, param: Tensor, group: Group) -> list[Any]:
        """Process groups, references or None that the parameter, or the options of its group, brings along. Add those
        of the parameter's own attributes."""
        return [group.get("process_group"), group.get("tp_group")]

    def shape(self, param: Tensor) -> Ints:
        """The global logical shape. `Muon(...)` asks for it without other ranks, so it does not raise: one rank alone
        would, and the others wait for it in their first step. `claim` checks what one alone may have wrong, as all
        ranks hear of its errors."""
        return tuple(param.shape)

    def signature(self, param: Tensor) -> object:
        """A cheap value that changes whenever layout, wire or device may have changed: compared in each step, it tells
        when to plan anew. It is kept as long as the plan, so it holds a `GroupRef`, not a process group."""
        return _SIGNATURE(param)

    # ---------------------------------------------------------------------------------------------- what is stored

    def storage(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or state tensor that this rank stores locally; shares memory with it."""
        return tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor

    def storages(
        self, params: Sequence[Any], grads: Sequence[Any], *states: Sequence[Any]
    ) -> Sequence[Sequence[Tensor]] | None:
        """The local storages of parameters, of their gradients and of each kind of their state tensors, if a quick look
        at all of them tells that they lie alike, that each kind has one dtype, and that parameters and state can be
        written to, as nearly all do and can. None: who looks at one of them closely (`is_aligned`) has the words, or
        finds nothing wrong. For steps, which compute no gradients."""
        shapes, devices = list(map(_SHAPE, params)), list(map(_DEVICE, params))
        for column in (grads, *states):
            if set(map(type, column)) != {Tensor} or set(map(_LAYOUT, column)) != {torch.strided}:
                return None
            if list(map(_SHAPE, column)) != shapes:
                return None
        for column in (params, grads, *states):
            if set(map(_DTYPE, column)) != {column[0].dtype}:
                return None
        for column in (params, *states):  # of an expanded one several elements lie in one place
            if list(map(_DEVICE, column)) != devices:
                return None
            if not all(map(Tensor.is_contiguous, column)) and any(0 in one.stride() for one in column):
                return None
        return None if any(map(Tensor.is_inference, itertools.chain(*states))) else (params, grads, *states)

    def wrap(self, storage: Tensor, param: Tensor, shape: Ints | None = None) -> Tensor:
        """A state tensor in the parameter's own form around local storage (the inverse of `storage`), on the storage's
        device. `shape`: its global shape if not the parameter's; it is placed as the parameter all the same."""
        return storage

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        """True if the storages of gradient and parameter correspond element by element.

        Raises:
            ValueError: They do not correspond, and `align` cannot make them; names both placements.
        """
        if grad.shape != param.shape or is_dtensor(grad):
            kind = "DTensor" if is_dtensor(grad) else "tensor"
            raise ValueError(
                f"its gradient is a {kind} of shape {tuple(grad.shape)}, the parameter has {tuple(param.shape)}"
            )
        return True

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        """The gradient redistributed to the parameter's placement. Collective on the parameter's mesh."""
        raise AssertionError("is_aligned() refuses what would need alignment")

    def lacks_gradient(self, param: Tensor) -> bool:
        """True if a parameter without `grad` lacks it only because nothing of it is stored here, once others that this
        engine describes have theirs."""
        return False

    # ---------------------------------------------- what stages keep: [Note: where kept numbers lie] in layout/table.py

    def kept_shape(self, param: Tensor, shape: Ints, *, stacked: bool) -> Ints:
        """Shape of this rank's part of a state tensor that a stage keeps, given its global shape: (stacked matrices or
        1, numbers of one). `stacked`: the parameter is a stack."""
        return shape

    def wrap_kept(self, storage: Tensor, param: Tensor, shape: Ints, *, stacked: bool) -> Tensor:
        """The state tensor of a stage (see `kept_shape`), made around this rank's part of it."""
        return storage

    def kept_storage(self, value: object, param: Tensor, shape: Ints, *, stacked: bool) -> Tensor | str:
        """The part that this rank stores of a state tensor of a stage, or words that say what is wrong with it."""
        if not isinstance(value, Tensor) or is_dtensor(value) or not value.is_floating_point():
            return f"a {type(value).__name__}, not a floating-point tensor of shape {shape}"
        if not same_storage(tuple(value.shape), shape):
            return f"a {type(value).__name__} of shape {tuple(value.shape)}, not a tensor of shape {shape}"
        return value.detach()


PLAIN = Engine()
_ENGINES = [PLAIN]  # asked in order; the last one recognizes all


def register(engine: Engine) -> None:
    """Ask this engine before those that are known: it recognizes only what is its own."""
    _ENGINES.insert(0, engine)


def engine_of(param: Tensor) -> Engine:
    """The engine that reaches this parameter's storage. How a plain one lies only `engine_for` knows."""
    if not is_bare(param):
        for engine in _ENGINES:
            if engine.recognizes(param):
                return engine
    return PLAIN


def is_marked(param: Tensor) -> bool:
    """True if its attributes say that it is a shard, as Megatron and TransformerEngine set them."""
    dim = getattr(param, "partition_dim", None)
    return bool(getattr(param, "tensor_model_parallel", dim is not None)) and dim != -1


def mates_of(group: Group) -> Ranks:
    """The ranks (ascending) over which a group's plain tensors are replicas; this one alone without a process group."""
    found = GroupRef.of(group.get("process_group"))
    return (my_rank(),) if found is None or not found.ranks else tuple(sorted(found.ranks))


def is_own(group: Group) -> bool:
    """True if a group says that no other rank has its plain tensors (`process_group=()`), as of experts."""
    found = GroupRef.of(group.get("process_group"))
    return found is not None and not found.ranks
