"""The suites ``select`` and ``call``: one decision, and what a call adds to its kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_cpu_cases import (
    TINY,
    Called,
    Selected,
    list_called,
    list_selected,
)
from bench_cpu_measure import (
    each_turn,
    interleave,
    normal,
    poisoned,
    product_error,
    profiled,
)
from bench_cpu_pit import PitProduct
from bench_rows import (
    Array,
    Column,
    Row,
    Settings,
    Stat,
    Suite,
    Target,
    block_mask,
    fact,
    fact_column,
    limits,
    time_column,
)

import pit_tvm
from pit_tvm.runtime.bind import Binder
from pit_tvm.runtime.detect_sample import Sample
from pit_tvm.runtime.pattern import Pattern, Sampler, counted
from pit_tvm.runtime.planner import Planner
from pit_tvm.runtime.program import analyse
from pit_tvm.selection.cover import SAMPLE_EXTENTS
from pit_tvm.selection.select import ALL
from pit_tvm.structs import Plan, SparsitySpec
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore

SELECT_US, CALL_US = 100.0, 20.0
WINDOWS = 32  # windows of 64x64 elements that the given block counts come from
DIFFERENT_COUNTS = 64
SHORT_RUNS = 50  # runs of a contender that takes microseconds, in each of its turns


# --------------------------------------------------------------------------------------------
# select


def measure_select(case: Selected, settings: Settings) -> Row:
    """One product: a decision on counts never seen, on counts seen before, and a planner's first.

    A planner's first decision reads its tile database's rates and makes shortlists.
    """
    shape = case.shape
    spec = pit_tvm.Mask(*case.grain) if case.grain else pit_tvm.Lengths()
    tensors = pit_tvm.op.matmul(shape.m, shape.n, shape.k)
    program, target = analyse(tensors, {"lhs": spec}), resolve_target("llvm")
    layout = Binder(program, None).layout_of({}, "numpy")
    store = TileStore.open(device=target.device, isa=target.isa)
    planner, sampler = Planner(program, target, store), Sampler(program)
    totals = np.array([WINDOWS * 4096 // (a * b) for a, b in SAMPLE_EXTENTS])
    whole = np.append(totals, (1.0, 1.0))
    counts = itertools.cycle(list(random_counts(settings.rng(case.label), totals)))

    def pattern() -> Pattern:
        given = next(counts)
        if not case.grain:
            return counted(program, int(given[0]) * shape.m // int(totals[0]), shape.m)
        live = np.append(given, (1, 1))
        return sampler.pattern(Sample(live.tobytes(), live.tobytes(), whole))

    def decide() -> Plan:
        return planner.decide(pattern(), layout, True)

    def first() -> Plan:
        return Planner(program, target, store).decide(pattern(), layout, True)

    for _ in range(DIFFERENT_COUNTS):
        planner.plan(pattern(), layout, True)
    runs = {
        "select": decide,
        "cached": lambda: planner.plan(pattern(), layout, True),
        "first": first,
    }
    stats = interleave(runs, settings.repeats, SHORT_RUNS)
    plan = decide()
    # A tile that saves nothing may be predicted cheaper and is still not chosen.
    saving = [c.cost_us for c in plan.candidates if c.kind == "dense" or c.covered < ALL]
    cheapest = plan.choice.cost_us <= min(saving)
    facts = {"candidates": len(plan.candidates), "tuned": plan.tuned}
    errors = {"select": 0.0 if cheapest else float("inf")}
    return Row(case.label, case.held_out, stats, facts, errors)


def random_counts(rng: np.random.Generator, totals: Array) -> Array:
    """int ``[DIFFERENT_COUNTS, len(totals)]``: live micro-tiles in the sampled windows, as of
    elements that are live independently, from 0.01 to 90 % of them."""
    shares = 10 ** rng.uniform(-4, np.log10(0.9), (DIFFERENT_COUNTS, 1))
    areas = np.array([a * b for a, b in SAMPLE_EXTENTS])
    return rng.binomial(totals, 1 - (1 - shares) ** areas)


def select_targets(rows: Sequence[Row]) -> list[Target]:
    """The limit on one decision."""
    name = "select: us of one selection from given block counts"
    return limits(rows, name, SELECT_US, lambda row: row.us("select"), at_least=False)


# --------------------------------------------------------------------------------------------
# call


def measure_call(case: Called, settings: Settings) -> Row:
    """A tiny product: the call, its kernel alone, and the library's own product."""
    batch, padded, n, k = TINY
    rng, m = settings.rng(case.label), TINY[0] * TINY[1]
    spec, value, live = tiny_pattern(rng, case.pattern, batch, padded, k)
    lhs, rhs = normal(rng, m, k), normal(rng, k, n)
    if spec.promises_zero:
        lhs *= value
    outs = {name: poisoned(m, n) for name in ("call", "kernel", "library")}
    arrays: list[Any] = [lhs, rhs, value, *outs.values()]
    if case.library == "torch":
        arrays = [torch.from_numpy(array) for array in arrays]
    left, right, told, out, kernel_out, library_out = arrays

    pit = PitProduct(n, k, spec)
    packed = pit.operator.pack(rhs=right)

    def profile() -> Any:
        return pit.operator.profile(left, packed, sparsity=told, out=out)

    choice = profile().plan.choice
    matmul: Any = torch.matmul if case.library == "torch" else np.matmul
    runs = {
        "call": lambda: pit.operator(left, packed, sparsity=told, out=out),
        "kernel": pit.launcher(choice, left, right, value, kernel_out),
        "library": lambda: matmul(left, right, out=library_out),
    }
    turns = [
        (turn, profiled(profile, SHORT_RUNS))
        for turn in each_turn(runs, settings.repeats, SHORT_RUNS)
    ]
    stats = {name: Stat.of([one for turn, _ in turns for one in turn[name]]) for name in runs}
    shared = ("index_us", "select_us")
    facts = {**turns[-1][1], **{n: median(parts[n] for _, parts in turns) for n in shared}}
    # Index and selection have limits of their own. A machine's clock may change between turns.
    facts["overhead_us"] = median(
        1e6 * (median(turn["call"]) - median(turn["kernel"])) - sum(parts[n] for n in shared)
        for turn, parts in turns
    )
    errors = {"call": product_error(rng, lhs[live], rhs, outs["call"][live])}
    return Row(case.label, case.held_out, stats, facts, errors)


