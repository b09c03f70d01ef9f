"""DeepSpeed ZeRO: steps and checkpoints of a `Muon` optimizer that is passed to `deepspeed.initialize`.

DeepSpeed replaces the optimizer's parameters with *flat buffers*: 1-D fp32 partitions, which can begin and end at any
element of a matrix. DeepSpeed can swap flat buffers to files (NVMe offload). Each flat buffer that contains matrices is
stepped by a separate optimizer core. The core's parameters are views of the flat buffer. Its momentum is one tensor
that is as long as the flat buffer and belongs to the state of the user's optimizer. DeepSpeed therefore offloads and
saves the momentum like any other optimizer state.

All code that reads private attributes of DeepSpeed is in this file. shardmuon never imports DeepSpeed.

[Note: what DeepSpeed steps]
    A flat buffer is this rank's partition of a group (ZeRO stages 1 and 2, and the BF16 optimizer) or of a sub-group
    (ZeRO stage 3). DeepSpeed reduces, unscales and clips the gradients of flat buffers before it calls `step()`.

    In a training step, stages 1 and 2 call `step()` once per group, with only this group in the optimizer. Stage 3
    calls `step()` once per sub-group, with all other groups empty. The BF16 optimizer calls `step()` once. All ranks
    make the same calls in the same order.

    The original parameters remain in the model. Their attributes show where their elements are stored:
    stages 1 and 2, BF16   see [Note: positions of parameters]
    stage 3                `_z3_optimizer` contains the parameters and flat buffers of the sub-groups; rank r of
                           `ds_process_group` stores elements [r k, (r + 1) k) of each parameter, with
                           k = `partition_numel()`

    When the plan is made, each rank sends the positions of its elements to the other ranks. The elements of all ranks
    must cover every parameter exactly once. Before the first update, after loading state, and in audited steps, each
    rank compares its parts of the parameters with the model's weights.

[Note: positions of parameters]
    With ZeRO stages 1 and 2 and with the BF16 optimizer, the model parameters in a group are views of one buffer.
    DeepSpeed chooses the order of the parameters in this buffer (`round_robin_gradients`, `parameter_alignment`). The
    buffer is divided into equal parts, and the flat buffer on rank r of `_dp_group` is an fp32 copy of part r. So the
    offset of a parameter in the model's buffer determines which of its elements are in a rank's flat buffer, and at
    which position.

    DeepSpeed's own record of these positions, `_hp_mapping`, follows the order of the groups, so it is wrong with
    `round_robin_gradients` (0.19.8). Therefore, shardmuon only checks that the attribute exists.

[Note: what is swapped]
    With NVMe offload of optimizer state, ZeRO stage 3 swaps a sub-group to files if the rank's part of the sub-group
    has at least max(1 MiB, `aio.block_size`) bytes. Smaller sub-groups stay in memory. The files contain the
    sub-group's weights, all state tensors that are as long as its flat buffer (except tensors with `swappable =
    False`), and all gradients of at least this size. The flat buffer and its state tensors are in memory only while the
    flat buffer is stepped. At other times, they are empty.

[Note: alignment of swapped gradients]
    DeepSpeed reads a swapped gradient from its file into the sub-group's buffer, at the parameter's offset. It uses
    direct I/O, which needs aligned memory addresses. Most file systems require an alignment of 512 bytes; others
    require between 1 byte and a page. If an address is not aligned, the read fails. DeepSpeed ignores the failure and
    uses the old contents of the buffer as the gradient. Buffers begin at a page boundary, so an address is aligned if
    its offset is a multiple of the page size. shardmuon requires such offsets.

[Note: one vote before the first call]
    DeepSpeed calls `step()` several times in a training step. Before the first call changes anything, all ranks check
    the options, momentum and partitions of every flat buffer, including the flat buffers that AdamW updates, and vote
    on the outcome. If a later call fails on a rank, the ranks that wait for this rank fail immediately. The optimizer
    then refuses further steps, as it does after an error in any step.

[Note: names of state]
    DeepSpeed's universal checkpoints support only Adam's state: `exp_avg`, `exp_avg_sq` and `step`. So the momentum of
    a flat buffer is stored as `exp_avg`. `exp_avg_sq` is a single zero that is expanded to the shape of the flat
    buffer, so it takes almost no memory.

[Note: what DeepSpeed loads]
    `engine.save_checkpoint` writes the part of a rank's state that is in memory to a state file, and copies the rank's
    swap files. With NVMe offload, `engine.load_checkpoint` copies the swap files back but does not read the state file.
    So it always loses the loss scale, the step counts, the options of the groups, and the weights and state of
    sub-groups that stay in memory. In a new process it also loses swapped state, because the optimizer does not yet
    have state tensors into which the swap files could be read.

    This module's function `load_checkpoint` loads everything. If a checkpoint was loaded without this function,
    `_refuse_loaded` raises an error in the next step.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from shardmuon.comm.groups import group_ranks, my_rank, num_ranks
from shardmuon.comm.vote import Fault, current_world, run_together
from shardmuon.errors import ExchangeError, Refused
from shardmuon.host import Host, Weight
from shardmuon.layout.engines.base import Claim, Engine, Group, register
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.layout.views import Ints
from shardmuon.momentum.keeper import BUFFER, Keeper
from shardmuon.muon import Core
from shardmuon.options import check_hyperparameters
from shardmuon.step.adamw import init_state, step_adamw
from shardmuon.step.kept import carry, check_carried, take_carried

if TYPE_CHECKING:
    from shardmuon.plan.plan import Plan

_TESTED = "0.19.8"
_PAGE = 4096  # Page size in bytes. On every file system, direct I/O can read into memory that is aligned to a page.

# ------------------------------------------------------------------------------------------------------------ steps


class _Flat(Core):
    """Optimizer core that steps the matrices of one flat buffer, a 1-D partition made by ZeRO. The core has the same
    options as the optimizer that the user passed to DeepSpeed.

    Attributes:
        group: Optimizer group to which the flat buffer belongs.
        is_muon: True if Muon updates the matrices in the flat buffer; False if AdamW updates the flat buffer as a
            whole.
        swapped: True if DeepSpeed stores the flat buffer in files (NVMe) between steps.
        parts: One tuple (name, slice, shard) per parameter. The slice describes this rank's part of the parameter. The
            shard is the tensor that is stepped; it is empty until `show` makes it a view of the flat buffer.
    """

    def __init__(
        self,
        core: Any,
        group: Mapping[str, Any],
        named: Sequence[tuple[str, Tensor]],
        flat: Tensor,
        zero3: Any,  # DeepSpeed's ZeRO stage 3 optimizer; None with other ZeRO stages
    ) -> None:
        super().__init__(core.config, None, core.keeper, copy.copy(core.audits), core.traffic)
        params, names = [p for _, p in named], {id(p): name for name, p in named}
        self.group, self.flat, self.is_muon = group, flat, bool(group["use_muon"])
        self.swapped = _swapped_numel(flat, zero3) > 0
        slices, process_group = _slices_of(flat, params, zero3)
        self.parts = [(names[id(part.param)], part, _make_shard(flat, part, process_group)) for part in slices]
        self.state = defaultdict(dict)
        # Set `param_groups` now, because a rank that has an error before its first step still votes, and the vote reads
        # `param_groups`.
        self.take_options(group)
        if self.swapped:
            _refuse_swaps(self.parts, zero3)

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """Dict from parameter name to the optimizer state of this rank's part of the parameter."""
        return {name: self.state[shard] for name, _, shard in self.parts}

    def take_options(self, group: Mapping[str, Any]) -> None:
        """Give this core a single group, with the options of an optimizer group and this rank's shards as
        parameters."""
        names, shards = [name for name, _, _ in self.parts], [shard for _, _, shard in self.parts]
        self.param_groups = [{**group, "params": shards, "param_names": names}]

    def unlike_model(self) -> list[str]:
        """List the names of parameters whose parts in the flat buffer differ from the model's weights."""
        return [name for name, part, _ in self.parts if part.numel and _differs_from_model(self.flat, part)]

    def show(self) -> None:
        """Turn the shards into views of the flat buffer, and their gradients into views of the flat buffer's gradient.
        Call this method before each use of the shards, because DeepSpeed can move the flat buffer and its gradient in
        memory."""
        flat, grad = self.flat.detach(), self.flat.grad
        for _, part, shard in self.parts:
            shard.data = flat.narrow(0, part.offset, part.numel)
            shard.grad = None if grad is None else grad.detach().narrow(0, part.offset, part.numel)

    def take(self, carried: dict[str, dict[str, Tensor]]) -> None:
        """Move the variant's state (such as NorMuon's second moments) for the matrices in this flat buffer from
        `carried` to `states`. Call this method after the momentum has been loaded.

        Args:
            carried: Dict from parameter name to the variant's state in a checkpoint.

        Raises:
            ValueError: `carried` lacks state that the group's variant needs.
        """
        for name, state in self.states.items():
            if not state:
                check_carried(name, self.group, carried.get(name, {}))
                state |= {key: v.to(self.flat.device, copy=True) for key, v in carried.pop(name, {}).items()}


