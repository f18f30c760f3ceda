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

SLOTS = (128, 64)  # columns of a sparse output that have a list of rows, the widest first
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
class SidedForm(RowsForm):
    """A program as ``out = act(lhs @ rhs + bias)`` of which one operand is sparse: ``side`` names
    it, lhs or rhs."""

    side: str = "lhs"
    lhs_layout: str = "mk"

    @property
    def transposed(self) -> bool:
        """Whether lhs is stored [k, m]."""
        return self.lhs_layout == "km"

    @property
    def flip(self) -> bool:
        """Whether the product is computed turned: what is gathered is rhs, and stands on the left
        for kernels."""
        return self.side == "rhs"

    @property
    def beside(self) -> str:
        """The layout of the dense operand as kernels take it, on the right: "nk" or "kn"."""
        if not self.flip:
            return self.rhs_layout
        return "kn" if self.transposed else "nk"


@dataclass(frozen=True)
class ColumnsForm(SidedForm):
    """The same over what lives along k in bands of ``height`` rows of lhs or columns of rhs.

    ``packed``: the sparse operand is stored [m, k] or [n, k], so what lives in it is packed first.
    ``turns``: the other one is stored like that, and is turned first. ``common``: one list names
    what exists along k for all bands, however high. ``route`` is the axis k.
    """

    height: int = 0
    packed: bool = False
    turns: bool = False
    common: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_columns.columns_kernel`."""
        own = {"packed": self.packed, "common": self.common, "flip": self.flip}
        return {"bias": bool(self.bias), "act": self.act, **own}


def form_of(program: Program) -> RowsForm:
    """What a kernel has to do for a program: a `ColumnsForm` where zeros are promised in bands of
    32 or a multiple, for every operand stored [k, m] or [k, n], and where what exists along k is
    named; or else what `rows_form` says.

    Raises
    ------
    UnsupportedTarget
        No family computes the program; the message says what it would need.
    """
    con, product, height = program.contraction, program.product, _band(program)
    if con is None or product is None:
        return rows_form(program)
    packed = con.sparse_axes[-1] == con.reduce
    if program.spec.promises_zero:
        extents = {con.row: height, con.reduce: 1}
        parts = sided_parts(program, con.reduce, extents) if height else None
        if parts:
            turns = con.dense_axes[-1] == con.reduce
            return ColumnsForm(**parts, height=height, packed=packed, turns=turns)
    elif con.dense_axes == (con.reduce, con.column) and not packed:
        # Rows of both operands, which are alike then.
        route = next((r for r in program.routes if r.micro_tile.axis == con.reduce), None)
        if route is not None and not program.mask:
            act, bias = epilogue_of(program, con, "kn")
            form = (product.left, product.right, bias, "kn", act, dtype_of(program, con), 0, route)
            return ColumnsForm(*form, lhs_layout="km", common=True)
    return rows_form(program)


def side_of(program: Program) -> str:
    """Which side of the product the sparse operand is: lhs or rhs, "" if it is none."""
    con, product = program.contraction, program.product
    if con is None or product is None or con.batch or con.sparse != program.operand:
        return ""
    return "lhs" if product.left == con.sparse else "rhs"


def sided_parts(program: Program, axis: str, extents: dict[str, int]) -> dict[str, Any] | None:
    """Fields of the `SidedForm` whose micro-tiles lie on ``axis`` and have these extents by axes;
    None where zeros are not promised, or types or epilogue are none that the families compute."""
    con, product, side = program.contraction, program.product, side_of(program)
    route = next((r for r in program.routes if r.micro_tile.axis == axis), None)
    if con is None or product is None or not side or route is None:
        return None
    if not program.spec.promises_zero or program.mask:
        return None
    rhs_layout = "nk" if product.transpose_right else "kn"
    try:
        dtype = dtype_of(program, con)
        act, bias = epilogue_of(program, con, rhs_layout)
    except UnsupportedTarget:  # another family's
        return None
    tiled = tuple(extents[name] for name in con.sparse_axes)
    return {
        "lhs": product.left,
        "rhs": product.right,
        "bias": bias,
        "rhs_layout": rhs_layout,
        "act": act,
        "dtype": dtype,
        "groups": 0,
        "route": replace(route, micro_tile=replace(route.micro_tile, extents=tiled)),
        "side": side,
        "lhs_layout": "km" if product.transpose_left else "mk",
    }


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


def slotted(program: Program, con: Contraction) -> tuple[int, Route]:
    """How many columns of a sparse output have a list of rows, the most that divide its blocks, and
    the axis of these rows."""
    width = (getattr(program.spec, "extents", ()) or (1, 1))[con.out_axes.index(con.column)]
    slot = next((slot for slot in SLOTS if width % slot == 0), SLOTS[-1])
    extents, route = tuple(slot if a == con.column else 1 for a in con.out_axes), program.routes[0]
    return slot, replace(route, micro_tile=replace(route.micro_tile, extents=extents))


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
    names = [str(p.name) for p in own.params[1:-1] if str(p.name) != group]
    for act in ACTS:
        tensors = same(None if act == "none" else act, bool(names))
        func = te.create_prim_func(tensors) if tensors else None
        other = split_epilogue(func, main_block(func, "lhs").name) if func else None
        if other is not None and tvm_ffi.structural_equal(own, other, map_free_vars=True):
            return act, names[0] if names else ""
    return None
