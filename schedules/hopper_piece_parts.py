"""Parts of the Hopper family of pieces of rows: knobs, and the lists that its producers make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from pit_tvm.structs import Tile

from .hopper_block_parts import lowest, ones
from .hopper_knobs import SHARED_LIMIT, TILE_K, knobs_of, require

PIECES = "pieces-hopper"
ISA = "sm_90a"
WORD = 32  # rows whose liveness one word holds


@dataclass(frozen=True)
class PiecesTile:
    """Knobs of the family; every field is a tuning decision.

    A CTA holds the sums of ``rows`` rows and ``cols`` columns of out. ``room``: live rows that one
    of its ``stages`` takes at once. ``consumers``: warpgroups that multiply.
    """

    rows: int = 512
    cols: int = 64
    room: int = 64
    stages: int = 4
    consumers: int = 4
    sms: int = 132

    @property
    def words(self) -> int:
        """Words of a CTA's bits that one lane holds."""
        return -(-self.rows // (WORD * 32))

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
        return 56, min(232, (begins // 128 - 56 * producers) // self.consumers // 8 * 8)

    @property
    def aside(self) -> int:
        """Bytes of barriers and lists, before the tiles."""
        return -(-(self.stages * (self.room * 4 + 20) + 64) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of one CTA."""
        tiles = self.stages * (self.room + self.cols) * TILE_K * 2
        return self.aside + tiles + self.rows * self.cols * 4

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for a combination that the template cannot build."""
        rules = {
            "rows a multiple of 32 from 64": self.rows % WORD == 0 and self.rows >= 64,
            "cols 32 or 64": self.cols in (32, 64),
            "room 16, 32, 48 or 64": self.room in (16, 32, 48, 64),
            "consumers 2, 3 or 4": self.consumers in (2, 3, 4),
            "stages a multiple of consumers up to 16": self.stages % self.consumers == 0
            and self.stages <= 16,
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes <= SHARED_LIMIT,
        }
        require("pieces_kernel", self, rules)


@T.meta_class
class PieceLists:
    """What a stage's own warp lists: the live rows of one step in one range of rows.

    A list is made while the one before it is still in use: a stage has two.

    Parameters
    ----------
    pool : SMEMPool
    lines : Buffer (steps, words), uint32: bit i of word w says whether row w * 32 + i lives
    """

    def __init__(self, pool: Any, lines: Any, size: Any, knobs: PiecesTile) -> None:
        self.lines, self.size, self.room, self.each = lines, size, knobs.room, knobs.words
        self.ids = pool.alloc((knobs.stages, 2, knobs.room), "int16", align=16)
        self.heads = pool.alloc((knobs.stages,), "int32", align=16)

    def begin(self) -> None:
        """Registers of a producing thread."""
        self.coming = T.alloc_local([self.each], "uint32")
        self.words = T.alloc_local([self.each], "uint32")
        self.mine = T.alloc_local([self.room // 4], "int32")
        self.before = T.local_scalar("int32")
        self.total = T.local_scalar("int32")

    @T.inline
    def ask(self, step, row0, high, lane):
        """Ask for the bits of ``high`` rows from ``row0`` on; words of a lane are neighbours."""
        for w in T.unroll(self.each):
            at: T.let = lane * self.each + w
            self.coming[w] = T.uint32(0)
            if (at * WORD < high) & (T.truncdiv(row0, WORD) + at < self.size):
                self.coming[w] = self.lines[step, T.truncdiv(row0, WORD) + at]

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
                    row: T.let = (lane * self.each + w) * WORD + lowest(bits)
                    self.ids[stage, side, place] = T.cast(row, "int16")
                bits = T.bitwise_and(bits, bits - T.uint32(1))
                place = place + 1
        T.cuda.warp_sync()
        for p in T.unroll(self.room // 4):
            own: T.let = p * 4 + T.truncdiv(lane, 8)
            self.mine[p] = T.cast(self.ids[stage, side, own], "int32")


# Knobs that are sound on every Hopper chip, for few live rows, for more, and for small products.
STARTING = (
    PiecesTile(1024, 32, 64, 8, 4),
    PiecesTile(512, 64, 64, 6, 3),
    PiecesTile(352, 64, 64, 8, 4),
)


def pieces_tile(tile: Tile) -> PiecesTile:
    """The kernel's knobs of a tile of this family.

    Raises
    ------
    TileNotFound
        The tile is of another family, has an unknown knob, or the template cannot build it.
    """
    return knobs_of(tile, PiecesTile, (PIECES,), rows=tile.tile_m, cols=tile.tile_n)


def starting_pieces(dtype: str) -> tuple[Tile, ...]:
    """Tiles of the family."""
    return tuple(_as_tile(knobs, dtype) for knobs in STARTING)


def _as_tile(knobs: PiecesTile, dtype: str) -> Tile:
    rest = {name: getattr(knobs, name) for name in ("room", "stages", "consumers", "sms")}
    return Tile(PIECES, ISA, dtype, knobs.rows, knobs.cols, TILE_K, tuple(sorted(rest.items())))