class _DeepSpeedHost(Host):
    """Integration with DeepSpeed. It is active once DeepSpeed has replaced the parameters in the optimizer's groups
    with flat buffers.

    Attributes:
        groups: One tuple for each optimizer group: the group, the (name, parameter) pairs that it contained originally,
            and the options that it had when it was last stepped.
    """

    in_parts = True
    packages = ("deepspeed",)
    marks = ("_z3_optimizer", "_hp_mapping")
    clipping = 'these gradients are DeepSpeed\'s, which clips them before step(): set "gradient_clipping" in its config'

    def __init__(self) -> None:
        self.groups: list[tuple[dict[str, Any], list[tuple[str, Tensor]], dict[str, Any]]] = []
        # maps the id of each flat buffer's tensor to its `_Flat`, including flat buffers that AdamW updates
        self._flats: dict[int, _Flat] = {}
        self._unchecked = True  # True if the next step must compare the flat buffers with the model's weights
        # Muon variant's state from a checkpoint, by parameter name. It stays here until `_Flat.take` moves it to a flat
        # buffer.
        self._carried: dict[str, dict[str, Tensor]] = {}
        self._num_stepped = 0  # number of flat buffers stepped so far in the current training step

    @property
    def _params(self) -> list[Tensor]:
        """Model parameters that the optimizer's groups contained before DeepSpeed replaced them with flat buffers."""
        return [p for _, named, _ in self.groups for _, p in named]

    # -------------------------------------------------------------------------------------------- groups and state

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        """Store a group's parameters before DeepSpeed replaces them with flat buffers."""
        self.groups.append((group, list(zip(names, group["params"], strict=True)), _options(group)))

    def _take_over(self, core: Any, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict as torch does, and reset all attributes of this integration that depend on the previous
        groups and state."""
        super().load(core, state_dict)
        self.groups = [
            (group, named, _options(group)) for group, (_, named, _) in zip(core.param_groups, self.groups, strict=True)
        ]
        self._unchecked, self._num_stepped = True, 0
        self._carried, self._flats = {}, {}

    def restore_groups(self, core: Any) -> None:
        """Restore the list of groups, which DeepSpeed modifies for each call to `step()` and restores only if the step
        succeeds. With ZeRO stage 3, also empty the groups, which contain flat buffers only during a step."""
        core.param_groups = [group for group, _, _ in self.groups]
        if _zero3_of(self._params) is not None:
            for group in core.param_groups:
                group["params"] = []

    def _restore_options(self, core: Any) -> None:
        """Repair options and step counts after DeepSpeed has loaded a universal checkpoint. In addition, move the
        variant's state (such as NorMuon's second moments) from the groups, in which it is saved, to `_carried`.

        DeepSpeed assigns the options of the checkpoint's groups to the existing groups by position. With ZeRO stage 3,
        it assigns the options of the first group to every group. It also gives all sub-groups the same "step" tensor,
        so the step count would increase once per sub-group.
        """
        carried = take_carried(group for group, _, _ in self.groups)
        if carried:
            self._carried, self._flats = carried, {}
        for state in core.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()
        for group, named, options in self.groups:
            names, flats = [name for name, _ in named], group["params"]
            # If DeepSpeed has assigned the options of another group to this group, restore the group's own options.
            if group.setdefault("param_names", names) != names:
                group.clear()
                group.update(options, params=flats, param_names=names)
            options.clear()
            options.update(_options(group))

    def load(self, core: Any, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        In a call from `load_checkpoint` of DeepSpeed or of this module, all ranks load together. An error on one rank
        is then raised on all ranks, because the other ranks would otherwise hang in the collectives that DeepSpeed runs
        afterwards. In other calls, and with `pipeline_loading_checkpoint`, which makes ranks load one after another, an
        error is raised only on the rank where it occurs.
        """
        frame = self.caller("load_checkpoint", "deepspeed", __name__)
        engine = None if frame is None else frame.f_locals.get("self", frame.f_locals.get("engine"))
        alone = engine is None or engine._config.zero_config.pipeline_loading_checkpoint
        try:
            run_together(lambda: self._take_over(core, state_dict), (my_rank(),) if alone else None)
        except Refused as refused:
            self.restore_groups(core)
            # After a failed load, other ranks may have new optimizer state, and all ranks have new weights, so the
            # optimizer must refuse further steps.
            if not alone:
                core.broken = f"a checkpoint was not loaded: {refused}. {ExchangeError.REMEDY}"
            raise

    def saved(self, core: Any, saved: dict[str, Any]) -> None:
        """Save each group with its own options, which DeepSpeed may have replaced with those of another group. Save the
        variant's state, such as NorMuon's second moments, in the first group. This state cannot be saved as optimizer
        state, because DeepSpeed requires state tensors that are as long as a flat buffer."""
        if self.is_active:
            self._restore_options(core)
            pairs = zip(core.param_groups, saved["param_groups"], strict=True)
            saved["param_groups"] = [{**_options(group), "params": packed["params"]} for group, packed in pairs]
            kept = dict(self._carried)
            for known in self._flats.values():
                kept |= {name: state for name, state in known.states.items() if state}
            # ZeRO stage 3 loads only the first group of a universal checkpoint, so this group contains the variant's
            # state for all matrices.
            carry(saved["param_groups"][0], kept)

    # ------------------------------------------------------------------------------------------------------ queries

    @property
    def is_active(self) -> bool:
        """True if DeepSpeed has replaced the parameters in the groups with flat buffers."""
        return any(hasattr(p, mark) for p in self._params for mark in self.marks)

    def plans(self, core: Any) -> tuple[Plan, ...]:
        """Return the plan (assignment of matrices to ranks) of each flat buffer that Muon has stepped so far."""
        return tuple(known.binding.plan for known in self._flats.values() if known.binding is not None)

    def weights(self, core: Any) -> list[Weight]:
        """List the parts of parameters that this rank's flat buffers contain, including parts that AdamW updates.

        Raises:
            ValueError: A flat buffer has been swapped to files, so its weights are not in memory.
        """
        if not self._flats:
            self._attach(core)
        stepped = {id(flat) for group in core.param_groups for flat in group["params"]}
        found: list[Weight] = []
        for known in self._flats.values():
            if known.swapped:
                raise ValueError(
                    f"{known.parts[0][0]}: DeepSpeed keeps it in files (offload to NVMe), where nothing but a step "
                    'reaches it. Use offload_optimizer {"device": "cpu"}'
                )
            known.show()
            now = id(known.flat) in stepped
            found += [Weight(name, part.param, shard, known.group, now) for name, part, shard in known.parts]
        return found

    def has_stepped_all(self, core: Any) -> bool:
        return self._num_stepped >= len(self._flats)

    # ------------------------------------------------------------------------------------------------------- a step

    def instead_of_step(self, core: Any, plain: bool) -> Callable[[], None] | None:
        """Return `_refuse_copies` if the caller is `initialize_optimizer_states`, otherwise None. DeepSpeed calls
        `step` there only with ZeRO stage 0 in half precision, to create state."""
        return _refuse_copies if self.caller("initialize_optimizer_states", "deepspeed") is not None else None

    def step(self, core: Any, fault: Fault) -> None:
        """Handle one of the calls to `step()` that DeepSpeed makes in a training step. The call steps the groups that
        DeepSpeed has put into `core.param_groups`."""
        try:
            # This call begins a training step if the counter is 0, or if the previous training step has counted all
            # flat buffers. See [Note: one vote before the first call].
            if self._num_stepped in (0, len(self._flats)):
                self._num_stepped, core.component, core.world = 0, tuple(range(num_ranks())), current_world()
                run_together(lambda: self._begin(core, fault))
                self._unchecked = False
            core.changing = True
            if fault.cause is not None:
                raise fault.cause
            self._step_flats(core)
            step_adamw(core.param_groups, core.state, set)
        except BaseException as error:
            self.restore_groups(core)
            if isinstance(error, Refused) and self._num_stepped:
                core.broken = f"{error}. Other groups had been updated already. {ExchangeError.REMEDY}"
            self._num_stepped = 0
            raise

    def _begin(self, core: Any, fault: Fault) -> None:
        """Check all flat buffers of this rank before the first update of a training step, without changing weights.
        Raise the first error that is found."""
        if fault.cause is not None:
            raise fault.cause
        stepped = {id(flat) for group in core.param_groups for flat in group["params"]}
        if getattr(_zero3_of(self._params), "swap_optimizer", False):
            _refuse_loaded(self.caller("_take_model_step", "deepspeed"))
        self._restore_options(core)
        for index, (group, _, _) in enumerate(self.groups):
            check_hyperparameters(f"group {index}: ", group)
        if not self._flats:
            self._attach(core)
        for known in self._flats.values():
            # Swapped flat buffers are not in memory yet, so `_step_flats` creates their state later.
            if not known.swapped:
                self._complete_state(core.state[known.flat], known)
            if known.is_muon and float(core.state[known.flat].get("step", 0)) > 0:
                known.take(self._carried)
        # Swapped flat buffers that this call does not step are not compared with the model, because DeepSpeed may still
        # be reading them from files (`pipeline_read`).
        here = [known for known in self._flats.values() if not known.swapped or id(known.flat) in stepped]
        wrong = [name for known in here for name in known.unlike_model()] if self._unchecked else []
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: the fp32 weights that DeepSpeed steps are not the model's. If some were set "
                "after deepspeed.initialize(), write them to the model (at stage 3 under deepspeed.zero."
                "GatheredParameters([p], modifier_rank=0)), then call engine.optimizer.refresh_fp32_params(). If "
                "not, DeepSpeed lays its partitions out in a way that is not known: please report it with its config"
            )
        if not stepped <= self._flats.keys():
            raise ValueError(
                "a group of the optimizer is none of those that it was made with: DeepSpeed's (or another) wrapper "
                "replaced it. Make the optimizer from the groups as they are and initialize again"
            )

    def _attach(self, core: Any) -> None:
        """Make a `_Flat` for every flat buffer, after checking DeepSpeed's version and the options."""
        _check_version()
        _refuse_options(core.keeper, self.groups)
        zero3 = _zero3_of(self._params)
        flats = [(index, flat) for index, (group, _, _) in enumerate(self.groups) for flat in group["params"]]
        if zero3 is not None:  # With ZeRO stage 3, a group contains a flat buffer only while DeepSpeed steps it.
            flats = list(zip(zero3.sub_group_to_group_id.values(), zero3.fp32_partitioned_groups_flat, strict=True))
        self._flats = {id(flat): _Flat(core, *self.groups[index][:2], flat, zero3) for index, flat in flats}

    def _complete_state(self, state: dict[str, Any], known: _Flat) -> None:
        """Create the missing state of a flat buffer, filled with zeros. DeepSpeed looks for state only after the first
        flat buffer has been stepped, so all state must exist by then.

        Raises:
            ValueError: The loaded momentum does not have the shape of the flat buffer.
        """
        flat = known.flat
        if not known.is_muon:
            init_state(flat, state)
        elif "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(flat)
            # `exp_avg_sq` is a single zero that is expanded to the shape of the flat buffer. Swapped flat buffers do
            # without it, because DeepSpeed would write it to a file in full size.
            if not known.swapped:
                state["exp_avg_sq"] = flat.new_zeros(()).expand(flat.shape)
        elif state["exp_avg"].shape != flat.shape:
            raise ValueError(
                f"the momentum of a ZeRO partition has shape {tuple(state['exp_avg'].shape)}, the partition "
                f"{tuple(flat.shape)}: load a checkpoint of this number of ranks and these groups, or a universal one"
            )

    def _step_flats(self, core: Any) -> None:
        """Step the flat buffers that DeepSpeed has put into the groups for this call to `step()`. If a rank cannot
        prepare a flat buffer, the other ranks receive the error in the vote before the flat buffer is stepped."""
        for group in core.param_groups:
            for flat in group["params"]:
                known = self._flats[id(flat)]
                if known.is_muon:
                    known.broken, fault = None, Fault()
                    with fault:
                        known.take_options(group)
                        known.show()
                        self._complete_state(core.state[flat], known)
                        momentum = core.state[flat]["exp_avg"]
                        for _, part, shard in known.parts:
                            known.state[shard][BUFFER] = momentum.narrow(0, part.offset, part.numel)
                    known.take_step(fault)
                    core.state[flat]["step"] += 1
                self._num_stepped += 1


