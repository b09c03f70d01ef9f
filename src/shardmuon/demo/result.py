"""What one training run measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from shardmuon.demo.config import OptimizerName
from shardmuon.demo.proof import Proof

__all__ = ["RunResult"]


@dataclass(slots=True)
class RunResult:
    """One training run. Losses are means over the global batch in nats per byte; times are this rank's."""

    optimizer: OptimizerName
    lr: float
    train_loss: list[float] = field(default_factory=list)  # one a step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    step_seconds: list[float] = field(default_factory=list)  # one a step: forward, backward and optimizer
    optimizer_seconds: list[float] = field(default_factory=list)  # of these, in optimizer.step()
    state_bytes: int = 0  # of the rank that stores most
    seconds: float = 0.0
    proof: Proof | None = None

    @property
    def final_train_loss(self) -> float:
        """Mean over the last tenth of the steps, at most 20."""
        last = self.train_loss[-max(1, min(20, len(self.train_loss) // 10)) :]
        return sum(last) / len(last)

    @property
    def final_held_out_loss(self) -> float:
        return self.held_out[-1][1]

    def tokens_per_second(self, tokens_per_step: int) -> float:
        """Over all steps but the first, which also plans and connects."""
        return tokens_per_step / _mean_after_first(self.step_seconds)

    @property
    def optimizer_share(self) -> float:
        """Fraction of a step's time spent in the optimizer, over all steps but the first."""
        return _mean_after_first(self.optimizer_seconds) / _mean_after_first(self.step_seconds)

    def as_dict(self, tokens_per_step: int) -> dict[str, object]:
        return asdict(self) | {
            "proof": self.proof and self.proof.as_dict(),
            "final_train_loss": self.final_train_loss,
            "final_held_out_loss": self.final_held_out_loss,
            "tokens_per_second": self.tokens_per_second(tokens_per_step),
            "optimizer_share": self.optimizer_share,
        }


def _mean_after_first(values: list[float]) -> float:
    kept = values[1:] or values
    return sum(kept) / len(kept)
