"""Checkpoints of DeepSpeed's NVMe offload: what `engine.load_checkpoint` leaves out, see [Note: what DeepSpeed loads].

Reads private attributes of DeepSpeed, as partitions.py does, and never imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.vote import run_together
from shardmuon.errors import made_public
from shardmuon.frameworks.deepspeed.host import DeepSpeedHost
from shardmuon.frameworks.deepspeed.nvme import swapped_numel
from shardmuon.frameworks.deepspeed.partitions import known_insides
from shardmuon.muon import Muon


def load_checkpoint(engine: Any, load_dir: str | Path, tag: str | None = None, **options: Any) -> tuple[Any, Any]:
    """`engine.load_checkpoint` that brings everything back with NVMe offload, too. Collective among all ranks.

    DeepSpeed itself loses optimizer state there in a new process, and weights of sub-groups that are too small to be
    swapped. Reads pickles: load files you trust.

    Args:
        engine: What `deepspeed.initialize` returned, with a `shardmuon.Muon` as optimizer.
        load_dir: As saved with `engine.save_checkpoint`, by as many ranks.
        tag: As saved; the latest one if None.
        options: Of `engine.load_checkpoint`; with NVMe offload `load_module_strict` and `load_lr_scheduler_states`.

    Returns:
        As `engine.load_checkpoint`.

    Raises:
        ValueError: It does not fit, on any rank: raised on all, before anything changes.
    """
    zero3 = engine.optimizer
    optimizer = getattr(zero3, "optimizer", None)
    if not isinstance(optimizer, Muon):
        raise ValueError(f"engine.optimizer steps {type(optimizer).__name__}, not a shardmuon.Muon")
    swaps, saved = getattr(zero3, "swap_optimizer", False), dict[str, Any]()

    def check() -> None:
        unknown = sorted(set(options) - {"load_module_strict", "load_lr_scheduler_states"})
        if unknown:
            raise ValueError(f"load_checkpoint: {unknown} cannot be chosen with NVMe offload: all is loaded")
        name = tag if tag is not None else (Path(load_dir) / "latest").read_text().strip()
        with known_insides():
            saved.update(_read(engine, str(load_dir), name))

    with made_public():
        if swaps:
            run_together(check)
            run_together(lambda: _place(zero3, saved))  # what follows is collective
        found: tuple[Any, Any] = engine.load_checkpoint(str(load_dir), tag, **options)
        if swaps:
            _fill(zero3, saved)
            host = optimizer.hosts.find(DeepSpeedHost)
            assert isinstance(host, DeepSpeedHost)
            host.mark.remove(zero3.optimizer_swapper.swap_folder)
    return found


def _read(engine: Any, folder: str, tag: str) -> dict[str, Any]:
    """Read what DeepSpeed saved of this rank's memory. Raises ValueError if it does not belong to these partitions."""
    zero3 = engine.optimizer
    if engine.load_universal_checkpoint():
        raise ValueError(
            'checkpoint: {"load_universal": true} with NVMe offload: DeepSpeed reads none: leave the key out'
        )
    path = Path(engine._get_zero_ckpt_name(folder, tag))
    if not path.is_file():
        raise ValueError(f"no file {path}: the checkpoint is of another number of ranks, or is none of ZeRO 3")
    file = torch.load(path, map_location="cpu", weights_only=False)
    saved: dict[str, Any] = file.get("optimizer_state_dict", {})
    flats = zero3.fp32_partitioned_groups_flat
    mine = [0 if swapped_numel(flat, zero3) else flat.numel() for flat in flats]
    theirs = [flat.numel() for flat in saved.get("fp32_flat_groups", ())]
    ranks = saved.get("partition_count")
    if mine != theirs or ranks != zero3.partition_count:
        raise ValueError(
            f"{path}: saved by {ranks} ranks with sub-groups of {theirs} elements in memory (0: in files), here "
            f"are {zero3.partition_count} ranks with {mine}. Use the same ranks, groups and offload settings"
        )
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    copies = Path(folder) / tag / "offloaded_tensors" / f"rank{rank:02d}"
    missing = [name for flat in flats if swapped_numel(flat, zero3) and not (copies / (name := _file(flat))).is_file()]
    if missing:
        raise ValueError(
            f"{copies} lacks {missing}. DeepSpeed names swap files by the number of a parameter in its process: make "
            "the same model as when it was saved, in a process that has made no other engine"
        )
    return saved


def _file(flat: Any) -> str:
    return f"{flat.ds_id}.tensor.swp"


def _place(zero3: Any, saved: dict[str, Any]) -> None:
    """Set up what files do not bring back: step counts, options, state in memory, and something to read the files to.

    Args:
        zero3: DeepSpeed's stage-3 optimizer.
        saved: From `_read`.
    """
    optimizer = zero3.optimizer
    zero3.optimizer_swapper.purge_state()  # it looks for state anew when it reads
    zero3._set_fp32_optimizer_param_groups()
    flats = [flat for group in optimizer.param_groups for flat in group["params"]]
    wanted = saved["optimizer_state_dict"]
    ids = [number for group in wanted["param_groups"] for number in group["params"]]
    state = dict(wanted["state"])
    for number, flat in zip(ids, flats, strict=True):
        numel = swapped_numel(flat, zero3)
        if numel and number in state:
            state[number] = {k: _long(v, numel) for k, v in state[number].items()}
    optimizer.load_state_dict({**wanted, "state": state})
    for flat in flats:
        for value in optimizer.state[flat].values() if swapped_numel(flat, zero3) else ():
            if isinstance(value, Tensor) and value.is_contiguous():  # what was in memory stays there
                value.swappable = False  # type: ignore[attr-defined]
    zero3._clear_fp32_optimizer_param_groups()


def _long(value: Any, numel: int) -> Any:
    """A zero shown `numel` times for a state that was in files (saved empty), else what was saved."""
    empty = isinstance(value, Tensor) and value.dim() and not value.numel()
    return value.new_zeros(()).expand(numel) if empty else value


def _fill(zero3: Any, saved: dict[str, Any]) -> None:
    """Fill in weights that were in memory and the loss scale, once the files have come back. Collective."""
    zero3.loss_scaler = saved["loss_scaler"]
    zero3.dynamic_loss_scale = saved["dynamic_loss_scale"]
    zero3.overflow = saved["overflow"]
    zero3.checkpoint_event_prologue()
    for number, flat in enumerate(zero3.fp32_partitioned_groups_flat):
        if not swapped_numel(flat, zero3):
            flat.data.copy_(saved["fp32_flat_groups"][number])
            zero3._reassign_or_swap_out_partitioned_parameters(number)
    zero3.checkpoint_event_epilogue()
