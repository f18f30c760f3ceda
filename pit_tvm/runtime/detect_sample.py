"""Sampling a pattern: a few windows of 64x64, each line of one as the 64 bits of a word, and a few
whole lines."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tvm_ffi

from ..errors import AxisError, ShapeError, mismatch
from ..selection.cover import SAMPLE_EXTENTS, WINDOW
from ..structs import BitMask, BlockMask, Mask, SparsitySpec, Values
from .argument import Argument, pattern_array
from .detect_plan import Build
from .detect_sample_kernel import COUNTS, FOUND, sample_windows
from .detect_view import Elements, elements_of, entries_of
from .gate import RANK, negated, row_of

WINDOWS = 32  # at most
GOLDEN = (math.sqrt(5) - 1) / 2
ROWS = 32  # lines that are read of a dimension at most twice as often,
MOST_LINES = 512  # and of all dimensions
_KEY = slice(8 * COUNTS, 9 * COUNTS)  # of what the kernel writes, in bytes


@dataclass(frozen=True)
class Lines:
    """Which whole lines of an operand are read: some along dimension ``beside`` for each position
    of ``row``; with ``crossed`` also, of these positions, those along ``row``."""

    row: int
    beside: int
    crossed: bool = False


class Sample(NamedTuple):
    """What a sample found.

    ``key``: the bucket of each density, in a byte. ``counts``: memory of int64 that begins with the
    numbers ``[COUNTS]`` of live micro-tiles in the order of ``SAMPLE_EXTENTS``, crossed lines,
    lines; ``totals``: float64 ``[COUNTS]``, of all of them.
    """

    key: bytes
    counts: bytes
    totals: npt.NDArray[np.float64]

    @property
    def live(self) -> npt.NDArray[np.int64]:
        """int64 ``[COUNTS]``: how many live."""
        return np.frombuffer(self.counts, np.int64, COUNTS)

    @property
    def densities(self) -> npt.NDArray[np.float64]:
        """float64 ``[COUNTS]``: shares of live ones; 1 for lines that nobody asked for."""
        return self.live / self.totals


@dataclass(frozen=True, eq=False)
class SamplePlan:
    """Where the windows and lines are.

    ``where``: int64 ``[windows, 5]``, per window the entry where its matrix begins, first row,
    first column, height and width. ``totals``: float64 ``[COUNTS]``, micro-tiles in all windows,
    crossed lines, lines. ``table``: int64, what the kernel reads of all that.
    """

    entries: tuple[int, ...]
    where: npt.NDArray[np.int64]
    totals: npt.NDArray[np.float64]
    table: npt.NDArray[np.int64]
    build: Build


def plan_sample(
    shape: tuple[int, ...], elements: Elements, lines: Lines | None = None
) -> SamplePlan:
    """Place the windows in the last two dimensions of ``shape``, evenly and reproducibly.

    Bands of 64 rows are taken at even distances, columns by the golden ratio. ShapeError if
    there is no dimension.
    """
    if not shape:
        raise ShapeError(mismatch("shape", "at least one dimension", shape))
    entries, where = elements.entries(shape), _windows(shape, elements)
    layout = "bits" if elements.packed else "blocks" if elements.grains else "entries"
    build = partial(sample_windows, elements.bits, elements.sign, layout)
    along, crossed = _lines(entries, lines)
    counts = [int(_tiles(where[:, 3], a) @ _tiles(where[:, 4], b)) for a, b in SAMPLE_EXTENTS]
    counts += [len(crossed.begins), len(along.begins)]
    totals = np.maximum(np.array(counts), 1)
    head = [len(where), math.prod(entries), entries[-1], *(1, 1, *elements.grains)[-2:]]
    for kind in (crossed, along):
        head += [len(kind.begins), kind.length, kind.stride]
    parts = (np.array(head), totals, where.reshape(-1), crossed.begins, along.begins)
    return SamplePlan(
        entries, where, totals.astype(np.float64), np.concatenate(parts, dtype=np.int64), build
    )


def _windows(shape: tuple[int, ...], elements: Elements) -> npt.NDArray[np.int64]:
    """``SamplePlan.where``."""
    rows, columns = (1, *shape)[-2:]
    per_matrix, per_band = -(-rows // WINDOW), -(-columns // WINDOW)
    bands = math.prod(shape[:-2]) * per_matrix
    chosen = min(WINDOWS, bands * per_band)
    number = np.arange(chosen)
    if chosen < WINDOWS:  # all of them
        band, cell = np.divmod(number, max(per_band, 1))
    else:
        band = number * bands // chosen
        cell = _spread(chosen, per_band)
    matrix, band = np.divmod(band, max(per_matrix, 1))
    where = np.empty((chosen, 5), np.int64)
    where[:, 0] = _matrix_starts(shape, elements, matrix)
    where[:, 1], where[:, 2] = band * WINDOW, cell * WINDOW
    where[:, 3] = np.minimum(WINDOW, rows - where[:, 1])
    where[:, 4] = np.minimum(WINDOW, columns - where[:, 2])
    return where


class _Places(NamedTuple):
    """Lines of ``length`` entries at distances of ``stride`` that begin at ``begins``."""

    begins: npt.NDArray[np.int64]
    length: int
    stride: int


def _lines(entries: tuple[int, ...], lines: Lines | None) -> tuple[_Places, _Places]:
    """Lines beside some rows, and those that cross them; none of what is not asked for."""
    nothing = _Places(np.empty(0, np.int64), 0, 0)
    if lines is None or 0 in entries:
        return nothing, nothing
    step = max(1, entries[lines.row] // ROWS)
    places = [np.arange(0, extent) for extent in entries]
    places[lines.row] = np.arange(step // 2, entries[lines.row], step)
    pitches = [math.prod(entries[d + 1 :]) for d in range(len(entries))]

    def along(dim: int, step: int) -> _Places:
        starts = [p[:1] if d == dim else p for d, p in enumerate(places)]
        grid = np.meshgrid(*(p * n for p, n in zip(starts, pitches, strict=True)), indexing="ij")
        begins = np.sum(grid, axis=0, dtype=np.int64).reshape(-1)
        if len(begins) > MOST_LINES:
            begins = begins[_spread(MOST_LINES, len(begins))]
        return _Places(begins, len(places[dim]), pitches[dim] * step)

    return along(lines.beside, 1), along(lines.row, step) if lines.crossed else nothing


def _spread(number: int, size: int) -> npt.NDArray[np.int64]:
    """Positions below ``size`` by the golden ratio, which no regular pattern follows."""
    return (np.modf(0.5 + np.arange(number) * GOLDEN)[0] * size).astype(np.int64)


def _matrix_starts(
    shape: tuple[int, ...], elements: Elements, matrix: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Entries before the matrix of the last two dimensions with the given numbers."""
    leading = len(shape) - 2
    if leading < 1:
        return np.zeros_like(matrix)
    entries = elements.entries(shape)
    grains = elements.grains or (1,) * len(shape)
    places = np.unravel_index(matrix, shape[:leading])
    blocks = tuple(p // g for p, g in zip(places, grains[:leading], strict=True))
    return np.ravel_multi_index(blocks, entries[:leading]) * math.prod(entries[leading:])


def _tiles(sizes: npt.NDArray[np.int64], extent: int) -> npt.NDArray[np.int64]:
    return -(-sizes // extent)


# --------------------------------------------------------------------------------------------
# Calls


class _Ready(NamedTuple):
    """The entries and totals of the plan for one type of array, its kernel, and as that takes them:
    what a flat view must be, what the array itself must be (None: it has too many dimensions), and
    the table."""

    entries: tuple[int, ...]
    totals: npt.NDArray[np.float64]
    kernel: Callable[..., int]
    element: np.dtype[Any]
    flat: Any
    whole: Any
    table: Any


class _Found(threading.local):
    """Where the calling thread's kernels write: `FOUND` words."""

    def __init__(self) -> None:
        self.array = np.empty(FOUND, np.int64)
        self.tensor = tvm_ffi.from_dlpack(self.array)


class SampleCall:
    """Sampling of one operand shape: what no call changes is looked up once. Threads may share it.

    ``kernel(build)`` gives the compiled kernel of a template. Errors are those of
    `Detector.sampling`, and name ``operand``.
    """

    def __init__(
        self,
        spec: SparsitySpec,
        shape: tuple[int, ...],
        kernel: Callable[[Build], Callable[..., int]],
        lines: Lines | None,
        operand: str,
    ) -> None:
        if not isinstance(spec, (Mask, Values, BitMask, BlockMask)):
            expected = "Mask, BitMask, BlockMask or Values"
            raise AxisError(mismatch("spec", expected, spec, "slices need no sampling"))
        self._spec, self._shape, self._kernel = spec, shape, kernel
        self._lines, self._operand = lines, operand
        self._ready: dict[np.dtype[Any], _Ready] = {}
        self._last: _Ready | None = None
        self._found = _Found()

    def take(self, value: Any) -> Sample:
        """The sample of what the user passed."""
        ready, found = self._last, self._found
        if ready is None or not _quick(ready, value, found.tensor):
            ready = self._long(value, found.tensor)
        counts = found.array.tobytes()
        return Sample(counts[_KEY], counts, ready.totals)

    def _long(self, value: Any, found: Any) -> _Ready:
        """Check the array from the start."""
        array = pattern_array(value)
        ready = self._ready.get(array.dtype)
        if ready is None:
            ready = self._ready[array.dtype] = self._prepare(array.dtype)
        flat = entries_of(self._spec, array, ready.entries, ready.element, self._operand)
        ready.kernel(ready.flat, flat, ready.table, found)
        self._last = ready
        return ready

    def _prepare(self, dtype: np.dtype[Any]) -> _Ready:
        elements, element = elements_of(self._spec, dtype, self._shape, self._operand)
        plan = plan_sample(self._shape, elements, self._lines)
        entries = plan.entries
        flat = _row("flat", element, (math.prod(entries),))
        whole = _row("whole", dtype, entries) if len(entries) <= RANK else None
        table = tvm_ffi.from_dlpack(plan.table)
        return _Ready(entries, plan.totals, self._kernel(plan.build), element, flat, whole, table)


def _row(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    row = row_of(Argument(name, dtype.name, shape))
    return tvm_ffi.from_dlpack(np.array([row], np.int64))


def _quick(ready: _Ready, value: Any, found: Any) -> bool:
    """Sample an array of the last one's kind as it is; False if it is of another."""
    if type(value) is np.ndarray:
        if not value.flags.writeable:  # DLPack would say so by an exception
            return False
    elif type(value) is not getattr(sys.modules.get("torch"), "Tensor", None) or negated(value):
        return False
    try:
        return ready.whole is not None and ready.kernel(ready.whole, value, ready.table, found) == 0
    except (BufferError, RuntimeError, TypeError, ValueError):  # DLPack cannot express it
        return False
