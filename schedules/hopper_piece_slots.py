"""Which rows of the Hopper family of pieces have a sum in shared memory, and in which slot.

A row without a live piece needs no sum, nor does one with a single piece: that finishes it. Where
tiles have ``slots``, they keep them for the other rows, and walk as many rows together as these
have slots: the fewer pieces live, the more rows share one walk down the depth. Where the product is
computed turned, a row with a single piece waits in half a slot, in 16 bits, until its neighbours
are done: memory takes columns of out in no other way. Otherwise every row of a tile has its own
sum, and nothing is to be found.
"""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.lang.pipeline import MBarrier
from tvm.script import tirx as T

from pit_tvm.selection.gpu_pieces import fair_rows

from .bits import below, is_set, lowest
from .hopper_block_parts import ones
from .hopper_piece_parts import WORD, WORDS, PiecesTile

_AT_ONCE = 8  # words that a thread asks for together
_EACH = WORDS // 32  # words of a lane
_ALL = 0xFFFFFFFF

_PUT = """__forceinline__ __device__ unsigned pit_put(unsigned* at, unsigned bits) {
  return atomicOr(at, bits);
}
"""


@T.meta_class
class PieceSlots:
    """What is known of the rows of a tile: bit i of word w is row w * 32 + i.

    Parameters
    ----------
    lines : Buffer (steps, words), uint32, of ``size`` words: see `pieces_kernel`
    flip : rows with a single live piece have half a slot each, counted from the end
    """

    def __init__(
        self, pool: Any, lines: Any, size: Any, steps: Any, knobs: PiecesTile, flip: bool
    ) -> None:
        self.lines, self.size, self.steps, self.flip = lines, size, steps, flip
        self.found, self.room, self.consumers = bool(knobs.slots), knobs.rows, knobs.consumers
        self.fair, self.columns = fair_rows(knobs.room), knobs.cols
        self.threads = knobs.consumers * 128
        self.everyone = self.threads + knobs.stages * 32
        if self.found:
            self.alive = pool.alloc((WORDS,), "uint32", align=16)  # rows that live
            self.kept = pool.alloc((WORDS,), "uint32", align=16)  # rows that have slots
            self.before = pool.alloc((WORDS + 1,), "int32", align=16)  # of those, in words before
            if flip:
                self.single = pool.alloc((WORDS + 1,), "int32", align=16)  # of rows with one piece
            self.rows = pool.alloc((knobs.rows,), "int16", align=16)  # of slots
            self.number = pool.alloc((2,), "int32", align=8)  # of live pieces, of words of a walk
            self.known = MBarrier(pool, 1)
            self.phase = T.local_scalar("int32")  # of ``known``

    @T.inline
    def begin(self):
        """By warps that learn what others find, before the first tile."""
        if self.found:
            self.phase = 0

    @T.inline
    def init(self):
        """Where barriers are initialised."""
        if self.found:
            self.known.init(self.threads)

    @T.inline
    def leave(self):
        """By warps that have read what is known of a tile: it may be overwritten. At a barrier of
        the hardware, as below: warps that ask an mbarrier again and again slow down those that they
        wait for."""
        if self.found:
            T.ptx["bar.arrive"](T.uint32(2), T.uint32(self.everyone))

    @T.inline
    def enter(self):
        """By the warpgroups that multiply, before `find`: wait until all others left."""
        if self.found:
            T.ptx["bar.sync"](T.uint32(2), T.uint32(self.everyone))

    @T.inline
    def tell(self):
        """By the warpgroups that multiply, behind `find`."""
        if self.found:
            self.known.arrive(0)
            T.ptx["bar.sync"](T.uint32(3), T.uint32(self.everyone))

    @T.inline
    def learn(self):
        """By all others: wait for what `find` found. The mbarrier has been passed by then: it tells
        racecheck, which takes no barrier of the hardware for one between these and those."""
        if self.found:
            T.ptx["bar.sync"](T.uint32(3), T.uint32(self.everyone))
            self.known.wait(0, self.phase)
            self.phase = 1 - self.phase

    @T.inline
    def find(self, word0, words, wg, thread, lane):
        """By the warpgroups that multiply: all about the ``words`` words from ``word0`` on."""
        if self.found:
            if wg == 0:
                self.alive[thread] = T.uint32(0)
                self.kept[thread] = T.uint32(0)
                if thread == 0:
                    self.number[0] = 0
            T.ptx["bar.sync"](T.uint32(1), T.uint32(self.threads))
            self.read(word0, words, wg, thread, lane)
            T.ptx["bar.sync"](T.uint32(1), T.uint32(self.threads))
            if (wg == 0) & (thread < 32):
                self.share(words, lane)

    @T.inline
    def read(self, word0, words, wg, thread, lane):
        """One word by a thread of every warpgroup, of its part of the steps."""
        asked = T.alloc_local([_AT_ONCE], "uint32")
        once: T.uint32 = T.uint32(0)
        twice: T.uint32 = T.uint32(0)
        live: T.int32 = 0
        step: T.int32 = wg
        if (thread < words) & (word0 + thread < self.size):
            while step < self.steps:
                for u in T.unroll(_AT_ONCE):
                    asked[u] = T.uint32(0)
                    if step + u * self.consumers < self.steps:
                        asked[u] = self.lines[step + u * self.consumers, word0 + thread]
                for u in T.unroll(_AT_ONCE):
                    twice = T.bitwise_or(twice, T.bitwise_and(once, asked[u]))
                    once = T.bitwise_or(once, asked[u])
                    live = live + ones(asked[u])
                step = step + _AT_ONCE * self.consumers
            others: T.uint32 = self.put(self.alive, thread, once)
            self.put(self.kept, thread, T.bitwise_or(twice, T.bitwise_and(others, once)))
        for d in T.unroll(5):
            live = live + T.cuda.__shfl_xor_sync(T.uint32(_ALL), live, 16 >> d, 32)
        if lane == 0:
            T.cuda.atomic_add(self.number.ptr_to([0]), live)

    def put(self, words: Any, at: Any, bits: Any) -> Any:
        """Or ``bits`` into a word, which is returned as it was."""
        return T.cuda.func_call(
            "pit_put", words.ptr_to([at]), bits, source_code=_PUT, return_type="uint32"
        )

    @T.inline
    def share(self, words, lane):
        """By one warp: slots of the rows that are kept, and how many words a walk takes, so that
        walks are even, no more than sums and stages have room for."""
        each = T.alloc_local([_EACH], "int32")  # rows with a slot, and 65536 for each with half
        total: T.int32 = 0
        for w in T.unroll(_EACH):
            at: T.let = lane * _EACH + w
            each[w] = ones(self.kept[at])
            if self.flip:
                each[w] = each[w] + T.shift_left(ones(self.alone(at)), 16)
            total = total + each[w]
        for d in T.unroll(5):
            left: T.int32 = T.cuda.__shfl_up_sync(T.uint32(_ALL), total, 1 << d, 32)
            if lane >= 1 << d:
                total = total + left
        if lane == 31:
            self.note(WORDS, total)
            halves: T.let = 2 * T.bitwise_and(total, 65535) + T.shift_right(total, 16)
            walks: T.let = T.max(
                T.truncdiv(halves + 2 * self.room - 1, 2 * self.room),
                T.truncdiv(self.number[0], self.steps * self.fair) + 1,
            )
            self.number[1] = T.truncdiv(words + walks - 1, walks)
        for w in T.unroll(_EACH):
            total = total - each[_EACH - 1 - w]
            self.note(lane * _EACH + (_EACH - 1 - w), total)

    def alone(self, word: Any) -> Any:
        """Rows of a word that have a single live piece."""
        return T.bitwise_and(self.alive[word], T.bitwise_not(self.kept[word]))

    @T.inline
    def note(self, word, total):
        """That there are ``total`` rows of either kind before a word."""
        self.before[word] = T.bitwise_and(total, 65535)
        if self.flip:
            self.single[word] = T.shift_right(total, 16)

    def halves(self, end: Any, begin: Any) -> Any:
        """Halves of slots that rows of the words ``begin`` .. ``end`` - 1 take."""
        halves = 2 * (self.before[end] - self.before[begin])
        return halves + self.single[end] - self.single[begin] if self.flip else halves

    @T.inline
    def reach(self, end, begin, words, lane):
        """By a warp: ``end[0]`` is behind the words that are walked with word ``begin``."""
        end[0] = words
        if self.found:
            most: T.let = T.min(words, begin + self.number[1])
            end[0] = 0
            for w in T.unroll(_EACH):
                fits: T.int32 = 0
                if w * 32 + lane < most:
                    if self.halves(w * 32 + lane + 1, begin) <= 2 * self.room:
                        fits = 1
                end[0] = end[0] + ones(T.cuda.ballot_sync(T.uint32(_ALL), fits))

    def half(self, row: Any, begin: Any) -> Any:
        """The half slot of a row with a single live piece, in a walk from word ``begin`` on."""
        word, bit = T.truncdiv(row, WORD), T.truncmod(row, WORD)
        place = self.single[word] - self.single[begin]
        place = place + ones(T.bitwise_and(self.alone(word), below(bit)))
        return 2 * self.room - 1 - place

    @T.inline
    def name_rows(self, begin, end, thread):
        """By a thread for each word: the rows of slots."""
        if self.found:
            if (thread >= begin) & (thread < end):
                bits: T.uint32 = self.kept[thread]
                place: T.int32 = self.before[thread] - self.before[begin]
                while bits != T.uint32(0):
                    self.rows[place] = T.cast(thread * WORD + lowest(bits), "int16")
                    bits = T.bitwise_and(bits, bits - T.uint32(1))
                    place = place + 1

    def total(self, begin: Any, end: Any) -> Any:
        """How many slots a walk has."""
        return self.before[end] - self.before[begin] if self.found else end * WORD

    def row(self, slot: Any) -> Any:
        """The row of a slot, in its tile."""
        return T.int32(self.rows[slot]) if self.found else slot

    @T.inline
    def locate(self, own, begin, word, lane):
        """By a warp: ``own[0]`` is the first element of the sums of this lane's row of a word, -1
        where nothing lives, -2 - that of its half a slot where the row has no more."""
        own[0] = (word * WORD + lane) * self.columns
        if self.found:
            own[0] = -1
            kept: T.uint32 = self.kept[word]
            if is_set(kept, lane) != 0:
                before: T.let = self.before[word] - self.before[begin]
                own[0] = (before + ones(T.bitwise_and(kept, below(lane)))) * self.columns
            if self.flip:
                if is_set(self.alone(word), lane) != 0:
                    own[0] = -2 - self.half(word * WORD + lane, begin) * (self.columns // 2)
