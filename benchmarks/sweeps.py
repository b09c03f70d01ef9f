"""Search for the best learning rate, which is the one with the lowest mean loss over seeds. All runs are saved."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Curve = dict[int, list[float]]  # log2 of the learning rate -> held-out losses, one for each seed


class Sweep:
    """Losses at many learning rates. Each is saved as soon as its run ends, so an interrupted sweep can be resumed."""

    def __init__(
        self, path: Path, setting: dict[str, Any], seeds: int, run: Callable[[str, float, int], float]
    ) -> None:
        """Load the losses saved in `path`. `setting` holds the options that all runs share. `run` is a function
        (name, lr, seed) -> held-out loss."""
        self._path, self._setting, self._seeds, self._run = path, setting, seeds, run
        self.runs: dict[str, float] = {}
        if path.exists():
            saved = json.loads(path.read_text())
            if saved["setting"] != setting:
                raise SystemExit(f"{path} holds runs of {saved['setting']}; remove it for runs of {setting}")
            self.runs = saved["runs"]

    def losses(self, name: str, power: int) -> list[float]:
        """Return the held-out losses of all seeds at lr = 2**power. Train and save the missing runs."""
        found = []
        for seed in range(self._seeds):
            key = f"{name} {power} {seed}"
            if key not in self.runs:
                began = time.perf_counter()
                self.runs[key] = self._run(name, 2.0**power, seed)
                self._path.write_text(json.dumps({"setting": self._setting, "runs": self.runs}, indent=0) + "\n")
                print(f"{key}: {self.runs[key]:.4f} ({time.perf_counter() - began:.0f} s)", flush=True)
            found.append(self.runs[key])
        return found

    def curve(self, name: str, start: int) -> Curve:
        """Try powers of two around 2**start until both neighbours of the best have been tried. Return the losses at
        every power tried."""
        found = {power: self.losses(name, power) for power in (start - 1, start, start + 1)}
        while missing := [power for power in (best(found) - 1, best(found) + 1) if power not in found]:
            found |= {power: self.losses(name, power) for power in missing}
        return dict(sorted(found.items()))


def best(curve: Curve) -> int:
    """The base-2 logarithm of the learning rate with the lowest mean loss."""
    return min(curve, key=lambda power: statistics.mean(curve[power]))


def at_best(curve: Curve) -> str:
    """Format a table cell: the best learning rate, and the mean and range of its losses."""
    losses = curve[best(curve)]
    return f"2^{best(curve)}: {statistics.mean(losses):.3f} ({min(losses):.3f}..{max(losses):.3f})"
