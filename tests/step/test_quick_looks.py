"""A quick look takes what a closer look finds: gradients, state, tiles in portions, momentum in batches."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardmuon import Muon
from shardmuon.layout.engines import Engine
from shardmuon.momentum.keeper import BUFFER, MOMENTS, STEP
from shardmuon.step import validate as validate_module
from shardmuon.step.update import dealt, momentum_, momentum_into_
from shardmuon.step.validate import Memory

Change = Callable[[nn.Parameter, dict[str, Any]], object]


def _optimizer(storage: dict[str, Any]) -> Muon:
    """Three matrices and three vectors after a step, with gradients for the next one."""
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(6, 8, generator=generator)) for _ in range(3)]
    vectors = [nn.Parameter(torch.randn(5, generator=generator)) for _ in range(3)]
    optimizer = Muon([{"params": matrices}, {"params": vectors, "use_muon": False}], lr=0.1, **storage)
    for _ in range(2):
        for p in matrices + vectors:
            p.grad = torch.randn(p.shape, generator=generator)
        if optimizer.binding is None:
            optimizer.step()
    return optimizer


def _turned(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() == 2 else torch.stack([t, t], -1)[:, 0]


def _inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def _set(key: str, make: Callable[[Tensor], Any]) -> Change:
    return lambda p, kept: kept.__setitem__(key, make(kept[key]))


def _grad(make: Callable[[Tensor], Tensor]) -> Change:
    return lambda p, kept: setattr(p.grad, "data", make(p.grad))  # type: ignore[arg-type]


def _both(make: Callable[[Tensor], Any]) -> Change:
    def change(p: nn.Parameter, kept: dict[str, Any]) -> None:
        grad, p.grad = p.grad, None
        p.data, p.grad = make(p.data), make(grad)  # type: ignore[arg-type]

    return change


def _complex(t: Tensor) -> Tensor:
    return t.to(torch.complex64)


CHANGES: dict[str, Change] = {
    "nothing": lambda p, kept: None,
    "no gradient": lambda p, kept: setattr(p, "grad", None),
    "gradient elsewhere": lambda p, kept: (setattr(p, "grad", None), setattr(p, "main_grad", torch.ones(1))),
    "gradient turned": _grad(_turned),
    "gradient of another shape": _grad(lambda t: t[:2]),
    "gradient of another dtype": _grad(Tensor.double),
    "gradient complex": _grad(_complex),
    "gradient sparse": lambda p, kept: setattr(p, "grad", torch.ones_like(p.data).to_sparse()),
    "cast": _both(Tensor.bfloat16),
    "turned": _both(_turned),
    "expanded": lambda p, kept: setattr(p, "data", p.data[:1].expand_as(p)),
    "no state": lambda p, kept: kept.clear(),
    "more state": lambda p, kept: kept.update(somebody=1),
}
MATRIX_CHANGES = CHANGES | {
    "momentum turned": _set(BUFFER, _turned),
    "momentum of another shape": _set(BUFFER, lambda t: t[:2]),
    "momentum of another dtype": _set(BUFFER, Tensor.bfloat16),
    "momentum complex": _set(BUFFER, _complex),
    "momentum is a number": _set(BUFFER, lambda t: 1.0),
    "momentum on meta": _set(BUFFER, lambda t: t.to("meta")),
    "momentum expanded": _set(BUFFER, lambda t: t[:1].expand_as(t)),
    "momentum of inference": _set(BUFFER, _inference),
    "gradient and momentum complex": lambda p, kept: [f(p, kept) for f in (_grad(_complex), _set(BUFFER, _complex))],
    "codes without a scale": _set(BUFFER, lambda t: t.to(torch.int8)),
    "AdamW before": lambda p, kept: kept.update({STEP: torch.ones(()), MOMENTS[0]: p.data, MOMENTS[1]: p.data}),
}
TOLD = {  # in the message
    "gradient sparse": "sparse",
    "gradient complex": "complex",
    "gradient elsewhere": "main_grad",
    "momentum of another shape": "made for another layout",
    "momentum complex": "momentum_buffer is .*complex64 on cpu, and must be strided, real",
    "momentum of inference": "inference_mode",
    "codes without a scale": "8-bit momentum is int8 and a scale",
}
VECTOR_CHANGES = (
    CHANGES
    | {
        f"{key} {kind}": _set(key, make)
        for key in MOMENTS
        for kind, make in {
            "turned": _turned,
            "of another shape": lambda t: t[:2],
            "of another dtype": Tensor.double,
            "a number": lambda t: 1,
            "on meta": lambda t: t.to("meta"),
            "expanded": lambda t: t[:1].expand_as(t),
            "of inference": _inference,
        }.items()
    }
    | {
        "steps are text": _set(STEP, lambda t: "three"),
        "steps are two": _set(STEP, lambda t: torch.ones(2)),
    }
)


def _validated(optimizer: Muon) -> dict[str, object]:
    """All that validating finds, or what it raises."""
    binding = optimizer.binding
    assert binding is not None
    memory = Memory(optimizer.state, optimizer.keeper, optimizer.settled)
    with torch.no_grad():
        options = optimizer.options.read(optimizer.param_groups)
        try:
            found = vars(validate_module.validate(binding, optimizer.param_groups, options, memory))
        except ValueError as error:
            return {"error": str(error)}
    return {key: value for key, value in found.items() if key != "adamw"}


def _told(found: object) -> object:
    """All that was found, as numbers: tensors are views of the same memory, or equal where both were made."""
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
    optimizer = _optimizer(storage)
    p = optimizer.param_groups[group]["params"][1]
    (MATRIX_CHANGES, VECTOR_CHANGES)[group][change](p, optimizer.state[p])
    glanced = _validated(optimizer)
    assert change not in TOLD or re.match(f"parameter 1 of group {group}.*{TOLD[change]}", str(glanced["error"]))
    monkeypatch.setattr(Engine, "storages", lambda *args: None)
    assert _told(glanced) == _told(_validated(optimizer))


def test_a_glance_tells_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of tensors on two accelerators would move updates to the first one's. Here the other device is "meta"."""
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
        optimizer = _optimizer({})
        vectors = optimizer.param_groups[1]["params"]
        VECTOR_CHANGES[change](vectors[1], optimizer.state[vectors[1]])
        if closer:
            monkeypatch.setattr(Engine, "storages", lambda *args: None)
        optimizer.step()
        states = [t for p in vectors for t in optimizer.state[p].values() if isinstance(t, Tensor)]
        found.append([p.detach() for p in vectors] + states)
    assert_bitwise(*found)


