"""DeepSpeed ZeRO: flat fp32 partitions, which may split a matrix at any element, and their swap files (NVMe offload).

Every private attribute of DeepSpeed that shardmuon reads is in this file and in host.py. DeepSpeed is never imported.

[Note: what DeepSpeed steps]
    `deepspeed.initialize` replaces the parameters in the optimizer's groups by *flats*: this rank's 1-D fp32 partition
    of a group (stages 1 and 2, and the BF16 optimizer) or of a sub-group (stage 3). Gradients of flats are reduced,
    unscaled and clipped. Stages 1 and 2 call `step()` once per group with only this group, stage 3 once per sub-group
    with all other groups empty, and the BF16 optimizer once. All ranks make the same calls in the same order. The
    original parameters of the optimizer remain in the model. Their attributes tell where their elements are stored:
    stages 1 and 2, BF16   see [Note: where a parameter lies]
    stage 3                `_z3_optimizer` with the sub-groups' parameters and flats; rank r of `ds_process_group` holds
                           elements [r k, (r + 1) k) of each parameter, k = `partition_numel()`
    When the plan is made, ranks exchange which elements they hold; together these must cover every parameter once.
    Before the first update, after loading state, and at audits, each part is compared with the model's weights.

[Note: where a parameter lies]
    At stages 1 and 2 and with the BF16 optimizer, the parameters of a group are views of one buffer, in an order that
    DeepSpeed chooses (`round_robin_gradients`, `parameter_alignment`). The buffer is cut into equal parts, and rank r
    of `_dp_group` steps an fp32 copy of part r, the rank's flat. So a parameter's offset in the buffer tells which of
    its elements a flat holds, and where. DeepSpeed's own record, `_hp_mapping`, follows the order of the groups instead
    and is wrong with `round_robin_gradients` (0.19.8), so only its presence is read.

[Note: what is swapped]
    With NVMe offload of optimizer state at stage 3, a sub-group is swapped to files if a rank holds at least max(1 MiB,
    `aio.block_size`) of it. The files hold the sub-group's weights, all state tensors that are as long as its flat
    (except tensors with `swappable = False`), and gradients of at least this size. The flat and its state tensors are
    empty except while they are stepped. Smaller sub-groups stay in memory.

[Note: gradients that do not come back]
    A swapped gradient is read by direct I/O into the sub-group's buffer, at the parameter's offset. Direct I/O needs
    aligned memory addresses: multiples of 512 bytes on most file systems, and of 1 byte up to a page on others. At
    other addresses the read fails, DeepSpeed ignores the failure, and the buffer's old content is used as gradient.
    Buffers begin at a page boundary, so offsets determine the alignment. Only offsets of whole pages are allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from shardmuon.comm.groups import group_ranks
from shardmuon.layout.engines.base import Claim, Engine, Group
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.layout.views import Ints
from shardmuon.momentum.keeper import Keeper

_TESTED = "0.19.8"
_PAGE = 4096  # bytes; on every file system, direct I/O can read to addresses that are multiples of a page


class Slice(NamedTuple):
    """Part of one parameter in this rank's flat, the 1-D partition that DeepSpeed steps.

    Attributes:
        param: The model's parameter.
        start: Index of the first element in the flattened parameter.
        numel: Number of elements; 0 if the flat holds nothing of the parameter.
        offset: Index of the first element in the flat.
    """

    param: Tensor
    start: int
    numel: int
    offset: int


def _shape_of(param: Tensor) -> Ints:
    """Return the full shape of a parameter, even while ZeRO 3 has replaced its data by a placeholder."""
    return tuple(getattr(param, "ds_shape", param.shape))


def is_partitioned(params: Iterable[Tensor]) -> bool:
    """True if DeepSpeed has partitioned any of these model parameters."""
    return "deepspeed" in sys.modules and any(hasattr(p, "_z3_optimizer") or hasattr(p, "_hp_mapping") for p in params)


# ---------------------------------------------------------------------------------------- positions of parameters


def slices_of(flat: Tensor, params: Sequence[Tensor]) -> tuple[list[Slice], Any]:
    """Find the slices of parameters in a flat, the 1-D partition that DeepSpeed steps on this rank.

    Args:
        flat: Tensor that DeepSpeed put into a group of the optimizer.
        params: Model parameters that the group contained before.

    Returns:
        This rank's slices of all trainable parameters in the flat's group or sub-group, in an order that is the same on
        all ranks (empty slices included), and the process group over which these parameters are partitioned.

    Raises:
        ValueError: The tensor is not a flat of these parameters, or DeepSpeed partitions in a way that is not
            supported.
    """
    zero3 = zero3_of(params)
    slices, group = _in_fragments(flat, params) if zero3 is None else _in_stage_3(flat, zero3)
    _refuse_replaced(params, [part.param for part in slices], partly=zero3 is not None)
    return slices, group


def _refuse_replaced(given: Sequence[Any], found: Sequence[Any], partly: bool) -> None:
    """Raise ValueError if ZeRO's partitions and an optimizer group have different parameters, or if a partition
    contains a tensor-parallel shard (AutoTP).

    Args:
        given: Parameters with which the group was made.
        found: Parameters in the ZeRO partitions.
        partly: True if some of the group's parameters may be in other partitions.
    """
    known, kept = {id(p) for p in given}, {id(p) for p in found}
    wrong = [p for p in found if id(p) not in known]
    wrong += [p for p in given if p.requires_grad and id(p) not in kept and not partly]
    if wrong:
        raise ValueError(
            f"parameters of shapes {[_shape_of(p) for p in wrong]} are in ZeRO partitions, and the optimizer was not "
            "made with them, or the other way round: DeepSpeed has put others in their place (AutoTP, AutoEP), or they "
            "were frozen in initialize(). Set autotp_size=1, leave expert_parallel out, or make the optimizer anew"
        )
    for p in found:
        if getattr(p, "tensor_model_parallel", False) or getattr(p, "ds_is_replaced_module", False):
            raise ValueError(
                f"a parameter of shape {_shape_of(p)} is a tensor-parallel shard (AutoTP), and the ZeRO partition that "
                f"DeepSpeed steps in its place is not known to be one. {_TENSOR_PARALLEL}"
            )


def check_version() -> None:
    """Raise ValueError if DeepSpeed is older than the tested version, because older versions pass wrong gradients to
    the optimizer with some settings (benchmarks/results/nvme.md)."""
    here = sys.modules["deepspeed"].__version__
    if TorchVersion(here) < _TESTED:
        raise ValueError(
            f"DeepSpeed {here}: before {_TESTED} it hands over wrong gradients with some settings (stage 2 with "
            f"contiguous_gradients false), with any optimizer. Install deepspeed=={_TESTED}"
        )


def _in_fragments(flat: Tensor, params: Sequence[Tensor]) -> tuple[list[Slice], Any]:
    """Find the slices of parameters in a flat, and their process group, at stages 1 and 2 and with the BF16 optimizer:
    see [Note: where a parameter lies]."""
    members: list[Any] = [p for p in params if hasattr(p, "_hp_mapping")]
    tagged = next((p for p in members if getattr(p, "use_muon", False)), None)
    if tagged is not None:
        raise ValueError(
            f"a parameter of shape {tuple(tagged.shape)} has the attribute use_muon=True: with an optimizer whose "
            "class name contains 'muon' DeepSpeed orthogonalizes the gradients itself at stages 1 and 2, before "
            'step(). Take "optimizer" out of the configuration: where its type is Muon, deepspeed.initialize() sets '
            "the attribute. If you set it, delete it before; to route parameters write param_groups(model, "
            "overrides=...)"
        )
    if len({p.untyped_storage().data_ptr() for p in members}) > 1 or not all(p.is_contiguous() for p in members):
        raise ValueError(
            "the parameters of a group are no longer views of one of DeepSpeed's buffers: something gave them storage "
            "of their own after deepspeed.initialize() (p.data = ..., model.to(...)). Do so before it, or copy in place"
        )
    group = members[0]._dp_group
    ranks = group_ranks(group)
    first = ranks.index(torch.distributed.get_rank()) * flat.numel()  # begin of this rank's partition in the buffer
    begin = min(p.storage_offset() for p in members)
    slices = []
    for p in members:
        place = p.storage_offset() - begin  # position in the buffer
        start, stop = max(place, first), min(place + p.numel(), first + flat.numel())
        slices.append(Slice(p, start - place, stop - start, start - first) if start < stop else Slice(p, 0, 0, 0))
    return slices, group


# Attributes of ZeRO 3's optimizer -> the supported value. With other values, parameters are partitioned differently, or
# DeepSpeed's own Adam steps parts of them.
_STAGE_3 = {"zero_hpz_partition_size": 1, "partial_offload": 1.0, "zenflow": False}


def _in_stage_3(flat: Tensor, zero3: Any) -> tuple[list[Slice], Any]:
    """Find the slices of parameters in a flat, and their process group, at stage 3, where each rank holds an equal part
    of each parameter, padded at the end."""
    kind = type(zero3).__name__
    if kind != "DeepSpeedZeroOptimizer_Stage3":
        raise ValueError(f"{kind} (MiCS, ZenFlow) is not supported. Use ZeRO 3 without it")
    for name, allowed in _STAGE_3.items():
        found = getattr(zero3, name, allowed)
        if found != allowed:
            raise ValueError(
                f"{name}={found!r} of ZeRO 3 (hpZ, partial offload, ZenFlow) is not supported: leave it out"
            )
    number = _number_of(flat, zero3)
    params, offset, slices = zero3.fp16_groups[number], 0, []
    group = params[0].ds_process_group
    ranks = group_ranks(group)
    rank = ranks.index(torch.distributed.get_rank())
    for p in params:
        place = zero3.grad_position[zero3.get_param_id(p)]
        size = p.partition_numel()
        if tuple(place[:2]) != (number, offset) or size * len(ranks) < p.ds_numel or p.ds_process_group is not group:
            raise ValueError(
                f"a parameter of {p.ds_numel} elements on {len(ranks)} ranks is said to lie at {tuple(place)} in "
                f"sub-group {number}, expected offset {offset}"
            )
        start, stop = min(rank * size, p.ds_numel), min((rank + 1) * size, p.ds_numel)
        slices.append(Slice(p, start, stop - start, offset))
        offset += size
    return slices, group


def differs_from_model(flat: Tensor, part: Slice) -> bool:
    """True if a slice of DeepSpeed's fp32 weights, rounded to the model's dtype, differs from the model's weights.
    False if the slice or the weights are currently in swap files, so that they cannot be compared.
    """
    param: Any = part.param
    if hasattr(param, "ds_tensor"):  # stage 3 stores only this rank's part, with padding
        if param.ds_tensor.status.name != "AVAILABLE" or flat.numel() < part.offset + part.numel:
            return False
        own = param.ds_tensor.detach().view(-1)[: part.numel]
    else:
        own = param.detach().view(-1)[part.start : part.start + part.numel]
    mine = flat.detach().narrow(0, part.offset, part.numel).to(own.device, own.dtype)
    return not (torch.equal(own, mine) or bool((own.eq(mine) | (own.isnan() & mine.isnan())).all()))


def refuse_copies() -> None:
    """Raise ValueError for ZeRO stage 0 in half precision, where DeepSpeed steps fp32 copies of the parameters. The
    copies lack the parameters' attributes, so a tensor-parallel shard (AutoTP) would look like a whole matrix."""
    raise ValueError(
        f"at ZeRO 0 with bf16 or fp16 DeepSpeed ({_TESTED}) steps fp32 copies of its own, which may be parts of "
        "matrices (AutoTP) and with fp16 have gradients divided by a loss scale that the loss was not multiplied by. "
        "Train in fp32, or at ZeRO stage 1"
    )


