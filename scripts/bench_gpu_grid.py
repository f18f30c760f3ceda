"""The suite ``grid``: a sparse lhs times a dense rhs, with zeros that fill whole rows and columns.

Which rows and which columns live is told by a mask that may be new at every call.

* dense: cuBLAS on the whole product;
* packed: as one writes it with torch: live columns of live rows of lhs and the rows of rhs that
  they meet are copied together, multiplied by cuBLAS, and copied into zeros. How much lives is
  waited for, so that it is never in a graph;
* pit: the operator with the mask in, into a given output; index: its lists of live rows and of live
  columns alone.

"chosen" says what ran: dense, live rows gathered ("1x*"), or live columns of them ("1x* and *x1").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from bench_gpu_cases import HELD_OUT_LIVE, SHORT
from bench_gpu_grains import BERT, CUBE, NEVER_BELOW, Sizes, sized
from bench_gpu_granularity import Data
from bench_gpu_measure import (
    ERROR_LIMIT,
    Contender,
    GpuSettings,
    fresh_memory,
    generator,
    measure,
    normal,
    on,
    poisoned,
)
from bench_gpu_pit import Pit, detection, internals, operator, plan_facts, sizes_for
from bench_rows import (
    Array,
    Column,
    Row,
    Suite,
    Target,
    block_mask,
    fact_column,
    over_dense,
    time_column,
)

import pit_tvm

# Shares of live rows and of live columns.
LIVE = ((0.5, 0.5), (0.25, 0.25), (1.0, 0.25), (0.25, 1.0), (0.1, 0.1), (1.0, 0.5), (1.0, 1.0))


@dataclass(frozen=True)
class Cross:
    """A product of ``sizes`` m, n, k whose lhs lives where a live row and a live column cross;
    ``live``: the share of either."""

    sizes: Sizes
    live: tuple[float, float]
    dtype: str = "float16"
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        shape = "x".join(map(str, self.sizes))
        rows, columns = (f"{100 * share:g} %" for share in self.live)
        return f"{shape} {SHORT[self.dtype]} rows {rows} columns {columns}"

    def lines(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Which rows live, bool [m, 1], and which columns, bool [1, k]."""
        (m, _, k), (rows, columns) = self.sizes, (1.0 - share for share in self.live)
        return block_mask(rng, (m, 1), (1, 1), rows), block_mask(rng, (1, k), (1, 1), columns)

    def counts(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Live rows, and live columns."""
        return tuple(int(line.sum()) for line in self.lines(rng))


def list_grid(quick: bool) -> list[Cross]:
    """Cases of the suite, held-out ones last."""
    cube, *bert = sized((CUBE, *BERT), quick)
    made = [Cross(sizes, live) for sizes in (cube, *bert) for live in LIVE]
    made.append(Cross(cube, (0.25, 0.25), "bfloat16"))
    apart = sized([(stored, n, k) for _, stored, n, k in HELD_OUT_LIVE], quick)
    return [*made, *(Cross(sizes, live, held_out=True) for sizes in apart for live in LIVE)]


def make_data(case: Cross, settings: GpuSettings) -> Data:
    """Random arrays of a case."""
    rng, (m, n, k) = settings.rng(case.label), case.sizes
    rows, columns = case.lines(rng)
    mask, made = on(settings.device, rows & columns), generator(rng, settings.device)
    lhs = normal(made, (m, k), case.dtype) * mask
    rhs = normal(made, (k, n), case.dtype) / k**0.5
    return Data(lhs, rhs, mask, lhs.double() @ rhs.double(), case.dtype)


def grid_operator(case: Cross, target: str) -> pit_tvm.Operator:
    """The operator that computes a case."""
    _, n, k = case.sizes
    return operator("matmul", pit_tvm.Grid(), case.dtype, target, sizes_for(target, n, k))


def measure_grid(case: Cross, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        data = make_data(case, settings)
        out = poisoned(data.want.shape, data.lhs)
        pit = Pit(grid_operator(case, settings.target), (data.lhs, data.rhs), data.mask)
        plan = pit.plan(out)
        others = pit.others(plan, settings, out)
        runs = {"pit": pit.run(out), **{name: run for name, (_, run) in others.items()}}
        contenders = _peers(data) if settings.peers else {}
        contenders |= {name: Contender(run, data.judge) for name, run in runs.items()}
        contenders["index"] = Contender(_index(pit.operator, data.mask, settings))
        found = measure(contenders, settings)
    rows, columns = case.live
    facts = {
        "live_rows": rows,
        "live_columns": columns,
        "chosen": str(plan.choice.micro_tile or plan.choice.kind),
        "without_graph": found.plain,
        **plan_facts(plan, others),
    }
    us = {name: stat.median for name, stat in found.stats.items()}
    facts["index_share"] = us["index"] / us["pit"]
    facts |= {f"over_{n}": us[n] / us["pit"] for n in ("dense", "packed") if n in us}
    return Row(case.label, case.held_out, found.stats, facts, found.errors, ERROR_LIMIT)


def _peers(data: Data) -> dict[str, Contender]:
    lhs, rhs = data.lhs, data.rhs

    def packed() -> torch.Tensor:
        rows, columns = (data.mask.any(other).nonzero().squeeze(1) for other in (1, 0))
        own = lhs.index_select(0, rows).index_select(1, columns)
        out = lhs.new_zeros(data.want.shape)
        return out.index_copy_(0, rows, own @ rhs.index_select(0, columns))

    return {
        "dense": Contender(lambda: lhs @ rhs, data.judge),
        "packed": Contender(packed, data.judge, capture=False),
    }


def _index(
    made: pit_tvm.Operator, mask: torch.Tensor, settings: GpuSettings
) -> Callable[[], list[Any]]:
    """A function that lists live rows and live columns once."""
    program = internals(made).program
    both = next(route.micro_tile for route in program.routes if route.micro_tile.also)
    finds = [
        detection(settings, program.spec, mask, mask.shape, micro_tile)
        for micro_tile in (replace(both, also=None), both.also)
    ]
    return lambda: [find() for find in finds]


def grid_targets(rows: Sequence[Row]) -> list[Target]:
    """The goal for every row."""
    return over_dense(rows, (), "grid: over dense, every row", NEVER_BELOW)


def grid_suite() -> Suite:
    """Products with a sparse lhs of which whole rows and whole columns are zero."""
    return Suite(
        name="grid",
        title="live rows and live columns of an lhs times a dense rhs; us",
        cases=list_grid,
        measure=measure_grid,
        columns=(
            *(time_column(name, name, 1) for name in ("dense", "packed", "pit", "index")),
            fact_column("predict", "predicted_us", ".1f"),
            fact_column("/dense", "over_dense", ".2f"),
            fact_column("/packed", "over_packed", ".2f"),
            fact_column("index/pit", "index_share", ".2f"),
            fact_column("chosen", "chosen"),
            Column("errors", lambda row: f"{row.error:.1f}"),
        ),
        targets=grid_targets,
    )
