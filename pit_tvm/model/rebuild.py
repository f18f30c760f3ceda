"""Rebuilding a Relax function binding by binding, with every type inferred anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import tvm
from tvm import ir, relax, sym
from tvm.ir import prim
from tvm.relax.expr import _update_type  # what every builder of TVM sets types by
from tvm.tirx.analysis import undefined_vars

from ..analysis.expr import is_one
from ..errors import ShapeError, mismatch

Extent = Any  # a symbolic integer; tvm gives its scalar expressions no common Python type

# ``rule(builder, call, var)`` sees each call over the new function's variables, and the variable
# that was bound to it; what it returns takes the call's place.
Rule = Callable[[relax.BlockBuilder, relax.Call, relax.Var], relax.Expr]


def bindings_of(func: relax.Function) -> Iterator[relax.Binding]:
    """The bindings of a function without control flow, in order."""
    for block in func.body.blocks:
        yield from block.bindings


def values_of(func: relax.Function) -> dict[relax.Var, relax.Expr]:
    """What is bound to every variable, in order."""
    return {binding.var: binding.value for binding in bindings_of(func)}


def readers_of(func: relax.Function) -> dict[relax.Var, list[relax.Var | None]]:
    """For every variable that is read, the variables bound to what reads it; None for the result
    of the function."""
    readers: dict[relax.Var, list[relax.Var | None]] = {}
    for reader, value in [*values_of(func).items(), (None, func.body.body)]:
        for used in relax.analysis.free_vars(value):
            readers.setdefault(used, []).append(reader)
    return readers


def is_op(expr: object, *names: str) -> bool:
    """Whether ``expr`` calls one of these Relax operators, named without ``relax.``."""
    op = expr.op if isinstance(expr, relax.Call) else None
    return isinstance(op, ir.Op) and op.name.removeprefix("relax.") in names


def is_number(expr: object) -> bool:
    """Whether an expression is a constant without dimensions."""
    return isinstance(expr, ir.GenericConst) and bool(expr.ty.ndim == 0)


def is_at_most_one(extent: Extent) -> bool:
    """Whether an extent is 1, or no more for any sizes."""
    return is_one(extent) or counting(undefined_vars(extent)).can_prove(extent <= 1)


def counting(places: Iterable[ir.Var]) -> sym.Analyzer:
    """An analyzer that knows these to be 0 or more."""
    analyzer = sym.Analyzer()
    for var in places:
        analyzer.bind(var, ir.Range.from_min_extent(0, 2**31))
    return analyzer


def describe(expr: relax.Expr) -> str:
    """Name of what an expression computes, for people."""
    if isinstance(expr, relax.Call):
        name = expr.op.name if isinstance(expr.op, ir.Op) else expr.op.name_hint
        return str(name).removeprefix("relax.")
    return type(expr).__name__


def shape_of(expr: relax.Expr) -> tuple[Extent, ...] | None:
    """Extents of a tensor; None for anything else, and where the shape is unknown."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return tuple(ty.shape.values)


def extents_of(expr: relax.Expr) -> tuple[Extent, ...]:
    """Extents of a tensor whose shape is known; ShapeError if it is not."""
    found = shape_of(expr)
    if found is None:
        raise ShapeError(mismatch("model", "tensors of known shapes", str(expr.ty)))
    return found


def permutation_of(call: relax.Call) -> list[int]:
    """The axes of a ``permute_dims``, counted from 0; those that are not given are reversed."""
    rank, axes = call.ty.ndim, call.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(a) % rank for a in axes]


def same_extents(left: Sequence[Extent], right: Sequence[Extent]) -> bool:
    """Whether two lists of extents are equal for all values of their variables."""
    analyzer = sym.Analyzer()
    return len(left) == len(right) and all(
        analyzer.can_prove_equal(a, b) for a, b in zip(left, right, strict=True)
    )


def same_shape(left: relax.Expr, right: relax.Expr) -> bool:
    """Whether two tensors have known, equal shapes."""
    ours, theirs = shape_of(left), shape_of(right)
    return ours is not None and theirs is not None and same_extents(ours, theirs)


def flat_rows(builder: relax.BlockBuilder, expr: relax.Expr) -> relax.Var:
    """A tensor ``[..., width]`` as ``[rows, width]``."""
    *outer, width = extents_of(expr)
    rows = prod(outer, start=prim.IntImm("int64", 1))
    return builder.emit(relax.op.reshape(expr, [sym.Analyzer().simplify(rows), width]))


