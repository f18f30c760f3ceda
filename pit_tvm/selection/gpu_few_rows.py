"""What a product of a few rows by the weights of live activations costs on a GPU."""

from __future__ import annotations

from ..structs import MicroTile, Plan, Tile
from .gpu_cost import GpuDense, GpuRates, against_dense, tile_candidates

_LAUNCH_US, _ROW_US = 3.6, 0.1
_SHORT, _TALL_US = 8, 2.0  # more rows than those of one instruction leave room for less of x
_GBPS = 3850.0


def few_rows_us(rows: int, n: int, k: int, live: float) -> float:
    """Predicted microseconds on a whole Hopper chip; ``live``: share of the columns of x.

    Fits within 15 % what an H200 took for 1 to 16 rows of 20480 x 5120, 16384 x 4096 and, within
    0.7 us, 3072 x 768.
    """
    fixed = _LAUNCH_US + _ROW_US * rows + (_TALL_US if rows > _SHORT else 0.0)
    return fixed + bound_us(n, k, live)


def bound_us(n: int, k: int, live: float) -> float:
    """Microseconds that reading the live rows of w takes, of 16-bit elements."""
    return 2e-3 * live * k * n / _GBPS


def select_few_rows(
    micro_tile: MicroTile, tile: Tile, live: int, dense: GpuDense, rates: GpuRates
) -> Plan:
    """The cheaper of the tile, for ``live`` columns of lhs, and the dense product.

    Detection is part of the product.
    """
    share = live / max(dense.k, 1)
    us = few_rows_us(dense.m, dense.n, dense.k, share)
    timed = [(tile, us, bound_us(dense.n, dense.k, share))]
    candidates = tile_candidates(micro_tile, timed, share, (("index", 0.0),))
    return against_dense(candidates, dense, rates)
