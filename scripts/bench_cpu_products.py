"""The suites ``dense`` and ``masks``: float32 products against numpy's and torch's.

``dense``: every row is live, the weight packed and the index built beforehand, so that a tile is
compared with BLAS on equal terms. Of the tiles that selection weighs, the one that is fastest in
a few runs is then measured afresh beside the peers.

``masks``: whole calls, index and selection included; "pit" with the weight packed once, "+ pack"
packing it in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from bench_cpu_cases import Masked, Product, list_masked, list_products
from bench_cpu_measure import (
    interleave,
    normal,
    poisoned,
    product_error,
    profiled,
    take_turns,
    times_faster,
)
from bench_cpu_pit import PitProduct
from bench_rows import (
    NEVER_BELOW,
    Column,
    Row,
    Settings,
    Stat,
    Suite,
    Target,
    block_mask,
    fact,
    fact_column,
    limits,
    time_column,
)

import pit_tvm

TRIAL_RUNS = 3  # runs of each tile to find the fastest
TILE_SHARE = 0.85  # of the better peer's speed
SPEED_UPS = {0.9: 4.0, 0.95: 7.0, 0.99: 15.0}  # over numpy's dense product, by share of zeros


def measure_dense(case: Product, settings: Settings) -> Row:
    """One shape: numpy, torch and the best tile."""
    m, n, k = case.shape.m, case.shape.n, case.shape.k
    rng = settings.rng(case.label)
    lhs, rhs = normal(rng, m, k), normal(rng, k, n)
    outs = {name: poisoned(m, n) for name in ("numpy", "torch", "pit")}
    left, right, product = (torch.from_numpy(a) for a in (lhs, rhs, outs["torch"]))

    pit, lengths = PitProduct(n, k, pit_tvm.Lengths()), np.array([m], np.int32)
    packed = pit.operator.pack(rhs=rhs)
    plan = pit.operator.explain(lhs, packed, sparsity=lengths)
    tiles = {
        str(choice): pit.launcher(choice, lhs, rhs, lengths, outs["pit"])
        for choice in plan.candidates
        if choice.kind == "pit"
    }
    trial = interleave(tiles, TRIAL_RUNS)
    best = min(trial, key=lambda name: trial[name].median)
    outs["pit"].fill(np.nan)

    seconds = take_turns(
        {
            "numpy": lambda: np.matmul(lhs, rhs, out=outs["numpy"]),
            "torch": lambda: torch.matmul(left, right, out=product),
            "pit": tiles[best],
        },
        settings.repeats,
    )
    stats = {name: Stat.of(kept) for name, kept in seconds.items()}
    facts = {
        "tile": best,
        "tiles": {name: stat.median for name, stat in trial.items()},
        "planned": str(plan.choice),
        "tuned": plan.tuned,
        "gflops": 2e-3 * m * n * k / stats["pit"].median,
        "share": times_faster(seconds, "pit", "numpy", "torch"),
    }
    errors = {name: product_error(rng, lhs, rhs, out) for name, out in outs.items()}
    return Row(case.label, case.held_out, stats, facts, errors)


def dense_targets(rows: Sequence[Row]) -> list[Target]:
    """Every shape reaches its share of the better peer's speed."""
    name = "dense: speed of the best tile over the better of numpy and torch"
    return limits(rows, name, TILE_SHARE, fact("share"))


def measure_masked(case: Masked, settings: Settings) -> Row:
    """One mask: numpy's dense product, and the operator with the weight packed and unpacked."""
    m, n, k = case.shape.m, case.shape.n, case.shape.k
    rng = settings.rng(case.label)
    mask = block_mask(rng, (m, k), case.grain, case.zeros)
    lhs, rhs = normal(rng, m, k) * mask, normal(rng, k, n)
    outs = {name: poisoned(m, n) for name in ("dense", "pit", "packing")}

    tensors = pit_tvm.op.matmul(None, n, k)
    operator = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Mask(*case.grain)})
    packed = operator.pack(rhs=rhs)

    def profile() -> Any:
        return operator.profile(lhs, packed, sparsity=mask, out=outs["pit"])

    seconds = take_turns(
        {
            "dense": lambda: np.matmul(lhs, rhs, out=outs["dense"]),
            "pit": lambda: operator(lhs, packed, sparsity=mask, out=outs["pit"]),
            "packing": lambda: operator(lhs, rhs, sparsity=mask, out=outs["packing"]),
        },
        settings.repeats,
    )
    facts = {
        "zeros": case.zeros,
        "grain": "x".join(map(str, case.grain)),
        **profiled(profile, settings.repeats),
        "speedup": times_faster(seconds, "pit", "dense"),
        "speedup_packing": times_faster(seconds, "packing", "dense"),
    }
    stats = {name: Stat.of(kept) for name, kept in seconds.items()}
    outs["pit"].fill(np.nan)
    operator(lhs, packed, sparsity=mask, out=outs["pit"])
    errors = {name: product_error(rng, lhs, rhs, out) for name, out in outs.items()}
    return Row(case.label, case.held_out, stats, facts, errors)


def masks_targets(rows: Sequence[Row]) -> list[Target]:
    """Speed-ups by share of zeros, and that no pattern is slower than dense."""
    speedup, targets = fact("speedup"), list[Target]()
    for zeros, limit in SPEED_UPS.items():
        chosen = [row for row in rows if row.facts["zeros"] == zeros]
        name = f"masks: speed-up at {100 * zeros:g} % zeros"
        targets += limits(chosen, name, limit, speedup)
    name = "masks: speed-up of every pattern"
    return targets + limits(rows, name, NEVER_BELOW, speedup)


DENSE = Suite(
    name="dense",
    title="float32 products m x n x k with every row live, medians in ms",
    cases=list_products,
    measure=measure_dense,
    columns=(
        time_column("numpy", "numpy"),
        time_column("torch", "torch"),
        time_column("best tile", "pit"),
        fact_column("GFLOP/s", "gflops", ".1f"),
        fact_column("of better", "share", ".2f"),
        Column("rel. err.", lambda row: f"{row.error:.1e}"),
        fact_column("tile", "tile"),
    ),
    targets=dense_targets,
)


MASKS = Suite(
    name="masks",
    title="float32 products, masks on lhs (grain, zeros); medians in ms, parts in us",
    cases=list_masked,
    measure=measure_masked,
    columns=(
        time_column("dense", "dense"),
        time_column("pit", "pit"),
        time_column("+ pack", "packing"),
        fact_column("index", "index_us", ".1f"),
        fact_column("select", "select_us", ".1f"),
        fact_column("predicted", "predicted_us", ".0f"),
        fact_column("covered", "covered", ".3f"),
        fact_column("speed-up", "speedup", ".2f"),
        fact_column("+ pack", "speedup_packing", ".2f"),
        Column("rel. err.", lambda row: f"{row.error:.1e}"),
        fact_column("kernel", "kernel"),
    ),
    targets=masks_targets,
)
