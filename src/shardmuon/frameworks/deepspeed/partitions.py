"""DeepSpeed ZeRO: flat fp32 partitions in which matrices are cut at any element, and their swap files (NVMe offload).

Every private attribute of DeepSpeed that shardmuon reads is in this file and in host.py. DeepSpeed is never imported.

[Note: what DeepSpeed steps]
    `deepspeed.initialize` replaces the parameters in the optimizer's groups by *flats*: this rank's 1-D fp32 partition
    of a group (stages 1 and 2, and the BF16 optimizer) or of a sub-group (stage 3), with the gradients reduced,
    unscaled and clipped. Stages 1 and 2 call `step()` once per group with that group alone, stage 3 once per sub-group
    with all other groups empty, the BF16 optimizer once. All ranks make the same calls in the same order. The
    parameters that the optimizer was made with live on in the model, and say where their elements went:
    stages 1 and 2, BF16   see [Note: where a parameter lies]
    stage 3                `_z3_optimizer` with the sub-groups' parameters and flats; rank r of `ds_process_group` holds
                           elements [r k, (r + 1) k) of each, k = `partition_numel()`
    The ranks exchange what they hold when the plan is made, and it must cover every parameter once. Before the first
    update, after state was loaded and at audits each part is compared with what the model has at that place.

[Note: where a parameter lies]
    At stages 1 and 2 and under the BF16 optimizer the parameters of a group are views of one buffer, in an order of
    DeepSpeed's own (`round_robin_gradients`, `parameter_alignment`). Rank r of `_dp_group` steps an fp32 copy of the
    r-th equal part of it, its flat. So a parameter's place in the buffer says which part of it a flat holds, and where.
    DeepSpeed's own record, `_hp_mapping`, is made in the order of the groups instead and is wrong with
    `round_robin_gradients` (0.19.8): of it only that it is there is read.

[Note: what is swapped]
    With NVMe offload of optimizer state at stage 3 a sub-group of which a rank holds at least max(1 MiB,
    `aio.block_size`) lies in files: weights, every state as long as its flat (unless it has `swappable = False`) and
    gradients of that size. Its flat and states are empty but while they are stepped. The smaller sub-groups stay in
    memory.

[Note: gradients that do not come back]
    A swapped gradient is read by direct I/O into the sub-group's buffer, at the parameter's offset. File systems take
    memory addresses that are multiples of 512 bytes, some of any or of up to a page. Elsewhere the read fails,
    DeepSpeed does not look at the result, and what the buffer held before is stepped. Buffers begin at a page, so
    offsets tell. Only those of whole pages are allowed.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon.comm.groups import group_ranks
from shardmuon.layout.engines.base import Claim, Engine, Group
from shardmuon.layout.engines.flat import FlatShard, mark_flat
from shardmuon.layout.views import Ints
from shardmuon.momentum.keeper import Keeper

_TESTED = "0.19.8"
_PAGE = 4096  # bytes; every file system reads to addresses that are multiples of it


class Slice(NamedTuple):
    """A part of one parameter, which this rank's flat holds.

    Attributes:
        param: The model's parameter.
        start: First element in the flattened parameter.
        numel: Number of elements, 0 if there is nothing of it here.
        offset: First element in the flat.
    """

    param: Tensor
    start: int
    numel: int
    offset: int


def shape_of(param: Tensor) -> Ints:
    """The parameter's shape, also while ZeRO 3 keeps a placeholder in its place."""
    return tuple(getattr(param, "ds_shape", param.shape))


def is_partitioned(params: Iterable[Tensor]) -> bool:
    """True if DeepSpeed has made partitions of any of these model parameters."""
    return "deepspeed" in sys.modules and any(hasattr(p, "_z3_optimizer") or hasattr(p, "_hp_mapping") for p in params)


# ------------------------------------------------------------------------------------------ which part is where


def slices_of(flat: Tensor, params: Sequence[Tensor]) -> tuple[list[Slice], Any]:
    """Find what a flat holds.

    Args:
        flat: A tensor that DeepSpeed put into a group of the optimizer.
        params: The model parameters with which the group was made.

    Returns:
        This rank's slices of all trainable parameters that the flat shares out, in an order that all ranks share, and
        the process group that shares it.

    Raises:
        ValueError: It is no flat of these parameters, or one that is not supported.
    """
    zero3 = zero3_of(params)
    slices, group = _in_fragments(flat, params) if zero3 is None else _in_stage_3(flat, zero3)
    _refuse_replaced(params, [part.param for part in slices], partly=zero3 is not None)
    return slices, group


