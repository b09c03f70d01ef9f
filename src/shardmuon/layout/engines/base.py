"""Interface of engines. An engine is an adapter for one kind of parameter storage: it tells which ranks share a
parameter and how the parameter is placed on them, and it accesses the local storage.

The base class `Engine` handles plain tensors, which are stored whole. Subclasses handle all other kinds of storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import GroupRef, Ranks, my_rank
from shardmuon.layout.mesh import same_storage
from shardmuon.layout.pieces import Held
from shardmuon.layout.views import Ints


class GradientState:
    """Possible states of a parameter's gradient on a rank. The values are phrases for error messages."""

    NONE = "no gradient"
    READY = "a gradient"
    MISPLACED = "a gradient that is placed unlike the parameter"


_SIGNATURE = attrgetter("shape", "dtype", "device")
_SHAPE, _DEVICE, _DTYPE, _LAYOUT = map(attrgetter, ("shape", "device", "dtype", "layout"))

Group = Mapping[str, Any]  # a parameter group of an optimizer, with its options
# (global shape of a tensor, dict from each rank to the pieces of the tensor that the rank stores)
Stored = tuple[Ints, Mapping[int, tuple[Held, ...]]]


def names_of(group: Group) -> Sequence[str]:
    """Return the names that the user gave to a group's parameters. The result is empty if the numbers of names and
    parameters differ, as in ZeroRedundancyOptimizer, whose groups contain only one rank's parameters but keep all
    names."""
    names = group.get("param_names") or ()
    return names if len(names) == len(group["params"]) else ()


def named_params(group: Group, index: int) -> list[tuple[str, Any]]:
    """List the (name, parameter) pairs of a group. If the user gave no names, each name is made from the parameter's
    position and the group's index."""
    names, params = names_of(group), group["params"]
    names = names or [f"parameter {position} of group {index}" for position in range(len(params))]
    return list(zip(map(str, names), params, strict=True))


# grid of the ranks that share a tensor, with one row per replica and one column per part of the tensor
Grid = tuple[Ranks, ...]


class Ties(NamedTuple):
    """One rank's view of the ranks that share a tensor. These ranks form a grid: the ranks in a row together store one
    replica of the tensor, and the ranks in a column store the same part. A single rank knows only its own row and
    column. The rest of the grid follows from the reports of the other ranks.

    Attributes:
        parts: The rank's row: the ranks that store the parts of this rank's replica, in the order of the parts. If the
            tensor is not cut, the row contains only this rank.
        mates: The rank's column: the ranks that store the same part as this rank, in ascending order. They either have
            replicas of the part or divide it further.
    """

    parts: Ranks
    mates: Ranks

    @property
    def sets(self) -> tuple[Ranks, ...]:
        """The sets of ranks with which this rank shares the tensor: the ranks in `parts` and the ranks in `mates`, each
        in ascending order. If both sets are equal, the set is listed once."""
        return tuple(dict.fromkeys((tuple(sorted(self.parts)), self.mates)))


class Extent(NamedTuple):
    """Description of one rank's local storage of a tensor.

    Attributes:
        shape: Shape of the storage.
        held: Pieces of the tensor in the storage; None if `Engine.stored` determines them.
    """

    shape: Ints
    held: tuple[Held, ...] | None = None


class Claim(NamedTuple):
    """One rank's description of a tensor, in a form that can be sent to other ranks.

    Attributes:
        form: The layout, as a tuple that begins with the tensor's global shape. In this shape, -1 marks a dim that is
            cut into parts of arbitrary sizes. All ranks that share the tensor raise an error if their forms differ.
        text: The form in words, for error messages.
        extent: Shape of this rank's local storage and the pieces in it. Unlike the form, the extent can differ between
            ranks.
        empty_lacks_gradient: True if the framework leaves `grad` None on ranks that store no part of the tensor, even
            when other ranks have a gradient.
        uncounted: Error message for gradient clipping if a norm over all ranks would count some elements of the
            gradient more than once; else None.
    """

    form: tuple[Any, ...]
    text: str
    extent: Extent
    empty_lacks_gradient: bool = False
    uncounted: str | None = None


