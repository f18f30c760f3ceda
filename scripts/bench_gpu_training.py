"""The suite ``training``: whole steps, forward and backward, with gradients to everything.

A call is one step: a result, and by a given gradient to it those to x, to all weights and to biases
or gates, by ``torch.autograd.grad``, captured in one CUDA graph. Linear layers with a bias, over
padded tokens whose gradient is 0 in padding, as behind a loss that leaves it out; by torch without
its compiler:

* dense: ``linear`` on all stored rows;
* gathered: on the live rows by ``index_select``, back by ``index_copy``, with their ids known;
* packed: on rows that are packed already, gradients packed too, which bounds the others;
* pit: ``pit_tvm.torch.linear_rows``, lengths in.

Layers of experts, the cases of the suite ``layer``:

* grouped: the layer by ``torch._grouped_mm`` and its derivatives;
* loop: the same with one cuBLAS product for each expert, their counts known to the host;
* pit: ``pit_tvm.torch.moe_feed_forward``;
* compiled: the same by ``torch.compile``, on a GPU, where that works.

What lies between the products of ``grouped`` and ``loop`` is compiled by torch, forward and
backward; nothing of ``pit`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_gpu_cases import Layer, Linear, TrainingStep, list_training
from bench_gpu_measure import (
    ERROR_LIMIT,
    Contender,
    GpuSettings,
    Measured,
    fresh_memory,
    generator,
    measure,
    normal,
    on,
    rounding_error,
)
from bench_gpu_training_experts import Tensors, make_experts, step_of, steps, wanted
from bench_rows import ERRORS, Row, Suite, Target, fact, fact_column, limits, time_column
from torch.nn import functional

from pit_tvm.torch import linear_rows

# A gradient of a layer of experts passes up to five products one after the other. Each rounds to 16
# bits, and what it rounds meets factors of up to five times their root mean square, so that the
# worst of 10^8 elements is off by 11 on a CPU, with torch's products as with ours.
EXPERTS_LIMIT = 2 * ERROR_LIMIT
KIND = "bfloat16"  # of what lies between products, also where gates have 32 bits
PEERS = ("dense", "gathered", "grouped", "loop")
GATHERED_SPEED_UP = GROUPED_SPEED_UP = 1.0


def worst_error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest `rounding_error` of several results, of weights of experts each by itself."""
    if [each.shape for each in got] != [each.shape for each in want]:
        return float("inf")
    pairs = zip(map(_matrices, got), map(_matrices, want), strict=True)
    return max(
        rounding_error(one, exact, KIND)
        for some, others in pairs
        for one, exact in zip(some, others, strict=True)
    )


def _matrices(tensor: torch.Tensor) -> Tensors:
    return tensor.unbind(0) if tensor.dim() == 3 else (tensor,)


# --------------------------------------------------------------------------------------------
# Linear layers


@dataclass(frozen=True)
class Padded:
    """Arrays of a linear layer: ``x`` [stored, k], ``weight`` [n, k] and ``bias`` [n] are leaves,
    ``dy`` [stored, n] is 0 in rows ``dead``; ``want`` float64: the result, and the gradients to x,
    weight and bias, of rows ``live`` alone."""

    case: Linear
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    dy: torch.Tensor
    lengths: torch.Tensor
    live: torch.Tensor
    dead: torch.Tensor
    want: Tensors

    @property
    def leaves(self) -> Tensors:
        """What gradients go to."""
        return self.x, self.weight, self.bias

    def act(self, rows: torch.Tensor) -> torch.Tensor:
        """What torch puts behind the layer."""
        return functional.gelu(rows) if self.case.gelu else rows

    def judge(self, zeros: bool) -> Callable[[Tensors], float]:
        """Error of a padded step, whose dead rows get no gradient, and of whose result they are
        0 with ``zeros``, else anything."""

        def error(got: Tensors) -> float:
            y, dx, *others = got
            if dx[self.dead].any() or zeros and y[self.dead].any():
                return float("inf")
            return worst_error((y[self.live], dx[self.live], *others), self.want)

        return error


def make_padded(case: Linear, settings: GpuSettings) -> Padded:
    """Random arrays of a case, padding of x as random as the rest."""
    rng = settings.rng(case.label)
    value, live = case.pattern(rng)
    made = generator(rng, settings.device)
    x = normal(made, (case.stored, case.k), case.dtype)
    weight = normal(made, (case.n, case.k), case.dtype) / case.k**0.5
    bias = normal(made, (case.n,), case.dtype)
    dy = normal(made, (case.stored, case.n), case.dtype)
    ids = on(settings.device, live.astype("int64"))
    is_dead = torch.ones(case.stored, dtype=torch.bool, device=settings.device)
    is_dead[ids] = False
    dy[is_dead] = 0.0
    leaves = [each.double().requires_grad_() for each in (x[ids], weight, bias)]
    y = functional.linear(*leaves)
    y = functional.gelu(y) if case.gelu else y
    want = (y.detach(), *torch.autograd.grad(y, leaves, dy[ids].double()))
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    dead, lengths = is_dead.nonzero().flatten(), on(settings.device, value)
    return Padded(case, x, weight, bias, dy, lengths, ids, dead, want)


