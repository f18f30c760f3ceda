"""The suite ``search``: what a decision takes; and how good decisions of all suites are.

Its rows time one selection on the host from counts never seen before ("select"), and from counts
whose bucket is known ("cached"); a decision needs no GPU. `predictions` compares predicted with
measured costs, and what was chosen with the other candidates timed: some of a plan's tiles, or all
of its candidates, dense too, in the suites that `candidates_of` makes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from bench_gpu_cases import (
    HELD_OUT_EXPERTS,
    HELD_OUT_LIVE,
    HELD_OUT_TRAINED,
    Linear,
    Moe,
    list_layers,
    list_selected,
)
from bench_gpu_measure import GpuSettings
from bench_gpu_pit import MOST, internals, operator_of
from bench_rows import Column, Row, Stat, Suite, Target, fact_column, limits, time_column

from pit_tvm.structs import Plan
from pit_tvm.tile_db.record import TileRecord

SELECT_US, PREDICTED_WITHIN = 100.0, 0.15
COUNTS, RUNS = 64, 50
NEARLY = 1.02  # of the fastest: as fast, within what two runs differ by
BEHIND, ASIDE = 1.10, 1.05  # goals: of the fastest in the median, of the other side of dense


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


SEARCH = Suite(
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
class Choice:
    """One plan of a row: predicted and measured times of the ``chosen`` candidate, and of all that
    were timed, dense ones and others apart."""

    label: str
    held_out: bool
    chosen: tuple[float, float]
    dense: tuple[tuple[float, float], ...]
    sparse: tuple[tuple[float, float], ...]

    @property
    def error(self) -> float:
        """Relative error of the predicted cost of what ran."""
        return _off(*self.chosen)

    @property
    def errors(self) -> list[float]:
        """Those of all candidates."""
        return [_off(*one) for one in (*self.dense, *self.sparse)]

    @property
    def behind(self) -> float:
        """Time of the chosen candidate over the fastest; 1 where it was the fastest."""
        return self.chosen[1] / min(us for _, us in (*self.dense, *self.sparse))

    @property
    def aside(self) -> float:
        """Time of the chosen candidate over the fastest on the other side of dense; below 1 where
        that is slower, and 0 where there is none."""
        others = self.sparse if self.chosen in self.dense else self.dense
        return self.chosen[1] / min((us for _, us in others), default=math.inf)


def choices_of(row: Row) -> Iterator[Choice]:
    """The plan of ``pit``, and that of ``rows`` where its other candidates were timed too."""
    for name, before, of in (("pit", "", ""), ("rows", "rows_", "rows ")):
        others = row.facts.get(f"{before}others", {})
        if name == "rows" and not others:
            continue
        kernel, predicted = (row.facts[f"{before}{fact}"] for fact in ("kernel", "predicted_us"))
        chosen = (predicted, row.us(name))
        timed = [(kernel, chosen)]
        timed += [(text, (us, row.us(f"{of}{n}"))) for n, (text, us) in others.items()]
        dense, sparse = (
            tuple(pair for text, pair in timed if text.startswith("dense") is whole)
            for whole in (True, False)
        )
        label = f"{row.label} {name}" if of else row.label
        yield Choice(label, row.held_out, chosen, dense, sparse)


def _off(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured


@dataclass(frozen=True)
class Prediction:
    """How good some choices were."""

    choices: tuple[Choice, ...]

    @property
    def median(self) -> float:
        """The median error of the predicted cost of what ran."""
        return statistics.median(choice.error for choice in self.choices)

    @property
    def behind(self) -> float:
        """The median of the times of what ran over the fastest of those timed."""
        return statistics.median(choice.behind for choice in self.choices)

    @property
    def aside(self) -> float:
        """The worst time of what ran over the fastest on the other side of dense."""
        return max(choice.aside for choice in self.choices)

    def __str__(self) -> str:
        off = max(self.choices, key=lambda choice: choice.error)
        slow = max(self.choices, key=lambda choice: choice.behind)
        fastest = statistics.mean(choice.behind <= NEARLY for choice in self.choices)
        every = [error for choice in self.choices for error in choice.errors]
        wrong = [f"{c.label} ({c.aside:.2f}x)" for c in self.choices if c.aside > ASIDE]
        return (
            f"{len(self.choices)} rows: predicted cost off by {100 * self.median:.1f} % in the "
            f"median, {100 * off.error:.0f} % at worst ({off.label}), and of all {len(every)} "
            f"candidates timed by {100 * statistics.median(every):.1f} % in the median; the choice "
            f"took {self.behind:.3f} of the fastest in the median, {slow.behind:.2f} at worst "
            f"({slow.label}), and was the fastest, within {100 * (NEARLY - 1):.0f} %, in "
            f"{100 * fastest:.0f} % of the rows; over {100 * (ASIDE - 1):.0f} % slower than the "
            f"other side of dense: {len(wrong)}{': ' * bool(wrong)}{'; '.join(wrong)}"
        )


def predictions(rows: Iterable[Row]) -> Prediction:
    """Of rows that have plans."""
    return Prediction(tuple(choice for row in rows for choice in choices_of(row)))


def prediction_targets(rows: Sequence[Row]) -> list[Target]:
    """The limits on choices and on the median error, for ordinary rows and for held-out ones."""
    targets = []
    for apart in (False, True):
        some = [row for row in rows if row.held_out == apart]
        if some:
            found = predictions(some)
            targets += [
                Target(f"search: {name}", limit, False, got, apart)
                for name, limit, got in (
                    ("median error of the predicted cost", PREDICTED_WITHIN, found.median),
                    ("times the fastest candidate, median", BEHIND, found.behind),
                    ("times the other side of dense, worst", ASIDE, found.aside),
                )
                if got > 0.0
            ]
    return targets


def candidates_of(suite: Suite) -> Suite:
    """A suite with pit-tvm alone, every candidate of its plans timed."""

    def measure(case: Any, settings: GpuSettings) -> Row:
        row = suite.measure(case, replace(settings, peers=False, every=True))
        found = predictions([row])
        behind = max(choice.behind for choice in found.choices)
        row.facts.update(times_fastest=behind, times_other_side=found.aside)
        return row

    def others(row: Row) -> str:
        pairs = [pair for c in choices_of(row) for pair in (*c.dense, *c.sparse)]
        return ", ".join(f"{us:.1f}/{predicted:.1f}" for predicted, us in pairs)

    columns: tuple[Column, ...] = (
        time_column("pit", "pit", 1),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("/fastest", "times_fastest", ".2f"),
        fact_column("/other", "times_other_side", ".2f"),
        Column("measured/predicted: dense, then others", others),
    )
    title = f"candidates of plans, but those predicted to take over {MOST:g} times the best; us"
    return Suite(f"{suite.name} plans", title, suite.cases, measure, columns, lambda rows: [])


def held_out_target(records: Sequence[TileRecord]) -> Target:
    """No held-out shape may be among the tasks of the tile database in use."""
    shapes = {(1, n, k) for _, _, n, k in HELD_OUT_LIVE}
    for _, _, _, _, n, k, _ in HELD_OUT_TRAINED:  # forward, and backward to x
        shapes |= {(1, n, k), (1, k, n)}
    shapes |= {(experts, n, k) for experts, _, n, k in HELD_OUT_EXPERTS}
    layers = [case for case in list_layers(False) if case.held_out]
    shapes |= {(case.experts, n, k) for case in layers for n, k in case.products}
    tasks = [record.task for record in records if record.task is not None]
    known = sum((task.groups, task.n, task.k) in shapes for task in tasks)
    return Target("database: records of held-out shapes", 0, False, known)
