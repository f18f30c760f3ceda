"""On two GPUs: calls on the second one while the first one is the current device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pit_tvm.model
from pit_tvm.errors import DTypeError
from pit_tvm.runtime.cuda_repeat_code import OFTEN
from pit_tvm.runtime.cuda_watch import PERIOD
from pit_tvm.runtime.kernel_cache import KernelCache
from tests.gpu.device_cases import KINDS, LAYERS, beside, case, delay
from tests.model.test_cuda_model import LIMITS, batch, bert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

FIRST, SECOND = DEVICES = ("cuda:0", "cuda:1")
CASES = [*KINDS, *LAYERS]


@pytest.fixture(autouse=True)
def first_stays_current() -> Iterator[None]:
    """The first device is the current one, before and afterwards; faults of a test show in it."""
    torch.cuda.set_device(0)
    yield
    for device in DEVICES:
        torch.cuda.synchronize(device)
    assert torch.cuda.current_device() == 0


def of(device: str, current: bool) -> contextlib.AbstractContextManager[Any]:
    """A device is the current one, or the first one stays it."""
    return torch.cuda.device(device if current else FIRST)


# --------------------------------------------------------------------------------------------
# Operators and layers


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_devices_take_turns(cache: KernelCache, name: str, current: bool) -> None:
    run, draw = case(name, cache)
    problems = [draw(seed, device) for seed, device in enumerate(DEVICES)]
    for turn in range(OFTEN + PERIOD):  # counts arrive in between, and graphs take over
        for device, problem in zip(DEVICES, problems, strict=True):
            with of(device, current):
                assert problem.is_right(problem.call(run)), (turn, device)
                if name in KINDS:
                    out = problem.out()
                    assert problem.call(run, out=out) is out and problem.is_right(out)


@pytest.mark.parametrize("name", CASES)
def test_calls_wait_for_their_own_stream(cache: KernelCache, name: str) -> None:
    run, draw = case(name, cache)
    problem = draw(0, SECOND)
    torch.cuda.synchronize(SECOND)
    with beside(torch.cuda.Stream(SECOND)):
        assert problem.is_right(problem.call(run))  # loads the kernels
        for seed in range(1, 4):
            other = draw(seed, SECOND)
            delay(1)
            problem.become(other)
            assert problem.is_right(problem.call(run)), seed


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_captured_calls_take_other_contents(cache: KernelCache, name: str, current: bool) -> None:
    run, draw = case(name, cache)
    problem = draw(0, SECOND)
    stream, graph = torch.cuda.Stream(SECOND), torch.cuda.CUDAGraph()
    torch.cuda.synchronize(SECOND)
    with beside(stream):
        for _ in range(3):
            problem.call(run)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.graph(graph, stream=stream), of(SECOND, current):
        found = problem.call(run)
    for seed in range(1, 4):
        problem.become(draw(seed, SECOND))
        found.fill_(torch.nan)
        graph.replay()
        assert problem.is_right(found), seed
        assert problem.is_right(problem.call(run))  # by no memory of the graph
        graph.replay()
        assert problem.is_right(found)


def test_a_captured_call_leaves_memory_and_reports_to_its_graph(cache: KernelCache) -> None:
    made = KINDS["lengths"].compiled(cache)
    problem = KINDS["lengths"].problem(0, SECOND)
    for _ in range(PERIOD):  # the next one is to report
        assert problem.is_right(problem.call(made))
    stream, graph = torch.cuda.Stream(SECOND), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):
        found = problem.call(made)
    dispatcher: Any = made._dispatcher
    (call,) = dispatcher.binder._calls.values()
    assert {place[0] for place in dispatcher.memory._memory.known} == {0}  # the default stream
    assert call.watch.counts() is not None and not call.watch.waits
    graph.replay()
    assert problem.is_right(found)


def test_calls_that_take_turns_on_streams_become_graphs(cache: KernelCache) -> None:
    made, draw = KINDS["lengths"].compiled(cache), KINDS["lengths"].problem
    problems = [draw(seed, device) for seed, device in enumerate(DEVICES)]
    streams = [torch.cuda.Stream(device) for device in DEVICES]
    for device in DEVICES:
        torch.cuda.synchronize(device)
    for turn in range(6 * OFTEN):
        for device, problem, stream in zip(DEVICES, problems, streams, strict=True):
            with torch.cuda.stream(stream):
                if turn % OFTEN == OFTEN - 1:
                    problem.become(draw(turn, device))
                assert problem.is_right(problem.call(made)), (turn, device)
    dispatcher: Any = made._dispatcher
    calls = dispatcher._repeats[False]._threads.table.calls
    assert [call.graph is not None for call in calls] == [True, True]


@pytest.mark.parametrize("name", ["lengths", "bands", "outputs", "moe_feed_forward"])
def test_threads_share_what_runs_on_both_devices(cache: KernelCache, name: str) -> None:
    run, draw = case(name, cache)

    def work(device: str, own: bool) -> int:
        stream = torch.cuda.Stream(device)
        right = 0
        for seed in range(OFTEN + PERIOD):
            problem = draw(seed, device)
            with beside(stream) if own else torch.cuda.device(0):
                right += problem.is_right(problem.call(run))
        return right if torch.cuda.current_device() == 0 else -1

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(work, device, own) for device in DEVICES for own in (False, True)]
        assert [each.result() for each in asked] == [OFTEN + PERIOD] * 4


def test_a_profile_waits_for_the_device(cache: KernelCache) -> None:
    made = KINDS["lengths"].compiled(cache)
    problem = KINDS["lengths"].problem(0, SECOND)
    problem.call(made)
    out = problem.out()
    delay(1)
    profile = made.profile(*problem.arrays, sparsity=problem.value, out=out)
    assert torch.cuda.current_stream(SECOND).query()
    assert problem.is_right(out) and profile.plan is not None


def test_plans_and_packed_weights_of_another_device(cache: KernelCache) -> None:
    kind = KINDS["few rows"]
    problem = kind.problem(0, SECOND)
    assert kind.compiled(cache).explain(*problem.arrays).choice.kind == "pit"
    made = replace(kind, options={"transpose_rhs": True}).compiled(cache)
    lhs, rhs = problem.arrays
    packed = made.pack(rhs=rhs.T.contiguous())
    for _ in range(2 * PERIOD):
        assert problem.is_right(made(lhs, packed))


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_two_devices_are_refused(cache: KernelCache, name: str) -> None:
    run, draw = case(name, cache)
    problem, other = draw(0, SECOND), draw(0, FIRST)
    assert problem.is_right(problem.call(run))
    for place, array in enumerate(other.arrays):
        mixed = replace(problem, arrays=list(problem.arrays))
        mixed.arrays[place] = array
        with pytest.raises(DTypeError, match=r"device .*cuda:"):
            mixed.call(run)
    if name in KINDS:
        with pytest.raises(DTypeError, match=r"device .*cuda:1"):
            problem.call(run, out=other.out())
    if problem.value is not None:
        with pytest.raises(DTypeError, match=r"device .*cuda:"):
            replace(problem, value=other.value).call(run)
    assert problem.is_right(problem.call(run))


# --------------------------------------------------------------------------------------------
# Whole models


class Bert:
    """A small BERT, compiled on the second device and saved; ``exact``: by torch on the CPU."""

    def __init__(self, folder: Path) -> None:
        module, self.file = bert().half().eval(), folder / "model.pit"
        self.exact = copy.deepcopy(module).float()
        with torch.cuda.device(SECOND):
            self.compiled: Any = pit_tvm.model.compile(module, batch(3, 16), target="cuda")
        self.compiled.save(self.file)

    def inputs(self, rows: int, tokens: int, share: float, device: str) -> dict[str, Any]:
        """Random ids and a random mask."""
        made = batch(rows, tokens)
        made["attention_mask"] = (torch.rand(rows, tokens) < share).long()
        return {name: value.to(device) for name, value in made.items()}

    def is_right(self, inputs: dict[str, Any], found: torch.Tensor) -> bool:
        """Whether a result is, and on the device of the inputs."""
        with torch.no_grad():
            want = self.exact(**{name: value.cpu() for name, value in inputs.items()})[0]
        live, device = inputs["attention_mask"].bool().cpu(), inputs["input_ids"].device
        error = (found.cpu().float() - want)[live].abs().max() / want[live].abs().max()
        dead_is_zero = not found.cpu()[~live].any()
        return bool(error < LIMITS[torch.float16]) and dead_is_zero and found.device == device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Bert:
    return Bert(tmp_path_factory.mktemp("model"))


def test_models_run_and_are_replayed_on_their_device(model: Bert) -> None:
    assert torch.cuda.current_device() == 0
    for turn in range(12):  # some numbers of rows of two shapes come again
        share = (0.2, 0.2, 0.6)[turn % 3]
        inputs = model.inputs(*((17, 100), (40, 33))[turn % 2], share, SECOND)
        assert model.is_right(inputs, model.compiled(**inputs)[0]), turn
    batches = model.compiled._run._run._batches
    assert any(graph is not None for each in batches.values() for graph in each.graphs.values())


def test_models_run_on_the_current_stream_of_their_device(model: Bert) -> None:
    inputs = model.inputs(6, 40, 0.5, SECOND)
    torch.cuda.synchronize(SECOND)
    with beside(torch.cuda.Stream(SECOND)):
        for _ in range(4):
            new = model.inputs(6, 40, 0.5, SECOND)
            delay(1)
            for name, value in inputs.items():
                value.copy_(new[name])
            assert model.is_right(inputs, model.compiled(**inputs)[0])


def test_models_are_captured_on_their_device(model: Bert) -> None:
    inputs = model.inputs(6, 32, 1.0, SECOND)
    stream, graph = torch.cuda.Stream(SECOND), torch.cuda.CUDAGraph()
    torch.cuda.synchronize(SECOND)
    with torch.cuda.stream(stream):
        model.compiled(**inputs)  # loads the kernels
    torch.cuda.synchronize(SECOND)
    with torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):
        found = model.compiled(**inputs)[0]
    for share in (0.5, 1.0, 0.1):
        new = model.inputs(6, 32, share, SECOND)
        for name, value in inputs.items():
            value.copy_(new[name])
        found.fill_(torch.nan)
        graph.replay()
        assert model.is_right(inputs, found), share


def test_models_take_no_tensors_of_another_device(model: Bert) -> None:
    with pytest.raises(DTypeError, match="cuda:1"):
        model.compiled(**model.inputs(2, 9, 1.0, FIRST))


def test_a_file_is_loaded_on_both_devices_for_two_threads(model: Bert) -> None:
    loaded = []
    for device in DEVICES:
        with torch.cuda.device(device):
            loaded.append(pit_tvm.model.load(model.file))

    def work(number: int) -> list[bool]:
        right = []
        for _ in range(6):
            inputs = model.inputs(9, 50, 0.5, DEVICES[number])
            right.append(model.is_right(inputs, loaded[number](**inputs)[0]))
        return [*right, torch.cuda.current_device() == 0]

    with ThreadPoolExecutor(2) as pool:
        assert all(all(right) for right in pool.map(work, range(2)))
