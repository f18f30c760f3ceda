"""What the host learns of live counts."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pit_tvm.runtime import cuda_arrays, cuda_watch
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.cuda_watch import PERIOD, CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache

torch = pytest.importorskip("torch")


class Arriving:
    """Memory of the host to which `send` writes once ``arrived`` is set."""

    arrived = False
    made = 0

    def __init__(self, number: int) -> None:
        Arriving.made += 1
        self.address, self.sent = self, [-1] * number

    def expect(self) -> None:
        self.sent = []

    def values(self) -> tuple[int, ...] | None:
        return tuple(self.sent) if Arriving.arrived else None


def send(count: np.ndarray, memory: Arriving) -> None:
    memory.sent = count.tolist()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> CountWatch:
    monkeypatch.setattr(cuda_watch, "PinnedCounts", Arriving)
    monkeypatch.setattr(cuda_watch, "is_capturing", lambda device: False)
    monkeypatch.setattr(Arriving, "arrived", False)
    monkeypatch.setattr(Arriving, "made", 0)
    return CountWatch(0)


def test_counts_are_known_once_they_arrive(watched: CountWatch) -> None:
    assert watched.counts() is None and watched.due()
    watched.report(np.array([5]), send)
    assert watched.counts() is None
    assert not any(watched.due() for _ in range(2 * PERIOD))  # on its way
    Arriving.arrived = True
    assert watched.counts() == (5,) and watched.due()
    watched.report(np.array([6]), send)
    assert watched.counts() == (6,)
    assert [watched.due() for _ in range(PERIOD)].index(True) == PERIOD - 1
    assert Arriving.made == 1  # the same memory again


def test_equal_counts_are_the_same_ones(watched: CountWatch) -> None:
    Arriving.arrived = True
    known = []
    for _ in range(2):
        watched.report(np.array([3, 4]), send)
        known.append(watched.counts())
    assert known[0] is known[1]  # so that a call keeps its plan


def test_a_launch_that_fails_is_no_report(watched: CountWatch) -> None:
    def fail(count: np.ndarray, memory: Arriving) -> None:
        raise RuntimeError("no launch")

    with pytest.raises(RuntimeError, match="no launch"):
        watched.report(np.array([5]), fail)
    assert watched.due() and watched.counts() is None


def test_two_reports_at_once_do_not_share_memory(watched: CountWatch) -> None:
    for number in (5, 6):  # two threads that both were due
        watched.report(np.array([number]), send)
    assert Arriving.made == 2
    Arriving.arrived = True
    assert {watched.counts(), watched.counts()} == {(5,), (6,)}


def test_threads_share_a_watch(watched: CountWatch) -> None:
    Arriving.arrived = True

    def work() -> None:
        for _ in range(500):
            if watched.due():
                watched.report(np.array([7]), send)
            assert watched.counts() in (None, (7,))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert Arriving.made <= 4


def test_memory_that_is_written_to_outlives_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Arriving] = []
    monkeypatch.setattr(cuda_watch, "keep_until_arrived", kept.extend)
    monkeypatch.setattr(cuda_watch, "PinnedCounts", Arriving)
    monkeypatch.setattr(Arriving, "arrived", False)
    watch = CountWatch(0)
    watch.report(np.array([5]), send)
    del watch
    assert [memory.sent for memory in kept] == [[5]]


def test_pinned_counts_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def made(size: int, *, dtype: Any, device: str, pin_memory: bool) -> Any:
        assert device == "cpu" and pin_memory  # whatever torch's default device is
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", made)
    first = cuda_arrays.PinnedCounts(3)
    first.expect()
    written = (ctypes.c_int32 * 3).from_address(first.address)
    assert first.values() is None
    written[0] = written[2] = 4
    assert first.values() is None
    cuda_arrays.keep_until_arrived([first])
    cuda_arrays.PinnedCounts(1)
    assert first in cuda_arrays._unfinished()  # the kernel still writes
    written[1] = 0
    assert first.values() == (4, 0, 4)
    cuda_arrays.PinnedCounts(1)
    assert first not in cuda_arrays._unfinished()


def test_nothing_is_learnt_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_watch, "is_capturing", lambda device: True)
    assert not CountWatch(0).due()


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> CudaDetector:
    made = CudaDetector(cached_modules(KernelCache(tmp_path_factory.mktemp("kernels"))))
    # The first launch of a kernel waits for the device.
    CountWatch(0).report(torch.zeros(1, dtype=torch.int32, device="cuda"), made.report)
    torch.cuda.synchronize()
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 64, 1000])
def test_reports_arrive_without_waiting(detector: CudaDetector, slots: int) -> None:
    watch, stream = CountWatch(0), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(20):
            count = torch.arange(turn, turn + slots, dtype=torch.int32, device="cuda")
            torch.cuda._sleep(40_000_000)  # longer than a busy host takes
            torch.cuda.set_sync_debug_mode("error")
            try:
                watch.report(count, detector.report)
                before = watch.counts()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert before == (tuple(range(turn - 1, turn - 1 + slots)) if turn else None)
            stream.synchronize()
            assert watch.counts() == tuple(range(turn, turn + slots))


@pytest.mark.gpu
def test_memory_in_use_is_not_handed_out(detector: CudaDetector) -> None:
    count = torch.full((1000,), 7, dtype=torch.int32, device="cuda")
    watch = CountWatch(0)
    watch.report(count, detector.report)
    torch.cuda.synchronize()
    torch.cuda._sleep(30_000_000)
    watch.report(count, detector.report)
    del watch
    others = [torch.full((1000,), 5, dtype=torch.int32).pin_memory() for _ in range(8)]
    torch.cuda.synchronize()
    assert all(bool((other == 5).all()) for other in others)


@pytest.mark.gpu
def test_a_captured_call_reports_nothing(detector: CudaDetector) -> None:
    watch, stream, graph = CountWatch(0), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.zeros(1, device="cuda")
        assert not watch.due()
    assert watch.due()
