"""The suites ``granularity`` and ``tensorcore``: a sparse lhs times a dense rhs, zeros in blocks
that change. They measure the same of other patterns: every granularity (the paper's figure 15), and
one tile of tensor cores fed by micro-tiles and by whole blocks (its figure 16).

* dense: cuBLAS on the whole lhs, stored row-major; turned: on the lhs stored [k, m];
* pit: the operator with the lhs stored [k, m], the mask in, index inside; index: its index alone;
* rows: the operator with a row-major lhs, whose live columns are packed at every call;
* csr: cuSPARSE's product of compressed rows, conversion of the masked lhs included;
* bsr: torch's product of compressed blocks, the same, where blocks are square.

The best candidate of every plan is timed besides, dense or not. "chosen" says what ran for pit and
for rows: a dense choice is cuBLAS's product, so that its ratio is 1. ``tensorcore`` leaves csr and
bsr out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_gpu_cases import SHORT
from bench_gpu_grains import (
    GOAL_ZEROS,
    GOALS,
    SINGLE_GOALS,
    Grain,
    list_grains,
    list_tensor_cores,
)
from bench_gpu_measure import (
    ERROR_LIMIT,
    Contender,
    GpuSettings,
    float32_precision,
    fresh_memory,
    generator,
    measure,
    normal,
    on,
    poisoned,
    rounding_error,
)
from bench_gpu_pit import Pit, detection, indexing, operator_for, plan_facts
from bench_rows import (
    ERRORS,
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
from pit_tvm.structs import MicroTile

SINGLE = ("float32", "tf32")  # what is computed of float32


@dataclass(frozen=True)
class Data:
    """``lhs`` [m, k] with its zeros, ``rhs`` [k, n], ``mask`` bool [m, k], ``want`` in float64;
    ``kind``: the type to compute in."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    mask: torch.Tensor
    want: torch.Tensor
    kind: str

    def judge(self, out: torch.Tensor) -> float:
        """Error of a whole result."""
        return rounding_error(out, self.want, self.kind)

    def pit(self, case: Grain, settings: GpuSettings, turned: bool) -> Pit:
        """The operator with the lhs stored [k, m] if ``turned``, else [m, k]."""
        made = grain_operator(case, settings.target, turned)
        lhs, mask = (a.t().contiguous() if turned else a for a in (self.lhs, self.mask))
        return Pit(made, (lhs, self.rhs), mask)


def grain_operator(case: Grain, target: str, turned: bool) -> pit_tvm.Operator:
    """The operator that computes a case, with the lhs stored [k, m] if ``turned``."""
    extents = case.grain[::-1] if turned else case.grain
    kind = "turned" if turned else "matmul"
    return operator_for(kind, pit_tvm.Mask(*extents), case.dtype, target, case.sizes)


def make_data(case: Grain, settings: GpuSettings) -> Data:
    """Random arrays of a case."""
    rng = settings.rng(case.label)
    m, n, k = case.sizes
    mask = on(settings.device, block_mask(rng, (m, k), case.grain, case.zeros))
    made = generator(rng, settings.device)
    lhs = normal(made, (m, k), case.dtype) * mask
    rhs = normal(made, (k, n), case.dtype) / k**0.5
    return Data(lhs, rhs, mask, lhs.double() @ rhs.double(), case.kind)


def measure_grain(case: Grain, settings: GpuSettings, compressed: bool = True) -> Row:
    """One case: every contender, correct or not; with ``compressed`` csr and bsr too."""
    with (
        fresh_memory(settings.device),
        float32_precision(case.tf32),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)  # torch calls compressed rows a beta
        data = make_data(case, settings)
        out = poisoned(data.want.shape, data.lhs)
        turned, rows = (data.pit(case, settings, which) for which in (True, False))
        plan = turned.plan(out)
        others, row_plan = turned.others(plan, settings, out), rows.plan(out)
        row_others = rows.others(row_plan, settings, out) if settings.every else {}
        contenders = {
            **(_peers(case, data, turned, compressed) if settings.peers else {}),
            "pit": Contender(turned.run(out), data.judge),
            "rows": Contender(rows.run(poisoned(out.shape, out)), data.judge),
            "index": Contender(_index(case, settings, turned)),
            **{name: Contender(run, data.judge) for name, (_, run) in others.items()},
            **{f"rows {n}": Contender(run, data.judge) for n, (_, run) in row_others.items()},
        }
        found = measure(contenders, settings)
    facts = {
        "grain": list(case.grain),
        "zeros": case.zeros,
        "cube": case.cube,
        "dtype": case.kind,
        "chosen": f"{plan.choice.kind}, {row_plan.choice.kind}",
        "without_graph": found.plain,
        **plan_facts(plan, others),
        **{f"rows_{name}": fact for name, fact in plan_facts(row_plan, row_others).items()},
    }
    row = Row(case.label, case.held_out, found.stats, facts, found.errors, ERROR_LIMIT)
    return Row(**{**vars(row), "facts": facts | _ratios(row)})


