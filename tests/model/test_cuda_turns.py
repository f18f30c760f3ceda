"""Calls of several threads and streams, with stand-ins for what is CUDA's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pit_tvm.model import cuda
from pit_tvm.model.cuda import CudaModel, InTurn


class Event:
    """Notes the streams that it was recorded on."""

    def __init__(self) -> None:
        self.on: list[Any] = []

    def record(self, stream: Any) -> None:
        """Note the stream."""
        self.on.append(stream)


class Stream:
    """Notes what it waits for: the stream that was recorded last."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_event(self, event: Event) -> None:
        """Note the stream."""
        self.waits.append(event.on[-1])


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The current stream, and whether it is recorded; a test may change both."""
    state: dict[str, Any] = {"stream": Stream(), "recorded": False}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: state["stream"])
    monkeypatch.setattr(cuda, "is_capturing", lambda: state["recorded"])
    return state


def test_another_stream_waits_for_the_last_call(current: dict[str, Any]) -> None:
    first, second, run = current["stream"], Stream(), InTurn(lambda x: x + 1)
    assert [run(1), run(2)] == [2, 3] and not first.waits
    current["stream"] = second
    assert run(3) == 4 and run(4) == 5 and second.waits == [first]
    current["stream"] = first
    run(5)
    assert first.waits == [second]


def test_a_call_that_fails_is_waited_for_too(current: dict[str, Any]) -> None:
    def run(fails: bool) -> None:
        if fails:
            raise ValueError("ids")

    first, turns = current["stream"], InTurn(run)
    with pytest.raises(ValueError, match="ids"):
        turns(True)
    current["stream"] = second = Stream()
    turns(False)
    assert second.waits == [first]


def test_recorded_calls_wait_for_nothing(current: dict[str, Any]) -> None:
    first, run = current["stream"], InTurn(lambda: 7)
    run()
    current |= {"stream": Stream(), "recorded": True}
    assert run() == 7 and not current["stream"].waits
    current |= {"stream": first, "recorded": False}
    run()
    assert not first.waits  # the recorded call launched nothing


def test_one_thread_at_a_time(current: dict[str, Any]) -> None:
    inside: list[int] = []

    def run(number: int) -> int:
        inside.append(number)
        time.sleep(0.002)
        assert inside == [number]
        inside.clear()
        return number

    turns = InTurn(run)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(turns, range(40))) == list(range(40))


def test_streams_are_those_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        entered.append(which)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(cuda, "check_on_gpu", lambda given, *_: list(given.values()))
    model: Any = object.__new__(CudaModel)
    model._inputs, model._machine = None, SimpleNamespace(device="cuda:1")
    model._run, model._restore = lambda x: (x, *entered), tuple
    assert model(ids=3) == (3, "cuda:1") and not entered


@pytest.mark.parametrize(
    ("backend", "replayable", "expected"),
    [
        ("native", True, "replayed"),
        ("native", False, "as it is"),
        ("cudaMallocAsync", True, "as it is"),
    ],
)
def test_graphs_are_recorded_with_torchs_own_allocator(
    backend: str, replayable: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Mock(return_value="as it is", graph=SimpleNamespace(replayable=replayable))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(cuda, "Replayed", lambda *_: lambda: "replayed")
    monkeypatch.setattr(cuda, "InTurn", lambda run: run)
    parts: Any = (None, None, (), machine, None, None)
    assert CudaModel(*parts)._run() == expected
