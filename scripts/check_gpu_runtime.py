"""What calls on a GPU promise beside their values: no waiting, graphs, streams, threads, memory.

Every function returns what was wrong, one line each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from bench_gpu_pit import internals
from check_gpu_kinds import DTYPES, ROWS, Kind
from check_gpu_patterns import Call, draw_data
from check_gpu_problem import PART, Problem
from check_gpu_values import Checker, gathered

from pit_tvm import BitMask, BlockMask, Groups, Lengths, Mask, Operator, Rows, Values
from pit_tvm.errors import PitError
from pit_tvm.runtime.cuda_repeat_code import OFTEN
from pit_tvm.runtime.cuda_rows import ROW_STEP
from pit_tvm.structs import Plan, SparsitySpec

CALLS = 40  # more than twice as many as an operator makes between two looks at its counts
MOVES = OFTEN + CALLS  # calls of which many are repeated by graphs
ROOM = 1.05  # of the bytes of inputs, output and index
STREAMS = THREADS = 4
HANDFUL = 12
BAND = (1, 64)  # zeros of an lhs that is stored [k, m]
LARGE = 2**31


def _call_of(
    family: str, spec: SparsitySpec, number: int, sizes: Sequence[int], dead: str = "skip"
) -> Call:
    """A product of live rows, without an epilogue: ``number`` picks the type, ``sizes`` are m, n,
    k."""
    kind = Kind(ROWS[family], "lhs", spec, DTYPES[number % 2], dead=dead, family=family)
    extents = dict(zip("mnk", sizes, strict=True)) | kind.known
    return Call(kind, tuple(extents.items()), 8 if isinstance(spec, Lengths) else 1)


def calls() -> Iterator[Call]:
    """Two of every pattern, by kernels that are checked anyway, aligned and not."""
    named: list[SparsitySpec] = [Lengths(), Lengths(cumulative=True), Rows()]
    masks: list[SparsitySpec] = [Mask(), BitMask(), BlockMask(4, 8), Values()]
    for sizes in ((640, 256, 192), (640, 131, 67)):
        for number, spec in enumerate((*named, *masks)):
            dead = "zero" if spec in named and number % 2 == 0 else "skip"
            yield _call_of(("linear", "matmul")[number % 2], spec, number, sizes, dead)
        yield _call_of("grouped", Groups(8), 1, sizes)
        yield _call_of("turned", Mask(*BAND), 0, sizes)


def _draw(checker: Checker, call: Call, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    return draw_data(rng, call, PART, checker.device, checker.operator(call))


def _call(checker: Checker, problem: Problem) -> None:
    made, kind = checker.operator(problem.call), problem.call.kind
    named = kind.named and kind.dead == "skip"  # the library would write the rest
    if checker.library or named:
        made(*problem.arrays, sparsity=problem.value, out=problem.out)
    else:
        internals(made).run(problem.arrays, problem.value, problem.out, choose=gathered)


def _warm(checker: Checker, problem: Problem) -> None:
    for _ in range(3):
        _call(checker, problem)
        torch.cuda.synchronize()


def check_no_waiting(checker: Checker) -> list[str]:
    """Calls while torch refuses every synchronisation."""
    faults = []
    for asked in calls():
        problem = _draw(checker, asked, 1)
        _warm(checker, problem)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(CALLS):
                _call(checker, problem)
        except RuntimeError as error:
            faults.append(f"{asked}: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return faults


def check_graphs(checker: Checker) -> list[str]:
    """One call captured, then replayed with other contents, operands and pattern."""
    faults = []
    for asked in calls():
        problem = _draw(checker, asked, 1)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            _warm(checker, problem)
        try:
            with torch.cuda.graph(graph, stream=stream):
                _call(checker, problem)
        except RuntimeError as error:
            faults.append(f"{asked}: capture: {error}")
            continue
        for seed in range(2, 6):
            problem = problem.refill(_draw(checker, asked, seed))
            problem.poison()
            graph.replay()
            torch.cuda.synchronize()
            if fault := problem.fault(0.0):
                faults.append(f"{asked}: replay {seed}: {fault}")
    return faults


def check_moves(checker: Checker) -> list[str]:
    """Calls that gather, with tensors that lie elsewhere every time: by graphs, after some."""
    faults = []
    for asked in calls():
        made, kept = checker.operator(asked), list[Problem]()
        drawn = [_draw(checker, asked, seed) for seed in range(4)]
        with _gathering(made):
            for call in range(MOVES):
                problem = drawn[call % len(drawn)].elsewhere()
                problem.poison()
                made(*problem.arrays, sparsity=problem.value, out=problem.out)
                kept.append(problem)  # its memory is nobody else's
                if fault := problem.fault(0.0):
                    faults.append(f"{asked}: call {call}: {fault}")
        table = internals(made)._repeats[False]._threads.table
        if asked.extents["n"] % ROW_STEP == 0 and not any(call.graph for call in table.calls):
            faults.append(f"{asked}: no graph")
    return faults


@contextmanager
def _gathering(made: Operator) -> Iterator[None]:
    """For a time an operator's plans choose the best candidate that gathers."""
    planner, plans = internals(made).planner, dict[int, tuple[Plan, Plan]]()
    own = planner.plan_of

    def plan_of(call: Any) -> Plan:
        plan = own(call)
        return plans.setdefault(id(plan), (plan, replace(plan, choice=gathered(plan))))[1]

    planner.plan_of = plan_of
    try:
        yield
    finally:
        del planner.plan_of


