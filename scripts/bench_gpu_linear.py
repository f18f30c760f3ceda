"""The suite ``padding``: linear layers over the rows that exist, against cuBLAS.

* dense: all stored rows by cuBLAS, padding included;
* gather: the live rows by ``index_select``, cuBLAS, ``index_copy_``, with their ids known;
* packed: cuBLAS on rows that are packed already, which bounds the others;
* pit: the operator, lengths or row ids in, index inside, dead rows left alone (``dead="skip"``);
* new: the same into a new output, whose dead rows may hold anything, so dense is a candidate;
* zero: the same with ``dead="zero"``; index: its index alone;
* host, dense's, pace: the host's part of a call of pit and of dense, without CUDA graphs around
  them, and what a loop of Python took beside them: the host is busy with others' work at times;
* varied: the host's part where the pattern changes every 20 calls, and so may the tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_gpu_cases import Linear, list_linear
from bench_gpu_measure import (
    ERROR_LIMIT,
    HOST_ROUNDS,
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
from bench_rows import (
    ERRORS,
    NEVER_BELOW,
    Row,
    Suite,
    Target,
    fact,
    fact_column,
    limits,
    time_column,
)

import pit_tvm
from pit_tvm.structs import MicroTile, SparsitySpec

ROWS = MicroTile("lhs", "m", 0, (1, 0))
PACKED_SHARE, DENSE_SPEED_UP, GATHER_SPEED_UP = 0.95, 1.8, 2.5
LARGE_ROWS, LARGE_SIZE = 1000, 4096  # from where the share of packed cuBLAS is held


@dataclass(frozen=True)
class Data:
    """Arrays of one case: ``x`` [stored, k], ``weight`` [n, k], ``bias`` [n] or None; ``value`` and
    ``live`` tell the live rows; ``want`` float64 [live, n]."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    value: torch.Tensor
    live: torch.Tensor
    dead: torch.Tensor
    want: torch.Tensor

    def judge(self, dead: str) -> Callable[[torch.Tensor], float]:
        """Error of a padded result whose dead rows must be "untouched", "zero" or "any" thing."""

        def error(out: torch.Tensor) -> float:
            rest = out[self.dead]
            fits = {"any": True, "untouched": rest.isnan().all(), "zero": (rest == 0).all()}[dead]
            return rounding_error(out[self.live], self.want) if fits else float("inf")

        return error


def make_data(case: Linear, settings: GpuSettings) -> Data:
    """Random arrays of a case, padding as random as the rest."""
    rng = settings.rng(case.label)
    value, live = case.pattern(rng)
    made = generator(rng, settings.device)
    x = normal(made, (case.stored, case.k), case.dtype)
    weight = normal(made, (case.n, case.k), case.dtype) / case.k**0.5
    bias = normal(made, (case.n,), case.dtype) if case.gelu else None
    ids = on(settings.device, live.astype("int64"))
    is_dead = torch.ones(case.stored, dtype=torch.bool, device=settings.device)
    is_dead[ids] = False
    want = x[ids].double() @ weight.double().t()
    if bias is not None:
        want = torch.nn.functional.gelu(want + bias.double())
    return Data(x, weight, bias, on(settings.device, value), ids, is_dead.nonzero().flatten(), want)


