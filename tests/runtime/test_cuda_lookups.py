"""Arrays of indices on a GPU: kernels stay inside of what they index, whatever the arrays hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tvm import te

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import ShapeError
from pit_tvm.runtime import cuda_build
from pit_tvm.structs import Rows
from tests.runtime.cuda_emulation import OnDevice
from tests.runtime.emulated import Machine

torch = pytest.importorskip("torch")

M, N, K, TABLE = 37, 64, 32, 9
H200 = "cuda -arch=sm_90a -model=h200"


def gather(dtype: str) -> list[te.Tensor]:
    """``out[m, n] = table[ids[m], n]``."""
    table = te.placeholder((te.var("rows"), N), "float32", "table")
    ids = te.placeholder((te.var("m"),), dtype, "ids")
    return [table, ids, te.compute((ids.shape[0], N), lambda m, n: table[ids[m], n], "out")]


def gather_afterwards(dtype: str) -> list[te.Tensor]:
    """``out[m, n] = (lhs @ rhs)[m, n] + table[ids[m], n]``."""
    lhs, rhs, product = op.matmul(te.var("m"), N, K)
    table = te.placeholder((te.var("rows"), N), "float32", "table")
    ids = te.placeholder((lhs.shape[0],), dtype, "ids")
    shape = product.shape
    out = te.compute(shape, lambda m, n: product[m, n] + table[ids[m], n], "out")
    return [lhs, rhs, table, ids, out]


def ids_of(dtype: str) -> np.ndarray:
    wide = np.iinfo(dtype)
    far = [TABLE, TABLE + 3, max(wide.min, -1), wide.max // 2**20, wide.max, wide.min]
    return np.resize(np.array([*range(TABLE), *far], object), M).astype(dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("build", "operand"), [(gather, "ids"), (gather_afterwards, "lhs")], ids=["plain", "epilogue"]
)
def test_indices_outside_read_the_nearest_row(
    build: Callable[[str], list[te.Tensor]],
    operand: str,
    dense: bool,
    dtype: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_build, "compile_source", machine.emulator.compile_source)
    case: Any = SimpleNamespace(tensors=build)
    made = machine.dispatcher(case, dtype, operand, Rows())
    rng = np.random.default_rng()
    given = {
        "lhs": rng.random((M, K), np.float32),
        "rhs": rng.random((K, N), np.float32),
        "table": rng.random((TABLE, N), np.float32),
        "ids": ids_of(dtype),
    }
    inputs = [given[p.name] for p in made.program.inputs]
    out, live = np.full((M, N), np.nan, np.float32), rng.permutation(M)[: M // 2]
    if dense:
        made._dense([OnDevice(array) for array in inputs], OnDevice(out))
        live = np.arange(M)
    else:
        made.run(inputs, live, out, choose=lambda plan: plan.choice)
    nearest = [min(max(int(i), 0), TABLE - 1) for i in given["ids"]]
    wanted = given["table"][nearest]
    if build is gather_afterwards:
        wanted = wanted + given["lhs"] @ given["rhs"]
    np.testing.assert_allclose(out[live], wanted[live], rtol=1e-5)


def binds(folder: Path) -> Callable[..., Any]:
    """What checks the arguments of a gather."""
    made = pit_tvm.compile(gather("int64"), sparse={"ids": Rows()}, target=H200, cache=folder)

    binder: Any = made._dispatcher.binder

    def bind(ids: list[int], rows: int = TABLE) -> Any:
        given = [torch.zeros(rows, N), torch.tensor(ids, dtype=torch.int64)]
        return binder.bind_cuda(given, torch.arange(2), None)

    return bind


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """As `binds`; tensors on the CPU pass for ones on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return binds(tmp_path)


@pytest.fixture
def asking(bind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """As `bind`, of an operator compiled with checks."""
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    return binds(tmp_path)


def test_nothing_can_be_read_of_an_empty_tensor(bind: Callable[..., Any]) -> None:
    with pytest.raises(ShapeError, match="table: dimension 0: expected at least 1 .* ids names"):
        bind([0, 0], rows=0)
    bind([], rows=0)


@pytest.mark.parametrize("ids", [[3, TABLE], [-1, 2]])
def test_indices_are_checked_where_that_is_asked_for(
    ids: list[int], bind: Callable[..., Any], asking: Callable[..., Any]
) -> None:
    bind(ids)
    for _ in range(2):  # whatever is known of such calls
        with pytest.raises(
            ShapeError, match=f"ids: expected indices of table from 0 to {TABLE - 1}"
        ):
            asking(ids)
        asking([0, TABLE - 1])
