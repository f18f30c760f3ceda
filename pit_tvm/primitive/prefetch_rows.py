"""``prefetch_rows``: fetch ahead the rows that a kernel picks by an index."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from ..errors import ScheduleError, mismatch
from .checks import loop_of

PREFETCH_ROWS = "pit.prefetch_rows"


def prefetch_rows(sch: s_tir.Schedule, loop: Any, buffer: str) -> None:
    """During the iterations of ``loop``, fetch into cache what the next iteration of the loop
    around it reads of ``buffer``.

    Hardware guesses the next line of a stream, not the next row of a gather. Recorded as an
    annotation; ``pit_tvm.transform.lower_prefetch_rows`` spreads the requests evenly.

    Requirements: ``loop`` is serial, it is all that the loop around it holds, and it holds one
    serial loop under which a block reads ``buffer``.

    Before::

        for p in range(panels):
            for b in range(2):
                for k in range(count[0]): ... rhs[p, ids[k], lane]

    ``prefetch_rows(sch, b, "rhs")``, then lowered::

        for p in range(panels):
            for b in range(2):
                for j in range(...):  # half of the rows in each iteration of b
                    prefetch(rhs[p + 1, ids[b * half + j], 0])
                for k in range(count[0]): ... rhs[p, ids[k], lane]

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    found = loop_of(sch, loop, "prefetch_rows")
    what = f"prefetch_rows: loop {found.loop_var.name}"
    around = sch.get_sref(loop).parent
    outer = around.stmt if around is not None else None
    if not isinstance(outer, tirx.For) or not outer.body.same_as(found):
        raise ScheduleError(mismatch(what, "a loop around it that holds nothing else", "none"))
    for part in (found, found.body):
        if not isinstance(part, tirx.For) or part.kind != tirx.ForKind.SERIAL:
            got = "another statement"
            if isinstance(part, tirx.For):
                got = f"{tirx.ForKind(part.kind).name.lower()} loop {part.loop_var.name}"
            raise ScheduleError(mismatch(what, "to be serial and to hold a serial loop", got))
    reads: set[str] = set()

    def visit(block: s_tir.SBlock) -> None:
        reads.update(str(region.source.name) for region in block.reads)

    tvm_ffi.structural_walk(found.body, (s_tir.SBlock, visit))
    if buffer not in reads:
        raise ScheduleError(mismatch(what, f"a block below that reads {buffer}", sorted(reads)))
    sch.annotate(loop, PREFETCH_ROWS, buffer)
