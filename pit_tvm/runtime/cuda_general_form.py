"""How any program runs on CUDA cores: the axis to gather on, and who computes the dense form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..op.batch_matmul import batch_matmul
from ..op.matmul import matmul
from ..schedules.contraction_space import BLOCKS
from ..schedules.cuda_contraction_space import BANDS, DTYPES
from ..schedules.hopper_space import GROUP_STEPS
from ..transform.split_epilogue import split_epilogue
from .cuda_form import known_epilogue, unsupported
from .program import Program, Route


@dataclass(frozen=True)
class GeneralForm:
    """How a program runs: on which axis its live positions are gathered, and by what.

    ``lhs`` is the sparse operand, ``rhs`` the dense one of a contraction, "" of other expressions.
    ``library``: torch computes the dense form, with ``bias`` ("" for none) and ``act``. ``axis``
    tells what a list counts: "rows" of tiles, their "depth", or the "batch"; "" without tiles.
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
    transposed: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """None: a kernel belongs to its program."""
        return {}


def general_form(program: Program) -> GeneralForm:
    """How a program runs on CUDA cores.

    Raises
    ------
    UnsupportedTarget
        Its output is sparse, its mask has another number of dimensions than two, its micro-tiles
        lie along a reduction, or there are too many groups or groups of operands of several types.
    """
    spec, con = program.spec, program.contraction
    if program.writes:
        raise unsupported("a sparse input, on GPUs other than Hopper's", "a sparse output")
    rank = len(program.input(program.operand).shape)
    if spec.promises_zero and rank != 2:
        raise unsupported("a mask over two dimensions", f"one over {rank}")
    if program.num_groups > GROUP_STEPS[-1]:
        raise unsupported(f"at most {GROUP_STEPS[-1]} groups", program.num_groups)
    if con is not None and not _has_tiles(program):
        if program.num_groups:
            raise unsupported(f"groups of operands of one type, {' or '.join(DTYPES)}", "others")
        con = None
    route = _route(program)
    if con is None:
        output = program.output.dtype
        return GeneralForm(program.operand, "", "", "none", output, 0, route, "", False)
    axis = {con.row: "rows", con.reduce: "depth"}.get(route.micro_tile.axis, "batch")
    epilogue = _library_epilogue(program)
    act, bias = epilogue or ("none", "")
    dtype = program.output.dtype
    library = epilogue is not None and dtype == program.input(con.sparse).dtype and dtype in DTYPES
    form = (con.sparse, con.dense, bias, act, dtype, program.num_groups)
    return GeneralForm(*form, route=route, axis=axis, library=library)


def _has_tiles(program: Program) -> bool:
    """Whether both operands of the contraction have one type that tiles are made for."""
    con = program.contraction
    types = {program.input(name).dtype for name in (con.sparse, con.dense)} if con else set()
    return len(types) == 1 and types <= set(DTYPES)


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
