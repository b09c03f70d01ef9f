"""Before a step: every rank of every group is about to do the same, or all of them raise.

News spreads as [Note: who may raise when] in binding.py says.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon.comm.exchange import Traffic
from shardmuon.comm.groups import my_rank
from shardmuon.engines.base import NONE, STATES
from shardmuon.planning.views import Ranks
from shardmuon.ranks.council import Faults, relay, share_with_faults
from shardmuon.ranks.exchange import agree_max
from shardmuon.stepping.binding import Binding


def agree(
    binding: Binding,
    states: list[int],  # NONE, READY or MISPLACED per parameter; filled in where this rank stores nothing and had NONE
    settings: Sequence[str],  # per parameter: text of options and state that may change between steps
    error: str | None,  # what is wrong on this rank
    stale: bool,  # whether this rank needs a new plan
    traffic: Traffic,
    cause: BaseException | None = None,  # the exception behind `error`
) -> bool:
    """Before a step: make sure that every rank of every group is about to do the same. One all-reduce a group, and a
    second one where ranks may lack gradients of what they do not store.

    Returns:
        True if some rank needs a new plan; then no rank goes on with this one.

    Raises:
        Refused: Some rank reported an error, or gradients or options differ between ranks. Raised on every rank.
    """
    rounds = binding.rounds
    faults = Faults(error, cause)
    details = dict.fromkeys(rounds, torch.zeros(16, dtype=torch.uint8, device="cpu"))
    with faults.guard():
        details = {ranks: _details(binding, ranks, states, settings) for ranks in rounds}
    trouble = faults.text is not None
    seen: dict[Ranks, Tensor] = {}
    for number, ranks in relay(rounds):
        flags = torch.tensor([trouble, stale], dtype=torch.uint8, device="cpu")
        if number == 0:
            flags = torch.cat([flags, details[ranks]])
        heard = agree_max(flags, ranks, binding.talking_devices[ranks], traffic)
        if number == 0:
            seen[ranks] = heard
            if binding.lacking[ranks] and not heard[1] and not _is_troubled(heard):
                heard[0] = not _agree_on_lacking(binding, ranks, states, settings, traffic)
        else:
            seen[ranks][:2] = torch.maximum(seen[ranks][:2], heard)
        stale = stale or bool(heard[1])
        trouble = trouble or (not stale and _is_troubled(seen[ranks]))
    if stale or not trouble:
        return stale
    news = faults.signed
    for _, ranks in relay(rounds):
        if _is_troubled(seen[ranks]):
            news = _explain(binding, ranks, states, settings, news)
    raise faults.refusal(news)


def _details(binding: Binding, ranks: Ranks, states: Sequence[int], settings: Sequence[str]) -> Tensor:
    """What the ranks of a group compare, so that a maximum over them shows any difference; see `_is_troubled`.

    Of one length whatever the plan: ranks that step different optimizers must still understand each other.
    """
    lacking = binding.lacking[ranks]
    mine = ((states[i], settings[i]) for i in binding.members[ranks] if i not in lacking)
    runs = [(one, len(list(alike))) for one, alike in itertools.groupby(mine)]  # most say the same as those before
    digest = hashlib.blake2b(binding.plan_digests[ranks] + repr(runs).encode(), digest_size=8).digest()
    code = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    return torch.cat([code, 255 - code])


def _agree_on_lacking(
    binding: Binding, ranks: Ranks, states: list[int], settings: Sequence[str], traffic: Traffic
) -> bool:
    """Compare the parameters that some ranks store nothing of among the ranks that do, and let the others know what
    they found. Whether all agree; only called when the plans do, so that all ranks send as much."""
    rank, lacking = my_rank(), binding.lacking[ranks]
    codes = torch.zeros(len(lacking), 2, 9, dtype=torch.uint8, device="cpu")  # zeros give way to any other number
    for row, i in enumerate(lacking):
        if binding.holds(i, rank):
            digest = hashlib.blake2b(repr((states[i], settings[i])).encode(), digest_size=8).digest()
            codes[row, 0] = torch.frombuffer(bytearray([states[i], *digest]), dtype=torch.uint8)
            codes[row, 1] = 255 - codes[row, 0]
    heard = agree_max(codes.flatten(), ranks, binding.talking_devices[ranks], traffic).view_as(codes)
    for row, i in enumerate(lacking):
        if not binding.holds(i, rank) and states[i] == NONE:
            states[i] = int(heard[row, 0, 0])
    return bool((heard[:, 0] + heard[:, 1] == 255).all())


def _is_troubled(seen: Tensor) -> bool:
    return bool(seen[0]) or bool((seen[2:10] + seen[10:18] != 255).any())


def _explain(
    binding: Binding, ranks: Ranks, states: Sequence[int], settings: Sequence[str], news: str | None
) -> str | None:
    """Collect what each rank of a troubled group has to say; return it, the same on each of them.

    None: the trouble lies in other groups, and the news has not come here yet.
    """
    members = binding.members[ranks]
    mine = (binding.plan_digests[ranks], [states[i] for i in members], [settings[i] for i in members])
    heard, everyone = share_with_faults(news, mine, ranks)
    if heard is not None:
        return heard
    if len({theirs[0] for theirs in everyone}) > 1:
        return (
            f"ranks {ranks} hold different plans. If there are several optimizers, step them in one order on all "
            "ranks; else call optimizer.prepare() on every rank"
        )
    for i, index in enumerate(members):
        asked = _asked(binding, ranks, index)
        found = {state: [r for r in asked if everyone[ranks.index(r)][1][i] == state] for state in range(3)}
        if sum(bool(r) for r in found.values()) > 1:
            return (
                f"{binding.candidates[index].name}: "
                + ", ".join(f"ranks {r} have {STATES[state]}" for state, r in found.items() if r)
                + ". Every rank that shares a parameter must have its gradient, or none. Set the missing ones to zeros"
            )
    for i, index in enumerate(members):
        asked = _asked(binding, ranks, index)
        given = [everyone[ranks.index(r)][2][i] for r in asked]
        if len(set(given)) > 1:
            parts = [re.split(r" (?=[a-z_]+[=(])", text) for text in given]
            own = [" ".join(part for part in mine if any(part not in theirs for theirs in parts)) for mine in parts]
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in zip(asked, own, strict=True))
            name = binding.candidates[index].name
            return f"{name}: ranks {ranks} are about to step with different options or state: {texts}"
    return None


def _asked(binding: Binding, ranks: Ranks, index: int) -> Ranks:
    """Whose word counts about a parameter."""
    return tuple(r for r in ranks if binding.holds(index, r)) if index in binding.lacking[ranks] else ranks
