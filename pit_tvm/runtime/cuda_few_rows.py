"""Products of a few rows on a CUDA device that read the weights of live activations only."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import tvm

from ..schedules.cuda_few_rows import EACH, HEIGHTS, FewRowsTile, add_parts, few_rows
from . import cuda_arrays
from .cuda_modules import GetModule, Kernel, ModuleKernels, named_module

#: Rows that a product has at most.
MOST_ROWS = max(HEIGHTS)

# CTAs that keep a Hopper chip's memory busy.
_ENOUGH = 192


def _module(dtype: str) -> tvm.IRModule:
    made = {f"add_{bias:d}": add_parts(dtype, bias) for bias in (False, True)}
    for rows in HEIGHTS:
        for each in EACH:
            made[f"few_{rows}_{each}"] = few_rows(FewRowsTile(dtype, rows, each))
    return named_module(made)


class CudaFewRows:
    """``product(x, w, bias, out)`` on the current torch stream; nothing waits for the host.

    ``get_module`` as for `pit_tvm.runtime.cuda_fill.CudaFill`.
    """

    def __init__(self, get_module: GetModule) -> None:
        self._kernels = ModuleKernels(get_module)

    def __call__(self, x: Any, w: Any, bias: Any, out: Any) -> None:
        """``out[:] = x @ w + bias``, reading the rows of ``w`` where a row of ``x`` is not 0.

        Parameters
        ----------
        x
            CUDA tensor [m, k], float16 or bfloat16, contiguous, m from 1 to `MOST_ROWS`. NaN is
            live.
        w
            [k, n] of its type, contiguous; k and n are multiples of 8.
        bias
            [n], or None.
        out
            [m, n], contiguous.
        """
        rows, k = x.shape
        n, dtype = w.shape[1], cuda_arrays.dtype_name(x)
        tile = tile_for(dtype, rows, n, k)
        parts = -(-k // tile.part)
        sums = cuda_arrays.empty_of("float32", x, (parts, rows, n))
        self._kernel(dtype, f"few_{tile.rows}_{tile.each}")(x, w, sums)
        given = (sums,) if bias is None else (sums, bias)
        self._kernel(dtype, f"add_{bias is not None:d}")(*given, out)

    def _kernel(self, dtype: str, name: str) -> Kernel:
        return self._kernels.find(f"cuda-few-rows-{dtype}", partial(_module, dtype), name)


@lru_cache
def tile_for(dtype: str, rows: int, n: int, k: int) -> FewRowsTile:
    """The tile for a product: parts of k as large as leave CTAs enough."""
    height = next(height for height in HEIGHTS if height >= rows)
    tiles = [FewRowsTile(dtype, height, each) for each in EACH]
    enough = [t for t in tiles if -(-k // t.part) * -(-n // t.columns) >= _ENOUGH]
    return enough[-1] if enough else tiles[0]
