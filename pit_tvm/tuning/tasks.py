"""What is tuned: families of tiles, their search spaces, and random data to check a tile with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.tirx import PrimFunc

from ..errors import DTypeError, ShapeError, TileNotFound, TuningError, mismatch
from ..structs import Tile, TileTask

# Operator of the command line -> family, and family -> module of its search space.
OPERATORS: Mapping[str, str] = MappingProxyType({"matmul": "contraction"})
FAMILIES: Mapping[str, str] = MappingProxyType({"contraction": "pit_tvm.schedules.contraction"})
PIPELINE = "pit_tvm.transform.pipeline"

# Largest error of a right tile, relative to the largest element of the exact result.
_TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
_INTEGER_LIMIT = 8  # random integers are in [-8, 8), so that int8 is exact everywhere


@dataclass(frozen=True)
class Example:
    """Arguments of a workload and what they must give.

    ``inputs``: the parameters but the last, in order. ``expected``: float64, of the output's
    shape. ``dtype``: the output's type. ``tolerance``: relative to the largest ``expected``.
    """

    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray
    dtype: str
    tolerance: float


@dataclass(frozen=True)
class Space:
    """The search space of one family.

    ``workload(task)``: PrimFunc of static shape, its output last. ``sample(sch, task)``: samples
    the knobs and applies the schedule. ``tile_of(sch, task)``: reads the decided tile back.
    ``lower(mod)``: the passes that run between scheduling and ``tvm.compile``.
    ``example(task, rng)``: inputs and the float64 result; None where the parameters are
    ``lhs [m, k]``, ``rhs [k, n]`` or packed ``[panels, k, width]``, and ``out [m, n]``.
    """

    workload: Callable[[TileTask], PrimFunc]
    sample: Callable[[Schedule, TileTask], None]
    tile_of: Callable[[Schedule, TileTask], Tile]
    lower: Callable[[IRModule], IRModule]
    example: Callable[[TileTask, np.random.Generator], tuple[Sequence[np.ndarray], np.ndarray]] | (
        None
    ) = None


def load_space(family: str, families: Mapping[str, str] = FAMILIES) -> Space:
    """The search space of a family, from the module that the registry names.

    Raises
    ------
    TileNotFound
        No such family.
    TuningError
        Its module lacks a function.
    """
    if family not in families:
        raise TileNotFound(mismatch("task.family", f"one of {sorted(families)}", repr(family)))
    module = import_module(families[family])
    missing = [name for name in ("workload", "sample", "tile_of") if not hasattr(module, name)]
    if missing:
        raise TuningError(mismatch(f"search space {module.__name__}", missing, "none of them"))
    return Space(
        workload=module.workload,
        sample=module.sample,
        tile_of=module.tile_of,
        lower=import_module(PIPELINE).lower,
        example=getattr(module, "example", None),
    )


def make_task(
    op: str,
    shape: Sequence[int],
    dtype: str,
    isa: str,
    operators: Mapping[str, str] = OPERATORS,
) -> TileTask:
    """Task of the operator ``op`` at ``shape`` (m, n, k).

    Raises
    ------
    TileNotFound
        No family computes the operator.
    ShapeError
        ``shape`` is not three positive integers.
    """
    if op not in operators:
        raise TileNotFound(mismatch("op", f"one of {sorted(operators)}", repr(op)))
    if len(shape) != 3 or any(extent < 1 for extent in shape):
        raise ShapeError(mismatch("shape", "m,n,k, integers of at least 1", tuple(shape)))
    m, n, k = shape
    return TileTask(operators[op], isa, dtype, m, n, k)


def workload_module(space: Space, task: TileTask) -> IRModule:
    """The task's unscheduled module, its one function named ``main``."""
    return IRModule({"main": space.workload(task).with_attr("global_symbol", "main")})


def parameters(mod: IRModule) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each parameter of ``main``, in order; the output is the last."""
    infos = ArgInfo.from_entry_func(mod, remove_preproc=True)
    return [(tuple(int(extent) for extent in i.shape), str(i.dtype)) for i in infos]


def make_example(space: Space, task: TileTask, rng: np.random.Generator) -> Example:
    """Fresh random arguments of the task's workload, and their product in float64.

    Raises
    ------
    TuningError
        The space has no ``example`` and its parameters are none of the known layouts.
    DTypeError
        No tolerance is known for the output's dtype.
    """
    params = parameters(workload_module(space, task))
    shape, dtype = params[-1]
    if space.example is not None:
        inputs, expected = space.example(task, rng)
    else:
        inputs, expected = _product_example(task, params, rng)
    if [array.shape for array in inputs] != [p[0] for p in params[:-1]] or expected.shape != shape:
        got = ([array.shape for array in inputs], expected.shape)
        raise TuningError(mismatch("example", f"arrays of the shapes {params}", got))
    tolerance = 0.0 if "int" in dtype else _TOLERANCES.get(dtype)
    if tolerance is None:
        raise DTypeError(mismatch("workload output", f"one of {sorted(_TOLERANCES)}", dtype))
    return Example(tuple(inputs), expected.astype(np.float64), dtype, tolerance)


def random_array(shape: Sequence[int], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Random elements: standard normal, or integers between -8 and 7."""
    if "int" in dtype:
        low = 0 if dtype.startswith("uint") else -_INTEGER_LIMIT
        return rng.integers(low, _INTEGER_LIMIT, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> Any:
    """numpy's type of that name; bfloat16 comes from ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def _product_example(
    task: TileTask, params: list[tuple[tuple[int, ...], str]], rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """``lhs @ rhs`` for the layouts that ``Space.example`` names."""
    m, n, k = task.m, task.n, task.k
    shapes = [shape for shape, _ in params]
    known = len(params) == 3 and shapes[0] == (m, k) and shapes[2] == (m, n)
    plain = known and shapes[1] == (k, n)
    packed = known and len(shapes[1]) == 3 and shapes[1][1] == k
    if not plain and not packed:
        raise TuningError(
            mismatch(
                f"parameters of {task.family}",
                "lhs [m, k], rhs [k, n] or [panels, k, width], out [m, n]",
                shapes,
                "give the search space a function example(task, rng)",
            )
        )
    lhs, rhs = (random_array(shape, dtype, rng) for shape, dtype in params[:2])
    dense = rhs.astype(np.float64)
    if packed:
        dense = dense.transpose(1, 0, 2).reshape(k, -1)[:, :n]
    return [lhs, rhs], lhs.astype(np.float64) @ dense
