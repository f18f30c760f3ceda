"""Numbers in memory that recorded graphs read."""

from __future__ import annotations

import weakref

import pytest
import torch

from pit_tvm.model import cuda_layers
from pit_tvm.model.cuda_layers import Numbers


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the stream is recorded: the last of the list."""
    found = [False]
    monkeypatch.setattr(cuda_layers, "is_capturing", lambda device: found[-1])
    return found


def test_numbers_and_ranges() -> None:
    numbers = Numbers(torch.device("cpu"))
    for end in (1, 2, 64, 3, 0, 65, 1000):
        below, one = numbers.below(end), numbers.one(end)
        assert below.dtype == one.dtype == torch.int32
        assert below.is_contiguous() and below.tolist() == [list(range(end))]
        assert one.tolist() == [end]


def test_memory_that_a_graph_may_read_is_never_given_back() -> None:
    numbers = Numbers(torch.device("cpu"))
    parts = [(end, numbers.below(end).data_ptr(), numbers.one(end)) for end in (3, 100, 5000)]
    held = [weakref.ref(made) for made in numbers._made]
    places = [made.data_ptr() for made in numbers._made]
    one = [part[2].data_ptr() for part in parts]
    del parts
    assert len(held) == 3 and all(ref() is not None for ref in held)
    assert [numbers._made[i][end].data_ptr() for i, end in enumerate((3, 100, 5000))] == one
    assert len(set(places)) == 3


def test_what_is_made_while_the_stream_is_recorded_is_the_graphs(recording: list[bool]) -> None:
    numbers = Numbers(torch.device("cpu"))
    recording.append(True)
    assert numbers.one(7).tolist() == [7]
    recording.append(False)
    assert not numbers._made
    first = numbers.below(9).data_ptr()
    recording.append(True)
    assert numbers.below(9).data_ptr() == first
