"""From an ONNX graph to Relax, with the batch and the length of its inputs as extents."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import ir, relax, tirx, topi
from tvm.ir import prim
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, get_numpy

from ..errors import PitError, UnsupportedModel, mismatch
from ..quick_stacks import quick_stacks
from .converters import from_start
from .draws import drawing
from .faults import CODE_FAULTS
from .onnx_model import check_graph
from .onnx_sizes import (
    Sizes,
    as_sizes,
    bounds_of_slice,
    extents_as_sizes,
    fold,
    is_natural,
    resolve_expand,
    resolve_shape,
)
from .rebuild import extents_of, same_extents, shape_of

# What converters of operators take of sizes that are known, and give: None for what TVM is to do.
Known = list[Sizes | None]
Attrs = Mapping[str, Any]
Made: TypeAlias = relax.Expr | None

# These folded all axes behind the named one as well, before opset 13.
_ALONG_LAST, _ONE_AXIS = ("Hardmax", "LogSoftmax", "Softmax"), 13
_LEAVE_OUT = "export it otherwise, or leave that part out of the model"


def translate_onnx(model: Any) -> tuple[tvm.IRModule, dict[str, int], tuple[str, ...]]:
    """``main`` of an ``onnx.ModelProto``, weights as constants and outputs as a tuple; the largest
    values of symbolic extents that constants are cut to; and the names of the outputs.

    Raises
    ------
    UnsupportedModel
        An operator is not known to TVM, or not in this form.
    """
    from onnx import checker, inliner

    if model.functions:
        model = inliner.inline_local_functions(model)
    versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    opset = versions[0] if versions else 1
    check_graph(model.graph, opset)
    importer = _Importer({}, {}, keep_params_in_input=False, sanitize=False)
    said = io.StringIO()
    try:
        # The importer prints what it fails at.
        with quick_stacks(), contextlib.redirect_stdout(said):
            module = importer.from_onnx(model.graph, opset)
    except PitError:
        raise
    except (*CODE_FAULTS, checker.ValidationError) as error:  # that is: weights of another file
        expected, got = "an ONNX graph that TVM's importer knows", " ".join(str(error).split())
        raise UnsupportedModel(mismatch("model", expected, got, _LEAVE_OUT)) from error
    names = tuple(output.name for output in model.graph.output)
    return (_with_tuple(module) if len(names) == 1 else module), importer.most, names


def _with_tuple(module: tvm.IRModule) -> tvm.IRModule:
    main = module["main"]
    body = relax.SeqExpr(main.body.blocks, relax.Tuple([main.body.body]))
    returned = relax.TupleType([main.body.body.ty])
    # Beside it there may be functions that operators became at once.
    module["main"] = relax.Function(main.params, body, returned, attrs=main.attrs)
    return relax.transform.Normalize()(module)


# --------------------------------------------------------------------------------------------


class _Builder(relax.BlockBuilder):
    """What TVM's importer has as loops stays an operator of Relax, whose rows can be analysed."""

    def emit_te(self, func: Callable[..., Any], *args: Any, **options: Any) -> relax.Expr:
        """As TVM's."""
        operator = _OPERATORS.get(func)
        if operator is None:
            return super().emit_te(func, *args, **options)
        return self.emit(operator(*args, **options))


def _pad(
    data: relax.Expr, before: Sequence[Any], after: Sequence[Any], value: float = 0.0
) -> relax.Expr:
    widths = [int(w) for pair in zip(before, after, strict=True) for w in pair]
    return relax.op.nn.pad(data, widths, "constant", float(value))


_OPERATORS: Mapping[Any, Callable[..., relax.Expr]] = {
    topi.maximum: relax.op.maximum,
    topi.minimum: relax.op.minimum,
    topi.flip: relax.op.flip,
    topi.tile: relax.op.tile,
    topi.einsum: lambda subscripts, *operands: relax.op.einsum(operands, subscripts),
    topi.nn.pad: _pad,
}


