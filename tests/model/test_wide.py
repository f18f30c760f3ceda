"""Operators of 16-bit types: computed in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from pit_tvm.model.lowered import lower
from pit_tvm.model.lowering import build
from pit_tvm.model.wide import is_widened, widen
from pit_tvm.runtime.arrays import as_torch
from pit_tvm.target import resolve_target
from tests.model.graphs import B, T, calls, graph, last_call, names

op = relax.op
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
functional = torch.nn.functional


def constant(dtype: str, *shape: int) -> relax.Expr:
    """Small positive numbers."""
    values = np.random.default_rng(1).uniform(0.5, 1.5, shape).astype(DTYPES[dtype])
    return relax.const(values, dtype)


def run(module: tvm.IRModule, *arrays: np.ndarray) -> torch.Tensor:
    """The result of ``main``, in float64."""
    machine = relax.VirtualMachine(build(module, resolve_target("llvm")), tvm.cpu())
    given = [tvm.runtime.tensor(array) for array in arrays]
    return as_torch(machine["main"](*given)).double()


Case = tuple[Callable[..., Any], Callable[..., torch.Tensor]]
CASES: dict[str, Case] = {
    "layer_norm": (
        lambda x, d: op.nn.layer_norm(x, constant(d, 24), constant(d, 24), [-1], 1e-5),
        lambda x, c: functional.layer_norm(x, (24,), c(24), c(24), 1e-5),
    ),
    "rms_norm": (
        lambda x, d: op.nn.rms_norm(x, constant(d, 24), [-1], 1e-5),
        lambda x, c: functional.rms_norm(x, (24,), c(24), 1e-5),
    ),
    "softmax": (lambda x, d: op.nn.softmax(x, -1), lambda x, c: x.softmax(-1)),
    "gelu": (lambda x, d: op.nn.gelu(x), lambda x, c: functional.gelu(x)),
    "tanh": (lambda x, d: op.tanh(x), lambda x, c: x.tanh()),
    "mean": (lambda x, d: op.mean(x, [-1], True), lambda x, c: x.mean(-1, keepdim=True)),
    "sum": (lambda x, d: op.sum(x, [1]), lambda x, c: x.sum(1)),
    "matmul": (
        lambda x, d: op.matmul(x, constant(d, 24, 5)),
        lambda x, c: x @ c(24, 5),
    ),
    "divide by a number": (
        lambda x, d: op.divide(x, relax.const(3, d)),
        lambda x, c: x / 3,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_results_are_rounded_once(name: str, dtype: str) -> None:
    make, expected = CASES[name]
    module = graph(lambda x: make(x, dtype), x=(dtype, B, T, 24))
    x = np.random.default_rng(0).normal(size=(3, 7, 24)).astype(DTYPES[dtype])

    def double(*shape: int) -> torch.Tensor:
        return torch.from_numpy(constant(dtype, *shape).value.numpy().astype(np.float64))

    want = expected(torch.from_numpy(x.astype(np.float64)), double)
    found = run(module, x)
    assert found.shape == want.shape
    ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    # A little more than half a unit in the last place: sums are float32, not exact.
    torch.testing.assert_close(found, want, rtol=1.05 * ulp, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_other_types_stay_as_they_are(dtype: str) -> None:
    module = graph(lambda x: op.sum(op.add(x, x), [1]), x=(dtype, B, T, 4))
    assert [(c.op, str(c.ty)) for c in calls(widen(module))] == [
        (c.op, str(c.ty)) for c in calls(module)
    ]


def test_only_what_computes_is_widened() -> None:
    module = graph(lambda x: op.exp(op.reshape(op.add(x, x), [B, 4 * T])), x=("float16", B, T, 4))
    assert names(widen(module)) == ["add", "reshape", "astype", "exp", "astype"]
    assert [str(c.ty.dtype) for c in calls(widen(module))][-3:] == ["float32", "float32", "float16"]


def test_an_operator_that_names_its_type_keeps_it() -> None:
    module = graph(
        lambda x, y: op.matmul(x, y, out_dtype="float32"),
        x=("float16", B, 4),
        y=("float16", 4, 3),
    )
    assert str(calls(widen(module))[-1].ty.dtype) == "float32"


@pytest.mark.parametrize("dtype", DTYPES)
def test_loops_of_such_operators_can_be_looked_at(dtype: str) -> None:
    call = last_call(
        lambda x: op.nn.layer_norm(x, constant(dtype, 4), constant(dtype, 4), [-1]),
        x=(dtype, B, T, 4),
    )
    assert is_widened(call)
    found = lower(call)
    assert found is not None and len(found.operands) == 3
    assert [str(p.ty.dtype) for p in found.operands] == [dtype] * 3
