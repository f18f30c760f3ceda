"""Results of repeated calls on a GPU, and the CUDA graphs that such calls become."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

import pit_tvm
from pit_tvm.runtime import cuda_repeat
from pit_tvm.runtime.cuda_repeat_code import GRAPHS, OFTEN
from pit_tvm.runtime.kernel_cache import KernelCache
from tests.runtime.test_cuda_repeat import KINDS, arguments, operands, operator, pattern

torch = pytest.importorskip("torch")


def wrong(made: pit_tvm.Operator, kind: str, seed: int, new: bool) -> bool:
    """Whether a call with arrays of its own gives another result, or writes what is dead."""
    arrays, told = operands(kind, "cuda"), pattern(kind, seed, "cuda")
    out = None if new else torch.full((128, 24), torch.nan, device="cuda").half()
    given, value = arguments(made, list(arrays), told)
    found = made(*given, sparsity=value, out=out)
    return differs(kind, arrays, told, found, new)


def differs(kind: str, arrays: list[Any], told: Any, found: Any, new: bool) -> bool:
    """Whether ``found`` is not the product, or something is in its dead rows, which were NaN unless
    the output is ``new``."""
    lhs, rhs, bias = (array.double() for array in arrays)
    live, group = torch.ones(128, dtype=torch.bool, device="cuda"), 0
    if kind in ("lengths", "zeros"):
        live = (torch.arange(16, device="cuda") < told[:, None]).flatten()
    elif kind == "rows":
        live = torch.zeros_like(live).index_fill_(0, told.long(), True)
    else:
        group = told.long()
        rhs, bias = rhs[group], bias[group]
    want = (rhs @ lhs[:, :, None])[:, :, 0] + bias if kind == "groups" else lhs @ rhs.T + bias
    error = (found.double() - want)[live].abs().max() / want.abs().max() if live.any() else 0.0
    beside = found[~live] == 0 if kind == "zeros" else found[~live].isnan()
    return not error < 2e-3 or not (beside.all() or new and kind != "zeros")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_are_right_in_every_stream_and_thread(cache: KernelCache, kind: str) -> None:
    made, found = operator(kind, cache), []

    def several(first: int) -> None:
        found.extend(wrong(made, kind, first + i, i % 3 == 0) for i in range(24))

    several(0)
    assert made._dispatcher._repeats._table.repeats
    with torch.cuda.stream(torch.cuda.Stream()):
        several(100)
        torch.cuda.current_stream().synchronize()
    threads = [threading.Thread(target=several, args=(200 + 100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5 * 24 and not any(found)


@pytest.mark.gpu
def test_a_graph_captured_after_repeated_calls_takes_another_pattern(cache: KernelCache) -> None:
    made, arrays = operator("lengths", cache), operands("lengths", "cuda")
    told, out = pattern("lengths", 0, "cuda"), torch.empty((128, 24), device="cuda").half()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(4):
            made(*arrays, sparsity=told, out=out)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made(*arrays, sparsity=told, out=out)
    told.copy_(pattern("lengths", 1))
    out.fill_(torch.nan)
    graph.replay()
    lhs, rhs, bias = (array.double() for array in arrays)
    want = lhs @ rhs.T + bias
    live = (torch.arange(16, device="cuda") < told[:, None]).flatten()
    assert out[~live].isnan().all()
    assert (out.double() - want)[live].abs().max() < 2e-3 * want.abs().max()


def recorded_graphs(made: pit_tvm.Operator) -> list[int]:
    """How many graphs each of the calls has that this thread may repeat."""
    calls = made._dispatcher._repeats._table.calls
    return [sum(graph.made is not None for graph in call.graphs) for call, _ in calls]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_calls_at_the_same_addresses_become_graphs(cache: KernelCache, kind: str) -> None:
    made, arrays = operator(kind, cache), operands(kind, "cuda")
    told, out = pattern(kind, 0, "cuda"), torch.empty((128, 24), device="cuda").half()
    given, value = arguments(made, list(arrays), told)
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in range(OFTEN + 8):
            for array, new in zip(arrays, operands(kind, "cuda"), strict=True):
                array.copy_(new)
            told.copy_(pattern(kind, call))
            out.fill_(torch.nan)
            made(*given, sparsity=value, out=out)
            assert not differs(kind, arrays, told, out, new=False)
    assert recorded_graphs(made) == [1]


@pytest.mark.gpu
def test_addresses_that_come_no_more_give_their_graph_up(cache: KernelCache) -> None:
    made, told = operator("rows", cache), pattern("rows", 0, "cuda")
    sets = [operands("rows", "cuda") for _ in range(3 * GRAPHS)]
    out = torch.empty((128, 24), device="cuda").half()
    for arrays in sets:
        for _ in range(2 * OFTEN + 2):
            out.fill_(torch.nan)
            made(*arrays, sparsity=told, out=out)
        assert not differs("rows", arrays, told, out, new=False)
    (number,) = recorded_graphs(made)
    assert GRAPHS // 2 < number <= GRAPHS
    repeats = made._dispatcher._repeats
    dropped = weakref.ref(repeats._table.calls[0][0])
    repeats._table = cuda_repeat._Table()
    gc.collect()
    assert dropped() is None  # and its graphs were dropped, maybe while they ran
    made(*arrays, sparsity=told, out=out.fill_(torch.nan))
    assert not differs("rows", arrays, told, out, new=False)


@pytest.mark.gpu
def test_a_call_is_recorded_while_another_thread_captures_a_graph(cache: KernelCache) -> None:
    made, arrays = operator("lengths", cache), operands("lengths", "cuda")
    told, out = pattern("lengths", 0, "cuda"), torch.empty((128, 24), device="cuda").half()
    made(*arrays, sparsity=told, out=out)

    def calls() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(OFTEN + 4):
                made(*arrays, sparsity=told, out=out)
            found.extend(recorded_graphs(made))

    found: list[int] = []
    x, graph, thread = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x += 1
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
        x += 1
    graph.replay()
    assert x.tolist() == [2.0] * 8 and found == [1]
