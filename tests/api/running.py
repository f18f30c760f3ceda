"""Compiling once, running every candidate, and comparing with the truth."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

import pit_tvm
from pit_tvm import Operator
from pit_tvm.memory import numpy_dtype
from pit_tvm.runtime.promise import asked_for
from pit_tvm.structs import Candidate, SparsitySpec
from pit_tvm.tile_db.store import TileStore

from .cases import GROUPS, Case

# Error relative to the largest truth.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
SENTINEL = 85  # in whole numbers that must not be written


def empty_database() -> TileStore:
    """A database without records, alone: the folder of kernels, which holds none."""
    return TileStore.open(os.environ["PIT_TVM_CACHE"])


def compiled(
    case: Case,
    dtype: str,
    operand: str,
    spec: SparsitySpec,
    dead: str = "skip",
    deterministic: bool = False,
    apply_mask: bool = False,
) -> Operator:
    """The operator of a case, compiled once in a session, with one tile of each family.

    Whether it checks what patterns promise is asked of the environment now.
    """
    options = (dead, deterministic, apply_mask)
    return _compiled(case, dtype, operand, spec, *options, asked_for())


@cache
def _compiled(
    case: Case,
    dtype: str,
    operand: str,
    spec: SparsitySpec,
    dead: str,
    deterministic: bool,
    apply_mask: bool,
    _checked: bool,
) -> Operator:
    return pit_tvm.compile(
        case.tensors(dtype),
        sparse={operand: spec},
        dead=dead,
        deterministic=deterministic,
        apply_mask=apply_mask,
        database=empty_database(),
    )


def random_array(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator, shift: float = 0.0
) -> np.ndarray:
    """Normal numbers of mean ``shift``, or whole ones over all of int8 or up to 2**20."""
    if dtype.startswith("int"):
        limit = 2**7 if dtype == "int8" else 2**20
        return rng.integers(-limit, limit, shape).astype(dtype)
    return (rng.standard_normal(shape) + shift).astype(numpy_dtype(dtype))


def random_inputs(case: Case, dtype: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random arrays for all inputs of a case, by name."""
    arrays = {}
    for name, shape in case.shapes(rng).items():
        kind = "int32" if dtype == "int8" and name == "bias" else dtype
        arrays[name] = random_array(shape, kind, rng, case.shift)
    if "group_ids" in arrays:
        rows = arrays["group_ids"].shape[0]
        arrays["group_ids"] = np.array(rng.integers(0, GROUPS, rows), np.int32)
    return arrays


def result_dtype(dtype: str) -> str:
    """Type of the result for operands of ``dtype``."""
    return "int32" if dtype == "int8" else dtype


def poison(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An output that shows what was not written."""
    kind = numpy_dtype(dtype)
    return np.full(shape, SENTINEL if dtype.startswith("int") else np.nan, kind)


def untouched(out: np.ndarray) -> bool:
    """Whether every element is as `poison` made it."""
    whole = out.dtype.kind == "i"
    return bool((out == SENTINEL).all() if whole else np.isnan(out.astype(np.float64)).all())


def assert_close(got: np.ndarray, truth: np.ndarray, what: object = "") -> None:
    """Error relative to the largest truth, by the type of ``got``; whole numbers are exact."""
    assert got.shape == truth.shape, what
    wide = np.asarray(got).astype(np.float64)
    error = np.abs(wide - truth).max(initial=0.0)
    assert not np.isnan(error), f"{what}: NaN in the result"
    allowed = TOLERANCE.get(got.dtype.name, 0.0) * np.abs(truth).max(initial=0.0)
    assert error <= allowed, f"{what}: error {error}, allowed {allowed}"


def every_candidate(
    operator: Operator, arrays: Sequence[Any], sparsity: Any, out_shape: tuple[int, ...], dtype: str
) -> Iterator[tuple[Candidate, np.ndarray]]:
    """Run all candidates of a call, each into a poisoned output of its own."""
    candidates = operator.explain(*arrays, sparsity=sparsity).candidates
    assert candidates
    for number in range(len(candidates)):
        out = poison(out_shape, dtype)
        _, plan = operator._dispatcher.run(
            arrays, sparsity, out, choose=lambda plan, n=number: plan.candidates[n]
        )
        assert plan is not None and str(plan.choice) == str(candidates[number])
        yield plan.choice, out


def truth_of(case: Case, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The case's float64 result."""
    return case.truth(*arrays.values())
