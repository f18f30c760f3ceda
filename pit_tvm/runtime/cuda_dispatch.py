"""One call on a GPU: detect, select, launch, all on the current torch stream, nothing waited for.

PIT, SOSP'23, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from ..errors import ShapeError, mismatch
from ..reference.index import index_lists
from ..selection.gpu_host import launched_by_host
from ..structs import Candidate, Groups, Index, MicroTile, Plan, Tile
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .bind import Layout, told_pattern
from .cuda_arrays import activated, dense_product, empty, start_library, synchronize, zero
from .cuda_bind import CudaBinder, CudaBound
from .cuda_call import CudaCall
from .cuda_detect import CudaDetector
from .cuda_detect_ids import Find
from .cuda_fill import CudaFill, stepped
from .cuda_fill_kernels import fill_module
from .cuda_form import RowsForm, rows_form
from .cuda_modules import cached_modules, detection_modules
from .cuda_planner import CudaPlanner
from .cuda_repeat import CudaRepeats, Repeat
from .cuda_rows import ROW_STEP, RowsKernels
from .cuda_view import CudaView, view_of
from .cuda_workspace import CudaIndex, CudaWorkspace, listed
from .detect import Detector
from .dispatch import Clock, check_asked
from .kernel_cache import KernelCache
from .program import Program
from .promise import asked_for, check_zeros, zeros_asked_for
from .torch_arrays import check_written


class CudaDispatcher:
    """Runs one program on one GPU target; threads may share it. ``form``: what its kernels have to
    do, by `rows_form` where it is None."""

    planner: CudaPlanner
    kernels: Any
    flip = False  # whether kernels compute the product turned: rhs is what they gather
    turns = False  # whether an operand is turned first, so that every extent is one of rows
    matrix = False  # whether kernels take the dense operand without a dimension of groups

    def __init__(
        self,
        program: Program,
        target: TargetInfo,
        store: TileStore,
        cache: KernelCache,
        *,
        deterministic: bool,
        dead: str,
        form: RowsForm | None = None,
    ) -> None:
        self.program, self.target, self.dead = program, target, dead
        self.deterministic = deterministic
        self.form = form or rows_form(program)
        self.binder = CudaBinder(program, self)
        self.modules = cached_modules(cache, target.isa)
        self._prepare(store, cache)
        self._zeroes = self.planner.zeroes
        self.options = self.form.options | ({"fills": True} if self._zeroes else {})
        self.checks_zeros = zeros_asked_for(program)
        self.detector = CudaDetector(self.modules, checked=asked_for(), clusters=target.clusters)
        self.fill, self.memory = CudaFill(self.modules), CudaWorkspace()
        # By whether tensor cores may compute float32, which decides what was recorded.
        self._repeats = {
            tf32: CudaRepeats(cache, self.detector.report, self.planner)
            for tf32 in (() if asked_for() else (False, True))
        }
        self._fills = self.planner.fills
        self._no_groups = program.spec == Groups(0)
        names = [p.name for p in program.inputs]
        form = self.form
        self._places = [
            names.index(name) if name else None for name in (form.lhs, form.rhs, form.bias)
        ]
        self._gathered = names.index(form.rhs if self.flip else form.lhs)

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        """The planner and the kernels of the family."""
        self.planner = CudaPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = RowsKernels(cache, self.target.isa)

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
        if getattr(out, "requires_grad", False):  # however like an earlier call this one is
            check_written(self.program.output.name, out)
        if clock is None and choose is None:
            made, done = self.repeated(arrays, sparsity, out)
            if done is not None:
                return made, done
        given = out
        bound = self.binder.bind_cuda(arrays, sparsity, out)
        call, inputs, value, out, _ = bound
        if self.checks_zeros:
            self._check_zeros(inputs, value)
        if clock is not None:
            _lap(clock, call.device)
        if call.empty:
            return out, None
        if self._no_groups:  # nothing lives, and no kernel has no groups
            if self.dead == "zero":
                zero(out)
            return out, None
        plan = self.planner.plan_of(call)
        if call.hosted:  # a graph captured next may want a dense product
            start_library(call.device)
        if clock is not None:
            clock.select_us = _lap(clock, call.device)
        choice = plan.choice if choose is None else choose(plan)
        counts = self._compute(choice, bound, clock)
        if self._repeats and choice is plan.choice and inputs is arrays:
            again = partial(self._compute, choice, bound)
            outs, planned = (given, out), (call, plan, counts)
            self._repeats[call.tf32].keep(arrays, sparsity, outs, planned, again)
        return out, plan

    def repeated(self, arrays: Sequence[Any], sparsity: Any, out: Any) -> tuple[Any, Plan | None]:
        """As `run`, of a call like one before, unchecked; no plan where it goes the long way."""
        if not self._repeats:
            return out, None
        made, repeat = self._repeats[self.planner.tf32()].run(arrays, sparsity, out)
        if repeat is not None and repeat.dense:
            made = self._dense_again(repeat, arrays, made)
            if self.planner.dense_fills:
                _, dead = self._find(repeat.call, sparsity, True)(sparsity, self.memory.take)
                assert dead is not None
                self.fill.fill_rows(made, dead)
        return made, None if repeat is None else repeat.plan

    def _compute(self, choice: Candidate, bound: CudaBound, clock: Clock | None = None) -> Any:
        """Detect, and launch the product of a choice; returns how much lives, a CUDA tensor, where
        that was counted for the product."""
        call, inputs, value, out, _ = bound
        index, dead = self._indices(call, value, choice.micro_tile)
        if clock is not None:
            clock.index_us = _lap(clock, call.device)
        if index is None or choice.kind == "dense":
            self._dense(inputs, out)
            if dead is not None:
                self.fill.fill_rows(out, dead)
        else:
            if self._fills and not self._zeroes:
                self._fill_dead(dead, inputs, value, out)
                dead = None
            self._product(choice, index, bound, dead)
        if clock is not None:
            clock.kernel_us = _lap(clock, call.device)
        return index.count if type(index) is CudaIndex and choice.kind == "pit" else None

    def explain(
        self, arrays: Sequence[Any], sparsity: Any, sizes: dict[str, int], library: str
    ) -> Plan:
        """The plan of a pattern, decided anew, without running it; waits for the pattern, which is
        checked as on CPUs."""
        check_asked({} if arrays else sizes, library)
        layout = (
            self.binder.layout_of_inputs(arrays)
            if arrays
            else self.binder.layout_of(sizes, "torch")
        )
        spec, names = self.program.spec, [p.name for p in self.program.inputs]
        named = dict(zip(names, arrays, strict=False))
        told = told_pattern(self.program, named, sparsity)
        host = told.detach().cpu() if hasattr(told, "detach") else told
        counts: list[int] = []
        for micro_tile in self._micro_tiles(layout):
            of = (layout.operand, micro_tile)
            read = Detector("llvm", checked=asked_for()).read(spec, host, *of)
            counts += (self._number(ids) for ids in index_lists(spec, read, *of))
        plan = self.planner.decide(layout, tuple(counts))
        return launched_by_host(plan) if self.planner.dense_fills else plan

    def _number(self, ids: npt.NDArray[np.int64]) -> int:
        """The count that plans go by, of live positions of one slot."""
        return len(ids)

    def pack(self, name: str, array: Any) -> Any:
        """The weight as it is: these kernels read it as it is stored."""
        form = self.form
        dense = form.lhs if form.rhs == self.program.operand else form.rhs
        if name != dense:
            raise ShapeError(mismatch("pack", f"the dense operand ({dense})", name))
        return array

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls of these sizes may need, however much is live; needs no GPU."""
        layout = self.binder.layout_of(sizes, "torch")
        for name, make in all_modules(self.target.clusters).items():
            self.modules(name, make)
        for tile in self.planner.likely_tiles(layout):
            self._build_tile(tile)
        self.build_moving()
        if self._repeats:
            self._repeats[False].build()

    def build_moving(self) -> None:
        """Compile what moves operands before a product, or a product afterwards."""

    def _build_tile(self, tile: Tile) -> None:
        """Compile what calls run of a tile."""
        self.kernels.product(tile, self.form.groups, **self.options)

    # -- arguments

    def _operands(self, inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        """lhs, rhs and bias, None if there is none."""
        lhs, rhs, bias = self._places
        return (
            None if lhs is None else inputs[lhs],
            None if rhs is None else inputs[rhs],
            None if bias is None else inputs[bias],
        )

    def _beside(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """The operand that is not gathered, and the bias, None if there is none."""
        lhs, rhs, bias = self._operands(inputs)
        return (lhs if self.flip else rhs), bias

    def _check_zeros(self, inputs: Sequence[Any], value: Any) -> None:
        names = [p.name for p in self.program.inputs]
        operand, pattern = inputs[names.index(self.program.operand)].detach(), value.detach()
        pattern = pattern.float() if pattern.is_floating_point() else pattern
        check_zeros(self.program, operand.float().cpu().numpy(), pattern.cpu().numpy())

    # -- select and detect

    def _micro_tiles(self, layout: Layout) -> tuple[MicroTile, ...]:
        """All that is counted."""
        return (self._micro_tile(layout),)

    def _micro_tile(self, layout: Layout) -> MicroTile:
        """What detection looks for."""
        return self.form.route.micro_tile

    def _indices(
        self, call: CudaCall, value: Any, gathered: MicroTile | None
    ) -> tuple[CudaIndex | None, CudaIndex | None]:
        """Lists of live and of dead rows, None where nobody reads them; ``gathered`` is what the
        product gathers, None for a dense one."""
        learns = call.watch.due()  # a dense pattern may become sparser
        dense = gathered is None
        split = self.planner.dense_fills if dense else self._fills and not self.form.groups
        if dense and not split and not learns:
            return None, None
        found = self._find(call, value, split)(value, self.memory.take)
        if learns:
            call.watch.report(found[0].count, self.detector.report)
        return found

    def _find(self, call: CudaCall, value: Any, split: bool) -> Find:
        """The detection of such calls, with the dead rows if ``split``."""
        find = call.finds.get(split)
        if find is None:
            asked = (call.layout.operand, self._micro_tile(call.layout), self.deterministic, split)
            find = call.finds[split] = self.detector.prepared(self.program.spec, value, *asked)
        return find

    # -- launch

    def _fill_dead(self, dead: Index | None, inputs: Sequence[Any], value: Any, out: Any) -> None:
        """What the pattern promises of rows that do not live."""
        if self.form.groups and self.dead == "zero":
            self.fill.clear_ungrouped(out, value, self.form.groups)
        if dead is None:
            return
        bias = self._operands(inputs)[2]  # a kernel of rows zeroes them itself
        self.fill.fill_rows(out, dead, activated(bias, self.form.act))

    def _dense(self, inputs: Sequence[Any], out: Any) -> Any:
        """The product of everything, into ``out`` or what torch makes, if that is None."""
        lhs, rhs, bias = self._operands(inputs)
        form = self.form
        left = lhs.t() if form.transposed else lhs
        return dense_product(left, rhs, bias, form.act, out, transpose_rhs=form.rhs_layout == "nk")

    def _dense_again(self, repeat: Repeat, inputs: Sequence[Any], out: Any) -> Any:
        """That of a repeated call, whose output torch may make."""
        return self._dense(inputs, out)

    def _product(
        self, choice: Candidate, index: CudaIndex, bound: CudaBound, dead: CudaIndex | None = None
    ) -> None:
        """The product of a choice, whose kernel zeroes the rows in ``dead``, if those are given."""
        call, inputs, _, out, place = bound
        kernel, rest = self._known_kernel(call, choice), place.rest
        if rest is None and self.turns:
            place.aligned = place.aligned and _even(call.layout)
        if not place.aligned:
            self._unaligned(kernel, index, dead, inputs, out)
            return
        if rest is None:
            rest = place.rest = self._rest(call, inputs, out)
        own, lists = self._own(inputs[self._gathered], index), listed(index, dead)
        if call.fresh:
            kernel(own, *lists, *rest, out)
        else:
            kernel(own, *lists, *rest)

    def _own(self, sparse: Any, index: CudaIndex) -> Any:
        """What the kernel gathers from."""
        return sparse

    def _known_kernel(self, call: CudaCall, choice: Candidate) -> Callable[..., Any]:
        """The kernel of a choice; that of the last one is at hand."""
        known = call.product
        if known is None or known[0] is not choice.tile:
            known = call.product = (choice.tile, self._kernel(choice))
        return known[1]

    def _kernel(self, choice: Candidate) -> Callable[..., Any]:
        if choice.tile is None:
            raise ShapeError(mismatch("choice", "a candidate with a tile", choice))
        return self.kernels.product(choice.tile, self.form.groups, **self.options)

    def _rest(self, call: CudaCall, inputs: Sequence[Any], out: Any) -> tuple[CudaView, ...]:
        """The dense operand and the bias with a dimension of groups, also where there are none,
        unless it is a ``matrix``, and the output that was passed."""
        dtype, (dense, bias) = self.form.dtype, self._beside(inputs)
        whole = self.form.groups or self.matrix
        views = [view_of(dense, dtype, dense.shape if whole else (1, *dense.shape))]
        if bias is not None:
            views.append(view_of(bias, dtype, bias.shape if self.form.groups else (1, *bias.shape)))
        if not call.fresh:
            views.append(view_of(out, dtype))
        return tuple(views)

    def _unaligned(
        self,
        kernel: Callable[..., Any],
        index: CudaIndex,
        dead: CudaIndex | None,
        inputs: Sequence[Any],
        out: Any,
    ) -> None:
        """Rows that do not begin at 16 bytes: through padded copies, the output's both ways."""
        lhs, rhs, bias = self._operands(inputs)
        lhs = self._own(lhs, index)
        if not self.form.groups:
            rhs = rhs.unsqueeze(0)
            bias = None if bias is None else bias.unsqueeze(0)
        n, k = stepped((out.shape[1], lhs.shape[1]))
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
        kernel(wide["lhs"], *listed(index, dead), wide["rhs"], *rest)
        self.fill.pad_copy(wide["out"], out)


def all_modules(clusters: bool = True) -> dict[str, Callable[[], tvm.IRModule]]:
    """Every module but the products, by the name under which it is kept, for GPUs with
    ``clusters`` of CTAs or without."""
    return {**detection_modules(clusters), "cuda-fill": fill_module}


def _even(layout: Layout) -> bool:
    """Whether rows of all matrices are whole pieces of 16 bytes, also of those that are turned."""
    return not any(size % ROW_STEP for shape in (*layout.shapes, layout.output) for size in shape)


def _lap(clock: Clock, device: int) -> float:
    """A lap that ends when the device has done what was asked so far."""
    synchronize(device)
    return clock.lap()
