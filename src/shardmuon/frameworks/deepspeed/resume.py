"""Checkpoints of DeepSpeed's NVMe offload: all that `engine.load_checkpoint` leaves out.

Reads private attributes of DeepSpeed, as partitions.py does, and never imports it.

[Note: what DeepSpeed leaves out]
    `save_checkpoint` writes what a rank has in memory to a file as ever, and copies its swap files. With NVMe offload
    `load_checkpoint` copies the swap files back and does not read the first. So in a new process, where the optimizer
    has no state yet that files could be read to, state is lost; and always are weights and state of sub-groups that
    stay in memory, step counts, the groups' options and the loss scale. `Mark` finds out that a checkpoint was loaded
    in this way: a file among the swap files, so that it is copied with them.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmuon.frameworks.deepspeed.nvme import swapped_numel

_MARK = "shardmuon.saved"


class Mark:
    """One rank's. It is in the folder from a save to the next step, or because a checkpoint was loaded."""

    def __init__(self) -> None:
        self._born = time.time()
        self._written = ""

    def write(self, folder: str) -> None:
        """State is being saved: DeepSpeed copies the folder next."""
        self._written = uuid.uuid4().hex
        (Path(folder) / _MARK).write_text(self._written)

    def remove(self, folder: str) -> None:
        (Path(folder) / _MARK).unlink(missing_ok=True)

    def refuse_loaded(self, folder: str) -> None:
        """Raise ValueError if a checkpoint has come back by DeepSpeed's function alone."""
        path = Path(folder) / _MARK
        if not path.exists():
            return
        # An earlier process may have ended right after it saved. A copy's time of change is that of copying.
        if path.read_text() != self._written and path.stat().st_ctime >= self._born:
            raise ValueError(
                "a checkpoint was loaded with engine.load_checkpoint: with NVMe offload DeepSpeed loads no optimizer "
                "state in a new process and never the weights of small sub-groups. Start again and load it with "
                "shardmuon.frameworks.deepspeed.load_checkpoint(engine, folder, tag)"
            )
        path.unlink()
        self._written = ""  # from here on it can come back by loading only


def read(engine: Any, folder: str, tag: str) -> dict[str, Any]:
    """What DeepSpeed saved of this rank's memory. Raises ValueError if it does not belong to these partitions."""
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


def place(zero3: Any, saved: dict[str, Any]) -> None:
    """Before the files come back: step counts, options, state in memory, and something to read the files to.

    Args:
        zero3: DeepSpeed's stage-3 optimizer.
        saved: From `read`.
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
    """For a state that was in files (saved empty) a zero shown `numel` times, else what was saved."""
    empty = isinstance(value, Tensor) and value.dim() and not value.numel()
    return value.new_zeros(()).expand(numel) if empty else value


def fill(zero3: Any, saved: dict[str, Any]) -> None:
    """After the files have come back: weights that were in memory, and the loss scale. Collective."""
    zero3.loss_scaler = saved["loss_scaler"]
    zero3.dynamic_loss_scale = saved["dynamic_loss_scale"]
    zero3.overflow = saved["overflow"]
    zero3.checkpoint_event_prologue()
    for number, flat in enumerate(zero3.fp32_partitioned_groups_flat):
        if not swapped_numel(flat, zero3):
            flat.data.copy_(saved["fp32_flat_groups"][number])
            zero3._reassign_or_swap_out_partitioned_parameters(number)
    zero3.checkpoint_event_epilogue()
