"""The suite ``layer``: a whole mixture-of-experts feed-forward layer, its gate given.

Tokens, their experts and the experts' weights in, combined rows out; every contender sorts or
indexes the ids itself:

* grouped: ``sort`` of the ids as bytes, gather, ``torch._grouped_mm`` twice, rows back in order
  and summed;
* loop: the same with one cuBLAS product for each expert, their counts known to the host;
* ogs, scatter: kernels in Triton, OpenAI's ``matmul_ogs`` and ScatterMoE, where they are installed;
* pit: ``pit_tvm.torch.moe_feed_forward``; index: its index alone;
* eager, host: the same called without a CUDA graph, and the host's part of such a call.

What lies between the products of ``grouped``, ``loop`` and ``scatter`` is compiled by torch. The
floor is that of the suite ``moe``, of both products. Memory is the peak of one call over inputs,
output, index and both intermediate results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_gpu_cases import Layer, list_layers
from bench_gpu_experts import layer_facts
from bench_gpu_measure import (
    ERROR_LIMIT,
    Contender,
    GpuSettings,
    fresh_memory,
    generator,
    host_stats,
    measure,
    memory_of,
    normal,
    on,
    rounding_error,
)
from bench_gpu_moe import ROWS, floor_us
from bench_gpu_pit import detection, detector
from bench_gpu_rivals import RIVALS, LayerData, Run, activate, rivals_of, torch_peers
from bench_rows import ERRORS, Row, Suite, Target, fact, fact_column, limits, time_column

import pit_tvm
from pit_tvm.torch import moe_feed_forward

PEERS = ("grouped", "loop", *RIVALS)


def make_data(case: Layer, settings: GpuSettings) -> LayerData:
    """Random arrays of a case; the weights of a token's experts add up to 1 if it has several."""
    rng = settings.rng(case.label)
    ids = case.route(rng).reshape(case.tokens, case.top_k)
    made = generator(rng, settings.device)
    (wide, hidden), (_, inter) = case.products
    x = normal(made, (case.tokens, hidden), case.dtype)
    up = normal(made, (case.experts, wide, hidden), case.dtype) / hidden**0.5
    down = normal(made, (case.experts, hidden, inter), case.dtype) / inter**0.5
    gates = rng.uniform(0.25, 1.0, ids.shape).astype(np.float32)
    if case.top_k > 1:
        gates /= gates.sum(1, keepdims=True)
    counts = np.bincount(ids.ravel(), minlength=case.experts).tolist()
    return LayerData(
        case, x, on(settings.device, ids), on(settings.device, gates), up, down, counts
    )


def wanted(data: LayerData) -> torch.Tensor:
    """float64 [tokens, hidden]: the layer's result."""
    order = data.ids.flatten().argsort(stable=True)
    want = torch.zeros(data.x.shape, dtype=torch.float64, device=data.x.device)
    gates = data.gates.flatten().double()
    for expert, rows in enumerate(order.split(data.counts)):
        tokens = rows // data.case.top_k
        inner = data.x[tokens].double() @ data.up[expert].double().t()
        part = activate(inner, data.case.act, data.case.gated) @ data.down[expert].double().t()
        want.index_add_(0, tokens, part * gates[rows, None])
    return want


@dataclass(frozen=True)
class Call:
    """The layer as users call it."""

    data: LayerData

    def __call__(self) -> torch.Tensor:
        """[tokens, hidden]."""
        data = self.data
        given = (data.x, data.ids, data.gates, data.up, data.down)
        return moe_feed_forward(*given, activation=data.case.act, gated=data.case.gated)

    def needed(self, settings: GpuSettings) -> int:
        """Bytes of inputs, output, index, and the rows that both products leave."""
        data, (_, (hidden, inter)) = self.data, self.data.case.products
        given = (data.x, data.ids, data.gates, data.up, data.down)
        spec = pit_tvm.Groups(data.case.experts)
        index = detector(settings.target).detect(spec, data.ids, tuple(data.x.shape), ROWS)
        rows = data.case.rows * (hidden + inter) * data.x.element_size()
        lists = index.ids.nbytes + index.count.nbytes
        return sum(array.nbytes for array in given) + data.x.nbytes + rows + int(lists)


