"""DeepSpeed's NVMe offload of optimizer state at ZeRO 3: what is swapped, and which gradients do not come back.

Reads private attributes of DeepSpeed, as partitions.py does, and never imports it.

[Note: what is swapped]
    A sub-group of which a rank holds at least max(1 MiB, `aio.block_size`) lies in files: weights, every state as long
    as its flat (unless it has `swappable = False`) and gradients of that size. Its flat and states are empty but while
    they are stepped. The smaller sub-groups stay in memory.

[Note: gradients that do not come back]
    A swapped gradient is read by direct I/O into the sub-group's buffer, at the parameter's offset. File systems take
    memory addresses that are multiples of 512 bytes, some of any or of more. Elsewhere the read fails, DeepSpeed does
    not look at the result, and what the buffer held before is stepped. Buffers begin at a page, so offsets tell.

[Note: what DeepSpeed loads]
    `save_checkpoint` writes what a rank has in memory to a file as ever, and copies its swap files. With NVMe offload
    `load_checkpoint` copies the swap files back and does not read the first. So in a new process, where the optimizer
    has no state yet that files could be read to, state is lost; and always are weights and state of sub-groups that
    stay in memory, step counts, the groups' options and the loss scale. resume.py loads all of it. `Mark` finds out
    that a checkpoint was loaded without: a file among the swap files, so that it is copied with them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

PAGE = 4096  # bytes; every file system takes addresses that are multiples of it


class Gradient(NamedTuple):
    """A gradient in its sub-group's buffer.

    Attributes:
        name: The parameter's.
        offset: First element in the buffer.
        numel: Number of elements on a rank, padding included.
    """

    name: str
    offset: int
    numel: int


def zero3_of(params: Iterable[Tensor]) -> Any:
    """DeepSpeed's stage-3 optimizer that steps any of these model parameters, or None."""
    return next((p._z3_optimizer for p in params if hasattr(p, "_z3_optimizer")), None)


def swapper_of(params: Iterable[Tensor]) -> Any:
    """DeepSpeed's swapper for the partitions of these model parameters, None if they are not offloaded to NVMe."""
    zero3 = zero3_of(params)
    return zero3.optimizer_swapper if getattr(zero3, "swap_optimizer", False) else None


def swapped_numel(flat: Tensor, zero3: Any) -> int:
    """Elements of a flat that lies in files now and then, 0 for one that stays in memory."""
    if not getattr(zero3, "swap_optimizer", False):
        return 0
    number = number_of(flat, zero3)
    return int(zero3.fp16_partitioned_groups_flat_numel[number]) if zero3._swappable_optimizer_subgroup(number) else 0


def number_of(flat: Tensor, zero3: Any) -> int:
    """The number of the sub-group of stage 3 that a flat is."""
    return next(i for i, other in enumerate(zero3.fp32_partitioned_groups_flat) if other is flat)


def refuse_params(named: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError for weights on NVMe that DeepSpeed does not keep as they were.

    On accelerators without fp16, as most CPUs are, it makes bf16 of fp32 ones, and masters of these. With `fast_init`
    it reads them to addresses and in lengths that direct I/O does not take, see [Note: gradients that do not come
    back].

    Args:
        named: (name, parameter).
    """
    zero3 = zero3_of(p for _, p in named)
    for name, p in named:
        swapper = getattr(p, "nvme_swapper", None)
        if swapper is None or not swapper.swappable_tensor(p):
            continue
        if swapper.dtype != zero3.dtype:
            raise ValueError(
                f"{name}: offload_param to NVMe keeps it as {swapper.dtype}, the model is {zero3.dtype}: DeepSpeed "
                'rounds its weights. Write "bf16": {"enabled": true}, or offload_param: {"device": "cpu"}'
            )
        if getattr(zero3, "offload_optimizer_fast_init", False):
            raise ValueError(
                f'{name}: offload_param to NVMe and offload_optimizer: {{"fast_init": true}}: DeepSpeed then starts '
                'from other weights than the model had. Write "fast_init": false'
            )


# ----------------------------------------------------------------------------------------------------- gradients


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
    for p in zero3.fp16_groups[number_of(flat, zero3)]:
        _, offset, numel = zero3.grad_position[zero3.get_param_id(p)]
        gradients.append(Gradient(names.get(id(p), f"a parameter of shape {tuple(p.ds_shape)}"), offset, numel))
    least, size, folder = int(swapper.min_aio_bytes), int(swapper.swap_element_size), str(swapper.swap_folder)
    if any(g.offset and g.numel * size >= least for g in gradients):
        refuse_misplaced(gradients, least, size, alignment_of(folder, least), folder)


def refuse_misplaced(gradients: Sequence[Gradient], least: int, size: int, alignment: int, folder: str) -> None:
    """Raise ValueError for a swapped gradient at an address that direct I/O does not take.

    Args:
        gradients: Of one sub-group, in its order.
        least: Bytes from which on a gradient is swapped.
        size: Bytes of an element.
        alignment: Bytes of which addresses must be multiples.
        folder: Where the swap files are.
    """
    step = max(alignment // size, 1)
    for gradient in gradients:
        if gradient.numel * size < least or gradient.offset % step == 0:
            continue
        cause = next(other for other in gradients if other.numel % step)
        raise ValueError(
            f"{gradient.name}: DeepSpeed reads its gradient from NVMe to element {gradient.offset} of its sub-group "
            f"(byte {gradient.offset * size}), but direct I/O in {folder} takes multiples of {alignment} bytes "
            f"({step} elements) only. DeepSpeed does not notice that the read fails and would step an old gradient in "
            f"its place. {cause.name}, which is before it, has {cause.numel} elements a rank: put it and others whose "
            f"elements a rank are no multiple of {step} into a group of their own, or pad them, or write "
            'offload_optimizer: {"device": "cpu"}'
        )


def alignment_of(folder: str, num_bytes: int) -> int:
    """Bytes of which memory addresses must be multiples for direct I/O in a folder, found by reading a file there.

    Args:
        folder: Where the swap files are.
        num_bytes: As many are read: the smallest transfer that counts.
    """
    content = os.urandom(-(-num_bytes // PAGE) * PAGE)
    with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, len(content) + PAGE) as memory:
        file.write(content)
        file.flush()
        handle = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            aligned = PAGE
            while aligned > 4 and _arrives(handle, memory, aligned // 2, content):
                aligned //= 2
            return aligned
        finally:
            os.close(handle)


def _arrives(handle: int, memory: mmap.mmap, start: int, content: bytes) -> bool:
    with memoryview(memory) as whole, whole[start : start + len(content)] as part:
        part[:] = bytes(len(content))
        try:
            return os.preadv(handle, [part], 0) == len(content) and part == content
        except OSError:
            return False


# --------------------------------------------------------------------------------------------------- checkpoints

_MARK = "shardmuon.saved"


class Mark:
    """One rank's mark in the folder of swapped state: there from a save to the next step, or because a checkpoint was
    loaded."""

    def __init__(self) -> None:
        self._born = time.time()
        self._written = ""

    def write(self, folder: str) -> None:
        """Write the mark as state is being saved: DeepSpeed copies the folder next."""
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
