"""Integration with torchtitan: an `OptimizersContainer` with one `Muon` for each part of the model. Importing this
module imports torchtitan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from shardmuon.muon import Muon


class MuonOptimizers(OptimizersContainer):  # type: ignore[misc, unused-ignore]
    """torchtitan `OptimizersContainer` for `Muon`. Select it in torchtitan's config: ``config.optimizer =
    MuonOptimizers.Config(options={"lr": 0.02})``.

    Raises:
        ValueError: The config sets `param_groups`, torchtitan's own assignment of parameters to groups; or AdamW's
            learning rate would differ between model parts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc, unused-ignore]
        """torchtitan's optimizer config with the additional field `options`.

        Attributes:
            options: Options of `shardmuon.Muon`, including `adamw_lr` and `overrides`.
        """

        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups:
            raise ValueError(
                "MuonOptimizers routes parameters by what they are, not by param_groups. Leave those out; options="
                "{'overrides': {'*.router.*': 'adamw'}} corrects the routing by name"
            )
        options = config.options
        if len(model_parts) > 1 and "adamw_lr" not in options and options.get("adjust_lr_fn") != "match_rms_adamw":
            raise ValueError(
                f"without adamw_lr, AdamW's is matched to the matrices of each of the {len(model_parts)} model parts, "
                "and would differ among them. Give options={'adamw_lr': ...}"
            )
        self.model_parts = model_parts
        self.optimizers = [Muon(part, **options) for part in model_parts]
        for index, optimizer in enumerate(self.optimizers):
            logger.info(f"Muon (model_part={index}):\n{optimizer}")
            # torchtitan loads only state that already exists. If an optimizer has no state, torchtitan creates it by
            # taking a step with zero gradients. To avoid this step, create all state here, and fill in missing state
            # after each load.
            optimizer.complete_state()
            optimizer.register_load_state_dict_post_hook(Muon.complete_state)  # type: ignore[arg-type]
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._validate_params(params)
        self._post_init(params)
