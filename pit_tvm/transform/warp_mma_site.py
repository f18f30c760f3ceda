"""What `lower_warp_mma` proves of a nest before it writes instructions in its place.

The sums, the rows and the columns must lie in the lanes where ``mma.sync`` m16n8 has them: lane
``4 * g + t`` holds rows ``g`` and ``g + 8`` of columns ``2 * t`` and ``2 * t + 1``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm_ffi
from tvm import DataType, ir, sym, tirx
from tvm.ir import TensorLoad

from ..errors import ScheduleError, mismatch
from ..primitive.checks import uses_any
from ..primitive.warp_mma import KINDS, nest_of
from .axis_map import Expr
from .lower_prefetch_rows import replaced

LANES, ROWS, COLUMNS = 32, 8, 4  # lanes of a warp; of them, along rows and along pairs of columns
_RUN_BYTES = 16  # of a row that ldmatrix takes
_PIPELINE = "software_pipeline_async_stages"


@dataclass(frozen=True)
class Site:
    """An annotated loop, its lane, the loops of its nest, its sums and its operands.

    ``a`` is the operand of the rows ``(i, h)``, ``b`` that of the columns ``(j, e)``; ``pipelined``
    tells whether asynchronous copies run beside the loop.
    """

    loop: tirx.For
    lane: ir.Var
    i: tirx.For
    h: ir.Var
    j: tirx.For
    e: ir.Var
    k: ir.Var
    sums: tirx.BufferStore
    a: TensorLoad
    b: TensorLoad
    pipelined: bool
    known: sym.Analyzer = field(default_factory=sym.Analyzer)

    @property
    def kind(self) -> str:
        """The operands' type in PTX."""
        return KINDS[str(self.a.source.dtype)]

    @property
    def run(self) -> int:
        """Elements of a row of a matrix that ldmatrix moves, half of a step."""
        return _RUN_BYTES // DataType(str(self.a.source.dtype)).itemsize

    def refused(self, expected: str, got: object) -> ScheduleError:
        return ScheduleError(mismatch(f"warp_mma: loop {self.loop.loop_var.name}", expected, got))


def site_of(loop: tirx.For, loops: list[tirx.For]) -> Site:
    """The annotated ``loop``, one of ``loops``, proved to be what the instructions compute.

    Raises
    ------
    ScheduleError
        It is not.
    """
    nest = nest_of(loop)
    i, h, j, e, k = nest.loops
    around = [f for f in loops if _holds(f.body, loop)]
    lane = next((f for f in around if _is_lane(f)), None)
    a, b = nest.factors
    if _uses(a, j, e):
        a, b = b, a
    variable = loop.loop_var if lane is None else lane.loop_var
    pipelined = any(_PIPELINE in (f.annotations or {}) for f in around)
    inner = (h.loop_var, j, e.loop_var, k.loop_var)
    site = Site(loop, variable, i, *inner, nest.store, a, b, pipelined)
    if lane is None:
        raise site.refused("a loop of 32 lanes around it, bound to threadIdx.x", "none")
    for f in (*around, loop, *nest.loops):
        site.known.bind(f.loop_var, ir.Range(f.min, f.extent))
    _check_meeting(site, lane, around)
    if _uses(a, j, e) or _uses(b, i, h):
        raise site.refused("one operand of rows and one of columns", "both in one")
    _check_lanes(site)
    _check_sums(site)
    return site


def offset_of(buffer: ir.Var, indices: list[Expr]) -> Expr:
    """Elements from the start of ``buffer`` to ``indices``."""
    strides = list(buffer.strides)
    if not strides:
        strides = [tirx.const(1, "int32")]
        for extent in reversed(buffer.shape[1:]):
            strides.insert(0, strides[0] * extent)
    products = (i * stride for i, stride in zip(indices, strides, strict=True))
    return sum(products, tirx.const(0, "int32"))


def _is_lane(loop: tirx.For) -> bool:
    bound = loop.thread_binding
    own = bound is not None and bound.thread_tag == "threadIdx.x"
    return own and isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == LANES


def _uses(load: TensorLoad, *loops: tirx.For) -> bool:
    return any(uses_any(index, {f.loop_var for f in loops}) for index in load.indices)


def _holds(stmt: tirx.Stmt, loop: tirx.For) -> bool:
    found: list[bool] = []
    tvm_ffi.structural_walk(stmt, (tirx.For, lambda f: found.append(f.same_as(loop))))
    return any(found)


def _check_meeting(site: Site, lane: tirx.For, around: list[tirx.For]) -> None:
    """All lanes run the loop together: no branch around it depends on the lane."""
    conditions: list[Expr] = [f.extent for f in around]

    def on_branch(branch: tirx.IfThenElse) -> None:
        if _holds(branch, site.loop):
            conditions.append(branch.condition)

    tvm_ffi.structural_walk(lane.body, (tirx.IfThenElse, on_branch))
    for condition in conditions:
        if uses_any(condition, {site.lane}):
            raise site.refused("all lanes to meet in it", f"only where {condition}")


def _check_lanes(site: Site) -> None:
    """Lane ``4 * g + t`` reads rows of ``g`` alone, and columns of ``t`` alone."""
    g, t = tirx.Var("g", "int32"), tirx.Var("t", "int32")
    site.known.bind(g, ir.Range(0, ROWS))
    site.known.bind(t, ir.Range(0, COLUMNS))
    for load, other in ((site.a, t), (site.b, g)):
        for index in load.indices:
            spread = site.known.simplify(replaced(index, {site.lane: g * COLUMNS + t}))
            if uses_any(spread, {other}):
                raise site.refused("rows by lane // 4 and columns by lane % 4", index)


def _check_sums(site: Site) -> None:
    """The sums of an instruction are four different ones, the same in every step."""
    indices = [site.known.simplify(index) for index in site.sums.indices]
    if any(uses_any(index, {site.k, site.lane, site.loop.loop_var}) for index in indices):
        raise site.refused("sums of a lane, over the whole reduction", indices)
    by_row, by_column = (
        [_moves(site, index, var) for index in indices] for var in (site.h, site.e)
    )
    if not any(by_row) or not any(by_column) or any(map(all, zip(by_row, by_column, strict=True))):
        raise site.refused("four sums of a lane for an instruction", indices)


def _moves(site: Site, index: Expr, var: ir.Var) -> bool:
    """Whether ``index`` differs by a constant between the two values of ``var``."""
    ends = [replaced(index, {var: tirx.const(at, "int32")}) for at in (0, 1)]
    step = site.known.simplify(ends[1] - ends[0])
    return not isinstance(step, tirx.IntImm) or int(step) != 0
