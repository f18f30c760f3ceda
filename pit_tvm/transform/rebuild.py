"""Blocks and loops with annotations, and copies with some of their parts replaced; TVM's nodes do
not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx


def loops_in(body: tirx.Stmt, mark: str = "") -> list[tirx.For]:
    """The loops in a statement, inner ones before those around them; with a ``mark`` those that
    have this annotation."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(body, (tirx.For, found.append))
    return [loop for loop in found if not mark or mark in (loop.annotations or {})]


def unmarked(node: s_tir.SBlock | tirx.For, *marks: str) -> dict[str, Any]:
    """The annotations of a block or a loop but for these."""
    return {name: value for name, value in node.annotations.items() if name not in marks}


def rebuilt_block(
    block: s_tir.SBlock,
    *,
    reads: Sequence[Any] | None = None,
    body: tirx.Stmt | None = None,
    alloc_buffers: Sequence[Any] | None = None,
    annotations: Mapping[str, Any] | None = None,
) -> s_tir.SBlock:
    """``block`` with what is given in place of its own."""
    return s_tir.SBlock(
        block.iter_vars,
        block.reads if reads is None else reads,
        block.writes,
        block.name_hint,
        block.body if body is None else body,
        block.init,
        block.alloc_buffers if alloc_buffers is None else alloc_buffers,
        block.match_buffers,
        block.annotations if annotations is None else dict(annotations),
        block.span,
    )


def rebuilt_loop(
    loop: tirx.For,
    *,
    extent: Any = None,
    body: tirx.Stmt | None = None,
    annotations: Mapping[str, Any] | None = None,
) -> tirx.For:
    """``loop`` with what is given in place of its own."""
    return tirx.For(
        loop.loop_var,
        loop.min,
        loop.extent if extent is None else extent,
        loop.kind,
        loop.body if body is None else body,
        loop.thread_binding,
        loop.annotations if annotations is None else dict(annotations),
    )
