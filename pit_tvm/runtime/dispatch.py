"""One call: detect, select, launch. PIT, SOSP'23, section 3."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import PatternError, ShapeError, mismatch
from ..reference.index import dense_mask
from ..schedules.contraction_space import BLOCKS
from ..structs import BitMask, BlockMask, Candidate, Groups, Index, Plan, Values
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .arrays import as_numpy, as_tensor, check_overlap, empty_like_kind, kind, library_matmul
from .bind import Bound, PackedOperand, bind, resolve
from .detect import Detector
from .detect_workspace import Workspace
from .kernel_cache import KernelCache
from .kernels import Kernels
from .planner import Pattern, Planner, counted, sampled
from .program import Program, Route

_SAMPLED_ROWS = 32


@dataclass
class Clock:
    """Microseconds of the steps of one call."""

    select_us: float = 0.0
    index_us: float = 0.0
    kernel_us: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def lap(self) -> float:
        """Microseconds since the last lap."""
        now = time.perf_counter()
        passed, self.started = 1e6 * (now - self.started), now
        return passed


class Dispatcher:
    """Runs one program on one CPU target; threads may share it."""

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
        self.program, self.target = program, target
        self.deterministic, self.dead = deterministic, dead
        self.kernels = Kernels(program, target, cache)
        self.planner = Planner(program, target, store)
        self.detector = Detector(target.tvm_target, self.kernels.for_detection)
        self._local = threading.local()

    # -- the call

    def run(
        self, arrays: Sequence[Any], sparsity: Any, out: Any, clock: Clock | None = None
    ) -> tuple[Any, Plan | None]:
        """Compute into ``out`` (None: a new array); returns it and the plan (None: nothing to do)."""
        clock = clock or Clock()
        bound = bind(self.program.inputs, arrays, self)
        out, target = self._output(bound, out)
        value = self._value(bound, sparsity)
        if 0 in target.shape:
            return out, None
        if os.environ.get("PIT_TVM_CHECK") == "1":
            self._check_promise(bound, value)
        clock.lap()
        plan, index = self._plan(bound, value, clock)
        self._execute(plan.choice, index, bound, target)
        clock.kernel_us += clock.lap()
        return out, plan

    def explain(self, arrays: Sequence[Any], sparsity: Any, sizes: dict[str, int] | None) -> Plan:
        """The plan of a pattern, undecided before, without running it."""
        if arrays:
            bound = bind(self.program.inputs, arrays, self)
        else:
            bound = Bound({}, {}, {}, dict(sizes or {}))
        value = self._value(bound, sparsity)
        pattern, _ = self._pattern(bound, value)
        packed = not arrays or bool(bound.packed)
        return self.planner.decide(pattern, bound.sizes, self._library(bound, value), packed)

    def pack(self, name: str, array: Any) -> PackedOperand:
        """Pack the dense operand of the contraction once."""
        con = self.program.contraction
        if con is None or name != con.dense:
            dense = con.dense if con else "none: the operator is no contraction"
            raise ShapeError(mismatch("pack", f"the dense operand ({dense})", name))
        param = next(p for p in self.program.inputs if p.name == name)
        shape = tuple(e if isinstance(e, int) else None for e in param.shape)
        tensor = as_tensor(name, array, dtype=param.dtype, shape=shape)
        packed = empty_like_kind(
            np.empty(0), self.kernels.packed_shape(tuple(tensor.shape)), con.accumulator
        )
        if packed.size:
            self.kernels.pack()(tensor, packed)
        return PackedOperand(name, array, packed, self)

    # -- arguments

    def _output(self, bound: Bound, out: Any) -> tuple[Any, Any]:
        param = self.program.output
        shape = resolve(param.shape, bound.sizes)
        if out is None:
            like = bound.arrays[self.program.operand]
            out = empty_like_kind(like, shape, param.dtype)
            return out, as_tensor(param.name, out, dtype=param.dtype, shape=shape)
        tensor = as_tensor(param.name, out, dtype=param.dtype, shape=shape, writable=True)
        check_overlap(param.name, out, bound.arrays)
        return out, tensor

    def _value(self, bound: Bound, sparsity: Any) -> Any:
        """The array that tells the pattern, as numpy's."""
        spec, program = self.program.spec, self.program
        if sparsity is None and isinstance(spec, Values):
            sparsity = bound.arrays.get(program.operand)
        if sparsity is None and isinstance(spec, Groups) and program.contraction:
            sparsity = bound.arrays.get(program.contraction.group)
        if sparsity is None:
            what = f"an array for {type(spec).__name__}"
            raise ShapeError(mismatch("sparsity", what, "none", "pass sparsity=..."))
        if kind_of_list(sparsity):
            return np.asarray(sparsity)
        return as_numpy(sparsity)

    def _check_promise(self, bound: Bound, value: Any) -> None:
        spec, name = self.program.spec, self.program.operand
        if not spec.promises_zero:
            return
        operand = as_numpy(bound.arrays[name])
        wrong = np.count_nonzero(operand[~dense_mask(spec, value, operand.shape)])
        if wrong:
            what = f"{name} outside its pattern"
            raise PatternError(mismatch(what, "zeros", f"{wrong} other values"))

    # -- detect and select

    def _plan(self, bound: Bound, value: Any, clock: Clock) -> tuple[Plan, Index | None]:
        pattern, indices = self._pattern(bound, value)
        lap = clock.lap()
        early = bool(indices)
        clock.index_us, clock.select_us = (lap, 0.0) if early else (0.0, lap)
        library = self._library(bound, value)
        plan = self.planner.plan(pattern, bound.sizes, library, bool(bound.packed))
        clock.select_us += clock.lap()
        if plan.choice.kind == "dense":
            return plan, None
        micro_tile = plan.choice.micro_tile
        index = indices.get(micro_tile)
        if index is None:
            index = self._detect(bound, value, micro_tile)
            clock.index_us += clock.lap()
        return plan, index

    def _pattern(self, bound: Bound, value: Any) -> tuple[Pattern, dict[Any, Index]]:
        """The pattern, and the indices that had to be built to know it."""
        program, shape = self.program, self._operand_shape(bound)
        if not program.spec.promises_zero:
            micro_tile = program.routes[0].micro_tile
            index = self._detect(bound, value, micro_tile)
            live = int(index.count.sum())
            return counted(program, live, shape[micro_tile.dim]), {micro_tile: index}
        if program.contraction is None:
            return self._exact(bound, value, program.routes)
        densities = self.detector.sample(program.spec, value, shape)
        return sampled(program, densities, self._live_rows(value)), {}

    def _exact(
        self, bound: Bound, value: Any, routes: Sequence[Route]
    ) -> tuple[Pattern, dict[Any, Index]]:
        shape = self._operand_shape(bound)
        indices = {r.micro_tile: self._detect(bound, value, r.micro_tile, fresh=True) for r in routes}
        covered = []
        for micro_tile, index in indices.items():
            total = index.count.size * shape[micro_tile.dim]
            covered.append(float(index.count.sum()) / total if total else 0.0)
        return Pattern(tuple(covered), tuple(int(c * 1024) for c in covered)), indices

    def _detect(self, bound: Bound, value: Any, micro_tile: Any, fresh: bool = False) -> Index:
        return self.detector.detect(
            self.program.spec,
            value,
            self._operand_shape(bound),
            micro_tile,
            deterministic=self.deterministic,
            workspace=None if fresh else self._workspace(),
        )

    def _live_rows(self, value: np.ndarray) -> float:
        """Share of rows with any live element, from a few of them."""
        con, spec = self.program.contraction, self.program.spec
        if con is None or isinstance(spec, BitMask) and con.sparse_axes[-1] == con.row:
            return 1.0
        row, depth = con.sparse_axes.index(con.row), con.sparse_axes.index(con.reduce)
        size = value.shape[row]
        step = max(1, size // _SAMPLED_ROWS)
        chosen = np.moveaxis(value, row, 0)[step // 2 :: step]
        depth = depth + 1 if depth < row else depth
        return float(np.count_nonzero(chosen.any(axis=depth))) / max(
            1, chosen.size // chosen.shape[depth]
        )

    def _operand_shape(self, bound: Bound) -> tuple[int, ...]:
        program = self.program
        param = next(p for p in program.inputs if p.name == program.operand)
        return resolve(param.shape, bound.sizes)

    def _library(self, bound: Bound, value: Any) -> str:
        return "torch" if any(kind(a) == "torch" for a in bound.arrays.values()) else "numpy"

    def _workspace(self) -> Workspace:
        if not hasattr(self._local, "workspace"):
            self._local.workspace = Workspace()
        return self._local.workspace

    # -- launch

    def _execute(self, choice: Candidate, index: Index | None, bound: Bound, out: Any) -> None:
        if index is None:
            self._dense(bound, out)
        elif choice.tile is not None and choice.tile.family == BLOCKS:
            self._blocks(choice, index, bound, out)
        else:
            self._sparse(choice, index, bound, out)

    def _dense(self, bound: Bound, out: Any) -> None:
        product = self.program.product
        if product is None:
            self.kernels.dense(None)(*self._inputs(bound, packed=False), out)
            return
        epilogue = self.kernels.epilogue()
        sums = out if epilogue is None else self._sums(bound)
        library_matmul(
            bound.arrays[product.left],
            bound.arrays[product.right],
            sums,
            transpose_lhs=product.transpose_left,
            transpose_rhs=product.transpose_right,
        )
        if epilogue is not None:
            epilogue(sums, *self._others(bound), out)

    def _sparse(self, choice: Candidate, index: Index, bound: Bound, out: Any) -> None:
        route = next(r for r in self.program.routes if r.micro_tile == choice.micro_tile)
        if not route.reduces:
            self._fill_dead(index, bound, out)
        kernel = self.kernels.sparse(route.micro_tile, choice.tile)
        inputs = self._inputs(bound, packed=choice.tile is not None)
        kernel(*inputs, index.ids, index.count, out)

    def _fill_dead(self, index: Index, bound: Bound, out: Any) -> None:
        """Give the output's dead slices what the pattern promises, before live ones overwrite."""
        if self.program.spec.promises_zero:
            kernel = self.kernels.dead()
            if kernel is None:
                self._clear(out)
            else:
                reads = self.kernels.dead_inputs()
                kernel(*(bound.tensors[name] for name in reads), out)
        elif self.dead == "zero":
            self._clear(out)

    def _blocks(self, choice: Candidate, index: Index, bound: Bound, out: Any) -> None:
        epilogue = self.kernels.epilogue()
        sums = out if epilogue is None else self._sums(bound)
        self._clear(sums)
        con = self.program.contraction
        operands = {con.sparse, con.dense} if con else set()
        inputs = self._inputs(bound, packed=True, only=operands)
        self.kernels.sparse(choice.micro_tile, choice.tile)(*inputs, index.ids, index.count, sums)
        if epilogue is not None:
            epilogue(sums, *self._others(bound), out)

    def _inputs(self, bound: Bound, *, packed: bool, only: set[str] | None = None) -> list[Any]:
        """Arguments of a kernel: the inputs in order, the dense operand packed if so."""
        con = self.program.contraction
        out = []
        for param in self.program.inputs:
            if only is not None and param.name not in only:
                continue
            if packed and con is not None and param.name == con.dense:
                out.append(self._packed(bound, param.name))
            elif not (packed and con is not None and param.name == con.group):
                out.append(bound.tensors[param.name])
        return out

    def _packed(self, bound: Bound, name: str) -> Any:
        found = bound.packed.get(name)
        if found is None:
            tensor = bound.tensors[name]
            shape = self.kernels.packed_shape(tuple(int(e) for e in tensor.shape))
            con = self.program.contraction
            found = self._workspace().take("packed", shape, con.accumulator if con else "float32")
            self.kernels.pack()(tensor, found)
        return found

    def _others(self, bound: Bound) -> list[Any]:
        return [bound.tensors[name] for name in self.kernels.epilogue_inputs()]

    def _sums(self, bound: Bound) -> np.ndarray:
        sums = self.program.sums
        return self._workspace().take("sums", resolve(sums.shape, bound.sizes), sums.dtype)

    def _clear(self, array: Any) -> None:
        tensor = tvm_ffi.from_dlpack(array)
        size = int(np.prod(tensor.shape)) * (np.dtype("V2") if str(tensor.dtype) == "bfloat16"
                                             else np.dtype(str(tensor.dtype))).itemsize
        self.kernels.clear()(tensor._create_view((size,), "uint8"))


def kind_of_list(value: Any) -> bool:
    """Whether ``value`` is a plain sequence, as lengths often are."""
    return isinstance(value, (list, tuple))
