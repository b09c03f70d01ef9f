"""What the person at the terminal sees, and the files of a run. Only rank 0 reports; on other ranks nothing happens."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from shardmuon.demo.config import OptimizerName, TrainConfig
from shardmuon.demo.model import Model
from shardmuon.demo.result import RunResult

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["Progress", "Reporter"]

_PLAIN_LINE_SECONDS = 5.0


class Progress(Protocol):
    def update(self, step: int, result: RunResult) -> None:
        """Show that `step` steps are done, with what `result` holds so far."""


class Reporter:
    """All output of one run."""

    def __init__(self, config: TrainConfig, *, is_chief: bool) -> None:
        self._config = config
        self._is_chief = is_chief

    def say(self, text: str) -> None:
        if self._is_chief:
            print(text, flush=True)

    def begin(self, corpus: str, device: torch.device) -> None:
        config = self._config
        if not self._is_chief:
            return
        num_params = sum(p.numel() for p in Model(config.model, config.seq_len).parameters())
        mesh = " x ".join(f"{axis} {size}" for axis, size in config.mesh.items()) or "one process"
        ranks = f"{config.num_ranks} rank{'s' * (config.num_ranks != 1)}"
        self.say(f"layout  {config.layout}: {mesh} ({ranks}), {device.type}, {torch.get_num_threads()} threads a rank")
        self.say(f"data    {corpus}")
        if config.offload == "nvme":
            self.say(f"swap    {config.nvme_path}; DeepSpeed compiles its async_io at the first start, some minutes")
        experts = config.model.num_experts
        routed = f", {experts} experts of which {config.model.top_k} answer a token" if experts else ""
        self.say(f"model   {num_params / 1e6:.2f} M parameters, {config.model.num_layers} layers{routed}")
        self.say(
            f"run     {config.steps} steps of {config.batch} x {config.seq_len} = {config.tokens_per_step:,} bytes; "
            + ", ".join(f"{name} lr {config.learning_rate(name):g}" for name in config.optimizers)
        )

    @contextmanager
    def progress(self, name: OptimizerName) -> Iterator[Progress]:
        """A bar on a terminal if rich is there, else a plain line every few seconds."""
        if not self._is_chief:
            yield _Silent()
        elif sys.stdout.isatty() and (bar := _rich_bar()) is not None:
            with bar:
                task = bar.add_task(name, total=self._config.steps, status="")
                yield _Rich(bar, task, self._config)
        else:
            yield _Plain(name, self._config)

    def finish(self, results: Sequence[RunResult]) -> None:
        """Print the table and the proof; write the files if a folder was asked for."""
        if not self._is_chief:
            return
        print(f"\n{summary_table(results, self._config)}\n")
        for result in results:
            if result.proof is not None:
                print(result.proof, flush=True)
        if self._config.out is not None:
            for path in write_files(results, self._config, Path(self._config.out)):
                print(f"wrote {path}", flush=True)


class _Silent:
    def update(self, step: int, result: RunResult) -> None:
        pass


class _Plain:
    def __init__(self, name: OptimizerName, config: TrainConfig) -> None:
        self._name = name
        self._config = config
        self._last = time.monotonic()

    def update(self, step: int, result: RunResult) -> None:
        now = time.monotonic()
        if now - self._last >= _PLAIN_LINE_SECONDS or step == self._config.steps:
            self._last = now
            print(f"{self._name:5} step {step:4}/{self._config.steps}  {_status(result, self._config)}", flush=True)


class _Rich:
    def __init__(self, bar: RichProgress, task: TaskID, config: TrainConfig) -> None:
        self._bar = bar
        self._task = task
        self._config = config

    def update(self, step: int, result: RunResult) -> None:
        self._bar.update(self._task, completed=step, status=_status(result, self._config))


def _rich_bar() -> RichProgress | None:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description:5}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True),
        refresh_per_second=4,
        expand=True,
    )


def _status(result: RunResult, config: TrainConfig) -> str:
    parts = [f"loss {result.train_loss[-1]:.2f}"] if result.train_loss else []
    if result.held_out:
        parts.append(f"held-out {result.held_out[-1][1]:.2f}")
    speed = result.tokens_per_second(config.tokens_per_step)
    return "  ".join([*parts, f"{speed:,.0f} bytes/s", f"optimizer {result.optimizer_share:.0%}"])


def summary_table(results: Sequence[RunResult], config: TrainConfig) -> str:
    """One line an optimizer, columns aligned."""
    rows = [
        ("optimizer", "lr", "train loss", "held-out loss", "tokens/s", "optimizer share", "state bytes/rank"),
        *(
            (
                result.optimizer,
                f"{result.lr:g}",
                f"{result.final_train_loss:.4f}",
                f"{result.final_held_out_loss:.4f}",
                f"{result.tokens_per_second(config.tokens_per_step):,.0f}",
                f"{result.optimizer_share:.1%}",
                f"{result.state_bytes:,}",
            )
            for result in results
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def write_files(results: Sequence[RunResult], config: TrainConfig, folder: Path) -> list[Path]:
    """Write `run.json` and `loss.png` into `folder`.

    Returns:
        The paths written: no figure, with a warning, where matplotlib is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run.json"
    content = {
        "config": asdict(config),
        "torch": torch.__version__,
        "runs": [result.as_dict(config.tokens_per_step) for result in results],
    }
    run.write_text(json.dumps(content, indent=1) + "\n")
    try:
        from shardmuon.demo.figure import draw_losses
    except ImportError as missing:
        warnings.warn(f"no loss.png: {missing}. Write pip install 'shardmuon[demo]'.", stacklevel=2)
        return [run]
    figure = folder / "loss.png"
    draw_losses(results, config, figure)
    return [run, figure]