_DeepSpeedHost.register()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


class _Slice(NamedTuple):
    """Part of one parameter in this rank's flat buffer, the 1-D partition that DeepSpeed steps.

    Attributes:
        param: The model's parameter, with the attributes that DeepSpeed adds.
        start: Index of the part's first element in the flattened parameter.
        numel: Number of elements in the part; 0 if the flat buffer contains no element of the parameter.
        offset: Index of the part's first element in the flat buffer.
    """

    param: Any
    start: int
    numel: int
    offset: int


def _shape_of(param: Tensor) -> Ints:
    """Return the full shape of a parameter, even if ZeRO stage 3 has replaced the parameter's data with a
    placeholder."""
    return tuple(getattr(param, "ds_shape", param.shape))


# ---------------------------------------------------------------------------------------- positions of parameters


def _slices_of(flat: Tensor, params: Sequence[Tensor], zero3: Any) -> tuple[list[_Slice], Any]:
    """Find the slices of parameters in a flat buffer, the 1-D partition that DeepSpeed steps on this rank.

    Args:
        flat: Tensor that DeepSpeed put into a group of the optimizer.
        params: Model parameters that the group contained originally.
        zero3: DeepSpeed's ZeRO stage 3 optimizer; None with other ZeRO stages.

    Returns:
        This rank's slices of all trainable parameters in the flat buffer's group (with stage 3, in its sub-group), and
        the process group over which these parameters are partitioned. All ranks list the slices in the same order. A
        slice can be empty.

    Raises:
        ValueError: The tensor is not a flat buffer of these parameters, or DeepSpeed partitions them in an unsupported
            way.
    """
    slices, group = _in_fragments(flat, params) if zero3 is None else _in_stage_3(flat, zero3)
    known, found = {id(p) for p in params}, {id(part.param) for part in slices}
    wrong = [part.param for part in slices if id(part.param) not in known]
    if zero3 is None:  # With ZeRO stage 3, parameters of the group can be in the flat buffers of other sub-groups.
        wrong += [p for p in params if p.requires_grad and id(p) not in found]
    if wrong:
        raise ValueError(
            f"parameters of shapes {[_shape_of(p) for p in wrong]} are in ZeRO partitions, and the optimizer was not "
            "made with them, or the other way round: DeepSpeed has put others in their place (AutoTP, AutoEP), or they "
            "were frozen in initialize(). Set autotp_size=1, leave expert_parallel out, or make the optimizer anew"
        )
    for part in slices:
        if getattr(part.param, "tensor_model_parallel", False) or getattr(part.param, "ds_is_replaced_module", False):
            raise ValueError(
                f"a parameter of shape {_shape_of(part.param)} is a tensor-parallel shard (AutoTP), and the ZeRO "
                f"partition that DeepSpeed steps in its place is not known to be one. {_TENSOR_PARALLEL}"
            )
    return slices, group


