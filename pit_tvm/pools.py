"""Which threads run what wakes TVM's workers.

TVM starts a pool of workers for every host thread whose code has a parallel loop, and ends them
only with the process: threads that come and go would leave theirs behind. So the main thread and
the first few others run such code themselves, and threads of this module, which stay, run it for
all that come later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from .errors import BackendUnavailable, mismatch
from .forks import Threads, watch

Result = TypeVar("Result")

MOST_OWNERS = 8  # threads beside the main one that have a pool of their own
MOST_LAUNCHERS = 8  # further calls at the same time wait for one another


class _Own(threading.local):
    """Whether the calling thread has a pool, or may have one. It ends with the thread, where an
    identity comes back as another thread's."""

    pool = False


_OWN = _Own()


def pooled(function: Callable[..., Result]) -> Callable[..., Result]:
    """``function``, which has parallel loops, for threads of any number: see `run`."""

    def launch(*args: Any) -> Result:
        return function(*args) if _OWN.pool else run(function, *args)

    return launch


def run(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)`` by a thread that has a pool: the calling one or, once there are enough,
    one of this module, in the caller's context (`contextvars`). Exceptions are the function's.

    Raises
    ------
    BackendUnavailable
        The system gives no thread to run it on.
    """
    # A forked process has none of the threads; what starts pools there is refused elsewhere.
    if _OWN.pool or Threads.lost or _OWNERS.admits_caller():
        return function(*args)
    answer = _Answer()
    _LAUNCHERS.take((copy_context(), function, args, answer))
    return answer.wait()


class _Owners:
    """The threads that have pools of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = MOST_OWNERS

    def admits_caller(self) -> bool:
        """Whether the calling thread may have a pool, from now on."""
        main = threading.get_ident() == threading.main_thread().ident
        with self._lock:
            if main or self._left:
                self._left -= not main
                _OWN.pool = True
        return _OWN.pool


class _Answer:
    """What a call gave, for the thread that waits for it."""

    def __init__(self) -> None:
        self._ready = threading.Lock()
        self._ready.acquire()
        self._error: BaseException | None = None
        self.value: Any = None

    def __enter__(self) -> None:
        """The call begins."""

    def __exit__(
        self, _: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._error = error
        self._ready.release()
        return True

    def wait(self) -> Any:
        """The value, once it is there; raises what the call raised."""
        self._ready.acquire()
        if self._error is None:
            return self.value
        try:
            raise self._error
        finally:
            self._error = None  # whose traceback holds this frame


_Call = tuple[Context, Callable[..., Any], tuple[Any, ...], _Answer]


class _Launchers:
    """Threads that run calls of others, each one at a time: as many as there were calls at once,
    up to `MOST_LAUNCHERS`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = threading.Lock()
        self._number = self._pending = 0  # threads; calls that none of them has finished

    def take(self, call: _Call) -> None:
        """Have a thread run ``call``, a new one if all are busy."""
        with self._lock:
            if self._pending >= self._number < MOST_LAUNCHERS:
                self._start()
            self._pending += 1
        self._calls.put(call)

    def _start(self) -> None:
        watch()
        try:
            # A daemon: the process need not wait for a thread that waits for calls.
            threading.Thread(target=self._serve, name="pit-tvm launcher", daemon=True).start()
        except RuntimeError as error:
            if not self._number:
                advice = "call from fewer threads, or from the main thread"
                text = mismatch("threads", "one more from the system", error, advice)
                raise BackendUnavailable(text) from error
            return
        self._number += 1

    def _serve(self) -> None:
        _OWN.pool = True
        while True:
            self._answer(*self._calls.get())  # holds nothing of a call while it waits

    def _answer(
        self, context: Context, function: Callable[..., Any], args: tuple[Any, ...], answer: _Answer
    ) -> None:
        with answer:
            try:
                answer.value = context.run(function, *args)
            finally:
                with self._lock:  # before the caller goes on, which may call again
                    self._pending -= 1


_OWNERS, _LAUNCHERS = _Owners(), _Launchers()
