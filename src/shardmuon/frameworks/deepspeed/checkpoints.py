"""Loading DeepSpeed's checkpoints on all ranks or on none, and where it offloads optimizer state to NVMe."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardmuon.comm.vote import run_together
from shardmuon.errors import OUT_OF_MEMORY, fault_text, made_public
from shardmuon.frameworks.deepspeed import resume as deepspeed_resume
from shardmuon.frameworks.deepspeed.host import DeepSpeedHost
from shardmuon.frameworks.deepspeed.partitions import known_insides
from shardmuon.muon import Muon


def load_checkpoint(engine: Any, load_dir: str | Path, tag: str | None = None, **options: Any) -> tuple[Any, Any]:
    """`engine.load_checkpoint` that brings everything back or raises on all ranks. Collective among all ranks.

    DeepSpeed itself raises on the rank alone that cannot read its file, while the others wait in its collectives. And
    with NVMe offload it loses optimizer state in a new process, and weights of sub-groups that are too small to be
    swapped. Reads pickles: load files you trust.

    Args:
        engine: What `deepspeed.initialize` returned, with a `shardmuon.Muon` as optimizer.
        load_dir: As saved with `engine.save_checkpoint`, by as many ranks.
        tag: As saved; the latest one if None.
        options: Of `engine.load_checkpoint`; with NVMe offload `load_module_strict` and `load_lr_scheduler_states`.

    Returns:
        As `engine.load_checkpoint`.

    Raises:
        ValueError: It does not fit, on any rank: raised on all, before anything changes unless a file is damaged.
    """
    zero3 = engine.optimizer
    optimizer = getattr(zero3, "optimizer", None)
    if not isinstance(optimizer, Muon):
        raise ValueError(f"engine.optimizer steps {type(optimizer).__name__}, not a shardmuon.Muon")
    host = optimizer.hosts.find(DeepSpeedHost)
    assert isinstance(host, DeepSpeedHost)
    if not getattr(zero3, "swap_optimizer", False):
        with made_public():
            run_together(lambda: _refuse_unreadable(engine, Path(load_dir), tag, options))
            found: tuple[Any, Any] = engine.load_checkpoint(str(load_dir), tag, **options)
            run_together(host.refuse_untold)
        return found
    saved: dict[str, Any] = {}

    def read() -> None:
        unknown = sorted(set(options) - {"load_module_strict", "load_lr_scheduler_states"})
        if unknown:
            raise ValueError(f"load_checkpoint: {unknown} cannot be chosen with NVMe offload: all is loaded")
        name = tag if tag is not None else (Path(load_dir) / "latest").read_text().strip()
        with known_insides():
            saved.update(deepspeed_resume.read(engine, str(load_dir), name))

    run_together(read)
    run_together(lambda: deepspeed_resume.place(zero3, saved))  # what follows is collective
    found = engine.load_checkpoint(str(load_dir), tag, **options)
    deepspeed_resume.fill(zero3, saved)
    host.mark.remove(zero3.optimizer_swapper.swap_folder)
    return found


def _refuse_unreadable(engine: Any, folder: Path, tag: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a file that DeepSpeed will read on this rank is missing or cut off. Their tensors are not
    read here. Universal checkpoints are folders of many files, of which each rank reads most."""
    latest = folder / "latest"
    if engine.load_universal_checkpoint() or (tag is None and not latest.is_file()):
        return
    name = tag if tag is not None else latest.read_text().strip()
    paths = [engine._get_ckpt_name(str(folder), name)]
    state = options.get("load_optimizer_states", True) and not options.get("load_module_only", False)
    if engine.zero_optimization() and state:
        paths.append(engine._get_zero_ckpt_name(str(folder), name))
    for path in paths:
        try:
            torch.load(path, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(path))
        except OUT_OF_MEMORY:
            raise
        except Exception as wrong:
            raise ValueError(f"{path}: cannot be read, {fault_text(wrong)}") from wrong
