"""The suite ``granularity``: a sparse lhs times a dense rhs, zeros in blocks that change.

* dense: cuBLAS on the whole lhs, stored row-major; turned: on the lhs stored [k, m];
* pit: the operator with the lhs stored [k, m], the mask in, index inside; index: its index alone;
* rows: the operator with a row-major lhs, whose live columns are packed at every call;
* csr: cuSPARSE's product of compressed rows, conversion of the masked lhs included;
* bsr: torch's product of compressed blocks, the same, where blocks are square.

The best candidate of every plan is timed besides, dense or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_gpu_cases import QUICK, SHORT
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
    rounding_error,
)
from bench_gpu_pit import Pit, detection, internals, mapping, operator, plan_facts, sizes_for
from bench_rows import (
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

SIZE = 4096
GRAINS = ((32, 1), (64, 1), (128, 1), (32, 64), (64, 64))
ZEROS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Over dense at 90, 95 and 99 % zeros; and every row.
GOALS = {
    (32, 1): (2.0, 4.0, 7.0),
    (64, 1): (3.0, 5.5, 8.0),
    (128, 1): (4.5, 6.5, 7.0),
    (32, 64): (2.1, 4.2, 7.5),
    (64, 64): (4.5, 6.5, 7.0),
}
NEVER_BELOW = 0.97


@dataclass(frozen=True)
class Grain:
    """One product ``size``^3 whose lhs has the share ``zeros`` of its blocks zero."""

    grain: tuple[int, int]
    zeros: float
    dtype: str = "float16"
    size: int = SIZE
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        grain = "x".join(map(str, self.grain))
        return f"{self.size}^3 {SHORT[self.dtype]} {grain} {100 * self.zeros:g} %"


def list_grains(quick: bool) -> list[Grain]:
    """Cases of the suite."""
    size = SIZE // QUICK if quick else SIZE
    cases = [Grain(grain, zeros, size=size) for grain in GRAINS for zeros in ZEROS]
    return [*cases, *(Grain((32, 1), zeros, "bfloat16", size) for zeros in ZEROS)]


@dataclass(frozen=True)
class Data:
    """``lhs`` [m, k] with its zeros, ``rhs`` [k, n], ``mask`` bool [m, k], ``want`` in float64."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    mask: torch.Tensor
    want: torch.Tensor

    def judge(self, out: torch.Tensor) -> float:
        """Error of a whole result."""
        return rounding_error(out, self.want)

    def pit(self, case: Grain, settings: GpuSettings, turned: bool) -> Pit:
        """The operator with the lhs stored [k, m] if ``turned``, else [m, k]."""
        extents = case.grain[::-1] if turned else case.grain
        sizes = sizes_for(settings.target, case.size, case.size)
        kind = "turned" if turned else "matmul"
        made = operator(kind, pit_tvm.Mask(*extents), case.dtype, settings.target, sizes)
        lhs, mask = (a.t().contiguous() if turned else a for a in (self.lhs, self.mask))
        return Pit(made, (lhs, self.rhs), mask)


def make_data(case: Grain, settings: GpuSettings) -> Data:
    """Random arrays of a case."""
    rng = settings.rng(case.label)
    mask = on(settings.device, block_mask(rng, (case.size, case.size), case.grain, case.zeros))
    made = generator(rng, settings.device)
    lhs = normal(made, mask.shape, case.dtype) * mask
    rhs = normal(made, mask.shape, case.dtype) / case.size**0.5
    return Data(lhs, rhs, mask, lhs.double() @ rhs.double())