def _refuse_replaced(given: Sequence[Any], found: Sequence[Any], partly: bool) -> None:
    """Raise ValueError for parameters that are parts of those that the optimizer was made with, or that only one of
    both sides has.

    Args:
        given: Those that a group was made with.
        found: Those in ZeRO partitions.
        partly: Others of the group may be in other partitions.
    """
    known, kept = {id(p) for p in given}, {id(p) for p in found}
    wrong = [p for p in found if id(p) not in known]
    wrong += [p for p in given if p.requires_grad and id(p) not in kept and not partly]
    if wrong:
        raise ValueError(
            f"parameters of shapes {[shape_of(p) for p in wrong]} are in ZeRO partitions, and the optimizer was not "
            "made with them, or the other way round: DeepSpeed has put others in their place (AutoTP, AutoEP), or they "
            "were frozen in initialize(). Set autotp_size=1, leave expert_parallel out, or make the optimizer anew"
        )
    for p in found:
        if getattr(p, "tensor_model_parallel", False) or getattr(p, "ds_is_replaced_module", False):
            raise ValueError(
                f"a parameter of shape {shape_of(p)} is a tensor-parallel shard (AutoTP), and the ZeRO partition that "
                f"DeepSpeed steps in its place is not known to be one. {_TENSOR_PARALLEL}"
            )


def check_version() -> None:
    """Warn of a DeepSpeed newer than the tested one. Raises ValueError for an older one: none of them hands over the
    right gradient with every setting (benchmarks/results/nvme.md)."""
    here = _version()
    found, tested = ([int(n) for n in re.findall(r"\d+", text)[:3]] for text in (here, _TESTED))
    if found < tested:
        raise ValueError(
            f"DeepSpeed {here}: before {_TESTED} it hands over wrong gradients with some settings (stage 2 with "
            f"contiguous_gradients false), with any optimizer. Install deepspeed=={_TESTED}"
        )
    if found > tested:
        warnings.warn(
            f"DeepSpeed {here} is newer than {_TESTED}, with which shardmuon is tested. What it keeps is checked, "
            "what it does is not: write audit_every=1000 to be sure",
            stacklevel=2,
        )


def _in_fragments(flat: Tensor, params: Sequence[Tensor]) -> tuple[list[Slice], Any]:
    """Stages 1 and 2 and the BF16 optimizer, see [Note: where a parameter lies]."""
    members: list[Any] = [p for p in params if hasattr(p, "_hp_mapping")]
    if not members:
        raise ValueError("none of the group's parameters carries a ZeRO fragment (attribute _hp_mapping)")
    tagged = next((p for p in members if getattr(p, "use_muon", False)), None)
    if tagged is not None:
        raise ValueError(
            f"a parameter of shape {tuple(tagged.shape)} has the attribute use_muon=True: with an optimizer whose "
            "class name contains 'muon' DeepSpeed orthogonalizes the gradients itself at stages 1 and 2, before "
            'step(). Take "optimizer" out of the configuration: where its type is Muon, deepspeed.initialize() sets '
            "the attribute. If you set it, delete it before; to route parameters write param_groups(model, "
            "overrides=...)"
        )
    group = members[0]._dp_group
    ranks = group_ranks(group)
    first = ranks.index(torch.distributed.get_rank()) * flat.numel()  # of this flat's elements in the buffer
    slices = []
    for p, place in zip(members, _places(members), strict=True):
        start, stop = max(place, first), min(place + p.numel(), first + flat.numel())
        slices.append(Slice(p, start - place, stop - start, start - first) if start < stop else Slice(p, 0, 0, 0))
    return slices, group


