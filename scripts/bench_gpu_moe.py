"""The suite ``moe``: the first expert product with routing ids in, against grouped products.

* whole: ``sort`` of the ids as bytes, gather, ``torch._grouped_mm``; its result stays sorted;
* sorted: ``_grouped_mm`` alone, on rows that are sorted already;
* loop: one cuBLAS product for each expert on sorted rows, their counts known to the host;
* cublas: one product of as many rows with one weight: the rate that cuBLAS has at these sizes;
* pit: the operator, or `pit_tvm.torch.grouped_linear` where tokens go to several experts: ids in,
  index inside, results in the order of the tokens' choices; index: alone.

The floor is the time of the operations at 714 TFLOP/s, or of reading the weights of all experts
in use once at 4.28 TB/s, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_gpu_cases import Moe, list_moe
from bench_gpu_experts import ROWS, Choices
from bench_gpu_measure import (
    ERROR_LIMIT,
    Contender,
    GpuSettings,
    fresh_memory,
    generator,
    host_stats,
    host_targets,
    measure,
    normal,
    on,
    poisoned,
    rounding_error,
)
from bench_gpu_pit import Pit, detection, operator_of, plan_facts
from bench_gpu_rivals import sort_ids
from bench_rows import ERRORS, Row, Suite, Target, fact, fact_column, limits, time_column

import pit_tvm

FLOOR_TFLOPS, FLOOR_TBPS = 714.0, 4.28
OVER_FLOOR, CUBLAS_SHARE, LOOP_SHARE = 1.6, 0.85, 0.93


@dataclass(frozen=True)
class Data:
    """Arrays of one case: ``x`` [tokens, k], ``weight`` [experts, n, k], ``ids`` int32 [rows], a
    row for each choice of a token; rows by expert in ``order``, their ``tokens``, each expert's
    between two of ``ends``; ``want`` float64 [rows, n]."""

    x: torch.Tensor
    weight: torch.Tensor
    ids: torch.Tensor
    order: torch.Tensor
    tokens: torch.Tensor
    ends: list[int]
    want: torch.Tensor


def make_data(case: Moe, settings: GpuSettings) -> Data:
    """Random arrays of a case."""
    rng = settings.rng(case.label)
    routing = case.route(rng)
    made = generator(rng, settings.device)
    x = normal(made, (case.tokens, case.k), case.dtype)
    weight = normal(made, (case.experts, case.n, case.k), case.dtype) / case.k**0.5
    order = on(settings.device, np.argsort(routing, kind="stable"))
    ends = np.cumsum(np.bincount(routing, minlength=case.experts)).tolist()
    want = torch.empty((case.rows, case.n), dtype=torch.float64, device=settings.device)
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows = order[begin:end]
        want[rows] = x[rows // case.top_k].double() @ weight[expert].double().t()
    ids = on(settings.device, routing)
    return Data(x, weight, ids, order, order // case.top_k, ends, want)


def floor_us(rows: int, n: int, k: int, used: int) -> float:
    """Lower bound of one product in which ``used`` experts have rows, in microseconds."""
    return max(2e-6 * rows * n * k / FLOOR_TFLOPS, 2e-6 * used * n * k / FLOOR_TBPS)


def measure_moe(case: Moe, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        data = make_data(case, settings)
        pit = _pit(case, data, settings)
        out = poisoned((case.rows, case.n), data.x)
        plan = pit.plan(out)
        others = pit.others(plan, settings, out)

        error = partial(rounding_error, want=data.want)
        contenders = {
            **(_peers(data, case.top_k) if settings.peers else {}),
            "pit": Contender(pit.run(out), error),
            **{name: Contender(run, error) for name, (_, run) in others.items()},
        }
        if settings.peers:
            spec, shape = pit_tvm.Groups(case.experts), (case.rows, case.k)
            contenders["index"] = Contender(detection(settings, spec, data.ids, shape, ROWS))
        found = measure(contenders, settings)
        stats = dict(found.stats)
        if isinstance(pit, Pit):  # the others go through torch's library of operators
            stats |= host_stats(pit.run(out), found.stats["pit"], settings.device)
        counts = np.diff([0, *data.ends])
        facts = {
            "sizes": [case.experts, case.top_k, case.n, case.k],
            "routing": case.routing,
            "peak": float(counts.max() / max(1, counts.sum())),
            "floor_us": floor_us(case.rows, case.n, case.k, int((counts > 0).sum())),
            "without_graph": found.plain,
            **plan_facts(plan, others),
        }
    row = Row(case.label, case.held_out, stats, facts, found.errors, ERROR_LIMIT)
    facts |= _ratios(row, case) if settings.peers else {}
    return row


def _pit(case: Moe, data: Data, settings: GpuSettings) -> Pit | Choices:
    if case.top_k == 1:
        return Pit(operator_of(case, settings.target), (data.x, data.weight, data.ids), None)
    ids = data.ids.view(case.tokens, case.top_k)
    counts = tuple(np.diff([0, *data.ends]).tolist())
    return Choices(case, data.x, data.weight, ids, counts, settings)


def _peers(data: Data, top_k: int) -> dict[str, Contender]:
    weights = data.weight.transpose(1, 2)  # [experts, k, n], columns contiguous
    experts = torch.arange(len(weights), dtype=torch.int32, device=data.x.device)
    packed = data.x[data.tokens]
    ends = torch.tensor(data.ends, dtype=torch.int32, device=data.x.device)
    spans = list(zip([0, *data.ends], data.ends, strict=False))
    looped = poisoned(data.want.shape, data.x)

    def whole() -> torch.Tensor:
        ordered, order = sort_ids(data.ids, len(weights))
        offs = torch.searchsorted(ordered, experts, right=True, out_int32=True)
        tokens = order // top_k if top_k > 1 else order
        return torch._grouped_mm(data.x[tokens], weights, offs=offs)

    def loop() -> torch.Tensor:
        for expert, (begin, end) in enumerate(spans):
            if end > begin:
                torch.mm(packed[begin:end], weights[expert], out=looped[begin:end])
        return looped

    error = partial(rounding_error, want=data.want[data.order])
    return {
        "whole": Contender(whole, error),
        "sorted": Contender(lambda: torch._grouped_mm(packed, weights, offs=ends), error),
        "loop": Contender(loop, error),
        "cublas": Contender(lambda: torch.mm(packed, weights[0])),
    }


def _ratios(row: Row, case: Moe) -> dict[str, Any]:
    pit = row.us("pit")
    return {
        "bound_us": row.facts["floor_us"],
        "over_floor": pit / row.facts["floor_us"],
        "over_whole": row.us("whole") / pit,
        "over_sorted": row.us("sorted") / pit,
        "of_loop": row.us("loop") / pit,
        "of_cublas": row.us("cublas") / pit,
        "tflops": 2e-6 * case.rows * case.n * case.k / pit,
    }


def moe_targets(rows: Sequence[Row]) -> list[Target]:
    """The issue's limits for mixtures of experts."""

    def of(*sizes: tuple[int, int]) -> Callable[[Row], bool]:
        return lambda row: tuple(row.facts["sizes"][:2]) in sizes

    return [
        *limits(
            rows,
            "moe: times the floor, top-1 768->3072",
            OVER_FLOOR,
            fact("over_floor"),
            at_least=False,
            only=lambda row: row.facts["sizes"][1:] == [1, 3072, 768],
        ),
        *limits(
            rows,
            "moe: of the rate of cuBLAS, E=64 top-6",
            CUBLAS_SHARE,
            fact("of_cublas"),
            only=of((64, 6)),
        ),
        *limits(
            rows,
            "moe: of the loop of cuBLAS, E=8 top-2",
            LOOP_SHARE,
            fact("of_loop"),
            only=of((8, 2)),
        ),
        *limits(rows, "moe: over argsort + gather + _grouped_mm", 1.0, fact("over_whole")),
        *host_targets("moe", rows),
    ]


MOE = Suite(
    name="moe",
    title="first expert product, routing ids in (experts, routing); us",
    cases=list_moe,
    measure=measure_moe,
    columns=(
        fact_column("peak", "peak", ".2f"),
        *(time_column(n, n, 1) for n in ("whole", "sorted", "loop", "cublas", "pit", "index")),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("floor", "floor_us", ".1f"),
        fact_column("x floor", "over_floor", ".2f"),
        fact_column("/whole", "over_whole", ".2f"),
        fact_column("/sorted", "over_sorted", ".2f"),
        fact_column("/loop", "of_loop", ".2f"),
        fact_column("/cublas", "of_cublas", ".2f"),
        ERRORS,
    ),
    targets=moe_targets,
)
