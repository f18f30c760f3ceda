"""Blocks and loops with annotations, and copies with some of their parts replaced; TVM's nodes do
not change."""

from __future__ import annotations

from typing import Any, TypeVar

import tvm_ffi
from tvm import s_tir, tirx

Node = TypeVar("Node", s_tir.SBlock, tirx.For)

_BLOCK = "iter_vars reads writes name_hint body init alloc_buffers match_buffers annotations span"
_LOOP = "loop_var min extent kind body thread_binding annotations"


def loops_in(body: tirx.Stmt, mark: str = "") -> list[tirx.For]:
    """The loops in a statement, inner ones before those around them; with a ``mark`` those that
    have this annotation."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(body, (tirx.For, found.append))
    return [loop for loop in found if not mark or mark in (loop.annotations or {})]


def unmarked(node: s_tir.SBlock | tirx.For, *marks: str) -> dict[str, Any]:
    """The annotations of a block or a loop but for these."""
    return {name: value for name, value in node.annotations.items() if name not in marks}


def rebuilt(node: Node, **given: Any) -> Node:
    """A block or a loop with what is given in place of its own."""
    parts = _BLOCK if isinstance(node, s_tir.SBlock) else _LOOP
    own = {name: getattr(node, name) for name in parts.split()}
    return type(node)(**(own | given))
