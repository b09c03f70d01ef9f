"""Helpers for tests that raise an exception in each of the package's functions that run before a collective, one
function at a time.

The exceptions are raised by a trace function, which Python calls at every function call, including calls of lambdas,
properties and generators. An exception that the trace function raises appears to come from the called function, before
its first line. A profile function would be several times slower, because Python also calls it at every return and at
every call of a C function.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jobs import unlike

import shardmuon

ROOT = os.path.dirname(shardmuon.__file__) + os.sep
# Satellite packages such as shardmuon_qkclip are installed beside shardmuon. SATELLITES is the common prefix of their
# paths.
SATELLITES = os.path.dirname(ROOT[:-1]) + os.sep + "shardmuon_"

# The functions in TRANSPORT carry the messages that report an exception to other ranks, so the tests raise no exception
# in these functions. Each entry is (file, function). The function "" stands for all functions of the file.
TRANSPORT = {
    ("_torch.py", "default_group"),
    ("_torch.py", "group_named"),
    ("_torch.py", "is_alive"),
    ("errors.py", ""),
    ("comm/groups.py", "group_for"),
    ("comm/groups.py", "group_ranks"),
    ("comm/groups.py", "live"),
    ("comm/groups.py", "my_rank"),
    ("comm/groups.py", "num_ranks"),
    ("comm/groups.py", "wire_device"),
    ("comm/groups.py", "made_under"),
    *(("comm/groups.py", name) for name in ("over", "close_over", "_hops_of", "_name_of", "_bytes_of")),
    *(("comm/groups.py", name) for name in ("merge", "share", "_wait", "_failed", "close")),
    ("comm/vote.py", ""),
    ("layout/bind.py", "bind"),
    ("layout/bind.py", "_compare_replicas"),
    ("layout/bind.py", "_sharers_of"),
    ("layout/bind.py", "renew"),
    ("muon.py", "take_step"),
    ("muon.py", "_remembering"),
    ("muon.py", "make_plan"),
    ("muon.py", "__init__"),
    ("muon.py", "step"),
    ("muon.py", "prepare"),
    ("muon.py", "_host"),
    # `align` calls a torch collective. If it raised an exception on one rank, the other ranks would wait in the
    # collective.
    ("layout/engines/dtensor.py", "align"),
    ("frameworks/deepspeed.py", "step"),
    ("frameworks/deepspeed.py", "_step_flats"),
    ("frameworks/megatron.py", "step"),
    ("checkpoint/saving.py", "_quiet"),
    ("checkpoint/saving.py", "_take_over"),
    ("checkpoint/saving.py", "_describe_shards"),
    ("../shardmuon_qkclip/scaling.py", "reduce"),
    ("../shardmuon_qkclip/scaling.py", "_largest"),
    ("../shardmuon_qkclip/scaling.py", "apply_"),
    ("gradients/clip.py", "_or_dropped"),
    ("gradients/clip.py", "norm"),
}
# Without DeepSpeed, the generators in UNREAD are closed before their first iteration. The tests raise no exception in
# these generators, because Python ignores exceptions that a generator raises while it is closed.
UNREAD = {("frameworks/deepspeed.py", "<genexpr>")}
COLLECTIVES = {("comm/groups.py", name) for name in ("merge", "share")}


class Place(NamedTuple):
    """A function of the package, identified by its file, line and name, which are the same on every rank."""

    file: str
    line: int
    name: str

    @classmethod
    @functools.cache  # `Place.of` is cached, because the trace function of `places` calls it at every function call.
    def of(cls, code: CodeType) -> Place | None:
        if not code.co_filename.startswith((ROOT, SATELLITES)):
            return None
        return cls(os.path.relpath(code.co_filename, ROOT), code.co_firstlineno, code.co_name)

    @property
    def carries_the_word(self) -> bool:
        return bool({(self.file, self.name), (self.file, "")} & (TRANSPORT | UNREAD)) or self.line in _sorting(
            self.file
        )


@functools.cache
def _sorting(file: str) -> frozenset[int]:
    """Return the line numbers of comprehensions in those functions of a file that TRANSPORT lists, except in `with`
    blocks. These comprehensions process messages from other ranks, so the tests raise no exception in them."""
    found, listed = set[int](), {name for of, name in TRANSPORT if of == file}

    def walk(node: ast.AST) -> None:
        if isinstance(node, (ast.With, ast.Lambda)):
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            found.add(node.lineno)
        for child in ast.iter_child_nodes(node):
            walk(child)

    # Parse only files with functions in TRANSPORT, because parsing all files would be slow.
    for node in ast.walk(ast.parse(Path(ROOT, file).read_text() if listed else "")):
        if isinstance(node, ast.FunctionDef) and node.name in listed:
            walk(node)
    return frozenset(found)


def places(call: Callable[[], object], begin: str, last: str | None = None) -> list[Place]:
    """Return the package's functions that `call()` enters after the function `begin`, up to the first collective.

    If `last` is given, they are returned up to the last collective before `call()` enters the function `last`. With
    last="<end>", they are returned up to the end of the call.
    """
    # Each entry of `found` is a function and the number of collectives that ran before the function was entered.
    found: list[tuple[Place, int]] = []
    state = {"begun": False, "ended": False, "collectives": 0}

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        place = Place.of(frame.f_code) if event == "call" and not state["ended"] else None
        if place is None:
            return
        if place.name == begin:
            state["begun"] = True
        elif state["begun"] and place.name == last:
            state["ended"] = True
        elif state["begun"] and (place.file, place.name) in COLLECTIVES:
            state["collectives"] += 1
            state["ended"] = last is None
        elif state["begun"] and not place.carries_the_word:
            found.append((place, state["collectives"]))

    sys.settrace(watch)
    try:
        call()
    finally:
        sys.settrace(None)
    all_of_them = last in (None, "<end>")
    before_last = [place for place, count in found if all_of_them or count < state["collectives"]]
    return list(dict.fromkeys(before_last))


@contextlib.contextmanager
def raising(place: Place | None, error: BaseException, number: int = 1, after: str = "") -> Iterator[dict[str, int]]:
    """Raise `error` in the `number`-th call to `place`, counted from the first call to the function `after`.

    Yield a dict whose "calls" value is the number of these calls so far.
    """
    state = {"begun": not after, "calls": 0}
    line = place.line if place else 0

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not state["begun"]:
            state["begun"] = code.co_name == after and code.co_filename.startswith((ROOT, SATELLITES))
        # Compare only the line numbers first, because `Place.of` hashes the code object, which would be slow for every
        # call.
        if code.co_firstlineno == line and state["begun"] and Place.of(code) == place:
            state["calls"] += 1
            if state["calls"] == number:
                sys.settrace(None)  # Stop tracing, because `error` is raised only once.
                raise error

    if place is not None:
        sys.settrace(watch)
    try:
        yield state
    finally:
        sys.settrace(None)


# ------------------------------------------------------------------------------------------------- all ranks

# TIMEOUT is the timeout of the process group. PROMPT is the longest time that a call with a planted exception may take.
# Both are in seconds.
TIMEOUT, PROMPT = 20.0, 12.0
MARK = "planted here"
KINDS: tuple[BaseException, ...] = (
    ValueError(MARK),
    AssertionError(MARK),
    AssertionError(),
    RuntimeError(MARK),
    KeyError(MARK),
    MemoryError(MARK),
    torch.OutOfMemoryError(MARK),
    KeyboardInterrupt(MARK),
)
# `step` raises exceptions of the types in STAYS unchanged on the rank where they occur, and converts other exceptions
# to a ValueError.
STAYS = (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)


def join(store: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)


def check_all_raise(
    call: Callable[[], object],
    place: Place,
    error: BaseException,
    victim: int,
    number: int,
    after: str,
) -> bool | None:
    """Raise `error` in `place` on one rank, and check that either all ranks raise an error or none does.

    Return True if all ranks raised, False if none did because the caller handles the exception, and None if `place` was
    called fewer than `number` times.
    """
    mine = victim == dist.get_rank()
    began = time.monotonic()
    wrong: BaseException | None = None
    with raising(place if mine else None, error, number, after) as counted:
        try:
            call()
        except BaseException as found:
            wrong = found
    took = time.monotonic() - began
    what = f"{place} {type(error).__name__} call {number} on rank {victim}: {type(wrong).__name__}: {wrong}"
    assert took < PROMPT, f"took {took:.1f} s, {what}"
    told = _told(wrong is not None, counted["calls"] >= number, what)
    raised = [there for there, _ in told]
    assert len(set(raised)) == 1, f"ranks {[r for r, there in enumerate(raised) if there]} raised, {what}"
    if not raised[0]:
        return False if told[victim][1] else None
    expected = type(error) if mine and isinstance(error, STAYS) else ValueError
    # Calls other than `step` may raise a ValueError that quotes the planted exception, instead of the exception itself.
    in_words = after != "step" and isinstance(error, Exception)
    assert type(wrong) is expected or (in_words and type(wrong) is ValueError), what
    named = MARK if error.args else "AssertionError"
    assert named in str(wrong), what
    return True


def _told(raised: bool, called: bool, what: str) -> list[list[bool]]:
    """Return two flags for each rank: whether its call raised an error, and whether it reached the function call in
    which the exception was to be raised. Collective. Each rank also sends a fixed number, so that a rank in a different
    collective is detected."""
    number = 0x5EED0F7E57
    # torch 2.13 renamed all_gather_into_tensor to all_gather_single.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found = torch.empty(3 * dist.get_world_size(), dtype=torch.long)
    try:
        gather(found, torch.tensor([number, raised, called]), group=dist.group.WORLD)
    except RuntimeError as out_of_step:
        raise AssertionError(f"the ranks are out of step, {what}") from out_of_step
    everyone = found.view(-1, 3).tolist()
    assert {theirs[0] for theirs in everyone} == {number}, f"the ranks are out of step, {what}"
    return [[bool(value) for value in theirs[1:]] for theirs in everyone]


def known_places(call: Callable[[], object], begin: str, last: str | None = None) -> list[Place]:
    """Return the functions that `places` finds on at least one rank, in the same order on every rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, places(call, begin, last))
    return list(dict.fromkeys(Place(*place) for theirs in found for place in theirs))


