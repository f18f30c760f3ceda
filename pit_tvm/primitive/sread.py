"""``sread``: gather one operand into a dense panel where it is consumed."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from ..errors import ScheduleError, mismatch
from ..structs import integer
from .checks import (
    SREAD,
    block_of,
    bound_iterator,
    guarded,
    iterator_name,
    loop_depth,
    loop_of,
    moving,
)
from .dynamic_extent import dynamic_extent


def sread(
    sch: s_tir.Schedule,
    block: Any,
    loop: Any,
    *,
    dynamic: bool = True,
    pad: tuple[str, int] | None = None,
) -> list[Any]:
    """Compute the gathered copy ``block`` of an operand at ``loop`` of its consumer.

    The panel then holds what one iteration of ``loop`` needs, dense and in list order; the inner
    kernel reads it without an index. With ``dynamic`` the copy loops end with the live positions:
    the rest of the panel is unspecified, and only speculative positions read it. Without, the
    rest is filled with zeros. ``pad`` names an iterator of the copy and a multiple up to which it
    is filled with zeros even so: the register block that reads it then never meets leftovers,
    among which denormal numbers cost a hundred times a normal one.

    Requirements: ``block`` was made by ``insert_sread_swrite`` (annotation ``pit.sread``), it has
    one consumer, and ``loop`` is a loop above that consumer. ``pad`` names an iterator of the copy,
    and the multiple is at least 1.

    Returns the copy's loops inside ``loop``, outermost first.

    Raises
    ------
    ScheduleError
        A requirement does not hold, or TVM cannot compute the copy there.
    """
    copied = block_of(sch, block, "sread", SREAD)
    name = copied.name_hint
    at = loop_of(sch, loop, "sread")
    if pad is not None:
        iterators = [iterator_name(one) for one in copied.iter_vars]
        whole = isinstance(pad, tuple | list) and len(pad) == 2
        if not whole or pad[0] not in iterators or (integer(pad[1]) or 0) < 1:
            expected = f"an iterator of {iterators} and a multiple >= 1"
            raise ScheduleError(mismatch("sread: pad", expected, pad))
    consumers = sch.get_consumers(block)
    if len(consumers) != 1:
        raise ScheduleError(mismatch(f"sread: consumers of {name}", 1, len(consumers)))
    depth = loop_depth(sch, consumers[0], loop, f"sread: consumer of {name}")
    with moving(f"sread: block {name}", at):
        sch.compute_at(block, loop)
    inner = list(sch.get_loops(block)[depth:])
    for position, copy in reversed(list(enumerate(inner))):
        if not dynamic or not guarded(sch.get(copy)):
            continue
        if pad is not None and bound_iterator(sch.get(copy)) == pad[0]:
            inner[position : position + 1] = sch.split(copy, [None, pad[1]])
            copy = inner[position]
        if guarded(sch.get(copy)):  # a split into one piece leaves nothing to bound
            dynamic_extent(sch, copy)
    return inner
