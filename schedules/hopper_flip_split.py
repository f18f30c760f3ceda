"""CTAs of a cluster share a flipped tile's depth: each gathers and multiplies a part of it."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from .hopper_knobs import BAND, RowsTile

_SEND = """
__forceinline__ __device__ void pit_send4(void* at, int rank, float a, float b, float c, float d) {
  unsigned here = (unsigned)__cvta_generic_to_shared(at);
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
               " st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }"
               :: "r"(here), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
"""


def send(place: Any, rank: Any, *values: Any) -> Any:
    """Write four float32 at the same place in the shared memory of the cluster's CTA ``rank``."""
    return T.cuda.func_call("pit_send4", place, rank, *values, source_code=_SEND)


@T.meta_class
class DepthSplit:
    """Sums of the parts of the depth, exchanged through the cluster's shared memory.

    Bands of BAND live rows are dealt out to the ``split`` CTAs of the cluster: every CTA finishes
    its own bands of the tile and sends its sums of the others to their owners. What arrives takes
    the place of the ring of stages, which is empty between two tiles: all threads of the cluster
    meet (``meet``) when the sums are done, when they are sent, and when they are read.

    Parameters
    ----------
    pool : SMEMPool at the place where the ring begins; it is left there
    rank : this CTA's place in the cluster
    knobs : what the kernel is built with
    """

    def __init__(self, pool: Any, rank: Any, knobs: RowsTile) -> None:
        self.split, self.rank, self.bands = knobs.cluster, rank, knobs.tile_m // BAND
        self.blocks = knobs.tile_n // (64 * knobs.consumers)
        self.per_block = knobs.tile_m // 2
        own = -(-self.bands // self.split)
        shape = (self.split - 1, own, self.blocks * 2, knobs.consumers * 128, 4)
        self.parts = pool.alloc(shape, "float32", align=128)

    @T.inline
    def meet(self):
        T.ptx.barrier.cluster.arrive()
        T.ptx.barrier.cluster.wait()

    def _send(
        self, to: Any, slot: Any, band: int, part: Any, thread: Any, acc: Any, at: Any
    ) -> Any:
        place = self.parts.ptr_to([slot, band // self.split, part, thread, 0])
        return send(place, to, *[acc[at + i] for i in range(4)])

    @T.inline
    def exchange(self, acc, high, thread):
        """Afterwards ``acc`` holds the whole sums of this CTA's bands. ``thread`` counts those of
        all consumers."""
        self.meet()
        for c in T.unroll(self.bands):
            if (c * BAND < high) & (c % self.split != self.rank):
                slot: T.let = T.truncmod(self.rank - c % self.split + self.split, self.split) - 1
                for b in T.unroll(self.blocks):
                    for h in T.unroll(2):
                        T.evaluate(
                            self._send(
                                c % self.split,
                                slot,
                                c,
                                b * 2 + h,
                                thread,
                                acc,
                                b * self.per_block + c * 8 + h * 4,
                            )
                        )
        self.meet()
        for c in T.unroll(self.bands):
            if (c * BAND < high) & (c % self.split == self.rank):
                for source in T.unroll(self.split - 1):
                    for b in T.unroll(self.blocks):
                        for h in T.unroll(2):
                            for i in T.unroll(4):
                                acc[b * self.per_block + c * 8 + h * 4 + i] = (
                                    acc[b * self.per_block + c * 8 + h * 4 + i]
                                    + self.parts[source, c // self.split, b * 2 + h, thread, i]
                                )
        # What was read here is written by TMA next.
        T.ptx.fence.proxy.async_.shared__cta()
