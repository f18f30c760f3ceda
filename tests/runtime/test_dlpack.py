"""Arrays known by DLPack alone: what their headers may say, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm import runtime

from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.runtime.arrays import as_numpy, as_tensor
from pit_tvm.runtime.dlpack import Header, as_tvm, check_start

from .exported import Exported

ROWS, COLUMNS = 4, 6
# What a header says, what the error is, and what it says.
HEADERS: dict[str, tuple[dict[str, Any], type[PitError], str]] = {
    "rank": ({"ndim": 1}, ShapeError, r"shape \[4, 6\], got shape \[4\]"),
    "extent": ({"shape": (4, 5)}, ShapeError, r"shape \[4, 6\], got shape \[4, 5\]"),
    "below 0": ({"shape": (-4, 6)}, ShapeError, r"extents of at least 0, got shape \[-4, 6\]"),
    "type": ({"code": 0}, DTypeError, "float32, got int32"),
    "bits": ({"bits": 64}, DTypeError, "float32, got float64"),
    "lanes": ({"lanes": 2}, DTypeError, "float32, got float32x2"),
    "broadcast": ({"strides": (0, 1)}, ShapeError, r"a contiguous tensor, got strides \(0, 1\)"),
    "backwards": ({"strides": (-6, 1)}, ShapeError, r"a contiguous tensor, .* \(-6, 1\) elem"),
    "gaps": ({"strides": (8, 1)}, ShapeError, r"a contiguous tensor, got strides \(8, 1\)"),
    "offset": ({"byte_offset": 32}, ShapeError, "elements from the start .* byte_offset 32; pass"),
    "null": ({"data": None}, DTypeError, "elements in memory, got a null pointer"),
    "GPU": ({"device_type": 2}, DTypeError, r"an array on the CPU, got DLPack device \(2, 0\)"),
    "pinned": ({"device_type": 3}, DTypeError, r"an array on the CPU, .* device \(3, 0\)"),
    "number": ({"device_id": 5}, DTypeError, r"an array on the CPU, got DLPack device \(1, 5\)"),
}
WRAPS: dict[str, Callable[[Any], Any]] = {"foreign": lambda x: x, "TVM": tvm_ffi.from_dlpack}


def zeros() -> np.ndarray:
    return np.zeros((ROWS, COLUMNS), np.float32)


def take(array: Any, shape: tuple[int | None, ...] = (ROWS, COLUMNS), **options: Any) -> Any:
    return as_tensor("lhs", array, dtype="float32", shape=shape, **options)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_kernels_cannot_take_are_refused(name: str, wrap: str, writable: bool) -> None:
    fields, error, says = HEADERS[name]
    with pytest.raises(error, match=f"^lhs: expected {says}"):
        take(WRAPS[wrap](Exported(zeros(), **fields)), writable=writable)


@pytest.mark.parametrize("wrap", WRAPS)
def test_extents_below_0_are_refused_where_any_will_do(wrap: str) -> None:
    with pytest.raises(ShapeError, match="^lhs: expected extents of at least 0"):
        take(WRAPS[wrap](Exported(zeros(), shape=(-4, 6))), (None, COLUMNS))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_elements_that_are_not_aligned_are_refused(shift: int, wrap: str) -> None:
    array = np.zeros((ROWS + 1, COLUMNS), np.float32)
    fields = {"data": array.ctypes.data + shift, "shape": (ROWS, COLUMNS)}
    with pytest.raises(ShapeError, match="^lhs: expected aligned elements"):
        take(WRAPS[wrap](Exported(array, **fields)))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 6), (6, 1)), ((4, 1), (1, -1)), ((4, 6), None)], ids=str
)
def test_strides_that_say_nothing_are_taken(
    shape: tuple[int, int], strides: tuple[int, int] | None, wrap: str
) -> None:
    array = WRAPS[wrap](Exported(zeros(), shape=shape, strides=strides))
    assert tuple(take(array, shape).shape) == shape


@pytest.mark.parametrize("wrap", WRAPS)
def test_nothing_need_not_be_in_memory(wrap: str) -> None:
    fields: dict[str, Any] = {"shape": (0, COLUMNS), "data": None, "byte_offset": 8}
    assert take(WRAPS[wrap](Exported(zeros(), **fields)), (None, COLUMNS)).shape == (0, COLUMNS)


def test_memory_of_another_device_is_not_asked_for() -> None:
    for at in ((2, 0), (1, 1)):
        with pytest.raises(DTypeError, match=rf"^lhs: .*, got DLPack device \({at[0]}, {at[1]}\)"):
            as_tvm("lhs", Exported(zeros(), at))


@pytest.mark.parametrize("wrap", WRAPS)
def test_patterns_may_begin_anywhere_in_memory(wrap: str) -> None:
    array = np.arange(24, dtype=np.float32).reshape(ROWS, COLUMNS)
    shifted = WRAPS[wrap](Exported(array, shape=(3, COLUMNS), byte_offset=24))
    np.testing.assert_array_equal(as_numpy(shifted), array[1:])
    with pytest.raises(DTypeError, match="^sparsity: expected elements in memory"):
        as_numpy(WRAPS[wrap](Exported(array, data=None, byte_offset=24)), "sparsity")


@pytest.mark.parametrize("wrap", WRAPS)
def test_patterns_of_types_that_numpy_lacks_are_refused(wrap: str) -> None:
    with pytest.raises(DTypeError, match="^sparsity: expected a type .* has, got float32x2"):
        as_numpy(WRAPS[wrap](Exported(zeros(), lanes=2)), "sparsity")


def test_views_within_tensors_of_tvm_are_refused() -> None:
    whole = runtime.empty((ROWS, COLUMNS), "float32")
    check_start("lhs", whole)
    part = whole._create_view((2, COLUMNS), "float32", 48)
    with pytest.raises(ShapeError, match="byte_offset 48; pass a copy"):
        take(part, (2, COLUMNS))


def test_headers_are_as_long_as_those_of_the_specification() -> None:
    assert Header.byte_offset.offset == 40 and Header.byte_offset.size == 8
