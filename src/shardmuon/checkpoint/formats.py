"""How other libraries keep the state of their Muons: one table.

[Note: sums and averages]
    Momentum here (and in torch.optim.Muon) is an average, B <- mu B + (1 - mu) G. Others keep the sum B <- mu B + G,
    which is the same average divided by (1 - mu). Orthogonalization sees no difference, the next gradient's share does:
    taken over as it is, such a buffer would outweigh it 20 times at mu = 0.95. So sums are multiplied by (1 - mu).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """How one library keeps its state.

    Attributes:
        name: As the argument `kind` has it.
        about: Class and place, for messages.
        is_sum: Whether momentum is a sum, see [Note: sums and averages].
        mu: The group option that holds the momentum factor.
        momentum: State keys of momentum, the first that is there counts. So for the following ones.
        exp_avg: AdamW's first moment.
        exp_avg_sq: AdamW's second moment; a parameter that has it is AdamW's.
        step: AdamW's counter, in the state or else in the group.
        ignored: State keys without a meaning for us.
        second_moment: NorMuon's averages: those of shardmuon, or (.., rows, 1) with one number for each row.
    """

    name: str
    about: str
    is_sum: bool
    mu: str = "momentum"
    momentum: tuple[str, ...] = ("momentum_buffer",)
    exp_avg: tuple[str, ...] = ("exp_avg", "moment1")
    exp_avg_sq: tuple[str, ...] = ("exp_avg_sq", "moment2")
    step: tuple[str, ...] = ("step",)
    ignored: tuple[str, ...] = ("use_muon",)
    second_moment: tuple[str, ...] = ("second_moment",)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("torch", "torch.optim.Muon, torch.optim.AdamW and shardmuon", is_sum=False),
        Format("keller", "KellerJordan/Muon since 2025-02", is_sum=False),
        Format("keller2024", "KellerJordan/Muon before 2025-02", is_sum=True),
        Format("moonlight", "MoonshotAI/Moonlight", is_sum=True),
        Format(
            "dion",
            "microsoft/dion Muon and NorMuon",
            is_sum=True,
            mu="mu",
            momentum=("momentum",),
            exp_avg=("momentum",),
            exp_avg_sq=("variance",),
            step=("step_dev", "step"),
            second_moment=("variance_neuron",),
        ),
        Format("emerging", "Emerging-Optimizers and Megatron-LM", is_sum=False),
    )
}
