"""What is tuned: families of tiles, their search spaces, and random data to check a tile with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm_ffi
from tvm import IRModule, runtime
from tvm.ir import TensorLoad
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.tirx import IntImm, PrimFunc, decl_buffer
from tvm_ffi import DLDeviceType

from ..errors import DTypeError, ShapeError, TileNotFound, TuningError, mismatch
from ..memory import aligned_empty, numpy_dtype
from ..structs import Tile, TileTask

_ANY_GPU = "sm"
_CUDA = ("rows-cuda", *(f"columns-cuda-{height}" for height in (32, 64, 128)))
# Operator of the command line -> families of its tiles, by instruction set; "" is every CPU's, and
# "sm" every GPU's.
OPERATORS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "matmul": {
            "": ("contraction-rows", "contraction-depth", "contraction-blocks"),
            "sm_90a": ("rows-hopper",),
            _ANY_GPU: _CUDA,
        },
        "grouped_matmul": {"sm_90a": ("groups-hopper",)},
    }
)
# Family -> module of its search space.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(OPERATORS["matmul"][""], "pit_tvm.schedules.contraction_space"),
        **dict.fromkeys(("rows-hopper", "groups-hopper"), "pit_tvm.schedules.hopper_space"),
        **dict.fromkeys(_CUDA, "pit_tvm.schedules.cuda_contraction_space"),
    }
)
# Element types of families that do not compute all of their module's.
_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(("rows-hopper", "groups-hopper"), ("float16", "bfloat16"))
)
WRONG = "wrong result"
_REQUIRED = ("workload", "sample", "tile_of", "lower")
_OPTIONAL = ("example", "features", "kind_of", "starts")

# Largest error of a right tile, relative to the largest element of the exact result.
_TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
_MOST_RANDOM = 4_194_301  # a prime, so that no two rows of a tile are alike
_INTEGER_LIMIT = 8  # random integers are in [-8, 8), so that int8 is exact everywhere


@dataclass(frozen=True)
class Example:
    """Arguments of a workload and what they must give.

    ``inputs``: the parameters but the last, in order. ``expected``: float64, of the output's
    shape. ``dtype``: the output's type. ``tolerance``: relative to the largest ``expected``.
    ``accumulates``: the output's old elements are added to, so it starts at 0; any other output
    starts with poison.
    """

    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray
    dtype: str
    tolerance: float
    accumulates: bool = False

    def arguments(self, device: Any) -> list[Any]:
        """The inputs and an output to write to, on a TVM device."""
        start = 0 if self.accumulates else poison(self.dtype)
        before = np.full(self.expected.shape, start, numpy_dtype(self.dtype))
        return [to_device(array, device) for array in (*self.inputs, before)]

    def check(self, arguments: Sequence[Any]) -> None:
        """Compare the output that ``arguments`` hold; TuningError with ``WRONG`` in its text."""
        check_error(relative_error(arguments[-1].numpy(), self.expected), self.tolerance)


@dataclass(frozen=True)
class Space:
    """The search space of one family.

    ``workload(task)``: PrimFunc, its output last; symbolic extents are those of the example.
    ``sample(sch, task)``: samples the knobs and applies the schedule. ``tile_of(sch, task)``:
    reads the decided tile back. ``lower(mod)``: what runs between scheduling and ``tvm.compile``.
    ``example(task, rng)``: inputs and the float64 result; None where the parameters are
    ``lhs [m, k]``, ``rhs [k, n]`` or packed ``[panels, k, width]``, and ``out [m, n]``.
    ``features(tile, task)``: numbers for the cost model beside the decisions, at most 8.
    ``kind_of(tile)``: what tells tiles of equal extents apart that are all worth keeping.
    ``starts(task)``: decisions, as positions in the order of sampling, of candidates to measure
    first.
    """

    workload: Callable[[TileTask], PrimFunc]
    sample: Callable[[Schedule, TileTask], None]
    tile_of: Callable[[Schedule, TileTask], Tile]
    lower: Callable[[IRModule], IRModule]
    example: Callable[[TileTask, np.random.Generator], tuple[Sequence[np.ndarray], np.ndarray]] | (
        None
    ) = None
    features: Callable[[Tile, TileTask], Sequence[float]] | None = None
    kind_of: Callable[[Tile], tuple[int, ...]] | None = None
    starts: Callable[[TileTask], Sequence[Sequence[int]]] | None = None


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
    missing = [name for name in _REQUIRED if not hasattr(module, name)]
    if missing:
        raise TuningError(mismatch(f"search space {module.__name__}", missing, "none of them"))
    functions: dict[str, Any] = {name: getattr(module, name) for name in _REQUIRED}
    functions |= {name: getattr(module, name, None) for name in _OPTIONAL}
    return Space(**functions)


def make_tasks(
    op: str,
    shape: Sequence[int],
    dtype: str,
    isa: str,
    groups: int = 1,
    share: int = 1,
    wanted: Sequence[str] | None = None,
) -> tuple[TileTask, ...]:
    """Tasks of the operator ``op`` at ``shape`` (m, n, k), one for each family of its tiles.

    Those of the very instruction set go before those of any like it: what is not ``wanted`` by
    name is tuned in the first alone, where they compute ``dtype``.

    Raises
    ------
    TileNotFound
        No family computes the operator on that instruction set.
    ShapeError
        ``shape`` is not three positive integers, or ``groups`` or ``share`` is none; a row that
        several share needs groups.
    """
    if op not in OPERATORS:
        raise TileNotFound(mismatch("op", f"one of {sorted(OPERATORS)}", repr(op)))
    if len(shape) != 3 or any(extent < 1 for extent in (*shape, groups, share)):
        expected = "m,n,k, groups and share, integers of at least 1"
        raise ShapeError(mismatch("shape", expected, (*shape, groups, share)))
    if groups > 1 and not op.startswith("grouped"):
        raise ShapeError(mismatch("groups", f"1 for {op}", groups, "op grouped_matmul has more"))
    if share > 1 and groups == 1:
        raise ShapeError(mismatch("share", "1 for one group", share))
    kind = _ANY_GPU if isa.startswith("sm_") else ""
    own, common = (
        tuple(name for name in OPERATORS[op].get(key, ()) if dtype in _DTYPES.get(name, (dtype,)))
        for key in (isa, kind)
    )
    if not own and not common:
        known = sorted(name or "any CPU" for name in OPERATORS[op])
        raise TileNotFound(mismatch(f"target of {op}", f"one of {known} in {dtype}", isa))
    families = own or common
    if wanted:
        families = tuple(name for name in (*own, *common) if name in wanted)
    m, n, k = shape
    return tuple(TileTask(family, isa, dtype, m, n, k, groups, share) for family in families)


def has_groups(dtype: str, isa: str) -> bool:
    """Whether groups have tiles of their own on that instruction set."""
    families = OPERATORS["grouped_matmul"].get(isa, ())
    return any(dtype in _DTYPES.get(name, (dtype,)) for name in families)


def workload_module(space: Space, task: TileTask) -> IRModule:
    """The task's unscheduled module, its one function named ``main``, of static shape.

    MetaSchedule refuses symbolic extents; they are bound to those of the space's example. It tells
    workloads apart by the module, which may not show how much of an operand lives: so the task is
    noted on it.
    """
    sizes = "x".join(map(str, (task.m, task.n, task.k, task.groups, task.share)))
    func = space.workload(task).with_attr("global_symbol", "main").with_attr("pit.sizes", sizes)
    if space.example is not None and any(not _is_static(param.ty) for param in func.params):
        inputs, _ = space.example(task, np.random.default_rng(0))
        for param, array in zip(func.params, inputs, strict=False):
            if not _is_static(param.ty):
                func = func.specialize({param: _bound(param, array.shape)})
    return IRModule({"main": func})


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
    mod = workload_module(space, task)
    params = parameters(mod)
    shape, dtype = params[-1]
    if space.example is not None:
        inputs, expected = space.example(task, rng)
    else:
        inputs, expected = _product_example(task, params, rng)
    if [array.shape for array in inputs] != [p[0] for p in params[:-1]] or expected.shape != shape:
        got = ([array.shape for array in inputs], expected.shape)
        raise TuningError(mismatch("example", f"arrays of the shapes {params}", got))
    tolerance = tolerance_of(dtype)
    exact = expected.astype(np.float64)
    return Example(tuple(inputs), exact, dtype, tolerance, _accumulates(mod))


def random_array(shape: Sequence[int], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Random elements: standard normal, or integers between -8 and 7; a large array repeats."""
    size = math.prod(shape)
    if size > _MOST_RANDOM:
        return np.resize(random_array((_MOST_RANDOM,), dtype, rng), tuple(shape))
    if "int" in dtype:
        low = 0 if dtype.startswith("uint") else -_INTEGER_LIMIT
        return rng.integers(low, _INTEGER_LIMIT, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def tolerance_of(dtype: str) -> float:
    """Largest relative error of a right result of an output type; DTypeError if none is known."""
    tolerance = 0.0 if "int" in dtype else _TOLERANCES.get(dtype)
    if tolerance is None:
        raise DTypeError(mismatch("workload output", f"one of {sorted(_TOLERANCES)}", dtype))
    return tolerance


def check_error(error: float, tolerance: float) -> None:
    """TuningError with ``WRONG`` in its text if a relative error is above its tolerance."""
    if error > tolerance:
        expected = f"a relative error of at most {tolerance:g}"
        raise TuningError(mismatch(WRONG, expected, f"{error:.3g}"))


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over the largest expected element; infinite if ``got`` is not finite."""
    actual = got.astype(np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    return float(np.abs(actual - expected).max(initial=0.0)) / scale


def poison(dtype: str) -> float:
    """A value that shows where nothing was written."""
    return 77 if "int" in dtype else float("nan")


def to_device(array: np.ndarray, device: Any) -> Any:
    """A copy of an array on a TVM device; this CPU's lies on pages like a packed operand's."""
    if device.dlpack_device_type() != DLDeviceType.kDLCPU or array.dtype.name == "bfloat16":
        return runtime.tensor(np.ascontiguousarray(array), device)
    copy = aligned_empty(array.shape, array.dtype, lasting=True)
    copy[...] = array
    return runtime.from_dlpack(copy)


def _is_static(buffer: Any) -> bool:
    return all(isinstance(extent, IntImm) for extent in buffer.shape)


def _bound(param: Any, shape: tuple[int, ...]) -> Any:
    """A buffer like the parameter, with extents."""
    kind = param.ty
    return decl_buffer(shape, str(kind.dtype), param.name, data_alignment=int(kind.data_alignment))


def _accumulates(mod: IRModule) -> bool:
    """Whether a block without initial value reads the output."""
    func = mod["main"]
    found: list[bool] = []

    def visit(block: SBlock) -> None:
        inner: list[SBlock] = []
        loads: list[TensorLoad] = []
        tvm_ffi.structural_walk(block.body, [(SBlock, inner.append), (TensorLoad, loads.append)])
        reads = any(load.source.same_as(func.params[-1]) for load in loads)
        found.append(reads and block.init is None and not inner)

    tvm_ffi.structural_walk(func.body, (SBlock, visit))
    return any(found)


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
