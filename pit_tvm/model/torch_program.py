"""A lowered graph as Python functions on torch tensors.

Memory is torch's: an intermediate tensor belongs to the current stream, and inside a CUDA graph's
capture to the graph; it is given back after its last use. Kernels are launched on torch's current
stream. The functions are plain text (`ProgramText`): what runs can be read, and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tvm import ir, relax
from tvm.ir import prim

from ..errors import UnsupportedTarget, mismatch
from ..runtime.arrays import as_numpy, as_torch
from .packing import LIVE_TOKENS
from .program_parts import ProgramParts, split
from .rebuild import describe, extents_of, is_op, values_of
from .saved import ProgramText


def _along(call: relax.Call) -> str:
    return f"dim={int(call.attrs.axis)}"


def _ordered(call: relax.Call) -> str:
    return f"{_along(call)}, descending={bool(call.attrs.descending)}"


def _best(call: relax.Call, x: str) -> str:
    attrs = call.attrs
    found = f"torch.topk({x}, {int(attrs.k)}, {_along(call)}, largest={bool(attrs.largest)})"
    if not isinstance(call.ty, relax.TupleType):
        return f"{found}.{attrs.ret_type}.to(torch.{call.ty.dtype})"
    dtypes = ", ".join(f"torch.{part.dtype}" for part in call.ty.fields)
    return f"[part.to(dtype) for part, dtype in zip({found}, ({dtypes}))]"


#: Operators that torch runs: each as Python, given the text of its operand.
OF_TORCH: dict[str, Callable[[relax.Call, str], str]] = {
    "cumsum": lambda call, x: f"torch.cumsum({x}, {_along(call)}, dtype=torch.{call.ty.dtype})",
    "sort": lambda call, x: f"torch.sort({x}, {_ordered(call)}).values",
    "argsort": lambda call, x: (
        f"torch.sort({x}, {_ordered(call)}, stable=True).indices.to(torch.{call.ty.dtype})"
    ),
    "topk": _best,
}
_BINARY = {
    prim.Add: "({} + {})",
    prim.Sub: "({} - {})",
    prim.Mul: "({} * {})",
    prim.FloorDiv: "({} // {})",
    prim.FloorMod: "({} % {})",
    prim.Min: "min({}, {})",
    prim.Max: "max({}, {})",
}


class TorchProgram:
    """``main`` of a lowered module. Call it with the inputs in order; it gives a list of outputs.

    ``index(*inputs, make)`` gives what ``make`` makes of the mask and the ids, ``body(*inputs,
    index)`` what the tail needs, and ``tail(*inputs, index, *kept)`` the outputs; see
    `ProgramParts`.

    Parameters
    ----------
    graph
        The functions as `program_text` writes them.
    functions
        Kernels and packed functions by their names in ``main``; kernels take inputs, then outputs,
        then symbolic extents.
    device
        Where constants and intermediate tensors are.

    Raises
    ------
    UnsupportedTarget
        A function is missing.
    """

    def __init__(
        self,
        graph: ProgramText,
        functions: Mapping[str, Callable[..., Any]],
        device: torch.device,
    ) -> None:
        self.graph, self.device, self.functions = graph, device, dict(functions)
        missing = [name.removeprefix("relax.run.") for name in graph.functions.keys() - functions]
        if missing:
            raise _without_loops(", ".join(sorted(missing)))
        scope: dict[str, Any] = {"torch": torch, "device": device}
        scope |= {name: as_torch(value).to(device) for name, value in graph.constants.items()}
        scope |= {plain: functions[name] for name, plain in graph.functions.items()}
        exec(compile(graph.source, "<pit_tvm model>", "exec"), scope)  # noqa: S102  (our own text)
        self.index, self.body, self.tail = (scope[name] for name in ("index", "body", "tail"))

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run; torch's current device must be the program's."""
        index = self.index(*inputs, self.functions.get(LIVE_TOKENS))
        return self.tail(*inputs, index, *self.body(*inputs, index))


def program_text(main: relax.Function) -> ProgramText:
    """A function without control flow, of views, calls of kernels, and calls of packed functions.

    Raises
    ------
    UnsupportedTarget
        It has another operator, named in the message.
    """
    parts = split(main)
    writer = _Writer(main)
    source = "\n".join(writer.lines(parts))
    replayable = parts.index is not None and bool(parts.kept)
    return ProgramText(source, writer.constants, writer.functions, replayable)


