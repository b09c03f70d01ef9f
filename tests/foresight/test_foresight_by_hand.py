"""`shardmuon plan` beside arithmetic of its own: from shapes and definitions alone, on meshes where nothing divides."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmuon.commands import main as cli

HIDDEN, INNER, LAYERS, HEADS, KEYS, HEAD, VOCABULARY = 90, 262, 3, 6, 2, 15, 1009
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
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


def _planned(capsys: pytest.CaptureFixture[str], folder: Path, mesh: str, *words: str) -> dict[str, Any]:
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG))
    assert cli.main(["plan", str(file), "--mesh", mesh, "--json", "--no-advice", *words]) == 0
    return dict(json.loads(capsys.readouterr().out)["exact"])


@pytest.mark.parametrize("wire", BYTES)
@pytest.mark.parametrize(("copies", "shard"), [(1, 7), (3, 4)])
def test_every_count_is_what_shapes_and_definitions_say(
    copies: int, shard: int, wire: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # products in 16 bits travel in bf16, those of the Gram form on a CPU, in fp32, in fp32
    how = ["a100", "--method", "standard"] if wire == "bfloat16" else ["cpu-gloo", "--method", "gram"]
    exact = _planned(capsys, tmp_path, f"dp={copies} shard={shard}", "--gpu", *how)
    matrices, rest = _shapes()
    elements = [sum(map(math.prod, shapes)) for shapes in (matrices, rest)]
    assert [exact[key] for key in ("muon_params", "adamw_params", "num_params")] == [*elements, sum(elements)]

    owned: dict[int, list[tuple[int, int]]] = {}  # rank -> shapes of the matrices that it orthogonalizes
    operations = 0
    for of_class in exact["classes"]:
        found = [row for bucket in of_class["buckets"] for row in bucket["matrices"]]
        shapes = [(rows, cols) for rows, cols, _, count, *_ in found for _ in range(count)]
        owned |= dict.fromkeys(of_class["ranks"], shapes)
        operations += len(of_class["ranks"]) * sum(count * each for *_, count, each, _ in found)
    assert sorted(shape for shapes in owned.values() for shape in shapes) == sorted(matrices)

    for of_class, rank in ((c, rank) for c in exact["classes"] for rank in c["ranks"]):
        muon, adamw = (sum(_held(s, shard, rank) for s in shapes) for shapes in (matrices, rest))
        assert of_class["stored"] == {
            "weights": 4 * (muon + adamw),
            "gradients": 4 * (muon + adamw),
            "momentum": 4 * muon,
            "moments": 8 * adamw,
            "masters": 0,
        }
        assert {bucket["wire"] for bucket in of_class["buckets"]} == {wire}
        own = sum(_held(shape, shard, rank) for shape in owned[rank])
        here = sum(  # of what this replica orthogonalizes
            _held(shape, shard, rank) for mate in owned if mate // shard == rank // shard for shape in owned[mate]
        )
        # An owner gets one copy of what it does not hold, from its replica, and sends results there alone; each rank of
        # a replica then sends its part of them to those who hold the same in the others.
        expected = {
            "gather": here - own,
            "gather_received": sum(map(math.prod, owned[rank])) - own,
            "scatter": sum(map(math.prod, owned[rank])) - own,
            "scatter_received": here - own,
            "relay": (copies - 1) * here,
            "relay_received": muon - here,
        }
        sent = {key: sum(sum(bucket[key][:2]) for bucket in of_class["buckets"]) for key in expected}
        assert sent == {key: BYTES[wire] * elements for key, elements in expected.items()}
    if wire == "bfloat16":  # X X^T, A A, (b A + c A A) X, five times
        sides = [(min(shape), max(shape)) for shape in matrices]
        assert operations == sum(5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n) for m, n in sides)
