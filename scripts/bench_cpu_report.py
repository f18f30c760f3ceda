"""What the CPU benchmark reports of its machine, and its pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from bench_cpu_cases import HELD_OUT, Shape
from bench_report import Result, stamp
from bench_rows import SEED_KEY, Settings, Target
from quickstart import processor

from pit_tvm.schedules.contraction_space import SPARSITY
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.record import TileRecord
from pit_tvm.tile_db.store import TileStore

PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "torch")


def describe(settings: Settings, threads: int) -> dict[str, Any]:
    """Where, with what and when this run measures, as JSON values."""
    target = resolve_target("llvm")
    store = TileStore.open(device=target.device, isa=target.isa)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    library = {"numpy's BLAS": f"{blas['name']} {blas['version']}"}
    return {
        **stamp(*PACKAGES, **library),
        "device": target.device,
        "cpu": processor(),
        "threads": threads,
        "load": list(os.getloadavg()),
        "tile database": {"folder": ", ".join(store.used), "records": len(store.all())},
        "seeds": [SEED_KEY, settings.seed],
        "repeats": settings.repeats,
        "quick": settings.quick,
        "held out": [str(shape) for shape in HELD_OUT],
    }


def held_out_target() -> Target:
    """No held-out shape may be among the tasks of the tile database that this machine uses."""
    target = resolve_target("llvm")
    records = TileStore.open(device=target.device, isa=target.isa).all()
    known = sum(knows(record, shape) for record in records for shape in HELD_OUT)
    return Target("database: records of held-out shapes", 0, False, known)


def knows(record: TileRecord, shape: Shape) -> bool:
    """Whether a record was measured on ``shape``, or on the live part of a mask of that shape."""
    task = record.task
    if task is None or task.n != shape.n:
        return False
    return task.k in (shape.k, shape.k // SPARSITY) or task.m in (shape.m, shape.m // SPARSITY)


def plot(folder: Path, result: Result) -> Path:
    """Bars of the medians with their quartiles, as ``<suite>.png``; returns its path."""
    from matplotlib.figure import Figure

    rows = result.rows
    names = list(rows[0].stats)
    figure = Figure(figsize=(max(6.0, 0.7 * len(rows)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        stats = [row.stats[name] for row in rows]
        reach = [[s.median - s.q1 for s in stats], [s.q3 - s.median for s in stats]]
        places = [at + number * width for at in range(len(rows))]
        axes.bar(places, [s.median for s in stats], width, yerr=reach, label=name)
    labels = [f"{row.label}{' (held out)' if row.held_out else ''}" for row in rows]
    middle = 0.5 * (len(names) - 1) * width
    axes.set_xticks([at + middle for at in range(len(rows))], labels, rotation=60, ha="right")
    axes.set_yscale("log")
    axes.set_ylabel("us")
    axes.set_title(f"{result.suite.name}: medians and quartiles")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.suite.name}.png"
    figure.savefig(path, dpi=120)
    return path
