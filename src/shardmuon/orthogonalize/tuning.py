"""Measurements of machines in a file that the user names: seconds of methods for a shape, and unequal slots of batches.

Nothing is measured or written unless `shardmuon tune` or `shardmuon verify --slots` is told a file, and nothing is read
unless `Orthogonalizer.tuning` names one. Ranks compare its digest; rows count only on a machine with their stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardmuon.orthogonalize.stamp import machine_stamp

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """A file of measurements.

    Attributes:
        path: Path, for messages.
        digest: Digest of its content, equal on ranks that read the same.
        machines: Stamp -> "times" (shape -> text of a choice -> seconds for one matrix) and "slots" ("searched":
            number of products compared, "unequal": shape -> text of a choice -> number found unequal).
    """

    path: str
    digest: str
    machines: dict[str, dict[str, Any]] = field(hash=False, repr=False)

    def times(self, shape: str, device: torch.device) -> dict[str, float]:
        """Text of a choice -> seconds for one matrix of a shape (see `choice.measure`); none that were not measured on
        this machine."""
        found: dict[str, float] = self._here(device).get("times", {}).get(shape, {})
        return found

    def is_unequal(self, rows: int, cols: int, device: torch.device, how: str) -> bool:
        """True if a search on this machine found that slots of a batch of this shape round differently."""
        return how in self._here(device).get("slots", {}).get("unequal", {}).get(f"{rows}x{cols}", {})

    def about_slots(self, device: torch.device) -> str:
        """One line on what a search on this machine has found, for the printed plan."""
        found = self._here(device).get("slots")
        if found is None:
            return f"slots of batches: {self.path} has no search on this machine"
        unequal = found["unequal"]
        what = f"shapes {', '.join(unequal)} differ and run alone" if unequal else "none differ"
        return f"slots of batches: {found['searched']} products compared on this machine ({self.path}): {what}"

    def _here(self, device: torch.device) -> dict[str, Any]:
        return self.machines.get(machine_stamp(device), {})


def load(path: str) -> Tuning:
    """Read a file of measurements.

    Raises:
        ValueError: There is no such file, or it is not one of these.
    """
    try:
        content = Path(path).read_bytes()
        found = json.loads(content)
        machines = found["machines"]
        if found["format"] != FORMAT or not all(isinstance(rows, dict) for rows in machines.values()):
            raise ValueError(f"format {found['format']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(
            f"Orthogonalizer.tuning={path!r} must be a file that `shardmuon tune --out FILE` has written: "
            f"{type(wrong).__name__}: {wrong}"
        ) from None
    return Tuning(path, hashlib.blake2b(content, digest_size=8).hexdigest(), machines)


def add(path: Path, device: torch.device, key: str, rows: dict[str, Any]) -> None:
    """Add rows of this machine to a file, replacing those of the same names. A reader sees the old file or the new one.

    Args:
        path: The file, new or one of these.
        device: Where the rows were measured.
        key: "times" or "slots".
        rows: See `Tuning.machines`.

    Raises:
        OSError: It cannot be written.
        ValueError: It exists and is another kind of file.
    """
    machines = load(str(path)).machines if path.exists() else {}
    machines.setdefault(machine_stamp(device), {}).setdefault(key, {}).update(rows)
    with tempfile.NamedTemporaryFile("w", dir=path.absolute().parent, delete=False) as out:
        json.dump({"format": FORMAT, "machines": machines}, out, indent=1, sort_keys=True)
    os.replace(out.name, path)
