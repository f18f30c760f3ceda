"""Products of few tokens by the weights of their experts: sources, and what they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pit_tvm.errors import ScheduleError
from pit_tvm.gates import PLAIN, Gate
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_modules import named_module
from pit_tvm.schedules.cuda_choices import ChoicesTile, choices_kernel, product_tile, sum_tile
from pit_tvm.selection.gpu_choices import by_choices
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text

DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EXPERTS, TOKENS, TOP_K = 5, 3, 5
CLAMPED, PAIRED = Gate(0.75, 1.702, 1.0), Gate(0.75, 1.702, 1.0, interleaved=True)


def kernel(emulator: Emulator, tile: ChoicesTile) -> Any:
    """It, on arrays of the CPU."""
    source = cuda_source(named_module({"main": choices_kernel(tile)}), tirx=True)
    run = emulator.compile_source(source).mod["main"]
    return lambda *arrays: run(*map(OnDevice, arrays))


def ids_of(dtype: str, rng: np.random.Generator) -> Any:
    """Choices of every token, some of them none."""
    ids = rng.integers(0, EXPERTS, (TOKENS, TOP_K))
    ids[0, 1], ids[2, 0] = -1, EXPERTS
    ids[1, 4] = 2**40 if dtype == "int64" else EXPERTS + 7
    return ids.astype(dtype)


def random(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def close(got: Any, want: Any) -> bool:
    """Relative error, of the rounding of 8 or 11 bits."""
    apart = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
    return bool(apart < (1e-3 if got.dtype == np.float16 else 6e-3))


@pytest.mark.parametrize("gate", [None, PLAIN, CLAMPED, PAIRED])
@pytest.mark.parametrize(("dtype", "ids_dtype"), [("float16", "int32"), ("bfloat16", "int64")])
def test_every_choice_has_the_row_of_its_expert(
    emulator: Emulator,
    dtype: str,
    ids_dtype: str,
    gate: Gate | None,
    rng: np.random.Generator,
) -> None:
    n, k = 40, 528  # columns of a CTA and a half; a lane has two pieces, or three
    biased = dtype == "bfloat16" or gate is None
    wide = n if gate is None else 2 * n
    x = random((TOKENS, k), dtype, rng)
    weight = (random((EXPERTS, wide, k), dtype, rng) / k**0.5).astype(DTYPES[dtype])
    bias = random((EXPERTS, wide), dtype, rng) if biased else None
    ids, out = ids_of(ids_dtype, rng), np.full((TOKENS * TOP_K, n), np.nan, DTYPES[dtype])
    tile = product_tile(dtype, ids_dtype, "silu", gate, bias=biased)
    kernel(emulator, tile)(x, ids, weight, *([bias] if biased else []), out)
    want = np.zeros((TOKENS, TOP_K, n))
    for t, c in np.ndindex(*ids.shape):
        if 0 <= ids[t, c] < EXPERTS:
            rows = weight[ids[t, c]].astype(np.float64) @ x[t].astype(np.float64)
            want[t, c] = gated(rows if bias is None else rows + bias[ids[t, c]], gate)
    assert close(out, want.reshape(-1, n))
    assert not out[_dead(ids)].any()


def gated(rows: Any, gate: Gate | None) -> Any:
    """silu of rows, or what a gate makes of them, in float64."""
    if gate is None:
        return rows / (1 + np.exp(-rows))
    x, y = (rows[::2], rows[1::2]) if gate.interleaved else np.split(rows, 2)
    x, y = np.minimum(x, gate.limit), np.clip(y, -gate.limit, gate.limit)
    return x / (1 + np.exp(-gate.alpha * x)) * (y + gate.offset)


def _dead(ids: Any) -> Any:
    return ((ids < 0) | (ids >= EXPERTS)).reshape(-1)


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize(
    ("dtype", "ids_dtype", "factors"),
    [("float16", "int32", "float32"), ("bfloat16", "int64", "bfloat16")],
)
def test_choices_of_a_token_are_summed(
    emulator: Emulator,
    dtype: str,
    ids_dtype: str,
    factors: str,
    tokens: int,
    rng: np.random.Generator,
) -> None:
    n, k = 40, 280
    biased = factors == "bfloat16"
    tile = sum_tile(dtype, ids_dtype, factors, tokens, TOP_K, bias=biased)
    ids = ids_of(ids_dtype, rng)[:tokens]
    shares = rng.random(ids.shape).astype(DTYPES.get(factors, np.float32))
    x, weight = random((ids.size, k), dtype, rng), random((EXPERTS, n, k), dtype, rng)
    shares[0, 0], x[0], x[_dead(ids)] = 0, np.nan, np.nan  # neither is read
    out = np.full((tokens, n), np.nan, DTYPES[dtype])
    bias = random((EXPERTS, n), dtype, rng) if biased else np.zeros((EXPERTS, n))
    run = kernel(emulator, tile)
    given = (x, ids, shares, weight, *([bias] if biased else []))
    run(*given, out)
    want = np.zeros((tokens, n))
    for t, c in np.ndindex(*ids.shape):
        if 0 <= ids[t, c] < EXPERTS and shares[t, c]:
            row = weight[ids[t, c]].astype(np.float64) @ x[t * TOP_K + c].astype(np.float64)
            want[t] += float(shares[t, c]) * (row + bias[ids[t, c]])
    assert close(out, want)
    again = np.full_like(out, np.nan)
    run(*given, again)
    assert np.array_equal(out, again)


def test_lanes_read_16_bytes_of_all_rows_at_once() -> None:
    tile = product_tile("bfloat16", "int64", "silu", PLAIN)
    text = cuda_text(choices_kernel(tile))
    assert text.count("pit_load_16((&(") == tile.ahead * (tile.rows + 1)
    assert "griddepcontrol.wait" in text and "int64_t* __restrict__ ids_ptr" in text


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"ids": "int16"}, "ids"),
        ({"act": "tanh"}, "act one of"),
        ({"act": "relu", "gate": CLAMPED}, "alpha"),
        ({"factors": "float64"}, "factors"),
        ({"factors": "float32", "act": "silu"}, "sums without act"),
        ({"factors": "float32", "gate": PLAIN}, "sums without gates"),
        ({"rows": 3}, "rows 2, 4 or 8"),
        ({"ahead": 0}, "ahead"),
        ({"deep": 3, "factors": "float32"}, "deep 1, 2, 4 or 8"),
        ({"deep": 2}, "deep 1 without sums"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ScheduleError, match=rule):
        choices_kernel(replace(ChoicesTile("float16", "int32"), **change))


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((8, 128, 9 << 20), 12), ((8, 64, 12 << 20), 7), ((2, 8, 352 << 20), 3)],
)
def test_few_tokens_of_many_experts_go_by_choices(sizes: tuple[int, int, int], most: int) -> None:
    found = [by_choices(tokens, *sizes) for tokens in range(20)]
    assert found == [0 < tokens <= most for tokens in range(20)]
    assert not by_choices(257, 1, 2**20, 1) and not by_choices(1, 1, 0, 1)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 8), (7, 3), (2, 1)])
def test_tiles_can_be_built(tokens: int, top_k: int) -> None:
    sum_tile("float16", "int32", "float16", tokens, top_k).check()
    product_tile("bfloat16", "int64", "relu").check()
