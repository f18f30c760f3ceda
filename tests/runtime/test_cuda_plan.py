"""Plans of detection on CUDA: what its kernels rely on, for all sorts of operands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import AxisError, DTypeError, ShapeError
from pit_tvm.runtime.cuda_detect_columns import FOLD_THREADS, vector_of
from pit_tvm.runtime.cuda_detect_plan import (
    MOST_BAND,
    MOST_PARTS,
    SMS,
    MaskPlan,
    plan_mask,
)
from pit_tvm.runtime.cuda_detect_rows import ROW_WORDS, THREADS
from pit_tvm.runtime.cuda_detect_strips import CTAS, LANES, MOST_WORDS
from pit_tvm.runtime.cuda_modules import mask_module
from pit_tvm.runtime.detect_plan import capacity_of
from pit_tvm.structs import BitMask, BlockMask, Groups, Mask, MicroTile, Values

EXTENTS = st.one_of(st.integers(0, 70), st.integers(0, 5000), st.integers(0, (1 << 30) - 1))
ENTRIES = {
    "bool": (Mask(), 8),
    "uint8": (BitMask(), 1),
    "float16": (Values(), 16),
    "bfloat16": (Values(), 16),
    "float32": (Values(), 32),
    "int64": (Values(), 64),
}


@st.composite
def plans(draw: st.DrawFn, pit: int) -> tuple[MaskPlan, tuple[int, int], int, int]:
    """A plan, the shape, the micro-tile's extent as numbers of elements, and bits of an entry."""
    dtype = draw(st.sampled_from(sorted(ENTRIES)))
    spec, bits = ENTRIES[dtype]
    shape = (draw(EXTENTS), draw(EXTENTS))
    extent = draw(st.one_of(st.just(0), st.integers(1, 300), st.integers(1, 1 << 30)))
    extents = (extent, 1) if pit == 1 else (1, extent)
    plan = plan_mask(spec, dtype, shape, MicroTile("lhs", "k", pit, extents))
    return plan, shape, extent, bits


def kernels() -> set[str]:
    """Names of the kernels that read masks."""
    return {var.name_hint for var in mask_module().functions}


