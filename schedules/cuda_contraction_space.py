"""Tiles of the family of `pit_tvm.schedules.cuda_contraction`, by type and height."""

from __future__ import annotations

from pit_tvm.structs import Tile

GENERAL = "cuda-contraction"
BANDS = (32, 64, 128)  # rows of a tile whose columns have a list of their own
DTYPES = ("float32", "float16", "bfloat16", "int8")

# Tile, then rows and columns of a thread, and stages. In float32 the first reaches 0.85 of cuBLAS
# on an H200.
_SIZES = (
    (128, 128, 32, 8, 8, 2),
    (64, 128, 16, 8, 8, 3),
    (64, 64, 16, 4, 4, 3),
    (32, 256, 16, 8, 8, 3),
    (32, 128, 16, 4, 8, 3),
)
# The same on tensor cores, where 32 threads share 8 times as many rows and 4 times the columns.
_WARP_SIZES = (
    (128, 256, 64, 8, 16, 3),
    (128, 128, 32, 8, 16, 4),
    (64, 64, 32, 4, 8, 4),
    (64, 256, 32, 8, 16, 3),
    (32, 256, 32, 4, 16, 3),
)
_WARP_DTYPES = ("float16", "bfloat16")


def starting_tiles(isa: str, dtype: str, height: int = 0) -> tuple[Tile, ...]:
    """The family's tiles; ``height`` limits them to tiles of so many rows (0: any)."""
    warps = dtype in _WARP_DTYPES
    return tuple(
        Tile(GENERAL, isa, dtype, m, n, k, _knobs(rows, columns, stages, warps))
        for m, n, k, rows, columns, stages in (_WARP_SIZES if warps else _SIZES)
        if m == height or not height
    )


def _knobs(rows: int, columns: int, stages: int, warps: bool) -> tuple[tuple[str, int], ...]:
    own = (("reg_m", rows), ("reg_n", columns), ("stages", stages))
    return (("mma", 1), *own) if warps else own
