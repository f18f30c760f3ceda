"""Products of a few rows on a CUDA device that read the weights of live activations only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..schedules.cuda_few_rows import EACH, HEIGHTS, FewRowsTile, add_parts, few_rows
from . import cuda_arrays
from .cuda_modules import GetModule, named_module

#: Rows that a product has at most.
MOST_ROWS = max(HEIGHTS)
STEP = 8  # k and n are multiples of it

# CTAs that keep a Hopper chip's memory busy.
_ENOUGH = 192


def _modules(dtype: str) -> dict[str, Any]:
    made = {f"add_{bias:d}": add_parts(dtype, bias) for bias in (False, True)}
    for rows in HEIGHTS:
        for each in EACH:
            made[f"few_{rows}_{each}"] = few_rows(FewRowsTile(dtype, rows, each))
    return made


class CudaFewRows:
    """``product(x, w, bias, out)`` on the current torch stream; nothing waits for the host.

    ``get_module`` as for `pit_tvm.runtime.cuda_fill.CudaFill`.
    """

    def __init__(self, get_module: GetModule) -> None:
        self._get_module = get_module
        self._kernels: dict[tuple[str, str], Callable[..., Any]] = {}

    def __call__(self, x: Any, w: Any, bias: Any, out: Any) -> None:
        """``out[:] = x @ w + bias``, reading the rows of ``w`` where a row of ``x`` is not 0.

        Parameters
        ----------
        x
            CUDA tensor [m, k], float16 or bfloat16, contiguous, m from 1 to `MOST_ROWS`. NaN is
            live.
        w
            [k, n] of its type, contiguous; k and n are multiples of `STEP`.
        bias
            [n], or None.
        out
            [m, n], contiguous.
        """
        rows, k = x.shape
        n, dtype = w.shape[1], cuda_arrays.dtype_name(x)
        tile = tile_for(dtype, rows, n, k)
        parts = -(-k // tile.part)
        partial = cuda_arrays.empty_float32(x, (parts, rows, n))
        self._kernel(dtype, f"few_{tile.rows}_{tile.each}")(x, w, partial)
        given = (partial,) if bias is None else (partial, bias)
        self._kernel(dtype, f"add_{bias is not None:d}")(*given, out)

    def _kernel(self, dtype: str, name: str) -> Callable[..., Any]:
        kernel = self._kernels.get((dtype, name))
        if kernel is None:
            module = self._get_module(
                f"cuda-few-rows-{dtype}", lambda: named_module(_modules(dtype))
            )
            kernel = self._kernels[dtype, name] = module[name]
        return kernel


def tile_for(dtype: str, rows: int, n: int, k: int) -> FewRowsTile:
    """The tile for a product: parts of k as large as leave CTAs enough."""
    height = next(height for height in HEIGHTS if height >= rows)
    tiles = [FewRowsTile(dtype, height, each) for each in EACH]
    enough = [t for t in tiles if -(-k // t.part) * -(-n // t.columns) >= _ENOUGH]
    return enough[-1] if enough else tiles[0]


def few_rows_us(rows: int, n: int, k: int, live: float) -> float:
    """Predicted microseconds on a whole Hopper chip; ``live``: share of the columns of x.

    Fits within a quarter what an H200 took for 1 to 8 rows, 16384 x 4096 and 20480 x 5120, half
    full and less; there it is bound by memory up to 4 rows, and by arithmetic on 8.
    """
    return 4.0 + 1.25 * live * k * n * max(2 / 3.9e6, rows * 1.0e-7)