def _check_version() -> None:
    """Raise ValueError if DeepSpeed is older than the tested version. With some settings, older versions pass wrong
    gradients to the optimizer (see benchmarks/results/nvme.md)."""
    here = sys.modules["deepspeed"].__version__
    if TorchVersion(here) < _TESTED:
        raise ValueError(
            f"DeepSpeed {here}: before {_TESTED} it hands over wrong gradients with some settings (stage 2 with "
            f"contiguous_gradients false), with any optimizer. Install deepspeed=={_TESTED}"
        )


def _in_fragments(flat: Tensor, params: Sequence[Tensor]) -> tuple[list[_Slice], Any]:
    """Find the slices of parameters in a flat buffer, and the process group of the parameters, for ZeRO stages 1 and 2
    and for the BF16 optimizer. See [Note: positions of parameters]."""
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
    # offset of this rank's part in the buffer that holds the model's parameters, in elements
    first = group_ranks(group).index(my_rank()) * flat.numel()
    begin = min(p.storage_offset() for p in members)
    slices = []
    for p in members:
        place = p.storage_offset() - begin  # offset of the parameter in the model's buffer, in elements
        start, stop = max(place, first), min(place + p.numel(), first + flat.numel())
        slices.append(_Slice(p, start - place, stop - start, start - first) if start < stop else _Slice(p, 0, 0, 0))
    return slices, group


