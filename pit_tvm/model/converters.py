"""Operators that TVM's importer of torch programs lacks, or gives another meaning than torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import ir, relax, sym, tirx
from tvm.ir import prim
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

from ..errors import UnsupportedModel, mismatch
from ..runtime.cuda_arrays import dtype_name
from .products import Convert
from .rebuild import extents_of

# Where ids may be negative, and count from the end: TVM's default reads whatever lies there.
_FROM_EITHER_END = "wrap"


def converters() -> dict[str, Convert]:
    """By the name of torch's operator, in the form that `from_exported_program` takes."""
    return {
        "clamp.default": _clamp,
        "clamp.Tensor": _clamp,
        "clamp_min.default": _clamp,
        "clamp_max.default": _clamp_max,
        "amax.default": _extremum(relax.op.max),
        "amin.default": _extremum(relax.op.min),
        "max.dim": _extremum_and_place(relax.op.max, relax.op.argmax),
        "min.dim": _extremum_and_place(relax.op.min, relax.op.argmin),
        "median.default": _median,
        "median.dim": _median,
        "prod.default": _product,
        "prod.dim_int": _product,
        "any.default": _any,
        "any.dim": _any,
        "any.dims": _any,
        "pow": _whole_power,
        "arange.default": _arange,
        "arange.start_step": _arange,
        "elu.default": _elu,
        "selu.default": _elu,
        "select.int": _select,
        "index.Tensor": _index,
        "slice.Tensor": _slice,
        "repeat.default": _repeat,
        "sym_numel.default": _number_of_elements,
        "reshape.default": _reshape,
        "view.default": _reshape,
        "empty.memory_format": _empty,
        "empty_permuted.default": _empty,
        "full.default": _full,
        "full_like.default": _full,
    } | dict.fromkeys(("squeeze.default", "squeeze.dim", "squeeze.dims"), _squeeze)