def test_portions_hold_alike_tiles_in_order_and_no_more_than_the_limit() -> None:
    draw = random.Random(0)
    for _ in range(900):
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 12))]
        kinds = [draw.randint(0, 3) for _ in sizes]
        limit = draw.randint(1, 20)
        found = dealt(sizes, kinds, limit)
        assert sorted(at for places in found for at in places) == list(range(len(sizes)))
        for places in found:
            assert places == sorted(places)
            assert len({kinds[at] for at in places}) == 1
            assert sum(sizes[at] for at in places) <= limit or len(places) == 1


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES, DTYPES, DTYPES[:2])], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_goes_into_a_batch_with_the_bits_of_a_copy(nesterov: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    """Of every dtype of momentum, batch and gradient."""
    dtype, out_dtype, grad_dtype = dtypes
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8), (5, 7), (1, 3), (33, 65)]
    grads, mine = ([torch.randn(shape, generator=generator).to(of) for shape in shapes] for of in (grad_dtype, dtype))
    grads[1] = _turned(grads[1])
    theirs, given = [m.clone() for m in mine], [g.clone() for g in grads]
    out = [torch.empty(2 * rows, cols + 3, dtype=out_dtype)[::2, :cols] for rows, cols in shapes]
    momentum_into_(out, grads, mine, momentum=0.9, nesterov=nesterov)
    updates = momentum_(grads, theirs, momentum=0.9, nesterov=nesterov)
    assert_bitwise([*out, *mine, *grads], [*(u.to(out_dtype) for u in updates), *theirs, *given])
