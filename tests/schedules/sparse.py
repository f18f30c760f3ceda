"""Random indexes and operands for sparse kernels, in memory that ends at a forbidden page.

Dead elements of the sparse operand are NaN, dead entries of the lists lie far outside of every
array, results are NaN before the call: whatever is touched without being live shows.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import te
from tvm.target import Target

from pit_tvm.memory import numpy_dtype
from pit_tvm.runtime.arrays import as_tensor
from pit_tvm.structs import MicroTile
from pit_tvm.target import TargetInfo, resolve_target

DEAD = 2**30  # an id far beyond every array
UNTOUCHED = 85  # stands for NaN in integers
PATTERNS = ("empty", "full", "one", "random")
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "int32": 0.0}


@functools.cache
def target() -> TargetInfo:
    """This machine's CPU."""
    return resolve_target("llvm")


def build(mod: tvm.IRModule, info: TargetInfo | None = None) -> Callable[..., None]:
    """Compiles a lowered module, for this machine's CPU or another target; the kernel takes numpy
    arrays."""
    function = tvm.compile(mod, target=Target((info or target()).tvm_target)).mod["main"]

    def call(*arrays: np.ndarray) -> None:
        function(*(as_tensor("a", a, dtype=a.dtype.name, shape=a.shape) for a in arrays))

    return call


def is_real(array: np.ndarray) -> bool:
    """Whether elements can be NaN."""
    return not np.issubdtype(array.dtype, np.integer)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers, or small whole ones."""
    if dtype.startswith("int"):
        return rng.integers(-8, 8, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A result that shows what was not written."""
    return np.full(shape, UNTOUCHED if dtype.startswith("int") else np.nan, numpy_dtype(dtype))


def is_untouched(array: np.ndarray) -> bool:
    """Whether all elements are as `poisoned` made them."""
    same = np.isnan(array.astype(np.float64)) if is_real(array) else array == UNTOUCHED
    return bool(same.all())


def fenced(array: np.ndarray, before: bool = False) -> np.ndarray:
    """A copy that ends where a page begins which nobody may touch, or begins where one ends."""
    page = mmap.PAGESIZE
    room = max(1, math.ceil(array.nbytes / page)) * page
    memory = mmap.mmap(-1, room + page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    fence = base if before else base + room
    if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    begin = page if before else room - array.nbytes
    raw = np.frombuffer(memory, np.uint8, array.nbytes, begin)
    copy = raw.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class Lists:
    """An index as kernels take it, and the elements of the operand that it covers."""

    ids: np.ndarray
    count: np.ndarray
    mask: np.ndarray


def live_ids(rng: np.random.Generator, pattern: str, extent: int) -> np.ndarray:
    """Live positions of one list, in random order."""
    number = {"empty": 0, "full": extent, "one": min(1, extent)}.get(pattern)
    order = rng.permutation(extent)
    return order[: rng.integers(0, extent + 1) if number is None else number]


def lists(
    rng: np.random.Generator, pattern: str, shape: tuple[int, ...], micro_tile: MicroTile
) -> Lists:
    """A random index of an operand of ``shape``, with room for a few entries too many."""
    dims = [d for d, e in enumerate(micro_tile.extents) if d != micro_tile.dim and e]
    slots = [math.ceil(shape[d] / micro_tile.extents[d]) for d in dims]
    extent = shape[micro_tile.dim]
    count = np.zeros(slots or [1], np.int32)
    ids = np.full((*count.shape, extent + int(rng.integers(0, 4))), DEAD, np.int32)
    mask = np.zeros(shape, bool)
    for slot in np.ndindex(count.shape):
        chosen = live_ids(rng, pattern, extent)
        ids[slot][: len(chosen)], count[slot] = chosen, len(chosen)
        box: list[Any] = [slice(None)] * len(shape)
        for d, position in zip(dims, slot, strict=False):
            size = micro_tile.extents[d]
            box[d] = slice(position * size, (position + 1) * size)
        for one in chosen:
            box[micro_tile.dim] = one
            mask[tuple(box)] = True
    return Lists(ids, count, mask)


def bury(operand: np.ndarray, mask: np.ndarray) -> None:
    """Dead elements become what shows in every result that they reach."""
    operand[~mask] = np.nan if is_real(operand) else UNTOUCHED


def assert_promise(out: np.ndarray, truth: np.ndarray, promised: np.ndarray | None = None) -> None:
    """What is ``promised`` (None: all) equals the truth; nothing else was written."""
    where = np.ones(out.shape, bool) if promised is None else np.broadcast_to(promised, out.shape)
    got, exact = out[where].astype(np.float64), truth[where]
    limit = TOLERANCE[out.dtype.name] * max(1.0, np.abs(exact).max(initial=0.0))
    assert np.abs(got - exact).max(initial=0.0) <= limit
    assert is_untouched(out[~where])


@dataclass(frozen=True)
class Case:
    """An operator, its sparse operand, and what its result is for inputs of ``shapes(m)``.

    ``truth`` takes the inputs and the operand's mask, ``promised`` the mask alone (None: all is
    promised). ``sums`` is the element type of the sums if they are added to the result.
    """

    tensors: list[te.Tensor]
    micro_tile: MicroTile
    shapes: Callable[[int], list[tuple[int, ...]]]
    truth: Callable[..., np.ndarray]
    promised: Callable[[np.ndarray], np.ndarray] | None = None
    sums: str = ""

    def inputs(self, rng: np.random.Generator, m: int) -> dict[str, np.ndarray]:
        """Random inputs, in order."""
        pairs = zip(self.tensors[:-1], self.shapes(m), strict=True)
        return {t.op.name: random(rng, shape, str(t.dtype)) for t, shape in pairs}

    def result(self, shape: tuple[int, ...]) -> np.ndarray:
        """The result before the call: poisoned, or zero where sums are added to it."""
        out = poisoned(shape, self.sums or str(self.tensors[-1].dtype))
        if self.sums:
            out[...] = 0
        return out


def check(
    case: Case,
    kernel: Callable[..., None],
    seed: int,
    m: int,
    pattern: str,
    before: bool = False,
    prepare: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
) -> None:
    """Runs one random example; ``prepare`` turns inputs into what the kernel takes."""
    rng = np.random.default_rng(seed)
    inputs = case.inputs(rng, m)
    operand = inputs[case.micro_tile.operand]
    index = lists(rng, pattern, operand.shape, case.micro_tile)
    truth = case.truth(*inputs.values(), index.mask)
    bury(operand, index.mask)
    for name, change in (prepare or {}).items():
        inputs[name] = change(inputs[name])
    arrays = [*inputs.values(), index.ids, index.count, case.result(truth.shape)]
    arrays = [fenced(array, before) for array in arrays]
    kernel(*arrays)
    assert_promise(arrays[-1], truth, case.promised and case.promised(index.mask))


def masked(name: str, function: Callable[..., Any], **options: Any) -> Callable[..., np.ndarray]:
    """A reference of `Case`: the mask of operand ``name`` comes last."""
    return lambda *arrays: function(*arrays[:-1], **{f"{name}_mask": arrays[-1]}, **options)


def rows(mask: np.ndarray) -> np.ndarray:
    """Rows of a result that are promised where rows of the operand are live."""
    return mask.any(axis=-1, keepdims=True)