class Engine:
    """Adapter for one kind of parameter storage, such as DTensors. Engines are stateless. They only describe tensors
    and access their storage.

    Messages of ValueErrors must not contain the parameter's name, because callers add it. Users see errors from `claim`
    as "rank R: NAME: ...", and errors from `stored` as "NAME: ranks ... store shapes ...".

    The base class handles plain tensors. Without a process group, every rank orthogonalizes its own plain tensors. This
    is right both for DDP and for experts that differ between ranks. With a process group, the tensors on the group's
    ranks are assumed to be replicas, and the ranks share the work. The replicas are compared when a plan is made.

    Attributes:
        believes_placements: True if the local storage must match the tensor's placements on a mesh. `Claim.form` then
            consists of the shape and an `OnMesh`. If a stack of matrices is sharded along dim 0, `kept_zeros` shards
            its state tensor in the same way.
        plain_shards: True if the tensors are plain tensors that contain shards of larger tensors. A checkpoint must
            then compute the positions of the shards.
    """

    believes_placements = False
    plain_shards = False

    def recognizes(self, param: Tensor) -> bool:
        """True if this engine (storage adapter) handles the parameter's kind of storage."""
        return True

    # --------------------------------------------------------------------------------------------------- placement

    def ties(self, param: Tensor, group: Group) -> Ties:
        """Return the ranks that share the tensor. This method must read only the attributes that identify these ranks,
        so that an error in any other attribute can still be sent to them.

        Subclasses typically return:

        - `Ties(<ranks in order of parts>, super().ties(param, group).mates)` if each rank stores one part;
        - `Ties((my_rank(),), <ranks, ascending>)` if the tensor is placed on a mesh or cut at arbitrary elements.

        If ranks return different groups for the same tensor, some of them can wait until the timeout.
        """
        return Ties((my_rank(),), _mates_of(group))

    def claim(self, param: Tensor, group: Group) -> Claim:
        """Describe the tensor's placement as far as this rank knows it. If this method raises an error on one rank, all
        ranks that share the tensor raise the same error."""
        if is_marked(param):
            raise ValueError(
                f"its attribute tensor_model_parallel says that this plain {tuple(param.shape)} tensor may be a shard "
                "of a matrix, but no tp_group says over which ranks. Give Muon(...), or the parameter's group, "
                "tp_group=<its tensor-parallel process group> (of DeepSpeed's AutoTP: deepspeed.utils.groups."
                f"get_tensor_model_parallel_group()); tp_group=({my_rank()},) if that has this rank alone"
            )
        ranks, shape = _mates_of(group), tuple(param.shape)
        text = f"a plain tensor replicated over ranks {ranks}" if len(ranks) > 1 else "a plain tensor of this rank"
        return Claim((shape,), text, Extent(shape))

    def stored(self, form: tuple[Any, ...], extents: Mapping[int, Extent], grid: Grid) -> Stored:
        """Compute the tensor's global shape and the pieces that each rank stores, from the claims of all ranks that
        share the tensor. Equal claims must give equal results. The caller checks for gaps, overlaps and out-of-bounds
        pieces.

        The base class returns the pieces in `Extent.held`, or the whole tensor if `held` is None.

        If the storage has the same dims as the tensor, each piece is a `Held(Box(offset, sizes), local)` that starts at
        index `offset` of the tensor and at index `local` of the storage. If the storage is 1-D, each piece is a
        `Held(FlatRange(start, stop), (local,))`. A rank that stores nothing has an empty tuple of pieces.

        Args:
            form: `Claim.form`, which is equal on all ranks.
            extents: Dict from each rank of the grid to its `Claim.extent`.
            grid: Ranks that share the tensor, with one row per replica and one column per part.

        Raises:
            ValueError: The claims of different ranks contradict each other.
        """
        shape, whole = form[0], (Held.whole(form[0]),)
        return shape, {rank: whole if extent.held is None else extent.held for rank, extent in extents.items()}

    def groups(self, param: Tensor, group: Group) -> list[Any]:
        """List the process groups of ranks that share the parameter: those in the options of `group` and, in
        subclasses, those in the parameter's attributes. Each item is a `GroupRef`, a process group or None."""
        return [GroupRef.of(group.get("process_group")), GroupRef.of(group.get("tp_group"), "tp_group")]

    def shape(self, param: Tensor) -> Ints:
        """Return the parameter's global logical shape. This method must not raise an error: `Muon(...)` calls it on
        each rank separately, so if it failed on one rank, the other ranks would wait for that rank in their first step.
        Checks that can fail on a single rank belong in `claim`, whose errors all ranks raise."""
        return tuple(param.shape)

    def remember(self, param: Tensor, shape: Ints) -> None:
        """Store the global shape, which the ranks have determined together, as an attribute of the parameter. Only
        engines that cannot find the global shape on a single rank override this method."""

    def signature(self, param: Tensor) -> object:
        """Return a value that changes whenever the parameter's layout, dtype or device may have changed. A plan stores
        this value. Each step computes the value again, so the computation must be cheap. If the value has changed, the
        plan is no longer valid. Because the value is stored, it must contain a `GroupRef` instead of a process
        group."""
        return _SIGNATURE(param)

    # ----------------------------------------------------------------------------------------------- local storage

    def storage(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a parameter, gradient or state tensor. The result shares memory with the
        tensor."""
        return tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor

    def storages(
        self, params: Sequence[Any], grads: Sequence[Any], *states: Sequence[Any]
    ) -> Sequence[Sequence[Tensor]] | None:
        """Return the local storages as one list for the parameters, one for the gradients and one for each kind of
        state tensor. Return None if a quick check fails. Steps use this method as a fast path under no_grad.

        The check requires that gradients and state are placed like the parameters, that all tensors of one kind have
        the same dtype, and that parameters and state are writable. If the check fails, the caller checks each tensor
        separately (`is_aligned`), and either raises a precise error or finds that nothing is wrong.
        """
        shapes, devices = list(map(_SHAPE, params)), list(map(_DEVICE, params))
        for column in (grads, *states):
            if set(map(type, column)) != {Tensor} or set(map(_LAYOUT, column)) != {torch.strided}:
                return None
            if list(map(_SHAPE, column)) != shapes:
                return None
        for column in (params, grads, *states):
            if set(map(_DTYPE, column)) != {column[0].dtype}:
                return None
        # Expanded parameters and state tensors take the slow path, because their elements share memory and cannot be
        # written.
        for column in (params, *states):
            if column is not params and list(map(_DEVICE, column)) != devices:
                return None
            if not all(map(Tensor.is_contiguous, column)) and any(0 in one.stride() for one in column):
                return None
        return None if any(map(Tensor.is_inference, itertools.chain(*states))) else (params, grads, *states)

    def wrap(self, storage: Tensor, param: Tensor, shape: Ints | None = None) -> Tensor:
        """Wrap local storage in a state tensor that has the parameter's type and placement, and remains on the
        storage's device. This method is the inverse of `storage`.

        Args:
            storage: Local storage of the state tensor.
            param: The parameter.
            shape: Global shape of the state tensor. None: the parameter's shape.
        """
        return storage

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        """True if the storages of gradient and parameter correspond element by element.

        Raises:
            ValueError: The storages do not correspond, and `align` cannot make them correspond. The message contains
                both placements.
        """
        if grad.shape != param.shape or is_dtensor(grad):
            kind = "DTensor" if is_dtensor(grad) else "tensor"
            raise ValueError(
                f"its gradient is a {kind} of shape {tuple(grad.shape)}, the parameter has {tuple(param.shape)}"
            )
        return True

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        """Redistribute a DTensor gradient to its parameter's placement. All ranks of the parameter's mesh must call
        this method."""
        raise AssertionError("is_aligned() refuses what would need alignment")

    def lacks_gradient(self, param: Tensor) -> bool:
        """True if the parameter's `grad` is None only because this rank stores no part of the parameter. The method is
        called only if other parameters of this engine have gradients."""
        return False

    # --------------------------------- state with values per matrix: [Note: placement of stage state] in layout/mesh.py

    def kept_zeros(self, param: Tensor, shape: Ints, dtype: torch.dtype, *, stacked: bool) -> Tensor:
        """Make a zero-filled state tensor on the parameter's device. The tensor stores the values that a variant of
        Muon (such as NorMuon) keeps for each matrix between steps ([Note: placement of stage state]).

        Args:
            param: The parameter.
            shape: Global shape of the state tensor, which has one row per index of dim 0 if the parameter is a stack of
                matrices, else a single row.
            dtype: Dtype of the state tensor.
            stacked: True if the parameter is a stack of matrices.
        """
        return torch.zeros(shape, dtype=dtype, device=self.storage(param).device)

    def kept_storage(self, value: object, param: Tensor, shape: Ints, *, stacked: bool) -> Tensor | str:
        """Return this rank's part of a state tensor that was made by `kept_zeros` or restored from a checkpoint. If the
        tensor is invalid, return a description of the error instead."""
        if not isinstance(value, Tensor) or is_dtensor(value) or not value.is_floating_point():
            return f"a {type(value).__name__}, not a floating-point tensor of shape {shape}"
        if not same_storage(tuple(value.shape), shape):
            return f"a {type(value).__name__} of shape {tuple(value.shape)}, not a tensor of shape {shape}"
        return value.detach()


_PLAIN = Engine()
# registered engines (storage adapters), in the order in which their `recognizes` is called; the last engine recognizes
# every tensor
_ENGINES = [_PLAIN]


def register(engine: Engine) -> None:
    """Register an engine (storage adapter). For each tensor, the new engine is tried before all engines that were
    registered earlier, so it must recognize only the kind of tensor that it handles."""
    _ENGINES.insert(0, engine)


def engine_of(param: Tensor) -> Engine:
    """Return the engine (storage adapter) that can access a parameter's storage. To find the placement of a plain
    tensor, use `engine_for` instead, which also reads the options of the parameter group."""
    # A plain tensor without attributes needs no search for its engine, because other engines recognize plain tensors
    # only by attributes that frameworks set.
    if type(param) in (Tensor, torch.nn.Parameter) and not param.__dict__:
        return _PLAIN
    return next(engine for engine in _ENGINES if engine.recognizes(param))


def is_marked(param: Tensor) -> bool:
    """True if the attributes that Megatron and TransformerEngine set on a parameter mark it as a tensor-parallel
    shard."""
    dim = getattr(param, "partition_dim", None)
    return bool(getattr(param, "tensor_model_parallel", dim is not None)) and dim != -1


def _mates_of(group: Group) -> Ranks:
    """Return, in ascending order, the ranks that hold replicas of a parameter group's plain tensors: the ranks of its
    process group, or only this rank if it has none."""
    found = GroupRef.of(group.get("process_group"))
    return (my_rank(),) if found is None or not found.ranks else tuple(sorted(found.ranks))