def tiny_pattern(
    rng: np.random.Generator, pattern: str, batch: int, padded: int, k: int
) -> tuple[SparsitySpec, Array, Array]:
    """Specification, the array that a call passes, and the rows whose results are promised."""
    rows = np.arange(batch * padded)
    if pattern == "lengths":
        lengths = rng.integers(1, padded, batch)
        return pit_tvm.Lengths(), lengths, np.flatnonzero(rows % padded < lengths[rows // padded])
    if pattern == "rows":
        ids = rng.permutation(rows)[: len(rows) // 2]
        return pit_tvm.Rows(), ids, np.sort(ids)
    return pit_tvm.Mask(8, 1), block_mask(rng, (len(rows), k), (8, 1), 0.75), rows


def call_targets(rows: Sequence[Row]) -> list[Target]:
    """The limit on what a call adds to its kernel, index and selection."""
    name = "call: us of a call without its kernel, index and selection"
    return limits(rows, name, CALL_US, fact("overhead_us"), at_least=False)


# --------------------------------------------------------------------------------------------


SELECT = Suite(
    name="select",
    title="one selection from given block counts (product, pattern), medians in us",
    cases=list_selected,
    measure=measure_select,
    columns=(
        time_column("selection", "select", 1),
        time_column("cached", "cached", 1),
        time_column("planner's first", "first", 1),
        fact_column("candidates", "candidates"),
    ),
    targets=select_targets,
)


CALL = Suite(
    name="call",
    title=f"calls of a tiny product ({TINY[0] * TINY[1]}x{TINY[2]}x{TINY[3]}) whose plan is "
    "cached, medians in us",
    cases=list_called,
    measure=measure_call,
    columns=(
        time_column("call", "call", 1),
        time_column("kernel alone", "kernel", 1),
        fact_column("overhead", "overhead_us", ".1f"),
        fact_column("index", "index_us", ".1f"),
        fact_column("select", "select_us", ".1f"),
        time_column("library", "library", 1),
        Column("rel. err.", lambda row: f"{row.error:.1e}"),
        fact_column("kernel", "kernel"),
    ),
    targets=call_targets,
)
