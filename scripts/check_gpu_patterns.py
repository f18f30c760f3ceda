"""Random calls of the operators in ``check_gpu_kinds.py``, and what their results must be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from bench_rows import Array
from check_gpu_kinds import KERNEL, KINDS, ROWS, Kind
from check_gpu_problem import (
    AMOUNTS,
    PART,
    SCALE,
    SHARES,
    Problem,
    activation,
    draw_extent,
    draw_whole,
    placed,
)
from check_gpu_tiles import WIDTHS

from pit_tvm import Operator
from pit_tvm.reference.index import dense_mask
from pit_tvm.runtime.cuda_few_rows import MOST_ROWS, STEP
from pit_tvm.runtime.cuda_form import SLOTS
from pit_tvm.structs import BitMask, BlockMask, Grid, Groups, Lengths, Rows, Values

MOST, LARGE = 400, 1500  # of an extent, and of one in ten
ELEMENTS = 2_000_000  # of a weight for a few rows


@dataclass(frozen=True)
class Call:
    """One call of a kind without its data. ``sizes``: extents of all axes; ``parts``: sequences
    that lengths are of; ``offset``: elements by which operands and output lie off their alignment;
    ``wide``: int64 lengths and ids, and of a grid uint8 for bool."""

    kind: Kind
    sizes: tuple[tuple[str, int], ...]
    parts: int = 1
    offset: int = 0
    wide: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={extent}" for axis, extent in self.sizes)
        return f"{self.kind} {sizes} offset {self.offset}"

    @cached_property
    def extents(self) -> dict[str, int]:
        """Extents by axis."""
        return dict(self.sizes)

    def shape(self, axes: str) -> tuple[int, ...]:
        """Extents of some axes."""
        return tuple(self.extents[axis] for axis in axes)

    @property
    def whole(self) -> bool:
        """Whether all tiles that its plans name are checked: of decoding those of a few rows, of
        other products of rows those without an epilogue."""
        kind = self.kind
        if isinstance(kind.spec, Values) and (kind.packed or kind.stored[1] == "kn"):
            few = self.extents["m"] <= MOST_ROWS and self.extents["n"] % STEP == 0
            if few or kind.family == "decode":
                return few
        return kind.plain or kind.family not in ROWS


def draw_call(rng: np.random.Generator, family: str, number: int) -> Call:
    """Random sizes for the kind whose turn it is."""
    kind = KINDS[family][number % len(KINDS[family])]
    most = LARGE if rng.random() < 0.1 else MOST
    sizes = {axis: draw_extent(rng, most) for axis in kind.order} | kind.known
    if family == "decode":  # a few rows mostly, and now and then a wide weight
        sizes["m"] = int(rng.integers(1, MOST_ROWS + 1 if rng.random() < 0.8 else 65))
        if rng.random() < 0.5:
            sizes["n"] = int(rng.choice(WIDTHS)) - 8 * int(rng.integers(0, 9))
        sizes["k"] = int(rng.integers(1, min(6000, ELEMENTS // sizes["n"])))
    elif "m" in sizes and "m" not in kind.known and rng.random() < 0.02:
        sizes["m"] = 0
    elif family in ROWS and rng.random() < 0.3:
        sizes["m"] = int(rng.integers(0, 40))
    if sizes.get("g", 0) > 8:  # a large weight, unless its matrices are small
        sizes |= {axis: draw_extent(rng, 96) for axis in "nk"}
    beside = "n" if kind.folds else "b"
    if beside in sizes and beside not in kind.known:
        sizes[beside] = int(rng.integers(1, 9))
    if kind.folds:
        sizes |= dict(zip("ij", KERNEL, strict=True))
    parts = 1
    if isinstance(kind.spec, Lengths):
        parts = int(rng.choice([p for p in range(1, 9) if sizes[kind.named] % p == 0]))
    offset = int(rng.integers(1, 8)) if rng.random() < 0.1 else 0
    return Call(kind, tuple(sizes.items()), parts, offset, bool(rng.random() < 0.3))


# --------------------------------------------------------------------------------------------
# Patterns


def draw_pattern(rng: np.random.Generator, call: Call, amount: str) -> tuple[Array | None, Array]:
    """What a call passes, None where the operand tells, and which elements of the operand live."""
    spec, shape = call.kind.spec, call.shape(call.kind.axes)
    whole = np.int64 if call.wide else np.int32
    told: Array | None
    if not call.kind.named:
        blocks = tuple(getattr(spec, "extents", ()) or (1, 1))
        if call.kind.axes == "km" and call.kind.family in ROWS:
            alive = _draw_rows(rng, shape[::-1], blocks[::-1], amount).T
        else:
            draw = _draw_rows if call.kind.family in ROWS else _draw_blocks
            draw = _draw_grid if isinstance(spec, Grid) else draw
            alive = draw(rng, shape, blocks, amount)
        live = alive.repeat(blocks[0], 0).repeat(blocks[1], 1)[: shape[0], : shape[1]]
        if isinstance(spec, Values):
            return None, live
        told = alive if isinstance(spec, BlockMask) else live
        if isinstance(spec, BitMask):
            told = np.packbits(live, axis=-1, bitorder="little")
        if isinstance(spec, Grid) and call.wide:
            told = live.astype(np.uint8)
        return np.ascontiguousarray(told), live
    extent = call.extents[call.kind.named]
    if isinstance(spec, Lengths):
        padded = extent // call.parts
        lengths = rng.binomial(padded, SHARES.get(amount, 0.01), call.parts)
        told = lengths if not spec.cumulative else np.concatenate([[0], np.cumsum(lengths)])
        told = told.astype(whole)
    elif isinstance(spec, Rows):
        alive = _draw_line(rng, extent, amount)
        told = rng.permutation(np.flatnonzero(alive)).astype(whole)
    else:
        alive = _draw_line(rng, extent, amount)
        groups = call.extents["g"] if rng.random() < 0.7 else max(1, call.extents["g"] // 8)
        ids = rng.integers(0, groups, extent)
        told = np.where(alive, ids, -1).astype(np.int32)
    return told, dense_mask(spec, told, shape)


def _draw_grid(
    rng: np.random.Generator, shape: tuple[int, ...], blocks: tuple[int, ...], amount: str
) -> Array:
    """Which elements live: ``amount`` of the rows, each in columns of which any amount does."""
    amounts = (amount, str(rng.choice(AMOUNTS)))
    rows, columns = (_draw_line(rng, *axis) for axis in zip(shape, amounts, strict=True))
    return np.outer(rows, columns)


def _draw_rows(
    rng: np.random.Generator, shape: tuple[int, ...], blocks: tuple[int, ...], amount: str
) -> Array:
    """Which blocks live: ``amount`` of the rows of blocks, and in each of these some."""
    high, wide = _blocks_of(shape, blocks)
    rows = _draw_line(rng, high, amount)
    alive = rows[:, None] & (rng.random((high, wide)) < rng.choice([0.02, 0.5, 1.0]))
    alive[rows, rng.integers(0, wide, int(rows.sum()))] = True
    return alive


def _draw_line(rng: np.random.Generator, extent: int, amount: str) -> Array:
    """Which slices of an axis live; as many each time of a `PART`."""
    if amount == PART:
        return rng.permutation(extent) < round(SHARES[PART] * extent)
    return _draw_blocks(rng, (extent, 1), (1, 1), amount)[:, 0]


def _draw_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], blocks: tuple[int, ...], amount: str
) -> Array:
    """Which blocks live: one, or a share of them, here and there fewer, rows or columns alike."""
    high, wide = _blocks_of(shape, blocks)
    if amount == "one":
        alone = np.zeros(high * wide, bool)
        alone[:1] = True
        return rng.permutation(alone).reshape(high, wide)
    share = np.full((high, wide), SHARES[amount])
    if amount != "full" and rng.random() < 0.5:
        bent = (high, 1) if rng.random() < 0.5 else (1, wide)
        share = share * rng.choice([0.0, 0.1, 1.0, 2.0], bent)
    return rng.random((high, wide)) < share


def _blocks_of(shape: tuple[int, ...], blocks: tuple[int, ...]) -> list[int]:
    """How many blocks there are along each axis."""
    return [-(-size // block) for size, block in zip(shape, blocks, strict=True)]


# --------------------------------------------------------------------------------------------
# Data


def draw_data(
    rng: np.random.Generator, call: Call, amount: str, device: str, made: Operator
) -> Problem:
    """Data of a call of an operator, ``amount`` of its pattern live; what does not exist holds
    anything."""
    kind = call.kind
    told, live = draw_pattern(rng, call, amount)
    given = None if told is None else torch.from_numpy(told).to(device)
    ids = given if isinstance(kind.spec, Groups) else None
    named = _draw_operands(rng, call, live)
    gone = {name: _gone(kind, live, name) for name in named}
    clean = [np.where(gone[name], 0, array) for name, array in named.items()]
    want = _truth(kind, [torch.from_numpy(array).to(device).double() for array in clean], ids)
    nothing = 127 if kind.dtype == "int8" else np.nan
    passed: list[Any] = [
        placed(np.where(gone[name], nothing, array), kind.type_of(name), device, call.offset)
        for name, array in named.items()
    ]
    if kind.packed:
        passed[1] = made.pack(rhs=passed[1])
    if ids is not None:
        passed.append(ids)
    out = placed(np.zeros(want.shape), kind.type_of("out"), device, call.offset)
    written = torch.from_numpy(_promised(kind, live, tuple(want.shape))).to(device)
    return Problem(call, tuple(passed), None if ids is not None else given, out, written, want)


def _draw_operands(rng: np.random.Generator, call: Call, live: Array) -> dict[str, Array]:
    """Operands and bias, zero where a mask says so."""
    kind = call.kind
    scale = 1.0 if kind.dtype == "int8" else SCALE
    named = {"lhs": draw_whole(rng, call.shape(kind.stored[0]))}
    named["rhs"] = draw_whole(rng, call.shape(kind.stored[1])) * scale
    if kind.bias:
        named["bias"] = draw_whole(rng, call.shape(kind.axes_of_bias))
    if not kind.named and kind.sparse != "out":
        values = named[kind.sparse]
        if isinstance(kind.spec, Values):  # whose zeros are the pattern
            values = np.where(values == 0, 1, values)
        named[kind.sparse] = np.where(live, values, 0)
    return named


def _gone(kind: Kind, live: Array, name: str) -> Array:
    """Which slices of an operand do not exist, to be broadcast to it."""
    axes = dict(zip(("lhs", "rhs"), kind.stored, strict=True)).get(name, "")
    return ~_along(kind, live, axes) if kind.named and kind.named in axes else np.zeros((), bool)


def _along(kind: Kind, live: Array, axes: str) -> Array:
    """Which slices of the named axis live, to be broadcast to an array of ``axes``."""
    at = kind.axes.index(kind.named)
    alone = np.asarray(live.any(axis=tuple(d for d in range(live.ndim) if d != at)))
    return alone.reshape([-1 if axis == kind.named else 1 for axis in axes])


def _promised(kind: Kind, live: Array, shape: tuple[int, ...]) -> Array:
    """bool of the output: what a call writes."""
    if kind.sparse == "out":
        width = (getattr(kind.spec, "extents", ()) or (1, 1))[1]
        slot = next((slot for slot in SLOTS if width % slot == 0), SLOTS[-1])
        pieces: Array = np.logical_or.reduceat(live, np.arange(0, shape[1], slot), axis=1)
        return pieces.repeat(slot, axis=1)[:, : shape[1]]
    if kind.named not in kind.out or not kind.named:
        return np.ones(shape, bool)
    return np.broadcast_to(_along(kind, live, kind.out), shape).copy()


def _truth(kind: Kind, arrays: list[torch.Tensor], ids: torch.Tensor | None) -> torch.Tensor:
    """The output in float64, of operands whose dead slices are zero."""
    lhs, rhs, *bias = arrays
    left, right = kind.stored
    if ids is not None:
        found = lhs.new_zeros(len(lhs), rhs.shape[right.index("n")])
        for group in set(ids.tolist()) - {-1}:
            rows = ids == group
            found[rows] = torch.einsum(f"{left},{right[1:]}->{kind.out}", lhs[rows], rhs[group])
            if bias:
                found[rows] += bias[0][group]
    elif kind.folds:
        found = torch.nn.functional.conv2d(lhs, rhs, bias[0] if bias else None)
    else:
        found = torch.einsum(f"{left},{right}->{kind.out}", lhs, rhs)
        found = found + bias[0] if bias else found
    return activation(kind.act)(found)
