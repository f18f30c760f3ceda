"""Repeated calls on several devices: which graphs are launched, and on which streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.runtime.cuda_repeat import CudaRepeats
from pit_tvm.runtime.cuda_repeat_code import OFTEN
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, MicroTile, Plan
from tests.runtime.fake_devices import STREAMS, OnDevice
from tests.runtime.fake_graphs import LAUNCHED, MADE, STREAM, fake_graphs, without_streams

SHAPE = (3, 5)


@pytest.fixture(scope="module")
def module() -> Any:
    return fake_graphs("kDLCUDA")


class Calls:
    """Calls of one operator with the same tensors on each device, whose outputs are new."""

    def __init__(self, module: Any, repeats: CudaRepeats) -> None:
        self.repeats, self.log, self.turn_to = repeats, module["log"], module["turn_to"]
        repeats.look = module["main"]
        micro_tile = MicroTile("lhs", "m", 0, (1, 0))
        self.plan = Plan(Candidate("pit", micro_tile, None, 1.0))

    def run(self, device: int, stream: int) -> int | None:
        """A call on a device, the current one, and a stream; the stream on which a graph did its
        work, None if it was launched one by one."""
        self.turn_to(device)
        return self.beside(device, stream)

    def beside(self, device: int, stream: int) -> int | None:
        """The same, whichever device is the current one."""
        STREAMS[device] = stream
        given, value = (OnDevice(device, (4, 2), 1),), OnDevice(device, (4, 2), 2)
        before = self.log(LAUNCHED)
        made, repeat = self.repeats.run(given, value, None)
        if repeat is not None:
            assert self.log(LAUNCHED) == before + 1
            assert made.device == device and made.shape == SHAPE
            return int(self.log(STREAM))
        assert self.log(LAUNCHED) == before
        made = OnDevice(device, SHAPE, 0)
        layout, watch = SimpleNamespace(output=SHAPE), SimpleNamespace(waits=True)
        call: Any = SimpleNamespace(layout=layout, watch=watch, device=device)
        planned = call, self.plan, object()
        self.repeats.keep(given, value, (None, made), planned, lambda: None)
        return None


@pytest.fixture
def calls(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Calls:
    without_streams(monkeypatch)
    planner: Any = SimpleNamespace()
    made = Calls(module, CudaRepeats(KernelCache(tmp_path), print, planner))
    planner.plan_of = lambda call: made.plan
    return made


@pytest.mark.parametrize("streams", [(0, 0), (5, 6), (0, 6)])
def test_calls_that_take_turns_become_graphs_on_their_streams(
    calls: Calls, streams: tuple[int, int]
) -> None:
    for _ in range(2 * OFTEN):
        for device, stream in enumerate(streams):
            calls.run(device, stream)
    found = [calls.run(*each) for _ in range(3) for each in enumerate(streams)]
    assert found == [*streams] * 3


def test_a_graph_of_another_stream_is_not_launched(calls: Calls) -> None:
    for device in (0, 1):
        for _ in range(2 * OFTEN):
            calls.run(device, 0)
    assert calls.run(1, 0) == calls.run(0, 0) == 0
    assert calls.run(1, 7) is None  # the call before made its output on the other device
    for _ in range(2 * OFTEN):
        calls.run(1, 7)
    assert [calls.run(*each) for each in ((0, 0), (1, 7), (0, 0), (1, 0))] == [0, 7, 0, 0]


def test_calls_on_another_device_than_the_current_one_are_launched_one_by_one(
    calls: Calls,
) -> None:
    for device in (0, 1):
        for _ in range(2 * OFTEN):
            calls.run(device, 0)
    assert calls.run(1, 0) == calls.run(0, 0) == 0
    made = calls.log(MADE)
    for stream in (0, 6):
        assert [calls.beside(1, stream) for _ in range(2 * OFTEN)] == [None] * 2 * OFTEN
    assert calls.log(MADE) == made and calls.run(1, 0) == 0