def _in_stage_3(flat: Tensor, zero3: Any) -> tuple[list[_Slice], Any]:
    """Find the slices of parameters in a flat buffer of ZeRO stage 3, and the process group of the parameters. Stage 3
    pads each parameter at the end and splits it into equal parts, one per rank."""
    kind = type(zero3).__name__
    if kind != "DeepSpeedZeroOptimizer_Stage3":
        raise ValueError(f"{kind} (MiCS, ZenFlow) is not supported. Use ZeRO 3 without it")
    # With hpZ, partial offload or ZenFlow, DeepSpeed partitions parameters in a way that shardmuon does not support, or
    # steps parts of them with its own Adam.
    for name, allowed in {"zero_hpz_partition_size": 1, "partial_offload": 1.0, "zenflow": False}.items():
        found = getattr(zero3, name, allowed)
        if found != allowed:
            raise ValueError(
                f"{name}={found!r} of ZeRO 3 (hpZ, partial offload, ZenFlow) is not supported: leave it out"
            )
    number = _number_of(flat, zero3)
    params, offset, slices = zero3.fp16_groups[number], 0, []
    group = params[0].ds_process_group
    ranks = group_ranks(group)
    rank = ranks.index(my_rank())
    for p in params:
        place = zero3.grad_position[zero3.get_param_id(p)]
        size = p.partition_numel()
        if tuple(place[:2]) != (number, offset) or size * len(ranks) < p.ds_numel or p.ds_process_group is not group:
            raise ValueError(
                f"a parameter of {p.ds_numel} elements on {len(ranks)} ranks is said to lie at {tuple(place)} in "
                f"sub-group {number}, expected offset {offset}"
            )
        start, stop = min(rank * size, p.ds_numel), min((rank + 1) * size, p.ds_numel)
        slices.append(_Slice(p, start, stop - start, offset))
        offset += size
    return slices, group


