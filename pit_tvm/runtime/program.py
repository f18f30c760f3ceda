"""What is known of an operator before any array arrives: axes, sparse forms, product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import TensorLoad, prim

from ..analysis.access import Access, BlockInfo, block_infos
from ..analysis.contraction import Contraction, contraction_of
from ..analysis.pit_axis import as_prim_func, pit_axes
from ..analysis.reduction import Reducer, reducer_of
from ..errors import AxisError, ShapeError, mismatch
from ..primitive.checks import is_choice
from ..structs import (
    BitMask,
    BlockMask,
    Groups,
    Mask,
    MicroTile,
    SparsitySpec,
    Values,
    integer,
)
from ..transform.insert_sread_swrite import (
    SparseForm,
    first_read,
    insert_sread_swrite,
    is_read,
    main_block,
)
from .library import library_sums
from .program_checks import check_program, symbolic_extents
from .routes import Route, output_contraction, output_routes, read_routes

_NO_AXIS = "indices not bare, or of a part, or other blocks need it whole"


@dataclass(frozen=True)
class Param:
    """One array of the operator; ``shape`` holds ints, and expressions where it is symbolic."""

    name: str
    dtype: str
    shape: tuple[Any, ...]


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

    ``main`` is the block that reads the operand, or sums up for it if it is the output; ``sums``
    what it writes; ``contraction`` and ``product`` are None where the block is none, or no library
    computes it. ``mask`` names the pattern's array among the arguments of kernels that read the
    operand through it, "" if the pattern promises zeros outside.
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

    @property
    def writes(self) -> bool:
        """Whether the sparse operand is the output: what is dead in it is not needed."""
        return all(p.name != self.operand for p in self.inputs)

    @property
    def gathered(self) -> str:
        """The input from which kernels gather: the operand, unless that is the output."""
        return self.contraction.sparse if self.contraction and self.writes else self.operand

    @property
    def zero_outside(self) -> bool:
        """Whether the operand is zero, or counts as zero, outside its pattern."""
        return self.spec.promises_zero and not self.writes

    @property
    def has_dense(self) -> bool:
        """Whether computing all of the operand can give the promised result."""
        con = self.contraction
        return con is None or not con.group or self.spec.promises_zero

    @property
    def beside(self) -> str:
        """Axis of a contraction's operand beside the rows': the depth, or an output's columns."""
        con = self.contraction
        return "" if con is None else con.column if self.writes else con.reduce

    @property
    def extents(self) -> list[str]:
        """Names of the symbolic extents."""
        return [str(var.name) for var in symbolic_extents([*self.inputs, self.output])]

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
    """The program of TE tensors (or a PrimFunc) for one sparse operand: an input, or the output of
    a product, of which only what a mask marks is computed.

    ``apply_mask``: outside its mask an input counts as zero, instead of being zero.

    Raises
    ------
    AxisError
        There is no such operand or no PIT axis for its pattern; or zeros of the operand would
        change the result (a maximum, say), so that a mask promises nothing; or there is no mask
        to apply; or two arrays, or two symbolic extents, have one name; or a parameter is no
        array, or no input has an extent; or a block is none of ``te.compute``.
    ShapeError
        The specification does not fit the operand's rank, or a sum is over no elements.
    """
    func = as_prim_func(tensors)
    operand, spec = _single(sparse)
    if apply_mask and not isinstance(spec, (Mask, BitMask, BlockMask)):
        expected = f"Mask, BitMask or BlockMask for {operand}"
        advice = "no other pattern has elements outside that a kernel reads"
        raise AxisError(mismatch("apply_mask", expected, type(spec).__name__, advice))
    infos = block_infos(func)
    check_program(func, infos)
    params = [_param(p) for p in func.params]
    names = [p.name for p in params]
    if operand not in names:
        expected = f"an input, one of {names[:-1]}, or the output {names[-1]}"
        raise AxisError(mismatch("sparse", expected, operand))
    reads = operand in names[:-1]
    if apply_mask and not reads:
        raise AxisError(mismatch("apply_mask", f"a mask of an input, one of {names[:-1]}", operand))
    _check_rank(spec, params[names.index(operand)])
    con = None if reads else output_contraction(func, spec)
    info = main_block(func, operand)
    if con is None:
        con, routes = _reading(func, info, operand, spec)
    else:
        routes = output_routes(func, con, spec)
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
        routes=tuple(routes),
        lookups=_lookups(func, infos, con.group if con else ""),
        has_epilogue=info.updates[0].target.buffer not in func.params,
        mask=_mask_name(operand, params) if apply_mask else "",
    )


