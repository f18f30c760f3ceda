"""Aligned arrays."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pit_tvm.memory import ALIGNMENT, LARGE_PAGE, aligned_empty


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (1024, 1024), (3, 1000, 1001)])
def test_array_has_the_shape_begins_at_a_line_and_is_writable(
    shape: tuple[int, ...], lasting: bool
) -> None:
    array = aligned_empty(shape, np.float32, lasting=lasting)
    assert array.shape == shape and array.dtype == np.float32 and array.flags.c_contiguous
    assert not array.size or array.ctypes.data % ALIGNMENT == 0
    array.fill(3.0)
    assert (array == 3.0).all()


def test_large_lasting_arrays_begin_at_a_large_page() -> None:
    assert aligned_empty((LARGE_PAGE,), np.float32, lasting=True).ctypes.data % LARGE_PAGE == 0


def test_memory_lives_as_long_as_a_view() -> None:
    view = aligned_empty((2 * LARGE_PAGE,), np.uint8, lasting=True)[-5:]
    view[:] = 7
    gc.collect()
    assert (view == 7).all()
