"""How any program runs on CUDA cores: the axis to gather on, and who computes the dense form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..analysis.contraction import Contraction
from ..op.batch_matmul import batch_matmul
from ..op.matmul import matmul
from ..schedules.contraction_space import BLOCKS
from ..schedules.cuda_contraction_space import BANDS, DEPTH_STEP, DTYPES
from ..schedules.cuda_turn import AT_ONCE
from ..schedules.hopper_space import GROUP_STEPS
from ..structs import Mask, MicroTile
from ..transform.split_epilogue import split_epilogue
from .cuda_detect_plan import MOST_BAND
from .cuda_form import LEAST_ROWS, known_epilogue, slotted, unsupported
from .program import Program, Route, analyse


@dataclass(frozen=True)
class GeneralForm:
    """How a program runs: on which axis its live positions are gathered, and by what.

    ``lhs`` is the sparse operand, ``rhs`` the dense one of a contraction, "" of other expressions.
    ``library``: torch computes the dense form, with ``bias`` ("" for none) and ``act``. ``axis``
    tells what a list counts: "rows" of tiles, their "depth", the "batch", or the rows that live in
    one of the "pieces" of the depth; "" without tiles. ``slot``: columns of a sparse output that
    have a list of rows, those of a tile, else 0. ``turns``: operands that are turned first, so
    that lists name whole rows of them. ``apart``: tiles add to sums of their own,
    which the epilogue then reads. ``flips``: the pieces are the right operand's, whose rows are the
    output's last axis, so that the product is computed turned.
    """

    lhs: str
    rhs: str
    bias: str
    act: str
    dtype: str
    groups: int
    route: Route
    axis: str
    library: bool
    apart: bool = False
    slot: int = 0
    turns: tuple[str, ...] = ()
    flips: bool = False
    transposed: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """None: a kernel belongs to its program."""
        return {}


def general_form(program: Program, deterministic: bool = False) -> GeneralForm:
    """How a program runs on CUDA cores. ``deterministic``: sums are added up in one order, which
    live pieces of rows are not; whole rows are gathered instead.

    Raises
    ------
    UnsupportedTarget
        Its mask has another number of dimensions than two, its micro-tiles lie along a reduction,
        there are too many groups or groups of operands of several types, or a sparse output that
        has no tiles.
    """
    spec, con = program.spec, program.contraction
    rank = len((program.output if program.writes else program.input(program.operand)).shape)
    if spec.promises_zero and rank != 2:
        raise unsupported("a mask over two dimensions", f"one over {rank}")
    if program.num_groups > GROUP_STEPS[-1]:
        raise unsupported(f"at most {GROUP_STEPS[-1]} groups", program.num_groups)
    if con is not None and not _has_tiles(program):
        if program.num_groups or program.writes:
            what = "groups" if program.num_groups else "a sparse output"
            raise unsupported(f"{what} of operands of one type, {' or '.join(DTYPES)}", "others")
        con = None
    dtype = program.output.dtype
    if con is None:
        route = _route(program)
        return GeneralForm(program.operand, "", "", "none", dtype, 0, route, "", False)
    epilogue = _library_epilogue(program)
    act, bias = epilogue or ("none", "")
    library = epilogue is not None and dtype == program.input(con.sparse).dtype and dtype in DTYPES
    known = library and _turnable(program, bias)
    pieces = None if deterministic else _pieces(program, con)
    flips = pieces is not None and con.out_axes[-1] == con.row
    if flips and not (known and program.sums.dtype == dtype):
        pieces, flips = None, False
    slot, sliced = slotted(program, con) if program.writes else (0, None)
    route = pieces or sliced or _route(program)
    axis = {con.row: "rows", con.reduce: "depth"}.get(route.micro_tile.axis, "batch")
    axis = "pieces" if pieces else axis
    form = (con.sparse, con.dense, bias, act, dtype, program.num_groups)
    # A bias alone may stand in the output before what tiles add to it.
    plain = epilogue is not None and act == "none" and program.sums.dtype == dtype
    apart = flips or pieces is not None and program.has_epilogue and not plain
    turns = _turns(con, axis, spec.promises_zero) if known else ()
    return GeneralForm(*form, route, axis, library, apart, slot, turns, flips)


def _turnable(program: Program, bias: str) -> bool:
    """Whether `turned` knows the product."""
    product, names = program.product, [p.name for p in program.inputs]
    if product is None or len(program.output.shape) != 2 or program.output.dtype not in AT_ONCE:
        return False
    return names == [product.left, product.right, *([bias] if bias else [])]


def _turns(con: Contraction, axis: str, masked: bool) -> tuple[str, ...]:
    """The operands whose rows are none of what lists name; of the sparse one where it is masked."""
    if axis == "pieces":
        return (con.sparse,) if con.sparse_axes[-1] == con.row else ()
    if axis != "depth":
        return ()
    sides = (*[(con.sparse, con.sparse_axes)] * masked, (con.dense, con.dense_axes))
    return tuple(name for name, axes in sides if axes[-1] == con.reduce)


def banded(form: GeneralForm) -> int:
    """Rows of a band of the sparse operand whose live columns alone are turned; 0 where all of it
    is, or nothing."""
    micro_tile = form.route.micro_tile
    band = micro_tile.extents[1 - micro_tile.dim] if form.lhs in form.turns else 0
    return band if band <= MOST_BAND else 0


def turned(program: Program, form: GeneralForm) -> tuple[Program, MicroTile]:
    """The same product with operands stored the other way round, and its micro-tile; inputs keep
    their order. With ``flips`` the sums alone of the product turned, right operand times left one.
    ``form`` is that of the program, and turns or flips."""
    con, product = program.contraction, program.product
    if con is None or product is None:
        raise unsupported("a product one of whose operands is turned")
    sparse = dict(zip(con.sparse_axes, program.input(con.sparse).shape, strict=True))
    sizes = (*program.output.shape, sparse[con.reduce])
    m, n, k = (size if isinstance(size, int) else None for size in sizes)
    left = product.transpose_left ^ (product.left in form.turns)
    right = product.transpose_right ^ (product.right in form.turns)
    options: dict[str, Any] = {
        "bias": bool(form.bias),
        "activation": None if form.act == "none" else form.act,
    }
    if form.flips:
        m, n, left, right, options = n, m, not right, not left, {}
    options |= {"dtype": form.dtype, "transpose_lhs": left, "transpose_rhs": right}
    tensors = matmul(m, n, k, **options)
    operand = "rhs" if con.sparse == product.right and not form.flips else "lhs"
    micro_tile, spec = form.route.micro_tile, program.spec
    if con.sparse in form.turns:
        extents = micro_tile.extents[::-1]
        micro_tile = replace(micro_tile, dim=1 - micro_tile.dim, extents=extents)
        spec = Mask(*extents)
    axis = "m" if form.axis == "pieces" else "k"
    return analyse(tensors, {operand: spec}), replace(micro_tile, operand=operand, axis=axis)


def _has_tiles(program: Program) -> bool:
    """Whether both operands of the contraction have one type that tiles are made for."""
    con = program.contraction
    types = {program.input(name).dtype for name in (con.sparse, con.dense)} if con else set()
    return len(types) == 1 and types <= set(DTYPES)


def _pieces(program: Program, con: Contraction) -> Route | None:
    """Rows gathered anew for every piece of the depth, the largest that divide the blocks of zeros;
    None where those are high, or as deep as all."""
    spec, row, reduce = program.spec, con.row, con.reduce
    plain = set(con.sparse_axes) == {row, reduce} and set(con.out_axes) == {row, con.column}
    if not plain or not program.zero_outside or program.mask:
        return None
    extents = getattr(spec, "extents", ()) or (1, 1)
    dim = con.sparse_axes.index(reduce)
    high, deep, whole = extents[1 - dim], extents[dim], program.input(con.sparse).shape[dim]
    if high >= LEAST_ROWS or (isinstance(whole, int) and whole <= deep):
        return None
    found = {
        depth: route
        for route in program.routes
        if route.family == BLOCKS
        for depth in (route.micro_tile.extents[dim],)
        if depth % DEPTH_STEP == 0 and deep % depth == 0
    }
    return found[max(found)] if found else None


def _route(program: Program) -> Route:
    """The axis to gather on: that along which the promised blocks of zeros are one wide."""
    con, spec = program.contraction, program.spec
    routes = [r for r in program.routes if r.family != BLOCKS]
    depth = next((r for r in routes if con and r.micro_tile.axis == con.reduce), None)
    if con is not None and depth is not None and spec.promises_zero:
        row = con.sparse_axes.index(con.row)
        extents = getattr(spec, "extents", ()) or (1, 1)
        bands = [band for band in BANDS if extents[row] % band == 0]
        rows = [r for r in routes if r is not depth and r.micro_tile.axis == con.row]
        if bands or not rows:
            wide = tuple(1 if a == con.reduce else max(bands or BANDS[:1]) for a in con.sparse_axes)
            return replace(depth, micro_tile=replace(depth.micro_tile, extents=wide))
    if not routes:
        raise unsupported("micro-tiles that are whole along the reduction", "pieces of it")
    return min(routes, key=lambda route: route.reduces)


def _library_epilogue(program: Program) -> tuple[str, str] | None:
    """Activation, and name of the bias, of what follows the product, if a library has the same."""
    own, product = split_epilogue(program.func, program.main), program.product
    if product is None:
        return None
    if own is None:
        return "none", ""
    left, out = program.input(product.left), program.output.shape
    depth = left.shape[-2 if product.transpose_left else -1]
    options: dict[str, Any] = {
        "dtype": left.dtype,
        "transpose_lhs": product.transpose_left,
        "transpose_rhs": product.transpose_right,
    }

    def same(act: str | None, bias: bool) -> Any:
        if len(out) == 2:
            return matmul(*out, depth, bias=bias, activation=act, **options)
        if len(out) != 3 or bias:
            return None
        return batch_matmul(*out, depth, activation=act, **options)

    return known_epilogue(own, same)
