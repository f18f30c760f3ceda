"""Calls on another device than the current one, with stand-ins for what torch says of devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.runtime import cuda_arrays, cuda_workspace
from pit_tvm.runtime.cuda_arrays import is_capturing
from pit_tvm.runtime.cuda_call import CudaCall
from pit_tvm.runtime.cuda_dispatch import _lap
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.cuda_workspace import CudaWorkspace
from pit_tvm.runtime.dispatch import Clock

torch = pytest.importorskip("torch")


class Devices:
    """What torch knows: the current device, the current stream of each, and recorded streams."""

    def __init__(self) -> None:
        self.now, self.streams, self.recorded = 0, {0: 0, 1: 0}, set[int]()
        self.waited: list[Any] = []

    def is_capturing(self) -> bool:
        """Of the current device."""
        return self.streams[self.now] in self.recorded

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        """`torch.cuda.device`."""
        self.now, before = number, self.now
        yield
        self.now = before

    def tensor(self, device: int) -> Any:
        """One of no use but to tell its device."""
        return SimpleNamespace(get_device=lambda: device)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()
    questions = made.is_capturing, lambda device: made.streams[device], lambda: made.now
    monkeypatch.setattr(cuda_arrays, "_questions", lambda: questions)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "synchronize", made.waited.append)
    return made


def test_the_stream_is_that_of_the_device_that_is_asked_for(devices: Devices) -> None:
    devices.streams, devices.recorded = {0: 5, 1: 6}, {6}
    assert [is_capturing(), is_capturing(0), is_capturing(1)] == [False, False, True]
    devices.recorded = {5}
    assert [is_capturing(), is_capturing(0), is_capturing(1)] == [True, True, False]
    devices.now, devices.streams[1] = 1, 0
    assert [is_capturing(), is_capturing(0), is_capturing(1)] == [False, True, False]
    assert devices.now == 1


def test_a_recorded_call_reports_nothing_and_keeps_no_memory(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_workspace, "stream_of", lambda device: devices.streams[device])
    memory, like = CudaWorkspace(), [devices.tensor(device) for device in (0, 1)]
    layout: Any = SimpleNamespace(output=(1,))
    watches = [CountWatch(0), CudaCall(layout, 1, (), True, True).watch]
    devices.streams = {0: 5, 1: 6}

    def kept() -> list[bool]:
        made = [[memory.keep(lambda *_: object(), each) for _ in range(2)] for each in like]
        return [first is second for first, second in made]

    assert kept() == [True, True] and [watch.due() for watch in watches] == [True, True]
    devices.recorded = {6}
    assert kept() == [True, False] and [watch.due() for watch in watches] == [True, False]


def test_times_end_with_the_work_of_the_calls_device(devices: Devices) -> None:
    assert _lap(Clock(), 1) >= 0.0 and devices.waited == [1]
