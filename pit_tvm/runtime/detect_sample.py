"""Sampling a pattern: a few windows of 64x64, each line of one as the 64 bits of a word."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import tvm
from tvm.script import tirx as T
from tvm.tirx import const

from ..errors import ShapeError, mismatch
from ..selection.cover import SAMPLE_EXTENTS, WINDOW
from .detect_compact import GATHER_BITS
from .detect_plan import Build
from .detect_view import Elements

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, eq=False)
class SamplePlan:
    """Where the windows are.

    ``where``: int64 ``[windows, 5]``, per window the entry where its matrix begins, first row,
    first column, height and width. ``totals``: float64 ``[11]``, micro-tiles in all windows.
    ``args``: entries of a row, and rows and columns per entry.
    """

    entries: tuple[int, ...]
    where: npt.NDArray[np.int64]
    totals: npt.NDArray[np.float64]
    build: Build
    args: tuple[int, int, int]


def plan_sample(shape: tuple[int, ...], elements: Elements, windows: int) -> SamplePlan:
    """Place the windows in the last two dimensions of ``shape``, evenly and reproducibly.

    Bands of 64 rows are taken at even distances, columns by the golden ratio. ShapeError if
    there is no dimension.
    """
    if not shape:
        raise ShapeError(mismatch("shape", "at least one dimension", shape))
    rows, columns = (1, *shape)[-2:]
    grain_rows, grain_columns = (1, 1, *elements.grains)[-2:]
    entries = elements.entries(shape)
    layout = "bits" if elements.packed else "blocks" if elements.grains else "entries"
    build = partial(sample_windows, elements.bits, elements.sign, layout)

    per_matrix, per_band = -(-rows // WINDOW), -(-columns // WINDOW)
    bands = math.prod(shape[:-2]) * per_matrix
    chosen = min(windows, bands * per_band)
    number = np.arange(chosen)
    if chosen < windows:  # all of them
        band, cell = np.divmod(number, max(per_band, 1))
    else:
        band = number * bands // chosen
        cell = (np.modf(0.5 + number * GOLDEN)[0] * per_band).astype(np.int64)
    matrix, band = np.divmod(band, max(per_matrix, 1))
    where = np.empty((chosen, 5), np.int64)
    where[:, 0] = _matrix_starts(shape, elements, matrix)
    where[:, 1], where[:, 2] = band * WINDOW, cell * WINDOW
    where[:, 3] = np.minimum(WINDOW, rows - where[:, 1])
    where[:, 4] = np.minimum(WINDOW, columns - where[:, 2])
    totals = [_tiles(where[:, 3], a) @ _tiles(where[:, 4], b) for a, b in SAMPLE_EXTENTS]
    args = (entries[-1], grain_rows, grain_columns)
    return SamplePlan(entries, where, np.array(totals, np.float64), build, args)


def sample_windows(bits: int, sign: int, layout: str) -> tvm.IRModule:
    """Count the live micro-tiles of windows of 64x64.

    ``src``: entries of ``bits`` bits, live if a bit of ``sign`` is set; ``layout``: an entry is
    one element ("entries"), eight of a row ("bits"), or a block of ``grain_rows`` x
    ``grain_columns`` ("blocks"). ``where``: see `SamplePlan`. ``live``: int64 ``[11]``, in the
    order of ``SAMPLE_EXTENTS``.
    """
    dtype = f"uint{bits}"

    def any_bit(word: tvm.ir.Expr) -> tvm.ir.Expr:
        return T.Cast("int64", word != T.uint64(0))

    def ones(word: tvm.ir.Expr) -> tvm.ir.Expr:
        return T.Cast("int64", T.popcount(word))

    def parts(word: tvm.ir.Expr, width: int) -> tvm.ir.Expr:
        """How many of the ``width``-bit parts of a word are not 0."""
        mask = T.uint64((1 << width) - 1)
        shifts = range(0, WINDOW, width)
        return sum(any_bit((word >> T.uint64(s)) & mask) for s in shifts)

    def full_line(src: tvm.ir.Expr, at: tvm.ir.Expr) -> tvm.ir.Expr:
        """64 elements of a row as a word."""
        if layout == "bits":
            return T.reinterpret("uint64", src[T.Ramp(at, T.int64(1), 8)])
        entries = src[T.Ramp(at, T.int64(1), WINDOW)]
        if sign != (1 << bits) - 1:
            entries = entries & T.Broadcast(const(sign, dtype), WINDOW)
        flags = T.Cast(f"uint8x{WINDOW}", entries != T.Broadcast(const(0, dtype), WINDOW))
        words = T.reinterpret("uint64x8", flags) * T.Broadcast(T.uint64(GATHER_BITS), 8)
        return T.reinterpret("uint64", T.Cast("uint8x8", words >> T.Broadcast(T.uint64(56), 8)))

    @T.inline
    def part_line(src, at, width, line):
        """As ``full_line`` for ``width`` elements, into line[0]."""
        line[0] = T.uint64(0)
        if layout == "bits":
            for i in range(T.ceildiv(width, 8)):
                line[0] = line[0] | (T.Cast("uint64", src[at + i]) << T.Cast("uint64", i * 8))
            line[0] = line[0] & ((T.uint64(1) << T.Cast("uint64", width)) - T.uint64(1))
        else:
            for i in range(width):
                entry: T.let = src[at + i] & const(sign, dtype)
                found: T.let = T.Cast("uint64", entry != const(0, dtype))
                line[0] = line[0] | (found << T.Cast("uint64", i))

    @T.inline
    def block_line(src, at, column, width, grain, line):
        """As ``full_line`` with an entry for every ``grain`` elements, into line[0]."""
        line[0] = T.uint64(0)
        for i in range(T.ceildiv(column + width, grain) - column // grain):
            begin: T.let = T.max((column // grain + i) * grain - column, T.int64(0))
            end: T.let = T.min((column // grain + i + 1) * grain - column, width)
            if src[at + column // grain + i] != T.uint8(0):
                half: T.let = T.uint64(1) << T.Cast("uint64", end - begin - 1)
                line[0] = line[0] | ((half | (half - T.uint64(1))) << T.Cast("uint64", begin))

    @T.inline
    def merge(lines, count, factor):
        """OR of every ``factor`` lines, in place."""
        for r in range(count):
            for i in T.unroll(1, factor):
                lines[r * factor] = lines[r * factor] | lines[r * factor + i]
            lines[r] = lines[r * factor]

    @T.inline
    def tally(lines, sums):
        """Add a window's live micro-tiles, in the order of SAMPLE_EXTENTS."""
        for r in range(WINDOW):
            sums[0] = sums[0] + ones(lines[r])
            sums[1] = sums[1] + parts(lines[r], 32)
            sums[2] = sums[2] + any_bit(lines[r])
        merge(lines, 8, 8)
        for r in range(8):
            sums[3] = sums[3] + ones(lines[r])
        merge(lines, 4, 2)
        for r in range(4):
            sums[4] = sums[4] + ones(lines[r])
            sums[7] = sums[7] + parts(lines[r], 16)
        merge(lines, 2, 2)
        for r in range(2):
            sums[5] = sums[5] + ones(lines[r])
            sums[8] = sums[8] + parts(lines[r], 32)
            sums[9] = sums[9] + any_bit(lines[r])
        merge(lines, 1, 2)
        sums[6] = sums[6] + ones(lines[0])
        sums[10] = sums[10] + any_bit(lines[0])

    @T.prim_func(s_tir=True)
    def main(
        p_src: T.handle,
        p_where: T.handle,
        p_live: T.handle,
        windows: T.int64,
        pitch: T.int64,
        grain_rows: T.int64,
        grain_columns: T.int64,
    ):
        n_src = T.int64()
        n_where = T.int64()
        src = T.match_buffer(p_src, (n_src,), dtype, align=bits // 8)
        where = T.match_buffer(p_where, (n_where,), "int64", align=8)
        live = T.match_buffer(p_live, (len(SAMPLE_EXTENTS),), "int64", align=8)
        lines = T.alloc_buffer((WINDOW,), "uint64")
        line = T.alloc_buffer((1,), "uint64")
        sums = T.alloc_buffer((len(SAMPLE_EXTENTS),), "int64")
        for i in range(len(SAMPLE_EXTENTS)):
            sums[i] = T.int64(0)
        for window in range(windows):
            base: T.let = where[window * 5]
            row: T.let = where[window * 5 + 1]
            column: T.let = where[window * 5 + 2]
            height: T.let = where[window * 5 + 3]
            width: T.let = where[window * 5 + 4]
            for r in range(height):
                if layout == "blocks":
                    blocks: T.let = base + (row + r) // grain_rows * pitch
                    if T.Or(r == 0, (row + r) % grain_rows == 0):
                        block_line(src, blocks, column, width, grain_columns, line)
                    lines[r] = line[0]
                else:
                    at: T.let = base + (row + r) * pitch + column // (8 if layout == "bits" else 1)
                    if width == WINDOW:
                        lines[r] = full_line(src, at)
                    else:
                        part_line(src, at, width, line)
                        lines[r] = line[0]
            for r in range(WINDOW - height):
                lines[height + r] = T.uint64(0)
            tally(lines, sums)
        for i in range(len(SAMPLE_EXTENTS)):
            live[i] = sums[i]

    return tvm.IRModule({"main": main})


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
