"""Whose token an element is: the axes behind every extent, followed through reshapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import relax, sym
from tvm.ir import prim

from ..analysis.expr import replace_vars
from .plane import BATCH, BOTH, PLAIN, TOKENS, Plane
from .rebuild import Extent, bindings_of, extents_of, is_op, shape_of

# The axes that one dimension holds, outermost first: names of symbolic ones, products of others.
_Axes = tuple[str | int, ...]
_IN_ORDER: dict[str, _Axes] = {BATCH: (BATCH,), TOKENS: (TOKENS,), BOTH: (BATCH, TOKENS)}
_UNKNOWN: _Axes = ("?",)
# Any two numbers: what is equal for all sizes is equal for these.
_SAMPLE = (5, 7)


def turned(main: relax.Function, plane: Plane) -> set[relax.Var]:
    """The values of ``main`` with the extents of single tokens that are not proven to have these in
    the order of the mask: an extent alone does not tell whose token an element is."""
    orders = _Orders(main, plane)
    return {binding.var for binding in bindings_of(main) if orders.is_turned(binding.var)}


class _Orders:
    """The axes in every dimension of every value. A reshape splits and joins them, copies side by
    side add one; other operators leave them in dimensions of the same extent."""

    def __init__(self, main: relax.Function, plane: Plane) -> None:
        self.plane, self.analyzer = plane, sym.Analyzer()
        self.extents: dict[str, Extent] = {BATCH: plane.batch, TOKENS: plane.tokens}
        self.known: dict[relax.Var, list[tuple[Extent, _Axes]]] = {}
        for param in main.params:
            self.known[param] = [(e, self._own(e)) for e in self._symbolic(param)]
        for binding in bindings_of(main):
            self.known[binding.var] = self._result(binding.var, binding.value)

    def is_turned(self, var: relax.Var) -> bool:
        """Whether a value of single tokens may have them in another order."""
        roles = self.plane.roles(var)
        if roles is None or not self.plane.is_token_wise(roles):
            return False
        dims = zip(extents_of(var), roles, strict=True)
        return any(role and self._axes(e, self.known[var]) != _IN_ORDER[role] for e, role in dims)

    def _result(self, var: relax.Var, value: relax.Expr) -> list[tuple[Extent, _Axes]]:
        if is_op(value, "reshape"):
            return self._regrouped(value.args[0], var)
        if is_op(value, "tile"):
            return self._repeated(value, var)
        read = [pair for v in relax.analysis.free_vars(value) for pair in self.known.get(v, [])]
        if shape_of(var) is None:  # several tensors: whoever takes one of them looks here
            return read
        # Numbers that are computed from none, as positions, have any order.
        return [(e, self._axes(e, read)) for e in self._symbolic(var)] if read else []

    def _axes(self, extent: Extent, known: Sequence[tuple[Extent, _Axes]]) -> _Axes:
        """The axes in a dimension of a value that is computed from dimensions like ``known``."""
        found = {axes for other, axes in known if self._same(other, extent)}
        if len(found) == 1:
            return found.pop()
        if found:
            return _UNKNOWN
        own = self._own(extent)
        return (self._named(extent),) if known and len(own) > 1 else own

    def _own(self, extent: Extent) -> _Axes:
        """The axes of an extent that nothing is known about."""
        role = self.plane.role(extent)
        return _IN_ORDER.get(role) or (self._named(extent),)

    def _named(self, extent: Extent) -> str:
        name = str(extent)
        self.extents[name] = extent
        return name

    def _symbolic(self, var: relax.Var) -> list[Extent]:
        return [e for e in shape_of(var) or () if self.plane.role(e) != PLAIN]

    def _repeated(self, tile: relax.Call, result: relax.Var) -> list[tuple[Extent, _Axes]]:
        """The dimensions of whole tensors side by side: the number of them, and the source's."""
        (source,) = tile.args
        known = self.known.get(source, []) if isinstance(source, relax.Var) else []
        times = [1] * (result.ty.ndim - len(tile.attrs.repeats)) + list(
            map(int, tile.attrs.repeats)
        )
        offset = result.ty.ndim - source.ty.ndim
        found: list[tuple[Extent, _Axes]] = []
        for dim, extent in enumerate(extents_of(source), offset):
            if self.plane.role(extent) != PLAIN:
                axes = tuple(_joined([times[dim], *self._axes(extent, known)]))
                found.append((extents_of(result)[dim], axes))
        return found

    def _regrouped(self, source: relax.Expr, result: relax.Var) -> list[tuple[Extent, _Axes]]:
        """The dimensions of a reshape's result: the source's axes in their order."""
        known = self.known.get(source, []) if isinstance(source, relax.Var) else []
        rest: list[str | int] = []
        for extent in extents_of(source):
            axes = self._axes(extent, known)
            rest += [int(extent)] if isinstance(extent, prim.IntImm) else axes
        found: list[tuple[Extent, _Axes]] = []
        for extent in extents_of(result):
            rest = _joined(rest)
            taken = self._taken(rest, extent)
            if taken is None:
                return [(e, _UNKNOWN) for e in self._symbolic(result)]
            found.append((extent, taken))
        return [(e, axes) for e, axes in found if self.plane.role(e) != PLAIN]

    def _taken(self, rest: list[str | int], extent: Extent) -> _Axes | None:
        """The first axes of ``rest``, which are taken off, as one dimension; None where they do not
        come to ``extent``."""
        taken: list[str | int] = []
        product: Extent = prim.IntImm("int64", 1)
        while not self._same(product, extent):
            if not rest or rest[0] in _UNKNOWN:
                return None
            times = self._times(extent, product)
            first = rest.pop(0)
            if times is not None:
                if not isinstance(first, int) or first % times:
                    return None
                rest.insert(0, first // times)
                first = times
            taken.append(first)
            product = product * (first if isinstance(first, int) else self.extents[first])
        return tuple(_joined(taken))

    def _times(self, extent: Extent, product: Extent) -> int | None:
        """The number that ``extent`` is ``product`` times; None if there is none."""
        whole, part = self._sampled(extent), self._sampled(product)
        if not whole or not part or whole % part:
            return None
        times = whole // part
        return times if self._same(extent, product * times) else None

    def _sampled(self, extent: Extent) -> int | None:
        sizes = zip((self.plane.batch, self.plane.tokens), _SAMPLE, strict=True)
        values = {var: prim.IntImm("int64", size) for var, size in sizes}
        found = self.analyzer.simplify(replace_vars(extent, values))
        return int(found) if isinstance(found, prim.IntImm) else None

    def _same(self, left: Extent, right: Extent) -> bool:
        return left.same_as(right) or bool(self.analyzer.can_prove_equal(left, right))


def _joined(axes: Iterable[str | int]) -> list[str | int]:
    """Axes with numbers that are side by side as their product, and none of 1."""
    found: list[str | int] = []
    for axis in axes:
        if isinstance(axis, int) and found and isinstance(found[-1], int):
            found[-1] *= axis
        elif axis != 1:
            found.append(axis)
    return found
