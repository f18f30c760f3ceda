"""One call on a GPU: detect, select, launch, all on the current torch stream, nothing waited for.

PIT, SOSP'23, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm

from ..errors import DTypeError, ShapeError, mismatch
from ..reference.index import index_lists
from ..structs import Candidate, Groups, Index, Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .bind import Layout, told_pattern
from .cuda_arrays import activated, as_cuda, dense_product, empty, synchronize, zero
from .cuda_bind import CudaBinder, CudaBound
from .cuda_detect import CudaDetector
from .cuda_fill import CudaFill, fill_module
from .cuda_form import rows_form
from .cuda_modules import cached_modules, detection_modules
from .cuda_planner import CudaPlanner
from .cuda_rows import ROW_STEP, RowsKernels
from .cuda_watch import CountWatch
from .cuda_workspace import CudaWorkspace
from .dispatch import Clock
from .kernel_cache import KernelCache
from .program import Program
from .promise import asked_for, check_zeros, zeros_asked_for


class CudaDispatcher:
    """Runs one program on one GPU target; threads may share it."""

    def __init__(
        self,
        program: Program,
        target: TargetInfo,
        store: TileStore,
        cache: KernelCache,
        *,
        deterministic: bool,
        dead: str,
    ) -> None:
        self.program, self.target, self.dead = program, target, dead
        self.deterministic = deterministic
        self.form = rows_form(program)
        self.binder = CudaBinder(program, self)
        self.planner = CudaPlanner(program, self.form, target, store, dead)
        self.kernels = RowsKernels(cache, target.isa)
        self.options = self.form.options
        self.modules = cached_modules(cache, target.isa)
        self.checks_zeros = zeros_asked_for(program)
        self.detector = CudaDetector(self.modules, checked=asked_for())
        self.fill, self.memory = CudaFill(self.modules), CudaWorkspace()
        self.watch = CountWatch()
        self._products: dict[Tile, Callable[..., Any]] = {}

    # -- the call

    def run(
        self,
        arrays: Sequence[Any],
        sparsity: Any,
        out: Any,
        clock: Clock | None = None,
        choose: Callable[[Plan], Candidate] | None = None,
    ) -> tuple[Any, Plan | None]:
        """Compute into ``out`` (None: a new tensor); returns it and the plan, None if empty.

        ``choose`` picks the candidate of a plan that runs (None: the cheapest).
        """
        bound = self.binder.bind_cuda(arrays, out)
        layout = bound.layout
        if out is None:
            out = empty(bound.arrays[self.form.lhs], layout.output)
        value = self._value(bound, sparsity)
        if self.checks_zeros:
            self._check_zeros(bound, value)
        _lap(clock)
        if 0 in layout.output:
            return out, None
        if self.program.spec == Groups(0):  # nothing lives, and no kernel has no groups
            if self.dead == "zero":
                zero(out)
            return out, None
        plan = self.planner.plan(layout, self.watch.counts(layout.key))
        if clock is not None:
            clock.select_us = _lap(clock)
        choice = plan.choice if choose is None else choose(plan)
        learns = self.watch.due(layout.key)
        if choice.kind == "dense":
            self._dense(bound, out)
            if learns:  # the pattern may have become sparser
                self.watch.report(layout.key, self._detect(layout, value, False)[0].count)
        else:
            index, dead = self._detect(layout, value, self._needs_dead())
            if learns:
                self.watch.report(layout.key, index.count)
            if clock is not None:
                clock.index_us = _lap(clock)
            self._fill_dead(dead, value, bound, out)
            self._product(choice, index, bound, out)
        if clock is not None:
            clock.kernel_us = _lap(clock)
        return out, plan

    def explain(
        self, arrays: Sequence[Any], sparsity: Any, sizes: dict[str, int], library: str
    ) -> Plan:
        """The plan of a pattern, decided anew, without running it; waits for the pattern."""
        layout = (
            self.binder.bind_cuda(arrays, None).layout
            if arrays
            else self.binder.layout_of(sizes, "torch")
        )
        spec, named = self.program.spec, dict(zip(self._names(), arrays, strict=False))
        told = told_pattern(self.program, named, sparsity)
        host = told.cpu() if hasattr(told, "cpu") else told
        lists = index_lists(spec, np.asarray(host), layout.operand, self.form.route.micro_tile)
        return self.planner.decide(layout, tuple(len(ids) for ids in lists))

    def pack(self, name: str, array: Any) -> Any:
        """The weight as it is: these kernels read it as it is stored."""
        if name != self.form.rhs:
            raise ShapeError(mismatch("pack", f"the dense operand ({self.form.rhs})", name))
        return array

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls of these sizes may need, however much is live; needs no GPU."""
        layout = self.binder.layout_of(sizes, "torch")
        for name, make in all_modules().items():
            self.modules(name, make)
        for tile in self.planner.likely_tiles(layout):
            self.kernels.product(tile, self.form.groups, **self.options)

    # -- arguments

    def _names(self) -> list[str]:
        return [p.name for p in self.program.inputs]

    def _value(self, bound: CudaBound, sparsity: Any) -> Any:
        value = as_cuda("sparsity", told_pattern(self.program, bound.arrays, sparsity))
        if value.device != bound.arrays[self.form.lhs].device:
            expected = f"the device of {self.form.lhs}"
            raise DTypeError(mismatch("sparsity", expected, value.device, "pass .cuda()"))
        return value

    def _check_zeros(self, bound: CudaBound, value: Any) -> None:
        lhs = bound.arrays[self.form.lhs].float().cpu().numpy()
        pattern = value.float() if value.is_floating_point() else value
        check_zeros(self.program, lhs, pattern.cpu().numpy())

    # -- detect

    def _needs_dead(self) -> bool:
        return not self.form.groups and (self.program.spec.promises_zero or self.dead == "zero")

    def _detect(self, layout: Layout, value: Any, split: bool) -> tuple[Index, Index | None]:
        spec, micro = self.program.spec, self.form.route.micro_tile
        options: dict[str, Any] = {"deterministic": self.deterministic, "take": self.memory.take}
        dead = None
        if split:
            index, dead = self.detector.detect_split(spec, value, layout.operand, micro, **options)
        else:
            index = self.detector.detect(spec, value, layout.operand, micro, **options)
        return index, dead

    # -- launch

    def _fill_dead(self, dead: Index | None, value: Any, bound: CudaBound, out: Any) -> None:
        """What the pattern promises of rows that do not live."""
        if self.form.groups and self.dead == "zero":
            dead = self.detector.detect_ungrouped(value, self.form.groups, self.memory.take)
        if dead is None:
            return
        row = None
        if self.program.spec.promises_zero and self.form.bias:
            row = activated(bound.arrays[self.form.bias], self.form.act)
        self.fill.fill_rows(out, dead, row)

    def _dense(self, bound: CudaBound, out: Any) -> None:
        form, arrays = self.form, bound.arrays
        bias = arrays[form.bias] if form.bias else None
        transposed = form.rhs_layout == "nk"
        dense_product(
            arrays[form.lhs], arrays[form.rhs], bias, form.act, out, transpose_rhs=transposed
        )

    def _product(self, choice: Candidate, index: Index, bound: CudaBound, out: Any) -> None:
        form, arrays = self.form, bound.arrays
        lhs, rhs = arrays[form.lhs], arrays[form.rhs]
        bias = arrays[form.bias] if form.bias else None
        if choice.tile is None:
            raise ShapeError(mismatch("choice", "a candidate with a tile", choice))
        if not form.groups:
            rhs = rhs.unsqueeze(0)
            bias = None if bias is None else bias.unsqueeze(0)
        kernel = self._products.get(choice.tile)
        if kernel is None:
            kernel = self.kernels.product(choice.tile, form.groups, **self.options)
            self._products[choice.tile] = kernel
        if bound.aligned:
            rest = (out,) if bias is None else (bias, out)
            kernel(lhs, index.ids, index.count, rhs, *rest)
        else:
            self._unaligned(kernel, index, lhs, rhs, bias, out)

    def _unaligned(
        self, kernel: Callable[..., Any], index: Index, lhs: Any, rhs: Any, bias: Any, out: Any
    ) -> None:
        """Rows that do not begin at 16 bytes: through padded copies, the output's both ways."""
        n, k = (-(-size // ROW_STEP) * ROW_STEP for size in (out.shape[1], lhs.shape[1]))
        sizes = (rhs.shape[0], n, k) if self.form.rhs_layout == "nk" else (rhs.shape[0], k, n)
        wide = {
            "lhs": empty(lhs, (lhs.shape[0], k)),
            "rhs": empty(rhs, sizes),
            "out": empty(out, (out.shape[0], n)),
        }
        zero(wide["rhs"])
        self.fill.pad_copy(lhs, wide["lhs"])
        self.fill.pad_copy(rhs, wide["rhs"][:, : rhs.shape[1]])
        self.fill.pad_copy(out, wide["out"])
        rest = [wide["out"]]
        if bias is not None:
            rest.insert(0, empty(bias, (bias.shape[0], n)))
            self.fill.pad_copy(bias, rest[0])
        kernel(wide["lhs"], index.ids, index.count, wide["rhs"], *rest)
        self.fill.pad_copy(wide["out"], out)


def all_modules() -> dict[str, Callable[[], tvm.IRModule]]:
    """Every module but the products, by the name under which it is kept."""
    return {**detection_modules(), "cuda-fill": fill_module}


def _lap(clock: Clock | None) -> float:
    """A lap that ends when the device has done what was asked so far."""
    if clock is None:
        return 0.0
    synchronize()
    return clock.lap()
