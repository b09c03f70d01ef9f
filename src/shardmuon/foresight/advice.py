"""Advice on what only the user can change: memory for speed, a route, a mesh; each planned in earnest, and priced.

Choices that a plan makes itself are no advice. Nothing is guessed from formulas: a candidate is a plan like the one
that was asked for, with one thing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.pricing import Price, price
from shardmuon.foresight.times import Time
from shardmuon.foresight.types import Exact, Mesh

Replan = Callable[[Mapping[str, Any]], Exact]  # "mesh", "route", "bucket_bytes", "owners" -> the plan with that changed
ALONE = "each replica orthogonalizes everything for itself (not offered; what that would take)"
SPLIT = "each matrix above the mean load split among {} owners (not offered; what that would take)"
_WORTH = 0.97  # of the step as it is: smaller gains are within what a plan can tell


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, and what it would do.

    Attributes:
        change: The change in words.
        write: What to write for it; "": it cannot be had, and is priced to say what it would save.
        step: Seconds with it.
        gain: Seconds of the middle case that it saves; below 0 it costs.
        memory: Bytes that the peak of the rank that needs most grows by (below 0: shrinks by).
        refused: Why it could not be planned, or "".
    """

    change: str
    write: str
    step: Time | None = None
    gain: float = 0.0
    memory: int = 0
    refused: str = ""

    @property
    def helps(self) -> bool:
        """True if the user can write the change and it saves time."""
        return bool(self.write) and self.gain > 0.0


@dataclass(frozen=True)
class Findings:
    """The cost of Muon in a training job, in numbers.

    Attributes:
        exact: Counts; nothing of it is estimated.
        hardware: The machine that it was priced on.
        price: Seconds, shares, money.
        advice: Changes that were planned and priced; empty if none were asked for.
        adamw: Seconds of AdamW's step on the same mesh.
    """

    exact: Exact
    hardware: Hardware
    price: Price
    advice: tuple[Advice, ...] = ()
    adamw: Time | None = None

    @property
    def overhead(self) -> tuple[float, float, float]:
        """Extra time of a training step over one with AdamW: least, middle, most; fractions. Zeros without tokens.

        Both optimizers' passes over memory are uncertain by the same factors, so ends are paired.
        """
        if self.price.training is None or self.adamw is None:
            return 0.0, 0.0, 0.0
        whole, ours, theirs = self.price.training.forward_backward, self.price.step, self.adamw
        return (
            (ours.lo - theirs.lo) / (whole.hi + theirs.lo),
            (ours.mid - theirs.mid) / (whole.mid + theirs.mid),
            (ours.hi - theirs.hi) / (whole.lo + theirs.hi),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything but the hardware's tables."""
        found = asdict(self.price)
        found["step"] = self.price.step._asdict()
        found["parts"] = {name: time._asdict() for name, time in self.price.parts.items()}
        found["timeline"] = [event._asdict() for event in self.price.timeline]
        return {
            "hardware": {"name": self.hardware.name, "title": self.hardware.title},
            "exact": asdict(self.exact),
            "price": found,
            "adamw": None if self.adamw is None else self.adamw._asdict(),
            "overhead_over_adamw": None if self.price.training is None else list(self.overhead),
            "advice": [asdict(one) for one in self.advice],
        }


def candidates(exact: Exact) -> list[tuple[str, str, dict[str, Any]]]:
    """Changes to try, the smallest first: a description, what the user writes for it ("": nothing can), and the
    keywords for planning anew."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    exchanged = any(bucket.exchange for c in exact.classes for bucket in c.buckets)
    gram = "route='gram'" in exact.options.get("exchange", "")
    if exchanged:
        found.append(
            (
                "memory for speed: buckets of 512 MiB",
                "Exchange(bucket_bytes=512 * 2**20)",
                {"bucket_bytes": 512 * 2**20},
            )
        )
    if exchanged and not gram:
        found += [(SPLIT.format(num), "", {"owners": num}) for num in (2, 4)]
        found.append(("Gram matrices move instead of shards", 'Exchange(route="gram")', {"route": "gram"}))
    if gram:
        found.append(("whole matrices move", 'Exchange(route="owner")', {"route": "owner"}))
    found += _meshes(exact.mesh)
    return found


def _meshes(mesh: Mesh) -> list[tuple[str, str, dict[str, Any]]]:
    """Changes to meshes with fewer or more ranks that share a matrix."""
    found = []
    inner = mesh.gpus_per_node // mesh.tp
    if mesh.engine == "fsdp2" and mesh.shard > inner >= 2 and mesh.shard % inner == 0:
        hsdp = replace(mesh, dp=mesh.dp * (mesh.shard // inner), shard=inner)
        found.append(("HSDP: shards inside a node, replicas across", f'--mesh "{hsdp}"', {"mesh": hsdp}))
    if mesh.engine == "fsdp2" and mesh.dp > 1 and mesh.shard > 1:
        found.append((ALONE, "", {"mesh": replace(mesh, dp=1)}))  # what a rank of one replica does, without the others
        flat = replace(mesh, dp=1, shard=mesh.dp * mesh.shard)
        found.append(("FSDP over all ranks, no replicas", f'--mesh "{flat}"', {"mesh": flat}))
    return found


def advise(
    exact: Exact, hardware: Hardware, replan: Replan, tried: Sequence[tuple[str, str, dict[str, Any]]] | None = None
) -> tuple[Advice, ...]:
    """Plan and price changes, each by itself.

    Args:
        exact: The plan as it is.
        hardware: What it runs on.
        replan: Makes a plan with changes.
        tried: Default: `candidates`.

    Returns:
        The effect of each, those that help most first.
    """
    before, most = price(exact, hardware).step, _peak(exact)
    found = []
    for what, write, changes in candidates(exact) if tried is None else tried:
        try:
            other = replan(changes)
        except ValueError as wrong:
            found.append(Advice(what, write, refused=str(wrong)))
            continue
        step = price(other, hardware).step
        gain = before.mid - step.mid if step.mid < _WORTH * before.mid else min(0.0, before.mid - step.mid)
        found.append(Advice(what, write, step, gain, _peak(other) - most))
    return tuple(sorted(found, key=lambda a: (bool(a.refused), -a.gain)))


def _peak(exact: Exact) -> int:
    return max(c.stored.total + c.peak for c in exact.classes)
