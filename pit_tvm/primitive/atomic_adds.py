"""``atomic_adds``: a store that adds to what other CTAs add to at the same time."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import BufferLoad

from ..errors import ScheduleError, mismatch
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
    found = block_of(sch, block, "atomic_adds", SWRITE)
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(found.body, (tirx.BufferStore, stores.append))
    for store in stores:
        if not adds(store):
            what = f"atomic_adds: block {found.name_hint}"
            raise ScheduleError(mismatch(what, "a store that adds to its target", store.value))
    sch.annotate(block, ATOMIC_ADDS, 1)


def adds(store: tirx.BufferStore) -> bool:
    """Whether a store adds to what it stores to."""
    target, sums = BufferLoad(store.buffer, list(store.indices)), store.value
    return isinstance(sums, tirx.Add) and tvm_ffi.structural_equal(sums.a, target)
