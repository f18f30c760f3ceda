"""The short form of the checks agrees with the long one, and takes plain arrays only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.runtime.argument import Argument
from pit_tvm.runtime.arrays import as_tensor

SHAPE = (6, 4)


class Own(np.ndarray):
    """A subclass, which may do anything to its elements."""


def read_only() -> np.ndarray:
    array = np.ones(SHAPE, np.float32)
    array.flags.writeable = False
    return array


def unaligned(library: Any) -> Any:
    memory = np.zeros(4 * 24 + 4, np.uint8)
    array = memory[1:97].view(np.float32).reshape(SHAPE)
    return array if library is np else torch.from_dlpack(array)


# name: array, and whether a compiled function takes it as it is
ARRAYS: dict[str, tuple[Any, bool]] = {
    "numpy": (np.ones(SHAPE, np.float32), True),
    "torch": (torch.ones(SHAPE), True),
    "numpy read only": (read_only(), False),
    "subclass": (np.ones(SHAPE, np.float32).view(Own), False),
    "parameter": (torch.nn.Parameter(torch.ones(SHAPE)), False),
    "requires grad": (torch.ones(SHAPE, requires_grad=True), False),
    "sparse": (torch.ones(SHAPE).to_sparse(), False),
    "meta": (torch.ones(SHAPE, device="meta"), False),
    "numpy turned": (np.ones(SHAPE[::-1], np.float32).T, False),
    "torch turned": (torch.ones(SHAPE[::-1]).T, False),
    "numpy unaligned": (unaligned(np), False),
    "numpy double": (np.ones(SHAPE), False),
    "torch half": (torch.ones(SHAPE).half(), False),
    "byte order": (np.ones(SHAPE, ">f4"), False),
    "numpy shape": (np.ones((4, 6), np.float32), False),
    "torch shape": (torch.ones(4, 6), False),
    "rank": (np.ones(24, np.float32), False),
    "list": ([[1.0] * 4] * 6, False),
    "nothing": (None, False),
}


def outcome(take: Any) -> Any:
    """What ``take()`` gives, or how it refuses."""
    try:
        return take()
    except PitError as error:
        return type(error), str(error)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_short_and_long_checks_agree(name: str, writable: bool) -> None:
    array, plain = ARRAYS[name]
    argument = Argument("lhs", "float32", SHAPE, writable=writable)
    assert argument.is_plain(array) == plain
    found = outcome(lambda: argument.take(array))
    wanted = outcome(
        lambda: as_tensor("lhs", array, dtype="float32", shape=SHAPE, writable=writable)
    )
    if plain:
        assert found is array and wanted is array
    elif isinstance(wanted, tuple):
        assert found == wanted and wanted[1].startswith("lhs")
    else:
        assert type(found) is type(wanted) and tuple(found.shape) == SHAPE


@pytest.mark.parametrize("shape", [(0, 4), (6, 0)])
def test_empty_arrays_take_the_long_way(shape: tuple[int, ...]) -> None:
    argument = Argument("lhs", "float32", shape)
    for array in (np.empty(shape, np.float32), torch.empty(shape)):
        assert not argument.is_plain(array)
        assert tuple(argument.take(array).shape) == shape


@pytest.mark.parametrize("dtype", ["float16", "int8", "int32", "int64", "uint8"])
def test_every_type_is_known_to_both_libraries(dtype: str) -> None:
    argument = Argument("lhs", dtype, SHAPE)
    array = np.ones(SHAPE, dtype)
    assert argument.take(array) is array
    tensor = torch.from_numpy(array)
    assert argument.take(tensor) is tensor
    other = np.ones(SHAPE, np.float64)
    for wrong in (other, torch.from_numpy(other)):
        with pytest.raises(DTypeError, match="^lhs"):
            argument.take(wrong)


def test_bfloat16_is_torchs_own_and_numpys_by_bits() -> None:
    argument = Argument("lhs", "bfloat16", SHAPE)
    tensor = torch.ones(SHAPE, dtype=torch.bfloat16)
    assert argument.take(tensor) is tensor
    array = np.ones(SHAPE, pytest.importorskip("ml_dtypes").bfloat16)
    assert not argument.is_plain(array) and str(argument.take(array).dtype) == "bfloat16"


def test_booleans_are_bytes() -> None:
    argument = Argument("mask", "uint8", SHAPE)
    for array in (np.ones(SHAPE, bool), torch.ones(SHAPE, dtype=torch.bool)):
        assert not argument.is_plain(array)
        assert str(argument.take(array).dtype).endswith("uint8")


def test_results_must_be_writable() -> None:
    with pytest.raises(ShapeError, match="^out.*writable"):
        Argument("out", "float32", SHAPE, writable=True).take(read_only())
