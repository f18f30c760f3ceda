"""Recognises contractions: ``out[.., row, column] += lhs[.., row, k] * rhs[.., k, column]``.

The names follow the sparse operand, whichever side it is on: ``row`` is the spatial axis that
only the sparse operand has, ``column`` the one that only the other operand has.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import TensorLoad, prim

from .access import Access, BlockInfo, block_infos
from .iteration import conditions_around


@dataclass(frozen=True)
class Contraction:
    """Axes and operands of a contraction block.

    ``group`` names the operand that holds each row's group, if ``dense`` has one matrix per
    group. ``dense_axes`` are the axes of the dense operand's dimensions, the group's as "", and
    ``out_axes`` those of the output's.
    """

    block: str
    sparse: str
    dense: str
    row: str
    column: str
    reduce: str
    batch: tuple[str, ...]
    group: str
    sparse_axes: tuple[str, ...]
    dense_axes: tuple[str, ...]
    out_axes: tuple[str, ...]
    accumulator: str

    def axes_of(self, operand: str) -> tuple[str, ...]:
        """Axes of the dimensions of the sparse operand, or else of the output."""
        return self.sparse_axes if operand == self.sparse else self.out_axes


def contraction_of(func: tirx.PrimFunc, sparse: str) -> Contraction | None:
    """The contraction of ``func`` whose sparse operand is the input ``sparse``; None if none is.

    It must be a sum from zero of products of two inputs, with one row, one column and one
    reduction axis, every index bare but the group's, each axis as long as the dimensions that it
    indexes, and it must be the only block that reads the two. All other blocks are elementwise:
    what follows keeps rows and columns apart, and whole.
    """
    infos = block_infos(func)
    readers = [i for i in infos if _reads(i, sparse)]
    out_axes = output_axes(infos, readers[0]) if len(readers) == 1 else None
    if out_axes is None:
        return None
    info = readers[0]
    factors = _factors(info)
    if factors is None or sparse not in {f.source.name for f in factors}:
        return None
    own, other = factors if factors[0].source.name == sparse else reversed(factors)
    if not {own.source, other.source} <= set(func.params) or own.source.same_as(other.source):
        return None
    if [i.name for i in infos if _reads(i, other.source.name)] != [info.name]:
        return None
    sparse_axes = [_bare(info, i) for i in own.indices]
    dense_axes = [_bare(info, i) for i in other.indices]
    group = _group(other, dense_axes)
    if "" in sparse_axes or dense_axes.count("") != (1 if group else 0):
        return None
    axes, extents = (*sparse_axes, *dense_axes), (*own.source.shape, *other.source.shape)
    pairs = zip(axes, extents, strict=True)
    if not all(info.spans(axis, extent) for axis, extent in pairs if axis):
        return None
    return _classify(info, own, other, (sparse_axes, dense_axes, out_axes), group)


def _classify(
    info: BlockInfo,
    own: TensorLoad,
    other: TensorLoad,
    operand_axes: tuple[list[str], list[str], list[str]],
    group: str,
) -> Contraction | None:
    sparse_axes, dense_axes, out_axes = operand_axes
    reduce = [a for a in info.axes if info.kinds[a] == "reduce"]
    spatial = [a for a in info.axes if info.kinds[a] == "spatial"]
    rows = [a for a in spatial if a in sparse_axes and a not in dense_axes]
    columns = [a for a in spatial if a in dense_axes and a not in sparse_axes]
    batch = [a for a in spatial if a in dense_axes and a in sparse_axes]
    written = [_bare(info, i) for i in info.updates[0].target.indices]
    shapely = len(reduce) == len(rows) == len(columns) == 1 and sorted(written) == sorted(spatial)
    if not shapely or reduce[0] not in sparse_axes or reduce[0] not in dense_axes:
        return None
    if len(set(sparse_axes)) != len(sparse_axes) or len(set(dense_axes)) != len(dense_axes):
        return None
    return Contraction(
        block=info.name,
        sparse=own.source.name,
        dense=other.source.name,
        row=rows[0],
        column=columns[0],
        reduce=reduce[0],
        batch=tuple(batch),
        group=group,
        sparse_axes=tuple(sparse_axes),
        dense_axes=tuple(dense_axes),
        out_axes=tuple(out_axes),
        accumulator=str(info.updates[0].target.buffer.dtype),
    )


def _factors(info: BlockInfo) -> list[TensorLoad] | None:
    """The two loads of ``acc = acc + a * b``, casts aside; None for any other update."""
    if len(info.updates) != 1 or info.opaque or info.updates[0].conditions:
        return None
    if conditions_around(info):
        return None
    zero = tirx.const(0, str(info.updates[0].target.buffer.dtype))
    if not all(tvm_ffi.structural_equal(store.value, zero) for store in info.init):
        return None
    value = info.updates[0].value
    if not isinstance(value, prim.Add) or not _is_load_of(value.a, info.updates[0].target):
        return None
    product = value.b
    if not isinstance(product, prim.Mul):
        return None
    loads = [_through_cast(product.a), _through_cast(product.b)]
    return loads if all(isinstance(load, TensorLoad) for load in loads) else None


def output_axes(infos: list[BlockInfo], main: BlockInfo) -> list[str] | None:
    """Axis of ``main`` in each dimension of the output, "" for another; None if another block
    reduces, or one after ``main`` does not keep each of its axes an axis, whole."""
    axes: dict[ir.Var, list[str]] = {}
    for info in infos:
        if info.name == main.name:
            found = dict(info.iter_vars)
        elif info.opaque or any(kind != "spatial" for kind in info.kinds.values()):
            return None
        elif conditions_around(info):
            return None
        else:
            followed = _followed(info, axes)
            if followed is None:
                return None
            found = followed
        for access in info.writes if found else []:
            axes[access.buffer] = [
                found.get(i, "") if isinstance(i, ir.Var) else "" for i in access.indices
            ]
    stores = infos[-1].updates
    return axes.get(stores[0].target.buffer, []) if stores else []


def _followed(info: BlockInfo, axes: dict[ir.Var, list[str]]) -> dict[ir.Var, str] | None:
    """Axis of the sums that each iterator of a later block stands for; None if one is not clear."""
    found: dict[ir.Var, str] = {}
    for access in info.reads:
        known = axes.get(access.buffer, [])
        for index, axis, extent in zip(access.indices, known, access.buffer.shape, strict=False):
            if axis and (not isinstance(index, ir.Var) or found.setdefault(index, axis) != axis):
                return None
            if axis and not info.spans(info.iter_vars[index], extent):
                return None
    return found if len(set(found.values())) == len(found) else None


def _reads(info: BlockInfo, name: str) -> bool:
    return any(access.buffer_name == name for access in info.reads)


def _through_cast(expr: object) -> object:
    return expr.value if isinstance(expr, prim.Cast) else expr


def _is_load_of(expr: object, target: Access) -> bool:
    return isinstance(expr, TensorLoad) and expr.source.same_as(target.buffer)


def _bare(info: BlockInfo, index: object) -> str:
    """Axis of a bare index; "" for any other."""
    return info.iter_vars.get(index, "") if isinstance(index, ir.Var) else ""


def _group(other: TensorLoad, dense_axes: list[str]) -> str:
    """Name of the index operand in the one index of ``other`` that is a gather; "" if none."""
    found = [i for i, axis in zip(other.indices, dense_axes, strict=True) if not axis]
    if len(found) != 1 or not isinstance(found[0], TensorLoad):
        return ""
    return str(found[0].source.name)
