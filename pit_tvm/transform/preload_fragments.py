"""The first fragments of a tile, loaded beside the last sums of the tile before it.

Runs once `overlap_copies` has put a wait in front of every tile of a software pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir, sym, tirx

from .lower_prefetch_rows import replaced
from .lower_warp_mma import FIRST, STEP, STEPS
from .overlap_copies import WAIT
from .rebuild import rebuilt


def preload_fragments(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move each wait, with the loads of the first step behind it, in front of the sums of the last
    step of the tile before; the first tile's stand in front of the loop.

    So the tensor cores have work while a warp waits for the others and for shared memory. A wait
    lets as many copies be in flight as where it was: those of its own iteration come before it.
    Loops of unknown length stay as they are, and those whose fragments would not fit registers.
    """
    body = tvm_ffi.structural_map(func.body, [(tirx.SeqStmt, _rotated)])

    def plain(attr: tirx.AttrStmt) -> tirx.Stmt:
        return attr.body if attr.attr_key in (FIRST, STEP, STEPS) else attr

    return func.with_body(tvm_ffi.structural_map(body, [(tirx.AttrStmt, plain)]))


_MOST_REGISTERS = 216  # of a thread's 255: the rest holds addresses


@dataclass(frozen=True)
class _Tile:
    """A tile's wait, its block, and what that holds: loads of the first step, all up to the sums
    of the last one, and those."""

    wait: tirx.AttrStmt
    block: s_tir.SBlock
    first: tirx.Stmt
    middle: tuple[tirx.Stmt, ...]
    last: tirx.Stmt

    def followed(self, following: _Tile | None) -> tirx.Stmt:
        """The tile without its first loads, with those of the ``following`` one."""
        last = self.last if following is None else following.waited([following.first, self.last])
        body = tirx.SeqStmt([*self.middle, last])
        block = rebuilt(self.block, body=body, alloc_buffers=[])
        return s_tir.SBlockRealize([], tirx.const(True, "bool"), block)

    def waited(self, parts: list[tirx.Stmt]) -> tirx.Stmt:
        """The tile's wait, then ``parts``."""
        flight = self.wait.body
        count = sym.Analyzer().simplify(flight.value)
        inner = tirx.AttrStmt(flight.node, flight.attr_key, count, _sequence(parts))
        return tirx.AttrStmt(self.wait.node, WAIT, self.wait.value, inner)


def _rotated(seq: tirx.SeqStmt) -> tirx.Stmt:
    """A loop over tiles and the tiles behind it, each with the first loads of the next."""
    parts = list(seq.seq)
    for at in range(len(parts) - 1):
        loop = _bare(parts[at])
        if not isinstance(loop, tirx.For) or loop.kind != tirx.ForKind.SERIAL:
            continue
        inside, behind = _tile(loop.body), list(_tiles(parts[at + 1]))
        if inside is None or not behind or not isinstance(loop.extent, tirx.IntImm):
            continue
        begin = replaced(inside.waited([inside.first]), {loop.loop_var: loop.min})
        after = replaced(inside.first, {loop.loop_var: loop.loop_var + 1})
        following = _Tile(inside.wait, inside.block, after, (), after)
        turned = rebuilt(loop, body=inside.followed(following))
        ends = [tile.followed(then) for tile, then in zip(behind, [*behind[1:], None], strict=True)]
        own = inside.block.alloc_buffers
        whole = s_tir.SBlock([], [], [], "tiles", tirx.SeqStmt([begin, turned, *ends]), None, own)
        realize = s_tir.SBlockRealize([], tirx.const(True, "bool"), whole)
        return _sequence([*parts[:at], realize, *parts[at + 2 :]])
    return seq


def _tiles(stmt: tirx.Stmt) -> Iterator[_Tile]:
    """The tiles of a statement that holds nothing else: one, or an unrolled loop of them."""
    bare = _bare(stmt)
    if isinstance(bare, tirx.For):
        if bare.kind == tirx.ForKind.UNROLLED and isinstance(bare.extent, tirx.IntImm):
            for at in range(int(bare.extent)):
                value = tirx.const(at, str(bare.loop_var.ty.dtype))
                yield from _tiles(replaced(bare.body, {bare.loop_var: value}))
        return
    tile = _tile(bare)
    if tile is not None:
        yield tile


def _tile(stmt: tirx.Stmt) -> _Tile | None:
    """A wait around all that is done for one tile, in two steps or more; else None."""
    wait = _bare(stmt)
    if not isinstance(wait, tirx.AttrStmt) or wait.attr_key != WAIT:
        return None
    steps = wait.body.body
    if not isinstance(steps, tirx.AttrStmt) or steps.attr_key != STEPS or int(steps.value) < 2:
        return None
    block = steps.body.block
    parts = list(_flat(block.body))
    first = next(part for part in parts if _is(part, FIRST))
    if int(first.value) > _MOST_REGISTERS:
        return None
    middle = tuple(part for part in parts[:-1] if part is not first)
    return _Tile(wait, block, first, middle, parts[-1])


def _is(stmt: tirx.Stmt, key: str) -> bool:
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == key


def _bare(stmt: tirx.Stmt) -> tirx.Stmt:
    """What blocks around it hold, where they are certain to run."""
    known = sym.Analyzer()
    while isinstance(stmt, s_tir.SBlockRealize) and known.can_prove(stmt.predicate):
        if stmt.block.alloc_buffers or stmt.block.iter_vars:
            break
        stmt = stmt.block.body
    return stmt


def _flat(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """Statements of nested sequences."""
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _flat(part)
    else:
        yield stmt


def _sequence(parts: list[tirx.Stmt]) -> tirx.Stmt:
    return parts[0] if len(parts) == 1 else tirx.SeqStmt(parts)