def substitute(
    expr: relax.Expr,
    env: Mapping[relax.Expr, relax.Expr],
    extent: Callable[[Extent], Extent] = lambda value: value,
) -> relax.Expr:
    """``expr`` over other variables and constants, its extents changed by ``extent``; calls have no
    type yet."""

    def visit(node: Any) -> Any:
        if isinstance(node, relax.ShapeExpr):
            return relax.ShapeExpr([extent(v) for v in node.values])
        if isinstance(node.ty, ir.PrimType):
            return extent(node)
        if isinstance(node, relax.Var | ir.GenericConst):
            return env.get(node, node)
        if isinstance(node, relax.Call):
            return relax.Call(node.op, [visit(a) for a in node.args], node.attrs, node.ty_args)
        if isinstance(node, relax.Tuple):
            return relax.Tuple([visit(f) for f in node.fields])
        if isinstance(node, relax.TupleGetItem):
            return relax.TupleGetItem(visit(node.tuple_value), node.index)
        return node

    return visit(expr)


def rebuild(
    module: tvm.IRModule,
    rule: Rule,
    extent: Callable[[Extent], Extent] = lambda value: value,
    env: dict[relax.Expr, relax.Expr] | None = None,
    inputs: Sequence[relax.Var] = (),
) -> tvm.IRModule:
    """``main`` of ``module`` with ``rule`` applied to every call and ``extent`` to every extent in
    an argument, unused bindings removed.

    ``env``: what takes the place of constants; filled with what takes that of each variable.
    ``inputs``: parameters behind the function's own.
    """
    main = module["main"]
    builder = relax.BlockBuilder()
    env = {} if env is None else env
    with builder.function("main", [*main.params, *inputs], attrs=attributes_of(main)):
        with builder.dataflow():
            for binding in bindings_of(main):
                value = substitute(binding.value, env, extent)
                if isinstance(binding, relax.MatchCast):
                    env[binding.var] = builder.match_cast(value, binding.ty)
                    continue
                if isinstance(value, relax.Call):
                    value = rule(builder, builder.normalize(value), binding.var)
                bound = isinstance(value, relax.Var)
                env[binding.var] = value if bound else builder.emit(value, binding.var.name)
            result = builder.emit_output(substitute(main.body.body, env))
        builder.emit_func_output(result)
    return finish(builder, module)


def without_weights(module: tvm.IRModule, *passes: tvm.ir.transform.Pass) -> tvm.IRModule:
    """``module`` after passes of TVM, which see its matrices as inputs: some compare expressions by
    all bytes of their constants, and that takes minutes for a large model."""
    weights = _matrices(module["main"])
    stand_ins = list(weights.values())
    made = rebuild(module, lambda _, call, __: call, env=dict(weights), inputs=stand_ins)
    for step in passes:
        made = step(made)
    stand_ins = made["main"].params[len(module["main"].params) :]
    made["main"] = made["main"].bind_params(dict(zip(stand_ins, weights, strict=True)))
    return made


def _matrices(main: relax.Function) -> dict[relax.Expr, relax.Expr]:
    """A variable for every constant of several dimensions."""
    found: dict[relax.Expr, relax.Expr] = {}

    def visit(node: Any) -> None:
        if isinstance(node, ir.GenericConst) and node.ty.ndim > 1 and node not in found:
            found[node] = relax.Var(f"weight_{len(found)}", node.ty)

    relax.analysis.post_order_visit(main.body, visit)
    return found


def attributes_of(main: relax.Function) -> dict[str, Any]:
    """Attributes of a function but its symbol, which the builder sets."""
    return {name: value for name, value in (main.attrs or {}).items() if name != "global_symbol"}


def finish(builder: relax.BlockBuilder, module: tvm.IRModule) -> tvm.IRModule:
    """What ``builder`` made, with the functions of ``module`` that it calls, and nothing unused."""
    made = builder.finalize()
    defined = {var.name_hint for var in made.get_global_vars()}
    for var, func in module.functions_items():
        if var.name_hint not in defined:
            made[var] = func
    return relax.transform.DeadCodeElimination()(made)


def typed(call: relax.Call) -> relax.Call:
    """A call that no function holds yet, with its type; arguments may be such calls."""
    known = [relax.Var("known", a.ty) if isinstance(a, relax.Call) else a for a in call.args]
    alike = relax.Call(call.op, known, call.attrs, call.ty_args)
    _update_type(call, relax.BlockBuilder().normalize(alike).ty)
    return call
