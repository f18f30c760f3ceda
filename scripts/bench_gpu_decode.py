"""The suite ``decode``: a few rows with many zeros, as behind ReLU, times large weights.

* dense: cuBLAS on weights stored [k, n]; turned: on weights stored [n, k];
* pit: the operator, which finds the zeros, on weights [k, n], or [n, k] and packed once.

Every call of a graph has activations of its own, and weights take turns: what one call reads is not
in the cache for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_gpu_cases import QUICK, SHORT
from bench_gpu_measure import (
    ERROR_LIMIT,
    MOST_CALLS,
    Contender,
    GpuSettings,
    fresh_memory,
    generator,
    measure,
    normal,
    poisoned,
    rounding_error,
)
from bench_gpu_pit import Others, Pit, later, operator_for, plan_facts
from bench_rows import ERRORS, Row, Suite, Target, fact_column, over_dense, time_column

import pit_tvm
from pit_tvm.structs import Candidate, Plan

FC2 = (5120, 20480)  # n, k of OPT-13B's second layer
HELD_OUT = (7168, 28672)  # of OPT-30B's
GOALS = {1: 6.0, 8: 2.0}  # over dense, by rows, 95 % zeros
WEIGHTS = 2


@dataclass(frozen=True)
class Step:
    """``rows`` of activations with the share ``zeros`` of zeros, each by itself, times weights of
    ``sizes`` n, k. ``layout``: kn, or nk and packed."""

    rows: int
    sizes: tuple[int, int]
    zeros: float = 0.95
    layout: str = "kn"
    dtype: str = "float16"
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        n, k = self.sizes
        return f"{self.rows}x{n}x{k} {SHORT[self.dtype]} {self.layout} {100 * self.zeros:g} %"


def list_steps(quick: bool) -> list[Step]:
    """Cases of the suite."""
    less = QUICK if quick else 1
    fc2, other = ((n // less, k // less) for n, k in (FC2, HELD_OUT))
    made = [Step(rows, fc2) for rows in (1, 2, 4, 8, 12, 16, 32, 64)]
    made += [Step(rows, fc2, zeros) for rows in (1, 8, 16) for zeros in (0.5, 0.9, 0.99)]
    made += [Step(rows, fc2, layout="nk", dtype="bfloat16") for rows in (1, 8, 64)]
    return [*made, *(Step(rows, other, held_out=True) for rows in (1, 8, 16, 64))]


class Turns:
    """``run()`` multiplies the next activations by the next weights; ``judge`` the last result."""

    def __init__(self, pairs: Sequence[tuple[Any, ...]], product: Callable[..., Any]) -> None:
        self._pairs, self._product, self._last = pairs, product, -1

    def run(self) -> Any:
        """One call, on the arrays whose turn it is."""
        self._last = (self._last + 1) % len(self._pairs)
        return self._product(*self._pairs[self._last][:-1])

    def judge(self, out: torch.Tensor) -> float:
        """Error of what the last call, or the graph that ends with it, gave."""
        x, weight, bias = self._pairs[self._last][-1]
        return rounding_error(out, x.double() @ weight.double() + bias.double())


def measure_step(case: Step, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        made = generator(settings.rng(case.label), settings.device)
        (n, k), rows = case.sizes, case.rows
        weights = [normal(made, (k, n), case.dtype) / k**0.5 for _ in range(WEIGHTS)]
        bias = normal(made, (n,), case.dtype)
        xs = [
            normal(made, (rows, k), case.dtype)
            * (torch.rand(rows, k, generator=made, device=made.device) >= case.zeros)
            for _ in range(MOST_CALLS)
        ]
        truth = [(x, weights[i % WEIGHTS], bias) for i, x in enumerate(xs)]
        plan, others, contenders = _pit(case, truth, settings)
        if settings.peers:
            contenders = {**_peers(truth), **contenders}
        found = measure(contenders, settings)
    facts = {
        "rows": rows,
        "zeros": case.zeros,
        "union": float((xs[0] != 0).any(0).float().mean()),
        "without_graph": found.plain,
        **plan_facts(plan, others),
    }
    peers = [found.stats[name].median for name in ("dense", "turned") if name in found.stats]
    if peers:
        facts["over_dense"] = min(peers) / found.stats["pit"].median
    return Row(case.label, case.held_out, found.stats, facts, found.errors, ERROR_LIMIT)


def _pit(
    case: Step, truth: Sequence[tuple[Any, ...]], settings: GpuSettings
) -> tuple[Plan, Others, dict[str, Contender]]:
    """The plan once counts have arrived, other candidates of it where every one is timed, and the
    operator and them on all arrays in turn."""
    kind = "matmul" if case.layout == "kn" else "linear"
    sizes = case.rows, *case.sizes
    made = operator_for(kind, pit_tvm.Values(), case.dtype, settings.target, sizes, bias=True)
    weights: dict[int, Any] = {}
    for _, weight, _ in truth[:WEIGHTS]:
        stored = weight if kind == "matmul" else weight.t().contiguous()
        weights[id(weight)] = stored if kind == "matmul" else made.pack(rhs=stored)
    out = poisoned((case.rows, case.sizes[0]), truth[0][0])
    pairs = [(x, weights[id(w)], bias, (x, w, bias)) for x, w, bias in truth]
    plan = Pit(made, pairs[0][:-1], None).plan(out)
    turns = {"pit": Turns(pairs, lambda *arrays: made(*arrays, out=out))}
    others: Others = {}
    for name, candidate in later(plan, settings).items() if settings.every else ():
        turns[name] = Turns(pairs, partial(_run, made, candidate, poisoned(out.shape, out)))
        others[name] = candidate, turns[name].run
    return plan, others, {name: Contender(one.run, one.judge) for name, one in turns.items()}


def _run(
    made: pit_tvm.Operator, candidate: Candidate, out: torch.Tensor, *arrays: Any
) -> torch.Tensor:
    return Pit(made, arrays, None).run_candidate(candidate, out)()


def _peers(truth: Sequence[tuple[Any, ...]]) -> dict[str, Contender]:
    right = [weight.t().contiguous() for _, weight, _ in truth[:WEIGHTS]]
    dense = Turns([(*one, one) for one in truth], lambda x, w, bias: torch.addmm(bias, x, w))
    turned = Turns(
        [(x, right[i % WEIGHTS], bias, (x, w, bias)) for i, (x, w, bias) in enumerate(truth)],
        lambda x, w, bias: torch.addmm(bias, x, w.t()),
    )
    return {
        "dense": Contender(dense.run, dense.judge),
        "turned": Contender(turned.run, turned.judge),
    }


def decode_targets(rows: Sequence[Row]) -> list[Target]:
    """The goals for a few rows."""

    def here(number: int) -> Callable[[Row], bool]:
        return lambda row: (row.facts["rows"], row.facts["zeros"]) == (number, 0.95)

    goals = [
        (f"decode: {number} rows, 95 % zeros, over dense", goal, here(number))
        for number, goal in GOALS.items()
    ]
    return over_dense(rows, goals, "decode: every row")


DECODE = Suite(
    name="decode",
    title="a few rows with zeros times large weights; us",
    cases=list_steps,
    measure=measure_step,
    columns=(
        *(time_column(n, n, 1) for n in ("dense", "turned", "pit")),
        fact_column("union", "union", ".2f"),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("/dense", "over_dense", ".2f"),
        fact_column("kernel", "kernel"),
        ERRORS,
    ),
    targets=decode_targets,
)
