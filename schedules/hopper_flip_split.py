"""CTAs of a cluster share a flipped tile's depth: each gathers and multiplies a part of it."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from .hopper_knobs import BAND, RowsTile

_ADD_FROM = """
__forceinline__ __device__ void pit_add_from(int rank, const void* at, float* sums) {
  unsigned here = (unsigned)__cvta_generic_to_shared(at);
  float a, b, c, d;
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
               " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
               : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(here), "r"(rank) : "memory");
  sums[0] += a, sums[1] += b, sums[2] += c, sums[3] += d;
}
"""


def add_from(rank: Any, place: Any, sums: Any) -> Any:
    """Add to four sums the four float32 at a place in the shared memory of the cluster's CTA
    ``rank``."""
    return T.cuda.func_call("pit_add_from", rank, place, sums, source_code=_ADD_FROM)


@T.meta_class
class DepthSplit:
    """Sums of the halves of the depth, exchanged through the shared memory of a cluster's two CTAs.

    Bands of BAND live rows are dealt out to them: each finishes its own of the tile, and lays its
    sums of the others out for the other CTA. They take the place of the ring of stages, which is
    empty between two tiles: all threads of a CTA meet when its sums are done (``begin``), and those
    of the cluster when they lie there and when they are read (``meet``).

    Parameters
    ----------
    pool : SMEMPool at the place where the ring begins; it is left there
    rank : this CTA's place in the cluster
    knobs : what the kernel is built with
    """

    def __init__(self, pool: Any, rank: Any, knobs: RowsTile) -> None:
        self.rank, self.bands = rank, knobs.tile_m // BAND
        self.blocks = knobs.tile_n // (64 * knobs.consumers)
        self.per_block = knobs.tile_m // 2
        shape = (-(-self.bands // 2), self.blocks * 2, knobs.consumers * 128, 4)
        self.parts = pool.alloc(shape, "float32", align=128)

    @T.inline
    def begin(self):
        T.cuda.cta_sync()

    @T.inline
    def meet(self):
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()

    @T.inline
    def attend(self):
        """By threads without sums: whenever the others meet for a tile."""
        self.begin()
        for _ in T.unroll(2):
            self.meet()

    def place(self, band: int, part: int, thread: Any) -> Any:
        """Where four sums lie that the other CTA made, or wants."""
        return self.parts.ptr_to([band // 2, part, thread, 0])

    def at(self, band: int, part: int) -> int:
        """Where four neighbouring sums of a band begin among a thread's accumulators."""
        return part // 2 * self.per_block + band * 8 + part % 2 * 4

    @T.inline
    def exchange(self, acc, high, thread):
        """Afterwards ``acc`` holds the whole sums of this CTA's bands. ``thread`` counts those of
        all consumers."""
        self.begin()
        for c in T.unroll(self.bands):
            if (c * BAND < high) & (c % 2 != self.rank):
                for p in T.unroll(self.blocks * 2):
                    T.ptx["st.shared.v4.f32"](
                        self.place(c, p, thread), *[acc[self.at(c, p) + i] for i in range(4)]
                    )
        self.meet()
        for c in T.unroll(self.bands):
            if (c * BAND < high) & (c % 2 == self.rank):
                for p in T.unroll(self.blocks * 2):
                    place: T.let = self.place(c, p, thread)
                    sums: T.let = T.address_of(acc[self.at(c, p)])
                    T.evaluate(add_from(1 - self.rank, place, sums))
        # What was read here, in either CTA, is written by TMA next.
        T.ptx.fence.proxy.async_.shared__cluster()
