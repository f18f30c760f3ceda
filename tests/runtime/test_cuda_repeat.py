"""Calls that are like one before: what compiled code takes for the same, and what it launches."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tvm_ffi

import pit_tvm
from pit_tvm import op
from pit_tvm.runtime import cuda_bind, cuda_detect, cuda_detect_ids, cuda_repeat, cuda_workspace
from pit_tvm.runtime.cuda_modules import CudaKernels
from pit_tvm.runtime.cuda_repeat import MOST, MOST_BYTES, CudaRepeats
from pit_tvm.runtime.cuda_repeat_code import BEGIN, COUNT, END, MOST_WORDS, NONE, OTHERS, WORDS
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.cuda_view import _Header
from pit_tvm.runtime.cuda_watch import PERIOD, CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, Plan

torch = pytest.importorskip("torch")
FakeTensorMode: Any = pytest.importorskip("torch._subclasses").FakeTensorMode

KINDS = ["lengths", "zeros", "rows", "groups"]  # zeros: lengths, with rows of zeros beside them
H200 = "cuda -arch=sm_90a -model=h200"
LINEAR: dict[str, Any] = {"dtype": "float16", "bias": True, "transpose_rhs": True}


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled code: it takes tensors of any device."""
    return CudaRepeats(KernelCache(tmp_path_factory.mktemp("kernels")), print).look


def words(look: Any, *tensors: Any) -> bytes | None:
    memory = (ctypes.c_int64 * MOST_WORDS)()
    size = look(ctypes.addressof(memory), WORDS, *tensors)
    return bytes(memory)[: 8 * size] if size > 0 else None


def aligned(*shape: int, dtype: Any = torch.float16) -> Any:
    made = torch.zeros(*shape, dtype=dtype)
    assert made.data_ptr() % 16 == 0
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
        (ids, x, w, None),
        (ids, x, w),
    ]
    found = [words(look, *tensors) for tensors in different]
    assert None not in found and len({known, *found}) == 1 + len(different)


def test_what_is_not_contiguous_or_shares_memory_is_like_nothing(look: Any) -> None:
    ids, x, out = aligned(8, dtype=torch.int32), aligned(8, 16), aligned(8, 16)
    assert words(look, ids, x.t(), out) is None
    assert words(look, ids, aligned(16, 16)[:, :8], out) is None
    assert words(look, ids, x, x) is None
    assert words(look, ids, aligned(16, 16)[:8], aligned(1, 16)) is not None
    both = aligned(16, 16)
    assert words(look, ids, both[:9], both[8:]) is None
    assert words(look, ids, both[:8], both[8:]) is not None
    assert words(look, "ids", x, out) is None
    assert words(look, ids, torch.zeros(0, 16).half(), out) is not None
    assert words(look, *[x] * 8, out) is None


@pytest.mark.filterwarnings("ignore")  # torch warns of the address
def test_what_has_no_memory_is_like_nothing(look: Any) -> None:
    ids, x, out = aligned(8, dtype=torch.int32), aligned(8, 16), aligned(8, 16)
    for place in range(3):
        given = [ids, x, out]
        with FakeTensorMode():
            given[place] = torch.empty(given[place].shape, dtype=given[place].dtype)
        assert words(look, *given) is None


class Call:
    """A call as `CudaRepeats` needs it."""

    def __init__(self, output: tuple[int, ...]) -> None:
        self.layout = self.watch = self
        self.output, self.passed, self.reported = output, 0, list[Any]()

    def pass_by(self) -> None:
        self.passed += 1

    def due(self) -> bool:
        return True

    def report(self, counts: Any, write: Any) -> None:
        self.reported.append(counts)


@pytest.fixture
def repeats(look: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> CudaRepeats:
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: False)
    made = CudaRepeats(KernelCache(tmp_path), print)
    made.look = look
    return made


def keep(
    repeats: CudaRepeats, given: Any, value: Any, out: Any, kind: str = "dense", new: bool = False
) -> Any:
    """Keep a call, twice, of a plan that is returned."""
    call: Any = Call(tuple(out.shape))
    plan: Any = Plan(Candidate(kind, None, None, 1.0))
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
    repeats.forget(found)
    assert repeats.run((x,), value, out)[1] is None
    other = keep(repeats, x, value, out)
    found = repeats.run((x,), value, out)[1]
    assert found and found.plan is other