def _clamp(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    x, low, high = _arguments(node, importer, "min", "max")
    return _bounded(node, importer, x, low, high)


def _clamp_max(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    x, high = _arguments(node, importer, "max")
    return _bounded(node, importer, x, None, high)


def _bounded(
    node: fx.Node, importer: BaseFXGraphImporter, x: Any, low: Any, high: Any
) -> relax.Expr:
    """``x`` between two bounds. TVM's clip has infinite ones where one is not given, which integers
    cannot have."""
    emit, dtype = importer.block_builder.emit, dtype_name(node.meta["val"])
    if str(x.ty.dtype) != dtype:
        x = emit(relax.op.astype(x, dtype))
    for bound, closer in ((low, relax.op.maximum), (high, relax.op.minimum)):
        if isinstance(bound, relax.Expr):
            same = str(bound.ty.dtype) == dtype
            x = emit(closer(x, bound if same else emit(relax.op.astype(bound, dtype))))
        elif bound is not None:
            x = emit(closer(x, relax.const(bound, dtype)))
    return x


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _elu(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """``scale * (x if x > 0 else alpha * (exp(x * input_scale) - 1))``."""
    x, *factors = _arguments(node, importer, "alpha", "scale", "input_scale")
    if str(node.target).startswith("aten.selu"):
        factors = [_SELU_ALPHA, _SELU_SCALE, None]
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)

    def scaled(y: relax.Expr, factor: Any) -> relax.Expr:
        if factor is None or factor == 1:
            return y
        return emit(relax.op.multiply(relax.const(factor, dtype), y))

    alpha, scale, input_scale = factors
    grown = emit(relax.op.exp(scaled(x, input_scale)))
    left = emit(relax.op.nn.relu(emit(relax.op.subtract(relax.const(1, dtype), grown))))
    below = scaled(left, -1.0 if alpha is None else -alpha)
    return scaled(emit(relax.op.add(below, emit(relax.op.nn.relu(x)))), scale)


def _extremum(reduce: Callable[..., relax.Expr]) -> Convert:
    def convert(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
        x, axes, keep = _arguments(node, importer, "dim", "keepdim")
        axes = [axes] if isinstance(axes, int) else list(axes or range(x.ty.ndim))
        return importer.block_builder.emit(reduce(x, axes, bool(keep)))

    return convert


def _extremum_and_place(
    reduce: Callable[..., relax.Expr], search: Callable[..., relax.Expr]
) -> Convert:
    """The largest or smallest along an axis and where it is first; TVM's sorts for it, and tells of
    equal ones any."""

    def convert(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
        emit, (x, axis, keep) = importer.block_builder.emit, _arguments(node, importer, *_ALONG)
        found = emit(reduce(x, axis, bool(keep)))
        place = emit(relax.op.astype(emit(search(x, axis, bool(keep))), "int64"))
        return emit(relax.Tuple([found, place]))

    return convert


_ALONG = ("dim", "keepdim")


def _median(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """The lower one of those in the middle, or NaN if there is any, and its place along an axis;
    TVM's own sorts bfloat16 as integers, and NaN anywhere."""
    emit, (x, axis, keep) = importer.block_builder.emit, _arguments(node, importer, *_ALONG)
    of_all = axis is None
    if of_all:
        x, axis = emit(relax.op.flatten(x)), 0
    extent = extents_of(x)[axis]
    order = emit(relax.op.argsort(x, axis, dtype="int64"))
    no_number = emit(relax.op.astype(emit(relax.op.not_equal(x, x)), "int64"))
    nans = emit(relax.op.sum(no_number, axis, keepdims=True))
    middle = emit(relax.op.add(relax.op.zeros_like(nans), _number((extent - 1) // 2)))
    first = emit(relax.op.subtract(_number(extent), nans))
    at = emit(relax.op.where(emit(relax.op.greater(nans, _number(0))), first, middle))
    place = emit(relax.op.gather_elements(order, at, axis))
    found = [emit(relax.op.gather_elements(x, place, axis)), place]
    if not keep:
        found = [emit(relax.op.squeeze(one, [axis])) for one in found]
    return found[0] if of_all else emit(relax.Tuple(found))


def _number(extent: Any) -> Any:
    """An extent, or a number, as operators on integers take it."""
    fixed = isinstance(extent, int | prim.IntImm)
    return relax.const(int(extent), "int64") if fixed else extent


def _product(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """All numbers, or those along an axis, multiplied in the type of the result."""
    emit, (x, axis, keep) = importer.block_builder.emit, _arguments(node, importer, *_ALONG)
    wide = emit(relax.op.astype(x, dtype_name(node.meta["val"])))
    return emit(relax.op.prod(wide, axis, bool(keep)))


def _any(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """Whether anything is not 0, of all or along axes."""
    emit, (x, axes, keep) = importer.block_builder.emit, _arguments(node, importer, *_ALONG)
    dtype = str(x.ty.dtype)
    if dtype != "bool":
        x = emit(relax.op.not_equal(x, relax.const(0, dtype)))
    found = emit(relax.op.max(emit(relax.op.astype(x, "int8")), axes, bool(keep)))
    return emit(relax.op.astype(found, "bool"))


def _whole_power(node: fx.Node, importer: BaseFXGraphImporter) -> Any:
    """An extent by itself, so many times."""
    extent, times = importer.retrieve_args(node)
    return math.prod([extent] * times, start=prim.IntImm("int64", 1))


def _select(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """``x[..., index, ...]``, without the dimension."""
    x, axis, index = _arguments(node, importer, "dim", "index")
    mode = _FROM_EITHER_END if index < 0 else "fast"
    return importer.block_builder.emit(relax.op.take(x, relax.const(index, "int64"), axis, mode))


def _index(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """``x[ids, ...]``: ids by dimension, None for a whole one."""
    x, given = _arguments(node, importer, "indices")
    ids = {axis: one for axis, one in enumerate(given) if one is not None}
    if any(str(one.ty.dtype) == "bool" for one in ids.values()):
        expected = "indices of a shape that does not depend on values"
        advice = "multiply with the mask instead of selecting by it"
        raise UnsupportedModel(mismatch("index.Tensor", expected, "a boolean mask", advice))
    emit = importer.block_builder.emit
    if len(ids) == 1:
        ((axis, one),) = ids.items()
        return emit(relax.op.take(x, one, axis, _FROM_EITHER_END))
    if list(ids) != list(range(len(given))):
        return importer._index_tensor(node)
    extents = extents_of(x)
    counted = [from_start(emit, one, extents[axis]) for axis, one in ids.items()]
    return emit(relax.op.index_tensor(x, counted))


def _extent(size: Any, node: fx.Node, importer: BaseFXGraphImporter) -> tuple[Any, Any]:
    """The extent of an input, or so many more or fewer, that torch's ``size`` is, and the variable
    in it; None for others."""
    free = [] if isinstance(size, int) else list(size.node.expr.free_symbols)
    if len(free) != 1:
        return None, None
    inputs = [importer.env[n] for n in node.graph.nodes if n.op == "placeholder"]
    shapes = [each.ty.shape for each in inputs if isinstance(each, relax.Expr)]
    symbols = {str(e): e for shape in shapes if shape is not None for e in shape.values}
    more, found = size.node.expr - free[0], symbols.get(str(free[0]))
    if not isinstance(found, tirx.Var) or not more.is_Integer:
        return None, None
    return found + int(more) if more else found, found


def _reshape(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """TVM's, without its look for one that changes nothing, which compares extents as values."""
    x, extents = importer.retrieve_args(node)
    return importer._emit_torch_reshape(x, extents)


def _number_of_elements(node: fx.Node, importer: BaseFXGraphImporter) -> Any:
    """An extent, as those that TVM's conversion of ``sym_size`` gives."""
    return math.prod(extents_of(importer.retrieve_args(node)[0]))


def _repeat(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """``x`` so often along every axis, of which it may have fewer; TVM's takes numbers only."""
    x, repeats = _arguments(node, importer, "repeats")
    extents = extents_of(x)
    extents = (*[1] * (len(repeats) - len(extents)), *extents)
    emit = importer.block_builder.emit
    split = emit(relax.op.reshape(x, [part for extent in extents for part in (1, extent)]))
    pairs = [part for pair in zip(repeats, extents, strict=True) for part in pair]
    whole = [number * extent for number, extent in zip(repeats, extents, strict=True)]
    return emit(relax.op.reshape(emit(relax.op.broadcast_to(split, pairs)), whole))


def _full(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """One number everywhere; TVM does not lower its operator where that is infinite."""
    given, value = importer.retrieve_args(node)[:2]
    if not isinstance(value, float) or math.isfinite(value):
        like = str(node.target).startswith("aten.full_like")
        return importer._full_like(node) if like else importer._full(node)
    dtype = dtype_name(node.meta["val"])
    shape = given.ty.shape if isinstance(given, relax.Expr) else relax.ShapeExpr(list(given))
    return importer.block_builder.emit(relax.op.broadcast_to(relax.const(value, dtype), shape))


def _empty(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """Zeros: what nobody has written yet may be anything."""
    shape = relax.ShapeExpr(list(importer.retrieve_args(node)[0]))
    return importer.block_builder.emit(relax.op.zeros(shape, dtype_name(node.meta["val"])))


def _arange(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """Numbers in equal steps; TVM counts none that go down, and real ones to no whole extent."""
    given = importer.retrieve_args(node)
    given = [0, *given] if len(given) == 1 else given
    whole = start, end, step = tuple(_whole(number) for number in (*given, 1)[:3])
    real = any(isinstance(number, float) for number in whole)
    down = isinstance(step, int | float) and step < 0
    if not down and (real or all(a is b for a, b in zip(whole, given, strict=False))):
        return importer._arange(node)
    dtype, emit = dtype_name(node.meta["val"]), importer.block_builder.emit
    limits = (-start, -end, -step) if down else whole
    found = emit(relax.op.arange(*limits, dtype if real else "int64"))
    return emit(relax.op.astype(emit(relax.op.negative(found)) if down else found, dtype))


def _whole(number: Any) -> Any:
    """A real number that is whole as an integer; others as they are."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _squeeze(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """``x`` without those dimensions, or all, whose extent is always 1."""
    x, given = _arguments(node, importer, "dim")
    source: Any = node.args[0]
    extents = source.meta["val"].shape
    axes: Any = range(len(extents)) if given is None else given
    axes = [axes] if isinstance(axes, int) else axes
    always = sorted(a % len(extents) for a in axes if extents and _is_one(extents[a]))
    return importer.block_builder.emit(relax.op.squeeze(x, always)) if always else x


def _is_one(extent: Any) -> bool:
    return isinstance(extent, int) and extent == 1


def _slice(node: fx.Node, importer: BaseFXGraphImporter) -> relax.Expr:
    """A slice, of which TVM lowers none whose axis is counted from the end, and knows no extent
    of those that end inside for lengths up to a limit only."""
    x, axis, start, end, step = _arguments(node, importer, "dim", "start", "end", "step")
    axis = (axis or 0) % x.ty.ndim
    known = node.meta["val"].shape[axis]
    size, symbol = _extent(known, node, importer)
    one_by_one = step is None or isinstance(step, int) and step == 1
    if size is not None and one_by_one and x.ty.shape is not None:
        extent = extents_of(x)[axis]
        if size.same_as(extent):
            return x
        begin = _begin(extent, size, start, end)
        if begin is not None and _holds(extent, begin, size, symbol, known):
            cut = relax.op.strided_slice(x, [axis], [begin], [begin + size], assume_inbound=True)
            return importer.block_builder.emit(cut)
    if len(node.args) > 1:
        node.update_arg(1, axis)
    return importer._slice(node)


def _begin(extent: Any, size: Any, start: Any, end: Any) -> Any:
    """Where a slice with ``size`` places of ``extent`` begins; None where that is not plain."""
    if start is None or isinstance(start, int) and start >= 0:
        return start or 0
    to_the_end = end is None or isinstance(end, int) and end == sys.maxsize
    return extent - size if to_the_end else None


def _holds(extent: Any, begin: Any, size: Any, symbol: tirx.Var, known: torch.SymInt) -> bool:
    """Whether an extent has ``size`` places from ``begin`` on, however many ``symbol`` stands for:
    in the limits that torch found, to which calls keep, but that it traces no fewer than 2."""
    analyzer, (torchs,) = sym.Analyzer(), known.node.expr.free_symbols
    bounds = known.node.shape_env.bound_sympy(torchs)
    least = int(bounds.lower) if bounds.lower > 2 else 0
    most = int(min(bounds.upper, 2**31))
    analyzer.bind(symbol, ir.Range.from_min_extent(least, most - least + 1))
    return bool(analyzer.can_prove(tirx.all(begin >= 0, size >= 0, begin + size <= extent)))


def from_start(emit: Callable[..., Any], ids: relax.Expr, extent: Any) -> relax.Expr:
    """Ids that count from the start, of ids that may be negative and count from the end."""
    if isinstance(ids, ir.GenericConst) and (ids.value.numpy() >= 0).all():
        return ids
    ids = emit(relax.op.astype(ids, "int64"))
    negative = emit(relax.op.less(ids, relax.const(0, "int64")))
    return emit(relax.op.where(negative, emit(relax.op.add(ids, _number(extent))), ids))


def _arguments(node: fx.Node, importer: BaseFXGraphImporter, *names: str) -> list[Any]:
    """The first argument and those that follow it, by position or by name; None if not given."""
    args = importer.retrieve_args(node)
    named = {name: importer.env.get(v, v) for name, v in node.kwargs.items()}
    rest = list(args[1:]) + [named.get(name) for name in names[len(args) - 1 :]]
    return [args[0], *rest[: len(names)]]
