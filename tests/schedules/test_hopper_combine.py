"""The kernel that sums choices as CUDA source; running it needs the GPU."""

from __future__ import annotations

import pytest

from pit_tvm.errors import ScheduleError
from pit_tvm.schedules.hopper_combine import combine_rows
from tests.schedules.cuda_text import cuda_text


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_rows_move_in_16_byte_pieces_and_are_rounded_once(dtype: str, kind: str) -> None:
    source = cuda_text(combine_rows(dtype))
    assert "ld.global.v4.b32" in source and "st.global.v4.b32" in source
    assert f"cvt.rn.{kind}x2.f32" in source
    assert "weights" not in source


def test_weights_are_a_parameter() -> None:
    assert "weights_ptr" in cuda_text(combine_rows("float16", factors="float32"))


@pytest.mark.parametrize(("ids", "kind"), [("int32", "int"), ("int64", "int64_t")])
def test_choices_may_be_told_by_their_ids(ids: str, kind: str) -> None:
    source = cuda_text(combine_rows("float16", factors="float32", ids=ids))
    assert f"{kind}* __restrict__ ids_ptr" in source
    assert "groups" in source


@pytest.mark.parametrize(
    ("dtype", "options", "word"),
    [
        ("float32", {}, "dtype"),
        ("float16", {"ids": "int16"}, "ids"),
        ("float16", {"factors": "float64"}, "factors"),
    ],
)
def test_other_element_types_are_refused(dtype: str, options: dict[str, str], word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        combine_rows(dtype, **options)  # type: ignore[arg-type]
