"""Whether this process was forked after threads started, none of which are in it."""

from __future__ import annotations

import os
from functools import cache


class Threads:
    """TVM's threads; ``lost`` in a process that was forked after they started."""

    lost = False


def _lose() -> None:
    Threads.lost = True


@cache
def watch() -> None:
    """Threads have started: from here on a forked child has lost them."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_lose)
