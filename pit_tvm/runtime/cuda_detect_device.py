"""What the detection kernels for CUDA share: loads of any alignment, live bits, a scan per CTA.

Operands are read through plain addresses, so one kernel serves every type of an element's size.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from tvm.script import tirx as T

WARP = 32
BYTES = 16  # of one load
ROOM = 32  # bytes: more than a load of any alignment touches
AT_ONCE = 8  # loads of a thread that are under way together
_INLINE = "__forceinline__ __device__ "

_LOAD = """void pit_{load}16(unsigned* v, long long at, bool wanted) {{
  uint4 w = make_uint4(0u, 0u, 0u, 0u);
  if (wanted) w = __{load}(reinterpret_cast<const uint4*>(at));
  v[0] = w.x; v[1] = w.y; v[2] = w.z; v[3] = w.w;
}}
"""
# Whole words are read as such, the last bytes of a row one by one: nothing behind it is touched.
# Called, not inlined: code that many loads repeat is fetched for longer than it runs.
_LOAD_ANY = """static __noinline__ __device__ uint4 pit_read_any(long long at, int room) {
  const unsigned char* base = reinterpret_cast<const unsigned char*>(at & ~3LL);
  int skip = int(at & 3), end = room > 0 ? skip + room : 0;
  unsigned word[5], v[4];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    word[i] = 0u;
    if (4 * i + 4 <= end) {
      word[i] = __ldg(reinterpret_cast<const unsigned*>(base) + i);
    } else {
#pragma unroll
      for (int b = 0; b < 3; ++b)
        if (4 * i + b < end) word[i] |= unsigned(__ldg(base + 4 * i + b)) << 8 * b;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __funnelshift_r(word[i], word[i + 1], 8 * skip);
  return make_uint4(v[0], v[1], v[2], v[3]);
}
__forceinline__ __device__ void pit_load_any(unsigned* v, long long at, int room) {
  uint4 w = pit_read_any(at, room);
  v[0] = w.x; v[1] = w.y; v[2] = w.z; v[3] = w.w;
}
"""
# Bit i of the result: element i of 16 bytes is live; `keep` masks sign bits away.
_LIVE = {
    8: """unsigned pit_live8(const unsigned* v, unsigned keep) {
  unsigned live = 0u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned x = v[i] & keep;
    x |= x >> 4; x |= x >> 2; x |= x >> 1;
    live |= ((x & 0x01010101u) * 0x01020408u >> 24 & 15u) << 4 * i;
  }
  return live;
}
""",
    16: """unsigned pit_live16(const unsigned* v, unsigned keep) {
  unsigned live = 0u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned x = v[i] & keep;
    live |= (unsigned((x & 0xffffu) != 0u) | unsigned(x > 0xffffu) << 1) << 2 * i;
  }
  return live;
}
""",
    32: """unsigned pit_live32(const unsigned* v, unsigned keep) {
  return unsigned((v[0] & keep) != 0u) | unsigned((v[1] & keep) != 0u) << 1
       | unsigned((v[2] & keep) != 0u) << 2 | unsigned((v[3] & keep) != 0u) << 3;
}
""",
    64: """unsigned pit_live64(const unsigned* v, unsigned keep) {
  return unsigned((v[0] | (v[1] & keep)) != 0u) | unsigned((v[2] | (v[3] & keep)) != 0u) << 1;
}
""",
}
# Bits of the columns first .. end - 1, bit 0 standing for column `at`.
_CUT = """unsigned pit_cut(unsigned live, int at, int first, int end) {
  int low = first - at, high = end - at;
  if (high <= 0 || low >= 32) return 0u;
  if (low > 0) live &= ~0u << low;
  if (high < 32) live &= (1u << high) - 1u;
  return live;
}
"""

_LANES_OF_GROUP = """__forceinline__ __device__ unsigned pit_lanes_of_group(int group,
                                                                       int groups) {
  unsigned same = __ballot_sync(~0u, group >= 0);
  for (int bit = 1; bit < groups; bit <<= 1) {
    unsigned set = __ballot_sync(~0u, group & bit);
    same &= group & bit ? set : ~set;
  }
  return same;
}
"""
# Of the cluster's CTA number `rank`.
_TELL = """__forceinline__ __device__ void pit_tell(int* at, int rank, int value) {
  unsigned here = (unsigned)__cvta_generic_to_shared(at);
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
               " st.shared::cluster.u32 [there], %2; }"
               :: "r"(here), "r"(rank), "r"(value) : "memory");
}
"""


def popcount(word: Any) -> Any:
    """Number of ones of a uint32, as int32."""
    code = _INLINE + "int pit_popcount(unsigned x) { return __popc(x); }\n"
    return T.cuda.func_call("pit_popcount", word, source_code=code, return_type="int32")


def same_lanes(key: Any) -> Any:
    """uint32: the lanes of the warp whose int32 ``key`` equals this lane's; all must ask."""
    code = _INLINE + "unsigned pit_same_lanes(int x) { return __match_any_sync(~0u, x); }\n"
    return T.cuda.func_call("pit_same_lanes", key, source_code=code, return_type="uint32")


