"""The kernel that turns a matrix as CUDA source; running it needs the GPU."""

from __future__ import annotations

import pytest

from pit_tvm.errors import DTypeError
from pit_tvm.schedules.cuda_turn import turn_kernel
from tests.schedules.cuda_text import cuda_text


@pytest.mark.parametrize(
    ("dtype", "kind", "pieces"), [("float16", "half", False), ("bfloat16", "nv_bfloat16", True)]
)
def test_matrices_are_read_and_written_in_pieces_of_16_bytes(
    dtype: str, kind: str, pieces: bool
) -> None:
    body = cuda_text(turn_kernel(dtype, pieces)).split("__global__")[-1]
    assert f"{kind}* __restrict__ turned_ptr" in body
    # Two pieces a thread, each of eight elements of eight rows.
    assert body.count("*(uint4*)(turned_ptr") == 2 and body.count("= tile_ptr[") == 16
    assert body.count("cp_async_cg") == 2 and ("lines_ptr[" in body) == pieces


def test_wider_elements_are_fewer_at_once() -> None:
    body = cuda_text(turn_kernel("float32")).split("__global__")[-1]
    assert body.count("*(float4*)(turned_ptr") == 1 and body.count("= tile_ptr[") == 4
    assert body.count("cp_async_cg") == 1


@pytest.mark.parametrize(("dtype", "pieces"), [("int8", False), ("float32", True)])
def test_other_types_are_refused(dtype: str, pieces: bool) -> None:
    with pytest.raises(DTypeError, match="dtype"):
        turn_kernel(dtype, pieces)
