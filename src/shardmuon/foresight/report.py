"""A plan with its price: what `shardmuon plan` prints, writes and saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmuon.foresight.advice import Advice, Replan, advise
from shardmuon.foresight.hardware import Hardware, Uses
from shardmuon.foresight.pricing import Price, adamw_step, price
from shardmuon.foresight.sections import sections
from shardmuon.foresight.text import plain
from shardmuon.foresight.times import Time
from shardmuon.foresight.types import Exact


@dataclass(frozen=True)
class Report:
    """What Muon takes of a job.

    Attributes:
        exact: Counts; nothing of it is estimated.
        hardware: What it was priced on.
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
        """How much longer a training step is than with AdamW: least, middle, most; fractions. Zeros without tokens.

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
        """For JSON: everything but the hardware's tables."""
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

    def html(self) -> str:
        """One page that needs nothing from elsewhere."""
        from shardmuon.foresight.page import page

        return page(self)

    def write_html(self, path: Path) -> None:
        """Write `html`."""
        path.write_text(self.html(), encoding="utf-8")

    def __str__(self) -> str:
        return plain(sections(self))


def make_report(
    exact: Exact,
    hardware: Hardware,
    *,
    tokens: float | None = None,
    dollars_per_hour: float | None = None,
    replan: Replan | None = None,
) -> Report:
    """Price a plan and AdamW's step on the same mesh, and look for what would help.

    Args:
        exact: The plan's counts.
        hardware: Of every rank.
        tokens: Of a training step.
        dollars_per_hour: Of one rank.
        replan: Makes plans with changes, for advice; None: no advice.

    Raises:
        ValueError: See `price`.
    """
    found = price(exact, hardware, tokens=tokens, dollars_per_hour=dollars_per_hour)
    return Report(
        exact,
        hardware,
        found,
        () if replan is None else advise(exact, hardware, replan),
        adamw_step(exact, hardware, Uses()),
    )
