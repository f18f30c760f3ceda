"""What is known of an operator before any array arrives: axes, sparse forms, product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import TensorLoad, prim

from ..analysis.access import Access, BlockInfo, block_infos
from ..analysis.contraction import Contraction, contraction_of
from ..analysis.pit_axis import as_prim_func, pit_axes
from ..analysis.reduction import Reducer, reducer_of
from ..errors import AxisError, ShapeError, mismatch
from ..primitive.checks import is_choice
from ..schedules.contraction_space import BLOCKS, DEPTH, MICRO_DEPTH, MICRO_ROWS, ROWS
from ..structs import BitMask, BlockMask, Groups, Mask, MicroTile, SparsitySpec, Values
from ..transform.insert_sread_swrite import first_read, is_read, main_block, operand_axes
from ..transform.unalign import is_buffer

GENERIC = ""
_ROW_STEPS = range(8, 129, 8)  # extents of k-axis micro-tiles that register blocks divide
_DEPTH_STEPS = range(16, 513, 16)


@dataclass(frozen=True)
class Param:
    """One array of the operator; ``shape`` holds ints, and expressions where it is symbolic."""

    name: str
    dtype: str
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Route:
    """A micro-tile on a PIT axis, and the family of tiles that runs it (GENERIC: none)."""

    micro_tile: MicroTile
    family: str
    reduces: bool


@dataclass(frozen=True)
class Product:
    """How a library computes the contraction: operands in order, and which are transposed."""

    left: str
    right: str
    transpose_left: bool
    transpose_right: bool


@dataclass(frozen=True)
class Lookup:
    """``operand`` is read at an index that the array ``ids`` holds, in dimension ``dim``."""

    ids: str
    operand: str
    dim: int


@dataclass(frozen=True)
class Program:
    """An operator, the sparsity of one operand, and everything that follows from the two.

    ``main`` is the block that reads the operand, ``sums`` what it writes; ``contraction`` and
    ``product`` are None where the block is none, or no library computes it. ``mask`` names the
    pattern's array among the arguments of kernels that read the operand through it, "" if the
    pattern promises zeros outside.
    """

    func: tirx.PrimFunc
    inputs: tuple[Param, ...]
    output: Param
    operand: str
    spec: SparsitySpec
    main: str
    sums: Param
    contraction: Contraction | None
    product: Product | None
    routes: tuple[Route, ...]
    lookups: tuple[Lookup, ...]
    has_epilogue: bool
    mask: str = ""

    def input(self, name: str) -> Param:
        """The input of that name; StopIteration if there is none."""
        return next(p for p in self.inputs if p.name == name)

    @property
    def num_groups(self) -> int:
        """Number of groups of ``Groups``; 0 for all other patterns."""
        return self.spec.num_groups if isinstance(self.spec, Groups) else 0

    def reads_mask(self, micro_tile: MicroTile | None) -> bool:
        """Whether the kernels of a micro-tile (None: the whole operand) read the mask.

        A live micro-tile that lies inside one block of a BlockMask is live everywhere, and no
        contraction reads its operand anywhere else.
        """
        if not self.mask or micro_tile is None or self.contraction is None:
            return bool(self.mask)
        if not isinstance(self.spec, BlockMask):
            return True
        pairs = zip(micro_tile.extents, self.spec.extents, strict=True)
        return any(extent == 0 or block % extent for extent, block in pairs)


def analyse(tensors: Any, sparse: dict[str, SparsitySpec], *, apply_mask: bool = False) -> Program:
    """The program of TE tensors (or a PrimFunc) for one sparse operand.

    ``apply_mask``: outside its mask the operand counts as zero, instead of being zero.

    Raises
    ------
    AxisError
        There is no such operand or no PIT axis for its pattern; or zeros of the operand would
        change the result (a maximum, say), so that a mask promises nothing; or there is no mask
        to apply.
    ShapeError
        The specification does not fit the operand's rank.
    """
    func = as_prim_func(tensors)
    operand, spec = _single(sparse)
    if apply_mask and not isinstance(spec, (Mask, BitMask, BlockMask)):
        expected = f"Mask, BitMask or BlockMask for {operand}"
        advice = "no other pattern has elements outside that a kernel reads"
        raise AxisError(mismatch("apply_mask", expected, type(spec).__name__, advice))
    params = [_param(p) for p in func.params if is_buffer(p)]
    if operand not in [p.name for p in params[:-1]]:
        raise AxisError(
            mismatch("sparse", f"an input, one of {[p.name for p in params[:-1]]}", operand)
        )
    info = main_block(func, operand)
    con = contraction_of(func, operand)
    if con is not None and con.group and not isinstance(spec, Groups):
        con = None  # rows of several groups share a tile then: the generic schedule takes them
    _check_rank(spec, next(p for p in params if p.name == operand))
    if spec.promises_zero:
        _check_zero(info, operand)
    if isinstance(spec, Groups) and (con is None or not con.group):
        raise AxisError(mismatch(f"sparse[{operand!r}]", "a grouped product for Groups", "another"))
    routes = tuple(_routes(func, info, con, operand, spec))
    if not routes:
        report = pit_axes(func)
        why = report.rejected[info.name] or "indices not bare, or other blocks need it whole"
        raise AxisError(mismatch(f"sparse[{operand!r}]", "a PIT axis on it", f"none: {why}"))
    return Program(
        func=func,
        inputs=tuple(params[:-1]),
        output=params[-1],
        operand=operand,
        spec=spec,
        main=info.name,
        sums=_param(info.updates[0].target.buffer),
        contraction=con,
        product=_product(con, info) if con else None,
        routes=routes,
        lookups=_lookups(func, con.group if con else ""),
        has_epilogue=info.updates[0].target.buffer not in func.params,
        mask=_mask_name(operand, params) if apply_mask else "",
    )


def _mask_name(operand: str, params: list[Param]) -> str:
    """A name that no array of the operator has."""
    name = f"{operand}_mask"
    while name in [p.name for p in params]:
        name += "_"
    return name


def _lookups(func: tirx.PrimFunc, checked: str) -> tuple[Lookup, ...]:
    """Reads of inputs at indices that another input holds; detection checks ``checked`` itself."""
    found = {
        Lookup(str(index.source.name), access.buffer_name, dim)
        for info in block_infos(func)
        for access in info.reads
        for dim, index in enumerate(access.indices)
        if access.buffer in func.params
        and isinstance(index, TensorLoad)
        and index.source in func.params
        and str(index.source.name) != checked
    }
    return tuple(sorted(found, key=lambda lookup: (lookup.ids, lookup.operand, lookup.dim)))


def _single(sparse: dict[str, SparsitySpec]) -> tuple[str, SparsitySpec]:
    if len(sparse) != 1:
        advice = "compile one operator per sparse operand"
        raise AxisError(mismatch("sparse", "one sparse operand", sorted(sparse), advice))
    ((operand, spec),) = sparse.items()
    if not isinstance(spec, SparsitySpec):
        expected = "Mask, BitMask, BlockMask, Values, Rows, Lengths or Groups"
        raise AxisError(mismatch(f"sparse[{operand!r}]", expected, type(spec).__name__))
    return operand, spec


def _param(buffer: ir.Var) -> Param:
    shape = tuple(int(e) if isinstance(e, tirx.IntImm) else e for e in buffer.shape)
    return Param(str(buffer.name), str(buffer.dtype), shape)


def _check_rank(spec: SparsitySpec, param: Param) -> None:
    rank = len(param.shape)
    if isinstance(spec, (Mask, BitMask, BlockMask, Values)):
        if spec.extents and len(spec.extents) != rank:
            what = f"{type(spec).__name__} of {param.name}"
            raise ShapeError(mismatch(what, f"{rank} extents", spec.extents))
        return
    dim = spec.dim  # type: ignore[attr-defined]
    if not isinstance(dim, int) or not 0 <= dim < rank:
        what = f"{type(spec).__name__}.dim of {param.name}"
        raise ShapeError(mismatch(what, f"0 to {rank - 1}", repr(dim)))


# --------------------------------------------------------------------------------------------
# Zeros that contribute nothing


def _check_zero(info: BlockInfo, operand: str) -> None:
    """A reduction must get its identity from a zero of what the index is for."""
    if not any(kind == "reduce" for kind in info.kinds.values()):
        return
    reducer = reducer_of(info, info.updates[0].target.buffer)
    terms = reducer.terms if isinstance(reducer, Reducer) and reducer.op == "sum" else ()
    dead = first_read(info, operand)
    if not terms or not all(_vanishes(term, dead) for term in terms):
        expected = "a sum of products with the operand, so that its zeros add nothing"
        advice = "name the rows that exist (Rows, Lengths) instead"
        raise AxisError(mismatch(f"sparse[{operand!r}]", expected, "another reduction", advice))


def _vanishes(expr: Any, dead: Access) -> bool:
    """Whether an expression is zero wherever the element that ``dead`` reads is."""
    if isinstance(expr, prim.Cast):
        return _vanishes(expr.value, dead)
    if isinstance(expr, prim.Mul):
        return _vanishes(expr.a, dead) or _vanishes(expr.b, dead)
    if isinstance(expr, prim.Select):
        return all(_vanishes(e, dead) for e in (expr.true_value, expr.false_value))
    if isinstance(expr, ir.Call) and is_choice(expr):
        return all(_vanishes(e, dead) for e in expr.args[1:])
    if isinstance(expr, prim.IntImm | prim.FloatImm):
        return float(expr.value) == 0.0
    return isinstance(expr, TensorLoad) and is_read(expr, dead)


# --------------------------------------------------------------------------------------------
# Routes


def _routes(
    func: tirx.PrimFunc, info: BlockInfo, con: Contraction | None, operand: str, spec: SparsitySpec
) -> list[Route]:
    accepted = pit_axes(func).accepted[info.name]
    axes = operand_axes(info, operand)
    infos = block_infos(func)
    later = infos[[i.name for i in infos].index(info.name) + 1 :]
    read_again = any(a.buffer_name == operand for i in later for a in i.reads)
    reduced_again = any(i.block.init is not None for i in later)
    out: list[Route] = []
    for dim, axis in enumerate(axes):
        if axis is None or axis not in accepted or axes.count(axis) > 1:
            continue
        if not spec.promises_zero and dim != spec.dim:  # type: ignore[attr-defined]
            continue
        reduces = info.kinds[axis] == "reduce"
        # Another reader of the operand would see all of the axis; a later reduction over the
        # output's axis would miss what dead slices contribute.
        if (reduces and read_again) or (spec.promises_zero and not reduces and reduced_again):
            continue
        for family, extents in _micro_tiles(con, spec, dim, axis, len(axes)):
            out.append(Route(MicroTile(operand, axis, dim, extents), family, reduces))
    return out


def _micro_tiles(
    con: Contraction | None, spec: SparsitySpec, dim: int, axis: str, rank: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Families and extents of the micro-tiles on one axis."""
    whole = tuple(1 if d == dim else 0 for d in range(rank))
    if con is None:
        return [(GENERIC, whole)]
    family = DEPTH if axis == con.reduce else ROWS
    if not spec.promises_zero or axis in con.batch:
        return [(family, whole)]
    sliced = [1 if d == dim or a in con.batch else 0 for d, a in enumerate(con.sparse_axes)]
    granularity = getattr(spec, "extents", ()) or (1,) * rank
    if axis == con.reduce:
        row = con.sparse_axes.index(con.row)
        steps = {MICRO_ROWS} | {granularity[row]} & set(_ROW_STEPS)
        return [(DEPTH, _with(sliced, row, step)) for step in sorted(steps)]
    depth = con.sparse_axes.index(con.reduce)
    steps = {MICRO_DEPTH} | {granularity[depth]} & set(_DEPTH_STEPS)
    split = [(BLOCKS, _with(sliced, depth, step)) for step in sorted(steps)]
    return [(ROWS, tuple(sliced)), *split]


def _with(extents: list[int], position: int, value: int) -> tuple[int, ...]:
    return tuple(value if d == position else e for d, e in enumerate(extents))


def _product(con: Contraction, info: BlockInfo) -> Product | None:
    """The library call for a contraction: leading batch axes in one order, then the two."""
    written = [info.iter_vars.get(i, "") for i in info.updates[0].target.indices]
    if con.group or len(written) < 2 or sorted(written[-2:]) != sorted((con.row, con.column)):
        return None
    sides = {con.sparse: con.sparse_axes, con.dense: con.dense_axes}
    left, right = con.sparse, con.dense
    if written[-2] == con.column:
        left, right = right, left
    batch = tuple(written[:-2])
    first, second = sides[left], sides[right]
    if first[:-2] != batch or second[:-2] != batch:
        return None
    return Product(left, right, first[-2] == con.reduce, second[-1] == con.reduce)
