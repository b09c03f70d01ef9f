"""Plain tensors that are one rank's shard of a tensor, as TransformerEngine's and Megatron's layers keep them.

Nothing in such a tensor says over which ranks it is cut, so the user does (`tp_group`); along which dim, its own
attributes say (`tensor_model_parallel`, `partition_dim`, `partition_stride`) or the options of its group.

[Note: sizes]
    The global shape is the sum of the shards, and a rank sees its own only. `gather_shards` lets the ranks of each
    group tell each other their shapes, whenever a plan is made. Until then shards are taken to be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon._fsdp1 import FLATTENED
from shardmuon._torch import is_dtensor
from shardmuon.comm.groups import GroupRef, union
from shardmuon.engines.base import Claim, Description, name_of
from shardmuon.engines.local import LocalEngine, replicated_layout
from shardmuon.errors import fault_text
from shardmuon.layout import table
from shardmuon.layout.pieces import Box
from shardmuon.layout.readers.tensor_parallel import cut_of, shards_of
from shardmuon.layout.shards import Cut, at_dim, parts_of
from shardmuon.planning.layout import ParamLayout, layout_of
from shardmuon.planning.views import MatrixView, Ranks, Shape
from shardmuon.ranks.council import Faults, share_with_faults
from shardmuon.ranks.grid import Grid, replica_grid


def tensor_parallel_engine(param: Tensor, group: Mapping[str, Any]) -> TensorParallelEngine | None:
    """The engine of a plain tensor whose group has a `tp_group`; None if that does not apply to it.

    Raises:
        ValueError: The group's options do not fit the tensor.
    """
    shards = shards_of(group)
    if shards is None:
        return None
    cut = cut_of(param, group)
    if cut is None and group.get("rank_local"):
        return None  # this rank's own, whole
    return TensorParallelEngine(shards, cut)


def check_expert(param: Tensor, group: Mapping[str, Any], inherited: Collection[str]) -> None:
    """Experts (`allreduce=False`) have process groups of their own: none may come from the optimizer unsaid.

    Args:
        param: The parameter.
        group: Options of its group.
        inherited: Those of tp_group and process_group that the group took from the optimizer.

    Raises:
        ValueError: It would take over one.
    """
    if getattr(param, "allreduce", True) or is_dtensor(param):
        return
    taken = [key for key in inherited if group.get(key) is not None and group[key].ranks]
    if group.get("rank_local"):
        whole = tensor_parallel_engine(param, group) is None
        taken = [key for key in taken if key == "tp_group" and not whole]
    if taken:
        raise ValueError(
            f"its attribute allreduce=False marks an expert's parameter, whose groups are not the dense ones, but "
            f"{' and '.join(sorted(taken))} would come from the optimizer. Put it in a group with its own tp_group and "
            "process_group (the expert-tensor-parallel and expert-data-parallel ones; () for none)"
        )


# parameter -> (what its shard was, sizes along the cut dim of all shards), as `gather_shards` found them
_SIZES: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True, slots=True)
class TensorParallelEngine:
    """A plain tensor of an optimizer with a `tp_group`: one of its shards, or a replica on each of its ranks.

    Attributes:
        shards: The tensor-parallel group.
        cut: How the tensor is cut over it. None: every rank has it whole.
    """

    shards: GroupRef
    cut: Cut | None

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds less than the tensor."""
        return self.cut is not None and len(self.shards.ranks) > 1

    def recognizes(self, param: Tensor) -> bool:
        return LocalEngine().recognizes(param)

    def knows_shape(self, param: Tensor) -> bool:
        """Whether `shape` is more than an assumption, see [Note: sizes]."""
        return not self.is_cut or self._known_sizes(param) is not None

    def shape(self, param: Tensor) -> Shape:
        if not self.is_cut:
            return tuple(param.shape)
        assert self.cut is not None
        total = sum(self._sizes(param))
        return tuple(total if dim == self.cut.dim else size for dim, size in enumerate(param.shape))

    def describe(self, param: Tensor, view: MatrixView, group: Any) -> Description:
        replicas = GroupRef.of(group)
        grid = replica_grid(self.shards, replicas)
        ranks = union(grid)
        copies = f", {len(grid)} replicas" if len(grid) > 1 else ""
        hint = self.shards if len(grid) == 1 else replicas if len(self.shards.ranks) == 1 else None
        if self.is_cut:
            assert self.cut is not None
            layout = cut_layout(view, grid, self.cut, self._sizes(param))
            stride = f" with stride {self.cut.stride}" if self.cut.stride > 1 else ""
            text = f"a plain tensor cut along dim {self.cut.dim}{stride} over {len(grid[0])} tensor-parallel ranks"
        else:
            layout, text = replicated_layout(view, ranks), f"a plain tensor replicated over ranks {ranks}"
            copies = ""
        return Description(ranks, (Claim(layout, tuple(param.shape)),), tuple(param.shape), text + copies, hint)

    def layout_of_blocks(self, param: Tensor, shape: Shape, num_row_dims: int, group: Any) -> ParamLayout:
        """The layout of a tensor of `shape` that has one element per block of the parameter's columns."""
        assert self.cut is not None
        sizes = self._sizes(param)
        if self.cut.dim >= num_row_dims:  # cut between blocks, else the momentum would have been refused
            total = sum(sizes)
            sizes = tuple(-(-size * shape[-1] // total) for size in sizes)
        view = MatrixView(shape, num_row_dims, ())
        return cut_layout(view, replica_grid(self.shards, GroupRef.of(group)), self.cut, sizes)

    def storage(self, tensor: Tensor) -> Tensor:
        return LocalEngine().storage(tensor)

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        return LocalEngine().stored_alike(tensor, param)

    def wrap(self, storage: Tensor, param: Tensor, shape: Shape | None = None) -> Tensor:
        return storage

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        return LocalEngine().is_aligned(grad, param)

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        return LocalEngine().align(grad, param)

    def signature(self, param: Tensor) -> object:
        return tuple(param.shape), self

    def lacks_gradient(self, param: Tensor) -> bool:
        return False

    def _key(self, param: Tensor) -> object:
        return tuple(param.shape), self.shards.ranks, self.cut

    def _known_sizes(self, param: Tensor) -> Ranks | None:
        key, sizes = _SIZES.get(param, (None, None))
        return sizes if key == self._key(param) else None

    def _sizes(self, param: Tensor) -> tuple[int, ...]:
        assert self.cut is not None
        return self._known_sizes(param) or (int(param.shape[self.cut.dim]),) * len(self.shards.ranks)

    def remember_sizes(self, param: Tensor, sizes: tuple[int, ...]) -> None:
        """Remember the sizes of all shards."""
        _SIZES[param] = (self._key(param), sizes)


def remember_shape(engine: object, param: Tensor, layout: table.ParamLayout) -> None:
    """Remember the sizes of a parameter's shards, from its layout."""
    if isinstance(engine, TensorParallelEngine) and engine.cut is not None and engine.is_cut:
        dim, held = engine.cut.dim, dict(zip(layout.ranks, layout.held, strict=True))
        engine.remember_sizes(
            param,
            tuple(
                sum(one.piece.size[dim] for one in held[rank] if isinstance(one.piece, Box))
                for rank in engine.shards.ranks
            ),
        )


@lru_cache(maxsize=4096)
def cut_layout(view: MatrixView, grid: Grid, cut: Cut, sizes: tuple[int, ...]) -> ParamLayout:
    """Who holds what of a tensor that each group of the grid keeps once, rank i of it `sizes[i]` along the cut dim.

    Raises:
        ValueError: A shard does not divide in `cut.stride` parts.
    """
    pieces = parts_of(view.shape, cut, sizes)
    return layout_of(view, [rank for group in grid for rank in group], pieces * len(grid))


class _Shard(NamedTuple):
    """What a rank tells of one shard."""

    name: str
    cut: Cut
    shape: Shape


class Gathered(NamedTuple):
    """What the ranks of the grids have told each other.

    Attributes:
        faults: What is wrong, the same on every rank of a tensor-parallel group.
        waiting: The ranks of each grid -> None, for they wait for this rank whatever it holds.
    """

    faults: Faults
    waiting: dict[Ranks, Any]


def gather_shards(groups: Iterable[Mapping[str, Any]]) -> Gathered:
    """Learn the grid and the sizes of all shards, see [Note: sizes]. Collective among every grid of the groups.

    Never raises on one rank alone: which groups talk hangs on the groups' options and the kind of their tensors only,
    and whatever is raised while this rank reads its shards is what it says.
    """
    groups = list(groups)
    faults, waiting = gather_grids(groups)
    cut: dict[GroupRef, list[tuple[str, Tensor, TensorParallelEngine]]] = {}
    unread: dict[GroupRef, Faults] = {}
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            try:
                engine = _engine_or_none(param, group)
                if engine is not None:
                    members = cut.setdefault(engine.shards, [])
                    if engine.is_cut:
                        members.append((name_of(group, index, position), param, engine))
            except BaseException as wrong:
                text = f"{name_of(group, index, position)}: {fault_text(wrong)}"
                faults.add(text, wrong)
                waits = _shards_or_none(param, group)
                if waits is not None:
                    cut.setdefault(waits, [])
                    unread.setdefault(waits, Faults()).add(text)
    order: dict[tuple[int, Ranks], GroupRef] = {}
    for shards in cut:
        order[len(shards.ranks), shards.ranks] = shards
    for key in sorted(order):
        shards = order[key]
        if len(shards.ranks) > 1:
            found = _gather_shapes(shards, cut[shards], unread.get(shards, Faults()))
            faults = Faults(found.text or faults.text, faults.cause or found.cause)
    return Gathered(faults, waiting)


def gather_grids(groups: Iterable[Mapping[str, Any]]) -> Gathered:
    """The first half of `gather_shards`: the grids alone, which are learned once."""
    grids: dict[tuple[int, int, Ranks, Ranks], tuple[GroupRef, GroupRef | None]] = {}
    faults = Faults()
    for group in groups:
        with faults.guard():  # someone may have written to the group: reported, not raised on one rank
            shards = _reference(group, "tp_group")
            replicas = None if group.get("rank_local") else _reference(group, "process_group")
            if shards is not None and shards.ranks:
                those = () if replicas is None else replicas.ranks
                grids[len(those), len(shards.ranks), those, shards.ranks] = (shards, replicas)
            flat = [p for p in group["params"] if hasattr(p, "_shardmuon_flat") or hasattr(p, FLATTENED)]
            for copies, those_of in map(_copies, flat):
                if copies is not None and those_of is not None:
                    grids[len(those_of.ranks), len(copies.ranks), those_of.ranks, copies.ranks] = (copies, those_of)
    waiting: dict[Ranks, Any] = {}
    for key in sorted(grids):
        with faults.guard():
            ranks = union(replica_grid(*grids[key]))
            if len(ranks) > 1:
                waiting[ranks] = None
    return Gathered(faults, waiting)


def _copies(param: Tensor) -> tuple[GroupRef | None, GroupRef | None]:
    """The groups of a flat shard that several ranks keep: of those ranks, and of those that share the tensor out."""
    from shardmuon.engines import engine_of

    read: Any = getattr(engine_of(param), "info", None)  # flat engines have it
    info = None if read is None else read(param)
    return (info.tp_group, GroupRef.of(info.group)) if info is not None and info.copies else (None, None)


def _reference(group: Mapping[str, Any], key: str) -> GroupRef | None:
    value = group.get(key)
    return value if value is None or isinstance(value, GroupRef) else GroupRef.of(value, key)


def _engine_or_none(param: Tensor, group: Mapping[str, Any]) -> TensorParallelEngine | None:
    from shardmuon.engines import engine_for

    engine = engine_for(param, group)
    return engine if isinstance(engine, TensorParallelEngine) else None


def _shards_or_none(param: Tensor, group: Mapping[str, Any]) -> GroupRef | None:
    """The tensor-parallel group of a parameter whose engine could not be found or read: its ranks wait for this one."""
    from shardmuon.engines import engine_of

    try:
        shards = _reference(group, "tp_group")
        own = type(engine_of(param)) is LocalEngine
    except BaseException:
        return None  # nothing can be said of it; an option that cannot be read was reported by `gather_grids`
    return shards if shards is not None and shards.ranks and own else None


def _gather_shapes(shards: GroupRef, cut: Sequence[tuple[str, Tensor, TensorParallelEngine]], mine: Faults) -> Faults:
    """Tell each other the shapes of all shards, and what could not be read (`mine`). Returns what is wrong."""
    shapes: list[_Shard] = []
    with mine.guard():
        shapes = [_Shard(name, engine.cut, tuple(param.shape)) for name, param, engine in cut if engine.cut is not None]
    fault, everyone = share_with_faults(mine.signed, shapes, tuple(sorted(shards.ranks)), shards)
    found = Faults(fault, mine.cause)
    if fault is None:
        with found.guard():
            found.add(_compare_shapes(shards, cut, everyone))
    return found


def _compare_shapes(
    shards: GroupRef, cut: Sequence[tuple[str, Tensor, TensorParallelEngine]], everyone: Sequence[Sequence[_Shard]]
) -> str | None:
    """Remember the sizes, or say why they do not fit together. `everyone`: by ascending rank."""
    ordered = tuple(sorted(shards.ranks))
    for rank, theirs in zip(ordered, everyone, strict=True):
        for first, other in zip(everyone[0], theirs, strict=False):
            if first.cut != other.cut or at_dim(first.shape, first.cut.dim, 0) != at_dim(other.shape, first.cut.dim, 0):
                return (
                    f"{first.name}: ranks {shards.ranks} of one tp_group hold different tensors at one place: rank "
                    f"{ordered[0]} lists {_text(first)}, rank {rank} {_text(other)}. All must list their shards "
                    "of the same tensors in the same order, equal but for the dim that is cut"
                )
        if len(theirs) != len(everyone[0]):
            longer = max(everyone[0], theirs, key=len)
            return (
                f"ranks {shards.ranks} of one tp_group list {len(everyone[0])} (rank {ordered[0]}) and {len(theirs)} "
                f"(rank {rank}) shards; only one of them has {_text(longer[min(len(everyone[0]), len(theirs))])}. "
                "Every rank must give the optimizer its shards of the same tensors"
            )
    position = [ordered.index(rank) for rank in shards.ranks]
    for index, (_, param, engine) in enumerate(cut):
        assert engine.cut is not None
        engine.remember_sizes(param, tuple(everyone[at][index].shape[engine.cut.dim] for at in position))
    return None


def _text(shard: _Shard) -> str:
    return f"{shard.name} of shape {shard.shape}, cut along dim {shard.cut.dim} with stride {shard.cut.stride}"
