"""Annotated stores become atomic additions, of one element or of several."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.transform.lower_atomic_adds import lower_atomic_adds


def store(width: int, dtype: str = "float32", adds: bool = True, apart: int = 1) -> Any:
    """``width`` elements of a row, so far ``apart``, in a vectorised loop; in a serial one if there
    are none."""
    kind = T.vectorized if width else T.serial

    @T.prim_func(s_tir=True)
    def func(
        acc: T.Buffer((8, 8), dtype),
        ids: T.Buffer((8,), "int32"),
        count: T.Buffer((1,), "int32"),
        out: T.Buffer((9, 8), dtype),
    ):
        for t in T.serial(8):
            for v in kind(width or 8):
                with T.sblock("out"):
                    T.reads(acc[t, v], ids[t], count[0])
                    T.writes(out[ids[t], v * apart])
                    T.sblock_attr({"pit.atomic_adds": 1, "pit.swrite": 1})
                    if t < count[0]:
                        out[ids[t], v * apart] = (
                            out[ids[t], v * apart] if adds else T.Cast(dtype, 0)
                        ) + acc[t, v]

    return func


def test_elements_are_added_one_by_one() -> None:
    text = lower_atomic_adds(store(0)).script()
    assert "T.cuda.atomic_add(T.address_of(out[ids[t], v]), acc[t, v])" in text
    assert "T.grid(8, 8)" in text and "if t < count[0]" in text and "pit.atomic" not in text


@pytest.mark.parametrize("width", [2, 4])
def test_a_vector_is_added_at_once(width: int) -> None:
    text = lower_atomic_adds(store(width)).script()
    assert f'"pit_add{width}", T.address_of(out[ids[t], 0]), T.address_of(acc[t, 0])' in text
    places = ", ".join(f"%{place}" for place in range(1, width + 1))
    assert f"red.global.add.v{width}.f32 [%0], {{{places}}};" in text.replace("\\", "")
    assert "vectorized" not in text and "if t < count[0]" in text


def test_other_functions_stay_as_they_are() -> None:
    lowered = lower_atomic_adds(store(4))
    assert lower_atomic_adds(lowered).same_as(lowered)


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        (store(0, adds=False), "a store that adds to its target"),
        (store(8), "2 or 4 neighbours of float32 in memory, got 8 of acc"),
        (store(4, "int32"), "got 4 of acc"),
        (store(4, apart=2), "got 4 of acc.*v \\* 2"),
    ],
)
def test_what_is_no_addition_that_a_gpu_has_is_refused(broken: Any, seen: str) -> None:
    with pytest.raises(ScheduleError, match=seen):
        lower_atomic_adds(broken)