def refuse_options(keeper: Keeper, groups: Sequence[tuple[Mapping[str, Any], Sequence[tuple[str, Any]]]]) -> None:
    """Raise ValueError for options that are not supported with ZeRO's partitions, and if weights are offloaded to NVMe,
    because DeepSpeed may corrupt them: it may round fp32 weights to bf16, and it reads weights into memory addresses
    that direct I/O does not support.

    Args:
        keeper: How the optimizer stores momentum.
        groups: For each optimizer group: the group, and (name, parameter) of the model parameters in it.
    """
    if keeper.dtype is not None or keeper.device is not None or keeper.rounds_weights:
        raise ValueError(
            f"{keeper.text()} momentum_device={keeper.device!r}: DeepSpeed keeps and offloads state and weights "
            "itself, as its config says (fp32, or bf16_master_weights_and_grads). Leave these options out; use "
            "offload_optimizer in its config"
        )
    for index, (group, named) in enumerate(groups):
        if group["use_muon"] and group.get("tp_group") is not None:
            raise ValueError(
                f"group {index}: tp_group={group['tp_group']!r}: ZeRO partitions of tensor-parallel shards are not "
                f"supported. {_TENSOR_PARALLEL}, or leave tp_group out"
            )
        for name, p in named:
            if getattr(p, "nvme_swapper", None) is not None:
                raise ValueError(
                    f'{name}: offload_param to NVMe is not supported. Write offload_param: {{"device": "cpu"}}; '
                    "offload_optimizer to NVMe is"
                )


