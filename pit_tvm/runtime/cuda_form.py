"""Which programs the GPU's m-axis family computes, and with which options of its kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import te, tirx

from ..analysis.contraction import Contraction
from ..errors import UnsupportedTarget, mismatch
from ..op.grouped_matmul import grouped_matmul
from ..op.matmul import matmul
from ..schedules.hopper_knobs import ACTS
from ..schedules.hopper_space import DTYPES, GROUP_STEPS
from ..structs import Groups
from ..transform.insert_sread_swrite import main_block
from ..transform.split_epilogue import split_epilogue
from .program import Program, Route


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
    def options(self) -> dict[str, Any]:
        """Options of `pit_tvm.schedules.hopper_rows.rows_kernel`."""
        return {"bias": bool(self.bias), "act": self.act, "rhs_layout": self.rhs_layout}


def rows_form(program: Program) -> RowsForm:
    """What the family's kernel has to do for a program.

    Raises
    ------
    UnsupportedTarget
        The program is none that it computes; the message says what it would need.
    """
    con = program.contraction
    route = next((r for r in program.routes if con and r.micro_tile.axis == con.row), None)
    if con is None or route is None or con.batch or program.mask:
        raise _unsupported("a product of gathered rows: matmul, linear or grouped_matmul")
    if con.sparse_axes != (con.row, con.reduce):
        raise _unsupported("the sparse operand stored [m, k]")
    types = {p.dtype for p in (program.input(con.sparse), program.input(con.dense), program.output)}
    if len(types) != 1 or not types <= set(DTYPES):
        raise _unsupported(f"operands and output all of {' or '.join(DTYPES)}", sorted(types))
    layout = "nk" if con.dense_axes[-1] == con.reduce else "kn"
    groups = program.spec.num_groups if isinstance(program.spec, Groups) else 0
    if groups > GROUP_STEPS[-1]:
        raise _unsupported(f"at most {GROUP_STEPS[-1]} groups", groups)
    act, bias = _epilogue(program, con, layout)
    dtype = types.pop()
    return RowsForm(con.sparse, con.dense, bias, layout, act, dtype, groups, route)


def _unsupported(expected: str, got: object = "another expression") -> UnsupportedTarget:
    advice = "other operators have no GPU form yet: compile for llvm"
    return UnsupportedTarget(mismatch("target cuda", expected, got, advice))


def _epilogue(program: Program, con: Contraction, layout: str) -> tuple[str, str]:
    """Activation, and name of the bias, of the stages after the sums.

    They are recognised by comparing with what our operators put there: whoever writes the same
    expression gets the same kernel.
    """
    own = split_epilogue(program.func, program.main)
    if own is None:
        raise _unsupported("a result that is rounded to the operands' type", "no conversion")
    for act, has_bias, other in _known_epilogues(program, con, layout):
        if tvm_ffi.structural_equal(own, other, map_free_vars=True):
            names = [str(p.name) for p in own.params[1:-1] if str(p.name) != con.group]
            return act, names[0] if has_bias else ""
    raise _unsupported(f"an epilogue of bias and one of {', '.join(ACTS)}", "another one")


def _known_epilogues(
    program: Program, con: Contraction, layout: str
) -> Iterator[tuple[str, bool, tirx.PrimFunc]]:
    dense, sparse = program.input(con.dense), program.input(con.sparse)
    n, k = (-2, -1) if layout == "nk" else (-1, -2)
    extents = (sparse.shape[0], dense.shape[n], dense.shape[k])
    for act in ACTS:
        for bias in (False, True):
            options: dict[str, Any] = {
                "dtype": sparse.dtype,
                "transpose_rhs": layout == "nk",
                "bias": bias,
                "activation": None if act == "none" else act,
            }
            if con.group:
                tensors = grouped_matmul(*extents, dense.shape[0], **options)
            else:
                tensors = matmul(*extents, **options)
            func = te.create_prim_func(tensors)
            rest = split_epilogue(func, main_block(func, "lhs").name)
            if rest is not None:
                yield act, bias, rest
