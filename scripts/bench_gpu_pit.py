"""pit-tvm's operators in the GPU benchmark: compiled once, warm, and one candidate at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from bench_gpu_cases import Linear, Moe
from bench_gpu_measure import WARM_UPS, GpuSettings, poisoned, synchronize

import pit_tvm
from pit_tvm import Operator
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, Mask, MicroTile, Plan, SparsitySpec
from pit_tvm.target import resolve_target

LATER = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
MOST = 2.0  # times the cost of the chosen: candidates predicted to take longer are never timed
Others = dict[str, tuple[Candidate, Callable[[], torch.Tensor]]]


@cache
def operator(
    kind: str,
    spec: SparsitySpec,
    dtype: str,
    target: str,
    sizes: tuple[int | None, int | None],
    groups: int = 0,
    bias: bool = False,
    act: str | None = None,
    dead: str = "skip",
    side: str = "lhs",
    rows: int | None = None,
) -> Operator:
    """An operator: ``kind`` "linear", "matmul" (rhs ``[k, n]``), "turned" (lhs ``[k, m]`` too) or
    "grouped"; sizes are n and k; ``side``: the sparse operand; ``rows``: m."""
    n, k = sizes
    options: dict[str, Any] = {"dtype": dtype, "bias": bias, "activation": act}
    if kind == "grouped":
        tensors = pit_tvm.op.grouped_matmul(None, n, k, groups, transpose_rhs=True, **options)
    else:
        options |= {"transpose_lhs": kind == "turned", "transpose_rhs": kind == "linear"}
        tensors = pit_tvm.op.matmul(rows, n, k, **options)
    return pit_tvm.compile(tensors, sparse={side: spec}, target=target, dead=dead)


def internals(made: Operator) -> Any:
    """An operator's dispatcher: its planner and kernels, and calls with a candidate of choice."""
    return made._dispatcher


def sizes_for(target: str, n: int, k: int) -> tuple[int | None, int | None]:
    """Extents to compile for: GPU kernels take every size at run time."""
    return (None, None) if target.startswith("cuda") else (n, k)


def operator_for(
    kind: str,
    spec: SparsitySpec,
    dtype: str,
    target: str,
    sizes: tuple[int, int, int],
    **options: Any,
) -> Operator:
    """The operator of a product of ``sizes`` m, n, k; ``options`` as in `operator`. In float32 it
    knows them all: its kernels copy in vectors then."""
    m, n, k = sizes
    if dtype == "float32":
        return operator(kind, spec, dtype, target, (n, k), rows=m, **options)
    return operator(kind, spec, dtype, target, sizes_for(target, n, k), **options)


def operator_of(case: Linear | Moe, target: str, dead: str = "skip") -> Operator:
    """The operator that computes a case."""
    sizes = sizes_for(target, case.n, case.k)
    if isinstance(case, Moe):
        spec: SparsitySpec = pit_tvm.Groups(case.experts)
        return operator("grouped", spec, case.dtype, target, sizes, case.experts, dead=dead)
    spec = pit_tvm.Lengths() if case.batch else pit_tvm.Rows()
    act = "gelu" if case.gelu else None
    return operator("linear", spec, case.dtype, target, sizes, 0, case.gelu, act, dead)


