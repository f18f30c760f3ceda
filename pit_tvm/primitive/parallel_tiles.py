"""``parallel_tiles``: a nest of tile loops spread over the threads as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir

from ..errors import ScheduleError, mismatch
from .checks import check_serial, loop_of, reducing_over

PARALLEL_TILES = "pit.parallel_tiles"
PARALLEL_RUNS = "pit.parallel_runs"


def parallel_tiles(sch: s_tir.Schedule, loops: Sequence[Any], *, runs: bool = False) -> None:
    """Spread a perfect nest of serial loops, outermost first, over the threads as one loop.

    With ``runs`` in runs of steps, each by one thread, which share the scratch of a step: to ask
    for it at every one takes as long as a short one.

    Recorded as an annotation with the nest's depth, because ``fuse`` would hide a dynamic extent
    in a division; :func:`pit_tvm.transform.lower_parallel_tiles` fuses after extents are known.

    Before::

        for nb in range(4):
            for t in range(tiles): ...

    ``parallel_tiles(sch, [nb, t])``, then lowered::

        for f in T.parallel(4 * tiles): ...  # nb = f // tiles, t = f % tiles

    Raises
    ------
    ScheduleError
        No loop is given, one is not serial, a block sums up over one, or they are not directly
        nested.
    """
    if not loops:
        raise ScheduleError(mismatch("parallel_tiles: loops", "at least one", "none"))
    nest = [loop_of(sch, loop, "parallel_tiles") for loop in loops]
    for outer, inner in zip(nest, nest[1:], strict=False):
        if not outer.body.same_as(inner):
            raise ScheduleError(
                mismatch(
                    f"parallel_tiles: loop {inner.loop_var.name}",
                    f"to be all that loop {outer.loop_var.name} holds",
                    "something else between or beside them",
                    "reorder first",
                )
            )
    for loop in nest:
        check_serial(loop, "parallel_tiles")
        if summing := reducing_over(loop):
            what = f"parallel_tiles: loop {loop.loop_var.name}"
            got = f"the one of block {summing[0].name_hint}"
            raise ScheduleError(mismatch(what, "no reduction over it", got))
    sch.annotate(loops[0], PARALLEL_TILES, len(nest))
    if runs:
        sch.annotate(loops[0], PARALLEL_RUNS, True)