def _places(params: Sequence[Tensor]) -> list[int]:
    """Elements at which parameters begin in the buffer that they are views of; the least is 0."""
    begin = min(int(p.storage_offset()) for p in params)
    places = [int(p.storage_offset()) - begin for p in params]
    if len({p.untyped_storage().data_ptr() for p in params}) > 1 or not all(p.is_contiguous() for p in params):
        raise ValueError(
            "the parameters of a group are no longer views of one of DeepSpeed's buffers: something gave them storage "
            "of their own after deepspeed.initialize() (p.data = ..., model.to(...)). Do so before it, or copy in place"
        )
    return places


# Settings of ZeRO 3, as its optimizer has them, with which parts are cut otherwise or stepped by DeepSpeed's own Adam.
_STAGE_3 = {"zero_hpz_partition_size": 1, "partial_offload": 1.0, "zenflow": False}


def _in_stage_3(flat: Tensor, zero3: Any) -> tuple[list[Slice], Any]:
    """Stage 3: rank r holds an equal part of each parameter, padded at the end."""
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
    """True if this part of a flat is something else than what the model has there, rounded to the model's dtype.

    Where either is in files now there is nothing to compare: False.
    """
    param: Any = part.param
    if hasattr(param, "ds_tensor"):  # stage 3: this rank's part, padded
        if param.ds_tensor.status.name != "AVAILABLE" or flat.numel() < part.offset + part.numel:
            return False
        own = param.ds_tensor.detach().view(-1)[: part.numel]
    else:
        own = param.detach().view(-1)[part.start : part.start + part.numel]
    mine = flat.detach().narrow(0, part.offset, part.numel).to(own.device, own.dtype)
    return not (torch.equal(own, mine) or bool((own.eq(mine) | (own.isnan() & mine.isnan())).all()))


def refuse_copies() -> None:
    """Raise ValueError for what DeepSpeed steps at stage 0 in half precision. Its copies carry no attributes, so that
    an AutoTP shard looks like a whole matrix."""
    raise ValueError(
        f"at ZeRO 0 with bf16 or fp16 DeepSpeed ({_TESTED}) steps fp32 copies of its own, which may be parts of "
        "matrices (AutoTP) and with fp16 have gradients divided by a loss scale that the loss was not multiplied by. "
        "Train in fp32, or at ZeRO stage 1"
    )


