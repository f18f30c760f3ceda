"""The kernel that packs live columns as CUDA source; running it needs the GPU."""

from __future__ import annotations

import pytest

from pit_tvm.errors import DTypeError, ScheduleError
from pit_tvm.schedules.cuda_pack import pack_columns
from tests.schedules.cuda_text import cuda_text


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "half"), ("bfloat16", "nv_bfloat16")])
@pytest.mark.parametrize("height", [32, 128])
def test_a_thread_reads_eight_rows_by_elements_and_writes_them_at_once(
    dtype: str, kind: str, height: int
) -> None:
    body = cuda_text(pack_columns(dtype, height)).split("__global__")[-1]
    assert f"{kind}* __restrict__ packed_ptr" in body
    assert body.count("*(uint4*)(packed_ptr") == 1 and body.count("= lhs_ptr[") == 8
    assert f"__launch_bounds__({height * 4})" in body


def test_other_types_and_heights_are_refused() -> None:
    with pytest.raises(DTypeError, match="dtype"):
        pack_columns("float32", 32)
    with pytest.raises(ScheduleError, match="multiple of 8"):
        pack_columns("float16", 12)