def measure_layer(case: Layer, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device):
        data = make_data(case, settings)
        call, want = Call(data), wanted(data)

        error = partial(rounding_error, want=want)
        rivals = rivals_of(data, settings)
        runs: dict[str, Run] = {name: run for name, (_, run) in rivals.items()}
        runs = {**torch_peers(data), **runs, "pit": call}
        contenders = {name: Contender(run, error) for name, run in runs.items()}
        contenders["eager"] = Contender(call, error, capture=False)
        if settings.device == "cuda":
            spec = pit_tvm.Groups(case.experts)
            contenders["index"] = Contender(detection(settings, spec, data.ids, data.x.shape, ROWS))
        found = measure(contenders, settings)
        stats = {**found.stats, **host_stats(call, found.stats["pit"], settings.device)}
        facts = {
            "sizes": [case.experts, case.top_k, case.hidden, case.inter],
            "routing": case.routing,
            "without_graph": [name for name in found.plain if name != "eager"],
            "settings_of_rivals": {name: chosen for name, (chosen, _) in rivals.items()},
            "floor_us": sum(_floor(case, data.counts)),
            **layer_facts(case, tuple(data.counts), settings),
            **_memory(call, settings),
        }
    row = Row(case.label, case.held_out, stats, facts, found.errors, ERROR_LIMIT)
    facts |= _ratios(row, case)
    return row


def _floor(case: Layer, counts: Sequence[int]) -> list[float]:
    used = sum(count > 0 for count in counts)
    return [floor_us(case.rows, n, k, used) for n, k in case.products]


def _memory(call: Call, settings: GpuSettings) -> dict[str, Any]:
    """What one call needs at its peak, over what it must; nothing in a dry run."""
    if settings.device != "cuda":
        return {}
    data, needed = call.data, call.needed(settings)
    given = sum(a.nbytes for a in (data.x, data.ids, data.gates, data.up, data.down))
    peak = given + memory_of(call)
    return {"peak_bytes": peak, "needed_bytes": needed, "memory": peak / needed}


def _ratios(row: Row, case: Layer) -> dict[str, Any]:
    pit = row.us("pit")
    found = {f"over_{name}": row.us(name) / pit for name in row.stats if name in PEERS}
    rivals = [row.us(name) for name in RIVALS if name in row.stats]
    operations = sum(2e-6 * case.rows * n * k for n, k in case.products)
    return {
        **found,
        "over_rival": min(rivals) / pit if rivals else None,
        "bound_us": row.facts["floor_us"],
        "over_floor": pit / row.facts["floor_us"],
        "tflops": operations / pit,
    }


def layer_targets(rows: Sequence[Row]) -> list[Target]:
    """The layer is no slower than with ``_grouped_mm``, nor than the best of the rivals there."""
    with_rivals = [row for row in rows if row.facts["over_rival"] is not None]
    return [
        *limits(rows, "layer: over _grouped_mm", 1.0, fact("over_grouped")),
        *limits(with_rivals, "layer: over the best rival", 1.0, fact("over_rival")),
    ]


LAYER = Suite(
    name="layer",
    title="whole layer of experts, gate given (experts, activation, routing); us",
    cases=list_layers,
    measure=measure_layer,
    columns=(
        *(time_column(name, name, 1) for name in (*PEERS, "pit", "eager", "host", "index")),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("floor", "floor_us", ".1f"),
        fact_column("x floor", "over_floor", ".2f"),
        fact_column("/grouped", "over_grouped", ".2f"),
        fact_column("/loop", "over_loop", ".2f"),
        fact_column("/rival", "over_rival", ".2f"),
        fact_column("memory", "memory", ".2f"),
        ERRORS,
    ),
    targets=layer_targets,
)