def lanes_of_group(group: Any, groups: Any) -> Any:
    """uint32: the lanes of the warp whose int32 ``group`` is that of this lane; all must ask.

    ``group`` is below ``groups``; a negative one is no group, and gets any word. By a vote for each
    bit, as ``__match_any_sync`` takes longer the more groups a warp has.
    """
    return T.cuda.func_call(
        "pit_lanes_of_group", group, groups, source_code=_LANES_OF_GROUP, return_type="uint32"
    )


def atomic_or(where: Any, bits: Any) -> Any:
    """Or uint32 ``bits`` into the word at pointer ``where``."""
    code = _INLINE + "void pit_or(unsigned* at, unsigned bits) { atomicOr(at, bits); }\n"
    return T.cuda.func_call("pit_or", where, bits, source_code=code)


def tell(at: Any, rank: Any, value: Any) -> Any:
    """Write an int32 at the same place in the shared memory of the cluster's CTA ``rank``."""
    return T.cuda.func_call("pit_tell", at, rank, value, source_code=_TELL)


def load16(words: Any, at: Any, wanted: Any, bits: int = 64) -> Any:
    """Four words from the 16-byte-aligned address ``at``; zeros, unread, if not ``wanted``.

    Elements of a byte or less are those of a mask, which nobody reads again: the second-level
    cache keeps what it had.
    """
    load = "ldcs" if bits <= 8 else "ldg"
    code = _INLINE + _LOAD.format(load=load)
    return T.cuda.func_call(f"pit_{load}16", words, at, wanted, source_code=code)


def load_any(words: Any, at: Any, room: Any) -> Any:
    """Four words from any address; bytes from number ``room`` (int32) on are 0 and not read."""
    return T.cuda.func_call("pit_load_any", words, at, room, source_code=_LOAD_ANY)


def live_bits(words: Any, keep: Any, bits: int) -> Any:
    """uint32: which of the elements of ``bits`` bits in four words are live."""
    code = _INLINE + _LIVE[bits]
    return T.cuda.func_call(f"pit_live{bits}", words, keep, source_code=code, return_type="uint32")


def some_live(loaded: Any, u: int, kept: Any, bits: int) -> Any:
    """uint32, not 0 if an element of the four words loaded[u] is live; kept[w]: bits that count."""
    words = [
        # The sign of 64 bits is in the upper word.
        loaded[u, w] if bits == 64 and w % 2 == 0 else T.bitwise_and(loaded[u, w], kept[w])
        for w in range(4)
    ]
    return reduce(T.bitwise_or, words)


def cut(live: Any, at: Any, first: Any, end: Any) -> Any:
    """``live``, whose bit 0 is column ``at``, with the columns first .. end - 1 alone."""
    code = _INLINE + _CUT
    return T.cuda.func_call("pit_cut", live, at, first, end, source_code=code, return_type="uint32")


def full_warp() -> Any:
    """The mask of all lanes."""
    return T.uint32(0xFFFFFFFF)


@T.inline
def warp_scan(value, lane):
    """``value[0]`` (local, int32) becomes the sum over this lane and those below."""
    for s in T.unroll(5):
        left: T.int32 = T.cuda.__shfl_up_sync(full_warp(), value[0], T.shift_left(1, s), 32)
        if lane >= T.shift_left(1, s):
            value[0] = value[0] + left


@T.inline
def warps_scan(value, total, totals, thread, warps):
    """``value[0]`` becomes the sum over the warps below of ``totals``, ``total[0]`` that of all.

    ``totals`` (32,), shared, holds a number of each warp; local arrays are int32. Synchronises
    before and after: shared memory written before is visible after.
    """
    lane: T.let = T.truncmod(thread, WARP)
    warp: T.let = T.truncdiv(thread, WARP)
    T.cuda.cta_sync()
    total[0] = 0
    if lane < warps:
        total[0] = totals[lane]
    warp_scan(total, lane)
    value[0] = T.cuda.__shfl_sync(full_warp(), total[0], T.max(warp - 1, 0), 32)
    if warp == 0:
        value[0] = 0
    total[0] = T.cuda.__shfl_sync(full_warp(), total[0], WARP - 1, 32)
    T.cuda.cta_sync()


@T.inline
def cta_scan(value, total, totals, thread, warps):
    """``value[0]`` becomes the sum over the threads below, ``total[0]`` that over all of the CTA.

    Arrays and synchronisation are those of `warps_scan`.
    """
    own: T.int32 = value[0]
    warp_scan(value, T.truncmod(thread, WARP))
    own = value[0] - own
    if T.truncmod(thread, WARP) == WARP - 1:
        totals[T.truncdiv(thread, WARP)] = value[0]
    warps_scan(value, total, totals, thread, warps)
    value[0] = value[0] + own


@T.inline
def load_ids(loaded, src, at, step, last, groups, bits):
    """loaded[u] = src[at + u * step] where that is before ``last`` and in 0 .. groups - 1, else -1.

    All loads are under way at once.
    """
    wide = T.alloc_local([AT_ONCE], f"int{bits}")
    for u in T.unroll(AT_ONCE):
        wide[u] = T.cast(-1, f"int{bits}")
        if at + u * step < last:
            wide[u] = src[at + u * step]
    for u in T.unroll(AT_ONCE):
        loaded[u] = -1
        if (wide[u] >= 0) & (wide[u] < T.cast(groups, f"int{bits}")):
            loaded[u] = T.int32(wide[u])
