"""What stands between products of experts: sizes that kernels take, and what they are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.errors import ScheduleError, ShapeError
from pit_tvm.runtime import cuda_between
from pit_tvm.runtime.cuda_between import CudaBetween
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_activate import activate_rows
from pit_tvm.schedules.hopper_gate import gate_rows
from pit_tvm.schedules.hopper_spread import spread_rows
from pit_tvm.structs import Rows
from tests.schedules.cuda_text import cuda_text

torch = pytest.importorskip("torch")

TOKENS, TOP_K, WIDTH = 6, 2, 64


@pytest.fixture
def given() -> list[tuple[Any, ...]]:
    """The arguments of kernels, which do not run."""
    return []


@pytest.fixture
def between(given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> CudaBetween:
    """Takes the CPU's tensors."""
    monkeypatch.setattr(cuda_between, "check_tensor", lambda *given: None)
    made = CudaBetween(KernelCache(), "sm_90a")
    lists = SimpleNamespace(ids=None, count=None)
    detector = SimpleNamespace(
        detect=lambda *a, **how: lists, detect_split=lambda *a, **how: (lists, lists)
    )
    monkeypatch.setattr(made, "_detector", detector)
    monkeypatch.setattr(made, "_get", lambda key, make: lambda *arrays: given.append(arrays))
    return made


def beside(*shape: int) -> Any:
    """Zeros that begin 2 bytes behind a multiple of 16."""
    made = torch.zeros(8 + torch.Size(shape).numel()).half()
    skip = -made.data_ptr() % 16 // 2 + 1
    return made[skip : skip + torch.Size(shape).numel()].view(shape)


def test_kernels_read_operands_that_begin_at_16_bytes(
    between: CudaBetween, given: list[tuple[Any, ...]]
) -> None:
    rows, pairs = beside(TOKENS, TOP_K, WIDTH), beside(TOKENS, 2 * WIDTH)
    ids, weights = torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.ones(TOKENS, TOP_K)
    shapes = [
        between.total(rows).shape,
        between.combine(rows, weights, ids).shape,
        between.gate(pairs, "silu").shape,
        between.gate_gradient(pairs, beside(TOKENS, WIDTH), "silu").shape,
        *(each.shape for each in between.spread(rows, weights, ids, beside(TOKENS, WIDTH))),
        between.activate(beside(TOKENS, WIDTH), Rows(), ids, "silu").shape,
        between.activate_gradient(pairs, beside(*pairs.shape), Rows(), ids, "silu").shape,
    ]
    assert shapes == [
        *[(TOKENS, WIDTH)] * 3,
        (TOKENS, 2 * WIDTH),
        (TOKENS, TOP_K, WIDTH),
        (TOKENS, TOP_K),
        (TOKENS, WIDTH),
        (TOKENS, 2 * WIDTH),
    ]
    halves = [
        array for arrays in given for array in arrays if getattr(array, "dtype", 0) == torch.half
    ]
    assert len(given) == 7 and not [each for each in halves if each.data_ptr() % 16]


def test_nothing_takes_no_kernel(between: CudaBetween, given: list[tuple[Any, ...]]) -> None:
    ids, weights = torch.zeros(TOKENS, 0, dtype=torch.int64), torch.ones(TOKENS, 0)
    rows = torch.zeros(TOKENS, 0, WIDTH).half()
    assert not between.total(rows).any() and not between.combine(rows, weights, ids).any()
    drows, dweights = between.spread(rows, weights, ids, torch.ones(TOKENS, WIDTH).half())
    assert drows.shape == rows.shape and dweights.shape == weights.shape
    assert between.gate(torch.zeros(0, 2 * WIDTH).half(), "relu").shape == (0, WIDTH)
    assert between.activate(torch.zeros(0, WIDTH).half(), Rows(), ids, "relu").shape == (0, WIDTH)
    assert not given


def test_sizes_that_no_kernel_takes(between: CudaBetween) -> None:
    with pytest.raises(ShapeError, match="rows: expected a multiple of 8 columns, got 12"):
        between.total(torch.zeros(1, 1, 12).half())
    with pytest.raises(
        ShapeError, match="rows: expected two times a multiple of 8 columns, got 24"
    ):
        between.gate(torch.zeros(1, 24).half(), "silu")
    many = torch.empty(2**31, 2, 8, dtype=torch.half, device="meta")
    for run in (
        between.total,
        lambda rows: between.gate(rows.view(2**31, 16), "silu"),
        lambda rows: between.activate(rows.view(2**31, 16), Rows(), many, "silu"),
    ):
        with pytest.raises(ShapeError, match="rows: expected at most .* pieces of 8 columns"):
            run(many)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_read_and_write_whole_vectors(dtype: str) -> None:
    for func, loads, stores in (
        (gate_rows(dtype, "silu"), 2, 1),
        (gate_rows(dtype, "gelu", backward=True), 3, 2),
        (spread_rows(dtype, "int32"), 2, 1),
        (activate_rows(dtype, "silu"), 1, 2),
        (activate_rows(dtype, "gelu", backward=True), 2, 1),
    ):
        body = cuda_text(func).split("__global__")[-1].split("extern")[0]
        assert body.count("ptx_ld_vec_global_v4_b32(") == loads
        assert body.count("ptx_st_vec_global_v4_b32(") == stores


def test_other_types_and_activations_are_refused() -> None:
    for wrong in (
        lambda: gate_rows("float32", "silu"),
        lambda: gate_rows("float16", "none"),
        lambda: spread_rows("float32", "int32"),
        lambda: spread_rows("float16", "int8"),
        lambda: activate_rows("float32", "silu"),
        lambda: activate_rows("float16", "none"),
    ):
        with pytest.raises(ScheduleError):
            wrong()
