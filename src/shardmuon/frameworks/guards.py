"""What hosts with inner cores share: what is raised on one rank before a talk is told in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardmuon.errors import OUT_OF_MEMORY, Refused, fault_text
from shardmuon.options import check_hyperparameters

if TYPE_CHECKING:
    from shardmuon.core import Core, Course


def step_inner(inner: Core, course: Course, early: BaseException | None) -> None:
    """One step of an inner core; the outer one says whether it may step, and remembers how far it came."""
    inner.broken = None
    try:
        inner.take_step(early)
    except Refused:
        raise
    except BaseException:
        course.changing = inner.broken is not None
        raise
    course.changing = True


def raised_by(check: Callable[[], object]) -> BaseException | None:
    """What a check raises, of whatever class: the other ranks must be told of it, they would wait for this one."""
    try:
        check()
    except BaseException as wrong:
        return wrong
    return None


def adamw_fault(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with the options of any group with use_muon=False, which this host steps."""
    for index, group in enumerate(groups):
        try:
            if not group["use_muon"]:
                check_hyperparameters(f"group {index}: ", group)
        except OUT_OF_MEMORY:
            raise
        except Exception as wrong:
            return fault_text(wrong, f"group {index}: ")
    return None
