"""Layer norm of rows, of sums of rows, and of embeddings on CPUs: one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from operator import add
from typing import TypeAlias

from tvm import ir, tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from pit_tvm.errors import DTypeError, ShapeError, mismatch
from pit_tvm.op.arguments import at_least
from pit_tvm.target import TargetInfo
from pit_tvm.transform.unalign import parameter

from .contraction_space import lanes_of

# What is summed up: arrays [t, width], and tables [n, width] with the ids [t] of their rows.
Inputs: TypeAlias = Sequence[tuple[Expr, Expr | None]]

_FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ID_TYPES = ("int32", "int64")
SUMS = 4  # vectors that add up side by side: as many as an addition takes cycles
SERIAL_ELEMENTS = 1 << 15  # less than waking another thread costs


def residual_norm(
    width: int, dtype: str, eps: float, residual: bool, *, target: TargetInfo
) -> tirx.PrimFunc:
    """Layer norm of x, or of x + y with ``residual``; ``main(x, [y,] gamma, beta, out)``.

    ``x``, ``y``, ``out``: ``dtype`` [t, width]; ``gamma``, ``beta``: ``dtype`` [width]. Arithmetic
    is in float32: the mean first, then the variance of what is left, then
    ``(x - mean) / sqrt(variance + eps) * gamma + beta``. ``out`` is another array than ``x`` and
    ``y``. Few rows take one thread.

    Raises
    ------
    ShapeError
        ``width`` is below 1, or ``eps`` is negative or not finite.
    DTypeError
        ``dtype`` is none of float32, float16, bfloat16.
    TileNotFound
        The target is no CPU.
    """
    return _function(_form(width, dtype, eps, target), (), 1 + residual)


def embedding_norm(
    width: int,
    dtype: str,
    eps: float,
    id_dtypes: Sequence[str],
    arrays: int,
    *,
    target: TargetInfo,
) -> tirx.PrimFunc:
    """Layer norm of a sum of embeddings: of one row of each of ``len(id_dtypes)`` tables, and of
    as many ``arrays``; ``main(*(ids, table), *arrays, gamma, beta, out)``.

    ``ids`` are of their type in ``id_dtypes``, [t]; a ``table`` is ``dtype`` [n, width] of any
    ``n`` of its own; arrays, ``out`` and the arithmetic are as in `residual_norm`. An id outside
    of its table takes the nearest row: check before.

    Raises
    ------
    ShapeError, DTypeError, TileNotFound
        As in `residual_norm`; ShapeError also if nothing is summed up, DTypeError for ids other
        than int32 and int64.
    """
    for id_dtype in id_dtypes:
        if id_dtype not in _ID_TYPES:
            raise DTypeError(mismatch("id_dtypes", " or ".join(_ID_TYPES), repr(id_dtype)))
    at_least("tables and arrays", len(id_dtypes) + arrays, 1)
    return _function(_form(width, dtype, eps, target), id_dtypes, arrays)


@dataclass(frozen=True)
class NormForm:
    """What a kernel is built for; ``lanes``: elements of a float32 vector."""

    width: int
    dtype: str
    eps: float
    lanes: int
    threads: int


def float_bytes(dtype: str) -> int:
    """Size of an element of a floating-point type that these kernels know; else DTypeError."""
    if dtype not in _FLOAT_BYTES:
        raise DTypeError(mismatch("dtype", f"one of {', '.join(_FLOAT_BYTES)}", repr(dtype)))
    return _FLOAT_BYTES[dtype]


def _form(width: int, dtype: str, eps: float, target: TargetInfo) -> NormForm:
    float_bytes(dtype)
    if not isfinite(eps) or eps < 0:
        raise ShapeError(mismatch("eps", "a finite number of at least 0", repr(eps)))
    lanes = lanes_of(target.isa)
    return NormForm(at_least("width", width, 1), dtype, float(eps), lanes, target.threads)


def _function(form: NormForm, id_dtypes: Sequence[str], arrays: int) -> tirx.PrimFunc:
    rows = tirx.Var("t", "int64")
    params: list[ir.Var] = []

    def param(name: str, extent: Expr | None, dtype: str = form.dtype) -> ir.Var:
        width = [] if name.startswith("ids") else [form.width]
        params.append(parameter(name, width if extent is None else [extent, *width], dtype))
        return params[-1]

    inputs: list[tuple[Expr, Expr | None]] = []
    for number, id_dtype in enumerate(id_dtypes):
        ids = param(f"ids{number}", rows, id_dtype)
        inputs.append((param(f"table{number}", tirx.Var(f"n{number}", "int64")), ids))
    inputs += [(param(f"x{number}", rows), None) for number in range(arrays)]
    gamma, beta, out = param("gamma", None), param("beta", None), param("out", rows)
    norm = Norm(form)

    # Its parameters are as many as there are inputs, which no signature can say.
    @T.prim_func(s_tir=True, check_well_formed=False)
    def main():
        norm.run(inputs, gamma, beta, out, rows)

    return tirx.PrimFunc(params, main.body, attrs=main.attrs)


@T.meta_class
class NormRow:
    """One row in float32 scratch, and what is summed up over it.

    Sums take ``SUMS`` vectors side by side; elements that fill no vector are summed one by one.
    """

    def __init__(self, form: NormForm, inputs: int) -> None:
        self.width, self.dtype, self.eps, self.lanes = form.width, form.dtype, form.eps, form.lanes
        self.whole, self.rest = form.width // form.lanes, form.width % form.lanes
        self.rows = T.alloc_buffer((inputs,), "int64")
        self.line = T.alloc_buffer((form.width,), "float32")
        self.total = T.alloc_buffer((SUMS * form.lanes,), "float32")
        self.single = T.alloc_buffer((1,), "float32")
        self.mean = T.alloc_buffer((1,), "float32")
        self.factor = T.alloc_buffer((1,), "float32")

    @T.inline
    def run(self, inputs, gamma, beta, out, first, last):
        for row in range(first, last):
            self.find(inputs, row)
            self.sweep(inputs, False)
            self.add_up()
            self.mean[0] = self.total[0] / T.float32(self.width)
            self.sweep(inputs, True)
            self.add_up()
            self.factor[0] = T.float32(1) / T.sqrt(
                self.total[0] / T.float32(self.width) + T.float32(self.eps)
            )
            for c in range(self.whole):
                for w in T.vectorized(self.lanes):
                    out[row, c * self.lanes + w] = self.result(gamma, beta, c * self.lanes + w)
            for w in range(self.rest):
                out[row, self.whole * self.lanes + w] = self.result(
                    gamma, beta, self.whole * self.lanes + w
                )

    @T.inline
    def sweep(self, inputs, centred):
        """Sum up the inputs' rows, or with ``centred`` squares of how far the row is from its mean.

        What is summed up becomes the row.
        """
        self.single[0] = T.float32(0)
        for w in T.vectorized(SUMS * self.lanes):
            self.total[w] = T.float32(0)
        for c in range(self.whole // SUMS):
            for u in T.unroll(SUMS):
                self.step(inputs, centred, c * SUMS + u, u)
        for u in T.unroll(self.whole % SUMS):
            self.step(inputs, centred, self.whole // SUMS * SUMS + u, u)
        for w in range(self.rest):
            at: T.let = self.whole * self.lanes + w
            self.line[at] = self.value(inputs, centred, at)
            self.single[0] = self.single[0] + self.term(centred, at)

    @T.inline
    def step(self, inputs, centred, vector, u):
        for w in T.vectorized(self.lanes):
            self.line[vector * self.lanes + w] = self.value(
                inputs, centred, vector * self.lanes + w
            )
        for w in T.vectorized(self.lanes):
            self.total[u * self.lanes + w] = self.total[u * self.lanes + w] + self.term(
                centred, vector * self.lanes + w
            )

    def find(self, inputs: Inputs, row: Expr) -> None:
        """Emit which row of each input belongs to ``row``; never one outside of a table."""
        for number, (array, ids) in enumerate(inputs):
            if ids is None:
                T.buffer_store(self.rows, row, [number])
            else:
                last = array.shape[0] - 1
                found = T.min(T.max(T.Cast("int64", ids[row]), T.int64(0)), last)
                T.buffer_store(self.rows, found, [number])

    def value(self, inputs: Inputs, centred: bool, at: Expr) -> Expr:
        """Element of the row: of the inputs' sum, or moved by the mean."""
        if centred:
            return self.line[at] - self.mean[0]
        rows = [array[self.rows[number], at] for number, (array, _) in enumerate(inputs)]
        return reduce(add, [T.Cast("float32", element) for element in rows])

    def term(self, centred: bool, at: Expr) -> Expr:
        """What an element adds to the sum."""
        return self.line[at] * self.line[at] if centred else self.line[at]

    def add_up(self) -> None:
        """Emit the sum of all vectors and of ``single`` into ``total[0]``."""
        size = SUMS * self.lanes
        while size > 1:
            size //= 2
            low, high = (T.Ramp(at, 1, size) if size > 1 else at for at in (0, size))
            T.buffer_store(self.total, self.total[low] + self.total[high], [low])
        T.buffer_store(self.total, self.total[0] + self.single[0], [0])

    def result(self, gamma: Expr, beta: Expr, at: Expr) -> Expr:
        """Element of the output."""
        scaled = self.line[at] * self.factor[0] * T.Cast("float32", gamma[at])
        return T.Cast(self.dtype, scaled + T.Cast("float32", beta[at]))


@T.meta_class
class Norm:
    """All rows, by one thread or by several."""

    def __init__(self, form: NormForm) -> None:
        self.form, self.threads = form, form.threads

    @T.inline
    def run(self, inputs, gamma, beta, out, t):
        if t * self.form.width < SERIAL_ELEMENTS:
            alone = NormRow(self.form, len(inputs))
            alone.run(inputs, gamma, beta, out, T.int64(0), t)
        else:
            for chunk in T.parallel(self.threads):
                first: T.let = t * chunk // self.threads
                row = NormRow(self.form, len(inputs))
                row.run(inputs, gamma, beta, out, first, t * (chunk + 1) // self.threads)
