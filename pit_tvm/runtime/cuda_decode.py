"""Calls of products that sometimes have a few rows, as while a model writes text.

For up to `MOST_ROWS` rows the weights of live columns are read and no others: one kernel finds the
columns and multiplies. More rows go the way of the m-axis family. Dense is a candidate for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..errors import ShapeError, mismatch
from ..op.matmul import matmul
from ..selection.gpu_few_rows import select_few_rows
from ..structs import Candidate, MicroTile, Plan, Tile, Values
from ..tile_db.store import TileStore
from .bind import Layout, PackedOperand
from .cuda_arrays import check_tensor
from .cuda_bind import ALIGNMENT, CudaBound
from .cuda_call import CudaCall
from .cuda_dispatch import CudaDispatcher
from .cuda_few_rows import MOST_ROWS, STEP, CudaFewRows, tile_for
from .cuda_form import ColumnsForm, RowsForm, rows_form
from .cuda_planner import CudaPlanner, dense_of
from .cuda_workspace import CudaIndex
from .kernel_cache import KernelCache
from .program import Program, analyse

FAMILY = "few-rows-cuda"


def decodes(program: Program, form: RowsForm) -> bool:
    """Whether a program finds its zeros itself, in the rows of its left operand."""
    return isinstance(program.spec, Values) and not isinstance(form, ColumnsForm)


class DecodePlanner(CudaPlanner):
    """Chooses plans for one program whose weight is stored [k, n]."""

    def few(self, layout: Layout) -> bool:
        """Whether a call has so few rows, and rows of the weight whole pieces of 16 bytes."""
        m, n = layout.output
        return m <= MOST_ROWS and n % STEP == 0

    def micro_tile(self, layout: Layout) -> MicroTile:
        """What is looked for: live columns of a few rows, else live rows."""
        form = self.form
        if not self.few(layout):
            return form.route.micro_tile
        con = self.program.contraction
        return MicroTile(form.lhs, con.reduce if con else "", 1, (0, 1))

    def _guessed(self, layout: Layout, fresh: bool) -> Plan:
        found = super()._guessed(layout, fresh)
        if not self.few(layout):
            return found
        return replace(found, reason=f"{found.reason}; half taken to live: no count has arrived")

    def decide(self, layout: Layout, counts: tuple[int, ...], fresh: bool = True) -> Plan:
        """Algorithm 1 for live columns of a few rows, else for live rows, without the cache."""
        if not self.few(layout):
            return super().decide(layout, counts, fresh)
        m, n = layout.output
        dense, tile = dense_of(m, n, self._rows(layout), self.form.act), self.tile(m, n)
        return select_few_rows(self.micro_tile(layout), tile, sum(counts), dense, self.rates())

    def tile(self, rows: int, n: int) -> Tile:
        """The tile that plans name."""
        found = tile_for(self.form.dtype, rows, n)
        sizes = (found.rows, found.columns, found.piece)
        return Tile(FAMILY, self.target.isa, found.dtype, *sizes)

    def likely_tiles(self, layout: Layout) -> tuple[Tile, ...]:
        """Those of the m-axis family."""
        return () if self.few(layout) else super().likely_tiles(layout)

    def _rows(self, layout: Layout) -> int:
        """The extent that counts are of."""
        return layout.operand[1 if self.few(layout) else 0]


class DecodeDispatcher(CudaDispatcher):
    """Runs one program whose weight is stored [k, n]; threads may share it."""

    planner: DecodePlanner

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        super()._prepare(store, cache)
        self.planner = DecodePlanner(self.program, self.form, self.target, store, self.dead)
        self.few = CudaFewRows(self.modules)

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls of these sizes may need, however much is live; needs no GPU."""
        super().build(sizes)
        layout = self.binder.layout_of(sizes, "torch")
        if self.planner.few(layout):
            tile = tile_for(self.form.dtype, *layout.output)
            self.few.kernel(tile, bool(self.form.bias), self.form.act)

    def _micro_tile(self, layout: Layout) -> MicroTile:
        return self.planner.micro_tile(layout)

    def _indices(self, call: CudaCall, value: Any, gathered: MicroTile | None) -> tuple[Any, Any]:
        """For a few rows the operand itself, in which the kernel looks."""
        if not self.planner.few(call.layout):
            return super()._indices(call, value, gathered)
        super()._indices(call, value, None)  # now and then, for the count of later plans
        return None if gathered is None else value, None

    def _product(
        self, choice: Candidate, index: Any, bound: CudaBound, dead: CudaIndex | None = None
    ) -> None:
        call, inputs, _, out, _ = bound
        if not self.planner.few(call.layout):
            super()._product(choice, index, bound, dead)
            return
        lhs, rhs, bias = self._operands(inputs)
        if rhs.data_ptr() & ALIGNMENT:
            self._dense(inputs, out)
        else:
            self.few(lhs, rhs, bias, out, self.form.act)