def check_streams(checker: Checker) -> list[str]:
    """Several streams at once, calls of one operator in all of them."""
    faults = []
    for asked in calls():
        problems = [_draw(checker, asked, seed) for seed in range(STREAMS)]
        _warm(checker, problems[0])
        streams = [torch.cuda.Stream() for _ in problems]
        for problem in problems:
            problem.poison()
        torch.cuda.synchronize()
        for _ in range(10):
            for stream, problem in zip(streams, problems, strict=True):
                with torch.cuda.stream(stream):
                    _call(checker, problem)
        torch.cuda.synchronize()
        found = [problem.fault(0.0) for problem in problems]
        faults += [f"{asked}: stream {i}: {fault}" for i, fault in enumerate(found) if fault]
    return faults


def check_threads(checker: Checker) -> list[str]:
    """Several threads that share an operator which none of them has called before."""
    faults = []
    for asked in calls():
        problems = [_draw(checker, asked, seed) for seed in range(THREADS)]
        errors: list[str] = []
        for problem in problems:
            problem.poison()

        def work(problem: Problem, errors: list[str] = errors) -> None:
            try:
                if problem.out.is_cuda:
                    with torch.cuda.stream(torch.cuda.Stream()):
                        for _ in range(CALLS):
                            _call(checker, problem)
                        torch.cuda.current_stream().synchronize()
                else:
                    _call(checker, problem)
            except (PitError, RuntimeError) as error:
                errors.append(str(error))

        if checker.device == "cuda":
            torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(problem,)) for problem in problems]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [*errors, *(problem.fault(0.0) for problem in problems)]
        faults += [f"{asked}: {fault}" for fault in found if fault]
    return faults


def check_memory(checker: Checker) -> list[str]:
    """Peak memory of one call, against inputs, output and index."""
    large = [
        replace(_call_of("linear", Lengths(), 0, (256 * 128, 3072, 768)), parts=256),
        _call_of("linear", Rows(), 0, (8192, 4096, 4096)),
        _call_of("linear", Mask(), 0, (8192, 4096, 4096)),
        _call_of("grouped", Groups(16), 0, (8192, 3072, 768)),
    ]
    faults = []
    for asked in large:
        problem = _draw(checker, asked, 1)
        made = checker.operator(asked)
        _warm(checker, problem)
        given = [*problem.arrays, *([] if problem.value is None else [problem.value])]
        inputs = sum(array.nbytes for array in given)
        index = _index_bytes(internals(made), problem)
        wanted = inputs + problem.out.nbytes + index
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = made(*problem.arrays, sparsity=problem.value)
        torch.cuda.synchronize()
        used = inputs + torch.cuda.max_memory_allocated() - before
        del result
        if used > ROOM * wanted:
            more = 1e-6 * (used - wanted)
            faults.append(f"{asked}: {more:.1f} MB beside inputs, output and index")
    return faults


