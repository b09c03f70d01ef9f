"""What each parameter group says, as one frozen object that is made anew only when the group says something else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from shardmuon.errors import OUT_OF_MEMORY, fault_text
from shardmuon.options import MUON_OPTIONS, PLACE_OPTIONS, VIEW_OPTIONS, check_hyperparameters, view_options
from shardmuon.step.settings import Settings, batch_text, settings_of, settings_text

Group = Mapping[str, Any]  # one of an optimizer's parameter groups

_ALIKE = ("use_muon", "rank_local", "partition_dim", "partition_stride")
_READ = (
    *dict.fromkeys((*_ALIKE, *VIEW_OPTIONS, *PLACE_OPTIONS)),
    "lr",
    "weight_decay",
    *MUON_OPTIONS,
    "adamw",
    "betas",
)


class GroupOptions(NamedTuple):
    """A group's options.

    Attributes:
        settings: Of its matrices in a step; None if the group is AdamW's.
        text: The settings as text, equal on ranks that do the same.
        alike: Text of what ranks must have alike when a plan is made, besides `view`.
        planned: Text of what a plan is made for: that, `view`, and this rank's process groups.
        batch: Text of what the matrices of a batch share.
        view: How its parameters are read as matrices.
    """

    settings: Settings | None
    text: str = ""
    alike: str = ""
    planned: str = ""
    batch: str = ""
    view: Mapping[str, Any] | None = None

    def with_rate(self, lr: Tensor) -> GroupOptions:
        """The same with an lr that lies on an accelerator; its value was read before."""
        if self.settings is None:
            return self
        settings = replace(self.settings, tensor_lr=lr)
        return self._replace(settings=settings, text=settings_text(settings))


class OptionsReader:
    """Reads the groups of an optimizer. Keeps what each has said last."""

    def __init__(self) -> None:
        self._said: list[tuple[object, ...]] = []
        self._options: list[GroupOptions] = []

    def read(self, groups: Sequence[Group]) -> list[GroupOptions]:
        """The options of each group as they are now.

        Raises:
            ValueError: One has no meaning; with the group's number.
        """
        del self._said[len(groups) :], self._options[len(groups) :]
        for index, group in enumerate(groups):
            said = _copied(map(group.get, _READ))
            if isinstance(said[_LR], Tensor) or self._said[index : index + 1] != [said]:
                self._options[index : index + 1] = [_options_of(index, group)]
                self._said[index : index + 1] = [said]
        return list(self._options)


def _copied(values: Iterable[Any]) -> tuple[object, ...]:
    """Lists as tuples: they may be changed in place."""
    return tuple(_copied(v) if type(v) is list else v for v in values)


_LR = _READ.index("lr")


def _options_of(index: int, group: Group) -> GroupOptions:
    try:
        return _read(index, group)
    except OUT_OF_MEMORY:
        raise
    except Exception as wrong:
        raise ValueError(fault_text(wrong, f"group {index}: ")) from wrong


def _read(index: int, group: Group) -> GroupOptions:
    check_hyperparameters(f"group {index}: ", group)
    if not group["use_muon"]:
        return GroupOptions(None)
    settings, view, batch = settings_of(group), view_options(group), batch_text(group)
    alike = " ".join([*(f"{key}={group.get(key)!r}" for key in _ALIKE), batch.replace(" ", "")])
    planned = f"{alike} {view} {[group.get(key) for key in PLACE_OPTIONS]}"
    return GroupOptions(settings, settings_text(settings), alike, planned, batch, view)