class _Importer(ONNXGraphImporter):
    """TVM's importer, with sizes that are followed as symbols; errors name the operator."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Largest values of symbolic extents, by name.
        self.most: dict[str, int] = {}
        self.bb = _Builder()
        # What is known of variables: their values as sizes; the parts that they join.
        self._sizes: dict[relax.Var, Sizes] = {}
        self._joined: dict[relax.Var, Sequence[relax.Expr]] = {}
        self._largest: dict[relax.Var, int] = {}  # of those without negative values
        # Tensors of four dimensions by those that fold the first two, also with the others swapped.
        self._folded: dict[relax.Var, relax.Expr] = {}
        self._swapped: dict[relax.Var, relax.Expr] = {}

    def _convert_operator(
        self, op_name: str, inputs: list[relax.Expr], attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        """As TVM's, but sizes are folded, and what takes known sizes gets them as extents."""
        try:
            found = self._converted(op_name, list(inputs), attrs)
            if found is None:
                if op_name in _ALONG_LAST and opset < _ONE_AXIS:
                    attrs, opset = attrs | {"axis": _last_axis(inputs[0], attrs)}, _ONE_AXIS
                found = super()._convert_operator(op_name, inputs, attrs, opset)
            return found
        except PitError:
            raise
        except CODE_FAULTS as error:
            name = attrs["tvm_custom"]["name"]
            said = " ".join(str(error).split()) or type(error).__name__
            expected = f"{op_name} (node {name!r}) in a form that TVM's importer knows"
            raise UnsupportedModel(mismatch("model", expected, said, _LEAVE_OUT)) from error

    def _converted(
        self, op: str, inputs: list[relax.Expr | None], attrs: dict[str, Any]
    ) -> relax.Expr | None:
        """What we convert ourselves; None for what TVM does."""
        while inputs and inputs[-1] is None:
            inputs.pop()
        if op == "Shape":
            return self._shape_as_sizes(inputs[0], attrs)
        known = [None if i is None else self._known(i) for i in inputs]
        if op == "ConstantOfShape":
            attrs = attrs | {"fill": _fill(attrs)}
        if inputs and all(sizes is not None for sizes in known):
            folded = fold(op, [s for s in known if s is not None], attrs)
            if folded is not None:
                return self._emit_sizes(folded, str(_dtype(op, inputs, attrs)))
        convert: Callable[..., Made] | None = getattr(self, f"_on_{op.lower()}", None)
        return None if convert is None else convert(inputs, known, attrs)

    # -- sizes

    def _known(self, expr: relax.Expr) -> Sizes | None:
        if isinstance(expr, ir.GenericConst):
            return as_sizes(expr.value.numpy())
        return self._sizes.get(expr) if isinstance(expr, relax.Var) else None

    def _shape_as_sizes(self, data: relax.Expr, attrs: Mapping[str, Any]) -> relax.Expr | None:
        extents = shape_of(data)
        if extents is None:
            return None
        part = extents_as_sizes(extents)[int(attrs.get("start", 0)) : attrs.get("end")]
        return self._emit_sizes(part, "int64")

    def _emit_sizes(self, sizes: Sizes, dtype: str) -> relax.Expr:
        """The values as a tensor, which is not computed if only sizes are made of it."""
        flat = list(sizes.reshape(-1))
        if all(isinstance(value, bool | int | np.integer) for value in flat):
            return relax.const(np.array(flat, dtype).reshape(sizes.shape), dtype)
        value = relax.op.shape_to_tensor(self.bb.normalize(relax.ShapeExpr(flat)))
        value = self.bb.emit(relax.op.reshape(self.bb.emit(value), list(sizes.shape)))
        if dtype != "int64":
            value = self.bb.emit(relax.op.astype(value, dtype))
        self._sizes[value] = sizes
        return value

    # -- operators that take sizes

    def _on_reshape(self, inputs: list[Any], known: Known, attrs: Attrs) -> Made:
        extents, wanted = shape_of(inputs[0]), known[1]
        if extents is None or wanted is None:
            return None
        shape = resolve_shape(wanted, extents, not attrs.get("allowzero", 0))
        whole = self._swapped.get(inputs[0])
        if whole is not None and same_extents(shape, [extents_of(whole)[i] for i in (0, 1, 3, 2)]):
            return self.bb.emit(relax.op.permute_dims(whole, [0, 1, 3, 2]))
        made = self.bb.emit(relax.op.reshape(inputs[0], shape))
        if len(extents) == 4 and len(shape) == 3 and same_extents(extents[2:], shape[1:]):
            self._folded[made] = inputs[0]
        return made

    def _on_transpose(self, inputs: list[Any], _: Known, attrs: Attrs) -> Made:
        """torch's exporter folds four dimensions to three to swap the last two; see reshape."""
        whole = self._folded.get(inputs[0])
        if whole is None or list(attrs.get("perm", ())) != [0, 2, 1]:
            return None
        swapped = self.bb.emit(relax.op.permute_dims(inputs[0], [0, 2, 1]))
        self._swapped[swapped] = whole
        return swapped

    def _on_expand(self, inputs: list[Any], known: Known, _: Attrs) -> Made:
        extents, wanted = shape_of(inputs[0]), known[1]
        if extents is None or wanted is None:
            return None
        return self.bb.emit(relax.op.broadcast_to(inputs[0], resolve_expand(wanted, extents)))

    def _on_constantofshape(self, inputs: list[Any], known: Known, attrs: Attrs) -> Made:
        if known[0] is None:
            return None
        fill = np.asarray(attrs["fill"])
        shape = list(known[0])
        return self.bb.emit(relax.op.full(shape, relax.const(fill.reshape(()), str(fill.dtype))))

    def _on_range(self, inputs: list[Any], known: Known, _: Attrs) -> Made:
        if any(sizes is None for sizes in known):
            return None
        start, end, step = (sizes.reshape(-1)[0] for sizes in known if sizes is not None)
        if not isinstance(step, int) or step < 1 or not is_natural(end - start):
            return None
        return self.bb.emit(relax.op.arange(start, end, step, str(inputs[0].ty.dtype)))

    def _on_dropout(self, inputs: list[Any], _: Known, attrs: Attrs) -> None:
        """As TVM's, which never draws."""
        _, share, training = (*inputs, None, None)[:3]
        if training is not None and not _is_zero(training) and not _is_zero(share):
            raise drawing(f"Dropout (node {attrs['tvm_custom']['name']!r}) in training")

    def _on_slice(self, inputs: list[Any], known: Known, _: Attrs) -> Made:
        data, extents = inputs[0], shape_of(inputs[0])
        if extents is None or any(sizes is None for sizes in known[1:]):
            return None
        given = [list(sizes.reshape(-1)) for sizes in known[1:] if sizes is not None]
        number, rank = len(given[0]), len(extents)
        axes = given[2] if len(given) > 2 else list(range(number))
        axes = [axis + rank if axis < 0 else axis for axis in axes]
        steps = given[3] if len(given) > 3 else [1] * number
        begins, ends = [], []
        for axis, start, end, step in zip(axes, *given[:2], steps, strict=True):
            bounds = bounds_of_slice(extents[axis], start, end, step)
            if bounds is None:
                return None
            self._bound(data, extents[axis], *bounds)
            begins.append(bounds[0])
            ends.append(bounds[1])
        parts = zip(axes, begins, ends, strict=True)
        sure = all(self._is_inside(extents[axis], begin, end) for axis, begin, end in parts)
        cut = relax.op.strided_slice(data, axes, begins, ends, assume_inbound=sure)
        part = self.bb.emit(cut)
        largest = self._most_of(data)
        if largest is not None:
            self._largest[part] = largest
        return part

    def _bound(self, data: relax.Expr, extent: Any, begin: Any, end: Any) -> None:
        """A table of constants that is cut to a symbolic extent says how large that may be."""
        table = isinstance(data, ir.GenericConst) and isinstance(extent, prim.IntImm)
        if table and isinstance(end, tirx.Var) and begin == 0:
            self.most[end.name] = min(int(extent), self.most.get(end.name, int(extent)))

    def _is_inside(self, extent: Any, begin: Any, end: Any) -> bool:
        if not isinstance(begin, int) or begin:
            return False
        if isinstance(extent, prim.IntImm):
            limit = self.most.get(end.name, end) if isinstance(end, tirx.Var) else end
            return isinstance(limit, int) and 0 <= limit <= int(extent)
        return not isinstance(end, int) and bool(extent.same_as(end))

    # -- ids of rows, and an index put together of one for each dimension

    def _on_gather(self, inputs: list[Any], _: Known, attrs: Attrs) -> Made:
        """Rows of a table. Ids that are an input are checked in each call, before it runs."""
        table, ids = inputs
        checked = any(ids.same_as(given) for given in self._inputs.values())
        if attrs.get("axis", 0) or not isinstance(table, ir.GenericConst):
            return None
        largest = self._most_of(ids)
        if not checked and (largest is None or largest >= table.value.shape[0]):
            return None
        return self.bb.emit(relax.op.take(table, ids, 0, "fast"))

    def _most_of(self, expr: relax.Expr) -> int | None:
        """The largest value, if that is known and none is negative."""
        if not isinstance(expr, ir.GenericConst):
            return self._largest.get(expr)
        values = expr.value.numpy()
        return int(values.max(initial=0)) if (values >= 0).all() else None

    def _on_concat(self, inputs: list[Any], _: Known, attrs: Attrs) -> Made:
        if any(isinstance(part.ty, relax.ShapeType) for part in inputs):
            return None
        axis = int(attrs["axis"])
        joined = self.bb.emit(relax.op.concat(inputs, axis))
        if axis in (-1, joined.ty.ndim - 1):
            self._joined[joined] = inputs
        return joined

    def _on_gathernd(self, inputs: list[Any], _: Known, attrs: Attrs) -> Made:
        data, index = inputs
        parts = self._joined.get(index) if isinstance(index, relax.Var) else None
        extents = shape_of(data)
        if parts is None or extents is None or attrs.get("batch_dims", 0):
            return None
        single = all(_plain_last(part) == 1 for part in parts)
        if not single or len(parts) != len(extents):
            return None
        emit = self.bb.emit
        ids = [emit(relax.op.squeeze(part, [-1])) for part in parts]
        counted = [from_start(emit, one, extent) for one, extent in zip(ids, extents, strict=True)]
        return emit(relax.op.index_tensor(data, counted))


