"""Parts of the Hopper family of pieces of rows: knobs, and the lists that its producers make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from pit_tvm.selection.gpu_pieces import MOST_ROWS
from pit_tvm.structs import Tile

from .bits import below, is_set, lowest
from .hopper_block_parts import ones
from .hopper_knobs import SHARED_LIMIT, TILE_K, as_tile, knobs_of, require

PIECES = "pieces-hopper"
WORD = 32  # rows whose liveness one word holds
WORDS = MOST_ROWS // WORD  # of the rows of a tile with slots, at most


@dataclass(frozen=True)
class PiecesTile:
    """Knobs of the family; every field is a tuning decision.

    A CTA has room for the sums of ``rows`` rows and ``cols`` columns of out. ``room``: live rows
    that one of its ``stages`` takes at once. ``consumers``: warpgroups that multiply. ``slots``: 0
    gives every row a sum; 1 rows with several live pieces alone, so that tiles may be higher.
    """

    rows: int = 512
    cols: int = 64
    room: int = 64
    stages: int = 4
    consumers: int = 4
    slots: int = 0
    sms: int = 132

    @property
    def most_rows(self) -> int:
        """Rows of a tile, at most."""
        return MOST_ROWS if self.slots else self.rows

    @property
    def warpgroups(self) -> int:
        """Of a CTA: those that multiply, and a warp for every stage."""
        return self.consumers + -(-self.stages // 4)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers per thread, of those that a CTA begins with."""
        threads = 128 * self.warpgroups
        begins = threads * (65536 // threads // 8 * 8)
        producers = self.warpgroups - self.consumers
        return 64, min(232, (begins // 128 - 64 * producers) // self.consumers // 8 * 8)

    @property
    def aside(self) -> int:
        """Bytes of barriers and lists, before the tiles."""
        lists = self.stages * (self.room * 4 + 20) + 64 + self.cols * 4
        slots = 4 * WORDS * 4 + 96 + self.rows * 2 + self.stages * self.room * 2
        slots = slots if self.slots else 0
        return -(-(lists + slots) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of one CTA."""
        tiles = self.stages * (self.room + self.cols) * TILE_K * 2
        return self.aside + tiles + self.rows * self.cols * 4

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for a combination that the template cannot build."""
        rules = {
            "rows a multiple of 16 from 64": self.rows % 16 == 0 and self.rows >= 64,
            "slots 0, for whole words of rows, or 1": self.slots == 1
            or self.slots == 0 == self.rows % WORD <= self.rows <= MOST_ROWS,
            "cols 32 or 64": self.cols in (32, 64),
            "room a multiple of 8 from 16 to 64": self.room in range(16, 65, 8),
            "consumers 2, 3 or 4": self.consumers in (2, 3, 4),
            "stages a multiple of consumers up to 16": self.stages % self.consumers == 0
            and self.consumers <= self.stages <= 16,
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes <= SHARED_LIMIT,
        }
        require("pieces_kernel", self, rules)


@T.meta_class
class PieceLists:
    """What a stage's own warp lists: the live rows of one step, of some words of a tile.

    Consumers read where a row goes: to a slot, or to out at once, -1 - row. A list is made while
    the one before it is still in use: a stage has two. Lane i holds the words that are i modulo 32.

    Parameters
    ----------
    pool : SMEMPool
    lines : Buffer (steps, words), uint32: bit i of word w says whether row w * 32 + i lives
    """

    def __init__(self, pool: Any, lines: Any, size: Any, knobs: PiecesTile) -> None:
        self.lines, self.size, self.room = lines, size, knobs.room
        self.each, self.found = -(-knobs.most_rows // (WORD * 32)), bool(knobs.slots)
        self.goals = pool.alloc((knobs.stages, 2, knobs.room), "int16", align=16)
        if self.found:
            self.ids = pool.alloc((knobs.stages, knobs.room), "int16", align=16)  # rows
        self.heads = pool.alloc((knobs.stages,), "int32", align=16)

    def begin(self) -> None:
        """Registers of a producing thread."""
        self.coming = T.alloc_local([self.each], "uint32")
        self.words = T.alloc_local([self.each], "uint32")
        self.mine = T.alloc_local([-(-self.room // 16) * 4], "int32")
        self.kept = T.alloc_local([self.each], "uint32")
        self.first = T.alloc_local([self.each], "int32")
        self.before = T.local_scalar("int32")
        self.total = T.local_scalar("int32")

    @T.inline
    def know(self, slots, begin, end, lane):
        """Before words ``begin`` .. ``end`` - 1 of a tile: which rows have slots, and which."""
        if slots.found:
            for w in T.unroll(self.each):
                self.kept[w] = T.uint32(0)
                self.first[w] = 0
                if (w * 32 + lane >= begin) & (w * 32 + lane < end):
                    self.kept[w] = slots.kept[w * 32 + lane]
                    self.first[w] = slots.before[w * 32 + lane] - slots.before[begin]

    @T.inline
    def ask(self, step, word0, begin, end, lane):
        """Ask for the bits of these words of the tile that begins at ``word0``."""
        for w in T.unroll(self.each):
            at: T.let = w * 32 + lane
            self.coming[w] = T.uint32(0)
            if (at >= begin) & (at < end) & (word0 + at < self.size):
                self.coming[w] = self.lines[step, word0 + at]

    @T.inline
    def take(self, lane):
        """How many live, and how many of them before this lane's."""
        self.total = 0
        for w in T.unroll(self.each):
            self.words[w] = self.coming[w]
            self.total = self.total + ones(self.words[w])
        self.before = -self.total
        for d in T.unroll(5):
            left: T.int32 = T.cuda.__shfl_up_sync(T.uint32(0xFFFFFFFF), self.total, 1 << d, 32)
            if lane >= 1 << d:
                self.total = self.total + left
        self.before = self.before + self.total
        self.total = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), self.total, 31, 32)

    @T.inline
    def emit(self, stage, side, first, lane):
        """Rows number ``first`` and on of those that live, as many as there is room for. ``mine``:
        those that this lane fetches, if there are so many."""
        place: T.int32 = self.before - first
        for w in T.unroll(self.each):
            bits: T.uint32 = self.words[w]
            while bits != T.uint32(0):
                if (place >= 0) & (place < self.room):
                    bit: T.int32 = lowest(bits)
                    row: T.let = (w * 32 + lane) * WORD + bit
                    goal: T.int32 = row
                    if self.found:
                        self.ids[stage, place] = T.cast(row, "int16")
                        goal = -1 - row
                        if is_set(self.kept[w], bit) != 0:
                            goal = self.first[w] + ones(T.bitwise_and(self.kept[w], below(bit)))
                    self.goals[stage, side, place] = T.cast(goal, "int16")
                bits = T.bitwise_and(bits, bits - T.uint32(1))
                place = place + 1
        T.cuda.warp_sync()
        for p in T.unroll(self.room // 4):
            own: T.let = p * 4 + T.truncdiv(lane, 8)
            if self.found:
                self.mine[p] = T.int32(self.ids[stage, own])
            else:
                self.mine[p] = T.int32(self.goals[stage, side, own])

    @T.inline
    def fetch(self, tiles, source, stage, first, row0, k0, lane):
        """Ask for the depth from ``k0`` on of the rows that were emitted; eight lanes share one."""
        col: T.let = T.truncmod(lane, 8) * 8
        size: T.let = T.uint32(T.if_then_else(k0 + col < source.shape[1], 16, 0))
        for q in T.unroll(-(-self.room // 16)):
            if first + q * 16 < self.total:
                for p in T.unroll(4):
                    place: T.let = q * 16 + p * 4 + T.truncdiv(lane, 8)
                    if first + place < T.min(self.total, first + self.room):
                        row: T.let = row0 + self.mine[q * 4 + p]
                        T.ptx["cp.async.cg.shared.global"](
                            tiles.ptr_to([0, stage * self.room + place, col]),
                            source.ptr_to([T.int64(row), T.int64(k0 + col)]),
                            16,
                            size,
                        )


# Knobs that are sound on every Hopper chip, the first for the fewest live rows.
STARTING = (
    PiecesTile(592, 32, 64, 12, 4, slots=1),
    PiecesTile(1024, 32, 64, 8, 4),
    PiecesTile(512, 64, 64, 6, 3),
    PiecesTile(352, 64, 64, 8, 4),
)
# The same where the product is computed turned: halves of slots are wanted too.
FLIPPED = (PiecesTile(784, 32, 48, 12, 4, slots=1), *STARTING[1:])


def pieces_tile(tile: Tile) -> PiecesTile:
    """The kernel's knobs of a tile of this family.

    Raises
    ------
    TileNotFound
        The tile is of another family, has an unknown knob, or the template cannot build it.
    """
    return knobs_of(tile, PiecesTile, (PIECES,), rows=tile.tile_m, cols=tile.tile_n)


def starting_pieces(dtype: str, flip: bool = False) -> tuple[Tile, ...]:
    """Tiles of the family, for products that are computed as they are or turned (``flip``)."""
    tiles = FLIPPED if flip else STARTING
    return tuple(as_tile(knobs, PIECES, dtype, ("rows", "cols")) for knobs in tiles)
