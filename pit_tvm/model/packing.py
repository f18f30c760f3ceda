"""SRead and SWrite of a graph: padded tensors to one sequence of live tokens, and back.

A packed tensor has the padded one's dimensions, with a batch of 1 and all live tokens, sequence by
sequence, in place of the tokens: every operator that treats tokens by themselves takes it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te, tirx

from ..analysis.expr import is_one
from .plane import BATCH, BOTH, TOKENS, Plane, Roles, tokens_place
from .rebuild import extents_of, is_op, values_of

LIVE_TOKENS = "pit_tvm.model.live_tokens"
#: Numbers of tensors of the index, as `emit_index` binds them.
ROW, STARTS = 0, 3

_SWRITE = "pit.swrite"


@dataclass(frozen=True)
class LiveTokens:
    """The index of a batch, int32: for each of ``live`` tokens its ``row`` in the flattened plane,
    its ``position`` and its ``sequence``; the ``starts`` of the sequences and ``live`` itself,
    ``[batch + 1]``; and ``place`` ``[batch, tokens]``, where each token went, -1 for a dead one."""

    live: tirx.Var
    row: relax.Var
    position: relax.Var
    sequence: relax.Var
    starts: relax.Var
    place: relax.Var


def emit_index(builder: relax.BlockBuilder, plane: Plane, mask: relax.Expr) -> LiveTokens:
    """Bind the index of ``mask`` ``[batch, tokens]``; only the run tells how long its lists are."""
    live = tirx.Var("live", "int64")
    ranks = (1, 1, 1, 1, 2)
    types = [relax.TensorType(dtype="int32", ndim=rank) for rank in ranks]
    made = builder.emit(
        relax.op.call_pure_packed(LIVE_TOKENS, mask, ty_args=[relax.TupleType(types)]), "index"
    )
    shapes = [[live]] * 3 + [[plane.batch + 1], [plane.batch, plane.tokens]]
    names = ("row", "position", "sequence", "starts", "place")
    found = []
    for number, shape in enumerate(shapes):
        part = builder.emit(relax.TupleGetItem(made, number), names[number])
        found.append(builder.match_cast(part, relax.TensorType(shape, "int32")))
    return LiveTokens(live, *found)


class Packer:
    """Emits gathers of live tokens (SRead) and scatters of them (SWrite)."""

    def __init__(self, builder: relax.BlockBuilder, plane: Plane, index: LiveTokens) -> None:
        self.builder, self.plane, self.index = builder, plane, index

    def pack(self, expr: relax.Expr, roles: Roles) -> relax.Var:
        """The live tokens of a tensor with both axes of the plane."""
        if BOTH in roles:
            return self._take(expr, self.index.row, roles.index(BOTH))
        order = _plane_first(roles)
        front = self._permute(expr, order)
        extents = extents_of(front)
        flat = self._reshape(front, [extents[0] * extents[1], *extents[2:]])
        rows = self._take(flat, self.index.row, 0)
        return self._permute(
            self._reshape(rows, [1, self.index.live, *extents[2:]]), _inverse(order)
        )

    def pack_positions(self, expr: relax.Expr, roles: Roles) -> relax.Var:
        """What each live token's position has in a tensor without a batch."""
        return self._take(expr, self.index.position, roles.index(TOKENS))

    def pack_sequences(self, expr: relax.Expr, roles: Roles, result: Roles) -> relax.Var | None:
        """What each live token's sequence has in a tensor with an extent of 1 where ``result``,
        which it is broadcast to, has its tokens; None if it has not."""
        dim = roles.index(BATCH)
        extents = extents_of(expr)
        place = tokens_place(roles, result)
        if place is None or roles[place] or not is_one(extents[place]):
            return None
        order = list(range(len(roles)))
        order[dim], order[place] = place, dim
        return self._permute(self._take(expr, self.index.sequence, dim), order)

    def unpack(self, packed: relax.Expr, roles: Roles, fill: float = 0.0) -> relax.Var:
        """The padded tensor of a packed one; elements of dead tokens are ``fill``."""
        if BOTH in roles:
            order = _first(roles, BOTH)
            rows = self._permute(packed, order)
        else:
            order = _plane_first(roles)
            front = self._permute(packed, order)
            rows = self._reshape(front, [self.index.live, *extents_of(front)[2:]])
        whole = self.plane.batch * self.plane.tokens
        place = self._reshape(self.index.place, [whole])
        full = unpack_rows(self.builder, rows, place, fill)
        if BOTH not in roles:
            outer = [self.plane.batch, self.plane.tokens]
            full = self._reshape(full, [*outer, *extents_of(full)[1:]])
        return self._permute(full, _inverse(order))

    def _take(self, expr: relax.Expr, ids: relax.Expr, axis: int) -> relax.Var:
        return self.builder.emit(relax.op.take(expr, ids, axis, "fast"))

    def _reshape(self, expr: relax.Expr, extents: Sequence[Any]) -> relax.Var:
        return self.builder.emit(relax.op.reshape(expr, list(extents)))

    def _permute(self, expr: relax.Expr, order: Sequence[int]) -> relax.Expr:
        if list(order) == sorted(order):
            return expr
        return self.builder.emit(relax.op.permute_dims(expr, list(order)))


def unpack_rows(
    builder: relax.BlockBuilder, rows: relax.Expr, place: relax.Expr, fill: float
) -> relax.Var:
    """The SWrite of ``rows`` ``[live, ...]`` to ``place`` ``[batch * tokens]``; ``fill`` stands
    elsewhere."""
    attrs = {} if fill else {_SWRITE: True}
    return builder.emit(builder.call_te(_scatter, rows, place, fill, primfunc_attrs=attrs))


def is_unpack(expr: relax.Expr, module: tvm.IRModule) -> bool:
    """Whether ``expr`` is what `unpack_rows` emits with zeros: a call with the rows and their
    places."""
    return is_op(expr, "call_tir") and _SWRITE in (module[expr.args[0]].attrs or {})


def index_parts(main: relax.Function) -> dict[relax.Var, int]:
    """The variables that name a tensor of the index, each with the tensor's number; see
    `emit_index`."""
    index: set[relax.Var] = set()
    found: dict[relax.Var, int] = {}
    for var, value in values_of(main).items():
        if is_index(value):
            index.add(var)
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in index:
            found[var] = int(value.index)
        elif isinstance(value, relax.Var) and value in found:
            found[var] = found[value]
    return found


def is_index(expr: relax.Expr) -> bool:
    """Whether ``expr`` makes the index of a batch."""
    return is_op(expr, "call_pure_packed") and expr.args[0].global_symbol == LIVE_TOKENS


def _scatter(rows: te.Tensor, place: te.Tensor, fill: float) -> te.Tensor:
    """Row ``place[i]`` of ``rows`` at ``[i]``, ``fill`` where it is negative."""

    other = tirx.const(fill if "float" in str(rows.dtype) else int(fill), rows.dtype)

    def element(i: Any, *rest: Any) -> Any:
        at = place[i]
        return tirx.if_then_else(at >= 0, rows[(at, *rest)], other)

    return te.compute((*place.shape, *rows.shape[1:]), element, name="swrite")


def _plane_first(roles: Roles) -> list[int]:
    batch, tokens = roles.index(BATCH), roles.index(TOKENS)
    return [batch, tokens, *(d for d in range(len(roles)) if d not in (batch, tokens))]


def _first(roles: Roles, role: str) -> list[int]:
    dim = roles.index(role)
    return [dim, *(d for d in range(len(roles)) if d != dim)]


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(d) for d in range(len(order))]