def refuse_options(keeper: Keeper, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for options of the optimizer or its groups that have no place on flats."""
    if keeper.dtype is not None or keeper.device is not None or keeper.rounds_weights:
        raise ValueError(
            f"{keeper.text()} momentum_device={keeper.device!r}: DeepSpeed keeps and offloads state and weights "
            "itself, as its config says (fp32, or bf16_master_weights_and_grads). Leave these options out; use "
            "offload_optimizer in its config"
        )
    for index, group in enumerate(groups):
        if group["use_muon"] and group.get("tp_group") is not None:
            raise ValueError(
                f"group {index}: tp_group={group['tp_group']!r}: ZeRO partitions of tensor-parallel shards are not "
                f"supported. {_TENSOR_PARALLEL}, or leave tp_group out"
            )


_TENSOR_PARALLEL = "Train in fp32 at ZeRO stage 0, with tp_group and partition_dim, or set autotp_size=1"


def _version() -> str:
    return str(getattr(sys.modules.get("deepspeed"), "__version__", "of unknown version"))


def make_shard(flat: Tensor, part: Slice, group: Any) -> Tensor:
    """A leaf that is stepped in a parameter's place, still empty: it is shown its slice of the flat in each step."""
    shard = torch.nn.Parameter(flat.new_empty(0))
    home = part.param.device if part.param.device.type != flat.device.type else None  # offload_optimizer
    return mark_flat(shard, FlatShard(shape_of(part.param), part.start, group, "ZeRO partitions", home=home))


class DeepSpeedEngine(Engine):
    """Model parameters whose place ZeRO 3 has taken. Refuses them: DeepSpeed's own optimizer steps their partitions."""

    def recognizes(self, param: Tensor) -> bool:
        return hasattr(param, "ds_shape")

    def shape(self, param: Tensor) -> Ints:
        return shape_of(param)

    def claim(self, param: Tensor, group: Group) -> Claim:
        raise ValueError(
            "ZeRO 3 keeps it in partitions (zero.Init), and this optimizer steps it without DeepSpeed. Give the "
            "optimizer to deepspeed.initialize(model=..., optimizer=...) and step the engine"
        )


# ------------------------------------------------------------------------------------------------------ swap files


def zero3_of(params: Iterable[Tensor]) -> Any:
    """DeepSpeed's stage-3 optimizer that steps any of these model parameters, or None."""
    return next((p._z3_optimizer for p in params if hasattr(p, "_z3_optimizer")), None)


def swapped_numel(flat: Tensor, zero3: Any) -> int:
    """Elements of a flat that lies in files now and then, 0 for one that stays in memory."""
    if not getattr(zero3, "swap_optimizer", False):
        return 0
    number = _number_of(flat, zero3)
    return int(zero3.fp16_partitioned_groups_flat_numel[number]) if zero3._swappable_optimizer_subgroup(number) else 0


def _number_of(flat: Tensor, zero3: Any) -> int:
    """The number of the sub-group of stage 3 that a flat is."""
    return next(i for i, other in enumerate(zero3.fp32_partitioned_groups_flat) if other is flat)


def refuse_params(named: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError for weights on NVMe, which DeepSpeed does not always keep as they were: it may make bf16 of fp32
    ones, and reads them to addresses that direct I/O does not take. `named`: (name, parameter)."""
    for name, p in named:
        if getattr(p, "nvme_swapper", None) is not None:
            raise ValueError(
                f'{name}: offload_param to NVMe is not supported. Write offload_param: {{"device": "cpu"}}; '
                "offload_optimizer to NVMe is"
            )


def refuse_swaps(flat: Tensor, named: Sequence[tuple[str, Any]], num_states: int) -> None:
    """Raise ValueError if a sub-group is swapped and DeepSpeed would not do so right.

    Args:
        flat: The sub-group's.
        named: (name, parameter) of the group that it is of.
        num_states: States as long as the flat.
    """
    zero3 = zero3_of(p for _, p in named)
    if not swapped_numel(flat, zero3):
        return
    swapper = zero3.optimizer_swapper
    count, needed = swapper.swap_config.buffer_count, num_states + 2
    if count < needed:
        raise ValueError(
            f"offload_optimizer: buffer_count={count}, but weights, gradient and {num_states} states are swapped in "
            f"together. Write {needed} or more"
        )
    names = {id(p): name for name, p in named}
    gradients = []
    for p in zero3.fp16_groups[_number_of(flat, zero3)]:
        _, offset, numel = zero3.grad_position[zero3.get_param_id(p)]
        gradients.append((names.get(id(p), f"a parameter of shape {tuple(p.ds_shape)}"), offset, numel))
    refuse_misplaced(gradients, int(swapper.min_aio_bytes), int(swapper.swap_element_size))


def refuse_misplaced(gradients: Sequence[tuple[str, int, int]], least: int, size: int) -> None:
    """Raise ValueError for a swapped gradient at an address that direct I/O may not take.

    Args:
        gradients: (parameter's name, first element in the sub-group's buffer, number of elements on a rank with
            padding) of one sub-group.
        least: Bytes from which on a gradient is swapped.
        size: Bytes of an element.
    """
    for name, offset, numel in gradients:
        if numel * size >= least and offset * size % _PAGE:
            raise ValueError(
                f"{name}: DeepSpeed reads its gradient from NVMe to element {offset} of its sub-group (byte "
                f"{offset * size}), and not every file system reads to an address that is no multiple of {_PAGE}. "
                "DeepSpeed does not notice that a read fails and would step an old gradient in its place. Put "
                f"parameters whose elements a rank are no multiple of {_PAGE // size} into a group of their own, or "
                'pad them, or write offload_optimizer: {"device": "cpu"}'
            )


def refuse_loaded(step: FrameType | None) -> None:
    """Raise ValueError if a checkpoint has come back by DeepSpeed's function alone, as its engine remembers.

    Args:
        step: The engine's call of the step.
    """
    if step is not None and step.f_locals["self"].loaded_checkpoint_dp_world_size is not None:
        raise ValueError(
            "a checkpoint was loaded with engine.load_checkpoint: with NVMe offload DeepSpeed loads no optimizer "
            "state in a new process and never the weights of small sub-groups. Start again and load it with "
            "shardmuon.frameworks.deepspeed.load_checkpoint(engine, folder, tag)"
        )