def _differs_from_model(flat: Tensor, part: _Slice) -> bool:
    """Return True if a slice of DeepSpeed's fp32 weights, rounded to the model's dtype, differs from the model's
    weights. Return False if the two cannot be compared, because the flat buffer or the model's weights are not in
    memory."""
    param = part.param
    # With ZeRO stage 3, the model stores only this rank's part of the parameter, with padding.
    if hasattr(param, "ds_tensor"):
        if param.ds_tensor.status.name != "AVAILABLE" or flat.numel() < part.offset + part.numel:
            return False
        own = param.ds_tensor.detach().view(-1)[: part.numel]
    else:
        own = param.detach().view(-1)[part.start : part.start + part.numel]
    mine = flat.detach().narrow(0, part.offset, part.numel).to(own.device, own.dtype)
    return not (torch.equal(own, mine) or bool((own.eq(mine) | (own.isnan() & mine.isnan())).all()))


def _refuse_copies() -> None:
    """Raise ValueError for ZeRO stage 0 in half precision, where DeepSpeed steps fp32 copies of the parameters. The
    copies lack the parameters' attributes, so a tensor-parallel shard (AutoTP) would be treated as a whole matrix."""
    raise ValueError(
        f"at ZeRO 0 with bf16 or fp16 DeepSpeed ({_TESTED}) steps fp32 copies of its own, which may be parts of "
        "matrices (AutoTP) and with fp16 have gradients divided by a loss scale that the loss was not multiplied by. "
        "Train in fp32, or at ZeRO stage 1"
    )


