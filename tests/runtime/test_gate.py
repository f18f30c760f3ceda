"""A gate opens for arrays that the long way takes as they are, and for no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi

from pit_tvm.errors import PitError
from pit_tvm.runtime.argument import Argument
from pit_tvm.runtime.gate import MOST, RANK, Gate, Look, look_at

from .exported import Exported

SHAPE = (6, 4)
ONES = np.ones(SHAPE, np.float32)


@pytest.fixture(scope="module")
def look() -> Look:
    return tvm.compile(look_at(), target="llvm").mod.get_function("main")  # type: ignore[no-any-return]


def gate(shapes: Sequence[tuple[int, ...]], dtype: str = "float32") -> Gate:
    """Of inputs and a result of these shapes."""
    *inputs, out = [Argument("any", dtype, shape) for shape in shapes]
    return Gate(inputs, out)


def read_only() -> np.ndarray:
    array = np.ones(SHAPE, np.float32)
    array.flags.writeable = False
    return array


def unaligned(library: Any) -> Any:
    memory = np.zeros(4 * 24 + 4, np.uint8)
    array = memory[1:97].view(np.float32).reshape(SHAPE)
    return array if library is np else torch.from_dlpack(array)


# name: array, and whether it is right
ARRAYS: dict[str, tuple[Any, bool]] = {
    "numpy": (np.ones(SHAPE, np.float32), True),
    "torch": (torch.ones(SHAPE), True),
    "tvm": (tvm_ffi.from_dlpack(torch.ones(SHAPE)), True),
    "tvm offset": (tvm_ffi.from_dlpack(Exported(ONES, byte_offset=4)), False),
    "tvm null": (tvm_ffi.from_dlpack(Exported(ONES, data=None)), False),
    "tvm number": (tvm_ffi.from_dlpack(Exported(ONES, device_id=1)), False),
    "tvm pinned": (tvm_ffi.from_dlpack(Exported(ONES, device_type=3)), False),
    "part": (torch.ones(9, *SHAPE)[5], True),
    "requires grad": (torch.ones(SHAPE, requires_grad=True), True),
    "negated": (torch._neg_view(torch.ones(SHAPE)), False),
    "without memory": (torch._efficientzerotensor(SHAPE), False),
    "numpy read only": (read_only(), False),
    "sparse": (torch.ones(SHAPE).to_sparse(), False),
    "meta": (torch.ones(SHAPE, device="meta"), False),
    "numpy turned": (np.ones(SHAPE[::-1], np.float32).T, False),
    "torch turned": (torch.ones(SHAPE[::-1]).T, False),
    "every other": (torch.ones(6, 8)[:, ::2], False),
    "expanded": (torch.ones(1, 4).expand(SHAPE), False),
    "numpy unaligned": (unaligned(np), False),
    "torch unaligned": (unaligned(torch), False),
    "numpy double": (np.ones(SHAPE), False),
    "torch half": (torch.ones(SHAPE).half(), False),
    "torch integers": (torch.ones(SHAPE, dtype=torch.int32), False),
    "byte order": (np.ones(SHAPE, ">f4"), False),
    "numpy shape": (np.ones((4, 6), np.float32), False),
    "torch shape": (torch.ones(6, 5), False),
    "rank": (np.ones(24, np.float32), False),
    "list": ([[1.0] * 4] * 6, False),
    "nothing": (None, False),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_gate_and_the_long_way_agree(name: str, look: Look) -> None:
    array, right = ARRAYS[name]
    plain, argument = torch.ones(SHAPE), Argument("lhs", "float32", SHAPE)
    assert gate([SHAPE, SHAPE, SHAPE]).opens(look, [plain, array], None) == right
    try:
        taken = argument.take(array)
    except PitError as error:
        assert not right and str(error).startswith("lhs")
    else:
        # What is read-only is taken in another form.
        assert right == (taken is array or name == "requires grad")
    may_be_written = right and name != "requires grad" or name == "nothing"  # a new one
    assert gate([SHAPE, SHAPE]).opens(look, [plain], array) == may_be_written


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int32", "int64", "uint8"])
def test_every_type_has_its_own_word(dtype: str, look: Look) -> None:
    tensor = torch.ones(SHAPE, dtype=getattr(torch, dtype))
    assert gate([SHAPE, SHAPE], dtype).opens(look, [tensor], None)
    for other in (torch.float32, torch.bool, torch.int16, torch.float8_e5m2):
        assert not gate([SHAPE, SHAPE], dtype).opens(look, [tensor.to(other)], None)


def test_extents_of_one_have_any_stride(look: Look) -> None:
    column = torch.ones(6, 4)[:, :1]
    assert not gate([(6, 1), SHAPE]).opens(look, [column], None)
    assert gate([(1, 4), SHAPE]).opens(look, [torch.ones(4, 1).T], None)
    assert gate([(), SHAPE]).opens(look, [torch.ones(())], None)


@pytest.mark.parametrize("number", range(1, MOST + 1))
def test_results_share_no_memory_with_any_input(number: int, look: Look) -> None:
    memory = torch.empty(3 * 24)
    out, far = memory[24:48].view(SHAPE), torch.empty(SHAPE)
    checked = gate([SHAPE] * number + [SHAPE])
    for place in range(number):
        for first, apart in ((0, True), (1, False), (24, False), (47, False), (48, True)):
            arrays = [far] * number
            arrays[place] = memory[first : first + 24].view(SHAPE)
            assert checked.opens(look, arrays, out) == apart
            assert checked.opens(look, [array.numpy() for array in arrays], out) == apart
            assert checked.opens(look, arrays, None)


def test_other_layouts_take_the_long_way() -> None:
    assert gate([SHAPE] * MOST + [SHAPE]).useful and gate([(1,) * RANK, SHAPE]).useful
    assert not gate([SHAPE] * (MOST + 1) + [SHAPE]).useful
    assert not gate([(1,) * (RANK + 1), SHAPE]).useful
    assert not gate([SHAPE, (1,) * (RANK + 1)]).useful
    assert not gate([(0, 4), SHAPE]).useful and not gate([SHAPE, (0, 4)]).useful
