"""The suite ``grid``: products of which zeros fill whole rows and columns of one operand.

Which of them live is told by a mask that may be new at every call: rows of lhs or columns of rhs,
and of either what meets along k. "lhs [k, m]" and "rhs [n, k]" are stored like that.

* dense: cuBLAS on the whole product, bias included;
* packed: as one writes it with torch: what lives of both operands is copied together, multiplied by
  cuBLAS, and copied into zeros. How much lives is waited for, so that it is never in a graph;
* pit: the operator with the mask in, into a given output; index: its two lists alone.

"chosen" says what ran: dense, live rows gathered ("1x*"), or live columns of them ("1x* and *x1").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from bench_gpu_cases import HELD_OUT_LIVE, SHORT
from bench_gpu_grains import BERT, CUBE, Sizes, sized
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
from bench_gpu_pit import Pit, detection, detector, internals, operator_for, plan_facts
from bench_rows import (
    ERRORS,
    Array,
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
# Operators whose products are turned on the way, with the sparse operand, and what lives of these.
TURNED = (("turned", "lhs"), ("matmul", "rhs"), ("linear", "rhs"), ("turned", "rhs"))
TURNED_LIVE = ((0.25, 0.25), (1.0, 0.25), (0.25, 1.0), (1.0, 1.0))
STORED = {"matmul": "", "linear": " rhs [n, k]", "turned": " lhs [k, m]"}


@dataclass(frozen=True)
class Cross:
    """A product of ``sizes`` m, n, k of which the operand ``side`` lives where a live row of lhs,
    or column of rhs, crosses a live one of k; ``live``: the share of either. ``kind`` and ``bias``:
    as in `bench_gpu_pit.operator`."""

    sizes: Sizes
    live: tuple[float, float]
    dtype: str = "float16"
    held_out: bool = False
    kind: str = "matmul"
    side: str = "lhs"
    bias: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        shape = "x".join(map(str, self.sizes))
        rows, columns = (f"{100 * share:g} %" for share in self.live)
        what = STORED[self.kind] + " sparse rhs" * (self.side == "rhs")
        what += " bias" * self.bias
        return f"{shape} {SHORT[self.dtype]}{what} rows {rows} columns {columns}"

    def lines(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """What lives of rows of lhs or columns of rhs, bool [m or n, 1], and of k, bool [1, k]."""
        (m, n, k), (rows, columns) = self.sizes, (1.0 - share for share in self.live)
        high = m if self.side == "lhs" else n
        return block_mask(rng, (high, 1), (1, 1), rows), block_mask(rng, (1, k), (1, 1), columns)

    def counts(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Live rows, and live columns."""
        return tuple(int(line.sum()) for line in self.lines(rng))


def list_grid(quick: bool) -> list[Cross]:
    """Cases of the suite, held-out ones last."""
    cube, *bert = sized((CUBE, *BERT), quick)
    made = [Cross(sizes, live) for sizes in (cube, *bert) for live in LIVE]
    made.append(Cross(cube, (0.25, 0.25), "bfloat16"))
    for kind, side in TURNED:
        made += (Cross(cube, live, kind=kind, side=side) for live in TURNED_LIVE)
        made.append(Cross(bert[0], (0.25, 0.25), kind=kind, side=side))
    # A layer that lost inputs and outputs.
    pruned: dict[str, Any] = {"kind": "linear", "side": "rhs", "bias": True}
    made += (Cross(sizes, (0.25, 0.25), **pruned) for sizes in (cube, *bert))
    apart = sized([(stored, n, k) for _, stored, n, k in HELD_OUT_LIVE], quick)
    return [*made, *(Cross(sizes, live, held_out=True) for sizes in apart for live in LIVE)]


@dataclass(frozen=True)
class CrossData(Data):
    """``mask`` is that of the sparse operand as it is ``stored``, whose dimension ``rows`` is that
    of rows; lhs and rhs are views of what is stored, which a bias may follow."""

    stored: tuple[torch.Tensor, ...]
    rows: int