def _refuse_options(keeper: Keeper, groups: Sequence[tuple[Any, ...]]) -> None:
    """Raise ValueError for options that are not supported with ZeRO's partitions, and for weights that are offloaded to
    NVMe. DeepSpeed can corrupt such weights: it can round fp32 weights to bf16, and it reads weights into memory
    addresses that direct I/O does not support.

    Args:
        keeper: The optimizer's `Keeper`, which contains the options for momentum and rounding.
        groups: One tuple for each optimizer group, as in `_DeepSpeedHost.groups`.
    """
    if keeper.dtype is not None or keeper.device is not None or keeper.rounds_weights:
        raise ValueError(
            f"momentum_dtype={keeper.dtype} stochastic_rounding={keeper.rounds_weights} "
            f"momentum_device={keeper.device!r}: DeepSpeed keeps and offloads state and weights itself, as its config "
            "says (fp32, or bf16_master_weights_and_grads). Leave these options out; use offload_optimizer in its "
            "config"
        )
    for index, (group, named, _) in enumerate(groups):
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


def _make_shard(flat: Tensor, part: _Slice, group: Any) -> Tensor:
    """Make a leaf tensor that the optimizer steps instead of a parameter. The tensor is empty until a step turns it
    into a view of the parameter's slice in the flat buffer."""
    shard = torch.nn.Parameter(flat.new_empty(0))
    # `home` is the device of the model's parameter, and is needed only if ZeRO offloads the flat buffer to another
    # device.
    home = part.param.device if part.param.device.type != flat.device.type else None
    return FlatShard(_shape_of(part.param), part.start, group, "ZeRO partitions", home=home).mark(shard)


class _DeepSpeedEngine(Engine):
    """Adapter that recognizes model parameters that ZeRO stage 3 has partitioned, and raises an error for them, because
    only DeepSpeed's optimizer can step such parameters."""

    def recognizes(self, param: Tensor) -> bool:
        return hasattr(param, "ds_shape")

    def shape(self, param: Tensor) -> Ints:
        return _shape_of(param)

    def claim(self, param: Tensor, group: Group) -> Claim:
        raise ValueError(
            "ZeRO 3 keeps it in partitions (zero.Init), and this optimizer steps it without DeepSpeed. Give the "
            "optimizer to deepspeed.initialize(model=..., optimizer=...) and step the engine"
        )


register(_DeepSpeedEngine())


# ------------------------------------------------------------------------------------------------------ swap files


def _zero3_of(params: Iterable[Tensor]) -> Any:
    """Return DeepSpeed's ZeRO stage 3 optimizer if it steps any of the given model parameters, otherwise None."""
    return next((p._z3_optimizer for p in params if hasattr(p, "_z3_optimizer")), None)


def _swapped_numel(flat: Tensor, zero3: Any) -> int:
    """Return the number of elements in a flat buffer if DeepSpeed swaps the flat buffer to files, otherwise 0."""
    if not getattr(zero3, "swap_optimizer", False):
        return 0
    number = _number_of(flat, zero3)
    return int(zero3.fp16_partitioned_groups_flat_numel[number]) if zero3._swappable_optimizer_subgroup(number) else 0


def _number_of(flat: Tensor, zero3: Any) -> int:
    """Find the index of the ZeRO stage 3 sub-group to which a flat buffer belongs."""
    return next(i for i, other in enumerate(zero3.fp32_partitioned_groups_flat) if other is flat)


def _refuse_swaps(parts: Sequence[tuple[str, _Slice, Tensor]], zero3: Any) -> None:
    """Raise ValueError if DeepSpeed would read a swapped gradient into a memory address that direct I/O does not
    support on all file systems. See [Note: alignment of swapped gradients].

    Args:
        parts: Parts of the parameters in a flat buffer that DeepSpeed swaps to files, as in `_Flat.parts`.
        zero3: DeepSpeed's ZeRO stage 3 optimizer.
    """
    least, size = int(zero3.optimizer_swapper.min_aio_bytes), int(zero3.optimizer_swapper.swap_element_size)
    for name, part, _ in parts:
        # In DeepSpeed's buffer, a gradient has the same offset and number of elements as its parameter, including
        # padding.
        if part.param.partition_numel() * size >= least and part.offset * size % _PAGE:
            raise ValueError(
                f"{name}: DeepSpeed reads its gradient from NVMe to element {part.offset} of its sub-group (byte "
                f"{part.offset * size}), and not every file system reads to an address that is no multiple of {_PAGE}. "
                "DeepSpeed does not notice that a read fails and would step an old gradient in its place. Put "
                f"parameters whose elements a rank are no multiple of {_PAGE // size} into a group of their own, or "
                'pad them, or write offload_optimizer: {"device": "cpu"}'
            )


