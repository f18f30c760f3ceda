"""Calls that are like one before: what compiled code takes for the same, and what it launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tvm_ffi

import pit_tvm
from pit_tvm import op
from pit_tvm.runtime import cuda_bind, cuda_detect, cuda_detect_ids, cuda_repeat, cuda_workspace
from pit_tvm.runtime.cuda_modules import CudaKernels
from pit_tvm.runtime.cuda_repeat import MOST, CudaRepeats, Launch, Repeat
from pit_tvm.runtime.cuda_repeat_code import MOST_WORDS
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.cuda_view import CudaView
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache

torch = pytest.importorskip("torch")
FakeTensorMode: Any = pytest.importorskip("torch._subclasses").FakeTensorMode

CPU = 1
KINDS = ["lengths", "zeros", "rows", "groups"]  # zeros: lengths, with rows of zeros beside them
H200 = "cuda -arch=sm_90a -model=h200"
LINEAR: dict[str, Any] = {"dtype": "float16", "bias": True, "transpose_rhs": True}


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled code: it takes tensors of any device."""
    return CudaRepeats(KernelCache(tmp_path_factory.mktemp("kernels")), print).look


def words(look: Any, *tensors: Any) -> bytes | None:
    memory = (ctypes.c_int64 * MOST_WORDS)()
    size = look(0, ctypes.addressof(memory), *tensors)
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
        self.layout, self.watch, self.reported = self, self, 0
        self.output = output

    def due(self) -> bool:
        return True

    def report(self, count: Any, write: Any) -> None:
        self.reported += 1


@pytest.fixture
def repeats(look: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> CudaRepeats:
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: False)
    made = CudaRepeats(KernelCache(tmp_path), print)
    made.look = look
    return made


def noting(seen: list[Any]) -> Callable[[str], Any]:
    """``note(name)``: a compiled function that notes name, numbers, and addresses with shapes."""

    def noted(arg: Any) -> Any:
        return (arg.data_ptr(), tuple(arg.shape)) if hasattr(arg, "data_ptr") else arg

    def note(name: str) -> Any:
        return tvm_ffi.convert(lambda *args: seen.append((name, *map(noted, args))))

    return note


def recorded(seen: list[Any], like: Any, number: int, out: Any) -> Repeat:
    """A call whose launches note what they are given in ``seen``."""
    note = noting(seen)
    views = [view(tensor) for tensor in (like, out)]
    index: Any = Call(())
    index.count = None
    first = Launch(note("first"), ((0, view(like, (like.numel(),))), number, views[1]))
    second = Launch(note("second"), ((1, views[0]), views[0], (2, views[1])))
    call: Any = Call(tuple(out.shape))
    plan: Any = None
    return Repeat(call, plan, (first, second), (index, None), out.new_empty(0))


def view(tensor: Any, shape: tuple[int, ...] | None = None) -> CudaView:
    made = CudaView(tensor.data_ptr(), shape or tensor.shape, "float16", 0)
    made._header.device_type = CPU
    return made


def test_a_repeated_call_launches_the_same_at_other_addresses(repeats: CudaRepeats) -> None:
    seen: list[Any] = []
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    repeat = recorded(seen, x, 7, out)
    assert repeats.run((x,), value, out) == (out, None)
    repeats.keep((x,), value, out, repeat)
    value2, x2, out2 = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    done, found = repeats.run((x2,), value2, out2)
    assert done is out2 and found is repeat
    here, there = (x.data_ptr(), (4, 2)), (out.data_ptr(), (3, 5))
    assert seen == [
        ("first", (value2.data_ptr(), (8,)), 7, there),
        ("second", (x2.data_ptr(), (4, 2)), here, (out2.data_ptr(), (3, 5))),
    ]
    assert repeats.run((aligned(5, 2),), value, out)[1] is None
    assert repeats.run((x.numpy(),), object(), out)[1] is None
    repeats.forget(repeat)
    assert repeats.run((x,), value, out)[1] is None


def test_outputs_that_a_call_makes_are_new(repeats: CudaRepeats) -> None:
    seen: list[Any] = []
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    repeat = recorded(seen, x, 7, out)
    repeats.keep((x,), value, None, repeat)
    made, found = repeats.run((x,), value, None)
    assert made.shape == (3, 5) and made.dtype == x.dtype and found is repeat
    assert [name for name, *_ in seen] == ["first", "second"]
    assert seen[1][-1] == (made.data_ptr(), (3, 5))
    reported: Any = repeat.call
    assert reported.reported == 1
    assert repeats.run((x,), value, out)[1] is None  # another kind of call


