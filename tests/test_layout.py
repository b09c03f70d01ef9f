"""Layouts are data: pieces, matrices and fragments, without ranks."""

from __future__ import annotations

import pytest
import torch

from shardmuon.planning.layout import Box, FlatRange, Holder, ParamLayout, Piece, same_storage
from shardmuon.planning.views import matrix_view
from shardmuon.testing.cases import cut_matrices


def layout_of(shape: tuple[int, ...], pieces: dict[int, list[Piece]], **options: object) -> ParamLayout:
    """Pieces of each rank, one after the other along dim 0 of its storage."""
    holders = []
    for rank, mine in pieces.items():
        at = 0
        for piece in mine:
            local = (at,) + (0,) * (len(shape) - 1) if isinstance(piece, Box) else (at,)
            holders.append(Holder(rank, piece, local))
            at += piece.size[0] if isinstance(piece, Box) else piece.numel
    return ParamLayout(matrix_view(shape, **options), tuple(pieces), tuple(holders))  # type: ignore[arg-type]


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
    found = cut_matrices(view, elements)
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
        ({0: [FlatRange(0, 9)], 1: [Box((3, 0), (2, 3))]}, "found both"),
    ],
)
def test_pieces_must_cover_the_tensor_once(pieces: dict[int, list[Piece]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of((5, 3), pieces)


def test_exact_replicas_are_no_overlap_and_are_counted_by_rank_order() -> None:
    half = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]
    layout = layout_of((4, 4), {0: [half[0]], 1: [half[1]], 2: [half[0]], 3: [half[1]]})
    assert layout.has_replicas
    assert layout.replica_index == {0: 0, 1: 0, 2: 1, 3: 1}
    first = layout.fragments[0][0][0]
    # an owner in the second replica is served by the second replica, and by itself where it can
    assert [layout.source(first, owner) for owner in range(4)] == [0, 0, 2, 2]


def test_a_flat_range_becomes_row_end_whole_rows_and_row_start() -> None:
    layout = layout_of((5, 4), {0: [FlatRange(0, 2)], 1: [FlatRange(2, 17)], 2: [FlatRange(17, 20)]})
    assert [(f.rect, f.local) for f in layout.fragments[0][1]] == [
        ((0, 2, 1, 2), ((0, 2),)),
        ((1, 0, 3, 4), ((2, 14),)),
        ((4, 0, 1, 1), ((14, 15),)),
    ]


def test_a_kernel_cut_in_its_inner_dims_falls_into_column_runs() -> None:
    layout = layout_of((2, 3, 2, 2), {0: [Box((0, 0, 0, 0), (2, 3, 1, 2))], 1: [Box((0, 0, 1, 0), (2, 3, 1, 2))]})
    assert [f.rect for f in layout.fragments[0][1]] == [(0, 2, 2, 2), (0, 6, 2, 2), (0, 10, 2, 2)]


def test_moving_every_fragment_out_and_back_is_the_identity() -> None:
    layout = layout_of((12, 3), {0: [FlatRange(0, 10)], 1: [FlatRange(10, 36)]}, split_sizes=(3, 1, 2), split_groups=2)
    full = torch.arange(36.0)
    storages = {0: full[:10].clone(), 1: full[10:].clone()}
    for matrix, by_rank in zip(layout.view.matrices, layout.fragments, strict=True):
        whole = torch.full((matrix.rows, matrix.cols), -1.0)
        for rank, fragments in by_rank.items():
            for fragment in fragments:
                target = fragment.select_matrix(whole)
                target.copy_(fragment.select_local(storages[rank]).view(target.shape))
        rows = torch.cat([full.view(12, 3)[a:b] for a, b in matrix.intervals])
        assert torch.equal(whole, rows)


def test_layout_digest_tells_layouts_apart() -> None:
    a = layout_of((4, 4), {0: [Box((0, 0), (2, 4))], 1: [Box((2, 0), (2, 4))]})
    b = layout_of((4, 4), {0: [Box((0, 0), (4, 2))], 1: [Box((0, 2), (4, 2))]})
    c = layout_of((4, 4), {1: [Box((0, 0), (2, 4))], 0: [Box((2, 0), (2, 4))]})
    again = layout_of((4, 4), {0: [Box((0, 0), (2, 4))], 1: [Box((2, 0), (2, 4))]})
    assert len({a.digest, b.digest, c.digest}) == 3
    assert a.digest == again.digest


def test_storages_of_nothing_correspond() -> None:
    assert same_storage((0, 3), (0, 0))
    assert same_storage((2, 3), (2, 3))
    assert not same_storage((2, 3), (3, 2))
    assert not same_storage((0, 3), (1, 3))
