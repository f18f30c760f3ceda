"""Operators whose calls are repeated: what is launched again, and that it is the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tvm_ffi

import pit_tvm
from pit_tvm import op
from pit_tvm.runtime import cuda_bind, cuda_detect, cuda_detect_ids, cuda_repeat, cuda_workspace
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_fill import CudaFill
from pit_tvm.runtime.cuda_modules import CudaKernels
from pit_tvm.runtime.cuda_planner import CudaPlanner
from pit_tvm.runtime.cuda_repeat import CudaRepeats
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.dlpack import Header
from tests.runtime.test_cuda_repeat import aligned

torch = pytest.importorskip("torch")

KINDS = ["lengths", "zeros", "rows", "groups"]  # zeros: lengths, with rows of zeros beside them
H200 = "cuda -arch=sm_90a -model=h200"
LINEAR: dict[str, Any] = {"dtype": "float16", "bias": True, "transpose_rhs": True}


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


def operator(kind: str, cache: Any = None, *, dense: bool = False) -> pit_tvm.Operator:
    """Products of live rows; ``dense``: plans may choose that of all rows."""
    target = H200 if cache is None else "cuda"
    if kind == "groups":
        tensors, spec = op.grouped_matmul(None, None, None, 4, **LINEAR), pit_tvm.Groups(4)
    else:
        tensors = op.matmul(None, None, None, **LINEAR)
        spec = pit_tvm.Rows() if kind == "rows" else pit_tvm.Lengths()
    dead = "zero" if kind == "zeros" else "skip"
    made = pit_tvm.compile(tensors, sparse={"lhs": spec}, target=target, cache=cache, dead=dead)
    planner: Any = made._dispatcher.planner
    if not dense:
        planner._dense = lambda *sizes, **load: None
    return made


def run_dense(made: pit_tvm.Operator) -> None:
    """Let plans choose the dense product."""
    planner: Any = made._dispatcher.planner
    plan = planner.plan

    def dense(*given: Any) -> Any:
        found = plan(*given)
        return replace(found, choice=next(c for c in found.candidates if c.kind == "dense"))

    planner.plan = dense


def bindings(made: pit_tvm.Operator) -> list[Any]:
    """The arguments of the calls that go the long way, from now on."""
    binder: Any = made._dispatcher.binder
    bind, bound = binder.bind_cuda, list[Any]()
    binder.bind_cuda = lambda *given: bound.append(given) or bind(*given)
    return bound


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


@pytest.fixture
def on_host(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators for GPUs take tensors of the CPU, and report no counts."""
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(CudaRepeats, "look", look)
    monkeypatch.setattr(CountWatch, "report", lambda self, *given: None)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    monkeypatch.setattr(CudaPlanner, "hosted", lambda self, device: False)
    monkeypatch.setattr(cuda_bind, "check_tensor", lambda *given, **options: None)


def noting(seen: list[Any]) -> Callable[[str], Any]:
    """``note(name)``: a compiled function that notes name, numbers, and addresses with shapes."""

    def noted(arg: Any) -> Any:
        if isinstance(arg, ctypes.c_void_p):  # a view
            view = Header.from_address(arg.value or 0)
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
    monkeypatch.setattr(CountWatch, "report", lambda self, *given: None)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    monkeypatch.setattr(CudaPlanner, "hosted", lambda self, device: False)
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
def test_operators_repeat_dense_products_without_another_look(on_host: None, fresh: bool) -> None:
    tensors, sparse = op.matmul(None, None, None, **LINEAR), {"lhs": pit_tvm.Mask(1, 64)}
    made = pit_tvm.compile(tensors, sparse=sparse, target=H200)
    bound = bindings(made)
    run_dense(made)
    mask = torch.ones(128, 64, dtype=torch.bool)
    for _ in range(4):
        lhs, rhs, bias = operands("lengths")
        out = None if fresh else torch.full((128, 24), torch.nan).half()
        found = made(lhs, rhs, bias, sparsity=mask, out=out)
        want = lhs.double() @ rhs.double().T + bias.double()
        assert (found.double() - want).abs().max() < 2e-3 * want.abs().max()
        assert fresh or found is out
    assert len(bound) == 2  # the first one does not know its tensors yet


@pytest.mark.parametrize("fresh", [False, True])
def test_zeros_follow_dense_products_that_are_repeated(
    monkeypatch: pytest.MonkeyPatch, on_host: None, fresh: bool
) -> None:
    def dead(told: Any, take: Any) -> tuple[Any, Any]:
        return None, torch.nonzero((torch.arange(16) >= told[:, None]).flatten())[:, 0]

    def fill(self: Any, out: Any, rows: Any) -> None:
        out.index_fill_(0, rows, 0)

    monkeypatch.setattr(CudaDetector, "prepared", lambda *given: dead)
    monkeypatch.setattr(CudaFill, "fill_rows", fill)
    made = operator("zeros", dense=True)
    bound = bindings(made)
    run_dense(made)
    for call in range(5):
        given, told = operands("zeros"), pattern("zeros", call)
        lhs, rhs, bias = given
        out = None if fresh else torch.full((128, 24), torch.nan).half()
        found = made(*given, sparsity=told, out=out)
        want = lhs.double() @ rhs.double().T + bias.double()
        want[(torch.arange(16) >= told[:, None]).flatten()] = 0
        assert (found.double() - want).abs().max() < 2e-3 * want.abs().max()
        assert fresh or found is out
    assert len(bound) == 2


def test_what_was_recorded_holds_for_one_precision_of_float32(on_host: None) -> None:
    tensors = op.matmul(None, None, None, dtype="float32")
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Mask(32, 64)}, target=H200)
    planner: Any = made._dispatcher.planner
    bound, allowed = bindings(made), 0
    planner.tf32 = lambda: bool(allowed)
    run_dense(made)
    lhs, rhs, out = torch.randn(64, 64), torch.randn(64, 64), torch.zeros(64, 64)
    for allowed, number in (  # noqa: B007  (planner.tf32 reads it)
        (0, 1),
        (0, 2),
        (0, 2),
        (1, 3),
        (1, 3),
        (0, 3),
        (1, 3),
    ):
        made(lhs, rhs, sparsity=torch.ones(64, 64, dtype=torch.bool), out=out.fill_(torch.nan))
        assert torch.allclose(out, lhs @ rhs, atol=1e-4) and len(bound) == number
