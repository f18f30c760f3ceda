"""Which programs the GPU's m-axis and k-axis families compute, with which options of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import te, tirx

from ..analysis.contraction import Contraction
from ..errors import UnsupportedTarget, mismatch
from ..op.grouped_matmul import grouped_matmul
from ..op.matmul import matmul
from ..schedules.hopper_bands import HEIGHTS
from ..schedules.hopper_knobs import ACTS
from ..schedules.hopper_space import DTYPES, GROUP_STEPS
from ..structs import Groups
from ..transform.insert_sread_swrite import main_block
from ..transform.split_epilogue import split_epilogue
from .program import Program, Route

LEAST_ROWS = 4  # of a block, of which a band holds so few that most of its columns may be dead


@dataclass(frozen=True)
class RowsForm:
    """A program as ``out[i] = act(lhs[i] @ rhs[group of i] + bias[group of i])`` over live rows.

    ``lhs``, ``rhs`` and ``bias`` ("" for none) name inputs; ``rhs_layout`` is "nk" or "kn", the
    order of the weight's two matrix dimensions; ``route`` is the axis of rows, whole.
    """

    lhs: str
    rhs: str
    bias: str
    rhs_layout: str
    act: str
    dtype: str
    groups: int
    route: Route

    @property
    def transposed(self) -> bool:
        """Whether lhs is stored [k, m]."""
        return False

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_rows.rows_kernel`."""
        return {"bias": bool(self.bias), "act": self.act, "rhs_layout": self.rhs_layout}


