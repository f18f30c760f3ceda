"""What may take the place of an axis: tiles of it, a permutation of it, a padded form of it.

An :class:`AxisMap` names the new iterators, the coordinate on the original axis that they stand
for, and where they stand for none (the guard). SRead, SWrite, row tiles and packed operands are
all axis maps. PIT, SOSP'23, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tvm import ir, tirx

from ..errors import ShapeError, mismatch
from ..structs import MOST_EXTENT, integer

Expr = Any  # tvm gives its scalar expressions no common Python type
Vars = Mapping[str, Expr]
TileSizes = int | tuple[int, ...]  # of a tile; several: nested pieces, the outermost first


@dataclass(frozen=True)
class Part:
    """One new iterator. ``reduces`` None inherits the kind of the axis that it replaces."""

    name: str
    extent: Expr
    reduces: bool | None = None


@dataclass(frozen=True)
class AxisMap:
    """New iterators of one axis; ``coord`` and ``guard`` get all new iterators of a block by name.

    A ``padded`` axis is read through operands that hold zeros beyond it, so that sums over it
    need no guard. ``needs`` names iterators of other axes that ``coord`` and ``guard`` use.
    """

    parts: tuple[Part, ...]
    coord: Callable[[Vars], Expr]
    guard: Callable[[Vars], Expr] | None = None
    padded: bool = False
    needs: tuple[str, ...] = ()

    def has(self, names: Mapping[str, Any]) -> bool:
        """Whether a block with the iterators ``names`` has all parts of this axis."""
        return all(p.name in names for p in self.parts)


@dataclass(frozen=True)
class Packed:
    """A parameter that replaces an operand: laid out anew, padded with zeros."""

    param: ir.Var
    load: Callable[[Vars, list[Expr]], Expr]  # (iterators, original indices) -> load


@dataclass(frozen=True)
class Remap:
    """All that :func:`remap_axes` is asked to do to the block ``main`` and what depends on it.

    ``staged`` operands are copied into list order by a block of their own, cast to
    ``stage_dtype``. ``overrides`` replace the loads of an operand by an expression (the group of
    a tile row). With ``accumulate`` the function ends at ``main``, whose result is added to an
    output parameter of its own type that the caller has cleared.
    """

    main: str
    maps: Mapping[str, AxisMap]
    index_params: tuple[ir.Var, ...] = ()
    staged: tuple[str, ...] = ()
    stage_dtype: str = "float32"
    packed: Mapping[str, Packed] = field(default_factory=dict)
    overrides: Mapping[str, Callable[[Vars], Expr]] = field(default_factory=dict)
    accumulate: bool = False


def rows_map(name: str, extent: Expr, tile: TileSizes, *, padded: bool = False) -> AxisMap:
    """``name`` in tiles of ``tile``: the iterators of `tile_parts`, no index."""
    outer, inner, coord = tile_parts(name, tile)
    size = prod(part.extent for part in inner)
    exact = isinstance(extent, int | tirx.IntImm) and int(extent) % size == 0
    guard = None if exact else (lambda v: coord(v) < extent)
    return AxisMap((Part(outer, ceil_div(extent, size)), *inner), coord, guard, padded)


def index_map(
    name: str,
    ids: ir.Var,
    count: ir.Var,
    tile: TileSizes,
    slots: Callable[[Vars], list[Expr]],
    extra: tuple[Part, ...] = (),
    needs: tuple[str, ...] = (),
    *,
    padded: bool = False,
) -> AxisMap:
    """``name`` in the order of an index: the iterators of `tile_parts` are positions in a list.

    ``ids`` is ``[*slots, capacity]``, ``count`` is ``[*slots]``; ``slots`` gives the list that an
    iteration reads, from the iterators ``needs``. ``extra`` parts (the group) come first.
    """
    outer, inner, position = tile_parts(name, tile)
    capacity = ids.shape[-1]
    tiles = ceil_div(capacity, prod(part.extent for part in inner))

    def entry(v: Vars) -> Expr:
        # An asynchronous copy computes its address also where its guard does not hold.
        return tirx.min(position(v), capacity - 1) if padded else position(v)

    return AxisMap(
        (*extra, Part(outer, tiles), *inner),
        coord=lambda v: tirx.BufferLoad(ids, [*slots(v), entry(v)]),
        guard=lambda v: position(v) < tirx.BufferLoad(count, slots(v)),
        padded=padded,
        needs=needs,
    )


def tile_parts(name: str, tile: TileSizes) -> tuple[str, list[Part], Callable[[Vars], Expr]]:
    """Iterator over tiles ``{name}_t``, those inside one, and the position that they stand for.

    Inside there is ``{name}_r``, or for a tile of several sizes ``{name}_r0``, ``{name}_r1`` ...,
    the last of which counts neighbours. ShapeError for sizes that are none.
    """
    outer, sizes = f"{name}_t", tile if isinstance(tile, tuple) else (tile,)
    if not all(1 <= (integer(size) or 0) <= MOST_EXTENT for size in sizes):
        expected = f"sizes that are integers of 1 to {MOST_EXTENT}"
        raise ShapeError(mismatch(f"tile of {name}", expected, tile))
    names = [f"{name}_r"] if isinstance(tile, int) else [f"{name}_r{i}" for i in range(len(sizes))]

    def position(v: Vars) -> Expr:
        at = v[outer]
        for inner, size in zip(names, sizes, strict=True):
            at = at * size + v[inner]
        return at

    return outer, [Part(n, size) for n, size in zip(names, sizes, strict=True)], position


def padded_map(name: str, extent: Expr, width: int, slot: int = 0) -> AxisMap:
    """``name`` in panels of ``width``: iterators ``{name}_p`` and ``{name}_l``; with a ``slot``, a
    multiple of ``width``, inside slots of so many positions, ``{name}_t``."""
    slots, outer, inner = f"{name}_t", f"{name}_p", f"{name}_l"

    def coord(v: Vars) -> Expr:
        within = v[outer] * width + v[inner]
        return v[slots] * slot + within if slot else within

    exact = isinstance(extent, int | tirx.IntImm) and int(extent) % (slot or width) == 0
    guard = None if exact else (lambda v: coord(v) < extent)
    panels = (Part(outer, slot // width if slot else ceil_div(extent, width)), Part(inner, width))
    parts = (Part(slots, ceil_div(extent, slot)), *panels) if slot else panels
    return AxisMap(parts, coord, guard, True)


def ceil_div(extent: Expr, tile: int) -> Expr:
    """Pieces of ``tile`` that cover ``extent``: an int, or an expression if it is symbolic."""
    if isinstance(extent, int | tirx.IntImm):
        return -(-int(extent) // tile)
    return tirx.floordiv(extent + (tile - 1), tile)
