"""Steps on ZeRO's flat partitions: the same optimizer, run on parts of matrices.

DeepSpeed replaces the optimizer's parameters by flats, 1-D partitions that may split matrices (partitions.py). A
separate optimizer core steps each flat that holds matrices. The parameters of the core are shards, which are views of
the flat. Momentum is as long as the flat and belongs to the state of the optimizer that DeepSpeed holds, so DeepSpeed
finds, offloads and saves it like any other optimizer's state.

[Note: one vote before the first call]
    A training step makes several calls of `step()`. Before the first call changes anything, all ranks that share flats
    agree that options, momentum and partitions of every flat are valid, AdamW's flats included. A later error on one
    rank breaks the optimizer, as in any step, and ranks that wait for the failed rank fail at once.

[Note: names of state]
    DeepSpeed's universal checkpoints know only Adam's state: `exp_avg`, `exp_avg_sq` and `step`. So the momentum of a
    flat is called `exp_avg`. `exp_avg_sq` is a single zero expanded to the flat's shape, which takes no memory.

[Note: what DeepSpeed loads]
    `save_checkpoint` writes a rank's state in memory to a file as usual, and copies the rank's swap files. With NVMe
    offload, `engine.load_checkpoint` copies the swap files back but does not read the file. So it always loses the
    weights and state of sub-groups that stay in memory, step counts, the groups' options and the loss scale. In a new
    process it also loses swapped state, because the optimizer has no state tensors yet to read the swap files into.
    `load_checkpoint` in this file loads everything. `refuse_loaded` raises an error if it was not used.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.comm.vote import Fault, current_world, run_together
from shardmuon.errors import REMEDY, Refused, made_public
from shardmuon.frameworks.deepspeed.partitions import (
    check_version,
    differs_from_model,
    is_partitioned,
    make_shard,
    refuse_copies,
    refuse_loaded,
    refuse_options,
    refuse_swaps,
    slices_of,
    swapped_numel,
    zero3_of,
)
from shardmuon.host import Host, Stepped, Weight, caller
from shardmuon.momentum.keeper import BUFFER
from shardmuon.muon import Core
from shardmuon.options import check_hyperparameters
from shardmuon.step.adamw import init_state, step_adamw
from shardmuon.step.kept import carry, check_carried, take_carried

if TYPE_CHECKING:
    from shardmuon.plan.plan import Plan

_Named = tuple[str, Tensor]


class Flat(Core):
    """Optimizer core that steps the matrices of one flat, a 1-D partition made by ZeRO, with the options of the
    optimizer that DeepSpeed holds. Lives as long as the flat.

    Attributes:
        index: Index of the flat's optimizer group.
        is_muon: True for a flat of matrices. False for a flat of AdamW's parameters, which is stepped as a whole.
        swapped: True if DeepSpeed keeps the flat in files (NVMe) between steps.
        parts: For each parameter: name, this rank's slice, and the tensor that is stepped, which is empty until `show`.
    """

    def __init__(
        self, core: Stepped, index: int, group: Mapping[str, Any], named: Sequence[_Named], flat: Tensor
    ) -> None:
        super().__init__(core.config, None, core.keeper, copy.copy(core.audits), core.traffic)
        params, names = [p for _, p in named], {id(p): name for name, p in named}
        self.index, self.flat, self.is_muon = index, flat, bool(group["use_muon"])
        self.swapped = swapped_numel(flat, zero3_of(params)) > 0
        slices, process_group = slices_of(flat, params)
        self.parts = [(names[id(part.param)], part, make_shard(flat, part, process_group)) for part in slices]
        self.param_names = [name for name, _, _ in self.parts]
        self.param_groups = [
            {**group, "params": [shard for _, _, shard in self.parts], "param_names": self.param_names}
        ]
        self.state = defaultdict(dict)

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """State of each parameter's part in this flat, by parameter name."""
        return {name: self.state[shard] for name, _, shard in self.parts}

    def unlike_model(self) -> list[str]:
        """List the names of parameters whose part in the flat differs from the model's weights."""
        return [name for name, part, _ in self.parts if part.numel and differs_from_model(self.flat, part)]

    def show(self) -> None:
        """Make the shards and their gradients views of the flat and the flat's gradient. Call before each use, since
        DeepSpeed may have moved them in memory."""
        flat, grad = self.flat.detach(), self.flat.grad
        for _, part, shard in self.parts:
            shard.data = flat.narrow(0, part.offset, part.numel)
            shard.grad = None if grad is None else grad.detach().narrow(0, part.offset, part.numel)

    def take(self, group: Mapping[str, Any], carried: dict[str, dict[str, Tensor]]) -> None:
        """Move the variant's state of this flat's matrices (such as NorMuon's second moments) out of `carried` into
        `states`, after momentum was loaded.

        Args:
            group: Optimizer group of the flat.
            carried: Parameter name -> state that a checkpoint contained.

        Raises:
            ValueError: `carried` lacks state that the group's variant needs.
        """
        for name, state in self.states.items():
            if not state:
                check_carried(name, group, carried.get(name, {}))
                state |= {key: v.to(self.flat.device, copy=True) for key, v in carried.pop(name, {}).items()}