def measure_linear(case: Linear, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        data = make_data(case, settings)
        pit = _pit(case, data, settings, "skip")
        # Dense is a candidate for new outputs only.
        out = None if settings.every else poisoned((case.stored, case.n), data.x)
        plan = pit.plan(out)
        others = pit.others(plan, settings, out)
        keep = data.judge("any" if out is None else "untouched")
        contenders = {
            **(_peers(data) if settings.peers else {}),
            "pit": Contender(pit.run(out), keep),
            **{name: Contender(run, keep) for name, (_, run) in others.items()},
        }
        if settings.peers:
            zeros = poisoned((case.stored, case.n), data.x)
            zero = _pit(case, data, settings, "zero").run(zeros)
            spec: SparsitySpec = pit_tvm.Lengths() if case.batch else pit_tvm.Rows()
            index = detection(settings, spec, data.value, data.x.shape, ROWS)
            contenders["new"] = Contender(pit.run(None), data.judge("any"))
            contenders["zero"] = Contender(zero, data.judge("zero"))
            contenders["index"] = Contender(index)
        found = measure(contenders, settings)
        host = (pit.run(out), found.stats["pit"], settings.device, contenders.get("dense"))
        stats = {**found.stats, **host_stats(*host, vary=_varied(case, data, settings))}
        facts = {
            "live": len(data.live),
            "fill": len(data.live) / case.stored,
            "sizes": [case.stored, case.n, case.k],
            "dtype": case.dtype,
            "without_graph": found.plain,
            **plan_facts(plan, others),
        }
    row = Row(case.label, case.held_out, stats, facts, found.errors, ERROR_LIMIT)
    facts |= _ratios(row, case) if settings.peers else {}
    return row


def _pit(case: Linear, data: Data, settings: GpuSettings, dead: str) -> Pit:
    arrays = (data.x, data.weight) if data.bias is None else (data.x, data.weight, data.bias)
    return Pit(operator_of(case, settings.target, dead), arrays, data.value)


def _varied(case: Linear, data: Data, settings: GpuSettings) -> Callable[[], object]:
    """What writes another pattern of the case over the one that calls are given."""
    rng = settings.rng(f"{case.label} varied")
    values = [on(settings.device, case.pattern(rng)[0]) for _ in range(HOST_ROUNDS)]
    coming = itertools.cycle(values)
    return lambda: data.value.copy_(next(coming))


def _peers(data: Data) -> dict[str, Contender]:
    packed = data.x[data.live]
    scattered = poisoned((len(data.x), data.weight.shape[0]), data.x)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, data.weight, data.bias)
        return y if data.bias is None else torch.nn.functional.gelu(y)

    def gather() -> torch.Tensor:
        return scattered.index_copy_(0, data.live, layer(data.x.index_select(0, data.live)))

    return {
        "dense": Contender(lambda: layer(data.x), data.judge("any")),
        "gather": Contender(gather, data.judge("untouched")),
        "packed": Contender(lambda: layer(packed), lambda y: rounding_error(y, data.want)),
    }


def _ratios(row: Row, case: Linear) -> dict[str, Any]:
    pit = row.us("pit")
    return {
        "bound_us": row.us("packed"),
        "best_peer": min(("dense", "gather"), key=row.us),
        "over_dense": row.us("dense") / pit,
        "new_over_dense": row.us("dense") / row.us("new"),
        "over_gather": row.us("gather") / pit,
        "over_peer": min(row.us("dense"), row.us("gather")) / pit,
        "of_bound": row.us("packed") / pit,
        "tflops": 2e-6 * row.facts["live"] * case.n * case.k / pit,
    }


def linear_targets(rows: Sequence[Row]) -> list[Target]:
    """The issue's limits for the m axis."""

    def large(row: Row) -> bool:
        return row.facts["live"] >= LARGE_ROWS and min(row.facts["sizes"][1:]) >= LARGE_SIZE

    def half(row: Row) -> bool:
        return row.label == "fc1 256x128 uniform fp16"

    share = "padding: of packed cuBLAS, 1000 rows and N, K of 4096 at least"
    dense, gather = (f"padding: fc1 256x128 half full, over {p}" for p in ("dense", "gather"))
    return [
        *limits(rows, share, PACKED_SHARE, fact("of_bound"), only=large),
        *limits(rows, dense, DENSE_SPEED_UP, fact("over_dense"), only=half),
        *limits(rows, gather, GATHER_SPEED_UP, fact("over_gather"), only=half),
        *limits(
            rows, "padding: over dense, every row, new output", NEVER_BELOW, fact("new_over_dense")
        ),
        *host_targets("padding", rows),
    ]


LINEAR = Suite(
    name="padding",
    title="linear layers over live rows (stored rows, lengths); us",
    cases=list_linear,
    measure=measure_linear,
    columns=(
        fact_column("fill", "fill", ".2f"),
        *(time_column(n, n, 1) for n in ("dense", "gather", "packed", "pit", "new", "zero")),
        time_column("index", "index", 1),
        time_column("host", "host", 1),
        time_column("varied", "host_varied", 1),
        time_column("dense's", "host_dense", 1),
        time_column("pace", "host_pace", 1),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("/dense", "over_dense", ".2f"),
        fact_column("/gather", "over_gather", ".2f"),
        fact_column("/packed", "of_bound", ".2f"),
        fact_column("TFLOP/s", "tflops", ".0f"),
        ERRORS,
    ),
    targets=linear_targets,
)
