"""Threads that come and go leave no threads of TVM's behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from pit_tvm import pools
from pit_tvm.errors import BackendUnavailable
from tests.processes import run_python

TASKS = Path("/proc/self/task")

# Prints how many threads the process had after `pools.MOST_OWNERS` calls and 100 calls later, each
# by a thread of its own that has ended, and how many results were right.
ONE_AFTER_ANOTHER = """
import os
import threading
import numpy as np
import pit_tvm
from pit_tvm import op, pools
from pit_tvm.target import resolve_target
from pit_tvm.threads import start_thread_pool

made = pit_tvm.compile(op.matmul(None, 64, 512), sparse={"lhs": pit_tvm.Mask(32, 1)})
mask = np.repeat(np.arange(512)[:, None] % 64 < 32, 512, axis=1)
lhs, rhs = mask.astype(np.float32), np.ones((512, 64), np.float32)
candidates = made.explain(lhs, rhs, sparsity=mask).candidates
right = []

def call():
    start_thread_pool(resolve_target().threads)  # as compile does
    for choice in candidates:
        right.append((made.repeat(choice, lhs, rhs, sparsity=mask) == lhs @ rhs).all())

def calls(number):
    for _ in range(number):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    return len(os.listdir("/proc/self/task"))

call()
print(calls(2 + pools.MOST_OWNERS), calls(100), sum(right) / len(right))
"""

AT_ONCE = """
import threading
import numpy as np
import pit_tvm
from pit_tvm import op, pools

made = pit_tvm.compile(op.linear(None, 64, 512), sparse={"lhs": pit_tvm.Lengths()})
rng, failed = np.random.default_rng(), []
rhs = rng.integers(-2, 3, (64, 512)).astype(np.float32)
meet = threading.Barrier(2 * pools.MOST_OWNERS + pools.MOST_LAUNCHERS)

def call():
    lhs = rng.integers(-2, 3, (512, 512)).astype(np.float32)
    meet.wait()
    for length in range(1, 512, 20):
        out = made(lhs, rhs, np.zeros(64, np.float32), sparsity=[length])
        if not np.array_equal(out[:length], lhs[:length] @ rhs.T):
            failed.append(length)

threads = [threading.Thread(target=call) for _ in range(meet.parties)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed, sum(t.name == "pit-tvm launcher" for t in threading.enumerate()) > 0)
"""


@pytest.mark.skipif(not TASKS.is_dir(), reason="this system does not list a process's threads")
def test_threads_that_have_ended_leave_none_behind() -> None:
    before, after, right = run_python(ONE_AFTER_ANOTHER)
    assert right == "1.0"
    assert int(after) < int(before) + 50  # the system may still count some that have just ended


def test_more_threads_at_once_than_pools_get_the_right_results() -> None:
    assert run_python(AT_ONCE) == ["[]", "True"]


# --------------------------------------------------------------------------------------------
# Without TVM


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No owner but the main thread, and no launcher yet."""
    monkeypatch.setattr(pools, "MOST_OWNERS", 0)
    monkeypatch.setattr(pools, "_OWNERS", pools._Owners())
    monkeypatch.setattr(pools, "_LAUNCHERS", pools._Launchers())
    monkeypatch.setattr(pools, "_OWN", pools._Own())


def by_a_thread(function: Callable[[], Any]) -> Any:
    """What a new thread gets from ``function``, its exception included."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(function())
        except (BackendUnavailable, KeyError, SystemExit) as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    return found[0]


def name() -> str:
    """Who calls."""
    return threading.current_thread().name


def test_the_first_threads_and_the_main_one_run_their_calls_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "MOST_OWNERS", 2)
    monkeypatch.setattr(pools, "_OWNERS", pools._Owners())
    run = pools.pooled(name)
    names = [by_a_thread(run) for _ in range(4)]
    assert names[2:] == ["pit-tvm launcher"] * 2 and "pit-tvm launcher" not in names[:2]
    assert run() == name()


def test_one_thread_launches_for_calls_that_follow_each_other() -> None:
    assert len({by_a_thread(lambda: pools.run(threading.get_ident)) for _ in range(20)}) == 1


def test_calls_at_once_have_a_thread_each_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_LAUNCHERS", 3)
    most, inside = threading.Semaphore(3), threading.Barrier(3)
    seen: list[int] = []

    def call() -> None:
        assert most.acquire(blocking=False)
        inside.wait(60)
        seen.append(threading.get_ident())
        most.release()

    threads = [threading.Thread(target=pools.run, args=(call,)) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 9 and len(set(seen)) == 3


@pytest.mark.parametrize("error", [KeyError("found"), SystemExit(3)])
def test_exceptions_reach_the_caller_and_leave_the_thread_at_work(error: BaseException) -> None:
    def fail() -> None:
        raise error

    assert by_a_thread(lambda: pools.run(fail)) is error
    assert by_a_thread(lambda: pools.run(name)) == "pit-tvm launcher"


def test_a_call_may_call_again_where_all_threads_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_LAUNCHERS", 1)
    assert by_a_thread(lambda: pools.run(pools.run, pools.pooled(name))) == "pit-tvm launcher"


def test_a_call_sees_the_callers_context() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)

    def call() -> int:
        variable.set(variable.get() + 2)
        return pools.run(variable.get)

    assert by_a_thread(call) == 2 and variable.get() == 0


def test_a_system_without_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            pools.run(name)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    found = by_a_thread(call)
    assert isinstance(found, BackendUnavailable) and "threads: expected one more" in str(found)
    assert by_a_thread(lambda: pools.run(name)) == "pit-tvm launcher"


def test_a_forked_process_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    by_a_thread(lambda: pools.run(name))
    monkeypatch.setattr(pools.Threads, "lost", True)
    assert by_a_thread(lambda: pools.run(name)) != "pit-tvm launcher"
