"""Tensors without dense memory on a GPU: the typed errors of the CPU, in first and later calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.runtime import cuda_repeat
from pit_tvm.runtime.cuda_bind import CudaBinder
from pit_tvm.runtime.cuda_repeat import CudaRepeats
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from tests.api.test_foreign_tensors import nested, under_grad, under_vmap
from tests.runtime.test_cuda_repeat import keep, planner

torch = pytest.importorskip("torch")
FakeTensorMode: Any = pytest.importorskip("torch._subclasses").FakeTensorMode

M, N, K = 16, 8, 24
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


class Behind(torch.Tensor):  # type: ignore[misc, name-defined]
    """A tensor whose elements are another one's, as a distributed one's are."""

    @staticmethod
    def __new__(cls, shape: Any, dtype: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cuda:0")

    @classmethod
    def __torch_dispatch__(cls, func: Any, *given: Any, **named: Any) -> Any:
        raise AssertionError(f"nobody may ask for {func}")


def fake(tensor: Any) -> Any:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


# What is made of a tensor, and what is said of it.
TENSORS: dict[str, tuple[Callable[[Any], Any], type[PitError], str]] = {
    "fake": (fake, DTypeError, "a dense CUDA tensor, got FakeTensor"),
    "behind": (lambda x: Behind(x.shape, x.dtype), DTypeError, "a dense CUDA tensor, got Behind"),
    "negated": (torch._neg_view, ShapeError, "a plain tensor, got a negated view"),
    "zeros": (
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        DTypeError,
        "a dense CUDA tensor, got zeros without memory; pass .clone()",
    ),
    "nested": (lambda x: nested(x, torch.strided), DTypeError, "a dense .* got a nested tensor"),
    "jagged": (lambda x: nested(x, torch.jagged), DTypeError, "a dense .* got a nested tensor"),
    "sparse": (lambda x: x.to_sparse(), ShapeError, "a strided tensor, got torch.sparse_coo"),
}
MATRICES = ["lhs", "rhs", "out"]


@pytest.fixture
def binder(monkeypatch: pytest.MonkeyPatch) -> CudaBinder:
    """Of a product by rows; tensors on the CPU pass for ones on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return CudaBinder(analyse(op.matmul(None, N, K), {"lhs": pit_tvm.Rows()}), None)


def good() -> dict[str, Any]:
    """The arguments of a call that is fine."""
    lhs, rhs, out = torch.randn(M, K), torch.randn(K, N), torch.zeros(M, N)
    return {"lhs": lhs, "rhs": rhs, "sparsity": torch.arange(5), "out": out}


def bound(binder: CudaBinder, given: dict[str, Any]) -> None:
    lhs, rhs, sparsity, out = given.values()
    binder.bind_cuda((lhs, rhs), sparsity, out)


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name in TENSORS for place in MATRICES]
    + [(name, "sparsity") for name in ("fake", "behind", "negated", "zeros", "sparse")],
)
def test_tensors_without_dense_memory_are_refused(
    name: str, place: str, binder: CudaBinder
) -> None:
    make, error, says = TENSORS[name]
    given = good()
    bad = given | {place: make(given[place])}
    for _ in range(2):  # in the first call, and behind one that was fine
        with pytest.raises(error, match=f"^{place}: expected {says}"):
            bound(binder, bad)
        bound(binder, given)


@pytest.mark.parametrize(
    ("under", "place"),
    [(under_vmap, p) for p in (*MATRICES, "sparsity")] + [(under_grad, p) for p in MATRICES],
)
def test_tensors_that_torch_func_wraps_are_refused(
    under: Any, place: str, binder: CudaBinder
) -> None:
    given = good()

    def call(bad: Any) -> Any:
        with pytest.raises(DTypeError, match=f"^{place}: expected a dense CUDA .* of torch.func"):
            bound(binder, given | {place: bad})
        return bad.sum()

    for _ in range(2):
        under(call, given[place])
        bound(binder, given)


@pytest.mark.parametrize("place", ["lhs", "rhs", "sparsity"])
def test_tensors_without_memory_are_refused_before_an_output_is_made(
    place: str, binder: CudaBinder
) -> None:
    given = good() | {"out": None}
    bad = given | {place: TENSORS["behind"][0](given[place])}
    bound(binder, given)
    for _ in range(2):
        with pytest.raises(DTypeError, match=f"^{place}: expected a dense CUDA tensor, got Behind"):
            bound(binder, bad)


def test_empty_tensors_have_memory_enough(binder: CudaBinder) -> None:
    empty = {"lhs": torch.randn(0, K), "sparsity": torch.arange(0), "out": torch.zeros(0, N)}
    for _ in range(2):
        bound(binder, good() | empty)
        bound(binder, good() | empty | {"out": None})


def test_parameters_and_their_kin_pass(binder: CudaBinder) -> None:
    class Named(torch.Tensor):  # type: ignore[misc, name-defined]
        """A tensor of another class, with the same memory."""

    given = good()
    for made in (torch.nn.Parameter, lambda x: x.as_subclass(Named)):
        bound(binder, given | {"rhs": made(given["rhs"])})


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", ["fake", "behind", "negated", "zeros"])
def test_calls_with_tensors_without_dense_memory_repeat_nothing(
    name: str, place: int, monkeypatch: pytest.MonkeyPatch, kernel_folder: Path
) -> None:
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    repeats = CudaRepeats(KernelCache(kernel_folder), print, planner())
    given = [torch.zeros(4, 2, dtype=torch.float16) for _ in range(3)]
    value, x, out = given
    plan = keep(repeats, x, value, out)
    bad = list(given)
    bad[place] = TENSORS[name][0](given[place])
    assert repeats.run((bad[1],), bad[0], bad[2])[1] is None
    found = repeats.run((x,), value, out)[1]
    assert found and found.plan is plan
