"""Lowers ``pit.atomic_adds``: stores that add become atomic additions, several at once where a
loop says so."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir import TensorLoad
from tvm.script import tirx as T
from tvm.tirx import BufferLoad, BufferStore

from ..errors import ScheduleError, mismatch
from ..primitive.atomic_adds import ATOMIC_ADDS, adds
from .lower_prefetch_rows import replaced
from .rebuild import loops_in, rebuilt, unmarked
from .warp_mma_site import offset_of

VECTORS = (2, 4)  # neighbours in float32 that GPUs with clusters add at once


def lower_atomic_adds(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace what every annotated block stores by atomic additions.

    Raises
    ------
    ScheduleError
        A block does not add to what it stores, or the vectorised loop around it is not one of
        as many float32 as one of `VECTORS`.
    """
    # Of several loops around a block the innermost counts. Errors inside a callback of
    # structural_map lose their type: bodies are worked out before.
    loops = reversed(loops_in(func.body))
    around = {block: loop for loop in loops for block in _marked(loop)}
    if not around:
        return func
    lowered = {loop.loop_var: _added(loop, block) for block, loop in around.items()}
    return func.with_body(
        tvm_ffi.structural_map(
            func.body, [(tirx.For, lambda loop: lowered.get(loop.loop_var, loop))]
        )
    )


def _marked(stmt: tirx.Stmt) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []

    def visit(block: s_tir.SBlock) -> None:
        if ATOMIC_ADDS in (block.annotations or {}):
            found.append(block)

    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, visit))
    return found


def _added(loop: tirx.For, block: s_tir.SBlock) -> tirx.Stmt:
    """``loop`` with the additions of ``block``; its body alone where they take a whole vector."""
    vector = loop.kind == tirx.ForKind.VECTORIZED
    stores: list[BufferStore] = []
    tvm_ffi.structural_walk(block.body, (BufferStore, stores.append))
    calls = [_call(store, loop if vector else None) for store in stores]
    body = tvm_ffi.structural_map(block.body, [(BufferStore, lambda _: calls[0])])
    new = rebuilt(block, body=body, annotations=unmarked(block, ATOMIC_ADDS))
    body = tvm_ffi.structural_map(
        loop.body, [(s_tir.SBlock, lambda b: new if ATOMIC_ADDS in (b.annotations or {}) else b)]
    )
    return replaced(body, {loop.loop_var: loop.min}) if vector else rebuilt(loop, body=body)


def _call(store: BufferStore, loop: tirx.For | None) -> tirx.Stmt:
    """The addition of one element, or of those of a vectorised ``loop``."""
    what, target = "atomic_adds: block", BufferLoad(store.buffer, list(store.indices))
    sums: Any = store.value
    if not adds(store):
        raise ScheduleError(mismatch(what, "a store that adds to its target", sums))
    at, value = tirx.address_of(target), sums.b
    if loop is None:
        return tirx.Evaluate(T.cuda.atomic_add(at, value))
    width = int(loop.extent)
    whole = width in VECTORS and isinstance(value, TensorLoad)
    if not whole or str(value.ty) != "float32" or not (_near(target, loop) and _near(value, loop)):
        expected = f"{' or '.join(map(str, VECTORS))} neighbours of float32 in memory"
        raise ScheduleError(mismatch(what, expected, f"{loop.extent} of {value} in {target}"))
    name, source = f"pit_add{width}", tirx.address_of(value)
    code = _vector_add(name, width)
    return tirx.Evaluate(T.cuda.func_call(name, at, source, source_code=code))


def _vector_add(name: str, width: int) -> str:
    """CUDA of the function that adds ``width`` neighbours."""
    given = ", ".join(f'"f"(v[{i}])' for i in range(width))
    places = ", ".join(f"%{i + 1}" for i in range(width))
    return f"""__forceinline__ __device__ void {name}(float* at, const float* v) {{
  asm volatile("red.global.add.v{width}.f32 [%0], {{{places}}};" :: "l"(at), {given} : "memory");
}}
"""


def _near(load: TensorLoad, loop: tirx.For) -> bool:
    """Whether iterations of ``loop`` load neighbours."""
    start = offset_of(load.source, list(load.indices))
    step = replaced(start, {loop.loop_var: loop.loop_var + 1}) - start
    return sym.Analyzer().can_prove_equal(step, 1)