_TENSOR_PARALLEL = "Train in fp32 at ZeRO stage 0, with tp_group and partition_dim, or set autotp_size=1"


def make_shard(flat: Tensor, part: Slice, group: Any) -> Tensor:
    """Make a leaf tensor that is stepped in place of a parameter. It is empty at first; each step makes it a view of
    the parameter's slice of the flat."""
    shard = torch.nn.Parameter(flat.new_empty(0))
    home = part.param.device if part.param.device.type != flat.device.type else None  # set with offload_optimizer
    return FlatShard(_shape_of(part.param), part.start, group, "ZeRO partitions", home=home).mark(shard)


class DeepSpeedEngine(Engine):
    """Engine that raises an error for model parameters partitioned by ZeRO 3, which only DeepSpeed's optimizer can
    step."""

    def recognizes(self, param: Tensor) -> bool:
        return hasattr(param, "ds_shape")

    def shape(self, param: Tensor) -> Ints:
        return _shape_of(param)

    def claim(self, param: Tensor, group: Group) -> Claim:
        raise ValueError(
            "ZeRO 3 keeps it in partitions (zero.Init), and this optimizer steps it without DeepSpeed. Give the "
            "optimizer to deepspeed.initialize(model=..., optimizer=...) and step the engine"
        )


# ------------------------------------------------------------------------------------------------------ swap files