def _refuse_loaded(step: FrameType | None) -> None:
    """Raise ValueError if a checkpoint was loaded with `engine.load_checkpoint` instead of this module's
    `load_checkpoint`, which resets the engine's attribute `loaded_checkpoint_dp_world_size` to None.

    Args:
        step: Stack frame of the engine's method that calls `step()`; None if there is no such frame.
    """
    if step is not None and step.f_locals["self"].loaded_checkpoint_dp_world_size is not None:
        raise ValueError(
            "a checkpoint was loaded with engine.load_checkpoint: with NVMe offload DeepSpeed loads no optimizer "
            "state in a new process and never the weights of small sub-groups. Start again and load it with "
            "shardmuon.frameworks.deepspeed.load_checkpoint(engine, folder, tag)"
        )


# --------------------------------------------------------------------------------- checkpoints with NVMe offload


@Refused.made_public()
def load_checkpoint(engine: Any, load_dir: str | Path, tag: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Load a DeepSpeed checkpoint completely. Use this function instead of `engine.load_checkpoint`, which loses state
    with NVMe offload. Collective over all ranks. The function unpickles files, so load only checkpoints that you trust.

    Args:
        engine: Engine returned by `deepspeed.initialize`, with a `shardmuon.Muon` as optimizer.
        load_dir: Folder written by `engine.save_checkpoint` on the same number of ranks.
        tag: Tag of the checkpoint in the folder. Default: the latest checkpoint.
        options: Options of `engine.load_checkpoint`. With NVMe offload, only `load_module_strict` and
            `load_lr_scheduler_states` are allowed.

    Returns:
        Result of `engine.load_checkpoint`, a tuple (path, client state).

    Raises:
        ValueError: The checkpoint does not match the job on some rank. Raised on all ranks, usually before anything has
            been loaded. If only the optimizer's state does not match, everything else has already been loaded, and
            further steps raise errors.
    """
    zero3 = engine.optimizer
    if not getattr(zero3, "swap_optimizer", False):
        return engine.load_checkpoint(str(load_dir), tag, **options)  # type: ignore[no-any-return]
    saved = run_together(lambda: _read(engine, Path(load_dir), tag, options))
    found: tuple[Any, Any] = engine.load_checkpoint(str(load_dir), tag, **options)
    zero3.checkpoint_event_prologue()
    # With NVMe offload, `engine.load_checkpoint` does not read the file with the optimizer's state, so load it here.
    # This also reads the swap files.
    zero3.load_state_dict([saved] * num_ranks())
    zero3.checkpoint_event_epilogue()
    # `_refuse_loaded` would raise an error in the next step if `loaded_checkpoint_dp_world_size` were still set.
    engine.loaded_checkpoint_dp_world_size = None
    return found


def _read(engine: Any, folder: Path, tag: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the file with this rank's optimizer state dict, and replace the empty tensors that stand for swapped state
    with zeros.

    Raises:
        ValueError: The file or the saved swap files do not match the engine's partitions.
    """
    unknown = sorted(set(options) - {"load_module_strict", "load_lr_scheduler_states"})
    if unknown or engine.load_universal_checkpoint():
        raise ValueError(
            f"with NVMe offload all of a plain checkpoint is loaded, found {unknown or 'load_universal'}: leave it out"
        )
    tag = tag if tag is not None else (folder / "latest").read_text().strip()
    zero3 = engine.optimizer
    path = Path(engine._get_zero_ckpt_name(str(folder), tag))
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False).get("optimizer_state_dict", {})
    flats = zero3.fp32_partitioned_groups_flat
    swapped = [_swapped_numel(flat, zero3) for flat in flats]
    mine = [0 if numel else flat.numel() for flat, numel in zip(flats, swapped, strict=True)]
    theirs = [flat.numel() for flat in saved.get("fp32_flat_groups", ())]
    ranks = saved.get("partition_count")
    if mine != theirs or ranks != zero3.partition_count:
        raise ValueError(
            f"{path}: saved by {ranks} ranks with sub-groups of {theirs} elements in memory (0: in files), here "
            f"are {zero3.partition_count} ranks with {mine}. Use the same ranks, groups and offload settings"
        )
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    copies = folder / tag / "offloaded_tensors" / f"rank{rank:02d}"
    files = [f"{flat.ds_id}.tensor.swp" for flat, numel in zip(flats, swapped, strict=True) if numel]
    missing = [name for name in files if not (copies / name).is_file()]
    if missing:
        raise ValueError(
            f"{copies} lacks {missing}. DeepSpeed names swap files by the number of a parameter in its process: make "
            "the same model as when it was saved, in a process that has made no other engine"
        )
    # DeepSpeed saves swapped state tensors as empty tensors but loads only tensors of full size, so replace the empty
    # tensors with zeros.
    for number, numel in enumerate(swapped):
        state = saved["optimizer_state_dict"]["state"].get(number, {})
        for key, value in state.items() if numel else ():
            if isinstance(value, Tensor) and value.shape == (0,):
                state[key] = value.new_zeros(()).expand(numel)
    return saved