class DeepSpeedHost(Host):
    """Integration with DeepSpeed's engine. Active once DeepSpeed has replaced the parameters in the groups by its flat
    partitions.

    Attributes:
        groups: For each optimizer group: the group, and the named parameters that it contained at first.
    """

    in_parts = True
    packages = ("deepspeed",)
    clipping = 'these gradients are DeepSpeed\'s, which clips them before step(): set "gradient_clipping" in its config'

    def __init__(self) -> None:
        self.groups: list[tuple[dict[str, Any], list[_Named]]] = []
        self._options: list[dict[str, Any]] = []  # options of each group when it was last stepped
        self._flats: dict[int, Flat] = {}  # id of a flat tensor -> its `Flat`; AdamW's flats included
        self._unchecked = True  # compare weights with the model's before the next step
        self._carried: dict[str, dict[str, Tensor]] = {}  # parameter name -> loaded variant state, not yet in flats
        self._num_stepped = 0  # number of flats stepped in this training step

    @property
    def _params(self) -> list[Tensor]:
        """Model parameters that the optimizer's groups contained at first."""
        return [p for _, named in self.groups for _, p in named]

    # -------------------------------------------------------------------------------------------- groups and state

    def added(self, group: dict[str, Any], names: Sequence[str]) -> None:
        """Remember a group's parameters before DeepSpeed replaces them by flat partitions."""
        self.groups.append((group, list(zip(names, group["params"], strict=True))))
        self._options.append(_options(group))

    def take_over(self, core: Stepped, state_dict: Mapping[str, Any]) -> None:
        super().take_over(core, state_dict)
        self.groups = [(new, named) for new, (_, named) in zip(core.param_groups, self.groups, strict=True)]
        self._options = [_options(group) for group in core.param_groups]
        self._unchecked, self._num_stepped = True, 0
        self._carried, self._flats = {}, {}

    def restore_groups(self, core: Stepped) -> None:
        """Restore the groups to their state between steps. DeepSpeed itself does so only after a successful step."""
        core.param_groups = [group for group, _ in self.groups]
        if zero3_of(self._params) is not None:
            for group in core.param_groups:
                group["params"] = []

    def _restore_options(self, core: Stepped) -> None:
        """Repair options and step counts after DeepSpeed loaded a universal checkpoint, and take out variant state
        (such as NorMuon's) that was saved in the groups.

        DeepSpeed assigns the options of the checkpoint's groups to the existing groups by position; at stage 3 every
        group gets the options of the first. Also at stage 3, all sub-groups share one "step" tensor, which each
        sub-group would increment for all.
        """
        carried = take_carried(group for group, _ in self.groups)
        if carried:
            self._carried, self._flats = carried, {}
        for state in core.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()
        for index, (group, named) in enumerate(self.groups):
            names, flats = [name for name, _ in named], group["params"]
            if group.setdefault("param_names", names) != names:  # DeepSpeed assigned another group's options
                group.clear()
                group.update(self._options[index], params=flats, param_names=names)
            self._options[index] = _options(group)

    def load(self, core: Stepped, load: Callable[[], None]) -> None:
        """Run `load`. Inside DeepSpeed's `load_checkpoint` or this module's, all ranks run it together, and an error on
        one rank is raised on all ranks, because DeepSpeed's own collectives follow. Elsewhere, and with
        `pipeline_loading_checkpoint`, where ranks load one after another, errors are raised only where they occur."""
        frame = caller("load_checkpoint", "deepspeed", __name__)
        engine = None if frame is None else frame.f_locals.get("self", frame.f_locals.get("engine"))
        alone = engine is None or engine._config.zero_config.pipeline_loading_checkpoint
        try:
            run_together(load, (my_rank(),) if alone else None)
        except Refused as refused:
            self.restore_groups(core)
            if not alone:  # other ranks may have loaded state, and all have new model weights
                core.broken = f"a checkpoint was not loaded: {refused}. {REMEDY}"
            raise

    def saving(self, core: Stepped) -> None:
        if self.is_active:
            self._restore_options(core)

    def saved(self, core: Stepped, saved: dict[str, Any]) -> None:
        """Put variant state, such as NorMuon's, into the saved groups. It does not fit into the state that DeepSpeed
        saves, whose tensors must be as long as a flat."""
        if self.is_active:
            kept = dict(self._carried)
            for known in self._flats.values():
                kept |= {name: state for name, state in known.states.items() if state}
            # use the first group for all: from a universal checkpoint, stage 3 loads only the first group's options
            carry(saved["param_groups"][0], kept)

    # ------------------------------------------------------------------------------------------------------ queries

    @property
    def is_active(self) -> bool:
        """True if DeepSpeed has replaced the parameters in the groups by its flat partitions."""
        return is_partitioned(self._params)

    @classmethod
    def clips(cls, params: Iterable[Any]) -> str | None:
        return cls.clipping if is_partitioned(params) else None

    def plans(self, core: Stepped) -> tuple[Plan, ...]:
        """Return the plans of all flats that have been stepped so far."""
        return tuple(known.binding.plan for known in self._flats.values() if known.binding is not None)

    def weights(self, core: Stepped) -> list[Weight]:
        """List the parts of parameters in all flats, AdamW's flats included."""
        if not self._flats:
            self._attach(core)
        stepped = {id(flat) for group in core.param_groups for flat in group["params"]}
        found: list[Weight] = []
        for known in self._flats.values():
            if known.swapped:
                raise ValueError(
                    f"{known.param_names[0]}: DeepSpeed keeps it in files (offload to NVMe), where nothing but a step "
                    'reaches it. Use offload_optimizer {"device": "cpu"}'
                )
            known.show()
            for name, part, shard in known.parts:
                found.append(Weight(name, part.param, shard, self.groups[known.index][0], id(known.flat) in stepped))
        return found

    def has_stepped_all(self, core: Stepped) -> bool:
        return self._num_stepped >= len(self._flats)

    # ------------------------------------------------------------------------------------------------------- a step

    def instead_of_step(self, core: Stepped, plain: bool) -> Callable[[], None] | None:
        """Return a function that raises an error if DeepSpeed runs ZeRO stage 0 in half precision, otherwise None. This
        stage is recognized by its first call of `step`, which only creates state, with zero gradients."""
        return refuse_copies if caller("initialize_optimizer_states", "deepspeed") is not None else None

    def step(self, core: Stepped, fault: Fault) -> None:
        """Step the groups that DeepSpeed put into `core.param_groups` for this call."""
        try:
            # a training step begins: see [Note: one vote before the first call]
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
                core.broken = f"{error}. Other groups had been updated already. {REMEDY}"
            self._num_stepped = 0
            raise

    def _begin(self, core: Stepped, fault: Fault) -> None:
        """Check all flats of this rank before the first update of a training step. Raises the first error found.
        Weights are not changed."""
        if fault.cause is not None:
            raise fault.cause
        stepped = {id(flat) for group in core.param_groups for flat in group["params"]}
        if getattr(zero3_of(self._params), "swap_optimizer", False):
            refuse_loaded(caller("_take_model_step", "deepspeed"))
        self._restore_options(core)
        for index, (group, _) in enumerate(self.groups):
            check_hyperparameters(f"group {index}: ", group)
        if not self._flats:
            self._attach(core)
        for known in self._flats.values():
            if not known.swapped:  # swapped flats get their state when they are stepped, one at a time
                self._state(core, known)
            if known.is_muon and float(core.state[known.flat].get("step", 0)) > 0:
                known.take(self.groups[known.index][0], self._carried)
        if self._unchecked:
            self._refuse_unlike_model(stepped)
        if not stepped <= self._flats.keys():
            raise ValueError(
                "a group of the optimizer is none of those that it was made with: DeepSpeed's (or another) wrapper "
                "replaced it. Make the optimizer from the groups as they are and initialize again"
            )

    def _attach(self, core: Stepped) -> None:
        """Make a `Flat` for every flat partition, after checking DeepSpeed's version and options."""
        check_version()
        refuse_options(core.keeper, self.groups)
        zero3 = zero3_of(self._params)
        flats = [(index, flat) for index, (group, _) in enumerate(self.groups) for flat in group["params"]]
        if zero3 is not None:  # stage 3 puts flats into the groups only while they are stepped
            flats = list(zip(zero3.sub_group_to_group_id.values(), zero3.fp32_partitioned_groups_flat, strict=True))
        found: dict[int, Flat] = {}
        for index, flat in flats:
            group, named = self.groups[index]
            refuse_swaps(flat, named)
            found[id(flat)] = Flat(core, index, group, named, flat)
        self._flats = found

    def _refuse_unlike_model(self, stepped: set[int]) -> None:
        """Raise ValueError if the fp32 weights that DeepSpeed steps differ from the model's. `stepped`: ids of the
        flats of this call. Other flats are not compared if they are swapped, as DeepSpeed may still be reading them
        from files (`pipeline_read`)."""
        here = [known for known in self._flats.values() if not known.swapped or id(known.flat) in stepped]
        wrong = [name for known in here for name in known.unlike_model()]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: the fp32 weights that DeepSpeed steps are not the model's. If some were set "
                "after deepspeed.initialize(), write them to the model (at stage 3 under deepspeed.zero."
                "GatheredParameters([p], modifier_rank=0)), then call engine.optimizer.refresh_fp32_params(). If "
                "not, DeepSpeed lays its partitions out in a way that is not known: please report it with its config"
            )

    def _state(self, core: Stepped, known: Flat) -> dict[str, Any]:
        """Return the state of a flat, created as zeros if missing. It must be complete when the first flat has been
        stepped, because DeepSpeed looks for state only then."""
        flat = known.flat
        state: dict[str, Any] = core.state[flat]
        if not known.is_muon:
            init_state(flat, flat, state)
            return state
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(flat)
            if not known.swapped:  # DeepSpeed would write the expanded tensor to a file at full size
                state["exp_avg_sq"] = flat.new_zeros(()).expand(flat.shape)
        if state["exp_avg"].shape != flat.shape:
            raise ValueError(
                f"the momentum of a ZeRO partition has shape {tuple(state['exp_avg'].shape)}, the partition "
                f"{tuple(flat.shape)}: load a checkpoint of this number of ranks and these groups, or a universal one"
            )
        return state

    def _step_flats(self, core: Stepped) -> None:
        """Step the flats of this call. If preparing a flat fails, the other ranks learn of the error in the vote of the
        flat's core."""
        for group in core.param_groups:
            for flat in group["params"]:
                known = self._flats[id(flat)]
                if known.is_muon:
                    known.broken, fault = None, Fault()
                    with fault:
                        known.param_groups[0].update(_options(group) | {"param_names": known.param_names})
                        known.show()
                        momentum = self._state(core, known)["exp_avg"]
                        for _, part, shard in known.parts:
                            known.state[shard][BUFFER] = momentum.narrow(0, part.offset, part.numel)
                    known.take_step(fault)
                    core.state[flat]["step"] += 1
                self._num_stepped += 1


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


