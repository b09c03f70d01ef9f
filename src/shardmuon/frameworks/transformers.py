"""transformers' Trainer, and what derives from it (TRL): a factory for `optimizer_cls_and_kwargs`.

Nothing here imports transformers, and accelerate is imported only when a model comes.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

from shardmuon._torch import default_group, is_dtensor
from shardmuon.comm.groups import group_ranks, my_rank
from shardmuon.muon import Muon
from shardmuon.options import ADAMW_DEFAULTS

if TYPE_CHECKING:
    from transformers import TrainingArguments

_LOG = logging.getLogger(__name__)


class MuonFactory:
    """Makes a Trainer's optimizer from its model, when the Trainer asks for it.

    What is not given comes from the TrainingArguments: ``lr`` and ``weight_decay`` from ``learning_rate`` and
    ``weight_decay``, ``betas`` and ``eps`` of the AdamW groups from ``adam_beta1``, ``adam_beta2`` and
    ``adam_epsilon``. The log has a line that says which, and how many parameters go where. If the Trainer will wrap
    the model in DistributedDataParallel, the ranks share the work.

    Args:
        args: The Trainer's arguments. None: `lr` must be given, and the others are shardmuon's defaults.
        options: Of `shardmuon.Muon`, those for a module (`adamw_lr`, `overrides`, ..) included.

    Example:
        >>> trainer = Trainer(model, args, optimizer_cls_and_kwargs=(MuonFactory(args), {}))  # doctest: +SKIP
    """

    def __init__(self, args: TrainingArguments | None = None, **options: Any) -> None:
        self._args = args
        self._options = options

    def __call__(self, model: nn.Module | None = None, **options: Any) -> Any:
        """Make the optimizer. Trainer calls what it was given twice: as a class, without a model, and what came of it
        with the model.

        Args:
            model: What to optimize. None: returns the factory itself.
            options: As those of the constructor, which they replace one by one.

        Returns:
            The optimizer.

        Raises:
            ValueError: Nothing says the learning rate, or `Muon` refuses an option or a parameter.
        """
        if model is None:
            return self
        given = {**self._options, **options}
        args = given.pop("args", self._args)
        taken = _of_arguments(args, given)
        if "lr" not in given and "lr" not in taken:
            raise ValueError(
                "MuonFactory knows no learning rate. Give it the Trainer's arguments, MuonFactory(args), or "
                "MuonFactory(lr=...)"
            )
        if "process_group" not in given:
            given["process_group"] = _replicas(model)
        optimizer = Muon(model, **taken, **given)
        for group in optimizer.param_groups:
            if args is not None and not group["use_muon"]:
                own = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
                group.update({key: value for key, value in own.items() if group[key] == ADAMW_DEFAULTS[key]})
        if default_group() is None or my_rank() == 0:
            _LOG.warning(_said(optimizer, taken, given["process_group"]))
        return optimizer


def _of_arguments(args: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of `Muon` that TrainingArguments have and the user did not give."""
    if args is None:
        return {}
    own = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    return {key: value for key, value in own.items() if key not in given}


def _replicas(model: nn.Module) -> Any:
    """The ranks on which the Trainer will keep the model equal by DistributedDataParallel, or None.

    The model is not wrapped yet. accelerate knows what will wrap it: its MULTI_GPU, MULTI_CPU, .. stand for
    DistributedDataParallel, while FSDP and DeepSpeed have names of their own and lay the parameters out themselves. A
    model that is tensor parallel already (`tp_plan`) has DTensors, which know their ranks.
    """
    from accelerate.state import AcceleratorState, is_initialized

    if default_group() is None or not is_initialized():
        return None
    wraps = AcceleratorState().distributed_type.value.startswith("MULTI_")
    return default_group() if wraps and not any(map(is_dtensor, model.parameters())) else None


def _said(optimizer: Muon, taken: dict[str, Any], group: Any) -> str:
    counts = Counter(row.optimizer for row in optimizer.routing)
    text = "Routed: " + ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) + " parameters"
    text += ". From TrainingArguments: " + (", ".join(f"{key}={value}" for key, value in taken.items()) or "nothing")
    return text if group is None else f"{text}. The work is shared by {len(group_ranks(group))} ranks"
