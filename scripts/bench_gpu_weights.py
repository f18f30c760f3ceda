"""The suite ``weights``: a dense lhs times weights pruned block by block, stored either way.

Blocks of the smallest sums of magnitudes are zero, and what is zero may change at every call, as
while a model is pruned step by step.

* dense: cuBLAS on the pruned weights;
* pit: the operator with the mask in, index inside, or with the block mask, which needs none;
* bsr: torch's product of compressed blocks, conversion included, for square blocks stored [n, k].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from bench_gpu_cases import SHORT
from bench_gpu_grains import BERT, CUBE, sized
from bench_gpu_measure import (
    ERROR_LIMIT,
    Contender,
    GpuSettings,
    fresh_memory,
    generator,
    measure,
    normal,
    poisoned,
    rounding_error,
)
from bench_gpu_pit import Pit, indexing, operator_for, plan_facts
from bench_rows import ERRORS, Column, Row, Suite, Target, fact_column, over_dense, time_column

import pit_tvm

STEPS = (0.5, 0.8, 0.9, 0.95, 0.99)  # zeros
# Over dense at 90, 95 and 99 % zeros, by columns of n and of k in a block: nine tenths of what is
# wanted of an lhs with such zeros.
GOALS = {
    ("float16", (32, 64)): (1.9, 3.8, 6.7),
    ("float16", (64, 64)): (4.0, 5.8, 6.3),
    ("float16", (32, 1)): (1.8, 3.6, 6.3),
    ("float16", (1, 64)): (0.97, 1.35, 3.6),
    ("float32", (32, 1)): (4.5, 8.1, 22.5),
    ("float32", (32, 64)): (4.5, 8.1, 22.5),
    ("float32", (1, 64)): (2.7, 5.4, 13.5),
}


@dataclass(frozen=True)
class Weights:
    """A product of ``sizes`` m, n, k whose weights have the share ``zeros`` of their blocks zero.

    ``grain``: columns of n and of k in a block. ``layout``: nk or kn. ``told`` by "mask" or
    "blocks". ``lhs``: mk, or km, as a product of turned operands has left it.
    """

    sizes: tuple[int, int, int]
    grain: tuple[int, int]
    zeros: float
    layout: str = "nk"
    told: str = "mask"
    dtype: str = "float16"
    lhs: str = "mk"
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        shape, grain = "x".join(map(str, self.sizes)), "x".join(map(str, self.grain))
        kind = f"{SHORT[self.dtype]} {self.layout} {grain} {self.told}"
        beside = " lhs km" if self.lhs == "km" else ""
        return f"{shape} {kind} {100 * self.zeros:g} %{beside}"

    @property
    def stored(self) -> tuple[int, int]:
        """Extents of a block as the weights are stored."""
        return self.grain if self.layout == "nk" else (self.grain[1], self.grain[0])


def list_weights(quick: bool) -> list[Weights]:
    """Cases of the suite."""
    cube, *bert = sized((CUBE, *BERT), quick)
    made = [
        Weights(cube, grain, zeros, layout)
        for layout in ("nk", "kn")
        for grain in ((32, 64), (64, 64))
        for zeros in STEPS
    ]
    made += [
        Weights(cube, grain, zeros, layout, dtype=dtype)
        for dtype, grains in (
            ("float16", ((32, 1), (1, 64))),
            ("float32", ((32, 1), (32, 64), (1, 64))),
        )
        for layout in ("nk", "kn")
        for grain in grains
        for zeros in STEPS[-3:]
    ]
    made += [Weights(cube, (32, 1), zeros, "kn", lhs="km") for zeros in STEPS[-3:]]
    made += [Weights(cube, (64, 64), zeros, told="blocks") for zeros in STEPS]
    for m, n, k in bert:  # of whole blocks, also with --quick
        sizes = (m, -(-n // 64) * 64, -(-k // 64) * 64)
        made += [Weights(sizes, (64, 64), zeros, told="blocks") for zeros in STEPS]
    return made


def live_blocks(weight: torch.Tensor, extents: tuple[int, int], zeros: float) -> torch.Tensor:
    """bool [rows / r, columns / c]: the blocks of ``extents`` r, c with the largest sums of
    magnitudes, all but a share ``zeros`` of them."""
    rows, columns = (size // extent for size, extent in zip(weight.shape, extents, strict=True))
    sums = weight.float().abs().reshape(rows, extents[0], columns, extents[1]).sum((1, 3))
    live = torch.zeros(rows * columns, dtype=torch.bool, device=weight.device)
    live[sums.flatten().argsort()[round(zeros * rows * columns) :]] = True
    return live.reshape(rows, columns)


@dataclass(frozen=True)
class Data:
    """``lhs`` and ``weight`` as they are stored, with its zeros, ``live`` blocks, ``want`` in
    float64."""

    lhs: torch.Tensor
    weight: torch.Tensor
    live: torch.Tensor
    want: torch.Tensor
    dtype: str

    def judge(self, out: torch.Tensor) -> float:
        """Error of a whole result."""
        return rounding_error(out, self.want, self.dtype)


def make_data(case: Weights, settings: GpuSettings) -> Data:
    """Random arrays of a case, pruned."""
    made = generator(settings.rng(case.label), settings.device)
    m, n, k = case.sizes
    lhs = normal(made, (m, k), case.dtype)
    weight = normal(made, (n, k) if case.layout == "nk" else (k, n), case.dtype) / k**0.5
    live = live_blocks(weight, case.stored, case.zeros)
    weight = weight * whole(live, case.stored)
    stored = lhs if case.lhs == "mk" else lhs.t().contiguous()
    right = weight.t() if case.layout == "nk" else weight
    return Data(stored, weight, live, lhs.double() @ right.double(), case.dtype)


def whole(live: torch.Tensor, extents: tuple[int, int]) -> torch.Tensor:
    """The mask of a block mask."""
    return live.repeat_interleave(extents[0], 0).repeat_interleave(extents[1], 1)


def measure_weights(case: Weights, settings: GpuSettings) -> Row:
    """One case: every contender, correct or not."""
    with fresh_memory(settings.device), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls compressed blocks a beta
        data = make_data(case, settings)
        out = poisoned(data.want.shape, data.lhs)
        pit = _pit(case, data, settings)
        plan = pit.plan(out)
        others = pit.others(plan, settings, out)
        asked = case.told == "mask" and settings.device == "cuda"
        index = indexing(settings, pit) if asked else None
        found = measure(
            {
                **(_peers(case, data) if settings.peers else {}),
                "pit": Contender(pit.run(out), data.judge),
                **({} if index is None else {"index": Contender(index)}),
                **{name: Contender(run, data.judge) for name, (_, run) in others.items()},
            },
            settings,
        )
    facts = {
        "grain": list(case.grain),
        "zeros": case.zeros,
        "dtype": case.dtype,
        "lhs": case.lhs,
        "cube": case.sizes[0] == case.sizes[1] == case.sizes[2],
        "without_graph": found.plain,
        **plan_facts(plan, others),
    }
    facts["index_us"] = found.stats["index"].median if "index" in found.stats else 0.0
    if "dense" in found.stats:
        facts["over_dense"] = found.stats["dense"].median / found.stats["pit"].median
    return Row(case.label, case.held_out, found.stats, facts, found.errors, ERROR_LIMIT)


def weights_operator(case: Weights, target: str) -> pit_tvm.Operator:
    """The operator that computes a case."""
    kind = pit_tvm.Mask if case.told == "mask" else pit_tvm.BlockMask
    name = {"nk": "linear", "kn": "matmul" if case.lhs == "mk" else "turned"}[case.layout]
    return operator_for(name, kind(*case.stored), case.dtype, target, case.sizes, side="rhs")


def _pit(case: Weights, data: Data, settings: GpuSettings) -> Pit:
    value = whole(data.live, case.stored) if case.told == "mask" else data.live
    made = weights_operator(case, settings.target)
    return Pit(made, (data.lhs, data.weight), value)


def _peers(case: Weights, data: Data) -> dict[str, Contender]:
    left = data.lhs if case.lhs == "mk" else data.lhs.t()
    right = data.weight.t() if case.layout == "nk" else data.weight

    def bsr() -> torch.Tensor:
        return data.weight.to_sparse_bsr(case.grain) @ left.t()

    peers = {"dense": Contender(lambda: left @ right, data.judge)}
    if data.lhs.is_cuda and case.layout == "nk" and case.grain[0] == case.grain[1]:
        peers["bsr"] = Contender(bsr, capture=False)  # not judged: its result is turned
    return peers


def weights_targets(rows: Sequence[Row]) -> list[Target]:
    """The goals for weights."""

    def here(dtype: str, grain: tuple[int, int], zeros: float, lhs: str) -> Callable[[Row], bool]:
        at = (dtype, list(grain), zeros, lhs)
        return lambda row: (
            row.facts["cube"]
            and at == tuple(row.facts[name] for name in ("dtype", "grain", "zeros", "lhs"))
        )

    goals = [
        (
            f"weights: {SHORT[dtype]} {high}x{deep}{beside}, {zeros:.0%} zeros, over dense",
            goal,
            here(dtype, (high, deep), zeros, lhs),
        )
        for (dtype, (high, deep)), each in GOALS.items()
        for lhs, beside in (("mk", ""), ("km", " of lhs [k, m]"))
        for zeros, goal in zip(STEPS[-3:], each, strict=True)
    ]
    return over_dense(rows, goals, "weights: over dense, every row")


WEIGHTS = Suite(
    name="weights",
    title="a dense lhs times weights pruned in blocks; us",
    cases=list_weights,
    measure=measure_weights,
    columns=(
        time_column("dense", "dense", 1),
        time_column("pit", "pit", 1),
        fact_column("index", "index_us", ".1f"),
        fact_column("predict", "predicted_us", ".1f"),
        fact_column("/dense", "over_dense", ".2f"),
        Column("bsr", lambda row: f"{row.us('bsr'):.0f}" if "bsr" in row.stats else "-"),
        fact_column("kernel", "kernel"),
        ERRORS,
    ),
    targets=weights_targets,
)
