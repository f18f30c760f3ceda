"""Calls that come at many addresses, and run in several ways: which graphs they keep."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from pit_tvm.runtime import cuda_repeat
from pit_tvm.runtime.cuda_repeat import CudaRepeats
from pit_tvm.runtime.cuda_repeat_code import GRAPHS, MOST_FAILURES, OFTEN
from pit_tvm.runtime.cuda_watch import PERIOD
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, MicroTile, Plan
from tests.runtime.fake_graphs import DROPPED, LAST, LAUNCHED, MADE, fake_graphs, without_streams

torch = pytest.importorskip("torch")

WAYS = [Candidate("pit", MicroTile("lhs", axis, 0, (1, 0)), None, 1.0) for axis in "mnk"]
DENSE = Candidate("dense", None, None, 1.0)


@pytest.fixture(scope="module")
def module() -> Any:
    return fake_graphs()


class Runs:
    """Calls of one kind, with tensors of their own or given ones, as a dispatcher makes them.

    ``plan`` is what the planner says; ``kept``: by the number of a graph, what it launches.
    """

    device = 0

    def __init__(self, module: Any, repeats: CudaRepeats) -> None:
        self.repeats, self.look, self.log = repeats, module["main"], module["log"]
        repeats.look = self.look
        self.plan, self.kept = Plan(WAYS[0]), dict[int, object]()
        self.counts, self.value = torch.zeros(1), torch.zeros(4, 2)
        # What a call shares with others of its kind, and its watch.
        self.layout, self.watch, self.waits, self.output = self, self, False, (3, 5)

    def plan_of(self, call: Any) -> Plan:
        return self.plan

    def report(self, counts: Any, write: Any) -> None:
        """Arrives at once."""

    def run(self, x: Any, out: Any) -> bool:
        """Whether a graph did it, or a repeated dense product; checks that it was the right one."""
        before, place = self.log(LAUNCHED), (x.data_ptr(), out.data_ptr())
        done, repeat = self.repeats.run((x,), self.value, out)
        launched = self.log(LAUNCHED) - before
        if repeat is not None:
            assert done is out and launched == (not repeat.dense)
            assert repeat.dense or self.kept[self.log(LAST)] == (repeat.plan.choice.way, place)
            return True
        assert launched == 0
        number, planned = self.log(MADE), (self, self.plan, self.counts)
        given: Any = ((x,), self.value, (out, out), planned, lambda: None)
        self.repeats.keep(*given)
        if self.log(MADE) > number:
            self.kept[self.log(MADE)] = self.plan.choice.way, place
        return False


@pytest.fixture
def runs(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Runs:
    without_streams(monkeypatch)
    unplanned: Any = None
    repeats = CudaRepeats(KernelCache(tmp_path), print, unplanned)
    made = Runs(module, repeats)
    repeats._planner = made  # type: ignore[assignment]
    return made


def places(number: int) -> list[Any]:
    """So many tensors of one shape, each at an address of its own."""
    memory = torch.zeros(number, 64)
    return [row[:8].reshape(4, 2) for row in memory]


def test_graphs_of_every_way_are_kept(runs: Runs) -> None:
    (x,), out, made = places(1), torch.zeros(3, 5), []
    for turn in range(40):
        way = WAYS[turn % len(WAYS)]
        for part in range(4):  # other counts of the same way
            runs.plan = Plan(way._replace(cost_us=float(part)))
            for _ in range(PERIOD):
                runs.run(x, out)
        made.append(len(runs.kept))
    # Each was recorded once; a change of plan is seen in the call that looks at it.
    assert made[: len(WAYS)] == [1, 2, 3] and made[-1] == len(WAYS)
    before = runs.log(MADE), runs.log(DROPPED)
    assert all(runs.run(x, out) for _ in range(10 * PERIOD))
    assert (runs.log(MADE), runs.log(DROPPED)) == before


def test_layers_that_share_an_operator_keep_their_graphs(runs: Runs) -> None:
    layers, out = places(96), torch.zeros(3, 5)
    for _ in range(2 * OFTEN):
        for x in layers:
            runs.run(x, out)
    dropped = runs.log(DROPPED)
    for turn in range(6):
        runs.plan = Plan(WAYS[0]._replace(cost_us=float(turn)))
        assert sum(runs.run(x, out) for x in layers) > 0.9 * len(layers)
    assert runs.log(DROPPED) == dropped


def test_more_layers_than_places_leave_graphs_to_those_that_have_them(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_repeat, "_TRIALS", 1 << 20)  # all are looked for
    layers, out = places(2 * GRAPHS), torch.zeros(3, 5)
    for _ in range(4 * OFTEN):
        for x in layers:
            runs.run(x, out)
    number = runs.log(MADE)
    found = [sum(runs.run(x, out) for x in layers) for _ in range(5)]
    assert min(found) == max(found) and 0.5 * GRAPHS < found[0] <= GRAPHS
    assert runs.log(MADE) - number < 2 * MOST_FAILURES


def test_addresses_that_come_no_more_give_their_graphs_up(runs: Runs) -> None:
    out = torch.zeros(3, 5)
    for x in places(3 * GRAPHS):
        for _ in range(2 * OFTEN + 2):
            runs.run(x, out)
        assert runs.run(x, out)  # whatever was at its place before
    gc.collect()  # what other tests left
    table, dropped = runs.repeats._threads.table, runs.log(DROPPED)
    number = sum(graph.made is not None for graph in table.calls[0].graphs)
    assert 0.9 * GRAPHS < number <= GRAPHS
    runs.repeats._threads.table = cuda_repeat._Table()
    del table
    gc.collect()
    assert runs.log(DROPPED) - dropped == number


@pytest.mark.parametrize("seed", range(4))
def test_what_is_launched_is_of_the_plan_and_the_addresses(runs: Runs, seed: int) -> None:
    rng, outs = random.Random(seed), [torch.zeros(3, 5) for _ in range(2)]
    layers = places(rng.choice((1, 3, 40)))
    done = 0
    for _ in range(3000):
        if rng.random() < 0.05:
            runs.plan = Plan(rng.choice((*WAYS, DENSE))._replace(cost_us=rng.random()))
        runs.waits = rng.random() < 0.3
        done += runs.run(rng.choice(layers), rng.choice(outs))
    assert done > 300 and runs.kept