def make_data(case: Cross, settings: GpuSettings) -> CrossData:
    """Random arrays of a case."""
    rng, (m, n, k), device = settings.rng(case.label), case.sizes, settings.device
    rows, columns = (on(device, line) for line in case.lines(rng))
    made, mask = generator(rng, device), rows & columns
    lhs, rhs = normal(made, (m, k), case.dtype), normal(made, (k, n), case.dtype) / k**0.5
    if case.side == "lhs":
        lhs *= mask
    else:
        rhs *= mask.t()
    turned = (case.kind == "turned", case.kind != "linear")  # [k, m] and [k, n]
    stored = tuple(_stored(a, t) for a, t in zip((lhs, rhs.t()), turned, strict=True))
    left, right = (a.t() if t else a for a, t in zip(stored, turned, strict=True))
    across = turned[case.side == "rhs"]
    want, told = lhs.double() @ rhs.double(), _stored(mask, across)
    if case.bias:
        stored = (*stored, normal(made, (n,), case.dtype))
        want += stored[-1].double()
    return CrossData(left, right.t(), told, want, case.dtype, stored, int(across))


def _stored(array: torch.Tensor, turned: bool) -> torch.Tensor:
    return (array.t() if turned else array).contiguous()


def grid_operator(case: Cross, target: str) -> pit_tvm.Operator:
    """The operator that computes a case."""
    given: dict[str, Any] = {"bias": case.bias, "side": case.side}
    return operator_for(case.kind, pit_tvm.Grid(), case.dtype, target, case.sizes, **given)


def measure_grid(case: Cross, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        data = make_data(case, settings)
        out = poisoned(data.want.shape, data.lhs)
        pit = Pit(grid_operator(case, settings.target), data.stored, data.mask)
        plan = pit.plan(out)
        others = pit.others(plan, settings, out)
        runs = {"pit": pit.run(out), **{name: run for name, (_, run) in others.items()}}
        contenders = _peers(case, data) if settings.peers else {}
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


def _peers(case: Cross, data: CrossData) -> dict[str, Contender]:
    lhs, rhs, bias = data.lhs, data.rhs, (*data.stored, None)[2]

    def whole() -> torch.Tensor:
        return lhs @ rhs if bias is None else torch.addmm(bias, lhs, rhs)

    def packed() -> torch.Tensor:
        axes = (data.rows, 1 - data.rows)
        rows, columns = (data.mask.any(1 - axis).nonzero().squeeze(1) for axis in axes)
        own, other = lhs.index_select(1, columns), rhs.index_select(0, columns)
        if bias is None:
            out = lhs.new_zeros(data.want.shape)
        else:
            out = bias.expand(data.want.shape).contiguous()
        if case.side == "lhs":
            return out.index_copy_(0, rows, own.index_select(0, rows) @ other)
        live = other.index_select(1, rows)
        found = own @ live if bias is None else torch.addmm(bias[rows], own, live)
        return out.index_copy_(1, rows, found)

    return {
        "dense": Contender(whole, data.judge),
        "packed": Contender(packed, data.judge, capture=False),
    }


def _index(made: pit_tvm.Operator, mask: torch.Tensor, settings: GpuSettings) -> Callable[[], Any]:
    """A function that lists live rows and live columns once."""
    program = internals(made).program
    both = next(route.micro_tile for route in program.routes if route.micro_tile.also)
    tiles = (replace(both, also=None), both.also)
    if settings.device == "cuda":
        find = detector(settings.target).detect_axes
        return lambda: find(program.spec, mask, mask.shape, tiles)
    finds = [detection(settings, program.spec, mask, mask.shape, tile) for tile in tiles]
    return lambda: [find() for find in finds]


def grid_targets(rows: Sequence[Row]) -> list[Target]:
    """The goal for every row."""
    return over_dense(rows, (), "grid: over dense, every row")


GRID = Suite(
    name="grid",
    title="live rows and live columns of one operand times a dense one; us",
    cases=list_grid,
    measure=measure_grid,
    columns=(
        *(time_column(name, name, 1) for name in ("dense", "packed", "pit", "index")),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("/dense", "over_dense", ".2f"),
        fact_column("/packed", "over_packed", ".2f"),
        fact_column("index/pit", "index_share", ".2f"),
        fact_column("chosen", "chosen"),
        ERRORS,
    ),
    targets=grid_targets,
)