def test_now_and_then_a_call_goes_the_long_way(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    keep(repeats, x, value, out)
    found = [repeats.run((x,), value, out)[1] is None for _ in range(3 * PERIOD)]
    assert found == [i % PERIOD == PERIOD - 1 for i in range(3 * PERIOD)]


def test_counts_that_a_graph_writes_are_reported_without_a_detour(repeats: CudaRepeats) -> None:
    value, x, out, counts = aligned(4, 2), aligned(4, 2), aligned(3, 5), aligned(1)
    call: Any = Call((3, 5))
    planned = (call, Plan(Candidate("dense", None, None, 1.0)), counts)
    repeats.keep((x,), value, (out, out), planned, lambda: None)
    assert all(repeats.run((x,), value, out)[1] for _ in range(2 * PERIOD))
    assert call.reported == [counts] * 2 * PERIOD and not call.passed


def test_an_output_is_made_for_the_call_that_it_is_of(repeats: CudaRepeats) -> None:
    value, x, y = aligned(4, 2), aligned(4, 2), aligned(9, 2)
    plans = [keep(repeats, x, value, aligned(3, 5), new=True)]
    plans.append(keep(repeats, y, value, aligned(6, 5), new=True))
    outs = []
    for number in (0, 0, 1, 0, 1, 1):
        made, found = repeats.run(((x, y)[number],), value, None)
        assert found and found.plan is plans[number]
        assert made.shape == ((3, 5), (6, 5))[number] and made.dtype == x.dtype
        outs.append(made)
    assert len({made.data_ptr() for made in outs}) == len(outs)
    assert repeats.run((aligned(2, 2),), value, None) == (None, None)
    assert repeats.run((x,), value, aligned(3, 5))[1] is None  # another kind of call


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
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: True)
    keep(repeats, aligned(9, 2), value, out)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: False)
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
            return 3 if given[0] else NONE
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
    call, plan = Call((3, 5)), Plan(Candidate("pit", None, None, 1.0))
    given: Any = ((x,), value, (out, out), (call, plan, None))
    repeats.keep(*given, lambda: None)
    found = SimpleNamespace(memory=[], is_complete=lambda most: size <= most)
    streams: list[int] = []

    @contextlib.contextmanager
    def recording(stream: int) -> Any:
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
    repeats.keep(*given, again)
    assert recorder.ended == ended and streams == [77] * len(ended)
    (known,) = repeats._table.calls
    assert known.memory == ({3: [out]} if ended == [True] else {})


# --------------------------------------------------------------------------------------------
# Operators


def pattern(kind: str, seed: int, device: str = "cpu") -> Any:
    """Lengths of 8 sequences of 16 rows, 48 of 128 row ids, or the group of each of 128 rows."""
    made = torch.Generator().manual_seed(seed)
    if kind in ("lengths", "zeros"):
        told = torch.randint(0, 17, (8,), generator=made)
    elif kind == "rows":
        told = torch.randperm(128, generator=made)[:48]
    else:
        told = torch.randint(0, 4, (128,), generator=made)
    return told.int().to(device)


def operator(kind: str, cache: Any = None) -> pit_tvm.Operator:
    target = H200 if cache is None else "cuda"
    if kind == "groups":
        tensors, spec = op.grouped_matmul(None, None, None, 4, **LINEAR), pit_tvm.Groups(4)
    else:
        tensors = op.matmul(None, None, None, **LINEAR)
        spec = pit_tvm.Rows() if kind == "rows" else pit_tvm.Lengths()
    dead = "zero" if kind == "zeros" else "skip"
    made = pit_tvm.compile(tensors, sparse={"lhs": spec}, target=target, cache=cache, dead=dead)
    planner: Any = made._dispatcher.planner
    planner._dense = lambda *sizes: None  # a product of all rows is no repeat
    return made


def operands(kind: str, device: str = "cpu") -> list[Any]:
    """lhs [128, 64], rhs [24, 64] and bias [24], both of each group with groups."""
    groups = (4,) if kind == "groups" else ()
    shapes = ((128, 64), (*groups, 24, 64), (*groups, 24))
    return [torch.randn(shape, device=device).half() for shape in shapes]