def zero3_of(params: Iterable[Tensor]) -> Any:
    """Return DeepSpeed's stage-3 optimizer if it steps any of these model parameters, otherwise None."""
    return next((p._z3_optimizer for p in params if hasattr(p, "_z3_optimizer")), None)


def swapped_numel(flat: Tensor, zero3: Any) -> int:
    """Return the number of elements of a flat that DeepSpeed swaps to files; 0 for a flat that stays in memory."""
    if not getattr(zero3, "swap_optimizer", False):
        return 0
    number = _number_of(flat, zero3)
    return int(zero3.fp16_partitioned_groups_flat_numel[number]) if zero3._swappable_optimizer_subgroup(number) else 0


def _number_of(flat: Tensor, zero3: Any) -> int:
    """Find the index of the stage-3 sub-group to which a flat belongs."""
    return next(i for i, other in enumerate(zero3.fp32_partitioned_groups_flat) if other is flat)


def refuse_swaps(flat: Tensor, named: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError if a swapped gradient of the flat's sub-group would be read into a memory address that direct
    I/O may not support: see [Note: gradients that do not come back]. `named`: (name, parameter) pairs of the flat's
    optimizer group."""
    zero3 = zero3_of(p for _, p in named)
    if not swapped_numel(flat, zero3):
        return
    names = {id(p): name for name, p in named}
    least, size = int(zero3.optimizer_swapper.min_aio_bytes), int(zero3.optimizer_swapper.swap_element_size)
    for p in zero3.fp16_groups[_number_of(flat, zero3)]:
        _, offset, numel = zero3.grad_position[zero3.get_param_id(p)]  # in the sub-group's buffer, with padding
        if numel * size >= least and offset * size % _PAGE:
            name = names.get(id(p), f"a parameter of shape {_shape_of(p)}")
            raise ValueError(
                f"{name}: DeepSpeed reads its gradient from NVMe to element {offset} of its sub-group (byte "
                f"{offset * size}), and not every file system reads to an address that is no multiple of {_PAGE}. "
                "DeepSpeed does not notice that a read fails and would step an old gradient in its place. Put "
                f"parameters whose elements a rank are no multiple of {_PAGE // size} into a group of their own, or "
                'pad them, or write offload_optimizer: {"device": "cpu"}'
            )


def refuse_loaded(step: FrameType | None) -> None:
    """Raise ValueError if a checkpoint was loaded by `engine.load_checkpoint` instead of this package's
    `load_checkpoint`. The engine's attribute `loaded_checkpoint_dp_world_size` tells.

    Args:
        step: Stack frame of the engine's method that calls `step()`, or None.
    """
    if step is not None and step.f_locals["self"].loaded_checkpoint_dp_world_size is not None:
        raise ValueError(
            "a checkpoint was loaded with engine.load_checkpoint: with NVMe offload DeepSpeed loads no optimizer "
            "state in a new process and never the weights of small sub-groups. Start again and load it with "
            "shardmuon.frameworks.deepspeed.load_checkpoint(engine, folder, tag)"
        )
