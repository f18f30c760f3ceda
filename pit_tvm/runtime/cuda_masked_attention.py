"""Attention by a mask that is new at every call, on a CUDA device, and its gradients."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ShapeError, mismatch
from ..schedules.cuda_attention_gradients import MOST_WIDE_GRADIENT, attention_gradients
from ..schedules.cuda_gradient_rows import GradientTile
from ..schedules.cuda_listed_products import STEP
from ..schedules.cuda_listed_rows import MOST_WIDE
from ..schedules.cuda_masked_attention import AttentionTile, masked_attention
from ..schedules.hopper_knobs import ISA
from .cuda_arrays import dtype_name, empty_of
from .cuda_head_rows import HeadRows, fill_from, handed, in_pieces, room_for
from .cuda_listed_mask import CudaMaskLists, Lists, Tiled
from .cuda_modules import Kernel
from .cuda_rows import FamilyKernels
from .cuda_view import view_of
from .cuda_workspace import CudaWorkspace
from .kernel_cache import KernelCache

_KEPT = 4  # sizes of parts of lists
_MOST = 65535  # CTAs along the later axes of a grid
_NEAR = 2**24  # bytes that heads side by side gather: a third of an H200's L2 cache
_MOST_BESIDE = 1024  # heads whose CTAs run side by side
_LOG2_E = math.log2(math.e)


class CudaMaskedAttention(FamilyKernels):
    """``softmax(scale * q @ k.T) @ v`` over the keys that a mask lets each query see.

    ``lists`` reads the mask once: every tile of 64 queries, gathered by what they see, has a list
    of the keys that any of them sees, and gathers those alone (PIT, SOSP'23, section 3). Nothing
    waits for the host. Threads may share it.
    """

    def __init__(self, cache: KernelCache, arch: str) -> None:
        super().__init__(cache, arch)
        self.lists = CudaMaskLists(cache, arch)
        self._memory = CudaWorkspace(_KEPT)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        lists: Lists,
        scale: float,
        out: Any,
        weights: Any = None,
        sinks: Any = None,
        softcap: float = 0.0,
    ) -> None:
        """Write ``out``; queries that see no key get zeros.

        Parameters
        ----------
        q, k, v
            CUDA tensors [batch, heads, queries, dim], [batch, kv_heads, keys, dim], [batch,
            kv_heads, keys, value_dim], float16 or bfloat16; kv_heads divides heads. Rows that do
            not consist of whole pieces of 16 bytes are copied.
        lists
            What queries see of keys.
        scale
            Positive: sums are scaled down by the largest score before it.
        out
            [batch, heads, queries, value_dim], of the type of q, in any order of dimensions but the
            last.
        weights
            float32, contiguous [batch, heads, queries], for `gradients`: logarithms of the sums of
            weights to the base of 2, infinity where no key is seen.
        sinks
            float32 or of the type of q, contiguous [heads]: for every head the score of one more
            key, whose value is 0.
        softcap
            What scores come close to, by the hyperbolic tangent; 0 leaves them as they are.

        Raises
        ------
        ShapeError
            A head is wider than 256 columns, or there are more than 65,535 heads or sequences.
        """
        if not (out.numel() and k.shape[2]):
            out.zero_()
            if weights is not None:
                weights.fill_(math.inf)
            return
        _check_heads(q, v, MOST_WIDE)
        tiled = lists.tiled(q.shape[:3], k.shape[1])
        shared, share = tiled.shared, tiled.heads // k.shape[1]
        given = [in_pieces(q, shared), in_pieces(k), in_pieces(v)]
        made = room_for(out, q.shape[1])
        sunk = "" if sinks is None else dtype_name(sinks)
        tile = AttentionTile(*self._tile(q, v), sunk, capped=softcap > 0)
        q_rows, k_rows, v_rows, rows = (handed(one, tile.dtype) for one in (*given, made))
        parts = self._parts(q, lists, tiled, tile.laid)
        beside = _beside(tiled, k.shape[2], q.shape[-1] + v.shape[-1], share)
        self.kernel(tile)(
            *(q_rows.view, k_rows.view, v_rows.view, *lists[:4], parts.laid, parts.arrived),
            parts.laid if sinks is None else sinks.detach(),
            *(rows.view, parts.laid if weights is None else weights.view(-1), lists.ordered),
            *(parts.slots, int(weights is not None), tiled.batch, tiled.heads, beside),
            *(tiled.queries, shared, tiled.fit, given[0].shape[-1], given[2].shape[-1], share),
            *(*lists.apart, *_grouped(q_rows, shared), *k_rows.steps, *v_rows.steps),
            *(*_grouped(rows, shared), scale * _LOG2_E, _bend(scale, softcap)),
        )
        fill_from(out, made)

    def gradients(
        self,
        given: tuple[Any, Any, Any],
        lists: tuple[Lists, Lists],
        scale: float,
        results: tuple[Any, Any, Any],
        made: tuple[Any, Any, Any],
        softcap: float = 0.0,
    ) -> Any:
        """Write ``made``, the gradients to q, k and v; give, for those to sinks, the float32 sums
        of each row's results by their gradients, flat [batch, heads, queries].

        Parameters
        ----------
        given
            q, k and v of the call; heads have at most 128 columns.
        lists
            What queries see of keys, and by which queries keys are seen.
        scale, softcap
            Those of the call.
        results
            The gradient to the result, the result, and ``weights``, which the call has written.
        made
            Shaped and typed as q, k and v, in any order of dimensions but the last.

        Raises
        ------
        ShapeError
            As the call.
        """
        q, k, v = given
        if not (q.numel() and k.numel() and v.numel()):
            for one in made:
                one.zero_()
            return empty_of("float32", q, (results[2].numel(),)).zero_()
        shape, keys = tuple(q.shape), k.shape[2]
        _check_heads(q, v, MOST_WIDE_GRADIENT)
        q, k, v, dout, out = map(in_pieces, (*given, *results[:2]))
        weights, sizes = results[2].view(-1), self._tile(q, v)
        rooms = [room_for(one, shape[1]) for one in made]
        own = (handed(one, sizes[0]) for one in (q, k, v, dout, out, *rooms))
        q_rows, k_rows, v_rows, down, result, dq, dk, dv = own
        drops = empty_of("float32", q, (weights.shape[0],))
        width, share = q.shape[-1] + v.shape[-1], shape[1] // k.shape[1]
        numbers = shape[2], q.shape[-1], v.shape[-1], share
        for of_keys, rows, operands in (
            (False, shape[2], (q_rows, down, k_rows, v_rows, result, dq, dq)),
            (True, keys, (k_rows, v_rows, q_rows, down, result, dk, dv)),
        ):
            tile, seen = GradientTile(*sizes, of_keys, capped=softcap > 0), lists[of_keys]
            tiled = Tiled(shape[0], shape[1], rows)
            parts = self._parts(q, seen, tiled, tile.laid)
            gathered = (shape[2], width, 1) if of_keys else (keys, width, share)
            views = [one.view for one in operands]
            self.gradient_kernel(tile)(
                *(*views[:5], *seen[:4], weights, drops, parts.laid, parts.arrived, *views[5:]),
                *(seen.ordered, parts.slots, *shape[:2], _beside(tiled, *gathered), rows, *numbers),
                *seen.apart,
                *(step for one in operands for step in one.steps),
                *(scale * _LOG2_E, scale, _bend(scale, softcap)),
            )
        for one, room in zip(made, rooms, strict=True):
            fill_from(one, room)
        return drops

    def _parts(self, like: Any, lists: Lists, tiled: Tiled, laid: int) -> _Parts:
        """Room for the parts of cut lists, ``laid`` numbers of every thread."""
        slots = lists.slots(tiled.tiles)
        number, laid = tiled.batch * tiled.heads * slots, laid * tiled.holders
        parts: _Parts = self._memory.keep(_Parts, like, number, laid, slots)
        return parts

    def _tile(self, q: Any, v: Any) -> tuple[str, int, int, bool]:
        """Type and widths of a tile, and whether its warps multiply as a group."""
        deep, wide = (-(-one.shape[-1] // STEP) * STEP for one in (q, v))
        return dtype_name(q), deep, wide, self.arch == ISA

    def kernel(self, tile: AttentionTile) -> Kernel:
        """See `masked_attention`."""
        return self._get(("cuda-masked-attention", tile), lambda: masked_attention(tile))

    def gradient_kernel(self, tile: GradientTile) -> Kernel:
        return self._get(("cuda-attention-gradients", tile), lambda: attention_gradients(tile))


def _beside(tiled: Tiled, rows: int, width: int, share: int) -> int:
    """Of the heads of all sequences, how many have CTAs that run side by side, where each ``share``
    of them gather the same ``rows`` of so many columns."""
    heads = tiled.batch * tiled.heads
    most = min(max(1, _NEAR * share // (2 * rows * width)), _MOST_BESIDE)
    groups = min(-(-heads // most), _MOST)
    return -(-heads // groups)


def _bend(scale: float, softcap: float) -> float:
    """What the products of queries and keys are bent by."""
    return scale / softcap if softcap else 0.0


def _grouped(rows: HeadRows, shared: int) -> tuple[int, int, int, int]:
    """Steps of sequences, of so many heads at a time, of rows, and of heads."""
    batch, head, row = rows.steps
    return batch, head * shared, row, head


class _Parts:
    """Room for ``number`` parts of cut lists, and their counters, which begin at 0 and are 0 behind
    every call."""

    def __init__(self, like: Any, number: int, laid: int, slots: int) -> None:
        self.slots = slots
        self._laid = empty_of("float32", like, (max(1, number * laid),))
        self.arrived = empty_of("int32", like, (max(1, number),)).zero_()
        self.laid = view_of(self._laid, "float32")


def _check_heads(q: Any, v: Any, most: int) -> None:
    widest = max(q.shape[-1], v.shape[-1])
    if widest > most:
        raise ShapeError(mismatch("q, k, v", f"heads of at most {most}", widest))
    if max(q.shape[:2]) > _MOST:
        raise ShapeError(mismatch("q", f"at most {_MOST} sequences and heads", tuple(q.shape[:2])))
