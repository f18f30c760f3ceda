"""Parts of the Hopper family of live blocks along k: knobs, tiles, operands, what lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.backend.cuda.tile_primitive.tma_utils import SwizzleMode
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from pit_tvm.structs import Tile

from .hopper_knobs import SHARED_LIMIT, TILE_K, RowsOptions, RowsTile, as_tile, knobs_of, require
from .hopper_primitives import SWIZZLES

BLOCKS = "blocks-hopper"
SIDES = ("lhs", "rhs")
HEIGHTS = (32, 64, 128, 256)  # of a band of rhs
LHS_HEIGHTS = HEIGHTS[:3]
WORD = 32  # steps whose liveness one word holds
PANEL = 4  # words that are looked at together


@dataclass(frozen=True)
class BlocksTile:
    """Knobs of the family; every field is a tuning decision but ``height``, the band's.

    ``other``: what a tile covers of the operand that is not sparse. ``shared``: each of the two
    warpgroups that multiply takes half of it; otherwise they take tiles in turn, and one writes
    while the other multiplies.
    """

    height: int = 64
    other: int = 256
    stages: int = 5
    shared: int = 1
    store_cols: int = 64
    sms: int = 132

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of one CTA."""
        wide = -(-self.height // 64) * 64 + self.other
        staged = 8 * (16 * (self.store_cols + 8) + 256) * 2
        return 1024 + self.stages * wide * TILE_K * 2 + staged + 16 * self.stages + 160

    def part(self, side: str) -> RowsTile:
        """The accumulators of both consumers, for the epilogue: rows are lhs's, columns rhs's."""
        band = -(-self.height // 64) * 64 if side == "lhs" else self.height
        each = self.other // (1 + self.shared)
        rows, columns = (band, each) if side == "lhs" else (each, band)
        return RowsTile(tile_m=2 * rows, tile_n=columns, stages=2, store_cols=self.store_cols)

    def check(self, side: str = "rhs") -> None:
        """Raise ScheduleError (a ValueError) for a combination that the template cannot build."""
        heights = LHS_HEIGHTS if side == "lhs" else HEIGHTS
        rules = {
            f"side one of {SIDES}": side in SIDES,
            f"height of {side} one of {heights}": self.height in heights,
            "shared 0 or 1": self.shared in (0, 1),
            "other 128 or 256": self.other in (128, 256),
            "at most 128 accumulators per thread": max(self.height, 64 * (side == "lhs"))
            * self.other
            <= 2**14 * (1 + self.shared),
            "2 stages or more": self.stages >= 2,
            "store_cols 32, 64 or 128": self.store_cols in (32, 64, 128),
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes <= SHARED_LIMIT,
        }
        require("blocks_kernel", self, rules)


@dataclass(frozen=True)
class BlocksOptions:
    """What the kernel computes, apart from sizes; ``blocks_kernel`` explains each field."""

    dtype: str
    side: str = "lhs"
    lhs_layout: str = "mk"
    rhs_layout: str = "kn"
    bias: bool = False
    act: str = "none"

    @property
    def own(self) -> RowsOptions:
        """Those of them that the epilogue reads."""
        return RowsOptions(self.dtype, self.bias, self.act)

    def turned(self, side: str) -> bool:
        """Whether the rows of an operand are the depth."""
        return (self.lhs_layout == "km") if side == "lhs" else (self.rhs_layout == "kn")

    def check(self, knobs: BlocksTile) -> None:
        """Raise ScheduleError (a ValueError) where the options do not fit together or the knobs."""
        knobs.check(self.side)
        rules = {
            "lhs_layout mk or km": self.lhs_layout in ("mk", "km"),
            "rhs_layout nk or kn": self.rhs_layout in ("nk", "kn"),
        }
        require("blocks_kernel", self, rules)
        self.own.check(knobs.part(self.side))


def ones(word: Any) -> Any:
    """How many bits of a uint32 are set."""
    code = "__forceinline__ __device__ int pitones(unsigned x) { return __popc(x); }\n"
    return T.cuda.func_call("pitones", word, source_code=code, return_type="int32")


@T.meta_class
class OperandTiles:
    """The ring's tiles of one operand, ``extent`` of its rows or columns each, and TMA's boxes.

    ``source`` is (extents, k), or with ``turned`` (k, extents), whose tiles are matrices of 64
    columns side by side, or of 32. There is room for a multiple of ``least`` rows or columns, as
    instructions read them; no more than ``extent`` are fetched.
    """

    def __init__(
        self,
        pool: Any,
        source: Any,
        turned: bool,
        extent: int,
        stages: int,
        dtype: str,
        least: int = 64,
    ) -> None:
        self.source, self.turned, self.extent = source, turned, extent
        room = -(-extent // least) * least
        self.line = min(extent, 64) if turned else TILE_K
        self.fetched = extent // self.line if turned else 1
        self.matrices = room // self.line if turned else 1
        self.bytes = extent * TILE_K * 2
        high = TILE_K if turned else room
        swizzle = SWIZZLES[self.line]
        shape = (stages * self.matrices, high, self.line)
        self.tiles = pool.alloc_tcgen05_mma_AB(shape, dtype, SwizzleMode(swizzle))

    @T.inline
    def fetch(self, stage, first, step, bar):
        """By one thread: what lies from ``first`` on, of depth ``step``."""
        k0: T.let = step * TILE_K
        if self.turned:
            for q in T.unroll(self.fetched):
                Tx.copy_async(
                    self.tiles[stage * self.matrices + q, 0:TILE_K, 0 : self.line],
                    self.source[
                        k0 : k0 + TILE_K,
                        first + q * self.line : first + q * self.line + self.line,
                    ],
                    dispatch="tma_explicit",
                    mbar=bar,
                )
        else:
            Tx.copy_async(
                self.tiles[stage, 0 : self.extent, 0:TILE_K],
                self.source[first : first + self.extent, k0 : k0 + TILE_K],
                dispatch="tma_explicit",
                mbar=bar,
            )

    def part(self, stage: Any, first: Any, extent: int) -> Any:
        """What the instructions read: ``extent`` rows or columns from ``first`` on."""
        if self.turned:
            at, line = stage * self.matrices + T.truncdiv(first, self.line), self.line
            return self.tiles[at : at + -(-extent // line), 0:TILE_K, 0 : min(extent, line)]
        return self.tiles[stage : stage + 1, first : first + extent, 0:TILE_K]


@T.meta_class
class BlockWalk:
    """Which tiles a CTA computes: down the bands of one column of tiles, then of the next, so that
    all CTAs read the same part of the operand that is not sparse at a time.
    """

    def __init__(self, bands: Any, columns: Any, sms: int) -> None:
        self.band = T.local_scalar("int32")
        self.column = T.local_scalar("int32")
        self.down = T.local_scalar("int32")  # from one tile to the next
        self.right = T.local_scalar("int32")
        self.bands, self.columns, self.sms = bands, columns, sms

    def more(self) -> Any:
        """Whether this is a tile."""
        return self.column < self.columns

    @T.inline
    def begin(self, place):
        self.right = T.truncdiv(self.sms, self.bands)
        self.down = self.sms - self.right * self.bands
        self.column = T.truncdiv(place, self.bands)
        self.band = place - self.column * self.bands

    @T.inline
    def advance(self):
        self.column = self.column + self.right
        self.band = self.band + self.down
        if self.band >= self.bands:
            self.band = self.band - self.bands
            self.column = self.column + 1


@T.meta_class
class LiveSteps:
    """Which steps of a band live; one warp asks, and knows it when it takes what it asked for.

    Parameters
    ----------
    live : Buffer, and ``high``, ``deep``, ``beside``, ``along``: see `blocks_kernel`
    steps : steps of the whole depth
    """

    def __init__(self, live: Any, layout: tuple[Any, Any, Any, Any], steps: Any) -> None:
        self.live, self.steps = live, steps
        self.high, self.deep, self.beside, self.along = layout
        self.places = T.alloc_local([PANEL], "int32")  # of a lane's steps, in a band
        self.found = T.alloc_local([PANEL], "uint32")
        self.words = T.alloc_local([PANEL], "uint32")
        self.number = T.local_scalar("int32")

    @T.inline
    def locate(self, panel, lane):
        """Lane i asks for every step i of a word of this panel from now on."""
        for j in T.unroll(PANEL):
            step: T.let = (panel * PANEL + j) * WORD + lane
            self.places[j] = T.if_then_else(
                step < self.steps, T.truncdiv(step, self.deep) * self.along, -1
            )

    @T.inline
    def ask(self, band):
        first: T.let = T.truncdiv(band, self.high) * self.beside
        for j in T.unroll(PANEL):
            self.found[j] = T.uint32(0)
            if self.places[j] >= 0:
                self.found[j] = T.uint32(self.live[first + self.places[j]])

    @T.inline
    def take(self):
        """By all lanes: bit i of ``words`` for every live step, ``number`` of them."""
        self.number = 0
        for j in T.unroll(PANEL):
            self.words[j] = T.cuda.ballot_sync(
                T.uint32(0xFFFFFFFF), T.int32(self.found[j] != T.uint32(0))
            )
            self.number = self.number + ones(self.words[j])


# Knobs that are sound on every Hopper chip.
STARTING = {
    "lhs": (
        BlocksTile(32, 256, shared=0),
        BlocksTile(32, 128, stages=8),
        BlocksTile(64, 256, shared=0),
        BlocksTile(64, 128, stages=8),
        BlocksTile(128, 256, stages=4),
        BlocksTile(128, 128, stages=6, shared=0),
    ),
    "rhs": (
        BlocksTile(32, 256, store_cols=32),
        BlocksTile(32, 128, stages=8, store_cols=32),
        BlocksTile(64, 256),
        BlocksTile(64, 128, stages=8),
        BlocksTile(128, 256, stages=4),
        BlocksTile(128, 128, stages=6),
        BlocksTile(256, 128, stages=4),
    ),
}


def blocks_tile(tile: Tile) -> BlocksTile:
    """The kernel's knobs of a tile of this family.

    Raises
    ------
    TileNotFound
        The tile is of another family, has an unknown knob, or the template cannot build it.
    """
    return knobs_of(tile, BlocksTile, (BLOCKS,), height=tile.tile_m, other=tile.tile_n)


def starting_blocks(dtype: str, side: str, height: int) -> tuple[Tile, ...]:
    """Tiles for bands of ``height`` rows of lhs or columns of rhs."""
    made = (knobs for knobs in STARTING[side] if knobs.height == height)
    return tuple(as_tile(knobs, BLOCKS, dtype, ("height", "other")) for knobs in made)
