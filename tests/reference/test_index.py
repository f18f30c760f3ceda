"""The truth of detection itself, against examples small enough to check by eye."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pit_tvm.errors import AxisError, ShapeError
from pit_tvm.reference.index import (
    covered_density,
    dense_mask,
    index_lists,
    live_micro_tiles,
)
from pit_tvm.structs import (
    BitMask,
    BlockMask,
    Groups,
    Lengths,
    Mask,
    MicroTile,
    Rows,
    SparsitySpec,
    Values,
)

PATTERN = np.array(
    [
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
    ],
    np.bool_,
)


def as_lists(found: list[Any]) -> list[list[int]]:
    return [ids.tolist() for ids in found]


@pytest.mark.parametrize(
    ("dim", "extents", "expected"),
    [
        (1, (2, 1), [[4], [1]]),
        (1, (0, 1), [[1, 4]]),
        (1, (1, 1), [[4], [], [1]]),
        (0, (1, 2), [[2], [], [0]]),
        (0, (1, 0), [[0, 2]]),
        (0, (1, 100), [[0, 2]]),
    ],
)
def test_micro_tile_is_live_where_any_of_its_elements_is(
    dim: int, extents: tuple[int, ...], expected: list[list[int]]
) -> None:
    micro_tile = MicroTile("lhs", "k", dim, extents)
    assert as_lists(live_micro_tiles(PATTERN, micro_tile)) == expected


def test_slots_of_three_dimensions_come_in_row_major_order() -> None:
    mask = np.zeros((2, 3, 4), np.bool_)
    mask[1, 2, 3] = mask[0, 0, 0] = mask[1, 0, 1] = True
    found = live_micro_tiles(mask, MicroTile("lhs", "m", 1, (1, 1, 2)))
    assert as_lists(found) == [[0], [], [0], [2]]


def test_every_live_element_lies_in_a_live_micro_tile_and_no_other_is_live() -> None:
    rng = np.random.default_rng(7)
    mask = rng.random((13, 9, 11)) < 0.05
    tile = MicroTile("lhs", "m", 1, (4, 1, 3))
    found = live_micro_tiles(mask, tile)
    cover = np.zeros_like(mask)
    for slot, ids in enumerate(found):
        i, j = divmod(slot, 4)
        for a in ids:
            box = (slice(4 * i, 4 * i + 4), slice(a, a + 1), slice(3 * j, 3 * j + 3))
            assert mask[box].any()
            cover[box] = True
    assert len(found) == 4 * 4
    assert not (mask & ~cover).any()


@pytest.mark.parametrize(
    ("spec", "value", "live"),
    [
        (Mask(), PATTERN, PATTERN),
        (Mask(), PATTERN * np.uint8(2), PATTERN),
        (BitMask(), np.array([[16], [0], [2]], np.uint8), PATTERN),
        (Values(), np.array([[-0.0, np.nan, 1e-30]], np.float32), [[0, 1, 1]]),
        (Values(), np.array([[0x8000, 0x7FC0, 0x0001]], np.uint16), [[0, 1, 1]]),
        (BlockMask(2, 2), np.array([[1, 0], [0, 1]], np.bool_), [[1, 1, 0], [1, 1, 0], [0, 0, 1]]),
        (Rows(0), [2, 0], [[1, 1], [0, 0], [1, 1]]),
        (Lengths(1), [1, 0, 2], [[1, 0, 0, 0, 1, 1]]),
        (Lengths(1, cumulative=True), [0, 1, 1, 3], [[1, 0, 0, 0, 1, 1]]),
        (Groups(3, dim=1), [2, -1, 0], [[1, 0, 1]]),
    ],
)
def test_mask_of_every_specification(spec: SparsitySpec, value: Any, live: Any) -> None:
    expected = np.array(live) != 0
    found = dense_mask(spec, value, expected.shape)
    assert found.dtype == np.bool_
    assert np.array_equal(found, expected)


def test_groups_give_one_list_each() -> None:
    found = index_lists(
        Groups(3), np.array([2, -1, 0, 2]), (4, 8), MicroTile("lhs", "m", 0, (1, 0))
    )
    assert as_lists(found) == [[2], [], [0, 3]]


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize(("dim", "extents"), [(0, (1, 0)), (0, (1, 2)), (1, (0, 1)), (1, (2, 1))])
def test_slices_give_the_lists_of_their_mask(
    along: int, dim: int, extents: tuple[int, int]
) -> None:
    spec, value, micro_tile = Rows(along), np.array([3, 0]), MicroTile("lhs", "m", dim, extents)
    expected = live_micro_tiles(dense_mask(spec, value, (4, 5)), micro_tile)
    assert as_lists(index_lists(spec, value, (4, 5), micro_tile)) == as_lists(expected)


def test_slices_need_no_memory_of_their_operand() -> None:
    ids, shape = np.array([2**20 - 1, 3, 7]), (2**20, 2**20)
    found = index_lists(Rows(), ids, shape, MicroTile("lhs", "m", 0, (1, 0)))
    assert as_lists(found) == [[3, 7, 2**20 - 1]]


def test_masks_give_the_lists_of_their_micro_tiles() -> None:
    found = index_lists(Mask(), PATTERN, PATTERN.shape, MicroTile("lhs", "k", 1, (2, 1)))
    assert as_lists(found) == [[4], [1]]


@pytest.mark.parametrize(
    ("extents", "density"), [((1, 1), 2 / 15), ((2, 1), 2 / 10), ((3, 5), 1.0), ((1, 2), 2 / 9)]
)
def test_covered_density_counts_micro_tiles_at_the_edge(
    extents: tuple[int, int], density: float
) -> None:
    assert covered_density(PATTERN, extents) == pytest.approx(density)


def test_empty_operand_has_no_covered_density() -> None:
    assert covered_density(np.zeros((0, 4), np.bool_), (1, 1)) == 0.0


def test_other_objects_are_no_specification() -> None:
    with pytest.raises(AxisError, match="spec"):
        dense_mask(SparsitySpec(), PATTERN, PATTERN.shape)


def test_micro_tile_of_other_rank_is_refused() -> None:
    with pytest.raises(ShapeError, match="micro_tile"):
        live_micro_tiles(PATTERN, MicroTile("lhs", "k", 0, (1,)))
    with pytest.raises(ShapeError, match="micro_tile"):
        index_lists(Rows(), [0], PATTERN.shape, MicroTile("lhs", "k", 0, (1,)))