def _index_bytes(dispatcher: Any, problem: Problem) -> int:
    """Bytes of the lists that the call needs, dead rows' included where it writes those."""
    value = problem.arrays[-1] if problem.value is None else problem.value
    micro, size = dispatcher.form.route.micro_tile, tuple(problem.arrays[0].shape)
    kind = problem.call.kind
    index = dispatcher.detector.detect(kind.spec, value, size, micro)
    one = int(index.ids.nbytes + index.count.nbytes)
    return 2 * one if kind.spec.promises_zero or kind.dead == "zero" else one


def check_large(checker: Checker) -> list[str]:
    """More than 2**31 elements: of the operand, then of the output, whose other rows stay or become
    zero; a few rows live, at the end."""
    faults = []
    for n, k, dead in ((64, 32768, "skip"), (32768, 64, "skip"), (32768, 64, "zero")):
        m = LARGE // 32768 + 1000
        asked = _call_of("linear", Rows(), 1, (m, n, k), dead)
        ids = torch.arange(m - 130, m, dtype=torch.int32, device="cuda")
        lhs = torch.zeros((m, k), dtype=torch.bfloat16, device="cuda")
        lhs[m - 130 :] = torch.randint(-2, 3, (130, k), device="cuda").to(lhs.dtype)
        rhs = torch.randint(-1, 2, (n, k), device="cuda").to(lhs.dtype)
        out = torch.full((m, n), float("nan"), dtype=lhs.dtype, device="cuda")
        checker.operator(asked)(lhs, rhs, sparsity=ids, out=out)
        want = (lhs[m - 130 :].double() @ rhs.double().t()).to(lhs.dtype)
        if not torch.equal(out[m - 130 :], want):
            faults.append(f"{asked}: the live rows at the end are wrong")
        beside = out[: m - 130]
        if not bool(beside.isnan().all() if dead == "skip" else beside.any().logical_not()):
            faults.append(f"{asked}: dead rows are not what they should be")
        del lhs, rhs, out
        torch.cuda.empty_cache()
    return faults


def check_kernels(checker: Checker) -> list[str]:
    """A hundred random shapes: how many kernels their plans need, and that calls with tiles that
    are there compile nothing more."""
    rng = np.random.default_rng(7)
    faults = []
    for family, spec in (("linear", Rows()), ("grouped", Groups(64))):
        made = checker.operator(_call_of(family, spec, 0, (8, 8, 8)))
        dispatcher = internals(made)
        tiles = set()
        for _ in range(100):
            m, n, k = (int(8 * rng.integers(1, 1000)) for _ in range(3))
            layout = dispatcher.binder.layout_of({"m": m, "n": n, "k": k}, "torch")
            tiles.add(dispatcher.planner.plan(layout, None).choice.tile)
        tiles.discard(None)  # the library's dense product
        if len(tiles) > HANDFUL:
            faults.append(f"{family}: {len(tiles)} kernels for 100 shapes, more than {HANDFUL}")
        before = made.stats
        for _ in range(20):
            sizes = [int(8 * rng.integers(1, 100)) for _ in range(3)]
            _call(checker, _draw(checker, _call_of(family, spec, 0, sizes), 1))
        after = made.stats
        if after.builds > before.builds + len(dispatcher.planner.likely_tiles(layout)):
            faults.append(f"{family}: {after.builds - before.builds} kernels built by 20 shapes")
    return faults


def check_many_groups(checker: Checker) -> list[str]:
    """More groups than most kernels hold: right, or refused by a typed error."""
    faults = []
    for groups in (257, 1000, 1025):
        asked = _call_of("grouped", Groups(groups), 1, (1500, 64, 64))
        try:
            problem = _draw(checker, asked, 1)
            problem.poison()
            _call(checker, problem)
        except PitError:
            continue
        if fault := problem.fault(0.0):
            faults.append(f"{asked}: {fault}")
    return faults
