"""How many threads loops of TVM run on, and where they run on none.

tvm is imported inside functions only.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

from . import forks, pools
from .errors import BackendUnavailable, UnsupportedTarget, mismatch

MOST_THREADS = 1024  # of a pool: where the system gives no more threads TVM ends the process
_NUM_THREADS = "TVM_NUM_THREADS"
_pool_lock = threading.Lock()
_told_tvm: list[str] = []  # what _NUM_THREADS was set to here, which is not the user's wish


def threads_of(num_cores: Any) -> int:
    """A target's own number, else the user's for TVM, else that of the CPUs of this process.

    Raises
    ------
    UnsupportedTarget
        It is no integer, or more than a pool takes.
    """
    asked = num_cores
    if asked is None:
        with _pool_lock:
            asked = _asked_threads()
    if asked is None:
        return cpus()
    try:
        threads = int(str(asked))  # as text: True and 2.5 are no numbers of threads
    except ValueError:
        threads = 0
    if not 1 <= threads <= MOST_THREADS:
        what = "target -num-cores" if num_cores is not None else _NUM_THREADS
        expected = f"an integer of 1 to {MOST_THREADS}"
        raise UnsupportedTarget(mismatch(what, expected, repr(asked)))
    return threads


def start_thread_pool(threads: int) -> int:
    """Ask TVM for ``threads`` workers; returns the number that loops of this thread really get.

    TVM reads ``TVM_NUM_THREADS`` when a host thread launches its first parallel loop (each host
    thread has a pool of its own), and without it takes half of the logical CPUs. A value that the
    user set stays the upper limit, and so does the number of CPUs; a pool that is already running
    does not grow above the number that it started with, which is that of all CPUs here.
    """
    return pools.run(_start_own_pool, threads)


def cpus() -> int:
    """How many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def refuse_fork() -> NoReturn:
    """Say why nothing runs in a forked process: it would wait for ever for threads."""
    advice = "start processes by spawn"
    raise BackendUnavailable(mismatch("process", "TVM's threads", "forked after they ran", advice))


def _start_own_pool(threads: int) -> int:
    import tvm_ffi
    from tvm import runtime  # noqa: F401  (registers the functions used here)

    count = tvm_ffi.get_global_func("runtime.NumThreads")
    with _pool_lock:
        forks.watch()
        ours = _asked_threads() is None
        if ours:
            os.environ[_NUM_THREADS] = str(max(threads, cpus()))
        if count() != threads:
            # 1 is TVM's "big cores" mode, the pool's own default.
            tvm_ffi.get_global_func("runtime.config_threadpool")(1, threads)
        if ours:  # for the pools of other host threads
            _told_tvm[:] = [str(threads)]
            os.environ[_NUM_THREADS] = str(threads)
        return int(count())


def _asked_threads() -> str | None:
    """The number that the user set for TVM."""
    value = os.environ.get(_NUM_THREADS)
    return None if value in _told_tvm else value