def measure_grain(case: Grain, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls compressed rows a beta
        data = make_data(case, settings)
        out = poisoned(data.want.shape, data.lhs)
        turned, rows = (data.pit(case, settings, which) for which in (True, False))
        plan = turned.plan(out)
        others = turned.others(plan, settings.tiles, out)
        contenders = {
            **(_peers(case, data, turned) if settings.peers else {}),
            "pit": Contender(turned.run(out), data.judge),
            "rows": Contender(rows.run(poisoned(out.shape, out)), data.judge),
            "index": Contender(_index(case, settings, turned)),
            **{name: Contender(run, data.judge) for name, (_, run) in others.items()},
        }
        row_plan = rows.plan(out)
        found = measure(contenders, settings)
    facts = {
        "grain": list(case.grain),
        "zeros": case.zeros,
        "without_graph": found.plain,
        **plan_facts(plan),
        "rows_kernel": str(row_plan.choice),
        "others": {name: [str(c), c.cost_us] for name, (c, _) in others.items()},
    }
    row = Row(case.label, case.held_out, found.stats, facts, found.errors, ERROR_LIMIT)
    return Row(**{**vars(row), "facts": facts | _ratios(row)})


def _index(case: Grain, settings: GpuSettings, pit: Pit) -> Callable[[], Any]:
    if settings.device == "cuda":
        micro_tile = internals(pit.operator).form.route.micro_tile
    else:
        micro_tile = MicroTile("lhs", "k", 0, (1, case.grain[0]))
    mask = pit.arrays[0] if pit.value is None else pit.value
    mapped = mapping(pit.operator, mask, mask.shape)
    if mapped is not None:
        return mapped
    return detection(settings, pit_tvm.Mask(), mask, mask.shape, micro_tile)


def _peers(case: Grain, data: Data, turned: Pit) -> dict[str, Contender]:
    left = turned.arrays[0]

    def csr() -> torch.Tensor:
        return data.lhs.to_sparse_csr() @ data.rhs

    def bsr() -> torch.Tensor:
        return data.lhs.to_sparse_bsr(case.grain) @ data.rhs

    peers = {
        "dense": Contender(lambda: data.lhs @ data.rhs, data.judge),
        "turned": Contender(lambda: left.t() @ data.rhs, data.judge),
    }
    if left.is_cuda:  # a CPU has no 16-bit products of sparse operands
        peers["csr"] = Contender(csr, capture=False)  # not judged: its sums are rounded to 16 bits
        if case.grain[0] == case.grain[1]:
            peers["bsr"] = Contender(bsr, capture=False)
    return peers


def _ratios(row: Row) -> dict[str, Any]:
    peers = [name for name in ("dense", "turned") if name in row.stats]
    if not peers:
        return {}
    pit, rows = row.us("pit"), row.us("rows")
    dense = min(row.us(name) for name in peers)
    sparse = [row.us(name) for name in ("csr", "bsr") if name in row.stats]
    return {
        "over_dense": dense / pit,
        "rows_over_dense": dense / rows,
        "over_sparse": min(sparse) / pit if sparse else None,
        "index_share": row.us("index") / pit,
    }


def granularity_targets(rows: Sequence[Row]) -> list[Target]:
    """The goals for the k axis."""

    def here(grain: tuple[int, int], zeros: float) -> Callable[[Row], bool]:
        at = (list(grain), zeros)
        return lambda row: (row.facts["grain"], row.facts["zeros"]) == at

    goals = [
        (f"granularity: {m}x{k} {100 * zeros:g} %, over dense", goal, here((m, k), zeros))
        for (m, k), each in GOALS.items()
        for zeros, goal in zip(ZEROS[-3:], each, strict=True)
    ]
    return over_dense(rows, goals, "granularity: over dense, every row", NEVER_BELOW)


def granularity_suite() -> Suite:
    """Products with a sparse lhs of every granularity."""

    def sparse(row: Row) -> str:
        return ", ".join(f"{n} {row.us(n):.0f}" for n in ("csr", "bsr") if n in row.stats) or "-"

    return Suite(
        name="granularity",
        title="a sparse lhs times a dense rhs; us",
        cases=list_grains,
        measure=measure_grain,
        columns=(
            time_column("dense", "dense", 1),
            time_column("turned", "turned", 1),
            time_column("pit", "pit", 1),
            time_column("rows", "rows", 1),
            time_column("index", "index", 1),
            fact_column("predict", "predicted_us", ".1f"),
            fact_column("/dense", "over_dense", ".2f"),
            fact_column("rows/dense", "rows_over_dense", ".2f"),
            Column("sparse", sparse),
            Column("errors", lambda row: f"{row.error:.1f}"),
        ),
        targets=granularity_targets,
    )
