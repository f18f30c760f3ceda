"""Arrays of one call against the operator's signature: sizes of symbolic extents, checked forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import tvm_ffi
from tvm import ir, sym

from ..errors import ShapeError, mismatch
from ..remember import remember
from ..shared import Shared
from ..structs import Groups, Values
from .argument import Argument
from .arrays import as_numpy, as_tensor, kind, shape_of
from .gate import Gate, Look
from .program import Lookup, Param, Program


@dataclass(frozen=True)
class PackedOperand(Shared):
    """A weight packed once for the kernels of one operator, by ``Operator.pack``.

    ``array`` is the original, which the dense candidate reads: do not change it in place.
    """

    name: str
    array: Any
    packed: Any
    owner: object


@dataclass(frozen=True)
class Layout:
    """Everything that follows from the shapes of a call's arrays: worked out once for each.

    ``shapes`` of the inputs in order, ``sizes`` of the symbolic extents, and the shapes of the
    sparse operand, of the output and of the sums before the epilogue. ``library`` is the dense
    peer's, "torch" if any array is torch's. ``inputs``, ``result`` and ``gate`` check arrays of
    those shapes on a CPU.
    """

    shapes: tuple[tuple[int, ...], ...]
    sizes: dict[str, int]
    operand: tuple[int, ...]
    output: tuple[int, ...]
    sums: tuple[int, ...]
    library: str
    key: tuple[object, ...]
    inputs: tuple[Argument, ...]
    result: Argument
    gate: Gate


class Bound(NamedTuple):
    """The checked arrays of one call: ``tensors`` are what compiled functions take, by name,
    ``arrays`` what the caller passed, ``packed`` the packed operands among them. ``result``: the
    caller's, if it was checked too."""

    layout: Layout
    arrays: dict[str, Any]
    tensors: dict[str, Any]
    packed: dict[str, Any]
    result: Any = None


