"""Attention by a mask that is new at every call, on a CUDA device."""

from __future__ import annotations

import math
from typing import Any

import tvm

from ..errors import ShapeError, mismatch
from ..schedules.cuda_masked_attention import masked_attention
from ..schedules.cuda_masked_attention_parts import (
    KEYS,
    MOST_WIDE,
    PART_FACTS,
    QUERIES,
    STEP,
    WORDS,
    AttentionTile,
)
from . import cuda_arrays
from .cuda_detect_device import WARP
from .cuda_mask_lists import fold_queries, list_keys, order_queries
from .cuda_mask_parts import deal_lists
from .cuda_modules import Kernel, ModuleKernels, cached_modules, named_module
from .cuda_rows import FamilyKernels
from .cuda_view import CudaView, view_of
from .cuda_workspace import CudaWorkspace
from .kernel_cache import KernelCache

_PIECE = 8  # elements of 16 bits in 16 bytes
_BYTES = 16  # of one load
_HALF = 16  # bits of half a word
_STAGES = 2  # more leave room for fewer CTAs, and gain nothing on an H200
_KEPT = 4  # sizes of lists and of parts: long sequences have large ones
_CTAS = 132 * 4  # that an H200 holds at once
_LEAST_SLOTS = 8  # of parts of lists that are cut, of each head and sequence
_PART_BYTES = 48 << 20  # at most of all parts
_MOST = 65535  # CTAs along the later axes of a grid


