"""Pictures of a saved run of the GPU benchmark: one PNG for each suite, and its lines as
NAME_lines.png where one thing varies in it. They need no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pit_tvm.errors import ShapeError, mismatch

# Contenders that are drawn, in this order, where a suite has them; and facts beside them.
DRAWN = (
    "dense turned gather gathered packed whole sorted grouped loop ogs scatter cublas csr bsr "
    "blocks sort nonzero new zero ordered pit rows eager compiled index full sdpa flex flex_mask "
    "select cached"
).split()
FACTS = {"predicted_us": "predicted", "floor_us": "floor"}


def plot_file(path: Path) -> list[Path]:
    """Draw every suite of a saved run beside its file.

    Raises
    ------
    ShapeError
        The file is not what ``bench_gpu.py --json`` wrote.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        suites: dict[str, Any] = document["suites"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "a file that bench_gpu.py --json wrote"
        raise ShapeError(mismatch("--plot", expected, f"{path}: {error}")) from error
    where = f"{document.get('device', '')}, {document.get('date', '')[:10]}"
    pictures = []
    for name, suite in suites.items():
        rows = [row for row in suite["rows"] if "failed" not in row["facts"]]
        pictures += _pictures(path.parent, name, rows, where) if rows else []
    return pictures


def _pictures(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], where: str) -> list[Path]:
    drawn = [_plot(folder, name, rows, where)]
    if name in CURVES:
        drawn.append(folder / f"{name}_lines.png")
        plot_curves(drawn[-1], rows, CURVES[name], f"{name} ({where})")
    return drawn


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Microseconds of each contender and fact in the order of the rows, None where it is absent."""
    found: dict[str, list[float | None]] = {}
    for name in DRAWN:
        values = [row["stats_us"].get(name, {}).get("median") for row in rows]
        if any(value is not None for value in values):
            found[name] = values
    for fact, name in FACTS.items():
        values = [row["facts"].get(fact) for row in rows]
        if any(value is not None for value in values):
            found[name] = values
    return found


def _plot(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], where: str) -> Path:
    from matplotlib.figure import Figure

    extent = (9.0, 1.5 + 0.22 * len(rows))
    figure = Figure(figsize=extent, layout="constrained")
    axes = figure.subplots()
    for number, (label, values) in enumerate(series(rows).items()):
        known = [(value, at) for at, value in enumerate(values) if value]
        size, order = (6, 3) if label == "pit" else (4, 2)
        xs, ys = [x for x, _ in known], [y for _, y in known]
        axes.plot(xs, ys, MARKS[number % len(MARKS)], label=label, markersize=size, zorder=order)
    labels = [f"{row['label']}{' (held out)' * row['held_out']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("us, medians")
    axes.grid(axis="both", alpha=0.3)
    axes.set_title(f"{name} ({where})", fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    return path


# --------------------------------------------------------------------------------------------
# As the paper draws suites that vary one thing: a line for each pattern

MARKS = "osD^v<>PX*hpd8"
MOST_NAMES = 34  # in a column of the legend


@dataclass(frozen=True)
class Curves:
    """What is drawn over the fact ``x``: ``ratios`` to dense, facts, or ``times`` of contenders."""

    x: str
    ratios: tuple[str, ...] = ()
    times: tuple[str, ...] = ()


CURVES = {
    "conversion": Curves("zeros", times=("pit", "csr", "bsr", "blocks")),
    "granularity": Curves("zeros", ("over_dense",)),
    "tensorcore": Curves("zeros", ("over_dense", "rows_over_dense")),
    "weights": Curves("zeros", ("over_dense",)),
    "outputs": Curves("dead", ("over_dense",)),
    "sread": Curves("bytes", ("over_dense", "ordered_over_dense")),
}


def lines(
    rows: Sequence[Mapping[str, Any]], curves: Curves
) -> dict[str, list[tuple[float, float]]]:
    """Points of every line, by its name: a row's label without its end, the number and unit of
    what varies, and what is drawn."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        pattern, x = row["label"].rsplit(" ", 2)[0], row["facts"][curves.x]
        values = {name: row["facts"].get(name) for name in curves.ratios}
        values |= {name: row["stats_us"].get(name, {}).get("median") for name in curves.times}
        for name, value in values.items():
            if value is not None:
                found.setdefault(f"{pattern}, {name}", []).append((x, value))
    return {name: sorted(points) for name, points in found.items()}


def plot_curves(path: Path, rows: Sequence[Mapping[str, Any]], curves: Curves, title: str) -> None:
    """Draw the lines of a suite's rows into ``path``."""
    from matplotlib.figure import Figure

    drawn = lines(rows, curves)
    columns = 1 + len(drawn) // MOST_NAMES
    figure = Figure(figsize=(8.0 + 3.0 * columns, 5.0), layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(drawn.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker=MARKS[number % len(MARKS)], markersize=4, label=name)
    if curves.ratios:
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="dense")
    axes.set_ylabel("times as fast as dense" if curves.ratios else "us, medians")
    axes.set_xlabel(curves.x)
    axes.set_yscale("log")
    if curves.x == "bytes":
        axes.set_xscale("log", base=2)
    axes.grid(which="both", alpha=0.3)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=6, ncols=columns, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)
