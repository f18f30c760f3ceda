"""Calls that overlap on the device: results are those of one kernel after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.cuda_workspace import CudaWorkspace
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_rows import RowsTile
from pit_tvm.schedules.hopper_space import GROUPS, as_tile
from pit_tvm.structs import Groups, MicroTile

torch = pytest.importorskip("torch")

EXPERTS, TOKENS, N, K = 24, 700, 520, 328
ROWS = MicroTile("x", "m", 0, (1, 0))
TILES = (RowsTile(tile_n=128, cluster=2, stages=5), RowsTile(tile_m=64, tile_n=128, flip=1))


class Layer:
    """One product of experts, its own arrays, and the index memory of its thread and stream."""

    def __init__(self, cache: KernelCache, knobs: RowsTile, memory: CudaWorkspace) -> None:
        self.detector, self.memory = CudaDetector(cached_modules(cache)), memory
        tile = as_tile(knobs, GROUPS, "float16")
        self.product = RowsKernels(cache, "sm_90a").product(tile, EXPERTS)
        self.base = torch.randn(TOKENS, K, device="cuda").half()
        self.weight = torch.randn(EXPERTS, N, K, device="cuda").half() / K**0.5
        self.x, self.rhs = torch.empty_like(self.base), torch.empty_like(self.weight)
        self.given = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        self.ids = torch.zeros_like(self.given)

    def fill(self, given: Any, sign: int) -> None:
        """Kernels of torch, which take no part, write everything that the product reads."""
        torch.mul(self.weight, sign, out=self.rhs)
        torch.add(given, 0, out=self.ids)
        torch.mul(self.base, 2, out=self.x)

    def multiply(self, out: Any) -> None:
        index = self.detector.detect(
            Groups(EXPERTS), self.ids, (TOKENS, K), ROWS, take=self.memory.take
        )
        self.product(self.x, index.ids, index.count, self.rhs, out)

    def right(self, out: Any, given: Any, sign: int) -> bool:
        """Whether ``out`` is the product, and NaN where an id names no expert."""
        dead = (given < 0) | (given >= EXPERTS)
        rows = torch.bmm(
            self.weight.double()[given.clamp(0, EXPERTS - 1)], self.base.double()[:, :, None]
        )[:, :, 0]
        got, want = out.double(), rows * 2 * sign
        scale = want.abs() + want.square().mean().sqrt()
        near = bool((((got - want).abs() / scale)[~dead] < 2.0**-8).all())
        return near and bool(got[dead].isnan().all())


def routes(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(-1, EXPERTS, TOKENS)).cuda() for _ in range(count)]


def poisoned() -> Any:
    return torch.full((TOKENS, N), float("nan"), device="cuda", dtype=torch.float16)


def many_calls(layer: Layer, number: int, seed: int = 0) -> bool:
    """Calls one after the other that write each other's inputs and lists."""
    given, outs = routes(number, seed), [poisoned() for _ in range(number)]
    torch.cuda.current_stream().synchronize()
    for step, (ids, out) in enumerate(zip(given, outs, strict=True)):
        if step % 4 == 3:
            torch.cuda._sleep(20_000)
        layer.fill(ids, (-1) ** step)
        layer.multiply(out)
    torch.cuda.current_stream().synchronize()
    return all(
        layer.right(out, ids, (-1) ** step)
        for step, (ids, out) in enumerate(zip(given, outs, strict=True))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("knobs", TILES)
def test_calls_that_follow_foreign_kernels_and_each_other(
    cache: KernelCache, knobs: RowsTile
) -> None:
    assert many_calls(Layer(cache, knobs, CudaWorkspace()), 40)


@pytest.mark.gpu
def test_calls_of_several_threads_and_streams(cache: KernelCache) -> None:
    memory, results = CudaWorkspace(), {}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            layer = Layer(cache, TILES[number % 2], memory)
            results[number] = many_calls(layer, 20, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def plain(layer: Layer, out: Any, side: Any) -> None:
    """Nothing but kernels."""
    layer.fill(layer.given, 1)
    layer.multiply(out)


def behind_a_copy(layer: Layer, out: Any, side: Any) -> None:
    """A copy, which is no kernel, in front of the index."""
    layer.fill(layer.given, 1)
    layer.ids.copy_(layer.given)
    layer.multiply(out)


def behind_two_streams(layer: Layer, out: Any, side: Any) -> None:
    """The index follows two kernels, one of another stream."""
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        layer.fill(layer.given, 1)
    out.mul_(1)
    main.wait_stream(side)
    layer.multiply(out)


def before_two_streams(layer: Layer, out: Any, side: Any) -> None:
    """Calls in two streams follow one call, and one follows both."""
    main = torch.cuda.current_stream()
    layer.fill(layer.given, 1)
    layer.multiply(out)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        layer.multiply(poisoned())
    layer.multiply(out)
    main.wait_stream(side)
    layer.multiply(out)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [plain, behind_a_copy, behind_two_streams, before_two_streams])
@pytest.mark.parametrize("knobs", TILES)
def test_graphs_replay_with_other_contents(
    cache: KernelCache, knobs: RowsTile, call: Callable[[Layer, Any, Any], None]
) -> None:
    layer, stream, side = (
        Layer(cache, knobs, CudaWorkspace()),
        torch.cuda.Stream(),
        torch.cuda.Stream(),
    )
    out = poisoned()
    with torch.cuda.stream(stream):
        call(layer, out, side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(layer, out, side)
        call(layer, out, side)
    for given in routes(20):
        layer.given.copy_(given)
        layer.base.mul_(-1)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert layer.right(out, given, 1)