@dataclass(frozen=True)
class Pit:
    """One operator with the arguments of one case; ``value`` None: the pattern is an array."""

    operator: Operator
    arrays: tuple[torch.Tensor, ...]
    value: torch.Tensor | None

    def run(self, out: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        """A function that calls the operator once; None: the output is new."""
        call, arrays, value = self.operator, self.arrays, self.value
        return lambda: call(*arrays, sparsity=value, out=out)

    def run_candidate(
        self, candidate: Candidate, out: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        """A function that runs one candidate of the plan, index and all."""
        dispatcher, arrays, value = internals(self.operator), self.arrays, self.value
        return lambda: dispatcher.run(arrays, value, out, choose=lambda plan: candidate)[0]

    def plan(self, out: torch.Tensor | None) -> Plan:
        """What calls with these arguments run once the operator knows how much is live."""
        device = self.arrays[0].device.type
        warm_ups = WARM_UPS if device == "cuda" else 1
        profiles = [
            self.operator.profile(*self.arrays, sparsity=self.value, out=out)
            for _ in range(warm_ups)
        ]
        synchronize(device)
        plan = profiles[-1].plan
        if plan is None:
            raise pit_tvm.errors.ShapeError("an empty case has no plan")
        return plan

    def others(self, plan: Plan, settings: GpuSettings, out: torch.Tensor | None) -> Others:
        """The candidates of a plan that `later` names, with what runs them."""
        return {
            name: (candidate, self.run_candidate(candidate, _another(out)))
            for name, candidate in later(plan, settings).items()
        }


def later(plan: Plan, settings: GpuSettings) -> dict[str, Candidate]:
    """Candidates to time besides the chosen, by "second", "third" ...: the first that have tiles,
    or with ``settings.every`` all but those that `MOST` leaves out."""
    found = [c for c in plan.candidates if c.tile is not None][: settings.tiles]
    if settings.every:
        found = [c for c in plan.candidates if c.cost_us <= MOST * plan.choice.cost_us]
    return dict(zip(LATER, (c for c in found if c is not plan.choice), strict=False))


def _another(out: torch.Tensor | None) -> torch.Tensor | None:
    """An output of its own for a candidate; None: it makes a new one each time."""
    return None if out is None else poisoned(out.shape, out)


@cache
def block_mapper(target: str, spec: SparsitySpec, micro_tile: MicroTile) -> Any:
    """What makes maps of live blocks, bands of ``micro_tile`` by 64 columns, on a GPU."""
    from pit_tvm.runtime.cuda_block_map import BlockMapper
    from pit_tvm.runtime.cuda_modules import cached_modules

    return BlockMapper(cached_modules(KernelCache(), resolve_target(target).isa), spec, micro_tile)


@cache
def detector(target: str) -> Any:
    """Detection alone: a `CudaDetector`, or a `Detector` on a CPU."""
    info = resolve_target(target)
    if info.kind == "cuda":
        from pit_tvm.runtime.cuda_detect import CudaDetector
        from pit_tvm.runtime.cuda_modules import cached_modules

        return CudaDetector(cached_modules(KernelCache(), info.isa))
    from pit_tvm.runtime.detect import Detector

    return Detector(info.tvm_target)


def detection(
    settings: GpuSettings,
    spec: SparsitySpec,
    value: torch.Tensor,
    shape: Sequence[int],
    micro_tile: MicroTile,
) -> Callable[[], Any]:
    """A function that builds the index once."""
    detect, size = detector(settings.target).detect, tuple(shape)
    given: Any = value if settings.device == "cuda" else value.numpy()
    return lambda: detect(spec, given, size, micro_tile)


def mapping(made: Operator, value: Any, shape: Sequence[int]) -> Callable[[], Any] | None:
    """A function that makes the map of live blocks once; None for operators that take lists."""
    mapper, size = getattr(internals(made), "mapper", None), tuple(shape)
    return None if mapper is None else lambda: mapper.map(value, size)


def indexing(settings: GpuSettings, pit: Pit) -> Callable[[], Any]:
    """A function that finds what lives once, as the operator of ``pit`` does by its mask."""
    made, mask = pit.operator, pit.arrays[0] if pit.value is None else pit.value
    mapped = mapping(made, mask, mask.shape)
    if mapped is not None:
        return mapped
    return detection(settings, Mask(), mask, mask.shape, internals(made).form.route.micro_tile)


def plan_facts(plan: Plan, others: Others) -> dict[str, Any]:
    """What ran, and what was predicted of it and of ``others``."""
    return {
        "predicted_us": plan.choice.cost_us,
        "parts_us": dict(plan.choice.parts),
        "kernel": str(plan.choice),
        "tuned": plan.tuned,
        "others": {name: [str(c), c.cost_us] for name, (c, _) in others.items()},
    }
