"""A tile of rows that a CTA holds, and steps of the rows that its list names: what attention by
lists and its gradients share.

Rows are gathered while they go to shared memory (SRead; PIT, SOSP'23, section 3.2). What lies
beyond the operands, in rows or in columns, is zeros there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch

from .cuda_listed_products import (
    KEYS,
    PIECE,
    ROWS,
    STEP,
    add_by_group,
    add_by_warps,
    place_of,
    score_by_group,
    score_by_warps,
)
from .hopper_combine import PACK, store_words
from .hopper_primitives import FETCH
from .hopper_swrite import PTX_TYPE

QUERIES = 64  # rows of a tile
WORDS = QUERIES // 32  # of the bits that tell which rows of a tile see one of a step
SLOTS = 2  # of steps under way; more leave room for fewer CTAs, and gain nothing on an H200
PART_FACTS = 6  # what a CTA is told: tile, first step, last, slot, part, parts
MOST_WIDE = 256
LANES = 32
THREADS = QUERIES // ROWS * LANES
ALL = 0xFFFFFFFF
_WARPS_ROWS = (1 << ROWS) - 1
_ACROSS = STEP // PIECE  # threads that copy a row of a matrix
_AT_ONCE = THREADS // _ACROSS  # rows that are copied at once
_SWIZZLED = 1024  # bytes that matrices are aligned to
_JOINED = THREADS // LANES - 1  # teams beside the first that add up parts of a tile, at most
_NONE = 2**31 - 1  # below which all places are of no row


@dataclass(frozen=True)
class ListedTile:
    """``deep`` and ``wide``: columns of the two operands, as shared memory holds them; ``grouped``:
    warps multiply as a group (wgmma), as Hopper can; ``capped``: scores are."""

    dtype: str
    deep: int
    wide: int
    grouped: bool
    capped: bool = field(default=False, kw_only=True)

    @property
    def slots(self) -> tuple[int, int]:
        """Steps under way of the first and of the second operand."""
        return SLOTS, SLOTS

    @property
    def laid(self) -> int:
        """float32 numbers that a thread leaves of a part of a tile."""
        raise NotImplementedError

    def check(self, name: str) -> None:
        """Raise ScheduleError (a ValueError) for what the template ``name`` cannot build."""
        widths = range(STEP, MOST_WIDE + 1, STEP)
        rules = {
            "dtype float16 or bfloat16": self.dtype in PTX_TYPE,
            f"deep and wide multiples of {STEP} up to {MOST_WIDE}": self.deep in widths
            and self.wide in widths,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ScheduleError(mismatch(name, rule, self))


def ctas_of(own: int, tile: ListedTile, slots: tuple[int, int], most: int) -> int:
    """CTAs that share a multiprocessor, at most ``most``, by shared memory: ``own`` elements of
    rows of the tile beside ``slots`` of steps."""
    room = own + KEYS * (slots[0] * tile.deep + slots[1] * tile.wide)
    return max(1, min(most, (227 * 1024) // (2 * room + 3072)))


def holders_of(rows: int) -> int:
    """Threads of a CTA that hold rows, where there are so many in all tiles."""
    return min(THREADS, -(-rows // ROWS) * LANES)


def _comes_last(at: Any, parts: Any) -> Any:
    """int32: whether all other CTAs of a tile have come before, whose memory can be read then; the
    number at ``at`` is 0 again behind the last. By one thread, behind a barrier of its CTA."""
    code = (
        "__forceinline__ __device__ int pit_comes_last(int* at, int parts) {\n"
        "  __threadfence();\n"
        "  bool last = atomicAdd(at, 1) == parts - 1;\n"
        "  if (last) *at = 0;\n"
        "  __threadfence();\n"
        "  return last;\n}\n"
    )
    return T.cuda.func_call("pit_comes_last", at, parts, source_code=code, return_type="int32")


@T.meta_class
class ListedRows:
    """Operands of a CTA in shared memory, and what each lane holds of its warp's 16 rows."""

    def __init__(self, tile: ListedTile, held: int, packed: int = KEYS // 4) -> None:
        self.tile = tile
        pool: Any = T.SMEMPool()
        self.pool = pool
        begin = pool.offset
        self.first, self.second = (
            pool.alloc((slots, width // STEP, KEYS, STEP), tile.dtype, align=_SWIZZLED)
            for slots, width in zip(tile.slots, (tile.deep, tile.wide), strict=True)
        )
        behind = pool.offset
        pool.move_base_to(begin)  # nobody reads steps when parts are added up
        self.joined = pool.alloc((_JOINED * LANES * tile.laid,), "float32", align=16)
        pool.move_base_to(behind)
        self.bits = pool.alloc((tile.slots[0], WORDS, KEYS), "uint32", align=16)
        self.rows = pool.alloc((QUERIES,), "int32", align=16)
        self.last = pool.alloc((4,), "int32", align=16)
        self.first_at, self.second_at = T.local_scalar("int64"), T.local_scalar("int64")
        self.number, self.item = T.local_scalar("int32"), T.local_scalar("int32")
        self.sequence, self.head = T.local_scalar("int32"), T.local_scalar("int32")
        self.plane, self.line = T.local_scalar("int32"), T.local_scalar("int32")
        self.slot0, self.part = T.local_scalar("int32"), T.local_scalar("int32")
        self.parts, self.stores = T.local_scalar("int32"), T.local_scalar("int32")
        self.places = T.alloc_local([2], "int32")
        self.fetched = T.alloc_local([KEYS // _AT_ONCE], "int32")
        self.a = T.alloc_local([held], "uint32")
        self.b = T.alloc_local([4], "uint32")
        self.p = T.alloc_local([packed], "uint32")
        self.some_not = T.alloc_local([1], "uint32")
        self.scores = T.alloc_local([KEYS // 2], "float32")
        self.factor = T.alloc_local([2], "float32")
        self.bend = T.local_scalar("float32")
        self.held = T.alloc_local([1], "float32")

    def region(self, width: int) -> tuple[Any, Any]:
        """Room for the rows of the tile, and the same in words for what is written there later."""
        shape = width // STEP, QUERIES
        own = self.pool.alloc((*shape, STEP), self.tile.dtype, align=_SWIZZLED)
        self.pool.move_base_to(self.pool.offset - QUERIES * width * 2)
        return own, self.pool.alloc((*shape, STEP // 2), "uint32", align=_SWIZZLED)

    @T.inline
    def find(self, place, group, beside, heads):
        """``number``, the ``head`` of its ``sequence``, of which the CTA has an ``item``: first
        items of ``beside`` heads come before their second ones. Long lists are dealt out first,
        so that short ones fill what those leave."""
        self.number = group * beside + T.truncmod(place, beside)
        self.item = T.truncdiv(place, beside)
        self.sequence = T.truncdiv(self.number, heads)
        self.head = T.truncmod(self.number, heads)

    @T.inline
    def begin_work(self, work, line):
        """Learn where the CTA's list lies, and which part of it is meant."""
        self.line = line
        self.slot0 = work[self.plane, self.item, 3]
        self.part = work[self.plane, self.item, 4]
        self.parts = work[self.plane, self.item, 5]

    @T.inline
    def learn(self, order, ordered, block, rows, thread, shared=None, fit=None):
        """``rows``: which the tile has, -1 for none; with ``shared`` it has ``fit`` of them, each
        for so many ``heads`` side by side."""
        if thread < QUERIES:
            own: T.let = thread if shared is None else T.truncdiv(thread, shared)
            place: T.let = block * (QUERIES if fit is None else fit) + own
            there: T.let = (place < rows) & (True if fit is None else own < fit)
            self.rows[thread] = T.Select(there, place, -1)
            if there & (ordered != 0):
                self.rows[thread] = order[self.plane, place]
            if shared is not None:
                self.heads[thread] = thread - own * shared
        T.cuda.cta_sync()

    @T.inline
    def fetch_own(self, own, wide, source, start, row_step, dim, thread, jump=None):
        """Ask for the tile's rows, once they are known; ``jump``: from a head's row to the next
        head's, if rows are of several."""
        rows = T.alloc_local([QUERIES // _AT_ONCE], "int32")
        for i in T.unroll(QUERIES // _AT_ONCE):
            rows[i] = self.rows[i * _AT_ONCE + T.truncdiv(thread, _ACROSS)]
        self._gather(own, (), rows, wide, source, start, row_step, dim, thread, jump)

    @T.inline
    def look(self, ids, step, steps, lane):
        """Learn the places of a step's rows: lane l those of rows l and l + 32."""
        for h in T.unroll(2):
            self.places[h] = -1
            if step < steps:
                self.places[h] = ids[self.plane, self.line, step * KEYS + h * LANES + lane]

    @T.inline
    def _gather(self, held, slot, rows, wide, source, start, row_step, dim, thread, jump=None):
        """Ask for the columns of ``rows``, -1 for none."""
        piece: T.let = T.truncmod(thread, _ACROSS)
        step: T.let = T.cast(T.truncdiv(row_step, PIECE), "int32")
        places = T.alloc_local([KEYS // _AT_ONCE], "int32")
        for i in T.unroll(KEYS // _AT_ONCE):
            places[i] = rows[i] * step
            if jump is not None:
                head: T.let = self.heads[i * _AT_ONCE + T.truncdiv(thread, _ACROSS)]
                places[i] = places[i] + head * T.cast(T.truncdiv(jump, PIECE), "int32")
            places[i] = T.Select(rows[i] < 0, -1, places[i])
        for m in T.unroll(wide // STEP):
            column: T.let = m * STEP + piece * PIECE
            for i in T.unroll(KEYS // _AT_ONCE):
                row: T.let = i * _AT_ONCE + T.truncdiv(thread, _ACROSS)
                T.cuda.func_call(
                    "pit_fetch",
                    held.ptr_to([*slot, *place_of(row, m * _ACROSS + piece)]),
                    source.ptr_to([start + column]),
                    places[i],
                    T.Select(column < dim, 0, _NONE),
                    source_code=FETCH,
                )

    @T.inline
    def fetch_first(self, slot, first, first_row, dim, bits, step, thread):
        """Ask for the rows of the first operand in a step, and for its bits."""
        for i in T.unroll(KEYS // _AT_ONCE):
            row: T.let = i * _AT_ONCE + T.truncdiv(thread, _ACROSS)
            self.fetched[i] = T.cuda.__shfl_sync(
                T.uint32(ALL), self.places[i * _AT_ONCE // LANES], T.truncmod(row, LANES), 32
            )
        deep = T.meta_var(self.tile.deep)
        self._gather(
            self.first, (slot,), self.fetched, deep, first, self.first_at, first_row, dim, thread
        )
        each = T.meta_var(KEYS // 4)
        if thread < WORDS * each:
            word: T.let = T.truncdiv(thread, each)
            key: T.let = T.truncmod(thread, each) * 4
            T.ptx["cp.async.cg.shared.global"](
                self.bits.ptr_to([slot, word, key]),
                bits.ptr_to([self.plane, self.line, word, step * KEYS + key]),
                16,
                T.uint32(16),
            )

    @T.inline
    def fetch_second(self, slot, second, second_row, dim, thread):
        """Ask for the rows of the second operand in the step of which the first's were."""
        wide = T.meta_var(self.tile.wide)
        self._gather(
            self.second,
            (slot,),
            self.fetched,
            wide,
            second,
            self.second_at,
            second_row,
            dim,
            thread,
        )

    @T.inline
    def score(self, scores, own, at, others, slot, wide, warp, lane):
        """``scores`` = the tile's rows by the rows of a slot, over ``wide`` columns, once products
        are settled. Where warps multiply alone, fragments of ``own`` begin at ``a[at]``, and are
        loaded if ``at`` is negative."""
        if self.tile.grouped:
            score_by_group(self, scores, own, others, slot, wide)
        else:
            score_by_warps(self, scores, own, at, others, slot, wide, warp, lane)

    @T.inline
    def add(self, sums, others, slot, wide, lane, at):
        """``sums`` += what is packed from ``p[at]`` on by the rows of a slot, once products are
        settled; groups need it until then."""
        if self.tile.grouped:
            add_by_group(self, sums, others, slot, wide, at)
        else:
            add_by_warps(self, sums, others, slot, wide, lane, at)

    @T.inline
    def settle(self):
        """Wait for products that are under way."""
        if self.tile.grouped:
            T.ptx.wgmma.wait_group.sync.aligned(0)

    @T.inline
    def arrive(self, under_way=0):
        """Wait for rows that were asked for, but for the last ``under_way`` groups of them."""
        T.ptx.cp.async_.wait_group(under_way)
        if self.tile.grouped:
            T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()

    @T.inline
    def see(self, slot, warp, lane):
        """``some_not``: whether a row of the warp does not see one of a slot, so that bits have to
        be regarded. Most steps of windows and blocks are seen by all."""
        first: T.let = warp * ROWS
        both: T.uint32 = T.uint32(ALL)
        for e in T.unroll(2):
            both = T.bitwise_and(both, self.bits[slot, T.truncdiv(first, LANES), lane * 2 + e])
        own: T.let = T.bitwise_and(
            T.shift_right(both, T.cast(T.truncmod(first, LANES), "uint32")), T.uint32(_WARPS_ROWS)
        )
        some: T.let = T.cast(own != T.uint32(_WARPS_ROWS), "int32")
        self.some_not[0] = T.cuda.ballot_sync(T.uint32(ALL), some)

    @T.inline
    def exclude(self, values, outside, slot, warp, lane):
        """Values of rows that one of the tile does not see become ``outside``."""
        first: T.let = warp * ROWS
        place: T.let = T.cast(T.truncmod(first, LANES) + T.truncdiv(lane, 4), "uint32")
        if self.some_not[0] != T.uint32(0):
            for j in T.unroll(KEYS // 8):
                for e in T.unroll(2):
                    key: T.let = j * 8 + T.truncmod(lane, 4) * 2 + e
                    seen: T.uint32 = self.bits[slot, T.truncdiv(first, LANES), key]
                    for r in T.unroll(2):
                        own: T.let = T.shift_left(T.uint32(1), place + T.uint32(r * 8))
                        values[j * 4 + r * 2 + e] = T.Select(
                            T.bitwise_and(seen, own) == T.uint32(0),
                            T.float32(outside),
                            values[j * 4 + r * 2 + e],
                        )

    @T.inline
    def join(self, laid, arrived, first, rows, thread):
        """``stores``: whether the CTA has all of the tile: of one that was cut, the parts of which
        lie in slots from ``first`` on, the CTA that comes last, by adding them up. Threads that
        hold none of all ``rows`` leave nothing, and add up parts as others do."""
        self.stores = 1
        holders: T.let = T.min(T.truncdiv(rows + ROWS - 1, ROWS) * LANES, THREADS)
        if self.slot0 >= 0:
            slot: T.int32 = first + self.slot0
            size: T.let = self.tile.laid * holders
            team: T.let = T.truncdiv(thread, holders)
            own: T.let = T.truncmod(thread, holders)
            if team == 0:
                self.lay_out(laid, (slot + self.part) * size + own, holders)
            T.cuda.cta_sync()
            if thread == 0:
                self.last[0] = _comes_last(arrived.ptr_to([slot]), self.parts)
            T.cuda.cta_sync()
            self.stores = self.last[0]
            if self.stores != 0:
                teams: T.let = T.truncdiv(THREADS, holders)
                self.begin()
                if team < teams:
                    # In one order, whoever comes last.
                    for p in T.serial(T.truncdiv(self.parts - team + teams - 1, teams)):
                        self.take_in(laid, (slot + team + p * teams) * size + own, holders)
                    if team > 0:
                        self.lay_out(self.joined, (team - 1) * size + own, holders)
                T.cuda.cta_sync()
                if team == 0:
                    for t in T.serial(teams - 1):
                        self.take_in(self.joined, t * size + own, holders)

    @T.inline
    def store(self, sums, own, wide, out, start, row_step, dim, warp, lane, jump=None):
        """Write sums by ``factor``, by way of the warp's rows of a region, which nobody reads;
        ``jump`` as in `fetch_own`."""
        pack = T.meta_var(PACK[self.tile.dtype])
        first: T.let = warp * ROWS
        for r in T.unroll(2):
            line: T.let = first + r * 8 + T.truncdiv(lane, 4)
            for c in T.unroll(wide // 8):
                at = T.meta_var(c * 4 + r * 2)
                matrix, row, column = T.meta_var(place_of(line, c))
                T.ptx[pack](self.p[0], sums[at + 1] * self.factor[r], sums[at] * self.factor[r])
                own[matrix, row, T.truncdiv(column, 2) + T.truncmod(lane, 4)] = self.p[0]
        T.cuda.warp_sync()
        pieces = T.meta_var(wide // PIECE)
        for i in T.unroll(ROWS * pieces // LANES):
            written: T.let = first + T.truncdiv(i * LANES + lane, pieces)
            piece: T.let = T.truncmod(i * LANES + lane, pieces)
            place: T.int32 = self.rows[written]
            at: T.int64 = start + T.cast(place, "int64") * row_step + piece * PIECE
            if jump is not None:
                at = at + T.cast(self.heads[written], "int64") * jump
            if (place >= 0) & (piece * PIECE < dim):
                matrix, row, column = T.meta_var(place_of(written, piece))
                for w in T.unroll(4):
                    self.b[w] = own[matrix, row, T.truncdiv(column, 2) + w]
                store_words(out.ptr_to([at]), self.b)