def linear_steps(data: Padded) -> dict[str, Contender]:
    """Every contender of a linear layer."""
    packed = data.x.detach()[data.live].requires_grad_()
    act, rows = ("gelu" if data.case.gelu else None), data.live

    def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return data.act(functional.linear(x, weight, bias))

    def gathered(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        y = dense(x.index_select(0, rows), *rest)
        return y.new_zeros((len(x), y.shape[1])).index_copy(0, rows, y)

    def pit(*leaves: torch.Tensor) -> torch.Tensor:
        return linear_rows(*leaves, lengths=data.lengths, activation=act)

    few = step_of(dense, (packed, data.weight, data.bias), data.dy[rows])
    padded = {
        name: Contender(step_of(forward, data.leaves, data.dy), data.judge(name != "dense"))
        for name, forward in (("dense", dense), ("gathered", gathered), ("pit", pit))
    }
    return {**padded, "packed": Contender(few, lambda got: worst_error(got, data.want))}


def _measure_linear(case: Linear, settings: GpuSettings) -> tuple[Measured, dict[str, Any]]:
    with fresh_memory(settings.device):  # of what led to the data
        data = make_padded(case, settings)
    live = len(data.live)
    facts = {
        "fill": live / case.stored,
        "sizes": [case.stored, case.n, case.k],
        "operations": 6.0 * live * case.n * case.k,
    }
    return measure(linear_steps(data), settings), facts


# --------------------------------------------------------------------------------------------
# Layers of experts


def _measure_experts(case: Layer, settings: GpuSettings) -> tuple[Measured, dict[str, Any]]:
    with fresh_memory(settings.device):
        data = make_experts(case, settings)
        want = wanted(data)

    error = partial(worst_error, want=want)
    runs, missing = steps(data)
    facts: dict[str, Any] = {
        "sizes": [case.experts, case.top_k, case.hidden, case.inter],
        "routing": case.routing,
        "operations": sum(6.0 * case.rows * n * k for n, k in case.products),
        **({"without_compiled": missing} if missing else {}),
    }
    contenders = {name: Contender(run, error) for name, run in runs.items()}
    return measure(contenders, settings), facts


# --------------------------------------------------------------------------------------------


def measure_training(case: TrainingStep, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        if isinstance(case.layer, Linear):
            limit, (found, facts) = ERROR_LIMIT, _measure_linear(case.layer, settings)
        else:
            limit, (found, facts) = EXPERTS_LIMIT, _measure_experts(case.layer, settings)
    facts["without_graph"] = found.plain
    row = Row(case.label, case.held_out, found.stats, facts, found.errors, limit)
    facts |= _ratios(row)
    return row


def _ratios(row: Row) -> dict[str, Any]:
    pit = row.us("pit")
    found = {f"over_{name}": row.us(name) / pit for name in PEERS if name in row.stats}
    if "packed" in row.stats:
        found |= {"bound_us": row.us("packed"), "of_packed": row.us("packed") / pit}
    if "compiled" in row.stats:
        found["compiled_over_grouped"] = row.us("grouped") / row.us("compiled")
    return {**found, "tflops": 1e-6 * row.facts["operations"] / pit}


def training_targets(rows: Sequence[Row]) -> list[Target]:
    """No step is slower than one that gathers rows, or than one with ``_grouped_mm``."""
    targets = []
    for ratio, name, goal in (
        ("over_gathered", "training: linear layers, over gathered rows", GATHERED_SPEED_UP),
        ("over_grouped", "training: layers of experts, over _grouped_mm", GROUPED_SPEED_UP),
    ):
        some = [row for row in rows if ratio in row.facts]
        targets += limits(some, name, goal, fact(ratio))
    return targets


NAMES = ("dense", "gathered", "packed", "grouped", "loop", "pit", "compiled")
TRAINING = Suite(
    name="training",
    title="forward and backward, all gradients (linear over lengths; experts); us",
    cases=list_training,
    measure=measure_training,
    columns=(
        fact_column("live", "fill", ".2f"),
        *(time_column(name, name, 1) for name in NAMES),
        *(fact_column(f"/{name}", f"over_{name}", ".2f") for name in PEERS),
        fact_column("/packed", "of_packed", ".2f"),
        fact_column("TFLOP/s", "tflops", ".0f"),
        ERRORS,
    ),
    targets=training_targets,
)