def _last_axis(data: relax.Expr, attrs: Mapping[str, Any]) -> int:
    """The last axis of ``data`` if a softmax of old is along it alone; else NotImplementedError."""
    rank, axis = data.ty.ndim, int(attrs.get("axis", 1))
    if axis not in (-1, rank - 1):
        raise NotImplementedError(
            f"axes {axis} to {rank - 1} at once, as before opset {_ONE_AXIS}; convert the model"
        )
    return rank - 1


def _plain_last(expr: relax.Expr) -> int | None:
    last = extents_of(expr)[-1]
    return int(last) if isinstance(last, prim.IntImm) else None


def _is_zero(expr: relax.Expr | None) -> bool:
    return isinstance(expr, ir.GenericConst) and not expr.value.numpy().any()


def _fill(attrs: Mapping[str, Any]) -> Any:
    value = attrs.get("value")
    return np.float32(0.0) if value is None else get_numpy(value).reshape(-1)[0]


def _dtype(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> str:
    """The type of what is folded."""
    if op == "Equal":
        return "bool"
    if op == "Cast":
        return "int32" if int(attrs["to"]) == 6 else "int64"
    if op == "ConstantOfShape":
        return str(np.asarray(attrs["fill"]).dtype)
    return str(inputs[1 if op == "Where" else 0].ty.dtype)
