"""torch tensors without dense memory on the CPU: a typed error that names the argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.structs import Mask, Rows
from tests.api.cases import MATMUL
from tests.api.running import compiled

M, N, K = 37, 29, 131


def nested(tensor: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor[0], tensor[1][:5]], layout=layout)


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


# What is made of a tensor, and what is said of it.
TENSORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], type[PitError], str]] = {
    "sparse": (lambda x: x.to_sparse(), ShapeError, "a strided tensor, got torch.sparse_coo"),
    "rows": (lambda x: x.to_sparse_csr(), ShapeError, "a strided tensor, got torch.sparse_csr"),
    "nested": (lambda x: nested(x, torch.strided), DTypeError, "a dense tensor .* nested tensor"),
    "jagged": (lambda x: nested(x, torch.jagged), DTypeError, "a dense tensor .* nested tensor"),
    "meta": (lambda x: x.to("meta"), DTypeError, "a tensor on the CPU, got meta"),
    "fake": (fake, DTypeError, "a dense tensor on the CPU, got FakeTensor; functions"),
}


def good() -> dict[str, Any]:
    """The arguments of a call that is fine."""
    lhs, rhs, out = torch.randn(M, K), torch.randn(K, N), torch.zeros(M, N)
    return {"lhs": lhs, "rhs": rhs, "sparsity": torch.ones(M, K, dtype=torch.bool), "out": out}


def refused(place: str, bad: torch.Tensor, error: type[PitError], says: str) -> None:
    """Refused alike in the first call and behind one that was fine."""
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    for _ in range(2):
        lhs, rhs, *named = (good() | {place: bad}).values()
        with pytest.raises(error, match=f"^{place}: expected {says}"):
            operator(lhs, rhs, sparsity=named[0], out=named[1])
        lhs, rhs, *named = good().values()
        operator(lhs, rhs, sparsity=named[0], out=named[1])


@pytest.mark.parametrize("place", ["lhs", "rhs", "sparsity", "out"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_without_dense_memory_are_refused(name: str, place: str) -> None:
    make, error, says = TENSORS[name]
    refused(place, make(good()[place]), error, says)


@pytest.mark.filterwarnings("ignore")  # torch warns of what becomes of quantized tensors
@pytest.mark.parametrize("place", ["lhs", "rhs", "out"])
def test_quantized_tensors_are_refused(place: str) -> None:
    bad = torch.quantize_per_tensor(good()[place], 0.1, 0, torch.qint8)
    refused(place, bad, DTypeError, "a dense tensor on the CPU, got a quantized tensor of .*qint8")


def under_vmap(call: Callable[[Any], Any], given: torch.Tensor) -> None:
    torch.vmap(call)(given[None])


def under_grad(call: Callable[[Any], Any], given: torch.Tensor) -> None:
    torch.func.grad(call)(given)


@pytest.mark.parametrize(
    ("under", "place"),
    [(under_vmap, p) for p in ("lhs", "rhs", "sparsity", "out")]
    + [(under_grad, p) for p in ("lhs", "rhs", "out")],
)
def test_tensors_that_torch_func_wraps_are_refused(under: Any, place: str) -> None:
    operator, given = compiled(MATMUL, "float32", "lhs", Mask()), good()

    def call(bad: torch.Tensor) -> torch.Tensor:
        lhs, rhs, *named = (given | {place: bad}).values()
        with pytest.raises(DTypeError, match=f"^{place}: expected a dense .* tensor of torch.func"):
            operator(lhs, rhs, sparsity=named[0], out=named[1])
        return bad.sum()

    for _ in range(2):
        under(call, given[place])
        lhs, rhs, *named = given.values()
        operator(lhs, rhs, sparsity=named[0], out=named[1])


def test_ids_that_torch_func_wraps_are_refused() -> None:
    operator = compiled(MATMUL, "float32", "lhs", Rows(0))
    lhs, rhs, *_ = good().values()
    ids = torch.arange(3)
    for _ in range(2):
        with pytest.raises(DTypeError, match="^sparsity: expected a dense .* tensor of torch.func"):
            under_vmap(lambda x: operator(lhs, rhs, sparsity=x), ids)
        operator(lhs, rhs, sparsity=ids)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_ids_are_refused(layout: torch.layout) -> None:
    operator = compiled(MATMUL, "float32", "lhs", Rows(0))
    lhs, rhs, *_ = good().values()
    ids = torch.arange(12).reshape(2, 6)
    for _ in range(2):
        with pytest.raises(DTypeError, match="^sparsity: expected a dense .*, got a nested tensor"):
            operator(lhs, rhs, sparsity=nested(ids, layout))
        operator(lhs, rhs, sparsity=ids[0])


def test_ids_of_types_that_numpy_lacks_are_refused() -> None:
    operator = compiled(MATMUL, "float32", "lhs", Rows(0))
    lhs, rhs, *_ = good().values()
    ids = torch.zeros(3, dtype=torch.float8_e5m2)
    with pytest.raises(DTypeError, match=r"^sparsity: expected a type that numpy has, got torch\."):
        operator(lhs, rhs, sparsity=ids)


def test_torch_compile_calls_an_operator_between_graphs() -> None:
    operator, given = compiled(MATMUL, "float32", "lhs", Mask()), good()
    expected = given["lhs"] @ given["rhs"] * 2

    def twice(lhs: torch.Tensor, rhs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return operator(lhs, rhs, sparsity=mask) * 2

    arrays = given["lhs"], given["rhs"], given["sparsity"]
    found = torch.compile(twice, backend="eager")(*arrays)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"functions of pit_tvm\.torch"):
        torch.compile(twice, backend="eager", fullgraph=True)(*arrays)
