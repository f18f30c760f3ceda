"""Recurrent cells on CPUs: numbers that models seldom have."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from pit_tvm.errors import ShapeError
from pit_tvm.schedules.cpu_recurrence import GATES, KEPT, columns_of, recurrence
from pit_tvm.transform.pipeline import lower
from tests.schedules import sparse

WIDTH = 5


def states(kind: str, gates: np.ndarray) -> np.ndarray:
    """The states after one token, of cells that remember nothing."""
    columns, rows = columns_of(kind, WIDTH), len(gates)
    weight, bias = np.zeros((WIDTH, columns), np.float32), np.zeros(columns, np.float32)
    before = np.zeros((rows, WIDTH), np.float32)
    out = sparse.poisoned((rows, 1, KEPT[kind] * WIDTH), "float32")
    main = recurrence(kind, WIDTH, False).with_attr("global_symbol", "main")
    kernel = sparse.build(lower(tvm.IRModule({"main": main})))
    kernel(gates[:, None], weight, bias, before, before, np.ones(rows, np.int64), out)
    return out[:, 0, :WIDTH]


def wanted(kind: str, gates: np.ndarray) -> np.ndarray:
    """The same in float64."""
    parts = np.split(gates.astype(np.float64), GATES[kind], 1)
    if kind == "rnn_relu":
        return np.where(parts[0] < 0, 0.0, parts[0])
    if kind == "rnn_tanh":
        return np.tanh(parts[0])
    open_ = [1 / (1 + np.exp(-part)) for part in parts]
    if kind == "gru":
        return (1 - open_[1]) * np.tanh(parts[2])
    return open_[3] * np.tanh(open_[0] * np.tanh(parts[2]))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 80.0])
def test_small_states_are_as_accurate_as_large_ones(
    rng: np.random.Generator, kind: str, size: float
) -> None:
    gates = rng.uniform(-size, size, (9, GATES[kind] * WIDTH)).astype(np.float32)
    least = 3e-7 * min(size, 1.0)  # a GRU's, which adds what cancels, as torch's does
    np.testing.assert_allclose(states(kind, gates), wanted(kind, gates), rtol=1e-6, atol=least)


@pytest.mark.parametrize("kind", GATES)
def test_numbers_without_end_and_nan(kind: str) -> None:
    gates = np.full((3, GATES[kind] * WIDTH), np.inf, np.float32) * [[1], [-1], [np.nan]]
    gates = gates.astype(np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(states(kind, gates), wanted(kind, gates), rtol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ShapeError, match="^kind: expected one of lstm"):
        recurrence("peephole", WIDTH, False)
    with pytest.raises(ShapeError, match="^width"):
        recurrence("gru", 0, False)
