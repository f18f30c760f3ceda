"""Which rows of keys stand in a packed block, and which queries see them, on CPUs."""

from __future__ import annotations

from typing import Protocol

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from pit_tvm.windows import FULL

from .cpu_attention_parts import KEYS, AttentionForm


class Sight(Protocol):
    """What blocks of queries, ``g``, see of a packed block of keys."""

    limited: bool  # whether a query may not see a key

    def row(self, key: Expr) -> Expr:
        """Where a key stands among all rows."""

    def sees(self, g: Expr, u: Expr, w: Expr, key: Expr) -> Expr:
        """Whether query ``w`` of vector ``u`` sees a key."""


@T.meta_class
class WindowSight:
    """Keys in a row, seen by a window: by order, or by positions where order does not tell."""

    def __init__(self, form: AttentionForm, group: int) -> None:
        self.window, self.lanes = form.window, form.lanes
        self.limited, self.block = form.window != FULL, 2 * form.sums
        self.first = T.alloc_buffer((1,), "int64")  # row of the block's first key
        self.query = T.alloc_buffer((1,), "int64")  # a block's first, from the first key
        if not form.window.by_order:
            self.places = T.alloc_buffer((group * 2 * form.lanes,), "int32")
            self.key_places = T.alloc_buffer((KEYS + self.block,), "int32")

    def row(self, key: Expr) -> Expr:
        """As `Sight.row`."""
        return self.first[0] + key

    def place(self, g: Expr, u: Expr) -> Expr:
        """Where the positions of a vector's queries begin in ``places``."""
        return (g * 2 + u) * self.lanes

    def sees(self, g: Expr, u: Expr, w: Expr, key: Expr) -> Expr:
        """As `Sight.sees`."""
        window = self.window
        if window.by_order:
            far = self.query[0] + u * self.lanes + w - key
        else:
            far = self.places[self.place(g, u) + w] - self.key_places[key]
        before = [] if window.before is None else [far <= window.before]
        return tirx.all(*before, *([] if window.after is None else [0 - far <= window.after]))

    @T.inline
    def take(self, position, begin, query, length, g, vectors):
        if not self.window.by_order:
            for u in range(vectors):
                for r in range(self.lanes):
                    row: T.let = begin + T.min(query + u * self.lanes + r, length - 1)
                    self.places[self.place(g, u) + r] = position[row]

    @T.inline
    def look(self, position, row, count):
        self.first[0] = row
        if not self.window.by_order:
            for key in range(count + (-count) % self.block):
                self.key_places[key] = position[row + T.min(key, count - 1)]


@T.meta_class
class ListedSight:
    """Keys of a list, with bits of the queries of a block that see them; all blocks see alike."""

    limited = True

    def __init__(self, form: AttentionForm) -> None:
        self.lanes, self.block = form.lanes, 2 * form.sums
        self.rows = T.alloc_buffer((KEYS,), "int64")
        self.bits = T.alloc_buffer((KEYS + self.block,), "uint32")

    def row(self, key: Expr) -> Expr:
        """As `Sight.row`."""
        return self.rows[key]

    def sees(self, g: Expr, u: Expr, w: Expr, key: Expr) -> Expr:
        """As `Sight.sees`."""
        bit = T.uint32(1) << T.Cast("uint32", u * self.lanes + w)
        return (self.bits[key] & bit) != 0

    @T.inline
    def look(self, ids, bits, number, start, count):
        for key in range(count):
            self.rows[key] = T.Cast("int64", ids[number, start + key])
        for key in range(count + (-count) % self.block):
            at: T.let = start + T.min(key, count - 1)
            self.bits[key] = T.reinterpret("uint32", bits[number, at])
