"""Kernels on CUDA cores, run on a CPU: operators, operands, axes and types against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from pit_tvm import op
from pit_tvm.reference import ops as reference
from pit_tvm.runtime import cuda_build, cuda_general_planner
from pit_tvm.structs import BlockMask, Lengths, Mask, Rows, SparsitySpec
from tests.api import test_groups as by_group
from tests.api import test_masks as by_mask
from tests.api import test_outputs as by_output
from tests.api import test_slices as by_slice
from tests.api.cases import (
    BATCHED,
    BATCHED_CROSSED,
    CROSSED,
    ELEMENTWISE,
    LINEAR,
    MATMUL,
    PADDED_CONV2D,
    REDUCE_SUM,
    Case,
    Legal,
)
from tests.api.patterns import PATTERNS
from tests.api.running import poison, random_array, untouched
from tests.runtime.cuda_emulation import OnDevice
from tests.runtime.emulated import WIDE, Machine


@pytest.fixture
def emulated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int | None, bool], None]:
    """Lets the tests of `tests.api` run their operators on the emulator."""
    monkeypatch.setattr(cuda_build, "compile_source", machine.emulator.compile_source)

    def use(tile: int | None = None, dense: bool = False) -> None:
        for tests in (by_mask, by_slice, by_group, by_output):
            monkeypatch.setattr(tests, "compiled", partial(machine.compiled, tile, dense))

    return use


def _wide_plain(dtype: str) -> list[Any]:
    return op.matmul(None, 64, 192, dtype=dtype)


def _wide_crossed(dtype: str) -> list[Any]:
    return op.matmul(64, 64, None, dtype=dtype, transpose_lhs=True)


def _wide_pieces(dtype: str) -> list[Any]:
    options = {"bias": True, "activation": "relu", "transpose_lhs": True}
    return op.matmul(70, 128, None, dtype=dtype, **options)


def named(value: object) -> str:
    """What a test's identifier says of a parameter."""
    return str(getattr(value, "name", getattr(value, "__name__", value)))


# All sizes are known, and whole vectors: what lives is turned.
WIDE_FIXED = replace(
    WIDE,
    name="matmul in vectors, of 72 rows",
    tensors=lambda dtype: op.matmul(72, 64, 96, dtype=dtype, transpose_rhs=True),
    fixed={"m": 72, "n": 64, "k": 96},
)
WIDE_PLAIN = Case(
    "matmul of plain operands, in vectors",
    _wide_plain,
    {"lhs": ("m", "k"), "rhs": ("k", "n")},
    ("m", "n"),
    reference.matmul,
    reduced=("k",),
    fixed={"n": 64, "k": 192},
)
WIDE_CROSSED = Case(
    "matmul transposed, in vectors",
    _wide_crossed,
    {"lhs": ("k", "m"), "rhs": ("k", "n")},
    ("m", "n"),
    partial(reference.matmul, transpose_lhs=True),
    reduced=("k",),
    fixed={"m": 64, "n": 64},
)
WIDE_PIECES = Case(
    "matmul transposed, bias and relu, in vectors",
    _wide_pieces,
    {"lhs": ("k", "m"), "rhs": ("k", "n"), "bias": ("n",)},
    ("m", "n"),
    partial(reference.matmul, transpose_lhs=True, activation="relu"),
    reduced=("k",),
    fixed={"m": 70, "n": 128},
)


@pytest.mark.parametrize(
    ("case", "operand", "dtype", "spec", "tile", "dense"),
    [
        (MATMUL, "lhs", "float32", Mask(), None, True),
        (MATMUL, "rhs", "float32", BlockMask(1, 32), None, False),  # lhs is turned
        (CROSSED, "lhs", "bfloat16", Mask(), None, True),
        (LINEAR, "rhs", "int8", Mask(32, 1), None, False),
        (WIDE_CROSSED, "lhs", "float32", Mask(1, 64), None, True),
        (WIDE_CROSSED, "lhs", "float16", BlockMask(8, 128), 0, False),
        (WIDE_PLAIN, "lhs", "int8", Mask(1, 64), None, False),
        (ELEMENTWISE, "rhs", "int8", Mask(), None, False),
        (WIDE_PIECES, "lhs", "float32", Mask(32, 1), None, False),
        (WIDE, "lhs", "float16", Mask(1, 32), None, False),  # two steps of a piece
        (WIDE_FIXED, "lhs", "float32", Mask(32, 1), None, False),  # as is rhs
        (WIDE_FIXED, "rhs", "float16", Mask(64, 1), None, False),
        (WIDE_FIXED, "rhs", "float32", Mask(1, 32), None, False),  # the product is turned
        (WIDE_PIECES, "rhs", "float32", Mask(32, 1), None, False),
    ],
    ids=named,
)
def test_zeros_give_the_dense_result(
    case: Case,
    operand: str,
    dtype: str,
    spec: SparsitySpec,
    tile: int | None,
    dense: bool,
    emulated: Callable[..., None],
    rng: np.random.Generator,
) -> None:
    emulated(tile, dense)
    legal = Legal(case, operand, case.inputs[operand])
    for pattern in PATTERNS:
        by_mask.check(legal, spec, dtype, pattern, rng)


