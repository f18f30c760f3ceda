"""Processes that want the same kernel at once."""

from __future__ import annotations

import errno
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from pit_tvm import files
from pit_tvm.runtime.kernel_cache import KernelCache
from tests.runtime.test_kernel_cache import KEY, build_scale, result_of


def ask(folder: str, barrier: Any, queue: Any) -> None:
    """What a process gets that asks at the same time as others, and how many kernels it built."""
    cache = KernelCache(folder)

    def build() -> Any:
        time.sleep(0.5)
        return build_scale()

    barrier.wait(60)
    queue.put((result_of(cache.get(KEY, build)), cache.stats.builds))


def no_locks(*given: Any) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


@pytest.mark.parametrize("fault", ["", "no locks", "no file"])
def test_one_process_builds_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = tmp_path / "kernels"  # not there before, as in a new home
    lock = folder / f"{KEY}.lock"
    if fault == "no locks":
        monkeypatch.setattr(files.fcntl, "flock", no_locks)
    elif fault == "no file":
        lock.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    queue, barrier = context.Queue(), context.Barrier(3)
    given = (str(folder), barrier, queue)
    workers = [context.Process(target=ask, args=given) for _ in range(3)]
    for worker in workers:
        worker.start()
    answers = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(answers) == ([(3.0, 1)] * 3 if fault else [(3.0, 0), (3.0, 0), (3.0, 1)])
    left = [path.name for path in folder.iterdir() if path != lock or fault != "no file"]
    assert left == [f"{KEY}.so"]


def test_locks_of_processes_that_were_killed_are_cleared(tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.lock").touch()
    cache = KernelCache(tmp_path)
    assert result_of(cache.get(KEY, build_scale)) == 3.0  # nobody holds it
    (tmp_path / f"{KEY}.lock").touch()
    assert cache.clear()[0] == 2 and not list(tmp_path.iterdir())
