"""Tests that the fast path of validation before a step gives the same result as the full checks, and that momentum
updates written directly into a batch have the same bits as if they were copied into it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import Job, Spec, in_gradient, in_state, in_storage, of_inference, one_row, unlike
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardmuon import Muon
from shardmuon.layout.engines import Engine
from shardmuon.momentum.keeper import BUFFER, MOMENTS, STEP
from shardmuon.step import validate as validate_module
from shardmuon.step.update import _dealt, momentum_

Change = Callable[[Job], object]


def _job(storage: dict[str, Any]) -> Job:
    matrices, vectors = (
        [Spec(f"{kind}{at}", shape) for at in range(3)] for kind, shape in (("m", (6, 8)), ("v", (5,)))
    )
    job = Job([{"params": matrices}, {"params": vectors, "use_muon": False}], **storage)
    job.step(0)
    job.set_gradients(1)
    return job


def _turned(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() == 2 else torch.stack([t, t], -1)[:, 0]


def _complex(t: Tensor) -> Tensor:
    return t.to(torch.complex64)


def _changes(of: Callable[[Job], Tensor]) -> dict[str, Change]:
    return {
        "nothing": lambda job: None,
        "no gradient": in_gradient(lambda g: None, of),
        "gradient elsewhere": lambda job: (
            setattr(of(job), "grad", None),
            setattr(of(job), "main_grad", torch.ones(1)),
        ),
        "gradient turned": in_gradient(_turned, of),
        "gradient of another shape": in_gradient(lambda t: t[:2], of),
        "gradient of another dtype": in_gradient(Tensor.double, of),
        "gradient complex": in_gradient(_complex, of),
        "gradient sparse": in_gradient(Tensor.to_sparse, of),
        "cast": in_storage(Tensor.bfloat16, of=of),
        "turned": in_storage(_turned, of=of),
        "expanded": in_storage(one_row, grads=False, of=of),
        "no state": lambda job: job.state[of(job)].clear(),
        "more state": lambda job: job.state[of(job)].update(somebody=1),
    }


def _matrix(job: Job) -> Tensor:
    return job.groups[0]["params"][1]  # type: ignore[no-any-return]


def _vector(job: Job) -> Tensor:
    return job.groups[1]["params"][1]  # type: ignore[no-any-return]


def _of_state(key: str, of: Callable[[Job], Tensor]) -> dict[str, Change]:
    kinds = {
        "turned": _turned,
        "of another shape": lambda t: t[:2],
        "of another dtype": Tensor.double,
        "complex": _complex,
        "a number": lambda t: 1,
        "on meta": lambda t: t.to("meta"),
        "expanded": one_row,
        "of inference": of_inference,
        "codes without a scale": lambda t: t.to(torch.int8),
    }
    return {f"{key} {kind}": in_state(key, make, of) for kind, make in kinds.items()}


MATRIX_CHANGES: dict[str, Change] = {
    **_changes(_matrix),
    **_of_state(BUFFER, _matrix),
    "gradient and momentum complex": lambda job: [
        change(job) for change in (in_gradient(_complex, _matrix), in_state(BUFFER, _complex, _matrix))
    ],
    "AdamW before": lambda job: job.state[_matrix(job)].update(
        {STEP: torch.ones(()), **dict.fromkeys(MOMENTS, _matrix(job).detach())}
    ),
}
# Changes to a gradient or to optimizer state for which the validation before a step must raise an error. The values are
# patterns for the error messages.
TOLD = {
    "gradient sparse": "sparse",
    "gradient complex": "complex",
    "gradient elsewhere": "main_grad",
    "momentum_buffer of another shape": "made for another layout",
    "momentum_buffer complex": "momentum_buffer is .*complex64 on cpu, and must be strided, real",
    "momentum_buffer of inference": "inference_mode",
    "momentum_buffer codes without a scale": "8-bit momentum is int8 and a scale",
}
VECTOR_CHANGES: dict[str, Change] = {
    **_changes(_vector),
    **_of_state(MOMENTS[0], _vector),
    **_of_state(MOMENTS[1], _vector),
    "steps are text": in_state(STEP, lambda t: "three", _vector),
    "steps are two": in_state(STEP, lambda t: torch.ones(2), _vector),
}


def _validated(optimizer: Muon) -> dict[str, object]:
    """Run the validation that precedes a step. Return the attributes of the resulting `Proposal`, except `adamw`, as a
    dict. If the validation raises ValueError, return a dict with the text of the error."""
    binding = optimizer.binding
    assert binding is not None
    with torch.no_grad():
        options = optimizer.options.read(optimizer.param_groups)
        try:
            found = vars(validate_module.validate(binding, optimizer, options))
        except ValueError as error:
            return {"error": str(error)}
    return {key: value for key, value in found.items() if key != "adamw"}


def _told(found: object) -> object:
    """Replace all tensors in the result of `_validated` with their dtypes, strides and values, so that the results of
    two validations can be compared with `==`."""
    return tree_map_only(Tensor, lambda t: (t.dtype, t.stride(), t.device if t.is_meta else t.tolist()), found)


ROUNDED = {"momentum_dtype": torch.bfloat16}, {"stochastic_rounding": True}
LOOKS = [
    *((0, change, storage) for storage in ({}, *ROUNDED) for change in MATRIX_CHANGES),
    *((1, change, {}) for change in VECTOR_CHANGES),
]


@pytest.mark.parametrize(("group", "change", "storage"), LOOKS, ids=str)
def test_a_glance_finds_what_a_closer_look_finds(
    group: int, change: str, storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(storage)
    (MATRIX_CHANGES, VECTOR_CHANGES)[group][change](job)
    glanced = _validated(job.optimizer)
    assert change not in TOLD or re.match(f"[mv]1: .*{TOLD[change]}", str(glanced["error"]))
    monkeypatch.setattr(Engine, "storages", lambda *args: None)
    assert _told(glanced) == _told(_validated(job.optimizer))


def test_a_glance_tells_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreach operation on tensors of two accelerators would put all results on the first accelerator, so validation
    must detect that the devices differ. The device "meta" stands in for a second accelerator."""
    params = [nn.Parameter(torch.ones(6, 8, device=device)) for device in ("cpu", "meta")]
    optimizer = Muon(params, lr=0.1)
    optimizer.prepare()
    optimizer.complete_state()
    for p in params:
        p.grad = torch.ones_like(p)
    glanced: Any = _validated(optimizer)
    monkeypatch.setattr(Engine, "storages", lambda *args: None)
    assert _told(glanced) == _told(_validated(optimizer)) and len({*glanced["kinds"]}) == 2


