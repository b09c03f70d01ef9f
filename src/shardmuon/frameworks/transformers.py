"""Integration with transformers' Trainer and its subclasses, such as TRL's trainers: a factory to pass as the argument
`optimizer_cls_and_kwargs`.

This module never imports transformers. It imports accelerate only when an optimizer is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardmuon._torch import default_group, is_dtensor
from shardmuon.muon import Muon
from shardmuon.options import ADAMW_DEFAULTS

if TYPE_CHECKING:
    from transformers import TrainingArguments


class MuonFactory:
    """Factory that a Trainer calls with the model to make its optimizer.

    Options that are not given are taken from the TrainingArguments: ``lr`` from ``learning_rate``, ``weight_decay``
    from ``weight_decay``, and AdamW's ``betas`` and ``eps`` from ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``.
    If the Trainer later wraps the model in DistributedDataParallel, the ranks divide the optimizer's work among
    themselves.

    Args:
        args: The Trainer's arguments.
        options: Options of `shardmuon.Muon`. The options that `Muon` accepts together with a module, such as `adamw_lr`
            and `overrides`, are allowed.

    Example:
        >>> trainer = Trainer(model, args, optimizer_cls_and_kwargs=(MuonFactory(args), {}))  # doctest: +SKIP
    """

    def __init__(self, args: TrainingArguments, **options: Any) -> None:
        self._args = args
        self._options = options

    def __call__(self, model: nn.Module | None = None, **options: Any) -> Any:
        """Make the optimizer. The Trainer treats the factory as a class: it first calls the factory without a model, as
        if to create an instance, and then calls the result with the model.

        Args:
            model: Model to optimize; None in the Trainer's first call.
            options: Options of `shardmuon.Muon`. They take precedence over the constructor's options.

        Returns:
            The optimizer, or the factory if `model` is None.

        Raises:
            ValueError: `Muon` rejects an option or a parameter.
        """
        if model is None:
            return self
        args = self._args
        defaults = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "process_group": _replicas(model)}
        optimizer = Muon(model, **{**defaults, **self._options, **options})
        for group in optimizer.param_groups:
            if not group["use_muon"]:
                of_adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
                group.update({key: value for key, value in of_adam.items() if group[key] == ADAMW_DEFAULTS[key]})
        return optimizer


def _replicas(model: nn.Module) -> Any:
    """Return the process group over which the Trainer will replicate the model with DistributedDataParallel; None if
    the Trainer will not use DistributedDataParallel.

    The model is not wrapped yet, but accelerate's `distributed_type` shows which wrapper the Trainer will use. Types
    that begin with "MULTI_", such as MULTI_GPU, stand for DistributedDataParallel. The result is also None for a
    tensor-parallel model (`tp_plan`), because a DTensor's mesh determines which ranks share it.
    """
    from accelerate.state import AcceleratorState, is_initialized

    if default_group() is None or not is_initialized():
        return None
    wraps = AcceleratorState().distributed_type.value.startswith("MULTI_")
    return default_group() if wraps and not any(map(is_dtensor, model.parameters())) else None
