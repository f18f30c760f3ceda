"""Tokens with several experts in the GPU benchmark: plans, and kernels one at a time.

`pit_tvm.torch` chooses tiles for such calls by itself and shows no plan. These are the same
decisions, from the same records and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from bench_gpu_cases import Layer, Moe
from bench_gpu_measure import GpuSettings
from bench_gpu_pit import Others, detector, later

import pit_tvm
from pit_tvm.gates import PLAIN
from pit_tvm.runtime.cuda_experts_call import Form, GroupedProduct, choices_tiles
from pit_tvm.runtime.cuda_rows import RowsKernels, rates_of
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.cuda_choices import ChoicesTile
from pit_tvm.schedules.hopper_space import GROUPS
from pit_tvm.selection.gpu_choices import choices_us
from pit_tvm.selection.gpu_cost import GpuRates, GpuWork, select_gpu
from pit_tvm.structs import MicroTile, Plan, Tile
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from pit_tvm.torch import grouped_linear

ROWS = MicroTile("lhs", "m", 0, (1, 0))
IDS = "int32"  # type of the experts' ids
INDEX_BYTES = 8.0  # of one id: read, and written to a list


@dataclass(frozen=True)
class Product:
    """One product of a call: ``rows`` rows of ``experts`` weights [n, k]; the kernel's options."""

    experts: int
    rows: int
    n: int
    k: int
    dtype: str
    options: tuple[tuple[str, Any], ...]

    def plan(self, counts: tuple[int, ...], target: str, indexed: bool = False) -> Plan:
        """The decision for rows of each expert, or for none known; ``indexed``: the index too."""
        rates = _rates(target, self.dtype, self.options)
        work = GpuWork(
            float(sum(counts) if counts else self.rows),
            self.n,
            self.k,
            self.experts,
            counts,
            dict(self.options).get("share", 1),
            index_bytes=INDEX_BYTES * self.rows if indexed else None,
        )
        return select_gpu(GROUPS, ROWS, work, None, rates, self.rows)

    def tiles(self, counts: tuple[int, ...], target: str, number: int) -> list[Tile]:
        """The first tiles of the plan, and the one that runs before any counts are known."""
        plans = self.plan(counts, target).candidates[:number], self.plan((), target).candidates[:1]
        return [c.tile for candidates in plans for c in candidates if c.tile is not None]


def products_of(case: Moe | Layer) -> Iterator[Product]:
    """The products that `pit_tvm.torch` runs for a case."""
    share = {"share": case.top_k}
    if isinstance(case, Moe):
        options: list[dict[str, Any]] = [{"act": "none", **share}]
        sizes: Sequence[tuple[int, int]] = [(case.n, case.k)]
    else:
        gate = {"gate": PLAIN} if case.gated else {}
        options = [{"act": case.act, **share, **gate}, {}]
        sizes = case.products
    for (n, k), chosen in zip(sizes, options, strict=True):
        yield Product(case.experts, case.rows, n, k, case.dtype, tuple(chosen.items()))


def bytes_of(case: Layer) -> int:
    """Of the weights of one expert, in 16 bits."""
    return 2 * sum(n * k for n, k in case.products)


def choices_of(case: Layer) -> tuple[ChoicesTile, ...]:
    """What `pit_tvm.torch.moe_feed_forward` runs of a case of few tokens; else none."""
    products = (
        GroupedProduct(p.dtype, p.rows, p.experts, p.n, p.k, p.options) for p in products_of(case)
    )
    form = Form(case.act, PLAIN if case.gated else None, (False, False), ("nk", "nk"))
    return choices_tiles((IDS, case.tokens, case.top_k), "float32", form, *products)


def layer_facts(case: Layer, counts: tuple[int, ...], settings: GpuSettings) -> dict[str, Any]:
    """What ran in a layer, and what is predicted of it: index, products and the sum of rows."""
    first, second = products_of(case)
    if tiles := choices_of(case):
        cost = choices_us(case.tokens, case.top_k, case.experts, bytes_of(case))
        kernels = [str(tile) for tile in tiles]
        parts = {"products": cost}
        return {"predicted_us": cost, "parts_us": parts, "kernel": kernels, "tuned": True}
    plans = [
        first.plan(counts, settings.planned_target, indexed=True),
        second.plan(counts, settings.planned_target),
    ]
    rates = _rates(settings.planned_target, case.dtype, second.options)
    moved = 2e-3 * (case.rows + case.tokens) * case.hidden
    combine = rates.constant("launch_us") + moved / rates.constant("gather_gbps")
    costs = [plan.choice.cost_us for plan in plans]
    parts = dict(zip(("up", "down", "combine"), (*costs, combine), strict=True))
    return {
        "predicted_us": sum(parts.values()),
        "parts_us": parts,
        "kernel": [str(plan.choice) for plan in plans],
        "tuned": all(plan.tuned for plan in plans),
    }


@dataclass(frozen=True)
class Choices:
    """`pit_tvm.torch.grouped_linear` of tokens ``x`` [tokens, k] for experts ``ids``
    [tokens, top_k], in the form of `bench_gpu_pit.Pit`."""

    case: Moe
    x: torch.Tensor
    weight: torch.Tensor
    ids: torch.Tensor
    counts: tuple[int, ...]
    settings: GpuSettings

    def run(self, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that calls it once; it returns rows of its own, [tokens * top_k, n]."""
        return lambda: grouped_linear(self.x, self.weight, self.ids).flatten(0, 1)

    def plan(self, out: torch.Tensor) -> Plan:
        """What it runs once it knows how much is live."""
        (product,) = products_of(self.case)
        return product.plan(self.counts, self.settings.planned_target, indexed=True)

    def others(self, plan: Plan, settings: GpuSettings, out: torch.Tensor) -> Others:
        """As `bench_gpu_pit.Pit.others`; none in a dry run."""
        if settings.device != "cuda":
            return {}
        return {
            name: (candidate, self._run(candidate.tile, torch.full_like(out, float("nan"))))
            for name, candidate in later(plan, settings).items()
            if candidate.tile is not None
        }

    def _run(self, tile: Tile, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        (product,) = products_of(self.case)
        experts, shape = self.case.experts, tuple(self.x.shape)
        target = resolve_target(self.settings.target)
        kernels = RowsKernels(KernelCache(), target.isa)
        kernel = kernels.product(tile, experts, **dict(product.options))
        detect = detector(self.settings.target).detect

        def run() -> torch.Tensor:
            index = detect(pit_tvm.Groups(experts), self.ids, shape, ROWS)
            kernel(self.x, index.ids, index.count, self.weight, out)
            return out

        return run


@cache
def _rates(target: str, dtype: str, options: tuple[tuple[str, Any], ...]) -> GpuRates:
    info = resolve_target(target)
    store = TileStore.open(None, device=info.device, isa=info.isa)
    return rates_of(store, dtype, info.isa, "torch", dict(options))
