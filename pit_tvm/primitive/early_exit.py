"""``early_exit``: CTAs of a worst-case grid that leave where nothing lives."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from ..errors import ScheduleError, mismatch
from .checks import check_guarded, loop_of

EARLY_EXIT = "pit.early_exit"


def early_exit(sch: s_tir.Schedule, loop: Any) -> None:
    """Let the CTAs of ``loop`` beyond the live positions return at once.

    A grid is as large as the capacity, since the host does not know the count. Recorded as an
    annotation; ``pit_tvm.transform.lower_early_exit`` puts the return in front.

    Requirements: the loop is bound to an index of CTAs, and binds an iterator of a block below it
    that is guarded by ``position < count``.

    Before::

        for t in T.thread_binding(capacity // 64, thread="blockIdx.x"):
            ...
                if t * 64 + r < count[0]: ...

    ``early_exit(sch, t)``, then lowered::

        for t in T.thread_binding(capacity // 64, thread="blockIdx.x"):
            if min((count[0] + 63) // 64, capacity // 64) <= t:
                T.thread_return()
            ...

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    found = loop_of(sch, loop, "early_exit")
    what = f"early_exit: loop {found.loop_var.name}"
    bound = found.kind == tirx.ForKind.THREAD_BINDING
    kind = found.thread_binding.thread_tag if bound else tirx.ForKind(found.kind).name.lower()
    if not kind.startswith("blockIdx."):
        raise ScheduleError(mismatch(what, "bound to blockIdx", kind))
    check_guarded(found, "early_exit")
    sch.annotate(loop, EARLY_EXIT, 1)
