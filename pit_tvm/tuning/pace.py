"""How fast this CPU runs right now: a shared machine slows down and recovers in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.target import Target

from ..target import TargetInfo, resolve_target

_ROWS, _VECTORS = 12, 2  # accumulators that keep the multipliers busy
_DEPTH = 1024  # of operands that stay in the first-level cache
_ROUNDS = 16
_FIRST_SECS = 1.0
_TRIES, _AGREES = 4, 1.1
_SLOWEST = 6.0  # times the fastest: neighbours slow a machine down by less


class Pace:
    """A product in the nearest cache, whose fastest run so far stands for the machine alone.

    ``correct`` scales times of other work to that: neighbours on the machine then shift all
    candidates and libraries alike, not only those that were measured beside them.
    """

    def __init__(self, target: TargetInfo) -> None:
        self._timer = _product(target)
        self.fastest = float("inf")
        begin = time.perf_counter()
        while time.perf_counter() - begin < _FIRST_SECS:
            self.now()

    def now(self) -> float:
        """Seconds of the product, the least of a few runs: one that was interrupted tells how
        long the interruption was. Never more than neighbours can make of it."""
        for _ in range(_TRIES):
            secs = self._timer()
            self.fastest = min(self.fastest, secs)
            if secs <= _SLOWEST * self.fastest:
                return secs
        return _SLOWEST * self.fastest

    def correct(self, run: Callable[[], Sequence[float]]) -> tuple[float, ...]:
        """Seconds that ``run`` reports, as if the machine did nothing else.

        It is repeated while the pace before and after it disagree, a few times; then the run
        counts beside which they agreed best.
        """
        least = float("inf")
        kept: tuple[float, ...] = ()
        for _ in range(_TRIES):
            before = self.now()
            secs = run()
            after = self.now()
            drift = max(before, after) / min(before, after)
            if drift < least:
                factor = self.fastest / (0.5 * (before + after))
                least, kept = drift, tuple(one * factor for one in secs)
            if drift <= _AGREES:
                break
        return kept


@cache
def host_pace() -> Pace:
    """This machine's; made at the first use, after TVM's threads were asked for."""
    return Pace(resolve_target("llvm"))


def _product(target: TargetInfo) -> Callable[[], float]:
    width = _VECTORS * target.vector_bits // 32
    shape = (target.threads, _ROUNDS, _ROWS, width)
    lhs = te.placeholder((_DEPTH, _ROWS), "float32", "lhs")
    rhs = te.placeholder((_DEPTH, width), "float32", "rhs")
    k = te.reduce_axis((0, _DEPTH), "k")
    out = te.compute(shape, lambda t, r, i, j: te.sum(lhs[k, i] * rhs[k, j], axis=k), name="out")
    sch = Schedule(te.create_prim_func([lhs, rhs, out]))
    block = sch.get_sblock("out")
    thread, rounds, i, j, depth = sch.get_loops(block)
    sch.reorder(thread, rounds, depth, i, j)
    sch.parallel(thread)
    vector, lane = sch.split(j, [_VECTORS, None])
    sch.unroll(i)
    sch.unroll(vector)
    sch.vectorize(lane)
    init = sch.decompose_reduction(block, depth)
    sch.vectorize(sch.get_loops(init)[-1])
    built = tvm.compile(sch.mod, target=Target(target.tvm_target))
    evaluator = built.mod.time_evaluator("main", tvm.cpu(), number=1, repeat=5)
    sizes = ((_DEPTH, _ROWS), (_DEPTH, width), shape)
    arrays: list[Any] = [tvm.runtime.tensor(np.ones(size, np.float32)) for size in sizes]
    return lambda: float(min(evaluator(*arrays).results))