class CudaMaskedAttention(FamilyKernels):
    """``softmax(scale * q @ k.T) @ v`` over the keys that a mask lets each query see.

    The mask is read once: every tile of `QUERIES` queries, gathered by what they see, has a
    list of the keys that any of them sees, and gathers those alone (PIT, SOSP'23, section 3).
    Nothing waits for the host. Threads may share it.
    """

    def __init__(self, cache: KernelCache, arch: str) -> None:
        super().__init__(cache, arch)
        self._kernels = ModuleKernels(cached_modules(cache, arch))
        self._memory = CudaWorkspace(_KEPT)

    def __call__(self, q: Any, k: Any, v: Any, mask: Any, scale: float, out: Any) -> None:
        """Write ``out``; queries that see no key get zeros.

        Parameters
        ----------
        q, k, v
            CUDA tensors [batch, heads, queries, dim], [batch, kv_heads, keys, dim], [batch,
            kv_heads, keys, value_dim], float16 or bfloat16; kv_heads divides heads. Rows that do
            not consist of whole pieces of 16 bytes are copied.
        mask
            bool, contiguous [batch or 1, heads or 1, queries or 1, keys].
        out
            [batch, heads, queries, value_dim], of the type of q, in any order of dimensions but the
            last.

        Raises
        ------
        ShapeError
            A head is wider than 256 columns, there are more than 65,535 heads, sequences, or
            planes of the mask, or lists of the mask have places beyond 32 bits.
        """
        if not out.numel():
            return
        if not mask.numel():  # no keys
            out.zero_()
            return
        shape, (dim, v_dim) = tuple(q.shape), (q.shape[-1], v.shape[-1])
        _check_extents(dim, v_dim, shape, mask)
        if scale <= 0:  # sums are scaled by the largest score before ``scale``
            q, scale = q * scale, 1.0
        given = [_in_pieces(one) for one in (q, k, v)]
        made = out if _fits(out) else out.new_empty((*shape[:-1], v_dim + -v_dim % _PIECE))
        lists = self.listed(mask, shape[2])
        tile = _tile(cuda_arrays.dtype_name(q), dim, v_dim)
        parts = self._dealt(lists, shape, tile)
        planes = mask.shape[1] * int(mask.shape[0] > 1), int(mask.shape[1] > 1)
        widths = given[0].shape[-1], given[2].shape[-1]
        self.kernel(tile)(
            *(_flat(one) for one in given),
            *(*lists.views, parts.work, lists.order, parts.laid, parts.arrived, _flat(made)),
            *(lists.ordered, parts.slots),
            *(*shape[:3], *widths, shape[1] // k.shape[1], *planes),
            *(step for one in (*given, made) for step in one.stride()[:-1]),
            scale * math.log2(math.e),
        )
        if made is not out:
            out.copy_(made[..., :v_dim])

    def listed(self, mask: Any, queries: int) -> _Lists:
        """The lists of a mask of so many queries, in memory that the next call uses again."""
        rows, keys = mask.shape[2:]
        alike = int(rows == 1 and queries > 1)
        lists: _Lists = self._memory.keep(_Lists, mask, *mask.shape)
        whole = keys % _BYTES == 0 and mask.data_ptr() % _BYTES == 0
        self._list_kernel("fold", whole)(mask.data_ptr(), keys, *lists.folded)
        if lists.ordered:
            self._list_kernel("order")(lists.counted, lists.order)
        list_keys = self._list_kernel("list", bool(lists.ordered))
        list_keys(lists.lines, lists.order, alike, *lists.views, lists.count)
        return lists

    def _dealt(self, lists: _Lists, shape: tuple[int, ...], tile: AttentionTile) -> _Parts:
        """Parts of the lists for the CTAs of sequences, heads and queries, ``shape``."""
        batch, heads, queries, _ = shape
        tiles, wanted = -(-queries // QUERIES), -(-_CTAS // (batch * heads))
        most = _PART_BYTES // (batch * heads * tile.laid * 4)
        slots = min(max(_LEAST_SLOTS, tiles // 4, wanted - tiles), most)
        planes = lists.count.shape[0]
        parts: _Parts = self._memory.keep(
            _Parts, lists.count, planes, tiles + slots, batch * heads * slots, tile.laid, slots
        )
        self._list_kernel("deal")(lists.count, tiles, wanted, slots, parts.work)
        return parts

    def _list_kernel(self, name: str, option: bool = False) -> Kernel:
        return self._kernels.find("cuda-mask-lists", lists_module, f"{name}_{option:d}")

    def kernel(self, tile: AttentionTile) -> Kernel:
        """See `masked_attention`."""
        return self._get(("cuda-masked-attention", tile), lambda: masked_attention(tile))


class _Lists:
    """Memory for the lists of a mask [batch, heads, rows, keys].

    ``views``: ids and bits. The order of rows that fill one tile holds anything.
    """

    def __init__(self, like: Any, batch: int, heads: int, rows: int, keys: int) -> None:
        planes, tiles, capacity = batch * heads, -(-rows // QUERIES), -(-keys // KEYS) * KEYS
        words = capacity // WARP
        self.ordered = int(tiles > 1)

        def new(*shape: int) -> Any:
            return cuda_arrays.empty_of("int32", like, shape)

        self._ids, self._bits = new(planes, tiles, capacity), new(planes, tiles, WORDS, capacity)
        self.count, self._lines = new(planes, tiles), new(planes, rows, words)
        self.counted, self.order = new(planes, rows), new(planes, tiles * QUERIES)
        self.lines = view_of(self._lines, "uint32")
        self.folded = (
            view_of(self._lines, "uint16", (planes * rows, words * 2)),
            self.counted.view(-1),
        )
        self.views = view_of(self._ids, "int32"), view_of(self._bits, "uint32")


class _Parts:
    """What CTAs do, ``items`` of each plane; room for ``parts`` of cut lists, and their counters,
    which begin at 0 and are 0 behind every call."""

    def __init__(
        self, like: Any, planes: int, items: int, parts: int, laid: int, slots: int
    ) -> None:
        self.slots = slots
        self._work = cuda_arrays.empty_of("int32", like, (planes, items, PART_FACTS))
        self._laid = cuda_arrays.empty_of("float32", like, (max(1, parts * laid),))
        self.arrived = cuda_arrays.empty_of("int32", like, (max(1, parts),)).zero_()
        self.work = view_of(self._work, "int32")
        self.laid = view_of(self._laid, "float32")


def lists_module() -> tvm.IRModule:
    """The kernels that make lists, by their names and options."""
    made = {"order_0": order_queries(), "deal_0": deal_lists()}
    for option in (False, True):
        made[f"fold_{option:d}"] = fold_queries(option)
        made[f"list_{option:d}"] = list_keys(option)
    return named_module(made)


def _tile(dtype: str, dim: int, v_dim: int) -> AttentionTile:
    deep, wide = (-(-width // STEP) * STEP for width in (dim, v_dim))
    return AttentionTile(dtype, deep, wide, _STAGES)


def _check_extents(dim: int, v_dim: int, shape: tuple[int, ...], mask: Any) -> None:
    if max(dim, v_dim) > MOST_WIDE:
        raise ShapeError(mismatch("q, k, v", f"heads of at most {MOST_WIDE}", max(dim, v_dim)))
    batch, heads, rows, keys = mask.shape
    planes, capacity = batch * heads, -(-keys // KEYS) * KEYS
    if max(*shape[:2], planes) > _MOST:
        expected = f"at most {_MOST} sequences, heads, and planes of the mask"
        raise ShapeError(mismatch("q, mask", expected, (*shape[:2], planes)))
    # Bits are told by words of lists, and read by halves of words of rows.
    if planes * capacity * max(WORDS * -(-rows // QUERIES), -(-rows // _HALF)) >= 2**31:
        expected = "lists of fewer than 2**31 words"
        raise ShapeError(mismatch("mask", expected, tuple(mask.shape), "split the call"))


def _fits(rows: Any) -> bool:
    """Whether rows consist of whole pieces, and begin where these do."""
    *steps, last = rows.stride()
    *extents, width = rows.shape
    places = [step for step, extent in zip(steps, extents, strict=True) if extent > 1]
    return (
        last == 1 and rows.data_ptr() % 16 == 0 and not any(at % _PIECE for at in (width, *places))
    )


def _in_pieces(rows: Any) -> Any:
    """The rows, or a copy of them with zeros behind their columns."""
    if _fits(rows):
        return rows
    width = rows.shape[-1]
    copy = rows.new_zeros((*rows.shape[:-1], width + -width % _PIECE))
    copy[..., :width] = rows
    return copy


def _flat(rows: Any) -> CudaView:
    """All that lies between the first element and the last one."""
    steps = zip(rows.shape, rows.stride(), strict=True)
    last = sum((extent - 1) * step for extent, step in steps)
    return CudaView(rows.data_ptr(), (last + 1,), cuda_arrays.dtype_name(rows), rows.get_device())
