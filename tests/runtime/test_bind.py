"""Arrays against a signature: symbolic extents, layouts that are worked out once, refusals."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import tvm
from tvm import te

from pit_tvm import op
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.runtime.bind import Binder, PackedOperand, resolve
from pit_tvm.runtime.gate import Look, look_at
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import Groups, Mask, Rows


@pytest.fixture(scope="module")
def look() -> Look:
    return tvm.compile(look_at(), target="llvm").mod.get_function("main")  # type: ignore[no-any-return]


@pytest.fixture
def binder(look: Look) -> Binder:
    """Of ``linear(m, 5, 7)``."""
    return Binder(analyse(op.linear(None, 5, 7), {"lhs": Rows()}), "me", lambda: look)


def arrays(m: int) -> list[np.ndarray]:
    return [np.ones(shape, np.float32) for shape in ((m, 7), (5, 7), (5,))]


def test_sizes_and_shapes_follow_from_the_arrays(binder: Binder) -> None:
    given = arrays(11)
    bound = binder.bind(given)
    assert bound.layout.sizes == {"m": 11}
    assert bound.layout.shapes == ((11, 7), (5, 7), (5,))
    assert bound.layout.operand == (11, 7)
    assert bound.layout.output == bound.layout.sums == (11, 5)
    assert all(bound.arrays[name] is each for name, each in zip(bound.arrays, given, strict=True))
    assert list(bound.tensors) == ["lhs", "rhs", "bias"] and bound.packed == {}


def test_layouts_are_worked_out_once_for_equal_shapes(binder: Binder) -> None:
    first = binder.bind(arrays(11)).layout
    assert binder.bind(arrays(11)).layout is first
    assert binder.bind(arrays(12)).layout is not first


def test_elements_are_checked_on_known_layouts_too(binder: Binder) -> None:
    binder.bind(arrays(11))
    lhs, rhs, bias = arrays(11)
    with pytest.raises(DTypeError, match="^rhs"):
        binder.bind([lhs, rhs.astype(np.float64), bias])
    with pytest.raises(ShapeError, match="^lhs.*contiguous"):
        binder.bind([np.ones((7, 11), np.float32).T, rhs, bias])


@pytest.mark.parametrize("torch_s", [False, True])
def test_plain_arrays_of_a_known_layout_are_checked_again(binder: Binder, torch_s: bool) -> None:
    """However plain the last call's arrays were."""
    lhs, rhs, bias = map(torch.from_numpy, arrays(11)) if torch_s else arrays(11)
    first = binder.bind([lhs, rhs, bias])
    again = binder.bind([lhs, rhs, bias])
    assert again.layout is first.layout and again.tensors["rhs"] is rhs
    frozen = np.ones((5, 7), np.float32)
    frozen.flags.writeable = False
    assert type(binder.bind([lhs, frozen, bias]).tensors["rhs"]) is not np.ndarray
    for wrong in (np.ones((7, 5), np.float32).T, np.ones((5, 8), np.float32), None):
        with pytest.raises((ShapeError, DTypeError), match="^rhs"):
            binder.bind([lhs, wrong, bias])
        assert binder.bind([lhs, rhs, bias]).layout is first.layout
    with pytest.raises(ShapeError, match="^arguments"):
        binder.bind([lhs, rhs])
    other = binder.bind(arrays(11) if torch_s else [torch.from_numpy(a) for a in arrays(11)])
    assert {first.layout.library, other.layout.library} == {"numpy", "torch"}


