"""Calls that are like one before: what compiled code takes for the same, and what it launches."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.runtime import cuda_repeat
from pit_tvm.runtime import cuda_repeat_code as code
from pit_tvm.runtime.cuda_repeat import MOST, MOST_BYTES, CudaRepeats
from pit_tvm.runtime.cuda_repeat_code import BEGIN, COUNT, DUE, END, MOST_WORDS, NONE, OTHERS, WORDS
from pit_tvm.runtime.cuda_watch import PERIOD
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, MicroTile, Plan

torch = pytest.importorskip("torch")
FakeTensorMode: Any = pytest.importorskip("torch._subclasses").FakeTensorMode


def words(look: Any, *tensors: Any) -> bytes | None:
    memory = (ctypes.c_int64 * MOST_WORDS)()
    size = look(ctypes.addressof(memory), WORDS, *tensors)
    return bytes(memory)[: 8 * size] if size > 0 else None


def aligned(*shape: int, dtype: Any = torch.float16) -> Any:
    made = torch.zeros(*shape, dtype=dtype)
    assert made.data_ptr() % 32 == 0
    return made


def test_calls_are_known_by_shapes_types_and_what_addresses_decide(look: Any) -> None:
    ids, x, w, out = aligned(8, dtype=torch.int32), aligned(8, 16), aligned(4, 16), aligned(8, 4)
    known = words(look, ids, x, w, out)
    assert known is not None
    others = (aligned(8, dtype=torch.int32), aligned(8, 16), torch.nn.Parameter(w), aligned(8, 4))
    assert words(look, *others) == known
    different = [
        (ids.long(), x, w, out),
        (ids, aligned(9, 16), w, out),
        (ids, x.bfloat16(), w, out),
        (ids, aligned(129)[1:].view(8, 16), w, out),
        (ids, x[:, :, None], w, out),
        (None, x, w, out),
        (ids, aligned(128 + 8)[8:].view(8, 16), w, out),
        (ids, aligned(16, 8).t(), w, out),
        (ids, x, w, None),
        (ids, x, w),
    ]
    found = [words(look, *tensors) for tensors in different]
    assert None not in found and len({known, *found}) == 1 + len(different)


def test_what_is_not_contiguous_or_shares_memory_is_like_nothing(look: Any) -> None:
    ids, x, out = aligned(8, dtype=torch.int32), aligned(8, 16), aligned(8, 16)
    assert words(look, ids, aligned(16, 16)[:, :8], out) is None
    assert words(look, ids, aligned(2, 8, 16).transpose(0, 1), out) is None
    assert words(look, ids, x, x) is None
    assert words(look, ids, aligned(16, 16)[:8], aligned(1, 16)) is not None
    both = aligned(16, 16)
    assert words(look, ids, both[:9], both[8:]) is None
    assert words(look, ids, both[:8], both[8:]) is not None
    assert words(look, ids, both[:9], both[8:], out) is None
    known = words(look, ids, both[:8], both[8:], out)
    assert known == words(look, ids, x, aligned(8, 16), out)
    assert known != words(look, ids, x, x, out) != words(look, ids, ids, x, out)
    assert words(look, "ids", x, out) is None
    assert words(look, ids, torch.zeros(0, 16).half(), out) is not None
    assert words(look, *[x] * code.MOST_TENSORS, out) is None


@pytest.mark.filterwarnings("ignore")  # torch warns of the address
def test_what_has_no_memory_is_like_nothing(look: Any) -> None:
    ids, x, out = aligned(8, dtype=torch.int32), aligned(8, 16), aligned(8, 16)
    for place in range(3):
        given = [ids, x, out]
        with FakeTensorMode():
            given[place] = torch.empty(given[place].shape, dtype=given[place].dtype)
        assert words(look, *given) is None


class Call:
    """A call as `CudaRepeats` needs it: with its device, its watch, and what plans it."""

    device = 0

    def __init__(self, output: tuple[int, ...], plan: Any) -> None:
        self.layout = self.watch = self
        self.output, self.plan, self.waits = output, plan, False
        self.passed, self.looked, self.reported = 0, 0, list[Any]()

    def pass_by(self) -> None:
        self.passed += 1

    def report(self, counts: Any, write: Any) -> None:
        self.reported.append(counts)
        self.waits = True


class Planner:
    """What a call runs is what it says."""

    def plan_of(self, call: Any) -> Any:
        call.looked += 1
        return call.plan


@pytest.fixture
def repeats(look: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> CudaRepeats:
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    made = CudaRepeats(KernelCache(tmp_path), print, planner())
    made.look = look
    return made


def planner() -> Any:
    """A planner for `CudaRepeats`."""
    return Planner()


def keep(
    repeats: CudaRepeats, given: Any, value: Any, out: Any, kind: str = "dense", new: bool = False
) -> Any:
    """Keep a call, twice, of a plan that is returned."""
    plan: Any = Plan(Candidate(kind, None, None, 1.0))
    call: Any = Call(tuple(out.shape), plan)
    for _ in range(2):
        repeats.keep((given,), value, (None if new else out, out), (call, plan, None), lambda: None)
    return plan


def test_a_dense_product_is_left_to_the_caller(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    assert repeats.run((x,), value, out) == (out, None)
    plan = keep(repeats, x, value, out)
    x2, out2 = aligned(4, 2), aligned(3, 5)
    done, found = repeats.run((x2,), aligned(4, 2), out2)
    assert done is out2 and found and found.plan is plan and found.dense
    counted: Any = found.call
    assert counted.passed == 1
    assert repeats.run((aligned(5, 2),), value, out)[1] is None
    assert repeats.run((x.numpy(),), object(), out)[1] is None
    assert repeats.run((x,), value, None)[1] is None  # another kind of call
    counted.plan = Plan(Candidate("pit", None, None, 1.0))
    for _ in range(2 * PERIOD):  # it is looked at now and then
        repeats.run((x,), value, out)
    assert repeats.run((x,), value, out)[1] is None
    other = keep(repeats, x, value, out)
    found = repeats.run((x,), value, out)[1]
    assert found and found.plan is other


def test_now_and_then_a_call_goes_the_long_way(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    keep(repeats, x, value, out)
    found = [repeats.run((x,), value, out)[1] is None for _ in range(3 * PERIOD)]
    assert found == [i % PERIOD == PERIOD - 1 for i in range(3 * PERIOD)]


def test_a_call_that_went_the_long_way_is_looked_at(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    keep(repeats, x, value, out)
    found = repeats.run((x,), value, out)[1]
    call: Any = found and found.call
    assert call.looked == 1 and repeats.run((x,), value, out)[1] and call.looked == 1
    repeats.keep((x,), value, (out, out), (call, call.plan, None), lambda: None)
    assert repeats.run((x,), value, out)[1] and call.looked == 2


def test_counts_that_a_graph_writes_are_reported_without_a_detour(repeats: CudaRepeats) -> None:
    value, x, out, counts = aligned(4, 2), aligned(4, 2), aligned(3, 5), aligned(1)
    plan = Plan(Candidate("dense", None, None, 1.0))
    call: Any = Call((3, 5), plan)
    repeats.keep((x,), value, (out, out), (call, plan, counts), lambda: None)

    def calls(number: int) -> tuple[int, int]:
        """How many of so many were looked at, and how many reported."""
        before = call.looked, len(call.reported)
        assert all(repeats.run((x,), value, out)[1] for _ in range(number))
        return call.looked - before[0], len(call.reported) - before[1]

    assert calls(1) == (1, 1)
    assert calls(5) == (5, 0)  # as long as it is away
    call.waits = False
    assert calls(1) == (1, 1)
    call.waits = False
    call.report = lambda counts, write: call.reported.append(counts)  # arrives at once
    assert calls(1) == (1, 1)
    assert calls(PERIOD - 1) == (0, 0)
    assert calls(3 * PERIOD) == (3, 3)
    assert call.reported == [counts] * 6 and not call.passed


def test_a_plan_that_holds_no_longer_is_forgotten(repeats: CudaRepeats) -> None:
    value, x, out, counts = aligned(4, 2), aligned(4, 2), aligned(3, 5), aligned(1)
    plan = Plan(Candidate("dense", None, None, 1.0))
    call: Any = Call((3, 5), plan)
    repeats.keep((x,), value, (out, out), (call, plan, counts), lambda: None)
    assert repeats.run((x,), value, out)[1]
    call.waits, call.plan = False, Plan(Candidate("pit", None, None, 1.0))
    ran = repeats.run((x,), value, out)[1]
    assert ran and ran.plan is plan  # what it ran was right
    assert repeats.run((x,), value, out)[1] is None and len(call.reported) == 1


def test_a_call_that_runs_in_turn_in_several_ways_is_known_in_each(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    micro_tiles = [MicroTile("lhs", axis, 0, (1, 64)) for axis in "mk"]
    ways = [Plan(Candidate("dense", tile, None, 1.0)) for tile in (None, *micro_tiles)]
    call: Any = Call((3, 5), ways[0])
    table, known = repeats._threads.table, {}

    def keep_it(plan: Plan) -> None:
        """The long way, after the call was forgotten."""
        call.plan = plan
        repeats.keep((x,), value, (out, out), (call, plan, aligned(1)), lambda: None)
        found = repeats.run((x,), value, out)[1]
        assert found and found.plan is plan
        pair = table.calls[0], found.counts
        assert known.setdefault(plan.choice.way, pair) == pair

    for plan in (*ways, *ways):
        keep_it(plan)
        call.waits, call.plan = False, Plan(Candidate("none", None, None, 1.0))
        assert repeats.run((x,), value, out)[1]  # what it ran was right
        assert repeats.run((x,), value, out)[1] is None
    keep_it(ways[1])
    for at in (0, 2, 1, 1, 0, 2):
        call.waits, call.plan = False, replace(ways[at], reason=f"other counts: {at}")
        for _ in range(2 * PERIOD):
            assert repeats.run((x,), value, out)[1]
            call.waits = False
        found = repeats.run((x,), value, out)[1]
        assert found and found.plan is call.plan and len(table.repeats) == len(table.ways) == 1
        assert (table.calls[0], found.counts) == known[found.plan.choice.way]
        assert len(table.ways[0]) == len(ways) - 1 and table.memory[2] == table.calls[0].address


def test_a_plan_that_runs_the_same_replaces_the_one_before(repeats: CudaRepeats) -> None:
    value, x, out, counts = aligned(4, 2), aligned(4, 2), aligned(3, 5), aligned(1)
    plans = [Plan(Candidate("dense", None, None, cost)) for cost in (1.0, 2.0, 3.0)]
    call: Any = Call((3, 5), plans[0])
    repeats.keep((x,), value, (out, out), (call, plans[0], counts), lambda: None)
    for plan in plans[1:]:
        assert repeats.run((x,), value, out)[1]
        call.waits, call.plan = False, plan
        assert repeats.run((x,), value, out)[1]  # it is looked at behind what ran
        for _ in range(2 * PERIOD):
            found = repeats.run((x,), value, out)[1]
            assert found and found.plan is plan and found.counts is counts
    assert len(call.reported) > 2


class Scripted:
    """Compiled code that finds what it is told to find; notes what it was given."""

    def __init__(self, *found: int) -> None:
        self.found, self.given = list(found), list[Any]()

    def __call__(self, table: int, guess: int, *given: Any) -> int:
        self.given.append((guess, *given))
        return self.found.pop(0)


def test_an_output_is_made_for_the_call_that_it_is_of(repeats: CudaRepeats) -> None:
    value, x = aligned(4, 2), aligned(4, 2)
    plans = [keep(repeats, x, value, aligned(3, 5), "pit", new=True)]
    plans.append(keep(repeats, aligned(9, 2), value, aligned(6, 5), "pit", new=True))
    found = (OTHERS, 0, 0, OTHERS - 1, 1, DUE + 1, OTHERS, DUE, NONE)
    script: Any = Scripted(*found)
    repeats.look = script
    outs = []
    for number in (0, 0, 1, 1, 0):
        made, repeat = repeats.run((x,), value, None)
        assert repeat and repeat.plan is plans[number]
        assert made.shape == ((3, 5), (6, 5))[number] and made.dtype == x.dtype
        outs.append(made)
    assert len({made.data_ptr() for made in outs}) == len(outs)
    assert repeats.run((x,), value, None) == (None, None) and not script.found
    guesses = [(guess, given[-1]) for guess, *given in script.given]
    assert [guess for guess, _ in guesses] == [NONE, 0, 0, 0, 1, 1, 1, 0, 0]
    again = {1: 0, 4: 2, 7: 4}  # the tensor behind the input is the output
    assert all(script.given[at][1:] == (2, outs[made]) for at, made in again.items())
    assert guesses[2][1] is outs[1] and guesses[5][1] is outs[3]


def test_outputs_of_dense_products_are_left_to_the_caller(repeats: CudaRepeats) -> None:
    value, x = aligned(4, 2), aligned(4, 2)
    plan = keep(repeats, x, value, aligned(3, 5), new=True)
    keep(repeats, aligned(9, 2), value, aligned(6, 5), "pit", new=True)
    table = repeats._threads.table
    for guess in (NONE, 1, 1):  # the last call that made its output was another one
        table.guess = guess
        made, found = repeats.run((x,), value, None)
        assert made is None and found and found.plan is plan and found.dense
        out = aligned(3, 5)
        assert repeats.run((x,), value, out)[1] is None  # another kind of call
    keep(repeats, x, value, out)
    made, found = repeats.run((x,), value, out)
    assert made is out and found and found.dense


def test_other_calls_need_a_graph(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    for new in (False, True):
        keep(repeats, x, value, out, "pit", new=new)
        assert repeats.run((x,), value, None if new else out)[1] is None


def test_threads_and_captured_graphs_repeat_nothing_of_others(
    repeats: CudaRepeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    plan = keep(repeats, x, value, out)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(repeats.run((x,), value, out)[1]))
    other.start()
    other.join()
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: True)
    keep(repeats, aligned(9, 2), value, out)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    found += [repeats.run(((x,), (aligned(9, 2),))[i], value, out)[1] for i in (0, 1)]
    assert found[0] is found[2] is None and found[1].plan is plan


def test_a_full_table_starts_again(repeats: CudaRepeats) -> None:
    value, out = aligned(4, 2), aligned(3, 5)
    inputs = [aligned(1 + i, 2) for i in range(MOST + 1)]
    known = [keep(repeats, x, value, out) for x in inputs]
    found = [repeats.run((x,), value, out)[1] for x in inputs]
    assert found[:-1] == [None] * MOST and found[-1] and found[-1].plan is known[-1]


class Recorder:
    """Compiled code that asks for a recording of every call that it knows; notes what follows."""

    def __init__(self, look: Any) -> None:
        self.look, self.ended = look, []

    def __call__(self, first: int, asked: Any, *given: Any) -> int:
        if asked == BEGIN:
            return 77
        if asked == END:
            self.ended.append(given[0])
            return int(given[0])
        found: int = self.look(first, asked, *given)
        return 0 if asked == COUNT and found == OTHERS else found


@pytest.mark.parametrize(
    ("size", "fault", "rehearsed", "ended"),
    [
        (100, None, False, [True]),
        (MOST_BYTES + 1, None, False, [False]),
        (100, RuntimeError("not while a stream is captured"), False, [False]),
        (100, None, True, []),
    ],
)
def test_a_recorded_call_keeps_its_memory(
    repeats: CudaRepeats,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    fault: Any,
    rehearsed: bool,
    ended: list[bool],
) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    plan = Plan(Candidate("pit", None, None, 1.0))
    call = Call((3, 5), plan)
    given: Any = ((x,), value, (out, out), (call, plan, None))
    repeats.keep(*given, lambda: None)
    found = SimpleNamespace(memory=[], is_complete=lambda most: size <= most)
    streams: list[int] = []

    @contextlib.contextmanager
    def recording(stream: int, before: Any) -> Any:
        assert before is None
        streams.append(stream)
        yield found

    def again() -> None:
        found.memory.append(out)
        if fault is not None:
            raise fault

    recorder = Recorder(repeats.look)
    repeats.look = recorder
    monkeypatch.setattr(cuda_repeat, "recording", recording)
    monkeypatch.setattr(cuda_repeat, "is_rehearsed", lambda: rehearsed)
    later = Plan(Candidate("pit", None, None, 2.0))  # of other counts
    repeats.keep(*given[:3], (call, later, None), again)
    assert recorder.ended == ended and streams == [77] * len(ended)
    (known,) = repeats._threads.table.calls
    assert known.recorded is (found if ended == [True] else None)