def plant(
    call: Callable[[], object],
    known: Sequence[Place],
    begin: str,
    held: Callable[[], dict[str, object]],
    before: Callable[[int], object] = lambda at: None,
    *,
    kinds: Sequence[BaseException] = KINDS,
    again: bool = False,
) -> tuple[list[str], int]:
    """Run `call` once for each function in `known`, each time raising an exception in that function on one rank. The
    exception type and the rank vary.

    Args:
        call: A call that enters the function `begin` before any of the functions in `known`.
        held: Function that returns all values that `call` must leave unchanged if it raises an error.
        before: Function that prepares each call. Its argument is an index into `known`.
        again: If True, `call` runs once more for every fourth function, and the exception is raised in the third call
            to the function.

    Returns:
        Descriptions of the exceptions that went unnoticed, and the number of exceptions that caused an error on all
        ranks.
    """
    passed, raised = list[str](), 0
    for at, place in enumerate(known):
        for number in (1, 3) if again and at % 4 == 1 else (1,):
            error = kinds[(at + number - 1) % len(kinds)]
            if place.name == "is_aligned" and isinstance(error, ValueError):
                # The caller of `is_aligned` replaces a ValueError with its own error, so `is_aligned` raises an
                # exception of another type.
                error = kinds[(at + number) % len(kinds)]
            victim = (at + at // len(kinds)) % dist.get_world_size()
            before(at)
            kept = held()
            found = check_all_raise(call, place, error, victim, number, begin)
            changed = unlike(kept, held())
            assert not (found and changed), f"{place} {type(error).__name__} on rank {victim} changed {changed}"
            raised += found is True
            if found is False and number == 1:
                passed.append(f"{place} {type(error).__name__} on rank {victim}")
    return passed, raised


def plant_in_all(optimizer: Any, run: Callable[[], object], stride: int = 1) -> tuple[list[str], list[str]]:
    """Run a framework's training step, and raise an exception in each function that `optimizer.step` enters before its
    first collective.

    Args:
        run: Function that takes a training step, in which the framework calls `optimizer.step`. It is called three
            times.
        stride: Exceptions are raised only in every `stride`-th function.

    Returns:
        The names of all functions that are entered before the first collective, and descriptions of the exceptions that
        went unnoticed.
    """
    original, known, passed = optimizer.step, list[Place](), list[str]()

    def trace(*args: Any, **options: Any) -> Any:
        del optimizer.step
        returned: list[Any] = []
        known.extend(known_places(lambda: returned.append(original(*args, **options)), "step"))
        return returned[0]

    def plant_(*args: Any, **options: Any) -> Any:
        del optimizer.step
        groups = [(group, list(group["params"])) for group in optimizer.param_groups]

        def held() -> dict[str, object]:
            # A step that raises an error may leave the framework's own parameter groups in the optimizer. Restore the
            # original groups.
            optimizer.param_groups = [group for group, _ in groups]
            for group, params in groups:
                group["params"] = params
            tensors = [p for _, params in groups for p in params]
            tensors += [value for values in optimizer.state.values() for value in values.values()]
            return {str(at): t.detach().clone() for at, t in enumerate(tensors) if isinstance(t, torch.Tensor)}

        passed.extend(plant(lambda: original(*args, **options), known[::stride], "step", held)[0])
        return original(*args, **options)

    for wrapper in (trace, plant_):
        optimizer.step = wrapper
        run()
    # The last training step runs without a planted exception and must succeed.
    run()
    return [place.name for place in known], passed