def _reading(
    func: tirx.PrimFunc, info: BlockInfo, operand: str, spec: SparsitySpec
) -> tuple[Contraction | None, list[Route]]:
    """The contraction of a sparse input, if ``info`` is one, and its routes, at least one."""
    con = contraction_of(func, operand)
    if con is not None and con.group and not isinstance(spec, Groups):
        con = None  # rows of several groups share a tile then: the generic schedule takes them
    if spec.promises_zero:
        _check_zero(info, operand)
    if isinstance(spec, Groups) and (con is None or not con.group):
        raise AxisError(mismatch(f"sparse[{operand!r}]", "a grouped product for Groups", "another"))
    routes = read_routes(func, info, con, operand, spec)
    why: Any = pit_axes(func).rejected[info.name] or _NO_AXIS
    if con is None and routes:
        routes, why = _passing(func, routes)
    if not routes:
        raise AxisError(mismatch(f"sparse[{operand!r}]", "a PIT axis on it", f"none: {why}"))
    return con, routes


def _passing(func: tirx.PrimFunc, routes: Sequence[Route]) -> tuple[list[Route], str]:
    """Routes whose permutation passes through all blocks, and why the last other one does not."""
    passing, why = [], ""
    for route in routes:
        try:
            insert_sread_swrite(func, route.micro_tile, SparseForm(1))
            passing.append(route)
        except AxisError as fault:
            why = str(fault)
    return passing, why


def _mask_name(operand: str, params: list[Param]) -> str:
    """A name that no array of the operator has."""
    name = f"{operand}_mask"
    while name in [p.name for p in params]:
        name += "_"
    return name


def _lookups(func: tirx.PrimFunc, infos: Sequence[BlockInfo], checked: str) -> tuple[Lookup, ...]:
    """Reads of inputs at indices that another input holds; detection checks ``checked`` itself.

    AxisError for an index that is computed of one: nobody could tell whether it is in range.
    """
    found: set[Lookup] = set()
    for access in (access for info in infos for access in info.reads):
        for dim, index in enumerate(access.indices):
            if isinstance(index, TensorLoad) and index.source in func.params:
                ids = str(index.source.name)
                if access.buffer in func.params and ids != checked:
                    found.add(Lookup(ids, access.buffer_name, dim))
            elif _loads(index):
                expected = "indices that an input holds as they are"
                raise AxisError(mismatch(f"an index of {access.buffer_name}", expected, index))
    return tuple(sorted(found, key=lambda lookup: (lookup.ids, lookup.operand, lookup.dim)))


def _loads(index: Any) -> bool:
    """Whether an index depends on what an array holds."""
    found: list[Any] = []
    tvm_ffi.structural_walk(index, (TensorLoad, found.append))
    return bool(found)


def _single(sparse: dict[str, SparsitySpec]) -> tuple[str, SparsitySpec]:
    if len(sparse) != 1:
        advice = "compile one operator per sparse operand"
        raise AxisError(mismatch("sparse", "one sparse operand", sorted(sparse), advice))
    ((operand, spec),) = sparse.items()
    if not isinstance(spec, SparsitySpec):
        expected = "Mask, BitMask, BlockMask, Values, Grid, Rows, Lengths or Groups"
        got, advice = type(spec).__name__, ""
        if isinstance(spec, type):
            got, advice = f"the class {spec.__name__}", f"write {spec.__name__}(...)"
        raise AxisError(mismatch(f"sparse[{operand!r}]", expected, got, advice))
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
    if integer(dim) is None or not 0 <= dim < rank:
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


def _product(con: Contraction, info: BlockInfo) -> Product | None:
    """The library call for a contraction: leading batch axes in one order, then the two."""
    written = [info.iter_vars.get(i, "") for i in info.updates[0].target.indices]
    types = [str(a.buffer.dtype) for a in info.reads if a.buffer_name in (con.sparse, con.dense)]
    if not library_sums(types, con.accumulator):
        return None
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
