"""Calls whose tensors lie elsewhere every time, and that run in several ways: what is launched."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest

from pit_tvm.runtime import cuda_repeat
from pit_tvm.runtime.cuda_repeat import CudaRepeats
from pit_tvm.runtime.cuda_repeat_code import MOST_FAILURES, OFTEN
from pit_tvm.runtime.cuda_watch import PERIOD
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, MicroTile, Plan
from tests.runtime.fake_graphs import (
    CHANGED,
    DROPPED,
    LAUNCHED,
    MADE,
    RECORDED,
    fake_graphs,
    without_streams,
)
from tests.runtime.test_cuda_repeat import aligned, keep, words

torch = pytest.importorskip("torch")

WAYS = [Candidate("pit", MicroTile("lhs", axis, 0, (1, 0)), None, 1.0) for axis in "mnk"]
DENSE = Candidate("dense", None, None, 1.0)


@pytest.fixture(scope="module")
def module() -> Any:
    return fake_graphs()


class Runs:
    """Calls of one kind, with tensors of their own or given ones, as a dispatcher makes them.

    ``plan`` is what the planner says. ``parts``: of an input and an output, what a call launches:
    kernels, each with its kind and parameters.
    """

    device = 0

    def __init__(self, module: Any, repeats: CudaRepeats) -> None:
        self.repeats, self.look, self.log = repeats, module["main"], module["log"]
        self.module = module
        repeats.look = self.look
        self.plan = Plan(WAYS[0])
        self.counts, self.value = torch.zeros(1), aligned(4, 2)
        # What a call shares with others of its kind, and its watch.
        self.layout, self.watch, self.waits, self.output = self, self, False, (3, 5)
        self.parts = lambda x, out: [(1, x, self.way(), out)]

    def way(self) -> int:
        """A number of the way that the plan runs in."""
        return "kmn".index(self.plan.choice.micro_tile.axis) if self.plan.choice.micro_tile else 9

    def plan_of(self, call: Any) -> Plan:
        return self.plan

    def report(self, counts: Any, write: Any) -> None:
        """Arrives at once."""

    def words(self, x: Any, out: Any) -> list[int]:
        """Parameters of what a call launches."""
        parts = [word for _, *words in self.parts(x, out) for word in words]
        return [each.data_ptr() if hasattr(each, "data_ptr") else each for each in parts]

    def run(self, x: Any, out: Any) -> bool:
        """Whether a graph did it, or a repeated dense product; checks that it was the right one."""
        before = self.log(LAUNCHED)
        done, repeat = self.repeats.run((x,), self.value, out)
        launched = self.log(LAUNCHED) - before
        if repeat is not None:
            assert done is out and launched == (not repeat.dense)
            if not repeat.dense:
                planned, self.plan = self.plan, repeat.plan
                last = self.module["launched"]
                assert [last(at) for at in range(last(-1))] == self.words(x, out)
                self.plan = planned
            return True
        assert launched == 0

        def again() -> None:
            for part in self.parts(x, out):
                self.module["record"](*part)

        planned: Any = (self, self.plan, self.counts)
        self.repeats.keep((x,), self.value, (out, out), planned, again)
        return False


@pytest.fixture
def runs(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Runs:
    without_streams(monkeypatch)
    unplanned: Any = None
    repeats = CudaRepeats(KernelCache(tmp_path), print, unplanned)
    made = Runs(module, repeats)
    repeats._planner = made  # type: ignore[assignment]
    return made


def places(number: int, *shape: int) -> list[Any]:
    """So many tensors of one shape, each at an address of its own."""
    return [aligned(*(shape or (4, 2))) for _ in range(number)]


def test_graphs_of_every_way_are_kept(runs: Runs) -> None:
    (x,), out, made = places(1), aligned(3, 5), []
    first = runs.log(MADE)
    for turn in range(40):
        way = WAYS[turn % len(WAYS)]
        for part in range(4):  # other counts of the same way
            runs.plan = Plan(way._replace(cost_us=float(part)))
            for _ in range(2 * PERIOD):
                runs.run(x, out)
        made.append(runs.log(MADE) - first)
    # Each was recorded once; a change of plan is seen in the call that looks at it.
    assert made[: len(WAYS)] == [1, 2, 3] and made[-1] == len(WAYS)
    before = runs.log(MADE), runs.log(DROPPED)
    assert all(runs.run(x, out) for _ in range(10 * PERIOD))
    assert (runs.log(MADE), runs.log(DROPPED)) == before


def test_one_graph_does_the_work_of_all_layers(runs: Runs) -> None:
    layers, first = places(OFTEN + 64), [runs.log(what) for what in (MADE, RECORDED)]
    outs = places(OFTEN + 64, 3, 5)
    for x, out in zip(layers[: OFTEN + 2], outs, strict=False):
        assert not runs.run(x, out)
    assert [runs.log(what) for what in (MADE, RECORDED)] == [first[0] + 1, first[1] + 2]
    assert all(runs.run(x, aligned(3, 5)) for _ in range(3) for x in layers)
    assert runs.log(MADE) == first[0] + 1
    x, out = layers[0], aligned(3, 5)
    assert runs.run(x, out)
    changed = runs.log(CHANGED)
    assert all(runs.run(x, out) for _ in range(8)) and runs.log(CHANGED) == changed


def test_a_tensor_moves_once_a_recording_had_it_elsewhere(runs: Runs) -> None:
    (x, other), outs = places(2), [aligned(3, 5) for _ in range(3)]
    for _ in range(OFTEN + 1):
        assert not runs.run(x, outs[0])
    recorded = runs.log(RECORDED)
    assert not runs.run(x, outs[1])
    assert runs.run(x, outs[2])
    assert not runs.run(other, outs[2])
    assert runs.run(other, outs[0]) and runs.log(RECORDED) == recorded + 2


@pytest.mark.parametrize("case", ["inside", "beyond", "hidden", "no kernel", "other kernel"])
def test_what_no_recording_foretells_is_launched_one_by_one(runs: Runs, case: str) -> None:
    turn = iter(range(1 << 20))
    runs.parts = {
        "inside": lambda x, out: [(1, x.data_ptr() + 4, out)],
        "beyond": lambda x, out: [(1, x.data_ptr() + (1 << 40), out)],
        "hidden": lambda x, out: [(1, x.data_ptr() // 128, out)],
        "no kernel": lambda x, out: [(0, x, out), (1, x, out)],
        "other kernel": lambda x, out: [(1 + next(turn), x, out)],
    }[case]
    (x, *layers), out = places(40), aligned(3, 5)
    for _ in range(OFTEN + 1):
        runs.run(x, out)
    if case != "other kernel":  # the parts of which are others whenever they are asked for
        assert runs.run(x, out)
    recorded = runs.log(RECORDED)
    found = [runs.run(other, out) for other in layers]
    assert found == [case == "inside" and at > 0 for at in range(len(layers))]
    assert runs.log(RECORDED) - recorded == (1 if case == "inside" else MOST_FAILURES)


def test_what_the_driver_refuses_is_launched_one_by_one(runs: Runs) -> None:
    layers, out = places(2 * OFTEN), aligned(3, 5)
    for x in layers:
        runs.run(x, out)
    assert runs.run(layers[0], out)
    dropped = runs.log(DROPPED)
    runs.module["break"](1)
    assert not runs.run(layers[1], out) and runs.log(DROPPED) == dropped + 1
    runs.module["break"](0)
    assert not any(runs.run(x, out) for x in layers[:1])
    assert all(runs.run(x, out) for x in layers[2:])


def test_tensors_that_share_memory_are_told_apart(runs: Runs) -> None:
    """A graph in which two tensors are one is none of two."""
    both, out = places(OFTEN + 8), aligned(3, 5)
    for x in both:
        runs.value = x
        runs.run(x, out)
    runs.value = both[1]
    assert runs.run(both[1], out) and not runs.run(both[0], out)
    memory = aligned(16, 2)
    runs.value = memory[1:5]
    assert not runs.run(memory[:4], out)
    parts = [memory[begin : begin + 4] for begin in (0, 0, 4)]
    assert words(runs.look, *parts, out) and words(runs.look, memory, *parts[:2], out)
    assert words(runs.look, memory, *parts, out) is words(runs.look, *parts, memory, out) is None


def test_no_memory_for_the_output_of_another_call_is_no_error(runs: Runs) -> None:
    class Full:
        def new_empty(self, shape: tuple[int, ...]) -> Any:
            raise torch.OutOfMemoryError(f"no memory for {shape}")

    value, x = runs.value, aligned(4, 2)
    keep(runs.repeats, x, value, aligned(3, 5), "pit", new=True)
    table = runs.repeats._threads.table
    table.guess, table.repeats[0] = 0, replace(table.repeats[0], like=Full())
    assert runs.repeats.run((aligned(9, 2),), value, None) == (None, None)


def test_graphs_are_dropped_with_what_they_are_of(runs: Runs) -> None:
    (x,), out = places(1), aligned(3, 5)
    for _ in range(OFTEN + 1):
        runs.run(x, out)
    gc.collect()  # what other tests left
    dropped = runs.log(DROPPED)
    runs.repeats._threads.table = cuda_repeat._Table()
    gc.collect()
    assert runs.log(DROPPED) == dropped + 1


@pytest.mark.parametrize("seed", range(4))
def test_what_is_launched_is_of_the_plan_and_the_addresses(runs: Runs, seed: int) -> None:
    rng, outs = random.Random(seed), [aligned(3, 5) for _ in range(2)]
    layers = places(rng.choice((1, 3, 40)))
    done = 0
    for _ in range(3000):
        if rng.random() < 0.05:
            runs.plan = Plan(rng.choice((*WAYS, DENSE))._replace(cost_us=rng.random()))
        runs.waits = rng.random() < 0.3
        done += runs.run(rng.choice(layers), rng.choice(outs))
    assert done > 1500
