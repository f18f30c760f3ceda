"""How the benchmark reports: tables, the JSON file, pictures, and the line of targets."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from bench_cpu_cases import HELD_OUT, Shape
from bench_cpu_measure import SEED_KEY, Row, Settings, Suite, Target
from quickstart import processor

from pit_tvm import __version__
from pit_tvm.schedules.contraction_space import SPARSITY
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.record import TileRecord
from pit_tvm.tile_db.store import TileStore

PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "torch")


@dataclass(frozen=True)
class Result:
    """Everything that was measured of one suite."""

    suite: Suite
    rows: tuple[Row, ...]

    def targets(self) -> list[Target]:
        """The suite's limits, for the rows that there are."""
        return self.suite.targets(self.rows)

    def wrong(self) -> list[str]:
        """Rows and contenders with wrong results."""
        return [f"{self.suite.name} {r.label}: {name}" for r in self.rows for name in r.wrong]


def describe(settings: Settings, threads: int) -> dict[str, Any]:
    """Where, with what and when this run measures, as JSON values."""
    target = resolve_target("llvm")
    store = TileStore.open(device=target.device, isa=target.isa)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    folder = store.path.parent.name if store.path else ""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": target.device,
        "cpu": processor(),
        "threads": threads,
        "load": list(os.getloadavg()),
        "versions": {
            "python": platform.python_version(),
            "pit-tvm": __version__,
            **{name: metadata.version(name) for name in PACKAGES},
            "numpy's BLAS": f"{blas['name']} {blas['version']}",
        },
        "tile database": {"folder": folder, "records": len(store.all())},
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


def table(result: Result) -> str:
    """The suite's rows in columns; held-out ones apart."""
    columns, title = result.suite.columns, f"{result.suite.name}: {result.suite.title}"
    if not result.rows:
        return f"{title}\nno held-out shapes: nothing here is tuned"
    lines = [["", *(column.heading for column in columns)]]
    lines += [[row.label, *(column.text(row) for column in columns)] for row in result.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]

    def text(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        # The last column may be long text, as a kernel's name is.
        return "  ".join([*padded[:-1], cells[-1]]).rstrip()

    head, *body = map(text, lines)
    ordinary = [line for line, row in zip(body, result.rows, strict=True) if not row.held_out]
    apart = [line for line, row in zip(body, result.rows, strict=True) if row.held_out]
    return "\n".join(
        [title, head, *ordinary, *(["held out, never tuned on:"] if apart else []), *apart]
    )


def to_json(where: dict[str, Any], results: Sequence[Result], targets: Sequence[Target]) -> str:
    """The whole run as one JSON document; an error that is infinite becomes null."""

    def row(measured: Row) -> dict[str, Any]:
        errors = {n: e if math.isfinite(e) else None for n, e in measured.errors.items()}
        stats = {name: asdict(stat) for name, stat in measured.stats.items()}
        return {
            "label": measured.label,
            "held_out": measured.held_out,
            "stats_us": stats,
            "facts": measured.facts,
            "errors": errors,
            "wrong": measured.wrong,
        }

    document = {
        **where,
        "load at the end": list(os.getloadavg()),
        "suites": {
            r.suite.name: {"title": r.suite.title, "rows": list(map(row, r.rows))} for r in results
        },
        "targets": [{**asdict(t), "met": None if where["quick"] else t.met} for t in targets],
    }
    return json.dumps(document, indent=1, allow_nan=False, default=float) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file by renaming a finished one, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def summary(results: Sequence[Result], targets: Sequence[Target], quick: bool) -> dict[str, Any]:
    """Targets met and not met, and wrong results; quick sizes are held to no target."""
    judged = [] if quick else targets
    return {
        "quick": quick,
        "suites": [result.suite.name for result in results],
        "met": [str(target) for target in judged if target.met],
        "not_met": [str(target) for target in judged if not target.met],
        "wrong": [text for result in results for text in result.wrong()],
    }


def plot(folder: Path, result: Result) -> Path:
    """Bars of the medians with their quartiles, as ``<suite>.png``; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result.rows
    names = list(rows[0].stats)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.7 * len(rows)), 4.5), layout="constrained")
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
    pyplot.close(figure)
    return path