def arguments(made: pit_tvm.Operator, arrays: list[Any], told: Any) -> tuple[list[Any], Any]:
    """Positional arguments, and the pattern: group ids are an operand."""
    if "group_ids" not in made.inputs:
        return arrays, told
    return [told if n == "group_ids" else arrays.pop(0) for n in made.inputs], None


def noting(seen: list[Any]) -> Callable[[str], Any]:
    """``note(name)``: a compiled function that notes name, numbers, and addresses with shapes."""

    def noted(arg: Any) -> Any:
        if isinstance(arg, ctypes.c_void_p):  # a view
            view = _Header.from_address(arg.value or 0)
            return view.data, tuple(view.shape[: view.ndim])
        return (arg.data_ptr(), tuple(arg.shape)) if hasattr(arg, "data_ptr") else arg

    def note(name: str) -> Any:
        return tvm_ffi.convert(lambda *args: seen.append((name, *map(noted, args))))

    return note


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_launched_again_is_the_same(
    look: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seen: list[Any] = []
    note = noting(seen)
    monkeypatch.setattr(CudaKernels, "slices", lambda self, name: note(name))
    monkeypatch.setattr(RowsKernels, "product", lambda *given, **options: note("product"))
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(CudaRepeats, "look", look)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: False)
    monkeypatch.setattr(cuda_workspace, "stream_of", lambda device: 0)
    for module in (cuda_bind, cuda_detect, cuda_detect_ids):
        monkeypatch.setattr(module, "check_tensor", lambda *given, **options: None)
    made, outs = operator(kind), []
    for call in range(4):
        given, told = arguments(made, operands(kind), pattern(kind, call))
        outs.append(made(*given, sparsity=told, out=aligned(128, 24)))
    kept: list[Any] = []
    monkeypatch.setattr(CudaRepeats, "keep", lambda self, *given: kept.extend(given))
    made(*given, sparsity=told, out=outs[-1])
    names = [name for name, *_ in seen]
    assert len(seen) == 10 and set(names[1::2]) == {"product"} and len(set(names[::2])) == 1
    *_, (_, _, counts), again = kept
    again()
    assert seen[8:10] == seen[10:] == seen[6:8]
    where = [arg for _, *args in seen[-2:] for arg in args if isinstance(arg, tuple)]
    tensors = {t.data_ptr() for t in (*given, told, outs[-1]) if t is not None}
    assert {address for address, _ in where} >= tensors
    index = [arg for arg in where if arg[0] not in tensors]
    number = 4 if kind == "zeros" else 2  # memory of lists
    assert index[:number] == index[number:] and len(index) == 2 * number
    assert index[1] == (counts.data_ptr(), tuple(counts.shape))


@pytest.mark.parametrize("fresh", [False, True])
def test_operators_repeat_dense_products_without_another_look(
    look: Any, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(CudaRepeats, "look", look)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: False)
    monkeypatch.setattr(cuda_bind, "check_tensor", lambda *given, **options: None)
    tensors, sparse = op.matmul(None, None, None, **LINEAR), {"lhs": pit_tvm.Mask(1, 64)}
    made = pit_tvm.compile(tensors, sparse=sparse, target=H200)
    planner: Any = made._dispatcher.planner
    binder: Any = made._dispatcher.binder
    plan, bind, bound = planner.plan, binder.bind_cuda, []

    def dense(*given: Any) -> Any:
        found = plan(*given)
        return replace(found, choice=next(c for c in found.candidates if c.kind == "dense"))

    planner.plan = dense
    binder.bind_cuda = lambda *given: bound.append(given) or bind(*given)
    mask = torch.ones(128, 64, dtype=torch.bool)
    for _ in range(4):
        lhs, rhs, bias = operands("lengths")
        out = None if fresh else torch.full((128, 24), torch.nan).half()
        found = made(lhs, rhs, bias, sparsity=mask, out=out)
        want = lhs.double() @ rhs.double().T + bias.double()
        assert (found.double() - want).abs().max() < 2e-3 * want.abs().max()
        assert fresh or found is out
    assert len(bound) == 2  # the first one does not know its tensors yet
