"""timm's optimizer factory: a name that `create_optimizer_v2` knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardmuon.muon import Muon


def register(name: str = "shardmuon", **options: Any) -> None:
    """Let `timm.optim.create_optimizer_v2(model, name, ..., param_group_fn=whole_model)` make a `Muon`.

    Args:
        name: What to call it. timm writes names in lower case, without underscores.
        options: Of `shardmuon.Muon`, for calls that do not give them. Momentum must be given here: timm passes its own
            default on, 0.9, and cannot tell it from a wish.

    Example:
        >>> register()  # doctest: +SKIP
        >>> create_optimizer_v2(model, "shardmuon", lr=1e-3, param_group_fn=whole_model)  # doctest: +SKIP
    """
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    about = "Muon for matrices and AdamW for the rest, on any layout"
    default_registry.register(OptimInfo(name, _make, about, has_eps=True, has_betas=True, defaults=options))


def whole_model(model: nn.Module) -> nn.Module:
    """Hand, as timm's `param_group_fn`, the model itself to `Muon`, whose routing needs to see it."""
    return model


def _make(model: Any, *, betas: Any = None, eps: float | None = None, overrides: Any = None, **options: Any) -> Muon:
    """A Muon for timm: its `betas` and `eps` are AdamW's; what the model's `no_weight_decay` names does not decay."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            "timm handed over parameters in place of the model, from which nothing can tell what they are. Write "
            "create_optimizer_v2(model, ..., param_group_fn=shardmuon.frameworks.timm.whole_model)"
        )
    spared: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    pairs = list(overrides.items() if hasattr(overrides, "items") else overrides or ())
    pairs += [(name, {"weight_decay": 0.0}) for name in sorted(trained.intersection(spared))]
    return Muon(model, adamw_betas=betas, adamw_eps=eps, overrides=pairs or None, **options)
