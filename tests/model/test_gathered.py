"""Linear layers on activations against numpy in float64, gathered and dense."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pit_tvm.errors import ShapeError
from pit_tvm.memory import numpy_dtype
from pit_tvm.model import gathered
from pit_tvm.model.layers import Layers
from pit_tvm.model.linear import LinearLayer
from pit_tvm.model.threshold import check_threshold
from pit_tvm.target import resolve_target

N, K = 21, 150
ALWAYS, NEVER = math.inf, 0.0  # margins at which every call gathers, or none
# Largest error, relative to the largest value.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def force(patch: pytest.MonkeyPatch, margin: float) -> None:
    """Let samples decide by ``margin`` alone."""
    patch.setattr(gathered, "_MARGIN", margin)
    patch.setattr(gathered, "_MOST_LIVE", 1.0)


def made(
    dtype: str = "float32",
    bias: bool = True,
    after: str | None = "relu",
    threshold: float | None = None,
) -> Layers:
    """One layer of small random numbers."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((N, K)).astype(numpy_dtype(dtype))
    shift = rng.standard_normal(N).astype(numpy_dtype(dtype)) if bias else None
    layer = LinearLayer(weight, shift, None, dtype, after)
    return Layers([layer], resolve_target("llvm"), threshold=threshold)


def activations(rows: int, live: float, dtype: str = "float32", seed: int = 1) -> np.ndarray:
    """Positive numbers, all but a share of the columns 0, and of the rest a half; some -0.0."""
    rng = np.random.default_rng(seed)
    values = np.abs(rng.standard_normal((rows, K))) + 0.01
    values *= (rng.random(K) < live) & ((rng.random((rows, K)) < 0.5) | (live == 1.0))
    values[values == 0.0] = rng.choice([0.0, -0.0], np.count_nonzero(values == 0.0))
    return values.astype(numpy_dtype(dtype))


def check(layers: Layers, x: np.ndarray, seen: np.ndarray | None = None) -> None:
    """The layer on ``x`` equals numpy on ``seen`` (None: the same), and leaves ``x`` alone."""
    layer, before = layers.found[0], x.copy()
    out = np.full((len(x), N), np.nan, x.dtype)
    layers(0, x, out)
    wide = [a.astype(np.float64) for a in (x if seen is None else seen, layer.weight)]
    truth = wide[0] @ wide[1].T + (0.0 if layer.bias is None else layer.bias.astype(np.float64))
    error = np.abs(out.astype(np.float64) - truth).max(initial=0.0)
    assert error <= TOLERANCES[layer.dtype] * np.abs(truth).max(initial=0.0)
    assert x.tobytes() == before.tobytes()


@pytest.mark.parametrize("margin", [ALWAYS, NEVER], ids=["gathered", "dense"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_results_do_not_depend_on_the_decision(
    dtype: str, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, margin)
    layers = made(dtype)
    for rows in (1, 5, 8, 33, 100):
        for live in (0.0, 0.1, 1.0):
            check(layers, activations(rows, live, dtype, seed=rows))
    assert {one.gathers for one in layers.activity} == {margin == ALWAYS}


@pytest.mark.parametrize("live", [0.0, 0.05, 0.5, 1.0])
def test_the_choice_of_the_layer_itself(live: float) -> None:
    layers = made(bias=False)
    for call in range(4):
        check(layers, activations(40, live, seed=call))
    (activity,) = layers.activity
    assert activity.rows == (32, 63) and activity.calls[1] == 4
    assert activity.calls[0] in (0, 4) and activity.dropped is None
    if live in (0.0, 1.0):
        assert activity.live == live
    assert live < 1.0 or not activity.gathers  # nothing to gain


def test_no_rows() -> None:
    layers = made()
    check(layers, activations(0, 0.5))
    assert layers.activity == []


def test_patterns_that_change_are_seen_by_later_samples() -> None:
    layers = made()
    seen = set()
    for live in (1.0, 0.0):
        for call in range(2 * gathered._MOST_CALLS):
            if call < 2:
                check(layers, activations(20, live))
            else:
                layers(0, activations(20, live), np.empty((20, N), np.float32))
        seen.add(layers.activity[0].live)
    assert seen == {1.0, 0.0}


def test_numbers_of_rows_are_decided_apart() -> None:
    layers = made()
    check(layers, activations(3, 0.0))
    check(layers, activations(100, 1.0))
    check(layers, activations(70, 1.0))
    few, many = layers.activity
    assert (few.rows, few.live, few.calls[1]) == ((2, 3), 0.0, 1)
    assert (many.rows, many.live, many.calls[1]) == ((64, 127), 1.0, 2)
    lines = [str(one) for one in layers.activity]
    assert lines[0].startswith(f"layer 0 ({N} x {K} float32 + bias, after relu) at 2 to 3 rows: ")
    assert lines[1].endswith("gathered in 0 of 2 calls")


@pytest.mark.parametrize("after", ["gelu", "silu", "gelu_tanh", None])
def test_without_a_threshold_only_relu_is_followed(after: str | None) -> None:
    layers = made(after=after)
    check(layers, activations(9, 0.2))
    assert layers.activity == []


# --------------------------------------------------------------------------------------------
# Small values that count as zero


@pytest.mark.parametrize("margin", [ALWAYS, NEVER], ids=["gathered", "dense"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_small_values_count_as_zero(
    dtype: str, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, margin)
    layers = made(dtype, after="gelu", threshold=0.25)
    for rows in (1, 37):
        x = np.random.default_rng(rows).standard_normal((rows, K)).astype(numpy_dtype(dtype))
        x[:, 0] = 0.25  # at the threshold: dropped
        kept = np.where(np.abs(x.astype(np.float64)) <= 0.25, 0, x).astype(x.dtype)
        check(layers, x, kept)
    for one, rows in zip(layers.activity, (1, 37), strict=True):
        x = np.random.default_rng(rows).standard_normal((rows, K)).astype(numpy_dtype(dtype))
        x[:, 0] = 0.25
        kept = np.abs(wide := x.astype(np.float64)) > 0.25
        norms = [np.linalg.norm(part) for part in (wide[~kept], wide)]
        assert one.dropped == pytest.approx(norms[0] / norms[1])
        assert f"dropped {one.dropped:.2%} of the norm" in str(one)


def test_nan_is_not_small() -> None:
    layers = made(threshold=0.5)
    x = np.full((2, K), 0.1, np.float32)
    x[1, 7] = np.nan
    out = np.zeros((2, N), np.float32)
    layers(0, x, out)
    np.testing.assert_array_equal(out[0], layers.found[0].bias)
    assert np.isnan(out[1]).all()


def test_threshold_of_zero_drops_nothing() -> None:
    layers = made(after="silu", threshold=0.0)
    check(layers, activations(20, 0.3))
    check(layers, np.zeros((20, K), np.float32))
    assert [one.dropped for one in layers.activity] == [0.0]


@pytest.mark.parametrize("threshold", [-0.1, math.inf, math.nan, 10**400])
def test_thresholds_that_are_refused(threshold: float) -> None:
    with pytest.raises(ShapeError, match="activation_threshold: expected None or a finite number"):
        check_threshold(threshold)


def test_prepare_compiles_what_gathering_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, ALWAYS)
    layers = made(threshold=0.2)
    layers._gathered[0].prepare([2**i for i in range(12)])
    assert layers.activity == []
    built = None
    for rows in (4, 1, 3, 9, 60, 500, 2000):
        layers(0, activations(rows, 0.4), np.empty((rows, N), np.float32))
        built = built or layers._cache.stats  # the first call counts the rows of the dense layer
    assert layers._cache.stats == built
