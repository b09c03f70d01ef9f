"""Plain tensors that are whole where they are: one process, DDP replicas, rank-local experts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardmuon.comm.groups import GroupRef, my_rank
from shardmuon.layout.readers.base import Claim, Grid, Group, Ties, ViewOf, union
from shardmuon.layout.table import ParamLayout, replicated

# what messages say of where to find it
AUTOTP_GROUP = "of DeepSpeed's AutoTP: deepspeed.utils.groups.get_tensor_model_parallel_group()"


def is_marked(param: Tensor) -> bool:
    """True if its attributes say that it is a shard, as Megatron and TransformerEngine set them."""
    flag, dim = getattr(param, "tensor_model_parallel", None), getattr(param, "partition_dim", None)
    if flag is None:
        return dim is not None and dim != -1
    return bool(flag) and dim != -1


def refuse_marked(param: Tensor) -> None:
    """Raise ValueError (without the name) for a marked shard of which nothing says over which ranks it is cut."""
    if is_marked(param):
        raise ValueError(
            f"its attribute tensor_model_parallel says that this plain {tuple(param.shape)} tensor may be a shard of a "
            "matrix, but no tp_group says over which ranks. Give Muon(...), or the parameter's group, "
            f"tp_group=<its tensor-parallel process group> ({AUTOTP_GROUP}); tp_group=({my_rank()},) if that has this "
            "rank alone"
        )


def mates_of(group: Group) -> tuple[int, ...]:
    """The ranks (ascending) over which a group's plain tensors are replicas; this one alone without a process group."""
    found = None if group.get("rank_local") else GroupRef.of(group.get("process_group"))
    return (my_rank(),) if found is None or not found.ranks else tuple(sorted(found.ranks))


class LocalReader:
    """A plain tensor is whole where it is.

    Without a process group it is orthogonalized on every rank that has it: right for DDP and for experts that differ by
    rank alike. With one its ranks are taken for replicas, which is checked when a plan is made, and share the work.
    """

    def ties(self, param: Tensor, group: Group) -> Ties:
        return Ties((my_rank(),), mates_of(group))

    def claim(self, param: Tensor, group: Group) -> Claim:
        refuse_marked(param)
        ranks, shape = mates_of(group), tuple(param.shape)
        text = f"a plain tensor replicated over ranks {ranks}" if len(ranks) > 1 else "a plain tensor of this rank"
        return Claim((shape,), text, shape)

    def layout(self, claims: Mapping[int, Claim], grid: Grid, view_of: ViewOf) -> ParamLayout:
        ranks = union(grid)
        return replicated(view_of(claims[ranks[0]].stored), ranks)
