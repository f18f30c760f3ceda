"""What a product of a few rows by the weights of live activations costs on a GPU."""

from __future__ import annotations


def few_rows_us(rows: int, n: int, k: int, live: float) -> float:
    """Predicted microseconds on a whole Hopper chip; ``live``: share of the columns of x.

    Fits within a quarter what an H200 took for 1 to 8 rows, 16384 x 4096 and 20480 x 5120, half
    full and less; there it is bound by memory up to 4 rows, and by arithmetic on 8.
    """
    return 4.0 + 1.25 * live * k * n * max(2 / 3.9e6, rows * 1.0e-7)