@settings(max_examples=300, deadline=None)
@given(plans(pit=1))
def test_bands_of_columns_are_covered(drawn) -> None:
    plan, (rows, cols), extent, bits = drawn
    assert plan.slots == (-(-rows // extent) if extent else 1)
    assert (plan.entries, plan.extent, plan.grain) == (cols, cols, 1)
    _, _, band, parts, height, chunks, lanes = plan.fold.numbers
    assert band * plan.slots >= rows and plan.fold.parts == parts <= MOST_PARTS
    assert parts * height >= band
    assert chunks * (vector_of(bits) << lanes) >= cols
    assert 32 <= 1 << lanes <= FOLD_THREADS
    assert (vector_of(bits) << lanes) <= 32 * FOLD_THREADS
    if plan.lists is not None:
        name, (_, _, band, lanes) = plan.lists
        threads = int(name.split("_")[-1])
        assert band * plan.slots >= rows
        assert 32 <= 1 << lanes <= threads and (vector_of(bits) << lanes) <= 32 * threads


@settings(max_examples=300, deadline=None)
@given(plans(pit=0))
def test_slots_of_rows_are_covered(drawn) -> None:
    plan, (rows, cols), extent, bits = drawn
    assert plan.slots == (-(-cols // extent) if extent else 1)
    assert (plan.entries, plan.extent, plan.grain) == (rows, rows, 1)
    _, _, width, parts, piece, several, high, chunks, lanes, whole = plan.fold.numbers
    assert width * plan.slots >= cols and plan.fold.parts == parts <= MOST_PARTS
    assert parts * piece >= width
    assert parts == 1 or (several == 1 and piece % vector_of(bits) == 0)
    assert 1 <= 1 << lanes <= THREADS
    assert whole == (plan.slots == 1 or width % vector_of(bits) == 0)
    assert several * high <= ROW_WORDS
    assert chunks * several >= plan.slots * parts
    if plan.lists is not None:
        name, (_, _, width, several, across, chunks, high) = plan.lists
        assert name == f"list_rows_{bits}"
        assert plan.slots == 1 or width % vector_of(bits) == 0
        assert several * across <= LANES and 1 <= several * max(high, 1) <= MOST_WORDS
        assert chunks * across * vector_of(bits) >= min(width, cols)
        assert CTAS * high * 32 >= rows


@pytest.mark.parametrize(("extents", "pit"), [((64, 1), 1), ((1, 64), 0)])
def test_lines_of_whole_slots_are_not_cut_into_parts(extents: tuple[int, int], pit: int) -> None:
    micro_tile, shape = MicroTile("lhs", "k", pit, extents), (4096, 4096)
    for dtype, (spec, bits) in ENTRIES.items():
        plan = plan_mask(spec, dtype, shape, micro_tile, whole=True)
        assert plan.fold.parts == 1 and plan.slots == 64
        if pit == 1:
            _, _, band, parts, height, chunks, lanes = plan.fold.numbers
            assert parts == 1 and height >= band
            assert chunks * (vector_of(bits) << lanes) >= 4096
            assert 64 * chunks >= SMS or bits == 1  # of which a CTA reads all that there are beside
    for band, least in ((64, 1), (MOST_BAND, 1), (2 * MOST_BAND, 2)):
        made = plan_mask(Mask(), "bool", shape, MicroTile("lhs", "k", 1, (band, 1)))
        assert made.fold.parts >= least and (made.fold.parts == 1) == (least == 1)


def test_every_plan_names_a_kernel_that_exists() -> None:
    known = kernels()
    for dtype, (spec, _) in ENTRIES.items():
        for extents, pit in (((1, 1), 1), ((32, 1), 1), ((0, 1), 1), ((1, 8), 0), ((1, 0), 0)):
            for shape in ((0, 0), (64, 64), (4096, 4096), (1 << 20, 100)):
                plan = plan_mask(spec, dtype, shape, MicroTile("lhs", "k", pit, extents))
                assert plan.fold.kernel in known
                assert plan.lists is None or plan.lists[0] in known
    blocks = plan_mask(BlockMask(32, 2), "bool", (64, 64), MicroTile("lhs", "k", 1, (32, 1)))
    assert blocks.fold.kernel in known and blocks.lists is not None and blocks.lists[0] in known


def test_one_column_list_per_multiprocessor_is_built_by_one_kernel() -> None:
    micro_tile = MicroTile("lhs", "k", 1, (32, 1))
    assert plan_mask(Mask(), "bool", (4096, 4096), micro_tile).lists is not None
    whole = MicroTile("lhs", "k", 1, (0, 1))
    assert plan_mask(Mask(), "bool", (4096, 4096), whole).lists is None


@pytest.mark.parametrize("width", [32, 64, 128])
def test_bands_of_columns_are_listed_by_one_kernel(width: int) -> None:
    micro_tile = MicroTile("lhs", "k", 0, (1, width))
    assert plan_mask(Mask(), "bool", (4096, 4096), micro_tile).lists is not None
    for shape, odd in (((4096, 4096), 40), ((1 << 20, 4096), width)):
        other = MicroTile("lhs", "k", 0, (1, odd))
        assert plan_mask(Mask(), "bool", shape, other).lists is None


def test_small_block_masks_are_listed_by_one_kernel() -> None:
    micro_tile = MicroTile("out", "m", 0, (1, 64))
    for blocks, shape, direct in (
        ((64, 64), (4096, 4096), True),
        ((64, 16), (4096, 4096), True),
        ((64, 8), (4096, 4096), False),  # eight blocks across a slot
        ((1, 64), (1 << 13, 4096), False),
    ):
        plan = plan_mask(BlockMask(*blocks), "bool", shape, micro_tile)
        assert (plan.lists is not None) is direct


def test_block_masks_keep_their_blocks() -> None:
    plan = plan_mask(BlockMask(32, 16), "bool", (100, 100), MicroTile("lhs", "k", 1, (64, 1)))
    assert plan.value_shape == (4, 7)
    assert (plan.slots, plan.entries, plan.grain, plan.extent) == (2, 7, 16, 100)


@pytest.mark.parametrize(("size", "room"), [(0, 64), (1, 64), (64, 64), (65, 128)])
def test_capacity_is_a_multiple_of_64(size: int, room: int) -> None:
    assert capacity_of(size) == room


@pytest.mark.parametrize(
    ("spec", "dtype", "shape", "extents", "error"),
    [
        (Mask(), "bool", (2, 3, 4), (1, 0, 0), AxisError),
        (Mask(), "bool", (3, 4), (1, 0, 0), ShapeError),
        (Mask(), "bool", (1 << 30, 4), (1, 0), ShapeError),
        (Mask(), "float32", (3, 4), (1, 0), DTypeError),
        (BitMask(), "bool", (3, 4), (1, 0), DTypeError),
        (Values(), "complex64", (3, 4), (1, 0), DTypeError),
        (BlockMask(2), "bool", (3, 4), (1, 0), ShapeError),
        (Groups(2), "int32", (3, 4), (1, 0), AxisError),
    ],
)
def test_what_does_not_fit_is_refused(spec, dtype, shape, extents, error) -> None:
    with pytest.raises(error):
        plan_mask(spec, dtype, shape, MicroTile("lhs", "m", 0, extents))
