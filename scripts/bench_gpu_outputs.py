"""The suite ``outputs``: a product of which only live blocks of the result are needed.

Which blocks live is told by a block mask, or by a mask, that may be new at every call.

* dense: cuBLAS on the whole product;
* pit: the operator with the pattern in, into a given output; index: its index alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_gpu_cases import QUICK, SHORT
from bench_gpu_grains import CUBE
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
from bench_gpu_pit import Pit, detection, internals, operator_for, plan_facts
from bench_rows import ERRORS, Row, Suite, Target, fact_column, over_dense, time_column

import pit_tvm

SHALLOW = (8192, 8192, 128)  # scores of one head of attention
STEPS = (0.5, 0.8, 0.9, 0.95, 0.99)  # dead blocks
GOALS = {0.9: 5.0, 0.95: 8.0}  # over dense, for blocks of 64x64 told by a block mask


@dataclass(frozen=True)
class Output:
    """A product of ``sizes`` m, n, k with the share ``dead`` of its result's blocks dead.

    ``grain``: rows and columns of a block. ``told`` by "blocks" or "mask".
    """

    sizes: tuple[int, int, int]
    grain: tuple[int, int]
    dead: float
    told: str = "blocks"
    dtype: str = "float16"
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        shape, grain = "x".join(map(str, self.sizes)), "x".join(map(str, self.grain))
        return f"{shape} {SHORT[self.dtype]} {grain} {self.told} {100 * self.dead:g} %"


def list_outputs(quick: bool) -> list[Output]:
    """Cases of the suite."""
    cube, shallow = (_smaller(*sizes) if quick else sizes for sizes in (CUBE, SHALLOW))
    made = [Output(cube, (64, 64), dead, told) for told in ("blocks", "mask") for dead in STEPS]
    made += [Output(cube, (128, 128), dead) for dead in STEPS]
    return [*made, *(Output(shallow, (64, 64), dead) for dead in STEPS[2:4])]


def _smaller(*sizes: int) -> tuple[int, int, int]:
    m, n, k = (max(size // QUICK, 64) for size in sizes)
    return m, n, k


@dataclass(frozen=True)
class Data:
    """``lhs`` [m, k], ``rhs`` [k, n], ``live`` blocks, ``mask`` of them, ``want`` in float64."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    live: torch.Tensor
    mask: torch.Tensor
    want: torch.Tensor

    def judge(self, out: torch.Tensor) -> float:
        """Error of the live blocks."""
        return rounding_error(out[self.mask], self.want[self.mask])


def make_data(case: Output, settings: GpuSettings) -> Data:
    """Random arrays of a case."""
    (m, n, k), (high, wide) = case.sizes, case.grain
    rng = settings.rng(case.label)
    live = on(settings.device, rng.random((-(-m // high), -(-n // wide))) >= case.dead)
    mask = live.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:m, :n].contiguous()
    made = generator(rng, settings.device)
    lhs, rhs = normal(made, (m, k), case.dtype), normal(made, (k, n), case.dtype) / k**0.5
    return Data(lhs, rhs, live, mask, lhs.double() @ rhs.double())


def outputs_operator(case: Output, target: str) -> pit_tvm.Operator:
    """The operator that computes a case."""
    kind = pit_tvm.Mask if case.told == "mask" else pit_tvm.BlockMask
    return operator_for("matmul", kind(*case.grain), case.dtype, target, case.sizes, side="out")


def measure_output(case: Output, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        data = make_data(case, settings)
        made = outputs_operator(case, settings.target)
        value = data.mask if case.told == "mask" else data.live
        pit, out = Pit(made, (data.lhs, data.rhs), value), poisoned(data.want.shape, data.lhs)
        plan = pit.plan(out)
        others = pit.others(plan, settings, out)
        dense = {"dense": Contender(lambda: data.lhs @ data.rhs, data.judge)}
        found = measure(
            {
                **(dense if settings.peers else {}),
                "pit": Contender(pit.run(out), data.judge),
                "index": Contender(_index(case, settings, pit)),
                **{name: Contender(run, data.judge) for name, (_, run) in others.items()},
            },
            settings,
        )
    facts = {
        "grain": list(case.grain),
        "dead": case.dead,
        "goal": case.sizes[2] == case.sizes[1] and case.told == "blocks",
        "without_graph": found.plain,
        **plan_facts(plan, others),
    }
    if "dense" in found.stats:
        facts["over_dense"] = found.stats["dense"].median / found.stats["pit"].median
    return Row(case.label, case.held_out, found.stats, facts, found.errors, ERROR_LIMIT)


def _index(case: Output, settings: GpuSettings, pit: Pit) -> Callable[[], Any]:
    program = internals(pit.operator).program
    route = internals(pit.operator).form.route if settings.device == "cuda" else program.routes[0]
    value = pit.arrays[0] if pit.value is None else pit.value
    return detection(settings, program.spec, value, case.sizes[:2], route.micro_tile)


def outputs_targets(rows: Sequence[Row]) -> list[Target]:
    """The goals for sparse outputs."""

    def here(dead: float) -> Callable[[Row], bool]:
        at = ([64, 64], dead)
        return lambda row: row.facts["goal"] and (row.facts["grain"], row.facts["dead"]) == at

    goals = [
        (f"outputs: 64x64, {dead:.0%} dead, over dense", goal, here(dead))
        for dead, goal in GOALS.items()
    ]
    return over_dense(rows, goals, "outputs: over dense, every row")


OUTPUTS = Suite(
    name="outputs",
    title="live blocks of a product; us",
    cases=list_outputs,
    measure=measure_output,
    columns=(
        *(time_column(n, n, 1) for n in ("dense", "pit", "index")),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("/dense", "over_dense", ".2f"),
        fact_column("kernel", "kernel"),
        ERRORS,
    ),
    targets=outputs_targets,
)