@dataclass(frozen=True)
class ColumnsForm(RowsForm):
    """A program as ``out = act(lhs @ rhs + bias)`` over live columns of bands of ``height`` rows.

    ``packed``: lhs is stored [m, k], so its live columns are packed first; else [k, m]. ``common``:
    one list names what exists along k for all rows, however high. ``rhs`` is stored [k, n], and
    ``route`` is the axis k.
    """

    height: int = 0
    packed: bool = False
    common: bool = False

    @property
    def transposed(self) -> bool:
        """Whether lhs is stored [k, m]."""
        return not self.packed

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_columns.columns_kernel`."""
        own = {"packed": self.packed, "common": self.common}
        return {"bias": bool(self.bias), "act": self.act, **own}


def form_of(program: Program) -> RowsForm:
    """What a kernel has to do for a program: a `ColumnsForm` where zeros are promised in blocks of
    32 rows or a multiple, for every lhs stored [k, m], and where what exists along k is named; or
    else what `rows_form` says.

    Raises
    ------
    UnsupportedTarget
        No family computes the program; the message says what it would need.
    """
    con, product, height = program.contraction, program.product, _band(program)
    route = next((r for r in program.routes if con and r.micro_tile.axis == con.reduce), None)
    common = not program.spec.promises_zero  # rows of both operands, which are alike then
    if con is None or product is None or route is None or not (height or common) or program.mask:
        return rows_form(program)
    packed = con.sparse_axes[0] == con.row
    if con.dense_axes != (con.reduce, con.column) or (common and packed):
        return rows_form(program)
    if product.left != con.sparse and not common:
        return rows_form(program)
    if not common:
        extents = tuple(1 if axis == con.reduce else height for axis in con.sparse_axes)
        route = replace(route, micro_tile=replace(route.micro_tile, extents=extents))
    dtype = dtype_of(program, con)
    act, bias = epilogue_of(program, con, "kn")
    form = (product.left, product.right, bias, "kn", act, dtype, 0, route)
    return ColumnsForm(*form, height=height, packed=packed, common=common)


def _band(program: Program) -> int:
    """Rows of a band: the largest height whose multiple the blocks of zeros are, or the least one
    if blocks of `LEAST_ROWS` or more fill it; 0 for other patterns, and for lower blocks where
    whole live rows can be gathered instead."""
    con, spec = program.contraction, program.spec
    if con is None or not spec.promises_zero:
        return 0
    row = con.sparse_axes.index(con.row)
    extents = getattr(spec, "extents", ()) or (1, 1)
    fit = [height for height in HEIGHTS if extents[row] % height == 0]
    filled = extents[row] >= LEAST_ROWS and HEIGHTS[0] % extents[row] == 0
    return max(fit) if fit else HEIGHTS[0] if row or filled else 0


def rows_form(program: Program) -> RowsForm:
    """What the m-axis family's kernel has to do for a program.

    Raises
    ------
    UnsupportedTarget
        The program is none that it computes; the message says what it would need.
    """
    con = program.contraction
    route = next((r for r in program.routes if con and r.micro_tile.axis == con.row), None)
    if con is None or route is None or con.batch or program.mask:
        raise unsupported("a product of gathered rows: matmul, linear or grouped_matmul")
    if con.sparse_axes != (con.row, con.reduce):
        raise unsupported("the sparse operand stored [m, k]")
    if program.product is not None and program.product.left != con.sparse:
        raise unsupported("the sparse operand's rows to be those of the result")
    dtype = dtype_of(program, con)
    layout = "nk" if con.dense_axes[-1] == con.reduce else "kn"
    groups = program.spec.num_groups if isinstance(program.spec, Groups) else 0
    if groups > GROUP_STEPS[-1]:
        raise unsupported(f"at most {GROUP_STEPS[-1]} groups", groups)
    act, bias = epilogue_of(program, con, layout)
    return RowsForm(con.sparse, con.dense, bias, layout, act, dtype, groups, route)


def dtype_of(program: Program, con: Contraction) -> str:
    """The one type of operands and output."""
    types = {p.dtype for p in (program.input(con.sparse), program.input(con.dense), program.output)}
    if len(types) != 1 or not types <= set(DTYPES):
        raise unsupported(f"operands and output all of {' or '.join(DTYPES)}", sorted(types))
    return types.pop()


def unsupported(expected: str, got: object = "another expression") -> UnsupportedTarget:
    """The error of a program that no family on a GPU computes."""
    return UnsupportedTarget(mismatch("target cuda", expected, got, "compile for llvm"))


def epilogue_of(program: Program, con: Contraction, layout: str) -> tuple[str, str]:
    """Activation, and name of the bias, of the stages after the sums.

    They are recognised by comparing with what our operators put there: whoever writes the same
    expression gets the same kernel.
    """
    own = split_epilogue(program.func, program.main)
    if own is None:
        raise unsupported("a result that is rounded to the operands' type", "no conversion")
    dense, sparse = program.input(con.dense), program.input(con.sparse)
    rows, columns = program.output.shape
    extents = (rows, columns, sparse.shape[con.sparse_axes.index(con.reduce)])
    options: dict[str, Any] = {"dtype": sparse.dtype, "transpose_rhs": layout == "nk"}

    def same(act: str | None, bias: bool) -> Any:
        own_options = {**options, "bias": bias, "activation": act}
        if con.group:
            return grouped_matmul(*extents, dense.shape[0], **own_options)
        return matmul(*extents, **own_options)

    found = known_epilogue(own, same, con.group)
    if found is None:
        raise unsupported(f"an epilogue of bias and one of {', '.join(ACTS)}", "another one")
    return found


def known_epilogue(
    own: tirx.PrimFunc, same: Callable[[str | None, bool], Any], group: str = ""
) -> tuple[str, str] | None:
    """Activation, and name of the bias ("" for none), of the epilogue ``own``.

    ``same(activation, bias)`` makes the tensors of an operator that has such an epilogue on the
    same sums, None if there is none; ``group`` names an input that is no bias. None if none of
    them has it.
    """
    for act in ACTS:
        for bias in (False, True):
            tensors = same(None if act == "none" else act, bias)
            func = te.create_prim_func(tensors) if tensors else None
            other = split_epilogue(func, main_block(func, "lhs").name) if func else None
            if other is not None and tvm_ffi.structural_equal(own, other, map_free_vars=True):
                names = [str(p.name) for p in own.params[1:-1] if str(p.name) != group]
                return act, names[0] if bias else ""
    return None
