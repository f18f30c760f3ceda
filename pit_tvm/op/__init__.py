"""Operators as tensor expressions: each returns ``[inputs..., output]``, without any schedule.

The inputs are named ``lhs``, ``rhs``, ``bias``, ``group_ids``, ``data`` and ``weight``, the
result ``out``; a reduction that an epilogue follows is ``acc``. An extent of None is symbolic.
"""

from __future__ import annotations

from .batch_matmul import batch_matmul
from .conv2d import conv2d
from .elementwise import elementwise
from .grouped_matmul import grouped_matmul
from .linear import linear
from .matmul import matmul
from .reduce_sum import reduce_sum

__all__ = [
    "batch_matmul",
    "conv2d",
    "elementwise",
    "grouped_matmul",
    "linear",
    "matmul",
    "reduce_sum",
]