@pytest.mark.parametrize("torch_s", [False, True])
def test_layouts_that_take_turns_are_all_known(
    binder: Binder, torch_s: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {m: [torch.from_numpy(a) if torch_s else a for a in arrays(m)] for m in (11, 12, 13)}
    known = {m: binder.bind(given[m]).layout for m in (11, 12)}
    monkeypatch.setattr(binder, "_anew", lambda _: None)
    for m in (11, 12, 11, 11, 12):
        out = np.empty((m, 5), np.float32)
        bound = binder.bind(given[m], out)
        assert bound.layout is known[m] and bound.result is out
        assert binder.bind(given[m]).result is None
        # What may not be written, or shares memory, goes the long way, which says so.
        shared = given[m][0].reshape(-1)[: 5 * m].reshape(m, 5)
        for wrong in (shared, np.empty((m, 6), np.float32), torch.empty(m, 5, requires_grad=True)):
            assert binder._again(given[m], wrong) is None
    assert binder._again(given[13], None) is None


def test_known_packed_operand_is_taken_again_and_not_kept_alive(binder: Binder) -> None:
    lhs, rhs, bias = arrays(11)
    weight = PackedOperand("rhs", rhs, "panels", "me")
    bounds = [binder.bind([lhs, weight, bias]) for _ in range(3)]
    for bound in bounds:
        assert bound.packed == {"rhs": "panels"} and bound.tensors["rhs"] is rhs
    other = PackedOperand("rhs", rhs.copy(), "others", "me")
    assert binder.bind([lhs, other, bias]).packed == {"rhs": "others"}
    assert binder.bind([lhs, rhs, bias]).packed == {}
    with pytest.raises(ShapeError, match="^rhs: packed operand"):
        binder.bind([lhs, PackedOperand("rhs", rhs, "panels", "you"), bias])
    binder.bind([lhs, weight, bias])
    watch = ref(weight)
    del weight
    gc.collect()
    assert watch() is None
    assert binder.bind([lhs, other, bias]).packed == {"rhs": "others"}


def test_packed_operand_that_is_not_plain_stays_converted(binder: Binder) -> None:
    lhs, rhs, bias = arrays(11)
    rhs.flags.writeable = False
    weight = PackedOperand("rhs", rhs, "panels", "me")
    for _ in range(3):
        bound = binder.bind([lhs, weight, bias])
        assert bound.arrays["rhs"] is rhs and bound.tensors["rhs"] is not rhs
        assert bound.packed == {"rhs": "panels"}


def test_library_is_torch_if_any_array_is(binder: Binder) -> None:
    given = arrays(11)
    assert binder.bind(given).layout.library == "numpy"
    mixed = binder.bind([given[0], torch.ones(5, 7), given[2]]).layout
    assert mixed.library == "torch"
    assert mixed.key != binder.bind(given).layout.key


def test_packed_operand_keeps_its_original(binder: Binder) -> None:
    lhs, rhs, bias = arrays(11)
    bound = binder.bind([lhs, PackedOperand("rhs", rhs, "panels", "me"), bias])
    assert bound.arrays["rhs"] is rhs and bound.packed == {"rhs": "panels"}
    for packed in (
        PackedOperand("rhs", rhs, "panels", "you"),
        PackedOperand("bias", rhs, "panels", "me"),
    ):
        with pytest.raises(ShapeError, match="^rhs: packed operand"):
            binder.bind([lhs, packed, bias])


def test_one_extent_has_one_value() -> None:
    program = analyse(op.grouped_matmul(None, 5, 7, 3), {"lhs": Groups(3)})
    lhs, rhs = np.ones((11, 7), np.float32), np.ones((3, 7, 5), np.float32)
    binder = Binder(program, owner="me")
    with pytest.raises(ShapeError, match="^group_ids.*11"):
        binder.bind([lhs, rhs, np.zeros(12, np.int32)])
    square = te.var("s")
    program = analyse(op.matmul(square, None, square), {"lhs": Rows()})
    with pytest.raises(ShapeError, match="^lhs"):
        Binder(program, owner="me").bind([np.ones((3, 4), np.float32), np.ones((4, 2), np.float32)])


def test_extents_of_the_result_may_be_computed() -> None:
    tensors = op.conv2d(None, 2, 4, None, None, (3, 2), stride=(2, 1), dtype="float16")
    binder = Binder(analyse(tensors, {"data": Mask()}), owner="me")
    data, weight = np.ones((6, 2, 14, 9), np.float16), np.ones((4, 2, 3, 2), np.float16)
    layout = binder.bind([data, weight]).layout
    assert layout.output == layout.sums == (6, 4, 6, 8)
    assert layout.sizes == {"n": 6, "height": 14, "width": 9}


def test_images_smaller_than_the_kernel_are_refused() -> None:
    tensors = op.conv2d(None, 2, 4, None, None, (3, 2))
    binder = Binder(analyse(tensors, {"data": Mask()}), owner="me")
    with pytest.raises(ShapeError, match="^out: expected extents of at least 0.*'height': 1"):
        binder.bind([np.ones((6, 2, 1, 9), np.float32), np.ones((4, 2, 3, 2), np.float32)])


class Foreign:
    """An array of some other library: DLPack, and a shape of its own kind or none."""

    def __init__(self, array: np.ndarray, listed: bool) -> None:
        self.array = array
        if listed:
            self.shape = list(array.shape)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("listed", [False, True])
def test_shapes_of_foreign_arrays_are_those_of_their_memory(binder: Binder, listed: bool) -> None:
    for m in (11, 12, 5, 11):
        lhs, rhs, bias = arrays(m)
        assert binder.bind([Foreign(lhs, listed), rhs, bias]).layout.operand == (m, 7)


def test_layout_of_sizes_needs_all_of_them(binder: Binder) -> None:
    layout = binder.layout_of({"m": 11}, "torch")
    assert (layout.operand, layout.output, layout.library) == ((11, 7), (11, 5), "torch")
    with pytest.raises(ShapeError, match="^size m.*sizes"):
        binder.layout_of({}, "numpy")


def test_resolve_replaces_variables_and_expressions() -> None:
    m = te.var("m")
    assert resolve([m, 3, m * 2 + 1], {"m": 5}) == (5, 3, 11)
    with pytest.raises(ShapeError, match="^size"):
        resolve([m + 1], {"n": 5})


@pytest.mark.parametrize("count", [0, 2, 4])
def test_number_of_arrays_is_checked(binder: Binder, count: int) -> None:
    given = [*arrays(11), np.ones(1, np.float32)][:count]
    with pytest.raises(ShapeError, match=f"^arguments.*3 arrays.*lhs, rhs, bias.*{count}"):
        binder.bind(given)
