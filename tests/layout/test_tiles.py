"""Tests of how each rank's pieces of a tensor are split into tiles, so that each tile belongs to one matrix. Random
tensors are partitioned at random and viewed as matrices in all supported ways."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from dense_step import matrices
from drawn import partitions, viewed
from hypothesis import given, settings
from simulated import layout_of, stored

from shardmuon.layout.pieces import Box, FlatRange, Held, ParamLayout, Piece
from shardmuon.layout.views import matrix_view


def storage_of(piece: Piece, whole: torch.Tensor, gap: int, order: list[int]) -> tuple[torch.Tensor, Held]:
    """Return a tensor that stores a piece of `whole`, and a `Held` with the piece and its offset in that tensor. The
    offset is `gap` in each dim, and `order` is the memory order of the dims."""
    held = Held(piece, (gap,) * (1 if isinstance(piece, FlatRange) else whole.dim()))
    storage = stored([held], whole)
    if isinstance(piece, FlatRange):
        return torch.stack([storage, storage], 1)[:, 0], held
    return storage.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist()), held


@given(st.data())
@settings(max_examples=300)
def test_gathered_tiles_are_the_matrices_and_scattered_ones_the_tensor(data: st.DataObject) -> None:
    shape, options = data.draw(viewed())
    view = matrix_view(shape, **options)
    whole = torch.arange(1, 1 + math.prod(shape)).view(shape)
    order = data.draw(st.permutations(range(len(shape))))
    gap = data.draw(st.integers(0, 2))
    storages = [storage_of(piece, whole, gap, order) for piece in data.draw(partitions(shape))]
    layout = ParamLayout(view, tuple(range(len(storages))), tuple((held,) for _, held in storages))
    expected = [1 + torch.from_numpy(numbers) for numbers in matrices(shape, options)]
    assert [(m.rows, m.cols) for m in view.matrices] == [tuple(m.shape) for m in expected]
    back = [torch.zeros_like(storage) for storage, _ in storages]
    for matrix, of_matrix, by_rank in zip(view.matrices, expected, layout.tiles, strict=True):
        gathered = torch.full((matrix.rows, matrix.cols), -1)
        for rank, tiles in by_rank.items():
            for tile in tiles:
                there = gathered.as_strided(tile.sizes, *reversed(tile.in_matrix(view)))
                here = storages[rank][0]
                offset, strides = tile.in_storage(view, here.stride())
                assert (there == -1).all(), "no element is in two tiles"
                there.copy_(here.as_strided(tile.sizes, strides, here.storage_offset() + offset))
                offset, strides = tile.in_storage(view, back[rank].stride())
                back[rank].as_strided(tile.sizes, strides, offset).copy_(there)
        assert torch.equal(gathered, of_matrix)
    assert all(torch.equal(storage, again) for (storage, _), again in zip(storages, back, strict=True))


LEFT, RIGHT = Box((0, 0), (5, 2)), Box((0, 2), (5, 1))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({0: [Box((0, 0), (2, 3))], 1: [Box((3, 0), (2, 3))]}, r"leave a gap at \(\[2, 3\), \[0, 3\)\)"),
        ({0: [Box((0, 0), (3, 3))], 1: [Box((2, 0), (3, 3))]}, r"overlap at \(\[2, 3\), \[0, 3\)\)"),
        ({0: [Box((0, 0), (3, 3))], 1: [Box((3, 0), (3, 3))]}, "out of bounds"),
        # Together, the boxes of the two ranks have as many elements as the tensor, but one row is stored twice and
        # another is missing. A check of the total alone would miss this.
        ({0: [Box((0, 0), (3, 3))], 1: [Box((2, 0), (2, 3))]}, "overlap|gap"),
        (
            {0: [FlatRange(0, 7)], 1: [FlatRange(8, 15)]},
            r"leave a gap at \(\[7, 8\)\) of 15 elements of shape \(5, 3\)",
        ),
        ({0: [FlatRange(0, 9)], 1: [FlatRange(8, 15)]}, r"overlap at \(\[8, 9\)\) of 15"),
        ({0: [FlatRange(0, 9)], 1: [FlatRange(9, 14)]}, r"leave a gap at \(\[14, 15\)\)"),
        ({0: [FlatRange(0, 9)], 1: [FlatRange(9, 16)]}, r"out of bounds of 15 elements"),
        ({0: [Box((-1, 0), (6, 3))]}, "out of bounds of shape"),
        ({0: [Box((0,), (15,))]}, "out of bounds of shape"),
        ({0: [FlatRange(0, 9)], 1: [Box((4, 0), (1, 3))]}, r"leave a gap at \(\[3, 4\), \[0, 3\)\)"),
        ({0: [FlatRange(0, 3, LEFT), FlatRange(4, 10, LEFT)], 1: [RIGHT]}, r"leave a gap at \(\[1, 2\), \[1, 2\)\)"),
        ({0: [FlatRange(0, 4, LEFT), FlatRange(3, 10, LEFT)], 1: [RIGHT]}, r"overlap at \(\[1, 2\), \[1, 2\)\)"),
    ],
)
def test_pieces_must_cover_the_tensor_once(pieces: dict[int, list[Piece]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(matrix_view((5, 3)), pieces)


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
        ((8, 3), {"split_sizes": 3}, "split_sizes=3 does not divide the 8 rows"),
        (
            (8, 3),
            {"split_sizes": 2, "split_groups": 2},
            "needs split_sizes, the row counts of one repeat, found split_sizes=2",
        ),
        ((8, 3), {"split_sizes": True}, "split_sizes=True is no number of blocks"),
        (
            (4, 12),
            {"split_sizes": (4, 4, 4)},
            "sum to 12, but there are 4 rows. If its inputs come first, write transposed=True",
        ),
        (
            (12, 4),
            {"split_sizes": (4, 8), "transposed": True},
            "there are 4 columns. If its outputs come first, write transposed=False",
        ),
        ((8, 4), {"split_sizes": 3, "transposed": True}, "split_sizes=3 does not divide the 4 columns"),
        ((8, 4, 3, 3), {"split_sizes": 2, "transposed": True}, "columns are one dim"),
    ],
)
def test_options_that_do_not_fit_say_what_to_write(
    shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        matrix_view(shape, **options)  # type: ignore[arg-type]


def test_a_matrix_is_whole_on_the_ranks_that_store_all_of_it() -> None:
    view = matrix_view((4, 4))
    assert layout_of(view, {0: [Box((0, 0), (2, 4))], 1: [Box((2, 0), (2, 4))]}).whole_on == ((),)
    assert ParamLayout.replicated(view, (0, 2)).whole_on == ((0, 2),)


def test_layout_digest_tells_layouts_apart() -> None:
    top, bottom, left, right = (
        Box(*at) for at in (((0, 0), (2, 4)), ((2, 0), (2, 4)), ((0, 0), (4, 2)), ((0, 2), (4, 2)))
    )
    cuts: list[dict[int, list[Piece]]] = [{0: [top], 1: [bottom]}, {0: [left], 1: [right]}, {1: [top], 0: [bottom]}]
    first, *others = (layout_of(matrix_view((4, 4)), cut).digest for cut in [*cuts, cuts[0]])
    assert len({first, *others}) == 3 and others[-1] == first


def test_turns_of_single_columns_are_one_tile() -> None:
    """A fused weight with 2,880 gate columns and 2,880 up columns in alternation must become two strided views per
    rank, not 5,760 slices of single columns."""
    view = matrix_view((2, 8, 5760), view="stack", split_sizes=(1, 1), split_groups=2880, transposed=True)
    layout = layout_of(view, {rank: [Box((rank, 0, 0), (1, 8, 5760))] for rank in range(2)})
    assert [{rank: len(t) for rank, t in by_rank.items()} for by_rank in layout.tiles] == [{0: 1}] * 2 + [{1: 1}] * 2
    assert len(repr(view)) < 1000
