"""One Relax call as the PrimFunc that computes it."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, relax, tirx
from tvm.ir import prim

from .legalize import legalize
from .rebuild import Extent, bindings_of, is_number, is_op, shape_of
from .wide import WIDE, is_narrow, is_widened


@dataclass(frozen=True)
class Lowered:
    """``func`` computes a call; ``operands`` are the tensors that its parameters stand for, in
    order; the parameter after them is the result, and symbolic extents may follow. Parameters are
    float32 where the call is one that `wide.widen` changes."""

    func: tirx.PrimFunc
    operands: tuple[relax.Expr, ...]


class _StandIns:
    """Parameters in place of the tensors that a call reads, which `tensors` has by parameter; those
    of 16-bit ones are float32 if they are ``widened``."""

    def __init__(self, widened: bool) -> None:
        self.tensors: dict[relax.Var, relax.Expr] = {}
        self._widened = widened
        self._wholes: dict[str, tirx.Var] = {}

    def of(self, arg: relax.Expr) -> relax.Expr:
        """An argument over parameters."""
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([self.of(f) for f in arg.fields])
        if isinstance(arg, relax.ShapeExpr):
            return relax.ShapeExpr([self._whole(e) for e in arg.values])
        if not isinstance(arg.ty, relax.TensorType):
            return arg
        to_widen = self._widened and is_narrow(arg)
        if is_number(arg):  # loops hold it as one
            return relax.const(float(arg.value.numpy()), WIDE) if to_widen else arg
        dtype = WIDE if to_widen else arg.ty.dtype
        extents = shape_of(arg)
        ty = (
            relax.TensorType(dtype=dtype, ndim=arg.ty.ndim)
            if extents is None
            else relax.TensorType([self._whole(e) for e in extents], dtype)
        )
        param = relax.Var(f"operand{len(self.tensors)}", ty)
        self.tensors[param] = arg
        return param

    def _whole(self, extent: Extent) -> Extent:
        """A symbol of its own for a product of symbols: a shape could not define those."""
        if isinstance(extent, tirx.Var | prim.IntImm):
            return extent
        fresh = tirx.Var(f"extent{len(self._wholes)}", "int64")
        return self._wholes.setdefault(str(extent), fresh)


def lower(call: relax.Call) -> Lowered | None:
    """The PrimFunc of a call, by TVM's own lowering; None unless it is exactly one."""
    made = _StandIns(is_widened(call))
    alone = relax.Call(call.op, [made.of(a) for a in call.args], call.attrs, call.ty_args)
    tensors = made.tensors
    builder = relax.BlockBuilder()
    with builder.function("main", list(tensors)):
        with builder.dataflow():
            result = builder.emit_output(alone)
        builder.emit_func_output(result)
    module = legalize()(builder.finalize())
    module = relax.transform.CanonicalizeBindings()(module)
    main = module["main"]
    values = [b.value for b in bindings_of(main) if not isinstance(b.value, relax.Var)]
    if len(values) != 1 or not is_op(values[0], "call_tir"):
        return None
    callee, operands = values[0].args[:2]
    given = dict(zip(main.params, tensors.values(), strict=True))
    found = [given.get(o, o) for o in operands.fields]
    if not all(isinstance(o, ir.GenericConst) or o in tensors.values() for o in found):
        return None
    return Lowered(module[callee], tuple(found))
