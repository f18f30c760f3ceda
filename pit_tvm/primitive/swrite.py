"""``swrite``: scatter a tile's result where it is complete."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from ..errors import ScheduleError, mismatch
from .checks import block_of, guarded, loop_depth, loop_of
from .dynamic_extent import dynamic_extent

SWRITE = "pit.swrite"


def swrite(sch: s_tir.Schedule, block: Any, loop: Any, *, vector: int = 0) -> list[Any]:
    """Compute the indexed store ``block`` at ``loop`` of its producer, epilogue included.

    Elementwise blocks between the producer and the store are inlined into it. Loops that the
    store's guard bounds end with the live positions. With ``vector`` the innermost loop is
    vectorised in steps of ``vector``, if no guard tests it.

    Requirements: ``block`` was made by ``insert_sread_swrite`` (annotation ``pit.swrite``), and
    ``loop`` is a loop above the producer of what it stores.

    Returns the store's loops inside ``loop``, outermost first.

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    name = block_of(sch, block, "swrite", SWRITE).name_hint
    loop_of(sch, loop, "swrite")
    producer = _inline_epilogue(sch, block, name)
    depth = loop_depth(sch, producer, loop, f"swrite: producer of {name}")
    sch.reverse_compute_at(block, loop)
    inner = list(sch.get_loops(block)[depth:])
    if vector and not guarded(sch.get(inner[-1])) and int(sch.get(inner[-1]).extent) % vector == 0:
        inner[-1:] = sch.split(inner[-1], [None, vector])
        sch.vectorize(inner[-1])
    for store in inner[:-1] if vector else inner:
        if guarded(sch.get(store)):
            dynamic_extent(sch, store)
    return inner


def _inline_epilogue(sch: s_tir.Schedule, block: Any, name: str) -> Any:
    """Inlines what stands between the reduction and the store; returns the reduction."""
    while True:
        producers = [p for p in sch.get_producers(block) if not _is_copy(sch, p)]
        if len(producers) != 1:
            raise ScheduleError(mismatch(f"swrite: producers of {name}", 1, len(producers)))
        if sch.get(producers[0]).init is not None:
            return producers[0]
        if not sch.get_producers(producers[0]):
            return producers[0]
        sch.compute_inline(producers[0])


def _is_copy(sch: s_tir.Schedule, block: Any) -> bool:
    return "pit.sread" in (sch.get(block).annotations or {})
