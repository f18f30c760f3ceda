"""Attention over live tokens on CPUs: any lengths, on every instruction set of x86."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pit_tvm.errors import DTypeError, ShapeError, TileNotFound
from pit_tvm.reference import attention as reference
from pit_tvm.schedules.cpu_attention import attention
from pit_tvm.schedules.cpu_attention_parts import KEYS
from pit_tvm.target import resolve_target
from pit_tvm.windows import CAUSAL, FULL, Window
from tests.schedules import sparse

SEVERAL = (0, 1, 2 * KEYS + 1, 0, 15, 16, 17, KEYS, 31, 33, 0)


@dataclass(frozen=True)
class Form:
    """What one kernel is built for."""

    heads: int
    head_dim: int
    dtype: str
    window: Window = FULL
    target: str = "llvm"
    threads: int = 3
    value_dim: int = 0  # of the same width, if 0
    sinks: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @functools.cached_property
    def kernel(self) -> Callable[..., None]:
        info = resolve_target(f"{self.target} -num-cores={self.threads}")
        sizes = (self.heads, self.head_dim, self.value_dim or self.head_dim)
        how = self.dtype, self.window, self.scale, self.sinks
        func = attention(*sizes, *how, target=info)
        return sparse.build(tvm.IRModule({"main": func}), info)


PLAIN = Form(3, 32, "float32")
ORDERED = Form(2, 19, "float16", CAUSAL)
NEAR = Form(2, 24, "float32", Window(9, 9), sinks=True)
FORMS = [
    PLAIN,
    ORDERED,
    NEAR,
    Form(2, 40, "bfloat16", FULL, "llvm -mcpu=x86-64-v3", 2),
    Form(1, 5, "float32", CAUSAL, "llvm -mcpu=x86-64", 1),
    Form(2, 24, "float32", CAUSAL, value_dim=16, sinks=True),
    Form(2, 3, "bfloat16", Window(KEYS, 0), "llvm -mcpu=x86-64-v3", 2, value_dim=37),
    Form(1, 8, "float16", Window(None, 3), sinks=True),
    Form(1, 8, "float32", Window(2 * KEYS, None), threads=2),
    Form(1, 8, "float32", Window(0, 0), threads=1),
]


def operands(form: Form, lengths: tuple[int, ...], seed: int) -> tuple[np.ndarray, ...]:
    """q, k, v, where sequences begin, positions, some of which nothing has, and sinks."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
    widths = form.head_dim, form.head_dim, form.value_dim or form.head_dim
    shapes = [(int(starts[-1]), form.heads, width) for width in widths]
    arrays = [sparse.random(rng, shape, form.dtype) for shape in shapes]
    steps = rng.integers(1, 3 + seed % 2, int(starts[-1]))
    places = [np.cumsum(steps[b:e]) for b, e in itertools.pairwise(starts)]
    position = np.concatenate([np.zeros(0), *places]).astype(np.int32)
    sinks = rng.standard_normal(form.heads if form.sinks else 0).astype(np.float32)
    return *arrays, starts, position, sinks


def wanted(form: Form, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """What `reference.attention` has of `operands`."""
    *given, position, sinks = arrays
    more = {"sinks": sinks} if form.sinks else {}
    return reference.attention(*given, form.scale, window=form.window, position=position, **more)


def run(form: Form, *arrays: np.ndarray) -> np.ndarray:
    """The kernel's result, in poisoned memory between forbidden pages."""
    out = sparse.poisoned(arrays[2].shape, form.dtype)
    fenced = [sparse.fenced(a) for a in (*arrays, out)]
    form.kernel(*fenced)
    return fenced[-1]


def check(form: Form, lengths: tuple[int, ...], seed: int) -> None:
    arrays = operands(form, lengths, seed)
    sparse.assert_promise(run(form, *arrays), wanted(form, arrays))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("lengths", [(), (0,), (1,), (0, 0, 5), SEVERAL], ids=str)
def test_lengths(form, lengths):
    check(form, lengths, len(lengths))


@pytest.mark.parametrize("form", [PLAIN, ORDERED, NEAR], ids=str)
@settings(max_examples=12, deadline=None)
@example(lengths=[3 * KEYS + 70], seed=0)
@given(lengths=st.lists(st.integers(0, 100), max_size=8), seed=st.integers(0, 2**32 - 1))
def test_random_lengths(form, lengths, seed):
    check(form, tuple(lengths), seed)


def test_one_long_sequence_is_shared_by_threads():
    check(ORDERED, (5 * KEYS + 3,), 1)
    check(NEAR, (5 * KEYS + 3,), 1)


def test_large_scores_overflow_nothing():
    q, k, v, *rest = operands(PLAIN, (2 * KEYS + 9, 3), 2)
    q *= 100
    q[:KEYS] *= -1  # also maxima far below zero
    k[:, :, 0] = np.abs(k[:, :, 0]) + 50
    q[:, :, 0] -= 500
    truth = wanted(PLAIN, (q, k, v, *rest))
    got = run(PLAIN, q, k, v, *rest)
    # a score of 1e4 is rounded to 1e-3 in float32
    assert np.abs(got - truth).max() <= 2e-2


def test_what_is_no_number_stays_in_its_sequence_and_head():
    q, k, v, *rest = operands(PLAIN, (20, 30, 10), 3)
    truth = wanted(PLAIN, (q, k, v, *rest))
    k[25, 1, 3] = np.nan
    q[5, 0, 0] = np.nan
    hit = np.zeros(truth.shape, bool)
    hit[20:50, 1] = hit[5, 0] = True
    got = run(PLAIN, q, k, v, *rest)
    assert np.isnan(got[hit]).all()
    np.testing.assert_allclose(got[~hit], truth[~hit], atol=1e-5)


def test_arrays_may_begin_at_any_element():
    q, k, v, *rest = operands(PLAIN, (7, 18), 4)
    truth = wanted(PLAIN, (q, k, v, *rest))
    arrays = [q, k, v, sparse.poisoned(truth.shape, PLAIN.dtype)]
    moved = []
    for array in arrays:
        room = np.empty(array.size + 1, np.float32)
        moved.append(room[1:].reshape(array.shape))
        moved[-1][...] = array
    PLAIN.kernel(*moved[:3], *rest, moved[3])
    sparse.assert_promise(moved[3], truth)


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (ShapeError, {"heads": 0}),
        (ShapeError, {"head_dim": 2.5}),
        (ShapeError, {"value_dim": 0}),
        (ShapeError, {"scale": math.nan}),
        (DTypeError, {"dtype": "int8"}),
        (TileNotFound, {"target": resolve_target("cuda -arch=sm_90a")}),
    ],
)
def test_refuses(error, change):
    given = {"heads": 2, "head_dim": 8, "value_dim": 8, "dtype": "float32", "window": FULL}
    given |= {"scale": 1.0, "target": resolve_target("llvm")}
    with pytest.raises(error, match=next(iter(change)) if error is not TileNotFound else "isa"):
        attention(**(given | change))
