"""Products of a tile's 64 rows and the rows of a step: by warps of 16 rows (mma.sync, from Ampere
on), or by the four of them as a group, for which rows stay in shared memory (wgmma, Hopper alone).

Rows lie in matrices of 64 columns, pieces of 16 bytes swizzled as wgmma has it, so that those of
eight rows lie in all banks. Sums of 16 rows by columns lie as both instructions leave them: number
``j * 4 + r * 2 + e`` of a lane is in row ``lane / 4 + 8 * r`` and column ``j * 8 + lane % 4 * 2 +
e`` of its warp.
"""

from __future__ import annotations

import math
from typing import Any

from tvm.script import tirx as T

from .hopper_combine import PACK
from .hopper_swrite import PTX_TYPE

STEP = 64  # columns of a matrix: widths of heads are multiples in shared memory
KEYS = 64  # rows of a step
ROWS = 16  # of a warp, and of one instruction
PIECE = 8  # elements of 16 bits in 16 bytes
_PIECES = STEP // PIECE
# Of descriptors, in units of 16 bytes: 8 rows, 16 columns, a matrix of a step.
_EIGHT_ROWS, _SIXTEEN_COLUMNS, _MATRIX = 64, 2, KEYS * STEP // PIECE
_SWIZZLE = 3  # of rows of 128 bytes


def place_of(row: Any, piece: Any) -> tuple[Any, Any, Any]:
    """Matrix, row and first column of a piece of a row."""
    swizzled = T.bitwise_xor(T.truncmod(piece, _PIECES), T.truncmod(row, 8)) * PIECE
    return T.truncdiv(piece, _PIECES), row, swizzled


@T.inline
def load(rows, own, step, place, warp, lane):
    """``a[place ..]``: the warp's rows by the 16 columns of a step."""
    row: T.let = warp * ROWS + T.truncmod(lane, ROWS)
    T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
        *[rows.a[place + i] for i in range(4)],
        own.ptr_to([*place_of(row, step * 2 + T.truncdiv(lane, ROWS))]),
    )


@T.inline
def _multiply(rows, sums, at, left, place, h):
    """sums[at ..] += 16 rows of ``left`` by 8 columns of ``b``."""
    kind = T.meta_var(PTX_TYPE[rows.tile.dtype])
    held = T.meta_var([sums[at + i] for i in range(4)])
    T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"](
        *held, *[left[place + i] for i in range(4)], rows.b[h * 2], rows.b[h * 2 + 1], *held
    )


@T.inline
def score_by_warps(rows, scores, own, at, others, slot, wide, warp, lane):
    """See `ListedRows.score`."""
    for i in T.unroll(KEYS // 2):
        scores[i] = T.float32(0)
    for s in T.unroll(wide // 16):
        if at < 0:
            load(rows, own, s, 0, warp, lane)
        place = T.meta_var(0 if at < 0 else at + s * 4)
        for j in T.unroll(KEYS // 16):
            row: T.let = j * 16 + T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8)
            T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                *[rows.b[i] for i in range(4)],
                others.ptr_to([slot, *place_of(row, s * 2 + T.truncmod(T.truncdiv(lane, 8), 2))]),
            )
            for h in T.unroll(2):
                _multiply(rows, scores, j * 8 + h * 4, rows.a, place, h)


@T.inline
def cap(rows):
    """``rows.scores`` become ``tanh(bend * score) / bend``, the slope of which is one at 0."""
    most: T.let = T.float32(1) / rows.bend
    by: T.let = T.float32(2 * math.log2(math.e)) * rows.bend
    for i in T.unroll(KEYS // 2):
        T.ptx["ex2.approx.ftz.f32"](rows.held[0], rows.scores[i] * by)
        T.ptx["rcp.approx.ftz.f32"](rows.held[0], rows.held[0] + T.float32(1))
        rows.scores[i] = most - T.float32(2) * most * rows.held[0]


@T.inline
def pack(rows, weights, at):
    """``p[at ..]``: weights in 16 bits, as both products take them."""
    word = T.meta_var(PACK[rows.tile.dtype])
    for i in T.unroll(KEYS // 4):
        T.ptx[word](rows.p[at + i], weights[i * 2 + 1], weights[i * 2])


@T.inline
def add_by_warps(rows, sums, others, slot, wide, lane, at):
    """See `ListedRows.add`."""
    for s in T.unroll(KEYS // 16):
        row: T.let = s * 16 + T.truncmod(lane, 16)
        for c in T.unroll(wide // 16):
            T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"](
                *[rows.b[i] for i in range(4)],
                others.ptr_to([slot, *place_of(row, c * 2 + T.truncdiv(lane, 16))]),
            )
            for h in T.unroll(2):
                _multiply(rows, sums, c * 8 + h * 4, rows.p, at + s * 4, h)


def _chain(rows: Any, columns: int) -> str:
    kind = PTX_TYPE[rows.tile.dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"


@T.inline
def score_by_group(rows, scores, own, others, slot, wide):
    """See `ListedRows.score`."""
    # Not from fragments that registers hold, which ptxas 13.0 gave to others within a step.
    chain = T.meta_var(_chain(rows, KEYS))
    mine: T.uint64 = T.uint64(0)
    theirs: T.uint64 = T.uint64(0)
    layout = T.meta_var((1, _EIGHT_ROWS, _SWIZZLE))
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(mine), own.ptr_to([0, 0, 0]), *layout)
    T.cuda.wgmma.encode_matrix_descriptor(
        T.address_of(theirs), others.ptr_to([slot, 0, 0, 0]), *layout
    )
    T.ptx.wgmma.fence.sync.aligned()
    for s in T.unroll(wide // 16):
        far = T.meta_var(T.uint64(s // 4 * _MATRIX + s % 4 * _SIXTEEN_COLUMNS))
        held = T.meta_var([scores[i] for i in range(KEYS // 2)])
        T.ptx[chain](*held, mine + far, theirs + far, s > 0, 1, 1, 0, 0)
    T.ptx.wgmma.commit_group.sync.aligned()


@T.inline
def add_by_group(rows, sums, others, slot, wide, at):
    """See `ListedRows.add`."""
    chain = T.meta_var(_chain(rows, wide))
    theirs: T.uint64 = T.uint64(0)
    T.cuda.wgmma.encode_matrix_descriptor(
        T.address_of(theirs), others.ptr_to([slot, 0, 0, 0]), _MATRIX, _EIGHT_ROWS, _SWIZZLE
    )
    T.ptx.wgmma.fence.sync.aligned()
    for s in T.unroll(KEYS // 16):
        T.ptx[chain](
            *[sums[i] for i in range(wide // 2)],
            *[rows.p[at + s * 4 + i] for i in range(4)],
            theirs + T.uint64(s * 2 * _EIGHT_ROWS),
            True,
            1,
            1,
            1,
        )
    T.ptx.wgmma.commit_group.sync.aligned()