@pytest.mark.parametrize(
    ("case", "operand", "axis", "dtype", "kind", "dead"),
    [
        (WIDE, "lhs", "m", "bfloat16", Rows, "zero"),
        (WIDE, "lhs", "m", "int8", Rows, "skip"),
        (WIDE, "rhs", "n", "float32", Rows, "skip"),
        (LINEAR, "lhs", "m", "float32", Rows, "zero"),
        (CROSSED, "lhs", "k", "int8", Lengths, "skip"),
        (BATCHED, "lhs", "b", "float16", Rows, "skip"),
        (BATCHED_CROSSED, "rhs", "n", "float32", Lengths, "zero"),
        (PADDED_CONV2D, "weight", "c", "float16", Rows, "zero"),
        (REDUCE_SUM, "data", "q", "bfloat16", Rows, "skip"),
    ],
    ids=named,
)
def test_named_slices_are_right_and_the_others_as_they_should_be(
    case: Case,
    operand: str,
    axis: str,
    dtype: str,
    kind: Callable[[int], SparsitySpec],
    dead: str,
    emulated: Callable[..., None],
    rng: np.random.Generator,
) -> None:
    emulated()
    spec = kind(case.inputs[operand].index(axis))
    for pattern in PATTERNS:
        by_slice.check(Legal(case, operand, (axis,)), axis, spec, dtype, pattern, dead, rng)


def test_live_pieces_of_an_output_are_computed_and_no_others_written(
    emulated: Callable[..., None], rng: np.random.Generator
) -> None:
    emulated()
    for pattern in PATTERNS:
        by_output.check(CROSSED, BlockMask(5, 64), "float32", pattern, rng, "zero", new=False)


def test_every_group_meets_its_matrix(
    emulated: Callable[..., None], rng: np.random.Generator
) -> None:
    emulated()
    for kind in by_group.ASSIGNMENTS:
        by_group.test_live_slices_meet_their_group_and_dead_ones_are_untouched("float32", kind, rng)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_outputs_begin_anywhere_and_keep_what_is_dead(
    dtype: str,
    skip: int,
    machine: Machine,
    emulated: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    emulated()
    monkeypatch.setattr(cuda_general_planner, "tf32_allowed", lambda: True)  # stores in pairs
    case = replace(WIDE, tensors=lambda dtype: op.matmul(None, 128, 96, dtype=dtype))
    made = machine.dispatcher(case, dtype, "lhs", Rows())
    made.form = replace(made.form, library=False)
    lhs, rhs = random_array((70, 96), dtype, rng), random_array((96, 128), dtype, rng)
    live = rng.random(70) < 0.5
    sparse, whole = (poison((70 * 128 + skip,), dtype)[skip:].reshape(70, 128) for _ in range(2))
    made.run((lhs, rhs), np.flatnonzero(live), sparse, choose=lambda plan: plan.choice)
    made._dense([OnDevice(lhs), OnDevice(rhs)], OnDevice(whole))
    np.testing.assert_allclose(whole, reference.matmul(lhs, rhs), atol=0.1)
    assert np.array_equal(sparse[live], whole[live]) and untouched(sparse[~live])


def test_sums_of_narrow_integers_wrap_before_anything_reads_them(
    machine: Machine, emulated: Callable[..., None], rng: np.random.Generator
) -> None:
    """C adds two of 8 bits in 32: a quotient of the sum must not see more than 8."""
    emulated()
    data = te.placeholder((te.var("m"), 7), "int8", "data")
    out = te.compute(data.shape, lambda m, n: tirx.max(data[m, n] + data[m, n], data[m, n]), "out")
    case: Any = SimpleNamespace(tensors=lambda _: [data, out])
    made = machine.dispatcher(case, "int8", "data", Rows(), dense=True)
    given = rng.integers(-128, 128, (9, 7)).astype("int8")
    for candidate in made.explain((), None, None, "").candidates:
        found = poison(given.shape, "int8")
        made.run((given,), np.arange(9), found, choose=lambda _, c=candidate: c)
        np.testing.assert_array_equal(found, np.maximum(given + given, given))