# --------------------------------------------------------------------------------- checkpoints with NVMe offload


def load_checkpoint(engine: Any, load_dir: str | Path, tag: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Load a DeepSpeed checkpoint completely. Use this function in place of `engine.load_checkpoint`, which loses state
    with NVMe offload. Collective over all ranks. It reads pickles, so load only files that you trust.

    Args:
        engine: Engine returned by `deepspeed.initialize`, with a `shardmuon.Muon` as optimizer.
        load_dir: Folder written by `engine.save_checkpoint` on the same number of ranks.
        tag: Tag of the checkpoint in the folder. Default: the latest.
        options: Options of `engine.load_checkpoint`. With NVMe offload, only `load_module_strict` and
            `load_lr_scheduler_states` are allowed.

    Returns:
        Result of `engine.load_checkpoint`: (path, client state).

    Raises:
        ValueError: The checkpoint does not fit on some rank. Raised on all ranks, before anything changes. If only the
            optimizer's state does not fit, however, everything else has been loaded, and further steps raise errors.
    """
    zero3 = engine.optimizer
    with made_public():
        if not getattr(zero3, "swap_optimizer", False):
            return engine.load_checkpoint(str(load_dir), tag, **options)  # type: ignore[no-any-return]
        saved = run_together(lambda: _read(engine, Path(load_dir), tag, options))
        found: tuple[Any, Any] = engine.load_checkpoint(str(load_dir), tag, **options)
        zero3.checkpoint_event_prologue()
        zero3.load_state_dict([saved] * num_ranks())  # read the swap files again, now that state tensors exist
        zero3.checkpoint_event_epilogue()
        engine.loaded_checkpoint_dp_world_size = None  # otherwise, `refuse_loaded` would raise an error
    return found


def _read(engine: Any, folder: Path, tag: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the file with this rank's optimizer state dict, and replace empty tensors of swapped state by zeros. Raises
    ValueError if the file or the saved swap files do not fit the engine's partitions."""
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
    swapped = [swapped_numel(flat, zero3) for flat in flats]
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
    for number, numel in enumerate(swapped):  # swapped tensors were saved empty: use zeros as placeholders
        state = saved["optimizer_state_dict"]["state"].get(number, {})
        for key, value in state.items() if numel else ():
            if isinstance(value, Tensor) and value.shape == (0,):
                state[key] = value.new_zeros(()).expand(numel)
    return saved
