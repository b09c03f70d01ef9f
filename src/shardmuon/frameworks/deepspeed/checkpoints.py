"""Loading checkpoints where DeepSpeed offloads optimizer state to NVMe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmuon.frameworks.deepspeed import resume as deepspeed_resume
from shardmuon.frameworks.deepspeed.host import DeepSpeedHost
from shardmuon.frameworks.deepspeed.partitions import known_insides
from shardmuon.muon import Muon


def load_checkpoint(engine: Any, load_dir: str | Path, tag: str | None = None, **options: Any) -> tuple[Any, Any]:
    """`engine.load_checkpoint` that brings everything back, also with NVMe offload. Collective among all ranks.

    With NVMe offload DeepSpeed itself loses optimizer state in a new process, and weights of sub-groups that are too
    small to be swapped. Without it this is `engine.load_checkpoint`. Either reads pickles: load files you trust.

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
    if not getattr(zero3, "swap_optimizer", False):
        found: tuple[Any, Any] = engine.load_checkpoint(str(load_dir), tag, **options)
        return found
    saved: dict[str, Any] = {}

    def read() -> None:
        unknown = sorted(set(options) - {"load_module_strict", "load_lr_scheduler_states"})
        if unknown:
            raise ValueError(f"load_checkpoint: {unknown} cannot be chosen with NVMe offload: all is loaded")
        name = tag if tag is not None else (Path(load_dir) / "latest").read_text().strip()
        with known_insides():
            saved.update(deepspeed_resume.read(engine, str(load_dir), name))

    host = optimizer.hosts.find(DeepSpeedHost)
    assert isinstance(host, DeepSpeedHost)
    host.together(read)
    host.together(lambda: deepspeed_resume.place(zero3, saved))  # what follows is collective
    found = engine.load_checkpoint(str(load_dir), tag, **options)
    deepspeed_resume.fill(zero3, saved)
    host.mark.remove(zero3.optimizer_swapper.swap_folder)
    return found
