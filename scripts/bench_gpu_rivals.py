"""Peers of the suite ``layer``: by torch, and by kernels of others where they are installed.

Rivals are never needed, and no part of this project: put their sources on PYTHONPATH.

* ogs: OpenAI's ``triton_kernels`` with ``matmul_ogs``: github.com/triton-lang/triton,
  python/triton_kernels of the release of Triton that torch came with; vLLM's wheels hold a copy in
  vllm/third_party. The package of that name on PyPI is another one.
* scatter: ScatterMoE: github.com/shawntan/scattermoe.

Where a rival has settings, the fastest of those that are worth a try on a Hopper GPU runs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from bench_gpu_cases import Layer
from bench_gpu_measure import Contender, GpuSettings, measure

# By contender: what must be there, and the module of the benchmark that calls it.
RIVALS = {
    "ogs": (("triton_kernels", "triton_kernels.matmul_ogs"), "bench_gpu_ogs"),
    "scatter": (("scattermoe",), "bench_gpu_scatter"),
}

TRIES = 5  # replays of each setting
SMALL = torch.iinfo(torch.uint8).max + 1  # experts whose ids one pass of a sort puts in order

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class LayerData:
    """Arrays of one case: ``x`` [tokens, hidden], ``ids`` int32 and ``gates`` float32
    [tokens, top_k], ``up`` [experts, inter, hidden] or twice as wide with the gates first,
    ``down`` [experts, hidden, inter]; ``counts`` of each expert, which only ``loop`` knows."""

    case: Layer
    x: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    counts: list[int]


def rivals_of(data: LayerData, settings: GpuSettings) -> dict[str, tuple[str, Run]]:
    """The rivals that are installed, each with its fastest settings; none on a CPU."""
    found = {}
    for name, (modules, here) in RIVALS.items():
        if settings.device == "cuda" and all(map(importlib.util.find_spec, modules)):
            found[name] = fastest(importlib.import_module(here).variants(data), settings)
    return found


def fastest(runs: dict[str, Run], settings: GpuSettings) -> tuple[str, Run]:
    """The fastest of some ways to compute the same, by name."""
    if len(runs) == 1:
        return next(iter(runs.items()))
    tries = replace(settings, repeats=TRIES)
    stats = measure({name: Contender(run) for name, run in runs.items()}, tries).stats
    name = min(runs, key=lambda name: stats[name].median)
    return name, runs[name]


def activate(rows: torch.Tensor, act: str, gated: bool) -> torch.Tensor:
    """What stands between the products; gates are the first half of the columns."""
    functions = {"relu": torch.relu, "silu": torch.nn.functional.silu}
    if not gated:
        return functions[act](rows)
    gate, other = rows.chunk(2, -1)
    return functions[act](gate) * other


def combine(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Sums of each token's rows, weighted."""
    parts = rows.view(*gates.shape, -1).float() * gates[..., None]
    return parts.sum(1).to(rows.dtype)


def combine_sorted(rows: torch.Tensor, places: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """The same of rows by expert, where row ``places[choice]`` is that of a choice."""
    return combine(rows[places], gates)


def sort_ids(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted ids, int32, and the choices in their order; as bytes ids are sorted faster."""
    keys = ids.flatten().to(torch.uint8 if experts <= SMALL else torch.int32)
    ordered, choices = torch.sort(keys, stable=True)
    return ordered.int(), choices


def by_expert(ids: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Choices by expert, their tokens, where each choice stands, and the ends of the experts'
    parts, int32."""
    ordered, choices = sort_ids(ids, len(experts))
    places = torch.empty_like(choices)
    places[choices] = torch.arange(len(choices), device=ids.device)
    ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
    return choices, choices // ids.shape[1], places, ends


def index_ids(ids: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`by_expert` without the choices, for products that go forward only."""
    return by_expert(ids, experts)[1:]


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """By torch's compiler on a GPU, for one shape after another."""
    return torch.compile(function, dynamic=False) if device == "cuda" else function


def torch_peers(data: LayerData) -> dict[str, Run]:
    """``grouped`` and ``loop``."""
    case, device = data.case, data.x.device
    up, down = data.up.transpose(1, 2), data.down.transpose(1, 2)
    experts = torch.arange(case.experts, dtype=torch.int32, device=device)
    index, between, together = (
        compiled(part, device.type) for part in (index_ids, activate, combine_sorted)
    )
    (wide, hidden), _ = case.products
    inner, outer = (data.x.new_empty((case.rows, n)) for n in (wide, hidden))

    def grouped() -> torch.Tensor:
        tokens, places, ends = index(data.ids, experts)
        rows = torch._grouped_mm(data.x[tokens], up, offs=ends)
        rows = torch._grouped_mm(between(rows, case.act, case.gated), down, offs=ends)
        return together(rows, places, data.gates)

    def each(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(data.counts), weights, out.split(data.counts), strict=True)
        for part, weight, result in parts:
            if len(part):
                torch.mm(part, weight, out=result)
        return out

    def loop() -> torch.Tensor:
        tokens, places, _ = index(data.ids, experts)
        rows = each(data.x[tokens], up, inner)
        rows = each(between(rows, case.act, case.gated), down, outer)
        return together(rows, places, data.gates)

    return {"grouped": grouped, "loop": loop}
