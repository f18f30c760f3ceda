"""Products of a few rows on a CUDA device that read the weights of live activations only."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import tvm

from ..schedules.cuda_few_rows import few_rows
from ..schedules.cuda_few_rows_parts import ACROSS, HEIGHTS, WIDE, FewRowsTile
from . import cuda_arrays
from .cuda_fill import CudaFill
from .cuda_modules import GetModule, Kernel, ModuleKernels, named_module

#: Rows that a product has at most.
MOST_ROWS = max(HEIGHTS)

STEP = 8  # elements of 16 bits in the 16 bytes that rows are moved by
# Clusters that a Hopper chip holds at once.
_CLUSTERS = 30


class CudaFewRows:
    """``product(x, w, bias, out)`` on the current torch stream; nothing waits for the host.

    ``get_module`` as for `pit_tvm.runtime.cuda_fill.CudaFill`.
    """

    def __init__(self, get_module: GetModule) -> None:
        self._kernels = ModuleKernels(get_module)
        self._fill = CudaFill(get_module)

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, act: str = "none") -> None:
        """``out[:] = act(x @ w + bias)``, reading the rows of ``w`` where x has one that is not 0.

        Parameters
        ----------
        x
            CUDA tensor [m, k], float16 or bfloat16, contiguous, m from 1 to `MOST_ROWS`. NaN is
            live. Rows that do not begin at multiples of 16 bytes are copied.
        w
            [k, n] of its type, contiguous; n is a multiple of 8, the address of 16 bytes.
        bias
            [n], or None.
        out
            [m, n], contiguous.
        act
            none, relu, relu2, gelu, gelu_tanh or silu.
        """
        rows, k = x.shape
        if k % STEP or x.data_ptr() % (2 * STEP):
            padded = cuda_arrays.empty(x, (rows, -(-k // STEP) * STEP))
            self._fill.pad_copy(x, padded)
            x = padded
        tile = tile_for(cuda_arrays.dtype_name(x), rows, w.shape[1])
        given = (x, w) if bias is None else (x, w, bias)
        self.kernel(tile, bias is not None, act)(*given, out)

    def kernel(self, tile: FewRowsTile, bias: bool, act: str) -> Kernel:
        """The kernel of a tile, compiled when it is first needed: see `few_rows`."""
        name = f"cuda-few-rows-{tile.dtype}-{tile.rows}-{tile.across}-{act}-{bias:d}"
        return self._kernels.find(name, partial(_module, tile, bias, act), "product")


def _module(tile: FewRowsTile, bias: bool, act: str) -> tvm.IRModule:
    return named_module({"product": few_rows(tile, bias=bias, act=act)})


@lru_cache
def tile_for(dtype: str, rows: int, n: int) -> FewRowsTile:
    """The tile for a product: as narrow as leaves all clusters on the device at once."""
    height = next(height for height in HEIGHTS if height >= rows)
    enough = [across for across in ACROSS if -(-n // (WIDE * across)) <= _CLUSTERS]
    return FewRowsTile(dtype, height, enough[0] if enough else ACROSS[-1])
