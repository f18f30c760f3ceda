"""Memory of calls while they are recorded, with stand-ins for streams and for torch's counts."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.runtime import cuda_arrays, cuda_workspace
from pit_tvm.runtime.cuda_recording import Recording, recorded, recording
from pit_tvm.runtime.cuda_workspace import CudaWorkspace

torch = pytest.importorskip("torch")

CALLS, OWN = 5, 77  # streams: of calls, and of the recording


class Streams:
    """What torch knows of streams and allocations."""

    def __init__(self) -> None:
        self.now, self.allocations = [SimpleNamespace(cuda_stream=CALLS)], 10
        self.used: list[int] = []

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.now.append(stream)
        yield
        self.now.pop()

    def empty(self, *given: Any, **options: Any) -> Any:
        self.allocations += 1
        self.used.append(self.now[-1].cuda_stream)
        return torch.zeros(*given, **options)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "current_stream", lambda: made.now[-1])
    monkeypatch.setattr(cuda, "ExternalStream", lambda at: SimpleNamespace(cuda_stream=at))
    monkeypatch.setattr(cuda, "stream", made.stream)

    def stats() -> Any:
        return {"allocation": {"all": {"allocated": made.allocations}}}

    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch, "empty", made.empty)
    monkeypatch.setattr(cuda_workspace, "stream_of", lambda device: made.now[-1].cuda_stream)
    for module in (cuda_workspace, cuda_arrays):
        monkeypatch.setattr(module, "is_capturing", lambda device: made.now[-1].cuda_stream == OWN)
    return made


def test_what_a_recording_allocates_is_its_own(streams: Streams) -> None:
    like = torch.zeros(3)
    with recording(OWN) as found:
        assert recorded() is found and streams.now[-1].cuda_stream == OWN
        made = cuda_arrays.empty_of("int32", like, (4, 2))
        none = cuda_arrays.empty_of("int32", like, (0,))
    streams.allocations -= 1  # torch has no memory for no elements
    assert recorded() is None and streams.used == [CALLS, CALLS]
    assert found.memory[0] is made and found.memory[1] is none and found.size == 32
    assert found.is_complete(32) and not found.is_complete(31)
    streams.allocations += 1
    assert not found.is_complete(32)


def test_outputs_of_a_recording_are_like_others(streams: Streams) -> None:
    like = torch.zeros(3, dtype=torch.float16)
    with recording(OWN) as found:
        made = cuda_arrays.empty(like, (4, 2))
    assert made.dtype == like.dtype and made.shape == (4, 2) and found.memory == [made]
    assert cuda_arrays.empty(like, (4, 2)).shape == (4, 2) and len(found.memory) == 1


def test_a_recording_has_the_memory_of_the_one_before(streams: Streams) -> None:
    like, shapes = torch.zeros(3), ((4, 2), (3,), (4, 2))
    with recording(OWN) as first:
        made = [cuda_arrays.empty_of("int32", like, shape) for shape in shapes]
    with recording(OWN, first) as second:
        again = [cuda_arrays.empty_of("int32", like, shape) for shape in shapes[1:]]
        again.append(cuda_arrays.empty_of("int32", like, shapes[0]))
        others = [cuda_arrays.empty_of(dtype, like, (3,)) for dtype in ("int32", "int16")]
    assert [id(each) for each in again] == [id(made[at]) for at in (1, 0, 2)]
    assert not any(each is mine for each in others for mine in made)
    assert second.is_complete(second.size) and first.own == first.memory == made


def test_a_recording_uses_the_lists_of_its_call(streams: Streams) -> None:
    memory, like = CudaWorkspace(), torch.zeros(3)
    index = memory.take(like, "live", 1, 100)
    with recording(OWN) as found:
        assert memory.take(like, "live", 1, 100) is index
        other = memory.take(like, "dead", 1, 100)
    assert found.memory[0] is index and found.memory[-1] is other
    assert found.size == other.ids.nbytes + other.count.nbytes
    assert memory.take(like, "dead", 1, 100) is other  # for calls that follow
    with streams.stream(SimpleNamespace(cuda_stream=OWN)):  # somebody else's graph
        assert memory.take(like, "live", 1, 100) is not index


def test_threads_and_faults_leave_no_recording(streams: Streams) -> None:
    seen: list[Recording | None] = []
    with pytest.raises(RuntimeError, match="no"), recording(OWN):
        thread = threading.Thread(target=lambda: seen.append(recorded()))
        thread.start()
        thread.join()
        raise RuntimeError("no")
    assert seen == [None] and recorded() is None
