"""One element of what a graph computes as an expression, and its value where keys live or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, sym, tirx
from tvm.ir import prim

from ..analysis.access import BlockInfo, block_infos
from ..analysis.expr import PrimExpr, is_one, is_zero, replace_vars, strip_widening
from ..windows import Window
from .excluding import MILD, excluding
from .lowered import lower
from .rebuild import counting, describe

_MOST_NUMBERS = 16  # of a mask that are tried as distances
_MOST_FAR = 1 << 30  # of distances, which kernels compare in 32 bits


class Reader:
    """Expands an element of a tensor down to elements of the model's inputs. ``places`` are the
    variables of the first indices: they count from 0."""

    def __init__(
        self,
        made_by: Callable[[relax.Var], Any],
        live: relax.Var,
        places: Sequence[tirx.Var],
    ) -> None:
        self.made_by, self.live = made_by, live
        self.analyzer = counting(places)
        # What stands for each element read of an input: the variable, the input, the indices.
        self.loads: list[tuple[tirx.Var, relax.Var, tuple[PrimExpr, ...]]] = []
        # Why an element has no closed expression; exceptions would not cross TVM's visitors. What
        # computes the parts that were not read, None for one that nothing is known of.
        self.problem, self.unread = "", list[relax.Expr | None]()

    def element(self, expr: relax.Expr, indices: Sequence[PrimExpr]) -> PrimExpr:
        """``expr[indices]``; anything, and a `problem`, where that cannot be written down."""
        if isinstance(expr, relax.Var):
            made = self.made_by(expr)
            return self._input(expr, indices) if made is None else self.element(made, indices)
        if isinstance(expr, ir.GenericConst):
            return self._constant(expr)
        lowered = lower(expr) if isinstance(expr, relax.Call) else None
        if lowered is None:
            return self._give_up(f"{describe(expr)} is not lowered to one loop nest", expr)
        params = list(lowered.func.params)
        operands = dict(zip(params, lowered.operands, strict=False))
        blocks = {info.writes[0].buffer: info for info in block_infos(lowered.func) if info.writes}
        if not all(map(_is_plain, blocks.values())):
            return self._give_up(f"{describe(expr)} is no plain element-wise store", expr)

        def read(buffer: ir.Var, at: Sequence[PrimExpr]) -> PrimExpr:
            if buffer in operands:
                return self.element(operands[buffer], at)
            return self._stored(blocks.get(buffer), at, read)

        return read(params[len(lowered.operands)], indices)

    def _give_up(self, why: str, part: relax.Expr | None = None) -> PrimExpr:
        self.problem = self.problem or why
        self.unread.append(part)
        # A number might be divided by, or folded.
        return tirx.Var("unknown", "int64" if part is None else part.ty.dtype)

    def _constant(self, expr: ir.GenericConst) -> PrimExpr:
        values = expr.value.numpy()
        if values.size == 0 or not np.all(values == values.flat[0]):
            return self._give_up("it reads a table of constants", expr)
        return tirx.const(values.flat[0].item(), expr.ty.dtype)

    def _input(self, var: relax.Var, indices: Sequence[PrimExpr]) -> PrimExpr:
        if len(indices) != var.ty.ndim:
            return self._give_up(f"{var.name} is read with {len(indices)} indices")
        stand_in = tirx.Var(var.name, var.ty.dtype)
        self.loads.append((stand_in, var, tuple(map(self.analyzer.simplify, indices))))
        return stand_in

    def _stored(self, info: BlockInfo | None, at: Sequence[PrimExpr], read: Any) -> PrimExpr:
        """The value that a block stores at ``at``, its loads expanded by ``read``."""
        if info is None:
            return self._give_up("a block stores nothing that is known")
        (store,) = info.updates
        zero = tirx.IntImm("int64", 0)
        values = {v.var: zero for v in info.block.iter_vars if is_one(v.dom.extent)}
        for index, given in zip(store.target.indices, at, strict=True):
            bare = strip_widening(index)
            if isinstance(bare, ir.Var):
                values[bare] = given
        if store.conditions or any(v not in values for v in info.iter_vars):
            return self._give_up(f"block {info.name} stores under a condition or by an index")

        def expand(load: ir.TensorLoad) -> PrimExpr:
            return read(load.source, [replace(i) for i in load.indices])

        def replace(expr: PrimExpr) -> PrimExpr:
            return tvm_ffi.structural_map(expr, [(ir.TensorLoad, expand)])

        return replace(replace_vars(store.value, values))


def _is_plain(info: BlockInfo) -> bool:
    """Whether a block computes each element once, and adds nothing up."""
    return not info.opaque and len(info.updates) == 1 and not info.init


class Element:
    """An element of the mask as a function of whether its key and its query are live: the ``value``
    that ``reader`` gave for these indices. ``unknown`` names another input that it depends on."""

    def __init__(
        self, value: PrimExpr, reader: Reader, batch: tirx.Var, query: tirx.Var, key: tirx.Var
    ) -> None:
        self.value, self.key, self.query = value, key, query
        self.unknown = ""
        self.keys: list[tirx.Var] = []
        self.queries: list[tirx.Var] = []
        prove = sym.Analyzer().can_prove_equal
        for var, source, indices in reader.loads:
            own = source.same_as(reader.live) and prove(indices[0], batch)
            if own and prove(indices[1], key):
                self.keys.append(var)
            elif own and prove(indices[1], query):
                self.queries.append(var)
            else:
                self.unknown = f"{source.name}[{', '.join(str(i) for i in indices)}]"

    def excludes(self, key_live: bool, where: Any = None) -> bool:
        """Whether a live query gives the key no weight, whatever else holds."""
        found = self._at(key_live, where)
        return found is not None and found < excluding(self.value.ty.dtype)

    def window(self) -> Window | None:
        """The keys that are seen if they live, whose scores are left as they are, if these are told
        by their distance from the query alone."""
        near = {c + step for c in _integers(self.value) for step in (-1, 0, 1)}
        far = sorted(most for most in near if 0 <= most < _MOST_FAR)
        ways = (self.query, self.key), (self.key, self.query)
        before, after = (
            next((most for most in far if self.excludes(True, later - earlier > most)), None)
            for later, earlier in ways
        )
        limits = [
            later - earlier <= most
            for (later, earlier), most in zip(ways, (before, after), strict=True)
            if most is not None
        ]
        seen = self._at(True, tirx.all(*limits) if limits else None) == 0.0
        return Window(before, after) if seen else None

    def admits_itself(self) -> bool:
        """Whether nothing excludes a live token's own key: what is added to its score is 0, or made
        of what was not read, and numbers that are not large."""
        found = self._found(True, None, {self.key: self.query})
        number = _number(found)
        return number == 0.0 if number is not None else found is not None and _is_mild(found)

    def value_if(self, key_live: bool) -> float | None:
        """The element, if that is all it depends on."""
        return self._at(key_live, None)

    def _at(self, key_live: bool, where: Any) -> float | None:
        return _number(self._found(key_live, where, {}))

    def _found(self, key_live: bool, where: Any, places: Mapping[Any, Any]) -> PrimExpr | None:
        """The element, simplified; None for numbers that have no result, as unsigned ones below
        0."""
        analyzer = counting((self.query, self.key))
        values = {v: tirx.const(int(key_live), v.ty.dtype) for v in self.keys}
        values |= {v: tirx.const(1, v.ty.dtype) for v in self.queries}
        try:
            value = _logical(replace_vars(self.value, {**values, **places}))
            if where is None:
                return analyzer.simplify(value)
            with analyzer.constraint_scope(where):
                return analyzer.simplify(value)
        except tvm.error.InternalError:
            return None


def _integers(expr: PrimExpr) -> set[int]:
    """The numbers an expression has, 0 among them, that may be distances; 0 alone of many."""
    found = {0}

    def note(number: prim.IntImm) -> None:
        found.add(abs(int(number.value)))

    tvm_ffi.structural_walk(expr, (prim.IntImm, note))
    return found if len(found) <= _MOST_NUMBERS else {0}


def _is_mild(expr: PrimExpr) -> bool:
    if isinstance(expr, prim.Cast):
        return _is_mild(expr.value)
    if isinstance(expr, prim.Div):
        return _is_mild(expr.a) and abs(_number(expr.b) or 0.0) * MILD >= 1
    if isinstance(expr, prim.Add | prim.Sub | prim.Mul):
        return _is_mild(expr.a) and _is_mild(expr.b)
    number = _number(expr)
    return isinstance(expr, tirx.Var) or (number is not None and abs(number) <= MILD)


def _number(expr: PrimExpr | None) -> float | None:
    return float(expr.value) if isinstance(expr, prim.FloatImm | prim.IntImm) else None


def _logical(expr: PrimExpr) -> PrimExpr:
    """``expr`` with conditions written as conditions: the importer computes with them as numbers,
    which TVM's simplifier does not look through."""
    rules = [
        (prim.Cast, _from_number),
        (prim.LT, _from_comparison),
        (prim.BitwiseAnd, _from_bits),
        (prim.BitwiseOr, _from_bits),
        (prim.BitwiseNot, _from_inverse),
        (ir.Call, _from_question),
    ]
    return tvm_ffi.structural_map(expr, rules)