@pytest.mark.parametrize("change", ["nothing", "no gradient", "turned", "no state", "more state", "gradient turned"])
def test_adamw_steps_rows_that_were_seen_with_the_bits_of_others(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for closer in (False, True):
        job = _job({})
        VECTOR_CHANGES[change](job)
        if closer:
            monkeypatch.setattr(Engine, "storages", lambda *args: None)
        job.step()
        found.append(job.held(gradients=False))
    assert unlike(*found) == []


def test_portions_hold_alike_tiles_in_order_and_no_more_than_the_limit() -> None:
    draw = random.Random(0)
    for _ in range(900):
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 12))]
        kinds = [draw.randint(0, 3) for _ in sizes]
        limit = draw.randint(1, 20)
        found = _dealt(sizes, kinds, limit)
        assert sorted(at for places in found for at in places) == list(range(len(sizes)))
        for places in found:
            assert places == sorted(places)
            assert len({kinds[at] for at in places}) == 1
            assert sum(sizes[at] for at in places) <= limit or len(places) == 1


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES, DTYPES, DTYPES[:2])], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_goes_into_a_batch_with_the_bits_of_a_copy(nesterov: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    dtype, out_dtype, grad_dtype = dtypes
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8), (5, 7), (1, 3), (33, 65)]
    grads, mine = ([torch.randn(shape, generator=generator).to(of) for shape in shapes] for of in (grad_dtype, dtype))
    grads[1] = _turned(grads[1])
    theirs, given = [m.clone() for m in mine], [g.clone() for g in grads]
    out = [torch.empty(2 * rows, cols + 3, dtype=out_dtype)[::2, :cols] for rows, cols in shapes]
    momentum_(out, grads, mine, momentum=0.9, nesterov=nesterov)
    momentum_(None, grads, theirs, momentum=0.9, nesterov=nesterov)
    updates = [g.to(dtype).lerp(m, 0.9) for g, m in zip(grads, theirs, strict=True)] if nesterov else theirs
    assert_bitwise([*out, *mine, *grads], [*(u.to(out_dtype) for u in updates), *theirs, *given])
