"""One call: detect, select, launch. PIT, SOSP'23, section 3."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm_ffi

from ..errors import BackendUnavailable, ShapeError, UnsupportedTarget, mismatch
from ..forks import Threads
from ..memory import aligned_empty
from ..remember import remember
from ..structs import MOST_EXTENT, Candidate, Index, Plan, integer
from ..target import TargetInfo
from ..threads import refuse_fork
from ..tile_db.store import TileStore
from .argument import pattern_array
from .arrays import as_numpy, as_tensor, check_overlap, empty_like_kind
from .bind import Binder, Bound, PackedOperand, told_pattern
from .detect import Detector
from .detect_ids import SliceCall
from .detect_sample import SampleCall
from .kernel_cache import KernelCache
from .kernels import Kernels
from .launch import Launcher
from .pattern import Pattern, Sampler, counted, lines_of
from .planner import Planner
from .program import Program
from .promise import asked_for, check_zeros, zeros_asked_for
from .routes import Route

_LIBRARIES = ("numpy", "torch")


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
        library: bool = True,
    ) -> None:
        self.program, self.target = program, target
        self.deterministic = deterministic
        self.kernels = Kernels(program, target, cache)
        kernels = self.kernels
        self.binder = Binder(program, self, lambda: kernels.look, kernels.check, kernels.packed)
        self.planner = Planner(program, target, store, library=library)
        self.sampler = Sampler(program)
        self.launcher = Launcher(program, self.kernels, dead)
        self._slices: dict[tuple[int, ...], SliceCall] = {}
        self._samples: dict[tuple[int, ...], SampleCall] = {}
        self.checks_zeros = zeros_asked_for(program)
        self.detector = Detector(target.tvm_target, self.kernels.for_detection, checked=asked_for())

    # -- the call

    def run(
        self,
        arrays: Sequence[Any],
        sparsity: Any,
        out: Any,
        clock: Clock | None = None,
        choose: Callable[[Plan], Candidate] | None = None,
    ) -> tuple[Any, Plan | None]:
        """Compute into ``out`` (None: a new array); returns it and the plan, None if empty.

        ``choose`` picks the candidate of a plan that runs (None: the cheapest).
        """
        if self.kernels.lacks or Threads.lost:
            self.kernels.refuse()
        bound, fresh = self.binder.bind(arrays, out), out is None
        out, target = self._output(bound, out)
        value = told_pattern(self.program, bound.arrays, sparsity)
        if self.program.mask:
            value = pattern_array(value)  # once: kernels read the memory that detection checks
        if clock is not None:
            clock.lap()
        plan, index = self._plan(bound, value, clock, choose, self._loose(fresh))
        if not bound.layout.result.filled:
            return out, None
        bound = self._with_mask(bound, value, None if fresh else out)
        if self.checks_zeros:
            self._check_zeros(bound, value)
        self.launcher.launch(plan.choice, index, bound, target)
        if clock is not None:
            clock.kernel_us = clock.lap()
        return out, plan

    def repeat(self, choice: Candidate, arrays: Sequence[Any], sparsity: Any, out: Any) -> Any:
        """Compute into ``out`` (None: a new array) by a candidate of an earlier plan."""
        if self.kernels.lacks or Threads.lost:
            self.kernels.refuse()
        self.launcher.check(choice)
        bound, fresh = self.binder.bind(arrays, out), out is None
        out, target = self._output(bound, out)
        if bound.layout.result.filled:
            value = told_pattern(self.program, bound.arrays, sparsity)
            if self.program.spec.promises_zero:
                value = pattern_array(value)
            if choice.kind == "dense" and not (self.program.zero_outside or self._loose(fresh)):
                self._check_whole(bound, value)
            elif choice.kind == "dense" and self.program.mask:
                self._pattern(bound, value)  # checks the mask
            index = self._index(bound, value, choice)
            if self.checks_zeros:
                self._check_zeros(bound, value)
            bound = self._with_mask(bound, value, None if fresh else out)
            self.launcher.launch(choice, index, bound, target)
        return out

    def explain(
        self, arrays: Sequence[Any], sparsity: Any, sizes: dict[str, int], library: str
    ) -> Plan:
        """The plan of a pattern, decided anew, without running it."""
        if Threads.lost:
            refuse_fork()
        check_asked({} if arrays else sizes, library)
        if arrays:
            bound = self.binder.bind(arrays)
        else:
            layout = self.binder.layout_of(sizes, library)
            bound = Bound(layout, {}, {}, {})
        pattern, *_ = self._pattern(bound, told_pattern(self.program, bound.arrays, sparsity))
        packed = not arrays or bool(bound.packed)
        return self.planner.decide(pattern, bound.layout, packed, self._loose(True))

    def pack(self, name: str, array: Any) -> PackedOperand:
        """Pack the dense operand of the contraction once."""
        if self.kernels.lacks or Threads.lost:
            self.kernels.refuse()
        con = self.program.contraction
        if con is None or name != con.dense:
            dense = con.dense if con else "none: the operator is no contraction"
            raise ShapeError(mismatch("pack", f"the dense operand ({dense})", name))
        if isinstance(array, PackedOperand):
            return self._shared(array)
        param = self.program.input(name)
        shape = tuple(e if isinstance(e, int) else None for e in param.shape)
        tensor = as_tensor(name, array, dtype=param.dtype, shape=shape)
        form = self.kernels.packed(tensor.shape)
        packed = aligned_empty(form.shape, form.dtype, lasting=True)
        if not form.filled:
            return PackedOperand(name, array, form.take(packed), self)
        self.kernels.pack()(tensor, packed)
        return PackedOperand(name, array, tvm_ffi.from_dlpack(packed), self)

    def _shared(self, other: PackedOperand) -> PackedOperand:
        """What another dispatcher packed, if this one would pack the same."""
        owner = other.owner
        if not isinstance(owner, Dispatcher) or owner.kernels.pack_key != self.kernels.pack_key:
            expected = "packed by an operator of the same expression and target"
            raise ShapeError(mismatch(f"{other.name}: packed operand", expected, "by another"))
        return replace(other, owner=self)

    def build(self, _: dict[str, int]) -> None:
        """Nothing to compile ahead: TVM compiles for CPUs wherever it runs."""
        advice = "kernels are compiled when they are first needed"
        raise UnsupportedTarget(mismatch("build", "a GPU target", self.target.kind, advice))

    # -- arguments

    def _loose(self, fresh: bool) -> bool:
        """Whether dead parts of the output may hold anything: they are not needed in a new one."""
        return fresh and self.program.writes and self.launcher.dead == "skip"

    def _output(self, bound: Bound, out: Any) -> tuple[Any, Any]:
        if bound.result is not None:
            return out, bound.result
        result = bound.layout.result
        if out is None:
            like = bound.arrays[self.program.gathered]
            out = empty_like_kind(like, result.shape, result.dtype)
            # right already, but what DLPack cannot express
            right = result.filled and result.dtype != "bfloat16"
            return out, out if right else result.take(out)
        tensor = result.take(out)
        check_overlap(result.name, out, bound.arrays)
        return out, tensor

    def _check_zeros(self, bound: Bound, value: Any) -> None:
        """Refuse an operand that breaks what its pattern promises."""
        operand = as_numpy(bound.arrays[self.program.operand])
        check_zeros(self.program, operand, pattern_array(value))

    def _with_mask(self, bound: Bound, value: Any, out: Any) -> Bound:
        """``bound`` with the mask ``value`` among its tensors, if kernels read it while they write
        ``out`` (None: a new one): an array of which detection has checked shape and type."""
        if not self.program.mask:
            return bound
        mask = as_tensor("sparsity", value, dtype="uint8", shape=value.shape)
        if out is not None:
            check_overlap(bound.layout.result.name, out, {"sparsity": mask})
        return bound._replace(tensors={**bound.tensors, self.program.mask: mask})

    # -- detect and select

    def _plan(
        self,
        bound: Bound,
        value: Any,
        clock: Clock | None,
        choose: Callable[[Plan], Candidate] | None,
        loose: bool,
    ) -> tuple[Plan, Index | None]:
        pattern, index, indices = self._pattern(bound, value)
        if clock is not None and (index or indices):
            clock.index_us += clock.lap()
        plan = self.planner.plan(pattern, bound.layout, bool(bound.packed), loose)
        if choose is not None:
            plan = replace(plan, choice=choose(plan))
        if clock is not None:
            clock.select_us += clock.lap()
        if plan.choice.kind == "dense":
            return plan, None
        index = index or indices.get(plan.choice.micro_tile)
        if index is None:
            index = self._detect(bound, value, plan.choice.micro_tile)
            if clock is not None:
                clock.index_us += clock.lap()
        return plan, index

    def _pattern(self, bound: Bound, value: Any) -> tuple[Pattern, Index | None, dict[Any, Index]]:
        """The pattern, and what had to be built to know it: the index of named slices, or those of
        all routes by micro-tile."""
        program, shape = self.program, bound.layout.operand
        if not program.spec.promises_zero:
            slices = self._slices.get(shape)
            if slices is None:
                found = self.detector.slices(program.spec, shape, program.routes[0].micro_tile)
                slices = remember(self._slices, shape, found)
            index = slices.index(value, self.launcher.workspace(), deterministic=self.deterministic)
            count = index.count
            live = int(count[0]) if len(count) == 1 else int(count.sum())
            return counted(program, live, slices.rows), index, {}
        if program.contraction is None:
            return self._exact(bound, value, program.routes)
        samples = self._samples.get(shape)
        if samples is None:
            lines, operand = lines_of(program), program.operand
            made = self.detector.sampling(program.spec, shape, lines, operand=operand)
            samples = remember(self._samples, shape, made)
        return self.sampler.pattern(samples.take(value)), None, {}

    def _exact(
        self, bound: Bound, value: Any, routes: Sequence[Route]
    ) -> tuple[Pattern, None, dict[Any, Index]]:
        shape = bound.layout.operand
        indices = {
            r.micro_tile: self._detect(bound, value, r.micro_tile, fresh=True) for r in routes
        }
        covered = []
        for micro_tile, index in indices.items():
            total = index.count.size * shape[micro_tile.dim]
            covered.append(float(index.count.sum()) / total if total else 0.0)
        return Pattern(tuple(covered), tuple(int(c * 1024) for c in covered)), None, indices

    def _check_whole(self, bound: Bound, value: Any) -> None:
        """Refuse a pattern with dead slices, which the dense candidate would write."""
        if self.program.writes or min(self._pattern(bound, value)[0].covered) < 1.0:
            expected = "a candidate that writes live parts of the output only"
            raise ShapeError(mismatch("choice", expected, "dense"))

    def _index(self, bound: Bound, value: Any, choice: Candidate) -> Index | None:
        """The index that a candidate runs on; None if it needs none."""
        if choice.micro_tile is None:
            return None
        if self.program.spec.promises_zero:
            return self._detect(bound, value, choice.micro_tile)
        return self._pattern(bound, value)[1]

    def _detect(self, bound: Bound, value: Any, micro_tile: Any, fresh: bool = False) -> Index:
        index = self.detector.detect(
            self.program.spec,
            pattern_array(value),
            bound.layout.operand,
            micro_tile,
            deterministic=self.deterministic,
            workspace=None if fresh else self.launcher.workspace(),
        )
        if micro_tile.also is None:
            return index
        return replace(index, also=self._detect(bound, value, micro_tile.also, fresh=True))


def check_asked(sizes: dict[str, int], library: str) -> None:
    """Refuse what no plan is made for: BackendUnavailable of a library that is no peer, ShapeError
    of an extent that is none."""
    if library not in _LIBRARIES:
        expected = " or ".join(map(repr, _LIBRARIES))
        raise BackendUnavailable(mismatch("library", expected, repr(library)))
    _check_sizes(sizes)


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        number = integer(size)
        if number is None or not 0 <= number <= MOST_EXTENT:
            expected = f"an integer of 0 to {MOST_EXTENT}"
            raise ShapeError(mismatch(f"size {name}", expected, repr(size)))
