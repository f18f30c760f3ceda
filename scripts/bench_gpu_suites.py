"""The suites of the GPU benchmark by name, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench_gpu_attention import ATTENTION
from bench_gpu_attention_decode import ATTENTION_DECODE
from bench_gpu_attention_training import ATTENTION_TRAINING
from bench_gpu_conversion import CONVERSION
from bench_gpu_decode import DECODE
from bench_gpu_granularity import GRANULARITY, TENSOR
from bench_gpu_grid import GRID
from bench_gpu_index import INDEX
from bench_gpu_layer import LAYER
from bench_gpu_linear import LINEAR
from bench_gpu_measure import GpuSettings
from bench_gpu_moe import MOE
from bench_gpu_outputs import OUTPUTS
from bench_gpu_report import Printer
from bench_gpu_search import SEARCH, candidates_of
from bench_gpu_sread import SREAD
from bench_gpu_training import TRAINING
from bench_gpu_weights import WEIGHTS
from bench_report import Result
from bench_rows import Row, Suite

from pit_tvm.errors import PitError, ShapeError, mismatch

PRODUCTS = ("padding", "moe")  # what ``search`` looks at plans of
# Suites whose rows have plans.
PLANNED = (*PRODUCTS, "granularity", "tensorcore", "weights", "outputs", "grid", "decode")


def suites() -> dict[str, Suite]:
    """All suites, in the order in which they run."""
    sparse = (INDEX, CONVERSION, GRANULARITY, TENSOR, WEIGHTS, OUTPUTS, GRID, DECODE, SREAD)
    attention = (ATTENTION, ATTENTION_TRAINING, ATTENTION_DECODE)
    made = (LINEAR, MOE, LAYER, TRAINING, *sparse, *attention, SEARCH)
    return {suite.name: suite for suite in made}


def to_run(names: Sequence[str], every: bool = False) -> list[Suite]:
    """The suites of these names; for ``search`` also what it judges plans by. ``every``: candidates
    of plans instead.

    Raises
    ------
    ShapeError
        No suite with plans is named where these are asked for.
    """
    known = suites()
    if every and not set(names) & set(PLANNED):
        expected = f"a suite with plans ({', '.join(PLANNED)})"
        raise ShapeError(mismatch("--all-candidates", expected, ", ".join(names)))
    if every:
        return [candidates_of(known[name]) for name in PLANNED if name in names]
    chosen = [known[name] for name in known if name in names and name != "search"]
    if "search" in names:
        chosen += [candidates_of(known[name]) for name in PRODUCTS if name not in names]
        chosen.append(known["search"])
    return chosen


def run_suite(
    suite: Suite, settings: GpuSettings, match: str, keep: Callable[[Result], None]
) -> Result:
    """Measure and print the cases whose labels contain ``match``; ``keep`` gets the result after
    every row. A row that cannot be measured says why, counts as wrong, and the next one follows."""
    cases = [case for case in suite.cases(settings.quick) if match in case.label]
    printer = Printer(suite, [case.label for case in cases])
    rows: list[Row] = []
    if cases:
        print(printer.head(), flush=True)
    for case in cases:
        try:
            row = suite.measure(case, settings)
        except (PitError, RuntimeError, TypeError, ValueError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            row = Row(case.label, case.held_out, {}, {"failed": text}, {"row": float("inf")})
        rows.append(row)
        print(printer.row(row), flush=True)
        keep(Result(suite, tuple(rows)))
    return Result(suite, tuple(rows))


def sound(rows: Sequence[Row]) -> list[Row]:
    """Rows that could be measured."""
    return [row for row in rows if "failed" not in row.facts]