class PackingDispatcher(CudaDispatcher):
    """Runs one program whose weight is stored [n, k]: as the m-axis family, or as a
    `DecodeDispatcher` where ``pack`` has made a copy [k, n] of the weight; threads may share it."""

    @cached_property
    def _turned(self) -> DecodeDispatcher:
        program = _stored_kn(self.program, self.form)
        return DecodeDispatcher(
            program,
            self.target,
            self.planner.store,
            self.kernels.cache,
            deterministic=self.deterministic,
            dead=self.dead,
            form=rows_form(program),
        )

    def pack(self, name: str, array: Any) -> PackedOperand:
        """A copy of the weight, turned.

        Raises
        ------
        ShapeError, DTypeError
            Not the weight, or not such a tensor.
        """
        super().pack(name, array)
        check_tensor(name, array, (self.form.dtype,))
        known = self.program.input(name).shape
        sizes = zip(known, array.shape, strict=False)
        if array.dim() != 2 or any(isinstance(want, int) and want != got for want, got in sizes):
            raise ShapeError(mismatch(name, f"shape {list(known)}", f"shape {list(array.shape)}"))
        return PackedOperand(name, array, array.t().contiguous(), self)

    def run(self, arrays: Sequence[Any], *call: Any, **how: Any) -> tuple[Any, Plan | None]:
        """As `CudaDispatcher.run`, with the weight as it is or packed."""
        given = self._opened(arrays)
        if given is None:
            return super().run(arrays, *call, **how)
        return self._turned.run(given, *call, **how)

    def explain(self, arrays: Sequence[Any], *call: Any) -> Plan:
        """As `CudaDispatcher.explain`; without arrays the weight is taken to be packed."""
        given = self._opened(arrays) if arrays else ()
        if given is None:
            return super().explain(arrays, *call)
        return self._turned.explain(given, *call)

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls of these sizes may need, the weight packed or not; needs no GPU."""
        super().build(sizes)
        self._turned.build(sizes)

    def _opened(self, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """What the other dispatcher takes; None if no weight is packed."""
        if len(arrays) != len(self.program.inputs):
            return None
        lhs, packed, bias = self._operands(arrays)
        if not isinstance(packed, PackedOperand):
            return None
        if packed.owner is not self:
            expected = f"{self.form.rhs} packed by this operator"
            raise ShapeError(mismatch(self.form.rhs, expected, "packed by another one"))
        return (lhs, packed.packed) if bias is None else (lhs, packed.packed, bias)


def _stored_kn(program: Program, form: RowsForm) -> Program:
    """The same product with its weight stored [k, n]; names of symbolic extents stay."""
    n, k = program.input(form.rhs).shape
    rows = program.input(form.lhs).shape[0]
    m, n, k = (size if isinstance(size, int) else None for size in (rows, n, k))
    act = None if form.act == "none" else form.act
    tensors = matmul(m, n, k, dtype=form.dtype, bias=bool(form.bias), activation=act)
    return analyse(tensors, {"lhs": program.spec})


def decode_dispatcher(program: Program, *parts: Any, form: RowsForm, **options: Any) -> Any:
    """The dispatcher of a program that `decodes`; arguments and errors as `CudaDispatcher`."""
    made = DecodeDispatcher if form.rhs_layout == "kn" else PackingDispatcher
    return made(program, *parts, form=form, **options)