def _index(case: Grain, settings: GpuSettings, pit: Pit) -> Callable[[], Any]:
    if settings.device == "cuda":
        return indexing(settings, pit)
    mask = pit.arrays[0] if pit.value is None else pit.value
    micro_tile = MicroTile("lhs", "k", 0, (1, case.grain[0]))
    return detection(settings, pit_tvm.Mask(), mask, mask.shape, micro_tile)


def _peers(case: Grain, data: Data, turned: Pit, compressed: bool) -> dict[str, Contender]:
    left = turned.arrays[0]

    def csr() -> torch.Tensor:
        return data.lhs.to_sparse_csr() @ data.rhs

    def bsr() -> torch.Tensor:
        return data.lhs.to_sparse_bsr(case.grain) @ data.rhs

    peers = {
        "dense": Contender(lambda: data.lhs @ data.rhs, data.judge),
        "turned": Contender(lambda: left.t() @ data.rhs, data.judge),
    }
    if left.is_cuda and compressed:  # a CPU has no 16-bit products of sparse operands
        peers["csr"] = Contender(csr, capture=False)  # not judged: its sums are rounded to 16 bits
        if case.grain[0] == case.grain[1] > 1:
            peers["bsr"] = Contender(bsr, capture=False)
    return peers


def _ratios(row: Row) -> dict[str, Any]:
    peers = [name for name in ("dense", "turned") if name in row.stats]
    if not peers:
        return {}
    pit, rows = row.us("pit"), row.us("rows")
    dense = min(row.us(name) for name in peers)
    sparse = [row.us(name) for name in ("csr", "bsr") if name in row.stats]
    high, wide = row.facts["grain"]
    # 16-bit pieces of one row are gathered whole from a row-major lhs, and from no other.
    pieces = high == 1 < wide and row.facts["dtype"] not in SINGLE
    return {
        "over_dense": dense / (rows if pieces else pit),
        "rows_over_dense": dense / rows,
        "over_sparse": min(sparse) / pit if sparse else None,
        "index_share": row.us("index") / pit,
    }


def granularity_targets(rows: Sequence[Row], name: str = "granularity") -> list[Target]:
    """The goals for the k axis, by the rows of suite ``name``."""

    def here(grain: tuple[int, int], zeros: float, kind: str) -> Callable[[Row], bool]:
        at = (list(grain), zeros, kind)

        def found(row: Row) -> bool:
            facts = row.facts
            own = facts.get("dtype")
            return facts["cube"] and at == (
                facts["grain"],
                facts["zeros"],
                f"{SHORT[own]} " if own in SINGLE else "",
            )

        return found

    goals = [
        (f"{name}: {kind}{m}x{k} {100 * zeros:g} %, over dense", goal, here((m, k), zeros, kind))
        for kind, of_all in (("", GOALS), ("fp32 ", SINGLE_GOALS))
        for (m, k), each in of_all.items()
        for zeros, goal in zip(GOAL_ZEROS, each, strict=True)
    ]
    return over_dense(rows, goals, f"{name}: over dense, every row")


def _compressed(row: Row) -> str:
    return ", ".join(f"{n} {row.us(n):.0f}" for n in ("csr", "bsr") if n in row.stats) or "-"


_COLUMNS = (
    *(time_column(n, n, 1) for n in ("dense", "turned", "pit", "rows", "index")),
    fact_column("predict", "predicted_us", ".1f"),
    fact_column("/dense", "over_dense", ".2f"),
    fact_column("rows/dense", "rows_over_dense", ".2f"),
)
_LAST = (fact_column("chosen", "chosen"), ERRORS)
GRANULARITY = Suite(
    name="granularity",
    title="a sparse lhs times a dense rhs; us",
    cases=list_grains,
    measure=measure_grain,
    columns=(*_COLUMNS, Column("sparse", _compressed), *_LAST),
    targets=granularity_targets,
)
TENSOR = Suite(
    name="tensorcore",
    title="one tensor-core tile fed by micro-tiles and by blocks; us",
    cases=list_tensor_cores,
    measure=partial(measure_grain, compressed=False),
    columns=(*_COLUMNS, *_LAST),
    targets=partial(granularity_targets, name="tensorcore"),
)