class Binder:
    """Checks arrays against a program's signature; remembers the layouts that it has seen.

    ``look()`` gives the kernel of gates; without it all calls go the long way. ``refuse(layout)``
    raises what a target has against a layout. ``packed(shape)`` is the form of a packed operand.
    """

    def __init__(
        self,
        program: Program,
        owner: object,
        look: Callable[[], Look] | None = None,
        refuse: Callable[[Layout], None] | None = None,
        packed: Callable[[Sequence[int]], Argument] | None = None,
    ) -> None:
        self.program, self.owner, self._look, self._refuse = program, owner, look, refuse
        self._packed = packed
        self._names = [p.name for p in program.inputs]
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._last: tuple[Layout | None, tuple[type, ...], Sequence[tuple[str, Callable[[], Any]]]]
        self._last = None, (), ()

    def bind(self, given: Sequence[Any], out: Any = None) -> Bound:
        """Check ``given`` against the inputs, in order, and the result ``out`` if that is quick.

        Raises
        ------
        ShapeError, DTypeError
            Another number of arrays, a wrong shape, dtype, device or layout; names the argument.
        """
        bound = self._again(given, out)
        if bound is None:
            bound = self._anew(given)
        for lookup in self.program.lookups:
            self._check_lookup(lookup, bound.layout, bound.arrays)
        return bound

    def _again(self, given: Sequence[Any], out: Any) -> Bound | None:
        """``given`` if they are plain arrays of the last call's kinds, and its packed operands, in
        a layout that is known."""
        last, kinds, weights = self._last
        if last is None or self._look is None or tuple(map(type, given)) != kinds:
            return None
        packed: dict[str, Any] = {}
        arrays = dict(zip(self._names, given))  # noqa: B905  (there are as many kinds)
        for name, weight in weights:
            held = arrays[name]
            if weight() is not held:
                return None
            packed[name], arrays[name] = held.packed, held.array
        look = self._look()
        if last.gate.opens(look, arrays.values(), out):
            return Bound(last, arrays, arrays, packed, out)
        other = self._layouts.get(_key(arrays))
        if other is None or other is last or not other.gate.opens(look, arrays.values(), out):
            return None
        places = [self._names.index(name) for name in packed]
        if any(other.shapes[place] != last.shapes[place] for place in places):
            return None
        return Bound(other, arrays, arrays, packed, out)

    def _anew(self, given: Sequence[Any]) -> Bound:
        """``given`` checked from the start; remembers the layout, the arrays' kinds, and packed
        operands, if all arrays are plain ones."""
        self._check_number(given)
        packed: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for param, array in zip(self.program.inputs, given, strict=True):
            if isinstance(array, PackedOperand):
                self._check_owner(param, array)
                packed[param.name], array = array.packed, array.array
            arrays[param.name] = array
        layout = self._layout(arrays)
        tensors = {a.name: a.take(arrays[a.name]) for a in layout.inputs}
        for name, panels in packed.items():
            self._check_packed(name, tensors[name].shape, panels)
        # Plain arrays are passed on as they are. Weights are not kept alive from here.
        if layout.gate.useful and all(tensors[name] is arrays[name] for name in arrays):
            pairs = zip(arrays, given, strict=True)
            weights = [(name, ref(array)) for name, array in pairs if name in packed]
            self._last = layout, tuple(map(type, given)), weights
        return Bound(layout, arrays, tensors, packed)

    def layout_of(self, sizes: Mapping[str, int], library: str) -> Layout:
        """The layout of known symbolic extents, without arrays."""
        program = self.program
        shapes = tuple(resolve(p.shape, sizes) for p in program.inputs)
        self._check_groups(dict(zip(self._names, shapes, strict=True)))
        output, inputs = program.output, zip(program.inputs, shapes, strict=True)
        shape = resolve(output.shape, sizes)
        if min(shape, default=0) < 0:  # an image smaller than its kernel, say
            got = f"shape {list(shape)} for sizes {dict(sizes)}"
            raise ShapeError(
                mismatch(output.name, "extents of at least 0", got, "pass larger inputs")
            )
        checks = tuple(Argument(p.name, p.dtype, s) for p, s in inputs)
        result = Argument(output.name, output.dtype, shape, writable=True)
        layout = Layout(
            shapes=shapes,
            sizes=dict(sizes),
            operand=shape if program.writes else shapes[self._names.index(program.operand)],
            output=shape,
            sums=resolve(program.sums.shape, sizes),
            library=library,
            key=(*shapes, library),
            inputs=checks,
            result=result,
            gate=Gate(checks, result),
        )
        if self._refuse is not None:
            self._refuse(layout)
        return layout

    def _check_number(self, given: Sequence[Any]) -> None:
        inputs = self.program.inputs
        if len(given) != len(inputs):
            expected = f"{len(inputs)} arrays ({', '.join(self._names)})"
            advice = "pass the pattern as sparsity=..." if len(given) > len(inputs) else ""
            raise ShapeError(mismatch("arguments", expected, len(given), advice))

    def _check_lookup(self, lookup: Lookup, layout: Layout, arrays: Mapping[str, Any]) -> None:
        """Compiled code reads wherever an index operand points: it must point inside."""
        extent = layout.shapes[self._names.index(lookup.operand)][lookup.dim]
        ids = as_numpy(arrays[lookup.ids])
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= extent):
            expected = f"indices of {lookup.operand} from 0 to {extent - 1}"
            got = f"{int(ids.min())} to {int(ids.max())}"
            raise ShapeError(mismatch(lookup.ids, expected, got))

    def _check_groups(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        con, spec = self.program.contraction, self.program.spec
        if con is None or not con.group or not isinstance(spec, Groups):
            return
        number = shapes[con.dense][con.dense_axes.index("")]
        if number != spec.num_groups:
            what = f"Groups.num_groups of {self.program.operand}"
            raise ShapeError(
                mismatch(what, f"{number}, the groups of {con.dense}", spec.num_groups)
            )

    def _check_owner(self, param: Param, packed: PackedOperand) -> None:
        if packed.owner is not self.owner or packed.name != param.name:
            what = f"{param.name}: packed operand"
            expected = f"{param.name} packed by this operator"
            raise ShapeError(mismatch(what, expected, f"{packed.name} of another call of pack"))

    def _check_packed(self, name: str, shape: Sequence[int], panels: Any) -> None:
        """Refuse what is not the packed form of an operand of ``shape``, which may have changed."""
        if self._packed is None:
            return
        form = self._packed(shape)
        found = getattr(panels, "shape", None)
        if found != form.shape:
            expected = f"panels {list(form.shape)} of shape {list(shape)}"
            got = type(panels).__name__ if found is None else f"panels {list(found)}"
            raise ShapeError(mismatch(f"{name}: packed operand", expected, got, "pack it again"))
        form.take(panels)

    def _layout(self, arrays: Mapping[str, Any]) -> Layout:
        key = _key(arrays)
        layout = self._layouts.get(key)
        if layout is None:
            sizes = self._sizes(arrays)  # first, because it names what is no array
            library = "torch" if any(kind(a) == "torch" for a in arrays.values()) else "numpy"
            layout = self.layout_of(sizes, library)
            remember(self._layouts, key, layout)
        return layout

    def _sizes(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for param in self.program.inputs:
            expected = tuple(_known(e, sizes) for e in param.shape)
            tensor = as_tensor(param.name, arrays[param.name], dtype=param.dtype, shape=expected)
            for extent, actual in zip(param.shape, tensor.shape, strict=True):
                if isinstance(extent, ir.Var):
                    known = sizes.setdefault(str(extent.name), int(actual))
                    if known != actual:
                        what = f"{param.name}: extent {extent.name}"
                        raise ShapeError(mismatch(what, known, int(actual)))
        return sizes


def _key(arrays: Mapping[str, Any]) -> tuple[object, ...]:
    """What a layout is known by."""
    return tuple([(type(a), shape_of(name, a)) for name, a in arrays.items()])


def told_pattern(program: Program, arrays: Mapping[str, Any], sparsity: Any) -> Any:
    """What tells the pattern: ``sparsity``, or if that is None the operand that tells it itself.

    Raises
    ------
    ShapeError
        Neither is there.
    """
    if sparsity is not None:
        return sparsity
    spec, con = program.spec, program.contraction
    if isinstance(spec, Values):
        sparsity = arrays.get(program.operand)
    elif isinstance(spec, Groups) and con:
        sparsity = arrays.get(con.group)
    if sparsity is None:
        what = f"an array for {type(spec).__name__}"
        raise ShapeError(mismatch("sparsity", what, "none", "pass sparsity=..."))
    return sparsity


def resolve(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """``shape`` with its symbolic extents replaced; ShapeError if one is unknown."""
    out = []
    for extent in shape:
        value = _known(extent, sizes)
        if value is None:
            advice = "pass the arrays, or sizes={...}"
            raise ShapeError(mismatch(f"size {extent}", "a known extent", sorted(sizes), advice))
        out.append(value)
    return tuple(out)


def _known(extent: Any, sizes: Mapping[str, int]) -> int | None:
    if isinstance(extent, int):
        return extent
    if isinstance(extent, ir.Var):
        return sizes.get(str(extent.name))
    unknown: list[str] = []

    def replace(var: ir.Var) -> Any:
        name = str(var.name)
        if name not in sizes:
            unknown.append(name)
            return var
        return ir.prim.IntImm(str(var.ty.dtype), sizes[name])

    value = tvm_ffi.structural_map(extent, [(ir.Var, replace)])
    return None if unknown else int(sym.Analyzer().simplify(value))
