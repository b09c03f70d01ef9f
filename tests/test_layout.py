"""Layouts are data: pieces, matrices and fragments, without ranks."""

from __future__ import annotations

import pytest
import torch
from simulated import matrices_of

from shardmuon.layout.pieces import Box, FlatRange, Held, Piece
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import matrix_view


def layout_of(shape: tuple[int, ...], pieces: dict[int, list[Piece]], **options: object) -> ParamLayout:
    """Pieces of each rank, one after the other along dim 0 of its storage."""
    found = []
    for mine in pieces.values():
        at, held = 0, []
        for piece in mine:
            held.append(Held(piece, (at,) + (0,) * (len(shape) - 1) if isinstance(piece, Box) else (at,)))
            at += piece.size[0] if isinstance(piece, Box) else piece.numel
        found.append(tuple(held))
    return ParamLayout(matrix_view(shape, **options), tuple(pieces), tuple(found))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((6, 4), {}, [(6, 4)]),
        ((6, 4, 3, 3), {}, [(6, 36)]),
        ((6, 4, 3), {"view": "flatten"}, [(6, 12)]),
        ((3, 4, 5), {"view": "stack"}, [(4, 5)] * 3),
        ((12, 4), {"split_sizes": (8, 2, 2)}, [(8, 4), (2, 4), (2, 4)]),
        ((24, 4), {"split_sizes": (8, 2, 2), "split_groups": 2}, [(16, 4), (4, 4), (4, 4)]),
        ((12, 4), {"num_heads": 3}, [(4, 4)] * 3),
        ((2, 6, 5), {"view": "stack", "split_sizes": (4, 2)}, [(4, 5), (2, 5)] * 2),
        ((6, 4), {"transposed": True}, [(4, 6)]),
        ((6, 4, 3, 3), {"transposed": True}, [(36, 6)]),
        ((4, 12), {"split_sizes": (8, 2, 2), "split_dim": 1}, [(4, 8), (4, 2), (4, 2)]),
        ((4, 12), {"split_sizes": (8, 2, 2), "split_dim": 1, "transposed": True}, [(8, 4), (2, 4), (2, 4)]),
        ((12, 4), {"split_sizes": (8, 4), "transposed": True}, [(4, 8), (4, 4)]),
        ((4, 12), {"num_heads": 3, "split_dim": 1}, [(4, 4)] * 3),
        ((2, 5, 6), {"view": "stack", "split_sizes": (1, 1), "split_groups": 3, "split_dim": 1}, [(5, 3)] * 4),
    ],
)
def test_a_view_lists_the_matrices_and_covers_each_element_once(
    shape: tuple[int, ...], options: dict[str, object], expected: list[tuple[int, int]]
) -> None:
    view = matrix_view(shape, **options)  # type: ignore[arg-type]
    assert [(m.rows, m.cols) for m in view.matrices] == expected
    elements = torch.arange(torch.Size(shape).numel()).view(shape)
    found = matrices_of(view, elements)
    assert torch.equal(torch.cat([m.flatten() for m in found]).sort()[0], elements.flatten())
    assert [tuple(m.shape) for m in found] == expected


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((7,), {}, r"shape \(7,\) has 1 dim\(s\) and cannot be a matrix.*use_muon=False"),
        ((0, 3), {}, "has no elements"),
        ((2, 3, 4), {}, "view='stack' if it holds 2 matrices of 3x4.*view='flatten' if it is one 2x12 matrix"),
        ((2, 3), {"view": "stack"}, "needs a 3-D"),
        ((2, 3), {"view": "rows"}, "not one of 'auto', 'stack', 'flatten'"),
        ((7, 3), {"split_sizes": (3, 3)}, r"split_sizes=\(3, 3\) sum to 6, but there are 7 rows"),
        ((7, 3), {"split_sizes": (3, 1), "split_groups": 2}, "sum to 4 times split_groups=2"),
        ((7, 3), {"split_sizes": (7, 0)}, "must be positive"),
        ((8, 3), {"split_groups": 2}, "needs split_sizes"),
        ((8, 3), {"num_heads": 3}, "num_heads=3 does not divide the 8 rows"),
        ((8, 3), {"num_heads": 2, "split_sizes": (4, 4)}, "exclude each other"),
        (
            (4, 12),
            {"split_sizes": (4, 4, 4)},
            "sum to 12, but there are 4 rows. To split the columns write split_dim=1",
        ),
        ((12, 4), {"split_sizes": (4, 8), "split_dim": 1}, "there are 4 columns. To split the rows write split_dim=0"),
        ((8, 4), {"num_heads": 3, "split_dim": 1}, "num_heads=3 does not divide the 4 columns"),
        ((8, 4), {"split_dim": 2}, "split_dim=2 is neither 0"),
        ((8, 4, 3, 3), {"num_heads": 2, "split_dim": 1}, "columns that are one dim"),
    ],
)
def test_options_that_do_not_fit_say_what_to_write(
    shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        matrix_view(shape, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({0: [Box((0, 0), (2, 3))], 1: [Box((3, 0), (2, 3))]}, r"leave a gap at \(\[2, 3\), \[0, 3\)\)"),
        ({0: [Box((0, 0), (3, 3))], 1: [Box((2, 0), (3, 3))]}, r"overlap at \(\[2, 3\), \[0, 3\)\)"),
        ({0: [Box((0, 0), (3, 3))], 1: [Box((3, 0), (3, 3))]}, "out of bounds"),
        # sizes sum to the whole, but one cell is held twice and one never: a sum check alone would pass
        ({0: [Box((0, 0), (3, 3))], 1: [Box((2, 0), (2, 3))]}, "overlap|gap"),
        ({0: [FlatRange(0, 7)], 1: [FlatRange(8, 15)]}, r"no rank holds elements \[7, 8\) of 15"),
        ({0: [FlatRange(0, 9)], 1: [FlatRange(8, 15)]}, r"elements \[8, 9\).*two pieces"),
        ({0: [FlatRange(0, 9)], 1: [FlatRange(9, 14)]}, r"no rank holds elements \[14, 15\)"),
        ({0: [FlatRange(0, 9)], 1: [FlatRange(9, 16)]}, "reach element 16"),
        ({0: [FlatRange(0, 9)], 1: [Box((4, 0), (1, 3))]}, r"leave a gap at \(\[3, 4\), \[0, 3\)\)"),
    ],
)
def test_pieces_must_cover_the_tensor_once(pieces: dict[int, list[Piece]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of((5, 3), pieces)


def test_layout_digest_tells_layouts_apart() -> None:
    a = layout_of((4, 4), {0: [Box((0, 0), (2, 4))], 1: [Box((2, 0), (2, 4))]})
    b = layout_of((4, 4), {0: [Box((0, 0), (4, 2))], 1: [Box((0, 2), (4, 2))]})
    c = layout_of((4, 4), {1: [Box((0, 0), (2, 4))], 0: [Box((2, 0), (2, 4))]})
    again = layout_of((4, 4), {0: [Box((0, 0), (2, 4))], 1: [Box((2, 0), (2, 4))]})
    assert len({a.digest, b.digest, c.digest}) == 3
    assert a.digest == again.digest