class _Writer:
    """Writes functions; ``constants`` and ``functions`` name what their text refers to."""

    def __init__(self, main: relax.Function) -> None:
        self.main, self._values = main, values_of(main)
        self.constants: dict[str, np.ndarray] = {}
        self.functions: dict[str, str] = {}
        self._tensors: dict[Any, str] = {}
        self._names: dict[Any, str] = {}
        self._known: set[str] = set()

    def lines(self, parts: ProgramParts) -> Iterator[str]:
        """The text, line by line."""
        inputs, index = [self._name(param) for param in self.main.params], "index"
        yield f"def index({', '.join([*inputs, 'make'])}):"
        if parts.index is None:
            yield "    return None"
        else:
            index = self._name(parts.index.var)
            yield f"    return make({', '.join(map(self._value, parts.index.value.args[1:]))})"
        yield f"def body({', '.join([*inputs, index])}):"
        yield from self._opening([])
        yield from self._statements([*parts.names, *parts.body], parts.kept)
        yield f"    return {self._tuple([self._name(var) for var in parts.kept])}"
        yield f"def tail({', '.join([*inputs, index, *map(self._name, parts.kept)])}):"
        yield from self._opening(parts.kept)
        result = self.main.body.body
        yield from self._statements([*parts.names, *parts.tail], relax.analysis.free_vars(result))
        found = self._value(result)
        whole = isinstance(result.ty, relax.TupleType)
        yield f"    return list({found if whole else f'({found},)'})"

    def _opening(self, others: Sequence[relax.Var]) -> Iterator[str]:
        """The extents that a function's inputs tell."""
        self._known.clear()
        for param in [*self.main.params, *others]:
            yield from self._sizes(self._name(param), extents_of(param))

    def _statements(
        self, bindings: Sequence[relax.Binding], results: Sequence[relax.Var]
    ) -> Iterator[str]:
        last = _last_uses(bindings, results)
        for number, binding in enumerate(bindings):
            yield from (f"    {line}" for line in self._binding(binding))
            if last[number]:
                yield f"    del {', '.join(self._name(var) for var in last[number])}"

    def _binding(self, binding: relax.Binding) -> Iterator[str]:
        var = binding.var
        if is_op(binding.value, "call_tir", "call_dps_packed"):
            yield from self._launch(var, binding.value)
            return
        yield f"{self._name(var)} = {self._value(binding.value)}"
        if isinstance(binding, relax.MatchCast):
            yield from (line.strip() for line in self._sizes(self._name(var), extents_of(var)))

    def _sizes(self, tensor: str, extents: Sequence[Any]) -> Iterator[str]:
        """Bind the symbolic extents of a tensor that are not known yet."""
        for dim, extent in enumerate(extents):
            if isinstance(extent, ir.Var) and self._name(extent) not in self._known:
                self._known.add(self._name(extent))
                yield f"    {self._name(extent)} = {tensor}.shape[{dim}]"

    def _launch(self, var: relax.Var, call: relax.Call) -> Iterator[str]:
        """Make the outputs of a kernel, and call it unless they are empty."""
        callee, given, *symbols = call.args
        types = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        one = len(types) == 1
        outs = [self._name(var) if one else f"{self._name(var)}_{i}" for i in range(len(types))]
        for name, ty in zip(outs, types, strict=True):
            shape = self._tuple([self._extent(e) for e in ty.shape.values])
            yield f"{name} = torch.empty({shape}, dtype=torch.{ty.dtype}, device=device)"
        fields = list(given.fields) if isinstance(given, relax.Tuple) else [given]
        extra = [self._extent(e) for s in symbols for e in s.values]
        arguments = [*(self._compact(f) for f in fields), *outs, *extra]
        yield f"if {outs[0]}.numel():"
        yield f"    {self._function(callee)}({', '.join(arguments)})"
        if not one:
            yield f"{self._name(var)} = {self._tuple(outs)}"
            yield f"del {', '.join(outs)}"

    def _compact(self, expr: Any) -> str:
        """A value as kernels read it: slices, and what torch gives, may have gaps."""
        return f"{self._value(expr)}{'.contiguous()' if self._has_gaps(expr) else ''}"

    def _has_gaps(self, expr: Any) -> bool:
        while isinstance(expr, relax.Var) and expr in self._values:
            expr = self._values[expr]
        if isinstance(expr, relax.TupleGetItem):
            return self._has_gaps(expr.tuple_value)
        if is_op(expr, "reshape"):
            return self._has_gaps(expr.args[0])
        return is_op(expr, "strided_slice", *OF_TORCH)

    def _value(self, expr: Any) -> str:
        if isinstance(expr, ir.GenericConst):
            return self._constant(expr)
        if isinstance(expr, relax.Tuple):
            return self._tuple([self._value(f) for f in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return f"{self._value(expr.tuple_value)}[{expr.index}]"
        if isinstance(expr.ty, ir.PrimType):
            return self._extent(expr)
        if isinstance(expr, relax.Var):
            return self._name(expr)
        if is_op(expr, "strided_slice"):
            return f"{self._value(expr.args[0])}[{self._ranges(expr)}]"
        if is_op(expr, "reshape"):
            shape = self._tuple([self._extent(e) for e in extents_of(expr)])
            return f"{self._value(expr.args[0])}.reshape({shape})"
        if is_op(expr, "call_pure_packed", "call_packed"):
            callee, *given = expr.args
            return f"{self._function(callee)}({', '.join(self._value(g) for g in given)})"
        name = describe(expr)
        if name in OF_TORCH:
            return OF_TORCH[name](expr, self._value(expr.args[0]))
        raise _without_loops(f"{name} -> {expr.ty}")

    def _ranges(self, call: relax.Call) -> str:
        """The slice of each dimension."""
        data, axes, begin, end, *strides = call.args
        found = [":"] * data.ty.ndim
        steps = strides[0].fields if strides else [prim.IntImm("int64", 1)] * len(axes.fields)
        for axis, *limits in zip(axes.fields, begin.fields, end.fields, steps, strict=True):
            found[int(axis)] = ":".join(self._extent(limit) for limit in limits)
        return ", ".join(found)

    def _extent(self, value: Any) -> str:
        """A symbolic number as Python."""
        if isinstance(value, prim.IntImm | prim.FloatImm):
            return repr(value.value)
        if isinstance(value, ir.Var):
            return self._name(value)
        pattern = _BINARY.get(type(value))
        if pattern is None:
            raise UnsupportedTarget(
                mismatch("model", "sums, products and quotients as extents", value)
            )
        return pattern.format(self._extent(value.a), self._extent(value.b))

    def _tuple(self, items: Sequence[str]) -> str:
        return f"({', '.join(items)}{',' * (len(items) == 1)})"

    def _function(self, callee: Any) -> str:
        extern = isinstance(callee, relax.ExternFunc)
        name = str(callee.global_symbol if extern else callee.name_hint)
        return self.functions.setdefault(name, f"{_plain(name)}_f{len(self.functions)}")

    def _constant(self, expr: ir.GenericConst) -> str:
        value = as_numpy(expr.value)
        key = (value.ctypes.data, value.dtype, value.shape)
        if key not in self._tensors:
            name = self._tensors[key] = f"c{len(self._tensors)}"
            self.constants[name] = value
        return self._tensors[key]

    def _name(self, var: Any) -> str:
        if var not in self._names:
            hint = _plain(str(getattr(var, "name_hint", None) or var.name))
            self._names[var] = f"{hint}_{len(self._names)}"
        return self._names[var]


def _without_loops(got: str) -> UnsupportedTarget:
    advice = "leave them out of the model, or compile it for llvm"
    return UnsupportedTarget(mismatch("model", "operators that TVM lowers to loops", got, advice))


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _last_uses(
    bindings: Sequence[relax.Binding], results: Sequence[relax.Var]
) -> list[list[relax.Var]]:
    """For each binding those of their variables that nothing after it uses."""
    bound = {b.var for b in bindings}
    later = set(results)
    found: list[list[relax.Var]] = []
    for binding in reversed(bindings):
        used = dict.fromkeys([*relax.analysis.free_vars(binding.value), binding.var])
        found.append([var for var in used if var in bound and var not in later])
        later.update(used)
    return found[::-1]
