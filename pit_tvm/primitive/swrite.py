"""``swrite``: scatter a tile's result where it is complete."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from ..errors import ScheduleError, mismatch
from ..structs import integer
from .checks import SREAD, SWRITE, block_of, guarded, loop_depth, loop_of, moving, reducing_over
from .dynamic_extent import dynamic_extent


def swrite(
    sch: s_tir.Schedule, block: Any, loop: Any, *, vector: int = 0, dynamic: bool = True
) -> list[Any]:
    """Compute the indexed store ``block`` at ``loop`` of its producer, epilogue included.

    Elementwise blocks between the producer and the store are inlined into it. With ``dynamic``
    loops that the store's guard bounds end with the live positions. With ``vector`` the innermost
    loop is vectorised in steps of ``vector``, if no guard tests it.

    Requirements: ``block`` was made by ``insert_sread_swrite`` (annotation ``pit.swrite``), and
    ``loop`` is a loop above the producer of what it stores, and outside those that the producer
    sums over. ``vector`` is at least 0.

    Returns the store's loops inside ``loop``, outermost first.

    Raises
    ------
    ScheduleError
        A requirement does not hold, or TVM cannot compute the store there.
    """
    name = block_of(sch, block, "swrite", SWRITE).name_hint
    at = loop_of(sch, loop, "swrite")
    lanes = integer(vector)
    if lanes is None or lanes < 0:
        raise ScheduleError(mismatch("swrite: vector", "an integer >= 0", repr(vector)))
    producer = _producer(sch, block, loop, name)
    what = f"swrite: producer of {name}"
    depth = loop_depth(sch, producer, loop, what)
    for above in map(sch.get, sch.get_loops(producer)[:depth]):
        if any(part.same_as(sch.get(producer)) for part in reducing_over(above)):
            got = f"loop {above.loop_var.name}, over which it sums up"
            raise ScheduleError(mismatch(what, "to be complete at the loop", got, "reorder first"))
    with moving(f"swrite: block {name}", at):
        _inline_epilogue(sch, block, producer)
        sch.reverse_compute_at(block, loop)
    inner = list(sch.get_loops(block)[depth:])
    vectors = bool(inner) and _takes(sch.get(inner[-1]), lanes)
    if vectors:
        inner[-1:] = sch.split(inner[-1], [None, lanes])
        sch.vectorize(inner[-1])
    for store in inner[:-1] if vectors else inner:
        if dynamic and guarded(sch.get(store)):
            dynamic_extent(sch, store)
    return inner


def _takes(loop: tirx.For, vector: int) -> bool:
    """Whether ``loop`` is made of whole vectors, at every live count."""
    known = isinstance(loop.extent, tirx.IntImm)
    return vector > 0 and not guarded(loop) and known and int(loop.extent) % vector == 0


def _producer(sch: s_tir.Schedule, block: Any, loop: Any, name: str) -> Any:
    """The one block below ``loop`` that ``block`` depends on, through elementwise blocks only."""
    found: dict[str, Any] = {}
    stages = [block]
    while stages:
        for producer in _producers(sch, stages.pop()):
            if _is_below(sch, producer, loop):
                found[sch.get(producer).name_hint] = producer
            elif sch.get(producer).init is None:
                stages.append(producer)
    if len(found) != 1:
        what = f"swrite: producer of {name}"
        expected = f"one block below loop {sch.get(loop).loop_var.name}"
        raise ScheduleError(mismatch(what, expected, sorted(found) or "none"))
    return next(iter(found.values()))


def _inline_epilogue(sch: s_tir.Schedule, block: Any, producer: Any) -> None:
    """Inlines the elementwise blocks that ``block`` reads, but ``producer``."""
    while True:
        stages = [
            stage
            for stage in _producers(sch, block)
            if sch.get(stage).init is None and sch.get_sref(stage) != sch.get_sref(producer)
        ]
        if not stages:
            return
        sch.compute_inline(stages[0])


def _is_below(sch: s_tir.Schedule, block: Any, loop: Any) -> bool:
    target = sch.get_sref(loop)
    return any(sch.get_sref(above).same_as(target) for above in sch.get_loops(block))


def _producers(sch: s_tir.Schedule, block: Any) -> list[Any]:
    """Blocks whose results ``block`` reads, without gathered copies."""
    found = sch.get_producers(block)
    return [p for p in found if SREAD not in (sch.get(p).annotations or {})]
