"""``atomic_adds``: a store that adds to what other CTAs add to at the same time."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from .checks import SWRITE, block_of

ATOMIC_ADDS = "pit.atomic_adds"


def atomic_adds(sch: s_tir.Schedule, block: Any) -> None:
    """Let the indexed store ``block`` add atomically.

    The order of the additions is the device's, and floating-point sums vary with it. Recorded as
    an annotation; ``pit_tvm.transform.lower_atomic_adds`` makes the instructions.

    Requirements: ``block`` was made by ``insert_sread_swrite`` and adds to the output.

    Before::

        for j in T.vectorized(4):
            if p < count[s]: out[ids[s, p], j] = out[ids[s, p], j] + acc[p, j]

    ``atomic_adds(sch, block)``, then lowered::

        if p < count[s]: add(&out[ids[s, p], 0], &acc[p, 0], 4)

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    block_of(sch, block, "atomic_adds", SWRITE)
    sch.annotate(block, ATOMIC_ADDS, 1)
