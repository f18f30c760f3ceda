"""``prefetch_stores``: fetch ahead the lines that a kernel's results go to."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir

from ..errors import ScheduleError, mismatch
from .checks import serial_loop

PREFETCH_STORES = "pit.prefetch_stores"


def prefetch_stores(sch: s_tir.Schedule, loop: Any, buffer: str) -> None:
    """At the start of every iteration of ``loop``, fetch for writing the lines of ``buffer`` that
    the iteration ends by storing to.

    A store to a line that is in no cache waits for it, and only a few can wait at once; asked for
    before the sums, the lines arrive while they are computed. Recorded as an annotation;
    ``pit_tvm.transform.lower_prefetch_stores`` derives the requests from the store.

    Requirements: ``loop`` is serial, and one block below it writes ``buffer``.

    Before::

        for b in range(2):
            for i in range(6): acc[i] = ...
            for i in range(6): out[ids[b * 6 + i], 0:64] = acc[i]

    ``prefetch_stores(sch, b, "out")``, then lowered::

        for b in range(2):
            for i in range(6): prefetch(out[ids[b * 6 + i], 0]), ...  # one for each line
            for i in range(6): acc[i] = ...
            for i in range(6): out[ids[b * 6 + i], 0:64] = acc[i]

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    found = serial_loop(sch, loop, "prefetch_stores")
    what = f"prefetch_stores: loop {found.loop_var.name}"
    writers: list[str] = []

    def visit(block: s_tir.SBlock) -> None:
        if buffer in [str(region.source.name) for region in block.writes]:
            writers.append(str(block.name_hint))

    tvm_ffi.structural_walk(found.body, (s_tir.SBlock, visit))
    if len(writers) != 1:
        expected = f"one block below that writes {buffer}"
        raise ScheduleError(mismatch(what, expected, writers or "none"))
    sch.annotate(loop, PREFETCH_STORES, buffer)
