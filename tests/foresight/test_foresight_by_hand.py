"""`shardmuon plan` beside arithmetic of its own: from shapes and definitions alone, on meshes where nothing divides."""

from __future__ import annotations

import math

import pytest
import torch
from published import decoder

from shardmuon.foresight import plan
from shardmuon.foresight.counting import Stored
from shardmuon.foresight.models import build

HIDDEN, INNER, LAYERS, HEADS, KEYS, HEAD, VOCABULARY = 90, 262, 3, 6, 2, 15, 1009
CONFIG = decoder(
    VOCABULARY, HIDDEN, LAYERS, HEADS, KEYS, HEAD, INNER, tie_word_embeddings=True, attention_bias=True
)  # Qwen2's
BYTES = {"float32": 4, "bfloat16": 2}


def _shapes() -> tuple[list[tuple[int, int]], list[tuple[int, ...]]]:
    """Matrices and the rest, by Qwen2's definition: biases on q, k and v, two norms a layer and one at the end."""
    matrices, rest = [], [(VOCABULARY, HIDDEN), (HIDDEN,)]
    for _ in range(LAYERS):
        matrices += [(HEADS * HEAD, HIDDEN), (KEYS * HEAD, HIDDEN), (KEYS * HEAD, HIDDEN), (HIDDEN, HEADS * HEAD)]
        matrices += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
        rest += [(HIDDEN,), (HIDDEN,), (HEADS * HEAD,), (KEYS * HEAD,), (KEYS * HEAD,)]
    return matrices, rest


def _held(shape: tuple[int, ...], shard: int, rank: int) -> int:
    """Elements of a tensor on a rank: `torch.chunk` of its first dim, as FSDP2 cuts."""
    sizes = [len(part) for part in torch.arange(shape[0]).chunk(shard)]
    at = rank % shard
    return (sizes[at] if at < len(sizes) else 0) * math.prod(shape[1:])


@pytest.mark.parametrize("wire", BYTES)
@pytest.mark.parametrize(("copies", "shard"), [(1, 7), (3, 4)])
def test_every_count_is_what_shapes_and_definitions_say(copies: int, shard: int, wire: str) -> None:
    # products in 16 bits travel in bf16, those of the Gram form on a CPU, in fp32, in fp32
    gpu, method = ("a100", "standard") if wire == "bfloat16" else ("cpu-gloo", "gram")
    orthogonalizer = {"method": method}  # type: ignore[arg-type]
    exact = plan(build(CONFIG), f"dp={copies} shard={shard}", gpu=gpu, **orthogonalizer).exact
    matrices, rest = _shapes()
    elements = [sum(map(math.prod, shapes)) for shapes in (matrices, rest)]
    assert [exact.muon_params, exact.adamw_params] == elements

    owned: dict[int, list[tuple[int, int]]] = {}  # rank -> shapes of the matrices that it orthogonalizes
    operations = 0
    for of_class in exact.classes:
        found = [row for bucket in of_class.buckets for row in bucket.matrices]
        owned |= {rank: [row[:2] for row in found for _ in range(row.num)] for rank in of_class.ranks}
        operations += sum(of_class.count * row.num * row.flops for row in found)
    assert sorted(shape for shapes in owned.values() for shape in shapes) == sorted(matrices)

    for of_class, rank in ((c, rank) for c in exact.classes for rank in c.ranks):
        muon, adamw = (sum(_held(s, shard, rank) for s in shapes) for shapes in (matrices, rest))
        assert of_class.stored == Stored(4 * (muon + adamw), 4 * (muon + adamw), 4 * muon, 8 * adamw, 0)
        assert {bucket.itemsize for bucket in of_class.buckets} == {BYTES[wire]}
        own = sum(_held(shape, shard, rank) for shape in owned[rank])
        here = sum(  # of what this replica orthogonalizes
            _held(shape, shard, rank) for mate in owned if mate // shard == rank // shard for shape in owned[mate]
        )
        # An owner gets one copy of what it does not hold, from its replica, and sends results there alone; each rank of
        # a replica then sends its part of them to those who hold the same in the others.
        expected = {
            "sent": [here - own, sum(map(math.prod, owned[rank])) - own, (copies - 1) * here],
            "received": [sum(map(math.prod, owned[rank])) - own, here - own, muon - here],
        }
        for way, elements in expected.items():
            sides = zip(*(getattr(bucket, way) for bucket in of_class.buckets), strict=True)
            assert [sum(side.bytes for side in of_phase) for of_phase in sides] == [BYTES[wire] * n for n in elements]
    if wire == "bfloat16":  # X X^T, A A, (b A + c A A) X, five times
        sides = [(min(shape), max(shape)) for shape in matrices]
        assert operations == sum(5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n) for m, n in sides)