def test_an_output_that_is_made_ahead_is_for_the_call_of_before_only(repeats: CudaRepeats) -> None:
    seen: list[Any] = []
    value, x, y = aligned(4, 2), aligned(4, 2), aligned(9, 2)
    known = {
        3: (x, recorded(seen, x, 3, aligned(3, 5))),
        7: (y, recorded(seen, y, 7, aligned(6, 5))),
    }
    for given, repeat in known.values():
        repeats.keep((given,), value, None, repeat)
    for number in (3, 3, 7, 3, 7, 7):
        seen.clear()
        given, repeat = known[number]
        made, found = repeats.run((given,), value, None)
        assert found is repeat and made.shape == repeat.call.layout.output
        assert [launch[-1][0] for launch in seen if launch[0] == "second"] == [made.data_ptr()]
    assert repeats.run((aligned(2, 2),), value, None) == (None, None)
    assert repeats.run((x,), value, None)[1] is known[3][1]


def test_a_dense_product_is_left_to_the_caller_unless_it_reports(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    dense = replace(recorded([], x, 7, out), launches=(), lists=None)
    call: Any = dense.call
    due = [False, False, True, False]
    call.due = lambda: due.pop(0)
    repeats.keep((x,), value, None, dense)
    found = [repeats.run((x,), value, None) for _ in range(4)]
    assert [repeat for _, repeat in found] == [dense, dense, None, dense]
    outs = [made for made, repeat in found if repeat]
    assert {made.shape for made in outs} == {(3, 5)}
    assert len({made.data_ptr() for made in outs}) == 3 and call.reported == 0


def test_threads_and_captured_graphs_repeat_nothing_of_others(
    repeats: CudaRepeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    repeat = recorded([], x, 7, out)
    repeats.keep((x,), value, out, repeat)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(repeats.run((x,), value, out)[1]))
    other.start()
    other.join()
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: True)
    repeats.keep((aligned(9, 2),), value, out, recorded([], x, 7, out))
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda: False)
    found += [repeats.run(((x,), (aligned(9, 2),))[i], value, out)[1] for i in (0, 1)]
    assert found == [None, repeat, None]


def test_a_full_table_starts_again(repeats: CudaRepeats) -> None:
    value, out = aligned(4, 2), aligned(3, 5)
    inputs = [aligned(1 + i, 2) for i in range(MOST + 1)]
    known = [recorded([], x, 7, out) for x in inputs]
    for x, repeat in zip(inputs, known, strict=True):
        repeats.keep((x,), value, out, repeat)
    found = [repeats.run((x,), value, out)[1] for x in inputs]
    assert found == [None] * MOST + [known[-1]]


def test_errors_of_a_launch_are_raised(repeats: CudaRepeats) -> None:
    value, x, out = aligned(4, 2), aligned(4, 2), aligned(3, 5)
    repeat = recorded([], x, 7, out)

    def broken(*args: Any) -> None:
        raise MemoryError("no room")

    launches = (repeat.launches[0], Launch(tvm_ffi.convert(broken), ()))
    repeats.keep((x,), value, out, replace(repeat, launches=launches))
    with pytest.raises(MemoryError, match="no room"):
        repeats.run((x,), value, out)


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


@pytest.mark.parametrize("kind", KINDS)
def test_operators_repeat_calls_from_the_third_on(
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
    names = [name for name, *_ in seen]
    assert len(seen) == 8 and set(names[1::2]) == {"product"} and len(set(names[::2])) == 1
    where = [arg for _, *args in seen[-2:] for arg in args if isinstance(arg, tuple)]
    tensors = {t.data_ptr() for t in (*given, told, outs[-1]) if t is not None}
    assert {address for address, _ in where} >= tensors
    index = [arg for arg in where if arg[0] not in tensors]
    number = 4 if kind == "zeros" else 2  # memory of lists
    assert index[:number] == index[number:] and len(index) == 2 * number
    assert made._dispatcher._repeats.run(given, told, outs[-1])[1] is not None
    monkeypatch.setattr(CountWatch, "counts", lambda self: (3,) * (4 if kind == "groups" else 1))
    made(*given, sparsity=told, out=outs[-1])  # by the plan of before, for the last time
    assert made._dispatcher._repeats.run(given, told, outs[-1])[1] is None


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
