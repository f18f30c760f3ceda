"""Products of a few rows that read the weights of live activations."""

from __future__ import annotations

from typing import Any

import pytest

from pit_tvm.errors import ScheduleError
from pit_tvm.runtime.cuda_few_rows import MOST_ROWS, CudaFewRows, tile_for
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.cuda_few_rows import FewRowsTile, add_parts, few_rows
from pit_tvm.selection.gpu_few_rows import few_rows_us
from tests.schedules.cuda_text import cuda_text

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("rows", [1, 8])
def test_a_row_of_weights_is_read_by_wide_loads_where_x_lives(rows: int) -> None:
    text = cuda_text(few_rows(FewRowsTile("float16", rows, 4)))
    assert ("ld.global.v4.b32" if rows == 1 else "ld.global.v2.b32") in text
    assert "__ballot_sync" in text and "griddepcontrol.wait" in text


def test_a_bias_is_read_where_there_is_one() -> None:
    assert "bias_ptr" in cuda_text(add_parts("bfloat16", True))
    assert "bias_ptr" not in cuda_text(add_parts("bfloat16", False))


@pytest.mark.parametrize(
    "form", [("float32", 1, 4), ("float16", 3, 4), ("float16", 16, 2), ("float16", 1, 16)]
)
def test_bad_tiles(form: tuple[Any, ...]) -> None:
    with pytest.raises(ScheduleError, match="few_rows"):
        few_rows(FewRowsTile(*form))
    if form[0] == "float32":
        with pytest.raises(ScheduleError, match="dtype"):
            add_parts(form[0], False)


def test_tiles_leave_ctas_enough() -> None:
    assert tile_for("float16", 1, 5120, 20480).each == 8
    assert tile_for("float16", 3, 4096, 16384) == FewRowsTile("float16", 4, 4)
    assert tile_for("float16", MOST_ROWS, 768, 3072).each == 2


def test_predictions_grow_with_what_lives() -> None:
    times = [few_rows_us(1, 5120, 20480, live) for live in (0.0, 0.05, 0.5, 1.0)]
    assert times == sorted(times)
    assert few_rows_us(8, 5120, 20480, 0.5) > few_rows_us(4, 5120, 20480, 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_against_float64(dtype: str) -> None:
    product, kind = CudaFewRows(cached_modules(KernelCache())), getattr(torch, dtype)
    limit = 2e-3 if dtype == "float16" else 1e-2
    for turn in range(80):
        m = 1 + turn % MOST_ROWS
        k, n = (8 * int(torch.randint(1, most, ())) for most in (900, 200))
        zeros = (0.0, 0.5, 0.95, 1.0)[turn // 8 % 4]
        x = torch.randn(m, k, device="cuda").to(kind)
        x *= torch.rand(m, k, device="cuda") >= zeros
        w = (torch.randn(k, n, device="cuda") / 8).to(kind)
        bias = torch.randn(n, device="cuda").to(kind) if turn % 3 else None
        expected = x.double() @ w.double() + (0 if bias is None else bias.double())
        w[(x == 0).all(0)] = float("nan")  # is not read
        out = torch.full((m, n), float("nan"), dtype=kind, device="cuda")
        product(x, w, bias, out)
        error = (out.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert error < limit, (m, k, n, zeros)


@pytest.mark.gpu
def test_equal_inputs_give_equal_bits_and_nan_lives() -> None:
    product = CudaFewRows(cached_modules(KernelCache()))
    x, w = (torch.randn(s, device="cuda").half() for s in ((5, 4096), (4096, 520)))
    first, second = (torch.empty(5, 520, dtype=torch.half, device="cuda") for _ in range(2))
    product(x, w, None, first)
    product(x, w, None, second)
    assert torch.equal(first, second)
    x[2, 77] = float("nan")
    product(x, w, None, second)
    assert bool(second[2].isnan().all()) and torch.equal(first[:2], second[:2])
