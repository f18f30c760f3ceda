"""Attention by a mask that is new at every call, on a CPU: lists of what tiles of queries see, and
a kernel that gathers it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from ..pools import pooled
from ..schedules.cpu_mask_lists import mask_lists, tile_of
from ..schedules.cpu_masked_attention import GROUP, OVERHEAD, masked_attention
from ..target import TargetInfo
from ..threads import start_thread_pool
from .content_keys import content_key
from .kernel_cache import KernelCache

Kernel = Callable[..., Any]

_ENTRY = 8  # bytes of a list for a key
_MOST_LISTED = 2**28  # bytes of lists of many queries of heads that share tiles
_FOLD = 2  # 4 heads, and 8 queries at least where AVX-512 is: lists are as long as a mask's rows


class TileLists(NamedTuple):
    """What tiles of rows see, by a mask of so many ``batch``, ``heads`` and ``tiles`` (1 each if
    all see the same): int32 arrays ``ids`` and ``bits`` [lists, keys], ``counts`` [lists]; whether
    every query sees a key; 2 ** ``fold`` heads of a query are rows of one tile."""

    ids: np.ndarray
    bits: np.ndarray
    counts: np.ndarray
    seeing: bool
    batch: int
    heads: int
    tiles: int
    fold: int


class MaskedAttention:
    """``softmax(scale * q @ k.T) @ v`` over the keys that a mask lets each query see.

    `lists` reads the mask once: every tile of queries has a list of the keys that any of them sees,
    and gathers those alone (PIT, SOSP'23, section 3). Threads may share it.
    """

    def __init__(self, cache: KernelCache, target: TargetInfo) -> None:
        start_thread_pool(target.threads)
        self.target, self.tile = target, tile_of(target)
        self._cache = cache
        self._kernels: dict[object, Kernel] = {}
        self._lock = threading.Lock()
        self._none = tvm.runtime.empty((0,), "float32")

    def lists(self, mask: Any, queries: int, share: int) -> TileLists:
        """The lists of a mask, uint8 [batch or 1, heads or 1, queries or 1, keys], none of which is
        0, whose keys are one behind the other: an array as compiled functions take it. ``share``
        heads have the same keys."""
        batch, heads, rows, keys = mask.shape
        fold = self._fold(queries, share) if heads == 1 else 0
        while fold and batch * (rows << fold) // self.tile * keys * _ENTRY > _MOST_LISTED:
            fold -= 1
        tiles = -(-(rows << fold) // self.tile)
        number = batch * heads * tiles
        ids, bits = (np.empty((number, keys), np.int32) for _ in range(2))
        counts, seeing = (np.empty(number, np.int32) for _ in range(2))
        self._kernel("lists", mask_lists)(mask, ids, bits, counts, seeing, 1 << fold)
        every = np.uint32(2**self.tile - 1)
        sees = bool((seeing.view(np.uint32) == every).all())
        return TileLists(ids, bits, counts, sees, batch, heads, tiles, fold)

    def _fold(self, queries: int, share: int) -> int:
        """Which power of 2 heads become rows of one tile: of those that leave the fewest of its
        rows empty the largest, up to some, as few queries see fewer keys than many do."""
        folds = [f for f in range(self.tile.bit_length()) if share % (1 << f) == 0]
        halves = {f: (share >> f) * self._halves(queries, f) for f in folds}
        few = [f for f in folds if halves[f] == min(halves.values())]
        return max((f for f in few if f <= _FOLD), default=min(few))

    def _halves(self, queries: int, fold: int) -> int:
        """Halves of tiles that so many queries of 2 ** fold heads fill."""
        return -(-(queries << fold) // (self.tile // 2))

    def pairs(self, lists: TileLists, shape: tuple[int, int, int]) -> int:
        """Of how many queries and keys the kernel makes scores for sequences, heads and queries,
        ``shape``, or could in the time that it takes."""
        batch, heads, queries = shape[0], shape[1] >> lists.fold, shape[2]
        tiles = -(-(queries << lists.fold) // self.tile)
        repeated = batch // lists.batch * (heads // lists.heads) * (tiles // lists.tiles)
        met = int(lists.counts.sum(dtype=np.int64)) * repeated + OVERHEAD * batch * heads * tiles
        # Half a tile takes half the time.
        return met * self._halves(queries, lists.fold) * (self.tile // 2) // tiles

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        lists: TileLists,
        scale: float,
        out: Any,
        sinks: Any = None,
        softcap: float = 0.0,
    ) -> None:
        """Write ``out``; queries that see no key get zeros.

        Parameters
        ----------
        q, k, v
            [batch, heads, queries, dim], [batch, kv_heads, keys, dim], [batch, kv_heads, keys,
            value_dim], all of float32, float16 or bfloat16 and none of them empty; kv_heads divides
            heads. Columns are one behind the other.
        lists
            What queries see of keys, listed for as many heads that share keys.
        scale
            Positive.
        out
            [batch, heads, queries, value_dim], of the type of q, like those.
        sinks
            float32 [heads], scores of keys whose values are 0; or None.
        softcap
            Scores become ``softcap * tanh(score / softcap)``, if it is not 0.
        """
        dtype = str(q.dtype).rpartition(".")[2]
        form = (int(q.shape[-1]), int(v.shape[-1]), dtype, sinks is not None, bool(softcap))
        kernel = self._kernel(form, partial(masked_attention, *form))
        share = q.shape[1] // k.shape[1] >> lists.fold
        together = min(GROUP, share) if lists.heads == 1 else 1
        of_head = lists.tiles if lists.heads > 1 else 0
        of_batch = lists.tiles * lists.heads if lists.batch > 1 else 0
        steps = of_batch, of_head, int(lists.tiles > 1)
        given = lists.ids, lists.bits, lists.counts, self._none if sinks is None else sinks
        kernel(q, k, v, *given, out, scale, softcap, *steps, together, lists.fold)

    def _kernel(self, name: object, make: Callable[..., tirx.PrimFunc]) -> Kernel:
        """The compiled function ``name``, made when it is first needed."""
        if name not in self._kernels:
            with self._lock:
                if name not in self._kernels:
                    target = self.target.tvm_target
                    key = content_key("masked attention", name, target)
                    build = partial(_build, partial(make, target=self.target), target)
                    self._kernels[name] = pooled(self._cache.get(key, build))
        return self._kernels[name]


def _build(make: Callable[[], tirx.PrimFunc], target: dict[str, Any]) -> Any:
    return tvm.compile(tvm.IRModule({"main": make()}), target=Target(target))
