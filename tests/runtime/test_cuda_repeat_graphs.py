"""Results of repeated calls on a GPU, and the CUDA graphs that such calls become."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import Any

import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.runtime import cuda_repeat
from pit_tvm.runtime.cuda_repeat_code import OFTEN
from pit_tvm.runtime.cuda_watch import PERIOD, CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from tests.runtime.test_cuda_repeat_operators import (
    KINDS,
    arguments,
    bindings,
    operands,
    operator,
    pattern,
    run_dense,
)

torch = pytest.importorskip("torch")

CALLS = OFTEN + PERIOD  # the last ones are by graphs


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
        found.extend(wrong(made, kind, first + i, i % 3 == 0) for i in range(CALLS))

    several(0)
    assert made._dispatcher._repeats[False]._threads.table.repeats
    with torch.cuda.stream(torch.cuda.Stream()):
        several(100)
        torch.cuda.current_stream().synchronize()
    threads = [threading.Thread(target=several, args=(200 + 100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5 * CALLS and not any(found)


@pytest.mark.gpu
def test_zeros_follow_dense_products_on_a_gpu(cache: KernelCache) -> None:
    made = operator("zeros", cache, dense=True)
    run_dense(made)
    bound = bindings(made)
    assert not any(wrong(made, "zeros", seed, seed % 3 == 0) for seed in range(48))
    assert len(bound) < 12  # the first ones, and every sixteenth


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
    """How many graphs each of the calls has that this thread may repeat, as it would run now."""
    calls = made._dispatcher._repeats[False]._threads.table.calls
    return [int(call.graph is not None) for call in calls]


def graphs_by_way(made: pit_tvm.Operator) -> list[int]:
    """How many graphs the only call has for each tile that it ran with."""
    table = made._dispatcher._repeats[False]._threads.table
    calls = table.calls + [call for _, call in table.ways[0].values()]
    return [int(call.graph is not None) for call in calls]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_calls_at_the_same_addresses_become_graphs(cache: KernelCache, kind: str) -> None:
    made, arrays = operator(kind, cache), operands(kind, "cuda")
    told, out = pattern(kind, 0, "cuda"), torch.empty((128, 24), device="cuda").half()
    given, value = arguments(made, list(arrays), told)
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in range(6 * OFTEN):  # counts that arrive in between may change the plan
            for array, new in zip(arrays, operands(kind, "cuda"), strict=True):
                array.copy_(new)
            told.copy_(pattern(kind, call))
            out.fill_(torch.nan)
            made(*given, sparsity=value, out=out)
            assert not differs(kind, arrays, told, out, new=False)
    assert max(graphs_by_way(made)) == 1


@pytest.mark.gpu
def test_plans_that_take_turns_keep_their_graphs(cache: KernelCache) -> None:
    made, arrays = operator("lengths", cache), operands("lengths", "cuda")
    planner: Any = made._dispatcher.planner
    plan, plans = planner.plan, dict[object, Any]()

    def planned(layout: Any, counts: Any, *how: bool) -> Any:
        """Every second eight of live rows runs by another tile."""
        found, other = plan(layout, counts, *how), sum(counts or ()) // 8 % 2
        tiles = [choice for choice in found.candidates if choice.kind == "pit"]
        key = id(found), other
        return plans.setdefault(key, dataclasses.replace(found, choice=tiles[other]))

    planner.plan = planned
    told, out = pattern("lengths", 0, "cuda"), torch.empty((128, 24), device="cuda").half()
    for call in range(12 * OFTEN):
        told.copy_(pattern("lengths", call))
        made(*arrays, sparsity=told, out=out.fill_(torch.nan))
        assert not differs("lengths", arrays, told, out, new=False)
    numbers = graphs_by_way(made)
    assert len(numbers) > 1 and set(numbers) == {1}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_follow_tensors_wherever_they_lie(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made, kept = operator(kind, cache), []
    monkeypatch.setattr(CountWatch, "counts", lambda self: None)  # one plan
    for seed in range(OFTEN + 4):
        kept.append(torch.empty(1 + seed, 1000, device="cuda"))  # nothing lies where it lay
        assert not wrong(made, kind, seed, False)
    bound = bindings(made)
    for seed in range(64):
        kept.append(torch.empty(1 + seed, 1000, device="cuda"))
        assert not wrong(made, kind, 1000 + seed, False)
    assert graphs_by_way(made) == [1] and len(bound) <= 4
    repeats = made._dispatcher._repeats[False]
    dropped = weakref.ref(repeats._threads.table.calls[0])
    repeats._threads.table = cuda_repeat._Table()
    gc.collect()
    assert dropped() is None  # and its graph was dropped, maybe while it ran
    assert not wrong(made, kind, 7, False)


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


# lhs [m, k] or, turned, [k, m]; rhs [k, n] or, linear, [n, k]; the operand that is sparse, and what
# tells its zeros, of so many rows and columns each.
MASKED: dict[str, tuple[dict[str, Any], str, Any, tuple[int, int]]] = {
    "rows": ({"transpose_rhs": True}, "lhs", pit_tvm.Mask(1, 256), (1, 256)),
    "pieces": ({"transpose_rhs": True, "bias": True}, "lhs", pit_tvm.Mask(1, 64), (1, 64)),
    "pieces of rhs": ({"transpose_rhs": True}, "rhs", pit_tvm.Mask(1, 64), (1, 64)),
    "columns": ({"transpose_lhs": True}, "lhs", pit_tvm.Mask(1, 32), (1, 32)),
    "turned columns": ({"activation": "relu"}, "lhs", pit_tvm.Mask(32, 1), (32, 1)),
    "blocks": ({"transpose_rhs": True}, "lhs", pit_tvm.BlockMask(64, 64), (64, 64)),
    "values": ({"transpose_rhs": True}, "rhs", pit_tvm.Values(64, 64), (64, 64)),
    "grid": ({"transpose_rhs": True}, "lhs", pit_tvm.Grid(), (1, 256)),
    "bits": ({}, "lhs", pit_tvm.BitMask(1, 64), (1, 64)),
}


def told_by(spec: Any, mask: Any, grain: tuple[int, int]) -> Any:
    """The pattern as the specification takes it; None for values."""
    if isinstance(spec, pit_tvm.Values):
        return None
    if isinstance(spec, pit_tvm.BlockMask):
        return mask[:: grain[0], :: grain[1]].contiguous()
    if isinstance(spec, pit_tvm.BitMask):
        bits = mask.view(len(mask), -1, 8).int() << torch.arange(8, device="cuda")
        return bits.sum(-1).to(torch.uint8)
    return mask


def take(made: pit_tvm.Operator, kind: str) -> None:
    """Plans choose their best candidate of this kind."""
    planner: Any = made._dispatcher.planner
    plan, plans = planner.plan, dict[int, Any]()

    def planned(*given: Any) -> Any:
        found = plan(*given)
        choice = next(c for c in found.candidates if c.kind == kind)
        return plans.setdefault(id(found), dataclasses.replace(found, choice=choice))

    planner.plan = planned


@pytest.mark.gpu
@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("kind", list(MASKED))
def test_calls_with_masks_become_graphs_and_dense_ones_do_not(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, kind: str, library: bool
) -> None:
    options, operand, spec, grain = MASKED[kind]
    tensors = op.matmul(None, None, None, dtype="float16", **options)
    made = pit_tvm.compile(tensors, sparse={operand: spec}, target="cuda", cache=cache)
    take(made, "dense" if library else "pit")
    monkeypatch.setattr(CountWatch, "counts", lambda self: None)
    m, n, k = 192, 128, 256
    made_of = torch.Generator("cuda").manual_seed(len(kind))
    lhs = torch.empty((k, m) if "transpose_lhs" in options else (m, k), device="cuda").half()
    rhs = torch.empty((n, k) if "transpose_rhs" in options else (k, n), device="cuda").half()
    bias = torch.empty(n, device="cuda").half()
    out = torch.empty((m, n), device="cuda").half()
    kept, told, bound = list[Any](), None, bindings(made)
    for call in range(OFTEN + 2 * PERIOD):
        if call > OFTEN:  # from now on nothing lies where it lay
            kept += (lhs, rhs, bias, out, told)
            lhs, rhs, bias, out = (each.clone() for each in (lhs, rhs, bias, out))
            told = None
        sparse = lhs if operand == "lhs" else rhs
        for array in (lhs, rhs, bias):
            array.normal_(generator=made_of)
        high, wide = sparse.shape[0] // grain[0], sparse.shape[1] // grain[1]
        live = torch.rand((high, wide), device="cuda", generator=made_of) < 0.3
        mask = live.repeat_interleave(grain[0], 0).repeat_interleave(grain[1], 1)
        sparse *= mask
        now = told_by(spec, mask, grain)
        told = now if told is None else told.copy_(now)
        out.fill_(torch.nan)
        made(*((lhs, rhs, bias) if "bias" in options else (lhs, rhs)), sparsity=told, out=out)
        left = lhs.double().mT if "transpose_lhs" in options else lhs.double()
        right = rhs.double().mT if "transpose_rhs" in options else rhs.double()
        want = left @ right + (bias.double() if "bias" in options else 0.0)
        want = want.relu() if "activation" in options else want
        assert (out.double() - want).abs().max() <= 2e-3 * want.abs().max()
    assert recorded_graphs(made) == [0 if library else 1] and len(bound) <= OFTEN + 6


@pytest.mark.gpu
def test_a_graph_keeps_what_it_writes_to_itself(cache: KernelCache) -> None:
    tensors = op.matmul(None, None, None, dtype="float16", transpose_rhs=True)
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Mask(1, 64)}, target="cuda", cache=cache)
    take(made, "pit")
    lhs, rhs = (torch.randn(rows, 512, device="cuda").half() for rows in (256, 64))
    mask = torch.zeros(256, 512, dtype=torch.bool, device="cuda")
    mask[::7, 64:128] = True
    lhs *= mask
    out = torch.empty((256, 64), device="cuda").half()
    for _ in range(OFTEN + PERIOD):
        made(lhs, rhs, sparsity=mask, out=out)
    assert recorded_graphs(made) == [1]
    kept = made._dispatcher._repeats[False]._threads.table.calls[0].recorded
    own = {t.data_ptr() for t in kept.own}
    others = [torch.full((4096,), 255, dtype=torch.uint8, device="cuda") for _ in range(512)]
    assert own and not own & {t.data_ptr() for t in others}
    made(lhs, rhs, sparsity=mask, out=out.fill_(torch.nan))
    want = lhs.double() @ rhs.double().T
    assert (out.double() - want).abs().max() < 2e-3 * want.abs().max()
    assert all((t == 255).all() for t in others)
