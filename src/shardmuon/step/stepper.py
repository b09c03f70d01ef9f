"""One step: validate, vote, commit.

Every rank first reads everything that its step depends on, changing nothing. Then all ranks of the component vote: all
raise the same error, or all go on. What goes wrong after that leaves weights half updated: the optimizer is broken
until state is loaded, and whoever waits for this rank fails at once.
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardmuon.comm.component import Ranks, in_order
from shardmuon.comm.exchange import Traffic
from shardmuon.comm.faults import Fault
from shardmuon.comm.groups import my_rank
from shardmuon.comm.lane import lane_of
from shardmuon.comm.vote import Ballot, Flag, Phase, Verdict, gather, vote
from shardmuon.errors import HALF_DONE, RELOAD, REMEDY, ExchangeError, Refused, ranks_text
from shardmuon.step.binding import Binding, Config, make_binding
from shardmuon.step.bucket import Work
from shardmuon.step.commit import begin_weights, finish_weights, run_buckets
from shardmuon.step.options import Group, GroupOptions, OptionsReader
from shardmuon.step.validate import MISPLACED, NONE, Memory, Proposal, digests_of, is_current, lines_of, validate
from shardmuon.stepping.adamw import step_adamw
from shardmuon.stepping.zero_weights import ZeroWatch
from shardmuon.variants import WEIGHT_NORMS


class Stepper:
    """Steps groups of parameters together with all ranks that share any.

    Attributes:
        groups, state: As torch.optim.Optimizer has them; frameworks may replace both between steps.
        binding: The plan in force.
        broken: Why the last step left the ranks out of step.
        traffic: What this rank has done so far.
    """

    def __init__(self, groups: Sequence[Group], state: MutableMapping[Tensor, dict[str, Any]], config: Config) -> None:
        self.groups, self.state, self._config = groups, state, config
        self.binding: Binding | None = None
        self.broken: str | None = None
        self.traffic = Traffic()
        self._memory = Memory(state, config.keeper(), WeakIdKeyDictionary())
        self._zeros = ZeroWatch()
        self._options = OptionsReader()
        self._component: Ranks | None = None  # which the ranks had last

    def step(self) -> None:
        """Update all parameters once. Collective over the component.

        Raises:
            Refused: All ranks raise it, and nothing has changed.
            ExchangeError: Ranks are out of step.
        """
        if self.broken is not None:
            raise ExchangeError(f"an earlier step was broken off: {self.broken}")
        while True:
            fault, options, proposal = Fault(), list[GroupOptions](), None
            with fault:
                options = self._options.read(self.groups)
            binding = self.binding
            if binding is None:
                binding = self.binding = self._bind(options, fault)
            flags, digests = Flag.NONE, dict[Ranks, bytes]()
            with fault:
                self._zeros.report()
                if not is_current(binding, self.groups, options):
                    flags = Flag.STALE
                else:
                    proposal = validate(binding, self.groups, options, self._memory)
                    digests = digests_of(binding, proposal, options)
            if fault.text is not None:
                flags = Flag.FAULT
            presence = 0 if proposal is None else proposal.presence
            ballot = Ballot(Phase.STEP, flags, digests, presence, binding.num_bits)
            verdict = vote(ballot, binding.table.component)
            if verdict.flags & Flag.STALE and not verdict.flags & Flag.FAULT:
                self.binding = None
                continue
            if verdict.flags or not verdict.alike or verdict.phase != Phase.STEP:
                self._refuse(binding, proposal, options, fault, verdict)
            assert proposal is not None, "all ranks have agreed"
            self._commit(binding, proposal, verdict.presence)
            return

    def _bind(self, options: Sequence[GroupOptions], fault: Fault) -> Binding:
        made = make_binding(my_rank(), self.groups, options, self._config, self._component, fault)
        self._component = made.table.component
        return made

    # ------------------------------------------------------------------------------------------------------- refuse

    def _refuse(
        self,
        binding: Binding,
        proposal: Proposal | None,
        options: Sequence[GroupOptions],
        fault: Fault,
        verdict: Verdict,
    ) -> None:
        """Find out together what is wrong, and raise it on every rank."""
        component, digests = binding.table.component, dict[Ranks, bytes]()
        with fault:
            digests = {} if proposal is None else digests_of(binding, proposal, options)
        everyone = gather(digests, component, fault.text, fault.cause)
        found: dict[Ranks, set[bytes]] = {}
        for theirs in everyone:
            for ranks, digest in theirs.items():
                found.setdefault(ranks, set()).add(digest)
        unlike = next((ranks for ranks in in_order(found) if len(found[ranks]) > 1), None)
        if unlike is None:
            raise Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}")
        lines = None
        with fault:
            if unlike in digests and proposal is not None:
                lines = lines_of(binding, proposal, options, unlike)
        said = gather(lines, component, fault.text, fault.cause)
        raise Refused(_difference(unlike, [theirs for theirs in said if theirs is not None]))

    # ------------------------------------------------------------------------------------------------------- commit

    def _commit(self, binding: Binding, proposal: Proposal, presence: int) -> None:
        """Change weights and state, as all ranks have agreed. `presence`: of gradients, on any rank."""
        try:
            proposal.hear(binding, presence)
            self._take_over(binding, proposal)
            for number in itertools.chain.from_iterable(binding.table.sets.values()):  # as all ranks go through sets
                if proposal.states[number] == MISPLACED:
                    param, engine = binding.members[number].param, binding.members[number].engine
                    assert param.grad is not None
                    proposal.grads[number] = engine.storage(engine.align(param.grad, param))
            p = proposal
            work = Work(p.weights, p.grads, p.momenta, p.settings, p.kept, p.rounding)
            device = binding.members[0].param.device if binding.members else torch.device("cpu")
            on_weights = {n: s for n, s in binding.on_weights.items() if p.states[n] != NONE}
            new = {n: s for n, s in on_weights.items() if not set(WEIGHT_NORMS).isdisjoint(p.fresh[n])}
            begin_weights(binding.weight_sets(new), work, self._zeros)
            run_buckets(binding.bounds(p.missing), work, device, self.traffic)
            finish_weights(binding.weight_sets(on_weights), work)
            stepped = zip(binding.members, p.states, strict=True)
            step_adamw(self.groups, self.state, lambda: {m.engine for m, state in stepped if state != NONE}, p.adamw)
        except BaseException as error:
            alone = len(binding.table.component) == 1
            text = f"{type(error).__name__}: {error}".rstrip(": .\n")
            self.broken = f"{text}. {HALF_DONE}. {RELOAD if alone else REMEDY}"
            if isinstance(error, ExchangeError):  # which says that itself
                self.broken = str(error)
            if not alone:
                lane_of(binding.table.component).close()
            raise

    def _take_over(self, binding: Binding, proposal: Proposal) -> None:
        """What validating has made becomes state."""
        for number, made in proposal.made.items():
            kept = self.state[binding.members[number].param]
            for key in kept.keys() - made.keys():  # what it kept as AdamW's, or of another variant
                del kept[key]
            kept.update(made)
        for number, keys in proposal.fresh.items():
            for key in keys:
                self._memory.settled[self.state[binding.members[number].param][key]] = True


def _difference(ranks: Ranks, everyone: Sequence[Sequence[str]]) -> str:
    """Where what the ranks of a set are about to do differs first."""
    which = dict(zip(ranks, everyone, strict=True))
    first = everyone[0]
    if len({theirs[0] for theirs in everyone}) > 1:
        return (
            f"ranks {ranks_text(ranks)} hold different plans. If there are several optimizers, step them in one order "
            "on all ranks; else call optimizer.prepare() on every rank"
        )
    for at, line in enumerate(first):
        said: dict[str, list[int]] = {}
        for rank, theirs in which.items():
            said.setdefault(theirs[at], []).append(rank)
        if len(said) > 1:
            name = line.split(":", 1)[0]
            parts = ", ".join(
                f"ranks {ranks_text(tuple(r))} have {t.split(':', 1)[1].strip()}" for t, r in said.items()
            )
            return f"{name}: {parts}. Every rank that shares a parameter must step it alike"
    return f"ranks {ranks_text(ranks)} are about to do different things"


__all__ = ["Config", "Stepper"]
