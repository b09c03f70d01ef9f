"""A saved plan is a promise: what a live job does is compared with it before its first step changes anything.

The file is what `shardmuon.foresight` saves. Read here and not there, as the optimizer must not know how plans are made
without ranks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardmuon.planning.plan import Plan
from shardmuon.ranks.exchange import my_rank, num_ranks
from shardmuon.stepping.binding import Binding

FORMAT = 1  # of the file


def read_promise(path: str) -> dict[str, Any]:
    """The contents of a saved plan.

    Raises:
        ValueError: It is none, or one of another version.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"expected_plan={path!r} cannot be read: {wrong}. Save one with shardmuon.foresight") from None
    if not isinstance(found, dict) or found.get("shardmuon_plan") != FORMAT:
        raise ValueError(
            f"expected_plan={path!r} is no plan of this version of shardmuon (shardmuon_plan must be {FORMAT}). "
            "Save it anew with shardmuon.foresight"
        )
    return found


def check_promise(
    path: str, binding: Binding, options: Mapping[str, str], wire_of: Callable[[str], torch.dtype]
) -> None:
    """Compare this rank's part of a plan with a saved one.

    Args:
        path: Of the file.
        binding: The plan in force.
        options: The optimizer's options as text, by name.
        wire_of: Text of a choice -> dtype on the wire.

    Raises:
        ValueError: They differ; says in what: options, ranks, matrices, digest, bytes sent, bytes kept.
    """
    promise, wrong = read_promise(path), []
    for key, found in options.items():
        said = promise["options"].get(key, found)
        if said != found:
            wrong.append(f"{key} is {found}, expected {said}")
    rank, world = my_rank(), sum(len(c["ranks"]) for c in promise["classes"])
    if world != num_ranks():
        wrong.append(f"there are {num_ranks()} ranks, expected {world}")
    kinds = _matrices(promise, binding.plan)
    if kinds and "method=" not in options.get("orthogonalizer", ""):
        kinds.append("method 'auto' may have measured them: write Orthogonalizer(choices=foresight.load(..).choices)")
    wrong += kinds
    mine = next((c for c in promise["classes"] if rank in c["ranks"]), None)
    if not wrong and max(promise["copies"].values(), default=1) == 1:
        known = set(promise["digests"].values())
        lacking = [ranks for ranks in binding.plan.groups if binding.plan.digest(ranks).hex() not in known]
        if lacking:
            wrong.append(
                f"ranks {lacking[0]} have the plan {binding.plan.digest(lacking[0]).hex()}, expected "
                f"{' or '.join(sorted(known))}: parameters' names, layouts, owners or bucket_bytes differ"
            )
    if mine is not None:
        wrong += _numbers(mine, binding, wire_of)
    if wrong:
        raise ValueError(
            f"the plan in force is not the one of expected_plan={path!r}: {'; '.join(wrong)}. Save a plan of this job, "
            "or leave expected_plan out"
        )


def _matrices(promise: Mapping[str, Any], plan: Plan) -> list[str]:
    """Matrices that this rank's plan has and the saved one has not, or in another number."""
    said: Counter[str] = Counter()
    for kind in promise["matrices"]:
        said[f"{kind['rows']}x{kind['cols']} {kind['how']}, route {kind['route']}"] += kind["count"]
    found = Counter(f"{item.rows}x{item.cols} {item.how}, route {item.route}" for item in plan.items)
    parts = promise["mesh"]["pp"] > 1 or promise["mesh"]["engine"] not in ("fsdp2", "ddp")  # a rank plans for a part
    wrong = [
        f"there are {num} matrices of {kind}, expected {said[kind]}"
        for kind, num in found.items()
        if num > said[kind] or (not parts and num != said[kind])
    ]
    missing = (
        [] if parts else [f"there are no matrices of {kind}, expected {num}" for kind, num in (said - found).items()]
    )
    return (wrong + [text for text in missing if text.split(" of ")[1].split(",")[0] not in "".join(wrong)])[:2]


def _numbers(mine: Mapping[str, Any], binding: Binding, wire_of: Callable[[str], torch.dtype]) -> list[str]:
    """Bytes sent and kept by this rank, where the whole of its part of the job is in this plan."""
    sent = exchanges = 0
    for program in binding.programs:
        bucket = program.rank_bucket
        if bucket.gather is None or bucket.scatter is None:
            continue
        how = binding.plan.items[bucket.bucket.items[0]].how
        size = bucket.bucket.itemsize if bucket.bucket.route == "gram" else wire_of(how).itemsize
        sent += size * (sum(bucket.gather.send_splits) + sum(bucket.scatter.send_splits))
        exchanges += 2
    held = sum(c.engine.storage(c.param).numel() for c in binding.candidates)
    if held != mine["muon_elements"]:
        # a pipeline's or a framework's optimizer may have several plans; then only their sum is known
        part = held < mine["muon_elements"] and mine["plans"] > 1
        return [] if part else [f"this rank keeps {held:,} elements of matrices, expected {mine['muon_elements']:,}"]
    wrong = []
    if (exchanges, sent) != (mine["exchanges"], mine["sent"]):
        wrong.append(
            f"this rank sends {sent:,} bytes in {exchanges} exchanges, expected {mine['sent']:,} in {mine['exchanges']}"
        )
    weights = sum(c.engine.storage(c.param).numel() * c.param.element_size() for c in binding.candidates)
    said = mine["muon_weights"]
    if said is not None and weights != said:
        wrong.append(f"this rank keeps {weights:,} bytes of matrices, expected {said:,}")
    return wrong
