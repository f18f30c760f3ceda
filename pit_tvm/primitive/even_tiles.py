"""``even_tiles``: tiles of equal height, as many as the threads share evenly."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from ..errors import ScheduleError, mismatch
from ..structs import integer
from .checks import check_guarded, serial_loop

EVEN_TILES = "pit.even_tiles"


def even_tiles(sch: s_tir.Schedule, loop: Any, *, rows: int, multiple: int, share: int) -> None:
    """Let the tiles of ``loop``, of ``rows`` positions each, become lower where that evens out the
    work: all of one height, a multiple of ``multiple``, and their number one of ``share``.

    With tiles of a fixed height the last one holds the rest, and a thread may get one tile more
    than another: 512 rows in tiles of 168 keep one of two threads idle for a third of the time.
    Recorded as an annotation, because heights depend on the live positions;
    ``pit_tvm.transform.lower_even_tiles`` works them out.

    Requirements: ``loop`` is serial and binds an iterator that a guard ``position < limit`` tests;
    ``rows`` is a multiple of ``multiple``, and all are at least 1.

    Before::

        for t in range(tiles):
            for r in range(168):
                if t * 168 + r < count[0]: ...

    ``even_tiles(sch, t, rows=168, multiple=6, share=2)``, then lowered with 512 live positions::

        for t in range(4):
            for r in range(168):
                if t * 132 + r < min(count[0], t * 132 + 132): ...

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    found = serial_loop(sch, loop, "even_tiles")
    what = f"even_tiles: loop {found.loop_var.name}"
    sizes = [integer(size) or 0 for size in (rows, multiple, share)]
    if min(sizes) < 1 or sizes[0] % sizes[1]:
        expected = "rows >= 1 in whole multiples, and a share >= 1"
        raise ScheduleError(mismatch(what, expected, (rows, multiple, share)))
    check_guarded(found, "even_tiles")
    sch.annotate(loop, EVEN_TILES, sizes)
