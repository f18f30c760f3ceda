"""``warp_mma``: sums of products on tensor cores, one tile for each warp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import DataType, s_tir, tirx
from tvm.ir import TensorLoad, prim

from ..errors import ScheduleError, mismatch
from .checks import loop_of

WARP_MMA = "pit.warp_mma"
DEPTH_BYTES = 32  # of every row that one instruction takes: m16n8k16 in 16 bits, m16n8k8 in tf32
_SHARED = {"shared", "shared.dyn"}
KINDS = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "tf32",
}  # operands' types, as PTX has them


def warp_mma(sch: s_tir.Schedule, loop: Any) -> None:
    """Let the tensor cores compute every iteration of ``loop``, a step of a warp's reduction.

    The nest below says which lane owns what: rows ``(i, h)`` of lane ``4 * g + t`` are
    ``(i * 2 + h) * 8 + g``, columns ``(j, e)`` are ``(j * 4 + t) * 2 + e``. That is where the
    instruction ``mma.sync`` keeps its sums, so the accumulator stays an ordinary local buffer.
    Recorded as an annotation; ``pit_tvm.transform.lower_warp_mma`` proves the rest and writes the
    instructions. Operands in float32 are rounded to 10 bits of mantissa (tf32).

    Requirements: ``loop`` has a constant number of iterations, serial or unrolled, and holds
    loops ``i, h, j, e, k`` alone, of which ``h`` and ``e`` have 2 iterations, ``j`` an even
    number, and ``k`` 32 bytes of an operand. They hold one block ``acc += a * b``, its sums local
    and float32, its operands in shared memory and of one type in `KINDS`.

    Before::

        for step in range(2):
            for i, h, j, e, k in T.grid(4, 2, 8, 2, 16):
                acc[i, h, j, e] += lhs[i, h, lane // 4, step, k] * rhs[j, lane % 4, e, step, k]

    ``warp_mma(sch, step)``, then lowered::

        for i in T.unroll(4): ldmatrix(a[0, i, 0:4], lhs[i, ..])
        for j in T.unroll(4): ldmatrix(b[0, 2 * j : 2 * j + 2, 0:2], rhs[2 * j, ..])
        ...  # the same for step 1
        for i, j in T.unroll(4, 8): mma(acc[i, 0:2, j, 0:2], a[0, i, 0:4], b[0, j, 0:2])
        ...

    Raises
    ------
    ScheduleError
        A requirement does not hold.
    """
    nest_of(loop_of(sch, loop, "warp_mma"))
    sch.annotate(loop, WARP_MMA, 1)


@dataclass(frozen=True)
class Nest:
    """The loops below an annotated one, from the outermost, and the update that they hold.

    ``factors``: the loads of ``a`` and ``b`` in ``acc[at] = acc[at] + a * b``, casts aside.
    """

    loops: tuple[tirx.For, tirx.For, tirx.For, tirx.For, tirx.For]
    store: tirx.BufferStore
    factors: tuple[TensorLoad, TensorLoad]


def nest_of(loop: tirx.For) -> Nest:
    """What ``loop`` holds, if that is as `warp_mma` requires it (ScheduleError)."""
    what = f"warp_mma: loop {loop.loop_var.name}"
    if loop.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED):
        kind = tirx.ForKind(loop.kind).name.lower()
        raise ScheduleError(mismatch(what, "serial or unrolled", kind))
    found, body = [loop], loop.body
    while isinstance(body, tirx.For):
        found.append(body)
        body = body.body
    store = body.block.body if isinstance(body, s_tir.SBlockRealize) else body
    factors = _factors(store)
    if factors is None:
        expected = "a nest around acc += a * b, sums local and float32, operands shared"
        raise ScheduleError(mismatch(what, expected, "another body"))
    dtypes = [str(load.source.dtype) for load in factors]
    if dtypes[0] != dtypes[1] or dtypes[0] not in KINDS:
        raise ScheduleError(mismatch(what, f"two operands of one type in {sorted(KINDS)}", dtypes))
    depth = DEPTH_BYTES // DataType(dtypes[0]).itemsize
    sizes = [int(f.extent) if isinstance(f.extent, tirx.IntImm) else -1 for f in found]
    if (
        len(sizes) != 6
        or min(sizes) < 1
        or sizes[3] % 2
        or (*sizes[2:5:2], sizes[5]) != (2, 2, depth)
    ):
        expected = f"(steps, any, 2, even, 2, {depth}) iterations, loop by loop"
        raise ScheduleError(mismatch(what, expected, sizes))
    return Nest(tuple(found[1:]), store, factors)


def _factors(store: Any) -> tuple[TensorLoad, TensorLoad] | None:
    """The two loads of an update as `warp_mma` requires it; None for any other statement."""
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, prim.Add):
        return None
    own, product = store.value.a, store.value.b
    if not isinstance(own, TensorLoad) or not own.source.same_as(store.buffer):
        return None
    if not tvm_ffi.structural_equal(own.indices, store.indices):
        return None
    if (store.buffer.scope(), str(store.buffer.dtype)) != ("local", "float32"):
        return None
    if not isinstance(product, prim.Mul):
        return None
    a, b = (f.value if isinstance(f, prim.Cast) else f for f in (product.a, product.b))
    loads = isinstance(a, TensorLoad) and isinstance(b, TensorLoad)
    return (a, b) if loads and {a.source.scope(), b.source.scope()} <= _SHARED else None
