"""``dynamic_extent``: a loop that ends with the live positions of an index."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from ..errors import ScheduleError, mismatch
from .checks import check_guarded, initialised_in, serial_loop

DYNAMIC_EXTENT = "pit.dynamic_extent"


def dynamic_extent(sch: s_tir.Schedule, loop: Any) -> None:
    """Let ``loop`` end with the live positions instead of the capacity.

    Recorded as an annotation; ``pit_tvm.transform.lower_dynamic_extent`` turns it into an extent
    read from the count.

    Requirements: the loop is serial, and binds an iterator of a block below it that is guarded by
    ``position < count``. No block below it is initialised in its first iteration: where nothing
    lives there is none.

    Before::

        for t in range(capacity // 64):
            for r in range(64):
                if t * 64 + r < count[0]: ...

    ``dynamic_extent(sch, t)``, then lowered::

        for t in range(min((count[0] + 63) // 64, capacity // 64)):
            for r in range(64):
                if t * 64 + r < count[0]: ...

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    found = serial_loop(sch, loop, "dynamic_extent")
    check_guarded(found, "dynamic_extent")
    if name := initialised_in(found):
        what = f"dynamic_extent: loop {found.loop_var.name}"
        got = f"the one of block {name}"
        raise ScheduleError(mismatch(what, "no initialisation in it", got, "decompose_reduction"))
    sch.annotate(loop, DYNAMIC_EXTENT, 1)