def _is_bool(expr: PrimExpr) -> bool:
    return str(expr.ty.dtype) == "bool"


def _from_number(cast: prim.Cast) -> PrimExpr:
    if not _is_bool(cast) or _is_bool(cast.value):
        return cast
    return sym.Analyzer().simplify(cast.value != tirx.const(0, cast.value.ty.dtype))


def _from_comparison(less: prim.LT) -> PrimExpr:
    from_bool = isinstance(less.b, prim.Cast) and _is_bool(less.b.value)
    return less.b.value if is_zero(less.a) and from_bool else less


def _from_bits(expr: Any) -> PrimExpr:
    join = tirx.all if isinstance(expr, prim.BitwiseAnd) else tirx.any
    return join(expr.a, expr.b) if _is_bool(expr) else expr


def _from_inverse(inverse: prim.BitwiseNot) -> PrimExpr:
    return tirx.Not(inverse.a) if _is_bool(inverse) else inverse


def _from_question(call: ir.Call) -> PrimExpr:
    asks = call.op.same_as(ir.Op.get("tirx.isnan")) and _is_number(call.args[0])
    return tirx.const(False, "bool") if asks else call


def _is_number(expr: PrimExpr) -> bool:
    """Whether an expression is made of integers and constants, and so is no NaN."""
    if isinstance(expr, prim.Add | prim.Sub | prim.Mul):
        return _is_number(expr.a) and _is_number(expr.b)
    if isinstance(expr, prim.Cast):
        return "float" not in str(expr.value.ty.dtype) or _is_number(expr.value)
    if isinstance(expr, prim.Div):
        return _is_number(expr.a) and _number(expr.b) not in (None, 0.0)
    return isinstance(expr, prim.FloatImm)
