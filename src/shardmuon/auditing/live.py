"""Audit one optimizer step: read the state before the step, gather the state after the step, and make the same report
on all ranks.

[Note: order of collectives]
    Ranks are connected if a parameter is sharded or replicated over them. All ranks that are connected, directly or
    through other ranks, form a component.

    Before the step, all ranks of a component rebuild the layout table, which lists the ranks that store each part of
    each Muon parameter. The same code also built the table for the plan. Then each set of ranks that store parts of the
    same parameters runs one gather, small sets first. In this gather, the ranks agree on the matrices that all of them
    could read. After the step, each sampled matrix is assembled in one exchange between the ranks that store its parts.
    Then the ranks of each set gather hashes of their replicas. Finally, all ranks of the component share their
    findings.

    An exception that can occur on a single rank is caught and reported as a finding, so that the rank still takes part
    in every collective.

[Note: whole matrices]
    A whole matrix is assembled from the shards on all ranks that store a part of it. The assembly uses the rebuilt
    layout table, but neither the plan nor the code that executes the plan, so that it reveals faults in either.

    A matrix consists of the elements of the global tensor at certain indices in each dim. The row-major position of an
    element in the matrix is a sum with one term per dim, and each term depends only on the index in its dim. So the
    positions of the elements that a rank stores are computed one dim at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardmuon.auditing.judge import judge
from shardmuon.auditing.reference import Arithmetic
from shardmuon.auditing.report import AuditReport, AuditSchedule, Finding, MatrixRow
from shardmuon.comm.groups import Ranks, Traffic, group_for, my_rank
from shardmuon.comm.vote import Fault, gather
from shardmuon.errors import ExchangeError, Refused, ranks_text
from shardmuon.layout.bind import Listed, Table, bind, describe
from shardmuon.layout.engines import engine_of
from shardmuon.layout.engines.base import GradientState, named_params
from shardmuon.layout.pieces import Box, Held, ParamLayout, Piece
from shardmuon.layout.views import MatrixView, row_major
from shardmuon.momentum.keeper import BUFFER
from shardmuon.options import Settings
from shardmuon.plan.plan import Item
from shardmuon.step.binding import Binding, Offer, fingerprint
from shardmuon.step.validate import Proposal
from shardmuon.variants import keeping

_T = TypeVar("_T")
_Block = tuple[slice, slice]
# dict from quantity (such as "weights") to its layout and (n,) fp64 values
_Elements = dict[str, tuple[ParamLayout, Tensor]]
_NO_GRADIENT = "no gradient"  # initial status of a matrix in the report, replaced when the matrix is judged


def _choose(count: int, samples: int, number: int) -> list[int]:
    """Choose up to `samples` of `count` matrices for the audit with index `number`, and return their indices.
    Successive audits cycle through all matrices."""
    return [(number * samples + i) % count for i in range(min(samples, count))]


@dataclass(frozen=True)
class _Sample:
    """A sampled matrix, with its state before the step.

    Attributes:
        row: The matrix's row in the report, without the results of the comparison.
        arithmetic: Options, dtypes and device that determine the matrix's step.
        before: Dict from quantity (such as "weights") to a tuple with the quantity's layout and the elements that this
            rank sends to `target`.
        target: The rank that judges the matrix.
    """

    row: MatrixRow
    arithmetic: Arithmetic
    before: _Elements
    target: int


class StepAudit:
    """Audit of one optimizer step. Construct the audit before the step, and call `finish` after the step. Both calls
    are collective over all ranks that are connected, directly or through other ranks, by sharded or replicated
    parameters.

    Attributes:
        samples: Number of matrices to compare for each set of ranks over which parameters are sharded or replicated. 0
            means that this rank has requested no audit but takes part in the audits of other ranks.
    """

    def __init__(
        self, optimizer: Any, binding: Binding, proposal: Proposal, schedule: AuditSchedule, samples: int
    ) -> None:
        self._optimizer, self._binding, self._proposal, self._schedule = optimizer, binding, proposal, schedule
        self.samples, self._rank = samples, my_rank()
        self._findings, self._rows, self._taken = list[Finding](), list[MatrixRow](), list[_Sample]()
        self._ran = optimizer.traffic.orthogonalized
        self._tried("the model's own weights", self._look_at_model)
        self._tried("the routing", self._look_at_routing)
        table, sets = self._described(), dict[Ranks, tuple[int, ...]]()
        self._params, self._layouts, self._sets = (
            ((), (), sets) if table is None else (table.params, table.layouts, table.sets)
        )
        for ranks, numbers in self._sets.items():
            self._take(ranks, numbers)

    def _say(self, name: str, where: str, found: str, allowed: str) -> None:
        self._findings.append(Finding.of(name, where, found, allowed))

    def _tried(self, what: str, run: Callable[..., _T], *given: Any) -> _T | None:
        """Call `run` and return its result. If `run` raises an exception, record a finding and return None, because the
        rank must still take part in the next collective."""
        try:
            return run(*given)
        except Exception as error:
            self._say(
                "audit_failed",
                f"rank {self._rank}",
                f"{what} could not be checked: {type(error).__name__}: {error}",
                "a check",
            )
            return None

    # --------------------------------------------------------------------------- before the step: without arithmetic

    def _look_at_model(self) -> None:
        """Report parameters whose weights in the model differ from the copy that the optimizer updates."""
        for name in self._optimizer.unlike_model():
            found = f"on rank {self._rank} what is stepped in its place are not its weights"
            self._say("weights_elsewhere", name, found, "the model's own, rounded to its dtype")

    def _look_at_routing(self) -> None:
        """Report parameters that are in no group, or in a group whose optimizer (Muon or AdamW) differs from the one in
        the routing table. If the routing table is empty, report nothing."""
        goes = {
            name: ("Muon" if group["use_muon"] else "AdamW", index)
            for index, group in enumerate(self._optimizer.param_groups)
            for name, _ in named_params(group, index)
        }
        for row in (row for row in self._optimizer.routing if row.optimizer != "frozen"):
            decided = f"{row.optimizer}, as param_groups decided ({row.reason})"
            if row.name not in goes:
                self._say("not_in_optimizer", row.name, "no group holds it, so it never changes", decided)
            elif goes[row.name][0] != row.optimizer:
                found = "it goes to {}, in group {}".format(*goes[row.name])
                self._say("wrong_group", row.name, found, decided)

    # ---------------------------------------------------------------------------------- before the step: the layouts

    def _described(self) -> Table | None:
        """Rebuild the layout table, which lists the ranks that store each part of each Muon parameter, and report
        differences from the table in the plan. If the ranks cannot agree on a table, report this and return None.
        Collective over all ranks that are connected, directly or through other ranks, by sharded or replicated
        parameters."""
        component, fault, listed = self._binding.component, Fault(), list[Listed]()
        with fault:
            listed = self._listed()
        try:
            table = bind(listed, beyond=(component,), before=component, fault=fault)
        except Refused as wrong:
            if wrong.cause is not None and not isinstance(wrong.cause, Exception):
                raise
            self._stale(f"ranks {ranks_text(component)}", str(wrong))
            return None
        planned = zip(self._binding.members, self._binding.plan.specs, strict=True)
        for one, layout, (member, spec) in zip(table.params, table.layouts, planned, strict=True):
            if one.param is not member.param or layout.digest != spec.layout.digest:
                self._stale(one.name, "the tensor is another one, or its matrices lie on other ranks than planned")
        return table

    def _listed(self) -> list[Listed]:
        """List the parameters that are currently in the optimizer's groups and updated by Muon.

        Raises:
            ValueError: The plan and the groups have different numbers of parameters, or a parameter is shared with
                ranks that take no part in this step.
        """
        core, component = self._optimizer, self._binding.component
        options = core.options.read(core.param_groups)
        listed = Offer(core.param_groups, options, core.config, core.keeper).listed
        ties = [one.ties for one in describe(listed)]
        known = [one for one in ties if {*one.parts, *one.mates} <= {*component}]
        if not len(known) == len(listed) == len(self._binding.members):
            text = f"the groups hold {len(listed)} parameters, {len(known)} of them of ranks {ranks_text(component)}"
            raise ValueError(f"{text}, the plan {len(self._binding.members)}")
        return listed

    def _stale(self, where: str, text: str) -> None:
        """Record that the step used an outdated plan, which was made for other parameters or layouts."""
        self._say("stale_plan", where, text, "the parameters that were planned for, as they were then")

    # ---------------------------------------------------------------------------------------- what this rank stores

    def _stored(self, number: int) -> Iterator[tuple[str, ParamLayout, Tensor | None]]:
        """Yield the name, the layout, and this rank's part (None if it stores none) of each quantity of a parameter.
        The names are "weights", "momentum", "gradient", and the state keys of the Muon variant."""
        one, layout = self._params[number], self._layouts[number]
        engine, state = engine_of(one.param), self._optimizer.state.get(one.param, {})
        yield "weights", layout, engine.storage(one.param)
        # `keeper.values` decodes 8-bit momentum.
        yield "momentum", layout, self._optimizer.keeper.values(engine, state)
        yield "gradient", layout, self._proposal.grads[number]  # Gradients have the same layouts as their parameters.
        stages, specs = keeping(Settings.of(one.group).stages), self._binding.plan.specs
        for stage, kept in zip(stages, specs[number].kept, strict=True):
            yield stage.key, kept.layout, engine.storage(state[stage.key]) if stage.key in state else None

    def _elements(self, number: int, matrix: int) -> _Elements:
        """Read those elements of a matrix's weights, momentum and other quantities that this rank sends to the rank
        that judges the matrix."""
        found = {}
        for what, layout, stored in self._stored(number):
            part = _sent_by(layout, matrix, self._rank)
            values = torch.zeros(len(part.places)) if stored is None else part.select(stored.detach())
            found[what] = layout, values.to(self._params[number].param.device, torch.float64)
        return found

    def _prints(self, numbers: Sequence[int]) -> dict[tuple[int, str, tuple[Piece, ...]], int]:
        """Compute a fingerprint (hash) of each replicated quantity that this rank stores. Return a dict whose keys are
        tuples (index of the parameter in `numbers`, name of the quantity, pieces that this rank stores)."""
        prints = {}
        for at, number in enumerate(numbers):
            for what, layout, stored in self._stored(number):
                pieces = layout.pieces[self._rank]
                if layout.has_replicas and pieces and stored is not None:
                    prints[at, what, pieces] = fingerprint(stored)
        return prints

    # ---------------------------------------------------------------------------------- before the step: the samples

    def _take(self, ranks: Ranks, numbers: Sequence[int]) -> None:
        """Choose some matrices of the parameters with the indices `numbers`, and read this rank's parts of them before
        the step. Collective over `ranks`."""
        views = {number: self._layouts[number].view for number in numbers}
        items = [(number, matrix) for number in numbers for matrix in range(len(views[number].matrices))]
        chosen = [items[at] for at in _choose(len(items), self.samples, self._schedule.num_audits)]
        shapes = [(views[n].matrices[matrix].rows, views[n].matrices[matrix].cols) for n, matrix in chosen]
        read = list[_Sample | None]()
        for (number, matrix), shape in zip(chosen, shapes, strict=True):
            # All matrices of one shape are judged on the same rank, so that swapped results can be detected.
            target = ranks[(shapes.index(shape) + self._schedule.num_audits) % len(ranks)]
            read.append(self._tried(self._params[number].name, self._read, number, matrix, target))
        told = gather([None if one is None else self._has_gradient(one) for one in read], ranks)
        for sample, *of_ranks in zip(read, *told, strict=True):
            if sample is None or None in of_ranks:
                continue
            have = list(itertools.chain(*of_ranks))
            if sample.row.status != _NO_GRADIENT or not any(have):
                self._rows.append(sample.row)
            elif all(have):
                self._taken.append(sample)
            else:
                self._say(
                    "gradient_missing",
                    sample.row.name,
                    f"only {sum(have)} of the {len(have)} ranks that hold pieces of it have a gradient",
                    "all or none",
                )

    def _has_gradient(self, sample: _Sample) -> list[bool]:
        """Return [True] if this rank has a gradient for its part of a matrix, [False] if it has none, and [] if it
        stores no part of the matrix."""
        return [self._proposal.grads[sample.row.order[0]] is not None] if len(sample.before["weights"][1]) else []

    def _read(self, number: int, matrix: int, target: int) -> _Sample | None:
        """Read this rank's part of a matrix before the step. Return None if the plan divides the parameter into
        different matrices than the parameter's current layout does."""
        one, layout, plan = self._params[number], self._layouts[number], self._binding.plan
        if layout.view != plan.specs[number].layout.view:
            return None
        item = next(i for i in plan.items if (i.param, i.matrix) == (number, matrix))
        name = one.name if len(layout.view.matrices) == 1 else f"{one.name}[{matrix}]"
        if len(layout.ranks) == 1 and len(self._sets) > 1:
            # Add the rank to the matrix's name in the report, because other ranks can have a parameter of the same
            # name.
            name += f" (rank {self._rank})"
        arithmetic, shape = self._arithmetic(one, item), layout.view.matrices[matrix]
        status = next((f"not checked: {stage}" for stage in arithmetic.unchecked), _NO_GRADIENT)
        row = MatrixRow(name, (number, matrix), shape.rows, shape.cols, item.owners, str(arithmetic), status)
        return _Sample(row, arithmetic, self._elements(number, matrix), target)

    def _arithmetic(self, one: Listed, item: Item) -> Arithmetic:
        """Collect the options, dtypes and device that determine a matrix's step, from the plan and from the current
        options of the parameter's group."""
        param, choice, device = one.param, item.choice, self._binding.ns_device
        spec = self._binding.plan.specs[item.param]
        gradient, how = self._proposal.grads[item.param], self._proposal.rounding.get(item.param)
        stored = self._optimizer.state.get(param, {}).get(BUFFER, param).dtype
        return Arithmetic(
            settings=Settings.of(one.group),
            choice=choice,
            products=choice.dtype,
            wire={2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[spec.itemsizes[item.matrix]],
            weights=param.dtype,
            gradient=param.dtype if gradient is None else gradient.dtype,
            momentum=stored if self._optimizer.keeper.dtype is None else torch.float32,
            stored=stored,
            device=device,
            rounding=None if how is None or how.weights is None else (how.weights, item.matrix),
        )

    # -------------------------------------------------------------------------------------------- after the step

    def finish(self) -> AuditReport:
        """Gather the sampled matrices, judge them, and share the findings. Return the same report on all ranks that
        share parameters, directly or through other ranks."""
        self._count_runs()
        self._judge_samples()
        for ranks, numbers in self._sets.items():
            if len(ranks) > 1:
                self._compare_replicas(ranks, numbers)
        findings, rows = zip(*gather((self._findings, self._rows), self._binding.component), strict=True)
        matrices = {(row.order, row.name): row for row in itertools.chain(*rows)}
        return AuditReport(
            self._schedule.num_steps,
            tuple(sorted({*itertools.chain(*findings)}, key=lambda f: (f.severity, f.where, f.name, f.found))),
            tuple(matrices[key] for key in sorted(matrices)),
        )

    def _count_runs(self) -> None:
        """Record a finding if the number of matrices that this rank orthogonalized in the step differs from the number
        that the plan assigns to it."""
        found, states = self._optimizer.traffic.orthogonalized - self._ran, self._proposal.states
        planned = sum(
            states[i.param] != GradientState.NONE and self._rank in i.owners for i in self._binding.plan.items
        )
        if found != planned:
            self._say(
                "orthogonalized_count",
                f"rank {self._rank}",
                f"{found} matrices went through the orthogonalizer in the step",
                f"{planned}, each matrix of the plan once",
            )

    def _judge_samples(self) -> None:
        """Assemble the sampled matrices, and judge those that are assembled on this rank. Each assembly is collective
        over the ranks that store the matrix."""
        judged = []
        for sample in self._taken:
            name, (number, matrix) = sample.row.name, sample.row.order
            now = self._tried(name, self._elements, number, matrix)
            parts = {
                what: (layout, torch.stack([before, now[what][1] if now else torch.full_like(before, torch.nan)]))
                for what, (layout, before) in sample.before.items()
            }
            whole, blocks = _collect(matrix, parts, sample.target)
            evidence = self._tried(name, judge, sample.row, sample.arithmetic, blocks, whole) if whole else None
            judged += [] if evidence is None else [evidence]
        for e in judged:
            if e.wrong:
                self._tried(e.row.name, e.find_cause, [other for other in judged if other.shape == e.shape])
            self._rows.append(e.row)
            self._findings += e.findings

    def _compare_replicas(self, ranks: Ranks, numbers: Sequence[int]) -> None:
        """Record a finding if replicas of the same weights, momentum or other stored values differ. Collective over
        `ranks`."""
        everyone = gather(self._tried("replicas", self._prints, numbers) or {}, ranks)
        for key in dict.fromkeys(itertools.chain(*everyone)):
            at, what, _ = key
            found = {rank: theirs[key] for rank, theirs in zip(ranks, everyone, strict=True) if key in theirs}
            first = min(found)
            odd = [str(rank) for rank in found if found[rank] != found[first]]
            if odd:
                self._say(
                    "gradient_replicas_differ" if what == "gradient" else "replica_drift",
                    self._params[numbers[at]].name,
                    f"the {what} on rank(s) {', '.join(odd)} differ from those on rank {first}",
                    "equal bits on all ranks that hold the same piece",
                )


# -------------------------------------------------------------------------------------------- whole matrices


class _Part(NamedTuple):
    """The elements of one matrix that one rank stores.

    Attributes:
        sources: One list for each piece of the rank's local tensor that overlaps the matrix. The list contains one 1-D
            index tensor for each dim of the local tensor. All combinations of these indices select the matrix's
            elements in the piece.
        places: (n,) int64 row-major positions of the elements in the matrix.
    """

    sources: list[list[Tensor]]
    places: Tensor

    def select(self, storage: Tensor) -> Tensor:
        """Return the matrix's elements in `storage`, as a 1-D tensor in the order of `places`. `storage` is a local
        tensor of the rank, such as its weights or momentum."""
        indices = (torch.meshgrid(*source, indexing="ij") for source in self.sources)
        found = [storage[tuple(at.to(storage.device) for at in index)].reshape(-1) for index in indices]
        return torch.cat([storage.new_empty(0), *found])


def _part_of(view: MatrixView, number: int, held: Iterable[Held]) -> _Part:
    """Find the elements of matrix `number` in `held`, pieces of the parameter that a rank stores."""
    lines, sources, places = _lines(view, number), [], [torch.empty(0, dtype=torch.int64)]
    for piece, local in held:
        box = piece if isinstance(piece, Box) else piece.box or Box((0,) * len(view.shape), view.shape)
        kept = [(at >= a) & (at < a + n) for (at, _), a, n in zip(lines, *box, strict=True)]
        place = _outer(step[inside] for (_, step), inside in zip(lines, kept, strict=True))
        source = [at[inside] - a for (at, _), inside, a in zip(lines, kept, box.offset, strict=True)]
        if not isinstance(piece, Box):
            flat = _outer(at * stride for at, stride in zip(source, row_major(box.size), strict=True))
            inside = (flat >= piece.start) & (flat < piece.stop)
            source, place = [flat[inside] - piece.start], place[inside]
        if len(place):
            sources.append([at + first for at, first in zip(source, local, strict=True)])
            places.append(place)
    return _Part(sources, torch.cat(places))


def _sent_by(layout: ParamLayout, number: int, rank: int) -> _Part:
    """Select the elements of matrix `number` that `rank` sends to the rank that judges the matrix. If several ranks
    store the same piece, only the first of them sends it."""
    held = [one for one in layout.of_rank(rank) if one.piece.numel and layout.keepers[one.piece][0] == rank]
    return _part_of(layout.view, number, held)


def _lines(view: MatrixView, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return a pair for each dim of the tensor: the indices at which a matrix has elements, and the amount that each
    index adds to an element's row-major position in the matrix."""
    matrix, split = view.matrices[number], view.split_dim
    found = [
        (torch.arange(start, start + size), torch.arange(size) * stride)
        for start, size, stride in zip(matrix.start, matrix.sizes, matrix.strides, strict=True)
    ]
    if split >= 0:
        (repeat, far), (at, near) = found[split : split + 2]
        found[split : split + 2] = [(_outer((repeat * view.fine[split + 1], at)), _outer((far, near)))]
    return found


def _outer(lines: Iterable[Tensor]) -> Tensor:
    """Add one value from each of the 1-D tensors `lines`, in all combinations. Return the sums as a 1-D tensor in
    row-major order."""
    return reduce(lambda sums, line: sums.unsqueeze(-1) + line, lines).reshape(-1)


def _block_of(places: Tensor, cols: int) -> _Block | None:
    """Return the row slice and the column slice that select exactly the row-major positions `places` of a matrix with
    `cols` columns. Return None if the positions do not form a rectangle."""
    if not len(places):
        return None
    (top, bottom), (left, right) = ((int(at.min()), int(at.max()) + 1) for at in (places // cols, places % cols))
    whole = (bottom - top) * (right - left) == len(places)
    return (slice(top, bottom), slice(left, right)) if whole else None


def _collect(
    number: int,
    # dict from quantity to its layout and its (2, n) values before and after the step
    parts: Mapping[str, tuple[ParamLayout, Tensor]],
    target: int,
) -> tuple[dict[str, Tensor], list[_Block]]:
    """Gather all quantities of a whole matrix on rank `target`. Collective over the ranks that store the parameter.

    Returns:
        A tuple (quantities, blocks). `quantities` is a dict from quantity to a tensor of shape (2, elements) with the
        values before and after the step. Values that a rank could not read are NaN. `blocks` lists the shards that are
        rectangular parts of the matrix, and omits other shards, such as parts of convolution kernels. Both are empty on
        all ranks except `target`.
    """
    view, ranks, is_target = parts["weights"][0].view, parts["weights"][0].ranks, my_rank() == target
    places = [[_sent_by(layout, number, rank).places for layout, _ in parts.values()] for rank in ranks if is_target]
    came = [torch.cat([part.reshape(-1) for _, part in parts.values()])]
    if len(ranks) > 1:
        expected = tuple(2 * sum(map(len, of_rank)) for of_rank in places) or (0,) * len(ranks)
        given = tuple(came[0].numel() if rank == target else 0 for rank in ranks)
        with ExchangeError.naming(lambda: f"bringing an audited matrix to rank {target}, ranks {ranks_text(ranks)}"):
            came = list(Traffic().start(group_for(ranks), came[0], given, expected).wait().split(expected))
    if not is_target:
        return {}, []
    whole = {}
    for what, (layout, part) in parts.items():
        matrix = layout.view.matrices[number]
        whole[what] = part.new_full((2, matrix.rows * matrix.cols), torch.nan)
    for of_rank, values in zip(places, came, strict=True):
        for out, at, own in zip(whole.values(), of_rank, values.split([2 * len(at) for at in of_rank]), strict=True):
            out.index_copy_(1, at.to(out.device), own.view(2, -1))
    blocks = [_block_of(of_rank[0], view.matrices[number].cols) for of_rank in places]
    return whole, [block for block in blocks if block is not None]
