"""The suite ``search``: what a decision takes, and how good it is.

Its rows time one selection on the host from counts never seen before ("select"), and from counts
whose bucket is known ("cached"); a decision needs no GPU. Over the rows of ``padding`` and ``moe``
it compares the predicted cost of the plan that ran with what was measured, and the chosen tile
with the next ones of the plan.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from bench_gpu_cases import HELD_OUT_EXPERTS, HELD_OUT_LIVE, Linear, Moe, list_layers, list_selected
from bench_gpu_measure import GpuSettings
from bench_gpu_pit import LATER, internals, operator_of
from bench_rows import Column, Row, Stat, Suite, Target, fact_column, limits, time_column

from pit_tvm.structs import Plan
from pit_tvm.tile_db.record import TileRecord

SELECT_US, PREDICTED_WITHIN = 100.0, 0.15
COUNTS, RUNS = 64, 50
NEARLY = 1.02  # of the fastest: as fast, within what two runs differ by


def measure_select(case: Linear | Moe, settings: GpuSettings) -> Row:
    """Decisions for one shape."""
    dispatcher = internals(operator_of(case, settings.planned_target))
    planner = dispatcher.planner
    rows = case.rows if isinstance(case, Moe) else case.stored
    layout = dispatcher.binder.layout_of({"m": rows, "n": case.n, "k": case.k}, "torch")
    counts = itertools.cycle(random_counts(case, rows, settings.rng(case.label)))

    def decide() -> Plan:
        return planner.decide(layout, next(counts))

    def cached() -> Plan:
        return planner.plan(layout, next(counts), False)

    for _ in range(COUNTS):
        cached()
    stats = {"select": _time(decide, settings.repeats), "cached": _time(cached, settings.repeats)}
    plan = decide()
    cheapest = plan.choice.cost_us == min(c.cost_us for c in plan.candidates)
    family = next(c.tile.family for c in plan.candidates if c.tile is not None)
    tiles = len(planner.rates().families[family].tiles)
    facts = {"tiles": tiles, "candidates": len(plan.candidates), "tuned": plan.tuned}
    return Row(
        case.label, case.held_out, stats, facts, {"select": 0.0 if cheapest else float("inf")}
    )


def random_counts(
    case: Linear | Moe, rows: int, rng: np.random.Generator
) -> Iterator[tuple[int, ...]]:
    """`COUNTS` times the live rows of each group: shares from 0.01 to 1, groups uneven."""
    for share in rng.uniform(0.01, 1.0, COUNTS):
        live = max(1, round(share * rows))
        if isinstance(case, Moe):
            weights = rng.dirichlet(np.ones(case.experts))
            yield tuple(rng.multinomial(live, weights).tolist())
        else:
            yield (live,)


def _time(run: Callable[[], object], repeats: int) -> Stat:
    seconds = []
    for _ in range(repeats * RUNS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return Stat.of(seconds)


def select_targets(rows: Sequence[Row]) -> list[Target]:
    """The limit on one decision."""
    name = "search: us of one selection from given counts"
    return limits(rows, name, SELECT_US, lambda row: row.us("select"), at_least=False)


def search_suite() -> Suite:
    """Decisions of the planner."""
    return Suite(
        name="search",
        title="one selection from given counts (shape), on the host; us",
        cases=list_selected,
        measure=measure_select,
        columns=(
            time_column("select", "select", 1),
            time_column("cached", "cached", 1),
            fact_column("tiles", "tiles"),
            Column("tuned", lambda row: "yes" if row.facts["tuned"] else "no"),
        ),
        targets=select_targets,
    )


# --------------------------------------------------------------------------------------------
# Predicted and measured


@dataclass(frozen=True)
class Prediction:
    """How good the plans of some rows were.

    ``errors``: relative errors of the predicted cost. ``behind``: time of the chosen candidate
    over the fastest of those timed, by label; 1 where it was the fastest.
    """

    errors: dict[str, float]
    behind: dict[str, float]

    @property
    def median(self) -> float:
        """The median error."""
        return statistics.median(self.errors.values())

    @property
    def best_share(self) -> float:
        """Share of rows whose choice was the fastest, or as fast within `NEARLY`."""
        return statistics.mean(ratio <= NEARLY for ratio in self.behind.values())

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda label: self.errors[label])
        slowest = max(self.behind, key=lambda label: self.behind[label])
        return (
            f"{len(self.errors)} rows: predicted cost off by {100 * self.median:.1f} % in the "
            f"median, {100 * self.errors[worst]:.0f} % at worst ({worst}); the choice was the "
            f"fastest of those timed, within {100 * (NEARLY - 1):.0f} %, in "
            f"{100 * self.best_share:.0f} % of the rows, and {self.behind[slowest]:.2f}x the "
            f"fastest at worst ({slowest})"
        )


def predictions(rows: Sequence[Row]) -> Prediction:
    """Of rows of the suites ``padding`` and ``moe``."""
    errors, behind = {}, {}
    for row in rows:
        measured = row.us("pit")
        errors[row.label] = abs(row.facts["predicted_us"] - measured) / measured
        timed = [row.us(name) for name in LATER if name in row.stats]
        behind[row.label] = measured / min([measured, *timed])
    return Prediction(errors, behind)


def prediction_targets(rows: Sequence[Row]) -> list[Target]:
    """The limit on the median error, for ordinary rows and for held-out ones."""
    name = "search: median error of the predicted cost"
    kinds = {apart: [row for row in rows if row.held_out == apart] for apart in (False, True)}
    return [
        Target(name, PREDICTED_WITHIN, False, predictions(some).median, apart)
        for apart, some in kinds.items()
        if some
    ]


def held_out_target(records: Sequence[TileRecord]) -> Target:
    """No held-out shape may be among the tasks of the tile database in use."""
    shapes = {(1, n, k) for _, _, n, k in HELD_OUT_LIVE}
    shapes |= {(experts, n, k) for experts, _, n, k in HELD_OUT_EXPERTS}
    layers = [case for case in list_layers(False) if case.held_out]
    shapes |= {(case.experts, n, k) for case in layers for n, k in case.products}
    tasks = [record.task for record in records if record.task is not None]
    known = sum((task.groups, task.n, task.k) in shapes for task in tasks)
    return Target("database: records of held-out shapes", 0, False, known)
