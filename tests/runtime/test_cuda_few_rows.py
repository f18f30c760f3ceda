"""Products of a few rows that read the weights of live activations."""

from __future__ import annotations

from typing import Any

import pytest

from pit_tvm.errors import ScheduleError
from pit_tvm.runtime.cuda_few_rows import MOST_ROWS, CudaFewRows, tile_for
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.cuda_few_rows import few_rows
from pit_tvm.schedules.cuda_few_rows_parts import (
    ACROSS,
    HEIGHTS,
    MOST_WARPS,
    PARTS,
    WIDE,
    FewRowsTile,
)
from pit_tvm.selection.gpu_few_rows import few_rows_us
from tests.schedules.cuda_text import cuda_text

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("rows", HEIGHTS)
def test_rows_of_weights_are_multiplied_as_they_are_stored(rows: int) -> None:
    text = cuda_text(few_rows(FewRowsTile("float16", rows, 3)))
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in text and "f32.f16.f16.f32" in text
    assert text.count("mma.sync") and "griddepcontrol.wait" in text


@pytest.mark.parametrize("across", ACROSS)
def test_a_cluster_divides_its_columns_among_its_ctas(across: int) -> None:
    tile = FewRowsTile("bfloat16", 8, across)
    assert tile.owned * PARTS == tile.columns == WIDE * across
    assert tile.deep * across == MOST_WARPS
    assert tile.threads * 8 >= tile.piece  # one look at x


@pytest.mark.parametrize("bias", [False, True])
def test_bias_and_activation_are_what_is_asked_for(bias: bool) -> None:
    text = cuda_text(few_rows(FewRowsTile("bfloat16", 8, 1), bias=bias, act="silu"))
    assert ("bias_ptr" in text) == bias
    assert "pit_silu" in text and "f32.bf16.bf16.f32" in text


@pytest.mark.parametrize("form", [("float32", 8, 3), ("float16", 4, 3), ("float16", 8, 5)])
def test_bad_tiles(form: tuple[Any, ...]) -> None:
    with pytest.raises(ScheduleError, match="few_rows"):
        few_rows(FewRowsTile(*form))


def test_an_unknown_activation() -> None:
    with pytest.raises(ScheduleError, match="act"):
        few_rows(FewRowsTile("float16", 8, 3), act="tanh")


def test_tiles_are_as_narrow_as_leaves_all_clusters_on_the_device() -> None:
    assert tile_for("float16", 1, 5120) == FewRowsTile("float16", 8, 3)
    assert tile_for("float16", 9, 4096) == FewRowsTile("float16", 16, 3)
    assert tile_for("bfloat16", MOST_ROWS, 768).across == 1
    assert tile_for("float16", 1, 10**6).across == ACROSS[-1]


def test_predictions_grow_with_what_lives() -> None:
    times = [few_rows_us(1, 5120, 20480, live) for live in (0.0, 0.05, 0.5, 1.0)]
    assert times == sorted(times)
    assert few_rows_us(16, 5120, 20480, 0.5) > few_rows_us(8, 5120, 20480, 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_against_float64(dtype: str) -> None:
    product, kind = CudaFewRows(cached_modules(KernelCache())), getattr(torch, dtype)
    limit = 2e-3 if dtype == "float16" else 1e-2
    for turn in range(80):
        m = 1 + turn % MOST_ROWS
        k = int(torch.randint(1, (40, 7000, 50000)[turn % 3], ()))
        n = 8 * int(torch.randint(1, 200, ()))
        zeros = (0.0, 0.5, 0.95, 1.0)[turn // 8 % 4]
        act = "relu" if turn % 3 else "none"
        x = torch.randn(m, k, device="cuda").to(kind)
        x *= torch.rand(m, k, device="cuda") >= zeros
        w = (torch.randn(k, n, device="cuda") / 8).to(kind)
        bias = torch.randn(n, device="cuda").to(kind) if turn % 3 else None
        expected = x.double() @ w.double() + (0 if bias is None else bias.double())
        if act == "relu":
            expected = expected.clamp(min=0)
        w[(x == 0).all(0)] = float("nan")  # is not read
        out = torch.full((m, n), float("nan"), dtype=kind, device="cuda")
        product(x, w, bias, out, act)
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
