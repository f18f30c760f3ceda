"""Cuts a function after its main block: what is left to do to the sums, and to no sums at all."""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import TensorLoad, prim

from ..analysis.access import Access, BlockInfo, block_infos
from ..errors import AxisError, mismatch
from .axis_map import Expr
from .insert_sread_swrite import first_read, is_read
from .rebuild import rebuilt
from .unalign import is_buffer


def split_epilogue(func: tirx.PrimFunc, main: str) -> tirx.PrimFunc | None:
    """The blocks after ``main``, reading its result from a first parameter of its own.

    Parameters: the result of ``main``, the inputs that the rest reads, the output. None if ``main``
    writes the output itself.
    """
    info = _block(func, main)
    result = info.updates[0].target.buffer
    if result in func.params:
        return None
    param = tirx.decl_buffer(result.shape, result.dtype, result.name, layout=None)
    body = _rest(func, main)
    body = tvm_ffi.structural_map(body, [(ir.Var, lambda v: param if v.same_as(result) else v)])
    return _assemble(func, [param], body, {result})


def dead_value(func: tirx.PrimFunc, main: str, operand: str) -> tirx.PrimFunc | None:
    """What the output is where ``operand`` is zero: parameters are inputs that matter, then output.

    A reduction ``main`` must get nothing from a zero of ``operand``; its result is then what it
    starts from. Any ``main`` gets zero from its first read, along whose axes elements are dead;
    reads at other places, which may be live, stay. None if the answer is zero everywhere.
    """
    info = _block(func, main)
    result = info.updates[0].target.buffer
    start = info.init[0].value if info.init else None
    if isinstance(start, tirx.IntImm | tirx.FloatImm):
        if result not in func.params:
            rest = _rest(func, main)
            body = _replace_loads(rest, lambda load: load.source.same_as(result), start)
            return _assemble(func, [], body, {result})
        if start.value == 0:
            return None
    dead = first_read(info, operand)
    body = func.body.block.body
    zero = _zero(str(dead.buffer.dtype), _divides(body, dead))
    return _assemble(func, [], _replace_loads(body, lambda load: is_read(load, dead), zero), set())


def _divides(body: tirx.Stmt, dead: Access) -> bool:
    """Whether something is divided by what is made of the elements that are dead."""
    found: list[TensorLoad] = []

    def look(quotient: prim.Div) -> None:
        tvm_ffi.structural_walk(quotient.b, (TensorLoad, found.append))

    tvm_ffi.structural_walk(body, (prim.Div, look))
    return any(is_read(load, dead) for load in found)


def _zero(dtype: str, divides: bool) -> Expr:
    """0; as a divisor of floating-point numbers one that TVM, which refuses to divide by a
    constant 0, does not see: the processor gives what the dense product has there."""
    if not divides or "float" not in dtype:
        return tirx.const(0, dtype)
    least = tirx.const(1, f"int{tvm.DataType(dtype).bits}")  # the bits of the least number above 0
    return tirx.floor(tirx.reinterpret(dtype, least))


def _block(func: tirx.PrimFunc, main: str) -> BlockInfo:
    for info in block_infos(func):
        if info.name == main:
            return info
    raise AxisError(mismatch("block", "a block of the function", main))


def _replace_loads(stmt: tirx.Stmt, chosen: Callable[[TensorLoad], bool], value: Expr) -> tirx.Stmt:
    def replace(load: TensorLoad) -> Expr:
        return value if chosen(load) else load

    def refresh(block: s_tir.SBlock) -> s_tir.SBlock:
        left: list[ir.Var] = []
        tvm_ffi.structural_walk(block.body, (TensorLoad, lambda load: left.append(load.source)))
        return rebuilt(block, reads=[r for r in block.reads if r.source in left])

    replaced = tvm_ffi.structural_map(stmt, [(TensorLoad, replace)])
    return tvm_ffi.structural_map(replaced, [(s_tir.SBlock, refresh)])


def _rest(func: tirx.PrimFunc, main: str) -> tirx.Stmt:
    """The nests of the root after the one that holds ``main``, and what they need from before."""
    root = func.body.block.body
    nests = list(root.seq) if isinstance(root, tirx.SeqStmt) else [root]
    blocks = [_blocks(nest) for nest in nests]
    holding = next(i for i, found in enumerate(blocks) if main in {b.name_hint for b in found})
    left = nests[holding + 1 :]
    needed = {r.source for found in blocks[holding + 1 :] for b in found for r in b.reads}
    for nest, found in zip(reversed(nests[:holding]), reversed(blocks[:holding]), strict=True):
        if any(w.source in needed for b in found for w in b.writes):
            left.insert(0, nest)
            needed |= {r.source for b in found for r in b.reads}
    return left[0] if len(left) == 1 else tirx.SeqStmt(left)


def _blocks(stmt: tirx.Stmt) -> list[s_tir.SBlock]:
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, blocks.append))
    return blocks


def _assemble(
    func: tirx.PrimFunc, first: list[ir.Var], body: tirx.Stmt, gone: set[ir.Var]
) -> tirx.PrimFunc:
    """A function of ``body``: parameters ``first``, then those of ``func`` that it uses."""
    used: list[ir.Var] = []
    tvm_ffi.structural_walk(body, (ir.Var, used.append))
    allocs = [b for b in func.body.block.alloc_buffers if b not in gone and b in used]
    kept = [p for p in func.params if is_buffer(p) and p in used]
    for buffer in (*first, *kept, *allocs):
        for extent in buffer.shape:
            tvm_ffi.structural_walk(extent, (ir.Var, used.append))
    params = _with_definitions(func, kept, first, set(used))
    root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=allocs)
    realize = s_tir.SBlockRealize([], True, root)
    return tirx.PrimFunc([*first, *params], realize, func.ret_type, func.attrs)


def _with_definitions(
    func: tirx.PrimFunc, kept: list[ir.Var], first: list[ir.Var], used: set[ir.Var]
) -> list[ir.Var]:
    """``kept``, and the parameters whose shapes define symbolic extents that are ``used``."""
    buffers = [param for param in func.params if is_buffer(param)]
    defined = _extents([*first, *kept])
    missing = (used & _extents(buffers)) - defined
    out = set(kept)
    for param in buffers:
        if missing & _extents([param]):
            out.add(param)
            missing -= _extents([param])
    return [p for p in func.params if p in out]


def _extents(buffers: list[ir.Var]) -> set[ir.Var]:
    """The variables that are extents of buffers as they are."""
    return {extent for b in buffers for extent in b.shape if isinstance(extent, ir.Var)}
